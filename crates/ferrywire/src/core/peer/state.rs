//! What the channels of a peer, its control session and its operations share.
//!
//! Invariant: an operation ends once, when its last token comes back. Read next: `frames.rs`.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use crate::core::context::Context;
use crate::core::inbound::{Inbound, Sink};
use crate::core::operation::{Hold, Op, Task, Verb};
use crate::core::queue::{Body, Entry, SendQueue, WITHDRAWN};
use crate::core::sleeper::Sleeper;
use crate::core::stats::ChannelCounters;
use crate::core::waiting::{WaitList, WakeHandle};
use crate::error::Error;
use ferrywire_memory::Memory;
use ferrywire_proto::Identity;
use ferrywire_proto::limits;
use ferrywire_proto::schedule;
use ferrywire_proto::wire::{Header, Kind, Refusal};

use super::serving::Serving;
use super::stream_queue::StreamQueue;

/// Where the payload of a frame goes, kept alive while it is filled.
pub(crate) enum Landing {
    Region {
        key: u64,
        memory: Arc<Memory>,
    },
    /// An operation whose memory is being filled cannot end before this is dropped.
    Sink {
        sink: Arc<Sink>,
    },
}

impl Landing {
    /// Whether it must not be kept for the next frame.
    pub fn once(&self) -> bool {
        matches!(self, Landing::Sink { .. })
    }

    pub fn is_in(&self, memory: &Arc<Memory>) -> bool {
        match self {
            Landing::Region { memory: mine, .. } => Arc::ptr_eq(mine, memory),
            Landing::Sink { sink } => sink.op.memory.as_ref().is_some_and(|mine| Arc::ptr_eq(mine, memory)),
        }
    }

    /// The memory that is filled.
    pub fn memory(&self) -> Option<&Arc<Memory>> {
        match self {
            Landing::Region { memory, .. } => Some(memory),
            Landing::Sink { sink } => sink.op.memory.as_ref(),
        }
    }

    /// The operation that waits for the payload fails, if it is one of ours.
    pub fn fail(&self, error: &Error) {
        if let Landing::Sink { sink } = self {
            sink.op.fail(error.clone());
        }
    }

    /// Whether it is of this operation, or of a part of it.
    pub fn is_sink(&self, op: &Arc<Op>) -> bool {
        let Landing::Sink { sink } = self else { return false };
        Arc::ptr_eq(&sink.op, op) || sink.op.parent().is_some_and(|parent| Arc::ptr_eq(parent, op))
    }
}

/// What is known of a peer from its control session.
pub(crate) struct PeerInfo {
    pub session: u64,
    pub identity: Identity,
    pub name: String,
    pub label: String,
    pub address: SocketAddr,
    pub channels: usize,
    pub chunk_bytes: usize,
    pub window: usize,
    pub crc: bool,
    pub same_host: bool,
    /// Whether payload goes over lanes beside the channels' connections.
    pub lanes: bool,
    /// How its payload travels, and why so where that was a choice.
    pub transport: &'static str,
    pub transport_reason: String,
}

/// Operations that have begun and not ended, receives apart: those may wait for ever.
#[derive(Default)]
pub(crate) struct InFlight {
    pub operations: AtomicU64,
    /// Those of them that answer reads of the peer.
    answers: AtomicU64,
    bytes: AtomicU64,
}

/// How far the peer is on its way to the end.
#[derive(Default)]
pub(crate) struct Life {
    /// Why the peer is lost, or closed.
    failure: OnceLock<Error>,
    /// Every [`PeerHandle`](super::PeerHandle) is dropped: the peer is to be closed when all is sent.
    pub abandoned: AtomicBool,
    /// It is being closed here: what was posted is finished, and nothing more is taken.
    pub closing: AtomicBool,
    /// It ended, or was closed here, before all was finished.
    pub unfinished: AtomicBool,
    /// Its channels send all there is before they end, and wait for no word of the peer's.
    #[cfg(test)]
    pub vanishes: AtomicBool,
    /// Its channels are closed, and all that was posted to it has ended.
    over: AtomicBool,
    /// A call of a plugin holds some of its operations' memory and does not return.
    stuck: AtomicBool,
    /// Waiters for operations that are lost to such a call: these never end.
    lost_waiters: WaitList,
}

