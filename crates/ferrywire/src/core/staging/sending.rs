//! Payload from GPU memory to be sent: from the GPU into a ring, and from there into the stream.
//!
//! A staged frame's states: `reserved -> copying -> ready -> sent`, then `placed` if pages of the ring are
//! lent to the socket. Frames are sent in the order of their window, so the first one that is not ready
//! delays later ones.
//!
//! Invariant: a frame whose copy is in flight is not sent, and so not acknowledged. Its operation cannot end
//! before the copy has, or the copier is dropped.
//! Read next: `pipeline.rs`.

use super::copier::{Run, Way};
use super::pipeline::{Pipeline, Unfinished};
use super::ring::{Staged, State};
use super::stopwatch::Stopwatch;
use crate::core::queue::{DROPPED, Entry, Stage};
use crate::core::trace::{self, Direction, Track};
use crate::error::Error;
use ferrywire_proto::limits;
use std::time::Duration;

/// Payload that a channel sends from GPU memory.
#[derive(Default)]
pub(crate) struct Sending {
    lines: Vec<Pipeline>,
    staged_bytes: u64,
    /// Time during which there was no room for another frame.
    full: Stopwatch,
}

impl Sending {
    /// The sending half of a channel that traces name `track`.
    pub fn new(track: Track) -> Sending {
        Sending {
            full: Stopwatch::new(track.row(trace::Stage::Waiting(Direction::Tx))),
            ..Sending::default()
        }
    }
}

impl Stage for Sending {
    fn has_room(&self) -> bool {
        self.lines.iter().all(|line| line.ring.fits(limits::STAGING_SLOT_BYTES))
    }

    fn reserve(&mut self, entry: &mut Entry) {
        let Some(location) = entry.gpu() else { return };
        let line = self.lines.iter().position(|line| line.location == location).unwrap_or_else(|| {
            let row = self.full.row().of_copies(trace::Stage::D2h, self.lines.len());
            self.lines.push(Pipeline::new(location, Way::Out, row));
            self.lines.len() - 1
        });
        match self.lines[line].ring.take(entry.header.len as usize) {
            Some(offset) => {
                entry.staged = Some(Staged { line, offset, host: 0, lent: false, state: State::Reserved })
            }
            // The caller checks for room before it takes a frame.
            None => drop(entry.give_up(&Error::Internal("a staging ring has no room for a frame".into()))),
        }
        self.full.set(!self.has_room());
    }
}

impl Sending {
    /// Whether any payload was ever staged.
    pub fn begun(&self) -> bool {
        !self.lines.is_empty()
    }

