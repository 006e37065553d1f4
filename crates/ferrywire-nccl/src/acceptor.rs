//! The thread that accepts connections for NCCL before 2.17, which calls `accept` only once `connect` has finished at both ends.
//!
//! Those versions make all connects of a rank before its accepts, and wait for each. The dialling end needs the listener's
//! challenge, so some thread of the listening end has to answer meanwhile.
//! Invariant: the thread looks often after something has come or a listener was made, and ever less often afterwards: a
//! listener of a set-up that NCCL aborts is never closed.
//! Read next: `listener.rs`, what the thread calls.

use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crate::comm::locked;
use crate::failure::{Fault, Outcome};
use crate::listener::Listening;
use crate::pool::block_signals;

/// Shortest and longest pause between two looks. In between it is this part of the time in which nothing has come.
const PAUSE: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(100));
const PAUSE_PART: u32 = 100;

struct Acceptor {
    listeners: Vec<Weak<Mutex<Listening>>>,
    /// When a listener was made, or something came.
    busy_at: Option<Instant>,
    is_started: bool,
}

static ACCEPTOR: Mutex<Acceptor> =
    Mutex::new(Acceptor { listeners: Vec::new(), busy_at: None, is_started: false });
/// Signalled when a listener was made.
static LISTENED: Condvar = Condvar::new();

/// Makes the thread accept for a listener until the listener is closed.
///
/// # Errors
/// The thread cannot be started.
pub fn serve(listening: Weak<Mutex<Listening>>) -> Outcome<()> {
    let mut acceptor = locked(&ACCEPTOR);
    if !acceptor.is_started {
        let started = thread::Builder::new().name("ferrywire-accept".into()).spawn(accept_on);
        started.map_err(|e| Fault::system("cannot start the thread that accepts connections", &e))?;
        acceptor.is_started = true;
    }
    acceptor.listeners.push(listening);
    acceptor.busy_at = Some(Instant::now());
    LISTENED.notify_one();
    Ok(())
}

/// The body of the thread, which never ends, because the library is never unloaded.
fn accept_on() {
    block_signals();
    loop {
        let mut acceptor = locked(&ACCEPTOR);
        acceptor.listeners.retain(|listening| listening.strong_count() > 0);
        let live: Vec<Arc<_>> = acceptor.listeners.iter().filter_map(Weak::upgrade).collect();
        if live.is_empty() {
            drop(LISTENED.wait(acceptor).unwrap_or_else(PoisonError::into_inner));
            continue;
        }
        drop(acceptor);
        let worked = live.iter().fold(false, |worked, listening| locked(listening).progress() | worked);
        drop(live);
        let mut acceptor = locked(&ACCEPTOR);
        if worked {
            acceptor.busy_at = Some(Instant::now());
        }
        let quiet = acceptor.busy_at.map_or(Duration::MAX, |at| at.elapsed());
        let pause = (quiet / PAUSE_PART).clamp(PAUSE.0, PAUSE.1);
        drop(LISTENED.wait_timeout(acceptor, pause).unwrap_or_else(PoisonError::into_inner));
    }
}
