//! Short messages for GPU memory: from the peer's inbox into a ring, and from there to the GPU.
//!
//! A message that arrives whole is placed by the thread that receives it or posts its receive. Neither waits for a GPU: it
//! leaves such a message here, and a later pass ends the receive. A message's states:
//! `waits for room -> copying -> placed | lost`.
//!
//! Invariant: a receive does not end while its message is copied.
//! Read next: `pipeline.rs`; `peer/replies.rs`, the only user.

use std::collections::VecDeque;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use super::Hung;
use super::copier::{Run, Way};
use super::pipeline::Pipeline;
use crate::core::inbound::{Sink, taken_back};
use crate::core::operation::Hold;
use crate::core::peer::Landing;
use crate::error::{Error, Result};
use ferrywire_memory::{MemoryLocation, OwnedCall};
use ferrywire_proto::inbox::Message;
use ferrywire_proto::limits;

/// Time that the end of a copier is waited for. Its copies are done, but those of other peers before its mark may not be, and
/// the thread that waits serves all peers.
const CLOSE_WAIT: Duration = Duration::from_millis(1);

/// The messages of one peer that are copied to GPUs.
#[derive(Default)]
pub(crate) struct Messages {
    any: AtomicBool,
    pinned_bytes: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    lines: Vec<Line>,
    copying: Vec<Copying>,
    /// Messages that could not be copied.
    lost: Vec<(Letter, Error)>,
    is_closed: bool,
}

/// The way to one GPU, and the messages that wait for room in its ring.
struct Line {
    pipeline: Pipeline,
    waiting: VecDeque<Letter>,
}

/// A message and the receive that it has matched.
pub(crate) struct Letter {
    pub message: Message,
    landing: Landing,
    /// Counts as a use of the memory until the letter is dropped; `deregister` waits for it.
    _call: Option<OwnedCall>,
}

struct Copying {
    letter: Letter,
    line: usize,
    offset: usize,
    /// The marks of the first and the last part of the copy.
    first: u64,
    mark: u64,
    failed: Option<Error>,
}

/// The ring span through which a message is copied, and the marks of its copy.
struct Started {
    offset: usize,
    first: u64,
    mark: u64,
}

impl Letter {
    /// The receive that the message has matched.
    pub fn op(&self) -> Option<&Hold> {
        match &self.landing {
            Landing::Sink { sink } => Some(&sink.op),
            Landing::Region { .. } => None,
        }
    }

    /// Whether the memory of the receive is the user's again.
    fn is_taken_back(&self) -> bool {
        self.landing.memory().is_some_and(|memory| memory.taken_back())
    }

    /// Takes the message out; its receive has ended without it.
    pub fn into_message(self) -> Message {
        self.message
    }
}

impl Messages {
    /// Whether messages wait or are copied.
    pub fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Takes a message to be copied to the memory of its receive. The copy of the only one starts at once; others start at the
    /// next poll, as one batch. Returns whether it is the only one, so that a thread has to start polling.
    ///
    /// # Errors
    /// Receive and message, if nothing polls copies any more.
    pub fn add(&self, op: Hold, message: Message) -> std::result::Result<bool, (Hold, Message)> {
        let mut state = self.lock();
        if state.is_closed {
            return Err((op, message));
        }
        let call = op.memory.as_ref().map(OwnedCall::new);
        let gone = op.memory.as_ref().is_some_and(|memory| memory.taken_back());
        let landing = Landing::Sink { sink: Arc::new(Sink::new(op, message.bytes.len() as u64)) };
        let letter = Letter { message, landing, _call: call };
        match gone {
            true => state.lost.push((letter, taken_back())),
            false => state.line_of(&letter).waiting.push_back(letter),
        }
        let is_only = !self.any.swap(true, Ordering::SeqCst);
        if is_only {
            state.begin();
            self.count(&state);
        }
        Ok(is_only)
    }

    /// Takes no more messages, if none is left. Returns whether it is so.
    ///
    /// The copiers end here: they share streams with copiers of other peers, whose copies may not end, and the thread that
    /// drops the peer must not wait for those.
    pub fn close(&self) -> bool {
        let mut state = self.lock();
        state.is_closed = !state.goes_on() && state.lost.is_empty();
        if state.is_closed {
            let mut lines = std::mem::take(&mut state.lines);
            let unfinished =
                lines.iter_mut().filter_map(|line| line.pipeline.end_within(CLOSE_WAIT)).collect();
            Hung::of(unfinished, Vec::new(), Vec::new()).into_iter().for_each(Hung::leave);
            self.count(&state);
        }
        state.is_closed
    }

