//! Device memory over TCP: receiving into the pool that a NIC's queues are bound to, and sending from such memory.
//!
//! The kernel puts what a bound queue receives into the pool, and [`receive`] returns where: [`Fragment`]s, in the
//! order of the stream. They stay in place until their tokens are returned ([`Tokens`]). Bytes may also arrive as plain
//! ones, at any time and on a healthy connection; these are in the buffer.
//! Invariant: nothing here blocks; a control message of the kernel is checked against its bytes, and the fragments of a
//! call have as many bytes together as the call returned.
//! Read next: `devmem/control.rs` (fragments), `devmem/tokens.rs` (returning them), `zerocopy.rs` (when a send has
//! finished with its memory).

pub mod control;
pub mod tokens;

use std::io;
use std::mem;
use std::os::fd::RawFd;

pub use control::{Control, ControlFault, Fragment, Fragments};
pub use tokens::{Released, Tokens};

use ferrywire_sys::IOVECS_PER_CALL_MAX;
use ferrywire_sys::uninterrupted;

/// `SO_DEVMEM_LINEAR`, a kind of control message: the next bytes of the stream are in the buffer.
pub const SCM_DEVMEM_LINEAR: libc::c_int = 78;
/// `SO_DEVMEM_DMABUF`, a kind of control message: the next bytes of the stream are in the pool. In a send it names
/// the dma-buf of the offsets.
pub const SCM_DEVMEM_DMABUF: libc::c_int = 79;
/// `SO_DEVMEM_DONTNEED`, a socket option that returns fragments of the pool.
pub const SO_DEVMEM_DONTNEED: libc::c_int = 80;
/// `MSG_SOCK_DEVMEM`, a flag of `recvmsg`: the caller understands fragments.
pub const MSG_SOCK_DEVMEM: libc::c_int = 0x200_0000;
/// `ETOOSMALL`, a number internal to the kernel that nevertheless reaches users.
pub const ETOOSMALL: i32 = 525;

/// `struct dmabuf_cmsg` of `linux/uio.h`: the payload of both control messages.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DmabufCmsg {
    /// Offset of the fragment in the pool, in bytes.
    pub frag_offset: u64,
    /// Length of the fragment in bytes.
    pub frag_size: u32,
    /// The token that returns the fragment.
    pub frag_token: u32,
    /// The kernel's id of the binding.
    pub dmabuf_id: u32,
    /// Flags of the fragment; the kernel defines none.
    pub flags: u32,
}

/// `struct dmabuf_token` of `linux/uio.h`: a range of tokens.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DmabufToken {
    /// The first token of the range.
    pub token_start: u32,
    /// Number of tokens in the range.
    pub token_count: u32,
}

const _: () = assert!(size_of::<DmabufCmsg>() == 24 && mem::offset_of!(DmabufCmsg, dmabuf_id) == 16);
const _: () = assert!(size_of::<DmabufToken>() == 8);

/// The result of a receive from a socket with device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Number of received bytes of the stream; 0 when the peer has ended it.
    pub bytes: usize,
    /// Whether all bytes were copied to the buffer, so that there are no fragments.
    pub plain: bool,
}

/// Why a call received nothing usable. Contained in an [`io::Error`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReceiveFault {
    /// `ETOOSMALL`: the control buffer is too small. The data stays queued.
    #[error("the control buffer has no room for one fragment: make a larger Control")]
    NoRoom,
    /// `EFAULT`: the buffer is not writable, or the data is in device memory. The data stays queued.
    #[error(
        "the kernel could not write to the buffer, or the data is in device memory and a plain receive was requested"
    )]
    Unreadable,
    /// The kernel reports impossible fragments. They are lost, and the connection with them.
    #[error("invalid control message of the kernel: {0}")]
    Control(#[from] ControlFault),
}

