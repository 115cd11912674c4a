//! `config.json`: what the forward pass depends on, checked key by key.

mod keys;
mod quantisation;
mod raw;
mod rope;
mod wrapper;

use std::fmt;
use std::fs;
use std::path::Path;

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::LoadError;
pub(crate) use quantisation::{Modules, NVFP4_GROUP};
pub use quantisation::{Quantisation, Scheme};
use raw::RawConfig;
pub use rope::{RopeConfig, Yarn};

/// A checkpoint's `config.json`, with the defaults of the reference's config classes filled in. Fields are named as
/// there. A key, or a value, that changes the forward pass in a way this code does not implement is an error when the
/// config is read.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Which of the two families' defaults apply.
    pub architecture: Architecture,
    /// Tokens in the vocabulary.
    pub vocab_size: i64,
    /// Width of the residual stream.
    pub hidden_size: i64,
    /// Width inside the dense layers' MLP.
    pub intermediate_size: i64,
    /// Width inside one expert.
    pub moe_intermediate_size: i64,
    /// Decoder layers, the `n` of `R[n]`. Layers for multi-token prediction come after them and are not run.
    pub num_hidden_layers: i64,
    /// Attention heads.
    pub num_attention_heads: i64,
    /// Shared experts, 0 for none. They are one MLP, `n_shared_experts * moe_intermediate_size` wide.
    pub n_shared_experts: i64,
    /// Routed experts, 0 for a model without any.
    pub n_routed_experts: i64,
    /// Experts a token goes to.
    pub num_experts_per_tok: i64,
    /// Layers before this one are dense.
    pub first_k_dense_replace: i64,
    /// From there on, every so many layers have experts.
    pub moe_layer_freq: i64,
    /// Width of the compressed keys and values.
    pub kv_lora_rank: i64,
    /// Width of the compressed queries; `None` for queries projected directly.
    pub q_lora_rank: Option<i64>,
    /// Part of a query or key without positions.
    pub qk_nope_head_dim: i64,
    /// Part of a query or key that is rotated.
    pub qk_rope_head_dim: i64,
    /// Width of a head's value.
    pub v_head_dim: i64,
    /// How experts are chosen.
    pub topk_method: TopkMethod,
    /// Groups that experts are in.
    pub n_group: i64,
    /// Groups that a token's experts come from.
    pub topk_group: i64,
    /// Whether the chosen experts' weights are made to sum to one, before the scaling factor.
    pub norm_topk_prob: bool,
    /// Factor on the routed experts' sum.
    pub routed_scaling_factor: f64,
    /// Added to the mean square in the norms over the residual stream.
    pub rms_norm_eps: f64,
    /// Positions the model has.
    pub max_position_embeddings: i64,
    /// Rotary embedding: base and, with YaRN, its stretch.
    pub rope: RopeConfig,
    /// Whether the attention's first and last projections have biases.
    pub attention_bias: bool,
    /// Whether the output head is the embedding.
    pub tie_word_embeddings: bool,
    /// First token of a prompt, if the model has one.
    pub bos_token_id: Option<i64>,
    /// Tokens that end a text; empty if the model names none.
    pub eos_token_id: Vec<i64>,
    /// What the weights are said to be stored as: `torch_dtype`, in transformers 5 `dtype`.
    pub torch_dtype: Option<String>,
    /// How quantised weights are stored, if any are.
    pub quantisation: Option<Quantisation>,
    hash: String,
}

/// The model classes of the reference this code follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// `DeepseekV2ForCausalLM`: V2, V2-Lite, V2.5.
    DeepseekV2,
    /// `DeepseekV3ForCausalLM`: V3, R1, Kimi-K2, Moonlight.
    DeepseekV3,
}

/// How experts are chosen: `topk_method`, together with the `scoring_func` it is published with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopkMethod {
    /// Softmax; the best of all experts.
    Greedy,
    /// Softmax; the best experts of the best groups.
    GroupLimitedGreedy,
    /// Sigmoid; a bias sways the choice; the best experts of the best groups.
    NoauxTc,
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DeepseekV2 => "DeepseekV2ForCausalLM",
            Self::DeepseekV3 => "DeepseekV3ForCausalLM",
        })
    }
}

