//! The legacy layout: a folder of PyTorch files a request, for clients that scan a directory for whole ones.

use std::fs::{self, File, Permissions};
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3Default;

use crate::torch_file::{Storage, write_tensor};
use crate::write::{TEMPORARY_SUFFIX, sync_dir, temporary_prefix};
use crate::{
    CapturePoint, Dtype, Dump, FORMAT_VERSION, FinalState, Head, Metadata, PublishError, Published,
    ReadError, RequestId, Rows, TokenHash,
};

/// What a folder's name begins with.
pub(crate) const FOLDER_PREFIX: &str = "req_";
/// The empty file that is there once all others are.
pub(crate) const DONE: &str = "done";
const META: &str = "meta.json";
/// A `meta.json` longer than this is not one of a dump: a million tokens take some eight megabytes.
const MAX_META: u64 = 1 << 30;

/// Where the folder of `id` stands in `dir`, or will.
pub fn folder_path(dir: &Path, id: RequestId) -> PathBuf {
    dir.join(format!("{FOLDER_PREFIX}{id}"))
}

/// `meta.json`.
#[derive(Serialize, Deserialize)]
struct Meta {
    tether_format: String,
    request_id: RequestId,
    num_tokens: usize,
    token_ids: Vec<i64>,
    points: Vec<CapturePoint>,
    #[serde(rename = "final")]
    final_state: FinalState,
    token_hash: TokenHash,
    data_hash: TokenHash,
    hidden_size: usize,
    prompt_tokens: usize,
    rows: Rows,
    dtype: Dtype,
    model: String,
    config_hash: String,
    num_layers: u32,
    server: String,
    created: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    call_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    client_rid: Option<String>,
}

/// The file of each plane: `aux_0.pt` and so on, and `final.pt` for the last one if the dump ends with a final state.
fn plane_names(planes: usize, final_state: FinalState) -> Vec<String> {
    let name = |plane| match final_state {
        FinalState::PreNorm | FinalState::PostNorm | FinalState::Both if plane + 1 == planes => {
            "final.pt".to_owned()
        }
        _ => format!("aux_{plane}.pt"),
    };
    (0..planes).map(name).collect()
}

fn storage(dtype: Dtype) -> Storage {
    match dtype {
        Dtype::Float32 => Storage::Float,
        Dtype::BFloat16 => Storage::BFloat16,
        Dtype::Float16 => Storage::Half,
    }
}

/// Writes `dump` into `dir` as the folder of its request. A reader sees no folder or the whole folder; with `sync`, once
/// this returns it survives a power cut. `cancelled` is asked just before the folder gets its name.
///
/// # Errors
/// See [`PublishError`]. Whatever the error, no part of the dump is left.
pub fn publish_folder(
    dir: &Path,
    dump: &Dump<'_>,
    sync: bool,
    cancelled: &dyn Fn() -> bool,
) -> Result<Published, PublishError> {
    dump.check()?;
    let (metadata, id) = (dump.metadata, dump.metadata.request_id);
    let io = |source| PublishError::Io { dir: dir.to_owned(), source };
    if let Some(element) = metadata.dtype.first_non_finite(dump.hidden_states) {
        return Err(dump.not_finite(element));
    }
    let temporary = tempfile::Builder::new()
        .prefix(&temporary_prefix(id).replacen('.', &format!(".{FOLDER_PREFIX}"), 1))
        .suffix(TEMPORARY_SUFFIX)
        // The client that reads and deletes the dump may be another user; the umask has the last word.
        .permissions(Permissions::from_mode(0o777))
        .tempdir_in(dir)
        .map_err(io)?;
    let opened = File::open(temporary.path()).map_err(io)?;
    // As for a file: tells `remove_stale_temporaries` of another process that this one is alive.
    let _ = flock(&opened, FlockOperation::NonBlockingLockExclusive);

    let mut folder = Folder { path: temporary.path(), sync, bytes: 0 };
    let data_hash = folder.planes(dump).map_err(io)?;
    let meta = Meta::new(dump, data_hash);
    let meta = serde_json::to_vec(&meta).expect("strings, numbers and lists are JSON");
    folder.file(META, |file| file.write_all(&meta)).map_err(io)?;
    folder.file(DONE, |_| Ok(())).map_err(io)?;
    let bytes = folder.bytes;
    if sync {
        opened.sync_all().map_err(io)?;
    }
    if cancelled() {
        return Err(PublishError::Cancelled);
    }
    let path = folder_path(dir, id);
    match renameat_with(CWD, temporary.path(), CWD, &path, RenameFlags::NOREPLACE) {
        Ok(()) => {}
        // A file system without that: a folder that is there is full, and a full one is not replaced either.
        Err(Errno::INVAL | Errno::NOSYS) => match fs::rename(temporary.path(), &path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
                return Err(PublishError::AlreadyPublished { id });
            }
            Err(error) => return Err(io(error)),
        },
        Err(Errno::EXIST | Errno::NOTEMPTY) => return Err(PublishError::AlreadyPublished { id }),
        Err(error) => return Err(io(error.into())),
    }
    // It has another name now.
    let _ = temporary.keep();
    if sync {
        // Without it the request fails, and must leave nothing.
        if let Err(error) = sync_dir(dir) {
            let _ = crate::DumpLayout::remove(&path);
            return Err(io(error));
        }
    }
    Ok(Published { path, bytes })
}

