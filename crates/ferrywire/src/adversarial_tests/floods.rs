//! Floods: more of everything than a peer may send, leave waiting, or leave unfinished.

use super::evil::{Data, Evil, data, evil_config, limited};
use super::scene::{REGION_BYTES, Scene};
use super::{LIMIT, eventually};
use crate::{TransferError, limits};
use ferrywire_proto::handshake::Config;
use ferrywire_proto::wire::{self, Header, Kind, Placement, Refusal};
use std::io::Write;
use std::net::Shutdown;
use std::thread;
use std::time::Duration;

#[test]
fn a_peer_that_exceeds_its_window_loses_the_channel() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let header = data(scene.key() ^ 1, 0, 0).encode();
    for _ in 0..100 {
        if evil.data[0].stream.write_all(&header.repeat(10_000)).is_err() {
            break;
        }
    }
    evil.channel_lost_for("the peer sent more frames than the window holds");
    evil.control.shutdown(Shutdown::Both).unwrap();
    evil.lost_for("the peer sent more frames than the window holds");
    scene.unharmed();
}

#[test]
fn notifications_past_the_limit_are_refused() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let held = limits::NOTIFICATIONS_HELD_MAX as u64;
    let header = Header { len: 1, ..Header::new(Kind::Notify) };
    evil.data[0].flood(header, b"x", held + 100, |index, header| header.transfer = index);
    let refused = evil.data[0].answers();
    assert_eq!((limited(&refused), refused[0].0), (100, held as u32));
    for _ in 0..held {
        assert_eq!(evil.here.poll_notification(), Ok(Some(b"x".to_vec())));
    }
    assert_eq!(evil.here.poll_notification(), Ok(None));
    scene.unharmed();
}

/// A peer takes at most `REORDER_FRAMES_MAX` frames ahead of a missing one, and the loss of a connection may
/// not be noticed yet.
#[test]
fn no_more_is_sent_ahead_of_a_missing_number_than_a_peer_takes() {
    let scene = Scene::new();
    let mut evil = Evil::with(&scene, Config { channels: 2, ..evil_config() });
    let acknowledge = |evil: &mut Evil, channel: usize| {
        let ack = evil.data[channel].heard().frames.len() as u32;
        evil.data[channel].send(Header { ack, ..Header::new(Kind::Ack) }, &[]);
    };
    let sent = |evil: &Evil, kind| {
        let sent = |data: &Data| data.heard().frames.iter().filter(|header| header.kind == kind).count();
        evil.data.iter().map(sent).sum::<usize>()
    };
    let (early, more) = (limits::REORDER_FRAMES_MAX, 3000);
    for _ in 0..early + more {
        evil.here.notify(b"x").unwrap();
    }
    // Frames on the first channel are not acknowledged.
    eventually("both channels have sent", || evil.data.iter().all(|data| !data.heard().frames.is_empty()));
    let missing =
        evil.data.iter().position(|data| data.heard().frames.iter().any(|header| header.transfer == 0));
    let missing = missing.unwrap();
    let mut before = 0;
    loop {
        acknowledge(&mut evil, 1 - missing);
        thread::sleep(Duration::from_millis(5));
        let now = sent(&evil, Kind::Notify);
        if now == before && now >= early {
            break;
        }
        before = now;
    }
    assert_eq!(before, early);
    eventually("the rest comes", || {
        (0..2).for_each(|channel| acknowledge(&mut evil, channel));
        sent(&evil, Kind::Notify) == early + more
    });
    let mut numbers: Vec<u64> = Vec::new();
    for data in &evil.data {
        numbers.extend(data.heard().frames.iter().map(|header| header.transfer));
    }
    numbers.sort_unstable();
    assert!(numbers.into_iter().eq(0..(early + more) as u64));
    eventually("all transfers have ended", || {
        (0..2).for_each(|channel| acknowledge(&mut evil, channel));
        !evil.here.state().in_flight()
    });
    scene.unharmed();
}

#[test]
fn notifications_that_wait_for_bytes_are_charged_like_others() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let body = vec![7; limits::NOTIFY_BYTES_MAX];
    let header = Header { len: body.len() as u32, total: 1, ..Header::new(Kind::Notify) };
    // 47 MiB of notifications.
    evil.data[0].flood(header, &body, 6000, |index, header| header.transfer = index);
    let refused = limited(&evil.data[0].answers());
    assert!(refused >= 1900, "only {refused} long notifications were refused");
    scene.unharmed();
}

#[test]
fn notifications_out_of_turn_are_not_kept_without_end() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let count = limits::REORDER_FRAMES_MAX as u64 + 1000;
    evil.data[0].flood(Header::new(Kind::Notify), &[], count, |index, header| header.transfer = index + 1);
    limited(&evil.data[0].answers());
    // A frame that was refused completely may be sent again.
    evil.send(Header { transfer: count, ..Header::new(Kind::Notify) }, &[]);
    assert_eq!(evil.data[0].answers().last(), Some(&(count as u32, Refusal::Limit)));
    scene.unharmed();
}

