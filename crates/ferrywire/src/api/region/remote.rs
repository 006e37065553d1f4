//! The descriptor of a region of another endpoint.
//!
//! Invariant: `from_bytes` accepts only what `to_bytes` of this version writes.
//! Read next: `mod.rs`, local regions.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use ferrywire_memory::MemoryLocation;
use ferrywire_proto::Identity;
use ferrywire_proto::descriptor::Descriptor;

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
        let RemoteRegion { owner, key, len, location } = *self;
        Descriptor { owner, key, len, location: location.encode() }.encode()
    }

    /// Parses the bytes of [`RemoteRegion::to_bytes`].
    ///
    /// # Errors
    /// [`Error::Invalid`] for bytes of another version or of another origin.
    pub fn from_bytes(bytes: &[u8]) -> Result<RemoteRegion> {
        let wrong = |why: &str| Error::invalid("region descriptor", why);
        let Descriptor { owner, key, len, location: (kind, index) } =
            Descriptor::decode(bytes).map_err(|error| wrong(&error.to_string()))?;
        let location = MemoryLocation::parse(kind, index)
            .ok_or_else(|| wrong("names a kind of memory that this version does not know"))?;
        Ok(RemoteRegion { owner, key, len, location })
    }
}
