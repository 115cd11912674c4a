//! `cargo xtask demo`: the whole way from a dataset to a trainer's files, on a model that this machine makes itself.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::stack::{Interrupt, Places, Stack, binary, fresh_dir};
use crate::{process, setup, workspace};

mod model;
mod output;
mod random;
mod words;

pub(crate) use output::read_samples;
pub(crate) use words::{count, line_broken};

/// Extract hidden states of the shipped dataset with a tiny model, and check every file.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Requests kept in flight.
    #[arg(long, value_name = "N", default_value_t = 32)]
    concurrency: usize,
    /// Use the binaries that are there, as `cargo build --release --workspace` left them.
    #[arg(long)]
    no_build: bool,
}

/// The tokenizer and the dataset that ship with the demo.
pub(crate) fn assets_dir() -> PathBuf {
    workspace::root().join("xtask/demo")
}

/// The dataset, tokenised.
pub(crate) fn samples_file() -> PathBuf {
    assets_dir().join("samples.jsonl")
}

/// Builds the three binaries.
pub(crate) fn build() -> Result<()> {
    let packages = ["-p", "tether-server", "-p", "tether-proxy", "-p", "tether-extract"];
    process::run(process::cargo().args(["build", "--release"]).args(packages))
}

/// Writes the demo's model into `dir`, and says what it is.
pub(crate) fn write_model(dir: &Path) -> Result<()> {
    let written = model::write(dir, &assets_dir())?;
    let shape = model::SHAPE;
    println!(
        "{}: DeepSeek-V3 in small, with random weights from a fixed seed\n\
         {} layers, hidden size {}, {} of {} experts a token, {} weights in {} shards",
        workspace::relative(dir).display(),
        shape.num_hidden_layers,
        shape.hidden_size,
        shape.num_experts_per_tok,
        shape.n_routed_experts,
        count(written.parameters as u64),
        written.shards
    );
    Ok(())
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let started = Instant::now();
    headline("Set-up");
    setup::minimal()?;
    if !args.no_build {
        build()?;
    }
    // Only now: until here Ctrl-C ends us and what we run at once, as it should.
    let interrupt = Interrupt::listen()?;

    let dir = workspace::demo_dir()?;
    let places = Places { model: dir.join("model"), dumps: dir.join("dumps"), logs: dir.clone() };
    let out = dir.join("out");
    headline("Model and data");
    write_model(&places.model)?;
    let samples = read_samples(&samples_file())?;
    let tokens: usize = samples.iter().sum();
    println!(
        "{}: {} samples, {} tokens",
        workspace::relative(&samples_file()).display(),
        count(samples.len() as u64),
        count(tokens as u64)
    );
    fresh_dir(&out)?;

    headline("Extract");
    let mut stack = Stack::start(&places, &interrupt)?;
    let mut client = binary("tether-extract")?;
    client.args(["run", "--proxy", &stack.proxy_url(), "--data"]).arg(samples_file());
    client.arg("--out").arg(&out).args([
        "--format",
        "specforge",
        "--concurrency",
        &args.concurrency.to_string(),
    ]);
    let commands: Vec<String> = stack
        .command_lines()
        .into_iter()
        .map(str::to_owned)
        .chain([process::show(&client)])
        .map(|line| line_broken(&line))
        .collect();
    println!("{}", commands.join("\n"));
    println!();
    let took = stack.run(&mut client)?;

    headline("Verify");
    let mut verify = binary("tether-extract")?;
    verify.arg("verify").arg("--out").arg(&out);
    println!("{}\n", line_broken(&process::show(&verify)));
    stack.run(&mut verify)?;
    let counters = Counters::read(&stack)?;
    stack.stop()?;
    let files = output::check(&out, &samples, model::SHAPE.hidden_size)?;
    let left = output::dumps_left(&places.dumps)?;
    counters.check(samples.len() as u64, left)?;

    headline("Done");
    let summary =
        Summary { samples: samples.len(), tokens, took, files, counters, left, total: started.elapsed() };
    print!("{}", summary.table());
    println!(
        "\nFiles for the trainer   {}\nLogs                    {}",
        workspace::relative(&out).display(),
        workspace::relative(&dir.join("tether-*.log")).display()
    );
    println!("\nNothing above is special to the demo. With your own model and data, run:\n");
    println!("{}", commands.join("\n"));
    Ok(())
}

