//! `tether-extract` that is stopped, and run again.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use rand::RngExt;
use tempfile::TempDir;
use tether_dump::CapturePoint;
use tether_tests::{
    Checkpoint, DEADLINE, ExtractRun, HIDDEN, NUM_LAYERS, Prompts, Sample, Server, Signal, Stack,
    TrainerFile, deviation, eventually, read_data_set, scratch, trainer_files, write_data_set,
};

/// Requests that a run keeps in flight.
const CONCURRENCY: usize = 8;
const KILLS: usize = 5;

/// A server that takes a while over each dump, so that there is a middle to stop in.
struct Setting {
    stack: Stack,
    folder: TempDir,
    samples: Vec<Sample>,
    _checkpoint: Checkpoint,
}

impl Setting {
    async fn start(rows: usize) -> Self {
        let checkpoint = Checkpoint::float32();
        let stack = Stack::start(Server::of(&checkpoint).with_faulty_disk()).await;
        let mut prompts = Prompts::new(1);
        let sample = |_| {
            let input_ids = prompts.mixed();
            let loss_mask = input_ids.iter().map(|_| prompts.rng().random_range(0..2)).collect();
            Sample { input_ids, loss_mask }
        };
        let mut samples: Vec<_> = (0..rows).map(sample).collect();
        // Rows that are alike are still rows of their own.
        samples[rows - 1] = samples[0].clone();
        let folder = scratch();
        write_data_set(&folder.path().join("data.jsonl"), &samples);
        Self { stack, folder, samples, _checkpoint: checkpoint }
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    fn run(&self) -> ExtractRun {
        let data = self.folder.path().join("data.jsonl");
        ExtractRun::start(
            self.stack.proxy.address(),
            &data,
            &self.out(),
            &["--concurrency", &CONCURRENCY.to_string()],
        )
    }

    async fn finished(&self) -> BTreeMap<usize, TrainerFile> {
        let run = self.run();
        let status = run.wait().await;
        assert_eq!(status.code(), Some(0), "{}", run.process().log_tail());
        read_data_set(&self.out())
    }

    /// Every row is there once, whole, with its own tokens and states.
    async fn check(&self, files: &BTreeMap<usize, TrainerFile>) {
        assert_eq!(files.keys().copied().collect::<Vec<_>>(), (0..self.samples.len()).collect::<Vec<_>>());
        let requests: BTreeSet<_> = files.values().map(|file| file.request_id).collect();
        assert_eq!(requests.len(), files.len(), "two files hold the states of one request");
        for (row, file) in files {
            let sample = Sample { input_ids: file.input_ids.clone(), loss_mask: file.loss_mask.clone() };
            assert_eq!(sample, self.samples[*row], "row {row}");
        }
        // The states are those of the row's tokens, which the model says again when asked afresh.
        for (row, file) in files.iter().step_by(7) {
            let body = serde_json::json!({
                "input_ids": file.input_ids, "capture": {"final": "post_norm"}, "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            });
            let reply = self.stack.client().generate(&body).await.expect(200);
            let dump = self.stack.dumps().read(reply.id());
            let aux = [2, 4, 5].map(|layer| dump.plane(CapturePoint::Residual(layer)));
            let aux: Vec<f32> = (0..dump.token_ids.len())
                .flat_map(|token| aux.map(|plane| &plane[token * HIDDEN..(token + 1) * HIDDEN]))
                .flatten()
                .copied()
                .collect();
            for (found, expected) in [
                (&file.hidden_state[..], dump.plane(CapturePoint::FinalNorm)),
                (&file.aux_hidden_state, &aux),
            ] {
                // Rounded to bfloat16's 8 bits, and what two runs differ by.
                let apart = deviation(found, expected, HIDDEN);
                assert!(apart.element <= 1.0 / 256.0, "row {row}: {apart:?}");
            }
            std::fs::remove_file(self.stack.dumps().path_of(dump.metadata.request_id))
                .expect("it is ours to delete");
        }
    }

    /// Nothing that a run used on the way is left, but at most `dumps_left` dumps.
    async fn nothing_is_left(&self, dumps_left: usize) {
        let dumps = self.stack.dumps();
        let settled = tokio::time::timeout(DEADLINE / 4, async {
            while dumps.ids().len() > dumps_left || !dumps.strangers().is_empty() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        assert!(settled.await.is_ok(), "left are {:?} and {:?}", dumps.ids(), dumps.strangers());
        let known = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "ckpt");
        let group = self.out().join("rows_0-2000");
        let entries =
            std::fs::read_dir(group).expect("it is there").map(|entry| entry.expect("readable").path());
        let others: Vec<_> = entries.filter(|path| !known(path)).collect();
        assert!(others.is_empty(), "{others:?}");
    }
}

fn modified(files: &BTreeMap<usize, PathBuf>) -> BTreeMap<usize, std::time::SystemTime> {
    let time = |path: &PathBuf| {
        std::fs::metadata(path).and_then(|file| file.modified()).expect("a finished file stays")
    };
    files.iter().map(|(row, path)| (*row, time(path))).collect()
}

#[tokio::test]
async fn a_run_that_nobody_disturbs_is_complete() {
    assert_eq!(NUM_LAYERS, 8, "the default points in `check` are those of 8 layers");
    let setting = Setting::start(60).await;
    let files = setting.finished().await;
    setting.check(&files).await;
    setting.nothing_is_left(0).await;
}

/// The kill -9, and IO-10.
#[tokio::test]
async fn a_run_killed_at_any_moment_is_completed_by_the_next() {
    let setting = Setting::start(150).await;
    setting.stack.server.fault().delay(4);
    let mut rng = Prompts::new(2);
    let mut done = 0;
    for _ in 0..KILLS {
        let run = setting.run();
        // Killed with some more rows done, at whatever the others are doing then.
        let more = rng.rng().random_range(1..25);
        eventually("more rows are done", || async {
            assert_eq!(run.process().exited(), None, "{}", run.process().log_tail());
            (trainer_files(&setting.out()).len() >= done + more).then_some(())
        })
        .await;
        run.process().signal(Signal::Kill);
        run.wait().await;
        let finished = trainer_files(&setting.out());
        assert!(finished.len() < 150, "there was nothing left to interrupt");
        done = finished.len();
    }
    setting.stack.server.fault().none();
    let before = modified(&trainer_files(&setting.out()));
    let files = setting.finished().await;
    setting.check(&files).await;
    // A reply that lay unread in the killed client's socket was delivered, and its dump with it. Nobody knows of that one
    // any more but the server's budget and --dump-ttl.
    setting.nothing_is_left(KILLS * CONCURRENCY).await;
    // What was recorded as done was not done again. A file whose row the kill kept out of the ledger may be.
    let redone = before.iter().filter(|(row, time)| files[row].modified != **time).count();
    assert!(redone <= CONCURRENCY, "{redone} finished files were written again");
}

/// IO-07.
#[tokio::test]
async fn a_second_run_does_only_what_is_missing() {
    let setting = Setting::start(100).await;
    setting.stack.server.fault().delay(4);
    let run = setting.run();
    eventually("a fifth is done", || async { (trainer_files(&setting.out()).len() >= 20).then_some(()) })
        .await;
    // Asked to stop, not killed: what has been begun is brought to its end and recorded.
    run.process().signal(Signal::Terminate);
    let status = run.wait().await;
    assert_ne!(status.code(), Some(0), "an incomplete set is no success: {}", run.process().log_tail());
    let before = modified(&trainer_files(&setting.out()));
    assert!((20..100).contains(&before.len()), "{}", before.len());
    setting.stack.server.fault().none();
    let served = || async {
        let scrape = tether_tests::Scrape::of(&setting.stack.client()).await;
        scrape.sum("tether_proxy_requests_answered_total", &[("route", "generate"), ("class", "2xx")])
    };
    let served_before = served().await;
    let files = setting.finished().await;
    assert_eq!(
        served().await - served_before,
        (100 - before.len()) as f64,
        "requests beyond the missing rows"
    );
    let after: BTreeMap<_, _> = files.iter().map(|(row, file)| (*row, file.modified)).collect();
    assert!(before.iter().all(|(row, time)| after[row] == *time), "a finished file was written again");
    setting.check(&files).await;
    setting.nothing_is_left(0).await;
    // A third finds nothing to do.
    let served_before = served().await;
    let again = setting.finished().await;
    assert_eq!(served().await, served_before);
    assert!(again.iter().all(|(row, file)| after[row] == file.modified));
}

#[tokio::test]
async fn a_file_that_was_damaged_or_deleted_is_made_again() {
    let setting = Setting::start(40).await;
    let files = setting.finished().await;
    let cut = &files[&3].path;
    let bytes = std::fs::read(cut).expect("it is there");
    std::fs::write(cut, &bytes[..bytes.len() / 2]).expect("it is ours");
    std::fs::write(&files[&5].path, b"").expect("it is ours");
    std::fs::write(&files[&7].path, vec![0; bytes.len()]).expect("it is ours");
    std::fs::remove_file(&files[&9].path).expect("it is ours");
    let again = setting.finished().await;
    setting.check(&again).await;
    let redone: Vec<_> = again
        .iter()
        .filter(|(row, file)| files[row].request_id != file.request_id)
        .map(|(row, _)| *row)
        .collect();
    assert_eq!(redone, [3, 5, 7, 9]);
}

#[tokio::test]
async fn a_run_survives_a_restart_of_the_server() {
    let setting = Setting::start(80).await;
    setting.stack.server.fault().delay(4);
    let run = setting.run();
    eventually("some rows are done", || async { (trainer_files(&setting.out()).len() >= 10).then_some(()) })
        .await;
    setting.stack.server.kill();
    setting.stack.server.start_again().await;
    setting.stack.server.fault().none();
    assert_eq!(run.wait().await.code(), Some(0), "{}", run.process().log_tail());
    setting.check(&read_data_set(&setting.out())).await;
    setting.nothing_is_left(0).await;
}

#[tokio::test]
async fn a_row_that_the_server_refuses_is_named_and_the_set_is_not_called_complete() {
    let setting = Setting::start(20).await;
    let mut samples = setting.samples.clone();
    samples[4] = Sample { input_ids: vec![5, 100_000], loss_mask: vec![1, 1] };
    write_data_set(&setting.folder.path().join("data.jsonl"), &samples);
    let run = setting.run();
    let status = run.wait().await;
    assert!(status.code().is_some_and(|code| code != 0), "{status}: {}", run.process().log_tail());
    assert!(run.process().log().contains("100000"), "{}", run.process().log_tail());
    let rows: Vec<_> = trainer_files(&setting.out()).into_keys().collect();
    assert_eq!(rows, (0..20).filter(|row| *row != 4).collect::<Vec<_>>());
}
