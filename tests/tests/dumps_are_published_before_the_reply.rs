//! The order of dump and reply, and what happens when the disk is slow, full, or over its budget.

use std::fs;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream;
use serde_json::{Value, json};
use tether_dump::{DumpFile, RequestId};
use tether_tests::{
    Checkpoint, Departure, Dump, HangUp, Prompts, Reply, Scrape, Server, Signal, Stack, eventually,
    post_then_leave,
};

fn request(rid: RequestId, prompt: &[i64]) -> Value {
    json!({"rid": rid, "input_ids": prompt, "sampling_params": {"max_new_tokens": 0, "temperature": 0}})
}

/// Whether the long form of a test is wanted.
fn campaign() -> bool {
    std::env::var_os("TETHER_CAMPAIGN").is_some()
}

/// IO-01.
#[tokio::test]
async fn the_whole_dump_is_there_the_moment_the_reply_is() {
    let checkpoint = Checkpoint::float32();
    let server = Server::of(&checkpoint).start().await;
    let (client, dumps) = (server.client(), server.dumps());
    let total = if campaign() { 10_000 } else { 2_000 };
    let ask = |i: i64| {
        let (client, dumps) = (&client, &dumps);
        async move {
            let (rid, prompt) = (RequestId::new(), [2 + i % 600, 2 + i / 600]);
            let reply = client.generate(&request(rid, &prompt)).await.expect(200);
            let path = dumps.path_of(rid);
            let dump = DumpFile::open(&path).unwrap_or_else(|error| panic!("request {i}: {error}"));
            dump.verify().unwrap_or_else(|error| panic!("request {i}: {error}"));
            assert_eq!((reply.id(), &dump.head().token_ids[..]), (rid, &prompt[..]));
            fs::remove_file(path).expect("the dump is the client's to delete");
        }
    };
    stream::iter(0..total).map(ask).buffer_unordered(16).for_each(|()| async {}).await;
    assert!(dumps.ids().is_empty() && dumps.strangers().is_empty());
}

/// IO-02.
#[tokio::test]
async fn a_slow_disk_holds_replies_back_and_memory_stays_bounded() {
    let checkpoint = Checkpoint::float32();
    // Points that make dumps of 1500 tokens 3.5 MB each; 100 of them would be 350 MB if they piled up.
    let builder =
        Server::of(&checkpoint).flag("--capture-layers", "0,1,2,3,4,5,6,7").flag("--write-buffer", "16MiB");
    let server = builder.with_faulty_disk().start().await;
    let client = server.client();
    let mut prompts = Prompts::new(1);
    let prompts: Vec<_> = (0..100).map(|_| prompts.of_length(1500)).collect();
    // The step's own working memory first, so that what is measured afterwards is what piles up.
    let warm = prompts[..16].iter().map(|prompt| (RequestId::new(), prompt));
    join_all(warm.map(|(rid, prompt)| {
        let (client, body) = (client.clone(), request(rid, prompt));
        async move { client.generate(&body).await.expect(200) }
    }))
    .await;
    let before = server.process().resident_bytes().expect("it runs");

    // In the long form as long as in the case; either is slower than the model, which has to wait.
    server.fault().delay(if campaign() { 500 } else { 15 });
    let ask = |prompt: &Vec<i64>| {
        let (client, rid) = (client.clone(), RequestId::new());
        let (body, dumps) = (request(rid, prompt), server.dumps());
        async move {
            client.generate(&body).await.expect(200);
            // No reply without its file.
            let dump = dumps.read(rid);
            assert_eq!(dump.token_ids.len(), 1500);
            fs::remove_file(dumps.path_of(rid)).expect("the dump is the client's to delete");
        }
    };
    join_all(prompts.iter().map(ask)).await;
    let peak = server.process().peak_resident_bytes().expect("it runs");
    assert!(peak < before + (200 << 20), "memory grew from {} to {} MiB", before >> 20, peak >> 20);
    let stalled = Scrape::of(&client).await.sum("tether_server_write_stall_seconds_total", &[]);
    assert!(stalled > 0.0, "the writers kept up: the disk was not slow enough to show anything");
}

