//! The capture sink: a bounded pool of threads that write dumps while the next step runs. The reply leaves a writer only
//! after its dump is published.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use tether_dump::{
    CapturePoint, Dtype, Dump, DumpLayout, FinalState, Metadata, PublishError, Rows, TokenHash,
};

use crate::engine::{JobCapture, States, Ticket};
use crate::error::ApiError;
use crate::identity::RidGuard;
use crate::metrics::{DumpOutcome, Metrics};

/// What a reply says about a published dump.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct CaptureReply {
    /// The file, or the folder.
    pub path: PathBuf,
    /// The planes by name.
    pub points: Vec<CapturePoint>,
    /// Form of the last layer's output.
    #[serde(rename = "final")]
    pub final_state: FinalState,
    /// Positions covered.
    pub rows: Rows,
    /// How many.
    pub num_tokens: usize,
    /// Number format.
    pub dtype: Dtype,
    /// Hash of the prompt's token IDs as the embedding consumed them.
    pub token_hash: TokenHash,
}

/// How and where dumps are written.
#[derive(Clone, Debug)]
pub struct SinkOptions {
    /// The dump directory.
    pub dir: PathBuf,
    /// Their form on disk.
    pub layout: DumpLayout,
    /// Whether a published dump survives a power cut.
    pub fsync: bool,
    /// Threads.
    pub writers: usize,
    /// Bytes of states that may wait or be written before the engine has to stand still.
    pub buffer_bytes: u64,
    /// Width of a plane's row.
    pub hidden_size: usize,
}

/// States that are to be written: of a prompt that has been run, or of a text that has ended.
pub(crate) struct Write {
    pub(crate) capture: JobCapture,
    /// One per row.
    pub(crate) token_ids: Vec<i64>,
    /// Rows of each pass.
    pub(crate) states: Vec<States>,
    pub(crate) ticket: Arc<Ticket>,
    /// Kept until the dump is there: nobody else may write one under these.
    pub(crate) names: Vec<Arc<RidGuard>>,
}

/// A dump that was published, with the names that must not be free before it is answered for or removed.
#[derive(Debug)]
pub struct Written {
    /// What to tell of it.
    pub capture: CaptureReply,
    /// Its names.
    pub names: Vec<Arc<RidGuard>>,
}

/// The way to the writers. Dropping it lets them finish what they were given, and waits.
pub struct Sink {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    /// A write came, or the sink was closed.
    work: Condvar,
    /// A write is through.
    room: Condvar,
    options: SinkOptions,
    metrics: Metrics,
}

#[derive(Default)]
struct State {
    writes: VecDeque<Write>,
    /// Of writes that wait or are under way.
    bytes: u64,
    /// How many those are.
    dumps: u64,
    closed: bool,
}

impl Sink {
    /// Starts the writers.
    ///
    /// # Panics
    /// When the operating system gives no thread.
    pub fn start(options: SinkOptions, metrics: Metrics) -> Self {
        let writers = options.writers.max(1);
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            work: Condvar::new(),
            room: Condvar::new(),
            options,
            metrics,
        });
        let threads = (0..writers).map(|index| {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name(format!("tether-writer-{index}"));
            thread.spawn(move || shared.work()).expect("a process that starts can have a few more threads")
        });
        Self { threads: threads.collect(), shared }
    }

    /// Hands a write on. Waits while the buffer is full: if the disk is slower than the model, the model waits for it.
    pub(crate) fn submit(&self, write: Write) {
        let bytes = write.bytes();
        let shared = &self.shared;
        let mut state = shared.lock();
        // A write larger than the whole buffer goes in when it is empty.
        if state.bytes > 0 && state.bytes + bytes > shared.options.buffer_bytes {
            let started = Instant::now();
            while state.bytes > 0 && state.bytes + bytes > shared.options.buffer_bytes {
                state = shared.room.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            shared.metrics.write_stall_seconds.inc_by(started.elapsed().as_secs_f64());
        }
        state.bytes += bytes;
        state.dumps += 1;
        shared.show(&state);
        state.writes.push_back(write);
        drop(state);
        shared.work.notify_one();
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a writer thread panicked");
            }
        }
    }
}

impl Shared {
    fn work(&self) {
        loop {
            let mut state = self.lock();
            let write = loop {
                if let Some(write) = state.writes.pop_front() {
                    break write;
                }
                if state.closed {
                    return;
                }
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            };
            drop(state);
            let bytes = write.bytes();
            // Given back whatever happens to the write, or the engine would wait for ever.
            let _room = Room { shared: self, bytes };
            // A fault in one dump must not cost the pool a thread. The client hears of it by its reply being dropped.
            let run = AssertUnwindSafe(|| write.run(&self.options, &self.metrics));
            if catch_unwind(run).is_err() {
                self.metrics.dumps.with_label_values(&[DumpOutcome::Failed.as_str()]).inc();
                tracing::error!("writing a dump panicked");
            }
        }
    }

