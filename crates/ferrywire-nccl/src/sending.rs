//! Outgoing messages: the queue from which workers' sockets pull pieces, and the state of NCCL's thread.
//!
//! NCCL's thread sends small messages over socket 0; bulk is queued. Invariants: each socket takes pieces in the order
//! of their messages, so a receiver knows which parts an ended stream can no longer bring; a slot is reused only after
//! `test` has reported its message as sent.
//! Read next: `wire.rs`.

use std::cell::Cell;
use std::collections::VecDeque;
use std::mem;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use ferrywire_net::Conn;

use crate::comm::{Comm, Memory, REQUESTS, Side, locked, slot_of};
use crate::failure::{Failure, Fault, Outcome};
use crate::header::Header;
use crate::link::Link;
use crate::metrics::{Kind, Requests};
use crate::pool::{Delay, Opening, Pool, Wire, pool};
use crate::ranks;
use crate::settings::{SOCKETS_MAX, settings};
use crate::wire::{HEALTH_INTERVAL, Piece, Sender, Turn};

/// Smallest piece in bytes to which a message is cut.
const PIECE_BYTES_MIN: usize = 32 << 10;
/// Largest piece in bytes to which a message is cut.
const PIECE_BYTES_MAX: usize = 512 << 10;
/// Step of cuts in bytes: every cut of a message is at a multiple of it.
const PIECE_BYTES_STEP: usize = 4 << 10;
/// Longest message in bytes that is sent inline after a rest: the workers sleep, and waking one would take longer
/// than copying the message.
const LONE_BYTES_MAX: usize = 128 << 10;
/// Shortest pause that counts as a rest. Messages with shorter pauses are a stream.
const REST_MIN: Duration = Duration::from_millis(1);
/// Longest message of a short collective's step, in bytes. Steps come one after another, and a hand-over to a
/// worker would delay each at both ends. A message of at most this length that comes alone, as the message before
/// it did, is sent inline after a rest in which NCCL's thread would send at most `STEP_BYTES_PER_SECOND`. The steps
/// of several channels come together, and workers send them immediately.
const STEP_BYTES_MAX: usize = 64 << 10;
const STEP_BYTES_PER_SECOND: u64 = 3_000_000_000;
/// Longest time after the last send in which a message counts as posted together with it.
const AT_ONCE: Duration = Duration::from_micros(2);
/// Most turns of the inline socket in one call, so that a flood of messages does not keep NCCL's thread.
const INLINE_TURNS: usize = 4;

/// One direction of a comm: the state that workers and NCCL's thread share.
#[derive(Default)]
pub struct Sending {
    /// The comm's first failure.
    pub failure: Failure,
    left: Counters,
    queue: Mutex<Queue>,
    /// Number of bytes in the queue, readable without the lock.
    queued_bytes: AtomicUsize,
    sockets: usize,
    wires: OnceLock<Vec<Weak<Wire>>>,
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

/// A message of which a part has not been taken yet.
struct Outgoing {
    message: u64,
    tag: i32,
    data: *mut u8,
    bytes: usize,
    taken: usize,
}

// SAFETY: the pointer is NCCL's, readable from any thread until the request is done or the comm is closed.
unsafe impl Send for Outgoing {}

impl Sending {
    /// Takes the next piece of the queue, for a socket that has room.
    pub fn take(&self) -> Option<Piece> {
        let mut queue = locked(&self.queue);
        let share = queue.bytes / self.sockets.max(1);
        let next = queue.messages.front_mut()?;
        let left = next.bytes - next.taken;
        let wanted = share.next_multiple_of(PIECE_BYTES_STEP).clamp(PIECE_BYTES_MIN, PIECE_BYTES_MAX);
        // A small remainder is joined to this piece.
        let bytes = if left < wanted + PIECE_BYTES_MIN / 2 { left } else { wanted };
        let header = Header {
            message: next.message,
            total_bytes: next.bytes as u64,
            offset: next.taken as u64,
            bytes: bytes as u64,
            tag: next.tag,
        };
        // SAFETY: the taken part is inside the message.
        let data = unsafe { next.data.add(next.taken) };
        next.taken += bytes;
        if next.taken == next.bytes {
            queue.messages.pop_front();
        }
        queue.bytes -= bytes;
        self.queued_bytes.store(queue.bytes, Ordering::SeqCst);
        Some(Piece { header, data })
    }

