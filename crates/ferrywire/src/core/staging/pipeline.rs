//! What one channel has for one GPU and one direction: a ring of pinned memory, and a copier.
//!
//! Both are made when they are first needed, and kept as long as the channel. A copier that fails is
//! thrown away, and the next copy gets a new one; the ring stays, since some of it may still be in use.
//!
//! Invariant: copies that a thrown away copier had not done will not be done, and are told so; those that were added after
//! it are none of them. Read next: `sending.rs`, `receiving.rs`.

use super::copier::{self, Copier, Pinned, Run, Way};
use super::ring::Ring;
use super::stopwatch::Stopwatch;
use crate::error::{Error, Result};
use ferrywire_memory::MemoryLocation;
use ferrywire_proto::limits;
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

pub(super) struct Pipeline {
    /// Dropped before the memory that it copies from or to.
    copier: Option<Box<dyn Copier>>,
    pinned: Option<Pinned>,
    pub location: MemoryLocation,
    way: Way,
    pub ring: Ring,
    /// The socket was lent some of its pages, and may still read them: that a frame is in its place only the peer says.
    pub lent: bool,
    /// Runs of batches that wait until the copier takes more, and of the next one.
    runs: Vec<Run>,
    /// Those that wait.
    held: VecDeque<Batch>,
    /// Runs and bytes of the next one.
    batch_runs: usize,
    batch_bytes: usize,
    marked: u64,
    reached: u64,
    /// How long copies were under way.
    busy: Stopwatch,
    /// Calls of copiers that were thrown away.
    past_calls: u64,
    /// Why each copier failed, and the marks that never will be reached for it, until that was told.
    failures: Vec<(Error, RangeInclusive<u64>)>,
}

/// Runs that are copied together, and the mark behind them.
#[derive(Clone, Copy)]
struct Batch {
    mark: u64,
    runs: usize,
    bytes: usize,
}

/// Bytes of all rings of this process.
static RINGS_BYTES: AtomicUsize = AtomicUsize::new(0);

/// How large a new ring is: with many channels to many peers, each has to do with less.
fn ring_bytes(way: Way) -> usize {
    let bytes = match way {
        Way::Out => limits::STAGING_OUT_RING_BYTES,
        Way::In => limits::STAGING_IN_RING_BYTES,
    };
    let fits = RINGS_BYTES.load(Ordering::Relaxed) + bytes <= limits::STAGING_RINGS_BYTES;
    let bytes = if fits { bytes } else { limits::STAGING_SMALL_RING_BYTES };
    RINGS_BYTES.fetch_add(bytes, Ordering::Relaxed);
    bytes
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        RINGS_BYTES.fetch_sub(self.ring.len(), Ordering::Relaxed);
        self.copier = None;
        // A socket may still read there, whatever the peer has acknowledged: the pages go back to the system, which keeps
        // them until nobody does. What was not lent nobody reads any more.
        if let Some(Pinned::Cuda(buffer)) = self.pinned.as_mut().filter(|_| self.lent) {
            buffer.use_never_again();
        }
    }
}

impl Pipeline {
    /// In numbers only; see [`Pipeline::prepare`].
    pub fn new(location: MemoryLocation, way: Way) -> Pipeline {
        Pipeline {
            copier: None,
            pinned: None,
            location,
            way,
            ring: Ring::new(ring_bytes(way)),
            lent: false,
            runs: Vec::new(),
            held: VecDeque::new(),
            batch_runs: 0,
            batch_bytes: 0,
            marked: 0,
            reached: 0,
            busy: Stopwatch::default(),
            past_calls: 0,
            failures: Vec::new(),
        }
    }

    /// Makes what is missing; gives the address of the ring.
    pub fn prepare(&mut self) -> Result<usize> {
        if self.pinned.is_none() {
            self.pinned = Some(copier::pinned(self.location, self.ring.len())?);
        }
        self.make_copier()?;
        Ok(self.base())
    }

    /// A new one where the last has failed.
    fn make_copier(&mut self) -> Result<()> {
        if self.copier.is_none() {
            self.copier = Some(copier::copier(self.location, self.way)?);
        }
        Ok(())
    }

    /// The address of the ring, which has been prepared.
    pub fn base(&self) -> usize {
        self.pinned.as_ref().map_or(0, Pinned::base)
    }

    /// Bytes of pinned memory that it holds.
    pub fn pinned_bytes(&self) -> usize {
        let ring = self.pinned.as_ref().map_or(0, Pinned::bytes);
        ring + self.copier.as_ref().map_or(0, |copier| copier.pinned_bytes())
    }

