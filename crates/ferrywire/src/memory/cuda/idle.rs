//! What is not used any more, until it can be freed without holding anybody up.
//!
//! A driver frees memory, unpins it and unloads kernels only when all work of the GPU is done, and lets nobody else call
//! it meanwhile. A stream that waits for a transfer would then be waited for by those who are to move it. So what is
//! dropped by whoever moves data, or while a stream waits for a transfer, is kept here: the next who needs the same
//! gets it, and the rest goes when something is dropped at a better time, at the latest with the last endpoint.
//!
//! Invariant: nothing is freed while a stream waits for a transfer of this process. Read next: `ordering.rs`, where
//! streams begin to wait.

use super::allocation::Block;
use super::module::Loaded;
use super::pinned::Pages;
use std::cell::Cell;
use std::marker::PhantomData;
use std::mem;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

/// Something to be freed.
pub(super) enum Idle {
    Block(Block),
    Pages(Pages),
    Module(#[expect(dead_code, reason = "kept until it is dropped")] Loaded),
}

static IDLE: Mutex<Vec<Idle>> = Mutex::new(Vec::new());
/// Streams that wait for a transfer.
static WAITING: AtomicUsize = AtomicUsize::new(0);
/// Held while something is freed, and when a stream begins to wait.
static FREEING: Mutex<()> = Mutex::new(());
/// Held by many while kernels are launched, and by one when a stream begins to wait.
static LAUNCHING: RwLock<()> = RwLock::new(());

thread_local! {
    static MOVING: Cell<u32> = const { Cell::new(0) };
}

/// Frees what is given, and all else that is idle, if that can hold nobody up.
pub(super) fn leave(thing: Idle) {
    lock(&IDLE).push(thing);
    clear();
}

/// Something idle that is as it is needed.
pub(super) fn take<T>(fits: impl Fn(&Idle) -> bool, open: impl Fn(Idle) -> Option<T>) -> Option<T> {
    let mut idle = lock(&IDLE);
    let at = idle.iter().position(fits)?;
    open(idle.swap_remove(at))
}

/// Frees what is idle, unless this thread moves data, or a stream waits for a transfer.
pub(crate) fn clear() {
    if MOVING.get() > 0 || lock(&IDLE).is_empty() {
        return;
    }
    let _freeing = lock(&FREEING);
    if WAITING.load(Ordering::Acquire) == 0 {
        let idle = mem::take(&mut *lock(&IDLE));
        drop(idle);
    }
}

/// A stream is about to wait for a transfer. Waits for what is being freed.
pub(crate) fn stream_waits() {
    let _freeing = lock(&FREEING);
    let _launching = LAUNCHING.write().unwrap_or_else(PoisonError::into_inner);
    WAITING.fetch_add(1, Ordering::AcqRel);
}

/// Leave to launch something as long as this lives; none while a stream waits for a transfer, behind which it might stand.
pub(crate) fn launching() -> Option<RwLockReadGuard<'static, ()>> {
    let launching = LAUNCHING.read().unwrap_or_else(PoisonError::into_inner);
    (!streams_wait()).then_some(launching)
}

/// Whether any does.
fn streams_wait() -> bool {
    WAITING.load(Ordering::Acquire) > 0
}

/// It goes on. Never blocks.
pub(crate) fn stream_goes_on() {
    WAITING.fetch_sub(1, Ordering::AcqRel);
}

/// As long as this lives, its thread moves data, and frees nothing.
#[must_use = "data is moved as long as the guard lives"]
pub(crate) struct Moving(PhantomData<*const ()>);

/// This thread moves data from here on.
pub(crate) fn moving() -> Moving {
    MOVING.set(MOVING.get() + 1);
    Moving(PhantomData)
}

impl Drop for Moving {
    fn drop(&mut self) {
        MOVING.set(MOVING.get() - 1);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
