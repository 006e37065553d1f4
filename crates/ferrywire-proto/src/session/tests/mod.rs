//! Tests of the messages that a control session sends, keeps and rejects.

mod links;

use std::time::Duration;

use proptest::prelude::*;

use super::message::{FENCE_REFUSED_MAX, REASON_BYTES_MAX};
use super::*;
use crate::handshake::tests::session as handshake;

const T0: Duration = Duration::from_secs(100);

pub(super) fn message(n: u32) -> ControlMessage {
    let (channel, generation) = (n as u16, n);
    match n % 6 {
        0 => {
            let refused = (0..n % 97).map(|frame| (u64::from(frame), frame as u8)).collect();
            let reason = format!("reason {n}");
            let cause = FenceCause::Answer;
            ControlMessage::Fence { channel, generation, placed: u64::from(n), refused, cause, reason }
        }
        1 => ControlMessage::Dialling { channel, generation, source: ([10, 0, 0, 1], channel).into() },
        2 => ControlMessage::Expected { channel, generation },
        3 => ControlMessage::Drain,
        4 => ControlMessage::Drained,
        _ => ControlMessage::Goodbye { cause: GoodbyeCause::GaveUp, reason: format!("bye {n}") },
    }
}

/// Two sessions attached to one connection.
fn pair() -> (Session, Session) {
    let (_, initiator, responder) = handshake(Some("correct horse"));
    let (mut one, mut two) = (Session::new(77, T0), Session::new(77, T0));
    one.attach(initiator.secure, 0, T0).unwrap();
    two.attach(responder.secure, 0, T0).unwrap();
    (one, two)
}

/// A session, and its peer's bare encryption.
fn half() -> (Session, Secure) {
    let (_, initiator, responder) = handshake(None);
    let mut session = Session::new(77, T0);
    session.attach(initiator.secure, 0, T0).unwrap();
    (session, responder.secure)
}

fn numbered(number: u64, received: u64, message: &ControlMessage) -> Vec<u8> {
    Frame { received, numbered: Some((number, message)) }.encode()
}

#[test]
fn messages_arrive_in_order_and_are_acknowledged_by_what_is_said_next() {
    let (mut one, mut two) = pair();
    for n in 0..20 {
        one.push(message(n), T0).unwrap();
    }
    let mut out = Vec::new();
    two.on_bytes(&one.take_output(), T0, &mut out).unwrap();
    assert_eq!(out, (0..20).map(message).collect::<Vec<_>>());
    assert_eq!((one.unacknowledged(), two.received()), (20, 20));
    two.push(ControlMessage::Drain, T0).unwrap();
    one.on_bytes(&two.take_output(), T0, &mut out).unwrap();
    assert_eq!((one.unacknowledged(), one.received()), (0, 1));
}

#[test]
fn a_heartbeat_is_said_after_silence_only() {
    let (mut one, mut two) = pair();
    one.tick(T0).unwrap();
    assert!(one.take_output().is_empty());
    let due = one.next_deadline().unwrap();
    assert_eq!(due, T0 + HEARTBEAT_INTERVAL);
    one.push(ControlMessage::Drain, T0 + Duration::from_millis(300)).unwrap();
    one.take_output();
    one.tick(due).unwrap();
    assert!(one.take_output().is_empty(), "something was said in the meantime");
    let due = one.next_deadline().unwrap();
    one.tick(due).unwrap();
    let mut out = Vec::new();
    assert_eq!(two.silent_for(due), due - T0);
    let (_, mut fresh) = pair();
    assert!(fresh.on_bytes(&one.take_output(), due, &mut out).is_err(), "another connection's");
    two.tick(due).unwrap();
    one.on_bytes(&two.take_output(), due, &mut out).unwrap();
    assert_eq!(one.silent_for(due + Duration::from_secs(1)), Duration::from_secs(1));
    assert!(out.is_empty(), "heartbeats are not handed out");
}

#[test]
fn a_flood_is_acknowledged_at_once() {
    let (mut one, mut two) = pair();
    let (mut out, count) = (Vec::new(), ACK_MESSAGES as u32);
    for n in 0..count {
        assert!(two.take_output().is_empty());
        one.push(message(n % 6), T0).unwrap();
        two.on_bytes(&one.take_output(), T0, &mut out).unwrap();
    }
    one.on_bytes(&two.take_output(), T0, &mut out).unwrap();
    assert_eq!(one.unacknowledged(), 0);
}

#[test]
fn messages_that_wait_for_the_peer_are_bounded() {
    let mut session = Session::new(1, T0);
    for _ in 0..CONTROL_UNACKED_MAX {
        session.push(ControlMessage::Drain, T0).unwrap();
    }
    let error = session.push(ControlMessage::Drain, T0).unwrap_err();
    assert_eq!(error, SessionError::Full);
    assert_eq!(session.unacknowledged(), CONTROL_UNACKED_MAX);
}

