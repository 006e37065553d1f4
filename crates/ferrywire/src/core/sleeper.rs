//! How a worker's thread sleeps, and how other threads wake it.
//!
//! A worker's thread is `running`, `in poll` (asleep in the kernel on its sockets), or `parked` (asleep, while callers poll the
//! worker's channels inline). A caller that polls inline may itself sleep in the kernel on the worker's sockets.
//!
//! Invariant: after [`Sleeper::rouse`] some thread checks the worker's channels. What was posted before the call is
//! seen by that check, since the sleeping side announces its state before it checks for work a last time.
//! `tests/model` checks it with loom.
//! Read next: `worker/mod.rs`, the thread; `worker/inline.rs`, callers that poll.

use super::sync::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Thread, Waker};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

/// The state of a worker's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Activity {
    /// The thread polls its channels, or is about to.
    Running,
    /// The thread sleeps in the kernel, or is about to; the waker ends the sleep.
    InPoll,
    /// The thread leaves polling to callers, and checks now and then.
    Parked,
    /// The thread has ended, or was never started: callers poll everything.
    NoThread,
}

const ACTIVITIES: [Activity; 4] = [Activity::Running, Activity::InPoll, Activity::Parked, Activity::NoThread];

/// The part of a worker that other threads use to wake it. It has no channels and takes no lock.
pub(crate) struct Sleeper {
    /// The worker's number.
    pub index: usize,
    waker: Waker,
    activity: AtomicU8,
    /// Whether a caller that polls inline sleeps in the kernel on the worker's sockets.
    pub owner_asleep: AtomicBool,
    /// Whether the parked thread checks rarely, because a caller sleeps as the owner.
    long_park: AtomicBool,
    /// Whether a caller polls inline.
    driven_by_caller: AtomicBool,
    passive_waiters: AtomicU32,
    /// Whether the thread sleeps without a timeout.
    pub dozes: AtomicBool,
    thread: OnceLock<Thread>,
    /// Number of the worker's channels that have lanes.
    lanes: AtomicUsize,
    /// Whether the thread is asked to pin itself to its core at its next pass.
    to_pin: AtomicBool,
}

impl Sleeper {
    pub fn new(index: usize, waker: Waker, threaded: bool) -> Sleeper {
        let activity = if threaded { Activity::Running } else { Activity::NoThread };
        Sleeper {
            index,
            waker,
            activity: AtomicU8::new(activity as u8),
            owner_asleep: AtomicBool::new(false),
            long_park: AtomicBool::new(false),
            driven_by_caller: AtomicBool::new(false),
            passive_waiters: AtomicU32::new(0),
            dozes: AtomicBool::new(false),
            thread: OnceLock::new(),
            lanes: AtomicUsize::new(0),
            to_pin: AtomicBool::new(false),
        }
    }

    pub fn activity(&self) -> Activity {
        ACTIVITIES[usize::from(self.activity.load(Ordering::SeqCst))]
    }

    pub fn set_activity(&self, activity: Activity) {
        self.activity.store(activity as u8, Ordering::SeqCst);
    }

    /// Sets the worker's thread.
    pub fn set_thread(&self, thread: Thread) {
        let _ = self.thread.set(thread);
    }

    /// Lets the worker's thread sleep in the kernel by `wait`, unless there is work. A thread that posts
    /// afterwards ends the sleep. `wait` takes the channels and may release them.
    pub fn sleep<C>(&self, channels: C, has_work: impl FnOnce(&C) -> bool, wait: impl FnOnce(C)) {
        self.set_activity(Activity::InPoll);
        if !has_work(&channels) {
            wait(channels);
        }
        self.set_activity(Activity::Running);
    }

    /// Lets a caller that polls inline sleep by `wait`. The caller keeps the channels.
    pub fn sleep_as_owner<C>(&self, channels: C, has_work: impl FnOnce(&C) -> bool, wait: impl FnOnce(C)) {
        self.owner_asleep.store(true, Ordering::SeqCst);
        if !has_work(&channels) {
            wait(channels);
        }
        self.owner_asleep.store(false, Ordering::SeqCst);
    }

    /// Lets the parked thread pause by `park`, whose argument says whether the pause is a long one.
    pub fn pause(&self, park: impl FnOnce(bool)) {
        let long = self.owner_asleep.load(Ordering::SeqCst);
        self.long_park.store(long, Ordering::SeqCst);
        // An owner that woke meanwhile may have missed that the thread is about to pause for long.
        park(long && self.owner_asleep.load(Ordering::SeqCst));
        self.long_park.store(false, Ordering::SeqCst);
    }

