//! Reading and verifying a published dump.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::Metadata as TensorTable;
use xxhash_rust::xxh3::xxh3_128;

use crate::metadata::{self, InvalidMetadata};
use crate::{CapturePoint, Metadata, TokenHash, folder};

/// A header longer than this is not that of a dump: ours are under 2 KiB, the longest name of a client included.
const MAX_HEADER: u64 = 1 << 20;

/// The front of a dump: what it says about itself, and its tokens. Enough to tell whose dump it is.
#[derive(Clone, Debug)]
pub struct Head {
    /// What the dump says about itself.
    pub metadata: Metadata,
    /// Hash of everything after the header, as recorded in the file.
    pub data_hash: TokenHash,
    /// The tokens whose positions the rows are.
    pub token_ids: Vec<i64>,
    /// Width of a plane's row.
    pub hidden_size: usize,
}

/// Why a file could not be read as a dump.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file cannot be opened or read.
    #[error("cannot read {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the file system answered.
        source: io::Error,
    },
    /// The file is not a whole safetensors file of the expected tensors.
    #[error("{} is not a dump: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The metadata is incomplete or from another version.
    #[error("{} is not a dump", path.display())]
    Metadata {
        /// The file.
        path: PathBuf,
        /// Which key.
        source: InvalidMetadata,
    },
}

impl ReadError {
    /// Whether the file was not there at all.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// Why a dump's contents are not what it says they are.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// The bytes are not those that were written.
    #[error("data hash is {found}, the file says {recorded}")]
    DataHash {
        /// Hash of the bytes.
        found: TokenHash,
        /// Hash in the metadata.
        recorded: TokenHash,
    },
    /// The token IDs are not those that the forward pass consumed.
    #[error("token hash of the prompt is {found}, the file says {recorded}")]
    TokenHash {
        /// Hash of the tokens.
        found: TokenHash,
        /// Hash in the metadata.
        recorded: TokenHash,
    },
    /// A hidden state is NaN or infinite.
    #[error("hidden state is not finite at token {token}, {point}, channel {channel}")]
    NotFinite {
        /// Row.
        token: usize,
        /// Plane.
        point: CapturePoint,
        /// Position in the plane's row.
        channel: usize,
    },
}

impl Head {
    /// Reads the front of the dump at `path`, a file or the folder of the legacy layout, and checks the file's length
    /// against it.
    ///
    /// # Errors
    /// The file is absent or unreadable, is cut short or not a dump, or is of a version this reader does not know.
    pub fn read(path: &Path) -> Result<Self, ReadError> {
        let io = |source| ReadError::Io { path: path.to_owned(), source };
        let mut file = File::open(path).map_err(io)?;
        let about = file.metadata().map_err(io)?;
        if about.is_dir() {
            return folder::read_head(path);
        }
        let len = about.len();
        let mut front = Vec::new();
        (&mut file).take(8).read_to_end(&mut front).map_err(io)?;
        let header_len = header_len(path, &front)?;
        (&mut file).take(header_len).read_to_end(&mut front).map_err(io)?;
        let layout = Layout::parse(path, &front, len)?;
        // Bounded by the length of the file, which `parse` has checked.
        let mut ids = vec![0; layout.num_tokens * size_of::<i64>()];
        file.read_exact(&mut ids).map_err(io)?;
        layout.head(&ids)
    }

    /// Rows: tokens covered.
    pub fn num_tokens(&self) -> usize {
        self.token_ids.len()
    }

    /// Planes a row.
    pub fn planes(&self) -> usize {
        self.metadata.points.len()
    }
}

/// The length that the first 8 bytes give, bounded before anything is allocated.
fn header_len(path: &Path, front: &[u8]) -> Result<u64, ReadError> {
    let malformed = |reason: String| ReadError::Malformed { path: path.to_owned(), reason };
    let bytes: [u8; 8] =
        front.try_into().map_err(|_| malformed(format!("{} bytes are too few for a header", front.len())))?;
    match u64::from_le_bytes(bytes) {
        len if len <= MAX_HEADER => Ok(len),
        len => Err(malformed(format!("a header of {len} bytes, at most {MAX_HEADER} are expected"))),
    }
}

