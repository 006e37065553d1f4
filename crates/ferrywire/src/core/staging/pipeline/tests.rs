//! Tests of a pipeline with a copier that fails, hangs and is full as they ask.

use super::*;
use ferrywire_memory::cuda::{CudaError, Failure};
use std::sync::{Arc, Mutex, PoisonError};

/// The batches that a copier was given, and its progress: one batch at a time.
#[derive(Default)]
struct Seen {
    batches: Vec<(u64, usize)>,
    reached: u64,
    fails: bool,
    refuses: bool,
    loses_context: bool,
    /// Its work does not end.
    hangs: bool,
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
            return Err(Error::Internal("the copier refuses the copy".into()));
        }
        self.seen().batches.push((mark, runs.len()));
        Ok(())
    }

    fn reached(&mut self) -> (u64, Option<Error>) {
        let seen = self.seen();
        let lost = || {
            let (call, name, text) =
                ("cuStreamQuery", "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure");
            let failure = Failure { call, gpu: None, bytes: None, code: 719, name, text };
            Error::Cuda(CudaError::Call { failure })
        };
        let failed = seen.fails.then(|| Error::Internal("the copier fails".into()));
        (seen.reached, failed.or_else(|| seen.loses_context.then(lost)))
    }

    fn takes_more(&self, _bytes: usize) -> bool {
        let seen = self.seen();
        seen.batches.last().is_none_or(|(mark, _)| *mark <= seen.reached)
    }

    fn last_reached(&self) -> u64 {
        assert!(!self.seen().hangs, "the GPU may still copy");
        self.seen().reached
    }

    fn ends_within(&mut self, _timeout: Duration) -> bool {
        !self.seen().hangs
    }

    fn finish(&mut self) -> bool {
        !self.seen().hangs
    }

    fn calls(&self) -> u64 {
        0
    }
}

fn scene(way: Way) -> (Pipeline, Arc<Mutex<Seen>>) {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let mut line = Pipeline::new(MemoryLocation::SimGpu(0), way, Row::default());
    line.copier = Some(Box::new(OneByOne(seen.clone())));
    (line, seen)
}

fn add(line: &mut Pipeline, runs: usize) {
    for _ in 0..runs {
        // SAFETY: nothing is copied in this test.
        unsafe { line.add(Run { host: 0, device: 0, bytes: 1 }) };
    }
}

#[test]
fn batches_flushed_while_a_copier_is_full_become_one() {
    let (mut line, seen) = scene(Way::In);
    for runs in [1, 2, 3] {
        add(&mut line, runs);
        line.flush();
    }
    assert_eq!((line.next_mark(), line.batch_bytes()), (4, 0));
    assert!(!line.poll() && line.copying());
    seen.lock().unwrap().reached = 1;
    assert!(!line.poll() && line.done(1) && !line.done(2) && line.copying());
    assert_eq!(seen.lock().unwrap().batches, [(1, 1), (3, 5)]);
    seen.lock().unwrap().reached = 3;
    assert!(!line.poll() && line.done(3) && !line.copying());
}

/// Short parts may wait for more: the caller decides when to flush.
#[test]
fn unflushed_parts_are_not_copied_with_deferred_ones() {
    let (mut line, seen) = scene(Way::In);
    add(&mut line, 1);
    line.flush();
    add(&mut line, 1);
    seen.lock().unwrap().reached = 1;
    line.poll();
    assert!(!line.copying());
    assert_eq!((line.batch_bytes(), seen.lock().unwrap().batches.len()), (1, 1));
}

/// Batches are joined only up to the length of a list: a kernel's list is bounded, and copy engines need
/// a driver call for each run.
#[test]
fn batches_that_waited_are_one_only_as_far_as_a_list_goes() {
    let (mut line, seen) = scene(Way::In);
    for runs in [1, limits::STAGING_LIST_RUNS - 1, 1, limits::STAGING_LIST_RUNS] {
        add(&mut line, runs);
        line.flush();
    }
    for reached in [1, 3, 4] {
        seen.lock().unwrap().reached = reached;
        line.poll();
    }
    let list = limits::STAGING_LIST_RUNS;
    assert_eq!(seen.lock().unwrap().batches, [(1, 1), (3, list), (4, list)]);
}

