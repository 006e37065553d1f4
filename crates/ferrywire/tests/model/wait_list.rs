//! Lists of those who wait: `WaitList::add` and `remove` against `wake`.

use crate::core::sleeper::Sleeper;
use crate::core::sync::{AtomicBool, Poller, Thread, Wake};
use crate::core::waiting::{WaitList, WakeHandle};
use crate::{check, check_bounded};
use loom::thread;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Weak};

/// Something that happens once, and those who wait for it.
#[derive(Default)]
struct Event {
    has_happened: AtomicBool,
    waiters: WaitList,
}

impl Event {
    fn happen(&self) {
        self.has_happened.store(true, SeqCst);
        self.waiters.wake();
    }

    /// As `Op::ended` and `Op::outcome` ask. With an `Acquire` load the owner below would sleep on.
    fn has_happened(&self) -> bool {
        self.has_happened.load(SeqCst)
    }

    fn wake(&self, handle: WakeHandle) {
        self.waiters.add(handle, || self.has_happened());
    }
}

/// A thread that parks once it is on the list is woken, however the event and the call fall together.
#[test]
fn each_thread_on_a_list_is_woken() {
    check_bounded(3, || {
        let event = Arc::new(Event::default());
        let waiting = [(); 2].map(|()| {
            let event = event.clone();
            thread::spawn(move || {
                event.wake(WakeHandle::Thread(Thread::current()));
                Thread::park();
                assert!(event.has_happened(), "it was woken for nothing");
            })
        });
        event.happen();
        waiting.into_iter().for_each(|waiting| waiting.join().unwrap());
    });
}

/// A descriptor on the list becomes readable, although no thread polls the event itself.
#[test]
fn a_descriptor_on_a_list_becomes_readable() {
    check(|| {
        let event = Arc::new(Event::default());
        let waiting = {
            let event = event.clone();
            thread::spawn(move || {
                let wake = Arc::new(Wake::default());
                event.wake(WakeHandle::Descriptor { wake: Arc::downgrade(&wake), _passive: None });
                wake.wait();
                assert!(event.has_happened(), "it was woken for nothing");
            })
        };
        event.happen();
        waiting.join().unwrap();
    });
}

/// A caller that puts itself on the list and then sleeps on a worker's sockets is woken, or does not fall asleep.
#[test]
fn an_owner_on_a_list_is_woken() {
    check(|| {
        let event = Arc::new(Event::default());
        let waiting = {
            let event = event.clone();
            thread::spawn(move || {
                let poller = Poller::default();
                let sleeper = Arc::new(Sleeper::new(0, poller.waker(), false));
                event.wake(WakeHandle::Owner(sleeper.clone()));
                sleeper.sleep_as_owner((), |()| event.has_happened(), |()| poller.wait());
                assert!(event.has_happened(), "it was woken for nothing");
            })
        };
        event.happen();
        waiting.join().unwrap();
    });
}

/// One that takes itself off the list costs no other its wake.
#[test]
fn one_that_leaves_a_list_costs_no_other_its_wake() {
    check_bounded(3, || {
        let event = Arc::new(Event::default());
        let waiting = {
            let event = event.clone();
            thread::spawn(move || {
                event.wake(WakeHandle::Thread(Thread::current()));
                Thread::park();
            })
        };
        let leaving = {
            let event = event.clone();
            thread::spawn(move || {
                // A descriptor that is gone already is taken off by the next that comes.
                event.wake(WakeHandle::Descriptor { wake: Weak::new(), _passive: None });
                let handle = WakeHandle::Thread(Thread::current());
                event.wake(handle.clone());
                event.waiters.remove(&handle);
            })
        };
        event.happen();
        leaving.join().unwrap();
        waiting.join().unwrap();
    });
}
