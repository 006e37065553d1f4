//! What a peer's channels have yet to send. All channels of a peer pull from this one queue.
//!
//! Four lanes, emptied in this order: frames of lost channels, the engine's own frames (behind them notifications that were
//! held back), small operations, bulk operations. Small operations do not wait behind bulk, nor starve it.
//!
//! Invariant: each frame pulled is in exactly one window, or back in this queue, until the peer has
//! acknowledged it. Read next: `entry.rs`, what is pulled; `channel/`, which pulls.

mod entry;
mod read_flow_control;
mod sequencer;

pub(crate) use entry::{Body, DROPPED, Entry};

use crate::core::operation::{NO_EPOCH, Op, Verb};
use crate::core::staging::Sending;
use crate::error::Error;
use ferrywire_proto::limits;
use ferrywire_proto::schedule;
use ferrywire_proto::transfer::{ChunkLimits, Cutter};
use ferrywire_proto::window::Window;
use ferrywire_proto::wire::{Header, Kind};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use entry::{chunk_entry, eager_cost, message_entry, small_entry, whole};
use read_flow_control::ReadFlowControl;
use sequencer::Sequencer;

/// An operation of at most this many bytes travels as one frame, ahead of bulk.
pub(crate) const SMALL_BYTES_MAX: u64 = 64 << 10;
/// Bytes of small operations after which a bulk chunk has its turn.
const SMALL_RUN_BYTES: u64 = 512 << 10;

const _: () = assert!(SMALL_BYTES_MAX <= limits::STAGING_SLOT_BYTES as u64);

struct Bulk {
    op: Arc<Op>,
    cutter: Cutter,
}

impl Bulk {
    /// It is taken out before it is cut to its end.
    fn leaves(&self) {
        self.op.uncut.store(self.cutter.position() == 0, Ordering::Relaxed);
    }
}

/// Operations posted between two standalone notifications.
#[derive(Default)]
struct Epoch {
    outstanding: u64,
    then: Option<Arc<Op>>,
}

#[derive(Default)]
pub(crate) struct Lanes {
    resend: VecDeque<Entry>,
    own: VecDeque<Entry>,
    /// Notifications that were too far ahead: no frames of our own, which are counted, and in their turn before small ones.
    admitted: VecDeque<(u64, Arc<Op>)>,
    small: VecDeque<Arc<Op>>,
    bulk: VecDeque<Bulk>,
    small_run: u64,
    /// Bytes of bulk operations that are not cut yet.
    bulk_bytes: u64,
    epochs: VecDeque<Epoch>,
    epoch_first: u64,
    next_number: u64,
    messages: Sequencer,
    notifications: Sequencer,
    credit: usize,
    /// Sends that are announced and not matched.
    announced: HashMap<u64, Arc<Op>>,
    asking: ReadFlowControl,
    closed: bool,
}

/// The queue of one peer.
pub(crate) struct SendQueue {
    lanes: Mutex<Lanes>,
    /// Items that wait, and those of them that are not small operations, or not bulk.
    waiting: AtomicUsize,
    waiting_beside_small: AtomicUsize,
    waiting_beside_bulk: AtomicUsize,
    /// Bytes of bulk operations that are not cut yet.
    bulk_bytes: AtomicU64,
    /// Whether requests of reads wait for others to be answered.
    keeps_back: AtomicBool,
    pub chunk_bytes: usize,
    pub crc: bool,
    /// Bytes up to which an operation travels as one frame.
    small_bytes_max: u64,
}

/// What a channel may take in one pull.
#[derive(Clone, Copy)]
pub(crate) struct Pull {
    pub bytes: u64,
    pub channels: usize,
    /// The longest chunk.
    pub chunk_bytes: usize,
    /// The shortest and the longest, of payload that is staged.
    pub staged_bytes: (usize, usize),
    /// Bytes of small operations that may be taken.
    pub small: u64,
    /// Whether bulk may be taken: not by a channel that is too far ahead of the others.
    pub bulk: bool,
    /// Messages that the channel's lane has room for; `None` without a lane.
    pub messages: Option<usize>,
}

