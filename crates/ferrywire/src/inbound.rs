//! What a peer sends us, beyond bytes for a region: messages to match, sinks to fill, notifications.
//!
//! Messages are matched here, in the order in which the peer posted them, whichever channels carried
//! them: each has a number, and one that comes early waits. A matched large message, and a read of ours,
//! becomes a *sink*: a target that exists until it is full.
//!
//! Invariant: whatever a peer can make us hold is charged to a limit.
//! Read next: `peer/`, which calls this for each frame.

use crate::error::Error;
use crate::limits;
use crate::memory::Memory;
use crate::operation::Op;
use crate::progress::{WaitList, WakeHandle};
use crate::queue::WITHDRAWN;
use crate::transfer::Scatter;
use crate::transport::IoVec;
use crate::wire::{Header, Kind, Refusal};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

/// Value of [`Sink::remaining`] once the sink is closed. No message is that long.
const CLOSED: u64 = u64::MAX;

/// A receive or read that waits for its data.
///
/// Life: `open -> full | closed`. One atomic counter decides between the two, so that the last frame of a message is
/// either counted before a cancel, and the receive has the message, or refused to its sender after the cancel.
pub(crate) struct Sink {
    pub op: Arc<Op>,
    scatter: Scatter,
    /// Bytes that are not placed and counted yet, or [`CLOSED`].
    remaining: AtomicU64,
}

impl Sink {
    fn new(op: Arc<Op>, bytes: u64) -> Sink {
        let scatter = Scatter::new(op.pieces.as_slice().iter().map(|piece| (piece.local, piece.len)));
        Sink { op, scatter, remaining: AtomicU64::new(bytes) }
    }

    /// Local memory for `len` bytes at `position` of the message.
    pub fn locate(&self, position: u64, len: u64, out: &mut Vec<IoVec>) -> Result<(), Refusal> {
        let memory: &Memory = self.op.memory.as_deref().ok_or(Refusal::NoSink)?;
        if self.closed() || memory.taken_back() {
            return Err(Refusal::NoSink);
        }
        for (offset, len) in self.scatter.locate(position, len).ok_or(Refusal::OutOfRegion)? {
            let base = memory.span(offset, len).ok_or(Refusal::OutOfRegion)?;
            out.push(IoVec::new(base, len as usize));
        }
        Ok(())
    }

    /// Whether the operation ended before its data was here, so that nothing may be placed any more.
    pub fn closed(&self) -> bool {
        self.remaining.load(Ordering::Acquire) == CLOSED
    }

    /// Closes the sink; false when all of its data is counted, or it is closed already.
    fn close(&self) -> bool {
        let closed = |left: u64| (left != 0 && left != CLOSED).then_some(CLOSED);
        self.remaining.fetch_update(Ordering::AcqRel, Ordering::Acquire, closed).is_ok()
    }

    /// Counts placed bytes; true when that was all.
    ///
    /// # Errors
    /// `NoSink` once the sink is closed: the sender is refused what the operation does not have. `OutOfRegion` for more
    /// bytes than are left, which are none of the message's.
    fn fill(&self, bytes: u64) -> Result<bool, Refusal> {
        let less = |left: u64| if left == CLOSED { None } else { left.checked_sub(bytes) };
        match self.remaining.fetch_update(Ordering::AcqRel, Ordering::Acquire, less) {
            Ok(left) => {
                self.op.count(bytes);
                Ok(bytes > 0 && left == bytes)
            }
            Err(CLOSED) => Err(Refusal::NoSink),
            Err(_) => Err(Refusal::OutOfRegion),
        }
    }
}

/// A message of the peer that no receive was posted for.
enum Arrived {
    Eager { tag: u64, number: u64, bytes: Vec<u8> },
    Announced { tag: u64, number: u64, transfer: u64, total: u64 },
    Withdrawn,
}