    /// Whether the queue has a piece to take.
    pub fn has_work(&self) -> bool {
        self.queued_bytes.load(Ordering::SeqCst) > 0
    }

    /// Counts a piece of a message as sent.
    pub fn sent(&self, header: &Header) {
        self.left.0[slot_of(header.message)].fetch_sub((header.bytes as usize).max(1), Ordering::Release);
    }

    /// Queues a message; returns the number of sockets that have work now.
    fn enqueue(&self, outgoing: Outgoing) -> usize {
        let mut queue = locked(&self.queue);
        queue.bytes += outgoing.bytes;
        queue.messages.push_back(outgoing);
        self.queued_bytes.store(queue.bytes, Ordering::SeqCst);
        queue.bytes.div_ceil(PIECE_BYTES_MIN)
    }

    /// Wakes other sockets for the queue, because a socket that was woken may be blocked.
    pub fn tell_others(&self) {
        let wires = self.wires.get().into_iter().flatten().filter_map(Weak::upgrade).collect::<Vec<_>>();
        tell(&wires, 0, self.queued_bytes.load(Ordering::SeqCst).div_ceil(PIECE_BYTES_MIN));
    }
}

/// Tells `wanted` sockets that there is work, beginning with a different one each time.
fn tell(wires: &[Arc<Wire>], first: usize, wanted: usize) {
    soonest(wires.len(), first, |at| wires[at].delay()).take(wanted).for_each(|at| wires[at].has_work());
}

/// The indices of `count` sockets, those that take work sooner first, each group from `first` on. Each socket is asked
/// once: a socket that woke between two questions would not be woken, and the message would wait for the next.
fn soonest(count: usize, first: usize, delay: impl Fn(usize) -> Delay) -> impl Iterator<Item = usize> {
    let mut delays = [Delay::Awake; SOCKETS_MAX];
    delays.iter_mut().enumerate().take(count).for_each(|(at, known)| *known = delay(at));
    [Delay::Awake, Delay::Asleep, Delay::Blocked].into_iter().flat_map(move |group| {
        (0..count).map(move |n| (first + n) % count).filter(move |&at| delays[at] == group)
    })
}

/// The last message of this NCCL thread that was not short.
#[derive(Clone, Copy)]
struct Last {
    posted: Instant,
    /// When the kernel had the message, if this thread sent it.
    gone: Instant,
    /// Whether the message before this one was long ago.
    alone: bool,
}

thread_local! {
    /// The last message that this NCCL thread had to send, in any comm.
    static POSTED: Cell<Option<Last>> = const { Cell::new(None) };
}

/// Whether this NCCL thread has sent only short messages for long enough to send one of `bytes` bytes inline.
fn comes_after_rest(bytes: usize) -> bool {
    let now = Instant::now();
    let since = |then| now.saturating_duration_since(then);
    let last = POSTED.get().map(|last| (since(last.posted), since(last.gone), last.alone));
    let (after_rest, alone) = is_after_rest(bytes, last);
    POSTED.set(Some(Last { posted: now, gone: now, alone }));
    after_rest
}

thread_local! {
    /// Number of messages that this NCCL thread has seen arrive, in any comm.
    static ARRIVED: Cell<u64> = const { Cell::new(0) };
}

/// Counts a message that this NCCL thread has seen arrive.
pub fn saw_arrival() {
    ARRIVED.set(ARRIVED.get().wrapping_add(1));
}

/// Notes that this NCCL thread has sent a message: one that follows immediately is not alone, however long the send
/// took.
fn rest_begins() {
    POSTED.set(POSTED.get().map(|last| Last { gone: Instant::now(), ..last }));
}

/// The decision of [`comes_after_rest`] as a pure function: `last` has the times since the last message was posted and
/// since it was sent, and whether it was alone.
fn is_after_rest(bytes: usize, last: Option<(Duration, Duration, bool)>) -> (bool, bool) {
    let rested = |rest| last.is_none_or(|(_, gone, _)| gone >= rest);
    let needed = Duration::from_nanos(bytes as u64 * 1_000_000_000 / STEP_BYTES_PER_SECOND);
    let alone = last.is_none_or(|(posted, gone, _)| posted >= needed && gone >= AT_ONCE);
    let is_step = bytes <= STEP_BYTES_MAX && alone && last.is_none_or(|(_, _, alone)| alone);
    (is_step || rested(REST_MIN), alone)
}

/// The sending end of a comm.
pub struct SendComm {
    shared: Arc<Sending>,
    wires: Vec<Arc<Wire>>,
    answer_bytes: usize,
    requests: Requests,
    own: Mutex<SendOwn>,
}

/// State of the sending end that only NCCL's thread touches.
struct SendOwn {
    /// Socket 0, for small messages.
    sender: Sender,
    inline: VecDeque<Piece>,
    next: u64,
    posted: [Option<Posted>; REQUESTS],
    /// Number of messages that had arrived when the last message was posted.
    arrived: u64,
    health_asked: Instant,
}

/// The message that a slot sends.
#[derive(Clone, Copy)]
struct Posted {
    bytes: usize,
    memory: Memory,
}

// SAFETY: pieces point to memory of NCCL, readable until the request is done or the comm closed.
unsafe impl Send for SendOwn {}

impl SendOwn {
    /// Whether a message has arrived since the last call: if so, the next message is a collective's step and not
    /// part of a stream.
    fn answers(&mut self) -> bool {
        mem::replace(&mut self.arrived, ARRIVED.get()) != self.arrived
    }
}

impl SendComm {
    /// Makes a sending comm over proved connections; the first connection is for small messages.
    pub fn open(conns: Vec<Box<dyn Conn>>) -> Outcome<Box<Comm>> {
        SendComm::made(pool()?, conns).map(|comm| Comm::new(Side::Send(comm)))
    }

