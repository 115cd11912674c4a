use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::{Message, Proxy, Upstream, Wire, until, within};

const BODY: &str = r#"{"input_ids":[1,2,3]}"#;

async fn answer(mut wire: Wire) -> Option<Wire> {
    wire.reply("200 OK", "", b"{}").await;
    Some(wire)
}

#[tokio::test]
async fn a_kept_connection_that_is_closed_unread_costs_no_error_and_no_second_request() {
    // The worst case of the race: the connection is reset just as the next request arrives on it.
    let taken = Arc::new(AtomicUsize::new(0));
    let count = taken.clone();
    let upstream = Upstream::start(move |_, mut wire, _| {
        let count = count.clone();
        async move {
            count.fetch_add(1, Ordering::SeqCst);
            wire.reply("200 OK", "", b"{}").await;
            // Waits for the first byte of the next request, and leaves it unread.
            wire.stream.readable().await.unwrap();
            None
        }
    })
    .await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    let mut client = proxy.connect().await;
    for _ in 0..20 {
        assert_eq!(client.post("/generate", "", BODY.as_bytes()).await.status(), 200);
    }
    assert_eq!(taken.load(Ordering::SeqCst), 20);
    assert_eq!(proxy.metric("tether_proxy_retries_total{reason=\"stale\"}"), 19.0);
    let ids: std::collections::HashSet<_> = upstream.requests().iter().flat_map(Message::rids).collect();
    assert_eq!(ids.len(), 20);
    proxy.settled().await;
}

#[tokio::test]
async fn connections_that_the_upstream_closes_when_idle_cost_no_error() {
    let taken = Arc::new(AtomicUsize::new(0));
    let count = taken.clone();
    let upstream = Upstream::start(move |_, wire, _| {
        let count = count.clone();
        async move {
            count.fetch_add(1, Ordering::SeqCst);
            let wire = answer(wire).await?;
            // Closes an idle connection after a moment that meets the next request now and then.
            let idle =
                tokio::time::timeout(std::time::Duration::from_millis(3), wire.stream.readable()).await;
            idle.is_ok().then_some(wire)
        }
    })
    .await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    let mut client = proxy.connect().await;
    for _ in 0..300 {
        assert_eq!(client.post("/generate", "", BODY.as_bytes()).await.status(), 200);
        tokio::time::sleep(std::time::Duration::from_millis(3)).await;
    }
    assert_eq!(taken.load(Ordering::SeqCst), 300);
    proxy.settled().await;
}

#[tokio::test]
async fn a_request_that_was_read_is_never_sent_twice() {
    // On a new connection and on a kept one, ended in order or by a reset.
    let upstream = Upstream::start(|request: Message, wire, index| async move {
        match request.header("x-fault") {
            Some("close") => None,
            Some("reset") => {
                // On a kept connection, one at once would be the race above.
                if index > 0 {
                    tokio::time::sleep(std::time::Duration::from_millis(1100)).await;
                }
                wire.reset();
                None
            }
            Some("half") => {
                let mut wire = wire;
                wire.write("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"half\":").await;
                None
            }
            Some(status) => {
                let mut wire = wire;
                wire.reply(&format!("{status} Fault"), "", b"{}").await;
                Some(wire)
            }
            None => answer(wire).await,
        }
    })
    .await;
    // So many faults would open the breaker.
    let proxy = Proxy::start(&[&upstream], &["--breaker-failures", "0"]).await;
    for kept in [false, true] {
        for (fault, expected) in
            [("500", 500), ("503", 503), ("429", 429), ("close", 502), ("reset", 502), ("half", 200)]
        {
            // Empties the pool by a request whose connection is closed after it, or fills it.
            proxy.connect().await.post("/generate", "x-fault: close\r\n", BODY.as_bytes()).await;
            if kept {
                assert_eq!(proxy.post("/generate", BODY).await.status(), 200);
            }
            let before = upstream.requests().len();
            let headers = format!("x-fault: {fault}\r\n");
            let mut wire = proxy.connect().await;
            let reply = wire.post("/generate", &headers, BODY.as_bytes()).await;
            assert_eq!(reply.status(), expected, "{fault}, kept: {kept}");
            assert_eq!(reply.whole, fault != "half");
            assert_eq!(upstream.requests().len(), before + 1, "{fault}, kept: {kept}");
        }
    }
    assert_eq!(proxy.metric("tether_proxy_retries_total{reason=\"stale\"}"), 0.0);
    proxy.settled().await;
}

#[tokio::test]
async fn an_upstream_that_refuses_is_passed_over_once() {
    let (gone, there) = (Upstream::plain().await, Upstream::plain().await);
    gone.stop();
    until("the refusal", || std::net::TcpStream::connect(gone.address).is_err()).await;
    let proxy = Proxy::start(&[&gone, &there], &[]).await;
    for _ in 0..6 {
        assert_eq!(proxy.post("/generate", BODY).await.status(), 200);
    }
    assert_eq!(there.requests().len(), 6);
    let up = |upstream: &Upstream| {
        proxy.metric(&format!("tether_proxy_upstream_up{{upstream=\"http://{}\"}}", upstream.address))
    };
    assert_eq!((up(&gone), up(&there)), (0.0, 1.0));
    // With no other, the answer says which one it was.
    let alone = Proxy::start(&[&gone], &[]).await;
    let reply = alone.post("/generate", BODY).await;
    assert_eq!(reply.status(), 502);
    assert!(reply.json()["error"]["message"].as_str().unwrap().contains(&gone.address.to_string()));
    alone.settled().await;
}

