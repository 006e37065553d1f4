//! A connected remote endpoint: what users call, and what its frames do here.
//!
//! [`Peer`] is the handle; [`PeerState`] is what its channels, its control session and its operations
//! share. Frames that arrive come in through [`PeerState::land`] (where does the payload go?) and
//! [`PeerState::arrived`] (it is there).
//!
//! Invariant: every offset that comes from the wire is checked against the region it names before an
//! address is made of it. Read next: `transfer.rs`, `queue.rs`, `inbound.rs`.

use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::inbound::{Inbound, Reply, Sink};
use crate::limits;
use crate::memory::{Identity, Memory, Region, RegionHome, RemoteRegion, check_range};
use crate::operation::{Op, Transfer, Verb};
use crate::progress::{self, Worker};
use crate::queue::{Body, Entry, SendQueue, WITHDRAWN};
use crate::stats::{ChannelCounters, PeerStats};
use crate::transfer::{Piece, Pieces, merge};
use crate::transport::IoVec;
use crate::wire::{self, Header, Kind, Refusal};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// Where the payload of a frame goes, kept alive while it is filled.
pub(crate) enum Landing {
    Region { key: u64, memory: Arc<Memory> },
    Sink { sink: Arc<Sink>, peer: Arc<PeerState> },
}

impl Landing {
    /// Whether it must not be kept for the next frame.
    pub fn once(&self) -> bool {
        matches!(self, Landing::Sink { .. })
    }

    pub fn is_in(&self, memory: &Arc<Memory>) -> bool {
        match self {
            Landing::Region { memory: mine, .. } => Arc::ptr_eq(mine, memory),
            Landing::Sink { sink, .. } => {
                sink.op.memory.as_ref().is_some_and(|mine| Arc::ptr_eq(mine, memory))
            }
        }
    }

    /// The memory that is filled.
    pub fn memory(&self) -> Option<&Arc<Memory>> {
        match self {
            Landing::Region { memory, .. } => Some(memory),
            Landing::Sink { sink, .. } => sink.op.memory.as_ref(),
        }
    }

    pub fn is_sink(&self, op: &Arc<Op>) -> bool {
        matches!(self, Landing::Sink { sink, .. } if Arc::ptr_eq(&sink.op, op))
    }

    fn sink(sink: Arc<Sink>, peer: Arc<PeerState>) -> Landing {
        sink.op.hold();
        Landing::Sink { sink, peer }
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        // An operation whose memory is being filled cannot end before this.
        if let Landing::Sink { sink, peer } = self {
            peer.let_go(&sink.op);
        }
    }
}

/// What is known of a peer from its control session.
pub(crate) struct PeerInfo {
    pub session: u64,
    pub identity: Identity,
    pub name: String,
    pub channels: usize,
    pub chunk_bytes: usize,
    pub window: usize,
    pub crc: bool,
    pub same_host: bool,
    /// Whether payload goes over lanes beside the channels' connections.
    pub lanes: bool,
}

/// The shared state of a connected peer.
pub(crate) struct PeerState {
    engine: Arc<Engine>,
    pub session: u64,
    pub identity: Identity,
    name: String,
    pub queue: SendQueue,
    pub inbound: Inbound,
    pub window_frames: usize,
    pub same_host: bool,
    counters: Vec<Arc<ChannelCounters>>,
    home: AtomicUsize,
    in_flight: AtomicU64,
    /// Reads of the peer that are being answered.
    serving: AtomicU64,
    in_flight_bytes: AtomicU64,
    failure: OnceLock<Error>,
    pub resent: AtomicU64,
    pub lost: Mutex<Vec<String>>,
    pub setup: Mutex<Duration>,
    /// Nobody holds a [`Peer`] any more: to be closed when all is sent.
    pub abandoned: AtomicBool,
    /// It was closed here before all was finished.
    pub unfinished: AtomicBool,
    /// A call of a plugin holds some of its operations' memory and does not return.
    pub stuck: AtomicBool,
}

impl PeerState {
    pub fn new(engine: Arc<Engine>, info: PeerInfo) -> PeerState {
        let queue = SendQueue::new(info.chunk_bytes, info.crc);
        PeerState {
            engine,
            session: info.session,
            identity: info.identity,
            name: info.name,
            queue: if info.lanes { queue.with_lanes() } else { queue },
            inbound: Inbound::default(),
            window_frames: info.window,
            same_host: info.same_host,
            counters: (0..info.channels).map(|_| Arc::new(ChannelCounters::new())).collect(),
            home: AtomicUsize::new(0),
            in_flight: AtomicU64::new(0),
            serving: AtomicU64::new(0),
            in_flight_bytes: AtomicU64::new(0),
            failure: OnceLock::new(),
            resent: AtomicU64::new(0),
            lost: Mutex::new(Vec::new()),
            setup: Mutex::new(Duration::ZERO),
            abandoned: AtomicBool::new(false),
            unfinished: AtomicBool::new(false),
            stuck: AtomicBool::new(false),
        }
    }

    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn now(&self) -> Duration {
        self.engine.transport.now()
    }

