//! Errors of a handshake, and the refusals that one end sends to the other.
//!
//! A [`HandshakeError`] is what this end observed. A [`Refusal`] is what it sends to the other end,
//! unencrypted, since the other end may hold another secret or use another version.
//! Invariant: text from an unauthenticated peer is kept only after [`clean`], and never longer than a line.
//! Read next: `initiator.rs` and `responder.rs`, which return these.

use std::fmt;

use super::PROTOCOL_VERSION;
use crate::identity::Identity;

/// Longest text of a refusal, in bytes.
pub const REFUSAL_TEXT_BYTES_MAX: usize = 256;
/// Length field that announces a refusal instead of a message.
pub(super) const REFUSAL_MARK: u16 = 0xffff;

/// Why a handshake failed. Implements `PartialEq`, so tests compare whole errors.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// The other end uses another protocol.
    #[error("not ferrywire: it {verb} \"{start}\"{}", guess.map(|name| format!(" ({name}?)")).unwrap_or_default())]
    NotFerrywire {
        /// What the other end did with its first bytes: "opened with" or "answered with".
        verb: &'static str,
        /// First bytes of the other end, made printable.
        start: String,
        /// The protocol that the first bytes of the other end look like.
        guess: Option<&'static str>,
    },
    /// The other end uses another version of the protocol.
    #[error(
        "the other end speaks protocol version {theirs}, this end {ours}: install one version of ferrywire on both"
    )]
    Version {
        /// The protocol version of the other end.
        theirs: u16,
        /// The protocol version of this end.
        ours: u16,
    },
    /// The other end opened an unknown kind of connection.
    #[error("the other end opened a connection of unknown kind {0}")]
    UnknownKind(u8),
    /// The other end does not hold this end's secret.
    #[error("wrong secret: {0}")]
    WrongSecret(Mismatch),
    /// The other end does not hold this end's secret: its first answer does not authenticate.
    #[error(
        "the other end could not prove the secret: the message was altered, replayed, or made without the key"
    )]
    SecretUnproven,
    /// A handshake message did not authenticate: it was altered, replayed, or made without the key.
    #[error("the other end could not prove {0}: the message was altered, replayed, or made without the key")]
    Unproven(&'static str),
    /// The other end sent a message that no ferrywire of this version sends.
    #[error("malformed handshake: {what}: {why}")]
    Malformed {
        /// Name of the malformed message.
        what: &'static str,
        /// Why the message is malformed.
        why: String,
    },
    /// A handshake message has an impossible length.
    #[error("malformed handshake: {what} of {bytes} bytes, expected {min}..={max}")]
    Length {
        /// Name of the message with the impossible length.
        what: &'static str,
        /// Announced length of the message in bytes.
        bytes: usize,
        /// Shortest possible length of the message in bytes.
        min: usize,
        /// Longest possible length of the message in bytes.
        max: usize,
    },
    /// The responder's settled configuration exceeds the proposal.
    #[error("the other end answered with other parameters than were proposed: {0}")]
    Overreach(String),
    /// The other end is not the endpoint that was dialled.
    #[error(
        "the endpoint at this address is {0}, not the wanted one: it restarted since the metadata were made"
    )]
    Another(Identity),
    /// The other end refused this end.
    #[error("{}: the other end says \"{}\"", .0.code, .0.text)]
    Refused(Refusal),
    /// This end refused the other end.
    #[error("{}: {}", .0.code, .0.text)]
    Declined(Refusal),
    /// The connection closed in the middle of the handshake; the text names the awaited message.
    #[error("the connection was closed while waiting for {0}")]
    Closed(&'static str),
    /// The handshake timed out; the text names the awaited message.
    #[error("no answer in time while waiting for {0}: the other end is busy, stopped, or not ferrywire")]
    Late(&'static str),
    /// A value of this end does not fit the handshake.
    #[error("{what}: {why}")]
    Unusable {
        /// Name of the value that does not fit the handshake.
        what: &'static str,
        /// Why the value does not fit the handshake.
        why: String,
    },
    /// The operating system provided no random bytes.
    #[error("no random bytes from the operating system")]
    Random,
    /// The Noise library returned an error.
    #[error("the noise handshake could not be set up")]
    Noise,
    /// The caller fed more bytes than wanted, or went on after the end.
    #[error("the handshake was given more bytes than it asked for")]
    Misuse,
}

/// How the two ends' secrets differ, as far as this end can see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// Both ends have a secret, and the secrets differ.
    Different,
    /// This end has a secret, the other end has none.
    TheyHaveNone,
    /// The other end has a secret, this end has none.
    WeHaveNone,
    /// This end requires a secret, and has none configured.
    NeededHere,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mismatch::Different => "the other end has another one",
            Mismatch::TheyHaveNone => "the other end has none, this end has one: give both the same",
            Mismatch::WeHaveNone => "the other end has one, this end has none: give both the same",
            Mismatch::NeededHere => "this end requires one and has none: give both the same",
        })
    }
}

