//! The descriptor of a region of another endpoint.
//!
//! Invariant: `from_bytes` accepts only what `to_bytes` of this version writes.
//! Read next: `mod.rs`, local regions.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use ferrywire_memory::MemoryLocation;
use ferrywire_proto::Identity;

const DESCRIPTOR_VERSION: u8 = 2;
/// Size of an encoded descriptor in bytes: version, owner, key, length, kind of memory location, GPU index.
const DESCRIPTOR_BYTES: usize = 1 + 16 + 8 + 8 + 1 + 2;

/// A region of another endpoint. A plain value: it does not keep the region registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RemoteRegion {
    pub(crate) owner: Identity,
    pub(crate) key: u64,
    pub(crate) len: u64,
    pub(crate) location: MemoryLocation,
}

impl RemoteRegion {
    /// Size of the region in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The memory location on the endpoint that owns the region.
    pub fn location(&self) -> MemoryLocation {
        self.location
    }

    /// Identity of the endpoint that owns the region.
    pub fn owner(&self) -> Identity {
        self.owner
    }

    /// The descriptor as bytes, to be sent or stored.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(DESCRIPTOR_BYTES);
        out.push(DESCRIPTOR_VERSION);
        out.extend_from_slice(&self.owner.0);
        out.extend_from_slice(&self.key.to_le_bytes());
        out.extend_from_slice(&self.len.to_le_bytes());
        let (kind, index) = self.location.encode();
        out.push(kind);
        out.extend_from_slice(&index.to_le_bytes());
        out
    }

    /// Parses the bytes of [`RemoteRegion::to_bytes`].
    ///
    /// # Errors
    /// [`Error::Invalid`] for bytes of another version or of another origin.
    pub fn from_bytes(bytes: &[u8]) -> Result<RemoteRegion> {
        let wrong = |why: &str| Error::invalid("region descriptor", why);
        // Check the version first: descriptors of other versions may have other lengths.
        if bytes.first().is_some_and(|version| *version != DESCRIPTOR_VERSION) {
            return Err(wrong("made by another version of ferrywire: install one version on both ends"));
        }
        if bytes.len() != DESCRIPTOR_BYTES {
            return Err(wrong(&format!("{} bytes long, must be {DESCRIPTOR_BYTES}", bytes.len())));
        }
        let mut owner = [0; 16];
        owner.copy_from_slice(&bytes[1..17]);
        let word =
            |at: usize| bytes[at..at + 8].iter().rev().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
        let location = MemoryLocation::parse(bytes[33], u16::from_le_bytes([bytes[34], bytes[35]]))
            .ok_or_else(|| wrong("names a kind of memory that this version does not know"))?;
        Ok(RemoteRegion { owner: Identity(owner), key: word(17), len: word(25), location })
    }
}
