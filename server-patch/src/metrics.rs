//! Every series the server exports: the only place with their names, help texts, units and buckets.

use prometheus::{
    Gauge, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry,
};
use tether_telemetry::OldestAge;

/// How one call of `/generate` ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Answered 200.
    Ok,
    /// Refused with a 4xx.
    Refused,
    /// Refused with a 503: loading, draining, queue or budget.
    Overloaded,
    /// Answered 500.
    Failed,
    /// Answered 200 with `finish_reason` abort.
    Aborted,
    /// The client went away first.
    ClientGone,
}

impl Outcome {
    /// Every outcome, so that each series is there from the start.
    pub const ALL: [Self; 6] =
        [Self::Ok, Self::Refused, Self::Overloaded, Self::Failed, Self::Aborted, Self::ClientGone];

    /// The label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Refused => "refused",
            Self::Overloaded => "overloaded",
            Self::Failed => "failed",
            Self::Aborted => "aborted",
            Self::ClientGone => "client_gone",
        }
    }
}

/// How one capture ended, of those whose states were computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DumpOutcome {
    /// On disk and in the reply.
    Published,
    /// The request was withdrawn before, or its reply could not be given.
    Cancelled,
    /// NaN or infinity in the states.
    NotFinite,
    /// The file system refused, or the name was taken.
    Failed,
}

impl DumpOutcome {
    const ALL: [Self; 4] = [Self::Published, Self::Cancelled, Self::NotFinite, Self::Failed];

    /// The label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Published => "published",
            Self::Cancelled => "cancelled",
            Self::NotFinite => "not_finite",
            Self::Failed => "failed",
        }
    }
}

/// The series. Cloning shares them.
#[derive(Clone)]
pub struct Metrics {
    /// 1 once the model is loaded and until the server drains.
    pub ready: IntGauge,
    /// Seconds the model took to load and warm up.
    pub load_seconds: Gauge,
    /// Calls of `/generate` whose reply has not been sent.
    pub in_flight: IntGauge,
    /// The age of the oldest of them.
    pub oldest: OldestAge,
    /// Seconds from the request's head to the end of the reply, by [`Outcome`].
    pub request_seconds: HistogramVec,
    /// Prompts that wait for their first step.
    pub queue_depth: IntGauge,
    /// Prompts that are being continued.
    pub running: IntGauge,
    /// `--kv-budget`.
    pub kv_budget_bytes: IntGauge,
    /// Bytes that the caches of running prompts may grow to.
    pub kv_reserved_bytes: IntGauge,
    /// Seconds a prompt waited for its first step.
    pub queue_seconds: Histogram,
    /// `--max-queued-requests`.
    pub max_queued: IntGauge,
    /// Seconds to turn a prompt's text into tokens.
    pub tokenize_seconds: Histogram,
    /// Tokens of prompts that were run.
    pub prompt_tokens: IntCounter,
    /// Tokens that were generated.
    pub generated_tokens: IntCounter,
    /// Forward passes by `outcome` ok or failed.
    pub steps: IntCounterVec,
    /// Seconds in the model, of a step.
    pub forward_seconds: Histogram,
    /// Seconds of a whole step: the forward pass, and handing its results on.
    pub step_seconds: Histogram,
    /// Tokens in a step.
    pub step_tokens: Histogram,
    /// Sequences in a step.
    pub step_sequences: Histogram,
    /// `--max-batch-tokens`, to hold `step_tokens` against.
    pub max_batch_tokens: IntGauge,
    /// Captures by [`DumpOutcome`].
    pub dumps: IntCounterVec,
    /// Bytes of published dumps.
    pub dump_bytes: IntCounter,
    /// Seconds from the end of a dump's wait for a writer to its name on disk.
    pub publish_seconds: Histogram,
    /// Bytes of states that wait for a writer or are being written.
    pub write_queue_bytes: IntGauge,
    /// Dumps that wait for a writer or are being written.
    pub write_queue_dumps: IntGauge,
    /// Seconds the engine stood still because writers were behind.
    pub write_stall_seconds: prometheus::Counter,
    /// `--dump-budget`.
    pub dump_budget_bytes: IntGauge,
    /// Bytes of files in the dump directory.
    pub dump_used_bytes: IntGauge,
    /// Bytes that requests under way have reserved.
    pub dump_reserved_bytes: IntGauge,
    /// Bytes free on the dump directory's file system.
    pub dump_free_bytes: IntGauge,
    /// Calls that wait for room in the budget.
    pub budget_waiting: IntGauge,
    /// Dumps deleted because they were older than `--dump-ttl`.
    pub dumps_expired: IntCounter,
    /// Prompts whose consumed token IDs were not those of the request. Must stay at zero.
    pub token_mismatches: IntCounter,
}

