//! What has happened so far in a run.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use serde::Serialize;

/// Why a sample of the data set has no file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// The row of the data set is not a sample.
    BadRow,
    /// It is longer than `--max-length`.
    TooLong,
    /// The server refuses it for good.
    Refused,
    /// The server failed, or its reply or dump could not be used, in every attempt.
    Server,
    /// No answer, or always busy.
    Unavailable,
    /// The dump was another request's, or the proxy withheld it as such.
    Mismatch,
    /// The hidden states are not finite.
    NotFinite,
    /// The data set changed while it was read.
    DatasetChanged,
}

/// A sample that has no file, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// Row of the data set, from 0.
    pub row: u64,
    /// Line of the data set, from 1.
    pub line: u64,
    /// The row's `id`.
    pub id: Option<String>,
    /// What kind of failure.
    pub kind: FailureKind,
    /// In words.
    pub reason: String,
    /// Attempts made.
    pub attempts: u32,
}

/// What is counted while samples are worked on.
#[derive(Debug, Default)]
pub struct Counters {
    /// Attempts that failed and were followed by another.
    pub retries: AtomicU64,
    /// Dumps that were another request's, or whose tokens were, as found here or by the proxy.
    pub mismatches: AtomicU64,
    /// Dumps with values that are not finite.
    pub not_finite: AtomicU64,
    /// Dumps fetched through the proxy, as their path cannot be read here.
    pub fetched: AtomicU64,
    /// Dumps that could not be deleted.
    pub left_behind: AtomicU64,
}

impl Counters {
    /// Counts one more.
    pub fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// What a run has done.
#[derive(Debug)]
pub struct Tally {
    /// When extraction began.
    pub started: Instant,
    /// Samples to be extracted.
    pub planned: u64,
    /// Their tokens.
    pub planned_tokens: u64,
    /// Samples whose file is written and recorded.
    pub done: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Their files' bytes.
    pub bytes: u64,
    /// Samples given up in this run.
    pub failures: Vec<Failure>,
    /// Tokens of the samples given up.
    pub failed_tokens: u64,
}

impl Tally {
    /// Nothing done yet of `planned` samples with `planned_tokens` tokens.
    pub fn new(planned: u64, planned_tokens: u64) -> Self {
        Self {
            started: Instant::now(),
            planned,
            planned_tokens,
            done: 0,
            tokens: 0,
            bytes: 0,
            failures: Vec::new(),
            failed_tokens: 0,
        }
    }

    /// Samples neither done nor given up.
    pub fn pending(&self) -> u64 {
        self.planned - self.done - self.failures.len() as u64
    }

    /// Their tokens.
    pub fn pending_tokens(&self) -> u64 {
        self.planned_tokens.saturating_sub(self.tokens + self.failed_tokens)
    }

    /// Time since the start, samples a second and tokens a second.
    pub fn rates(&self) -> (Duration, f64, f64) {
        let elapsed = self.started.elapsed();
        let seconds = elapsed.as_secs_f64().max(1e-3);
        (elapsed, self.done as f64 / seconds, self.tokens as f64 / seconds)
    }
}
