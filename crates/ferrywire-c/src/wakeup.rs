//! Wakeups: one file descriptor for applications that wait for many things with poll or epoll.
//!
//! Read next: `transfer.rs`, `peer.rs`.

use std::ffi::c_int;
use std::os::fd::AsRawFd;

use crate::endpoint::Endpoint;
use crate::handles::{self, object};
use crate::peer::Peer;
use crate::status::{FERRYWIRE_OK, call};
use crate::transfer::Transfer;

/// A file descriptor that becomes readable when a transfer, peer or endpoint armed with it has something to return.
pub struct Wakeup(ferrywire::Wakeup);

object!(Wakeup, "ferrywire_wakeup", 8);

impl Wakeup {
    pub(crate) fn wake(&self) {
        self.0.wake();
    }
}

/// Makes a wakeup, not readable. An armed object makes it readable once: poll the object, and arm it again if it has
/// nothing to return yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_wakeup_new(wakeup: *mut *mut Wakeup) -> c_int {
    call(|| {
        // SAFETY: the caller promises room for the handle.
        let out = unsafe { handles::place(wakeup) }?;
        out.put(handles::new(Wakeup(ferrywire::Wakeup::new()?))?);
        Ok(FERRYWIRE_OK)
    })
}

/// Returns the file descriptor, for poll and epoll. The wakeup owns it: do not close or read it. A negative number for
/// a wrong handle.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_wakeup_fd(wakeup: *const Wakeup) -> c_int {
    let mut fd = -1;
    let status = call(|| {
        fd = handles::get(wakeup)?.0.as_raw_fd();
        Ok(FERRYWIRE_OK)
    });
    if status == FERRYWIRE_OK { fd } else { status }
}

/// Makes the descriptor not readable. Clear first and poll the armed objects afterwards, so that no event is missed; do
/// not read the descriptor.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_wakeup_clear(wakeup: *mut Wakeup) -> c_int {
    call(|| {
        handles::get(wakeup)?.0.clear();
        Ok(FERRYWIRE_OK)
    })
}

/// Frees the wakeup and closes its descriptor. Objects armed with it signal nothing any more. NULL is allowed.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_wakeup_free(wakeup: *mut Wakeup) -> c_int {
    handles::free(wakeup)
}

/// Makes `wakeup` readable once the transfer has ended, immediately if it already has.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_transfer_arm(transfer: *const Transfer, wakeup: *const Wakeup) -> c_int {
    call(|| {
        handles::get(transfer)?.0.arm(&handles::get(wakeup)?.0);
        Ok(FERRYWIRE_OK)
    })
}

/// Makes `wakeup` readable once `ferrywire_next_notification` has something to return, or the peer is lost.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_peer_arm(peer: *const Peer, wakeup: *const Wakeup) -> c_int {
    call(|| {
        let (peer, wakeup) = (handles::get(peer)?, handles::get(wakeup)?);
        // The engine's wakeup is armed first: a notification that the engine gave out before this call is
        // signalled by the inbox.
        peer.peer.arm(&wakeup.0);
        peer.inbox.arm(&wakeup);
        Ok(FERRYWIRE_OK)
    })
}

/// Makes `wakeup` readable once a peer can be accepted, or the endpoint is closed.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_endpoint_arm(endpoint: *const Endpoint, wakeup: *const Wakeup) -> c_int {
    call(|| {
        handles::get(endpoint)?.0.arm(&handles::get(wakeup)?.0);
        Ok(FERRYWIRE_OK)
    })
}
