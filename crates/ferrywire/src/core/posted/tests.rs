//! The rules of a lane, tested with a scripted lane that checks its use.

mod standstill;

use super::{Arrival, LanePass, Posted, Touched};
use crate::core::operation::{Hold, Op, Task, no_owner};
use crate::core::peer::Landing;
use crate::core::queue::{Entry, Pull, SendQueue};
use crate::core::staging::Sending;
use crate::core::stats::LaneCounters;
use crate::error::Error;
use crate::payload::lane::{InFlight, Lane, Post, Run, Step, Ticket, Ungathered, Way, copy_on_host};
use ferrywire_memory::{Gpu, Memory, MemoryLocation};
use ferrywire_proto::limits;
use ferrywire_proto::operation::{Piece, Pieces};
use ferrywire_proto::window::Window;
use ferrywire_proto::wire::{FLAG_POSTED, Header, Kind, Refusal};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

const WINDOW: usize = 16;
const CHUNK: usize = 64 << 10;
const STALL: Duration = Duration::from_secs(30);
const NOTHING: Touched = Touched { lane: false, gpu: None };
/// A simulated GPU that only tests here use.
const ALONE: u32 = 12;

/// The script of the fake lane, and its record of calls.
#[derive(Default)]
struct Script {
    /// Results of tests of the oldest request, in order; pending when there are none.
    sends: VecDeque<Step>,
    receives: VecDeque<Step>,
    /// Whether posting is refused, as by a full lane.
    full: bool,
    posted_sends: VecDeque<usize>,
    posted_receives: VecDeque<usize>,
    finished: VecDeque<usize>,
    next: usize,
    sent: Vec<Vec<u8>>,
    received_into: Vec<(u64, usize)>,
    consumed: usize,
    /// Whether received bytes lie elsewhere until they are gathered; then the gathers that were begun, and
    /// whether each is done.
    scatters: bool,
    /// Results of packing and unpacking, in order; done when there are none.
    copies: VecDeque<Poll<Result<(), Error>>>,
    gathers: Vec<(u64, bool)>,
    /// The GPU in whose memory received bytes lie until they are gathered.
    pool: Option<MemoryLocation>,
    closed: Option<InFlight>,
    /// Whether the lane may be ready before the peer's end is.
    alone: bool,
    /// Whether this end holds payload because its GPU stands still.
    holds: bool,
    /// Whether the path is silent.
    silent: bool,
    /// Memory that the lane has registered.
    known: Vec<Arc<Memory>>,
}

struct Fake(Arc<Mutex<Script>>);

impl Lane for Fake {
    fn window(&self) -> usize {
        WINDOW
    }

    fn message_bytes_max(&self) -> usize {
        CHUNK
    }

    fn may_stand_alone(&self) -> bool {
        self.0.lock().unwrap().alone
    }

    fn path_trouble(&self) -> Option<String> {
        self.0.lock().unwrap().silent.then(|| "silent".into())
    }

    fn holds_payload(&self) -> bool {
        self.0.lock().unwrap().holds
    }

    fn isend(&mut self, run: &Run) -> Post {
        let mut script = self.0.lock().unwrap();
        if script.full || script.posted_sends.len() == WINDOW {
            return Post::Full("scripted");
        }
        script.known.push(run.memory.clone());
        // SAFETY: a run of a test's own memory.
        script.sent.push(unsafe { std::slice::from_raw_parts(run.base(), run.bytes) }.to_vec());
        script.next += 1;
        let ticket = script.next;
        script.posted_sends.push_back(ticket);
        Post::Posted(Ticket(ticket))
    }

    fn irecv(&mut self, run: &Run) -> Post {
        let mut script = self.0.lock().unwrap();
        if script.full {
            return Post::Full("scripted");
        }
        assert!(
            script.posted_receives.len() + script.finished.len() < WINDOW,
            "more receives are posted than the window allows"
        );
        script.received_into.push((run.offset, run.bytes));
        script.next += 1;
        let ticket = script.next;
        script.posted_receives.push_back(ticket);
        Post::Posted(Ticket(ticket))
    }

