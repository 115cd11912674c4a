//! Every way a request can fail, and the one table of what the client is told then.

use http::StatusCode;
use serde_json::json;
use tether_dump::RequestId;

/// Why a request was not answered with what it asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApiError {
    /// The body could not be read as the JSON object that the route takes.
    #[error("{0}")]
    NotJson(String),
    /// A field has the wrong type, or is not one that exists.
    #[error("{0}")]
    WrongType(String),
    /// The fields are of the right type and make no sense.
    #[error("{0}")]
    Invalid(String),
    /// A request of this rid has not been answered yet.
    #[error("Duplicate request ID detected: {rid}")]
    InFlight {
        /// The rid both carry.
        rid: String,
    },
    /// There is a dump of this request.
    #[error("a dump of request {id} is published already; a request ID names one request")]
    AlreadyPublished {
        /// The request.
        id: RequestId,
    },
    /// The dump would not fit into an empty dump directory.
    #[error("the hidden states of this request take {needed} bytes; --dump-budget is {budget}")]
    OverBudget {
        /// Bytes of the request's dumps.
        needed: u64,
        /// All that the dump directory may hold.
        budget: u64,
    },
    /// The body is longer than the server reads.
    #[error("the request body is longer than {limit} bytes")]
    BodyTooLong {
        /// The limit.
        limit: usize,
    },
    /// The client stopped sending before its body was whole.
    #[error("the request body stopped arriving for {seconds} s")]
    BodyStalled {
        /// How long the server waited for the next byte.
        seconds: u64,
    },
    /// The connection failed, or the body broke its framing.
    #[error("the request body could not be read: {0}")]
    BodyBroken(String),
    /// No such path.
    #[error("Not Found")]
    NotFound,
    /// The path exists under other methods.
    #[error("Method Not Allowed")]
    MethodNotAllowed {
        /// Those methods, for `Allow`.
        allowed: &'static str,
    },
    /// The model is still being loaded.
    #[error("the model is still being loaded")]
    Loading,
    /// The server was told to stop and takes no new work.
    #[error("the server is shutting down")]
    Draining,
    /// As many requests wait as may.
    #[error("The request queue is full.")]
    QueueFull,
    /// The request was not started in time.
    #[error("the request waited {seconds} s in the queue without being started")]
    QueueTimeout {
        /// `--queue-timeout`.
        seconds: u64,
    },
    /// Published dumps took the whole budget for too long.
    #[error(
        "--dump-budget is spent: no room for {needed} bytes within {seconds} s; delete dumps that have been read"
    )]
    BudgetSpent {
        /// Bytes of the request's dumps.
        needed: u64,
        /// `--queue-timeout`.
        seconds: u64,
    },
    /// The forward pass that the request was part of failed.
    #[error("the forward pass failed: {0}")]
    StepFailed(String),
    /// The forward pass came out with NaN or an infinity.
    #[error("{0}")]
    NotFinite(String),
    /// The dump could not be written.
    #[error("the dump could not be written: {0}")]
    WriteFailed(String),
    /// The engine is gone; the server is about to stop.
    #[error("the engine has stopped")]
    EngineStopped,
}

