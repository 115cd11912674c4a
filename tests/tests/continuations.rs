//! What the server generates, and what it says about it.

use serde_json::{Value, json};
use tether_dump::{CapturePoint, RequestId};
use tether_tests::{Checkpoint, Client, Head, Prompts, Server};
use tokio::sync::OnceCell;

struct Setting {
    checkpoint: Checkpoint,
    server: Server,
}

async fn setting() -> &'static Setting {
    static SETTING: OnceCell<Setting> = OnceCell::const_new();
    let start = || async {
        let checkpoint = Checkpoint::float32();
        let server = Server::of(&checkpoint).start().await;
        Setting { checkpoint, server }
    };
    SETTING.get_or_init(start).await
}

async fn ask(client: &Client, mut body: Value) -> Value {
    if body.get("rid").is_none() {
        body["capture"] = json!(false);
    }
    client.generate(&body).await.expect(200).json()
}

fn tokens(element: &Value) -> Vec<i64> {
    element["output_ids"].as_array().expect("a list").iter().map(|id| id.as_i64().expect("an ID")).collect()
}

#[tokio::test]
async fn a_stop_string_ends_the_text_where_it_is_complete_and_the_dump_ends_there_too() {
    let setting = setting().await;
    let client = setting.server.client();
    let mut prompts = Prompts::new(31);
    let body = |prompt: &[i64], more: Value| {
        let mut sampling = json!({"max_new_tokens": 24, "temperature": 0});
        sampling.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        json!({"input_ids": prompt, "sampling_params": sampling})
    };
    // The tokenizer is one of bytes and the model is random: a text with two characters in a row is looked for. They are
    // two tokens.
    let (prompt, whole, text, stop) = loop {
        let prompt = prompts.of_length(20);
        let whole = ask(&client, body(&prompt, json!({}))).await;
        let text = whole["text"].as_str().expect("a text").to_owned();
        let characters: Vec<char> = text.chars().skip(3).collect();
        let pair = characters.windows(2).find(|pair| pair.iter().all(char::is_ascii));
        if let Some(pair) = pair {
            let stop: String = pair.iter().collect();
            break (prompt, whole, text, stop);
        }
    };
    let body = |more: Value| body(&prompt, more);
    assert_eq!(tokens(&whole).len(), 24);
    let end = text.find(&stop).expect("it is in the text");

    let stopped = ask(&client, body(json!({"stop": ["never there", stop]}))).await;
    assert_eq!(stopped["text"], text[..end]);
    assert_eq!(stopped["meta_info"]["finish_reason"], json!({"type": "stop", "matched": stop}));
    let ids = tokens(&stopped);
    assert!(ids.len() < 24 && tokens(&whole).starts_with(&ids));
    let kept = ask(&client, body(json!({"stop": stop, "no_stop_trim": true}))).await;
    assert!(kept["text"].as_str().expect("a text").contains(&stop));
    assert_eq!(tokens(&kept), ids);

    // The rows of the dump are those of the prompt and of what was run again of the text: all tokens but the last.
    let rid = RequestId::new();
    let mut captured = body(json!({"stop": stop}));
    captured["rid"] = json!(rid);
    captured["capture"] = json!({"rows": "all"});
    assert_eq!(tokens(&ask(&client, captured).await), ids, "a capture changes no token");
    let dump = setting.server.dumps().read(rid);
    assert_eq!(dump.token_ids, [&prompt[..], &ids[..ids.len() - 1]].concat());

    let token = tokens(&whole)[7];
    let by_token = ask(&client, body(json!({"stop_token_ids": [token]}))).await;
    assert_eq!(by_token["meta_info"]["finish_reason"], json!({"type": "stop", "matched": token}));
    let first = tokens(&whole).iter().position(|id| *id == token).expect("it is among them");
    assert_eq!(tokens(&by_token), tokens(&whole)[..=first]);
}

