//! Frames of one channel that wait for their payload, or behind one that does.
//!
//! A frame's states: `waiting -> posted -> done -> gathered -> unpacked -> given back`. A frame without a
//! payload on the lane only waits for earlier ones. Frames leave in the order of their headers. A payload
//! that cannot be placed is refused, and the lane continues.
//!
//! Invariant: receives are posted in the order of headers, only for received headers, and at most a window at
//! a time. A finished receive counts until it is returned to the lane.

use super::slots::{Slot, Slots};
use super::{LanePass, Touched, seconds};
use crate::core::peer::Landing;
use crate::core::trace::ChunkStart;
use crate::error::Error;
use crate::payload::lane::{InFlight, Lane, Post, Run, Step, Ticket, Ungathered, Way};
use ferrywire_memory::cuda::CudaError;
use ferrywire_memory::{Memory, MemoryLocation};
use ferrywire_proto::limits;
use ferrywire_proto::wire::{Header, Refusal};
use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

/// Bytes after which a pass takes no further message: the CPU may have to copy each, and the worker has other
/// lanes, and requests to release memory.
const BYTES_PER_PASS: u64 = 1 << 20;
/// Time without progress after which the lane is asked whether this end holds payload, which takes a lock that the lanes of a
/// NIC share.
const HELD_ASKED_APART: Duration = Duration::from_secs(1);

/// A frame whose bytes in the stream have all arrived.
pub(crate) struct Arrival {
    pub header: Header,
    pub placements: Vec<u8>,
    pub landing: Option<Landing>,
    pub message: Vec<u8>,
    pub refusal: Option<Refusal>,
    /// Target of the payload, in order. Empty if the frame is refused.
    pub target: Vec<Run>,
    /// When the frame's header arrived, for a trace.
    pub chunk: Option<ChunkStart>,
}

struct Frame {
    arrival: Arrival,
    state: State,
    /// Whether the memory was released while the lane had a receive for it.
    abandoned: bool,
}

enum State {
    /// The frame is complete.
    Whole,
    Waiting,
    Posted(Receive),
    /// The receive is complete, and its fragments are being gathered.
    Gathering(Receive),
    /// The payload is in its target, or in a slot to be unpacked.
    Done(Receive),
}

/// A posted receive.
struct Receive {
    ticket: Ticket,
    number: u64,
    run: Run,
    slot: Option<Slot>,
}

pub(super) struct Receiving {
    window: usize,
    stall_timeout: Duration,
    frames: VecDeque<Frame>,
    /// Number of frames that were considered for posting, and number of those whose payload is complete.
    seen: usize,
    tested: usize,
    /// Requests posted and not returned: the number now, and the maximum so far.
    outstanding: usize,
    most: usize,
    posted: u64,
    finished: u64,
    moved_at: Duration,
    posted_at: Duration,
    refused_since: Option<Duration>,
    /// Since when the peer seems to be closing, and the sign of that.
    closing: Option<(Duration, String)>,
    closing_results: u64,
    /// Whether a frame whose memory was released has left, so that the lane may undo its registration.
    released: bool,
    slots: Slots,
}

impl Receiving {
    pub fn new(lane: &dyn Lane, stall_timeout: Duration) -> Receiving {
        Receiving {
            window: lane.window(),
            stall_timeout,
            frames: VecDeque::new(),
            seen: 0,
            tested: 0,
            outstanding: 0,
            most: 0,
            posted: 0,
            finished: 0,
            moved_at: Duration::ZERO,
            posted_at: Duration::ZERO,
            refused_since: None,
            closing: None,
            closing_results: 0,
            released: false,
            slots: Slots::new(lane, Way::Unpack),
        }
    }

    pub fn active(&self) -> bool {
        !self.frames.is_empty()
    }

    pub fn in_flight(&self) -> bool {
        self.outstanding > 0
    }

    /// The window, and how much of it receives use.
    pub fn occupancy(&self) -> (usize, usize) {
        (self.window, self.outstanding)
    }

    /// Bytes that posted receives wait for.
    pub fn bytes_in_flight(&self) -> usize {
        let posted = self.frames.iter().filter(|frame| matches!(frame.state, State::Posted(_)));
        posted.map(|frame| frame.arrival.header.len as usize).sum()
    }

    pub fn waiting(&self) -> usize {
        self.frames.len()
    }

    pub fn most(&self) -> usize {
        self.most
    }

    pub fn posted_count(&self) -> u64 {
        self.posted
    }

    pub fn closing_results(&self) -> u64 {
        self.closing_results
    }

