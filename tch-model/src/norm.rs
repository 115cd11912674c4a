//! Root-mean-square norm.

use tch::{Kind, Tensor};

use crate::LoadError;
use crate::mapped::Parameter;
use crate::weights::Weights;

/// Root-mean-square norm over the last dimension.
#[derive(Debug)]
pub(crate) struct RmsNorm {
    weight: Parameter, // [size], in the kind of the activations
    eps: f64,
}

impl RmsNorm {
    /// `kind` is that of the activations the norm hands on.
    pub(crate) fn load(weights: &Weights<'_>, size: i64, eps: f64, kind: Kind) -> Result<Self, LoadError> {
        Ok(Self { weight: weights.get_as("weight", &[size], kind)?, eps })
    }

    /// `[rows, size]` of any kind to the same shape in the activations' kind. The mean square is taken in float32; the
    /// result is rounded to the activations' kind before it is scaled, as in the reference.
    pub(crate) fn forward(&self, x: &Tensor) -> Tensor {
        let size = self.weight.size()[0] as f64;
        // The length of a row, in float32 whatever the kind of `x`, and in one pass over memory.
        let length = x.norm_scalaropt_dim_dtype(2, [-1i64].as_slice(), true, Kind::Float);
        let scale = (length.square() / size + self.eps).rsqrt();
        let kind = self.weight.kind();
        // A product of bfloat16 and float32 is float32: nothing is rounded before `to_kind`.
        (x * scale).to_kind(kind).g_mul_(&self.weight)
    }
}
