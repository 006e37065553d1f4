//! The simulated GPU that is current on a thread, as in CUDA.
//!
//! A thread has no current GPU until it sets one. So code that forgets to set the GPU gets an error, instead
//! of silently using GPU 0.

use super::{Result, SimGpu, SimGpuError};
use std::cell::Cell;

thread_local! {
    static CURRENT: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Number of the GPU that is current on this thread; `None` before one was set.
pub fn current() -> Option<u32> {
    CURRENT.get()
}

/// Makes an open GPU current on this thread; returns an error for a GPU that is not open.
pub fn set_current(index: u32) -> Result<()> {
    SimGpu::opened(index).ok_or(SimGpuError::NotOpen { index })?;
    CURRENT.set(Some(index));
    Ok(())
}

/// Runs `body` with a GPU current on this thread, then restores the previous one.
pub fn with_current<T>(index: u32, body: impl FnOnce() -> T) -> Result<T> {
    let _before = Before(current());
    set_current(index).map(|()| body())
}

/// The GPU that was current before; dropping the value makes it current again.
struct Before(Option<u32>);

impl Drop for Before {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}
