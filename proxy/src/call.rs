//! One request of a client, counted from its head to the end of its reply.

use std::sync::Arc;
use std::time::Instant;

use http::{HeaderValue, Method, Request, StatusCode, Uri};
use tether_dump::RequestId;
use tether_telemetry::Begun;
use tracing::{debug, info, warn};

use crate::app::App;
use crate::config::ClientIds;
use crate::headers;
use crate::limits::Permit;
use crate::metrics::{Abort, Class, Label, Phase, Route};
use crate::page::{self, RecentError};
use crate::tag::Endpoint;

/// Counts one request as in flight until dropped, then records how it ended. The reply's body owns it, so a client that
/// hangs up mid-stream is recorded without anyone having to notice.
#[derive(Debug)]
#[must_use = "dropping this ends the request"]
pub struct Call {
    /// The request's ID: in `x-request-id` up and down, and in logs. Of a single prompt, also the prompt's.
    pub id: RequestId,
    /// Whether the client chose it.
    pub kept: bool,
    /// The ID that the client chose and that was replaced, as it travels.
    pub client_id: Option<HeaderValue>,
    /// What is asked for.
    pub route: Route,
    /// How far it has come.
    pub phase: Phase,
    /// Where it went.
    pub upstream: Option<String>,
    /// Status of the reply.
    pub status: StatusCode,
    /// Why the proxy answered itself, in words.
    pub why: Option<String>,
    /// Bytes of the reply's body so far.
    pub sent: u64,
    /// Its turn, kept to the end of the reply.
    pub permit: Option<Permit>,
    app: Arc<App>,
    method: Method,
    uri: Uri,
    started: Instant,
    _age: Begun,
    end: Option<Result<(), Abort>>,
}

impl Call {
    /// Begins with the head of `request`.
    pub fn begin<B>(app: &Arc<App>, request: &Request<B>) -> Self {
        let route = route(request.method(), request.uri().path());
        app.metrics.received.at(route).inc();
        app.metrics.in_flight.inc();
        let age = app.metrics.oldest.begin();
        let client = request.headers().get(headers::REQUEST_ID);
        let kept = client
            .filter(|_| app.args.client_ids == ClientIds::Trust)
            .and_then(|value| value.to_str().ok()?.parse().ok());
        Self {
            id: kept.unwrap_or_else(RequestId::new),
            kept: kept.is_some(),
            client_id: client.filter(|_| kept.is_none()).cloned(),
            route,
            phase: Phase::Reading,
            upstream: None,
            status: StatusCode::OK,
            why: None,
            sent: 0,
            permit: None,
            app: app.clone(),
            method: request.method().clone(),
            uri: request.uri().clone(),
            started: Instant::now(),
            _age: age,
            end: None,
        }
    }

    /// The reply begins.
    pub fn replying(&mut self) {
        // How far it had come is how far it came, if it has ended.
        if self.end.is_none() {
            self.phase = Phase::Replying;
        }
    }

    /// The whole reply was handed to the socket.
    pub fn answered(&mut self) {
        self.end.get_or_insert(Ok(()));
    }

    /// The reply was cut.
    pub fn aborted(&mut self, reason: Abort) {
        self.end.get_or_insert(Err(reason));
    }

    /// Puts it among the last errors, if it is one.
    fn remember(&mut self, outcome: Result<(), Abort>) {
        let message = match (outcome, self.why.take()) {
            (Err(Abort::ClientGone), _) => return,
            (_, Some(why)) => why,
            (Err(reason), None) => format!("cut off: {}", reason.text().replace('_', " ")),
            (Ok(()), None) if self.status.is_server_error() => "the upstream's own answer".to_owned(),
            (Ok(()), None) => return,
        };
        self.app.page.errors.push(RecentError {
            time: page::now(),
            request_id: self.id,
            route: self.route.text(),
            status: self.status.as_u16(),
            upstream: self.upstream.clone(),
            message,
        });
    }

    /// Whether the client asked for the head of the reply only.
    pub fn is_head(&self) -> bool {
        self.method == Method::HEAD
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let metrics = &self.app.metrics;
        metrics.in_flight.dec();
        let elapsed = self.started.elapsed().as_secs_f64();
        metrics.duration.at(self.route).observe(elapsed);
        let gone = if self.app.is_cutting() { Abort::Drained } else { Abort::ClientGone };
        let outcome = self.end.unwrap_or(Err(gone));
        match outcome {
            Ok(()) => metrics.answered.at(self.route, class(self.status)).inc(),
            Err(reason) => metrics.aborted.at(self.route, reason).inc(),
        }
        if outcome == Err(Abort::ClientGone) {
            metrics.client_gone.at(self.phase).inc();
        }
        self.remember(outcome);
        // The access log. The query is left out: it may carry keys.
        macro_rules! log {
            ($level:ident, $message:literal $(, $field:ident = $value:expr)*) => {
                $level!(
                    request_id = %self.id,
                    method = %self.method,
                    path = self.uri.path(),
                    status = self.status.as_u16(),
                    upstream = self.upstream.as_deref(),
                    seconds = elapsed,
                    bytes = self.sent,
                    $($field = $value,)*
                    $message
                )
            };
        }
        match outcome {
            Ok(()) if self.status.is_server_error() => log!(warn, "answered with an error"),
            Ok(()) => log!(debug, "answered"),
            Err(reason) => log!(info, "aborted", reason = reason.text(), phase = self.phase.text()),
        }
    }
}

fn class(status: StatusCode) -> Class {
    match status.as_u16() {
        ..300 => Class::Success,
        300..400 => Class::Redirect,
        400..500 => Class::ClientError,
        _ => Class::ServerError,
    }
}

fn route(method: &Method, path: &str) -> Route {
    match (Endpoint::at(path), path) {
        (Some(Endpoint::Generate), _) if method == Method::POST => Route::Generate,
        (Some(Endpoint::Completions), _) if method == Method::POST => Route::Completions,
        (Some(Endpoint::ChatCompletions), _) if method == Method::POST => Route::ChatCompletions,
        (_, "/abort_request") if method == Method::POST => Route::AbortRequest,
        (_, "/health") => Route::Health,
        _ => Route::Other,
    }
}