/// Whether what was posted gets on.
#[derive(Default)]
struct Progress {
    /// How often some of it has been moved since the peer was abandoned.
    drained: AtomicU64,
    /// No whole frame has moved since a connection was lost.
    cut_off: AtomicBool,
}

/// What reports tell of the peer's past.
#[derive(Default)]
pub(crate) struct History {
    /// Frames of lost channels that went back into the outbox.
    pub resent: AtomicU64,
    /// Lost channels, one line each.
    pub lost: Mutex<Vec<String>>,
    /// How long it took until its channels stood.
    pub setup: Mutex<Duration>,
}

/// The shared state of a connected peer.
pub(crate) struct PeerState {
    context: Arc<Context>,
    pub info: PeerInfo,
    pub queue: SendQueue,
    pub inbound: Inbound,
    pub counters: Vec<Arc<ChannelCounters>>,
    pub in_flight: InFlight,
    /// Reads of the peer that are answered, and requests that wait for that.
    pub places: Serving,
    /// Operations that wait for a GPU.
    pub held: StreamQueue,
    pub life: Life,
    progress: Progress,
    pub history: History,
    /// The worker whose channels small operations prefer.
    home: AtomicUsize,
    /// The worker that is roused first for the next operation.
    pub rouse_first: AtomicUsize,
    /// Something was written to memory of its GPUs, and it stages what comes.
    pub writes_to_gpus: AtomicBool,
}

impl PeerState {
    pub fn new(context: Arc<Context>, info: PeerInfo) -> PeerState {
        let queue = SendQueue::new(info.chunk_bytes, info.crc);
        PeerState {
            context,
            queue: if info.lanes { queue.with_lanes() } else { queue },
            inbound: Inbound::default(),
            counters: (0..info.channels).map(|_| Arc::new(ChannelCounters::new())).collect(),
            info,
            in_flight: InFlight::default(),
            places: Serving::default(),
            held: StreamQueue::default(),
            life: Life::default(),
            progress: Progress::default(),
            history: History::default(),
            home: AtomicUsize::new(0),
            rouse_first: AtomicUsize::new(0),
            writes_to_gpus: AtomicBool::new(false),
        }
    }

    /// The endpoint's facts.
    pub fn context(&self) -> &Context {
        &self.context
    }

    pub fn name(&self) -> &str {
        &self.info.name
    }

    pub fn now(&self) -> Duration {
        self.context.transport.now()
    }

    pub fn counters(&self, index: u16) -> Arc<ChannelCounters> {
        self.counters[usize::from(index)].clone()
    }

    /// Messages that the lanes of its channels have moved, both ways.
    pub fn lanes_moved(&self) -> u64 {
        self.counters.iter().map(|counters| counters.lane.moved.load(Ordering::Relaxed)).sum()
    }

    /// The worker whose channels small operations prefer.
    pub fn home(&self) -> &Arc<Sleeper> {
        &self.context.sleepers[self.home_index()]
    }

    /// That worker's number.
    pub fn home_index(&self) -> usize {
        self.home.load(Ordering::Relaxed) % self.context.sleepers.len()
    }

    /// Finds the home again after channels came or went: the worker of the first live channel.
    pub fn choose_home(&self) {
        let first = self.counters.iter().position(|channel| channel.alive.load(Ordering::Relaxed));
        self.home.store(self.engine_worker(first.unwrap_or(0) as u16), Ordering::Relaxed);
    }

    /// The worker that a channel belongs to, the same on both sides where they have as many.
    pub fn engine_worker(&self, index: u16) -> usize {
        usize::from(index) % self.context.sleepers.len()
    }

    /// Whether anything posted has not ended, receives apart: those may wait for ever.
    pub fn in_flight(&self) -> bool {
        self.in_flight.operations.load(Ordering::SeqCst) > 0
    }

    /// How many, beside the operation just posted.
    pub fn in_flight_beside_one(&self) -> u64 {
        self.in_flight.operations.load(Ordering::Relaxed).saturating_sub(1)
    }

