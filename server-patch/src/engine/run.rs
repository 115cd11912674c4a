//! The engine thread's loop: choose, step, hand on.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use tether_dump::Rows;

use super::active::{Active, Needs};
use super::packing::Packing;
use super::queue::Queue;
use super::{
    Done, EngineOptions, Job, JobCapture, StepError, StepModel, StepOutput, StepSequence, Withdrawn,
};
use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::sink::Sink;

/// Runs jobs until the queue is closed.
pub(super) fn run<M: StepModel>(
    model: &M,
    queue: &Queue,
    sink: &Sink,
    metrics: &Metrics,
    options: EngineOptions,
) {
    let mut engine = Running {
        model,
        sink,
        metrics,
        options,
        bytes_per_token: model.cache_bytes_per_token(),
        jobs: VecDeque::new(),
    };
    metrics.kv_budget_bytes.set(i64::try_from(options.kv_budget).unwrap_or(i64::MAX));
    loop {
        engine.drop_withdrawn();
        let idle = engine.jobs.is_empty();
        let Some(parts) = queue.take(idle, |waiting| engine.choose(waiting)) else { break };
        engine.step(&parts);
        engine.show();
    }
    for active in engine.jobs.drain(..) {
        active.job.refuse(ApiError::EngineStopped);
    }
    engine.show();
}

/// Of the KV budget, the part that a text may reserve that asks for as many tokens as there is room for.
const FLEXIBLE_SHARE: u64 = 4;
/// New tokens that it has room for however long its prompt is, if the whole budget has.
const LEAST_NEW: usize = 1024;

/// The jobs that have started and not ended, the oldest first.
struct Running<'a, M: StepModel> {
    model: &'a M,
    sink: &'a Sink,
    metrics: &'a Metrics,
    options: EngineOptions,
    bytes_per_token: u64,
    jobs: VecDeque<Active<M::Cache>>,
}