impl Arrived {
    fn number(&self) -> u64 {
        match self {
            Arrived::Eager { number, .. } | Arrived::Announced { number, .. } => *number,
            Arrived::Withdrawn => 0,
        }
    }
}

/// What has to be sent because of something that arrived.
pub(crate) enum Reply {
    Frame(Header),
    /// These bytes have to be placed, and the operation has ended then. A GPU may take long for that.
    Place(Arc<Op>, Vec<u8>),
    /// The operation has ended.
    Ended(Arc<Op>),
}

#[derive(Default)]
struct State {
    notifications: VecDeque<Vec<u8>>,
    notification_bytes: usize,
    /// Of those that came before their turn, which nobody can read yet.
    early_bytes: usize,
    /// Bytes placed of transfers that a notification will follow.
    counted: HashMap<u64, u64>,
    /// Notifications that wait for the bytes of their transfer.
    following: HashMap<u64, (u64, Vec<u8>)>,
    /// Notifications that came before their turn; nothing where one was refused.
    waiting: BTreeMap<u64, Option<Vec<u8>>>,
    next_notification: u64,
    posted: HashMap<u64, VecDeque<Arc<Op>>>,
    /// By tag and number: a peer may take back any of very many.
    unexpected: HashMap<u64, BTreeMap<u64, Arrived>>,
    announced_held: usize,
    early: BTreeMap<u64, Arrived>,
    next_number: u64,
    /// Credit that eager messages hold until they are received.
    eager_held: usize,
    consumed: usize,
    closed: bool,
}

/// The receiving side of one peer.
#[derive(Default)]
pub(crate) struct Inbound {
    state: Mutex<State>,
    sinks: RwLock<HashMap<u64, Arc<Sink>>>,
    arrivals: WaitList,
}

impl Inbound {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sink with this key, with a token of its operation.
    pub fn hold_sink(&self, key: u64) -> Result<Arc<Sink>, Refusal> {
        let sinks = self.sinks.read().unwrap_or_else(PoisonError::into_inner);
        let sink = sinks.get(&key).ok_or(Refusal::NoSink)?;
        // Under the lock: whoever takes the sink away may give back the operation's last token then.
        sink.op.hold();
        Ok(sink.clone())
    }

    /// Makes a sink for an operation of ours; its key is the operation's id.
    pub fn open_sink(&self, op: Arc<Op>, bytes: u64) {
        let mut sinks = self.sinks.write().unwrap_or_else(PoisonError::into_inner);
        sinks.insert(op.id, Arc::new(Sink::new(op, bytes)));
    }

    fn remove_sink(&self, key: u64) -> Option<Arc<Sink>> {
        self.sinks.write().unwrap_or_else(PoisonError::into_inner).remove(&key)
    }

    /// Closes a sink: nothing new is placed into it, and frames of it that are not counted yet are refused. Gives it to
    /// the caller, who returns the operation's token. `None` for one whose data is all counted: `filled` ends that one.
    pub fn close_sink(&self, key: u64) -> Option<Arc<Sink>> {
        let mut sinks = self.sinks.write().unwrap_or_else(PoisonError::into_inner);
        if !sinks.get(&key)?.close() {
            return None;
        }
        sinks.remove(&key)
    }

    /// Bytes were placed into a sink; returns its operation when that completed it.
    pub fn filled(&self, sink: &Sink, bytes: u64) -> Result<Option<Arc<Op>>, Refusal> {
        if !sink.fill(bytes)? {
            return Ok(None);
        }
        self.remove_sink(sink.op.id);
        Ok(sink.op.let_go().then(|| sink.op.clone()))
    }

    /// Bytes of a transfer with a notification were placed.
    pub fn count(&self, header: &Header) -> Result<(), Refusal> {
        let mut state = self.lock();
        if state.counted.len() >= limits::COUNTED_TRANSFERS_MAX
            && !state.counted.contains_key(&header.transfer)
        {
            return Err(Refusal::Limit);
        }
        let counted = state.counted.entry(header.transfer).or_default();
        *counted += u64::from(header.len);
        let done = *counted;
        if state.following.get(&header.transfer).is_some_and(|(total, _)| *total <= done) {
            state.counted.remove(&header.transfer);
            if let Some((_, message)) = state.following.remove(&header.transfer) {
                state.notifications.push_back(message);
                drop(state);
                self.arrivals.wake();
            }
        }
        Ok(())
    }

