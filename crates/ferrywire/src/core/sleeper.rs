//! How a worker sleeps, and how others wake it.
//!
//! A worker's thread is `running`, `in poll` (asleep in the kernel on its sockets), or `parked` (asleep, while callers poll the
//! worker's channels inline). A caller that polls inline may itself sleep in the kernel on the worker's sockets.
//!
//! Invariant: after [`Sleeper::rouse`] some thread looks at the worker's channels. What was posted before the call is seen by
//! that look, since the sleeping side announces its state before it checks for work a last time.
//! Read next: `worker/mod.rs`, the thread; `worker/inline.rs`, callers that poll.

use ferrywire_sys::poll::Waker;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;

/// What the thread of a worker is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Activity {
    /// It polls its channels, or is about to.
    Running,
    /// It sleeps in the kernel, or is about to: its waker ends that.
    InPoll,
    /// It stands back for callers that poll inline, and looks in now and then.
    Parked,
    /// It has ended, or was never started: callers drive all.
    NoThread,
}

const ACTIVITIES: [Activity; 4] = [Activity::Running, Activity::InPoll, Activity::Parked, Activity::NoThread];

/// A worker as those see it that wake it: no channels, and no lock.
pub(crate) struct Sleeper {
    /// The worker's number.
    pub index: usize,
    waker: Waker,
    activity: AtomicU8,
    /// A caller that polls inline sleeps in the kernel on the worker's sockets.
    pub owner_asleep: AtomicBool,
    /// The parked thread looks in rarely, because a caller sleeps as the owner.
    pub long_park: AtomicBool,
    /// A caller polls inline.
    pub driven_by_caller: AtomicBool,
    passive_waiters: AtomicU32,
    /// The thread sleeps, and nothing but an event will wake it.
    pub dozes: AtomicBool,
    thread: OnceLock<Thread>,
    /// Channels with lanes that the worker has.
    lanes: AtomicUsize,
    /// The thread is to keep to its core from its next look on.
    keep_to_core: AtomicBool,
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
            keep_to_core: AtomicBool::new(false),
        }
    }

    pub fn activity(&self) -> Activity {
        ACTIVITIES[usize::from(self.activity.load(Ordering::SeqCst))]
    }

    pub fn set_activity(&self, activity: Activity) {
        self.activity.store(activity as u8, Ordering::SeqCst);
    }

    /// The calling thread is the worker's.
    pub fn set_thread(&self, thread: Thread) {
        let _ = self.thread.set(thread);
    }

    /// Makes sure that a thread looks at the worker soon. True if the worker's own thread slept.
    pub fn rouse(&self) -> bool {
        let slept = match self.activity() {
            Activity::InPoll => {
                self.waker.wake();
                true
            }
            Activity::Parked if !self.driven_by_caller.load(Ordering::SeqCst) => {
                self.unpark();
                true
            }
            _ => false,
        };
        self.wake_owner();
        slept
    }

    /// Ends a sleep of the thread in the kernel.
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
        if self.activity() == Activity::Parked && !self.driven_by_caller.load(Ordering::SeqCst) {
            self.unpark();
        }
    }

    /// Whether what is posted now may be left: a caller polls inline, or did just now, and nobody sleeps on the sockets; and
    /// should no caller come back, the thread looks within a tick.
    pub fn may_leave_behind(&self) -> bool {
        if self.activity() != Activity::Parked || self.owner_asleep.load(Ordering::SeqCst) {
            return false;
        }
        if self.long_park.load(Ordering::SeqCst) {
            self.unpark();
        }
        true
    }

    /// Whether the thread may stand back for callers: not while one waits without polling.
    pub fn has_passive_waiters(&self) -> bool {
        self.passive_waiters.load(Ordering::SeqCst) > 0
    }

    /// The worker has one more channel with a lane.
    pub fn add_lane(&self) {
        self.lanes.fetch_add(1, Ordering::SeqCst);
    }

    pub fn remove_lane(&self) {
        self.lanes.fetch_sub(1, Ordering::SeqCst);
    }

    pub fn has_lanes(&self) -> bool {
        self.lanes.load(Ordering::SeqCst) > 0
    }

    /// Asks the thread to keep to its core.
    pub fn ask_to_keep_to_core(&self) {
        self.keep_to_core.store(true, Ordering::SeqCst);
        self.rouse();
    }

    /// Whether the thread was asked to and has not been told yet.
    pub fn is_to_keep_to_core(&self) -> bool {
        self.keep_to_core.load(Ordering::SeqCst)
    }

    /// Likewise, and the thread is told by it.
    pub fn take_keep_to_core(&self) -> bool {
        self.is_to_keep_to_core() && self.keep_to_core.swap(false, Ordering::SeqCst)
    }
}

/// While this lives a thread waits for the worker without polling inline: the worker's own does not stand back.
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