#[tokio::test]
async fn samples_of_a_prompt_are_a_list_with_one_dump_and_a_seed_repeats_them() {
    let setting = setting().await;
    let client = setting.server.client();
    let prompt = Prompts::new(32).of_length(9);
    let rid = RequestId::new();
    let body = |rid: Option<RequestId>, seed: i64| {
        let sampling = json!({"max_new_tokens": 12, "temperature": 1.0, "n": 3, "sampling_seed": seed});
        let mut body = json!({"input_ids": prompt, "sampling_params": sampling});
        if let Some(rid) = rid {
            body["rid"] = json!(rid);
        }
        body
    };
    let samples = ask(&client, body(Some(rid), 7)).await;
    let all = samples.as_array().expect("a list");
    let ids: Vec<&Value> = all.iter().map(|sample| &sample["meta_info"]["id"]).collect();
    assert_eq!(ids, [0, 1, 2].map(|k| json!(format!("{rid}_{k}"))).iter().collect::<Vec<_>>());
    let captured: Vec<bool> = all.iter().map(|sample| sample["meta_info"]["capture"].is_object()).collect();
    assert_eq!(captured, [true, false, false]);
    assert_eq!(setting.server.dumps().read(rid).token_ids, prompt);
    let texts: Vec<Vec<i64>> = all.iter().map(tokens).collect();
    assert!(texts[0] != texts[1] && texts[1] != texts[2], "samples differ: {texts:?}");
    let again = ask(&client, body(None, 7)).await;
    assert_eq!(again.as_array().expect("a list").iter().map(tokens).collect::<Vec<_>>(), texts);
    let other = ask(&client, body(None, 8)).await;
    assert_ne!(other.as_array().expect("a list").iter().map(tokens).collect::<Vec<_>>(), texts);
    let batch = json!({"input_ids": [prompt, [5, 6]], "sampling_params": {"max_new_tokens": 1, "n": 2}});
    assert_eq!(ask(&client, batch).await.as_array().expect("a list").len(), 4);
}

