//! Runs in which something goes wrong.

use std::{os::unix::fs::PermissionsExt as _, sync::atomic::Ordering};

use tether_extract::{ledger::Ledger, plan::TooLong};

use super::*;
use crate::fake::{Answer, Make, Spoil};

#[tokio::test(flavor = "multi_thread")]
async fn bad_rows_are_counted_with_line_and_reason_and_the_others_are_done() {
    let fake = Fake::start(|_, _| Answer::good()).await;
    let mut data = rows(60);
    data[3] = "not json".into();
    data[20] = r#"{"id": "empty", "input_ids": []}"#.into();
    data[40] = r#"{"input_ids": [1, 2], "loss_mask": [1]}"#.into();
    let job = Job::new(&fake, &data);
    let report = job.run().await;
    assert_eq!((report.written, report.failed, report.complete), (57, 3, false));
    let listed = failures(&job.out());
    let lines: Vec<_> = listed.iter().map(|failure| failure["line"].as_u64().unwrap()).collect();
    assert_eq!(lines, [4, 21, 41]);
    assert_eq!(listed[1]["id"], "empty");
    assert_eq!(listed[1]["reason"], "`input_ids` is empty");
    assert_eq!(listed[1]["kind"], "bad_row");
    assert!(!job.ckpt(3).exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn too_long_rows_are_never_cut() {
    let fake = Fake::start(|_, _| Answer::good()).await;
    let job = Job::new(&fake, &rows(14));
    let report = job.run_with(|options| options.wanted.max_length = Some(6)).await.unwrap();
    assert_eq!((report.written, report.failed), (12, 2));
    assert_eq!(failures(&job.out())[0]["reason"], "7 tokens are more than --max-length 6");
    let skip = |options: &mut RunOptions| {
        (options.wanted.max_length, options.wanted.too_long) = (Some(6), TooLong::Skip);
    };
    let report = job.run_with(skip).await.unwrap();
    assert_eq!((report.already_done, report.left_out, report.complete), (12, 2, true));
    assert_eq!(fake.requests(), 12);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dump_of_other_tokens_or_another_request_is_never_used() {
    for spoil in [Spoil::OtherTokens, Spoil::OtherRequest] {
        let fake = Fake::start(
            move |tokens, _| if tokens[0] == 500 { Answer::spoilt(spoil) } else { Answer::good() },
        )
        .await;
        let job = Job::new(&fake, &rows(12));
        let report = job.run().await;
        assert_eq!((report.written, report.failed, report.complete), (11, 1, false), "{spoil:?}");
        // Every attempt counts: two retries after the first.
        assert_eq!(report.mismatches, 3, "{spoil:?}");
        let failure = &failures(&job.out())[0];
        assert_eq!(failure["kind"], "mismatch");
        let what = if spoil == Spoil::OtherTokens {
            "the dump's token hash is `"
        } else {
            "the dump's request ID is `"
        };
        assert!(failure["reason"].as_str().unwrap().starts_with(what), "{failure}");
        assert_eq!(fake.dumps(), 3, "what proves the fault is left in place");
        assert!(!job.ckpt(5).exists());
        assert!(job.verify().is_sound());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mismatch_that_the_proxy_finds_counts_as_one() {
    let fake = Fake::start(|tokens, attempt| match tokens[0] {
        400 if attempt == 0 => Answer::Mismatch,
        500 => Answer::Mismatch,
        _ => Answer::good(),
    })
    .await;
    let job = Job::new(&fake, &rows(12));
    let report = job.run().await;
    // One that a second attempt mends, and three attempts at the one that stays so.
    assert_eq!((report.written, report.failed, report.mismatches, report.retries), (11, 1, 4, 3));
    let failure = &failures(&job.out())[0];
    assert_eq!(failure["kind"], "mismatch");
    assert_eq!(failure["reason"], "the proxy withholds the reply: not the request's dump");
}

#[tokio::test(flavor = "multi_thread")]
async fn values_that_are_not_finite_fail_their_sample_and_no_other() {
    for spoil in [Spoil::Nan, Spoil::TooLarge] {
        let fake = Fake::start(move |tokens, _| {
            let spoil = if tokens[0] == 500 { spoil } else { Spoil::Nothing };
            Make { spoil, dtype: tether_dump::Dtype::Float32, ..Make::default() }.into()
        })
        .await;
        let job = Job::new(&fake, &rows(12));
        let report = job.run().await;
        assert_eq!((report.written, report.failed, report.not_finite), (11, 1, 3), "{spoil:?}");
        let failure = &failures(&job.out())[0];
        assert_eq!(failure["kind"], "not_finite");
        assert!(failure["reason"].as_str().unwrap().contains("not finite"), "{failure}");
        assert_eq!(fake.dumps(), 0);
        assert!(!job.ckpt(5).exists());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dump_that_has_rotted_is_asked_for_again() {
    let fake =
        Fake::start(|_, attempt| if attempt == 0 { Answer::spoilt(Spoil::Rot) } else { Answer::good() })
            .await;
    let job = Job::new(&fake, &rows(8));
    let report = job.run().await;
    assert!(report.complete);
    assert_eq!((report.retries, fake.requests(), fake.dumps()), (8, 16, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_is_final_and_told_in_the_servers_words() {
    let fake = Fake::start(|tokens, _| match tokens[0] {
        300 => Answer::Status(400, "token 300 is beyond the vocabulary", None),
        _ => Answer::good(),
    })
    .await;
    let job = Job::new(&fake, &rows(10));
    let report = job.run().await;
    assert_eq!((report.written, report.failed, report.retries), (9, 1, 0));
    let failure = &failures(&job.out())[0];
    assert_eq!(failure["kind"], "refused");
    assert_eq!(failure["reason"], "the server answered 400 Bad Request: token 300 is beyond the vocabulary");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_setting_that_every_sample_is_refused_for_does_not_fail_the_data_set() {
    let fake =
        Fake::start(|_, _| Answer::Status(400, "`capture.points`: the model has no layer 99", None)).await;
    let job = Job::new(&fake, &rows(130));
    let report = job.run().await;
    assert_eq!((report.written, report.failed, report.pending), (0, 20, 110));
    let stopped = report.stopped.unwrap();
    assert!(stopped.starts_with("20 samples were refused one after the other, none was done"), "{stopped}");
    assert!(stopped.ends_with("the model has no layer 99"), "{stopped}");
    fake.behave(|_, _| Answer::good());
    assert!(job.run().await.complete);
}

#[tokio::test(flavor = "multi_thread")]
async fn samples_that_are_refused_do_not_stop_a_run_that_has_done_others() {
    let fake = Fake::start(|tokens, _| match tokens[0] / 100 {
        10.. => Answer::Status(400, "beyond the vocabulary", None),
        _ => Answer::good(),
    })
    .await;
    let report = Job::new(&fake, &rows(130)).run().await;
    assert_eq!((report.written, report.failed, report.pending), (10, 120, 0));
    assert!(report.stopped.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_that_is_not_the_proxys_stops_the_run_at_once() {
    for status in [301, 401, 403, 404] {
        let fake = Fake::start(move |_, _| Answer::Status(status, "nothing here", None)).await;
        let job = Job::new(&fake, &rows(30));
        let report = job.run().await;
        assert_eq!((report.failed, report.pending, fake.requests()), (0, 30, 1), "{status}");
        let stopped = report.stopped.unwrap();
        assert!(stopped.contains(&format!("the server answered {status} ")), "{stopped}");
        assert!(stopped.ends_with("the address of the proxy, and open to us?"), "{stopped}");
        // Nor does it fail what is left of a run that had begun well.
        fake.behave(move |tokens, _| match tokens[0] {
            0 => Answer::good(),
            _ => Answer::Status(status, "no longer", None),
        });
        let report = job.run().await;
        assert_eq!((report.written, report.failed, report.pending), (1, 0, 29), "{status}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_is_waited_for_and_a_poisonous_sample_given_up() {
    let fake = Fake::start(|tokens, _| match tokens[0] {
        1700 => Answer::Status(500, "always", None),
        1800 => Answer::HangUp,
        _ => Make { delay: Duration::from_millis(5), ..Make::default() }.into(),
    })
    .await;
    let job = Job::new(&fake, &rows(200));
    let state = std::sync::Arc::clone(&fake.state);
    let outage = tokio::spawn(async move {
        while state.asked.lock().unwrap().len() < 60 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        state.down.store(true, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_secs(3)).await;
        state.down.store(false, Ordering::SeqCst);
    });
    let report = job.run().await;
    outage.await.unwrap();
    assert_eq!((report.written, report.failed, report.pending), (198, 2, 0), "{report}");
    assert!(report.retries > 4);
    assert!(report.stopped.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_first_sample_that_never_gets_an_answer_does_not_hold_up_the_others() {
    let fake = Fake::start(|tokens, _| if tokens[0] == 0 { Answer::HangUp } else { Answer::good() }).await;
    let job = Job::new(&fake, &rows(20));
    let report = job.run().await;
    assert_eq!((report.written, report.failed, report.pending), (19, 1, 0), "{report}");
    assert_eq!(failures(&job.out())[0]["kind"], "unavailable");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_server_costs_no_attempts() {
    let fake = Fake::start(|tokens, attempt| match tokens[0] {
        400 if attempt < 6 => Answer::Status(503, "the dump budget is spent", Some(0)),
        _ => Answer::good(),
    })
    .await;
    let job = Job::new(&fake, &rows(10));
    let report = job.run_with(|options| options.policy.retries = 0).await.unwrap();
    assert!(report.complete, "{report}");
    assert_eq!(report.retries, 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_fails_everything_is_not_the_end_of_the_data() {
    let fake = Fake::start(|_, _| Answer::Status(500, "out of memory", None)).await;
    let job = Job::new(&fake, &rows(130));
    let report = job.run_with(|options| options.policy.retries = 0).await.unwrap();
    // Nothing says that the server can do anything, so samples go one by one until that is clear.
    assert_eq!((report.written, report.failed, report.pending, report.complete), (0, 100, 30, false));
    assert!(report.stopped.as_ref().unwrap().ends_with("out of memory"), "{report}");
    fake.behave(|_, _| Answer::good());
    let report = job.run().await;
    assert!(report.complete);
    assert_eq!(report.written, 130);
    assert_eq!(failures(&job.out()).len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_that_never_comes_stops_the_run_with_everything_pending() {
    let fake = Fake::start(|_, _| Answer::good()).await;
    fake.state.down.store(true, Ordering::SeqCst);
    let job = Job::new(&fake, &rows(5));
    let report = job.run_with(|options| options.policy.patience = Duration::from_secs(1)).await.unwrap();
    assert_eq!((report.pending, report.complete), (5, false));
    assert!(report.stopped.unwrap().contains("was not ready within 1 s"));
}

#[tokio::test(flavor = "multi_thread")]
async fn another_models_dumps_are_not_mixed_in() {
    let fake = Fake::start(|tokens, attempt| {
        let model = if tokens[0] == 600 && attempt == 0 { "other" } else { "tiny" };
        Make { model, ..Make::default() }.into()
    })
    .await;
    let job = Job::new(&fake, &rows(10));
    let report = job.run().await;
    assert!(report.complete, "another replica answers the second attempt: {report}");
    assert_eq!(report.retries, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_output_directory_that_cannot_be_written_is_refused_before_anything_is_asked() {
    let fake = Fake::start(|_, _| Answer::good()).await;
    let job = Job::new(&fake, &rows(3));
    let file = job.folder.path().join("a");
    fs::write(&file, "in the way").unwrap();
    let error = job.run_with(|_| {}).await.unwrap_err().to_string();
    assert_eq!(error, format!("cannot use the output directory `{}`", job.out().display()));
    fs::remove_file(&file).unwrap();
    // Permissions do not bind root, under whom some run their tests.
    if !is_root() {
        fs::create_dir_all(job.out()).unwrap();
        fs::set_permissions(job.out(), fs::Permissions::from_mode(0o555)).unwrap();
        assert!(matches!(job.run_with(|_| {}).await, Err(RunError::Lock(_))));
        fs::set_permissions(job.out(), fs::Permissions::from_mode(0o755)).unwrap();
    }
    assert_eq!(fake.requests(), 0);
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|metadata| std::os::unix::fs::MetadataExt::uid(&metadata) == 0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_with_a_strangers_files_is_refused() {
    let fake = Fake::start(|_, _| Answer::good()).await;
    let job = Job::new(&fake, &rows(3));
    fs::create_dir_all(job.out().join("rows_0-2000")).unwrap();
    fs::write(job.ckpt(9), "theirs").unwrap();
    assert!(matches!(job.run_with(|_| {}).await, Err(RunError::Strangers { .. })));
    assert_eq!(fs::read(job.ckpt(9)).unwrap(), b"theirs");
    assert!(Ledger::open_existing(&job.out()).unwrap().settings().unwrap().is_none());
}
