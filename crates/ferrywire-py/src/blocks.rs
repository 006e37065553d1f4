//! [`BlockList`]: many blocks between regions, from arrays of offsets.
//!
//! Read next: `integers.rs`, which reads the arrays; `peer.rs`, which moves the blocks.

use ferrywire::{Lengths, MemoryLocation};
use pyo3::prelude::*;

use crate::errors::{OrRaise, usage};
use crate::integers::{Sizes, int64s};
use crate::options;
use crate::region::Region;
use crate::tensor::Framework;

/// A checked list of blocks between local and remote regions, made once and used by many transfers. The list keeps its
/// regions registered.
#[pyclass(frozen, module = "ferrywire")]
pub struct BlockList {
    pub list: ferrywire::BlockList,
    locals: Vec<Py<Region>>,
}

impl BlockList {
    /// The memory location and framework whose GPU work operations on the list come after. Regions without a framework
    /// do not matter. With two frameworks the current stream is ambiguous, unless the caller has named a stream
    /// (`given`).
    pub fn order(&self, py: Python<'_>, given: bool) -> PyResult<(MemoryLocation, Framework)> {
        let on_gpu = |region: &&Region| matches!(region.is_at(), MemoryLocation::Cuda(_));
        let all = || self.locals.iter().map(Py::get).filter(on_gpu);
        let Some(location) = all().next().map(Region::is_at) else {
            return Ok((self.locals[0].get().is_at(), Framework::Other));
        };
        if let Some(other) = all().map(Region::is_at).find(|other| *other != location) {
            let why = format!("the list has regions on {location} and {other}: make a list for each");
            return Err(usage(py, "blocks", why));
        }
        let mut named = all().map(|region| region.framework).filter(|each| *each != Framework::Other);
        let framework = named.next().unwrap_or(Framework::Other);
        match named.find(|other| *other != framework) {
            None => Ok((location, framework)),
            Some(_) if given => Ok((location, Framework::Other)),
            Some(other) => {
                let why = format!(
                    "the list has memory of {framework:?} and of {other:?}, each with a current stream of its own: \
                     pass a stream that comes after both, or make a list for each"
                );
                Err(usage(py, "stream", why))
            }
        }
    }

    /// Fails if a region is deregistered, or read-only and `to_be_written`.
    pub fn check(&self, py: Python<'_>, to_be_written: bool) -> PyResult<()> {
        let check = |region: &Py<Region>| {
            if to_be_written { region.get().target(py).map(drop) } else { region.get().source(py).map(drop) }
        };
        self.locals.iter().try_for_each(check)
    }
}

#[pymethods]
impl BlockList {
    /// Makes a list of blocks between `local` and `remote`. The offsets are int64 arrays (numpy, torch, array) of one
    /// length, in bytes; `sizes`, in bytes, is one number or such an array.
    ///
    /// Raises `UsageError` for arrays of another type, shape or length, for blocks outside of the regions, and for a
    /// region that is deregistered.
    #[new]
    fn new(
        local: &Bound<'_, Region>,
        remote: &Bound<'_, PyAny>,
        local_offsets: &Bound<'_, PyAny>,
        remote_offsets: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
    ) -> PyResult<BlockList> {
        let py = local.py();
        let here = int64s("local_offsets", local_offsets)?;
        let there = int64s("remote_offsets", remote_offsets)?;
        let sizes = Sizes::of(sizes)?;
        let (region, remote) = (local.get().source(py)?, options::remote("remote", remote)?.get());
        let list = py.detach(|| {
            let lengths = match &sizes {
                Sizes::Same(same) => Lengths::Same(*same),
                Sizes::Each(each) => Lengths::Each(each),
            };
            ferrywire::BlockList::from_offsets(&region, &remote.remote, &here, &there, lengths)
        });
        Ok(BlockList { list: list.or_raise(py)?, locals: vec![local.clone().unbind()] })
    }

    /// Makes one list of the blocks of several lists, so that one operation moves them and one notification follows
    /// them.
    ///
    /// Raises `UsageError` without lists, and for remote regions of different peers.
    #[staticmethod]
    fn join(py: Python<'_>, lists: Vec<Py<BlockList>>) -> PyResult<BlockList> {
        let parts: Vec<&ferrywire::BlockList> = lists.iter().map(|each| &each.get().list).collect();
        let list = py.detach(|| ferrywire::BlockList::join(&parts)).or_raise(py)?;
        let locals =
            lists.iter().flat_map(|each| each.get().locals.iter().map(|region| region.clone_ref(py)));
        Ok(BlockList { list, locals: locals.collect() })
    }

    fn __len__(&self) -> usize {
        self.list.len()
    }

    /// The total size of all blocks, in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.list.bytes()
    }

    fn __repr__(&self) -> String {
        format!("<ferrywire.BlockList of {} blocks, {} bytes>", self.list.len(), self.list.bytes())
    }
}