impl Config {
    /// Reads `dir/config.json`. Cheap: touches no weights.
    ///
    /// # Errors
    /// When the file cannot be read or parsed, and when it asks for something this code does not implement, by name.
    pub fn read(dir: &Path) -> Result<Self, LoadError> {
        let path = dir.join("config.json");
        let bytes = fs::read(&path).map_err(|source| LoadError::Read { path: path.clone(), source })?;
        let json = |source| LoadError::Json { path: path.clone(), source };
        let mut text = wrapper::unwrap(serde_json::from_slice(&bytes).map_err(json)?)?;
        // Taken out first: whoever is no object here is told so by name.
        let quantisation = match text.remove("quantization_config") {
            None | Some(Value::Null) => Quantisation::modelopt_file(dir)?,
            Some(Value::Object(object)) => Some(object),
            Some(other) => {
                return Err(LoadError::unsupported(
                    "quantization_config",
                    raw::shortened(&other),
                    "an object",
                ));
            }
        };
        let raw = serde_json::from_value(Value::Object(text)).map_err(json)?;
        Self::check(raw, quantisation.as_ref(), hex(&Sha256::digest(&bytes)))
    }

    /// SHA-256 of the bytes of `config.json`, in lower-case hex.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Width of a head's query or key.
    pub fn qk_head_dim(&self) -> i64 {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// What attention scores are multiplied by: `qk_head_dim^-0.5`, times YaRN's `m(mscale_all_dim)²`.
    pub fn softmax_scale(&self) -> f64 {
        let stretch = self.rope.yarn.as_ref().map_or(1.0, Yarn::softmax_factor);
        (self.qk_head_dim() as f64).powf(-0.5) * stretch
    }

    /// Whether decoder layer `layer` has experts.
    pub fn is_moe(&self, layer: i64) -> bool {
        self.n_routed_experts > 0 && layer >= self.first_k_dense_replace && layer % self.moe_layer_freq == 0
    }

    fn check(
        raw: RawConfig,
        quantisation: Option<&Map<String, Value>>,
        hash: String,
    ) -> Result<Self, LoadError> {
        let architecture = raw.architecture()?;
        raw.refuse_what_is_not_implemented()?;
        let v3 = architecture == Architecture::DeepseekV3;
        let (topk_method, n_routed_experts) =
            (raw.topk_method(architecture)?, raw.n_routed_experts(architecture)?);
        let has_experts = n_routed_experts > 0;
        let rope = RopeConfig::check(&raw)?;
        let heads = positive("num_attention_heads", raw.num_attention_heads, None)?;
        if let Some(kv_heads) = raw.num_key_value_heads.filter(|&kv_heads| kv_heads != heads) {
            let supported = format!("as many as `num_attention_heads` ({heads})");
            return Err(LoadError::unsupported("num_key_value_heads", kv_heads, supported));
        }
        // Null means no groups, absent the reference's default.
        let groups = |value: Option<Option<i64>>, default| match value {
            Some(None) => Some(1),
            Some(value) => value,
            None => Some(default),
        };
        if topk_method == TopkMethod::GroupLimitedGreedy && has_experts {
            // The reference has no default for these, and one group would be another routing.
            for (key, value) in [("n_group", raw.n_group), ("topk_group", raw.topk_group)] {
                if value.flatten().is_none() {
                    return Err(LoadError::MissingKey {
                        key: key.to_owned(),
                        needed: "`topk_method` is group_limited_greedy".to_owned(),
                    });
                }
            }
        }
        let n_group = positive("n_group", groups(raw.n_group, if v3 && has_experts { 8 } else { 1 }), None)?;
        let config = Self {
            architecture,
            vocab_size: positive("vocab_size", raw.vocab_size, None)?,
            hidden_size: positive("hidden_size", raw.hidden_size, None)?,
            intermediate_size: positive("intermediate_size", raw.intermediate_size, None)?,
            moe_intermediate_size: positive(
                "moe_intermediate_size",
                raw.moe_intermediate_size,
                (!has_experts).then_some(1),
            )?,
            num_hidden_layers: positive("num_hidden_layers", raw.num_hidden_layers, None)?,
            num_attention_heads: heads,
            // Null means none, absent the reference's default.
            n_shared_experts: match raw.n_shared_experts {
                Some(None) => 0,
                Some(count) => natural("n_shared_experts", count, 0)?,
                None => {
                    if v3 {
                        1
                    } else {
                        2
                    }
                }
            },
            n_routed_experts,
            num_experts_per_tok: positive(
                "num_experts_per_tok",
                raw.num_experts_per_tok,
                if !has_experts { Some(1) } else { v3.then_some(8) },
            )?,
            first_k_dense_replace: natural(
                "first_k_dense_replace",
                raw.first_k_dense_replace,
                if v3 { 3 } else { 0 },
            )?,
            moe_layer_freq: positive("moe_layer_freq", raw.moe_layer_freq, Some(1))?,
            kv_lora_rank: positive("kv_lora_rank", raw.kv_lora_rank, Some(512))?,
            // Null means a direct projection, absent the reference's default.
            q_lora_rank: match raw.q_lora_rank {
                Some(None) => None,
                Some(rank) => Some(positive("q_lora_rank", rank, None)?),
                None => Some(1536),
            },
            qk_nope_head_dim: positive("qk_nope_head_dim", raw.qk_nope_head_dim, Some(128))?,
            qk_rope_head_dim: positive("qk_rope_head_dim", raw.qk_rope_head_dim, Some(64))?,
            v_head_dim: positive("v_head_dim", raw.v_head_dim, Some(128))?,
            topk_method,
            n_group,
            topk_group: positive(
                "topk_group",
                // The reference's default, of which a model with fewer groups can only have all.
                groups(raw.topk_group, if v3 { n_group.min(4) } else { n_group }),
                None,
            )?,
            norm_topk_prob: raw.norm_topk_prob.unwrap_or(v3),
            routed_scaling_factor: raw.routed_scaling_factor.unwrap_or(if v3 { 2.5 } else { 1.0 }),
            rms_norm_eps: raw.rms_norm_eps.unwrap_or(1e-6),
            max_position_embeddings: positive("max_position_embeddings", raw.max_position_embeddings, None)?,
            rope,
            attention_bias: raw.attention_bias.unwrap_or(false),
            tie_word_embeddings: raw.tie_word_embeddings.unwrap_or(false),
            bos_token_id: raw.bos_token_id,
            eos_token_id: raw.eos_token_id.map(Vec::from).unwrap_or_default(),
            torch_dtype: raw.torch_dtype.or(raw.dtype),
            quantisation: quantisation.map(Quantisation::read).transpose()?,
            hash,
        };
        config.check_together()?;
        Ok(config)
    }

    /// Values that are fine by themselves and impossible together.
    fn check_together(&self) -> Result<(), LoadError> {
        if self.qk_rope_head_dim % 2 != 0 {
            let supported = "an even number: positions rotate pairs";
            return Err(LoadError::unsupported("qk_rope_head_dim", self.qk_rope_head_dim, supported));
        }
        let finite_positive = |key, value: f64| match value.is_finite() && value > 0.0 {
            true => Ok(()),
            false => Err(LoadError::unsupported(key, value, "a positive number")),
        };
        finite_positive("routed_scaling_factor", self.routed_scaling_factor)?;
        finite_positive("rms_norm_eps", self.rms_norm_eps)?;
        if self.n_routed_experts == 0 {
            return Ok(());
        }
        let (experts, chosen) = (self.n_routed_experts, self.num_experts_per_tok);
        if chosen > experts {
            let supported = format!("at most `n_routed_experts` ({experts})");
            return Err(LoadError::unsupported("num_experts_per_tok", chosen, supported));
        }
        if self.topk_method == TopkMethod::Greedy {
            return Ok(());
        }
        if experts % self.n_group != 0 {
            let supported = format!("a divisor of `n_routed_experts` ({experts})");
            return Err(LoadError::unsupported("n_group", self.n_group, supported));
        }
        let group = experts / self.n_group;
        if self.topk_group > self.n_group || self.topk_group * group < chosen {
            let supported = format!(
                "at most `n_group` ({}), and enough groups of {group} experts for `num_experts_per_tok` ({chosen})",
                self.n_group
            );
            return Err(LoadError::unsupported("topk_group", self.topk_group, supported));
        }
        if self.topk_method == TopkMethod::NoauxTc && self.n_group > 1 && group < 2 {
            let supported = "groups of two or more experts: a group scores the sum of its best two";
            return Err(LoadError::unsupported("n_group", self.n_group, supported));
        }
        Ok(())
    }
}

/// The largest size or count a config may hold: products of two of them still fit an `i64`.
const LARGEST: i64 = i32::MAX as i64;

fn positive(key: &str, value: Option<i64>, default: Option<i64>) -> Result<i64, LoadError> {
    let value = value.or(default).ok_or_else(|| LoadError::MissingKey {
        key: key.to_owned(),
        needed: "it is a size of the model and has no default".to_owned(),
    })?;
    match (1..=LARGEST).contains(&value) {
        true => Ok(value),
        false => Err(LoadError::unsupported(key, value, format!("1 to {LARGEST}"))),
    }
}

fn natural(key: &str, value: Option<i64>, default: i64) -> Result<i64, LoadError> {
    match value.unwrap_or(default) {
        0 => Ok(0),
        value => positive(key, Some(value), None),
    }
}

fn hex(bytes: &[u8]) -> String {
    use fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}"); // writing to a string cannot fail
        text
    })
}

#[cfg(test)]
mod tests;
