//! Arrays of offsets, sizes and indices: int64 arrays, read in place, without a Python object per entry.
//!
//! Invariant: an array of another element type is refused; nothing is rounded or reinterpreted.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyList, PyTuple};

use crate::dlpack;
use crate::errors::usage;
use crate::options::{unsigned, whole};
use crate::tensor::is_int64;

/// The entries of a one-dimensional int64 array (numpy, torch, `array.array('q')`) or of a list of integers.
///
/// # Errors
/// `UsageError` for another type or shape.
pub fn int64s(what: &str, object: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    let py = object.py();
    if object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>() {
        return object.extract().map_err(|error| usage(py, what, format!("not a list of integers: {error}")));
    }
    if let Ok(buffer) = PyUntypedBuffer::get(object) {
        if !is_int64(buffer.format(), buffer.item_size()) {
            return Err(wrong_type(what, object));
        }
        if buffer.dimensions() != 1 {
            return Err(wrong_shape(what, object));
        }
        return match buffer.as_typed::<i64>() {
            Ok(typed) => typed.to_vec(py),
            Err(_) => Err(wrong_type(what, object)),
        };
    }
    of_dlpack(what, object)
}

fn of_dlpack(what: &str, object: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    let py = object.py();
    if !object.hasattr(intern!(py, "__dlpack__"))? {
        let kind = object.get_type().qualname()?;
        return Err(usage(py, what, format!("{kind} is neither an int64 array nor a list of integers")));
    }
    let capsule = object.call_method0(intern!(py, "__dlpack__"))?;
    let Some(seen) = capsule.cast::<PyCapsule>().ok().and_then(dlpack::read) else {
        return Err(wrong_type(what, object));
    };
    if seen.code != 0 || seen.item_bits != 64 {
        return Err(wrong_type(what, object));
    }
    if !matches!(seen.device, dlpack::ON_HOST | dlpack::ON_PINNED_HOST) {
        return Err(usage(py, what, "the array is on a GPU, and the CPU reads offsets: pass x.cpu()"));
    }
    let [len] = seen.shape[..] else {
        return Err(wrong_shape(what, object));
    };
    let stride = seen.strides.map_or(1, |strides| strides[0]);
    let first = seen.address.cast::<i64>();
    // SAFETY: the capsule is still held; it has `len` elements of this type at a distance of `stride`.
    Ok((0..len as isize)
        .map(|index| unsafe { first.offset(index * stride as isize).read_unaligned() })
        .collect())
}

/// Sizes of blocks, in bytes.
pub enum Sizes {
    /// One size for all blocks.
    Same(u64),
    /// One size for each block.
    Each(Vec<i64>),
}

impl Sizes {
    /// Parses one size for all blocks, or an array of sizes.
    pub fn of(object: &Bound<'_, PyAny>) -> PyResult<Sizes> {
        // An array with a single entry also converts to a number, so its dimensions decide.
        let dimensions =
            object.getattr(intern!(object.py(), "ndim")).and_then(|ndim| ndim.extract::<usize>());
        match whole(object) {
            _ if dimensions.is_ok_and(|dimensions| dimensions > 0) => {
                Ok(Sizes::Each(int64s("sizes", object)?))
            }
            Ok(same) => Ok(Sizes::Same(unsigned(object.py(), "sizes", same)?)),
            Err(_) => Ok(Sizes::Each(int64s("sizes", object)?)),
        }
    }
}

/// Block indices (unsigned, 32 bits) from an int64 array or list.
pub fn indices(what: &str, object: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let narrow = |(at, value): (usize, i64)| {
        u32::try_from(value)
            .map_err(|_| usage(object.py(), what, format!("entry {at} is {value}, not the index of a block")))
    };
    int64s(what, object)?.into_iter().enumerate().map(narrow).collect()
}

fn wrong_type(what: &str, object: &Bound<'_, PyAny>) -> PyErr {
    let dtype = object.getattr(intern!(object.py(), "dtype")).map(|dtype| dtype.to_string());
    let dtype = dtype.unwrap_or_else(|_| object.get_type().to_string());
    usage(
        object.py(),
        what,
        format!("the array has elements of {dtype}, must be int64: pass x.astype('int64')"),
    )
}

fn wrong_shape(what: &str, object: &Bound<'_, PyAny>) -> PyErr {
    let shape = object.getattr(intern!(object.py(), "shape")).map(|shape| shape.to_string());
    let shape = shape.unwrap_or_else(|_| "several dimensions".into());
    usage(
        object.py(),
        what,
        format!("the array has shape {shape}, must have one dimension: pass x.reshape(-1)"),
    )
}
