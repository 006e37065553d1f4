//! Incoming messages: the memory of each piece, and which messages can still become complete.
//!
//! Even after one stream has ended, the bytes that the peer reported as sent are in its streams, up to the end of each.
//! So a receive fails only once no stream can bring the rest of it, and only after everything that has arrived was
//! read. Invariants: a slot is reused only after `test` has reported its message; each stream brings the parts of
//! messages in the order of the messages.
//! Read next: `wire.rs`.

use std::net::SocketAddr;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use ferrywire_ncclnet::abi::ResultCode;
use ferrywire_net::Conn;

use crate::comm::{Comm, Memory, REQUESTS, Side, locked, slot_of};
use crate::failure::{Failure, Fault, Outcome};
use crate::header::Header;
use crate::link::Link;
use crate::metrics::{Kind, Requests};
use crate::pool::{Opening, Pool, Wire, pool};
use crate::sending::saw_arrival;
use crate::wire::{Receiver, Turn};

/// The length of a message whose first header has not arrived.
const TOTAL_UNKNOWN: u64 = u64::MAX;
/// Most turns of the inline socket in one call, so that a flood of messages does not keep NCCL's thread.
const INLINE_TURNS: usize = 4;
/// Number in place of the earliest message of a stream that can bring no part of any message.
const NOTHING: u64 = u64::MAX;
/// Longest time without bytes for which the other streams are waited for after one has failed. If the peer is lost
/// they end soon.
const QUIET_MAX: Duration = Duration::from_secs(10);

/// One direction of a comm: the state that workers and NCCL's thread share.
pub struct Receiving {
    /// The comm's first failure.
    pub failure: Failure,
    peer: SocketAddr,
    slots: [Slot; REQUESTS],
    /// Number of receives posted so far.
    posted: AtomicU64,
    /// Number of sockets whose next piece belongs to a receive that is not posted.
    pub waiting: AtomicUsize,
    /// For each stream the earliest message of which it can still bring a part.
    fronts: Vec<AtomicU64>,
    /// Number of streams that have ended, in order or not.
    ended: AtomicUsize,
    /// The error of the first stream that ended within a message.
    broken: OnceLock<Fault>,
    /// Number of the earliest message that is known to lack a part.
    cut: AtomicU64,
}

/// A posted receive in its slot.
struct Slot {
    message: AtomicU64,
    data: AtomicPtr<u8>,
    room: AtomicUsize,
    total: AtomicU64,
    /// Number of the message's bytes whose headers have arrived.
    placed: AtomicU64,
    /// Number of the message's bytes that have arrived.
    received: AtomicU64,
}

impl Slot {
    const fn new() -> Slot {
        Slot {
            message: AtomicU64::new(u64::MAX),
            data: AtomicPtr::new(ptr::null_mut()),
            room: AtomicUsize::new(0),
            total: AtomicU64::new(TOTAL_UNKNOWN),
            placed: AtomicU64::new(0),
            received: AtomicU64::new(0),
        }
    }

    /// Length of the message in bytes once all of it has arrived; `None` before.
    fn done(&self) -> Option<usize> {
        let total = self.total.load(Ordering::Acquire);
        (self.received.load(Ordering::Acquire) == total).then_some(total as usize)
    }

    fn is_begun(&self) -> bool {
        self.total.load(Ordering::Acquire) != TOTAL_UNKNOWN
    }
}

impl Receiving {
    fn new(peer: SocketAddr, sockets: usize) -> Receiving {
        Receiving {
            failure: Failure::default(),
            peer,
            slots: [const { Slot::new() }; REQUESTS],
            posted: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            fronts: (0..sockets).map(|_| AtomicU64::new(0)).collect(),
            ended: AtomicUsize::new(0),
            broken: OnceLock::new(),
            cut: AtomicU64::new(u64::MAX),
        }
    }

    /// Whether the receive of this message is posted.
    pub fn is_posted(&self, message: u64) -> bool {
        message < self.posted.load(Ordering::SeqCst)
    }

