//! Gathering sends, scattering receives and socket options on a raw descriptor.
//!
//! Here rather than through socket2 because the engine's pieces are raw memory that no `&[u8]` may
//! describe: a peer can write into it while it is being sent.
//! Invariant: no call here blocks or raises SIGPIPE.
//! Read next: `zerocopy.rs`.

use std::io;
use std::mem;
use std::os::fd::RawFd;

use super::{checked, uninterrupted};
use crate::{IOVECS_PER_CALL_MAX, IoVec};

/// Longest name of a congestion control, with its terminating zero (`TCP_CA_NAME_MAX`).
const CONGESTION_NAME_BYTES_MAX: usize = 16;
/// The request of `ioctl` for the bytes that were written but not sent yet.
const SIOCOUTQNSD: libc::c_ulong = 0x894B;

/// Sends from the pieces in order, without blocking; returns the bytes taken.
///
/// At most [`IOVECS_PER_CALL_MAX`] pieces are looked at. `flags` are added to `MSG_NOSIGNAL | MSG_DONTWAIT`.
///
/// # Safety
/// Each piece must be readable for the length of the call; with `MSG_ZEROCOPY`, until its completion.
pub unsafe fn send(fd: RawFd, pieces: &[IoVec], flags: libc::c_int) -> io::Result<usize> {
    let message = message_over(pieces);
    let flags = flags | libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: `message` points at iovecs that outlive the call, and the caller vouches for their memory.
    uninterrupted(|| unsafe { libc::sendmsg(fd, &message, flags) })
}

/// Receives into the pieces in order, without blocking; returns the bytes placed.
///
/// At most [`IOVECS_PER_CALL_MAX`] pieces are looked at.
///
/// # Safety
/// Each piece must be writable for the length of the call.
pub unsafe fn recv(fd: RawFd, pieces: &[IoVec]) -> io::Result<usize> {
    let mut message = message_over(pieces);
    // SAFETY: `message` points at iovecs that outlive the call, and the caller vouches for their memory.
    uninterrupted(|| unsafe { libc::recvmsg(fd, &mut message, libc::MSG_DONTWAIT) })
}

/// A message header without address or control data.
fn message_over(pieces: &[IoVec]) -> libc::msghdr {
    // SAFETY: all zero is a valid `msghdr`: null pointers with zero lengths.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    // `IoVec` is laid out as `iovec`, asserted above; the kernel only reads the array.
    message.msg_iov = pieces.as_ptr().cast_mut().cast();
    message.msg_iovlen = pieces.len().min(IOVECS_PER_CALL_MAX) as _;
    message
}

/// Sets an option whose value is an `int`.
pub fn set_int(fd: RawFd, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    set_bytes(fd, level, name, &value.to_ne_bytes())
}

/// Sets an option whose value is a string or a structure.
pub fn set_bytes(fd: RawFd, level: libc::c_int, name: libc::c_int, value: &[u8]) -> io::Result<()> {
    // SAFETY: the kernel reads `value.len()` bytes at `value`, which is borrowed for the call.
    let result =
        unsafe { libc::setsockopt(fd, level, name, value.as_ptr().cast(), value.len() as libc::socklen_t) };
    checked(result as libc::ssize_t).map(drop)
}

/// Reads an option whose value is an `int`.
pub fn get_int(fd: RawFd, level: libc::c_int, name: libc::c_int) -> io::Result<libc::c_int> {
    let mut value = [0; mem::size_of::<libc::c_int>()];
    get_bytes(fd, level, name, &mut value)?;
    Ok(libc::c_int::from_ne_bytes(value))
}

/// Reads an option into `value`; returns how many bytes the kernel wrote.
pub fn get_bytes(fd: RawFd, level: libc::c_int, name: libc::c_int, value: &mut [u8]) -> io::Result<usize> {
    let mut len = value.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes at `value`, which is borrowed mutably for the call.
    let result = unsafe { libc::getsockopt(fd, level, name, value.as_mut_ptr().cast(), &mut len) };
    checked(result as libc::ssize_t)?;
    Ok((len as usize).min(value.len()))
}

/// The socket's pending error, which reading clears; `None` when there is none.
pub fn take_error(fd: RawFd) -> Option<io::Error> {
    match get_int(fd, libc::SOL_SOCKET, libc::SO_ERROR) {
        Ok(0) => None,
        Ok(errno) => Some(io::Error::from_raw_os_error(errno)),
        Err(e) => Some(e),
    }
}