/// IO-02 for texts: states of prompts are with the writers and not with the jobs, so they stay bounded however long texts go on.
#[tokio::test]
async fn states_of_prompts_do_not_pile_up_behind_texts_that_go_on() {
    let checkpoint = Checkpoint::float32();
    let builder =
        Server::of(&checkpoint).flag("--capture-layers", "0,1,2,3,4,5,6,7").flag("--write-buffer", "16MiB");
    let server = builder.with_faulty_disk().start().await;
    let client = server.client();
    let mut prompts = Prompts::new(9);
    let prompts: Vec<_> = (0..48).map(|_| prompts.of_length(1500)).collect();
    let ask = async |prompt: &Vec<i64>, rows: &str, new_tokens: usize| {
        let rid = RequestId::new();
        let body = json!({"rid": rid, "input_ids": prompt, "capture": {"rows": rows},
                          "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": true}});
        client.generate(&body).await.expect(200);
        let dump = server.dumps().read(rid);
        let rows = if rows == "all" { new_tokens - 1 } else { 0 };
        assert_eq!(dump.token_ids.len(), 1500 + rows);
        fs::remove_file(server.dumps().path_of(rid)).expect("the dump is the client's to delete");
    };
    join_all(prompts[..16].iter().map(|prompt| ask(prompt, "prompt", 4))).await;
    let before = server.process().resident_bytes().expect("it runs");
    server.fault().delay(5);
    // 48 of 3.5 MB would be 170 MB; rows of texts are held to their end, and admitted within the buffer.
    join_all(
        prompts
            .iter()
            .enumerate()
            .map(|(i, prompt)| ask(prompt, if i % 4 == 0 { "all" } else { "prompt" }, 24)),
    )
    .await;
    let peak = server.process().peak_resident_bytes().expect("it runs");
    assert!(peak < before + (120 << 20), "memory grew from {} to {} MiB", before >> 20, peak >> 20);
}

/// IO-05.
#[tokio::test]
async fn a_client_that_leaves_the_queue_leaves_nothing_behind() {
    let checkpoint = Checkpoint::float32();
    let builder = Server::of(&checkpoint).flag("--max-batch-tokens", "64").flag("--write-buffer", "256KiB");
    let server = builder.with_faulty_disk().start().await;
    let (client, dumps) = (server.client(), server.dumps());
    // Nothing is written, so the writers and then the engine stand still, and what comes after waits in the queue.
    server.fault().hold();
    let mut prompts = Prompts::new(2);
    let staying: Vec<_> = (0..64).map(|_| (RequestId::new(), prompts.of_length(60))).collect();
    let answers = staying.iter().map(|(rid, prompt)| {
        let (client, body) = (client.clone(), request(*rid, prompt));
        tokio::spawn(async move { client.generate(&body).await.expect(200) })
    });
    let answers: Vec<_> = answers.collect();
    eventually("a dump is begun", || async { dumps.strangers().pop() }).await;
    let leaving: Vec<_> = (0..8).map(|_| (RequestId::new(), prompts.of_length(60))).collect();
    let left = leaving.iter().enumerate().map(|(i, (rid, prompt))| {
        let how = if i % 2 == 0 { Departure::Close } else { Departure::HalfClose };
        let (address, body) = (server.address(), request(*rid, prompt).to_string());
        async move { post_then_leave(address, "/generate", &body, Duration::from_millis(300), how).await }
    });
    // A server that waits for the departed would never answer the half closed ones: it holds all of them.
    for (end, (rid, _)) in join_all(left).await.into_iter().zip(&leaving) {
        assert!(matches!(end, HangUp::Left), "{rid} was answered");
    }
    assert_eq!(client.get("/health").await.status, 200);
    let aborted = eventually("the departed are noticed", || async {
        let gone = [("outcome", "client_gone")];
        let gone = Scrape::of(&client).await.sum("tether_server_request_seconds_count", &gone);
        (gone >= 8.0).then_some(gone)
    });
    assert_eq!(aborted.await, 8.0);
    server.fault().none();
    for answer in answers {
        answer.await.expect("no panic");
    }
    let expected = staying.iter().map(|(rid, _)| *rid).collect();
    assert_eq!((dumps.ids(), dumps.strangers()), (expected, vec![]));
}

