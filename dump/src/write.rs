//! Writing a dump so that a reader of the directory sees no file or the whole file.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use xxhash_rust::xxh3::Xxh3Default;

use crate::folder::FOLDER_PREFIX;
use crate::{Metadata, RequestId};

/// Width of a hash in hex, and of the placeholder that it replaces.
const HASH_WIDTH: usize = 32;
/// Bytes hashed, checked and written at a time: small enough to stay in a core's cache between the three.
const CHUNK: usize = 256 * 1024;

/// One request's hidden states and tokens, about to be published.
#[derive(Clone, Copy, Debug)]
pub struct Dump<'a> {
    /// What the dump says about itself.
    pub metadata: &'a Metadata,
    /// The tokens whose positions the rows are, `[num_tokens]`.
    pub token_ids: &'a [i64],
    /// `[num_tokens, planes, hidden_size]`, row-major, little-endian, in `metadata.dtype`.
    pub hidden_states: &'a [u8],
    /// Width of a plane's row.
    pub hidden_size: usize,
}

/// A dump that readers can see.
#[derive(Clone, Debug)]
pub struct Published {
    /// `<dir>/<request_id>.safetensors`.
    pub path: PathBuf,
    /// Length of the file.
    pub bytes: u64,
}

/// Why a dump was not published. Nothing is left in the directory then.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// There is a dump of this request already; it stands as it was.
    #[error("a dump of request {id} is published already")]
    AlreadyPublished {
        /// The request.
        id: RequestId,
    },
    /// The caller withdrew the request before its dump was named.
    #[error("the request was cancelled before its dump was published")]
    Cancelled,
    /// The parts do not fit together.
    #[error(
        "hidden states are {found} bytes, {num_tokens} tokens x {planes} planes x {hidden_size} {dtype} are {expected}"
    )]
    Inconsistent {
        /// Bytes given.
        found: usize,
        /// Bytes that the shape asks for.
        expected: usize,
        /// Rows.
        num_tokens: usize,
        /// Planes a row.
        planes: usize,
        /// Elements a plane.
        hidden_size: usize,
        /// Number format.
        dtype: crate::Dtype,
    },
    /// A hidden state is NaN or infinite.
    #[error("hidden state is not finite at token {token}, {point}, channel {channel}")]
    NotFinite {
        /// Row.
        token: usize,
        /// Plane.
        point: crate::CapturePoint,
        /// Position in the plane's row.
        channel: usize,
    },
    /// The file system refused.
    #[error("cannot write a dump in {}", dir.display())]
    Io {
        /// The dump directory.
        dir: PathBuf,
        /// What it answered.
        source: io::Error,
    },
}

/// Where the dump of `id` stands, or will.
pub fn dump_path(dir: &Path, id: RequestId) -> PathBuf {
    dir.join(format!("{id}.safetensors"))
}

impl Dump<'_> {
    fn shape(&self) -> [usize; 3] {
        [self.token_ids.len(), self.metadata.points.len(), self.hidden_size]
    }

    pub(crate) fn check(&self) -> Result<(), PublishError> {
        let [num_tokens, planes, hidden_size] = self.shape();
        let dtype = self.metadata.dtype;
        let expected = num_tokens * planes * hidden_size * dtype.size();
        let found = self.hidden_states.len();
        if found == expected {
            return Ok(());
        }
        Err(PublishError::Inconsistent { found, expected, num_tokens, planes, hidden_size, dtype })
    }

    /// The header, its length before it, and where in both the hash of the data goes.
    fn header(&self) -> (Vec<u8>, u64) {
        header(self.metadata, self.token_ids.len(), self.hidden_size)
    }
}

/// Length in bytes of the file that a dump with `num_tokens` rows will be, known before anything is computed.
pub fn encoded_len(metadata: &Metadata, num_tokens: usize, hidden_size: usize) -> u64 {
    let row = metadata.points.len() * hidden_size * metadata.dtype.size();
    (header(metadata, num_tokens, hidden_size).0.len() + num_tokens * (row + size_of::<i64>())) as u64
}