    /// Starts the copies of all reserved frames; short ones of one GPU form one batch. Returns credit in
    /// bytes for messages that will not be sent.
    pub fn begin<'a>(&mut self, entries: impl Iterator<Item = &'a mut Entry>) -> u64 {
        let mut credit = 0;
        if self.lines.is_empty() {
            return credit;
        }
        for entry in entries {
            let Some(mut staged) = entry.staged.take() else { continue };
            if matches!(staged.state, State::Reserved) {
                let line = &mut self.lines[staged.line];
                match line.prepare() {
                    Ok(base) => {
                        line.make_room(entry.payload().map_or(0, |(_, ranges)| ranges.count()));
                        staged.host = base + staged.offset;
                        staged.state = State::Copying(line.next_mark());
                        add_d2h(line, entry, staged.host);
                        line.end_part();
                        self.staged_bytes += u64::from(entry.header.len);
                        if line.batch_bytes() >= limits::STAGING_BATCH_BYTES {
                            line.flush();
                        }
                    }
                    Err(error) => {
                        credit += entry.give_up(&error);
                        staged.state = State::Lost;
                    }
                }
            }
            entry.staged = Some(staged);
        }
        self.lines.iter_mut().for_each(Pipeline::flush);
        credit
    }

    /// Checks the progress of the copies. Frames with failed copies are emptied, and their operations fail.
    /// Returns credit as [`Sending::begin`] does.
    pub fn poll<'a>(&mut self, unsent: impl Iterator<Item = &'a mut Entry>) -> u64 {
        let (mut failed, mut credit) = (false, 0);
        for line in &mut self.lines {
            failed |= line.poll();
        }
        if !failed {
            return credit;
        }
        for entry in unsent {
            let Some(staged) = &mut entry.staged else { continue };
            let line = &self.lines[staged.line];
            let State::Copying(mark) = staged.state else { continue };
            if let Some(failure) = line.lost(mark..=mark) {
                staged.state = State::Lost;
                credit += entry.give_up(failure);
            }
        }
        for line in &mut self.lines {
            line.settle();
        }
        credit
    }

    /// Whether a frame may be sent: no copy of it is in flight. Returns credit for a message that will not be
    /// sent after all.
    pub fn ready(&self, entry: &mut Entry, crc: bool) -> Option<u64> {
        let Some(staged) = &mut entry.staged else { return Some(0) };
        let copied = match staged.state {
            State::Ready => return Some(0),
            State::Lost => false,
            State::Copying(mark) if self.lines[staged.line].done(mark) => true,
            State::Copying(_) | State::Reserved => return None,
        };
        staged.state = State::Ready;
        // The memory was dropped before this check, maybe before the copy: the staged bytes are not trusted.
        let credit = if copied && entry.is_of_gone_memory() {
            entry.give_up(&Error::invalid("region", DROPPED))
        } else {
            0
        };
        if crc {
            entry.add_crc();
        }
        Some(credit)
    }

    /// Notes that pages of a frame's payload are lent to the socket.
    pub fn lend(&mut self, staged: &mut Staged) {
        self.lines[staged.line].lent = true;
        staged.lent = true;
    }

    /// Frees a frame's bytes of the ring: they were copied into the stream, or the peer has placed the frame.
    pub fn give_back(&mut self, staged: &Staged) {
        let line = &mut self.lines[staged.line];
        line.ring.give_back_at(staged.offset);
        self.full.set(!self.has_room());
    }

    /// Whether copies are in flight.
    pub fn copying(&self) -> bool {
        self.lines.iter().any(Pipeline::copying)
    }

    /// Bytes staged so far.
    pub fn staged_bytes(&self) -> u64 {
        self.staged_bytes
    }

    /// Time during which copies were in flight.
    pub fn copying_time(&self) -> Duration {
        self.lines.iter().map(Pipeline::busy).sum()
    }

    /// Time during which a ring was full.
    pub fn full_time(&self) -> Duration {
        self.full.total()
    }

    /// Number of driver calls.
    pub fn driver_calls(&self) -> u64 {
        self.lines.iter().map(Pipeline::calls).sum()
    }

    /// Bytes of pinned memory in use.
    pub fn pinned_bytes(&self) -> usize {
        self.lines.iter().map(Pipeline::pinned_bytes).sum()
    }

    /// Lets frames use only the first `bytes` bytes of each ring from now on.
    pub fn keep_rings_within(&mut self, bytes: usize) {
        self.lines.iter_mut().for_each(|line| line.ring.keep_within(bytes));
        self.full.set(!self.has_room());
    }

    /// Bytes of the rings that may be used or still are, and those that are.
    pub fn ring_bytes(&self) -> (usize, usize) {
        let rings = self.lines.iter().map(|line| &line.ring);
        rings.fold((0, 0), |(all, used), ring| (all + ring.bound().max(ring.used()), used + ring.used()))
    }

    /// Ends all copying, as far as the GPUs finish it.
    pub fn end(&mut self) -> Vec<Unfinished> {
        self.full.set(false);
        self.lines.iter_mut().filter_map(Pipeline::end).collect()
    }
}

