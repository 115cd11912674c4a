//! Multi-head latent attention, expanded: keys and values are made from their compressed form and attended to as usual.

mod softmax;

use tch::{Kind, Tensor};

use crate::LoadError;
use crate::batch::{Segment, Tile};
use crate::config::{Config, Yarn};
use crate::linear::Linear;
use crate::norm::RmsNorm;
use crate::rope::rotate_;
use crate::weights::Weights;
use softmax::{Attended, attend};

/// Attention of one layer.
#[derive(Debug)]
pub(crate) struct Attention {
    query: Query,
    kv_a_proj_with_mqa: Linear,
    kv_a_layernorm: RmsNorm,
    kv_b_proj: Linear,
    o_proj: Linear,
    heads: i64,
    qk_nope_head_dim: i64,
    qk_rope_head_dim: i64,
    v_head_dim: i64,
    kv_lora_rank: i64,
    scale: f64,
}

/// How queries are made.
#[derive(Debug)]
enum Query {
    /// V2-Lite: at once.
    Direct { q_proj: Linear },
    /// By way of a narrow, normed vector.
    LowRank { q_a_proj: Linear, q_a_layernorm: RmsNorm, q_b_proj: Linear },
}

/// What all layers of a step share.
#[derive(Debug)]
pub(crate) struct Step {
    /// The rotation of every packed row: complex, `[num_tokens, pairs]`.
    pub(crate) rotations: Tensor,
    /// Compressed keys and values of the current layer, `[num_tokens, kv_lora_rank + qk_rope_head_dim]`: normed and
    /// rotated, in the kind of activations. A tile that begins inside a sequence finds the rows before it here.
    pub(crate) latents: Tensor,
}

/// Keys of earlier tiles that are expanded at a time, so that a long sequence needs no more memory than a short one.
const EARLIER_KEYS: i64 = 4096;

/// The reference norms compressed queries, keys and values with this whatever `rms_norm_eps` says.
const LATENT_EPS: f64 = 1e-6;

impl Attention {
    /// `kind` is that of activations.
    pub(crate) fn load(weights: &Weights<'_>, config: &Config, kind: Kind) -> Result<Self, LoadError> {
        let Config { hidden_size, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, .. } =
            *config;
        let (heads, bias) = (config.num_attention_heads, config.attention_bias);
        let linear =
            |name: &str, inputs, outputs, bias| Linear::load(&weights.sub(name), inputs, outputs, bias);
        let norm = |name: &str, size| RmsNorm::load(&weights.sub(name), size, LATENT_EPS, kind);
        let queries = heads * config.qk_head_dim();
        let query = match config.q_lora_rank {
            None => Query::Direct { q_proj: linear("q_proj", hidden_size, queries, false)? },
            Some(rank) => Query::LowRank {
                q_a_proj: linear("q_a_proj", hidden_size, rank, bias)?,
                q_a_layernorm: norm("q_a_layernorm", rank)?,
                q_b_proj: linear("q_b_proj", rank, queries, false)?,
            },
        };
        let (latent, expanded) = (kv_lora_rank + qk_rope_head_dim, heads * (qk_nope_head_dim + v_head_dim));
        Ok(Self {
            query,
            kv_a_proj_with_mqa: linear("kv_a_proj_with_mqa", hidden_size, latent, bias)?,
            kv_a_layernorm: norm("kv_a_layernorm", kv_lora_rank)?,
            kv_b_proj: linear("kv_b_proj", kv_lora_rank, expanded, false)?,
            o_proj: linear("o_proj", heads * v_head_dim, hidden_size, bias)?,
            heads,
            qk_nope_head_dim,
            qk_rope_head_dim,
            v_head_dim,
            kv_lora_rank,
            scale: scale(config),
        })
    }

