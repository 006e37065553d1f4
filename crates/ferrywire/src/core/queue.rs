//! The send queue of a peer: its outbox behind a lock, and counts that are read without the lock.
//!
//! An [`Entry`] is a frame that has left the queue, encoded, with the memory that its payload comes from.
//!
//! Invariants: the published counts equal those of the outbox whenever its lock is free; the pieces of an
//! entry are exactly the bytes that its header announces.
//! Read next: `outbox/` of `ferrywire-proto`, which orders frames; `channel/`, which pulls them.

pub(crate) use ferrywire_proto::limits::SMALL_BYTES_MAX;
pub(crate) use ferrywire_proto::outbox::{Body, Pull};
pub(crate) use ferrywire_proto::wire::WITHDRAWN;

use crate::core::operation::{Hold, Op};
use crate::core::read_room::ReadRoom;
use crate::core::staging::Staged;
use crate::core::trace::ChunkStart;
use crate::error::Error;
use ferrywire_memory::{Memory, MemoryLocation};
use ferrywire_proto::limits::{PeerLimits, SEGMENTS_PER_CHUNK_MAX};
use ferrywire_proto::outbox::{Epoch, Frame, Matched, Outbox, Read, is_numbered, withdrawn};
use ferrywire_proto::schedule::InCache;
use ferrywire_proto::window::Window;
use ferrywire_proto::wire::{self, HEADER_BYTES, Header, Kind};
use std::hint;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// Kinds of queued items in [`SendQueue::waiting`]: small operations, bulk, and all others.
const SOME_SMALL: u64 = 1;
const SOME_BULK: u64 = 1 << 1;
const SOME_OTHER: u64 = 1 << 2;
const KIND_BITS: u32 = 3;

/// Tries to lock the outbox before a thread sleeps until it is free. A pull holds it for a few microseconds, and to wake a
/// thread takes longer. An idle thread tries as often before, as long as there is work for it.
const LOCK_TRIES: u32 = 400;

/// The staging rings of a channel, as the queue fills them.
pub(crate) trait Stage {
    /// Whether another frame of the largest size can be reserved.
    fn has_room(&self) -> bool;

    /// Reserves room for a frame that has just left the queue. Arithmetic only, because the queue is locked.
    fn reserve(&mut self, entry: &mut Entry);
}

/// The queue of one peer.
pub(crate) struct SendQueue {
    outbox: Mutex<Outbox<Hold>>,
    /// The number of queued items above [`KIND_BITS`] bits, which say whether some are of a kind.
    waiting: AtomicU64,
    /// Bytes of bulk operations that are not cut into chunks yet.
    bulk_bytes: AtomicU64,
    /// Bytes of the first bulk operation, or `u64::MAX` if it has too many pieces for one frame.
    next_ordered_bytes: AtomicU64,
    read_room: ReadRoom,
    pub chunk_bytes: usize,
    /// Bytes in its window from which a channel counts as busy where channels take operations in order: the first number
    /// while no payload is staged, else the second.
    pub fill_bytes: [u64; 2],
    /// Bytes of bulk between two threads of one host.
    pub in_cache: InCache,
    /// Whether staging rings use half of their bytes while payload goes both ways.
    pub short_rings: bool,
    pub crc: bool,
    /// Number of times that the outbox was locked.
    #[cfg(test)]
    pub locks: AtomicU64,
}

/// A numbered operation, and its hold unless the queue has it.
type Posted = (Arc<Op>, Option<Hold>);

/// A read of many pieces may have several requests, and counts as long however few bytes it has.
fn read_of(op: &Op) -> Read {
    let is_short = op.total <= SMALL_BYTES_MAX && op.pieces.as_slice().len() < SEGMENTS_PER_CHUNK_MAX;
    Read { id: op.id, is_short }
}

impl SendQueue {
    pub fn new(chunk_bytes: usize, fill_bytes: [u64; 2], crc: bool) -> SendQueue {
        SendQueue {
            outbox: Mutex::new(Outbox::new(PeerLimits::default())),
            waiting: AtomicU64::new(0),
            bulk_bytes: AtomicU64::new(0),
            next_ordered_bytes: AtomicU64::new(u64::MAX),
            read_room: ReadRoom::default(),
            chunk_bytes,
            fill_bytes,
            in_cache: InCache::new(None, 1, 1),
            short_rings: false,
            crc,
            #[cfg(test)]
            locks: AtomicU64::new(0),
        }
    }

