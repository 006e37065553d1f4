//! Handshakes that must fail: peers without the secret, other versions, alterations, cuts, garbage.

use proptest::prelude::*;

use super::*;
use crate::handshake::codec::{HELLO_BYTES_MAX, OPENING_BYTES_MAX, WELCOME_BYTES_MAX};
use crate::limits::HANDSHAKE_BYTES_MAX;

const SECRET: Option<&str> = Some("correct horse");

/// A complete handshake of each kind, and the end of each of its messages on the wire.
pub(super) struct Kinds {
    pub(super) desk: Shared,
    pub(super) data_key: DataKey,
}

impl Kinds {
    pub(super) fn new() -> Kinds {
        let (desk, initiator, _) = session(SECRET);
        Kinds { desk, data_key: initiator.data_key }
    }

    pub(super) fn dials(&self) -> [Initiator; 3] {
        [
            dial(SECRET),
            redial(SECRET, 77, 0, &self.data_key),
            Initiator::data(77, self.data_key.clone(), 4, 5),
        ]
    }

    pub(super) fn join(&self, kind: usize, wire: &Wire) -> Course {
        let dialled = self.dials().into_iter().nth(kind).unwrap();
        join(dialled, Responder::new(self.desk.clone()), wire)
    }
}

/// One frame of an undisturbed handshake.
struct Framed {
    what: &'static str,
    /// The receiver's error when the frame's body is altered.
    error: HandshakeError,
    /// Offset of the frame's length in its direction.
    start: usize,
    bytes: usize,
    range: std::ops::RangeInclusive<usize>,
}

fn frames(kind: usize, backwards: bool, sent: &[u8]) -> Vec<Framed> {
    let unproven = HandshakeError::Unproven;
    let different = HandshakeError::WrongSecret(Mismatch::Different);
    let hello = NOISE_BYTES..=NOISE_BYTES + HELLO_BYTES_MAX;
    let opening = TAG_BYTES..=TAG_BYTES + OPENING_BYTES_MAX;
    let welcome = TAG_BYTES..=TAG_BYTES + WELCOME_BYTES_MAX;
    let named = match (kind, backwards) {
        (2, false) => vec![
            ("the data opening", unproven("the session's key"), 14..=14),
            ("the proof", unproven("the session's key"), 32..=32),
        ],
        (2, true) => vec![
            ("the challenge", unproven("the session's key"), 16..=16),
            ("the acceptance", unproven("the session's key"), 32..=32),
        ],
        (_, false) => vec![
            ("the first message", different, 48..=48),
            ("the opening", unproven("this connection's key"), opening),
        ],
        (_, true) => {
            vec![
                ("the answer", HandshakeError::SecretUnproven, hello),
                ("the welcome", unproven("the welcome"), welcome),
            ]
        }
    };
    let mut at = if backwards { 0 } else { PREAMBLE_BYTES };
    let placed = named.into_iter().map(|(what, error, range)| {
        let bytes = usize::from(u16::from_le_bytes([sent[at], sent[at + 1]]));
        at += 2 + bytes;
        Framed { what, error, start: at - 2 - bytes, bytes, range }
    });
    let frames = placed.collect();
    assert_eq!(at, sent.len());
    frames
}

/// The receiving end's error when the byte at `at` is altered.
fn expected(frames: &[Framed], backwards: bool, sent: &[u8], at: usize, mask: u8) -> HandshakeError {
    if !backwards && at < PREAMBLE_BYTES {
        return preamble_error(sent, at, mask);
    }
    let Framed { what, error, start, bytes, range } = frames.iter().rfind(|frame| frame.start <= at).unwrap();
    let (what, start, bytes) = (*what, *start, *bytes);
    if at >= start + 2 {
        return error.clone();
    }
    let announced = bytes ^ (usize::from(mask) << (8 * (at - start)));
    let (min, max) = (*range.start(), *range.end());
    let first_answer = backwards && start == 0;
    let length = (announced as u16).to_le_bytes();
    if !range.contains(&announced) && first_answer && announced > max && printable_pair(length) {
        let mut foreign = sent[..16].to_vec();
        foreign[at] ^= mask;
        HandshakeError::foreign_answer(&foreign)
    } else if !range.contains(&announced) {
        HandshakeError::Length { what, bytes: announced, min, max }
    } else if announced > bytes {
        HandshakeError::Closed(what)
    } else {
        error.clone()
    }
}

fn printable_pair(length: [u8; 2]) -> bool {
    length.iter().all(|byte| (b' '..=b'~').contains(byte))
}

fn preamble_error(sent: &[u8], at: usize, mask: u8) -> HandshakeError {
    let mut preamble = sent[..PREAMBLE_BYTES].to_vec();
    preamble[at] ^= mask;
    match at {
        0..8 => HandshakeError::foreign(&preamble),
        8..10 => {
            let theirs = u16::from_le_bytes([preamble[8], preamble[9]]);
            HandshakeError::Version { theirs, ours: PROTOCOL_VERSION }
        }
        10 => HandshakeError::UnknownKind(preamble[10]),
        _ => HandshakeError::malformed("the preamble", "its reserved bytes are not zero"),
    }
}