/// From the dumped final states and the output head, in float64.
#[tokio::test]
async fn log_probabilities_are_those_of_the_states_that_were_dumped() {
    let setting = setting().await;
    let client = setting.server.client();
    let head = Head::of(&setting.checkpoint);
    let prompt = Prompts::new(33).of_length(18);
    let rid = RequestId::new();
    let asked = [17, 3];
    let reply = ask(
        &client,
        json!({
            "rid": rid, "input_ids": prompt, "sampling_params": {"max_new_tokens": 5, "temperature": 0},
            "capture": {"rows": "all", "points": [1], "final": "post_norm"}, "return_logprob": true,
            "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": asked,
        }),
    )
    .await;
    let dump = setting.server.dumps().read(rid);
    let rows = dump.plane(CapturePoint::FinalNorm);
    let width = rows.len() / dump.token_ids.len();
    let expected: Vec<Vec<f64>> = rows.chunks_exact(width).map(|row| head.log_probabilities(row)).collect();
    let near = |found: &Value, row: usize, token: i64| {
        let (value, id) = (found[0].as_f64().expect("a number"), found[1].as_i64().expect("an ID"));
        let expected = expected[row][usize::try_from(token).expect("an ID")];
        assert_eq!(id, token);
        assert!((value - expected).abs() < 1e-3, "row {row}, token {token}: {value} for {expected}");
    };
    let meta = &reply["meta_info"];
    let list = |key: &str| meta[key].as_array().unwrap_or_else(|| panic!("{key}")).clone();
    let (input, output) = (list("input_token_logprobs"), list("output_token_logprobs"));
    assert_eq!((input.len(), output.len()), (prompt.len(), 5));
    assert_eq!(input[0], json!([null, prompt[0], null]));
    for (row, found) in input[1..].iter().enumerate() {
        near(found, row, prompt[row + 1]);
    }
    let generated = tokens(&reply);
    for (at, found) in output.iter().enumerate() {
        near(found, prompt.len() - 1 + at, generated[at]);
    }
    let (input_top, output_top) = (list("input_top_logprobs"), list("output_top_logprobs"));
    assert_eq!(input_top[0], Value::Null);
    for (row, pairs) in input_top[1..].iter().chain(&output_top).enumerate() {
        let best = head.token(&rows[row * width..][..width]);
        assert_eq!(pairs.as_array().expect("a list").len(), 2);
        near(&pairs[0], row, best);
        assert!(pairs[0][0].as_f64() >= pairs[1][0].as_f64());
    }
    let (input_ids, output_ids) = (list("input_token_ids_logprobs"), list("output_token_ids_logprobs"));
    for (row, pairs) in input_ids[1..].iter().chain(&output_ids).enumerate() {
        for (found, token) in pairs.as_array().expect("a list").iter().zip(asked) {
            near(found, row, token);
        }
    }
    assert_eq!(meta["output_token_logprobs_length"], 5);

    // From a position on, the first without a value; only outputs by default; texts on request.
    let part = json!({"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                      "return_logprob": true, "logprob_start_len": 15, "return_text_in_logprobs": true});
    let part = ask(&client, part).await;
    let input = part["meta_info"]["input_token_logprobs"].as_array().expect("a list").clone();
    assert_eq!((input.len(), &input[0][0]), (3, &Value::Null));
    near(&input[1], 15, prompt[16]);
    near(&input[2], 16, prompt[17]);
    assert!(input[0][2].is_string());
    let plain = json!({"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0}, "return_logprob": true});
    let plain = ask(&client, plain).await;
    assert_eq!(plain["meta_info"]["input_token_logprobs"], json!([]));
    let repeated = json!({"input_ids": prompt, "sampling_params": {"max_new_tokens": 0}, "return_prompt_token_ids": true});
    assert_eq!(ask(&client, repeated).await["prompt_token_ids"], json!(prompt));
}

#[tokio::test]
async fn greedy_texts_are_the_same_alone_and_beside_others() {
    let setting = setting().await;
    let mut prompts = Prompts::new(34);
    let prompts: Vec<Vec<i64>> = (0..12).map(|row| prompts.of_length(3 + 17 * row)).collect();
    let body = |prompt: &[i64]| json!({"input_ids": prompt, "sampling_params": {"max_new_tokens": 20, "temperature": 0}});
    let mut alone = Vec::new();
    for prompt in &prompts {
        alone.push(tokens(&ask(&setting.server.client(), body(prompt)).await));
    }
    let together =
        prompts.iter().map(|prompt| async { tokens(&ask(&setting.server.client(), body(prompt)).await) });
    assert_eq!(futures_util::future::join_all(together).await, alone);
}

#[tokio::test]
async fn what_cannot_be_continued_as_asked_is_refused_by_name() {
    let setting = setting().await;
    let client = setting.server.client();
    for (body, parts) in [
        (
            json!({"rid": RequestId::new(), "input_ids": [5], "capture": {"rows": "all"}, "sampling_params": {"n": 2, "max_new_tokens": 2}}),
            ["`sampling_params.n` is 2", "`capture.rows` is all"],
        ),
        (
            json!({"input_ids": [5], "return_logprob": true, "token_ids_logprob": [1_000_000], "sampling_params": {"max_new_tokens": 1}}),
            ["`token_ids_logprob` has 1000000", "token IDs from 0"],
        ),
        (
            json!({"input_ids": [5], "return_logprob": true, "logprob_start_len": 9, "sampling_params": {"max_new_tokens": 1}}),
            ["`logprob_start_len` is 9", "has 1 tokens"],
        ),
        (
            json!({"input_ids": [5], "sampling_params": {"max_new_tokens": 1, "logit_bias": {"1000000": 1}}}),
            ["`sampling_params.logit_bias` has the token 1000000", "from 0"],
        ),
        (
            json!({"input_ids": [[5], [6]], "sampling_params": [{"n": 1}, {"n": 2}]}),
            ["`sampling_params.n` is 1 and 2", "one number"],
        ),
    ] {
        let error = client.generate(&body).await.expect(400).error_text();
        assert!(parts.iter().all(|part| error.contains(part)), "{body}: {error}");
    }
}
