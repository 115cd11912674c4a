//! A job that has started.

use std::sync::Arc;

use tether_dump::Rows;
use tether_model::Scoring;

use super::{
    Done, DoneLogprobs, Finish, Job, JobCapture, States, StepCapture, StepOutput, StepSequence, TokenEvent,
    Withdrawn,
};
use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::sampling::{Sampler, TokenLogprob};
use crate::sink::{Sink, Write};

/// What a job holds from one step to the next, at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Needs {
    /// Bytes of its cache.
    pub(super) kv_bytes: u64,
    /// Bytes of captured states that are not at the writers yet.
    pub(super) state_bytes: u64,
}

/// A job between its first step and its end.
pub(super) struct Active<C> {
    pub(super) job: Job,
    /// What it may come to hold between steps.
    pub(super) needs: Needs,
    cache: Option<C>,
    /// Prompt and generated tokens.
    tokens: Vec<i64>,
    /// What the embedding consumed, of all passes. So many of `tokens` have been run.
    consumed: Vec<i64>,
    states: Vec<States>,
    sampler: Sampler,
    logprobs: Option<DoneLogprobs>,
}

impl<C> Active<C> {
    /// Starts the job, unless it was withdrawn.
    pub(super) fn start(mut job: Job, cache: Option<C>, needs: Needs, metrics: &Metrics) -> Option<Self> {
        if !job.ticket.start() {
            job.answer_withdrawn();
            return None;
        }
        metrics.queue_seconds.observe(job.queued.elapsed().as_secs_f64());
        let tokens = std::mem::take(&mut job.token_ids);
        let sampler =
            Sampler::new(std::mem::take(&mut job.sampling), std::mem::take(&mut job.ends), job.sample);
        let logprobs = job.logprobs.is_some().then(DoneLogprobs::default);
        let (consumed, states) = (Vec::with_capacity(tokens.len()), Vec::new());
        Some(Self { job, needs, cache, tokens, consumed, states, sampler, logprobs })
    }

    pub(super) fn unless_withdrawn(self) -> Option<Self> {
        match self.job.ticket.withdrawn() {
            None => Some(self),
            Some(_) => {
                let generated = self.tokens[self.job.prompt_tokens..].to_vec();
                self.job.answer_withdrawn_after(generated);
                None
            }
        }
    }

    /// Whether its prompt has been run.
    pub(super) fn is_decoding(&self) -> bool {
        self.consumed.len() >= self.job.prompt_tokens
    }

    /// Tokens that have not been run.
    pub(super) fn tokens_left(&self) -> usize {
        self.tokens.len() - self.consumed.len()
    }

