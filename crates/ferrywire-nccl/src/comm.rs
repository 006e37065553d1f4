//! Comms: what `connect` and `accept` give, and the requests posted on them.
//!
//! Sends and receives are numbered alike at both ends: message number k goes into receive number k. The state that
//! workers share is apart ([`sending::Sending`](crate::sending::Sending),
//! [`receiving::Receiving`](crate::receiving::Receiving)) from what only NCCL's thread touches.
//!
//! A request's life: free -> posted (its number is fixed) -> moving -> moved -> free, when `test` has said so.
//! Invariants: the slot of a request is used again only after `test` has said that it is done; a comm that is dropped
//! waits until no thread touches memory of its requests, and cuts nothing that was told as sent; so does one whose
//! memory is deregistered before its requests are done, which is its end.
//! Read next: `sending.rs`, `receiving.rs`.

use std::ops::Range;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ferrywire_ncclnet::abi::REQUESTS_MAX;

use crate::failure::{Fault, Outcome};
use crate::receiving::RecvComm;
use crate::sending::SendComm;

/// Requests of a comm at once: what NCCL posts at most, and as much again.
pub const REQUESTS: usize = 2 * REQUESTS_MAX;

/// A registration, by the address of what NCCL was given for it; 0 for none.
pub type Memory = usize;

/// A comm behind the pointer that NCCL has.
pub struct Comm {
    side: Side,
    requests: [Request; REQUESTS],
}

/// Which way a comm goes.
#[allow(clippy::large_enum_variant, reason = "there is one in a box")]
pub enum Side {
    /// What `connect` gives.
    Send(SendComm),
    /// What `accept` gives.
    Receive(RecvComm),
}

/// A request behind the pointer that NCCL has: a place in its comm.
pub struct Request {
    comm: *const Comm,
    slot: usize,
}

// SAFETY: the pointers are to the comm itself, whose parts are locked or atomic.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

impl Comm {
    /// In a box, whose address its requests have.
    pub fn new(side: Side) -> Box<Comm> {
        let requests = std::array::from_fn(|slot| Request { comm: ptr::null(), slot });
        let mut comm = Box::new(Comm { side, requests });
        let address: *const Comm = &*comm;
        comm.requests.iter_mut().for_each(|request| request.comm = address);
        comm
    }

    /// Posts a message; `None`: not now.
    pub fn isend(&self, data: *mut u8, bytes: usize, tag: i32, memory: Memory) -> Outcome<Option<&Request>> {
        match &self.side {
            Side::Send(comm) => Ok(comm.post(data, bytes, tag, memory)?.map(|slot| &self.requests[slot])),
            Side::Receive(_) => Err(Fault::usage("isend on a comm that receives")),
        }
    }

    /// Posts a receive; `None`: not now.
    pub fn irecv(&self, data: *mut u8, bytes: usize, memory: Memory) -> Outcome<Option<&Request>> {
        match &self.side {
            Side::Receive(comm) => Ok(comm.post(data, bytes, memory)?.map(|slot| &self.requests[slot])),
            Side::Send(_) => Err(Fault::usage("irecv on a comm that sends")),
        }
    }

    /// From its return on nobody touches memory that was used under this registration, which was of these addresses.
    /// Requests that are not done end the comm.
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
    /// The length of the message once it is done, and `None` before. An error ends the comm.
    ///
    /// # Safety
    /// The comm of this request is open.
    pub unsafe fn test(&self) -> Outcome<Option<usize>> {
        // SAFETY: by the caller's promise.
        match unsafe { &(*self.comm).side } {
            Side::Send(comm) => comm.test(self.slot),
            Side::Receive(comm) => comm.test(self.slot),
        }
    }
}

/// What a panic left is as good as before: every change under these locks is one step.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of a slot.
pub fn slot_of(message: u64) -> usize {
    (message % REQUESTS as u64) as usize
}
