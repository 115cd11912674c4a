//! A tiny DeepSeek-V3 checkpoint made from a seed, with a routing margin by construction.
//!
//! States are compared between a request alone and in a batch. Those differ by rounding, and a router that chooses
//! between near-equal experts turns rounding into another expert. Random weights cannot rule that out over the
//! hundreds of thousands of choices of a load test, so this model carries a code in its first [`CODE`] hidden
//! channels: the embedding writes one of eight code words there, no layer writes to them, and the gates read mostly
//! them. Which experts a token takes depends on the token and on the layer, and the chosen ones score above one half,
//! the others below, by a wide margin.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use half::bf16;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize_to_file};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::scratch::scratch;

/// Decoder layers.
pub const NUM_LAYERS: usize = 8;
/// Width of the residual stream.
pub const HIDDEN: usize = 64;
/// Token IDs are `0..VOCAB`.
pub const VOCAB: usize = 640;

/// Channels that carry a token's routing code.
const CODE: usize = 8;
/// Size of the code in the embedding, beside entries of about 1.
const CODE_SIZE: f32 = 8.0;
const HEADS: usize = 4;
const NOPE: usize = 16;
const ROPE: usize = 8;
const V_HEAD: usize = 16;
const Q_LORA: usize = 32;
const KV_LORA: usize = 32;
const DENSE: usize = 128;
const EXPERTS: usize = 16;
const GROUPS: usize = 4;
const EXPERT_WIDTH: usize = 32;
const SHARDS: usize = 3;

/// A checkpoint on disk, removed when dropped.
pub struct Checkpoint {
    folder: TempDir,
    tensors: BTreeMap<String, Tensor>,
}

/// A weight, row-major.
#[derive(Clone)]
struct Tensor {
    shape: Vec<usize>,
    values: Vec<f32>,
}

impl Checkpoint {
    /// float32 weights in three shards with an index, and a byte-level tokenizer.
    pub fn float32() -> Self {
        Self::write(Dtype::F32)
    }

    /// The same weights rounded to bfloat16.
    pub fn bfloat16() -> Self {
        Self::write(Dtype::BF16)
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The weight files, in order.
    pub fn shards(&self) -> Vec<PathBuf> {
        (0..SHARDS).map(|shard| self.path().join(shard_name(shard))).collect()
    }

    /// Values of the weight `name`, row-major, as they were before rounding to the file's dtype.
    ///
    /// # Panics
    /// If there is none of that name.
    pub fn weight(&self, name: &str) -> &[f32] {
        &self.tensors.get(name).unwrap_or_else(|| panic!("no weight `{name}`")).values
    }

    fn write(dtype: Dtype) -> Self {
        let folder = scratch();
        let tensors = Weights::new().all();
        write_shards(folder.path(), &tensors, dtype);
        let write = |name: &str, value: Value| {
            fs::write(folder.path().join(name), value.to_string()).expect("the folder was just made");
        };
        write("config.json", config(dtype));
        write("tokenizer.json", tokenizer());
        write(
            "tokenizer_config.json",
            json!({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}),
        );
        Self { folder, tensors }
    }
}

fn config(dtype: Dtype) -> Value {
    json!({
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": false,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        // Never chosen by chance before a test's `max_new_tokens`: its row of the output head is zero.
        "eos_token_id": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": DENSE,
        "kv_lora_rank": KV_LORA,
        "max_position_embeddings": 8192,
        "moe_intermediate_size": EXPERT_WIDTH,
        "moe_layer_freq": 1,
        "n_group": GROUPS,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "norm_topk_prob": true,
        "num_attention_heads": HEADS,
        "num_experts_per_tok": 4,
        "num_hidden_layers": NUM_LAYERS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": Q_LORA,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
        "rope_theta": 10000.0,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": false,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "torch_dtype": if dtype == Dtype::F32 { "float32" } else { "bfloat16" },
        "use_cache": true,
        "v_head_dim": V_HEAD,
        "vocab_size": VOCAB,
    })
}

/// Draws the weights, always in the same order.
struct Weights {
    rng: StdRng,
    tensors: BTreeMap<String, Tensor>,
}

impl Weights {
    fn new() -> Self {
        Self { rng: StdRng::seed_from_u64(0x7e7e), tensors: BTreeMap::new() }
    }

