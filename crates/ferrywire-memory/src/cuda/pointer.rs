//! Finds the GPU memory behind an address, for memory that users allocate with any library.
//!
//! Frameworks hand out parts of larger allocations, ranges that are mapped piece by piece ("expandable
//! segments"), memory of other processes (IPC) and managed memory. The driver knows all of them by address.
//! Invariant: a lookup neither loads nor initialises the driver. It costs one atomic load while the driver
//! was never loaded, and one more check per call while another library may still load it.

use super::capture;
use super::driver;
use super::error::{About, CudaError, NO_GPU_MEMORY, Result, check};
use super::gpu::CudaGpu;
use cudarc::driver::sys::CUpointer_attribute as Attribute;
use std::ffi::c_void;

/// Kind of the memory that the driver knows at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// Memory of one GPU.
    Device,
    /// Managed memory, which the driver moves between GPU and host.
    Managed,
}

/// The GPU memory that contains an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Found {
    /// Number of the GPU in this process.
    pub gpu: u32,
    /// First address of the allocation, or of the mapped piece that contains the address.
    pub base: u64,
    /// Length of the allocation or piece in bytes.
    pub bytes: u64,
    /// Kind of the memory: of one GPU, or managed.
    pub kind: Kind,
}

impl Found {
    fn end(&self) -> u64 {
        self.base.saturating_add(self.bytes)
    }
}

const MEMORY_TYPE_HOST: u32 = 1;
const MEMORY_TYPE_DEVICE: u32 = 2;

/// Attributes of an address; all zero for an address that the driver does not know.
#[derive(Clone, Copy, Debug, Default)]
struct Answers {
    memory_type: u32,
    gpu: i32,
    /// First address of the allocation, or of the whole reserved address range, mapped or not.
    base: u64,
    bytes: usize,
    /// First address of the mapping at the address. A mapping is often larger than an allocation, or one
    /// piece of a reserved range.
    mapping_base: u64,
    mapping_bytes: usize,
    /// Whether the memory is managed, which drivers write as one byte or four.
    managed: u32,
    /// Device address of the byte for the GPU whose context is current; 0 without a current context.
    device_address: u64,
}

impl Answers {
    /// First address and end of the intersection of allocation and mapping.
    fn piece(&self) -> (u64, u64) {
        let end = self.base.saturating_add(self.bytes as u64);
        let mapping_end = self.mapping_base.saturating_add(self.mapping_bytes as u64);
        match (self.base.max(self.mapping_base), end.min(mapping_end)) {
            (base, end) if base < end => (base, end),
            // The driver reports no mapping, or one that does not overlap the allocation.
            _ => (self.base, end),
        }
    }

    fn is_of_the_same_range(&self, other: &Answers) -> bool {
        (self.base, self.bytes, self.memory_type, self.gpu)
            == (other.base, other.bytes, other.memory_type, other.gpu)
    }

    /// The end address of the adjacent mapped pieces from this one on, limited by `wanted` and the
    /// allocation.
    fn end_of_pieces(&self, wanted: u64, ask: impl Fn(u64) -> Option<Answers>) -> u64 {
        let (_, mut end) = self.piece();
        let wanted = wanted.min(self.base.saturating_add(self.bytes as u64));
        while end < wanted {
            match ask(end).filter(|next| next.is_of_the_same_range(self)).map(|next| next.piece()) {
                Some((_, next)) if next > end => end = next,
                _ => break,
            }
        }
        end
    }

    fn found(&self) -> Option<Found> {
        let kind = match (self.managed, self.memory_type) {
            (1.., _) => Kind::Managed,
            (0, MEMORY_TYPE_DEVICE) => Kind::Device,
            _ => return None,
        };
        let (base, end) = self.piece();
        let bytes = end.checked_sub(base).filter(|bytes| *bytes > 0)?;
        Some(Found { gpu: u32::try_from(self.gpu).ok()?, base, bytes, kind })
    }
}

/// The driver's attributes of an address; `None` where no driver is loaded or initialised.
///
/// # Errors
/// The driver's error; where the driver cannot be used, the reason, unless it says that the address is not the
/// GPU's.
fn attributes(address: u64) -> Result<Option<Answers>> {
    let functions = match driver::library_if_mapped() {
        None => return Ok(None),
        Some(Ok(library)) => &library.functions,
        Some(Err(unusable)) => {
            let is_foreign = matches!(driver::memory_type(address), Some(0 | MEMORY_TYPE_HOST));
            return if is_foreign { Ok(None) } else { Err(unusable) };
        }
    };
    let _relaxed = capture::relax();
    let mut answers = Answers::default();
    let mut asked = [
        Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
        Attribute::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
        Attribute::CU_POINTER_ATTRIBUTE_MAPPING_SIZE,
    ];
    let mut into: [*mut c_void; 8] = [
        (&raw mut answers.memory_type).cast(),
        (&raw mut answers.gpu).cast(),
        (&raw mut answers.base).cast(),
        (&raw mut answers.bytes).cast(),
        (&raw mut answers.managed).cast(),
        (&raw mut answers.device_address).cast(),
        (&raw mut answers.mapping_base).cast(),
        (&raw mut answers.mapping_bytes).cast(),
    ];
    // SAFETY: each attribute is written to a field of its type. An unknown address, or an uninitialised
    // driver, only yields an error code.
    let code = unsafe {
        let count = asked.len() as u32;
        (functions.cuPointerGetAttributes)(count, asked.as_mut_ptr(), into.as_mut_ptr(), address)
    };
    match code {
        0 => Ok(Some(answers)),
        code if NO_GPU_MEMORY.contains(&code) => Ok(None),
        _ => check("cuPointerGetAttributes", About::default(), code).map(|()| None),
    }
}

