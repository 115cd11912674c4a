//! fp8 with one factor for each block of outputs and inputs: `weight` and `weight_scale_inv`, which despite its name is
//! multiplied by.

use safetensors::Dtype;
use tch::{Device, Kind, Tensor};

use super::e4m3;
use crate::LoadError;
use crate::mapped::Parameter;
use crate::weights::Weights;

/// A matrix in fp8.
#[derive(Debug)]
pub(crate) struct BlockFp8 {
    codes: Parameter,   // int8 bits, [outputs, inputs]
    factors: Parameter, // f32, [blocks of outputs, blocks of inputs], times `e4m3::UNIT`
    block: [i64; 2],
}

impl BlockFp8 {
    /// Blocks at the lower and right edge may be partial.
    pub(super) fn load(weights: &Weights<'_>, size: [i64; 2], block: [i64; 2]) -> Result<Self, LoadError> {
        let blocks = [0, 1].map(|axis: usize| (size[axis] + block[axis] - 1) / block[axis]);
        let codes = weights.bits("weight", Dtype::F8_E4M3, &size, (Kind::Int8, &size))?;
        let factors = weights.factors("weight_scale_inv", &blocks)?;
        let stored_as = format!("fp8, blocks of {}x{}", block[0], block[1]);
        let names = ["weight", "weight_scale_inv"];
        weights.count_packed(&stored_as, size[0] * size[1], &names, codes.is_mapped());
        // There are none while the checkpoint is only looked through.
        let factors = match factors.defined() {
            true => Parameter::owned(factors.f_mul_scalar(e4m3::UNIT)?),
            false => factors,
        };
        Ok(Self { codes, factors, block })
    }

    pub(super) fn device(&self) -> Device {
        self.codes.device()
    }

    pub(super) fn size(&self) -> [i64; 2] {
        let (outputs, inputs) = self.codes.size2().expect("a matrix, checked in `load`");
        [outputs, inputs]
    }

    pub(super) fn block_rows(&self) -> i64 {
        self.block[0]
    }

    /// `first` is a multiple of a block's outputs.
    pub(super) fn expand(&self, first: i64, count: i64, out: &Tensor, codes: &Tensor) {
        let (inputs, [rows, columns]) = (self.size()[1], self.block);
        let mut codes = codes.narrow(0, 0, count * inputs).view([count, inputs]);
        codes.copy_(&self.codes.narrow(0, first, count));
        e4m3::decode(&codes, out);
        // Each block row's factors, one for each input.
        let blocks = (count + rows - 1) / rows;
        let factors = self.factors.narrow(0, first / rows, blocks);
        let factors = factors.repeat_interleave_self_int(columns, 1, None).narrow(1, 0, inputs);
        let (whole, rest) = (count / rows, count % rows);
        if whole > 0 {
            let of_blocks = out.narrow(0, 0, whole * rows).view([whole, rows, inputs]);
            let _ = of_blocks.shallow_clone().g_mul_(&factors.narrow(0, 0, whole).unsqueeze(1));
        }
        if rest > 0 {
            let _ = out.narrow(0, whole * rows, rest).g_mul_(&factors.narrow(0, whole, 1));
        }
    }
}
