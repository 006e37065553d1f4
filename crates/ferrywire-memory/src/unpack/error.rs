//! Errors in a plugin's description of scattered receives.

use super::{DEVICE_WORDS_BYTES, FRAGMENTS_PER_SLOT_MAX, METADATA_BYTES};
use crate::MemoryLocation;

/// Why a plugin's description of a scattered receive was rejected. No byte was copied because of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnpackError {
    /// The device handle has an unknown type, version or size.
    #[error(
        "the plugin's device handle has type {kind}, version {version} and {size_bytes} bytes; \
         only type 1, version 7 with {} bytes can be unpacked: try another version of the plugin",
        DEVICE_WORDS_BYTES
    )]
    Form {
        /// Device type of the handle.
        kind: i32,
        /// Version of the device handle.
        version: i32,
        /// Size of the handle's data in bytes.
        size_bytes: usize,
    },
    /// The GPU cannot read the data that the handle points at.
    #[error(
        "the plugin's device handle points at {address:#x}, which the GPU cannot read ({why}): \
         was the GPU current when the connection was accepted?"
    )]
    Words {
        /// Address of the data behind the handle.
        address: u64,
        /// Why the GPU cannot read the data.
        why: String,
    },
    /// The table of fragments is not in memory that the CPU can read, or not complete.
    #[error(
        "the plugin's table of fragments at {address:#x} is not in mapped host memory, or not whole: \
         {readable_bytes} bytes can be read of {}",
        METADATA_BYTES
    )]
    Table {
        /// Address of the table of fragments.
        address: u64,
        /// Readable bytes at the address of the table.
        readable_bytes: u64,
    },
    /// The receive pool is not in memory of the GPU.
    #[error(
        "the plugin's receive pool at {base:#x} is {}, not memory of this GPU ({gpu}): \
         was the GPU current when the connection was accepted?",
        found.map_or("no device memory".to_string(), |location| location.to_string())
    )]
    Pool {
        /// Address of the receive pool.
        base: u64,
        /// Location of the memory at the pool's address, if known.
        found: Option<MemoryLocation>,
        /// The GPU that gathers.
        gpu: MemoryLocation,
    },
    /// The plugin reports more fragments than a slot can hold.
    #[error(
        "slot {slot}: the plugin reports {count} fragments; a slot has room for {}",
        FRAGMENTS_PER_SLOT_MAX
    )]
    TooManyFragments {
        /// Number of the receive's slot.
        slot: usize,
        /// Number of fragments that the plugin reports.
        count: u64,
    },
    /// The plugin reports fragments for a receive into host memory.
    #[error(
        "slot {slot}: the plugin reports {count} fragments of a receive into host memory, which never has fragments"
    )]
    FragmentsForHost {
        /// Number of the receive's slot.
        slot: usize,
        /// Number of fragments that the plugin reports.
        count: u64,
    },
    /// A fragment's source exceeds the pool.
    #[error(
        "slot {slot}, fragment {fragment}: {bytes} bytes at offset {source_offset} are not inside the \
         plugin's pool of {pool_bytes} bytes"
    )]
    OutsidePool {
        /// Number of the receive's slot.
        slot: usize,
        /// Index of the fragment in its slot.
        fragment: usize,
        /// Offset of the fragment in the pool.
        source_offset: u32,
        /// Length of the fragment in bytes.
        bytes: u32,
        /// Size of the pool in bytes.
        pool_bytes: u64,
    },
    /// A fragment's target exceeds the message.
    #[error(
        "slot {slot}, fragment {fragment}: {bytes} bytes for offset {target_offset} are not inside the \
         message of {message_bytes} bytes"
    )]
    OutsideMessage {
        /// Number of the receive's slot.
        slot: usize,
        /// Index of the fragment in its slot.
        fragment: usize,
        /// Offset of the fragment's target in the message.
        target_offset: u64,
        /// Length of the fragment in bytes.
        bytes: u32,
        /// Size of the message in bytes.
        message_bytes: u64,
    },
    /// The targets of two fragments overlap.
    #[error(
        "slot {slot}, fragment {fragment}: {bytes} bytes for offset {target_offset} overlap with fragment \
         {other}, which ends at {other_end}"
    )]
    Overlap {
        /// Number of the receive's slot.
        slot: usize,
        /// Index of the fragment that starts inside another one.
        fragment: usize,
        /// Offset of the fragment's target in the message.
        target_offset: u64,
        /// Length of the fragment in bytes.
        bytes: u32,
        /// Index of the other fragment.
        other: usize,
        /// End of the other fragment's target in the message.
        other_end: u64,
    },
    /// The fragments do not cover the message.
    #[error(
        "slot {slot}: the plugin's {fragments} fragments have {sum_bytes} bytes, and the message has \
         {message_bytes}"
    )]
    WrongSum {
        /// Number of the receive's slot.
        slot: usize,
        /// Number of fragments that the plugin reports.
        fragments: usize,
        /// Bytes of all fragments together.
        sum_bytes: u64,
        /// Size of the message in bytes.
        message_bytes: u64,
    },
}
