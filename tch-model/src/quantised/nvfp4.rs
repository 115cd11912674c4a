//! NVFP4: four-bit floats (a sign, two bits of exponent, one of mantissa), an fp8 factor for sixteen inputs of an output,
//! and a float32 one for the matrix.

use safetensors::Dtype;
use tch::{Device, Kind, Tensor};

use super::{e4m3, nibbles};
use crate::LoadError;
use crate::config::NVFP4_GROUP;
use crate::mapped::Parameter;
use crate::weights::Weights;

/// A matrix in four-bit floats.
#[derive(Debug)]
pub(crate) struct Nvfp4 {
    bytes: Parameter,   // uint8, [outputs, inputs / 2]
    factors: Parameter, // int8 bits, [outputs, inputs / 16]
    of_matrix: Parameter,
    names: Names,
}

/// The two tools' names, and what they mean by the matrix's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Names {
    /// `weight`, `weight_scale`, `weight_scale_2`: factors are multiplied by it.
    ModelOpt,
    /// `weight_packed`, `weight_scale`, `weight_global_scale`: factors are divided by it.
    CompressedTensors,
}

/// A float of four bits, moved to where a half-precision one has sign, exponent and mantissa, is so much too small.
const UNIT: f64 = 16384.0;

impl Nvfp4 {
    pub(super) fn load(weights: &Weights<'_>, size: [i64; 2], names: Names) -> Result<Self, LoadError> {
        let [outputs, inputs] = size;
        if inputs % NVFP4_GROUP != 0 {
            let module = weights.module();
            weights
                .refuse(format!("`{module}` has {inputs} inputs, and nvfp4 fills groups of {NVFP4_GROUP}"));
        }
        let (packed, of_matrix) = match names {
            Names::ModelOpt => ("weight", "weight_scale_2"),
            Names::CompressedTensors => ("weight_packed", "weight_global_scale"),
        };
        let half = [outputs, inputs / 2];
        let bytes = weights.bits(packed, Dtype::U8, &half, (Kind::Uint8, &half))?;
        let groups = [outputs, inputs / NVFP4_GROUP];
        let factors = weights.bits("weight_scale", Dtype::F8_E4M3, &groups, (Kind::Int8, &groups))?;
        let stored = [packed, "weight_scale", of_matrix];
        let of_matrix = weights.one_factor(of_matrix)?;
        weights.count_packed("nvfp4", outputs * inputs, &stored, bytes.is_mapped());
        Ok(Self { bytes, factors, of_matrix, names })
    }

    pub(super) fn device(&self) -> Device {
        self.bytes.device()
    }

    pub(super) fn size(&self) -> [i64; 2] {
        let (outputs, half) = self.bytes.size2().expect("a matrix, checked in `load`");
        [outputs, half * 2]
    }

    pub(super) fn expand(&self, first: i64, count: i64, out: &Tensor, codes: &Tensor) {
        let factors = self.factors(first, count);
        let mut codes = nibbles::spread(&self.bytes, first, count, codes);
        // Shifted down with its sign, of which only one bit may stay: exponent and mantissa are then where they belong.
        let _ = codes.bitwise_right_shift_tensor_scalar_(3);
        let _ = codes.bitwise_and_(!0x7000);
        out.shallow_clone().copy_(&codes.view_dtype(Kind::Half));
        let _ = out.view([count, -1, NVFP4_GROUP]).g_mul_(&factors.unsqueeze(-1));
    }

    /// Of some rows, f32 `[count, groups]`, times [`UNIT`]. Rounded to float32 once, by the matrix's number, as the two
    /// tools do it.
    fn factors(&self, first: i64, count: i64) -> Tensor {
        let codes = self.factors.narrow(0, first, count).to_kind(Kind::Int16);
        let out = Tensor::empty(codes.size(), (Kind::Float, codes.device()));
        e4m3::decode(&codes, &out);
        let exact = out * e4m3::UNIT;
        let rounded = match self.names {
            Names::ModelOpt => exact * &*self.of_matrix,
            Names::CompressedTensors => exact / &*self.of_matrix,
        };
        rounded * UNIT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_the_number_of_the_definition() {
        // All sixteen codes, and a group factor of 1.5 (0x3c: exponent 7, mantissa 4), in both tools' senses.
        let bytes: Vec<u8> = (0..8u8).map(|pair| (2 * pair) | (2 * pair + 1) << 4).collect();
        let values = [0.0f32, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for (names, of_matrix, factor) in
            [(Names::ModelOpt, 2.0f32, 3.0f32), (Names::CompressedTensors, 2.0, 0.75)]
        {
            let matrix = Nvfp4 {
                bytes: nibbles::bytes(&[&bytes]),
                factors: Parameter::owned(Tensor::from_slice(&[0x3ci8]).view([1, 1])),
                of_matrix: Parameter::owned(Tensor::from(of_matrix)),
                names,
            };
            let out = Tensor::empty([1, 16], (Kind::Float, Device::Cpu));
            matrix.expand(0, 1, &out, &Tensor::empty([16], (Kind::Int16, Device::Cpu)));
            let found = Vec::<f32>::try_from(out.view(-1)).unwrap();
            for (code, found) in found.into_iter().enumerate() {
                let expected = values[code % 8] * factor * if code < 8 { 1.0 } else { -1.0 };
                assert_eq!(found.to_bits(), expected.to_bits(), "code {code}: {found} is not {expected}");
            }
        }
    }
}