impl SendQueue {
    pub fn new(chunk_bytes: usize, crc: bool) -> SendQueue {
        let lanes = Lanes { credit: limits::EAGER_CREDIT_BYTES, ..Lanes::default() };
        let (waiting, waiting_beside_small, waiting_beside_bulk, bulk_bytes) = Default::default();
        let (lanes, small_bytes_max) = (Mutex::new(lanes), SMALL_BYTES_MAX);
        SendQueue {
            lanes,
            waiting,
            waiting_beside_small,
            waiting_beside_bulk,
            bulk_bytes,
            keeps_back: AtomicBool::new(false),
            chunk_bytes,
            crc,
            small_bytes_max,
        }
    }

    /// Of a peer whose channels have lanes: no message is larger than a chunk.
    pub fn with_lanes(mut self) -> SendQueue {
        self.small_bytes_max = self.small_bytes_max.min(self.chunk_bytes as u64);
        self
    }

    fn lock(&self) -> MutexGuard<'_, Lanes> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether something waits to be pulled.
    pub fn has_work(&self) -> bool {
        self.waiting() > 0
    }

    /// Whether something waits that a channel takes which may take small operations.
    pub fn has_work_beside_bulk(&self) -> bool {
        self.waiting_beside_bulk.load(Ordering::SeqCst) > 0
    }

    /// Whether something waits that a channel takes which may take bulk.
    pub fn has_work_beside_small(&self) -> bool {
        self.waiting_beside_small.load(Ordering::SeqCst) > 0
    }

    /// Bytes of bulk that wait to be pulled.
    pub fn bulk_bytes(&self) -> u64 {
        self.bulk_bytes.load(Ordering::Relaxed)
    }

    /// Items that wait to be pulled.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    /// Frames of our own among them, such as answers to the peer.
    pub fn answers_waiting(&self) -> usize {
        self.lock().own.len()
    }

    fn publish(&self, lanes: &Lanes) {
        self.waiting.store(lanes.len(), Ordering::SeqCst);
        self.waiting_beside_small.store(lanes.len() - lanes.small.len(), Ordering::SeqCst);
        self.waiting_beside_bulk.store(lanes.len() - lanes.bulk.len(), Ordering::SeqCst);
        self.bulk_bytes.store(lanes.bulk_bytes, Ordering::Relaxed);
        let keeps_back = lanes.asking.keeps_back();
        if self.keeps_back.load(Ordering::Relaxed) != keeps_back {
            self.keeps_back.store(keeps_back, Ordering::Relaxed);
        }
    }

    /// Queues an operation; false when the peer is gone.
    #[must_use]
    pub fn post(&self, op: Arc<Op>) -> bool {
        let mut lanes = self.lock();
        if lanes.closed {
            return false;
        }
        match op.verb {
            Verb::Notify => lanes.fence(op),
            // What the peer reads is no matter of our notifications.
            Verb::Serve => lanes.enqueue(op, self.small_bytes_max),
            _ => {
                op.epoch.store(lanes.join_epoch(), Ordering::Relaxed);
                lanes.enqueue(op, self.small_bytes_max);
            }
        }
        self.publish(&lanes);
        true
    }

    /// Queues what follows the parts of an operation, which are queued or done: its notification. False when the
    /// peer is gone.
    #[must_use]
    pub fn post_behind_parts(&self, whole: Arc<Op>) -> bool {
        let mut lanes = self.lock();
        if lanes.closed {
            return false;
        }
        lanes.push_bulk(whole);
        self.publish(&lanes);
        true
    }

    /// Lets later notifications wait for an operation that is not queued itself.
    pub fn join(&self, op: &Op) {
        op.epoch.store(self.lock().join_epoch(), Ordering::Relaxed);
    }

    /// Numbers a send that `make` makes, and queues it, unless it is held.
    #[must_use]
    pub fn post_send(&self, held: bool, make: impl FnOnce(u64) -> Option<Arc<Op>>) -> Option<Arc<Op>> {
        let mut lanes = self.lock();
        if lanes.closed {
            return None;
        }
        let op = make(lanes.next_number)?;
        lanes.next_number += 1;
        op.epoch.store(lanes.join_epoch(), Ordering::Relaxed);
        if !held {
            lanes.small.push_back(op.clone());
            self.publish(&lanes);
        }
        Some(op)
    }

    /// Queues an operation that was held, with all that was done for it before; false when the peer is gone.
    #[must_use]
    pub fn post_held(&self, op: Arc<Op>) -> bool {
        let mut lanes = self.lock();
        if lanes.closed {
            return false;
        }
        match op.verb {
            Verb::Notify => lanes.fence(op),
            Verb::Send => lanes.small.push_back(op),
            _ => lanes.enqueue(op, self.small_bytes_max),
        }
        self.publish(&lanes);
        true
    }

