//! The staging of one channel for one GPU and one direction: a ring of pinned memory, and a copier.
//!
//! Both are created at first use and kept as long as the channel. A failed copier is dropped, and the next
//! copy gets a new one. The ring stays, since some of it may still be in use.
//!
//! A batch joins *parts* of several operations: what was added between two calls of `end_part`. The copies of
//! a failed copier do not tell which part is at fault. So each part that the copier had not copied is copied
//! once more, alone, by a new copier, and only a part that fails alone is lost:
//! `added -> held -> flying -> copied`, or `flying -> held, alone -> flying -> copied | lost`.
//!
//! Invariant: a part is lost only if its own copy has failed, or the GPU as a whole has.
//! Read next: `sending.rs`, `receiving.rs`.

use super::copier::{self, Copier, Pinned, Run, SimCopier, Way};
use super::cuda::CudaCopier;
use super::ring::Ring;
use super::stopwatch::Stopwatch;
use crate::core::trace::Row;
use crate::error::{Error, Result};
use ferrywire_memory::{Gpu, Memory, MemoryLocation};
use ferrywire_proto::limits;
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

pub(super) struct Pipeline {
    /// Copies for this ring. Declared before `pinned`, so that it is dropped before the memory that it uses.
    copier: Option<Box<dyn Copier>>,
    pinned: Option<Pinned>,
    pub location: MemoryLocation,
    way: Way,
    pub ring: Ring,
    /// Whether pages of the ring were lent to the socket, which may still read them: only the peer reports a
    /// frame as placed.
    pub lent: bool,
    /// Runs of parts, oldest first: `done_runs` that are copied, then those of `flying`, of `held` and of the
    /// next batch.
    runs: Vec<Run>,
    done_runs: usize,
    /// Number of runs of each part that is not copied. The first part has the mark `reached + 1`.
    parts: VecDeque<usize>,
    /// Batches that the copier has, and their runs.
    flying: VecDeque<Batch>,
    flying_runs: usize,
    /// Batches that wait for the copier.
    held: VecDeque<Batch>,
    /// Memory to which a GPU may still make copies of lost channels: nothing is enqueued before these end.
    late: Vec<Weak<Memory>>,
    /// Runs and bytes of the next batch, and runs of its last part.
    batch_runs: usize,
    batch_bytes: usize,
    part_runs: usize,
    /// The marks of the last part, of the last part in a batch, and of the last part that is copied or lost.
    marked: u64,
    flushed: u64,
    reached: u64,
    /// Time during which copies were in flight.
    busy: Stopwatch,
    /// Driver calls of dropped copiers.
    past_calls: u64,
    /// Why the copier has failed, while earlier copies of it still run.
    failing: Option<Error>,
    /// For each failed copy, its error and the marks that will never be reached, until that was reported.
    failures: Vec<(Error, RangeInclusive<u64>)>,
    /// The copiers to use before others are made.
    #[cfg(test)]
    spare: VecDeque<Box<dyn Copier>>,
}

/// Runs that are copied together, and the mark of the last part.
#[derive(Clone, Copy)]
struct Batch {
    mark: u64,
    runs: usize,
    bytes: usize,
    /// Whether the batch is one part that failed together with others. The copier gets no other batch beside
    /// it.
    alone: bool,
}

/// Bytes of all rings in this process.
static RINGS_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Size of a new ring in bytes: smaller when many rings exist already.
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
        if let Some(mut copier) = self.copier.take()
            && !copier.finish()
        {
            std::mem::forget((copier, self.pinned.take()));
        }
        self.keep_lent_pages();
    }
}

impl Pipeline {
    /// Creates the state without memory; see [`Pipeline::prepare`]. A trace shows the copies in `row`.
    pub fn new(location: MemoryLocation, way: Way, row: Row) -> Pipeline {
        Pipeline::of(location, way, row, ring_bytes(way))
    }

    /// As [`Pipeline::new`], with a ring of this size, and in no row of a trace.
    pub fn with_ring(location: MemoryLocation, way: Way, bytes: usize) -> Pipeline {
        RINGS_BYTES.fetch_add(bytes, Ordering::Relaxed);
        Pipeline::of(location, way, Row::default(), bytes)
    }

    fn of(location: MemoryLocation, way: Way, row: Row, ring_bytes: usize) -> Pipeline {
        Pipeline {
            copier: None,
            pinned: None,
            location,
            way,
            ring: Ring::new(ring_bytes),
            lent: false,
            runs: Vec::new(),
            done_runs: 0,
            parts: VecDeque::new(),
            flying: VecDeque::new(),
            flying_runs: 0,
            held: VecDeque::new(),
            late: Vec::new(),
            batch_runs: 0,
            batch_bytes: 0,
            part_runs: 0,
            marked: 0,
            flushed: 0,
            reached: 0,
            busy: Stopwatch::new(row),
            past_calls: 0,
            failing: None,
            failures: Vec::new(),
            #[cfg(test)]
            spare: VecDeque::new(),
        }
    }

