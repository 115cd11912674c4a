//! `tether-extract`.

mod export;

use std::{
    io::{self, IsTerminal as _},
    process::ExitCode,
};

use anyhow::Context as _;
use tether_extract::{
    cli::{Cli, Command, RunArgs, VerifyArgs},
    progress::Terminal,
    run::run,
    stop::Stop,
    verify::verify,
};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

const INCOMPLETE: u8 = 1;
const NOT_BEGUN: u8 = 2;

fn main() -> ExitCode {
    let cli: Cli = tether_settings::parse("TETHER_EXTRACT_");
    let terminal = Terminal::default();
    let result = log_to(&terminal, &cli.command.common().log_level).and_then(|()| match cli.command {
        Command::Run(args) => extract(*args, &terminal),
        Command::Verify(args) => check(&args),
    });
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => INCOMPLETE.into(),
        Err(error) => {
            eprintln!("tether-extract: {error:#}");
            NOT_BEGUN.into()
        }
    }
}

fn log_to(terminal: &Terminal, level: &str) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(level)
        .with_context(|| format!("--log-level `{level}` is not a level or filter"))?;
    let terminal = terminal.clone();
    let writer = move || terminal.writer();
    let colours = io::stderr().is_terminal();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(colours)
        .with_target(false)
        .with_writer(writer)
        .init();
    Ok(())
}

/// Whether the set is complete.
fn extract(args: RunArgs, terminal: &Terminal) -> anyhow::Result<bool> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let report = runtime.block_on(async {
        let stop = Stop::default();
        stop_on_signals(stop.clone()).context("cannot listen for signals")?;
        let (metrics, export) = export::Export::begin(&args).await?;
        let result = run(args.options(metrics), stop, terminal).await;
        export.end().await;
        Ok::<_, anyhow::Error>(result?)
    })?;
    println!("{report}");
    Ok(report.complete)
}

/// Whether everything is there and good.
fn check(args: &VerifyArgs) -> anyhow::Result<bool> {
    let verified = verify(&args.out)?;
    println!("{verified}");
    Ok(verified.is_sound() && (verified.is_complete() || args.allow_incomplete))
}

/// The first signal stops the run once the samples in flight are done; the second ends the process at once, which loses
/// nothing that is recorded.
fn stop_on_signals(stop: Stop) -> io::Result<()> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            if stop.reason().is_some_and(|reason| reason == SIGNALLED) {
                std::process::exit(INCOMPLETE.into());
            }
            tracing::warn!("stopping once the samples in flight are done; once more to stop at once");
            stop.ask(SIGNALLED);
        }
    });
    Ok(())
}

const SIGNALLED: &str = "interrupted";
