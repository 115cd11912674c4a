//! Streamed replies, through the proxy with its gate and directly.

use serde_json::{Value, json};
use tether_tests::{Checkpoint, Prompts, Reply, Server, Stack, eventually};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The events of a reply without the last one, which must be `[DONE]`.
fn events(reply: &Reply) -> Vec<Value> {
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.header("content-type"), Some("text/event-stream; charset=utf-8"));
    let text = reply.text();
    let mut events: Vec<&str> = text.strip_suffix("\n\n").expect("whole events").split("\n\n").collect();
    assert_eq!(events.pop(), Some("data: [DONE]"));
    let json = |event: &str| serde_json::from_str(event.strip_prefix("data: ").expect("data")).expect("JSON");
    events.into_iter().map(json).collect()
}

fn greedy(new_tokens: usize) -> Value {
    json!({"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": true})
}

#[tokio::test]
async fn a_stream_through_the_gate_says_what_the_whole_reply_says_and_has_its_dump() {
    let checkpoint = Checkpoint::float32();
    let stack = Stack::start(Server::of(&checkpoint)).await;
    for (text, capture) in [("Once upon a time, there", json!(true)), ("ä 世界", json!({"rows": "all"}))] {
        let mut body = json!({"text": text, "capture": capture, "sampling_params": greedy(24)});
        let whole = stack.client().generate(&body).await.expect(200).json();
        body["stream"] = json!(true);
        let reply = stack.client().generate(&body).await;
        let events = events(&reply);
        let last = events.last().expect("an event");
        for key in ["text", "output_ids"] {
            assert_eq!(last[key], whole[key], "{key}");
        }
        assert_eq!(last["meta_info"]["finish_reason"], whole["meta_info"]["finish_reason"]);
        // Each says all so far, and only the last that it is the end.
        let mut before = String::new();
        for event in &events {
            let text = event["text"].as_str().expect("a text");
            assert!(text.starts_with(&before), "{before:?} then {text:?}");
            before = text.to_owned();
        }
        let ends = events.iter().filter(|event| !event["meta_info"]["finish_reason"].is_null()).count();
        assert_eq!(ends, 1);
        let capture = &last["meta_info"]["capture"];
        let dump = tether_tests::Dump::read(capture["path"].as_str().expect("a path").as_ref());
        assert_eq!(dump.metadata.request_id.to_string(), reply.header("x-request-id").expect("an ID"));
        let rows = if body["capture"] == json!(true) { 0 } else { 23 };
        assert_eq!(
            dump.token_ids.len(),
            whole["meta_info"]["prompt_tokens"].as_u64().expect("a count") as usize + rows
        );
    }
    let scrape = tether_tests::Scrape::of(&stack.client()).await;
    assert_eq!(scrape.sum("tether_proxy_gate_total", &[("result", "matched")]), 4.0);
    assert_eq!(scrape.sum("tether_proxy_mismatches_total", &[]), 0.0);
}

#[tokio::test]
async fn the_head_of_a_stream_waits_for_the_dump_and_its_text_does_not() {
    let checkpoint = Checkpoint::float32();
    let server = Server::of(&checkpoint).with_faulty_disk().start().await;
    server.fault().hold();
    let body = json!({"input_ids": [5, 6, 7], "capture": true, "stream": true, "sampling_params": greedy(8)});
    let client = server.client();
    let task = tokio::spawn(async move { client.generate(&body).await });
    eventually("the dump is being written", || async { server.dumps().strangers().pop() }).await;
    let scrape = async || tether_tests::Scrape::of(&server.client()).await;
    eventually("the text is done", || async {
        (scrape().await.sum("tether_server_running", &[]) == 0.0).then_some(())
    })
    .await;
    assert!(!task.is_finished(), "nothing may be said before the dump is there");
    assert_eq!(server.dumps().ids().len(), 0);
    server.fault().none();
    let reply = task.await.expect("no panic");
    assert_eq!(events(&reply).last().expect("an event")["output_ids"].as_array().expect("a list").len(), 8);
    assert_eq!(server.dumps().ids().len(), 1);
    // A dump that cannot be written is a status, not an event.
    server.fault().disk_full();
    let body = json!({"input_ids": [5, 6, 7], "capture": true, "stream": true, "sampling_params": greedy(8)});
    let refused = server.client().generate(&body).await.expect(500);
    assert!(refused.error_text().contains("could not be written"), "{}", refused.text());
}

