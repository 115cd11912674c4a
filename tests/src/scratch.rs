//! Folders that go away.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use tempfile::TempDir;

/// A new folder, removed when dropped. What a killed test run left, and what statics hold, which are never dropped, goes
/// when the next test run begins.
pub fn scratch() -> TempDir {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    let root = ROOT.get_or_init(|| {
        let all = std::env::temp_dir().join("tether-tests");
        let own = all.join(std::process::id().to_string());
        fs::create_dir_all(&own).unwrap_or_else(|error| panic!("{}: {error}", own.display()));
        sweep(&all);
        own
    });
    TempDir::new_in(root).unwrap_or_else(|error| panic!("{}: {error}", root.display()))
}

/// Removes the folders of processes that are no more.
fn sweep(all: &Path) {
    for entry in fs::read_dir(all).into_iter().flatten().flatten() {
        if !Path::new("/proc").join(entry.file_name()).exists() {
            // Another test run may be sweeping too.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