/// The 8-byte length and the JSON header, and the offset in them of the placeholder for `data_hash`.
fn header(metadata: &Metadata, num_tokens: usize, hidden_size: usize) -> (Vec<u8>, u64) {
    let quoted = |text: &str| serde_json::to_string(text).expect("a string is JSON");
    let mut json = String::from("{\"__metadata__\":{\"data_hash\":\"");
    let hash_at = 8 + json.len() as u64;
    json.extend(std::iter::repeat_n('0', HASH_WIDTH));
    json.push('"');
    for (key, value) in metadata.to_pairs() {
        json.push_str(&format!(",\"{key}\":{}", quoted(&value)));
    }
    let planes = metadata.points.len();
    let ids_end = num_tokens * size_of::<i64>();
    let states_end = ids_end + num_tokens * planes * hidden_size * metadata.dtype.size();
    // Token IDs first: they are the more strictly aligned, and a reader that only checks whose dump this is finds
    // header and tokens in one stretch at the front.
    json.push_str(&format!(
        "}},\"token_ids\":{{\"dtype\":\"I64\",\"shape\":[{num_tokens}],\"data_offsets\":[0,{ids_end}]}},\
         \"hidden_states\":{{\"dtype\":\"{}\",\"shape\":[{num_tokens},{planes},{hidden_size}],\
         \"data_offsets\":[{ids_end},{states_end}]}}}}",
        metadata.dtype.safetensors_name()
    ));
    // Spaces after the JSON align the data to 8 bytes, as the format asks.
    while !json.len().is_multiple_of(8) {
        json.push(' ');
    }
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    (bytes, hash_at)
}

/// Writes `dump` into `dir` under its request's name. A reader sees no file or the whole file; with `sync`, once this
/// returns it survives a power cut. `cancelled` is asked just before the file gets its name.
///
/// # Errors
/// See [`PublishError`]. Whatever the error, no part of the dump is left.
pub fn publish(
    dir: &Path,
    dump: &Dump<'_>,
    sync: bool,
    cancelled: &dyn Fn() -> bool,
) -> Result<Published, PublishError> {
    dump.check()?;
    let io = |source| PublishError::Io { dir: dir.to_owned(), source };
    let id = dump.metadata.request_id;
    let mut temporary = tempfile::Builder::new()
        .prefix(&temporary_prefix(id))
        .suffix(TEMPORARY_SUFFIX)
        // The client that reads and deletes the dump may be another user; the umask has the last word.
        .permissions(fs::Permissions::from_mode(0o666))
        .tempfile_in(dir)
        .map_err(io)?;
    // Tells `remove_stale_temporaries` of another process that this one is alive. Not all file systems can lock;
    // those that cannot are shared by one server only.
    let _ = flock(temporary.as_file(), FlockOperation::NonBlockingLockExclusive);

    let (header, hash_at) = dump.header();
    let mut hash = Xxh3Default::new();
    let file = temporary.as_file_mut();
    file.write_all(&header).map_err(io)?;
    let mut ids = Vec::with_capacity(CHUNK);
    for chunk in dump.token_ids.chunks(CHUNK / size_of::<i64>()) {
        ids.clear();
        ids.extend(chunk.iter().flat_map(|id| id.to_le_bytes()));
        hash.update(&ids);
        file.write_all(&ids).map_err(io)?;
    }
    for (index, chunk) in dump.hidden_states.chunks(CHUNK).enumerate() {
        if let Some(at) = dump.metadata.dtype.first_non_finite(chunk) {
            return Err(dump.not_finite(index * CHUNK / dump.metadata.dtype.size() + at));
        }
        hash.update(chunk);
        file.write_all(chunk).map_err(io)?;
    }
    file.write_all_at(format!("{:032x}", hash.digest128()).as_bytes(), hash_at).map_err(io)?;
    let bytes = (header.len() + size_of_val(dump.token_ids) + dump.hidden_states.len()) as u64;

    if sync {
        file.sync_all().map_err(io)?; // contents first,
    }
    if cancelled() {
        return Err(PublishError::Cancelled);
    }
    let path = dump_path(dir, id);
    temporary.persist_noclobber(&path).map_err(|error| match error.error.kind() {
        io::ErrorKind::AlreadyExists => PublishError::AlreadyPublished { id },
        _ => io(error.error),
    })?; // then the name, never over another dump,
    if sync {
        // then the directory entry: without it the request fails, and must leave nothing
        if let Err(error) = sync_dir(dir) {
            let _ = fs::remove_file(&path);
            return Err(io(error));
        }
    }
    Ok(Published { path, bytes })
}

