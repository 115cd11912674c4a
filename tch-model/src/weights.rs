//! A checkpoint's tensors, by name.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use tch::{Device, Kind, Tensor};

use crate::LoadError;
use crate::mapped::{self, Parameter};

/// The safetensors files of a checkpoint, mapped, and where each tensor lies in them.
pub(crate) struct Checkpoint {
    tensors: BTreeMap<String, Entry>,
    files: usize,
}

struct Entry {
    file: Arc<Mmap>,
    range: std::ops::Range<usize>,
    dtype: Dtype,
    shape: Vec<i64>,
}

/// `model.safetensors.index.json`
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Maps the checkpoint in `dir`: `model.safetensors`, or the shards that `model.safetensors.index.json` names. Reads
    /// headers only.
    ///
    /// # Errors
    /// When a shard that the index names is missing (all of them are listed), or a file is not a whole one.
    pub(crate) fn open(dir: &Path) -> Result<Self, LoadError> {
        let single = dir.join("model.safetensors");
        let index = dir.join("model.safetensors.index.json");
        let (paths, listed) = if single.is_file() {
            (vec![single], None)
        } else if index.is_file() {
            let listed = read_index(&index)?;
            let names: BTreeSet<&String> = listed.weight_map.values().collect();
            // A name is a file of this directory, nothing else.
            let is_missing = |name: &&&String| {
                Path::new(name.as_str()).components().count() != 1 || !dir.join(name.as_str()).is_file()
            };
            let missing: Vec<String> = names.iter().filter(is_missing).map(ToString::to_string).collect();
            if !missing.is_empty() {
                return Err(LoadError::MissingShards { dir: dir.to_owned(), names: missing });
            }
            (names.into_iter().map(|name| dir.join(name)).collect(), Some(listed.weight_map))
        } else {
            return Err(LoadError::NoWeights { dir: dir.to_owned() });
        };
        let mut tensors = BTreeMap::new();
        let mut problems = Vec::new();
        for path in &paths {
            for (name, entry) in entries(path)? {
                if tensors.insert(name.clone(), entry).is_some() {
                    problems.push(format!("`{name}` is in two files"));
                }
            }
        }
        let absent = listed.iter().flatten().filter(|(name, _)| !tensors.contains_key(*name));
        problems.extend(
            absent.map(|(name, shard)| format!("`{name}` is not in {shard}, where the index has it")),
        );
        if !problems.is_empty() {
            return Err(LoadError::Tensors { problems });
        }
        Ok(Self { tensors, files: paths.len() })
    }

    /// How many files the checkpoint has.
    pub(crate) fn files(&self) -> usize {
        self.files
    }

    /// What a tensor is stored as, if there is such a tensor.
    pub(crate) fn dtype(&self, name: &str) -> Option<Dtype> {
        self.tensors.get(name).map(|entry| entry.dtype)
    }
}

fn read_index(path: &Path) -> Result<Index, LoadError> {
    let bytes = fs::read(path).map_err(|source| LoadError::Read { path: path.to_owned(), source })?;
    serde_json::from_slice(&bytes).map_err(|source| LoadError::Json { path: path.to_owned(), source })
}

/// The tensors of one file. Its header is checked against its length.
fn entries(path: &Path) -> Result<Vec<(String, Entry)>, LoadError> {
    let owned = || PathBuf::from(path);
    let file = mapped::map(path).map_err(|source| LoadError::Read { path: owned(), source })?;
    let tensors =
        SafeTensors::deserialize(&file).map_err(|source| LoadError::Shard { path: owned(), source })?;
    let start = file.as_ptr().addr();
    let entry = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        let offset = view.data().as_ptr().addr() - start;
        let range = offset..offset + view.data().len();
        let shape = view.shape().iter().map(|&dimension| dimension as i64).collect();
        (name, Entry { file: Arc::clone(&file), range, dtype: view.dtype(), shape })
    };
    Ok(tensors.tensors().into_iter().map(entry).collect())
}

/// Where in the checkpoint a layer's tensors are, and what they become.
///
/// A model is assembled twice: first by a handle that only notes what is absent or misshapen, so that all of it is
/// reported at once and before any weight is touched, then by one that loads.
pub(crate) struct Weights<'a> {
    source: &'a Source<'a>,
    prefix: String,
}

