//! `cargo xtask bench`: measurements. Nothing here passes or fails; it prints numbers and their spread.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Subcommand;

use crate::demo::{self, count};
use crate::stack::{Interrupt, Places, Stack, binary, fresh_dir};
use crate::{process, setup, workspace};

/// Measure.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Extract(Extract),
    /// Bytes per second at which the proxy tags a body of 1 MB.
    Tag,
}

/// Tokens per second of a whole extraction: client, proxy, server and files.
#[derive(clap::Args)]
struct Extract {
    /// Checkpoint directory. Without it, the demo's tiny model.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Tokenised dataset (JSONL). Without it, the demo's.
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Requests kept in flight.
    #[arg(long, value_name = "N", default_value_t = 32)]
    concurrency: usize,
    /// Measured rounds. One more is run first and not counted.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    match &args.what {
        What::Extract(extract) => extract.run(),
        What::Tag => tag(),
    }
}

fn tag() -> Result<()> {
    let mut bench = process::cargo();
    bench.args(["bench", "--package", "tether-proxy", "--bench", "tag"]);
    process::run(&mut bench)
}

impl Extract {
    fn run(&self) -> Result<()> {
        // Relative to where the user is, while everything we start runs in the checkout.
        let here =
            |path: &PathBuf| std::path::absolute(path).with_context(|| format!("path {}", path.display()));
        let dir = workspace::output_dir("bench")?;
        let data = self.data.as_ref().map_or(Ok(demo::samples_file()), here)?;
        let tokens: usize = demo::read_samples(&data)?.iter().sum();
        if tokens == 0 {
            bail!("{} has no tokens", data.display());
        }
        setup::minimal()?;
        demo::build()?;
        let interrupt = Interrupt::listen()?;
        let model = match &self.model {
            Some(model) => here(model)?,
            None => {
                let model = dir.join("model");
                demo::write_model(&model)?;
                model
            }
        };
        let mut stack =
            Stack::start(&Places { model, dumps: dir.join("dumps"), logs: dir.clone() }, &interrupt)?;
        for line in stack.command_lines() {
            println!("$ {line}");
        }
        let out = dir.join("out");
        let mut speeds = Vec::new();
        for round in 0..=self.rounds {
            fresh_dir(&out)?;
            let mut extract = binary("tether-extract")?;
            extract.args(["run", "--proxy", &stack.proxy_url(), "--data"]).arg(&data);
            extract.arg("--out").arg(&out).args(["--format", "specforge"]);
            extract.args(["--concurrency", &self.concurrency.to_string()]);
            if round == 0 {
                println!("$ {}\n", process::show(&extract));
            }
            // Its own report would drown the numbers; an error still shows.
            extract.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
            let seconds = stack.run(&mut extract)?.as_secs_f64();
            let speed = tokens as f64 / seconds;
            let name = if round == 0 { "warm-up".to_owned() } else { format!("round {round}") };
            println!("{name:<10}{seconds:>8.2} s{:>12} tokens/s", count(speed as u64));
            if round > 0 {
                speeds.push(speed);
            }
        }
        stack.stop()?;
        println!("\n{}", spread(&mut speeds));
        Ok(())
    }
}

/// Median, smallest and largest.
fn spread(speeds: &mut [f64]) -> String {
    speeds.sort_by(f64::total_cmp);
    let middle = speeds.len() / 2;
    let median = if speeds.len().is_multiple_of(2) {
        (speeds[middle - 1] + speeds[middle]) / 2.0
    } else {
        speeds[middle]
    };
    let (low, high) = (speeds[0], speeds[speeds.len() - 1]);
    let [median, low, high] = [median, low, high].map(|speed| count(speed as u64));
    format!("median {median} tokens/s, from {low} to {high}, {} rounds", speeds.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_and_the_spread_are_stated() {
        assert_eq!(spread(&mut [3000.0]), "median 3,000 tokens/s, from 3,000 to 3,000, 1 rounds");
        assert_eq!(
            spread(&mut [900.0, 3000.0, 1000.0]),
            "median 1,000 tokens/s, from 900 to 3,000, 3 rounds"
        );
        assert_eq!(spread(&mut [4.0, 1.0, 2.0, 3.0]), "median 2 tokens/s, from 1 to 4, 4 rounds");
    }
}
