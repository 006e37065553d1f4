//! Comms: what `connect` and `accept` give, and the requests posted on them.
//!
//! Sends and receives are numbered alike at both ends: message number k goes into receive number k. The state that
//! workers share is apart ([`Sending`], [`Receiving`]) from what only NCCL's thread touches. Small messages are moved
//! on that thread, over socket 0; bulk is queued, and the workers' sockets pull pieces of it.
//!
//! A request's life: free -> posted (its number is fixed) -> moving -> moved -> free, when `test` has said so.
//! Invariants: the slot of a request is used again only after `test` has said that it is done; a comm that is dropped
//! waits until no thread touches memory of its requests, and cuts nothing that was told as sent.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrywire::nccl::abi::{REQUESTS_MAX, ResultCode};
use ferrywire::transport::Conn;

use crate::attempt::be_patient;
use crate::failure::{Failure, Fault, Outcome};
use crate::head::Head;
use crate::settings::settings;
use crate::wire::{Piece, Receiver, Sender, Turn};
use crate::worker::{Wire, pool};

/// Requests of a comm at once: what NCCL posts at most, and as much again.
const REQUESTS: usize = 2 * REQUESTS_MAX;
/// A message is not cut into smaller pieces than this,
const PIECE_BYTES_MIN: usize = 64 << 10;
/// nor into larger ones than this.
const PIECE_BYTES_MAX: usize = 512 << 10;
/// Cuts are made at multiples of this.
const PIECE_BYTES_STEP: usize = 4 << 10;
/// Turns of the inline socket in one call, so that a flood cannot keep NCCL's thread.
const INLINE_TURNS: usize = 4;
/// The length of a message whose first head has not come yet.
const TOTAL_UNKNOWN: u64 = u64::MAX;

/// A comm behind the pointer that NCCL has.
pub struct Comm {
    side: Side,
    requests: [Request; REQUESTS],
}

#[allow(clippy::large_enum_variant, reason = "there is one in a box")]
enum Side {
    Send(SendComm),
    Receive(RecvComm),
}

/// A request behind the pointer that NCCL has: a place in its comm.
pub struct Request {
    comm: *const Comm,
    slot: usize,
}

// SAFETY: the pointers are to the comm itself, whose parts are locked or atomic.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

impl Comm {
    fn new(side: Side) -> Box<Comm> {
        let requests = std::array::from_fn(|slot| Request { comm: ptr::null(), slot });
        let mut comm = Box::new(Comm { side, requests });
        let address: *const Comm = &*comm;
        comm.requests.iter_mut().for_each(|request| request.comm = address);
        comm
    }

    /// Posts a message; `None`: not now.
    pub fn isend(&self, data: *mut u8, bytes: usize, tag: i32) -> Outcome<Option<&Request>> {
        match &self.side {
            Side::Send(comm) => Ok(comm.post(data, bytes, tag)?.map(|slot| &self.requests[slot])),
            Side::Receive(_) => Err(Fault::usage("isend on a comm that receives")),
        }
    }

    /// Posts a receive; `None`: not now.
    pub fn irecv(&self, data: *mut u8, bytes: usize) -> Outcome<Option<&Request>> {
        match &self.side {
            Side::Receive(comm) => Ok(comm.post(data, bytes)?.map(|slot| &self.requests[slot])),
            Side::Send(_) => Err(Fault::usage("irecv on a comm that sends")),
        }
    }
}

