//! Encoding of the handshake's messages: a decoded message equals the encoded one, and all other bytes are
//! rejected.

use std::net::{IpAddr, SocketAddr};

use proptest::prelude::*;

use crate::handshake::codec::{Opening, Request, Welcome};
use crate::handshake::error::REFUSAL_TEXT_BYTES_MAX;
use crate::handshake::*;
use crate::protection::ProtectionWish;

fn text(bytes_max: usize) -> impl Strategy<Value = String> {
    prop::collection::vec(prop_oneof![Just('é'), prop::char::range(' ', '~')], 0..=bytes_max / 2)
        .prop_map(|characters| characters.into_iter().collect())
}

fn address() -> impl Strategy<Value = SocketAddr> {
    let ip = prop_oneof![any::<[u8; 4]>().prop_map(IpAddr::from), any::<[u8; 16]>().prop_map(IpAddr::from)];
    (ip, any::<u16>()).prop_map(SocketAddr::from)
}

prop_compose! {
    fn hello()(
        identity: [u8; 16], boot_id: [u8; 16], label in text(64), peer_timeout_ms: u32,
        addresses in prop::collection::vec((address(), text(15)), 0..=64),
    ) -> Hello {
        let listen = |(address, nic)| ListenAddress { address, nic };
        let addresses = addresses.into_iter().map(listen).collect();
        Hello { identity, boot_id, label, addresses, peer_timeout_ms }
    }
}

fn wish() -> impl Strategy<Value = ProtectionWish> {
    (0..16u8).prop_filter_map("no wish", ProtectionWish::from_byte)
}

prop_compose! {
    fn config()(
        channels in 1u16..=256, chunk_bytes in 1u32..=4 << 20, window in 1u32.., crc: bool, wish in wish(),
        extra in prop::collection::vec(any::<u8>(), 0..=256),
    ) -> Config {
        Config { channels, chunk_bytes, window, crc, wish, extra }
    }
}

fn request() -> impl Strategy<Value = Request> {
    prop_oneof![
        (any::<[u8; 32]>(), config()).prop_map(|(share, config)| Request::New { share, config }),
        any::<(u64, u64, [u8; 32])>().prop_map(|(session, received, proof)| Request::Resume {
            session,
            received,
            proof
        }),
    ]
}

proptest! {
    #[test]
    fn an_opening_is_read_back(hello in hello(), request in request(), cut: prop::sample::Index) {
        let opening = Opening { hello, request };
        prop_assert!(opening.hello.check().is_ok());
        let mut bytes = opening.encode();
        prop_assert_eq!(Opening::decode(&bytes), Ok(opening));
        prop_assert!(Opening::decode(&bytes[..cut.index(bytes.len())]).is_err());
        bytes.push(0);
        let why = String::from("1 bytes too many");
        prop_assert_eq!(Opening::decode(&bytes), Err(HandshakeError::Malformed { what: "the opening", why }));
    }

    #[test]
    fn a_welcome_is_read_back(session: u64, received: u64, token: [u8; 32], config in config()) {
        let welcome = Welcome { session, received, token, config };
        let bytes = welcome.encode();
        prop_assert_eq!(Welcome::decode(&bytes), Ok(welcome));
        for cut in 0..bytes.len() {
            prop_assert!(Welcome::decode(&bytes[..cut]).is_err());
        }
    }

    #[test]
    fn whatever_is_read_is_written_the_same(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        if let Ok(opening) = Opening::decode(&bytes) {
            prop_assert_eq!(opening.encode(), bytes.clone());
        }
        if let Ok(welcome) = Welcome::decode(&bytes) {
            prop_assert_eq!(welcome.encode(), bytes);
        }
    }

    #[test]
    fn an_altered_opening_is_read_or_refused(
        hello in hello(), request in request(), at: prop::sample::Index, mask in 1u8..,
    ) {
        let mut bytes = Opening { hello, request }.encode();
        let at = at.index(bytes.len());
        bytes[at] ^= mask;
        if let Ok(opening) = Opening::decode(&bytes) {
            prop_assert_eq!(opening.encode(), bytes);
        }
    }

    #[test]
    fn a_refusal_is_printable_and_short(code: u8, text in prop::collection::vec(any::<u8>(), 0..2000)) {
        let refusal = Refusal::decode(code, &text);
        prop_assert!(refusal.text.len() <= REFUSAL_TEXT_BYTES_MAX);
        prop_assert_eq!(&clean(&refusal.text), &refusal.text);
        prop_assert!(!refusal.text.chars().any(char::is_control));
        let bytes = refusal.encode();
        prop_assert_eq!(bytes[2], code);
        prop_assert_eq!(Refusal::decode(bytes[2], &bytes[5..]), refusal);
    }
}

#[test]
fn a_strangers_text_cannot_steer_a_terminal() {
    let steering = "\u{1b}[31mred\r\n\u{202e}txet\u{2066}\u{200b}\u{feff}\u{7f}\u{9b}0m\u{301}";
    assert_eq!(clean(steering), "?[31mred???txet?????0m?");
    let plain = "naïve \"quotes\" 'and' back\\slash, 日本語";
    assert_eq!(clean(plain), plain);
}

#[test]
fn counts_and_flags_outside_their_range_are_refused() {
    let opening =
        Opening { hello: super::hello(1), request: Request::New { share: [0; 32], config: super::config() } };
    let bytes = opening.encode();
    let label_bytes = 1 + opening.hello.label.len();
    let end = bytes.len();
    let cases = [
        (32, 65, "65 text bytes, must be 0 to 64"),
        (32 + label_bytes + 4, 65, "65 addresses, must be 0 to 64"),
        (32 + label_bytes + 5, 5, "address family 5, expected 4 or 6"),
        (33, 0x1b, "a text that is not printable"),
        (33, 0xff, "a text that is not printable"),
        (end - 7, 2, "a flag of value 2"),
        (end - 6, 3, "a protection of value 3"),
        (end - 4, 2, "515 extra bytes, must be 0 to 256"),
    ];
    for (at, value, why) in cases {
        let mut altered = bytes.clone();
        altered[at] = value;
        let why = String::from(why);
        assert_eq!(Opening::decode(&altered), Err(HandshakeError::Malformed { what: "the opening", why }));
    }
}

/// Hosts without a readable boot id are not taken for one host.
#[test]
fn ends_share_a_host_only_where_both_know_theirs() {
    let boot = |boot_id: u8| Hello { boot_id: [boot_id; 16], ..crate::handshake::testing::hello(1) };
    assert_eq!(boot(1).shares_host(&boot(1)), Some(true));
    assert_eq!(boot(1).shares_host(&boot(2)), Some(false));
    for (one, two) in [(0, 0), (0, 1), (1, 0)] {
        assert_eq!(boot(one).shares_host(&boot(two)), None);
    }
}
