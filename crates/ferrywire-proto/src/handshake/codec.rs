//! Encoding of the control handshake's messages: [`Hello`], the initiator's request, the welcome.
//!
//! All integers are little-endian; texts and lists carry their length. [`Reader`] checks every length and
//! rejects trailing bytes; the control session's messages use it too.
//! Invariant: a decoded value is within every limit and printable; no function here can panic.
//! Read next: `responder.rs`, which acts on these messages.

use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;

use super::error::printable;
use super::{HandshakeError, PROOF_BYTES};
use crate::limits::{ADDRESSES_MAX, CHANNELS_MAX, CHUNK_BYTES_MAX, HANDSHAKE_BYTES_MAX};
use crate::protection::ProtectionWish;

/// Longest label of an endpoint, in bytes.
pub const LABEL_BYTES_MAX: usize = 64;
/// Longest interface name in bytes (`IFNAMSIZ` without the terminating zero).
pub const NIC_NAME_BYTES_MAX: usize = 15;
/// Most bytes of a configuration's free-form part.
pub const EXTRA_BYTES_MAX: usize = 256;
/// Prefix of a configuration's free-form part that declines the proposed payload backend, or proposes none;
/// the reason follows the prefix.
pub const WITHOUT: &[u8] = b"without=";

/// Bytes of an encoded address at most: family, IPv6 address and port.
const ADDRESS_BYTES_MAX: usize = 1 + 16 + 2;
/// Bytes of an encoded [`Hello`] at most.
pub(super) const HELLO_BYTES_MAX: usize =
    16 + 16 + 1 + LABEL_BYTES_MAX + 4 + 1 + ADDRESSES_MAX * (ADDRESS_BYTES_MAX + 1 + NIC_NAME_BYTES_MAX);
/// Bytes of an encoded [`Config`] at most.
const CONFIG_BYTES_MAX: usize = 2 + 4 + 4 + 1 + 1 + 2 + EXTRA_BYTES_MAX;
/// Bytes of an encoded [`Opening`] at most.
pub(super) const OPENING_BYTES_MAX: usize = HELLO_BYTES_MAX + 1 + 16 + PROOF_BYTES + CONFIG_BYTES_MAX;
/// Bytes of an encoded [`Welcome`] at most.
pub(super) const WELCOME_BYTES_MAX: usize = 8 + 8 + PROOF_BYTES + CONFIG_BYTES_MAX;

const _: () = assert!(ADDRESSES_MAX <= u8::MAX as usize);
const _: () = assert!(LABEL_BYTES_MAX <= u8::MAX as usize);
const _: () = assert!(NIC_NAME_BYTES_MAX <= u8::MAX as usize);
const _: () = assert!(OPENING_BYTES_MAX + 256 <= HANDSHAKE_BYTES_MAX);
const _: () = assert!(HELLO_BYTES_MAX + WELCOME_BYTES_MAX + 512 <= HANDSHAKE_BYTES_MAX);

/// An address on which an endpoint listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenAddress {
    /// Address and port. The scope of an IPv6 address is not sent: it means nothing to another host.
    pub address: SocketAddr,
    /// Name of the NIC with this address, at most 15 bytes.
    pub nic: String,
}

/// How an endpoint introduces itself in a handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Identity of the endpoint, which lasts as long as its process.
    pub identity: [u8; 16],
    /// Boot id of the host: endpoints with equal ids share a host. All zero where it could not be read.
    pub boot_id: [u8; 16],
    /// Label for users: printable, at most 64 bytes, may be empty.
    pub label: String,
    /// Addresses on which the endpoint listens, at most `ADDRESSES_MAX`; may be empty.
    pub addresses: Vec<ListenAddress>,
    /// Silence in milliseconds after which the endpoint declares a peer lost.
    pub peer_timeout_ms: u32,
}

/// Checks that a label can be sent.
///
/// # Errors
/// What it must be.
pub fn check_label(label: &str) -> Result<(), String> {
    if label.len() <= LABEL_BYTES_MAX && label.chars().all(printable) {
        return Ok(());
    }
    Err(format!("must be printable and at most {LABEL_BYTES_MAX} bytes long"))
}

