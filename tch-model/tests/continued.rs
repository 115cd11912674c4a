//! Sequences that are run in parts behind a cache, and what is said of the tokens that follow.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{Golden, everything, float32, load, model_dir, relative_error, worst_element};
use tch::{Kind, Tensor};
use tether_model::{
    Capture, CaptureSpec, DtypeChoice, FinalState, ForwardError, KvCache, Model, Products, Scoring, Sequence,
};

/// The float32 bounds of the contract.
#[track_caller]
fn assert_close(what: &str, found: &Tensor, expected: &Tensor) {
    let apart = (relative_error(found, expected), worst_element(found, expected));
    assert!(apart.0 <= 1e-4 && apart.1 <= 1e-3, "{what}: {apart:?}");
}

fn states(model: &Model, token_ids: &[i64], cache: Option<&mut KvCache>) -> Tensor {
    let spec = everything(model);
    let capture = Some(Capture { spec: &spec, kind: Kind::Float, first_row: 0 });
    let mut sequences = [Sequence { cache, capture, ..Sequence::new(token_ids) }];
    model.forward(&mut sequences).unwrap().remove(0).hidden_states.unwrap()
}

#[test]
fn a_suffix_behind_a_cached_prefix_has_the_states_of_the_whole() {
    let (model, golden) = (float32("tiny-v3", 64), Golden::read("tiny-v3"));
    let prompt = golden.prompts.last().unwrap();
    let whole = states(&model, prompt, None);
    // Ends of prefixes around the widths of tiles and of what is attended to absorbed.
    for end in [1, 63, 64, 65, 100, 135, 136, 137, 199] {
        let mut cache = model.new_cache();
        let prefix = states(&model, &prompt[..end], Some(&mut cache));
        let suffix = states(&model, &prompt[end..], Some(&mut cache));
        assert_close(&format!("prefix of {end}"), &prefix, &whole.narrow(0, 0, end as i64));
        let rest = (prompt.len() - end) as i64;
        assert_close(&format!("suffix behind {end}"), &suffix, &whole.narrow(0, end as i64, rest));
        // The same prefix carries another suffix.
        cache.truncate(end);
        let again = states(&model, &prompt[end..], Some(&mut cache));
        assert_close(&format!("again behind {end}"), &again, &suffix);
    }
}

#[test]
fn continued_sequences_and_new_ones_share_a_step_and_none_sees_another() {
    let (model, golden) = (float32("tiny-v2-group", 16), Golden::read("tiny-v2-group"));
    let prompts = golden.prompts();
    let spec = everything(&model);
    let capture = Some(Capture { spec: &spec, kind: Kind::Float, first_row: 0 });
    let alone: Vec<Tensor> = prompts.iter().map(|prompt| states(&model, prompt, None)).collect();
    // Prompt 12 has one token left, 13 has 90, 14 begins with a cache, 15 is run once; 11 is beside them.
    let mut caches: Vec<KvCache> = (0..3).map(|_| model.new_cache()).collect();
    for (cache, (prompt, rest)) in caches.iter_mut().zip([(prompts[12], 1), (prompts[13], 90)]) {
        let _ = states(&model, &prompt[..prompt.len() - rest], Some(cache));
    }
    let [one, many, fresh] = &mut caches[..] else { unreachable!() };
    let part = |prompt: usize, rest: usize| &prompts[prompt][prompts[prompt].len() - rest..];
    let mut step = [
        Sequence { capture, ..Sequence::new(prompts[11]) },
        Sequence { capture, cache: Some(one), ..Sequence::new(part(12, 1)) },
        Sequence { capture, ..Sequence::new(prompts[15]) },
        Sequence { capture, cache: Some(many), ..Sequence::new(part(13, 90)) },
        Sequence { capture, cache: Some(fresh), ..Sequence::new(prompts[14]) },
    ];
    let outputs = model.forward(&mut step).unwrap();
    for ((output, prompt), rest) in outputs.iter().zip([11, 12, 15, 13, 14]).zip([0, 1, 0, 90, 0]) {
        let rows = alone[prompt].size()[0];
        let rest = if rest == 0 { rows } else { rest };
        let found = output.hidden_states.as_ref().unwrap();
        assert_close(&format!("prompt {prompt}"), found, &alone[prompt].narrow(0, rows - rest, rest));
    }
    assert_eq!(caches.iter().map(KvCache::len).collect::<Vec<_>>(), [12, 13, 14].map(|p| prompts[p].len()));
}

