//! Checkpoints that are not whole, or do not fit their config, are refused before anything is served.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::path::Path;

use common::{Golden, float32, load, model_dir, run};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use tch::Device;
use tempfile::TempDir;
use tether_model::{DtypeChoice, LoadError, LoadOptions, Model, Routes};

/// A copy of a model's checkpoint, to be damaged.
fn copy_of(name: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(model_dir(name)).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() != "golden.safetensors" {
            fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
    }
    dir
}

fn refusal(dir: &Path) -> LoadError {
    let options = LoadOptions { devices: vec![Device::Cpu], dtype: DtypeChoice::Auto, tile_tokens: 64 };
    Model::load(dir, &options).expect_err("the checkpoint is not whole")
}

/// Changes `config.json`.
fn configure(dir: &Path, key: &str, value: Value) {
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config[key] = value;
    fs::write(path, config.to_string()).unwrap();
}

/// Writes `model.safetensors` anew without some of its tensors.
fn keep(dir: &Path, wanted: impl Fn(&str) -> bool) {
    let path = dir.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let kept = tensors.tensors().into_iter().filter(|(name, _)| wanted(name));
    fs::write(path, safetensors::serialize(kept, None).unwrap()).unwrap();
}

#[test]
fn shards_that_the_index_names_and_nobody_finds_are_all_listed() {
    let dir = copy_of("tiny-v3");
    for shard in ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"] {
        fs::remove_file(dir.path().join(shard)).unwrap();
    }
    let error = refusal(dir.path());
    let LoadError::MissingShards { names, .. } = &error else { panic!("{error}") };
    assert_eq!(names, &["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"]);
    assert!(error.to_string().contains("model-00003-of-00003.safetensors"), "{error}");
}

#[test]
fn a_shard_cut_short_is_refused_by_name() {
    let dir = copy_of("tiny-v3");
    let path = dir.path().join("model-00002-of-00003.safetensors");
    let whole = fs::read(&path).unwrap();
    for length in [0, 4, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..length]).unwrap();
        let error = refusal(dir.path());
        assert!(error.to_string().contains("model-00002-of-00003.safetensors"), "{length}: {error}");
    }
}

#[test]
fn missing_tensors_are_all_named_at_once() {
    let dir = copy_of("tiny-v2");
    let gone = ["model.layers.3.mlp.experts.5.up_proj.weight", "model.norm.weight", "lm_head.weight"];
    keep(dir.path(), |name| !gone.contains(&name));
    let error = refusal(dir.path()).to_string();
    assert!(error.starts_with("3 tensor(s)"), "{error}");
    gone.iter().for_each(|name| assert!(error.contains(&format!("`{name}` is missing")), "{error}"));
}

#[test]
fn a_tensor_that_the_index_puts_into_the_wrong_shard_is_named() {
    let dir = copy_of("tiny-v3");
    let path = dir.path().join("model.safetensors.index.json");
    let mut index: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    index["weight_map"]["model.layers.0.extra.weight"] = json!("model-00001-of-00003.safetensors");
    fs::write(&path, index.to_string()).unwrap();
    let error = refusal(dir.path()).to_string();
    assert!(error.contains("`model.layers.0.extra.weight` is not in model-00001-of-00003"), "{error}");
}

#[test]
fn a_shard_outside_the_directory_is_refused() {
    let dir = copy_of("tiny-v2");
    let single = dir.path().join("model.safetensors");
    let elsewhere = tempfile::tempdir().unwrap();
    fs::rename(&single, elsewhere.path().join("w.safetensors")).unwrap();
    let outside = elsewhere.path().join("w.safetensors");
    let index = json!({"weight_map": {"lm_head.weight": outside}});
    fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    assert!(matches!(refusal(dir.path()), LoadError::MissingShards { .. }));
}

#[test]
fn tensors_of_another_shape_are_named_with_both_shapes() {
    let dir = copy_of("tiny-v2");
    configure(dir.path(), "intermediate_size", json!(193));
    let error = refusal(dir.path()).to_string();
    assert!(
        error.contains("`model.layers.0.mlp.gate_proj.weight` is [192, 128], the config asks for [193, 128]"),
        "{error}"
    );
}