impl Mismatch {
    /// The text for the other end, which sees the difference from its own side.
    fn text_for_peer(self) -> &'static str {
        match self {
            Mismatch::Different => "the two ends have different ones",
            Mismatch::TheyHaveNone => "only the end that refuses has one: give both the same",
            Mismatch::WeHaveNone => "the end that refuses has none: give both the same",
            Mismatch::NeededHere => "the end that refuses requires one and has none: give both the same",
        }
    }
}

/// Why one end of a handshake refuses the other: a code for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RefusalCode {
    /// The two ends have different protocol versions.
    Version,
    /// The two ends have different secrets.
    Secret,
    /// The endpoint is busy; another attempt may succeed.
    Busy,
    /// The endpoint does not know the session: it restarted, or declared the peer lost.
    UnknownSession,
    /// A limit of the refusing end was reached.
    Limit,
    /// The refusing end does not accept the proposed configuration.
    Config,
    /// The handshake was malformed or did not authenticate.
    Malformed,
    /// The ends use different payload backends, or one backend with different settings.
    PayloadMismatch,
    /// Both ends are on one host, where the plugin cannot move GPU memory.
    SameHost,
    /// A code that this version of ferrywire does not know.
    Other(u8),
}

impl RefusalCode {
    const KNOWN: [(u8, RefusalCode); 9] = [
        (1, RefusalCode::Version),
        (2, RefusalCode::Secret),
        (3, RefusalCode::Busy),
        (4, RefusalCode::UnknownSession),
        (5, RefusalCode::Limit),
        (6, RefusalCode::Config),
        (7, RefusalCode::Malformed),
        (8, RefusalCode::PayloadMismatch),
        (9, RefusalCode::SameHost),
    ];

    fn to_byte(self) -> u8 {
        match self {
            RefusalCode::Other(byte) => byte,
            known => RefusalCode::KNOWN.iter().find(|(_, code)| *code == known).map_or(0, |(byte, _)| *byte),
        }
    }

    fn from_byte(byte: u8) -> RefusalCode {
        let known = RefusalCode::KNOWN.iter().find(|(known, _)| *known == byte);
        known.map_or(RefusalCode::Other(byte), |(_, code)| *code)
    }
}

impl fmt::Display for RefusalCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RefusalCode::Version => "wrong protocol version",
            RefusalCode::Secret => "wrong secret",
            RefusalCode::Busy => "busy",
            RefusalCode::UnknownSession => "unknown session",
            RefusalCode::Limit => "limit reached",
            RefusalCode::Config | RefusalCode::PayloadMismatch | RefusalCode::SameHost => {
                "configuration not accepted"
            }
            RefusalCode::Malformed => "malformed handshake",
            RefusalCode::Other(byte) => return write!(f, "refused (code {byte})"),
        })
    }
}

/// The message with which one end refuses the other before it closes the connection. Readable with any secret
/// and version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Reason of the refusal, for programs.
    pub code: RefusalCode,
    /// Reason of the refusal, for users: printable, at most 256 bytes.
    pub text: String,
}

impl Refusal {
    /// A refusal with this text, made printable and cut to its limit.
    pub fn new(code: RefusalCode, text: impl AsRef<str>) -> Refusal {
        let mut text = clean(text.as_ref());
        clip(&mut text, REFUSAL_TEXT_BYTES_MAX);
        Refusal { code, text }
    }

    /// Encodes the refusal: 0xffff, code u8, length u16 LE, text.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = REFUSAL_MARK.to_le_bytes().to_vec();
        bytes.push(self.code.to_byte());
        bytes.extend_from_slice(&(self.text.len() as u16).to_le_bytes());
        bytes.extend_from_slice(self.text.as_bytes());
        bytes
    }

    /// Decodes a refusal's code and text. The text comes from an unauthenticated peer.
    pub(super) fn decode(code: u8, text: &[u8]) -> Refusal {
        Refusal::new(RefusalCode::from_byte(code), String::from_utf8_lossy(text))
    }
}

impl HandshakeError {
    pub(super) fn malformed(what: &'static str, why: impl Into<String>) -> HandshakeError {
        HandshakeError::Malformed { what, why: why.into() }
    }

