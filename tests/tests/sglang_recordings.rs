//! Replies held against those of a real SGLang 0.5.23 to the same requests: status, keys and types.
//!
//! `tests/data/sglang-0.5.23/` has the requests, the recording, and the script that made it. What differs is listed here with
//! its reason, and in `docs/compatibility.md`; a difference that is no longer there must leave the list.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use bytes::Bytes;
use http::Method;
use http_body_util::Full;
use serde_json::Value;
use tether_tests::{Checkpoint, Client, Reply, Server, scratch};

/// Cases whose status is another, and why.
const OTHER_STATUS: [(&str, u16, &str); 8] = [
    ("a stream refused for its length", 400, BEFORE_IT),
    ("a stream refused for its temperature", 400, BEFORE_IT),
    ("generate with hidden states", 400, "states are dumped, not put into replies"),
    ("generate with null fields", 200, "null is the default of every field"),
    ("refused: a list of rids for one prompt", 400, "SGLang fails with 500"),
    ("refused: a list of parameters for one prompt", 400, "SGLang fails with 500"),
    ("refused: too few parameters", 400, "SGLang fails with 500"),
    ("refused: top_k of 0", 400, "SGLang takes 0 for 1 in spite of its own check"),
];
const BEFORE_IT: &str = "what can be refused is refused before the stream begins, with its status; SGLang answers 200 and an event";

/// Keys that SGLang has and this server does not.
const ABSENT: [(&str, &str); 19] = [
    ("forward_entry_time", TIMES),
    ("prefill_finished_time", TIMES),
    ("queue_time", TIMES),
    ("request_received_ts", TIMES),
    ("first_token_latency", TIMES),
    ("api_server_dispatch_finish_ts", TIMES),
    ("request_finished_ts", TIMES),
    ("decode_throughput", TIMES),
    ("response_sent_to_client_ts", TIMES),
    ("storage_prefetch_wait", TIMES),
    ("storage_staging_wait", TIMES),
    ("load_format", "says how SGLang was launched"),
    ("reasoning_parser", "says how SGLang was launched"),
    ("tool_call_parser", "says how SGLang was launched"),
    ("disaggregation_mode", "says how SGLang was launched"),
    ("has_image_understanding", "text only"),
    ("has_audio_understanding", "text only"),
    ("model_type", "the architecture is there"),
    ("embedding", "no embedding models"),
];
const TIMES: &str = "moments inside SGLang's scheduler; the server's metrics have the like";

fn recorded(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/sglang-0.5.23").join(name);
    serde_json::from_slice(&fs::read(path).expect("it is in the repository")).expect("JSON")
}

/// A checkpoint with SGLang's context and a template.
fn model(checkpoint: &Checkpoint) -> tempfile::TempDir {
    let folder = scratch();
    for entry in fs::read_dir(checkpoint.path()).expect("the checkpoint") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_owned();
        if name == "config.json" {
            let mut config: Value =
                serde_json::from_slice(&fs::read(&path).expect("a config")).expect("JSON");
            config["max_position_embeddings"] = Value::from(2048);
            fs::write(folder.path().join(name), config.to_string()).expect("it is ours");
        } else {
            std::os::unix::fs::symlink(&path, folder.path().join(name)).expect("it is ours");
        }
    }
    let template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}";
    fs::write(folder.path().join("chat_template.jinja"), template).expect("it is ours");
    folder
}

