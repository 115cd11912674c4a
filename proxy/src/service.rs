//! What happens to one request.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST};
use http::response::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body::Body;
use hyper::body::Incoming;
use tether_dump::{RequestId, Rows};
use tracing::warn;

use crate::abort;
use crate::app::App;
use crate::body::{self, Edit, ReadError, Reserved, Spliced};
use crate::call::Call;
use crate::client_io::Turn;
use crate::config::{ClientIds, OnMismatch, UpstreamKind};
use crate::delivery::Delivery;
use crate::dump_files;
use crate::error::ProxyError;
use crate::gate::{self, Expected, error_chain};
use crate::headers;
use crate::metrics::{Abort, IdSource, Label, Phase, Route};
use crate::own;
use crate::reply::{Cut, Flow, HeldStream, Kind, ReplyBody, UpstreamBody};
use crate::stated;
use crate::tag::{self, ClientRid, Endpoint, Found, Prompt};
use crate::upstream::{self, SendError, Verdict};

/// Longest reply that is read whole to find what it says of the prompt.
const MAX_STATED: usize = 1 << 20;

/// A request that was read, and tagged if it is one that is.
struct Outgoing {
    headers: HeaderMap,
    body: Spliced,
    has_body: bool,
    tagged: Option<Tagged>,
}

struct Tagged {
    batch: bool,
    ids: Vec<RequestId>,
    prompts: Vec<Prompt>,
    /// What the client calls them.
    client: Option<ClientRid>,
}

/// Answers one request of a client.
pub async fn handle(app: &Arc<App>, request: Request<Incoming>, turn: Turn) -> Response<ReplyBody> {
    if let Some(reply) = own::answer(app, &request).await {
        let head = request.method() == Method::HEAD;
        return reply
            .map(|kind| ReplyBody::new(if head { Kind::Full(Bytes::new()) } else { kind }, None, turn));
    }
    let mut call = Call::begin(app, &request);
    let result = match call.route {
        _ if request.method() == Method::CONNECT => Err(ProxyError::Connect),
        Route::Health if app.is_draining() => Err(ProxyError::Draining),
        Route::AbortRequest => abort::handle(app, request).await.map(|reply| reply.map(full)),
        _ => forward(app, &mut call, request).await,
    };
    let reply = match result {
        Ok(reply) => reply,
        Err(error) => {
            call.why = Some(error_chain(&error));
            if client_is_gone(&error) {
                call.aborted(Abort::ClientGone);
            } else {
                app.metrics.refused.at(error.status().1).inc();
            }
            error.response(call.id).map(full)
        }
    };
    let (mut parts, kind) = reply.into_parts();
    call.status = parts.status;
    parts.headers.insert(headers::REQUEST_ID, id_header(call.id));
    if let Some(client) = &call.client_id {
        parts.headers.insert(headers::CLIENT_REQUEST_ID, client.clone());
    }
    Response::from_parts(parts, ReplyBody::new(kind, Some(call), turn))
}

fn full(text: String) -> Kind {
    Kind::Full(text.into())
}

fn id_header(id: RequestId) -> HeaderValue {
    HeaderValue::from_str(&id.to_string()).expect("a UUID is visible ASCII")
}

/// Whether a body ended because the client went away, rather than because of what it sent.
fn client_is_gone(error: &ProxyError) -> bool {
    let ProxyError::Read(ReadError::Broken(error)) = error else { return false };
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if let Some(io) = cause.downcast_ref::<std::io::Error>() {
            use std::io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
            return matches!(io.kind(), UnexpectedEof | ConnectionReset | ConnectionAborted | BrokenPipe);
        }
        source = cause.source();
    }
    error.is_incomplete_message() || error.is_closed() || error.is_canceled()
}

