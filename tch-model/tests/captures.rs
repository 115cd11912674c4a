//! What is kept of a pass: the right plane under the right name, in the right shape, without changing anything.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{Golden, everything, float32, relative_error};
use tch::{Device, Kind, Tensor};
use tether_model::{
    Capture, CapturePoint, CaptureSpec, FinalState, ForwardError, InvalidCapture, Model, Routes, Sequence,
};

fn sequence<'a>(token_ids: &'a [i64], spec: &'a CaptureSpec) -> Sequence<'a> {
    let capture = Some(Capture { spec, kind: Kind::Float, first_row: 0 });
    Sequence { capture, ..Sequence::new(token_ids) }
}

/// The hidden states of one prompt, `[tokens, planes, hidden]`.
fn captured(model: &Model, prompt: &[i64], points: &[i64], last: FinalState) -> Tensor {
    let spec = CaptureSpec::new(points, last, model.config().num_hidden_layers).unwrap();
    model.forward(&mut [sequence(prompt, &spec)]).unwrap().remove(0).hidden_states.unwrap()
}

/// Point k is what enters layer k, so what layer k-1 gave out, and neither of its neighbours.
#[test]
fn a_point_is_what_enters_its_layer() {
    let (model, golden) = (float32("tiny-v3", 4096), Golden::read("tiny-v3"));
    let prompt = &golden.prompts[9];
    let rows = prompt.len() as i64;
    let first = golden.prompts[..9].iter().map(Vec::len).sum::<usize>() as i64;
    // `R[0] … R[n], N` by transformers, whose `R[k]` is the input of layer k.
    let reference = golden.get("planes_f32").narrow(0, first, rows);
    let layers = model.config().num_hidden_layers;
    for point in 0..=layers {
        let found = captured(&model, prompt, &[point], FinalState::None).select(1, 0);
        for plane in 0..=layers + 1 {
            let same = relative_error(&found, &reference.select(1, plane)) < 1e-4;
            assert_eq!(same, plane == point, "point {point} against plane {plane}");
        }
    }
}

#[test]
fn the_first_and_last_points_exist_and_those_beyond_are_refused_with_the_range() {
    let model = float32("tiny-v2", 4096);
    let layers = model.config().num_hidden_layers;
    for point in [0, layers - 1, layers] {
        assert_eq!(captured(&model, &[5, 6, 7], &[point], FinalState::None).size(), [3, 1, 128]);
    }
    for point in [-1, layers + 1] {
        let error = CaptureSpec::new(&[point], FinalState::None, layers).unwrap_err();
        assert_eq!(error, InvalidCapture::Unreachable { point, num_layers: layers });
        assert!(error.to_string().contains("0 to 8"), "{error}");
    }
}

#[test]
fn any_points_in_any_order_give_those_planes_ascending() {
    let model = float32("tiny-v2", 4096);
    let prompt = [9, 8, 7, 6, 5];
    let all = captured(&model, &prompt, &[0, 1, 2, 3, 4, 5, 6, 7, 8], FinalState::PostNorm);
    for points in [&[3i64, 1, 2][..], &[7], &[8, 0], &[2, 4, 5, 7], &[6, 1, 0, 4, 3]] {
        let found = captured(&model, &prompt, points, FinalState::None);
        let mut ascending = points.to_vec();
        ascending.sort_unstable();
        assert_eq!(found, all.index_select(1, &Tensor::from_slice(&ascending)), "{points:?}");
    }
}

#[test]
fn the_final_states_are_before_and_behind_the_norm() {
    let (model, golden) = (float32("tiny-v3", 4096), Golden::read("tiny-v3"));
    let prompt = &golden.prompts[0];
    let (planes, layers) = (golden.get("planes_f32"), model.config().num_hidden_layers);
    let both = captured(&model, prompt, &[2], FinalState::Both);
    assert_eq!(both.size(), [1, 3, 128]);
    for (plane, reference) in [(0, 2), (1, layers), (2, layers + 1)] {
        let expected = planes.narrow(0, 0, 1).select(1, reference);
        assert!(relative_error(&both.select(1, plane), &expected) < 1e-4, "plane {plane}");
    }
    let before = captured(&model, prompt, &[2], FinalState::PreNorm);
    assert_eq!(before, both.narrow(1, 0, 2));
    assert_eq!(captured(&model, prompt, &[2], FinalState::PostNorm).select(1, 1), both.select(1, 2));
}

