//! Routes, bodies and headers: from a hyper request to the app and back.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Full};
use serde::Deserialize;
use serde_json::json;
use tether_telemetry::Begun;

use crate::app::{Answer, App, CallId, Generated};
use crate::error::ApiError;
use crate::metrics::{Metrics, Outcome};
use crate::openai::{self, Chunks, Form};
use crate::plan::Originals;
use crate::stream::{Events, Streamed};

/// Longest request body, as at the proxy.
pub const MAX_BODY: usize = 512 * 1000 * 1000;
/// Longest pause between two pieces of a body.
const BODY_PAUSE: Duration = Duration::from_secs(60);

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const CLIENT_REQUEST_ID: HeaderName = HeaderName::from_static("x-client-request-id");
/// Where the path of one model begins.
const MODELS: &str = "/v1/models/";
const TETHER_CAPTURE: HeaderName = HeaderName::from_static("x-tether-capture");

/// The body of every reply.
pub type ReplyBody = Tracked;

impl App {
    /// Answers one request.
    pub async fn handle<B>(self: Arc<Self>, request: Request<B>) -> Response<ReplyBody>
    where
        B: Body<Data = Bytes, Error: std::fmt::Display> + Unpin,
    {
        // HEAD is GET without the body, which hyper leaves out.
        let method = match request.method() {
            &Method::HEAD => &Method::GET,
            method => method,
        };
        let path = request.uri().path().to_owned();
        if !self.keys.admit(request.method(), &path, request.headers()) {
            return plain(json_reply(StatusCode::UNAUTHORIZED, &json!({"error": "Unauthorized"})));
        }
        let allowed = match path.as_str() {
            "/generate" | "/abort_request" => "POST, PUT",
            "/v1/completions"
            | "/v1/chat/completions"
            | "/v1/chat/completions/render"
            | "/tokenize"
            | "/v1/tokenize"
            | "/detokenize"
            | "/v1/detokenize" => "POST",
            "/flush_cache" => "GET, HEAD, POST",
            "/" | "/ping" | "/ready" | "/health" | "/get_model_info" | "/model_info" | "/v1/models"
            | "/metrics" | "/health_generate" | "/server_info" | "/get_server_info" => "GET, HEAD",
            path if path.starts_with(MODELS) => "GET, HEAD",
            _ => return plain(error_reply(&ApiError::NotFound)),
        };
        if !allowed.split(", ").any(|allowed| allowed == method.as_str()) {
            return plain(error_reply(&ApiError::MethodNotAllowed { allowed }));
        }
        match path.as_str() {
            "/generate" => self.generate_route(request, None).await,
            "/v1/completions" => self.generate_route(request, Some(Form::Completion)).await,
            "/v1/chat/completions" => self.generate_route(request, Some(Form::Chat)).await,
            "/v1/chat/completions/render" => {
                plain(self.render_route(request).await.unwrap_or_else(|error| openai_error(&error)))
            }
            "/tokenize" | "/v1/tokenize" | "/detokenize" | "/v1/detokenize" => {
                plain(self.tokens_route(request, &path).await.unwrap_or_else(|error| openai_error(&error)))
            }
            "/" => plain(json_reply(StatusCode::OK, &json!("tether-server is running"))),
            "/flush_cache" => plain(typed(
                StatusCode::OK,
                "text/plain; charset=utf-8",
                "There is no prefix cache to flush.\n".into(),
            )),
            "/ping" | "/ready" => plain(self.health()),
            "/abort_request" => {
                plain(self.abort_route(request).await.unwrap_or_else(|error| error_reply(&error)))
            }
            "/health" => plain(self.health()),
            "/health_generate" => {
                plain(self.health_generate().await.unwrap_or_else(|error| error_reply(&error)))
            }
            "/server_info" | "/get_server_info" => plain(json_reply(StatusCode::OK, &self.server_info())),
            path if path.starts_with(MODELS) => plain(self.model(&path[MODELS.len()..])),
            "/metrics" => plain(self.metrics_text()),
            "/v1/models" => plain(json_reply(StatusCode::OK, &self.models())),
            _ => plain(json_reply(StatusCode::OK, &self.model_info())),
        }
    }