#[test]
fn the_bytes_that_wait_for_the_peer_are_bounded_too() {
    let refused = (0..FENCE_REFUSED_MAX as u64).map(|frame| (frame, 1)).collect();
    let fence = ControlMessage::Fence {
        channel: 1,
        generation: 2,
        placed: 3,
        refused,
        cause: FenceCause::Lost,
        reason: "x".into(),
    };
    let (mut session, mut peer) = half();
    let mut sealed = session.take_output().len();
    let error = loop {
        match session.push(fence.clone(), T0) {
            Ok(()) => sealed += session.take_output().len(),
            Err(error) => break error,
        }
        assert_eq!(session.unacknowledged_bytes(), sealed);
    };
    assert_eq!(error, SessionError::FullOfBytes);
    let count = session.unacknowledged();
    assert!(count < CONTROL_UNACKED_MAX && sealed <= CONTROL_UNACKED_BYTES_MAX, "{count}, {sealed} bytes");
    let heard = Frame::<&ControlMessage> { received: count as u64, numbered: None }.encode();
    session.on_bytes(&peer.seal(&heard).unwrap(), T0, &mut Vec::new()).unwrap();
    assert_eq!(session.unacknowledged_bytes(), 0);
    assert_eq!(session.push(fence, T0), Ok(()));
}

#[test]
fn repetitions_are_dropped_and_gaps_refused() {
    let (mut session, mut peer) = half();
    let mut out = Vec::new();
    for number in [1, 2, 1, 2, 3, 1] {
        let frame = peer.seal(&numbered(number, 0, &message(number as u32))).unwrap();
        session.on_bytes(&frame, T0, &mut out).unwrap();
    }
    assert_eq!(out, [message(1), message(2), message(3)]);
    let frame = peer.seal(&numbered(5, 0, &message(5))).unwrap();
    let error = session.on_bytes(&frame, T0, &mut out).unwrap_err();
    assert_eq!(error, SessionError::Gap { expected: 4, got: 5 });
    assert!(!error.is_resumable() && !session.is_attached());
    assert_eq!(session.on_bytes(&frame, T0, &mut out), Err(SessionError::Detached));
}

#[test]
fn messages_before_an_error_count() {
    let (mut session, mut peer) = half();
    let mut bytes = peer.seal(&numbered(1, 0, &ControlMessage::Drain)).unwrap();
    bytes.extend([40, 0]);
    bytes.extend([0; 40]);
    let mut out = Vec::new();
    let error = session.on_bytes(&bytes, T0, &mut out).unwrap_err();
    assert_eq!(error, SessionError::Connection(SecureError::Forged));
    assert!(error.is_resumable());
    assert_eq!((out, session.received()), (vec![ControlMessage::Drain], 1));
}

#[test]
fn invalid_control_messages_are_refused() {
    let long = numbered(1, 0, &ControlMessage::Drain);
    let [mut unknown, mut trailing] = [long.clone(), long];
    unknown[0] = 8;
    trailing.push(0);
    let mut steering = numbered(1, 0, &goodbye("bye"));
    *steering.last_mut().unwrap() = 0x1b;
    let mut farewell = numbered(1, 0, &goodbye(""));
    farewell[CAUSE_AT] = GoodbyeCause::ALL.len() as u8;
    let malformed = |why: &str| SessionError::Malformed(format!("a control message: {why}"));
    let cases = [
        (unknown, SessionError::UnknownKind(8)),
        (trailing, malformed("1 bytes too many")),
        (farewell, malformed("4 as the cause of a goodbye, must be 0 to 3")),
        (steering, malformed("a text that is not printable")),
        (numbered(0, 0, &ControlMessage::Drain), SessionError::Gap { expected: 1, got: 0 }),
        (Frame { received: 1, numbered: None }.encode(), SessionError::AheadOfUs { received: 1, sent: 0 }),
        (vec![HEARTBEAT_KIND, 0], malformed("ends 7 bytes early")),
        (Vec::new(), malformed("ends 1 bytes early")),
    ];
    for (plain, expected) in cases {
        let (mut session, mut peer) = half();
        let frame = peer.seal(&plain).unwrap();
        assert_eq!(session.on_bytes(&frame, T0, &mut Vec::new()), Err(expected));
    }
}

const HEARTBEAT_KIND: u8 = 0;
/// Offset of a goodbye's cause: behind kind, count and number.
const CAUSE_AT: usize = 1 + 8 + 8;

fn goodbye(reason: &str) -> ControlMessage {
    ControlMessage::Goodbye { cause: GoodbyeCause::Closed, reason: String::from(reason) }
}

