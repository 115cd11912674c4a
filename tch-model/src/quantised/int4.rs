//! Four-bit integers as compressed-tensors packs them: `weight_packed`, eight to an int32, `weight_scale` and
//! `weight_shape`. A code is the integer plus eight.

use safetensors::Dtype;
use tch::{Device, Kind, Tensor};

use super::nibbles;
use crate::LoadError;
use crate::mapped::Parameter;
use crate::weights::Weights;

/// A matrix in four-bit integers.
#[derive(Debug)]
pub(crate) struct Int4 {
    bytes: Parameter,   // uint8, [outputs, inputs / 2]
    factors: Parameter, // as stored, [outputs, inputs / group]
    group: i64,
}

impl Int4 {
    pub(super) fn load(weights: &Weights<'_>, size: [i64; 2], group: i64) -> Result<Self, LoadError> {
        let [outputs, inputs] = size;
        let module = weights.module();
        if inputs % 8 != 0 || inputs % group != 0 {
            let problem =
                format!("`{module}` has {inputs} inputs, and int4 fills words of 8 and groups of {group}");
            weights.refuse(problem);
        }
        match weights.integers("weight_shape") {
            Some(shape) if shape == size => {}
            Some(shape) => {
                weights
                    .refuse(format!("`{module}.weight_shape` says {shape:?}, the config asks for {size:?}"));
            }
            None => weights.refuse(format!("`{module}.weight_shape` is missing, or neither I32 nor I64")),
        }
        // The bytes of little-endian words come in the order of the codes.
        let words = [outputs, inputs / 8];
        let bytes =
            weights.bits("weight_packed", Dtype::I32, &words, (Kind::Uint8, &[outputs, inputs / 2]))?;
        let factors = weights.factors_as_stored("weight_scale", &[outputs, inputs / group])?;
        let names = ["weight_packed", "weight_scale", "weight_shape"];
        weights.count_packed(
            &format!("int4, groups of {group}"),
            outputs * inputs,
            &names,
            bytes.is_mapped(),
        );
        Ok(Self { bytes, factors, group })
    }

    pub(super) fn device(&self) -> Device {
        self.bytes.device()
    }

    pub(super) fn size(&self) -> [i64; 2] {
        let (outputs, half) = self.bytes.size2().expect("a matrix, checked in `load`");
        [outputs, half * 2]
    }

    pub(super) fn expand(&self, first: i64, count: i64, out: &Tensor, codes: &Tensor) {
        let mut codes = nibbles::spread(&self.bytes, first, count, codes);
        // Plus eight is the upper bit turned over; what is left is an integer with a sign.
        let _ = codes.bitwise_xor_(-0x8000);
        let _ = codes.bitwise_right_shift_tensor_scalar_(12);
        out.shallow_clone().copy_(&codes);
        let factors = self.factors.narrow(0, first, count).to_kind(Kind::Float).unsqueeze(-1);
        let _ = out.view([count, -1, self.group]).g_mul_(&factors);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// NM-21: -8 to 7 in order, by hand: codes 0 to 15, so words 0x76543210 and 0xfedcba98.
    #[test]
    fn codes_run_from_minus_eight_to_seven_from_the_lowest_bits_up() {
        let words = [0x7654_3210u32, 0xfedc_ba98, 0x8888_8889, 0x0f8f_8888];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let factors = Tensor::from_slice(&[0.5f32, 2.0, 1.0, 3.0]).view([2, 2]).to_kind(Kind::BFloat16);
        let matrix = Int4 {
            bytes: nibbles::bytes(&[&bytes[..8], &bytes[8..]]),
            factors: Parameter::owned(factors),
            group: 8,
        };
        let expand = |first, count| {
            let out = Tensor::empty([count, 16], (Kind::Float, Device::Cpu));
            matrix.expand(first, count, &out, &Tensor::empty([64], (Kind::Int16, Device::Cpu)));
            Vec::<f32>::try_from(out.view(-1)).unwrap()
        };
        let both = expand(0, 2);
        assert_eq!(both[..8], [-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5]);
        assert_eq!(both[8..16], [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]);
        assert_eq!(both[16..24], [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(both[24..], [0.0, 0.0, 0.0, 0.0, 21.0, 0.0, 21.0, -24.0]);
        assert_eq!(expand(1, 1), both[16..]);
    }
}
