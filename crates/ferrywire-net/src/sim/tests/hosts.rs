//! Tests of hosts that freeze and die, slow NICs, and dials that fail.
//!
//! Read next: `../mod.rs`.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use super::{A0, A1, B0, B1, Pair, ip, ms, pump, send};
use crate::sim::DialFault;
use crate::{ConnOptions, Transport};

#[test]
fn frozen_host_moves_nothing_but_its_kernel_acknowledges() {
    let mut pair = Pair::new(8);
    pair.net.freeze("b");
    let mut taken = 0;
    while let Ok(count) = send(&mut *pair.dialled, &[7; 50_000]) {
        taken += count;
        pair.net.advance(ms(1));
    }
    assert_eq!(taken, 256 << 10, "the buffer is the limit");
    pair.net.advance(ms(5000));
    assert!(!pair.dialled.health().waiting, "probes are answered");
    assert_eq!(Pair::kind_of_recv(&mut *pair.accepted), Err(ErrorKind::WouldBlock));
    assert_eq!(Pair::kind_of_send(&mut *pair.accepted), Err(ErrorKind::WouldBlock));
    pair.net.cut(ip(B0));
    pair.net.advance(ms(1400));
    assert_eq!(pair.dialled.health().unanswered, 3, "probes into a cut path are not");
    pair.net.heal(ip(B0));
    pair.accepted.shutdown();
    pair.net.advance(ms(1));
    assert_eq!(Pair::kind_of_recv(&mut *pair.dialled), Err(ErrorKind::WouldBlock), "it cannot even close");
    pair.net.thaw("b");
    pair.net.advance(ms(1));
    assert_eq!(Pair::kind_of_recv(&mut *pair.dialled), Ok(0));
}

#[test]
fn connections_share_the_bandwidth_of_a_nic() {
    let mut pair = Pair::new(9);
    pair.net.set_bandwidth(ip(B0), Some(10_000_000));
    assert!(pair.b.nics().unwrap().iter().any(|nic| nic.speed_mbps == Some(80)));
    let start = pair.net.now();
    pump(&mut pair, 1_000_000).unwrap();
    let alone = pair.net.now() - start;
    assert!((ms(100)..ms(110)).contains(&alone), "{alone:?}");

    let to = SocketAddr::new(ip(B0), 7000);
    let mut rival = pair.a.dial(None, to, &ConnOptions::default()).unwrap();
    pair.net.advance(ms(1));
    send(&mut *rival, &[1; 200_000]).unwrap();
    assert_eq!(rival.unsent_bytes(), 0, "the far NIC is the slow one");
    let start = pair.net.now();
    pump(&mut pair, 1_000_000).unwrap();
    assert!(pair.net.now() - start >= ms(120), "the rival's bytes come first");
}

#[test]
fn next_event_of_a_connection_that_is_up() {
    let mut pair = Pair::new(9);
    assert_eq!(pair.net.next_event(), None);
    send(&mut *pair.dialled, b"x").unwrap();
    let arrival = pair.net.now() + Duration::from_micros(50);
    assert_eq!(pair.net.next_event(), Some(arrival), "not hidden by the moment it came up");
    assert!(pair.net.step());
    assert_eq!(Pair::kind_of_recv(&mut *pair.accepted), Ok(1));
}

#[test]
fn unsent_bytes_wait_for_the_own_nic() {
    let mut pair = Pair::new(10);
    pair.net.set_bandwidth(ip(A0), Some(1_000_000));
    send(&mut *pair.dialled, &[0; 160 << 10]).unwrap();
    assert_eq!(pair.dialled.unsent_bytes(), 160 << 10);
    pair.net.advance(ms(82));
    assert_eq!(pair.dialled.unsent_bytes(), 80 << 10);
    assert_eq!(pair.dialled.health().unanswered, 0, "what queues here is not unanswered");
    pair.net.advance(ms(100));
    assert!(!pair.dialled.health().waiting);
}

#[test]
fn killed_host_resets_and_refuses_until_revived() {
    let mut pair = Pair::new(11);
    pair.net.kill("b");
    assert_eq!(Pair::kind_of_recv(&mut *pair.accepted), Err(ErrorKind::ConnectionReset));
    assert!(pair.listener.as_mut().unwrap().accept().is_err());
    pair.net.advance(ms(1));
    assert_eq!(Pair::kind_of_recv(&mut *pair.dialled), Err(ErrorKind::ConnectionReset));
    let to = SocketAddr::new(ip(B0), 7000);
    assert!(pair.b.listen(to).is_err());
    let mut dialled = pair.a.dial(None, to, &ConnOptions::default()).unwrap();
    assert_eq!(Pair::kind_of_send(&mut *dialled), Err(ErrorKind::WouldBlock));
    pair.net.advance(ms(1));
    assert_eq!(Pair::kind_of_send(&mut *dialled), Err(ErrorKind::ConnectionRefused));
    pair.net.revive("b");
    let mut listener = pair.b.listen(to).unwrap();
    let mut dialled = pair.a.dial(None, to, &ConnOptions::default()).unwrap();
    pair.net.advance(ms(1));
    assert_eq!(Pair::kind_of_send(&mut *dialled), Ok(1));
    assert!(listener.accept().unwrap().is_some());
}

