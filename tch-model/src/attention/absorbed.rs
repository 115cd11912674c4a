//! Attention in the compressed form: the part of `kv_b_proj` that makes keys goes into the queries, the part that makes
//! values into the output, and latents are never expanded.

use tch::{Kind, Tensor};

use super::Attention;
use crate::pieces::Pieces;

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

    /// What the last rows of a sequence see of all its latents; see [`attend_into`].
    pub(super) fn attend_into(&self, queries: &Tensor, latents: &Tensor, out: &Tensor) {
        attend_into(queries, latents, self.of.scale, out, Pieces::in_use());
    }

    /// What was attended to in the compressed form, `[rows, heads, kv_lora_rank]`, as values: `[rows, heads, v_head_dim]`.
    pub(super) fn values(&self, attended: &Tensor) -> Tensor {
        attended.transpose(0, 1).bmm(&self.values.transpose(1, 2)).transpose(0, 1)
    }
}

/// What the last rows of a sequence see of all its latents, `[seen, kv_lora_rank + rope]`, each up to itself. Queries are
/// `[rows, heads, kv_lora_rank + rope]`; the result goes into `out`, `[rows, heads, kv_lora_rank]`.
///
/// Scores, softmax and sums are in float32 whatever the kind of the operands: in bfloat16 a score of 200 would be off by up to
/// half before it is scaled, which is several percent of a weight.
fn attend_into(queries: &Tensor, latents: &Tensor, scale: f64, out: &Tensor, pieces: &Pieces) {
    let (rows, heads, width) = queries.size3().expect("rows, heads and width");
    let (seen, rank) = (latents.size()[0], out.size()[2]);
    let room = (Kind::Float, latents.device());
    // Some latents at a time, widened.
    let each = |with: &mut dyn FnMut(i64, &Tensor)| {
        let mut at = 0;
        while at < seen {
            let count = pieces.earlier_keys.min(seen - at);
            with(at, &latents.narrow(0, at, count).to_kind(Kind::Float));
            at += count;
        }
    };
    let block = (pieces.scores / (heads * seen)).clamp(1, rows);
    let mut first = 0;
    while first < rows {
        let count = block.min(rows - first);
        // The first of these rows is followed by so many of the sequence's; it sees what is left.
        let behind = rows - first - 1;
        let own = queries.narrow(0, first, count).reshape([count * heads, width]).to_kind(Kind::Float);
        let scores = Tensor::empty([count * heads, seen], room);
        each(&mut |at, latents| {
            let _ = own.mm_out(&scores.narrow(1, at, latents.size()[0]), &latents.tr());
        });
        let mut scores = scores.view([count, heads, seen]);
        let _ = scores.g_mul_scalar_(scale);
        if behind > 0 {
            let all = Tensor::ones([count, seen], (Kind::Bool, latents.device()));
            let _ = scores.masked_fill_(&all.triu(seen - behind).unsqueeze(1), f64::NEG_INFINITY);
        }
        let weights = scores.softmax(-1, Kind::Float).view([count * heads, seen]);
        let mut attended = Tensor::zeros([count * heads, rank], room);
        each(&mut |at, latents| {
            let rows = latents.size()[0];
            attended += weights.narrow(1, at, rows).mm(&latents.narrow(1, 0, rank));
        });
        out.narrow(0, first, count).copy_(&attended.view([count, heads, rank]));
        first += count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of 11 rows that see 53 with three heads, eight and then three are scored together; of 64 that see 200, two.
    const TINY: Pieces = Pieces { scores: 1300, earlier_keys: 7, mlp_rows: 1, weight_elements: 1 };

    /// The formula in float64, over the same operands, row by row.
    fn reference(queries: &Tensor, latents: &Tensor, rank: i64, scale: f64) -> Tensor {
        let (rows, heads, _) = queries.size3().unwrap();
        let (queries, latents) = (queries.to_kind(Kind::Double), latents.to_kind(Kind::Double));
        let seen = latents.size()[0];
        let of_row = |row: i64| {
            let visible = latents.narrow(0, 0, seen - (rows - row - 1));
            let weights = (queries.get(row).mm(&visible.tr()) * scale).softmax(-1, Kind::Double);
            weights.mm(&visible.narrow(1, 0, rank))
        };
        Tensor::stack(&(0..rows).map(of_row).collect::<Vec<_>>(), 0).view([rows, heads, rank])
    }

    #[test]
    fn sharp_scores_are_exact_in_both_kinds_and_in_any_pieces() {
        tch::manual_seed(7);
        let (rank, rope, heads) = (24, 8, 3);
        for (rows, seen) in [(1, 1), (1, 50), (5, 5), (11, 53), (64, 200)] {
            for (kind, bound) in [(Kind::Float, 2e-5), (Kind::BFloat16, 4.0e-3)] {
                let random = |shape: &[i64], by: f64| {
                    (Tensor::randn(shape, (Kind::Float, tch::Device::Cpu)) * by).to_kind(kind)
                };
                // Scores of some hundreds before they are scaled.
                let queries = random(&[rows, heads, rank + rope], 30.0);
                let latents = random(&[seen, rank + rope], 1.0);
                let scale = 0.13;
                let expected = reference(&queries, &latents, rank, scale);
                if seen > 50 {
                    let largest = queries.to_kind(Kind::Float).abs().max().double_value(&[]);
                    assert!(largest > 60.0);
                }
                for pieces in [Pieces::default(), TINY] {
                    let out = Tensor::empty([rows, heads, rank], (kind, tch::Device::Cpu));
                    attend_into(&queries, &latents, scale, &out, &pieces);
                    let largest = expected.abs().amax([-1i64].as_slice(), true);
                    let apart =
                        ((out.to_kind(Kind::Double) - &expected).abs() / largest).max().double_value(&[]);
                    // The last is half a unit in bfloat16's last place: the result is rounded once.
                    assert!(apart <= bound, "{rows} of {seen} rows in {kind:?}, {pieces:?}: {apart:.1e}");
                }
            }
        }
    }
}
