//! The thread that closes connections and listeners which NCCL has abandoned. NCCL rarely says that it has: it just never calls
//! the plugin for them again.
//!
//! Invariant: while something may be abandoned, the thread looks every [`INTERVAL`]; otherwise it sleeps.
//! Read next: `attempt.rs` and `listener.rs`, which say what is abandoned.

use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::comm::locked;
use crate::log;
use crate::pool::block_signals;

/// Interval at which the thread looks.
pub const INTERVAL: Duration = Duration::from_secs(5);

/// Closes what is abandoned at that time. Returns whether anything is left that may be abandoned later.
pub type Sweep = fn(Instant) -> bool;

struct Sweeper {
    sweeps: Vec<Sweep>,
    thread: Thread,
}

/// The thread, which never ends, because the library is never unloaded.
#[derive(PartialEq, Eq)]
enum Thread {
    NotStarted,
    /// It waits until something may be abandoned.
    Idle,
    Awake,
}

static SWEEPER: Mutex<Sweeper> = Mutex::new(Sweeper { sweeps: Vec::new(), thread: Thread::NotStarted });
/// Signalled when the thread is no longer idle.
static BEGUN: Condvar = Condvar::new();

/// Makes the thread call `sweep` until it returns false. If the thread cannot be started, only calls of NCCL close what is
/// abandoned.
pub fn watch(sweep: Sweep) {
    let mut sweeper = locked(&SWEEPER);
    if !sweeper.sweeps.iter().any(|known| std::ptr::fn_addr_eq(*known, sweep)) {
        sweeper.sweeps.push(sweep);
    }
    match sweeper.thread {
        Thread::Awake => return,
        Thread::Idle => BEGUN.notify_one(),
        Thread::NotStarted => {
            let started = thread::Builder::new().name("ferrywire-sweep".into()).spawn(sweep_on);
            if let Err(error) = started {
                return log::warn_once(format_args!(
                    "cannot start the thread that closes abandoned connections: some may stay open: {error}"
                ));
            }
        }
    }
    sweeper.thread = Thread::Awake;
}

/// Closes what is abandoned. Returns whether anything is left that may be abandoned later.
pub fn sweep() -> bool {
    let sweeps = locked(&SWEEPER).sweeps.clone();
    let now = Instant::now();
    sweeps.into_iter().fold(false, |is_left, sweep| sweep(now) | is_left)
}

fn sweep_on() {
    block_signals();
    loop {
        thread::sleep(INTERVAL);
        // What begins from here on wakes the thread, whether this sweep sees it or not.
        locked(&SWEEPER).thread = Thread::Idle;
        let is_left = sweep();
        let mut sweeper = locked(&SWEEPER);
        if is_left {
            sweeper.thread = Thread::Awake;
        }
        while sweeper.thread == Thread::Idle {
            sweeper = BEGUN.wait(sweeper).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
