//! Where the binaries under test are.

use std::path::{Path, PathBuf};

/// The release build of `name`. Tests always drive release binaries, whatever profile they were built with
/// themselves: the forward pass of a debug build is no product of ours.
///
/// # Panics
/// If it has not been built.
pub fn binary(name: &str) -> PathBuf {
    let path = target_dir().join("release").join(name);
    assert!(
        path.is_file(),
        "`{name}` is not built: nothing at {}; run `cargo build --release` first (`cargo xtask test` does)",
        path.display()
    );
    path
}

/// Cargo's target directory, found from the running test, which lies in `<target>/<profile>/deps/`.
pub fn target_dir() -> PathBuf {
    let test = std::env::current_exe().expect("a running test has a path");
    test.ancestors()
        .nth(3)
        .map(Path::to_path_buf)
        .expect("cargo puts a test at least three folders below its target directory")
}
