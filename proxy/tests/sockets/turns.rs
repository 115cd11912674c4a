use std::sync::Arc;

use tokio::sync::watch;

use crate::support::{Message, Proxy, Upstream, Wire, until, within};

const BODY: &[u8] = br#"{"text":"a"}"#;

/// Begins a stream at once, and ends it when told to.
async fn streaming(go: &watch::Receiver<bool>) -> Upstream {
    let go = go.clone();
    Upstream::start(move |request: Message, mut wire: Wire, _| {
        let mut go = go.clone();
        async move {
            if !request.start.contains("/generate") {
                wire.reply("200 OK", "", b"{}").await;
                return Some(wire);
            }
            wire.stream_head().await;
            wire.write_chunk(b"data: 1\n\n").await;
            go.wait_for(|go| *go).await.unwrap();
            wire.write("0\r\n\r\n").await;
            Some(wire)
        }
    })
    .await
}

async fn queued(proxy: &Proxy, count: i64) {
    let metrics = Arc::clone(&proxy.app.metrics);
    until("the queue", || metrics.queued.get() == count).await;
}

/// Sends a generation and reads the first event of its reply.
async fn begin(proxy: &Proxy) -> Wire {
    let mut wire = proxy.connect().await;
    wire.send("/generate", "", BODY).await;
    assert_eq!(within("the head", wire.head()).await.unwrap().status(), 200);
    assert_eq!(within("an event", wire.chunk()).await.unwrap(), b"data: 1\n\n");
    wire
}

#[tokio::test]
async fn a_turn_lasts_to_the_end_of_the_reply_and_the_queue_has_an_end() {
    let (go, wait) = watch::channel(false);
    let upstream = streaming(&wait).await;
    let proxy =
        Proxy::start(&[&upstream], &["--max-concurrent", "1", "--queue", "1", "--queue-timeout", "10m"])
            .await;
    let mut first = begin(&proxy).await;
    // The first has its head and an event, and still it is its turn.
    let mut second = proxy.connect().await;
    second.send("/generate", "", BODY).await;
    queued(&proxy, 1).await;
    let third = proxy.post("/generate", BODY).await;
    assert_eq!((third.status(), third.header("retry-after")), (429, Some("1")));
    let error = &third.json()["error"];
    assert_eq!(error["request_id"].as_str(), third.header("x-request-id"));
    assert_eq!(error["type"], "queue_full");
    // What is no generation needs no turn.
    assert_eq!(proxy.get("/v1/models").await.status(), 200);
    assert_eq!(proxy.get("/health").await.status(), 200);
    assert_eq!(proxy.post("/abort_request", r#"{"rid":"nobody"}"#).await.status(), 200);
    assert_eq!(upstream.requests().iter().filter(|request| request.start.contains("/generate")).count(), 1);
    go.send(true).unwrap();
    assert_eq!(within("the end", first.chunk()).await.unwrap(), b"");
    let reply = within("the second reply", second.message()).await.unwrap();
    assert!(reply.whole && reply.status() == 200);
    proxy.settled().await;
    assert_eq!(proxy.metric("tether_proxy_refused_total{reason=\"queue_full\"}"), 1.0);
}

#[tokio::test]
async fn who_waits_too_long_for_a_turn_is_told_to_come_again() {
    let (go, wait) = watch::channel(false);
    let upstream = streaming(&wait).await;
    let proxy = Proxy::start(&[&upstream], &["--max-concurrent", "1", "--queue-timeout", "50ms"]).await;
    let mut first = begin(&proxy).await;
    let reply = proxy.post("/generate", BODY).await;
    assert_eq!((reply.status(), reply.header("retry-after")), (503, Some("1")));
    assert_eq!(reply.json()["error"]["request_id"].as_str(), reply.header("x-request-id"));
    assert_eq!(reply.json()["error"]["type"], "queue_timeout");
    go.send(true).unwrap();
    assert_eq!(within("the end", first.chunk()).await.unwrap(), b"");
    proxy.settled().await;
    // None of it reached the upstream, and the turn is free again.
    assert_eq!(upstream.requests().len(), 1);
    assert_eq!(proxy.post("/generate", BODY).await.status(), 200);
}

#[tokio::test]
async fn who_goes_away_gives_its_place_or_its_turn_to_others() {
    let (go, wait) = watch::channel(false);
    let upstream = streaming(&wait).await;
    let proxy =
        Proxy::start(&[&upstream], &["--max-concurrent", "1", "--queue", "1", "--queue-timeout", "10m"])
            .await;
    let running = begin(&proxy).await;
    let mut waiting = proxy.connect().await;
    waiting.send("/generate", "", BODY).await;
    queued(&proxy, 1).await;
    drop(waiting);
    queued(&proxy, 0).await;
    assert_eq!(proxy.metric("tether_proxy_client_gone_total{phase=\"queued\"}"), 1.0);
    assert_eq!(proxy.metric("tether_proxy_body_memory_bytes"), 0.0);
    let mut next = proxy.connect().await;
    next.send("/generate", "", BODY).await;
    queued(&proxy, 1).await;
    drop(running);
    assert_eq!(within("its turn", next.head()).await.unwrap().status(), 200);
    go.send(true).unwrap();
    drop(next);
    proxy.settled().await;
    // The one that went away from the queue was never sent.
    assert_eq!(upstream.requests().len(), 2);
}
