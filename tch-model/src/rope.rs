//! Rotary position embedding: pairs of neighbouring elements, turned by an angle that grows with the position.

use tch::{Device, Kind, Tensor};

use crate::config::{Config, RopeConfig, Yarn};

/// The angles of every pair at every position.
#[derive(Debug)]
pub(crate) struct Rope {
    /// Radians per position, one for each pair, fast ones first.
    frequencies: Vec<f64>,
    /// What cosine and sine are multiplied by.
    magnitude: f64,
}

impl Rope {
    pub(crate) fn new(config: &Config) -> Self {
        Self::of(&config.rope, config.qk_rope_head_dim)
    }

    fn of(config: &RopeConfig, dim: i64) -> Self {
        let magnitude = config.yarn.as_ref().map_or(1.0, Yarn::rotation_magnitude);
        Self { frequencies: frequencies(config, dim), magnitude }
    }

    /// The rotation of each position of `positions`: complex numbers `[rows, pairs]`. Angles, cosines and sines are
    /// computed in float64 and rounded once, to float32.
    pub(crate) fn rotations(&self, positions: &[i64], device: Device) -> Tensor {
        // Packed sequences share positions, and continued ones are at far ones: each is computed once.
        let mut distinct = positions.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        let at = |position: &i64| distinct.binary_search(position).expect("it is one of them") as i64;
        let places: Vec<i64> = positions.iter().map(at).collect();
        let turn = |(position, frequency): (i64, &f64)| {
            let (sine, cosine) = (position as f64 * frequency).sin_cos();
            [(cosine * self.magnitude) as f32, (sine * self.magnitude) as f32]
        };
        let turns = distinct
            .iter()
            .flat_map(|&position| self.frequencies.iter().map(move |frequency| (position, frequency)));
        let table: Vec<f32> = turns.flat_map(turn).collect();
        let shape = [distinct.len() as i64, self.frequencies.len() as i64, 2];
        let table = Tensor::from_slice(&table).view(shape).to_device(device);
        table.index_select(0, &Tensor::from_slice(&places).to_device(device)).view_as_complex()
    }
}

/// Turns `x` (`[rows, heads, dim]`, any kind, a view) in place. The turning is done in float32.
pub(crate) fn rotate_(x: &Tensor, rotations: &Tensor) {
    let rotations = rotations.unsqueeze(1);
    let (_, _, dim) = x.size3().expect("rows, heads and dim");
    let pairs = |x: &Tensor| {
        let (rows, heads, _) = x.size3().expect("rows, heads and dim");
        x.view([rows, heads, dim / 2, 2]).view_as_complex()
    };
    // Pairs can be seen as complex numbers where they lie only if each starts at an even offset.
    let even = |offset: i64| offset % 2 == 0;
    let in_place =
        x.kind() == Kind::Float && x.stride().iter().take(2).copied().all(even) && even(x.storage_offset());
    if in_place {
        let _ = pairs(x).g_mul_(&rotations);
    } else {
        // `copy` always makes a contiguous tensor of its own.
        let turned = x.to_kind(Kind::Float).contiguous().copy();
        let _ = pairs(&turned).g_mul_(&rotations);
        x.shallow_clone().copy_(&turned);
    }
}