impl Hello {
    /// Whether both endpoints share a host; `None` where a boot id is unknown.
    pub fn shares_host(&self, other: &Hello) -> Option<bool> {
        let known = |hello: &Hello| hello.boot_id != [0; 16];
        (known(self) && known(other)).then(|| self.boot_id == other.boot_id)
    }

    /// Returns an error for a hello that cannot be encoded.
    pub(super) fn check(&self) -> Result<(), HandshakeError> {
        let unusable = |what, why: String| Err(HandshakeError::Unusable { what, why });
        if let Err(why) = check_label(&self.label) {
            return unusable("label", why);
        }
        if self.addresses.len() > ADDRESSES_MAX {
            return unusable(
                "addresses",
                format!("{} are too many, at most {ADDRESSES_MAX} are sent", self.addresses.len()),
            );
        }
        let named =
            |entry: &ListenAddress| entry.nic.len() <= NIC_NAME_BYTES_MAX && entry.nic.chars().all(printable);
        if !self.addresses.iter().all(named) {
            return unusable(
                "NIC name",
                format!("must be printable, at most {NIC_NAME_BYTES_MAX} bytes long"),
            );
        }
        Ok(())
    }

    pub(super) fn encode(&self, into: &mut Vec<u8>) {
        into.extend_from_slice(&self.identity);
        into.extend_from_slice(&self.boot_id);
        put_text(into, &self.label);
        into.extend_from_slice(&self.peer_timeout_ms.to_le_bytes());
        into.push(self.addresses.len() as u8);
        for entry in &self.addresses {
            put_address(into, entry.address);
            put_text(into, &entry.nic);
        }
    }

    pub(super) fn decode(reader: &mut Reader<'_>) -> Result<Hello, HandshakeError> {
        let (identity, boot_id) = (reader.array()?, reader.array()?);
        let label = reader.text(LABEL_BYTES_MAX)?;
        let peer_timeout_ms = reader.u32()?;
        let count = usize::from(reader.u8()?);
        reader.within("addresses", count, 0..=ADDRESSES_MAX)?;
        let mut addresses = Vec::with_capacity(count);
        for _ in 0..count {
            let address = reader.address()?;
            addresses.push(ListenAddress { address, nic: reader.text(NIC_NAME_BYTES_MAX)? });
        }
        Ok(Hello { identity, boot_id, label, addresses, peer_timeout_ms })
    }
}

/// The configuration of a session. The initiator proposes one; the responder accepts it, perhaps reduced or
/// with checksums, or refuses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Number of data connections, 1 to `CHANNELS_MAX`.
    pub channels: u16,
    /// Largest chunk in bytes, 1 to `CHUNK_BYTES_MAX`.
    pub chunk_bytes: u32,
    /// Window of each channel, at least 1, in a unit that the engine chooses.
    pub window: u32,
    /// Whether data frames carry checksums.
    pub crc: bool,
    /// How the end that sends the configuration wants data connections to be protected.
    pub wish: ProtectionWish,
    /// Free-form data of the engine in the configuration, at most 256 bytes.
    pub extra: Vec<u8>,
}

impl Config {
    /// Why the configuration is invalid; `None` when it is valid.
    pub(super) fn fault(&self) -> Option<String> {
        let outside = |name: &str, value: usize, range: RangeInclusive<usize>| {
            (!range.contains(&value))
                .then(|| format!("{name} = {value}, must be {} to {}", range.start(), range.end()))
        };
        outside("channels", usize::from(self.channels), 1..=CHANNELS_MAX)
            .or_else(|| outside("chunk_bytes", self.chunk_bytes as usize, 1..=CHUNK_BYTES_MAX))
            .or_else(|| outside("window", self.window as usize, 1..=u32::MAX as usize))
            .or_else(|| outside("extra bytes", self.extra.len(), 0..=EXTRA_BYTES_MAX))
    }

    /// How this settled configuration exceeds the proposal; `None` when it does not. The responder may lower
    /// the numbers, turn checksums on and decline the free-form part.
    pub(super) fn overreach(&self, proposed: &Config) -> Option<String> {
        let more = |name: &str, settled: u32, proposed: u32| {
            (settled > proposed).then(|| format!("{name} = {settled}, where {proposed} was proposed"))
        };
        more("channels", self.channels.into(), proposed.channels.into())
            .or_else(|| more("chunk_bytes", self.chunk_bytes, proposed.chunk_bytes))
            .or_else(|| more("window", self.window, proposed.window))
            .or_else(|| {
                let is_off = proposed.crc && !self.crc;
                is_off.then(|| String::from("crc = false, where true was proposed"))
            })
            .or_else(|| {
                let declined = self.extra.is_empty() || self.extra.starts_with(WITHOUT);
                let other = !declined && self.extra != proposed.extra;
                other.then(|| String::from("extra bytes not proposed"))
            })
    }

