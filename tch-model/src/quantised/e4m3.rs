//! Eight-bit floats: a sign, four bits of exponent, three of mantissa, no infinities (e4m3fn).

use tch::{Kind, Tensor};

/// What [`decode`] leaves out: a power of two, so that multiplying by it, now or as part of a factor, is exact.
pub(super) const UNIT: f64 = 256.0;

/// Decodes `codes`, the bytes sign-extended to int16, which are overwritten, into `out` (f32, the same shape): the numbers
/// divided by [`UNIT`].
///
/// A half-precision float has its exponent and mantissa seven bits further up, and a bias that is larger by eight, also
/// for subnormal numbers; and processors widen halves in one instruction.
pub(super) fn decode(codes: &Tensor, out: &Tensor) {
    let mut codes = codes.shallow_clone();
    let _ = codes.bitwise_left_shift_tensor_scalar_(7);
    // The sign, extended, is in the two upper bits, and the lower of them would be the exponent's.
    let _ = codes.bitwise_and_(!0x4000);
    let mut values = out.shallow_clone();
    values.copy_(&codes.view_dtype(Kind::Half));
    // The largest number is 448; the one code beyond it means NaN.
    const NAN: f64 = 480.0 / UNIT;
    let (least, most) = values.aminmax(None, false);
    if most.double_value(&[]) >= NAN || least.double_value(&[]) <= -NAN {
        let _ = values.masked_fill_(&values.abs().ge(NAN), f64::NAN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the definition: `(-1)^s * 2^(e - 7) * (1 + m / 8)`, subnormal below.
    fn value(code: u8) -> f32 {
        let (sign, exponent, mantissa) = (code >> 7, i32::from(code >> 3 & 15), f32::from(code & 7));
        let size = match exponent {
            0 => mantissa / 8.0 * 2f32.powi(-6),
            15 if code & 7 == 7 => f32::NAN,
            _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
        };
        if sign == 1 { -size } else { size }
    }

    #[test]
    fn every_code_is_the_number_of_the_definition() {
        let codes: Vec<i16> = (0..=255u8).map(|code| i16::from(code as i8)).collect();
        let out = Tensor::empty([256], (Kind::Float, tch::Device::Cpu));
        decode(&Tensor::from_slice(&codes), &out);
        for (code, found) in (0..=255u8).zip(Vec::<f32>::try_from(&out).unwrap()) {
            let (found, expected) = (found * UNIT as f32, value(code));
            let same = found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan());
            assert!(same, "{code:#04x}: {found} is not {expected}");
        }
    }
}
