//! Gathering sends, scattering receives and socket options on a raw descriptor.
//!
//! socket2 cannot be used: the engine's memory ranges must not be described by `&[u8]`, because a peer may
//! write into a range while it is being sent.
//! Invariant: no call here blocks or raises `SIGPIPE`.
//! Read next: `zerocopy.rs`.

use std::io;
use std::mem;
use std::os::fd::RawFd;

use super::{checked, uninterrupted};
use crate::{IOVECS_PER_CALL_MAX, IoVec};

/// Buffer size for a congestion control's name, its terminating zero included (`TCP_CA_NAME_MAX`).
const CONGESTION_NAME_BYTES_MAX: usize = 16;
/// `ioctl` request for the bytes that were written to a socket and not sent yet.
const SIOCOUTQNSD: libc::c_ulong = 0x894B;

/// Sends `pieces` in order without blocking; returns the bytes that the socket took.
///
/// The call uses at most [`IOVECS_PER_CALL_MAX`] pieces. `flags` are added to `MSG_NOSIGNAL | MSG_DONTWAIT`.
///
/// # Safety
/// Each piece must be readable for the length of the call; with `MSG_ZEROCOPY`, until its completion.
pub unsafe fn send(fd: RawFd, pieces: &[IoVec], flags: libc::c_int) -> io::Result<usize> {
    let message = message_over(pieces);
    let flags = flags | libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: `message` points at iovecs that outlive the call, and the caller vouches for their memory.
    uninterrupted(|| unsafe { libc::sendmsg(fd, &message, flags) })
}

/// Receives into `pieces` in order without blocking; returns the bytes received, 0 at the end of the stream.
///
/// The call uses at most [`IOVECS_PER_CALL_MAX`] pieces.
///
/// # Safety
/// Each piece must be writable for the length of the call.
pub unsafe fn recv(fd: RawFd, pieces: &[IoVec]) -> io::Result<usize> {
    let mut message = message_over(pieces);
    // SAFETY: `message` points at iovecs that outlive the call, and the caller vouches for their memory.
    uninterrupted(|| unsafe { libc::recvmsg(fd, &mut message, libc::MSG_DONTWAIT) })
}

/// A message header without address and control data.
fn message_over(pieces: &[IoVec]) -> libc::msghdr {
    // SAFETY: all zero is a valid `msghdr`: null pointers with zero lengths.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    // `IoVec` is laid out as `iovec`, asserted above; the kernel only reads the array.
    message.msg_iov = pieces.as_ptr().cast_mut().cast();
    message.msg_iovlen = pieces.len().min(IOVECS_PER_CALL_MAX) as _;
    message
}

/// Sets a socket option whose value is an `int`.
pub fn set_int(fd: RawFd, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    set_bytes(fd, level, name, &value.to_ne_bytes())
}

/// Sets a socket option whose value is a string or a structure.
pub fn set_bytes(fd: RawFd, level: libc::c_int, name: libc::c_int, value: &[u8]) -> io::Result<()> {
    // SAFETY: the kernel reads `value.len()` bytes at `value`, which is borrowed for the call.
    let result =
        unsafe { libc::setsockopt(fd, level, name, value.as_ptr().cast(), value.len() as libc::socklen_t) };
    checked(result as libc::ssize_t).map(drop)
}

/// Reads a socket option whose value is an `int`.
pub fn get_int(fd: RawFd, level: libc::c_int, name: libc::c_int) -> io::Result<libc::c_int> {
    let mut value = [0; mem::size_of::<libc::c_int>()];
    get_bytes(fd, level, name, &mut value)?;
    Ok(libc::c_int::from_ne_bytes(value))
}

/// Reads a socket option into `value`; returns how many bytes the kernel wrote.
pub fn get_bytes(fd: RawFd, level: libc::c_int, name: libc::c_int, value: &mut [u8]) -> io::Result<usize> {
    let mut len = value.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes at `value`, which is borrowed mutably for the call.
    let result = unsafe { libc::getsockopt(fd, level, name, value.as_mut_ptr().cast(), &mut len) };
    checked(result as libc::ssize_t)?;
    Ok((len as usize).min(value.len()))
}

/// Takes the socket's pending error (`SO_ERROR`); reading clears it.
pub fn take_error(fd: RawFd) -> Option<io::Error> {
    match get_int(fd, libc::SOL_SOCKET, libc::SO_ERROR) {
        Ok(0) => None,
        Ok(errno) => Some(io::Error::from_raw_os_error(errno)),
        Err(e) => Some(e),
    }
}

/// Shuts down both directions of a connection.
pub fn shutdown(fd: RawFd) -> io::Result<()> {
    // SAFETY: no memory is passed.
    checked(unsafe { libc::shutdown(fd, libc::SHUT_RDWR) } as libc::ssize_t).map(drop)
}