/// The tokens that greedy decoding picks, one at a time behind a cache, with the gap between the best logit and the next.
fn decode(model: &Model, prompts: &[Vec<i64>], new_tokens: usize, captured: bool) -> Vec<Vec<(i64, f64)>> {
    let spec = CaptureSpec::new(&[1], FinalState::Both, model.config().num_hidden_layers).unwrap();
    let capture = captured.then_some(Capture { spec: &spec, kind: Kind::BFloat16, first_row: 0 });
    let mut caches: Vec<KvCache> = prompts.iter().map(|_| model.new_cache()).collect();
    let mut next: Vec<Vec<i64>> = prompts.to_vec();
    let mut picked: Vec<Vec<(i64, f64)>> = prompts.iter().map(|_| Vec::new()).collect();
    for _ in 0..new_tokens {
        let mut step: Vec<Sequence<'_>> = next
            .iter()
            .zip(&mut caches)
            .map(|(ids, cache)| Sequence {
                cache: Some(cache),
                capture,
                last_logits: true,
                ..Sequence::new(ids)
            })
            .collect();
        let outputs = model.forward(&mut step).unwrap();
        for ((output, picked), next) in outputs.into_iter().zip(&mut picked).zip(&mut next) {
            let (values, tokens) = output.logits.unwrap().topk(2, -1, true, true);
            let token = tokens.int64_value(&[0]);
            picked.push((token, values.double_value(&[0]) - values.double_value(&[1])));
            *next = vec![token];
        }
    }
    picked
}

/// transformers' greedy continuation of each prompt, 64 tokens, made by `tests/python/make_generations.py`.
fn continuations(name: &str) -> Vec<Vec<i64>> {
    let golden = Golden::read_file(name, "generations.safetensors");
    let tokens = golden.get("tokens");
    (0..tokens.size()[0]).map(|row| tokens.get(row).try_into().unwrap()).collect()
}

/// Closer than this, rounding in float32 may order two logits either way.
const NEAR_TIE: f64 = 1e-3;

/// Compares up to a near-tie that the two took otherwise, behind which they continue other texts; how many tokens that was.
#[track_caller]
fn compare(what: &str, found: &[(i64, f64)], expected: &[i64]) -> usize {
    assert_eq!(found.len(), expected.len());
    match found.iter().zip(expected).position(|((token, _), expected)| token != expected) {
        None => expected.len(),
        Some(at) => {
            let (token, gap) = found[at];
            assert!(gap < NEAR_TIE, "{what}, token {at}: {token} for {}, {gap} ahead", expected[at]);
            at
        }
    }
}

#[test]
fn greedy_decoding_equals_transformers_up_to_near_ties() {
    for name in ["tiny-v2", "tiny-v2-group", "tiny-v3"] {
        let (model, golden) = (float32(name, 4096), Golden::read(name));
        let expected = continuations(name);
        let found = decode(&model, &golden.prompts[..expected.len()], 64, false);
        let each = found.iter().zip(&expected).enumerate();
        let compared: usize = each
            .map(|(prompt, (found, expected))| compare(&format!("{name}, prompt {prompt}"), found, expected))
            .sum();
        let all = 64 * expected.len();
        println!("{name}: {compared} of {all} tokens are before a near-tie");
        assert!(compared > all * 8 / 10, "{name}: only {compared} of {all} tokens could be compared");
    }
}

#[test]
fn what_is_decoded_depends_neither_on_the_batch_nor_on_captures_nor_on_the_run() {
    let (model, golden) = (float32("tiny-v3", 4096), Golden::read("tiny-v3"));
    let prompts: Vec<Vec<i64>> = golden.prompts[4..12].to_vec();
    let together = decode(&model, &prompts, 24, false);
    let expected: Vec<Vec<i64>> =
        together.iter().map(|picked| picked.iter().map(|(token, _)| *token).collect()).collect();
    let captured = decode(&model, &prompts, 24, true);
    let mut compared = 0;
    for ((prompt, captured), expected) in prompts.iter().zip(&captured).zip(&expected) {
        compared += compare("captured", captured, expected);
        compared += compare("alone", &decode(&model, std::slice::from_ref(prompt), 24, false)[0], expected);
    }
    assert!(compared > 2 * 8 * 24 * 8 / 10, "only {compared} tokens could be compared");
    let first = std::slice::from_ref(&prompts[0]);
    let once = decode(&model, first, 24, false);
    for _ in 0..20 {
        // The same products of the same shapes: not a bit differs.
        assert_eq!(decode(&model, first, 24, false), once, "repeated");
    }
}

#[test]
fn decoding_in_bfloat16_stays_near_float32() {
    let golden = Golden::read("tiny-v2");
    let exact = float32("tiny-v2", 4096);
    let prompt = golden.prompts[14].as_slice();
    let whole = states(&exact, prompt, None);
    for products in [Products::Native, Products::Widened] {
        let model = load(&model_dir("tiny-v2"), DtypeChoice::BFloat16, 4096, Some(products));
        let mut cache = model.new_cache();
        let rows: Vec<Tensor> =
            prompt.chunks(1).map(|token| states(&model, token, Some(&mut cache))).collect();
        let found = Tensor::cat(&rows, 0);
        let apart = relative_error(&found, &whole);
        assert!(apart < 0.03, "{products:?}: {apart}");
        let element = if products == Products::Native { 2 } else { 4 };
        assert_eq!(model.cache_bytes_per_token(), (32 + 8) * 8 * element);
    }
}

