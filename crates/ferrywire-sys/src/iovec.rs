//! [`IoVec`]: one memory range in the layout of the kernel's `struct iovec`.
//!
//! Read next: `socket.rs`, which sends and receives lists of them.

use std::mem;

const _: () = assert!(mem::size_of::<IoVec>() == mem::size_of::<libc::iovec>());
const _: () = assert!(mem::align_of::<IoVec>() == mem::align_of::<libc::iovec>());
const _: () = assert!(mem::offset_of!(IoVec, base) == mem::offset_of!(libc::iovec, iov_base));
const _: () = assert!(mem::offset_of!(IoVec, len) == mem::offset_of!(libc::iovec, iov_len));

/// Most entries that one system call takes (`UIO_MAXIOV`).
pub const IOVECS_PER_CALL_MAX: usize = 1024;

/// One memory range of a gathering send or scattering receive, laid out as a `struct iovec`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct IoVec {
    /// Address of the range's first byte.
    pub base: *mut u8,
    /// Length of the range in bytes.
    pub len: usize,
}

impl IoVec {
    /// The range of `len` bytes at `base`. Creating one does not touch the memory.
    pub fn new(base: *mut u8, len: usize) -> IoVec {
        IoVec { base, len }
    }
}
