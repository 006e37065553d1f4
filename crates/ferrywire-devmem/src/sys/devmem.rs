//! Device memory over TCP: receiving into the pool that a NIC's queues are bound to, and sending from such memory.
//!
//! What a bound queue receives lies in the pool where the kernel put it, and [`receive`] gives where: [`Fragment`]s,
//! in the order of the stream. They keep their place until their tokens go back ([`Tokens`]). Bytes may also come as
//! ordinary ones, at any time and on a healthy connection, and then lie in the buffer.
//! Invariant: nothing here blocks; a control message of the kernel's is only believed as far as its bytes go, and what
//! the fragments of a call have together is what the call said it received.
//! Read next: `devmem/control.rs` (fragments), `devmem/tokens.rs` (giving places back), `zerocopy.rs` (when a send is
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

/// `SO_DEVMEM_LINEAR`: the next bytes of the stream lie in the buffer.
pub const SCM_DEVMEM_LINEAR: libc::c_int = 78;
/// `SO_DEVMEM_DMABUF`: they lie in the pool. In a send: where its offsets count.
pub const SCM_DEVMEM_DMABUF: libc::c_int = 79;
/// `SO_DEVMEM_DONTNEED`: these fragments of the pool are free again.
pub const SO_DEVMEM_DONTNEED: libc::c_int = 80;
/// `MSG_SOCK_DEVMEM`: fragments are understood.
pub const MSG_SOCK_DEVMEM: libc::c_int = 0x200_0000;
/// `ETOOSMALL`, a number of the kernel's own that reaches the user all the same.
pub const ETOOSMALL: i32 = 525;

/// `struct dmabuf_cmsg` of `linux/uio.h`: the payload of the first two.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DmabufCmsg {
    /// Where in the pool.
    pub frag_offset: u64,
    /// Bytes.
    pub frag_size: u32,
    /// By which the place is given back.
    pub frag_token: u32,
    /// The number that the binding got.
    pub dmabuf_id: u32,
    /// None defined.
    pub flags: u32,
}

/// `struct dmabuf_token` of `linux/uio.h`: consecutive tokens.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DmabufToken {
    /// The first one.
    pub token_start: u32,
    /// How many.
    pub token_count: u32,
}

const _: () = assert!(size_of::<DmabufCmsg>() == 24 && mem::offset_of!(DmabufCmsg, dmabuf_id) == 16);
const _: () = assert!(size_of::<DmabufToken>() == 8);

/// What a call received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Bytes of the stream; 0 when the peer has ended it.
    pub bytes: usize,
    /// All of them were copied to the buffer: no fragments.
    pub plain: bool,
}

/// Why a call received nothing that can be used. Comes inside of an [`io::Error`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReceiveFault {
    /// `ETOOSMALL`. The data stays queued.
    #[error("no room for a single fragment's control message: give a Control of more fragments")]
    NoRoom,
    /// `EFAULT`. The data stays queued.
    #[error(
        "the kernel could not write to the buffer, or the data is device memory and was asked for as plain"
    )]
    Unreadable,
    /// Fragments that cannot be true. They are lost, and the connection with them.
    #[error("device memory in {0}")]
    Control(#[from] ControlFault),
}

/// Receives up to `len` bytes of a TCP connection, into the pool or into `buffer`, without blocking. Where they are is
/// told by [`Control::fragments`]. The call is harmless on connections whose bytes come as ordinary ones.
///
/// # Errors
/// Those of `recvmsg`, and [`ReceiveFault`] inside of one of [`io::ErrorKind::Other`].
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
        // A call that was interrupted may have left its own number here.
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

/// Bytes of a dma-buf that is bound to send from: a `struct iovec` whose address is an offset.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// The first byte, counted in the dma-buf.
    pub offset: usize,
    /// How many.
    pub bytes: usize,
}

const _: () = assert!(size_of::<Piece>() == size_of::<libc::iovec>());
const _: () = assert!(mem::offset_of!(Piece, offset) == mem::offset_of!(libc::iovec, iov_base));
const _: () = assert!(mem::offset_of!(Piece, bytes) == mem::offset_of!(libc::iovec, iov_len));

/// The control message that says in which dma-buf a send's offsets count. Whole from the start.
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
/// taken. A success takes the next number of [`zerocopy::completion`](ferrywire_sys::zerocopy::completion), which must have
/// been enabled on the socket. At most [`IOVECS_PER_CALL_MAX`] pieces are looked at.
///
/// Errors besides those of a send: `EINVAL` for a number that is not bound to send, `EFAULT` for bytes outside of the
/// dma-buf, `ENODEV` for a route that leaves by another device, `ENOBUFS` when too many sends are unfinished.
///
/// # Safety
/// `fd` is a TCP socket: others take the offsets for addresses. The bytes stay as they are until the send's number is
/// reported, or whoever receives them gets what is written meanwhile.
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
