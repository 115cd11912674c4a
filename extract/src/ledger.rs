//! The record of a run: which samples are on disk, and with which settings they were made.

mod writer;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    str::FromStr,
};

use rusqlite::{Connection, OptionalExtension as _, params};
use tether_dump::{CapturePoint, Dtype, FinalState, Head, RequestId, TokenHash};

use crate::{points::names, stored::Fingerprint};

pub use writer::{LedgerWriter, Stopped};

/// Name of the ledger in an output directory.
pub const FILE_NAME: &str = "ledger.sqlite3";
/// Marks the file as ours: the bytes `Tthr`.
const APPLICATION_ID: i32 = i32::from_be_bytes(*b"Tthr");
const VERSION: i32 = 1;
const SCHEMA: &str = "
    CREATE TABLE run (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE sample (
        row INTEGER NOT NULL,        -- of the data set
        token_hash TEXT NOT NULL,    -- XXH3-128 of its token IDs
        sample_id TEXT,              -- the row's own `id`
        request_id TEXT NOT NULL,    -- the request that brought the hidden states
        tokens INTEGER NOT NULL,
        path TEXT NOT NULL,          -- below the output directory
        bytes INTEGER NOT NULL,
        probe TEXT NOT NULL,         -- XXH3-128 of some blocks of the file
        hash TEXT NOT NULL,          -- XXH3-128 of the file
        created TEXT NOT NULL,
        PRIMARY KEY (row, token_hash)
    ) WITHOUT ROWID;
    -- Dumps that the server has handed over and that are still to be deleted.
    CREATE TABLE dump (request_id TEXT PRIMARY KEY, path TEXT) WITHOUT ROWID;
";

/// The ledger of one output directory, an SQLite file.
#[derive(Debug)]
pub struct Ledger {
    connection: Connection,
}

/// A sample that is on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Row of the data set.
    pub row: u64,
    /// Hash of its token IDs.
    pub token_hash: TokenHash,
    /// The row's own `id`.
    pub sample_id: Option<String>,
    /// The request that brought its hidden states.
    pub request_id: RequestId,
    /// Number of tokens.
    pub tokens: u64,
    /// Its file, below the output directory.
    pub path: PathBuf,
    /// What the file is known by.
    pub fingerprint: Fingerprint,
}

/// A dump that has been handed over and is to be deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The request it belongs to.
    pub request_id: RequestId,
    /// Where the reply said it is.
    pub path: Option<PathBuf>,
}

/// What a run is asked to do. All its samples, over any number of resumes, are made with the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Name of the format.
    pub format: String,
    /// Fingerprint of the data set.
    pub dataset: String,
    /// Length of the data set in bytes. Absent in ledgers that older versions began.
    pub dataset_bytes: Option<u64>,
    /// Rows of the data set, good and bad.
    pub dataset_rows: u64,
}

/// What the server says it is, as the first dump of a run told. All later ones must say the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The model as the server calls it.
    pub model: String,
    /// SHA-256 of the checkpoint's `config.json`.
    pub config_hash: String,
    /// Decoder layers.
    pub num_layers: u32,
    /// Width of a plane.
    pub hidden_size: usize,
    /// The planes of a dump.
    pub points: Vec<CapturePoint>,
    /// The form of the final state.
    pub final_state: FinalState,
    /// Number format the server dumped in.
    pub dtype: Dtype,
}

/// One setting that is not what it was.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{setting} is `{now}`, this run began with `{before}`")]
pub struct Difference {
    /// Which.
    pub setting: &'static str,
    /// What the ledger says.
    pub before: String,
    /// What there is now.
    pub now: String,
}

/// Why a ledger could not be used.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// SQLite's error.
    #[error("cannot use the ledger `{path}`")]
    Sqlite {
        /// The ledger.
        path: PathBuf,
        /// The cause.
        source: rusqlite::Error,
    },
    /// The file is another program's, or of a later version.
    #[error("`{path}` is not a ledger of this version of Tether ({reason})")]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What it is.
        reason: String,
    },
    /// A value cannot be read.
    #[error("the ledger `{path}` is damaged: {what} is `{value}`")]
    Damaged {
        /// The ledger.
        path: PathBuf,
        /// Which value.
        what: &'static str,
        /// The value.
        value: String,
    },
    /// There is no ledger, or no run in it.
    #[error("`{path}` records no run; is its directory the output of `tether-extract run`?")]
    NoRun {
        /// The ledger.
        path: PathBuf,
    },
}

impl Settings {
    /// The first difference between `self`, recorded, and `now`.
    pub fn difference(&self, now: &Self) -> Option<Difference> {
        first_difference(&[
            ("the format", &self.format, &now.format),
            ("the data set (hash of the file)", &self.dataset, &now.dataset),
        ])
    }
}

