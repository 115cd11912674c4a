//! The `capture` field: which hidden states a request asks for, as the client wrote it.

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use std::fmt;
use std::str::FromStr;

use tether_dump::{FinalState, Rows};

use super::ids::IntListSeed;
use crate::json::Scalar;

/// What a request says about its capture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CaptureField {
    /// `true` or `false`.
    Switch(bool),
    /// An object; what it leaves out is the server's default.
    Options(CaptureOptions),
}

/// The object form.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CaptureOptions {
    /// Layer numbers on `axis`.
    pub points: Option<Vec<i64>>,
    /// How `points` counts.
    pub axis: Axis,
    /// Form of the last layer's output.
    pub final_state: Option<FinalState>,
    /// Positions covered.
    pub rows: Option<Rows>,
}

/// The two ways that engines and trainers count layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Axis {
    /// `i` is what enters layer `i`: `R[i]`.
    #[default]
    Input,
    /// `i` is what leaves layer `i`: `R[i + 1]`.
    Output,
}

impl FromStr for Axis {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "input" => Ok(Self::Input),
            "output" => Ok(Self::Output),
            _ => Err(format!("unknown axis `{text}`: expected `input` or `output`")),
        }
    }
}

/// The field of a request: absent or null, one for all prompts, or one a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CaptureFields {
    Absent,
    One(CaptureField),
    Many(Vec<Option<CaptureField>>),
}

const ACCEPTED: &str = "true, false or an object with `points`, `axis`, `final` and `rows`";

impl<'de> Deserialize<'de> for CaptureFields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FieldVisitor { row: None })
    }
}

/// `row`: which element of a list is being read; `None` at the top, where a list may stand.
struct FieldVisitor {
    row: Option<usize>,
}

impl FieldVisitor {
    fn name(&self) -> String {
        self.row.map_or_else(|| "capture".to_owned(), |row| format!("capture[{row}]"))
    }

    fn refuse<E: Error>(&self, found: &Scalar) -> E {
        found.refused(&self.name(), ACCEPTED)
    }
}

impl<'de> DeserializeSeed<'de> for FieldVisitor {
    type Value = CaptureFields;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<CaptureFields, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for FieldVisitor {
    type Value = CaptureFields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(ACCEPTED)
    }

    fn visit_unit<E: Error>(self) -> Result<CaptureFields, E> {
        Ok(CaptureFields::Absent)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<CaptureFields, E> {
        Ok(CaptureFields::One(CaptureField::Switch(value)))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<CaptureFields, E> {
        Err(self.refuse(&Scalar::Int(value)))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<CaptureFields, E> {
        Err(self.refuse(&Scalar::Huge(value)))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<CaptureFields, E> {
        Err(self.refuse(&Scalar::Float(value)))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<CaptureFields, E> {
        Err(self.refuse(&Scalar::Text(value.to_owned())))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<CaptureFields, A::Error> {
        options(&self.name(), map).map(|options| CaptureFields::One(CaptureField::Options(options)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<CaptureFields, A::Error> {
        if self.row.is_some() {
            return Err(self.refuse(&Scalar::List { empty: false }));
        }
        let mut fields = Vec::new();
        while let Some(field) = seq.next_element_seed(FieldVisitor { row: Some(fields.len()) })? {
            fields.push(match field {
                CaptureFields::One(field) => Some(field),
                CaptureFields::Absent => None,
                CaptureFields::Many(_) => unreachable!("a list inside the list is refused"),
            });
        }
        Ok(CaptureFields::Many(fields))
    }
}

fn options<'de, A: MapAccess<'de>>(name: &str, mut map: A) -> Result<CaptureOptions, A::Error> {
    let mut options = CaptureOptions::default();
    let mut seen: Vec<String> = Vec::new();
    while let Some(key) = map.next_key::<String>()? {
        if seen.contains(&key) {
            return Err(A::Error::custom(format_args!("`{name}.{key}` is given twice")));
        }
        let full = format!("{name}.{key}");
        match key.as_str() {
            "points" => {
                let accepted = "a layer number, an integer,";
                options.points = map.next_value_seed(IntListSeed { name: "capture.points", accepted })?;
            }
            "axis" => options.axis = named(&full, &map.next_value()?)?.unwrap_or_default(),
            "final" => options.final_state = named(&full, &map.next_value()?)?,
            "rows" => options.rows = named(&full, &map.next_value()?)?,
            "path" | "dir" | "hidden_states_path" => {
                return Err(A::Error::custom(format_args!(
                    "`{full}` is not accepted: a dump is named by its request ID, in the server's --dump-dir"
                )));
            }
            _ => {
                return Err(A::Error::custom(format_args!(
                    "`{full}` is unknown; `points`, `axis`, `final` and `rows` are accepted"
                )));
            }
        }
        seen.push(key);
    }
    Ok(options)
}

/// A value with named choices; null is the default.
fn named<T: FromStr<Err: fmt::Display>, E: Error>(name: &str, value: &Scalar) -> Result<Option<T>, E> {
    match value {
        Scalar::Null => Ok(None),
        Scalar::Text(text) => {
            text.parse().map(Some).map_err(|error| E::custom(format_args!("`{name}`: {error}")))
        }
        other => Err(other.refused(name, "a string")),
    }
}
