//! Fuzz targets for control sessions: random bytes for the decryption, any plain content, and a peer with the
//! key.

use super::ends::shake_hands;
use super::{Input, OPENED, check_text};
use crate::handshake::{Secure, SecureError};
use crate::limits;
use crate::session::{ControlMessage, FenceCause, Frame, GoodbyeCause, Session, SessionError};
use std::cell::RefCell;
use std::time::Duration;

thread_local! {
    /// The encryption of a connection that has carried no message yet, established once per thread.
    static UNSAID: RefCell<Secure> = RefCell::new(shake_hands().0.secure);
}

pub(super) fn foreign_bytes(input: &mut Input<'_>) {
    UNSAID.with_borrow_mut(|secure| {
        let mut incoming = Vec::new();
        while !input.is_empty() {
            let len = usize::from(input.u8());
            incoming.extend_from_slice(input.take(len));
            let held = incoming.len();
            match secure.open(&mut incoming) {
                Ok(None) => assert!(held < 2 + limits::CONTROL_MESSAGE_BYTES_MAX + 16),
                Ok(Some(plain)) => panic!("forged: {plain:?}"),
                Err(SecureError::Exhausted) => panic!("no message was sealed"),
                Err(error) => {
                    check_text(&error.to_string());
                    return;
                }
            }
        }
    });
}

pub(super) fn plain_content(input: &mut Input<'_>) {
    let bytes = input.take(usize::MAX);
    match Frame::decode(bytes) {
        Ok(frame) => {
            let encoded = encode(&frame);
            assert_eq!(encoded, bytes, "what is accepted is what would be sent");
            assert!(encoded.len() <= limits::CONTROL_MESSAGE_BYTES_MAX);
            assert_eq!(Frame::decode(&encoded), Ok(frame));
        }
        Err(error) => check_text(&error.to_string()),
    }
}

fn encode(frame: &Frame<ControlMessage>) -> Vec<u8> {
    Frame {
        received: frame.received,
        numbered: frame.numbered.as_ref().map(|(number, message)| (*number, message)),
    }
    .encode()
}

fn any_message(input: &mut Input<'_>) -> ControlMessage {
    let (channel, generation) = (input.u16(), input.u32());
    match input.u8() % 7 {
        0 => ControlMessage::Fence {
            channel,
            generation,
            placed: input.u64(),
            refused: (0..input.u16() % 1024).map(|number| (number.into(), 3)).collect(),
            cause: one_of(&FenceCause::ALL, input),
            reason: String::from_utf8_lossy(input.take(40)).into_owned(),
        },
        1 => ControlMessage::Dialling { channel, generation, source: (input.array::<16>(), channel).into() },
        2 => ControlMessage::Expected { channel, generation },
        3 => ControlMessage::Drain,
        4 => ControlMessage::Drained,
        5 => ControlMessage::Lane { channel, generation, handle: Box::new([input.u8(); 128]) },
        _ => {
            let cause = one_of(&GoodbyeCause::ALL, input);
            let reason = String::from_utf8_lossy(input.take(40)).into_owned();
            ControlMessage::Goodbye { cause, reason }
        }
    }
}

fn one_of<T: Copy>(all: &[T], input: &mut Input<'_>) -> T {
    all[usize::from(input.u8()) % all.len()]
}

/// A session whose peer holds the key and seals arbitrary content.
pub(super) fn evil_peer(input: &mut Input<'_>) {
    let (one, two) = shake_hands();
    let (mut evil, mut now) = (two.secure, Duration::from_secs(100));
    let mut session = Session::new(OPENED, now);
    session.attach(one.secure, 0, now).expect("the session has no messages yet");
    let (mut sent, mut out) = (0u64, Vec::new());
    let mut heard = Vec::new();
    while !input.is_empty() {
        let result = match input.u8() % 5 {
            0 => {
                let before = session.unacknowledged();
                let pushed = session.push(any_message(input), now);
                sent += u64::from(session.unacknowledged() > before);
                pushed
            }
            1 => {
                now += Duration::from_millis(input.u8().into());
                session.tick(now)
            }
            2 => {
                let len = usize::from(input.u8());
                session.on_bytes(input.take(len), now, &mut out)
            }
            _ => {
                let Ok(frame) = evil.seal(&evil_plain(input, &session, sent)) else {
                    continue;
                };
                let cut = usize::from(input.u16()) % (frame.len() + 1);
                let first = session.on_bytes(&frame[..cut], now, &mut out);
                first.and_then(|()| session.on_bytes(&frame[cut..], now, &mut out))
            }
        };
        assert_eq!(session.received(), out.len() as u64, "each message is handed out once");
        assert!(session.unacknowledged() as u64 <= sent);
        assert_eq!(session.is_attached(), session.next_deadline().is_some());
        heard.extend(session.take_output());
        if let Err(error) = result {
            check_text(&error.to_string());
            let ours =
                matches!(error, SessionError::Full | SessionError::FullOfBytes | SessionError::Unusable(_));
            assert!(ours || !session.is_attached(), "after {error} the connection is closed");
            break;
        }
    }
    while let Some(plain) = evil.open(&mut heard).expect("the session's messages are authentic") {
        Frame::decode(&plain).expect("the session's messages are well formed");
    }
}

fn evil_plain(input: &mut Input<'_>, session: &Session, sent: u64) -> Vec<u8> {
    let choice = input.u8();
    let number = match choice & 3 {
        0 => input.u64(),
        1 => session.received(),
        _ => session.received() + 1,
    };
    let received = match choice >> 2 & 3 {
        0 => input.u64(),
        1 => u64::from(input.u8()),
        _ => sent,
    };
    let message = any_message(input);
    let mut plain = Frame { received, numbered: (choice & 0x40 == 0).then_some((number, &message)) }.encode();
    if choice & 0x80 != 0 {
        input.spoil(&mut plain);
    }
    plain
}
