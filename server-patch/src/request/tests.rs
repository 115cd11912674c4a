use super::*;
use crate::sampling::SamplingParams;
use proptest::prelude::*;
use tether_dump::{FinalState, Rows};

fn parse(body: &str) -> Result<GenerateRequest, ApiError> {
    GenerateRequest::parse(body.as_bytes(), 1000)
}

fn refused(body: &str) -> ApiError {
    parse(body).expect_err(body)
}

fn ids(request: &GenerateRequest) -> Vec<&[i64]> {
    request
        .prompts
        .iter()
        .map(|prompt| match &prompt.prompt {
            Prompt::Ids(ids) => ids.as_slice(),
            Prompt::Text(text) => panic!("{text:?} is text"),
        })
        .collect()
}

#[test]
fn the_first_element_tells_a_prompt_from_a_batch() {
    let single = parse(r#"{"input_ids":[1,2,3]}"#).unwrap();
    assert!(!single.batch);
    assert_eq!(ids(&single), [[1, 2, 3]]);
    let batch = parse(r#"{"input_ids":[[1,2],[3]]}"#).unwrap();
    assert!(batch.batch);
    assert_eq!(ids(&batch), [vec![1, 2], vec![3]]);
    let one = parse(r#"{"input_ids":[[7]]}"#).unwrap();
    assert!(one.batch, "a list with one list is a batch");
    assert!(parse(r#"{"text":[]}"#).unwrap().prompts.is_empty());
}

#[test]
fn a_fault_in_the_ids_is_named_by_index_value_and_what_is_accepted() {
    for (ids, place, found) in [
        ("[1,2.5]", "`input_ids[1]`", "2.5"),
        ("[1,2.0]", "`input_ids[1]`", "2.0"),
        (r#"["a"]"#, "`input_ids[0]`", "\"a\""),
        ("[1,null]", "`input_ids[1]`", "null"),
        ("[true]", "`input_ids[0]`", "true"),
        ("[1,{}]", "`input_ids[1]`", "an object"),
        ("[1,[2]]", "`input_ids[1]`", "a list"),
        ("[9223372036854775808]", "`input_ids[0]`", "9223372036854775808"),
        ("[[1],[2,3.5]]", "`input_ids[1][1]`", "3.5"),
        ("[[1],[[2]]]", "`input_ids[1][0]`", "a list"),
        (r#"[[1],[2,"x"]]"#, "`input_ids[1][1]`", "\"x\""),
    ] {
        let error = refused(&format!(r#"{{"input_ids":{ids}}}"#));
        assert!(matches!(error, ApiError::WrongType(_)), "{ids}: {error:?}");
        let text = error.to_string();
        assert!(
            text.starts_with(&format!("{place} is {found}; an integer from 0 to 999 is expected")),
            "{text}"
        );
    }
    for (ids, start) in [
        ("[[1],2]", "`input_ids[1]` is 2; a list of integers"),
        ("[[1],null]", "`input_ids[1]` is null; a list of integers"),
        ("\"1,2\"", "`input_ids` is \"1,2\"; a list of integers or a list of such lists is expected"),
        ("5", "`input_ids` is 5; a list"),
        ("{}", "`input_ids` is an object; a list"),
    ] {
        let text = refused(&format!(r#"{{"input_ids":{ids}}}"#)).to_string();
        assert!(text.starts_with(start), "{text}");
    }
}

#[test]
fn what_is_no_json_object_is_told_from_what_has_wrong_types() {
    for body in [
        "",
        "{",
        "{\"input_ids\":[1,2",
        "{\"input_ids\":[1,]}",
        "{\"text\":\"a\"} x",
        "{\"input_ids\":[NaN]}",
        "{\"input_ids\":[1e400]}",
        "\u{feff}{}",
        r#"{"text":"\ud800"}"#,
        &"[".repeat(100_000),
    ] {
        let error = refused(body);
        assert!(matches!(error, ApiError::NotJson(_) | ApiError::WrongType(_)), "{error:?}");
        assert_eq!(error.status(), 400);
        if !body.starts_with('[') {
            assert!(error.to_string().starts_with("the request body is not valid JSON"), "{body}: {error}");
        }
    }
    let text = refused("[1,2]").to_string();
    assert!(text.contains("expected a JSON object"), "{text}");
    let text = refused("{}").to_string();
    assert_eq!(text, "either `text` or `input_ids` must be given");
    assert_eq!(refused(r#"{"input_ids":null}"#).to_string(), text);
}

#[test]
fn a_key_given_twice_is_refused_and_never_one_of_the_two_obeyed() {
    for body in [
        r#"{"rid":"a","input_ids":[1],"rid":"b"}"#,
        r#"{"rid":null,"input_ids":[1],"rid":"b"}"#,
        r#"{"rid":"a","input_ids":[1],"\u0072id":"b"}"#,
    ] {
        assert!(refused(body).to_string().starts_with("the key `rid` is given twice"), "{body}");
    }
    assert!(
        refused(r#"{"input_ids":[1],"input_ids":[2]}"#).to_string().contains("`input_ids` is given twice")
    );
    let nested = r#"{"rid":"a","input_ids":[1],"custom_labels":{"rid":"b"}}"#;
    assert_eq!(parse(nested).unwrap().prompts[0].rid.as_deref(), Some("a"));
}

#[test]
fn a_rid_goes_to_its_prompt() {
    let id = tether_dump::RequestId::new();
    let rids = |body: &str| parse(body).unwrap().prompts.into_iter().map(|p| p.rid).collect::<Vec<_>>();
    assert_eq!(rids(&format!(r#"{{"rid":"{id}","input_ids":[1]}}"#)), [Some(id.to_string())]);
    assert_eq!(rids(r#"{"rid":["a","b"],"input_ids":[[1],[2]]}"#), [Some("a".into()), Some("b".into())]);
    assert_eq!(
        rids(r#"{"rid":"a","input_ids":[[1],[2]]}"#),
        [Some("a_0".into()), Some("a_1".into())],
        "as SGLang"
    );
    assert_eq!(rids(r#"{"rid":null,"input_ids":[1]}"#), [None]);
    for (body, part) in [
        (r#"{"rid":["a"],"input_ids":[1]}"#.to_owned(), "`rid` is a list, but there is a single prompt"),
        (r#"{"rid":["a"],"input_ids":[[1],[2]]}"#.to_owned(), "`rid` is a list of 1 for a batch of 2"),
        (r#"{"rid":5,"input_ids":[1]}"#.to_owned(), "`rid` is 5; a string"),
        (r#"{"rid":["a",5],"input_ids":[[1],[2]]}"#.to_owned(), "`rid[1]` is 5; a string"),
        (format!(r#"{{"rid":"{id}","input_ids":[[1],[2]]}}"#), "a list with one ID a prompt is expected"),
    ] {
        let text = refused(&body).to_string();
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_capture_is_read_in_all_its_forms() {
    let captures =
        |body: &str| parse(body).unwrap().prompts.into_iter().map(|p| p.capture).collect::<Vec<_>>();
    assert_eq!(captures(r#"{"input_ids":[1]}"#), [None]);
    assert_eq!(captures(r#"{"input_ids":[1],"capture":null}"#), [None]);
    assert_eq!(captures(r#"{"input_ids":[1],"capture":false}"#), [Some(CaptureField::Switch(false))]);
    let options = CaptureOptions {
        points: Some(vec![5, 1]),
        axis: Axis::Output,
        final_state: Some(FinalState::Both),
        rows: Some(Rows::All),
    };
    let body = r#"{"input_ids":[[1],[2],[3]],
        "capture":[true,{"points":[5,1],"axis":"output","final":"both","rows":"all"},null]}"#;
    let all = [Some(CaptureField::Switch(true)), Some(CaptureField::Options(options)), None];
    assert_eq!(captures(body), all);
    let body = r#"{"input_ids":[[1],[2]],"capture":{}}"#;
    assert_eq!(captures(body), vec![Some(CaptureField::Options(CaptureOptions::default())); 2]);
}

#[test]
fn a_bad_capture_is_refused_by_name() {
    for (capture, part) in [
        (
            r#"{"pionts":[1]}"#,
            "`capture.pionts` is unknown; `points`, `axis`, `final` and `rows` are accepted",
        ),
        (r#"{"path":"/tmp/x"}"#, "`capture.path` is not accepted"),
        (r#"{"points":5}"#, "`capture.points` is 5; a list of integers is expected"),
        (r#"{"points":[1,2.5]}"#, "`capture.points[1]` is 2.5; a layer number"),
        (r#"{"points":[[1]]}"#, "`capture.points[0]` is a list"),
        (r#"{"points":["R2"]}"#, "`capture.points[0]` is \"R2\""),
        (r#"{"axis":"inputs"}"#, "`capture.axis`: unknown axis `inputs`: expected `input` or `output`"),
        (r#"{"final":"prenorm"}"#, "`capture.final`: unknown final state `prenorm`"),
        (r#"{"final":true}"#, "`capture.final` is true; a string is expected"),
        (r#"{"rows":"last"}"#, "`capture.rows`: unknown rows `last`"),
        (r#"{"rows":"all","rows":"prompt"}"#, "`capture.rows` is given twice"),
        ("\"yes\"", "`capture` is \"yes\"; true, false or an object"),
        ("1", "`capture` is 1; true, false or an object"),
        ("[true]", "`capture` is a list, but there is a single prompt"),
        ("[[true]]", "`capture[0]` is a list; true, false or an object"),
        ("[7]", "`capture[0]` is 7; true, false or an object"),
        (r#"[{"x":1}]"#, "`capture[0].x` is unknown"),
    ] {
        let error = refused(&format!(r#"{{"input_ids":[1],"capture":{capture}}}"#));
        assert_eq!(error.status(), 400);
        assert!(error.to_string().contains(part), "{capture}: {error}");
    }
    let text = refused(r#"{"input_ids":[[1],[2]],"capture":[true]}"#).to_string();
    assert!(text.contains("`capture` is a list of 1 for a batch of 2 prompts"), "{text}");
}

#[test]
fn sampling_parameters_are_read_and_judged_and_others_refused_by_name() {
    let sampling = |params: &str| {
        parse(&format!(r#"{{"input_ids":[1],"sampling_params":{params}}}"#))
            .map(|r| r.prompts[0].sampling.clone())
    };
    assert_eq!(sampling("{}").unwrap(), Sampling::default());
    assert_eq!(sampling("null").unwrap().max_new_tokens, NewTokens::Default);
    assert_eq!(sampling(r#"{"max_new_tokens":null}"#).unwrap().max_new_tokens, NewTokens::ToContext);
    assert_eq!(sampling(r#"{"max_new_tokens":0}"#).unwrap().max_new_tokens, NewTokens::Exactly(0));
    for legal in [
        r#"{"temperature":0}"#,
        r#"{"temperature":0.7}"#,
        r#"{"top_p":0.9,"top_k":5}"#,
        r#"{"temperature":0.0,"top_p":0.9,"top_k":50,"min_p":0.1,"sampling_seed":7}"#,
        r#"{"temperature":1.0,"top_k":1}"#,
        r#"{"top_p":1,"top_k":-1,"min_p":0,"n":1,"stop":[],"stop_regex":null,"frequency_penalty":0.0,"repetition_penalty":1,"no_stop_trim":false,"logit_bias":{}}"#,
    ] {
        assert!(sampling(legal).is_ok(), "{legal}: {:?}", sampling(legal));
    }
    let all = r#"{"temperature":0.5,"top_k":7,"top_p":0.9,"min_p":0.1,"frequency_penalty":0.2,"presence_penalty":-0.3,
        "repetition_penalty":1.2,"min_new_tokens":4,"logit_bias":{"17":-2.5},"sampling_seed":-9}"#;
    let expected = SamplingParams {
        temperature: 0.5,
        top_k: Some(7),
        top_p: 0.9,
        min_p: 0.1,
        frequency_penalty: 0.2,
        presence_penalty: -0.3,
        repetition_penalty: 1.2,
        min_new_tokens: 4,
        logit_bias: vec![(17, -2.5)],
        seed: Some(-9),
    };
    assert_eq!(sampling(all).unwrap().params, expected);
    assert_eq!(sampling("{}").unwrap().params, SamplingParams { temperature: 1.0, ..Default::default() });
    assert_eq!(sampling(r#"{"temperature":1e-7}"#).unwrap().params.temperature, 0.0);
    assert_eq!(sampling(r#"{"top_k":-1}"#).unwrap().params.top_k, None);
    let stops =
        sampling(r#"{"stop_token_ids":[5,6],"ignore_eos":true,"skip_special_tokens":false}"#).unwrap();
    assert_eq!(
        (stops.stop_token_ids, stops.ignore_eos, stops.skip_special_tokens),
        (vec![5, 6], true, false)
    );
    for (params, part) in [
        (r#"{"max_new_tokens":-1}"#, "`sampling_params.max_new_tokens` is -1; 0 or more is accepted"),
        (r#"{"max_new_tokens":1.5}"#, "`sampling_params.max_new_tokens` is 1.5; an integer is expected"),
        (r#"{"max_new_tokens":"2"}"#, "`sampling_params.max_new_tokens` is \"2\"; an integer is expected"),
        (r#"{"max_new_tokens":true}"#, "`sampling_params.max_new_tokens` is true; an integer is expected"),
        (r#"{"frequency_penalty":2.5}"#, "`sampling_params.frequency_penalty` is 2.5; a number from -2 to 2"),
        (r#"{"presence_penalty":-3}"#, "`sampling_params.presence_penalty` is -3; a number from -2 to 2"),
        (r#"{"repetition_penalty":0}"#, "`sampling_params.repetition_penalty` is 0; a number above 0"),
        (r#"{"min_new_tokens":-1}"#, "`sampling_params.min_new_tokens` is -1; 0 or more"),
        (
            r#"{"max_new_tokens":2,"min_new_tokens":3}"#,
            "`sampling_params.min_new_tokens` is 3; it must be in [0, max_new_tokens(2)]",
        ),
        (r#"{"logit_bias":{"x":1}}"#, "`sampling_params.logit_bias` has the key \"x\""),
        (r#"{"temperature":-1}"#, "`sampling_params.temperature` is -1; a finite number from 0"),
        (r#"{"top_p":0}"#, "`sampling_params.top_p` is 0; a number above 0"),
        (r#"{"top_k":0}"#, "`sampling_params.top_k` is 0; -1 (all) or 1"),
        (r#"{"min_p":2}"#, "`sampling_params.min_p` is 2; a number from 0 to 1"),
        (r#"{"stop":5}"#, "`sampling_params.stop` is 5; a string"),
        (r#"{"stop":["a",5]}"#, "`sampling_params.stop[1]` is 5; a string"),
        (r#"{"n":-1}"#, "`sampling_params.n` is -1; a number from 1 to 128"),
        (r#"{"n":1000}"#, "`sampling_params.n` is 1000; a number from 1 to 128"),
        (r#"{"regex":"a"}"#, "`sampling_params.regex`"),
        (r#"{"max_tokens":2}"#, "`sampling_params.max_tokens` is unknown; max_new_tokens, "),
        (r#"{"stop_token_ids":["a"]}"#, "`sampling_params.stop_token_ids[0]` is \"a\""),
        (r#"{"n":1,"n":1}"#, "`sampling_params.n` is given twice"),
        ("5", "`sampling_params` is 5; an object"),
        ("[{}]", "`sampling_params` is a list, but there is a single prompt"),
    ] {
        let error = sampling(params).expect_err(params);
        assert!(error.to_string().contains(part), "{params}: {error}");
    }
}

#[test]
fn a_field_this_server_does_not_have_is_refused_unless_it_asks_for_nothing() {
    for (field, value) in [
        ("lora_path", "\"x\""),
        ("input_embeds", "[[0.5]]"),
        ("return_hidden_states", "true"),
        ("priority", "3"),
        ("kv_transfer_params", r#"{"hidden_states_path":"/x"}"#),
    ] {
        let text = refused(&format!(r#"{{"input_ids":[1],"{field}":{value}}}"#)).to_string();
        assert!(text.starts_with(&format!("`{field}` is ")) && text.contains("does not implement"), "{text}");
    }
    let body = r#"{"input_ids":[1],"stream":false,"return_logprob":false,"logprob_start_len":-1,"top_logprobs_num":0,
                   "image_data":[],"lora_path":null,"something_of_theirs":[1,{"a":2}]}"#;
    assert_eq!(parse(body).unwrap().prompts.len(), 1, "as in SGLang, unknown fields are let be");
}

#[test]
fn text_and_ids_together_must_agree_in_shape() {
    let both = parse(r#"{"text":"a","input_ids":[5]}"#).unwrap();
    assert_eq!(ids(&both), [[5]], "the IDs are run, as in SGLang");
    assert!(refused(r#"{"text":"a","input_ids":[[5]]}"#).to_string().contains("differ in shape"));
    assert!(refused(r#"{"text":["a","b"],"input_ids":[[5]]}"#).to_string().contains("differ in shape"));
    assert!(refused(r#"{"text":5}"#).to_string().starts_with("`text` is 5; a string"));
}

proptest! {
    #[test]
    fn ids_come_through_exactly(rows in prop::collection::vec(prop::collection::vec(any::<i64>(), 0..20), 1..8)) {
        let body = format!(r#"{{"input_ids":{}}}"#, serde_json::to_string(&rows).unwrap());
        let request = parse(&body).unwrap();
        prop_assert!(request.batch);
        prop_assert_eq!(ids(&request), rows.iter().map(Vec::as_slice).collect::<Vec<_>>());
    }

    #[test]
    fn no_body_makes_the_reader_panic(body in any::<Vec<u8>>()) {
        drop(GenerateRequest::parse(&body, 1000));
    }
}
