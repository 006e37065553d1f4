//! What is not used any more, until it can be freed without holding anybody up.
//!
//! A driver frees memory, unpins it and unloads kernels only when all work of the GPU is done, and lets nobody else call
//! it meanwhile. A stream that waits for a transfer would then be waited for by those who are to move it. So what is
//! dropped by whoever moves data, or while a stream waits for a transfer, is kept here: the next who needs the same
//! gets it, and the rest goes when something is dropped at a better time, at the latest with the last endpoint. Where much
//! piles up that is of no use to anybody, or memory runs out, a thread frees it meanwhile.
//!
//! Invariant: nothing is freed while a stream waits for a transfer of this process. Read next: the engine's `ordering.rs`, where
//! streams begin to wait.

use super::allocation::Block;
use super::module::Loaded;
use super::pinned::Pages;
use ferrywire_proto::limits;
use std::cell::Cell;
use std::marker::PhantomData;
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::thread;

/// Something to be freed.
pub(super) enum Idle {
    Block(Block),
    Pages(Pages),
    Module(#[expect(dead_code, reason = "kept until it is dropped")] Loaded),
}

impl Idle {
    /// Bytes that nobody is given again.
    fn useless_bytes(&self) -> usize {
        match self {
            Idle::Block(block) => block.useless_bytes(),
            Idle::Pages(pages) => pages.useless_bytes(),
            Idle::Module(_) => 0,
        }
    }
}

static IDLE: Mutex<Vec<Idle>> = Mutex::new(Vec::new());
/// Streams that wait for a transfer.
static WAITING: AtomicUsize = AtomicUsize::new(0);
/// Held while something is freed, and when a stream begins to wait.
static FREEING: Mutex<()> = Mutex::new(());
/// Whether a thread has been started to free what is idle.
static THREAD_FREES: AtomicBool = AtomicBool::new(false);
/// Held by many while kernels are launched, and by one when a stream begins to wait.
static LAUNCHING: RwLock<()> = RwLock::new(());

thread_local! {
    static MOVING: Cell<u32> = const { Cell::new(0) };
}

/// Frees what is given, and all else that is idle, if that can hold nobody up.
pub(super) fn leave(thing: Idle) {
    lock(&IDLE).push(thing);
    match moves() {
        true if piles_up() => clear_soon(),
        true => {}
        false => clear(),
    }
}

/// Something could not be had: frees what is idle, for this attempt or the next.
pub(super) fn make_room() {
    match moves() {
        true => clear_soon(),
        false => clear(),
    }
}

/// Something idle that is as it is needed.
pub(super) fn take<T>(fits: impl Fn(&Idle) -> bool, open: impl Fn(Idle) -> Option<T>) -> Option<T> {
    let mut idle = lock(&IDLE);
    let at = idle.iter().position(fits)?;
    open(idle.swap_remove(at))
}

/// Whether there is too much that nobody is given again.
fn piles_up() -> bool {
    lock(&IDLE).iter().map(Idle::useless_bytes).sum::<usize>() > limits::DEFERRED_FREE_BYTES_MAX
}

/// Frees what is idle, unless this thread moves data, or a stream waits for a transfer. Waits for who is at it.
pub fn clear() {
    if moves() {
        return;
    }
    // Also where nothing is left: somebody may be about to free it.
    let _freeing = lock(&FREEING);
    if WAITING.load(Ordering::Acquire) == 0 {
        let idle = mem::take(&mut *lock(&IDLE));
        drop(idle);
    }
}

/// Has a thread that moves nothing free what is idle.
fn clear_soon() {
    if streams_wait() || THREAD_FREES.swap(true, Ordering::SeqCst) {
        return;
    }
    // Who left something while this was at it, or saw a stream go on, has relied on it.
    let free = || loop {
        clear();
        THREAD_FREES.store(false, Ordering::SeqCst);
        if !piles_up() || streams_wait() || THREAD_FREES.swap(true, Ordering::SeqCst) {
            break;
        }
    };
    if let Err(error) = thread::Builder::new().name("ferrywire-free".into()).spawn(free) {
        tracing::debug!(%error, "no thread to free what is idle");
        THREAD_FREES.store(false, Ordering::Release);
    }
}

/// A stream is about to wait for a transfer. Waits for what is being freed.
pub fn stream_waits() {
    let _freeing = lock(&FREEING);
    let _launching = LAUNCHING.write().unwrap_or_else(PoisonError::into_inner);
    WAITING.fetch_add(1, Ordering::AcqRel);
}

/// Leave to launch something as long as this lives; none while a stream waits for a transfer, behind which it might stand.
pub fn launching() -> Option<RwLockReadGuard<'static, ()>> {
    let launching = LAUNCHING.read().unwrap_or_else(PoisonError::into_inner);
    (!streams_wait()).then_some(launching)
}

/// Whether any does.
fn streams_wait() -> bool {
    WAITING.load(Ordering::Acquire) > 0
}

/// It goes on. Never blocks.
pub fn stream_goes_on() {
    if WAITING.fetch_sub(1, Ordering::AcqRel) == 1 && piles_up() {
        clear_soon();
    }
}

/// As long as this lives, its thread moves data, and frees nothing.
#[must_use = "data is moved as long as the guard lives"]
pub struct Moving(PhantomData<*const ()>);

/// This thread moves data from here on.
pub fn moving() -> Moving {
    MOVING.set(MOVING.get() + 1);
    Moving(PhantomData)
}

/// Whether this thread does.
pub fn moves() -> bool {
    MOVING.get() > 0
}

impl Drop for Moving {
    fn drop(&mut self) {
        MOVING.set(MOVING.get() - 1);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
