//! Handshakes that succeed, and refusals that both ends understand.

use proptest::prelude::*;

use super::*;
use crate::limits::ADDRESSES_MAX;
use crate::protection::{Algorithm, Encryption, Protection, ProtectionWish};
use crate::record::Records;

const SECRET: Option<&str> = Some("correct horse");

fn refused(code: RefusalCode, text: &str) -> HandshakeError {
    HandshakeError::Refused(Refusal::new(code, text))
}

#[test]
fn a_control_handshake_agrees_on_everything() {
    for secret in [SECRET, None] {
        let (_, initiator, responder) = session(secret);
        assert_eq!(initiator.session, 77);
        assert_eq!(responder.session, 77);
        assert_eq!(initiator.data_key, responder.data_key);
        assert_eq!(initiator.config, Config { channels: 8, ..config() });
        assert_eq!(responder.config, initiator.config);
        assert_eq!(initiator.peer_hello, hello(2));
        assert_eq!(responder.peer_hello, hello(1));
        assert_eq!((initiator.received, responder.received), (0, 0));
        assert!(!initiator.resumed && !responder.resumed);
    }
}

#[test]
fn messages_sealed_by_one_end_are_opened_by_the_other() {
    let (_, mut initiator, mut responder) = session(SECRET);
    let mut bytes = initiator.secure.seal(b"one").unwrap();
    bytes.extend(initiator.secure.seal(b"").unwrap());
    let last = bytes.pop().unwrap();
    assert_eq!(responder.secure.open(&mut bytes).unwrap().unwrap(), b"one");
    assert_eq!(responder.secure.open(&mut bytes), Ok(None));
    bytes.push(last);
    assert_eq!(responder.secure.open(&mut bytes).unwrap().unwrap(), b"");
    assert_eq!(responder.secure.open(&mut bytes), Ok(None));
    assert!(bytes.is_empty());
}

#[test]
fn two_sessions_have_different_keys() {
    let (_, first, _) = session(None);
    let (_, second, _) = session(None);
    assert_ne!(first.data_key, second.data_key);
    assert_eq!(format!("{:?}", first.data_key), "DataKey(..)");
}

#[test]
fn the_data_key_needs_both_ends_shares() {
    // The handshake's hash follows from the secret and the bytes on the wire; the shares do not.
    let shares = |initiator: u8, responder: u8| DataKey::derive(&[7; 32], &[initiator; 32], &[responder; 32]);
    assert_eq!(shares(1, 2), shares(1, 2));
    assert_ne!(shares(1, 2), shares(1, 3));
    assert_ne!(shares(1, 2), shares(3, 2));
    assert_ne!(shares(1, 2), shares(2, 1));
}

#[test]
fn a_session_is_resumed_with_its_key_and_counts() {
    let (desk, initiator, _) = session(SECRET);
    desk.desk().sessions.get_mut(&77).unwrap().received = 11;
    let resume = redial(SECRET, 77, 5, &initiator.data_key);
    let (again, answer) = join(resume, Responder::new(desk.clone()), &Wire::default()).established();
    assert!(again.resumed && answer.resumed);
    assert_eq!((again.session, answer.session), (77, 77));
    assert_eq!((again.received, answer.received), (11, 5));
    assert_eq!(again.data_key, initiator.data_key);
    assert_eq!(answer.data_key, initiator.data_key);
    assert_eq!(again.config, initiator.config);
    assert_eq!(desk.desk().decided, ["new gpu1", "resume 77 gpu1"]);
}

#[test]
fn a_data_connection_proves_its_session() {
    let (desk, initiator, _) = session(SECRET);
    let dialled = Initiator::data(77, initiator.data_key, 3, 9);
    let course = join(dialled, Responder::new(desk.clone()), &Wire::default());
    for end in [course.initiator, course.responder] {
        let Ok(Outcome::Data { session, channel, generation, .. }) = end else { panic!("{end:?}") };
        assert_eq!((session, channel, generation), (77, 3, 9));
    }
    assert_eq!(desk.desk().decided, ["new gpu1", "data 77 3 9"]);
}

