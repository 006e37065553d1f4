//! A posted operation, as its caller holds it.
//!
//! Invariant: dropping a [`Transfer`] does not end the operation.
//! Read next: `../core/operation.rs`, its state.

use super::peer::Connection;
use super::wakeup::Wakeup;
use crate::core::operation::Op;
use crate::core::ordering::Gate;
use crate::core::peer::PeerState;
use crate::error::{Error, Result, TransferError};
use ferrywire_memory::cuda::{CudaGpu, CudaStream, RawStream};
use ferrywire_memory::sim::SimStream;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A posted operation. Dropping the handle lets the operation continue.
///
/// The memory of a transfer stays registered, and alive if the engine owns it, until the operation ends.
#[derive(Clone)]
pub struct Transfer {
    pub(crate) op: Arc<Op>,
    pub(crate) connection: Arc<Connection>,
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Transfer({} {} of {} bytes)", self.op.verb(), self.op.moved(), self.op.total)
    }
}

impl Transfer {
    /// The outcome, or `None` while the transfer is in flight. Polls the engine where no thread does.
    ///
    /// The value is the number of bytes moved; for `recv`, the length of the message.
    ///
    /// # Errors
    /// The transfer's own error, inside the `Some`.
    pub fn poll(&self) -> Option<Result<u64, TransferError>> {
        self.outcome().or_else(|| {
            self.connection.nudge();
            self.outcome()
        })
    }

    /// The outcome, or an error if the operation never ends.
    fn outcome(&self) -> Option<Result<u64, TransferError>> {
        let elsewhere = || self.connection.context().origin.check().err().map(|forked| Err(forked.into()));
        let outcome =
            self.op.outcome().or_else(|| self.peer().lost_to_a_call().map(Err)).or_else(elsewhere)?;
        if let Err(error) = &outcome {
            self.peer().note_told(error);
        }
        Some(outcome.map_err(TransferError::from))
    }

    /// Waits until the transfer ends. `stall_timeout` is the longest time without progress.
    ///
    /// # Errors
    /// The transfer's own error, or [`TransferError::Stalled`]: then the transfer is still in flight, and can be
    /// waited for again or cancelled. After the transfer's own error nothing touches its memory, except a
    /// call of a plugin that never returns ([`LossCause::CallHangs`](crate::LossCause::CallHangs)).
    pub fn wait(&self, stall_timeout: Duration) -> Result<u64, TransferError> {
        self.wait_for(Duration::MAX, stall_timeout)
    }

    /// Waits until the transfer ends, for at most `timeout`, and for at most `stall_timeout` without progress. Time in
    /// which the process is stopped counts towards `timeout`.
    ///
    /// # Errors
    /// As for [`Transfer::wait`], and [`TransferError::TimedOut`]: then the transfer is still in flight too.
    pub fn wait_for(&self, timeout: Duration, stall_timeout: Duration) -> Result<u64, TransferError> {
        // Without a timeout the clock is not read.
        let until = (timeout < Duration::MAX).then(|| self.peer().now().saturating_add(timeout));
        let mut last_progress = self.op.progress_counter();
        loop {
            if let Some(outcome) = self.outcome() {
                return outcome;
            }
            let left = until.map_or(Duration::MAX, |until| until.saturating_sub(self.peer().now()));
            if left.is_zero() {
                let timed_out = || {
                    Err(TransferError::TimedOut { what: self.describe(), peer: self.peer_named(), timeout })
                };
                // A caller that polls with a zero timeout may be the only thread that polls.
                return self.poll().unwrap_or_else(timed_out);
            }
            let ended = self.connection.wait(
                stall_timeout.min(left),
                |handle| self.op.wake_at_end(handle),
                |handle| self.op.forget_waiter(handle),
                || self.outcome().is_some(),
            );
            let now = self.op.progress_counter();
            if !ended && now == last_progress && stall_timeout <= left {
                return Err(TransferError::Stalled {
                    what: self.describe(),
                    peer: self.peer_named(),
                    waited: stall_timeout,
                });
            }
            last_progress = now;
        }
    }

