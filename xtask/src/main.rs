//! `cargo xtask`: set-up, demo, tests and measurements of this repository. Needs no libtorch; it fetches it.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod bench;
mod dashboards;
mod demo;
mod folder;
mod golden;
mod http;
mod libtorch;
mod prerequisites;
mod process;
mod python_env;
mod setup;
mod stack;
mod test;
mod wheels;
mod workspace;

/// Set-up, demo, tests and measurements of Tether.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    Setup(setup::Args),
    Demo(demo::Args),
    Test(test::Args),
    Bench(bench::Args),
    /// Write grafana/dashboards/ from grafana/source/, and docs/metrics.md from what the release binaries export.
    Dashboards,
}

fn main() -> ExitCode {
    let result = match Args::parse().task {
        Task::Setup(args) => setup::run(&args),
        Task::Demo(args) => demo::run(&args),
        Task::Test(args) => test::run(&args),
        Task::Bench(args) => bench::run(&args),
        Task::Dashboards => dashboards::run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nerror: {error:#}");
            ExitCode::FAILURE
        }
    }
}
