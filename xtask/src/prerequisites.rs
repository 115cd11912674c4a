//! What must be on the machine before set-up can do the rest: compilers, make, Python, disk space.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};

use crate::process;

/// System packages that some tests need beyond the compilers, as (program, the package that holds it on Debian).
/// README and `.ci/run` name the same packages in one `apt-get install` line.
const TEST_PROGRAMS: &[(&str, &str)] =
    &[("prometheus", "prometheus"), ("promtool", "prometheus"), ("chromium", "chromium")];

/// What a Python must be for a set of packages: its minor version, and modules that not every system installs.
#[derive(Clone, Copy)]
pub(crate) struct PythonNeeds {
    lowest: u32,
    highest: u32,
    modules: &'static [&'static str],
}

/// The wheels of libtorch's release.
pub(crate) const LIBTORCH_PYTHON: PythonNeeds = PythonNeeds { lowest: 10, highest: 14, modules: &["pip"] };
/// The packages pinned in `tests/python/requirements.txt` (numpy is what asks for 3.11), in an environment of their own.
pub(crate) const TEST_PYTHON: PythonNeeds =
    PythonNeeds { lowest: 11, highest: 14, modules: &["venv", "ensurepip"] };

/// Refuses platforms on which the rest cannot work, instead of failing later in a linker.
pub(crate) fn platform() -> Result<()> {
    let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
    if os != "linux" || !matches!(arch, "x86_64" | "aarch64") {
        bail!("Tether is built for Linux on x86_64 or aarch64; this is {os} on {arch}");
    }
    if arch == "aarch64" {
        println!("note: Linux on aarch64 is set up in the same way, but the tests are run on x86_64 only");
    }
    Ok(())
}

/// The programs that `cargo build` will call. All that are missing are named in one message.
pub(crate) fn build_tools() -> Result<()> {
    let mut missing = Vec::new();
    if !runs("cc") {
        missing.push("`cc`, a C compiler: for linking and for SQLite, jemalloc and Oniguruma".to_owned());
    }
    match std::env::var("CXX") {
        Ok(cxx) if runs(&cxx) => {}
        Ok(cxx) => missing.push(format!("the C++ compiler that CXX names, `{cxx}`: for tch's C++ half")),
        Err(_) if runs("c++") => {}
        Err(_) => missing.push(match ["g++", "clang++"].into_iter().find(|name| runs(name)) {
            Some(found) => {
                format!("`c++`, a C++ compiler: for tch's C++ half. `{found}` is here; set CXX={found}")
            }
            None => "`c++`, a C++ compiler: for tch's C++ half".to_owned(),
        }),
    }
    if !runs("make") {
        missing.push("`make`: for jemalloc".to_owned());
    }
    if missing.is_empty() {
        return Ok(());
    }
    bail!(
        "missing on this machine:\n  {}\nOn Debian and Ubuntu: apt-get install build-essential",
        missing.join("\n  ")
    );
}

/// The programs that tests start, beyond those that [`build_tools`] checks.
pub(crate) fn test_programs() -> Result<()> {
    let missing: Vec<_> = TEST_PROGRAMS.iter().filter(|(program, _)| find(program).is_none()).collect();
    if missing.is_empty() {
        println!("{} system packages needed, all present", TEST_PROGRAMS.len());
        return Ok(());
    }
    let names: Vec<_> = missing.iter().map(|(program, _)| *program).collect();
    let mut packages: Vec<_> = missing.iter().map(|(_, package)| *package).collect();
    packages.dedup();
    bail!("tests need {}; on Debian and Ubuntu: apt-get install {}", names.join(", "), packages.join(" "));
}

/// A Python that is as needed: `python3`, else one that names its version.
pub(crate) fn python(needs: PythonNeeds) -> Result<PathBuf> {
    let PythonNeeds { lowest, highest, modules } = needs;
    let versioned = (lowest..=highest).rev().map(|minor| format!("python3.{minor}"));
    let mut seen = Vec::new();
    for name in std::iter::once("python3".to_owned()).chain(versioned) {
        let Some(path) = find(&name) else { continue };
        let script = "import sys; print(*sys.version_info[:3], sep='.')";
        let version = match process::read(process::command(&path).args(["-c", script])) {
            Ok(version) => version,
            Err(error) => {
                seen.push(format!("{name}: {error}"));
                continue;
            }
        };
        if !within(&version, needs) {
            seen.push(format!("{name} is {version}"));
            continue;
        }
        match modules.iter().find(|module| !has_module(&path, module)) {
            None => return Ok(path),
            Some(module) => seen.push(format!("{name} {version} has no module `{module}`")),
        }
    }
    let found = if seen.is_empty() { "no python3 on PATH".to_owned() } else { seen.join("; ") };
    bail!(
        "needs Python 3.{lowest} to 3.{highest} with {}; found: {found}\n\
         On Debian and Ubuntu: apt-get install python3 python3-pip python3-venv",
        modules.join(" and ")
    );
}