    /// Returns an error for a configuration that cannot be encoded.
    pub(super) fn check(&self) -> Result<(), HandshakeError> {
        self.fault().map_or(Ok(()), |why| Err(HandshakeError::Unusable { what: "configuration", why }))
    }

    fn encode(&self, into: &mut Vec<u8>) {
        into.extend_from_slice(&self.channels.to_le_bytes());
        into.extend_from_slice(&self.chunk_bytes.to_le_bytes());
        into.extend_from_slice(&self.window.to_le_bytes());
        into.push(u8::from(self.crc));
        into.push(self.wish.to_byte());
        into.extend_from_slice(&(self.extra.len() as u16).to_le_bytes());
        into.extend_from_slice(&self.extra);
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Config, HandshakeError> {
        let (channels, chunk_bytes, window) = (reader.u16()?, reader.u32()?, reader.u32()?);
        let crc = reader.flag()?;
        let wish = reader.u8()?;
        let wish = ProtectionWish::from_byte(wish)
            .ok_or_else(|| reader.malformed(format!("a protection of value {wish}")))?;
        let extra_bytes = usize::from(reader.u16()?);
        reader.within("extra bytes", extra_bytes, 0..=EXTRA_BYTES_MAX)?;
        let extra = reader.take(extra_bytes)?.to_vec();
        Ok(Config { channels, chunk_bytes, window, crc, wish, extra })
    }
}

/// The initiator's request, sent after both ends have proven that they hold the secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// Open a new session; carries the initiator's share of its key.
    New { share: [u8; 32], config: Config },
    /// Resume a session; carries the number of messages received so far and the proof of the session's key.
    Resume { session: u64, received: u64, proof: [u8; 32] },
}

/// The initiator's sealed message: its hello and its request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Opening {
    pub(super) hello: Hello,
    pub(super) request: Request,
}

impl Opening {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.hello.encode(&mut bytes);
        match &self.request {
            Request::New { share, config } => {
                bytes.push(1);
                bytes.extend_from_slice(share);
                config.encode(&mut bytes);
            }
            Request::Resume { session, received, proof } => {
                bytes.push(2);
                bytes.extend_from_slice(&session.to_le_bytes());
                bytes.extend_from_slice(&received.to_le_bytes());
                bytes.extend_from_slice(proof);
            }
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Opening, HandshakeError> {
        let mut reader = Reader::new(bytes, "the opening");
        let hello = Hello::decode(&mut reader)?;
        let request = match reader.u8()? {
            1 => Request::New { share: reader.array()?, config: Config::decode(&mut reader)? },
            2 => Request::Resume { session: reader.u64()?, received: reader.u64()?, proof: reader.array()? },
            other => return Err(reader.malformed(format!("unknown request {other}"))),
        };
        reader.end()?;
        Ok(Opening { hello, request })
    }
}

/// The responder's sealed answer: the session is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Welcome {
    pub(super) session: u64,
    pub(super) received: u64,
    /// The responder's share of a new session's key, or its proof of a resumed session's key.
    pub(super) token: [u8; 32],
    pub(super) config: Config,
}

impl Welcome {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&self.session.to_le_bytes());
        bytes.extend_from_slice(&self.received.to_le_bytes());
        bytes.extend_from_slice(&self.token);
        self.config.encode(&mut bytes);
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Welcome, HandshakeError> {
        let mut reader = Reader::new(bytes, "the welcome");
        let (session, received, token) = (reader.u64()?, reader.u64()?, reader.array()?);
        let config = Config::decode(&mut reader)?;
        reader.end()?;
        config.fault().map_or(Ok(()), |why| Err(reader.malformed(why)))?;
        Ok(Welcome { session, received, token, config })
    }
}

