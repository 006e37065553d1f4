//! Deferred freeing of GPU and pinned memory, until it blocks no other thread.
//!
//! A driver frees memory, unpins it and unloads kernels only when all work of the GPU is done, and blocks all
//! other calls for this GPU meanwhile. If a stream waits for a transfer, the threads that move the transfer
//! would then wait for that stream: a deadlock. So memory that is dropped on such a thread, or while a stream
//! waits for a transfer, is kept here. The next allocation of its kind reuses it. The rest is freed by a drop
//! at a better time, at the latest with the last endpoint; when much of it cannot be reused, or an allocation
//! fails, a thread frees it.
//!
//! Each GPU has locks of its own: its work may wait for a kernel of another GPU, and the thread that launches
//! that kernel must not wait here. Driver 580 on an H200 frees and unpins memory of one GPU while work of
//! another runs. Streams that wait count for all GPUs: work of another GPU may be ordered behind them.
//!
//! Invariant: no freeing begins while a stream of this process waits for a transfer, and a stream starts to
//! wait only while nothing of its GPU is freed.
//! Read next: the engine's `ordering.rs`, where streams start to wait.

use super::allocation::Block;
use super::capture;
use super::module::Loaded;
use super::pinned::Pages;
use ferrywire_proto::limits::{self, CUDA_GPUS_MAX};
use std::cell::Cell;
use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

/// GPU memory, pinned memory or a kernel module that waits to be freed.
pub(super) enum Idle {
    Block(Block),
    Pages(Pages),
    Module(Loaded),
}

impl Idle {
    /// Number of the GPU that frees this item.
    fn gpu(&self) -> u32 {
        match self {
            Idle::Block(block) => block.gpu.index(),
            Idle::Pages(pages) => pages.gpu.index(),
            Idle::Module(module) => module.gpu.index(),
        }
    }

    /// Bytes of this item if it cannot be reused and only waits to be freed, else 0.
    fn useless_bytes(&self) -> usize {
        match self {
            Idle::Block(block) => block.useless_bytes(),
            Idle::Pages(pages) => pages.useless_bytes(),
            Idle::Module(_) => 0,
        }
    }
}

/// Time after which a launch is taken to wait for its GPU, and no longer waited for.
const LAUNCHES_WITHIN: Duration = Duration::from_millis(1);

static IDLE: Mutex<Vec<Idle>> = Mutex::new(Vec::new());
/// Number of streams of this process that wait for a transfer.
static WAITING: AtomicUsize = AtomicUsize::new(0);
static SLOTS: [Slot; CUDA_GPUS_MAX] = [const { Slot::new() }; CUDA_GPUS_MAX];

/// Locks of one GPU.
struct Slot {
    /// Lock that is held while memory is freed, and briefly when a stream starts to wait.
    freeing: Mutex<()>,
    /// Whether a thread is running that frees kept memory.
    thread_frees: AtomicBool,
    /// Lock that is read-locked while a kernel is launched, and write-locked when a stream starts to wait.
    launching: RwLock<()>,
}

thread_local! {
    static MOVING: Cell<u32> = const { Cell::new(0) };
}

/// Keeps `thing` for later, and frees all kept items of its GPU unless that could block a transfer.
pub(super) fn leave(thing: Idle) {
    let gpu = thing.gpu();
    lock(&IDLE).push(thing);
    if !moves() {
        clear(gpu);
    } else {
        clear_piles();
    }
}

/// Frees kept memory of a GPU after an allocation has failed: at once on most threads, soon on a thread that
/// moves data.
pub(super) fn make_room(gpu: u32) {
    if moves() {
        clear_soon(gpu);
    } else {
        clear(gpu);
    }
}

/// As [`make_room`], for all GPUs: the system limits all pinned memory together.
pub(super) fn make_room_everywhere() {
    kept_by().into_iter().for_each(make_room);
}

/// Takes a kept item that fits, so that its memory is reused.
pub(super) fn take<T>(fits: impl Fn(&Idle) -> bool, open: impl Fn(Idle) -> Option<T>) -> Option<T> {
    let mut idle = lock(&IDLE);
    let at = idle.iter().position(fits)?;
    open(idle.swap_remove(at))
}

/// The GPUs that have kept memory.
fn kept_by() -> Vec<u32> {
    let mut gpus: Vec<u32> = lock(&IDLE).iter().map(Idle::gpu).collect();
    gpus.sort_unstable();
    gpus.dedup();
    gpus
}

/// Whether the kept memory that cannot be reused exceeds
/// [`DEFERRED_FREE_BYTES_MAX`](limits::DEFERRED_FREE_BYTES_MAX), and some of it is of this GPU.
fn piles_up(gpu: u32) -> bool {
    let idle = lock(&IDLE);
    idle.iter().map(Idle::useless_bytes).sum::<usize>() > limits::DEFERRED_FREE_BYTES_MAX
        && idle.iter().any(|each| each.gpu() == gpu && each.useless_bytes() > 0)
}

/// Lets threads free kept memory where much of it cannot be reused.
fn clear_piles() {
    for gpu in kept_by() {
        if piles_up(gpu) {
            clear_soon(gpu);
        }
    }
}

