//! Closing: with the conversation that makes it safe, and without.
//!
//! With `close_error=always` every receiving connection whose peer closes while anything is tested says so.
//! The plugin's own log is read beside our count: what is not seen cannot be hidden.

use crate::case::case;
use crate::ends::{Ends, LIMIT, builder, contents, long, loopback, pattern, plugin};
use ferrywire::nccl::log;
use std::collections::VecDeque;

/// Connections that are made and closed in one process.
const ROUNDS: u64 = 20;
/// Small messages.
const MANY: usize = 10_000;
/// Room for one, and the longest.
const SMALL_BYTES: usize = 96;
/// Connections of hasty ends that are made and missed at once.
const HASTY_AT_ONCE: usize = 20;
/// Of those that are not waited for before the close: what is begun then must fit the windows.
const LAST: usize = 8;

/// How many of the lines that are kept are about a peer that closed.
fn lines_of_closing() -> usize {
    log::last_lines().iter().filter(|line| line.text == "Connection closed by remote peer").count()
}

/// Results of this kind that an end's channels have had.
fn results_of_closing(peer: &ferrywire::Peer) -> Vec<u64> {
    let channels = peer.stats().channels;
    channels.iter().map(|channel| channel.lane.as_ref().unwrap().closing_results).collect()
}

/// Closes both ends well; nobody may have met the other's close.
fn close_without_a_closing_result(ends: Ends) {
    let peers = [ends.near.clone(), ends.far.clone()];
    ends.close();
    assert_eq!(lines_of_closing(), 0);
    assert!(peers.iter().flat_map(results_of_closing).all(|results| results == 0));
}

/// The end that closes without asking, and one that does not.
fn hasty() -> Ends {
    let plain = loopback(builder().channels(1));
    let ends = Ends::of(plain, builder().channels(1).plugin(plugin().skip_drain(true)));
    // Nothing is sent before the other end has said that it stands, and what is not sent is lost in such a close.
    ends.write(1, 0);
    ends
}

/// A round of the hasty end: writes, closes at once, and the other end has it all. Gives the results that
/// were absorbed.
fn hasty_round(bytes: usize, salt: u64) -> u64 {
    let ends = hasty();
    let source = ends.connecting.register(pattern(bytes, salt)).unwrap();
    let target = ends.accepting.register(vec![0; bytes]).unwrap();
    let _write = ends.near.write_notify(&source, 0, &target.descriptor(), 0, bytes as u64, b"all").unwrap();
    let _ = ends.near.close(LIMIT);
    assert_eq!(ends.far.wait_notification(LIMIT).unwrap(), b"all", "round {salt}");
    assert!(contents(&target) == pattern(bytes, salt), "round {salt}");
    let results = results_of_closing(&ends.far)[0];
    assert!(results <= 1, "round {salt}");
    results
}

/// Rounds of hasty ends, several at once: the other end misses each for two seconds before it gives it up.
fn hasty_rounds(rounds: u64, bytes: impl Fn(u64) -> usize + Sync) -> u64 {
    let (all, bytes): (Vec<u64>, _) = ((0..rounds).collect(), &bytes);
    let together = |batch: &[u64]| {
        std::thread::scope(|scope| {
            let begin = |&round| scope.spawn(move || hasty_round(bytes(round), round));
            let under_way: Vec<_> = batch.iter().map(begin).collect();
            under_way.into_iter().map(|round| round.join().unwrap()).sum::<u64>()
        })
    };
    all.chunks(HASTY_AT_ONCE).map(together).sum()
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

#[test]
fn a_sender_that_skips_the_drain_costs_at_most_one_result_and_no_byte() {
    case!("close_error=always").passes(|| {
        let absorbed = hasty_rounds(ROUNDS, |round| 5 * (512 << 10) + round as usize);
        assert!(absorbed > 0, "the switch should have caused some");
        assert!(lines_of_closing() > 0, "and the plugin has told of it: its log is read");
    });
}

/// Where the bytes of a small message lie, and how many they are.
fn small(number: usize) -> (u64, u64) {
    ((number * SMALL_BYTES) as u64, (number % SMALL_BYTES) as u64 + 1)
}

/// Writes all of them, one by one; all but the last few are waited for, and the last one tells.
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
        let most = if number + LAST < MANY { 64 } else { LAST };
        while under_way.len() > most {
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

#[test]
fn after_ten_thousand_small_messages_a_skipped_drain_costs_at_most_one_result_and_no_byte() {
    case!("close_error=always").passes(|| {
        let ends = hasty();
        let target = write_many(&ends);
        let _ = ends.near.close(LIMIT);
        assert_eq!(ends.far.wait_notification(LIMIT).unwrap(), b"all");
        all_small_ones_are_there(&target);
        assert!(results_of_closing(&ends.far)[0] <= 1);
    });
}

/// Connections with one small message each, both ways of closing; a process makes some of them.
#[test]
fn many_connections_close_as_one_does() {
    let (processes, rounds) = if long() { (50, 200) } else { (1, 10) };
    let mut absorbed = 0;
    for _ in 0..processes {
        case!("close_error=always").passes(|| {
            for round in 0..rounds {
                let ends = Ends::with(|builder| builder.channels(1));
                ends.write(small(round as usize).1 as usize, round);
                close_without_a_closing_result(ends);
            }
        });
        let said = case!("close_error=always").passes(|| {
            let absorbed = hasty_rounds(rounds, |round| small(round as usize).1 as usize);
            println!("absorbed={absorbed}");
        });
        absorbed +=
            said.lines().find_map(|line| line.strip_prefix("absorbed=")?.parse::<u64>().ok()).unwrap_or(0);
    }
    println!("{} connections of each kind, {absorbed} closing results absorbed", processes * rounds);
}
