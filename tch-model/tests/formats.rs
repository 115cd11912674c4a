//! Checkpoints in the forms that large ones are published in (`tests/python/make_quantised.py`), against the same models
//! unpacked: every plane, at every position, in float32 and bfloat16.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::bounds::{FLOAT32, MARGIN, within_bfloat16, within_float32};
use common::{Golden, everything, load, model_dir, relative_error, run, run_alone, worst_element};
use tch::{Device, Kind, Tensor};
use tether_model::{
    Architecture, Capture, Config, DtypeChoice, LoadOptions, Model, Products, Routes, Scheme, Sequence,
};

/// Names by how parameters are stored, and how many there are of each.
fn stored(model: &Model) -> Vec<(String, u64)> {
    model.load_table().rows().map(|(stored_as, row)| (stored_as.to_owned(), row.parameters)).collect()
}

/// The model within the bounds of the same one unpacked.
fn is_exact(name: &str) -> Model {
    let (path, golden) = (format!("quantised/{name}"), Golden::read(&format!("quantised/{name}")));
    assert!(golden.margin > MARGIN, "{name}: the smallest margin is {:.2e}", golden.margin);
    let prompts = golden.prompts();
    let whole = load(&model_dir(&path), DtypeChoice::Float32, 4096, None);
    let tiled = load(&model_dir(&path), DtypeChoice::Float32, 7, None);
    let runs = [
        ("in a batch", run(&whole, &prompts, Routes::Free)),
        ("in tiles of 7", run(&tiled, &prompts, Routes::Free)),
        ("alone", run_alone(&whole, &prompts)),
    ];
    for (how, found) in &runs {
        for reference in ["f64", "f32"] {
            within_float32(&format!("{name} {how}"), found, &golden, reference);
        }
    }
    println!("{name}\n{}", whole.load_table());
    for products in [Products::Widened, Products::Native] {
        let model = load(&model_dir(&path), DtypeChoice::BFloat16, 4096, Some(products));
        within_bfloat16(&format!("{name} {products:?}"), &run(&model, &prompts, Routes::Free), &golden);
    }
    whole
}

#[test]
fn a_v3_in_fp8_with_a_layer_for_multi_token_prediction_is_exact() {
    let model = is_exact("fp8-v3");
    let stored = stored(&model);
    let matrices = stored.iter().find(|(name, _)| name == "fp8, blocks of 128x128").unwrap().1;
    let rest: u64 = stored.iter().filter(|(name, _)| !name.starts_with("fp8")).map(|(_, count)| count).sum();
    assert!(matrices > 10 * rest, "{stored:?}");
    // Packed matrices lie where they lay in the file.
    let row = model.load_table().rows().find(|(name, _)| name.starts_with("fp8")).unwrap().1;
    assert_eq!(row.mapped_bytes, row.stored_bytes);
    assert!(row.stored_bytes < row.parameters + row.parameters / 64, "{row:?}");
}

/// LD-08, LD-11: the wrapper's config, prefixes and vision tensors.
#[test]
fn a_kimi_k2_5_with_experts_in_int4_is_exact() {
    let config = Config::read(&model_dir("quantised/int4-kimi-k2.5")).unwrap();
    assert_eq!(config.architecture, Architecture::DeepseekV3);
    assert_eq!(config.quantisation.as_ref().unwrap().scheme, Scheme::Int4 { group: 32 });
    assert_eq!((config.rope.theta, config.rope.yarn.unwrap().factor), (50_000.0, 4.0));
    let model = is_exact("int4-kimi-k2.5");
    let (name, row) = model.load_table().rows().find(|(name, _)| name.starts_with("int4")).unwrap();
    assert_eq!(name, "int4, groups of 32");
    // Eight experts of three matrices in each of three layers, half a byte each and a bfloat16 for 32 of them.
    assert_eq!((row.tensors, row.parameters), (72, 72 * 160 * 160));
    assert_eq!(row.stored_bytes, row.parameters / 2 + row.parameters / 16 + 72 * 8);
    assert_eq!(row.mapped_bytes, row.stored_bytes);
}

#[test]
fn nvfp4_of_modelopt_is_exact() {
    let model = is_exact("nvfp4-modelopt");
    assert!(stored(&model).iter().any(|(name, _)| name == "nvfp4"), "{:?}", stored(&model));
}

#[test]
fn nvfp4_of_compressed_tensors_under_the_shorter_prefix_is_exact() {
    is_exact("nvfp4-kimi-k2.5");
}