    /// Limits messages to one chunk, for a peer whose channels have lanes.
    pub fn with_lanes(mut self) -> SendQueue {
        let small_bytes_max = SMALL_BYTES_MAX.min(self.chunk_bytes as u64);
        self.outbox = Mutex::new(Outbox::new(PeerLimits { small_bytes_max, ..PeerLimits::default() }));
        self
    }

    fn lock(&self) -> MutexGuard<'_, Outbox<Hold>> {
        self.try_lock().unwrap_or_else(|| self.wait_for_lock())
    }

    #[cold]
    fn wait_for_lock(&self) -> MutexGuard<'_, Outbox<Hold>> {
        for _ in 0..LOCK_TRIES {
            hint::spin_loop();
            if let Some(outbox) = self.try_lock() {
                return outbox;
            }
        }
        self.counted(self.outbox.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Locks the outbox if no other thread has locked it.
    #[inline]
    fn try_lock(&self) -> Option<MutexGuard<'_, Outbox<Hold>>> {
        match self.outbox.try_lock() {
            Ok(outbox) => Some(self.counted(outbox)),
            Err(TryLockError::Poisoned(error)) => Some(self.counted(error.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Counts the lock for tests.
    fn counted<'a>(&self, outbox: MutexGuard<'a, Outbox<Hold>>) -> MutexGuard<'a, Outbox<Hold>> {
        #[cfg(test)]
        self.locks.fetch_add(1, Ordering::SeqCst);
        outbox
    }

    /// Locks the outbox for a pull. Returns `None` once the pull would take nothing, unless the pull `posts`
    /// an operation: idle threads try all the time, and while one of them has the lock it may take
    /// everything.
    fn lock_for(&self, posts: bool, pull: &Pull) -> Option<MutexGuard<'_, Outbox<Hold>>> {
        if posts {
            return Some(self.lock());
        }
        for _ in 0..LOCK_TRIES {
            if !self.has_work_for(pull) {
                return None;
            }
            if let Some(outbox) = self.try_lock() {
                return Some(outbox);
            }
            hint::spin_loop();
        }
        Some(self.lock())
    }

    /// Whether the pull would find something. Answers, resent frames and others that are neither small operations nor
    /// bulk need no share.
    fn has_work_for(&self, pull: &Pull) -> bool {
        let small = if pull.small > 0 { SOME_SMALL } else { 0 };
        let bulk = if pull.bulk { SOME_BULK } else { 0 };
        self.has_some(small | bulk | SOME_OTHER)
    }

    /// Whether items wait to be pulled.
    pub fn has_work(&self) -> bool {
        self.waiting() > 0
    }

    /// Whether items wait for a channel that may take small operations.
    pub fn has_work_beside_bulk(&self) -> bool {
        self.has_some(SOME_SMALL | SOME_OTHER)
    }

    /// Whether items wait for a channel that may take bulk.
    pub fn has_work_beside_small(&self) -> bool {
        self.has_some(SOME_BULK | SOME_OTHER)
    }

    /// Whether items of one of these kinds wait to be pulled.
    fn has_some(&self, kinds: u64) -> bool {
        self.waiting.load(Ordering::SeqCst) & kinds != 0
    }

    /// Bytes of bulk that wait to be pulled.
    pub fn bulk_bytes(&self) -> u64 {
        self.bulk_bytes.load(Ordering::Relaxed)
    }

    /// Whether the next bulk operation has at most `bytes` bytes, and not too many pieces for one frame.
    pub fn next_is_ordered(&self, bytes: u64) -> bool {
        self.next_ordered_bytes.load(Ordering::Relaxed) <= bytes
    }

    /// Number of items that wait to be pulled.
    pub fn waiting(&self) -> usize {
        (self.waiting.load(Ordering::SeqCst) >> KIND_BITS) as usize
    }

    /// Number of queued frames of the engine's own, such as answers to the peer.
    pub fn answers_waiting(&self) -> usize {
        self.lock().answers_len()
    }

    fn publish(&self, outbox: &Outbox<Hold>) {
        // A thread that sees more items also sees these.
        self.bulk_bytes.store(outbox.bulk_bytes(), Ordering::Relaxed);
        self.next_ordered_bytes.store(outbox.next_ordered_bytes().unwrap_or(u64::MAX), Ordering::Relaxed);
        let (items, small, bulk) = (outbox.len(), outbox.small_len(), outbox.bulk_len());
        let some = |kind, count: usize| if count > 0 { kind } else { 0 };
        let kinds = some(SOME_SMALL, small) | some(SOME_BULK, bulk) | some(SOME_OTHER, items - small - bulk);
        let waiting = (items as u64) << KIND_BITS | kinds;
        // The lock's owner alone stores it. An ordered store costs much more than the comparison.
        if self.waiting.load(Ordering::Relaxed) != waiting {
            self.waiting.store(waiting, Ordering::SeqCst);
        }
    }

    /// Changes the outbox and publishes its counts.
    fn change<T>(&self, change: impl FnOnce(&mut Outbox<Hold>) -> T) -> T {
        let mut outbox = self.lock();
        let changed = change(&mut outbox);
        self.publish(&outbox);
        changed
    }

    /// Changes the read requests of the outbox, and publishes whether some of them wait.
    fn change_reads<T>(&self, change: impl FnOnce(&mut Outbox<Hold>) -> T) -> T {
        self.change(|outbox| {
            let changed = change(outbox);
            self.read_room.set(outbox.keeps_back());
            changed
        })
    }

    /// Queues an operation; false if the peer is gone.
    #[must_use]
    pub fn post(&self, op: Hold) -> bool {
        let refused = self.change(|outbox| outbox.post(op)).err();
        refused.iter().for_each(|op| op.fail(Error::Closed));
        refused.is_none()
    }

    /// Queues the notification of an operation behind its children, which are queued or done.
    ///
    /// # Errors
    /// The operation's hold, if the peer is gone.
    pub fn post_behind_children(&self, parent: Hold) -> Result<(), Hold> {
        self.change(|outbox| outbox.post_behind_children(parent))
    }

    /// Makes later notifications wait for an operation that is not queued itself.
    pub fn join(&self, op: &Hold) {
        self.lock().join(op);
    }

    /// Numbers the send that `make` creates and queues it. With `held` the send is not queued, and its hold
    /// is returned.
    #[must_use]
    pub fn post_send(&self, held: bool, make: impl FnOnce(u64) -> Option<Hold>) -> Option<Posted> {
        let mut outbox = self.lock();
        let op = outbox.number_send(make)?;
        let shared = Arc::clone(&op);
        if held {
            return Some((shared, Some(op)));
        }
        let _is_open = outbox.post_joined(op);
        self.publish(&outbox);
        Some((shared, None))
    }

    /// Queues an operation that waited for a GPU stream.
    ///
    /// # Errors
    /// The operation's hold, if the peer is gone.
    pub fn post_joined(&self, op: Hold) -> Result<(), Hold> {
        self.change(|outbox| outbox.post_joined(op))
    }

    /// Queues a frame of the engine's own, without payload.
    pub fn push_own(&self, header: Header) {
        let _closed = self.push_entry(Entry::bare(header));
    }

    /// Queues a prepared frame. Returns the frame if the peer is gone.
    pub fn push_entry(&self, entry: Entry) -> Vec<Entry> {
        let closed = self.change(|outbox| outbox.push_own(entry.into())).err();
        closed.map(Entry::from).into_iter().collect()
    }

    /// Queues a read request, or keeps it back while the peer has `OUTSTANDING_READS_MAX`. Later notifications wait for
    /// the read. Returns the frame if the peer is gone.
    pub fn ask(&self, entry: Entry, op: &Hold) -> Vec<Entry> {
        let read = read_of(op);
        let closed: Result<(), Frame<Hold>> = self.change_reads(|outbox| {
            if op.epoch.get().is_none() {
                outbox.join(op);
            }
            self.end_short_reads(outbox);
            outbox.ask(entry.into(), read)?;
            op.set_asked();
            if outbox.keeps_back() {
                self.read_room.keep_back();
                self.end_short_reads(outbox);
                outbox.answered(read, op.moved());
            }
            Ok(())
        });
        closed.err().map(Entry::from).into_iter().collect()
    }

    fn end_short_reads(&self, outbox: &mut Outbox<Hold>) {
        let ended = self.read_room.take_ended();
        if ended > 0 {
            outbox.short_reads_ended(ended);
        }
    }

    /// Notes that bytes of a read with several requests have been placed and counted, so that more requests
    /// may go out.
    pub fn answered(&self, op: &Op) {
        if self.read_room.is_wanted() {
            self.change_reads(|outbox| outbox.answered(read_of(op), op.moved()));
        }
    }

    /// Withdraws the requests of a read that are kept back, and returns them. Other reads get the room of a long one; a
    /// short one leaves it at its end.
    pub fn forget_requests(&self, op: &Op) -> Vec<Entry> {
        let kept = self.change_reads(|outbox| outbox.forget_requests(read_of(op)));
        kept.into_iter().map(Entry::from).collect()
    }

    /// Queues the frames that a lost channel did not deliver, oldest first, ahead of everything else. Returns
    /// the frames if the peer is gone.
    pub fn resend(&self, entries: Vec<Entry>) -> Vec<Entry> {
        let mut outbox = self.lock();
        if outbox.is_closed() {
            return entries;
        }
        outbox.resend(entries.into_iter().map(Into::into));
        self.publish(&outbox);
        Vec::new()
    }

    /// Releases the notifications that waited only for this operation, which has ended. A write or short read that
    /// nothing waits for takes no lock.
    pub fn ended(&self, op: &Op) {
        let Some(epoch) = op.epoch.get() else { return };
        let is_waited_for = epoch.leave(1);
        if op.was_asked() {
            if read_of(op).is_short {
                if self.read_room.end_short() {
                    self.change_reads(|outbox| self.end_short_reads(outbox));
                }
            } else {
                let _none_is_left = self.forget_requests(op);
            }
        }
        if is_waited_for {
            self.change(Outbox::release_notifications);
        }
    }

    /// Releases the notifications that waited only for this many operations of an epoch, which have ended.
    pub fn left(&self, epoch: &Epoch, operations: u64) {
        if epoch.leave(operations) {
            self.change(Outbox::release_notifications);
        }
    }

    /// Notes that the peer has this frame. A numbered frame may release others that were too far ahead.
    /// Returns true if it released any.
    pub fn had(&self, header: &Header) -> bool {
        if !is_numbered(header) {
            return false;
        }
        let mut outbox = self.lock();
        let any = outbox.had(header);
        if any {
            self.publish(&outbox);
        }
        any
    }

    /// Returns credit for eager messages, in bytes, that the peer has consumed.
    pub fn credit(&self, bytes: u64) {
        // The poll of GPU copies calls this in every pass, mostly with 0.
        if bytes > 0 {
            self.lock().return_credit(bytes);
        }
    }

    /// Queues the data of an announced send that the peer has matched, for this sink.
    pub fn matched(&self, transfer: u64, sink: u64) -> Matched<Hold> {
        self.change(|outbox| outbox.matched(transfer, sink))
    }

    /// Withdraws an announced send that is cancelled before the peer matched it, and notifies the peer, which
    /// holds the announcement.
    pub fn take_back(&self, op: &Op) -> Option<Hold> {
        self.change(|outbox| outbox.take_back(op.id))
    }

    /// Withdraws an announced send that the peer refused.
    #[must_use]
    pub fn withdraw(&self, transfer: u64) -> Option<Hold> {
        self.lock().withdraw(transfer)
    }

    /// Withdraws the part of an operation that is not cut into chunks yet.
    pub fn take_out(&self, op: &Arc<Op>) -> Option<Hold> {
        self.change(|outbox| outbox.take_out(op.verb(), |queued| Arc::ptr_eq(queued, op)))
    }

    /// Closes the queue for good and returns its operations.
    pub fn close(&self) -> Vec<Hold> {
        self.change_reads(Outbox::close)
    }

    /// Queues `posted`, if any, and fills a window from the outbox, up to `pull.bytes`. Reserves staging room for
    /// GPU payload in the stream.
    pub fn pull(
        &self,
        posted: Option<Hold>,
        window: &mut Window<Entry>,
        staging: &mut impl Stage,
        mut pull: Pull,
    ) -> Pulled {
        let Some(mut outbox) = self.lock_for(posted.is_some(), &pull) else { return Pulled::default() };
        let refused = posted.and_then(|op| outbox.post(op).err());
        let mut taken = 0;
        let mut dropped = Vec::new();
        let mut messages = pull.messages;
        // Any frame may have a payload for the lane, so a full lane takes none.
        while taken < pull.bytes && window.has_room() && messages != Some(0) {
            // A lane reads GPU memory itself.
            let gpu = messages.is_some() || staging.has_room();
            let Some(mut frame) = outbox.next(pull, gpu, &mut dropped) else {
                break;
            };
            mark_posted(&mut frame.header, messages.is_some());
            let mut entry = Entry::from(frame);
            messages = messages.map(|room| room - usize::from(entry.header.is_posted()));
            staging.reserve(&mut entry);
            // A staged payload gets its checksum after the copy.
            if self.crc && entry.staged.is_none() {
                entry.add_crc();
            }
            let bytes = entry.bytes();
            taken += bytes as u64;
            pull.small = pull.small.saturating_sub(bytes as u64);
            window.post(entry, bytes);
        }
        self.publish(&outbox);
        Pulled { dropped, refused }
    }
}

