//! What a client can get wrong: each is refused with words that say what and why, and the server goes on.

use bytes::Bytes;
use futures_util::future::join_all;
use http::{Method, header};
use http_body_util::Full;
use serde_json::{Value, json};
use tether_dump::RequestId;
use tether_tests::{
    Checkpoint, Client, NUM_LAYERS, Prompts, Scrape, Server, Stack, VOCAB, assert_same_states, eventually,
};
use tokio::sync::OnceCell;

async fn stack() -> &'static Stack {
    static STACK: OnceCell<(Checkpoint, Stack)> = OnceCell::const_new();
    let start = || async {
        let checkpoint = Checkpoint::float32();
        let stack = Stack::start(Server::of(&checkpoint).with_faulty_disk()).await;
        (checkpoint, stack)
    };
    &STACK.get_or_init(start).await.1
}

/// POSTs `body` to the server itself and checks that it is a 400 in words that name each of `named`; then that the next
/// request is served right.
async fn refused(body: &str, named: &[&str]) {
    let stack = stack().await;
    let shown: String = body.chars().take(100).collect();
    let reply = stack.direct().post_text("/generate", body).await;
    assert_eq!(reply.status, 400, "{shown}: {}", reply.text());
    let error = reply.error_text();
    for named in named {
        assert!(error.contains(named), "{shown}: `{named}` is not named in: {error}");
    }
    // Someone has to read it: a million token IDs are not repeated.
    assert!(error.len() < 1000, "{error}");
    next_is_served(&stack.direct()).await;
}

async fn next_is_served(client: &Client) {
    let rid = RequestId::new();
    let body = json!({"rid": rid, "input_ids": [11, 12, 13], "sampling_params": {"max_new_tokens": 1, "temperature": 0}});
    let reply = client.generate(&body).await.expect(200);
    assert_eq!((reply.id(), reply.output_ids().len()), (rid, 1));
    assert_eq!(stack().await.dumps().read(rid).token_ids, [11, 12, 13]);
}