/// Opens a session between ends with these wishes.
fn session_with(initiator: ProtectionWish, responder: ProtectionWish) -> Course {
    let desk = Shared::new(SECRET);
    desk.desk().wish = responder;
    let purpose = Purpose::New { config: Config { wish: initiator, ..config() } };
    let dialled = Initiator::control(SECRET.map(str::as_bytes), hello(1), purpose).unwrap();
    join(dialled, Responder::new(desk), &Wire::default())
}

#[test]
fn two_secrets_are_valid_at_once_while_they_are_exchanged() {
    let desk = Shared::new(SECRET);
    desk.desk().also_accepted = Some(b"the next secret".to_vec());
    for (secret, is_admitted) in
        [(SECRET, true), (Some("the next secret"), true), (Some("another"), false), (None, false)]
    {
        let course = join(dial(secret), Responder::new(desk.clone()), &Wire::default());
        assert_eq!(course.initiator.is_ok(), is_admitted, "{secret:?}");
        assert_eq!(course.responder.is_ok(), is_admitted, "{secret:?}");
    }
}

#[test]
fn both_ends_settle_the_same_protection() {
    let wish = |encryption, keyed_checksum| ProtectionWish { encryption, keyed_checksum, fast_aes: true };
    for (wishes, expected) in [
        ([(Encryption::Off, false), (Encryption::Off, false)], None),
        ([(Encryption::Preferred, false), (Encryption::Off, false)], None),
        ([(Encryption::Off, false), (Encryption::Preferred, true)], Some("aes-256-gmac")),
        ([(Encryption::Preferred, false), (Encryption::Preferred, false)], Some("aes-256-gcm")),
        ([(Encryption::Required, false), (Encryption::Preferred, true)], Some("aes-256-gcm")),
    ] {
        let [initiator, responder] = wishes.map(|(encryption, mac)| wish(encryption, mac));
        let (initiator, responder) = session_with(initiator, responder).established();
        for end in [initiator, responder] {
            assert_eq!(end.protection.map(|protection| protection.name()), expected, "{wishes:?}");
        }
    }
}

#[test]
fn an_end_that_requires_encryption_refuses_one_with_encryption_off() {
    let [off, required] = [Encryption::Off, Encryption::Required]
        .map(|encryption| ProtectionWish { encryption, ..ProtectionWish::default() });
    for (initiator, responder, who) in [(off, required, "listens"), (required, off, "connects")] {
        let course = session_with(initiator, responder);
        let Err(HandshakeError::Refused(refusal)) = course.initiator else {
            panic!("{:?}", course.initiator);
        };
        assert_eq!(refusal.code, RefusalCode::Config);
        assert!(
            refusal.text.contains(&format!("the end that {who} requires encryption")),
            "{}",
            refusal.text
        );
        assert!(matches!(course.responder, Err(HandshakeError::Declined(_))));
    }
}

#[test]
fn a_data_connections_secrets_are_its_own_and_the_same_at_both_ends() {
    let (desk, initiator, _) = session(SECRET);
    let mut seen = Vec::new();
    for (channel, generation) in [(0, 0), (0, 1), (1, 0), (1, 0)] {
        let dialled = Initiator::data(77, initiator.data_key.clone(), channel, generation);
        let course = join(dialled, Responder::new(desk.clone()), &Wire::default());
        let [here, there] = [course.initiator, course.responder].map(|end| match end {
            Ok(Outcome::Data { secrets, .. }) => secrets,
            other => panic!("{other:?}"),
        });
        let protection = Protection { encrypted: true, algorithm: Algorithm::Aes256Gcm };
        for (mine, theirs) in
            [(here.from_initiator, there.from_initiator), (here.from_responder, there.from_responder)]
        {
            let sealed = [mine, theirs].map(|secret| {
                let mut record = [0; 40];
                Records::new(protection, secret).seal_from(&[0; 20], &mut record).unwrap();
                record
            });
            assert_eq!(sealed[0], sealed[1]);
            assert!(!seen.contains(&sealed[0]), "a secret repeats");
            seen.push(sealed[0]);
        }
    }
}

