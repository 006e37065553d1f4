//! State that a peer's channels, its control session and its operations share.
//!
//! Invariant: an operation ends exactly once, when its last hold is dropped.
//! Read next: `inbound.rs`, the sinks of receives and reads; `replies.rs`, frames without payload.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::core::context::Context;
use crate::core::inbound::{Inbound, Sink, taken_back};
use crate::core::operation::{Hold, Op, Owner, Verb};
use crate::core::queue::{Entry, SMALL_BYTES_MAX, SendQueue};
use crate::core::sleeper::Sleeper;
use crate::core::staging::Messages;
use crate::core::stats::ChannelCounters;
use crate::core::trace::{self, Track};
use crate::core::waiting::{WaitList, WakeHandle};
use crate::error::Error;
use ferrywire_memory::Memory;
use ferrywire_metrics::{Kind, PeerSample, Source};
use ferrywire_proto::Identity;
use ferrywire_proto::protection::Protection;
use ferrywire_proto::schedule::{self, InCache};
use ferrywire_proto::wire::Refusal;
use ferrywire_sys::affinity;

use super::in_flight::{InFlight, LONE_BYTES_MAX, is_long};
use super::metrics::History;
use super::route::Route;
use super::serving::Serving;
use super::stream_queue::StreamQueue;

/// The target of a frame's payload. It keeps the memory alive while it is filled.
#[derive(Clone)]
pub(crate) enum Landing {
    Region {
        key: u64,
        memory: Arc<Memory>,
    },
    /// The memory of a receive or read. Its operation cannot end before this is dropped.
    Sink {
        sink: Arc<Sink>,
    },
}

impl Landing {
    /// Whether the landing is for one frame and must not be kept for the next.
    pub fn once(&self) -> bool {
        matches!(self, Landing::Sink { .. })
    }

    pub fn is_in(&self, memory: &Arc<Memory>) -> bool {
        match self {
            Landing::Region { memory: mine, .. } => Arc::ptr_eq(mine, memory),
            Landing::Sink { sink } => sink.op.memory.as_ref().is_some_and(|mine| Arc::ptr_eq(mine, memory)),
        }
    }

    /// The memory that the payload goes to.
    pub fn memory(&self) -> Option<&Arc<Memory>> {
        match self {
            Landing::Region { memory, .. } => Some(memory),
            Landing::Sink { sink } => sink.op.memory.as_ref(),
        }
    }

    /// Fails the receive or read that waits for the payload, if there is one.
    pub fn fail(&self, error: &Error) {
        if let Landing::Sink { sink } = self {
            sink.op.fail(error.clone());
        }
    }

    /// Whether the target belongs to this operation, or to a child of it.
    pub fn is_sink(&self, op: &Arc<Op>) -> bool {
        let Landing::Sink { sink } = self else { return false };
        Arc::ptr_eq(&sink.op, op) || sink.op.parent().is_some_and(|parent| Arc::ptr_eq(parent, op))
    }
}

/// Facts about a peer from its control session.
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
    /// How the data connections are protected; `None` in clear.
    pub protection: Option<Protection>,
    pub same_host: bool,
    /// Where both ends begin to count cores when they pin the threads of their channels.
    pub core_offset: usize,
    /// Whether payload goes over lanes beside the channels' connections.
    pub lanes: bool,
    /// The name of the payload's transport, and the reason where there was a choice.
    pub transport: &'static str,
    pub transport_reason: String,
}

impl PeerInfo {
    /// The peer's address without its port, with the label that the peer gave itself.
    pub fn without_port(&self) -> String {
        let address = self.address.ip();
        if self.label.is_empty() { address.to_string() } else { format!("{address} ({})", self.label) }
    }
}

/// Bytes of bulk per additional worker that is woken. Waking a sleeping thread costs the caller microseconds,
/// as much as sending these bytes.
const ROUSE_BYTES: u64 = 256 << 10;

