//! Which points of the forward pass a dump holds, and that each plane is what its name says, by value.

use serde_json::{Value, json};
use tether_dump::{CapturePoint, FinalState, RequestId, Rows, TokenHash};
use tether_tests::{
    Checkpoint, Client, Dump, HIDDEN, Head, NUM_LAYERS, Prompts, Reply, Server, assert_same_states, deviation,
};
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

/// Asks the server for a capture of `prompt`.
async fn ask(client: &Client, prompt: &[i64], capture: Value, new_tokens: usize) -> Reply {
    let rid = RequestId::new();
    let body = json!({"rid": rid, "input_ids": prompt, "capture": capture, "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0}});
    client.generate(&body).await
}

impl Setting {
    async fn dump(&self, prompt: &[i64], capture: Value) -> Dump {
        let reply = ask(&self.server.client(), prompt, capture, 0).await.expect(200);
        self.server.dumps().read(reply.id())
    }

    /// `R[0]` of `prompt`: rows of the embedding.
    fn embedded(&self, prompt: &[i64]) -> Vec<f32> {
        let embedding = self.checkpoint.weight("model.embed_tokens.weight");
        let row = |id: &i64| usize::try_from(*id).expect("a token ID");
        prompt.iter().flat_map(|id| &embedding[row(id) * HIDDEN..(row(id) + 1) * HIDDEN]).copied().collect()
    }
}

fn residual(layer: usize) -> CapturePoint {
    CapturePoint::Residual(u16::try_from(layer).expect("a small number"))
}

/// Planes of different points are this far apart at least: they are different stages of a network, not roundings.
#[track_caller]
fn assert_different(one: &[f32], other: &[f32]) {
    let apart = deviation(one, other, HIDDEN);
    assert!(apart.relative > 0.01, "{apart:?}");
}

#[track_caller]
fn assert_equal(one: &[f32], other: &[f32]) {
    let apart = deviation(one, other, HIDDEN);
    assert!(apart.relative <= 1e-4 && apart.element <= 1e-3, "{apart:?}");
}

/// LY-01.
#[tokio::test]
async fn a_point_on_the_input_axis_is_what_enters_that_layer() {
    let setting = setting().await;
    let prompt = Prompts::new(1).of_length(33);
    // The axis is anchored by value: layer 0 is entered by the embedding.
    let first = setting.dump(&prompt, json!({"points": [0, 1], "final": "none"})).await;
    assert_eq!(first.point_names(), ["R0", "R1"]);
    assert_equal(first.plane(residual(0)), &setting.embedded(&prompt));
    assert_different(first.plane(residual(1)), &setting.embedded(&prompt));
    // From there on, what leaves layer k - 1 enters layer k, and is nothing else.
    for k in 1..=NUM_LAYERS {
        let entering = setting.dump(&prompt, json!({"points": [k], "axis": "input", "final": "none"})).await;
        let leaving =
            setting.dump(&prompt, json!({"points": [k - 1], "axis": "output", "final": "none"})).await;
        let pair = setting.dump(&prompt, json!({"points": [k - 1, k], "final": "none"})).await;
        assert_eq!(entering.point_names(), [format!("R{k}")]);
        assert_same_states(&leaving, &entering);
        assert_equal(pair.plane(residual(k)), entering.plane(residual(k)));
        assert_different(pair.plane(residual(k - 1)), entering.plane(residual(k)));
    }
}

/// LY-02.
#[tokio::test]
async fn every_point_up_to_what_leaves_the_last_layer_can_be_had_and_no_other() {
    let setting = setting().await;
    let prompt = Prompts::new(2).of_length(20);
    for point in [0, NUM_LAYERS - 1, NUM_LAYERS] {
        let dump = setting.dump(&prompt, json!({"points": [point], "final": "none"})).await;
        assert_eq!(dump.point_names(), [format!("R{point}")]);
        assert_eq!(dump.plane(residual(point)).len(), prompt.len() * HIDDEN);
    }
    // What leaves the last layer is the final state before its norm.
    let last = setting.dump(&prompt, json!({"points": [NUM_LAYERS], "final": "none"})).await;
    let finals = setting.dump(&prompt, json!({"points": [], "final": "both"})).await;
    assert_equal(last.plane(residual(NUM_LAYERS)), finals.plane(residual(NUM_LAYERS)));

    let too_far = NUM_LAYERS as i64 + 1;
    for (capture, named) in [
        (json!({"points": [2, too_far]}), too_far),
        (json!({"points": [-1]}), -1),
        (json!({"points": [NUM_LAYERS], "axis": "output"}), NUM_LAYERS as i64),
    ] {
        let error = ask(&setting.server.client(), &prompt, capture.clone(), 0).await.expect(400).error_text();
        assert!(error.contains(&named.to_string()) && error.contains("point"), "{capture}: {error}");
    }
}

/// LY-06; CONTRACT: planes are ascending, whatever order was asked for.
#[tokio::test]
async fn exactly_the_points_asked_for_come_in_forward_order() {
    let setting = setting().await;
    let prompt = Prompts::new(3).of_length(29);
    let dump = setting.dump(&prompt, json!({"points": [3, 1, 2]})).await;
    assert_eq!(dump.point_names(), ["R1", "R2", "R3", "R8"]);
    assert_eq!(dump.metadata.final_state, FinalState::PreNorm);
    for k in [1, 2, 3, 8] {
        let alone = setting.dump(&prompt, json!({"points": [k], "final": "none"})).await;
        assert_equal(dump.plane(residual(k)), alone.plane(residual(k)));
    }
}

/// LY-07 and LY-08.
#[tokio::test]
async fn logits_rebuilt_from_the_final_state_give_the_served_token() {
    let setting = setting().await;
    let (head, client) = (Head::of(&setting.checkpoint), setting.server.client());
    let mut prompts = Prompts::new(4);
    let mut misled = 0;
    for length in 1..=50 {
        let prompt = prompts.of_length(length);
        let reply = ask(&client, &prompt, json!({"points": [2], "final": "both"}), 1).await.expect(200);
        let dump = setting.server.dumps().read(reply.id());
        let (before, after) = (dump.plane(residual(NUM_LAYERS)), dump.plane(CapturePoint::FinalNorm));
        assert_equal(after, &head.norm(before));
        let served = reply.output_ids()[0];
        assert_eq!(head.token(dump.last_row(CapturePoint::FinalNorm)), served);
        assert_eq!(head.token(&head.norm(dump.last_row(residual(NUM_LAYERS)))), served);
        // Taking one for the other must show: this is how trainings were lost.
        misled += usize::from(head.token(dump.last_row(residual(NUM_LAYERS))) != served);
    }
    assert!(misled >= 10, "only {misled} of 50 tokens differ without the norm");
}

/// LY-07: each form of the final state, asked for by name, and the name it is recorded under.
#[tokio::test]
async fn the_final_state_is_the_one_that_was_asked_for() {
    let setting = setting().await;
    let prompt = Prompts::new(5).of_length(25);
    let both = setting.dump(&prompt, json!({"points": [4], "final": "both"})).await;
    for (asked, state, names) in [
        ("pre_norm", FinalState::PreNorm, vec!["R4", "R8"]),
        ("post_norm", FinalState::PostNorm, vec!["R4", "N"]),
        ("both", FinalState::Both, vec!["R4", "R8", "N"]),
        ("none", FinalState::None, vec!["R4"]),
    ] {
        let dump = setting.dump(&prompt, json!({"points": [4], "final": asked})).await;
        assert_eq!(
            (dump.metadata.final_state, dump.point_names()),
            (state, names.into_iter().map(str::to_owned).collect())
        );
        for point in &dump.metadata.points {
            assert_equal(dump.plane(*point), both.plane(*point));
        }
    }
    // R[n] once, even if it was listed too.
    let listed = setting.dump(&prompt, json!({"points": [4, NUM_LAYERS], "final": "pre_norm"})).await;
    assert_eq!(listed.point_names(), ["R4", "R8"]);
}

/// LY-11.
#[tokio::test]
async fn any_number_of_points_works() {
    let setting = setting().await;
    let prompt = Prompts::new(6).of_length(31);
    let all: Vec<_> = (0..=NUM_LAYERS).collect();
    let every = setting.dump(&prompt, json!({"points": all, "final": "post_norm"})).await;
    assert_eq!(every.metadata.points.len(), NUM_LAYERS + 2);
    for points in [vec![5], vec![1, 7], vec![0, 2, 4, 6], vec![1, 2, 3, 5, 7]] {
        let dump = setting.dump(&prompt, json!({"points": points, "final": "post_norm"})).await;
        assert_eq!(dump.metadata.points.len(), points.len() + 1);
        for point in &dump.metadata.points {
            assert_equal(dump.plane(*point), every.plane(*point));
        }
    }
}

/// HS-19: as many tokens as planes, so that a swap of the two axes would fit by shape.
#[tokio::test]
async fn with_as_many_tokens_as_planes_the_axes_are_still_tokens_first() {
    let setting = setting().await;
    let prompt = Prompts::new(7).of_length(4);
    let dump = setting.dump(&prompt, json!({"points": [0, 3, 5]})).await;
    assert_eq!((dump.token_ids.len(), dump.metadata.points.len()), (4, 4));
    assert_equal(dump.plane(residual(0)), &setting.embedded(&prompt));
    for k in [3, 5] {
        let alone = setting.dump(&prompt, json!({"points": [k], "final": "none"})).await;
        assert_equal(dump.plane(residual(k)), alone.plane(residual(k)));
    }
}

/// HS-20: three auxiliary points and a final state in one dump, each found by its name.
#[tokio::test]
async fn the_default_points_are_named_and_none_is_another() {
    let setting = setting().await;
    let prompt = Prompts::new(8).of_length(40);
    let dump = setting.dump(&prompt, json!(true)).await;
    // [2, n/2, n-3] and R[n].
    assert_eq!(dump.point_names(), ["R2", "R4", "R5", "R8"]);
    assert_eq!(dump.hidden_size, HIDDEN);
    let points = &dump.metadata.points;
    for (i, one) in points.iter().enumerate() {
        points[..i].iter().for_each(|other| assert_different(dump.plane(*one), dump.plane(*other)));
    }
    let explicit = setting
        .dump(&prompt, json!({"points": [2, 4, 5], "axis": "input", "final": "pre_norm", "rows": "prompt"}));
    assert_same_states(&explicit.await, &dump);
}

#[tokio::test]
async fn rows_of_generated_tokens_follow_those_of_the_prompt() {
    let setting = setting().await;
    let client = setting.server.client();
    let prompt = Prompts::new(9).of_length(23);
    let reply = ask(&client, &prompt, json!({"rows": "all"}), 6).await.expect(200);
    let dump = setting.server.dumps().read(reply.id());
    // The last token was never fed to the model.
    let fed = [&prompt[..], &reply.output_ids()[..5]].concat();
    assert_eq!((&dump.token_ids, dump.metadata.rows, dump.metadata.prompt_tokens), (&fed, Rows::All, 23));
    assert_eq!(dump.metadata.token_hash, TokenHash::of(&prompt));
    // Causal: the same tokens given as a prompt have the same states.
    let prefilled = setting.dump(&fed, json!(true)).await;
    for point in &dump.metadata.points {
        assert_equal(dump.plane(*point), prefilled.plane(*point));
    }
    let prompt_only = ask(&client, &prompt, json!({"rows": "prompt"}), 6).await.expect(200);
    assert_eq!(setting.server.dumps().read(prompt_only.id()).token_ids, prompt);
}

#[tokio::test]
async fn the_reply_repeats_what_was_captured() {
    let setting = setting().await;
    let prompt = Prompts::new(10).of_length(12);
    let reply = ask(&setting.server.client(), &prompt, json!({"points": [5, 1], "final": "both"}), 1)
        .await
        .expect(200);
    let path = setting.server.dumps().path_of(reply.id());
    let expected = json!({
        "path": path, "points": ["R1", "R5", "R8", "N"], "final": "both", "rows": "prompt", "num_tokens": 12,
        "dtype": "float32", "token_hash": TokenHash::of(&prompt).to_string(),
    });
    assert_eq!(reply.json()["meta_info"]["capture"], expected);
    let dump = setting.server.dumps().read(reply.id());
    assert_eq!(
        (dump.metadata.num_layers as usize, dump.metadata.dtype),
        (NUM_LAYERS, tether_dump::Dtype::Float32)
    );
    assert_eq!(dump.metadata.config_hash.len(), 64);
}

#[tokio::test]
async fn a_request_that_opts_out_leaves_no_dump() {
    let setting = setting().await;
    let client = setting.server.client();
    let rid = RequestId::new();
    let body = json!({"rid": rid, "input_ids": [5, 6], "capture": false, "sampling_params": {"max_new_tokens": 1, "temperature": 0}});
    let reply = client.generate(&body).await.expect(200);
    assert_eq!(reply.header("x-tether-capture"), Some("none"));
    assert_eq!((reply.id(), &reply.json()["meta_info"]["capture"]), (rid, &Value::Null));
    assert!(!setting.server.dumps().path_of(rid).exists());
    // Nor does one without an ID that does not ask for it.
    let reply = client
        .generate(&json!({"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}))
        .await
        .expect(200);
    assert_eq!(reply.json()["meta_info"]["capture"], Value::Null);
}

#[tokio::test]
async fn a_request_without_an_id_that_asks_for_a_dump_gets_one_under_a_fresh_id() {
    let setting = setting().await;
    let body = json!({"rid": "my-name:1", "input_ids": [7, 8, 9], "capture": true, "sampling_params": {"max_new_tokens": 0, "temperature": 0}});
    let reply = setting.server.client().generate(&body).await.expect(200);
    let meta = &reply.json()["meta_info"];
    assert_eq!(meta["id"], "my-name:1");
    let dump = Dump::read(meta["capture"]["path"].as_str().expect("a path").as_ref());
    assert_eq!((dump.metadata.client_rid.as_deref(), dump.token_ids), (Some("my-name:1"), vec![7, 8, 9]));
}

#[tokio::test]
async fn each_prompt_of_a_batch_can_have_a_capture_of_its_own() {
    let setting = setting().await;
    let rids = [RequestId::new(), RequestId::new(), RequestId::new()];
    let body = json!({
        "rid": rids, "input_ids": [[5, 6, 7], [8, 9], [10]], "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "capture": [{"points": [1]}, false, {"points": [2, 3], "final": "post_norm"}],
    });
    let reply = setting.server.client().generate(&body).await.expect(200);
    assert_eq!(reply.ids(), rids);
    let dumps = setting.server.dumps();
    assert_eq!(dumps.read(rids[0]).point_names(), ["R1", "R8"]);
    assert!(!dumps.path_of(rids[1]).exists());
    assert_eq!(dumps.read(rids[2]).point_names(), ["R2", "R3", "N"]);
}
