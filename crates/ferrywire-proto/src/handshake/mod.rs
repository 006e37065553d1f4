//! Handshakes: how a connection authenticates before it carries anything else.
//!
//! Every connection opens with a 16-byte `Preamble`. A *control* connection then runs a Noise handshake keyed
//! by the shared secret, exchanges [`Hello`]s, and opens or resumes a session. A *data* connection proves by
//! a challenge that it belongs to an existing session. [`Initiator`] dials, [`Responder`] answers. Both are
//! state machines over bytes, without sockets and without a clock, so tests and the fuzzer reach every
//! branch.
//!
//! ```text
//! control   I -> R   preamble, [noise 1]                  both ends: who knows the secret?
//!           R -> I   [noise 2: Hello]
//!           I -> R   [sealed: Hello, New | Resume]
//!           R -> I   [sealed: Welcome]                    then the control session, see `session`
//! data      I -> R   preamble, [session, channel, generation]
//!           R -> I   [challenge]
//!           I -> R   [proof]
//!           R -> I   [proof]                              then data frames, see `wire`
//! [..] is a u16 LE length and that many bytes; length 0xffff is a refusal and ends the connection.
//! ```
//!
//! Each session has a key of its own, [`DataKey`]. The handshake's hash alone would not be secret: anyone who
//! knows the secret can compute it from the bytes on the wire. So each end adds 32 random bytes under the
//! handshake's encryption, and the key is as secret as the control session itself.
//!
//! Invariants: no byte behind the handshake is read ([`Initiator::want`]); the [`Admission`] decides only
//! about an end that has proven itself; an unauthenticated peer makes this end hold at most
//! `HANDSHAKE_BYTES_MAX`.
//! Read next: `responder.rs`, then `session/mod.rs` for the traffic of a control connection.

mod codec;
mod error;
mod initiator;
mod intake;
mod responder;
mod secure;

#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod testing;
#[cfg(test)]
pub(crate) mod tests;

pub use codec::{Config, EXTRA_BYTES_MAX, Hello, ListenAddress, Reader, WITHOUT, check_label, put_address};
pub use error::{HandshakeError, Mismatch, Refusal, RefusalCode, clean, clip};
pub use initiator::{Initiator, Purpose};
pub use responder::{Admission, KnownSession, Responder};
pub use secure::{Secure, SecureError};

use snow::HandshakeState;
use snow::resolvers::{CryptoResolver, DefaultResolver};
use zeroize::{Zeroize, Zeroizing};

use crate::protection::Protection;
use crate::record::{RecordSecret, RecordSecrets};

/// The version of all formats: preamble, handshake, control messages and data frames.
pub const PROTOCOL_VERSION: u16 = 4;

/// First bytes of every connection.
const MAGIC: [u8; 8] = *b"FERRYWR\0";
/// Bytes of a [`Preamble`].
const PREAMBLE_BYTES: usize = 16;
/// Bytes of the first Noise message (ephemeral key and tag), and the overhead of the second.
const NOISE_BYTES: usize = 48;
/// Bytes of a sealed message's tag.
const TAG_BYTES: usize = 16;
/// Bytes of the random challenge for a data connection.
const CHALLENGE_BYTES: usize = 16;
/// Bytes of a keyed hash, and of each end's share of a session's key.
const PROOF_BYTES: usize = 32;

const NOISE: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
const SECRET_CONTEXT: &str = "ferrywire control secret v1";
const NO_SECRET_CONTEXT: &str = "ferrywire control without a secret v1";
const RECORDS_CONTEXT: &str = "ferrywire records of a data connection v1";
const DATA_KEY_CONTEXT: &str = "ferrywire data key of a session v1";

/// The result of a successful handshake.
#[derive(Debug)]
pub enum Outcome {
    /// A control connection: session traffic follows the handshake.
    Control(Box<Established>),
    /// A data connection: data frames follow the handshake.
    Data {
        /// The session that the connection belongs to.
        session: u64,
        /// The channel that the connection carries.
        channel: u16,
        /// Number of earlier dials of this channel.
        generation: u32,
        /// Secrets of this connection's records, for a session with [`Protection`].
        secrets: RecordSecrets,
    },
}

