//! Mapping a file into memory: the crate's only `unsafe`.

use std::fs::File;
use std::io;

use memmap2::Mmap;

/// Maps the whole of `file` for reading.
pub(crate) fn read_only(file: &File) -> io::Result<Mmap> {
    // SAFETY: the map is sound as long as nobody shortens or rewrites the file meanwhile. Dumps are written under
    // another name, get theirs by rename when complete, and are never written again; removing one leaves the map
    // intact.
    unsafe { Mmap::map(file) }
}
