//! The files of a checkpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use tch::Kind;

use super::names::Names;
use crate::LoadError;
use crate::mapped;

/// The safetensors files of a checkpoint, mapped, and where each tensor lies in them.
pub(crate) struct Checkpoint {
    pub(super) tensors: BTreeMap<String, Entry>,
    files: usize,
    pub(super) names: Names,
}

/// Where a tensor lies.
pub(super) struct Entry {
    pub(super) file: Arc<Mmap>,
    pub(super) range: std::ops::Range<usize>,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<i64>,
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
        match Names::find(|name| tensors.contains_key(name)) {
            Ok(names) if problems.is_empty() => Ok(Self { tensors, files: paths.len(), names }),
            Ok(_) => Err(LoadError::Tensors { problems }),
            Err(problem) => {
                problems.push(problem);
                Err(LoadError::Tensors { problems })
            }
        }
    }

    /// How many files the checkpoint has.
    pub(crate) fn files(&self) -> usize {
        self.files
    }

    /// What the embedding is stored as, if there is one: no checkpoint quantises it.
    pub(crate) fn embedding_kind(&self) -> Option<Kind> {
        let embedding = self.tensors.get(&format!("{}embed_tokens.weight", self.names.body));
        embedding.and_then(|entry| super::kind_of(entry.dtype))
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
