//! Tests of the simulator's own guarantees, on which all other scenarios rely: streams, paths, resets.
//!
//! Read next: `tests/hosts.rs` for hosts, NICs and dials.

mod hosts;

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use super::{Faults, ResetSeen, Side, SimHost, SimNet};
use crate::{Conn, ConnOptions, IoVec, Listener, Transport};
use ferrywire_sys::rng::Rng;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn send(conn: &mut dyn Conn, bytes: &[u8]) -> io::Result<usize> {
    let (head, tail) = bytes.split_at(bytes.len() / 3);
    let pieces = [head, tail].map(|part| IoVec::new(part.as_ptr().cast_mut(), part.len()));
    // SAFETY: the pieces borrow `bytes`, which outlives the call, and are only read.
    unsafe { conn.send(&pieces) }
}

fn recv(conn: &mut dyn Conn, limit: usize) -> io::Result<Vec<u8>> {
    let (mut head, mut tail) = (vec![0; limit / 3], vec![0; limit - limit / 3]);
    let pieces = [&mut head, &mut tail].map(|part| IoVec::new(part.as_mut_ptr(), part.len()));
    // SAFETY: the pieces point into two vectors that outlive the call and are not used during it.
    let count = unsafe { conn.recv(&pieces) }?;
    head.append(&mut tail);
    head.truncate(count);
    Ok(head)
}

/// Two hosts with two NICs each, connected over the first NIC of each.
struct Pair {
    net: Arc<SimNet>,
    a: Arc<SimHost>,
    b: Arc<SimHost>,
    listener: Option<Box<dyn Listener>>,
    dialled: Box<dyn Conn>,
    accepted: Box<dyn Conn>,
}

const A0: &str = "10.0.0.1";
const A1: &str = "10.0.1.1";
const B0: &str = "10.0.0.2";
const B1: &str = "10.0.1.2";

impl Pair {
    fn new(seed: u64) -> Pair {
        Pair::on(SimNet::new(seed))
    }

    fn on(net: Arc<SimNet>) -> Pair {
        let a = net.host("a", &[("eth0", ip(A0)), ("eth1", ip(A1))]);
        let b = net.host("b", &[("eth0", ip(B0)), ("eth1", ip(B1))]);
        let mut listener = b.listen("0.0.0.0:7000".parse().unwrap()).unwrap();
        let bulk = ConnOptions { bulk: true, ..ConnOptions::default() };
        let dialled = a.dial(None, SocketAddr::new(ip(B0), 7000), &bulk).unwrap();
        net.advance(ms(1));
        let accepted = listener.accept().unwrap().expect("connected within a millisecond");
        Pair { net, a, b, listener: Some(listener), dialled, accepted }
    }

    fn kind_of_recv(conn: &mut dyn Conn) -> Result<usize, ErrorKind> {
        recv(conn, 1 << 20).map(|bytes| bytes.len()).map_err(|error| error.kind())
    }

    fn kind_of_send(conn: &mut dyn Conn) -> Result<usize, ErrorKind> {
        send(conn, b"x").map_err(|error| error.kind())
    }
}

/// Sends `total` bytes from the dialling end and reads them at the other, in virtual time, step by step.
fn pump(pair: &mut Pair, total: usize) -> io::Result<Vec<u8>> {
    let bytes: Vec<u8> = (0..total).map(|i| (i * 7 + i / 251) as u8).collect();
    let (mut sent, mut received) = (0, Vec::new());
    for _ in 0..1_000_000 {
        match send(&mut *pair.dialled, &bytes[sent..]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock || sent == total => {}
            result => sent += result?,
        }
        match recv(&mut *pair.accepted, 10_000) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            result => received.extend(result?),
        }
        if received.len() == total {
            assert!(received == bytes, "seed {}: the stream was changed", pair.net.seed());
            return Ok(received);
        }
        if !pair.net.step() {
            pair.net.advance(ms(1));
        }
    }
    panic!("no end: {} of {total}, seed {}\n{:#?}", received.len(), pair.net.seed(), pair.net.trace());
}

#[test]
fn bytes_stay_intact_under_every_benign_fault() {
    for seed in 0..200 {
        let mut pair = Pair::new(seed);
        pair.net.set_faults(Faults::benign(seed));
        pump(&mut pair, 200_000).unwrap();
    }
}

#[test]
fn bytes_stay_intact_until_a_reset_under_random_faults() {
    let mut resets = 0;
    for seed in 0..200 {
        let mut pair = Pair::new(seed);
        pair.net.set_faults(Faults::random(seed));
        if let Err(error) = pump(&mut pair, 200_000) {
            assert_eq!(error.kind(), ErrorKind::ConnectionReset, "seed {seed}");
            resets += 1;
        }
    }
    assert!((1..200).contains(&resets), "{resets} resets");
}