    /// Makes a sending comm whose bulk the workers of `pool` move.
    pub fn made(pool: &Pool, conns: Vec<Box<dyn Conn>>) -> Outcome<SendComm> {
        let (peer, mut links) = Link::all(conns)?;
        let first = links.next().ok_or_else(|| Fault::usage("the comm has no connection"))?;
        let shared = Arc::new(Sending { sockets: links.len(), ..Sending::default() });
        let mut wires = Opening::default();
        for link in links {
            wires.add(pool.send_over(Sender::new(link), shared.clone())?);
        }
        let own = SendOwn {
            sender: Sender::new(first),
            inline: VecDeque::new(),
            next: 0,
            posted: [None; REQUESTS],
            arrived: ARRIVED.get(),
            health_asked: Instant::now(),
        };
        let wires = wires.finish();
        let _ = shared.wires.set(wires.iter().map(Arc::downgrade).collect());
        Ok(SendComm {
            shared,
            wires,
            answer_bytes: settings().answer_bytes(ranks::most()),
            requests: peer.requests(Kind::Isend),
            own: Mutex::new(own),
        })
    }

    /// Posts a message and returns its slot; `None` if it cannot be posted now.
    pub fn post(&self, data: *mut u8, bytes: usize, tag: i32, memory: Memory) -> Outcome<Option<usize>> {
        let mut own = locked(&self.own);
        self.shared.failure.check()?;
        let (message, slot) = (own.next, slot_of(own.next));
        if own.posted[slot].is_some() {
            return Ok(None);
        }
        let short = settings().inline_bytes;
        let answers = bytes <= self.answer_bytes && own.answers();
        let rested = bytes > short && comes_after_rest(bytes) && bytes <= LONE_BYTES_MAX && short > 0;
        let inline = bytes <= short || ((answers || rested) && self.is_lone(&own));
        own.next += 1;
        own.posted[slot] = Some(Posted { bytes, memory });
        self.requests.started();
        self.shared.left.0[slot].store(bytes.max(1), Ordering::Relaxed);
        if inline {
            let length = bytes as u64;
            let header = Header { message, total_bytes: length, offset: 0, bytes: length, tag };
            own.inline.push_back(Piece { header, data });
            self.send_inline(&mut own);
            if bytes > short {
                rest_begins();
            }
        } else {
            let wanted = self.shared.enqueue(Outgoing { message, tag, data, bytes, taken: 0 });
            tell(&self.wires, message as usize, wanted);
        }
        Ok(Some(slot))
    }

    /// Whether no earlier message has to be sent before an inline message.
    fn is_lone(&self, own: &SendOwn) -> bool {
        !self.shared.has_work() && !own.sender.is_busy() && own.inline.is_empty()
    }

    fn send_inline(&self, own: &mut SendOwn) {
        let SendOwn { sender, inline, .. } = own;
        for _ in 0..INLINE_TURNS {
            if sender.turn(&self.shared, || inline.pop_front()) != Turn::More {
                break;
            }
        }
    }

