//! Finds what the proxy must know of a JSON request body, in one pass over its bytes.
//!
//! The body is never parsed into values and written anew: numbers, key order and spelling of everything else survive,
//! because only the value of the outermost `rid` is replaced, or a `rid` inserted after the outermost brace. What is
//! accepted, and what happens to the rest:
//!
//! | body | result |
//! | --- | --- |
//! | empty, not an object, cut short, something after the object | 400 |
//! | a key that decides identity twice (`rid`, `input_ids`, `text`, `prompt`, `n`, `capture`, …) | 400 |
//! | escapes in keys | resolved: `"\u0072id"` is `rid` |
//! | `rid` inside another object | untouched |
//! | `cache_salt`, towards a server with a prefix cache | replaced, or inserted as the second member |
//! | `rid` of `null` | replaced, as if it were not there |
//! | `rid` of another type | replaced, and reported as the client's |
//! | byte order mark, `NaN`, huge numbers, deep nesting, lone surrogates, invalid UTF-8 in strings | passed on |
//! | invalid JSON inside a nested value | passed on, for the upstream to refuse |

mod cursor;
mod fields;
mod ids;

use std::ops::Range;

use tether_dump::{RequestId, Rows};

use self::cursor::Cursor;
pub use self::fields::{Capture, ClientRid};
pub use self::ids::Tokens;

/// An endpoint whose requests carry an ID in their body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// SGLang's own, `/generate`.
    Generate,
    /// OpenAI's `/v1/completions`.
    Completions,
    /// OpenAI's `/v1/chat/completions`.
    ChatCompletions,
}

/// Why a body cannot be tagged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidBody {
    /// Nothing but whitespace.
    #[error("the body is empty; a JSON object is expected")]
    Empty,
    /// JSON perhaps, but no object.
    #[error("the body is not a JSON object")]
    NotAnObject,
    /// It ends inside the object.
    #[error("the body is not JSON: it ends inside a value")]
    CutShort,
    /// Something is out of place.
    #[error("the body is not JSON: expected {expected} at byte {at}")]
    Unexpected {
        /// Offset from the first byte.
        at: usize,
        /// What would have been right there.
        expected: &'static str,
    },
    /// A key that decides the request's identity is there twice, and parsers differ in which one counts.
    #[error("the key `{0}` is there twice")]
    Duplicate(&'static str),
}

/// What one pass over a body found.
#[derive(Debug, PartialEq)]
pub struct Found {
    /// Where the ID goes.
    pub slot: Slot,
    /// Where `cache_salt` goes, for a server that keeps prefixes.
    pub salt: Slot,
    /// The `rid` that the client wrote, unless `null`.
    pub client_rid: Option<ClientRid>,
    /// Whether the prompt is a list of prompts, so that `rid` must be a list too.
    pub batch: bool,
    /// The prompts: one, or as many as the list holds.
    pub prompts: Vec<Prompt>,
    /// Samples for each prompt.
    pub n: u64,
}

/// Where the ID goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Slot {
    /// In the place of a value.
    Replace(Range<usize>),
    /// As the first member, with a comma after it unless it is the only one.
    Insert {
        /// Just after the brace.
        at: usize,
        /// Whether members follow.
        comma: bool,
    },
}

/// One prompt of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Its token IDs, where the request gives them and they were asked for.
    pub tokens: Option<Tokens>,
    /// About how many tokens it has, for balancing.
    pub estimate: u64,
    /// Whether a dump is to be expected, and of which rows.
    pub capture: Capture,
}

/// How a prompt is given.
#[derive(Debug)]
struct Given {
    batch: bool,
    prompts: Vec<(Option<Tokens>, u64)>,
}

/// The members that are looked at, each a bit of `seen`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Field {
    Rid,
    InputIds,
    Text,
    Prompt,
    InputEmbeds,
    N,
    SamplingParams,
    Capture,
    KvTransferParams,
    CacheSalt,
}

impl Slot {
    /// The bytes that make way; none where something is inserted.
    pub fn range(&self) -> Range<usize> {
        match self {
            Self::Replace(range) => range.clone(),
            Self::Insert { at, .. } => *at..*at,
        }
    }
}

impl Endpoint {
    /// The endpoint at `path`, if it is one whose requests are tagged.
    pub fn at(path: &str) -> Option<Self> {
        match path {
            "/generate" => Some(Self::Generate),
            "/v1/completions" => Some(Self::Completions),
            "/v1/chat/completions" => Some(Self::ChatCompletions),
            _ => None,
        }
    }

