//! Reading what is in a dump directory.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use tether_dump::{CapturePoint, Dtype, DumpFile, Metadata, RequestId, dump_path};

/// One dump, verified and with its states as `f32`.
#[derive(Clone, Debug)]
pub struct Dump {
    /// What it says about itself.
    pub metadata: Metadata,
    /// The tokens whose positions its rows are.
    pub token_ids: Vec<i64>,
    /// Width of a row of a plane.
    pub hidden_size: usize,
    /// In the order of `metadata.points`, each `[num_tokens, hidden_size]`.
    planes: Vec<Vec<f32>>,
}

impl Dump {
    /// Reads and verifies the dump at `path`: its shape, finiteness and both hashes.
    ///
    /// # Panics
    /// If it is absent, cut short, or not what it says it is.
    #[track_caller]
    pub fn read(path: &Path) -> Self {
        let file = DumpFile::open(path)
            .unwrap_or_else(|error| panic!("{error}: {:?}", std::error::Error::source(&error)));
        file.verify().unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let head = file.head().clone();
        let planes = (0..head.planes())
            .map(|plane| file.plane(plane).flat_map(|row| values(row, head.metadata.dtype)).collect())
            .collect();
        Self { metadata: head.metadata, token_ids: head.token_ids, hidden_size: head.hidden_size, planes }
    }

    /// `[num_tokens, hidden_size]` of `point`, row-major.
    ///
    /// # Panics
    /// If it is not among the dump's points.
    #[track_caller]
    pub fn plane(&self, point: CapturePoint) -> &[f32] {
        let at = self.metadata.points.iter().position(|have| *have == point);
        &self.planes[at.unwrap_or_else(|| panic!("no {point} among {:?}", self.metadata.points))]
    }

    /// The last token's row of `point`.
    #[track_caller]
    pub fn last_row(&self, point: CapturePoint) -> &[f32] {
        let plane = self.plane(point);
        &plane[plane.len() - self.hidden_size..]
    }

    /// The names of its points, in plane order.
    pub fn point_names(&self) -> Vec<String> {
        self.metadata.points.iter().map(ToString::to_string).collect()
    }
}

fn values(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    let pairs = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    match dtype {
        Dtype::Float32 => {
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
        }
        Dtype::BFloat16 => pairs().map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
        Dtype::Float16 => pairs().map(|b| f16::from_le_bytes(b).to_f32()).collect(),
    }
}

/// A dump directory.
#[derive(Clone, Debug)]
pub struct DumpDir(PathBuf);

impl DumpDir {
    /// The one at `path`, which need not exist yet.
    pub fn new(path: PathBuf) -> Self {
        Self(path)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Where the dump of `id` is, or would be.
    pub fn path_of(&self, id: RequestId) -> PathBuf {
        dump_path(&self.0, id)
    }

    /// The dump of `id`.
    ///
    /// # Panics
    /// As [`Dump::read`].
    #[track_caller]
    pub fn read(&self, id: RequestId) -> Dump {
        let dump = Dump::read(&self.path_of(id));
        assert_eq!(dump.metadata.request_id, id, "the file's name is not what it says inside");
        dump
    }

    /// Whose dumps there are.
    pub fn ids(&self) -> BTreeSet<RequestId> {
        self.names().iter().filter_map(|name| dump_id(name)).collect()
    }

    /// Names in the directory that are not those of dumps: temporaries, and anything else.
    pub fn strangers(&self) -> Vec<String> {
        self.names().into_iter().filter(|name| dump_id(name).is_none()).collect()
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap_or_else(|error| panic!("{}: {error}", self.0.display()));
        entries
            .map(|entry| entry.expect("a readable folder").file_name().to_string_lossy().into_owned())
            .collect()
    }
}

fn dump_id(name: &str) -> Option<RequestId> {
    name.strip_suffix(".safetensors")?.parse().ok()
}
