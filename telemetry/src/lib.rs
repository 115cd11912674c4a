//! What the metrics of all binaries have in common: series about the process and its async runtime, the age of the oldest
//! piece of work, and the ways in which series leave a process (a text, a small HTTP server, a file).
//!
//! The series of a binary itself are in its own `metrics.rs`.

mod age;
mod runtime;
mod server;
mod text;
mod textfile;

pub use age::{Begun, OldestAge};
pub use runtime::register_process;
pub use server::serve;
pub use text::{CONTENT_TYPE, text};
pub use textfile::Textfile;