    /// Whether a caller polls inline.
    pub fn is_driven(&self) -> bool {
        self.driven_by_caller.load(Ordering::SeqCst)
    }

    /// Notes that a caller has taken the worker's channels and polls inline.
    pub fn begin_drive(&self) {
        self.driven_by_caller.store(true, Ordering::SeqCst);
    }

    /// Ends inline polling by a caller. `left` says whether the channels have work left, `is_asked` whether
    /// the thread is needed for anything else.
    pub fn end_drive<C>(&self, channels: C, left: impl FnOnce(&C) -> bool, is_asked: impl FnOnce() -> bool) {
        let left = left(&channels);
        self.driven_by_caller.store(false, Ordering::SeqCst);
        drop(channels);
        let activity = self.activity();
        // The caller may have consumed the event that should have woken the thread.
        if activity == Activity::InPoll && (left || is_asked()) {
            self.wake();
        }
        let long_park = self.long_park.load(Ordering::SeqCst);
        // Until the thread's pause ends, no other thread polls the sockets; after a sleeping caller the pause
        // is long.
        if activity == Activity::Parked && (self.has_passive_waiters() || long_park) {
            self.unpark();
        }
    }

    /// Makes sure that some thread polls the worker soon. Returns whether the worker's own thread slept.
    pub fn rouse(&self) -> bool {
        let slept = match self.activity() {
            Activity::InPoll => {
                self.waker.wake();
                true
            }
            Activity::Parked if !self.is_driven() => {
                self.unpark();
                true
            }
            _ => false,
        };
        self.wake_owner();
        slept
    }

    /// Ends the thread's sleep in the kernel.
    pub fn wake(&self) {
        self.waker.wake();
    }

    /// Wakes a caller that sleeps on the worker's sockets.
    pub fn wake_owner(&self) {
        if self.owner_asleep.load(Ordering::SeqCst) {
            self.waker.wake();
        }
    }

    /// Ends a pause of the parked thread.
    pub fn unpark(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Ends a pause of the parked thread while no caller polls inline.
    pub fn unpark_unless_driven(&self) {
        if self.activity() == Activity::Parked && !self.is_driven() {
            self.unpark();
        }
    }

    /// Whether newly posted work needs no wake-up: a caller polls inline, or did until just now, and does not
    /// sleep on the sockets. If no caller polls again, the thread polls within a few ticks.
    pub fn may_leave_behind(&self) -> bool {
        if self.activity() != Activity::Parked || self.owner_asleep.load(Ordering::SeqCst) {
            return false;
        }
        if self.long_park.load(Ordering::SeqCst) {
            self.unpark();
        }
        true
    }

    /// Whether a thread waits without polling, so that the worker's thread must not park for callers.
    pub fn has_passive_waiters(&self) -> bool {
        self.passive_waiters.load(Ordering::SeqCst) > 0
    }

    /// Counts another channel with a lane.
    pub fn add_lane(&self) {
        self.lanes.fetch_add(1, Ordering::SeqCst);
    }

    pub fn remove_lane(&self) {
        self.lanes.fetch_sub(1, Ordering::SeqCst);
    }

    pub fn has_lanes(&self) -> bool {
        self.lanes.load(Ordering::SeqCst) > 0
    }

    /// Asks the thread to pin itself to its core.
    pub fn ask_to_pin(&self) {
        self.to_pin.store(true, Ordering::SeqCst);
        self.rouse();
    }

    /// Whether the thread was asked to pin itself and has not done so.
    pub fn is_to_pin(&self) -> bool {
        self.to_pin.load(Ordering::SeqCst)
    }

    /// Takes the request that the thread pin itself; true if there was one.
    pub fn take_pin_request(&self) -> bool {
        self.is_to_pin() && self.to_pin.swap(false, Ordering::SeqCst)
    }
}

/// A thread that waits for the worker without polling inline. While this lives, the worker's own thread does
/// not park.
pub(crate) struct PassiveWaiter(Arc<Sleeper>);

impl PassiveWaiter {
    pub fn on(sleeper: &Arc<Sleeper>) -> PassiveWaiter {
        sleeper.passive_waiters.fetch_add(1, Ordering::SeqCst);
        sleeper.unpark_unless_driven();
        PassiveWaiter(sleeper.clone())
    }
}

impl Clone for PassiveWaiter {
    fn clone(&self) -> PassiveWaiter {
        PassiveWaiter::on(&self.0)
    }
}

impl Drop for PassiveWaiter {
    fn drop(&mut self) {
        self.0.passive_waiters.fetch_sub(1, Ordering::SeqCst);
    }
}