/// How far a peer has come towards its end.
#[derive(Default)]
pub(crate) struct Life {
    /// Why the peer is lost, or closed.
    failure: OnceLock<Error>,
    /// Whether the user has been given the failure, by an error of the peer, of a transfer or of a post.
    pub failure_told: AtomicBool,
    /// Whether every [`PeerHandle`] is dropped. The peer is then closed once everything is sent.
    pub abandoned: AtomicBool,
    /// Whether the user closes the peer: posted operations finish, and new ones are refused.
    pub closing: AtomicBool,
    /// Whether the peer ended, or was closed at this end, before all operations had finished.
    pub unfinished: AtomicBool,
    /// For tests: whether channels send everything before they end, without waiting for acknowledgements.
    #[cfg(test)]
    pub vanishes: AtomicBool,
    /// Whether the peer's channels are closed, and all its operations have ended.
    over: AtomicBool,
    /// Whether a plugin call that does not return uses memory of some operations.
    stuck: AtomicBool,
    /// Waiters for operations that never end, because a plugin call that does not return uses their memory.
    lost_waiters: WaitList,
}

/// Progress of posted operations.
#[derive(Default)]
struct Progress {
    /// Grows while posted operations progress after the peer was abandoned.
    drained: AtomicU64,
    /// Whether no complete frame has moved since a connection was lost.
    cut_off: AtomicBool,
}

/// The shared state of a connected peer.
pub(crate) struct PeerState {
    context: Arc<Context>,
    pub info: PeerInfo,
    pub queue: SendQueue,
    pub inbound: Inbound,
    pub counters: Vec<Arc<ChannelCounters>>,
    in_flight: InFlight,
    /// The peer's reads that are being answered, or wait for that.
    pub serving: Serving,
    /// Operations that wait for a GPU stream.
    pub stream_queue: StreamQueue<PeerState>,
    /// Short messages that are copied to GPUs.
    pub messages: Messages,
    pub life: Life,
    progress: Progress,
    pub history: History,
    /// Number of the worker whose channels carry small operations first.
    home: AtomicUsize,
    /// Number of the worker that is woken first for the next operation.
    rouse_first: AtomicUsize,
    pub route: Route,
}

impl Source for PeerState {
    fn sample(&self) -> PeerSample {
        let channels = self.counters.iter().enumerate();
        PeerSample {
            endpoint: self.context.identity.to_string(),
            peer: self.info.name.clone(),
            session: self.info.session,
            label: self.info.without_port(),
            transport: self.info.transport.into(),
            reason: self.info.transport_reason.clone(),
            resent_chunks: self.history.resent.load(Ordering::Relaxed),
            lost_channels: self.history.lost_count(),
            fences: self.history.fences.load(Ordering::Relaxed),
            operations: self.history.kinds(),
            channels: channels.filter_map(|(index, each)| each.sample(index as u16)).collect(),
        }
    }
}

impl Drop for PeerState {
    fn drop(&mut self) {
        // An operation that a GPU keeps for longer than its peer lives can no longer be counted out.
        self.context.long_operations.fetch_sub(self.in_flight.long(), Ordering::SeqCst);
        ferrywire_metrics::retire(&self.sample());
    }
}

/// Keeps its peer open. When it is dropped, the control side closes the peer once all posted operations are
/// sent.
pub(crate) struct PeerHandle(pub Arc<PeerState>);

impl Drop for PeerHandle {
    fn drop(&mut self) {
        let context = self.0.context();
        if !context.origin.is_elsewhere() {
            self.0.life.abandoned.store(true, Ordering::SeqCst);
            context.wake_control();
        }
    }
}

impl PeerState {
    pub fn new(context: Arc<Context>, info: PeerInfo) -> PeerState {
        let (cores, threads) = (affinity::cores_with_time(), context.config.threads);
        let fill_bytes =
            [info.protection.is_some(), false].map(|sealed| schedule::fill_bytes(cores, threads, sealed));
        let mut queue = SendQueue::new(info.chunk_bytes, fill_bytes, info.crc);
        queue.short_rings = info.same_host && schedule::has_short_rings(info.channels);
        queue.in_cache = InCache::new(context.config.level_2_cache_bytes, cores, threads);
        let route = Route::new(info.lanes || !info.same_host);
        PeerState {
            context,
            queue: if info.lanes { queue.with_lanes() } else { queue },
            inbound: Inbound::default(),
            counters: (0..info.channels).map(|_| Arc::new(ChannelCounters::new())).collect(),
            info,
            in_flight: InFlight::default(),
            serving: Serving::default(),
            stream_queue: StreamQueue::default(),
            messages: Messages::default(),
            life: Life::default(),
            progress: Progress::default(),
            history: History::default(),
            home: AtomicUsize::new(0),
            rouse_first: AtomicUsize::new(0),
            route,
        }
    }

