//! One decoder layer.

use tch::{Kind, Tensor};

use crate::LoadError;
use crate::attention::{Attention, Step};
use crate::batch::Tile;
use crate::config::Config;
use crate::mlp::Mlp;
use crate::moe::Moe;
use crate::norm::RmsNorm;
use crate::routes::Routes;
use crate::weights::Weights;

/// Attention, then feed-forward, each adding to the residual stream what it makes of the normed stream.
#[derive(Debug)]
pub(crate) struct DecoderLayer {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    mlp: FeedForward,
}

/// What follows attention.
#[derive(Debug)]
enum FeedForward {
    Dense(Mlp),
    Experts(Moe),
}

impl DecoderLayer {
    /// Layer `index`; `kind` is that of activations.
    pub(crate) fn load(
        weights: &Weights<'_>,
        config: &Config,
        index: i64,
        kind: Kind,
    ) -> Result<Self, LoadError> {
        let hidden = config.hidden_size;
        let norm = |name: &str| RmsNorm::load(&weights.sub(name), hidden, config.rms_norm_eps, kind);
        let mlp = weights.sub("mlp");
        Ok(Self {
            input_layernorm: norm("input_layernorm")?,
            self_attn: Attention::load(&weights.sub("self_attn"), config, index, kind)?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            mlp: match config.is_moe(index) {
                true => FeedForward::Experts(Moe::load(&mlp, config)?),
                false => FeedForward::Dense(Mlp::load(&mlp, hidden, config.intermediate_size)?),
            },
        })
    }

    /// Takes the tile's rows of the residual stream, `[tile rows, hidden]`, from before this layer to behind it, in place.
    pub(crate) fn forward_(&self, rows: &mut Tensor, tile: &Tile, step: &Step, routes: &mut Routes<'_>) {
        let attended = self.self_attn.forward(&self.input_layernorm.forward(rows), tile, step);
        let _ = rows.g_add_(&attended);
        let normed = self.post_attention_layernorm.forward(rows);
        let fed = match &self.mlp {
            FeedForward::Dense(mlp) => mlp.forward(&normed),
            FeedForward::Experts(moe) => moe.forward(&normed, routes),
        };
        let _ = rows.g_add_(&fed);
    }
}
