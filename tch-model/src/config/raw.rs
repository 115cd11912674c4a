//! `config.json` as it is written, and the refusal of what the code does not implement.

use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::keys::is_off;
use super::{Architecture, TopkMethod, natural};
use crate::LoadError;

/// The keys the forward pass depends on. `Option<Option<_>>` where null and absent differ.
#[derive(Debug, Deserialize)]
pub(super) struct RawConfig {
    architectures: Option<Vec<String>>,
    model_type: Option<String>,
    pub(super) vocab_size: Option<i64>,
    pub(super) hidden_size: Option<i64>,
    pub(super) intermediate_size: Option<i64>,
    pub(super) moe_intermediate_size: Option<i64>,
    pub(super) num_hidden_layers: Option<i64>,
    pub(super) num_attention_heads: Option<i64>,
    pub(super) num_key_value_heads: Option<i64>,
    #[serde(default, deserialize_with = "present")]
    pub(super) n_shared_experts: Option<Option<i64>>,
    #[serde(default, deserialize_with = "present")]
    n_routed_experts: Option<Option<i64>>,
    pub(super) num_experts_per_tok: Option<i64>,
    pub(super) first_k_dense_replace: Option<i64>,
    pub(super) moe_layer_freq: Option<i64>,
    pub(super) kv_lora_rank: Option<i64>,
    #[serde(default, deserialize_with = "present")]
    pub(super) q_lora_rank: Option<Option<i64>>,
    pub(super) qk_nope_head_dim: Option<i64>,
    pub(super) qk_rope_head_dim: Option<i64>,
    pub(super) v_head_dim: Option<i64>,
    topk_method: Option<String>,
    scoring_func: Option<String>,
    #[serde(default, deserialize_with = "present")]
    pub(super) n_group: Option<Option<i64>>,
    #[serde(default, deserialize_with = "present")]
    pub(super) topk_group: Option<Option<i64>>,
    pub(super) norm_topk_prob: Option<bool>,
    pub(super) routed_scaling_factor: Option<f64>,
    pub(super) rms_norm_eps: Option<f64>,
    pub(super) max_position_embeddings: Option<i64>,
    pub(super) rope_theta: Option<f64>,
    pub(super) rope_scaling: Option<Map<String, Value>>,
    pub(super) rope_parameters: Option<Map<String, Value>>,
    rope_interleave: Option<bool>,
    hidden_act: Option<String>,
    pub(super) attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    pub(super) tie_word_embeddings: Option<bool>,
    pub(super) bos_token_id: Option<i64>,
    pub(super) eos_token_id: Option<OneOrMany>,
    pub(super) torch_dtype: Option<String>,
    pub(super) dtype: Option<String>,
    /// Everything else.
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// `eos_token_id` is a number or a list of them.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum OneOrMany {
    One(i64),
    Many(Vec<i64>),
}

impl From<OneOrMany> for Vec<i64> {
    fn from(value: OneOrMany) -> Self {
        match value {
            OneOrMany::One(id) => vec![id],
            OneOrMany::Many(ids) => ids,
        }
    }
}

/// Keeps null apart from absent.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<i64>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

/// Keys that do not change a prefill: bookkeeping, training, generation and placement. Any other key that is not one
/// of [`RawConfig`]'s may change the numbers, so it is refused rather than ignored.
const INERT: &[&str] = &[
    "add_cross_attention",
    "attention_dropout",
    "auto_map",
    "aux_loss_alpha",
    "bad_words_ids",
    "begin_suppress_tokens",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "ep_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "head_dim",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "name_or_path",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "qk_head_dim",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
    "sep_token_id",
    "seq_aux",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
];

impl RawConfig {
    pub(super) fn architecture(&self) -> Result<Architecture, LoadError> {
        let supported = "DeepseekV2ForCausalLM and DeepseekV3ForCausalLM";
        match (self.architectures.as_deref(), self.model_type.as_deref()) {
            (Some([name]), _) if name == "DeepseekV2ForCausalLM" => Ok(Architecture::DeepseekV2),
            (Some([name]), _) if name == "DeepseekV3ForCausalLM" => Ok(Architecture::DeepseekV3),
            (Some(names), _) if !names.is_empty() => {
                Err(LoadError::unsupported("architectures", names.join(", "), supported))
            }
            (_, Some("deepseek_v2")) => Ok(Architecture::DeepseekV2),
            (_, Some("deepseek_v3" | "kimi_k2")) => Ok(Architecture::DeepseekV3),
            (_, Some(other)) => {
                Err(LoadError::unsupported("model_type", other, "deepseek_v2, deepseek_v3 and kimi_k2"))
            }
            (_, None) => Err(LoadError::MissingKey {
                key: "architectures".to_owned(),
                needed: format!("it must hold one of {supported}"),
            }),
        }
    }

    pub(super) fn refuse_what_is_not_implemented(&self) -> Result<(), LoadError> {
        if let Some(act) = self.hidden_act.as_deref().filter(|&act| act != "silu") {
            return Err(LoadError::unsupported("hidden_act", act, "silu"));
        }
        if self.mlp_bias == Some(true) {
            return Err(LoadError::unsupported("mlp_bias", true, "false"));
        }
        if self.rope_interleave == Some(false) {
            return Err(LoadError::unsupported("rope_interleave", false, "true"));
        }
        for (key, value) in &self.rest {
            if is_off(value) || key.starts_with('_') || INERT.contains(&key.as_str()) {
                continue;
            }
            let supported = match key.as_str() {
                _ if key.starts_with("index_") => {
                    "models without sparse attention (no `index_*` keys)".to_owned()
                }
                _ => "no such key; if it does not change the forward pass, remove it from config.json"
                    .to_owned(),
            };
            return Err(LoadError::unsupported(key, shortened(value), supported));
        }
        Ok(())
    }

    /// The published pairs of method and score, with the defaults of each family.
    pub(super) fn topk_method(&self, architecture: Architecture) -> Result<TopkMethod, LoadError> {
        let (method, score) = match architecture {
            Architecture::DeepseekV2 => ("greedy", "softmax"),
            Architecture::DeepseekV3 => ("noaux_tc", "sigmoid"),
        };
        let method = self.topk_method.as_deref().unwrap_or(method);
        let score = self.scoring_func.as_deref().unwrap_or(score);
        let pairs = "greedy and group_limited_greedy with `scoring_func` softmax, noaux_tc with sigmoid";
        match (method, score) {
            ("greedy", "softmax") => Ok(TopkMethod::Greedy),
            ("group_limited_greedy", "softmax") => Ok(TopkMethod::GroupLimitedGreedy),
            ("noaux_tc", "sigmoid") => Ok(TopkMethod::NoauxTc),
            ("greedy" | "group_limited_greedy" | "noaux_tc", _) => Err(LoadError::unsupported(
                "scoring_func",
                format!("{score} (with `topk_method` {method})"),
                pairs,
            )),
            _ => Err(LoadError::unsupported("topk_method", method, pairs)),
        }
    }

    /// 0 where null, which the authors' code takes as: every layer is dense.
    pub(super) fn n_routed_experts(&self, architecture: Architecture) -> Result<i64, LoadError> {
        let default = match architecture {
            Architecture::DeepseekV2 => 64,
            Architecture::DeepseekV3 => 256,
        };
        match self.n_routed_experts {
            Some(None) => Ok(0),
            Some(experts) => natural("n_routed_experts", experts, 0),
            None => Ok(default),
        }
    }
}

/// A value for an error message, which need not repeat a whole object.
pub(super) fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
