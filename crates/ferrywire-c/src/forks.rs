//! Forks: a child must not find a table locked by a thread that it has not got.
//!
//! While a thread forks it holds the tables of all handles, so that no other is in the midst of one.
//! Invariant: nothing else takes two tables at once, so the order among them is this file's matter alone.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use crate::handles::hold;

thread_local! {
    /// What this thread, which forks, holds meanwhile.
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

/// From here on forks are looked after; before the first handle there is nothing to lock.
pub(crate) fn look_after() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: functions that live as long as this library. Where there is no memory for it, forks are as they were.
        unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after)) };
    });
}

unsafe extern "C" fn before() {
    let _ = catch_unwind(AssertUnwindSafe(|| {
        HELD.with_borrow_mut(|held| held.extend(TABLES.map(|hold| hold())))
    }));
}

/// In the parent and in the child: the thread that forked is the same.
unsafe extern "C" fn after() {
    let _ = catch_unwind(AssertUnwindSafe(|| HELD.with_borrow_mut(Vec::clear)));
}
