//! The descriptor of another endpoint's region.
//!
//! Invariant: what came as bytes is what this version wrote, or an error. Read next: `mod.rs`, the regions themselves.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use ferrywire_memory::MemoryLocation;
use ferrywire_proto::Identity;

const DESCRIPTOR_VERSION: u8 = 2;
/// Version, owner, key, length, kind of place, number of the GPU.
const DESCRIPTOR_BYTES: usize = 1 + 16 + 8 + 8 + 1 + 2;

/// A region of another endpoint, as its descriptor tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RemoteRegion {
    pub(crate) owner: Identity,
    pub(crate) key: u64,
    pub(crate) len: u64,
    pub(crate) location: MemoryLocation,
}

impl RemoteRegion {
    /// Size in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where its bytes live, on the endpoint that holds it.
    pub fn location(&self) -> MemoryLocation {
        self.location
    }

    /// The endpoint that holds it.
    pub fn owner(&self) -> Identity {
        self.owner
    }

    /// The descriptor as bytes: put it into a message, a file, a store.
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

    /// Reads what [`RemoteRegion::to_bytes`] wrote.
    pub fn from_bytes(bytes: &[u8]) -> Result<RemoteRegion> {
        let wrong = |why: &str| Error::invalid("region descriptor", why);
        // The version first: another one's descriptors may have another length.
        if bytes.first().is_some_and(|version| *version != DESCRIPTOR_VERSION) {
            return Err(wrong("made by another version of ferrywire"));
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
