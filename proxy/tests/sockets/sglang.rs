use std::collections::HashSet;

use serde_json::Value;

use crate::support::{Proxy, Upstream};

const SGLANG: &[&str] = &["--upstream-kind", "sglang"];

/// What SGLang takes `cache_salt` to be: a string for one prompt, a list of the batch's length for several.
fn salts(body: &Value) -> Vec<String> {
    let salt = &body["cache_salt"];
    assert_eq!(salt.is_array(), body["rid"].is_array(), "{body}");
    let texts = salt.as_array().cloned().unwrap_or_else(|| vec![salt.clone()]);
    assert_eq!(texts.len(), body["rid"].as_array().map_or(1, Vec::len), "{body}");
    texts.iter().map(|text| text.as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn every_prompt_for_sglang_gets_a_salt_that_no_other_prompt_has() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], SGLANG).await;
    let mut seen = HashSet::new();
    let mut prompts = 0;
    for (path, body, count) in [
        ("/generate", r#"{"text":"a","x":0.30000000000000004}"#, 1),
        ("/generate", r#"{"text":"a","x":0.30000000000000004}"#, 1),
        ("/generate", r#"{"input_ids":[[1],[1]],"cache_salt":"shared"}"#, 2),
        ("/generate", r#"{"cache\u005fsalt":"mine","text":"a","rid":"r"}"#, 1),
        ("/v1/completions", r#"{"prompt":["a","a"]}"#, 2),
        ("/v1/completions", r#"{"prompt":["a"],"rid":null,"cache_salt":null}"#, 1),
        ("/v1/chat/completions", r#"{"messages":[]}"#, 1),
        ("/generate", r#"{"text":["a","b"],"capture":[false,true]}"#, 2),
        ("/generate", "{}", 1),
    ] {
        assert_eq!(proxy.post(path, body).await.status(), 200);
        let sent = upstream.last();
        let salts = salts(&sent.json());
        assert_eq!(salts.len(), count, "{body}");
        prompts += count;
        seen.extend(salts);
        assert!(!body.contains("0.3") || sent.text().ends_with(&body[1..]), "{}", sent.text());
        for (text, times) in
            [("shared", 0), ("mine", 0), ("cache_salt", usize::from(!body.contains("u005f")))]
        {
            assert_eq!(sent.text().matches(text).count(), times, "{text} in {}", sent.text());
        }
    }
    assert_eq!(seen.len(), prompts);
    proxy.settled().await;
}

#[tokio::test]
async fn an_id_that_is_trusted_and_comes_again_does_not_find_its_own_prefix() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &["--upstream-kind", "sglang", "--client-ids", "trust"]).await;
    let body = format!(r#"{{"text":"a","rid":"{}"}}"#, tether_dump::RequestId::new());
    for _ in 0..2 {
        assert_eq!(proxy.post("/generate", &body).await.status(), 200);
    }
    let bodies: Vec<Value> = upstream.requests().iter().map(crate::support::Message::json).collect();
    assert_eq!(bodies[0]["rid"], bodies[1]["rid"]);
    assert_ne!(salts(&bodies[0]), salts(&bodies[1]));
}

#[tokio::test]
async fn nothing_is_salted_where_no_rows_can_be_lost() {
    let upstream = Upstream::plain().await;
    for (flags, body) in [
        (SGLANG, r#"{"text":"a","capture":false,"cache_salt":"mine"}"#),
        (&["--upstream-kind", "sglang", "--no-fresh-prefix"], r#"{"text":"a","cache_salt":"mine"}"#),
        (&[], r#"{"text":"a","cache_salt":"mine"}"#),
    ] {
        let proxy = Proxy::start(&[&upstream], flags).await;
        assert_eq!(proxy.post("/generate", body).await.status(), 200);
        assert!(upstream.last().text().ends_with(&body[1..]), "{}", upstream.last().text());
    }
}

#[tokio::test]
async fn several_samples_of_a_prompt_are_refused_towards_sglang_alone() {
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], SGLANG).await;
    for (path, body) in [
        ("/generate", r#"{"text":"a","sampling_params":{"n":3}}"#),
        ("/v1/completions", r#"{"prompt":"a","n":3}"#),
        ("/v1/chat/completions", r#"{"messages":[],"n":3}"#),
    ] {
        let reply = proxy.post(path, body).await;
        assert_eq!(reply.status(), 400, "{path}");
        let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains("`n` is 3") && message.contains("SGLang"), "{message}");
    }
    assert!(upstream.requests().is_empty());
    assert_eq!(proxy.metric("tether_proxy_refused_total{reason=\"unsupported\"}"), 3.0);
    let tether = Proxy::start(&[&upstream], &[]).await;
    assert_eq!(tether.post("/generate", r#"{"text":"a","sampling_params":{"n":3}}"#).await.status(), 200);
    proxy.settled().await;
}