fn add_d2h(line: &mut Pipeline, entry: &Entry, mut host: usize) {
    let Some((memory, ranges)) = entry.payload() else { return };
    for (offset, len) in ranges {
        let Some(device) = memory.span(offset, len) else {
            debug_assert!(
                false,
                "a piece lies outside its memory, although pieces are checked when an operation is posted"
            );
            continue;
        };
        let run = Run { host, device: device as u64, bytes: len as usize };
        // SAFETY: the operation keeps its memory until the frame has been sent and acknowledged, which is
        // after the copy; the span of the ring is this frame's until it is sent.
        unsafe { line.add(run) };
        host += len as usize;
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ALONE, Staging, alone};
    use super::*;
    use crate::core::operation::{Hold, Op, Task, no_owner};
    use crate::core::queue::{Pull, SendQueue};
    use ferrywire_memory::sim::SimGpu;
    use ferrywire_memory::{Gpu, Memory};
    use ferrywire_proto::operation::{Piece, Pieces};
    use ferrywire_proto::window::Window;
    use ferrywire_sys::IoVec;
    use std::sync::Arc;

    /// Takes a frame that writes all of the memory, as a channel does.
    fn take(memory: &Arc<Memory>, window: &mut Window<Entry>, sending: &mut Sending) -> Arc<Op> {
        let piece = Piece { local: 0, remote: 0, len: memory.len() };
        take_pieces(memory, Pieces::One(piece), window, sending)
    }

    fn take_pieces(
        memory: &Arc<Memory>,
        pieces: Pieces,
        window: &mut Window<Entry>,
        sending: &mut Sending,
    ) -> Arc<Op> {
        let queue = SendQueue::new(limits::STAGING_CHUNK_BYTES_MIN, [1 << 18; 2], false);
        let op = Hold::new(Op::new(no_owner(), 1, Task::Write { region: 9 }, pieces, Some(memory.clone())));
        let shared = Arc::clone(&op);
        assert!(queue.post(op));
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
            messages: None,
        };
        let dropped = queue.pull(None, window, sending, pull).dropped;
        assert!(dropped.is_empty());
        shared
    }

    #[test]
    fn a_ring_is_cut_short_while_payload_comes_too() {
        let gpu = SimGpu::open(10).unwrap();
        let memory = Memory::private_on(&Gpu::Sim(gpu), 512 << 10).unwrap();
        let (mut window, mut staging) =
            (Window::new(limits::WINDOW_FRAMES_MAX, usize::MAX), Staging::default());
        let taken = limits::STAGING_SHORT_RING_BYTES as u64 / memory.len();
        for _ in 0..taken {
            take(&memory, &mut window, &mut staging.sending);
        }
        let target = Memory::private_on(&Gpu::Sim(SimGpu::open(10).unwrap()), 1 << 20).unwrap();
        let part_bytes = |staging: &mut Staging| {
            let whole = IoVec::new(target.span(0, target.len()).unwrap(), target.len() as usize);
            staging.receiving.begin(target.location(), None, &mut vec![whole]).unwrap();
            staging.receiving.open_part().map(|(part, _)| part.len)
        };
        assert_eq!(part_bytes(&mut staging), Some(limits::STAGING_IN_RING_BYTES / 4));
        let has_room = |staging: &mut Staging, short_both_ways| {
            staging.fit_rings(short_both_ways);
            staging.sending.has_room()
        };
        assert_eq!([true, false, true].map(|short| has_room(&mut staging, short)), [false, true, false]);
        staging.receiving.break_off(None);
        assert_eq!(part_bytes(&mut staging), Some(limits::STAGING_SHORT_RING_BYTES / 4));
        staging.receiving.break_off(None);
        assert!(has_room(&mut staging, true), "payload goes one way");
    }

    /// Regression: when no list held the runs, each run cost a driver call.
    #[test]
    fn frames_of_more_runs_than_a_list_holds_are_several_batches() {
        let gpu = SimGpu::open(10).unwrap();
        let memory = Memory::private_on(&Gpu::Sim(gpu), 4096).unwrap();
        let (mut window, mut sending) =
            (Window::new(limits::WINDOW_FRAMES_MAX, usize::MAX), Sending::default());
        let runs = limits::SEGMENTS_PER_CHUNK_MAX;
        for _ in 0..=limits::STAGING_LIST_RUNS / runs {
            let bytes = (0..runs as u64).map(|at| Piece { local: 2 * at, remote: 2 * at, len: 1 });
            take_pieces(&memory, Pieces::Many(bytes.collect()), &mut window, &mut sending);
        }
        assert_eq!(sending.begin(window.from(0)), 0);
        assert_eq!(sending.lines[0].batches(), 2);
    }

    /// Regression: a peer that acknowledged bytes before reading them was sent bytes that another frame had
    /// put into the ring, for another peer.
    #[test]
    fn placed_bytes_may_still_be_read_by_a_socket() {
        let gpu = SimGpu::open(10).unwrap();
        let memory = Memory::private_on(&Gpu::Sim(gpu), 4096).unwrap();
        let (mut window, mut sending) =
            (Window::new(limits::WINDOW_FRAMES_MAX, usize::MAX), Sending::default());
        for lends in [false, true] {
            take(&memory, &mut window, &mut sending);
            let (_, mut entry) = window.drain().pop().expect("a frame was taken");
            let mut staged = entry.staged.take().expect("the frame is staged");
            if lends {
                sending.lend(&mut staged);
            }
            sending.give_back(&staged);
            assert!(sending.lines[0].ring.is_empty());
            assert_eq!(sending.lines[0].lent, lends);
        }
    }

    /// Regression: frames that were taken before the failure was reported were dropped, and their operations
    /// failed.
    #[test]
    fn frames_staged_behind_a_failed_copy_are_copied() {
        let (_alone, gpu) = (alone(), SimGpu::open(ALONE).unwrap());
        let memory = || Memory::private_on(&Gpu::Sim(gpu.clone()), 4096).unwrap();
        let [first, second, third] = [memory(), memory(), memory()];
        let (mut window, mut sending) =
            (Window::new(limits::WINDOW_FRAMES_MAX, usize::MAX), Sending::default());
        // The first frame creates the copier.
        let fine = take(&first, &mut window, &mut sending);
        sending.begin(window.from(0));
        let start = std::time::Instant::now();
        while !window.from(0).all(|entry| sending.ready(entry, false).is_some()) {
            assert_eq!(sending.poll(window.from(0)), 0);
            assert!(start.elapsed() < Duration::from_secs(60));
        }
        sending.lines[0].break_copier();
        let fails = take(&second, &mut window, &mut sending);
        sending.begin(window.from(1));
        let goes_on = take(&third, &mut window, &mut sending);
        sending.begin(window.from(2));
        while !window.from(0).all(|entry| sending.ready(entry, false).is_some()) {
            sending.poll(window.from(0));
            assert!(start.elapsed() < Duration::from_secs(60));
        }
        assert_eq!([&fine, &fails, &goes_on].map(|op| op.failed()), [false, true, false]);
        assert_eq!(window.from(0).map(|entry| entry.header.len).collect::<Vec<_>>(), [4096, 0, 4096]);
    }
}
