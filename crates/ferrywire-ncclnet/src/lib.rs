//! NCCL net plugins: the binary interface that NCCL and its network plugins share, and a host for plugins.
//!
//! ```text
//!   Library ── open, find ──> load ──> Plugin ── listen ──> ListenComm ── accept ──> RecvComm ── irecv ─┐
//!                                        │                     │ Handle, to the peer                   ├─ test
//!                                        └───── connect <──────┘ Connecting ── poll ──> SendComm ─ isend ┘
//! ```
//!
//! ferrywire is on both sides of the interface: it hosts foreign plugins as a transport, and it is a plugin
//! itself. Both sides, and the simulated plugin of the tests, take their types from [`abi`], so each offset
//! is written down once.
//!
//! A plugin is foreign code in this process: it may block, write to wrong addresses, or end the process. This
//! crate checks everything that can be checked; only a process of its own, a [`SupervisedProcess`], protects
//! against the rest. [`inflight_calls`] shows a watchdog the call that hangs, [`log::tee_to_fd`] shows a
//! supervisor the plugin's last lines, and without a supervisor an `exit` by a plugin is reported on standard
//! error (`ending.rs`).
//!
//! Invariant: this crate knows nothing of endpoints and channels, and does not interpret a plugin's answers.
//! Read next: [`abi`], then `load.rs`, `net.rs`, `comm.rs`, `request.rs`.

pub mod abi;
mod cause;
mod clock;
mod comm;
mod elf;
mod ending;
mod error;
mod find;
mod functions;
mod load;
pub mod log;
mod net;
mod properties;
mod request;
mod sanitize;
mod supervised;

pub use cause::LoggedCause;
pub use clock::{Call, InflightCall, inflight_calls};
pub use comm::{Comm, CommId, CommKind, Connecting, Handle, ListenComm, RecvComm, SendComm};
pub use ending::{EndKind, explained};
pub use error::{CallError, Cause, LoadError};
pub use find::{Candidate, candidates};
pub use load::Library;
pub use net::Plugin;
pub use properties::Properties;
pub use request::{MemoryHandle, Posted, RecvBuffer, Request, Tested};
pub use supervised::{ExitReport, SupervisedProcess, signal_name};