impl Request {
    /// The length of the message once it is done, and `None` before. An error ends the comm.
    ///
    /// # Safety
    /// The comm of this request is open.
    pub unsafe fn test(&self) -> Outcome<Option<usize>> {
        // SAFETY: by the caller's promise.
        match unsafe { &(*self.comm).side } {
            Side::Send(comm) => comm.test(self.slot),
            Side::Receive(comm) => comm.test(self.slot),
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of a slot.
fn slot_of(message: u64) -> usize {
    (message % REQUESTS as u64) as usize
}

/// Messages in one direction: what workers need of a send comm.
#[derive(Default)]
pub struct Sending {
    /// The first failure.
    pub failure: Failure,
    left: Counters,
    queue: Mutex<Queue>,
    /// Bytes in the queue, to be looked at without the lock.
    queued_bytes: AtomicUsize,
    sockets: usize,
}

struct Counters([AtomicUsize; REQUESTS]);

impl Default for Counters {
    fn default() -> Counters {
        Counters([const { AtomicUsize::new(0) }; REQUESTS])
    }
}

#[derive(Default)]
struct Queue {
    messages: VecDeque<Outgoing>,
    bytes: usize,
}

/// A message of which some is not taken yet.
struct Outgoing {
    message: u64,
    tag: i32,
    data: *mut u8,
    bytes: usize,
    taken: usize,
}

// SAFETY: the pointer is NCCL's, readable until the request is done or the comm closed, from any thread.
unsafe impl Send for Outgoing {}

impl Sending {
    /// The next piece for a socket that has room.
    pub fn take(&self) -> Option<Piece> {
        let mut queue = locked(&self.queue);
        let share = queue.bytes / self.sockets.max(1);
        let next = queue.messages.front_mut()?;
        let left = next.bytes - next.taken;
        let wanted = share.next_multiple_of(PIECE_BYTES_STEP).clamp(PIECE_BYTES_MIN, PIECE_BYTES_MAX);
        // No small rest.
        let bytes = if left < wanted + PIECE_BYTES_MIN / 2 { left } else { wanted };
        let head = Head {
            message: next.message,
            total_bytes: next.bytes as u64,
            offset: next.taken as u64,
            bytes: bytes as u64,
            tag: next.tag,
        };
        // SAFETY: what is taken of a message lies inside it.
        let data = unsafe { next.data.add(next.taken) };
        next.taken += bytes;
        if next.taken == next.bytes {
            queue.messages.pop_front();
        }
        queue.bytes -= bytes;
        self.queued_bytes.store(queue.bytes, Ordering::SeqCst);
        Some(Piece { head, data })
    }

    /// Whether a piece could be taken.
    pub fn has_work(&self) -> bool {
        self.queued_bytes.load(Ordering::SeqCst) > 0
    }

    /// A piece has gone.
    pub fn sent(&self, head: &Head) {
        self.left.0[slot_of(head.message)].fetch_sub((head.bytes as usize).max(1), Ordering::Release);
    }

    /// Gives the number of sockets that have work now.
    fn enqueue(&self, outgoing: Outgoing) -> usize {
        let mut queue = locked(&self.queue);
        queue.bytes += outgoing.bytes;
        queue.messages.push_back(outgoing);
        self.queued_bytes.store(queue.bytes, Ordering::SeqCst);
        queue.bytes.div_ceil(PIECE_BYTES_MIN)
    }
}

/// A comm that sends.
pub struct SendComm {
    shared: Arc<Sending>,
    wires: Vec<Arc<Wire>>,
    own: Mutex<SendOwn>,
}

/// What NCCL's thread alone touches.
struct SendOwn {
    /// Socket 0.
    sender: Sender,
    inline: VecDeque<Piece>,
    next: u64,
    /// Length of the message posted in each slot.
    posted: [Option<usize>; REQUESTS],
}

// SAFETY: pieces point to memory of NCCL's, readable until its request is done or the comm closed.
unsafe impl Send for SendOwn {}

impl SendComm {
    /// Over connections that have proved themselves, the one for small messages first.
    pub fn open(conns: Vec<Box<dyn Conn>>) -> Outcome<Box<Comm>> {
        conns.iter().for_each(|conn| be_patient(conn.as_ref()));
        let mut conns = conns.into_iter();
        let first = conns.next().ok_or_else(|| Fault::usage("a comm without connections"))?;
        let shared = Arc::new(Sending { sockets: conns.len(), ..Sending::default() });
        let wires = conns
            .map(|conn| pool()?.send_over(Sender::new(conn), shared.clone()))
            .collect::<Outcome<Vec<_>>>()?;
        let own = SendOwn {
            sender: Sender::new(first),
            inline: VecDeque::new(),
            next: 0,
            posted: [None; REQUESTS],
        };
        Ok(Comm::new(Side::Send(SendComm { shared, wires, own: Mutex::new(own) })))
    }

    fn post(&self, data: *mut u8, bytes: usize, tag: i32) -> Outcome<Option<usize>> {
        let mut own = locked(&self.own);
        self.shared.failure.check()?;
        let (message, slot) = (own.next, slot_of(own.next));
        if own.posted[slot].is_some() {
            return Ok(None);
        }
        own.next += 1;
        own.posted[slot] = Some(bytes);
        self.shared.left.0[slot].store(bytes.max(1), Ordering::Relaxed);
        if bytes <= settings().inline_bytes {
            let length = bytes as u64;
            let head = Head { message, total_bytes: length, offset: 0, bytes: length, tag };
            own.inline.push_back(Piece { head, data });
            self.send_inline(&mut own);
        } else {
            let wanted = self.shared.enqueue(Outgoing { message, tag, data, bytes, taken: 0 });
            self.wake(message as usize, wanted);
        }
        Ok(Some(slot))
    }

    /// Wakes as many sockets as have work, beginning with another one each time.
    fn wake(&self, first: usize, wanted: usize) {
        let count = self.wires.len();
        (0..count.min(wanted)).for_each(|n| self.wires[(first + n) % count].has_work());
    }

    fn send_inline(&self, own: &mut SendOwn) {
        let SendOwn { sender, inline, .. } = own;
        for _ in 0..INLINE_TURNS {
            if sender.turn(&self.shared, || inline.pop_front()) != Turn::More {
                break;
            }
        }
    }

    fn test(&self, slot: usize) -> Outcome<Option<usize>> {
        let mut own = locked(&self.own);
        if own.sender.is_busy() || !own.inline.is_empty() {
            self.send_inline(&mut own);
        }
        let Some(bytes) = own.posted[slot] else {
            return Err(Fault::usage("test of a request that is done"));
        };
        if self.shared.left.0[slot].load(Ordering::Acquire) == 0 {
            own.posted[slot] = None;
            return Ok(Some(bytes));
        }
        self.shared.failure.check()?;
        Ok(None)
    }
}

impl Drop for SendComm {
    fn drop(&mut self) {
        self.wires.iter().for_each(|wire| wire.close());
        // What was told as sent is in the kernel, which goes on sending it.
        locked(&self.own).sender.conn().shutdown();
    }
}

/// Messages in one direction: what workers need of a receive comm.
pub struct Receiving {
    /// The first failure.
    pub failure: Failure,
    slots: [Slot; REQUESTS],
    /// Receives posted so far: their numbers are below it.
    posted: AtomicU64,
    /// Sockets whose next piece belongs to a receive that is not posted.
    pub waiting: AtomicUsize,
    /// Sockets whose stream the peer has ended in order.
    ended: AtomicUsize,
    sockets: usize,
}

/// A posted receive.
struct Slot {
    message: AtomicU64,
    data: AtomicPtr<u8>,
    room: AtomicUsize,
    total: AtomicU64,
    /// Bytes whose heads have come.
    placed: AtomicU64,
    /// Bytes that are here.
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

    /// Its length, once all of it is here.
    fn done(&self) -> Option<usize> {
        let total = self.total.load(Ordering::Acquire);
        (self.received.load(Ordering::Acquire) == total).then_some(total as usize)
    }

    fn is_begun(&self) -> bool {
        self.total.load(Ordering::Acquire) != TOTAL_UNKNOWN
    }
}

impl Receiving {
    fn new(sockets: usize) -> Receiving {
        Receiving {
            failure: Failure::default(),
            slots: [const { Slot::new() }; REQUESTS],
            posted: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
            sockets,
        }
    }

    /// Whether a receive is posted.
    pub fn is_posted(&self, message: u64) -> bool {
        message < self.posted.load(Ordering::SeqCst)
    }

    /// Where a piece belongs; `None` while its receive is not posted.
    pub fn place(&self, head: &Head) -> Outcome<Option<*mut u8>> {
        if !self.is_posted(head.message) {
            return Ok(None);
        }
        let slot = &self.slots[slot_of(head.message)];
        if slot.message.load(Ordering::Relaxed) != head.message {
            return Err(Fault::remote("the peer sent a message twice"));
        }
        let (total, room) = (head.total_bytes, slot.room.load(Ordering::Relaxed));
        if total > room as u64 {
            let why = format!("a message of {total} bytes met a receive of {room}");
            return Err(Fault { code: ResultCode::INVALID_USAGE, why });
        }
        let known = slot.total.compare_exchange(TOTAL_UNKNOWN, total, Ordering::AcqRel, Ordering::Acquire);
        let placed = slot.placed.fetch_add(head.bytes, Ordering::AcqRel);
        if known.is_err_and(|known| known != total) || placed + head.bytes > total {
            return Err(Fault::remote("the peer sent parts that do not make a message"));
        }
        // SAFETY: the piece lies inside its message, and the message fits the buffer.
        Ok(Some(unsafe { slot.data.load(Ordering::Relaxed).add(head.offset as usize) }))
    }

    /// So many bytes of a message are here.
    pub fn received(&self, message: u64, bytes: usize) {
        self.slots[slot_of(message)].received.fetch_add(bytes as u64, Ordering::Release);
    }

    /// A socket's stream has ended between two messages. After the last one nothing can come.
    pub fn ended(&self, peer: SocketAddr) {
        if self.ended.fetch_add(1, Ordering::AcqRel) + 1 == self.sockets {
            self.failure.record(Fault::remote(format_args!("{peer} has closed the connection")));
        }
    }
}

/// A comm that receives.
pub struct RecvComm {
    shared: Arc<Receiving>,
    wires: Vec<Arc<Wire>>,
    own: Mutex<RecvOwn>,
}

/// What NCCL's thread alone touches.
struct RecvOwn {
    /// Socket 0.
    receiver: Receiver,
    next: u64,
    posted: [bool; REQUESTS],
}

impl RecvComm {
    /// Over connections that have proved themselves, the one for small messages first.
    pub fn open(conns: Vec<Box<dyn Conn>>) -> Outcome<Box<Comm>> {
        conns.iter().for_each(|conn| be_patient(conn.as_ref()));
        let mut conns = conns.into_iter();
        let first = conns.next().ok_or_else(|| Fault::usage("a comm without connections"))?;
        let shared = Arc::new(Receiving::new(conns.len() + 1));
        let wires = conns
            .map(|conn| pool()?.receive_over(Receiver::new(conn), shared.clone()))
            .collect::<Outcome<Vec<_>>>()?;
        let own = RecvOwn { receiver: Receiver::new(first), next: 0, posted: [false; REQUESTS] };
        Ok(Comm::new(Side::Receive(RecvComm { shared, wires, own: Mutex::new(own) })))
    }

    fn post(&self, data: *mut u8, bytes: usize) -> Outcome<Option<usize>> {
        let mut own = locked(&self.own);
        let (message, index) = (own.next, slot_of(own.next));
        if own.posted[index] {
            return Ok(None);
        }
        own.next += 1;
        own.posted[index] = true;
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

    fn test(&self, index: usize) -> Outcome<Option<usize>> {
        let mut own = locked(&self.own);
        if !own.posted[index] {
            return Err(Fault::usage("test of a request that is done"));
        }
        let slot = &self.shared.slots[index];
        let mut done = slot.done();
        // Bulk that is under way comes over the other sockets; once one of those has ended, so may this one have.
        let ending = self.shared.ended.load(Ordering::Acquire) > 0;
        if done.is_none() && (ending || !slot.is_begun() || own.receiver.is_busy()) {
            self.receive_inline(&mut own);
            done = slot.done();
        }
        match done {
            Some(_) => own.posted[index] = false,
            None => self.shared.failure.check()?,
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
}

impl Drop for RecvComm {
    fn drop(&mut self) {
        self.wires.iter().for_each(|wire| wire.close());
        locked(&self.own).receiver.conn().shutdown();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::head::Head;
    use ferrywire::transport::tcp::TcpTransport;
    use ferrywire::transport::{ConnOptions, IoVec, Transport};
    use std::time::Instant;

    /// Both ends of a connection.
    fn connection() -> [Box<dyn Conn>; 2] {
        let transport = TcpTransport::default();
        let mut listener = transport.listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let near = transport.dial(None, listener.local(), &ConnOptions::default()).unwrap();
        let far = loop {
            if let Some(conn) = listener.accept().unwrap() {
                break conn;
            }
            std::thread::yield_now();
        };
        [near, far]
    }

    /// It was waited for without end: the socket for small messages was not looked at any more.
    #[test]
    fn a_peer_that_ends_between_two_pieces_of_a_message_is_an_error() {
        let (mut near, far): (Vec<_>, Vec<_>) = (0..3).map(|_| <(_, _)>::from(connection())).unzip();
        let comm = RecvComm::open(far).unwrap();
        let mut target = vec![0; 128 << 10];
        let request = comm.irecv(target.as_mut_ptr(), target.len()).unwrap().unwrap();
        let mut piece = Head { message: 0, total_bytes: 128 << 10, offset: 0, bytes: 64 << 10, tag: 0 }
            .to_bytes()
            .to_vec();
        piece.resize(piece.len() + (64 << 10), 7);
        let mut sent = 0;
        while sent < piece.len() {
            let rest = &mut piece[sent..];
            let rest = [IoVec::new(rest.as_mut_ptr(), rest.len())];
            // SAFETY: the piece outlives the call.
            match unsafe { near[1].send(&rest) } {
                Ok(bytes) => sent += bytes,
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
            }
        }
        // SAFETY: the comm is open.
        let test = || unsafe { request.test() };
        let begin = Instant::now();
        let in_time = || assert!(begin.elapsed().as_secs() < 120, "nothing is told");
        let Side::Receive(receiving) = &comm.side else { unreachable!() };
        while receiving.shared.slots[0].received.load(Ordering::Acquire) < 64 << 10 {
            assert_eq!(test().unwrap(), None);
            in_time();
        }
        drop(near);
        while test().is_ok_and(|done| done.is_none()) {
            in_time();
            std::thread::yield_now();
        }
        assert!(test().is_err());
    }
}