    /// A notification arrived: with its bytes, on its own, or to follow a transfer's bytes.
    pub fn notified(&self, header: &Header, message: Vec<u8>) -> Result<(), Refusal> {
        let mut state = self.lock();
        let alone = header.kind == Kind::Notify && header.total == 0;
        if header.kind == Kind::Notify && header.total == WITHDRAWN {
            state.forget(header.transfer);
            return Ok(());
        }
        // One that is here already holds its place: another would be charged, and never taken.
        let known = match alone {
            true => header.transfer < state.next_notification || state.waiting.contains_key(&header.transfer),
            false => header.kind == Kind::Notify && state.following.contains_key(&header.transfer),
        };
        if known {
            return Err(Refusal::Other);
        }
        // Nobody could read those that are early: while a lost connection is noticed there may be very many. So they count
        // apart, and the one that they wait for is not held up by them.
        let early = alone && header.transfer > state.next_notification;
        if early && state.waiting.len() >= limits::EARLY_FRAMES_MAX {
            return Err(Refusal::Limit);
        }
        let fits = state.has_room(early, message.len());
        if fits {
            *if early { &mut state.early_bytes } else { &mut state.notification_bytes } += message.len();
        }
        // One that is refused has had its turn all the same.
        if early {
            state.waiting.insert(header.transfer, fits.then_some(message));
        } else if alone {
            state.next_notification += 1;
            state.notifications.extend(fits.then_some(message));
            state.deliver_in_turn();
        } else if fits {
            state.deliver_behind_bytes(header, message);
        }
        drop(state);
        self.arrivals.wake();
        if fits { Ok(()) } else { Err(Refusal::Limit) }
    }

    /// The next notification.
    pub fn take_notification(&self) -> Option<Vec<u8>> {
        let mut state = self.lock();
        let message = state.notifications.pop_front()?;
        state.notification_bytes -= message.len();
        Some(message)
    }

    /// Whether a notification waits, or none will come any more.
    pub fn has_notification(&self) -> bool {
        let state = self.lock();
        !state.notifications.is_empty() || state.closed
    }

    /// Whether notifications or messages wait for the user.
    pub fn holds_anything(&self) -> bool {
        let state = self.lock();
        !state.notifications.is_empty() || !state.unexpected.is_empty()
    }

    /// Asks to be woken at the next notification.
    pub fn wake_at_notification(&self, handle: WakeHandle) {
        self.arrivals.add(handle);
        if self.has_notification() {
            self.arrivals.wake();
        }
    }

    /// It waits no more.
    pub fn forget_waiter(&self, handle: &WakeHandle) {
        self.arrivals.remove(handle);
    }