impl Metrics {
    /// Registers every series, at zero.
    ///
    /// # Errors
    /// When one of the names is taken in `registry`.
    pub fn register(registry: &Registry) -> prometheus::Result<Self> {
        // 1 ms to 1 h: a tiny model's prompt up to a full context behind a long queue.
        let latency = vec![
            0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
            300.0, 600.0, 1800.0, 3600.0,
        ];
        // A page up to gigabytes at disk speed.
        let publish =
            vec![0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
        // One decoding token up to a whole long context.
        let tokens: Vec<f64> = (0..=18).map(|power| f64::from(1u32 << power)).collect();
        let sequences: Vec<f64> = (0..=10).map(|power| f64::from(1u32 << power)).collect();
        let made = Make { registry };
        let metrics = Self {
            ready: made.gauge("ready", "1 while the server takes requests, else 0")?,
            load_seconds: {
                let gauge = Gauge::with_opts(Opts::new(
                    "tether_server_load_seconds",
                    "Seconds the model took to load",
                ))?;
                registry.register(Box::new(gauge.clone()))?;
                gauge
            },
            in_flight: made.gauge("requests_in_flight", "Calls of /generate not yet answered")?,
            oldest: OldestAge::register(
                registry,
                "tether_server_oldest_request_seconds",
                "Seconds since the oldest call of /generate in flight began; 0 when there is none",
            )?,
            request_seconds: {
                let opts = HistogramOpts::new(
                    "tether_server_request_seconds",
                    "Seconds from a /generate call's head to the end of its reply, by outcome",
                );
                let vec = HistogramVec::new(opts.buckets(latency.clone()), &["outcome"])?;
                registry.register(Box::new(vec.clone()))?;
                vec
            },
            queue_depth: made.gauge("queue_depth", "Prompts waiting for their first step")?,
            running: made.gauge("running", "Prompts being continued")?,
            kv_budget_bytes: made.gauge("kv_budget_bytes", "Bytes that KV caches may take")?,
            kv_reserved_bytes: made
                .gauge("kv_reserved_bytes", "Bytes of KV cache reserved by running prompts")?,
            queue_seconds: made.histogram(
                "queue_seconds",
                "Seconds a prompt waited for its first step",
                latency.clone(),
            )?,
            max_queued: made.gauge("max_queued_requests", "Prompts that may wait for their first step")?,
            tokenize_seconds: made.histogram(
                "tokenize_seconds",
                "Seconds to turn the text of a prompt into tokens",
                latency.clone(),
            )?,
            prompt_tokens: made.counter("prompt_tokens_total", "Prompt tokens run")?,
            generated_tokens: made.counter("generated_tokens_total", "Tokens generated")?,
            steps: made.counters("steps_total", "Forward passes, by outcome", &["ok", "failed"])?,
            forward_seconds: made.histogram(
                "forward_seconds",
                "Seconds in the model, of a step",
                latency.clone(),
            )?,
            step_seconds: made.histogram(
                "step_seconds",
                "Seconds of a step: the forward pass, and handing its results on",
                latency,
            )?,
            step_tokens: made.histogram("step_tokens", "Tokens in a forward pass", tokens)?,
            step_sequences: made.histogram("step_sequences", "Sequences in a forward pass", sequences)?,
            max_batch_tokens: made.gauge("max_batch_tokens", "Token budget of a forward pass")?,
            dumps: made.counters(
                "dumps_total",
                "Captures whose states were computed, by outcome",
                &DumpOutcome::ALL.map(DumpOutcome::as_str),
            )?,
            dump_bytes: made.counter("dump_bytes_total", "Bytes of published dumps")?,
            publish_seconds: made.histogram(
                "publish_seconds",
                "Seconds to write and name a dump",
                publish,
            )?,
            write_queue_bytes: made
                .gauge("write_queue_bytes", "Bytes of states waiting for or in a writer")?,
            write_queue_dumps: made.gauge("write_queue_dumps", "Dumps waiting for or in a writer")?,
            write_stall_seconds: {
                let counter = prometheus::Counter::new(
                    "tether_server_write_stall_seconds_total",
                    "Seconds the engine waited for dump writers",
                )?;
                registry.register(Box::new(counter.clone()))?;
                counter
            },
            dump_budget_bytes: made.gauge("dump_budget_bytes", "Bytes the dump directory may hold")?,
            dump_used_bytes: made.gauge("dump_used_bytes", "Bytes of files in the dump directory")?,
            dump_reserved_bytes: made.gauge("dump_reserved_bytes", "Bytes reserved by requests under way")?,
            dump_free_bytes: made
                .gauge("dump_free_bytes", "Bytes free on the dump directory's file system")?,
            budget_waiting: made.gauge("dump_budget_waiting", "Calls waiting for room in the dump budget")?,
            dumps_expired: made
                .counter("dumps_expired_total", "Dumps deleted for being older than --dump-ttl")?,
            token_mismatches: made
                .counter("token_mismatches_total", "Prompts that the model consumed other token IDs for")?,
        };
        for outcome in Outcome::ALL {
            metrics.request_seconds.with_label_values(&[outcome.as_str()]);
        }
        Ok(metrics)
    }

    /// Series that nobody scrapes.
    #[cfg(test)]
    pub(crate) fn unregistered() -> Self {
        Self::register(&Registry::new()).unwrap()
    }
}

/// Makes and registers series under the server's prefix.
struct Make<'a> {
    registry: &'a Registry,
}