    /// Has so many runs fit into the next batch: a copier's list holds no more.
    pub fn make_room(&mut self, runs: usize) {
        if self.batch_runs + runs > limits::STAGING_LIST_RUNS {
            self.flush();
        }
    }

    /// Adds a copy to the next batch, in which there is room.
    ///
    /// # Safety
    /// What [`Copier::copy`] demands of a run, from now on.
    pub unsafe fn add(&mut self, run: Run) {
        debug_assert!(self.batch_runs < limits::STAGING_LIST_RUNS);
        self.runs.push(run);
        self.batch_runs += 1;
        self.batch_bytes += run.bytes;
    }

    /// Bytes of the next batch.
    pub fn batch_bytes(&self) -> usize {
        self.batch_bytes
    }

    /// The mark that stands behind the copies of the next batch.
    pub fn next_mark(&self) -> u64 {
        self.marked + 1
    }

    /// Ends the batch with a mark behind it, and enqueues it: now, or as soon as the copier takes more.
    pub fn flush(&mut self) {
        if self.batch_runs == 0 {
            return;
        }
        self.marked += 1;
        self.held.push_back(Batch { mark: self.marked, runs: self.batch_runs, bytes: self.batch_bytes });
        (self.batch_runs, self.batch_bytes) = (0, 0);
        self.busy.set(true);
        self.enqueue();
    }

    /// Enqueues batches that wait: as one, as many as a list of the copier's has room for, and from a GPU only until that
    /// is worth a copy, since nothing of it is sent before all is there.
    fn enqueue(&mut self) {
        let bytes_max = match self.way {
            Way::Out => limits::STAGING_BATCH_BYTES,
            Way::In => usize::MAX,
        };
        while let Some(Batch { mut mark, mut runs, mut bytes }) = self.held.front().copied() {
            if self.copier.as_ref().is_some_and(|copier| !copier.takes_more()) {
                return;
            }
            self.held.pop_front();
            while let Some(next) = self.held.pop_front_if(|next| {
                runs + next.runs <= limits::STAGING_LIST_RUNS && bytes + next.bytes <= bytes_max
            }) {
                (mark, runs, bytes) = (next.mark, runs + next.runs, bytes + next.bytes);
            }
            let made = self.make_copier();
            // SAFETY: by the promises of `add`; the copier is dropped before the memory of the ring.
            let copy = |copier: &mut Box<dyn Copier>| unsafe { copier.copy(&self.runs[..runs], mark) };
            let enqueued = made.and_then(|()| self.copier.as_mut().map_or(Ok(()), copy));
            self.runs.drain(..runs);
            if let Err(error) = enqueued {
                self.fail(error);
            }
        }
    }

    /// Looks how far the copier has come. True if one has failed: then some marks are [lost](Pipeline::lost), until
    /// [`Pipeline::settle`].
    pub fn look(&mut self) -> bool {
        if let Some(copier) = self.copier.as_mut().filter(|_| self.reached < self.marked) {
            let (reached, failed) = copier.reached();
            self.reached = self.reached.max(reached);
            if let Some(error) = failed.filter(|_| self.reached < self.marked) {
                self.fail(error);
            }
            self.enqueue();
            self.busy.set(self.reached < self.marked);
        }
        !self.failures.is_empty()
    }

    fn fail(&mut self, error: Error) {
        if let Some(mut copier) = self.copier.take() {
            // The batches before the one that failed are as good as ever.
            self.reached = self.reached.max(copier.stop());
            self.past_calls += copier.calls();
        }
        tracing::warn!(%error, location = %self.location, "copying between a GPU and the host failed");
        // What waits goes with what it waits for, and its mark is never given again.
        self.marked += u64::from(self.batch_bytes > 0);
        self.forget();
        // What another copier has done since the last failure is as good as ever, too.
        let told = self.failures.last().map_or(0, |(_, lost)| *lost.end());
        self.failures.push((error, self.reached.max(told) + 1..=self.marked));
    }

    /// Whether the copies before a mark are done.
    pub fn done(&self, mark: u64) -> bool {
        mark <= self.reached && self.lost(mark..=mark).is_none()
    }

