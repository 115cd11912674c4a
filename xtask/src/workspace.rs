//! Where things are: the checkout, its git-ignored `.tether/` and the build's output.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The checkout that this program was built from.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask is a folder of the workspace")
}

/// Everything that set-up installs. Git-ignored; safe to delete.
pub(crate) fn tether_dir() -> PathBuf {
    root().join(".tether")
}

/// Where cargo puts this profile's binaries: beside this one, which also holds under `CARGO_TARGET_DIR`.
pub(crate) fn bin_dir() -> Result<PathBuf> {
    let own = env::current_exe().context("this program's own path is unknown")?;
    Ok(own.parent().context("this program's own path has no folder")?.to_path_buf())
}

/// Where the demo leaves its model and its files: in cargo's target directory, wherever that is.
pub(crate) fn demo_dir() -> Result<PathBuf> {
    output_dir("demo")
}

/// A folder of ours beside the binaries' own.
pub(crate) fn output_dir(name: &str) -> Result<PathBuf> {
    let binaries = bin_dir()?;
    Ok(binaries.parent().context("the folder of the binaries lies in none")?.join(name))
}

/// `path` as seen from the checkout, which is where every command is run and shown.
pub(crate) fn relative(path: &Path) -> &Path {
    path.strip_prefix(root()).unwrap_or(path)
}
