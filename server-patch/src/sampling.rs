//! Choosing the next token from the logits, as SGLang does.
//!
//! In this order: penalties of tokens that were generated before, bias, the ban on ends before `min_new_tokens`;
//! temperature and softmax; then `top_k`, `top_p` and `min_p` on the sorted probabilities, each judged on those of the
//! whole vocabulary. What is left is drawn from.

use std::collections::{BinaryHeap, HashMap};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// How the next token is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 takes the best token.
    pub temperature: f64,
    /// So many of the most likely tokens stay; `None` for all.
    pub top_k: Option<usize>,
    /// Tokens stay while those before them have less than this together.
    pub top_p: f64,
    /// Tokens stay that are at least this part as likely as the most likely one.
    pub min_p: f64,
    /// Taken off a token's logit for each time it was generated.
    pub frequency_penalty: f64,
    /// Taken off a token's logit once if it was generated.
    pub presence_penalty: f64,
    /// Divides (a negative one: multiplies) the logit of a token that was generated.
    pub repetition_penalty: f64,
    /// None of the ends of the text before so many tokens.
    pub min_new_tokens: usize,
    /// Added to these tokens' logits.
    pub logit_bias: Vec<(i64, f64)>,
    /// Makes the draws the same in every run.
    pub seed: Option<i64>,
}

impl Default for SamplingParams {
    /// The best token, always.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
            min_new_tokens: 0,
            logit_bias: Vec::new(),
            seed: None,
        }
    }
}

/// What to say of each generated token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Logprobs {
    /// The first position of the prompt whose token's log-probability is wanted too; `None` for none of them.
    pub prompt_from: Option<usize>,
    /// How many of the most likely tokens to give with each.
    pub top: usize,
    /// Tokens whose log-probability to give with each.
    pub token_ids: Vec<i64>,
}

/// Natural logarithms of probabilities at one position, under the distribution that was drawn from before any token was
/// cut off.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenLogprob {
    /// Of the token that stands there.
    pub logprob: f32,
    /// The most likely tokens, falling.
    pub top: Vec<(i64, f32)>,
    /// Of the tokens asked for, in their order.
    pub token_ids: Vec<f32>,
}

/// A token and what was asked about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Picked {
    /// The token.
    pub token: i64,
    /// What was asked about it.
    pub logprob: Option<TokenLogprob>,
}

/// Chooses the tokens of one text.
#[derive(Debug)]
pub struct Sampler {
    params: SamplingParams,
    /// Tokens that end the text.
    ends: Vec<i64>,
    rng: StdRng,
    /// How often each token was generated.
    counts: HashMap<i64, u32>,
    generated: usize,
}

impl Sampler {
    /// For a text that `ends` end. `sample` tells the samples of one prompt apart.
    pub fn new(params: SamplingParams, ends: Vec<i64>, sample: usize) -> Self {
        let rng = match params.seed {
            // Seeds that follow each other must not share samples: each is mixed into all bits.
            Some(seed) => {
                let (seed, sample) = (seed as u64, sample as u64);
                StdRng::seed_from_u64(xxhash_rust::xxh3::xxh3_64_with_seed(&sample.to_le_bytes(), seed))
            }
            None => rand::make_rng(),
        };
        Self { params, ends, rng, counts: HashMap::new(), generated: 0 }
    }

    /// The next token, from `[vocab]` logits. `None` if these are no numbers.
    pub fn pick(&mut self, mut logits: Vec<f32>, logprobs: Option<&Logprobs>) -> Option<Picked> {
        if logits.iter().any(|logit| logit.is_nan() || *logit == f32::INFINITY) {
            return None;
        }
        self.penalise(&mut logits);
        let greedy = self.params.temperature == 0.0 || self.params.top_k == Some(1);
        if !greedy {
            // Neither an extreme temperature nor a quotient may leave the numbers: what is infinite could not be told apart.
            let temperature = (self.params.temperature as f32).clamp(f32::MIN_POSITIVE, f32::MAX);
            logits.iter_mut().for_each(|logit| *logit = (*logit / temperature).min(f32::MAX));
        }
        let (best, largest) = best(&logits)?;
        let token = if greedy { best } else { self.draw(&logits, largest) };
        self.generated += 1;
        *self.counts.entry(token).or_default() += 1;
        let logprob = logprobs.map(|wanted| describe(&logits, largest, token, wanted));
        Some(Picked { token, logprob })
    }