    pub fn expect(&mut self, arrival: Arrival) {
        let state = if arrival.header.is_posted() { State::Waiting } else { State::Whole };
        self.frames.push_back(Frame { arrival, state, abandoned: false });
    }

    /// Whether registrations may have become unused since the last call.
    pub fn has_released(&mut self) -> bool {
        std::mem::take(&mut self.released)
    }

    pub fn uses(&self, memory: &Arc<Memory>) -> bool {
        self.frames.iter().any(|frame| {
            let posted = match &frame.state {
                State::Posted(receive) | State::Gathering(receive) | State::Done(receive) => {
                    Some(&receive.run)
                }
                State::Whole | State::Waiting => None,
            };
            posted.into_iter().chain(&frame.arrival.target).any(|run| Arc::ptr_eq(&run.memory, memory))
        })
    }

    /// Makes one pass. `sends` is whether the lane has sends in flight.
    pub fn poll(
        &mut self,
        lane: &mut dyn Lane,
        sends: bool,
        now: Duration,
        pass: &mut LanePass,
    ) -> Result<(), String> {
        self.test(lane, now, pass)?;
        self.finish(lane, sends, pass)?;
        self.post(lane, now, pass)?;
        self.check_closing(now)
    }

    /// Tests the oldest request, and later ones while they are done, up to `BYTES_PER_PASS`.
    fn test(&mut self, lane: &mut dyn Lane, now: Duration, pass: &mut LanePass) -> Result<(), String> {
        while self.tested < self.seen && pass.received_bytes < BYTES_PER_PASS {
            let frame = &mut self.frames[self.tested];
            let State::Posted(receive) = &frame.state else {
                self.tested += 1;
                continue;
            };
            match lane.test_recv(receive.ticket) {
                Step::Done => {}
                // The peer cannot send into a full pool, which this end's GPU has to empty.
                Step::Pending
                    if now.saturating_sub(self.moved_at) >= HELD_ASKED_APART && lane.holds_payload() =>
                {
                    self.moved_at = now;
                    return Ok(());
                }
                Step::Pending if now.saturating_sub(self.moved_at) > self.stall_timeout => {
                    let bytes = frame.arrival.header.len;
                    pass.stalled = true;
                    return Err(format!(
                        "message {} ({bytes} bytes) has not arrived after {}: its last test gave result 0, not done",
                        receive.number,
                        seconds(self.stall_timeout)
                    ));
                }
                Step::Pending => return Ok(()),
                Step::Closing(why) => {
                    let number = receive.number;
                    self.closing_results += 1;
                    return match self.closing_results {
                        1 => {
                            self.closing(now, why);
                            Ok(())
                        }
                        _ => Err(format!(
                            "cannot receive message {number}: the lane reported twice that it is closing: {why}"
                        )),
                    };
                }
                Step::Failed(why) => return Err(format!("cannot receive message {}: {why}", receive.number)),
                Step::Unreadable(_, why) => {
                    return Err(format!("cannot receive message {}: {why}", receive.number));
                }
            }
            let State::Posted(receive) = std::mem::replace(&mut frame.state, State::Whole) else { continue };
            pass.worked = true;
            pass.received_bytes += receive.run.bytes as u64;
            // A refused payload is not gathered, and its request is returned.
            if frame.arrival.refusal.is_none() && lane.scatters(&receive.run.memory) {
                frame.state = match lane.gather(receive.number, &receive.run) {
                    Ok(()) => State::Gathering(receive),
                    Err(Ungathered::Target(error)) => {
                        frame.arrival.refuse(&error);
                        State::Done(receive)
                    }
                    Err(Ungathered::Failed(why)) => return Err(why),
                };
            } else {
                frame.state = State::Done(receive);
            }
            self.tested += 1;
            self.moved_at = now;
        }
        Ok(())
    }

    /// Places the payload of the oldest finished requests, returns the requests, and passes complete frames
    /// on.
    fn finish(&mut self, lane: &mut dyn Lane, sends: bool, pass: &mut LanePass) -> Result<(), String> {
        while self.tested > 0 {
            match self.frames[0].take(lane) {
                Poll::Pending => return Ok(()),
                Poll::Ready(Ok(())) => {}
                // The payload would fail over another lane too. Closing this lane ends what the GPU still
                // does with its memory.
                Poll::Ready(Err(why)) => {
                    lane.close(InFlight { sends, receives: true });
                    pass.arrived.extend(self.frames.pop_front().map(|frame| frame.arrival));
                    return Err(why);
                }
            }
            let Some(frame) = self.frames.pop_front() else { return Ok(()) };
            (self.seen, self.tested) = (self.seen - 1, self.tested - 1);
            if let State::Done(receive) = frame.state {
                lane.consumed(receive.ticket)?;
                receive.slot.into_iter().for_each(|slot| self.slots.give_back(slot));
                self.outstanding -= 1;
                self.finished += 1;
            }
            self.released |= frame.abandoned;
            pass.worked = true;
            pass.arrived.push(frame.arrival);
        }
        Ok(())
    }