/// A folder being filled.
struct Folder<'a> {
    path: &'a Path,
    sync: bool,
    bytes: u64,
}

impl Folder<'_> {
    fn file(
        &mut self,
        name: &str,
        fill: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut file = BufWriter::new(File::create_new(self.path.join(name))?);
        fill(&mut file)?;
        let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
        self.bytes += file.metadata()?.len();
        if self.sync { file.sync_all() } else { Ok(()) }
    }

    /// Writes the planes and returns the hash of all of the dump's data.
    fn planes(&mut self, dump: &Dump<'_>) -> io::Result<TokenHash> {
        let (metadata, planes) = (dump.metadata, dump.metadata.points.len());
        let row = dump.hidden_size * metadata.dtype.size();
        let shape = [dump.token_ids.len(), dump.hidden_size];
        let mut hash = hash_of_tokens(dump.token_ids);
        for (plane, name) in plane_names(planes, metadata.final_state).iter().enumerate() {
            let rows = || {
                // A row of no bytes has no chunks either.
                dump.hidden_states.chunks_exact((planes * row).max(1)).map(|of| &of[plane * row..][..row])
            };
            rows().for_each(|row| hash.update(row));
            self.file(name, |file| write_tensor(file, storage(metadata.dtype), &shape, rows()).map(drop))?;
        }
        Ok(TokenHash(hash.digest128()))
    }
}

fn hash_of_tokens(token_ids: &[i64]) -> Xxh3Default {
    let mut hash = Xxh3Default::new();
    token_ids.iter().for_each(|id| hash.update(&id.to_le_bytes()));
    hash
}

impl Meta {
    fn new(dump: &Dump<'_>, data_hash: TokenHash) -> Self {
        let about = dump.metadata.clone();
        Self {
            tether_format: FORMAT_VERSION.to_owned(),
            request_id: about.request_id,
            num_tokens: dump.token_ids.len(),
            token_ids: dump.token_ids.to_vec(),
            points: about.points,
            final_state: about.final_state,
            token_hash: about.token_hash,
            data_hash,
            hidden_size: dump.hidden_size,
            prompt_tokens: about.prompt_tokens,
            rows: about.rows,
            dtype: about.dtype,
            model: about.model,
            config_hash: about.config_hash,
            num_layers: about.num_layers,
            server: about.server,
            created: about.created,
            call_id: about.call_id,
            client_rid: about.client_rid,
        }
    }
}