/// A control connection whose ends have both proven that they hold the secret.
#[derive(Debug)]
pub struct Established {
    /// Encryption of the session traffic that follows the handshake.
    pub secure: Secure,
    /// The peer's hello.
    pub peer_hello: Hello,
    /// Id of the session that was opened or resumed.
    pub session: u64,
    /// Number of this end's numbered messages that the peer has received; 0 for a new session.
    pub received: u64,
    /// The session's key, constant over its lifetime.
    pub data_key: DataKey,
    /// The session's configuration, as the responder accepted it.
    pub config: Config,
    /// How a new session's data connections are protected; `None` for one in clear, and for a resumed session.
    pub protection: Option<Protection>,
    /// Whether the handshake resumed an existing session.
    pub resumed: bool,
}

/// The key with which data connections and resumptions prove that they belong to a session.
///
/// Compared in constant time; `Debug` never prints it.
#[derive(Clone, PartialEq, Eq)]
pub struct DataKey(blake3::Hash);

impl DataKey {
    /// Derives the key from the hash of the handshake that opened the session and both ends' random shares.
    fn derive(handshake: &[u8; 32], initiator_share: &[u8; 32], responder_share: &[u8; 32]) -> DataKey {
        let material = Zeroizing::new([&handshake[..], initiator_share, responder_share].concat());
        DataKey(blake3::Hash::from_bytes(blake3::derive_key(DATA_KEY_CONTEXT, &material)))
    }

    /// A key with fixed bytes, for tests.
    #[cfg(test)]
    pub fn from_bytes(bytes: [u8; 32]) -> DataKey {
        DataKey(blake3::Hash::from_bytes(bytes))
    }

    /// A keyed hash of `values` that proves knowledge of the key for one purpose.
    fn prove(&self, purpose: &str, values: &[u8]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(self.0.as_bytes());
        hasher.update(purpose.as_bytes()).update(values);
        hasher.finalize()
    }

    fn prove_resume(&self, handshake: &[u8; 32]) -> blake3::Hash {
        self.prove("resume", handshake)
    }

    fn prove_resumed(&self, handshake: &[u8; 32]) -> blake3::Hash {
        self.prove("welcome back", handshake)
    }

    fn prove_data(&self, opening: &DataOpening, challenge: &[u8]) -> blake3::Hash {
        self.prove("ferrywire data", &[&opening.encode()[..], challenge].concat())
    }

    /// The secrets of one data connection's records. The challenge is new for each connection, so none repeats.
    fn record_secrets(&self, opening: &DataOpening, challenge: &[u8]) -> RecordSecrets {
        let secret = |direction: u8| {
            let material = [&self.0.as_bytes()[..], &opening.encode(), challenge, &[direction]].concat();
            RecordSecret::new(blake3::derive_key(RECORDS_CONTEXT, &Zeroizing::new(material)))
        };
        RecordSecrets { from_initiator: secret(0), from_responder: secret(1) }
    }

    fn prove_accept(&self, opening: &DataOpening, challenge: &[u8]) -> blake3::Hash {
        self.prove("ferrywire accept", &[&opening.encode()[..], challenge].concat())
    }
}

impl Drop for DataKey {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl std::fmt::Debug for DataKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DataKey(..)")
    }
}

/// Kind of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Control,
    Data,
}

/// The first 16 bytes of a connection: magic, version u16 LE, kind u8, five zero bytes.
struct Preamble;

