//! Wheels fetched into `.tether/downloads/` so that a download that was cut off goes on, and pip as everything here runs it.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::{folder, process, workspace};

/// Fetches wheels, and goes on where an earlier try broke off.
const SCRIPT: &str = "xtask/fetch_wheels.py";
/// Its exit code when pip cannot be asked where the wheels are.
const OTHER_PIP: i32 = 3;
/// How often what fails for the network's sake is tried.
const ATTEMPTS: u32 = 4;

/// Where wheels are kept until what needs them is installed.
pub(crate) fn downloads_dir() -> PathBuf {
    workspace::tether_dir().join("downloads")
}

/// Removes what was fetched, once nothing needs it any more.
pub(crate) fn clear_downloads() -> Result<()> {
    folder::remove(&downloads_dir())
}

/// The wheels of `requirements` for this Python, on disk; `None` where this pip cannot be asked where they are.
pub(crate) fn fetch(python: &Path, requirements: &[&str]) -> Result<Option<Vec<PathBuf>>> {
    repeatedly(|| {
        let mut script = undistracted(process::command(python));
        script.arg(SCRIPT).arg(downloads_dir()).args(requirements);
        let line = process::show(&script);
        println!("$ {line}");
        let output = script
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .with_context(|| format!("`{line}` could not be started"))?;
        match output.status.code() {
            Some(0) => Ok(Some(String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from).collect())),
            Some(OTHER_PIP) => Ok(None),
            _ => bail!("`{line}` failed: {}", output.status),
        }
    })
}

/// `pip install` with the arguments that `with` adds, tried again when it fails. Where packages come from is pip's own
/// configuration, and what [`fetch`] has fetched.
pub(crate) fn pip_install(python: &Path, with: impl Fn(&mut Command)) -> Result<()> {
    let version = process::read(process::command(python).args(["-m", "pip", "--version"]))?;
    repeatedly(|| {
        let mut pip = undistracted(process::command(python));
        pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--no-input"]);
        if !std::io::stdout().is_terminal() {
            pip.arg("--quiet");
        }
        if resumes(&version) {
            pip.args(["--resume-retries", "10"]);
        }
        if downloads_dir().is_dir() {
            pip.arg("--find-links").arg(downloads_dir());
        }
        with(&mut pip);
        process::run(&mut pip)
    })
}

/// A command that runs pip without those of the user's settings that say where to install to: that is ours to say.
fn undistracted(mut command: Command) -> Command {
    command.env("PIP_USER", "0").env("PIP_REQUIRE_VIRTUALENV", "0");
    // Nothing is installed into the system, which is what pip warns root about.
    command.env("PIP_ROOT_USER_ACTION", "ignore");
    command
}

fn repeatedly<T>(attempt: impl Fn() -> Result<T>) -> Result<T> {
    let mut wait = Duration::from_secs(2);
    for number in 1.. {
        match attempt() {
            Ok(value) => return Ok(value),
            Err(error) if number == ATTEMPTS => {
                return Err(error).with_context(|| format!("tried {ATTEMPTS} times"));
            }
            Err(error) => {
                eprintln!("{error}\ntrying again in {} s ({} of {ATTEMPTS})", wait.as_secs(), number + 1);
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
    fn the_users_settings_do_not_say_where_pip_installs_to() {
        let command = undistracted(process::command("python3"));
        let set: Vec<_> = command.get_envs().map(|(name, value)| (name.to_str(), value)).collect();
        for name in ["PIP_USER", "PIP_REQUIRE_VIRTUALENV"] {
            assert!(set.contains(&(Some(name), Some("0".as_ref()))), "{name}: {set:?}");
        }
    }
}