    /// Queues a frame of the engine's own.
    pub fn push_own(&self, header: Header) {
        let _closed = self.push_entry(Entry::bare(header));
    }

    /// Queues a prepared frame of the engine's own; gives it back when the peer is gone.
    pub fn push_entry(&self, entry: Entry) -> Vec<Entry> {
        let mut lanes = self.lock();
        if lanes.closed {
            return vec![entry];
        }
        lanes.own.push_back(entry);
        self.publish(&lanes);
        Vec::new()
    }

    /// Queues a request of a read, or keeps it back while the peer has so many; gives it back when the peer is gone.
    pub fn ask(&self, entry: Entry, op: &Op) -> Vec<Entry> {
        let mut lanes = self.lock();
        if lanes.closed {
            return vec![entry];
        }
        lanes.asking.keep(entry, op);
        lanes.ask_on();
        if lanes.asking.keeps_back() {
            // Whoever places bytes of the read from here on, and says so, sees that somebody waits; the others we see.
            self.keeps_back.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            lanes.asking.answered(op);
            lanes.ask_on();
        }
        self.publish(&lanes);
        Vec::new()
    }

    /// Bytes of a read of several requests have been placed and counted: the next requests may go out.
    pub fn answered(&self, op: &Op) {
        fence(Ordering::SeqCst);
        if self.keeps_back.load(Ordering::Relaxed) {
            let mut lanes = self.lock();
            lanes.asking.answered(op);
            lanes.ask_on();
            self.publish(&lanes);
        }
    }

    /// A read asks for nothing more: gives back what it has not asked for, and others have its room.
    pub fn forget_requests(&self, op: &Op) -> Vec<Entry> {
        let mut lanes = self.lock();
        let kept = lanes.asking.forget(op);
        lanes.ask_on();
        self.publish(&lanes);
        kept
    }

    /// Takes back what a lost channel did not deliver, oldest first, ahead of everything else.
    /// Returns what cannot be sent any more because the peer is gone.
    pub fn resend(&self, entries: Vec<Entry>) -> Vec<Entry> {
        let mut lanes = self.lock();
        if lanes.closed {
            return entries;
        }
        entries.into_iter().rev().for_each(|entry| lanes.resend.push_front(entry));
        self.publish(&lanes);
        Vec::new()
    }

    /// The operation has ended: releases the notifications that waited for it alone.
    pub fn ended(&self, op: &Op) {
        let epoch = op.epoch.load(Ordering::Relaxed);
        if epoch == NO_EPOCH {
            return;
        }
        let mut lanes = self.lock();
        if op.verb == Verb::Read {
            let _none_is_left = lanes.asking.forget(op);
            lanes.ask_on();
        }
        lanes.leave_epoch(epoch);
        self.publish(&lanes);
    }

    /// The peer has this frame: if it has a number, those may go out that were too far ahead of it. True if there are any.
    pub fn had(&self, header: &Header) -> bool {
        let message = matches!(header.kind, Kind::Send | Kind::Announce);
        if !message && (header.kind != Kind::Notify || header.total != 0) {
            return false;
        }
        let mut lanes = self.lock();
        let admitted = match message {
            true => lanes.messages.had(header.offset),
            false => lanes.notifications.had(header.transfer),
        };
        if admitted.is_empty() {
            return false;
        }
        for (number, op) in admitted {
            match message {
                true => lanes.small.push_back(op),
                false => lanes.admitted.push_back((number, op)),
            }
        }
        self.publish(&lanes);
        true
    }

    /// The peer has consumed eager messages.
    pub fn credit(&self, bytes: u64) {
        // Whoever looks after copies asks at every turn.
        if bytes == 0 {
            return;
        }
        let mut lanes = self.lock();
        lanes.credit = limits::EAGER_CREDIT_BYTES.min(lanes.credit.saturating_add(bytes as usize));
    }

    /// The peer has matched an announced send: its data go to this sink, if it has any. None if it was
    /// withdrawn.
    #[must_use]
    pub fn matched(&self, transfer: u64, sink: u64) -> Option<Arc<Op>> {
        let mut lanes = self.lock();
        let op = lanes.announced.remove(&transfer)?;
        op.sink.store(sink, Ordering::Relaxed);
        if op.total > 0 {
            lanes.push_bulk(op.clone());
            self.publish(&lanes);
        }
        Some(op)
    }

