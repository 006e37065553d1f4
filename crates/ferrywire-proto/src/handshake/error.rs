//! What can go wrong while a connection opens, and what each end tells the other about it.
//!
//! A [`HandshakeError`] says what this end saw. A [`Refusal`] is what it tells the other end, in clear,
//! because the other end may hold another secret or speak another version.
//! Invariant: text that a stranger wrote is kept only after [`clean`], never longer than a line.
//! Read next: `initiator.rs` and `responder.rs`, which raise these.

use std::fmt;

use super::PROTOCOL_VERSION;
use crate::identity::Identity;

/// Longest text of a refusal.
pub const REFUSAL_TEXT_BYTES_MAX: usize = 256;
/// Length field that announces a refusal instead of a message.
pub(super) const REFUSAL_MARK: u16 = 0xffff;

/// Why a connection did not open. `PartialEq`, so that tests compare it whole.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// The other end speaks something else.
    #[error("not ferrywire: it {verb} \"{start}\"{}", guess.map(|name| format!(" ({name}?)")).unwrap_or_default())]
    NotFerrywire {
        /// "opened with" or "answered with".
        verb: &'static str,
        /// Its first bytes, made printable.
        start: String,
        /// Which protocol they look like.
        guess: Option<&'static str>,
    },
    /// It speaks another version of the protocol.
    #[error("it speaks protocol version {theirs}, we speak {ours}: install the same ferrywire on both")]
    Version {
        /// The other end's version.
        theirs: u16,
        /// Our version.
        ours: u16,
    },
    /// It opened a kind of connection that does not exist.
    #[error("it opened a connection of unknown kind {0}")]
    UnknownKind(u8),
    /// It does not hold our secret.
    #[error("wrong secret: {0}")]
    WrongSecret(Mismatch),
    /// It does not hold our secret: its first answer is not authentic.
    #[error("it could not prove our secret: altered on its way, replayed, or from somebody without the key")]
    SecretUnproven,
    /// Something did not authenticate: altered, replayed, or made by somebody without the key.
    #[error("it could not prove {0}: altered on its way, replayed, or from somebody without the key")]
    Unproven(&'static str),
    /// Bytes that no ferrywire of this version sends.
    #[error("malformed handshake: {what}: {why}")]
    Malformed {
        /// Which message.
        what: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// A message has a length it cannot have.
    #[error("malformed handshake: {what} of {bytes} bytes, expected {min}..={max}")]
    Length {
        /// Which message.
        what: &'static str,
        /// The length it announced.
        bytes: usize,
        /// Shortest possible.
        min: usize,
        /// Longest possible.
        max: usize,
    },
    /// The answer to a proposal goes beyond it.
    #[error("its welcome is not what was asked for: {0}")]
    Overreach(String),
    /// It is not the end that was asked for.
    #[error("it is {0} now: it restarted since the metadata were made")]
    Another(Identity),
    /// The other end refused us.
    #[error("{}: it says \"{}\"", .0.code, .0.text)]
    Refused(Refusal),
    /// We refused the other end.
    #[error("{}: {}", .0.code, .0.text)]
    Declined(Refusal),
    /// The connection ended in the middle.
    #[error("the connection was closed while waiting for {0}")]
    Closed(&'static str),
    /// Nothing came in time.
    #[error("no answer in time while waiting for {0}: busy, stopped, or not ferrywire")]
    Late(&'static str),
    /// What this end wants to send cannot be sent.
    #[error("{what}: {why}")]
    Unusable {
        /// Which value.
        what: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// The operating system gave no random bytes.
    #[error("no random bytes from the operating system")]
    Random,
    /// The Noise library refused to work.
    #[error("the noise handshake could not be set up")]
    Noise,
    /// The state machine was fed more than it wanted, or after its end.
    #[error("fed more than was wanted")]
    Misuse,
}

/// How two secrets differ, as far as can be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// Both ends have one, not the same.
    Different,
    /// This end has a secret, the other does not.
    TheyHaveNone,
    /// The other end has a secret, this one does not.
    WeHaveNone,
    /// This end takes nobody without a secret, and was given none.
    NeededHere,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mismatch::Different => "it holds another one than this end",
            Mismatch::TheyHaveNone => "it has none, this end has one: give both the same",
            Mismatch::WeHaveNone => "it uses one, this end has none: give both the same",
            Mismatch::NeededHere => "this end takes nobody without one, and has none: give both the same",
        })
    }
}

impl Mismatch {
    /// The same, as told to the other end.
    fn told(self) -> &'static str {
        match self {
            Mismatch::Different => "the two ends hold different ones",
            Mismatch::TheyHaveNone => "you use none, this end has one: give both the same",
            Mismatch::WeHaveNone => "you use one, this end has none: give both the same",
            Mismatch::NeededHere => "this end takes nobody without one, and has none: give both the same",
        }
    }
}

