//! Forks: a child process must not find a handle table locked by a thread that it does not have.
//!
//! The thread that forks locks all handle tables before the fork and unlocks them after it, in parent and child.
//! Invariant: nothing else locks two tables at once, so the lock order among them is decided here alone.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use crate::handles::hold;

thread_local! {
    /// The locks that this thread holds while it forks.
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
        // SAFETY: the functions live as long as this library. If memory is short, the handlers are missing and a child
        // may find a table locked.
        unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after)) };
    });
}

unsafe extern "C" fn before() {
    let _ = catch_unwind(AssertUnwindSafe(|| {
        HELD.with_borrow_mut(|held| held.extend(TABLES.map(|hold| hold())))
    }));
}

/// Runs in the parent and in the child, on the thread that forked.
unsafe extern "C" fn after() {
    let _ = catch_unwind(AssertUnwindSafe(|| HELD.with_borrow_mut(Vec::clear)));
}