    pub fn counters(&self, index: u16) -> Arc<ChannelCounters> {
        self.counters[usize::from(index)].clone()
    }

    /// The worker whose channels small operations prefer.
    pub fn home(&self) -> &Arc<Worker> {
        &self.engine.workers[self.home.load(Ordering::Relaxed) % self.engine.workers.len()]
    }

    /// Finds the home again after channels came or went: the worker of the first live channel.
    pub fn choose_home(&self) {
        let first = self.counters.iter().position(|channel| channel.alive.load(Ordering::Relaxed));
        self.home.store(self.engine_worker(first.unwrap_or(0) as u16), Ordering::Relaxed);
    }

    /// The worker that a channel belongs to, the same on both sides where they have as many.
    pub fn engine_worker(&self, index: u16) -> usize {
        usize::from(index) % self.engine.workers.len()
    }

    /// Whether anything posted has not ended, receives apart: those may wait for ever.
    pub fn in_flight(&self) -> bool {
        self.in_flight.load(Ordering::Relaxed) > 0
    }

    /// Likewise, beside the operation just posted.
    pub fn in_flight_beside_one(&self) -> bool {
        self.in_flight.load(Ordering::Relaxed) > 1
    }

    /// Whether so much is under way that the threads should do it, and waiting callers sleep.
    pub fn in_bulk(&self) -> bool {
        self.in_flight_bytes.load(Ordering::Relaxed) >= BULK_BYTES
    }

    /// Whether a channel belongs to the home.
    pub fn is_home(&self, index: u16) -> bool {
        self.engine_worker(index) == self.home.load(Ordering::Relaxed)
    }

    /// An operation of ours begins.
    fn begin(&self, op: &Op) {
        self.in_flight_bytes.fetch_add(op.total, Ordering::Relaxed);
        self.in_flight.fetch_add(u64::from(op.verb != Verb::Recv), Ordering::Relaxed);
        self.serving.fetch_add(u64::from(op.verb == Verb::Serve), Ordering::Relaxed);
    }

    /// It has ended, or could not begin.
    fn end(&self, op: &Op) {
        self.in_flight_bytes.fetch_sub(op.total, Ordering::Relaxed);
        self.in_flight.fetch_sub(u64::from(op.verb != Verb::Recv), Ordering::Relaxed);
        self.serving.fetch_sub(u64::from(op.verb == Verb::Serve), Ordering::Relaxed);
    }

    /// Channels that it was set up with.
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

    /// A channel was lost, in words; the oldest are forgotten.
    pub fn note_lost(&self, line: String) {
        let mut lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        if lost.len() >= limits::LOST_LINES_MAX {
            lost.remove(0);
        }
        lost.push(line);
    }

    /// State in a line, for error messages.
    pub fn describe(&self) -> String {
        let lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        let last = lost.last().map(|line| format!("; last lost: {line}")).unwrap_or_default();
        format!("{} of {} channels up{last}", self.live_channels(), self.counters.len())
    }

    pub fn failure(&self) -> Option<Error> {
        self.failure.get().cloned()
    }

    /// For tests only: it closes without asking.
    pub fn skips_drain(&self) -> bool {
        self.engine.plugin.as_ref().is_some_and(|host| host.config.skip_drain)
    }

    /// Why an operation is lost that cannot end: its memory is in the hands of a call that does not return.
    pub fn lost_to_a_call(&self) -> Option<Error> {
        self.stuck.load(Ordering::SeqCst).then(|| self.failure()).flatten()
    }

    // ---- operations ----

    /// An operation's token comes back; if it was the last, the operation has ended.
    pub fn let_go(&self, op: &Arc<Op>) {
        if op.let_go() {
            self.ended(op);
        }
    }

    /// A part of an operation will not be moved.
    pub fn cut_short(&self, op: &Arc<Op>) {
        op.cut_short();
        self.let_go(op);
    }

    fn ended(&self, op: &Arc<Op>) {
        self.end(op);
        if op.failed() {
            self.tell_failure(op);
        }
        self.queue.ended(op);
        // A notification may have waited for this one.
        self.rouse_home();
    }

