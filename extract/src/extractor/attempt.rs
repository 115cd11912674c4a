//! One attempt at one sample.

use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, atomic::Ordering},
    time::Instant,
};

use bytes::Bytes;
use serde::Serialize;
use serde_json::Value;
use tempfile::TempPath;
use tether_dump::{DumpFile, DumpLayout, Head, RequestId, VerifyError};

use super::{Extractor, Step};
use crate::{
    check::{BadDump, Expected, check_identity},
    client::{CallError, FetchError, Reply, causes},
    dataset::{ReadRowError, Row, Sample},
    format::WriteError,
    ledger::{Identity, Lease, Stored},
    metrics::{Answer, Counted},
    retry::Kind,
    tally::{Counters, FailureKind},
};

/// Why an attempt brought no file.
#[derive(Debug)]
pub(super) enum AttemptError {
    Row(ReadRowError),
    Call(CallError),
    /// The dump was not at its path, and the proxy did not have it either.
    Gone {
        path: Option<PathBuf>,
        error: CallError,
    },
    Dump(BadDump),
    /// A value is beyond the range of the file's element type.
    Value(WriteError),
    /// Nothing that has to do with this sample: the disk, the ledger, another model. The run stops.
    Fatal(String),
}

impl std::fmt::Display for AttemptError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Row(error) => f.write_str(&causes(error)),
            Self::Call(error) => write!(f, "{error}"),
            Self::Gone { path: Some(path), error } => {
                write!(f, "the dump cannot be read at `{}`, nor fetched: {error}", path.display())
            }
            Self::Gone { path: None, error } => {
                write!(f, "the reply names no dump, and none can be fetched: {error}")
            }
            Self::Dump(error) => f.write_str(&causes(error)),
            Self::Value(error) => f.write_str(&causes(error)),
            Self::Fatal(reason) => f.write_str(reason),
        }
    }
}

impl AttemptError {
    /// What it says about another attempt; `None` if the run is to stop.
    pub(super) fn retry_kind(&self) -> Option<Kind> {
        match self {
            Self::Row(_) => Some(Kind::Final),
            Self::Call(error) => Some(Kind::of(error)),
            Self::Gone { .. } | Self::Dump(_) | Self::Value(_) => Some(Kind::Counted),
            Self::Fatal(_) => None,
        }
    }

    pub(super) fn failure_kind(&self) -> FailureKind {
        match self {
            Self::Row(_) => FailureKind::DatasetChanged,
            Self::Call(CallError::Mismatch { .. }) => FailureKind::Mismatch,
            Self::Call(error) => match Kind::of(error) {
                Kind::Final | Kind::Hopeless => FailureKind::Refused,
                Kind::Counted => FailureKind::Server,
                Kind::Busy(_) | Kind::Unreachable => FailureKind::Unavailable,
            },
            Self::Value(_) | Self::Dump(BadDump::Verify(VerifyError::NotFinite { .. })) => {
                FailureKind::NotFinite
            }
            Self::Dump(error) if error.is_mismatch() => FailureKind::Mismatch,
            Self::Gone { .. } | Self::Dump(_) => FailureKind::Server,
            Self::Fatal(_) => FailureKind::Server,
        }
    }
}

#[derive(Serialize)]
struct Generate<'a> {
    input_ids: &'a [i64],
    sampling_params: SamplingParams,
    stream: bool,
    capture: &'a Value,
}

#[derive(Serialize)]
struct SamplingParams {
    max_new_tokens: u32,
}

/// Where this process reads a dump.
enum Source {
    /// At the path that the reply gave: the directory is shared.
    Shared(PathBuf),
    /// In a copy fetched through the proxy, removed on drop.
    Fetched(TempPath),
}

impl Source {
    fn path(&self) -> &Path {
        match self {
            Self::Shared(path) => path,
            Self::Fetched(path) => path,
        }
    }
}

