//! Peers: connected, accepted, told of, closed; their notifications.

use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use ferrywire::StreamEvent;
use ferrywire_memory::cuda::CudaGpu;

use crate::endpoint::Endpoint;
use crate::handles::{self, object};
use crate::options::parse_address;
use crate::status::{FERRYWIRE_OK, FERRYWIRE_PENDING, Failure, bytes, call, copy_out, limit, text};
use crate::wakeup::Wakeup;

/// A connected remote endpoint.
pub struct Peer {
    pub(crate) peer: ferrywire::Peer,
    /// Shared by the handles made of this one.
    pub(crate) inbox: Arc<Inbox>,
}

object!(Peer, "ferrywire_peer", 3);

fn handle(peer: ferrywire::Peer) -> Result<*mut Peer, Failure> {
    handles::new(Peer { peer, inbox: Arc::default() })
}

/// Room that fits every notification, in bytes. What can be sent is shorter: at most 8192 bytes in this version.
pub const FERRYWIRE_NOTIFICATION_BYTES_MAX: usize = 65535;

const _: () = assert!(FERRYWIRE_NOTIFICATION_BYTES_MAX >= ferrywire::limits::NOTIFY_BYTES_MAX);

/// Connects to an endpoint that listens on `address`, an IP address with a port ("10.0.0.1:7420"): names are not looked up. `timeout_ms` is milliseconds, less than 0
/// without end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_connect(
    endpoint: *mut Endpoint,
    address: *const c_char,
    timeout_ms: i64,
    peer: *mut *mut Peer,
) -> c_int {
    call(|| {
        // SAFETY: by the caller's promise.
        let (out, address) = unsafe { (handles::place(peer)?, text("the address", address)?) };
        let endpoint = handles::get(endpoint)?;
        out.put(handle(endpoint.0.connect(parse_address(address)?, limit(timeout_ms))?)?);
        Ok(FERRYWIRE_OK)
    })
}

/// Connects to the endpoint that made this metadata, and to no other: one that was started again is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_connect_metadata(
    endpoint: *mut Endpoint,
    metadata: *const c_void,
    metadata_bytes: usize,
    timeout_ms: i64,
    peer: *mut *mut Peer,
) -> c_int {
    call(|| {
        // SAFETY: by the caller's promise.
        let (out, metadata) =
            unsafe { (handles::place(peer)?, bytes("the metadata", metadata, metadata_bytes)?) };
        let endpoint = handles::get(endpoint)?;
        out.put(handle(endpoint.0.connect_metadata(metadata, limit(timeout_ms))?)?);
        Ok(FERRYWIRE_OK)
    })
}

/// Waits for the next peer that connects. With `timeout_ms` 0: FERRYWIRE_PENDING if there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_accept(
    endpoint: *mut Endpoint,
    timeout_ms: i64,
    peer: *mut *mut Peer,
) -> c_int {
    call(|| {
        // SAFETY: by the caller's promise.
        let out = unsafe { handles::place(peer) }?;
        let endpoint = handles::get(endpoint)?;
        let accepted = match timeout_ms {
            0 => match endpoint.0.listen_addresses().is_empty() {
                // Says what is wrong.
                true => Some(endpoint.0.accept(Duration::ZERO)?),
                false => endpoint.0.try_accept().transpose()?,
            },
            _ => Some(endpoint.0.accept(limit(timeout_ms))?),
        };
        let Some(accepted) = accepted else {
            return Ok(FERRYWIRE_PENDING);
        };
        out.put(handle(accepted)?);
        Ok(FERRYWIRE_OK)
    })
}

/// Finishes what was posted, on both sides, then closes. The handle is still to be freed.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_peer_close(peer: *mut Peer, timeout_ms: i64) -> c_int {
    call(|| {
        handles::get(peer)?.peer.close(limit(timeout_ms))?;
        Ok(FERRYWIRE_OK)
    })
}

/// Frees the handle; with the last one of a peer the connection is closed once what was posted is sent. NULL is fine.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_peer_free(peer: *mut Peer) -> c_int {
    handles::free(peer)
}

/// FERRYWIRE_OK while the peer is there; else why it is lost.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_peer_error(peer: *const Peer) -> c_int {
    call(|| match handles::get(peer)?.peer.error() {
        Some(error) => Err(error.into()),
        None => Ok(FERRYWIRE_OK),
    })
}

/// Its address, as a string with its closing zero; see `ferrywire_endpoint_address` for the buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_peer_address(
    peer: *const Peer,
    address: *mut c_char,
    capacity: usize,
    bytes: *mut usize,
) -> c_int {
    call(|| {
        let address_of = format!("{}\0", handles::get(peer)?.peer.address());
        // SAFETY: by the caller's promise.
        unsafe { copy_out(address_of.as_bytes(), address.cast(), capacity, bytes) }
    })
}

/// The label that it was given where it was opened, as a string with its closing zero; empty without one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_peer_label(
    peer: *const Peer,
    label: *mut c_char,
    capacity: usize,
    bytes: *mut usize,
) -> c_int {
    call(|| {
        let label_of = format!("{}\0", handles::get(peer)?.peer.label());
        // SAFETY: by the caller's promise.
        unsafe { copy_out(label_of.as_bytes(), label.cast(), capacity, bytes) }
    })
}