    /// Takes the messages that are placed, or lost for a reason. Another thread that polls is not waited for.
    pub fn poll(&self) -> Vec<(Letter, Option<Error>)> {
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Vec::new(),
        };
        let mut ended = state.ended();
        state.begin();
        self.count(&state);
        ended.extend(state.lost.drain(..).map(|(letter, error)| (letter, Some(error))));
        self.any.store(state.goes_on(), Ordering::Release);
        ended
    }

    /// Bytes of pinned memory in use. While another thread polls, the bytes of its last look.
    pub fn pinned_bytes(&self) -> usize {
        self.pinned_bytes.load(Ordering::Relaxed)
    }

    /// Gives up the messages that wait for a receive for which `gone` is true: the next poll reports them as lost. Returns a
    /// GPU that may still copy to memory of such a receive.
    pub fn abandon(&self, gone: &dyn Fn(&Landing) -> bool) -> Option<MemoryLocation> {
        if !self.any() {
            return None;
        }
        let mut state = self.lock();
        state.lose_waiting(
            gone,
            |letter| if letter.is_taken_back() { taken_back() } else { Error::Cancelled },
        );
        let touches = |copying: &&Copying| gone(&copying.letter.landing);
        state.copying.iter().find(touches).map(|copying| state.lines[copying.line].pipeline.location)
    }

    /// Stops all copies to memory for which `gone` is true: the next poll reports these messages as lost, for the reason
    /// `error`.
    pub fn cut(&self, gone: &dyn Fn(&Landing) -> bool, error: &Error) {
        if !self.any() {
            return;
        }
        let mut state = self.lock();
        let cut: Vec<usize> = (0..state.lines.len())
            .filter(|line| state.copying.iter().any(|each| each.line == *line && gone(&each.letter.landing)))
            .collect();
        let all = std::mem::take(&mut state.copying);
        let (stopped, goes_on): (Vec<_>, Vec<_>) = all.into_iter().partition(|each| cut.contains(&each.line));
        state.copying = goes_on;
        for line in cut {
            let unfinished = state.lines[line].pipeline.end();
            let touched =
                stopped.iter().filter(|each| each.line == line).map(|each| each.letter.landing.clone());
            Hung::of(unfinished.into_iter().collect(), Vec::new(), touched.collect())
                .into_iter()
                .for_each(Hung::leave);
        }
        for Copying { letter, line, offset, .. } in stopped.into_iter().rev() {
            state.lines[line].pipeline.ring.give_back_at(offset);
            match gone(&letter.landing) {
                true => state.lost.push((letter, error.clone())),
                false => state.lines[line].waiting.push_front(letter),
            }
        }
        state.lose_waiting(gone, |_| error.clone());
    }

    fn count(&self, state: &State) {
        let bytes = state.lines.iter().map(|line| line.pipeline.pinned_bytes()).sum();
        self.pinned_bytes.store(bytes, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Whether messages wait or are copied.
    fn goes_on(&self) -> bool {
        !self.copying.is_empty() || self.lines.iter().any(|line| !line.waiting.is_empty())
    }

    /// The line to the GPU of a message's receive.
    fn line_of(&mut self, letter: &Letter) -> &mut Line {
        let location = letter.landing.memory().map_or(MemoryLocation::Host, |memory| memory.location());
        let known = self.lines.iter().position(|line| line.pipeline.location == location);
        let index = known.unwrap_or_else(|| {
            let pipeline = Pipeline::with_ring(location, Way::In, limits::STAGING_MESSAGES_RING_BYTES);
            self.lines.push(Line { pipeline, waiting: VecDeque::new() });
            self.lines.len() - 1
        });
        &mut self.lines[index]
    }

    /// Moves messages that wait for memory for which `gone` is true to the lost ones.
    fn lose_waiting(&mut self, gone: &dyn Fn(&Landing) -> bool, why: impl Fn(&Letter) -> Error) {
        for line in &mut self.lines {
            let waiting = std::mem::take(&mut line.waiting);
            let (gone, waits): (VecDeque<_>, _) = waiting.into_iter().partition(|each| gone(&each.landing));
            line.waiting = waits;
            self.lost.extend(gone.into_iter().map(|letter| {
                let why = why(&letter);
                (letter, why)
            }));
        }
    }

    /// Starts the copies of messages that wait, as far as there is room.
    fn begin(&mut self) {
        for (at, line) in self.lines.iter_mut().enumerate() {
            while let Some(letter) = line.waiting.pop_front() {
                // Without a channel nothing has looked for messages of this memory.
                if letter.is_taken_back() {
                    self.lost.push((letter, taken_back()));
                    continue;
                }
                match line.begin_one(&letter) {
                    Ok(Some(Started { offset, first, mark })) => {
                        self.copying.push(Copying { letter, line: at, offset, first, mark, failed: None });
                    }
                    Ok(None) => {
                        line.waiting.push_front(letter);
                        break;
                    }
                    Err(error) => self.lost.push((letter, error)),
                }
            }
            line.pipeline.flush();
        }
    }

    /// Removes the messages whose copies have ended.
    fn ended(&mut self) -> Vec<(Letter, Option<Error>)> {
        for line in &mut self.lines {
            line.pipeline.poll();
        }
        for each in &mut self.copying {
            if let Some(error) = self.lines[each.line].pipeline.lost(each.first..=each.mark) {
                each.failed.get_or_insert_with(|| error.clone());
            }
        }
        self.lines.iter_mut().for_each(|line| line.pipeline.settle());
        let lines = &mut self.lines;
        let over = self.copying.extract_if(.., |each| lines[each.line].pipeline.done(each.mark));
        let over: Vec<Copying> = over.collect();
        for each in &over {
            self.lines[each.line].pipeline.ring.give_back_at(each.offset);
        }
        over.into_iter().map(|each| (each.letter, each.failed)).collect()
    }
}

impl Line {
    /// Starts the copy of a message. Returns `None` if there is no room.
    fn begin_one(&mut self, letter: &Letter) -> Result<Option<Started>> {
        let pipeline = &mut self.pipeline;
        letter.landing.memory().into_iter().for_each(|memory| pipeline.wait_for_late_copies(memory));
        let base = pipeline.prepare()?;
        let bytes = letter.message.bytes.len();
        let Some(offset) = pipeline.ring.take(bytes) else { return Ok(None) };
        let mut host = base + offset;
        // SAFETY: the span of the ring has this length, and no copy uses it.
        unsafe { ptr::copy_nonoverlapping(letter.message.bytes.as_ptr(), host as *mut u8, bytes) };
        pipeline.make_room(1);
        let (first, mut left) = (pipeline.next_mark(), bytes);
        let op = letter.op();
        let pieces = op.map_or(&[][..], |op| op.pieces.as_slice());
        for piece in pieces {
            let now = left.min(piece.len as usize);
            let memory = op.and_then(|op| op.memory.as_deref());
            let Some(device) = memory.and_then(|memory| memory.span(piece.local, now as u64)) else {
                continue;
            };
            if now == 0 {
                continue;
            }
            pipeline.make_room(1);
            // SAFETY: the letter keeps the memory, and the span of the ring, until the mark is reached.
            unsafe { pipeline.add(Run { host, device: device as u64, bytes: now }) };
            (host, left) = (host + now, left - now);
        }
        let mark = pipeline.next_mark();
        pipeline.end_part();
        Ok(Some(Started { offset, first, mark }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ALONE, alone};
    use super::*;
    use crate::core::operation::{Op, Task, no_owner};
    use ferrywire_memory::sim::SimGpu;
    use ferrywire_memory::{Gpu, Memory};
    use ferrywire_proto::inbox::{Inbox, Reply};
    use ferrywire_proto::operation::{Piece, Pieces};
    use ferrywire_proto::wire::{Header, Kind};
    use std::time::{Duration, Instant};

    const BYTES: usize = limits::EAGER_BYTES_MAX;
    const IN_RING: u64 = (limits::STAGING_MESSAGES_RING_BYTES / BYTES) as u64;

    /// Adds a message of bytes of this value, for a receive into all of the memory.
    fn add(messages: &Messages, inbox: &mut Inbox<Hold>, number: u64, memory: &Arc<Memory>, value: u8) {
        let piece = Pieces::One(Piece { local: 0, remote: 0, len: BYTES as u64 });
        let op = Op::new(no_owner(), number, Task::Recv { tag: number }, piece, Some(memory.clone()));
        assert!(inbox.post(Hold::new(op)).is_empty());
        let header = Header { key: number, offset: number, ..Header::new(Kind::Send) };
        for reply in inbox.message(&header, vec![value; BYTES]).unwrap() {
            if let Reply::Place(op, message) = reply {
                assert!(messages.add(op, message).is_ok());
            }
        }
    }

    fn contents(memory: &Memory) -> Vec<u8> {
        let mut bytes = vec![0; BYTES];
        memory.read(0, &mut bytes).unwrap();
        bytes
    }

    /// Regression: a thread that posted receives for messages that had come made the driver calls of a copy at every third post.
    #[test]
    fn messages_behind_the_first_are_copied_as_one_batch() {
        const MESSAGES: u64 = 6;
        let (_alone, gpu) = (alone(), SimGpu::open(ALONE).unwrap());
        let memory = Memory::private_on(&Gpu::Sim(gpu.clone()), BYTES).unwrap();
        let (messages, mut inbox) = (Messages::default(), Inbox::default());
        gpu.set_stall(true);
        (0..MESSAGES).for_each(|number| add(&messages, &mut inbox, number, &memory, 1));
        let counts = || {
            let state = messages.lock();
            (state.copying.len(), state.lines[0].waiting.len(), state.lines[0].pipeline.calls())
        };
        let (copying, waiting, calls) = counts();
        assert_eq!((copying, waiting), (1, MESSAGES as usize - 1));
        assert!(messages.poll().is_empty());
        // Each copy is a call, the mark behind the batch is one, and the poll asked the GPU once.
        assert_eq!(counts(), (MESSAGES as usize, 0, calls + MESSAGES - 1 + 2));
        gpu.set_stall(false);
        let start = Instant::now();
        while messages.any() {
            messages.poll();
            assert!(start.elapsed() < Duration::from_secs(60));
        }
        assert_eq!(contents(&memory), [1; BYTES]);
    }

    /// Memory that is taken back while a GPU stands still: nothing is copied there any more, and the messages for other
    /// memory are copied later.
    #[test]
    fn a_cut_loses_only_the_messages_for_memory_that_is_taken_back() {
        let (_alone, gpu) = (alone(), SimGpu::open(ALONE).unwrap());
        let memory = || Memory::private_on(&Gpu::Sim(gpu.clone()), BYTES).unwrap();
        let [gone, kept] = [memory(), memory()];
        let (messages, mut inbox) = (Messages::default(), Inbox::default());
        assert_eq!((messages.any(), messages.pinned_bytes()), (false, 0));
        gpu.set_stall(true);
        // The last two wait for room in the ring.
        for number in 0..IN_RING + 2 {
            let memory = if number % 2 == 0 { &gone } else { &kept };
            add(&messages, &mut inbox, number, memory, 1 + number as u8);
        }
        assert!(messages.any() && messages.poll().is_empty());
        assert!(messages.pinned_bytes() >= limits::STAGING_MESSAGES_RING_BYTES);
        let is_gone = |landing: &Landing| landing.memory().is_some_and(|memory| Arc::ptr_eq(memory, &gone));
        assert_eq!(messages.abandon(&is_gone), Some(MemoryLocation::SimGpu(ALONE)));

        messages.cut(&is_gone, &taken_back());
        assert_eq!(messages.abandon(&is_gone), None);
        let (mut lost, mut placed, start) = (Vec::new(), Vec::new(), Instant::now());
        gpu.set_stall(false);
        while messages.any() {
            for (letter, error) in messages.poll() {
                let number = letter.op().expect("it has a receive").id;
                if error.is_some() { lost.push(number) } else { placed.push(number) }
            }
            assert!(start.elapsed() < Duration::from_secs(60), "{lost:?} {placed:?}");
            std::thread::yield_now();
        }
        lost.sort();
        let all = |rest: u64| (0..IN_RING + 2).filter(|number| number % 2 == rest).collect::<Vec<_>>();
        assert_eq!((lost, placed), (all(0), all(1)), "the others in their order");
        assert_eq!(contents(&gone), [0; BYTES]);
        assert_eq!(contents(&kept), [2 + IN_RING as u8; BYTES]);
        messages.cut(&|_| true, &taken_back());
        assert!(messages.poll().is_empty());
    }

    /// Messages that fill the ring of a GPU that stands still, for the first memory, and one that waits, for the second.
    fn full_ring(gpu: &Arc<SimGpu>) -> (Messages, [Arc<Memory>; 2]) {
        let memories = [(); 2].map(|()| Memory::private_on(&Gpu::Sim(gpu.clone()), BYTES).unwrap());
        let (messages, mut inbox) = (Messages::default(), Inbox::default());
        gpu.set_stall(true);
        (0..IN_RING).for_each(|number| add(&messages, &mut inbox, number, &memories[0], 1));
        add(&messages, &mut inbox, IN_RING, &memories[1], 2);
        assert!(messages.poll().is_empty());
        (messages, memories)
    }

    /// Polls until all messages have ended; returns the errors.
    fn errors(messages: &Messages) -> Vec<Error> {
        let (mut errors, start) = (Vec::new(), Instant::now());
        while messages.any() {
            errors.extend(messages.poll().into_iter().filter_map(|(_, error)| error));
            assert!(start.elapsed() < Duration::from_secs(60));
        }
        errors
    }

    /// Regression: a message that waited for room in the ring was copied to memory that its user had freed meanwhile.
    #[test]
    fn a_message_that_waits_for_memory_that_is_taken_back_is_lost() {
        let (_alone, gpu) = (alone(), SimGpu::open(ALONE).unwrap());
        let (messages, [kept, gone]) = full_ring(&gpu);
        gone.take_back();
        assert_eq!(messages.abandon(&|landing| landing.is_in(&gone)), None);
        let lost: Vec<_> =
            messages.poll().into_iter().map(|(letter, error)| (letter.op().unwrap().id, error)).collect();
        assert_eq!(lost, [(IN_RING, Some(taken_back()))], "its GPU is not waited for");
        gpu.set_stall(false);
        assert_eq!(errors(&messages), []);
        assert_eq!((contents(&kept), contents(&gone)), (vec![1; BYTES], vec![0; BYTES]));
    }

    /// Regression: the receive failed as if its region had been deregistered.
    #[test]
    fn a_cancelled_receive_whose_message_waits_for_room_is_cancelled() {
        let (_alone, gpu) = (alone(), SimGpu::open(ALONE).unwrap());
        let (messages, [_, waits]) = full_ring(&gpu);
        assert_eq!(messages.abandon(&|landing| landing.is_in(&waits)), None);
        gpu.set_stall(false);
        assert_eq!(errors(&messages), [Error::Cancelled]);
    }

    /// Regression: such a message was copied if its peer had no channel when the memory was taken back.
    #[test]
    fn a_message_is_not_copied_to_memory_that_was_taken_back_unnoticed() {
        let (_alone, gpu) = (alone(), SimGpu::open(ALONE).unwrap());
        let (messages, [_, gone]) = full_ring(&gpu);
        gone.take_back();
        gpu.set_stall(false);
        assert_eq!((errors(&messages), contents(&gone)), (vec![taken_back()], vec![0; BYTES]));
    }

    /// Regression: messages for one GPU waited until another one, whose ring was full, had copied.
    #[test]
    fn a_gpu_that_stands_still_does_not_delay_messages_for_another() {
        let _alone = alone();
        let [still, other] = [ALONE, ALONE - 1].map(|number| SimGpu::open(number).unwrap());
        let memory = |gpu: &Arc<SimGpu>| Memory::private_on(&Gpu::Sim(gpu.clone()), BYTES).unwrap();
        let (behind, placed) = (memory(&still), memory(&other));
        let (messages, mut inbox) = (Messages::default(), Inbox::default());
        still.set_stall(true);
        (0..IN_RING + 1).for_each(|number| add(&messages, &mut inbox, number, &behind, 1));
        add(&messages, &mut inbox, IN_RING + 1, &placed, 2);
        let start = Instant::now();
        let ended = loop {
            let ended: Vec<_> = messages.poll().iter().map(|(letter, _)| letter.op().unwrap().id).collect();
            if !ended.is_empty() {
                break ended;
            }
            assert!(start.elapsed() < Duration::from_secs(60));
        };
        assert_eq!((ended, contents(&placed)), (vec![IN_RING + 1], vec![2; BYTES]));
        still.set_stall(false);
        while messages.any() {
            messages.poll();
            assert!(start.elapsed() < Duration::from_secs(60));
        }
        assert_eq!(contents(&behind), [1; BYTES]);
    }
}