    fn show(&self, state: &State) {
        self.metrics.write_queue_bytes.set(i64::try_from(state.bytes).unwrap_or(i64::MAX));
        self.metrics.write_queue_dumps.set(i64::try_from(state.dumps).unwrap_or(i64::MAX));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No panic can happen between two related changes of the state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Room<'a> {
    shared: &'a Shared,
    bytes: u64,
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.bytes -= self.bytes;
        state.dumps -= 1;
        self.shared.show(&state);
        drop(state);
        self.shared.room.notify_all();
    }
}

impl Write {
    fn bytes(&self) -> u64 {
        self.states.iter().map(|states| states.bytes().len() as u64).sum()
    }

    /// Writes, publishes and answers. A dump that is published stays, even if its text is aborted later.
    fn run(mut self, options: &SinkOptions, metrics: &Metrics) {
        let count = |outcome: DumpOutcome| metrics.dumps.with_label_values(&[outcome.as_str()]).inc();
        let request_id = self.capture.metadata.request_id;
        let prompt = self.capture.metadata.prompt_tokens.min(self.token_ids.len());
        self.capture.metadata.token_hash = TokenHash::of(&self.token_ids[..prompt]);
        self.capture.metadata.created = tether_dump::timestamp();
        let started = Instant::now();
        let published = self.publish(options);
        metrics.publish_seconds.observe(started.elapsed().as_secs_f64());
        let published = match published {
            Ok(published) => published,
            Err(PublishError::Cancelled) => {
                count(DumpOutcome::Cancelled);
                return;
            }
            Err(error) => {
                let (outcome, answer) = failed(error);
                count(outcome);
                tracing::error!(%request_id, error = %answer, "a capture failed");
                drop(std::mem::take(&mut self.names));
                let _ = self.capture.reply.send(Err(answer));
                return;
            }
        };
        let path = published.path;
        self.capture.reservation.publish(published.bytes);
        let capture = reply(self.capture.metadata, self.token_ids.len(), &path);
        // The names go with it: whoever has the dump is who frees them.
        if self.capture.reply.send(Ok(Written { capture, names: self.names })).is_err() {
            // The client went away after the last look: without a reply there must be no dump.
            count(DumpOutcome::Cancelled);
            remove(&path);
            return;
        }
        count(DumpOutcome::Published);
        metrics.dump_bytes.inc_by(published.bytes);
    }

    fn publish(&self, options: &SinkOptions) -> Result<tether_dump::Published, PublishError> {
        let joined: Vec<u8>;
        let hidden_states = match self.states.as_slice() {
            [states] => states.bytes(),
            passes => {
                joined = passes.iter().map(States::bytes).collect::<Vec<_>>().concat();
                &joined
            }
        };
        let dump = Dump {
            metadata: &self.capture.metadata,
            token_ids: &self.token_ids,
            hidden_states,
            hidden_size: options.hidden_size,
        };
        options.layout.publish(&options.dir, &dump, options.fsync, &|| {
            self.ticket.withdrawn().is_some() || self.capture.reply.is_closed()
        })
    }
}

/// Removes a dump that nobody will be told about.
pub(crate) fn remove(path: &Path) {
    match DumpLayout::remove(path) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => {
            tracing::error!(%error, path = %path.display(), "a dump without a reply could not be removed");
        }
    }
}

fn failed(error: PublishError) -> (DumpOutcome, ApiError) {
    match error {
        PublishError::NotFinite { .. } => (DumpOutcome::NotFinite, ApiError::NotFinite(error.to_string())),
        PublishError::AlreadyPublished { id } => (DumpOutcome::Failed, ApiError::AlreadyPublished { id }),
        PublishError::Io { ref source, .. } => {
            (DumpOutcome::Failed, ApiError::WriteFailed(format!("{error}: {source}")))
        }
        other => (DumpOutcome::Failed, ApiError::WriteFailed(other.to_string())),
    }
}

fn reply(metadata: Metadata, num_tokens: usize, path: &Path) -> CaptureReply {
    CaptureReply {
        path: path.to_owned(),
        points: metadata.points,
        final_state: metadata.final_state,
        rows: metadata.rows,
        num_tokens,
        dtype: metadata.dtype,
        token_hash: metadata.token_hash,
    }
}

#[cfg(test)]
mod tests;