    /// Why the copies before one of these marks will not be done, if so. For whoever asks between [`Pipeline::look`] and
    /// [`Pipeline::settle`].
    pub fn lost(&self, marks: RangeInclusive<u64>) -> Option<&Error> {
        let overlaps =
            |lost: &RangeInclusive<u64>| marks.start() <= lost.end() && lost.start() <= marks.end();
        self.failures.iter().find(|(_, lost)| overlaps(lost)).map(|(failure, _)| failure)
    }

    /// Whether copies are under way, or a failure of theirs is not told yet.
    pub fn copying(&self) -> bool {
        self.reached < self.marked || !self.failures.is_empty()
    }

    /// How long copies were under way so far.
    pub fn busy(&self) -> Duration {
        self.busy.total()
    }

    /// How often the driver was called for them.
    pub fn calls(&self) -> u64 {
        self.past_calls + self.copier.as_ref().map_or(0, |copier| copier.calls())
    }

    /// Failures have been told to all whose copies are lost. What was added since goes on.
    pub fn settle(&mut self) {
        let Some((_, lost)) = self.failures.last() else { return };
        self.reached = self.reached.max(*lost.end());
        self.failures.clear();
        self.busy.set(self.reached < self.marked);
    }

    /// Why a copier has failed, if that is not told yet: the last one.
    pub fn failure(&self) -> Option<&Error> {
        self.failures.last().map(|(failure, _)| failure)
    }

    /// Ends all copying: when this returns, nothing touches the memory that was named here.
    pub fn end(&mut self) {
        self.past_calls = self.calls();
        self.copier = None;
        self.forget();
        self.reached = self.marked;
        self.busy.set(false);
    }

    /// Forgets the runs that were not enqueued.
    fn forget(&mut self) {
        self.runs.clear();
        self.held.clear();
        (self.batch_runs, self.batch_bytes) = (0, 0);
    }
}

/// A copier that takes nothing.
#[cfg(test)]
struct Broken;

#[cfg(test)]
impl Copier for Broken {
    unsafe fn copy(&mut self, _runs: &[Run], _mark: u64) -> Result<()> {
        Err(Error::Internal("it is broken".into()))
    }

    fn reached(&mut self) -> (u64, Option<Error>) {
        (0, None)
    }

    fn calls(&self) -> u64 {
        0
    }
}

#[cfg(test)]
impl Pipeline {
    /// The next batch is not taken.
    pub fn break_copier(&mut self) {
        self.copier = Some(Box::new(Broken));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex, PoisonError};

    /// What a copier was given, and what it has done of it: one batch at a time.
    #[derive(Default)]
    struct Seen {
        batches: Vec<(u64, usize)>,
        reached: u64,
        fails: bool,
        refuses: bool,
    }

    struct OneByOne(Arc<Mutex<Seen>>);

    impl OneByOne {
        fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    impl Copier for OneByOne {
        unsafe fn copy(&mut self, runs: &[Run], mark: u64) -> Result<()> {
            if self.seen().refuses {
                return Err(Error::Internal("it refuses".into()));
            }
            self.seen().batches.push((mark, runs.len()));
            Ok(())
        }

        fn reached(&mut self) -> (u64, Option<Error>) {
            let seen = self.seen();
            (seen.reached, seen.fails.then(|| Error::Internal("it fails".into())))
        }

        fn takes_more(&self) -> bool {
            let seen = self.seen();
            seen.batches.last().is_none_or(|(mark, _)| *mark <= seen.reached)
        }

        fn calls(&self) -> u64 {
            0
        }
    }

    fn scene(way: Way) -> (Pipeline, Arc<Mutex<Seen>>) {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let mut line = Pipeline::new(MemoryLocation::SimGpu(0), way);
        line.copier = Some(Box::new(OneByOne(seen.clone())));
        (line, seen)
    }

    fn add(line: &mut Pipeline, runs: usize) {
        for _ in 0..runs {
            // SAFETY: nobody copies.
            unsafe { line.add(Run { host: 0, device: 0, bytes: 1 }) };
        }
    }

    #[test]
    fn what_is_flushed_while_a_copier_takes_no_more_is_one_batch_as_soon_as_it_does() {
        let (mut line, seen) = scene(Way::In);
        for runs in [1, 2, 3] {
            add(&mut line, runs);
            line.flush();
        }
        assert_eq!((line.next_mark(), line.batch_bytes()), (4, 0));
        assert!(!line.look() && line.copying());
        seen.lock().unwrap().reached = 1;
        assert!(!line.look() && line.done(1) && !line.done(2) && line.copying());
        assert_eq!(seen.lock().unwrap().batches, [(1, 1), (3, 5)]);
        seen.lock().unwrap().reached = 3;
        assert!(!line.look() && line.done(3) && !line.copying());
    }

