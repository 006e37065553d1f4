//! One operation under way, and the handle by which its caller follows it.
//!
//! An operation's life: `queued -> cut into chunks -> in flight -> done | failed`. It ends when nothing
//! can touch its memory any more: a failure is noted at once but shown only when the last chunk has
//! left the last window. Operations that wait for the peer's data (`recv`, `read`) hold one token until
//! their sink is full or taken away.
//!
//! Read next: `queue/`, where operations wait to be cut.

use crate::api::wakeup::Wakeup;
use crate::core::ordering::Gate;
use crate::core::peer::PeerState;
use crate::core::worker::{self, WaitList, WakeHandle};
use crate::error::{Error, Result};
use ferrywire_memory::cuda::{CudaGpu, CudaStream, RawStream};
use ferrywire_memory::sim::SimStream;
use ferrywire_memory::{Memory, Place};
use ferrywire_proto::transfer::Pieces;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    /// Writes to a region of the peer.
    Write,
    /// Sends a tagged message.
    Send,
    /// Answers a peer's read: writes to its sink.
    Serve,
    /// Sends a notification alone.
    Notify,
    /// Waits for a peer's data, asked for by us.
    Read,
    /// Waits for a tagged message.
    Recv,
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verb::Write => "write",
            Verb::Send => "send",
            Verb::Serve => "answer to a read",
            Verb::Notify => "notify",
            Verb::Read => "read",
            Verb::Recv => "recv",
        })
    }
}

/// No standalone notification waits for the operation.
pub(crate) const NO_EPOCH: u64 = u64::MAX;

const RUNNING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;

/// An operation: immutable description, atomic state.
pub(crate) struct Op {
    pub id: u64,
    pub verb: Verb,
    pub pieces: Pieces,
    pub total: u64,
    pub memory: Option<Arc<Memory>>,
    /// Target region or sink; for `send` and `recv` the tag.
    pub key: u64,
    /// Notification that goes with it.
    pub message: Box<[u8]>,
    /// For `send`: its number among the peer's messages. For `Serve`: where the answer starts in the sink.
    pub number: u64,
    /// Which fence of standalone notifications it belongs to; [`NO_EPOCH`] if none waits for it.
    pub epoch: AtomicU64,
    /// The peer's sink, once an announced send is matched.
    pub sink: AtomicU64,
    /// It has left the queue before a byte of it was cut.
    pub uncut: AtomicBool,
    /// The operation that it is a part of; see `api/peer/multi_region.rs`.
    pub whole: Option<Arc<Op>>,
    /// Its own parts, if it is a whole.
    parts: OnceLock<Box<[Weak<Op>]>>,
    tokens: AtomicU32,
    moved: AtomicU64,
    /// Changes with each part of it that moves, of frames too that are not whole yet.
    stirred: AtomicU64,
    state: AtomicU8,
    cancelled: AtomicBool,
    error: OnceLock<Error>,
    waiters: WaitList,
    /// Streams of GPUs that wait for the end.
    gates: Mutex<Vec<Gate>>,
    gated: AtomicBool,
}

impl Op {
    pub fn new(id: u64, verb: Verb, pieces: Pieces, memory: Option<Arc<Memory>>, key: u64) -> Op {
        memory.iter().for_each(|memory| memory.enter());
        Op {
            id,
            verb,
            total: pieces.total(),
            pieces,
            memory,
            key,
            message: Box::default(),
            number: 0,
            epoch: AtomicU64::new(NO_EPOCH),
            sink: AtomicU64::new(0),
            uncut: AtomicBool::new(false),
            whole: None,
            parts: OnceLock::new(),
            tokens: AtomicU32::new(1),
            moved: AtomicU64::new(0),
            stirred: AtomicU64::new(0),
            state: AtomicU8::new(RUNNING),
            cancelled: AtomicBool::new(false),
            error: OnceLock::new(),
            waiters: WaitList::default(),
            gates: Mutex::default(),
            gated: AtomicBool::new(false),
        }
    }

    /// Bytes that are cut for it: a whole leaves them to its parts.
    pub fn bytes_to_cut(&self) -> u64 {
        if self.is_whole() { 0 } else { self.total }
    }

