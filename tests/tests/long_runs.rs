//! What must not grow with the number of requests.

use futures_util::{StreamExt, stream};
use serde_json::json;
use tether_dump::RequestId;
use tether_tests::{Checkpoint, Prompts, Server};

/// RT-01, RT-02 and RT-03, texts behind a cache among them: no graph kept for a gradient that nobody takes, no thread pool per caller, whatever the sizes.
#[tokio::test]
async fn neither_memory_nor_threads_grow_with_the_number_of_requests() {
    let checkpoint = Checkpoint::float32();
    let server = Server::of(&checkpoint).start().await;
    let (client, dumps) = (server.client(), server.dumps());
    let prompts: Vec<_> = [1, 400, 40, 150].map(|length| Prompts::new(1).of_length(length)).into();
    let serve = async |requests: usize| {
        let ask = |i: usize| {
            let (client, dumps, rid) = (&client, &dumps, RequestId::new());
            let body = json!({"rid": rid, "input_ids": prompts[i % 4], "sampling_params": {"max_new_tokens": if i.is_multiple_of(7) { 6 } else { 1 }, "temperature": 0}});
            async move {
                client.generate(&body).await.expect(200);
                std::fs::remove_file(dumps.path_of(rid)).expect("the dump is the client's to delete");
            }
        };
        stream::iter(0..requests).map(ask).buffer_unordered(16).for_each(|()| async {}).await;
        let process = server.process();
        (process.resident_bytes().expect("it runs"), process.threads().expect("it runs"))
    };
    // Pools and arenas fill first.
    let requests = if std::env::var_os("TETHER_CAMPAIGN").is_some() { 20_000 } else { 2_000 };
    let (bytes, threads) = serve(500).await;
    let (bytes_after, threads_after) = serve(requests).await;
    let megabytes = |bytes: u64| bytes >> 20;
    eprintln!("{} to {} MiB, {threads} to {threads_after} threads", megabytes(bytes), megabytes(bytes_after));
    assert!(bytes_after < bytes + bytes / 20, "{} to {} MiB", megabytes(bytes), megabytes(bytes_after));
    // A few come and go with file work; one per caller would be 16.
    assert!(threads_after <= threads + 4, "{threads} to {threads_after} threads");
}
