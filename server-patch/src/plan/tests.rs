use super::*;
use crate::testing::{CONTEXT, planner};

fn plan_with(mode: CaptureMode, body: &str) -> Result<Vec<Plan>, ApiError> {
    let request = GenerateRequest::parse(body.as_bytes(), 100).unwrap();
    planner(mode).plan(request, Some("call"), &Originals::default())
}

fn plan(body: &str) -> Result<Vec<Plan>, ApiError> {
    plan_with(CaptureMode::Tagged, body)
}

fn refused(body: &str) -> String {
    let error = plan(body).map(drop).expect_err(body);
    assert_eq!(error.status(), 400, "{error}");
    error.to_string()
}

fn points(body: &str) -> Vec<String> {
    let plans = plan(body).unwrap();
    plans[0].capture.as_ref().unwrap().metadata.points.iter().map(ToString::to_string).collect()
}

#[test]
fn an_id_the_model_does_not_have_is_refused_with_the_range() {
    for (ids, start) in [
        ("[5,100]", "`input_ids[1]` is 100; a token ID from 0 to 99 is expected"),
        ("[-1]", "`input_ids[0]` is -1; a token ID from 0 to 99 is expected"),
        ("[2147483648]", "`input_ids[0]` is 2147483648;"),
        ("[[1],[5,-7]]", "`input_ids[1][1]` is -7;"),
        ("[]", "`input_ids` cannot be empty"),
        ("[[1],[]]", "`input_ids[1]` cannot be empty"),
    ] {
        let text = refused(&format!(r#"{{"input_ids":{ids}}}"#));
        assert!(text.starts_with(start), "{text}");
    }
    assert_eq!(plan(r#"{"input_ids":[0,99]}"#).unwrap()[0].token_ids, [0, 99]);
}

#[test]
fn a_prompt_must_fit_the_context_with_what_it_asks_for() {
    let body = |len: usize, params: &str| {
        format!(r#"{{"input_ids":{:?},"sampling_params":{params}}}"#, vec![1; len])
    };
    let tokens = |len, params: &str| plan(&body(len, params)).unwrap()[0].max_new_tokens;
    assert_eq!(tokens(CONTEXT - 1, r#"{"max_new_tokens":1}"#), 1);
    assert_eq!(
        tokens(CONTEXT, r#"{"max_new_tokens":0}"#),
        0,
        "a prompt as long as the context can be extracted"
    );
    assert_eq!(tokens(CONTEXT - 10, "{}"), 10, "the default is cut at the context");
    assert_eq!(tokens(CONTEXT - 10, r#"{"max_new_tokens":null}"#), 10);
    for (len, params) in [
        (CONTEXT, r#"{"max_new_tokens":1}"#),
        (CONTEXT, "{}"),
        (CONTEXT + 1, r#"{"max_new_tokens":0}"#),
        (10 * CONTEXT, "{}"),
        (CONTEXT - 1, r#"{"max_new_tokens":2}"#),
        (1, r#"{"max_new_tokens":9223372036854775807}"#),
    ] {
        let text = refused(&body(len, params));
        assert!(
            text.contains(&format!("has {len} tokens")) && text.contains(&format!("length is {CONTEXT}")),
            "{text}"
        );
    }
}

#[test]
fn a_dump_is_made_for_tagged_requests_and_on_request() {
    let id = tether_dump::RequestId::new();
    let captured = |mode, body: &str| plan_with(mode, body).unwrap()[0].capture.is_some();
    let (tagged, all) = (CaptureMode::Tagged, CaptureMode::All);
    assert!(captured(tagged, &format!(r#"{{"rid":"{id}","input_ids":[1]}}"#)));
    assert!(!captured(tagged, r#"{"rid":"theirs","input_ids":[1]}"#));
    assert!(!captured(tagged, r#"{"input_ids":[1]}"#));
    assert!(captured(tagged, r#"{"input_ids":[1],"capture":true}"#));
    assert!(captured(tagged, r#"{"input_ids":[1],"capture":{}}"#));
    assert!(captured(all, r#"{"input_ids":[1]}"#));
    assert!(!captured(all, r#"{"input_ids":[1],"capture":false}"#));
    assert!(!captured(tagged, &format!(r#"{{"rid":"{id}","input_ids":[1],"capture":false}}"#)));
}

#[test]
fn both_axes_name_the_same_points_and_planes_come_in_ascending_order() {
    let by_input = points(r#"{"input_ids":[1],"capture":{"points":[5,2]}}"#);
    assert_eq!(by_input, ["R2", "R5", "R8"]);
    assert_eq!(points(r#"{"input_ids":[1],"capture":{"points":[1,4],"axis":"output"}}"#), by_input);
    assert_eq!(points(r#"{"input_ids":[1],"capture":{"points":[0,8]}}"#), ["R0", "R8"], "R8 once");
    assert_eq!(points(r#"{"input_ids":[1],"capture":{"final":"post_norm"}}"#), ["R2", "R4", "R5", "N"]);
    assert_eq!(points(r#"{"input_ids":[1],"capture":{"final":"both","points":[]}}"#), ["R8", "N"]);
}

#[test]
fn a_point_the_model_cannot_reach_is_refused_with_the_range_on_its_axis() {
    for (capture, part) in [
        (r#"{"points":[9]}"#, "point 9 does not exist; a model of 8 layers has 0 to 8 on the input axis"),
        (r#"{"points":[-1]}"#, "point -1 does not exist; a model of 8 layers has 0 to 8 on the input axis"),
        (
            r#"{"points":[8],"axis":"output"}"#,
            "point 8 does not exist; a model of 8 layers has 0 to 7 on the output axis",
        ),
        (r#"{"points":[-1],"axis":"output"}"#, "point -1 does not exist"),
        (r#"{"points":[9223372036854775807],"axis":"output"}"#, "point 9223372036854775807 does not exist"),
        (r#"{"points":[3,5,3]}"#, "point 3 is listed twice"),
        (r#"{"points":[],"final":"none"}"#, "nothing to capture"),
    ] {
        let text = refused(&format!(r#"{{"input_ids":[1],"capture":{capture}}}"#));
        assert!(text.starts_with("`capture`: ") && text.contains(part), "{text}");
    }
    let text = refused(r#"{"input_ids":[[1],[2]],"capture":[true,{"points":[9]}]}"#);
    assert!(text.starts_with("`capture[1]`: "), "{text}");
}

#[test]
fn the_metadata_says_what_is_known_before_the_pass() {
    let id = tether_dump::RequestId::new();
    let request = format!(
        r#"{{"rid":"{id}","input_ids":[1,2],"capture":{{"rows":"all"}},"sampling_params":{{"max_new_tokens":5}}}}"#
    );
    let request = GenerateRequest::parse(request.as_bytes(), 100).unwrap();
    let originals = Originals::read(Some(b"../../x"));
    let plans = planner(CaptureMode::Tagged).plan(request, Some("call"), &originals).unwrap();
    let capture = plans[0].capture.as_ref().unwrap();
    let metadata = &capture.metadata;
    assert_eq!((metadata.request_id, metadata.call_id.as_deref()), (id, Some("call")));
    assert_eq!(metadata.client_rid.as_deref(), Some("../../x"), "it is metadata only, never a path");
    assert_eq!((metadata.rows, metadata.prompt_tokens, metadata.num_layers), (Rows::All, 2, 8));
    assert_eq!(capture.max_bytes, tether_dump::encoded_len(metadata, 6, 4));
}

#[test]
fn a_proxys_names_for_a_batch_go_to_their_prompts() {
    let names = |header: &[u8], count| {
        let originals = Originals::read(Some(header));
        (0..count).map(|index| originals.of(index, count)).collect::<Vec<_>>()
    };
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(names(br#"["a","b"]"#, 2), [some("a"), some("b")]);
    assert_eq!(names(b"job", 2), [some("job"), some("job")]);
    assert_eq!(names(br#"["a","b"]"#, 3), [None, None, None]);
    assert_eq!(names(b"[a]", 1), [some("[a]")]);
    assert_eq!(Originals::read(None).of(0, 1), None);
}

#[test]
fn a_rid_repeated_in_a_list_is_refused() {
    let text = refused(r#"{"rid":["a","b","a"],"input_ids":[[1],[2],[3]]}"#);
    assert!(text.starts_with("`rid[2]` is a"), "{text}");
}

#[test]
fn text_without_a_tokenizer_is_refused_by_name() {
    assert!(refused(r#"{"text":"a"}"#).contains("tokenizer.json"));
}

#[test]
fn the_log_names_points_on_both_axes() {
    let spec = CaptureSpec::new(&[0, 2, 30, 58], FinalState::Both, 61).unwrap();
    assert_eq!(both_axes(&spec), ("0,2,30,58,61".to_owned(), "embedding,1,29,57,60".to_owned()));
}

#[test]
fn the_model_s_ends_are_kept_back_before_min_new_tokens_even_if_they_end_nothing() {
    use crate::engine::testing::EOS;
    let plan = |params: &str| {
        let mut plans = plan(&format!(r#"{{"input_ids":[1],"sampling_params":{params}}}"#)).unwrap();
        let plan = plans.remove(0);
        (plan.stop_ids, plan.ends)
    };
    assert_eq!(plan(r#"{"min_new_tokens":3}"#), (vec![EOS], vec![EOS]));
    assert_eq!(plan(r#"{"min_new_tokens":3,"ignore_eos":true}"#), (vec![], vec![EOS]));
    assert_eq!(
        plan(r#"{"min_new_tokens":3,"ignore_eos":true,"stop_token_ids":[7]}"#),
        (vec![7], vec![7, EOS])
    );
}
