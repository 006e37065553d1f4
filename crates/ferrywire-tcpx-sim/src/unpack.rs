//! The data of a receive comm for scattered receives: the metadata block and the device's words.
//!
//! The device handle that `accept` fills points to 24 bytes of device memory: the addresses of the metadata and of the
//! pool, and a head that only NCCL's own kernels use.
//! Invariant: entries of a receive are published only in its own slot of the metadata.
//! Read next: `metadata.rs`.

use ferrywire_ncclnet::abi::{DEVICE_UNPACK, DEVICE_VERSION_UNPACK, DeviceHandle};

use crate::faults::Faults;
use crate::gpu::{DeviceWords, Mapped};
use crate::log::{exit_1, warning};
use crate::metadata::{Entry, METADATA_BYTES, Metadata, SLOTS};
use crate::pool::Fragment;
use crate::ring::Number;
use crate::switches::Lie;

/// Bytes of the device's words: two addresses and the head.
pub const DEVICE_WORDS_BYTES: usize = 24;
/// Initial value of the head, which other hosts ignore.
const HEAD_START: u64 = !0;
/// Distance in bytes by which a wrong fragment points beyond its message.
const LIE_BYTES: u64 = 1 << 40;

/// The scatter metadata of a receive comm.
#[derive(Debug)]
pub struct Unpack {
    metadata: Metadata,
    words: DeviceWords,
    pool_bytes: u64,
    lie: Lie,
    lie_after: Number,
}

impl Unpack {
    /// Makes the metadata for a comm whose pool is reported to begin at `base` and to have `pool_bytes`
    /// bytes; `None` if there is no memory.
    pub fn new(device: Option<i32>, base: u64, pool_bytes: u64, faults: &Faults) -> Option<Unpack> {
        let metadata = Metadata::new(Mapped::new(device, METADATA_BYTES)?);
        let mut words = [0; DEVICE_WORDS_BYTES];
        for (word, value) in words.chunks_exact_mut(8).zip([metadata.address(), base, HEAD_START]) {
            word.copy_from_slice(&value.to_ne_bytes());
        }
        Some(Unpack {
            words: DeviceWords::new(device, &words)?,
            metadata,
            pool_bytes,
            lie: faults.lie,
            lie_after: faults.lie_after,
        })
    }

    /// Fills the host's device handle with the addresses of the device's words.
    pub fn describe(&self, handle: &mut DeviceHandle) {
        handle.net_device_type = DEVICE_UNPACK;
        handle.net_device_version = DEVICE_VERSION_UNPACK;
        handle.handle = self.words.address() as *mut _;
        handle.size = DEVICE_WORDS_BYTES;
        handle.needs_proxy_progress = 1;
    }

    /// Clears the slot of a receive that was posted.
    pub fn begin(&mut self, number: Number) {
        self.metadata.clear(number as usize % SLOTS);
    }

    /// Adds the fragments of a chunk at `offset` of a receive, which has arrived.
    pub fn append(&mut self, number: Number, offset: usize, fragments: &[Fragment]) {
        let mut target = offset as u64;
        let mut entries = Vec::with_capacity(fragments.len());
        for fragment in fragments {
            entries.push(Entry { source: fragment.pool_offset(), len: fragment.len, target });
            target += u64::from(fragment.len);
        }
        if number >= self.lie_after {
            self.lie_about(&mut entries);
        }
        if !self.metadata.append(number as usize % SLOTS, &entries) {
            exit_1(format_args!(
                "request too many pages {}, failstop: more fragments in one request than its metadata holds",
                entries.len()
            ));
        }
    }

    /// Makes the first entry wrong, if the faults of the comm say so.
    fn lie_about(&self, entries: &mut [Entry]) {
        let Some(entry) = entries.first_mut() else { return };
        match self.lie {
            Lie::No => return,
            Lie::Range => entry.source = u32::try_from(self.pool_bytes).unwrap_or(u32::MAX),
            Lie::Dst => entry.target += LIE_BYTES,
            Lie::Len => entry.len = entry.len / 2 + 1 + entry.len,
        }
        warning!("a fragment has false values, injected by lie_fragment: {entry:?}");
    }
}