/// Appends a text of at most 255 bytes, preceded by its length.
fn put_text(into: &mut Vec<u8>, text: &str) {
    debug_assert!(text.len() <= usize::from(u8::MAX));
    into.push(text.len() as u8);
    into.extend_from_slice(text.as_bytes());
}

/// Appends an address: the family (4 or 6), the address, the port.
pub fn put_address(into: &mut Vec<u8>, address: SocketAddr) {
    match address.ip() {
        IpAddr::V4(ip) => {
            into.push(4);
            into.extend_from_slice(&ip.octets());
        }
        IpAddr::V6(ip) => {
            into.push(6);
            into.extend_from_slice(&ip.octets());
        }
    }
    into.extend_from_slice(&address.port().to_le_bytes());
}

/// Decodes values from the front of untrusted bytes.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
    what: &'static str,
}

impl<'a> Reader<'a> {
    /// A reader of `bytes`; its errors call the message `what`.
    pub fn new(bytes: &'a [u8], what: &'static str) -> Reader<'a> {
        Reader { rest: bytes, what }
    }

    /// The error for the message being read, malformed because of `why`.
    pub fn malformed(&self, why: impl Into<String>) -> HandshakeError {
        HandshakeError::malformed(self.what, why)
    }

    /// Takes the next `len` bytes; returns an error when fewer are left.
    pub fn take(&mut self, len: usize) -> Result<&'a [u8], HandshakeError> {
        let Some((head, rest)) = self.rest.split_at_checked(len) else {
            return Err(self.malformed(format!("ends {} bytes early", len - self.rest.len())));
        };
        self.rest = rest;
        Ok(head)
    }

    /// Takes the next `N` bytes; returns an error when fewer are left.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], HandshakeError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    /// Takes a number of 1 byte; returns an error at the end of the message.
    pub fn u8(&mut self) -> Result<u8, HandshakeError> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    /// Takes a number of 2 bytes; returns an error when fewer bytes are left.
    pub fn u16(&mut self) -> Result<u16, HandshakeError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    /// Takes a number of 4 bytes; returns an error when fewer bytes are left.
    pub fn u32(&mut self) -> Result<u32, HandshakeError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// Takes a number of 8 bytes; returns an error when fewer bytes are left.
    pub fn u64(&mut self) -> Result<u64, HandshakeError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Takes a flag, a byte of 0 or 1; returns an error for any other byte.
    pub fn flag(&mut self) -> Result<bool, HandshakeError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(self.malformed(format!("a flag of value {other}"))),
        }
    }

    /// Takes a length and a text of at most `bytes_max` bytes, and at most 255; returns an error for a longer
    /// or unprintable text.
    pub fn text(&mut self, bytes_max: usize) -> Result<String, HandshakeError> {
        let len = usize::from(self.u8()?);
        self.within("text bytes", len, 0..=bytes_max)?;
        self.printable(len)
    }

    /// Takes a text of `len` bytes; returns an error for a character that is not printable.
    pub fn printable(&mut self, len: usize) -> Result<String, HandshakeError> {
        match std::str::from_utf8(self.take(len)?) {
            Ok(text) if text.chars().all(printable) => Ok(String::from(text)),
            _ => Err(self.malformed("a text that is not printable")),
        }
    }

    /// Takes an address and a port; returns an error for an address that is neither IPv4 nor IPv6.
    pub fn address(&mut self) -> Result<SocketAddr, HandshakeError> {
        let ip = match self.u8()? {
            4 => IpAddr::from(self.array::<4>()?),
            6 => IpAddr::from(self.array::<16>()?),
            other => return Err(self.malformed(format!("address family {other}, expected 4 or 6"))),
        };
        Ok(SocketAddr::new(ip, self.u16()?))
    }

    /// Returns an error when `value`, a count or length called `name`, is outside of its range.
    pub fn within(
        &self,
        name: &str,
        value: usize,
        range: RangeInclusive<usize>,
    ) -> Result<(), HandshakeError> {
        if range.contains(&value) {
            return Ok(());
        }
        Err(self.malformed(format!("{value} {name}, must be {} to {}", range.start(), range.end())))
    }

    /// Returns an error when bytes of the message are left.
    pub fn end(&self) -> Result<(), HandshakeError> {
        match self.rest.len() {
            0 => Ok(()),
            left => Err(self.malformed(format!("{left} bytes too many"))),
        }
    }
}
