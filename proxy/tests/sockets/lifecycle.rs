use std::sync::Arc;

use crate::support::{Message, Proxy, Upstream, Wire, until, within};

async fn held(go: &tokio::sync::watch::Receiver<bool>) -> Upstream {
    let go = go.clone();
    Upstream::start(move |request: Message, mut wire: Wire, _| {
        let mut go = go.clone();
        async move {
            if request.start.contains("/generate") {
                go.wait_for(|go| *go).await.unwrap();
            }
            wire.reply("200 OK", "", b"{}").await;
            Some(wire)
        }
    })
    .await
}

#[tokio::test]
async fn the_proxy_tells_whether_it_lives_and_is_ready() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    assert_eq!(proxy.get("/tether/live").await.status(), 200);
    let ready = proxy.get("/tether/ready").await;
    assert_eq!((ready.status(), ready.json()["upstreams"][0]["healthy"].as_bool()), (200, Some(true)));
    assert_eq!(proxy.get("/health").await.status(), 200);
    assert_eq!(proxy.get("/tether/nothing").await.status(), 404);
    let metrics = proxy.get("/metrics").await;
    assert!(metrics.text().contains("tether_proxy_mismatches_total{reason=\"missing\"} 0"));
    upstream.stop();
    until("the refusal", || std::net::TcpStream::connect(upstream.address).is_err()).await;
    let alone = Proxy::start(&[&upstream], &[]).await;
    assert_eq!(alone.get("/tether/live").await.status(), 200);
    assert_eq!(alone.get("/tether/ready").await.status(), 503);
}

#[tokio::test]
async fn series_do_not_grow_with_what_clients_send() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    let lines = || proxy.app.metrics.text().unwrap().lines().count();
    let before = lines();
    let mut wire = proxy.connect().await;
    for index in 0..200 {
        let body = format!(r#"{{"text":"a","rid":"r{index}","model":"m{index}"}}"#);
        assert_eq!(wire.post("/generate", "", body.as_bytes()).await.status(), 200);
        assert_eq!(wire.post(&format!("/path/{index}"), "", b"{}").await.status(), 200);
    }
    assert_eq!(lines(), before);
}

#[tokio::test]
async fn draining_lets_requests_end_and_says_so() {
    let (go, wait) = tokio::sync::watch::channel(false);
    let upstream = held(&wait).await;
    let proxy = Proxy::start(&[&upstream], &["--settle", "10m"]).await;
    let mut client = proxy.connect().await;
    client.send("/generate", "", br#"{"text":"a"}"#).await;
    until("the request", || upstream.requests().len() == 1).await;
    proxy.signals.send(()).await.unwrap();
    until("draining", || proxy.app.is_draining()).await;
    // It still accepts, but says that it should get nothing new.
    assert_eq!(proxy.get("/health").await.status(), 503);
    assert_eq!(proxy.get("/tether/ready").await.status(), 503);
    assert_eq!(proxy.get("/tether/live").await.status(), 200);
    go.send(true).unwrap();
    let reply = within("the reply", client.message()).await.unwrap();
    assert_eq!((reply.status(), reply.text().as_str()), (200, "{}"));
    proxy.signals.send(()).await.unwrap();
    within("the end", proxy.ended).await.unwrap();
}

#[tokio::test]
async fn without_requests_draining_ends_at_once_also_with_idle_connections() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &["--drain-timeout", "10m"]).await;
    let mut idle = proxy.connect().await;
    assert_eq!(idle.post("/generate", "", b"{\"text\":\"a\"}").await.status(), 200);
    proxy.signals.send(()).await.unwrap();
    within("the end", proxy.ended).await.unwrap();
    within("the close", idle.gone()).await;
}

#[tokio::test]
async fn requests_that_do_not_end_are_cut_at_the_deadline_and_counted() {
    let (_go, wait) = tokio::sync::watch::channel(false);
    let upstream = held(&wait).await;
    let proxy = Proxy::start(&[&upstream], &["--drain-timeout", "200ms"]).await;
    let app = Arc::clone(&proxy.app);
    let mut client = proxy.connect().await;
    client.send("/generate", "", br#"{"text":"a"}"#).await;
    until("the request", || upstream.requests().len() == 1).await;
    proxy.signals.send(()).await.unwrap();
    within("the end", proxy.ended).await.unwrap();
    assert!(within("the cut", client.message()).await.is_none());
    let text = app.metrics.text().unwrap();
    assert!(
        text.contains("tether_proxy_requests_aborted_total{reason=\"drained\",route=\"generate\"} 1"),
        "{text}"
    );
    assert!(app.table.is_empty());
}