/// Batches from a GPU stay short, because nothing of a batch is sent before all of it is copied.
#[test]
fn batches_from_a_gpu_that_waited_are_one_only_until_that_is_worth_a_copy() {
    let (mut line, seen) = scene(Way::Out);
    let part = limits::STAGING_BATCH_BYTES / 2;
    for bytes in [1, part, part, part, 4 * part] {
        // SAFETY: nothing is copied in this test.
        unsafe { line.add(Run { host: 0, device: 0, bytes }) };
        line.flush();
    }
    for reached in [1, 3, 4, 5] {
        seen.lock().unwrap().reached = reached;
        line.poll();
    }
    assert_eq!(seen.lock().unwrap().batches, [(1, 1), (3, 2), (4, 1), (5, 1)]);
}

/// Makes the pipeline use this copier next.
fn spare(line: &mut Pipeline, seen: Seen) -> Arc<Mutex<Seen>> {
    let seen = Arc::new(Mutex::new(seen));
    line.spare.push_back(Box::new(OneByOne(seen.clone())));
    seen
}

/// Regression: copies that waited for a copier that failed, or were added later, failed with it.
#[test]
fn parts_that_wait_behind_failed_copies_are_copied() {
    let (mut line, seen) = scene(Way::In);
    for _ in 0..2 {
        add(&mut line, 1);
        line.flush();
    }
    add(&mut line, 1);
    let next = spare(&mut line, Seen::default());
    seen.lock().unwrap().fails = true;
    assert!(line.poll() && line.copying() && !line.done(1));
    line.settle();
    assert_eq!((&next.lock().unwrap().batches[..], line.batch_bytes()), (&[(2, 1)][..], 1));
    next.lock().unwrap().reached = 2;
    line.flush();
    next.lock().unwrap().reached = 3;
    assert!(!line.poll() && line.done(2));
    assert!(!line.poll() && line.done(3) && !line.copying());
}

fn fails_and_hangs(seen: &Mutex<Seen>) {
    let mut seen = seen.lock().unwrap();
    (seen.fails, seen.hangs) = (true, true);
}

/// The worker used to wait for them, however long the GPU took, and all its channels with it.
#[test]
fn copies_before_a_failed_one_are_not_waited_for() {
    let (mut line, seen) = scene(Way::Out);
    add(&mut line, 1);
    line.flush();
    fails_and_hangs(&seen);
    let next = spare(&mut line, Seen::default());
    add(&mut line, 1);
    line.flush();
    for _ in 0..3 {
        assert!(!line.poll() && line.copying() && !line.done(1), "the GPU may still copy");
    }
    seen.lock().unwrap().hangs = false;
    assert!(line.poll() && line.lost(1..=1).is_some());
    line.settle();
    assert_eq!(next.lock().unwrap().batches, [(2, 1)]);
    next.lock().unwrap().reached = 2;
    assert!(!line.poll() && line.done(2) && !line.copying());
}

/// The copies may still touch the ring and the memory when the channel ends.
#[test]
fn a_failed_copier_whose_copies_hang_is_kept_when_its_channel_ends() {
    let (mut line, seen) = scene(Way::Out);
    add(&mut line, 1);
    line.flush();
    fails_and_hangs(&seen);
    assert!(!line.poll() && line.end().is_some() && !line.copying());
    let next = spare(&mut line, Seen::default());
    add(&mut line, 1);
    line.flush();
    assert_eq!(next.lock().unwrap().batches.len(), 1, "the failure was the dropped copier's");
}

/// Regression: the copier was dropped, and its ring reused, as if the copies had ended.
#[test]
fn a_copier_whose_end_cannot_be_known_is_not_dropped_with_its_pipeline() {
    for hangs in [false, true] {
        let (line, seen) = scene(Way::Out);
        seen.lock().unwrap().hangs = hangs;
        drop(line);
        assert_eq!(Arc::strong_count(&seen), if hangs { 2 } else { 1 });
    }
}

/// The address of a run that cannot be copied.
const BAD: u64 = 13;