/// Outcome of a pull.
#[derive(Default)]
pub(crate) struct Pulled {
    /// Operations that ended without needing a frame.
    pub dropped: Vec<Hold>,
    /// The posted operation, if the peer is gone.
    pub refused: Option<Hold>,
}

/// Sets whether the payload goes over a lane. A resent frame may go over another channel than before.
fn mark_posted(header: &mut Header, lane: bool) {
    let posted = lane && header.kind == Kind::Data && header.len > 0;
    if posted != header.is_posted() {
        header.flags ^= wire::FLAG_POSTED;
    }
}

/// An encoded frame of a window, and the source of its payload.
pub(crate) struct Entry {
    pub header: Header,
    pub encoded_header: [u8; HEADER_BYTES],
    pub placements: Box<[u8]>,
    pub body: Body,
    pub op: Option<Hold>,
    /// The payload's bytes in a staging ring, if it comes from a GPU.
    pub staged: Option<Staged>,
    /// When a channel took the frame, for a trace.
    pub chunk: Option<ChunkStart>,
}

/// The reason for which an operation fails once its region was dropped.
pub(crate) const DROPPED: &str = "the region was dropped before the transfer had ended";

impl Entry {
    /// Creates a frame without payload, such as an answer.
    pub fn bare(header: Header) -> Entry {
        Entry::from(Frame::bare(header))
    }

