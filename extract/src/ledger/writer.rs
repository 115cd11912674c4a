//! The thread that owns the ledger while a run goes on.

use std::{
    path::Path,
    sync::mpsc::{self, Receiver, Sender},
    thread::{self, JoinHandle},
};

use rusqlite::{Connection, params};
use tether_dump::RequestId;
use tokio::sync::oneshot;

use super::{Identity, Lease, Ledger, LedgerError, Stored, write_pairs};
use crate::points::names;

/// The most changes that share one commit, and with it one sync of the disk.
const GROUP: usize = 256;

/// A handle of the ledger's thread. Dropping the last waits until everything sent is written.
#[derive(Debug)]
pub struct LedgerWriter {
    changes: Option<Sender<Change>>,
    thread: Option<JoinHandle<()>>,
}

/// The ledger cannot be written to any more.
#[derive(Clone, Debug, thiserror::Error)]
#[error("cannot write to the ledger: {reason}")]
pub struct Stopped {
    /// SQLite's words.
    pub reason: String,
}

type Answer = oneshot::Sender<Result<(), Stopped>>;

#[derive(Debug)]
enum Change {
    Sample(Box<Stored>, Answer),
    Identity(Box<Identity>, Answer),
    Lease(Lease),
    Release(RequestId),
}

impl Ledger {
    /// Gives the ledger to a thread of its own.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn into_writer(self) -> Result<LedgerWriter, LedgerError> {
        let (changes, receiver) = mpsc::channel();
        let path = self.path();
        let thread = thread::Builder::new()
            .name("ledger".into())
            .spawn(move || write(self.connection, &receiver))
            .map_err(|source| LedgerError::Sqlite {
                path,
                source: rusqlite::Error::ToSqlConversionFailure(source.into()),
            })?;
        Ok(LedgerWriter { changes: Some(changes), thread: Some(thread) })
    }
}

impl LedgerWriter {
    fn send(&self, change: Change) -> Result<(), Stopped> {
        let changes = self.changes.as_ref().expect("the sender is there until drop");
        changes.send(change).map_err(|_| Stopped { reason: "its thread has ended".into() })
    }

    fn wait(&self, change: impl FnOnce(Answer) -> Change) -> Result<(), Stopped> {
        let (answer, answered) = oneshot::channel();
        self.send(change(answer))?;
        answered.blocking_recv().unwrap_or_else(|_| Err(Stopped { reason: "its thread has ended".into() }))
    }

    /// Records a sample; once this returns, the record survives a power cut. Blocks: not for an async thread.
    ///
    /// # Errors
    /// If the ledger cannot be written.
    pub fn commit(&self, sample: Stored) -> Result<(), Stopped> {
        self.wait(|answer| Change::Sample(Box::new(sample), answer))
    }

    /// Records what the server is. Blocks: not for an async thread.
    ///
    /// # Errors
    /// If the ledger cannot be written.
    pub fn set_identity(&self, identity: Identity) -> Result<(), Stopped> {
        self.wait(|answer| Change::Identity(Box::new(identity), answer))
    }

    /// Notes a dump that has been handed over, so that it is deleted even if this process dies first. Does not wait.
    ///
    /// # Errors
    /// If the ledger's thread has ended.
    pub fn lease(&self, lease: Lease) -> Result<(), Stopped> {
        self.send(Change::Lease(lease))
    }

    /// Notes that a dump is gone. Does not wait.
    ///
    /// # Errors
    /// If the ledger's thread has ended.
    pub fn release(&self, request_id: RequestId) -> Result<(), Stopped> {
        self.send(Change::Release(request_id))
    }
}

impl Drop for LedgerWriter {
    fn drop(&mut self) {
        drop(self.changes.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the ledger's thread has panicked");
        }
    }
}

fn write(mut connection: Connection, changes: &Receiver<Change>) {
    while let Ok(first) = changes.recv() {
        let group: Vec<Change> = std::iter::once(first).chain(changes.try_iter().take(GROUP - 1)).collect();
        let result = commit(&mut connection, &group).map_err(|error| Stopped { reason: error.to_string() });
        if let Err(stopped) = &result {
            tracing::error!(reason = stopped.reason, changes = group.len(), "a commit to the ledger failed");
        }
        for change in group {
            if let Change::Sample(_, answer) | Change::Identity(_, answer) = change {
                // The one who asked may be gone; the record stands all the same.
                let _ = answer.send(result.clone());
            }
        }
    }
}

fn commit(connection: &mut Connection, group: &[Change]) -> rusqlite::Result<()> {
    let transaction = connection.transaction()?;
    for change in group {
        apply(&transaction, change)?;
    }
    transaction.commit()
}

fn apply(connection: &Connection, change: &Change) -> rusqlite::Result<()> {
    match change {
        Change::Sample(sample, _) => {
            // SQLite's integers are signed; a row, a length or a count beyond 2⁶³ does not occur.
            let signed = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
            connection
                .prepare_cached(
                    "INSERT OR REPLACE INTO sample
                     (row, token_hash, sample_id, request_id, tokens, path, bytes, probe, hash, created)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
                )?
                .execute(params![
                    signed(sample.row),
                    sample.token_hash.to_string(),
                    sample.sample_id,
                    sample.request_id.to_string(),
                    signed(sample.tokens),
                    text(&sample.path),
                    signed(sample.fingerprint.bytes),
                    sample.fingerprint.probe,
                    sample.fingerprint.hash,
                    tether_dump::timestamp(),
                ])?;
        }
        Change::Identity(identity, _) => write_pairs(
            connection,
            &[
                ("model", identity.model.clone()),
                ("config_hash", identity.config_hash.clone()),
                ("num_layers", identity.num_layers.to_string()),
                ("hidden_size", identity.hidden_size.to_string()),
                ("points", names(&identity.points).replace(' ', "")),
                ("final", identity.final_state.to_string()),
                ("dtype", identity.dtype.to_string()),
            ],
        )?,
        Change::Lease(lease) => {
            connection
                .prepare_cached("INSERT OR REPLACE INTO dump (request_id, path) VALUES (?1, ?2)")?
                .execute(params![lease.request_id.to_string(), lease.path.as_deref().map(text)])?;
        }
        Change::Release(request_id) => {
            connection
                .prepare_cached("DELETE FROM dump WHERE request_id = ?1")?
                .execute([request_id.to_string()])?;
        }
    }
    Ok(())
}

/// Paths come out of JSON, headers and our own names, all of them text.
fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