#[test]
fn lengths_that_cannot_be_are_refused_at_once() {
    for (length, bytes) in [(15u16, 0), (60_017, 60_001), (u16::MAX, 65_519)] {
        let (mut session, _) = half();
        let error = session.on_bytes(&length.to_le_bytes(), T0, &mut Vec::new()).unwrap_err();
        assert_eq!(error, SessionError::Connection(SecureError::Length { bytes }));
    }
    let (_, mut peer) = half();
    assert_eq!(peer.seal(&[0; 60_001]), Err(SecureError::Length { bytes: 60_001 }));
    assert!(peer.seal(&[0; 60_000]).is_ok());
}

#[test]
fn the_largest_fence_fits_and_a_larger_one_is_not_taken() {
    let fence = |refusals: usize| ControlMessage::Fence {
        channel: 1,
        generation: 2,
        placed: 3,
        refused: vec![(u64::MAX, 255); refusals],
        cause: FenceCause::SourceUnreadable,
        reason: "é".repeat(REASON_BYTES_MAX),
    };
    let (mut one, mut two) = pair();
    one.push(fence(FENCE_REFUSED_MAX), T0).unwrap();
    assert!(matches!(one.push(fence(FENCE_REFUSED_MAX + 1), T0), Err(SessionError::Unusable(_))));
    let mut out = Vec::new();
    two.on_bytes(&one.take_output(), T0, &mut out).unwrap();
    let [ControlMessage::Fence { refused, reason, .. }] = &out[..] else { panic!("{out:?}") };
    assert_eq!((refused.len(), reason.len()), (FENCE_REFUSED_MAX, REASON_BYTES_MAX));
}

#[test]
fn a_handshake_that_lies_about_what_was_received_is_refused() {
    let (_, initiator, _) = handshake(None);
    let mut session = Session::new(77, T0);
    session.push(ControlMessage::Drain, T0).unwrap();
    let error = session.attach(initiator.secure, 2, T0);
    assert_eq!(error, Err(SessionError::AheadOfUs { received: 2, sent: 1 }));
    assert!(!session.is_attached());
}

fn any_message() -> impl Strategy<Value = ControlMessage> {
    let reason = prop::collection::vec(prop::char::range(' ', '~'), 0..1024)
        .prop_map(|characters| characters.into_iter().collect::<String>());
    let refused = prop::collection::vec(any::<(u64, u8)>(), 0..40);
    let fence_cause = prop::sample::select(&FenceCause::ALL[..]);
    let fence = (any::<(u16, u32, u64)>(), refused, fence_cause, reason.clone()).prop_map(
        |((channel, generation, placed), refused, cause, reason)| ControlMessage::Fence {
            channel,
            generation,
            placed,
            refused,
            cause,
            reason,
        },
    );
    let goodbye_cause = prop::sample::select(&GoodbyeCause::ALL[..]);
    let goodbye =
        (goodbye_cause, reason).prop_map(|(cause, reason)| ControlMessage::Goodbye { cause, reason });
    let dialling =
        any::<(u16, u32, std::net::Ipv6Addr, u16)>().prop_map(|(channel, generation, ip, port)| {
            ControlMessage::Dialling { channel, generation, source: (ip, port).into() }
        });
    prop_oneof![
        fence,
        dialling,
        any::<(u16, u32)>()
            .prop_map(|(channel, generation)| ControlMessage::Expected { channel, generation }),
        (any::<(u16, u32)>(), any::<u8>()).prop_map(|((channel, generation), byte)| {
            ControlMessage::Lane { channel, generation, handle: Box::new([byte; 128]) }
        }),
        Just(ControlMessage::Drain),
        Just(ControlMessage::Drained),
        goodbye,
    ]
}

proptest! {
    #[test]
    fn a_message_is_read_back(number: u64, received: u64, message in any_message(), cut: prop::sample::Index) {
        let bytes = numbered(number, received, &message);
        let frame = Frame { received, numbered: Some((number, message)) };
        prop_assert_eq!(Frame::decode(&bytes), Ok(frame));
        prop_assert!(Frame::decode(&bytes[..cut.index(bytes.len())]).is_err());
    }

    #[test]
    fn whatever_is_read_is_written_the_same(
        message in any_message(), at: prop::sample::Index, mask: u8,
        garbage in prop::collection::vec(any::<u8>(), 0..80),
    ) {
        let mut altered = numbered(1, 0, &message);
        let at = at.index(altered.len());
        altered[at] ^= mask;
        for bytes in [altered, garbage] {
            if let Ok(Frame { received, numbered }) = Frame::decode(&bytes) {
                let numbered = numbered.as_ref().map(|(number, message)| (*number, message));
                prop_assert_eq!(Frame { received, numbered }.encode(), bytes);
            }
        }
    }
}