    /// Bytes of the frame, in the stream and over a lane.
    pub fn bytes(&self) -> usize {
        HEADER_BYTES + self.header.body_bytes()
    }

    /// Bytes of the frame that go into the stream.
    pub fn stream_bytes(&self) -> usize {
        HEADER_BYTES + self.header.stream_bytes()
    }

    /// The source memory of the payload, with its ranges as (offset, length) in bytes.
    pub fn payload(&self) -> Option<(&Arc<Memory>, impl Iterator<Item = (u64, u64)> + '_)> {
        let op = self.op.as_ref()?;
        match (&self.body, &op.memory) {
            (Body::Chunk(chunk), Some(memory)) => Some((memory, chunk.locals(op.pieces.as_slice()))),
            _ => None,
        }
    }

    /// Whether the payload must be read from memory that its user may have freed; false if a staging ring
    /// holds the payload.
    pub fn is_gone(&self) -> bool {
        self.staged.is_none() && self.is_of_gone_memory()
    }

    /// Whether the payload comes from memory that its user may have freed, even if a staging ring holds the
    /// payload now.
    pub fn is_of_gone_memory(&self) -> bool {
        self.payload().is_some_and(|(memory, _)| memory.is_gone())
    }

    /// The GPU whose memory the payload is staged from, if any.
    pub fn gpu(&self) -> Option<MemoryLocation> {
        if self.header.len == 0 || self.header.is_posted() {
            return None;
        }
        self.payload()
            .map(|(memory, _)| memory.location())
            .filter(|location| *location != MemoryLocation::Host)
    }

