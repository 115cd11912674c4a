//! `cargo xtask test`: what the README and CI call. Every step in order, stopping at the first that fails.

use std::fmt::Write as _;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::{demo, prerequisites, process, python_env, setup, workspace};

/// Set up, check format and lints, build, and run every test.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also run the long fault, soak, fuzz and scale tests, at full size.
    #[arg(long)]
    campaign: bool,
    /// Leave out a step. May be repeated; the summary counts what was left out.
    #[arg(long, value_name = "STEP")]
    skip: Vec<Step>,
}

/// One step of the run. The order here is the order of running.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Step {
    /// Prerequisites, libtorch, the Python environment, the references.
    Setup,
    /// The system packages that tests need.
    Packages,
    /// `cargo fmt --check`.
    Format,
    /// `cargo clippy` with warnings as errors.
    Clippy,
    /// `cargo build` of all binaries.
    Build,
    /// The demo, whose output the Python tests then look at.
    Demo,
    /// References for the exactness tests, made by transformers, where set-up has not made them.
    Golden,
    /// `cargo test`.
    Rust,
    /// pytest.
    Python,
}

impl Step {
    fn name(self) -> String {
        self.to_possible_value().expect("no step is hidden").get_name().to_owned()
    }

    fn run(self, args: &Args, tests: &mut Counts) -> Result<()> {
        let cargo = |args: &str| {
            let mut cargo = process::cargo();
            cargo.args(args.split(' '));
            cargo
        };
        // Scaled-down by default; a test that has a long form reads this.
        let sized = |mut command: Command| {
            if args.campaign {
                command.env("TETHER_CAMPAIGN", "1");
            }
            command
        };
        match self {
            Step::Setup => setup::full(),
            Step::Packages => prerequisites::test_programs(),
            Step::Format => process::run(&mut cargo("fmt --all --check")),
            Step::Clippy => {
                process::run(&mut cargo("clippy --release --workspace --all-targets -- -D warnings"))
            }
            Step::Build => process::run(&mut cargo("build --release --workspace")),
            // A process of its own, which takes over the signals that end it. Not built anew: cargo would choose other
            // features for the three binaries alone than for the workspace.
            Step::Demo => process::run(
                process::command(workspace::bin_dir()?.join("xtask")).args(["demo", "--no-build"]),
            ),
            Step::Golden => setup::references(),
            Step::Rust => {
                let mut command = sized(cargo("test --release --workspace"));
                process::run_watched(&mut command, |line| tests.add_cargo(line))
            }
            Step::Python => {
                let mut command = sized(python_tests(args)?);
                process::run_watched(&mut command, |line| tests.add_pytest(line))
            }
        }
    }
}

/// pytest, told where the binaries are and what the demo left.
fn python_tests(args: &Args) -> Result<Command> {
    let mut command = process::command(python_env::interpreter());
    command.args(["-m", "pytest", "-p", "no:cacheprovider", "tests/python"]);
    command.env("TETHER_BIN_DIR", workspace::bin_dir()?);
    // A demo of some earlier day would say nothing about this build.
    if !args.skip.contains(&Step::Demo) {
        let dir = workspace::demo_dir()?;
        command.env("TETHER_DEMO_DIR", &dir).env("TETHER_SPECFORGE_DIR", dir.join("out"));
        command.env("TETHER_SPECFORGE_DATA", demo::samples_file());
    }
    Ok(command)
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut tests = Counts::default();
    let mut done = Vec::new();
    let mut failure = None;
    for &step in Step::value_variants() {
        if args.skip.contains(&step) {
            done.push((step, Outcome::LeftOut));
            continue;
        }
        println!("\n== {} ==", step.name());
        let started = Instant::now();
        let result = step.run(args, &mut tests);
        let outcome = if result.is_ok() { Outcome::Passed } else { Outcome::Failed };
        done.push((step, outcome(started.elapsed())));
        if let Err(error) = result {
            failure = Some(error.context(format!("step `{}` failed", step.name())));
            break;
        }
    }
    print!("\n{}{}\n", table(&done), tests.line());
    failure.map_or(Ok(()), Err).context("the tests did not pass")
}

#[derive(Clone, Copy)]
enum Outcome {
    Passed(Duration),
    Failed(Duration),
    LeftOut,
}

