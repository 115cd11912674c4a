//! Why the proxy answers a request itself, and with which status.

use std::time::Duration;

use http::header::{CONNECTION, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};
use serde_json::{Value, json};
use tether_dump::RequestId;

use crate::body::{DecodeError, ReadError};
use crate::gate::{Failure, error_chain};
use crate::limits::Busy;
use crate::metrics::{Label, Refusal};
use crate::table::InFlight;
use crate::tag::InvalidBody;
use crate::upstream::SendError;

/// Why a request is answered with an error of the proxy's own.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// The body cannot be tagged.
    #[error(transparent)]
    Body(#[from] InvalidBody),
    /// The body cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The body cannot be decoded.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// A trusted ID is in flight.
    #[error(transparent)]
    InFlight(#[from] InFlight),
    /// A trusted ID has a dump already.
    #[error("the request ID {0} has been used: its hidden states are published")]
    Published(RequestId),
    /// Rows of generated tokens, of several samples of one prompt.
    #[error("`n` is {0} and `rows` is `all`: one dump cannot hold the generated tokens of several samples")]
    Samples(u64),
    /// Several samples of one prompt, towards SGLang.
    #[error(
        "`n` is {0} and the upstreams are SGLang servers, which drop the IDs of such requests: send the prompt {0} times, or `n` of 1"
    )]
    SamplesOfSglang(u64),
    /// Not an abort.
    #[error(
        "the body of /abort_request is not accepted: {0}; expected {{\"rid\": string}} or {{\"abort_all\": true}}"
    )]
    Abort(String),
    /// A tunnel was asked for.
    #[error("the method CONNECT is not supported")]
    Connect,
    /// The proxy is about to stop.
    #[error("the proxy is shutting down")]
    Draining,
    /// There is no turn for it.
    #[error(transparent)]
    Busy(#[from] Busy),
    /// Health keeps requests away from every upstream.
    #[error(
        "no upstream is available: each fails its health checks or failed too often in a row; see /tether/ready"
    )]
    NoUpstream {
        /// When one may be, at the earliest.
        retry_after: Duration,
    },
    /// No reply.
    #[error(transparent)]
    Send(#[from] SendError),
    /// No dump, or not the right one.
    #[error(transparent)]
    Gate(#[from] Box<Failure>),
}

impl ProxyError {
    /// The status, and the reason as counted.
    pub fn status(&self) -> (StatusCode, Refusal) {
        match self {
            Self::Body(_) | Self::Abort(_) | Self::Read(ReadError::Broken(_)) => {
                (StatusCode::BAD_REQUEST, Refusal::InvalidBody)
            }
            Self::Decode(DecodeError::Corrupt { .. }) => (StatusCode::BAD_REQUEST, Refusal::Encoding),
            Self::Decode(DecodeError::Unsupported(_)) => {
                (StatusCode::UNSUPPORTED_MEDIA_TYPE, Refusal::Encoding)
            }
            Self::Samples(_) | Self::SamplesOfSglang(_) => (StatusCode::BAD_REQUEST, Refusal::Unsupported),
            Self::Connect => (StatusCode::METHOD_NOT_ALLOWED, Refusal::Unsupported),
            Self::Read(error) | Self::Decode(DecodeError::Limit(error)) => match error {
                ReadError::TooLong { .. } => (StatusCode::PAYLOAD_TOO_LARGE, Refusal::TooLarge),
                ReadError::NoMemory { .. } => (StatusCode::SERVICE_UNAVAILABLE, Refusal::NoMemory),
                ReadError::Stalled { .. } => (StatusCode::REQUEST_TIMEOUT, Refusal::Timeout),
                ReadError::Broken(_) => (StatusCode::BAD_REQUEST, Refusal::InvalidBody),
            },
            Self::InFlight(_) | Self::Published(_) => (StatusCode::CONFLICT, Refusal::Duplicate),
            Self::Busy(Busy::Full { .. }) => (StatusCode::TOO_MANY_REQUESTS, Refusal::QueueFull),
            Self::Busy(Busy::TimedOut { .. }) => (StatusCode::SERVICE_UNAVAILABLE, Refusal::QueueTimeout),
            Self::Draining => (StatusCode::SERVICE_UNAVAILABLE, Refusal::Draining),
            Self::NoUpstream { .. } => (StatusCode::SERVICE_UNAVAILABLE, Refusal::NoUpstream),
            Self::Send(SendError::Silent { .. }) => (StatusCode::GATEWAY_TIMEOUT, Refusal::Upstream),
            Self::Send(_) => (StatusCode::BAD_GATEWAY, Refusal::Upstream),
            Self::Gate(_) => (StatusCode::BAD_GATEWAY, Refusal::Mismatch),
        }
    }

    /// The head and the JSON text of the answer.
    pub fn response(&self, id: RequestId) -> Response<String> {
        let (status, reason) = self.status();
        let mut error = json!({
            "message": error_chain(self),
            "type": reason.text(),
            "code": status.as_u16(),
            "request_id": id,
        });
        if let Self::Gate(failure) = self {
            error["reason"] = failure.reason.text().into();
            error["expected"] = json!(failure.expected);
            error["found"] = match &failure.found {
                Ok(side) => json!(side),
                Err(_) => Value::Null,
            };
            if let Err(why) = &failure.found {
                error["detail"] = why.as_str().into();
            }
        }
        let mut response = json_response(status, &json!({ "error": error }));
        if matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS) {
            let seconds = match self {
                Self::NoUpstream { retry_after } => retry_after.as_secs_f64().ceil() as u64,
                _ => 1,
            };
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if matches!(reason, Refusal::TooLarge | Refusal::Timeout | Refusal::NoMemory) {
            // The rest of the body is not read.
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

/// A JSON answer.
pub fn json_response(status: StatusCode, value: &Value) -> Response<String> {
    let mut response = Response::new(value.to_string());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