    /// The endpoint's configuration and shared parts.
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

    /// Number of messages that the lanes of the peer's channels have moved, sent and received.
    pub fn lanes_moved(&self) -> u64 {
        self.counters.iter().map(|counters| counters.lane.moved.load(Ordering::Relaxed)).sum()
    }

    /// The worker whose channels carry small operations first.
    pub fn home(&self) -> &Arc<Sleeper> {
        &self.context.sleepers[self.home_index()]
    }

    /// The number of the home worker.
    pub fn home_index(&self) -> usize {
        self.home.load(Ordering::Relaxed)
    }

    /// Chooses the home worker again after channels came or went: the worker of the first live channel.
    pub fn choose_home(&self) {
        let first = self.counters.iter().position(|channel| channel.alive.load(Ordering::Relaxed));
        self.home.store(self.engine_worker(first.unwrap_or(0) as u16), Ordering::SeqCst);
    }

    /// The number of the worker that owns a channel. Both ends agree if they have as many workers. Peers begin with
    /// different workers, since the first channels carry most of what is in order.
    pub fn engine_worker(&self, index: u16) -> usize {
        (self.info.session as u32 as usize + usize::from(index)) % self.context.sleepers.len()
    }

    /// Whether operations other than receives are in flight. A receive may wait for ever.
    pub fn in_flight(&self) -> bool {
        self.in_flight.operations() > 0
    }

    /// Number of operations in flight besides the one just posted.
    pub fn in_flight_beside_one(&self) -> u64 {
        self.in_flight.operations().saturating_sub(1)
    }

    /// Whether one operation other than receives is in flight.
    pub fn has_one_in_flight(&self) -> bool {
        self.in_flight.operations() == 1
    }

    /// Whether the worker threads move the peer's bytes while callers sleep. So it stays after bulk until a caller waits for few.
    pub fn in_bulk(&self) -> bool {
        self.in_flight.is_bulk()
    }

    /// Lets callers move the bytes again if few are in flight. Called where a caller is about to wait.
    pub fn end_bulk(&self) {
        // In bulk a post does not wake the home worker, and other channels may not take its frames any more.
        if self.in_flight.end_bulk(|| self.lone_bytes()) {
            self.wake_home_worker();
        }
    }

    /// Longest operation in bytes that its caller moves while it is the only one of this peer, and the only long one of
    /// all peers: their channels share workers. Several threads copy to and from GPUs sooner, use several NICs and
    /// connections at once, and callers poll no lane.
    fn lone_bytes(&self) -> u64 {
        let by_threads = self.route.is_far() || self.route.is_staged();
        if by_threads || self.context.long_operations.load(Ordering::SeqCst) > 1 { 0 } else { LONE_BYTES_MAX }
    }

    /// Bytes in its window from which a channel counts as busy, so that the next one helps.
    pub fn fill_bytes(&self) -> u64 {
        self.queue.fill_bytes[usize::from(self.route.is_staged())]
    }

    /// Largest bulk operation in bytes that channels take in order.
    pub fn ordered_bytes(&self) -> u64 {
        // A checksum is made while the queue is locked. A single thread wakes no others for the parts.
        if self.info.crc || self.context.sleepers.len() == 1 {
            return 0;
        }
        let in_flight = schedule::local_bytes(self.channels_per_thread());
        self.route.ordered_bytes().min(in_flight).min(self.info.chunk_bytes as u64)
    }

    /// Whether channels take the next bulk operation in order.
    pub fn next_is_ordered(&self) -> bool {
        self.queue.next_is_ordered(self.ordered_bytes()) && self.is_ordered()
    }