    /// The peer may hold something that waits for the rest of an operation of ours: it will not come.
    fn tell_failure(&self, op: &Op) {
        let mut header = Header::new(Kind::Refuse);
        header.key = Refusal::Other as u64;
        match op.verb {
            Verb::Send => header.transfer = op.sink.load(Ordering::Relaxed),
            Verb::Serve => header.transfer = op.key,
            Verb::Write if !op.message.is_empty() => {
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

    fn post(self: &Arc<Self>, op: Arc<Op>) -> Result<Transfer> {
        self.begin(&op);
        if !self.queue.post(op.clone()) {
            self.end(&op);
            return Err(self.gone());
        }
        progress::kick(self, op.total);
        Ok(Transfer { op, peer: self.clone() })
    }

    fn gone(&self) -> Error {
        self.failure().unwrap_or(Error::Closed)
    }

    /// The peer placed (or refused, and that was noted) this frame.
    pub fn delivered(&self, entry: Entry, refusal: Option<Refusal>) {
        let Some(op) = &entry.op else { return };
        if let Some(refusal) = refusal {
            self.refused(op, refusal);
        }
        match entry.header.kind {
            Kind::Read if op.failing() => {
                self.end_sink(op);
            }
            Kind::Read => {}
            _ => op.count(u64::from(entry.header.len) * u64::from(!matches!(entry.body, Body::None))),
        }
        self.let_go(op);
    }

    pub fn refused(&self, op: &Arc<Op>, refusal: Refusal) {
        op.fail(Error::AccessRefused { peer: self.name.clone(), why: refusal.text().into() });
    }

    fn end_sink(&self, op: &Arc<Op>) {
        if self.inbound.close_sink(op.id).is_some() {
            self.cut_short(op);
        }
    }

    pub fn cancel(self: &Arc<Self>, op: &Arc<Op>) {
        if op.ended() {
            return;
        }
        op.cancel();
        match op.verb {
            Verb::Recv if self.inbound.unpost(op) => self.cut_short(op),
            Verb::Recv | Verb::Read => {
                self.end_sink(op);
                let op = op.clone();
                let what = || format!("the memory of a cancelled operation with {}", self.name);
                // The operation ends when the thread comes back; its memory is not free before.
                if let Err(error) = progress::abandon(&self.engine, what, move |landing| landing.is_sink(&op))
                {
                    tracing::error!("{error}");
                }
            }
            _ => {
                if self.queue.withdraw(op.id).is_some() || self.queue.take_out(op) {
                    self.cut_short(op);
                }
                progress::kick(self, 0);
            }
        }
    }

    /// The peer is gone, or about to be: nothing more is accepted for it.
    pub fn doom(&self, error: Error) {
        let _ = self.failure.set(error);
    }

    /// Ends all that waits for a doomed peer. Called once its channels are closed, so that nothing is
    /// placed any more.
    pub fn fail(&self) {
        let error = self.gone();
        for op in self.queue.close() {
            op.fail(error.clone());
            self.let_go(&op);
        }
        for op in self.inbound.close(&error) {
            self.let_go(&op);
        }
    }

    /// Frames that cannot be sent any more.
    pub fn drop_entries(&self, entries: Vec<Entry>) {
        let error = self.gone();
        for op in entries.into_iter().filter_map(|entry| entry.op) {
            op.fail(error.clone());
            if matches!(op.verb, Verb::Read) {
                self.end_sink(&op);
            }
            self.let_go(&op);
        }
    }

    // ---- frames that arrive ----

    /// Finds where a data frame's payload goes.
    pub fn land(
        self: &Arc<Self>,
        header: &Header,
        placements: &[u8],
        pieces: &mut Vec<IoVec>,
        last: Option<Landing>,
    ) -> Result<Landing, Refusal> {
        if header.flags & wire::FLAG_SINK != 0 {
            let landing = Landing::sink(self.inbound.sink(header.key)?, self.clone());
            if let Landing::Sink { sink, .. } = &landing {
                sink.locate(header.offset, u64::from(header.len), pieces)?;
            }
            return Ok(landing);
        }
        let landing = match last {
            Some(Landing::Region { key, .. }) if key == header.key => last.ok_or(Refusal::NoRegion)?,
            _ => Landing::Region { key: header.key, memory: self.named(header.key)? },
        };
        if let Landing::Region { memory, .. } = &landing {
            if memory.revoked() {
                return Err(Refusal::NoRegion);
            }
            place(memory, header, placements, pieces)?;
        }
        Ok(landing)
    }

    /// The region that the peer names by its key, if the transport gets there.
    fn named(&self, key: u64) -> Result<Arc<Memory>, Refusal> {
        let memory = self.engine.regions().find(key)?;
        memory.place().reached_by(&*self.engine.transport, "local").map_err(|_| Refusal::OutOfReach)?;
        Ok(memory)
    }

    /// A whole frame is here, its payload placed.
    pub fn arrived(
        self: &Arc<Self>,
        header: &Header,
        placements: &[u8],
        landing: Option<&Landing>,
        message: Vec<u8>,
    ) -> Result<(), Refusal> {
        match header.kind {
            Kind::Data => self.data_arrived(header, landing, message),
            Kind::Notify => self.inbound.notified(header, message),
            Kind::Send | Kind::Announce => {
                let replies = self.inbound.message(header, message)?;
                self.reply(replies);
                Ok(())
            }
            Kind::Match => {
                match self.queue.matched(header.transfer, header.key) {
                    Some(op) if op.total == 0 => self.let_go(&op),
                    Some(op) => self.rouse_for(op.total),
                    None => {
                        let mut refuse = Header::new(Kind::Refuse);
                        refuse.transfer = header.key;
                        refuse.key = Refusal::NoSink as u64;
                        self.reply(vec![Reply::Frame(refuse)]);
                    }
                }
                Ok(())
            }
            Kind::Credit => {
                self.queue.credit(header.total);
                Ok(())
            }
            Kind::Read => self.serve(header, placements),
            Kind::Refuse => {
                self.peer_refused(header);
                Ok(())
            }
            Kind::Ack => Ok(()),
        }
    }

    fn data_arrived(
        &self,
        header: &Header,
        landing: Option<&Landing>,
        message: Vec<u8>,
    ) -> Result<(), Refusal> {
        if let Some(Landing::Sink { sink, .. }) = landing
            && let Some(op) = self.inbound.filled(sink, u64::from(header.len))
        {
            self.ended(&op);
        }
        if header.flags & wire::FLAG_COUNTED != 0 {
            self.inbound.count(header)?;
        }
        match header.notify > 0 {
            true => self.inbound.notified(header, message),
            false => Ok(()),
        }
    }

    fn reply(&self, replies: Vec<Reply>) {
        for reply in replies {
            match reply {
                // A peer that lets so many wait is flooding us with what can only be refused.
                Reply::Frame(header)
                    if header.kind == Kind::Refuse && self.queue.waiting() >= limits::ANSWERS_WAITING_MAX => {
                }
                Reply::Frame(header) => self.queue.push_own(header),
                Reply::Ended(op) => self.ended(&op),
            }
        }
    }

    /// The peer cannot go on with an announced send, or with a message we matched.
    fn peer_refused(&self, header: &Header) {
        let refusal = Refusal::parse(header.key as u8);
        if let Some(op) = self.queue.withdraw(header.transfer) {
            self.refused(&op, refusal);
            self.let_go(&op);
        } else if let Some(sink) = self.inbound.close_sink(header.transfer) {
            if refusal == Refusal::NoSink && sink.op.verb == Verb::Recv {
                // It was taken back before a byte of it was sent: the receive is for the next message.
                let replies = self.inbound.post_again(sink.op.clone());
                return self.reply(replies);
            }
            let why = "it gave the operation up half-way".into();
            sink.op.fail(Error::AccessRefused { peer: self.name.clone(), why });
            self.let_go(&sink.op);
        }
    }

    /// The peer reads from a region of ours: answers like a write to its sink.
    fn serve(self: &Arc<Self>, header: &Header, placements: &[u8]) -> Result<(), Refusal> {
        let memory = self.named(header.key)?;
        let mut position = 0;
        let mut pieces = Vec::new();
        for placement in wire::placements(placements) {
            let len = u64::from(placement.len);
            memory.span(placement.offset, len).ok_or(Refusal::OutOfRegion)?;
            pieces.push(Piece { local: placement.offset, remote: position, len });
            position += len;
        }
        // The answer's chunks lie at their position in the sink, from there on.
        header.offset.checked_add(position).ok_or(Refusal::OutOfRegion)?;
        if self.serving.load(Ordering::Relaxed) >= limits::READS_SERVED_MAX as u64 {
            return Err(Refusal::Limit);
        }
        let mut op =
            Op::new(self.engine.next_id(), Verb::Serve, pieces_of(merge(pieces)), Some(memory), header.total);
        op.number = header.offset;
        let op = Arc::new(op);
        self.begin(&op);
        match self.queue.post(op.clone()) {
            true => self.rouse_for(op.total),
            false => self.end(&op),
        }
        Ok(())
    }

    /// So many bytes wait now: bulk is for the channels of all workers, which may be asleep.
    fn rouse_for(&self, bytes: u64) {
        match bytes > crate::queue::SMALL_BYTES_MAX {
            true => self.engine.workers.iter().for_each(|worker| worker.rouse()),
            false => self.rouse_home(),
        }
    }

    /// Something small may wait now, which only the home's channels take: it may be asleep.
    fn rouse_home(&self) {
        if self.queue.has_work() {
            self.home().rouse();
        }
    }
}

fn place(
    memory: &Memory,
    header: &Header,
    placements: &[u8],
    pieces: &mut Vec<IoVec>,
) -> Result<(), Refusal> {
    if header.segments == 0 {
        let base = memory.span(header.offset, u64::from(header.len)).ok_or(Refusal::OutOfRegion)?;
        push_piece(pieces, base, header.len);
        return Ok(());
    }
    let mut sum = 0u64;
    for placement in wire::placements(placements) {
        let base = memory.span(placement.offset, u64::from(placement.len)).ok_or(Refusal::OutOfRegion)?;
        push_piece(pieces, base, placement.len);
        sum += u64::from(placement.len);
    }
    if sum == u64::from(header.len) { Ok(()) } else { Err(Refusal::OutOfRegion) }
}

/// Pieces are never empty: whoever fills them would not get past one.
fn push_piece(pieces: &mut Vec<IoVec>, base: *mut u8, len: u32) {
    if len > 0 {
        pieces.push(IoVec::new(base, len as usize));
    }
}

fn pieces_of(mut merged: Vec<Piece>) -> Pieces {
    match merged.len() {
        0 => Pieces::One(Piece { local: 0, remote: 0, len: 0 }),
        1 => Pieces::One(merged.remove(0)),
        _ => Pieces::Many(merged.into()),
    }
}

/// One block of a vectored operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Offset in the local region, in bytes.
    pub local_offset: u64,
    /// Offset in the remote region, in bytes.
    pub remote_offset: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// A checked list of blocks between a local and a remote region, made once and used many times.
#[derive(Clone)]
pub struct BlockList {
    local: Region,
    remote: RemoteRegion,
    blocks: Arc<[Piece]>,
    /// All blocks as a write moves them, and as a read does.
    write: OnceLock<Pieces>,
    read: OnceLock<Pieces>,
}

impl fmt::Debug for BlockList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "BlockList({} blocks, {} runs)",
            self.blocks.len(),
            self.in_order(Verb::Write).as_slice().len()
        )
    }
}