#[test]
fn scores_are_the_log_probabilities_of_the_logits() {
    let (model, golden) = (float32("tiny-v3", 64), Golden::read("tiny-v3"));
    let prompt = golden.prompts[13].as_slice();
    // The last rows of the packed prompts are those of the reference's logits.
    let first: i64 = golden.prompts[..13].iter().map(|prompt| prompt.len() as i64).sum();
    let logits = golden.get("logits_f64").narrow(0, first, prompt.len() as i64);
    let expected = logits.log_softmax(-1, Kind::Double);
    let (first_row, also) = (5, [3, 500, 3]);
    let scoring = Scoring { first_row, targets: &prompt[first_row + 1..], top: 4, token_ids: &also };
    let mut sequences = [
        Sequence::new(golden.prompts[12].as_slice()),
        Sequence { scoring: Some(scoring), ..Sequence::new(prompt) },
    ];
    let mut outputs = model.forward(&mut sequences).unwrap();
    assert_eq!(outputs[0].scores, None);
    let scores = outputs.remove(1).scores.unwrap();
    let close = |found: f32, row: usize, token: i64| {
        let expected = expected.double_value(&[row as i64, token]);
        assert!(
            (f64::from(found) - expected).abs() < 1e-4,
            "row {row}, token {token}: {found} for {expected}"
        );
    };
    assert_eq!(scores.targets.len(), prompt.len() - first_row - 1);
    for (at, target) in scores.targets.iter().enumerate() {
        let row = first_row + at;
        close(*target, row, prompt[row + 1]);
        assert_eq!(scores.top[at].len(), 4);
        for (token, found) in &scores.top[at] {
            close(*found, row, *token);
        }
        assert!(scores.top[at].is_sorted_by(|one, next| one.1 >= next.1));
        let best = expected.get(row as i64).max().double_value(&[]);
        assert!((f64::from(scores.top[at][0].1) - best).abs() < 1e-4);
        for (found, token) in scores.token_ids[at].iter().zip(also) {
            close(*found, row, token);
        }
    }
    let bad = Scoring { first_row: 3, targets: &prompt[..prompt.len() - 2], top: 0, token_ids: &[] };
    let error = model.forward(&mut [Sequence { scoring: Some(bad), ..Sequence::new(prompt) }]).unwrap_err();
    assert!(matches!(error, ForwardError::Scoring { first_row: 3, .. }), "{error}");
    let outside = Scoring { first_row: 0, targets: &[5], top: 0, token_ids: &[512] };
    let error =
        model.forward(&mut [Sequence { scoring: Some(outside), ..Sequence::new(prompt) }]).unwrap_err();
    assert!(matches!(error, ForwardError::Token { token: 512, .. }), "{error}");
}

#[test]
fn a_refused_pass_leaves_caches_as_they_were_and_the_context_ends_for_all_tokens() {
    let (model, golden) = (float32("tiny-v3", 64), Golden::read("tiny-v3"));
    let prompt = golden.prompts[10].as_slice();
    let mut cache = model.new_cache();
    let _ = states(&model, &prompt[..30], Some(&mut cache));
    let bytes = cache.bytes();
    let mut small = model.new_cache_for(31);
    let _ = states(&model, &prompt[..30], Some(&mut small));
    let _ = states(&model, &prompt[30..31], Some(&mut small));
    assert_eq!(small.bytes(), 31 * model.cache_bytes_per_token(), "no more than was asked for");
    let refused = model.forward(&mut [
        Sequence { cache: Some(&mut cache), ..Sequence::new(&prompt[30..]) },
        Sequence::new(&[-1]),
    ]);
    assert!(matches!(refused, Err(ForwardError::Token { sequence: 1, .. })));
    assert_eq!((cache.len(), cache.bytes()), (30, bytes));
    let whole = states(&model, prompt, None);
    let rest = states(&model, &prompt[30..], Some(&mut cache));
    assert_close("after a refusal", &rest, &whole.narrow(0, 30, prompt.len() as i64 - 30));
    let limit = usize::try_from(model.config().max_position_embeddings).unwrap();
    let more = vec![1; limit - prompt.len() + 1];
    let error =
        model.forward(&mut [Sequence { cache: Some(&mut cache), ..Sequence::new(&more) }]).unwrap_err();
    assert!(matches!(error, ForwardError::TooLong { tokens, .. } if tokens == limit + 1), "{error}");
    let _ = states(&model, &more[1..], Some(&mut cache));
    assert_eq!(cache.len(), limit);
}