    /// A whole eager message, or the announcement of a large one, arrived.
    pub fn message(&self, header: &Header, bytes: Vec<u8>) -> Result<Vec<Reply>, Refusal> {
        let cost = match header.kind {
            Kind::Send => bytes.len() + limits::EAGER_OVERHEAD_BYTES,
            _ => 0,
        };
        let (tag, number) = (header.key, header.offset);
        let arrived = match header.kind {
            Kind::Send => Arrived::Eager { tag, number, bytes },
            _ if header.total == WITHDRAWN => Arrived::Withdrawn,
            _ => Arrived::Announced { tag, number, transfer: header.transfer, total: header.total },
        };
        let mut state = self.lock();
        if matches!(arrived, Arrived::Withdrawn) && state.take_back(tag, number) {
            return Ok(Vec::new());
        }
        if header.offset < state.next_number || state.early.contains_key(&header.offset) {
            return Err(Refusal::Other);
        }
        // The one that is due makes room: those that wait for it do not count against it.
        let ahead = if header.offset > state.next_number { state.early.len() } else { 0 };
        // Only a peer that disregards its credit, or how far ahead it may be, gets here.
        if state.eager_held + cost > limits::EAGER_CREDIT_BYTES || ahead >= limits::EARLY_FRAMES_MAX {
            return Err(Refusal::Limit);
        }
        state.eager_held += cost;
        let mut replies = Vec::new();
        let full = state.announced_held + ahead >= limits::ANNOUNCED_SENDS_MAX;
        let arrived = match arrived {
            Arrived::Announced { transfer, .. } if full => {
                let mut refuse = Header::new(Kind::Refuse);
                refuse.transfer = transfer;
                refuse.key = Refusal::Limit as u64;
                replies.push(Reply::Frame(refuse));
                // The number has had its turn, or those behind it would wait for ever.
                Arrived::Withdrawn
            }
            arrived => arrived,
        };
        state.early.insert(header.offset, arrived);
        loop {
            let next = state.next_number;
            let Some(arrived) = state.early.remove(&next) else {
                break;
            };
            state.next_number += 1;
            self.arrive(&mut state, arrived, &mut replies);
        }
        Ok(replies)
    }

    fn arrive(&self, state: &mut State, arrived: Arrived, replies: &mut Vec<Reply>) {
        let tag = match &arrived {
            Arrived::Withdrawn => return,
            Arrived::Eager { tag, .. } | Arrived::Announced { tag, .. } => *tag,
        };
        match take_front(&mut state.posted, tag) {
            Some(op) => self.meet(state, op, arrived, replies),
            None => {
                state.announced_held += usize::from(matches!(arrived, Arrived::Announced { .. }));
                state.unexpected.entry(tag).or_default().insert(arrived.number(), arrived);
            }
        }
    }

    /// Posts a receive.
    pub fn post(&self, op: Arc<Op>) -> Vec<Reply> {
        let mut state = self.lock();
        let mut replies = Vec::new();
        match take_first(&mut state.unexpected, op.key) {
            Some(arrived) => {
                state.announced_held -= usize::from(matches!(arrived, Arrived::Announced { .. }));
                self.meet(&mut state, op, arrived, &mut replies);
            }
            None => state.posted.entry(op.key).or_default().push_back(op),
        }
        replies
    }

    /// Posts a receive whose message was taken back, ahead of those that were posted after it.
    pub fn post_again(&self, op: Arc<Op>) -> Vec<Reply> {
        let mut state = self.lock();
        let mut replies = Vec::new();
        if op.failing() || state.closed {
            op.cut_short();
            if op.let_go() {
                replies.push(Reply::Ended(op));
            }
            return replies;
        }
        match take_first(&mut state.unexpected, op.key) {
            Some(arrived) => {
                state.announced_held -= usize::from(matches!(arrived, Arrived::Announced { .. }));
                self.meet(&mut state, op, arrived, &mut replies);
            }
            None => state.posted.entry(op.key).or_default().push_front(op),
        }
        replies
    }

    /// Takes a posted receive out that has met no message yet.
    pub fn unpost(&self, op: &Arc<Op>) -> bool {
        let mut state = self.lock();
        let Some(list) = state.posted.get_mut(&op.key) else {
            return false;
        };
        let before = list.len();
        list.retain(|posted| !Arc::ptr_eq(posted, op));
        let taken = list.len() < before;
        if list.is_empty() {
            state.posted.remove(&op.key);
        }
        taken
    }

