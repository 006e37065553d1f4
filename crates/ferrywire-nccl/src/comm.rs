//! Comms, the objects that `connect` and `accept` return, and the requests posted on them.
//!
//! Both ends number sends and receives alike: message k goes into receive k. State shared with workers
//! ([`sending::Sending`](crate::sending::Sending), [`receiving::Receiving`](crate::receiving::Receiving)) is separate
//! from state that only NCCL's thread touches.
//!
//! A request's life: free -> posted (its number is fixed) -> moving -> moved -> free, once `test` has reported it.
//! Invariants: a request's slot is reused only after `test` has reported it done. Dropping a comm waits until no thread
//! touches memory of its requests, and loses no byte that was reported as sent. Deregistering memory of a pending
//! request ends the comm in the same way.
//! Read next: `sending.rs`, `receiving.rs`.

use std::ops::Range;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ferrywire_ncclnet::abi::REQUESTS_MAX;

use crate::failure::{Fault, Outcome};
use crate::receiving::RecvComm;
use crate::sending::SendComm;

/// Number of requests that a comm has: twice the number that NCCL posts at most.
pub const REQUESTS: usize = 2 * REQUESTS_MAX;

/// A registration of memory, by the address of its NCCL handle; 0 for none.
pub type Memory = usize;

/// A comm, to which NCCL holds a pointer.
pub struct Comm {
    side: Side,
    requests: [Request; REQUESTS],
}

/// The direction of a comm.
#[allow(clippy::large_enum_variant, reason = "there is one in a box")]
pub enum Side {
    /// The sending end, which `connect` returns.
    Send(SendComm),
    /// The receiving end, which `accept` returns.
    Receive(RecvComm),
}

/// A request, to which NCCL holds a pointer: a slot in its comm.
pub struct Request {
    comm: *const Comm,
    slot: usize,
}

// SAFETY: the pointers are to the comm itself, whose parts are locked or atomic.
unsafe impl Send for Comm {}
// SAFETY: the pointers are to the comm itself, whose parts are locked or atomic.
unsafe impl Sync for Comm {}

impl Comm {
    /// Makes a comm in a box, because its requests refer to its address.
    pub fn new(side: Side) -> Box<Comm> {
        let requests = std::array::from_fn(|slot| Request { comm: ptr::null(), slot });
        let mut comm = Box::new(Comm { side, requests });
        let address: *const Comm = &*comm;
        comm.requests.iter_mut().for_each(|request| request.comm = address);
        comm
    }

    /// Posts a message on a sending comm; `None` if it cannot be posted now.
    pub fn isend(&self, data: *mut u8, bytes: usize, tag: i32, memory: Memory) -> Outcome<Option<&Request>> {
        match &self.side {
            Side::Send(comm) => Ok(comm.post(data, bytes, tag, memory)?.map(|slot| &self.requests[slot])),
            Side::Receive(_) => Err(Fault::usage("isend was called on a comm that receives")),
        }
    }

    /// Posts a receive on a receiving comm; `None` if it cannot be posted now.
    pub fn irecv(&self, data: *mut u8, bytes: usize, memory: Memory) -> Outcome<Option<&Request>> {
        match &self.side {
            Side::Receive(comm) => Ok(comm.post(data, bytes, memory)?.map(|slot| &self.requests[slot])),
            Side::Send(_) => Err(Fault::usage("irecv was called on a comm that sends")),
        }
    }

    /// Ends all use of memory under this registration of `addresses`. A pending request that uses it ends the comm.
    pub fn deregister(&self, memory: Memory, addresses: &Range<usize>) {
        let why =
            || Fault::usage(format_args!("memory at {addresses:#x?} was deregistered while it was used"));
        match &self.side {
            Side::Send(comm) => comm.deregister(memory, why),
            Side::Receive(comm) => comm.deregister(memory, why),
        }
    }
}

impl Request {
    /// Returns the message's length once the request is done, `None` before. An error ends the comm.
    ///
    /// # Safety
    /// The comm of this request is open.
    pub unsafe fn test(&self) -> Outcome<Option<usize>> {
        // SAFETY: the caller promises that the comm of this request is open.
        match unsafe { &(*self.comm).side } {
            Side::Send(comm) => comm.test(self.slot),
            Side::Receive(comm) => comm.test(self.slot),
        }
    }
}

/// Locks a mutex, ignoring poison: every change under these locks is one step, so a panic leaves no half-made state.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The index of the slot for a message number.
pub fn slot_of(message: u64) -> usize {
    (message % REQUESTS as u64) as usize
}
