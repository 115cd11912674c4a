use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use crate::support::{Message, Proxy, Upstream, until};

const BODY: &str = r#"{"input_ids":[1,2,3]}"#;

/// An upstream that answers `/health` with one status and all else with another, and the two to be set.
async fn upstream() -> (Upstream, Arc<AtomicU16>, Arc<AtomicU16>) {
    let (health, answer) = (Arc::new(AtomicU16::new(200)), Arc::new(AtomicU16::new(200)));
    let statuses = (health.clone(), answer.clone());
    let upstream = Upstream::start(move |request: Message, mut wire, _| {
        let is_check = request.start.starts_with("GET /health ");
        let status = if is_check { &statuses.0 } else { &statuses.1 }.load(Ordering::SeqCst);
        async move {
            wire.reply(&format!("{status} Set"), "", b"{}").await;
            Some(wire)
        }
    })
    .await;
    (upstream, health, answer)
}

fn up(proxy: &Proxy, upstream: &Upstream) -> bool {
    let series = format!("tether_proxy_upstream_up{{upstream=\"http://{}\"}}", upstream.address);
    proxy.metric(&series) == 1.0
}

#[tokio::test]
async fn an_upstream_that_fails_its_health_checks_gets_nothing_until_it_passes_them() {
    let (sick, health, _) = upstream().await;
    let (well, well_health, _) = upstream().await;
    let proxy = Proxy::start(&[&sick, &well], &["--health-interval", "10ms"]).await;
    health.store(500, Ordering::SeqCst);
    until("the upstream is out", || !up(&proxy, &sick)).await;
    for _ in 0..6 {
        assert_eq!(proxy.post("/generate", BODY).await.status(), 200);
    }
    let posts = |upstream: &Upstream| {
        upstream.requests().iter().filter(|request| request.start.starts_with("POST")).count()
    };
    assert_eq!((posts(&sick), posts(&well)), (0, 6));
    well_health.store(500, Ordering::SeqCst);
    until("both are out", || !up(&proxy, &well)).await;
    let reply = proxy.post("/generate", BODY).await;
    assert_eq!((reply.status(), reply.header("retry-after")), (503, Some("1")));
    assert_eq!(reply.json()["error"]["type"], "no_upstream");
    assert_eq!(reply.json()["error"]["request_id"], reply.header("x-request-id").unwrap());
    assert_eq!((posts(&sick), posts(&well)), (0, 6));
    health.store(200, Ordering::SeqCst);
    until("the upstream is back", || up(&proxy, &sick)).await;
    assert_eq!(proxy.post("/generate", BODY).await.status(), 200);
    assert_eq!(posts(&sick), 1);
    // Health checks are not traffic.
    let requests = format!(
        "tether_proxy_upstream_requests_total{{outcome=\"replied\",upstream=\"http://{}\"}}",
        sick.address
    );
    assert_eq!(proxy.metric(&requests), 1.0);
    proxy.settled().await;
}

#[tokio::test]
async fn bad_clients_and_a_busy_server_never_open_the_breaker() {
    let (upstream, _, answer) = upstream().await;
    let proxy = Proxy::start(&[&upstream], &["--breaker-failures", "3"]).await;
    let mut client = proxy.connect().await;
    for status in [400, 422, 429, 503] {
        answer.store(status, Ordering::SeqCst);
        for _ in 0..25 {
            assert_eq!(client.post("/generate", "", BODY.as_bytes()).await.status(), status);
        }
    }
    answer.store(200, Ordering::SeqCst);
    assert_eq!(client.post("/generate", "", BODY.as_bytes()).await.status(), 200);
    assert!(up(&proxy, &upstream));
    proxy.settled().await;
}

#[tokio::test]
async fn an_upstream_that_keeps_failing_is_spared_and_comes_back_by_a_trial() {
    let (upstream, _, answer) = upstream().await;
    let flags = ["--breaker-failures", "3", "--breaker-open", "300ms"];
    let proxy = Proxy::start(&[&upstream], &flags).await;
    answer.store(500, Ordering::SeqCst);
    for _ in 0..3 {
        assert_eq!(proxy.post("/generate", BODY).await.status(), 500);
    }
    assert!(!up(&proxy, &upstream));
    // What comes meanwhile is turned away, but for one request each time, which is sent once.
    let mut turned_away = 0;
    while upstream.requests().len() < 5 {
        let before = upstream.requests().len();
        match proxy.post("/generate", BODY).await.status() {
            503 => {
                turned_away += 1;
                assert_eq!(upstream.requests().len(), before);
            }
            status => assert_eq!((status, upstream.requests().len()), (500, before + 1)),
        }
    }
    assert!(turned_away > 0);
    answer.store(200, Ordering::SeqCst);
    while proxy.post("/generate", BODY).await.status() == 503 {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert!(up(&proxy, &upstream));
    assert_eq!(proxy.post("/generate", BODY).await.status(), 200);
    let opened =
        format!("tether_proxy_upstream_breaker_opened_total{{upstream=\"http://{}\"}}", upstream.address);
    assert_eq!(proxy.metric(&opened), 1.0);
    proxy.settled().await;
}
