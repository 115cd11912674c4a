//! A layer's experts.

use tch::{Kind, Tensor};

use crate::LoadError;
use crate::config::Config;
use crate::mlp::Mlp;
use crate::quantised::refuse_plain_where_packed;
use crate::routes::Routes;
use crate::routing::{Choice, Gate};
use crate::weights::Weights;

/// Routed experts, each token going to a few of them, and shared ones that see every token.
#[derive(Debug)]
pub(crate) struct Moe {
    gate: Gate,
    experts: Vec<Mlp>,
    shared_experts: Option<Mlp>,
}

impl Moe {
    pub(crate) fn load(weights: &Weights<'_>, config: &Config) -> Result<Self, LoadError> {
        let (hidden, inner) = (config.hidden_size, config.moe_intermediate_size);
        let experts = weights.sub("experts");
        // transformers 5 can write a layer's experts as two tensors.
        let fused = ["gate_up_proj", "down_proj"].into_iter().filter(|name| experts.dtype(name).is_some());
        let fused = fused.inspect(|name| refuse_plain_where_packed(&experts, name)).count() > 0;
        let expert = |expert| match fused {
            true => Mlp::load_fused(&experts, config, expert),
            false => Mlp::load(&experts.sub(expert), hidden, inner),
        };
        let shared = |count| Mlp::load(&weights.sub("shared_experts"), hidden, inner * count);
        Ok(Self {
            gate: Gate::load(&weights.sub("gate"), config)?,
            experts: (0..config.n_routed_experts).map(expert).collect::<Result<_, _>>()?,
            shared_experts: Some(config.n_shared_experts)
                .filter(|&count| count > 0)
                .map(shared)
                .transpose()?,
        })
    }

    /// `[rows, hidden]` to the same shape and kind. Rows are sorted by expert, so that every weight is multiplied once
    /// with all rows that need it; an expert that no row chose is not touched.
    pub(crate) fn forward(&self, x: &Tensor, routes: &mut Routes<'_>) -> Tensor {
        let choice = self.gate.forward(x, routes.next(x.size()[0]).as_ref());
        routes.record(&choice.experts);
        let routed = self.routed(x, &choice);
        match &self.shared_experts {
            // The shared experts' output is not scaled.
            Some(shared) => shared.forward(x).g_add_(&routed),
            None => routed,
        }
    }

    fn routed(&self, x: &Tensor, choice: &Choice) -> Tensor {
        let (rows, hidden) = x.size2().expect("rows and hidden");
        let sorted = Sorted::by_expert(&choice.experts, self.experts.len());
        let tokens = Tensor::from_slice(&sorted.tokens).to_device(x.device());
        // One row for each pair of token and expert, in the order of the experts.
        let outputs = Tensor::empty([sorted.tokens.len() as i64, hidden], (x.kind(), x.device()));
        let mut first = 0;
        for (expert, &count) in self.experts.iter().zip(&sorted.counts).filter(|(_, count)| **count > 0) {
            let inputs = x.index_select(0, &tokens.narrow(0, first, count));
            expert.forward_into(&inputs, &outputs.narrow(0, first, count));
            first += count;
        }
        // The weighted sum of each token's rows, gathered where they lie: one pass instead of scaling, reordering and adding.
        let places = Tensor::from_slice(&sorted.places).to_device(x.device());
        let top_k = choice.experts.size()[1];
        let bags = Tensor::arange_start_step(0, rows * top_k, top_k, (Kind::Int64, x.device()));
        let weights = choice.weights.to_kind(x.kind()).view(-1);
        const SUM: i64 = 0;
        Tensor::embedding_bag(&outputs, &places, &bags, false, SUM, false, Some(&weights), false).0
    }
}

/// Pairs of token and expert, in the order of the experts.
struct Sorted {
    /// The token of each pair.
    tokens: Vec<i64>,
    /// How many pairs each expert has.
    counts: Vec<i64>,
    /// Where each token's pairs went, `[rows, top_k]`.
    places: Vec<i64>,
}

impl Sorted {
    /// A counting sort on the host: the counts are needed there anyway, to size the products.
    fn by_expert(experts: &Tensor, num_experts: usize) -> Self {
        let top_k = experts.size()[1] as usize;
        let experts: Vec<i64> = experts.reshape(-1).try_into().expect("experts are a flat tensor of int64");
        let mut counts = vec![0i64; num_experts];
        for &expert in &experts {
            counts[expert as usize] += 1;
        }
        let mut next: Vec<i64> = counts
            .iter()
            .scan(0, |end, &count| {
                *end += count;
                Some(*end - count)
            })
            .collect();
        let mut tokens = vec![0; experts.len()];
        let place = |(pair, &expert): (usize, &i64)| {
            let place = next[expert as usize];
            next[expert as usize] += 1;
            tokens[place as usize] = (pair / top_k) as i64;
            place
        };
        let places = experts.iter().enumerate().map(place).collect();
        Self { tokens, counts, places }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_sorted_by_expert_and_tokens_find_theirs_again() {
        // From a view at an offset, which the sort must respect.
        let experts = Tensor::from_slice(&[9i64, 9, 3, 0, 1, 3, 3, 1]).view([4, 2]).narrow(0, 1, 3);
        let sorted = Sorted::by_expert(&experts, 5);
        assert_eq!(sorted.counts, [1, 2, 0, 3, 0]);
        assert_eq!(sorted.tokens, [0, 1, 2, 0, 1, 2]);
        assert_eq!(sorted.places, [3, 0, 1, 4, 5, 2]);
    }
}