/// Fails when the disk of `dir` has less than `gigabytes` free for `purpose`.
pub(crate) fn disk_space(dir: &Path, gigabytes: u64, purpose: &str) -> Result<()> {
    let stat =
        rustix::fs::statvfs(dir).with_context(|| format!("free space of {} is unknown", dir.display()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if free < gigabytes * 1_000_000_000 {
        let found = free as f64 / 1e9;
        bail!("{purpose} needs {gigabytes} GB free on the disk of {}; it has {found:.1} GB", dir.display());
    }
    Ok(())
}

fn within(version: &str, needs: PythonNeeds) -> bool {
    let mut parts = version.split('.').map(str::parse::<u32>);
    match (parts.next(), parts.next()) {
        (Some(Ok(3)), Some(Ok(minor))) => (needs.lowest..=needs.highest).contains(&minor),
        _ => false,
    }
}

fn has_module(python: &Path, module: &str) -> bool {
    process::read(process::command(python).args(["-c", &format!("import {module}")])).is_ok()
}

/// Whether the compiler (or make) `line` can be started; CXX may hold words such as `ccache g++`.
fn runs(line: &str) -> bool {
    let mut words = line.split_whitespace();
    let Some(program) = words.next() else { return false };
    let quiet = process::command(program)
        .args(words)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    quiet.is_ok_and(|status| status.success())
}

/// The first file on `PATH` with this name.
fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_python_is_taken_by_its_minor_version() {
        for good in ["3.11.0", "3.12.7", "3.14.1"] {
            assert!(within(good, TEST_PYTHON), "{good}");
        }
        for bad in ["3.10.4", "3.15.0", "2.7.18", "4.12.0", "3", "", "3.x"] {
            assert!(!within(bad, TEST_PYTHON), "{bad}");
        }
        assert!(within("3.10.4", LIBTORCH_PYTHON));
    }

    #[test]
    fn only_the_tests_ask_for_a_python_that_makes_environments() {
        assert_eq!(LIBTORCH_PYTHON.modules, ["pip"]);
        assert_eq!(TEST_PYTHON.modules, ["venv", "ensurepip"]);
        let error = python(PythonNeeds { modules: &["a_module_that_is_not_there"], ..LIBTORCH_PYTHON });
        let error = error.unwrap_err().to_string();
        assert!(error.contains("has no module `a_module_that_is_not_there`"), "{error}");
    }

    #[test]
    fn the_readme_names_what_is_asked_for() {
        let readme = std::fs::read_to_string(crate::workspace::root().join("README.md")).unwrap();
        for needs in [LIBTORCH_PYTHON, TEST_PYTHON] {
            let range = format!("Python 3.{} to 3.{}", needs.lowest, needs.highest);
            assert!(readme.contains(&range), "{range}");
        }
        for word in ["build-essential", "make", "with pip", "with venv"] {
            assert!(readme.contains(word), "{word}");
        }
        for (program, package) in TEST_PROGRAMS {
            assert!(readme.contains(package), "{program} is of {package}");
        }
    }

    #[test]
    fn a_program_is_found_or_not() {
        assert!(find("sh").is_some());
        assert!(find("a-program-that-is-not-there").is_none());
        assert!(runs("env cc") && !runs("a-program-that-is-not-there") && !runs(""));
    }

    #[test]
    fn too_little_disk_is_refused_with_both_numbers() {
        let error = disk_space(Path::new("/"), 1_000_000_000, "a test").unwrap_err().to_string();
        assert!(error.contains("a test needs 1000000000 GB free") && error.contains("it has"), "{error}");
        disk_space(Path::new("/"), 0, "a test").unwrap();
    }
}
