//! What a dump says about itself: the `__metadata__` of its safetensors header.

use std::collections::HashMap;
use std::str::FromStr;

use crate::{CapturePoint, Dtype, FinalState, RequestId, Rows, TokenHash};

/// Version of the format, the value of `tether_format`.
pub const FORMAT_VERSION: &str = "1";

/// Everything a dump says about itself beside its tensors and their hash. `FORMAT.md` gives each key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metadata {
    /// The request whose hidden states these are; also the file's name.
    pub request_id: RequestId,
    /// The HTTP call that carried the request, where it differs from it or is known.
    pub call_id: Option<String>,
    /// The client's own name for the request, if it gave one.
    pub client_rid: Option<String>,
    /// The model as the server calls it.
    pub model: String,
    /// SHA-256 of the bytes of the checkpoint's `config.json`, in lower-case hex.
    pub config_hash: String,
    /// Decoder layers of the model, the `n` of `R[n]`.
    pub num_layers: u32,
    /// The capture point of each plane, in plane order.
    pub points: Vec<CapturePoint>,
    /// Which form of the last layer's output was asked for.
    pub final_state: FinalState,
    /// Which positions the rows cover.
    pub rows: Rows,
    /// Length of the prompt in tokens. Rows after these belong to generated tokens.
    pub prompt_tokens: usize,
    /// Number format of the hidden states.
    pub dtype: Dtype,
    /// Hash of the prompt's token IDs as the embedding consumed them.
    pub token_hash: TokenHash,
    /// Name and version of the program that wrote the dump.
    pub server: String,
    /// When the dump was made, RFC 3339 in UTC.
    pub created: String,
}

/// Why the metadata of a file is not that of a dump.
#[derive(Debug, thiserror::Error)]
pub enum InvalidMetadata {
    /// A key that every dump has is absent.
    #[error("metadata key `{key}` is missing")]
    Missing {
        /// The absent key.
        key: &'static str,
    },
    /// A key has a value that cannot be read.
    #[error("metadata key `{key}` is `{value}`: {reason}")]
    Invalid {
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
        /// What would have been accepted.
        reason: String,
    },
}

impl Metadata {
    /// The keys and values, in the order they are written.
    pub(crate) fn to_pairs(&self) -> Vec<(&'static str, String)> {
        let points: Vec<String> = self.points.iter().map(ToString::to_string).collect();
        let points = serde_json::to_string(&points).expect("a list of strings is JSON");
        let mut pairs = vec![
            ("tether_format", FORMAT_VERSION.to_owned()),
            ("request_id", self.request_id.to_string()),
            ("model", self.model.clone()),
            ("config_hash", self.config_hash.clone()),
            ("num_layers", self.num_layers.to_string()),
            ("points", points),
            ("final", self.final_state.to_string()),
            ("rows", self.rows.to_string()),
            ("prompt_tokens", self.prompt_tokens.to_string()),
            ("dtype", self.dtype.to_string()),
            ("token_hash", self.token_hash.to_string()),
            ("server", self.server.clone()),
            ("created", self.created.clone()),
        ];
        let optional = [("call_id", &self.call_id), ("client_rid", &self.client_rid)];
        pairs.extend(optional.into_iter().filter_map(|(key, value)| Some((key, value.clone()?))));
        pairs
    }

    /// Reads the metadata back. Keys it does not know are left alone, so that a later writer may add some.
    pub(crate) fn from_map(map: &HashMap<String, String>) -> Result<Self, InvalidMetadata> {
        let version = text(map, "tether_format")?;
        if version != FORMAT_VERSION {
            let reason = format!("this reader knows format `{FORMAT_VERSION}`");
            return Err(InvalidMetadata::Invalid { key: "tether_format", value: version.to_owned(), reason });
        }
        let points = text(map, "points")?;
        let points = serde_json::from_str(points).map_err(|error| InvalidMetadata::Invalid {
            key: "points",
            value: points.to_owned(),
            reason: error.to_string(),
        })?;
        Ok(Self {
            request_id: parsed(map, "request_id")?,
            call_id: map.get("call_id").cloned(),
            client_rid: map.get("client_rid").cloned(),
            model: text(map, "model")?.to_owned(),
            config_hash: text(map, "config_hash")?.to_owned(),
            num_layers: parsed(map, "num_layers")?,
            points,
            final_state: parsed(map, "final")?,
            rows: parsed(map, "rows")?,
            prompt_tokens: parsed(map, "prompt_tokens")?,
            dtype: parsed(map, "dtype")?,
            token_hash: parsed(map, "token_hash")?,
            server: text(map, "server")?.to_owned(),
            created: text(map, "created")?.to_owned(),
        })
    }
}

/// The present time as RFC 3339 in UTC, for [`Metadata::created`].
pub fn timestamp() -> String {
    time::OffsetDateTime::now_utc()
        .format(&time::format_description::well_known::Rfc3339)
        .expect("the years of a system clock have four digits")
}

pub(crate) fn text<'a>(
    map: &'a HashMap<String, String>,
    key: &'static str,
) -> Result<&'a str, InvalidMetadata> {
    map.get(key).map(String::as_str).ok_or(InvalidMetadata::Missing { key })
}

pub(crate) fn parsed<T>(map: &HashMap<String, String>, key: &'static str) -> Result<T, InvalidMetadata>
where
    T: FromStr<Err: std::fmt::Display>,
{
    let value = text(map, key)?;
    value.parse().map_err(|error: T::Err| InvalidMetadata::Invalid {
        key,
        value: value.to_owned(),
        reason: error.to_string(),
    })
}