impl Make<'_> {
    fn gauge(&self, name: &str, help: &str) -> prometheus::Result<IntGauge> {
        let gauge = IntGauge::new(format!("tether_server_{name}"), help)?;
        self.registry.register(Box::new(gauge.clone()))?;
        Ok(gauge)
    }

    fn counter(&self, name: &str, help: &str) -> prometheus::Result<IntCounter> {
        let counter = IntCounter::new(format!("tether_server_{name}"), help)?;
        self.registry.register(Box::new(counter.clone()))?;
        Ok(counter)
    }

    fn counters(&self, name: &str, help: &str, outcomes: &[&str]) -> prometheus::Result<IntCounterVec> {
        let vec = IntCounterVec::new(Opts::new(format!("tether_server_{name}"), help), &["outcome"])?;
        self.registry.register(Box::new(vec.clone()))?;
        for outcome in outcomes {
            vec.with_label_values(&[*outcome]);
        }
        Ok(vec)
    }

    fn histogram(&self, name: &str, help: &str, buckets: Vec<f64>) -> prometheus::Result<Histogram> {
        let opts = HistogramOpts::new(format!("tether_server_{name}"), help).buckets(buckets);
        let histogram = Histogram::with_opts(opts)?;
        self.registry.register(Box::new(histogram.clone()))?;
        Ok(histogram)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_series_is_there_at_zero_from_the_start() {
        let registry = Registry::new();
        let _metrics = Metrics::register(&registry).unwrap();
        let text = prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        for outcome in Outcome::ALL {
            let series = format!("tether_server_request_seconds_count{{outcome=\"{}\"}} 0", outcome.as_str());
            assert!(text.contains(&series), "{series}");
        }
        for series in [
            "tether_server_dumps_total{outcome=\"not_finite\"} 0",
            "tether_server_steps_total{outcome=\"failed\"} 0",
            "tether_server_token_mismatches_total 0",
            "tether_server_dump_bytes_total 0",
            "tether_server_step_tokens_count 0",
            "tether_server_ready 0",
        ] {
            assert!(text.contains(series), "{series} in\n{text}");
        }
    }
}
