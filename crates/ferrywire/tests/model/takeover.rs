//! A caller takes a worker's channels over and gives them back: `Sleeper::begin_drive`, `sleep_as_owner` and `end_drive`,
//! against the worker's thread and a thread that posts.

use crate::core::sleeper::{Activity, Sleeper};
use crate::core::sync::{AtomicUsize, Poller, Thread};
use crate::{check, check_bounded};
use loom::sync::{Mutex, MutexGuard};
use loom::thread;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

/// A worker whose channels have one thing to do at most.
struct Worker {
    poller: Poller,
    sleeper: Sleeper,
    channels: Mutex<()>,
    posted: AtomicUsize,
    taken: AtomicUsize,
}

impl Worker {
    fn new(activity: Activity) -> Arc<Worker> {
        let poller = Poller::default();
        let sleeper = Sleeper::new(0, poller.waker(), true);
        sleeper.set_activity(activity);
        Arc::new(Worker {
            poller,
            sleeper,
            channels: Mutex::new(()),
            posted: AtomicUsize::new(0),
            taken: AtomicUsize::new(0),
        })
    }

    fn has_work(&self) -> bool {
        self.posted.load(SeqCst) > self.taken.load(SeqCst)
    }

    fn is_done(&self) -> bool {
        self.taken.load(SeqCst) == 1
    }

    /// Does what there is to do; true if that was anything.
    fn take(&self, _channels: &MutexGuard<'_, ()>) -> bool {
        let has_work = self.has_work();
        if has_work {
            self.taken.store(1, SeqCst);
        }
        has_work
    }

    /// One pause of the parked thread.
    fn pause(&self) {
        self.sleeper.pause(|long| if long { Thread::park() } else { thread::yield_now() });
    }

    /// The thread, as `core/worker/mod.rs` has it: sleeps in the kernel, or parks while a caller has the channels.
    fn run(&self) {
        self.sleeper.set_thread(Thread::current());
        while !self.is_done() {
            let Ok(channels) = self.channels.try_lock() else {
                self.sleeper.set_activity(Activity::Parked);
                self.pause();
                self.sleeper.set_activity(Activity::Running);
                continue;
            };
            if self.take(&channels) {
                break;
            }
            self.sleeper.sleep(
                channels,
                |_| self.has_work(),
                |channels| {
                    drop(channels);
                    self.poller.wait();
                },
            );
        }
    }

    /// Runs the thread while it is parked: polls after each pause.
    fn run_parked(&self) {
        self.sleeper.set_thread(Thread::current());
        self.sleeper.set_activity(Activity::Parked);
        while !self.is_done() {
            self.pause();
            if let Ok(channels) = self.channels.try_lock() {
                self.take(&channels);
            }
        }
    }

    /// A caller that polls once. True if it did what was to do.
    fn poll_once(&self, work_is_in_a_channel: bool) -> bool {
        let Ok(channels) = self.channels.try_lock() else { return false };
        self.sleeper.begin_drive();
        let took = self.take(&channels);
        // May take a wake that was meant for the thread.
        self.poller.poll();
        self.sleeper.end_drive(
            channels,
            |_| work_is_in_a_channel && self.has_work(),
            || !work_is_in_a_channel && self.has_work(),
        );
        took
    }
}

/// While a caller polls and takes wakes, what is posted is done all the same: by the caller, or by the thread, which the
/// caller wakes in place of the thread that posted.
fn work_is_done_when_a_caller_takes_the_wake(work_is_in_a_channel: bool) {
    check_bounded(3, move || {
        let worker = Worker::new(Activity::Running);
        let run = {
            let worker = worker.clone();
            thread::spawn(move || worker.run())
        };
        let caller = {
            let worker = worker.clone();
            thread::spawn(move || worker.poll_once(work_is_in_a_channel))
        };
        worker.posted.store(1, SeqCst);
        worker.sleeper.rouse();
        if caller.join().unwrap() {
            // Nothing is left for the thread, which may sleep for ever.
            worker.sleeper.wake();
        }
        run.join().unwrap();
        assert!(worker.is_done());
    });
}

#[test]
fn a_wake_that_a_caller_took_is_passed_on_when_a_channel_has_work() {
    work_is_done_when_a_caller_takes_the_wake(true);
}

#[test]
fn a_wake_that_a_caller_took_is_passed_on_when_there_is_a_command() {
    work_is_done_when_a_caller_takes_the_wake(false);
}

/// The thread pauses for long only while a caller sleeps on the sockets in its place: the caller that leaves ends the pause.
#[test]
fn a_long_pause_ends_when_the_owner_leaves() {
    check(|| {
        let worker = Worker::new(Activity::Running);
        let parked = {
            let worker = worker.clone();
            thread::spawn(move || {
                worker.sleeper.set_thread(Thread::current());
                worker.sleeper.set_activity(Activity::Parked);
                worker.pause();
            })
        };
        worker.sleeper.begin_drive();
        worker.sleeper.sleep_as_owner((), |()| false, |()| {});
        worker.sleeper.end_drive((), |()| false, || false);
        parked.join().unwrap();
    });
}

/// Work left to a caller with inline progress is done by that caller, however soon it sleeps, or by the parked thread.
#[test]
fn work_left_for_a_caller_is_done() {
    check_bounded(3, || {
        let worker = Worker::new(Activity::Parked);
        let parked = {
            let worker = worker.clone();
            thread::spawn(move || worker.run_parked())
        };
        let caller = {
            let worker = worker.clone();
            thread::spawn(move || {
                let Ok(mut channels) = worker.channels.try_lock() else { return };
                worker.sleeper.begin_drive();
                let has_work = |_: &_| worker.has_work() || worker.is_done();
                worker.sleeper.sleep_as_owner(&mut channels, has_work, |_| worker.poller.wait());
                worker.take(&channels);
                worker.sleeper.end_drive(channels, |_| worker.has_work(), || false);
            })
        };
        worker.posted.store(1, SeqCst);
        if !worker.sleeper.may_leave_behind() {
            worker.sleeper.rouse();
        }
        caller.join().unwrap();
        parked.join().unwrap();
        assert!(worker.is_done());
    });
}
