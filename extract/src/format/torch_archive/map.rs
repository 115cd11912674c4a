//! The one `unsafe` block of this crate.

use std::{fs::File, io};

use memmap2::Mmap;

/// Maps a file for reading.
pub(super) fn read_only(file: &File) -> io::Result<Mmap> {
    // SAFETY: a finished file of the output directory is never written to again, only replaced by rename, which leaves
    // the mapped one as it is; and the directory's lock keeps every other `tether-extract` away.
    unsafe { Mmap::map(file) }
}