    /// `/generate`, or one of OpenAI's forms of it.
    async fn generate_route<B>(
        self: Arc<Self>,
        request: Request<B>,
        form: Option<Form>,
    ) -> Response<ReplyBody>
    where
        B: Body<Data = Bytes, Error: std::fmt::Display> + Unpin,
    {
        let started = Instant::now();
        let in_flight = InFlight::begin(&self, started);
        let mut call_id = CallId::new(request.headers().get(REQUEST_ID).and_then(|id| id.to_str().ok()));
        let result = async {
            self.lifecycle.check()?;
            json_content(request.headers())?;
            let originals =
                Originals::read(request.headers().get(CLIENT_REQUEST_ID).map(HeaderValue::as_bytes));
            let body = read_body(request.into_body(), MAX_BODY).await?;
            let Some(form) = form else {
                return self.generate(body, &mut call_id, originals, started, None).await;
            };
            let call = self.openai_call(form, body).await?;
            let inner = call.body.to_string().into();
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            let chunks = call.is_streamed().then(|| Chunks::new(call.clone(), now.as_secs()));
            let mut answer = self.generate(inner, &mut call_id, originals, started, chunks).await?;
            if let Answer::Whole(generated) = &mut answer {
                generated.body = call.reply(&generated.body, now.as_secs(), |ids| self.text_of(ids));
            }
            Ok(answer)
        };
        let result = result.await;
        let request_id = call_id.as_str();
        let (mut response, outcome) = match result {
            Ok(answer) => {
                tracing::debug!(request_id, seconds = started.elapsed().as_secs_f64(), "answered");
                let (mut response, captured, outcome) = match answer {
                    Answer::Whole(Generated { body, captured, aborted }) => {
                        let outcome = if aborted { Outcome::Aborted } else { Outcome::Ok };
                        (json_reply(StatusCode::OK, &body).map(Content::Full), captured, outcome)
                    }
                    Answer::Stream(Streamed { captured, events }) => {
                        (event_stream(events), captured, Outcome::ClientGone)
                    }
                };
                if let Some(words) = capture_words(&captured) {
                    response.headers_mut().insert(TETHER_CAPTURE, words);
                }
                (response, outcome)
            }
            Err(ref error) => {
                let status = error.status();
                if status == StatusCode::INTERNAL_SERVER_ERROR {
                    tracing::error!(request_id, %error, "failed");
                } else {
                    tracing::info!(request_id, status = status.as_u16(), %error, "refused");
                }
                let outcome = match status {
                    StatusCode::INTERNAL_SERVER_ERROR => Outcome::Failed,
                    StatusCode::SERVICE_UNAVAILABLE => Outcome::Overloaded,
                    _ => Outcome::Refused,
                };
                let reply = if form.is_some() { openai_error(error) } else { error_reply(error) };
                (reply.map(Content::Full), outcome)
            }
        };
        if let Ok(id) = HeaderValue::from_str(request_id) {
            response.headers_mut().insert(REQUEST_ID, id);
        }
        response.map(|body| Tracked::new(body, Some((in_flight, outcome))))
    }

    /// Reads a body of one of OpenAI's routes, off the threads that serve connections: it may be long.
    async fn openai_call(self: &Arc<Self>, form: Form, body: Bytes) -> Result<openai::Call, ApiError> {
        let app = Arc::clone(self);
        let read = move || {
            let planner = &app.planner;
            match form {
                Form::Completion => openai::Call::completion(&body, &planner.model.name),
                Form::Chat => openai::Call::chat(
                    &body,
                    &planner.model.name,
                    planner.template.as_ref(),
                    planner.tokenizer.as_deref(),
                ),
            }
        };
        let call = tokio::task::spawn_blocking(read).await;
        call.map_err(|error| ApiError::StepFailed(format!("reading the request failed: {error}")))?
    }

    /// vLLM's `/v1/chat/completions/render`: the token IDs of a conversation.
    async fn render_route<B>(self: &Arc<Self>, request: Request<B>) -> Result<Response<Full<Bytes>>, ApiError>
    where
        B: Body<Data = Bytes, Error: std::fmt::Display> + Unpin,
    {
        json_content(request.headers())?;
        let body = read_body(request.into_body(), MAX_BODY).await?;
        let call = self.openai_call(Form::Chat, body).await?;
        let model = &self.planner.model.name;
        Ok(json_reply(StatusCode::OK, &json!({"model": model, "token_ids": call.body["input_ids"]})))
    }

