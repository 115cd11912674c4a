//! `input_ids`: up to millions of integers, read without an intermediate tree, each fault named by its index.

use std::fmt;

use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor,
};

use crate::json::{Scalar, clipped};

/// The field as the client sent it: the first element decides whether it is one prompt or a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum InputIds {
    /// A list of integers.
    One(Vec<i64>),
    /// A list of such lists.
    Many(Vec<Vec<i64>>),
}

/// Reads `input_ids`; null is `None`.
pub(crate) struct InputIdsSeed {
    /// For error messages: IDs from 0 to this less 1 are accepted.
    pub(crate) vocab_size: i64,
}

/// Reads a list of integers that are not token IDs of a prompt, such as `stop_token_ids`; null is `None`.
pub(crate) struct IntListSeed {
    pub(crate) name: &'static str,
    pub(crate) accepted: &'static str,
}

impl<'de> DeserializeSeed<'de> for InputIdsSeed {
    type Value = Option<InputIds>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        let accepted = format!("an integer from 0 to {}", self.vocab_size - 1);
        deserializer.deserialize_any(Outer { name: "input_ids", accepted: &accepted, nested: true })
    }
}

impl<'de> DeserializeSeed<'de> for IntListSeed {
    type Value = Option<Vec<i64>>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        let outer = Outer { name: self.name, accepted: self.accepted, nested: false };
        Ok(deserializer.deserialize_any(outer)?.map(|ids| match ids {
            InputIds::One(ids) => ids,
            InputIds::Many(_) => unreachable!("rows are refused where lists do not nest"),
        }))
    }
}

/// The whole field.
struct Outer<'a> {
    name: &'a str,
    accepted: &'a str,
    nested: bool,
}

impl Outer<'_> {
    fn refuse<E: Error>(&self, found: &Scalar) -> E {
        let lists = if self.nested { " or a list of such lists" } else { "" };
        E::custom(format_args!("`{}` is {found}; a list of integers{lists} is expected", self.name))
    }
}

impl<'de> Visitor<'de> for Outer<'_> {
    type Value = Option<InputIds>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` as a list of integers", self.name)
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
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

    fn visit_str<E: Error>(self, value: &str) -> Result<Self::Value, E> {
        Err(self.refuse(&Scalar::Text(clipped(value))))
    }

    fn visit_map<A: MapAccess<'de>>(self, _: A) -> Result<Self::Value, A::Error> {
        Err(self.refuse(&Scalar::Object { empty: false }))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let place = |index| Place { name: self.name, accepted: self.accepted, row: None, index };
        let element = |index, row| Element { place: place(index), row };
        let mut index = 0;
        let Some(first) = seq.next_element_seed(element(0, self.nested.then_some(true)))? else {
            return Ok(Some(InputIds::One(Vec::new())));
        };
        match first {
            Item::Id(id) => {
                let mut ids = vec![id];
                while let Some(item) = {
                    index += 1;
                    seq.next_element_seed(element(index, Some(false).filter(|_| self.nested)))?
                } {
                    let Item::Id(id) = item else { unreachable!("a row among integers is refused") };
                    ids.push(id);
                }
                Ok(Some(InputIds::One(ids)))
            }
            Item::Row(row) => {
                let mut rows = vec![row];
                while let Some(row) = {
                    index += 1;
                    seq.next_element_seed(Row { place: place(index) })?
                } {
                    rows.push(row);
                }
                Ok(Some(InputIds::Many(rows)))
            }
        }
    }
}

/// Where in the field a value stands.
#[derive(Clone, Copy)]
struct Place<'a> {
    name: &'a str,
    accepted: &'a str,
    row: Option<usize>,
    index: usize,
}

impl Place<'_> {
    fn refuse<E: Error>(&self, found: &Scalar, accepted: &str) -> E {
        let row = self.row.map(|row| format!("[{row}]")).unwrap_or_default();
        E::custom(format_args!("`{}{row}[{}]` is {found}; {accepted} is expected", self.name, self.index))
    }
}

enum Item {
    Id(i64),
    Row(Vec<i64>),
}

/// An element of the field. `row`: whether a list may stand here (only in first place of a field that nests); `None`
/// where lists do not nest at all.
struct Element<'a> {
    place: Place<'a>,
    row: Option<bool>,
}

impl Element<'_> {
    fn refuse<E: Error>(&self, found: &Scalar) -> E {
        self.place.refuse(found, self.place.accepted)
    }
}

impl<'de> DeserializeSeed<'de> for Element<'_> {
    type Value = Item;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Item, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Element<'_> {
    type Value = Item;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.place.accepted)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Item, E> {
        Ok(Item::Id(value))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Item, E> {
        i64::try_from(value).map(Item::Id).map_err(|_| self.refuse(&Scalar::Huge(value)))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Item, E> {
        Err(self.refuse(&Scalar::Float(value)))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Item, E> {
        Err(self.refuse(&Scalar::Text(clipped(value))))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Item, E> {
        Err(self.refuse(&Scalar::Bool(value)))
    }

    fn visit_unit<E: Error>(self) -> Result<Item, E> {
        Err(self.refuse(&Scalar::Null))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Item, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Err(self.refuse(&Scalar::Object { empty: false }))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Item, A::Error> {
        match self.row {
            Some(true) => Row { place: self.place }.visit_seq(seq).map(Item::Row),
            _ => Err(self.refuse(&Scalar::List { empty: false })),
        }
    }
}

/// A row of a batch; `place.index` is its number.
struct Row<'a> {
    place: Place<'a>,
}

impl<'de> DeserializeSeed<'de> for Row<'_> {
    type Value = Vec<i64>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<i64>, D::Error> {
        let place = self.place;
        // Not `deserialize_seq`: its own error would not say which row.
        match deserializer.deserialize_any(RowOrOther(self))? {
            Ok(row) => Ok(row),
            Err(other) => Err(place.refuse(&other, "a list of integers, as in the rows before,")),
        }
    }
}

impl<'a> Row<'a> {
    fn visit_seq<'de, A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<i64>, A::Error> {
        let mut row = Vec::new();
        let element = |index| Element::<'a> {
            place: Place { row: Some(self.place.index), index, ..self.place },
            row: None,
        };
        while let Some(item) = seq.next_element_seed(element(row.len()))? {
            let Item::Id(id) = item else { unreachable!("a list inside a row is refused") };
            row.push(id);
        }
        Ok(row)
    }
}

struct RowOrOther<'a>(Row<'a>);

impl<'de> Visitor<'de> for RowOrOther<'_> {
    type Value = Result<Vec<i64>, Scalar>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of integers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
        self.0.visit_seq(seq).map(Ok)
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(Err(Scalar::Null))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Self::Value, E> {
        Ok(Err(Scalar::Bool(value)))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Self::Value, E> {
        Ok(Err(Scalar::Int(value)))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Self::Value, E> {
        Ok(Err(Scalar::Huge(value)))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Self::Value, E> {
        Ok(Err(Scalar::Float(value)))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Self::Value, E> {
        Ok(Err(Scalar::Text(clipped(value))))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        let object = Scalar::deserialize(serde::de::value::MapAccessDeserializer::new(map))?;
        Ok(Err(object))
    }
}
