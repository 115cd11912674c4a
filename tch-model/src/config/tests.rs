use serde_json::{Value, json};

use super::*;

/// V2-Lite's published config, less what no test looks at.
fn v2_lite() -> Value {
    // A string: the macro for JSON would need a deeper recursion limit.
    let text = r#"{
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "attention_bias": false,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "aux_loss_alpha": 0.001,
        "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": false, "num_attention_heads": 16,
        "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "pretraining_tp": 1,
        "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": true,
        "tie_word_embeddings": false, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1", "use_cache": true, "v_head_dim": 128, "vocab_size": 102400
    }"#;
    serde_json::from_str(text).unwrap()
}

fn read(config: &Value) -> Result<Config, LoadError> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), serde_json::to_vec(config).unwrap()).unwrap();
    Config::read(dir.path())
}

#[allow(clippy::needless_pass_by_value, reason = "changes are written where they are used")]
fn with(changes: Value) -> Result<Config, LoadError> {
    let mut config = v2_lite();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    read(&config)
}

fn without(keys: &[&str]) -> Result<Config, LoadError> {
    let mut config = v2_lite();
    keys.iter().for_each(|&key| drop(config.as_object_mut().unwrap().remove(key)));
    read(&config)
}

/// The refusal of a config with `changes` names every one of `words`.
#[track_caller]
fn refused(changes: Value, words: &[&str]) {
    let error = with(changes).unwrap_err().to_string();
    words.iter().for_each(|word| assert!(error.contains(word), "`{word}` is not in: {error}"));
}

#[test]
fn the_published_v2_lite_config_is_read() {
    let config = read(&v2_lite()).unwrap();
    assert_eq!(config.architecture, Architecture::DeepseekV2);
    assert_eq!((config.q_lora_rank, config.topk_method), (None, TopkMethod::Greedy));
    assert_eq!(config.eos_token_id, [100_001]);
    assert!(!config.is_moe(0) && config.is_moe(1) && config.is_moe(26));
    // The two factors as the published model has them.
    let yarn = config.rope.yarn.unwrap();
    assert!((yarn.softmax_factor() - 1.58963).abs() < 1e-5);
    assert!((read(&v2_lite()).unwrap().softmax_scale() - 0.114_721).abs() < 1e-6);
    assert_eq!(yarn.rotation_magnitude(), 1.0);
}

#[test]
fn the_hash_is_that_of_the_files_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = serde_json::to_vec_pretty(&v2_lite()).unwrap();
    bytes.push(b'\n');
    fs::write(dir.path().join("config.json"), &bytes).unwrap();
    assert_eq!(Config::read(dir.path()).unwrap().hash(), hex(&Sha256::digest(&bytes)));
}

#[test]
fn null_and_absent_query_ranks_differ() {
    assert_eq!(with(json!({"q_lora_rank": null})).unwrap().q_lora_rank, None);
    assert_eq!(without(&["q_lora_rank"]).unwrap().q_lora_rank, Some(1536));
    assert_eq!(with(json!({"q_lora_rank": 24})).unwrap().q_lora_rank, Some(24));
}

#[test]
fn end_tokens_are_a_number_a_list_or_absent() {
    assert_eq!(with(json!({"eos_token_id": [1, 163585]})).unwrap().eos_token_id, [1, 163_585]);
    assert!(with(json!({"eos_token_id": null})).unwrap().eos_token_id.is_empty());
    assert!(without(&["eos_token_id"]).unwrap().eos_token_id.is_empty());
}

#[test]
fn each_published_pair_of_method_and_score_is_known_and_others_are_refused() {
    let pair = |method, score| with(json!({"topk_method": method, "scoring_func": score}));
    assert_eq!(pair("greedy", "softmax").unwrap().topk_method, TopkMethod::Greedy);
    assert_eq!(pair("group_limited_greedy", "softmax").unwrap().topk_method, TopkMethod::GroupLimitedGreedy);
    assert_eq!(pair("noaux_tc", "sigmoid").unwrap().topk_method, TopkMethod::NoauxTc);
    refused(json!({"topk_method": "gready"}), &["topk_method", "gready", "group_limited_greedy"]);
    refused(json!({"topk_method": "noaux_tc"}), &["scoring_func", "softmax"]);
    refused(json!({"scoring_func": "sigmoid"}), &["scoring_func", "sigmoid", "greedy"]);
    refused(json!({"scoring_func": "tanh"}), &["scoring_func", "tanh"]);
}

