//! The servers behind the proxy: which one gets a request, and what it holds.

mod exchange;
mod health;
mod pool;
mod tcp;
mod wire;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use http::uri::Authority;
use tracing::{info, warn};

pub use self::exchange::{Request, SendError, check, send};
pub use self::health::{Breaker, Health, Limits, Verdict};
pub use self::pool::{Lease, Pool};
use crate::config::{Balance, UpstreamSpec};
use crate::metrics::{Check, Metrics, UpstreamMetrics};

/// For how long an upstream that refused a connection gets no request, if there is another.
const REST: Duration = Duration::from_secs(1);

/// One server.
#[derive(Debug)]
pub struct Upstream {
    /// Host and port, as `Host` names it.
    pub authority: Authority,
    /// Where it publishes its dumps, as mounted here.
    pub dump_dir: Option<Arc<Path>>,
    /// Its connections.
    pub pool: Pool,
    /// Its series.
    pub metrics: UpstreamMetrics,
    /// Whether it works.
    pub health: Health,
    url: String,
    tokens: AtomicU64,
    requests: AtomicU64,
    /// Milliseconds since `started` until which it rests.
    resting_until: AtomicU64,
    started: Instant,
}

/// All servers.
#[derive(Debug)]
pub struct Upstreams {
    all: Vec<Arc<Upstream>>,
    balance: Balance,
    /// Where to look first, so that equals take turns.
    turn: AtomicUsize,
}

/// One request as an upstream's load, until dropped.
#[derive(Debug)]
#[must_use = "dropping this ends the request's share of the load"]
pub struct Load {
    upstream: Arc<Upstream>,
    tokens: u64,
}

impl Upstream {
    /// The server of a `--upstream`.
    ///
    /// # Errors
    /// Its series already exist.
    pub fn new(
        spec: &UpstreamSpec,
        limits: Limits,
        connect: Duration,
        metrics: &Metrics,
    ) -> Result<Self, prometheus::Error> {
        let url = spec.to_string();
        let metrics = metrics.upstream(&url)?;
        metrics.up.set(1);
        Ok(Self {
            authority: spec.authority.clone(),
            dump_dir: spec.dump_dir.as_deref().map(Arc::from),
            pool: Pool::new(spec.address(), connect),
            metrics,
            health: Health::new(limits),
            url,
            tokens: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            resting_until: AtomicU64::new(0),
            started: Instant::now(),
        })
    }

    /// Its URL, for logs and reports.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Counts a request of `tokens` prompt tokens as its load.
    pub fn load(self: &Arc<Self>, tokens: u64) -> Load {
        self.tokens.fetch_add(tokens, Ordering::Relaxed);
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.metrics.in_flight.inc();
        self.metrics.tokens_in_flight.add(tokens as i64);
        Load { upstream: self.clone(), tokens }
    }

    /// Notes what came of a request.
    pub fn note(&self, verdict: Verdict) {
        match self.health.note(verdict) {
            Some(Breaker::Closed) => info!(upstream = self.url(), "upstream works again"),
            Some(_) => {
                self.metrics.breaker_opened.inc();
                warn!(
                    upstream = self.url(),
                    "upstream failed too often in a row; it gets one request at a time on trial"
                );
            }
            None => return,
        }
        self.tell();
    }

    /// Notes what came of a health check.
    pub fn checked(&self, result: &Result<(), String>) {
        let counter = if result.is_ok() { Check::Passed } else { Check::Failed };
        self.metrics.checks.at(counter).inc();
        match (self.health.checked(result.is_ok()), result) {
            (Some(true), Err(why)) => {
                warn!(upstream = self.url(), why, "upstream fails its health checks; it gets no requests");
            }
            (Some(_), _) => info!(upstream = self.url(), "upstream passes its health checks again"),
            (None, _) => return,
        }
        self.tell();
    }

    /// Lets others go first for a while: it took no connection.
    fn rest(&self) {
        let until = self.started.elapsed() + REST;
        self.resting_until.store(until.as_millis() as u64, Ordering::Relaxed);
        self.note(Verdict::Failure);
        self.tell();
    }

    /// Notes that it takes connections.
    fn awake(&self) {
        if self.resting_until.swap(0, Ordering::Relaxed) != 0 {
            self.tell();
        }
    }

    /// Exports whether it gets requests.
    fn tell(&self) {
        let resting = self.resting_until.load(Ordering::Relaxed) != 0;
        let up = !resting && !self.health.is_out() && self.health.breaker() == Breaker::Closed;
        self.metrics.up.set(i64::from(up));
    }

    fn is_resting(&self) -> bool {
        let until = self.resting_until.load(Ordering::Relaxed);
        until != 0 && (self.started.elapsed().as_millis() as u64) < until
    }
}

impl Load {
    /// Whose load this is.
    pub fn upstream(&self) -> &Arc<Upstream> {
        &self.upstream
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.upstream.tokens.fetch_sub(self.tokens, Ordering::Relaxed);
        self.upstream.requests.fetch_sub(1, Ordering::Relaxed);
        self.upstream.metrics.in_flight.dec();
        self.upstream.metrics.tokens_in_flight.sub(self.tokens as i64);
    }
}

