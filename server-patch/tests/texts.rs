//! Tokenizers, templates and streams against what other people's code makes of the same texts
//! (`tests/python/make_texts.py`).
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use minijinja::Value;
use serde::Deserialize;
use tether_server::chat::{ChatTemplate, Conversation};
use tether_server::engine::StopText;
use tether_server::tokenizer::{StopStrings, TextStream, Tokenizer};

/// Where the texts are. Fails, and does not skip, if they were not made.
fn folder(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.tether/golden/texts").join(name);
    assert!(
        dir.is_dir(),
        "{} is missing; make it with: .tether/venv/bin/python tests/python/make_texts.py",
        dir.display()
    );
    dir
}

fn read<T: for<'de> Deserialize<'de>>(name: &str, file: &str) -> Vec<T> {
    serde_json::from_slice(&std::fs::read(folder(name).join(file)).unwrap()).unwrap()
}

fn tokenizer(name: &str) -> Tokenizer {
    Tokenizer::read(&folder(name)).unwrap().unwrap()
}

#[derive(Deserialize)]
struct Text {
    text: String,
    ids: Vec<i64>,
    decoded: String,
}

/// TK-05, TK-06, TK-08: the IDs are the reference tokenizer's, special tokens in the text included.
#[test]
fn texts_become_the_ids_that_the_reference_tokenizer_gives_and_back() {
    for (name, count) in [("deepseek", 10_000), ("kimi", 2_000)] {
        let (tokenizer, texts) = (tokenizer(name), read::<Text>(name, "texts.json"));
        assert_eq!(texts.len(), count);
        for Text { text, ids, decoded } in &texts {
            assert_eq!(&tokenizer.encode(text).unwrap(), ids, "{name}: {text:?}");
            assert_eq!(&tokenizer.decode(ids, false).unwrap(), decoded, "{name}: {text:?}");
        }
        let exact = texts.iter().filter(|text| text.text == text.decoded).count();
        assert!(exact > count * 9 / 10, "{name}: only {exact} texts come back as they were");
    }
}

/// TK-06: every ID of Kimi's vocabulary has a text, the reserved ones that the config does not name included.
#[test]
fn every_id_of_a_tiktoken_vocabulary_has_its_text() {
    #[derive(Deserialize)]
    struct One {
        ids: Vec<i64>,
        decoded: String,
    }
    let tokenizer = tokenizer("kimi");
    let all = read::<One>("kimi", "every.json");
    assert!(all.len() > 258);
    for One { ids, decoded } in &all {
        assert_eq!(&tokenizer.decode(ids, false).unwrap(), decoded);
    }
    let beyond = all.len() as i64;
    assert_eq!(tokenizer.decode(&[beyond, -1, i64::MAX], false).unwrap(), "");
    // Special tokens are left out on request, those that the config calls ordinary are not.
    let ids = tokenizer.encode("a[BOS]b<|im_end|>[EOT]c").unwrap();
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "ab[EOT]c");
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), "a[BOS]b<|im_end|>[EOT]c");
}

/// TK-01: a rendered template has its one beginning of sequence, and the tokenizer adds none.
#[test]
fn templates_render_as_jinja_does_and_their_text_has_one_bos() {
    #[derive(Deserialize)]
    struct Rendered {
        messages: Value,
        tools: Option<Value>,
        add_generation_prompt: bool,
        text: String,
    }
    for (name, count) in [("deepseek", 200), ("kimi", 60)] {
        let template = ChatTemplate::read(&folder(name)).unwrap().unwrap();
        let tokenizer = tokenizer(name);
        let rendered = read::<Rendered>(name, "conversations.json");
        assert_eq!(rendered.len(), count);
        for Rendered { messages, tools, add_generation_prompt, text } in rendered {
            let conversation =
                Conversation { messages, tools, add_generation_prompt, ..Conversation::default() };
            assert_eq!(template.render(&conversation).unwrap(), text, "{name}");
            let ids = tokenizer.encode_bare(&text).unwrap();
            assert_eq!(tokenizer.encode(&text).unwrap(), ids, "{name}: nothing is added");
            if name == "deepseek" {
                assert!(ids[0] == 0 && ids[1] != 0, "one beginning of sequence: {:?}", &ids[..2]);
            }
        }
    }
}

