//! The server over a fake model, for this crate's tests.

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use prometheus::Registry;
use tether_dump::{Dtype, DumpLayout, FinalState};
use tether_model::CaptureSpec;

use crate::app::{App, Lifecycle};
use crate::auth::Keys;
use crate::budget::Budget;
use crate::engine::testing::{EOS, FakeModel, HIDDEN, LAYERS, VOCAB};
use crate::engine::{Engine, EngineOptions};
use crate::identity::InFlightRids;
use crate::metrics::Metrics;
use crate::plan::{CaptureDefaults, CaptureMode, ModelInfo, Planner};
use crate::sink::{Sink, SinkOptions};

/// Positions of the fake model.
pub(crate) const CONTEXT: usize = 64;

/// What a test varies.
pub(crate) struct Fixture {
    pub(crate) model: FakeModel,
    pub(crate) mode: CaptureMode,
    pub(crate) layout: DumpLayout,
    pub(crate) budget: u64,
    pub(crate) queue_timeout: Duration,
    pub(crate) max_queued: usize,
    pub(crate) max_batch_tokens: usize,
    pub(crate) max_running: usize,
    pub(crate) kv_budget: u64,
    pub(crate) buffer_bytes: u64,
    pub(crate) incremental: bool,
    pub(crate) keys: Keys,
}

impl Default for Fixture {
    fn default() -> Self {
        Self {
            model: FakeModel::default(),
            mode: CaptureMode::Tagged,
            layout: DumpLayout::File,
            budget: 1 << 30,
            queue_timeout: Duration::from_secs(60),
            max_queued: 100,
            max_batch_tokens: 40,
            max_running: 100,
            kv_budget: 1 << 20,
            buffer_bytes: 1 << 20,
            incremental: false,
            keys: Keys::default(),
        }
    }
}

pub(crate) fn planner(mode: CaptureMode) -> Planner {
    let points = vec![2, 4, 5];
    let spec = CaptureSpec::new(&points, FinalState::PreNorm, LAYERS).unwrap();
    Planner {
        tokenize_seconds: Metrics::unregistered().tokenize_seconds,
        model: ModelInfo {
            name: "fake".to_owned(),
            path: "/models/fake".into(),
            config_hash: "c0ffee".to_owned(),
            architecture: "FakeForCausalLM".to_owned(),
            num_layers: LAYERS,
            hidden_size: HIDDEN,
            vocab_size: VOCAB,
            context: CONTEXT,
            eos_token_ids: vec![EOS],
        },
        defaults: CaptureDefaults {
            points,
            final_state: FinalState::PreNorm,
            spec: Arc::new(spec),
            mode,
            layout: DumpLayout::File,
        },
        tokenizer: None,
        template: None,
        dump_dtype: OnceLock::from(Dtype::Float32),
        server: "tether-server test".to_owned(),
        warned: std::sync::Once::new(),
    }
}

impl Fixture {
    pub(crate) fn sink(&self, dir: &Path, metrics: &Metrics) -> Sink {
        let options = SinkOptions {
            dir: dir.to_owned(),
            layout: self.layout,
            fsync: false,
            writers: 2,
            buffer_bytes: self.buffer_bytes,
            hidden_size: HIDDEN,
        };
        Sink::start(options, metrics.clone())
    }

    pub(crate) fn engine(&self, dir: &Path, metrics: &Metrics) -> Engine {
        let options = EngineOptions {
            max_batch_tokens: self.max_batch_tokens,
            max_queued: self.max_queued,
            max_running: self.max_running,
            kv_budget: self.kv_budget,
            states_budget: self.buffer_bytes,
        };
        let model = self.model.clone();
        Engine::start(options, self.sink(dir, metrics), metrics.clone(), || Ok::<_, ()>(model), |_| {})
    }

    /// An app that serves, dumping into `dir`.
    pub(crate) fn app(&self, dir: &Path) -> Arc<App> {
        let registry = Registry::new();
        let metrics = Metrics::register(&registry).unwrap();
        let lifecycle = Lifecycle::default();
        lifecycle.serve();
        Arc::new(App {
            planner: planner(self.mode),
            engine: self.engine(dir, &metrics),
            budget: Budget::new(dir, self.budget, None, &metrics).unwrap(),
            dump_dir: dir.to_owned(),
            queue_timeout: self.queue_timeout,
            incremental_streaming: self.incremental,
            keys: self.keys.clone(),
            launch: serde_json::json!({"model_path": "/models/fake"}),
            metrics,
            registry,
            rids: InFlightRids::default(),
            lifecycle,
        })
    }
}

/// Waits for `condition`, in a deadline that only a hang misses.
pub(crate) fn eventually(what: &str, condition: impl Fn() -> bool) {
    let started = std::time::Instant::now();
    while !condition() {
        assert!(started.elapsed() < Duration::from_secs(60), "never happened: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Names of the files in `dir`, sorted.
pub(crate) fn files(dir: &Path) -> Vec<String> {
    let entries =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = entries.collect();
    names.sort();
    names
}
