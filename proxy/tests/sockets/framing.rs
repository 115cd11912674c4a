use crate::support::{Proxy, Upstream, within};

#[tokio::test]
async fn every_message_has_exactly_one_framing_header() {
    let upstream = Upstream::start(|request, mut wire, _| async move {
        if request.text().contains("stream") {
            wire.stream_head().await;
            wire.write_chunk(b"data: 1\n\n").await;
            wire.write("0\r\n\r\n").await;
        } else {
            wire.reply("200 OK", "", b"{\"text\": \"ok\"}").await;
        }
        Some(wire)
    })
    .await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    for body in [r#"{"text":"a"}"#, r#"{"text":"a","stream":true}"#] {
        let reply = proxy.post("/generate", body).await;
        let framing = |message: &crate::support::Message| {
            (message.all("content-length").len(), message.all("transfer-encoding").len())
        };
        assert_eq!(framing(&upstream.last()), (1, 0));
        assert_eq!(upstream.last().header("content-length"), Some(&*upstream.last().body.len().to_string()));
        assert!(matches!(framing(&reply), (1, 0) | (0, 1)), "{reply:?}");
        assert!(reply.whole);
    }
    // Without a body there is nothing to frame.
    assert_eq!(proxy.get("/v1/models").await.status(), 200);
    assert!(
        upstream.last().all("content-length").is_empty()
            && upstream.last().all("transfer-encoding").is_empty()
    );
    let head = proxy.request("POST", "/flush_cache").await;
    assert_eq!(head.status(), 200);
}

#[tokio::test]
async fn only_what_is_for_one_hop_stops_here_in_both_directions() {
    let upstream = Upstream::start(|_, mut wire, _| async move {
        let headers = "set-cookie: a=1\r\nset-cookie: b=2\r\nx-hop: secret\r\nkeep-alive: timeout=7\r\n\
                       connection: keep-alive, X-Hop\r\nproxy-authenticate: Basic\r\nx-end: 1\r\n";
        wire.reply("201 Created", headers, b"{}").await;
        Some(wire)
    })
    .await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    let headers = "connection: keep-alive, x-mine\r\nx-mine: 1\r\nte: trailers\r\nproxy-authorization: Basic x\r\n\
                   authorization: Bearer key\r\nx-custom: 2\r\nupgrade: websocket\r\n";
    let reply = proxy.connect().await.post("/generate", headers, br#"{"text":"a"}"#).await;
    let request = upstream.last();
    for name in ["connection", "x-mine", "te", "proxy-authorization", "upgrade", "keep-alive"] {
        assert_eq!(request.header(name), None, "{name}");
    }
    assert_eq!(
        (request.header("authorization"), request.header("x-custom")),
        (Some("Bearer key"), Some("2"))
    );
    assert_eq!(request.header("host"), Some(&*upstream.address.to_string()));
    assert_eq!((reply.status(), reply.header("x-end")), (201, Some("1")));
    assert_eq!(reply.all("set-cookie"), ["a=1", "b=2"]);
    for name in ["x-hop", "keep-alive", "proxy-authenticate"] {
        assert_eq!(reply.header(name), None, "{name}");
    }
}

#[tokio::test]
async fn ambiguous_framing_is_never_passed_on() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    let smuggled = "GET /smuggled HTTP/1.1\r\nhost: p\r\n\r\n";
    for head in [
        "content-length: 5\r\ncontent-length: 6\r\n",
        "content-length: +5\r\n",
        "content-length: 5, 6\r\n",
        "transfer-encoding: gzip, identity\r\n",
        "transfer-encoding : chunked\r\n",
        "content-length: 4\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: chunked\r\ncontent-length: 4\r\n",
    ] {
        let mut wire = proxy.connect().await;
        wire.write(format!("POST /v1/x HTTP/1.1\r\nhost: p\r\n{head}\r\n0\r\n\r\n{smuggled}")).await;
        within("the end", wire.gone()).await;
    }
    assert!(upstream.requests().iter().all(|request| !request.start.contains("smuggled")));
    // The two forms with both headers are read as chunked, and sent on as one empty body.
    for request in upstream.requests() {
        assert_eq!((request.body.len(), request.all("transfer-encoding").len()), (0, 0), "{request:?}");
    }
    proxy.settled().await;
}