    /// Whether channels take operations of at most [`PeerState::ordered_bytes`] in order. Where the queue alone keeps all of
    /// them busy, there is no order to keep.
    pub fn is_ordered(&self) -> bool {
        let queued = self.queue.bulk_bytes();
        let fill = if self.route.is_staged() { self.fill_bytes() } else { schedule::DEEP_BYTES };
        queued < fill * self.channels() as u64
    }

    /// Whether the channels take an operation of so many bytes in order: each only while those before it are busy.
    pub fn takes_in_order(&self, bytes: u64) -> bool {
        bytes <= SMALL_BYTES_MAX || (bytes <= self.ordered_bytes() && self.is_ordered())
    }

    /// Whether the bytes queued and in flight are deep bulk.
    pub fn in_deep_bulk(&self) -> bool {
        // Idle threads ask all the time. The backlogs are in the cache of the threads that move bytes.
        self.is_deep_bulk(self.in_flight.bytes())
            && self.is_deep_bulk(self.queue.bulk_bytes().saturating_add(self.live_backlog().1))
    }

    /// Whether `bytes` bytes are deep bulk for this peer's number of channels.
    pub fn is_deep_bulk(&self, bytes: u64) -> bool {
        schedule::is_deep_bulk(bytes, self.channels())
    }

    /// Whether a channel belongs to the home worker.
    pub fn is_home(&self, index: u16) -> bool {
        self.engine_worker(index) == self.home.load(Ordering::Relaxed)
    }

    /// Begins an operation that the user posts.
    ///
    /// # Errors
    /// Returns the operation if the peer is being closed. Either the closing caller sees this operation in
    /// flight, or this call sees the close. A child operation is accepted: its parent has begun.
    #[inline]
    pub fn begin_posted(&self, op: Op) -> std::result::Result<Hold, Hold> {
        let op = self.begin(op);
        if op.parent().is_none() && self.life.closing.load(Ordering::SeqCst) {
            op.fail(self.gone());
            return Err(op);
        }
        Ok(op)
    }

    /// Begins an operation, which ends when its last hold is dropped.
    #[inline]
    pub fn begin(&self, op: Op) -> Hold {
        if op.on_gpu() {
            self.route.note_gpu();
        }
        if is_long(&op) {
            self.context.long_operations.fetch_add(1, Ordering::SeqCst);
        }
        self.in_flight.begun(&op, self.lone_bytes());
        if op.parent().is_none() {
            self.history.operations[op.kind() as usize].started.fetch_add(1, Ordering::Relaxed);
        }
        Hold::new(op)
    }

    /// Number of channels of this peer that share one worker.
    pub fn channels_per_thread(&self) -> usize {
        self.counters.len().div_ceil(self.context.sleepers.len())
    }

    /// Number of channels that the peer was set up with, live or not.
    pub fn channels(&self) -> usize {
        self.counters.len()
    }

    pub fn live_channels(&self) -> usize {
        self.counters.iter().filter(|channel| channel.alive.load(Ordering::Relaxed)).count()
    }

    /// Whether a channel must leave operations taken in order to a channel before it, which has room.
    pub fn leaves_ordered(&self, index: u16) -> bool {
        self.counters[..usize::from(index)].iter().any(|each| each.has_ordered_room.load(Ordering::SeqCst))
    }

    /// Wakes the worker of the first channel that has room for operations taken in order. If none has room, each channel
    /// takes frames as soon as it has.
    pub fn rouse_for_ordered(&self) {
        let first = self.counters.iter().position(|each| each.has_ordered_room.load(Ordering::SeqCst));
        if let Some(index) = first {
            self.context.sleepers[self.engine_worker(index as u16)].rouse();
        }
    }

    /// The fewest bytes in the window of any channel.
    pub fn least_backlog(&self) -> u64 {
        self.counters.iter().map(|channel| channel.backlog.load(Ordering::Relaxed)).min().unwrap_or(0)
    }

