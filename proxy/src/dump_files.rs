//! The dumps of both layouts on disk, by ID.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use tether_dump::{Head, ReadError, RequestId, TokenHash, dump_path};

/// What a dump says of whose it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Where it is.
    pub path: PathBuf,
    /// The ID inside it.
    pub request_id: RequestId,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Hash of the prompt's tokens as recorded in the dump.
    pub token_hash: TokenHash,
    /// Hash of the prompt's tokens in the dump.
    pub hash_of_tokens: TokenHash,
}

/// Why a dump that is there tells nothing.
#[derive(Debug, thiserror::Error)]
pub enum FactsError {
    /// A file of the present layout.
    #[error(transparent)]
    File(#[from] ReadError),
    /// A folder of the legacy layout.
    #[error("{} is not a dump: {reason}", path.display())]
    Folder {
        /// Its `meta.json`.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// It says that it has more tokens of the prompt than rows.
    #[error("{} is of {prompt_tokens} prompt tokens but has {tokens}", path.display())]
    Short {
        /// The dump.
        path: PathBuf,
        /// As it says.
        prompt_tokens: usize,
        /// As it has.
        tokens: usize,
    },
}

/// The folder of a dump in the legacy layout.
pub fn legacy_path(dir: &Path, id: RequestId) -> PathBuf {
    dir.join(format!("req_{id}"))
}

/// Reads the front of the dump of `id`. `None` while it is not published.
///
/// # Errors
/// See [`FactsError`].
pub fn facts(dir: &Path, id: RequestId) -> Result<Option<Facts>, FactsError> {
    let path = dump_path(dir, id);
    match Head::read(&path) {
        Ok(head) => {
            let prompt_tokens = head.metadata.prompt_tokens;
            let prompt = head.token_ids.get(..prompt_tokens).ok_or_else(|| FactsError::Short {
                path: path.clone(),
                prompt_tokens,
                tokens: head.token_ids.len(),
            })?;
            Ok(Some(Facts {
                request_id: head.metadata.request_id,
                prompt_tokens,
                token_hash: head.metadata.token_hash,
                hash_of_tokens: TokenHash::of(prompt),
                path,
            }))
        }
        Err(error) if error.is_not_found() => legacy_facts(dir, id),
        Err(error) => Err(error.into()),
    }
}

fn legacy_facts(dir: &Path, id: RequestId) -> Result<Option<Facts>, FactsError> {
    #[derive(Deserialize)]
    struct Meta {
        request_id: RequestId,
        num_tokens: usize,
        token_ids: Vec<i64>,
        token_hash: TokenHash,
        prompt_tokens: Option<usize>,
    }
    let folder = legacy_path(dir, id);
    // Written last.
    if !folder.join("done").exists() {
        return Ok(None);
    }
    let path = folder.join("meta.json");
    let broken = |reason: String| FactsError::Folder { path: path.clone(), reason };
    let text = fs::read(&path).map_err(|error| broken(error.to_string()))?;
    let meta: Meta = serde_json::from_slice(&text).map_err(|error| broken(error.to_string()))?;
    let prompt_tokens = meta.prompt_tokens.unwrap_or(meta.num_tokens);
    let prompt = meta.token_ids.get(..prompt_tokens).ok_or_else(|| FactsError::Short {
        path: path.clone(),
        prompt_tokens,
        tokens: meta.token_ids.len(),
    })?;
    Ok(Some(Facts {
        request_id: meta.request_id,
        prompt_tokens,
        token_hash: meta.token_hash,
        hash_of_tokens: TokenHash::of(prompt),
        path: folder,
    }))
}

/// The names of the files in the folder of `id`, sorted. `None` while it is not published.
///
/// # Errors
/// It is there but cannot be read.
pub fn legacy_files(dir: &Path, id: RequestId) -> io::Result<Option<Vec<String>>> {
    let folder = legacy_path(dir, id);
    if !folder.join("done").exists() {
        return Ok(None);
    }
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        // The server's own names are ASCII; another one could not be asked for.
        names.extend(entry?.file_name().into_string());
    }
    names.sort();
    Ok(Some(names))
}

/// Deletes the dump of `id`. Whether there was one.
///
/// # Errors
/// It is there but cannot be deleted.
pub fn remove(dir: &Path, id: RequestId) -> io::Result<bool> {
    match fs::remove_file(dump_path(dir, id)) {
        Ok(()) => return Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let folder = legacy_path(dir, id);
    // A reader must not take a half-deleted folder for a dump. A deletion that was interrupted there is taken up again.
    match fs::remove_file(folder.join("done")) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    match fs::remove_dir_all(&folder) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether the dump of `id` is published.
pub fn exists(dir: &Path, id: RequestId) -> bool {
    dump_path(dir, id).exists() || legacy_path(dir, id).join("done").exists()
}
