use std::future::pending;
use std::path::Path;

use tether_dump::{DumpFile, RequestId, dump_path};

use super::*;
use crate::engine::testing::FAILS;
use crate::plan::CaptureMode;
use crate::testing::{CONTEXT, Fixture, eventually, files};

#[derive(Debug)]
struct Reply {
    status: u16,
    headers: HeaderMap,
    body: Bytes,
}

impl Reply {
    fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }
}

async fn send(app: &Arc<App>, request: Request<Full<Bytes>>) -> Reply {
    let (head, body) = Arc::clone(app).handle(request).await.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    Reply { status: head.status.as_u16(), headers: head.headers, body }
}

fn request(method: &str, path: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
    request.body(Full::new(body.into())).unwrap()
}

async fn generate(app: &Arc<App>, body: &str) -> Reply {
    send(app, request("POST", "/generate", body.to_owned())).await
}

fn outcome(app: &App, outcome: Outcome) -> u64 {
    app.metrics.request_seconds.with_label_values(&[outcome.as_str()]).get_sample_count()
}

fn prompt(rid: RequestId, ids: &[i64], new_tokens: usize) -> String {
    format!(r#"{{"rid":"{rid}","input_ids":{ids:?},"sampling_params":{{"max_new_tokens":{new_tokens}}}}}"#)
}

#[tokio::test]
async fn a_tagged_request_is_answered_in_sglangs_shape_with_its_dump() {
    let dir = tempfile::tempdir().unwrap();
    let app = Fixture::default().app(dir.path());
    let id = RequestId::new();
    let reply = generate(&app, &prompt(id, &[1, 2, 3], 2)).await;
    assert_eq!(reply.status, 200);
    let json = reply.json();
    assert_eq!(json["output_ids"], json!([4, 5]));
    let meta = &json["meta_info"];
    assert_eq!(meta["id"], json!(id));
    assert_eq!(meta["finish_reason"], json!({"type": "length", "length": 2}));
    assert_eq!((&meta["prompt_tokens"], &meta["completion_tokens"]), (&json!(3), &json!(2)));
    assert_eq!((&meta["cached_tokens"], &meta["weight_version"]), (&json!(0), &json!("default")));
    assert!(meta["e2e_latency"].as_f64().unwrap() > 0.0);
    let path = dump_path(dir.path(), id);
    let dump = DumpFile::open(&path).unwrap();
    assert_eq!(
        meta["capture"],
        json!({"path": path, "points": ["R2", "R4", "R5", "R8"], "final": "pre_norm", "rows": "prompt", "num_tokens": 3,
               "dtype": "float32", "token_hash": dump.head().metadata.token_hash})
    );
    assert_eq!(dump.head().token_ids, [1, 2, 3]);
    assert_eq!(reply.header("x-tether-capture"), None);
    assert_eq!(reply.header("x-request-id"), Some(id.to_string().as_str()), "the rid is the call's ID");
    assert_eq!(outcome(&app, Outcome::Ok), 1);
    assert_eq!(app.metrics.in_flight.get(), 0);
}

#[tokio::test]
async fn a_request_without_a_dump_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let app = Fixture::default().app(dir.path());
    let id = RequestId::new();
    for body in [
        r#"{"input_ids":[1],"rid":"warm-up"}"#.to_owned(),
        format!(r#"{{"input_ids":[1],"rid":"{id}","capture":false}}"#),
        r#"{"input_ids":[[1],[2]]}"#.to_owned(),
    ] {
        let reply = generate(&app, &body).await;
        assert_eq!((reply.status, reply.header("x-tether-capture")), (200, Some("none")), "{body}");
    }
    assert!(files(dir.path()).is_empty());
}

#[tokio::test]
async fn a_batch_is_answered_in_order_with_a_dump_a_prompt() {
    let dir = tempfile::tempdir().unwrap();
    let app = Fixture::default().app(dir.path());
    let ids: Vec<RequestId> = (0..3).map(|_| RequestId::new()).collect();
    let body = format!(
        r#"{{"rid":{},"input_ids":[[1],[5,6,7],[9,9]],"capture":[true,false,{{"points":[1],"final":"none"}}],
            "sampling_params":[{{"max_new_tokens":1}},{{"max_new_tokens":0}},{{"max_new_tokens":2}}]}}"#,
        serde_json::to_string(&ids).unwrap()
    );
    let call = RequestId::new().to_string();
    let mut batch = request("POST", "/generate", body);
    batch.headers_mut().insert("x-request-id", call.parse().unwrap());
    batch.headers_mut().insert("x-client-request-id", r#"["a","b","c"]"#.parse().unwrap());
    let reply = send(&app, batch).await;
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("x-request-id"), Some(call.as_str()));
    let json = reply.json();
    let list = json.as_array().unwrap();
    assert_eq!(list.len(), 3);
    for (element, (id, outputs)) in list.iter().zip(ids.iter().zip([json!([2]), json!([]), json!([10, 11])]))
    {
        assert_eq!((&element["meta_info"]["id"], &element["output_ids"]), (&json!(id), &outputs));
    }
    assert_eq!(list[1]["meta_info"].get("capture"), None);
    let dump = DumpFile::open(&dump_path(dir.path(), ids[2])).unwrap();
    assert_eq!(dump.head().metadata.call_id.as_deref(), Some(call.as_str()));
    assert_eq!(dump.head().metadata.client_rid.as_deref(), Some("c"));
    assert_eq!(dump.head().planes(), 1);
    assert_eq!(files(dir.path()).len(), 2);
    let one = generate(&app, r#"{"input_ids":[[1]]}"#).await.json();
    assert_eq!(one.as_array().unwrap().len(), 1, "a list of one is answered with a list of one");
    assert_eq!(generate(&app, r#"{"text":[]}"#).await.json(), json!([]));
}

/// The bad inputs of the issue, each with its status and a part of the text, and a right request after each.
#[tokio::test]
async fn bad_input_is_refused_by_name_and_the_next_request_is_right() {
    let dir = tempfile::tempdir().unwrap();
    let app = Fixture::default().app(dir.path());
    let million = format!(r#"{{"input_ids":{:?}}}"#, vec![1; 1_000_000]);
    let table: [(&str, &str, &str); 15] = [
        (r#"{"input_ids":[]}"#, "/error/message", "`input_ids` cannot be empty"),
        (r#"{"input_ids":[100]}"#, "/error/message", "`input_ids[0]` is 100; a token ID from 0 to 99"),
        (r#"{"input_ids":[1,-1]}"#, "/error/message", "`input_ids[1]` is -1; a token ID from 0 to 99"),
        (r#"{"input_ids":[1.5]}"#, "/error", "`input_ids[0]` is 1.5; an integer from 0 to 99"),
        (r#"{"input_ids":["a"]}"#, "/error", "`input_ids[0]` is \"a\"; an integer from 0 to 99"),
        (&million, "/error/message", "has 1000000 tokens; the model's context length is 64"),
        (r#"{"input_ids":[[1],[]]}"#, "/error/message", "`input_ids[1]` cannot be empty"),
        (r#"{"input_ids":[[1],[1,100]]}"#, "/error/message", "`input_ids[1][1]` is 100"),
        ("{\"input_ids\":[1", "/message", "the request body is not valid JSON"),
        (r#"{"input_ids":[1],"rid":"../../x"}"#, "/error/message", "`rid` is \"../../x\""),
        (r#"{"rid":"a","input_ids":[1],"rid":"b"}"#, "/error", "the key `rid` is given twice"),
        (r#"{"input_ids":[1],"capture":{"points":[9]}}"#, "/error/message", "point 9 does not exist"),
        (r#"{"input_ids":[1],"capture":{"path":"/x"}}"#, "/error", "`capture.path` is not accepted"),
        (r#"{"input_ids":[1],"capture":"yes"}"#, "/error", "`capture` is \"yes\""),
        ("{}", "/error/message", "either `text` or `input_ids`"),
    ];
    for (body, pointer, part) in table {
        let reply = generate(&app, body).await;
        let json = reply.json();
        let text = json.pointer(pointer).and_then(|text| text.as_str()).unwrap_or_else(|| panic!("{json}"));
        assert_eq!(reply.status, 400, "{text}");
        assert!(text.contains(part), "{text}");
        assert!(reply.header("x-request-id").is_some());
        let good = generate(&app, &prompt(RequestId::new(), &[1], 1)).await;
        assert_eq!((good.status, &good.json()["output_ids"]), (200, &json!([2])));
    }
    assert_eq!(outcome(&app, Outcome::Refused), 15);
    assert_eq!(files(dir.path()).len(), 15);
}

#[tokio::test]
async fn a_body_that_does_not_call_itself_json_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let app = Fixture::default().app(dir.path());
    for (content_type, status) in [
        (Some("text/plain"), 400),
        (Some("application/x-www-form-urlencoded"), 400),
        (None, 400),
        (Some("application/json; charset=utf-8"), 200),
        (Some("application/vnd.tether+json"), 200),
    ] {
        let mut request = request("POST", "/generate", r#"{"input_ids":[1]}"#);
        request.headers_mut().remove(CONTENT_TYPE);
        if let Some(value) = content_type {
            request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(value));
        }
        let reply = send(&app, request).await;
        assert_eq!(reply.status, status, "{content_type:?}");
        if status == 400 {
            let text = reply.json()["message"].as_str().unwrap().to_owned();
            assert!(text.contains("application/json is expected"), "{text}");
        }
    }
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_before_it_is_read() {
    let short = read_body(Full::new(Bytes::from_static(b"12345")), 5).await.unwrap();
    assert_eq!(short, "12345");
    let long = read_body(Full::new(Bytes::from_static(b"123456")), 5).await;
    assert_eq!(long, Err(ApiError::BodyTooLong { limit: 5 }));
}

#[tokio::test]
async fn paths_and_methods_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let app = Fixture::default().app(dir.path());
    for (method, path, status) in [
        ("GET", "/nowhere", 404),
        ("POST", "/generate/", 404),
        ("GET", "/generate", 405),
        ("DELETE", "/generate", 405),
        ("POST", "/health", 405),
        ("GET", "/health", 200),
        ("HEAD", "/health", 200),
        ("GET", "/metrics", 200),
        ("GET", "/get_model_info", 200),
        ("GET", "/model_info", 200),
        ("GET", "/v1/models", 200),
    ] {
        assert_eq!(send(&app, request(method, path, "")).await.status, status, "{method} {path}");
    }
    let missing = send(&app, request("GET", "/nowhere", "")).await;
    assert_eq!(missing.json(), json!({"detail": "Not Found"}));
    let wrong = send(&app, request("GET", "/generate", "")).await;
    assert_eq!(
        (wrong.json(), wrong.header("allow")),
        (json!({"detail": "Method Not Allowed"}), Some("POST, PUT"))
    );
    let put = send(&app, request("PUT", "/generate", r#"{"input_ids":[1]}"#)).await;
    assert_eq!(put.status, 200);
    let info = send(&app, request("GET", "/model_info", "")).await.json();
    assert_eq!((&info["is_generation"], &info["tether"]["max_model_len"]), (&json!(true), &json!(CONTEXT)));
    let models = send(&app, request("GET", "/v1/models", "")).await.json();
    assert_eq!(models["data"][0]["id"], "fake");
}

/// Sends in the background and waits until the engine is at it.
async fn held(fixture: &Fixture, app: &Arc<App>, body: String) -> tokio::task::JoinHandle<Reply> {
    fixture.model.gate.close();
    let before = fixture.model.gate.arrived();
    let app = Arc::clone(app);
    let task = tokio::spawn(async move { generate(&app, &body).await });
    let gate = Arc::clone(&fixture.model.gate);
    wait("the step has begun", move || gate.arrived() > before).await;
    task
}

async fn wait(what: &'static str, condition: impl Fn() -> bool + Send + 'static) {
    tokio::task::spawn_blocking(move || eventually(what, condition)).await.unwrap();
}

#[tokio::test]
async fn a_rid_in_flight_is_refused_in_sglangs_words_and_a_published_one_before_it_is_run() {
    let dir = tempfile::tempdir().unwrap();
    let fixture = Fixture::default();
    let app = fixture.app(dir.path());
    let id = RequestId::new();
    let first = held(&fixture, &app, prompt(id, &[1], 1)).await;
    let second = generate(&app, &prompt(id, &[2], 1)).await;
    assert_eq!(second.status, 400);
    let text = second.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(text.starts_with("Duplicate request ID detected"), "{text}");
    fixture.model.gate.open();
    assert_eq!(first.await.unwrap().status, 200);
    let steps = fixture.model.steps.lock().unwrap().len();
    let third = generate(&app, &prompt(id, &[2], 1)).await;
    assert_eq!(third.status, 409);
    assert_eq!(fixture.model.steps.lock().unwrap().len(), steps, "it cost no step");
    assert_eq!(
        DumpFile::open(&dump_path(dir.path(), id)).unwrap().head().token_ids,
        [1],
        "the first one stands"
    );
    std::fs::remove_file(dump_path(dir.path(), id)).unwrap();
    assert_eq!(generate(&app, &prompt(id, &[2], 1)).await.status, 200);
}

#[tokio::test]
async fn a_client_that_goes_leaves_neither_a_dump_nor_a_request_in_flight() {
    let dir = tempfile::tempdir().unwrap();
    let fixture = Fixture::default();
    let app = fixture.app(dir.path());
    let id = RequestId::new();
    // The handler's future is dropped, as hyper does when the connection breaks.
    let first = held(&fixture, &app, prompt(id, &[1], 0)).await;
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    assert_eq!(app.metrics.in_flight.get(), 0);
    assert_eq!(outcome(&app, Outcome::ClientGone), 1);
    fixture.model.gate.open();
    let again = generate(&app, &prompt(RequestId::new(), &[3], 0)).await;
    assert_eq!(again.status, 200);
    let metrics = app.metrics.clone();
    wait("the first one was cancelled", move || metrics.dumps.with_label_values(&["cancelled"]).get() == 1)
        .await;
    assert_eq!(files(dir.path()).len(), 1);
    assert_eq!(app.lifecycle.in_flight(), 0);
}

#[tokio::test]
async fn a_batch_of_which_one_prompt_fails_leaves_no_dump_of_the_others() {
    let dir = tempfile::tempdir().unwrap();
    // One prompt a step, so that the first is published before the second fails.
    let app = Fixture { max_batch_tokens: 1, ..Fixture::default() }.app(dir.path());
    let ids = [RequestId::new(), RequestId::new(), RequestId::new()];
    let body = format!(
        r#"{{"rid":{},"input_ids":[[1],[{FAILS}],[2]],"sampling_params":{{"max_new_tokens":0}}}}"#,
        json!(ids)
    );
    let reply = generate(&app, &body).await;
    assert_eq!(reply.status, 500);
    assert!(
        reply.json()["error"]["message"].as_str().unwrap().contains("the forward pass failed: out of memory")
    );
    let dir = dir.path().to_owned();
    let metrics = app.metrics.clone();
    wait("what is left of the batch is gone", move || {
        files(&dir).is_empty() && metrics.queue_depth.get() == 0
    })
    .await;
    assert_eq!(outcome(&app, Outcome::Failed), 1);
}

#[tokio::test]
async fn an_abort_names_its_request_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let fixture = Fixture::default();
    let app = fixture.app(dir.path());
    let body = r#"{"rid":"ab_10","input_ids":[1],"sampling_params":{"max_new_tokens":40}}"#;
    let running = held(&fixture, &app, body.to_owned()).await;
    let abort = |rid: &str| send(&app, request("POST", "/abort_request", json!({"rid": rid}).to_string()));
    let reply = abort("ab_1").await;
    assert_eq!((reply.status, reply.body.len()), (200, 0), "unknown rids are answered alike");
    assert!(app.rids.find("ab_10").unwrap()[0].withdrawn().is_none());
    assert_eq!(abort("ab_10").await.status, 200);
    fixture.model.gate.open();
    let reply = running.await.unwrap();
    assert_eq!((reply.status, reply.header("x-tether-capture")), (200, Some("none")));
    assert_eq!(reply.json()["meta_info"]["finish_reason"]["type"], "abort");
    assert_eq!(outcome(&app, Outcome::Aborted), 1);
}

#[tokio::test]
async fn an_aborted_row_of_a_batch_says_that_it_alone_has_no_dump() {
    let dir = tempfile::tempdir().unwrap();
    let fixture = Fixture::default();
    let app = fixture.app(dir.path());
    let ids = [RequestId::new(), RequestId::new(), RequestId::new()];
    let body = json!({"rid": ids, "input_ids": [[1], [2], [3]], "capture": [true, true, false]});
    let running = held(&fixture, &app, body.to_string()).await;
    app.abort(&ids[0].to_string());
    fixture.model.gate.open();
    let reply = running.await.unwrap();
    assert_eq!((reply.status, reply.header("x-tether-capture")), (200, Some("none,dump,none")));
    let captures: Vec<_> =
        reply.json().as_array().unwrap().iter().map(|row| row["meta_info"]["capture"].is_null()).collect();
    assert_eq!(captures, [true, false, true]);
    assert!(dump_path(dir.path(), ids[1]).exists());
    assert_eq!(files(dir.path()).len(), 1);
}

#[tokio::test]
async fn a_request_that_is_not_started_in_time_is_503_and_one_that_is_has_all_the_time() {
    let dir = tempfile::tempdir().unwrap();
    let fixture = Fixture { queue_timeout: Duration::from_millis(50), ..Fixture::default() };
    let app = fixture.app(dir.path());
    let running = held(&fixture, &app, prompt(RequestId::new(), &[1], 0)).await;
    let late = generate(&app, &prompt(RequestId::new(), &[2], 0)).await;
    assert_eq!((late.status, late.header("retry-after")), (503, Some("1")));
    fixture.model.gate.open();
    assert_eq!(running.await.unwrap().status, 200);
    assert_eq!(files(dir.path()).len(), 1);
    assert_eq!(outcome(&app, Outcome::Overloaded), 1);
}

#[tokio::test]
async fn a_dump_that_can_never_fit_is_413_and_one_without_room_now_is_503() {
    let dir = tempfile::tempdir().unwrap();
    let fixture = Fixture { budget: 3000, queue_timeout: Duration::from_millis(50), ..Fixture::default() };
    let app = fixture.app(dir.path());
    let huge = generate(&app, &prompt(RequestId::new(), &[1; 60], 0)).await;
    assert_eq!(huge.status, 413, "60 rows of 4 planes of 4 channels are more than 3000 bytes");
    let id = RequestId::new();
    assert_eq!(generate(&app, &prompt(id, &[1; 20], 0)).await.status, 200);
    let steps = fixture.model.steps.lock().unwrap().len();
    let full = generate(&app, &prompt(RequestId::new(), &[2; 20], 0)).await;
    assert_eq!((full.status, full.header("retry-after")), (503, Some("5")));
    assert_eq!(fixture.model.steps.lock().unwrap().len(), steps, "it was refused before it was computed");
    std::fs::remove_file(dump_path(dir.path(), id)).unwrap();
    tokio::spawn(Arc::clone(&app.budget).keep_scanning(pending()));
    let mut status = 503;
    for _ in 0..100 {
        if status == 503 {
            status = generate(&app, &prompt(RequestId::new(), &[2; 20], 0)).await.status;
        }
    }
    assert_eq!(status, 200, "once the client has deleted what it read");
}

#[tokio::test]
async fn while_loading_and_draining_health_and_new_requests_are_503() {
    let dir = tempfile::tempdir().unwrap();
    let app = Fixture::default().app(dir.path());
    let fresh = crate::app::Lifecycle::default();
    assert_eq!(fresh.check(), Err(ApiError::Loading));
    app.lifecycle.drain();
    app.lifecycle.serve();
    for request in [request("GET", "/health", ""), request("POST", "/generate", r#"{"input_ids":[1]}"#)] {
        let reply = send(&app, request).await;
        assert_eq!((reply.status, reply.header("retry-after")), (503, Some("5")));
    }
    assert_eq!(send(&app, request("GET", "/metrics", "")).await.status, 200);
}

#[tokio::test]
async fn every_request_of_a_mixed_load_has_its_own_dump() {
    let dir = tempfile::tempdir().unwrap();
    let app = Fixture { mode: CaptureMode::All, max_batch_tokens: 16, max_queued: 200, ..Fixture::default() }
        .app(dir.path());
    let tasks: Vec<_> = (0..200i64)
        .map(|n| {
            let app = Arc::clone(&app);
            // Many equal lengths and shared prefixes.
            let ids: Vec<i64> = (0..n % 7).map(|_| 5).chain([n % 40]).collect();
            tokio::spawn(async move {
                let id = RequestId::new();
                let reply = generate(&app, &prompt(id, &ids, (n % 3) as usize)).await;
                assert_eq!(reply.status, 200);
                (id, ids)
            })
        })
        .collect();
    for task in tasks {
        let (id, ids) = task.await.unwrap();
        let dump = DumpFile::open(&dump_path(dir.path(), id)).unwrap();
        dump.verify().unwrap();
        assert_eq!(dump.head().token_ids, ids);
        let first = f32::from_le_bytes(dump.hidden_states()[..4].try_into().unwrap());
        assert_eq!(first, crate::engine::testing::value(ids[0], 0, 0));
    }
    assert_eq!(files(dir.path()).len(), 200);
    assert_eq!(app.metrics.dump_reserved_bytes.get(), 0);
}

/// A server on a port of its own, and how to stop it.
struct Server {
    address: std::net::SocketAddr,
    stop: tokio::sync::oneshot::Sender<()>,
    ended: tokio::task::JoinHandle<crate::serve::Drained>,
}

async fn serve(app: &Arc<App>, drain_timeout: Duration) -> Server {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let app = Arc::clone(app);
    let ended = tokio::spawn(async move {
        crate::serve::serve(listener, app, async { drop(stopped.await) }, drain_timeout).await
    });
    Server { address, stop, ended }
}

/// Writes one request on a fresh connection; the reply is read with [`read`].
async fn write(address: std::net::SocketAddr, path: &str, body: &str) -> tokio::net::TcpStream {
    use tokio::io::AsyncWriteExt;
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let method = if body.is_empty() { "GET" } else { "POST" };
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    stream
}

async fn read(mut stream: tokio::net::TcpStream) -> String {
    use tokio::io::AsyncReadExt;
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_connection_withdraws_its_request_over_a_real_socket() {
    let dir = tempfile::tempdir().unwrap();
    let fixture = Fixture::default();
    let app = fixture.app(dir.path());
    let server = serve(&app, Duration::from_secs(60)).await;
    fixture.model.gate.close();
    let stream = write(server.address, "/generate", &prompt(RequestId::new(), &[1], 0)).await;
    let gate = Arc::clone(&fixture.model.gate);
    wait("the step has begun", move || gate.arrived() == 1).await;
    drop(stream);
    let metrics = app.metrics.clone();
    wait("the server has noticed", move || metrics.in_flight.get() == 0).await;
    fixture.model.gate.open();
    let reply = read(write(server.address, "/generate", &prompt(RequestId::new(), &[2], 0)).await).await;
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    let metrics = app.metrics.clone();
    wait("the first one was cancelled", move || metrics.dumps.with_label_values(&["cancelled"]).get() == 1)
        .await;
    assert_eq!(files(dir.path()).len(), 1);
    drop(server.stop);
    assert_eq!(server.ended.await.unwrap().cut, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn on_shutdown_what_is_in_flight_ends_and_new_requests_are_503() {
    let dir = tempfile::tempdir().unwrap();
    let fixture = Fixture::default();
    let app = fixture.app(dir.path());
    let server = serve(&app, Duration::from_secs(60)).await;
    fixture.model.gate.close();
    let in_flight = write(server.address, "/generate", &prompt(RequestId::new(), &[1], 0)).await;
    let gate = Arc::clone(&fixture.model.gate);
    wait("the step has begun", move || gate.arrived() == 1).await;
    server.stop.send(()).unwrap();
    let draining = Arc::clone(&app);
    wait("the server drains", move || draining.lifecycle.check().is_err()).await;
    for (path, body) in [("/health", ""), ("/generate", r#"{"input_ids":[1]}"#)] {
        let reply = read(write(server.address, path, body).await).await;
        assert!(reply.starts_with("HTTP/1.1 503"), "{reply}");
    }
    fixture.model.gate.open();
    let reply = read(in_flight).await;
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    assert_eq!(server.ended.await.unwrap().cut, 0);
    assert!(tokio::net::TcpStream::connect(server.address).await.is_err(), "nobody listens any more");
    assert_eq!(files(dir.path()).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_end_within_the_drain_time_is_cut_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let fixture = Fixture::default();
    let app = fixture.app(dir.path());
    let server = serve(&app, Duration::from_millis(50)).await;
    fixture.model.gate.close();
    let stream = write(server.address, "/generate", &prompt(RequestId::new(), &[1], 0)).await;
    let gate = Arc::clone(&fixture.model.gate);
    wait("the step has begun", move || gate.arrived() == 1).await;
    server.stop.send(()).unwrap();
    assert_eq!(server.ended.await.unwrap().cut, 1);
    assert_eq!(read(stream).await, "", "the connection is cut without a reply");
    fixture.model.gate.open();
    let path: &Path = dir.path();
    drop(app);
    assert!(files(path).is_empty());
}

#[tokio::test]
async fn a_rid_is_taken_whatever_the_number_of_samples_and_names_them_all() {
    let dir = tempfile::tempdir().unwrap();
    let fixture = Fixture::default();
    let app = fixture.app(dir.path());
    let body = |n: usize| {
        json!({"rid": "job", "input_ids": [1], "sampling_params": {"max_new_tokens": 40, "n": n, "temperature": 0}})
            .to_string()
    };
    for (first, second) in [(1, 2), (2, 1), (2, 2)] {
        let running = held(&fixture, &app, body(first)).await;
        let again = generate(&app, &body(second)).await;
        assert_eq!(again.status, 400, "{first} and {second}: {again:?}");
        assert_eq!(send(&app, request("POST", "/abort_request", r#"{"rid":"job"}"#)).await.status, 200);
        fixture.model.gate.open();
        let reply = running.await.unwrap().json();
        let samples = reply.as_array().cloned().unwrap_or_else(|| vec![reply.clone()]);
        assert_eq!(samples.len(), first);
        for sample in samples {
            assert_eq!(sample["meta_info"]["finish_reason"]["type"], "abort", "{sample}");
        }
    }
}

#[tokio::test]
async fn a_rid_is_free_again_when_its_job_has_ended_and_not_when_its_client_has_gone() {
    let dir = tempfile::tempdir().unwrap();
    let fixture = Fixture::default();
    let app = fixture.app(dir.path());
    let id = RequestId::new();
    let first = held(&fixture, &app, prompt(id, &[1], 0)).await;
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    // Its step still runs: a second one under the name could publish what the first one's end then removes.
    assert_eq!(generate(&app, &prompt(id, &[1], 0)).await.status, 400);
    fixture.model.gate.open();
    let mut status = 400;
    while status == 400 {
        status = generate(&app, &prompt(id, &[1], 0)).await.status;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(status, 200);
    assert!(dump_path(dir.path(), id).exists());
}

#[tokio::test]
async fn an_abort_reaches_a_request_that_waits_for_room() {
    let dir = tempfile::tempdir().unwrap();
    let fixture = Fixture { budget: 3000, ..Fixture::default() };
    let app = fixture.app(dir.path());
    assert_eq!(generate(&app, &prompt(RequestId::new(), &[1; 20], 0)).await.status, 200);
    let id = RequestId::new();
    let waiting = tokio::spawn({
        let app = Arc::clone(&app);
        async move { generate(&app, &prompt(id, &[2; 20], 0)).await }
    });
    let metrics = app.metrics.clone();
    wait("it waits", move || metrics.budget_waiting.get() == 1).await;
    app.abort(&id.to_string());
    let reply = waiting.await.unwrap();
    assert_eq!((reply.status, reply.header("x-tether-capture")), (200, Some("none")));
    assert_eq!(reply.json()["meta_info"]["finish_reason"]["type"], "abort");
    assert_eq!((files(dir.path()).len(), app.metrics.budget_waiting.get()), (1, 0));
}

#[tokio::test]
async fn a_single_prompt_without_a_name_has_the_dump_s_id_as_its_call() {
    let dir = tempfile::tempdir().unwrap();
    let app = Fixture { mode: CaptureMode::All, ..Fixture::default() }.app(dir.path());
    let reply = generate(&app, r#"{"input_ids":[5]}"#).await;
    let call = reply.header("x-request-id").unwrap();
    let dump = DumpFile::open(&dump_path(dir.path(), call.parse().unwrap())).unwrap();
    assert_eq!(dump.head().metadata.call_id.as_deref(), Some(call));
    assert_eq!(reply.json()["meta_info"]["id"], call);
}

#[tokio::test]
async fn more_log_probabilities_than_a_reply_can_hold_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let app = Fixture::default().app(dir.path());
    let asked: Vec<i64> = (0..40_000).map(|token| token % 100).collect();
    let body = |ids: &[i64]| {
        json!({"input_ids": vec![1; 30], "return_logprob": true, "logprob_start_len": 0, "token_ids_logprob": ids,
               "sampling_params": {"max_new_tokens": 1}})
        .to_string()
    };
    let reply = generate(&app, &body(&asked)).await;
    let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!(reply.status, 400);
    assert!(
        message.contains("31 positions with 40000 log-probabilities")
            && message.contains("`top_logprobs_num`"),
        "{message}"
    );
    assert_eq!(generate(&app, &body(&asked[..50])).await.status, 200);
}

/// The events of a streamed reply.
fn events(reply: &Reply) -> Vec<serde_json::Value> {
    let text = std::str::from_utf8(&reply.body).unwrap();
    let event = |event: &str| {
        let event = event.strip_prefix("data: ").unwrap();
        serde_json::from_str(event).unwrap_or_else(|_| json!(event))
    };
    text.strip_suffix("\n\n").unwrap().split("\n\n").map(event).collect()
}

fn streamed(ids: &[i64], new_tokens: usize) -> String {
    json!({"input_ids": ids, "stream": true, "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0}}).to_string()
}

#[tokio::test]
async fn a_stream_has_all_so_far_in_each_event_or_what_is_new() {
    let dir = tempfile::tempdir().unwrap();
    for incremental in [false, true] {
        let app = Fixture { incremental, ..Fixture::default() }.app(dir.path());
        let reply = generate(&app, &streamed(&[1, 2], 6)).await;
        assert_eq!(
            (reply.status, reply.header("content-type")),
            (200, Some("text/event-stream; charset=utf-8"))
        );
        let mut events = events(&reply);
        assert_eq!(events.pop().unwrap(), "[DONE]");
        let ids = |event: &serde_json::Value| event["output_ids"].as_array().unwrap().clone();
        let counts: Vec<u64> =
            events.iter().map(|event| event["meta_info"]["completion_tokens"].as_u64().unwrap()).collect();
        assert!(counts.is_sorted() && counts.last() == Some(&6), "{counts:?}");
        if incremental {
            let all: Vec<_> = events.iter().flat_map(ids).collect();
            assert_eq!(json!(all), json!([3, 4, 5, 6, 7, 8]));
        } else {
            for (event, count) in events.iter().zip(counts) {
                assert_eq!(ids(event).len() as u64, count);
            }
            assert_eq!(events.last().unwrap()["output_ids"], json!([3, 4, 5, 6, 7, 8]));
        }
        assert_eq!(outcome(&app, Outcome::Ok), 1);
    }
}

#[tokio::test]
async fn what_goes_wrong_before_a_stream_has_a_status_and_what_goes_wrong_in_it_is_an_event() {
    let dir = tempfile::tempdir().unwrap();
    let app = Fixture::default().app(dir.path());
    assert_eq!(generate(&app, &streamed(&[1, FAILS], 3)).await.status, 500);
    assert_eq!(generate(&app, &streamed(&[1000], 3)).await.status, 400);
    // It comes to the token that fails when it is run.
    let reply = generate(&app, &streamed(&[FAILS - 3], 9)).await;
    let events = events(&reply);
    let [.., error, done] = &events[..] else { panic!("{events:?}") };
    assert_eq!((reply.status, done), (200, &json!("[DONE]")));
    assert_eq!((&error["error"]["code"], &error["error"]["type"]), (&json!(500), &json!("internal_error")));
    assert!(error["error"]["message"].as_str().unwrap().contains("as asked"), "{error}");
    assert_eq!((outcome(&app, Outcome::Failed), app.metrics.in_flight.get()), (2, 0));
    // The dump that its head spoke of stays; where the step failed before it was published, the head says that there is none.
    let id = RequestId::new();
    let body = json!({"rid": id, "input_ids": [FAILS - 3], "stream": true, "sampling_params": {"max_new_tokens": 9, "temperature": 0}});
    let reply = generate(&app, &body.to_string()).await;
    assert!(std::str::from_utf8(&reply.body).unwrap().contains("internal_error"));
    let promised = reply.header("x-tether-capture").is_none();
    assert_eq!(dump_path(dir.path(), id).exists(), promised);
    // The name is free at once.
    let again = generate(&app, &body.to_string()).await;
    assert_eq!(again.status, if promised { 409 } else { 200 });
    // A prompt alone has one event.
    let reply = generate(&app, &streamed(&[1], 0)).await;
    assert_eq!(reply.body.windows(6).filter(|bytes| bytes == b"data: ").count(), 2);
}

#[tokio::test]
async fn a_stream_that_nobody_reads_holds_little_and_ends_with_its_reader() {
    let dir = tempfile::tempdir().unwrap();
    let app = Fixture { mode: CaptureMode::All, ..Fixture::default() }.app(dir.path());
    let response = Arc::clone(&app).handle(request("POST", "/generate", streamed(&[1], 40))).await;
    assert_eq!(
        (response.status().as_u16(), files(dir.path()).len()),
        (200, 1),
        "the dump is there before the head"
    );
    let metrics = app.metrics.clone();
    wait("all tokens are made", move || metrics.running.get() == 0).await;
    drop(response);
    let dir = dir.path().to_owned();
    wait("its dump is gone", move || files(&dir).is_empty()).await;
    assert_eq!((outcome(&app, Outcome::ClientGone), app.lifecycle.in_flight()), (1, 0));
}

#[tokio::test]
async fn the_server_says_what_it_is_and_whether_a_token_comes_out() {
    let dir = tempfile::tempdir().unwrap();
    let app = Fixture { mode: CaptureMode::All, ..Fixture::default() }.app(dir.path());
    for path in ["/server_info", "/get_server_info"] {
        let info = send(&app, request("GET", path, "")).await.json();
        assert_eq!((&info["model_path"], &info["status"]), (&json!("/models/fake"), &json!("ready")));
        assert_eq!(info["internal_states"][0]["num_running_reqs"], 0);
    }
    let health = send(&app, request("GET", "/health_generate", "")).await;
    assert_eq!((health.status, health.body.len(), files(dir.path()).len()), (200, 0, 0));
    assert_eq!(app.metrics.generated_tokens.get(), 1);
    assert_eq!(send(&app, request("GET", "/v1/models/fake", "")).await.json()["id"], "fake");
    let other = send(&app, request("GET", "/v1/models/other%2Fone", "")).await;
    assert_eq!((other.status, &other.json()["error"]["code"]), (404, &json!("model_not_found")));
    assert!(other.json()["error"]["message"].as_str().unwrap().contains("'other/one'"));
    app.lifecycle.drain();
    assert_eq!(send(&app, request("GET", "/health_generate", "")).await.status, 503);
    assert_eq!(send(&app, request("GET", "/server_info", "")).await.json()["status"], "not ready");
}

#[tokio::test]
async fn without_its_key_a_request_is_401_and_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let keys = crate::auth::Keys { api: Some("user".parse().unwrap()), admin: Some("root".parse().unwrap()) };
    let app = Fixture { keys, ..Fixture::default() }.app(dir.path());
    let ask = |path: &str, key: Option<&str>| {
        let mut request = request("POST", path, r#"{"input_ids":[1],"rid":"x"}"#);
        if let Some(key) = key {
            request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
        }
        request
    };
    for (path, key, status) in [
        ("/generate", None, 401),
        ("/generate", Some("root"), 401),
        ("/generate", Some("user"), 200),
        ("/abort_request", Some("user"), 401),
        ("/abort_request", Some("root"), 200),
        ("/no/such/path", None, 401),
    ] {
        let reply = send(&app, ask(path, key)).await;
        assert_eq!(reply.status, status, "{path} with {key:?}");
        assert!(status != 401 || reply.json() == json!({"error": "Unauthorized"}));
    }
    assert_eq!(send(&app, request("GET", "/health", "")).await.status, 200);
    assert_eq!(send(&app, request("GET", "/metrics", "")).await.status, 200);
}
