//! Reading JSON values whose type the API decides, so that an error can name the field, the value and what is accepted.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Characters of a string that an error message repeats.
const QUOTED: usize = 64;

/// One JSON value seen from outside: scalars whole, containers only as far as whether they are empty.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Scalar {
    Null,
    Bool(bool),
    Int(i64),
    /// An integer beyond `i64`.
    Huge(u64),
    Float(f64),
    Text(String),
    List {
        empty: bool,
    },
    Object {
        empty: bool,
    },
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Int(value) => write!(f, "{value}"),
            Self::Huge(value) => write!(f, "{value}"),
            Self::Float(value) => write!(f, "{value:?}"),
            Self::Text(text) => write!(f, "{:?}", clipped(text)),
            Self::List { empty: true } => f.write_str("[]"),
            Self::List { .. } => f.write_str("a list"),
            Self::Object { empty: true } => f.write_str("{}"),
            Self::Object { .. } => f.write_str("an object"),
        }
    }
}

/// An object whose keys are all different, as are those of the objects in the fields named in [`STRICT`]: two values under one
/// key that decides identity or capture must not be a matter of which parser reads them.
pub(crate) struct UniqueKeys(pub(crate) serde_json::Map<String, serde_json::Value>);

/// Fields whose insides decide what is kept.
const STRICT: [&str; 3] = ["capture", "kv_transfer_params", "stream_options"];

impl<'de> Deserialize<'de> for UniqueKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = UniqueKeys;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<UniqueKeys, A::Error> {
                let mut map = serde_json::Map::new();
                while let Some(key) = entries.next_key::<String>()? {
                    if map.contains_key(&key) {
                        return Err(A::Error::custom(format!("`{}` is given twice", clipped(&key))));
                    }
                    let value = match STRICT.contains(&key.as_str()) {
                        true => entries.next_value::<Inside>()?.0,
                        false => entries.next_value()?,
                    };
                    map.insert(key, value);
                }
                Ok(UniqueKeys(map))
            }
        }
        /// A value of a strict field: an object, a list of them, or anything else.
        struct Inside(serde_json::Value);
        impl<'de> Deserialize<'de> for Inside {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = Box::<serde_json::value::RawValue>::deserialize(deserializer)?;
                let text = text.get();
                let read =
                    |result: Result<serde_json::Value, serde_json::Error>| result.map_err(D::Error::custom);
                match text.as_bytes().first() {
                    Some(b'{') => {
                        let UniqueKeys(map) = serde_json::from_str(text).map_err(D::Error::custom)?;
                        Ok(Self(map.into()))
                    }
                    Some(b'[') => {
                        let items: Vec<Inside> = serde_json::from_str(text).map_err(D::Error::custom)?;
                        Ok(Self(items.into_iter().map(|item| item.0).collect()))
                    }
                    _ => read(serde_json::from_str(text)).map(Self),
                }
            }
        }
        deserializer.deserialize_map(Keys)
    }
}

/// The beginning of `text`, for a message that repeats what a client sent.
pub(crate) fn clipped(text: &str) -> String {
    match text.char_indices().nth(QUOTED) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

impl Scalar {
    /// Whether a client that sends this asks for nothing.
    pub(crate) fn is_nothing(&self) -> bool {
        matches!(self, Self::Null | Self::List { empty: true } | Self::Object { empty: true })
    }

    /// The boolean, or `None` for null.
    pub(crate) fn bool<E: Error>(&self, name: &str) -> Result<Option<bool>, E> {
        match self {
            Self::Null => Ok(None),
            Self::Bool(value) => Ok(Some(*value)),
            _ => Err(self.refused(name, "true or false")),
        }
    }

    /// The integer, or `None` for null.
    pub(crate) fn int<E: Error>(&self, name: &str) -> Result<Option<i64>, E> {
        match self {
            Self::Null => Ok(None),
            Self::Int(value) => Ok(Some(*value)),
            _ => Err(self.refused(name, "an integer")),
        }
    }

    /// The number, or `None` for null.
    pub(crate) fn number<E: Error>(&self, name: &str) -> Result<Option<f64>, E> {
        match self {
            Self::Null => Ok(None),
            #[expect(
                clippy::cast_precision_loss,
                reason = "a sampling parameter of 2^53 or more is refused by its range"
            )]
            Self::Int(value) => Ok(Some(*value as f64)),
            Self::Float(value) => Ok(Some(*value)),
            _ => Err(self.refused(name, "a number")),
        }
    }

    /// The error that says `name` is this and `accepted` was due.
    pub(crate) fn refused<E: Error>(&self, name: &str, accepted: &str) -> E {
        E::custom(format_args!("`{name}` is {self}; {accepted} is expected"))
    }
}

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ScalarVisitor)
    }
}

struct ScalarVisitor;

impl<'de> Visitor<'de> for ScalarVisitor {
    type Value = Scalar;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Scalar, E> {
        Ok(Scalar::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Scalar, E> {
        Ok(Scalar::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Scalar, E> {
        Ok(Scalar::Int(value))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Scalar, E> {
        Ok(i64::try_from(value).map_or(Scalar::Huge(value), Scalar::Int))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Scalar, E> {
        Ok(Scalar::Float(value))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Scalar, E> {
        Ok(Scalar::Text(value.to_owned()))
    }

    fn visit_string<E: Error>(self, value: String) -> Result<Scalar, E> {
        Ok(Scalar::Text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Scalar, A::Error> {
        let mut empty = true;
        while seq.next_element::<IgnoredAny>()?.is_some() {
            empty = false;
        }
        Ok(Scalar::List { empty })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Scalar, A::Error> {
        let mut empty = true;
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
            empty = false;
        }
        Ok(Scalar::Object { empty })
    }
}
