//! `MSG_ZEROCOPY`: sends that read the memory in place, and the completions that release it.
//!
//! The kernel numbers the zero-copy sends of a socket from 0. It reports ranges of completed numbers on the
//! socket's error queue, which `epoll` shows as `EPOLLERR`.
//! Read next: `ferrywire-net/src/tcp/zero_copy.rs`, which maps the numbers to bytes of the stream.

use std::io;
use std::mem;
use std::os::fd::RawFd;

use super::cmsg::{ControlMessage, ControlMessages};
use super::{socket, uninterrupted};
use crate::IoVec;

/// Origin of a zero-copy completion: `SO_EE_ORIGIN_ZEROCOPY` of `linux/errqueue.h`.
const ORIGIN_ZEROCOPY: u8 = 5;
/// Code of a completion whose memory was copied: `SO_EE_CODE_ZEROCOPY_COPIED` of `linux/errqueue.h`.
const CODE_COPIED: u8 = 1;
/// Bytes of a `struct sock_extended_err`.
const EXTENDED_ERROR_BYTES: usize = 16;
/// Buffer size for the control data of one entry: an extended error and the address that may follow it.
const CONTROL_BYTES: usize = 128;

/// A range of zero-copy sends whose memory the kernel no longer reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Number of the first completed send; numbers start at 0 per socket and wrap.
    pub first: u32,
    /// Number of the last completed send, inclusive.
    pub last: u32,
    /// Whether the kernel copied the memory instead of reading it in place.
    pub copied: bool,
}

/// Allows zero-copy sends on a socket (`SO_ZEROCOPY`).
pub fn enable(fd: RawFd) -> io::Result<()> {
    socket::set_int(fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY, 1)
}

/// Sends like [`socket::send`], without a copy. Each successful send takes the next number.
///
/// Errors besides those of a plain send: `ENOBUFS` when too many sends are incomplete or too much memory is
/// locked, `EFAULT` when the memory cannot be pinned (device mappings).
///
/// # Safety
/// Each piece must stay readable until its number is reported by [`completion`], or the socket is closed.
pub unsafe fn send(fd: RawFd, pieces: &[IoVec]) -> io::Result<usize> {
    // SAFETY: the caller promises that the pieces stay readable until their completion.
    unsafe { socket::send(fd, pieces, libc::MSG_ZEROCOPY) }
}

/// Takes one entry off the error queue. Returns `WouldBlock` when the queue is empty, `Ok(None)` for an entry
/// that is no zero-copy completion.
pub fn completion(fd: RawFd) -> io::Result<Option<Completion>> {
    let mut control = [0_u64; CONTROL_BYTES / mem::size_of::<u64>()];
    // SAFETY: all zero is a valid `msghdr`: null pointers with zero lengths.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = CONTROL_BYTES as _;
    let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
    // SAFETY: the message has room for `CONTROL_BYTES` bytes of control data, in `control`, and none for data.
    uninterrupted(|| unsafe { libc::recvmsg(fd, &mut message, flags) })?;
    let written = (message.msg_controllen as usize).min(CONTROL_BYTES);
    Ok(ControlMessages::new(&as_bytes(&control)[..written]).find_map(parse))
}

fn as_bytes(words: &[u64; CONTROL_BYTES / mem::size_of::<u64>()]) -> &[u8; CONTROL_BYTES] {
    // SAFETY: these are the bytes of `words`, initialised and borrowed for as long as `words`; bytes need no
    // alignment.
    unsafe { &*words.as_ptr().cast() }
}

/// The completion in a control message; `None` for other messages.
pub fn parse(message: ControlMessage<'_>) -> Option<Completion> {
    let about = (message.level, message.kind);
    if !matches!(about, (libc::SOL_IP, libc::IP_RECVERR) | (libc::SOL_IPV6, libc::IPV6_RECVERR)) {
        return None;
    }
    let error: &[u8; EXTENDED_ERROR_BYTES] = message.payload.first_chunk()?;
    // errno u32, origin u8, type u8, code u8, padding u8, info u32, data u32
    let &[e0, e1, e2, e3, origin, _, code, _, i0, i1, i2, i3, d0, d1, d2, d3] = error;
    let errno = u32::from_ne_bytes([e0, e1, e2, e3]);
    (origin == ORIGIN_ZEROCOPY && errno == 0).then(|| Completion {
        first: u32::from_ne_bytes([i0, i1, i2, i3]),
        last: u32::from_ne_bytes([d0, d1, d2, d3]),
        copied: code & CODE_COPIED != 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmsg;

    fn extended_error(origin: u8, code: u8, info: u32, data: u32) -> Vec<u8> {
        let mut bytes = vec![0, 0, 0, 0, origin, 0, code, 0];
        bytes.extend(info.to_ne_bytes());
        bytes.extend(data.to_ne_bytes());
        bytes
    }

    fn parse_all(control: &[u8]) -> Option<Completion> {
        ControlMessages::new(control).find_map(parse)
    }

    #[test]
    fn both_address_families_report_ranges() {
        for (level, kind) in [(libc::SOL_IP, libc::IP_RECVERR), (libc::SOL_IPV6, libc::IPV6_RECVERR)] {
            let mut control = Vec::new();
            cmsg::append(&mut control, libc::SOL_SOCKET, 99, b"something else");
            cmsg::append(&mut control, level, kind, &extended_error(ORIGIN_ZEROCOPY, CODE_COPIED, 3, 7));
            assert_eq!(parse_all(&control), Some(Completion { first: 3, last: 7, copied: true }));
        }
    }

    #[test]
    fn other_origins_and_short_errors_are_none() {
        let mut icmp = Vec::new();
        cmsg::append(&mut icmp, libc::SOL_IP, libc::IP_RECVERR, &extended_error(2, 0, 0, 0));
        assert_eq!(parse_all(&icmp), None);
        for len in 0..EXTENDED_ERROR_BYTES {
            let mut short = Vec::new();
            let error = extended_error(ORIGIN_ZEROCOPY, 0, 0, 0);
            cmsg::append(&mut short, libc::SOL_IP, libc::IP_RECVERR, &error[..len]);
            assert_eq!(parse_all(&short), None, "{len} bytes");
        }
    }
}