    /// Gives up the payload: the operation fails, and the frame is sent without effect so that later frames
    /// keep their numbers. Returns credit in bytes that the frame no longer needs.
    pub fn give_up(&mut self, error: &Error) -> u64 {
        self.op.iter().for_each(|op| op.fail(error.clone()));
        let (header, credit) = withdrawn(&self.header);
        self.header = header;
        self.encoded_header = self.header.encode();
        self.placements = Box::default();
        self.body = Body::None;
        credit
    }

    /// Fails the operation of a frame whose memory cannot be read. The frame is sent again without effect.
    pub fn fail_unread(&self, why: Error) {
        let why = if self.is_gone() { Error::invalid("region", DROPPED) } else { why };
        self.op.iter().for_each(|op| op.fail(why.clone()));
    }

    /// Calls `each` with the host memory that follows header and placements in the stream.
    pub fn stream_pieces(&self, each: impl FnMut(*mut u8, usize)) {
        self.pieces(!self.header.is_posted(), each);
    }

    fn pieces(&self, with_payload: bool, mut each: impl FnMut(*mut u8, usize)) {
        let Some(op) = &self.op else { return };
        if let Some((memory, ranges)) = self.payload().filter(|_| with_payload) {
            if let Some(staged) = &self.staged {
                each(staged.base(), self.header.len as usize);
            }
            for (offset, len) in ranges.filter(|_| self.staged.is_none()) {
                match memory.span(offset, len) {
                    Some(base) => each(base, len as usize),
                    None => debug_assert!(
                        false,
                        "a piece lies outside its memory, although pieces are checked when an operation is posted"
                    ),
                }
            }
        }
        if self.header.notify > 0 || self.header.kind == Kind::Notify {
            each(op.message.as_ptr().cast_mut(), op.message.len());
        }
    }

