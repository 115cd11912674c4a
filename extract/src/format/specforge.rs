//! SpecForge's offline feature files for EAGLE-3.
//!
//! `rows_{g}-{g+2000}/data_{row}.ckpt`, each a `torch.save` archive of `input_ids` and `loss_mask` (int64 `[S]`),
//! `hidden_state` (bfloat16 `[1, S, H]`, the normed final state, to which SpecForge applies `lm_head` as it is) and
//! `aux_hidden_state` (bfloat16 `[1, S, 3H]`, three residual points side by side, lowest first). SpecForge's loader takes any
//! further keys; `tether_request_id` says whose states these are.

use std::{
    fs::File,
    io::BufWriter,
    path::{Path, PathBuf},
};

use half::{bf16, f16, slice::HalfFloatSliceExt as _};
use tether_dump::{
    CapturePoint, Dtype, DumpFile, FinalState, TokenHash,
    torch_file::{Storage, TorchFile},
};

use super::{Contents, Format, InspectError, Unsuitable, WriteError, torch_archive::Archive};
use crate::{dataset::Sample, points::names};

/// Rows in one folder, SpecForge's own `--file-group-size`.
const GROUP: u64 = 2000;
const AUX_POINTS: usize = 3;
/// ZIP records, pickle and padding of one file, measured.
const CONTAINER_BYTES: u64 = 1500;
const REQUEST_ID: &str = "tether_request_id";

/// The files of SpecForge's EAGLE-3 trainer.
#[derive(Clone, Copy, Debug)]
pub struct Eagle3;

impl Format for Eagle3 {
    fn name(&self) -> &'static str {
        "specforge/eagle3"
    }

    fn final_state(&self) -> FinalState {
        FinalState::PostNorm
    }

    fn check_residuals(&self, residuals: &[CapturePoint]) -> Result<(), Unsuitable> {
        let all_residual = residuals.iter().all(|point| matches!(point, CapturePoint::Residual(_)));
        let ascending = residuals.is_sorted_by(|a, b| a < b);
        if residuals.len() == AUX_POINTS && all_residual && ascending {
            return Ok(());
        }
        let found = if residuals.is_empty() { "none".to_owned() } else { names(residuals) };
        Err(Unsuitable {
            format: self.name(),
            needs: "exactly three residual points beside the final state (`--points A,B,C`)",
            what: "the points are",
            found,
        })
    }

    fn path(&self, row: u64) -> PathBuf {
        let group = row / GROUP * GROUP;
        PathBuf::from(format!("rows_{group}-{}/data_{row}.ckpt", group + GROUP))
    }

    fn estimated_bytes(&self, tokens: u64, hidden_size: usize, _planes: usize) -> u64 {
        let states = (AUX_POINTS as u64 + 1) * hidden_size as u64 * 2;
        tokens * (states + 2 * 8) + CONTAINER_BYTES
    }

    fn write(&self, file: &mut BufWriter<File>, sample: &Sample, dump: &DumpFile) -> Result<(), WriteError> {
        let head = dump.head();
        let tokens = head.num_tokens();
        let (finals, aux): (Vec<_>, Vec<_>) =
            head.metadata.points.iter().copied().partition(|point| *point == CapturePoint::FinalNorm);
        self.check_residuals(&aux)?;
        if finals.len() != 1 {
            return Err(Unsuitable {
                format: self.name(),
                needs: "the normed final state `N`",
                what: "the dump has",
                found: names(&head.metadata.points),
            }
            .into());
        }
        let mut out = TorchFile::new(file);
        out.tensor(
            "input_ids",
            Storage::Long,
            &[tokens],
            long_chunks(&sample.input_ids).iter().map(Vec::as_slice),
        )?;
        out.tensor(
            "loss_mask",
            Storage::Long,
            &[tokens],
            long_chunks(&sample.loss_mask).iter().map(Vec::as_slice),
        )?;
        write_states(&mut out, "hidden_state", dump, &finals)?;
        write_states(&mut out, "aux_hidden_state", dump, &aux)?;
        out.string(REQUEST_ID, &head.metadata.request_id.to_string());
        out.finish()?;
        Ok(())
    }

    fn inspect(&self, path: &Path) -> Result<Contents, InspectError> {
        let archive = Archive::open(path)?;
        let input_ids = archive.tensor("input_ids", "LongStorage")?;
        let &[tokens] = input_ids.shape.as_slice() else {
            return Err(wrong(format!("`input_ids` is {:?}, expected one dimension", input_ids.shape)));
        };
        let mask = archive.tensor("loss_mask", "LongStorage")?;
        if mask.shape != [tokens] {
            return Err(wrong(format!("`loss_mask` is {:?}, `input_ids` is [{tokens}]", mask.shape)));
        }
        let last = archive.tensor("hidden_state", "BFloat16Storage")?;
        let &[1, rows, hidden] = last.shape.as_slice() else {
            return Err(wrong(format!("`hidden_state` is {:?}, expected [1, {tokens}, hidden]", last.shape)));
        };
        let aux = archive.tensor("aux_hidden_state", "BFloat16Storage")?;
        if rows != tokens || aux.shape != [1, tokens, AUX_POINTS * hidden] {
            let (last, aux) = (&last.shape, &aux.shape);
            return Err(wrong(format!(
                "`hidden_state` is {last:?} and `aux_hidden_state` {aux:?} for {tokens} tokens"
            )));
        }
        for (key, tensor) in [("hidden_state", &last), ("aux_hidden_state", &aux)] {
            if let Some(element) = Dtype::BFloat16.first_non_finite(tensor.bytes) {
                return Err(wrong(format!("element {element} of `{key}` is not finite")));
            }
        }
        let request_id = archive.string(REQUEST_ID)?;
        let request_id = request_id
            .parse()
            .map_err(|_| wrong(format!("`{REQUEST_ID}` is `{request_id}`, not a request ID")))?;
        let longs = |bytes: &[u8]| -> Vec<i64> {
            bytes
                .chunks_exact(8)
                .map(|b| i64::from_le_bytes(b.try_into().expect("chunks of 8 bytes")))
                .collect()
        };
        if let Some(bit) = longs(mask.bytes).into_iter().find(|bit| !matches!(bit, 0 | 1)) {
            return Err(wrong(format!("`loss_mask` holds {bit}, expected 0 and 1")));
        }
        let token_hash = TokenHash::of(&longs(input_ids.bytes));
        Ok(Contents { request_id, tokens: tokens as u64, token_hash })
    }
}