async fn send(client: &Client, case: &Value) -> Reply {
    let body = match (&case["raw"], case.get("json")) {
        (Value::String(raw), _) => Some(raw.clone()),
        (_, Some(json)) => Some(json.to_string()),
        _ => None,
    };
    let method = case["method"].as_str().unwrap_or(if body.is_some() { "POST" } else { "GET" });
    let method = Method::from_bytes(method.as_bytes()).expect("a method");
    let mut request = client.request(method, case["path"].as_str().expect("a path"));
    request.headers_mut().expect("a request").remove("content-type");
    match case["headers"].as_object() {
        Some(headers) => {
            for (name, value) in headers {
                request = request.header(name, value.as_str().expect("a value"));
            }
        }
        None if body.is_some() => request = request.header("content-type", "application/json"),
        None => {}
    }
    client.send(request.body(Full::new(Bytes::from(body.unwrap_or_default()))).expect("a request")).await
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The events of a streamed reply: JSON, and text at the end.
fn events(reply: &Reply) -> Vec<Value> {
    let text = reply.text();
    let event = |text: &str| {
        let text = text.strip_prefix("data: ").unwrap_or_else(|| panic!("an event is {text:?}"));
        serde_json::from_str(text).unwrap_or_else(|_| Value::from(text))
    };
    text.strip_suffix("\n\n").expect("the last event is whole").split("\n\n").map(event).collect()
}

/// What depends on the model and on what was asked before: tokens' texts, what ended a text, and SGLang's prefix cache.
const OF_THE_RUN: [&str; 5] = ["matched", "matched_stop", "top_logprobs", "bytes", "cached_tokens_details"];

/// Lists with an item for each token: how many there are is the model's and the tokenizer's affair. How many there are of
/// anything else is the server's.
const OF_THE_MODEL: [&str; 4] = [".output_ids", ".tokens", ".token_logprobs", ".text_offset"];

/// Where `ours` lacks a key of `theirs`, or has another type. More keys are no difference.
fn differences(theirs: &Value, ours: &Value, at: &str, unused: &mut BTreeSet<&str>, out: &mut Vec<String>) {
    match (theirs, ours) {
        (Value::Object(theirs), Value::Object(ours)) => {
            for (key, value) in theirs {
                match ours.get(key) {
                    _ if OF_THE_RUN.contains(&key.as_str()) => {}
                    Some(own) => differences(value, own, &format!("{at}.{key}"), unused, out),
                    None => {
                        let known = ABSENT.iter().find(|(known, _)| known == key);
                        match known {
                            Some((known, _)) => drop(unused.remove(known)),
                            None => out.push(format!("{at}.{key} is missing")),
                        }
                    }
                }
            }
        }
        (Value::Array(theirs), Value::Array(ours)) => {
            let field = at.trim_end_matches(|c: char| c.is_ascii_digit() || matches!(c, '[' | ']'));
            let of_the_model = OF_THE_MODEL.iter().any(|key| field.ends_with(key));
            if theirs.is_empty() != ours.is_empty() || (theirs.len() != ours.len() && !of_the_model) {
                out.push(format!("{at} has {} items, theirs {}", ours.len(), theirs.len()));
            }
            for (index, (theirs, ours)) in theirs.iter().zip(ours).enumerate() {
                differences(theirs, ours, &format!("{at}[{index}]"), unused, out);
            }
        }
        _ if kind(theirs) != kind(ours) => {
            out.push(format!("{at} is {}, theirs {}", kind(ours), kind(theirs)));
        }
        _ => {}
    }
}

#[tokio::test]
async fn replies_have_the_status_the_keys_and_the_types_of_sglangs() {
    let checkpoint = Checkpoint::float32();
    let model = model(&checkpoint);
    let server = Server::of_model(model.path()).start().await;
    let client = server.client();
    let recordings = recorded("recordings.json");
    let mut unused: BTreeSet<&str> = ABSENT.iter().map(|(key, _)| *key).collect();
    let mut found = Vec::new();
    let (mut compared, mut streamed) = (0, 0);
    for case in recorded("cases.json").as_array().expect("a list") {
        let name = case["name"].as_str().expect("a name");
        let theirs = &recordings[name];
        let reply = send(&client, case).await;
        let status = theirs["status"].as_u64().expect("a status");
        let other = OTHER_STATUS.iter().find(|(other, ..)| *other == name);
        let expected = other.map_or(status, |(_, status, _)| u64::from(*status));
        if u64::from(reply.status.as_u16()) != expected {
            found.push(format!("{name}: {} for {expected}: {}", reply.status, reply.text()));
            continue;
        }
        if other.is_some_and(|(_, own, _)| u64::from(*own) == status) {
            found.push(format!("{name}: the status is SGLang's; it must leave the list"));
        }
        // Of refusals the shape is compared below by where the message stands; of the rest key by key.
        if other.is_none() && status == 200 && theirs["content_type"] == "application/json" {
            let mut out = Vec::new();
            if let (true, Value::Object(ours)) = (name.contains("server_info"), reply.json()) {
                // Of this one the recording has the names alone, of which these are some.
                let known = theirs["json"].as_array().expect("names");
                let strange =
                    |key: &&String| *key != "tether" && !known.iter().any(|name| name == key.as_str());
                out.extend(ours.keys().filter(strange).map(|key| format!(".{key} is not one of SGLang's")));
            } else {
                differences(&theirs["json"], &reply.json(), "", &mut unused, &mut out);
            }
            found.extend(out.into_iter().map(|text| format!("{name}: {text}")));
            compared += 1;
        }
        if other.is_none() && status == 200 && theirs["content_type"] == "text/event-stream" {
            let ours = events(&reply);
            let theirs = theirs["events"].as_array().expect("a list");
            let (mut out, last) = (Vec::new(), Value::from("[DONE]"));
            assert_eq!((theirs.last(), ours.last()), (Some(&last), Some(&last)), "{name}: {}", reply.text());
            // How many there are is a matter of pace; the first and the last say all there is to say of their form.
            let ends = |events: &[Value]| [events[0].clone(), events[events.len() - 2].clone()];
            for (theirs, ours) in ends(theirs).iter().zip(&ends(&ours)) {
                // Of a text that is given out at once the first event is the last one, too.
                let finished = |event: &Value| {
                    event
                        .pointer("/meta_info/finish_reason")
                        .or(event.pointer("/choices/0/finish_reason"))
                        .is_some_and(|reason| !reason.is_null())
                };
                if finished(theirs) == finished(ours) {
                    differences(theirs, ours, "", &mut unused, &mut out);
                }
            }
            found.extend(out.into_iter().map(|text| format!("{name}: {text}")));
            streamed += 1;
        }
        if status >= 400 && reply.status.as_u16() >= 400 && theirs["content_type"] == "application/json" {
            let json = reply.json();
            let message = [&json["error"]["message"], &json["message"], &json["error"], &json["detail"]];
            if !message.iter().any(|message| message.as_str().is_some_and(|text| !text.is_empty())) {
                found.push(format!("{name}: a refusal without a message: {json}"));
            }
        }
    }
    found.extend(unused.into_iter().map(|key| format!("{key} is no longer missing and must leave the list")));
    assert!(found.is_empty(), "{} differences:\n{}", found.len(), found.join("\n"));
    assert!(streamed > 8, "only {streamed} streams were compared");
    assert!(compared > 50, "only {compared} replies were compared");
}

/// vLLM's way of extracting: token IDs to `/v1/completions` through the proxy, the dump's path out of the reply.
#[tokio::test]
async fn vllms_extraction_request_is_answered_with_the_dump_through_the_proxy() {
    let checkpoint = Checkpoint::float32();
    let model = model(&checkpoint);
    let stack = tether_tests::Stack::start(Server::of_model(model.path())).await;
    let client = stack.client();
    let prompt: Vec<i64> = (5..40).collect();
    let body = serde_json::json!({"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0, "return_token_ids": true});
    let reply = client.post("/v1/completions", &body).await.expect(200);
    let json = reply.json();
    assert_eq!(json["choices"][0]["prompt_token_ids"], serde_json::json!(prompt));
    let path = json["kv_transfer_params"]["hidden_states_path"].as_str().expect("a path").to_owned();
    assert_eq!(reply.header("x-hidden-states-path"), Some(path.as_str()));
    let dump = tether_tests::Dump::read(Path::new(&path));
    assert_eq!(dump.token_ids, prompt);
    assert_eq!(json["id"], dump.metadata.request_id.to_string());

    let chat = serde_json::json!({"messages": [{"role": "user", "content": "Grüße"}], "max_tokens": 2, "temperature": 0,
                                  "return_token_ids": true, "kv_transfer_params": {"include_output_tokens": true}});
    let json = client.post("/v1/chat/completions", &chat).await.expect(200).json();
    let rendered = client.post("/v1/chat/completions/render", &chat).await.expect(200).json();
    assert_eq!(json["prompt_token_ids"], rendered["token_ids"]);
    let text = serde_json::json!({"model": "m", "prompt": "<user>Grüße<a>", "add_special_tokens": false});
    let tokens = client.post("/tokenize", &text).await.expect(200).json();
    assert_eq!(tokens["tokens"], rendered["token_ids"]);
    let path = json["kv_transfer_params"]["hidden_states_path"].as_str().expect("a path").to_owned();
    let dump = tether_tests::Dump::read(Path::new(&path));
    let prompt: Vec<i64> = serde_json::from_value(rendered["token_ids"].clone()).expect("IDs");
    let first: i64 = serde_json::from_value(json["choices"][0]["token_ids"][0].clone()).expect("an ID");
    assert_eq!(dump.token_ids, [&prompt[..], &[first]].concat());
}
