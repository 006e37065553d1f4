//! Synchronization types for code that several threads call at once.
//!
//! The engine's `tests/model` compiles files that use these names with loom's types instead.

pub(crate) use std::sync::atomic::AtomicU64;
