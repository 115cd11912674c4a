use std::sync::atomic::Ordering;

use tether_dump::{RequestId, dump_path};

use crate::support::{Message, Proxy, Upstream, Wire, dumps, prompts, publish, until, within};

/// Publishes the dumps of a request after the client has gone, as an upstream does that notices too late.
fn late(dir: &std::path::Path, request: &Message) -> Vec<RequestId> {
    for (id, tokens) in request.rids().into_iter().zip(prompts(request)) {
        publish(dir, id, id, &tokens);
    }
    request.rids()
}

#[tokio::test]
async fn a_client_that_leaves_while_it_sends_leaves_nothing() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    let mut client = proxy.connect().await;
    client.write("POST /generate HTTP/1.1\r\nhost: p\r\ncontent-length: 100\r\n\r\n{\"text\":").await;
    until("the request", || proxy.app.metrics.in_flight.get() == 1).await;
    drop(client);
    proxy.settled().await;
    assert_eq!(proxy.metric("tether_proxy_client_gone_total{phase=\"reading\"}"), 1.0);
    assert!(upstream.requests().is_empty());
}

#[tokio::test]
async fn a_client_that_leaves_while_it_waits_closes_the_upstream_and_its_dumps_go() {
    let upstream = Upstream::start(|_, mut wire: Wire, _| async move {
        wire.gone().await;
        None
    })
    .await;
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("dumps");
    let proxy = Proxy::start(&[&upstream], &["--dump-dir", dir.to_str().unwrap()]).await;
    let mut client = proxy.connect().await;
    client.send("/generate", "", br#"{"input_ids":[[1,2],[3]]}"#).await;
    until("the request", || upstream.requests().len() == 1).await;
    assert_eq!(proxy.app.table.len(), 2);
    drop(client);
    until("the upstream's release", || upstream.open.load(Ordering::SeqCst) == 0).await;
    proxy.settled().await;
    assert_eq!(proxy.metric("tether_proxy_client_gone_total{phase=\"waiting\"}"), 1.0);
    assert_eq!(proxy.app.orphans.len(), 2);
    late(&dir, &upstream.last());
    until("the deletion", || dumps(&dir) == 0 && proxy.app.orphans.is_empty()).await;
    assert_eq!(proxy.metric("tether_proxy_orphans_total{result=\"deleted\"}"), 2.0);
}

#[tokio::test]
async fn a_client_that_leaves_while_its_dump_is_waited_for_gets_it_deleted() {
    let upstream = Upstream::start(|_, mut wire: Wire, _| async move {
        wire.reply("200 OK", "content-type: application/json\r\n", b"{}").await;
        Some(wire)
    })
    .await;
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("dumps");
    let proxy =
        Proxy::start(&[&upstream], &["--dump-dir", dir.to_str().unwrap(), "--dump-wait", "10m"]).await;
    let mut client = proxy.connect().await;
    client.send("/generate", "", br#"{"input_ids":[1,2]}"#).await;
    let replied = format!(
        "tether_proxy_upstream_requests_total{{outcome=\"replied\",upstream=\"http://{}\"}}",
        upstream.address
    );
    until("the upstream's reply", || proxy.metric(&replied) == 1.0).await;
    drop(client);
    proxy.settled().await;
    assert_eq!(proxy.metric("tether_proxy_client_gone_total{phase=\"gate\"}"), 1.0);
    let ids = late(&dir, &upstream.last());
    until("the deletion", || !dump_path(&dir, ids[0]).exists()).await;
}

#[tokio::test]
async fn a_client_that_leaves_mid_stream_closes_the_upstream_and_its_dump_goes() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("dumps");
    let place = dir.clone();
    let upstream = Upstream::start(move |request: Message, mut wire: Wire, _| {
        let place = place.clone();
        async move {
            late(&place, &request);
            wire.stream_head().await;
            wire.write_chunk(b"data: 1\n\n").await;
            wire.gone().await;
            None
        }
    })
    .await;
    let proxy = Proxy::start(&[&upstream], &["--dump-dir", dir.to_str().unwrap()]).await;
    let mut client = proxy.connect().await;
    client.send("/generate", "", br#"{"input_ids":[1,2],"stream":true}"#).await;
    let head = within("the head", client.head()).await.unwrap();
    assert!(head.header("x-hidden-states-path").is_some());
    within("an event", client.chunk()).await.unwrap();
    assert_eq!(dumps(&dir), 1);
    drop(client);
    until("the upstream's release", || upstream.open.load(Ordering::SeqCst) == 0).await;
    proxy.settled().await;
    assert_eq!(proxy.metric("tether_proxy_client_gone_total{phase=\"replying\"}"), 1.0);
    until("the deletion", || dumps(&dir) == 0).await;
}

#[tokio::test]
async fn many_clients_half_of_which_leave_are_all_accounted_for() {
    let upstream = Upstream::start(|request: Message, mut wire: Wire, _| async move {
        match request.body.len() % 3 {
            0 => wire.reply("200 OK", "", b"{}").await,
            1 => return None,
            _ => {
                wire.stream_head().await;
                wire.write_chunk(b"data: 1\n\n").await;
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                // The proxy may be gone by now.
                use tokio::io::AsyncWriteExt;
                wire.stream.write_all(b"0\r\n\r\n").await.ok()?;
            }
        }
        Some(wire)
    })
    .await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    let one = async |index: usize| {
        let body = format!("{{\"text\":\"{}\"}}", "x".repeat(index % 50));
        let mut client = proxy.connect().await;
        client.send("/generate", "", body.as_bytes()).await;
        if index.is_multiple_of(2) {
            client.message().await;
        } else if index.is_multiple_of(3) {
            client.head().await;
        }
    };
    for round in 0..20 {
        futures_util::future::join_all((0..50).map(|i| one(round * 50 + i))).await;
    }
    proxy.settled().await;
    let received = proxy.metric("tether_proxy_requests_received_total{route=\"generate\"}");
    assert!(received >= 500.0, "{received}");
    until("the upstream's release", || {
        proxy.app.upstreams.all()[0].pool.close_idle();
        proxy.app.metrics.connections.get() == 0
    })
    .await;
}