    fn penalise(&self, logits: &mut [f32]) {
        let SamplingParams { frequency_penalty, presence_penalty, repetition_penalty, .. } = self.params;
        for (&token, &count) in &self.counts {
            let Some(logit) = usize::try_from(token).ok().and_then(|token| logits.get_mut(token)) else {
                continue;
            };
            let mut value = f64::from(*logit);
            value -= frequency_penalty * f64::from(count) + presence_penalty;
            value = if value < 0.0 { value * repetition_penalty } else { value / repetition_penalty };
            *logit = value as f32;
        }
        let mut add = |token: i64, bias: f32| {
            if let Some(logit) = usize::try_from(token).ok().and_then(|token| logits.get_mut(token)) {
                *logit = (*logit + bias).min(f32::MAX);
            }
        };
        for &(token, bias) in &self.params.logit_bias {
            add(token, (bias as f32).clamp(f32::MIN, f32::MAX));
        }
        if self.generated < self.params.min_new_tokens {
            self.ends.iter().for_each(|&token| add(token, f32::NEG_INFINITY));
        }
    }

    /// A token by its probability, among those that are not cut off.
    fn draw(&mut self, logits: &[f32], largest: f32) -> i64 {
        let weights: Vec<f64> =
            logits.iter().map(|&logit| (f64::from(logit) - f64::from(largest)).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let kept = self.kept(&weights, sum);
        let all: f64 = kept.iter().map(|&token| weights[token]).sum();
        let mut left = self.rng.random::<f64>() * all;
        for &token in &kept {
            left -= weights[token];
            if left < 0.0 {
                return token as i64;
            }
        }
        // Rounding of the sum: what is left is the last one.
        kept.last().map_or(0, |&token| token as i64)
    }

    /// The tokens that may be drawn, the most likely first unless all of them may.
    fn kept(&self, weights: &[f64], sum: f64) -> Vec<usize> {
        let SamplingParams { top_k, top_p, min_p, .. } = self.params;
        let top_k = top_k.unwrap_or(usize::MAX);
        let possible = weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0);
        if top_k >= weights.len() && top_p >= 1.0 && min_p <= 0.0 {
            return possible.map(|(token, _)| token).collect();
        }
        // A heap is made in one pass over the vocabulary and then gives up as few tokens as are kept.
        let mut heap: BinaryHeap<Ranked> =
            possible.map(|(token, &weight)| Ranked { weight, token }).collect();
        let most = heap.peek().map_or(0.0, |first| first.weight);
        let (mut kept, mut before) = (Vec::new(), 0.0);
        while let Some(next) = heap.pop() {
            if kept.len() >= top_k || before > top_p * sum || next.weight < min_p * most {
                break;
            }
            before += next.weight;
            kept.push(next.token);
        }
        kept
    }
}

/// A token by its weight; of equal ones the smaller token comes first.
struct Ranked {
    weight: f64,
    token: usize,
}

impl Ord for Ranked {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.weight.total_cmp(&other.weight).then(other.token.cmp(&self.token))
    }
}

