//! The engine thread's loop: choose, step, hand on.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use tether_dump::Rows;

use super::packing::pack;
use super::queue::Queue;
use super::{
    Done, Finish, Job, States, StepCapture, StepError, StepModel, StepOutput, StepSequence, Withdrawn,
};
use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::sink::{Sink, Write};

/// Runs jobs until the queue is closed.
pub(super) fn run(
    model: &dyn StepModel,
    queue: &Queue,
    sink: &Sink,
    metrics: &Metrics,
    max_batch_tokens: usize,
) {
    // Continued jobs go round: the ones stepped longest ago are at the front.
    let mut running: VecDeque<Active> = VecDeque::new();
    let mut fresh_first = true;
    loop {
        running = running.into_iter().filter_map(Active::unless_withdrawn).collect();
        let idle = running.is_empty();
        let step = queue.take(idle, |waiting| {
            let fresh = waiting.iter().map(|job| job.token_ids.len());
            let continued = running.iter().map(|active| active.tokens.len());
            // The first pick goes round, so that neither new prompts nor continued ones wait for all of the others.
            let (new, old) = if fresh_first {
                pack(fresh, continued, max_batch_tokens)
            } else {
                let (old, new) = pack(continued, fresh, max_batch_tokens);
                (new, old)
            };
            let started = waiting.drain(..new).filter_map(|job| Active::start(job, metrics));
            started.chain(running.drain(..old)).collect::<Vec<_>>()
        });
        let Some(step) = step else { break };
        fresh_first = !fresh_first;
        running.extend(execute(step, model, sink, metrics));
        metrics.running.set(i64::try_from(running.len()).unwrap_or(i64::MAX));
    }
    for active in running {
        active.job.refuse(ApiError::EngineStopped);
    }
    metrics.running.set(0);
}

/// A job that has started.
struct Active {
    job: Job,
    /// Prompt and generated tokens.
    tokens: Vec<i64>,
    /// What the embedding consumed, of all passes.
    consumed: Vec<i64>,
    states: Vec<States>,
}

impl Active {
    fn start(mut job: Job, metrics: &Metrics) -> Option<Self> {
        if !job.ticket.start() {
            job.answer_withdrawn();
            return None;
        }
        metrics.queue_seconds.observe(job.queued.elapsed().as_secs_f64());
        let tokens = std::mem::take(&mut job.token_ids);
        Some(Self { job, tokens, consumed: Vec::new(), states: Vec::new() })
    }

    fn unless_withdrawn(self) -> Option<Self> {
        match self.job.ticket.withdrawn() {
            None => Some(self),
            Some(_) => {
                let generated = self.tokens[self.job.prompt_tokens..].to_vec();
                self.job.answer_withdrawn_after(generated);
                None
            }
        }
    }

    fn sequence(&self) -> StepSequence<'_> {
        let first_pass = self.consumed.is_empty();
        let capture = self.job.capture.as_ref().and_then(|capture| {
            let first_row = match (first_pass, capture.rows()) {
                (true, _) => 0,
                // Of a later pass only the row of the newest token is new.
                (false, Rows::All) => self.tokens.len() - 1,
                (false, Rows::Prompt) => return None,
            };
            Some(StepCapture { spec: &capture.spec, first_row })
        });
        StepSequence { token_ids: &self.tokens, capture, next_token: self.job.max_new_tokens > 0 }
    }

    /// Takes in what a step gave. `Err` ends the job with an error, `Ok(Some)` with a result.
    fn advance(&mut self, output: StepOutput, metrics: &Metrics) -> Result<Option<Finish>, ApiError> {
        if output.token_ids != self.tokens {
            metrics.token_mismatches.inc();
            return Err(ApiError::StepFailed(
                "the model consumed other token IDs than the request's".to_owned(),
            ));
        }
        if self.consumed.is_empty() {
            metrics.prompt_tokens.inc_by(self.tokens.len() as u64);
            self.consumed = output.token_ids;
        } else {
            self.consumed.extend(output.token_ids.last());
        }
        self.states.extend(output.states);
        if self.job.max_new_tokens == 0 {
            return Ok(Some(Finish::Length));
        }
        let next = match output.next_token {
            Some(Some(token)) => token,
            Some(None) => {
                return Err(ApiError::NotFinite("the logits of the next token are not finite".to_owned()));
            }
            None => return Err(ApiError::StepFailed("the model gave no next token".to_owned())),
        };
        metrics.generated_tokens.inc();
        self.tokens.push(next);
        if self.job.stop_ids.contains(&next) {
            return Ok(Some(Finish::Stop(next)));
        }
        let generated = self.tokens.len() - self.job.prompt_tokens;
        Ok((generated >= self.job.max_new_tokens).then_some(Finish::Length))
    }

    fn end(self, finish: Finish, sink: &Sink) {
        let prompt = self.job.prompt_tokens;
        let output_ids = self.tokens[prompt..].to_vec();
        let done = Done { output_ids, finish, capture: None };
        match self.job.capture {
            None => {
                if self.job.ticket.finish() {
                    // A client that is gone has no use for an answer without a dump.
                    let _ = self.job.reply.send(Ok(done));
                } else {
                    Job { capture: None, ..self.job }.answer_withdrawn_after(done.output_ids);
                }
            }
            Some(capture) => {
                let mut token_ids = self.consumed;
                if capture.rows() == Rows::Prompt {
                    token_ids.truncate(prompt);
                }
                sink.submit(Write {
                    capture,
                    token_ids,
                    states: self.states,
                    done,
                    ticket: self.job.ticket,
                    reply: self.job.reply,
                });
            }
        }
    }
}

