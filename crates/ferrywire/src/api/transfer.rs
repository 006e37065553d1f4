//! An operation as its caller sees it.
//!
//! Read next: `../core/operation.rs`, its state.

use super::peer::Connection;
use super::wakeup::Wakeup;
use crate::core::operation::Op;
use crate::core::ordering::Gate;
use crate::core::peer::PeerState;
use crate::error::{Error, Result};
use ferrywire_memory::cuda::{CudaGpu, CudaStream, RawStream};
use ferrywire_memory::sim::SimStream;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// An operation as its caller sees it. Dropping it lets the operation run on.
///
/// The memory it uses stays registered, and alive if the engine owns it, until the operation ends.
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
    /// The outcome, or `None` while it is under way. Drives progress a little where needed.
    ///
    /// The value is the number of bytes moved; for `recv`, the length of the message.
    pub fn poll(&self) -> Option<Result<u64>> {
        self.outcome().or_else(|| {
            self.connection.nudge();
            self.outcome()
        })
    }

    /// How it ended, or that it never will.
    fn outcome(&self) -> Option<Result<u64>> {
        let elsewhere = || self.connection.context().origin.check().err().map(|forked| Err(forked.into()));
        self.op.outcome().or_else(|| self.peer().lost_to_a_call().map(Err)).or_else(elsewhere)
    }

    /// Waits for the end; `stall_timeout` is the longest time without progress.
    ///
    /// # Errors
    /// The operation's own error, or [`Error::Stalled`]: then it is still under way, and can be waited
    /// for again or cancelled.
    pub fn wait(&self, stall_timeout: Duration) -> Result<u64> {
        self.wait_for(Duration::MAX, stall_timeout)
    }

    /// Waits for the end, at most `total` altogether and `stall` without progress. Time in which the process is
    /// stopped counts towards `total`.
    ///
    /// # Errors
    /// As [`Transfer::wait`], and [`Error::TimedOut`]: then too it is still under way.
    pub fn wait_for(&self, total: Duration, stall: Duration) -> Result<u64> {
        // Without a limit on the whole nobody asks for the time.
        let until = (total < Duration::MAX).then(|| self.peer().now().saturating_add(total));
        let mut stirred = self.op.progress_counter();
        loop {
            if let Some(outcome) = self.outcome() {
                return outcome;
            }
            let left = until.map_or(Duration::MAX, |until| until.saturating_sub(self.peer().now()));
            if left.is_zero() {
                let timed_out =
                    || Err(Error::TimedOut { what: self.describe(), peer: self.peer_named(), limit: total });
                // A caller that asks again and again without waiting may be the only one that polls.
                return self.poll().unwrap_or_else(timed_out);
            }
            let ended = self.connection.wait(
                stall.min(left),
                |handle| self.op.wake_at_end(handle),
                |handle| self.op.forget_waiter(handle),
                || self.outcome().is_some(),
            );
            let now = self.op.progress_counter();
            if !ended && now == stirred && stall <= left {
                return Err(Error::Stalled { what: self.describe(), peer: self.peer_named(), waited: stall });
            }
            stirred = now;
        }
    }

    /// Waits until one of several transfers with one peer has ended, well or not, and gives its place among them:
    /// for those who keep a number of them in flight. `stall_timeout` is the longest time in which none of them moves.
    ///
    /// # Errors
    /// [`Error::Stalled`]: then all are still under way. [`Error::Invalid`] when there are none, or of several peers.
    pub fn wait_any<'a>(
        transfers: impl IntoIterator<Item = &'a Transfer, IntoIter: Clone>,
        stall_timeout: Duration,
    ) -> Result<usize> {
        Transfer::wait_any_for(transfers, Duration::MAX, stall_timeout)
    }

    /// Waits as [`Transfer::wait_any`] does, at most `total` altogether and `stall` in which none of them moves; a `total` of zero asks without
    /// waiting.
    ///
    /// # Errors
    /// As [`Transfer::wait_any`], and [`Error::TimedOut`]: then too all are still under way.
    pub fn wait_any_for<'a>(
        transfers: impl IntoIterator<Item = &'a Transfer, IntoIter: Clone>,
        total: Duration,
        stall: Duration,
    ) -> Result<usize> {
        let transfers = transfers.into_iter();
        let Some(first) = transfers.clone().next() else {
            return Err(Error::invalid("transfers", "there are none: give one at least"));
        };
        if let Some(other) = transfers.clone().find(|other| !Arc::ptr_eq(first.peer(), other.peer())) {
            let why = format!(
                "they are of several peers, {} and {}: give those of one",
                first.peer().name(),
                other.peer().name()
            );
            return Err(Error::invalid("transfers", why));
        }
        let ended = || transfers.clone().position(|transfer| transfer.op.ended());
        let lost = || first.outcome().is_some().then_some(0);
        let stirred = || {
            transfers.clone().fold(0, |sum: u64, transfer| sum.wrapping_add(transfer.op.progress_counter()))
        };
        let until = (total < Duration::MAX).then(|| first.peer().now().saturating_add(total));
        let mut before = stirred();
        loop {
            if let Some(at) = ended().or_else(lost) {
                return Ok(at);
            }
            let left = until.map_or(Duration::MAX, |until| until.saturating_sub(first.peer().now()));
            if left.is_zero() {
                first.connection.nudge();
                let timed_out = || {
                    let (what, peer) = (first.describe(), first.peer_named());
                    Error::TimedOut { what, peer, limit: total }
                };
                return ended().or_else(lost).ok_or_else(timed_out);
            }
            let ended = first.connection.wait(
                stall.min(left),
                |handle| transfers.clone().for_each(|transfer| transfer.op.wake_at_end(handle.clone())),
                |handle| transfers.clone().for_each(|transfer| transfer.op.forget_waiter(handle)),
                || ended().or_else(lost).is_some(),
            );
            let now = stirred();
            if !ended && now == before && stall <= left {
                return Err(Error::Stalled {
                    what: first.describe(),
                    peer: first.peer_named(),
                    waited: stall,
                });
            }
            before = now;
        }
    }

    /// Makes `wakeup` readable once the transfer has ended, also when it already has. Costs nothing that others'
    /// transfers would notice; attached twice it is attached once.
    pub fn arm(&self, wakeup: &Wakeup) {
        if self.connection.context().origin.is_elsewhere() {
            return wakeup.wake();
        }
        self.peer().wake_at_loss(wakeup.handle());
        self.op.wake_at_end(wakeup.handle_on(self.peer().home()));
    }

    /// Lets a stream wait, on the device, until the transfer has ended: what is enqueued from here on finds what was
    /// received. It goes on after a failure too; the outcome says which it was. Only a call of a plugin that never
    /// returns keeps it waiting.
    ///
    /// While a stream waits, no memory of a GPU may be freed or unpinned in the process (`cudaFree`, PyTorch's
    /// `empty_cache`): the driver would wait for the stream, and with it all that could end the transfer. And a copy
    /// between host and GPU that is enqueued behind the wait holds up others, those of transfers among them, since the
    /// hardware has few queues for copies (8 each way unless `CUDA_DEVICE_MAX_COPY_CONNECTIONS` says more, up to 32):
    /// enqueue kernels there, and copies when the transfer has ended.
    ///
    /// What the multiprocessors do stands behind the wait where streams that wait fill all their queues: some dozens do, and with
    /// `CUDA_DEVICE_MAX_CONNECTIONS=1` a single one. Over a plugin or devmem that is all that is gathered on the GPU: wait for
    /// those transfers on the host there, or they wait for the stream in turn. Over TCP it is what is short, since a driver has
    /// the multiprocessors copy 24 KiB and less to a GPU; while a stream waits that goes as rectangles instead, by copy engines,
    /// except where it is a single byte. (Tried with a stand-in for the driver; on an H200 the calls by themselves.)
    ///
    /// # Errors
    /// The driver's.
    pub fn block_stream(&self, stream: &CudaStream) -> Result<()> {
        // SAFETY: a stream that lives.
        unsafe { self.hold_raw(stream.gpu(), stream.raw()) }
    }

    /// Holds a stream of another library, such as PyTorch's, as [`Transfer::block_stream`] does; null is the default stream.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// A live stream of this GPU's primary context, or null.
    pub unsafe fn hold_raw(&self, gpu: &Arc<CudaGpu>, stream: RawStream) -> Result<()> {
        self.connection.context().origin.check()?;
        // SAFETY: by the caller's promise.
        let gate = unsafe { self.connection.context().gates.hold(gpu, stream) }?;
        self.op.open_at_end(gate);
        Ok(())
    }

    /// Holds a stream of a simulated GPU as [`Transfer::block_stream`] does.
    ///
    /// # Errors
    /// The stream's, when it has failed.
    pub fn block_sim_stream(&self, stream: &SimStream) -> Result<()> {
        self.connection.context().origin.check()?;
        self.op.open_at_end(Gate::Sim(stream.hold()?));
        Ok(())
    }

    /// Bytes that have arrived so far, in pieces of up to the chunk size.
    pub fn bytes_moved(&self) -> u64 {
        self.op.moved()
    }

    /// Changes as long as anything of it moves, of a piece too that is not whole yet: for whoever waits in slices, with a
    /// limit of its own on standing still.
    pub fn progress_counter(&self) -> u64 {
        self.op.progress_counter()
    }

    /// Ends the operation early, if it is not too late: it still has to be waited for, and the wait
    /// gives [`Error::Cancelled`], or success if everything had arrived.
    pub fn cancel(&self) {
        if !self.connection.context().origin.is_elsewhere() {
            self.connection.cancel(&self.op);
        }
    }

    fn peer(&self) -> &Arc<PeerState> {
        &self.connection.state
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
