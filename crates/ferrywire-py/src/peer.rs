//! [`Peer`]: the operations on a connected remote endpoint.
//!
//! Invariant: operations are posted without the interpreter's lock; each returns a [`Transfer`]. Read next:
//! `transfer.rs`; `stream.rs`, for operations in the order of a GPU's work.

use std::sync::Arc;

use ferrywire::{Error, MemoryLocation, TransferError};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::blocks::BlockList;
use crate::endpoint::CLOSE_SECONDS;
use crate::errors::{OrRaise, raised, usage};
use crate::integers::{Sizes, indices, int64s};
use crate::options::{message, perhaps, remote, unsigned, whole};
use crate::region::{Region, range};
use crate::shutdown::Shared;
use crate::stats;
use crate::stream::named;
use crate::tensor::Framework;
use crate::transfer::Transfer;
use crate::waiting::{PendingCall, aside, limit, overdue, sliced};
use crate::wakeup::{Wakeup, coroutine, itself, leave, left, pending_call};

/// A connected remote endpoint. When its last reference is gone, the connection is closed after what was posted has
/// been sent.
#[pyclass(frozen, weakref, module = "ferrywire")]
pub struct Peer {
    peer: ferrywire::Peer,
    shared: Arc<Shared>,
}

impl Peer {
    pub fn new(peer: ferrywire::Peer, shared: Arc<Shared>) -> Peer {
        Peer { peer, shared }
    }

    /// Posts an operation on a region, after the work that its stream has now.
    fn post(
        &self,
        py: Python<'_>,
        region: &Region,
        stream: Option<&Bound<'_, PyAny>>,
        operation: impl FnOnce(&ferrywire::Peer) -> Result<ferrywire::Transfer, TransferError> + Send,
    ) -> PyResult<Transfer> {
        self.post_in(py, (region.is_at(), region.framework), stream, operation)
    }

    /// Posts an operation on memory of this location and framework, after the work that the stream has now.
    fn post_in(
        &self,
        py: Python<'_>,
        (location, framework): (MemoryLocation, Framework),
        stream: Option<&Bound<'_, PyAny>>,
        operation: impl FnOnce(&ferrywire::Peer) -> Result<ferrywire::Transfer, TransferError> + Send,
    ) -> PyResult<Transfer> {
        let stream = named(py, location, framework, stream)?;
        let transfer = match &stream {
            None => py.detach(|| operation(&self.peer)),
            Some(stream) => {
                let ready = stream.ready(py)?;
                py.detach(|| operation(&self.peer.on_stream(ready)))
            }
        };
        Ok(Transfer::new(transfer.or_raise(py)?, location, framework, self.shared.clone()))
    }

    /// Parses `timeout` and returns the call that closes the peer.
    fn closing(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
    ) -> PyResult<impl FnOnce() -> ferrywire::Result<()> + Send + 'static> {
        let limit = limit(py, "timeout", timeout)?;
        let peer = self.peer.clone();
        Ok(move || match peer.close(limit) {
            // The peer closed first: the connection is closed, as the caller wanted.
            Err(Error::PeerClosed { .. } | Error::Closed) => Ok(()),
            outcome => outcome,
        })
    }
}

#[pymethods]
impl Peer {
    /// The peer's address and label, for messages.
    #[getter]
    fn name(&self) -> String {
        self.peer.name()
    }

    /// The label that the remote endpoint was opened with; empty without one.
    #[getter]
    fn label(&self) -> &str {
        self.peer.label()
    }

    /// The remote end of the control connection, as "host:port". If this end connected, it is the address on which the
    /// peer listens.
    #[getter]
    fn address(&self) -> String {
        self.peer.address().to_string()
    }

    /// The remote endpoint's identity, as hexadecimal digits. A restarted endpoint has a new one.
    #[getter]
    fn identity(&self) -> String {
        self.peer.identity().to_string()
    }

    /// Whether the peer runs on this host.
    #[getter]
    fn same_host(&self) -> bool {
        self.peer.same_host()
    }

    /// The exception by which the peer was lost, or None.
    #[getter]
    fn error(&self, py: Python<'_>) -> Option<PyErr> {
        self.peer.error().map(|error| raised(py, &error))
    }

