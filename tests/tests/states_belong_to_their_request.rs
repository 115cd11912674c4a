//! Whose states a dump holds: alone, in a crowd, in a batch, again and again.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use serde_json::{Value, json};
use tether_tests::{Checkpoint, Client, Dump, Prompts, Reply, Server, Stack, assert_same_states};
use tokio::sync::OnceCell;

async fn stack() -> &'static Stack {
    static STACK: OnceCell<(Checkpoint, Stack)> = OnceCell::const_new();
    let start = || async {
        let checkpoint = Checkpoint::float32();
        let stack = Stack::start(Server::of(&checkpoint)).await;
        (checkpoint, stack)
    };
    &STACK.get_or_init(start).await.1
}

fn request(prompt: &[i64], new_tokens: usize) -> Value {
    json!({"input_ids": prompt, "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0}})
}

/// The dump of a request that was answered, read where the reply's header says it is.
#[track_caller]
fn dump_of(reply: &Reply) -> Dump {
    let path = reply.header("x-hidden-states-path").expect("the proxy says where the dump is");
    let dump = Dump::read(path.as_ref());
    assert_eq!(dump.metadata.request_id, reply.id());
    dump
}

async fn solo(client: &Client, prompts: &[Vec<i64>]) -> Vec<Dump> {
    let mut dumps = Vec::new();
    for prompt in prompts {
        dumps.push(dump_of(&client.generate(&request(prompt, 0)).await.expect(200)));
    }
    dumps
}

/// HS-01.
#[tokio::test]
async fn prompts_sent_together_keep_their_own_states_on_every_repeat() {
    let client = stack().await.client();
    let mut prompts = Prompts::new(1);
    let prompts: Vec<_> = (0..8).map(|i| prompts.of_length([37, 48, 40, 40, 41, 44, 48, 37][i])).collect();
    let alone = solo(&client, &prompts).await;
    for _ in 0..20 {
        let requests: Vec<_> = prompts.iter().map(|prompt| request(prompt, 1)).collect();
        let replies = join_all(requests.iter().map(|body| client.generate(body))).await;
        for (reply, alone) in replies.into_iter().zip(&alone) {
            assert_same_states(&dump_of(&reply.expect(200)), alone);
        }
    }
}

/// HS-01, as one batch sent twice.
#[tokio::test]
async fn the_rows_of_a_batch_keep_their_own_states() {
    let stack = stack().await;
    let client = stack.client();
    let mut prompts = Prompts::new(2);
    let prompts: Vec<_> = (0..8).map(|_| prompts.mixed()).collect();
    let alone = solo(&client, &prompts).await;
    for _ in 0..2 {
        let body = json!({"input_ids": prompts, "sampling_params": {"max_new_tokens": 0, "temperature": 0}});
        let reply = client.generate(&body).await.expect(200);
        assert_eq!(reply.header("x-hidden-states-path"), None, "a batch has no one path");
        assert_eq!(reply.ids().into_iter().collect::<BTreeSet<_>>().len(), prompts.len());
        for ((answer, id), alone) in reply.answers().iter().zip(reply.ids()).zip(&alone) {
            let path =
                answer["meta_info"]["capture"]["path"].as_str().expect("each answer says where its dump is");
            assert_eq!(path, stack.dumps().path_of(id).to_str().expect("an ASCII path"));
            assert_same_states(&stack.dumps().read(id), alone);
        }
    }
}

#[tokio::test]
async fn a_batch_of_one_is_answered_with_a_list_of_one() {
    let stack = stack().await;
    let body = json!({"input_ids": [[5, 6, 7]], "sampling_params": {"max_new_tokens": 0, "temperature": 0}});
    let reply = stack.client().generate(&body).await.expect(200);
    assert!(reply.json().is_array());
    assert_eq!(stack.dumps().read(reply.id()).token_ids, [5, 6, 7]);
    // The call has a name of its own, recorded in the dump.
    let call = stack.dumps().read(reply.id()).metadata.call_id;
    assert_eq!(call.as_deref(), reply.header("x-request-id"));
    assert_ne!(call, Some(reply.id().to_string()));
}

/// HS-02.
#[tokio::test]
async fn sixteen_long_prompts_of_one_repeated_token_each_have_a_row_for_every_token() {
    let client = stack().await.client();
    let bodies: Vec<_> = (0..16).map(|i| request(&vec![40 + i; 1500], 0)).collect();
    let replies = join_all(bodies.iter().map(|body| client.generate(body))).await;
    for (i, reply) in (40..).zip(replies) {
        let dump = dump_of(&reply.expect(200));
        assert_eq!(dump.token_ids, vec![i; 1500]);
        for point in &dump.metadata.points {
            assert_eq!(dump.plane(*point).len(), 1500 * dump.hidden_size);
        }
    }
}

/// HS-05.
#[tokio::test]
async fn the_same_prompt_sent_three_times_gives_three_equal_dumps() {
    let client = stack().await.client();
    let prompt = Prompts::new(3).of_length(64);
    let dumps = solo(&client, &[prompt.clone(), prompt.clone(), prompt]).await;
    let ids: BTreeSet<_> = dumps.iter().map(|dump| dump.metadata.request_id).collect();
    assert_eq!(ids.len(), 3);
    assert_same_states(&dumps[1], &dumps[0]);
    assert_same_states(&dumps[2], &dumps[0]);
}

/// HS-07; its other half, a write that fails, is in `dumps_are_published_before_the_reply.rs`.
#[tokio::test]
async fn different_prompt_lengths_and_numbers_of_new_tokens_do_not_mix() {
    let client = stack().await.client();
    let mut prompts = Prompts::new(4);
    let prompts: Vec<_> = (0..32).map(|i| prompts.of_length(1 + i * 7)).collect();
    let alone = solo(&client, &prompts).await;
    let bodies: Vec<_> = prompts.iter().enumerate().map(|(i, prompt)| request(prompt, i % 7)).collect();
    let replies = join_all(bodies.iter().map(|body| client.generate(body))).await;
    for (i, (reply, alone)) in replies.into_iter().zip(&alone).enumerate() {
        let reply = reply.expect(200);
        assert_eq!(reply.output_ids().len(), i % 7);
        assert_same_states(&dump_of(&reply), alone);
    }
}

/// HS-13.
#[tokio::test]
async fn capturing_does_not_change_the_generated_tokens() {
    let client = stack().await.client();
    let mut prompts = Prompts::new(5);
    let prompts: Vec<_> = (0..50).map(|i| prompts.of_length(3 + i)).collect();
    let with = |capture: bool| {
        let client = &client;
        let ask = move |prompt: &Vec<i64>| {
            let mut body = request(prompt, 8);
            if !capture {
                body["capture"] = json!(false);
            }
            async move { client.generate(&body).await.expect(200).output_ids() }
        };
        join_all(prompts.iter().map(ask))
    };
    let (captured, plain) = (with(true).await, with(false).await);
    assert!(captured.iter().all(|tokens| tokens.len() == 8), "{captured:?}");
    assert_eq!(captured, plain);
    // A model that says the same to everything would prove nothing.
    assert!(captured.iter().collect::<BTreeSet<_>>().len() > 25, "{captured:?}");
}

#[tokio::test]
async fn text_is_tied_to_the_tokens_it_became() {
    let stack = stack().await;
    let body = json!({"text": "Grüße, 世界", "sampling_params": {"max_new_tokens": 1, "temperature": 0}});
    let reply = stack.client().generate(&body).await.expect(200);
    let dump = dump_of(&reply);
    // One token a byte, after <bos> and <eos>: see the test tokenizer.
    let expected: Vec<i64> = "Grüße, 世界".bytes().map(|byte| i64::from(byte) + 2).collect();
    assert_eq!(dump.token_ids, expected);
    assert_same_states(&dump, &solo(&stack.client(), &[expected]).await[0]);
}
