//! Reads back what `torch.save` writes: a ZIP of stored entries around a pickle.

mod map;
mod pickle;

use std::{
    collections::HashMap,
    fs::File,
    io::{Cursor, Read as _},
    path::Path,
};

use memmap2::Mmap;
use zip::{CompressionMethod, ZipArchive};

use super::InspectError;
use pickle::Value;

/// A pickle is a few hundred bytes; what is beyond this is none of ours.
const MAX_PICKLE_BYTES: u64 = 1 << 20;

/// A dict of tensors and texts, its tensors mapped into memory.
#[derive(Debug)]
pub(super) struct Archive {
    bytes: Mmap,
    storages: HashMap<String, std::ops::Range<usize>>,
    entries: HashMap<String, Value>,
}

/// One tensor, contiguous.
#[derive(Debug)]
pub(super) struct Tensor<'a> {
    pub(super) shape: Vec<usize>,
    pub(super) bytes: &'a [u8],
}

impl Archive {
    /// Opens the archive at `path` and checks every entry's place; the checksum of small entries as well.
    ///
    /// # Errors
    /// If it is not such an archive.
    pub(super) fn open(path: &Path) -> Result<Self, InspectError> {
        let bytes = map::read_only(&File::open(path)?)?;
        let broken = |error: zip::result::ZipError| InspectError::NotAnArchive(error.to_string());
        let mut zip = ZipArchive::new(Cursor::new(&bytes[..])).map_err(broken)?;
        let mut storages = HashMap::new();
        let mut pickle = None;
        for index in 0..zip.len() {
            let mut entry = zip.by_index(index).map_err(broken)?;
            let name = entry.name().map_err(broken)?.into_owned();
            if entry.compression() != CompressionMethod::Stored {
                return Err(InspectError::NotAnArchive(format!("entry `{name}` is compressed")));
            }
            if name.ends_with("/data.pkl") {
                let mut text = Vec::new();
                (&mut entry).take(MAX_PICKLE_BYTES).read_to_end(&mut text)?;
                pickle = Some(text);
            } else if let Some((_, storage)) = name.split_once("/data/") {
                let start = entry.data_start().and_then(|start| usize::try_from(start).ok());
                let end = start
                    .zip(usize::try_from(entry.size()).ok())
                    .and_then(|(start, len)| start.checked_add(len));
                let Some((start, end)) = start.zip(end).filter(|(_, end)| *end <= bytes.len()) else {
                    return Err(InspectError::NotAnArchive(format!("entry `{name}` ends beyond the file")));
                };
                storages.insert(storage.to_owned(), start..end);
            }
        }
        let pickle = pickle.ok_or_else(|| InspectError::NotAnArchive("it has no `data.pkl`".into()))?;
        let entries = pickle::dict(&pickle).map_err(|error| InspectError::NotAnArchive(error.to_string()))?;
        Ok(Self { bytes, storages, entries })
    }

    /// The text under `key`.
    pub(super) fn string(&self, key: &str) -> Result<&str, InspectError> {
        match self.entries.get(key) {
            Some(Value::Text(text)) => Ok(text),
            Some(other) => Err(InspectError::Wrong(format!("`{key}` is {}, expected a text", other.kind()))),
            None => Err(InspectError::Wrong(format!("`{key}` is missing"))),
        }
    }

    /// The tensor under `key`, of the storage class `class` of PyTorch.
    pub(super) fn tensor(&self, key: &str, class: &str) -> Result<Tensor<'_>, InspectError> {
        let wrong = |what: String| InspectError::Wrong(format!("`{key}` {what}"));
        let value = self.entries.get(key).ok_or_else(|| wrong("is missing".into()))?;
        let tensor =
            value.as_tensor().ok_or_else(|| wrong(format!("is {}, expected a tensor", value.kind())))?;
        if tensor.class != class {
            return Err(wrong(format!("is a {}, expected a {class}", tensor.class)));
        }
        let size = match class {
            "LongStorage" => 8,
            "FloatStorage" => 4,
            "BFloat16Storage" | "HalfStorage" => 2,
            _ => 1,
        };
        let shape = tensor.shape;
        let range =
            self.storages.get(tensor.storage).ok_or_else(|| wrong("has no storage in the archive".into()))?;
        let expected = shape.iter().try_fold(size, |bytes: usize, len| bytes.checked_mul(*len));
        if expected != Some(range.len()) || tensor.offset != 0 || !is_contiguous(&shape, &tensor.stride) {
            let len = range.len();
            return Err(wrong(format!(
                "is {shape:?} over a storage of {len} bytes, expected all of it, contiguous"
            )));
        }
        Ok(Tensor { shape, bytes: &self.bytes[range.clone()] })
    }
}

fn is_contiguous(shape: &[usize], stride: &[usize]) -> bool {
    let mut expected = 1usize;
    shape.len() == stride.len()
        && shape.iter().zip(stride).rev().all(|(len, stride)| {
            let fits = *len == 1 || *stride == expected;
            expected = expected.saturating_mul(*len);
            fits
        })
}