/// HS-07, IO-24 in part.
#[tokio::test]
async fn a_dump_that_cannot_be_written_fails_its_request_and_leaves_nothing() {
    let checkpoint = Checkpoint::float32();
    let stack = Stack::start(Server::of(&checkpoint).with_faulty_disk()).await;
    let mut prompts = Prompts::new(3);
    stack.server.fault().disk_full();
    for client in [stack.client(), stack.direct()] {
        let reply = client.generate(&request(RequestId::new(), &prompts.of_length(30))).await;
        assert!(reply.status.is_server_error(), "{} {}", reply.status, reply.text());
        assert!(reply.error_text().contains("dump"), "{}", reply.text());
    }
    // A batch fails whole.
    let batch =
        json!({"input_ids": [[5, 6], [7]], "sampling_params": {"max_new_tokens": 0, "temperature": 0}});
    assert!(stack.client().generate(&batch).await.status.is_server_error());
    // Who wants no dump is not concerned.
    let body = json!({"input_ids": [5, 6], "capture": false, "sampling_params": {"max_new_tokens": 1, "temperature": 0}});
    stack.client().generate(&body).await.expect(200);
    assert!(stack.dumps().ids().is_empty() && stack.dumps().strangers().is_empty());

    stack.server.fault().none();
    let prompt = prompts.of_length(30);
    let reply = stack.client().generate(&request(RequestId::new(), &prompt)).await.expect(200);
    assert_eq!(stack.dumps().read(reply.id()).token_ids, prompt);
    assert_eq!(Scrape::of(&stack.client()).await.sum("tether_proxy_mismatches_total", &[]), 0.0);
}

/// HS-07: some writes fail in the midst of others, and each request has its own dump or its own error.
#[tokio::test]
async fn a_write_that_fails_among_others_fails_its_own_request_and_no_other() {
    let checkpoint = Checkpoint::float32();
    let stack = Stack::start(Server::of(&checkpoint).with_faulty_disk()).await;
    let mut prompts = Prompts::new(8);
    let prompts: Vec<_> = (0..64).map(|i| prompts.of_length(1 + i * 5)).collect();
    stack.server.fault().disk_full_every(11);
    let replies = join_all(prompts.iter().enumerate().map(|(i, prompt)| {
        let (client, mut body) = (stack.client(), request(RequestId::new(), prompt));
        body["sampling_params"]["max_new_tokens"] = json!(i % 5);
        async move { client.generate(&body).await }
    }))
    .await;
    let mut good = std::collections::BTreeSet::new();
    for (reply, prompt) in replies.iter().zip(&prompts) {
        match reply.status.as_u16() {
            200 => {
                assert_eq!(&stack.dumps().read(reply.id()).token_ids, prompt);
                good.insert(reply.id());
            }
            500 => assert!(reply.error_text().contains("could not be written"), "{}", reply.text()),
            other => panic!("{other}: {}", reply.text()),
        }
    }
    let failed = prompts.len() - good.len();
    assert!(failed > 2 && good.len() > 2, "{failed} of {} failed", prompts.len());
    eventually("nothing is left of those that failed", || async {
        (stack.dumps().ids() == good && stack.dumps().strangers().is_empty()).then_some(())
    })
    .await;
    assert_eq!(Scrape::of(&stack.client()).await.sum("tether_proxy_mismatches_total", &[]), 0.0);
}

#[tokio::test]
async fn a_spent_budget_is_503_until_a_dump_is_deleted_and_more_than_all_of_it_is_413() {
    let checkpoint = Checkpoint::float32();
    // A token takes 4 planes x 64 x 4 bytes and its ID: 1032 bytes.
    let builder = Server::of(&checkpoint).flag("--dump-budget", "100KiB").flag("--queue-timeout", "1s");
    let server = builder.start().await;
    let (client, dumps) = (server.client(), server.dumps());
    let prompt = Prompts::new(4).of_length(60);
    let first = RequestId::new();
    client.generate(&request(first, &prompt)).await.expect(200);
    let second = RequestId::new();
    let reply = client.generate(&request(second, &prompt)).await.expect(503);
    assert!(
        reply.header("retry-after").and_then(|value| value.parse::<u32>().ok()).is_some(),
        "{:?}",
        reply.headers
    );
    assert!(reply.text().contains("budget"), "{}", reply.text());
    // More than the whole budget will never fit.
    let reply =
        client.generate(&request(RequestId::new(), &Prompts::new(5).of_length(200))).await.expect(413);
    assert!(reply.error_text().contains("102400"), "{}", reply.text());
    // What fits, fits; and what wants no dump needs no budget.
    client.generate(&request(RequestId::new(), &[5, 6])).await.expect(200);
    let mut free = request(RequestId::new(), &prompt);
    free["capture"] = json!(false);
    client.generate(&free).await.expect(200);
    assert_eq!(dumps.ids().len(), 2);

    fs::remove_file(dumps.path_of(first)).expect("the dump is the client's to delete");
    let answered = eventually("there is room again", || async {
        Some(client.generate(&request(second, &prompt)).await).filter(|reply: &Reply| reply.status == 200)
    });
    assert_eq!(answered.await.id(), second);
    assert_eq!(dumps.read(second).token_ids, prompt);
}