    /// Writes `nbytes` bytes of `source` at `source_offset` to the peer's region `target` at `target_offset`. By
    /// default all bytes of `source` from the offset on. The transfer completes when the bytes are in the peer's
    /// memory; with `message` the peer then gets a notification. With `stream` the write starts after the stream's
    /// present work.
    ///
    /// Raises `UsageError` for a range outside of a region, a region that is deregistered or of another endpoint, or a
    /// stream that captures a CUDA graph; `Closed`, `PeerLost`, `PeerClosed`. The transfer raises these too, and
    /// `AccessRefused` if the peer has deregistered the region or holds too many unread notifications.
    #[pyo3(signature = (source, target, *, source_offset=0, target_offset=0, nbytes=None, message=None, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "Python passes each as a keyword")]
    fn write(
        &self,
        source: &Bound<'_, Region>,
        target: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = whole)] source_offset: i128,
        #[pyo3(from_py_with = whole)] target_offset: i128,
        #[pyo3(from_py_with = perhaps)] nbytes: Option<i128>,
        message: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        let (py, region) = (source.py(), source.get());
        let (from, nbytes) = range(py, "source_offset", source_offset, nbytes, region.len_bytes())?;
        let to = unsigned(py, "target_offset", target_offset)?;
        let (local, remote) = (region.source(py)?, &remote("target", target)?.get().remote);
        let message = message.map(self::message).transpose()?;
        self.post(py, region, stream, move |peer| match &message {
            None => peer.write(&local, from, remote, to, nbytes),
            Some(message) => peer.write_notify(&local, from, remote, to, nbytes, message),
        })
    }

    /// Reads `nbytes` bytes of the peer's region `source` at `source_offset` into `target` at `target_offset`. By
    /// default as many bytes as `target` has from the offset on. The transfer completes when the bytes are in `target`.
    /// With `stream` the read starts after the stream's present work.
    ///
    /// Raises `UsageError` for a range outside of a region, or a region that is read-only, deregistered or of another
    /// endpoint; `Closed`, `PeerLost`, `PeerClosed`. The transfer raises these too, and `AccessRefused` if the peer has
    /// deregistered the region.
    #[pyo3(signature = (target, source, *, target_offset=0, source_offset=0, nbytes=None, stream=None))]
    fn read(
        &self,
        target: &Bound<'_, Region>,
        source: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = whole)] target_offset: i128,
        #[pyo3(from_py_with = whole)] source_offset: i128,
        #[pyo3(from_py_with = perhaps)] nbytes: Option<i128>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        let (py, region) = (target.py(), target.get());
        let (to, nbytes) = range(py, "target_offset", target_offset, nbytes, region.len_bytes())?;
        let from = unsigned(py, "source_offset", source_offset)?;
        let (local, remote) = (region.target(py)?, &remote("source", source)?.get().remote);
        self.post(py, region, stream, move |peer| peer.read(&local, to, remote, from, nbytes))
    }

    /// Writes the blocks of a list as one operation: those that `indices` (int64) name, or all. The peer gets `message`
    /// as a notification once the bytes of all blocks are in its memory.
    ///
    /// Raises `UsageError` for an index outside of the list, and, without a `stream`, for a joined list whose memory
    /// belongs to two libraries with streams; and like `write`: `Closed`, `PeerLost`, `PeerClosed`.
    #[pyo3(signature = (blocks, indices=None, *, message=None, stream=None))]
    fn write_blocks(
        &self,
        py: Python<'_>,
        blocks: &BlockList,
        indices: Option<&Bound<'_, PyAny>>,
        message: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        blocks.check(py, false)?;
        let (order, chosen) = (blocks.order(py, stream.is_some())?, chosen(indices)?);
        let message = message.map(self::message).transpose()?;
        self.post_in(py, order, stream, |peer| {
            peer.write_blocks(&blocks.list, chosen.as_deref(), message.as_deref())
        })
    }

    /// Reads the blocks of a list as one operation: those that `indices` (int64) name, or all.
    ///
    /// Raises `UsageError` for an index outside of the list, and, without a `stream`, for a joined list whose memory
    /// belongs to two libraries with streams; and like `read`: `Closed`, `PeerLost`, `PeerClosed`.
    #[pyo3(signature = (blocks, indices=None, *, stream=None))]
    fn read_blocks(
        &self,
        py: Python<'_>,
        blocks: &BlockList,
        indices: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        blocks.check(py, true)?;
        let (order, chosen) = (blocks.order(py, stream.is_some())?, chosen(indices)?);
        self.post_in(py, order, stream, |peer| peer.read_blocks(&blocks.list, chosen.as_deref()))
    }

    /// Sends `nbytes` bytes of `source` at `offset` as a message with a tag. Messages with one tag match the peer's
    /// receives with that tag in the order in which both were posted.
    ///
    /// Raises `UsageError` for a range outside of the region or a region that is deregistered; `Closed`, `PeerLost`,
    /// `PeerClosed`. The transfer raises these too.
    #[pyo3(signature = (tag, source, *, offset=0, nbytes=None, stream=None))]
    fn send(
        &self,
        #[pyo3(from_py_with = whole)] tag: i128,
        source: &Bound<'_, Region>,
        #[pyo3(from_py_with = whole)] offset: i128,
        #[pyo3(from_py_with = perhaps)] nbytes: Option<i128>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        let (py, region) = (source.py(), source.get());
        let tag = unsigned(py, "tag", tag)?;
        let (offset, nbytes) = range(py, "offset", offset, nbytes, region.len_bytes())?;
        let local = region.source(py)?;
        self.post(py, region, stream, |peer| peer.send(tag, &local, offset, nbytes))
    }

    /// Receives the next message with this tag into `target` at `offset`. The transfer's outcome is the message's
    /// length in bytes.
    ///
    /// An abandoned receive still takes its message: `cancel()` it and wait for its end before you post another with
    /// the tag.
    ///
    /// Raises `UsageError` for a range outside of the region, or a region that is read-only or deregistered; `Closed`,
    /// `PeerLost`, `PeerClosed`. The transfer raises these too, and `Truncated` if the message is longer than `nbytes`.
    #[pyo3(signature = (tag, target, *, offset=0, nbytes=None, stream=None))]
    fn recv(
        &self,
        #[pyo3(from_py_with = whole)] tag: i128,
        target: &Bound<'_, Region>,
        #[pyo3(from_py_with = whole)] offset: i128,
        #[pyo3(from_py_with = perhaps)] nbytes: Option<i128>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        let (py, region) = (target.py(), target.get());
        let tag = unsigned(py, "tag", tag)?;
        let (offset, nbytes) = range(py, "offset", offset, nbytes, region.len_bytes())?;
        let local = region.target(py)?;
        self.post(py, region, stream, |peer| peer.recv(tag, &local, offset, nbytes))
    }

    /// Sends one message gathered from pieces of a region. `offsets` is an int64 array in bytes; `sizes`, in bytes, is
    /// one number or such an array.
    ///
    /// Raises `UsageError` for arrays of different length; and like `send`: `Closed`, `PeerLost`, `PeerClosed`.
    #[pyo3(signature = (tag, source, offsets, sizes, *, stream=None))]
    fn send_blocks(
        &self,
        #[pyo3(from_py_with = whole)] tag: i128,
        source: &Bound<'_, Region>,
        offsets: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        let (py, region) = (source.py(), source.get());
        let tag = unsigned(py, "tag", tag)?;
        let (pieces, local) = (pieces(offsets, sizes)?, region.source(py)?);
        self.post(py, region, stream, |peer| peer.send_blocks(tag, &local, &pieces))
    }

    /// Receives one message and scatters it over pieces of a region. `offsets` is an int64 array in bytes; `sizes`, in
    /// bytes, is one number or such an array.
    ///
    /// Raises `UsageError` for arrays of different length; and like `recv`: `Closed`, `PeerLost`, `PeerClosed`.
    #[pyo3(signature = (tag, target, offsets, sizes, *, stream=None))]
    fn recv_blocks(
        &self,
        #[pyo3(from_py_with = whole)] tag: i128,
        target: &Bound<'_, Region>,
        offsets: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        let (py, region) = (target.py(), target.get());
        let tag = unsigned(py, "tag", tag)?;
        let (pieces, local) = (pieces(offsets, sizes)?, region.target(py)?);
        self.post(py, region, stream, |peer| peer.recv_blocks(tag, &local, &pieces))
    }

    /// Delivers a small message of at most `NOTIFY_BYTES_MAX` bytes as a notification, after everything posted to this
    /// peer before it.
    ///
    /// Raises `UsageError` for a longer message; `Closed`, `PeerLost`, `PeerClosed`. The transfer raises these too, and
    /// `AccessRefused` if the peer holds too many unread notifications.
    fn notify(&self, message: &Bound<'_, PyAny>) -> PyResult<Transfer> {
        let (py, message) = (message.py(), self::message(message)?);
        let transfer = py.detach(|| self.peer.notify(&message)).or_raise(py)?;
        Ok(Transfer::of_host(transfer, self.shared.clone()))
    }

    /// Returns the next notification, or None. Notifications that arrived before the peer was lost are still returned.
    ///
    /// Raises `Closed`, `PeerLost`, `PeerClosed` once there are no more.
    fn poll_notification<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let message = py.detach(|| self.peer.poll_notification()).or_raise(py)?;
        Ok(message.map(|message| PyBytes::new(py, &message)))
    }

    /// Waits for the next notification, at most `timeout` seconds.
    ///
    /// Raises `TimedOut`; `Closed`, `PeerLost`, `PeerClosed` once there are no more.
    #[pyo3(signature = (timeout=None))]
    fn wait_notification<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Bound<'py, PyBytes>> {
        let limit = limit(py, "timeout", timeout)?;
        let message = sliced(py, limit, |slice| self.peer.wait_notification(slice))?;
        Ok(PyBytes::new(py, &message))
    }

    /// Like `wait_notification`, for `await`. Raises `TimedOut`, `Closed`, `PeerLost` and `PeerClosed` as
    /// `wait_notification` does.
    #[pyo3(signature = (timeout=None))]
    fn wait_notification_async<'py>(
        slf: &Bound<'py, Self>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        coroutine(slf, "wait_notification", timeout)
    }

    fn _arm(&self, wakeup: &Wakeup) {
        self.peer.arm(&wakeup.wakeup);
    }

    fn _overdue<'py>(&self, py: Python<'py>, waited: f64) -> PyResult<Bound<'py, PyBytes>> {
        let message = overdue(py, waited, |slice| self.peer.wait_notification(slice))?;
        Ok(PyBytes::new(py, &message))
    }

    /// Counters and the configuration in force, as a dictionary; sizes in bytes, times in seconds.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats::dict(py, &py.detach(|| self.peer.stats()))
    }

    /// Finishes on both sides what was posted, then closes the connection. The peer is closed also when this raises.
    ///
    /// Raises `TimedOut` if the peer has not finished in `timeout` seconds, and `PeerLost` if it was lost or closed
    /// before it had finished.
    #[pyo3(signature = (timeout=5.0))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        aside(py, self.closing(py, timeout)?)
    }

    fn _begin_close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<PendingCall> {
        Ok(PendingCall::begin(py, self.closing(py, timeout)?, |py, ()| Ok(py.None()))?)
    }

    /// Like `close`, for `await`. Raises `TimedOut` and `PeerLost` as `close` does.
    #[pyo3(signature = (timeout=5.0))]
    fn close_async<'py>(slf: &Bound<'py, Self>, timeout: Option<f64>) -> PyResult<Bound<'py, PyAny>> {
        pending_call(slf, "_begin_close", &[timeout.into_bound_py_any(slf.py())?])
    }

    fn __aenter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        itself(slf)
    }

    #[pyo3(signature = (*exception))]
    fn __aexit__<'py>(
        slf: &Bound<'py, Self>,
        exception: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, PyAny>> {
        leave(slf, exception)
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*exception))]
    fn __exit__(&self, py: Python<'_>, exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        left(py, exception, self.close(py, Some(CLOSE_SECONDS)))
    }

    fn __repr__(&self) -> String {
        let state = self.peer.error().map_or(String::new(), |error| format!(": {error}"));
        format!("<ferrywire.Peer {}{state}>", self.peer.name())
    }
}

fn chosen(list: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Vec<u32>>> {
    list.map(|list| indices("indices", list)).transpose()
}

fn pieces(offsets: &Bound<'_, PyAny>, sizes: &Bound<'_, PyAny>) -> PyResult<Vec<(u64, u64)>> {
    let py = offsets.py();
    let offsets = int64s("offsets", offsets)?;
    let sizes = match Sizes::of(sizes)? {
        Sizes::Same(same) => {
            return offsets.into_iter().map(|at| Ok((unsigned(py, "offsets", at)?, same))).collect();
        }
        Sizes::Each(sizes) => sizes,
    };
    if offsets.len() != sizes.len() {
        let why =
            format!("{} offsets and {} sizes: both lists must be of one length", offsets.len(), sizes.len());
        return Err(usage(py, "pieces", why));
    }
    let pairs = offsets.into_iter().zip(sizes);
    pairs
        .map(|(offset, bytes)| Ok((unsigned(py, "offsets", offset)?, unsigned(py, "sizes", bytes)?)))
        .collect()
}
