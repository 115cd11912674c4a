//! The servers behind the proxy: which one gets a request, and what it holds.

mod exchange;
mod pool;
mod tcp;
mod wire;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use http::uri::Authority;

pub use self::exchange::{Request, SendError, send};
pub use self::pool::{Lease, Pool};
use crate::config::UpstreamSpec;
use crate::metrics::{Metrics, UpstreamMetrics};

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
    pub fn new(spec: &UpstreamSpec, metrics: &Metrics) -> Result<Self, prometheus::Error> {
        let url = spec.to_string();
        let metrics = metrics.upstream(&url)?;
        metrics.up.set(1);
        Ok(Self {
            authority: spec.authority.clone(),
            dump_dir: spec.dump_dir.as_deref().map(Arc::from),
            pool: Pool::new(spec.address()),
            metrics,
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

    /// Lets others go first for a while.
    fn rest(&self) {
        let until = self.started.elapsed() + REST;
        self.resting_until.store(until.as_millis() as u64, Ordering::Relaxed);
        self.metrics.up.set(0);
    }

    /// Notes that it takes connections.
    fn awake(&self) {
        if self.resting_until.swap(0, Ordering::Relaxed) != 0 {
            self.metrics.up.set(1);
        }
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
    pub fn new(all: Vec<Arc<Upstream>>) -> Self {
        assert!(!all.is_empty(), "the configuration requires an upstream");
        Self { all, turn: AtomicUsize::new(0) }
    }

    /// All of them.
    pub fn all(&self) -> &[Arc<Upstream>] {
        &self.all
    }

    /// The one with the fewest prompt tokens in flight, other than `except` if there is another. One that lately refused a
    /// connection is only taken if all did.
    pub fn choose(&self, except: Option<&Arc<Upstream>>) -> &Arc<Upstream> {
        if let [only] = &*self.all {
            return only;
        }
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let in_turn = (0..self.all.len()).map(|i| &self.all[turn.wrapping_add(i) % self.all.len()]);
        let others = in_turn.filter(|upstream| except.is_none_or(|except| !Arc::ptr_eq(upstream, except)));
        let load = |upstream: &&Arc<Upstream>| {
            let tokens = upstream.tokens.load(Ordering::Relaxed);
            (upstream.is_resting(), tokens, upstream.requests.load(Ordering::Relaxed))
        };
        others.min_by_key(load).expect("of two or more upstreams one remains")
    }
}

#[cfg(test)]
mod tests {
    use prometheus::Registry;

    use super::*;

    fn upstreams(count: usize) -> Upstreams {
        let metrics = Metrics::register(&Registry::new()).unwrap();
        let specs = (0..count).map(|i| format!("http://u{i}:1").parse().unwrap());
        Upstreams::new(specs.map(|spec| Arc::new(Upstream::new(&spec, &metrics).unwrap())).collect())
    }

    #[test]
    fn the_least_loaded_by_tokens_is_chosen() {
        let upstreams = upstreams(3);
        let loads: Vec<_> =
            upstreams.all().iter().zip([30, 10, 20]).map(|(u, tokens)| u.load(tokens)).collect();
        assert_eq!(upstreams.choose(None).url(), "http://u1:1");
        drop(loads);
        assert_eq!(upstreams.all()[0].metrics.tokens_in_flight.get(), 0);
    }

    #[test]
    fn equals_take_turns_and_the_refused_one_rests() {
        let upstreams = upstreams(2);
        let chosen: Vec<_> = (0..4).map(|_| upstreams.choose(None).url().to_owned()).collect();
        assert_eq!(chosen.iter().filter(|url| *url == "http://u0:1").count(), 2);
        let first = upstreams.all()[0].clone();
        first.rest();
        assert!((0..4).all(|_| upstreams.choose(None).url() == "http://u1:1"));
        first.awake();
        assert_eq!(upstreams.choose(Some(&upstreams.all()[1])).url(), "http://u0:1");
    }
}
