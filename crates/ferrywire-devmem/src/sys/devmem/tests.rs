//! Fragments, tokens and calls, on hosts without a NIC that supports them.

use super::control::check;
use super::tokens::{FRAGMENTS_PER_CALL_MAX, RANGES_PER_CALL_MAX};
use super::*;
use ferrywire_sys::cmsg;
use ferrywire_sys::zerocopy;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

fn payload(cmsg: DmabufCmsg) -> Vec<u8> {
    let mut bytes = cmsg.frag_offset.to_ne_bytes().to_vec();
    for word in [cmsg.frag_size, cmsg.frag_token, cmsg.dmabuf_id, cmsg.flags] {
        bytes.extend(word.to_ne_bytes());
    }
    bytes
}

fn pool(control: &mut Vec<u8>, offset: u64, bytes: u32, token: u32) {
    let cmsg =
        DmabufCmsg { frag_offset: offset, frag_size: bytes, frag_token: token, dmabuf_id: 5, flags: 0 };
    cmsg::append(control, libc::SOL_SOCKET, SCM_DEVMEM_DMABUF, &payload(cmsg));
}

fn linear(control: &mut Vec<u8>, bytes: u32) {
    let cmsg = DmabufCmsg { frag_size: bytes, ..DmabufCmsg::default() };
    cmsg::append(control, libc::SOL_SOCKET, SCM_DEVMEM_LINEAR, &payload(cmsg));
}

#[test]
fn fragments_are_returned_in_order_and_foreign_messages_skipped() {
    let mut control = Vec::new();
    linear(&mut control, 100);
    cmsg::append(&mut control, libc::SOL_SOCKET, libc::SCM_TIMESTAMP, &[0; 16]);
    pool(&mut control, 4096, 1348, 7);
    cmsg::append(&mut control, libc::SOL_IP, SCM_DEVMEM_DMABUF, b"another level");
    linear(&mut control, 24);
    let held = Control::holding(&control, 1472, 1472).expect("they are good");
    let reported: Vec<_> = held.fragments().collect();
    assert_eq!(
        reported,
        [
            Fragment::Linear { at: 0, bytes: 100 },
            Fragment::Pool { dmabuf: 5, offset: 4096, bytes: 1348, token: 7 },
            Fragment::Linear { at: 100, bytes: 24 },
        ]
    );
    assert_eq!(reported.iter().map(|fragment| fragment.bytes()).sum::<u32>(), 1472);
}

#[test]
fn without_fragments_all_is_plain() {
    assert_eq!(check(&[], 77, 100), Ok(true));
    assert_eq!(check(&[], 0, 100), Ok(true));
    let mut control = Vec::new();
    cmsg::append(&mut control, libc::SOL_SOCKET, libc::SCM_TIMESTAMP, &[0; 16]);
    assert_eq!(check(&control, 77, 100), Ok(true));
}

#[test]
fn fragments_that_are_not_what_was_received_are_an_error() {
    let mut control = Vec::new();
    pool(&mut control, 0, 4096, 1);
    pool(&mut control, 4096, 4096, 2);
    assert_eq!(check(&control, 8192, 0), Ok(false));
    for received in [0, 4096, 8191, 8193, usize::MAX] {
        let fault = ControlFault::Sum { fragments: 8192, received };
        assert_eq!(check(&control, received, received), Err(fault));
    }
    let message = ReceiveFault::from(ControlFault::Sum { fragments: 8192, received: 1 }).to_string();
    assert!(message.contains("8192") && message.contains("the call returned 1"), "{message}");
}

#[test]
fn bytes_beyond_the_buffer_are_an_error() {
    let mut control = Vec::new();
    linear(&mut control, u32::MAX);
    linear(&mut control, 2);
    let linear = u64::from(u32::MAX) + 2;
    assert_eq!(check(&control, linear as usize, 4096), Err(ControlFault::Linear { linear, buffer: 4096 }));
}

#[test]
fn a_message_cut_short_is_an_error_and_never_half_a_fragment() {
    let whole = payload(DmabufCmsg { frag_size: 10, ..DmabufCmsg::default() });
    for bytes in 0..whole.len() {
        let mut control = Vec::new();
        cmsg::append(&mut control, libc::SOL_SOCKET, SCM_DEVMEM_DMABUF, &whole[..bytes]);
        assert_eq!(check(&control, 10, 10), Err(ControlFault::Short { bytes }));
    }
    let mut control = Vec::new();
    pool(&mut control, 0, 10, 1);
    for bytes in 0..control.len() {
        // Bytes that are not a message are ignored.
        assert_eq!(check(&control[..bytes], 10, 10), Ok(true), "cut to {bytes}");
    }
}

