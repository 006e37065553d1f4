//! Forks: a child process must not find a handle table locked by a thread that the child does not have.
//!
//! The thread that forks locks all handle tables before the fork and unlocks them after it, in parent and child.
//! Invariant: no other code locks two tables at once, so this file alone decides the order of the locks.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use crate::handles::hold;

thread_local! {
    /// The locks that this thread has taken for the fork.
    static HELD: RefCell<Vec<Box<dyn Any>>> = const { RefCell::new(Vec::new()) };
}

const TABLES: [fn() -> Box<dyn Any>; 8] = [
    hold::<crate::blocks::Blocks>,
    hold::<crate::endpoint::Endpoint>,
    hold::<crate::memory::Region>,
    hold::<crate::memory::Remote>,
    hold::<crate::options::Options>,
    hold::<crate::peer::Peer>,
    hold::<crate::transfer::Transfer>,
    hold::<crate::wakeup::Wakeup>,
];

/// Registers the fork handlers, once. Called before the first handle exists; before that no table can be locked.
pub(crate) fn install_fork_handlers() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the functions live as long as this library. If there is no memory for them, the handlers
        // are missing and a child may find a table locked.
        unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after)) };
    });
}

unsafe extern "C" fn before() {
    let _ = catch_unwind(AssertUnwindSafe(|| {
        HELD.with_borrow_mut(|held| held.extend(TABLES.map(|hold| hold())))
    }));
}

/// Unlocks the tables, in the parent and in the child, on the thread that forked.
unsafe extern "C" fn after() {
    let _ = catch_unwind(AssertUnwindSafe(|| HELD.with_borrow_mut(Vec::clear)));
}