impl<M: StepModel> Running<'_, M> {
    fn drop_withdrawn(&mut self) {
        if self.jobs.iter().any(|active| active.job.ticket.withdrawn().is_some()) {
            let all = std::mem::take(&mut self.jobs);
            self.jobs = all.into_iter().filter_map(Active::unless_withdrawn).collect();
            // Nothing else may come for long.
            self.show();
        }
    }

    /// Bytes that the caches of running jobs may grow to.
    fn kv_reserved(&self) -> u64 {
        self.jobs.iter().map(|active| active.needs.kv_bytes).sum()
    }

    /// Bytes of captured states that running jobs may come to hold between steps.
    fn states_reserved(&self) -> u64 {
        self.jobs.iter().map(|active| active.needs.state_bytes).sum()
    }

    /// Whether what a job needs fits beside what others hold. States of more than the whole budget fit alone.
    fn has_room(&self, needs: Needs) -> bool {
        let (kv, states) = (self.kv_reserved(), self.states_reserved());
        (needs.kv_bytes == 0 || kv + needs.kv_bytes <= self.options.kv_budget)
            && (needs.state_bytes == 0
                || states == 0
                || states + needs.state_bytes <= self.options.states_budget)
    }

    /// How many tokens each running job has in the next step, after starting as many of those that wait as fit. Waiting
    /// jobs start in order. Only one that waits for memory is overtaken, by jobs that are done after this one step: they
    /// take nothing that it waits for.
    fn choose(&mut self, waiting: &mut VecDeque<Job>) -> Vec<usize> {
        let mut packing = Packing::new(self.options.max_batch_tokens);
        let mut parts: Vec<usize> = self
            .jobs
            .iter()
            .map(|active| match active.is_decoding() {
                true => 1,
                false => packing.part_of_cached(active.tokens_left()),
            })
            .collect();
        let others_decode = self.jobs.iter().any(Active::is_decoding);
        let mut at = 0;
        let mut waits_for_memory = false;
        while let Some(job) = waiting.get_mut(at) {
            let tokens = job.token_ids.len();
            if job.flexible {
                job.max_new_tokens = job.max_new_tokens.min(self.flexible_room(tokens));
            }
            // The last token is never run.
            let cache_tokens = (tokens + job.max_new_tokens).saturating_sub(1).max(tokens);
            let cache_bytes = self.bytes_per_token * cache_tokens as u64;
            let fits = cache_bytes <= self.options.kv_budget;
            let continued = job.max_new_tokens > 1;
            // A long prompt goes in whole where it holds nobody up, else in parts.
            let in_parts = tokens > self.options.max_batch_tokens && others_decode && fits;
            let cached = in_parts || continued;
            let held = |capture: &JobCapture| in_parts || continued && capture.rows() == Rows::All;
            let needs = Needs {
                kv_bytes: if cached { cache_bytes } else { 0 },
                state_bytes: job
                    .capture
                    .as_ref()
                    .filter(|capture| held(capture))
                    .map_or(0, |capture| capture.bytes),
            };
            if continued && !fits {
                let job = waiting.remove(at).expect("it was seen there");
                job.refuse_over_kv_budget(needs.kv_bytes, self.options.kv_budget);
                continue;
            }
            if self.jobs.len() >= self.options.max_running {
                break;
            }
            if !self.has_room(needs) || (waits_for_memory && needs != Needs::default()) {
                waits_for_memory = true;
                at += 1;
                continue;
            }
            let part = match cached {
                true => packing.part_of_new_cached(tokens),
                false => packing.whole(tokens),
            };
            if part == 0 {
                break;
            }
            let job = waiting.remove(at).expect("it was seen there");
            let cache = cached.then(|| self.model.new_cache(cache_tokens));
            if let Some(active) = Active::start(job, cache, needs, self.metrics) {
                self.jobs.push_back(active);
                parts.push(part);
            }
        }
        parts
    }

    /// Most new tokens of a text that asks for as many as there is room for: it does not take the room of all others.
    fn flexible_room(&self, prompt: usize) -> usize {
        let tokens = |bytes: u64| usize::try_from(bytes / self.bytes_per_token.max(1)).unwrap_or(usize::MAX);
        // One more than the cache has room for: the last token is never run.
        let share = tokens(self.options.kv_budget / FLEXIBLE_SHARE).max(prompt + LEAST_NEW);
        let room = share.min(tokens(self.options.kv_budget));
        room.saturating_add(1).saturating_sub(prompt).max(1)
    }

    /// Runs the next `parts` of the jobs.
    fn step(&mut self, parts: &[usize]) {
        let tokens: usize = parts.iter().sum();
        if tokens == 0 {
            return;
        }
        let mut step: Vec<(Active<M::Cache>, usize)> = Vec::new();
        let mut resting = VecDeque::new();
        for (active, &part) in std::mem::take(&mut self.jobs).into_iter().zip(parts) {
            if part > 0 { step.push((active, part)) } else { resting.push_back(active) }
        }
        let mut sequences: Vec<_> = step.iter_mut().map(|(active, part)| active.sequence(*part)).collect();
        #[expect(clippy::cast_precision_loss, reason = "observed in buckets")]
        {
            self.metrics.step_tokens.observe(tokens as f64);
            self.metrics.step_sequences.observe(sequences.len() as f64);
        }
        let started = Instant::now();
        let outputs = guarded(self.model, &mut sequences);
        drop(sequences);
        self.metrics.forward_seconds.observe(started.elapsed().as_secs_f64());
        let outcome = if outputs.is_ok() { "ok" } else { "failed" };
        self.metrics.steps.with_label_values(&[outcome]).inc();
        let outputs = match outputs {
            Ok(outputs) => outputs,
            Err(error) => {
                tracing::error!(%error, sequences = step.len(), tokens, "a step failed; its requests are answered 500");
                for (active, _) in step {
                    active.job.refuse(ApiError::StepFailed(error.0.clone()));
                }
                self.jobs = resting;
                self.metrics.step_seconds.observe(started.elapsed().as_secs_f64());
                return;
            }
        };
        let mut ended = Vec::new();
        for ((mut active, part), output) in step.into_iter().zip(outputs) {
            match active.advance(part, output, self.sink, self.metrics) {
                Err(error) => ended.push((active, Err(error))),
                Ok(None) => self.jobs.push_back(active),
                Ok(Some(finish)) => ended.push((active, Ok(finish))),
            }
        }
        // Those that had no part are younger: there was no room behind the older ones.
        self.jobs.append(&mut resting);
        // Whoever is answered finds the series as they are without it.
        self.show();
        for (active, end) in ended {
            match end {
                Ok(finish) => active.end(finish, self.sink),
                Err(error) => active.job.refuse(error),
            }
        }
        self.metrics.step_seconds.observe(started.elapsed().as_secs_f64());
    }

    fn show(&self) {
        let gauge = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        self.metrics.running.set(gauge(self.jobs.len() as u64));
        self.metrics.kv_reserved_bytes.set(gauge(self.kv_reserved()));
    }
}

/// The step, with a panic (such as torch's out of memory becomes) and a wrong number of results as errors.
fn guarded<M: StepModel>(
    model: &M,
    sequences: &mut [StepSequence<'_, M::Cache>],
) -> Result<Vec<StepOutput>, StepError> {
    // The model is only read in a step; what a panic leaves half done is dropped with the step.
    let run = AssertUnwindSafe(|| model.step(sequences));
    let outputs = catch_unwind(run).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(StepError(text.unwrap_or("the model panicked").to_owned()))
    })?;
    if outputs.len() != sequences.len() {
        let (found, expected) = (outputs.len(), sequences.len());
        return Err(StepError(format!("the model gave {found} results for {expected} sequences")));
    }
    Ok(outputs)
}

impl Job {
    /// Ends the job with an error.
    pub(super) fn refuse(self, error: ApiError) {
        self.ticket.withdraw(Withdrawn::Gone);
        self.answer(Err(error));
    }

    /// Ends the job with its answer, after which its names are free for the client to use again.
    pub(super) fn answer(self, answer: Result<Done, ApiError>) {
        drop(self.names);
        // A client that is gone has no use for it; its dump is removed by whoever sees that.
        let _ = self.reply.send(answer);
    }

    fn refuse_over_kv_budget(self, needed: u64, budget: u64) {
        let (prompt, new) = (self.prompt_tokens, self.max_new_tokens);
        self.refuse(ApiError::Invalid(format!(
            "{prompt} prompt tokens and up to {new} new ones need {needed} bytes of KV cache; --kv-budget is {budget}"
        )));
    }
}
