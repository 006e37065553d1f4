//! What a plugin can say about scattered receives that is not believed.

use super::{DEVICE_WORDS_BYTES, FRAGMENTS_PER_SLOT_MAX, METADATA_BYTES};
use crate::MemoryLocation;

/// Why a plugin's word about scattered receives was refused. Nothing was copied because of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnpackError {
    /// The device handle has a form that nobody here knows.
    #[error(
        "the plugin's device handle has type {kind}, version {version} and {size_bytes} bytes; \
         only type 1, version 7 with {} bytes can be unpacked: try another version of the plugin",
        DEVICE_WORDS_BYTES
    )]
    Form {
        /// Type of the device.
        kind: i32,
        /// Version of the form.
        version: i32,
        /// Bytes at the handle.
        size_bytes: usize,
    },
    /// What the handle points at cannot be read.
    #[error(
        "the plugin's device handle points at {address:#x}, which the GPU cannot read ({why}): \
         was the GPU current when the connection was accepted?"
    )]
    Words {
        /// Where it points.
        address: u64,
        /// The GPU's words.
        why: String,
    },
    /// The table of fragments is not where the CPU can read it, or not whole.
    #[error(
        "the plugin's table of fragments at {address:#x} is not in mapped host memory, or not whole: \
         {readable_bytes} bytes can be read of {}",
        METADATA_BYTES
    )]
    Table {
        /// Where the plugin says that it is.
        address: u64,
        /// How much of it there is.
        readable_bytes: u64,
    },
    /// The pool is not memory of the GPU.
    #[error(
        "the plugin's receive pool at {base:#x} is {}, not memory of this GPU ({gpu}): \
         was the GPU current when the connection was accepted?",
        found.map_or("no device memory".to_string(), |location| location.to_string())
    )]
    Pool {
        /// Where the plugin says that it is.
        base: u64,
        /// What is there.
        found: Option<MemoryLocation>,
        /// The GPU that gathers.
        gpu: MemoryLocation,
    },
    /// A slot has more fragments than its table.
    #[error(
        "slot {slot}: the plugin names {count} fragments; a slot has room for {}",
        FRAGMENTS_PER_SLOT_MAX
    )]
    TooManyFragments {
        /// The slot.
        slot: usize,
        /// What the plugin wrote as their number.
        count: u64,
    },
    /// Fragments of a receive that went straight to host memory.
    #[error("slot {slot}: the plugin names {count} fragments of a receive into host memory, which has none")]
    FragmentsForHost {
        /// The slot.
        slot: usize,
        /// Their number.
        count: u64,
    },
    /// A fragment lies outside the pool.
    #[error(
        "slot {slot}, fragment {fragment}: {bytes} bytes at offset {source_offset} are not inside the \
         plugin's pool of {pool_bytes} bytes"
    )]
    OutsidePool {
        /// The slot.
        slot: usize,
        /// The fragment, from 0.
        fragment: usize,
        /// Where it begins in the pool.
        source_offset: u32,
        /// Its length.
        bytes: u32,
        /// Size of the pool.
        pool_bytes: u64,
    },
    /// A fragment belongs outside the message.
    #[error(
        "slot {slot}, fragment {fragment}: {bytes} bytes for offset {target_offset} are not inside the \
         message of {message_bytes} bytes"
    )]
    OutsideMessage {
        /// The slot.
        slot: usize,
        /// The fragment, from 0.
        fragment: usize,
        /// Where it belongs in the message.
        target_offset: u64,
        /// Its length.
        bytes: u32,
        /// Size of the message.
        message_bytes: u64,
    },
    /// Two fragments belong to the same place.
    #[error(
        "slot {slot}, fragment {fragment}: {bytes} bytes for offset {target_offset} overlap with fragment \
         {other}, which ends at {other_end}"
    )]
    Overlap {
        /// The slot.
        slot: usize,
        /// The fragment that begins inside another.
        fragment: usize,
        /// Where it belongs in the message.
        target_offset: u64,
        /// Its length.
        bytes: u32,
        /// The fragment it begins in.
        other: usize,
        /// Where that ends.
        other_end: u64,
    },
    /// The fragments are not the message.
    #[error(
        "slot {slot}: the plugin's {fragments} fragments have {sum_bytes} bytes, and the message has \
         {message_bytes}"
    )]
    WrongSum {
        /// The slot.
        slot: usize,
        /// Their number.
        fragments: usize,
        /// Bytes of all of them.
        sum_bytes: u64,
        /// Size of the message.
        message_bytes: u64,
    },
}
