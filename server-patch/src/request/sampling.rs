//! `sampling_params`: what this server does with each of SGLang's keys.

use std::collections::HashMap;
use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::ids::IntListSeed;
use super::{Strings, StringsSeed};
use crate::error::ApiError;
use crate::json::Scalar;
use crate::sampling::SamplingParams;

/// SGLang's default.
const MAX_NEW_TOKENS: usize = 128;
/// Below this SGLang, too, takes the best token.
const GREEDY: f64 = 1e-6;
/// More than a context has room for makes no sense and would only cost memory.
const MAX_STOP_TOKENS: usize = 1024;
/// As in SGLang.
const MAX_STOP_STRINGS: usize = 32;
/// Bytes of one of them: the end of a text is looked at with each token, as far back as one can reach.
const MAX_STOP_BYTES: usize = 1024;
/// Samples of one prompt.
const MAX_SAMPLES: usize = 128;

/// How one prompt is continued.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Most tokens to generate; 0 runs the prompt only.
    pub max_new_tokens: NewTokens,
    /// Go on after an end-of-sequence token.
    pub ignore_eos: bool,
    /// Tokens that end the text besides the model's own.
    pub stop_token_ids: Vec<i64>,
    /// Leave special tokens out of the text.
    pub skip_special_tokens: bool,
    /// Strings that end the text.
    pub stop: Vec<String>,
    /// Leave what ended the text in it.
    pub no_stop_trim: bool,
    /// Samples of the prompt.
    pub n: usize,
    /// How tokens are chosen.
    pub params: SamplingParams,
}

/// How many tokens a request wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewTokens {
    /// Not said: SGLang's 128, or fewer where the context ends before.
    Default,
    /// An explicit null: up to the end of the context.
    ToContext,
    /// This many, which must fit.
    Exactly(usize),
}

impl NewTokens {
    /// The number for a prompt of `prompt` tokens in a context of `context`.
    pub(crate) fn resolve(self, prompt: usize, context: usize) -> usize {
        let room = context.saturating_sub(prompt);
        match self {
            Self::Default => MAX_NEW_TOKENS.min(room),
            Self::ToContext => room,
            Self::Exactly(count) => count,
        }
    }
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            max_new_tokens: NewTokens::Default,
            ignore_eos: false,
            stop_token_ids: Vec::new(),
            skip_special_tokens: true,
            stop: Vec::new(),
            no_stop_trim: false,
            n: 1,
            params: SamplingParams { temperature: 1.0, ..SamplingParams::default() },
        }
    }
}

/// The keys as sent, before they are judged together.
#[derive(Clone, Debug, Default)]
pub(crate) struct RawSampling {
    max_new_tokens: Option<Option<i64>>,
    temperature: Option<f64>,
    top_k: Option<i64>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    frequency_penalty: Option<f64>,
    presence_penalty: Option<f64>,
    repetition_penalty: Option<f64>,
    min_new_tokens: Option<i64>,
    logit_bias: Vec<(i64, f64)>,
    sampling_seed: Option<i64>,
    ignore_eos: bool,
    skip_special_tokens: Option<bool>,
    stop_token_ids: Vec<i64>,
    stop: Vec<String>,
    no_stop_trim: bool,
    n: Option<i64>,
}

/// The field of a request.
#[derive(Clone, Debug)]
pub(crate) enum SamplingFields {
    One(Box<RawSampling>),
    Many(Vec<RawSampling>),
}

impl Default for SamplingFields {
    fn default() -> Self {
        Self::One(Box::default())
    }
}

/// Keys that SGLang has and this server does not, with the value that asks for nothing.
const UNSUPPORTED: [(&str, &str); 10] = [
    ("spaces_between_special_tokens", "true"),
    ("stop_regex", "null"),
    ("json_schema", "null"),
    ("regex", "null"),
    ("ebnf", "null"),
    ("structural_tag", "null"),
    ("stream_interval", "null"),
    ("custom_params", "null"),
    ("beam_width", "null"),
    ("watermark", "null"),
];

const SUPPORTED: &str = "max_new_tokens, min_new_tokens, n, stop, no_stop_trim, temperature, top_k, top_p, min_p, frequency_penalty, \
                         presence_penalty, repetition_penalty, logit_bias, ignore_eos, stop_token_ids, \
                         skip_special_tokens, sampling_seed";