#[test]
fn transfers_that_are_counted_and_never_end_are_bounded() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let region = scene.victim.alloc_host(1).unwrap();
    let header = Header { flags: wire::FLAG_COUNTED, ..data(region.descriptor().key, 0, 0) };
    let count = limits::COUNTED_TRANSFERS_MAX as u64 + 1000;
    evil.data[0].flood(header, &[], count, |index, header| header.transfer = index);
    assert_eq!(limited(&evil.data[0].answers()), 1000);
    scene.unharmed();
}

#[test]
fn eager_messages_past_the_credit_are_refused() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let body = vec![7; limits::EAGER_BYTES_MAX];
    let header = Header { len: body.len() as u32, key: 5, ..Header::new(Kind::Send) };
    let fit = limits::EAGER_CREDIT_BYTES / (body.len() + limits::EAGER_OVERHEAD_BYTES);
    // Messages in order count as unexpected; after a gap they count as early.
    for gap in [0, 1000] {
        evil.data[0].flood(header, &body, 200, |index, header| header.offset = index + gap);
    }
    assert_eq!(limited(&evil.data[0].answers()), 400 - fit, "the credit holds for {fit}");
    let target = scene.victim.alloc_host(body.len()).unwrap();
    for _ in 0..fit {
        let received = evil.here.recv(5, &target, 0, target.len()).unwrap();
        assert_eq!(received.wait(LIMIT), Ok(body.len() as u64));
    }
    eventually("credit is given back", || {
        evil.data[0].heard().frames.iter().any(|header| header.kind == Kind::Credit)
    });
    scene.unharmed();
}

#[test]
fn a_notification_said_again_is_charged_once() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let body = vec![7; limits::NOTIFY_BYTES_MAX];
    // Together these notifications exceed every limit, while the bytes that they follow never come.
    let follow = Header { transfer: 5, total: 1, len: body.len() as u32, ..Header::new(Kind::Notify) };
    evil.data[0].flood(follow, &body, 6000, |_, _| {});
    let refused = evil.data[0].answers();
    assert_eq!(refused.len(), 5999);
    assert!(refused.iter().all(|(_, why)| *why == Refusal::Other), "{:?}", refused.first());
    evil.send(Header { transfer: 0, len: body.len() as u32, ..Header::new(Kind::Notify) }, &body);
    assert_eq!(evil.here.wait_notification(LIMIT), Ok(body));
    scene.unharmed();
}

#[test]
fn empty_messages_are_charged_too() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let fit = (limits::EAGER_CREDIT_BYTES / limits::EAGER_OVERHEAD_BYTES) as u64;
    evil.data[0].flood(Header::new(Kind::Send), &[], fit + 500, |index, header| header.offset = index);
    assert_eq!(limited(&evil.data[0].answers()), 500);
    scene.unharmed();
}

#[test]
fn announcements_past_the_limit_are_refused() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let held = limits::ANNOUNCED_SENDS_MAX as u64;
    let header = Header { key: 5, total: 1 << 40, ..Header::new(Kind::Announce) };
    // The second half skips every second number, so that these frames arrive early.
    evil.data[0].flood(header, &[], held + 100, |index, header| {
        header.offset = if index < held / 2 { index } else { index * 2 };
        header.transfer = index;
    });
    assert_eq!(evil.data[0].answers(), []);
    eventually("all are answered", || evil.data[0].heard().frames.len() == 100);
    let expected = |header: &Header| header.kind == Kind::Refuse && header.key == Refusal::Limit as u64;
    assert!(evil.data[0].heard().frames.iter().all(expected));
    scene.unharmed();
}

#[test]
fn numbers_that_never_come_are_not_waited_for_without_end() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let count = limits::REORDER_FRAMES_MAX as u64 + 1000;
    evil.data[0].flood(Header::new(Kind::Announce), &[], count, |index, header| {
        header.offset = index + 1;
        header.transfer = index;
    });
    assert_eq!(limited(&evil.data[0].answers()), 1000);
    let waiting = evil.here.state().queue.waiting();
    assert!(waiting <= limits::ANSWERS_WAITING_MAX, "{waiting} answers wait");
    scene.unharmed();
}

#[test]
fn matches_of_nothing_are_not_answered_without_end() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let count = limits::ANSWERS_WAITING_MAX as u64 + 10_000;
    // The answers are never acknowledged, so they stay with the victim.
    evil.data[0].flood(Header::new(Kind::Match), &[], count, |index, header| header.transfer = index);
    assert_eq!(evil.data[0].answers(), []);
    let waiting = evil.here.state().queue.waiting();
    assert!(waiting <= limits::ANSWERS_WAITING_MAX, "{waiting} answers wait");
    scene.unharmed();
}

