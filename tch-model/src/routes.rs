//! Watching, or deciding, which experts a step uses.

use tch::Tensor;

use crate::ForwardError;

/// Which experts the tokens of a step go to. Comparisons at near-ties need it: two routers that agree to the last bit
/// but one may still choose differently, and everything after that differs for no fault of either.
#[derive(Debug)]
pub enum Routes<'a> {
    /// The gate decides, nobody watches.
    Free,
    /// The gate decides; the choices are added here, layer by layer and tile by tile: `[tile rows, top_k]`, int64.
    Recorded(&'a mut Vec<Tensor>),
    /// The experts are these, one tensor `[num_tokens, top_k]` for each layer that has experts; the gate gives the weights.
    Forced {
        /// Experts by layer.
        experts: &'a [Tensor],
        /// Rows of the current layer that are done.
        row: i64,
        /// The current layer among those that have experts.
        layer: usize,
    },
}

impl<'a> Routes<'a> {
    /// Forces `experts`, one tensor `[num_tokens, top_k]` for each layer that has experts.
    pub fn forced(experts: &'a [Tensor]) -> Self {
        Self::Forced { experts, row: 0, layer: 0 }
    }

    /// The forced experts of the next `rows` rows.
    pub(crate) fn next(&mut self, rows: i64) -> Option<Tensor> {
        let Self::Forced { experts, row, layer } = self else { return None };
        let of_layer = &experts[*layer];
        let next = of_layer.narrow(0, *row, rows);
        *row += rows;
        if *row == of_layer.size()[0] {
            (*row, *layer) = (0, *layer + 1);
        }
        Some(next)
    }

    pub(crate) fn record(&mut self, experts: &Tensor) {
        if let Self::Recorded(choices) = self {
            choices.push(experts.shallow_clone());
        }
    }

    /// Forced experts must be what the gate itself could have chosen.
    pub(crate) fn check(
        &self,
        layers: usize,
        rows: i64,
        top_k: i64,
        num_experts: i64,
    ) -> Result<(), ForwardError> {
        let Self::Forced { experts, .. } = self else { return Ok(()) };
        let refuse = |reason: String| Err(ForwardError::Routes { reason });
        if experts.len() != layers {
            return refuse(format!("{} layers of them, the model has {layers} with experts", experts.len()));
        }
        for (layer, of_layer) in experts.iter().enumerate() {
            if of_layer.size() != [rows, top_k] || of_layer.kind() != tch::Kind::Int64 {
                let found = (of_layer.size(), of_layer.kind());
                return refuse(format!(
                    "layer {layer} has {found:?}, the step needs int64 [{rows}, {top_k}]"
                ));
            }
            if rows > 0
                && !(of_layer.min().int64_value(&[]) >= 0 && of_layer.max().int64_value(&[]) < num_experts)
            {
                return refuse(format!("layer {layer} has experts outside 0..{num_experts}"));
            }
        }
        Ok(())
    }
}
