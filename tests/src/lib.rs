//! Harness of the end-to-end tests: a tiny checkpoint made from a seed, the real release binaries on loopback, a small
//! HTTP client, and readers for what the binaries leave behind (dumps, metrics, logs).
//!
//! Nothing here retries or measures time: a wait is for a condition, under [`DEADLINE`].

mod binaries;
mod checkpoint;
mod client;
mod compare;
mod dumps;
mod extract;
mod fault;
mod hang_up;
mod head;
mod metrics;
mod ports;
mod process;
mod prompts;
mod proxy;
mod scratch;
mod server;
mod stack;
mod wait;

pub use binaries::{binary, target_dir};
pub use checkpoint::{Checkpoint, HIDDEN, NUM_LAYERS, VOCAB};
pub use client::{Client, Reply};
pub use compare::{Deviation, assert_same_states, deviation};
pub use dumps::{Dump, DumpDir};
pub use extract::{ExtractRun, Sample, TrainerFile, read_data_set, trainer_files, write_data_set};
pub use fault::Fault;
pub use hang_up::{Departure, HangUp, post_then_leave};
pub use head::Head;
pub use metrics::Scrape;
pub use ports::{free_address, refusing_address};
pub use process::{Process, Signal};
pub use prompts::Prompts;
pub use proxy::Proxy;
pub use scratch::scratch;
pub use server::{Server, ServerBuilder};
pub use stack::Stack;
pub use wait::{DEADLINE, eventually};