impl BlockList {
    /// Checks every block against both regions. Blocks are moved in the order of their addresses at the
    /// source, and runs that touch on both sides as one; where blocks overlap at the target, either's bytes
    /// stay.
    pub fn new(local: &Region, remote: &RemoteRegion, blocks: &[Block]) -> Result<BlockList> {
        for block in blocks {
            local.check("local", block.local_offset, block.bytes)?;
            check_range("remote", block.remote_offset, block.bytes, remote.len())?;
        }
        let blocks: Arc<[Piece]> = blocks
            .iter()
            .map(|block| Piece { local: block.local_offset, remote: block.remote_offset, len: block.bytes })
            .collect();
        let (write, read) = Default::default();
        Ok(BlockList { local: local.clone(), remote: *remote, blocks, write, read })
    }

    /// Blocks in the list.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether it has no blocks.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// All blocks in the order in which an operation moves them, sorted at its first use.
    fn in_order(&self, verb: Verb) -> &Pieces {
        let order = if verb == Verb::Read { &self.read } else { &self.write };
        order.get_or_init(|| sorted(verb, self.blocks.to_vec()))
    }

    fn select(&self, verb: Verb, indices: Option<&[u32]>) -> Result<Pieces> {
        let Some(indices) = indices else {
            return Ok(self.in_order(verb).clone());
        };
        let mut chosen = Vec::with_capacity(indices.len());
        for index in indices {
            let piece = self.blocks.get(*index as usize).ok_or_else(|| {
                Error::invalid(
                    "block index",
                    format!("{index}, but the list has {} blocks", self.blocks.len()),
                )
            })?;
            chosen.push(*piece);
        }
        Ok(sorted(verb, chosen))
    }
}