impl Upstreams {
    /// The servers of a configuration, at least one.
    pub fn new(all: Vec<Arc<Upstream>>, balance: Balance) -> Self {
        assert!(!all.is_empty(), "the configuration requires an upstream");
        Self { all, balance, turn: AtomicUsize::new(0) }
    }

    /// All of them.
    pub fn all(&self) -> &[Arc<Upstream>] {
        &self.all
    }

    /// The one whose turn it is, other than `except`: the one with the fewest prompt tokens in flight, or simply the next.
    /// One that lately refused a connection is only taken if all did. `None` if health keeps requests away from all.
    pub fn choose(&self, except: Option<&Arc<Upstream>>) -> Option<&Arc<Upstream>> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        // Each round but the last lost a race for a trial, so the race is run again among fewer.
        for _ in 0..=self.all.len() {
            let in_turn = (0..self.all.len()).map(|i| &self.all[turn.wrapping_add(i) % self.all.len()]);
            let open = in_turn
                .filter(|upstream| except.is_none_or(|except| !Arc::ptr_eq(upstream, except)))
                .filter(|upstream| upstream.health.allows());
            let load = |upstream: &&Arc<Upstream>| match self.balance {
                Balance::LeastTokens => {
                    let tokens = upstream.tokens.load(Ordering::Relaxed);
                    (upstream.is_resting(), tokens, upstream.requests.load(Ordering::Relaxed))
                }
                // The first of equals is taken, and they are in turn.
                Balance::RoundRobin => (upstream.is_resting(), 0, 0),
            };
            let chosen = open.min_by_key(load)?;
            if chosen.health.admit() {
                return Some(chosen);
            }
        }
        None
    }

    /// In how long a request that found no upstream may find one: the earliest trial, and at least a second.
    pub fn retry_after(&self) -> Duration {
        let trials = self.all.iter().filter(|upstream| !upstream.health.is_out());
        trials.map(|upstream| upstream.health.wait()).min().unwrap_or_default().max(Duration::from_secs(1))
    }
}

#[cfg(test)]
mod tests {
    use prometheus::Registry;

    use super::*;

    fn upstreams(count: usize, balance: Balance) -> Upstreams {
        let limits = Limits { failures: 2, open: Duration::from_secs(3600), ..Limits::default() };
        let metrics = Metrics::register(&Registry::new()).unwrap();
        let specs = (0..count).map(|i| format!("http://u{i}:1").parse().unwrap());
        let make = |spec| Arc::new(Upstream::new(&spec, limits, Duration::from_secs(1), &metrics).unwrap());
        Upstreams::new(specs.map(make).collect(), balance)
    }

    fn chosen(upstreams: &Upstreams) -> &str {
        upstreams.choose(None).unwrap().url()
    }

    #[test]
    fn the_least_loaded_by_tokens_is_chosen() {
        let upstreams = upstreams(3, Balance::LeastTokens);
        let loads: Vec<_> =
            upstreams.all().iter().zip([30, 10, 20]).map(|(u, tokens)| u.load(tokens)).collect();
        assert_eq!(chosen(&upstreams), "http://u1:1");
        drop(loads);
        assert_eq!(upstreams.all()[0].metrics.tokens_in_flight.get(), 0);
    }

    #[test]
    fn equals_take_turns_and_the_refused_one_rests() {
        let upstreams = upstreams(2, Balance::LeastTokens);
        let urls: Vec<_> = (0..4).map(|_| chosen(&upstreams)).collect();
        assert_eq!(urls.iter().filter(|url| **url == "http://u0:1").count(), 2);
        let first = upstreams.all()[0].clone();
        first.rest();
        assert!((0..4).all(|_| chosen(&upstreams) == "http://u1:1"));
        first.awake();
        assert_eq!(upstreams.choose(Some(&upstreams.all()[1])).unwrap().url(), "http://u0:1");
    }

    #[test]
    fn round_robin_takes_turns_whatever_the_load() {
        let upstreams = upstreams(3, Balance::RoundRobin);
        let _load = upstreams.all()[0].load(1000);
        let urls: Vec<_> = (0..6).map(|_| chosen(&upstreams)).collect();
        assert_eq!(urls, ["http://u0:1", "http://u1:1", "http://u2:1"].repeat(2));
    }

    #[test]
    fn an_upstream_that_does_not_work_gets_nothing_and_none_left_is_said() {
        let upstreams = upstreams(2, Balance::LeastTokens);
        let [first, second] = [&upstreams.all()[0], &upstreams.all()[1]];
        (0..2).for_each(|_| first.note(Verdict::Failure));
        assert!((0..4).all(|_| chosen(&upstreams) == "http://u1:1"));
        assert_eq!((first.metrics.up.get(), first.metrics.breaker_opened.get()), (0, 1));
        (0..3).for_each(|_| second.checked(&Err("404".to_owned())));
        assert!(upstreams.choose(None).is_none());
        assert!(upstreams.retry_after() > Duration::from_secs(3000));
        assert_eq!((second.metrics.up.get(), second.metrics.checks.at(Check::Failed).get()), (0, 3));
        first.note(Verdict::Success);
        assert_eq!(chosen(&upstreams), "http://u0:1");
        assert_eq!(first.metrics.up.get(), 1);
    }
}
