//! Deferred freeing of GPU and pinned memory, until it blocks no other thread.
//!
//! A driver frees memory, unpins it and unloads kernels only when all work of the GPU is done, and blocks all
//! other calls meanwhile. If a stream waits for a transfer, the threads that move the transfer would then
//! wait for that stream: a deadlock. So memory that is dropped on such a thread, or while a stream waits for
//! a transfer, is kept here. The next allocation of its kind reuses it. The rest is freed by a drop at a
//! better time, at the latest with the last endpoint; when much of it cannot be reused, or an allocation
//! fails, a thread frees it.
//!
//! Invariant: nothing is freed while a stream of this process waits for a transfer.
//! Read next: the engine's `ordering.rs`, where streams start to wait.

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

/// GPU memory, pinned memory or a kernel module that waits to be freed.
pub(super) enum Idle {
    Block(Block),
    Pages(Pages),
    Module(#[expect(dead_code, reason = "kept until it is dropped")] Loaded),
}

impl Idle {
    /// Bytes of this item if it cannot be reused and only waits to be freed, else 0.
    fn useless_bytes(&self) -> usize {
        match self {
            Idle::Block(block) => block.useless_bytes(),
            Idle::Pages(pages) => pages.useless_bytes(),
            Idle::Module(_) => 0,
        }
    }
}

static IDLE: Mutex<Vec<Idle>> = Mutex::new(Vec::new());
/// Number of streams of this process that wait for a transfer.
static WAITING: AtomicUsize = AtomicUsize::new(0);
/// Lock that is held while memory is freed, and briefly when a stream starts to wait.
static FREEING: Mutex<()> = Mutex::new(());
/// Whether a thread is running that frees kept memory.
static THREAD_FREES: AtomicBool = AtomicBool::new(false);
/// Lock that is read-locked while a kernel is launched, and write-locked when a stream starts to wait.
static LAUNCHING: RwLock<()> = RwLock::new(());

thread_local! {
    static MOVING: Cell<u32> = const { Cell::new(0) };
}

/// Keeps `thing` for later, and frees all kept items unless that could block a transfer.
pub(super) fn leave(thing: Idle) {
    lock(&IDLE).push(thing);
    if !moves() {
        clear();
    } else if piles_up() {
        clear_soon();
    }
}

/// Frees kept memory after an allocation has failed: at once on most threads, soon on a thread that moves
/// data.
pub(super) fn make_room() {
    if moves() { clear_soon() } else { clear() }
}

/// Takes a kept item that fits, so that its memory is reused.
pub(super) fn take<T>(fits: impl Fn(&Idle) -> bool, open: impl Fn(Idle) -> Option<T>) -> Option<T> {
    let mut idle = lock(&IDLE);
    let at = idle.iter().position(fits)?;
    open(idle.swap_remove(at))
}

/// Whether the kept memory that cannot be reused exceeds
/// [`DEFERRED_FREE_BYTES_MAX`](limits::DEFERRED_FREE_BYTES_MAX).
fn piles_up() -> bool {
    lock(&IDLE).iter().map(Idle::useless_bytes).sum::<usize>() > limits::DEFERRED_FREE_BYTES_MAX
}

/// Frees kept memory, unless the current thread moves data or a stream waits for a transfer. Waits for
/// another thread that is freeing.
pub fn clear() {
    if moves() {
        return;
    }
    // Takes the lock also when nothing is kept: another thread may be freeing at this moment.
    let _freeing = lock(&FREEING);
    if WAITING.load(Ordering::Acquire) == 0 {
        let idle = mem::take(&mut *lock(&IDLE));
        drop(idle);
    }
}

/// Starts a thread that frees kept memory.
fn clear_soon() {
    if streams_wait() || THREAD_FREES.swap(true, Ordering::SeqCst) {
        return;
    }
    // A thread that found `THREAD_FREES` set in the meantime has relied on this one, so it checks again.
    let free = || loop {
        clear();
        THREAD_FREES.store(false, Ordering::SeqCst);
        if !piles_up() || streams_wait() || THREAD_FREES.swap(true, Ordering::SeqCst) {
            break;
        }
    };
    if let Err(error) = thread::Builder::new().name("ferrywire-free".into()).spawn(free) {
        tracing::debug!(%error, "cannot start the thread that frees unused GPU and pinned memory: a later drop frees it");
        THREAD_FREES.store(false, Ordering::Release);
    }
}

/// Notes that a stream is about to wait for a transfer. Waits for a thread that is freeing.
pub fn stream_waits() {
    let _freeing = lock(&FREEING);
    let _launching = LAUNCHING.write().unwrap_or_else(PoisonError::into_inner);
    WAITING.fetch_add(1, Ordering::AcqRel);
}

/// A permit to launch work on a GPU, valid while the returned guard is held. `None` while a stream waits for
/// a transfer, because the work could queue behind that stream.
pub fn launching() -> Option<RwLockReadGuard<'static, ()>> {
    let launching = LAUNCHING.read().unwrap_or_else(PoisonError::into_inner);
    (!streams_wait()).then_some(launching)
}

/// Whether any stream waits for a transfer.
fn streams_wait() -> bool {
    WAITING.load(Ordering::Acquire) > 0
}

/// Notes that a stream no longer waits for a transfer. Never blocks.
pub fn stream_goes_on() {
    if WAITING.fetch_sub(1, Ordering::AcqRel) == 1 && piles_up() {
        clear_soon();
    }
}

/// Marks the current thread, until the value is dropped, as one that moves data and so must not free memory.
#[must_use = "data is moved as long as the guard lives"]
pub struct Moving(PhantomData<*const ()>);

/// Marks the current thread as one that moves data, until the returned value is dropped.
pub fn moving() -> Moving {
    MOVING.set(MOVING.get() + 1);
    Moving(PhantomData)
}

/// Whether the current thread moves data.
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
