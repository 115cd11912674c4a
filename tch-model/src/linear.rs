//! Matrix products with a weight.

use std::cell::RefCell;

use tch::{Device, Kind, Tensor};

use crate::LoadError;
use crate::mapped::Parameter;
use crate::pieces::Pieces;
use crate::quantised::Packed;
use crate::weights::Weights;

/// `x · weightᵀ + bias`.
#[derive(Debug)]
pub(crate) struct Linear {
    weight: Matrix, // [out, in]
    bias: Option<Parameter>,
}

/// A weight, plain or packed.
#[derive(Debug)]
enum Matrix {
    Plain(Parameter),
    Packed(Packed),
}

impl Linear {
    pub(crate) fn load(
        weights: &Weights<'_>,
        inputs: i64,
        outputs: i64,
        bias: bool,
    ) -> Result<Self, LoadError> {
        Ok(Self {
            weight: match Packed::load(weights, outputs, inputs)? {
                Some(packed) => Matrix::Packed(packed),
                None => Matrix::Plain(weights.get("weight", &[outputs, inputs])?),
            },
            bias: if bias { Some(weights.get("bias", &[outputs])?) } else { None },
        })
    }

    /// One whose weight is used elsewhere too.
    pub(crate) fn sharing(weight: &Parameter) -> Self {
        Self::plain(weight.share())
    }

    /// One with this weight, `[out, in]`.
    pub(crate) fn plain(weight: Parameter) -> Self {
        Self { weight: Matrix::Plain(weight), bias: None }
    }

    /// `[rows, in]` to `[rows, out]`, in the kind of `x`.
    pub(crate) fn forward(&self, x: &Tensor) -> Tensor {
        let out = Tensor::empty([x.size()[0], self.size().0], (x.kind(), x.device()));
        self.forward_into(x, &out);
        out
    }

    /// As [`forward`](Self::forward), into rows that are there already.
    pub(crate) fn forward_into(&self, x: &Tensor, out: &Tensor) {
        match &self.weight {
            Matrix::Plain(weight) if weight.kind() == x.kind() => {
                let _ = x.mm_out(out, &weight.tr());
            }
            _ => self.blocks(|first, weight| {
                let weight = weight.to_kind(x.kind());
                let _ = x.mm_out(&out.narrow(1, first, weight.size()[0]), &weight.tr());
            }),
        }
        if let Some(bias) = &self.bias {
            // A shallow clone is another handle on the same rows: in-place operators want `&mut`.
            let _ = out.shallow_clone().g_add_(bias);
        }
    }

    /// The whole weight, `[out, in]`, in `kind`, to be read only: for products that this struct does not make.
    pub(crate) fn expanded(&self, kind: Kind) -> Tensor {
        if let Matrix::Plain(weight) = &self.weight
            && weight.kind() == kind
        {
            return weight.shallow_clone();
        }
        let (outputs, inputs) = self.size();
        let mut whole = Tensor::empty([outputs, inputs], (kind, self.device()));
        match &self.weight {
            Matrix::Plain(weight) => whole.copy_(weight),
            Matrix::Packed(_) => {
                self.blocks(|first, weight| whole.narrow(0, first, weight.size()[0]).copy_(weight));
            }
        }
        whole
    }

    fn size(&self) -> (i64, i64) {
        match &self.weight {
            Matrix::Plain(weight) => weight.size2().expect("a weight has two dimensions, checked in `load`"),
            Matrix::Packed(weight) => weight.size(),
        }
    }

    fn device(&self) -> Device {
        match &self.weight {
            Matrix::Plain(weight) => weight.device(),
            Matrix::Packed(weight) => weight.device(),
        }
    }

    /// Hands out the weight in float32, block by block of outputs, each with the first of its outputs. A block is only
    /// there during the call.
    fn blocks(&self, mut with: impl FnMut(i64, &Tensor)) {
        let (outputs, inputs) = self.size();
        let step = match &self.weight {
            Matrix::Plain(_) => 1,
            Matrix::Packed(weight) => weight.row_step(),
        };
        // Whole steps, at least one, and no more than there is.
        let rows = (Pieces::in_use().weight_elements / inputs / step * step).max(step).min(outputs);
        let mut run = |room: &Room| {
            let mut first = 0;
            while first < outputs {
                let count = rows.min(outputs - first);
                let mut wide = room.wide.narrow(0, 0, count * inputs).view([count, inputs]);
                match &self.weight {
                    Matrix::Plain(weight) => wide.copy_(&weight.narrow(0, first, count)),
                    Matrix::Packed(weight) => weight.expand(first, count, &wide, &room.codes),
                }
                with(first, &wide);
                first += count;
            }
        };
        match self.device() {
            Device::Cpu => ROOM.with_borrow_mut(|room| {
                room.grow(rows * inputs, matches!(self.weight, Matrix::Packed(_)));
                run(room);
            }),
            // Its allocator keeps memory for the next one by itself.
            device => run(&Room::new(rows * inputs, device)),
        }
    }
}

/// Where a block is widened or expanded.
struct Room {
    wide: Tensor,  // f32
    codes: Tensor, // int16
}

impl Room {
    fn new(elements: i64, device: Device) -> Self {
        let room = |kind| Tensor::empty([elements], (kind, device));
        Self { wide: room(Kind::Float), codes: room(Kind::Int16) }
    }

    fn grow(&mut self, elements: i64, codes: bool) {
        let enough = |room: &mut Tensor| {
            if room.numel() < elements as usize {
                *room = Tensor::empty(
                    [elements.max(Pieces::in_use().weight_elements)],
                    (room.kind(), Device::Cpu),
                );
            }
        };
        enough(&mut self.wide);
        if codes {
            enough(&mut self.codes);
        }
    }
}

thread_local! {
    /// Always the same memory, which stays in the cache and is not asked of the allocator for every block of every weight.
    static ROOM: RefCell<Room> = RefCell::new(Room::new(0, Device::Cpu));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// NM-29: a fallback for bfloat16 that sums in bfloat16 stops at 256 ones.
    #[test]
    fn a_thousand_ones_are_a_thousand_in_every_way_of_multiplying() {
        let ones = |rows, kind| Tensor::ones([rows, 1024], (kind, Device::Cpu));
        for weight in [Kind::Float, Kind::BFloat16] {
            let linear = Linear::plain(Parameter::owned(ones(1024, weight)));
            for activations in [Kind::Float, weight] {
                let found = linear.forward(&ones(7, activations));
                assert_eq!(found.kind(), activations);
                let (least, most) = (found.min().double_value(&[]), found.max().double_value(&[]));
                assert_eq!((least, most), (1024.0, 1024.0), "{weight:?} with {activations:?}");
            }
        }
    }

    /// Blocks end where they may, not where the weight ends.
    #[test]
    fn a_weight_of_several_blocks_is_multiplied_whole() {
        tch::manual_seed(5);
        let (outputs, inputs) = (3 * (Pieces::in_use().weight_elements / 4096) + 5, 4096);
        let weight = Tensor::randn([outputs, inputs], (Kind::BFloat16, Device::Cpu));
        let x = Tensor::randn([3, inputs], (Kind::Float, Device::Cpu));
        let expected = x.mm(&weight.to_kind(Kind::Float).tr());
        let linear = Linear::plain(Parameter::owned(weight.shallow_clone()));
        assert!(linear.forward(&x).allclose(&expected, 1e-4, 1e-3, false));
        assert_eq!(linear.expanded(Kind::BFloat16), weight);
    }
}
