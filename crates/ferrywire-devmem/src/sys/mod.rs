//! The unsafe system calls of devmem TCP, one file per interface of the kernel.
//!
//! As in `ferrywire-sys`, the functions are safe to call, or `unsafe` with the one promise that the kernel needs.
//! Invariant: no policy here; callers decide what a number means for a NIC or a lane.
//! Read next: `netlink.rs`, on which `netdev.rs` and `ethtool.rs` are built; `flow.rs`, rules; then `devmem.rs`, socket
//! calls.

pub mod devmem;
pub mod dmabuf;
pub mod ethtool;
pub mod flow;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod netdev;
pub mod netlink;