    /// Makes it the whole of these.
    pub fn set_parts(&self, parts: &[Arc<Op>]) {
        let _ = self.parts.set(parts.iter().map(Arc::downgrade).collect());
    }

    /// Its parts that are still under way.
    pub fn parts(&self) -> impl Iterator<Item = Arc<Op>> + '_ {
        self.parts.get().into_iter().flatten().filter_map(Weak::upgrade)
    }

    /// Whether it is nothing but its parts.
    pub fn is_whole(&self) -> bool {
        self.parts.get().is_some()
    }

    /// Whether a notification of its own follows its bytes, or those of the whole.
    pub fn notifies(&self) -> bool {
        !self.message.is_empty() || self.whole.as_ref().is_some_and(|whole| !whole.message.is_empty())
    }

    /// Takes a token: something more holds the operation's memory.
    pub fn hold(&self) {
        self.tokens.fetch_add(1, Ordering::Relaxed);
    }

    /// Gives a token back; true when it was the last and the operation has ended.
    #[must_use]
    pub fn let_go(&self) -> bool {
        if self.tokens.fetch_sub(1, Ordering::AcqRel) != 1 {
            return false;
        }
        self.memory.iter().for_each(|memory| memory.leave());
        let state = if self.failed() { FAILED } else { DONE };
        self.state.store(state, Ordering::SeqCst);
        self.open_gates();
        self.waiters.wake();
        true
    }

    /// Opens a gate at the end, which may have been.
    pub fn open_at_end(&self, gate: Gate) {
        self.gates.lock().unwrap_or_else(PoisonError::into_inner).push(gate);
        self.gated.store(true, Ordering::SeqCst);
        if self.ended() {
            self.open_gates();
        }
    }

    fn open_gates(&self) {
        if self.gated.swap(false, Ordering::SeqCst) {
            let gates = std::mem::take(&mut *self.gates.lock().unwrap_or_else(PoisonError::into_inner));
            gates.into_iter().for_each(Gate::open);
        }
    }

    /// Whether its bytes are in memory of a GPU.
    pub fn on_gpu(&self) -> bool {
        self.memory.as_ref().is_some_and(|memory| memory.place() != Place::Host)
    }

    /// Counts bytes that arrived.
    pub fn count(&self, bytes: u64) {
        self.moved.fetch_add(bytes, Ordering::Relaxed);
        self.whole.iter().for_each(|whole| whole.count(bytes));
    }

    /// Some of it moves: whoever waits for it waits on.
    pub fn stir(&self) {
        self.stirred.fetch_add(1, Ordering::Relaxed);
        self.whole.iter().for_each(|whole| whole.stir());
    }

    /// Notes a failure; the first one stays.
    pub fn fail(&self, error: Error) {
        self.whole.iter().for_each(|whole| whole.fail(error.clone()));
        let _ = self.error.set(error);
    }

    /// Asks for an early end. It becomes a failure where something is held back because of it; when
    /// everything was on its way already, the operation succeeds.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::SeqCst);
    }

    /// Something was held back: the operation was cancelled, unless it has failed before.
    pub fn cut_short(&self) {
        self.fail(Error::Cancelled);
    }

    /// The failure that is noted.
    pub fn failure(&self) -> Option<Error> {
        self.error.get().cloned()
    }

    /// Whether a failure is noted.
    pub fn failed(&self) -> bool {
        self.error.get().is_some()
    }

    /// Whether it has failed or is to end early, so that no further chunk should be cut.
    pub fn failing(&self) -> bool {
        self.failed()
            || self.cancelled.load(Ordering::SeqCst)
            || self.whole.as_ref().is_some_and(|whole| whole.failing())
    }

    /// Whether it must not be sent: it has failed, or the user has taken its memory back.
    pub fn unsendable(&self) -> bool {
        if self.memory.as_ref().is_some_and(|memory| memory.lost_to_user()) {
            self.fail(Error::invalid("region", "it was deregistered before the operation had ended"));
        }
        self.failing()
    }

    pub fn ended(&self) -> bool {
        self.state.load(Ordering::SeqCst) != RUNNING
    }

    /// Whether nothing has come of what it waits for, nor is being placed; whoever asks has its only token otherwise.
    pub fn untouched(&self) -> bool {
        self.moved() == 0 && self.tokens.load(Ordering::Acquire) == 1
    }

    /// Bytes that have arrived.
    pub fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    fn stirred(&self) -> u64 {
        self.stirred.load(Ordering::Relaxed)
    }

    fn outcome(&self) -> Option<Result<u64>> {
        match self.state.load(Ordering::Acquire) {
            RUNNING => None,
            DONE => Some(Ok(self.moved())),
            _ => Some(Err(self.error.get().cloned().unwrap_or(Error::Cancelled))),
        }
    }

    /// Asks to be woken at the end.
    pub fn wake_at_end(&self, handle: WakeHandle) {
        self.waiters.add(handle);
        if self.ended() {
            self.waiters.wake();
        }
    }
}