#[test]
fn same_seed_and_calls_give_the_same_events() {
    let run = |seed| {
        let mut pair = Pair::new(seed);
        pair.net.set_faults(Faults { reset: 0.0, ..Faults::random(seed) });
        pump(&mut pair, 100_000).unwrap();
        (pair.net.trace(), pair.net.fingerprint(), pair.net.now())
    };
    for seed in 0..20 {
        assert_eq!(run(seed), run(seed), "seed {seed}");
    }
    assert_ne!(run(1).1, run(2).1);
    assert!(format!("{:?}", Pair::new(77).a).contains("77"), "Debug tells the seed");
}

#[test]
fn cut_is_silent_and_healing_keeps_the_stream() {
    let mut pair = Pair::new(1);
    send(&mut *pair.dialled, b"lost at first").unwrap();
    pair.net.cut(ip(B0));
    for (after, unanswered) in [(199, 0), (1, 1), (399, 1), (1, 2), (799, 2), (1, 3)] {
        pair.net.advance(ms(after));
        let health = pair.dialled.health();
        assert!(health.waiting);
        assert_eq!(health.unanswered, unanswered, "at {:?}", pair.net.now());
    }
    assert!(pair.dialled.health().silent_for >= ms(1400));
    send(&mut *pair.dialled, b", and this").unwrap();
    pair.net.heal(ip(B0));
    pair.net.advance(ms(1));
    assert_eq!(
        Pair::kind_of_recv(&mut *pair.accepted),
        Err(ErrorKind::WouldBlock),
        "the timer has not fired"
    );
    pair.net.advance(ms(1600));
    assert_eq!(recv(&mut *pair.accepted, 100).unwrap(), b"lost at first, and this");
    let health = pair.dialled.health();
    assert!(!health.waiting && health.unanswered == 0 && health.rtt == Duration::from_micros(100));
}

#[test]
fn cut_for_a_time_heals_by_itself() {
    let mut pair = Pair::new(2);
    pair.net.cut_for(ip(A0), ms(500));
    assert_eq!(pump(&mut pair, 1_000_000).unwrap().len(), 1_000_000);
    assert!(pair.net.now() > ms(500));
}

#[test]
fn one_way_cut_delivers_but_does_not_acknowledge() {
    let mut pair = Pair::new(3);
    pair.net.cut_incoming(ip(A0));
    send(&mut *pair.dialled, b"there").unwrap();
    send(&mut *pair.accepted, b"not back").unwrap();
    pair.net.advance(ms(250));
    assert_eq!(recv(&mut *pair.accepted, 100).unwrap(), b"there");
    assert_eq!(pair.dialled.health().unanswered, 1);
    assert_eq!(Pair::kind_of_recv(&mut *pair.dialled), Err(ErrorKind::WouldBlock));
    pair.net.heal(ip(A0));
    pair.net.advance(ms(500));
    assert!(!pair.dialled.health().waiting);
    assert_eq!(recv(&mut *pair.dialled, 100).unwrap(), b"not back");
}

#[test]
fn reset_loses_what_is_in_flight_and_both_see_it() {
    let mut pair = Pair::new(4);
    send(&mut *pair.dialled, b"arrived").unwrap();
    pair.net.advance(ms(1));
    send(&mut *pair.dialled, b"in flight").unwrap();
    let id = pair.net.connections()[0].id;
    pair.net.reset(id, Side::Dialler, ResetSeen::AtOnce);
    assert_eq!(recv(&mut *pair.accepted, 100).unwrap(), b"arrived");
    for conn in [&mut pair.dialled, &mut pair.accepted] {
        assert_eq!(Pair::kind_of_recv(&mut **conn), Err(ErrorKind::ConnectionReset));
        assert_eq!(Pair::kind_of_send(&mut **conn), Err(ErrorKind::ConnectionReset));
    }
}

#[test]
fn reset_may_reach_the_other_end_late_or_only_after_a_cut() {
    let mut pair = Pair::new(5);
    pair.net.cut_outgoing(ip(A0));
    assert_eq!(pair.net.reset_nic(ip(A0), ResetSeen::OtherEndAfter(ms(20))), 1);
    assert_eq!(Pair::kind_of_recv(&mut *pair.dialled), Err(ErrorKind::ConnectionReset));
    pair.net.advance(ms(100));
    assert_eq!(Pair::kind_of_send(&mut *pair.accepted), Ok(1));
    pair.net.heal(ip(A0));
    pair.net.advance(ms(1));
    assert_eq!(Pair::kind_of_send(&mut *pair.accepted), Err(ErrorKind::ConnectionReset));
}

