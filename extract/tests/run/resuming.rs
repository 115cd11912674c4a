//! Runs that were cut off, and the runs after them.

use std::{
    collections::HashMap,
    os::unix::fs::FileExt as _,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use tether_extract::{
    extractor::{Step, StepHook},
    ledger::Ledger,
    lock::DirectoryLock,
    points::{Axis, Points},
};

use super::*;
use crate::fake::{Answer, Make};

/// Ends a run at the `count`-th time that a sample has got to `step`.
fn crash_after(step: Step, count: usize) -> Option<StepHook> {
    let seen = AtomicUsize::new(0);
    Some(StepHook(Arc::new(move |at, _| at != step || seen.fetch_add(1, Ordering::SeqCst) + 1 < count)))
}

fn recorded(job: &Job) -> HashMap<u64, tether_extract::ledger::Stored> {
    Ledger::open_existing(&job.out()).unwrap().samples().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_finished_run_asks_for_nothing_and_writes_nothing() {
    let fake = Fake::start(|_, _| Answer::good()).await;
    let job = Job::new(&fake, &rows(20));
    assert!(job.run().await.complete);
    let times = job.times();
    fake.state.down.store(true, Ordering::SeqCst);
    let again = job.run().await;
    assert_eq!((again.already_done, again.written, again.complete), (20, 0, true));
    assert_eq!(job.times(), times);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_at_any_step_loses_nothing_and_doubles_nothing() {
    for step in [Step::Leased, Step::FileWritten, Step::Committed] {
        let fake = Fake::start(|_, _| Answer::good()).await;
        let job = Job::new(&fake, &rows(40));
        let first = job.run_with(|options| options.on_step = crash_after(step, 9)).await.unwrap();
        assert!(!first.complete && first.pending > 0, "{step:?}");
        assert!(fake.dumps() > 0, "{step:?}: the crash leaves a dump");
        let done = recorded(&job);
        let times = job.times();
        let requests = fake.requests();

        let second = job.run().await;
        assert!(second.complete, "{step:?}: {second}");
        assert_eq!(second.already_done, done.len() as u64, "{step:?}");
        assert_eq!(second.written, 40 - done.len() as u64);
        assert_eq!(
            fake.requests() - requests,
            40 - done.len(),
            "{step:?}: only what is missing is asked for"
        );
        assert_eq!(fake.dumps(), 0, "{step:?}");
        let now = job.times();
        for stored in done.values() {
            let path = job.out().join(&stored.path);
            assert_eq!(now[&path], times[&path], "{step:?}: a finished file is left alone");
        }
        let verified = job.verify();
        assert!(verified.is_sound() && verified.is_complete(), "{step:?}: {verified}");
        assert_eq!(now.len(), 40);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_done_is_known_by_row_and_not_by_count() {
    // Row 3 is still on its way while rows after it are done.
    let fake = Fake::start(|tokens, _| {
        let delay = if tokens[0] == 300 { Duration::from_secs(600) } else { Duration::ZERO };
        Make { delay, ..Make::default() }.into()
    })
    .await;
    let job = Job::new(&fake, &rows(60));
    let hook = crash_after(Step::Committed, 40);
    let running =
        job.run_with(|options| (options.on_step, options.request_timeout) = (hook, Duration::from_secs(3)));
    let first = running.await.unwrap();
    assert!(first.pending > 0);
    let done = recorded(&job);
    assert!(!done.contains_key(&3) && done.len() >= 40, "{}", done.len());
    fake.behave(|_, _| Answer::good());
    let second = job.run().await;
    assert!(second.complete);
    assert_eq!(second.written, 60 - done.len() as u64);
    let mut rows: Vec<_> = recorded(&job).into_keys().collect();
    rows.sort_unstable();
    assert_eq!(rows, (0..60).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_files_are_made_again_and_the_others_are_not() {
    let fake = Fake::start(|_, _| Answer::good()).await;
    let job = Job::new(&fake, &rows(12));
    assert!(job.run().await.complete);
    let whole = fs::read(job.ckpt(2)).unwrap();
    fs::write(job.ckpt(1), b"").unwrap();
    fs::write(job.ckpt(2), vec![0; whole.len()]).unwrap();
    fs::write(job.ckpt(3), &whole[..40]).unwrap();
    fs::remove_file(job.ckpt(4)).unwrap();
    let verified = job.verify();
    assert_eq!((verified.good, verified.bad.len(), verified.is_sound()), (8, 4, false));
    let times = job.times();
    let report = job.run().await;
    assert_eq!((report.already_done, report.redone, report.written, report.complete), (8, 4, 4, true));
    assert_eq!(fake.requests(), 16);
    let now = job.times();
    for row in [0, 5, 6, 7, 8, 9, 10, 11] {
        assert_eq!(now[&job.ckpt(row)], times[&job.ckpt(row)]);
    }
    assert!(job.verify().is_complete());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_byte_in_the_middle_is_found_by_verify_and_by_a_full_check() {
    let fake = Fake::start(|_, _| Answer::good()).await;
    let long: Vec<i64> = (0..4000).collect();
    let job = Job::new(&fake, &[row(&long)]);
    assert!(job.run().await.complete);
    let file = fs::File::options().read(true).write(true).open(job.ckpt(0)).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 30_000).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 30_000).unwrap();
    let verified = job.verify();
    assert_eq!(verified.bad[0].1, "does not hold what was written");
    let report = job.run_with(|options| options.verify = Depth::Full).await.unwrap();
    assert_eq!((report.redone, report.written), (1, 1));
    assert!(job.verify().is_complete());
}

#[tokio::test(flavor = "multi_thread")]
async fn other_settings_in_the_same_directory_are_refused_by_name() {
    let fake = Fake::start(|_, _| Answer::good()).await;
    let job = Job::new(&fake, &rows(6));
    assert!(job.run_with(|options| options.wanted.limit = Some(3)).await.unwrap().complete);
    let requests = fake.requests();

    let points = Points::new("2,3,5".parse().unwrap(), Axis::Input);
    let error = job.run_with(|options| options.points = Some(points)).await.unwrap_err().to_string();
    assert!(
        error.contains("the list of capture points is `R2, R3, R5, N`, this run began with `R2, R4, R5, N`"),
        "{error}"
    );
    let same = Points::new("1,3,4".parse().unwrap(), Axis::Output);
    let same = job.run_with(|options| (options.points, options.wanted.limit) = (Some(same), Some(3))).await;
    assert!(same.unwrap().complete);

    let original = fs::read(job.data()).unwrap();
    let mut other = rows(7);
    other.swap(1, 2);
    fs::write(job.data(), other.join("\n")).unwrap();
    let error = job.run_with(|_| {}).await.unwrap_err().to_string();
    assert!(error.contains("the data set (hash of the file) is `"), "{error}");
    fs::write(job.data(), original).unwrap();
    assert_eq!(fake.requests(), requests, "none of these asked the server for anything");

    fake.behave(|_, _| Make { model: "other", ..Make::default() }.into());
    let report = job.run().await;
    assert_eq!((report.written, report.pending), (0, 3));
    assert_eq!(
        report.stopped.unwrap(),
        "the model is `other`, this run began with `tiny`; use another --out for other settings"
    );
    assert_eq!(fake.requests(), requests + 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn appended_lines_are_extracted_and_the_others_left_alone() {
    let fake = Fake::start(|_, _| Answer::good()).await;
    // With and without a line feed at the end.
    let job = Job::new(&fake, &rows(6));
    assert!(job.run().await.complete);
    let times = job.times();
    for (count, end) in [(9, "\n"), (10, ""), (14, "")] {
        fs::write(job.data(), rows(count).join("\n") + end).unwrap();
        let report = job.run().await;
        assert!(report.complete, "{report}");
    }
    assert_eq!(fake.requests(), 14);
    let now = job.times();
    assert!(times.iter().all(|(path, time)| now[path] == *time));
    let verified = job.verify();
    assert!(verified.is_sound() && verified.is_complete() && verified.good == 14, "{verified}");

    // A line that goes on, one that changes its mask only, and lines that are gone.
    let text = rows(14).join("\n");
    let longer = text.clone() + "\u{20}\n" + &row(&[9]);
    let masked =
        text.replacen(r#"{"input_ids":[0]"#, r#"{"loss_mask":[0],"input_ids":[0]"#, 1) + "\n" + &row(&[9]);
    assert_ne!(masked, text.clone() + "\n" + &row(&[9]));
    for changed in [longer, masked, rows(13).join("\n") + "\n"] {
        fs::write(job.data(), changed).unwrap();
        let error = job.run_with(|_| {}).await.unwrap_err().to_string();
        assert!(error.contains("the data set (hash of the file) is `"), "{error}");
    }
    assert_eq!(fake.requests(), 14);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_is_worked_in_by_one_process_at_a_time() {
    let fake = Fake::start(|_, _| Answer::good()).await;
    let job = Job::new(&fake, &rows(3));
    fs::create_dir_all(job.out()).unwrap();
    let held = DirectoryLock::take(&job.out()).unwrap();
    assert!(matches!(job.run_with(|_| {}).await, Err(RunError::Lock(_))));
    drop(held);
    assert!(job.run().await.complete);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_finishes_what_is_in_flight_and_the_rest_is_resumed() {
    let fake = Fake::start(|_, _| Make { delay: Duration::from_millis(10), ..Make::default() }.into()).await;
    let job = Job::new(&fake, &rows(300));
    let stop = Stop::default();
    let asked = stop.clone();
    let state = Arc::clone(&fake.state);
    let stopper = tokio::spawn(async move {
        while state.asked.lock().unwrap().len() < 30 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        asked.ask("interrupted");
    });
    let first = job.run_until(|_| {}, stop).await.unwrap();
    stopper.await.unwrap();
    assert_eq!(first.stopped.as_deref(), Some("interrupted"));
    assert!(first.written >= 20 && first.pending > 0 && first.failed == 0, "{first}");
    assert_eq!(first.written, fake.requests() as u64, "whatever was asked for is finished");
    assert_eq!(fake.dumps(), 0);
    let second = job.run().await;
    assert_eq!((second.already_done, second.complete), (first.written, true));
    assert_eq!(fake.requests(), 300);
}

#[tokio::test(flavor = "multi_thread")]
async fn unfinished_files_of_a_killed_run_are_removed() {
    let fake = Fake::start(|_, _| Answer::good()).await;
    let job = Job::new(&fake, &rows(6));
    assert!(job.run_with(|options| options.wanted.limit = Some(2)).await.unwrap().complete);
    let half = job.out().join("rows_0-2000/.data_2.ckpt.aBcDeF.tmp");
    fs::write(&half, b"half").unwrap();
    fs::create_dir_all(job.out().join(".tether-staging")).unwrap();
    fs::write(job.out().join(".tether-staging/x.safetensors"), b"half").unwrap();
    assert!(job.run().await.complete);
    assert!(!half.exists() && !job.out().join(".tether-staging").exists());
}
