//! The body of `/generate`: read into types, with the shapes of its fields checked against each other.

mod capture;
mod ids;
mod logprobs;
mod sampling;

use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, Visitor};

pub use capture::{Axis, CaptureField, CaptureOptions};
pub use logprobs::LogprobRequest;
pub use sampling::{NewTokens, Sampling};

use crate::error::ApiError;
use crate::json::Scalar;
use capture::CaptureFields;
use ids::{InputIds, InputIdsSeed};
use logprobs::LogprobFields;
use sampling::{SamplingFields, asks_for_nothing};

/// A call of `/generate`, one entry of each list per prompt.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// Whether the reply is a list. `[[1, 2]]` is a batch of one.
    pub batch: bool,
    /// The prompts in order.
    pub prompts: Vec<PromptRequest>,
    /// Whether the reply repeats each prompt's token IDs.
    pub return_prompt_token_ids: bool,
    /// Whether the reply comes event by event.
    pub stream: bool,
}

/// One prompt of a call.
#[derive(Clone, Debug)]
pub struct PromptRequest {
    /// What to run.
    pub prompt: Prompt,
    /// The client's name for it.
    pub rid: Option<String>,
    /// What it says about its capture.
    pub capture: Option<CaptureField>,
    /// How to continue it.
    pub sampling: Sampling,
    /// Which log-probabilities to give.
    pub logprobs: Option<LogprobRequest>,
}

/// What a prompt is given as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Token IDs, not yet checked against the vocabulary.
    Ids(Vec<i64>),
    /// Text for the server's tokenizer.
    Text(String),
}

impl GenerateRequest {
    /// Reads a body. `vocab_size` only completes the messages; IDs are checked later.
    ///
    /// # Errors
    /// [`ApiError::NotJson`], [`ApiError::WrongType`] or [`ApiError::Invalid`].
    pub fn parse(body: &[u8], vocab_size: i64) -> Result<Self, ApiError> {
        let mut deserializer = serde_json::Deserializer::from_slice(body);
        let fields = BodySeed { vocab_size }.deserialize(&mut deserializer)?;
        deserializer.end()?;
        fields.check()
    }
}

/// Fields of SGLang's `/generate` that this server does not have, with the value that asks for nothing. What only tunes
/// a prefix cache (`extra_key`, `cache_salt`) or a log is left out: without one it has no effect to leave undone.
const UNSUPPORTED: [(&str, &str); 35] = [
    ("return_flat_raw_top_logprobs", "false"),
    ("return_flat_raw_output_top_logprobs", "false"),
    ("return_flat_raw_top_logprobs_b64", "false"),
    ("return_hidden_states", "false"),
    ("return_routed_experts", "false"),
    ("return_indexer_topk", "false"),
    ("return_sampling_mask", "false"),
    ("return_entropy", "false"),
    ("return_bytes", "false"),
    ("input_embeds", "null"),
    ("image_data", "null"),
    ("video_data", "null"),
    ("audio_data", "null"),
    ("modalities", "null"),
    ("mm_hashes", "null"),
    ("mm_content_hashes", "null"),
    ("lora_path", "null"),
    ("custom_logit_processor", "null"),
    ("session_id", "null"),
    ("session_params", "null"),
    ("priority", "null"),
    ("routed_dp_rank", "null"),
    ("data_parallel_rank", "null"),
    ("disagg_prefill_dp_rank", "null"),
    ("bootstrap_host", "null"),
    ("bootstrap_port", "null"),
    ("bootstrap_room", "null"),
    ("bootstrap_pair_key", "null"),
    ("decode_tp_size", "null"),
    ("require_reasoning", "false"),
    ("max_thinking_tokens", "null"),
    ("kv_hints", "null"),
    ("kv_transfer_params", "null"),
    ("watermark", "null"),
    ("background", "false"),
];

/// One string, or one a prompt.
#[derive(Clone, Debug)]
enum Strings {
    One(String),
    Many(Vec<String>),
}

#[derive(Debug)]
struct Body {
    rid: Option<Strings>,
    text: Option<Strings>,
    input_ids: Option<InputIds>,
    sampling_params: SamplingFields,
    capture: CaptureFields,
    logprobs: LogprobFields,
    return_prompt_token_ids: bool,
    stream: bool,
}

struct BodySeed {
    vocab_size: i64,
}

