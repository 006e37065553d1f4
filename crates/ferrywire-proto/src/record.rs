//! The records of a protected data connection.
//!
//! ```text
//! record    length u32 LE | `length` bytes, encrypted or only authenticated | tag, 16 bytes
//! ```
//!
//! The length is authenticated too. Records are numbered from 0 for each connection and direction, and the number is the nonce.
//! Each connection and direction has a [`RecordSecret`] of its own, so no pair of key and nonce repeats. After
//! [`REKEY_BYTES`] of payload both ends derive the next secret from the last one; the numbers go on.
//!
//! Invariants: a changed, lost, repeated or reordered record does not open, and no later record of its
//! connection does. A secret is overwritten when it is dropped.
//! Read next: `sealed.rs` in the crate `ferrywire-net`, which sends and receives records.

use std::fmt;

use aws_lc_rs::aead::{AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use zeroize::Zeroizing;

use crate::limits::{RECORD_BYTES_MAX, REKEY_BYTES};
use crate::protection::{Algorithm, Protection};

/// Bytes of a record's header, which is its length.
pub const RECORD_HEADER_BYTES: usize = 4;
/// Bytes of a record's tag, which follows its payload.
pub const RECORD_TAG_BYTES: usize = 16;
/// Bytes of a record's header and tag together.
pub const RECORD_OVERHEAD: usize = RECORD_HEADER_BYTES + RECORD_TAG_BYTES;

const KEY_CONTEXT: &str = "ferrywire key of records v1";
const NEXT_CONTEXT: &str = "ferrywire next secret of records v1";

/// The secret from which the keys of one connection and direction are derived. `Debug` does not print it.
#[derive(Clone)]
pub struct RecordSecret(Zeroizing<[u8; 32]>);

impl RecordSecret {
    /// A secret from 32 bytes, which must be indistinguishable from random ones.
    pub fn new(bytes: [u8; 32]) -> RecordSecret {
        RecordSecret(Zeroizing::new(bytes))
    }

    fn next(&self) -> RecordSecret {
        RecordSecret::new(blake3::derive_key(NEXT_CONTEXT, &self.0[..]))
    }
}

impl fmt::Debug for RecordSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RecordSecret(..)")
    }
}

/// The secrets of both directions of a protected connection.
#[derive(Clone, Debug)]
pub struct RecordSecrets {
    /// Secret of the records that the connecting end sends.
    pub from_initiator: RecordSecret,
    /// Secret of the records that the accepting end sends.
    pub from_responder: RecordSecret,
}

/// Why the records of a connection cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// A record did not authenticate.
    #[error("a record does not authenticate: changed on its way, or not from the peer")]
    Forged,
    /// A record announces an impossible length, in bytes.
    #[error("a record announces {0} bytes; 1 to {RECORD_BYTES_MAX} are allowed")]
    Length(u32),
    /// The connection has no record numbers left.
    #[error("the connection has carried as many records as it can number")]
    Exhausted,
}

/// Seals or opens the records of one connection in one direction.
pub struct Records {
    protection: Protection,
    secret: RecordSecret,
    key: LessSafeKey,
    /// Number of the next record.
    number: u64,
    /// Payload bytes that the key may still protect.
    left: u64,
    rekey_bytes: u64,
}

impl fmt::Debug for Records {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Records({}, {})", self.protection, self.number)
    }
}

impl Records {
    /// The records of a new connection, in one direction.
    pub fn new(protection: Protection, secret: RecordSecret) -> Records {
        Records::with_rekey(protection, secret, REKEY_BYTES)
    }

    /// Like [`new`](Records::new), with another number of payload bytes under one key.
    fn with_rekey(protection: Protection, secret: RecordSecret, rekey_bytes: u64) -> Records {
        let key = key(protection, &secret);
        Records { protection, secret, key, number: 0, left: rekey_bytes, rekey_bytes }
    }

    /// Seals `payload` into `record`, which has room for it, a header and a tag. A record that is encrypted contains no payload
    /// at any time, so it may lie where the kernel still sends older bytes from.
    ///
    /// # Errors
    /// [`RecordError::Length`] for an impossible length, [`RecordError::Exhausted`] after 2^64 - 1 records.
    pub fn seal_from(&mut self, payload: &[u8], record: &mut [u8]) -> Result<(), RecordError> {
        let bytes = payload_bytes(record)?;
        if bytes != payload.len() {
            return Err(RecordError::Length(payload.len() as u32));
        }
        let nonce = self.advance(bytes)?;
        record[..RECORD_HEADER_BYTES].copy_from_slice(&(bytes as u32).to_le_bytes());
        if !self.protection.encrypted {
            // The copy is what is authenticated and sent, even if the payload changes meanwhile.
            let (clear, tag) = record.split_at_mut(RECORD_HEADER_BYTES + bytes);
            clear[RECORD_HEADER_BYTES..].copy_from_slice(payload);
            let sealed = self.key.seal_in_place_separate_tag(nonce, Aad::from(&*clear), &mut []);
            tag.copy_from_slice(sealed.map_err(|_| RecordError::Exhausted)?.as_ref());
            return Ok(());
        }
        let (header, rest) = record.split_at_mut(RECORD_HEADER_BYTES);
        let (sealed, tag) = rest.split_at_mut(bytes);
        let done = self.key.seal_out_of_place_scatter(nonce, Aad::from(&*header), payload, sealed, &[], tag);
        done.map_err(|_| RecordError::Exhausted)
    }

