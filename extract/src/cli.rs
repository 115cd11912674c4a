//! The command line. Every flag can also come from `TETHER_EXTRACT_…` or a file (`--config`).

use std::{net::SocketAddr, num::NonZero, path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand};

use crate::{
    client::ProxyUrl,
    dataset::RepeatedIds,
    format::{FormatName, Strategy, choose},
    metrics::Metrics,
    plan::{TooLong, Wanted},
    points::{Axis, LayerList, Points},
    retry::Policy,
    run::RunOptions,
    stored::Depth,
};

/// Extracts hidden states of a data set into files that a trainer loads.
#[derive(Debug, Parser)]
#[command(name = "tether-extract", version)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Extract what is missing. Run again to resume. Exit code: 0 the set is complete, 1 it is not, 2 could not begin.
    Run(Box<RunArgs>),
    /// Check every file of a run. Exit code: 0 all good and complete, 1 not, 2 could not begin.
    Verify(VerifyArgs),
}

/// Flags of every command.
#[derive(Debug, Args)]
pub struct Common {
    /// Take flags that are not given from this TOML file
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// What is logged: error, warn, info, debug, trace, or a filter such as `tether_extract=debug`
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: String,
}

/// Flags of `run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Address of the proxy
    #[arg(long, value_name = "URL")]
    pub proxy: ProxyUrl,
    /// The data set: JSONL with `input_ids` and, if wanted, `loss_mask` and `id`. Lines may be appended to it between runs; a
    /// change of those that were there needs another `--out`
    #[arg(long, value_name = "FILE")]
    pub data: PathBuf,
    /// Where the files go; made if it is not there
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// The trainer whose files are written
    #[arg(long, value_enum)]
    pub format: FormatName,
    /// The method of drafting they are for
    #[arg(long, value_enum, default_value_t)]
    pub strategy: Strategy,
    /// Capture these layers instead of the server's own choice, such as `2,30,58`
    #[arg(long, value_name = "LAYERS")]
    pub points: Option<LayerList>,
    /// Whether `--points` number what enters a layer (SGLang, vLLM) or what leaves it (SpecForge)
    #[arg(long, value_enum, default_value_t)]
    pub axis: Axis,
    /// Requests in flight
    #[arg(long, value_name = "N", default_value = "32")]
    pub concurrency: NonZero<usize>,
    /// Samples checked and written at the same time
    #[arg(long, value_name = "N", default_value = "4")]
    pub writers: NonZero<usize>,
    /// Only the first N rows
    #[arg(long, value_name = "N")]
    pub limit: Option<u64>,
    /// Rows with more tokens are not extracted. No row is ever cut
    #[arg(long, value_name = "TOKENS")]
    pub max_length: Option<u64>,
    /// What rows beyond `--max-length` count as
    #[arg(long, value_enum, default_value_t)]
    pub too_long: TooLong,
    /// What to do with a row whose `id` an earlier row has
    #[arg(long, value_enum, default_value_t)]
    pub repeated_ids: RepeatedIds,
    /// How often a sample is tried again after a failure that may be chance
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub retries: u32,
    /// Longest wait for one reply, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 1800.0, value_parser = seconds)]
    pub request_timeout: f64,
    /// How long a server may be busy or gone before the run stops, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0, value_parser = seconds)]
    pub patience: f64,
    /// How closely files of earlier runs are checked
    #[arg(long, value_enum, default_value_t)]
    pub verify: Depth,
    /// Go on although the disk seems too small
    #[arg(long)]
    pub force: bool,
    /// Serve Prometheus metrics at `/metrics` of this address while the run goes on. Port 0 takes a free one, which a log
    /// line names
    #[arg(long, value_name = "ADDR")]
    pub metrics_addr: Option<SocketAddr>,
    /// Write the metrics to this file every five seconds and at the end, for node_exporter's textfile collector. Its name
    /// ends in `.prom`
    #[arg(long, value_name = "FILE")]
    pub metrics_textfile: Option<PathBuf>,
    /// Flags of every command.
    #[command(flatten)]
    pub common: Common,
}

/// Flags of `verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// The output directory of a run
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Do not ask for a file for every row of the data set
    #[arg(long)]
    pub allow_incomplete: bool,
    /// Flags of every command.
    #[command(flatten)]
    pub common: Common,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= 1e9 => Ok(seconds),
        _ => Err("expected a number of seconds above 0".into()),
    }
}

impl Command {
    /// Flags of every command.
    pub fn common(&self) -> &Common {
        match self {
            Self::Run(args) => &args.common,
            Self::Verify(args) => &args.common,
        }
    }
}

impl RunArgs {
    /// What the run is to do, counted by `metrics`.
    pub fn options(self, metrics: Metrics) -> RunOptions {
        let args = self;
        RunOptions {
            proxy: args.proxy,
            data: args.data,
            out: args.out,
            format: choose(args.format, args.strategy),
            points: args.points.map(|layers| Points::new(layers, args.axis)),
            concurrency: args.concurrency,
            writers: args.writers,
            wanted: Wanted { limit: args.limit, max_length: args.max_length, too_long: args.too_long },
            repeated_ids: args.repeated_ids,
            policy: Policy { retries: args.retries, patience: Duration::from_secs_f64(args.patience) },
            request_timeout: Duration::from_secs_f64(args.request_timeout),
            verify: args.verify,
            force: args.force,
            metrics,
            on_step: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_documented_command_is_accepted() {
        let line = "tether-extract run --proxy http://127.0.0.1:8000 --data d.jsonl --out o --format specforge \
                    --strategy eagle3 --concurrency 7 --points 1,29,57 --axis output";
        let Command::Run(args) = Cli::try_parse_from(line.split_whitespace()).unwrap().command else {
            panic!()
        };
        let options = args.options(Metrics::register(&prometheus::Registry::new()).unwrap());
        assert_eq!(options.concurrency.get(), 7);
        assert_eq!(options.points.unwrap().to_string(), "R2, R30, R58");
        assert_eq!(options.format.name(), "specforge/eagle3");
    }
}
