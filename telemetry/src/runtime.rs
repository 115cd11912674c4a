//! Series about the process: memory, CPU, files, the async runtime, and which build it is.

use prometheus::core::{Collector, Desc};
use prometheus::process_collector::ProcessCollector;
use prometheus::proto::MetricFamily;
use prometheus::{Counter, IntGauge, IntGaugeVec, Opts, Registry};
use tokio::runtime::Handle;

/// Registers `process_…`, `<prefix>_tokio_…` of the runtime that this is called in, and `<prefix>_build_info`.
///
/// # Errors
/// `registry` has one of the names.
///
/// # Panics
/// Outside of a runtime.
pub fn register_process(registry: &Registry, prefix: &str, version: &str) -> prometheus::Result<()> {
    registry.register(Box::new(ProcessCollector::for_self()))?;
    registry.register(Box::new(Runtime::new(prefix, Handle::current())?))?;
    let info = IntGaugeVec::new(
        Opts::new(format!("{prefix}_build_info"), "Always 1; the label is the version."),
        &["version"],
    )?;
    info.with_label_values(&[version]).set(1);
    registry.register(Box::new(info))
}

/// Reads the runtime's own numbers at each scrape.
struct Runtime {
    handle: Handle,
    workers: IntGauge,
    tasks: IntGauge,
    queued: IntGauge,
    busy: Counter,
}

impl Runtime {
    fn new(prefix: &str, handle: Handle) -> prometheus::Result<Self> {
        let name = |end: &str| format!("{prefix}_tokio_{end}");
        Ok(Self {
            handle,
            workers: IntGauge::new(name("workers"), "Threads that run async tasks.")?,
            tasks: IntGauge::new(name("tasks"), "Async tasks that are alive.")?,
            queued: IntGauge::new(name("queued_tasks"), "Async tasks in the runtime's global queue.")?,
            busy: Counter::new(
                name("busy_seconds_total"),
                "Seconds that the runtime's threads were busy, all together.",
            )?,
        })
    }

    fn parts(&self) -> [&dyn Collector; 4] {
        [&self.workers, &self.tasks, &self.queued, &self.busy]
    }
}

impl Collector for Runtime {
    fn desc(&self) -> Vec<&Desc> {
        self.parts().into_iter().flat_map(Collector::desc).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let metrics = self.handle.metrics();
        let gauge = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
        self.workers.set(gauge(metrics.num_workers()));
        self.tasks.set(gauge(metrics.num_alive_tasks()));
        self.queued.set(gauge(metrics.global_queue_depth()));
        let busy: f64 = (0..metrics.num_workers())
            .map(|worker| metrics.worker_total_busy_duration(worker).as_secs_f64())
            .sum();
        // Two scrapes at a time may see these in either order; a counter never goes back.
        self.busy.inc_by((busy - self.busy.get()).max(0.0));
        self.parts().into_iter().flat_map(Collector::collect).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_process_and_its_runtime_show_themselves() {
        let registry = Registry::new();
        register_process(&registry, "tether_x", "1.2.3").unwrap();
        let text = crate::text(&registry).unwrap();
        for line in ["tether_x_tokio_workers 2", "tether_x_build_info{version=\"1.2.3\"} 1"] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        for name in ["process_resident_memory_bytes ", "process_open_fds ", "process_start_time_seconds "] {
            let value = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            assert!(value.parse::<f64>().unwrap() > 0.0, "{name}{value}");
        }
        let types: Vec<_> = text.lines().filter(|line| line.starts_with("# TYPE tether_x_tokio_")).collect();
        assert_eq!(types.len(), 4);
        assert!(types.contains(&"# TYPE tether_x_tokio_busy_seconds_total counter"));
    }
}
