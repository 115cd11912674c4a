//! Every series of an extraction: the only place with their names, help texts, units and buckets.
//!
//! How far the set is (`samples`, `tokens`) are gauges taken from the ledger and the plan, so that they go on where an
//! earlier run stopped. What this process has done are counters.

mod family;

use std::time::{SystemTime, UNIX_EPOCH};

use prometheus::{Gauge, Histogram, HistogramOpts, IntCounter, IntGauge, Registry};

pub use self::family::{Family, Label};
use crate::{progress::eta, retry, tally::FailureKind, tally::Tally};
use family::labels;

labels! {
    /// What the run is doing.
    pub enum State: "state" {
        Starting = "starting",
        Waiting = "waiting",
        Running = "running",
        Stopping = "stopping",
        Complete = "complete",
        Incomplete = "incomplete",
    }
}

labels! {
    /// The fate of a row.
    pub enum Fate: "state" {
        Done = "done",
        Pending = "pending",
        Failed = "failed",
        LeftOut = "left_out",
    }
}

labels! {
    /// What came of an attempt's request.
    pub enum Answer: "result" {
        Ok = "ok",
        Failed = "failed",
    }
}

labels! {
    /// Why an attempt is followed by another.
    pub enum Retry: "reason" {
        Failed = "failed",
        Busy = "busy",
        Unreachable = "unreachable",
    }
}

impl From<retry::Kind> for Retry {
    fn from(kind: retry::Kind) -> Self {
        match kind {
            retry::Kind::Busy(_) => Self::Busy,
            retry::Kind::Unreachable => Self::Unreachable,
            retry::Kind::Counted | retry::Kind::Final | retry::Kind::Hopeless => Self::Failed,
        }
    }
}

impl Label for FailureKind {
    const NAME: &'static str = "kind";
    const ALL: &'static [Self] = &[
        Self::BadRow,
        Self::TooLong,
        Self::Refused,
        Self::Server,
        Self::Unavailable,
        Self::Mismatch,
        Self::NotFinite,
        Self::DatasetChanged,
    ];
    fn text(self) -> &'static str {
        match self {
            Self::BadRow => "bad_row",
            Self::TooLong => "too_long",
            Self::Refused => "refused",
            Self::Server => "server",
            Self::Unavailable => "unavailable",
            Self::Mismatch => "mismatch",
            Self::NotFinite => "not_finite",
            Self::DatasetChanged => "dataset_changed",
        }
    }
    fn index(self) -> usize {
        self as usize
    }
}

/// The series. Cloning shares them.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// What the run is doing: one of them is 1.
    pub state: Family<State, IntGauge>,
    /// Rows of the data set.
    pub rows: IntGauge,
    /// Rows by their fate.
    pub samples: Family<Fate, IntGauge>,
    /// Tokens by the fate of their rows.
    pub tokens: Family<Fate, IntGauge>,
    /// Samples whose file this process wrote and recorded.
    pub written: IntCounter,
    /// Their tokens.
    pub tokens_written: IntCounter,
    /// Their files' bytes.
    pub bytes_written: IntCounter,
    /// Samples given up by this process, and rows that cannot be extracted.
    pub failures: Family<FailureKind, IntCounter>,
    /// Attempts that failed and are followed by another.
    pub retries: Family<Retry, IntCounter>,
    /// Dumps that were another request's, as found here or by the proxy.
    pub mismatches: IntCounter,
    /// Dumps with values that are not finite.
    pub not_finite: IntCounter,
    /// Dumps fetched through the proxy.
    pub fetched: IntCounter,
    /// Dumps that could not be deleted.
    pub left_behind: IntCounter,
    /// Seconds from posting a request to the end of its reply.
    pub request_seconds: Family<Answer, Histogram>,
    /// Seconds to check a dump, write the file and record it.
    pub store_seconds: Histogram,
    /// `--concurrency`.
    pub concurrency: IntGauge,
    /// Requests that are posted and not answered.
    pub in_flight: IntGauge,
    /// `--writers`.
    pub writers: IntGauge,
    /// Samples being checked and written.
    pub writing: IntGauge,
    /// Samples that are tried again.
    pub retrying: IntGauge,
    /// Rows that the ledger has.
    pub ledger_samples: IntGauge,
    /// Dumps that were handed over and are not deleted.
    pub ledger_dumps: IntGauge,
    /// Bytes that the pending samples will take.
    pub needed_bytes: IntGauge,
    /// Bytes free on the output's file system.
    pub free_bytes: IntGauge,
    started: Gauge,
    last_progress: Gauge,
    eta: Gauge,
}

/// Counts one up until dropped.
#[derive(Debug)]
#[must_use = "dropping this counts down again"]
pub struct Counted(IntGauge);

