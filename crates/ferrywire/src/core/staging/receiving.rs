//! Received payload for GPU memory: from the stream into a ring, and from there to the GPU.
//!
//! A payload is received in *parts*, each by one socket call. A part's states: `open -> whole -> copying ->
//! placed`; then its bytes of the ring are free. A frame counts as placed when its last part is, and later
//! frames wait for it: an acknowledgement is a count.
//!
//! Invariant: the target memory of a copy in flight is kept alive here.
//! Read next: `pipeline.rs`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::copier::{Run, Way};
use super::pipeline::{Pipeline, Unfinished};
use super::stopwatch::Stopwatch;
use crate::core::peer::Landing;
use crate::core::posted::Arrival;
use crate::core::trace::{Direction, Stage, Track};
use crate::error::Result;
use ferrywire_memory::{Memory, MemoryLocation};
use ferrywire_net::IoVec;
use ferrywire_proto::limits;
use ferrywire_proto::wire::Refusal;

/// A ring with the parts in it.
struct Lane {
    line: Pipeline,
    /// The mark behind each part, oldest first; `None` for an open part.
    parts: VecDeque<Option<u64>>,
}

impl Lane {
    /// Frees the oldest parts whose copies are done.
    fn free(&mut self) {
        while self.parts.front().is_some_and(|mark| mark.is_some_and(|mark| self.line.done(mark))) {
            self.parts.pop_front();
            self.line.ring.give_back();
        }
    }
}

/// A complete frame that waits for its copies, or for an earlier frame.
struct Frame {
    arrival: Arrival,
    copy: Option<Copy>,
}

/// The last mark of a frame in a lane, and its first.
#[derive(Clone, Copy)]
struct Copy {
    lane: usize,
    first: u64,
    mark: u64,
}

/// The frame that is being received.
struct Current {
    lane: usize,
    /// Runs of GPU memory for the rest of its payload.
    targets: VecDeque<IoVec>,
    /// Bytes of the payload that have no part yet.
    rest: usize,
    /// The part that is being filled.
    open: Option<IoVec>,
    /// The marks behind the complete parts.
    copy: Option<Copy>,
}

/// Payload that a channel receives into GPU memory.
#[derive(Default)]
pub(crate) struct Receiving {
    lanes: Vec<Lane>,
    current: Option<Current>,
    frames: VecDeque<Frame>,
    /// Landings of frames that were broken off while being copied.
    lingering: Vec<(Landing, Copy)>,
    /// The copies of the current frame, if it was broken off: the refused frame waits for them.
    broken: Option<Copy>,
    staged_bytes: u64,
    /// Time during which a payload waited for room.
    stalled: Stopwatch,
}

// SAFETY: the addresses in `current` are of GPU memory that the frame's landing keeps, and of the ring.
unsafe impl Send for Receiving {}

impl Receiving {
    /// The receiving half of a channel that traces name `track`.
    pub fn new(track: Track) -> Receiving {
        Receiving {
            stalled: Stopwatch::new(track.row(Stage::Waiting(Direction::Rx))),
            ..Receiving::default()
        }
    }

    /// Starts a frame's payload for these runs of GPU memory, which are taken. They are in `memory`.
    ///
    /// # Errors
    /// The GPU is not open, or the driver's error.
    pub fn begin(
        &mut self,
        location: MemoryLocation,
        memory: Option<&Arc<Memory>>,
        targets: &mut Vec<IoVec>,
    ) -> Result<()> {
        let lane = self.lanes.iter().position(|lane| lane.line.location == location).unwrap_or_else(|| {
            let row = self.stalled.row().of_copies(Stage::H2d, self.lanes.len());
            self.lanes.push(Lane { line: Pipeline::new(location, Way::In, row), parts: VecDeque::new() });
            self.lanes.len() - 1
        });
        self.lanes[lane].line.prepare()?;
        memory.into_iter().for_each(|memory| self.lanes[lane].line.wait_for_late_copies(memory));
        let rest = targets.iter().map(|target| target.len).sum();
        let targets = targets.drain(..).collect();
        self.current = Some(Current { lane, targets, rest, open: None, copy: None });
        Ok(())
    }