/// Makes what was renamed into `dir` survive a power cut.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    #[cfg(test)]
    if tests::FAIL_SYNC_DIR.get() {
        return Err(io::Error::from_raw_os_error(5));
    }
    File::open(dir)?.sync_all()
}

impl Dump<'_> {
    pub(crate) fn not_finite(&self, element: usize) -> PublishError {
        let [_, planes, hidden] = self.shape();
        let (row, channel) = (element / hidden, element % hidden);
        PublishError::NotFinite { token: row / planes, point: self.metadata.points[row % planes], channel }
    }
}

pub(crate) const TEMPORARY_SUFFIX: &str = ".tmp";

pub(crate) fn temporary_prefix(id: RequestId) -> String {
    format!(".{id}.")
}

/// Whether `name` is that of a dump under way, a file or a folder.
fn is_temporary(name: &str) -> bool {
    name.strip_prefix('.')
        .map(|rest| rest.strip_prefix(FOLDER_PREFIX).unwrap_or(rest))
        .and_then(|rest| rest.strip_suffix(TEMPORARY_SUFFIX))
        .and_then(|rest| rest.split_once('.'))
        .is_some_and(|(id, _)| id.parse::<RequestId>().is_ok())
}

/// Removes what a writer that was killed left in `dir`, and returns how many dumps that was. Those that a living
/// process is writing stay.
///
/// # Errors
/// Those of listing the directory and of removing a file.
pub fn remove_stale_temporaries(dir: &Path) -> io::Result<usize> {
    let mut removed = 0;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if !entry.file_name().to_str().is_some_and(is_temporary) {
            continue;
        }
        let writing = File::open(entry.path()).is_ok_and(|file| {
            flock(&file, FlockOperation::NonBlockingLockExclusive) == Err(rustix::io::Errno::WOULDBLOCK)
        });
        if writing {
            continue;
        }
        let folder = entry.file_type()?.is_dir();
        let path = entry.path();
        match if folder { fs::remove_dir_all(path) } else { fs::remove_file(path) } {
            Ok(()) => removed += 1,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        /// Makes [`sync_dir`] fail on this thread, as a full disk does.
        pub(super) static FAIL_SYNC_DIR: Cell<bool> = const { Cell::new(false) };
    }

    #[test]
    fn a_directory_that_cannot_be_synced_fails_the_write_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let id = RequestId::new();
        let metadata = Metadata {
            request_id: id,
            call_id: None,
            client_rid: None,
            model: String::new(),
            config_hash: String::new(),
            num_layers: 1,
            points: vec![crate::CapturePoint::Residual(1)],
            final_state: crate::FinalState::None,
            rows: crate::Rows::Prompt,
            prompt_tokens: 1,
            dtype: crate::Dtype::Float32,
            token_hash: crate::TokenHash::of(&[7]),
            server: String::new(),
            created: String::new(),
        };
        let dump = Dump { metadata: &metadata, token_ids: &[7], hidden_states: &[0; 8], hidden_size: 2 };
        for layout in [crate::DumpLayout::File, crate::DumpLayout::Directory] {
            let publish = || layout.publish(dir.path(), &dump, true, &|| false);
            FAIL_SYNC_DIR.set(true);
            assert!(matches!(publish(), Err(PublishError::Io { .. })));
            FAIL_SYNC_DIR.set(false);
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "{layout}");
            // So the client can come again under the same name.
            let published = publish().unwrap();
            crate::DumpLayout::remove(&published.path).unwrap();
        }
    }

    #[test]
    fn only_names_of_dumps_under_way_count_as_temporaries() {
        let id = RequestId::new();
        assert!(is_temporary(&format!(".{id}.x1Y2z3.tmp")));
        assert!(is_temporary(&format!(".req_{id}.x1Y2z3.tmp")));
        for other in [
            format!("{id}.safetensors"),
            format!("req_{id}"),
            format!(".{id}.tmp"),
            ".nfs0001.tmp".into(),
            ".x.y.tmp".into(),
        ] {
            assert!(!is_temporary(&other), "{other}");
        }
    }
}
