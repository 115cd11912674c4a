use proptest::prelude::*;
use tch::Device;

use super::*;

/// A gate for tests of `choose`, which does not look at the weight.
fn gate(routing: Routing, top_k: i64, norm_topk_prob: bool, routed_scaling_factor: f64) -> Gate {
    let weight = Parameter::owned(Tensor::zeros([1, 1], (Kind::Float, Device::Cpu)));
    Gate { weight, routing, top_k, norm_topk_prob, routed_scaling_factor }
}

fn bias(values: &[f32]) -> Parameter {
    Parameter::owned(Tensor::from_slice(values))
}

fn logit(probability: f64) -> f32 {
    (probability / (1.0 - probability)).ln() as f32
}

/// Expert and weight of one row, by expert.
fn chosen(gate: &Gate, logits: &[f32]) -> Vec<(i64, f32)> {
    let choice = gate.choose(&Tensor::from_slice(logits).unsqueeze(0), None);
    let experts = Vec::<i64>::try_from(choice.experts.view(-1)).unwrap();
    let weights = Vec::<f32>::try_from(choice.weights.view(-1)).unwrap();
    let mut chosen: Vec<_> = experts.into_iter().zip(weights).collect();
    chosen.sort_by_key(|&(expert, _)| expert);
    chosen
}

/// The routing written down again, plainly and in float64.
fn naive(gate: &Gate, logits: &[f32]) -> Vec<(i64, f64)> {
    let logits: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
    let sigmoid = matches!(gate.routing, Routing::NoAuxTc { .. });
    let total: f64 = logits.iter().map(|logit| logit.exp()).sum();
    let score = |logit: &f64| if sigmoid { 1.0 / (1.0 + (-logit).exp()) } else { logit.exp() / total };
    let scores: Vec<f64> = logits.iter().map(score).collect();
    let mut order_by = scores.clone();
    let (mut groups, mut kept) = (1, 1);
    match &gate.routing {
        Routing::Greedy => {}
        Routing::GroupLimited { n_group, topk_group } => {
            (groups, kept) = (*n_group as usize, *topk_group as usize);
        }
        Routing::NoAuxTc { n_group, topk_group, bias } => {
            (groups, kept) = (*n_group as usize, *topk_group as usize);
            let bias = Vec::<f32>::try_from(&**bias).unwrap();
            order_by.iter_mut().zip(bias).for_each(|(score, bias)| *score += f64::from(bias));
        }
    }
    let size = scores.len() / groups;
    let group_score = |group: usize| {
        let mut of = order_by[group * size..(group + 1) * size].to_vec();
        of.sort_by(|a, b| b.total_cmp(a));
        if sigmoid && groups > 1 { of[0] + of[1] } else { of[0] }
    };
    let mut best_groups: Vec<usize> = (0..groups).collect();
    best_groups.sort_by(|&a, &b| group_score(b).total_cmp(&group_score(a)));
    best_groups.truncate(kept);
    let mut experts: Vec<usize> =
        (0..scores.len()).filter(|expert| best_groups.contains(&(expert / size))).collect();
    experts.sort_by(|&a, &b| order_by[b].total_cmp(&order_by[a]));
    experts.truncate(gate.top_k as usize);
    experts.sort_unstable();
    let sum: f64 = experts.iter().map(|&expert| scores[expert]).sum();
    let divisor = if gate.norm_topk_prob { sum + 1e-20 } else { 1.0 };
    let weight = |expert| (expert as i64, scores[expert] / divisor * gate.routed_scaling_factor);
    experts.into_iter().map(weight).collect()
}

/// Two groups of two with biased scores -0.1, -0.2 | -0.5, -0.6; one group is kept. Masked with zero, the dropped group
/// would win.
#[test]
fn an_expert_of_a_dropped_group_never_beats_one_of_a_kept_group() {
    let half = [0.0f32; 4]; // sigmoid(0) = 0.5
    let bias = bias(&[-0.6, -0.7, -1.0, -1.1]);
    let gate = gate(Routing::NoAuxTc { n_group: 2, topk_group: 1, bias }, 2, false, 1.0);
    assert_eq!(chosen(&gate, &half), [(0, 0.5), (1, 0.5)]);
}

#[test]
fn the_bias_sways_the_choice_and_stays_out_of_the_weights() {
    let logits = [logit(0.9), logit(0.8), logit(0.2), logit(0.1)];
    let bias = bias(&[0.0, 0.0, 0.0, 5.0]);
    let gate = gate(Routing::NoAuxTc { n_group: 1, topk_group: 1, bias }, 2, false, 1.0);
    let chosen = chosen(&gate, &logits);
    assert_eq!((chosen[0].0, chosen[1].0), (0, 3));
    assert!((chosen[0].1 - 0.9).abs() < 1e-6 && (chosen[1].1 - 0.1).abs() < 1e-6);
}