/// Pieces in the order of their addresses at the source: reading on from one to the next is what caches
/// and prefetchers are good at, and it costs a fifth of the time of small scattered blocks.
fn sorted(verb: Verb, mut pieces: Vec<Piece>) -> Pieces {
    match verb {
        Verb::Read => pieces.sort_unstable_by_key(|piece| piece.remote),
        _ => pieces.sort_unstable_by_key(|piece| piece.local),
    }
    pieces_of(merge(pieces))
}

/// A connected remote endpoint. Clones share it; when the last is dropped the connection is closed
/// after what was posted has been sent.
#[derive(Clone)]
pub struct Peer {
    pub(crate) state: Arc<PeerState>,
    _handle: Arc<Handle>,
}

struct Handle(Arc<PeerState>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.abandoned.store(true, Ordering::SeqCst);
        self.0.engine.wake_control();
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Peer({})", self.state.name)
    }
}

impl Peer {
    pub(crate) fn new(state: Arc<PeerState>) -> Peer {
        Peer { _handle: Arc::new(Handle(state.clone())), state }
    }

    /// Its address and label.
    pub fn name(&self) -> String {
        self.state.name.clone()
    }

    /// The remote endpoint's identity: another one after a restart.
    pub fn identity(&self) -> Identity {
        self.state.identity
    }