    /// Posts receives for the next headers, while the window has room. Receives are posted even while the
    /// peer closes: a message whose header has arrived was sent.
    fn post(&mut self, lane: &mut dyn Lane, now: Duration, pass: &mut LanePass) -> Result<(), String> {
        while self.seen < self.frames.len() {
            let frame = &mut self.frames[self.seen];
            if matches!(frame.state, State::Waiting) {
                if self.outstanding >= self.window {
                    return Ok(());
                }
                let (slot, run) = frame.arrival.room(lane, &mut self.slots)?;
                match lane.irecv(&run) {
                    Post::Posted(ticket) => {
                        frame.state = State::Posted(Receive { ticket, number: self.posted, run, slot });
                    }
                    refused => {
                        slot.into_iter().for_each(|slot| self.slots.give_back(slot));
                        return self.refused(refused, now);
                    }
                }
                // The earlier requests may all have arrived, and may wait for a GPU for any time.
                let before = self.frames.range(self.tested..self.seen);
                if !before.into_iter().any(|frame| matches!(frame.state, State::Posted(_))) {
                    self.moved_at = now;
                }
                self.refused_since = None;
                self.posted_at = now;
                self.posted += 1;
                self.outstanding += 1;
                self.most = self.most.max(self.outstanding);
                pass.worked = true;
            }
            self.seen += 1;
        }
        Ok(())
    }

    fn refused(&mut self, post: Post, now: Duration) -> Result<(), String> {
        let how = match post {
            Post::Failed(why) => {
                return Err(format!("cannot post the receive of message {}: {why}", self.posted));
            }
            Post::Full(how) => how,
            Post::Posted(_) => return Ok(()),
        };
        let since = *self.refused_since.get_or_insert(now);
        if self.outstanding > 0 {
            self.refused_since = None;
        } else if now.saturating_sub(since) > self.stall_timeout {
            let waited = seconds(self.stall_timeout);
            return Err(format!(
                "irecv has accepted no receive for {waited} ({how}), although no receive is posted"
            ));
        }
        Ok(())
    }

    /// Notes that the peer is closing or gone. Announced messages have some time to arrive.
    pub fn closing(&mut self, now: Duration, why: String) {
        self.closing.get_or_insert((now, why));
    }

    fn check_closing(&mut self, now: Duration) -> Result<(), String> {
        let Some((since, why)) = &self.closing else { return Ok(()) };
        // The peer cannot send messages for which this end's window has no room.
        let has_room = self.outstanding < self.window;
        let missing = self.frames.iter().any(|frame| match frame.state {
            State::Posted(_) => true,
            State::Waiting => has_room,
            _ => false,
        });
        let quiet_since = self.moved_at.max(self.posted_at).max(*since);
        if missing && now.saturating_sub(quiet_since) > limits::LANE_CLOSING_TIMEOUT {
            Err(format!(
                "message {} did not arrive within {} after the lane began to close: {why}",
                self.finished,
                seconds(limits::LANE_CLOSING_TIMEOUT)
            ))
        } else {
            Ok(())
        }
    }

    /// Stops placing bytes into memory for which `gone` is true. Returns what may still write there.
    pub fn abandon(&mut self, lane: &dyn Lane, gone: &dyn Fn(&Landing) -> bool) -> Touched {
        let mut touched = Touched::default();
        // Frames leave in order, so a frame also waits for the GPUs of the frames before it.
        let mut waits_for = None;
        for frame in &mut self.frames {
            let gpu = frame.gpu(lane).or(waits_for);
            waits_for = waits_for.or(gpu);
            if frame.arrival.landing.as_ref().is_some_and(gone) && frame.abandon(lane) {
                match gpu.filter(|_| !matches!(frame.state, State::Posted(_))) {
                    Some(gpu) => touched.gpu = touched.gpu.or(Some(gpu)),
                    None => touched.lane = true,
                }
            }
        }
        touched
    }

