//! What all connections share.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use prometheus::Registry;

use crate::body::Budget;
use crate::config::{Args, InvalidConfig, dump_dirs};
use crate::limits::Admission;
use crate::metrics::Metrics;
use crate::orphans::{Orphans, Sweeper};
use crate::page::Page;
use crate::table::Table;
use crate::upstream::{Upstream, Upstreams};

/// The proxy, but for its sockets.
#[derive(Debug)]
pub struct App {
    /// As configured.
    pub args: Args,
    /// Every series.
    pub metrics: Arc<Metrics>,
    /// The servers.
    pub upstreams: Upstreams,
    /// What is in flight.
    pub table: Arc<Table>,
    /// What is to be deleted.
    pub orphans: Orphans,
    /// Memory for request bodies.
    pub memory: Budget,
    /// Turns for generations.
    pub admission: Admission,
    /// Every dump directory once.
    pub dump_dirs: Vec<Arc<Path>>,
    /// What the status page knows.
    pub page: Page,
    draining: AtomicBool,
    cutting: AtomicBool,
}

/// Why the proxy cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The settings do not work.
    #[error(transparent)]
    Config(#[from] InvalidConfig),
    /// Two series have one name, which would be a mistake in this crate.
    #[error("cannot register the metrics")]
    Metrics(#[from] prometheus::Error),
}

impl App {
    /// Makes the proxy that `args` describe, and the task that deletes orphans.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn new(args: Args) -> Result<(Arc<Self>, Sweeper), StartError> {
        let args = args.resolve()?;
        let metrics = Arc::new(Metrics::register(&Registry::new())?);
        let make = |spec| Upstream::new(spec, args.limits(), args.connect_timeout.0, &metrics);
        let upstreams: Result<Vec<_>, _> =
            args.upstream.iter().map(|spec| make(spec).map(Arc::new)).collect();
        let (orphans, sweeper) = Orphans::new(metrics.clone());
        let app = Self {
            upstreams: Upstreams::new(upstreams?, args.balance),
            table: Arc::default(),
            orphans,
            memory: Budget::new(args.body_memory.0, metrics.body_memory.clone()),
            admission: Admission::new(
                args.max_concurrent,
                args.queue,
                args.queue_timeout.0,
                metrics.queued.clone(),
            ),
            dump_dirs: dump_dirs(&args),
            page: Page::default(),
            draining: AtomicBool::new(false),
            cutting: AtomicBool::new(false),
            metrics,
            args,
        };
        Ok((Arc::new(app), sweeper))
    }

    /// From now on the proxy says that it is not ready.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
        self.metrics.draining.set(1);
    }

    /// Whether the proxy is about to stop.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// From now on, requests that end early were cut by the proxy.
    pub fn cut(&self) {
        self.cutting.store(true, Ordering::Relaxed);
    }

    /// Whether requests are being cut.
    pub fn is_cutting(&self) -> bool {
        self.cutting.load(Ordering::Relaxed)
    }
}