    /// The length in bytes of a slot's message, once it has been sent.
    pub fn test(&self, slot: usize) -> Outcome<Option<usize>> {
        let mut own = locked(&self.own);
        if own.sender.is_busy() || !own.inline.is_empty() {
            self.send_inline(&mut own);
            self.check_inline(&mut own);
        }
        let Some(Posted { bytes, .. }) = own.posted[slot] else {
            return Err(Fault::usage("test was called for a request that is done"));
        };
        if self.is_gone(slot) || (self.shared.failure.is_some() && self.is_gone_after_all(slot)) {
            own.posted[slot] = None;
            self.requests.completed(slot);
            return Ok(Some(bytes));
        }
        self.shared.failure.check().inspect_err(|_| self.requests.failed(slot))?;
        Ok(None)
    }

    /// Whether a slot's message was sent although the comm has failed: the peer may have received all of it and closed
    /// before the worker that sent the last piece has counted it.
    fn is_gone_after_all(&self, slot: usize) -> bool {
        // A worker keeps its wire locked while it sends and counts.
        for wire in &self.wires {
            let _ = wire.with_fd(|_| ());
        }
        self.is_gone(slot)
    }

    /// Checks socket 0 for the end of the peer's stream; workers check the sockets for bulk.
    fn check_inline(&self, own: &mut SendOwn) {
        if own.sender.is_busy() && own.health_asked.elapsed() >= HEALTH_INTERVAL {
            own.health_asked = Instant::now();
            if let Some(fault) = own.sender.silence() {
                self.shared.failure.record(fault);
            }
        }
    }

    fn is_gone(&self, slot: usize) -> bool {
        self.shared.left.0[slot].load(Ordering::Acquire) == 0
    }

    /// Ends the use of memory by requests; see [`Comm::deregister`].
    pub fn deregister(&self, memory: Memory, why: impl FnOnce() -> Fault) {
        let mut own = locked(&self.own);
        let uses = |posted: &Option<Posted>| posted.is_some_and(|posted| posted.memory == memory);
        if own.posted.iter().enumerate().any(|(slot, posted)| uses(posted) && !self.is_gone(slot)) {
            self.shared.failure.record(why());
            self.stop(&mut own);
        }
    }

    /// Stops all use of requests' memory: afterwards no thread touches it. Bytes that were reported as sent are in
    /// the kernel, which continues to send them.
    fn stop(&self, own: &mut SendOwn) {
        self.wires.iter().for_each(|wire| wire.close());
        own.inline.clear();
        own.sender.stop();
    }
}

impl Drop for SendComm {
    fn drop(&mut self) {
        self.stop(&mut locked(&self.own));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Chosen, Ends, connections, drained, lost_with, received, reset, until};
    use ferrywire_net::{IoVec, PathHealth};
    use std::io;
    use std::net::SocketAddr;
    use std::os::fd::RawFd;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc;

    /// More than the sockets of a comm take.
    const BYTES: usize = 64 << 20;

    /// Regression: threads read the memory until the comm was closed.
    #[test]
    fn nothing_is_sent_of_memory_that_was_deregistered() {
        let (near, mut far) = connections(3);
        let comm = SendComm::made(pool().unwrap(), near).unwrap();
        let mut source = vec![7; BYTES];
        let slot = comm.post(source.as_mut_ptr(), BYTES, 0, 77).unwrap().unwrap();
        let left = || comm.shared.left.0[slot].load(Ordering::SeqCst);
        // The message is in flight and cannot end.
        until("a first piece", || (left() < BYTES).then_some(()));
        comm.deregister(78, || unreachable!("no request uses it"));
        comm.deregister(77, || Fault::usage("deregistered"));
        source.fill(0xEE);
        assert_eq!(comm.test(slot).unwrap_err().why, "deregistered");
        assert!(comm.post(source.as_mut_ptr(), 8, 0, 0).is_err());
        for conn in &mut far {
            let stream = received(conn.as_mut());
            assert!(!stream.contains(&0xEE), "{} bytes", stream.len());
        }
    }

    fn is_queued(comm: &SendComm, bytes: usize) -> bool {
        locked(&comm.shared.queue).messages.back().is_some_and(|message| message.bytes == bytes)
    }

    /// Pretends that this thread's last long message was this long ago.
    fn rested(time: Duration) {
        let then = Instant::now().checked_sub(time).unwrap();
        POSTED.set(Some(Last { posted: then, gone: then, alone: true }));
    }

