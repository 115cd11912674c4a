//! Multi-head latent attention. Many rows at a time are attended to expanded: keys and values are made from their
//! compressed form and used as usual. A few rows behind many others are attended to absorbed, in the compressed form itself.

mod absorbed;
mod softmax;

use tch::{Kind, Tensor};

use crate::LoadError;
use crate::batch::{Segment, Tile};
use crate::config::Config;
use crate::linear::Linear;
use crate::norm::RmsNorm;
use crate::pieces::Pieces;
use crate::rope::rotate_;
use crate::weights::Weights;
use absorbed::Absorbed;
use softmax::{Attended, attend};

/// Attention of one layer.
#[derive(Debug)]
pub(crate) struct Attention {
    /// Which layer's: the place of its latents in a cache.
    layer: usize,
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
    /// For each sequence that has a cache, what is in it.
    pub(crate) pasts: Vec<Option<Past>>,
}

/// The cached part of a sequence.
#[derive(Debug)]
pub(crate) struct Past {
    /// Tokens of it that earlier passes have run.
    pub(crate) len: i64,
    /// Latents of each layer, with room for this step's rows behind the first `len`.
    pub(crate) layers: Vec<Tensor>,
}

/// As many rows at most are attended to absorbed. Expanding `p` earlier rows costs `p · kv_lora_rank · (nope + v)` a
/// head; scores in the compressed form cost some `2 · kv_lora_rank` more a row and earlier row than expanded ones: with
/// published shapes the two meet between 100 and 200 rows, and few rows use the fused kernels badly.
const ABSORBED_ROWS: i64 = 64;

/// The reference norms compressed queries, keys and values with this whatever `rms_norm_eps` says.
const LATENT_EPS: f64 = 1e-6;

impl Step {
    /// Whether a segment is few rows behind others.
    fn attends_absorbed(&self, segment: &Segment) -> bool {
        let past = self.pasts[segment.sequence].as_ref().map_or(0, |past| past.len);
        segment.rows <= ABSORBED_ROWS && past > 0
    }
}

impl Attention {
    /// Of layer `index`; `kind` is that of activations.
    pub(crate) fn load(
        weights: &Weights<'_>,
        config: &Config,
        index: i64,
        kind: Kind,
    ) -> Result<Self, LoadError> {
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
            layer: usize::try_from(index).expect("layers are counted from 0"),
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
            scale: config.softmax_scale(),
        })
    }

    /// `[tile rows, hidden]` to the same shape and kind. Every row sees the rows of its sequence up to itself, those in
    /// earlier tiles and in the cache included.
    pub(crate) fn forward(&self, x: &Tensor, tile: &Tile, step: &Step) -> Tensor {
        let rotations = step.rotations.narrow(0, tile.first, tile.rows);
        let queries = self.queries(x, &rotations);
        let latents = step.latents.narrow(0, tile.first, tile.rows);
        self.compress(x, &latents, &rotations);
        self.fill_caches(&latents, tile, step);
        let out = Tensor::empty([tile.rows, self.heads, self.v_head_dim], (x.kind(), x.device()));
        let (absorbed, expanded): (Vec<&Segment>, Vec<&Segment>) =
            tile.segments.iter().partition(|segment| step.attends_absorbed(segment));
        let rows = |of: &Tensor, segment: &Segment| of.narrow(0, segment.first - tile.first, segment.rows);
        if !expanded.is_empty() {
            let (keys, values) = self.expand(&latents);
            for segment in expanded {
                let own_queries = rows(&queries, segment);
                let own =
                    attend(&own_queries, &rows(&keys, segment), &rows(&values, segment), true, self.scale);
                let attended = self.with_earlier(own, &own_queries, &self.earlier(segment, step));
                rows(&out, segment).copy_(&attended.out.narrow(2, 0, self.v_head_dim));
            }
        }
        if !absorbed.is_empty() {
            let weight = self.kv_b_proj.expanded(x.kind());
            let absorbed_form = Absorbed::new(self, &weight);
            // Their queries go through the weight together; each then sees its own sequence's latents.
            let places: Vec<i64> =
                absorbed.iter().flat_map(|s| s.first - tile.first..s.first - tile.first + s.rows).collect();
            let places = Tensor::from_slice(&places).to_device(x.device());
            let queries = absorbed_form.queries(&queries.index_select(0, &places));
            let shape = [queries.size()[0], self.heads, self.kv_lora_rank];
            let attended = Tensor::empty(shape, (x.kind(), x.device()));
            let mut first = 0;
            for segment in absorbed {
                let seen = self.seen(segment, step);
                let own = |of: &Tensor| of.narrow(0, first, segment.rows);
                absorbed_form.attend_into(&own(&queries), &seen, &own(&attended));
                first += segment.rows;
            }
            let _ = out.shallow_clone().index_copy_(0, &places, &absorbed_form.values(&attended));
        }
        self.o_proj.forward(&out.flatten(1, 2))
    }

    /// Writes the tile's latents behind those of earlier passes.
    fn fill_caches(&self, latents: &Tensor, tile: &Tile, step: &Step) {
        for segment in &tile.segments {
            if let Some(past) = &step.pasts[segment.sequence] {
                let own = latents.narrow(0, segment.first - tile.first, segment.rows);
                past.layers[self.layer].narrow(0, past.len + segment.position, segment.rows).copy_(&own);
            }
        }
    }

    /// Latents of the rows before a segment.
    fn earlier(&self, segment: &Segment, step: &Step) -> Tensor {
        match &step.pasts[segment.sequence] {
            Some(past) => past.layers[self.layer].narrow(0, 0, past.len + segment.position),
            None => step.latents.narrow(0, segment.first - segment.position, segment.position),
        }
    }

    /// Latents of the rows up to the last of a segment.
    fn seen(&self, segment: &Segment, step: &Step) -> Tensor {
        match &step.pasts[segment.sequence] {
            Some(past) => past.layers[self.layer].narrow(0, 0, past.len + segment.position + segment.rows),
            None => {
                let (first, rows) = (segment.first - segment.position, segment.position + segment.rows);
                step.latents.narrow(0, first, rows)
            }
        }
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

    /// Adds what queries see of the rows before them, `[rows, latent]`.
    fn with_earlier(&self, own: Attended, queries: &Tensor, earlier: &Tensor) -> Attended {
        let mut attended = own;
        let (mut row, end) = (0, earlier.size()[0]);
        while row < end {
            let count = Pieces::in_use().earlier_keys.min(end - row);
            let (keys, values) = self.expand(&earlier.narrow(0, row, count));
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
