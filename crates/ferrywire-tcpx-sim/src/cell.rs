//! The cells to which the host's opaque pointers point.
//!
//! A comm's cell, with the tokens for its requests, is never freed, so a call on a closed comm ends with a plain
//! message instead of undefined behaviour. Two threads in one comm at the same time are misuse.
//! Invariant: at most one thread is inside a comm.
//! Read next: `comm.rs`.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::comm::Comm;
use crate::log::misuse;
use crate::switches::REQUESTS_MAX;

const CELL_MAGIC: u64 = 0x7463_7078_636f_6d6d;
const TOKEN_MAGIC: u64 = 0x7463_7078_7265_7175;

/// The cell of a comm, to whose address the host has a pointer.
pub struct Cell {
    magic: u64,
    /// Index of the comm's NIC, readable during a running call.
    pub device: usize,
    /// The GPU that was current when a send comm's first connect was called.
    pub gpu: Option<i32>,
    one_thread: bool,
    busy: AtomicBool,
    closed: AtomicBool,
    tokens: [Token; REQUESTS_MAX],
    comm: UnsafeCell<Option<Box<Comm>>>,
}

/// The token of a request, to which the host has a pointer. Addresses are reused, so a pointer does not identify a
/// request over time.
struct Token {
    magic: u64,
    slot: usize,
    cell: *const Cell,
}

impl Cell {
    /// Makes a cell for a comm, which is never freed; returns the pointer for the host.
    pub fn leak(comm: Box<Comm>) -> *mut c_void {
        let cell = Box::into_raw(Box::new(Cell {
            magic: CELL_MAGIC,
            device: comm.device(),
            gpu: comm.gpu.filter(|_| comm.rules.switches.comm_gpu),
            one_thread: comm.rules.switches.one_thread,
            busy: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            tokens: std::array::from_fn(|slot| Token { magic: TOKEN_MAGIC, slot, cell: std::ptr::null() }),
            comm: UnsafeCell::new(Some(comm)),
        }));
        // SAFETY: the cell was just made, and no other code has the pointer.
        unsafe { (*cell).tokens.iter_mut().for_each(|token| token.cell = cell) };
        cell.cast()
    }

    /// The cell to which a pointer of the host refers; a wrong pointer ends the process.
    ///
    /// # Safety
    /// The pointer must be readable, as for the real plugin.
    pub unsafe fn at<'a>(pointer: *mut c_void, call: &str) -> &'a Cell {
        // SAFETY: the caller promises a readable pointer; a cell is never freed, so a right pointer stays
        // valid.
        match unsafe { pointer.cast::<Cell>().as_ref() } {
            Some(cell) if pointer.cast::<Cell>().is_aligned() && cell.magic == CELL_MAGIC => cell,
            _ => misuse(format_args!("{call} of something that is no comm: {pointer:?}")),
        }
    }

    /// The cell of an open comm, for calls that may run beside others: a closed comm ends the process.
    ///
    /// # Safety
    /// The pointer must be readable, as for the real plugin.
    pub unsafe fn open_at<'a>(pointer: *mut c_void, call: &str) -> &'a Cell {
        // SAFETY: the caller promises a readable pointer.
        let cell = unsafe { Cell::at(pointer, call) };
        if cell.closed.load(Ordering::Acquire) {
            misuse(format_args!("{call} on a comm that was closed"));
        }
        cell
    }

    /// The cell and slot to which a request pointer of the host refers; a wrong pointer ends the process.
    ///
    /// # Safety
    /// The pointer must be readable, as for the real plugin.
    pub unsafe fn of_request<'a>(request: *mut c_void, call: &str) -> (&'a Cell, usize) {
        // SAFETY: the caller promises a readable pointer; tokens are in cells, which are never freed.
        match unsafe { request.cast::<Token>().as_ref() } {
            // SAFETY: a token with the right mark points at its cell.
            Some(token) if token.magic == TOKEN_MAGIC => (unsafe { &*token.cell }, token.slot),
            _ => misuse(format_args!("{call} of something that is no request: {request:?}")),
        }
    }

    /// The pointer that the host gets for the request in a slot.
    pub fn request(&self, slot: usize) -> *mut c_void {
        (&raw const self.tokens[slot]).cast_mut().cast()
    }

    /// Runs a call inside the comm; a call on a closed comm ends the process.
    pub fn enter<T>(&self, call: &str, body: impl FnOnce(&mut Comm) -> T) -> T {
        let _inside = self.claim(call);
        // SAFETY: the thread that has claimed the cell is alone in it.
        match unsafe { &mut *self.comm.get() } {
            Some(comm) => body(comm),
            None => misuse(format_args!("{call} on a comm that was closed")),
        }
    }

    /// Takes the comm out of its cell, which counts as closed from now on.
    pub fn take(&self, call: &str) -> Box<Comm> {
        let _inside = self.claim(call);
        self.closed.store(true, Ordering::Release);
        // SAFETY: the thread that has claimed the cell is alone in it.
        match unsafe { (*self.comm.get()).take() } {
            Some(comm) => comm,
            None => misuse(format_args!("{call} on a comm that was closed")),
        }
    }

    fn claim(&self, call: &str) -> Inside<'_> {
        while self.busy.swap(true, Ordering::Acquire) {
            if self.one_thread {
                misuse(format_args!("{call} while another thread is inside the same comm"));
            }
            std::thread::yield_now();
        }
        Inside(&self.busy)
    }
}

/// A thread's exclusive use of a cell, released when the value is dropped.
struct Inside<'a>(&'a AtomicBool);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}
