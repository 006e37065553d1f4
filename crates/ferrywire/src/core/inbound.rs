//! What a peer sends us, beyond bytes for a region: messages to match, sinks to fill, notifications.
//!
//! Messages are matched here, in the order in which the peer posted them, whichever channels carried
//! them: each has a number, and one that comes early waits. A matched large message, and a read of ours,
//! becomes a *sink*: a target that exists until it is full.
//!
//! Invariant: whatever a peer can make us hold is charged to a limit.
//! Read next: `peer/`, which calls this for each frame.

use crate::core::operation::Op;
use crate::core::queue::WITHDRAWN;
use crate::core::waiting::{WaitList, WakeHandle};
use crate::error::Error;
use ferrywire_memory::Memory;
use ferrywire_net::IoVec;
use ferrywire_proto::limits;
use ferrywire_proto::transfer::Scatter;
use ferrywire_proto::wire::{Header, Kind, Refusal};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

#[cfg(test)]
mod tests;

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

/// A message that came whole.
pub(crate) struct Message {
    tag: u64,
    number: u64,
    bytes: Vec<u8>,
}

/// A message of the peer that no receive was posted for.
enum Arrived {
    Eager(Message),
    Announced { tag: u64, number: u64, transfer: u64, total: u64 },
    Withdrawn,
}

impl Arrived {
    fn number(&self) -> u64 {
        match self {
            Arrived::Eager(Message { number, .. }) | Arrived::Announced { number, .. } => *number,
            Arrived::Withdrawn => 0,
        }
    }
}

/// What has to be sent because of something that arrived.
pub(crate) enum Reply {
    Frame(Header),
    /// This message has to be placed, and the operation has ended then. A GPU may take long for that.
    Place(Arc<Op>, Message),
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
    /// What the peer was given back for messages that are held again: it is taken off what is given back next.
    credit_owed: usize,
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
            Kind::Send => Arrived::Eager(Message { tag, number, bytes }),
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
        if state.eager_held + cost > limits::EAGER_CREDIT_BYTES + state.credit_owed
            || ahead >= limits::EARLY_FRAMES_MAX
        {
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
            Arrived::Eager(Message { tag, .. }) | Arrived::Announced { tag, .. } => *tag,
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

    /// A message whose receive could not take it, because that memory was deregistered or its GPU has failed: it is for the
    /// next receive that has met no other, since its sender knows it as delivered. Its credit, which the peer may have again, is
    /// owed: however many receives fail, what is held of the peer's is bounded by its credit and what is being placed.
    pub fn return_message(&self, message: Message) -> Vec<Reply> {
        let mut state = self.lock();
        let mut replies = Vec::new();
        state.eager_held += message.cost();
        state.credit_owed += message.cost();
        self.arrive(&mut state, Arrived::Eager(message), &mut replies);
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
            Arrived::Eager(message) => {
                let (cost, bytes) = (message.cost(), message.bytes.len() as u64);
                if bytes <= op.total {
                    replies.push(Reply::Place(op, message));
                } else {
                    op.fail(truncated(message.tag, bytes, op.total));
                    if op.let_go() {
                        replies.push(Reply::Ended(op));
                    }
                }
                let owed = cost.min(state.credit_owed);
                state.credit_owed -= owed;
                state.eager_held -= cost;
                state.consumed += cost - owed;
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
            list.retain(|_, arrived| matches!(arrived, Arrived::Eager(_)));
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

impl Message {
    /// What it takes of the peer's credit until a receive has met it.
    fn cost(&self) -> usize {
        self.bytes.len() + limits::EAGER_OVERHEAD_BYTES
    }

    /// Places the message for the operation that has met it; false if the operation failed instead, so that the message is
    /// another's. Nothing is locked.
    pub fn place(&self, op: &Op) -> bool {
        let Some(memory) = op.memory.as_deref() else { return true };
        let placed = self.write(op, memory);
        if let Err(error) = &placed {
            op.fail(error.clone());
        }
        placed.is_ok()
    }

    fn write(&self, op: &Op, memory: &Memory) -> Result<(), Error> {
        // The operation holds the memory since before it was posted: if it is the user's, a caller that takes it back after
        // this waits for the operation; if it is ours, for the call.
        let _call = memory.call();
        if memory.taken_back() {
            return Err(Error::invalid("region", "it was deregistered before the message came"));
        }
        let mut rest = &self.bytes[..];
        for piece in op.pieces.as_slice() {
            let (now, later) = rest.split_at(rest.len().min(piece.len as usize));
            memory.write(piece.local, now)?;
            rest = later;
        }
        op.count(self.bytes.len() as u64);
        Ok(())
    }
}