    /// Whether so much is under way that the threads should do it, and waiting callers sleep.
    pub fn in_bulk(&self) -> bool {
        self.in_flight.bytes.load(Ordering::Relaxed) >= BULK_BYTES
    }

    /// Whether what has not been sent yet, or has not arrived, is deep bulk.
    pub fn in_deep_bulk(&self) -> bool {
        self.is_deep_bulk(self.queue.bulk_bytes().saturating_add(self.live_backlog().1))
    }

    /// Whether so many bytes are.
    pub fn is_deep_bulk(&self, bytes: u64) -> bool {
        schedule::is_deep_bulk(bytes, self.channels())
    }

    /// Whether the peer stages some of what is written to it.
    pub fn writes_to_gpus(&self) -> bool {
        self.writes_to_gpus.load(Ordering::Relaxed)
    }

    /// Whether a channel belongs to the home.
    pub fn is_home(&self, index: u16) -> bool {
        self.engine_worker(index) == self.home.load(Ordering::Relaxed)
    }

    /// An operation of ours that a caller posts begins.
    ///
    /// # Errors
    /// The operation, when the peer is being closed: the caller that closes it sees this one in flight, or this one sees that.
    /// A child belongs to a parent that has begun.
    pub fn begin_posted(&self, op: Op) -> std::result::Result<Hold, Hold> {
        let op = self.begin(op);
        if op.parent().is_none() && self.life.closing.load(Ordering::SeqCst) { Err(op) } else { Ok(op) }
    }

    /// An operation begins, and ends with the last hold of it.
    pub fn begin(&self, op: Op) -> Hold {
        self.in_flight.bytes.fetch_add(op.bytes_to_cut(), Ordering::Relaxed);
        self.in_flight.operations.fetch_add(u64::from(op.verb() != Verb::Recv), Ordering::SeqCst);
        self.in_flight.answers.fetch_add(u64::from(op.verb() == Verb::Serve), Ordering::Relaxed);
        Hold::new(op)
    }

    fn count_ended(&self, op: &Op) {
        self.in_flight.bytes.fetch_sub(op.bytes_to_cut(), Ordering::Relaxed);
        self.in_flight.operations.fetch_sub(u64::from(op.verb() != Verb::Recv), Ordering::Relaxed);
        self.in_flight.answers.fetch_sub(u64::from(op.verb() == Verb::Serve), Ordering::Relaxed);
    }

    /// How many of them share a thread.
    pub fn channels_per_thread(&self) -> usize {
        self.counters.len().div_ceil(self.context.sleepers.len())
    }

    /// Channels that it was set up with: the worker of each is told by its number.
    pub fn channels(&self) -> usize {
        self.counters.len()
    }

    pub fn live_channels(&self) -> usize {
        self.counters.iter().filter(|channel| channel.alive.load(Ordering::Relaxed)).count()
    }

    /// The smallest backlog of a live channel.
    pub fn least_backlog(&self) -> u64 {
        self.counters.iter().map(|channel| channel.backlog.load(Ordering::Relaxed)).min().unwrap_or(0)
    }

    /// The backlog of all channels that share a thread with this one, its own included.
    pub fn thread_backlog(&self, index: u16) -> u64 {
        let worker = self.engine_worker(index);
        let shared = (0..).zip(&self.counters).filter(|(other, _)| self.engine_worker(*other) == worker);
        shared.map(|(_, channel)| channel.in_flight()).sum()
    }

    /// What a channel with so much in its window may take of what is staged.
    pub fn staged_share(&self, backlog: u64) -> u64 {
        let (channels, in_flight) = self.live_backlog();
        schedule::staged_share(self.queue.bulk_bytes(), in_flight, channels, backlog)
    }

    /// Shortest and longest chunk of what is staged.
    pub fn staged_chunk_bytes(&self) -> (usize, usize) {
        let (channels, in_flight) = self.live_backlog();
        let alone = self.in_flight_beside_one() == 0;
        schedule::staged_chunk_bytes(self.queue.bulk_bytes().saturating_add(in_flight), alone, channels)
    }

