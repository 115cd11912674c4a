//! What a run leaves to read: the summary, `report.json` and `failures.jsonl`.

use std::{
    fmt,
    io::{self, Write as _},
    path::Path,
};

use serde::Serialize;

use crate::{stored::Store, tally::Failure};

/// Name of the list of failures in an output directory, one JSON object a line.
pub const FAILURES: &str = "failures.jsonl";
/// Name of the summary in an output directory.
pub const REPORT: &str = "report.json";

/// The result of one `tether-extract run`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Every row that is wanted has its file.
    pub complete: bool,
    /// Why the run ended before its work was done, if it did.
    pub stopped: Option<String>,
    /// Rows of the data set.
    pub rows: u64,
    /// Samples written by this run.
    pub written: u64,
    /// Samples that an earlier run had written.
    pub already_done: u64,
    /// Of the samples an earlier run had written, those written again as their file was missing or damaged.
    pub redone: u64,
    /// Rows without a file because of a failure; [`FAILURES`] has each.
    pub failed: u64,
    /// Rows left out on request: beyond `--limit`, or too long under `--too-long skip`.
    pub left_out: u64,
    /// Samples that the run did not get to.
    pub pending: u64,
    /// Dumps that were another request's.
    pub mismatches: u64,
    /// Dumps whose values were not finite.
    pub not_finite: u64,
    /// Attempts that were repeated.
    pub retries: u64,
    /// Dumps fetched through the proxy.
    pub fetched: u64,
    /// Dumps that could not be deleted.
    pub dumps_left_behind: u64,
    /// Rows whose `id` an earlier row has.
    pub repeated_ids: u64,
    /// Tokens of the samples written by this run.
    pub tokens: u64,
    /// Bytes of the files written by this run.
    pub bytes: u64,
    /// Time spent extracting.
    pub seconds: f64,
    /// Samples written per second.
    pub samples_per_second: f64,
    /// Tokens written per second.
    pub tokens_per_second: f64,
    /// The failures.
    #[serde(skip)]
    pub failures: Vec<Failure>,
}

impl Report {
    /// Whether the rows' fates add up to the data set. They always do; a test and the run itself check it.
    pub fn adds_up(&self) -> bool {
        self.written + self.already_done + self.failed + self.left_out + self.pending == self.rows
    }

    /// Writes [`REPORT`] and [`FAILURES`] into `directory`, replacing those of an earlier run.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn save(&self, directory: &Path) -> io::Result<()> {
        let replace = |name: &str, text: &[u8]| -> io::Result<()> {
            let mut file = tempfile::Builder::new()
                .prefix(&format!(".{name}."))
                .suffix(".tmp")
                .tempfile_in(directory)?;
            file.write_all(text)?;
            file.as_file().sync_all()?;
            file.persist(directory.join(name)).map_err(|error| error.error)?;
            Ok(())
        };
        let mut lines = Vec::new();
        for failure in &self.failures {
            serde_json::to_writer(&mut lines, failure)?;
            lines.push(b'\n');
        }
        replace(FAILURES, &lines)?;
        let mut summary = serde_json::to_vec_pretty(self)?;
        summary.push(b'\n');
        replace(REPORT, &summary)?;
        std::fs::File::open(directory)?.sync_all()
    }

    /// Removes what a report that could not be finished left behind.
    pub(crate) fn remove_temporaries(store: &Store) -> io::Result<usize> {
        let mut removed = 0;
        for entry in std::fs::read_dir(store.root())? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let ours = [FAILURES, REPORT].iter().any(|file| name.starts_with(&format!(".{file}.")));
            if ours && name.ends_with(".tmp") {
                std::fs::remove_file(&path)?;
                removed += 1;
            }
        }
        Ok(removed)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = |name: &str, value: String| writeln!(f, "  {name:<14} {value}");
        line("rows", self.rows.to_string())?;
        line("written", self.written.to_string())?;
        line("already done", self.already_done.to_string())?;
        for (name, count) in [
            ("redone", self.redone),
            ("left out", self.left_out),
            ("not reached", self.pending),
            ("repeated ids", self.repeated_ids),
            ("retries", self.retries),
            ("fetched", self.fetched),
            ("not finite", self.not_finite),
            ("dumps left", self.dumps_left_behind),
        ] {
            if count > 0 {
                line(name, count.to_string())?;
            }
        }
        line("failed", self.failed.to_string())?;
        line("mismatches", self.mismatches.to_string())?;
        line("tokens", format!("{} ({:.1}/s)", self.tokens, self.tokens_per_second))?;
        line("samples/s", format!("{:.2}", self.samples_per_second))?;
        line("bytes", format!("{} ({})", self.bytes, indicatif::BinaryBytes(self.bytes)))?;
        line("time", format!("{:.1} s", self.seconds))?;
        if let Some(reason) = &self.stopped {
            line("stopped", reason.clone())?;
        }
        for failure in self.failures.iter().take(10) {
            line("failure", format!("line {}: {}", failure.line, failure.reason))?;
        }
        if self.failures.len() > 10 {
            line("", format!("and {} more, all in {FAILURES}", self.failures.len() - 10))?;
        }
        write!(f, "{}", if self.complete { "the set is complete" } else { "the set is INCOMPLETE" })
    }
}