#[test]
fn a_directory_without_weights_and_one_without_config_are_named() {
    let dir = copy_of("tiny-v2");
    fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    assert!(matches!(refusal(dir.path()), LoadError::NoWeights { .. }));
    fs::remove_file(dir.path().join("config.json")).unwrap();
    assert!(refusal(dir.path()).to_string().contains("config.json"));
}

#[test]
fn no_rows_at_a_time_is_no_option() {
    let options = LoadOptions { devices: vec![Device::Cpu], dtype: DtypeChoice::Auto, tile_tokens: 0 };
    let error = Model::load(&model_dir("tiny-v2"), &options).unwrap_err();
    assert!(error.to_string().contains("tile_tokens"), "{error}");
}

#[test]
fn auto_takes_what_the_checkpoint_is_stored_in() {
    use tch::Kind;
    assert_eq!(load(&model_dir("tiny-v2"), DtypeChoice::Auto, 64, None).kind(), Kind::BFloat16);
    assert_eq!(load(&model_dir("tiny-v2-group"), DtypeChoice::Auto, 64, None).kind(), Kind::Float);
    let silent = copy_of("tiny-v2");
    configure(silent.path(), "torch_dtype", Value::Null);
    let model = load(silent.path(), DtypeChoice::Auto, 64, None);
    assert_eq!(model.kind(), Kind::BFloat16);
    assert!(model.compute_note().contains("bfloat16"), "{}", model.compute_note());
}

/// A checkpoint whose depth the config halves: its upper layers are skipped like those for multi-token prediction, and
/// the lower ones give what they gave.
#[test]
fn layers_behind_the_last_are_skipped_whatever_their_number() {
    let (dir, golden) = (copy_of("tiny-v2"), Golden::read("tiny-v2"));
    configure(dir.path(), "num_hidden_layers", json!(4));
    let prompts = golden.prompts();
    let (half, _) = run(&load(dir.path(), DtypeChoice::Float32, 4096, None), &prompts, Routes::Free);
    let (whole, _) = run(&float32("tiny-v2", 4096), &prompts, Routes::Free);
    assert_eq!(half.narrow(1, 0, 5), whole.narrow(1, 0, 5));
}

/// The same weights in one file and in several, with the head stored and with the embedding as the head.
#[test]
fn single_and_sharded_checkpoints_are_the_same_model() {
    let golden = Golden::read("tiny-v3");
    let (dir, sharded) = (copy_of("tiny-v3"), float32("tiny-v3", 4096));
    let files: Vec<Vec<u8>> = (1..=3)
        .map(|shard| fs::read(dir.path().join(format!("model-0000{shard}-of-00003.safetensors"))).unwrap())
        .collect();
    let parsed: Vec<SafeTensors<'_>> =
        files.iter().map(|file| SafeTensors::deserialize(file).unwrap()).collect();
    let all = parsed.iter().flat_map(SafeTensors::tensors);
    fs::write(dir.path().join("model.safetensors"), safetensors::serialize(all, None).unwrap()).unwrap();
    fs::remove_file(dir.path().join("model.safetensors.index.json")).unwrap();
    let single = load(dir.path(), DtypeChoice::Float32, 4096, None);
    let prompts = golden.prompts();
    assert_eq!(run(&single, &prompts, Routes::Free), run(&sharded, &prompts, Routes::Free));
}

/// transformers 4 and 5 spell YaRN differently.
#[test]
fn both_spellings_of_yarn_are_the_same_model() {
    let (dir, golden) = (copy_of("tiny-v2-group"), Golden::read("tiny-v2-group"));
    configure(dir.path(), "rope_scaling", Value::Null);
    configure(dir.path(), "rope_theta", Value::Null);
    let parameters = json!({
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 64
    });
    configure(dir.path(), "rope_parameters", parameters);
    let prompts = golden.prompts();
    let new = run(&load(dir.path(), DtypeChoice::Float32, 4096, None), &prompts, Routes::Free);
    assert_eq!(new, run(&float32("tiny-v2-group", 4096), &prompts, Routes::Free));
}