async fn forward(
    app: &Arc<App>,
    call: &mut Call,
    request: Request<Incoming>,
) -> Result<Response<Kind>, ProxyError> {
    let (mut parts, incoming) = request.into_parts();
    let mut memory = app.memory.nothing();
    let target = parts.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    let method = parts.method;
    let endpoint = Endpoint::at(target.path()).filter(|_| method == Method::POST);
    let headers = std::mem::take(&mut parts.headers);
    let outgoing = read(app, call, endpoint, headers, incoming, &mut memory).await?;
    if endpoint.is_some() {
        call.phase = Phase::Queued;
        call.permit = Some(app.admission.enter().await?);
    }
    call.phase = Phase::Waiting;

    let Outgoing { headers, body, has_body, tagged } = outgoing;
    let tokens =
        tagged.iter().flat_map(|tagged| &tagged.prompts).map(|prompt| prompt.estimate).sum::<u64>().max(1);
    let chosen = app.upstreams.choose(None).cloned();
    let chosen = chosen.ok_or_else(|| ProxyError::NoUpstream { retry_after: app.upstreams.retry_after() })?;
    let mut load = chosen.load(tokens);
    let mut delivery = match &tagged {
        Some(tagged) => Some(enter(app, tagged, &chosen)?),
        None => None,
    };
    if has_body {
        app.metrics.body_bytes.observe(body.len() as f64);
    }
    let request = upstream::Request { method, target, headers, body, has_body };
    let sent = std::time::Instant::now();
    let limit = app.args.upstream_timeout.0;
    let moved = |next: &Arc<_>| {
        if let Some(delivery) = &mut delivery {
            delivery.moved(next);
        }
    };
    let result = upstream::send(&app.upstreams, &mut load, request, limit, &app.metrics, moved).await;
    let upstream = load.upstream().clone();
    call.upstream = Some(upstream.url().to_owned());
    match &result {
        Ok((reply, _)) => upstream.note(Verdict::of(reply.status())),
        // A refused connection has been noted where it was refused.
        Err(SendError::Unreachable { .. }) => {}
        Err(_) => upstream.note(Verdict::Failure),
    }
    let (reply, lease) = result?;
    app.metrics.first_byte.at(call.route).observe(sent.elapsed().as_secs_f64());
    // It has been sent; from here on only the reply counts.
    drop(memory);

    let (mut parts, incoming) = reply.into_parts();
    headers::remove_hop_by_hop(&mut parts.headers);
    let is_stream = is_event_stream(&parts.headers);
    if is_stream {
        parts.headers.entry(headers::ACCEL_BUFFERING).or_insert(HeaderValue::from_static("no"));
        parts.headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-cache"));
    }
    let dir = delivery.as_ref().and_then(Delivery::dir).cloned();
    if let Some(delivery) = &mut delivery {
        match parts.status.as_u16() {
            400..500 | 503 => delivery.was_refused(),
            500.. => delivery.is_of_no_use(),
            _ => {}
        }
    }
    let body = UpstreamBody::new(incoming, Flow { delivery, lease, load, upstream }, limit);
    match (tagged, dir) {
        (Some(tagged), Some(dir)) if parts.status == StatusCode::OK => {
            let gated = Gated { dir, tagged, is_stream };
            gated.pass(app, call, parts, body).await
        }
        _ => Ok(Response::from_parts(parts, Kind::Upstream(Box::new(body)))),
    }
}

fn is_event_stream(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    kind.get(..17).is_some_and(|kind| kind.eq_ignore_ascii_case(b"text/event-stream"))
}

