//! Matrices stored in fewer bits than a number has. They stay packed and are expanded block by block as they are used.
//!
//! Expanding is exact: every format's definition is followed to the last bit in float32, so that a matrix is the one that
//! the authors' own scripts would write out.

mod block_fp8;
mod e4m3;
mod int4;
mod nibbles;
mod nvfp4;

use safetensors::Dtype;
use tch::{Device, Tensor};

use crate::LoadError;
use crate::config::Scheme;
use crate::weights::{Weights, kind_of};
use block_fp8::BlockFp8;
use int4::Int4;
use nvfp4::Nvfp4;

/// A packed matrix `[outputs, inputs]`.
#[derive(Debug)]
pub(crate) enum Packed {
    BlockFp8(BlockFp8),
    Int4(Int4),
    Nvfp4(Nvfp4),
}

impl Packed {
    /// The matrix that `weights` holds, if it holds a packed one. What exists decides; where the config says otherwise, or
    /// the tensors contradict each other, that is noted as a problem.
    pub(crate) fn load(weights: &Weights<'_>, outputs: i64, inputs: i64) -> Result<Option<Self>, LoadError> {
        let found = match found(weights) {
            Ok(found) => found,
            Err(problem) => {
                weights.refuse(problem);
                return Ok(None);
            }
        };
        let Some(found) = found else {
            refuse_plain_where_packed(weights, "weight");
            return Ok(None);
        };
        let Some(scheme) = scheme(weights, found) else { return Ok(None) };
        Ok(Some(match scheme {
            Scheme::BlockFp8 { rows, columns } => {
                Self::BlockFp8(BlockFp8::load(weights, [outputs, inputs], [rows, columns])?)
            }
            Scheme::Int4 { group } => Self::Int4(Int4::load(weights, [outputs, inputs], group)?),
            Scheme::Nvfp4ModelOpt => {
                Self::Nvfp4(Nvfp4::load(weights, [outputs, inputs], nvfp4::Names::ModelOpt)?)
            }
            Scheme::Nvfp4CompressedTensors => {
                Self::Nvfp4(Nvfp4::load(weights, [outputs, inputs], nvfp4::Names::CompressedTensors)?)
            }
        }))
    }

    /// `[outputs, inputs]`
    pub(crate) fn size(&self) -> (i64, i64) {
        let [outputs, inputs] = match self {
            Self::BlockFp8(matrix) => matrix.size(),
            Self::Int4(matrix) => matrix.size(),
            Self::Nvfp4(matrix) => matrix.size(),
        };
        (outputs, inputs)
    }

    /// Where it lies.
    pub(crate) fn device(&self) -> Device {
        match self {
            Self::BlockFp8(matrix) => matrix.device(),
            Self::Int4(matrix) => matrix.device(),
            Self::Nvfp4(matrix) => matrix.device(),
        }
    }

    /// Rows can be expanded from any multiple of this on.
    pub(crate) fn row_step(&self) -> i64 {
        match self {
            Self::BlockFp8(matrix) => matrix.block_rows(),
            Self::Int4(_) | Self::Nvfp4(_) => 1,
        }
    }

    /// Writes `count` rows from `first` on into `out` (`[count, inputs]`, f32, contiguous). `codes` is room for as many
    /// int16, on the same device.
    pub(crate) fn expand(&self, first: i64, count: i64, out: &Tensor, codes: &Tensor) {
        match self {
            Self::BlockFp8(matrix) => matrix.expand(first, count, out, codes),
            Self::Int4(matrix) => matrix.expand(first, count, out, codes),
            Self::Nvfp4(matrix) => matrix.expand(first, count, out, codes),
        }
    }
}

/// A packed form, told by its tensors alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    Fp8,
    Int4,
    Nvfp4ModelOpt,
    Nvfp4CompressedTensors,
}

impl Found {
    fn fits(self, scheme: Scheme) -> bool {
        matches!(
            (self, scheme),
            (Self::Fp8, Scheme::BlockFp8 { .. })
                | (Self::Int4, Scheme::Int4 { .. })
                | (Self::Nvfp4ModelOpt, Scheme::Nvfp4ModelOpt)
                | (Self::Nvfp4CompressedTensors, Scheme::Nvfp4CompressedTensors)
        )
    }

    fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "fp8",
            Self::Int4 => "int4",
            Self::Nvfp4ModelOpt => "nvfp4 (ModelOpt)",
            Self::Nvfp4CompressedTensors => "nvfp4 (compressed-tensors)",
        }
    }
}

/// What only packed matrices have beside them.
const COMPANIONS: [&str; 7] = [
    "weight_g_idx",
    "weight_global_scale",
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_shape",
    "weight_zero_point",
];

/// What is stored; `None` for a plain matrix, or none at all.
fn found(weights: &Weights<'_>) -> Result<Option<Found>, String> {
    let module = weights.module();
    let companions = || COMPANIONS.into_iter().find(|name| weights.dtype(name).is_some());
    match (weights.dtype("weight"), weights.dtype("weight_packed")) {
        (Some(_), Some(_)) => Err(format!("`{module}` has both `weight` and `weight_packed`")),
        (Some(Dtype::F8_E4M3), None) => Ok(Some(Found::Fp8)),
        (Some(Dtype::U8), None) => Ok(Some(Found::Nvfp4ModelOpt)),
        (Some(dtype), None) => match (kind_of(dtype), companions()) {
            (Some(_), Some(name)) => {
                Err(format!("`{module}.weight` is {dtype:?}, which is plain, but has a `{name}` beside it"))
            }
            // Whoever asks for it says that it cannot be read, or takes it as it is.
            _ => Ok(None),
        },
        (None, Some(Dtype::I32)) => Ok(Some(Found::Int4)),
        (None, Some(Dtype::U8)) => Ok(Some(Found::Nvfp4CompressedTensors)),
        (None, Some(dtype)) => Err(format!("`{module}.weight_packed` is {dtype:?}; I32 and U8 can be read")),
        (None, None) => Ok(None),
    }
}

/// The scheme by the config, if it is that of what was found.
fn scheme(weights: &Weights<'_>, found: Found) -> Option<Scheme> {
    let (module, name) = (weights.module(), found.name());
    let problem = match weights.scheme() {
        Some(scheme) if found.fits(scheme) => return Some(scheme),
        Some(scheme) => format!("`{module}` is stored as {name}, and `quantization_config` says {scheme}"),
        None if weights.is_ignored() => {
            format!(
                "`{module}` is stored as {name}, and `quantization_config` lists it among those that are not"
            )
        }
        None => format!("`{module}` is stored as {name}, and no `quantization_config` says how"),
    };
    weights.refuse(problem);
    None
}

/// Modules that are plain whatever a config says: no tool packs them.
const ALWAYS_PLAIN: [&str; 1] = ["lm_head"];

/// A plain matrix that the config says is packed may be one whose factors were left out when it was converted.
pub(crate) fn refuse_plain_where_packed(weights: &Weights<'_>, name: &str) {
    let module = weights.module();
    let Some(scheme) = weights.scheme() else { return };
    let last = module.rsplit('.').next().unwrap_or(module);
    if let Some(dtype) = weights.dtype(name).filter(|_| !ALWAYS_PLAIN.contains(&last)) {
        weights.refuse(format!(
            "`{module}.{name}` is {dtype:?}, and `quantization_config` says {scheme}; if the checkpoint was converted, remove \
             that key from config.json"
        ));
    }
}

#[cfg(test)]
mod tests;
