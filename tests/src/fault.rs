//! A disk that is slow, stuck or full, for one process and one folder.
//!
//! A library loaded before libc takes over `write` and `pwrite` for files under the folder and does what a control file
//! says. The test rewrites the control file while the process runs; nothing in the process knows.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use tempfile::TempDir;

use crate::scratch::scratch;

const SOURCE: &str = include_str!("fault.c");

/// Faults for the files under one folder.
pub struct Fault {
    control: TempDir,
    folder: PathBuf,
}

impl Fault {
    /// None yet, for the files under `folder`.
    pub fn new(folder: &Path) -> Self {
        let folder = folder.canonicalize().unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let fault = Self { control: scratch(), folder };
        fault.set("ok");
        fault
    }

    /// Writes work again.
    pub fn none(&self) {
        self.set("ok");
    }

    /// Each write waits until the fault is changed.
    pub fn hold(&self) {
        self.set("hold");
    }

    /// Each write takes this many milliseconds more.
    pub fn delay(&self, milliseconds: u32) {
        self.set(&format!("delay {milliseconds}"));
    }

    /// Each write fails as on a full disk.
    pub fn disk_full(&self) {
        self.set("full");
    }

    /// One write of so many fails as on a full disk, the others work.
    pub fn disk_full_every(&self, writes: u32) {
        self.set(&format!("every {writes}"));
    }

    /// Makes `command` suffer.
    pub fn apply_to(&self, command: &mut Command) {
        command.env("LD_PRELOAD", library());
        command.env("TETHER_FAULT_FOLDER", &self.folder).env("TETHER_FAULT_CONTROL", self.path());
    }

    fn path(&self) -> PathBuf {
        self.control.path().join("control")
    }

    /// By rename, so that the library never reads half a word.
    fn set(&self, what: &str) {
        let draft = self.control.path().join("draft");
        fs::write(&draft, what)
            .and_then(|()| fs::rename(&draft, self.path()))
            .expect("our own folder is writable");
    }
}

/// The library, built once a test process.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = LIBRARY.get_or_init(|| {
        let folder = scratch();
        let (source, library) = (folder.path().join("fault.c"), folder.path().join("fault.so"));
        fs::write(&source, SOURCE).expect("the folder was just made");
        // Cargo links with `cc` too, so it is there.
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"])
            .args([&library, &source])
            .output();
        let built = built.expect("`cc` can be run");
        assert!(built.status.success(), "cc: {}", String::from_utf8_lossy(&built.stderr));
        (folder, library)
    });
    path
}