impl Identity {
    /// What a dump says of the server that made it.
    pub fn of(head: &Head) -> Self {
        let metadata = &head.metadata;
        Self {
            model: metadata.model.clone(),
            config_hash: metadata.config_hash.clone(),
            num_layers: metadata.num_layers,
            hidden_size: head.hidden_size,
            points: metadata.points.clone(),
            final_state: metadata.final_state,
            dtype: metadata.dtype,
        }
    }

    /// The first difference between `self`, recorded, and `now`.
    pub fn difference(&self, now: &Self) -> Option<Difference> {
        let pairs = |identity: &Self| {
            [
                identity.model.clone(),
                identity.config_hash.clone(),
                identity.num_layers.to_string(),
                identity.hidden_size.to_string(),
                names(&identity.points),
                identity.final_state.to_string(),
                identity.dtype.to_string(),
            ]
        };
        let what = [
            "the model",
            "the hash of its config.json",
            "its number of layers",
            "its hidden size",
            "the list of capture points",
            "the final state",
            "the dumps' dtype",
        ];
        let (before, now) = (pairs(self), pairs(now));
        let rows: Vec<_> =
            what.iter().zip(&before).zip(&now).map(|((what, before), now)| (*what, before, now)).collect();
        first_difference(&rows)
    }
}