/// Runs one step; returns the jobs that go on.
fn execute(mut step: Vec<Active>, model: &dyn StepModel, sink: &Sink, metrics: &Metrics) -> Vec<Active> {
    if step.is_empty() {
        return step;
    }
    let sequences: Vec<StepSequence<'_>> = step.iter().map(Active::sequence).collect();
    let tokens: usize = sequences.iter().map(|sequence| sequence.token_ids.len()).sum();
    #[expect(clippy::cast_precision_loss, reason = "observed in buckets")]
    {
        metrics.step_tokens.observe(tokens as f64);
        metrics.step_sequences.observe(sequences.len() as f64);
    }
    let started = Instant::now();
    let outputs = guarded(model, &sequences);
    metrics.step_seconds.observe(started.elapsed().as_secs_f64());
    let outcome = if outputs.is_ok() { "ok" } else { "failed" };
    metrics.steps.with_label_values(&[outcome]).inc();
    let outputs = match outputs {
        Ok(outputs) => outputs,
        Err(error) => {
            tracing::error!(%error, sequences = step.len(), tokens, "a step failed; its requests are answered 500");
            for active in step {
                active.job.refuse(ApiError::StepFailed(error.0.clone()));
            }
            return Vec::new();
        }
    };
    let mut going_on = Vec::new();
    for (mut active, output) in step.drain(..).zip(outputs) {
        match active.advance(output, metrics) {
            Err(error) => active.job.refuse(error),
            Ok(None) => going_on.push(active),
            Ok(Some(finish)) => active.end(finish, sink),
        }
    }
    going_on
}

/// The step, with a panic (such as torch's out of memory becomes) and a wrong number of results as errors.
fn guarded(model: &dyn StepModel, sequences: &[StepSequence<'_>]) -> Result<Vec<StepOutput>, StepError> {
    // The model is only read in a step; what a panic leaves half done is dropped with the step.
    let outputs = catch_unwind(AssertUnwindSafe(|| model.step(sequences))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(StepError(text.unwrap_or("the model panicked").to_owned()))
    })?;
    if outputs.len() != sequences.len() {
        return Err(StepError(format!(
            "the model gave {} results for {} sequences",
            outputs.len(),
            sequences.len()
        )));
    }
    Ok(outputs)
}

impl Job {
    /// Ends the job with an error.
    pub(super) fn refuse(self, error: ApiError) {
        self.ticket.withdraw(Withdrawn::Gone);
        // Nobody may be listening, and then nobody needs to know.
        let _ = self.reply.send(Err(error));
    }

    /// Ends a job that was withdrawn before its first step.
    pub(super) fn answer_withdrawn(self) {
        self.answer_withdrawn_after(Vec::new());
    }

    /// Ends a job that was withdrawn after it had generated `output_ids`.
    fn answer_withdrawn_after(self, output_ids: Vec<i64>) {
        if self.ticket.withdrawn() == Some(Withdrawn::Aborted) {
            let _ = self.reply.send(Ok(Done { output_ids, finish: Finish::Aborted, capture: None }));
        }
        // Otherwise nobody is listening; dropping the job gives back all it holds.
    }
}
