//! What the process as a whole needs of C: its allocator, libtorch included, and a way out.
//!
//! libtorch takes every activation from `posix_memalign` and gives it back after the operation. glibc maps blocks above
//! 32 MiB anew each time and unmaps them on free, so that each step pays a page fault for every 4 KiB it writes; that costs
//! more than some of the arithmetic. jemalloc, built with unprefixed names, takes the place of glibc's functions for all
//! libraries of the process and keeps what was freed for the next step.

/// Every allocation of Rust code; C and C++ code gets the same one through its unprefixed names.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// jemalloc's settings, which it reads before `main`.
///
/// * `oversize_threshold:0`: by default blocks of 8 MiB and more are purged as soon as they are freed; those are the very
///   ones to keep.
/// * `dirty_decay_ms:30000`: freed pages stay for the next steps, and go back to the system half a minute after a burst.
/// * `muzzy_decay_ms:0`: then at once, so that the resident size says what is held.
/// * `retain:true`: address space is kept, so that growing again is cheap.
/// * `background_thread:false`: purging happens on the threads that allocate; one more thread would take turns with the
///   model's.
#[unsafe(export_name = "malloc_conf")]
// SAFETY: jemalloc defines the name weakly for this purpose, with the type `const char *`, which a reference to the
// first byte of a constant, terminated string is.
static MALLOC_CONF: &std::ffi::c_char = unsafe {
    &*c"oversize_threshold:0,dirty_decay_ms:30000,muzzy_decay_ms:0,retain:true,background_thread:false"
        .as_ptr()
};

/// Ends the process at once. Returning from `main` would run the destructors of libtorch's globals, which must not happen
/// under a step or a load that was given up on and still runs; and what has to be in order by then (dumps, replies, the
/// log) is on its way without a buffer.
pub(crate) fn leave(code: i32) -> ! {
    // SAFETY: takes a number and does not return; no Rust value is used afterwards.
    unsafe { libc::_exit(code) }
}
