//! Whose memory an address is: for memory that users allocate with whatever library they have.
//!
//! Frameworks hand out parts of larger allocations, ranges that are mapped piece by piece ("expandable segments"),
//! memory of other processes (IPC) and managed memory. The driver knows them all by address.
//! Invariant: asking neither loads the driver nor initialises it, and costs one atomic load where it was never
//! loaded and one more look per call where another library may load it later.

use super::driver;
use super::error::{CudaError, Result};
use cudarc::driver::sys::{self, CUpointer_attribute as Attribute};
use std::ffi::c_void;

/// What kind of memory an address is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// Memory of one GPU.
    Device,
    /// Memory that the driver moves between GPU and host.
    Managed,
}

/// Memory of a GPU that an address lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Found {
    /// The GPU, by its number in this process.
    pub gpu: u32,
    /// First address of the allocation, or of the piece that is mapped there.
    pub base: u64,
    /// Its length.
    pub bytes: u64,
    /// What it is.
    pub kind: Kind,
}

impl Found {
    fn end(&self) -> u64 {
        self.base.saturating_add(self.bytes)
    }
}

const MEMORY_TYPE_DEVICE: u32 = 2;

/// The GPU memory that an address lies in; `None` for host memory, pinned or not, and where no driver is loaded.
pub fn of(address: u64) -> Option<Found> {
    driver::library_if_mapped()?;
    let (mut memory_type, mut gpu, mut base, mut bytes) = (0u32, -1i32, 0u64, 0usize);
    let mut managed = false;
    let mut asked = [
        Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
    ];
    let mut answers: [*mut c_void; 5] = [
        (&raw mut memory_type).cast(),
        (&raw mut gpu).cast(),
        (&raw mut base).cast(),
        (&raw mut bytes).cast(),
        (&raw mut managed).cast(),
    ];
    // SAFETY: each attribute is written where there is room for its type; an address that the driver does not
    // know, and a driver that is not initialised, are answers and no more. `managed` is written as 0 or 1.
    let code = unsafe {
        sys::cuPointerGetAttributes(asked.len() as u32, asked.as_mut_ptr(), answers.as_mut_ptr(), address)
            as u32
    };
    let known = code == 0 && (memory_type == MEMORY_TYPE_DEVICE || managed);
    let gpu = u32::try_from(gpu).ok().filter(|_| known && bytes > 0)?;
    let kind = if managed { Kind::Managed } else { Kind::Device };
    Some(Found { gpu, base, bytes: bytes as u64, kind })
}

/// The GPU whose memory all of a range is; `None` when it does not begin in memory of a GPU. The range may go
/// over several pieces that are mapped side by side.
///
/// # Errors
/// [`CudaError::OutOfRange`] when it begins in memory of a GPU and leaves it.
pub fn gpu_of_range(address: u64, bytes: u64) -> Result<Option<u32>> {
    let Some(first) = of(address) else { return Ok(None) };
    let (mut end, wanted) = (first.end(), address.saturating_add(bytes));
    while end < wanted {
        match of(end) {
            Some(next) if next.gpu == first.gpu && next.end() > end => end = next.end(),
            _ => return Err(CudaError::OutOfRange { address, bytes, end }),
        }
    }
    Ok(Some(first.gpu))
}