    /// Bytes in flight on all channels of the worker that owns this channel, including its own.
    pub fn thread_backlog(&self, index: u16) -> u64 {
        let worker = self.engine_worker(index);
        let shared = (0..).zip(&self.counters).filter(|(other, _)| self.engine_worker(*other) == worker);
        shared.map(|(_, channel)| channel.in_flight()).sum()
    }

    /// Bytes of staged payload that a channel with `backlog` bytes in its window may take.
    pub fn staged_share(&self, backlog: u64) -> u64 {
        let (channels, in_flight) = self.live_backlog();
        schedule::staged_share(self.queue.bulk_bytes(), in_flight, channels, backlog)
    }

    /// The shortest and the longest chunk, in bytes, of staged payload.
    pub fn staged_chunk_bytes(&self) -> (usize, usize) {
        let (channels, in_flight) = self.live_backlog();
        let alone = self.in_flight_beside_one() == 0;
        schedule::staged_chunk_bytes(self.queue.bulk_bytes().saturating_add(in_flight), alone, channels)
    }

    /// The number of live channels, and the bytes that they have in flight together.
    fn live_backlog(&self) -> (usize, u64) {
        let live = self.counters.iter().filter(|channel| channel.alive.load(Ordering::Relaxed));
        live.fold((0, 0), |(count, bytes), channel| (count + 1, bytes + channel.in_flight()))
    }

    /// The peer's state in one line, for error messages.
    pub fn describe(&self) -> String {
        let last = self.history.last_lost().map(|line| format!("; last lost: {line}")).unwrap_or_default();
        format!("{} of {} channels up{last}", self.live_channels(), self.counters.len())
    }

    pub fn failure(&self) -> Option<Error> {
        self.life.failure.get().cloned()
    }

    /// The failure, for the user, who then knows of it.
    pub fn failure_for_user(&self) -> Option<Error> {
        let failure = self.failure();
        if failure.is_some() {
            self.life.failure_told.store(true, Ordering::SeqCst);
        }
        failure
    }

    /// Notes that the user is given `error`, which may be the peer's failure.
    pub fn note_told(&self, error: &Error) {
        if self.life.failure.get() == Some(error) {
            self.life.failure_told.store(true, Ordering::SeqCst);
        }
    }

    /// The error of an operation that cannot end because a plugin call that does not return uses its memory.
    pub fn lost_to_a_call(&self) -> Option<Error> {
        self.life.stuck.load(Ordering::SeqCst).then(|| self.failure()).flatten()
    }

    /// Notes that a plugin call does not return, and wakes waiters of the lost operations.
    pub fn mark_stuck(&self) {
        self.life.stuck.store(true, Ordering::SeqCst);
        self.life.lost_waiters.wake();
    }

    /// Registers `handle` to be woken when operations are lost to a plugin call that does not return.
    pub fn wake_at_loss(&self, handle: WakeHandle) {
        if self.context.blocking_backend().is_none() {
            return;
        }
        self.life.lost_waiters.add(handle, || self.lost_to_a_call().is_some());
    }

    /// Wakes the workers for an operation of `bytes` bytes that was queued: the one that takes it if channels take it in
    /// order, else all.
    pub fn rouse_for(&self, bytes: u64) {
        if !self.takes_in_order(bytes) {
            self.rouse_all();
        } else if self.in_bulk() && self.next_is_ordered() {
            self.rouse_for_ordered();
        } else if self.in_bulk() && bytes > SMALL_BYTES_MAX && self.queue.bulk_bytes() > 0 {
            // It has more pieces than one frame carries, or waits behind an operation that all channels take.
            self.rouse_all();
        } else {
            self.wake_home_worker();
        }
    }

    /// Wakes workers other than the home worker for `bytes` bytes that are cut, in proportion.
    pub fn rouse_for_bulk(&self, bytes: u64) {
        let sleepers = &self.context.sleepers;
        // Other workers have no channel of this peer.
        let count = sleepers.len().min(self.channels()).max(1);
        let mut left = bytes.div_ceil(ROUSE_BYTES);
        // Operations start at different workers in turn.
        let first = self.rouse_first.fetch_add(1, Ordering::Relaxed);
        for step in 0..count {
            let channel = first.wrapping_add(step) % count;
            let sleeper = &sleepers[self.engine_worker(channel as u16)];
            if left == 0 {
                break;
            }
            left -= u64::from(sleeper.index != self.home_index() && sleeper.rouse());
        }
    }