impl PartialOrd for Ranked {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Ranked {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Ranked {}

/// The first of the largest logits, if one is a number.
fn best(logits: &[f32]) -> Option<(i64, f32)> {
    let mut best = None;
    for (token, &logit) in logits.iter().enumerate() {
        if logit.is_finite() && best.is_none_or(|(_, largest)| logit > largest) {
            best = Some((token as i64, logit));
        }
    }
    best
}

fn describe(logits: &[f32], largest: f32, token: i64, wanted: &Logprobs) -> TokenLogprob {
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - f64::from(largest)).exp()).sum();
    let normaliser = f64::from(largest) + sum.ln();
    let of = |token: i64| {
        let logit = usize::try_from(token).ok().and_then(|token| logits.get(token));
        logit.map_or(f32::MIN, |&logit| ((f64::from(logit) - normaliser) as f32).max(f32::MIN))
    };
    let mut top = Vec::new();
    if wanted.top > 0 {
        let ranked = |(token, &logit): (usize, &f32)| Ranked { weight: f64::from(logit), token };
        let mut heap: BinaryHeap<Ranked> = logits.iter().enumerate().map(ranked).collect();
        let next = || heap.pop().map(|next| next.token as i64);
        top = std::iter::from_fn(next).take(wanted.top).map(|token| (token, of(token))).collect();
    }
    TokenLogprob {
        logprob: of(token),
        top,
        token_ids: wanted.token_ids.iter().map(|&token| of(token)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRAWS: usize = 40_000;

    fn sampler(params: SamplingParams) -> Sampler {
        Sampler::new(params, vec![7], 0)
    }

    /// How often each token comes from a sampler that is made afresh for every draw.
    fn shares(params: &SamplingParams, logits: &[f32]) -> Vec<f64> {
        let mut counts = vec![0usize; logits.len()];
        let mut one = Sampler::new(SamplingParams { seed: Some(5), ..params.clone() }, vec![7], 0);
        for _ in 0..DRAWS {
            one.counts.clear();
            one.generated = 0;
            counts[one.pick(logits.to_vec(), None).unwrap().token as usize] += 1;
        }
        counts.into_iter().map(|count| count as f64 / DRAWS as f64).collect()
    }

    /// The formula, in float64: probabilities at a temperature, those below the line struck out, the rest scaled to 1.
    fn expected(logits: &[f32], temperature: f64, stays: impl Fn(usize, f64, f64, f64) -> bool) -> Vec<f64> {
        let weights: Vec<f64> = logits.iter().map(|&l| (f64::from(l) / temperature).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let p: Vec<f64> = weights.iter().map(|w| w / sum).collect();
        let mut order: Vec<usize> = (0..p.len()).collect();
        order.sort_by(|a, b| p[*b].total_cmp(&p[*a]));
        let (mut out, mut before) = (vec![0.0; p.len()], 0.0);
        for (rank, &token) in order.iter().enumerate() {
            if stays(rank, before, p[token], p[order[0]]) {
                out[token] = p[token];
            }
            before += p[token];
        }
        let kept: f64 = out.iter().sum();
        out.iter().map(|p| p / kept).collect()
    }

    #[track_caller]
    fn assert_shares(params: &SamplingParams, expected: &[f64]) {
        for (token, (found, expected)) in shares(params, &LOGITS).iter().zip(expected).enumerate() {
            // Four standard deviations of a share.
            let bound = 4.0 * (expected * (1.0 - expected) / DRAWS as f64).sqrt();
            assert!((found - expected).abs() <= bound, "{params:?}: token {token}: {found} for {expected}");
        }
    }

    const LOGITS: [f32; 8] = [1.0, -0.5, 2.0, 0.3, 1.7, -3.0, 0.9, 0.0];

    #[test]
    fn draws_have_the_probabilities_of_the_formula() {
        let params = SamplingParams { temperature: 0.7, ..SamplingParams::default() };
        assert_shares(&params, &expected(&LOGITS, 0.7, |_, _, _, _| true));
        let top_k = SamplingParams { top_k: Some(3), ..params.clone() };
        assert_shares(&top_k, &expected(&LOGITS, 0.7, |rank, _, _, _| rank < 3));
        let top_p = SamplingParams { top_p: 0.8, ..params.clone() };
        assert_shares(&top_p, &expected(&LOGITS, 0.7, |_, before, _, _| before <= 0.8));
        let min_p = SamplingParams { min_p: 0.3, ..params.clone() };
        assert_shares(&min_p, &expected(&LOGITS, 0.7, |_, _, p, most| p >= 0.3 * most));
        let all = SamplingParams { top_k: Some(5), top_p: 0.9, min_p: 0.15, ..params };
        let stays = |rank, before: f64, p: f64, most: f64| rank < 5 && before <= 0.9 && p >= 0.15 * most;
        assert_shares(&all, &expected(&LOGITS, 0.7, stays));
    }

    #[test]
    fn greedy_takes_the_first_of_the_best_and_no_number_gives_no_token() {
        let pick = |logits: &[f32]| {
            sampler(SamplingParams::default()).pick(logits.to_vec(), None).map(|picked| picked.token)
        };
        assert_eq!(pick(&[0.5, 3.0, 3.0, -1.0]), Some(1));
        assert_eq!(pick(&[f32::NEG_INFINITY, -7.0]), Some(1));
        assert_eq!(pick(&[0.5, f32::NAN, 9.0]), None);
        assert_eq!(pick(&[0.5, f32::INFINITY]), None);
        assert_eq!(pick(&[f32::NEG_INFINITY; 3]), None);
        let hot = SamplingParams { temperature: 9.0, top_k: Some(1), ..SamplingParams::default() };
        assert_eq!(sampler(hot).pick(LOGITS.to_vec(), None).unwrap().token, 2);
    }

    #[test]
    fn penalties_bias_and_the_ban_on_ends_change_the_logits_as_stated() {
        let params = SamplingParams {
            frequency_penalty: 0.4,
            presence_penalty: 0.25,
            repetition_penalty: 1.5,
            min_new_tokens: 3,
            logit_bias: vec![(0, -2.5), (7, 50.0)],
            ..SamplingParams::default()
        };
        let mut sampler = sampler(params);
        sampler.counts = HashMap::from([(2, 3), (1, 1)]);
        sampler.generated = 2;
        let mut logits = LOGITS.to_vec();
        sampler.penalise(&mut logits);
        // 2.0 - 3 * 0.4 - 0.25, then divided; -0.5 - 0.4 - 0.25, then multiplied.
        let close =
            |found: f32, expected: f64| assert!((f64::from(found) - expected).abs() < 1e-6, "{found}");
        close(logits[2], 0.55 / 1.5);
        close(logits[1], -1.15 * 1.5);
        close(logits[0], -1.5);
        assert_eq!(logits[7], f32::NEG_INFINITY, "an end, before three tokens");
        assert_eq!(logits[3..7], LOGITS[3..7]);
        sampler.generated = 3;
        let mut logits = LOGITS.to_vec();
        sampler.penalise(&mut logits);
        close(logits[7], 50.0);
    }

    #[test]
    fn what_was_generated_is_counted() {
        let params = SamplingParams { frequency_penalty: 1.0, ..SamplingParams::default() };
        let mut sampler = sampler(params);
        let tokens: Vec<i64> = (0..6).map(|_| sampler.pick(LOGITS.to_vec(), None).unwrap().token).collect();
        // 2.0, then 1.7, then 1.0 twice (tokens 0 and 2), 0.9, and 0.7 of token 4.
        assert_eq!(tokens, [2, 4, 0, 2, 6, 4]);
    }

    #[test]
    fn extreme_numbers_leave_numbers() {
        let wanted = Logprobs { prompt_from: None, top: 0, token_ids: vec![0] };
        for (bias, temperature) in [(1e39, 0.0), (1e39, 1.0), (3e38, 1e-30), (f64::MAX, 1e39)] {
            let params = SamplingParams {
                logit_bias: vec![(3, bias)],
                temperature,
                seed: Some(1),
                ..Default::default()
            };
            let picked = sampler(params).pick(LOGITS.to_vec(), Some(&wanted)).unwrap();
            if temperature < 1e30 {
                assert_eq!(picked.token, 3, "bias {bias}, temperature {temperature}");
                assert_eq!(picked.logprob.unwrap().logprob, 0.0, "it is certain");
            }
        }
        let flat =
            SamplingParams { temperature: 1e39, min_new_tokens: 1, seed: Some(1), ..Default::default() };
        let picked = sampler(flat).pick(LOGITS.to_vec(), Some(&wanted)).unwrap();
        assert_ne!(picked.token, 7, "an end, before one token");
        let expected = -(LOGITS.len() as f64 - 1.0).ln();
        assert!((f64::from(picked.logprob.unwrap().logprob) - expected).abs() < 1e-5, "all others are alike");
    }

    #[test]
    fn a_seed_repeats_the_draws_of_its_sample_and_of_no_other() {
        let params = SamplingParams { temperature: 1.0, seed: Some(11), ..SamplingParams::default() };
        let draws = |params: &SamplingParams, sample| -> Vec<i64> {
            let mut sampler = Sampler::new(params.clone(), vec![], sample);
            (0..64).map(|_| sampler.pick(vec![0.0; 50], None).unwrap().token).collect()
        };
        assert_eq!(draws(&params, 0), draws(&params, 0));
        assert_ne!(draws(&params, 0), draws(&params, 1));
        let next = SamplingParams { seed: Some(12), ..params.clone() };
        assert_ne!(draws(&params, 1), draws(&next, 0));
        let unseeded = SamplingParams { seed: None, ..params };
        assert_ne!(draws(&unseeded, 0), draws(&unseeded, 0));
    }

    #[test]
    fn log_probabilities_are_those_of_the_distribution_that_was_drawn_from() {
        let params = SamplingParams {
            temperature: 0.5,
            top_k: Some(2),
            logit_bias: vec![(3, 0.4)],
            seed: Some(1),
            ..SamplingParams::default()
        };
        let wanted = Logprobs { prompt_from: None, top: 3, token_ids: vec![5, 0] };
        let picked = sampler(params).pick(LOGITS.to_vec(), Some(&wanted)).unwrap();
        let biased: Vec<f64> = LOGITS
            .iter()
            .enumerate()
            .map(|(i, &l)| (f64::from(l) + if i == 3 { 0.4 } else { 0.0 }) / 0.5)
            .collect();
        let normaliser = biased.iter().map(|l| l.exp()).sum::<f64>().ln();
        let close = |found: f32, token: i64| {
            let expected = biased[token as usize] - normaliser;
            assert!((f64::from(found) - expected).abs() < 1e-5, "token {token}: {found} for {expected}");
        };
        let logprob = picked.logprob.unwrap();
        close(logprob.logprob, picked.token);
        assert_eq!(logprob.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [2, 4, 0]);
        logprob.top.iter().for_each(|(token, found)| close(*found, *token));
        close(logprob.token_ids[0], 5);
        close(logprob.token_ids[1], 0);
    }
}