    #[test]
    fn steps_go_inline_as_long_as_they_come_alone_and_slowly() {
        let after = |bytes, posted, gone, alone| {
            let us = Duration::from_micros;
            is_after_rest(bytes, Some((us(posted), us(gone), alone)))
        };
        assert_eq!(is_after_rest(STEP_BYTES_MAX, None), (true, true));
        // Regardless of how much of that time this thread needed to send the last message.
        assert_eq!(after(STEP_BYTES_MAX, 22, 22, true), (true, true));
        assert_eq!(after(STEP_BYTES_MAX, 22, 3, true), (true, true));
        assert_eq!(after(STEP_BYTES_MAX, 22, 1, true), (false, false));
        assert_eq!(after(STEP_BYTES_MAX, 20, 20, true), (false, false));
        assert_eq!(after(STEP_BYTES_MAX / 2, 20, 10, true), (true, true));
        // The first of several channels' steps; the steps before came together.
        assert_eq!(after(STEP_BYTES_MAX / 2, 20, 20, false), (false, true));
        assert_eq!(after(STEP_BYTES_MAX + 1, 999, 999, true), (false, true));
        assert_eq!(after(LONE_BYTES_MAX, 1000, 1000, false), (true, true));
    }

    #[test]
    fn short_messages_are_sent_inline_and_longer_ones_after_a_pause() {
        let (near, mut far) = connections(3);
        let comm = SendComm::made(pool().unwrap(), near).unwrap();
        let short = settings().inline_bytes;
        let mut source = vec![7; BYTES];
        let mut post = |bytes| comm.post(source.as_mut_ptr(), bytes, 0, 0).unwrap().unwrap();
        for (rest, bytes) in
            [(REST_MIN, LONE_BYTES_MAX), (REST_MIN / 2, STEP_BYTES_MAX), (Duration::ZERO, short)]
        {
            rested(rest);
            let slot = post(bytes);
            let (mut inline, mut gone) = (0, false);
            until("what goes inline", || {
                inline += drained(far[0].as_mut()).len();
                gone = gone || comm.test(slot).unwrap().is_some();
                (gone && inline >= bytes).then_some(())
            });
        }
        // In flight for as long as nothing receives it, however long the rest.
        rested(REST_MIN);
        post(BYTES);
        rested(REST_MIN);
        post(LONE_BYTES_MAX);
        assert!(is_queued(&comm, LONE_BYTES_MAX));
    }

    /// Regression: one thread sent all messages of a stream over one socket, because each was alone once the one before
    /// had been sent.
    #[test]
    fn messages_that_follow_closely_are_the_workers() {
        let (near, mut far) = connections(3);
        let comm = SendComm::made(pool().unwrap(), near).unwrap();
        let mut source = vec![7; BYTES];
        for bytes in [LONE_BYTES_MAX, STEP_BYTES_MAX, LONE_BYTES_MAX, STEP_BYTES_MAX / 2] {
            in_a_stream();
            let slot = comm.post(source.as_mut_ptr(), bytes, 0, 0).unwrap().unwrap();
            let (mut bulk, mut gone) = (0, false);
            until("what a worker sends", || {
                assert!(drained(far[0].as_mut()).is_empty());
                bulk += far[1..].iter_mut().map(|conn| drained(conn.as_mut()).len()).sum::<usize>();
                gone = gone || comm.test(slot).unwrap().is_some();
                (gone && bulk >= bytes).then_some(())
            });
        }
    }

    /// With few cores, workers would only take turns with NCCL's thread. A stream still belongs to the workers.
    #[test]
    fn with_few_cores_a_step_goes_inline_if_something_has_arrived_since_the_last() {
        let (near, mut far) = connections(3);
        let mut comm = SendComm::made(pool().unwrap(), near).unwrap();
        comm.answer_bytes = 256 << 10;
        let mut source = vec![7; BYTES];
        let longer = (comm.answer_bytes + 1, true);
        for (bytes, arrives) in [(comm.answer_bytes, true), (comm.answer_bytes, false), longer] {
            in_a_stream();
            if arrives {
                saw_arrival();
            }
            let slot = comm.post(source.as_mut_ptr(), bytes, 0, 0).unwrap().unwrap();
            let (mut received, mut gone) = ([0; 2], false);
            until("a message", || {
                received[0] += drained(far[0].as_mut()).len();
                received[1] += far[1..].iter_mut().map(|conn| drained(conn.as_mut()).len()).sum::<usize>();
                gone = gone || comm.test(slot).unwrap().is_some();
                (gone && received[0] + received[1] >= bytes).then_some(())
            });
            let inline = arrives && bytes <= comm.answer_bytes;
            assert_eq!(received.map(|bytes| bytes > 0), [inline, !inline], "{bytes} bytes");
        }
    }

