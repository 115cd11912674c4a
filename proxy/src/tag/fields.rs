//! The small members of a request, read as values.

use std::borrow::Cow;

use http::HeaderValue;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use tether_dump::Rows;

/// Members longer than this are not read; they are for the upstream to judge.
const MAX_MEMBER: usize = 1 << 20;

/// The longest header that carries a client's ID. Servers refuse heads of more than 16 to 64 KiB.
const MAX_HEADER: usize = 8 << 10;

/// Whether a dump is to be expected of a prompt, and of which rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capture {
    /// `false` only where the request says so.
    pub wanted: bool,
    /// Rows of the prompt, or of what was generated too.
    pub rows: Rows,
}

/// The ID or IDs that a client chose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientRid {
    /// A string.
    One(String),
    /// A list of strings.
    Many(Vec<String>),
    /// Any other value, as its text.
    Other(String),
}

impl ClientRid {
    /// Reads a header that may hold one.
    pub fn of_header(value: &HeaderValue) -> Self {
        Self::One(String::from_utf8_lossy(value.as_bytes()).into_owned())
    }

    /// The value of `x-client-request-id`: a plain string as it is, all else as JSON in ASCII. `None` if it is too long
    /// to travel in a header.
    pub fn header(&self) -> Option<HeaderValue> {
        let plain = |text: &str| {
            !text.is_empty()
                && text.bytes().all(|byte| (0x20..0x7f).contains(&byte))
                && !text.starts_with(' ')
                && !text.ends_with(' ')
        };
        let text = match self {
            Self::One(text) if plain(text) => Cow::Borrowed(text.as_str()),
            Self::One(text) => Cow::Owned(ascii(&Value::from(text.as_str()).to_string())),
            Self::Many(texts) => Cow::Owned(ascii(&Value::from(texts.as_slice()).to_string())),
            Self::Other(text) => Cow::Owned(ascii(text)),
        };
        if text.len() > MAX_HEADER {
            return None;
        }
        HeaderValue::from_str(&text).ok()
    }
}

/// Writes all but printable ASCII as JSON escapes.
fn ascii(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for unit in json.encode_utf16() {
        match char::from_u32(unit.into()) {
            Some(c @ ' '..='~') => text.push(c),
            _ => text.push_str(&format!("\\u{unit:04x}")),
        }
    }
    text
}

/// A key without its escapes.
pub(super) fn key(raw: &[u8]) -> Cow<'_, [u8]> {
    // The longest key that is looked for is 18 bytes; escaped wholly, 108.
    if !raw.contains(&b'\\') || raw.len() > 128 {
        return Cow::Borrowed(raw);
    }
    match serde_json::from_slice::<String>(&[b"\"", raw, b"\""].concat()) {
        Ok(text) => Cow::Owned(text.into_bytes()),
        Err(_) => Cow::Borrowed(raw),
    }
}

pub(super) fn client_rid(value: &[u8]) -> Option<ClientRid> {
    let other = || ClientRid::Other(String::from_utf8_lossy(value).into_owned());
    match value.first() {
        _ if value == b"null" => None,
        // What does not decode, such as a lone surrogate, is kept as it was written.
        Some(b'"') => Some(serde_json::from_slice(value).map_or_else(|_| other(), ClientRid::One)),
        Some(b'[') => Some(serde_json::from_slice(value).map_or_else(|_| other(), ClientRid::Many)),
        _ => Some(other()),
    }
}

pub(super) fn number(value: &[u8]) -> Option<u64> {
    serde_json::from_slice(value).ok()
}

/// `n` of `sampling_params`, which is an object or a list of them.
pub(super) fn samples(value: &[u8]) -> u64 {
    #[derive(Deserialize)]
    struct Sampling {
        n: Option<Value>,
    }
    if value.len() > MAX_MEMBER {
        return 1;
    }
    let rows: Vec<Sampling> = match value.first() {
        Some(b'{') => serde_json::from_slice(value).map(|row| vec![row]).unwrap_or_default(),
        _ => serde_json::from_slice(value).unwrap_or_default(),
    };
    rows.iter().filter_map(|row| row.n.as_ref()?.as_u64()).max().unwrap_or(1)
}

