//! The Python environment of the tests: `.tether/venv`, exactly the pinned packages, and `pip install` that survives
//! a bad connection.

use std::fs;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::{prerequisites, process, workspace};

/// Installed with their dependencies' exact versions, which the file lists too.
const REQUIREMENTS: &str = "tests/python/requirements.txt";
/// Installed with `--no-deps`: packages whose loaders we test and whose own pins would pull in a GPU stack.
const REQUIREMENTS_NO_DEPS: &str = "tests/python/requirements-no-deps.txt";
/// Written last into the environment: its presence means that the environment is whole.
const STAMP: &str = ".tether-installed";

/// How often a failed `pip install` is tried. What was fetched whole is in pip's cache, so a new try goes on from there.
const ATTEMPTS: u32 = 4;

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

/// `pip install` with the arguments that `with` adds, tried again when it fails. Where packages come from is pip's own
/// configuration.
pub(crate) fn pip_install(python: &Path, with: impl Fn(&mut Command)) -> Result<()> {
    let version = process::read(process::command(python).args(["-m", "pip", "--version"]))?;
    let mut wait = Duration::from_secs(2);
    for attempt in 1.. {
        let mut pip = process::command(python);
        pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--no-input"]);
        // Nothing is installed into the system, which is what pip warns root about.
        pip.env("PIP_ROOT_USER_ACTION", "ignore");
        if !std::io::stdout().is_terminal() {
            pip.arg("--quiet");
        }
        if resumes(&version) {
            pip.args(["--resume-retries", "10"]);
        }
        with(&mut pip);
        match process::run(&mut pip) {
            Ok(()) => return Ok(()),
            Err(error) if attempt == ATTEMPTS => {
                return Err(error).with_context(|| format!("tried {ATTEMPTS} times"));
            }
            Err(error) => {
                eprintln!("{error}\ntrying again in {} s ({} of {ATTEMPTS})", wait.as_secs(), attempt + 1);
                thread::sleep(wait);
                wait *= 3;
            }
        }
    }
    unreachable!("the loop ends by returning")
}

/// Whether this pip can go on within a file whose download broke off: since 25.1.
fn resumes(version: &str) -> bool {
    let number = version.strip_prefix("pip ").and_then(|rest| rest.split(' ').next()).unwrap_or_default();
    let mut parts = number.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0)) >= (25, 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_pip_that_can_resume_is_asked_to() {
        assert!(resumes("pip 25.1 from /usr/lib/python3 (python 3.13)"));
        assert!(resumes("pip 26.0.1 from /x (python 3.13)") && resumes("pip 25.3 from /x"));
        assert!(!resumes("pip 25.0.1 from /x (python 3.11)"));
        assert!(!resumes("pip 23.2.1 from /x") && !resumes("") && !resumes("pip"));
    }

    #[test]
    fn every_package_is_pinned_to_one_version() {
        for line in
            wanted().unwrap().lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
        {
            let (name, version) = line.split_once("==").unwrap_or_else(|| panic!("`{line}` pins no version"));
            assert!(!name.is_empty() && version.starts_with(|c: char| c.is_ascii_digit()), "`{line}`");
        }
        assert!(wanted().unwrap().contains(&format!("torch=={}\n", crate::libtorch::VERSION)));
    }
}
