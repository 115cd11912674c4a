//! `/abort_request`: by the client's own name or ours, to the upstream that has the request.
//!
//! SGLang matches IDs by their beginning, so a name that a client chose is never sent on: it could end the requests of
//! others. What is sent is always a whole ID of ours, or the wish to end all.

use std::sync::Arc;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::Deserialize;
use serde_json::{Value, json};
use tether_dump::RequestId;

use crate::app::App;
use crate::body;
use crate::config::Balance;
use crate::error::{ProxyError, json_response};
use crate::gate::error_chain;
use crate::upstream::{self, Upstream};

/// Longest body.
const MAX_BODY: u64 = 64 << 10;

#[derive(Deserialize)]
struct Wish {
    #[serde(default)]
    rid: Option<String>,
    #[serde(default)]
    abort_all: bool,
}

/// Passes the wish on, and reports what came of it at each upstream. A name that nothing in flight has is no error, as in
/// SGLang.
///
/// # Errors
/// The body is not a wish, or cannot be read.
pub async fn handle(app: &Arc<App>, request: Request<Incoming>) -> Result<Response<String>, ProxyError> {
    let mut memory = app.memory.nothing();
    let body = body::read(request.into_body(), MAX_BODY, app.args.client_timeout.0, &mut memory).await?;
    let wish: Wish = serde_json::from_slice(&body).map_err(|error| ProxyError::Abort(error.to_string()))?;
    let mut orders: Vec<(Arc<Upstream>, Value)> = Vec::new();
    if wish.abort_all {
        orders.extend(
            app.upstreams.all().iter().map(|upstream| (upstream.clone(), json!({"abort_all": true}))),
        );
    } else {
        let rid =
            wish.rid.ok_or_else(|| ProxyError::Abort("neither `rid` nor `abort_all` is there".into()))?;
        let known = app.table.named(&rid);
        for id in &known {
            orders.extend(app.table.upstream(*id).map(|upstream| (upstream, json!({ "rid": id }))));
        }
        // An ID that may have been given by another proxy in front of the same servers.
        if let (true, Ok(id)) = (known.is_empty(), rid.parse::<RequestId>()) {
            orders
                .extend(app.upstreams.all().iter().map(|upstream| (upstream.clone(), json!({ "rid": id }))));
        }
    }
    let mut results = Vec::with_capacity(orders.len());
    for (upstream, order) in orders {
        let result = send(app, &upstream, &order).await;
        let mut entry = json!({ "upstream": upstream.url(), "rid": order.get("rid") });
        match result {
            Ok(status) => entry["status"] = status.as_u16().into(),
            Err(error) => entry["error"] = error_chain(&error).into(),
        }
        results.push(entry);
    }
    Ok(json_response(StatusCode::OK, &json!({ "aborted": results })))
}

async fn send(app: &App, upstream: &Arc<Upstream>, order: &Value) -> Result<StatusCode, upstream::SendError> {
    let headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
    let request = upstream::Request {
        method: Method::POST,
        target: PathAndQuery::from_static("/abort_request"),
        headers,
        body: Bytes::from(order.to_string()).into(),
        has_body: true,
    };
    ask(app, upstream, request).await
}

/// Sends a short request of the proxy's own to `upstream`; the status of the reply.
///
/// # Errors
/// There is none.
pub async fn ask(
    app: &App,
    upstream: &Arc<Upstream>,
    request: upstream::Request,
) -> Result<StatusCode, upstream::SendError> {
    /// Such requests are answered at once or not at all.
    const LONGEST: std::time::Duration = std::time::Duration::from_secs(5);
    let only = upstream::Upstreams::new(vec![upstream.clone()], Balance::LeastTokens);
    let mut load = upstream.load(0);
    let (reply, lease) = upstream::send(&only, &mut load, request, LONGEST, &app.metrics, |_| {}).await?;
    let status = reply.status();
    // Read to its end, so that the connection can be used again.
    if let Ok(Ok(_)) = tokio::time::timeout(LONGEST, reply.into_body().collect()).await {
        lease.keep(&upstream.pool);
    }
    Ok(status)
}