impl Extractor {
    /// Asks for the row's hidden states once and makes its file of them. Returns its tokens and the file's bytes.
    pub(super) async fn attempt(self: &Arc<Self>, row: &Row) -> Result<(u64, u64), AttemptError> {
        let (sample, reply) = self.ask(row).await?;
        let lease = Lease { request_id: reply.request_id, path: reply.path.clone() };
        self.ledger.lease(lease.clone()).map_err(|error| AttemptError::Fatal(error.to_string()))?;
        self.metrics.ledger_dumps.inc();
        self.step(Step::Leased, row)?;

        let permit = self.writers.acquire().await.expect("the semaphore is never closed");
        let source = self.locate(&lease).await?;
        let this = Arc::clone(self);
        let row = *row;
        let work =
            move || this.store_sample(&row, &sample, &reply, source.path()).map(|stored| (stored, source));
        let started = Instant::now();
        let writing = Counted::up(&self.metrics.writing);
        let result = tokio::task::spawn_blocking(work).await;
        self.metrics.store_seconds.observe(started.elapsed().as_secs_f64());
        drop((permit, writing));
        let result = result
            .unwrap_or_else(|error| Err(AttemptError::Fatal(format!("writing a sample panicked: {error}"))));
        match result {
            Ok((stored, source)) => {
                drop(source);
                self.step(Step::Committed, &row)?;
                self.discard(lease).await?;
                Ok((stored.tokens, stored.fingerprint.bytes))
            }
            // A dump that is not this request's is another's, or the evidence of a fault: it is left where it is.
            Err(AttemptError::Dump(error)) if error.is_mismatch() => {
                Counters::add(&self.counters.mismatches);
                self.metrics.mismatches.inc();
                tracing::error!(
                    row = row.row, request_id = %lease.request_id, path = ?lease.path, error = %causes(&error),
                    "a dump is not its request's; it is left in place"
                );
                self.release(lease.request_id)?;
                Err(AttemptError::Dump(error))
            }
            // What is left is as a crash would leave it; the next run deletes the dump.
            Err(AttemptError::Fatal(reason)) => Err(AttemptError::Fatal(reason)),
            Err(error) => {
                if error.failure_kind() == FailureKind::NotFinite {
                    Counters::add(&self.counters.not_finite);
                    self.metrics.not_finite.inc();
                }
                self.discard(lease).await?;
                Err(error)
            }
        }
    }

    /// Reads the row and posts it.
    async fn ask(self: &Arc<Self>, row: &Row) -> Result<(Sample, Reply), AttemptError> {
        let _permit = self.requests.acquire().await.expect("the semaphore is never closed");
        let (this, row) = (Arc::clone(self), *row);
        let read = tokio::task::spawn_blocking(move || {
            let sample = this.dataset.read(&row).map_err(AttemptError::Row)?;
            let body = serde_json::to_vec(&Generate {
                input_ids: &sample.input_ids,
                sampling_params: SamplingParams { max_new_tokens: 0 },
                stream: false,
                capture: &this.capture,
            })
            .expect("numbers and texts become JSON");
            Ok((sample, Bytes::from(body)))
        });
        let (sample, body) =
            read.await.map_err(|error| AttemptError::Fatal(format!("reading a row panicked: {error}")))??;
        let (started, in_flight) = (Instant::now(), Counted::up(&self.metrics.in_flight));
        let reply = self.client.generate(body).await;
        drop(in_flight);
        let answer = if reply.is_ok() { Answer::Ok } else { Answer::Failed };
        self.metrics.request_seconds.at(answer).observe(started.elapsed().as_secs_f64());
        // Whether it likes the sample or not, the server is there.
        if matches!(&reply, Ok(_) | Err(CallError::Reply(_) | CallError::Mismatch { .. }))
            || matches!(&reply, Err(error) if matches!(Kind::of(error), Kind::Final))
        {
            *self.last_answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        }
        match reply {
            Ok(reply) => Ok((sample, reply)),
            Err(error) if Kind::of(&error) == Kind::Hopeless => {
                let url = self.client.url();
                Err(AttemptError::Fatal(format!(
                    "{error}; is {url} the address of the proxy, and open to us?"
                )))
            }
            Err(error @ CallError::Mismatch { .. }) => {
                Counters::add(&self.counters.mismatches);
                self.metrics.mismatches.inc();
                tracing::error!(row = row.row, %error, "the proxy has found a dump that is not its request's");
                Err(AttemptError::Call(error))
            }
            Err(error) => Err(AttemptError::Call(error)),
        }
    }

    /// Finds the dump: at its path if that can be read here, else through the proxy.
    async fn locate(&self, lease: &Lease) -> Result<Source, AttemptError> {
        if let Some(path) = &lease.path
            && is_readable_dump(path)
        {
            return Ok(Source::Shared(path.clone()));
        }
        let id = lease.request_id;
        let disk = |source: std::io::Error| {
            AttemptError::Fatal(format!("cannot write to `{}`: {source}", self.staging.display()))
        };
        std::fs::create_dir_all(&self.staging).map_err(disk)?;
        let to = TempPath::try_from_path(self.staging.join(format!("{id}.safetensors"))).map_err(disk)?;
        match self.client.fetch_dump(id, &to).await {
            Ok(()) => {
                Counters::add(&self.counters.fetched);
                self.metrics.fetched.inc();
                Ok(Source::Fetched(to))
            }
            Err(FetchError::Call(error)) => Err(AttemptError::Gone { path: lease.path.clone(), error }),
            Err(error @ FetchError::Io { .. }) => Err(AttemptError::Fatal(causes(&error))),
        }
    }

