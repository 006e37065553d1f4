//! Waking a thread that is about to sleep in the kernel: `Sleeper::rouse` against `Sleeper::sleep`.

use crate::core::sleeper::{Activity, Sleeper};
use crate::core::sync::{AtomicUsize, Poller};
use crate::{check, check_bounded};
use loom::thread;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

/// A worker whose work is a number.
struct Worker {
    poller: Poller,
    sleeper: Sleeper,
    posted: AtomicUsize,
}

impl Worker {
    fn new() -> Arc<Worker> {
        let poller = Poller::default();
        let sleeper = Sleeper::new(0, poller.waker(), true);
        Arc::new(Worker { poller, sleeper, posted: AtomicUsize::new(0) })
    }

    fn post(&self) {
        self.posted.fetch_add(1, SeqCst);
        self.sleeper.rouse();
    }

    fn has_more_than(&self, taken: usize) -> bool {
        self.posted.load(SeqCst) > taken
    }
}

/// Whatever is posted is taken: the worker's thread sees it before it sleeps, or is woken.
#[test]
fn a_thread_that_is_about_to_sleep_takes_all_that_is_posted() {
    check(|| {
        let worker = Worker::new();
        let thread = {
            let worker = worker.clone();
            thread::spawn(move || {
                let mut taken = 0;
                while taken < 2 {
                    worker.sleeper.sleep((), |()| worker.has_more_than(taken), |()| worker.poller.wait());
                    taken = worker.posted.load(SeqCst);
                }
            })
        };
        worker.post();
        worker.post();
        thread.join().unwrap();
        assert_eq!(worker.sleeper.activity(), Activity::Running);
    });
}

/// No wake-up is lost when two threads post at once.
#[test]
fn a_thread_that_is_about_to_sleep_takes_what_two_others_post() {
    check_bounded(3, || {
        let worker = Worker::new();
        let posting = {
            let worker = worker.clone();
            thread::spawn(move || worker.post())
        };
        let thread = {
            let worker = worker.clone();
            thread::spawn(move || {
                let mut taken = 0;
                while taken < 2 {
                    worker.sleeper.sleep((), |()| worker.has_more_than(taken), |()| worker.poller.wait());
                    taken = worker.posted.load(SeqCst);
                }
            })
        };
        worker.post();
        posting.join().unwrap();
        thread.join().unwrap();
    });
}

/// A caller that sleeps on the worker's sockets is woken as the thread would be.
#[test]
fn an_owner_that_is_about_to_sleep_takes_what_is_posted() {
    check(|| {
        let worker = Worker::new();
        worker.sleeper.set_activity(Activity::Parked);
        worker.sleeper.begin_drive();
        let owner = {
            let worker = worker.clone();
            thread::spawn(move || {
                worker.sleeper.sleep_as_owner((), |()| worker.has_more_than(0), |()| worker.poller.wait());
                assert!(worker.has_more_than(0), "it was woken for nothing");
            })
        };
        worker.post();
        owner.join().unwrap();
    });
}