/// Reads what the folder at `path` says about itself.
pub(crate) fn read_head(path: &Path) -> Result<Head, ReadError> {
    let malformed = |reason: String| ReadError::Malformed { path: path.to_owned(), reason };
    if !path.join(DONE).exists() {
        return Err(malformed(format!("it has no `{DONE}`: it is being written or deleted")));
    }
    let file = path.join(META);
    let io = |source| ReadError::Io { path: file.clone(), source };
    let len = fs::metadata(&file).map_err(io)?.len();
    if len > MAX_META {
        return Err(malformed(format!("`{META}` is {len} bytes, at most {MAX_META} are expected")));
    }
    let meta: Meta = serde_json::from_slice(&fs::read(&file).map_err(io)?)
        .map_err(|error| malformed(format!("`{META}`: {error}")))?;
    if meta.tether_format != FORMAT_VERSION {
        let found = &meta.tether_format;
        return Err(malformed(format!("it is of format `{found}`, this reader knows `{FORMAT_VERSION}`")));
    }
    let (tokens, prompt) = (meta.token_ids.len(), meta.prompt_tokens);
    if meta.num_tokens != tokens || prompt > tokens {
        let said = meta.num_tokens;
        return Err(malformed(format!(
            "`{META}` has {tokens} token IDs, says {said} and {prompt} of the prompt"
        )));
    }
    let metadata = Metadata {
        request_id: meta.request_id,
        call_id: meta.call_id,
        client_rid: meta.client_rid,
        model: meta.model,
        config_hash: meta.config_hash,
        num_layers: meta.num_layers,
        points: meta.points,
        final_state: meta.final_state,
        rows: meta.rows,
        prompt_tokens: prompt,
        dtype: meta.dtype,
        token_hash: meta.token_hash,
        server: meta.server,
        created: meta.created,
    };
    let (data_hash, token_ids, hidden_size) = (meta.data_hash, meta.token_ids, meta.hidden_size);
    Ok(Head { metadata, data_hash, token_ids, hidden_size })
}

/// One plane, `[num_tokens, hidden_size]`, mapped into memory.
#[derive(Debug)]
pub(crate) struct Plane {
    file: Mmap,
    states: Range<usize>,
}

impl Plane {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.file[self.states.clone()]
    }

    fn open(path: &Path, expected: usize) -> Result<Self, ReadError> {
        let io = |source| ReadError::Io { path: path.to_owned(), source };
        let malformed = |reason: String| ReadError::Malformed { path: path.to_owned(), reason };
        let file = File::open(path).map_err(io)?;
        let mut archive = zip::ZipArchive::new(&file).map_err(|error| malformed(error.to_string()))?;
        let index = (0..archive.len()).find(|&index| {
            archive
                .by_index(index)
                .is_ok_and(|entry| entry.name().is_ok_and(|name| name.ends_with("/data/0")))
        });
        let index = index.ok_or_else(|| malformed("it has no tensor".to_owned()))?;
        let entry = archive.by_index(index).map_err(|error| malformed(error.to_string()))?;
        let start = entry.data_start().and_then(|start| usize::try_from(start).ok());
        let start = start.ok_or_else(|| malformed("its tensor is nowhere".to_owned()))?;
        if entry.compression() != zip::CompressionMethod::Stored || entry.size() != expected as u64 {
            let found = entry.size();
            return Err(malformed(format!(
                "its tensor is {found} bytes, {expected} uncompressed are expected"
            )));
        }
        drop(entry);
        let mapped = crate::map::read_only(&file).map_err(io)?;
        let states = start..start.saturating_add(expected);
        if mapped.get(states.clone()).is_none() {
            return Err(malformed(format!("it ends at {}, within its tensor", mapped.len())));
        }
        Ok(Self { file: mapped, states })
    }
}

/// Opens the planes of the folder at `path`, whose head says how many and how long they are.
pub(crate) fn open_planes(path: &Path, head: &Head) -> Result<Vec<Plane>, ReadError> {
    let row = head.hidden_size.checked_mul(head.metadata.dtype.size());
    let expected = row.and_then(|row| row.checked_mul(head.num_tokens())).ok_or_else(|| {
        let reason = format!("a hidden size of {} is too large", head.hidden_size);
        ReadError::Malformed { path: path.join(META), reason }
    })?;
    let names = plane_names(head.planes(), head.metadata.final_state);
    names.iter().map(|name| Plane::open(&path.join(name), expected)).collect()
}

/// Hash of the token IDs and then of the planes, in their order.
pub(crate) fn data_hash(token_ids: &[i64], planes: &[Plane]) -> TokenHash {
    let mut hash = hash_of_tokens(token_ids);
    planes.iter().for_each(|plane| hash.update(plane.bytes()));
    TokenHash(hash.digest128())
}
