//! Talks to the proxy (or to a server without one).

mod reply;

use std::{
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use bytes::Bytes;
use http::{Method, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client as HyperClient, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use tether_dump::RequestId;
use tokio::io::AsyncWriteExt as _;

pub use reply::{Claims, Reply, ReplyError};

/// A reply without generated text is small; what is beyond this is not one.
const MAX_REPLY_BYTES: usize = 64 << 20;
/// How much of an error's text is kept.
const MAX_ERROR_TEXT: usize = 2000;
/// `error.type` of the proxy's answer about a dump that is not the request's.
const MISMATCH: &str = "mismatch";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// For the calls that need no computation.
const SHORT_TIMEOUT: Duration = Duration::from_secs(30);

/// Address of a proxy: `http://host:port`, perhaps with a path before its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyUrl(String);

/// Why a text is not the address of a proxy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not an address such as `http://127.0.0.1:8000` (https is not supported)")]
pub struct InvalidProxyUrl(String);

impl FromStr for ProxyUrl {
    type Err = InvalidProxyUrl;

    fn from_str(text: &str) -> Result<Self, InvalidProxyUrl> {
        let invalid = || InvalidProxyUrl(text.to_owned());
        let uri: Uri = text.parse().map_err(|_| invalid())?;
        if uri.scheme_str() != Some("http") || uri.host().is_none_or(str::is_empty) || uri.query().is_some() {
            return Err(invalid());
        }
        Ok(Self(text.trim_end_matches('/').to_owned()))
    }
}

impl std::fmt::Display for ProxyUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Keep-alive connections to one proxy.
#[derive(Clone, Debug)]
pub struct Client {
    http: HyperClient<HttpConnector, Full<Bytes>>,
    url: ProxyUrl,
    timeout: Duration,
}

/// Why a call brought no reply that can be used.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// No answer: connection refused, reset, or timed out.
    #[error("no answer: {0}")]
    NoAnswer(String),
    /// The server answers, but not with what was asked for.
    #[error("the server answered {status}: {text}")]
    Status {
        /// What it answered.
        status: StatusCode,
        /// The body's text.
        text: String,
        /// When it wants to be asked again.
        retry_after: Option<Duration>,
    },
    /// The proxy found the request's dump missing or another's, and withholds the reply.
    #[error("the proxy withholds the reply: {text}")]
    Mismatch {
        /// What it found, in its words.
        text: String,
    },
    /// 200, with a body or header that cannot be understood.
    #[error("the reply cannot be used: {0}")]
    Reply(#[from] ReplyError),
}

/// How ready the proxy says it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// It takes requests.
    Ready,
    /// It does not, and why.
    NotYet(String),
}

impl Client {
    /// A client of `url` that waits at most `timeout` for a sample, and keeps up to `connections` connections.
    pub fn new(url: ProxyUrl, timeout: Duration, connections: usize) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        connector.set_nodelay(true);
        connector.set_keepalive(Some(Duration::from_secs(30)));
        let http = HyperClient::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_max_idle_per_host(connections)
            .build(connector);
        Self { http, url, timeout }
    }

    /// The proxy's address.
    pub fn url(&self) -> &ProxyUrl {
        &self.url
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<http::Response<Incoming>, CallError> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.url));
        if !body.is_empty() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        let request =
            request.body(Full::new(body)).map_err(|error| CallError::NoAnswer(error.to_string()))?;
        self.http.request(request).await.map_err(|error| CallError::NoAnswer(causes(&error)))
    }

    /// Posts one `/generate` request.
    ///
    /// # Errors
    /// If there is no usable reply.
    pub async fn generate(&self, body: Bytes) -> Result<Reply, CallError> {
        let exchange = async {
            let response = self.call(Method::POST, "/generate", body).await?;
            let (head, body) = response.into_parts();
            let body = Limited::new(body, MAX_REPLY_BYTES)
                .collect()
                .await
                .map_err(|error| CallError::NoAnswer(format!("the reply broke off: {}", causes(&*error))))?;
            let body = body.to_bytes();
            if head.status != StatusCode::OK {
                return Err(status_error(head.status, &head.headers, &body));
            }
            Ok(Reply::parse(&head.headers, &body)?)
        };
        within(self.timeout, exchange).await
    }

    /// Asks whether the proxy takes requests.
    pub async fn readiness(&self) -> Readiness {
        // The proxy's own path first. A server without a proxy does not have it.
        for path in ["/tether/ready", "/health"] {
            match within(SHORT_TIMEOUT, self.call(Method::GET, path, Bytes::new())).await {
                Ok(response) if response.status().is_success() => return Readiness::Ready,
                Ok(response) if response.status() == StatusCode::NOT_FOUND && path == "/tether/ready" => {}
                Ok(response) => return Readiness::NotYet(format!("{path} answered {}", response.status())),
                Err(error) => return Readiness::NotYet(error.to_string()),
            }
        }
        unreachable!("the second path always returns")
    }

    /// Deletes a dump through the proxy. One that is gone already counts as deleted.
    ///
    /// # Errors
    /// If the proxy does not do it.
    pub async fn delete_dump(&self, id: RequestId) -> Result<(), CallError> {
        let exchange = async {
            let response = self.call(Method::DELETE, &format!("/tether/dumps/{id}"), Bytes::new()).await?;
            let (head, body) = response.into_parts();
            if head.status.is_success() || head.status == StatusCode::NOT_FOUND {
                return Ok(());
            }
            let text = Limited::new(body, MAX_REPLY_BYTES)
                .collect()
                .await
                .map(http_body_util::Collected::to_bytes)
                .unwrap_or_default();
            Err(status_error(head.status, &head.headers, &text))
        };
        within(SHORT_TIMEOUT, exchange).await
    }

    /// Fetches a dump through the proxy into the new file `to`.
    ///
    /// # Errors
    /// If the proxy does not have it, or the file cannot be written.
    pub async fn fetch_dump(&self, id: RequestId, to: &Path) -> Result<(), FetchError> {
        let exchange = async {
            let response = self.call(Method::GET, &format!("/tether/dumps/{id}"), Bytes::new()).await?;
            let (head, mut body) = response.into_parts();
            if head.status != StatusCode::OK {
                return Err(status_error(head.status, &head.headers, &[]).into());
            }
            let failed = |source| FetchError::Io { path: to.to_owned(), source };
            let mut file = tokio::fs::File::create(to).await.map_err(failed)?;
            while let Some(frame) = body.frame().await {
                let frame = frame.map_err(|error| {
                    CallError::NoAnswer(format!("the dump broke off: {}", causes(&error)))
                })?;
                if let Ok(data) = frame.into_data() {
                    file.write_all(&data).await.map_err(failed)?;
                }
            }
            file.flush().await.map_err(failed)
        };
        tokio::time::timeout(self.timeout, exchange)
            .await
            .unwrap_or_else(|_| Err(timed_out(self.timeout).into()))
    }
}