impl Counted {
    /// One more.
    pub fn up(gauge: &IntGauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// What is known of the set before anything is asked for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Before {
    /// Rows of the data set.
    pub rows: u64,
    /// Samples on disk.
    pub done: u64,
    /// Their tokens.
    pub done_tokens: u64,
    /// Rows that cannot be extracted.
    pub failed: u64,
    /// Rows left out on request.
    pub left_out: u64,
}

/// From a cached short prompt to the default `--request-timeout` and beyond.
const REQUEST_SECONDS: &[f64] = &[
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0,
    3600.0,
];

/// From a page to gigabytes on a network disk.
const STORE_SECONDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

impl Metrics {
    /// Registers every series, at zero.
    ///
    /// # Errors
    /// When one of the names is taken in `registry`.
    pub fn register(registry: &Registry) -> prometheus::Result<Self> {
        let made = Make { registry };
        let metrics = Self {
            state: made.gauges("state", "1 for what the run is doing now, 0 for all else.")?,
            rows: made.gauge("rows", "Rows of the data set.")?,
            samples: made
                .gauges("samples", "Rows of the data set by their fate, those of earlier runs included.")?,
            tokens: made
                .gauges("tokens", "Tokens of samples by their fate, those of earlier runs included.")?,
            written: made
                .counter("samples_written_total", "Samples whose file this process wrote and recorded.")?,
            tokens_written: made
                .counter("tokens_written_total", "Tokens of the samples that this process wrote.")?,
            bytes_written: made
                .counter("bytes_written_total", "Bytes of the files that this process wrote.")?,
            failures: made
                .counters("failures_total", "Rows without a file because of a failure, by kind.")?,
            retries: made.counters("retries_total", "Attempts that failed and are followed by another.")?,
            mismatches: made
                .counter("mismatches_total", "Dumps that were not their request's. Must stay at zero.")?,
            not_finite: made.counter("not_finite_total", "Dumps with values that are not finite.")?,
            fetched: made.counter(
                "dumps_fetched_total",
                "Dumps fetched through the proxy, as their path cannot be read here.",
            )?,
            left_behind: made.counter("dumps_left_behind_total", "Dumps that could not be deleted.")?,
            request_seconds: made.histograms(
                "request_seconds",
                "Seconds from posting a request to the end of its reply.",
                REQUEST_SECONDS,
            )?,
            store_seconds: made.histogram(
                "store_seconds",
                "Seconds to check a dump, write the sample's file and record it.",
                STORE_SECONDS,
            )?,
            concurrency: made.gauge("concurrency", "Most requests in flight, --concurrency.")?,
            in_flight: made.gauge("requests_in_flight", "Requests posted and not answered.")?,
            writers: made.gauge("writers", "Most samples being checked and written, --writers.")?,
            writing: made.gauge("writing", "Samples being checked and written.")?,
            retrying: made.gauge("retrying", "Samples that are being tried again.")?,
            ledger_samples: made.gauge("ledger_samples", "Samples that the ledger records.")?,
            ledger_dumps: made
                .gauge("ledger_dumps", "Dumps that were handed over and have not been deleted yet.")?,
            needed_bytes: made.gauge(
                "output_needed_bytes",
                "Bytes that the pending samples will take; 0 until a first dump has told.",
            )?,
            free_bytes: made.gauge("output_free_bytes", "Bytes free on the output's file system.")?,
            started: made.number("started_time_seconds", "When extraction began, Unix time; 0 before.")?,
            last_progress: made.number(
                "last_progress_time_seconds",
                "When a sample was last done or given up, or extraction began, Unix time; 0 before.",
            )?,
            eta: made.number(
                "eta_seconds",
                "Seconds until all pending tokens are done at the mean rate of this run; NaN while unknown.",
            )?,
        };
        metrics.enter(State::Starting);
        Ok(metrics)
    }

    /// The run goes on to `state`.
    pub fn enter(&self, state: State) {
        for &other in State::ALL {
            self.state.at(other).set(i64::from(other.index() == state.index()));
        }
    }

    /// Extraction begins.
    pub fn begin(&self) {
        self.started.set(now());
        self.last_progress.set(now());
        self.eta.set(f64::NAN);
        self.enter(State::Running);
    }

    /// A sample of `tokens` tokens has its file of `bytes` bytes.
    pub fn done(&self, tokens: u64, bytes: u64) {
        self.written.inc();
        self.tokens_written.inc_by(tokens);
        self.bytes_written.inc_by(bytes);
        self.ledger_samples.inc();
        self.last_progress.set(now());
    }

    /// A sample was given up.
    pub fn given_up(&self, kind: FailureKind) {
        self.failures.at(kind).inc();
        self.last_progress.set(now());
    }