    /// Room for the next part, and whether it is the last one; `None` while the ring is full.
    pub fn open_part(&mut self) -> Option<(IoVec, bool)> {
        let current = self.current.as_mut()?;
        let lane = &mut self.lanes[current.lane];
        let bytes = current.rest.min(limits::STAGING_PART_BYTES).min(lane.line.ring.bound() / 4);
        let taken = lane.line.ring.take(bytes);
        self.stalled.set(taken.is_none());
        let offset = taken?;
        lane.parts.push_back(None);
        let part = IoVec::new((lane.line.base() + offset) as *mut u8, bytes);
        current.rest -= bytes;
        current.open = Some(part);
        Some((part, current.rest == 0))
    }

    /// Ends the open part, which is copied with the next batch. Returns true if the frame has more.
    pub fn close_part(&mut self) -> bool {
        let Some(current) = &mut self.current else { return false };
        let Some(part) = current.open.take() else { return current.rest > 0 };
        let Lane { line, parts } = &mut self.lanes[current.lane];
        line.make_room(1);
        let (lane, first) = (current.lane, line.next_mark());
        self.staged_bytes += part.len as u64;
        let (mut host, mut left) = (part.base as usize, part.len);
        while let Some(target) = current.targets.front_mut().filter(|_| left > 0) {
            let bytes = target.len.min(left);
            line.make_room(1);
            // SAFETY: the frame's landing keeps the memory, here until the mark is reached; the part is not
            // reused until then.
            unsafe { line.add(Run { host, device: target.base as u64, bytes }) };
            (host, left) = (host + bytes, left - bytes);
            // This is an address of the GPU: the CPU does not access it.
            *target = IoVec::new(target.base.wrapping_add(bytes), target.len - bytes);
            if target.len == 0 {
                current.targets.pop_front();
            }
        }
        let mark = line.next_mark();
        line.end_part();
        if let Some(last) = parts.back_mut() {
            *last = Some(mark);
        }
        current.copy = Some(Copy { lane, first: current.copy.map_or(first, |copy| copy.first), mark });
        current.rest > 0
    }

    /// Whether any payload was ever staged.
    pub fn begun(&self) -> bool {
        !self.lanes.is_empty()
    }

    /// Bytes of complete parts whose copies have not started.
    pub fn gathered_bytes(&self) -> usize {
        self.lanes.iter().map(|lane| lane.line.batch_bytes()).sum()
    }

    /// Starts the copies of all complete parts.
    pub fn flush(&mut self) {
        self.lanes.iter_mut().for_each(|lane| lane.line.flush());
    }

    /// Queues a frame whose bytes in the stream have all arrived. It waits for its copies, or behind a frame
    /// that does.
    pub fn expect(&mut self, arrival: Arrival) {
        let copy = self.current.take().and_then(|current| current.copy);
        let copy = copy.or(self.broken.take());
        self.frames.push_back(Frame { arrival, copy });
    }

    /// Discards the rest of the current frame's payload. Its landing is kept while parts are copied.
    pub fn break_off(&mut self, landing: Option<Landing>) {
        let Some(current) = self.current.take() else { return };
        self.stalled.set(false);
        let parts = &mut self.lanes[current.lane].parts;
        if let Some(last) = parts.back_mut().filter(|_| current.open.is_some()) {
            *last = Some(0);
        }
        // Copy the complete parts while the landing is kept, and not later.
        self.lanes[current.lane].line.flush();
        // Without copies in flight, no later poll would free them.
        self.lanes[current.lane].free();
        let line = &self.lanes[current.lane].line;
        self.broken = current.copy;
        if let Some(landing) = landing.filter(|_| line.copying()) {
            let mark = line.next_mark() - 1;
            self.lingering.push((landing, Copy { lane: current.lane, first: mark, mark }));
        }
    }

