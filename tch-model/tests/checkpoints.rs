//! Checkpoints that are not whole, or do not fit their config, are refused before anything is served.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use common::{Golden, float32, load, model_dir, run};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;
use tether_model::{Config, DtypeChoice, LoadError, LoadOptions, Model, Routes};

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

/// One tensor of a file, to be written anew.
struct Stored {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

/// Writes a checkpoint's files as one, changed.
fn rewrite(dir: &Path, change: impl FnOnce(&mut BTreeMap<String, Stored>)) {
    let mut tensors = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if !name.starts_with("model") {
            continue;
        }
        if name.ends_with(".safetensors") {
            let bytes = fs::read(&path).unwrap();
            for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
                let (dtype, shape) = (view.dtype(), view.shape().to_vec());
                tensors.insert(name, Stored { dtype, shape, data: view.data().to_vec() });
            }
        }
        fs::remove_file(path).unwrap();
    }
    change(&mut tensors);
    let views = tensors.iter().map(|(name, Stored { dtype, shape, data })| {
        (name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
}

/// What a copy of a packed checkpoint is refused with, once its tensors were changed.
#[track_caller]
fn refused(name: &str, change: impl FnOnce(&mut BTreeMap<String, Stored>), words: &[&str]) {
    let dir = copy_of(&format!("quantised/{name}"));
    rewrite(dir.path(), change);
    let error = refusal(dir.path()).to_string();
    words.iter().for_each(|word| assert!(error.contains(word), "`{word}` is not in: {error}"));
}

const FP8: &str = "model.layers.1.mlp.experts.3.up_proj";
const INT4: &str = "language_model.model.layers.1.mlp.experts.3.up_proj";

#[test]
fn packed_matrices_without_all_of_their_parts_are_refused_by_name() {
    for part in ["weight", "weight_scale_inv"] {
        let name = format!("{FP8}.{part}");
        refused("fp8-v3", |tensors| drop(tensors.remove(&name)), &[&format!("`{FP8}")]);
    }
    for part in ["weight_packed", "weight_scale", "weight_shape"] {
        let name = format!("{INT4}.{part}");
        refused("int4-kimi-k2.5", |tensors| drop(tensors.remove(&name)), &[&format!("`{INT4}")]);
    }
    for part in ["weight", "weight_scale", "weight_scale_2"] {
        let name = format!("{FP8}.{part}");
        refused("nvfp4-modelopt", |tensors| drop(tensors.remove(&name)), &[&format!("`{FP8}")]);
    }
}

#[test]
fn packed_matrices_whose_parts_do_not_fit_are_refused_by_name() {
    let halved = |tensors: &mut BTreeMap<String, Stored>, name: &str| {
        let tensor = tensors.get_mut(name).unwrap();
        tensor.shape[0] /= 2;
        let half = tensor.data.len() / 2;
        tensor.data.truncate(half);
    };
    let factors = format!("{FP8}.weight_scale_inv");
    refused("fp8-v3", |tensors| halved(tensors, &factors), &[&factors, "[1, 2]", "[2, 2]"]);
    let words = format!("{INT4}.weight_packed");
    refused("int4-kimi-k2.5", |tensors| halved(tensors, &words), &[&words, "[80, 20]", "[160, 20]"]);
    let shape = format!("{INT4}.weight_shape");
    let turned = |tensors: &mut BTreeMap<String, Stored>| {
        tensors.get_mut(&shape).unwrap().data = [160i32, 161].map(i32::to_le_bytes).concat();
    };
    refused("int4-kimi-k2.5", turned, &[&shape, "[160, 161]", "[160, 160]"]);
}

#[test]
fn tensors_that_contradict_each_other_or_the_config_are_refused_by_name() {
    let plain = |tensors: &mut BTreeMap<String, Stored>, module: &str| {
        let data = vec![0; 160 * 160 * 2];
        tensors
            .insert(format!("{module}.weight"), Stored { dtype: Dtype::BF16, shape: vec![160, 160], data });
    };
    // Both at once.
    refused("int4-kimi-k2.5", |tensors| plain(tensors, INT4), &[INT4, "both `weight` and `weight_packed`"]);
    // A plain one with a factor, which would be left out.
    refused("fp8-v3", |tensors| plain(tensors, FP8), &[FP8, "plain", "weight_scale_inv"]);
    // A plain one where the config says fp8: was it converted, or were its factors lost?
    let converted = |tensors: &mut BTreeMap<String, Stored>| {
        plain(tensors, FP8);
        tensors.remove(&format!("{FP8}.weight_scale_inv"));
    };
    refused(
        "fp8-v3",
        converted,
        &[FP8, "BF16", "fp8 in blocks of 128x128", "remove that key from config.json"],
    );
    // Formats with zero points or an order of their own.
    let zeros = |tensors: &mut BTreeMap<String, Stored>| {
        let zeros = Stored { dtype: Dtype::I32, shape: vec![1], data: vec![0; 4] };
        tensors.insert(format!("{INT4}.weight_zero_point"), zeros);
    };
    refused("int4-kimi-k2.5", zeros, &["weight_zero_point"]);
}

#[test]
fn a_config_that_says_otherwise_than_the_tensors_is_refused() {
    let fp8 = || copy_of("quantised/fp8-v3");
    let with = |dir: TempDir, value: Value| {
        configure(dir.path(), "quantization_config", value);
        refusal(dir.path()).to_string()
    };
    let error = with(fp8(), Value::Null);
    assert!(error.contains(FP8) && error.contains("stored as fp8, and no `quantization_config`"), "{error}");
    let ignoring = json!({"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["*.3.up_proj"]});
    let error = with(fp8(), ignoring);
    assert!(error.contains(FP8) && error.contains("among those that are not"), "{error}");
    let error = with(fp8(), json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}));
    assert!(error.contains(FP8) && error.contains("says nvfp4 (ModelOpt)"), "{error}");
    // Other blocks need another number of factors.
    let error = with(fp8(), json!({"quant_method": "fp8", "weight_block_size": [64, 128]}));
    assert!(
        error.contains(&format!("`{FP8}.weight_scale_inv` is [2, 2], the config asks for [3, 2]")),
        "{error}"
    );
}

/// ModelOpt's first checkpoints say how they are stored in a file of their own.
#[test]
fn modelopts_own_file_stands_for_the_configs_key() {
    let (dir, golden) = (copy_of("quantised/nvfp4-modelopt"), Golden::read("quantised/nvfp4-modelopt"));
    configure(dir.path(), "quantization_config", Value::Null);
    let own = json!({
        "producer": {"name": "modelopt", "version": "0.23.0"},
        "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": null, "group_size": 16,
                         "exclude_modules": ["lm_head", "model.layers.*.self_attn*"]}
    });
    fs::write(dir.path().join("hf_quant_config.json"), own.to_string()).unwrap();
    let prompts = golden.prompts();
    let found = run(&load(dir.path(), DtypeChoice::Float32, 4096, None), &prompts, Routes::Free);
    let expected = run(&float32("quantised/nvfp4-modelopt", 4096), &prompts, Routes::Free);
    assert_eq!(found, expected);
}

/// LD-08: unknown tensors of the text model are errors, all of them named; others are not in the way.
#[test]
fn tensors_that_the_config_does_not_describe_are_named() {
    let dir = copy_of("tiny-v2");
    let extra = |name: &str, tensors: &mut BTreeMap<String, Stored>| {
        tensors.insert(name.to_owned(), Stored { dtype: Dtype::F32, shape: vec![1], data: vec![0; 4] });
    };
    let unknown = ["model.layers.3.self_attn.q_norm.weight", "model.layers.0.self_attn.o_proj.bias"];
    rewrite(dir.path(), |tensors| {
        unknown.iter().for_each(|name| extra(name, tensors));
        extra("draft_head.weight", tensors);
        extra("model.layers.0.self_attn.rotary_emb.inv_freq", tensors);
        extra("model.layers.8.eh_proj.weight", tensors);
    });
    let error = refusal(dir.path()).to_string();
    assert!(error.starts_with("2 tensor(s)"), "{error}");
    unknown
        .iter()
        .for_each(|name| assert!(error.contains(&format!("`{name}` is not in the model")), "{error}"));
    rewrite(dir.path(), |tensors| unknown.iter().for_each(|&name| drop(tensors.remove(name))));
    let prompt: &[i64] = &[5, 6, 7];
    let found = run(&load(dir.path(), DtypeChoice::Auto, 64, None), &[prompt], Routes::Free);
    assert_eq!(
        found,
        run(&load(&model_dir("tiny-v2"), DtypeChoice::Auto, 64, None), &[prompt], Routes::Free)
    );
}

/// Every prefix that checkpoints use, and the same model under it.
#[test]
fn the_same_weights_under_any_prefix_are_the_same_model() {
    let expected = {
        let prompt: &[i64] = &[9, 8, 7, 6];
        run(&float32("tiny-v2", 64), &[prompt], Routes::Free)
    };
    for (body, head) in [
        ("language_model.model.", "language_model.lm_head."),
        ("language_model.", "lm_head."),
        ("", "lm_head."),
    ] {
        let dir = copy_of("tiny-v2");
        rewrite(dir.path(), |tensors| {
            let renamed =
                std::mem::take(tensors).into_iter().map(|(name, tensor)| match name.strip_prefix("model.") {
                    Some(rest) => (format!("{body}{rest}"), tensor),
                    None => (name.replace("lm_head.", head), tensor),
                });
            tensors.extend(renamed);
        });
        let prompt: &[i64] = &[9, 8, 7, 6];
        let model = load(dir.path(), DtypeChoice::Float32, 64, None);
        assert_eq!(run(&model, &[prompt], Routes::Free), expected, "{body}");
    }
    let dir = copy_of("tiny-v2");
    rewrite(dir.path(), |tensors| {
        let twice = tensors.get("model.embed_tokens.weight").unwrap();
        let twice = Stored { dtype: twice.dtype, shape: twice.shape.clone(), data: twice.data.clone() };
        tensors.insert("language_model.embed_tokens.weight".to_owned(), twice);
    });
    assert!(refusal(dir.path()).to_string().contains("which model is meant"));
}

/// LD-04: a head stored beside the embedding it is tied to is not used.
#[test]
fn a_tied_head_is_the_embedding_whether_or_not_a_head_is_stored() {
    let (dir, prompt) = (copy_of("grid/shape-v2-tied"), [3i64, 4, 5]);
    let prompts: &[&[i64]] = &[&prompt];
    let expected = run(&float32("grid/shape-v2-tied", 64), prompts, Routes::Free);
    rewrite(dir.path(), |tensors| {
        let embedding = tensors.get("model.embed_tokens.weight").unwrap();
        let (dtype, shape, data) = (embedding.dtype, embedding.shape.clone(), vec![0; embedding.data.len()]);
        tensors.insert("lm_head.weight".to_owned(), Stored { dtype, shape, data });
    });
    assert_eq!(run(&load(dir.path(), DtypeChoice::Float32, 64, None), prompts, Routes::Free), expected);
}

/// Fused experts beside single ones: which are meant?
#[test]
fn fused_experts_of_another_shape_or_beside_single_ones_are_refused() {
    let single = |tensors: &mut BTreeMap<String, Stored>| {
        let name = "model.layers.1.mlp.experts.0.up_proj.weight";
        tensors.insert(name.to_owned(), Stored { dtype: Dtype::F32, shape: vec![1], data: vec![0; 4] });
    };
    refused("fused-v3", single, &["`model.layers.1.mlp.experts.0.up_proj.weight` is not in the model"]);
    let short = |tensors: &mut BTreeMap<String, Stored>| {
        let gates = tensors.get_mut("model.layers.1.mlp.experts.gate_up_proj").unwrap();
        gates.data.truncate(gates.data.len() / 8 * 7);
        gates.shape[0] = 7;
    };
    refused(
        "fused-v3",
        short,
        &["`model.layers.1.mlp.experts.gate_up_proj` is [7, 320, 160]", "[8, 320, 160]"],
    );
    let gone =
        |tensors: &mut BTreeMap<String, Stored>| drop(tensors.remove("model.layers.2.mlp.experts.down_proj"));
    refused("fused-v3", gone, &["`model.layers.2.mlp.experts.down_proj` is missing"]);
}

/// What a config lists may be called as in the wrapper while the tensors are not, and the other way round.
#[test]
fn a_config_may_list_modules_by_their_names_in_the_wrapper() {
    let (dir, prompt) = (copy_of("quantised/nvfp4-modelopt"), [3i64, 4, 5]);
    let prompts: &[&[i64]] = &[&prompt];
    let expected = run(&load(dir.path(), DtypeChoice::Float32, 64, None), prompts, Routes::Free);
    let ignoring = |pattern: &str| {
        let config = json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [pattern]});
        configure(dir.path(), "quantization_config", config);
    };
    ignoring("language_model.model.layers.*.self_attn*");
    assert_eq!(run(&load(dir.path(), DtypeChoice::Float32, 64, None), prompts, Routes::Free), expected);
    ignoring("language_model.model.layers.0.self_attn");
    let error = refusal(dir.path()).to_string();
    assert!(error.contains("`model.layers.1.self_attn.o_proj.weight` is BF16"), "{error}");
    assert!(!error.contains("layers.0.self_attn"), "{error}");
}

