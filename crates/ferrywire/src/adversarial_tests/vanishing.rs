//! A peer that disappears without a last message, after it has handed everything to its plugin.
//!
//! With `close_error=always` every receiving connection reports a closing peer if anything is tested then.
//! The test also reads the plugin's own log, so a report that the engine misses is seen there.

use crate::case::case;
use crate::{Builder, Endpoint, Peer, PluginConfig, Region};
use ferrywire_ncclnet::log;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Longest wait without progress, however busy the machine is.
const LIMIT: Duration = Duration::from_secs(60);
/// Connections that are made and end in one process.
const ROUNDS: u64 = 20;
/// Connections that are made, and lost, at once.
const AT_ONCE: usize = 20;
/// Number of small messages.
const MANY: usize = 10_000;
/// Room for each small message, and length of the longest one, in bytes.
const SMALL_BYTES: usize = 96;
/// Number of last messages that are not waited for: those in flight at the end must fit the windows.
const LAST: usize = 8;

/// The endpoint that disappears, and its peer.
struct Ends {
    near_end: Endpoint,
    far_end: Endpoint,
    near: Peer,
    far: Peer,
}

fn builder() -> Builder {
    let library = std::env::current_exe().unwrap().with_file_name("libferrywire_tcpx_sim.so");
    // SAFETY: the file was built with these tests, and the process has just begun: no other thread reads its
    // environment.
    Endpoint::builder().channels(1).threads(2).plugin(unsafe { PluginConfig::at(library) })
}

impl Ends {
    fn new() -> Ends {
        let far_end = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        let near_end = builder().build().unwrap();
        let near = near_end.connect(far_end.listen_addresses()[0], LIMIT).unwrap();
        let far = far_end.accept(LIMIT).unwrap();
        let ends = Ends { near_end, far_end, near, far };
        // Nothing is sent before the other end has reported that it is ready, and unsent messages are lost
        // with this end.
        let (source, target) = (ends.near_end.alloc_host(1).unwrap(), ends.far_end.alloc_host(1).unwrap());
        ends.near.write(&source, 0, &target.descriptor(), 0, 1).unwrap().wait(LIMIT).unwrap();
        ends
    }

    /// Ends the near end's connections once everything is sent, without a message to the far end.
    fn vanish(&self) {
        let state = self.near.state();
        state.life.vanishes.store(true, Ordering::SeqCst);
        self.near_end.running().with_control(|control| control.break_off(state.info.session));
    }

    /// Number of plugin results at the far end that reported a closing peer.
    fn results_of_closing(&self) -> u64 {
        self.far.stats().channels[0].lane.as_ref().unwrap().closing_results
    }
}

/// Number of log lines about a peer that closed.
fn lines_of_closing() -> usize {
    log::last_lines().iter().filter(|line| line.text == "Connection closed by remote peer").count()
}

/// Bytes that differ between positions and between salts; none is 0.
fn pattern(bytes: usize, salt: u64) -> Vec<u8> {
    (0..bytes as u64).map(|at| ((at * 7 + (at >> 8) * 13 + salt * 31) % 255) as u8 + 1).collect()
}

fn contents(region: &Region) -> Vec<u8> {
    let mut out = vec![0; region.len() as usize];
    region.read_at(0, &mut out).unwrap();
    out
}

/// One round: the near end writes and disappears at once, and the far end gets all bytes. Returns the number
/// of absorbed results.
fn round(bytes: usize, salt: u64) -> u64 {
    let ends = Ends::new();
    let source = ends.near_end.register(pattern(bytes, salt)).unwrap();
    let target = ends.far_end.register(vec![0; bytes]).unwrap();
    let _write = ends.near.write_notify(&source, 0, &target.descriptor(), 0, bytes as u64, b"all").unwrap();
    ends.vanish();
    assert_eq!(ends.far.wait_notification(LIMIT).unwrap(), b"all", "round {salt}");
    assert!(contents(&target) == pattern(bytes, salt), "round {salt}");
    let results = ends.results_of_closing();
    assert!(results <= 1, "round {salt}");
    results
}

/// Several rounds at once: the far end waits two seconds for each lost near end before it gives up.
fn rounds(count: u64, bytes: impl Fn(u64) -> usize + Sync) -> u64 {
    let (all, bytes): (Vec<u64>, _) = ((0..count).collect(), &bytes);
    let together = |batch: &[u64]| {
        std::thread::scope(|scope| {
            let begin = |&salt| scope.spawn(move || round(bytes(salt), salt));
            let in_flight: Vec<_> = batch.iter().map(begin).collect();
            in_flight.into_iter().map(|round| round.join().unwrap()).sum::<u64>()
        })
    };
    all.chunks(AT_ONCE).map(together).sum()
}

#[test]
fn a_vanished_sender_loses_no_byte() {
    case!("close_error=always").passes(|| {
        let absorbed = rounds(ROUNDS, |round| 5 * (512 << 10) + round as usize);
        assert!(absorbed > 0, "`close_error=always` should have caused such results");
        assert!(lines_of_closing() > 0, "the plugin should have logged the closing peer");
    });
}

/// Offset and length of a small message.
fn small(number: usize) -> (u64, u64) {
    ((number * SMALL_BYTES) as u64, (number % SMALL_BYTES) as u64 + 1)
}

#[test]
fn a_sender_that_vanishes_after_ten_thousand_small_messages_costs_at_most_one_result_and_no_byte() {
    case!("close_error=always").passes(|| {
        let ends = Ends::new();
        let sent = pattern(MANY * SMALL_BYTES, 1);
        let source = ends.near_end.register(sent.clone()).unwrap();
        let target = ends.far_end.alloc_host(sent.len()).unwrap();
        let mut in_flight = VecDeque::new();
        for number in 0..MANY {
            let ((offset, len), remote) = (small(number), target.descriptor());
            let write = if number + 1 == MANY {
                ends.near.write_notify(&source, offset, &remote, offset, len, b"all")
            } else {
                ends.near.write(&source, offset, &remote, offset, len)
            };
            in_flight.push_back(write.unwrap());
            let most = if number + LAST < MANY { 64 } else { LAST };
            while in_flight.len() > most {
                in_flight.pop_front().unwrap().wait(LIMIT).unwrap();
            }
        }
        ends.vanish();
        assert_eq!(ends.far.wait_notification(LIMIT).unwrap(), b"all");
        let found = contents(&target);
        for number in 0..MANY {
            let (offset, len) = small(number);
            let (begin, middle) = (offset as usize, (offset + len) as usize);
            assert!(found[begin..middle] == sent[begin..middle], "message {number}");
            assert!(
                found[middle..begin + SMALL_BYTES].iter().all(|byte| *byte == 0),
                "behind message {number}"
            );
        }
        assert!(ends.results_of_closing() <= 1);
    });
}

/// Connections with one small message each, several per process.
#[test]
fn many_senders_vanish_as_one_does() {
    let long = std::env::var("FERRYWIRE_LONG").is_ok_and(|value| value == "1");
    let (processes, count) = if long { (50, 200) } else { (1, 10) };
    for _ in 0..processes {
        case!("close_error=always").passes(|| {
            rounds(count, |round| small(round as usize).1 as usize);
        });
    }
}