    /// Shows where the set stands.
    pub fn show(&self, before: &Before, tally: &Tally) {
        self.rows.set(gauge(before.rows));
        let samples = |fate, count| self.samples.at(fate).set(gauge(count));
        samples(Fate::Done, before.done + tally.done);
        samples(Fate::Pending, tally.pending());
        samples(Fate::Failed, before.failed + tally.failures.len() as u64);
        samples(Fate::LeftOut, before.left_out);
        let tokens = |fate, count| self.tokens.at(fate).set(gauge(count));
        tokens(Fate::Done, before.done_tokens + tally.tokens);
        tokens(Fate::Pending, tally.pending_tokens());
        tokens(Fate::Failed, tally.failed_tokens);
        self.eta.set(eta(tally).map_or(f64::NAN, |eta| eta.as_secs_f64()));
    }
}

/// A count as a gauge's value.
pub(crate) fn gauge(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// Makes and registers series under the client's prefix.
struct Make<'a> {
    registry: &'a Registry,
}

impl Make<'_> {
    fn gauge(&self, name: &str, help: &str) -> prometheus::Result<IntGauge> {
        let gauge = IntGauge::new(format!("tether_extract_{name}"), help)?;
        self.registry.register(Box::new(gauge.clone()))?;
        Ok(gauge)
    }

    fn number(&self, name: &str, help: &str) -> prometheus::Result<Gauge> {
        let gauge = Gauge::new(format!("tether_extract_{name}"), help)?;
        self.registry.register(Box::new(gauge.clone()))?;
        Ok(gauge)
    }

    fn gauges<L: Label>(&self, name: &str, help: &str) -> prometheus::Result<Family<L, IntGauge>> {
        Family::gauges(self.registry, &format!("tether_extract_{name}"), help)
    }

    fn counter(&self, name: &str, help: &str) -> prometheus::Result<IntCounter> {
        let counter = IntCounter::new(format!("tether_extract_{name}"), help)?;
        self.registry.register(Box::new(counter.clone()))?;
        Ok(counter)
    }

    fn counters<L: Label>(&self, name: &str, help: &str) -> prometheus::Result<Family<L, IntCounter>> {
        Family::counters(self.registry, &format!("tether_extract_{name}"), help)
    }

    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> prometheus::Result<Histogram> {
        let opts = HistogramOpts::new(format!("tether_extract_{name}"), help).buckets(buckets.to_vec());
        let histogram = Histogram::with_opts(opts)?;
        self.registry.register(Box::new(histogram.clone()))?;
        Ok(histogram)
    }

    fn histograms<L: Label>(
        &self,
        name: &str,
        help: &str,
        buckets: &[f64],
    ) -> prometheus::Result<Family<L, Histogram>> {
        Family::histograms(self.registry, &format!("tether_extract_{name}"), help, buckets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_series_is_there_at_zero_from_the_start() {
        let registry = Registry::new();
        let _metrics = Metrics::register(&registry).unwrap();
        let text = tether_telemetry::text(&registry).unwrap();
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        for sample in samples {
            let expected =
                if sample.starts_with("tether_extract_state{state=\"starting\"}") { "1" } else { "0" };
            assert_eq!(sample.rsplit(' ').next(), Some(expected), "{sample}");
        }
        for series in [
            "tether_extract_failures_total{kind=\"dataset_changed\"}",
            "tether_extract_retries_total{reason=\"busy\"}",
            "tether_extract_samples{state=\"left_out\"}",
            "tether_extract_request_seconds_count{result=\"failed\"}",
            "tether_extract_eta_seconds",
        ] {
            assert!(text.contains(&format!("\n{series} 0")), "{series} in\n{text}");
        }
    }

    #[test]
    fn the_set_is_shown_with_what_earlier_runs_did() {
        let registry = Registry::new();
        let metrics = Metrics::register(&registry).unwrap();
        let before = Before { rows: 20, done: 5, done_tokens: 500, failed: 2, left_out: 3 };
        let mut tally = Tally::new(10, 1000);
        metrics.begin();
        metrics.show(&before, &tally);
        assert!(metrics.eta.get().is_nan());
        (tally.done, tally.tokens) = (4, 300);
        metrics.show(&before, &tally);
        assert!(metrics.eta.get() > 0.0);
        let samples: Vec<_> = Fate::ALL.iter().map(|&fate| metrics.samples.at(fate).get()).collect();
        assert_eq!(samples, [9, 6, 2, 3]);
        assert_eq!(samples.iter().sum::<i64>(), metrics.rows.get());
        assert_eq!(metrics.tokens.at(Fate::Done).get(), 800);
        assert_eq!(metrics.tokens.at(Fate::Pending).get(), 700);
        let state: Vec<_> = State::ALL.iter().map(|&state| metrics.state.at(state).get()).collect();
        assert_eq!(state, [0, 0, 1, 0, 0, 0]);
    }

    #[test]
    fn every_kind_of_failure_finds_its_own_series() {
        let metrics = Metrics::register(&Registry::new()).unwrap();
        for (times, &kind) in FailureKind::ALL.iter().enumerate() {
            (0..times).for_each(|_| metrics.given_up(kind));
            assert_eq!(metrics.failures.at(kind).get(), times as u64);
        }
    }
}
