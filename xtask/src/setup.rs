//! `cargo xtask setup`: everything that building and testing need and git does not hold.

use std::fs::{self, File};

use anyhow::{Context, Result};

use crate::{libtorch, prerequisites, python_env, workspace};

/// Check prerequisites; fetch libtorch and the Python environment of the tests into `.tether/`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only what building and running need: no Python environment for the tests.
    #[arg(long)]
    minimal: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.minimal { minimal() } else { full() }?;
    println!(
        "\nready: `cargo build --release` and `cargo test --release` work now, without environment variables"
    );
    Ok(())
}

/// What building and running need.
pub(crate) fn minimal() -> Result<()> {
    prerequisites::platform()?;
    prerequisites::build_tools()?;
    let _lock = lock()?;
    libtorch::ensure()
}

/// What building, running and testing need.
pub(crate) fn full() -> Result<()> {
    minimal()?;
    let _lock = lock()?;
    python_env::ensure()
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
