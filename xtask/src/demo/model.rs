//! A tiny model in the shape of DeepSeek-V3, with seeded random weights, as a Hugging Face checkpoint directory.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use half::bf16;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

use super::random::Random;

/// Shards are cut at this size, as a real checkpoint's are at a few gigabytes: more than one, so that the index counts.
const SHARD_BYTES: usize = 4 << 20;
const SEED: u64 = 20_240_501;

/// The sizes of the model, named as in `config.json`. All of V3's parts are in it: low-rank queries, a dense first
/// layer, routed experts in groups with a bias that sways the choice, a shared expert, YaRN.
pub(crate) struct Shape {
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    pub(crate) num_hidden_layers: usize,
    first_k_dense_replace: usize,
    intermediate_size: usize,
    moe_intermediate_size: usize,
    pub(crate) n_routed_experts: usize,
    n_shared_experts: usize,
    pub(crate) num_experts_per_tok: usize,
    n_group: usize,
    topk_group: usize,
    num_attention_heads: usize,
    q_lora_rank: usize,
    kv_lora_rank: usize,
    qk_nope_head_dim: usize,
    qk_rope_head_dim: usize,
    v_head_dim: usize,
}

/// The demo's model.
pub(crate) const SHAPE: Shape = Shape {
    vocab_size: 4096,
    hidden_size: 128,
    num_hidden_layers: 10,
    first_k_dense_replace: 1,
    intermediate_size: 384,
    moe_intermediate_size: 64,
    n_routed_experts: 16,
    n_shared_experts: 1,
    num_experts_per_tok: 4,
    n_group: 4,
    topk_group: 2,
    num_attention_heads: 4,
    q_lora_rank: 64,
    kv_lora_rank: 48,
    qk_nope_head_dim: 32,
    qk_rope_head_dim: 16,
    v_head_dim: 32,
};

/// What [`write`] wrote.
pub(crate) struct Written {
    pub(crate) parameters: usize,
    pub(crate) shards: usize,
}

/// Writes config, weights and the tokenizer of `assets` into `dir`, which holds nothing else afterwards.
pub(crate) fn write(dir: &Path, assets: &Path) -> Result<Written> {
    if dir.exists() {
        fs::remove_dir_all(dir).with_context(|| format!("removing {}", dir.display()))?;
    }
    fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
    write_json(&dir.join("config.json"), &config(&SHAPE))?;
    write_json(&dir.join("generation_config.json"), &generation_config())?;
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let from = assets.join(name);
        fs::copy(&from, dir.join(name)).with_context(|| format!("copying {}", from.display()))?;
    }
    write_weights(dir, &tensors(&SHAPE))
}

fn config(shape: &Shape) -> Value {
    json!({
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": false,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": shape.first_k_dense_replace,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "kv_lora_rank": shape.kv_lora_rank,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": shape.moe_intermediate_size,
        "moe_layer_freq": 1,
        "n_group": shape.n_group,
        "n_routed_experts": shape.n_routed_experts,
        "n_shared_experts": shape.n_shared_experts,
        "norm_topk_prob": true,
        "num_attention_heads": shape.num_attention_heads,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_attention_heads,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": shape.q_lora_rank,
        "qk_nope_head_dim": shape.qk_nope_head_dim,
        "qk_rope_head_dim": shape.qk_rope_head_dim,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 4,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 1024,
            "type": "yarn"
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": false,
        "topk_group": shape.topk_group,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "v_head_dim": shape.v_head_dim,
        "vocab_size": shape.vocab_size
    })
}

fn generation_config() -> Value {
    json!({
        "_from_model_config": true,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "do_sample": true,
        "temperature": 0.6,
        "top_p": 0.95
    })
}

/// How a tensor's numbers are drawn. Norm weights and the routing bias are random too: ones and zeros would hide a
/// part that forgets to apply them.
#[derive(Clone, Copy)]
enum Init {
    /// Normal, variance 1 / (columns): keeps the scale of what it multiplies.
    Projection,
    /// Normal, variance 1: rows of the embedding.
    Embedding,
    /// Uniform in 0.5 to 1.5.
    Norm,
    /// Uniform in -0.1 to 0.1, kept in float32 as published checkpoints do.
    RoutingBias,
}

struct Spec {
    name: String,
    shape: Vec<usize>,
    init: Init,
}