    /// Whether the frame that is being received was broken off while parts of it were copied.
    pub fn is_broken(&self) -> bool {
        self.broken.is_some()
    }

    /// Number of frames that wait for copies, their own or an earlier frame's.
    pub fn waiting(&self) -> usize {
        self.frames.len()
    }

    /// Whether frames wait or copies are in flight, so that a thread has to poll.
    pub fn active(&self) -> bool {
        !self.frames.is_empty() || self.copying() || self.gathered_bytes() > 0
    }

    /// Whether copies are in flight.
    pub fn copying(&self) -> bool {
        self.lanes.iter().any(|lane| lane.line.copying())
    }

    /// Checks the progress of the copies. Returns true if those of the frame that is being received have
    /// failed: break the frame off before [`Receiving::free`].
    pub fn poll(&mut self) -> bool {
        let mut failed = false;
        for at in 0..self.lanes.len() {
            if self.lanes[at].line.poll() {
                failed |= self.fail(at);
            }
        }
        failed
    }

    /// Frees the parts whose copies are done, and forgets failures, which were reported.
    pub fn free(&mut self) {
        for lane in &mut self.lanes {
            lane.line.settle();
            lane.free();
        }
        let lanes = &self.lanes;
        self.lingering.retain(|(_, copy)| !lanes[copy.lane].line.done(copy.mark));
    }

    /// Refuses frames with a lost copy in this lane. Returns true if the frame that is being received is one
    /// of them. A frame without any copy yet continues.
    fn fail(&mut self, at: usize) -> bool {
        let line = &self.lanes[at].line;
        let lost = |copy: Option<Copy>| {
            copy.filter(|copy| copy.lane == at).and_then(|copy| line.lost(copy.first..=copy.mark))
        };
        for frame in &mut self.frames {
            let Some(failure) = lost(frame.copy) else { continue };
            frame.arrival.refusal.get_or_insert(Refusal::Gpu);
            if let Some(landing) = &frame.arrival.landing {
                landing.fail(failure);
            }
        }
        lost(self.current.as_ref().and_then(|current| current.copy)).is_some()
    }

    /// Fails the landing of the current frame with the error of its copies.
    pub fn blame(&self, landing: &Landing) {
        let Some(current) = &self.current else { return };
        let line = &self.lanes[current.lane].line;
        let lost = current.copy.and_then(|copy| line.lost(copy.first..=copy.mark));
        if let Some(failure) = lost.or(line.failure()) {
            landing.fail(failure);
        }
    }

    /// Takes the next frame, if its copies are done.
    pub fn next(&mut self) -> Option<Arrival> {
        if is_copied(&self.lanes, self.frames.front()?.copy) {
            self.frames.pop_front().map(|frame| frame.arrival)
        } else {
            None
        }
    }

    /// Stops placing bytes into memory for which `gone` is true. Returns a GPU that may still copy there;
    /// poll until `None`.
    pub fn abandon(&mut self, gone: &dyn Fn(&Landing) -> bool) -> Option<MemoryLocation> {
        let lingers = self.lingering.iter().find(|(landing, _)| gone(landing));
        let mut touched = lingers.map(|(_, copy)| copy.lane);
        for frame in &mut self.frames {
            let Some(landing) = frame.arrival.landing.as_ref().filter(|landing| gone(landing)) else {
                continue;
            };
            match (frame.copy.filter(|copy| !is_copied(&self.lanes, Some(*copy))), landing) {
                // The frame's copies are in flight, and it is placed in order soon.
                (Some(copy), _) => touched = Some(copy.lane),
                // The bytes are placed, and the operation waits for the frame to be counted.
                (None, Landing::Sink { sink, .. }) if !sink.closed() => {}
                (None, Landing::Sink { sink }) => {
                    // The operation does not have these bytes.
                    match sink.take_out(&frame.arrival.header, 0) {
                        Some((header, message)) => {
                            (frame.arrival.header, frame.arrival.message) = (header, message);
                        }
                        // Whose memory is gone is found out when the frame is counted.
                        None if sink.has_begun() => continue,
                        None => _ = frame.arrival.refusal.get_or_insert(Refusal::NoSink),
                    }
                    frame.arrival.landing = None;
                }
                // The bytes of this write were placed before the region was released.
                (None, Landing::Region { .. }) => frame.arrival.landing = None,
            }
        }
        touched.map(|lane| self.lanes[lane].line.location)
    }

