//! `tether-proxy`: reads the settings, opens the sockets, and runs until told to stop.

use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::Context;
use tether_proxy::app::App;
use tether_proxy::config::Args;
use tether_proxy::server;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tracing::info;
use tracing_subscriber::filter::LevelFilter;

fn main() -> ExitCode {
    let args: Args = tether_settings::parse("TETHER_PROXY_");
    start_log(&args);
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start_log(args: &Args) {
    let log = tracing_subscriber::fmt()
        .with_max_level(LevelFilter::from_level(args.log_level))
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    if args.log_json { log.json().init() } else { log.init() }
}

fn run(args: Args) -> anyhow::Result<()> {
    let (app, sweeper) = App::new(args)?;
    tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start the runtime")?.block_on(
        async {
            app.metrics.register_process().context("cannot register the metrics")?;
            let args = &app.args;
            let bind = |address| async move {
                TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))
            };
            let listener = bind(args.listen).await?;
            let metrics = match args.metrics_addr {
                Some(address) => Some(bind(address).await?),
                None => None,
            };
            let signals = signals()?;
            for spec in &args.upstream {
                info!(upstream = %spec, dump_dir = spec.dump_dir.as_ref().map(|dir| dir.display().to_string()), "upstream");
            }
            let metrics_addr = metrics.as_ref().map(TcpListener::local_addr).transpose()?;
            info!(
                listen = %listener.local_addr()?,
                metrics = metrics_addr.map(|address| address.to_string()),
                version = env!("CARGO_PKG_VERSION"),
                "ready"
            );
            server::serve(app.clone(), sweeper, listener, metrics, signals).await;
            Ok(())
        },
    )
}

/// Each SIGTERM or SIGINT.
fn signals() -> anyhow::Result<mpsc::Receiver<()>> {
    let (sender, receiver) = mpsc::channel(2);
    for kind in [SignalKind::terminate(), SignalKind::interrupt()] {
        let mut signal = signal(kind).context("cannot wait for signals")?;
        let sender = sender.clone();
        tokio::spawn(async move {
            while signal.recv().await.is_some() {
                // More than two tell nothing new.
                let _ = sender.try_send(());
            }
        });
    }
    Ok(receiver)
}