    fn field(self, key: &[u8]) -> Option<(Field, &'static str)> {
        Some(match (key, self) {
            (b"rid", _) => (Field::Rid, "rid"),
            (b"cache_salt", _) => (Field::CacheSalt, "cache_salt"),
            (b"capture", _) => (Field::Capture, "capture"),
            (b"kv_transfer_params", _) => (Field::KvTransferParams, "kv_transfer_params"),
            (b"input_ids", Self::Generate) => (Field::InputIds, "input_ids"),
            (b"text", Self::Generate) => (Field::Text, "text"),
            (b"input_embeds", Self::Generate) => (Field::InputEmbeds, "input_embeds"),
            (b"sampling_params", Self::Generate) => (Field::SamplingParams, "sampling_params"),
            (b"prompt", Self::Completions) => (Field::Prompt, "prompt"),
            (b"n", Self::Completions | Self::ChatCompletions) => (Field::N, "n"),
            _ => return None,
        })
    }
}

/// Looks through `body`. Token IDs are read and hashed where `read_tokens` asks for it.
///
/// # Errors
/// See [`InvalidBody`].
pub fn find(endpoint: Endpoint, body: &[u8], read_tokens: bool) -> Result<Found, InvalidBody> {
    let mark = if body.starts_with(b"\xef\xbb\xbf") { 3 } else { 0 };
    let mut cursor = Cursor::new(body, mark);
    cursor.skip_whitespace();
    match cursor.peek() {
        None => return Err(InvalidBody::Empty),
        Some(b'{') => cursor.at += 1,
        Some(_) => return Err(InvalidBody::NotAnObject),
    }
    let inside = cursor.at;
    let mut seen = 0u16;
    let (mut slot, mut salt) = (None, None);
    let mut client_rid = None;
    // `text` decides the shape where several are given, and `input_ids` give the tokens, as in SGLang.
    let (mut text, mut token_ids, mut embeds) = (None, None, None);
    let mut n = 1;
    let (mut capture, mut rows) = (None, None);
    let mut first = true;
    while next_member(&mut cursor, first)? {
        first = false;
        let key = cursor.string()?;
        let key = fields::key(&body[key]);
        cursor.skip_whitespace();
        cursor.expect(b':', "`:`")?;
        cursor.skip_whitespace();
        let Some((field, name)) = endpoint.field(&key) else {
            cursor.value()?;
            continue;
        };
        if seen & 1 << field as u16 != 0 {
            return Err(InvalidBody::Duplicate(name));
        }
        seen |= 1 << field as u16;
        match field {
            Field::InputIds | Field::Prompt => token_ids = prompt(&mut cursor, read_tokens)?,
            Field::Text => text = prompt(&mut cursor, false)?,
            Field::InputEmbeds => embeds = embeddings(&mut cursor)?,
            _ => {
                let range = cursor.value()?;
                let value = &body[range.clone()];
                match field {
                    Field::Rid => {
                        client_rid = fields::client_rid(value);
                        slot = Some(Slot::Replace(range));
                    }
                    Field::CacheSalt => salt = Some(Slot::Replace(range)),
                    Field::N => n = fields::number(value).unwrap_or(1),
                    Field::SamplingParams => n = fields::samples(value),
                    Field::Capture => capture = Some(value),
                    _ => rows = fields::rows_of_transfer(value),
                }
            }
        }
    }
    cursor.skip_whitespace();
    if cursor.peek().is_some() {
        return Err(cursor.unexpected("nothing after the object"));
    }
    let given = merge(text, token_ids, embeds);
    let captures = fields::captures(capture, given.prompts.len(), rows.unwrap_or(Rows::Prompt));
    let prompts = given.prompts.into_iter().zip(captures);
    let insert = Slot::Insert { at: inside, comma: !first };
    Ok(Found {
        salt: salt.unwrap_or_else(|| insert.clone()),
        slot: slot.unwrap_or(insert),
        client_rid,
        batch: given.batch,
        prompts: prompts.map(|((tokens, estimate), capture)| Prompt { tokens, estimate, capture }).collect(),
        n,
    })
}

/// Writes what goes into the slot: one ID, or a list of them.
pub fn rid_value(batch: bool, ids: impl IntoIterator<Item = RequestId>) -> String {
    let mut text = String::with_capacity(RequestId::TEXT_LEN + 4);
    if batch {
        text.push('[');
    }
    for (index, id) in ids.into_iter().enumerate() {
        if index > 0 {
            text.push(',');
        }
        text.push('"');
        text.push_str(&id.to_string());
        text.push('"');
    }
    if batch {
        text.push(']');
    }
    text
}

