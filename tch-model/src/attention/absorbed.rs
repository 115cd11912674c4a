//! Attention in the compressed form: the part of `kv_b_proj` that makes keys goes into the queries, the part that makes
//! values into the output, and latents are never expanded.

use tch::{Kind, Tensor};

use super::Attention;

/// Scores that are in memory at a time.
const SCORES: i64 = 16 << 20;

/// `kv_b_proj` in its two parts.
pub(super) struct Absorbed<'a> {
    of: &'a Attention,
    /// `[heads, qk_nope_head_dim, kv_lora_rank]`
    keys: Tensor,
    /// `[heads, v_head_dim, kv_lora_rank]`
    values: Tensor,
}

impl<'a> Absorbed<'a> {
    /// From the whole weight, `[heads · (nope + v), kv_lora_rank]`, in the kind of activations.
    pub(super) fn new(of: &'a Attention, kv_b_proj: &Tensor) -> Self {
        let (nope, v) = (of.qk_nope_head_dim, of.v_head_dim);
        let by_head = kv_b_proj.view([of.heads, nope + v, of.kv_lora_rank]);
        Self { of, keys: by_head.narrow(1, 0, nope), values: by_head.narrow(1, nope, v) }
    }

    /// Rotated queries, `[rows, heads, nope + rope and more]`, to `[rows, heads, kv_lora_rank + rope]`: their products with
    /// latents are what theirs with keys would be.
    pub(super) fn queries(&self, queries: &Tensor) -> Tensor {
        let (nope, rope) = (self.of.qk_nope_head_dim, self.of.qk_rope_head_dim);
        let by_head = queries.narrow(2, 0, nope).transpose(0, 1);
        let latent = by_head.bmm(&self.keys).transpose(0, 1);
        Tensor::cat(&[latent, queries.narrow(2, nope, rope)], 2)
    }

    /// What the last rows of a sequence see of all its latents, `[seen, kv_lora_rank + rope]`, each up to itself. Queries
    /// are [`queries`](Self::queries)'; the result, `[rows, heads, kv_lora_rank]`, goes into `out`. The softmax is taken in
    /// float32.
    pub(super) fn attend_into(&self, queries: &Tensor, latents: &Tensor, out: &Tensor) {
        let (rows, heads, width) = queries.size3().expect("rows, heads and width");
        let seen = latents.size()[0];
        let compressed = latents.narrow(1, 0, self.of.kv_lora_rank);
        let block = (SCORES / (heads * seen)).clamp(1, rows);
        let mut first = 0;
        while first < rows {
            let count = block.min(rows - first);
            // The first of these rows is followed by so many of the sequence's; it sees what is left.
            let behind = rows - first - 1;
            let scores = queries.narrow(0, first, count).reshape([count * heads, width]).mm(&latents.tr());
            let mut scores = scores.to_kind(Kind::Float).view([count, heads, seen]);
            let _ = scores.g_mul_scalar_(self.of.scale);
            if behind > 0 {
                let all = Tensor::ones([count, seen], (Kind::Bool, latents.device()));
                let _ = scores.masked_fill_(&all.triu(seen - behind).unsqueeze(1), f64::NEG_INFINITY);
            }
            let weights = scores.softmax(-1, Kind::Float).to_kind(latents.kind());
            let attended = weights.view([count * heads, seen]).mm(&compressed);
            out.narrow(0, first, count).copy_(&attended.view([count, heads, self.of.kv_lora_rank]));
            first += count;
        }
    }

    /// What was attended to in the compressed form, `[rows, heads, kv_lora_rank]`, as values: `[rows, heads, v_head_dim]`.
    pub(super) fn values(&self, attended: &Tensor) -> Tensor {
        attended.transpose(0, 1).bmm(&self.values.transpose(1, 2)).transpose(0, 1)
    }
}