    /// Takes an announced send out that is cancelled before anybody has received it, and tells the peer, which holds it; true
    /// if it was here.
    pub fn take_back(&self, op: &Op) -> bool {
        let mut lanes = self.lock();
        if lanes.announced.remove(&op.id).is_none() {
            return false;
        }
        let mut header = Header::new(Kind::Announce);
        (header.transfer, header.key, header.offset, header.total) = (op.id, op.key, op.number, WITHDRAWN);
        lanes.own.push_back(Entry::bare(header));
        self.publish(&lanes);
        true
    }

    /// Takes an announced send out, because it is refused.
    #[must_use]
    pub fn withdraw(&self, transfer: u64) -> Option<Arc<Op>> {
        self.lock().announced.remove(&transfer)
    }

    /// Takes out what is not cut yet of an operation; true if there was any.
    pub fn take_out(&self, op: &Arc<Op>) -> bool {
        let mut lanes = self.lock();
        let before = lanes.len();
        lanes.bulk.retain(|bulk| {
            let found = Arc::ptr_eq(&bulk.op, op);
            if found {
                bulk.leaves();
            }
            !found
        });
        if op.verb == Verb::Write || op.verb == Verb::Serve {
            lanes.small.retain(|small| !Arc::ptr_eq(small, op));
        }
        lanes.bulk_bytes =
            lanes.bulk.iter().map(|bulk| bulk.op.bytes_to_cut() - bulk.cutter.position()).sum();
        let taken = lanes.len() < before;
        self.publish(&lanes);
        taken
    }

    /// Closes the queue for good and returns the operations that hold a token here.
    pub fn close(&self) -> Vec<Arc<Op>> {
        let mut lanes = self.lock();
        lanes.closed = true;
        let mut ops: Vec<Arc<Op>> = lanes.small.drain(..).collect();
        ops.extend(lanes.bulk.drain(..).map(|bulk| bulk.op));
        ops.extend(lanes.announced.drain().map(|(_, op)| op));
        // Who comes too late joins none of them.
        lanes.epoch_first += lanes.epochs.len() as u64;
        ops.extend(lanes.epochs.drain(..).filter_map(|epoch| epoch.then));
        ops.extend(lanes.resend.drain(..).filter_map(|entry| entry.op));
        ops.extend(lanes.own.drain(..).filter_map(|entry| entry.op));
        ops.extend(lanes.admitted.drain(..).map(|(_, op)| op));
        ops.extend(lanes.messages.close().chain(lanes.notifications.close()));
        ops.extend(lanes.asking.close().filter_map(|entry| entry.op));
        self.publish(&lanes);
        ops
    }

    /// Fills a window from the lanes, up to a number of bytes, and reserves room for payload of GPUs that goes
    /// into the stream. Returns the bytes taken and the operations that ended without needing a frame.
    pub fn pull(
        &self,
        window: &mut Window<Entry>,
        staging: &mut Sending,
        mut pull: Pull,
    ) -> (u64, Vec<Arc<Op>>) {
        let mut lanes = self.lock();
        let mut taken = 0;
        let mut dropped = Vec::new();
        let mut messages = pull.messages;
        // Any frame may have a payload for the lane, so a full one takes none.
        while taken < pull.bytes && window.has_room() && messages != Some(0) {
            // A lane reaches the GPU itself.
            let gpu = messages.is_some() || staging.has_room();
            let Some(mut entry) = lanes.next(pull, gpu, &mut dropped) else {
                break;
            };
            entry.post(messages.is_some());
            messages = messages.map(|room| room - usize::from(entry.header.is_posted()));
            staging.reserve(&mut entry);
            // Of what is staged the checksum is made once it is there.
            if self.crc && entry.staged.is_none() {
                entry.add_crc();
            }
            let bytes = entry.bytes();
            taken += bytes as u64;
            pull.small = pull.small.saturating_sub(bytes as u64);
            window.post(entry, bytes);
        }
        self.publish(&lanes);
        (taken, dropped)
    }
}

impl Lanes {
    fn len(&self) -> usize {
        self.resend.len() + self.own.len() + self.admitted.len() + self.small.len() + self.bulk.len()
    }

