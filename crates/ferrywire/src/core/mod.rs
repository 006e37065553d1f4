//! The engine: operations, the queues that they wait in, and the workers that move their bytes.
//!
//! Invariant: what is here knows connected peers, and neither how they were connected nor what users hold of them.
//! Read next: `operation.rs`, `queue/`, `channel/`, `worker/`.

pub(crate) mod channel;
pub(crate) mod context;
pub(crate) mod hold;
pub(crate) mod inbound;
pub(crate) mod operation;
pub(crate) mod ordering;
pub(crate) mod peer;
pub(crate) mod posted;
pub(crate) mod queue;
pub(crate) mod sleeper;
pub(crate) mod staging;
pub(crate) mod stats;
pub(crate) mod sync;
pub(crate) mod waiting;
pub(crate) mod worker;