#[tokio::test]
async fn heads_are_accepted_up_to_a_limit_and_refused_beyond() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    for (len, status) in [(4 << 10, 200), (8 << 10, 200), (16 << 10, 200), (48 << 10, 200), (80 << 10, 431)] {
        let headers = format!("x-long: {}\r\n", "x".repeat(len));
        let reply = proxy.connect().await.post("/generate", &headers, br#"{"text":"a"}"#).await;
        assert_eq!(reply.status(), status, "{len}");
    }
    let many: String = (0..200).map(|i| format!("x-{i}: {i}\r\n")).collect();
    assert_eq!(proxy.connect().await.post("/generate", &many, br#"{"text":"a"}"#).await.status(), 200);
    assert_eq!(upstream.last().header("x-199"), Some("199"));
}

#[tokio::test]
async fn old_clients_and_heads_are_served() {
    let upstream = Upstream::start(|request, mut wire, _| async move {
        let body = if request.start.starts_with("HEAD") { &b""[..] } else { b"{}" };
        let head = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n";
        wire.write([head.as_bytes(), body].concat()).await;
        Some(wire)
    })
    .await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    let mut wire = proxy.connect().await;
    wire.write("POST /generate HTTP/1.0\r\ncontent-length: 12\r\n\r\n{\"text\":\"a\"}").await;
    let reply = within("the reply", wire.message()).await.unwrap();
    assert_eq!((reply.status(), reply.text().as_str()), (200, "{}"));
    within("the close", wire.gone()).await;

    let mut wire = proxy.connect().await;
    wire.write("HEAD /v1/models HTTP/1.1\r\nhost: p\r\n\r\n").await;
    let head = within("the head", wire.head()).await.unwrap();
    assert_eq!((head.status(), head.header("content-length")), (200, Some("2")));
    // The connection is still in step.
    assert_eq!(wire.post("/generate", "", br#"{"text":"a"}"#).await.text(), "{}");
    proxy.settled().await;
}

#[tokio::test]
async fn a_stream_passes_byte_by_byte_and_the_first_is_not_held_back() {
    let text = "data:é\r\n\r\ndata: {\"a\": \"ü\"}\n\n: comment\n\ndata: [DONE]\n\n";
    let (go, wait) = tokio::sync::watch::channel(false);
    let upstream = Upstream::start(move |_, mut wire, _| {
        let mut wait = wait.clone();
        async move {
            wire.stream_head().await;
            for (index, byte) in text.bytes().enumerate() {
                wire.write_chunk(&[byte]).await;
                if index == 0 {
                    wait.wait_for(|go| *go).await.unwrap();
                }
            }
            wire.write("0\r\n\r\n").await;
            Some(wire)
        }
    })
    .await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    let mut wire = proxy.connect().await;
    wire.send("/generate", "", br#"{"text":"a","stream":true}"#).await;
    let head = within("the head", wire.head()).await.unwrap();
    assert_eq!(
        (head.header("x-accel-buffering"), head.header("cache-control")),
        (Some("no"), Some("no-cache"))
    );
    // The upstream goes on only once the first byte has come through.
    let mut came = within("the first byte", wire.chunk()).await.unwrap();
    assert_eq!(came, b"d");
    go.send(true).unwrap();
    loop {
        match within("more", wire.chunk()).await.expect("the stream was cut") {
            chunk if chunk.is_empty() => break,
            chunk => came.extend(chunk),
        }
    }
    assert_eq!(String::from_utf8(came).unwrap(), text);
    proxy.settled().await;
}

#[tokio::test]
async fn the_upstreams_status_and_type_reach_a_client_that_asked_for_a_stream() {
    let upstream = Upstream::start(|_, mut wire, _| async move {
        wire.reply(
            "503 Service Unavailable",
            "content-type: application/json\r\nretry-after: 7\r\n",
            b"{\"e\":1}",
        )
        .await;
        Some(wire)
    })
    .await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    let reply = proxy.post("/generate", r#"{"text":"a","stream":true}"#).await;
    assert_eq!((reply.status(), reply.text().as_str()), (503, "{\"e\":1}"));
    assert_eq!(
        (reply.header("content-type"), reply.header("retry-after")),
        (Some("application/json"), Some("7"))
    );
    assert_eq!(upstream.requests().len(), 1);
}