#[test]
fn a_message_number_counts_once() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let header = |number, tag| Header { offset: number, key: tag, len: 1, ..Header::new(Kind::Send) };
    let target = scene.victim.alloc_host(1).unwrap();
    for (number, byte) in [(0, b"a"), (0, b"b"), (2, b"d"), (2, b"e"), (1, b"c"), (1, b"f"), (2, b"g")] {
        evil.send(header(number, 9), byte);
    }
    let refused: Vec<u32> = evil.data[0].answers().iter().map(|(number, _)| *number).collect();
    assert_eq!(refused, [1, 3, 5, 6]);
    for expected in *b"acd" {
        evil.here.recv(9, &target, 0, 1).unwrap().wait(LIMIT).unwrap();
        let mut got = [0];
        target.read_at(0, &mut got).unwrap();
        assert_eq!(got, [expected]);
    }
    let late = evil.here.recv(9, &target, 0, 1).unwrap();
    assert!(matches!(late.wait(Duration::from_millis(100)), Err(TransferError::Stalled { .. })));
    scene.unharmed();
}

#[test]
fn reads_from_outside_are_refused_wherever_their_answer_should_go() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let size = REGION_BYTES as u64;
    let mut frames = 0;
    let mut ask = |key, sink_offset, ranges: &[(u64, u32)]| {
        let header = Header {
            key,
            offset: sink_offset,
            total: 9,
            segments: ranges.len() as u16,
            ..Header::new(Kind::Read)
        };
        let mut body = Vec::new();
        ranges
            .iter()
            .for_each(|(offset, len)| Placement { offset: *offset, len: *len }.encode_into(&mut body));
        evil.send(header, &body);
        frames += 1;
    };
    ask(scene.key(), 0, &[(size - 1, 2)]);
    ask(scene.key(), 0, &[(u64::MAX, 1)]);
    ask(scene.key() ^ 1, 0, &[(0, 1)]);
    ask(scene.key(), u64::MAX, &[(0, 1000), (5000, 60_000)]);
    ask(scene.key(), u64::MAX - 60_999, &[(0, 1000), (5000, 60_000)]);
    let refused: Vec<_> = evil.data[0].answers().iter().map(|(_, why)| *why).collect();
    let expected = [Refusal::OutOfRegion, Refusal::OutOfRegion, Refusal::NoRegion];
    assert_eq!(refused, [&expected[..], &[Refusal::OutOfRegion; 2]].concat());
    scene.unharmed();
}

/// Sends `count` reads of one byte of a region, with answers to this sink, and acknowledges `ack` frames.
fn ask_often(evil: &mut Evil, ack: usize, (region, sink): (u64, u64), count: usize) {
    let mut range = Vec::new();
    Placement { offset: 0, len: 1 }.encode_into(&mut range);
    let header = Header { ack: ack as u32, key: region, total: sink, segments: 1, ..Header::new(Kind::Read) };
    let count = count as u64;
    evil.data[0].flood(header, &range, count, |_, _| {});
}

/// Acknowledges frames until `arrived` returns true.
fn acknowledge_until(evil: &mut Evil, what: &str, arrived: impl Fn(&[Header]) -> bool) {
    eventually(what, || {
        let heard = evil.data[0].heard().frames.clone();
        evil.data[0].send(Header { ack: heard.len() as u32, ..Header::new(Kind::Ack) }, &[]);
        arrived(&heard)
    });
}

#[test]
fn reads_whose_answers_are_never_acknowledged_are_bounded() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let taken = limits::INBOUND_READS_MAX + limits::READS_WAITING_MAX;
    ask_often(&mut evil, 0, (scene.key(), 9), taken + 100);
    assert_eq!(limited(&evil.data[0].answers()), 100);
    scene.good_peer_is_served();
    // The waiting reads are answered in order, and make room for others.
    acknowledge_until(&mut evil, "all are answered", |heard| heard.len() == taken);
    ask_often(&mut evil, taken, (scene.key(), 9), 1);
    acknowledge_until(&mut evil, "one more is answered", |heard| heard.len() == taken + 1);
    assert!(evil.data[0].heard().frames.iter().all(|header| (header.kind, header.key) == (Kind::Data, 9)));
    scene.unharmed();
}

#[test]
fn a_read_that_waits_for_others_does_not_keep_its_region_and_is_refused_without_it() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let mut memory = [0];
    // SAFETY: the byte outlives the region.
    let region = unsafe { scene.victim.register_raw(memory.as_mut_ptr(), 1) }.unwrap();
    ask_often(&mut evil, 0, (scene.key(), 9), limits::INBOUND_READS_MAX);
    ask_often(&mut evil, 0, (region.descriptor().key, 10), 1);
    assert_eq!(evil.data[0].answers(), []);
    region.deregister().unwrap();
    acknowledge_until(&mut evil, "it is refused", |heard| {
        heard.iter().any(|header| {
            (header.kind, header.transfer, header.key) == (Kind::Refuse, 10, Refusal::NoRegion as u64)
        })
    });
    scene.unharmed();
}
