//! Synchronization types for code that hands work between threads without a lock.
//!
//! `tests/model` compiles the files that import these names with loom's types under the same names, and lets loom try
//! the interleavings. Read next: `sleeper.rs`, `waiting.rs`, `hold.rs`, `read_room.rs`.

pub(crate) use ferrywire_sys::poll::{Wake, Waker};
pub(crate) use std::sync::Mutex;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, fence};
pub(crate) use std::thread::Thread;