/// A copier that copies everything at once, except a batch with a bad run.
struct Picky {
    seen: Arc<Mutex<Vec<(u64, usize)>>>,
    /// Whether `copy` reports the failure, not a later `reached`.
    at_once: bool,
    reached: u64,
    failed: bool,
}

impl Copier for Picky {
    unsafe fn copy(&mut self, runs: &[Run], mark: u64) -> Result<()> {
        self.seen.lock().unwrap().push((mark, runs.len()));
        self.failed |= runs.iter().any(|run| run.device == BAD);
        match self.failed {
            true if self.at_once => return Err(Error::Internal("the run is bad".into())),
            true => {}
            false => self.reached = mark,
        }
        Ok(())
    }

    fn reached(&mut self) -> (u64, Option<Error>) {
        (self.reached, self.failed.then(|| Error::Internal("the run was bad".into())))
    }

    fn last_reached(&self) -> u64 {
        self.reached
    }

    fn calls(&self) -> u64 {
        0
    }
}

/// Regression: operations whose short copies were one batch, or followed each other, failed together.
#[test]
fn a_part_that_fails_among_others_is_lost_alone() {
    for at_once in [true, false] {
        let (mut line, _) = scene(Way::Out);
        line.copier = None;
        let seen: Arc<Mutex<Vec<_>>> = Arc::default();
        let picky = || Picky { seen: seen.clone(), at_once, reached: 0, failed: false };
        line.spare.extend((0..3).map(|_| Box::new(picky()) as Box<dyn Copier>));
        for (runs, device) in [(1, 0), (2, BAD), (3, 0)] {
            // SAFETY: nothing is copied in this test.
            (0..runs).for_each(|_| unsafe { line.add(Run { host: 0, device, bytes: 1 }) });
            line.end_part();
        }
        line.flush();
        add(&mut line, 4);
        line.flush();
        let mut lost = Vec::new();
        while line.copying() {
            line.poll();
            lost.extend((1..=4).filter(|mark| line.lost(*mark..=*mark).is_some()));
            line.settle();
        }
        assert_eq!((lost, line.reached), (vec![2], 4));
        let mut seen = seen.lock().unwrap().clone();
        // The failure before this batch is not reported yet.
        seen.retain(|batch| *batch != (4, 4));
        assert_eq!(seen, [(3, 6), (1, 1), (2, 2), (3, 3)]);
        assert!(line.runs.is_empty() && line.parts.is_empty() && line.spare.is_empty());
    }
}

/// After the loss of the context no copy can succeed, so none is repeated.
#[test]
fn a_lost_context_loses_all_copies_in_flight() {
    let (mut line, seen) = scene(Way::Out);
    for _ in 0..2 {
        add(&mut line, 1);
        line.end_part();
    }
    let again = spare(&mut line, Seen::default());
    line.flush();
    seen.lock().unwrap().loses_context = true;
    assert!(line.poll() && line.lost(1..=1).is_some() && line.lost(2..=2).is_some());
    line.settle();
    assert!(!line.copying() && again.lock().unwrap().batches.is_empty());
}

/// Regression: parts that were added before a failure was reported failed with the error of another
/// copier.
#[test]
fn parts_added_before_a_failure_is_reported_are_for_the_next_copier() {
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
    assert!(line.poll() && !line.done(1) && line.done(2));
    line.settle();
    assert!(line.done(2) && !line.copying());
    // This time the failure is not reported in between.
    line.break_copier();
    add(&mut line, 1);
    line.flush();
    line.settle();
    let (other, seen) = scene(Way::In);
    line.copier = { other }.copier.take();
    add(&mut line, 1);
    line.flush();
    assert!(!line.poll() && line.copying() && !line.done(4));
    seen.lock().unwrap().reached = 4;
    assert!(!line.poll() && line.done(4) && !line.copying());
}

/// Regression: a copy between two failures was given up with the failed ones, with the first error.
#[test]
fn copies_between_two_failures_that_are_reported_together_have_not_failed() {
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
    assert!(line.poll() && line.copying());
    assert_eq!([1, 2, 3].map(|mark| line.done(mark)), [false, true, false]);
    line.settle();
    assert!(!line.poll() && !line.copying());
}