    /// The memory for a piece that a socket brings; `None` while the receive of its message is not posted.
    pub fn place(&self, socket: usize, header: &Header) -> Outcome<Option<*mut u8>> {
        let before = self.fronts[socket].swap(header.message, Ordering::AcqRel);
        if before > header.message {
            return Err(Fault::remote("the peer sent a message after a later one"));
        }
        if !self.is_posted(header.message) {
            return Ok(None);
        }
        let slot = &self.slots[slot_of(header.message)];
        if slot.message.load(Ordering::Relaxed) != header.message {
            return Err(Fault::remote("the peer sent a message twice"));
        }
        let (total, room) = (header.total_bytes, slot.room.load(Ordering::Relaxed));
        if total > room as u64 {
            let why = format!("a message of {total} bytes arrived for a receive of {room}");
            return Err(Fault { code: ResultCode::INVALID_USAGE, why });
        }
        let known = slot.total.compare_exchange(TOTAL_UNKNOWN, total, Ordering::AcqRel, Ordering::Acquire);
        let placed = slot.placed.fetch_add(header.bytes, Ordering::AcqRel);
        if known.is_err_and(|known| known != total) || placed + header.bytes > total {
            return Err(Fault::remote(
                "the peer sent parts that exceed or contradict the size of their message",
            ));
        }
        // SAFETY: the piece is inside its message, and the message fits the buffer.
        Ok(Some(unsafe { slot.data.load(Ordering::Relaxed).add(header.offset as usize) }))
    }

    /// Counts `bytes` bytes of a message that have arrived.
    pub fn received(&self, message: u64, bytes: usize) {
        self.slots[slot_of(message)].received.fetch_add(bytes as u64, Ordering::Release);
    }

    /// Notes that a socket's stream has ended between two messages.
    pub fn ended(&self, socket: usize) {
        self.fronts[socket].store(NOTHING, Ordering::Release);
        self.ended.fetch_add(1, Ordering::AcqRel);
    }

    /// Notes that a socket's stream has ended with an error, within `message` if that is known.
    pub fn broke(&self, socket: usize, message: Option<u64>, fault: Fault) {
        let _ = self.broken.set(fault);
        self.cut.fetch_min(message.unwrap_or(u64::MAX), Ordering::AcqRel);
        self.ended(socket);
    }

    /// Whether no stream can still bring the parts that the message lacks after this call.
    fn is_lost(&self, message: u64) -> bool {
        self.ended.load(Ordering::Acquire) > 0
            && (message >= self.cut.load(Ordering::Acquire)
                || self.fronts.iter().all(|front| front.load(Ordering::Acquire) > message))
    }

    fn why_lost(&self) -> Fault {
        let closed = || Fault::remote(format_args!("{} has closed the connection", self.peer));
        self.broken.get().cloned().unwrap_or_else(closed)
    }
}

/// The receiving end of a comm.
pub struct RecvComm {
    shared: Arc<Receiving>,
    wires: Vec<Arc<Wire>>,
    requests: Requests,
    own: Mutex<RecvOwn>,
}

/// State of the receiving end that only NCCL's thread touches.
struct RecvOwn {
    /// Socket 0, for small messages.
    receiver: Receiver,
    next: u64,
    posted: [Option<Memory>; REQUESTS],
    /// While a stream has failed: the number of the awaited message, how many of its bytes had arrived, and since
    /// when.
    quiet: Option<(u64, u64, Instant)>,
}

impl RecvComm {
    /// Makes a receiving comm over proved connections; the first connection is for small messages.
    pub fn open(conns: Vec<Box<dyn Conn>>) -> Outcome<Box<Comm>> {
        RecvComm::made(pool()?, conns).map(|comm| Comm::new(Side::Receive(comm)))
    }

