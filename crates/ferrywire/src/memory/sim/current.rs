//! Which GPU is current on a thread, as CUDA has it.
//!
//! A thread has none until it sets one, so that a call made on a thread where nobody set the GPU is
//! noticed rather than done on GPU 0.

use super::{Result, SimGpu, SimGpuError};
use std::cell::Cell;
use std::marker::PhantomData;

thread_local! {
    static CURRENT: Cell<Option<u32>> = const { Cell::new(None) };
}

/// The GPU that is current on this thread.
pub fn current() -> Option<u32> {
    CURRENT.get()
}

/// Makes an open GPU current on this thread.
pub fn set_current(index: u32) -> Result<()> {
    SimGpu::opened(index).ok_or(SimGpuError::NotOpen { index })?;
    CURRENT.set(Some(index));
    Ok(())
}

/// Makes a GPU current on this thread until it is dropped; then what was before is so again.
#[derive(Debug)]
#[must_use = "the GPU is current only as long as the guard lives"]
pub struct CurrentGuard {
    before: Option<u32>,
    /// It belongs to its thread.
    _thread: PhantomData<*const ()>,
}

impl CurrentGuard {
    /// Sets it.
    pub fn set(index: u32) -> Result<CurrentGuard> {
        let before = current();
        set_current(index).map(|()| CurrentGuard { before, _thread: PhantomData })
    }
}

impl Drop for CurrentGuard {
    fn drop(&mut self) {
        CURRENT.set(self.before);
    }
}