    /// `/tokenize` and `/detokenize`, for one text or several.
    async fn tokens_route<B>(
        self: &Arc<Self>,
        request: Request<B>,
        path: &str,
    ) -> Result<Response<Full<Bytes>>, ApiError>
    where
        B: Body<Data = Bytes, Error: std::fmt::Display> + Unpin,
    {
        json_content(request.headers())?;
        let body = read_body(request.into_body(), MAX_BODY).await?;
        let (app, back) = (Arc::clone(self), path.ends_with("/detokenize"));
        // Off the threads that serve connections: a text may be long.
        let reply = tokio::task::spawn_blocking(move || app.tokens(&body, back)).await;
        let reply =
            reply.map_err(|error| ApiError::StepFailed(format!("reading the request failed: {error}")))??;
        Ok(json_reply(StatusCode::OK, &reply))
    }

    /// The reply of `/tokenize`, or of `/detokenize` if it goes `back`.
    fn tokens(&self, body: &[u8], back: bool) -> Result<serde_json::Value, ApiError> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum OneOrMany<T> {
            One(T),
            Many(Vec<T>),
        }
        #[derive(Deserialize)]
        struct Texts {
            prompt: OneOrMany<String>,
            #[serde(default)]
            add_special_tokens: Option<bool>,
        }
        #[derive(Deserialize)]
        struct Tokens {
            tokens: OneOrMany<Vec<i64>>,
            #[serde(default)]
            skip_special_tokens: Option<bool>,
        }
        let missing = || ApiError::Invalid("there is no tokenizer beside the model".to_owned());
        let tokenizer = self.planner.tokenizer.as_ref().ok_or_else(missing)?;
        let failed = |error: crate::tokenizer::TokenizerError| ApiError::Invalid(error.to_string());
        Ok(if back {
            let Tokens { tokens, skip_special_tokens } = serde_json::from_slice(body)?;
            let skip = skip_special_tokens.unwrap_or(true);
            match tokens {
                OneOrMany::One(ids) => json!({"text": tokenizer.decode(&ids, skip).map_err(failed)?}),
                OneOrMany::Many(lists) => {
                    let texts = lists.iter().map(|ids| tokenizer.decode(ids, skip).map_err(failed));
                    json!({"text": texts.collect::<Result<Vec<_>, _>>()?})
                }
            }
        } else {
            let Texts { prompt, add_special_tokens } = serde_json::from_slice(body)?;
            let encode = |text: &String| match add_special_tokens.unwrap_or(true) {
                true => tokenizer.encode(text).map_err(failed),
                false => tokenizer.encode_bare(text).map_err(failed),
            };
            let context = self.planner.model.context;
            match prompt {
                OneOrMany::One(text) => {
                    let ids = encode(&text)?;
                    json!({"count": ids.len(), "tokens": ids, "max_model_len": context})
                }
                OneOrMany::Many(texts) => {
                    let lists = texts.iter().map(encode).collect::<Result<Vec<_>, _>>()?;
                    let counts: Vec<usize> = lists.iter().map(Vec::len).collect();
                    json!({"count": counts, "tokens": lists, "max_model_len": context})
                }
            }
        })
    }

    async fn abort_route<B>(&self, request: Request<B>) -> Result<Response<Full<Bytes>>, ApiError>
    where
        B: Body<Data = Bytes, Error: std::fmt::Display> + Unpin,
    {
        #[derive(Deserialize)]
        struct Abort {
            #[serde(default)]
            rid: Option<String>,
            #[serde(default)]
            abort_all: Option<bool>,
        }
        json_content(request.headers())?;
        let body = read_body(request.into_body(), 64 * 1024).await?;
        let abort: Abort = serde_json::from_slice(&body)?;
        if abort.abort_all == Some(true) {
            self.abort_all();
        } else if let Some(rid) = abort.rid {
            self.abort(&rid);
        }
        Ok(Response::new(Full::default()))
    }

    fn health(&self) -> Response<Full<Bytes>> {
        let mut response = Response::new(Full::default());
        if let Err(error) = self.lifecycle.check() {
            response = error_reply(&error);
        }
        response
    }

    fn metrics_text(&self) -> Response<Full<Bytes>> {
        match tether_telemetry::text(&self.registry) {
            Ok(text) => typed(StatusCode::OK, tether_telemetry::CONTENT_TYPE, text.into()),
            Err(error) => {
                error_reply(&ApiError::StepFailed(format!("the metrics could not be encoded: {error}")))
            }
        }
    }

    /// `/health_generate`: whether a token comes out. It makes no dump.
    async fn health_generate(self: Arc<Self>) -> Result<Response<Full<Bytes>>, ApiError> {
        self.lifecycle.check()?;
        let body =
            r#"{"input_ids":[0],"capture":false,"sampling_params":{"max_new_tokens":1,"temperature":0}}"#;
        let mut call_id = CallId::new(None);
        self.generate(body.into(), &mut call_id, Originals::default(), Instant::now(), None).await?;
        Ok(Response::new(Full::default()))
    }

    /// `/server_info`: how the server was launched, and how it is.
    fn server_info(&self) -> serde_json::Value {
        let mut info = self.launch.clone();
        let ready = self.lifecycle.check().is_ok();
        info["status"] = json!(if ready { "ready" } else { "not ready" });
        info["internal_states"] = json!([{
            "num_running_reqs": self.metrics.running.get(), "num_waiting_reqs": self.metrics.queue_depth.get(),
        }]);
        info["tether"] = self.model_info()["tether"].take();
        info
    }

    fn model_card(&self) -> serde_json::Value {
        let model = &self.planner.model;
        json!({
            "id": model.name, "object": "model", "created": 0, "owned_by": "tether", "root": model.name, "parent": null,
            "max_model_len": model.context,
        })
    }

    fn models(&self) -> serde_json::Value {
        json!({"object": "list", "data": [self.model_card()]})
    }

    /// `/v1/models/{id}`; an id may have slashes, and may come with them escaped.
    fn model(&self, id: &str) -> Response<Full<Bytes>> {
        let id = id.replace("%2F", "/").replace("%2f", "/");
        if id == self.planner.model.name {
            return json_reply(StatusCode::OK, &self.model_card());
        }
        let message = format!("The model '{}' does not exist", crate::json::clipped(&id));
        let error = json!({"message": message, "type": "invalid_request_error", "param": "model", "code": "model_not_found"});
        json_reply(StatusCode::NOT_FOUND, &json!({"error": error}))
    }

    fn model_info(&self) -> serde_json::Value {
        let model = &self.planner.model;
        let defaults = &self.planner.defaults;
        json!({
            "model_path": model.path, "served_model_name": model.name, "tokenizer_path": model.path,
            "is_generation": true, "preferred_sampling_params": null, "weight_version": "default",
            "architectures": [model.architecture],
            "tether": {
                "version": self.planner.server, "config_hash": model.config_hash, "num_layers": model.num_layers,
                "hidden_size": model.hidden_size, "vocab_size": model.vocab_size, "max_model_len": model.context,
                "points": defaults.spec.planes(), "final": defaults.final_state,
                "dtype": self.planner.dump_dtype.get(), "dump_dir": self.dump_dir,
            },
        })
    }
}