    /// Waits until one of several transfers with one peer has ended, with success or not. Returns its index
    /// in `transfers`; [`Transfer::poll`] then returns its outcome. Callers that keep several transfers in
    /// flight use this. `stall_timeout` is the longest
    /// time without progress of any of them.
    ///
    /// # Errors
    /// [`TransferError::Stalled`]: then all transfers are still in flight. [`TransferError::Invalid`] if there are none, or
    /// they are of several peers and none has ended.
    pub fn wait_any<'a>(
        transfers: impl IntoIterator<Item = &'a Transfer, IntoIter: Clone>,
        stall_timeout: Duration,
    ) -> Result<usize, TransferError> {
        Transfer::wait_any_for(transfers, Duration::MAX, stall_timeout)
    }

    /// Waits as [`Transfer::wait_any`] does, for at most `timeout`, and for at most `stall_timeout` without progress of
    /// any transfer. A `timeout` of zero polls without waiting.
    ///
    /// # Errors
    /// As for [`Transfer::wait_any`], and [`TransferError::TimedOut`]: then all transfers are still in flight too.
    pub fn wait_any_for<'a>(
        transfers: impl IntoIterator<Item = &'a Transfer, IntoIter: Clone>,
        timeout: Duration,
        stall_timeout: Duration,
    ) -> Result<usize, TransferError> {
        let transfers = transfers.into_iter();
        let Some(first) = transfers.clone().next() else {
            return Err(Error::invalid("transfers", "the list is empty: give at least one").into());
        };
        let ended = || transfers.clone().position(|transfer| transfer.op.ended());
        let lost = || first.outcome().is_some().then_some(0);
        let progress = || {
            transfers.clone().fold(0, |sum: u64, transfer| sum.wrapping_add(transfer.op.progress_counter()))
        };
        // A caller with many transfers in flight mostly finds an ended one among the first, and then neither reads the
        // clock nor looks at the others.
        if let Some(at) = ended().or_else(lost) {
            return Ok(at);
        }
        if let Some(other) = transfers.clone().find(|other| !first.has_peer_of(other)) {
            let why = format!(
                "the transfers are of several peers, {} and {}: give transfers of one peer",
                first.peer().name(),
                other.peer().name()
            );
            return Err(Error::invalid("transfers", why).into());
        }
        let until = (timeout < Duration::MAX).then(|| first.peer().now().saturating_add(timeout));
        let mut before = progress();
        loop {
            let left = until.map_or(Duration::MAX, |until| until.saturating_sub(first.peer().now()));
            if left.is_zero() {
                first.connection.nudge();
                let timed_out = || {
                    let (what, peer) = (first.describe(), first.peer_named());
                    TransferError::TimedOut { what, peer, timeout }
                };
                return ended().or_else(lost).ok_or_else(timed_out);
            }
            let in_time = first.connection.wait(
                stall_timeout.min(left),
                |handle| transfers.clone().for_each(|transfer| transfer.op.wake_at_end(handle.clone())),
                |handle| transfers.clone().for_each(|transfer| transfer.op.forget_waiter(handle)),
                || ended().or_else(lost).is_some(),
            );
            if let Some(at) = ended().or_else(lost) {
                return Ok(at);
            }
            let now = progress();
            if !in_time && now == before && stall_timeout <= left {
                return Err(TransferError::Stalled {
                    what: first.describe(),
                    peer: first.peer_named(),
                    waited: stall_timeout,
                });
            }
            before = now;
        }
    }

    /// Makes `wakeup` readable once the transfer has ended, or at once if it already has. Arming twice has no
    /// further effect. Other transfers are not slowed down.
    pub fn arm(&self, wakeup: &Wakeup) {
        if self.connection.context().origin.is_elsewhere() {
            return wakeup.wake();
        }
        self.peer().wake_at_loss(wakeup.handle());
        self.op.wake_at_end(wakeup.handle_on(self.peer().home()));
    }

    /// Makes a GPU stream wait, on the device, until the transfer has ended. Work enqueued later sees the
    /// received bytes. The stream also continues after a failure, which the outcome shows. It waits for ever
    /// only if a plugin call never returns.
    ///
    /// While a stream waits, no GPU memory may be freed or unpinned in the process (`cudaFree`, PyTorch's
    /// `empty_cache`): the driver would wait for the stream, and block the threads that end the transfer. A
    /// copy between host and GPU that is enqueued behind the wait delays other copies, including those of
    /// transfers: the hardware has few queues for copies (8 each way unless
    /// `CUDA_DEVICE_MAX_COPY_CONNECTIONS` is set, up to 32). So enqueue kernels behind the wait, and copies
    /// after the transfer has ended.
    ///
    /// If waiting streams fill all queues of the multiprocessors, other kernels are blocked behind the wait:
    /// some dozens of streams do, and with `CUDA_DEVICE_MAX_CONNECTIONS=1` a single one. Over a plugin or
    /// devmem this blocks every gather on the GPU: wait for those transfers on the host, or they wait for the
    /// stream in turn. Over TCP it blocks short copies, since the driver lets the multiprocessors copy 24 KiB
    /// and less to a GPU; while a stream waits, ferrywire copies them as rectangles, which copy engines do,
    /// except a single byte. (The whole was tested on a simulated driver; on an H200, only each call
    /// separately.)
    ///
    /// # Errors
    /// [`TransferError::Cuda`] if the stream captures a CUDA graph, whose replays would not wait, or if the driver
    /// fails; the stream then does not wait.
    pub fn block_stream(&self, stream: &CudaStream) -> Result<(), TransferError> {
        // SAFETY: `stream` is borrowed, so it is live.
        unsafe { self.block_raw_stream(stream.gpu(), stream.raw()) }
    }

    /// Makes a stream of another library wait, such as PyTorch's, as [`Transfer::block_stream`] does. Null is
    /// the default stream.
    ///
    /// # Errors
    /// [`TransferError::Cuda`] if the stream captures a CUDA graph, whose replays would not wait, or if the driver
    /// fails; the stream then does not wait.
    ///
    /// # Safety
    /// `stream` is a live stream of this GPU's primary context, or null.
    pub unsafe fn block_raw_stream(
        &self,
        gpu: &Arc<CudaGpu>,
        stream: RawStream,
    ) -> Result<(), TransferError> {
        self.connection.context().origin.check()?;
        // SAFETY: promised by the caller of this function.
        let gate = unsafe { self.connection.context().gates.block(gpu, stream) }?;
        self.op.open_at_end(gate);
        Ok(())
    }

    /// Makes a stream of a simulated GPU wait, as [`Transfer::block_stream`] does.
    ///
    /// # Errors
    /// The error of a stream that has failed.
    pub fn block_sim_stream(&self, stream: &SimStream) -> Result<(), TransferError> {
        self.connection.context().origin.check()?;
        self.op.open_at_end(Gate::Sim(stream.hold()?));
        Ok(())
    }

    /// Bytes that have arrived so far. The count grows by up to one chunk at a time.
    pub fn bytes_moved(&self) -> u64 {
        self.op.moved()
    }

    /// A counter that changes while the transfer makes progress, even within a chunk. Callers that wait in
    /// slices use it for a stall timeout of their own.
    pub fn progress_counter(&self) -> u64 {
        self.op.progress_counter()
    }

    /// Requests an early end of the transfer. Wait for the transfer afterwards: the outcome is
    /// [`TransferError::Cancelled`], or success if all bytes had arrived. If the peer is lost or closed before it has reported
    /// what it placed, a write ends with that error: bytes of it may land until the peer's end notices.
    pub fn cancel(&self) {
        if !self.connection.context().origin.is_elsewhere() {
            self.connection.cancel(&self.op);
        }
    }

    fn peer(&self) -> &Arc<PeerState> {
        &self.connection.state
    }

    fn has_peer_of(&self, other: &Transfer) -> bool {
        // Clones of a peer share its connection, so most transfers need one comparison.
        Arc::ptr_eq(&self.connection, &other.connection) || Arc::ptr_eq(self.peer(), other.peer())
    }

    fn peer_named(&self) -> Option<String> {
        Some(self.peer().name().to_string())
    }

    fn describe(&self) -> String {
        format!(
            "{} with {}: {} of {} bytes moved; {}",
            self.op.verb(),
            self.peer().name(),
            self.op.moved(),
            self.op.total,
            self.peer().describe()
        )
    }
}
