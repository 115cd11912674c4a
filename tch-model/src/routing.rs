//! Which experts a token goes to, and with what weights.

use tch::{Kind, Tensor};

use crate::LoadError;
use crate::config::{Config, TopkMethod};
use crate::mapped::Parameter;
use crate::weights::Weights;

/// The gate of a layer with experts. Everything in it is float32, whatever the model's kind: a logit rounded to
/// bfloat16 would flip choices.
#[derive(Debug)]
pub(crate) struct Gate {
    weight: Parameter, // [experts, hidden], f32
    routing: Routing,
    top_k: i64,
    norm_topk_prob: bool,
    routed_scaling_factor: f64,
}

/// How logits become a choice.
#[derive(Debug)]
enum Routing {
    /// V2-Lite: softmax, the best `top_k` of all experts.
    Greedy,
    /// V2: softmax, the best `top_k` inside the best groups; a group scores its maximum.
    GroupLimited { n_group: i64, topk_group: i64 },
    /// V3: sigmoid; a group scores the sum of its best two. `bias` (`[experts]`, f32) sways the choice and stays out of
    /// the weights.
    NoAuxTc { n_group: i64, topk_group: i64, bias: Parameter },
}

/// The choice for some rows.
#[derive(Debug)]
pub(crate) struct Choice {
    /// `[rows, top_k]`, int64
    pub(crate) experts: Tensor,
    /// `[rows, top_k]`, f32: normalised and scaled as the config asks.
    pub(crate) weights: Tensor,
}

impl Gate {
    pub(crate) fn load(weights: &Weights<'_>, config: &Config) -> Result<Self, LoadError> {
        let (experts, n_group, topk_group) = (config.n_routed_experts, config.n_group, config.topk_group);
        let routing = match config.topk_method {
            TopkMethod::Greedy => Routing::Greedy,
            TopkMethod::GroupLimitedGreedy => Routing::GroupLimited { n_group, topk_group },
            TopkMethod::NoauxTc => {
                let bias = weights.get_as("e_score_correction_bias", &[experts], Kind::Float)?;
                Routing::NoAuxTc { n_group, topk_group, bias }
            }
        };
        Ok(Self {
            weight: weights.get_as("weight", &[experts, config.hidden_size], Kind::Float)?,
            routing,
            top_k: config.num_experts_per_tok,
            norm_topk_prob: config.norm_topk_prob,
            routed_scaling_factor: config.routed_scaling_factor,
        })
    }

    /// Experts and weights for each row of `x` (`[rows, hidden]`, any kind). With `forced`, `[rows, top_k]`, those experts
    /// are taken and only their weights computed.
    pub(crate) fn forward(&self, x: &Tensor, forced: Option<&Tensor>) -> Choice {
        self.choose(&x.to_kind(Kind::Float).mm(&self.weight.tr()), forced)
    }

    /// From logits, `[rows, experts]`.
    fn choose(&self, logits: &Tensor, forced: Option<&Tensor>) -> Choice {
        let scores = match self.routing {
            Routing::Greedy | Routing::GroupLimited { .. } => logits.softmax(-1, Kind::Float),
            Routing::NoAuxTc { .. } => logits.sigmoid(),
        };
        let best = |scores: &Tensor| scores.topk(self.top_k, -1, true, false).1;
        let experts = match (forced, &self.routing) {
            (Some(forced), _) => forced.shallow_clone(),
            (None, Routing::Greedy) => best(&scores),
            (None, &Routing::GroupLimited { n_group, topk_group }) => {
                let grouped = in_groups(&scores, n_group);
                best(&keep_groups(&grouped, &grouped.amax([-1i64].as_slice(), false), topk_group))
            }
            (None, Routing::NoAuxTc { n_group, topk_group, bias }) => {
                let swayed = &scores + &**bias;
                if *n_group == 1 {
                    best(&swayed)
                } else {
                    let grouped = in_groups(&swayed, *n_group);
                    let best_two = grouped.topk(2, -1, true, false).0;
                    let group_scores = best_two.sum_dim_intlist([-1i64].as_slice(), false, Kind::Float);
                    best(&keep_groups(&grouped, &group_scores, *topk_group))
                }
            }
        };
        let mut weights = scores.gather(-1, &experts, false);
        if self.norm_topk_prob {
            weights = &weights / (weights.sum_dim_intlist([-1i64].as_slice(), true, Kind::Float) + 1e-20);
        }
        // Whether or not they were normalised, and once. The authors' V2 code scales only what it does not normalise; no
        // published V2 normalises, and SGLang and transformers' V3 scale both.
        Choice { experts, weights: weights * self.routed_scaling_factor }
    }
}

/// `[rows, experts]` as `[rows, groups, experts per group]`.
fn in_groups(scores: &Tensor, n_group: i64) -> Tensor {
    let (rows, experts) = scores.size2().expect("rows and experts");
    scores.reshape([rows, n_group, experts / n_group])
}

/// Scores with those outside the best groups at minus infinity, as `[rows, experts]`. Not at zero: a biased score can be
/// negative, and an expert of a dropped group would then beat one of a kept group.
fn keep_groups(grouped: &Tensor, group_scores: &Tensor, topk_group: i64) -> Tensor {
    let kept = group_scores.topk(topk_group, -1, true, false).1;
    let dropped = group_scores.ones_like().scatter_value(-1, &kept, 0.0).to_kind(Kind::Bool);
    grouped.masked_fill(&dropped.unsqueeze(-1), f64::NEG_INFINITY).flatten(1, 2)
}

#[cfg(test)]
mod tests;