/// Refuses what does not call itself JSON, as SGLang does: a form or a text that happens to parse was not meant.
fn json_content(headers: &HeaderMap) -> Result<(), ApiError> {
    let given = headers.get(CONTENT_TYPE).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    let essence = given
        .as_deref()
        .unwrap_or_default()
        .split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .to_ascii_lowercase();
    if essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json")) {
        return Ok(());
    }
    let found = given
        .map_or_else(|| "is missing".to_owned(), |given| format!("is {:?}", crate::json::clipped(&given)));
    Err(ApiError::NotJson(format!("the content type {found}; application/json is expected")))
}

/// The whole body, if it is not longer than `limit`.
async fn read_body<B>(mut body: B, limit: usize) -> Result<Bytes, ApiError>
where
    B: Body<Data = Bytes, Error: std::fmt::Display> + Unpin,
{
    // Said before a byte is read: the client need not send it.
    if body.size_hint().lower() > limit as u64 {
        return Err(ApiError::BodyTooLong { limit });
    }
    let mut whole = BytesMut::new();
    loop {
        let frame = tokio::time::timeout(BODY_PAUSE, body.frame()).await;
        let frame = match frame.map_err(|_| ApiError::BodyStalled { seconds: BODY_PAUSE.as_secs() })? {
            None => return Ok(whole.freeze()),
            Some(frame) => frame.map_err(|error| ApiError::BodyBroken(error.to_string()))?,
        };
        let Ok(data) = frame.into_data() else { continue };
        if whole.len() + data.len() > limit {
            return Err(ApiError::BodyTooLong { limit });
        }
        // What is announced is reserved only as it arrives, so that a lying length costs nothing.
        whole.extend_from_slice(&data);
    }
}

