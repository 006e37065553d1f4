//! The engine: operations, their queues, and the workers that move their bytes.
//!
//! Invariant: this folder depends neither on how peers are connected nor on the handles that users hold.
//! Read next: `operation.rs`, `queue.rs`, `channel/`, `worker/`.

pub(crate) mod channel;
pub(crate) mod context;
pub(crate) mod hold;
pub(crate) mod inbound;
pub(crate) mod operation;
pub(crate) mod ordering;
pub(crate) mod peer;
pub(crate) mod posted;
pub(crate) mod queue;
pub(crate) mod read_room;
pub(crate) mod sleeper;
pub(crate) mod staging;
pub(crate) mod stats;
pub(crate) mod sync;
pub(crate) mod trace;
pub(crate) mod waiting;
pub(crate) mod worker;
