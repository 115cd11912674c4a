//! One process at a time in an output directory.

use std::{
    fs::{File, TryLockError},
    io,
    path::{Path, PathBuf},
};

const NAME: &str = ".tether-extract.lock";

/// Holds an output directory until dropped, or until the process ends however it ends.
#[derive(Debug)]
pub struct DirectoryLock {
    _file: File,
}

/// Why a directory could not be locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process has it.
    #[error("another tether-extract is working in `{0}`")]
    Held(PathBuf),
    /// The lock file cannot be made: the directory is not writable.
    #[error("cannot write to `{path}`")]
    Io {
        /// The lock file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl DirectoryLock {
    /// Locks `directory`, without waiting.
    ///
    /// # Errors
    /// If it is locked, or not writable.
    pub fn take(directory: &Path) -> Result<Self, LockError> {
        let path = directory.join(NAME);
        let file = match File::options().create(true).append(true).open(&path) {
            Ok(file) => file,
            Err(source) => return Err(LockError::Io { path, source }),
        };
        match file.try_lock() {
            Ok(()) => Ok(Self { _file: file }),
            Err(TryLockError::WouldBlock) => Err(LockError::Held(directory.to_owned())),
            Err(TryLockError::Error(source)) => Err(LockError::Io { path, source }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_held_once_and_free_again_afterwards() {
        let directory = tempfile::tempdir().unwrap();
        let held = DirectoryLock::take(directory.path()).unwrap();
        let refused = DirectoryLock::take(directory.path()).unwrap_err();
        assert!(refused.to_string().starts_with("another tether-extract is working in"));
        drop(held);
        DirectoryLock::take(directory.path()).unwrap();
    }
}