impl ApiError {
    /// The HTTP status a client sees.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::NotJson(_)
            | Self::WrongType(_)
            | Self::Invalid(_)
            | Self::InFlight { .. }
            | Self::BodyBroken(_) => StatusCode::BAD_REQUEST,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::BodyStalled { .. } => StatusCode::REQUEST_TIMEOUT,
            Self::AlreadyPublished { .. } => StatusCode::CONFLICT,
            Self::OverBudget { .. } | Self::BodyTooLong { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::StepFailed(_) | Self::NotFinite(_) | Self::WriteFailed(_) => {
                StatusCode::INTERNAL_SERVER_ERROR
            }
            Self::Loading
            | Self::Draining
            | Self::QueueFull
            | Self::QueueTimeout { .. }
            | Self::BudgetSpent { .. }
            | Self::EngineStopped => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// Seconds for `Retry-After`, where trying again can help.
    pub fn retry_after(&self) -> Option<u32> {
        match self {
            Self::QueueFull | Self::QueueTimeout { .. } => Some(1),
            Self::Loading | Self::Draining | Self::BudgetSpent { .. } | Self::EngineStopped => Some(5),
            _ => None,
        }
    }

    /// The body, in the shape that SGLang gives to errors of this kind: FastAPI's `detail` for routing, a flat
    /// OpenAI-like object for unreadable JSON and for overload, `error` as text for types, `error.message` for the rest.
    pub fn body(&self) -> serde_json::Value {
        let message = self.to_string();
        let flat = |kind: &str| {
            json!({"object": "error", "message": message, "type": kind, "param": null,
                   "code": self.status().as_u16()})
        };
        match self {
            Self::NotFound | Self::MethodNotAllowed { .. } => json!({"detail": message}),
            Self::NotJson(_) | Self::BodyBroken(_) | Self::BodyStalled { .. } => flat("Bad Request"),
            Self::Loading
            | Self::Draining
            | Self::QueueFull
            | Self::QueueTimeout { .. }
            | Self::BudgetSpent { .. }
            | Self::EngineStopped => flat("Service Unavailable"),
            Self::WrongType(_) => json!({"error": message}),
            _ => json!({"error": {"message": message}}),
        }
    }
}

impl From<serde_json::Error> for ApiError {
    fn from(error: serde_json::Error) -> Self {
        match error.classify() {
            serde_json::error::Category::Data => Self::WrongType(error.to_string()),
            _ => Self::NotJson(format!("the request body is not valid JSON: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of [`ApiError`]: status, whether the client is told when to come back, and where the text stands.
    #[test]
    fn every_error_has_its_status_and_its_shape() {
        let id = RequestId::new();
        let table = [
            (ApiError::NotJson("x".into()), 400, false, "/message"),
            (ApiError::WrongType("x".into()), 400, false, "/error"),
            (ApiError::Invalid("x".into()), 400, false, "/error/message"),
            (ApiError::InFlight { rid: "r".into() }, 400, false, "/error/message"),
            (ApiError::AlreadyPublished { id }, 409, false, "/error/message"),
            (ApiError::OverBudget { needed: 2, budget: 1 }, 413, false, "/error/message"),
            (ApiError::BodyTooLong { limit: 1 }, 413, false, "/error/message"),
            (ApiError::BodyStalled { seconds: 60 }, 408, false, "/message"),
            (ApiError::BodyBroken("x".into()), 400, false, "/message"),
            (ApiError::NotFound, 404, false, "/detail"),
            (ApiError::MethodNotAllowed { allowed: "GET" }, 405, false, "/detail"),
            (ApiError::Loading, 503, true, "/message"),
            (ApiError::Draining, 503, true, "/message"),
            (ApiError::QueueFull, 503, true, "/message"),
            (ApiError::QueueTimeout { seconds: 1 }, 503, true, "/message"),
            (ApiError::BudgetSpent { needed: 1, seconds: 1 }, 503, true, "/message"),
            (ApiError::StepFailed("x".into()), 500, false, "/error/message"),
            (ApiError::NotFinite("x".into()), 500, false, "/error/message"),
            (ApiError::WriteFailed("x".into()), 500, false, "/error/message"),
            (ApiError::EngineStopped, 503, true, "/message"),
        ];
        for (error, status, retry, pointer) in table {
            assert_eq!(error.status().as_u16(), status, "{error:?}");
            assert_eq!(error.retry_after().is_some(), retry, "{error:?}");
            let body = error.body();
            assert_eq!(
                body.pointer(pointer).and_then(|text| text.as_str()),
                Some(error.to_string().as_str()),
                "{body}"
            );
        }
    }
}
