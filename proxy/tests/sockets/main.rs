//! The proxy over real sockets, in front of upstreams that do what a test tells them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod bodies;
mod client_gone;
mod dumps;
mod framing;
mod gate;
mod health;
mod identity;
mod lifecycle;
mod sglang;
pub(crate) mod support;
mod turns;
mod upstreams;