#[test]
fn the_largest_hello_and_configuration_fit() {
    let desk = Shared::new(SECRET);
    let listen = ListenAddress { address: "[fd00::1]:7471".parse().unwrap(), nic: "n".repeat(15) };
    let full = Hello { label: "x".repeat(64), addresses: vec![listen; ADDRESSES_MAX], ..hello(1) };
    desk.desk().hello = full.clone();
    let config = Config { extra: vec![7; 256], ..config() };
    let purpose = Purpose::New { config };
    let dialled = Initiator::control(SECRET.map(str::as_bytes), full, purpose).unwrap();
    join(dialled, Responder::new(desk), &Wire::default()).established();
}

#[test]
fn nothing_after_the_handshake_is_read() {
    let desk = Shared::new(SECRET);
    let (mut initiator, mut responder) = (dial(SECRET), Responder::new(desk));
    let mut to_responder = initiator.take_output();
    let mut established = None;
    while established.is_none() {
        let rest = to_responder.split_off(responder.want().min(to_responder.len()));
        responder.feed(&to_responder).unwrap();
        to_responder = rest;
        let mut answer = responder.take_output();
        established = responder.finished();
        answer.extend(established.iter().flat_map(|_| b"the next layer".iter()));
        while initiator.want() > 0 && !answer.is_empty() {
            let rest = answer.split_off(initiator.want().min(answer.len()));
            initiator.feed(&answer).unwrap();
            answer = rest;
        }
        assert_eq!(established.is_some(), answer == b"the next layer");
        to_responder.extend(initiator.take_output());
    }
    assert!(initiator.finished().is_some());
    assert_eq!((initiator.want(), responder.want()), (0, 0));
    assert_eq!(initiator.feed(b"x"), Err(HandshakeError::Misuse));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_fragments_make_the_same_handshake(fragments in prop::collection::vec(1usize..90, 1..40)) {
        let wire = Wire { fragments, ..Wire::default() };
        let desk = Shared::new(SECRET);
        let (initiator, responder) = join(dial(SECRET), Responder::new(desk.clone()), &wire).established();
        prop_assert_eq!(&initiator.data_key, &responder.data_key);
        desk.remember(&responder);
        let data = Initiator::data(77, initiator.data_key, 1, 1);
        let course = join(data, Responder::new(desk), &wire);
        prop_assert!(course.initiator.is_ok() && course.responder.is_ok());
    }
}

#[test]
fn secrets_that_differ_are_distinguished() {
    let cases = [
        (Some("battery staple"), SECRET, Mismatch::Different, "the two ends have different ones"),
        (None, SECRET, Mismatch::TheyHaveNone, "only the end that refuses has one: give both the same"),
        (SECRET, None, Mismatch::WeHaveNone, "the end that refuses has none: give both the same"),
    ];
    for (theirs, ours, mismatch, reported) in cases {
        let desk = Shared::new(ours);
        let errors = join(dial(theirs), Responder::new(desk.clone()), &Wire::default()).errors();
        assert_eq!(errors, (refused(RefusalCode::Secret, reported), HandshakeError::WrongSecret(mismatch)));
        assert!(desk.desk().decided.is_empty());
    }
}

#[test]
fn an_end_that_needs_a_secret_and_has_none_accepts_no_peer() {
    let desk = Shared::new(None);
    desk.desk().secret_needed = true;
    let (initiator, responder) = join(dial(None), Responder::new(desk), &Wire::default()).errors();
    assert_eq!(responder, HandshakeError::WrongSecret(Mismatch::NeededHere));
    assert!(matches!(initiator, HandshakeError::Refused(Refusal { code: RefusalCode::Secret, .. })));
}

#[test]
fn an_admission_that_refuses_is_heard() {
    let refusal = Refusal::new(RefusalCode::Busy, "256 handshakes are pending");
    let expected = (HandshakeError::Refused(refusal.clone()), HandshakeError::Declined(refusal.clone()));
    let (desk, initiator, _) = session(SECRET);
    desk.desk().refuse = Some(refusal);
    let dials = [
        dial(SECRET),
        redial(SECRET, 77, 0, &initiator.data_key),
        Initiator::data(77, initiator.data_key, 0, 0),
    ];
    for dialled in dials {
        assert_eq!(join(dialled, Responder::new(desk.clone()), &Wire::default()).errors(), expected);
    }
}

