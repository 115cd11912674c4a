use std::io::Write;

use flate2::Compression;
use flate2::write::{GzEncoder, ZlibEncoder};

use crate::support::{Message, Proxy, Upstream, Wire, within};

/// A body of `len` bytes, and without the ID, what reached the upstream.
async fn round_trip(proxy: &Proxy, upstream: &Upstream, len: usize) -> (Vec<u8>, Vec<u8>) {
    let mut body = b"{\"input_ids\":[".to_vec();
    while body.len() + 20 < len {
        body.extend_from_slice(b"123456,");
    }
    body.extend_from_slice(b"1],\"pad\":\"\"}");
    let pad = len - body.len();
    let at = body.len() - 2;
    body.splice(at..at, std::iter::repeat_n(b'x', pad));
    assert_eq!(proxy.post("/generate", &body).await.status(), 200);
    (body, without_id(&upstream.last()))
}

fn without_id(request: &Message) -> Vec<u8> {
    let inserted = format!("\"rid\":\"{}\",", request.header("x-request-id").unwrap());
    let at = memchr::memmem::find(&request.body, inserted.as_bytes()).unwrap();
    [&request.body[..at], &request.body[at + inserted.len()..]].concat()
}

#[tokio::test]
async fn long_prompts_pass_around_the_usual_default_limit_and_far_beyond() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    for len in [(2 << 20) - 1, 2 << 20, (2 << 20) + 1, 50 << 20] {
        let (sent, came) = round_trip(&proxy, &upstream, len).await;
        assert_eq!(sent.len(), len);
        assert!(sent == came, "a body of {len} bytes came changed");
        assert_eq!(upstream.last().all("content-length"), [upstream.last().body.len().to_string()]);
    }
    proxy.settled().await;
}

#[tokio::test]
async fn numbers_and_spelling_reach_the_upstream_as_they_were_written() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    let body = "{ \"z\" : 0.09144338512092887,\"a\":9007199254740991.0,\t\"n\":1.5777777777770001,\"e\":1E+2,\"s\":\"\\u00e9\\/\",\"text\":\"é\",\"big\":123456789012345678901234567890,\"sampling_params\":{\"seed\":1,\"rid\":\"x\"}}";
    proxy.post("/generate", body).await;
    assert_eq!(String::from_utf8(without_id(&upstream.last())).unwrap(), body);
    // Other paths are not touched at all.
    proxy.post("/v1/embeddings", "not json").await;
    assert_eq!(upstream.last().text(), "not json");
    let mut wire = proxy.connect().await;
    wire.write("PUT /generate?x=%20y HTTP/1.1\r\nhost: p\r\ncontent-length: 2\r\n\r\n{}").await;
    assert_eq!(wire.message().await.unwrap().status(), 200);
    assert_eq!(
        (upstream.last().start.as_str(), upstream.last().text().as_str()),
        ("PUT /generate?x=%20y HTTP/1.1", "{}")
    );
}

#[tokio::test]
async fn compressed_bodies_are_decoded_and_sent_plain() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &["--max-body", "1MiB"]).await;
    let text = format!("{{\"text\":\"{}\"}}", "x".repeat(100_000));
    let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
    gzip.write_all(text.as_bytes()).unwrap();
    let mut zlib = ZlibEncoder::new(Vec::new(), Compression::default());
    zlib.write_all(text.as_bytes()).unwrap();
    let gzip = gzip.finish().unwrap();
    for (encoding, body) in [
        ("gzip", gzip.clone()),
        ("deflate", zlib.finish().unwrap()),
        ("zstd", zstd::encode_all(text.as_bytes(), 3).unwrap()),
        ("identity", text.clone().into_bytes()),
    ] {
        let headers = format!("content-encoding: {encoding}\r\n");
        let reply = proxy.connect().await.post("/generate", &headers, &body).await;
        assert_eq!(reply.status(), 200, "{encoding}");
        assert_eq!(without_id(&upstream.last()), text.as_bytes());
        if encoding != "identity" {
            assert_eq!(upstream.last().header("content-encoding"), None);
        }
    }
    let count = upstream.requests().len();
    let mut bomb = GzEncoder::new(Vec::new(), Compression::default());
    bomb.write_all(&vec![b' '; 20 << 20]).unwrap();
    for (encoding, body, status) in [
        ("gzip", text.clone().into_bytes(), 400),
        ("gzip", bomb.finish().unwrap(), 413),
        ("br", text.clone().into_bytes(), 415),
        ("gzip, gzip", gzip.clone(), 415),
    ] {
        let headers = format!("content-encoding: {encoding}\r\n");
        let reply = proxy.connect().await.post("/generate", &headers, &body).await;
        assert_eq!(reply.status(), status, "{encoding}");
        assert!(reply.json()["error"]["message"].is_string());
    }
    assert_eq!(upstream.requests().len(), count);
    // On a path that is not tagged, the body is the upstream's to decode.
    proxy.connect().await.post("/other", "content-encoding: gzip\r\n", &gzip).await;
    assert_eq!(
        (upstream.last().body, upstream.requests().last().unwrap().header("content-encoding")),
        (gzip, Some("gzip"))
    );
    proxy.settled().await;
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_before_it_is_read() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &["--max-body", "1MB"]).await;
    let mut wire = proxy.connect().await;
    wire.write(
        "POST /generate HTTP/1.1\r\nhost: p\r\ncontent-length: 99999999999\r\nexpect: 100-continue\r\n\r\n",
    )
    .await;
    let head = within("the refusal", wire.head()).await.unwrap();
    assert_eq!(head.status(), 413);

    let mut wire = proxy.connect().await;
    wire.write("POST /generate HTTP/1.1\r\nhost: p\r\ntransfer-encoding: chunked\r\n\r\n").await;
    for _ in 0..11 {
        wire.write_chunk(&[b' '; 100_000]).await;
    }
    assert_eq!(within("the refusal", wire.message()).await.unwrap().status(), 413);
    assert!(upstream.requests().is_empty());
    proxy.settled().await;
}