/// vLLM's way to ask for the rows of what was generated.
pub(super) fn rows_of_transfer(value: &[u8]) -> Option<Rows> {
    #[derive(Deserialize)]
    struct Transfer {
        include_output_tokens: Option<bool>,
    }
    let transfer: Transfer = serde_json::from_slice(value).ok()?;
    transfer.include_output_tokens?.then_some(Rows::All)
}

/// What is captured of each of `count` prompts.
pub(super) fn captures(value: Option<&[u8]>, count: usize, rows: Rows) -> Vec<Capture> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Wish {
        Plain(bool),
        Detailed { rows: Option<Value> },
        // Not a capture: the upstream refuses it.
        Unknown(IgnoredAny),
    }
    let default = Capture { wanted: true, rows };
    let read = |wish: &Wish| match wish {
        Wish::Plain(wanted) => Capture { wanted: *wanted, rows },
        Wish::Detailed { rows: Some(Value::String(name)) } => {
            Capture { wanted: true, rows: name.parse().unwrap_or(rows) }
        }
        Wish::Detailed { .. } | Wish::Unknown(_) => default,
    };
    let all = match value {
        Some(value) if value.len() <= MAX_MEMBER && value.first() == Some(&b'[') => {
            serde_json::from_slice::<Vec<Wish>>(value).map(|wishes| wishes.iter().map(read).collect())
        }
        Some(value) if value.len() <= MAX_MEMBER => {
            serde_json::from_slice::<Wish>(value).map(|wish| vec![read(&wish); count])
        }
        _ => Ok(vec![default; count]),
    };
    match all {
        Ok(all) if all.len() == count => all,
        // A list of another length: the upstream refuses it.
        _ => vec![default; count],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capture_is_read_for_one_and_for_many() {
        let read = |text: &str, count| captures(Some(text.as_bytes()), count, Rows::Prompt);
        let capture = |wanted, rows| Capture { wanted, rows };
        assert_eq!(read("false", 1), [capture(false, Rows::Prompt)]);
        assert_eq!(read("true", 2), [capture(true, Rows::Prompt); 2]);
        assert_eq!(read("null", 1), [capture(true, Rows::Prompt)]);
        assert_eq!(read(r#"{"rows":"all","points":[1]}"#, 1), [capture(true, Rows::All)]);
        assert_eq!(
            read(r#"[false, {"rows":"all"}]"#, 2),
            [capture(false, Rows::Prompt), capture(true, Rows::All)]
        );
        for refused_upstream in ["[false]", "\"no\"", "[false", "{\"rows\":\"some\"}", "7"] {
            assert_eq!(read(refused_upstream, 2), [capture(true, Rows::Prompt); 2], "{refused_upstream}");
        }
        assert_eq!(rows_of_transfer(br#"{"include_output_tokens": true}"#), Some(Rows::All));
        assert_eq!(rows_of_transfer(br#"{"include_output_tokens": false}"#), None);
    }

    #[test]
    fn samples_are_counted_in_an_object_or_a_list() {
        assert_eq!(samples(br#"{"n": 3, "stop": ["]"]}"#), 3);
        assert_eq!(samples(br#"[{"n": 2}, {"n": 2}]"#), 2);
        assert_eq!(samples(br#"{"max_new_tokens": 1}"#), 1);
        assert_eq!(samples(br#"{"n": null}"#), 1);
    }

    #[test]
    fn a_client_id_travels_as_it_is_or_as_ascii_json() {
        let header = |rid: ClientRid| rid.header().map(|value| value.to_str().unwrap().to_owned());
        assert_eq!(header(ClientRid::One("../../x".into())).as_deref(), Some("../../x"));
        assert_eq!(header(ClientRid::One("é\n".into())).as_deref(), Some(r#""\u00e9\n""#));
        assert_eq!(header(ClientRid::One(String::new())).as_deref(), Some(r#""""#));
        assert_eq!(header(ClientRid::Many(vec!["a".into(), "b".into()])).as_deref(), Some(r#"["a","b"]"#));
        assert_eq!(header(ClientRid::Other("5".into())).as_deref(), Some("5"));
        assert_eq!(header(ClientRid::One("x".repeat(MAX_HEADER + 1))), None);
        assert_eq!(client_rid(b"null"), None);
        assert_eq!(client_rid(br#""\ud800""#), Some(ClientRid::Other(r#""\ud800""#.into())));
    }
}