impl RawSampling {
    fn set<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error> {
        let name = format!("sampling_params.{key}");
        if key == "stop_token_ids" {
            let seed =
                IntListSeed { name: "sampling_params.stop_token_ids", accepted: "a token ID, an integer," };
            self.stop_token_ids = map.next_value_seed(seed)?.unwrap_or_default();
            return Ok(());
        }
        if key == "stop" {
            let strings = map.next_value_seed(StringsSeed { name: "sampling_params.stop" })?;
            self.stop = match strings {
                None => Vec::new(),
                Some(Strings::One(string)) => vec![string],
                Some(Strings::Many(strings)) => strings,
            };
            return Ok(());
        }
        if key == "logit_bias" {
            let biases: Option<HashMap<String, f64>> = map.next_value()?;
            let bias = |(token, bias): (String, f64)| match token.parse() {
                Ok(token) => Ok((token, bias)),
                Err(_) => Err(A::Error::custom(format_args!(
                    "`{name}` has the key {token:?}; a token ID as text, such as \"42\", is expected"
                ))),
            };
            self.logit_bias = biases.unwrap_or_default().into_iter().map(bias).collect::<Result<_, _>>()?;
            return Ok(());
        }
        let value: Scalar = map.next_value()?;
        match key {
            "max_new_tokens" => self.max_new_tokens = Some(value.int(&name)?),
            "temperature" => self.temperature = value.number(&name)?,
            "top_k" => self.top_k = value.int(&name)?,
            "top_p" => self.top_p = value.number(&name)?,
            "min_p" => self.min_p = value.number(&name)?,
            "ignore_eos" => self.ignore_eos = value.bool(&name)?.unwrap_or_default(),
            "skip_special_tokens" => self.skip_special_tokens = value.bool(&name)?,
            "frequency_penalty" => self.frequency_penalty = value.number(&name)?,
            "presence_penalty" => self.presence_penalty = value.number(&name)?,
            "repetition_penalty" => self.repetition_penalty = value.number(&name)?,
            "min_new_tokens" => self.min_new_tokens = value.int(&name)?,
            "n" => self.n = value.int(&name)?,
            "no_stop_trim" => self.no_stop_trim = value.bool(&name)?.unwrap_or_default(),
            "sampling_seed" => self.sampling_seed = value.int(&name)?,
            _ => match UNSUPPORTED.iter().find(|(known, _)| *known == key) {
                Some((_, neutral)) if asks_for_nothing(&value, neutral) => {}
                Some((_, neutral)) => {
                    return Err(A::Error::custom(format_args!(
                        "`{name}` is {value}; this server does not implement it and accepts only {neutral}"
                    )));
                }
                None => {
                    return Err(A::Error::custom(format_args!(
                        "`{name}` is unknown; {SUPPORTED} are accepted"
                    )));
                }
            },
        }
        Ok(())
    }

    /// Judges the keys together; `name` is that of the object in messages.
    pub(crate) fn check(self, name: &str) -> Result<Sampling, ApiError> {
        let refuse = |key: &str, value: &dyn fmt::Display, accepted: &str| {
            Err(ApiError::Invalid(format!("`{name}.{key}` is {value}; {accepted}")))
        };
        let max_new_tokens = match self.max_new_tokens {
            None => NewTokens::Default,
            Some(None) => NewTokens::ToContext,
            Some(Some(count)) => match usize::try_from(count) {
                Ok(count) => NewTokens::Exactly(count),
                Err(_) => return refuse("max_new_tokens", &count, "0 or more is accepted"),
            },
        };
        if let Some(temperature) = self.temperature.filter(|t| !(t.is_finite() && *t >= 0.0)) {
            return refuse("temperature", &temperature, "a finite number from 0 is accepted");
        }
        if let Some(top_k) = self.top_k.filter(|k| *k != -1 && *k < 1) {
            return refuse("top_k", &top_k, "-1 (all) or 1 and more is accepted");
        }
        if let Some(top_p) = self.top_p.filter(|p| !(*p > 0.0 && *p <= 1.0)) {
            return refuse("top_p", &top_p, "a number above 0 and up to 1 is accepted");
        }
        if let Some(min_p) = self.min_p.filter(|p| !(0.0..=1.0).contains(p)) {
            return refuse("min_p", &min_p, "a number from 0 to 1 is accepted");
        }
        let penalties =
            [("frequency_penalty", self.frequency_penalty), ("presence_penalty", self.presence_penalty)];
        for (key, value) in penalties {
            if let Some(value) = value.filter(|value| !(-2.0..=2.0).contains(value)) {
                return refuse(key, &value, "a number from -2 to 2 is accepted");
            }
        }
        if let Some(value) = self.repetition_penalty.filter(|value| !(*value > 0.0 && *value <= 2.0)) {
            return refuse("repetition_penalty", &value, "a number above 0 and up to 2 is accepted");
        }
        let min_new_tokens = match usize::try_from(self.min_new_tokens.unwrap_or(0)) {
            Ok(count) => count,
            Err(_) => {
                return refuse("min_new_tokens", &self.min_new_tokens.unwrap_or(0), "0 or more is accepted");
            }
        };
        let most = match max_new_tokens {
            NewTokens::Default => MAX_NEW_TOKENS,
            NewTokens::ToContext => usize::MAX,
            NewTokens::Exactly(count) => count,
        };
        if min_new_tokens > most {
            let accepted = format!("it must be in [0, max_new_tokens({most})]");
            return refuse("min_new_tokens", &min_new_tokens, &accepted);
        }
        let temperature = self.temperature.unwrap_or(1.0);
        let params = SamplingParams {
            temperature: if temperature < GREEDY { 0.0 } else { temperature },
            top_k: self.top_k.filter(|k| *k != -1).and_then(|k| usize::try_from(k).ok()),
            top_p: self.top_p.unwrap_or(1.0),
            min_p: self.min_p.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            repetition_penalty: self.repetition_penalty.unwrap_or(1.0),
            min_new_tokens,
            logit_bias: self.logit_bias,
            seed: self.sampling_seed,
        };
        if self.stop_token_ids.len() > MAX_STOP_TOKENS {
            let count = format!("a list of {}", self.stop_token_ids.len());
            return refuse("stop_token_ids", &count, &format!("up to {MAX_STOP_TOKENS} are accepted"));
        }
        if self.stop.len() > MAX_STOP_STRINGS {
            let count = format!("a list of {}", self.stop.len());
            return refuse("stop", &count, &format!("up to {MAX_STOP_STRINGS} strings are accepted"));
        }
        if let Some(string) = self.stop.iter().find(|string| string.len() > MAX_STOP_BYTES) {
            let found = format!("a string of {} bytes", string.len());
            return refuse("stop", &found, &format!("up to {MAX_STOP_BYTES} bytes each are accepted"));
        }
        // As in SGLang, 0 is 1.
        let n = match self.n.map_or(Ok(1), usize::try_from) {
            Ok(n) if n <= MAX_SAMPLES => n.max(1),
            _ => {
                let accepted = format!("a number from 1 to {MAX_SAMPLES} is accepted");
                return refuse("n", &self.n.unwrap_or_default(), &accepted);
            }
        };
        Ok(Sampling {
            stop: self.stop.into_iter().filter(|string| !string.is_empty()).collect(),
            no_stop_trim: self.no_stop_trim,
            n,
            max_new_tokens,
            ignore_eos: self.ignore_eos,
            stop_token_ids: self.stop_token_ids,
            skip_special_tokens: self.skip_special_tokens.unwrap_or(true),
            params,
        })
    }
}

