//! The gated feed-forward of a dense layer, of the shared experts and of each routed one.

use tch::Tensor;

use crate::LoadError;
use crate::config::Config;
use crate::linear::Linear;
use crate::pieces::Pieces;
use crate::weights::Weights;

/// SwiGLU: `down(silu(gate(x)) * up(x))`.
#[derive(Debug)]
pub(crate) struct Mlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl Mlp {
    pub(crate) fn load(weights: &Weights<'_>, hidden: i64, inner: i64) -> Result<Self, LoadError> {
        Ok(Self {
            gate_proj: Linear::load(&weights.sub("gate_proj"), hidden, inner, false)?,
            up_proj: Linear::load(&weights.sub("up_proj"), hidden, inner, false)?,
            down_proj: Linear::load(&weights.sub("down_proj"), inner, hidden, false)?,
        })
    }

    /// Expert `index` of those that transformers 5 stores in one tensor for all of a layer: `gate_up_proj`, the gates' rows
    /// above the others, and `down_proj`.
    pub(crate) fn load_fused(weights: &Weights<'_>, config: &Config, index: i64) -> Result<Self, LoadError> {
        let (experts, hidden) = (config.n_routed_experts, config.hidden_size);
        let inner = config.moe_intermediate_size;
        let first = |rows| weights.get_slice("gate_up_proj", &[experts, 2 * inner, hidden], index, rows);
        Ok(Self {
            gate_proj: Linear::plain(first(0..inner)?),
            up_proj: Linear::plain(first(inner..2 * inner)?),
            down_proj: Linear::plain(weights.get_slice(
                "down_proj",
                &[experts, hidden, inner],
                index,
                0..hidden,
            )?),
        })
    }

    /// `[rows, hidden]` to the same shape and kind.
    pub(crate) fn forward(&self, x: &Tensor) -> Tensor {
        let out = x.empty_like();
        self.forward_into(x, &out);
        out
    }

    /// As [`forward`](Self::forward), into rows that are there already.
    pub(crate) fn forward_into(&self, x: &Tensor, out: &Tensor) {
        let rows = x.size()[0];
        let mut first = 0;
        while first < rows {
            let count = Pieces::in_use().mlp_rows.min(rows - first);
            let chunk = x.narrow(0, first, count);
            let mut inner = self.gate_proj.forward(&chunk).silu_();
            inner = inner.g_mul_(&self.up_proj.forward(&chunk));
            self.down_proj.forward_into(&inner, &out.narrow(0, first, count));
            first += count;
        }
    }
}
