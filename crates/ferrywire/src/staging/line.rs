//! What one channel has for one GPU and one direction: a ring of pinned memory, and a copier.
//!
//! Both are made when they are first needed, and kept as long as the channel. A copier that fails is
//! thrown away, and the next copy gets a new one; the ring stays, since some of it may still be in use.
//!
//! Invariant: copies that a thrown away copier had not done will not be done. Read next: `sending.rs`,
//! `receiving.rs`.

use super::copier::{self, Copier, Pinned, Run, Way};
use super::ring::Ring;
use super::stopwatch::Stopwatch;
use crate::error::{Error, Result};
use crate::limits;
use crate::memory::Place;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

pub(super) struct Line {
    /// Dropped before the memory that it copies from or to.
    copier: Option<Box<dyn Copier>>,
    pinned: Option<Pinned>,
    pub place: Place,
    way: Way,
    pub ring: Ring,
    batch: Vec<Run>,
    batch_bytes: usize,
    marked: u64,
    reached: u64,
    /// How long copies were under way.
    busy: Stopwatch,
    /// Calls of copiers that were thrown away.
    past_calls: u64,
    /// Why the copier failed, until that was told.
    failure: Option<Error>,
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

impl Drop for Line {
    fn drop(&mut self) {
        RINGS_BYTES.fetch_sub(self.ring.len(), Ordering::Relaxed);
        self.copier = None;
        // A socket may still read there: the pages go back to the system, which keeps them until it has.
        if let Some(Pinned::Cuda(buffer)) = self.pinned.as_mut().filter(|_| !self.ring.is_empty()) {
            buffer.use_never_again();
        }
    }
}

impl Line {
    /// In numbers only; see [`Line::prepare`].
    pub fn new(place: Place, way: Way) -> Line {
        Line {
            copier: None,
            pinned: None,
            place,
            way,
            ring: Ring::new(ring_bytes(way)),
            batch: Vec::new(),
            batch_bytes: 0,
            marked: 0,
            reached: 0,
            busy: Stopwatch::default(),
            past_calls: 0,
            failure: None,
        }
    }

    /// Makes what is missing; gives the address of the ring.
    pub fn prepare(&mut self) -> Result<usize> {
        if self.pinned.is_none() {
            self.pinned = Some(copier::pinned(self.place, self.ring.len())?);
        }
        if self.copier.is_none() && self.failure.is_none() {
            self.copier = Some(copier::copier(self.place, self.way)?);
        }
        Ok(self.base())
    }

    /// The address of the ring, which has been prepared.
    pub fn base(&self) -> usize {
        self.pinned.as_ref().map_or(0, Pinned::base)
    }

    /// Bytes of pinned memory that it holds.
    pub fn pinned_bytes(&self) -> usize {
        if self.pinned.is_some() { self.ring.len() } else { 0 }
    }

    /// Adds a copy to the next batch.
    ///
    /// # Safety
    /// What [`Copier::copy`] demands of a run, from now on.
    pub unsafe fn add(&mut self, run: Run) {
        self.batch.push(run);
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

    /// Enqueues the batch, with a mark behind it.
    pub fn flush(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        self.marked += 1;
        self.batch_bytes = 0;
        let Some(copier) = &mut self.copier else { return self.batch.clear() };
        // SAFETY: by the promises of `add`; the copier is dropped before the memory of the ring.
        let enqueued = unsafe { copier.copy(&self.batch, self.marked) };
        self.batch.clear();
        self.busy.set(true);
        if let Err(error) = enqueued {
            self.fail(error);
        }
    }

    /// Looks how far the copier has come. True if it has failed: then every mark that is not reached never
    /// will be, until [`Line::settle`].
    pub fn look(&mut self) -> bool {
        if let Some(copier) = self.copier.as_mut().filter(|_| self.reached < self.marked) {
            let (reached, failed) = copier.reached();
            self.reached = self.reached.max(reached);
            if let Some(error) = failed.filter(|_| self.reached < self.marked) {
                self.fail(error);
            }
            self.busy.set(self.reached < self.marked);
        }
        self.failure.is_some()
    }

    fn fail(&mut self, error: Error) {
        if let Some(mut copier) = self.copier.take() {
            // The batches before the one that failed are as good as ever.
            self.reached = self.reached.max(copier.stop());
            self.past_calls += copier.calls();
        }
        tracing::warn!(%error, place = %self.place, "copying between a GPU and the host failed");
        self.failure.get_or_insert(error);
    }

    /// Whether the copies before a mark are done.
    pub fn done(&self, mark: u64) -> bool {
        mark <= self.reached
    }

    /// Whether copies are under way, or a failure of theirs is not told yet.
    pub fn copying(&self) -> bool {
        self.reached < self.marked || self.failure.is_some()
    }

    /// How long copies were under way so far.
    pub fn busy(&self) -> Duration {
        self.busy.total()
    }

    /// How often the driver was called for them.
    pub fn calls(&self) -> u64 {
        self.past_calls + self.copier.as_ref().map_or(0, |copier| copier.calls())
    }

    /// The failure has been told to all whose copies were not done: gives it, and starts afresh.
    pub fn settle(&mut self) -> Option<Error> {
        let failure = self.failure.take()?;
        if !self.batch.is_empty() {
            // Their mark is told as well, and never given again.
            self.marked += 1;
            self.batch.clear();
            self.batch_bytes = 0;
        }
        self.reached = self.marked;
        self.busy.set(false);
        Some(failure)
    }

    /// Why the copier has failed, if it has.
    pub fn failure(&self) -> Option<&Error> {
        self.failure.as_ref()
    }

    /// Ends all copying: when this returns, nothing touches the memory that was named here.
    pub fn end(&mut self) {
        self.past_calls = self.calls();
        self.copier = None;
        self.reached = self.marked;
        self.busy.set(false);
    }
}
