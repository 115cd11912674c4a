//! One sample, from its row to its file.

mod attempt;

use std::{
    fmt,
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Instant,
};

use serde_json::Value;
use tokio::sync::{Notify, Semaphore};

use crate::{
    client::{Client, Readiness},
    dataset::{Dataset, Row},
    format::Format,
    ledger::{Identity, LedgerWriter},
    metrics::Metrics,
    points::Points,
    retry::{Attempts, Kind, Next, Policy},
    stop::Stop,
    stored::Store,
    tally::{Counters, Failure, FailureKind},
};

use attempt::AttemptError;

/// A durable step of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The reply is here and the dump noted for deletion.
    Leased,
    /// The file has its name; the ledger does not know it.
    FileWritten,
    /// The ledger knows it; the dump is still there.
    Committed,
}

/// Called after each durable step of a row. Answering `false` ends the sample there and the run with it, which leaves on
/// disk what a crash at that point would leave. For tests of resuming.
#[derive(Clone)]
pub struct StepHook(pub Arc<dyn Fn(Step, u64) -> bool + Send + Sync>);

impl fmt::Debug for StepHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StepHook")
    }
}

/// What every sample of a run shares.
#[derive(Debug)]
pub struct Extractor {
    pub(crate) client: Client,
    pub(crate) dataset: Dataset,
    pub(crate) format: Box<dyn Format>,
    pub(crate) points: Option<Points>,
    pub(crate) capture: Value,
    pub(crate) store: Store,
    pub(crate) staging: PathBuf,
    pub(crate) ledger: LedgerWriter,
    pub(crate) policy: Policy,
    /// Requests in flight.
    pub(crate) requests: Semaphore,
    /// Dumps being checked and written.
    pub(crate) writers: Semaphore,
    pub(crate) counters: Counters,
    pub(crate) metrics: Metrics,
    pub(crate) stop: Stop,
    pub(crate) identity: Mutex<Option<Identity>>,
    /// A dump of this process has had the identity that the ledger has.
    pub(crate) confirmed: AtomicBool,
    pub(crate) last_answer: Mutex<Option<Instant>>,
    /// Samples that are tried again.
    pub(crate) retrying: AtomicUsize,
    /// Told when there is one more of them.
    pub(crate) one_more_retries: Notify,
    pub(crate) on_step: Option<StepHook>,
}

/// How one sample ended.
#[derive(Debug)]
pub enum Outcome {
    /// Its file is written and recorded.
    Done {
        /// Its tokens.
        tokens: u64,
        /// Its file's length.
        bytes: u64,
    },
    /// It was given up.
    Failed {
        /// Its tokens.
        tokens: u64,
        /// Why.
        failure: Failure,
    },
    /// The run stops before its end was known.
    Pending,
}

impl Extractor {
    /// Whether the server is known to give what the run needs.
    pub fn is_confirmed(&self) -> bool {
        self.confirmed.load(Ordering::Acquire)
    }

    /// What the server is, once a dump has told.
    pub fn identity(&self) -> Option<Identity> {
        self.identity.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Works on one row until it is done or given up, or the run stops.
    pub async fn extract(self: Arc<Self>, row: Row) -> Outcome {
        let mut attempts = Attempts::new(self.policy);
        let mut retrying = None;
        loop {
            if self.stop.is_asked() {
                return Outcome::Pending;
            }
            let began = Instant::now();
            let error = match self.attempt(&row).await {
                Ok((tokens, bytes)) => return Outcome::Done { tokens, bytes },
                Err(error) => error,
            };
            let Some(kind) = error.retry_kind() else {
                // Nothing that another sample could do better.
                self.stop.ask(error.to_string());
                return Outcome::Pending;
            };
            let last_answer = *self.last_answer.lock().unwrap_or_else(PoisonError::into_inner);
            // Either another sample was answered meanwhile, or the proxy says that its server is up.
            let alive = kind == Kind::Unreachable
                && (last_answer.is_some_and(|answer| answer > began)
                    || self.client.readiness().await == Readiness::Ready);
            match attempts.failed(kind, began, alive, last_answer, Instant::now()) {
                Next::GiveUp => return self.given_up(&row, &error, attempts.made),
                Next::Outage => {
                    let seconds = self.policy.patience.as_secs();
                    self.stop.ask(format!("nothing was answered for {seconds} s; last: {error}"));
                    return Outcome::Pending;
                }
                Next::After(pause) => {
                    Counters::add(&self.counters.retries);
                    self.metrics.retries.at(kind.into()).inc();
                    retrying.get_or_insert_with(|| Retrying::begin(&self));
                    tracing::debug!(row = row.row, line = row.line, %error, ?pause, "an attempt failed");
                    tokio::select! {
                        () = tokio::time::sleep(pause) => {}
                        () = self.stop.asked() => return Outcome::Pending,
                    }
                }
            }
        }
    }

    fn given_up(&self, row: &Row, error: &AttemptError, attempts: u32) -> Outcome {
        let (kind, reason) = (error.failure_kind(), error.to_string());
        tracing::warn!(row = row.row, line = row.line, attempts, reason, "a sample has failed");
        let id = self.dataset.read(row).ok().and_then(|sample| sample.id);
        let failure = Failure { row: row.row, line: row.line, id, kind, reason, attempts };
        Outcome::Failed { tokens: row.tokens, failure }
    }
}

/// Counts a sample among those that are tried again, until dropped.
struct Retrying<'a>(&'a Extractor);

impl<'a> Retrying<'a> {
    fn begin(extractor: &'a Extractor) -> Self {
        extractor.retrying.fetch_add(1, Ordering::Relaxed);
        extractor.one_more_retries.notify_one();
        Self(extractor)
    }
}

impl Drop for Retrying<'_> {
    fn drop(&mut self) {
        self.0.retrying.fetch_sub(1, Ordering::Relaxed);
    }
}

impl FailureKind {
    /// Whether a run of such failures says something about the server rather than about the samples; `confirmed` is
    /// whether the server has done any sample as it should. Until then a refusal may be one of the run's settings.
    pub(crate) fn blames_the_server(self, confirmed: bool) -> bool {
        match self {
            Self::Server | Self::Unavailable | Self::Mismatch | Self::NotFinite => true,
            Self::Refused => !confirmed,
            Self::BadRow | Self::TooLong | Self::DatasetChanged => false,
        }
    }
}
