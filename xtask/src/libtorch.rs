//! libtorch: fetched from the PyPI wheel, or found where `LIBTORCH` says. Either way its version is checked here,
//! because a wheel has no `build-version` file and torch-sys then checks nothing.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::folder::WholeFolder;
use crate::python_env::pip_install;
use crate::{prerequisites, workspace};

/// The release that tch 0.26 was generated from.
pub(crate) const VERSION: &str = "2.13.0";

/// The smallest set of wheels whose `libtorch_cpu.so` loads: it links these two CUDA libraries even for the CPU.
const WHEELS: [&str; 3] = ["torch==2.13.0", "nvidia-cuda-runtime==13.0.96", "nvidia-cuda-cupti==13.0.85"];

/// Makes sure that the libtorch cargo will build against is there and is [`VERSION`]; says which one it is.
pub(crate) fn ensure() -> Result<()> {
    let own = workspace::tether_dir().join("libtorch");
    // `.cargo/config.toml` sets LIBTORCH to our own folder for everything cargo starts, unless it is set already.
    match std::env::var_os("LIBTORCH").map(PathBuf::from) {
        Some(given) if given != own.join("torch") => {
            check(&given).with_context(|| {
                format!(
                    "LIBTORCH is set to {}; unset it to let `cargo xtask setup` fetch libtorch {VERSION}",
                    given.display()
                )
            })?;
            println!("libtorch {VERSION} as LIBTORCH says: {}", given.display());
            Ok(())
        }
        _ => install(&own),
    }
}

fn install(dir: &Path) -> Result<()> {
    let folder = WholeFolder::new(dir.to_owned(), WHEELS.join("\n"));
    if folder.is_current() {
        println!("libtorch {VERSION}: {} (already installed)", workspace::relative(dir).display());
        return check(&dir.join("torch"));
    }
    prerequisites::disk_space(&workspace::tether_dir(), 4, "libtorch")?;
    let python = prerequisites::python(prerequisites::LIBTORCH_PYTHON)?;
    println!("libtorch {VERSION}: fetching the wheels (about 0.6 GB, 1.2 GB unpacked)");
    folder.make(|partial| {
        // `--no-compile`: nobody imports this copy, so its Python files need no bytecode.
        pip_install(&python, |pip| {
            pip.args(["--no-deps", "--no-compile", "--upgrade", "--target"]).arg(partial).args(WHEELS);
        })?;
        check(&partial.join("torch"))
    })?;
    println!("libtorch {VERSION}: {}", workspace::relative(dir).display());
    Ok(())
}

/// Checks that `dir` (a torch package, or an unpacked libtorch archive) is [`VERSION`] and can be linked against.
fn check(dir: &Path) -> Result<()> {
    let (found, file) = version(dir)?;
    // `2.13.0+cu130`: what follows the plus says how it was built, not which release it is.
    let release = found.split('+').next().unwrap_or_default();
    if release != VERSION {
        bail!("found libtorch {found} (by {}), wanted {VERSION}", file.display());
    }
    for needed in ["lib/libtorch_cpu.so", "lib/libc10.so", "include/torch/csrc/api/include/torch/torch.h"] {
        let path = dir.join(needed);
        if !path.is_file() {
            bail!("libtorch {found} in {} is not whole: {needed} is missing", dir.display());
        }
    }
    Ok(())
}

/// The version that `dir` says it is, and the file that says so.
fn version(dir: &Path) -> Result<(String, PathBuf)> {
    /// Finds the version in the text of a file.
    type Parse = fn(&str) -> Option<String>;
    let sources: [(&str, Parse); 4] = [
        ("build-version", from_build_version), // libtorch archives
        ("version.py", from_version_py),       // wheels
        ("include/torch/headeronly/version.h", from_version_header),
        ("include/torch/csrc/api/include/torch/version.h", from_version_header), // releases before 2.9
    ];
    for (name, parse) in sources {
        let path = dir.join(name);
        match fs::read_to_string(&path) {
            Ok(text) => {
                if let Some(version) = parse(&text) {
                    return Ok((version, path));
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(|| format!("reading {}", path.display())),
        }
    }
    if !dir.is_dir() {
        bail!("there is no folder {}", dir.display());
    }
    let names = sources.map(|(name, _)| name).join(", ");
    bail!("{} does not look like libtorch {VERSION}: none of {names} states a version", dir.display());
}

fn from_build_version(text: &str) -> Option<String> {
    let version = text.trim();
    (!version.is_empty()).then(|| version.to_owned())
}

/// `__version__ = '2.13.0+cu130'`
fn from_version_py(text: &str) -> Option<String> {
    let line = text.lines().find_map(|line| line.strip_prefix("__version__ ="))?;
    let version = line.trim().trim_matches(['\'', '"']);
    (!version.is_empty()).then(|| version.to_owned())
}

/// `#define TORCH_VERSION_MAJOR 2` and so on.
fn from_version_header(text: &str) -> Option<String> {
    let part = |name: &str| {
        text.lines().find_map(|line| {
            let rest = line.trim().strip_prefix("#define")?.trim_start().strip_prefix(name)?;
            rest.trim().parse::<u32>().ok()
        })
    };
    let [major, minor, patch] =
        [part("TORCH_VERSION_MAJOR")?, part("TORCH_VERSION_MINOR")?, part("TORCH_VERSION_PATCH")?];
    Some(format!("{major}.{minor}.{patch}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that has what [`check`] looks for, and says its version in `file`.
    fn libtorch(file: &str, text: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let needed = ["lib/libtorch_cpu.so", "lib/libc10.so", "include/torch/csrc/api/include/torch/torch.h"];
        for (name, text) in needed.map(|name| (name, "")).into_iter().chain([(file, text)]) {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    #[test]
    fn every_way_in_which_a_libtorch_states_its_version_is_read() {
        let header = "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 13\n\
                      #define TORCH_VERSION_PATCH 0\n#define TORCH_VERSION \\\n";
        for (file, text) in [
            ("build-version", "2.13.0+cpu\n"),
            ("version.py", "from typing import Optional\n\n__version__ = '2.13.0+cu130'\ndebug = False\n"),
            ("include/torch/headeronly/version.h", header),
            ("include/torch/csrc/api/include/torch/version.h", header),
        ] {
            check(libtorch(file, text).path()).unwrap();
        }
    }

    #[test]
    fn another_version_is_refused_by_name() {
        for found in ["2.11.0+cu130", "2.13.1", "2.130.0"] {
            let dir = libtorch("version.py", &format!("__version__ = '{found}'\n"));
            let error = check(dir.path()).unwrap_err().to_string();
            assert!(error.contains(&format!("found libtorch {found}")), "{error}");
            assert!(error.contains("version.py") && error.ends_with("wanted 2.13.0"), "{error}");
        }
    }

    #[test]
    fn a_folder_that_is_not_libtorch_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let error = check(dir.path()).unwrap_err().to_string();
        assert!(error.contains("does not look like libtorch"), "{error}");
        let error = check(&dir.path().join("absent")).unwrap_err().to_string();
        assert!(error.contains("there is no folder"), "{error}");
        let broken = libtorch("build-version", "2.13.0");
        fs::remove_file(broken.path().join("lib/libc10.so")).unwrap();
        let error = check(broken.path()).unwrap_err().to_string();
        assert!(error.contains("lib/libc10.so is missing"), "{error}");
    }

    #[test]
    fn the_wheels_hold_the_version_we_check_for() {
        assert_eq!(WHEELS[0], format!("torch=={VERSION}"));
    }
}