    fn all(mut self) -> BTreeMap<String, Tensor> {
        self.embedding();
        for layer in 0..NUM_LAYERS {
            self.attention(&format!("model.layers.{layer}.self_attn"));
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                self.norm(&format!("model.layers.{layer}.{norm}.weight"), HIDDEN, 0.7..1.3);
            }
            let mlp = format!("model.layers.{layer}.mlp");
            if layer == 0 { self.mlp(&mlp, DENSE, 0.6) } else { self.experts(&mlp) }
        }
        // Spread widely, so that a head applied without this norm picks another token.
        self.norm("model.norm.weight", HIDDEN, 0.1..2.0);
        self.linear("lm_head.weight", VOCAB, HIDDEN, 3.0);
        let eos = &mut self.tensors.get_mut("lm_head.weight").expect("inserted above").values;
        eos[HIDDEN..2 * HIDDEN].fill(0.0);
        self.tensors
    }

    fn embedding(&mut self) {
        self.linear("model.embed_tokens.weight", VOCAB, HIDDEN, (HIDDEN as f32).sqrt());
        let values = &mut self.tensors.get_mut("model.embed_tokens.weight").expect("inserted above").values;
        for (token, row) in values.chunks_exact_mut(HIDDEN).enumerate() {
            row[..CODE].fill(0.0);
            row[token % CODE] = CODE_SIZE;
        }
    }

    fn attention(&mut self, at: &str) {
        self.linear(&format!("{at}.q_a_proj.weight"), Q_LORA, HIDDEN, 1.0);
        self.norm(&format!("{at}.q_a_layernorm.weight"), Q_LORA, 0.5..1.5);
        self.linear(&format!("{at}.q_b_proj.weight"), HEADS * (NOPE + ROPE), Q_LORA, 1.3);
        self.linear(&format!("{at}.kv_a_proj_with_mqa.weight"), KV_LORA + ROPE, HIDDEN, 1.0);
        self.norm(&format!("{at}.kv_a_layernorm.weight"), KV_LORA, 0.5..1.5);
        self.linear(&format!("{at}.kv_b_proj.weight"), HEADS * (NOPE + V_HEAD), KV_LORA, 1.3);
        self.writing(&format!("{at}.o_proj.weight"), HEADS * V_HEAD, 0.8);
    }

    fn mlp(&mut self, at: &str, width: usize, gain: f32) {
        self.linear(&format!("{at}.gate_proj.weight"), width, HIDDEN, 1.0);
        self.linear(&format!("{at}.up_proj.weight"), width, HIDDEN, 1.0);
        self.writing(&format!("{at}.down_proj.weight"), width, gain);
    }

    fn experts(&mut self, at: &str) {
        self.gate(&format!("{at}.gate"));
        for expert in 0..EXPERTS {
            self.mlp(&format!("{at}.experts.{expert}"), EXPERT_WIDTH, 1.0);
        }
        self.mlp(&format!("{at}.shared_experts"), EXPERT_WIDTH, 0.6);
    }

    /// For each code word: two groups of which two experts each are wanted. Their logits are well above zero, all
    /// others' well below, so both the choice of groups (the sum of a group's two best) and that of experts are clear.
    fn gate(&mut self, at: &str) {
        self.linear(&format!("{at}.weight"), EXPERTS, HIDDEN, 0.1);
        let mut wanted = [[false; EXPERTS]; CODE];
        for row in &mut wanted {
            let mut groups: Vec<_> = (0..GROUPS).collect();
            groups.shuffle(&mut self.rng);
            for group in &groups[..2] {
                let mut members: Vec<_> = (0..EXPERTS / GROUPS).collect();
                members.shuffle(&mut self.rng);
                members[..2].iter().for_each(|member| row[group * (EXPERTS / GROUPS) + member] = true);
            }
        }
        let sizes: Vec<f32> = (0..EXPERTS * CODE).map(|_| self.rng.random_range(0.6..1.0)).collect();
        let gate = &mut self.tensors.get_mut(&format!("{at}.weight")).expect("inserted above").values;
        for (expert, row) in gate.chunks_exact_mut(HIDDEN).enumerate() {
            for (code, value) in row[..CODE].iter_mut().enumerate() {
                let size = sizes[expert * CODE + code];
                *value = if wanted[code][expert] { size } else { -size };
            }
        }
        let bias = (0..EXPERTS).map(|_| self.rng.random_range(-0.02..0.02)).collect();
        self.insert(&format!("{at}.e_score_correction_bias"), vec![EXPERTS], bias);
    }

