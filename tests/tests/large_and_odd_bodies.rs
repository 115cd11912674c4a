//! Bodies of every size through the proxy.

use serde_json::json;
use tether_dump::TokenHash;
use tether_tests::{Checkpoint, Prompts, Scrape, Server, Stack};

/// PX-01.
#[tokio::test]
async fn a_body_beyond_two_megabytes_is_served_like_any_other() {
    let checkpoint = Checkpoint::float32();
    let stack = Stack::start(Server::of(&checkpoint)).await;
    let client = stack.client();
    let prompt = Prompts::new(1).of_length(40);
    let body =
        json!({"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}).to_string();
    for size in [2_097_151, 2_097_152, 2_097_153, 50_000_000] {
        // White space is the part of JSON that means nothing: at the front, within, and at the end.
        let mut padded = " ".repeat(size / 4) + &body[..body.len() - 1];
        padded += &"\n".repeat(size / 4);
        padded.push('}');
        padded += &"\t".repeat(size - padded.len());
        assert_eq!(padded.len(), size);
        let reply = client.post_text("/generate", &padded).await.expect(200);
        assert_eq!(stack.dumps().read(reply.id()).token_ids, prompt, "{size}");
    }
    // 400,000 numbers, 2.8 MB: no limit on bodies stops them, but the model's context does, and says so.
    let ids: Vec<i64> = (0..400_000).map(|i| 100_000 % (100 + i % 500) + 2).collect();
    let error = client.generate(&json!({"input_ids": ids})).await.expect(400).error_text();
    assert!(error.contains("400000"), "{error}");
    assert_eq!(Scrape::of(&client).await.sum("tether_proxy_mismatches_total", &[]), 0.0);
}

#[tokio::test]
async fn a_body_beyond_the_limit_is_413_with_the_limit() {
    let checkpoint = Checkpoint::float32();
    let server = Server::of(&checkpoint).start().await;
    let flags = ["--max-body", "1MB", "--body-memory", "4MB"];
    let proxy = tether_tests::Proxy::start(server.address(), server.dumps().path(), &flags).await;
    let body = |size: usize| {
        let body = json!({"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 0, "temperature": 0}})
            .to_string();
        format!("{body}{}", " ".repeat(size - body.len()))
    };
    proxy.client().post_text("/generate", &body(1_000_000)).await.expect(200);
    let reply = proxy.client().post_text("/generate", &body(1_000_001)).await.expect(413);
    assert!(reply.text().contains("1MB") || reply.text().contains("1000000"), "{}", reply.text());
    proxy.client().post_text("/generate", &body(200)).await.expect(200);
}

#[tokio::test]
async fn the_body_is_forwarded_as_it_was_written() {
    let checkpoint = Checkpoint::float32();
    let stack = Stack::start(Server::of(&checkpoint)).await;
    let client = stack.client();
    // Keys of others, numbers that a parser would change, a nested `rid`, escapes and duplicate keys further down.
    let body = concat!(
        "{ \"x\\u0079\" : [1e400, 9007199254740991.0, 0.09144338512092887, 123456789012345678901234567890],\r\n",
        "\"meta\":{\"rid\":\"inner\",\"rid\":\"\\ud83d\\ude00\"},\t\"input_ids\":[ 5,6 ,7],",
        "\"sampling_params\" : {\"max_new_tokens\":0}} "
    );
    let reply = client.post_text("/generate", body).await.expect(200);
    let dump = stack.dumps().read(reply.id());
    assert_eq!((dump.token_ids, dump.metadata.client_rid), (vec![5, 6, 7], None));
    assert_eq!(dump.metadata.token_hash, TokenHash::of(&[5, 6, 7]));
}