/// Every tensor of the checkpoint, in the order of the forward pass.
fn tensors(s: &Shape) -> Vec<Spec> {
    let mut list = Vec::new();
    let mut add = |name: String, shape: &[usize], init| list.push(Spec { name, shape: shape.to_vec(), init });
    let (hidden, heads) = (s.hidden_size, s.num_attention_heads);
    add("model.embed_tokens.weight".to_owned(), &[s.vocab_size, hidden], Init::Embedding);
    for layer in 0..s.num_hidden_layers {
        let mut add =
            |name: &str, shape: &[usize], init| add(format!("model.layers.{layer}.{name}"), shape, init);
        add("input_layernorm.weight", &[hidden], Init::Norm);
        let qk_head_dim = s.qk_nope_head_dim + s.qk_rope_head_dim;
        let projections: [(&str, usize, usize); 5] = [
            ("q_a_proj", s.q_lora_rank, hidden),
            ("q_b_proj", heads * qk_head_dim, s.q_lora_rank),
            ("kv_a_proj_with_mqa", s.kv_lora_rank + s.qk_rope_head_dim, hidden),
            ("kv_b_proj", heads * (s.qk_nope_head_dim + s.v_head_dim), s.kv_lora_rank),
            ("o_proj", hidden, heads * s.v_head_dim),
        ];
        for (name, rows, columns) in projections {
            add(&format!("self_attn.{name}.weight"), &[rows, columns], Init::Projection);
        }
        add("self_attn.q_a_layernorm.weight", &[s.q_lora_rank], Init::Norm);
        add("self_attn.kv_a_layernorm.weight", &[s.kv_lora_rank], Init::Norm);
        add("post_attention_layernorm.weight", &[hidden], Init::Norm);
        let mut mlp = |prefix: &str, width: usize| {
            add(&format!("{prefix}.gate_proj.weight"), &[width, hidden], Init::Projection);
            add(&format!("{prefix}.up_proj.weight"), &[width, hidden], Init::Projection);
            add(&format!("{prefix}.down_proj.weight"), &[hidden, width], Init::Projection);
        };
        if layer < s.first_k_dense_replace {
            mlp("mlp", s.intermediate_size);
            continue;
        }
        for expert in 0..s.n_routed_experts {
            mlp(&format!("mlp.experts.{expert}"), s.moe_intermediate_size);
        }
        mlp("mlp.shared_experts", s.moe_intermediate_size * s.n_shared_experts);
        add("mlp.gate.weight", &[s.n_routed_experts, hidden], Init::Projection);
        add("mlp.gate.e_score_correction_bias", &[s.n_routed_experts], Init::RoutingBias);
    }
    add("model.norm.weight".to_owned(), &[hidden], Init::Norm);
    add("lm_head.weight".to_owned(), &[s.vocab_size, hidden], Init::Projection);
    list
}

/// The bytes of one tensor. Each has its own stream of numbers, named by the tensor, so that adding one changes no
/// other.
fn bytes(spec: &Spec) -> (Dtype, Vec<u8>) {
    let mut random = Random::named(SEED, &spec.name);
    let count = spec.shape.iter().product();
    let scale = match spec.init {
        Init::Projection => 1.0 / (spec.shape[1] as f32).sqrt(),
        Init::Embedding | Init::Norm | Init::RoutingBias => 1.0,
    };
    let numbers = (0..count).map(|_| match spec.init {
        Init::Projection | Init::Embedding => scale * random.normal(),
        Init::Norm => 0.5 + random.uniform(),
        Init::RoutingBias => 0.2 * random.uniform() - 0.1,
    });
    match spec.init {
        Init::RoutingBias => (Dtype::F32, numbers.flat_map(f32::to_le_bytes).collect()),
        _ => (Dtype::BF16, numbers.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect()),
    }
}

/// Writes the shards and their index, named as published checkpoints name them.
fn write_weights(dir: &Path, specs: &[Spec]) -> Result<Written> {
    let mut shards: Vec<Vec<(&Spec, Dtype, Vec<u8>)>> = vec![Vec::new()];
    let (mut filled, mut total, mut parameters) = (0, 0, 0);
    for spec in specs {
        let (dtype, data) = bytes(spec);
        if filled > 0 && filled + data.len() > SHARD_BYTES {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += data.len();
        total += data.len();
        parameters += spec.shape.iter().product::<usize>();
        shards.last_mut().expect("starts with one shard").push((spec, dtype, data));
    }
    let mut weight_map = BTreeMap::new();
    for (index, shard) in shards.iter().enumerate() {
        let file = format!("model-{:05}-of-{:05}.safetensors", index + 1, shards.len());
        let mut views = Vec::new();
        for (spec, dtype, data) in shard {
            weight_map.insert(spec.name.as_str(), file.clone());
            let view = TensorView::new(*dtype, spec.shape.clone(), data)
                .with_context(|| format!("tensor {}", spec.name))?;
            views.push((spec.name.as_str(), view));
        }
        let metadata = Some([("format".to_owned(), "pt".to_owned())].into());
        let path = dir.join(file);
        safetensors::serialize_to_file(views, metadata, &path)
            .with_context(|| format!("writing {}", path.display()))?;
    }
    let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
    write_json(&dir.join("model.safetensors.index.json"), &index)?;
    Ok(Written { parameters, shards: shards.len() })
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(value).context("writing JSON")?;
    fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))
}

#[cfg(test)]
mod tests;