    /// Whether the peer runs on this host.
    pub fn same_host(&self) -> bool {
        self.state.same_host
    }

    /// Why the peer is lost, if it is.
    pub fn error(&self) -> Option<Error> {
        self.state.failure()
    }

    /// Writes `bytes` of `source` into the peer's region. Complete when they are in its memory.
    pub fn write(
        &self,
        source: &Region,
        source_offset: u64,
        target: &RemoteRegion,
        target_offset: u64,
        bytes: u64,
    ) -> Result<Transfer> {
        self.write_run(source, source_offset, target, target_offset, bytes, None)
    }

    /// Like [`Peer::write`], and delivers `message` to the peer once the bytes are in its memory. A message
    /// has at least one byte.
    pub fn write_notify(
        &self,
        source: &Region,
        source_offset: u64,
        target: &RemoteRegion,
        target_offset: u64,
        bytes: u64,
        message: &[u8],
    ) -> Result<Transfer> {
        self.write_run(source, source_offset, target, target_offset, bytes, Some(message))
    }

    fn write_run(
        &self,
        source: &Region,
        source_offset: u64,
        target: &RemoteRegion,
        target_offset: u64,
        bytes: u64,
        message: Option<&[u8]>,
    ) -> Result<Transfer> {
        source.check("source", source_offset, bytes)?;
        check_range("target", target_offset, bytes, target.len())?;
        let pieces = Pieces::One(Piece { local: source_offset, remote: target_offset, len: bytes });
        self.write_pieces(source, target, pieces, message)
    }

    /// Writes the blocks of a prepared list, or those that `indices` name, as one operation.
    pub fn write_blocks(
        &self,
        list: &BlockList,
        indices: Option<&[u32]>,
        message: Option<&[u8]>,
    ) -> Result<Transfer> {
        self.write_pieces(&list.local, &list.remote, list.select(Verb::Write, indices)?, message)
    }

    fn write_pieces(
        &self,
        source: &Region,
        target: &RemoteRegion,
        pieces: Pieces,
        message: Option<&[u8]>,
    ) -> Result<Transfer> {
        self.check(source, target)?;
        let mut op = self.op(Verb::Write, pieces, Some(source.memory().clone()), target.key);
        if message.is_some_and(<[u8]>::is_empty) {
            return Err(Error::invalid(
                "notification",
                "an empty one cannot go with a write: give it a byte",
            ));
        }
        op.message = checked_message(message.unwrap_or_default())?;
        self.state.post(Arc::new(op))
    }

    /// Reads `bytes` of the peer's region into `target`.
    pub fn read(
        &self,
        target: &Region,
        target_offset: u64,
        source: &RemoteRegion,
        source_offset: u64,
        bytes: u64,
    ) -> Result<Transfer> {
        target.check("target", target_offset, bytes)?;
        check_range("source", source_offset, bytes, source.len())?;
        let pieces = Pieces::One(Piece { local: target_offset, remote: source_offset, len: bytes });
        self.read_pieces(target, source, pieces)
    }

    /// Reads the blocks of a prepared list, or those that `indices` name, as one operation.
    pub fn read_blocks(&self, list: &BlockList, indices: Option<&[u32]>) -> Result<Transfer> {
        self.read_pieces(&list.local, &list.remote, list.select(Verb::Read, indices)?)
    }