/// The driver's attributes of an address; `None` also where the driver fails.
fn ask(address: u64) -> Option<Answers> {
    attributes(address).ok().flatten()
}

/// The GPU memory that contains an address; `None` for host memory, pinned or not, while no driver is loaded,
/// and where the driver fails.
pub fn of(address: u64) -> Option<Found> {
    ask(address)?.found()
}

fn find(address: u64) -> Result<Option<Found>> {
    Ok(attributes(address)?.and_then(|answers| answers.found()))
}

/// The GPU memory that contains an address, extended by adjacent pieces of one reserved range until it holds
/// `bytes` bytes from the address on. Where no adjacent piece follows it holds fewer, which the caller must
/// check.
pub fn stretch(address: u64, bytes: u64) -> Option<Found> {
    let first = ask(address)?;
    let found = first.found()?;
    let end = first.end_of_pieces(address.saturating_add(bytes), ask);
    Some(Found { bytes: end - found.base, ..found })
}

/// First address and length in bytes of the pinned host memory that contains an address. `None` unless the
/// GPU accesses it at the CPU's address.
pub fn pinned(gpu: &CudaGpu, address: u64) -> Option<(u64, u64)> {
    // The driver reports the device address for the current GPU only.
    let _current = gpu.make_current().ok()?;
    let found = ask(address)?;
    let same = found.memory_type == MEMORY_TYPE_HOST && found.device_address == address;
    let (base, end) = (found.piece().0, same.then(|| found.end_of_pieces(u64::MAX, ask))?);
    (end > base).then_some((base, end - base))
}

/// The GPU whose memory contains the whole range; `None` when the range does not start in GPU memory. The
/// range may span several adjacent pieces.
///
/// # Errors
/// [`CudaError::OutOfRange`] when the range starts in GPU memory and leaves it; the driver's error where it
/// cannot say whose memory the range is, or knows GPU memory there and cannot be used.
pub fn gpu_of_range(address: u64, bytes: u64) -> Result<Option<u32>> {
    let Some(first) = find(address)? else { return Ok(None) };
    let (mut end, wanted) = (first.end(), address.saturating_add(bytes));
    while end < wanted {
        match find(end)? {
            Some(next) if next.gpu == first.gpu && next.end() > end => end = next.end(),
            _ => return Err(CudaError::OutOfRange { address, bytes, end }),
        }
    }
    Ok(Some(first.gpu))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Attributes of a reserved range of 8 MiB whose first 6 MiB are mapped in pieces of 2 MiB.
    fn reserved(address: u64) -> Option<Answers> {
        let base = 64 * MIB;
        let mapped = (base..base + 6 * MIB).contains(&address);
        let mut answers = Answers { base, bytes: 8 << 20, gpu: -2, ..Answers::default() };
        if mapped {
            let (mapping_base, mapping_bytes) = (address - address % (2 * MIB), 2 << 20);
            answers = Answers { memory_type: 2, gpu: 1, mapping_base, mapping_bytes, ..answers };
        }
        Some(answers)
    }

    #[test]
    fn a_piece_ends_where_its_mapping_ends_and_a_part_of_a_mapping_where_it_ends_itself() {
        let piece = reserved(67 * MIB).unwrap().found().unwrap();
        assert_eq!((piece.gpu, piece.base, piece.bytes), (1, 66 * MIB, 2 * MIB));
        assert_eq!(reserved(71 * MIB).unwrap().found(), None);
        let part = Answers {
            memory_type: 2,
            base: 66 * MIB + 100,
            bytes: 300,
            mapping_base: 66 * MIB,
            mapping_bytes: 2 << 20,
            ..Answers::default()
        };
        assert_eq!(part.piece(), (66 * MIB + 100, 66 * MIB + 400));
        // A driver that reports no mapping.
        assert_eq!(Answers { mapping_bytes: 0, ..part }.piece(), part.piece());
    }

    #[test]
    fn pieces_side_by_side_are_followed_as_far_as_needed() {
        let first = reserved(65 * MIB).unwrap();
        let end = |wanted| first.end_of_pieces(wanted, reserved);
        assert_eq!([end(65 * MIB), end(66 * MIB), end(66 * MIB + 1)], [66 * MIB, 66 * MIB, 68 * MIB]);
        assert_eq!([end(71 * MIB), end(u64::MAX)], [70 * MIB; 2]);
        // Stops at another allocation, and at another GPU.
        for other in [Answers { base: 66 * MIB, ..first }, Answers { gpu: 0, ..first }] {
            assert_eq!(first.end_of_pieces(u64::MAX, |_| Some(other)), 66 * MIB);
        }
        // A driver whose answers make no progress.
        assert_eq!(first.end_of_pieces(u64::MAX, |_| Some(first)), 66 * MIB);
    }
}
