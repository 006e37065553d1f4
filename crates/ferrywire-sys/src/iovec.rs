//! A piece of memory as the kernel takes it.
//!
//! Read next: `socket.rs`, which sends and receives such pieces.

use std::mem;

const _: () = assert!(mem::size_of::<IoVec>() == mem::size_of::<libc::iovec>());
const _: () = assert!(mem::align_of::<IoVec>() == mem::align_of::<libc::iovec>());
const _: () = assert!(mem::offset_of!(IoVec, base) == mem::offset_of!(libc::iovec, iov_base));
const _: () = assert!(mem::offset_of!(IoVec, len) == mem::offset_of!(libc::iovec, iov_len));

/// Pieces that one call takes (`UIO_MAXIOV`).
pub const IOVECS_PER_CALL_MAX: usize = 1024;

/// One piece of memory for a gathering send or scattering receive: exactly a `struct iovec`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct IoVec {
    /// First byte.
    pub base: *mut u8,
    /// Length in bytes.
    pub len: usize,
}

impl IoVec {
    /// A piece over `len` bytes at `base`.
    pub fn new(base: *mut u8, len: usize) -> IoVec {
        IoVec { base, len }
    }
}