/// A byte of a header changed here and there: what loads has all its tensors, and what does not is told by name.
#[test]
fn a_damaged_header_is_refused_or_harmless_and_never_a_panic() {
    for name in ["grid/shape-v2-tied", "quantised/fp8-v3", "quantised/nvfp4-kimi-k2.5"] {
        let dir = copy_of(name);
        rewrite(dir.path(), |_| {});
        let path = dir.path().join("model.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut refused = 0;
        for round in 0..60usize {
            // Spread over the header by a step that shares no factor with its length.
            let at = 8 + round * 7919 % header;
            let right = bytes[at];
            bytes[at] = [b'0', b'9', b'"', b'A', 0xff, right ^ 1][round % 6];
            // A new file each time: what is mapped must not change.
            fs::remove_file(&path).unwrap();
            fs::write(&path, &bytes).unwrap();
            let options =
                LoadOptions { devices: vec![Device::Cpu], dtype: DtypeChoice::Auto, tile_tokens: 64 };
            if let Err(error) = Model::load(dir.path(), &options) {
                let named = matches!(error, LoadError::Shard { .. } | LoadError::Tensors { .. });
                assert!(named, "{name}, byte {at}: {error}");
                refused += 1;
            }
            bytes[at] = right;
        }
        assert!(refused > 30, "{name}: only {refused} of 60");
    }
}

/// The values of a tensor that was stored as float32 or bfloat16.
fn floats(stored: &Stored) -> Vec<f32> {
    let wide = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
    match stored.dtype {
        Dtype::F32 => stored.data.chunks_exact(4).map(wide).collect(),
        // The upper half of a float32.
        Dtype::BF16 => stored.data.chunks_exact(2).map(|bytes| wide(&[0, 0, bytes[0], bytes[1]])).collect(),
        other => panic!("{other:?}"),
    }
}

fn stored(shape: Vec<usize>, values: &[f32]) -> Stored {
    let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    assert_eq!(data.len(), 4 * shape.iter().product::<usize>());
    Stored { dtype: Dtype::F32, shape, data }
}

fn change_config(dir: &Path, changes: &Value) {
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    fs::write(path, config.to_string()).unwrap();
}

/// NM-22: one token chooses a few of 64 experts, and nothing of what the others would have computed, or of memory that held
/// something else before, is in its states.
#[test]
fn a_model_with_far_more_experts_than_tokens_has_no_stray_values() {
    let dir = copy_of("tiny-v3");
    let config = Config::read(dir.path()).unwrap();
    let (before, experts) = (config.n_routed_experts as usize, 64);
    assert!(before < experts);
    change_config(dir.path(), &json!({"n_routed_experts": experts}));
    let hidden = config.hidden_size as usize;
    rewrite(dir.path(), |tensors| {
        for layer in (0..config.num_hidden_layers).filter(|layer| config.is_moe(*layer)) {
            let mlp = format!("model.layers.{layer}.mlp");
            // More gates of the same kind, each other than the others, and the experts over again.
            let mut gate = floats(&tensors[&format!("{mlp}.gate.weight")]);
            let mut bias = floats(&tensors[&format!("{mlp}.gate.e_score_correction_bias")]);
            for expert in before..experts {
                let turned: Vec<f32> =
                    (0..hidden).map(|at| -gate[(expert - before) * hidden + at] * 0.9).collect();
                gate.extend(turned);
                bias.push(bias[expert - before]);
                for part in ["gate_proj", "up_proj", "down_proj"] {
                    let of = |expert: usize| format!("{mlp}.experts.{expert}.{part}.weight");
                    let Stored { dtype, shape, data } = &tensors[&of(expert % before)];
                    let copy = Stored { dtype: *dtype, shape: shape.clone(), data: data.clone() };
                    tensors.insert(of(expert), copy);
                }
            }
            tensors.insert(format!("{mlp}.gate.weight"), stored(vec![experts, hidden], &gate));
            tensors.insert(format!("{mlp}.gate.e_score_correction_bias"), stored(vec![experts], &bias));
        }
    });
    let model = load(dir.path(), DtypeChoice::Float32, 4096, None);
    let poison = || {
        // Freed at once: whatever asks for memory of these sizes next finds it full of them.
        let sizes = (0..24).flat_map(|power| [1i64 << power, 3 << power]).filter(|size| *size < 4 << 20);
        let held: Vec<Tensor> =
            sizes.map(|size| Tensor::full([size], f64::NAN, (Kind::Float, Device::Cpu))).collect();
        drop(held);
    };
    let mut together: Vec<Tensor> = Vec::new();
    for token in 2..34 {
        poison();
        let (planes, logits) = run(&model, &[&[token]], Routes::Free);
        assert_eq!(planes.isfinite().all().int64_value(&[]), 1, "token {token}");
        assert_eq!(logits.isfinite().all().int64_value(&[]), 1, "token {token}");
        together.push(planes);
    }
    // And they are the states that each has among others.
    let tokens: Vec<[i64; 1]> = (2..34).map(|token| [token]).collect();
    let prompts: Vec<&[i64]> = tokens.iter().map(<[i64; 1]>::as_slice).collect();
    let (batch, _) = run(&model, &prompts, Routes::Free);
    let apart = common::worst_element(&Tensor::cat(&together, 0), &batch);
    assert!(apart < 1e-4, "{apart:.1e}");
}

/// DT-02: states above 65504, which float16 has no number for, come whole out of a float16 checkpoint.
#[test]
fn states_beyond_float16_come_whole_out_of_a_float16_checkpoint() {
    const CHANNEL: usize = 5;
    let dir = copy_of("tiny-v2");
    rewrite(dir.path(), |tensors| {
        for (name, tensor) in tensors.iter_mut() {
            let mut values = floats(tensor);
            // What the first layers write into one channel is large, though none of their weights is beyond float16.
            if name.ends_with(".down_proj.weight") && !name.contains("experts.") {
                let inner = tensor.shape[1];
                values[CHANNEL * inner..][..inner]
                    .iter_mut()
                    .for_each(|value| *value = (*value * 3e5).clamp(-6e4, 6e4));
            }
            let feeds = [".gate_proj.weight", ".up_proj.weight"].iter().any(|end| name.ends_with(end));
            if feeds && !name.contains("experts.") {
                values.iter_mut().for_each(|value| *value *= 30.0);
            }
            let mut data = vec![0u8; 2 * values.len()];
            let half = Tensor::from_slice(&values).to_kind(Kind::Half);
            assert_eq!(half.isfinite().all().int64_value(&[]), 1, "{name}");
            half.view_dtype(Kind::Uint8).copy_data_u8(&mut data, 2 * values.len());
            *tensor = Stored { dtype: Dtype::F16, shape: tensor.shape.clone(), data };
        }
    });
    change_config(dir.path(), &json!({"torch_dtype": "float16", "dtype": "float16"}));
    let model = load(dir.path(), DtypeChoice::Auto, 64, None);
    assert_eq!(model.kind(), Kind::Float);
    let (planes, _) = run(&model, &[&[5, 6, 7, 8]], Routes::Free);
    assert_eq!(planes.isfinite().all().int64_value(&[]), 1);
    let largest = planes.select(2, CHANNEL as i64).abs().max().double_value(&[]);
    assert!(largest > 65_504.0, "{largest} would fit into float16");
    let narrowed = planes.to_kind(Kind::Half);
    assert_eq!(narrowed.isfinite().all().int64_value(&[]), 0, "so a dump in float16 would not do");
}
