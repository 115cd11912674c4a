//! The Python environment of the tests: `.tether/venv`, exactly the pinned packages.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::wheels::{self, pip_install};
use crate::{libtorch, prerequisites, process, workspace};

/// Installed with their dependencies' exact versions, which the file lists too.
const REQUIREMENTS: &str = "tests/python/requirements.txt";
/// Installed with `--no-deps`: packages whose loaders we test and whose own pins would pull in a GPU stack.
const REQUIREMENTS_NO_DEPS: &str = "tests/python/requirements-no-deps.txt";
/// Written last into the environment: its presence means that the environment is whole.
const STAMP: &str = ".tether-installed";

/// The interpreter of the test environment.
pub(crate) fn interpreter() -> PathBuf {
    workspace::tether_dir().join("venv/bin/python")
}

/// Makes sure that the test environment holds exactly the pinned packages.
pub(crate) fn ensure() -> Result<()> {
    let venv = workspace::tether_dir().join("venv");
    let stamp = wanted()?;
    if fs::read_to_string(venv.join(STAMP)).is_ok_and(|found| found == stamp) {
        println!("Python environment: {} (already installed)", workspace::relative(&venv).display());
        return Ok(());
    }
    prerequisites::disk_space(&workspace::tether_dir(), 12, "the Python environment of the tests")?;
    let python = prerequisites::python(prerequisites::TEST_PYTHON)?;
    println!("Python environment: installing the pinned packages (about 2.5 GB to fetch, 5 GB unpacked)");
    // From nothing, so that a half-installed package or one that is no longer listed cannot stay.
    process::run(process::command(&python).args(["-m", "venv", "--clear"]).arg(&venv))?;
    // By far the largest package; a wheel that was fetched for libtorch serves here too, if it is for this Python.
    wheels::fetch(&interpreter(), &[libtorch::TORCH])?;
    pip_install(&interpreter(), |pip| {
        pip.args(["--requirement", REQUIREMENTS]);
    })?;
    pip_install(&interpreter(), |pip| {
        pip.args(["--no-deps", "--requirement", REQUIREMENTS_NO_DEPS]);
    })?;
    fs::write(venv.join(STAMP), stamp).with_context(|| format!("writing {}", venv.join(STAMP).display()))
}

/// The two lists as they stand, which is what the stamp of an up-to-date environment says.
fn wanted() -> Result<String> {
    let mut text = String::new();
    for name in [REQUIREMENTS, REQUIREMENTS_NO_DEPS] {
        let list =
            fs::read_to_string(workspace::root().join(name)).with_context(|| format!("reading {name}"))?;
        text.push_str(&format!("# {name}\n{list}\n"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_package_is_pinned_to_one_version() {
        for line in
            wanted().unwrap().lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
        {
            let (name, version) = line.split_once("==").unwrap_or_else(|| panic!("`{line}` pins no version"));
            assert!(!name.is_empty() && version.starts_with(|c: char| c.is_ascii_digit()), "`{line}`");
        }
        assert!(wanted().unwrap().contains(&format!("torch=={}\n", libtorch::VERSION)));
    }
}