#[test]
fn a_failed_call_leaves_no_fragments_of_the_one_before() {
    let mut control = Vec::new();
    pool(&mut control, 0, 10, 1);
    let mut held = Control::holding(&control, 10, 10).expect("one fragment");
    assert_eq!(held.fragments().count(), 1);
    assert!(held.accept(control.len(), 11, 11).is_err());
    assert_eq!(held.fragments().count(), 0);
    let mut held = Control::holding(&control, 10, 10).expect("one fragment");
    let mut byte = 0;
    // SAFETY: the buffer has one byte.
    let error = unsafe { receive(-1, &raw mut byte, 1, &mut held) }.expect_err("no descriptor");
    assert_eq!((error.raw_os_error(), held.fragments().count()), (Some(libc::EBADF), 0));
}

#[test]
fn numbers_of_the_kernel_get_names() {
    let name = |errno| {
        let named = named(std::io::Error::from_raw_os_error(errno));
        named.get_ref().and_then(|inner| inner.downcast_ref::<ReceiveFault>()).cloned()
    };
    assert_eq!(name(ETOOSMALL), Some(ReceiveFault::NoRoom));
    assert_eq!(name(libc::EFAULT), Some(ReceiveFault::Unreadable));
    assert_eq!(name(libc::ECONNRESET), None);
}

/// All batches of a release.
fn batches(tokens: &mut Tokens) -> Vec<(Vec<DmabufToken>, u32)> {
    let mut all = Vec::new();
    tokens.merge();
    while let Some((ranges, fragments)) = tokens.batch() {
        let ranges = ranges.to_vec();
        tokens.forget(ranges.len(), fragments as usize);
        all.push((ranges, fragments));
    }
    all
}

#[test]
fn neighbours_go_back_as_one_range() {
    let mut tokens = Tokens::new();
    (1..=100).chain(200..=300).for_each(|token| tokens.push(token));
    let range = |token_start, token_count| DmabufToken { token_start, token_count };
    assert_eq!(batches(&mut tokens), [(vec![range(1, 100), range(200, 101)], 201)]);
    assert!(tokens.is_empty());
    [5, 3, 4, 9, 1, 2].into_iter().for_each(|token| tokens.push(token));
    assert_eq!(batches(&mut tokens), [(vec![range(1, 5), range(9, 1)], 6)]);
    tokens.push(u32::MAX);
    tokens.push(0);
    assert_eq!(batches(&mut tokens), [(vec![range(0, 1), range(u32::MAX, 1)], 2)]);
}

#[test]
fn batches_stay_within_what_a_call_takes() {
    let mut tokens = Tokens::new();
    (0..5000).for_each(|token| tokens.push(token));
    let of_one_range: Vec<_> = batches(&mut tokens).into_iter().map(|(_, fragments)| fragments).collect();
    assert_eq!(of_one_range, [1024, 1024, 1024, 1024, 904]);
    (0..1000).for_each(|token| tokens.push(2 * token));
    let apart: Vec<_> = batches(&mut tokens).into_iter().map(|(ranges, _)| ranges.len()).collect();
    assert_eq!(apart, [128, 128, 128, 128, 128, 128, 128, 104]);
    for token in 0..3000 {
        tokens.push(token + token / 700 * 10);
    }
    assert_eq!(tokens.fragments(), 3000);
    let mut reported = 0;
    for (ranges, fragments) in batches(&mut tokens) {
        assert_eq!(ranges.iter().map(|range| range.token_count).sum::<u32>(), fragments);
        assert!(ranges.len() <= RANGES_PER_CALL_MAX && fragments <= FRAGMENTS_PER_CALL_MAX);
        reported += fragments;
    }
    assert_eq!((reported, tokens.is_empty()), (3000, true));
}

