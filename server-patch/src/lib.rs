//! The Tether server: SGLang's `/generate` over a DeepSeek model, whose replies leave once the hidden states of their
//! request are on disk under its ID.
//!
//! A request is read ([`request`]), planned against the model ([`plan`]), given room in the dump directory ([`budget`]) and
//! queued for the one thread that owns the model ([`engine`]), which packs what waits into steps by token budget.
//! Finished captures go to a bounded pool of writers ([`sink`]), and their replies leave from there. [`app`] is the way of
//! one call through all of these, [`http`] and [`serve`] put it on a port, [`startup`] builds everything from the
//! [`config`].

pub mod app;
pub mod auth;
pub mod budget;
pub mod chat;
pub mod config;
pub mod engine;
pub mod error;
pub mod http;
pub mod identity;
mod json;
pub mod launch;
mod memory;
pub mod metrics;
pub mod openai;
pub mod plan;
mod reply;
pub mod request;
pub mod sampling;
pub mod serve;
pub mod sink;
pub mod startup;
pub mod stream;
#[cfg(test)]
mod testing;
pub mod tokenizer;
pub mod torch;
pub mod units;
