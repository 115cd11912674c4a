//! The ways in which a run's metrics leave the process.

use std::time::Duration;

use anyhow::Context as _;
use prometheus::Registry;
use tether_extract::{cli::RunArgs, metrics::Metrics};
use tether_telemetry::Textfile;
use tokio::{net::TcpListener, task::JoinHandle};

const TEXTFILE_INTERVAL: Duration = Duration::from_secs(5);

/// A run's metrics on their way out.
pub(crate) struct Export {
    registry: Registry,
    textfile: Option<Textfile>,
    tasks: Vec<JoinHandle<()>>,
}

impl Export {
    /// Makes the metrics, and serves and writes them as `args` ask.
    pub(crate) async fn begin(args: &RunArgs) -> anyhow::Result<(Metrics, Self)> {
        let registry = Registry::new();
        let metrics = Metrics::register(&registry).context("cannot register the metrics")?;
        tether_telemetry::register_process(&registry, "tether_extract", env!("CARGO_PKG_VERSION"))
            .context("cannot register the metrics")?;
        let mut tasks = Vec::new();
        if let Some(address) = args.metrics_addr {
            let listener = TcpListener::bind(address)
                .await
                .with_context(|| format!("--metrics-addr: cannot listen on {address}"))?;
            let address = listener.local_addr().context("--metrics-addr")?;
            tracing::info!(%address, "serving metrics");
            tasks.push(tokio::spawn(tether_telemetry::serve(listener, registry.clone())));
        }
        let textfile = match &args.metrics_textfile {
            Some(path) => {
                let textfile = Textfile::new(path, "tether_extract_")
                    .with_context(|| format!("--metrics-textfile `{}`", path.display()))?;
                tasks.push(tokio::spawn(keep_writing(textfile.clone(), registry.clone())));
                Some(textfile)
            }
            None => None,
        };
        Ok((metrics, Self { registry, textfile, tasks }))
    }

    /// Ends it. The file keeps what the run came to.
    pub(crate) async fn end(self) {
        for task in self.tasks {
            task.abort();
            // Cancelled, or a write in progress that has ended: one of ours must not come after the last.
            let _ = task.await;
        }
        if let Some(textfile) = self.textfile
            && let Err(error) = textfile.write(&self.registry)
        {
            tracing::warn!(%error, "cannot write --metrics-textfile");
        }
    }
}

async fn keep_writing(textfile: Textfile, registry: Registry) {
    let mut failing = false;
    let mut ticks = tokio::time::interval(TEXTFILE_INTERVAL);
    loop {
        ticks.tick().await;
        let result = tokio::task::block_in_place(|| textfile.write(&registry));
        if let Err(error) = &result
            && !failing
        {
            tracing::warn!(%error, "cannot write --metrics-textfile; trying again");
        }
        failing = result.is_err();
    }
}
