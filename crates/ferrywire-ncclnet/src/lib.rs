//! NCCL net plugins: the binary interface that NCCL and its network plugins share, and a host for plugins.
//!
//! ```text
//!   Library ── open, find ──> load ──> Plugin ── listen ──> ListenComm ── accept ──> RecvComm ── irecv ─┐
//!                                        │                     │ Handle, to the peer                   ├─ test
//!                                        └───── connect <──────┘ Connecting ── poll ──> SendComm ─ isend ┘
//! ```
//!
//! ferrywire stands on both sides of the interface: it hosts foreign plugins as a transport, and it is such
//! a plugin itself. Both sides, and the simulated plugin of the tests, take their types from [`abi`], so
//! that an offset is written down once.
//!
//! A plugin is foreign code in this process: it may block, write where it should not, or end the process.
//! What can be checked is checked here; against the rest only a process of its own helps, a [`SupervisedProcess`].
//! [`inflight_calls`] tells a watchdog what hangs, [`log::tee_to_fd`] tells a supervisor what it said last, and
//! an `exit` by a plugin is told on standard error where nobody supervises (`ending.rs`).
//!
//! Invariant: nothing here knows about endpoints or channels, and nothing here decides what an answer means.
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
