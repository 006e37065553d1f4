//! The bytes of a region's descriptor, which users carry from one endpoint to another.
//!
//! Invariant: [`Descriptor::decode`] accepts only what [`Descriptor::encode`] of this version writes.
//! Read next: `identity.rs`, the owner's name.

use crate::Identity;

const VERSION: u8 = 2;
/// Size of an encoded descriptor in bytes: version, owner, key, length, memory location.
const BYTES: usize = 1 + 16 + 8 + 8 + 3;

/// What a descriptor says of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Identity of the endpoint that owns the region.
    pub owner: Identity,
    /// Key of the region at its owner.
    pub key: u64,
    /// Size of the region in bytes.
    pub len: u64,
    /// Kind of the memory location and number of the GPU. No protocol code gives them a meaning.
    pub location: (u8, u16),
}

/// Why bytes are no descriptor of this version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DescriptorError {
    /// The first byte names another version. Its descriptors may have another length.
    #[error("made by another version of ferrywire: install one version on both ends")]
    OtherVersion,
    /// Bytes are missing, or there are too many.
    #[error("{0} bytes long, must be {BYTES}")]
    Length(usize),
}

impl Descriptor {
    /// The descriptor's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(BYTES);
        out.push(VERSION);
        out.extend_from_slice(&self.owner.0);
        out.extend_from_slice(&self.key.to_le_bytes());
        out.extend_from_slice(&self.len.to_le_bytes());
        let (kind, index) = self.location;
        out.push(kind);
        out.extend_from_slice(&index.to_le_bytes());
        out
    }

    /// Parses the bytes of [`Descriptor::encode`].
    ///
    /// # Errors
    /// [`DescriptorError`] for bytes of another version or of another origin.
    pub fn decode(bytes: &[u8]) -> Result<Descriptor, DescriptorError> {
        if bytes.first().is_some_and(|version| *version != VERSION) {
            return Err(DescriptorError::OtherVersion);
        }
        let bytes: &[u8; BYTES] = bytes.try_into().map_err(|_| DescriptorError::Length(bytes.len()))?;
        let mut owner = [0; 16];
        owner.copy_from_slice(&bytes[1..17]);
        let word =
            |at: usize| bytes[at..at + 8].iter().rev().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
        let location = (bytes[33], u16::from_le_bytes([bytes[34], bytes[35]]));
        Ok(Descriptor { owner: Identity(owner), key: word(17), len: word(25), location })
    }
}