/// Why one end does not want the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RefusalCode {
    /// Another protocol version.
    Version,
    /// Another secret.
    Secret,
    /// Not now; another try may succeed.
    Busy,
    /// The session does not exist here: this process restarted, or gave the peer up.
    UnknownSession,
    /// A limit is reached.
    Limit,
    /// The configuration is not acceptable.
    Config,
    /// The handshake was malformed or not authentic.
    Malformed,
    /// The ends move payload over different things, or over the same with different settings.
    PayloadMismatch,
    /// Both ends are on one host, within which the plugin cannot move GPU memory.
    SameHost,
    /// A code of a later version.
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

/// What one end tells the other before it hangs up. Readable whatever secret or version it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Why, for programs.
    pub code: RefusalCode,
    /// Why, for people: printable, at most 256 bytes.
    pub text: String,
}

impl Refusal {
    /// A refusal; the text is made printable and cut to its limit.
    pub fn new(code: RefusalCode, text: impl AsRef<str>) -> Refusal {
        let mut text = clean(text.as_ref());
        clip(&mut text, REFUSAL_TEXT_BYTES_MAX);
        Refusal { code, text }
    }

    /// On the wire: 0xffff, code u8, length u16 LE, text.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = REFUSAL_MARK.to_le_bytes().to_vec();
        bytes.push(self.code.to_byte());
        bytes.extend_from_slice(&(self.text.len() as u16).to_le_bytes());
        bytes.extend_from_slice(self.text.as_bytes());
        bytes
    }

    /// From the parts that follow the mark. The text is a stranger's.
    pub(super) fn decode(code: u8, text: &[u8]) -> Refusal {
        Refusal::new(RefusalCode::from_byte(code), String::from_utf8_lossy(text))
    }
}

impl HandshakeError {
    pub(super) fn malformed(what: &'static str, why: impl Into<String>) -> HandshakeError {
        HandshakeError::Malformed { what, why: why.into() }
    }

    /// A connection that does not open with our magic.
    pub(super) fn foreign(opening: &[u8]) -> HandshakeError {
        HandshakeError::NotFerrywire { verb: "opened with", start: shown(opening), guess: guess(opening) }
    }

    /// An answer that is no frame of ours.
    pub fn foreign_answer(answer: &[u8]) -> HandshakeError {
        HandshakeError::NotFerrywire { verb: "answered with", start: shown(answer), guess: guess(answer) }
    }

    /// What to tell the other end. Nothing to those that would not understand it.
    pub(super) fn refusal(&self) -> Option<Refusal> {
        let malformed = |text: String| Some(Refusal::new(RefusalCode::Malformed, text));
        match self {
            HandshakeError::Version { theirs, ours } => {
                let text = format!("you speak protocol version {theirs}, this end speaks {ours}");
                Some(Refusal::new(RefusalCode::Version, text))
            }
            HandshakeError::WrongSecret(mismatch) => Some(Refusal::new(RefusalCode::Secret, mismatch.told())),
            HandshakeError::Declined(refusal) => Some(refusal.clone()),
            HandshakeError::SecretUnproven => malformed("you could not prove our secret".into()),
            HandshakeError::Unproven(what) => malformed(format!("you could not prove {what}")),
            HandshakeError::UnknownKind(kind) => malformed(format!("connection of unknown kind {kind}")),
            HandshakeError::Malformed { what, why } => malformed(format!("{what}: {why}")),
            HandshakeError::Length { what, bytes, .. } => malformed(format!("{what} of {bytes} bytes")),
            HandshakeError::Overreach(what) => malformed(what.clone()),
            HandshakeError::Random | HandshakeError::Noise | HandshakeError::Unusable { .. } => {
                Some(Refusal::new(RefusalCode::Busy, "this end cannot answer now"))
            }
            HandshakeError::NotFerrywire { .. } | HandshakeError::Refused(_) => None,
            HandshakeError::Closed(_) | HandshakeError::Late(_) => None,
            HandshakeError::Another(_) | HandshakeError::Misuse => None,
        }
    }

    /// The other end's reason, if it refused us.
    pub fn refused_with(&self) -> Option<RefusalCode> {
        match self {
            HandshakeError::Refused(refusal) => Some(refusal.code),
            _ => None,
        }
    }
}

/// Whether a character may reach a terminal: no control, format, private or combining character.
pub(super) fn printable(character: char) -> bool {
    matches!(character, '"' | '\'' | '\\') || character.escape_debug().len() == 1
}

/// The same text with everything unprintable replaced: a stranger may have written it.
pub fn clean(text: &str) -> String {
    text.chars().map(|character| if printable(character) { character } else { '?' }).collect()
}

/// Cuts a text to at most `bytes_max` bytes, between characters.
pub fn clip(text: &mut String, bytes_max: usize) {
    text.truncate(text.floor_char_boundary(bytes_max));
}

/// Foreign bytes in print: ASCII as it is, the rest as dots.
fn shown(bytes: &[u8]) -> String {
    let byte = |byte: &u8| {
        if byte.is_ascii_graphic() || *byte == b' ' { char::from(*byte) } else { '.' }
    };
    let text: String = bytes.iter().map(byte).collect();
    String::from(text.trim_end_matches('.'))
}

/// The protocol that these first bytes look like.
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