#[test]
fn dials_fail_as_asked() {
    let pair = Pair::new(12);
    pair.net.fail_dials(ip(B0), DialFault::Refuse, 1);
    pair.net.fail_dials(ip(B0), DialFault::TimeOut, 1);
    let to = SocketAddr::new(ip(B0), 7000);
    let dial = |to| pair.a.dial(None, to, &ConnOptions::default()).unwrap();
    let [mut refused, mut timed_out, mut good] = [dial(to), dial(to), dial(to)];
    assert_eq!(pair.net.failed_dials(ip(B0)), 2);
    let mut nowhere = dial("10.0.0.99:1".parse().unwrap());
    pair.net.advance(ms(1));
    assert_eq!(Pair::kind_of_send(&mut *refused), Err(ErrorKind::ConnectionRefused));
    assert_eq!(Pair::kind_of_send(&mut *timed_out), Err(ErrorKind::WouldBlock));
    assert_eq!(Pair::kind_of_send(&mut *good), Ok(1));
    pair.net.cut(ip(B0));
    let mut silent = dial(to);
    pair.net.advance(ms(3500));
    assert_eq!(silent.health().unanswered, 2);
    assert_eq!(Pair::kind_of_send(&mut *nowhere), Err(ErrorKind::HostUnreachable));
    pair.net.advance(Duration::from_secs(130));
    for conn in [&mut timed_out, &mut silent] {
        assert_eq!(Pair::kind_of_send(&mut **conn), Err(ErrorKind::TimedOut));
    }
}

#[test]
fn dials_succeed_once_their_failures_are_ended() {
    let pair = Pair::new(12);
    pair.net.fail_dials(ip(B0), DialFault::Refuse, 3);
    pair.net.allow_dials();
    let mut good = pair.a.dial(None, SocketAddr::new(ip(B0), 7000), &ConnOptions::default()).unwrap();
    pair.net.advance(ms(1));
    assert_eq!(Pair::kind_of_send(&mut *good), Ok(1));
    assert_eq!(pair.net.failed_dials(ip(B0)), 0);
}

#[test]
fn hosts_route_and_listen_like_hosts() {
    let pair = Pair::new(14);
    let nics = pair.a.nics().unwrap();
    assert_eq!(nics.iter().map(|nic| nic.name.as_str()).collect::<Vec<_>>(), ["lo", "eth0", "eth1"]);
    for (to, from) in [(B1, A1), (B0, A0), ("192.168.9.9", A0), ("127.0.0.1", "127.0.0.1")] {
        assert_eq!(pair.a.route(ip(to)).unwrap(), ip(from));
    }
    let taken = pair.b.listen(SocketAddr::new(ip(B1), 7000)).map(|_| ()).unwrap_err();
    assert_eq!(taken.kind(), ErrorKind::AddrInUse);
    let foreign = pair.b.listen(SocketAddr::new(ip(A1), 7001)).map(|_| ()).unwrap_err();
    assert_eq!(foreign.kind(), ErrorKind::AddrNotAvailable);
    assert_ne!(pair.b.listen(SocketAddr::new(ip(B1), 0)).unwrap().local().port(), 0);

    let to = SocketAddr::new(ip(B1), 7000);
    let mut across = pair.a.dial(Some(&nics[1]), to, &ConnOptions::default()).unwrap();
    assert_eq!((across.local().ip(), across.remote()), (ip(A0), to));
    pair.net.advance(ms(1));
    assert_eq!(Pair::kind_of_send(&mut *across), Ok(1));
    pair.net.isolate_subnets(true);
    pair.net.advance(ms(1000));
    assert!(across.health().unanswered > 0, "rails do not mix any more");
    assert!(!pair.dialled.health().waiting);
}

#[test]
fn tuning_an_accepted_connection_marks_it() {
    let pair = Pair::new(15);
    let mut listener = pair.listener.unwrap();
    let _control = pair.a.dial(None, SocketAddr::new(ip(B1), 7000), &ConnOptions::default()).unwrap();
    pair.net.advance(ms(1));
    let mut accepted = listener.accept().unwrap().unwrap();
    assert!(!pair.net.connections()[1].bulk);
    pair.b.tune(&mut *accepted, &ConnOptions { bulk: true, ..ConnOptions::default() });
    assert!(pair.net.connections()[1].bulk);
}

#[test]
fn dropping_a_listener_resets_what_it_did_not_accept() {
    let mut pair = Pair::new(16);
    let to = SocketAddr::new(ip(B0), 7000);
    let mut waiting = pair.a.dial(None, to, &ConnOptions::default()).unwrap();
    pair.net.advance(ms(1));
    assert_eq!(Pair::kind_of_send(&mut *waiting), Ok(1));
    pair.listener = None;
    pair.net.advance(ms(1));
    assert_eq!(Pair::kind_of_send(&mut *waiting), Err(ErrorKind::ConnectionReset));
    assert!(pair.b.listen(to).is_ok());
}

#[test]
fn a_bound_connection_keeps_its_port_until_it_is_dropped() {
    let pair = Pair::new(12);
    let to = SocketAddr::new(ip(B0), 7000);
    let bind = || pair.a.bind(None, to, &ConnOptions::default()).unwrap();
    let (one, two) = (bind(), bind());
    assert_ne!(one.local(), two.local());
    let before = pair.net.connections().len();
    let (local, dialled) = (one.local(), one.connect().unwrap());
    assert_eq!(dialled.local(), local);
    assert_eq!(pair.net.connections().len(), before + 1, "one that was only bound has dialled");
    drop((two, dialled));
}