    /// A receive and its message have found each other.
    fn meet(&self, state: &mut State, op: Arc<Op>, arrived: Arrived, replies: &mut Vec<Reply>) {
        match arrived {
            Arrived::Withdrawn => {}
            Arrived::Eager { tag, bytes, .. } => {
                let cost = bytes.len() + limits::EAGER_OVERHEAD_BYTES;
                if bytes.len() as u64 <= op.total {
                    replies.push(Reply::Place(op, bytes));
                } else {
                    op.fail(truncated(tag, bytes.len() as u64, op.total));
                    if op.let_go() {
                        replies.push(Reply::Ended(op));
                    }
                }
                state.eager_held -= cost;
                state.consumed += cost;
                if state.consumed >= limits::EAGER_CREDIT_BYTES / 4 {
                    let mut credit = Header::new(Kind::Credit);
                    credit.total = std::mem::take(&mut state.consumed) as u64;
                    replies.push(Reply::Frame(credit));
                }
            }
            Arrived::Announced { tag, transfer, total, .. } => {
                let mut answer = Header::new(Kind::Match);
                answer.transfer = transfer;
                if total > op.total {
                    answer.kind = Kind::Refuse;
                    answer.key = Refusal::OutOfRegion as u64;
                    op.fail(truncated(tag, total, op.total));
                    if op.let_go() {
                        replies.push(Reply::Ended(op));
                    }
                } else if total == 0 {
                    if op.let_go() {
                        replies.push(Reply::Ended(op));
                    }
                } else {
                    answer.key = op.id;
                    self.open_sink(op, total);
                }
                replies.push(Reply::Frame(answer));
            }
        }
    }

    /// The peer is gone: ends everything that waits for it. Returns the operations that ended.
    pub fn close(&self, why: &Error) -> Vec<Arc<Op>> {
        let mut state = self.lock();
        state.closed = true;
        let mut ops: Vec<Arc<Op>> = state.posted.drain().flat_map(|(_, list)| list).collect();
        // What has arrived whole can still be received; the rest of an announced message will not come.
        for list in state.unexpected.values_mut() {
            list.retain(|_, arrived| matches!(arrived, Arrived::Eager { .. }));
        }
        state.unexpected.retain(|_, list| !list.is_empty());
        state.early.clear();
        state.following.clear();
        state.counted.clear();
        drop(state);
        let sinks = std::mem::take(&mut *self.sinks.write().unwrap_or_else(PoisonError::into_inner));
        ops.extend(sinks.into_values().filter(|sink| sink.close()).map(|sink| sink.op.clone()));
        ops.iter().for_each(|op| op.fail(why.clone()));
        self.arrivals.wake();
        ops
    }
}

impl State {
    /// Whether a notification of so many bytes may be held.
    fn has_room(&self, early: bool, bytes: usize) -> bool {
        if early {
            return self.early_bytes + bytes <= limits::NOTIFICATION_BYTES_MAX;
        }
        self.notifications.len() + self.following.len() < limits::NOTIFICATIONS_HELD_MAX
            && self.notification_bytes + bytes <= limits::NOTIFICATION_BYTES_MAX
    }

    /// Those that have waited for one before them can be read.
    fn deliver_in_turn(&mut self) {
        while let Some(message) = self.waiting.remove(&self.next_notification) {
            self.next_notification += 1;
            let bytes = message.as_ref().map_or(0, Vec::len);
            self.early_bytes -= bytes;
            self.notification_bytes += bytes;
            self.notifications.extend(message);
        }
    }

    fn deliver_behind_bytes(&mut self, header: &Header, message: Vec<u8>) {
        let done = self.counted.get(&header.transfer).copied().unwrap_or(0);
        if header.kind == Kind::Notify && done < header.total {
            self.following.insert(header.transfer, (header.total, message));
            return;
        }
        if header.kind == Kind::Notify {
            self.counted.remove(&header.transfer);
        }
        self.notifications.push_back(message);
    }

    /// The peer takes a message back: true if its number has been heard of, so that nothing waits for that. One that has been met
    /// by a receive is none any more that could be taken back here: its sender answers the match.
    fn take_back(&mut self, tag: u64, number: u64) -> bool {
        if let Some(early) = self.early.get_mut(&number) {
            if matches!(early, Arrived::Announced { .. }) {
                *early = Arrived::Withdrawn;
            }
            return true;
        }
        if let Some(list) = self.unexpected.get_mut(&tag)
            && matches!(list.get(&number), Some(Arrived::Announced { .. }))
        {
            list.remove(&number);
            self.announced_held -= 1;
            if list.is_empty() {
                self.unexpected.remove(&tag);
            }
        }
        number < self.next_number
    }

