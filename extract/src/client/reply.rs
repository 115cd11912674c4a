//! What a reply to `/generate` says about the dump.

use std::path::PathBuf;

use http::HeaderMap;
use serde::Deserialize;
use tether_dump::{RequestId, TokenHash};

const PATH_HEADER: &str = "x-hidden-states-path";
const CALL_ID_HEADER: &str = "x-request-id";
const MISMATCH_HEADER: &str = "x-tether-mismatch";

/// A reply of 200: which request it was, and where its dump is said to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The request.
    pub request_id: RequestId,
    /// The dump's path in the proxy's view, or else in the server's.
    pub path: Option<PathBuf>,
    /// What the server claims of the dump. It is checked, never believed.
    pub claims: Claims,
}

/// What a server says about a dump in its reply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claims {
    /// Number of tokens.
    pub num_tokens: Option<u64>,
    /// Hash of the prompt's tokens.
    pub token_hash: Option<TokenHash>,
    /// The proxy found the dump not to be this request's, and was told to let it pass.
    pub mismatch: Option<String>,
}

/// Why a reply of 200 cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplyError {
    /// The body is not the JSON that `/generate` answers with.
    #[error("{0}")]
    Json(String),
    /// The request's ID is none of Tether's: no dump was made under it.
    #[error("`meta_info.id` is `{0}`, expected the UUID of the dump")]
    Id(String),
    /// Two places name two requests.
    #[error("`meta_info.id` is `{body}`, the header `{CALL_ID_HEADER}` is `{header}`")]
    TwoIds {
        /// In the body.
        body: RequestId,
        /// In the header.
        header: String,
    },
}

#[derive(Deserialize)]
struct Body {
    meta_info: MetaInfo,
}

#[derive(Deserialize)]
struct MetaInfo {
    id: String,
    capture: Option<Capture>,
}

#[derive(Deserialize)]
struct Capture {
    path: Option<PathBuf>,
    num_tokens: Option<u64>,
    token_hash: Option<String>,
}

impl Reply {
    pub(super) fn parse(headers: &HeaderMap, body: &[u8]) -> Result<Self, ReplyError> {
        let body: Body = serde_json::from_slice(body).map_err(|error| ReplyError::Json(error.to_string()))?;
        let MetaInfo { id, capture } = body.meta_info;
        let request_id: RequestId = id.parse().map_err(|_| ReplyError::Id(id))?;
        let header =
            |name| headers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
        // For a single prompt the call's ID is the request's own.
        if let Some(call_id) = header(CALL_ID_HEADER)
            && call_id != request_id.to_string()
        {
            return Err(ReplyError::TwoIds { body: request_id, header: call_id });
        }
        let mut claims = Claims { mismatch: header(MISMATCH_HEADER), ..Claims::default() };
        let mut path = header(PATH_HEADER).map(PathBuf::from);
        if let Some(capture) = capture {
            path = path.or(capture.path);
            claims.num_tokens = capture.num_tokens;
            claims.token_hash = match capture.token_hash {
                None => None,
                Some(text) => Some(text.parse().map_err(|_| {
                    ReplyError::Json(format!(
                        "`meta_info.capture.token_hash` is `{text}`, expected 32 hex digits"
                    ))
                })?),
            };
        }
        Ok(Self { request_id, path, claims })
    }
}

/// What sort of error the body says it is.
pub(super) fn error_type(body: &[u8]) -> Option<String> {
    let value: serde_json::Value = serde_json::from_slice(body).ok()?;
    value.pointer("/error/type")?.as_str().map(str::to_owned)
}

/// The words of an error's body: the message of the usual JSON shapes, or else the text itself.
pub(super) fn error_text(body: &[u8], limit: usize) -> String {
    let value: Option<serde_json::Value> = serde_json::from_slice(body).ok();
    let message = value.as_ref().and_then(|value| {
        ["/error/message", "/error", "/message", "/detail"]
            .iter()
            .find_map(|pointer| value.pointer(pointer)?.as_str().map(str::to_owned))
    });
    let text = message.unwrap_or_else(|| String::from_utf8_lossy(body).trim().to_owned());
    match text.char_indices().nth(limit) {
        Some((end, _)) => format!("{} …", &text[..end]),
        None if text.is_empty() => "(no text)".into(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn parse(headers: &[(&'static str, &str)], body: &str) -> Result<Reply, ReplyError> {
        let headers = headers
            .iter()
            .map(|(name, value)| (http::HeaderName::from_static(name), HeaderValue::from_str(value).unwrap()))
            .collect();
        Reply::parse(&headers, body.as_bytes())
    }

    #[test]
    fn the_proxys_path_wins_over_the_servers() {
        let id = RequestId::new();
        let hash = TokenHash::of(&[1, 2]);
        let body = format!(
            r#"{{"text":"","meta_info":{{"id":"{id}","capture":{{"path":"/server/x","num_tokens":2,"token_hash":"{hash}"}}}}}}"#
        );
        let reply =
            parse(&[("x-hidden-states-path", "/proxy/x"), ("x-request-id", &id.to_string())], &body).unwrap();
        assert_eq!(reply.path, Some("/proxy/x".into()));
        assert_eq!(reply.claims, Claims { num_tokens: Some(2), token_hash: Some(hash), mismatch: None });
        assert_eq!(parse(&[], &body).unwrap().path, Some("/server/x".into()));
    }

    #[test]
    fn a_reply_that_names_two_requests_or_none_is_refused() {
        let (id, other) = (RequestId::new(), RequestId::new());
        let body = format!(r#"{{"meta_info":{{"id":"{id}"}}}}"#);
        assert_eq!(
            parse(&[("x-request-id", &other.to_string())], &body),
            Err(ReplyError::TwoIds { body: id, header: other.to_string() })
        );
        assert_eq!(parse(&[], r#"{"meta_info":{"id":"7"}}"#), Err(ReplyError::Id("7".into())));
        assert!(matches!(parse(&[], "{}"), Err(ReplyError::Json(_))));
        assert!(matches!(parse(&[], "<html>"), Err(ReplyError::Json(_))));
    }

    #[test]
    fn the_message_is_found_in_an_errors_body() {
        assert_eq!(error_text(br#"{"error":{"message":"too long"}}"#, 99), "too long");
        assert_eq!(error_text(br#"{"error":"too long"}"#, 99), "too long");
        assert_eq!(error_text(b" plain words\n", 99), "plain words");
        assert_eq!(error_text("ééé".as_bytes(), 2), "éé …");
        assert_eq!(error_text(b"", 9), "(no text)");
    }
}
