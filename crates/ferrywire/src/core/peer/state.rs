//! State that a peer's channels, its control session and its operations share.
//!
//! Invariant: the first reason for the peer's end is the one that all its operations and callers are given.
//! Read next: `in_flight.rs`, where operations begin and end; `sharing.rs`, which worker and channel moves what is queued;
//! `../inbound.rs`, the sinks of receives and reads; `replies.rs`, frames without payload.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::core::context::Context;
use crate::core::inbound::{Inbound, Sink, taken_back};
use crate::core::operation::{Op, Verb};
use crate::core::queue::{Entry, SendQueue};
use crate::core::staging::Messages;
use crate::core::stats::ChannelCounters;
use crate::core::waiting::{WaitList, WakeHandle};
use crate::error::Error;
use ferrywire_memory::Memory;
use ferrywire_metrics::{PeerSample, Source};
use ferrywire_proto::Identity;
use ferrywire_proto::protection::Protection;
use ferrywire_proto::schedule::{self, InCache};
use ferrywire_proto::wire::Refusal;
use ferrywire_sys::affinity;

use super::in_flight::InFlight;
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
    /// The timeout of the close that ended the peer before all transfers had finished.
    pub close_timeout: OnceLock<Duration>,
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
    pub(super) context: Arc<Context>,
    pub info: PeerInfo,
    pub queue: SendQueue,
    pub inbound: Inbound,
    pub counters: Vec<Arc<ChannelCounters>>,
    pub(super) in_flight: InFlight,
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
    pub(super) home: AtomicUsize,
    /// Number of the worker that is woken first for the next operation.
    pub(super) rouse_first: AtomicUsize,
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
