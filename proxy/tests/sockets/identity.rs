use std::collections::HashSet;

use tether_dump::RequestId;

use crate::support::{Proxy, Upstream, Wire, within};

const V7: &str = "01890a5d-ac96-774b-bcce-b302099a8057";

#[tokio::test]
async fn a_request_carries_one_id_in_body_header_and_reply() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    for path in ["/generate", "/v1/completions", "/v1/chat/completions"] {
        let reply = proxy.post(path, r#"{"text":"a","prompt":"a","x":1.50}"#).await;
        let request = upstream.last();
        assert_eq!(reply.status(), 200);
        let id = request.rids()[0].to_string();
        assert_eq!(request.all("x-request-id"), [&*id]);
        assert_eq!(reply.all("x-request-id"), [&*id]);
        assert_eq!(reply.header("x-client-request-id"), None);
        assert_eq!(request.text(), format!(r#"{{"rid":"{id}","text":"a","prompt":"a","x":1.50}}"#));
    }
    proxy.settled().await;
}

#[tokio::test]
async fn a_batch_carries_one_id_a_prompt_and_another_for_the_call() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    for (body, count) in [(r#"{"input_ids":[[1],[2],[3]]}"#, 3), (r#"{"text":["a"]}"#, 1)] {
        let reply = proxy.post("/generate", body).await;
        let rids: HashSet<_> = upstream.last().rids().into_iter().collect();
        assert!(upstream.last().json()["rid"].is_array());
        assert_eq!(rids.len(), count);
        let call: RequestId = reply.header("x-request-id").unwrap().parse().unwrap();
        assert_eq!(upstream.last().header("x-request-id"), reply.header("x-request-id"));
        assert!(!rids.contains(&call));
    }
}

#[tokio::test]
async fn ids_that_clients_choose_are_replaced_and_come_back_under_their_own_name() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    for (header, rid, expected) in [
        ("", r#""../../x""#, "../../x"),
        ("x-request-id: trace-1\r\n", "null", "trace-1"),
        ("x-request-id: trace-1\r\n", r#""mine""#, "mine"),
        ("", "7", "7"),
        ("", &format!("\"{V7}\""), V7),
        ("", r#""é""#, r#""\u00e9""#),
    ] {
        let body = format!(r#"{{"rid":{rid},"text":"a"}}"#);
        let reply = proxy.connect().await.post("/generate", header, body.as_bytes()).await;
        let request = upstream.last();
        assert_eq!(reply.header("x-client-request-id"), Some(expected), "{rid}");
        assert_eq!(request.header("x-client-request-id"), Some(expected), "{rid}");
        assert_eq!(request.header("x-request-id"), Some(&*request.rids()[0].to_string()));
        assert_ne!(request.rids()[0].to_string(), V7);
    }
    let reply = proxy.post("/generate", r#"{"rid":["a","b"],"text":["x","y"]}"#).await;
    assert_eq!(reply.header("x-client-request-id"), Some(r#"["a","b"]"#));
    // Also where no body is tagged.
    let mut wire = proxy.connect().await;
    wire.write("GET /v1/models HTTP/1.1\r\nhost: p\r\nx-request-id: trace-2\r\n\r\n").await;
    let reply = wire.message().await.unwrap();
    assert_eq!(reply.header("x-client-request-id"), Some("trace-2"));
    assert!(reply.header("x-request-id").unwrap().parse::<RequestId>().is_ok());
}

#[tokio::test]
async fn requests_that_share_a_trace_get_ids_of_their_own() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let one = async || {
        let headers = format!("traceparent: {trace}\r\nx-request-id: shared\r\n");
        proxy.connect().await.post("/generate", &headers, br#"{"text":"a"}"#).await
    };
    let all = futures_util::future::join_all((0..10).map(|_| one())).await;
    assert!(all.iter().all(|reply| reply.status() == 200));
    let ids: HashSet<_> = upstream.requests().iter().flat_map(crate::support::Message::rids).collect();
    assert_eq!(ids.len(), 10);
    assert!(upstream.requests().iter().all(|request| request.header("traceparent") == Some(trace)));
}

#[tokio::test]
async fn under_trust_a_version_7_uuid_is_kept_and_all_else_replaced() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &["--client-ids", "trust"]).await;
    let reply = proxy.post("/generate", format!(r#"{{"text":"a","rid":"{V7}"}}"#)).await;
    assert_eq!(reply.header("x-request-id"), Some(V7));
    assert_eq!(upstream.last().rids()[0].to_string(), V7);
    assert_eq!(reply.header("x-client-request-id"), None);

    let reply = proxy.post("/generate", r#"{"text":"a","rid":"job-5"}"#).await;
    assert_ne!(upstream.last().rids()[0].to_string(), "job-5");
    assert_eq!(reply.header("x-client-request-id"), Some("job-5"));

    let body = format!(r#"{{"text":["a","b"],"rid":["{V7}","job-6"]}}"#);
    let reply = proxy.post("/generate", body).await;
    assert_eq!(upstream.last().rids()[0].to_string(), V7);
    assert_ne!(reply.header("x-request-id"), Some(V7));

    let headers = format!("x-request-id: {V7}\r\n");
    let reply = proxy.connect().await.post("/generate", &headers, br#"{"text":"a"}"#).await;
    assert_eq!(reply.header("x-request-id"), Some(V7));
    assert_eq!(upstream.last().rids()[0].to_string(), V7);
    proxy.settled().await;
}

#[tokio::test]
async fn under_trust_an_id_in_flight_is_refused() {
    let upstream = Upstream::start(|_, mut wire: Wire, _| async move {
        wire.gone().await;
        None
    })
    .await;
    let proxy = Proxy::start(&[&upstream], &["--client-ids", "trust"]).await;
    let body = format!(r#"{{"text":"a","rid":"{V7}"}}"#);
    let mut first = proxy.connect().await;
    first.send("/generate", "", body.as_bytes()).await;
    crate::support::until("the first request", || upstream.requests().len() == 1).await;
    let reply = proxy.post("/generate", &body).await;
    assert_eq!(reply.status(), 409);
    assert!(reply.json()["error"]["message"].as_str().unwrap().contains(V7));
    let twice = format!(r#"{{"text":["a","b"],"rid":["{0}","{0}"]}}"#, V7.replace("8057", "8058"));
    assert_eq!(proxy.post("/generate", twice).await.status(), 409);
    assert_eq!(upstream.requests().len(), 1);
    drop(first);
    proxy.settled().await;
}

#[tokio::test]
async fn a_body_without_one_clear_identity_is_refused_and_never_sent() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    for (body, word) in [
        (r#"{"rid":"a","text":"x","rid":"b"}"#, "`rid`"),
        (r#"{"rid":"a","text":"x","\u0072id":"b"}"#, "`rid`"),
        ("", "empty"),
        ("[1]", "object"),
        (r#"{"text":"#, "JSON"),
        (r#"{"text":"x"} trailing"#, "byte 13"),
        (r#"{"text":"x","sampling_params":{"n":2},"capture":{"rows":"all"}}"#, "`rows`"),
    ] {
        let reply = proxy.post("/generate", body).await;
        assert_eq!(reply.status(), 400, "{body}");
        let error = &reply.json()["error"];
        assert!(error["message"].as_str().unwrap().contains(word), "{error}");
        assert_eq!(error["request_id"].as_str(), reply.header("x-request-id"));
    }
    assert!(upstream.requests().is_empty());
    proxy.settled().await;
}

#[tokio::test]
async fn an_abort_by_the_clients_name_reaches_the_upstream_that_has_the_request() {
    let script = |request: crate::support::Message, mut wire: Wire, _| async move {
        if request.start.contains("/abort_request") {
            wire.reply("200 OK", "", b"").await;
            return Some(wire);
        }
        wire.gone().await;
        None
    };
    let (a, b) = (Upstream::start(script).await, Upstream::start(script).await);
    let proxy = Proxy::start(&[&a, &b], &[]).await;
    let mut client = proxy.connect().await;
    client.send("/generate", "", br#"{"text":["x","y"],"rid":"job"}"#).await;
    crate::support::until("the request", || a.requests().len() + b.requests().len() == 1).await;
    let (owner, other) = if a.requests().is_empty() { (&b, &a) } else { (&a, &b) };
    let ids = owner.last().rids();

    let reply = proxy.post("/abort_request", r#"{"rid":"job_1"}"#).await;
    assert_eq!(reply.status(), 200);
    assert_eq!(owner.last().rids(), [ids[1]]);
    assert_eq!(reply.json()["aborted"][0]["status"], 200);
    proxy.post("/abort_request", r#"{"rid":"job"}"#).await;
    assert_eq!(owner.requests().len(), 4);

    // SGLang matches by the beginning: such names would end the requests of others.
    for rid in ["", "0", "jo", "nobody"] {
        let reply = proxy.post("/abort_request", format!(r#"{{"rid":"{rid}"}}"#)).await;
        assert_eq!((reply.status(), reply.json()["aborted"].as_array().unwrap().len()), (200, 0));
    }
    assert_eq!(other.requests().len(), 0);
    proxy.post("/abort_request", r#"{"abort_all":true}"#).await;
    assert_eq!((owner.requests().len(), other.requests().len()), (5, 1));
    assert_eq!(proxy.post("/abort_request", "{}").await.status(), 400);
    drop(client);
    within("the end", proxy.settled()).await;
}

#[tokio::test]
async fn a_client_cannot_say_itself_what_an_id_was_before() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    let header = "x-client-request-id: someone-else\r\n";
    let reply = proxy.connect().await.post("/generate", header, br#"{"text":"a"}"#).await;
    assert_eq!((reply.status(), upstream.last().header("x-client-request-id")), (200, None));
    let reply = proxy.connect().await.post("/generate", header, br#"{"text":"a","rid":"mine"}"#).await;
    assert_eq!((reply.status(), upstream.last().header("x-client-request-id")), (200, Some("mine")));
}
