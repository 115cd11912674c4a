//! Runs in which the server does its part.

use std::sync::atomic::Ordering;

use half::bf16;
use serde_json::json;
use tether_dump::Dtype;
use tether_extract::points::{Axis, Points};

use super::*;
use crate::fake::{Answer, HIDDEN, Make, states};

/// The bytes of the archive's tensors, in order, found without our own reader.
fn tensors(path: &Path) -> Vec<Vec<u8>> {
    use std::io::Read as _;
    let mut zip = zip::ZipArchive::new(fs::File::open(path).unwrap()).unwrap();
    (0..4)
        .map(|index| {
            let mut bytes = Vec::new();
            zip.by_name(&format!("archive/data/{index}")).unwrap().read_to_end(&mut bytes).unwrap();
            bytes
        })
        .collect()
}

fn longs(values: &[i64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// `hidden_state` and `aux_hidden_state` as they must be.
fn expected_states(tokens: &[i64], round: impl Fn(f32) -> f32) -> (Vec<u8>, Vec<u8>) {
    let (mut last, mut aux) = (Vec::new(), Vec::new());
    for (index, value) in states(tokens, 4).into_iter().enumerate() {
        let plane = index / HIDDEN % 4;
        let out = if plane == 3 { &mut last } else { &mut aux };
        out.extend(bf16::from_f32(round(value)).to_le_bytes());
    }
    (last, aux)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_sample_gets_its_file_with_its_own_states_and_no_dump_is_left() {
    let fake = Fake::start(|_, _| Answer::good()).await;
    let mut data = rows(60);
    data[7] = r#"{"id": "masked", "input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}"#.into();
    let job = Job::new(&fake, &data);
    let report = job.run().await;
    assert!(report.complete, "{report:?}");
    assert_eq!((report.rows, report.written, report.failed, report.mismatches), (60, 60, 0, 0));
    assert_eq!(fake.dumps(), 0);
    assert_eq!(fake.requests(), 60);
    for index in 0..60u64 {
        let (tokens, mask) = match index {
            7 => (vec![5, 6, 7], vec![0, 1, 1]),
            _ => (prompt(index as i64), vec![1; prompt(index as i64).len()]),
        };
        let (last, aux) = expected_states(&tokens, |value| value);
        assert_eq!(tensors(&job.ckpt(index)), [longs(&tokens), longs(&mask), last, aux], "row {index}");
    }
    let verified = job.verify();
    assert!(verified.is_sound() && verified.is_complete(), "{verified}");
    assert_eq!(report.bytes, verified.bytes);
    let capture = fake.state.captures.lock().unwrap()[0].clone();
    assert_eq!(capture, json!({"final": "post_norm", "rows": "prompt"}));
    let most = fake.state.most_in_flight.load(Ordering::SeqCst);
    assert!((2..=8).contains(&most), "{most} requests were in flight, 8 were allowed");
}

#[tokio::test(flavor = "multi_thread")]
async fn wider_dumps_are_rounded_to_bfloat16() {
    for (dtype, round) in [
        (Dtype::Float32, (|value| value) as fn(f32) -> f32),
        (Dtype::Float16, |value| half::f16::from_f32(value).to_f32()),
    ] {
        let fake = Fake::start(move |_, _| Make { dtype, ..Make::default() }.into()).await;
        let job = Job::new(&fake, &rows(9));
        assert!(job.run().await.complete);
        for index in 0..9 {
            let (last, aux) = expected_states(&prompt(index), round);
            assert_eq!(tensors(&job.ckpt(index as u64))[2..], [last, aux]);
        }
        assert!(job.verify().is_sound());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dumps_that_cannot_be_read_at_their_path_are_fetched_and_deleted_through_the_proxy() {
    let fake = Fake::start(|_, _| Make { reachable: false, header: false, ..Make::default() }.into()).await;
    let job = Job::new(&fake, &rows(10));
    let report = job.run().await;
    assert!(report.complete);
    assert_eq!((report.fetched, fake.dumps()), (10, 0));
    assert!(job.verify().is_complete());
    let staging = job.out().join(".tether-staging");
    assert_eq!(fs::read_dir(staging).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn named_points_are_asked_for_and_others_are_not_taken_for_them() {
    let fake = Fake::start(|_, _| Answer::good()).await;
    let job = Job::new(&fake, &rows(3));
    let points = |layers: &str| Some(Points::new(layers.parse().unwrap(), Axis::Output));
    let report = job.run_with(|options| options.points = points("1,3,4")).await.unwrap();
    assert!(report.complete);
    let capture = fake.state.captures.lock().unwrap()[0].clone();
    assert_eq!(
        capture,
        json!({"points": [1, 3, 4], "axis": "output", "final": "post_norm", "rows": "prompt"})
    );

    let other = Job::new(&fake, &rows(3));
    let report = other.run_with(|options| options.points = points("1,2,4")).await.unwrap();
    let stopped = report.stopped.unwrap();
    assert_eq!(
        stopped,
        "specforge/eagle3 needs the points it asked for; the dump has R2, R4, R5 instead of R2, R3, R5"
    );
    assert_eq!((report.pending, report.written), (3, 0));

    let error = job.run_with(|options| options.points = points("1,2")).await.unwrap_err().to_string();
    assert!(error.starts_with("specforge/eagle3 needs exactly three residual points"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_with_other_points_is_refused_at_the_first_sample() {
    let points: Vec<_> = ["R2", "R5", "N"].map(|name| name.parse().unwrap()).to_vec();
    let fake = Fake::start(move |_, _| Make { points: points.clone(), ..Make::default() }.into()).await;
    let job = Job::new(&fake, &rows(20));
    let report = job.run().await;
    assert_eq!((report.written, report.pending, fake.requests()), (0, 20, 1));
    assert!(report.stopped.unwrap().contains("exactly three residual points"));
    // The dump of the refused sample is the next run's to delete.
    fake.behave(|_, _| Answer::good());
    assert!(job.run().await.complete);
    assert_eq!(fake.dumps(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_leaves_the_rest_for_later() {
    let fake = Fake::start(|_, _| Answer::good()).await;
    let job = Job::new(&fake, &rows(12));
    let first = job.run_with(|options| options.wanted.limit = Some(5)).await.unwrap();
    assert_eq!((first.written, first.left_out, first.complete), (5, 7, true));
    let all = job.run().await;
    assert_eq!((all.written, all.already_done, all.left_out, all.complete), (7, 5, 0, true));
    assert_eq!(fake.requests(), 12);
}