impl Drop for Op {
    fn drop(&mut self) {
        // One that was never posted has no other end.
        if !self.ended() {
            self.memory.iter().for_each(|memory| memory.leave());
            self.open_gates();
        }
    }
}

/// An operation as its caller sees it. Dropping it lets the operation run on.
///
/// The memory it uses stays registered, and alive if the engine owns it, until the operation ends.
#[derive(Clone)]
pub struct Transfer {
    pub(crate) op: Arc<Op>,
    pub(crate) peer: Arc<PeerState>,
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Transfer({} {} of {} bytes)", self.op.verb, self.op.moved(), self.op.total)
    }
}

impl Transfer {
    /// The outcome, or `None` while it is under way. Drives progress a little where needed.
    ///
    /// The value is the number of bytes moved; for `recv`, the length of the message.
    pub fn poll(&self) -> Option<Result<u64>> {
        self.outcome().or_else(|| {
            worker::nudge(&self.peer);
            self.outcome()
        })
    }

    /// How it ended, or that it never will.
    fn outcome(&self) -> Option<Result<u64>> {
        let elsewhere = || self.peer.engine().origin.check().err().map(|forked| Err(forked.into()));
        self.op.outcome().or_else(|| self.peer.lost_to_a_call().map(Err)).or_else(elsewhere)
    }

    /// Waits for the end; `deadline` is the longest time without progress.
    ///
    /// # Errors
    /// The operation's own error, or [`Error::Deadline`]: then it is still under way, and can be waited
    /// for again or cancelled.
    pub fn wait(&self, deadline: Duration) -> Result<u64> {
        self.wait_for(Duration::MAX, deadline)
    }

    /// Waits for the end, at most `total` altogether and `stall` without progress. Time in which the process is
    /// stopped counts towards `total`.
    ///
    /// # Errors
    /// As [`Transfer::wait`], and [`Error::TimedOut`]: then too it is still under way.
    pub fn wait_for(&self, total: Duration, stall: Duration) -> Result<u64> {
        // Without a limit on the whole nobody asks for the time.
        let until = (total < Duration::MAX).then(|| self.peer.now().saturating_add(total));
        let mut stirred = self.op.stirred();
        loop {
            if let Some(outcome) = self.outcome() {
                return outcome;
            }
            let left = until.map_or(Duration::MAX, |until| until.saturating_sub(self.peer.now()));
            if left.is_zero() {
                let timed_out =
                    || Err(Error::TimedOut { what: self.describe(), peer: self.peer_named(), limit: total });
                // Who asks again and again without waiting may be the only one who drives.
                return self.poll().unwrap_or_else(timed_out);
            }
            let ended = worker::wait(
                &self.peer,
                stall.min(left),
                |handle| self.op.wake_at_end(handle),
                |handle| self.op.waiters.remove(handle),
                || self.outcome().is_some(),
            );
            let now = self.op.stirred();
            if !ended && now == stirred && stall <= left {
                return Err(Error::Deadline {
                    what: self.describe(),
                    peer: self.peer_named(),
                    waited: stall,
                });
            }
            stirred = now;
        }
    }

