//! Series in a file, for machines where nothing can scrape the process: node_exporter's textfile collector reads it.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use prometheus::{Registry, TextEncoder};

/// A file with the series of one program, replaced as a whole each time it is written.
#[derive(Clone, Debug)]
pub struct Textfile {
    path: PathBuf,
    prefix: &'static str,
}

impl Textfile {
    /// At `path`. Only series whose names begin with `prefix` are written: node_exporter has `process_…` of its own, and
    /// refuses all files if one repeats a name.
    ///
    /// # Errors
    /// The file's name is not one that the collector reads, or its folder is not there.
    pub fn new(path: &Path, prefix: &'static str) -> io::Result<Self> {
        if path.extension().is_none_or(|extension| extension != "prom") {
            let words = format!("`{}` does not end in .prom, and only such are read", path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, words));
        }
        let path = std::path::absolute(path)?;
        std::fs::read_dir(folder(&path))?;
        Ok(Self { path, prefix })
    }

    /// Writes the series as they are now. A reader sees the old file or the new one.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, registry: &Registry) -> io::Result<()> {
        let families: Vec<_> =
            registry.gather().into_iter().filter(|family| family.name().starts_with(self.prefix)).collect();
        let text = TextEncoder::new().encode_to_string(&families).map_err(io::Error::other)?;
        let mut file = tempfile::Builder::new().prefix(".tether-").tempfile_in(folder(&self.path))?;
        file.write_all(text.as_bytes())?;
        // The collector runs as another user.
        let readable = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        file.as_file().set_permissions(readable)?;
        file.persist(&self.path).map_err(|error| error.error)?;
        Ok(())
    }
}

fn folder(path: &Path) -> &Path {
    path.parent().unwrap_or_else(|| Path::new("/"))
}

#[cfg(test)]
mod tests {
    use prometheus::IntGauge;

    use super::*;

    #[test]
    fn the_file_holds_the_programs_own_series_and_leaves_nothing_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.prom");
        let registry = Registry::new();
        let ours = IntGauge::new("tether_x_done", "Done.").unwrap();
        for gauge in [&ours, &IntGauge::new("process_threads", "Threads.").unwrap()] {
            registry.register(Box::new(gauge.clone())).unwrap();
        }
        let textfile = Textfile::new(&path, "tether_x_").unwrap();
        for value in [1, 2] {
            ours.set(value);
            textfile.write(&registry).unwrap();
            let text = std::fs::read_to_string(&path).unwrap();
            assert_eq!(
                text,
                format!("# HELP tether_x_done Done.\n# TYPE tether_x_done gauge\ntether_x_done {value}\n")
            );
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_name_that_nobody_reads_and_a_folder_that_is_not_there_are_refused() {
        let error = Textfile::new(Path::new("/tmp/run.txt"), "x").unwrap_err().to_string();
        assert!(error.contains("/tmp/run.txt") && error.contains(".prom"), "{error}");
        assert!(Textfile::new(Path::new("/no/such/folder/run.prom"), "x").is_err());
    }
}
