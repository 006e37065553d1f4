//! Registered memory of this agent and of remote agents, to which NIXL's metadata pointers point.
//!
//! Read next: `transfer.rs`.

use ferrywire::{MemoryLocation, Region, RemoteRegion};

/// Registered memory of an agent, to which descriptors refer.
pub enum Memory {
    /// Memory that this agent registered; descriptors have absolute addresses from `base` on.
    Local { region: Region, base: u64 },
    /// Memory that a remote agent registered; `base` is an address in that agent.
    Remote { region: RemoteRegion, base: u64 },
}

/// Numbers of NIXL's kinds of memory.
pub const DRAM: u32 = 0;
pub const VRAM: u32 = 1;

const VERSION: u8 = 1;

impl Memory {
    pub fn base(&self) -> u64 {
        match self {
            Memory::Local { base, .. } | Memory::Remote { base, .. } => *base,
        }
    }

    /// The bytes that remote agents need to use the memory.
    pub fn public_data(&self) -> Vec<u8> {
        let (base, region) = match self {
            Memory::Local { region, base } => (base, region.descriptor()),
            Memory::Remote { region, base } => (base, *region),
        };
        let mut out = vec![VERSION];
        out.extend_from_slice(&base.to_le_bytes());
        out.extend_from_slice(&region.to_bytes());
        out
    }

    /// Parses the bytes of [`Memory::public_data`] of another agent.
    ///
    /// # Errors
    /// A message that says what is wrong with the bytes.
    pub fn from_public_data(bytes: &[u8]) -> Result<Memory, String> {
        let (version, rest) = bytes.split_first().ok_or("the memory's metadata is empty")?;
        if *version != VERSION {
            return Err(format!(
                "the memory's metadata has version {version}, this agent's {VERSION}: use the same ferrywire on both ends"
            ));
        }
        let (base, descriptor) = rest.split_first_chunk::<8>().ok_or("the memory's metadata is truncated")?;
        let region = RemoteRegion::from_bytes(descriptor).map_err(|error| error.to_string())?;
        Ok(Memory::Remote { region, base: u64::from_le_bytes(*base) })
    }
}

/// Whether memory at `location` may be registered as NIXL's kind `kind`.
pub fn is_of_kind(location: MemoryLocation, kind: u32) -> bool {
    match kind {
        DRAM => location == MemoryLocation::Host,
        VRAM => location != MemoryLocation::Host,
        _ => false,
    }
}