    #[test]
    fn memory_of_sends_that_are_done_is_deregistered_and_the_comm_goes_on() {
        let (near, _far) = connections(3);
        let comm = SendComm::made(pool().unwrap(), near).unwrap();
        let mut source = vec![7; 100 << 10];
        for _ in 0..3 {
            let slot = comm.post(source.as_mut_ptr(), source.len(), 0, 77).unwrap().unwrap();
            assert_eq!(until("a send", || comm.test(slot).unwrap()), source.len());
            comm.deregister(77, || unreachable!("it is done"));
        }
    }

    /// Regression: a socket's thread was asked twice whether it slept, and one that woke in between was not notified.
    #[test]
    fn every_socket_comes_once_whatever_becomes_of_its_thread() {
        let asked = Cell::new(0);
        let changes = |_| {
            asked.set(asked.get() + 1);
            [Delay::Asleep, Delay::Awake, Delay::Blocked][asked.get() % 3]
        };
        for first in 0..5 {
            let mut places: Vec<_> = soonest(5, first, changes).collect();
            places.sort_unstable();
            assert_eq!(places, [0, 1, 2, 3, 4]);
        }
        let delays = [Delay::Blocked, Delay::Asleep, Delay::Awake, Delay::Asleep];
        assert_eq!(soonest(4, 3, |at| delays[at]).collect::<Vec<_>>(), [2, 3, 1, 0]);
    }

    /// Pretends that a long message was just sent, however late this thread runs.
    fn in_a_stream() {
        let later = Instant::now() + Duration::from_secs(3600);
        POSTED.set(Some(Last { posted: later, gone: later, alone: true }));
    }

    /// Regression: every second message was given to the socket without room and waited there.
    #[test]
    fn messages_go_over_a_socket_that_has_room() {
        let (near, mut far) = connections(3);
        let comm = SendComm::made(pool().unwrap(), near).unwrap();
        let mut source = vec![7; BYTES];
        let mut post = |bytes| {
            in_a_stream();
            comm.post(source.as_mut_ptr(), bytes, 0, 0).unwrap().unwrap()
        };
        // Nothing receives on one of the sockets, which fills up.
        let first = post(BYTES);
        until("all but what one socket has", || {
            drained(far[2].as_mut());
            let blocked = comm.wires[0].delay() == Delay::Blocked;
            (blocked && !comm.shared.has_work()).then_some(())
        });
        for _ in 0..4 {
            let slot = post(20 << 10);
            until("a message", || {
                drained(far[2].as_mut());
                comm.test(slot).unwrap()
            });
        }
        assert_eq!(comm.test(first), Ok(None));
    }

    /// A connection whose send returns some time after the peer has all bytes.
    struct Late {
        conn: Box<dyn Conn>,
        returns: mpsc::Receiver<()>,
    }

    impl Conn for Late {
        unsafe fn send(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
            // SAFETY: promised by the caller.
            let sent = unsafe { self.conn.send(pieces) }?;
            let _ = self.returns.recv();
            Ok(sent)
        }

        unsafe fn recv(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
            // SAFETY: promised by the caller.
            unsafe { self.conn.recv(pieces) }
        }

        fn health(&self) -> PathHealth {
            self.conn.health()
        }

        fn shutdown(&mut self) {
            self.conn.shutdown();
        }

        fn fd(&self) -> Option<RawFd> {
            self.conn.fd()
        }

        fn local(&self) -> SocketAddr {
            self.conn.local()
        }

        fn remote(&self) -> SocketAddr {
            self.conn.remote()
        }
    }