impl Preamble {
    fn encode(kind: Kind) -> [u8; PREAMBLE_BYTES] {
        let mut bytes = [0; PREAMBLE_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
        bytes[10] = match kind {
            Kind::Control => 1,
            Kind::Data => 2,
        };
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<Kind, HandshakeError> {
        let mut reader = Reader::new(bytes, "the preamble");
        if reader.array::<8>()? != MAGIC {
            return Err(HandshakeError::foreign(bytes));
        }
        let theirs = reader.u16()?;
        if theirs != PROTOCOL_VERSION {
            return Err(HandshakeError::Version { theirs, ours: PROTOCOL_VERSION });
        }
        let kind = match reader.u8()? {
            1 => Kind::Control,
            2 => Kind::Data,
            other => return Err(HandshakeError::UnknownKind(other)),
        };
        if reader.array::<5>()? != [0; 5] {
            return Err(HandshakeError::malformed("the preamble", "its reserved bytes are not zero"));
        }
        reader.end()?;
        Ok(kind)
    }
}

/// The session and channel that a data connection claims to belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DataOpening {
    session: u64,
    channel: u16,
    generation: u32,
}

impl DataOpening {
    const BYTES: usize = 14;

    fn encode(&self) -> [u8; DataOpening::BYTES] {
        let mut bytes = [0; DataOpening::BYTES];
        bytes[..8].copy_from_slice(&self.session.to_le_bytes());
        bytes[8..10].copy_from_slice(&self.channel.to_le_bytes());
        bytes[10..].copy_from_slice(&self.generation.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<DataOpening, HandshakeError> {
        let mut reader = Reader::new(bytes, "the data opening");
        let opening =
            DataOpening { session: reader.u64()?, channel: reader.u16()?, generation: reader.u32()? };
        reader.end()?;
        Ok(opening)
    }
}

/// Random bytes from the operating system.
fn random_bytes<const N: usize>() -> Result<[u8; N], HandshakeError> {
    let mut bytes = [0; N];
    let mut source = DefaultResolver.resolve_rng().ok_or(HandshakeError::Random)?;
    source.try_fill_bytes(&mut bytes).map_err(|_| HandshakeError::Random)?;
    Ok(bytes)
}

/// The pre-shared key of a control handshake. Without a secret the key is a constant that everyone knows.
fn pre_shared_key(secret: Option<&[u8]>) -> [u8; 32] {
    match secret {
        Some(secret) => blake3::derive_key(SECRET_CONTEXT, secret),
        None => blake3::derive_key(NO_SECRET_CONTEXT, b""),
    }
}

/// Starts the Noise handshake of one end.
fn noise(secret: Option<&[u8]>, initiator: bool) -> Result<Box<HandshakeState>, HandshakeError> {
    let key = pre_shared_key(secret);
    let params = NOISE.parse().map_err(|_| HandshakeError::Noise)?;
    let prologue = Preamble::encode(Kind::Control);
    let builder = snow::Builder::new(params).psk(0, &key).and_then(|builder| builder.prologue(&prologue));
    let state = builder
        .and_then(|builder| if initiator { builder.build_initiator() } else { builder.build_responder() });
    state.map(Box::new).map_err(|_| HandshakeError::Noise)
}

/// Makes the next Noise message with this payload.
fn noise_write(noise: &mut HandshakeState, payload: &[u8]) -> Result<Vec<u8>, HandshakeError> {
    let mut message = vec![0; payload.len() + NOISE_BYTES];
    let len = noise.write_message(payload, &mut message).map_err(|error| match error {
        snow::Error::Rng => HandshakeError::Random,
        snow::Error::Dh => HandshakeError::Unproven("its handshake key"),
        _ => HandshakeError::Noise,
    })?;
    message.truncate(len);
    Ok(message)
}

/// Opens a Noise message; `None` when it was altered or made with another key.
fn noise_read(noise: &mut HandshakeState, message: &[u8]) -> Option<Vec<u8>> {
    let mut payload = vec![0; message.len()];
    let len = noise.read_message(message, &mut payload).ok()?;
    payload.truncate(len);
    Some(payload)
}

/// Hash of the finished handshake, which binds a resumption to this connection.
fn handshake_hash(noise: &HandshakeState) -> Result<[u8; 32], HandshakeError> {
    noise.get_handshake_hash().try_into().map_err(|_| HandshakeError::Noise)
}