    /// Requests of reads that need not be kept back any longer go out.
    fn ask_on(&mut self) {
        while let Some(entry) = self.asking.next() {
            self.own.push_back(entry);
        }
    }

    fn enqueue(&mut self, op: Arc<Op>, small_bytes_max: u64) {
        if op.total <= small_bytes_max && op.pieces.as_slice().len() <= limits::SEGMENTS_PER_CHUNK_MAX {
            self.small.push_back(op);
        } else {
            self.push_bulk(op);
        }
    }

    fn push_bulk(&mut self, op: Arc<Op>) {
        self.bulk_bytes += op.bytes_to_cut();
        self.bulk.push_back(Bulk { op, cutter: Cutter::default() });
    }

    fn join_epoch(&mut self) -> u64 {
        if self.epochs.is_empty() {
            self.epochs.push_back(Epoch::default());
        }
        let last = self.epochs.len() - 1;
        self.epochs[last].outstanding += 1;
        self.epoch_first + last as u64
    }

    fn leave_epoch(&mut self, epoch: u64) {
        let Some(index) = epoch.checked_sub(self.epoch_first) else {
            return;
        };
        if let Some(epoch) = self.epochs.get_mut(index as usize) {
            epoch.outstanding -= 1;
        }
        self.release_fences();
    }

    /// A standalone notification goes out when everything posted before it has ended.
    fn fence(&mut self, op: Arc<Op>) {
        if self.epochs.is_empty() {
            self.epochs.push_back(Epoch::default());
        }
        if let Some(last) = self.epochs.back_mut() {
            last.then = Some(op);
        }
        self.epochs.push_back(Epoch::default());
        self.release_fences();
    }

    fn release_fences(&mut self) {
        while let Some(epoch) = self.epochs.front_mut() {
            if epoch.outstanding > 0 {
                return;
            }
            let Some(op) = epoch.then.take() else { return };
            self.small.push_back(op);
            self.epochs.pop_front();
            self.epoch_first += 1;
        }
    }

    /// The next frame; with `gpu`, also one whose payload is in memory of a GPU.
    fn next(&mut self, pull: Pull, gpu: bool, dropped: &mut Vec<Arc<Op>>) -> Option<Entry> {
        if let Some(mut entry) = self.resend.pop_front_if(|entry| gpu || entry.gpu().is_none()) {
            // Its memory may be what ended the connection that it was sent over, or the user's again.
            let sends = entry.op.as_ref().filter(|_| entry.payload().is_some());
            // Of a write that is cancelled nothing is sent again: newer bytes may be at its target by now.
            let cancelled = |op: &Op| (op.verb == Verb::Write).then_some(Error::Cancelled);
            let failure =
                sends.filter(|op| op.unsendable()).and_then(|op| op.failure().or_else(|| cancelled(op)));
            let credit = failure.map_or(0, |failure| entry.give_up(&failure) as usize);
            self.credit = limits::EAGER_CREDIT_BYTES.min(self.credit + credit);
            return Some(entry);
        }
        if let Some(entry) = self.own.pop_front() {
            return Some(entry);
        }
        if let Some((number, op)) = self.admitted.pop_front() {
            return Some(message_entry(op, number, 0));
        }
        let bulk_waits = pull.bulk && !self.bulk.is_empty();
        if pull.small > 0
            && (self.small_run < SMALL_RUN_BYTES || !bulk_waits)
            && let Some(entry) = self.next_small(pull, gpu, dropped)
        {
            self.small_run += entry.bytes() as u64;
            return Some(entry);
        }
        self.small_run = 0;
        if bulk_waits { self.next_bulk(pull, gpu, dropped) } else { None }
    }

    fn next_small(&mut self, pull: Pull, gpu: bool, dropped: &mut Vec<Arc<Op>>) -> Option<Entry> {
        let fits = |op: &mut Arc<Op>| gpu || !op.on_gpu();
        while let Some(op) = self.small.pop_front_if(fits) {
            if op.unsendable() && op.verb != Verb::Send {
                dropped.push(op);
                continue;
            }
            let entry = match op.verb {
                Verb::Send => {
                    let op = self.messages.admit_numbered(op);
                    op.map(|op| self.send_entry(op, pull.messages.is_some(), dropped))
                }
                Verb::Notify => {
                    let numbered = self.notifications.number(op);
                    numbered.map(|(number, op)| message_entry(op, number, 0))
                }
                _ => Some(small_entry(op)),
            };
            if entry.is_some() {
                return entry;
            }
        }
        None
    }