    /// The next `part` tokens.
    pub(super) fn sequence(&mut self, part: usize) -> StepSequence<'_, C> {
        let first = self.consumed.len();
        let end = first + part;
        let wants_rows = first < self.job.prompt_tokens
            || self.job.capture.as_ref().is_some_and(|capture| capture.rows() == Rows::All);
        let capture = self.job.capture.as_ref().filter(|_| wants_rows);
        StepSequence {
            token_ids: &self.tokens[first..end],
            cache: self.cache.as_mut(),
            capture: capture.map(|capture| StepCapture { spec: &capture.spec, first_row: 0 }),
            logits: end == self.tokens.len() && self.job.max_new_tokens > 0,
            scoring: scoring(&self.job, &self.tokens, first, end),
        }
    }

    /// Takes in what a step gave for the next `part` tokens. `Err` ends the job with an error, `Ok(Some)` with a result.
    pub(super) fn advance(
        &mut self,
        part: usize,
        output: StepOutput,
        sink: &Sink,
        metrics: &Metrics,
    ) -> Result<Option<Finish>, ApiError> {
        let first = self.consumed.len();
        if output.token_ids != self.tokens[first..first + part] {
            metrics.token_mismatches.inc();
            return Err(ApiError::StepFailed(
                "the model consumed other token IDs than the request's".to_owned(),
            ));
        }
        self.consumed.extend(output.token_ids);
        let prompt = self.job.prompt_tokens;
        metrics.prompt_tokens.inc_by(self.consumed.len().min(prompt).saturating_sub(first) as u64);
        self.states.extend(output.states);
        self.add_scores(first, output.scores)?;
        let rows = self.job.capture.as_ref().map(JobCapture::rows);
        if rows == Some(Rows::Prompt) && self.is_decoding() {
            // The prompt's states are all there are to be: they are written while the text goes on.
            self.write_states(sink);
        }
        if self.consumed.len() < self.tokens.len() {
            return Ok(None);
        }
        if self.job.max_new_tokens == 0 {
            return Ok(Some(Finish::Length));
        }
        let missing = || ApiError::StepFailed("the model gave no logits".to_owned());
        let logits = output.logits.ok_or_else(missing)?;
        let no_numbers = || ApiError::NotFinite("the logits of the next token are not finite".to_owned());
        let picked = self.sampler.pick(logits, self.job.logprobs.as_ref()).ok_or_else(no_numbers)?;
        metrics.generated_tokens.inc();
        self.tokens.push(picked.token);
        if let (Some(logprobs), Some(logprob)) = (&mut self.logprobs, &picked.logprob) {
            logprobs.output.push(logprob.clone());
        }
        let finish = self.finish(picked.token);
        if let Some(events) = &self.job.events {
            // If nobody listens, the job is withdrawn before its next step.
            let is_last = finish.is_some();
            let _ = events.send(TokenEvent { token: picked.token, logprob: picked.logprob, is_last });
        }
        Ok(finish)
    }

    /// Whether the text ends with `token`, the newest.
    fn finish(&mut self, token: i64) -> Option<Finish> {
        if self.job.stop_ids.contains(&token) {
            return Some(Finish::Stop(token));
        }
        let stop_text = self.job.stop_text.as_mut();
        if let Some(text) = stop_text.and_then(|stop| stop.push(token)) {
            return Some(Finish::StopText(text));
        }
        let generated = self.tokens.len() - self.job.prompt_tokens;
        (generated >= self.job.max_new_tokens).then_some(Finish::Length)
    }

    fn add_scores(&mut self, first: usize, scores: Option<tether_model::Scores>) -> Result<(), ApiError> {
        let end = self.consumed.len();
        let expected =
            scoring(&self.job, &self.tokens, first, end).map_or(0, |scoring| scoring.targets.len());
        let scores = scores.unwrap_or_default();
        if scores.targets.len() != expected {
            return Err(ApiError::StepFailed("the model gave no log-probabilities of the prompt".to_owned()));
        }
        let Some(logprobs) = &mut self.logprobs else { return Ok(()) };
        let mut top = scores.top.into_iter();
        let mut token_ids = scores.token_ids.into_iter();
        logprobs.prompt.extend(scores.targets.into_iter().map(|logprob| TokenLogprob {
            logprob,
            top: top.next().unwrap_or_default(),
            token_ids: token_ids.next().unwrap_or_default(),
        }));
        Ok(())
    }

    /// Hands the states to the writers.
    fn write_states(&mut self, sink: &Sink) {
        let Some(capture) = self.job.capture.take() else { return };
        let rows = match capture.rows() {
            Rows::Prompt => self.job.prompt_tokens,
            Rows::All => self.consumed.len(),
        };
        self.needs.state_bytes = 0;
        sink.submit(Write {
            capture,
            token_ids: self.consumed[..rows].to_vec(),
            states: std::mem::take(&mut self.states),
            ticket: Arc::clone(&self.job.ticket),
            names: self.job.names.clone(),
        });
    }

    /// Hands the result on.
    pub(super) fn end(mut self, finish: Finish, sink: &Sink) {
        let output_ids = self.tokens[self.job.prompt_tokens..].to_vec();
        if !self.job.ticket.finish() {
            self.job.answer_withdrawn_after(output_ids);
            return;
        }
        self.write_states(sink);
        self.job.answer(Ok(Done { output_ids, finish, capture: None, logprobs: self.logprobs }));
    }
}

/// The tokens of the prompt whose log-probabilities rows `first..end` give: that behind each row, from the one wanted.
fn scoring<'a>(job: &'a Job, tokens: &'a [i64], first: usize, end: usize) -> Option<Scoring<'a>> {
    let wanted = job.logprobs.as_ref()?;
    // The first token follows no row.
    let from = wanted.prompt_from?.max(1).max(first + 1);
    let until = (end + 1).min(job.prompt_tokens);
    if from >= until {
        return None;
    }
    Some(Scoring {
        first_row: from - 1 - first,
        targets: &tokens[from..until],
        top: wanted.top,
        token_ids: &wanted.token_ids,
    })
}

impl Job {
    /// Ends a job that was withdrawn before its first step.
    pub(super) fn answer_withdrawn(self) {
        self.answer_withdrawn_after(Vec::new());
    }

    /// Ends a job that was withdrawn after it had generated `output_ids`.
    fn answer_withdrawn_after(self, output_ids: Vec<i64>) {
        if self.ticket.withdrawn() == Some(Withdrawn::Aborted) {
            let done = Done { output_ids, finish: Finish::Aborted, capture: None, logprobs: None };
            self.answer(Ok(done));
        }
        // Otherwise nobody is listening; dropping the job gives back all it holds.
    }
}