/// Receives up to `len` bytes of a TCP connection, into the pool or into `buffer`, without blocking.
/// [`Control::fragments`] has their positions. On a connection without device memory all bytes arrive as plain ones.
///
/// # Errors
/// The errors of `recvmsg`, and [`ReceiveFault`] inside of an error of [`io::ErrorKind::Other`].
///
/// # Safety
/// `len` bytes at `buffer` must be writable for the length of the call.
pub unsafe fn receive(fd: RawFd, buffer: *mut u8, len: usize, control: &mut Control) -> io::Result<Received> {
    let mut into = libc::iovec { iov_base: buffer.cast(), iov_len: len };
    let room = control.room();
    // SAFETY: all zero is a valid `msghdr`: null pointers with zero lengths.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = &raw mut into;
    message.msg_iovlen = 1;
    message.msg_control = room.as_mut_ptr().cast();
    let room_bytes = mem::size_of_val(room);
    let flags = MSG_SOCK_DEVMEM | libc::MSG_DONTWAIT;
    let received = uninterrupted(|| {
        // An interrupted call may have written its own length to `msg_controllen`.
        message.msg_controllen = room_bytes as _;
        // SAFETY: one vector of memory that the caller vouches for, and `room_bytes` bytes of control data, which
        // `control` owns.
        unsafe { libc::recvmsg(fd, &raw mut message, flags) }
    });
    let bytes = received.map_err(named)?;
    let plain = control
        .accept(message.msg_controllen as usize, bytes, len)
        .map_err(|fault| io::Error::other(ReceiveFault::from(fault)))?;
    Ok(Received { bytes, plain })
}

fn named(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(ETOOSMALL) => io::Error::other(ReceiveFault::NoRoom),
        Some(libc::EFAULT) => io::Error::other(ReceiveFault::Unreadable),
        _ => error,
    }
}

/// Bytes of a dma-buf that is bound for sending: a `struct iovec` whose address is an offset.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Offset of the first byte in the dma-buf.
    pub offset: usize,
    /// Number of bytes of the piece.
    pub bytes: usize,
}

const _: () = assert!(size_of::<Piece>() == size_of::<libc::iovec>());
const _: () = assert!(mem::offset_of!(Piece, offset) == mem::offset_of!(libc::iovec, iov_base));
const _: () = assert!(mem::offset_of!(Piece, bytes) == mem::offset_of!(libc::iovec, iov_len));

/// The control message that names the dma-buf of a send's offsets.
#[repr(C)]
struct SendFrom {
    header: libc::cmsghdr,
    dmabuf: u32,
    filled_up: u32,
}

const _: () = assert!(mem::offset_of!(SendFrom, dmabuf) == ferrywire_sys::cmsg::HEADER_BYTES);
const _: () = assert!(size_of::<SendFrom>().is_multiple_of(align_of::<libc::cmsghdr>()));

impl SendFrom {
    fn dmabuf(id: u32) -> SendFrom {
        // SAFETY: all zero is a valid `cmsghdr`: three numbers.
        let mut header: libc::cmsghdr = unsafe { mem::zeroed() };
        header.cmsg_len = (mem::offset_of!(SendFrom, dmabuf) + size_of::<u32>()) as _;
        header.cmsg_level = libc::SOL_SOCKET;
        header.cmsg_type = SCM_DEVMEM_DMABUF;
        SendFrom { header, dmabuf: id, filled_up: 0 }
    }
}

/// Sends from a dma-buf that is bound to the device of the route, in order and without blocking; returns the bytes
/// taken. A success takes the next number of [`zerocopy::completion`](ferrywire_sys::zerocopy::completion), which must
/// have been enabled on the socket. At most [`IOVECS_PER_CALL_MAX`] pieces are used.
///
/// # Errors
/// Besides those of a send: `EINVAL` for an id that is not bound for sending, `EFAULT` for bytes outside of the
/// dma-buf, `ENODEV` for a route that leaves by another device, `ENOBUFS` if too many sends are unfinished.
///
/// # Safety
/// `fd` is a TCP socket; other sockets would take the offsets for addresses. The bytes do not change until the send's
/// number is reported; otherwise the receiver may get the changed bytes.
pub unsafe fn send(fd: RawFd, dmabuf: u32, pieces: &[Piece]) -> io::Result<usize> {
    let mut from = SendFrom::dmabuf(dmabuf);
    // SAFETY: all zero is a valid `msghdr`: null pointers with zero lengths.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    // `Piece` is laid out as `iovec`, asserted above; the kernel only reads the array.
    message.msg_iov = pieces.as_ptr().cast_mut().cast();
    message.msg_iovlen = pieces.len().min(IOVECS_PER_CALL_MAX) as _;
    message.msg_control = (&raw mut from).cast();
    message.msg_controllen = size_of::<SendFrom>() as _;
    let flags = libc::MSG_ZEROCOPY | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: vectors and control message outlive the call; the offsets are no addresses on a TCP socket.
    uninterrupted(|| unsafe { libc::sendmsg(fd, &raw const message, flags) })
}

#[cfg(test)]
mod tests;
