//! ferrywire as a backend of NIXL: programs that move memory through NIXL (vLLM, SGLang, LMCache, Dynamo) move it over
//! ferrywire when they name the backend `FERRYWIRE`.
//!
//! ```text
//!   NIXL ── C++ virtual functions ──> shim/shim.cpp ── table of C functions ──> boundary ──> agent
//!                                                                                             │
//!                            transfer (a block list, posted any number of times) ─── remote ──┤
//!                                                     inbox (peers that connected to us) ─────┘
//! ```
//!
//! One NIXL agent is one [`ferrywire::Endpoint`] that listens on a port of its own. What NIXL calls connection
//! information holds the endpoint's identity, its addresses and a random secret. Nothing is connected before the first
//! transfer or notification to a remote agent; a connection that was lost is made anew by the next one.
//!
//! # In reading order
//!
//! `boundary` (what NIXL calls), `agent`, `memory` (registrations and those of remote agents), `transfer`, `remote`
//! (one loaded agent and the connection to it) and `dialing`, `inbox` and `notification` (what arrives),
//! `connection_info`, `settings`, `status` and `log`.

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