    /// Checks the dump, writes the sample's file, records it. Blocks.
    fn store_sample(
        &self,
        row: &Row,
        sample: &Sample,
        reply: &Reply,
        dump: &Path,
    ) -> Result<Stored, AttemptError> {
        let expected = Expected {
            request_id: reply.request_id,
            claims: &reply.claims,
            row,
            sample,
            format: &*self.format,
            points: self.points.as_ref(),
        };
        let dump = expected.open(dump).map_err(|error| match error {
            // Before any dump has suited, that one does not says that none will.
            BadDump::Unsuitable(error) if !self.is_confirmed() => AttemptError::Fatal(error.to_string()),
            other => AttemptError::Dump(other),
        })?;
        self.check_identity(&dump)?;

        let path = self.format.path(row.row);
        let fingerprint =
            self.store.write(&path, |file| self.format.write(file, sample, &dump)).map_err(|error| {
                match error {
                    WriteError::Io { source, .. } => AttemptError::Fatal(format!(
                        "cannot write `{}`: {source}",
                        self.store.root().join(&path).display()
                    )),
                    WriteError::Unsuitable(error) => AttemptError::Dump(error.into()),
                    error @ WriteError::NotFinite { .. } => AttemptError::Value(error),
                }
            })?;
        self.step(Step::FileWritten, row)?;
        let stored = Stored {
            row: row.row,
            token_hash: row.token_hash,
            sample_id: sample.id.clone(),
            request_id: reply.request_id,
            tokens: row.tokens,
            path,
            fingerprint,
        };
        self.ledger.commit(stored.clone()).map_err(|error| AttemptError::Fatal(error.to_string()))?;
        Ok(stored)
    }

    /// The first dump of a run says what the server is; all others must say the same.
    fn check_identity(&self, dump: &DumpFile) -> Result<(), AttemptError> {
        let mut known = self.identity.lock().unwrap_or_else(PoisonError::into_inner);
        match &*known {
            None => {
                let identity = Identity::of(dump.head());
                self.ledger
                    .set_identity(identity.clone())
                    .map_err(|error| AttemptError::Fatal(error.to_string()))?;
                *known = Some(identity);
            }
            Some(identity) => {
                if let Err(difference) = check_identity(identity, dump) {
                    return Err(if self.is_confirmed() {
                        // Another replica may be the right one.
                        AttemptError::Dump(difference.into())
                    } else {
                        AttemptError::Fatal(format!("{difference}; use another --out for other settings"))
                    });
                }
            }
        }
        self.confirmed.store(true, Ordering::Release);
        Ok(())
    }

    fn step(&self, step: Step, row: &Row) -> Result<(), AttemptError> {
        match &self.on_step {
            Some(hook) if !(hook.0)(step, row.row) => {
                Err(AttemptError::Fatal(format!("stopped after {step:?}")))
            }
            _ => Ok(()),
        }
    }

    fn release(&self, request_id: RequestId) -> Result<(), AttemptError> {
        self.metrics.ledger_dumps.dec();
        self.ledger.release(request_id).map_err(|error| AttemptError::Fatal(error.to_string()))
    }

    /// Deletes a dump. One that cannot be deleted now stays in the ledger, and the next run tries again.
    async fn discard(&self, lease: Lease) -> Result<(), AttemptError> {
        if self.try_discard(&lease).await {
            self.release(lease.request_id)?;
        }
        Ok(())
    }

    /// Deletes a dump that this or an earlier run has been handed; whether it is gone.
    pub(crate) async fn try_discard(&self, lease: &Lease) -> bool {
        let id = lease.request_id;
        // A path out of a reply is only ever deleted if it is the name that this request's dump has.
        let names = [DumpLayout::File, DumpLayout::Directory].map(|layout| layout.path(Path::new(""), id));
        let shared = lease.path.as_ref().filter(|path| {
            path.file_name().is_some_and(|found| names.iter().any(|name| name.as_os_str() == found))
        });
        if shared.is_some_and(|path| DumpLayout::remove(path).is_ok()) {
            return true;
        }
        match self.client.delete_dump(id).await {
            Ok(()) => true,
            Err(error) => {
                Counters::add(&self.counters.left_behind);
                self.metrics.left_behind.inc();
                tracing::warn!(request_id = %id, path = ?lease.path, %error, "a dump could not be deleted");
                false
            }
        }
    }
}

/// Whether there is a dump at `path` that this user may read: a file, or a folder of the legacy layout. Contents that are
/// wrong are found later, and are an error of their own.
fn is_readable_dump(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return false };
    match file.metadata() {
        Ok(metadata) if metadata.is_dir() => Head::read(path).is_ok(),
        Ok(metadata) => metadata.is_file(),
        Err(_) => false,
    }
}
