use serde_json::json;

use super::*;

fn read(config: &Value) -> Result<Quantisation, LoadError> {
    Quantisation::read(config.as_object().unwrap())
}

#[track_caller]
fn refused(config: &Value, words: &[&str]) {
    let error = read(config).unwrap_err().to_string();
    words.iter().for_each(|word| assert!(error.contains(word), "`{word}` is not in: {error}"));
}

/// V3's own, and V3.1's with one key more.
fn fp8() -> Value {
    json!({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]})
}

/// As Kimi-K2-Thinking ships it.
fn int4() -> Value {
    json!({
        "config_groups": {"group_0": {
            "input_activations": null, "output_activations": null, "targets": ["Linear"],
            "weights": {"actorder": null, "block_structure": null, "dynamic": false, "group_size": 32, "num_bits": 4,
                        "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": true, "type": "int"}
        }},
        "format": "pack-quantized", "global_compression_ratio": null, "kv_cache_scheme": null,
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
        "quant_method": "compressed-tensors", "quantization_status": "compressed"
    })
}

fn with(mut config: Value, path: &str, value: Value) -> Value {
    let (parent, key) = path.rsplit_once('/').unwrap();
    config.pointer_mut(parent).unwrap()[key] = value;
    config
}

const WEIGHTS: &str = "/config_groups/group_0/weights";

#[test]
fn the_published_forms_are_read() {
    assert_eq!(read(&fp8()).unwrap().scheme, Scheme::BlockFp8 { rows: 128, columns: 128 });
    assert_eq!(read(&with(fp8(), "/scale_fmt", json!("ue8m0"))).unwrap(), read(&fp8()).unwrap());
    assert_eq!(read(&int4()).unwrap().scheme, Scheme::Int4 { group: 32 });
    let mut nvfp4 = with(int4(), "/format", json!("nvfp4-pack-quantized"));
    for (key, value) in
        [("type", json!("float")), ("strategy", json!("tensor_group")), ("group_size", json!(16))]
    {
        nvfp4 = with(nvfp4, &format!("{WEIGHTS}/{key}"), value);
    }
    assert_eq!(read(&nvfp4).unwrap().scheme, Scheme::Nvfp4CompressedTensors);
    let modelopt = json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"],
                          "config_groups": {"group_0": {"targets": ["Linear"]}}, "producer": {"name": "modelopt"},
                          "kv_cache_scheme": {"dynamic": false, "num_bits": 8, "type": "float"}});
    assert_eq!(read(&modelopt).unwrap().scheme, Scheme::Nvfp4ModelOpt);
}

#[test]
fn a_regular_expression_fits_from_the_start_and_a_name_fits_whole_parts() {
    let modules = read(&int4()).unwrap().modules();
    let includes = |name: &str| modules.includes(&[name]);
    assert!(includes("model.layers.1.mlp.experts.7.gate_proj"));
    assert!(
        !includes("model.layers.0.mlp.gate_proj") && !includes("model.layers.1.mlp.shared_experts.up_proj")
    );
    assert!(!includes("language_model.model.layers.1.self_attn.kv_b_proj"));
    // Named as one that stays plain, also inside of a wrapper; a longer word is another one.
    assert!(!includes("lm_head") && !includes("language_model.lm_head") && includes("lm_header"));
    // The expression must begin where the name does.
    let anchored = with(int4(), "/ignore", json!(["re:self_attn"]));
    assert!(read(&anchored).unwrap().modules().includes(&["model.layers.0.self_attn.o_proj"]));
}

#[test]
fn wildcards_and_prefixes_name_what_stays_plain() {
    let ignoring = |pattern: &str| {
        let config = with(fp8(), "/modules_to_not_convert", json!([pattern]));
        read(&config).unwrap().modules().ignores(&["model.layers.3.self_attn.q_a_proj"])
    };
    for pattern in [
        "model.layers.*.self_attn*",
        "*self_attn*",
        "model.layers.3",
        "self_attn",
        "q_a_proj",
        "model.layers.?.*",
    ] {
        assert!(ignoring(pattern), "{pattern}");
    }
    for pattern in ["layers.33", "q_a", "self_att", "model.layers.3.mlp*", "odel.layers.3"] {
        assert!(!ignoring(pattern), "{pattern}");
    }
}

#[test]
fn targets_limit_what_is_packed() {
    let config = with(int4(), "/config_groups/group_0/targets", json!(["re:.*experts\\.\\d+\\..*"]));
    let modules = read(&with(config, "/ignore", json!([]))).unwrap().modules();
    assert!(modules.includes(&["model.layers.1.mlp.experts.7.up_proj"]));
    assert!(!modules.includes(&["model.layers.0.mlp.up_proj"]));
}

#[test]
fn what_is_stored_otherwise_is_refused_by_name() {
    refused(&json!({}), &["quantization_config.quant_method", "compressed-tensors"]);
    refused(
        &json!({"quant_method": "gptq"}),
        &["quant_method", "gptq", "fp8, compressed-tensors and modelopt"],
    );
    refused(&json!({"quant_method": "fp8"}), &["weight_block_size"]);
    refused(&with(fp8(), "/weight_block_size", json!([128])), &["weight_block_size", "[128,128]"]);
    refused(&with(fp8(), "/weight_block_size", json!([128, 0])), &["weight_block_size"]);
    refused(&with(fp8(), "/fmt", json!("e5m2")), &["fmt", "e5m2", "e4m3"]);
    refused(&with(fp8(), "/surprise", json!(1)), &["quantization_config.surprise"]);
    refused(&with(fp8(), "/modules_to_not_convert", json!("lm_head")), &["modules_to_not_convert", "list"]);
    refused(
        &with(int4(), "/format", json!("naive-quantized")),
        &["quantization_config.format", "pack-quantized"],
    );
    refused(&with(int4(), "/ignore", json!(["re:("])), &["ignore"]);
    for (key, value) in [
        ("num_bits", json!(8)),
        ("symmetric", json!(false)),
        ("strategy", json!("channel")),
        ("type", json!("float")),
        ("group_size", json!(33)),
        ("group_size", json!(null)),
        ("actorder", json!("group")),
    ] {
        refused(&with(int4(), &format!("{WEIGHTS}/{key}"), value), &["weights", key]);
    }
    refused(&json!({"quant_method": "modelopt", "quant_algo": "FP8"}), &["quant_algo", "FP8", "NVFP4"]);
    refused(
        &json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}),
        &["group_size", "16"],
    );
    let mut two = int4();
    two["config_groups"]["group_1"] = two["config_groups"]["group_0"].clone();
    two["config_groups"]["group_1"]["weights"]["group_size"] = json!(64);
    refused(&two, &["groups of 32 and int4 in groups of 64"]);
}

/// As many as a converted Kimi-K2.5 could list one by one.
#[test]
fn thousands_of_names_are_looked_up_one_by_one() {
    let names: Vec<String> =
        (0..10_000).map(|index| format!("model.layers.{index}.self_attn.o_proj")).collect();
    let modules = read(&with(int4(), "/ignore", json!(names))).unwrap().modules();
    for index in (0..10_000).step_by(7) {
        assert!(!modules.includes(&[&format!("model.layers.{index}.self_attn.o_proj")]));
        assert!(modules.includes(&[&format!("model.layers.{index}.self_attn.q_proj")]));
    }
}