/// As many tokens as planes: only the values tell the axes apart.
#[test]
fn rows_are_tokens_and_planes_are_points_even_when_there_are_as_many() {
    let model = float32("tiny-v2", 4096);
    let prompt = [40, 41, 42];
    let square = captured(&model, &prompt, &[0, 2, 5], FinalState::None);
    assert_eq!(square.size(), [3, 3, 128]);
    // R[0] is the embedding: the same token gives the same row wherever it stands.
    for (row, &token) in prompt.iter().enumerate() {
        let alone = captured(&model, &[token], &[0], FinalState::None);
        assert_eq!(square.get(row as i64).get(0), alone.get(0).get(0));
        assert_ne!(square.get(0).get(row as i64), square.get(row as i64).get(0).zeros_like());
    }
    assert_ne!(square, square.transpose(0, 1));
}

#[test]
fn each_sequence_gets_its_own_points_kind_and_first_row() {
    let (model, layers) = (float32("tiny-v3", 7), 8);
    let prompts: [&[i64]; 4] =
        [&[3, 4, 5, 6], &[7, 8, 9, 10, 11, 12, 13, 14, 15, 16], &[20, 21], &[30, 31, 32]];
    let specs: Vec<CaptureSpec> =
        [(&[1i64, 7][..], FinalState::Both), (&[3], FinalState::None), (&[], FinalState::PostNorm)]
            .into_iter()
            .map(|(points, last)| CaptureSpec::new(points, last, layers).unwrap())
            .collect();
    let capture = |spec, kind, first_row| Some(Capture { spec, kind, first_row });
    let outputs = model
        .forward(&mut [
            Sequence {
                capture: capture(&specs[0], Kind::BFloat16, 1),
                last_logits: true,
                ..Sequence::new(prompts[0])
            },
            Sequence { capture: capture(&specs[1], Kind::Float, 6), ..Sequence::new(prompts[1]) },
            Sequence { last_logits: true, ..Sequence::new(prompts[2]) },
            Sequence { capture: capture(&specs[2], Kind::Half, 3), ..Sequence::new(prompts[3]) },
        ])
        .unwrap();
    let all = everything(&model);
    for (output, prompt) in outputs.iter().zip(prompts) {
        assert_eq!(Vec::<i64>::try_from(&output.token_ids).unwrap(), prompt);
        assert_eq!((output.token_ids.kind(), output.token_ids.device()), (Kind::Int64, Device::Cpu));
    }
    let wants = outputs.iter().map(|output| output.logits.as_ref().map(Tensor::size)).collect::<Vec<_>>();
    assert_eq!(wants, [Some(vec![512]), None, Some(vec![512]), None]);
    let states: Vec<_> = outputs.into_iter().map(|output| output.hidden_states).collect();
    let (first, second, last) =
        (states[0].as_ref().unwrap(), states[1].as_ref().unwrap(), states[3].as_ref().unwrap());
    assert!(states[2].is_none());
    assert_eq!((first.size(), first.kind()), (vec![3, 4, 128], Kind::BFloat16));
    assert_eq!((second.size(), second.kind()), (vec![4, 1, 128], Kind::Float));
    assert_eq!((last.size(), last.kind()), (vec![0, 1, 128], Kind::Half));
    // The same rows and planes of a pass that keeps everything.
    let alone =
        |prompt| model.forward(&mut [sequence(prompt, &all)]).unwrap().remove(0).hidden_states.unwrap();
    let expected = alone(prompts[0]).narrow(0, 1, 3).index_select(1, &Tensor::from_slice(&[1i64, 7, 8, 9]));
    assert!(relative_error(first, &expected) < 4e-3);
    assert!(relative_error(second, &alone(prompts[1]).narrow(0, 6, 4).narrow(1, 3, 1)) < 1e-5);
    for states in states.iter().flatten() {
        assert!(states.is_contiguous() && states.device() == Device::Cpu);
    }
}

#[test]
fn capturing_changes_no_logit() {
    let (model, golden) = (float32("tiny-v3", 64), Golden::read("tiny-v3"));
    let spec = everything(&model);
    let logits = |capture: bool| -> Vec<Tensor> {
        let mut sequences: Vec<Sequence<'_>> = golden
            .prompts
            .iter()
            .map(|ids| Sequence {
                capture: sequence(ids, &spec).capture.filter(|_| capture),
                last_logits: true,
                ..Sequence::new(ids)
            })
            .collect();
        model.forward(&mut sequences).unwrap().into_iter().map(|output| output.logits.unwrap()).collect()
    };
    assert_eq!(logits(false), logits(true));
}