impl<'de> DeserializeSeed<'de> for BodySeed {
    type Value = Body;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Body, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for BodySeed {
    type Value = Body;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Body, A::Error> {
        let mut body = Body {
            rid: None,
            text: None,
            input_ids: None,
            sampling_params: SamplingFields::default(),
            capture: CaptureFields::Absent,
            logprobs: LogprobFields::default(),
            return_prompt_token_ids: false,
            stream: false,
        };
        const KNOWN: [&str; 12] = [
            "rid",
            "text",
            "input_ids",
            "sampling_params",
            "capture",
            "return_logprob",
            "logprob_start_len",
            "top_logprobs_num",
            "token_ids_logprob",
            "return_text_in_logprobs",
            "return_prompt_token_ids",
            "stream",
        ];
        let mut seen = [false; KNOWN.len()];
        while let Some(key) = map.next_key::<String>()? {
            // Readers of JSON disagree on which of two equal keys counts, so a second one is never obeyed: of two
            // rids one would be the proxy's and the other not.
            if let Some(known) = KNOWN.iter().position(|known| *known == key)
                && std::mem::replace(&mut seen[known], true)
            {
                return Err(A::Error::custom(format_args!(
                    "the key `{key}` is given twice; once is accepted"
                )));
            }
            match key.as_str() {
                "rid" => body.rid = map.next_value_seed(StringsSeed { name: "rid" })?,
                "text" => body.text = map.next_value_seed(StringsSeed { name: "text" })?,
                "input_ids" => {
                    body.input_ids = map.next_value_seed(InputIdsSeed { vocab_size: self.vocab_size })?;
                }
                "sampling_params" => body.sampling_params = map.next_value()?,
                "capture" => body.capture = map.next_value()?,
                "return_logprob" => body.logprobs.wanted = map.next_value()?,
                "logprob_start_len" => body.logprobs.start = map.next_value()?,
                "top_logprobs_num" => body.logprobs.top = map.next_value()?,
                "token_ids_logprob" => body.logprobs.token_ids = map.next_value()?,
                "stream" => body.stream = map.next_value::<Scalar>()?.bool(&key)?.unwrap_or_default(),
                "return_text_in_logprobs" => {
                    body.logprobs.text = map.next_value::<Scalar>()?.bool(&key)?.unwrap_or_default();
                }
                "return_prompt_token_ids" => {
                    body.return_prompt_token_ids =
                        map.next_value::<Scalar>()?.bool(&key)?.unwrap_or_default();
                }
                _ => {
                    let value: Scalar = map.next_value()?;
                    if let Some((_, neutral)) = UNSUPPORTED.iter().find(|(known, _)| *known == key)
                        && !asks_for_nothing(&value, neutral)
                    {
                        return Err(A::Error::custom(format_args!(
                            "`{key}` is {value}; this server does not implement it and accepts only {neutral}"
                        )));
                    }
                }
            }
        }
        Ok(body)
    }
}

impl Body {
    /// Brings every field to one entry per prompt.
    fn check(self) -> Result<GenerateRequest, ApiError> {
        let invalid = |text: String| Err(ApiError::Invalid(text));
        let (batch, prompts) = prompts(self.text, self.input_ids)?;
        let count = prompts.len();
        let length = |name: &str, found: usize| {
            invalid(format!(
                "`{name}` is a list of {found} for a batch of {count} prompts; one each is expected"
            ))
        };
        let single = |name: &str| {
            invalid(format!(
                "`{name}` is a list, but there is a single prompt; lists go with a list of prompts"
            ))
        };
        let rids: Vec<Option<String>> = match self.rid {
            None => vec![None; count],
            Some(Strings::One(rid)) if !batch => vec![Some(rid)],
            Some(Strings::One(rid)) if rid.parse::<tether_dump::RequestId>().is_ok() => {
                return invalid(format!(
                    "`rid` is the single request ID {rid} for a batch of {count}; a list with one ID a prompt is expected"
                ));
            }
            // As SGLang does.
            Some(Strings::One(rid)) => (0..count).map(|index| Some(format!("{rid}_{index}"))).collect(),
            Some(Strings::Many(_)) if !batch => return single("rid"),
            Some(Strings::Many(rids)) if rids.len() != count => return length("rid", rids.len()),
            Some(Strings::Many(rids)) => rids.into_iter().map(Some).collect(),
        };
        let captures = match self.capture {
            CaptureFields::Absent => vec![None; count],
            CaptureFields::One(field) => vec![Some(field); count],
            CaptureFields::Many(_) if !batch => return single("capture"),
            CaptureFields::Many(fields) if fields.len() != count => return length("capture", fields.len()),
            CaptureFields::Many(fields) => fields,
        };
        let samplings = match self.sampling_params {
            SamplingFields::One(raw) => vec![raw.check("sampling_params")?; count],
            SamplingFields::Many(_) if !batch => return single("sampling_params"),
            SamplingFields::Many(rows) if rows.len() != count => {
                return length("sampling_params", rows.len());
            }
            SamplingFields::Many(rows) => {
                let rows = rows.into_iter().enumerate();
                rows.map(|(row, raw)| raw.check(&format!("sampling_params[{row}]")))
                    .collect::<Result<_, _>>()?
            }
        };
        let logprobs = self.logprobs.check(batch, count)?;
        let prompts = prompts.into_iter().zip(rids).zip(captures).zip(samplings).zip(logprobs);
        let prompts: Vec<PromptRequest> = prompts
            .map(|((((prompt, rid), capture), sampling), logprobs)| PromptRequest {
                prompt,
                rid,
                capture,
                sampling,
                logprobs,
            })
            .collect();
        if let Some([one, other]) = prompts
            .windows(2)
            .map(|pair| [pair[0].sampling.n, pair[1].sampling.n])
            .find(|[one, other]| one != other)
        {
            return invalid(format!(
                "`sampling_params.n` is {one} and {other} in one batch; one number is expected"
            ));
        }
        let return_prompt_token_ids = self.return_prompt_token_ids;
        Ok(GenerateRequest { batch, prompts, return_prompt_token_ids, stream: self.stream })
    }
}

/// Whether it is a batch, and its prompts. Given both text and IDs, SGLang runs the IDs; so do we where they agree in shape.
fn prompts(text: Option<Strings>, ids: Option<InputIds>) -> Result<(bool, Vec<Prompt>), ApiError> {
    let text_count = match &text {
        None => None,
        Some(Strings::One(_)) => Some((false, 1)),
        Some(Strings::Many(texts)) => Some((true, texts.len())),
    };
    let (batch, prompts) = match (ids, text) {
        (None, None) => {
            return Err(ApiError::Invalid("either `text` or `input_ids` must be given".to_owned()));
        }
        (Some(InputIds::One(ids)), _) => (false, vec![Prompt::Ids(ids)]),
        (Some(InputIds::Many(rows)), _) => (true, rows.into_iter().map(Prompt::Ids).collect()),
        (None, Some(Strings::One(text))) => (false, vec![Prompt::Text(text)]),
        (None, Some(Strings::Many(texts))) => (true, texts.into_iter().map(Prompt::Text).collect()),
    };
    if text_count.is_some_and(|count| count != (batch, prompts.len())) {
        return Err(ApiError::Invalid(
            "`text` and `input_ids` are both given and differ in shape; one is enough".into(),
        ));
    }
    Ok((batch, prompts))
}

/// A string or a list of strings; null is `None`.
struct StringsSeed {
    name: &'static str,
}

impl<'de> DeserializeSeed<'de> for StringsSeed {
    type Value = Option<Strings>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl StringsSeed {
    fn refuse<E: Error>(&self, found: &Scalar) -> E {
        found.refused(self.name, "a string, or for a batch a list of strings,")
    }
}

impl<'de> Visitor<'de> for StringsSeed {
    type Value = Option<Strings>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` as a string", self.name)
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Self::Value, E> {
        Ok(Some(Strings::One(value.to_owned())))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Self::Value, E> {
        Err(self.refuse(&Scalar::Bool(value)))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Self::Value, E> {
        Err(self.refuse(&Scalar::Int(value)))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Self::Value, E> {
        Err(self.refuse(&Scalar::Huge(value)))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Self::Value, E> {
        Err(self.refuse(&Scalar::Float(value)))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        let object = Scalar::deserialize(serde::de::value::MapAccessDeserializer::new(map))?;
        Err(self.refuse(&object))
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut strings = Vec::new();
        while let Some(value) = seq.next_element::<Scalar>()? {
            match value {
                Scalar::Text(text) => strings.push(text),
                other => return Err(other.refused(&format!("{}[{}]", self.name, strings.len()), "a string")),
            }
        }
        Ok(Some(Strings::Many(strings)))
    }
}

#[cfg(test)]
mod tests;