#[test]
fn a_session_that_is_not_known_is_refused() {
    let key = DataKey::from_bytes([1; 32]);
    let expected = refused(RefusalCode::UnknownSession, "there is no session 0x4d");
    for dialled in [redial(SECRET, 77, 0, &key), Initiator::data(77, key.clone(), 0, 0)] {
        let (initiator, _) = join(dialled, Responder::new(Shared::new(SECRET)), &Wire::default()).errors();
        assert_eq!(initiator, expected);
    }
}

/// A host without the secret may listen at one of the peer's addresses. Its refusal is in clear.
#[test]
fn only_an_end_that_has_proven_the_secret_can_say_that_a_session_is_not_known() {
    let key = DataKey::from_bytes([1; 32]);
    let unknown = Refusal::new(RefusalCode::UnknownSession, "never heard of it").encode();
    for mut dialled in [dial(SECRET), redial(SECRET, 77, 0, &key)] {
        let mut rest = &unknown[..];
        let error = loop {
            let (now, later) = rest.split_at(dialled.want().min(rest.len()));
            assert!(!now.is_empty(), "the refusal is not heard");
            rest = later;
            if let Err(error) = dialled.feed(now) {
                break error;
            }
        };
        assert_eq!(error.refused_with(), None, "{error}");
        assert!(matches!(error, HandshakeError::Malformed { .. }), "{error}");
    }
}

#[test]
fn a_configuration_outside_the_limits_is_refused_by_both_ends() {
    let outside = Config { channels: 257, ..config() };
    let result = Initiator::control(None, hello(1), Purpose::New { config: outside });
    let why = String::from("channels = 257, must be 1 to 256");
    assert_eq!(result.unwrap_err(), HandshakeError::Unusable { what: "configuration", why });
    for (outside, name) in [
        (Config { channels: 0, ..config() }, "channels"),
        (Config { chunk_bytes: (4 << 20) + 1, ..config() }, "chunk_bytes"),
        (Config { window: 0, ..config() }, "window"),
        (Config { extra: vec![0; 257], ..config() }, "extra bytes"),
    ] {
        assert!(outside.fault().unwrap().starts_with(name));
    }
}

#[test]
fn a_hello_outside_the_limits_is_refused_before_it_is_sent() {
    let listen = ListenAddress { address: "10.0.0.1:1".parse().unwrap(), nic: String::from("eth0") };
    let cases = [
        (Hello { label: "x".repeat(65), ..hello(1) }, "label"),
        (Hello { label: String::from("a\u{1b}[2J"), ..hello(1) }, "label"),
        (Hello { addresses: vec![listen.clone(); ADDRESSES_MAX + 1], ..hello(1) }, "addresses"),
        (Hello { addresses: vec![ListenAddress { nic: "n".repeat(16), ..listen }], ..hello(1) }, "NIC name"),
    ];
    for (hello, expected) in cases {
        let result = Initiator::control(None, hello, Purpose::New { config: config() });
        let Err(HandshakeError::Unusable { what, .. }) = result else { panic!("{result:?}") };
        assert_eq!(what, expected);
    }
}

#[test]
fn a_responder_can_be_made_to_refuse() {
    let busy = Refusal::new(RefusalCode::Busy, "later");
    let preamble = Preamble::encode(Kind::Control);
    for heard in 0..=preamble.len() {
        let mut responder = Responder::new(Shared::new(SECRET));
        responder.feed(&preamble[..heard]).unwrap();
        assert_eq!(responder.refuse(busy.clone()), HandshakeError::Declined(busy.clone()));
        let mut initiator = dial(SECRET);
        let mut answer = responder.take_output();
        let mut result = Ok(());
        while result.is_ok() {
            assert!(!answer.is_empty(), "nothing is said to one that said {heard} bytes");
            let rest = answer.split_off(initiator.want());
            result = initiator.feed(&answer);
            answer = rest;
        }
        assert_eq!(result, Err(HandshakeError::Refused(busy.clone())));
        // No further bytes are sent on the connection, and none to other protocols.
        responder.refuse(busy.clone());
        let mut foreign = Responder::new(Shared::new(SECRET));
        foreign.feed(b"GET / HTTP/1.1").unwrap();
        foreign.refuse(busy.clone());
        assert_eq!((responder.take_output(), foreign.take_output()), (Vec::new(), Vec::new()));
    }
}
