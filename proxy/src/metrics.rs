//! Every series the proxy exports.

mod family;

use prometheus::{Histogram, HistogramOpts, IntCounter, IntGauge, Opts, Registry};
use tether_telemetry::OldestAge;

use self::family::labels;
pub use self::family::{Family, Family2, Label};

labels! {
    /// What a request asks for, by its path.
    pub enum Route: "route" {
        Generate = "generate",
        Completions = "completions",
        ChatCompletions = "chat_completions",
        AbortRequest = "abort_request",
        Health = "health",
        Other = "other",
    }
}

labels! {
    /// How a reply's status begins.
    pub enum Class: "class" {
        Success = "2xx",
        Redirect = "3xx",
        ClientError = "4xx",
        ServerError = "5xx",
    }
}

labels! {
    /// Why a request ended without its whole reply.
    pub enum Abort: "reason" {
        ClientGone = "client_gone",
        UpstreamDied = "upstream_died",
        UpstreamSilent = "upstream_silent",
        Mismatch = "mismatch",
        Drained = "drained",
    }
}

labels! {
    /// How far a request had come.
    pub enum Phase: "phase" {
        Reading = "reading",
        Queued = "queued",
        Waiting = "waiting",
        Gate = "gate",
        Replying = "replying",
    }
}

labels! {
    /// Where an ID came from.
    pub enum IdSource: "source" {
        Made = "made",
        Replaced = "replaced",
        Kept = "kept",
    }
}

labels! {
    /// What came of looking at a dump.
    pub enum GateResult: "result" {
        Matched = "matched",
        Mismatched = "mismatched",
        Missing = "missing",
    }
}

labels! {
    /// What a dump was compared by.
    pub enum Checked: "checked" {
        Tokens = "tokens",
        Id = "id",
    }
}

labels! {
    /// In what a dump was not its request's.
    pub enum Mismatch: "reason" {
        Missing = "missing",
        Unreadable = "unreadable",
        RequestId = "request_id",
        Count = "count",
        TokenHash = "token_hash",
    }
}

labels! {
    /// What became of the dump of a reply that was not delivered.
    pub enum Orphan: "result" {
        Deleted = "deleted",
        Expired = "expired",
        Failed = "failed",
    }
}

labels! {
    /// Why a request was sent once more.
    pub enum Retry: "reason" {
        Stale = "stale",
        Refused = "refused",
    }
}

labels! {
    /// What an upstream made of one request.
    pub enum UpstreamOutcome: "outcome" {
        Replied = "replied",
        Unreachable = "unreachable",
        Died = "died",
        Silent = "silent",
    }
}

labels! {
    /// What came of a health check.
    pub enum Check: "result" {
        Passed = "passed",
        Failed = "failed",
    }
}

labels! {
    /// Why the proxy itself answered with an error.
    pub enum Refusal: "reason" {
        InvalidBody = "invalid_body",
        Encoding = "encoding",
        TooLarge = "too_large",
        NoMemory = "no_memory",
        Timeout = "timeout",
        Duplicate = "duplicate",
        Unsupported = "unsupported",
        QueueFull = "queue_full",
        QueueTimeout = "queue_timeout",
        Draining = "draining",
        Upstream = "upstream",
        NoUpstream = "no_upstream",
        Mismatch = "mismatch",
    }
}

/// The series of the proxy. One set, shared.
#[derive(Debug)]
pub struct Metrics {
    /// Requests whose head was read, the proxy's own paths aside.
    pub received: Family<Route, IntCounter>,
    /// Requests accepted whose reply has not ended.
    pub in_flight: IntGauge,
    /// Those of them that wait for their turn.
    pub queued: IntGauge,
    /// The age of the oldest of them.
    pub oldest: OldestAge,
    /// Requests whose whole reply was handed to the socket.
    pub answered: Family2<Route, Class, IntCounter>,
    /// Requests that ended otherwise. Received = answered + aborted + in flight.
    pub aborted: Family2<Route, Abort, IntCounter>,
    /// Clients that went away, by how far their request had come.
    pub client_gone: Family<Phase, IntCounter>,
    /// Answers that are the proxy's own, by reason.
    pub refused: Family<Refusal, IntCounter>,
    /// Seconds from the head of the request to the end of the reply.
    pub duration: Family<Route, Histogram>,
    /// Seconds from sending a request upstream to the head of the reply.
    pub first_byte: Family<Route, Histogram>,
    /// Bytes of request bodies as they are sent upstream.
    pub body_bytes: Histogram,
    /// Memory that request bodies hold.
    pub body_memory: IntGauge,
    /// IDs given to prompts.
    pub ids: Family<IdSource, IntCounter>,
    /// Prompt tokens of tagged requests, where the request gives token IDs.
    pub prompt_tokens: IntCounter,
    /// Dumps looked at, one for each prompt.
    pub gate: Family2<GateResult, Checked, IntCounter>,
    /// Seconds that replies waited for their dumps.
    pub gate_wait: Histogram,
    /// Dumps that were not their request's.
    pub mismatches: Family<Mismatch, IntCounter>,
    /// IDs whose dumps are deleted when they appear.
    pub orphans_watched: IntGauge,
    /// What became of them.
    pub orphans: Family<Orphan, IntCounter>,
    /// Requests sent once more.
    pub retries: Family<Retry, IntCounter>,
    /// Client connections that are open.
    pub connections: IntGauge,
    /// Client connections accepted.
    pub connections_accepted: IntCounter,
    /// Whether the proxy is draining.
    pub draining: IntGauge,
    registry: Registry,
}