    /// Makes a receiving comm whose bulk the workers of `pool` move.
    pub fn made(pool: &Pool, conns: Vec<Box<dyn Conn>>) -> Outcome<RecvComm> {
        let sockets = conns.len();
        let (peer, mut links) = Link::all(conns)?;
        let first = links.next().ok_or_else(|| Fault::usage("the comm has no connection"))?;
        let shared = Arc::new(Receiving::new(first.conn.remote(), sockets));
        let mut wires = Opening::default();
        for (link, socket) in links.zip(1..) {
            wires.add(pool.receive_over(Receiver::new(link, socket), shared.clone())?);
        }
        let own =
            RecvOwn { receiver: Receiver::new(first, 0), next: 0, posted: [None; REQUESTS], quiet: None };
        let requests = peer.requests(Kind::Irecv);
        Ok(RecvComm { shared, wires: wires.finish(), requests, own: Mutex::new(own) })
    }

    /// Posts a receive and returns its slot; `None` if it cannot be posted now.
    pub fn post(&self, data: *mut u8, bytes: usize, memory: Memory) -> Outcome<Option<usize>> {
        let mut own = locked(&self.own);
        let (message, index) = (own.next, slot_of(own.next));
        if own.posted[index].is_some() {
            return Ok(None);
        }
        own.next += 1;
        own.posted[index] = Some(memory);
        self.requests.started();
        let slot = &self.shared.slots[index];
        slot.message.store(message, Ordering::Relaxed);
        slot.data.store(data, Ordering::Relaxed);
        slot.room.store(bytes, Ordering::Relaxed);
        slot.total.store(TOTAL_UNKNOWN, Ordering::Relaxed);
        slot.placed.store(0, Ordering::Relaxed);
        slot.received.store(0, Ordering::Relaxed);
        self.shared.posted.store(own.next, Ordering::SeqCst);
        if self.shared.waiting.load(Ordering::SeqCst) > 0 {
            self.wires.iter().for_each(|wire| wire.posted(message));
        }
        Ok(Some(index))
    }

    /// The length in bytes of a slot's message, once it has arrived.
    pub fn test(&self, index: usize) -> Outcome<Option<usize>> {
        let mut own = locked(&self.own);
        if own.posted[index].is_none() {
            return Err(Fault::usage("test was called for a request that is done"));
        }
        let slot = &self.shared.slots[index];
        let mut done = slot.done();
        // Bulk arrives over the other sockets; once one of them has ended, this socket may have ended too.
        let ending = self.shared.ended.load(Ordering::Acquire) > 0;
        if done.is_none() && (ending || !slot.is_begun() || own.receiver.is_busy()) {
            self.receive_inline(&mut own);
            done = slot.done();
        }
        if done.is_none() && ending {
            done = self.check_last(&mut own, slot);
        }
        match done {
            Some(_) => {
                own.posted[index] = None;
                self.requests.completed(index);
                saw_arrival();
            }
            None => self.shared.failure.check().inspect_err(|_| self.requests.failed(index))?,
        }
        Ok(done)
    }

    fn receive_inline(&self, own: &mut RecvOwn) {
        for _ in 0..INLINE_TURNS {
            if own.receiver.turn(&self.shared) != Turn::More {
                break;
            }
        }
    }

    /// The length in bytes of a message that may have lost a part, if the message is complete all the same.
    fn check_last(&self, own: &mut RecvOwn, slot: &Slot) -> Option<usize> {
        let message = slot.message.load(Ordering::Relaxed);
        // The order matters: a stream's bytes are counted before its end.
        let lost = self.shared.is_lost(message);
        let done = slot.done();
        if done.is_none() && (lost || self.is_quiet(own, slot)) {
            self.shared.failure.record(self.shared.why_lost());
        }
        done
    }

    /// Whether a stream has failed and the others have brought nothing for `QUIET_MAX`.
    fn is_quiet(&self, own: &mut RecvOwn, slot: &Slot) -> bool {
        if self.shared.broken.get().is_none() {
            return false;
        }
        let message = slot.message.load(Ordering::Relaxed);
        let received = slot.received.load(Ordering::Relaxed);
        match own.quiet {
            Some((other, before, since)) if (other, before) == (message, received) => {
                since.elapsed() >= QUIET_MAX
            }
            _ => {
                own.quiet = Some((message, received, Instant::now()));
                false
            }
        }
    }

