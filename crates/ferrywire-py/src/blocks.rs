//! [`BlockList`]: many blocks between regions, from arrays of offsets.
//!
//! Read next: `integers.rs`, how the arrays are read; `peer.rs`, who moves the blocks.

use ferrywire::{Lengths, MemoryLocation};
use pyo3::prelude::*;

use crate::errors::{OrRaise, usage};
use crate::integers::{Sizes, int64s};
use crate::options;
use crate::region::Region;
use crate::tensor::Framework;

/// A checked list of blocks between local and remote regions, made once and used many times. The regions stay
/// registered as long as the list is there.
#[pyclass(frozen, module = "ferrywire")]
pub struct BlockList {
    pub list: ferrywire::BlockList,
    locals: Vec<Py<Region>>,
}

impl BlockList {
    /// Whose GPU work operations on the list come after: where its regions are, and the framework that has a current
    /// stream, whatever memory of none lies beside it. Of two frameworks nobody knows which, unless a stream is `given`.
    pub fn order(&self, py: Python<'_>, given: bool) -> PyResult<(MemoryLocation, Framework)> {
        let on_gpu = |region: &&Region| matches!(region.is_at(), MemoryLocation::Cuda(_));
        let all = || self.locals.iter().map(Py::get).filter(on_gpu);
        let Some(location) = all().next().map(Region::is_at) else {
            return Ok((self.locals[0].get().is_at(), Framework::Other));
        };
        if let Some(other) = all().map(Region::is_at).find(|other| *other != location) {
            let why = format!("its regions are on {location} and {other}: make a list for each");
            return Err(usage(py, "blocks", why));
        }
        let mut named = all().map(|region| region.framework).filter(|each| *each != Framework::Other);
        let framework = named.next().unwrap_or(Framework::Other);
        match named.find(|other| *other != framework) {
            None => Ok((location, framework)),
            Some(_) if given => Ok((location, Framework::Other)),
            Some(other) => {
                let why = format!(
                    "the list has memory of {framework:?} and of {other:?}, each with a current stream of its own: name \
                     one that comes after both, or make a list for each"
                );
                Err(usage(py, "stream", why))
            }
        }
    }

    /// Refuses regions that are gone, or that may not be written to.
    pub fn check(&self, py: Python<'_>, to_be_written: bool) -> PyResult<()> {
        let check = |region: &Py<Region>| match to_be_written {
            true => region.get().target(py).map(drop),
            false => region.get().source(py).map(drop),
        };
        self.locals.iter().try_for_each(check)
    }
}

#[pymethods]
impl BlockList {
    /// Offsets are int64 arrays (numpy, torch, array) of one length, in bytes; `sizes` is one number or such an array.
    ///
    /// Raises `UsageError` for arrays of another type, shape or length, blocks outside of the regions, and a region that is
    /// deregistered.
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

    /// All blocks of several lists as one: one operation moves them, and one notification follows them.
    ///
    /// Raises `UsageError` for no lists at all, and for remote regions of different peers.
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

    /// Bytes of all its blocks.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.list.bytes()
    }

    fn __repr__(&self) -> String {
        format!("<ferrywire.BlockList of {} blocks, {} bytes>", self.list.len(), self.list.bytes())
    }
}
