//! The unsafe fence of devmem TCP: what the kernel does for NICs and their memory, a file per interface.
//!
//! As in `ferrywire-sys`, each is a few functions that are safe to call, or `unsafe` with the one promise that the kernel
//! needs. Invariant: no policy here. What a number means for a NIC or a lane is decided by the caller.
//! Read next: `netlink.rs`, which `netdev.rs` and `ethtool.rs` stand on; `flow.rs`, rules; then `devmem.rs`, what sockets do.

pub mod devmem;
pub mod dmabuf;
pub mod ethtool;
pub mod flow;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod netdev;
pub mod netlink;