    /// Live channels, and what they have in their windows together.
    fn live_backlog(&self) -> (usize, u64) {
        let live = self.counters.iter().filter(|channel| channel.alive.load(Ordering::Relaxed));
        live.fold((0, 0), |(count, bytes), channel| (count + 1, bytes + channel.in_flight()))
    }

    /// A channel was lost, in words; the oldest are forgotten.
    pub fn note_lost(&self, line: String) {
        let mut lost = self.history.lost.lock().unwrap_or_else(PoisonError::into_inner);
        if lost.len() >= limits::LOST_LINES_MAX {
            lost.remove(0);
        }
        lost.push(line);
    }

    /// State in a line, for error messages.
    pub fn describe(&self) -> String {
        let lost = self.history.lost.lock().unwrap_or_else(PoisonError::into_inner);
        let last = lost.last().map(|line| format!("; last lost: {line}")).unwrap_or_default();
        format!("{} of {} channels up{last}", self.live_channels(), self.counters.len())
    }

    pub fn failure(&self) -> Option<Error> {
        self.life.failure.get().cloned()
    }

    /// Why an operation is lost that cannot end: its memory is in the hands of a call that does not return.
    pub fn lost_to_a_call(&self) -> Option<Error> {
        self.life.stuck.load(Ordering::SeqCst).then(|| self.failure()).flatten()
    }

    /// A call of a plugin does not return.
    pub fn mark_stuck(&self) {
        self.life.stuck.store(true, Ordering::SeqCst);
        self.life.lost_waiters.wake();
    }

    /// Asks to be woken when operations are lost to such a call.
    pub fn wake_at_loss(&self, handle: WakeHandle) {
        if self.context.blocking_backend().is_none() {
            return;
        }
        self.life.lost_waiters.add(handle, || self.lost_to_a_call().is_some());
    }

    // ---- operations ----

    /// An operation of this peer has ended: its last hold is dropped. No lock of the peer is held.
    pub fn ended(self: &Arc<Self>, op: &Op) {
        self.count_ended(op);
        if op.failed() {
            self.tell_failure(op);
        }
        if op.verb() == Verb::Serve {
            self.served();
        }
        self.queue.ended(op);
        // A notification may have waited for this one.
        self.wake_home_worker();
    }

    /// The peer may hold something that waits for the rest of an operation of ours: it will not come.
    fn tell_failure(&self, op: &Op) {
        let mut header = Header::new(Kind::Refuse);
        header.key = Refusal::Other as u64;
        match &op.task {
            Task::Send { sink, uncut, .. } => {
                header.transfer = sink.load(Ordering::Relaxed);
                if uncut.load(Ordering::Relaxed) {
                    // The receive is for the next message.
                    header.key = Refusal::NoSink as u64;
                }
            }
            Task::Serve { sink, .. } => header.transfer = *sink,
            Task::Write { .. } if !op.message.is_empty() => {
                header = Header::new(Kind::Notify);
                header.transfer = op.id;
                header.total = WITHDRAWN;
            }
            _ => {}
        }
        // Ids start at 1: a send that never met its receive has no sink.
        if header.transfer != 0 {
            self.queue.push_own(header);
        }
    }

    pub fn gone(&self) -> Error {
        self.failure().unwrap_or(Error::Closed)
    }

    /// The peer placed (or refused, and that was noted) this frame.
    pub fn delivered(&self, entry: Entry, refusal: Option<Refusal>) {
        if self.queue.had(&entry.header) {
            self.wake_home_worker();
        }
        let Some(op) = &entry.op else { return };
        if let Some(refusal) = refusal {
            self.refused(op, refusal);
        }
        match entry.header.kind {
            Kind::Read if op.failing() => {
                self.end_sink(op);
            }
            Kind::Read => {}
            _ => self.count(op, u64::from(entry.header.len) * u64::from(!matches!(entry.body, Body::None))),
        }
    }

    fn count(&self, op: &Op, bytes: u64) {
        op.count(bytes);
        self.note_moved(op);
    }

    /// A whole frame of an operation has moved.
    pub fn note_moved(&self, op: &Op) {
        if self.progress.cut_off.load(Ordering::Relaxed) {
            self.progress.cut_off.store(false, Ordering::Relaxed);
        }
        self.note(op);
    }

