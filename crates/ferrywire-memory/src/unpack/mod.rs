//! Gathering ("unpack") of scattered receives. A plugin places payload as fragments in a pool of GPU memory;
//! a table in mapped host memory has the destination of each fragment.
//!
//! ```text
//!   plugin's table ── read once, checked, merged ──> own table ── in place ──> kernel ──┐
//!   slot k mod 16     (a lie is an error)            mapped                             v
//!   plugin's pool ───────────────────────────────────────────────────────────────> destination
//! ```
//!
//! [`DeviceUnpack`] is the description of a connection that `accept` returned, read once. [`Gather`] carries
//! out the connection's receives, each from [`Gather::start`] until [`Gather::poll`] reports it as done. Only
//! then may the receive be returned to the plugin, which gives the pool's pages back to the NIC. All modes
//! of gathering follow this rule.
//!
//! Invariant: every fragment was checked against pool and message before its bytes are copied, and exactly
//! the checked fragment is copied: the plugin's table is read only once.
//! Read next: `table.rs` (checks), `gather.rs` (order of work), `device.rs` (the GPU's side), `kernels.rs`
//! (the kernel).

mod copies;
mod cuda;
mod device;
mod error;
mod gather;
mod host;
mod kernels;
mod lists;
mod mode;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod recorder;
mod sim;
mod sm_backoff;
mod table;

pub use copies::CopyQueue;
pub use cuda::CudaQueue;
pub use cuda::mapped;
pub use device::check_allocated;
pub use device::{Extent, GatherDevice, GatherRun, Mapped};
pub use error::UnpackError;
pub use gather::Gather;
pub use kernels::{COUNTERS, Counter, Kernels, PatternParameters};
pub use lists::{CopyAddresses, CopyList, CopyMailbox};
pub use mode::UnpackMode;
pub use sim::SimQueue;
pub use sm_backoff::{LAUNCH_WAIT, Permit};
pub use table::{FRAGMENTS_PER_SLOT_MAX, Fragment, METADATA_BYTES, SLOTS};

use crate::error::Result;
use ferrywire_ncclnet::abi::{DEVICE_UNPACK, DEVICE_VERSION_UNPACK, DeviceHandle};
use std::fmt;
use table::Metadata;

/// Size in bytes of the data behind a device handle: table, pool, and a word for NCCL's own kernels.
pub const DEVICE_WORDS_BYTES: usize = 24;

/// A connection's scattered receives: its table, its pool, and the GPU that accesses both.
pub struct DeviceUnpack {
    device: Box<dyn GatherDevice>,
    metadata: Metadata,
    pool: Extent,
}

impl DeviceUnpack {
    /// Reads the data behind a device handle, once and through the GPU, and checks all of it.
    ///
    /// # Safety
    /// The handle comes from the `accept` of a plugin, and its connection stays open until this value, and
    /// the [`Gather`] made of it, are dropped: the plugin's table is read in place.
    ///
    /// # Errors
    /// [`UnpackError`] when the handle has an unknown form, or names memory of the wrong kind.
    pub unsafe fn read(device: Box<dyn GatherDevice>, handle: &DeviceHandle) -> Result<DeviceUnpack> {
        check_form(handle)?;
        let [table, pool] = read_words(&*device, handle.handle as u64)?;
        let pool = pool_at(&*device, pool)?;
        check_table(&*device, table)?;
        // SAFETY: the table is mapped and complete, as the check has shown; it stays so by the caller's
        // promise.
        let metadata = unsafe { Metadata::new(table as *mut u8) };
        Ok(DeviceUnpack { device, metadata, pool })
    }

    /// The plugin's receive pool, from the address to which fragments are relative to the end of its
    /// allocation.
    pub fn pool(&self) -> Extent {
        self.pool
    }
}

impl fmt::Debug for DeviceUnpack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceUnpack({}, {:?}, {:?})", self.device.location(), self.metadata, self.pool)
    }
}

fn check_form(handle: &DeviceHandle) -> Result<(), UnpackError> {
    let found = (handle.net_device_type, handle.net_device_version, handle.size);
    if found != (DEVICE_UNPACK, DEVICE_VERSION_UNPACK, DEVICE_WORDS_BYTES) {
        return Err(UnpackError::Form { kind: found.0, version: found.1, size_bytes: found.2 });
    }
    Ok(())
}

/// Reads the addresses of table and pool behind a device handle. The word behind them is for NCCL's own
/// kernels.
fn read_words(device: &dyn GatherDevice, address: u64) -> Result<[u64; 2], UnpackError> {
    let mut bytes = [0u8; DEVICE_WORDS_BYTES];
    device
        .read(address, &mut bytes)
        .map_err(|error| UnpackError::Words { address, why: error.to_string() })?;
    let (words, _) = bytes.as_chunks::<8>();
    Ok([u64::from_ne_bytes(words[0]), u64::from_ne_bytes(words[1])])
}

fn pool_at(device: &dyn GatherDevice, base: u64) -> Result<Extent, UnpackError> {
    match device.device_memory(base, u64::MAX) {
        Some((location, found)) if location == device.location() => {
            Ok(Extent { base, bytes: found.bytes_from(base).unwrap_or(0) })
        }
        found => Err(UnpackError::Pool {
            base,
            found: found.map(|(location, _)| location),
            gpu: device.location(),
        }),
    }
}

fn check_table(device: &dyn GatherDevice, address: u64) -> Result<(), UnpackError> {
    let readable_bytes = device.mapped_memory(address).and_then(|found| found.bytes_from(address));
    let whole = readable_bytes.is_some_and(|bytes| bytes >= METADATA_BYTES as u64);
    if !whole || !address.is_multiple_of(align_of::<Fragment>() as u64) {
        return Err(UnpackError::Table { address, readable_bytes: readable_bytes.unwrap_or(0) });
    }
    Ok(())
}
