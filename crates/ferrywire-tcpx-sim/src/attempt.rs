//! A connect or accept in progress on a thread of its own; the host carries the attempt's pointer.
//!
//! The real plugin frees the attempt when it has reported the end, and leaves the pointer in the handle: one more call
//! would use freed memory. Here attempts are never freed, so such a call ends with a message.
//! Invariant: the result is returned once.
//! Read next: `handshake.rs`, the work of the threads.

use std::collections::HashSet;
use std::io;
use std::sync::{Condvar, LazyLock, Mutex, PoisonError};
use std::thread;

use ferrywire_ncclnet::abi::ResultCode;

use crate::comm::{Comm, Outcome};
use crate::log::misuse;
use crate::sync::locked;

static ATTEMPTS: LazyLock<Mutex<HashSet<usize>>> = LazyLock::new(Mutex::default);

/// An attempt, identified by its address.
#[derive(Debug)]
pub struct Attempt {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
enum State {
    Running,
    Ready(Box<Comm>),
    Failed(ResultCode),
    Told,
}

impl Attempt {
    /// Starts the attempt's work on a detached thread; the attempt is never freed.
    pub fn start(
        name: String,
        work: impl FnOnce() -> Outcome<Comm> + Send + 'static,
    ) -> io::Result<&'static Attempt> {
        let attempt: &'static Attempt =
            Box::leak(Box::new(Attempt { state: Mutex::new(State::Running), changed: Condvar::new() }));
        thread::Builder::new().name(name).spawn(move || {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            attempt.end(result.unwrap_or(Err(ResultCode::INTERNAL_ERROR)));
        })?;
        locked(&ATTEMPTS).insert(attempt.address());
        Ok(attempt)
    }

    /// The attempt at an address that the host has carried; a wrong address ends the process.
    pub fn at(address: usize, call: &str) -> &'static Attempt {
        let known = locked(&ATTEMPTS).contains(&address);
        if !known {
            misuse(format_args!("{call} with a handle that holds a foreign pointer ({address:#x})"));
        }
        // SAFETY: the address is that of a leaked attempt, noted when it was made.
        unsafe { &*(address as *const Attempt) }
    }

    /// The attempt's address, by which the host identifies it.
    pub fn address(&self) -> usize {
        &raw const *self as usize
    }

    /// Whether the thread still works on the attempt.
    pub fn is_running(&self) -> bool {
        matches!(*locked(&self.state), State::Running)
    }

    /// Waits until the attempt's thread has ended its work.
    pub fn wait(&self) {
        let state = locked(&self.state);
        drop(
            self.changed
                .wait_while(state, |state| matches!(state, State::Running))
                .unwrap_or_else(PoisonError::into_inner),
        );
    }

    /// Takes the attempt's comm, if it is ready. With `once`, a call after the end was reported is misuse.
    pub fn poll(&self, call: &str, once: bool) -> Outcome<Option<Box<Comm>>> {
        let mut state = locked(&self.state);
        if matches!(*state, State::Running) {
            return Ok(None);
        }
        match std::mem::replace(&mut *state, State::Told) {
            State::Ready(comm) => Ok(Some(comm)),
            State::Failed(code) => Err(code),
            State::Told if !once => Err(ResultCode::INTERNAL_ERROR),
            State::Told | State::Running => misuse(format_args!(
                "{call} was called again after its end: the real plugin would use freed memory"
            )),
        }
    }

    fn end(&self, result: Outcome<Comm>) {
        *locked(&self.state) = match result {
            Ok(comm) => State::Ready(Box::new(comm)),
            Err(code) => State::Failed(code),
        };
        self.changed.notify_all();
    }
}
