//! Gathering ("unpack") of scattered receives: a plugin lets payload land in fragments in a pool of GPU
//! memory and says, in a table in mapped host memory, which fragment belongs where.
//!
//! ```text
//!   plugin's table ── read once, checked, merged ──> our table ── in place ──> kernel ──┐
//!   slot k mod 16     (a lie is an error)            mapped                             v
//!   plugin's pool ───────────────────────────────────────────────────────────────> destination
//! ```
//!
//! [`DeviceUnpack`] is what `accept` said about a connection, read once; [`Gather`] does the receives of that
//! connection, each from [`Gather::start`] until [`Gather::poll`] says that it is done. Only then may the
//! receive be given back to the plugin: the pool's pages go back to the NIC with it. All modes keep to that.
//!
//! Invariant: no byte is copied by a fragment that was not checked against pool and message, and what was
//! checked is what is copied: the plugin's table is not looked at a second time.
//! Read next: `table.rs` (what is believed), `gather.rs` (the order of work), `device.rs` (the GPU's side),
//! `kernels.rs` (the kernel).

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
pub use device::see_that_it_is_there;
pub use device::{Extent, GatherDevice, GatherRun, Mapped};
pub use error::UnpackError;
pub use gather::Gather;
pub use kernels::{COUNTERS, Counter, Kernels, PatternParameters};
pub use lists::{CopyDesk, CopyList, CopyPlaces};
pub use mode::UnpackMode;
pub use sim::SimQueue;
pub use sm_backoff::{Leave, PATIENCE};
pub use table::{FRAGMENTS_PER_SLOT_MAX, Fragment, METADATA_BYTES, SLOTS};

use crate::error::Result;
use ferrywire_ncclnet::abi::{DEVICE_UNPACK, DEVICE_VERSION_UNPACK, DeviceHandle};
use std::fmt;
use table::Metadata;

/// Bytes that a device handle of this form points at: table, pool, and a head for NCCL's own kernels.
pub const DEVICE_WORDS_BYTES: usize = 24;

/// Where a connection's scattered receives are found: its table and its pool, and the GPU that reaches both.
pub struct DeviceUnpack {
    device: Box<dyn GatherDevice>,
    metadata: Metadata,
    pool: Extent,
}

impl DeviceUnpack {
    /// Reads what a device handle points at, once and through the GPU, and checks all of it.
    ///
    /// # Safety
    /// The handle comes from the `accept` of a plugin, and its connection stays open until this, and the
    /// [`Gather`] made of it, are dropped: the plugin's table is read where it lies.
    ///
    /// # Errors
    /// [`UnpackError`] when the handle has another form, or names memory that is not what it should be.
    pub unsafe fn read(device: Box<dyn GatherDevice>, handle: &DeviceHandle) -> Result<DeviceUnpack> {
        check_form(handle)?;
        let [table, pool] = read_words(&*device, handle.handle as u64)?;
        let pool = pool_at(&*device, pool)?;
        check_table(&*device, table)?;
        // SAFETY: the table is mapped and whole, just checked; it stays so, as the caller promises.
        let metadata = unsafe { Metadata::new(table as *mut u8) };
        Ok(DeviceUnpack { device, metadata, pool })
    }

    /// The pool, from where fragments count to the end of its allocation.
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
    match found == (DEVICE_UNPACK, DEVICE_VERSION_UNPACK, DEVICE_WORDS_BYTES) {
        true => Ok(()),
        false => Err(UnpackError::Form { kind: found.0, version: found.1, size_bytes: found.2 }),
    }
}

/// The addresses of table and pool. The head behind them is for NCCL's own kernels.
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
    match whole && address.is_multiple_of(align_of::<Fragment>() as u64) {
        true => Ok(()),
        false => Err(UnpackError::Table { address, readable_bytes: readable_bytes.unwrap_or(0) }),
    }
}