    /// The error for a connection that does not start with the magic.
    pub(super) fn foreign(opening: &[u8]) -> HandshakeError {
        HandshakeError::NotFerrywire { verb: "opened with", start: shown(opening), guess: guess(opening) }
    }

    /// The error for an answer that is no ferrywire frame.
    pub fn foreign_answer(answer: &[u8]) -> HandshakeError {
        HandshakeError::NotFerrywire { verb: "answered with", start: shown(answer), guess: guess(answer) }
    }

    /// The refusal to send to the other end; `None` when the other end would not understand it.
    pub(super) fn refusal(&self) -> Option<Refusal> {
        let malformed = |text: String| Some(Refusal::new(RefusalCode::Malformed, text));
        match self {
            HandshakeError::Version { theirs, ours } => {
                let text =
                    format!("the refused end speaks protocol version {theirs}, the end that refuses {ours}");
                Some(Refusal::new(RefusalCode::Version, text))
            }
            HandshakeError::WrongSecret(mismatch) => {
                Some(Refusal::new(RefusalCode::Secret, mismatch.text_for_peer()))
            }
            HandshakeError::Declined(refusal) => Some(refusal.clone()),
            HandshakeError::SecretUnproven => malformed("the refused end could not prove the secret".into()),
            HandshakeError::Unproven(what) => malformed(format!("the refused end could not prove {what}")),
            HandshakeError::UnknownKind(kind) => malformed(format!("connection of unknown kind {kind}")),
            HandshakeError::Malformed { what, why } => malformed(format!("{what}: {why}")),
            HandshakeError::Length { what, bytes, .. } => malformed(format!("{what} of {bytes} bytes")),
            HandshakeError::Overreach(what) => malformed(what.clone()),
            HandshakeError::Random | HandshakeError::Noise | HandshakeError::Unusable { .. } => {
                Some(Refusal::new(RefusalCode::Busy, "the end that refuses cannot answer now"))
            }
            HandshakeError::NotFerrywire { .. } | HandshakeError::Refused(_) => None,
            HandshakeError::Closed(_) | HandshakeError::Late(_) => None,
            HandshakeError::Another(_) | HandshakeError::Misuse => None,
        }
    }

    /// The code with which the other end refused this end; `None` for every other error.
    pub fn refused_with(&self) -> Option<RefusalCode> {
        match self {
            HandshakeError::Refused(refusal) => Some(refusal.code),
            _ => None,
        }
    }
}

/// Whether a character is safe for a terminal: no control, format, private-use or combining character.
pub(super) fn printable(character: char) -> bool {
    matches!(character, '"' | '\'' | '\\') || character.escape_debug().len() == 1
}

/// Replaces every unprintable character of an untrusted text.
pub fn clean(text: &str) -> String {
    text.chars().map(|character| if printable(character) { character } else { '?' }).collect()
}

/// Cuts a text to at most `bytes_max` bytes, at a character boundary.
pub fn clip(text: &mut String, bytes_max: usize) {
    text.truncate(text.floor_char_boundary(bytes_max));
}

/// Untrusted bytes as text: printable ASCII unchanged, all else as dots.
fn shown(bytes: &[u8]) -> String {
    let byte = |byte: &u8| {
        if byte.is_ascii_graphic() || *byte == b' ' { char::from(*byte) } else { '.' }
    };
    let text: String = bytes.iter().map(byte).collect();
    String::from(text.trim_end_matches('.'))
}

/// The protocol that the first bytes look like.
fn guess(start: &[u8]) -> Option<&'static str> {
    const KNOWN: [(&[u8], &str); 14] = [
        (b"HTTP/", "HTTP"),
        (b"GET ", "HTTP"),
        (b"POST ", "HTTP"),
        (b"PUT ", "HTTP"),
        (b"HEAD ", "HTTP"),
        (b"OPTIONS ", "HTTP"),
        (b"CONNECT ", "HTTP"),
        (b"PRI * HTTP/2", "HTTP/2"),
        (b"SSH-", "SSH"),
        (b"220 ", "FTP or SMTP"),
        (b"-ERR ", "Redis"),
        (&[0x16, 0x03], "TLS"),
        (&[0x15, 0x03], "TLS"),
        (b"FERRYWR", "another ferrywire"),
    ];
    KNOWN.iter().find(|(prefix, _)| start.starts_with(prefix)).map(|(_, name)| *name)
}

const _: () = assert!(REFUSAL_TEXT_BYTES_MAX < REFUSAL_MARK as usize);
const _: () = assert!(PROTOCOL_VERSION > 0);