#[test]
fn tokens_that_could_not_be_released_stay() {
    let mut tokens = Tokens::new();
    [1, 2, 9].into_iter().for_each(|token| tokens.push(token));
    let error = tokens.release(-1).expect_err("no descriptor");
    assert_eq!((error.raw_os_error(), tokens.fragments()), (Some(libc::EBADF), 3));
    tokens.clear();
    assert_eq!(tokens.release(-1).expect("nothing to tell"), Released::default());
}

fn connection() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let near = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
    (near, listener.accept().expect("the other end").0)
}

/// Whether the kernel knows tokens at all.
fn takes_tokens(socket: &TcpStream) -> bool {
    let mut tokens = Tokens::new();
    tokens.push(1);
    match tokens.release(socket.as_raw_fd()) {
        Ok(_) => true,
        Err(error) => {
            println!("SKIPPED: needs a kernel with device memory over TCP: {error}");
            false
        }
    }
}

/// Repeats a call that would block, for a limited time.
fn eventually<T>(mut call: impl FnMut() -> std::io::Result<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {
                std::thread::yield_now();
            }
            result => return result.expect("it comes about"),
        }
    }
}

#[test]
fn on_an_ordinary_connection_bytes_are_plain() {
    let (mut near, mut far) = connection();
    let mut control = Control::new(4);
    let mut buffer = [0; 64];
    let fd = far.as_raw_fd();
    let mut take = || {
        // SAFETY: the buffer has as many bytes.
        eventually(|| unsafe { receive(fd, buffer.as_mut_ptr(), buffer.len(), &mut control) })
    };
    near.write_all(b"hello").expect("sent");
    assert_eq!(take(), Received { bytes: 5, plain: true });
    near.write_all(&[7; 40]).expect("sent");
    assert_eq!(take(), Received { bytes: 40, plain: true });
    drop(near);
    assert_eq!(take(), Received { bytes: 0, plain: true });
    assert_eq!((buffer[39], control.fragments().count()), (7, 0));
    assert_eq!(far.read(&mut buffer).expect("the end"), 0);
}

#[test]
fn tokens_that_no_socket_gave_are_reported_as_unknown() {
    let (_near, far) = connection();
    if !takes_tokens(&far) {
        return;
    }
    let mut tokens = Tokens::new();
    (0..2000).for_each(|token| tokens.push(1_000_000 + token));
    let released = tokens.release(far.as_raw_fd()).expect("they are skipped");
    assert_eq!(released, Released { calls: 2, fragments: 0, unknown: 2000 });
}

#[test]
fn limits_of_a_release_are_the_kernels() {
    let (_near, far) = connection();
    if !takes_tokens(&far) {
        return;
    }
    let ranges = vec![0; (RANGES_PER_CALL_MAX + 1) * size_of::<DmabufToken>()];
    let tell = |bytes: &[u8]| {
        let reported =
            ferrywire_sys::socket::set_bytes(far.as_raw_fd(), libc::SOL_SOCKET, SO_DEVMEM_DONTNEED, bytes);
        reported.map_err(|error| error.raw_os_error())
    };
    assert_eq!(tell(&ranges), Err(Some(libc::EINVAL)));
    assert_eq!(tell(&ranges[..7]), Err(Some(libc::EINVAL)));
    assert_eq!(tell(&ranges[8..]), Ok(()));
    let (local, _other) = UnixStream::pair().expect("a pair");
    let mut tokens = Tokens::new();
    tokens.push(1);
    let error = tokens.release(local.as_raw_fd()).expect_err("no TCP socket");
    assert_eq!(error.raw_os_error(), Some(libc::EBADF));
}

#[test]
fn a_send_from_a_dmabuf_that_is_not_bound_is_refused_and_sends_nothing() {
    let (near, mut far) = connection();
    let pieces = [Piece { offset: 0, bytes: 4096 }];
    // SAFETY: a TCP socket, and no dma-buf has this number.
    let refused = || unsafe { send(near.as_raw_fd(), u32::MAX, &pieces) }.expect_err("not bound");
    assert_eq!(refused().raw_os_error(), Some(libc::EINVAL));
    if let Err(error) = zerocopy::enable(near.as_raw_fd()) {
        println!("SKIPPED: needs MSG_ZEROCOPY: {error}");
    }
    assert_eq!(refused().raw_os_error(), Some(libc::EINVAL));
    drop(near);
    assert_eq!(far.read(&mut [0; 16]).expect("the end"), 0);
}