/// What all handles of one assembly share.
pub(crate) struct Source<'a> {
    checkpoint: &'a Checkpoint,
    device: Device,
    kind: Kind,
    loading: bool,
    asked: RefCell<BTreeSet<String>>,
    problems: RefCell<Vec<String>>,
}

impl<'a> Source<'a> {
    /// A source for tensors of `kind` on `device`; unless `loading`, one that hands out empty tensors and takes notes.
    pub(crate) fn new(checkpoint: &'a Checkpoint, device: Device, kind: Kind, loading: bool) -> Self {
        let (asked, problems) = (RefCell::default(), RefCell::default());
        Self { checkpoint, device, kind, loading, asked, problems }
    }

    /// The handle for the whole checkpoint.
    pub(crate) fn root(&'a self) -> Weights<'a> {
        Weights { source: self, prefix: String::new() }
    }

    /// Reports everything that was absent or misshapen; else the tensors nobody asked for.
    pub(crate) fn finish(self) -> Result<Vec<&'a str>, LoadError> {
        let (asked, problems) = (self.asked.into_inner(), self.problems.into_inner());
        if !problems.is_empty() {
            return Err(LoadError::Tensors { problems });
        }
        let names = self.checkpoint.tensors.keys().map(String::as_str);
        Ok(names.filter(|name| !asked.contains(*name)).collect())
    }
}

impl Weights<'_> {
    /// The handle for what is under `name`.
    pub(crate) fn sub(&self, name: impl std::fmt::Display) -> Self {
        Self { source: self.source, prefix: format!("{}{name}.", self.prefix) }
    }

    /// The tensor `name`, which must have this shape, in the model's kind.
    pub(crate) fn get(&self, name: &str, shape: &[i64]) -> Result<Parameter, LoadError> {
        self.get_as(name, shape, self.source.kind)
    }

    /// The tensor `name` in a kind of its own.
    pub(crate) fn get_as(&self, name: &str, shape: &[i64], kind: Kind) -> Result<Parameter, LoadError> {
        let name = format!("{}{name}", self.prefix);
        let stored = self.source.checkpoint.tensors.get(&name);
        let loaded = match check(&name, stored, shape) {
            Ok((entry, stored_as)) if self.source.loading => self.load(entry, stored_as, kind)?,
            Ok(_) => Parameter::owned(Tensor::new()),
            Err(problem) => {
                self.source.problems.borrow_mut().push(problem);
                Parameter::owned(Tensor::new())
            }
        };
        self.source.asked.borrow_mut().insert(name);
        Ok(loaded)
    }

    fn load(&self, entry: &Entry, stored_as: Kind, kind: Kind) -> Result<Parameter, LoadError> {
        let Entry { file, range, shape, .. } = entry;
        let stored = match Parameter::over(file, range.clone(), shape, stored_as)? {
            Some(mapped) => mapped,
            None => Parameter::owned(Tensor::f_from_data_size(&file[range.clone()], shape, stored_as)?),
        };
        if stored_as == kind && self.source.device == Device::Cpu {
            return Ok(stored);
        }
        // Across first, then converted: the narrower of the two usually is the stored one.
        let moved = stored.f_to_device(self.source.device)?.f_to_kind(kind)?;
        Ok(Parameter::owned(moved))
    }
}

fn check<'e>(name: &str, stored: Option<&'e Entry>, shape: &[i64]) -> Result<(&'e Entry, Kind), String> {
    let entry = stored.ok_or_else(|| format!("`{name}` is missing"))?;
    if entry.shape != shape {
        return Err(format!("`{name}` is {:?}, the config asks for {shape:?}", entry.shape));
    }
    match kind_of(entry.dtype) {
        Some(kind) => Ok((entry, kind)),
        None => Err(format!("`{name}` is {:?}; F32, BF16, F16 and F64 can be read", entry.dtype)),
    }
}

/// The libtorch kind of a stored dtype that holds plain numbers.
pub(crate) fn kind_of(dtype: Dtype) -> Option<Kind> {
    match dtype {
        Dtype::F32 => Some(Kind::Float),
        Dtype::BF16 => Some(Kind::BFloat16),
        Dtype::F16 => Some(Kind::Half),
        Dtype::F64 => Some(Kind::Double),
        _ => None,
    }
}