/// TK-12: a role that a template does not know is refused where the template says so.
#[test]
fn an_unknown_role_is_refused_in_the_templates_words() {
    let template = ChatTemplate::read(&folder("kimi")).unwrap().unwrap();
    let messages = serde_json::from_str(r#"[{"role": "laguna_s", "content": "x"}]"#).unwrap();
    let error = template.render(&Conversation { messages, ..Conversation::default() }).unwrap_err();
    assert!(error.to_string().ends_with("unknown role laguna_s"), "{error}");
}

/// Pieces of a text add up to it, are never taken back, and no character comes before its last byte.
#[test]
fn a_streamed_text_is_the_whole_text_in_pieces() {
    for name in ["deepseek", "kimi"] {
        let tokenizer = Arc::new(tokenizer(name));
        for Text { ids, decoded, .. } in read::<Text>(name, "texts.json").iter().take(1_000) {
            let mut stream = TextStream::new(Arc::clone(&tokenizer), false);
            let mut text = String::new();
            for id in ids {
                text.push_str(&stream.push(*id).unwrap());
                assert!(decoded.starts_with(&text), "{name}: {text:?} of {decoded:?}");
            }
            text.push_str(&stream.finish().unwrap());
            assert_eq!(&text, decoded, "{name}");
        }
    }
}

/// Bytes that are no text: tokens of a vocabulary drawn at random.
#[test]
fn a_streamed_text_of_random_tokens_has_all_that_the_whole_one_has() {
    let tokenizer = Arc::new(tokenizer("kimi"));
    let mut state = 1u64;
    let mut random = |limit: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % limit
    };
    for _ in 0..200 {
        let ids: Vec<i64> = (0..40).map(|_| random(800) as i64).collect();
        let mut stream = TextStream::new(Arc::clone(&tokenizer), false);
        let mut text: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
        text.push_str(&stream.finish().unwrap());
        let whole = tokenizer.decode(&ids, false).unwrap();
        // Bytes that are no text may be counted in other groups; all that is text must be there.
        let known = |text: &str| text.chars().filter(|c| *c != '\u{fffd}').collect::<String>();
        assert_eq!(known(&text), known(&whole));
    }
}

#[test]
fn a_stop_string_is_found_with_the_token_that_completes_it_wherever_tokens_are_cut() {
    for name in ["deepseek", "kimi"] {
        let tokenizer = Arc::new(tokenizer(name));
        let text = "The answer is 世界 and </think> then 😀 more. STOP here";
        let ids = tokenizer.encode_bare(text).unwrap();
        for (strings, expected) in [
            (vec!["STOP"], "STOP"),
            (vec!["界 and", "STOP"], "界 and"),
            (vec!["", "😀 m"], "😀 m"),
            (vec!["d </th"], "d </th"),
            (vec!["e answer is 世界 and </think> then 😀 mor"], "e answer is 世界 and </think> then 😀 mor"),
        ] {
            let strings: Vec<String> = strings.into_iter().map(str::to_owned).collect();
            let mut stop = StopStrings::new(Arc::clone(&tokenizer), strings);
            let at = ids.iter().position(|id| stop.push(*id).as_deref() == Some(expected));
            let at = at.unwrap_or_else(|| panic!("{name}: {expected:?} was not found"));
            let until = |count: usize| tokenizer.decode(&ids[..count], false).unwrap();
            assert!(
                until(at + 1).contains(expected) && !until(at).contains(expected),
                "{name}: {expected:?}"
            );
        }
    }
}

#[test]
fn a_stop_string_may_spell_a_special_token_that_replies_leave_out() {
    for name in ["deepseek", "kimi"] {
        let tokenizer = Arc::new(tokenizer(name));
        let eos = tokenizer.eos().expect("the config names one");
        let spelling = tokenizer.decode(&[eos], false).unwrap();
        let ids = tokenizer.encode_bare(&format!("an answer{spelling} and more")).unwrap();
        assert!(ids.contains(&eos), "{name}: {spelling} is one token");
        assert!(!tokenizer.decode(&ids, true).unwrap().contains(&spelling), "{name}: replies leave it out");
        let mut stop = StopStrings::new(Arc::clone(&tokenizer), vec![spelling.clone()]);
        let at = ids.iter().position(|id| stop.push(*id).as_deref() == Some(&*spelling));
        assert_eq!(at, ids.iter().position(|id| *id == eos), "{name}");
    }
}