/// Where things are, before the tokens are read.
struct Layout {
    metadata: Metadata,
    data_hash: TokenHash,
    num_tokens: usize,
    hidden_size: usize,
    data_start: usize,
    states: (usize, usize),
}

impl Layout {
    /// Parses `front`, which is the whole header with its length before it, of a file of `len` bytes.
    fn parse(path: &Path, front: &[u8], len: u64) -> Result<Self, ReadError> {
        let malformed = |reason: String| ReadError::Malformed { path: path.to_owned(), reason };
        // Checks that the tensors lie end to end and are as long as their shapes say.
        let json = front.get(8..).unwrap_or_default();
        let tensors: TensorTable =
            serde_json::from_slice(json).map_err(|error| malformed(error.to_string()))?;
        let data_start = front.len();
        let expected = (data_start + tensors.data_len()) as u64;
        if len != expected {
            return Err(malformed(format!("the file is {len} bytes, its header describes {expected}")));
        }
        let map = tensors.metadata().clone().unwrap_or_default();
        let invalid = |source| ReadError::Metadata { path: path.to_owned(), source };
        let metadata = Metadata::from_map(&map).map_err(invalid)?;
        let data_hash = metadata::parsed(&map, "data_hash").map_err(invalid)?;

        let info = |name| tensors.info(name).ok_or_else(|| malformed(format!("tensor `{name}` is missing")));
        let (ids, states) = (info("token_ids")?, info("hidden_states")?);
        let planes = metadata.points.len();
        let (&[num_tokens], &[rows, found_planes, hidden_size]) = (&ids.shape[..], &states.shape[..]) else {
            return Err(malformed(format!("shapes are {:?} and {:?}", ids.shape, states.shape)));
        };
        if ids.data_offsets.0 != 0 || states.data_offsets.0 != ids.data_offsets.1 {
            return Err(malformed("tensors are not `token_ids`, then `hidden_states`".into()));
        }
        if rows != num_tokens || found_planes != planes {
            let shape = &states.shape;
            return Err(malformed(format!(
                "hidden states are {shape:?} for {num_tokens} tokens and {planes} points"
            )));
        }
        let dtypes = (dtype_name(ids.dtype), dtype_name(states.dtype));
        if dtypes != ("I64".into(), metadata.dtype.safetensors_name().into()) {
            return Err(malformed(format!(
                "dtypes are {} and {}, the metadata says {}",
                dtypes.0, dtypes.1, metadata.dtype
            )));
        }
        if metadata.prompt_tokens > num_tokens {
            let prompt = metadata.prompt_tokens;
            return Err(malformed(format!("a prompt of {prompt} tokens in a dump of {num_tokens}")));
        }
        Ok(Self { metadata, data_hash, num_tokens, hidden_size, data_start, states: states.data_offsets })
    }

    fn head(self, ids: &[u8]) -> Result<Head, ReadError> {
        let token_ids = ids
            .chunks_exact(8)
            .map(|b| i64::from_le_bytes(b.try_into().expect("chunks of 8 bytes")))
            .collect();
        Ok(Head {
            metadata: self.metadata,
            data_hash: self.data_hash,
            token_ids,
            hidden_size: self.hidden_size,
        })
    }
}

fn dtype_name(dtype: safetensors::Dtype) -> String {
    format!("{dtype:?}")
}

/// A whole dump, mapped into memory: a file, or a folder of the legacy layout.
#[derive(Debug)]
pub struct DumpFile {
    head: Head,
    states: States,
}

/// Where the hidden states are.
#[derive(Debug)]
enum States {
    /// The planes of a token side by side, in one file.
    File { bytes: Mmap, data_start: usize, states: Range<usize> },
    /// Each plane in a file of its own.
    Folder(Vec<folder::Plane>),
}

impl DumpFile {
    /// Opens the dump at `path`.
    ///
    /// # Errors
    /// As [`Head::read`].
    pub fn open(path: &Path) -> Result<Self, ReadError> {
        let io = |source| ReadError::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        if file.metadata().map_err(io)?.is_dir() {
            let head = folder::read_head(path)?;
            let planes = folder::open_planes(path, &head)?;
            return Ok(Self { head, states: States::Folder(planes) });
        }
        let bytes = crate::map::read_only(&file).map_err(io)?;
        let header_len = header_len(path, bytes.get(..8).unwrap_or(&bytes))?;
        let front = bytes.get(..8 + header_len as usize).unwrap_or(&bytes);
        let layout = Layout::parse(path, front, bytes.len() as u64)?;
        let data_start = layout.data_start;
        let states = data_start + layout.states.0..data_start + layout.states.1;
        let ids = data_start..data_start + layout.num_tokens * size_of::<i64>();
        let head = layout.head(&bytes[ids])?;
        Ok(Self { head, states: States::File { bytes, data_start, states } })
    }