/// The series of one upstream. Its URL comes from the configuration, so the set is closed.
#[derive(Debug)]
pub struct UpstreamMetrics {
    /// Requests, by what became of them.
    pub requests: Family<UpstreamOutcome, IntCounter>,
    /// Requests it holds.
    pub in_flight: IntGauge,
    /// Prompt tokens it holds, some estimated.
    pub tokens_in_flight: IntGauge,
    /// Whether it gets requests as any other.
    pub up: IntGauge,
    /// Health checks.
    pub checks: Family<Check, IntCounter>,
    /// Times that its breaker opened.
    pub breaker_opened: IntCounter,
    /// Connections opened.
    pub connections_opened: IntCounter,
}

/// From a cached answer to the longest prompt or generation of an hour.
const REQUEST_SECONDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
    600.0, 1800.0, 3600.0,
];

/// From a dump that is there, through the polls of 1 to 50 ms, to the longest `--dump-wait` that makes sense.
const GATE_SECONDS: &[f64] = &[
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    30.0,
];

/// From a short prompt, through one of 128,000 token IDs (about 1 MB), to the default limit.
const BODY_BYTES: &[f64] = &[1e3, 4e3, 16e3, 64e3, 256e3, 1e6, 4e6, 16e6, 64e6, 256e6, 512e6];

impl Metrics {
    /// Makes every series, all at zero, so that the first event of a kind is seen as an increase.
    ///
    /// # Errors
    /// `registry` already has a series of one of the names.
    pub fn register(registry: &Registry) -> Result<Self, prometheus::Error> {
        let r = registry;
        Ok(Self {
            received: Family::counters(
                r,
                "tether_proxy_requests_received_total",
                "Requests whose head was read.",
            )?,
            in_flight: gauge(r, "tether_proxy_requests_in_flight", "Requests whose reply has not ended.")?,
            queued: gauge(r, "tether_proxy_requests_queued", "Requests that wait for their turn.")?,
            oldest: OldestAge::register(
                r,
                "tether_proxy_oldest_request_seconds",
                "Seconds since the oldest request in flight began; 0 when there is none.",
            )?,
            answered: Family2::counters(
                r,
                "tether_proxy_requests_answered_total",
                "Requests whose whole reply was handed to the client.",
            )?,
            aborted: Family2::counters(
                r,
                "tether_proxy_requests_aborted_total",
                "Requests that ended without their whole reply.",
            )?,
            client_gone: Family::counters(
                r,
                "tether_proxy_client_gone_total",
                "Clients that went away before their reply's end, by how far the request had come.",
            )?,
            refused: Family::counters(
                r,
                "tether_proxy_refused_total",
                "Errors that the proxy answered with itself.",
            )?,
            duration: Family::histograms(
                r,
                "tether_proxy_request_duration_seconds",
                "Seconds from the request's head to the reply's end.",
                REQUEST_SECONDS,
            )?,
            first_byte: Family::histograms(
                r,
                "tether_proxy_upstream_first_byte_seconds",
                "Seconds from sending a request upstream to the head of its reply.",
                REQUEST_SECONDS,
            )?,
            body_bytes: histogram(
                r,
                "tether_proxy_request_body_bytes",
                "Bytes of request bodies as sent upstream.",
                BODY_BYTES,
            )?,
            body_memory: gauge(r, "tether_proxy_body_memory_bytes", "Memory that request bodies hold.")?,
            ids: Family::counters(
                r,
                "tether_proxy_ids_total",
                "IDs given to prompts, by where they came from.",
            )?,
            prompt_tokens: counter(
                r,
                "tether_proxy_prompt_tokens_total",
                "Prompt tokens of tagged requests that give token IDs.",
            )?,
            gate: Family2::counters(
                r,
                "tether_proxy_gate_total",
                "Dumps looked at before their reply went out.",
            )?,
            gate_wait: histogram(
                r,
                "tether_proxy_gate_wait_seconds",
                "Seconds that replies waited for their dumps.",
                GATE_SECONDS,
            )?,
            mismatches: Family::counters(
                r,
                "tether_proxy_mismatches_total",
                "Dumps that were missing or not their request's. Must stay at zero.",
            )?,
            orphans_watched: gauge(
                r,
                "tether_proxy_orphans_watched",
                "IDs of undelivered replies whose dumps are deleted when they appear.",
            )?,
            orphans: Family::counters(
                r,
                "tether_proxy_orphans_total",
                "What became of the dumps of undelivered replies; expired means that none appeared.",
            )?,
            retries: Family::counters(
                r,
                "tether_proxy_retries_total",
                "Requests sent once more because the first upstream connection had not taken them.",
            )?,
            connections: gauge(r, "tether_proxy_connections", "Client connections that are open.")?,
            connections_accepted: counter(
                r,
                "tether_proxy_connections_accepted_total",
                "Client connections accepted.",
            )?,
            draining: gauge(r, "tether_proxy_draining", "1 once the proxy was told to stop.")?,
            registry: registry.clone(),
        })
    }

