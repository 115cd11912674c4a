//! A folder that is made as a whole: it is there with all it should hold, or not at all, however the making ends.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Written last: says from what the folder was made.
const STAMP: &str = ".tether-installed";

/// A folder of `.tether/`, and the text of what it is made from.
pub(crate) struct WholeFolder {
    dir: PathBuf,
    stamp: String,
}

impl WholeFolder {
    /// `dir`, which is up to date if it was made from `stamp`.
    pub(crate) fn new(dir: PathBuf, stamp: String) -> Self {
        Self { dir, stamp }
    }

    /// Whether it is there, and made from what it is to be made from.
    pub(crate) fn is_current(&self) -> bool {
        fs::read_to_string(self.dir.join(STAMP)).is_ok_and(|found| found == self.stamp)
    }

    /// Has `fill` make it beside its place, and then moves it there. `fill` gets a path where nothing is.
    pub(crate) fn make(&self, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        self.remove_partial()?;
        // Our number in the name: a program whose xtask was killed may still be writing into a folder of its own.
        let partial = self.parent()?.join(format!("{}{}", self.partial(), std::process::id()));
        fill(&partial)?;
        let stamp = partial.join(STAMP);
        fs::write(&stamp, &self.stamp).with_context(|| format!("writing {}", stamp.display()))?;
        remove(&self.dir)?;
        fs::rename(&partial, &self.dir)
            .with_context(|| format!("renaming {} to {}", partial.display(), self.dir.display()))
    }

    /// Removes what interrupted makings left.
    fn remove_partial(&self) -> Result<()> {
        let parent = self.parent()?;
        let reading = || format!("reading {}", parent.display());
        for entry in fs::read_dir(parent).with_context(reading)? {
            let entry = entry.with_context(reading)?;
            if entry.file_name().to_string_lossy().starts_with(&self.partial()) {
                remove(&entry.path())?;
            }
        }
        Ok(())
    }

    fn parent(&self) -> Result<&Path> {
        self.dir.parent().with_context(|| format!("{} is in no folder", self.dir.display()))
    }

    /// How a folder that is being made is called, before the number of the process.
    fn partial(&self) -> String {
        format!("{}.partial-", self.dir.file_name().unwrap_or_default().to_string_lossy())
    }
}

/// Removes a folder, or a link to one, that may be absent.
pub(crate) fn remove(dir: &Path) -> Result<()> {
    let removed = match fs::symlink_metadata(dir) {
        Ok(found) if found.is_dir() => fs::remove_dir_all(dir),
        Ok(_) => fs::remove_file(dir),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", dir.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    fn fill_with(text: &str) -> impl FnOnce(&Path) -> Result<()> {
        move |dir| {
            fs::create_dir(dir)?;
            Ok(fs::write(dir.join("file"), text)?)
        }
    }

    #[test]
    fn it_is_made_once_and_again_when_what_it_is_made_from_changes() {
        let tether = tempfile::tempdir().unwrap();
        let dir = tether.path().join("golden");
        let first = WholeFolder::new(dir.clone(), "one".into());
        assert!(!first.is_current());
        first.make(fill_with("a")).unwrap();
        assert!(first.is_current());
        let second = WholeFolder::new(dir.clone(), "two".into());
        assert!(!second.is_current());
        second.make(fill_with("b")).unwrap();
        assert!(second.is_current() && !first.is_current());
        assert_eq!(fs::read_to_string(dir.join("file")).unwrap(), "b");
    }

    #[test]
    fn a_making_that_fails_leaves_what_was_there() {
        let tether = tempfile::tempdir().unwrap();
        let dir = tether.path().join("golden");
        WholeFolder::new(dir.clone(), "one".into()).make(fill_with("a")).unwrap();
        let second = WholeFolder::new(dir.clone(), "two".into());
        second
            .make(|partial| {
                fs::create_dir(partial)?;
                bail!("cut off")
            })
            .unwrap_err();
        assert!(!second.is_current());
        assert_eq!(fs::read_to_string(dir.join("file")).unwrap(), "a");
    }

    #[test]
    fn what_an_interrupted_making_left_is_removed_and_nothing_else() {
        let tether = tempfile::tempdir().unwrap();
        for name in ["libtorch.partial-17/torch", "venv/bin", "golden.partial-17"] {
            fs::create_dir_all(tether.path().join(name)).unwrap();
        }
        let folder = WholeFolder::new(tether.path().join("libtorch"), String::new());
        folder.make(fill_with("a")).unwrap();
        let mut left: Vec<_> =
            fs::read_dir(tether.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["golden.partial-17", "libtorch", "venv"]);
    }
}
