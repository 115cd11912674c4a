//! `tether-extract verify`: every file of a run against the ledger and against its own format.

use std::{
    collections::HashSet,
    fmt, io,
    path::{Path, PathBuf},
};

use crate::{
    format::{Format, by_name},
    ledger::{FILE_NAME, Ledger, LedgerError, Stored},
    lock::{DirectoryLock, LockError},
    plan::parallel,
    stored::{Depth, Store},
};

/// What was found in an output directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Rows of the data set.
    pub rows: u64,
    /// Files that are whole and right.
    pub good: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Files that are not, and why.
    pub bad: Vec<(PathBuf, String)>,
    /// Files that a trainer would load and that the ledger does not know.
    pub strangers: Vec<PathBuf>,
}

/// Why a directory could not be verified.
#[derive(Debug, thiserror::Error)]
pub enum VerifyDirectoryError {
    /// The ledger cannot be used.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// A run is going on in it.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The directory cannot be read.
    #[error("cannot read `{path}`")]
    Io {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The ledger names a format that this version does not write.
    #[error("the ledger `{path}` is of format `{format}`, which this version does not know")]
    Format {
        /// The ledger.
        path: PathBuf,
        /// The format.
        format: String,
    },
}

impl Verified {
    /// Nothing is wrong with what is there.
    pub fn is_sound(&self) -> bool {
        self.bad.is_empty() && self.strangers.is_empty()
    }

    /// Every row of the data set has its file.
    pub fn is_complete(&self) -> bool {
        self.good == self.rows
    }
}

impl fmt::Display for Verified {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (path, reason) in &self.bad {
            writeln!(f, "BAD      {} {reason}", path.display())?;
        }
        for path in &self.strangers {
            writeln!(f, "UNKNOWN  {} is not in the ledger", path.display())?;
        }
        writeln!(
            f,
            "{} of {} rows have a good file: {} tokens, {} bytes",
            self.good, self.rows, self.tokens, self.bytes
        )?;
        write!(f, "{} bad, {} unknown", self.bad.len(), self.strangers.len())
    }
}

/// Reads every file of the run in `directory` and checks it.
///
/// # Errors
/// If there is no run, it is going on, or the directory cannot be read.
pub fn verify(directory: &Path) -> Result<Verified, VerifyDirectoryError> {
    let ledger = Ledger::open_existing(directory)?;
    let _lock = DirectoryLock::take(directory)?;
    let path = directory.join(FILE_NAME);
    let settings = ledger.settings()?.ok_or_else(|| LedgerError::NoRun { path: path.clone() })?;
    let format =
        by_name(&settings.format).ok_or(VerifyDirectoryError::Format { path, format: settings.format })?;
    let mut samples: Vec<Stored> = ledger.samples()?.into_values().collect();
    samples.sort_by_key(|sample| sample.row);

    let results = parallel(&samples, |sample| check(&*format, directory, sample));
    let mut verified = Verified {
        rows: settings.dataset_rows,
        good: 0,
        tokens: 0,
        bytes: 0,
        bad: Vec::new(),
        strangers: Vec::new(),
    };
    for (sample, result) in samples.iter().zip(results) {
        match result {
            Ok(()) => {
                verified.good += 1;
                verified.tokens += sample.tokens;
                verified.bytes += sample.fingerprint.bytes;
            }
            Err(reason) => verified.bad.push((sample.path.clone(), reason)),
        }
    }
    let io = |source| VerifyDirectoryError::Io { path: directory.to_owned(), source };
    let known: HashSet<PathBuf> = samples.into_iter().map(|sample| directory.join(sample.path)).collect();
    let suffix = format.path(0).extension().map(ToOwned::to_owned);
    let files = Store::new(directory).files().map_err(io)?;
    verified.strangers = files
        .into_iter()
        .filter(|file| file.extension() == suffix.as_deref() && !known.contains(file))
        .collect();
    Ok(verified)
}

/// The file as a whole against its recorded hash, then what it says about itself against the record.
fn check(format: &dyn Format, directory: &Path, sample: &Stored) -> Result<(), String> {
    let path = directory.join(&sample.path);
    sample.fingerprint.check(&path, Depth::Full).map_err(|damage| damage.to_string())?;
    let contents = format.inspect(&path).map_err(|error| crate::client::causes(&error))?;
    let same = |what: &str, found: String, recorded: String| {
        if found == recorded { Ok(()) } else { Err(format!("{what} is {found}, the ledger has {recorded}")) }
    };
    same("its request ID", contents.request_id.to_string(), sample.request_id.to_string())?;
    same("its number of tokens", contents.tokens.to_string(), sample.tokens.to_string())?;
    same("the hash of its tokens", contents.token_hash.to_string(), sample.token_hash.to_string())
}