/// Radians per position of each of the `dim / 2` pairs.
fn frequencies(config: &RopeConfig, dim: i64) -> Vec<f64> {
    let plain = |pair: i64| config.theta.powf(-((2 * pair) as f64) / dim as f64);
    let Some(yarn) = &config.yarn else { return (0..dim / 2).map(plain).collect() };
    // The pair that turns `turns` times over the original context.
    let pair_turning = |turns: f64| {
        let wavelengths = yarn.original_max_position_embeddings / (turns * std::f64::consts::TAU);
        dim as f64 * wavelengths.ln() / (2.0 * config.theta.ln())
    };
    let (mut low, mut high) = (pair_turning(yarn.beta_fast), pair_turning(yarn.beta_slow));
    if yarn.truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    // As in the reference, the upper end is clamped to the elements, of which there are twice as many as pairs.
    (low, high) = (low.max(0.0), high.min((dim - 1) as f64));
    if low == high {
        high += 0.001; // the ramp becomes a step
    }
    let blended = |pair: i64| {
        let slowed = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
        plain(pair) * (1.0 - slowed) + plain(pair) / yarn.factor * slowed
    };
    (0..dim / 2).map(blended).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn yarn(factor: f64, original: f64) -> RopeConfig {
        let yarn = Yarn {
            factor,
            original_max_position_embeddings: original,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: 1.0,
            mscale_all_dim: 1.0,
            attention_factor: None,
            truncate: true,
        };
        RopeConfig { theta: 10_000.0, yarn: Some(yarn) }
    }

    fn plain() -> RopeConfig {
        RopeConfig { theta: 10_000.0, yarn: None }
    }

    /// Neighbouring pairs, not halves: at position 1 with four elements the two give different numbers.
    #[test]
    fn neighbouring_pairs_are_turned() {
        let x = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0]).view([1, 1, 4]);
        rotate_(&x, &Rope::of(&plain(), 4).rotations(&[1], Device::Cpu));
        let (s0, c0) = 1f64.sin_cos();
        let (s1, c1) = 0.01f64.sin_cos();
        let expected = [c0 - 2.0 * s0, s0 + 2.0 * c0, 3.0 * c1 - 4.0 * s1, 3.0 * s1 + 4.0 * c1];
        let turned = Vec::<f32>::try_from(x.view(-1)).unwrap();
        for (turned, expected) in turned.iter().zip(expected) {
            assert!((f64::from(*turned) - expected).abs() < 1e-6, "{turned} is not {expected}");
        }
    }

    /// The last position of the longest published context, where an angle in float32 would be off by 1e-2.
    #[test]
    fn angles_stay_exact_at_far_positions() {
        for config in [plain(), yarn(40.0, 4096.0)] {
            let rope = Rope::of(&config, 64);
            let rotations = rope.rotations(&[163_839, 8191, 0], Device::Cpu).view_as_real();
            for (row, position) in [163_839f64, 8191.0, 0.0].into_iter().enumerate() {
                for pair in 0..32 {
                    let (sine, cosine) = (position * rope.frequencies[pair]).sin_cos();
                    let at = |part| rotations.double_value(&[row as i64, pair as i64, part]);
                    assert!((at(0) - cosine).abs() < 1e-7 && (at(1) - sine).abs() < 1e-7);
                }
            }
        }
    }

    /// V3's own numbers: dim 64, factor 40 over 4096, blended from pair 10 to pair 23.
    #[test]
    fn yarn_keeps_fast_pairs_and_slows_slow_ones_by_the_factor() {
        let (stretched, plain) = (frequencies(&yarn(40.0, 4096.0), 64), frequencies(&plain(), 64));
        for pair in 0..32 {
            let ratio = plain[pair] / stretched[pair];
            match pair {
                0..=10 => assert!((ratio - 1.0).abs() < 1e-12),
                11..=22 => assert!(ratio > 1.0 && ratio < 40.0),
                _ => assert!((ratio - 40.0).abs() < 1e-9, "pair {pair}: {ratio}"),
            }
        }
    }

    #[test]
    fn equal_ends_of_the_blend_make_a_step_and_no_nan() {
        let mut config = yarn(32.0, 4096.0);
        config.yarn.as_mut().unwrap().truncate = false;
        config.yarn.as_mut().unwrap().beta_fast = 1.0;
        assert!(frequencies(&config, 64).iter().all(|frequency| frequency.is_finite()));
    }

    #[test]
    fn a_view_at_an_odd_offset_and_bfloat16_turn_like_an_aligned_one() {
        let rotations = Rope::of(&plain(), 6).rotations(&[3, 0, 9, 4], Device::Cpu);
        let wide = Tensor::randn([4, 2, 9], (Kind::Float, Device::Cpu));
        let aligned = wide.narrow(2, 3, 6).copy();
        rotate_(&aligned, &rotations);
        let untouched = wide.narrow(2, 0, 3).copy();
        rotate_(&wide.narrow(2, 3, 6), &rotations);
        assert_eq!(wide.narrow(2, 3, 6), aligned);
        assert_eq!(wide.narrow(2, 0, 3), untouched);
        let rounded = aligned.to_kind(Kind::BFloat16);
        rotate_(&rounded, &rotations);
        rotate_(&aligned, &rotations);
        assert!((rounded.to_kind(Kind::Float) - aligned).abs().max().double_value(&[]) < 0.05);
    }
}