/// The error of the end whose bytes were disturbed: the other's refusal, or a closed connection.
fn check_sender(end: End, other: &HandshakeError) {
    match end {
        Ok(_) => {}
        Err(HandshakeError::Closed(_)) => {}
        Err(error) => assert_eq!(Some(error), other.refusal().map(HandshakeError::Refused)),
    }
}

#[test]
fn every_altered_byte_gives_its_exact_error() {
    let kinds = Kinds::new();
    for (kind, backwards) in (0..3).flat_map(|kind| [(kind, false), (kind, true)]) {
        let whole = kinds.join(kind, &Wire::default());
        let sent = if backwards { whole.to_initiator } else { whole.to_responder };
        let frames = frames(kind, backwards, &sent);
        for (at, mask) in (0..sent.len()).flat_map(|at| [(at, 0x80), (at, 0x01)]) {
            let wire = Wire { alter: Some((at, mask)), backwards, ..Wire::default() };
            let course = kinds.join(kind, &wire);
            let sent = if backwards { &course.to_initiator } else { &course.to_responder };
            let mut error = expected(&frames, backwards, sent, at, mask);
            // An altered session id names no session. Any other alteration of clear text invalidates the
            // proof, which the responder checks first.
            let in_data = kind == 2 && (18..26).contains(&at) && !backwards;
            if in_data {
                let session = 77 ^ (u64::from(mask) << (8 * (at - 18)));
                let text = format!("there is no session {session:#x}");
                error = HandshakeError::Declined(Refusal::new(RefusalCode::UnknownSession, text));
            }
            let challenged = kind == 2 && backwards && (2..18).contains(&at);
            let (receiver, sender) = if backwards != challenged {
                (course.initiator, course.responder)
            } else {
                (course.responder, course.initiator)
            };
            assert_eq!(
                receiver.unwrap_err(),
                error,
                "kind {kind} backwards {backwards} at {at} mask {mask:#x}"
            );
            check_sender(sender, &error);
        }
    }
}

#[test]
fn a_connection_cut_anywhere_says_what_was_due() {
    let kinds = Kinds::new();
    for (kind, backwards) in (0..3).flat_map(|kind| [(kind, false), (kind, true)]) {
        let whole = kinds.join(kind, &Wire::default());
        let sent = if backwards { whole.to_initiator } else { whole.to_responder };
        let frames = frames(kind, backwards, &sent);
        for cut in 0..sent.len() {
            let course = kinds.join(kind, &Wire { cut: Some(cut), backwards, ..Wire::default() });
            let receiver = if backwards { course.initiator } else { course.responder };
            let due =
                frames.iter().rfind(|frame| frame.start <= cut).map_or("the preamble", |frame| frame.what);
            assert_eq!(receiver.unwrap_err(), HandshakeError::Closed(due), "kind {kind} cut at {cut}");
        }
    }
}

#[test]
fn other_protocols_are_recognised() {
    let openings: [(&[u8], &str, Option<&str>); 4] = [
        (b"GET / HTTP/1.1\r\nHost: x", "GET / HTTP/1.1", Some("HTTP")),
        (b"SSH-2.0-OpenSSH_9.6", "SSH-2.0-OpenSSH_", Some("SSH")),
        (&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3, 65, 66, 0, 0, 0], "...........AB", Some("TLS")),
        (&[0; 16], "", None),
    ];
    for (opening, start, guess) in openings {
        let mut responder = Responder::new(Shared::new(SECRET));
        let error = responder.feed(&opening[..16]).unwrap_err();
        let (verb, start) = ("opened with", String::from(start));
        assert_eq!(error, HandshakeError::NotFerrywire { verb, start, guess });
        assert!(responder.take_output().is_empty(), "strangers are told nothing");
    }
}

#[test]
fn an_answer_in_another_protocol_is_recognised() {
    let mut initiator = dial(SECRET);
    initiator.feed(b"HT").unwrap();
    assert_eq!(initiator.want(), 14);
    initiator.feed(b"TP/1.1 ").unwrap();
    let closed = HandshakeError::NotFerrywire {
        verb: "answered with",
        start: String::from("HTTP/1.1 "),
        guess: Some("HTTP"),
    };
    assert_eq!(initiator.closed(), closed);
    assert_eq!(initiator.late(), closed);
    assert_eq!(initiator.feed(b"400 Bad"), Err(HandshakeError::foreign_answer(b"HTTP/1.1 400 Bad")));
    assert_eq!(initiator.want(), 0);
}

#[test]
fn lengths_that_cannot_be_are_refused_before_anything_is_held() {
    let (min, max) = (NOISE_BYTES, NOISE_BYTES + HELLO_BYTES_MAX);
    for bytes in [0, 47, max + 1, 0xfffe] {
        let error = dial(SECRET).feed(&(bytes as u16).to_le_bytes());
        assert_eq!(error, Err(HandshakeError::Length { what: "the answer", bytes, min, max }));
    }
    let mut responder = Responder::new(Shared::new(SECRET));
    responder.feed(&Preamble::encode(Kind::Data)).unwrap();
    let error = responder.feed(&15u16.to_le_bytes());
    assert_eq!(error, Err(HandshakeError::Length { what: "the data opening", bytes: 15, min: 14, max: 14 }));
    let mut initiator = dial(SECRET);
    initiator.feed(&[0xff, 0xff]).unwrap();
    let error = initiator.feed(&[1, 1, 1]);
    assert_eq!(error, Err(HandshakeError::Length { what: "a refusal", bytes: 257, min: 0, max: 256 }));
}