    /// Creates the memory and the copier if missing. Returns the address of the ring.
    ///
    /// # Errors
    /// The GPU is not open, or the driver's error.
    pub fn prepare(&mut self) -> Result<usize> {
        if self.pinned.is_none() {
            self.pinned = Some(copier::pinned(self.location, self.ring.len())?);
        }
        self.make_copier()?;
        Ok(self.base())
    }

    /// Creates a copier if there is none, or the last one has failed.
    fn make_copier(&mut self) -> Result<()> {
        #[cfg(test)]
        if self.copier.is_none() {
            self.copier = self.spare.pop_front();
        }
        if self.copier.is_none() {
            self.copier = Some(copier(self.location, self.way)?);
        }
        Ok(())
    }

    /// The address of the ring, which must be prepared.
    pub fn base(&self) -> usize {
        self.pinned.as_ref().map_or(0, Pinned::base)
    }

    /// Bytes of pinned memory in use.
    pub fn pinned_bytes(&self) -> usize {
        let ring = self.pinned.as_ref().map_or(0, Pinned::bytes);
        ring + self.copier.as_ref().map_or(0, |copier| copier.pinned_bytes())
    }

    /// Lets copies wait for those of lost channels to this memory, which could overwrite them: all copies of this pipeline
    /// that are not enqueued yet, those to other memory of its GPU too.
    pub fn wait_for_late_copies(&mut self, memory: &Arc<Memory>) {
        let is_new = |late: &[Weak<Memory>]| late.iter().all(|each| each.as_ptr() != Arc::as_ptr(memory));
        if memory.has_late_copies() && is_new(&self.late) {
            self.late.push(Arc::downgrade(memory));
        }
    }

    /// Makes room for `runs` runs in the next batch: a copier's list is bounded.
    pub fn make_room(&mut self, runs: usize) {
        if self.batch_runs + runs > limits::STAGING_LIST_RUNS {
            self.flush();
        }
    }

    /// Adds a copy to the last part of the next batch. The batch must have room.
    ///
    /// # Safety
    /// As [`Copier::copy`] requires of a run, from now on.
    pub unsafe fn add(&mut self, run: Run) {
        debug_assert!(self.batch_runs < limits::STAGING_LIST_RUNS);
        self.runs.push(run);
        self.batch_runs += 1;
        self.part_runs += 1;
        self.batch_bytes += run.bytes;
    }

    /// Ends the last part of the next batch: what is added later may fail without it.
    pub fn end_part(&mut self) {
        if self.part_runs > 0 {
            self.parts.push_back(std::mem::take(&mut self.part_runs));
            self.marked += 1;
        }
    }

    /// Bytes of the next batch.
    pub fn batch_bytes(&self) -> usize {
        self.batch_bytes
    }

    /// The mark behind the copies that are added next.
    pub fn next_mark(&self) -> u64 {
        self.marked + 1
    }

    /// Ends the batch, and enqueues it now or when the copier takes more. Batches that wait are joined up to
    /// the length of a copier's list. From a GPU they are joined only up to a size that is worth a copy, since
    /// nothing of a batch is sent before all of it is copied.
    pub fn flush(&mut self) {
        if self.batch_runs == 0 {
            return;
        }
        self.end_part();
        self.flushed = self.marked;
        let next = Batch { mark: self.marked, runs: self.batch_runs, bytes: self.batch_bytes, alone: false };
        (self.batch_runs, self.batch_bytes) = (0, 0);
        let bytes_max = match self.way {
            Way::Out => limits::STAGING_BATCH_BYTES,
            Way::In => usize::MAX,
        };
        match self.held.back_mut() {
            Some(last)
                if !last.alone
                    && last.runs + next.runs <= limits::STAGING_LIST_RUNS
                    && last.bytes + next.bytes <= bytes_max =>
            {
                let (runs, bytes) = (last.runs + next.runs, last.bytes + next.bytes);
                *last = Batch { runs, bytes, ..next };
            }
            _ => self.held.push_back(next),
        }
        self.busy.set(true);
        self.enqueue();
    }

