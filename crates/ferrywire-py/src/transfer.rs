//! [`Transfer`]: a posted operation.
//!
//! Read next: `waiting.rs`; `python/ferrywire/_aio.py`, for `await`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrywire::{MemoryLocation, TransferError};
use ferrywire_memory::cuda::{CudaGpu, RawStream};
use pyo3::prelude::*;

use crate::errors::{OrRaise, usage};
use crate::shutdown::Shared;
use crate::stream;
use crate::tensor::Framework;
use crate::waiting::{limit, overdue, sliced};
use crate::wakeup::{Wakeup, coroutine};

/// A posted operation. Dropping the transfer does not end the operation; its memory stays alive until the operation
/// ends.
#[pyclass(frozen, weakref, module = "ferrywire")]
pub struct Transfer {
    transfer: ferrywire::Transfer,
    location: MemoryLocation,
    framework: Framework,
    _shared: Arc<Shared>,
}

impl Transfer {
    pub fn new(
        transfer: ferrywire::Transfer,
        location: MemoryLocation,
        framework: Framework,
        shared: Arc<Shared>,
    ) -> Transfer {
        Transfer { transfer, location, framework, _shared: shared }
    }

    pub fn of_host(transfer: ferrywire::Transfer, shared: Arc<Shared>) -> Transfer {
        Transfer::new(transfer, MemoryLocation::Host, Framework::Other, shared)
    }
}

#[pymethods]
impl Transfer {
    /// Returns None while the operation is in flight, then the number of bytes moved; for `recv`, the message's length.
    ///
    /// Raises the operation's error: `AccessRefused`, `PeerLost`, `PeerClosed`, `Closed`, `Cancelled`, `Truncated`,
    /// `UsageError`, `GpuError`, `LocalError`.
    fn poll(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        py.detach(|| self.transfer.poll()).transpose().or_raise(py)
    }

    /// Whether the operation has ended, with success or an error.
    fn done(&self, py: Python<'_>) -> bool {
        py.detach(|| self.transfer.poll()).is_some()
    }

