use std::path::{Path, PathBuf};
use std::time::Duration;

use tether_dump::{RequestId, TokenHash, dump_path};

use crate::support::{Message, Proxy, Upstream, Wire, dumps, prompts, publish, until, within};

struct Place {
    _root: tempfile::TempDir,
    dir: PathBuf,
}

fn place() -> Place {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("dumps");
    std::fs::create_dir(&dir).unwrap();
    Place { _root: root, dir }
}

/// An upstream that makes dumps by `dump` before it answers.
async fn dumping(dir: &Path, dump: impl Fn(&Path, &Message) + Send + Sync + Clone + 'static) -> Upstream {
    let dir = dir.to_owned();
    Upstream::start(move |request: Message, mut wire: Wire, _| {
        let (dir, dump) = (dir.clone(), dump.clone());
        async move {
            dump(&dir, &request);
            let headers = match request.header("x-reply") {
                Some(header) => format!("{header}\r\n"),
                None => "content-type: application/json\r\nx-hidden-states-path: /server/side\r\n".to_owned(),
            };
            let body = br#"{"text":"a","meta_info":{"prompt_tokens":3}}"#;
            wire.reply(request.header("x-status").unwrap_or("200 OK"), &headers, body).await;
            Some(wire)
        }
    })
    .await
}

fn right(dir: &Path, request: &Message) {
    for (id, tokens) in request.rids().into_iter().zip(prompts(request)) {
        publish(dir, id, id, &tokens);
    }
}

async fn proxy(upstream: &Upstream, dir: &Path, flags: &[&str]) -> Proxy {
    let flags: Vec<_> =
        ["--dump-dir", dir.to_str().unwrap()].into_iter().chain(flags.iter().copied()).collect();
    Proxy::start(&[upstream], &flags).await
}

