//! The token that keeps something from ending.
//!
//! Invariant: the last token dropped ends it, once, and that end sees all that was done before any token was dropped.
//! Read next: `operation.rs`, which it keeps.

use super::sync::AtomicU32;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What ends when its last [`Hold`] is dropped.
pub(crate) trait Held {
    /// The number of its tokens.
    fn holds(&self) -> &Holds;

    /// The last token is dropped.
    fn finish(self: &Arc<Self>);
}

/// A number of tokens; 0 before the first one.
#[derive(Default)]
pub(crate) struct Holds(AtomicU32);

impl Holds {
    /// Whether there is one token alone. Then all is visible that was done under the others.
    pub fn is_one(&self) -> bool {
        self.0.load(Ordering::Acquire) == 1
    }
}

/// Keeps an operation from ending, and so its memory: the one token for "something may still touch this memory".
///
/// The last one dropped ends the operation, which takes the locks of its peer. So none may be dropped while a lock of its peer
/// is held: what is taken out under a lock is given to the caller.
pub(crate) struct Hold<T: Held>(pub(super) Arc<T>);

impl<T: Held> Hold<T> {
    /// The first of an operation that has begun.
    pub fn new(held: T) -> Hold<T> {
        held.holds().0.store(1, Ordering::Relaxed);
        Hold(Arc::new(held))
    }
}

impl<T: Held> Deref for Hold<T> {
    type Target = Arc<T>;

    fn deref(&self) -> &Arc<T> {
        &self.0
    }
}

impl<T: Held> Clone for Hold<T> {
    fn clone(&self) -> Hold<T> {
        // The count cannot reach 0 meanwhile: this one is in it.
        self.0.holds().0.fetch_add(1, Ordering::Relaxed);
        Hold(self.0.clone())
    }
}

impl<T: Held> Drop for Hold<T> {
    fn drop(&mut self) {
        if self.0.holds().0.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.finish();
        }
    }
}
