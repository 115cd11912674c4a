//! Two four-bit codes to a byte, the first in the lower half.

use tch::{Kind, Tensor};

use crate::mapped::Parameter;

/// The codes of `count` rows of `bytes` (uint8, `[rows, inputs / 2]`) from `first` on, as int16 `[count, inputs]` with the
/// code in the upper four bits and zeros below. They are written into `room`, which holds at least as many int16.
pub(super) fn spread(bytes: &Parameter, first: i64, count: i64, room: &Tensor) -> Tensor {
    let half = bytes.size()[1];
    let room = room.narrow(0, 0, count * half * 2);
    // One byte in the lowest bits of each two codes, ...
    let mut pairs = room.view_dtype(Kind::Int).view([count, half]);
    pairs.copy_(&bytes.narrow(0, first, count));
    // ... then twice, twelve bits apart, so that its lower half ends up at the top of the first code and its upper half at the
    // top of the second. Every step runs along memory, which writing each half by itself would not.
    let again = pairs.bitwise_left_shift_tensor_scalar(12);
    let _ = pairs.bitwise_or_tensor_(&again);
    let _ = pairs.bitwise_left_shift_tensor_scalar_(12);
    let _ = pairs.bitwise_and_(i64::from(0xf000_f000u32.cast_signed()));
    room.view([count, half * 2])
}

/// Rows of bytes for a test.
#[cfg(test)]
pub(super) fn bytes(rows: &[&[u8]]) -> Parameter {
    let flat: Vec<u8> = rows.concat();
    Parameter::owned(Tensor::from_slice(&flat).view([rows.len() as i64, -1]).to_kind(Kind::Uint8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lower_half_of_a_byte_comes_first() {
        let bytes = bytes(&[&[0xff, 0xff], &[0x10, 0x32], &[0x98, 0xef]]);
        let room = Tensor::full([100], 77, (Kind::Int16, tch::Device::Cpu));
        let codes = spread(&bytes, 1, 2, &room).bitwise_right_shift_tensor_scalar(12).bitwise_and(15);
        assert_eq!(
            Vec::<i64>::try_from(codes.view(-1).to_kind(Kind::Int64)).unwrap(),
            [0, 1, 2, 3, 8, 9, 15, 14]
        );
    }
}
