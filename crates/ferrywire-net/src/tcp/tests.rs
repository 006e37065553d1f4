//! Tests of the TCP transport over loopback; `veth.rs` holds those that need two hosts.

mod lending;
mod veth;
mod zero_copy;

use std::net::{Ipv4Addr, Ipv6Addr};
use std::thread;

use super::*;
use crate::{IoVec, PathHealth};
use ferrywire_proto::stall_timer::StallTimer;
use ferrywire_sys::IOVECS_PER_CALL_MAX;
use ferrywire_sys::poll::{Event, Interest, Poller};

const DEADLINE: Duration = Duration::from_secs(60);

/// The window scale of a connection: how many bits its window can have beyond the header's 16.
fn window_scale(fd: RawFd) -> u8 {
    let mut info = [0; 8];
    socket::get_bytes(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info).unwrap();
    info[6] >> 4
}

#[test]
fn a_path_that_seems_short_can_still_open_its_window_wide() {
    let plain = pair();
    for options in [bulk(), ConnOptions { same_host: true, per_thread: 4, ..bulk() }] {
        let (dialled, _accepted) = pair_with(&options);
        assert_eq!(window_scale(dialled.fd().unwrap()), window_scale(plain.0.fd().unwrap()));
        assert_ne!(dialled.buffer_bytes(), plain.0.buffer_bytes(), "it is tuned all the same");
    }
}

fn localhost(port: u16) -> SocketAddr {
    SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port)
}

fn bulk() -> ConnOptions {
    ConnOptions { bulk: true, ..ConnOptions::default() }
}

/// Repeats a call until it no longer returns `WouldBlock`.
fn eventually<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let (start, mut stall_timer) = (Instant::now(), StallTimer::new(DEADLINE));
    loop {
        match call() {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && !stall_timer.is_over(start.elapsed()) => {
                thread::yield_now()
            }
            result => return result,
        }
    }
}

fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let (start, mut stall_timer) = (Instant::now(), StallTimer::new(DEADLINE));
    while !condition() {
        assert!(!stall_timer.is_over(start.elapsed()), "not within {DEADLINE:?}: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

fn accept(listener: &mut dyn Listener) -> Box<dyn Conn> {
    eventually(|| listener.accept()?.ok_or_else(|| io::ErrorKind::WouldBlock.into())).unwrap()
}

/// A dialled connection and its accepted end.
fn pair_with(options: &ConnOptions) -> (TcpConn, Box<dyn Conn>) {
    let transport = TcpTransport::default();
    let mut listener = transport.listen(localhost(0)).unwrap();
    let dialled = transport.connect(None, listener.local(), options).unwrap();
    (dialled, accept(listener.as_mut()))
}

fn pair() -> (TcpConn, Box<dyn Conn>) {
    pair_with(&ConnOptions::default())
}

fn pieces_over(bytes: &mut [u8], piece_bytes: usize) -> Vec<IoVec> {
    bytes.chunks_mut(piece_bytes).map(|piece| IoVec::new(piece.as_mut_ptr(), piece.len())).collect()
}

fn send_from(conn: &mut dyn Conn, bytes: &mut [u8]) -> io::Result<usize> {
    let pieces = pieces_over(bytes, usize::MAX);
    // SAFETY: the pieces lie in `bytes`.
    unsafe { conn.send(&pieces) }
}

fn recv_into(conn: &mut dyn Conn, bytes: &mut [u8]) -> io::Result<usize> {
    let pieces = pieces_over(bytes, usize::MAX);
    // SAFETY: the pieces lie in `bytes`.
    unsafe { conn.recv(&pieces) }
}

fn send_all(conn: &mut dyn Conn, bytes: &mut [u8]) {
    let mut sent = 0;
    while sent < bytes.len() {
        sent += eventually(|| send_from(conn, &mut bytes[sent..])).unwrap();
    }
}

fn recv_all(conn: &mut dyn Conn, bytes: &mut [u8]) {
    let mut received = 0;
    while received < bytes.len() {
        match eventually(|| recv_into(conn, &mut bytes[received..])).unwrap() {
            0 => panic!("the stream ended after {received} bytes"),
            count => received += count,
        }
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8).collect()
}

/// Sends until the socket is full; returns the bytes sent.
fn fill(mut send: impl FnMut() -> io::Result<usize>) -> usize {
    let mut sent = 0;
    loop {
        match send() {
            Ok(count) => sent += count,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return sent,
            Err(e) => panic!("{e}"),
        }
    }
}

fn ready(conn: &dyn Conn, interest: Interest, timeout: Duration) -> Option<Event> {
    let poller = Poller::new().unwrap();
    poller.add(conn.fd().unwrap(), 1, interest).unwrap();
    let mut events = Vec::new();
    poller.wait(&mut events, Some(timeout)).unwrap();
    events.pop()
}

#[test]
fn a_full_connection_takes_a_part_and_then_would_block() {
    let (mut near, mut far) = pair();
    let mut bytes = pattern(64 << 20);
    let first = eventually(|| send_from(&mut near, &mut bytes)).unwrap();
    assert!(first < bytes.len());
    let mut sent = first;
    sent += fill(|| send_from(&mut near, &mut bytes[sent..sent + 251]));
    assert!(near.unsent_bytes() > 0);
    let mut received = vec![0; sent];
    recv_all(far.as_mut(), &mut received);
    assert!(received[..first] == bytes[..first], "bytes were changed");
    assert_eq!(near.unsent_bytes(), 0);
}

#[test]
fn shutdown_ends_both_directions_once() {
    let (mut near, mut far) = pair();
    send_all(far.as_mut(), &mut pattern(100));
    near.shutdown();
    near.shutdown();
    assert_eq!(recv_into(&mut near, &mut [0; 8]).unwrap(), 0);
    assert_eq!(send_from(&mut near, &mut [0; 8]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    assert_eq!(eventually(|| recv_into(far.as_mut(), &mut [0; 8])).unwrap(), 0);
}

#[test]
fn the_stream_ends_after_its_last_byte() {
    let (near, mut far) = pair();
    let mut near: Box<dyn Conn> = Box::new(near);
    send_all(near.as_mut(), &mut pattern(1000));
    drop(near);
    recv_all(far.as_mut(), &mut [0; 1000]);
    assert_eq!(eventually(|| recv_into(far.as_mut(), &mut [0; 8])).unwrap(), 0);
    assert_eq!(recv_into(far.as_mut(), &mut [0; 8]).unwrap(), 0);
}

#[test]
fn a_refused_connection_says_so_every_time() {
    let free_port = TcpTransport::default().listen(localhost(0)).unwrap().local();
    let mut conn = match TcpTransport::default().dial(None, free_port, &ConnOptions::default()) {
        Ok(conn) => conn,
        Err(e) => return assert_eq!(e.kind(), io::ErrorKind::ConnectionRefused),
    };
    for _ in 0..2 {
        let sent = eventually(|| send_from(conn.as_mut(), &mut [0; 8]));
        assert_eq!(sent.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        let received = eventually(|| recv_into(conn.as_mut(), &mut [0; 8]));
        assert_eq!(received.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }
}

#[test]
fn a_reset_is_not_mistaken_for_the_end_of_the_stream() {
    let (mut near, far) = pair();
    send_all(&mut near, &mut pattern(100));
    assert!(ready(far.as_ref(), Interest::READ, DEADLINE).is_some());
    drop(far); // with unread bytes: the kernel resets
    for _ in 0..2 {
        let received = eventually(|| recv_into(&mut near, &mut [0; 8]));
        assert_eq!(received.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }
    assert_eq!(send_from(&mut near, &mut [0; 8]).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
}

#[test]
fn writing_to_a_peer_that_has_ended_does_not_spoil_what_it_said() {
    let (mut near, mut far) = pair();
    send_all(far.as_mut(), &mut pattern(100));
    far.shutdown();
    let end = Event { token: 1, readable: true, writable: true, error: false, hangup: false };
    until("the end has arrived", || ready(&near, Interest::BOTH, DEADLINE) == Some(end));
    let refused =
        eventually(|| send_from(&mut near, &mut [0; 8]).and(Err::<(), _>(io::ErrorKind::WouldBlock.into())));
    assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    recv_all(&mut near, &mut [0; 100]);
    assert_eq!(recv_into(&mut near, &mut [0; 8]).unwrap(), 0);
}

/// Sends from a page without read access.
fn send_what_cannot_be_read(conn: &mut dyn Conn) -> io::Error {
    // SAFETY: a fresh mapping, which no other code knows.
    unsafe {
        let (flags, anywhere) = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, std::ptr::null_mut());
        let page = libc::mmap(anywhere, 4096, libc::PROT_NONE, flags, -1, 0);
        assert_ne!(page, libc::MAP_FAILED);
        let refused = eventually(|| conn.send(&[IoVec::new(page.cast(), 1)])).unwrap_err();
        libc::munmap(page, 4096);
        refused
    }
}

#[test]
fn memory_that_cannot_be_read_leaves_the_connection_as_it_was() {
    let (mut near, mut far) = pair();
    assert_eq!(send_what_cannot_be_read(&mut near).raw_os_error(), Some(libc::EFAULT));
    let (mut sent, mut received) = (pattern(1000), vec![0; 1000]);
    send_all(&mut near, &mut sent);
    recv_all(far.as_mut(), &mut received);
    assert_eq!(received, sent);
    far.shutdown();
    assert_eq!(eventually(|| recv_into(&mut near, &mut [0; 8])).unwrap(), 0, "an orderly end");
}

#[test]
fn a_reset_after_unreadable_memory_is_reported_as_one() {
    for sends_first in [false, true] {
        let (mut near, far) = pair();
        assert_eq!(send_what_cannot_be_read(&mut near).raw_os_error(), Some(libc::EFAULT));
        send_all(&mut near, &mut pattern(100));
        assert!(ready(far.as_ref(), Interest::READ, DEADLINE).is_some());
        drop(far); // with unread bytes: the kernel resets
        until("the reset has arrived", || {
            ready(&near, Interest::READ, DEADLINE).is_some_and(|event| event.hangup)
        });
        for sends in [sends_first, !sends_first] {
            let result =
                if sends { send_from(&mut near, &mut [0; 8]) } else { recv_into(&mut near, &mut [0; 8]) };
            assert_eq!(result.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
        }
    }
}

#[test]
fn pieces_past_the_kernels_limit_are_left_for_the_next_call() {
    let (mut near, _far) = pair();
    let mut bytes = pattern(2000);
    let pieces = pieces_over(&mut bytes, 1);
    // SAFETY: the pieces lie in `bytes`.
    let sent = eventually(|| unsafe { near.send(&pieces) });
    assert_eq!(sent.unwrap(), IOVECS_PER_CALL_MAX);
}

#[test]
fn nothing_to_send_or_no_room_is_an_error_not_an_end() {
    let (mut near, mut far) = pair();
    assert_eq!(send_from(&mut near, &mut []).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    send_all(&mut near, &mut [1]);
    assert!(ready(far.as_ref(), Interest::READ, DEADLINE).is_some());
    assert_eq!(recv_into(far.as_mut(), &mut []).unwrap_err().kind(), io::ErrorKind::InvalidInput);
}

#[test]
fn the_loopback_nic_is_known_and_routed_to() {
    let transport = TcpTransport::default();
    let nics = transport.nics().unwrap();
    assert!(nics.iter().any(|nic| nic.loopback && nic.name == "lo"));
    assert_eq!(transport.route(Ipv4Addr::LOCALHOST.into()).unwrap(), Ipv4Addr::LOCALHOST);
}

#[test]
fn a_bound_connection_comes_from_its_nic() {
    let transport = TcpTransport::default();
    let mut listener = transport.listen(localhost(0)).unwrap();
    let mut nic =
        transport.nics().unwrap().into_iter().find(|nic| nic.address == Ipv4Addr::LOCALHOST).unwrap();
    nic.address = Ipv4Addr::new(127, 0, 0, 77).into();
    let dialled = transport.dial(Some(&nic), listener.local(), &bulk()).unwrap();
    assert_eq!(dialled.local().ip(), nic.address);
    assert_eq!(accept(listener.as_mut()).remote(), dialled.local());
}

#[test]
fn every_nic_reaches_this_host_itself() {
    let transport = TcpTransport::default();
    let mut listener = transport.listen(localhost(0)).unwrap();
    for nic in transport.nics().unwrap().iter().filter(|nic| nic.address.is_ipv4() && nic.up) {
        let mut dialled = transport.dial(Some(nic), listener.local(), &bulk()).unwrap();
        send_all(dialled.as_mut(), &mut [1, 2, 3]);
        recv_all(accept(listener.as_mut()).as_mut(), &mut [0; 3]);
    }
}

#[test]
fn a_nic_of_another_family_is_refused() {
    let transport = TcpTransport::default();
    let nic = transport.nics().unwrap().into_iter().find(|nic| nic.address.is_ipv4()).unwrap();
    let to = SocketAddr::new(Ipv6Addr::LOCALHOST.into(), 1);
    let refused = transport.dial(Some(&nic), to, &bulk()).map(drop);
    assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::InvalidInput);
}

#[test]
fn an_ipv6_listener_reports_ipv4_peers_as_such() {
    let transport = TcpTransport::default();
    let mut listener = match transport.listen(SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0)) {
        Ok(listener) => listener,
        Err(e) => return println!("SKIPPED: needs IPv6: {e}"),
    };
    assert!(listener.accept().unwrap().is_none());
    let dialled = transport.dial(None, localhost(listener.local().port()), &bulk()).unwrap();
    let accepted = accept(listener.as_mut());
    assert_eq!((accepted.remote(), accepted.local()), (dialled.local(), dialled.remote()));
}

#[test]
fn a_healthy_connection_waits_for_nothing() {
    let start = Instant::now();
    let (mut near, mut far) = pair();
    send_all(&mut near, &mut pattern(1000));
    recv_all(far.as_mut(), &mut [0; 1000]);
    until("everything is acknowledged", || !near.health().waiting);
    let PathHealth { unanswered, silent_for, rtt, acked_bytes, .. } = near.health();
    // The kernel counts in ticks of its clock.
    let longest = start.elapsed() + Duration::from_millis(20);
    assert_eq!(unanswered, 0);
    // The kernel may count the SYN as a byte.
    assert!((1000..=1001).contains(&acked_bytes), "{acked_bytes}");
    assert!(silent_for <= longest, "{silent_for:?}");
    assert!(rtt > Duration::ZERO && rtt <= longest, "{rtt:?}");
}

#[test]
fn a_live_peer_that_does_not_read_is_not_a_dead_path() {
    let (mut near, _far) = pair();
    let mut bytes = pattern(1 << 20);
    fill(|| send_from(&mut near, &mut bytes));
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(3500) {
        let health = near.health();
        assert!(health.waiting);
        assert!(!health.is_dead(), "{health:?}");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn bulk_within_a_host_gets_buffers_and_a_fast_congestion_control() {
    let (near, mut far) = pair_with(&bulk());
    TcpTransport::default().tune(far.as_mut(), &bulk());
    let (plain, _) = pair();
    socket::set_congestion_control(plain.fd().unwrap(), "cubic").ok();
    for conn in [&near as &dyn Conn, far.as_ref()] {
        assert_eq!(conn.congestion_control(), plain.congestion_control());
        for name in [libc::SO_SNDBUF, libc::SO_RCVBUF] {
            assert!(socket::get_int(conn.fd().unwrap(), libc::SOL_SOCKET, name).unwrap() > 1 << 17);
        }
    }
}

#[test]
fn an_explicit_congestion_control_is_taken_or_refused() {
    let named = |name: &str| ConnOptions { congestion_control: Some(name.into()), ..bulk() };
    let (near, _far) = pair_with(&named("reno"));
    assert_eq!(near.congestion_control(), "reno");
    let refused = TcpTransport::default().dial(None, localhost(1), &named("no_such")).map(drop);
    assert!(refused.unwrap_err().to_string().contains("no_such"));
}

#[test]
fn a_bound_connection_comes_from_the_address_it_had_before() {
    let transport = TcpTransport::default();
    let nics = transport.nics().unwrap();
    let lo = nics.iter().find(|nic| nic.address == localhost(0).ip());
    let mut listener = transport.listen(localhost(0)).unwrap();
    for nic in [None, lo] {
        let bind = || transport.bind(nic, listener.local(), &bulk()).unwrap();
        let (bound, other) = (bind(), bind());
        let local = bound.local();
        assert!(local.ip() == localhost(0).ip() && local.port() != 0 && local != other.local(), "{local}");
        let dialled = bound.connect().unwrap();
        let accepted = accept(listener.as_mut());
        assert_eq!((dialled.local(), accepted.remote()), (local, local));
        drop(other);
        assert!(listener.accept().unwrap().is_none(), "one that was only bound has dialled");
    }
}
