//! The synchronization types of what two threads may call at once.
//!
//! The engine's `tests/model` compiles the files that import these names with loom's types under the same names.

pub(crate) use std::sync::atomic::AtomicU64;