    fn read_pieces(&self, target: &Region, source: &RemoteRegion, pieces: Pieces) -> Result<Transfer> {
        self.check(target, source)?;
        let op = self.op(Verb::Read, pieces, Some(target.memory().clone()), source.key);
        let op = Arc::new(op);
        let transfer = Transfer { op: op.clone(), peer: self.state.clone() };
        if let Some(error) = self.error() {
            return Err(error);
        }
        self.state.begin(&op);
        self.state.queue.join(&op);
        if op.total == 0 {
            self.state.let_go(&op);
            return Ok(transfer);
        }
        self.state.inbound.open_sink(op.clone(), op.total);
        self.ask(&op, source.key);
        if let Some(error) = self.error() {
            op.fail(error);
            self.state.end_sink(&op);
        }
        progress::kick(&self.state, op.total);
        Ok(transfer)
    }

    /// Queues the requests of a read; each names a bounded number of ranges and bytes.
    fn ask(&self, op: &Arc<Op>, key: u64) {
        let mut position = 0;
        let mut ranges = Vec::new();
        let mut start = 0;
        for piece in op.pieces.as_slice() {
            let mut done = 0;
            while done < piece.len {
                let len = (piece.len - done).min(READ_RANGE_BYTES_MAX);
                ranges.push(wire::Placement { offset: piece.remote + done, len: len as u32 });
                done += len;
                position += len;
                if ranges.len() == limits::SEGMENTS_PER_CHUNK_MAX || position - start >= READ_REQUEST_BYTES {
                    self.ask_one(op, key, start, &ranges);
                    ranges.clear();
                    start = position;
                }
            }
        }
        if !ranges.is_empty() {
            self.ask_one(op, key, start, &ranges);
        }
    }

    fn ask_one(&self, op: &Arc<Op>, key: u64, start: u64, ranges: &[wire::Placement]) {
        let mut header = Header::new(Kind::Read);
        header.transfer = op.id;
        header.key = key;
        header.offset = start;
        header.total = op.id;
        header.segments = ranges.len() as u16;
        let mut entry = Entry::bare(header);
        let mut placements = Vec::new();
        ranges.iter().for_each(|range| range.encode_into(&mut placements));
        entry.placements = placements.into();
        op.hold();
        entry.op = Some(op.clone());
        self.state.drop_entries(self.state.queue.push_entry(entry));
    }

    /// Sends a message with a tag; it meets the peer's receives of that tag in the order of posting.
    pub fn send(&self, tag: u64, source: &Region, offset: u64, bytes: u64) -> Result<Transfer> {
        self.send_blocks(tag, source, &[(offset, bytes)])
    }

    /// Sends one message gathered from `(offset, bytes)` pieces.
    pub fn send_blocks(&self, tag: u64, source: &Region, blocks: &[(u64, u64)]) -> Result<Transfer> {
        self.check_local(source)?;
        let pieces = lined_up("source", source, blocks)?;
        let memory = Some(source.memory().clone());
        let state = &self.state;
        let posted = state.queue.post_send(|number| {
            let mut op = self.op(Verb::Send, pieces, memory, tag);
            op.number = number;
            state.begin(&op);
            Arc::new(op)
        });
        let op = posted.ok_or_else(|| state.gone())?;
        progress::kick(state, op.total);
        Ok(Transfer { op, peer: state.clone() })
    }

    /// Receives the next message with this tag. The outcome is the message's length.
    pub fn recv(&self, tag: u64, target: &Region, offset: u64, bytes: u64) -> Result<Transfer> {
        self.recv_blocks(tag, target, &[(offset, bytes)])
    }

    /// Receives one message, scattered over `(offset, bytes)` pieces.
    pub fn recv_blocks(&self, tag: u64, target: &Region, blocks: &[(u64, u64)]) -> Result<Transfer> {
        self.check_local(target)?;
        let pieces = lined_up("target", target, blocks)?;
        let op = Arc::new(self.op(Verb::Recv, pieces, Some(target.memory().clone()), tag));
        self.state.begin(&op);
        let replies = self.state.inbound.post(op.clone());
        let answer = replies.iter().any(|reply| matches!(reply, Reply::Frame(_)));
        self.state.reply(replies);
        if let Some(error) = self.error()
            && self.state.inbound.unpost(&op)
        {
            op.fail(error.clone());
            self.state.let_go(&op);
            return Err(error);
        }
        if answer {
            progress::kick(&self.state, 0);
        }
        Ok(Transfer { op, peer: self.state.clone() })
    }

    /// Delivers a small message after everything posted to this peer before it.
    pub fn notify(&self, message: &[u8]) -> Result<Transfer> {
        let pieces = Pieces::One(Piece { local: 0, remote: 0, len: 0 });
        let mut op = self.op(Verb::Notify, pieces, None, 0);
        op.message = checked_message(message)?;
        self.state.post(Arc::new(op))
    }