/// Why a dump could not be fetched.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The proxy did not give it.
    #[error(transparent)]
    Call(#[from] CallError),
    /// It could not be written here.
    #[error("cannot write `{path}`")]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
}

async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<T, CallError>>,
) -> Result<T, CallError> {
    tokio::time::timeout(limit, call).await.unwrap_or_else(|_| Err(timed_out(limit)))
}

fn timed_out(limit: Duration) -> CallError {
    CallError::NoAnswer(format!("none within {} s", limit.as_secs_f64()))
}

fn status_error(status: StatusCode, headers: &http::HeaderMap, body: &[u8]) -> CallError {
    let text = reply::error_text(body, MAX_ERROR_TEXT);
    // Other errors of this status say that there is no server behind the proxy.
    if status == StatusCode::BAD_GATEWAY && reply::error_type(body).as_deref() == Some(MISMATCH) {
        return CallError::Mismatch { text };
    }
    let retry_after = headers
        .get(header::RETRY_AFTER)
        .and_then(|value| value.to_str().ok()?.trim().parse().ok())
        .map(Duration::from_secs);
    CallError::Status { status, text, retry_after }
}

/// An error with its causes: hyper's outermost says little.
pub(crate) fn causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_plain_http_with_a_host() {
        for good in ["http://127.0.0.1:8000", "http://node7:80/", "http://[::1]:8000/behind/a/path/"] {
            assert!(!good.parse::<ProxyUrl>().unwrap().to_string().ends_with('/'));
        }
        for bad in ["", "127.0.0.1:8000", "https://h:1", "http://", "ftp://h", "http://h/?q=1", "http:///x"] {
            let error = bad.parse::<ProxyUrl>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("`{bad}` is not an address")), "{error}");
        }
    }

    #[test]
    fn an_error_is_told_with_its_causes_once_each() {
        #[derive(Debug, thiserror::Error)]
        #[error("outer")]
        struct Outer(#[source] std::io::Error);
        let error = Outer(std::io::Error::other("inner"));
        assert_eq!(causes(&error), "outer: inner");
    }
}