fn first_difference(rows: &[(&'static str, &String, &String)]) -> Option<Difference> {
    let (setting, before, now) = rows.iter().find(|(_, before, now)| before != now)?;
    Some(Difference { setting, before: (*before).clone(), now: (*now).clone() })
}

impl Ledger {
    /// Opens the ledger of `directory`, or makes one.
    ///
    /// # Errors
    /// If it cannot be opened, or is not a ledger of this version.
    pub fn open(directory: &Path) -> Result<Self, LedgerError> {
        let path = directory.join(FILE_NAME);
        let sqlite = |source| LedgerError::Sqlite { path: path.clone(), source };
        let connection = Connection::open(&path).map_err(sqlite)?;
        let pragma = |name| connection.pragma_query_value(None, name, |row| row.get::<_, i32>(0));
        let (application, version) =
            (pragma("application_id").map_err(sqlite)?, pragma("user_version").map_err(sqlite)?);
        let tables: i64 = connection
            .query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))
            .map_err(sqlite)?;
        match (application, version) {
            (0, 0) if tables == 0 => connection
                .execute_batch(&format!(
                    "BEGIN; {SCHEMA} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION}; COMMIT;"
                ))
                .map_err(sqlite)?,
            (APPLICATION_ID, VERSION) => {}
            (APPLICATION_ID, other) => {
                return Err(LedgerError::Foreign { path, reason: format!("version {other}, this one reads {VERSION}") });
            }
            _ => return Err(LedgerError::Foreign { path, reason: "another program's database".into() }),
        }
        // Write-ahead, and each commit synced: what the ledger says is done is done after a power cut as well.
        connection.pragma_update(None, "journal_mode", "wal").map_err(sqlite)?;
        connection.pragma_update(None, "synchronous", "full").map_err(sqlite)?;
        Ok(Self { connection })
    }

    /// Opens the ledger of a directory that must have one.
    ///
    /// # Errors
    /// As [`Ledger::open`], and if there is none.
    pub fn open_existing(directory: &Path) -> Result<Self, LedgerError> {
        let path = directory.join(FILE_NAME);
        if !path.is_file() {
            return Err(LedgerError::NoRun { path });
        }
        Self::open(directory)
    }

    fn sqlite(&self, source: rusqlite::Error) -> LedgerError {
        LedgerError::Sqlite { path: self.path(), source }
    }

    fn path(&self) -> PathBuf {
        self.connection.path().map(PathBuf::from).unwrap_or_default()
    }

    fn parsed<T: FromStr>(&self, what: &'static str, value: String) -> Result<T, LedgerError> {
        value.parse().map_err(|_| LedgerError::Damaged { path: self.path(), what, value })
    }

    fn value(&self, key: &'static str) -> Result<Option<String>, LedgerError> {
        self.connection
            .query_row("SELECT value FROM run WHERE key = ?1", [key], |row| row.get(0))
            .optional()
            .map_err(|source| self.sqlite(source))
    }

    fn required<T: FromStr>(&self, key: &'static str) -> Result<T, LedgerError> {
        let value = self.value(key)?.ok_or_else(|| LedgerError::NoRun { path: self.path() })?;
        self.parsed(key, value)
    }

    /// The settings the run began with, if it has begun.
    ///
    /// # Errors
    /// If the ledger cannot be read.
    pub fn settings(&self) -> Result<Option<Settings>, LedgerError> {
        let Some(format) = self.value("format")? else { return Ok(None) };
        let (dataset, dataset_rows) = (self.required("dataset")?, self.required("dataset_rows")?);
        let bytes = self.value("dataset_bytes")?;
        let dataset_bytes = bytes.map(|bytes| self.parsed("dataset_bytes", bytes)).transpose()?;
        Ok(Some(Settings { format, dataset, dataset_bytes, dataset_rows }))
    }

    /// Records the settings of a run that begins.
    ///
    /// # Errors
    /// If the ledger cannot be written.
    pub fn begin(&mut self, settings: &Settings) -> Result<(), LedgerError> {
        let mut pairs = dataset_pairs(settings);
        pairs.extend([
            ("format", settings.format.clone()),
            ("tool", concat!("tether-extract ", env!("CARGO_PKG_VERSION")).to_owned()),
            ("begun", tether_dump::timestamp()),
        ]);
        self.write(&pairs)
    }

    /// Records that the data set has become that of `settings`, by appended lines.
    ///
    /// # Errors
    /// If the ledger cannot be written.
    pub fn grow(&mut self, settings: &Settings) -> Result<(), LedgerError> {
        self.write(&dataset_pairs(settings))
    }

    fn write(&mut self, pairs: &[(&str, String)]) -> Result<(), LedgerError> {
        let written = self.connection.transaction().and_then(|transaction| {
            write_pairs(&transaction, pairs)?;
            transaction.commit()
        });
        written.map_err(|source| self.sqlite(source))
    }

    /// What the server is, if a dump has told.
    ///
    /// # Errors
    /// If the ledger cannot be read.
    pub fn identity(&self) -> Result<Option<Identity>, LedgerError> {
        let Some(model) = self.value("model")? else { return Ok(None) };
        let points: String = self.required("points")?;
        Ok(Some(Identity {
            model,
            config_hash: self.required("config_hash")?,
            num_layers: self.required("num_layers")?,
            hidden_size: self.required("hidden_size")?,
            points: points
                .split(',')
                .map(|name| self.parsed("points", name.to_owned()))
                .collect::<Result<_, _>>()?,
            final_state: self.required("final")?,
            dtype: self.required("dtype")?,
        }))
    }

    /// Every sample on disk, by row.
    ///
    /// # Errors
    /// If the ledger cannot be read.
    pub fn samples(&self) -> Result<HashMap<u64, Stored>, LedgerError> {
        let sqlite = |source| self.sqlite(source);
        let mut statement = self
            .connection
            .prepare(
                "SELECT row, token_hash, sample_id, request_id, tokens, path, bytes, probe, hash FROM sample",
            )
            .map_err(sqlite)?;
        let mut rows = statement.query([]).map_err(sqlite)?;
        let mut samples = HashMap::new();
        while let Some(row) = rows.next().map_err(sqlite)? {
            let text = |index| row.get::<_, String>(index).map_err(sqlite);
            let number = |index| -> Result<u64, LedgerError> {
                let value: i64 = row.get(index).map_err(sqlite)?;
                let damaged = |_| LedgerError::Damaged {
                    path: self.path(),
                    what: "a number",
                    value: value.to_string(),
                };
                u64::try_from(value).map_err(damaged)
            };
            let stored = Stored {
                row: number(0)?,
                token_hash: self.parsed("token_hash", text(1)?)?,
                sample_id: row.get(2).map_err(sqlite)?,
                request_id: self.parsed("request_id", text(3)?)?,
                tokens: number(4)?,
                path: text(5)?.into(),
                fingerprint: Fingerprint { bytes: number(6)?, probe: text(7)?, hash: text(8)? },
            };
            samples.insert(stored.row, stored);
        }
        Ok(samples)
    }

    /// The dumps that a run cut off did not come to delete.
    ///
    /// # Errors
    /// If the ledger cannot be read.
    pub fn leases(&self) -> Result<Vec<Lease>, LedgerError> {
        let sqlite = |source| self.sqlite(source);
        let mut statement = self.connection.prepare("SELECT request_id, path FROM dump").map_err(sqlite)?;
        let mut rows = statement.query([]).map_err(sqlite)?;
        let mut leases = Vec::new();
        while let Some(row) = rows.next().map_err(sqlite)? {
            let request_id = self.parsed("request_id", row.get(0).map_err(sqlite)?)?;
            let path = row.get::<_, Option<String>>(1).map_err(sqlite)?.map(PathBuf::from);
            leases.push(Lease { request_id, path });
        }
        Ok(leases)
    }
}

fn dataset_pairs(settings: &Settings) -> Vec<(&'static str, String)> {
    let mut pairs =
        vec![("dataset", settings.dataset.clone()), ("dataset_rows", settings.dataset_rows.to_string())];
    pairs.extend(settings.dataset_bytes.map(|bytes| ("dataset_bytes", bytes.to_string())));
    pairs
}

fn write_pairs(connection: &Connection, pairs: &[(&str, String)]) -> rusqlite::Result<()> {
    let mut statement =
        connection.prepare_cached("INSERT OR REPLACE INTO run (key, value) VALUES (?1, ?2)")?;
    for (key, value) in pairs {
        statement.execute(params![key, value])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