fn table(done: &[(Step, Outcome)]) -> String {
    let mut text = String::new();
    let mut total = Duration::ZERO;
    let mut left_out = 0;
    for (step, outcome) in done {
        let (word, took) = match outcome {
            Outcome::Passed(took) => ("ok", *took),
            Outcome::Failed(took) => ("FAILED", *took),
            Outcome::LeftOut => ("left out", Duration::ZERO),
        };
        left_out += usize::from(matches!(outcome, Outcome::LeftOut));
        total += took;
        let _ = writeln!(text, "{:<10}{word:<9}{:>8.1} s", step.name(), took.as_secs_f64());
    }
    let _ = writeln!(text, "{:<19}{:>8.1} s, {left_out} steps left out", "total", total.as_secs_f64());
    text
}

/// How the single tests ended, over all test programs.
#[derive(Default, Debug, PartialEq, Eq)]
struct Counts {
    passed: u64,
    failed: u64,
    skipped: u64,
}

impl Counts {
    fn line(&self) -> String {
        format!("{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }

    /// `test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.05s`
    fn add_cargo(&mut self, line: &str) {
        if let Some((_, counts)) = line.strip_prefix("test result: ").and_then(|rest| rest.split_once(". ")) {
            self.add(counts.split("; "));
        }
    }

    /// `===== 3 passed, 1 skipped in 0.12s =====`; bare, without the rules, when quiet.
    fn add_pytest(&mut self, line: &str) {
        let line = line.trim_matches(['=', ' ']);
        if let Some((counts, _)) = line.rsplit_once(" in ") {
            self.add(counts.split(", "));
        }
    }

    fn add<'a>(&mut self, counts: impl Iterator<Item = &'a str>) {
        for count in counts {
            let Some((Ok(number), word)) = count.split_once(' ').map(|(n, word)| (n.parse::<u64>(), word))
            else {
                continue;
            };
            match word {
                "passed" => self.passed += number,
                "failed" | "error" | "errors" => self.failed += number,
                "ignored" | "skipped" => self.skipped += number,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_added_up() {
        let mut counts = Counts::default();
        counts.add_cargo("running 13 tests");
        counts.add_cargo(
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.05s",
        );
        counts.add_cargo(
            "test result: FAILED. 4 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1s",
        );
        counts.add_pytest("tests/python/test_demo_data.py ...s  [100%]");
        counts.add_pytest("=========== 3 passed, 1 skipped, 2 errors in 0.12s ===========");
        counts.add_pytest("1 failed, 5 passed in 2.00s");
        assert_eq!(counts, Counts { passed: 24, failed: 5, skipped: 2 });
        assert_eq!(counts.line(), "24 passed, 5 failed, 2 skipped");
    }

    #[test]
    fn the_demo_runs_on_what_was_built_and_its_output_is_what_the_python_tests_look_at() {
        let place = |wanted| Step::value_variants().iter().position(|&step| step == wanted).unwrap();
        assert!(place(Step::Build) < place(Step::Demo) && place(Step::Demo) < place(Step::Python));
        let told = |skip: &[Step]| {
            let command = python_tests(&Args { campaign: false, skip: skip.to_vec() }).unwrap();
            let names = command.get_envs().map(|(name, _)| name.to_string_lossy().into_owned());
            names.filter(|name| name.starts_with("TETHER_")).collect::<Vec<_>>()
        };
        let all = ["TETHER_BIN_DIR", "TETHER_DEMO_DIR", "TETHER_SPECFORGE_DATA", "TETHER_SPECFORGE_DIR"];
        assert_eq!(told(&[]), all);
        assert_eq!(told(&[Step::Demo]), ["TETHER_BIN_DIR"]);
    }

    #[test]
    fn the_table_shows_each_step_and_counts_what_was_left_out() {
        let second = Duration::from_secs(1);
        let text = table(&[
            (Step::Setup, Outcome::Passed(second)),
            (Step::Clippy, Outcome::LeftOut),
            (Step::Rust, Outcome::Failed(second)),
        ]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "setup     ok            1.0 s");
        assert_eq!(lines[1], "clippy    left out      0.0 s");
        assert_eq!(lines[2], "rust      FAILED        1.0 s");
        assert_eq!(lines[3], "total                   2.0 s, 1 steps left out");
    }
}
