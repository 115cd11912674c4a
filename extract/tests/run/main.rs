//! Whole runs against a server that does what a test tells it to.

// clippy.toml allows `unwrap` in tests, and Clippy does not know helpers of tests for tests.
#![allow(clippy::unwrap_used)]

mod failing;
mod fake;
mod resuming;
mod whole;

use std::{
    collections::BTreeMap,
    fs,
    num::NonZero,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use fake::Fake;
use prometheus::Registry;
use tempfile::TempDir;
use tether_extract::{
    dataset::RepeatedIds,
    format::{FormatName, Strategy, choose},
    ledger::Ledger,
    metrics::{Fate, Label, Metrics, Retry, State},
    plan::Wanted,
    progress::Terminal,
    report::Report,
    retry::Policy,
    run::{RunError, RunOptions, run},
    stop::Stop,
    stored::Depth,
    tally::FailureKind,
    verify::{Verified, verify},
};

/// A data set and an output directory.
struct Job {
    folder: TempDir,
    proxy: String,
}

impl Job {
    fn new(fake: &Fake, rows: &[String]) -> Self {
        let job = Self { folder: tempfile::tempdir().unwrap(), proxy: format!("http://{}", fake.address) };
        fs::write(job.data(), rows.join("\n")).unwrap();
        job
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data.jsonl")
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("a/b/c")
    }

    fn options(&self) -> RunOptions {
        RunOptions {
            proxy: self.proxy.parse().unwrap(),
            data: self.data(),
            out: self.out(),
            format: choose(FormatName::Specforge, Strategy::Eagle3),
            points: None,
            concurrency: NonZero::new(8).unwrap(),
            writers: NonZero::new(2).unwrap(),
            wanted: Wanted::default(),
            repeated_ids: RepeatedIds::Keep,
            policy: Policy { retries: 2, patience: Duration::from_secs(120) },
            request_timeout: Duration::from_secs(120),
            verify: Depth::Quick,
            force: false,
            metrics: Metrics::register(&Registry::new()).unwrap(),
            on_step: None,
        }
    }

    async fn run(&self) -> Report {
        self.run_with(|_| {}).await.unwrap()
    }

    async fn run_with(&self, change: impl FnOnce(&mut RunOptions)) -> Result<Report, RunError> {
        self.run_until(change, Stop::default()).await
    }

    async fn run_until(&self, change: impl FnOnce(&mut RunOptions), stop: Stop) -> Result<Report, RunError> {
        let mut options = self.options();
        change(&mut options);
        let (metrics, cut_off) = (options.metrics.clone(), options.on_step.is_some());
        let report = run(options, stop, &Terminal::default()).await?;
        assert!(report.adds_up(), "{report:?}");
        self.assert_metrics_agree(&metrics, &report, cut_off);
        let leftovers: Vec<_> =
            self.files().into_iter().filter(|path| path.to_string_lossy().ends_with(".tmp")).collect();
        assert_eq!(leftovers, Vec::<PathBuf>::new());
        Ok(report)
    }

    /// What the metrics say at the end of a run is what its report and its ledger say, whatever happened in it.
    fn assert_metrics_agree(&self, metrics: &Metrics, report: &Report, cut_off: bool) {
        let counted = |counter: &prometheus::IntCounter| counter.get();
        let failures: u64 = FailureKind::ALL.iter().map(|&kind| counted(metrics.failures.at(kind))).sum();
        let retries: u64 = Retry::ALL.iter().map(|&reason| counted(metrics.retries.at(reason))).sum();
        assert_eq!(
            [counted(&metrics.written), failures, retries],
            [report.written, report.failed, report.retries],
            "{report:?}"
        );
        assert_eq!(
            [&metrics.mismatches, &metrics.not_finite, &metrics.fetched, &metrics.left_behind].map(counted),
            [report.mismatches, report.not_finite, report.fetched, report.dumps_left_behind],
            "{report:?}"
        );
        assert_eq!(
            (counted(&metrics.tokens_written), counted(&metrics.bytes_written)),
            (report.tokens, report.bytes)
        );
        let fates = [report.written + report.already_done, report.pending, report.failed, report.left_out];
        let shown = Fate::ALL.iter().map(|&fate| u64::try_from(metrics.samples.at(fate).get()).unwrap());
        assert_eq!(shown.collect::<Vec<_>>(), fates, "{report:?}");
        let state = if report.complete { State::Complete } else { State::Incomplete };
        assert_eq!(metrics.state.at(state).get(), 1, "{report:?}");
        assert_eq!((metrics.in_flight.get(), metrics.writing.get()), (0, 0));
        if !cut_off {
            let ledger = Ledger::open(&self.out()).unwrap();
            let found = (metrics.ledger_samples.get(), metrics.ledger_dumps.get());
            let lengths = (ledger.samples().unwrap().len(), ledger.leases().unwrap().len());
            assert_eq!(found, (lengths.0 as i64, lengths.1 as i64), "{report:?}");
        }
    }

    fn verify(&self) -> Verified {
        verify(&self.out()).unwrap()
    }

    fn ckpt(&self, row: u64) -> PathBuf {
        self.out().join(format!("rows_0-2000/data_{row}.ckpt"))
    }

    /// Every file one folder below the output directory.
    fn files(&self) -> Vec<PathBuf> {
        let folders =
            fs::read_dir(self.out()).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
        folders.flat_map(|folder| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path())).collect()
    }

    /// When each finished file was written.
    fn times(&self) -> BTreeMap<PathBuf, SystemTime> {
        let time = |path: PathBuf| (path.clone(), fs::metadata(path).unwrap().modified().unwrap());
        self.files().into_iter().map(time).collect()
    }
}

/// A row of a data set.
fn row(tokens: &[i64]) -> String {
    format!(r#"{{"input_ids":{tokens:?}}}"#)
}

/// Rows of different lengths, each with its own tokens.
fn rows(count: i64) -> Vec<String> {
    (0..count).map(|index| row(&prompt(index))).collect()
}

fn prompt(index: i64) -> Vec<i64> {
    (0..1 + index % 7).map(|position| index * 100 + position).collect()
}

fn failures(out: &Path) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(out.join("failures.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}
