//! The `tether-server` binary: settings, logging, run, exit code.

mod process;

use anyhow::Context;
use tether_server::config::Args;
use tracing_subscriber::EnvFilter;

fn main() {
    let args: Args = tether_settings::parse("TETHER_SERVER_");
    let code = match run(args) {
        Ok(()) => 0,
        Err(error) => {
            tracing::error!("{error:#}");
            // A log level may hide the line above; the reason for an exit is never hidden.
            if !tracing::enabled!(tracing::Level::ERROR) {
                eprintln!("error: {error:#}");
            }
            1
        }
    };
    process::leave(code)
}

fn run(args: Args) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(&args.log_level).with_context(|| {
        format!("--log-level `{}`: expected error, warn, info, debug, trace or a filter", args.log_level)
    });
    let (filter, bad_filter) = match filter {
        Ok(filter) => (filter, None),
        Err(error) => (EnvFilter::new("info"), Some(error)),
    };
    let log =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    if args.log_json {
        log.json().flatten_event(true).init();
    } else {
        log.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).init();
    }
    if let Some(error) = bad_filter {
        return Err(error);
    }
    // The model computes on threads of its own; these move bytes and wait.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(8)
        .thread_name("tether-http")
        .enable_all()
        .build()
        .context("cannot start the HTTP threads")?;
    let result = runtime.block_on(tether_server::startup::run(args));
    // What was given up on (a step in progress, a model half loaded) is not waited for.
    runtime.shutdown_background();
    Ok(result?)
}
