//! Sends one request, once more where that is safe, and waits for the head of the reply.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::header::{CONTENT_LENGTH, HOST};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method, Response, Uri};
use hyper::body::Incoming;
use tracing::{debug, info};

use super::pool::{Connection, Lease};
use super::{Load, Upstream, Upstreams};
use crate::body::Spliced;
use crate::metrics::{Metrics, Retry, UpstreamOutcome};

/// A request as an upstream gets it, but for `Host` and `Content-Length`.
#[derive(Clone, Debug)]
pub struct Request {
    /// The method.
    pub method: Method,
    /// Path and query, as the client wrote them.
    pub target: PathAndQuery,
    /// End-to-end headers.
    pub headers: HeaderMap,
    /// The whole body.
    pub body: Spliced,
    /// Whether the client sent a body, so that an empty one is said to be empty.
    pub has_body: bool,
}

/// Why there is no reply.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// No connection could be opened.
    #[error("the upstream {url} cannot be reached")]
    Unreachable {
        /// Which.
        url: String,
        /// What the network answered.
        source: io::Error,
    },
    /// The connection ended, or what came is not HTTP.
    #[error("the upstream {url} closed the connection without a reply")]
    Died {
        /// Which.
        url: String,
        /// What the client side saw.
        source: hyper::Error,
    },
    /// The reply ended before its end.
    #[error("the reply of the upstream {url} is not whole")]
    Cut {
        /// Which.
        url: String,
        /// In what way.
        source: Box<crate::reply::Cut>,
    },
    /// It was silent for too long.
    #[error("the upstream {url} sent nothing for {} s", after.as_secs())]
    Silent {
        /// Which.
        url: String,
        /// How long.
        after: Duration,
    },
}

/// Sends `request` to the upstream of `load`, and waits at most `timeout` for the head of the reply.
///
/// It is sent once more if no connection could be opened (to another upstream, if there is one: `load` then is on that
/// one, and `moved` is told before anything is sent there), or if it went into a kept connection that had ended before
/// the upstream could read it whole.
///
/// # Errors
/// See [`SendError`].
pub async fn send(
    upstreams: &Upstreams,
    load: &mut Load,
    request: Request,
    timeout: Duration,
    metrics: &Metrics,
    moved: impl FnMut(&Arc<Upstream>),
) -> Result<(Response<Incoming>, Lease), SendError> {
    let work = attempts(upstreams, load, request, metrics, moved);
    let result = match tokio::time::timeout(timeout, work).await {
        Ok(result) => result,
        Err(_) => Err(SendError::Silent { url: load.upstream.url().to_owned(), after: timeout }),
    };
    let outcome = match &result {
        Ok(_) => UpstreamOutcome::Replied,
        Err(SendError::Unreachable { .. }) => UpstreamOutcome::Unreachable,
        Err(SendError::Died { .. } | SendError::Cut { .. }) => UpstreamOutcome::Died,
        Err(SendError::Silent { .. }) => UpstreamOutcome::Silent,
    };
    load.upstream.metrics.requests.at(outcome).inc();
    result
}

async fn attempts(
    upstreams: &Upstreams,
    load: &mut Load,
    request: Request,
    metrics: &Metrics,
    mut moved: impl FnMut(&Arc<Upstream>),
) -> Result<(Response<Incoming>, Lease), SendError> {
    let upstream = load.upstream.clone();
    if let Some(connection) = upstream.pool.idle() {
        match attempt(&upstream, connection, request.clone()).await {
            Ok(reply) => return Ok(reply),
            Err(Failure { untaken: true, error }) => {
                metrics.retries.at(Retry::Stale).inc();
                debug!(upstream = upstream.url(), %error, "kept connection had ended, sending once more");
            }
            Err(Failure { error: source, .. }) => {
                return Err(SendError::Died { url: upstream.url().to_owned(), source });
            }
        }
    }
    let refused = match on_new_connection(&upstream, request.clone()).await {
        Err(SendError::Unreachable { source, .. }) => source,
        other => return other,
    };
    metrics.retries.at(Retry::Refused).inc();
    let next = upstreams.choose(Some(&upstream)).unwrap_or(&upstream);
    info!(upstream = upstream.url(), error = %refused, next = next.url(), "no connection, trying once more");
    if !Arc::ptr_eq(next, &upstream) {
        upstream.metrics.requests.at(UpstreamOutcome::Unreachable).inc();
        *load = next.load(load.tokens);
        moved(next);
    }
    on_new_connection(next, request).await
}

/// Asks `upstream` for `path` on a connection of its own, apart from the traffic and its series.
///
/// # Errors
/// What is wrong, in words: no reply in `timeout`, or one with a status other than 2xx.
pub async fn check(upstream: &Upstream, path: &PathAndQuery, timeout: Duration) -> Result<(), String> {
    let work = async {
        let connection = upstream.pool.connect().await.map_err(|error| error.to_string())?;
        let request = Request {
            method: Method::GET,
            target: path.clone(),
            headers: HeaderMap::new(),
            body: Spliced::from(bytes::Bytes::new()),
            has_body: false,
        };
        let reply = attempt(upstream, connection, request).await;
        let (reply, _lease) = reply.map_err(|failure| failure.error.to_string())?;
        if reply.status().is_success() { Ok(()) } else { Err(format!("status {}", reply.status())) }
    };
    let result = tokio::time::timeout(timeout, work).await;
    result.unwrap_or_else(|_| Err(format!("no reply in {} s", timeout.as_secs_f64())))
}

async fn on_new_connection(
    upstream: &Arc<Upstream>,
    request: Request,
) -> Result<(Response<Incoming>, Lease), SendError> {
    let url = || upstream.url().to_owned();
    let connection = match upstream.pool.connect().await {
        Ok(connection) => connection,
        Err(source) => {
            upstream.rest();
            return Err(SendError::Unreachable { url: url(), source });
        }
    };
    upstream.awake();
    upstream.metrics.connections_opened.inc();
    let reply = attempt(upstream, connection, request).await;
    reply.map_err(|Failure { error: source, .. }| SendError::Died { url: url(), source })
}

/// Why one attempt gave no reply.
struct Failure {
    error: hyper::Error,
    /// Whether the upstream cannot have read the request whole.
    untaken: bool,
}

async fn attempt(
    upstream: &Upstream,
    mut connection: Connection,
    request: Request,
) -> Result<(Response<Incoming>, Lease), Failure> {
    let mark = connection.wire.mark();
    match connection.sender.try_send_request(request.into_http(upstream)).await {
        Ok(reply) => Ok((reply, Lease { connection })),
        Err(mut failure) => {
            let unsent = failure.take_message().is_some();
            Err(Failure {
                untaken: unsent || connection.wire.is_untaken_since(mark),
                error: failure.into_error(),
            })
        }
    }
}

impl Request {
    /// With the two headers that depend on where it goes and on its body, each exactly once.
    fn into_http(self, upstream: &Upstream) -> http::Request<Spliced> {
        let len = self.body.len();
        let mut request = http::Request::new(self.body);
        *request.method_mut() = self.method;
        *request.uri_mut() = Uri::from(self.target);
        *request.headers_mut() = self.headers;
        let host = HeaderValue::from_str(upstream.authority.as_str()).expect("an authority is visible ASCII");
        request.headers_mut().insert(HOST, host);
        if self.has_body {
            request.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(len));
        } else {
            request.headers_mut().remove(CONTENT_LENGTH);
        }
        request
    }
}
