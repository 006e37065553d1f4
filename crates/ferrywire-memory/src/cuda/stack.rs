//! Saves a thread's stack of CUDA contexts around foreign code that may leave contexts on it.
//!
//! The driver does not report the depth of the stack, and a leftover context may equal the one that was
//! current. So the caller's contexts are taken off the stack meanwhile.
//! Invariant: a stack is restored on its own thread.

use super::error::{About, call};
use cudarc::driver::sys::CUcontext;
use std::{iter, ptr};

/// The contexts of this thread, the current one first. Dropping the value puts exactly these on the thread's
/// stack.
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
            // SAFETY: the context was on this stack; if it was destroyed meanwhile, the call returns an
            // error.
            let _ = unsafe { call!(About::default(), cuCtxPushCurrent_v2(context)) };
        }
    }
}

/// Pops the thread's current context; `None` when there is none.
fn pop() -> Option<CUcontext> {
    let mut context = ptr::null_mut();
    // SAFETY: the driver writes one pointer, for which there is room.
    unsafe { call!(About::default(), cuCtxGetCurrent(&mut context)) }.ok()?;
    if context.is_null() {
        return None;
    }
    // SAFETY: the driver writes one pointer, for which there is room.
    unsafe { call!(About::default(), cuCtxPopCurrent_v2(&mut context)) }.ok()?;
    Some(context)
}