#[test]
fn the_same_pass_twice_gives_the_same_bits() {
    let (model, golden) = (float32("tiny-v2-group", 64), Golden::read("tiny-v2-group"));
    let prompts = golden.prompts();
    let (first, second) =
        (common::run(&model, &prompts, Routes::Free), common::run(&model, &prompts, Routes::Free));
    assert_eq!(first, second);
}

#[test]
fn points_are_named_by_the_spec_in_plane_order() {
    let spec = CaptureSpec::new(&[5, 2], FinalState::Both, 8).unwrap();
    let expected = [2, 5, 8].map(CapturePoint::Residual).into_iter().chain([CapturePoint::FinalNorm]);
    assert_eq!(spec.planes(), expected.collect::<Vec<_>>());
}

#[test]
fn sequences_that_cannot_run_are_refused_by_place_and_the_model_stays_usable() {
    let model = float32("tiny-v2", 4096);
    fn plain(token_ids: &[i64]) -> Sequence<'_> {
        Sequence { last_logits: true, ..Sequence::new(token_ids) }
    }
    let good = [5i64, 6];
    let refused = |bad: &[i64]| model.forward(&mut [plain(&good), plain(bad)]).unwrap_err();
    assert_eq!(refused(&[]), ForwardError::Empty { sequence: 1 });
    for token in [-1, 512, i64::MAX, i64::MIN] {
        let expected = ForwardError::Token { sequence: 1, position: 2, token, vocab_size: 512 };
        assert_eq!(refused(&[3, 4, token, -7]), expected);
    }
    assert_eq!(refused(&[1; 257]), ForwardError::TooLong { sequence: 1, tokens: 257, limit: 256 });
    let deeper = CaptureSpec::new(&[9], FinalState::None, 9).unwrap();
    let error = model.forward(&mut [sequence(&good, &deeper)]).unwrap_err();
    assert_eq!(error, ForwardError::Depth { sequence: 0, asked: 9, layers: 8 });
    let spec = CaptureSpec::new(&[2], FinalState::None, 8).unwrap();
    let with = |kind, first_row| {
        let capture = Some(Capture { spec: &spec, kind, first_row });
        model.forward(&mut [Sequence { capture, ..Sequence::new(&good) }]).unwrap_err()
    };
    assert_eq!(with(Kind::Float, 3), ForwardError::FirstRow { sequence: 0, first_row: 3, tokens: 2 });
    assert!(matches!(with(Kind::Int64, 0), ForwardError::Kind { sequence: 0, .. }));
    let wrong = [Tensor::zeros([2, 4], (Kind::Int64, Device::Cpu))];
    let error = model.forward_with(&mut [plain(&good)], Routes::forced(&wrong)).unwrap_err();
    assert!(matches!(error, ForwardError::Routes { .. }), "{error}");
    assert!(model.forward(&mut []).unwrap().is_empty());
    assert!(model.forward(&mut [plain(&good)]).unwrap()[0].logits.is_some());
    assert!(model.forward(&mut [plain(&[1; 256])]).is_ok());
}

fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// Recording for gradients is a setting of the thread, so a thread that never heard of it must not keep graphs.
#[test]
fn a_thousand_passes_on_a_fresh_thread_keep_no_graph_and_no_memory() {
    let (model, golden) = (float32("tiny-v2", 64), Golden::read("tiny-v2"));
    std::thread::spawn(move || {
        let spec = everything(&model);
        let mut after_warm_up = 0;
        for pass in 0..1100 {
            let prompt = &golden.prompts[3 + pass % 6];
            let outputs =
                model.forward(&mut [Sequence { last_logits: true, ..sequence(prompt, &spec) }]).unwrap();
            let tensors = [&outputs[0].hidden_states, &outputs[0].logits];
            assert!(tensors.into_iter().flatten().all(|tensor| !tensor.requires_grad()));
            if pass == 100 {
                after_warm_up = resident_bytes();
            }
        }
        let grown = resident_bytes().saturating_sub(after_warm_up);
        assert!(grown < 16 << 20, "{grown} bytes more after 1,000 passes");
    })
    .join()
    .unwrap();
}