/// Aborts a connection: the kernel sends a reset and drops unsent bytes. The socket stays open, so that its
/// error queue can still be read.
pub fn abort(fd: RawFd) -> io::Result<()> {
    // SAFETY: all zero is a valid `sockaddr`.
    let mut address: libc::sockaddr = unsafe { mem::zeroed() };
    address.sa_family = libc::AF_UNSPEC as libc::sa_family_t;
    let len = mem::size_of::<libc::sockaddr>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of the address, which lives for the call.
    checked(unsafe { libc::connect(fd, &address, len) } as libc::ssize_t).map(drop)
}

/// Makes `close` abort the connection and drop unsent bytes (`SO_LINGER` of zero).
pub fn abort_on_close(fd: RawFd) -> io::Result<()> {
    let mut linger = [0; mem::size_of::<libc::linger>()];
    let on = 1 as libc::c_int;
    linger[..mem::size_of::<libc::c_int>()].copy_from_slice(&on.to_ne_bytes());
    set_bytes(fd, libc::SOL_SOCKET, libc::SO_LINGER, &linger)
}

/// Bytes written to a TCP socket that were never sent; bytes waiting for a retransmission do not count.
pub fn unsent_bytes(fd: RawFd) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: this request writes one `int` at its argument.
    let result = unsafe { libc::ioctl(fd, SIOCOUTQNSD as _, &mut bytes as *mut libc::c_int) };
    checked(result as libc::ssize_t)?;
    Ok(usize::try_from(bytes).unwrap_or(0))
}

/// Bytes written to a TCP socket that the peer's kernel has not acknowledged.
pub fn unacked_bytes(fd: RawFd) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: this request writes one `int` at its argument.
    let result = unsafe { libc::ioctl(fd, libc::TIOCOUTQ as _, &mut bytes as *mut libc::c_int) };
    checked(result as libc::ssize_t)?;
    Ok(usize::try_from(bytes).unwrap_or(0))
}

/// Sets both socket buffers, in bytes. With CAP_NET_ADMIN the system's limits do not apply.
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

/// Sets both socket buffers beyond the system's limits; needs CAP_NET_ADMIN. Raises the window clamp too,
/// since the kernel otherwise limits the window to the buffer that the connection began with.
pub fn force_buffers(fd: RawFd, send_bytes: usize, receive_bytes: usize) -> io::Result<()> {
    let int = |bytes| libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    set_int(fd, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, int(send_bytes))?;
    set_int(fd, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, int(receive_bytes))?;
    set_int(fd, libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP, int(receive_bytes))
}

/// Returns both buffers to the kernel's autotuning after they were set. Kernels before 5.16 refuse.
pub fn autotune_buffers(fd: RawFd) -> io::Result<()> {
    set_int(fd, libc::SOL_SOCKET, libc::SO_BUF_LOCK, 0)
}

/// Sizes of the send and the receive buffer, as the kernel counts them: its own overhead included.
pub fn buffers(fd: RawFd) -> io::Result<(usize, usize)> {
    let bytes = |name| get_int(fd, libc::SOL_SOCKET, name).map(|bytes| usize::try_from(bytes).unwrap_or(0));
    Ok((bytes(libc::SO_SNDBUF)?, bytes(libc::SO_RCVBUF)?))
}

/// Name of the congestion control of a TCP socket.
pub fn congestion_control(fd: RawFd) -> io::Result<String> {
    let mut name = [0; CONGESTION_NAME_BYTES_MAX];
    let len = get_bytes(fd, libc::IPPROTO_TCP, libc::TCP_CONGESTION, &mut name)?;
    let name = name[..len].split(|&byte| byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(name).into_owned())
}

/// Sets the congestion control of a TCP socket. Returns `ENOENT` when the system lacks it, `EPERM` when only
/// privileged users may choose it.
pub fn set_congestion_control(fd: RawFd, name: &str) -> io::Result<()> {
    set_bytes(fd, libc::IPPROTO_TCP, libc::TCP_CONGESTION, name.as_bytes())
}

/// Binds a socket to a network interface (`SO_BINDTODEVICE`).
pub fn bind_to_device(fd: RawFd, interface: &str) -> io::Result<()> {
    set_bytes(fd, libc::SOL_SOCKET, libc::SO_BINDTODEVICE, interface.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn bytes_that_the_peer_has_no_room_for_are_not_acknowledged() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut far = listener.accept().unwrap().0;
        near.set_nonblocking(true).unwrap();
        let mut written = 0;
        while let Ok(bytes) = near.write(&[0; 64 << 10]) {
            written += bytes;
        }
        let unacked = unacked_bytes(near.as_raw_fd()).unwrap();
        assert!(unacked > 0 && unacked <= written, "{unacked} of {written}");
        assert!(unsent_bytes(near.as_raw_fd()).unwrap() <= unacked);
        far.read_exact(&mut vec![0; written]).unwrap();
        // The last acknowledgement may come a little later.
        while unacked_bytes(near.as_raw_fd()).unwrap() > 0 {
            std::thread::yield_now();
        }
    }
}