/// Its identity, 16 bytes: another one after a restart.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_peer_identity(
    peer: *const Peer,
    identity: *mut c_void,
    capacity: usize,
) -> c_int {
    call(|| {
        let peer = handles::get(peer)?;
        // SAFETY: by the caller's promise.
        unsafe { copy_out(&peer.peer.identity().0, identity, capacity, std::ptr::null_mut()) }
    })
}

/// Another handle of the peer: what is posted through it uses memory only once everything that `stream` (a CUstream or
/// cudaStream_t of GPU `gpu`'s primary context; NULL is the default one) has to do by now is done. The caller goes on
/// at once. To be freed as any other.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_peer_on_stream(
    peer: *const Peer,
    gpu: u32,
    stream: *mut c_void,
    after: *mut *mut Peer,
) -> c_int {
    call(|| {
        // SAFETY: by the caller's promise.
        let out = unsafe { handles::place(after) }?;
        let peer = handles::get(peer)?;
        let gpu = CudaGpu::open(gpu).map_err(ferrywire::Error::from)?;
        // SAFETY: by the caller's promise, a live stream of this GPU.
        let ready = unsafe { StreamEvent::after_raw_stream(&gpu, stream.cast()) }?;
        out.put(handles::new(Peer { peer: peer.peer.on_stream(ready), inbox: peer.inbox.clone() })?);
        Ok(FERRYWIRE_OK)
    })
}

/// The next notification of the peer. With `timeout_ms` 0: FERRYWIRE_PENDING if none is here. `bytes` (or NULL) is told
/// its length; one that does not fit (FERRYWIRE_ERROR_TOO_SMALL) is kept for the next call of any thread. Those that came
/// before a peer was lost are still given.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_next_notification(
    peer: *mut Peer,
    timeout_ms: i64,
    message: *mut c_void,
    capacity: usize,
    bytes: *mut usize,
) -> c_int {
    call(|| {
        let peer = handles::get(peer)?;
        // SAFETY: by the caller's promise.
        let copy = |next: &[u8]| unsafe { copy_out(next, message, capacity, bytes) };
        peer.inbox.next(&peer.peer, timeout_ms, copy)
    })
}

/// The way of notifications to callers: one of them waits for the next, which stays here until it has fitted into
/// somebody's buffer.
#[derive(Default)]
pub(crate) struct Inbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    next: Option<Vec<u8>>,
    /// Somebody waits for the engine.
    waits: bool,
    /// Attached meanwhile: the engine tells nobody of what it has given already.
    wakeups: Vec<Weak<Wakeup>>,
}

impl Inbox {
    /// Wakes it if there is one that did not fit, or once the one that somebody has in hand did not.
    pub(crate) fn arm(&self, wakeup: &Arc<Wakeup>) {
        let mut state = self.lock();
        if state.next.is_some() {
            wakeup.wake();
        } else if state.waits {
            let wakeup = Arc::downgrade(wakeup);
            state.wakeups.retain(|other| other.strong_count() > 0 && !other.ptr_eq(&wakeup));
            state.wakeups.push(wakeup);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the next notification to `copy`, which takes it or fails.
    fn next(
        &self,
        peer: &ferrywire::Peer,
        timeout_ms: i64,
        copy: impl FnOnce(&[u8]) -> Result<c_int, Failure>,
    ) -> Result<c_int, Failure> {
        let (limit, since) = (limit(timeout_ms), Instant::now());
        let mut state = self.lock();
        loop {
            if let Some(next) = &state.next {
                let copied = copy(next);
                let wakeups = std::mem::take(&mut state.wakeups);
                match copied {
                    Ok(_) => state.next = None,
                    Err(_) => wakeups.iter().filter_map(Weak::upgrade).for_each(|wakeup| wakeup.wake()),
                }
                // Whoever waits looks again: at what is left, or for the next.
                self.changed.notify_all();
                return copied;
            }
            let left = limit.saturating_sub(since.elapsed());
            if !state.waits {
                state.waits = true;
                drop(state);
                let turn = Turn(self);
                let came = match timeout_ms {
                    0 => peer.poll_notification()?,
                    _ => Some(peer.wait_notification(left)?),
                };
                let Some(came) = came else { return Ok(FERRYWIRE_PENDING) };
                self.lock().next = Some(came);
                drop(turn);
                state = self.lock();
            } else if timeout_ms == 0 {
                // The next one is for whoever waits.
                return Ok(FERRYWIRE_PENDING);
            } else if left.is_zero() {
                let what = format!("a notification from {}, for which another thread waits too", peer.name());
                return Err(ferrywire::Error::Stalled {
                    what,
                    peer: Some(peer.name()),
                    waited: since.elapsed(),
                }
                .into());
            } else {
                state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}

/// The turn of the one who waits.
struct Turn<'a>(&'a Inbox);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.waits = false;
        if state.next.is_none() {
            // The engine tells them.
            state.wakeups.clear();
        }
        drop(state);
        self.0.changed.notify_all();
    }
}