    /// A linear layer that writes to the residual stream, but not to the code.
    fn writing(&mut self, name: &str, inputs: usize, gain: f32) {
        self.linear(name, HIDDEN, inputs, gain);
        let values = &mut self.tensors.get_mut(name).expect("inserted above").values;
        values[..CODE * inputs].fill(0.0);
    }

    /// `[outputs, inputs]`, uniform, with a standard deviation of `gain / sqrt(inputs)`.
    fn linear(&mut self, name: &str, outputs: usize, inputs: usize, gain: f32) {
        let bound = gain * (3.0 / inputs as f32).sqrt();
        let values = (0..outputs * inputs).map(|_| self.rng.random_range(-bound..bound)).collect();
        self.insert(name, vec![outputs, inputs], values);
    }

    fn norm(&mut self, name: &str, width: usize, range: std::ops::Range<f32>) {
        let values = (0..width).map(|_| self.rng.random_range(range.clone())).collect();
        self.insert(name, vec![width], values);
    }

    fn insert(&mut self, name: &str, shape: Vec<usize>, values: Vec<f32>) {
        self.tensors.insert(name.to_owned(), Tensor { shape, values });
    }
}

fn shard_name(shard: usize) -> String {
    format!("model-{:05}-of-{SHARDS:05}.safetensors", shard + 1)
}

fn write_shards(folder: &Path, tensors: &BTreeMap<String, Tensor>, dtype: Dtype) {
    let encode = |values: &[f32]| -> Vec<u8> {
        match dtype {
            Dtype::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            _ => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
        }
    };
    let mut weight_map = serde_json::Map::new();
    let names: Vec<_> = tensors.keys().collect();
    for (shard, names) in names.chunks(names.len().div_ceil(SHARDS)).enumerate() {
        let encoded: Vec<_> = names.iter().map(|name| (*name, encode(&tensors[*name].values))).collect();
        let views = encoded.iter().map(|(name, bytes)| {
            let view = TensorView::new(dtype, tensors[*name].shape.clone(), bytes);
            (name.as_str(), view.expect("the bytes are as many as the shape says"))
        });
        serialize_to_file(views, None, &folder.join(shard_name(shard))).expect("the folder was just made");
        weight_map.extend(names.iter().map(|name| ((*name).clone(), shard_name(shard).into())));
    }
    let total: usize = tensors.values().map(|tensor| tensor.values.len() * dtype.bitsize() / 8).sum();
    let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
    fs::write(folder.join("model.safetensors.index.json"), index.to_string())
        .expect("the folder was just made");
}

/// One token per byte of UTF-8, after `<bos>` and `<eos>`: byte-level BPE without merges.
fn tokenizer() -> Value {
    // GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on.
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut spare = 0x100..;
    let mut vocab =
        serde_json::Map::from_iter([("<bos>".to_owned(), 0.into()), ("<eos>".to_owned(), 1.into())]);
    for byte in 0..=u8::MAX {
        let letter = if printable(byte) {
            char::from(byte)
        } else {
            spare.next().and_then(char::from_u32).expect("U+0100 to U+0143 are characters")
        };
        vocab.insert(letter.to_string(), (usize::from(byte) + 2).into());
    }
    let special = |id: usize, content: &str| {
        json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false,
               "rstrip": false, "normalized": false})
    };
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [special(0, "<bos>"), special(1, "<eos>")],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_word_wants_two_experts_in_each_of_two_groups() {
        let tensors = Weights::new().all();
        for layer in 1..NUM_LAYERS {
            let gate = &tensors[&format!("model.layers.{layer}.mlp.gate.weight")].values;
            for code in 0..CODE {
                let wanted: Vec<_> =
                    (0..EXPERTS).filter(|expert| gate[expert * HIDDEN + code] > 0.0).collect();
                let groups: Vec<_> = wanted.iter().map(|expert| expert / (EXPERTS / GROUPS)).collect();
                assert_eq!(wanted.len(), 4);
                assert_eq!((groups[0], groups[2]), (groups[1], groups[3]));
                assert_ne!(groups[0], groups[2]);
            }
        }
    }

    #[test]
    fn the_same_weights_are_written_each_time() {
        let (one, other) = (Checkpoint::float32(), Checkpoint::float32());
        for (a, b) in one.shards().iter().zip(other.shards()) {
            assert_eq!(fs::read(a).unwrap(), fs::read(b).unwrap());
        }
    }
}
