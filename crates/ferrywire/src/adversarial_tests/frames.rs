//! Data frames with offsets and counts that the peer has no right to.

use super::evil::{Evil, data};
use super::scene::{BEFORE, REGION_BYTES, Scene};
use super::{LIMIT, eventually};
use crate::{RemoteRegion, TransferError, limits};
use ferrywire_memory::MemoryLocation;
use ferrywire_proto::Identity;
use ferrywire_proto::handshake::testing::hello;
use ferrywire_proto::wire::{self, HEADER_BYTES, Header, Kind, Placement, Refusal};
use std::io::Write;
use std::net::Shutdown;

#[test]
fn bytes_outside_a_region_are_refused() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let (key, size) = (scene.key(), REGION_BYTES as u64);
    let outside = [
        (key, size, 1, Refusal::OutOfRegion),
        (key, size - 99, 100, Refusal::OutOfRegion),
        (key, 0, REGION_BYTES + 1, Refusal::OutOfRegion),
        (key, u64::MAX - 100, 100, Refusal::OutOfRegion),
        (key, 0u64.wrapping_sub(64 << 10), 100, Refusal::OutOfRegion),
        (key, 1 << 63, 100, Refusal::OutOfRegion),
        (key, size + 1, 0, Refusal::OutOfRegion),
        (key ^ 1, 0, 100, Refusal::NoRegion),
        (0, 0, 100, Refusal::NoRegion),
        (u64::MAX, 0, 0, Refusal::NoRegion),
    ];
    for (key, offset, len, _) in outside {
        evil.send(data(key, offset, len), &vec![0xee; len]);
    }
    let expected: Vec<_> = (0..).zip(outside).map(|(number, (.., why))| (number, why)).collect();
    assert_eq!(evil.data[0].answers(), expected);
    scene.unharmed();
}

#[test]
fn placements_outside_a_region_or_of_another_sum_are_refused() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let size = REGION_BYTES as u64;
    let lists: [&[(u64, u32)]; 7] = [
        &[(size - 50, 100)],
        &[(0, 50), (size - 49, 50)],
        &[(u64::MAX, 100)],
        &[(u64::MAX - 99, 100)],
        &[(0, 99)],
        &[(0, 101)],
        &[(0, u32::MAX), (0, 101)],
    ];
    for list in lists {
        let mut body = Vec::new();
        list.iter().for_each(|(offset, len)| Placement { offset: *offset, len: *len }.encode_into(&mut body));
        body.extend_from_slice(&[0xee; 100]);
        let header = Header { segments: list.len() as u16, ..data(scene.key(), 0, 100) };
        evil.send(header, &body);
    }
    let refused = evil.data[0].answers();
    let expected: Vec<_> = (0..lists.len() as u32).map(|number| (number, Refusal::OutOfRegion)).collect();
    assert_eq!(refused, expected);
    scene.unharmed();
}

#[test]
fn a_region_is_refused_once_it_is_deregistered() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let region = scene.victim.alloc_host(4096).unwrap();
    let header = data(region.descriptor().key, 0, 100);
    evil.send(header, &[1; 100]);
    assert_eq!(evil.data[0].answers(), []);
    region.deregister().unwrap();
    evil.send(header, &[2; 100]);
    assert_eq!(evil.data[0].answers(), [(1, Refusal::NoRegion)]);
    scene.unharmed();
}