#[tokio::test]
async fn the_rows_of_a_streamed_batch_say_which_they_are() {
    let checkpoint = Checkpoint::float32();
    let stack = Stack::start(Server::of(&checkpoint)).await;
    let mut prompts = Prompts::new(3);
    let ids: Vec<Vec<i64>> = [3, 60, 17].map(|length| prompts.of_length(length)).into();
    let mut body = json!({"input_ids": ids, "sampling_params": greedy(9)});
    let whole = stack.client().generate(&body).await.expect(200);
    body["stream"] = json!(true);
    let reply = stack.client().generate(&body).await;
    let events = events(&reply);
    for (index, whole) in whole.answers().iter().enumerate() {
        let own: Vec<&Value> = events.iter().filter(|event| event["index"] == json!(index)).collect();
        assert_eq!(own.last().expect("an event")["output_ids"], whole["output_ids"]);
        let path = own.last().expect("an event")["meta_info"]["capture"]["path"]
            .as_str()
            .expect("a path")
            .to_owned();
        assert_eq!(tether_tests::Dump::read(path.as_ref()).token_ids, ids[index]);
    }
}

#[tokio::test]
async fn openais_chunks_add_up_to_the_whole_reply() {
    let checkpoint = Checkpoint::float32();
    let stack = Stack::start(Server::of(&checkpoint)).await;
    let client = stack.client();
    let body = json!({"prompt": "A streamed completion", "max_tokens": 20, "temperature": 0, "ignore_eos": true, "logprobs": 1});
    let whole = client.post("/v1/completions", &body).await.expect(200).json();
    let mut streamed = body.clone();
    (streamed["stream"], streamed["stream_options"]) = (json!(true), json!({"include_usage": true}));
    let reply = client.post("/v1/completions", &streamed).await;
    let mut events = events(&reply);
    let usage = events.pop().expect("the usage");
    assert_eq!((&usage["choices"], &usage["usage"]["completion_tokens"]), (&json!([]), &json!(20)));
    assert_eq!(usage["usage"]["prompt_tokens"], whole["usage"]["prompt_tokens"]);
    let text: String =
        events.iter().map(|event| event["choices"][0]["text"].as_str().expect("a text")).collect();
    assert_eq!(text, whole["choices"][0]["text"]);
    let tokens: Vec<Value> = events
        .iter()
        .flat_map(|event| event["choices"][0]["logprobs"]["tokens"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!(json!(tokens), whole["choices"][0]["logprobs"]["tokens"]);
    assert!(events.iter().all(|event| event["id"] == usage["id"]));
    // The client's library ends a choice at its finish_reason: there is one, in the last chunk.
    let reasons: Vec<&Value> = events
        .iter()
        .map(|event| &event["choices"][0]["finish_reason"])
        .filter(|reason| !reason.is_null())
        .collect();
    assert_eq!(reasons, [&json!("length")]);
}

#[tokio::test]
async fn a_stop_string_is_never_given_out_in_part() {
    let checkpoint = Checkpoint::float32();
    let server = Server::of(&checkpoint).start().await;
    let client = server.client();
    let ask = json!({"text": "Count", "sampling_params": greedy(30)});
    let text = client.generate(&ask).await.expect(200).json()["text"].as_str().expect("a text").to_owned();
    let chars: Vec<char> = text.chars().collect();
    let middle = chars.len() / 2;
    let stop: String = chars[middle..middle + 3].iter().collect();
    let mut ask = json!({"text": "Count", "stream": true, "sampling_params": greedy(30)});
    ask["sampling_params"]["stop"] = json!([stop]);
    let expected = &text[..text.find(&stop).expect("it is there")];
    let events = events(&client.generate(&ask).await);
    for event in &events {
        assert!(expected.starts_with(event["text"].as_str().expect("a text")), "{event} beyond {expected:?}");
    }
    assert_eq!(events.last().expect("an event")["text"], expected);
    assert_eq!(events.last().expect("an event")["meta_info"]["finish_reason"]["matched"], stop);
}

#[tokio::test]
async fn a_client_that_leaves_its_stream_ends_the_text_and_leaves_no_dump() {
    let checkpoint = Checkpoint::float32();
    let stack = Stack::start(Server::of(&checkpoint)).await;
    let body =
        json!({"input_ids": Prompts::new(4).of_length(40), "stream": true, "sampling_params": greedy(400)});
    let body = body.to_string();
    for _ in 0..6 {
        let address = stack.client().address();
        let mut stream = TcpStream::connect(address).await.expect("the proxy listens");
        let head = format!(
            "POST /generate HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(format!("{head}{body}").as_bytes()).await.expect("it is read");
        // It leaves with the first event in hand.
        let mut read = Vec::new();
        while !read.windows(7).any(|bytes| bytes == b"data: {") {
            assert!(stream.read_buf(&mut read).await.expect("a reply") > 0, "it ended");
        }
        assert!(read.starts_with(b"HTTP/1.1 200"));
    }
    eventually("nothing runs, and no dump is left", || async {
        let scrape = tether_tests::Scrape::of(&stack.direct()).await;
        let idle = scrape.sum("tether_server_running", &[]) == 0.0
            && scrape.sum("tether_server_requests_in_flight", &[]) == 0.0;
        (idle && stack.dumps().ids().is_empty()).then_some(())
    })
    .await;
    let scrape = tether_tests::Scrape::of(&stack.direct()).await;
    let generated = scrape.sum("tether_server_generated_tokens_total", &[]);
    assert!(generated < 6.0 * 400.0, "{generated} tokens: the texts went on to their ends");
}

#[tokio::test]
async fn an_aborted_stream_says_so_in_its_last_event() {
    let checkpoint = Checkpoint::float32();
    let stack = Stack::start(Server::of(&checkpoint)).await;
    let body = json!({"rid": "mine", "input_ids": Prompts::new(5).of_length(40), "stream": true, "sampling_params": greedy(400)});
    let client = stack.client();
    let task = tokio::spawn(async move { client.generate(&body).await });
    eventually("it runs", || async {
        let scrape = tether_tests::Scrape::of(&stack.direct()).await;
        (scrape.sum("tether_server_generated_tokens_total", &[]) > 3.0).then_some(())
    })
    .await;
    stack.client().post("/abort_request", &json!({"rid": "mine"})).await.expect(200);
    let reply = task.await.expect("no panic");
    let events = events(&reply);
    let last = events.last().expect("an event");
    assert_eq!(last["meta_info"]["finish_reason"]["type"], "abort");
    assert!(last["output_ids"].as_array().expect("a list").len() < 400);
    // The prompt's states were there before.
    assert_eq!(stack.dumps().ids().len(), 1);

    // With all rows there is no dump, the client hears why, and nobody is alarmed.
    let body = json!({"rid": "all", "input_ids": Prompts::new(5).of_length(40), "capture": {"rows": "all"}, "stream": true, "sampling_params": greedy(400)});
    let client = stack.client();
    let before =
        tether_tests::Scrape::of(&stack.direct()).await.sum("tether_server_generated_tokens_total", &[]);
    let task = tokio::spawn(async move { client.generate(&body).await });
    eventually("it runs", || async {
        let scrape = tether_tests::Scrape::of(&stack.direct()).await;
        (scrape.sum("tether_server_generated_tokens_total", &[]) > before + 3.0).then_some(())
    })
    .await;
    stack.client().post("/abort_request", &json!({"rid": "all"})).await.expect(200);
    let reply = task.await.expect("no panic");
    assert_eq!(self::events(&reply).last().expect("an event")["meta_info"]["finish_reason"]["type"], "abort");
    assert_eq!(stack.dumps().ids().len(), 1);
    let scrape = tether_tests::Scrape::of(&stack.client()).await;
    assert_eq!(scrape.sum("tether_proxy_mismatches_total", &[]), 0.0);
}