    /// Waits for the end and returns the outcome, as `poll` does. `timeout` is the longest time in all, `stall_timeout`
    /// the longest time without progress, both in seconds; None is no limit.
    ///
    /// Raises `TimedOut`, after which the operation is still in flight and can be waited for again or cancelled;
    /// otherwise the exceptions of `poll`.
    #[pyo3(signature = (timeout=None, *, stall_timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>, stall_timeout: Option<f64>) -> PyResult<u64> {
        let whole = limit(py, "timeout", timeout)?;
        let stall = limit(py, "stall_timeout", stall_timeout)?;
        if whole.is_zero()
            && let Some(outcome) = self.poll(py)?
        {
            return Ok(outcome);
        }
        let mut moved = (self.transfer.progress_counter(), Instant::now());
        let outcome = sliced(py, whole, |slice| {
            let outcome = self.transfer.wait_for(slice.min(stall), Duration::MAX);
            let now = self.transfer.progress_counter();
            if now != moved.0 {
                moved = (now, Instant::now());
            }
            match outcome {
                // The wait is made in slices, and only a stall ends it.
                Err(TransferError::TimedOut { what, peer, .. }) if moved.1.elapsed() >= stall => {
                    let waited = if stall.is_zero() { stall } else { moved.1.elapsed() };
                    Ok(Err(TransferError::Stalled { what, peer, waited }))
                }
                outcome => outcome.map(Ok),
            }
        });
        outcome?.or_raise(py)
    }

    /// Like `wait`, for `await`; the event loop runs meanwhile. Raises `TimedOut`, and the exceptions of `poll`.
    #[pyo3(signature = (timeout=None))]
    fn wait_async<'py>(slf: &Bound<'py, Self>, timeout: Option<f64>) -> PyResult<Bound<'py, PyAny>> {
        coroutine(slf, "wait_transfer", timeout)
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        coroutine(slf, "wait_transfer", None)?.call_method0("__await__")
    }

    fn _arm(&self, wakeup: &Wakeup) {
        self.transfer.arm(&wakeup.wakeup);
    }

    fn _overdue(&self, py: Python<'_>, waited: f64) -> PyResult<u64> {
        overdue(py, waited, |slice| self.transfer.wait_for(slice, Duration::MAX))
    }

    /// Makes a CUDA stream wait, on the device, until the transfer has ended: work launched in the stream after this
    /// call finds the received bytes. Without `stream` it is the current stream of the library that the tensor belongs
    /// to; for host memory no stream waits then. With host memory the stream must be an object that names its GPU. Free
    /// no GPU memory while a stream waits (`empty_cache`): the driver would wait for the stream.
    ///
    /// Raises `GpuError` if the driver refuses; `UsageError` for an object that is not a stream, for a stream that
    /// captures a CUDA graph, whose replays would not wait, and, without a stream, for GPU memory of a library that has no
    /// current stream.
    #[pyo3(signature = (stream=None))]
    fn block_stream(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let Some(named) = stream::to_hold(py, self.location, self.framework, stream)? else {
            return Ok(());
        };
        py.detach(|| -> ferrywire::Result<()> {
            let gpu = CudaGpu::open(named.gpu)?;
            // SAFETY: the stream's library or the caller guarantees that the stream is alive; the driver
            // reports a wrong one as an error.
            Ok(unsafe { self.transfer.block_raw_stream(&gpu, named.raw as RawStream) }?)
        })
        .or_raise(py)
    }

    /// The number of bytes that have arrived so far.
    #[getter]
    fn bytes_moved(&self) -> u64 {
        self.transfer.bytes_moved()
    }

    /// Requests an early end of the operation. Waiting for it then raises `Cancelled`, or succeeds if all
    /// bytes had arrived. If the peer is lost or closed before it has reported what it placed, waiting for a
    /// write raises that error: bytes of it may land until the peer's end notices.
    fn cancel(&self, py: Python<'_>) {
        py.detach(|| self.transfer.cancel());
    }

    fn __repr__(&self) -> String {
        format!("<ferrywire.{:?}>", self.transfer)
    }
}

/// Waits until one of several transfers with one peer has ended, with success or an error, and returns its index: the
/// lowest, if several have ended. `poll` of that transfer returns its outcome. Applications use this to keep a number
/// of transfers in flight. `timeout` is the longest time in all, in seconds; 0 does not wait.
///
/// Raises `TimedOut`, after which all transfers are still in flight; `UsageError` for an empty sequence, for other
/// objects, and for transfers of several peers of which none has ended.
#[pyfunction]
#[pyo3(signature = (transfers, timeout=None))]
pub fn wait_any(transfers: &Bound<'_, PyAny>, timeout: Option<f64>) -> PyResult<usize> {
    let py = transfers.py();
    let whole = limit(py, "timeout", timeout)?;
    let transfers = listed(transfers)?;
    sliced(py, whole, |slice| {
        let each = transfers.iter().map(|transfer| &transfer.get().transfer);
        ferrywire::Transfer::wait_any_for(each, slice, Duration::MAX)
    })
}

fn listed(transfers: &Bound<'_, PyAny>) -> PyResult<Vec<Py<Transfer>>> {
    let refused = |why: String| usage(transfers.py(), "transfers", why);
    let Ok(entries) = transfers.try_iter() else {
        let kind = transfers.get_type().qualname()?;
        return Err(refused(format!("{kind} is not a sequence of transfers: try [x]")));
    };
    let mut list = Vec::new();
    for (at, entry) in entries.enumerate() {
        let entry = entry?;
        let Ok(transfer) = entry.cast::<Transfer>() else {
            let kind = entry.get_type().qualname()?;
            return Err(refused(format!("entry {at} is {kind}, not a Transfer")));
        };
        list.push(transfer.clone().unbind());
    }
    Ok(list)
}
