//! Prompts drawn from a seed.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::checkpoint::VOCAB;

/// Draws prompts; the same seed gives the same ones.
pub struct Prompts {
    rng: StdRng,
    prefixes: Vec<Vec<i64>>,
}

impl Prompts {
    /// From `seed`.
    pub fn new(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let prefixes = [7, 16, 31, 64, 100, 199].into_iter().map(|length| tokens(&mut rng, length)).collect();
        Self { rng, prefixes }
    }

    /// `length` random token IDs.
    pub fn of_length(&mut self, length: usize) -> Vec<i64> {
        tokens(&mut self.rng, length)
    }

    /// 1 to 600 token IDs: many of the same few lengths, many that begin alike, some that are all alike.
    pub fn mixed(&mut self) -> Vec<i64> {
        let length = match self.rng.random_range(0..100) {
            0..30 => [1, 17, 64, 128][self.rng.random_range(0..4)],
            30..75 => self.rng.random_range(1..=100),
            75..94 => self.rng.random_range(100..=300),
            _ => self.rng.random_range(300..=600),
        };
        let mut prompt = match self.rng.random_range(0..self.prefixes.len() * 2) {
            shared if shared < self.prefixes.len() => self.prefixes[shared].clone(),
            _ => Vec::new(),
        };
        prompt.truncate(length);
        prompt.extend(tokens(&mut self.rng, length - prompt.len()));
        prompt
    }

    /// The generator itself, for other choices of a test.
    pub fn rng(&mut self) -> &mut StdRng {
        &mut self.rng
    }
}

/// Not 0 and 1, which begin and end a text.
fn tokens(rng: &mut StdRng, length: usize) -> Vec<i64> {
    let last = i64::try_from(VOCAB).expect("a small number");
    (0..length).map(|_| rng.random_range(2..last)).collect()
}