    /// It may wait for company: that is for its user to say.
    #[test]
    fn what_nobody_flushed_is_not_copied_with_what_was_held_back() {
        let (mut line, seen) = scene(Way::In);
        add(&mut line, 1);
        line.flush();
        add(&mut line, 1);
        seen.lock().unwrap().reached = 1;
        line.look();
        assert!(!line.copying());
        assert_eq!((line.next_mark(), line.batch_bytes(), seen.lock().unwrap().batches.len()), (2, 1, 1));
    }

    /// A kernel has room for so many, and copy engines need a call of the driver for each.
    #[test]
    fn batches_that_waited_are_one_only_as_far_as_a_list_goes() {
        let (mut line, seen) = scene(Way::In);
        for runs in [1, limits::STAGING_LIST_RUNS - 1, 1, limits::STAGING_LIST_RUNS] {
            add(&mut line, runs);
            line.flush();
        }
        for reached in [1, 3, 4] {
            seen.lock().unwrap().reached = reached;
            line.look();
        }
        let list = limits::STAGING_LIST_RUNS;
        assert_eq!(seen.lock().unwrap().batches, [(1, 1), (3, list), (4, list)]);
    }

    /// Nothing of a batch is sent before all of it is copied.
    #[test]
    fn batches_from_a_gpu_that_waited_are_one_only_until_that_is_worth_a_copy() {
        let (mut line, seen) = scene(Way::Out);
        let part = limits::STAGING_BATCH_BYTES / 2;
        for bytes in [1, part, part, part, 4 * part] {
            // SAFETY: nobody copies.
            unsafe { line.add(Run { host: 0, device: 0, bytes }) };
            line.flush();
        }
        for reached in [1, 3, 4, 5] {
            seen.lock().unwrap().reached = reached;
            line.look();
        }
        assert_eq!(seen.lock().unwrap().batches, [(1, 1), (3, 2), (4, 1), (5, 1)]);
    }

    #[test]
    fn what_is_held_back_when_the_copies_before_it_fail_is_told_with_them() {
        let (mut line, seen) = scene(Way::In);
        for _ in 0..2 {
            add(&mut line, 1);
            line.flush();
        }
        add(&mut line, 1);
        seen.lock().unwrap().fails = true;
        assert!(line.look() && line.copying());
        line.settle();
        assert!(line.done(3) && !line.copying() && line.batch_bytes() == 0);
        assert_eq!((line.next_mark(), seen.lock().unwrap().batches.len()), (4, 1));
    }

    /// They were told a failure that was none of theirs.
    #[test]
    fn what_is_added_before_a_failure_is_told_is_for_the_next_copier() {
        let (mut line, _) = scene(Way::In);
        line.break_copier();
        add(&mut line, 1);
        line.flush();
        let (other, seen) = scene(Way::In);
        line.copier = { other }.copier.take();
        add(&mut line, 2);
        line.flush();
        assert_eq!(seen.lock().unwrap().batches, [(2, 2)]);
        seen.lock().unwrap().reached = 2;
        assert!(line.look() && !line.done(1) && line.done(2));
        line.settle();
        assert!(line.done(2) && !line.copying());
        // Nothing was told meanwhile.
        line.break_copier();
        add(&mut line, 1);
        line.flush();
        line.settle();
        let (other, seen) = scene(Way::In);
        line.copier = { other }.copier.take();
        add(&mut line, 1);
        line.flush();
        assert!(!line.look() && line.copying() && !line.done(4));
        seen.lock().unwrap().reached = 4;
        assert!(!line.look() && line.done(4) && !line.copying());
    }

    /// It was given up with them, with the error of the first.
    #[test]
    fn what_is_copied_between_two_failures_that_are_told_together_is_none_of_theirs() {
        let (mut line, _) = scene(Way::In);
        line.break_copier();
        add(&mut line, 1);
        line.flush();
        let (other, seen) = scene(Way::In);
        line.copier = { other }.copier.take();
        add(&mut line, 1);
        line.flush();
        *seen.lock().unwrap() = Seen { reached: 2, refuses: true, ..Seen::default() };
        add(&mut line, 1);
        line.flush();
        assert!(line.look() && line.copying());
        assert_eq!([1, 2, 3].map(|mark| line.done(mark)), [false, true, false]);
        line.settle();
        assert!(!line.look() && !line.copying());
    }
}