#[tokio::test]
async fn bodies_that_do_not_fit_into_memory_together_are_refused_for_now() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &["--max-body", "1MB", "--body-memory", "1MB"]).await;
    let mut slow = proxy.connect().await;
    slow.write("POST /generate HTTP/1.1\r\nhost: p\r\ncontent-length: 900002\r\n\r\n").await;
    slow.write([b' '; 800_000]).await;
    crate::support::until("the first body", || proxy.metric("tether_proxy_body_memory_bytes") >= 800_000.0)
        .await;
    let reply = proxy.post("/generate", vec![b' '; 500_000]).await;
    assert_eq!((reply.status(), reply.header("retry-after")), (503, Some("1")));
    slow.write([b' '; 100_000]).await;
    slow.write("{}").await;
    assert_eq!(within("the reply", slow.message()).await.unwrap().status(), 200);
    proxy.settled().await;
}

#[tokio::test]
async fn a_client_that_asks_first_is_told_to_go_on() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    let mut wire = proxy.connect().await;
    wire.write("POST /generate HTTP/1.1\r\nhost: p\r\ncontent-length: 12\r\nexpect: 100-continue\r\n\r\n")
        .await;
    assert_eq!(within("the go-ahead", wire.head()).await.unwrap().status(), 100);
    wire.write(r#"{"text":"a"}"#).await;
    assert_eq!(within("the reply", wire.message()).await.unwrap().status(), 200);
    assert_eq!(upstream.last().header("expect"), None);
}

#[tokio::test]
async fn a_head_or_a_body_that_does_not_come_is_answered_and_an_idle_connection_is_kept() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &["--client-timeout", "300ms"]).await;
    let mut idle = proxy.connect().await;
    assert_eq!(idle.post("/generate", "", b"{\"text\":\"a\"}").await.status(), 200);

    let mut head = proxy.connect().await;
    head.write("POST /generate HTTP/1.1\r\nhost:").await;
    let reply = within("the end of patience", head.message()).await.unwrap();
    assert_eq!((reply.status(), reply.whole), (408, true));
    within("the close", head.gone()).await;

    let mut body = proxy.connect().await;
    body.write("POST /generate HTTP/1.1\r\nhost: p\r\ncontent-length: 100\r\n\r\n{").await;
    assert_eq!(within("the end of patience", body.message()).await.unwrap().status(), 408);

    // The idle one has been idle for longer than that.
    assert_eq!(idle.post("/generate", "", b"{\"text\":\"a\"}").await.status(), 200);
    proxy.settled().await;
}

#[tokio::test]
async fn chunked_bodies_are_sent_with_their_length() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &[]).await;
    let mut wire: Wire = proxy.connect().await;
    wire.write("POST /generate HTTP/1.1\r\nhost: p\r\nTransfer-Encoding: chunked\r\n\r\n").await;
    for part in [&b"{\"input"[..], b"_ids\":[1", b",2]}"] {
        wire.write_chunk(part).await;
    }
    wire.write("0\r\n\r\n").await;
    assert_eq!(within("the reply", wire.message()).await.unwrap().status(), 200);
    let request = upstream.last();
    assert_eq!(without_id(&request), b"{\"input_ids\":[1,2]}");
    assert_eq!(request.all("content-length"), [request.body.len().to_string()]);
    assert!(request.all("transfer-encoding").is_empty());
}