    fn test_send(&mut self, ticket: Ticket) -> Step {
        let mut script = self.0.lock().unwrap();
        assert_eq!(
            script.posted_sends.front(),
            Some(&ticket.0),
            "a request was tested that is not the oldest"
        );
        let step = script.sends.pop_front().unwrap_or(Step::Pending);
        if step == Step::Done {
            script.posted_sends.pop_front();
        }
        step
    }

    fn test_recv(&mut self, ticket: Ticket) -> Step {
        let mut script = self.0.lock().unwrap();
        assert_eq!(
            script.posted_receives.front(),
            Some(&ticket.0),
            "a request was tested that is not the oldest"
        );
        let step = script.receives.pop_front().unwrap_or(Step::Pending);
        if step == Step::Done {
            let done = script.posted_receives.pop_front();
            script.finished.extend(done);
        }
        step
    }

    fn scatters(&self, _memory: &Memory) -> bool {
        self.0.lock().unwrap().scatters
    }

    fn gathers_on(&self) -> Option<MemoryLocation> {
        self.0.lock().unwrap().pool
    }

    fn gather(&mut self, number: u64, _run: &Run) -> Result<(), Ungathered> {
        self.0.lock().unwrap().gathers.push((number, false));
        Ok(())
    }

    fn gathered(&mut self, number: u64) -> Poll<Result<(), Error>> {
        let script = self.0.lock().unwrap();
        match script.gathers.iter().find(|(each, _)| *each == number) {
            Some((_, true)) => Poll::Ready(Ok(())),
            Some((_, false)) => Poll::Pending,
            None => panic!("gather {number} was never begun"),
        }
    }

    fn consumed(&mut self, ticket: Ticket) -> Result<(), String> {
        let mut script = self.0.lock().unwrap();
        assert_eq!(script.finished.pop_front(), Some(ticket.0), "receives were returned out of order");
        script.consumed += 1;
        Ok(())
    }

    fn copy(&mut self, way: Way, slot: &Run, ranges: &[Run]) -> Poll<Result<(), Error>> {
        let mut script = self.0.lock().unwrap();
        if let Some(answer) = script.copies.pop_front() {
            return answer;
        }
        copy_on_host(way, slot, ranges);
        Poll::Ready(Ok(()))
    }

    fn slot_memory(&self, _like: Option<&Memory>, bytes: usize) -> Result<Arc<Memory>, String> {
        Memory::private(bytes).map_err(|error| error.to_string())
    }

    fn forget_revoked(&mut self, busy: &dyn Fn(&Arc<Memory>) -> bool) {
        self.0.lock().unwrap().known.retain(|memory| !memory.revoked() || busy(memory));
    }

    fn close(&mut self, in_flight: InFlight) {
        self.0.lock().unwrap().closed = Some(in_flight);
    }

    fn describe(&self) -> String {
        "the fake".into()
    }
}

/// A lane under test, with its script and a clock.
struct Bench {
    posted: Posted,
    script: Arc<Mutex<Script>>,
    now: Duration,
}

impl Bench {
    fn new() -> Bench {
        Bench::with(Script::default())
    }

    fn with(script: Script) -> Bench {
        let script = Arc::new(Mutex::new(script));
        let posted = Posted::new(Box::new(Fake(script.clone())), STALL, Arc::new(LaneCounters::default()));
        Bench { posted, script, now: Duration::ZERO }
    }