    /// Some of a frame moves. That is no progress after a connection was lost, which may have been for the same frame, again
    /// and again.
    pub fn note_moving(&self, op: &Op) {
        if !self.progress.cut_off.load(Ordering::Relaxed) {
            self.note(op);
        }
    }

    /// A connection was lost, with parts of frames: only whole ones count, until there is one.
    pub fn note_cut_off(&self) {
        self.progress.cut_off.store(true, Ordering::Relaxed);
    }

    /// What the peer reads of us is none of ours: it could go on for ever.
    fn note(&self, op: &Op) {
        op.note_activity();
        if self.life.abandoned.load(Ordering::Relaxed) && op.verb() != Verb::Serve {
            self.progress.drained.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Changes as long as what was posted here gets on, once nobody holds a [`Peer`].
    pub fn drained(&self) -> u64 {
        self.progress.drained.load(Ordering::Relaxed)
    }

    pub fn refused(&self, op: &Arc<Op>, refusal: Refusal) {
        let why = match (op.verb(), refusal) {
            (Verb::Read, Refusal::Limit) => {
                "it has as many reads to serve as it takes (INBOUND_READS_MAX): wait for some before posting more"
            }
            (Verb::Send, Refusal::OutOfRegion) => &format!(
                "the message is longer than the receive that met it: receive into {} bytes, or send fewer",
                op.total
            ),
            _ => refusal.text(),
        };
        op.fail(Error::AccessRefused { peer: self.info.name.clone(), why: why.into() });
    }

    pub fn end_sink(&self, op: &Arc<Op>) {
        if let Some(sink) = self.inbound.close_sink(op.id) {
            sink.op.fail(Error::Cancelled);
        }
        self.stop_asking(op);
    }

    /// The peer is gone, or about to be: nothing more is accepted for it, and what ends from now on has failed for this
    /// reason. Its channels may be there a little longer.
    pub fn doom(&self, error: Error) {
        let _ = self.life.failure.set(error);
        if self.life.stuck.load(Ordering::SeqCst) {
            self.life.lost_waiters.wake();
        }
    }

    /// Ends all that waits for a doomed peer. Called once its channels are closed, so that nothing is
    /// placed any more.
    pub fn fail(&self) {
        let error = self.gone();
        for op in self.held.close().into_iter().chain(self.queue.close()) {
            self.fail_with_peer(&op, &error);
        }
        for op in self.inbound.close(&error) {
            // One that had failed before, or was cancelled, is not there any more.
            if op.verb() == Verb::Read {
                self.life.unfinished.store(true, Ordering::SeqCst);
            }
        }
        let ours =
            self.in_flight.operations.load(Ordering::SeqCst) > self.in_flight.answers.load(Ordering::SeqCst);
        if ours && self.life.stuck.load(Ordering::SeqCst) {
            self.life.unfinished.store(true, Ordering::SeqCst);
        }
        self.life.over.store(true, Ordering::SeqCst);
    }

    /// An operation fails because the peer has ended. To answer the peer's reads is not asked for any more, and a
    /// receive may be one that was never to be met.
    fn fail_with_peer(&self, op: &Op, error: &Error) {
        if !matches!(op.verb(), Verb::Serve | Verb::Recv) && !op.failing() {
            self.life.unfinished.store(true, Ordering::SeqCst);
        }
        op.fail(error.clone());
    }

    /// Whether nothing of it is left: it may be doomed for a moment before.
    pub fn is_over(&self) -> bool {
        self.life.over.load(Ordering::SeqCst)
    }

    /// Frames that cannot be sent any more.
    pub fn drop_entries(&self, entries: Vec<Entry>) {
        let error = self.gone();
        for op in entries.into_iter().filter_map(|entry| entry.op) {
            self.fail_with_peer(&op, &error);
            if matches!(op.verb(), Verb::Read) {
                self.end_sink(&op);
            }
        }
    }
}

/// Bytes under way from which on threads, and not waiting callers, move them.
const BULK_BYTES: u64 = 512 << 10;
