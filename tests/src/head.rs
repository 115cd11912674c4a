//! The model's output head in plain `f32`: an independent way from a dumped final state to a token.

use crate::checkpoint::{Checkpoint, HIDDEN, VOCAB};

/// Final norm and output head of a float32 checkpoint.
pub struct Head {
    norm: Vec<f32>,
    lm_head: Vec<f32>,
}

impl Head {
    /// That of `checkpoint`.
    pub fn of(checkpoint: &Checkpoint) -> Self {
        Self {
            norm: checkpoint.weight("model.norm.weight").to_vec(),
            lm_head: checkpoint.weight("lm_head.weight").to_vec(),
        }
    }

    /// `N` of rows of `R[n]`: `[rows, hidden]` to the same shape.
    pub fn norm(&self, rows: &[f32]) -> Vec<f32> {
        rows.chunks_exact(HIDDEN)
            .flat_map(|row| {
                let mean_square = row.iter().map(|value| value * value).sum::<f32>() / HIDDEN as f32;
                let scale = (mean_square + 1e-6).sqrt().recip();
                row.iter().zip(&self.norm).map(move |(value, weight)| value * scale * weight)
            })
            .collect()
    }

    /// The natural logarithm of each token's probability after a normed row, in float64.
    pub fn log_probabilities(&self, normed: &[f32]) -> Vec<f64> {
        assert_eq!(normed.len(), HIDDEN, "one row");
        let product = |row: &[f32]| row.iter().zip(normed).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        let logits: Vec<f64> = self.lm_head.chunks_exact(HIDDEN).map(product).collect();
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|logit| (logit - largest).exp()).sum();
        logits.iter().map(|logit| logit - largest - sum.ln()).collect()
    }

    /// The likeliest token after a normed row.
    pub fn token(&self, normed: &[f32]) -> i64 {
        assert_eq!(normed.len(), HIDDEN, "one row");
        let logits =
            self.lm_head.chunks_exact(HIDDEN).map(|row| row.iter().zip(normed).map(|(a, b)| a * b).sum());
        let (best, _) =
            logits.enumerate().fold((0, f32::NEG_INFINITY), |best, (token, logit): (usize, f32)| {
                if logit > best.1 { (token, logit) } else { best }
            });
        assert!(best < VOCAB, "a token of the vocabulary");
        i64::try_from(best).expect("a small number")
    }
}
