//! A reverse proxy that gives every request of an LLM server an ID, and lets a reply through only once the hidden states
//! it produced are on disk under that ID and belong to it.
//!
//! The way of a request: [`server`] accepts its connection, [`service`] reads it, [`tag`] finds where its ID goes,
//! [`upstream`] chooses a server and sends it, [`gate`] looks at its dump, and [`reply`] passes the reply on. Whatever
//! must happen at its end is owned by the reply's body.

pub mod abort;
pub mod app;
pub mod body;
pub mod call;
pub mod client_io;
pub mod config;
pub mod delivery;
pub mod dump_files;
pub mod error;
pub mod gate;
pub mod headers;
pub mod limits;
pub mod metrics;
pub mod orphans;
pub mod own;
pub mod page;
pub mod reply;
pub mod server;
pub mod service;
pub mod stated;
pub mod table;
pub mod tag;
pub mod units;
pub mod upstream;