/// LD-09: with the config as transformers 5 writes it, YaRN under `rope_parameters`.
#[test]
fn experts_fused_by_transformers_5_are_exact() {
    is_exact("fused-v3");
    is_exact("fused-v2");
}

#[test]
fn layers_spread_over_devices_give_the_same_bits() {
    for name in ["tiny-v3", "quantised/fp8-v3"] {
        let golden = Golden::read(name);
        let on = |devices: usize| {
            let devices = vec![Device::Cpu; devices];
            let options = LoadOptions { devices, dtype: DtypeChoice::Float32, tile_tokens: 64 };
            Model::load(&model_dir(name), &options).unwrap()
        };
        let (one, two, three) = (on(1), on(2), on(3));
        let prompts = golden.prompts();
        let expected = run(&one, &prompts, Routes::Free);
        assert_eq!(run(&two, &prompts, Routes::Free), expected);
        assert_eq!(run(&three, &prompts, Routes::Free), expected);
        let half = two.config().num_hidden_layers / 2;
        let note = two.compute_note();
        assert!(note.contains(&format!("layers 0-{} on cpu, {half}-", half - 1)), "{note}");
    }
}

/// `kv_b_proj` too is fp8 there: prompts expand it, single tokens behind a cache take its two parts apart.
#[test]
fn a_packed_model_over_two_devices_goes_on_behind_a_cache_as_it_runs_whole() {
    let golden = Golden::read("quantised/fp8-v3");
    let options = LoadOptions { devices: vec![Device::Cpu; 2], dtype: DtypeChoice::Float32, tile_tokens: 16 };
    let model = Model::load(&model_dir("quantised/fp8-v3"), &options).unwrap();
    let (prompt, spec) = (golden.prompts.last().unwrap(), everything(&model));
    let mut cache = model.new_cache();
    let mut parts = Vec::new();
    let ends = [40usize].into_iter().chain(41..=prompt.len());
    let mut first = 0;
    for end in ends {
        let capture = Some(Capture { spec: &spec, kind: Kind::Float, first_row: 0 });
        let cache = Some(&mut cache);
        let mut part = [Sequence { cache, capture, ..Sequence::new(&prompt[first..end]) }];
        parts.push(model.forward(&mut part).unwrap().remove(0).hidden_states.unwrap());
        first = end;
    }
    let found = Tensor::cat(&parts, 0);
    let planes = golden.get("planes_f64");
    let rows = prompt.len() as i64;
    let expected = planes.narrow(0, planes.size()[0] - rows, rows);
    for plane in 0..expected.size()[1] {
        let (found, expected) = (found.select(1, plane), expected.select(1, plane));
        let errors = (relative_error(&found, &expected), worst_element(&found, &expected));
        assert!(errors.0 <= FLOAT32.0 && errors.1 <= FLOAT32.1, "plane {plane}: {errors:?}");
    }
}

#[test]
fn a_tied_head_works_on_another_device_than_the_embedding() {
    let options = LoadOptions { devices: vec![Device::Cpu; 4], dtype: DtypeChoice::Float32, tile_tokens: 64 };
    let golden = Golden::read("grid/shape-v2-tied");
    let model = Model::load(&model_dir("grid/shape-v2-tied"), &options).unwrap();
    within_float32("four devices", &run(&model, &golden.prompts(), Routes::Free), &golden, "f64");
}

#[test]
fn more_devices_than_layers_or_none_are_refused() {
    for devices in [0, 9] {
        let options =
            LoadOptions { devices: vec![Device::Cpu; devices], dtype: DtypeChoice::Auto, tile_tokens: 64 };
        let error = Model::load(&model_dir("tiny-v3"), &options).unwrap_err().to_string();
        assert!(error.contains("`devices`") && error.contains("no more of them than layers"), "{error}");
    }
}

/// DT-02: half precision's range ends at 65504, so nothing is computed in it.
#[test]
fn a_float16_checkpoint_computes_in_float32() {
    let model = load(&model_dir("grid/softmax-v2-greedy-normalised"), DtypeChoice::Auto, 64, None);
    assert!(stored(&model).iter().any(|(name, _)| name == "float16"), "{:?}", stored(&model));
    assert_eq!(model.kind(), Kind::Float);
}

#[test]
fn a_quantised_checkpoint_computes_in_what_its_plain_tensors_are_in() {
    for name in ["fp8-v3", "int4-kimi-k2.5", "nvfp4-modelopt", "nvfp4-kimi-k2.5"] {
        let model = load(&model_dir(&format!("quantised/{name}")), DtypeChoice::Auto, 64, None);
        assert_eq!(model.kind(), Kind::BFloat16, "{name}");
    }
}
