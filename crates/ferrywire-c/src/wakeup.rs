//! A descriptor for programs that wait for many things.

use std::ffi::c_int;
use std::os::fd::AsRawFd;

use crate::endpoint::Endpoint;
use crate::handles::{self, object};
use crate::peer::Peer;
use crate::status::{FERRYWIRE_OK, call};
use crate::transfer::Transfer;

/// A descriptor that is readable when one of the things attached to it has something to give.
pub struct Wakeup(ferrywire::Wakeup);

object!(Wakeup, "ferrywire_wakeup", 8);

impl Wakeup {
    pub(crate) fn wake(&self) {
        self.0.wake();
    }
}

/// Makes a wakeup, not readable. Attachments wake once: poll what was attached, and attach again what has nothing yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_wakeup_new(wakeup: *mut *mut Wakeup) -> c_int {
    call(|| {
        // SAFETY: by the caller's promise.
        let out = unsafe { handles::place(wakeup) }?;
        out.put(handles::new(Wakeup(ferrywire::Wakeup::new()?))?);
        Ok(FERRYWIRE_OK)
    })
}

/// The descriptor, for poll and epoll; it stays the wakeup's. Less than 0 for a wrong handle.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_wakeup_fd(wakeup: *const Wakeup) -> c_int {
    let mut fd = -1;
    let status = call(|| {
        fd = handles::get(wakeup)?.0.as_raw_fd();
        Ok(FERRYWIRE_OK)
    });
    if status == FERRYWIRE_OK { fd } else { status }
}

/// Makes it not readable. Clear first, and look at what was attached afterwards; do not read the descriptor.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_wakeup_clear(wakeup: *mut Wakeup) -> c_int {
    call(|| {
        handles::get(wakeup)?.0.clear();
        Ok(FERRYWIRE_OK)
    })
}

/// Frees it, and closes its descriptor; what was attached wakes nobody. NULL is fine.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_wakeup_free(wakeup: *mut Wakeup) -> c_int {
    handles::free(wakeup)
}

/// Makes `wakeup` readable once the transfer has ended, also when it already has.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_transfer_arm(transfer: *const Transfer, wakeup: *const Wakeup) -> c_int {
    call(|| {
        handles::get(transfer)?.0.arm(&handles::get(wakeup)?.0);
        Ok(FERRYWIRE_OK)
    })
}

/// Makes `wakeup` readable once `ferrywire_next_notification` has something to give, or the peer is lost.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_peer_arm(peer: *const Peer, wakeup: *const Wakeup) -> c_int {
    call(|| {
        let (peer, wakeup) = (handles::get(peer)?, handles::get(wakeup)?);
        // In this order: what the engine has given before this is the inbox's to tell.
        peer.peer.arm(&wakeup.0);
        peer.inbox.arm(&wakeup);
        Ok(FERRYWIRE_OK)
    })
}

/// Makes `wakeup` readable once there is a peer to accept, or the endpoint is closed.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_endpoint_arm(endpoint: *const Endpoint, wakeup: *const Wakeup) -> c_int {
    call(|| {
        handles::get(endpoint)?.0.arm(&handles::get(wakeup)?.0);
        Ok(FERRYWIRE_OK)
    })
}