    /// Waits until one of several transfers with one peer has ended, well or not, and gives its place among them:
    /// for those who keep a number of them in flight. `deadline` is the longest time in which none of them moves.
    ///
    /// # Errors
    /// [`Error::Deadline`]: then all are still under way. [`Error::Invalid`] when there are none, or of several peers.
    pub fn wait_any<'a>(
        transfers: impl IntoIterator<Item = &'a Transfer, IntoIter: Clone>,
        deadline: Duration,
    ) -> Result<usize> {
        Transfer::wait_any_for(transfers, Duration::MAX, deadline)
    }

    /// The same, at most `total` altogether and `stall` in which none of them moves; a `total` of zero asks without
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
        if let Some(other) = transfers.clone().find(|other| !Arc::ptr_eq(&first.peer, &other.peer)) {
            let why = format!(
                "they are of several peers, {} and {}: give those of one",
                first.peer.name(),
                other.peer.name()
            );
            return Err(Error::invalid("transfers", why));
        }
        let ended = || transfers.clone().position(|transfer| transfer.op.ended());
        let lost = || first.outcome().is_some().then_some(0);
        let stirred =
            || transfers.clone().fold(0, |sum: u64, transfer| sum.wrapping_add(transfer.op.stirred()));
        let until = (total < Duration::MAX).then(|| first.peer.now().saturating_add(total));
        let mut before = stirred();
        loop {
            if let Some(at) = ended().or_else(lost) {
                return Ok(at);
            }
            let left = until.map_or(Duration::MAX, |until| until.saturating_sub(first.peer.now()));
            if left.is_zero() {
                worker::nudge(&first.peer);
                let timed_out = || {
                    let (what, peer) = (first.describe(), first.peer_named());
                    Error::TimedOut { what, peer, limit: total }
                };
                return ended().or_else(lost).ok_or_else(timed_out);
            }
            let ended = worker::wait(
                &first.peer,
                stall.min(left),
                |handle| transfers.clone().for_each(|transfer| transfer.op.wake_at_end(handle.clone())),
                |handle| transfers.clone().for_each(|transfer| transfer.op.waiters.remove(handle)),
                || ended().or_else(lost).is_some(),
            );
            let now = stirred();
            if !ended && now == before && stall <= left {
                return Err(Error::Deadline {
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
    pub fn wake(&self, wakeup: &Wakeup) {
        if self.peer.engine().origin.is_elsewhere() {
            return wakeup.wake();
        }
        self.peer.wake_at_loss(wakeup);
        self.op.wake_at_end(wakeup.handle_on(self.peer.home()));
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
    pub fn hold(&self, stream: &CudaStream) -> Result<()> {
        // SAFETY: a stream that lives.
        unsafe { self.hold_raw(stream.gpu(), stream.raw()) }
    }

    /// The same with somebody else's stream, such as PyTorch's; null is the default one.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// A live stream of this GPU's primary context, or null.
    pub unsafe fn hold_raw(&self, gpu: &Arc<CudaGpu>, stream: RawStream) -> Result<()> {
        self.peer.engine().origin.check()?;
        // SAFETY: by the caller's promise.
        let gate = unsafe { self.peer.engine().gates.hold(gpu, stream) }?;
        self.op.open_at_end(gate);
        Ok(())
    }

    /// The same with a stream of a simulated GPU.
    ///
    /// # Errors
    /// The stream's, when it has failed.
    pub fn hold_sim(&self, stream: &SimStream) -> Result<()> {
        self.peer.engine().origin.check()?;
        self.op.open_at_end(Gate::Sim(stream.hold()?));
        Ok(())
    }

    /// Bytes that have arrived so far, in pieces of up to the chunk size.
    pub fn bytes_moved(&self) -> u64 {
        self.op.moved()
    }

    /// Changes as long as anything of it moves, of a piece too that is not whole yet: for whoever waits in slices, with a
    /// limit of its own on standing still.
    pub fn activity(&self) -> u64 {
        self.op.stirred()
    }

    /// Ends the operation early, if it is not too late: it still has to be waited for, and the wait
    /// gives [`Error::Cancelled`], or success if everything had arrived.
    pub fn cancel(&self) {
        if !self.peer.engine().origin.is_elsewhere() {
            self.peer.cancel(&self.op);
        }
    }

    fn peer_named(&self) -> Option<String> {
        Some(self.peer.name().to_string())
    }

    fn describe(&self) -> String {
        format!(
            "{} with {}: {} of {} bytes moved; {}",
            self.op.verb,
            self.peer.name(),
            self.op.moved(),
            self.op.total,
            self.peer.describe()
        )
    }
}