    /// Enqueues waiting batches, as far as the copier takes them. A copier that has failed takes none.
    fn enqueue(&mut self) {
        self.late.retain(|memory| memory.upgrade().is_some_and(|memory| memory.has_late_copies()));
        if !self.late.is_empty() {
            return;
        }
        while let Some(batch) = self.held.front().copied().filter(|_| self.failing.is_none()) {
            if self.flying.back().is_some_and(|last| last.alone || batch.alone) {
                return;
            }
            // A short batch at the front does not delay a long batch behind it.
            let bytes = self.held.iter().map(|batch| batch.bytes).sum();
            if self.copier.as_ref().is_some_and(|copier| !copier.takes_more(bytes)) {
                return;
            }
            self.held.pop_front();
            let made = self.make_copier();
            let first = self.done_runs + self.flying_runs;
            self.flying.push_back(batch);
            self.flying_runs += batch.runs;
            let runs = &self.runs[first..first + batch.runs];
            // SAFETY: promised by the callers of `add`; the copier is dropped before the memory of the ring.
            let copy = |copier: &mut Box<dyn Copier>| unsafe { copier.copy(runs, batch.mark) };
            match made.map(|()| self.copier.as_mut().map_or(Ok(()), copy)) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => self.fail(error),
                // The failure concerns every copy, whichever part it belongs to.
                Err(error) => self.lose(error, batch.mark),
            }
        }
    }

    /// Checks the progress of the copier. Returns true if copies have failed: then some marks are
    /// [lost](Pipeline::lost) until [`Pipeline::settle`].
    pub fn poll(&mut self) -> bool {
        if self.reached < self.flushed {
            let (reached, failed) = match (self.failing.take(), &mut self.copier) {
                // Nothing more is asked of it: it might begin the failed batch again.
                (Some(error), _) => (0, Some(error)),
                (None, Some(copier)) => copier.reached(),
                (None, None) => (0, None),
            };
            self.advance(reached);
            if let Some(error) = failed.filter(|_| !self.flying.is_empty()) {
                self.fail(error);
            }
            self.enqueue();
            self.busy.set(self.reached < self.flushed);
        }
        !self.failures.is_empty()
    }

    /// Notes that the batches up to this mark are copied, or lost.
    fn advance(&mut self, mark: u64) {
        while let Some(batch) = self.flying.pop_front_if(|batch| batch.mark <= mark) {
            self.flying_runs -= batch.runs;
            self.done_runs += batch.runs;
            self.parts.drain(..(batch.mark - self.reached) as usize);
            self.reached = batch.mark;
        }
        if self.done_runs == self.runs.len() {
            self.runs.clear();
            self.done_runs = 0;
        } else if self.done_runs > self.runs.len() / 2 {
            self.runs.drain(..std::mem::take(&mut self.done_runs));
        }
    }

    /// Drops the copier, which has failed. The parts that it had not copied are copied once more, each alone. While earlier
    /// copies of it run, a later poll does this: no thread waits for a GPU.
    fn fail(&mut self, error: Error) {
        if self.copier.as_mut().is_some_and(|copier| !copier.ends_within(Duration::ZERO)) {
            self.failing = Some(error);
            return;
        }
        if let Some(copier) = self.copier.take() {
            // Batches before the failed one are valid.
            let reached = copier.last_reached();
            self.past_calls += copier.calls();
            drop(copier);
            self.advance(reached);
        }
        let Some(last) = self.flying.back().copied() else { return };
        let parts = (last.mark - self.reached) as usize;
        if parts == 1 || is_of_the_gpu(&error) {
            return self.lose(error, last.mark);
        }
        tracing::debug!(%error, location = %self.location, parts, "copies between a GPU and host memory failed: each part is copied again, alone");
        let mut first = self.done_runs;
        let again: Vec<Batch> = (self.reached + 1..)
            .zip(self.parts.range(..parts))
            .map(|(mark, runs)| {
                let bytes = self.runs[first..first + runs].iter().map(|run| run.bytes).sum();
                first += runs;
                Batch { mark, runs: *runs, bytes, alone: true }
            })
            .collect();
        self.flying.clear();
        self.flying_runs = 0;
        again.into_iter().rev().for_each(|batch| self.held.push_front(batch));
    }

    /// Notes that the copies in flight, which end at this mark, are never done.
    fn lose(&mut self, error: Error, mark: u64) {
        tracing::warn!(%error, location = %self.location, "copies between a GPU and host memory failed: their transfers fail");
        self.failures.push((error, self.reached + 1..=mark));
        self.advance(mark);
    }

    /// Whether the copies before this mark are done.
    pub fn done(&self, mark: u64) -> bool {
        mark <= self.reached && self.lost(mark..=mark).is_none()
    }

    /// Why the copies before one of these marks are lost, if they are. Valid between [`Pipeline::poll`] and
    /// [`Pipeline::settle`].
    pub fn lost(&self, marks: RangeInclusive<u64>) -> Option<&Error> {
        let overlaps =
            |lost: &RangeInclusive<u64>| marks.start() <= lost.end() && lost.start() <= marks.end();
        self.failures.iter().find(|(_, lost)| overlaps(lost)).map(|(failure, _)| failure)
    }

    /// Whether copies are in flight, or a failure is not reported yet.
    pub fn copying(&self) -> bool {
        self.reached < self.flushed || !self.failures.is_empty()
    }

    /// Time during which copies were in flight so far.
    pub fn busy(&self) -> Duration {
        self.busy.total()
    }

    /// Number of driver calls.
    pub fn calls(&self) -> u64 {
        self.past_calls + self.copier.as_ref().map_or(0, |copier| copier.calls())
    }

    /// Forgets the failures, which were reported to all lost copies. Other copies continue.
    pub fn settle(&mut self) {
        self.failures.clear();
    }

    /// The last failure of a copy that is not reported yet.
    pub fn failure(&self) -> Option<&Error> {
        self.failures.last().map(|(failure, _)| failure)
    }

    /// Ends all copying. After this nothing touches the memory that was passed here, except where the result is
    /// not `None`.
    #[must_use = "what the GPU may still touch has to be kept"]
    pub fn end(&mut self) -> Option<Unfinished> {
        self.end_within(limits::GPU_END_TIMEOUT)
    }

    /// As [`Pipeline::end`], and waits for the GPU at most `timeout`.
    #[must_use = "what the GPU may still touch has to be kept"]
    pub fn end_within(&mut self, timeout: Duration) -> Option<Unfinished> {
        self.past_calls = self.calls();
        self.failing = None;
        let copier = self.copier.take().map(|mut copier| (copier.ends_within(timeout), copier));
        let copier = copier.and_then(|(ended, copier)| (!ended).then_some(copier));
        let unfinished = copier.map(|copier| {
            self.keep_lent_pages();
            Unfinished { copier, _pinned: self.pinned.take(), location: self.location }
        });
        self.end_part();
        self.runs.clear();
        self.parts.clear();
        self.flying.clear();
        self.held.clear();
        self.late.clear();
        (self.done_runs, self.flying_runs, self.batch_runs, self.batch_bytes) = (0, 0, 0, 0);
        (self.flushed, self.reached) = (self.marked, self.marked);
        self.busy.set(false);
        unfinished
    }

    /// A socket may still read lent pages, whatever the peer has acknowledged. So these pages are returned to
    /// the system, which keeps them while they are read. Pages that were not lent are read by no socket.
    fn keep_lent_pages(&mut self) {
        if let Some(Pinned::Cuda(buffer)) = self.pinned.as_mut().filter(|_| self.lent) {
            buffer.prevent_reuse();
        }
    }
}