    /// Bytes staged so far.
    pub fn staged_bytes(&self) -> u64 {
        self.staged_bytes
    }

    /// Time during which copies were in flight.
    pub fn copying_time(&self) -> Duration {
        self.lanes.iter().map(|lane| lane.line.busy()).sum()
    }

    /// Time during which payloads waited for room.
    pub fn full_time(&self) -> Duration {
        self.stalled.total()
    }

    /// Number of driver calls.
    pub fn driver_calls(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.line.calls()).sum()
    }

    /// Bytes of pinned memory in use.
    pub fn pinned_bytes(&self) -> usize {
        self.lanes.iter().map(|lane| lane.line.pinned_bytes()).sum()
    }

    /// Lets payload use only the first `bytes` bytes of each ring from now on.
    pub fn keep_rings_within(&mut self, bytes: usize) {
        self.lanes.iter_mut().for_each(|lane| lane.line.ring.keep_within(bytes));
    }

    /// Bytes of the rings that may be used or still are, and those that are.
    pub fn ring_bytes(&self) -> (usize, usize) {
        let rings = self.lanes.iter().map(|lane| &lane.line.ring);
        rings.fold((0, 0), |(all, used), ring| (all + ring.bound().max(ring.used()), used + ring.used()))
    }

    /// Ends all copying, as far as the GPUs finish it. Waiting frames are not placed. Returns the copies that
    /// did not end, and the landings that they may write to, except that of the current frame.
    pub fn end(&mut self) -> (Vec<Unfinished>, Vec<Landing>) {
        let unfinished = self.lanes.iter_mut().filter_map(|lane| lane.line.end()).collect();
        let waiting = self.frames.drain(..).filter_map(|frame| frame.arrival.landing);
        let landings = waiting.chain(self.lingering.drain(..).map(|(landing, _)| landing)).collect();
        (self.current, self.broken) = (None, None);
        self.stalled.set(false);
        (unfinished, landings)
    }
}

/// Whether a frame has no copies, or all of them are done.
fn is_copied(lanes: &[Lane], copy: Option<Copy>) -> bool {
    copy.is_none_or(|copy| lanes[copy.lane].line.done(copy.mark))
}

#[cfg(test)]
mod tests {
    use super::super::copier::Copier;
    use super::super::{ALONE, Staging, alone};
    use super::*;
    use crate::error::Error;
    use ferrywire_memory::Gpu;
    use ferrywire_memory::sim::{SimFaults, SimGpu};
    use ferrywire_proto::wire::{Header, Kind};
    use std::sync::atomic::{AtomicBool, Ordering};

    const GPU: u32 = 1;

    /// A frame for a region with this key.
    fn frame(key: u64, memory: &Arc<Memory>) -> Arrival {
        let mut header = Header::new(Kind::Data);
        header.key = key;
        let landing = Some(Landing::Region { key, memory: memory.clone() });
        let (placements, message, target) = Default::default();
        Arrival { header, placements, landing, message, refusal: None, target, chunk: None }
    }

    /// Receives a frame of one part, without starting its copy.
    fn receive(receiving: &mut Receiving, key: u64, memory: &Arc<Memory>) {
        receive_bytes(receiving, key, memory, 0);
    }

