//! Closing with the conversation that makes it safe. Without: `src/adversarial_tests/vanishing.rs`.
//!
//! With `close_error=always` every receiving connection whose peer closes while anything is tested says so.
//! The plugin's own log is read beside our count: what is not seen cannot be hidden.

use crate::case::case;
use crate::ends::{Ends, LIMIT, contents, long, pattern};
use ferrywire_ncclnet::log;
use std::collections::VecDeque;

/// Connections that are made and closed in one process.
const ROUNDS: u64 = 20;
/// Small messages.
const MANY: usize = 10_000;
/// Room for one, and the longest.
const SMALL_BYTES: usize = 96;
/// Number of kept log lines about a peer that closed.
fn lines_of_closing() -> usize {
    log::last_lines().iter().filter(|line| line.text == "Connection closed by remote peer").count()
}

/// The number of results of a closing peer, for each channel.
fn results_of_closing(peer: &ferrywire::Peer) -> Vec<u64> {
    let channels = peer.stats().channels;
    channels.iter().map(|channel| channel.lane.as_ref().unwrap().closing_results).collect()
}

/// Closes both ends in order, and checks that neither has met a result of the other's close.
fn close_without_a_closing_result(ends: Ends) {
    let peers = [ends.near.clone(), ends.far.clone()];
    ends.close();
    assert_eq!(lines_of_closing(), 0);
    assert!(peers.iter().flat_map(results_of_closing).all(|results| results == 0));
}

#[test]
fn a_normal_close_causes_no_closing_result() {
    case!("close_error=always").passes(|| {
        for round in 0..ROUNDS {
            let ends = Ends::new();
            ends.write(3_000_000 + round as usize, round);
            close_without_a_closing_result(ends);
        }
    });
}

/// Offset and length of a small message.
fn small(number: usize) -> (u64, u64) {
    ((number * SMALL_BYTES) as u64, (number % SMALL_BYTES) as u64 + 1)
}

/// Writes all of them, one by one; the last one has a notification.
fn write_many(ends: &Ends) -> ferrywire::Region {
    let bytes = MANY * SMALL_BYTES;
    let source = ends.connecting.register(pattern(bytes, 1)).unwrap();
    let target = ends.accepting.register(vec![0; bytes]).unwrap();
    let mut under_way = VecDeque::new();
    for number in 0..MANY {
        let ((offset, len), remote) = (small(number), target.descriptor());
        let write = match number + 1 == MANY {
            true => ends.near.write_notify(&source, offset, &remote, offset, len, b"all"),
            false => ends.near.write(&source, offset, &remote, offset, len),
        };
        under_way.push_back(write.unwrap());
        while under_way.len() > 64 {
            under_way.pop_front().unwrap().wait(LIMIT).unwrap();
        }
    }
    target
}

fn all_small_ones_are_there(target: &ferrywire::Region) {
    let (found, sent) = (contents(target), pattern(MANY * SMALL_BYTES, 1));
    for number in 0..MANY {
        let (offset, len) = small(number);
        let (begin, middle) = (offset as usize, (offset + len) as usize);
        assert!(found[begin..middle] == sent[begin..middle], "message {number}");
        assert!(found[middle..begin + SMALL_BYTES].iter().all(|byte| *byte == 0), "behind message {number}");
    }
}

#[test]
fn a_normal_close_after_ten_thousand_small_messages_causes_no_closing_result() {
    case!("close_error=always").passes(|| {
        let ends = Ends::with(|builder| builder.channels(1));
        let target = write_many(&ends);
        assert_eq!(ends.far.wait_notification(LIMIT).unwrap(), b"all");
        all_small_ones_are_there(&target);
        close_without_a_closing_result(ends);
    });
}

/// Connections with one small message each; a process makes some of them.
#[test]
fn many_connections_close_as_one_does() {
    let (processes, rounds) = if long() { (50, 200) } else { (1, 10) };
    for _ in 0..processes {
        case!("close_error=always").passes(|| {
            for round in 0..rounds {
                let ends = Ends::with(|builder| builder.channels(1));
                ends.write(small(round as usize).1 as usize, round);
                close_without_a_closing_result(ends);
            }
        });
    }
}