    fn rouse_all(&self) {
        self.context.sleepers.iter().for_each(|sleeper| _ = sleeper.rouse());
    }

    /// Wakes the home worker if frames are queued: only its channels take small operations.
    pub fn wake_home_worker(&self) {
        if self.queue.has_work() {
            self.home().rouse();
        }
    }

    // ---- operations ----

    pub fn gone(&self) -> Error {
        self.failure().unwrap_or(Error::Closed)
    }

    /// The error of a post that is refused, for the user.
    pub fn refusal(&self) -> Error {
        self.failure_for_user().unwrap_or(Error::Closed)
    }

    /// Notes that a complete frame of an operation has moved, whose bytes are counted.
    pub fn note_moved(&self, op: &Op) {
        if self.progress.cut_off.load(Ordering::Relaxed) {
            self.progress.cut_off.store(false, Ordering::Relaxed);
        }
        self.note_drained(op);
    }

    /// Notes that bytes of a frame move. After a lost connection this is no progress: the peer may lose one
    /// connection after the other over this frame.
    pub fn note_moving(&self, op: &Op) {
        if !self.progress.cut_off.load(Ordering::Relaxed) {
            op.note_activity();
            self.note_drained(op);
        }
    }

    /// Notes a lost connection. Until the next complete frame, partial frames do not count as progress.
    pub fn note_cut_off(&self) {
        self.progress.cut_off.store(true, Ordering::Relaxed);
    }