#[tokio::test]
async fn a_reply_goes_out_with_the_path_of_its_dump() {
    let place = place();
    let upstream = dumping(&place.dir, right).await;
    let proxy = proxy(&upstream, &place.dir, &[]).await;
    let reply = proxy.post("/generate", r#"{"input_ids":[5, 6,7]}"#).await;
    assert_eq!(reply.status(), 200);
    let id = upstream.last().rids()[0];
    assert_eq!(reply.all("x-hidden-states-path"), [dump_path(&place.dir, id).to_str().unwrap()]);
    assert_eq!(proxy.metric("tether_proxy_gate_total{checked=\"tokens\",result=\"matched\"}"), 1.0);
    proxy.settled().await;
    // It is the client's now.
    assert_eq!((dumps(&place.dir), proxy.app.orphans.len()), (1, 0));
}

#[tokio::test]
async fn every_element_of_a_batch_is_looked_at() {
    let place = place();
    let upstream = dumping(&place.dir, |dir, request| {
        right(dir, request);
        if request.header("x-wrong").is_some() {
            let id = request.rids()[2];
            std::fs::remove_file(dump_path(dir, id)).unwrap();
            publish(dir, id, id, &[9, 9, 9]);
        }
    })
    .await;
    let proxy = proxy(&upstream, &place.dir, &[]).await;
    let body = br#"{"input_ids":[[1],[2,3],[4,5,6]]}"#;
    let reply = proxy.connect().await.post("/generate", "", body).await;
    assert_eq!((reply.status(), reply.header("x-hidden-states-path")), (200, None));
    assert_eq!(proxy.metric("tether_proxy_gate_total{checked=\"tokens\",result=\"matched\"}"), 3.0);
    let reply = proxy.connect().await.post("/generate", "x-wrong: 1\r\n", body).await;
    assert_eq!(reply.status(), 502);
    let error = &reply.json()["error"];
    assert_eq!(error["expected"]["request_id"], upstream.last().rids()[2].to_string());
    assert_eq!(error["reason"], "token_hash");
    until("the deletion of the three", || dumps(&place.dir) == 3).await;
}

#[tokio::test]
async fn a_dump_of_another_request_fails_the_reply_with_both_sides() {
    let place = place();
    let upstream = dumping(&place.dir, |dir, request| {
        let id = request.rids()[0];
        let of_another = RequestId::new();
        match request.header("x-case").unwrap() {
            "request_id" => publish(dir, id, of_another, &prompts(request)[0]),
            "count" => publish(dir, id, id, &[1, 2]),
            "token_hash" => publish(dir, id, id, &[3, 2, 1]),
            "unreadable" => std::fs::write(dump_path(dir, id), b"short").unwrap(),
            _ => {}
        }
    })
    .await;
    let proxy = proxy(&upstream, &place.dir, &["--dump-wait", "100ms"]).await;
    for case in ["request_id", "count", "token_hash", "unreadable", "missing"] {
        let headers = format!("x-case: {case}\r\n");
        let reply = proxy.connect().await.post("/generate", &headers, br#"{"input_ids":[1,2,3]}"#).await;
        assert_eq!(reply.status(), 502, "{case}");
        let error = &reply.json()["error"];
        assert_eq!((error["type"].as_str(), error["reason"].as_str()), (Some("mismatch"), Some(case)));
        assert_eq!(error["expected"]["prompt_tokens"], 3);
        assert_eq!(error["expected"]["token_hash"], TokenHash::of(&[1, 2, 3]).to_string());
        match case {
            "missing" | "unreadable" => {
                assert!(error["found"].is_null() && error["detail"].is_string(), "{error}");
            }
            "count" => assert_eq!(error["found"]["prompt_tokens"], 2),
            "token_hash" => assert_eq!(error["found"]["token_hash"], TokenHash::of(&[3, 2, 1]).to_string()),
            _ => assert_ne!(error["found"]["request_id"], error["expected"]["request_id"]),
        }
        assert_eq!(proxy.metric(&format!("tether_proxy_mismatches_total{{reason=\"{case}\"}}")), 1.0);
    }
    proxy.settled().await;
    until("the deletion of what was not delivered", || dumps(&place.dir) == 0).await;
}

#[tokio::test]
async fn a_mismatch_may_be_told_in_a_header_instead() {
    let place = place();
    let upstream = dumping(&place.dir, |dir, request| {
        let id = request.rids()[0];
        publish(dir, id, id, &[3, 2, 1]);
    })
    .await;
    let proxy = proxy(&upstream, &place.dir, &["--on-mismatch", "warn"]).await;
    let reply = proxy.post("/generate", r#"{"input_ids":[1,2,3]}"#).await;
    assert_eq!((reply.status(), reply.header("x-hidden-states-path")), (200, None));
    assert!(reply.header("x-tether-mismatch").unwrap().starts_with("token_hash"));
    assert_eq!(proxy.metric("tether_proxy_mismatches_total{reason=\"token_hash\"}"), 1.0);
}

#[tokio::test]
async fn a_dump_that_comes_late_is_waited_for() {
    let place = place();
    let upstream = dumping(&place.dir, |dir, request| {
        let (dir, request) = (dir.to_owned(), request.clone());
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(300)).await;
            right(&dir, &request);
        });
    })
    .await;
    let proxy = proxy(&upstream, &place.dir, &["--dump-wait", "60s"]).await;
    let reply = proxy.post("/generate", r#"{"input_ids":[1,2,3]}"#).await;
    assert_eq!(reply.status(), 200);
    assert!(Path::new(reply.header("x-hidden-states-path").unwrap()).exists());
}

#[tokio::test]
async fn text_is_checked_by_id_and_by_the_count_that_the_reply_states() {
    let place = place();
    let upstream = dumping(&place.dir, |dir, request| {
        let id = request.rids()[0];
        let tokens: Vec<i64> = (0..request.header("x-count").unwrap().parse().unwrap()).collect();
        publish(dir, id, id, &tokens);
    })
    .await;
    let proxy = proxy(&upstream, &place.dir, &[]).await;
    let body = br#"{"text":"three tokens here"}"#;
    let reply = proxy.connect().await.post("/generate", "x-count: 3\r\n", body).await;
    assert_eq!((reply.status(), reply.text().contains("prompt_tokens")), (200, true));
    assert!(reply.header("x-hidden-states-path").is_some());
    assert_eq!(proxy.metric("tether_proxy_gate_total{checked=\"id\",result=\"matched\"}"), 1.0);
    let reply = proxy.connect().await.post("/generate", "x-count: 4\r\n", body).await;
    assert_eq!((reply.status(), reply.json()["error"]["reason"].as_str()), (502, Some("count")));
}

#[tokio::test]
async fn dumps_of_a_reply_that_is_an_error_of_the_server_are_deleted() {
    let place = place();
    let upstream = dumping(&place.dir, right).await;
    let proxy = proxy(&upstream, &place.dir, &[]).await;
    let headers = "x-status: 500 Internal Server Error\r\n";
    let reply = proxy.connect().await.post("/generate", headers, br#"{"input_ids":[[1],[2]]}"#).await;
    assert_eq!(reply.status(), 500);
    until("the deletion", || dumps(&place.dir) == 0 && proxy.app.orphans.is_empty()).await;
    assert_eq!(proxy.metric("tether_proxy_orphans_total{result=\"deleted\"}"), 2.0);
}

#[tokio::test]
async fn replies_without_a_dump_by_right_are_not_held_up() {
    let place = place();
    let upstream = dumping(&place.dir, |_, _| {}).await;
    let proxy = proxy(&upstream, &place.dir, &["--dump-wait", "10m"]).await;
    for (headers, body, status) in [
        ("", r#"{"input_ids":[1],"capture":false}"#, 200),
        ("", r#"{"input_ids":[[1],[2]],"capture":[false,false]}"#, 200),
        ("x-reply: x-tether-capture: none\r\n", r#"{"input_ids":[1]}"#, 200),
        ("x-status: 400 Bad Request\r\n", r#"{"input_ids":[1]}"#, 400),
        ("x-status: 503 Busy\r\n", r#"{"input_ids":[1]}"#, 503),
    ] {
        let reply = proxy.connect().await.post("/generate", headers, body.as_bytes()).await;
        assert_eq!(reply.status(), status, "{headers}{body}");
    }
    proxy.settled().await;
    // Without a dump directory nothing is looked at, and the server's own header passes.
    let without = Proxy::start(&[&upstream], &[]).await;
    let reply = without.post("/generate", r#"{"input_ids":[1]}"#).await;
    assert_eq!((reply.status(), reply.header("x-hidden-states-path")), (200, Some("/server/side")));
}

#[tokio::test]
async fn the_rows_of_a_batch_that_the_server_says_have_no_dump_are_not_looked_for() {
    let place = place();
    // The second row was aborted: its siblings' dumps are right, and must reach the client.
    let upstream = dumping(&place.dir, |dir, request| {
        let (ids, prompts) = (request.rids(), prompts(request));
        for row in [0, 2] {
            publish(dir, ids[row], ids[row], &prompts[row]);
        }
    })
    .await;
    let proxy = proxy(&upstream, &place.dir, &["--dump-wait", "100ms"]).await;
    let body = br#"{"input_ids":[[1],[2],[3]]}"#;
    let headers = "x-reply: x-tether-capture: dump, none,dump\r\n";
    let reply = proxy.connect().await.post("/generate", headers, body).await;
    assert_eq!(reply.status(), 200);
    assert_eq!(proxy.metric("tether_proxy_gate_total{checked=\"tokens\",result=\"matched\"}"), 2.0);
    assert_eq!(proxy.sum("tether_proxy_mismatches_total"), 0.0);
    proxy.settled().await;
    assert_eq!(dumps(&place.dir), 2);
    // A row that the server says has a dump is looked for, and so is each where the header makes no sense.
    for words in ["none,dump,dump", "dump,none", "none,none,none,none", "nothing"] {
        let headers = format!("x-reply: x-tether-capture: {words}\r\n");
        let reply = proxy.connect().await.post("/generate", &headers, body).await;
        assert_eq!(
            (reply.status(), reply.json()["error"]["reason"].as_str()),
            (502, Some("missing")),
            "{words}"
        );
    }
    proxy.settled().await;
}

#[tokio::test]
async fn each_upstream_has_its_own_directory() {
    let (a, b) = (place(), place());
    let (up_a, up_b) = (dumping(&a.dir, right).await, dumping(&b.dir, right).await);
    let urls = [
        format!("http://{},dump-dir={}", up_a.address, a.dir.display()),
        format!("http://{},dump-dir={}", up_b.address, b.dir.display()),
    ];
    let proxy = Proxy::start_at(&urls, &[]).await;
    for _ in 0..4 {
        let reply = proxy.post("/generate", r#"{"input_ids":[1,2]}"#).await;
        assert_eq!(reply.status(), 200);
        assert!(Path::new(reply.header("x-hidden-states-path").unwrap()).exists());
    }
    assert_eq!((dumps(&a.dir), dumps(&b.dir)), (2, 2));
}

#[tokio::test]
async fn a_dump_in_the_legacy_layout_is_read_too() {
    let place = place();
    let upstream = dumping(&place.dir, |dir, request| {
        let (id, tokens) = (request.rids()[0], prompts(request).remove(0));
        let folder = dir.join(format!("req_{id}"));
        std::fs::create_dir(&folder).unwrap();
        let meta = serde_json::json!({
            "request_id": id, "num_tokens": tokens.len(), "token_ids": tokens, "points": ["R2"], "final": "pre_norm",
            "token_hash": TokenHash::of(&tokens),
        });
        std::fs::write(folder.join("meta.json"), meta.to_string()).unwrap();
        std::fs::write(folder.join("done"), b"").unwrap();
    })
    .await;
    let proxy = proxy(&upstream, &place.dir, &[]).await;
    let reply = proxy.post("/generate", r#"{"input_ids":[1,2]}"#).await;
    assert_eq!(reply.status(), 200, "{}", reply.text());
    assert!(
        reply
            .header("x-hidden-states-path")
            .unwrap()
            .ends_with(&format!("req_{}", upstream.last().rids()[0]))
    );
}

/// A stream with `rows: "all"`, whose dump is made by `dump` with the last event.
async fn stream_all(dump: fn(&Path, &Message)) -> (Message, Proxy, Place) {
    let place = place();
    let dir = place.dir.clone();
    let (go, wait) = tokio::sync::watch::channel(false);
    let upstream = Upstream::start(move |request: Message, mut wire: Wire, _| {
        let (dir, mut wait) = (dir.clone(), wait.clone());
        async move {
            wire.stream_head().await;
            wire.write_chunk(b"data: {\"meta_info\":{\"finish_reason\":null}}\n\n").await;
            wait.wait_for(|go| *go).await.unwrap();
            wire.write_chunk(b"data: {\"meta_info\":{\"finish_reason\":{\"type\":\"length\"}}}\n\n").await;
            wire.write_chunk(b"data: [DONE]\n\n").await;
            dump(&dir, &request);
            wire.write("0\r\n\r\n").await;
            Some(wire)
        }
    })
    .await;
    let proxy = proxy(&upstream, &place.dir, &["--dump-wait", "500ms"]).await;
    let mut wire = proxy.connect().await;
    let body = br#"{"input_ids":[1,2],"stream":true,"capture":{"rows":"all"}}"#;
    wire.send("/generate", "", body).await;
    let mut reply = within("the head", wire.head()).await.unwrap();
    // The first event does not wait for the dump.
    reply.body = within("the first event", wire.chunk()).await.unwrap();
    go.send(true).unwrap();
    loop {
        match within("more", wire.chunk()).await {
            Some(chunk) if chunk.is_empty() => {
                reply.whole = true;
                break;
            }
            Some(chunk) => reply.body.extend(chunk),
            None => break,
        }
    }
    (reply, proxy, place)
}

#[tokio::test]
async fn the_end_of_a_stream_of_all_rows_waits_for_the_dump() {
    let (reply, proxy, place) = stream_all(right).await;
    assert!(reply.whole && reply.text().ends_with("data: [DONE]\n\n"), "{}", reply.text());
    assert_eq!(reply.text().matches("finish_reason").count(), 2);
    proxy.settled().await;
    assert_eq!(dumps(&place.dir), 1);
}

#[tokio::test]
async fn a_stream_of_all_rows_without_its_dump_is_cut_before_its_end() {
    let (reply, proxy, place) = stream_all(|dir, request| {
        let id = request.rids()[0];
        publish(dir, id, id, &[2, 1]);
    })
    .await;
    assert!(!reply.whole);
    assert_eq!(reply.text(), "data: {\"meta_info\":{\"finish_reason\":null}}\n\n");
    proxy.settled().await;
    let aborted = "tether_proxy_requests_aborted_total{reason=\"mismatch\",route=\"generate\"}";
    assert_eq!(proxy.metric(aborted), 1.0);
    until("the deletion", || dumps(&place.dir) == 0).await;
}

#[tokio::test]
async fn under_trust_an_id_whose_dump_is_published_is_refused_and_the_dump_stands() {
    let place = place();
    let upstream = dumping(&place.dir, right).await;
    let proxy = proxy(&upstream, &place.dir, &["--client-ids", "trust"]).await;
    let id = RequestId::new();
    let body = format!(r#"{{"input_ids":[1],"rid":"{id}"}}"#);
    assert_eq!(proxy.post("/generate", &body).await.status(), 200);
    let again = proxy.post("/generate", &body).await;
    assert_eq!(again.status(), 409);
    assert!(again.json()["error"]["message"].as_str().unwrap().contains(&id.to_string()));
    assert_eq!((upstream.requests().len(), dumps(&place.dir)), (1, 1));
    proxy.settled().await;
}

#[tokio::test]
async fn under_trust_a_refused_request_leaves_the_late_dump_of_the_one_before_to_be_deleted() {
    let place = place();
    // The first is answered with an error before its dump is there; the second is refused.
    let upstream = dumping(&place.dir, |_, _| {}).await;
    let proxy = proxy(&upstream, &place.dir, &["--client-ids", "trust", "--dump-wait", "10ms"]).await;
    let id = RequestId::new();
    let body = format!(r#"{{"input_ids":[1],"rid":"{id}"}}"#);
    assert_eq!(proxy.post("/generate", &body).await.status(), 502);
    for status in ["503 Busy", "409 Conflict"] {
        let headers = format!("x-status: {status}\r\n");
        let reply = proxy.connect().await.post("/generate", &headers, body.as_bytes()).await;
        assert_eq!(reply.status().to_string(), status[..3]);
        proxy.settled().await;
        assert_eq!(proxy.app.orphans.len(), 1, "after {status}");
    }
    publish(&place.dir, id, id, &[1]);
    until("the deletion", || dumps(&place.dir) == 0 && proxy.app.orphans.is_empty()).await;
}
