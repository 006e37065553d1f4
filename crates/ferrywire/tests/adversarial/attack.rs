//! Many strangers at once: good peers are served meanwhile, and the limits hold.

use crate::peers::{Good, record, victim};
use crate::process::{alone, eventually, lines, open_descriptors, panics, resident_bytes};
use crate::strangers::{Attackers, HTTP, idle_connections};
use crate::{LIMIT, LINES_MAX};
use ferrywire::limits;
use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Longest time that an attack may delay a good peer.
const HELD_UP: Duration = Duration::from_secs(5);
/// Memory that an unproven connection may cost beyond the bytes it sent: the state of its Noise
/// handshake, its socket's and its own bookkeeping, and what the allocator adds.
const PENDING_OVERHEAD_BYTES: usize = 16 << 10;
/// Memory that varies in this process for other reasons: new good peers, attackers, the allocator.
const NOISE_BYTES: usize = 24 << 20;

/// Calls that hosts without the secret must not affect.
struct Calls {
    limit: Duration,
    slowest: Duration,
    slow: usize,
}

impl Calls {
    fn new(limit: Duration) -> Calls {
        Calls { limit, slowest: Duration::ZERO, slow: 0 }
    }

    fn time<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = call();
        let took = began.elapsed();
        self.slow += usize::from(took > self.limit);
        self.slowest = self.slowest.max(took);
        result
    }

    /// A few may have been slow because this process was stopped in their middle.
    fn were_not_held_up(&self) {
        assert!(self.slow <= 2, "{} calls waited for strangers, up to {:?}", self.slow, self.slowest);
    }
}

#[test]
fn good_peers_are_served_under_attack() {
    let _alone = alone();
    let seconds = std::env::var("FERRYWIRE_HOSTILE_SECONDS").ok().and_then(|text| text.parse().ok());
    let seconds = Duration::from_secs(seconds.unwrap_or(10));
    let victim = victim();
    let address = victim.listen_addresses()[0];
    let (recordings, mut recorded) = record(&victim);
    let mut good = Good::connect(&victim, address).unwrap();
    let stop = Arc::<AtomicBool>::default();
    let attackers = Attackers::new(address, &recordings);
    // Everything once before it counts.
    for _ in 0..3 {
        let mut fresh = Good::connect(&victim, address).unwrap();
        fresh.round().unwrap();
        good.round().unwrap();
        fresh.close();
    }
    eventually("fresh peers are gone", || victim.peer_count() == 2);
    thread::sleep(Duration::from_millis(200));
    let (descriptors, resident) = (open_descriptors(), resident_bytes());

    let ended = stop.clone();
    let worker = thread::spawn(move || {
        while !ended.load(Ordering::SeqCst) {
            good.round().expect("a good peer fails");
        }
        good
    });
    attackers.go.store(true, Ordering::SeqCst);
    let idle = thread::spawn(move || idle_connections(address));
    let (start, mut most, mut fresh_peers) = (Instant::now(), 0, 0);
    let (mut slowest, mut calls) = (Duration::ZERO, Calls::new(HELD_UP));
    while start.elapsed() < seconds {
        let began = Instant::now();
        calls.time(|| victim.peer_count());
        let mut fresh = Good::connect(&victim, address).expect("a fresh good peer cannot connect");
        slowest = slowest.max(began.elapsed());
        fresh.round().expect("a fresh good peer fails");
        fresh.close();
        fresh_peers += 1;
        for _ in 0..10 {
            most = most.max(resident_bytes());
            thread::sleep(Duration::from_millis(20));
        }
    }
    let idle = idle.join().unwrap();
    most = most.max(resident_bytes());
    println!("{} idle connections", idle.len());
    drop(idle);
    attackers.end();
    stop.store(true, Ordering::SeqCst);
    let good = worker.join().expect("a good peer was not served");
    recorded.round().expect("the peer whose hello was replayed fails");

    let growth = most.saturating_sub(resident);
    println!("{} good rounds, {fresh_peers} fresh peers, the slowest in {slowest:?}", good.rounds);
    println!("resident memory grew by {growth} bytes; the slowest call took {:?}", calls.slowest);
    assert!(good.rounds > 10 && fresh_peers > 1);
    calls.were_not_held_up();
    let allowed = limits::HANDSHAKES_PENDING_MAX * (limits::HANDSHAKE_BYTES_MAX + PENDING_OVERHEAD_BYTES);
    assert!(growth <= allowed + NOISE_BYTES, "strangers made us hold {growth} bytes");
    eventually("descriptors are back", || open_descriptors() <= descriptors);
    assert_eq!(victim.peer_count(), 2, "a stranger became a peer, or a peer was lost");
    assert_eq!(panics(), 0, "a thread of the engine panicked");
    let minutes = 1 + (start.elapsed() + limits::HANDSHAKE_TIMEOUT).as_secs() as usize / 60;
    let reported = lines().lock().unwrap().iter().filter(|line| line.contains("refused")).count();
    assert!(reported > 0 && reported <= minutes * LINES_MAX, "{reported} lines about strangers");
    good.close();
    recorded.close();
    victim.close(LIMIT).unwrap();
}

#[test]
fn a_flood_of_connections_holds_up_no_call() {
    let _alone = alone();
    let victim = victim();
    let address = victim.listen_addresses()[0];
    let mut good = Good::connect(&victim, address).unwrap();
    let stop = Arc::<AtomicBool>::default();
    let flooders: Vec<_> = (0..3)
        .map(|_| {
            let stop = stop.clone();
            thread::spawn(move || {
                let mut rounds = 0u32;
                while !stop.load(Ordering::SeqCst) {
                    if let Ok(mut stream) = TcpStream::connect(address) {
                        let _ = stream.write_all(HTTP);
                        // Resets leave no port waiting.
                        socket2::Socket::from(stream).set_linger(Some(Duration::ZERO)).unwrap();
                        rounds += 1;
                    }
                }
                rounds
            })
        })
        .collect();
    let (start, mut calls) = (Instant::now(), Calls::new(HELD_UP / 5));
    while start.elapsed() < Duration::from_secs(4) {
        assert!(calls.time(|| victim.peer_count()) > 0);
        good.round().unwrap();
    }
    stop.store(true, Ordering::SeqCst);
    let floods: Vec<u32> = flooders.into_iter().map(|thread| thread.join().unwrap()).collect();
    println!(
        "{floods:?} connections, {} good rounds, the slowest call took {:?}",
        good.rounds, calls.slowest
    );
    calls.were_not_held_up();
    good.close();
    victim.close(LIMIT).unwrap();
}
