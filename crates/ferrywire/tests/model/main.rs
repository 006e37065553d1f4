//! The interleavings of the engine's lock-free hand-overs between threads, tried by loom: all of them where
//! that takes seconds, else those with few preemptions.
//!
//! The source files of the engine are compiled here a second time, unchanged: they take their synchronization types from
//! `core::sync` (of the protocol, from `crate::sync`), which in this program are loom's. Each test names one property. A lost
//! wake-up shows as loom's `deadlock`, memory that one thread sees too early as its `Causality violation`.
//!
//! loom cannot show reordering of a load with a later store of the same thread. Not modelled are the lists that
//! hold the work (a counter stands for them), the kernel's part of a wake, and pauses that end by time: a short one ends at
//! once here, and a long one never.

#[allow(dead_code)]
mod core;
#[allow(dead_code)]
#[path = "../../../ferrywire-proto/src/inbox/reassembly.rs"]
mod reassembly;

/// The names that `reassembly.rs` imports from its own crate.
mod sync {
    pub use loom::sync::atomic::AtomicU64;
}
mod wire {
    pub use ferrywire_proto::wire::Refusal;
}

mod completion;
mod holding;
mod read_room;
mod sleeping;
mod takeover;
mod wait_list;

/// Tries every interleaving.
fn check(model: impl Fn() + Sync + Send + 'static) {
    loom::model::Builder::new().check(model);
}

/// Tries every interleaving in which threads are preempted at most so often: all of a larger model would take minutes.
fn check_bounded(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}