fn headline(text: &str) {
    println!("\n== {text} ==");
}

/// What the two services counted.
struct Counters {
    /// Dumps that the proxy compared with their request's tokens and found equal.
    matched: u64,
    /// Dumps that were not their request's, by the proxy's or by the server's own check.
    mismatches: u64,
    /// Requests whose dump did not come.
    missing: u64,
}

impl Counters {
    fn read(stack: &Stack) -> Result<Self> {
        let (proxy, server) = (stack.proxy_metrics()?, stack.server_metrics()?);
        let gate = |result: &str| proxy.sum("tether_proxy_gate_total", &[result, "checked=\"tokens\""]);
        Ok(Self {
            matched: gate("result=\"matched\"")?,
            missing: gate("result=\"missing\"")?,
            mismatches: proxy.sum("tether_proxy_mismatches_total", &[])?
                + server.sum("tether_server_token_mismatches_total", &[])?,
        })
    }

    fn check(&self, samples: u64, left: usize) -> Result<()> {
        let Self { matched, mismatches, missing } = *self;
        if mismatches != 0 || missing != 0 {
            bail!("{mismatches} dumps were not their request's, {missing} were missing; both must be 0");
        }
        // Not fewer: a reply whose dump nobody compared would prove nothing. More only if a request was repeated.
        if matched < samples {
            bail!("the proxy compared {matched} dumps with their requests, there were {samples} samples");
        }
        if left != 0 {
            bail!("{left} files are left in the dump directory although every sample was fetched");
        }
        Ok(())
    }
}

struct Summary {
    samples: usize,
    tokens: usize,
    took: Duration,
    files: output::Files,
    counters: Counters,
    left: usize,
    total: Duration,
}

impl Summary {
    fn table(&self) -> String {
        let seconds = self.took.as_secs_f64();
        let rows = [
            (
                "samples extracted",
                format!("{} of {}", count(self.files.count as u64), count(self.samples as u64)),
            ),
            ("tokens", count(self.tokens as u64)),
            ("time to extract", format!("{seconds:.2} s")),
            ("speed", format!("{} tokens/s", count((self.tokens as f64 / seconds) as u64))),
            ("states written", format!("{:.1} MB", self.files.bytes as f64 / 1e6)),
            ("dumps compared", format!("{}, each with its request's tokens", count(self.counters.matched))),
            ("mismatches", count(self.counters.mismatches)),
            ("missing or damaged", count(self.counters.missing)),
            ("left in the dump dir", count(self.left as u64)),
            ("wall time, all steps", format!("{:.1} s", self.total.as_secs_f64())),
        ];
        rows.iter().map(|(name, value)| format!("{name:<24}{value}\n")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counters() -> Counters {
        Counters { matched: 315, mismatches: 0, missing: 0 }
    }

    #[test]
    fn anything_but_one_equal_dump_a_sample_is_a_failure() {
        counters().check(315, 0).unwrap();
        for (counters, left, expected) in [
            (Counters { mismatches: 1, ..counters() }, 0, "1 dumps were not their request's"),
            (Counters { missing: 2, ..counters() }, 0, "2 were missing"),
            (Counters { matched: 314, ..counters() }, 0, "compared 314 dumps"),
            (counters(), 1, "1 files are left"),
        ] {
            let error = counters.check(315, left).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn the_table_fits_a_terminal() {
        let summary = Summary {
            samples: 1_315,
            tokens: 1_085_291,
            took: Duration::from_millis(2_500),
            files: output::Files { count: 1_315, bytes: 123_456_789 },
            counters: counters(),
            left: 0,
            total: Duration::from_secs(600),
        };
        let table = summary.table();
        assert!(table.lines().all(|line| line.len() <= 80), "{table}");
        assert!(table.contains("samples extracted       1,315 of 1,315\n"), "{table}");
        assert!(table.contains("speed                   434,116 tokens/s\n"), "{table}");
    }
}