    /// What the dump says about itself, and its tokens.
    pub fn head(&self) -> &Head {
        &self.head
    }

    /// `[num_tokens, planes, hidden_size]`, row-major, little-endian, in the dump's dtype. Of a folder it is a copy.
    pub fn hidden_states(&self) -> Cow<'_, [u8]> {
        match &self.states {
            States::File { bytes, states, .. } => Cow::Borrowed(&bytes[states.clone()]),
            States::Folder(_) => {
                let tokens = 0..self.head.num_tokens();
                let rows = tokens.flat_map(|token| (0..self.head.planes()).map(move |plane| (token, plane)));
                Cow::Owned(rows.flat_map(|(token, plane)| self.row(token, plane)).copied().collect())
            }
        }
    }

    /// The plane of `point`, if the dump has it.
    pub fn find(&self, point: CapturePoint) -> Option<usize> {
        self.head.metadata.points.iter().position(|&p| p == point)
    }

    /// The `hidden_size` elements of `token` in plane `plane`.
    ///
    /// # Panics
    /// If the dump has no such token or plane.
    pub fn row(&self, token: usize, plane: usize) -> &[u8] {
        let planes = self.head.planes();
        assert!(plane < planes, "plane {plane} of {planes}");
        let row = self.head.hidden_size * self.head.metadata.dtype.size();
        match &self.states {
            States::File { bytes, states, .. } => {
                &bytes[states.clone()][(token * planes + plane) * row..][..row]
            }
            States::Folder(of_planes) => &of_planes[plane].bytes()[token * row..][..row],
        }
    }

    /// The rows of plane `plane`, each `hidden_size` elements long, in token order.
    ///
    /// # Panics
    /// If the dump has no such plane.
    pub fn plane(&self, plane: usize) -> impl ExactSizeIterator<Item = &[u8]> {
        let planes = self.head.planes();
        assert!(plane < planes, "plane {plane} of {planes}");
        (0..self.head.num_tokens()).map(move |token| self.row(token, plane))
    }

    /// Checks the contents against what the dump says of them: data hash, token hash, every value finite. Shape and
    /// dtype were checked when it was opened.
    ///
    /// # Errors
    /// The first thing found to be wrong.
    pub fn verify(&self) -> Result<(), VerifyError> {
        let head = &self.head;
        let found = match &self.states {
            States::File { bytes, data_start, .. } => TokenHash(xxh3_128(&bytes[*data_start..])),
            States::Folder(planes) => folder::data_hash(&head.token_ids, planes),
        };
        if found != head.data_hash {
            return Err(VerifyError::DataHash { found, recorded: head.data_hash });
        }
        let found = TokenHash::of(&head.token_ids[..head.metadata.prompt_tokens]);
        if found != head.metadata.token_hash {
            return Err(VerifyError::TokenHash { found, recorded: head.metadata.token_hash });
        }
        match self.first_non_finite() {
            Some((token, plane, channel)) => {
                Err(VerifyError::NotFinite { token, point: head.metadata.points[plane], channel })
            }
            None => Ok(()),
        }
    }

    /// Token, plane and channel of the first value, in the order they are stored, that is not finite.
    fn first_non_finite(&self) -> Option<(usize, usize, usize)> {
        let (dtype, hidden, planes) =
            (self.head.metadata.dtype, self.head.hidden_size, self.head.metadata.points.len());
        match &self.states {
            States::File { bytes, states, .. } => {
                let element = dtype.first_non_finite(&bytes[states.clone()])?;
                let row = element / hidden;
                Some((row / planes, row % planes, element % hidden))
            }
            States::Folder(of_planes) => of_planes.iter().enumerate().find_map(|(plane, states)| {
                let element = dtype.first_non_finite(states.bytes())?;
                Some((element / hidden, plane, element % hidden))
            }),
        }
    }
}
