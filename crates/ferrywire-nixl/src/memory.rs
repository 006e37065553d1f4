//! Registered memory as NIXL hands it around: of this agent, and of remote ones.

use ferrywire::{MemoryLocation, Region, RemoteRegion};

/// Memory that descriptors point to.
pub enum Memory {
    /// Registered here. Its own descriptors give absolute addresses.
    Local { region: Region, base: u64 },
    /// Registered by a remote agent; the address is that agent's.
    Remote { region: RemoteRegion, base: u64 },
}

/// Kinds of memory as NIXL numbers them.
pub const DRAM: u32 = 0;
pub const VRAM: u32 = 1;

const VERSION: u8 = 1;

impl Memory {
    pub fn base(&self) -> u64 {
        match self {
            Memory::Local { base, .. } | Memory::Remote { base, .. } => *base,
        }
    }

    /// What remote agents need to reach it.
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

    /// # Errors
    /// What is wrong with the bytes.
    pub fn from_public_data(bytes: &[u8]) -> Result<Memory, String> {
        let (version, rest) = bytes.split_first().ok_or("it is empty")?;
        if *version != VERSION {
            return Err(format!(
                "it has version {version}, and this is {VERSION}: use the same ferrywire on both ends"
            ));
        }
        let (base, descriptor) = rest.split_first_chunk::<8>().ok_or("it is cut off")?;
        let region = RemoteRegion::from_bytes(descriptor).map_err(|error| error.to_string())?;
        Ok(Memory::Remote { region, base: u64::from_le_bytes(*base) })
    }
}

/// Whether memory that lives there may be registered as this kind.
pub fn is_of_kind(location: MemoryLocation, kind: u32) -> bool {
    match kind {
        DRAM => location == MemoryLocation::Host,
        VRAM => location != MemoryLocation::Host,
        _ => false,
    }
}