fn error_reply(error: &ApiError) -> Response<Full<Bytes>> {
    let mut response = json_reply(error.status(), &error.body());
    if let Some(seconds) = error.retry_after() {
        response.headers_mut().insert(RETRY_AFTER, seconds.into());
    }
    if let ApiError::MethodNotAllowed { allowed } = error {
        response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
    }
    response
}

/// An error in the one flat shape of OpenAI's routes.
fn openai_error(error: &ApiError) -> Response<Full<Bytes>> {
    let kind = match error.status() {
        StatusCode::BAD_REQUEST => "BadRequestError",
        StatusCode::SERVICE_UNAVAILABLE => "ServiceUnavailableError",
        StatusCode::INTERNAL_SERVER_ERROR => "InternalServerError",
        status => status.canonical_reason().unwrap_or("Error"),
    };
    let code = error.status().as_u16();
    let body =
        json!({"object": "error", "message": error.to_string(), "type": kind, "param": null, "code": code});
    let mut response = json_reply(error.status(), &body);
    if let Some(seconds) = error.retry_after() {
        response.headers_mut().insert(RETRY_AFTER, seconds.into());
    }
    response
}

/// `x-tether-capture`: a word for each prompt where some have no dump, or one for all where none has. A row of a batch has
/// none if it opted out or was aborted.
fn capture_words(captured: &[bool]) -> Option<HeaderValue> {
    if captured.iter().all(|has| *has) {
        return None;
    }
    if !captured.contains(&true) {
        return Some(HeaderValue::from_static("none"));
    }
    let words: Vec<_> = captured.iter().map(|has| if *has { "dump" } else { "none" }).collect();
    Some(HeaderValue::from_str(&words.join(",")).expect("two words and commas are visible ASCII"))
}

fn json_reply(status: StatusCode, body: &serde_json::Value) -> Response<Full<Bytes>> {
    typed(status, "application/json", body.to_string().into())
}

fn typed(status: StatusCode, content_type: &'static str, body: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

fn plain(response: Response<Full<Bytes>>) -> Response<ReplyBody> {
    response.map(|body| Tracked::new(Content::Full(body), None))
}

fn event_stream(events: Events) -> Response<Content> {
    let mut response = Response::new(Content::Events(events));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

/// Counts one call of `/generate` as in flight until dropped, then records how it ended. The reply's body owns it, so a
/// client that hangs up is a [`Outcome::ClientGone`] without anyone having to notice.
#[must_use = "dropping the guard ends the request"]
pub struct InFlight {
    app: Arc<App>,
    started: Instant,
    _age: Begun,
    outcome: Outcome,
}

impl InFlight {
    fn begin(app: &Arc<App>, started: Instant) -> Self {
        app.metrics.in_flight.inc();
        app.lifecycle.enter();
        let age = app.metrics.oldest.begin();
        Self { app: Arc::clone(app), started, _age: age, outcome: Outcome::ClientGone }
    }

    fn end(mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let metrics: &Metrics = &self.app.metrics;
        metrics.in_flight.dec();
        let ended = metrics.request_seconds.with_label_values(&[self.outcome.as_str()]);
        ended.observe(self.started.elapsed().as_secs_f64());
        self.app.lifecycle.leave();
    }
}

/// What a reply's body is.
pub enum Content {
    /// Whole from the start.
    Full(Full<Bytes>),
    /// Event by event.
    Events(Events),
}

/// A reply's body with the guard of its request, which ends with the last frame or the drop.
pub struct Tracked {
    content: Content,
    guard: Option<(InFlight, Outcome)>,
}

impl Tracked {
    fn new(content: Content, guard: Option<(InFlight, Outcome)>) -> Self {
        let mut tracked = Self { content, guard };
        tracked.watch_end();
        tracked
    }

    fn watch_end(&mut self) {
        if self.is_end_stream()
            && let Some((guard, outcome)) = self.guard.take()
        {
            guard.end(match &self.content {
                Content::Full(_) => outcome,
                // Only at its end it is known how it ended.
                Content::Events(events) => events.outcome().unwrap_or(outcome),
            });
        }
    }
}

impl Body for Tracked {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let frame = match &mut self.content {
            Content::Full(full) => Pin::new(full).poll_frame(cx),
            Content::Events(events) => events.poll(cx).map(|frame| frame.map(Ok)),
        };
        if frame.is_ready() {
            self.watch_end();
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Full(full) => full.is_end_stream(),
            Content::Events(events) => events.outcome().is_some(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Full(full) => full.size_hint(),
            Content::Events(_) => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests;