#[test]
fn the_scaling_factor_is_applied_once_whether_or_not_weights_are_normalised() {
    let logits = [1.0f32, 0.5, -0.5, 0.0];
    for (normalise, factor) in [(false, 1.0), (false, 16.0), (true, 1.0), (true, 16.0)] {
        let greedy = gate(Routing::Greedy, 2, normalise, factor);
        let total: f32 = chosen(&greedy, &logits).iter().map(|&(_, weight)| weight).sum();
        let scores: f64 =
            naive(&gate(Routing::Greedy, 2, false, 1.0), &logits).iter().map(|&(_, score)| score).sum();
        let expected = if normalise { factor } else { scores * factor };
        assert!(
            (f64::from(total) - expected).abs() < 1e-5,
            "{normalise} {factor}: {total} is not {expected}"
        );
    }
}

#[test]
fn a_row_that_scores_nothing_still_has_finite_weights() {
    let bias = bias(&[0.0; 4]);
    let gate = gate(Routing::NoAuxTc { n_group: 2, topk_group: 1, bias }, 2, true, 2.5);
    assert!(chosen(&gate, &[-200.0; 4]).iter().all(|&(_, weight)| weight.is_finite()));
}

/// Scores 1e-4 apart, which bfloat16 cannot tell apart near 1.
#[test]
fn near_ties_are_decided_in_float32() {
    let logits: Vec<f32> = [0.9000, 0.9001, 0.9002, 0.8999].map(logit).to_vec();
    let gate = gate(Routing::NoAuxTc { n_group: 1, topk_group: 1, bias: bias(&[0.0; 4]) }, 2, false, 1.0);
    assert_eq!(chosen(&gate, &logits).iter().map(|&(expert, _)| expert).collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn forced_experts_are_taken_with_their_own_scores() {
    let logits = Tensor::from_slice(&[2.0f32, 1.0, 0.0, -1.0]).unsqueeze(0);
    let forced = Tensor::from_slice(&[3i64, 1]).unsqueeze(0);
    let choice = gate(Routing::Greedy, 2, false, 1.0).choose(&logits, Some(&forced));
    let scores = logits.softmax(-1, Kind::Float);
    assert_eq!(choice.experts, forced);
    assert_eq!(choice.weights.double_value(&[0, 0]), scores.double_value(&[0, 3]));
}

#[derive(Clone, Copy, Debug)]
enum Method {
    Greedy,
    GroupLimited,
    NoAuxTc,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn every_method_chooses_as_written_down_plainly_in_float64(
        method in prop_oneof![Just(Method::Greedy), Just(Method::GroupLimited), Just(Method::NoAuxTc)],
        groups in 1..5usize, size in 2..6usize, kept in 1..5usize, top_k in 1..6usize,
        normalise: bool, factor in prop_oneof![Just(1.0), Just(2.5), Just(16.0)],
        // On a grid, so that two scores are either equal or clearly apart; equal ones are left out below.
        grid in prop::collection::vec(-400..400i32, 25), biases in prop::collection::vec(-20..20i32, 25),
    ) {
        let (kept, experts) = (kept.min(groups), groups * size);
        let top_k = top_k.min(kept * size);
        let logits: Vec<f32> = grid[..experts].iter().map(|&step| step as f32 / 100.0).collect();
        let biases: Vec<f32> = biases[..experts].iter().map(|&step| step as f32 / 20.0).collect();
        let (n_group, topk_group) = (groups as i64, kept as i64);
        let routing = match method {
            Method::Greedy => Routing::Greedy,
            Method::GroupLimited => Routing::GroupLimited { n_group, topk_group },
            Method::NoAuxTc => Routing::NoAuxTc { n_group, topk_group, bias: bias(&biases) },
        };
        let gate = gate(routing, top_k as i64, normalise, factor);
        let expected = naive(&gate, &logits);
        let chosen = chosen(&gate, &logits);
        let same = chosen.iter().zip(&expected).all(|(chosen, expected)| chosen.0 == expected.0);
        // A tie may be broken either way; then the two choices score the same, which float64 shows.
        prop_assume!(same || !has_near_tie(&logits, &biases));
        prop_assert_eq!(chosen.len(), expected.len());
        for (chosen, expected) in chosen.iter().zip(&expected) {
            prop_assert_eq!(chosen.0, expected.0);
            prop_assert!((f64::from(chosen.1) - expected.1).abs() <= 1e-5 * expected.1.max(1e-3));
        }
    }
}

/// Whether two experts, or two sums of two, score within float32's noise of each other.
fn has_near_tie(logits: &[f32], biases: &[f32]) -> bool {
    let sigmoid = |&logit: &f32| 1.0 / (1.0 + (-f64::from(logit)).exp());
    let scores: Vec<f64> = logits.iter().map(sigmoid).collect();
    let swayed: Vec<f64> = scores.iter().zip(biases).map(|(score, &bias)| score + f64::from(bias)).collect();
    let sums: Vec<f64> =
        swayed.iter().enumerate().flat_map(|(i, a)| swayed[..i].iter().map(move |b| a + b)).collect();
    let near = |values: &[f64]| {
        let mut values = values.to_vec();
        values.sort_by(f64::total_cmp);
        values.windows(2).any(|pair| pair[1] - pair[0] < 1e-6)
    };
    near(&scores) || near(&swayed) || near(&sums)
}
