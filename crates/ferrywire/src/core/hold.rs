//! A reference count whose last token ends an operation.
//!
//! Invariant: the last token dropped ends the operation, once. That end sees everything done before any token
//! was dropped.
//! Read next: `operation.rs`, which the tokens keep.

use super::sync::AtomicU32;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// An object that ends when its last [`Hold`] is dropped.
pub(crate) trait Held {
    /// The count of tokens.
    fn holds(&self) -> &Holds;

    /// Ends the object; called when the last token is dropped, unless by [`Hold::drop_with`].
    fn finish(self: &Arc<Self>);
}

/// The count of tokens; 0 before the first one, and after the last.
#[derive(Default)]
pub(crate) struct Holds(AtomicU32);

impl Holds {
    /// Whether one token is left. Everything done under the others is then visible.
    pub fn is_one(&self) -> bool {
        self.0.load(Ordering::Acquire) == 1
    }
}

/// A token that keeps an operation, and so its memory, in use: "something may still touch this memory".
///
/// Dropping the last token ends the operation, which takes locks of its peer. So no token may be dropped
/// while a lock of its peer is held: code that takes tokens out under a lock returns them to its caller.
pub(crate) struct Hold<T: Held>(pub(super) Arc<T>);

impl<T: Held> Hold<T> {
    /// Creates the first token of an operation that has begun.
    #[inline]
    pub fn new(held: T) -> Hold<T> {
        held.holds().0.store(1, Ordering::Relaxed);
        Hold(Arc::new(held))
    }

    /// Whether no other token is left. None can come: only a token can be cloned.
    pub fn is_last(&self) -> bool {
        self.0.holds().is_one()
    }

    /// Drops the token. If it is the last one, `finish` ends the object; where another is dropped at the same time,
    /// [`Held::finish`] may do so.
    pub fn drop_with(self, finish: impl FnOnce(&Arc<T>)) {
        if self.0.holds().is_one() {
            // Only a token can be cloned, so none can come meanwhile, and a store suffices.
            self.0.holds().0.store(0, Ordering::Relaxed);
            finish(&self.0);
        }
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
        // The count cannot reach 0 meanwhile: this token is in it.
        self.0.holds().0.fetch_add(1, Ordering::Relaxed);
        Hold(self.0.clone())
    }
}

impl<T: Held> Drop for Hold<T> {
    fn drop(&mut self) {
        let Holds(count) = self.0.holds();
        match count.load(Ordering::Acquire) {
            // `drop_with` has taken the token.
            0 => return,
            1 => count.store(0, Ordering::Relaxed),
            _ if count.fetch_sub(1, Ordering::AcqRel) == 1 => {}
            _ => return,
        }
        self.0.finish();
    }
}