    pub fn state(&self) -> String {
        let closing = self.closing.as_ref().map(|(_, why)| format!(", closing: {why}")).unwrap_or_default();
        format!(
            "receiving: {} of {} posted, {} frames wait, {} are finished{closing}",
            self.outstanding,
            self.window,
            self.frames.len(),
            self.finished
        )
    }

    /// Drops all frames: the lane is closed.
    pub fn clear(&mut self) {
        self.frames.clear();
    }
}

impl Arrival {
    /// The memory to receive the message into: its target, or a slot.
    fn room(&self, lane: &mut dyn Lane, slots: &mut Slots) -> Result<(Option<Slot>, Run), String> {
        match &self.target[..] {
            [run] if lane.takes(Way::Unpack, run) => Ok((None, run.clone())),
            target => {
                let like = target.first().map(|run| run.memory.clone());
                let (slot, run) = slots.take(lane, like.as_deref(), self.header.len as usize)?;
                Ok((Some(slot), run))
            }
        }
    }

    /// Refuses the frame: its payload cannot be placed.
    fn refuse(&mut self, error: &Error) {
        tracing::warn!(%error, "cannot place the payload of a frame: the frame is refused");
        self.landing.iter().for_each(|landing| landing.fail(error));
        self.refusal = Some(Refusal::Gpu);
    }
}

impl Frame {
    /// Moves received bytes to their target. Ready when the request can be returned.
    ///
    /// # Errors
    /// Why the lane has failed; the frame is refused.
    fn take(&mut self, lane: &mut dyn Lane) -> Poll<Result<(), String>> {
        if let State::Gathering(receive) = &self.state {
            match lane.gathered(receive.number) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => {
                    self.arrival.refuse(&error);
                    // Freed memory is not touched, so the lane can continue.
                    if !matches!(error, Error::Cuda(CudaError::Freed { .. })) {
                        return Poll::Ready(Err(error.to_string()));
                    }
                }
                Poll::Pending => return Poll::Pending,
            }
            if let State::Gathering(receive) = std::mem::replace(&mut self.state, State::Whole) {
                self.state = State::Done(receive);
            }
        }
        match &self.state {
            State::Done(receive) if receive.slot.is_some() && self.arrival.refusal.is_none() => {
                match lane.copy(Way::Unpack, &receive.run, &self.arrival.target) {
                    Poll::Ready(Ok(())) => {}
                    Poll::Ready(Err(error)) => self.arrival.refuse(&error),
                    Poll::Pending => return Poll::Pending,
                }
                Poll::Ready(Ok(()))
            }
            State::Done(_) | State::Whole => Poll::Ready(Ok(())),
            _ => Poll::Pending,
        }
    }

    /// The GPU that gathers the frame's payload, or unpacks it from a slot.
    fn gpu(&self, lane: &dyn Lane) -> Option<MemoryLocation> {
        let (receive, gathers_on) = match &self.state {
            State::Gathering(receive) => (receive, lane.gathers_on()),
            State::Done(receive) if receive.slot.is_some() && self.arrival.refusal.is_none() => {
                (receive, None)
            }
            _ => return None,
        };
        let runs = std::iter::once(&receive.run).chain(&self.arrival.target);
        let mut locations = runs.map(|run| run.memory.location()).chain(gathers_on);
        locations.find(|location| *location != MemoryLocation::Host)
    }

    /// Releases the frame's memory. Returns true while the lane or a copy may still write there.
    fn abandon(&mut self, lane: &dyn Lane) -> bool {
        let direct = |receive: &Receive| receive.slot.is_none() && !lane.scatters(&receive.run.memory);
        let touched = match &self.state {
            State::Whole | State::Waiting => false,
            State::Posted(receive) => direct(receive),
            // A copy is in progress, or about to start.
            State::Gathering(_) | State::Done(_) => true,
        };
        if touched {
            if matches!(self.state, State::Posted(_)) {
                // Refuse the frame when it arrives; keep it until then.
                self.arrival.refusal = Some(Refusal::NoRegion);
            }
        } else if matches!(self.state, State::Whole) {
            // As in `staging/receiving.rs`: no acknowledgement may say that a closed receive has these bytes.
            if matches!(&self.arrival.landing, Some(Landing::Sink { sink, .. }) if sink.closed()) {
                self.arrival.refusal.get_or_insert(Refusal::NoSink);
            }
            self.arrival.landing = None;
        } else {
            self.abandoned = true;
            self.arrival.refusal = Some(Refusal::NoRegion);
            self.arrival.landing = None;
            self.arrival.target.clear();
        }
        touched
    }
}
