//! A thread's stack of contexts, around calls of others that may leave some on it.
//!
//! The driver does not tell how many there are, and one that was left may be the same as the one that was current: so
//! those of the caller are put aside meanwhile.
//! Invariant: a stack is put back on the thread that it was of.

use super::error::{About, call};
use cudarc::driver::sys::CUcontext;
use std::{iter, ptr};

/// The contexts of this thread, the current one first. When this is dropped they are its stack again, and no others.
pub(super) struct Aside(Vec<CUcontext>);

impl Aside {
    pub fn put() -> Aside {
        Aside(iter::from_fn(pop).collect())
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        while pop().is_some() {}
        while let Some(context) = self.0.pop() {
            // SAFETY: it was on this stack; one that was destroyed meanwhile is an error of the call.
            let _ = unsafe { call!(About::default(), cuCtxPushCurrent_v2(context)) };
        }
    }
}

/// Takes the current context off the stack; `None` where there is none.
fn pop() -> Option<CUcontext> {
    let mut context = ptr::null_mut();
    // SAFETY: room for a pointer.
    unsafe { call!(About::default(), cuCtxGetCurrent(&mut context)) }.ok()?;
    if context.is_null() {
        return None;
    }
    // SAFETY: as above.
    unsafe { call!(About::default(), cuCtxPopCurrent_v2(&mut context)) }.ok()?;
    Some(context)
}
