//! Detects that an object is used in a forked child of the process that created it.
//!
//! A child has a copy of its parent's memory, but none of its threads: locks stay in the state they had, and
//! file descriptors are shared.
//! Invariant: the check costs one atomic load and takes no lock.
//! Read next: [`Origin::check`].

use std::process;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

/// Forks since the first call of [`Origin::here`]; a `pthread_atfork` handler counts them in the child.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The process in which an object was created. Objects store one and check it on use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    forks: u32,
    process: u32,
}

impl Origin {
    /// The current process. The first call installs the `pthread_atfork` handler.
    pub fn here() -> Origin {
        static COUNTING: Once = Once::new();
        COUNTING.call_once(|| {
            // SAFETY: the handler only counts, which is allowed after a fork.
            let refused = unsafe { libc::pthread_atfork(None, None, Some(count)) };
            if refused != 0 {
                tracing::warn!(
                    "cannot register a fork handler: use of ferrywire in a forked child will not be detected"
                );
            }
        });
        Origin { forks: FORKS.load(Ordering::Relaxed), process: process::id() }
    }

    /// Whether the current process is a forked child of the origin.
    pub fn is_elsewhere(self) -> bool {
        FORKS.load(Ordering::Relaxed) != self.forks
    }

    /// # Errors
    /// [`Forked`] when the current process is a forked child of the origin.
    pub fn check(self) -> Result<(), Forked> {
        if self.is_elsewhere() {
            return Err(Forked { built_in: self.process, here: process::id() });
        }
        Ok(())
    }
}

/// An object of the parent process was used in a forked child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forked {
    /// Process id of the parent, which created the object.
    pub built_in: u32,
    /// Process id of the child, which used it.
    pub here: u32,
}

extern "C" fn count() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}