fn with_ids(ids: &Value) -> String {
    json!({"rid": RequestId::new(), "input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}).to_string()
}

/// SV-07.
#[tokio::test]
async fn token_ids_that_are_none_are_refused_by_place_and_value() {
    let last = (VOCAB - 1).to_string();
    let outside = VOCAB.to_string();
    refused(&with_ids(&json!([])), &["input_ids", "empty"]).await;
    refused(&with_ids(&json!([5, -1])), &["input_ids[1]", "-1", &last]).await;
    refused(&with_ids(&json!([5, 6, VOCAB])), &["input_ids[2]", &outside, &last]).await;
    refused(&with_ids(&json!([2_147_483_648_i64])), &["input_ids[0]", "2147483648"]).await;
    refused(&with_ids(&json!([u64::MAX])), &["input_ids[0]", "18446744073709551615"]).await;
    refused(&with_ids(&json!([5, 1.5])), &["input_ids[1]", "1.5"]).await;
    refused(&with_ids(&json!([5, 6.0])), &["input_ids[1]", "6.0"]).await;
    refused(&with_ids(&json!(["a"])), &["input_ids[0]", "\"a\""]).await;
    refused(&with_ids(&json!([5, null])), &["input_ids[1]", "null"]).await;
    refused(&with_ids(&json!([true])), &["input_ids[0]", "true"]).await;
    refused(&with_ids(&json!("5 6")), &["input_ids", "5 6"]).await;
    refused(&with_ids(&json!(5)), &["input_ids"]).await;
    refused(&with_ids(&json!({"a": 5})), &["input_ids"]).await;
    // Neither prompt nor text.
    refused(&with_ids(&Value::Null), &["input_ids", "text"]).await;
}

/// SV-05 in part.
#[tokio::test]
async fn a_million_tokens_are_refused_with_the_limit() {
    let ids: Vec<i64> = (0..1_000_000).map(|i| 2 + i % 600).collect();
    refused(&with_ids(&json!(ids)), &["1000000", "8192"]).await;
}

#[tokio::test]
async fn one_bad_row_fails_the_batch_and_leaves_no_dump_of_the_others() {
    let stack = stack().await;
    for (row, named) in
        [(json!([7, VOCAB]), "input_ids[1][1]"), (json!([]), "input_ids[1]"), (json!(5), "input_ids[1]")]
    {
        let rids = [RequestId::new(), RequestId::new(), RequestId::new()];
        let body = json!({"rid": rids, "input_ids": [[5, 6], row, [8, 9]], "sampling_params": {"max_new_tokens": 1, "temperature": 0}});
        refused(&body.to_string(), &[named]).await;
        assert!(rids.iter().all(|rid| !stack.dumps().path_of(*rid).exists()));
    }
}

#[tokio::test]
async fn what_is_not_json_is_refused_at_its_place() {
    for body in [
        "",
        "{",
        "[1, 2",
        "{\"input_ids\": [5, 6,]}",
        "{\"input_ids\": [05]}",
        "{\"input_ids\": [NaN]}",
        "input_ids=5",
    ] {
        refused(body, &["JSON"]).await;
    }
    // JSON, but no object.
    refused("[5, 6]", &[]).await;
    refused("null", &[]).await;
    // Nested deeply enough to overflow a recursive reader's stack.
    refused(&format!("{{\"input_ids\": {}5{}}}", "[".repeat(200_000), "]".repeat(200_000)), &[]).await;
}

#[tokio::test]
async fn another_content_type_is_refused_by_name() {
    let stack = stack().await;
    let (client, body) = (stack.direct(), with_ids(&json!([5])));
    for kind in ["text/plain", "application/x-www-form-urlencoded"] {
        let request = client.request(Method::POST, "/generate").header(header::CONTENT_TYPE, kind);
        let reply = client.send(request.body(Full::from(body.clone())).expect("a plain request")).await;
        assert!(reply.status.is_client_error(), "{kind}: {}", reply.status);
        let error = reply.error_text();
        assert!(error.contains(kind) && error.contains("application/json"), "{error}");
    }
    let request = client
        .request(Method::POST, "/generate")
        .header(header::CONTENT_TYPE, "application/json; charset=utf-8");
    client.send(request.body(Full::from(body)).expect("a plain request")).await.expect(200);
    next_is_served(&client).await;
}

#[tokio::test]
async fn other_methods_and_paths_are_refused() {
    let client = stack().await.direct();
    assert_eq!(client.get("/generate").await.status, 405);
    assert_eq!(client.get("/no/such/path").await.status, 404);
    let request =
        client.request(Method::DELETE, "/generate").body(Full::<Bytes>::default()).expect("a plain request");
    assert_eq!(client.send(request).await.status, 405);
    next_is_served(&client).await;
}

#[tokio::test]
async fn a_rid_that_could_not_be_a_name_is_refused() {
    let one = |rid: Value| {
        json!({"rid": rid, "input_ids": [5], "sampling_params": {"max_new_tokens": 1, "temperature": 0}})
            .to_string()
    };
    refused(&one(json!("../../x")), &["rid", "../../x"]).await;
    refused(&one(json!("")), &["rid"]).await;
    refused(&one(json!("a b")), &["rid", "a b"]).await;
    refused(&one(json!("a/b")), &["rid", "a/b"]).await;
    refused(&one(json!("ü")), &["rid"]).await;
    refused(&one(json!("a".repeat(129))), &["rid", "128"]).await;
    refused(&one(json!(5)), &["rid", "5"]).await;
    refused(&one(json!(["a"])), &["rid"]).await;
    // For a batch: as many as prompts, all different.
    let batch = |rid: Value| {
        json!({"rid": rid, "input_ids": [[5], [6]], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}).to_string()
    };
    refused(&batch(json!([RequestId::new()])), &["rid", "1", "2"]).await;
    let id = RequestId::new();
    refused(&batch(json!([id, id])), &["rid", &id.to_string()]).await;
    refused(&batch(json!([RequestId::new(), "../x"])), &["rid", "../x"]).await;
    // What is allowed is kept.
    let client = stack().await.direct();
    let reply = client.post_text("/generate", &one(json!("a.B_c:d-9"))).await.expect(200);
    assert_eq!(reply.json()["meta_info"]["id"], "a.B_c:d-9");
}

#[tokio::test]
async fn two_rid_keys_are_refused_by_server_and_proxy() {
    let (one, other) = (RequestId::new(), RequestId::new());
    let body = format!("{{\"rid\": \"{one}\", \"input_ids\": [5], \"rid\": \"{other}\"}}");
    refused(&body, &["rid"]).await;
    let stack = stack().await;
    let reply = stack.client().post_text("/generate", &body).await.expect(400);
    assert!(reply.text().contains("rid"), "{}", reply.text());
    assert!([one, other].iter().all(|id| !stack.dumps().path_of(*id).exists()));
    // Spelt with an escape it is the same key.
    let body = format!("{{\"rid\": \"{one}\", \"input_ids\": [5], \"\\u0072id\": \"{other}\"}}");
    refused(&body, &["rid"]).await;
    assert_eq!(stack.client().post_text("/generate", &body).await.status, 400);
    next_is_served(&stack.direct()).await;
}

/// SV-01.
#[tokio::test]
async fn a_rid_in_flight_is_refused_and_a_published_one_is_too() {
    // A server of its own: it is held up, and the others are not to wait.
    let checkpoint = Checkpoint::float32();
    let server = Server::of(&checkpoint).with_faulty_disk().start().await;
    let client = server.client();
    let rid = RequestId::new();
    let body = json!({"rid": rid, "input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1, "temperature": 0}});
    server.fault().hold();
    let first = tokio::spawn({
        let (client, body) = (client.clone(), body.clone());
        async move { client.generate(&body).await }
    });
    // Its dump has been begun, so it is in flight.
    eventually("the dump is being written", || async { server.dumps().strangers().pop() }).await;
    let error = client.generate(&body).await.expect(400).error_text();
    assert!(error.contains(&rid.to_string()) && error.contains("Duplicate request ID"), "{error}");
    // As one of a batch, too.
    let batch = json!({"rid": [RequestId::new(), rid], "input_ids": [[8], [9]], "sampling_params": {"max_new_tokens": 1, "temperature": 0}});
    client.generate(&batch).await.expect(400);
    server.fault().none();
    assert_eq!(first.await.expect("no panic").expect(200).id(), rid);
    // Done: its name is taken, before anything is computed.
    let other = json!({"rid": rid, "input_ids": [100, 101], "sampling_params": {"max_new_tokens": 1, "temperature": 0}});
    let error = client.generate(&other).await.expect(409).error_text();
    assert!(error.contains(&rid.to_string()), "{error}");
    assert_eq!(server.dumps().read(rid).token_ids, [5, 6, 7]);
    // A client's own name may come again: its dumps have IDs of their own.
    for _ in 0..2 {
        let body = json!({"rid": "again", "input_ids": [5], "capture": true, "sampling_params": {"max_new_tokens": 1, "temperature": 0}});
        client.generate(&body).await.expect(200);
    }
    assert_eq!(server.dumps().ids().len(), 3);
}

#[tokio::test]
async fn a_bad_capture_is_refused_by_key_and_value() {
    let one = |capture: Value| {
        json!({"rid": RequestId::new(), "input_ids": [5], "capture": capture, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}).to_string()
    };
    let deep = NUM_LAYERS + 1;
    refused(&one(json!("yes")), &["capture", "yes"]).await;
    refused(&one(json!(1)), &["capture", "1"]).await;
    refused(&one(json!({"layers": [2]})), &["capture", "layers", "points"]).await;
    refused(&one(json!({"points": [deep]})), &["point ", &deep.to_string(), "0", &NUM_LAYERS.to_string()])
        .await;
    refused(&one(json!({"points": [-1]})), &["point", "-1"]).await;
    refused(&one(json!({"points": [2, 2]})), &["point", "2"]).await;
    refused(&one(json!({"points": [1.5]})), &["points", "1.5"]).await;
    refused(&one(json!({"points": 2})), &["points"]).await;
    refused(&one(json!({"points": ["R2"]})), &["points", "R2"]).await;
    refused(&one(json!({"axis": "sideways"})), &["axis", "sideways", "input", "output"]).await;
    refused(&one(json!({"final": "normed"})), &["final", "normed", "pre_norm", "post_norm"]).await;
    refused(&one(json!({"rows": "some"})), &["rows", "some", "prompt", "all"]).await;
    refused(&one(json!({"path": "/etc/passwd"})), &["path"]).await;
    refused(&one(json!({"points": [], "final": "none"})), &["capture"]).await;
    // A list where there is one prompt, and of a wrong length.
    refused(&one(json!([true])), &["capture"]).await;
    let batch = json!({"input_ids": [[5], [6]], "capture": [true, true, false], "sampling_params": {"max_new_tokens": 1, "temperature": 0}});
    refused(&batch.to_string(), &["capture", "3", "2"]).await;
    // `n` samples of one prompt have no one continuation. (This server makes one of each anyway.)
    let many = json!({"input_ids": [5], "capture": {"rows": "all"}, "sampling_params": {"max_new_tokens": 2, "n": 2}});
    refused(&many.to_string(), &["`sampling_params.n` is 2"]).await;
}

#[tokio::test]
async fn bad_sampling_is_refused() {
    let with = |sampling: Value| {
        json!({"rid": RequestId::new(), "input_ids": [5], "sampling_params": sampling}).to_string()
    };
    refused(&with(json!({"max_new_tokens": -1})), &["max_new_tokens", "-1"]).await;
    refused(&with(json!({"max_new_tokens": 1.5})), &["max_new_tokens", "1.5"]).await;
    refused(&with(json!({"max_new_tokens": "2"})), &["max_new_tokens", "2"]).await;
    refused(&with(json!({"max_new_tokens": 1_000_000})), &["max_new_tokens", "1000000"]).await;
    refused(&with(json!({"max_new_token": 1})), &["max_new_token"]).await;
    refused(&with(json!(5)), &["sampling_params"]).await;
}

#[tokio::test]
async fn through_the_proxy_any_client_rid_succeeds_under_a_fresh_id() {
    let stack = stack().await;
    let client = stack.client();
    let prompt = Prompts::new(1).of_length(15);
    let ask = |rid: Value| {
        let client = &client;
        let body = json!({"rid": rid, "input_ids": prompt, "sampling_params": {"max_new_tokens": 0, "temperature": 0}});
        async move { client.generate(&body).await.expect(200) }
    };
    // Also twice at the same time, and a canonical ID, which is not the client's to choose.
    let own = RequestId::new();
    let rids = [json!("../../x"), json!("same"), json!("same"), json!(own), json!("a b/c")];
    let replies = join_all(rids.iter().map(|rid| ask(rid.clone()))).await;
    let mut seen = vec![own];
    for (reply, rid) in replies.iter().zip(&rids) {
        let id = reply.id();
        assert!(!seen.contains(&id));
        seen.push(id);
        let dump = stack.dumps().read(id);
        assert_eq!((&dump.token_ids, dump.metadata.client_rid.as_deref()), (&prompt, rid.as_str()));
        assert_eq!(reply.header("x-request-id"), Some(id.to_string().as_str()));
        assert_eq!(reply.header("x-client-request-id"), rid.as_str());
    }
    let scrape = Scrape::of(&client).await;
    assert_eq!(scrape.sum("tether_proxy_mismatches_total", &[]), 0.0);
    let first = stack.dumps().read(seen[1]);
    seen[2..].iter().for_each(|id| assert_same_states(&stack.dumps().read(*id), &first));
}
