//! Matrix products with a weight.

use std::cell::RefCell;

use tch::{Device, Kind, Tensor};

use crate::LoadError;
use crate::mapped::Parameter;
use crate::weights::Weights;

/// `x · weightᵀ + bias`.
#[derive(Debug)]
pub(crate) struct Linear {
    weight: Parameter, // [out, in]
    bias: Option<Parameter>,
}

/// Elements of a weight that are widened at a time: 8 MiB as float32, so that the product finds them in the cache.
const WIDENED_BLOCK: i64 = 2 << 20;

impl Linear {
    pub(crate) fn load(
        weights: &Weights<'_>,
        inputs: i64,
        outputs: i64,
        bias: bool,
    ) -> Result<Self, LoadError> {
        Ok(Self {
            weight: weights.get("weight", &[outputs, inputs])?,
            bias: if bias { Some(weights.get("bias", &[outputs])?) } else { None },
        })
    }

    /// One whose weight is used elsewhere too.
    pub(crate) fn sharing(weight: &Parameter) -> Self {
        Self { weight: weight.share(), bias: None }
    }

    /// `[rows, in]` to `[rows, out]`, in the kind of `x`.
    pub(crate) fn forward(&self, x: &Tensor) -> Tensor {
        let out = Tensor::empty([x.size()[0], self.weight.size()[0]], (x.kind(), x.device()));
        self.forward_into(x, &out);
        out
    }

    /// As [`forward`](Self::forward), into rows that are there already.
    pub(crate) fn forward_into(&self, x: &Tensor, out: &Tensor) {
        if self.weight.kind() == x.kind() {
            let _ = x.mm_out(out, &self.weight.tr());
        } else {
            self.widened_into(x, out);
        }
        if let Some(bias) = &self.bias {
            // A shallow clone is another handle on the same rows: in-place operators want `&mut`.
            let _ = out.shallow_clone().g_add_(bias);
        }
    }

    /// With a weight narrower than the activations, block by block of outputs.
    fn widened_into(&self, x: &Tensor, out: &Tensor) {
        let (outputs, inputs) = self.weight.size2().expect("a weight has two dimensions, checked in `load`");
        let block = (WIDENED_BLOCK / inputs).clamp(1, outputs);
        BLOCK.with_borrow_mut(|wide| {
            if wide.numel() < (block * inputs) as usize {
                *wide = Tensor::empty([WIDENED_BLOCK.max(inputs)], (Kind::Float, Device::Cpu));
            }
            let mut first = 0;
            while first < outputs {
                let count = block.min(outputs - first);
                let mut weight = wide.narrow(0, 0, count * inputs).view([count, inputs]);
                weight.copy_(&self.weight.narrow(0, first, count));
                let _ = x.mm_out(&out.narrow(1, first, count), &weight.tr());
                first += count;
            }
        });
    }
}

thread_local! {
    /// Where a block is widened: always the same memory, which stays in the cache and is not asked of the allocator
    /// for every block of every weight.
    static BLOCK: RefCell<Tensor> = RefCell::new(Tensor::empty([0], (Kind::Float, Device::Cpu)));
}