/// Frees kept memory of a GPU, unless the current thread moves data or a stream waits for a transfer. Waits
/// for another thread that is freeing.
fn clear(gpu: u32) {
    if moves() {
        return;
    }
    // Takes the lock also when nothing is kept: another thread may be freeing at this moment.
    let _freeing = lock(&Slot::of(gpu).freeing);
    // Each item waits for all work of the GPU, which may have begun to wait for a stream meanwhile.
    while !streams_wait() {
        let Some(item) = take(|each| each.gpu() == gpu, Some) else { break };
        drop(item);
    }
}

/// Frees kept memory of all GPUs, unless the current thread moves data or a stream waits for a transfer. Waits
/// for other threads that are freeing.
pub fn clear_all() {
    (0..CUDA_GPUS_MAX as u32).for_each(clear);
}

/// Frees as [`clear_all`] does, on other threads, and waits for them at most `timeout`: a GPU whose work does
/// not end blocks them. They go on after that.
pub fn clear_all_within(timeout: Duration) {
    const PAUSE: Duration = Duration::from_millis(1);
    if moves() {
        return;
    }
    let start = Instant::now();
    loop {
        // Each GPU has a thread of its own, so that a GPU whose work does not end blocks no other.
        let freeing = (0..CUDA_GPUS_MAX as u32).filter(|gpu| is_cleared_soon(*gpu)).count();
        if freeing == 0 {
            return;
        }
        if start.elapsed() >= timeout {
            tracing::info!(
                "work of a GPU has not ended yet: a thread frees unused GPU and pinned memory when it does"
            );
            return;
        }
        thread::sleep(PAUSE);
    }
}

/// Whether a thread frees memory of the GPU. Starts one if memory is kept that may be freed.
fn is_cleared_soon(gpu: u32) -> bool {
    let is_kept = lock(&IDLE).iter().any(|each| each.gpu() == gpu);
    (is_kept && clear_soon(gpu)) || Slot::of(gpu).is_freeing()
}

/// Starts a thread that frees kept memory of a GPU. Returns whether one runs.
fn clear_soon(gpu: u32) -> bool {
    let slot = Slot::of(gpu);
    if streams_wait() {
        return false;
    }
    if slot.thread_frees.swap(true, Ordering::SeqCst) {
        return true;
    }
    // A thread that found `thread_frees` set in the meantime has relied on this one, so it checks again.
    let free = move || loop {
        clear(gpu);
        slot.thread_frees.store(false, Ordering::SeqCst);
        if !piles_up(gpu) || streams_wait() || slot.thread_frees.swap(true, Ordering::SeqCst) {
            break;
        }
    };
    let started = thread::Builder::new().name("ferrywire-free".into()).spawn(free);
    if let Err(error) = &started {
        tracing::debug!(%error, "cannot start the thread that frees unused GPU and pinned memory: a later drop frees it");
        slot.thread_frees.store(false, Ordering::Release);
    }
    started.is_ok()
}

/// Notes that a stream of a GPU is about to wait for a transfer. Waits for a thread that is freeing memory of
/// this GPU.
pub fn stream_waits(gpu: u32) {
    let slot = Slot::of(gpu);
    let _freeing = lock(&slot.freeing);
    let _launching = slot.launching.write().unwrap_or_else(PoisonError::into_inner);
    WAITING.fetch_add(1, Ordering::AcqRel);
    // A thread may have found that no stream waits, and be about to launch on another GPU.
    let start = Instant::now();
    let is_launching = |other: &Slot| matches!(other.launching.try_write(), Err(TryLockError::WouldBlock));
    for other in SLOTS.iter().filter(|other| !ptr::eq(*other, slot)) {
        while is_launching(other) && !other.is_freeing() && start.elapsed() < LAUNCHES_WITHIN {
            thread::yield_now();
        }
    }
}

/// Whether any stream waits for a transfer.
fn streams_wait() -> bool {
    WAITING.load(Ordering::Acquire) > 0
}

/// Notes that a stream no longer waits for a transfer. Never blocks.
pub fn stream_goes_on() {
    if WAITING.fetch_sub(1, Ordering::AcqRel) == 1 {
        clear_piles();
    }
}

/// A permit to launch work on a GPU, valid while this value is held.
#[derive(Debug)]
#[must_use = "the permit ends with the value"]
pub struct Launching(#[expect(dead_code, reason = "held, not read")] Option<RwLockReadGuard<'static, ()>>);

impl Launching {
    /// A permit for a GPU whose work never queues behind streams that wait.
    pub fn unrestricted() -> Launching {
        Launching(None)
    }
}

/// A permit to launch work on a GPU. `None` while a stream waits for a transfer, because the work could queue
/// behind that stream.
pub fn launching(gpu: u32) -> Option<Launching> {
    let launching = Slot::of(gpu).launching.read().unwrap_or_else(PoisonError::into_inner);
    (!streams_wait()).then_some(Launching(Some(launching)))
}

impl Slot {
    const fn new() -> Slot {
        Slot { freeing: Mutex::new(()), thread_frees: AtomicBool::new(false), launching: RwLock::new(()) }
    }

    fn of(gpu: u32) -> &'static Slot {
        &SLOTS[gpu as usize]
    }

    /// Whether a thread is freeing.
    fn is_freeing(&self) -> bool {
        matches!(self.freeing.try_lock(), Err(TryLockError::WouldBlock))
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
        if !moves() {
            capture::restore();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
