//! One line of the data set to one sample.

use serde::{Deserialize, Deserializer, de};

use super::Sample;

/// Why a line is not a sample.
#[derive(Debug)]
pub(super) struct BadLine {
    pub(super) id: Option<String>,
    pub(super) reason: String,
}

#[derive(Deserialize)]
struct Raw {
    #[serde(default, deserialize_with = "id")]
    id: Option<String>,
    input_ids: Option<Vec<i64>>,
    loss_mask: Option<Vec<MaskBit>>,
}

/// A place in a loss mask: 0, 1, `false` or `true`.
struct MaskBit(i64);

impl<'de> Deserialize<'de> for MaskBit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = MaskBit;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("0, 1, false or true in `loss_mask`")
            }
            fn visit_bool<E: de::Error>(self, value: bool) -> Result<MaskBit, E> {
                Ok(MaskBit(i64::from(value)))
            }
            fn visit_u64<E: de::Error>(self, value: u64) -> Result<MaskBit, E> {
                match value {
                    0 => Ok(MaskBit(0)),
                    1 => Ok(MaskBit(1)),
                    _ => Err(E::invalid_value(de::Unexpected::Unsigned(value), &self)),
                }
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

/// A text, or a number kept as its text.
fn id<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "`id` must be a text or a number")]
    enum Id {
        Text(String),
        Number(serde_json::Number),
    }
    Ok(Option::<Id>::deserialize(deserializer)?.map(|id| match id {
        Id::Text(text) => text,
        Id::Number(number) => number.to_string(),
    }))
}

/// The sample that `text` holds.
pub(super) fn sample(text: &[u8]) -> Result<Sample, BadLine> {
    let raw: Raw = serde_json::from_slice(text).map_err(|error| {
        // serde_json counts lines inside `text`, of which there is one.
        let reason = error.to_string();
        let reason = reason.rsplit_once(" at line ").map_or(reason.as_str(), |(reason, _)| reason);
        BadLine { id: None, reason: format!("{reason} (column {})", error.column()) }
    })?;
    let bad = |reason: String| BadLine { id: raw.id.clone(), reason };
    let Some(input_ids) = raw.input_ids else {
        return Err(bad("`input_ids` is missing".into()));
    };
    if input_ids.is_empty() {
        return Err(bad("`input_ids` is empty".into()));
    }
    if let Some((at, id)) = input_ids.iter().enumerate().find(|(_, id)| **id < 0) {
        return Err(bad(format!("`input_ids[{at}]` is {id}; a token ID is not negative")));
    }
    let loss_mask: Vec<i64> = match raw.loss_mask {
        Some(mask) => mask.into_iter().map(|bit| bit.0).collect(),
        None => vec![1; input_ids.len()],
    };
    if loss_mask.len() != input_ids.len() {
        let (mask, ids) = (loss_mask.len(), input_ids.len());
        return Err(bad(format!("`loss_mask` has {mask} places, `input_ids` has {ids}")));
    }
    Ok(Sample { id: raw.id, input_ids, loss_mask })
}
