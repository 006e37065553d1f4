//! NCCL net plugins: the binary interface that NCCL and its network plugins share.
//!
//! ferrywire stands on both sides of it: it hosts foreign plugins as a transport, and it is such a plugin
//! itself. Both sides, and the simulated plugin of the tests, take their types from [`abi`], so that an
//! offset is written down once. Invariant: nothing here knows about endpoints or channels.
//! Read next: [`abi`].

pub mod abi;