#[tokio::test]
async fn with_fsync_dumps_are_the_same() {
    let checkpoint = Checkpoint::float32();
    let server = Server::of(&checkpoint).switch("--fsync").start().await;
    let mut prompts = Prompts::new(6);
    let client = server.client();
    let requests: Vec<_> = (0..16).map(|_| (RequestId::new(), prompts.mixed())).collect();
    join_all(requests.iter().map(|(rid, prompt)| {
        let (client, body) = (client.clone(), request(*rid, prompt));
        async move { client.generate(&body).await.expect(200) }
    }))
    .await;
    for (rid, prompt) in &requests {
        assert_eq!(&server.dumps().read(*rid).token_ids, prompt);
    }
    assert!(server.dumps().strangers().is_empty());
}

#[tokio::test]
async fn sigterm_lets_requests_end_and_their_dumps_be_finished() {
    let checkpoint = Checkpoint::float32();
    let server = Server::of(&checkpoint).flag("--writers", "4").with_faulty_disk().start().await;
    let (client, dumps) = (server.client(), server.dumps());
    server.fault().hold();
    let mut prompts = Prompts::new(7);
    let requests: Vec<_> = (0..4).map(|_| (RequestId::new(), prompts.of_length(50))).collect();
    let answers: Vec<_> = requests
        .iter()
        .map(|(rid, prompt)| {
            let (client, body) = (client.clone(), request(*rid, prompt));
            tokio::spawn(async move { client.generate(&body).await })
        })
        .collect();
    // All four have been computed.
    eventually("four dumps are begun", || async { (dumps.strangers().len() == 4).then_some(()) }).await;
    server.process().signal(Signal::Terminate);
    // From then on nobody new is let in: refused, or told to go elsewhere.
    eventually("new requests are refused", || async {
        // Without a dump: one that is let in just before must not wait for the disk.
        let body = json!({"input_ids": [5], "capture": false, "sampling_params": {"max_new_tokens": 0, "temperature": 0}});
        let body = http_body_util::Full::from(body.to_string());
        let newcomer = tether_tests::Client::new(server.address());
        let call =
            newcomer.request(http::Method::POST, "/generate").header("content-type", "application/json");
        match newcomer.try_send(call.body(body).expect("a plain request")).await {
            Ok(reply) => (reply.status == 503).then_some(()),
            Err(_) => Some(()),
        }
    })
    .await;
    assert!(server.process().exited().is_none(), "it does not wait for its requests");
    server.fault().none();
    for (answer, (rid, prompt)) in answers.into_iter().zip(&requests) {
        assert_eq!(answer.await.expect("no panic").expect(200).id(), *rid);
        assert_eq!(&dumps.read(*rid).token_ids, prompt);
    }
    let status = server.process().wait().await;
    assert_eq!(status.code(), Some(0));
    assert!(dumps.strangers().is_empty());
}

#[tokio::test]
async fn what_a_killed_server_was_writing_is_gone_after_its_restart() {
    let checkpoint = Checkpoint::float32();
    let stack = Stack::start(Server::of(&checkpoint).with_faulty_disk()).await;
    let client = stack.client();
    let prompt = Prompts::new(8).of_length(50);
    let kept = client.generate(&request(RequestId::new(), &prompt)).await.expect(200).id();
    stack.server.fault().hold();
    let lost = tokio::spawn({
        let (client, body) = (client.clone(), request(RequestId::new(), &prompt));
        async move { client.generate(&body).await }
    });
    eventually("its dump is begun", || async { stack.dumps().strangers().pop() }).await;
    stack.server.kill();
    assert_eq!(lost.await.expect("no panic").status, 502);
    assert_eq!(stack.dumps().strangers().len(), 1, "the killed server could not clean up");
    stack.server.fault().none();
    stack.server.start_again().await;
    assert!(stack.dumps().strangers().is_empty());
    assert_eq!(stack.dumps().ids().into_iter().collect::<Vec<_>>(), [kept]);
    // And the proxy finds it again.
    let answered = eventually("the proxy reaches the new server", || async {
        Some(client.generate(&request(RequestId::new(), &prompt)).await)
            .filter(|reply: &Reply| reply.status == 200)
    });
    let path = answered.await.header("x-hidden-states-path").expect("a path").to_owned();
    assert_eq!(Dump::read(path.as_ref()).token_ids, prompt);
}
