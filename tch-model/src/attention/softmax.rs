//! Softmax attention in one piece or in several.

use tch::{Device, Kind, Tensor};

/// What queries saw of some keys, with what is needed to add what they saw of others.
#[derive(Debug)]
pub(super) struct Attended {
    /// `[rows, heads, width]`
    pub(super) out: Tensor,
    /// `[rows, heads, 1]`, f32: the logarithm of the sum of the exponentials that `out` was divided by.
    log_sum: Tensor,
}

/// Queries over keys and values, each `[rows, heads, width]`. With `causal`, queries and keys are the same rows, and each
/// sees those up to itself. Fused kernels only: the score matrix is never whole in memory.
pub(super) fn attend(queries: &Tensor, keys: &Tensor, values: &Tensor, causal: bool, scale: f64) -> Attended {
    // `[1, heads, rows, width]`, as views.
    let by_head = |x: &Tensor| x.transpose(0, 1).unsqueeze(0);
    let (q, k, v) = (by_head(queries), by_head(keys), by_head(values));
    let (out, log_sum) = match queries.device() {
        Device::Cpu => Tensor::internal_scaled_dot_product_flash_attention_for_cpu(
            &q,
            &k,
            &v,
            0.0,
            causal,
            None::<Tensor>,
            Some(scale),
        ),
        // On CUDA the memory-efficient kernel is the one that takes every kind and also gives the sums.
        _ => {
            let (out, log_sum, ..) = Tensor::internal_scaled_dot_product_efficient_attention(
                &q,
                &k,
                &v,
                None::<Tensor>,
                true,
                0.0,
                causal,
                Some(scale),
            );
            // It pads the sums' rows.
            (out, log_sum.narrow(2, 0, queries.size()[0]))
        }
    };
    Attended {
        out: out.squeeze_dim(0).transpose(0, 1),
        log_sum: log_sum.squeeze_dim(0).transpose(0, 1).unsqueeze(-1),
    }
}

impl Attended {
    /// What the same queries see of both sets of keys.
    pub(super) fn merge(self, other: &Self) -> Self {
        let kind = self.out.kind();
        let log_sum = self.log_sum.logaddexp(&other.log_sum);
        // float32 times bfloat16 is float32: rounded once, at the end.
        let share = |of: &Self| &of.out * (&of.log_sum - &log_sum).exp().to_kind(Kind::Float);
        let out = (share(&self) + share(other)).to_kind(kind);
        Self { out, log_sum }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Attention written down plainly, in float64.
    fn plain(q: &Tensor, k: &Tensor, v: &Tensor, seen: &Tensor, scale: f64) -> Tensor {
        let by_head = |x: &Tensor| x.to_kind(Kind::Double).transpose(0, 1);
        let scores = by_head(q).matmul(&by_head(k).transpose(1, 2)) * scale;
        let hidden = seen.logical_not();
        let weights = scores.masked_fill(&hidden, f64::NEG_INFINITY).softmax(-1, Kind::Double);
        weights.matmul(&by_head(v)).transpose(0, 1)
    }

    fn apart(a: &Tensor, b: &Tensor) -> f64 {
        (a.to_kind(Kind::Double) - b.to_kind(Kind::Double)).abs().max().double_value(&[])
    }

    #[test]
    fn attention_in_pieces_equals_attention_at_once() {
        tch::manual_seed(1);
        let (rows, earlier) = (13, 29);
        let random = |rows| Tensor::randn([rows, 3, 24], (Kind::Float, Device::Cpu)) * 2.0;
        let (q, k, v) = (random(rows), random(earlier + rows), random(earlier + rows));
        let seen = Tensor::ones([rows, earlier + rows], (Kind::Int64, Device::Cpu))
            .tril(earlier)
            .to_kind(Kind::Bool);
        let expected = plain(&q, &k, &v, &seen, 0.3);
        let part = |of: &Tensor, first, count| of.narrow(0, first, count);
        let mut merged = attend(&q, &part(&k, earlier, rows), &part(&v, earlier, rows), true, 0.3);
        for (first, count) in [(0, 1), (1, 20), (21, 8)] {
            merged = merged.merge(&attend(&q, &part(&k, first, count), &part(&v, first, count), false, 0.3));
        }
        assert!(apart(&merged.out, &expected) < 1e-5);
    }

    #[test]
    fn scores_of_hundreds_do_not_overflow_the_merge() {
        let row = |value: f32| Tensor::full([1, 1, 8], f64::from(value), (Kind::Float, Device::Cpu));
        let (q, small, large) = (row(10.0), row(-10.0), row(10.0));
        let own = attend(&q, &small, &row(1.0), true, 1.0);
        let merged = own.merge(&attend(&q, &large, &row(2.0), false, 1.0));
        assert!(apart(&merged.out, &row(2.0)) < 1e-6);
    }
}