/// Goes to the next key of the outermost object. `false` at the brace that closes it, which is passed.
fn next_member(cursor: &mut Cursor<'_>, first: bool) -> Result<bool, InvalidBody> {
    cursor.skip_whitespace();
    match cursor.peek() {
        Some(b'}') => {
            cursor.at += 1;
            Ok(false)
        }
        Some(b',') if !first => {
            cursor.at += 1;
            cursor.skip_whitespace();
            if cursor.peek() == Some(b'"') { Ok(true) } else { Err(cursor.unexpected("a key")) }
        }
        Some(b'"') if first => Ok(true),
        _ => Err(cursor.unexpected(if first { "a key or `}`" } else { "`,` or `}`" })),
    }
}

/// Goes past a prompt: a string, token IDs, or a list of either. `None` if it is `null` or anything else.
fn prompt(cursor: &mut Cursor<'_>, read_tokens: bool) -> Result<Option<Given>, InvalidBody> {
    let start = cursor.at;
    match cursor.peek() {
        Some(b'"') => {
            let len = cursor.string()?.len();
            Ok(Some(Given { batch: false, prompts: vec![(None, of_text(len))] }))
        }
        Some(b'[') => {
            cursor.at += 1;
            cursor.skip_whitespace();
            match cursor.peek() {
                Some(b'"' | b'[') => many(cursor, read_tokens).map(Some),
                _ => {
                    cursor.at = start;
                    one(cursor, read_tokens).map(|prompt| Some(Given { batch: false, prompts: vec![prompt] }))
                }
            }
        }
        _ => {
            cursor.value()?;
            Ok(None)
        }
    }
}

/// The prompts of a list, up to and with its closing bracket.
fn many(cursor: &mut Cursor<'_>, read_tokens: bool) -> Result<Given, InvalidBody> {
    let mut prompts = Vec::new();
    while cursor.next_element(prompts.is_empty())? {
        prompts.push(match cursor.peek() {
            Some(b'[') => one(cursor, read_tokens)?,
            _ => (None, of_text(cursor.value()?.len())),
        });
    }
    Ok(Given { batch: true, prompts })
}

/// One array of token IDs.
fn one(cursor: &mut Cursor<'_>, read_tokens: bool) -> Result<(Option<Tokens>, u64), InvalidBody> {
    let start = cursor.at;
    let tokens = if read_tokens {
        ids::row(cursor)?
    } else {
        cursor.value()?;
        None
    };
    // An ID and what is around it takes about 6 bytes.
    let estimate = tokens.map_or((cursor.at - start) as u64 / 6 + 1, |tokens| tokens.count as u64);
    Ok((tokens, estimate))
}

fn of_text(len: usize) -> u64 {
    len as u64 / 4 + 1
}

/// Embeddings: `[tokens][hidden]`, or a list of such.
fn embeddings(cursor: &mut Cursor<'_>) -> Result<Option<Given>, InvalidBody> {
    let start = cursor.at;
    let mut depth = 0;
    while cursor.peek() == Some(b'[') && depth < 3 {
        depth += 1;
        cursor.at += 1;
        cursor.skip_whitespace();
    }
    cursor.at = start;
    if depth < 3 {
        let range = cursor.value()?;
        return Ok((depth == 2)
            .then(|| Given { batch: false, prompts: vec![(None, range.len() as u64 / 4096 + 1)] }));
    }
    cursor.at += 1;
    let mut prompts = Vec::new();
    while cursor.next_element(prompts.is_empty())? {
        prompts.push((None, cursor.value()?.len() as u64 / 4096 + 1));
    }
    Ok(Some(Given { batch: true, prompts }))
}

/// The prompts of a request that may give them in several ways.
fn merge(text: Option<Given>, token_ids: Option<Given>, embeds: Option<Given>) -> Given {
    match (text, token_ids) {
        (Some(text), Some(ids)) if text.batch == ids.batch && text.prompts.len() == ids.prompts.len() => ids,
        (Some(given), _) | (None, Some(given)) => given,
        // Messages, or nothing, which the upstream refuses.
        (None, None) => embeds.unwrap_or(Given { batch: false, prompts: vec![(None, 1)] }),
    }
}

#[cfg(test)]
mod tests;
