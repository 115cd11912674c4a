//! The rotary embedding's part of `config.json`, in both spellings.

use serde_json::{Map, Value};

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
        let mut keys = Keys { name, object, seen: Vec::new() };
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
        let yarn = match kind.or(older).as_deref() {
            None | Some("default") => None,
            Some("yarn") => Some(keys.yarn(raw)?),
            Some(other) => return Err(keys.refuse("rope_type", other, "default and yarn")),
        };
        keys.refuse_the_rest()?;
        Ok(Self { theta, yarn })
    }
}

/// What the reference's config classes assume.
const DEFAULT_THETA: f64 = 10_000.0;

fn positive(key: &str, value: f64) -> Result<f64, LoadError> {
    match value.is_finite() && value > 0.0 {
        true => Ok(value),
        false => Err(LoadError::unsupported(key, value, "a positive number")),
    }
}

/// A JSON object read key by key, so that what was not read can be refused.
struct Keys<'a> {
    name: &'a str,
    object: &'a Map<String, Value>,
    seen: Vec<&'static str>,
}

impl Keys<'_> {
    fn yarn(&mut self, raw: &RawConfig) -> Result<Yarn, LoadError> {
        let original = self.positive("original_max_position_embeddings")?;
        let original = original.ok_or_else(|| self.missing("original_max_position_embeddings"))?;
        // A null factor is the ratio of the two lengths, as in transformers.
        let factor = match (self.positive("factor")?, raw.max_position_embeddings) {
            (Some(factor), _) => factor,
            (None, Some(positions)) if self.object.contains_key("factor") => positions as f64 / original,
            (None, _) => return Err(self.missing("factor")),
        };
        let weight = |value: Option<f64>, default| value.unwrap_or(default);
        let yarn = Yarn {
            factor,
            original_max_position_embeddings: original,
            beta_fast: self.positive("beta_fast")?.unwrap_or(32.0),
            beta_slow: self.positive("beta_slow")?.unwrap_or(1.0),
            mscale: weight(self.number("mscale")?, 1.0),
            mscale_all_dim: weight(self.number("mscale_all_dim")?, 0.0),
            attention_factor: self.positive("attention_factor")?,
            truncate: self.flag("truncate")?.unwrap_or(true),
        };
        for (key, value) in [("mscale", yarn.mscale), ("mscale_all_dim", yarn.mscale_all_dim)] {
            if !(value.is_finite() && value >= 0.0) {
                return Err(self.refuse(key, value, "a number that is not negative"));
            }
        }
        Ok(yarn)
    }

    fn get(&mut self, key: &'static str) -> Option<&Value> {
        self.seen.push(key);
        self.object.get(key).filter(|value| !value.is_null())
    }

    fn number(&mut self, key: &'static str) -> Result<Option<f64>, LoadError> {
        let Some(value) = self.get(key).cloned() else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| self.refuse(key, &value, "a number"))
    }

    fn positive(&mut self, key: &'static str) -> Result<Option<f64>, LoadError> {
        let path = self.path(key);
        self.number(key)?.map(|value| positive(&path, value)).transpose()
    }

    fn text(&mut self, key: &'static str) -> Result<Option<String>, LoadError> {
        let Some(value) = self.get(key).cloned() else { return Ok(None) };
        value.as_str().map(|text| Some(text.to_owned())).ok_or_else(|| self.refuse(key, &value, "a string"))
    }

    fn flag(&mut self, key: &'static str) -> Result<Option<bool>, LoadError> {
        let Some(value) = self.get(key).cloned() else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.refuse(key, &value, "true and false"))
    }

    /// A key that was not read may mean something: `factor` without `rope_type`, say, is not plain rope.
    fn refuse_the_rest(&self) -> Result<(), LoadError> {
        let unread =
            |(key, value): &(&String, &Value)| !self.seen.contains(&key.as_str()) && !value.is_null();
        match self.object.iter().find(unread) {
            Some((key, value)) => {
                let supported = "no such key with `rope_type` default, and no others than YaRN's with yarn";
                Err(self.refuse(key, shortened(value), supported))
            }
            None => Ok(()),
        }
    }

    fn path(&self, key: &str) -> String {
        format!("{}.{key}", self.name)
    }

    fn refuse(&self, key: &str, value: impl ToString, supported: impl ToString) -> LoadError {
        LoadError::unsupported(&self.path(key), value, supported)
    }

    fn missing(&self, key: &str) -> LoadError {
        LoadError::MissingKey { key: self.path(key), needed: "YaRN cannot do without it".to_owned() }
    }
}