#[test]
fn a_welcome_may_decline_further_bytes_and_say_why() {
    for extra in [Vec::new(), b"without=no queues".to_vec()] {
        let desk = Shared::new(SECRET);
        let settled = Config { extra, ..config() };
        desk.desk().settle = Some(settled.clone());
        let taken = join(dial(SECRET), Responder::new(desk), &Wire::default()).initiator;
        assert!(matches!(taken, Ok(Outcome::Control(established)) if established.config == settled));
    }
}

#[test]
fn a_welcome_beyond_what_was_proposed_is_not_taken() {
    let beyond = [
        (Config { channels: 17, ..config() }, "channels = 17, where 16 was proposed"),
        (Config { channels: 256, ..config() }, "channels = 256, where 16 was proposed"),
        (Config { chunk_bytes: 2 << 20, ..config() }, "chunk_bytes = 2097152, where 1048576 was proposed"),
        (Config { window: 65, ..config() }, "window = 65, where 64 was proposed"),
        (Config { crc: false, ..config() }, "crc = false, where true was proposed"),
        (Config { extra: vec![1, 2], ..config() }, "extra bytes not proposed"),
    ];
    let settled = |proposed: Config, settled: &Config| {
        let desk = Shared::new(SECRET);
        desk.desk().settle = Some(settled.clone());
        let purpose = Purpose::New { config: proposed };
        let initiator = Initiator::control(SECRET.map(str::as_bytes), hello(1), purpose).unwrap();
        join(initiator, Responder::new(desk), &Wire::default()).initiator
    };
    for (beyond, what) in beyond {
        let error = settled(config(), &beyond).unwrap_err();
        assert_eq!(error, HandshakeError::Overreach(String::from(what)));
    }
    let less = Config { channels: 1, chunk_bytes: 1, window: 1, ..config() };
    let without_crc = Config { crc: false, ..config() };
    for (proposed, accepted) in [(config(), less), (without_crc, config())] {
        let taken = settled(proposed, &accepted);
        assert!(matches!(taken, Ok(Outcome::Control(established)) if established.config == accepted));
    }
}

#[test]
fn more_than_is_wanted_is_not_taken() {
    assert_eq!(dial(SECRET).feed(&[0; 3]), Err(HandshakeError::Misuse));
    let mut responder = Responder::new(Shared::new(SECRET));
    assert_eq!(responder.feed(&[0; 17]), Err(HandshakeError::Misuse));
}

#[test]
fn an_initiator_may_refuse_too() {
    let mut responder = Responder::new(Shared::new(SECRET));
    responder.feed(&Preamble::encode(Kind::Control)).unwrap();
    let refusal = Refusal::new(RefusalCode::Other(99), "");
    responder.feed(&[0xff, 0xff]).unwrap();
    assert_eq!(responder.feed(&[99, 0, 0]), Err(HandshakeError::Refused(refusal)));
    assert!(responder.take_output().is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn garbage_opens_nothing(
        start in 0usize..4, garbage in prop::collection::vec(any::<u8>(), 0..5000), step in 1usize..300,
    ) {
        let key = DataKey::from_bytes([1; 32]);
        let opening = [
            Vec::new(), dial(SECRET).take_output(), Initiator::data(77, key, 0, 0).take_output(),
            Preamble::encode(Kind::Control).to_vec(),
        ];
        let (desk, _, _) = session(SECRET);
        let bytes = [&opening[start][..], &garbage].concat();
        let mut responder = Responder::new(desk.clone());
        let (mut rest, mut taken) = (&bytes[..], 0);
        while responder.want() > 0 && !rest.is_empty() {
            let (now, later) = rest.split_at(responder.want().min(step).min(rest.len()));
            rest = later;
            taken += now.len();
            if responder.feed(now).is_err() {
                break;
            }
        }
        prop_assert!(responder.finished().is_none());
        prop_assert!(taken <= HANDSHAKE_BYTES_MAX);
        prop_assert_eq!(&desk.desk().decided, &["new gpu1"]);
    }

    #[test]
    fn garbage_answers_nothing(data: bool, garbage in prop::collection::vec(any::<u8>(), 0..5000)) {
        let key = DataKey::from_bytes([1; 32]);
        let mut initiator = if data { Initiator::data(77, key, 0, 0) } else { dial(SECRET) };
        let mut rest = &garbage[..];
        while initiator.want() > 0 && !rest.is_empty() {
            let (now, later) = rest.split_at(initiator.want().min(rest.len()));
            rest = later;
            if initiator.feed(now).is_err() {
                break;
            }
        }
        prop_assert!(initiator.finished().is_none());
    }
}