/// Ends both directions of a connection.
pub fn shutdown(fd: RawFd) -> io::Result<()> {
    // SAFETY: no memory is passed.
    checked(unsafe { libc::shutdown(fd, libc::SHUT_RDWR) } as libc::ssize_t).map(drop)
}

/// Aborts a connection: the peer is sent a reset, and what is queued to be sent is dropped. The socket stays open, so
/// that its error queue can still be read.
pub fn abort(fd: RawFd) -> io::Result<()> {
    // SAFETY: all zero is a valid `sockaddr`.
    let mut address: libc::sockaddr = unsafe { mem::zeroed() };
    address.sa_family = libc::AF_UNSPEC as libc::sa_family_t;
    let len = mem::size_of::<libc::sockaddr>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of the address, which lives for the call.
    checked(unsafe { libc::connect(fd, &address, len) } as libc::ssize_t).map(drop)
}

/// Makes closing this socket abort the connection and drop what was not sent.
pub fn abort_on_close(fd: RawFd) -> io::Result<()> {
    let mut linger = [0; mem::size_of::<libc::linger>()];
    let on = 1 as libc::c_int;
    linger[..mem::size_of::<libc::c_int>()].copy_from_slice(&on.to_ne_bytes());
    set_bytes(fd, libc::SOL_SOCKET, libc::SO_LINGER, &linger)
}

/// Bytes that were written to a TCP socket and have not been sent for the first time.
pub fn unsent_bytes(fd: RawFd) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: this request writes one `int` at its argument.
    let result = unsafe { libc::ioctl(fd, SIOCOUTQNSD as _, &mut bytes as *mut libc::c_int) };
    checked(result as libc::ssize_t)?;
    Ok(usize::try_from(bytes).unwrap_or(0))
}

/// Sets both socket buffers, beyond the system's limits where the privilege is there.
pub fn set_buffers(fd: RawFd, bytes: usize) -> io::Result<()> {
    let value = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    let pairs = [(libc::SO_SNDBUFFORCE, libc::SO_SNDBUF), (libc::SO_RCVBUFFORCE, libc::SO_RCVBUF)];
    for (forced, plain) in pairs {
        if set_int(fd, libc::SOL_SOCKET, forced, value).is_err() {
            set_int(fd, libc::SOL_SOCKET, plain, value)?;
        }
    }
    Ok(())
}

/// Sets both socket buffers whatever the system's limits are, which takes CAP_NET_ADMIN, and lets the window
/// follow: the kernel keeps it to the buffer that a connection began with.
pub fn force_buffers(fd: RawFd, send_bytes: usize, receive_bytes: usize) -> io::Result<()> {
    let int = |bytes| libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    set_int(fd, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, int(send_bytes))?;
    set_int(fd, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, int(receive_bytes))?;
    set_int(fd, libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP, int(receive_bytes))
}

/// Lets the kernel size both buffers again after they were set. Kernels before 5.16 refuse.
pub fn autotune_buffers(fd: RawFd) -> io::Result<()> {
    set_int(fd, libc::SOL_SOCKET, libc::SO_BUF_LOCK, 0)
}

/// Both socket buffers as the kernel counts them, its own needs included: to send, to receive.
pub fn buffers(fd: RawFd) -> io::Result<(usize, usize)> {
    let bytes = |name| get_int(fd, libc::SOL_SOCKET, name).map(|bytes| usize::try_from(bytes).unwrap_or(0));
    Ok((bytes(libc::SO_SNDBUF)?, bytes(libc::SO_RCVBUF)?))
}

/// The congestion control in force on a TCP socket.
pub fn congestion_control(fd: RawFd) -> io::Result<String> {
    let mut name = [0; CONGESTION_NAME_BYTES_MAX];
    let len = get_bytes(fd, libc::IPPROTO_TCP, libc::TCP_CONGESTION, &mut name)?;
    let name = name[..len].split(|&byte| byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(name).into_owned())
}

/// Chooses a TCP socket's congestion control: `ENOENT` when the system lacks it, `EPERM` when it is not
/// allowed to ordinary users.
pub fn set_congestion_control(fd: RawFd, name: &str) -> io::Result<()> {
    set_bytes(fd, libc::IPPROTO_TCP, libc::TCP_CONGESTION, name.as_bytes())
}

/// Binds a socket to a network interface.
pub fn bind_to_device(fd: RawFd, interface: &str) -> io::Result<()> {
    set_bytes(fd, libc::SOL_SOCKET, libc::SO_BINDTODEVICE, interface.as_bytes())
}
