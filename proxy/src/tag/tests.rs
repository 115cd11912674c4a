use std::collections::BTreeMap;

use bytes::Bytes;
use proptest::prelude::*;
use serde_json::value::RawValue;
use tether_dump::TokenHash;

use super::*;
use crate::body::{Edit, Spliced};

fn generate(body: &str) -> Result<Found, InvalidBody> {
    find(Endpoint::Generate, body.as_bytes(), true)
}

/// The body as it leaves the proxy.
fn tagged(endpoint: Endpoint, body: &[u8], ids: &[RequestId]) -> Vec<u8> {
    let found = find(endpoint, body, true).unwrap();
    let value = rid_value(found.batch, ids.iter().copied());
    let spliced =
        Spliced::new(&Bytes::copy_from_slice(body), [Edit { slot: &found.slot, key: "rid", value: &value }]);
    spliced.into_segments().iter().flatten().copied().collect()
}

fn tokens(ids: &[i64]) -> Option<Tokens> {
    Some(Tokens { count: ids.len(), hash: TokenHash::of(ids) })
}

#[test]
fn a_body_without_rid_gets_one_as_its_first_member() {
    let id = RequestId::new();
    let body = r#" { "input_ids": [1, 2], "x": 0.30000000000000004}"#;
    let expected = format!(r#" {{"rid":"{id}", "input_ids": [1, 2], "x": 0.30000000000000004}}"#);
    assert_eq!(tagged(Endpoint::Generate, body.as_bytes(), &[id]), expected.into_bytes());
    assert_eq!(
        tagged(Endpoint::ChatCompletions, b"{ }", &[id]),
        format!(r#"{{"rid":"{id}" }}"#).into_bytes()
    );
}

#[test]
fn a_rid_of_any_type_is_replaced_where_it_stands() {
    let id = RequestId::new();
    for (rid, client) in [
        (r#""mine""#, Some(ClientRid::One("mine".into()))),
        (r#""\u0041""#, Some(ClientRid::One("A".into()))),
        ("null", None),
        ("5", Some(ClientRid::Other("5".into()))),
        (r#"["a", "b"]"#, Some(ClientRid::Many(vec!["a".into(), "b".into()]))),
        (r#"{"rid": "x"}"#, Some(ClientRid::Other(r#"{"rid": "x"}"#.into()))),
    ] {
        for key in ["rid", "\\u0072id", "r\\u0069\\u0064"] {
            let body = format!(r#"{{"text":"a","{key}" : {rid} ,"n":1}}"#);
            assert_eq!(generate(&body).unwrap().client_rid, client);
            let expected = format!(r#"{{"text":"a","{key}" : "{id}" ,"n":1}}"#);
            assert_eq!(tagged(Endpoint::Generate, body.as_bytes(), &[id]), expected.into_bytes());
        }
    }
}

#[test]
fn a_batch_gets_a_list_of_ids_also_for_one_prompt() {
    let ids = [RequestId::new(), RequestId::new()];
    let body = br#"{"rid":"base","input_ids":[[1],[2,3]]}"#;
    let expected = format!(r#"{{"rid":["{}","{}"],"input_ids":[[1],[2,3]]}}"#, ids[0], ids[1]);
    assert_eq!(tagged(Endpoint::Generate, body, &ids), expected.into_bytes());
    let expected = format!(r#"{{"rid":["{}"],"prompt":["a"]}}"#, ids[0]);
    assert_eq!(tagged(Endpoint::Completions, br#"{"prompt":["a"]}"#, &ids[..1]), expected.into_bytes());
}

#[test]
fn a_nested_rid_is_not_the_requests() {
    let found =
        generate(r#"{"sampling_params":{"rid":"x"},"a":[{"rid":1}],"s":"\"rid\":1","text":"t"}"#).unwrap();
    assert_eq!(found.slot, Slot::Insert { at: 1, comma: true });
}

#[test]
fn a_key_that_decides_identity_may_not_be_there_twice() {
    for (body, key) in [
        (r#"{"rid":"a","text":"x","rid":"b"}"#, "rid"),
        (r#"{"rid":"a","\u0072id":"b"}"#, "rid"),
        (r#"{"text":"x","text":["x","y"]}"#, "text"),
        (r#"{"capture":false,"capture":true}"#, "capture"),
        (r#"{"cache_salt":"a","cache\u005fsalt":"b"}"#, "cache_salt"),
    ] {
        assert_eq!(generate(body), Err(InvalidBody::Duplicate(key)), "{body}");
    }
    assert!(generate(r#"{"a":1,"a":2}"#).is_ok());
    assert!(generate(r#"{"rid":"a","x":{"rid":"b"}}"#).is_ok());
}

#[test]
fn prompts_are_told_apart_from_lists_of_prompts() {
    let shape = |endpoint, body: &str| {
        let found = find(endpoint, body.as_bytes(), true).unwrap();
        (found.batch, found.prompts.iter().map(|prompt| prompt.tokens).collect::<Vec<_>>())
    };
    use Endpoint::{ChatCompletions, Completions, Generate};
    assert_eq!(shape(Generate, r#"{"input_ids":[1, 22,333]}"#), (false, vec![tokens(&[1, 22, 333])]));
    assert_eq!(
        shape(Generate, r#"{"input_ids":[ [1],[2 , 3] ]}"#),
        (true, vec![tokens(&[1]), tokens(&[2, 3])])
    );
    assert_eq!(shape(Generate, r#"{"input_ids":[[1.5],[2]]}"#), (true, vec![None, tokens(&[2])]));
    assert_eq!(shape(Generate, r#"{"input_ids":[]}"#), (false, vec![tokens(&[])]));
    assert_eq!(shape(Generate, r#"{"text":"a"}"#), (false, vec![None]));
    assert_eq!(shape(Generate, r#"{"text":["a","b","]"]}"#), (true, vec![None; 3]));
    assert_eq!(shape(Generate, r#"{"text":"a","input_ids":[1]}"#), (false, vec![tokens(&[1])]));
    assert_eq!(shape(Generate, r#"{"text":null,"input_ids":[[1]]}"#), (true, vec![tokens(&[1])]));
    assert_eq!(shape(Generate, r#"{"input_embeds":[[0.1,0.2],[0.3,0.4]]}"#), (false, vec![None]));
    assert_eq!(shape(Generate, r#"{"input_embeds":[[[0.1]],[[0.3]]]}"#), (true, vec![None; 2]));
    assert_eq!(shape(Completions, r#"{"prompt":[7,8]}"#), (false, vec![tokens(&[7, 8])]));
    assert_eq!(shape(Completions, r#"{"prompt":[[7],[8]]}"#), (true, vec![tokens(&[7]), tokens(&[8])]));
    assert_eq!(shape(Completions, r#"{"prompt":"a"}"#), (false, vec![None]));
    assert_eq!(
        shape(ChatCompletions, r#"{"messages":[{"content":"a"},{"content":"b"}]}"#),
        (false, vec![None])
    );
}

#[test]
fn samples_and_captures_are_found() {
    let found = generate(r#"{"text":"a","sampling_params":{"n":2},"capture":{"rows":"all"}}"#).unwrap();
    assert_eq!((found.n, found.prompts[0].capture), (2, Capture { wanted: true, rows: Rows::All }));
    let body = br#"{"prompt":"a","n":4,"kv_transfer_params":{"include_output_tokens":true}}"#;
    let found = find(Endpoint::Completions, body, true).unwrap();
    assert_eq!((found.n, found.prompts[0].capture), (4, Capture { wanted: true, rows: Rows::All }));
    assert!(!generate(r#"{"text":"a","capture":false}"#).unwrap().prompts[0].capture.wanted);
}

#[test]
fn what_parsers_dislike_but_splicing_survives_is_passed_on() {
    let id = RequestId::new();
    let deep = format!(r#"{{"a":{}1{},"text":"x"}}"#, "[".repeat(1 << 20), "]".repeat(1 << 20));
    let mark = "\u{feff}{\"text\":\"x\"}".to_owned();
    let odd =
        r#"{"a":NaN,"b":-Infinity,"c":1e99999,"d":123456789012345678901234567890,"e":"\ud800","f":"\"}"}"#
            .to_owned();
    for body in [deep, mark, odd] {
        let after = tagged(Endpoint::Generate, body.as_bytes(), &[id]);
        let inserted = format!(r#""rid":"{id}","#);
        let at = body.find('{').unwrap() + 1;
        assert_eq!(after, [&body[..at], &inserted, &body[at..]].concat().into_bytes());
    }
    assert!(find(Endpoint::Generate, b"{\"text\":\"\xff\xfe\"}", true).is_ok());
}

#[test]
fn other_bodies_are_refused_by_what_is_wrong_with_them() {
    use InvalidBody::{CutShort, Empty, NotAnObject};
    for (body, error) in [
        ("", Empty),
        (" \n", Empty),
        ("\u{feff}", Empty),
        ("[1]", NotAnObject),
        ("\"rid\"", NotAnObject),
        ("null", NotAnObject),
        ("{", CutShort),
        (r#"{"a"#, CutShort),
        (r#"{"a":"\"#, CutShort),
        (r#"{"a":[{"b":1}"#, CutShort),
        (r#"{"a":1"#, CutShort),
    ] {
        assert_eq!(generate(body), Err(error), "{body}");
    }
    for (body, at) in [
        (r#"{"a":1}x"#, 7),
        (r#"{"a":1}{}"#, 7),
        (r#"{"a" 1}"#, 5),
        (r#"{"a":1 "b":2}"#, 7),
        (r#"{"a":1,}"#, 7),
        (r#"{,"a":1}"#, 1),
        (r#"{a:1}"#, 1),
        (r#"{"a":}"#, 5),
        (r#"{"a":1]"#, 6),
    ] {
        match generate(body) {
            Err(InvalidBody::Unexpected { at: found, .. }) => assert_eq!(found, at, "{body}"),
            other => panic!("{body}: {other:?}"),
        }
    }
}

/// JSON text as a client may write it: any spacing, any escapes, any numbers.
fn json(depth: u32) -> BoxedStrategy<String> {
    let space = "[ \n\t\r]{0,2}";
    let string = prop_oneof![
        "[a-z\\[\\]{}:, é]{0,8}".prop_map(|s| format!("\"{s}\"")),
        Just(r#""\"\\\/\u00e9\ud83d\ude00""#.to_owned()),
    ];
    let leaf = prop_oneof![
        string.clone(),
        "-?(0|[1-9][0-9]{0,30})(\\.[0-9]{1,20})?([eE][+-]?[0-9]{1,2})?",
        Just("true".to_owned()),
        Just("null".to_owned()),
    ];
    leaf.prop_recursive(depth, 64, 6, move |inner| {
        let list = prop::collection::vec((space, inner.clone(), space), 0..6);
        let members = prop::collection::vec((space, string.clone(), space, inner), 0..6);
        prop_oneof![
            list.prop_map(|items| {
                let items: Vec<_> = items.iter().map(|(a, v, b)| format!("{a}{v}{b}")).collect();
                format!("[{}]", items.join(","))
            }),
            members.prop_map(|items| {
                let items: Vec<_> = items.iter().map(|(a, k, b, v)| format!("{a}{k}{b}:{v}")).collect();
                format!("{{{}}}", items.join(","))
            }),
        ]
    })
    .boxed()
}

proptest! {
    #[test]
    fn tagging_changes_nothing_but_rid(
        members in prop::collection::vec(("[a-qs-z]{1,6}", json(4)), 0..6),
        rid in prop::option::of((json(2), any::<prop::sample::Index>())),
        space in "[ \n\t\r]{0,2}",
    ) {
        let mut members: Vec<_> = members.into_iter().enumerate().map(|(i, (k, v))| (format!("{k}{i}"), v)).collect();
        let had = rid.as_ref().map(|(value, _)| value.clone());
        if let Some((value, at)) = rid {
            members.insert(at.index(members.len() + 1), ("rid".to_owned(), value));
        }
        let text: Vec<_> = members.iter().map(|(k, v)| format!("{space}\"{k}\"{space}:{space}{v}{space}")).collect();
        let body = format!("{space}{{{}}}{space}", text.join(","));
        let id = RequestId::new();
        let after = String::from_utf8(tagged(Endpoint::Generate, body.as_bytes(), &[id])).unwrap();

        // Byte for byte: taking out what was put in gives the body back.
        let quoted = format!("\"{id}\"");
        prop_assert_eq!(after.matches(&quoted).count(), 1);
        let back = match &had {
            Some(value) => after.replace(&quoted, value),
            None => after.replace(&format!("\"rid\":{quoted},"), "").replace(&format!("\"rid\":{quoted}"), ""),
        };
        prop_assert_eq!(&back, &body);

        // And as a parser sees it, each value by its exact text.
        type Members<'a> = BTreeMap<String, &'a RawValue>;
        let mut expected: Members = serde_json::from_str(&body).unwrap();
        let mut found: Members = serde_json::from_str(&after).unwrap();
        expected.remove("rid");
        prop_assert_eq!(found.remove("rid").map(RawValue::get), Some(quoted.as_str()));
        prop_assert_eq!(found.len(), expected.len());
        for (name, value) in expected {
            prop_assert_eq!(found[&name].get(), value.get());
        }
    }

    #[test]
    fn any_bytes_are_answered(bytes in prop::collection::vec(any::<u8>(), 0..200), json_like in "[\\[\\]{}\":,\\\\0-9a-z ]{0,80}") {
        for body in [&bytes[..], json_like.as_bytes()] {
            for endpoint in [Endpoint::Generate, Endpoint::Completions, Endpoint::ChatCompletions] {
                let _ = find(endpoint, body, true);
                let _ = find(endpoint, body, false);
            }
        }
    }

    #[test]
    fn a_body_cut_short_is_refused(body in json(4), cut in any::<prop::sample::Index>()) {
        let body = format!("{{\"text\":{body}}}");
        prop_assert!(find(Endpoint::Generate, &body.as_bytes()[..cut.index(body.len())], true).is_err());
    }

    #[test]
    fn reading_tokens_or_not_finds_the_same_places(ids in prop::collection::vec(prop::collection::vec(0..200_000i64, 0..9), 1..5)) {
        let body = format!("{{\"input_ids\":{},\"rid\":null}}", serde_json::to_string(&ids).unwrap());
        let read = find(Endpoint::Generate, body.as_bytes(), true).unwrap();
        let passed = find(Endpoint::Generate, body.as_bytes(), false).unwrap();
        prop_assert_eq!((&read.slot, read.batch, read.prompts.len()), (&passed.slot, passed.batch, passed.prompts.len()));
        let expected: Vec<_> = ids.iter().map(|ids| tokens(ids)).collect();
        prop_assert_eq!(read.prompts.iter().map(|p| p.tokens).collect::<Vec<_>>(), expected);
    }
}