    /// Notes that an abandoned peer drains. Answers to the peer's reads do not count: it could read for ever.
    fn note_drained(&self, op: &Op) {
        if self.life.abandoned.load(Ordering::Relaxed) && op.verb() != Verb::Serve {
            self.progress.drained.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A counter that grows while posted operations progress after the user has dropped all handles of the
    /// peer.
    pub fn drained(&self) -> u64 {
        self.progress.drained.load(Ordering::Relaxed)
    }

    pub fn refused(&self, op: &Arc<Op>, refusal: Refusal) {
        let why = match (op.verb(), refusal) {
            (Verb::Read, Refusal::Limit) => {
                "the peer serves INBOUND_READS_MAX reads already: wait for some before posting more"
            }
            (Verb::Send, Refusal::OutOfRegion) => &format!(
                "the message is longer than the receive that it matched: receive into {} bytes, or send fewer",
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

    /// Ends a receive without the message that has begun to arrive: its memory is to be released.
    pub fn end_without_message(&self, op: &Arc<Op>) {
        if op.memory.as_ref().is_some_and(|memory| memory.taken_back()) {
            op.fail(taken_back());
        }
        self.end_sink(op);
    }

    /// Marks the peer as lost for the reason `error`. New operations are refused, and operations that end
    /// later fail with it. The peer's channels may still be open.
    pub fn doom(&self, error: Error) {
        let _ = self.life.failure.set(error);
        if self.life.stuck.load(Ordering::SeqCst) {
            self.life.lost_waiters.wake();
        }
    }

    /// Fails everything that waits for a doomed peer. The caller has closed its channels, so nothing is
    /// placed any more.
    pub fn fail(&self) {
        let error = self.gone();
        for op in self.stream_queue.close().into_iter().chain(self.queue.close()) {
            self.fail_with_peer(&op, &error);
        }
        self.end_receives(&error);
        let ours = self.in_flight.operations() > self.in_flight.answers();
        if ours && self.life.stuck.load(Ordering::SeqCst) {
            self.life.unfinished.store(true, Ordering::SeqCst);
        }
        self.life.over.store(true, Ordering::SeqCst);
    }

    /// Fails what waits for bytes of a doomed peer. Messages that have arrived can still be received.
    pub fn end_receives(&self, error: &Error) {
        for op in self.inbound.close(error) {
            // An operation that had failed or was cancelled is not in this list.
            if op.verb() == Verb::Read {
                self.life.unfinished.store(true, Ordering::SeqCst);
            }
        }
    }

    /// Fails an operation because the peer has ended. An answer to the peer's read, or a receive, does not
    /// count as unfinished: the peer no longer wants the answer, and the receive might never have been
    /// matched.
    fn fail_with_peer(&self, op: &Op, error: &Error) {
        if !matches!(op.verb(), Verb::Serve | Verb::Recv) && !op.failing() {
            self.life.unfinished.store(true, Ordering::SeqCst);
        }
        op.fail(error.clone());
    }

    /// Whether the peer has ended completely: channels closed, operations ended. A doomed peer may not be
    /// over yet.
    pub fn is_over(&self) -> bool {
        self.life.over.load(Ordering::SeqCst)
    }

    /// Fails the operations of frames that cannot be sent any more, and of which the peer may have placed some.
    pub fn drop_entries(&self, entries: Vec<Entry>) {
        let error = self.gone();
        for op in entries.into_iter().filter_map(|entry| entry.op) {
            self.fail_with_peer(&op, &error);
            match op.verb() {
                Verb::Write => op.lose(&error),
                Verb::Read => self.end_sink(&op),
                _ => {}
            }
        }
    }
}

impl Owner for PeerState {
    fn ended(self: Arc<Self>, op: &Op) {
        self.end_operation(op);
    }
}

impl PeerState {
    /// Drops tokens of operations of this peer, and ends those whose last token it was. Ends of most operations are counted
    /// together, since posting threads write the same counters. The caller holds no lock of the peer.
    pub fn end_operations(self: &Arc<Self>, holds: &mut Vec<Hold>) {
        let (mut operations, mut bytes, mut completed) = (0, 0, [0; Kind::ALL.len()]);
        let counted_alone = |op: &mut Hold| {
            let is_plain =
                matches!(op.verb(), Verb::Write | Verb::Send | Verb::Notify) && op.parent().is_none();
            if !is_plain || is_long(op) || op.failing() || op.began.is_some() || !op.is_last() {
                return true;
            }
            operations += 1;
            bytes += op.bytes_to_cut();
            completed[op.kind() as usize] += 1;
            false
        };
        for op in holds.extract_if(.., counted_alone) {
            op.drop_for(|op| self.end_operation(op));
        }
        if operations == 0 {
            return;
        }
        self.in_flight.ended_together(operations, bytes);
        for (counters, completed) in self.history.operations.iter().zip(completed) {
            if completed > 0 {
                counters.completed.fetch_add(completed, Ordering::Relaxed);
            }
        }
        while let Some(first) = holds.first() {
            let epoch = first.epoch.get().cloned();
            let joined = |op: &&Hold| op.epoch.get().map(Arc::as_ptr) == epoch.as_ref().map(Arc::as_ptr);
            let count = holds.iter().take_while(joined).count();
            for op in holds.drain(..count) {
                op.drop_for(|op| {
                    if op.failed() {
                        self.tell_failure(op)
                    }
                });
            }
            if let Some(epoch) = epoch {
                self.queue.left(&epoch, count as u64);
            }
        }
        // A notification may have waited for these operations.
        self.wake_home_worker();
    }

    /// Handles the end of an operation of this peer. The caller holds no lock of the peer.
    pub fn end_operation(self: &Arc<Self>, op: &Op) {
        if is_long(op) {
            self.context.long_operations.fetch_sub(1, Ordering::SeqCst);
        }
        self.in_flight.ended(op);
        if op.parent().is_none() {
            let counters = &self.history.operations[op.kind() as usize];
            let ended = if op.failed() { &counters.failed } else { &counters.completed };
            ended.fetch_add(1, Ordering::Relaxed);
            if let Some(began) = op.began {
                trace::transfer_ended(
                    self.counters.first().map_or(Track::default(), |each| each.track),
                    op,
                    began,
                );
                ferrywire_metrics::record_transfer(op.kind(), began.elapsed());
            }
        }
        if op.failed() {
            self.tell_failure(op);
        }
        if op.verb() == Verb::Serve {
            self.served();
        }
        self.queue.ended(op);
        // A notification may have waited for this operation.
        self.wake_home_worker();
    }
}
