//! A look at what an extraction left on disk that trusts none of our other code: names, number and sizes, from the
//! dataset and SpecForge's layout alone.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Rows a folder holds, by SpecForge's default.
const GROUP: usize = 2000;
/// What the container may add to the tensors: names, pickle, alignment, directory.
const OVERHEAD: u64 = 16 * 1024;

/// What was found.
pub(crate) struct Files {
    pub(crate) count: usize,
    pub(crate) bytes: u64,
}

/// The length of each sample of a dataset, in its order.
pub(crate) fn read_samples(path: &Path) -> Result<Vec<usize>> {
    let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let mut lengths = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let place = || format!("{} line {}", path.display(), number + 1);
        let row: Value = serde_json::from_str(line).with_context(place)?;
        let ids = row["input_ids"].as_array().with_context(|| format!("{}: no `input_ids`", place()))?;
        lengths.push(ids.len());
    }
    Ok(lengths)
}

/// Checks that `out` has exactly one file for each sample, where SpecForge looks for it, large enough for its tensors
/// and no larger.
pub(crate) fn check(out: &Path, samples: &[usize], hidden_size: usize) -> Result<Files> {
    let mut expected = BTreeSet::new();
    let mut bytes = 0;
    for (row, &tokens) in samples.iter().enumerate() {
        let group = row / GROUP * GROUP;
        let path = out.join(format!("rows_{group}-{}/data_{row}.ckpt", group + GROUP));
        let size = fs::metadata(&path)
            .with_context(|| format!("sample {row} has no file {}", path.display()))?
            .len();
        // Two int64 a token, and four rows of bfloat16: three captured layers and the final state.
        let tensors = (tokens * (2 * 8 + 4 * hidden_size * 2)) as u64;
        if !(tensors..=tensors + OVERHEAD).contains(&size) {
            let path = path.display();
            bail!("{path} has {size} bytes; {tokens} tokens make {tensors} and at most {OVERHEAD} more");
        }
        bytes += size;
        expected.insert(path);
    }
    let found: BTreeSet<_> = with_extension(out, "ckpt")?.into_iter().collect();
    if let Some(extra) = found.difference(&expected).next() {
        bail!("{} belongs to no sample", extra.display());
    }
    Ok(Files { count: found.len(), bytes })
}

/// How many files, temporaries among them, are in the dump directory.
pub(crate) fn dumps_left(dir: &Path) -> Result<usize> {
    let names = fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))?;
    let names = names.collect::<Result<Vec<_>, _>>().with_context(|| format!("reading {}", dir.display()))?;
    let dump = |name: &str| name.contains(".safetensors") || name.contains(".tmp");
    Ok(names.iter().filter(|entry| dump(&entry.file_name().to_string_lossy())).count())
}

fn with_extension(dir: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut todo = vec![dir.to_path_buf()];
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(&dir).with_context(|| format!("reading {}", dir.display()))? {
            let path = entry.with_context(|| format!("reading {}", dir.display()))?.path();
            if path.is_dir() {
                todo.push(path);
            } else if path.extension().is_some_and(|found| found == extension) {
                found.push(path);
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files for `samples`, each `spare` bytes larger than its tensors.
    fn extracted(samples: &[usize], spare: i64) -> tempfile::TempDir {
        let out = tempfile::tempdir().unwrap();
        for (row, tokens) in samples.iter().enumerate() {
            let group = row / 2000 * 2000;
            let dir = out.path().join(format!("rows_{group}-{}", group + 2000));
            fs::create_dir_all(&dir).unwrap();
            let size = usize::try_from((tokens * (16 + 8 * 4)) as i64 + spare).unwrap();
            fs::write(dir.join(format!("data_{row}.ckpt")), vec![0; size]).unwrap();
        }
        out
    }

    #[test]
    fn a_whole_set_is_counted() {
        let samples = vec![3; 2001];
        let out = extracted(&samples, 1000);
        let files = check(out.path(), &samples, 4).unwrap();
        assert_eq!((files.count, files.bytes), (2001, 2001 * (3 * 48 + 1000)));
        assert!(out.path().join("rows_2000-4000/data_2000.ckpt").is_file());
    }

    #[test]
    fn a_missing_a_cut_a_swollen_and_a_stray_file_are_found() {
        let samples = [3, 5, 8];
        let message = |out: &tempfile::TempDir| check(out.path(), &samples, 4).err().unwrap().to_string();
        let out = extracted(&samples, 1000);
        fs::remove_file(out.path().join("rows_0-2000/data_1.ckpt")).unwrap();
        assert!(message(&out).contains("sample 1 has no file"), "{}", message(&out));
        assert!(message(&extracted(&samples, -1)).contains("has 143 bytes; 3 tokens make 144"));
        assert!(message(&extracted(&samples, 20_000)).contains("at most 16384 more"));
        let out = extracted(&samples, 1000);
        fs::write(out.path().join("rows_0-2000/data_3.ckpt"), "").unwrap();
        assert!(message(&out).ends_with("data_3.ckpt belongs to no sample"), "{}", message(&out));
    }

    #[test]
    fn the_shipped_samples_are_read() {
        let lengths = read_samples(&super::super::samples_file()).unwrap();
        assert!(lengths.len() >= 300 && lengths.iter().all(|&length| length > 0));
    }

    #[test]
    fn a_bad_line_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data.jsonl");
        fs::write(&path, "{\"input_ids\": [1]}\n\n{\"ids\": []}\n").unwrap();
        let error = format!("{:#}", read_samples(&path).unwrap_err());
        assert!(error.contains("data.jsonl line 3: no `input_ids`"), "{error}");
    }

    #[test]
    fn what_is_left_of_dumps_is_counted() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a.safetensors", ".b.safetensors.tmp", ".lock"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        assert_eq!(dumps_left(dir.path()).unwrap(), 2);
    }
}
