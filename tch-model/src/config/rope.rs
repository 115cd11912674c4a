//! The rotary embedding's part of `config.json`, in both spellings.

use serde_json::{Map, Value};

use super::keys::{Keys, positive};
use super::raw::{RawConfig, shortened};
use crate::LoadError;

/// Rotary embedding: the base and, with YaRN, its stretch.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the wavelengths.
    pub theta: f64,
    /// YaRN, if the context was stretched with it.
    pub yarn: Option<Yarn>,
}

/// YaRN: slow pairs are slowed down by `factor`, fast ones stay, those between are blended.
#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    /// How much longer the context became.
    pub factor: f64,
    /// Context length of the pretraining.
    pub original_max_position_embeddings: f64,
    /// Pairs that turn more often than this over the original context stay.
    pub beta_fast: f64,
    /// Pairs that turn less often than this are slowed by the whole factor.
    pub beta_slow: f64,
    /// Weight of the magnitude put on cosine and sine.
    pub mscale: f64,
    /// Weight of the magnitude taken off cosine and sine and, squared, put on the softmax scale instead; 0 for none.
    pub mscale_all_dim: f64,
    /// The magnitude of cosine and sine, where the config states it outright.
    pub attention_factor: Option<f64>,
    /// Whether the ends of the blend are rounded to whole pairs.
    pub truncate: bool,
}

/// `0.1 * weight * ln(factor) + 1`: how much the logits' temperature changes with the stretch.
pub(crate) fn magnitude(factor: f64, weight: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 }
}

impl Yarn {
    /// The magnitude of cosine and sine: `m(mscale) / m(mscale_all_dim)`, as in the authors' code. transformers takes
    /// `m(1)` when only one of the two is given.
    pub(crate) fn rotation_magnitude(&self) -> f64 {
        self.attention_factor.unwrap_or_else(|| {
            magnitude(self.factor, self.mscale) / magnitude(self.factor, self.mscale_all_dim)
        })
    }

    /// The factor on the softmax scale: `m(mscale_all_dim)²`, for queries and keys alike.
    pub(crate) fn softmax_factor(&self) -> f64 {
        magnitude(self.factor, self.mscale_all_dim).powi(2)
    }
}

impl RopeConfig {
    /// Published configs have `rope_theta` and `rope_scaling`; transformers 5 writes one `rope_parameters`. Where both are
    /// present they must agree.
    pub(super) fn check(raw: &RawConfig) -> Result<Self, LoadError> {
        let old = match &raw.rope_scaling {
            Some(scaling) => Some(Self::read("rope_scaling", scaling, raw)?),
            None => None,
        };
        let Some(parameters) = &raw.rope_parameters else {
            let theta = positive("rope_theta", raw.rope_theta.unwrap_or(DEFAULT_THETA))?;
            return Ok(old.unwrap_or(Self { theta, yarn: None }));
        };
        let new = Self::read("rope_parameters", parameters, raw)?;
        if raw.rope_theta.is_some_and(|theta| theta != new.theta) || old.is_some_and(|old| old != new) {
            let supported =
                "either `rope_parameters` or `rope_theta` and `rope_scaling`, or both saying the same";
            return Err(LoadError::unsupported(
                "rope_parameters",
                shortened(&parameters.clone().into()),
                supported,
            ));
        }
        Ok(new)
    }

    fn read(name: &str, object: &Map<String, Value>, raw: &RawConfig) -> Result<Self, LoadError> {
        let mut keys = Keys::new(name, object);
        // The older spelling is `type`; some configs carry both.
        let (kind, older) = (keys.text("rope_type")?, keys.text("type")?);
        if let (Some(kind), Some(older)) = (&kind, &older)
            && kind != older
        {
            return Err(keys.refuse("type", older, format!("the same as `rope_type` ({kind})")));
        }
        let theta = keys.number("rope_theta")?.or(raw.rope_theta).unwrap_or(DEFAULT_THETA);
        let theta = positive(&format!("{name}.rope_theta"), theta)?;
        if let Some(partial) = keys.number("partial_rotary_factor")?.filter(|&partial| partial != 1.0) {
            return Err(keys.refuse("partial_rotary_factor", partial, "1"));
        }
        let yarn = match kind.or(older) {
            None | Some("default") => None,
            Some("yarn") => Some(yarn(&mut keys, raw)?),
            Some(other) => return Err(keys.refuse("rope_type", other, "default and yarn")),
        };
        keys.refuse_the_rest("no such key with `rope_type` default, and no others than YaRN's with yarn")?;
        Ok(Self { theta, yarn })
    }
}

/// What the reference's config classes assume.
const DEFAULT_THETA: f64 = 10_000.0;

fn yarn(keys: &mut Keys<'_>, raw: &RawConfig) -> Result<Yarn, LoadError> {
    let original = keys.positive("original_max_position_embeddings")?;
    let original = original.ok_or_else(|| missing(keys, "original_max_position_embeddings"))?;
    // A null factor is the ratio of the two lengths, as in transformers.
    let factor = match (keys.positive("factor")?, raw.max_position_embeddings) {
        (Some(factor), _) => factor,
        (None, Some(positions)) if keys.contains("factor") => positions as f64 / original,
        (None, _) => return Err(missing(keys, "factor")),
    };
    let weight = |value: Option<f64>, default| value.unwrap_or(default);
    let yarn = Yarn {
        factor,
        original_max_position_embeddings: original,
        beta_fast: keys.positive("beta_fast")?.unwrap_or(32.0),
        beta_slow: keys.positive("beta_slow")?.unwrap_or(1.0),
        mscale: weight(keys.number("mscale")?, 1.0),
        mscale_all_dim: weight(keys.number("mscale_all_dim")?, 0.0),
        attention_factor: keys.positive("attention_factor")?,
        truncate: keys.flag("truncate")?.unwrap_or(true),
    };
    for (key, value) in [("mscale", yarn.mscale), ("mscale_all_dim", yarn.mscale_all_dim)] {
        if !(value.is_finite() && value >= 0.0) {
            return Err(keys.refuse(key, value, "a number that is not negative"));
        }
    }
    Ok(yarn)
}

fn missing(keys: &Keys<'_>, key: &str) -> LoadError {
    keys.missing(key, "YaRN cannot do without it")
}