    /// Adds the checksum, once the CPU can read the payload.
    pub fn add_crc(&mut self) {
        let mut crc = crc32fast::Hasher::new();
        // SAFETY: the pieces lie in memory that the operation keeps alive.
        self.pieces(true, |base, len| crc.update(unsafe { std::slice::from_raw_parts(base, len) }));
        self.header.flags |= wire::FLAG_CRC;
        self.header.crc = crc.finalize();
        self.header.placements_crc = crc32fast::hash(&self.placements);
        self.encoded_header = self.header.encode();
    }
}

impl From<Frame<Hold>> for Entry {
    fn from(Frame { header, placements, body, op }: Frame<Hold>) -> Entry {
        Entry { encoded_header: header.encode(), header, placements, body, op, staged: None, chunk: None }
    }
}

impl From<Entry> for Frame<Hold> {
    /// Drops the staged bytes: the frame's next channel stages them again.
    fn from(Entry { header, placements, body, op, .. }: Entry) -> Frame<Hold> {
        Frame { header, placements, body, op }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::operation::{Task, no_owner};
    use crate::core::staging::Sending;
    use ferrywire_proto::limits;
    use ferrywire_proto::operation::{Piece, Pieces};
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    /// Idle threads pull all the time. Regression: on 32 cores they kept each other from the lock, and
    /// messages of 256 KiB moved at half of the rate.
    #[test]
    fn a_pull_that_may_take_nothing_takes_no_lock() {
        let queue = SendQueue::new(1 << 20, [1 << 18; 2], false);
        let mut window = Window::new(limits::WINDOW_FRAMES_MAX, usize::MAX);
        let mut pull = |small: u64, bulk: bool| {
            let before = queue.locks.load(Ordering::SeqCst);
            let pull = Pull {
                bytes: u64::MAX,
                channels: 1,
                chunk_bytes: 1 << 20,
                staged_bytes: (limits::STAGING_CHUNK_BYTES_MIN, limits::STAGING_SLOT_BYTES),
                ordered_bytes: 0,
                whole_bytes: 0,
                small,
                bulk,
                bulk_in_turn: false,
                messages: None,
            };
            queue.pull(None, &mut window, &mut Sending::default(), pull);
            (queue.locks.load(Ordering::SeqCst) - before, queue.waiting())
        };
        assert_eq!(pull(u64::MAX, true), (0, 0));
        let piece = Piece { local: 0, remote: 0, len: 2 * SMALL_BYTES_MAX };
        let bulk = Hold::new(Op::new(no_owner(), 1, Task::Write { region: 9 }, Pieces::One(piece), None));
        assert!(queue.post(bulk));
        assert_eq!([pull(0, false), pull(u64::MAX, false)], [(0, 1); 2]);
        // An answer to the peer is sent without regard to shares.
        queue.push_own(Header::new(Kind::Credit));
        assert_eq!(pull(0, false), (1, 1));
        assert_eq!(pull(0, true), (1, 0));
    }

    /// Regression: each ending write took the lock, and kept channels from taking frames.
    #[test]
    fn the_end_of_a_write_that_no_notification_waits_for_takes_no_lock() {
        const LIMIT: Duration = Duration::from_secs(60);
        let op = |id, task| {
            let pieces = Pieces::One(Piece { local: 0, remote: 0, len: 0 });
            Hold::new(Op::new(no_owner(), id, task, pieces, None))
        };
        let queue = Arc::new(SendQueue::new(1 << 20, [1 << 18; 2], false));
        let writes = [1, 2, 3].map(|id| op(id, Task::Write { region: 9 }));
        writes.iter().for_each(|write| queue.join(write));
        let [first, second, third] = writes;
        let locked = queue.lock();
        let (reported, hears) = mpsc::channel();
        let ending = queue.clone();
        let thread = thread::spawn(move || {
            ending.ended(&first);
            reported.send(()).expect("the test waits for the report");
        });
        hears.recv_timeout(LIMIT).expect("the write ends while the queue is locked");
        drop(locked);
        thread.join().expect("the thread has ended");
        // The last write that the notification waits for releases it.
        assert!(queue.post(op(4, Task::Notify)));
        queue.ended(&second);
        assert!(!queue.has_work());
        queue.ended(&third);
        assert_eq!(queue.waiting(), 1);
    }

    /// Regression: each ending read took the lock, and kept the thread that posts the next reads waiting.
    #[test]
    fn the_end_of_a_short_read_takes_no_lock_unless_others_wait_for_its_room() {
        let queue = SendQueue::new(1 << 20, [1 << 18; 2], false);
        let mut id = 0;
        let read_of_pieces = |id, pieces| Hold::new(Op::new(no_owner(), id, Task::read(9), pieces, None));
        let mut ask = || {
            id += 1;
            let read = read_of_pieces(id, Pieces::One(Piece { local: 0, remote: 0, len: 8 }));
            assert!(queue.ask(Entry::bare(Header::new(Kind::Read)), &read).is_empty());
            read
        };
        let locks = || queue.locks.load(Ordering::SeqCst);
        let first = ask();
        let before = locks();
        queue.ended(&first);
        assert_eq!(locks(), before);
        // The room of the read that has ended is used by the next ones, until there is no more.
        let mut reads: Vec<Hold> = (0..limits::OUTSTANDING_READS_MAX).map(|_| ask()).collect();
        let sent = queue.waiting();
        assert_eq!(sent, limits::OUTSTANDING_READS_MAX / 4 * 3 + 1, "the first of them has ended");
        for more in 1..=3 {
            queue.ended(&reads.remove(0));
            assert_eq!(queue.waiting(), sent + more, "a read has ended, and the next one is sent");
        }
        // Such a read has a second request.
        let piece = |at| Piece { local: 2 * at, remote: 2 * at, len: 1 };
        let pieces = (0..=SEGMENTS_PER_CHUNK_MAX as u64).map(piece);
        assert!(!read_of(&read_of_pieces(0, Pieces::joined(pieces))).is_short);
    }
}