    /// A send goes out whole if it is small and credit allows; else it is announced and waits.
    fn send_entry(&mut self, op: Arc<Op>, lane: bool, dropped: &mut Vec<Arc<Op>>) -> Entry {
        let mut header = Header::new(Kind::Announce);
        header.transfer = op.id;
        header.key = op.key;
        header.offset = op.number;
        header.total = op.total;
        if op.unsendable() {
            header.total = WITHDRAWN;
            dropped.push(op);
            return Entry::bare(header);
        }
        let cost = eager_cost(op.total);
        if op.total > limits::EAGER_BYTES_MAX as u64
            // What a lane could reach itself is not staged.
            || (lane && op.on_gpu() && op.total > 0)
            || cost > self.credit
            || op.pieces.as_slice().len() > limits::SEGMENTS_PER_CHUNK_MAX
        {
            self.announced.insert(op.id, op);
            return Entry::bare(header);
        }
        self.credit -= cost;
        header.kind = Kind::Send;
        header.len = op.total as u32;
        Entry::new(header, Box::default(), Body::Chunk(whole(&op)), Some(op))
    }

    fn next_bulk(&mut self, pull: Pull, gpu: bool, dropped: &mut Vec<Arc<Op>>) -> Option<Entry> {
        loop {
            let bulk = self.bulk.front_mut().filter(|bulk| gpu || !bulk.op.on_gpu())?;
            let (min, max) = match bulk.op.on_gpu() && pull.messages.is_none() {
                true => (pull.staged_bytes.0, pull.chunk_bytes.min(pull.staged_bytes.1)),
                false => (limits::CHUNK_BYTES_MIN, pull.chunk_bytes),
            };
            let bytes = schedule::chunk_bytes(self.bulk_bytes, pull.channels, min, max);
            let limits = ChunkLimits { bytes, segments: limits::SEGMENTS_PER_CHUNK_MAX };
            let chunk = match bulk.op.unsendable() {
                true => None,
                false => bulk.cutter.next(bulk.op.pieces.as_slice(), limits),
            };
            let last = bulk.cutter.position() == bulk.op.total;
            let cut = chunk.map_or(0, |chunk| u64::from(chunk.bytes));
            let rest = bulk.op.bytes_to_cut() - bulk.cutter.position();
            self.bulk_bytes -= if chunk.is_none() { rest } else { cut };
            let op = bulk.op.clone();
            if chunk.is_none() {
                bulk.leaves();
            }
            if chunk.is_none() || (last && op.message.is_empty()) {
                self.bulk.pop_front();
            }
            match chunk {
                Some(chunk) if last && op.message.is_empty() => return Some(chunk_entry(op, chunk)),
                Some(chunk) => {
                    op.hold();
                    return Some(chunk_entry(op, chunk));
                }
                None if op.failing() => dropped.push(op),
                None => {
                    let (id, total) = (op.id, op.total);
                    return Some(message_entry(op, id, total));
                }
            }
        }
    }
}

/// The `total` of an announcement whose send was cancelled before it went out, and of a notification
/// whose transfer has failed.
pub(crate) const WITHDRAWN: u64 = u64::MAX;

#[cfg(test)]
mod tests {
    use super::*;
    use ferrywire_proto::transfer::{Piece, Pieces};

    /// While many were released an answer to the peer was dropped, as if those were answers that it does not read.
    #[test]
    fn notifications_that_go_out_late_are_no_answers() {
        let queue = SendQueue::new(1 << 20, false);
        let note = || {
            Arc::new(Op::new(1, Verb::Notify, Pieces::One(Piece { local: 0, remote: 0, len: 0 }), None, 0))
        };
        let sent = (0..=limits::EARLY_FRAMES_MAX).filter_map(|_| queue.lock().notifications.number(note()));
        assert_eq!(sent.count(), limits::EARLY_FRAMES_MAX);
        assert!(queue.had(&Header::new(Kind::Notify)));
        assert_eq!((queue.waiting(), queue.answers_waiting()), (1, 0));
        assert!(queue.has_work_beside_bulk());
        assert_eq!(queue.close().len(), 1);
    }
}
