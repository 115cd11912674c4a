//! `cargo xtask setup`: everything that building and testing need and git does not hold.

use std::fs::{self, File};

use anyhow::{Context, Result};

use crate::{golden, libtorch, prerequisites, python_env, wheels, workspace};

/// Check prerequisites; fetch libtorch and the Python environment of the tests into `.tether/`, and make the tests'
/// references there.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only what building and running need: no Python environment and no references for the tests.
    #[arg(long)]
    minimal: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.minimal { minimal() } else { full() }?;
    println!("\n{}", ready(args.minimal));
    Ok(())
}

/// What works now.
fn ready(minimal: bool) -> &'static str {
    if minimal {
        "ready: `cargo build --release` works now, without environment variables; tests need `cargo xtask setup` whole"
    } else {
        "ready: `cargo build --release` and `cargo test --release` work now, without environment variables"
    }
}

/// What building and running need.
pub(crate) fn minimal() -> Result<()> {
    prerequisites::platform()?;
    prerequisites::build_tools()?;
    let _lock = lock()?;
    libtorch::ensure()?;
    wheels::clear_downloads()
}

/// What building, running and testing need.
pub(crate) fn full() -> Result<()> {
    prerequisites::platform()?;
    prerequisites::build_tools()?;
    {
        let _lock = lock()?;
        libtorch::ensure()?;
        python_env::ensure()?;
        wheels::clear_downloads()?;
    }
    references()
}

/// The references of the tests, with the Python environment as it is.
pub(crate) fn references() -> Result<()> {
    let _lock = lock()?;
    golden::ensure()
}

/// Held while `.tether/` is being changed, so that two runs at once do not install over each other. The system
/// releases it however this process ends.
fn lock() -> Result<File> {
    let dir = workspace::tether_dir();
    fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
    let path = dir.join("setup.lock");
    let file = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
    file.lock().with_context(|| format!("locking {}", path.display()))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_promised_than_was_set_up() {
        assert!(ready(false).contains("`cargo test --release` work"));
        assert!(
            !ready(true).contains("cargo test") && ready(true).contains("tests need `cargo xtask setup`")
        );
    }
}