/// Of each of `count` prompts whether the upstream says that it has no dump: it opted out, or was aborted before its states
/// were written. What is not understood says nothing, and the dumps are looked for.
fn without_dump(headers: &HeaderMap, count: usize) -> Vec<bool> {
    let text = headers.get(headers::CAPTURE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let words: Vec<_> = text.split(',').map(|word| word.trim().eq_ignore_ascii_case("none")).collect();
    match words.len() {
        1 => vec![words[0]; count],
        len if len == count => words,
        _ => vec![false; count],
    }
}

/// Reads the body, decodes it, and tags it if it is one that is tagged.
async fn read(
    app: &Arc<App>,
    call: &mut Call,
    endpoint: Option<Endpoint>,
    mut headers: HeaderMap,
    mut incoming: Incoming,
    memory: &mut Reserved,
) -> Result<Outgoing, ProxyError> {
    let limit = app.args.max_body.0;
    let has_body = !incoming.is_end_stream() || headers.contains_key(CONTENT_LENGTH);
    let waits_for_us = headers.contains_key(EXPECT);
    let encoding = match endpoint {
        Some(_) => body::encodings(&headers)?,
        None => None,
    };
    let mut whole = match body::read(&mut incoming, limit, app.args.client_timeout.0, memory).await {
        Ok(whole) => whole,
        Err(error) => {
            if !waits_for_us && matches!(error, ReadError::TooLong { .. } | ReadError::NoMemory { .. }) {
                body::discard(&mut incoming).await;
            }
            return Err(error.into());
        }
    };
    headers::remove_hop_by_hop(&mut headers);
    for name in [EXPECT, CONTENT_LENGTH, HOST] {
        headers.remove(name);
    }
    if let Some(encoding) = encoding {
        (whole, *memory) =
            decode(encoding, whole, limit, std::mem::replace(memory, app.memory.nothing())).await?;
        headers.remove(CONTENT_ENCODING);
    }
    let Some(endpoint) = endpoint else {
        set_ids(&mut headers, call);
        return Ok(Outgoing { headers, body: whole.into(), has_body, tagged: None });
    };
    let read_tokens = app.args.upstream.iter().any(|spec| spec.dump_dir.is_some());
    let found = tag::find(endpoint, &whole, read_tokens)?;
    let sglang = app.args.upstream_kind == UpstreamKind::Sglang;
    if sglang && found.n > 1 {
        return Err(ProxyError::SamplesOfSglang(found.n));
    }
    let all_rows =
        found.prompts.iter().any(|prompt| prompt.capture.wanted && prompt.capture.rows == Rows::All);
    if found.n > 1 && all_rows {
        return Err(ProxyError::Samples(found.n));
    }
    let ids = choose_ids(app, call, &found);
    let value = tag::rid_value(found.batch, ids.iter().copied());
    let rid = Edit { slot: &found.slot, key: "rid", value: &value };
    let salted =
        sglang && !app.args.no_fresh_prefix && found.prompts.iter().any(|prompt| prompt.capture.wanted);
    let body = if salted {
        // Not the IDs themselves: one that a client chose may come again, and would find its own prefix.
        let value = tag::rid_value(found.batch, ids.iter().map(|_| RequestId::new()));
        Spliced::new(&whole, [rid, Edit { slot: &found.salt, key: "cache_salt", value: &value }])
    } else {
        Spliced::new(&whole, [rid])
    };
    set_ids(&mut headers, call);
    let Found { batch, prompts, client_rid, .. } = found;
    let client = client_rid.or_else(|| Some(ClientRid::of_header(call.client_id.as_ref()?)));
    app.metrics.prompt_tokens.inc_by(prompts.iter().filter_map(|p| p.tokens).map(|t| t.count as u64).sum());
    Ok(Outgoing { headers, body, has_body: true, tagged: Some(Tagged { batch, ids, prompts, client }) })
}

/// Decodes off the threads that serve connections, unless it is short work.
async fn decode(
    encoding: body::Encoding,
    encoded: Bytes,
    limit: u64,
    mut memory: Reserved,
) -> Result<(Bytes, Reserved), ProxyError> {
    const SHORT: usize = 16 << 10;
    let len = encoded.len() as u64;
    let work = move || {
        let whole = body::decode(encoding, &encoded, limit, &mut memory)?;
        memory.shrink(len);
        Ok((whole, memory))
    };
    if len <= SHORT as u64 {
        return work();
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

fn set_ids(headers: &mut HeaderMap, call: &Call) {
    headers.insert(headers::REQUEST_ID, id_header(call.id));
    // The proxy alone says what an ID was before; a client's own word would be taken for the name of a dump.
    match &call.client_id {
        Some(client) => headers.insert(headers::CLIENT_REQUEST_ID, client.clone()),
        None => headers.remove(headers::CLIENT_REQUEST_ID),
    };
}

/// An ID for each prompt, by the policy for IDs that clients choose. Of a single prompt it is the call's.
fn choose_ids(app: &App, call: &mut Call, found: &Found) -> Vec<RequestId> {
    let trust = app.args.client_ids == ClientIds::Trust;
    let trusted = |text: &String| text.parse::<RequestId>().ok().filter(|_| trust);
    let count = found.prompts.len();
    let wanted: Vec<Option<RequestId>> = match &found.client_rid {
        Some(ClientRid::One(text)) if !found.batch => vec![trusted(text)],
        Some(ClientRid::Many(texts)) if found.batch && texts.len() == count => {
            texts.iter().map(trusted).collect()
        }
        _ => vec![None; count],
    };
    let all_kept = !wanted.is_empty() && wanted.iter().all(Option::is_some);
    if !found.batch {
        if let Some(Some(id)) = wanted.first() {
            (call.id, call.kept) = (*id, true);
        } else if found.client_rid.is_some() {
            // The ID in the body is the client's; one in a header does not take its place.
            (call.id, call.kept) = if call.kept { (RequestId::new(), false) } else { (call.id, false) };
        }
    }
    if let Some(client) = found.client_rid.as_ref().filter(|_| !all_kept) {
        call.client_id = client.header();
        if call.client_id.is_none() {
            warn!(request_id = %call.id, "the client's ID is too long for a header; the dump will not have it");
        }
    }
    let source = |kept: bool| match (kept, &call.client_id) {
        (true, _) => IdSource::Kept,
        (false, Some(_)) => IdSource::Replaced,
        (false, None) => IdSource::Made,
    };
    if !found.batch {
        app.metrics.ids.at(source(call.kept)).inc();
        return vec![call.id];
    }
    let ids = wanted.into_iter().map(|kept| {
        app.metrics.ids.at(source(kept.is_some())).inc();
        kept.unwrap_or_else(RequestId::new)
    });
    ids.collect()
}

/// Enters the prompts into the table.
fn enter(app: &Arc<App>, tagged: &Tagged, chosen: &Arc<upstream::Upstream>) -> Result<Delivery, ProxyError> {
    // Entered first: what another request publishes under the ID, it publishes before it leaves the table.
    let entered = app.table.enter(&tagged.ids, tagged.batch, tagged.client.as_ref(), chosen)?;
    if app.args.client_ids == ClientIds::Trust {
        // An ID that the client chose may have been used before. Its dump is not ours to touch.
        let used = |id: &&RequestId| app.dump_dirs.iter().any(|dir| dump_files::exists(dir, **id));
        if let Some(id) = tagged.ids.iter().find(used) {
            return Err(ProxyError::Published(*id));
        }
    }
    let captured = tagged.ids.iter().zip(&tagged.prompts).filter(|(_, prompt)| prompt.capture.wanted);
    Ok(Delivery::new(entered, captured.map(|(id, _)| *id).collect(), chosen, app.orphans.clone()))
}

/// A reply whose dumps are to be looked at.
struct Gated {
    dir: Arc<std::path::Path>,
    tagged: Tagged,
    is_stream: bool,
}

impl Gated {
    async fn pass(
        self,
        app: &Arc<App>,
        call: &mut Call,
        mut parts: Parts,
        mut body: UpstreamBody,
    ) -> Result<Response<Kind>, ProxyError> {
        let Self { dir, tagged, is_stream } = self;
        let without = without_dump(&parts.headers, tagged.prompts.len());
        let has_dump = |(index, prompt): &(usize, &Prompt)| prompt.capture.wanted && !without[*index];
        let captured: Vec<(usize, &Prompt)> = tagged.prompts.iter().enumerate().filter(has_dump).collect();
        if captured.is_empty() {
            return Ok(Response::from_parts(parts, Kind::Upstream(Box::new(body))));
        }
        call.phase = Phase::Gate;
        parts.headers.remove(headers::HIDDEN_STATES_PATH);
        let mut expected: Vec<Expected> = captured
            .iter()
            .map(|(index, prompt)| Expected { id: tagged.ids[*index], tokens: prompt.tokens, stated: None })
            .collect();
        let wait = app.args.dump_wait.0;
        let warn_only = app.args.on_mismatch == OnMismatch::Warn;
        if is_stream && captured.iter().any(|(_, prompt)| prompt.capture.rows == Rows::All) {
            let metrics = app.metrics.clone();
            let check = async move { gate::check(&dir, expected, wait, &metrics).await };
            let held = HeldStream::new(body, Box::pin(check), warn_only, !tagged.batch);
            return Ok(Response::from_parts(parts, Kind::Held(Box::new(held))));
        }
        if !is_stream && expected.iter().any(|expected| expected.tokens.is_none()) {
            let text = body.read_ahead(MAX_STATED).await.map_err(|cut| died(call, cut))?;
            let stated = text.and_then(|text| stated::prompt_tokens(&text, tagged.prompts.len()));
            if let Some(stated) = stated {
                for (expected, (index, _)) in expected.iter_mut().zip(&captured) {
                    expected.stated = Some(stated[*index]);
                }
            }
        }
        match gate::check(&dir, expected, wait, &app.metrics).await {
            Ok(paths) => {
                if let ([path], false) = (&*paths, tagged.batch) {
                    let path = HeaderValue::from_bytes(path.as_os_str().as_encoded_bytes());
                    match path {
                        Ok(path) => {
                            parts.headers.insert(headers::HIDDEN_STATES_PATH, path);
                        }
                        Err(_) => warn!(request_id = %call.id, "the dump's path cannot stand in a header"),
                    }
                }
            }
            Err(failure) if warn_only => {
                let text = format!("{}; request_id={}", failure.reason.text(), failure.id);
                let value = HeaderValue::from_str(&text).expect("names and UUIDs are visible ASCII");
                parts.headers.insert(headers::MISMATCH, value);
            }
            Err(failure) => return Err(Box::new(failure).into()),
        }
        Ok(Response::from_parts(parts, Kind::Upstream(Box::new(body))))
    }
}

/// A reply that ended while it was read ahead: nothing has been sent, so it can still be an error.
fn died(call: &Call, cut: Cut) -> ProxyError {
    let url = call.upstream.clone().unwrap_or_default();
    match cut {
        Cut::Died(source) => SendError::Died { url, source }.into(),
        _ => SendError::Cut { url, source: Box::new(cut) }.into(),
    }
}
