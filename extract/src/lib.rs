//! Reads a tokenised data set, asks a Tether proxy for the hidden states of every sample, proves that each dump is its
//! sample's, and writes the files that a trainer loads. What is done is recorded, so that a run can be cut off anywhere
//! and go on.
//!
//! [`run::run`] is the whole of it: [`dataset`] in, [`plan`] what is missing, [`extractor`] for one sample, [`format`] out,
//! [`ledger`] what is done. [`verify::verify`] looks at a finished directory again.
//!
//! An output directory holds the trainer's files in folders of their own and, beside them, `ledger.sqlite3`, `report.json`
//! (the last run's summary), `failures.jsonl` (each row without a file, and why) and a lock.

pub mod check;
pub mod cli;
pub mod client;
pub mod dataset;
pub mod extractor;
pub mod format;
pub mod ledger;
pub mod lock;
pub mod metrics;
pub mod plan;
pub mod points;
pub mod progress;
pub mod report;
pub mod retry;
pub mod run;
pub mod stop;
pub mod stored;
pub mod tally;
pub mod verify;
