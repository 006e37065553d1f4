//! Which GPU is current on a thread, as CUDA has it.
//!
//! A thread has none until it sets one, so that a call made on a thread where nobody set the GPU is
//! noticed rather than done on GPU 0.

use super::{Result, SimGpu, SimGpuError};
use std::cell::Cell;

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

/// Does something with a GPU current on this thread; then what was current before is so again.
pub fn with_current<T>(index: u32, body: impl FnOnce() -> T) -> Result<T> {
    let _before = Before(current());
    set_current(index).map(|()| body())
}

/// What was current, and is so again when this is dropped.
struct Before(Option<u32>);

impl Drop for Before {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}
