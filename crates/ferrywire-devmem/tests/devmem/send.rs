//! Sending from device memory: the refusals and their causes, and the fate of bytes that were sent before.

use crate::vm::{self, FAR, KIB, Link, MIB, PATTERN_BYTES, Pool, Receiver, Sender, WAY, at_peer, send, take};
use ferrywire_devmem::sys::devmem::{self, Piece};
use ferrywire_devmem::{DevmemError, SendCause};
use ferrywire_sys::{socket, zerocopy};
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};

#[track_caller]
fn cause(error: io::Error) -> SendCause {
    let error = DevmemError::send(FAR, 0, &error);
    println!("{error}");
    let DevmemError::Send { cause, .. } = error else { panic!("{error:?}") };
    cause
}

#[test]
fn refused_sends_have_causes_and_leave_nothing() {
    if !vm::is_here() {
        return;
    }
    let (receiver, sender, link) = (Receiver::new(MIB), Sender::new(), Link::steered());
    let fd = link.far.as_raw_fd();
    let refused =
        |id, offset, bytes| cause(send(&link, id, &[Piece { offset, bytes }]).expect_err("refused"));
    socket::set_int(fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY, 0).expect("an option");
    assert_eq!(refused(sender.id, 0, 4096), SendCause::NotBound, "without SO_ZEROCOPY");
    zerocopy::enable(fd).expect("an option");
    assert_eq!(refused(9999, 0, 4096), SendCause::NotBound, "unknown number");
    assert_eq!(refused(receiver.id, 0, 4096), SendCause::NotBound, "the number of a pool");
    assert_eq!(refused(sender.id, PATTERN_BYTES, 4096), SendCause::Outside);
    assert_eq!(refused(sender.id, PATTERN_BYTES - 4096, 8192), SendCause::Outside);
    assert_eq!(refused(sender.id, usize::MAX - 4095, 4096), SendCause::Outside);
    assert_eq!(cause(send_without_flag(fd, sender.id)), SendCause::NotBound, "without MSG_ZEROCOPY");
    let local = at_peer(|| {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let near = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
        zerocopy::enable(near.as_raw_fd()).expect("an option");
        near
    });
    let pieces = [Piece { offset: 0, bytes: 4096 }];
    // SAFETY: a TCP socket; the pattern does not change.
    let error = unsafe { devmem::send(local.as_raw_fd(), sender.id, &pieces) }.expect_err("loopback");
    assert_eq!(cause(error), SendCause::OtherRoute);
    assert_eq!(vm::reap(fd), 0, "refused sends leave no notices");
    vm::send_all(&link, sender.id, 0, 4096, 4096);
    assert_eq!(take(&link, &receiver, 0, 4096, WAY).bytes(), 4096);
}

/// Sends from a dma-buf without asking for zero copy, which this project's sends always do; returns the kernel's
/// refusal.
fn send_without_flag(fd: i32, dmabuf: u32) -> io::Error {
    let mut piece = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 4096 };
    let mut control = [0_u64; 3];
    // SAFETY: all zero is a valid `msghdr`; its pointers are to variables on this stack; the header and the number
    // behind it fit into the control buffer, which is aligned for them.
    let sent = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&raw mut piece, 1);
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(size_of::<u32>() as u32) as usize;
        let head = libc::CMSG_FIRSTHDR(&raw const message);
        (*head).cmsg_level = libc::SOL_SOCKET;
        (*head).cmsg_type = devmem::SCM_DEVMEM_DMABUF;
        (*head).cmsg_len = libc::CMSG_LEN(size_of::<u32>() as u32) as usize;
        libc::CMSG_DATA(head).cast::<u32>().write_unaligned(dmabuf);
        libc::sendmsg(fd, &raw const message, libc::MSG_DONTWAIT)
    };
    assert!(sent < 0, "{sent} bytes were sent");
    io::Error::last_os_error()
}

#[test]
fn pieces_are_sent_in_order() {
    if !vm::is_here() {
        return;
    }
    let (receiver, sender, link) = (Receiver::new(4 * MIB), Sender::new(), Link::steered());
    // Each piece continues the pattern; together they are more than a call takes.
    let mut total = 0;
    let mut pieces: Vec<Piece> = (0..1500)
        .map(|number| {
            let piece = Piece { offset: total, bytes: 1 + number % 700 };
            total += piece.bytes;
            piece
        })
        .collect();
    let (fd, mut sent, mut calls) = (link.far.as_raw_fd(), 0, 0);
    while sent < total {
        let bytes = vm::eventually(fd, libc::POLLOUT, || send(&link, sender.id, &pieces)).expect("sent");
        assert!(bytes <= pieces.iter().take(1024).map(|piece| piece.bytes).sum());
        assert_eq!(take(&link, &receiver, sent, bytes, WAY).bytes(), bytes);
        (sent, calls) = (sent + bytes, calls + 1);
        // The rest begins where the short send stopped.
        pieces.retain(|piece| piece.offset + piece.bytes > sent);
        if let Some(first) = pieces.first_mut() {
            let end = first.offset + first.bytes;
            *first = Piece { offset: sent, bytes: end - sent };
        }
    }
    println!("{total} bytes in {calls} calls");
    assert!(calls > 1);
}

#[test]
fn sent_payload_outlives_the_binding() {
    if !vm::is_here() {
        return;
    }
    let (receiver, sender, link) = (Receiver::new(16 * MIB), Sender::new(), Link::steered());
    socket::force_buffers(link.far.as_raw_fd(), 8 * MIB, MIB).expect("large buffers");
    let whole = Piece { offset: 0, bytes: 4 * MIB };
    let queued = send(&link, sender.id, &[whole]).expect("some of it");
    let Sender { netdev, id, source } = sender;
    drop(netdev);
    let error = send(&link, id, &[Piece { offset: 0, bytes: 4 * KIB }]).expect_err("not bound any more");
    assert_eq!(cause(error), SendCause::NotBound);
    println!("{queued} bytes were queued");
    assert_eq!(take(&link, &receiver, 0, queued, WAY).bytes(), queued);
    // The connection continues with another binding of the memory.
    let (_netdev, id) = vm::bind_far(source.dmabuf.as_fd());
    send(&link, id, &[Piece { offset: queued % PATTERN_BYTES, bytes: 4 * KIB }]).expect("bound again");
    assert_eq!(take(&link, &receiver, queued, 4 * KIB, WAY).bytes(), 4 * KIB);
}

#[test]
fn memory_of_half_pages_is_not_to_be_sent_from() {
    if !vm::is_here() {
        return;
    }
    // The pool has whole pages, so its own check fails before the kernel's would.
    let pool = Pool::new(MIB);
    let error = ferrywire_sys::udmabuf::from_memfd(pool.file.as_fd(), 0, 1000).expect_err("half a page");
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
}