    /// Ends the use of memory by requests; see [`Comm::deregister`].
    pub fn deregister(&self, memory: Memory, why: impl FnOnce() -> Fault) {
        let mut own = locked(&self.own);
        let waits =
            |(posted, slot): (&Option<Memory>, &Slot)| *posted == Some(memory) && slot.done().is_none();
        if own.posted.iter().zip(&self.shared.slots).any(waits) {
            self.shared.failure.record(why());
            self.stop(&mut own);
        }
    }

    /// Stops all use of requests' memory: afterwards no thread touches it.
    fn stop(&self, own: &mut RecvOwn) {
        self.wires.iter().for_each(|wire| wire.close());
        own.receiver.stop();
    }
}

impl Drop for RecvComm {
    fn drop(&mut self) {
        self.stop(&mut locked(&self.own));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{connections, has_arrived, reset, send, send_some, until};
    use ferrywire_sys::poll::Interest;

    /// A size that the kernel takes completely before any of it is received.
    const BYTES: usize = 32 << 10;
    const HALF: usize = BYTES / 2;

    /// A comm with two sockets for bulk, and the ends of a peer that sends in any order.
    fn opened() -> (Vec<Box<dyn Conn>>, RecvComm) {
        let (near, far) = connections(3);
        (near, RecvComm::made(pool().unwrap(), far).unwrap())
    }

    /// Half of a message, as it is sent.
    fn half(message: u64, second: bool) -> Vec<u8> {
        let offset = if second { HALF as u64 } else { 0 };
        let header = Header { message, total_bytes: BYTES as u64, offset, bytes: HALF as u64, tag: 0 };
        let mut piece = header.to_bytes().to_vec();
        piece.resize(piece.len() + HALF, 7 + message as u8);
        piece
    }

    fn post(comm: &RecvComm, target: &mut [u8], memory: Memory) -> usize {
        comm.post(target.as_mut_ptr(), target.len(), memory).unwrap().unwrap()
    }

    /// The outcome of a receive.
    fn outcome(comm: &RecvComm, slot: usize) -> Outcome<usize> {
        until("an outcome", || comm.test(slot).transpose())
    }

    /// Regression: the receive waited for ever, because the socket for small messages was not read any more.
    #[test]
    fn a_peer_that_ends_between_two_pieces_of_a_message_is_an_error() {
        let (mut near, comm) = opened();
        let mut target = vec![0; BYTES];
        let slot = post(&comm, &mut target, 0);
        send(near[1].as_mut(), &half(0, false));
        until("the first half", || {
            assert_eq!(comm.test(slot), Ok(None));
            (comm.shared.slots[slot].received.load(Ordering::Acquire) == HALF as u64).then_some(())
        });
        drop(near);
        assert!(outcome(&comm, slot).unwrap_err().why.contains("closed"));
    }

    /// Regression: the bytes that the kernel had were discarded.
    #[test]
    fn a_stream_that_breaks_while_its_receive_is_not_posted_is_received_to_its_end() {
        let (mut near, comm) = opened();
        send(near[1].as_mut(), &half(0, false));
        send(near[1].as_mut(), &half(0, true));
        until("the wire waits", || (comm.shared.waiting.load(Ordering::SeqCst) == 1).then_some(()));
        has_arrived(near[1].as_mut());
        near.into_iter().for_each(reset);
        let wire = &comm.wires[0];
        let waited_for =
            || wire.with_fd(|fd| wire.worker.poller.modify(fd, wire.token, Interest::NONE)).unwrap();
        until("the end is seen", || waited_for().is_err().then_some(()));
        let mut target = vec![0; BYTES];
        let slot = post(&comm, &mut target, 0);
        assert_eq!(outcome(&comm, slot), Ok(BYTES));
        assert!(target.iter().all(|&byte| byte == 7));
        let slot = post(&comm, &mut target, 0);
        assert!(outcome(&comm, slot).is_err());
    }

    /// Regression: nothing was received after the end of one stream.
    #[test]
    fn a_stream_cut_within_a_message_takes_nothing_from_the_messages_before() {
        let (mut near, comm) = opened();
        let mut targets = [vec![0; BYTES], vec![0; BYTES]];
        let [first, second] = targets.each_mut().map(|target| post(&comm, target, 0));
        send(near[1].as_mut(), &half(0, false));
        send(near[1].as_mut(), &half(1, false)[..1000]);
        drop(near.remove(1));
        until("the end is seen", || (comm.shared.ended.load(Ordering::SeqCst) == 1).then_some(()));
        assert_eq!(comm.test(first), Ok(None));
        send(near[1].as_mut(), &half(0, true));
        assert_eq!(outcome(&comm, first), Ok(BYTES));
        assert!(targets[0].iter().all(|&byte| byte == 7));
        // The peer lives, but this message can never be complete.
        assert!(outcome(&comm, second).unwrap_err().why.contains("in the middle of a message"));
    }

    #[test]
    fn streams_that_bring_nothing_after_another_broke_are_not_waited_for_long() {
        let (mut near, comm) = opened();
        let mut target = vec![0; BYTES];
        let slot = post(&comm, &mut target, 0);
        send(near[1].as_mut(), &half(0, false)[..10]);
        drop(near.remove(1));
        until("the end is seen", || {
            assert_eq!(comm.test(slot), Ok(None));
            comm.shared.broken.get()
        });
        let mut own = locked(&comm.own);
        assert!(!comm.is_quiet(&mut own, &comm.shared.slots[slot]));
        let (_, _, since) = own.quiet.as_mut().unwrap();
        *since = since.checked_sub(QUIET_MAX).unwrap();
        drop(own);
        assert!(outcome(&comm, slot).is_err());
    }

    #[test]
    fn parts_of_an_earlier_message_after_a_later_one_are_refused() {
        let (mut near, comm) = opened();
        let mut targets = [vec![0; BYTES], vec![0; BYTES]];
        let [first, second] = targets.each_mut().map(|target| post(&comm, target, 0));
        send(near[1].as_mut(), &half(1, false));
        send(near[1].as_mut(), &half(0, false));
        assert!(outcome(&comm, first).unwrap_err().why.contains("after a later one"));
        assert!(outcome(&comm, second).is_err());
    }

    /// Regression: threads wrote to the memory until the comm was closed.
    #[test]
    fn nothing_is_received_into_memory_that_was_deregistered() {
        let (mut near, comm) = opened();
        let mut target = vec![0; BYTES];
        let slot = post(&comm, &mut target, 77);
        for (conn, second) in [(1, false), (2, true)] {
            send(near[conn].as_mut(), &half(0, second)[..1000]);
        }
        until("both wires are within it", || {
            (comm.shared.slots[slot].placed.load(Ordering::SeqCst) == BYTES as u64).then_some(())
        });
        comm.deregister(78, || unreachable!("no request uses it"));
        comm.deregister(77, || Fault::usage("deregistered"));
        target.fill(0xEE);
        // Nothing reads these any more.
        for (conn, second) in [(1, false), (2, true)] {
            let _ = send_some(near[conn].as_mut(), &half(0, second)[1000..]);
        }
        assert_eq!(outcome(&comm, slot).unwrap_err().why, "deregistered");
        assert!(target.iter().all(|&byte| byte == 0xEE));
    }

    #[test]
    fn memory_of_receives_that_are_done_is_deregistered_and_the_comm_goes_on() {
        let (mut near, comm) = opened();
        let mut target = vec![0; BYTES];
        for message in 0..3 {
            let slot = post(&comm, &mut target, 77);
            send(near[1].as_mut(), &half(message, false));
            send(near[2].as_mut(), &half(message, true));
            assert_eq!(outcome(&comm, slot), Ok(BYTES));
            comm.deregister(77, || unreachable!("it is done"));
        }
    }
}