    /// The next notification, if one is here. Those that came before a peer was lost are still given.
    pub fn poll_notification(&self) -> Result<Option<Vec<u8>>> {
        if let Some(message) = self.state.inbound.take_notification() {
            return Ok(Some(message));
        }
        progress::nudge(&self.state);
        match (self.state.inbound.take_notification(), self.error()) {
            (None, Some(error)) => Err(error),
            (message, _) => Ok(message),
        }
    }

    /// Waits for the next notification.
    pub fn wait_notification(&self, deadline: Duration) -> Result<Vec<u8>> {
        let inbound = &self.state.inbound;
        let start = self.state.engine.transport.now();
        loop {
            if let Some(message) = inbound.take_notification() {
                return Ok(message);
            }
            if let Some(error) = self.error() {
                return Err(error);
            }
            let waited = self.state.engine.transport.now().saturating_sub(start);
            let Some(rest) = deadline.checked_sub(waited).filter(|rest| !rest.is_zero()) else {
                let what = format!("a notification from {}: {}", self.state.name, self.state.describe());
                return Err(Error::Deadline { what, waited });
            };
            progress::wait(
                &self.state,
                rest,
                |handle| inbound.wake_at_notification(handle),
                || inbound.has_notification(),
            );
        }
    }

    /// Counters and configuration in force.
    pub fn stats(&self) -> PeerStats {
        let channels = self.state.counters.iter().enumerate();
        PeerStats {
            transport: self.state.engine.transport.name(),
            channels: channels.filter_map(|(index, each)| each.snapshot(index as u16)).collect(),
            resent_chunks: self.state.resent.load(Ordering::Relaxed),
            lost_channels: self.state.lost.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            setup: *self.state.setup.lock().unwrap_or_else(PoisonError::into_inner),
            chunk_bytes: self.state.queue.chunk_bytes,
            window: self.state.window_frames,
            crc: self.state.queue.crc,
        }
    }

    /// Finishes what was posted, on both sides, then closes.
    ///
    /// # Errors
    /// [`Error::Deadline`] when the peer did not finish in time; it is closed all the same.
    pub fn close(&self, deadline: Duration) -> Result<()> {
        crate::control::close_peer(&self.state, deadline)
    }

    fn op(&self, verb: Verb, pieces: Pieces, memory: Option<Arc<Memory>>, key: u64) -> Op {
        Op::new(self.state.engine.next_id(), verb, pieces, memory, key)
    }

    /// Whether the region is ours, and the transport gets there.
    fn check_local(&self, local: &Region) -> Result<()> {
        local.belongs_to(self.state.engine.identity)?;
        local.place().reached_by(&*self.state.engine.transport, "local")
    }

    fn check(&self, local: &Region, remote: &RemoteRegion) -> Result<()> {
        self.check_local(local)?;
        if remote.owner() != self.state.identity {
            let why = format!(
                "it belongs to endpoint {}, but {} is {}: from before a restart, or another peer's",
                remote.owner(),
                self.state.name,
                self.state.identity
            );
            return Err(Error::invalid("remote region", why));
        }
        // Which GPUs the other end reaches is for it to say.
        match self.state.engine.plugin.is_some() {
            true => Ok(()),
            false => remote.place().reached_by(&*self.state.engine.transport, "remote"),
        }
    }
}

/// Bytes under way from which on threads, and not waiting callers, move them.
const BULK_BYTES: u64 = 512 << 10;
/// Bytes of one range in a read request, and of one request: so that all channels have answers to carry.
const READ_RANGE_BYTES_MAX: u64 = 64 << 20;
const READ_REQUEST_BYTES: u64 = 64 << 20;

fn lined_up(side: &'static str, region: &Region, blocks: &[(u64, u64)]) -> Result<Pieces> {
    let mut position = 0;
    let mut pieces = Vec::with_capacity(blocks.len());
    for (offset, bytes) in blocks {
        region.check(side, *offset, *bytes)?;
        pieces.push(Piece { local: *offset, remote: position, len: *bytes });
        position += bytes;
    }
    Ok(pieces_of(merge(pieces)))
}

fn checked_message(message: &[u8]) -> Result<Box<[u8]>> {
    if message.len() > limits::NOTIFY_BYTES_MAX {
        let why = format!("{} bytes, at most {} are allowed", message.len(), limits::NOTIFY_BYTES_MAX);
        return Err(Error::invalid("notification", why));
    }
    Ok(message.into())
}