/// Whether `value` is null, empty, or the `neutral` value of its key.
pub(crate) fn asks_for_nothing(value: &Scalar, neutral: &str) -> bool {
    let same = match value {
        Scalar::Bool(value) => value.to_string() == neutral,
        Scalar::Int(value) => value.to_string() == neutral,
        Scalar::Float(value) => neutral.parse() == Ok(*value),
        Scalar::Text(text) => text.is_empty(),
        _ => false,
    };
    same || value.is_nothing()
}

struct FieldsVisitor {
    row: Option<usize>,
}

impl FieldsVisitor {
    fn refuse<E: Error>(&self, found: &Scalar) -> E {
        match self.row {
            Some(row) => found.refused(&format!("sampling_params[{row}]"), "an object"),
            None => found.refused("sampling_params", "an object, or for a batch a list of objects,"),
        }
    }
}

impl<'de> Deserialize<'de> for SamplingFields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FieldsVisitor { row: None })
    }
}

impl<'de> DeserializeSeed<'de> for FieldsVisitor {
    type Value = SamplingFields;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<SamplingFields, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = SamplingFields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("`sampling_params` as an object")
    }

    fn visit_unit<E: Error>(self) -> Result<SamplingFields, E> {
        Ok(SamplingFields::default())
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<SamplingFields, E> {
        Err(self.refuse(&Scalar::Bool(value)))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<SamplingFields, E> {
        Err(self.refuse(&Scalar::Int(value)))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<SamplingFields, E> {
        Err(self.refuse(&Scalar::Huge(value)))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<SamplingFields, E> {
        Err(self.refuse(&Scalar::Float(value)))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<SamplingFields, E> {
        Err(self.refuse(&Scalar::Text(value.to_owned())))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<SamplingFields, A::Error> {
        let mut raw = RawSampling::default();
        let mut seen: Vec<String> = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
            if seen.contains(&key) {
                return Err(A::Error::custom(format_args!("`sampling_params.{key}` is given twice")));
            }
            raw.set(&key, &mut map)?;
            seen.push(key);
        }
        Ok(SamplingFields::One(Box::new(raw)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<SamplingFields, A::Error> {
        if self.row.is_some() {
            return Err(self.refuse(&Scalar::List { empty: false }));
        }
        let mut rows = Vec::new();
        while let Some(fields) = seq.next_element_seed(FieldsVisitor { row: Some(rows.len()) })? {
            match fields {
                SamplingFields::One(raw) => rows.push(*raw),
                SamplingFields::Many(_) => unreachable!("a list inside the list is refused"),
            }
        }
        Ok(SamplingFields::Many(rows))
    }
}