    /// The bytes of the whole record that begins with `header`.
    ///
    /// # Errors
    /// [`RecordError::Length`] for an impossible length.
    pub fn record_bytes(header: [u8; RECORD_HEADER_BYTES]) -> Result<usize, RecordError> {
        let length = u32::from_le_bytes(header);
        match length as usize {
            bytes @ 1..=RECORD_BYTES_MAX => Ok(bytes + RECORD_OVERHEAD),
            _ => Err(RecordError::Length(length)),
        }
    }

    /// Opens a whole record in place. The payload is then behind the header.
    ///
    /// # Errors
    /// [`RecordError::Forged`] if the record is not the next one of the other end, unchanged.
    pub fn open(&mut self, record: &mut [u8]) -> Result<(), RecordError> {
        let bytes = payload_bytes(record)?;
        let nonce = self.advance(bytes)?;
        let opened = if self.protection.encrypted {
            let (header, sealed) = record.split_at_mut(RECORD_HEADER_BYTES);
            self.key.open_in_place(nonce, Aad::from(&*header), sealed).map(drop)
        } else {
            let (clear, tag) = record.split_at_mut(RECORD_HEADER_BYTES + bytes);
            self.key.open_in_place(nonce, Aad::from(&*clear), tag).map(drop)
        };
        opened.map_err(|_| RecordError::Forged)
    }

    /// Opens a whole record into `payload`, which is as long as the record's. Decryption then needs no copy. After an error
    /// `payload` has any content, but none that the record could choose.
    ///
    /// # Errors
    /// The same as those of [`open`](Records::open).
    pub fn open_into(&mut self, record: &mut [u8], payload: &mut [u8]) -> Result<(), RecordError> {
        let bytes = payload_bytes(record)?;
        if bytes != payload.len() {
            return Err(RecordError::Length(payload.len() as u32));
        }
        if !self.protection.encrypted {
            self.open(record)?;
            payload.copy_from_slice(&record[RECORD_HEADER_BYTES..RECORD_HEADER_BYTES + bytes]);
            return Ok(());
        }
        let nonce = self.advance(bytes)?;
        let (header, rest) = record.split_at(RECORD_HEADER_BYTES);
        let (sealed, tag) = rest.split_at(bytes);
        let opened = self.key.open_separate_gather(nonce, Aad::from(header), sealed, tag, payload);
        opened.map_err(|_| {
            payload.fill(0);
            RecordError::Forged
        })
    }

    /// The nonce of the next record, which has `bytes` bytes of payload. Derives the next key when the
    /// current one has protected its share.
    fn advance(&mut self, bytes: usize) -> Result<Nonce, RecordError> {
        if self.left < bytes as u64 {
            self.secret = self.secret.next();
            self.key = key(self.protection, &self.secret);
            self.left = self.rekey_bytes;
        }
        self.left = self.left.saturating_sub(bytes as u64);
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&self.number.to_le_bytes());
        self.number = self.number.checked_add(1).ok_or(RecordError::Exhausted)?;
        Ok(Nonce::assume_unique_for_key(nonce))
    }
}

/// The key that protects records under this secret.
fn key(protection: Protection, secret: &RecordSecret) -> LessSafeKey {
    let algorithm = match protection.algorithm {
        Algorithm::Aes256Gcm => &AES_256_GCM,
        Algorithm::ChaCha20Poly1305 => &CHACHA20_POLY1305,
    };
    let context = format!("{KEY_CONTEXT} {protection}");
    let bytes = Zeroizing::new(blake3::derive_key(&context, &secret.0[..]));
    let key = UnboundKey::new(algorithm, &bytes[..]);
    LessSafeKey::new(key.expect("both algorithms have keys of 32 bytes"))
}