    /// Lets time pass with passes in between: a clock that is not read does not advance.
    fn advance(&mut self, time: Duration) -> Result<(), String> {
        let end = self.now + time;
        while self.now < end {
            self.now = end.min(self.now + Duration::from_millis(500));
            self.poll()?;
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<LanePass, String> {
        let mut pass = LanePass::default();
        self.posted.poll(self.now, &mut pass).map(|()| pass)
    }

    fn script<T>(&self, look: impl FnOnce(&mut Script) -> T) -> T {
        look(&mut self.script.lock().unwrap())
    }

    /// Takes frames as a channel does, up to the available room. Returns their number.
    fn take(&mut self, queue: &SendQueue, window: &mut Window<Entry>) -> usize {
        let first = window.next();
        let room = self.posted.room();
        let pull = Pull {
            bytes: u64::MAX,
            channels: 1,
            chunk_bytes: queue.chunk_bytes,
            staged_bytes: (limits::STAGING_CHUNK_BYTES_MIN, limits::STAGING_SLOT_BYTES),
            ordered_bytes: 0,
            whole_bytes: 0,
            small: u64::MAX,
            bulk: true,
            bulk_in_turn: false,
            messages: Some(room),
        };
        queue.pull(None, window, &mut Sending::default(), pull);
        let mut taken = 0;
        for (entry, frame) in window.from(first).zip(first..) {
            if entry.header.is_posted() {
                self.posted.admit(frame, entry);
                taken += 1;
            }
        }
        assert!(taken <= room, "{taken} frames for a room of {room}");
        taken
    }

    fn expect(&mut self, arrival: Arrival) {
        self.posted.expect(arrival);
    }
}

/// A queue with a write of `chunks` chunks, and the bytes it writes.
fn queue_of(chunks: usize) -> (SendQueue, Vec<u8>) {
    let bytes: Vec<u8> = (0..chunks * CHUNK).map(|at| (at / 1000) as u8).collect();
    let memory = filled(&bytes);
    let piece = Piece { local: 0, remote: 0, len: bytes.len() as u64 };
    (queue_with(memory, Pieces::One(piece)), bytes)
}

fn queue_with(memory: Arc<Memory>, pieces: Pieces) -> SendQueue {
    let queue = SendQueue::new(CHUNK, [CHUNK as u64; 2], false).with_lanes();
    assert!(queue.post(Hold::new(Op::new(no_owner(), 1, Task::Write { region: 9 }, pieces, Some(memory)))));
    queue
}

fn filled(bytes: &[u8]) -> Arc<Memory> {
    let memory = Memory::private(bytes.len()).unwrap();
    let base = memory.span(0, bytes.len() as u64).unwrap();
    // SAFETY: memory of this test's own, of that size.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), base, bytes.len()) };
    memory
}

fn window() -> Window<Entry> {
    Window::new(limits::WINDOW_FRAMES_MAX, usize::MAX)
}

/// A data frame whose payload goes to these runs.
fn frame(number: u64, target: &[(u64, usize)], memory: &Arc<Memory>) -> Arrival {
    let mut header = Header::new(Kind::Data);
    header.flags = FLAG_POSTED;
    header.transfer = number;
    header.len = target.iter().map(|(_, bytes)| *bytes as u32).sum();
    let target =
        target.iter().map(|&(offset, bytes)| Run { memory: memory.clone(), offset, bytes }).collect();
    let landing = Some(Landing::Region { key: 9, memory: memory.clone() });
    Arrival {
        header,
        placements: Vec::new(),
        landing,
        message: Vec::new(),
        refusal: None,
        target,
        chunk: None,
    }
}

/// A frame without payload on the lane.
fn whole(number: u64) -> Arrival {
    let header = Header { transfer: number, ..Header::new(Kind::Notify) };
    let (placements, message, target) = Default::default();
    Arrival { header, placements, landing: None, message, refusal: None, target, chunk: None }
}

fn numbers(pass: &LanePass) -> Vec<u64> {
    pass.arrived.iter().map(|arrival| arrival.header.transfer).collect()
}

#[test]
fn sends_run_on_credit_and_never_past_the_window() {
    let (queue, bytes) = queue_of(40);
    let (mut bench, mut window) = (Bench::new(), window());
    assert_eq!(bench.take(&queue, &mut window), WINDOW, "one window is sent before the peer posts receives");
    bench.poll().unwrap();
    bench.script(|script| assert_eq!(script.posted_sends.len(), WINDOW));
    // All sends are done, but the peer has posted a receive for none of them: no credit for more.
    bench.script(|script| script.sends.extend(vec![Step::Done; WINDOW]));
    bench.poll().unwrap();
    assert_eq!(bench.take(&queue, &mut window), 0);
    bench.posted.confirm(3).unwrap();
    assert_eq!(bench.take(&queue, &mut window), 3, "3 more frames than a window");
    bench.posted.confirm(19).unwrap();
    assert_eq!(bench.posted.room(), WINDOW - 3, "the room is the window less the messages in flight");
    assert!(bench.posted.confirm(20).is_err(), "the peer posted for messages that were never begun");
    assert!(bench.posted.confirm(18).is_err(), "a count may not shrink");
    while bench.take(&queue, &mut window) > 0 {
        bench.script(|script| script.sends.extend(vec![Step::Done; WINDOW]));
        bench.poll().unwrap();
        bench.poll().unwrap();
        let begun = window.next() as u32;
        bench.posted.confirm(begun).unwrap();
    }
    bench.script(|script| assert!(script.sent.concat() == bytes, "the bytes are sent in order, each once"));
}

#[test]
fn memory_is_kept_until_it_is_sent_and_acknowledged() {
    let (queue, _) = queue_of(2);
    let (mut bench, mut window) = (Bench::new(), window());
    assert!(bench.take(&queue, &mut window) >= 2);
    bench.poll().unwrap();
    let (_, first) = window.release(1).unwrap();
    assert!(bench.posted.acknowledged(0, first).is_none(), "the lane still sends the first message");
    bench.script(|script| script.sends.extend([Step::Done, Step::Done]));
    let pass = bench.poll().unwrap();
    assert_eq!(pass.delivered.len(), 1);
    let (_, second) = window.release(2).unwrap();
    assert!(bench.posted.acknowledged(1, second).is_some(), "the message is done and acknowledged");
}

#[test]
fn registrations_of_freed_memory_end_once_its_sends_are_done() {
    let memory = filled(&[1; 100]);
    let queue = queue_with(memory.clone(), Pieces::One(Piece { local: 0, remote: 0, len: 100 }));
    let mut bench = Bench::new();
    bench.take(&queue, &mut window());
    bench.poll().unwrap();
    memory.revoke();
    bench.posted.forget_revoked();
    bench.script(|script| assert_eq!(script.known.len(), 1, "the memory is still being sent"));
    bench.script(|script| script.sends.push_back(Step::Done));
    bench.poll().unwrap();
    bench.script(|script| assert!(script.known.is_empty()));
}

#[test]
fn scattered_payload_is_packed() {
    let memory = filled(&(0..200u8).collect::<Vec<u8>>());
    let pieces = [(10, 0, 5), (100, 50, 7), (107, 90, 3)];
    let pieces = pieces.map(|(local, remote, len)| Piece { local, remote, len });
    let queue = queue_with(memory, Pieces::Many(Arc::new(pieces)));
    let mut bench = Bench::new();
    bench.take(&queue, &mut window());
    bench.poll().unwrap();
    let expected: Vec<u8> = (10..15).chain(100..110).collect();
    bench.script(|script| assert_eq!(script.sent, [expected]));
}

#[test]
fn the_head_of_what_is_packed_waits_and_a_pack_that_fails_costs_its_frame_alone() {
    let memory = filled(&(0..200u8).collect::<Vec<u8>>());
    let pieces = [(10, 0, 5), (100, 50, 7)].map(|(local, remote, len)| Piece { local, remote, len });
    let queue = queue_with(memory.clone(), Pieces::Many(Arc::new(pieces)));
    assert!(queue.post(Hold::new(Op::new(
        no_owner(),
        2,
        Task::Write { region: 9 },
        Pieces::One(pieces[1]),
        Some(memory)
    ))));
    let (mut bench, mut window) = (Bench::new(), window());
    assert_eq!(bench.take(&queue, &mut window), 2);
    assert_eq!([0, 1].map(|frame| bench.posted.is_unpacked(frame)), [true, false]);
    let failure = Error::Internal("scripted".into());
    bench.script(|script| script.copies.extend([Poll::Pending, Poll::Ready(Err(failure.clone()))]));
    assert!(bench.poll().unwrap().given_up.is_empty());
    assert!(bench.posted.is_unpacked(0), "the message is being packed");
    let pass = bench.poll().unwrap();
    assert_eq!(pass.given_up, [(0, failure)]);
    bench.script(|script| {
        assert_eq!(script.sent, [(100..107).collect::<Vec<u8>>()], "the message behind it is sent")
    });
    bench.posted.confirm(1).unwrap();
    assert!(bench.posted.confirm(2).is_err(), "one message was begun");
}

#[test]
fn a_payload_that_cannot_be_unpacked_is_refused() {
    let memory = Memory::private(CHUNK).unwrap();
    let mut bench = Bench::new();
    bench.expect(frame(0, &[(8, 4), (100, 6)], &memory));
    bench.poll().unwrap();
    bench.script(|script| {
        script.receives.push_back(Step::Done);
        script.copies.push_back(Poll::Ready(Err(Error::Internal("scripted".into()))));
    });
    let pass = bench.poll().unwrap();
    assert_eq!(pass.arrived[0].refusal, Some(Refusal::Gpu));
    bench.script(|script| assert_eq!(script.consumed, 1));
}

#[test]
fn a_full_lane_is_asked_again() {
    let (queue, _) = queue_of(1);
    let mut bench = Bench::new();
    bench.take(&queue, &mut window());
    bench.script(|script| script.full = true);
    bench.poll().unwrap();
    bench.script(|script| script.full = false);
    bench.poll().unwrap();
    bench.script(|script| assert!(!script.sent.is_empty()));
}

#[test]
fn any_error_of_a_send_is_final() {
    for step in [Step::Closing("result 2".into()), Step::Failed("result 6".into())] {
        let (queue, _) = queue_of(1);
        let mut bench = Bench::new();
        bench.take(&queue, &mut window());
        bench.poll().unwrap();
        bench.script(|script| script.sends.push_back(step));
        let why = bench.poll().map(drop).unwrap_err();
        assert!(why.starts_with("the fake: cannot send message 0 (65536 bytes): result"), "{why}");
    }
}

#[test]
fn memory_that_cannot_be_read_fails_its_operation_and_ends_one_lane() {
    let (unread, read) = (filled(&[1; 100]), filled(&[2; 100]));
    let piece = Pieces::One(Piece { local: 0, remote: 0, len: 100 });
    let queue = queue_with(read, piece.clone());
    let op = Hold::new(Op::new(no_owner(), 2, Task::Write { region: 9 }, piece, Some(unread)));
    let shared = Arc::clone(&op);
    assert!(queue.post(op));
    let (mut bench, mut first) = (Bench::new(), window());
    assert_eq!(bench.take(&queue, &mut first), 2);
    bench.poll().unwrap();
    let why = Error::invalid("region", "scripted");
    // The second one fails while the first is tested.
    bench.script(|script| {
        let second = Ticket(script.posted_sends[1]);
        script.sends.push_back(Step::Unreadable(second, why.clone()));
    });
    let mut pass = LanePass::default();
    let reported = bench.posted.poll(bench.now, &mut pass).unwrap_err();
    assert!(reported.contains("scripted"), "{reported}");
    assert_eq!((&pass.unreadable, pass.stalled), (&Some((1, why.clone())), false));
    // Fail the entry as a channel does, and pass the fence after it.
    first.get_mut(1).unwrap().fail_unread(why.clone());
    assert!(queue.resend(first.drain().into_iter().map(|(_, entry)| entry).collect()).is_empty());
    let (mut bench, mut second) = (Bench::new(), window());
    bench.take(&queue, &mut second);
    bench.poll().unwrap();
    bench.script(|script| assert_eq!(script.sent, [vec![2; 100]], "only the other message is sent"));
    assert_eq!(shared.failure(), Some(why));
}

#[test]
fn receives_follow_the_headers_in_order() {
    let memory = Memory::private(64 * CHUNK).unwrap();
    let mut bench = Bench::new();
    bench.poll().unwrap();
    bench
        .script(|script| assert!(script.posted_receives.is_empty(), "a receive was posted without a header"));
    for number in 0..20 {
        bench.expect(frame(number, &[(number * 10, 10)], &memory));
    }
    bench.expect(whole(20));
    bench.poll().unwrap();
    assert_eq!(bench.posted.posted_count(), WINDOW as u32);
    bench.script(|script| script.receives.extend(vec![Step::Done; 5]));
    let pass = bench.poll().unwrap();
    assert_eq!(numbers(&pass), [0, 1, 2, 3, 4]);
    assert_eq!((pass.received_bytes, bench.posted.posted_count()), (50, 20));
    bench.script(|script| script.receives.extend(vec![Step::Done; 15]));
    let pass = bench.poll().unwrap();
    assert_eq!(numbers(&pass), (5..21).collect::<Vec<_>>(), "the frame behind them has waited");
    bench.script(|script| {
        assert_eq!(script.consumed, 20);
        assert_eq!(script.received_into, (0..20).map(|at| (at * 10, 10)).collect::<Vec<_>>());
    });
    assert!(!bench.posted.active());
}

#[test]
fn a_receive_is_consumed_after_its_gather() {
    let memory = Memory::private(CHUNK).unwrap();
    let mut bench = Bench::new();
    bench.script(|script| script.scatters = true);
    for number in 0..3 {
        bench.expect(frame(number, &[(number * 10, 10)], &memory));
    }
    bench.poll().unwrap();
    bench.script(|script| script.receives.extend(vec![Step::Done; 3]));
    assert!(numbers(&bench.poll().unwrap()).is_empty());
    bench.script(|script| {
        assert_eq!(script.gathers, [(0, false), (1, false), (2, false)], "all gathers are begun at once");
        script.gathers[1].1 = true;
    });
    assert!(numbers(&bench.poll().unwrap()).is_empty(), "a frame left before the frame in front of it");
    bench.script(|script| script.gathers[0].1 = true);
    assert_eq!(numbers(&bench.poll().unwrap()), [0, 1]);
    bench.script(|script| assert_eq!(script.consumed, 2));
}

#[test]
fn a_refused_message_is_received_and_thrown_away() {
    let memory = Memory::private(CHUNK).unwrap();
    let mut bench = Bench::new();
    let mut refused = frame(0, &[(0, 100)], &memory);
    (refused.refusal, refused.landing) = (Some(Refusal::NoRegion), None);
    refused.target.clear();
    bench.expect(refused);
    bench.poll().unwrap();
    bench.script(|script| {
        assert_eq!(script.received_into, [(0, 100)], "the message is received into a slot");
        script.receives.push_back(Step::Done);
    });
    let pass = bench.poll().unwrap();
    assert_eq!(pass.arrived[0].refusal, Some(Refusal::NoRegion));
}

#[test]
fn scattered_targets_go_through_a_slot() {
    let memory = Memory::private(CHUNK).unwrap();
    let mut bench = Bench::new();
    bench.expect(frame(0, &[(8, 4), (100, 6)], &memory));
    bench.poll().unwrap();
    bench.script(|script| {
        assert_eq!(script.received_into, [(0, 10)]);
        script.receives.push_back(Step::Done);
    });
    assert_eq!(numbers(&bench.poll().unwrap()), [0]);
}

#[test]
fn the_first_sign_of_a_closing_peer_is_absorbed_if_all_arrives() {
    let memory = Memory::private(CHUNK).unwrap();
    let mut bench = Bench::new();
    bench.expect(frame(0, &[(0, 10)], &memory));
    bench.poll().unwrap();
    bench.script(|script| script.receives.push_back(Step::Closing("result 2".into())));
    bench.poll().unwrap();
    bench.now += Duration::from_secs(1);
    bench.script(|script| script.receives.push_back(Step::Done));
    assert_eq!(numbers(&bench.poll().unwrap()), [0]);
    bench.advance(10 * limits::LANE_CLOSING_TIMEOUT).unwrap();
}

#[test]
fn messages_announced_before_a_close_have_time_to_arrive() {
    let memory = Memory::private(CHUNK).unwrap();
    let mut bench = Bench::new();
    bench.expect(frame(0, &[(0, 10)], &memory));
    bench.poll().unwrap();
    bench.script(|script| script.receives.push_back(Step::Closing("result 2".into())));
    bench.poll().unwrap();
    bench.expect(frame(1, &[(10, 10)], &memory));
    bench.poll().unwrap();
    assert_eq!(bench.posted.posted_count(), 2, "a receive is posted for each header that has arrived");
    bench.advance(limits::LANE_CLOSING_TIMEOUT / 2).unwrap();
    bench.script(|script| script.receives.push_back(Step::Done));
    bench.advance(limits::LANE_CLOSING_TIMEOUT).expect("a message has arrived meanwhile");
    let why = bench.advance(Duration::from_secs(1)).unwrap_err();
    assert!(
        why.contains("message 1 did not arrive within 2.0 s after the lane began to close: result 2"),
        "{why}"
    );
}

#[test]
fn a_second_result_2_is_final() {
    let memory = Memory::private(CHUNK).unwrap();
    let closing = || Step::Closing("result 2".into());
    for steps in [vec![closing(), closing()], vec![Step::Failed("result 2, and done".into())]] {
        let mut bench = Bench::new();
        bench.expect(frame(0, &[(0, 10)], &memory));
        bench.poll().unwrap();
        bench.script(|script| script.receives.extend(steps.clone()));
        let outcome = steps.iter().map(|_| bench.poll().map(drop)).collect::<Result<Vec<()>, String>>();
        assert!(outcome.unwrap_err().contains("cannot receive message 0"));
    }
}

#[test]
fn memory_that_is_taken_back_is_let_go_unless_it_may_be_written_to() {
    let (mine, other) = (Memory::private(CHUNK).unwrap(), Memory::private(CHUNK).unwrap());
    let mut bench = Bench::new();
    for number in 0..WINDOW as u64 {
        bench.expect(frame(number, &[(0, 10)], &other));
    }
    bench.expect(frame(16, &[(0, 10)], &mine));
    bench.poll().unwrap();
    let gone = |landing: &Landing| landing.is_in(&mine);
    assert_eq!(bench.posted.abandon(&gone), NOTHING, "no receive for it is posted yet");
    bench.script(|script| script.receives.extend(vec![Step::Done; WINDOW]));
    bench.poll().unwrap();
    bench.script(|script| assert_eq!(script.received_into[16], (0, 10), "the message is discarded"));

    bench.expect(frame(17, &[(0, 10)], &mine));
    bench.poll().unwrap();
    let posted = Touched { lane: true, gpu: None };
    assert_eq!(bench.posted.abandon(&gone), posted, "a receive for the memory is posted");
    bench.script(|script| script.receives.extend([Step::Done, Step::Done]));
    let pass = bench.poll().unwrap();
    let refusals: Vec<_> = pass.arrived.iter().map(|arrival| arrival.refusal).collect();
    assert_eq!(refusals, [Some(Refusal::NoRegion), Some(Refusal::NoRegion)]);
    drop(pass);
    assert_eq!(bench.posted.abandon(&gone), NOTHING);
}

/// Regression: a gather counted as a posted receive, and `deregister` lost the channel of a GPU that was busy for
/// more than a second.
#[test]
fn memory_that_is_taken_back_while_a_gather_is_pending_names_the_gpu() {
    let gpu = MemoryLocation::SimGpu(ALONE);
    let busy = Touched { lane: false, gpu: Some(gpu) };
    let on_gpu = || Memory::private_on(&Gpu::open(gpu).unwrap(), CHUNK).unwrap();
    let host = || Memory::private(CHUNK).unwrap();
    // Gathered from any pool into GPU memory, and from a pool in GPU memory into host memory.
    for (mine, pool) in [(on_gpu(), None), (host(), Some(gpu))] {
        let mut bench = Bench::with(Script { scatters: true, pool, ..Script::default() });
        bench.expect(frame(0, &[(0, 10)], &mine));
        bench.poll().unwrap();
        bench.script(|script| script.receives.push_back(Step::Done));
        bench.poll().unwrap();
        bench.script(|script| assert_eq!(script.gathers, [(0, false)]));
        let gone = |landing: &Landing| landing.is_in(&mine);
        assert_eq!(bench.posted.abandon(&gone), busy);
        bench.script(|script| script.gathers[0].1 = true);
        assert_eq!(numbers(&bench.poll().unwrap()), [0]);
        assert_eq!(bench.posted.abandon(&gone), NOTHING);
    }
}

/// Frames leave in order: one whose bytes have arrived waits for the GPU of the frame in front of it.
#[test]
fn memory_that_is_taken_back_behind_a_pending_gather_names_the_gpu() {
    let gpu = MemoryLocation::SimGpu(ALONE);
    let first = Memory::private_on(&Gpu::open(gpu).unwrap(), CHUNK).unwrap();
    let mine = Memory::private(CHUNK).unwrap();
    let mut bench = Bench::new();
    bench.script(|script| script.scatters = true);
    for (number, memory) in [(0, &first), (1, &mine)] {
        bench.expect(frame(number, &[(0, 10)], memory));
    }
    bench.poll().unwrap();
    bench.script(|script| script.receives.push_back(Step::Done));
    bench.poll().unwrap();
    bench.script(|script| script.scatters = false);
    let gone = |landing: &Landing| landing.is_in(&mine);
    let abandoned = bench.posted.abandon(&gone);
    assert_eq!(abandoned, Touched { lane: true, gpu: None }, "its own receive is posted");
    bench.script(|script| script.receives.push_back(Step::Done));
    bench.poll().unwrap();
    assert_eq!(bench.posted.abandon(&gone), Touched { lane: false, gpu: Some(gpu) });
}

#[test]
fn nothing_is_sent_before_the_peer_has_said_that_it_stands() {
    let mut bench = Bench::with(Script { alone: true, ..Script::default() });
    assert_eq!(bench.posted.room(), 0);
    bench.posted.confirm(0).unwrap();
    assert_eq!(bench.posted.room(), WINDOW);
}

#[test]
fn closing_says_what_is_in_flight() {
    let closed = |mut bench: Bench| {
        bench.posted.end();
        bench.script(|script| script.closed)
    };
    assert_eq!(closed(Bench::new()), Some(InFlight::NOTHING));
    let (queue, _) = queue_of(1);
    let mut sends = Bench::new();
    sends.take(&queue, &mut window());
    sends.poll().unwrap();
    assert_eq!(closed(sends), Some(InFlight { sends: true, receives: false }));
    let mut receives = Bench::new();
    receives.expect(frame(0, &[(0, 10)], &Memory::private(10).unwrap()));
    receives.poll().unwrap();
    assert_eq!(closed(receives), Some(InFlight { sends: false, receives: true }));
}

/// A peer with a stalled GPU is silent for as long as the stall. Afterwards the kernel's retransmissions are
/// far apart.
#[test]
fn a_silent_lane_is_no_dead_path_while_the_peer_reports_that_it_holds_payload() {
    const SECOND: Duration = Duration::from_secs(1);
    let mut bench = Bench::new();
    assert_eq!(bench.posted.path_trouble(SECOND), None, "no trouble");
    bench.script.lock().unwrap().silent = true;
    assert_eq!(bench.posted.path_trouble(SECOND), Some("the fake: silent".into()));
    for second in 10..=20 {
        bench.posted.peer_holds_payload();
        assert_eq!(bench.posted.path_trouble(second * SECOND), None);
    }
    // Ten seconds of reports, and twice the time in which a path is found dead.
    let excused = 30 * SECOND + 2 * limits::PATH_DEAD_AFTER;
    assert_eq!(bench.posted.path_trouble(excused), None);
    assert_eq!(bench.posted.path_trouble(excused + SECOND), Some("the fake: silent".into()));
    // A report long after the last one starts a new period.
    bench.posted.peer_holds_payload();
    assert_eq!(bench.posted.path_trouble(60 * SECOND), None);
    assert!(bench.posted.path_trouble(63 * SECOND).is_some());
}