#[test]
fn the_methods_defaults_follow_the_family() {
    let mut config = v2_lite();
    config["architectures"] = json!(["DeepseekV3ForCausalLM"]);
    for key in
        ["topk_method", "scoring_func", "norm_topk_prob", "routed_scaling_factor", "num_experts_per_tok"]
    {
        config.as_object_mut().unwrap().remove(key);
    }
    let config = read(&config).unwrap();
    assert_eq!((config.topk_method, config.norm_topk_prob), (TopkMethod::NoauxTc, true));
    assert_eq!((config.routed_scaling_factor, config.num_experts_per_tok), (2.5, 8));
}

/// Absent keys have the values of transformers' `DeepseekV2Config` and `DeepseekV3Config`.
#[test]
fn absent_keys_have_the_reference_s_defaults() {
    let read_as = |family: &str, changes: Value, absent: &[&str]| {
        let mut config = v2_lite();
        config["architectures"] = json!([family]);
        absent.iter().for_each(|&key| drop(config.as_object_mut().unwrap().remove(key)));
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        read(&config)
    };
    let (v2, v3) = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM");
    let shared = ["n_shared_experts"];
    assert_eq!(read_as(v2, json!({}), &shared).unwrap().n_shared_experts, 2);
    assert_eq!(
        read_as(v3, json!({"topk_method": "noaux_tc", "scoring_func": "sigmoid"}), &shared)
            .unwrap()
            .n_shared_experts,
        1
    );
    for family in [v2, v3] {
        let config =
            read_as(family, json!({"n_shared_experts": null}), &["topk_method", "scoring_func"]).unwrap();
        assert_eq!(config.n_shared_experts, 0, "null is none");
    }
    for (n_group, topk_group) in
        [(json!(16), 4), (json!(8), 4), (json!(4), 4), (json!(2), 2), (json!(1), 1), (json!(null), 1)]
    {
        let config =
            read_as(v3, json!({"n_group": n_group}), &["topk_group", "topk_method", "scoring_func"]).unwrap();
        assert_eq!(config.topk_group, topk_group, "n_group {n_group}");
    }
    let config = read_as(v3, json!({}), &["n_group", "topk_group", "topk_method", "scoring_func"]).unwrap();
    assert_eq!((config.n_group, config.topk_group), (8, 4));
    for key in ["n_group", "topk_group"] {
        let limited = json!({"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3});
        assert_eq!(read_as(v2, limited.clone(), &[]).unwrap().topk_group, 3);
        for value in [None, Some(Value::Null)] {
            let mut changes = limited.clone();
            match value {
                Some(null) => changes[key] = null,
                None => drop(changes.as_object_mut().unwrap().remove(key)),
            }
            let error = read_as(v2, changes, &[key]).unwrap_err().to_string();
            assert!(error.contains(key) && error.contains("group_limited_greedy"), "{error}");
        }
    }
    let kept = read_as(
        v3,
        json!({"topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
        &[
            "kv_lora_rank",
            "q_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "first_k_dense_replace",
            "rms_norm_eps",
        ],
    )
    .unwrap();
    assert_eq!((kept.kv_lora_rank, kept.q_lora_rank, kept.first_k_dense_replace), (512, Some(1536), 3));
    assert_eq!((kept.qk_nope_head_dim, kept.qk_rope_head_dim, kept.v_head_dim), (128, 64, 128));
    assert_eq!(read_as(v2, json!({}), &["first_k_dense_replace"]).unwrap().first_k_dense_replace, 0);
}

#[test]
fn what_is_not_implemented_is_refused_by_name() {
    refused(json!({"hidden_act": "gelu"}), &["hidden_act", "gelu", "silu"]);
    refused(json!({"quantization_config": {"quant_method": "gptq"}}), &["quantization_config", "gptq"]);
    refused(json!({"quantization_config": "fp8"}), &["quantization_config", "an object"]);
    refused(json!({"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}), &["index_"]);
    refused(json!({"architectures": ["DeepseekV32ForCausalLM"]}), &["DeepseekV32ForCausalLM"]);
    refused(json!({"index_topk": 2048}), &["index_topk", "2048", "sparse attention"]);
    refused(json!({"sliding_window": 4096}), &["sliding_window", "remove it"]);
    refused(json!({"mlp_bias": true}), &["mlp_bias"]);
    refused(json!({"rope_interleave": false}), &["rope_interleave"]);
    refused(json!({"num_key_value_heads": 4}), &["num_key_value_heads", "16"]);
    refused(json!({"architectures": ["LlamaForCausalLM"]}), &["architectures", "LlamaForCausalLM"]);
    refused(
        json!({"rope_scaling": {"type": "linear", "factor": 2}}),
        &["rope_scaling.rope_type", "linear", "yarn"],
    );
    refused(json!({"rope_scaling": {"factor": 2}}), &["rope_scaling.factor", "2"]);
}

#[test]
fn keys_that_are_off_change_nothing() {
    assert_eq!(
        with(json!({"quantization_config": null, "sliding_window": null, "mlp_bias": false})).unwrap().rope,
        read(&v2_lite()).unwrap().rope
    );
}

#[test]
fn impossible_sizes_are_refused_by_name() {
    refused(json!({"hidden_size": 0}), &["hidden_size", "0"]);
    refused(json!({"vocab_size": -5}), &["vocab_size", "-5"]);
    refused(json!({"num_hidden_layers": i64::MAX}), &["num_hidden_layers"]);
    refused(json!({"qk_rope_head_dim": 7}), &["qk_rope_head_dim", "even"]);
    refused(json!({"num_experts_per_tok": 65}), &["num_experts_per_tok", "64"]);
    refused(json!({"topk_method": "group_limited_greedy", "n_group": 7}), &["n_group", "64"]);
    refused(json!({"topk_method": "group_limited_greedy", "n_group": 32, "topk_group": 2}), &["topk_group"]);
    let error = without(&["hidden_size"]).unwrap_err().to_string();
    assert!(error.contains("`hidden_size` is missing"), "{error}");
}

#[test]
fn both_spellings_of_the_rotary_embedding_are_read_and_must_agree() {
    let old = read(&v2_lite()).unwrap();
    let mut parameters = v2_lite()["rope_scaling"].clone();
    parameters.as_object_mut().unwrap().remove("type");
    parameters["rope_type"] = json!("yarn");
    parameters["rope_theta"] = json!(10000.0);
    let mut config = v2_lite();
    config["rope_parameters"] = parameters.clone();
    assert_eq!(read(&config).unwrap().rope, old.rope);
    config["rope_parameters"]["factor"] = json!(4);
    assert!(read(&config).unwrap_err().to_string().contains("rope_parameters"));
    config.as_object_mut().unwrap().remove("rope_scaling");
    assert_eq!(read(&config).unwrap().rope.yarn.unwrap().factor, 4.0);
    config["rope_parameters"]["rope_theta"] = json!(50000.0);
    assert!(read(&config).unwrap_err().to_string().contains("rope_theta"));
}

#[test]
fn without_scaling_the_rotary_embedding_is_plain() {
    assert_eq!(with(json!({"rope_scaling": null})).unwrap().rope, RopeConfig { theta: 10_000.0, yarn: None });
    let plain =
        json!({"rope_scaling": null, "rope_parameters": {"rope_type": "default", "rope_theta": 10000}});
    assert_eq!(with(plain).unwrap().rope.yarn, None);
}

/// The four cases of the two magnitudes, by the authors' code: `m(mscale) / m(mscale_all_dim)` on cosine and sine, with
/// defaults 1 and 0, and `m(mscale_all_dim)²` on the softmax scale.
#[test]
fn magnitudes_follow_the_authors_in_all_four_cases() {
    let m = |weight: f64| 0.1 * weight * 16f64.ln() + 1.0;
    let yarn = |extra: Value| {
        let mut scaling = json!({"type": "yarn", "factor": 16, "original_max_position_embeddings": 64});
        extra.as_object().unwrap().iter().for_each(|(key, value)| scaling[key] = value.clone());
        with(json!({"rope_scaling": scaling})).unwrap().rope.yarn.unwrap()
    };
    let both = yarn(json!({"mscale": 1.0, "mscale_all_dim": 1.0}));
    assert_eq!((both.rotation_magnitude(), both.softmax_factor()), (1.0, m(1.0).powi(2)));
    let neither = yarn(json!({}));
    assert_eq!((neither.rotation_magnitude(), neither.softmax_factor()), (m(1.0), 1.0));
    let first = yarn(json!({"mscale": 0.5}));
    assert_eq!((first.rotation_magnitude(), first.softmax_factor()), (m(0.5), 1.0));
    let second = yarn(json!({"mscale_all_dim": 0.5}));
    assert_eq!((second.rotation_magnitude(), second.softmax_factor()), (m(1.0) / m(0.5), m(0.5).powi(2)));
    let stated = yarn(json!({"attention_factor": 1.25, "mscale_all_dim": 1.0}));
    assert_eq!((stated.rotation_magnitude(), stated.softmax_factor()), (1.25, m(1.0).powi(2)));
}

#[test]
fn a_damaged_or_missing_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    assert!(Config::read(dir.path()).unwrap_err().to_string().contains("config.json"));
    fs::write(dir.path().join("config.json"), "{").unwrap();
    assert!(matches!(Config::read(dir.path()), Err(LoadError::Json { .. })));
}

/// Kimi-K2.5's published config, less what no test looks at.
fn kimi() -> Value {
    let text = r#"{
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "bfloat16",
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"}, "bos_token_id": 163584,
        "eos_token_id": 163586, "ignore_index": -100, "media_placeholder_token_id": 163605, "pad_token_id": 163839,
        "tie_word_embeddings": false, "use_unified_vision_chunk": true, "video_placeholder": "<|video|>",
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
        "text_config": {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "add_cross_attention": false,
            "attention_bias": false, "aux_loss_alpha": 0.001, "bad_words_ids": null, "diversity_penalty": 0.0,
            "early_stopping": false, "ep_size": 1, "eos_token_id": 163585, "first_k_dense_replace": 1,
            "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
            "length_penalty": 1.0, "max_length": 20, "max_position_embeddings": 262144, "min_length": 0,
            "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384,
            "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 64, "num_beams": 1,
            "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64,
            "num_nextn_predict_layers": 0, "num_return_sequences": 1, "pruned_heads": {}, "q_lora_rank": 1536,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "repetition_penalty": 1.0, "rms_norm_eps": 1e-05,
            "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0,
                             "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"},
            "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": true,
            "temperature": 1.0, "top_k": 50, "top_p": 1.0, "topk_group": 1, "topk_method": "noaux_tc",
            "typical_p": 1.0, "use_cache": true, "v_head_dim": 128, "vocab_size": 163840
        }
    }"#;
    serde_json::from_str(text).unwrap()
}

/// LD-11.
#[test]
fn a_wrapped_config_is_that_of_the_text_model_inside() {
    let config = read(&kimi()).unwrap();
    assert_eq!((config.architecture, config.num_hidden_layers), (Architecture::DeepseekV3, 61));
    // What only the wrapper says holds, what the text model says itself goes first.
    assert_eq!((config.torch_dtype.as_deref(), config.bos_token_id), (Some("bfloat16"), Some(163_584)));
    assert_eq!(config.eos_token_id, [163_585]);
    assert_eq!((config.rope.theta, config.rms_norm_eps), (50_000.0, 1e-5));
    let yarn = config.rope.yarn.clone().unwrap();
    assert_eq!((yarn.factor, yarn.original_max_position_embeddings), (64.0, 4096.0));
    // The published softmax scale, of a head of 192.
    assert!((config.softmax_scale() - 0.144_680).abs() < 1e-6);
    let mut flat = kimi()["text_config"].take();
    for key in ["bos_token_id", "dtype"] {
        flat[key] = kimi()[key].clone();
    }
    let flat = read(&flat).unwrap();
    assert_eq!(Config { hash: String::new(), ..config }, Config { hash: String::new(), ..flat });
}

#[test]
fn a_wrapper_that_is_none_or_contradicts_its_text_model_is_refused_by_name() {
    let wrapped = |changes: &dyn Fn(&mut Value)| {
        let mut config = kimi();
        changes(&mut config);
        read(&config).unwrap_err().to_string()
    };
    let error = wrapped(&|config| drop(config.as_object_mut().unwrap().remove("text_config")));
    assert!(error.contains("`text_config` is missing"), "{error}");
    let error = wrapped(&|config| config["architectures"] = json!(["LlavaForConditionalGeneration"]));
    assert!(error.contains("Llava") && error.contains("KimiK25ForConditionalGeneration"), "{error}");
    let error = wrapped(&|config| config["text_config"]["tie_word_embeddings"] = json!(true));
    assert!(error.contains("`tie_word_embeddings`"), "{error}");
    let error = wrapped(&|config| {
        let fp8 = |columns: i64| json!({"quant_method": "fp8", "weight_block_size": [128, columns]});
        config["quantization_config"] = fp8(128);
        config["text_config"]["quantization_config"] = fp8(64);
    });
    assert!(error.contains("the same as `text_config.quantization_config`"), "{error}");
    let error = wrapped(&|config| config["num_hidden_layers"] = json!(60));
    assert!(error.contains("`num_hidden_layers`") && error.contains("beside `text_config`"), "{error}");
}

#[test]
fn null_groups_are_one_group_and_absent_ones_the_familys() {
    let mut config = kimi()["text_config"].take();
    config["n_group"] = Value::Null;
    config["topk_group"] = Value::Null;
    let nulls = read(&config).unwrap();
    assert_eq!((nulls.n_group, nulls.topk_group), (1, 1));
    for key in ["n_group", "topk_group"] {
        config.as_object_mut().unwrap().remove(key);
    }
    let absent = read(&config).unwrap();
    assert_eq!((absent.n_group, absent.topk_group), (8, 4));
}

/// As transformers 5.23 writes a `DeepseekV3Config`: no `topk_method`, YaRN under `rope_parameters`.
#[test]
fn the_config_of_transformers_5_is_read() {
    let config: Value = serde_json::from_str(
        r#"{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 0,
        "dtype": "float32", "eos_token_id": 1, "first_k_dense_replace": 1, "head_dim": 8, "hidden_act": "silu",
        "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 96, "kv_lora_rank": 16,
        "max_position_embeddings": 4096, "model_type": "deepseek_v3", "moe_intermediate_size": 32, "n_group": 2,
        "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 2,
        "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_key_value_heads": 2, "num_nextn_predict_layers": 1,
        "output_router_logits": false, "pad_token_id": null, "pretraining_tp": 1, "q_lora_rank": 24, "qk_head_dim": 24,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "rms_norm_eps": 1e-06, "rope_interleave": true,
        "rope_parameters": {"factor": 4, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64,
        "rope_theta": 50000, "rope_type": "yarn", "type": "yarn"}, "routed_scaling_factor": 2.5,
        "tie_word_embeddings": false, "topk_group": 1, "transformers_version": "5.23.0", "use_cache": true,
        "v_head_dim": 16, "vocab_size": 64}"#,
    )
    .unwrap();
    let config = read(&config).unwrap();
    assert_eq!((config.topk_method, config.n_group, config.topk_group), (TopkMethod::NoauxTc, 2, 1));
    assert_eq!((config.rope.theta, config.rope.yarn.unwrap().beta_fast), (50_000.0, 32.0));
    assert_eq!((config.torch_dtype.as_deref(), config.quantisation), (Some("float32"), None));
}

/// Any value at any key, at any depth, is read or refused; and what is refused is told in one sentence.
#[test]
fn no_value_of_any_key_is_a_panic() {
    let fp8 = json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "modules_to_not_convert": ["x"]});
    let mut wrapped = kimi();
    wrapped["text_config"]["quantization_config"] = fp8.clone();
    let mut plain = v2_lite();
    plain["quantization_config"] = fp8;
    let values = [
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(1),
        json!(7),
        json!(i64::MAX),
        json!(u64::MAX),
        json!(-1e308),
        json!(1e-300),
        json!(0.5),
        json!(""),
        json!("*("),
        json!([]),
        json!([1, 2, 3]),
        json!(["re:("]),
        json!({}),
        json!({"x": {"y": 1}}),
    ];
    let mut tried = 0;
    for config in [plain, wrapped] {
        let mut paths = Vec::new();
        paths_in(&config, String::new(), &mut paths);
        for path in paths {
            for value in &values {
                let mut changed = config.clone();
                *changed.pointer_mut(&path).unwrap() = value.clone();
                if let Err(error) = read(&changed) {
                    let error = error.to_string();
                    assert!(error.lines().count() == 1 && error.len() < 1000, "{path} = {value}: {error}");
                }
                tried += 1;
            }
        }
    }
    assert!(tried > 2000, "{tried}");
}

fn paths_in(value: &Value, path: String, paths: &mut Vec<String>) {
    if let Value::Object(object) = value {
        for (key, value) in object {
            paths_in(value, format!("{path}/{key}"), paths);
        }
    }
    if !path.is_empty() {
        paths.push(path);
    }
}