#[test]
fn a_sink_of_another_peer_is_no_target() {
    let scene = Scene::new();
    let (mut evil, mut asked) = (Evil::new(&scene), Evil::new(&scene));
    let target = scene.victim.register(vec![BEFORE; 3000]).unwrap();
    let remote = RemoteRegion {
        owner: Identity(hello(1).identity),
        key: 1,
        len: 1000,
        location: MemoryLocation::Host,
    };
    let read = asked.here.read(&target, 1000, &remote, 0, 1000).unwrap();
    eventually("the read is asked for", || !asked.data[0].heard().frames.is_empty());
    let sink = asked.data[0].heard().frames[0].total;
    let to_sink = |offset, len| Header { flags: wire::FLAG_SINK, ..data(sink, offset, len) };
    evil.send(to_sink(0, 1000), &[0xee; 1000]);
    assert_eq!(evil.data[0].answers(), [(0, Refusal::NoSink)]);
    let outside = [(901, 100), (1000, 1), (u64::MAX - 100, 100), (0, 1001)];
    for (offset, len) in outside {
        asked.send(to_sink(offset, len), &vec![0xee; len]);
    }
    let refused = asked.data[0].answers();
    assert_eq!(refused, [0, 1, 2, 3].map(|number| (number, Refusal::OutOfRegion)));
    let mut bytes = vec![0; 3000];
    target.read_at(0, &mut bytes).unwrap();
    assert_eq!(bytes, [BEFORE; 3000]);
    // The request is acknowledged too; otherwise it stays in flight.
    asked.send(Header { ack: 1, ..to_sink(0, 1000) }, &[3; 1000]);
    assert_eq!(read.wait(LIMIT), Ok(1000));
    asked.send(Header { ack: 1, ..to_sink(0, 1000) }, &[0xee; 1000]);
    assert_eq!(asked.data[0].answers().last(), Some(&(5, Refusal::NoSink)));
    target.read_at(0, &mut bytes).unwrap();
    assert_eq!(bytes, [[BEFORE; 1000], [3; 1000], [BEFORE; 1000]].concat());
    scene.unharmed();
}

/// Matches a receive of the victim with a message of as many bytes. Returns a maker of headers for its sink.
fn matched(evil: &mut Evil, tag: u64, number: u64, bytes: u64) -> impl Fn(u64, usize) -> Header + use<> {
    let total = bytes;
    evil.send(Header { key: tag, offset: number, total, transfer: tag, ..Header::new(Kind::Announce) }, &[]);
    let mut sink = 0;
    eventually("it is matched", || {
        let heard = evil.data[0].heard();
        let answer = heard.frames.iter().find(|header| header.kind == Kind::Match && header.transfer == tag);
        sink = answer.map_or(0, |header| header.key);
        sink > 0
    });
    move |offset, len| Header { flags: wire::FLAG_SINK, ..data(sink, offset, len) }
}

/// Regression: a receive reported more bytes than it had room for.
#[test]
fn a_receive_is_not_filled_past_its_end() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let target = scene.victim.alloc_host(100).unwrap();
    let received = evil.here.recv(5, &target, 0, 100).unwrap();
    let to_sink = matched(&mut evil, 5, 0, 100);
    evil.send(to_sink(0, 90), &[1; 90]);
    evil.send(to_sink(10, 0), &[]);
    evil.send(to_sink(10, 90), &[1; 90]);
    evil.send(to_sink(0, 0), &[]);
    assert_eq!(evil.data[0].answers(), [(3, Refusal::OutOfRegion), (4, Refusal::NoSink)]);
    let outcome = received.wait(LIMIT);
    assert!(
        matches!(&outcome, Err(TransferError::ProtocolViolation { why, .. }) if why.contains("more")),
        "{outcome:?}"
    );
    assert_eq!(received.bytes_moved(), 90);
    scene.unharmed();
}

