//! Encryption of a control connection after its handshake.
//!
//! A frame is a u16 LE length and a Noise transport message. The order of the messages is part of the
//! encryption, so [`Secure::open`] fails when one was dropped, repeated or reordered.
//! Invariant: after an error the connection is over; the session resumes over another.
//! Read next: `session/mod.rs`, which produces the plain text.

use super::TAG_BYTES;
use crate::limits::CONTROL_MESSAGE_BYTES_MAX;

/// Why an encrypted control connection cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecureError {
    /// A control message did not authenticate.
    #[error("a control message does not authenticate: altered on its way, or not from the peer")]
    Forged,
    /// A control message has an impossible length.
    #[error("a control message has {bytes} bytes; at most {CONTROL_MESSAGE_BYTES_MAX} are allowed")]
    Length {
        /// Bytes of the message without its tag.
        bytes: usize,
    },
    /// One key has sealed the largest number of messages that it may seal.
    #[error("the key of the control connection has sealed as many messages as it may")]
    Exhausted,
}

/// Seals outgoing messages and opens incoming ones.
pub struct Secure(Box<snow::TransportState>);

impl std::fmt::Debug for Secure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secure(..)")
    }
}

impl Secure {
    pub(super) fn new(noise: snow::HandshakeState) -> Result<Secure, snow::Error> {
        Ok(Secure(Box::new(noise.into_transport_mode()?)))
    }

    /// Bytes of the frame that carries `plain_bytes` bytes of plain text.
    pub fn sealed_bytes(plain_bytes: usize) -> usize {
        2 + plain_bytes + TAG_BYTES
    }

    /// Seals `plain`; returns the frame: its length, then the sealed bytes.
    pub fn seal(&mut self, plain: &[u8]) -> Result<Vec<u8>, SecureError> {
        let bytes = plain.len();
        if bytes > CONTROL_MESSAGE_BYTES_MAX {
            return Err(SecureError::Length { bytes });
        }
        let sealed_bytes = bytes + TAG_BYTES;
        let mut frame = vec![0; 2 + sealed_bytes];
        frame[..2].copy_from_slice(&(sealed_bytes as u16).to_le_bytes());
        self.0.write_message(plain, &mut frame[2..]).map_err(|_| SecureError::Exhausted)?;
        Ok(frame)
    }

    /// Takes one complete frame off the front of `incoming` and opens it; `None` while the frame is
    /// incomplete.
    pub fn open(&mut self, incoming: &mut Vec<u8>) -> Result<Option<Vec<u8>>, SecureError> {
        let Some(length) = incoming.first_chunk::<2>() else {
            return Ok(None);
        };
        let sealed_bytes = usize::from(u16::from_le_bytes(*length));
        if !(TAG_BYTES..=CONTROL_MESSAGE_BYTES_MAX + TAG_BYTES).contains(&sealed_bytes) {
            return Err(SecureError::Length { bytes: sealed_bytes.saturating_sub(TAG_BYTES) });
        }
        let Some(sealed) = incoming.get(2..2 + sealed_bytes) else {
            return Ok(None);
        };
        let plain = self.open_message(sealed)?;
        incoming.drain(..2 + sealed_bytes);
        Ok(Some(plain))
    }

    /// Opens one sealed message that has no length before it; returns an error when it does not authenticate.
    pub(super) fn open_message(&mut self, sealed: &[u8]) -> Result<Vec<u8>, SecureError> {
        let mut plain = vec![0; sealed.len()];
        let bytes = self.0.read_message(sealed, &mut plain).map_err(|_| SecureError::Forged)?;
        plain.truncate(bytes);
        Ok(plain)
    }
}
