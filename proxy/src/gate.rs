//! Lets a reply through only once its dumps are published and are those of its prompts.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use tether_dump::{ReadError, RequestId, TokenHash};
use tokio::time::Instant;

use crate::dump_files::{self, Facts, FactsError};
use crate::metrics::{Checked, GateResult, Label, Metrics, Mismatch};
use crate::tag::Tokens;

/// How long to wait before a dump that is not there is looked for again: at first, and at most.
const FIRST_GAP: Duration = Duration::from_millis(1);
const LONGEST_GAP: Duration = Duration::from_millis(50);

/// What the dump of one prompt must be.
#[derive(Clone, Debug)]
pub struct Expected {
    /// The ID of the prompt.
    pub id: RequestId,
    /// The token IDs, where the request gave them.
    pub tokens: Option<Tokens>,
    /// Tokens of the prompt as the reply states them, looked at where the request gave text.
    pub stated: Option<usize>,
}

/// A dump that is missing or not the prompt's, with both sides.
#[derive(Debug, thiserror::Error)]
#[error("the hidden states of {id} {}", describe(*reason))]
pub struct Failure {
    /// The prompt.
    pub id: RequestId,
    /// In what.
    pub reason: Mismatch,
    /// What the request was.
    pub expected: Side,
    /// What is in the dump, or why nothing could be read.
    pub found: Result<Side, String>,
}

/// What one side says of a prompt.
#[derive(Clone, Debug, Serialize)]
pub struct Side {
    /// The ID.
    pub request_id: RequestId,
    /// Tokens of the prompt, where known.
    pub prompt_tokens: Option<usize>,
    /// Hash of the prompt's tokens, where known.
    pub token_hash: Option<TokenHash>,
}

fn describe(reason: Mismatch) -> &'static str {
    match reason {
        Mismatch::Missing => "were not published in time",
        Mismatch::Unreadable => "cannot be read",
        Mismatch::RequestId => "belong to another request",
        Mismatch::Count => "are of another number of tokens",
        Mismatch::TokenHash => "are of other tokens",
    }
}

/// Waits until the dumps of all `expected` are in `dir`, at most `wait`, and compares them. Their paths in the same order.
///
/// # Errors
/// The first [`Failure`]; all are counted.
pub async fn check(
    dir: &Arc<Path>,
    expected: Vec<Expected>,
    wait: Duration,
    metrics: &Metrics,
) -> Result<Vec<PathBuf>, Failure> {
    let started = Instant::now();
    let mut paths: Vec<Option<PathBuf>> = expected.iter().map(|_| None).collect();
    let mut pending: Vec<(usize, Expected)> = expected.into_iter().enumerate().collect();
    let mut failure = None;
    let mut gap = FIRST_GAP;
    loop {
        let last = started.elapsed() >= wait;
        let mut left = Vec::new();
        for (index, expected, facts) in look(dir, pending).await {
            let result = match facts {
                Ok(Some(facts)) => compare(&expected, &facts).map(|()| facts.path),
                Ok(None) if !last => {
                    left.push((index, expected));
                    continue;
                }
                // On a network mount a file that was just published may not be readable at once.
                Err(FactsError::File(ReadError::Io { .. })) if !last => {
                    left.push((index, expected));
                    continue;
                }
                Ok(None) => Err((Mismatch::Missing, Err(format!("no dump after {} ms", wait.as_millis())))),
                Err(error) => Err((Mismatch::Unreadable, Err(error_chain(&error)))),
            };
            let checked = if expected.tokens.is_some() { Checked::Tokens } else { Checked::Id };
            match result {
                Ok(path) => {
                    metrics.gate.at(GateResult::Matched, checked).inc();
                    paths[index] = Some(path);
                }
                Err((reason, found)) => {
                    let missing = reason == Mismatch::Missing;
                    let result = if missing { GateResult::Missing } else { GateResult::Mismatched };
                    metrics.gate.at(result, checked).inc();
                    metrics.mismatches.at(reason).inc();
                    tracing::error!(request_id = %expected.id, reason = reason.text(), ?found, "dump mismatch");
                    let side = expected.side();
                    failure.get_or_insert(Failure { id: expected.id, reason, expected: side, found });
                }
            }
        }
        pending = left;
        if pending.is_empty() {
            break;
        }
        let until_end = wait.saturating_sub(started.elapsed());
        tokio::time::sleep(gap.min(until_end)).await;
        gap = (gap * 2).min(LONGEST_GAP);
    }
    metrics.gate_wait.observe(started.elapsed().as_secs_f64());
    match failure {
        Some(failure) => Err(failure),
        None => Ok(paths.into_iter().flatten().collect()),
    }
}

type Looked = (usize, Expected, Result<Option<Facts>, FactsError>);

/// Reads what is there, off the threads that serve connections: a network mount may take its time.
async fn look(dir: &Arc<Path>, pending: Vec<(usize, Expected)>) -> Vec<Looked> {
    let dir = dir.clone();
    let work = move || {
        let look = |(index, expected): (usize, Expected)| {
            let facts = dump_files::facts(&dir, expected.id);
            (index, expected, facts)
        };
        pending.into_iter().map(look).collect()
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(looked) => looked,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

type Difference = (Mismatch, Result<Side, String>);

fn compare(expected: &Expected, facts: &Facts) -> Result<(), Difference> {
    let differ = |reason, token_hash| {
        let found = Side {
            request_id: facts.request_id,
            prompt_tokens: Some(facts.prompt_tokens),
            token_hash: Some(token_hash),
        };
        Err((reason, Ok(found)))
    };
    if facts.request_id != expected.id {
        return differ(Mismatch::RequestId, facts.token_hash);
    }
    let count = expected.tokens.map(|tokens| tokens.count).or(expected.stated);
    if count.is_some_and(|count| count != facts.prompt_tokens) {
        return differ(Mismatch::Count, facts.token_hash);
    }
    // What the forward pass consumed, and what is in the file: both must be the request's, or at least the same.
    let hash = expected.tokens.map_or(facts.token_hash, |tokens| tokens.hash);
    match [facts.token_hash, facts.hash_of_tokens].into_iter().find(|found| *found != hash) {
        Some(found) => differ(Mismatch::TokenHash, found),
        None => Ok(()),
    }
}

impl Expected {
    fn side(&self) -> Side {
        Side {
            request_id: self.id,
            prompt_tokens: self.tokens.map(|tokens| tokens.count).or(self.stated),
            token_hash: self.tokens.map(|tokens| tokens.hash),
        }
    }
}

/// An error with its causes, for a reader who sees only text.
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}
