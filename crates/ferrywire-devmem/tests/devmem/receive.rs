//! Receiving into device memory: every byte is in its place, with portions of any size, and tokens keep their limits.

use crate::vm::{self, KIB, Link, MIB, Receiver, Sender, WAY, Way, send_all, send_plain, take};
use ferrywire_devmem::DevmemError;
use ferrywire_devmem::sys::devmem::{Control, DmabufToken, ReceiveFault, SO_DEVMEM_DONTNEED, Tokens};
use ferrywire_sys::socket;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::thread;

#[test]
fn device_memory_arrives_from_device_memory() {
    if !vm::is_here() {
        return;
    }
    let (receiver, sender, link) = (Receiver::new(16 * MIB), Sender::new(), Link::steered());
    let mut position = 0;
    for (bytes, call_bytes) in [(32 * MIB, MIB), (4 * MIB, 4 * KIB), (MIB, 3001), (1, 1), (65, 7)] {
        let tally = thread::scope(|scope| {
            scope.spawn(|| send_all(&link, sender.id, position, bytes, call_bytes));
            take(&link, &receiver, position, bytes, WAY)
        });
        assert_eq!((tally.bytes(), tally.released), (bytes, tally.fragments.len()));
        assert!(tally.pool_bytes > 0, "{tally:?}");
        let largest = tally.fragments.iter().map(|(_, bytes)| bytes).max();
        println!(
            "{bytes} bytes in sends of {call_bytes}: {} in {} fragments up to {largest:?}, {} linear, {} plain, {} \
             calls",
            tally.pool_bytes,
            tally.fragments.len(),
            tally.linear_bytes,
            tally.plain_bytes,
            tally.calls
        );
        position += bytes;
    }
}

#[test]
fn device_memory_arrives_from_host_memory() {
    if !vm::is_here() {
        return;
    }
    let (receiver, link) = (Receiver::new(16 * MIB), Link::steered());
    let tally = thread::scope(|scope| {
        scope.spawn(|| send_plain(&link, 0, 4 * MIB));
        take(&link, &receiver, 0, 4 * MIB, WAY)
    });
    assert_eq!((tally.bytes(), tally.plain_bytes), (4 * MIB, 0));
}

#[test]
fn small_control_buffers_lose_nothing() {
    if !vm::is_here() {
        return;
    }
    let (receiver, link) = (Receiver::new(16 * MIB), Link::steered());
    for (round, room) in [1, 4, 31].into_iter().enumerate() {
        let way = Way { room, ..WAY };
        let tally = thread::scope(|scope| {
            scope.spawn(|| send_plain(&link, round * MIB, MIB));
            take(&link, &receiver, round * MIB, MIB, way)
        });
        assert_eq!(tally.bytes(), MIB);
        assert!(tally.calls * room >= tally.fragments.len(), "{} calls", tally.calls);
    }
}

#[test]
fn bytes_that_cannot_be_received_stay_queued() {
    if !vm::is_here() {
        return;
    }
    let (receiver, link) = (Receiver::new(MIB), Link::steered());
    send_plain(&link, 0, 64 * KIB);
    vm::wait(link.near.as_raw_fd(), libc::POLLIN);
    let error = (&link.near).read(&mut [0; 4096]).expect_err("device memory cannot be read");
    assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    // Room for less than one fragment, which a Control never has.
    let mut byte = 0_u8;
    let mut into = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    // SAFETY: all zero is a valid `msghdr`: null pointers with zero lengths.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut into;
    message.msg_iovlen = 1;
    let flags = ferrywire_devmem::sys::devmem::MSG_SOCK_DEVMEM | libc::MSG_DONTWAIT;
    // SAFETY: one vector of one byte.
    let got = unsafe { libc::recvmsg(link.near.as_raw_fd(), &raw mut message, flags) };
    let errno = std::io::Error::last_os_error().raw_os_error();
    assert_eq!((got, errno), (-1, Some(ferrywire_devmem::sys::devmem::ETOOSMALL)));
    // An invalid buffer fails only if bytes would be copied to it.
    let mut control = Control::new(1);
    // SAFETY: no memory of this process has this address, which the kernel detects.
    let got = unsafe {
        ferrywire_devmem::sys::devmem::receive(link.near.as_raw_fd(), 8 as *mut u8, 16, &mut control)
    };
    match got {
        Ok(received) => {
            let tokens = control.fragments().map(|_| 1).sum::<usize>();
            assert_eq!((received.bytes, tokens), (16, 1));
            let tally = take(&link, &receiver, 16, 64 * KIB - 16, WAY);
            assert_eq!(tally.bytes(), 64 * KIB - 16);
        }
        Err(error) => {
            let reported = DevmemError::receive(vm::NEAR, "the peer", &error).expect("one of devmem's");
            assert!(
                matches!(reported, DevmemError::Receive { fault: ReceiveFault::Unreadable, .. }),
                "{reported}"
            );
            assert_eq!(take(&link, &receiver, 0, 64 * KIB, WAY).bytes(), 64 * KIB);
        }
    }
}