#[tokio::test]
async fn a_kept_connection_to_an_upstream_that_has_gone_leads_to_another_one() {
    let other = Upstream::plain().await;
    // Answers one request, then ends: the kept connection is stale, and no new one can be opened.
    let gone = Arc::new(std::sync::OnceLock::<Arc<Upstream>>::new());
    let itself = gone.clone();
    let upstream = Upstream::start(move |_, mut wire: Wire, _| {
        let itself = itself.clone();
        async move {
            wire.reply("200 OK", "", b"{}").await;
            wire.stream.readable().await.unwrap();
            let itself = itself.get().unwrap();
            itself.stop();
            until("the refusal", || std::net::TcpStream::connect(itself.address).is_err()).await;
            None
        }
    })
    .await;
    let upstream = Arc::new(upstream);
    assert!(gone.set(upstream.clone()).is_ok());
    let proxy = Proxy::start(&[&upstream, &other], &["--balance", "round-robin"]).await;
    let mut statuses = Vec::new();
    for _ in 0..4 {
        statuses.push(proxy.post("/generate", BODY).await.status());
    }
    assert_eq!(statuses, [200; 4]);
    assert_eq!((upstream.requests().len(), other.requests().len()), (1, 3));
    assert_eq!(proxy.metric("tether_proxy_retries_total{reason=\"stale\"}"), 1.0);
    proxy.settled().await;
}

#[tokio::test]
async fn a_request_goes_where_the_fewest_tokens_are_in_flight() {
    let hold = |request: Message, mut wire: Wire, _| async move {
        if request.json()["hold"].is_null() {
            return answer(wire).await;
        }
        wire.gone().await;
        None
    };
    let (a, b) = (Upstream::start(hold).await, Upstream::start(hold).await);
    let dir = tempfile::tempdir().unwrap();
    // Token IDs are counted only where dumps are looked at; this makes the counts exact.
    let proxy =
        Proxy::start(&[&a, &b], &["--dump-dir", dir.path().to_str().unwrap(), "--dump-wait", "0s"]).await;
    let long = format!(r#"{{"hold":1,"capture":false,"input_ids":{:?}}}"#, vec![1; 1000]);
    let mut held = proxy.connect().await;
    held.send("/generate", "", long.as_bytes()).await;
    until("the long request", || a.requests().len() + b.requests().len() == 1).await;
    let (busy, free) = if a.requests().is_empty() { (&b, &a) } else { (&a, &b) };
    for _ in 0..5 {
        let body = r#"{"capture":false,"input_ids":[1,2,3]}"#;
        assert_eq!(proxy.post("/generate", body).await.status(), 200);
    }
    assert_eq!((busy.requests().len(), free.requests().len()), (1, 5));
    let series = format!("tether_proxy_upstream_tokens_in_flight{{upstream=\"http://{}\"}}", busy.address);
    assert_eq!(proxy.metric(&series), 1000.0);
    drop(held);
    proxy.settled().await;
}

#[tokio::test]
async fn an_upstream_that_dies_mid_stream_gives_no_clean_end() {
    let upstream = Upstream::start(|_, mut wire: Wire, _| async move {
        wire.stream_head().await;
        wire.write_chunk(b"data: 1\n\n").await;
        None
    })
    .await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    let reply = proxy.post("/generate", r#"{"text":"a","stream":true}"#).await;
    assert_eq!((reply.status(), reply.whole, reply.text().as_str()), (200, false, "data: 1\n\n"));
    proxy.settled().await;
    let aborted = "tether_proxy_requests_aborted_total{reason=\"upstream_died\",route=\"generate\"}";
    assert_eq!(proxy.metric(aborted), 1.0);
}

#[tokio::test]
async fn an_upstream_that_is_silent_is_given_up_after_the_set_time() {
    let upstream = Upstream::start(|request: Message, mut wire: Wire, _| async move {
        if request.text().contains("stream") {
            wire.stream_head().await;
            wire.write_chunk(b"data: 1\n\n").await;
        }
        wire.gone().await;
        None
    })
    .await;
    let proxy = Proxy::start(&[&upstream], &["--upstream-timeout", "300ms"]).await;
    let reply = proxy.post("/generate", BODY).await;
    assert_eq!(reply.status(), 504);
    assert!(reply.json()["error"]["message"].as_str().unwrap().contains("sent nothing"));
    let reply = proxy.post("/generate", r#"{"text":"stream"}"#).await;
    assert_eq!((reply.status(), reply.whole), (200, false));
    until("the upstream's release", || upstream.open.load(Ordering::SeqCst) == 0).await;
    proxy.settled().await;
    let aborted = "tether_proxy_requests_aborted_total{reason=\"upstream_silent\",route=\"generate\"}";
    assert_eq!(proxy.metric(aborted), 1.0);
}

#[tokio::test]
async fn a_slow_upstream_is_waited_for() {
    let upstream = Upstream::start(|_, wire, _| async move {
        tokio::time::sleep(std::time::Duration::from_secs(3)).await;
        answer(wire).await
    })
    .await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    assert_eq!(within("the reply", proxy.post("/generate", BODY)).await.status(), 200);
}
