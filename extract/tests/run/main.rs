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
    metrics::Metrics,
    plan::Wanted,
    progress::Terminal,
    report::Report,
    retry::Policy,
    run::{RunError, RunOptions, run},
    stop::Stop,
    stored::Depth,
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
        let report = run(options, stop, &Terminal::default()).await?;
        assert!(report.adds_up(), "{report:?}");
        let leftovers: Vec<_> =
            self.files().into_iter().filter(|path| path.to_string_lossy().ends_with(".tmp")).collect();
        assert_eq!(leftovers, Vec::<PathBuf>::new());
        Ok(report)
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