#[test]
fn a_fragment_read_in_parts_has_a_token_for_each() {
    if !vm::is_here() {
        return;
    }
    let (receiver, link) = (Receiver::new(MIB), Link::steered());
    for round in 0..4 {
        // If each part lost a page, the pool would run dry.
        send_plain(&link, round * 256 * KIB, 256 * KIB);
        let tally = take(&link, &receiver, round * 256 * KIB, 256 * KIB, Way { call_bytes: 100, ..WAY });
        assert_eq!((tally.bytes(), tally.released), (256 * KIB, tally.fragments.len()));
        assert!(tally.fragments.len() >= 256 * KIB / 100);
    }
}

/// Receives bytes and keeps their tokens.
pub fn hold(link: &Link, bytes: usize) -> Vec<u32> {
    let (mut held, mut got) = (Vec::new(), 0);
    let (mut control, mut buffer) = (Control::new(256), vec![0; 64 * KIB]);
    while got < bytes {
        got += vm::receive(link, &mut buffer, &mut control).expect("received").bytes;
        held.extend(control.fragments().filter_map(|fragment| match fragment {
            ferrywire_devmem::sys::devmem::Fragment::Pool { token, .. } => Some(token),
            ferrywire_devmem::sys::devmem::Fragment::Linear { .. } => None,
        }));
    }
    held
}

#[test]
fn tokens_go_back_once_and_where_they_came_from() {
    if !vm::is_here() {
        return;
    }
    let (_receiver, link, other) = (Receiver::new(16 * MIB), Link::steered(), Link::steered());
    let held = thread::scope(|scope| {
        scope.spawn(|| send_plain(&link, 0, 4 * MIB));
        hold(&link, 4 * MIB)
    });
    assert!(held.len() > 1024, "{}", held.len());
    let release = |link: &Link| {
        let mut tokens = Tokens::new();
        held.iter().for_each(|token| tokens.push(*token));
        tokens.release(link.near.as_raw_fd()).expect("skipped or taken")
    };
    let foreign = release(&other);
    assert_eq!((foreign.fragments, foreign.unknown), (0, held.len()));
    let first = release(&link);
    assert_eq!((first.fragments, first.unknown), (held.len(), 0));
    assert_eq!(first.calls, held.len().div_ceil(1024), "consecutive tokens are one range");
    let second = release(&link);
    assert_eq!((second.fragments, second.unknown), (0, held.len()));
}

#[test]
fn one_release_takes_1024_fragments_and_128_ranges() {
    if !vm::is_here() {
        return;
    }
    let (_receiver, link) = (Receiver::new(16 * MIB), Link::steered());
    let held = thread::scope(|scope| {
        scope.spawn(|| send_plain(&link, 0, 6 * MIB));
        hold(&link, 6 * MIB)
    });
    assert!(held.len() > 1300, "{}", held.len());
    let (first, last) = (held.iter().min().expect("some"), held.iter().max().expect("some"));
    let tell = |ranges: &[DmabufToken]| {
        // SAFETY: the kernel reads the ranges, which are borrowed for the call.
        unsafe {
            libc::setsockopt(
                link.near.as_raw_fd(),
                libc::SOL_SOCKET,
                SO_DEVMEM_DONTNEED,
                ranges.as_ptr().cast(),
                size_of_val(ranges) as libc::socklen_t,
            )
        }
    };
    let all = DmabufToken { token_start: *first, token_count: last - first + 1 };
    assert_eq!(tell(&[all]), 1024, "of {}", held.len());
    assert_eq!(tell(&vec![DmabufToken::default(); 129]), -1);
    let rest = held.iter().filter(|token| **token - first >= 1024);
    let mut tokens = Tokens::new();
    rest.for_each(|token| tokens.push(*token));
    let reported = tokens.fragments();
    assert_eq!(tokens.release(link.near.as_raw_fd()).expect("they go back").fragments, reported);
}

#[test]
fn an_unsteered_connection_is_plain() {
    if !vm::is_here() {
        return;
    }
    let (receiver, sender, link) = (Receiver::new(MIB), Sender::new(), Link::unsteered());
    let tally = thread::scope(|scope| {
        scope.spawn(|| send_all(&link, sender.id, 0, MIB, 64 * KIB));
        take(&link, &receiver, 0, MIB, WAY)
    });
    assert_eq!((tally.plain_bytes, tally.calls > 1), (MIB, true));
}

#[test]
fn options_of_other_kinds_are_harmless() {
    if !vm::is_here() {
        return;
    }
    let (receiver, link) = (Receiver::new(MIB), Link::steered());
    // Each receive now has a control message that is not from devmem.
    socket::set_int(link.near.as_raw_fd(), libc::SOL_SOCKET, libc::SO_TIMESTAMP, 1).expect("an option");
    send_plain(&link, 0, 128 * KIB);
    assert_eq!(take(&link, &receiver, 0, 128 * KIB, Way { room: 8, ..WAY }).bytes(), 128 * KIB);
}
