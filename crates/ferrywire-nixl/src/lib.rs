//! The NIXL backend of ferrywire. Programs that move memory through NIXL (vLLM, SGLang, LMCache, Dynamo) use ferrywire
//! when they name the backend `FERRYWIRE`.
//!
//! ```text
//!   NIXL ── C++ virtual functions ──> shim/shim.cpp ── table of C functions ──> boundary ──> agent
//!                                                                                             │
//!                            transfer (a block list, posted any number of times) ─── remote ──┤
//!                                                  inbox (peers that connected to the agent) ─┘
//! ```
//!
//! A NIXL agent is one [`ferrywire::Endpoint`] that listens on a port of its own. NIXL's connection information holds
//! the endpoint's identity, its addresses and a random secret. The first transfer or notification to a remote agent
//! connects to it; the next one after a lost connection connects again.
//!
//! # In reading order
//!
//! `boundary` (the functions that NIXL calls), `agent`, `memory` (registrations, local and remote), `transfer`,
//! `remote` (a loaded agent and the connection to it) and `dialing`, `inbox` and `notification` (arriving
//! notifications), `connection_info`, `settings`, `status` and `log`.

mod agent;
mod boundary;
mod connection_info;
mod dialing;
mod inbox;
mod log;
mod memory;
mod notification;
mod remote;
mod settings;
mod status;
mod transfer;
