//! The two forms that a dump can have on disk.

use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::{
    Dump, DumpLayout, Metadata, PublishError, Published, RequestId, dump_path, encoded_len, folder_path,
    publish, publish_folder,
};

/// More than the ZIP directory and the pickle around a plane.
const PLANE_CONTAINER: u64 = 2048;

impl DumpLayout {
    /// Where the dump of `id` stands in `dir`, or will.
    pub fn path(self, dir: &Path, id: RequestId) -> PathBuf {
        match self {
            Self::File => dump_path(dir, id),
            Self::Directory => folder_path(dir, id),
        }
    }

    /// The most bytes that a dump with `num_tokens` rows can take, known before anything is computed.
    pub fn most_bytes(self, metadata: &Metadata, num_tokens: usize, hidden_size: usize) -> u64 {
        let file = encoded_len(metadata, num_tokens, hidden_size);
        match self {
            Self::File => file,
            // The same states; a container for each plane; token IDs as text, an i64 at most 20 digits and a comma.
            Self::Directory => file + metadata.points.len() as u64 * PLANE_CONTAINER + num_tokens as u64 * 21,
        }
    }

    /// [`publish`] or [`publish_folder`].
    ///
    /// # Errors
    /// Theirs.
    pub fn publish(
        self,
        dir: &Path,
        dump: &Dump<'_>,
        sync: bool,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Published, PublishError> {
        match self {
            Self::File => publish(dir, dump, sync, cancelled),
            Self::Directory => publish_folder(dir, dump, sync, cancelled),
        }
    }

    /// Where the dump of `id` stands in `dir`, in whichever layout.
    pub fn find(dir: &Path, id: RequestId) -> Option<PathBuf> {
        [Self::File, Self::Directory]
            .map(|layout| layout.path(dir, id))
            .into_iter()
            .find(|path| path.exists())
    }

    /// Deletes the dump at `path`, in whichever layout. A reader never sees a part of a folder: it loses its `done` first.
    ///
    /// # Errors
    /// Those of the file system; [`io::ErrorKind::NotFound`] if there is none.
    pub fn remove(path: &Path) -> io::Result<()> {
        if !fs::symlink_metadata(path)?.is_dir() {
            return fs::remove_file(path);
        }
        match fs::remove_file(path.join(crate::folder::DONE)) {
            // A deletion that was interrupted there is taken up again.
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => fs::remove_dir_all(path),
        }
    }
}