    /// `[tile rows, hidden]` to the same shape and kind. Every row sees the rows of its sequence up to itself, those in
    /// earlier tiles included.
    pub(crate) fn forward(&self, x: &Tensor, tile: &Tile, step: &Step) -> Tensor {
        let rotations = step.rotations.narrow(0, tile.first, tile.rows);
        let queries = self.queries(x, &rotations);
        self.compress(x, &step.latents.narrow(0, tile.first, tile.rows), &rotations);
        let (keys, values) = self.expand(&step.latents.narrow(0, tile.first, tile.rows));
        let out = Tensor::empty([tile.rows, self.heads, self.v_head_dim], (x.kind(), x.device()));
        for segment in &tile.segments {
            let rows = |of: &Tensor| of.narrow(0, segment.first - tile.first, segment.rows);
            let own = attend(&rows(&queries), &rows(&keys), &rows(&values), true, self.scale);
            let attended = self.with_earlier_tiles(own, &rows(&queries), segment, step);
            rows(&out).copy_(&attended.out.narrow(2, 0, self.v_head_dim));
        }
        self.o_proj.forward(&out.flatten(1, 2))
    }

    /// `[rows, heads, head]`, rotated and as wide as [`expand`](Self::expand) makes keys.
    fn queries(&self, x: &Tensor, rotations: &Tensor) -> Tensor {
        let flat = match &self.query {
            Query::Direct { q_proj } => q_proj.forward(x),
            Query::LowRank { q_a_proj, q_a_layernorm, q_b_proj } => {
                q_b_proj.forward(&q_a_layernorm.forward(&q_a_proj.forward(x)))
            }
        };
        let width = self.qk_nope_head_dim + self.qk_rope_head_dim;
        let queries = flat.view([x.size()[0], self.heads, width]);
        rotate_(&queries.narrow(2, self.qk_nope_head_dim, self.qk_rope_head_dim), rotations);
        widened(queries, self.head_width())
    }

    /// Writes the rows' compressed keys and values into `latents`.
    fn compress(&self, x: &Tensor, latents: &Tensor, rotations: &Tensor) {
        self.kv_a_proj_with_mqa.forward_into(x, latents);
        let mut compressed = latents.narrow(1, 0, self.kv_lora_rank);
        let normed = self.kv_a_layernorm.forward(&compressed);
        compressed.copy_(&normed);
        // One rotated part, shared by all heads.
        rotate_(&latents.narrow(1, self.kv_lora_rank, self.qk_rope_head_dim).unsqueeze(1), rotations);
    }

    /// Keys and values of some rows, both `[rows, heads, head]`: the fused kernels on CPU want queries, keys and values of
    /// one width, so what is narrower ends in zeros.
    fn expand(&self, latents: &Tensor) -> (Tensor, Tensor) {
        let (rows, nope, rope) = (latents.size()[0], self.qk_nope_head_dim, self.qk_rope_head_dim);
        let expanded = self.kv_b_proj.forward(&latents.narrow(1, 0, self.kv_lora_rank));
        let expanded = expanded.view([rows, self.heads, nope + self.v_head_dim]);
        let rotated = latents.narrow(1, self.kv_lora_rank, rope).unsqueeze(1);
        let rotated = rotated.expand([rows, self.heads, rope], false);
        let keys = Tensor::cat(&[expanded.narrow(2, 0, nope), rotated], 2);
        let values = expanded.narrow(2, nope, self.v_head_dim);
        (widened(keys, self.head_width()), widened(values, self.head_width()))
    }

    /// Adds what a segment sees of its sequence's rows in earlier tiles.
    fn with_earlier_tiles(
        &self,
        own: Attended,
        queries: &Tensor,
        segment: &Segment,
        step: &Step,
    ) -> Attended {
        let start = segment.first - segment.position;
        let mut attended = own;
        let mut row = start;
        while row < segment.first {
            let count = EARLIER_KEYS.min(segment.first - row);
            let (keys, values) = self.expand(&step.latents.narrow(0, row, count));
            attended = attended.merge(&attend(queries, &keys, &values, false, self.scale));
            row += count;
        }
        attended
    }

    fn head_width(&self) -> i64 {
        self.v_head_dim.max(self.qk_nope_head_dim + self.qk_rope_head_dim)
    }
}

/// With zeros behind the last dimension up to `width`.
fn widened(x: Tensor, width: i64) -> Tensor {
    match width - x.size()[2] {
        0 => x,
        missing => x.constant_pad_nd([0, missing]),
    }
}

/// `qk_head_dim^-0.5`, times YaRN's `m(mscale_all_dim)²`.
fn scale(config: &Config) -> f64 {
    let stretch = config.rope.yarn.as_ref().map_or(1.0, Yarn::softmax_factor);
    (config.qk_head_dim() as f64).powf(-0.5) * stretch
}