/// A copier whose work the GPU has not finished, and the ring that it copies from or to.
pub(crate) struct Unfinished {
    /// The copier. Dropped before the ring.
    copier: Box<dyn Copier>,
    _pinned: Option<Pinned>,
    pub location: MemoryLocation,
}

impl Unfinished {
    /// Waits until the copies have ended; see [`Copier::finish`].
    pub fn finish(&mut self) -> bool {
        self.copier.finish()
    }
}

/// Whether every later call for the GPU fails too.
fn is_of_the_gpu(error: &Error) -> bool {
    matches!(error, Error::Cuda(error) if error.loses_context())
}

/// A copier whose every copy fails.
#[cfg(test)]
struct Broken;

#[cfg(test)]
impl Copier for Broken {
    unsafe fn copy(&mut self, _runs: &[Run], _mark: u64) -> Result<()> {
        Err(Error::Internal("the copier is broken".into()))
    }

    fn reached(&mut self) -> (u64, Option<Error>) {
        (0, None)
    }

    fn last_reached(&self) -> u64 {
        0
    }

    fn calls(&self) -> u64 {
        0
    }
}

#[cfg(test)]
impl Pipeline {
    /// Makes the next batch fail.
    pub fn break_copier(&mut self) {
        self.replace_copier(Box::new(Broken));
    }

    /// Makes this copier copy the next batches.
    pub fn replace_copier(&mut self, copier: Box<dyn Copier>) {
        self.copier = Some(copier);
    }

    /// Batches that are not copied.
    pub fn batches(&self) -> usize {
        self.flying.len() + self.held.len()
    }
}

/// Creates a copier of a GPU that is open. For set-up only: the call may wait for the GPU.
///
/// # Errors
/// The GPU is not open, or the driver's error.
pub(super) fn copier(location: MemoryLocation, way: Way) -> Result<Box<dyn Copier>> {
    match Gpu::opened(location)? {
        Gpu::Sim(gpu) => Ok(Box::new(SimCopier::new(gpu.stream(), way))),
        Gpu::Cuda(gpu) => Ok(Box::new(CudaCopier::new(&gpu, way)?)),
    }
}

#[cfg(test)]
mod tests;