    /// As [`receive`], with bytes of this value.
    fn receive_bytes(receiving: &mut Receiving, key: u64, memory: &Arc<Memory>, value: u8) {
        let target = IoVec::new(memory.span(0, memory.len()).unwrap(), memory.len() as usize);
        receiving.begin(memory.location(), Some(memory), &mut vec![target]).unwrap();
        let (part, _) = receiving.open_part().expect("the ring has room");
        // SAFETY: the part is free bytes of the ring.
        unsafe { std::ptr::write_bytes(part.base, value, part.len) };
        assert!(!receiving.close_part());
        receiving.expect(frame(key, memory));
    }

    fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
        let start = std::time::Instant::now();
        loop {
            if let Some(seen) = look() {
                return seen;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "{what}");
            std::thread::yield_now();
        }
    }

    fn memory_of(gpu: &Arc<SimGpu>) -> Arc<Memory> {
        Memory::private_on(&Gpu::Sim(gpu.clone()), 4096).unwrap()
    }

    /// Regression: a frame was refused because of another frame's failed copy.
    #[test]
    fn a_frame_of_which_nothing_was_copied_yet_goes_on_when_the_copy_of_another_fails() {
        let (_alone, gpu) = (alone(), SimGpu::open(ALONE).unwrap());
        let memory = memory_of(&gpu);
        for told_first in [true, false] {
            let mut receiving = Receiving::default();
            receive(&mut receiving, 1, &memory);
            let target = IoVec::new(memory.span(0, 4096).unwrap(), 4096);
            receiving.begin(memory.location(), Some(&memory), &mut vec![target]).unwrap();
            receiving.open_part().expect("the ring has room");
            receiving.lanes[0].line.break_copier();
            receiving.flush();
            if told_first {
                assert!(!receiving.poll(), "a copy of the second frame was made");
                receiving.free();
            }
            assert!(!receiving.close_part());
            receiving.expect(frame(2, &memory));
            receiving.flush();
            let mut placed = || {
                assert!(!receiving.poll());
                receiving.free();
                receiving.next().map(|arrival| (arrival.header.key, arrival.refusal))
            };
            assert_eq!(until("the first frame ends", &mut placed), (1, Some(Refusal::Gpu)));
            assert_eq!(until("the second frame is copied", &mut placed), (2, None));
            assert!(!receiving.active());
        }
    }

    /// Regression: a frame with a lost part counted as placed because a later part was copied.
    #[test]
    fn a_frame_of_which_one_part_is_lost_is_refused_though_the_next_one_is_copied() {
        let (_alone, gpu) = (alone(), SimGpu::open(ALONE).unwrap());
        let buffer = gpu.alloc(2 * limits::STAGING_PART_BYTES, 4096).unwrap();
        for is_whole in [true, false] {
            let (mut receiving, memory) = (Receiving::default(), memory_of(&gpu));
            let target = IoVec::new(buffer.as_ptr(), buffer.len());
            receiving.begin(memory.location(), Some(&memory), &mut vec![target]).unwrap();
            receiving.open_part().expect("the ring has room");
            assert!(receiving.close_part());
            receiving.lanes[0].line.break_copier();
            receiving.flush();
            receiving.open_part().expect("the ring has room");
            if is_whole {
                assert!(!receiving.close_part());
                receiving.expect(frame(1, &memory));
                receiving.flush();
            }
            assert_eq!(
                receiving.poll(),
                !is_whole,
                "the failure is reported while the frame is being received"
            );
            if is_whole {
                receiving.free();
                let refusal = until("the frame ends", || {
                    receiving.poll();
                    receiving.next().map(|arrival| arrival.refusal)
                });
                assert_eq!(refusal, Some(Refusal::Gpu));
            }
        }
    }

    /// Regression: a thread that took the memory back had to wait for the other GPU, and lost the connection.
    #[test]
    fn a_finished_copy_is_released_though_another_gpu_is_stalled() {
        let (_alone, stands) = (alone(), SimGpu::open(ALONE).unwrap());
        let goes = SimGpu::open(11).unwrap();
        let [first, second] = [memory_of(&stands), memory_of(&goes)];
        let mut receiving = Receiving::default();
        stands.set_stall(true);
        receive(&mut receiving, 1, &first);
        receive(&mut receiving, 2, &second);
        receiving.flush();
        until("the second frame is copied", || {
            assert!(!receiving.poll());
            receiving.free();
            receiving.lanes[1].line.done(1).then_some(())
        });
        assert!(receiving.next().is_none(), "the second frame waits for the first");
        assert_eq!(receiving.abandon(&|landing| landing.is_in(&second)), None);
        assert_eq!(receiving.abandon(&|landing| landing.is_in(&first)), Some(MemoryLocation::SimGpu(ALONE)));
        stands.set_stall(false);
        let mut placed = || {
            receiving.poll();
            receiving.free();
            receiving.next().map(|arrival| (arrival.header.key, arrival.landing.is_some()))
        };
        assert_eq!(
            [until("the first", &mut placed), until("the second", &mut placed)],
            [(1, true), (2, false)]
        );
    }

    /// A copier whose copies do not end within any time: they are made when a gate has opened.
    struct Late {
        gpu: Arc<SimGpu>,
        runs: Vec<Run>,
        gate: Arc<AtomicBool>,
    }

    impl Copier for Late {
        unsafe fn copy(&mut self, runs: &[Run], _mark: u64) -> Result<()> {
            self.runs.extend(runs);
            Ok(())
        }

        fn reached(&mut self) -> (u64, Option<Error>) {
            (0, None)
        }

        fn last_reached(&self) -> u64 {
            0
        }

        fn ends_within(&mut self, _timeout: Duration) -> bool {
            false
        }

        fn calls(&self) -> u64 {
            0
        }
    }

    impl Drop for Late {
        fn drop(&mut self) {
            until("the gate opens", || self.gate.load(Ordering::SeqCst).then_some(()));
            for run in &self.runs {
                // SAFETY: the ring is dropped after its copier.
                let bytes = unsafe { std::slice::from_raw_parts(run.host as *const u8, run.bytes) };
                self.gpu.write_from_slice(run.device, bytes).unwrap();
            }
        }
    }

    /// Regression: the copies of a lost channel overwrote a write that another channel had placed meanwhile.
    #[test]
    fn copies_of_a_lost_channel_do_not_overwrite_what_came_after_it() {
        let gpu = SimGpu::open(GPU).unwrap();
        let (memory, gate) = (memory_of(&gpu), Arc::new(AtomicBool::new(false)));
        let mut lost = Staging::default();
        receive_bytes(&mut lost.receiving, 1, &memory, 1);
        let late = Late { gpu: gpu.clone(), runs: Vec::new(), gate: gate.clone() };
        lost.receiving.lanes[0].line.replace_copier(Box::new(late));
        let second = memory_of(&SimGpu::open(GPU + 1).unwrap());
        receive_bytes(&mut lost.receiving, 5, &second, 5);
        lost.receiving.flush();
        lost.end().expect("the copies have not ended").leave();
        assert!(memory.has_late_copies() && !second.has_late_copies(), "the second GPU does not hang");

        let mut next = Receiving::default();
        let other = memory_of(&gpu);
        let placed = |next: &mut Receiving| {
            assert!(!next.poll());
            next.free();
            next.next().map(|arrival| arrival.header.key)
        };
        receive_bytes(&mut next, 2, &other, 4);
        next.flush();
        assert_eq!(until("a frame for other memory is placed", || placed(&mut next)), 2);
        for (key, value) in [(1, 1), (3, 2)] {
            receive_bytes(&mut next, key, &memory, value);
            next.flush();
        }
        // The GPU finishes its other work before this read.
        gpu.read_to_vec(other.base() as u64, 1).unwrap();
        let before: Vec<u64> = std::iter::from_fn(|| placed(&mut next)).collect();
        gate.store(true, Ordering::SeqCst);
        until("the late copies end", || (!memory.used()).then_some(()));
        let after: Vec<u64> =
            (before.len()..2).map(|_| until("the frame is placed", || placed(&mut next))).collect();
        assert_eq!((before, after), (vec![], vec![1, 3]), "the frames wait for the late copies");
        let mut bytes = [0; 4096];
        memory.read(0, &mut bytes).unwrap();
        assert!(bytes == [2; 4096], "the last write: {}", bytes[0]);
    }

    /// Starts a payload of three parts: the first is being copied, the last one is open.
    fn in_parts(receiving: &mut Receiving, gpu: u32, targets: &[IoVec]) {
        receiving.begin(MemoryLocation::SimGpu(gpu), None, &mut targets.to_vec()).unwrap();
        receiving.open_part().expect("the ring is empty");
        assert!(receiving.close_part());
        receiving.flush();
        receiving.open_part().expect("the ring has room");
        assert!(receiving.close_part());
        receiving.open_part().expect("the ring has room");
    }

    /// Regression: the refusal was acknowledged while other parts of the frame were being copied, and could overwrite what
    /// the source wrote next.
    #[test]
    fn a_frame_that_was_broken_off_is_refused_once_its_parts_are_copied() {
        let (_alone, gpu) = (alone(), SimGpu::open(ALONE).unwrap());
        let memory = memory_of(&gpu);
        let buffer = gpu.alloc(limits::CHUNK_BYTES_MAX, 4096).unwrap();
        gpu.set_stall(true);
        let mut receiving = Receiving::default();
        in_parts(&mut receiving, ALONE, &[IoVec::new(buffer.as_ptr(), buffer.len())]);
        let Arrival { landing, .. } = frame(1, &memory);
        receiving.break_off(landing);
        assert!(receiving.is_broken(), "the channel defers the frame");
        let refused = Arrival { landing: None, refusal: Some(Refusal::Gpu), ..frame(1, &memory) };
        receiving.expect(refused);
        let placed = |receiving: &mut Receiving| {
            assert!(!receiving.poll());
            receiving.free();
            receiving.next().map(|arrival| arrival.refusal)
        };
        let before = placed(&mut receiving);
        gpu.set_stall(false);
        assert_eq!(before, None, "its parts are not copied yet");
        assert_eq!(until("the frame is refused", || placed(&mut receiving)), Some(Refusal::Gpu));
        assert!(!receiving.active() && receiving.lingering.is_empty());
    }

    /// Regression: when no list held the runs, each run cost a driver call.
    #[test]
    fn a_part_of_more_runs_than_a_list_holds_is_several_batches() {
        const RUNS: usize = limits::STAGING_LIST_RUNS + 1;
        let gpu = SimGpu::open(GPU).unwrap();
        let memory = Memory::private_on(&Gpu::Sim(gpu), RUNS).unwrap();
        let mut receiving = Receiving::default();
        let mut targets: Vec<_> =
            (0..RUNS as u64).rev().map(|at| IoVec::new(memory.span(at, 1).unwrap(), 1)).collect();
        receiving.begin(memory.location(), Some(&memory), &mut targets).unwrap();
        receiving.open_part().expect("the ring is empty");
        assert!(!receiving.close_part());
        receiving.expect(frame(1, &memory));
        receiving.flush();
        assert_eq!(receiving.lanes[0].line.next_mark(), 3);
        let refusal = until("the frame is copied", || {
            assert!(!receiving.poll());
            receiving.free();
            receiving.next().map(|arrival| arrival.refusal)
        });
        assert_eq!(refusal, None);
        assert!(!receiving.active() && receiving.lanes[0].line.ring.is_empty());
    }

    /// Regression: these parts were copied after the operation had ended and its memory belonged to the user
    /// again.
    #[test]
    fn parts_that_wait_for_company_when_their_frame_is_broken_off_are_copied_before_its_landing_goes() {
        let gpu = SimGpu::open(GPU).unwrap();
        let buffer = gpu.alloc(limits::CHUNK_BYTES_MAX, 4096).unwrap();
        let mut receiving = Receiving::default();
        in_parts(&mut receiving, GPU, &[IoVec::new(buffer.as_ptr(), buffer.len())]);
        assert_eq!(receiving.gathered_bytes(), limits::STAGING_PART_BYTES);
        receiving.break_off(None);
        assert_eq!(receiving.gathered_bytes(), 0);
        let line = &receiving.lanes[0].line;
        assert_eq!(line.next_mark(), 3, "the second part has a mark, which its landing waits for");
    }

    /// A connection without further bytes may not be polled again.
    #[test]
    fn parts_that_wait_for_a_batch_need_another_pass() {
        let gpu = SimGpu::open(GPU).unwrap();
        let buffer = gpu.alloc(limits::CHUNK_BYTES_MAX, 4096).unwrap();
        let mut receiving = Receiving::default();
        in_parts(&mut receiving, GPU, &[IoVec::new(buffer.as_ptr(), buffer.len())]);
        let start = std::time::Instant::now();
        while receiving.copying() {
            assert!(!receiving.poll());
            assert!(start.elapsed() < Duration::from_secs(60), "the first part is copied");
        }
        receiving.free();
        assert!(receiving.active());
    }

    /// Regression: the mark of these parts was behind copies that were never made, and no later frame was
    /// acknowledged.
    #[test]
    fn parts_that_wait_for_a_batch_end_too_when_the_copies_before_them_fail() {
        let (_alone, gpu) = (alone(), SimGpu::open(ALONE).unwrap());
        gpu.set_faults(SimFaults { fail_after: Some(0), ..SimFaults::default() });
        // Stall the GPU: otherwise the first copy might fail before the second part is complete.
        gpu.set_stall(true);
        let buffer = gpu.alloc(limits::CHUNK_BYTES_MAX, 4096).unwrap();
        let mut receiving = Receiving::default();
        let two_parts = 2 * limits::STAGING_PART_BYTES;
        receiving
            .begin(MemoryLocation::SimGpu(ALONE), None, &mut vec![IoVec::new(buffer.as_ptr(), two_parts)])
            .unwrap();
        receiving.open_part().expect("the ring is empty");
        assert!(receiving.close_part());
        receiving.flush();
        receiving.open_part().expect("the ring has room");
        assert!(!receiving.close_part(), "the frame is whole");
        receiving.current = None;
        gpu.set_stall(false);
        let start = std::time::Instant::now();
        let mut failed = false;
        while receiving.active() {
            receiving.poll();
            failed |= receiving.lanes[0].line.failure().is_some();
            receiving.free();
            receiving.flush();
            assert!(start.elapsed() < Duration::from_secs(60), "the copies fail");
        }
        assert!(failed && receiving.lanes[0].line.ring.is_empty());
    }

    /// Regression: these parts filled the ring, no poll freed them, and the channel stopped reading.
    #[test]
    fn parts_of_frames_that_were_broken_off_are_free_again() {
        let gpu = SimGpu::open(GPU).unwrap();
        let buffer = gpu.alloc(limits::CHUNK_BYTES_MAX, 4096).unwrap();
        let mut receiving = Receiving::default();
        for _ in 0..20 {
            let mut targets = vec![IoVec::new(buffer.as_ptr(), buffer.len())];
            receiving.begin(MemoryLocation::SimGpu(GPU), None, &mut targets).unwrap();
            let (part, last) = receiving.open_part().expect("the ring is empty");
            assert_eq!((part.len, last, targets.len()), (limits::STAGING_PART_BYTES, false, 0));
            receiving.break_off(None);
            assert!(!receiving.active(), "nothing is copied");
        }
    }
}
