//! The layout of DLPack capsules, with and without a version, by which array libraries share memory.
//!
//! Invariant: a capsule is read and kept but never consumed; its own destructor returns the memory. Read next:
//! `tensor.rs`, which asks objects for capsules.

use std::ffi::{CStr, c_void};

use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods};

/// `DLDataTypeCode` of elements that are opaque handles.
pub const HANDLES: u8 = 3;

const UNVERSIONED: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const MAJOR_VERSION: u32 = 1;
const READ_ONLY: u64 = 1;

/// `DLDeviceType` of host memory.
pub const ON_HOST: i32 = 1;
/// `DLDeviceType` of CUDA GPUs.
pub const ON_CUDA: i32 = 2;
/// `DLDeviceType` of pinned host memory.
pub const ON_PINNED_HOST: i32 = 3;

#[repr(C)]
struct Device {
    kind: i32,
    index: i32,
}

#[repr(C)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    dimensions: i32,
    dtype: DataType,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

#[repr(C)]
struct Version {
    major: u32,
    minor: u32,
}

/// The beginning of a versioned capsule, up to its tensor.
#[repr(C)]
struct Versioned {
    version: Version,
    manager: *mut c_void,
    deleter: *mut c_void,
    flags: u64,
    tensor: Tensor,
}

const _: () = assert!(size_of::<Tensor>() == 48);
const _: () = assert!(std::mem::offset_of!(Tensor, shape) == 24);
const _: () = assert!(std::mem::offset_of!(Versioned, tensor) == 32);

/// The memory that a capsule describes.
pub struct Described {
    pub address: *mut u8,
    pub device: i32,
    pub device_index: i32,
    pub shape: Vec<i64>,
    /// Strides in elements; `None` for one contiguous run, last dimension innermost.
    pub strides: Option<Vec<i64>>,
    pub item_bits: usize,
    pub read_only: bool,
    /// `DLDataTypeCode`: 0 signed, 1 unsigned, 2 float.
    pub code: u8,
}

/// Reads a capsule; `None` for another kind of capsule or another major version.
pub fn read(capsule: &Bound<'_, PyCapsule>) -> Option<Described> {
    if let Ok(pointer) = capsule.pointer_checked(Some(VERSIONED)) {
        // SAFETY: a capsule of this name points to this struct while the capsule lives; the version comes first.
        let head = unsafe { pointer.cast::<Versioned>().as_ref() };
        return (head.version.major == MAJOR_VERSION)
            .then(|| describe(&head.tensor, head.flags & READ_ONLY != 0));
    }
    let pointer = capsule.pointer_checked(Some(UNVERSIONED)).ok()?;
    // SAFETY: a capsule of this name points to this struct while the capsule lives.
    Some(describe(unsafe { pointer.cast::<Tensor>().as_ref() }, false))
}

fn describe(tensor: &Tensor, read_only: bool) -> Described {
    let count = usize::try_from(tensor.dimensions).unwrap_or(0);
    let list = |first: *const i64| match count {
        0 => Vec::new(),
        // SAFETY: a tensor's lists of sizes and strides have one entry per dimension and live as long as the
        // tensor.
        _ => unsafe { std::slice::from_raw_parts(first, count) }.to_vec(),
    };
    Described {
        address: tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize),
        device: tensor.device.kind,
        device_index: tensor.device.index,
        shape: list(tensor.shape),
        strides: (!tensor.strides.is_null()).then(|| list(tensor.strides)),
        item_bits: usize::from(tensor.dtype.bits) * usize::from(tensor.dtype.lanes),
        read_only,
        code: tensor.dtype.code,
    }
}