    /// A transfer with a notification has failed: neither its last bytes nor the message count.
    fn forget(&mut self, transfer: u64) {
        self.counted.remove(&transfer);
        if let Some((_, message)) = self.following.remove(&transfer) {
            self.notification_bytes -= message.len();
        }
    }
}

fn take_first<T>(map: &mut HashMap<u64, BTreeMap<u64, T>>, tag: u64) -> Option<T> {
    let list = map.get_mut(&tag)?;
    let (_, first) = list.pop_first()?;
    if list.is_empty() {
        map.remove(&tag);
    }
    Some(first)
}

fn take_front<T>(map: &mut HashMap<u64, VecDeque<T>>, tag: u64) -> Option<T> {
    let list = map.get_mut(&tag)?;
    let first = list.pop_front();
    if list.is_empty() {
        map.remove(&tag);
    }
    first
}

fn truncated(tag: u64, message_bytes: u64, buffer_bytes: u64) -> Error {
    Error::Truncated { tag, message_bytes, buffer_bytes }
}

/// Places a message for the operation that has met it. Nothing is locked.
pub(crate) fn copy_out(op: &Op, bytes: &[u8]) {
    let Some(memory) = op.memory.as_deref() else {
        return;
    };
    // The operation holds the memory since before it was posted: if it is the user's, who takes it back after this waits
    // for the operation; if it is ours, for the call.
    let _call = memory.call();
    if memory.taken_back() {
        return op.fail(Error::invalid("region", "it was deregistered before the message came"));
    }
    let mut rest = bytes;
    for piece in op.pieces.as_slice() {
        let (now, later) = rest.split_at(rest.len().min(piece.len as usize));
        if let Err(error) = memory.write(piece.local, now) {
            return op.fail(error);
        }
        rest = later;
    }
    op.count(bytes.len() as u64);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::Verb;
    use crate::transfer::{Piece, Pieces};
    use std::thread;
    use std::time::Duration;

    /// It ended twice: its memory was free while the next operation used it.
    #[test]
    fn an_operation_that_is_cancelled_as_its_bytes_come_ends_once() {
        let memory = Memory::private(4096).unwrap();
        let pieces = Pieces::One(Piece { local: 0, remote: 0, len: 4096 });
        let op = Arc::new(Op::new(1, Verb::Recv, pieces, Some(memory.clone()), 0));
        let inbound = Inbound::default();
        inbound.open_sink(op.clone(), 4096);
        let filling = inbound.hold_sink(1).unwrap();
        let cancelled = inbound.close_sink(1).unwrap();
        assert!(!cancelled.op.let_go(), "its memory is being found");
        assert!(filling.locate(0, 4096, &mut Vec::new()).is_err());
        assert!(filling.op.let_go());
        assert!(!memory.used());
        assert!(matches!(inbound.hold_sink(1), Err(Refusal::NoSink)));
    }

    /// The sender was told that the receive had the message, and the receive that it was cancelled.
    #[test]
    fn the_last_frame_of_a_cancelled_receive_is_refused_and_a_counted_one_cannot_be_cancelled() {
        let memory = Memory::private(4096).unwrap();
        let receive = |id| {
            let pieces = Pieces::One(Piece { local: 0, remote: 0, len: 4096 });
            Arc::new(Op::new(id, Verb::Recv, pieces, Some(memory.clone()), 0))
        };
        let inbound = Inbound::default();
        // Cancelled when all bytes are in their place, and before they are counted.
        inbound.open_sink(receive(1), 4096);
        let placing = inbound.hold_sink(1).unwrap();
        assert!(inbound.close_sink(1).is_some());
        assert!(matches!(inbound.filled(&placing, 4096), Err(Refusal::NoSink)));
        assert_eq!(placing.op.moved(), 0);
        // Cancelled when they are counted: too late, and the operation ends once.
        inbound.open_sink(receive(2), 4096);
        let placing = inbound.hold_sink(2).unwrap();
        assert!(matches!(inbound.filled(&placing, 4096), Ok(None)), "the frame holds the operation");
        assert!(inbound.close_sink(2).is_none());
        assert!(placing.op.let_go() && !placing.op.failed() && placing.op.moved() == 4096);
    }

    /// It was placed with the peer's messages and receives locked, for as long as a GPU took.
    #[test]
    fn a_message_is_placed_when_nothing_is_locked_any_more() {
        let memory = Memory::private(8).unwrap();
        let inbound = Inbound::default();
        let receive = |id| {
            let pieces = Pieces::One(Piece { local: 0, remote: 0, len: 8 });
            Arc::new(Op::new(id, Verb::Recv, pieces, Some(memory.clone()), 7))
        };
        let arrives = |number: u64| {
            let header = Header { offset: number, key: 7, ..Header::new(Kind::Send) };
            inbound.message(&header, vec![9; 8]).unwrap()
        };
        let [first, second] = [1, 2].map(receive);
        assert!(inbound.post(first.clone()).is_empty());
        let met_by_message = arrives(0);
        assert!(arrives(1).is_empty());
        let met_by_receive = inbound.post(second.clone());
        for (op, mut replies) in [(&first, met_by_message), (&second, met_by_receive)] {
            assert!(op.moved() == 0 && !op.ended());
            let Some(Reply::Place(placed, bytes)) = replies.pop() else { panic!("it is to be placed") };
            assert!(Arc::ptr_eq(&placed, op) && replies.is_empty());
            copy_out(&placed, &bytes);
            assert!(placed.let_go() && placed.moved() == 8);
        }
    }

    /// A thread for each request that waits a moment: the list grew with every one of them.
    #[test]
    fn who_has_waited_in_vain_for_a_notification_is_forgotten() {
        const LIMIT: Duration = Duration::from_secs(60);
        let builder = || crate::Endpoint::builder().threads(1).channels(1);
        let far = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        let near = builder().build().unwrap();
        let peer = near.connect(far.listen_addresses()[0], LIMIT).unwrap();
        let target = near.register_zeroed(1 << 20).unwrap();
        // While so much is under way who waits sleeps.
        let _receive = peer.recv(1, &target, 0, 1 << 20).unwrap();
        thread::scope(|scope| {
            for _ in 0..20 {
                let waiting = scope.spawn(|| peer.wait_notification(Duration::from_millis(5)).is_err());
                assert!(waiting.join().unwrap());
            }
        });
        let left = peer.state.inbound.arrivals.len();
        assert!(left <= 1, "{left} of 20 threads that are gone, and of one worker, wait still");
    }

    fn notify(inbound: &Inbound, number: u64) -> Result<(), Refusal> {
        let header = Header { transfer: number, ..Header::new(Kind::Notify) };
        inbound.notified(&header, number.to_le_bytes().to_vec())
    }

    /// They were refused as if nobody had read them: for as long as it takes to notice a lost connection.
    #[test]
    fn notifications_that_wait_for_one_before_them_are_not_held_against_their_reader() {
        let inbound = Inbound::default();
        let many = 2 * limits::NOTIFICATIONS_HELD_MAX as u64;
        for number in 1..many {
            notify(&inbound, number).unwrap();
        }
        assert!(inbound.take_notification().is_none());
        notify(&inbound, 0).unwrap();
        for number in 0..many {
            assert_eq!(inbound.take_notification(), Some(number.to_le_bytes().to_vec()));
        }
        // Those that could be read and are not are.
        let unread = limits::NOTIFICATIONS_HELD_MAX as u64;
        let outcomes: Vec<_> = (many..=many + unread).map(|number| notify(&inbound, number)).collect();
        assert!(outcomes[..unread as usize].iter().all(Result::is_ok));
        assert_eq!(outcomes[unread as usize], Err(Refusal::Limit));
        while inbound.take_notification().is_some() {}
        // As many bytes of them as there may be.
        let next = many + unread + 1;
        let long = |number| {
            let header = Header { transfer: number, ..Header::new(Kind::Notify) };
            inbound.notified(&header, vec![7; limits::NOTIFY_BYTES_MAX])
        };
        let early = next + 1 + (limits::NOTIFICATION_BYTES_MAX / limits::NOTIFY_BYTES_MAX) as u64;
        (next + 1..early).for_each(|number| long(number).unwrap());
        assert_eq!(long(early), Err(Refusal::Limit));
        assert_eq!(long(next), Ok(()));
        let taken = std::iter::from_fn(|| inbound.take_notification()).count() as u64;
        assert_eq!(taken, early - next);
        // The one that was refused has had its turn, and nothing is charged any more.
        assert_eq!(long(early + 1), Ok(()));
        assert!(inbound.take_notification().is_some());
        let state = inbound.lock();
        assert_eq!((state.notification_bytes, state.early_bytes), (0, 0));
    }

    #[test]
    fn a_message_that_is_taken_back_is_held_no_longer_wherever_it_waits() {
        let inbound = Inbound::default();
        let say = |number: u64, total: u64| {
            let header =
                Header { offset: number, key: 7, transfer: number + 1, total, ..Header::new(Kind::Announce) };
            inbound.message(&header, Vec::new()).map(|replies| replies.len())
        };
        for number in [0, 1, 2, 5] {
            assert_eq!(say(number, 9), Ok(0));
        }
        // In its turn, ahead of it, and before it was heard of at all.
        for number in [1, 5, 3] {
            assert_eq!(say(number, WITHDRAWN), Ok(0));
        }
        assert_eq!(say(3, 9), Err(Refusal::Other));
        assert_eq!(say(4, 9), Ok(0));
        let state = inbound.lock();
        assert_eq!((state.next_number, state.announced_held), (6, 3));
        drop(state);
        for number in [0, 0, 1, 2, 4, 5] {
            assert_eq!(say(number, WITHDRAWN), Ok(0));
        }
        let state = inbound.lock();
        assert!(state.announced_held == 0 && state.unexpected.is_empty() && state.early.is_empty());
    }

    /// It was refused for those that waited for it, and never had its turn: nothing behind it was heard of again.
    #[test]
    fn a_number_that_is_due_is_taken_however_many_wait_for_it() {
        let inbound = Inbound::default();
        let early = limits::EARLY_FRAMES_MAX as u64;
        (1..=early).for_each(|number| notify(&inbound, number).unwrap());
        assert_eq!(notify(&inbound, early + 1), Err(Refusal::Limit));
        notify(&inbound, 0).unwrap();
        let taken = std::iter::from_fn(|| inbound.take_notification());
        assert!(taken.eq((0..=early).map(|number| number.to_le_bytes().to_vec())));

        let message = |number: u64| {
            let kind = if number.is_multiple_of(16) { Kind::Send } else { Kind::Announce };
            let header =
                Header { offset: number, key: number, transfer: number + 1, total: 9, ..Header::new(kind) };
            inbound.message(&header, Vec::new()).map(|replies| replies.len())
        };
        let announced = limits::ANNOUNCED_SENDS_MAX as u64;
        (1..=announced).for_each(|number| assert_eq!(message(number), Ok(0)));
        (announced + 1..=early).for_each(|number| assert!(message(number).is_ok()));
        assert_eq!(message(early + 1), Err(Refusal::Limit));
        assert_eq!(message(0), Ok(0));
        assert_eq!(inbound.lock().next_number, early + 1);
        assert!(inbound.lock().early.is_empty());
    }
}
