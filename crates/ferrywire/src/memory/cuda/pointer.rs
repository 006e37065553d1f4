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

const MEMORY_TYPE_HOST: u32 = 1;
const MEMORY_TYPE_DEVICE: u32 = 2;

/// What the driver says about an address; all zero where it knows nothing.
#[derive(Default)]
struct Answers {
    memory_type: u32,
    gpu: i32,
    base: u64,
    bytes: usize,
    /// A truth value, for which drivers write one byte or four.
    managed: u32,
    /// Where GPUs find the same byte.
    device_address: u64,
}

fn ask(address: u64) -> Option<Answers> {
    driver::library_if_mapped()?;
    let mut answers = Answers::default();
    let mut asked = [
        Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
    ];
    let mut into: [*mut c_void; 6] = [
        (&raw mut answers.memory_type).cast(),
        (&raw mut answers.gpu).cast(),
        (&raw mut answers.base).cast(),
        (&raw mut answers.bytes).cast(),
        (&raw mut answers.managed).cast(),
        (&raw mut answers.device_address).cast(),
    ];
    // SAFETY: each attribute is written where there is room for its type; an address that the driver does not
    // know, and a driver that is not initialised, are answers and no more.
    let code = unsafe {
        sys::cuPointerGetAttributes(asked.len() as u32, asked.as_mut_ptr(), into.as_mut_ptr(), address) as u32
    };
    (code == 0).then_some(answers)
}

/// The GPU memory that an address lies in; `None` for host memory, pinned or not, and where no driver is loaded.
pub fn of(address: u64) -> Option<Found> {
    let Answers { memory_type, gpu, base, bytes, managed, .. } = ask(address)?;
    let kind = match (managed, memory_type) {
        (1.., _) => Kind::Managed,
        (0, MEMORY_TYPE_DEVICE) => Kind::Device,
        _ => return None,
    };
    let gpu = u32::try_from(gpu).ok().filter(|_| bytes > 0)?;
    Some(Found { gpu, base, bytes: bytes as u64, kind })
}

/// First address and length of the pinned host memory that an address lies in, if GPUs reach it at the same
/// address.
pub fn pinned(address: u64) -> Option<(u64, u64)> {
    let found = ask(address)?;
    let same = found.memory_type == MEMORY_TYPE_HOST && found.device_address == address;
    (same && found.bytes > 0).then_some((found.base, found.bytes as u64))
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
