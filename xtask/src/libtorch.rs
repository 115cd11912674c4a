//! libtorch: fetched from the PyPI wheel, or found where `LIBTORCH` says. Either way its version is checked here,
//! because a wheel has no `build-version` file and torch-sys then checks nothing.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::folder::WholeFolder;
use crate::wheels::{self, pip_install};
use crate::{prerequisites, workspace};

/// The release that tch 0.26 was generated from.
pub(crate) const VERSION: &str = "2.13.0";

/// Its wheel.
pub(crate) const TORCH: &str = "torch==2.13.0";

/// Variables by which torch-sys would take another libtorch than the one that is checked here, and what they do.
const BYPASSES: [(&str, &str); 4] = [
    ("LIBTORCH_USE_PYTORCH", "takes whatever torch a Python has"),
    ("LIBTORCH_LIB", "takes the libraries from elsewhere"),
    ("LIBTORCH_INCLUDE", "takes the headers from elsewhere"),
    ("LIBTORCH_BYPASS_VERSION_CHECK", "takes any version"),
];

/// The smallest set of wheels whose `libtorch_cpu.so` loads: it links these two CUDA libraries even for the CPU.
const WHEELS: [&str; 3] = [TORCH, "nvidia-cuda-runtime==13.0.96", "nvidia-cuda-cupti==13.0.85"];

/// Makes sure that the libtorch cargo will build against is there and is [`VERSION`]; says which one it is.
pub(crate) fn ensure() -> Result<()> {
    refuse_bypasses(|name| std::env::var_os(name).is_some())?;
    let own = workspace::tether_dir().join("libtorch");
    // `.cargo/config.toml` sets LIBTORCH to our own folder for everything cargo starts, unless it is set already.
    match std::env::var_os("LIBTORCH").map(PathBuf::from) {
        Some(given) if given != own.join("torch") => link(&own, &given).with_context(|| {
            format!(
                "LIBTORCH is set to {}; unset it to let `cargo xtask setup` fetch libtorch {VERSION}",
                given.display()
            )
        }),
        _ => install(&own),
    }
}

fn refuse_bypasses(is_set: impl Fn(&str) -> bool) -> Result<()> {
    for (name, effect) in BYPASSES {
        if is_set(name) {
            bail!(
                "{name} is set, with which the build {effect}; unset it, and name a libtorch {VERSION} of your own by \
                 LIBTORCH"
            );
        }
    }
    Ok(())
}

/// Lets `dir` lead to the libtorch that the user has, so that a later build finds it without the variable.
fn link(dir: &Path, given: &Path) -> Result<()> {
    check(given)?;
    let target = fs::canonicalize(given).with_context(|| format!("path {}", given.display()))?;
    println!("libtorch {VERSION} as LIBTORCH says: {}", given.display());
    // Also where it is our own under another name, which a link to itself would destroy.
    if fs::canonicalize(dir.join("torch")).is_ok_and(|now| now == target) {
        return Ok(());
    }
    WholeFolder::new(dir.to_owned(), format!("a link to {}", target.display())).make(|partial| {
        fs::create_dir(partial).with_context(|| format!("creating {}", partial.display()))?;
        let link = partial.join("torch");
        symlink(&target, &link).with_context(|| format!("linking {}", link.display()))
    })?;
    println!(
        "builds without the variable use it too, by {}",
        workspace::relative(&dir.join("torch")).display()
    );
    Ok(())
}

/// The libtorch of the user's own that `dir` leads to, if it is still there and still [`VERSION`].
fn linked(dir: &Path) -> Option<PathBuf> {
    let torch = dir.join("torch");
    let target = fs::read_link(&torch).ok()?;
    match check(&torch) {
        Ok(()) => Some(target),
        Err(error) => {
            println!("the libtorch that an earlier set-up linked is of no use any more: {error:#}");
            None
        }
    }
}

/// Fetches libtorch into `dir`, unless it is there or the user has linked one.
fn install(dir: &Path) -> Result<()> {
    if let Some(target) = linked(dir) {
        let dir = workspace::relative(dir).display();
        println!(
            "libtorch {VERSION}: {} (linked by an earlier set-up; remove {dir} to have one fetched)",
            target.display()
        );
        return Ok(());
    }
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
        let wheels = wheels::fetch(&python, &WHEELS)?;
        pip_install(&python, |pip| {
            pip.args(["--no-deps", "--no-compile", "--upgrade", "--target"]).arg(partial);
            match &wheels {
                Some(paths) => pip.arg("--no-index").args(paths),
                None => pip.args(WHEELS),
            };
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
    fn a_libtorch_of_the_users_own_is_linked_and_left_whole() {
        let tether = tempfile::tempdir().unwrap();
        let own = tether.path().join("libtorch");
        let given = libtorch("build-version", "2.13.0\n");
        link(&own, given.path()).unwrap();
        check(&own.join("torch")).unwrap();
        assert_eq!(fs::canonicalize(own.join("torch")).unwrap(), fs::canonicalize(given.path()).unwrap());
        // Named by the link itself, it stays.
        link(&own, &own.join("torch")).unwrap();
        check(&own.join("torch")).unwrap();
        // Another one, and then ours again: what the user has is not touched.
        let other = libtorch("build-version", "2.13.0+cpu\n");
        link(&own, other.path()).unwrap();
        assert_eq!(fs::canonicalize(own.join("torch")).unwrap(), fs::canonicalize(other.path()).unwrap());
        assert_eq!(linked(&own).unwrap(), fs::canonicalize(other.path()).unwrap());
        // With the variable unset it is used until it is gone or becomes another version.
        fs::write(other.path().join("build-version"), "2.14.0").unwrap();
        assert_eq!(linked(&own), None);
        let ours = WholeFolder::new(own.clone(), WHEELS.join("\n"));
        assert!(!ours.is_current(), "a link is not taken for an installation");
        ours.make(|partial| Ok(fs::create_dir_all(partial.join("torch"))?)).unwrap();
        assert_eq!(linked(&own), None);
        check(given.path()).unwrap();
        assert!(other.path().join("lib/libtorch_cpu.so").is_file());
    }

    #[test]
    fn an_installation_under_another_name_is_not_linked_to_itself() {
        let tether = tempfile::tempdir().unwrap();
        let own = tether.path().join("libtorch");
        let installed = libtorch("version.py", "__version__ = '2.13.0'\n");
        fs::create_dir(&own).unwrap();
        fs::rename(installed.path(), own.join("torch")).unwrap();
        let alias = tether.path().join("alias");
        symlink(&own, &alias).unwrap();
        link(&own, &alias.join("torch")).unwrap();
        check(&own.join("torch")).unwrap();
        assert!(!own.join("torch").is_symlink());
    }

    #[test]
    fn a_libtorch_of_another_version_is_not_linked() {
        let tether = tempfile::tempdir().unwrap();
        let given = libtorch("build-version", "2.12.0");
        link(&tether.path().join("libtorch"), given.path()).unwrap_err();
        assert_eq!(fs::read_dir(tether.path()).unwrap().count(), 0);
    }

    #[test]
    fn variables_that_go_round_the_check_are_refused_by_name() {
        refuse_bypasses(|_| false).unwrap();
        for (name, _) in BYPASSES {
            let error = refuse_bypasses(|asked| asked == name).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{name} is set")) && error.contains("unset it"), "{error}");
        }
    }

    #[test]
    fn the_wheels_hold_the_version_we_check_for() {
        assert_eq!(WHEELS[0], format!("torch=={VERSION}"));
    }
}