/// Regression: the bytes of the second message were added to those of the first.
#[test]
fn a_receive_that_has_begun_is_for_no_other_message() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let target = scene.victim.alloc_host(100).unwrap();
    let received = evil.here.recv(5, &target, 0, 100).unwrap();
    let to_sink = matched(&mut evil, 5, 0, 100);
    let header = to_sink(0, 90);
    evil.send(header, &[1; 90]);
    evil.send(Header { transfer: header.key, key: Refusal::NoSink as u64, ..Header::new(Kind::Refuse) }, &[]);
    let outcome = received.wait(LIMIT);
    assert!(matches!(outcome, Err(TransferError::AccessRefused { .. })), "{outcome:?}");
    evil.send(Header { key: 5, offset: 1, len: 50, ..Header::new(Kind::Send) }, &[2; 50]);
    assert_eq!(evil.here.recv(5, &target, 0, 100).unwrap().wait(LIMIT), Ok(50));
    // A receive that got no bytes before the refusal matches the next message.
    let again = evil.here.recv(6, &target, 0, 100).unwrap();
    let header = matched(&mut evil, 6, 2, 100)(0, 0);
    evil.send(Header { transfer: header.key, key: Refusal::NoSink as u64, ..Header::new(Kind::Refuse) }, &[]);
    evil.send(Header { key: 6, offset: 3, len: 50, ..Header::new(Kind::Send) }, &[2; 50]);
    assert_eq!(again.wait(LIMIT), Ok(50));
    scene.unharmed();
}

#[test]
fn acknowledging_what_was_never_sent_ends_the_channel() {
    let scene = Scene::new();
    for ack in [1, 1000, 1 << 31, u32::MAX] {
        let mut evil = Evil::new(&scene);
        evil.send(Header { ack, ..Header::new(Kind::Ack) }, &[]);
        evil.channel_lost_for("the peer acknowledged frames that were not sent");
        evil.control.shutdown(Shutdown::Both).unwrap();
        evil.lost_for("the peer acknowledged frames that were not sent");
    }
    scene.unharmed();
}

#[test]
fn refusing_frames_that_were_never_sent_does_nothing() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let numbers = [0, 1, 1 << 31, u32::MAX].map(|number: u32| (u64::from(number), Refusal::Other));
    let body = wire::encode_refusals(&numbers);
    evil.send(Header { len: body.len() as u32, ..Header::new(Kind::Ack) }, &body);
    evil.send(data(scene.key() ^ 1, 0, 0), &[]);
    assert_eq!(evil.data[0].answers(), [(0, Refusal::NoRegion)]);
    scene.unharmed();
}

type Spoil = fn(&mut [u8; HEADER_BYTES]);

#[test]
fn a_head_that_breaks_a_limit_ends_the_channel() {
    let scene = Scene::new();
    let spoilt: [(&str, Spoil); 8] = [
        ("len", |header| header[4..8].copy_from_slice(&(limits::CHUNK_BYTES_MAX as u32 + 1).to_le_bytes())),
        ("len", |header| header[4..8].copy_from_slice(&[0xff; 4])),
        ("segments", |header| header[2..4].copy_from_slice(&513u16.to_le_bytes())),
        ("notify", |header| header[48..50].copy_from_slice(&[0xff; 2])),
        ("flags", |header| header[1] = 0x80),
        ("offset", |header| header[32..40].copy_from_slice(&[0xff; 8])),
        ("not a frame header", |header| header[0] = 99),
        ("not a frame header", |header| header[55] = 1),
    ];
    for (cause, spoil) in spoilt {
        let mut evil = Evil::new(&scene);
        let mut header = data(scene.key(), 0, 100).encode();
        spoil(&mut header);
        let _ = evil.data[0].stream.write_all(&[&header[..], &[0xee; 100]].concat());
        evil.channel_lost_for("the stream is broken");
        evil.channel_lost_for(cause);
    }
    scene.unharmed();
}

#[test]
fn a_wrong_checksum_ends_the_channel() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let header = Header { flags: wire::FLAG_CRC, crc: 7, ..data(scene.key() ^ 1, 0, 4) };
    evil.send(header, &[1; 4]);
    assert_eq!(evil.data[0].answers(), [(0, Refusal::NoRegion)], "what is refused is not looked at");
    let mut notify = Header { flags: wire::FLAG_CRC, crc: 7, ..Header::new(Kind::Notify) };
    notify.len = 4;
    evil.send(notify, &[1; 4]);
    evil.channel_lost_for("checksum mismatch");
    scene.unharmed();
}
