//! Dumps as folders, for clients that were written for the patched Python server.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tether_dump::{DumpFile, RequestId};
use tether_tests::{
    Checkpoint, Client, ExtractRun, Prompts, Sample, Server, Stack, eventually, read_data_set, scratch,
    write_data_set,
};

/// The folders that are whole, in the order of their names: what a client that scans the directory sees.
fn scan(dir: &Path) -> Vec<(PathBuf, Value)> {
    let entries =
        std::fs::read_dir(dir).expect("the dump directory").map(|entry| entry.expect("an entry").path());
    let mut whole: Vec<_> = entries
        .filter(|path| path.join("done").exists())
        .map(|path| {
            let meta = std::fs::read(path.join("meta.json")).expect("it was whole");
            (path, serde_json::from_slice(&meta).expect("JSON"))
        })
        .collect();
    whole.sort_by(|(one, _), (other, _)| one.cmp(other));
    whole
}

fn token_ids(meta: &Value) -> Vec<i64> {
    let ids = meta["token_ids"].as_array().expect("a list");
    ids.iter().map(|id| id.as_i64().expect("a number")).collect()
}

/// What an old client does: of the folders not yet used, the first with as many tokens as the prompt has.
fn matched_by_count(prompts: &[Vec<i64>], folders: &[(PathBuf, Value)]) -> Vec<Vec<i64>> {
    let mut left: Vec<&Value> = folders.iter().map(|(_, meta)| meta).collect();
    let mut take = |prompt: &Vec<i64>| {
        let at = left.iter().position(|meta| meta["num_tokens"] == prompt.len()).expect("one of that length");
        token_ids(left.remove(at))
    };
    prompts.iter().map(&mut take).collect()
}

async fn send(client: &Client, prompt: &[i64]) -> RequestId {
    let body = json!({"input_ids": prompt, "sampling_params": {"max_new_tokens": 0, "temperature": 0}});
    let reply = client.generate(&body).await.expect(200);
    let id = reply.id();
    let path = reply.header("x-hidden-states-path").expect("the proxy names the folder");
    assert!(path.ends_with(&format!("/req_{id}")), "{path}");
    id
}

#[tokio::test]
async fn matching_by_count_picks_other_requests_folders_and_matching_by_id_does_not() {
    let checkpoint = Checkpoint::float32();
    let stack = Stack::start(Server::of(&checkpoint).flag("--dump-layout", "directory")).await;
    let mut prompts = Prompts::new(5);
    let dir = stack.dumps().path().to_owned();

    // Lengths that differ: counting is enough, so an old client works.
    let different: Vec<Vec<i64>> = (10..18).map(|length| prompts.of_length(length)).collect();
    for prompt in different.iter().rev() {
        send(&stack.client(), prompt).await;
    }
    assert_eq!(matched_by_count(&different, &scan(&dir)), different);

    // Equal lengths, and requests that arrive in another order than the client's list has, as concurrent ones do.
    for (folder, _) in scan(&dir) {
        tether_dump::DumpLayout::remove(&folder).expect("it is ours to delete");
    }
    let equal: Vec<Vec<i64>> = (0..8).map(|_| prompts.of_length(24)).collect();
    let mut ids = BTreeMap::new();
    for (row, prompt) in equal.iter().enumerate().rev() {
        ids.insert(row, send(&stack.client(), prompt).await);
    }
    let folders = scan(&dir);
    let by_count = matched_by_count(&equal, &folders);
    let wrong = by_count.iter().zip(&equal).filter(|(found, prompt)| found != prompt).count();
    assert_eq!(wrong, equal.len(), "counting gives every sample the states of another");

    let by_name: BTreeMap<PathBuf, Value> = folders.into_iter().collect();
    for (row, prompt) in equal.iter().enumerate() {
        let meta = &by_name[&dir.join(format!("req_{}", ids[&row]))];
        assert_eq!(meta["request_id"], ids[&row].to_string());
        assert_eq!(&token_ids(meta), prompt);
    }
}

#[tokio::test]
async fn a_folder_holds_the_states_that_the_file_would_and_goes_through_the_same_gate() {
    let checkpoint = Checkpoint::float32();
    let files = Stack::start(Server::of(&checkpoint)).await;
    let folders = Stack::start(Server::of(&checkpoint).flag("--dump-layout", "directory")).await;
    let prompt = Prompts::new(6).of_length(37);
    let body = json!({"input_ids": prompt, "sampling_params": {"max_new_tokens": 3, "temperature": 0},
                      "capture": {"rows": "all", "final": "both", "points": [1, 8]}});
    let open = async |stack: &Stack| {
        let reply = stack.client().generate(&body).await.expect(200);
        let path = reply.header("x-hidden-states-path").expect("a path").to_owned();
        let dump = DumpFile::open(Path::new(&path)).expect("a whole dump");
        dump.verify().expect("a good dump");
        (reply.id(), path, dump)
    };
    let (_, _, file) = open(&files).await;
    let (id, path, folder) = open(&folders).await;
    assert_eq!(file.head().metadata.points, folder.head().metadata.points);
    assert_eq!(file.head().token_ids, folder.head().token_ids);
    assert_eq!(file.hidden_states(), folder.hidden_states());

    // The same ID again is refused before it is computed, and the proxy deletes a folder as it does a file.
    let direct =
        json!({"rid": id, "input_ids": prompt, "sampling_params": {"max_new_tokens": 0, "temperature": 0}});
    folders.direct().generate(&direct).await.expect(409);
    let delete = folders.client().request(http::Method::DELETE, &format!("/tether/dumps/{id}"));
    folders.client().send(delete.body(Default::default()).expect("a request")).await.expect(200);
    assert!(!Path::new(&path).exists());
}

#[tokio::test]
async fn an_extraction_over_folders_writes_what_one_over_files_does_and_leaves_none() {
    let checkpoint = Checkpoint::float32();
    let mut prompts = Prompts::new(7);
    let samples: Vec<Sample> = (0..24)
        .map(|row| {
            let input_ids = prompts.of_length(5 + row % 6);
            let loss_mask = vec![1; input_ids.len()];
            Sample { input_ids, loss_mask }
        })
        .collect();
    let folder = scratch();
    let data = folder.path().join("data.jsonl");
    write_data_set(&data, &samples);
    let mut sets = Vec::new();
    for layout in ["file", "directory"] {
        let stack = Stack::start(Server::of(&checkpoint).flag("--dump-layout", layout)).await;
        let out = folder.path().join(layout);
        let run = ExtractRun::start(stack.proxy.address(), &data, &out, &["--concurrency", "6"]);
        assert_eq!(run.wait().await.code(), Some(0), "{}", run.process().log_tail());
        let dir = stack.dumps().path().to_owned();
        eventually("every dump is deleted", async || {
            std::fs::read_dir(&dir).expect("the dump directory").next().is_none().then_some(())
        })
        .await;
        sets.push(read_data_set(&out));
    }
    assert_eq!(sets[0].len(), samples.len());
    for (row, file) in &sets[0] {
        let other = &sets[1][row];
        assert_eq!((&file.input_ids, &file.loss_mask), (&other.input_ids, &other.loss_mask));
        // Batches differ between two runs, and so may the last bit.
        let near = |one: &[f32], other: &[f32]| {
            one.len() == other.len()
                && one.iter().zip(other).all(|(a, b)| (a - b).abs() <= 0.02 * a.abs().max(1.0))
        };
        assert!(near(&file.hidden_state, &other.hidden_state), "row {row}");
        assert!(near(&file.aux_hidden_state, &other.aux_hidden_state), "row {row}");
    }
}
