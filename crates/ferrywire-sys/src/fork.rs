//! Whether this process is a forked child of the one where something was made.
//!
//! A child has the memory of its parent, and none of its threads: locks stay as they were, and descriptors are shared.
//! Invariant: asking costs a load, and takes no lock. Read next: [`Origin::check`].

use std::process;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

/// Forks between the first process that asked and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The process in which something was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    forks: u32,
    process: u32,
}

impl Origin {
    /// This process.
    pub fn here() -> Origin {
        static COUNTING: Once = Once::new();
        COUNTING.call_once(|| {
            // SAFETY: the handler only counts, which is allowed after a fork.
            let refused = unsafe { libc::pthread_atfork(None, None, Some(count)) };
            if refused != 0 {
                tracing::warn!("forks will not be noticed: no memory for a handler");
            }
        });
        Origin { forks: FORKS.load(Ordering::Relaxed), process: process::id() }
    }

    /// Whether this is a child of that process.
    pub fn is_elsewhere(self) -> bool {
        FORKS.load(Ordering::Relaxed) != self.forks
    }

    /// # Errors
    /// In a child.
    pub fn check(self) -> Result<(), Forked> {
        match self.is_elsewhere() {
            false => Ok(()),
            true => Err(Forked { built_in: self.process, here: process::id() }),
        }
    }
}

/// Something was asked of what another process made, of which this is a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forked {
    /// That process.
    pub built_in: u32,
    /// This one.
    pub here: u32,
}

extern "C" fn count() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}