fn wrong(what: String) -> InspectError {
    InspectError::Wrong(what)
}

fn long_chunks(values: &[i64]) -> Vec<Vec<u8>> {
    values.chunks(1 << 16).map(|chunk| chunk.iter().flat_map(|value| value.to_le_bytes()).collect()).collect()
}

/// Adds `[1, tokens, points × hidden]` in bfloat16: for each token the rows of `points` side by side.
fn write_states(
    out: &mut TorchFile<&mut BufWriter<File>>,
    key: &str,
    dump: &DumpFile,
    points: &[CapturePoint],
) -> Result<(), WriteError> {
    let head = dump.head();
    let shape = [1, head.num_tokens(), points.len() * head.hidden_size];
    let planes: Vec<usize> =
        points.iter().map(|point| dump.find(*point).expect("the points are taken from the dump")).collect();
    let slices =
        (0..head.num_tokens()).flat_map(|token| planes.iter().map(move |plane| dump.row(token, *plane)));
    if head.metadata.dtype == Dtype::BFloat16 {
        return Ok(out.tensor(key, Storage::BFloat16, &shape, slices)?);
    }
    let mut rows = Vec::with_capacity(head.num_tokens() * planes.len());
    for (index, slice) in slices.enumerate() {
        let converted = to_bf16(slice, head.metadata.dtype);
        // A float32 beyond bfloat16's range rounds to infinity although it was finite in the dump.
        if !Dtype::BFloat16.all_finite(&converted) {
            let (token, point) = (index / planes.len(), points[index % planes.len()]);
            return Err(WriteError::NotFinite { point, token, dtype: "bfloat16" });
        }
        rows.push(converted);
    }
    Ok(out.tensor(key, Storage::BFloat16, &shape, rows.iter().map(Vec::as_slice))?)
}

/// The elements of `bytes` rounded to the nearest bfloat16, ties to even.
fn to_bf16(bytes: &[u8], dtype: Dtype) -> Vec<u8> {
    let narrow = |value: f32| bf16::from_f32(value).to_le_bytes();
    match dtype {
        Dtype::BFloat16 => bytes.to_vec(),
        Dtype::Float32 => bytes
            .chunks_exact(4)
            .flat_map(|b| narrow(f32::from_le_bytes(b.try_into().expect("chunks of 4 bytes"))))
            .collect(),
        Dtype::Float16 => {
            let halves: Vec<f16> = bytes
                .chunks_exact(2)
                .map(|b| f16::from_le_bytes(b.try_into().expect("chunks of 2 bytes")))
                .collect();
            let mut wide = vec![0.0; halves.len()];
            halves.convert_to_f32_slice(&mut wide);
            wide.into_iter().flat_map(narrow).collect()
        }
    }
}

#[cfg(test)]
mod tests;