/// Payload bytes of a whole record.
fn payload_bytes(record: &[u8]) -> Result<usize, RecordError> {
    match record.len().saturating_sub(RECORD_OVERHEAD) {
        bytes @ 1..=RECORD_BYTES_MAX => Ok(bytes),
        bytes => Err(RecordError::Length(bytes as u32)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [Protection; 4] = [
        Protection { encrypted: true, algorithm: Algorithm::Aes256Gcm },
        Protection { encrypted: true, algorithm: Algorithm::ChaCha20Poly1305 },
        Protection { encrypted: false, algorithm: Algorithm::Aes256Gcm },
        Protection { encrypted: false, algorithm: Algorithm::ChaCha20Poly1305 },
    ];

    fn pair(protection: Protection, rekey_bytes: u64) -> (Records, Records) {
        let records = || Records::with_rekey(protection, RecordSecret::new([7; 32]), rekey_bytes);
        (records(), records())
    }

    fn sealed(records: &mut Records, payload: &[u8]) -> Vec<u8> {
        let mut record = vec![0; payload.len() + RECORD_OVERHEAD];
        records.seal_from(payload, &mut record).unwrap();
        record
    }

    fn opened(records: &mut Records, record: &[u8]) -> Result<Vec<u8>, RecordError> {
        let bytes = Records::record_bytes(*record.first_chunk().unwrap())?;
        let mut record = record.to_vec();
        if record.len() != bytes {
            return Err(RecordError::Length(record.len() as u32));
        }
        if record.len().is_multiple_of(3) {
            let mut payload = vec![7; bytes - RECORD_OVERHEAD];
            let result = records.open_into(&mut record, &mut payload);
            assert!(
                result.is_ok() || payload.iter().all(|byte| matches!(byte, 0 | 7)),
                "chosen by the record"
            );
            return result.map(|()| payload);
        }
        records.open(&mut record)?;
        Ok(record[RECORD_HEADER_BYTES..record.len() - RECORD_TAG_BYTES].to_vec())
    }

    #[test]
    fn a_record_is_read_back_and_its_payload_is_clear_only_without_encryption() {
        for protection in KINDS {
            let (mut sealer, mut opener) = pair(protection, REKEY_BYTES);
            for payload in [&b"x"[..], &[3; 1000], &[9; RECORD_BYTES_MAX]] {
                let record = sealed(&mut sealer, payload);
                assert_eq!(
                    record.windows(payload.len()).any(|at| at == payload),
                    !protection.encrypted || payload.len() == 1 && record.contains(&payload[0])
                );
                assert_eq!(opened(&mut opener, &record).as_deref(), Ok(payload));
            }
        }
    }

    #[test]
    fn no_changed_bit_opens() {
        for protection in KINDS {
            let (mut sealer, _) = pair(protection, REKEY_BYTES);
            let record = sealed(&mut sealer, b"forty-two");
            for bit in 0..record.len() * 8 {
                let mut changed = record.clone();
                changed[bit / 8] ^= 1 << (bit % 8);
                let (_, mut opener) = pair(protection, REKEY_BYTES);
                assert!(opened(&mut opener, &changed).is_err(), "bit {bit} of a record of {protection}");
            }
        }
    }

    #[test]
    fn a_repeated_lost_or_reordered_record_does_not_open() {
        for protection in KINDS {
            let (mut sealer, _) = pair(protection, REKEY_BYTES);
            let records: Vec<_> = (0..3u8).map(|i| sealed(&mut sealer, &[i; 40])).collect();
            for order in [&[0, 0][..], &[1], &[0, 2], &[0, 1, 1], &[0, 1, 0]] {
                let (_, mut opener) = pair(protection, REKEY_BYTES);
                let (last, before) = order.split_last().unwrap();
                before.iter().for_each(|i| drop(opened(&mut opener, &records[*i]).unwrap()));
                assert_eq!(opened(&mut opener, &records[*last]), Err(RecordError::Forged), "{order:?}");
            }
        }
    }

    #[test]
    fn another_key_algorithm_or_direction_does_not_open() {
        for protection in KINDS {
            let (mut sealer, _) = pair(protection, REKEY_BYTES);
            let record = sealed(&mut sealer, b"payload");
            let mut other = Records::new(protection, RecordSecret::new([8; 32]));
            assert_eq!(opened(&mut other, &record), Err(RecordError::Forged));
            for kind in KINDS.into_iter().filter(|kind| *kind != protection) {
                let (_, mut opener) = pair(kind, REKEY_BYTES);
                assert_eq!(opened(&mut opener, &record), Err(RecordError::Forged), "{protection} by {kind}");
            }
        }
    }

    #[test]
    fn both_ends_change_the_key_at_the_same_record() {
        for protection in KINDS {
            let (mut sealer, mut opener) = pair(protection, 100);
            let (mut constant, _) = pair(protection, REKEY_BYTES);
            let mut changed = 0;
            for payload in (0..50u8).map(|i| vec![i; 1 + usize::from(i) * 7]) {
                let record = sealed(&mut sealer, &payload);
                changed += usize::from(record != sealed(&mut constant, &payload));
                assert_eq!(opened(&mut opener, &record), Ok(payload));
            }
            assert!(changed > 40, "{changed} of 50 records under another key");
        }
    }

    #[test]
    fn an_impossible_length_is_refused_before_anything_is_read() {
        for length in [0u32, RECORD_BYTES_MAX as u32 + 1, u32::MAX] {
            assert_eq!(Records::record_bytes(length.to_le_bytes()), Err(RecordError::Length(length)));
        }
        assert_eq!(Records::record_bytes(1u32.to_le_bytes()), Ok(1 + RECORD_OVERHEAD));
    }

    #[test]
    fn secrets_are_not_printed() {
        let secret = RecordSecret::new([7; 32]);
        let secrets = RecordSecrets { from_initiator: secret.clone(), from_responder: secret };
        assert!(!format!("{secrets:?}").contains('7'), "{secrets:?}");
    }
}