    /// Makes the series of one upstream.
    ///
    /// # Errors
    /// There already are series for `url`.
    pub fn upstream(&self, url: &str) -> Result<UpstreamMetrics, prometheus::Error> {
        let r = &self.registry;
        let label = |name: &str, help: &str| Opts::new(name, help).const_label("upstream", url);
        let gauge = |name: &str, help: &str| -> Result<IntGauge, prometheus::Error> {
            let gauge = IntGauge::with_opts(label(name, help))?;
            r.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        let connections_opened = IntCounter::with_opts(label(
            "tether_proxy_upstream_connections_opened_total",
            "Connections opened to an upstream.",
        ))?;
        r.register(Box::new(connections_opened.clone()))?;
        let breaker_opened = IntCounter::with_opts(label(
            "tether_proxy_upstream_breaker_opened_total",
            "Times that an upstream failed so often in a row that requests were kept away from it.",
        ))?;
        r.register(Box::new(breaker_opened.clone()))?;
        Ok(UpstreamMetrics {
            requests: Family::counters_with(
                r,
                label(
                    "tether_proxy_upstream_requests_total",
                    "Requests sent to an upstream, by what became of them.",
                ),
            )?,
            in_flight: gauge("tether_proxy_upstream_requests_in_flight", "Requests that an upstream holds.")?,
            tokens_in_flight: gauge(
                "tether_proxy_upstream_tokens_in_flight",
                "Prompt tokens that an upstream holds; estimated where a request gives text.",
            )?,
            up: gauge(
                "tether_proxy_upstream_up",
                "0 while an upstream fails its health checks, failed too often in a row, or lately refused a connection.",
            )?,
            connections_opened,
            checks: Family::counters_with(
                r,
                label("tether_proxy_upstream_health_checks_total", "Health checks of an upstream."),
            )?,
            breaker_opened,
        })
    }

    /// Adds the series about the process to those about its requests. Called inside of the runtime, which they describe.
    ///
    /// # Errors
    /// They are there already.
    pub fn register_process(&self) -> Result<(), prometheus::Error> {
        tether_telemetry::register_process(&self.registry, "tether_proxy", env!("CARGO_PKG_VERSION"))
    }

    /// All series in Prometheus' text format.
    ///
    /// # Errors
    /// A series cannot be written, which would be a mistake in this file.
    pub fn text(&self) -> Result<String, prometheus::Error> {
        tether_telemetry::text(&self.registry)
    }
}

fn counter(registry: &Registry, name: &str, help: &str) -> Result<IntCounter, prometheus::Error> {
    let counter = IntCounter::new(name, help)?;
    registry.register(Box::new(counter.clone()))?;
    Ok(counter)
}

fn gauge(registry: &Registry, name: &str, help: &str) -> Result<IntGauge, prometheus::Error> {
    let gauge = IntGauge::new(name, help)?;
    registry.register(Box::new(gauge.clone()))?;
    Ok(gauge)
}

fn histogram(
    registry: &Registry,
    name: &str,
    help: &str,
    buckets: &[f64],
) -> Result<Histogram, prometheus::Error> {
    let histogram = Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets.to_vec()))?;
    registry.register(Box::new(histogram.clone()))?;
    Ok(histogram)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_series_is_there_at_zero_from_the_start() {
        let metrics = Metrics::register(&Registry::new()).unwrap();
        let _upstream = metrics.upstream("http://a:1").unwrap();
        let text = metrics.text().unwrap();
        for series in [
            "tether_proxy_requests_received_total{route=\"generate\"} 0",
            "tether_proxy_requests_answered_total{class=\"5xx\",route=\"other\"} 0",
            "tether_proxy_mismatches_total{reason=\"token_hash\"} 0",
            "tether_proxy_gate_total{checked=\"id\",result=\"missing\"} 0",
            "tether_proxy_orphans_total{result=\"deleted\"} 0",
            "tether_proxy_client_gone_total{phase=\"gate\"} 0",
            "tether_proxy_upstream_requests_total{outcome=\"died\",upstream=\"http://a:1\"} 0",
            "tether_proxy_request_duration_seconds_count{route=\"chat_completions\"} 0",
        ] {
            assert!(text.lines().any(|line| line == series), "{series} is not in\n{text}");
        }
    }

    #[test]
    fn a_label_finds_its_own_series() {
        let metrics = Metrics::register(&Registry::new()).unwrap();
        metrics.answered.at(Route::Health, Class::ServerError).inc();
        metrics.mismatches.at(Mismatch::Count).inc();
        let text = metrics.text().unwrap();
        assert!(text.contains("tether_proxy_requests_answered_total{class=\"5xx\",route=\"health\"} 1"));
        assert!(text.contains("tether_proxy_mismatches_total{reason=\"count\"} 1"));
    }
}
