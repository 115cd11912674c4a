//! The engine: one named OS thread that owns the model, and the queue in front of it.

mod active;
mod packing;
mod pending;
mod queue;
mod run;
mod step;
#[cfg(test)]
pub(crate) mod testing;
mod ticket;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use tether_dump::{Metadata, Rows};
use tether_model::CaptureSpec;
use tokio::sync::mpsc;

pub use pending::{CaptureSender, DoneSender, Pending};
pub use step::{States, StepCapture, StepError, StepModel, StepOutput, StepSequence};
pub use ticket::{Ticket, Withdrawn};

use crate::budget::Reservation;
use crate::error::ApiError;
use crate::identity::RidGuard;
use crate::metrics::Metrics;
use crate::sampling::{Logprobs, SamplingParams, TokenLogprob};
use crate::sink::{CaptureReply, Sink};
use queue::Queue;

/// One prompt on its way through the engine.
pub struct Job {
    /// How others withdraw it, and see that it started.
    pub ticket: Arc<Ticket>,
    /// The prompt; checked against vocabulary and context.
    pub token_ids: Vec<i64>,
    /// Its length, which stays known when the engine has taken the tokens.
    pub prompt_tokens: usize,
    /// Most tokens to generate; 0 runs the prompt only.
    pub max_new_tokens: usize,
    /// Whether fewer are as good, where the KV budget has no room for so many.
    pub flexible: bool,
    /// Tokens that end the text. The one that matched is the last of the output.
    pub stop_ids: Vec<i64>,
    /// Tokens that are kept from coming before `min_new_tokens`: the model's own ends, even if they end nothing here, and
    /// those of `stop_ids`.
    pub ends: Vec<i64>,
    /// Strings that end the text.
    pub stop_text: Option<Box<dyn StopText>>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Which of the samples of its prompt it is.
    pub sample: usize,
    /// What to say of the tokens.
    pub logprobs: Option<Logprobs>,
    /// Where generated tokens go as they come.
    pub events: Option<mpsc::UnboundedSender<TokenEvent>>,
    /// What to keep.
    pub capture: Option<JobCapture>,
    /// Where the answer goes. If nobody listens any more, nothing of the job is left.
    pub reply: DoneSender,
    /// Its names, which nobody else can have as long as it runs or its dump is written.
    pub names: Vec<Arc<RidGuard>>,
    /// When it came.
    pub queued: Instant,
}

/// What to keep of a job, and what to say about it.
pub struct JobCapture {
    /// The points.
    pub spec: Arc<CaptureSpec>,
    /// The dump's metadata; token hash and time are filled in when it is written.
    pub metadata: Metadata,
    /// Its share of the dump directory.
    pub reservation: Reservation,
    /// The most bytes of states there can be.
    pub bytes: u64,
    /// Where the writers say what became of it.
    pub reply: CaptureSender,
}

impl JobCapture {
    fn rows(&self) -> Rows {
        self.metadata.rows
    }
}

/// A generated token, as it comes.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenEvent {
    /// The token.
    pub token: i64,
    /// What was asked about it.
    pub logprob: Option<TokenLogprob>,
    /// Whether the text ends with it, so that the [`Done`] follows.
    pub is_last: bool,
}

/// Watches a text for strings that end it. It is asked on the engine thread, between two steps, so that the text, its
/// count of tokens and its captured rows end with the token that completes such a string.
pub trait StopText: Send {
    /// Adds the next token; the string that the text holds now, if any.
    fn push(&mut self, token: i64) -> Option<String>;
}

/// Log-probabilities of a finished job.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DoneLogprobs {
    /// Of the prompt's tokens from the wanted position on, without the first token, which follows nothing.
    pub prompt: Vec<TokenLogprob>,
    /// Of the generated tokens.
    pub output: Vec<TokenLogprob>,
}

/// What became of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Done {
    /// The generated tokens, a stop token included.
    pub output_ids: Vec<i64>,
    /// Why there are no more.
    pub finish: Finish,
    /// The dump, if one was asked for. [`Pending`] fills it in.
    pub capture: Option<CaptureReply>,
    /// The log-probabilities, if any were asked for.
    pub logprobs: Option<DoneLogprobs>,
}

/// Why a text ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// `max_new_tokens` were generated.
    Length,
    /// This token ends texts.
    Stop(i64),
    /// It came to hold this string, which ends texts.
    StopText(String),
    /// `/abort_request` named it.
    Aborted,
}

/// The way to the engine thread. Dropping it withdraws what has not ended and waits for the thread.
pub struct Engine {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

/// How the engine packs and paces.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// Prompt tokens in a step. A longer prompt runs alone, or in parts where other texts are being continued.
    pub max_batch_tokens: usize,
    /// Texts that are continued at a time.
    pub max_running: usize,
    /// Bytes that the caches of these may take.
    pub kv_budget: u64,
    /// Bytes of captured states that jobs may hold from one step to the next.
    pub states_budget: u64,
    /// Prompts that may wait.
    pub max_queued: usize,
}

impl Engine {
    /// Starts the thread. `load` runs on it and its model lives and dies there; `loaded` is told when it is ready, or why
    /// it is not, and the thread ends then.
    ///
    /// # Panics
    /// When the operating system gives no thread.
    pub fn start<M: StepModel, E: Send + 'static>(
        options: EngineOptions,
        sink: Sink,
        metrics: Metrics,
        load: impl FnOnce() -> Result<M, E> + Send + 'static,
        loaded: impl FnOnce(Result<&M, E>) + Send + 'static,
    ) -> Self {
        let queue = Arc::new(Queue::new(options.max_queued, metrics.clone()));
        let body = {
            let queue = Arc::clone(&queue);
            move || {
                // Whatever ends this thread, nobody is left waiting for it.
                let _closing = queue.close_on_drop();
                match load() {
                    Ok(model) => {
                        loaded(Ok(&model));
                        run::run(&model, &queue, &sink, &metrics, options);
                    }
                    Err(error) => loaded(Err(error)),
                }
            }
        };
        let thread = std::thread::Builder::new().name("tether-engine".to_owned()).spawn(body);
        Self { queue, thread: Some(thread.expect("a process that starts can have one more thread")) }
    }

    /// Queues all of `jobs` or none.
    ///
    /// # Errors
    /// [`ApiError::QueueFull`], or [`ApiError::EngineStopped`].
    pub fn submit(&self, jobs: Vec<Job>) -> Result<(), ApiError> {
        self.queue.push(jobs)
    }

    /// Takes no more jobs and withdraws those that have not ended. The step that is running ends first.
    pub fn close(&self) {
        self.queue.close();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.close();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the engine thread panicked");
        }
    }
}

#[cfg(test)]
mod tests;