    /// Regression: the send failed, because another thread saw the peer's end before this message was counted.
    #[test]
    fn a_message_that_the_peer_has_received_before_it_closed_is_sent() {
        const BYTES: usize = 20 << 10;
        let (near, mut far) = connections(3);
        let (mut late, mut returns): (Ends, Vec<_>) = Default::default();
        for conn in near {
            let (sender, waits) = mpsc::channel::<()>();
            late.push(Box::new(Late { conn, returns: waits }));
            returns.push(sender);
        }
        let comm = SendComm::made(&Pool::of(2), late).unwrap();
        let mut source = vec![7; BYTES];
        in_a_stream();
        let slot = comm.post(source.as_mut_ptr(), BYTES, 0, 0).unwrap().unwrap();
        let mut received = 0;
        until("all of it", || {
            received += far[1..].iter_mut().map(|conn| drained(conn.as_mut()).len()).sum::<usize>();
            (received > BYTES).then_some(())
        });
        drop(far);
        until("the end is seen", || comm.shared.failure.is_some().then_some(()));
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            drop(returns);
        });
        assert_eq!(comm.test(slot), Ok(Some(BYTES)));
        assert!(comm.post(source.as_mut_ptr(), BYTES, 0, 0).is_err());
    }

    /// A connection that takes bytes and hands them to the kernel once it may, as an encrypted one does while the socket is full.
    struct Holds {
        conn: Box<dyn Conn>,
        held: Vec<u8>,
        may_send: Arc<AtomicBool>,
    }

    impl Conn for Holds {
        unsafe fn send(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
            let before = self.held.len();
            for piece in pieces {
                // SAFETY: promised by the caller.
                self.held.extend_from_slice(unsafe { std::slice::from_raw_parts(piece.base, piece.len) });
            }
            Ok(self.held.len() - before)
        }

        unsafe fn recv(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
            // SAFETY: promised by the caller.
            unsafe { self.conn.recv(pieces) }
        }

        fn has_unsent(&self) -> bool {
            !self.held.is_empty()
        }

        fn flush(&mut self) -> io::Result<()> {
            while self.has_unsent() {
                if !self.may_send.load(Ordering::SeqCst) {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                let sent = self.conn.write(&self.held)?;
                self.held.drain(..sent);
            }
            Ok(())
        }

        fn health(&self) -> PathHealth {
            self.conn.health()
        }

        fn shutdown(&mut self) {
            self.conn.shutdown();
        }

        fn fd(&self) -> Option<RawFd> {
            self.conn.fd()
        }

        fn local(&self) -> SocketAddr {
            self.conn.local()
        }

        fn remote(&self) -> SocketAddr {
            self.conn.remote()
        }
    }

    /// NCCL may close the comm once its last message is sent: bytes that the connection holds would be lost.
    #[test]
    fn a_message_that_its_connection_holds_is_not_sent() {
        const BYTES: usize = 1000;
        let (near, mut far) = connections(3);
        let may_send = Arc::<AtomicBool>::default();
        let holds = |conn| -> Box<dyn Conn> {
            Box::new(Holds { conn, held: Vec::new(), may_send: may_send.clone() })
        };
        let comm = SendComm::made(&Pool::of(2), near.into_iter().map(holds).collect()).unwrap();
        let mut source = vec![7; BYTES];
        let slot = comm.post(source.as_mut_ptr(), BYTES, 0, 0).unwrap().unwrap();
        for _ in 0..100 {
            assert_eq!(comm.test(slot), Ok(None));
        }
        may_send.store(true, Ordering::SeqCst);
        until("the message is sent", || comm.test(slot).unwrap());
        let mut received = 0;
        until("the message arrives", || {
            received += far.iter_mut().map(|conn| drained(conn.as_mut()).len()).sum::<usize>();
            (received > BYTES).then_some(())
        });
    }

    /// Regression: each call of `test` sent on the broken socket again, and counted it as lost again.
    #[test]
    fn a_broken_socket_for_small_messages_is_lost_once() {
        const PEER: [u8; 4] = [198, 51, 100, 12];
        let (near, mut far) = Chosen::connections(2, PEER, Duration::ZERO);
        let near = near.into_iter().map(|conn| -> Box<dyn Conn> { Box::new(conn) });
        let comm = SendComm::made(&Pool::of(1), near.collect()).unwrap();
        reset(far.swap_remove(0));
        let mut source = [7; 8];
        // The first messages may be sent before the reset arrives.
        let slot = until("a message that is not sent", || {
            let slot = comm.post(source.as_mut_ptr(), source.len(), 0, 0).unwrap().unwrap();
            comm.test(slot).is_err().then_some(slot)
        });
        for _ in 0..10 {
            assert!(comm.test(slot).is_err());
        }
        assert_eq!(lost_with(PEER), 1);
    }
}