#[test]
fn shutdown_ends_both_directions_after_late_bytes() {
    let mut pair = Pair::new(6);
    send(&mut *pair.accepted, b"unread").unwrap();
    pair.net.advance(ms(1));
    send(&mut *pair.dialled, b"late").unwrap();
    pair.dialled.shutdown();
    pair.dialled.shutdown();
    assert_eq!(Pair::kind_of_send(&mut *pair.dialled), Err(ErrorKind::BrokenPipe));
    assert_eq!(Pair::kind_of_recv(&mut *pair.dialled), Ok(0), "never bytes after its own shutdown");
    pair.net.advance(ms(1));
    assert_eq!(recv(&mut *pair.accepted, 100).unwrap(), b"late");
    assert_eq!(Pair::kind_of_recv(&mut *pair.accepted), Ok(0));
    assert_eq!(Pair::kind_of_send(&mut *pair.accepted), Ok(1), "the other end cannot know yet");
    pair.net.advance(ms(1));
    assert_eq!(Pair::kind_of_send(&mut *pair.accepted), Err(ErrorKind::ConnectionReset));
}

#[test]
fn dropping_with_unread_bytes_resets_and_abrupt_closes_lose_bytes() {
    let mut pair = Pair::new(7);
    send(&mut *pair.accepted, b"unread").unwrap();
    pair.net.advance(ms(1));
    drop(pair.dialled);
    pair.net.advance(ms(1));
    assert_eq!(Pair::kind_of_recv(&mut *pair.accepted), Err(ErrorKind::ConnectionReset));
    drop(pair.accepted);
    assert!(pair.net.connections().is_empty());

    let mut pair = Pair::new(7);
    pair.net.set_faults(Faults { abrupt_close: 1.0, ..Faults::default() });
    send(&mut *pair.dialled, b"lost").unwrap();
    drop(pair.dialled);
    pair.net.advance(ms(1));
    assert_eq!(Pair::kind_of_recv(&mut *pair.accepted), Err(ErrorKind::ConnectionReset));
}

#[test]
fn stall_delays_and_corruption_changes_one_byte() {
    let mut pair = Pair::new(13);
    let id = pair.net.connections()[0].id;
    pair.net.stall(id, ms(300));
    pair.net.corrupt(id, Side::Dialler, 3);
    pair.net.corrupt_bulk(100, 1);
    send(&mut *pair.dialled, &[0; 100]).unwrap();
    send(&mut *pair.dialled, &[0; 100]).unwrap();
    send(&mut *pair.dialled, &[0; 100]).unwrap();
    pair.net.advance(ms(299));
    assert_eq!(Pair::kind_of_recv(&mut *pair.accepted), Err(ErrorKind::WouldBlock));
    assert_eq!(pair.dialled.health().unanswered, 1);
    pair.net.advance(ms(2));
    let received = recv(&mut *pair.accepted, 1000).unwrap();
    let changed: Vec<usize> = (0..300).filter(|at| received[*at] != 0).collect();
    assert_eq!(changed.len(), 2, "{changed:?}");
    assert!(changed[0] == 3 && (100..200).contains(&changed[1]));
}

#[test]
fn threads_use_it_in_real_time() {
    let pair = Pair::on(SimNet::real_time(17));
    let (net, mut dialled, mut accepted) = (pair.net, pair.dialled, pair.accepted);
    net.set_faults(Faults::benign(17));
    let sender = std::thread::spawn(move || {
        let mut left = 300_000;
        while left > 0 {
            left -= send(&mut *dialled, &vec![5; left]).unwrap_or(0);
            std::thread::yield_now();
        }
    });
    let mut received = 0;
    loop {
        match recv(&mut *accepted, 10_000) {
            Ok(bytes) if bytes.is_empty() => break,
            Ok(bytes) => received += bytes.len(),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        std::thread::yield_now();
    }
    sender.join().unwrap();
    assert_eq!(received, 300_000);
}

#[test]
fn chance_is_fair_and_repeatable() {
    let mut rng = Rng::new(0);
    assert_eq!(rng.number(), 0xe220_a839_7b1d_cdaf, "SplitMix64's first number for seed 0");
    let hits = (0..10_000).filter(|_| rng.chance(0.25)).count();
    assert!((2300..2700).contains(&hits), "{hits}");
    assert!((0..1000).all(|_| (1..=3).contains(&rng.prefix(3))));
}
