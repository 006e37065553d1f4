//! Peers: connecting, accepting, closing, and their notifications.
//!
//! Invariant: a notification that does not fit into a caller's buffer is kept for the next call. Read next:
//! `transfer.rs`.

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
    /// Notifications of the peer, shared by all its handles, so that they deliver each notification once.
    pub(crate) inbox: Arc<Inbox>,
}

object!(Peer, "ferrywire_peer", 3);

fn handle(peer: ferrywire::Peer) -> Result<*mut Peer, Failure> {
    handles::new(Peer { peer, inbox: Arc::default() })
}

/// Size in bytes of a buffer that holds every notification. This version sends at most 8192 bytes.
pub const FERRYWIRE_NOTIFICATION_BYTES_MAX: usize = 65535;

const _: () = assert!(FERRYWIRE_NOTIFICATION_BYTES_MAX >= ferrywire::limits::NOTIFY_BYTES_MAX);

/// Connects to the endpoint that listens on `address`, an IP address with a port ("10.0.0.1:7420"); host names are not
/// resolved. Waits at most `timeout_ms` milliseconds; a negative value is no limit.
///
/// Errors: FERRYWIRE_ERROR_PEER if no endpoint answers, FERRYWIRE_ERROR_REFUSED for a wrong secret,
/// FERRYWIRE_ERROR_TIMEOUT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_connect(
    endpoint: *mut Endpoint,
    address: *const c_char,
    timeout_ms: i64,
    peer: *mut *mut Peer,
) -> c_int {
    call(|| {
        // SAFETY: the caller promises room for the handle, and a NUL-terminated string.
        let (out, address) = unsafe { (handles::place(peer)?, text("the address", address)?) };
        let endpoint = handles::get(endpoint)?;
        out.put(handle(endpoint.0.connect(parse_address(address)?, limit(timeout_ms))?)?);
        Ok(FERRYWIRE_OK)
    })
}

/// Connects to the endpoint that made this metadata, and to no other: an endpoint that has restarted since has another
/// identity and is refused (FERRYWIRE_ERROR_REFUSED). Tries all addresses in the metadata, in `timeout_ms` milliseconds
/// altogether; a negative value is no limit.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_connect_metadata(
    endpoint: *mut Endpoint,
    metadata: *const c_void,
    metadata_bytes: usize,
    timeout_ms: i64,
    peer: *mut *mut Peer,
) -> c_int {
    call(|| {
        // SAFETY: the caller promises room for the handle, and as many bytes as stated.
        let (out, metadata) =
            unsafe { (handles::place(peer)?, bytes("the metadata", metadata, metadata_bytes)?) };
        let endpoint = handles::get(endpoint)?;
        out.put(handle(endpoint.0.connect_metadata(metadata, limit(timeout_ms))?)?);
        Ok(FERRYWIRE_OK)
    })
}

/// Waits at most `timeout_ms` milliseconds for the next peer that connects; a negative value is no limit. With 0 the
/// call does not wait and returns FERRYWIRE_PENDING if no peer has connected.
///
/// Errors: FERRYWIRE_ERROR_TIMEOUT; FERRYWIRE_ERROR_CLOSED once the endpoint is closed; FERRYWIRE_ERROR_USAGE if the
/// endpoint does not listen.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_accept(
    endpoint: *mut Endpoint,
    timeout_ms: i64,
    peer: *mut *mut Peer,
) -> c_int {
    call(|| {
        // SAFETY: the caller promises room for the handle.
        let out = unsafe { handles::place(peer) }?;
        let endpoint = handles::get(endpoint)?;
        let accepted = match timeout_ms {
            0 => {
                if endpoint.0.listen_addresses().is_empty() {
                    // `accept` returns the error that says that the endpoint does not listen.
                    Some(endpoint.0.accept(Duration::ZERO)?)
                } else {
                    endpoint.0.try_accept().transpose()?
                }
            }
            _ => Some(endpoint.0.accept(limit(timeout_ms))?),
        };
        let Some(accepted) = accepted else {
            return Ok(FERRYWIRE_PENDING);
        };
        out.put(handle(accepted)?);
        Ok(FERRYWIRE_OK)
    })
}

/// Finishes on both sides what was posted, then closes the connection, within about `timeout_ms` milliseconds; a
/// negative value is no limit. The peer is closed also when the call fails: with FERRYWIRE_ERROR_TIMEOUT if the peer
/// did not finish in time, with FERRYWIRE_ERROR_PEER if it was lost before it had finished. The handle still has to be
/// freed.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_peer_close(peer: *mut Peer, timeout_ms: i64) -> c_int {
    call(|| {
        handles::get(peer)?.peer.close(limit(timeout_ms))?;
        Ok(FERRYWIRE_OK)
    })
}

/// Frees the handle. When the peer's last handle is freed, the connection is closed after what was posted has been
/// sent. NULL is allowed.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_peer_free(peer: *mut Peer) -> c_int {
    handles::free(peer)
}

/// Returns FERRYWIRE_OK while the peer is connected, or else the status of the error by which it was lost.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_peer_error(peer: *const Peer) -> c_int {
    call(|| match handles::get(peer)?.peer.error() {
        Some(error) => Err(error.into()),
        None => Ok(FERRYWIRE_OK),
    })
}

/// Copies the address of the remote end of the control connection into `address` as a NUL-terminated string. Buffer and
/// errors as in `ferrywire_endpoint_address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_peer_address(
    peer: *const Peer,
    address: *mut c_char,
    capacity: usize,
    bytes: *mut usize,
) -> c_int {
    call(|| {
        let address_of = format!("{}\0", handles::get(peer)?.peer.address());
        // SAFETY: the caller promises a buffer of this capacity.
        unsafe { copy_out(address_of.as_bytes(), address.cast(), capacity, bytes) }
    })
}

/// Copies the label that the remote endpoint was opened with into `label` as a NUL-terminated string, empty if it has
/// none. Buffer and errors as in `ferrywire_endpoint_address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_peer_label(
    peer: *const Peer,
    label: *mut c_char,
    capacity: usize,
    bytes: *mut usize,
) -> c_int {
    call(|| {
        let label_of = format!("{}\0", handles::get(peer)?.peer.label());
        // SAFETY: the caller promises a buffer of this capacity.
        unsafe { copy_out(label_of.as_bytes(), label.cast(), capacity, bytes) }
    })
}

/// Copies the remote endpoint's identity, 16 bytes, into `identity`. A restarted endpoint has a new identity.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_peer_identity(
    peer: *const Peer,
    identity: *mut c_void,
    capacity: usize,
) -> c_int {
    call(|| {
        let peer = handles::get(peer)?;
        // SAFETY: the caller promises a buffer of this capacity.
        unsafe { copy_out(&peer.peer.identity().0, identity, capacity, std::ptr::null_mut()) }
    })
}

/// Makes another handle of the peer, for operations in the order of a GPU's work. Operations posted through this handle
/// use memory only after the work that is in `stream` now has finished. `stream` is a CUstream or cudaStream_t of the
/// primary context of GPU `gpu`, and captures no CUDA graph; NULL is the default stream. The call does not wait for the
/// stream. The new handle is freed like any other.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_peer_on_stream(
    peer: *const Peer,
    gpu: u32,
    stream: *mut c_void,
    after: *mut *mut Peer,
) -> c_int {
    call(|| {
        // SAFETY: the caller promises room for the handle.
        let out = unsafe { handles::place(after) }?;
        let peer = handles::get(peer)?;
        let gpu = CudaGpu::open(gpu)?;
        // SAFETY: the caller promises a live stream of this GPU.
        let ready = unsafe { StreamEvent::after_raw_stream(&gpu, stream.cast()) }?;
        out.put(handles::new(Peer { peer: peer.peer.on_stream(ready), inbox: peer.inbox.clone() })?);
        Ok(FERRYWIRE_OK)
    })
}

/// Takes the peer's next notification. Waits at most `timeout_ms` milliseconds; a negative value is no limit. With 0
/// the call does not wait and returns FERRYWIRE_PENDING if there is none. Sets `*bytes`, unless `bytes` is NULL, to the
/// notification's length. A notification that does not fit (FERRYWIRE_ERROR_TOO_SMALL) is kept for the next call of any
/// thread. Notifications that arrived before the peer was lost are still returned.
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
        // SAFETY: the caller promises a buffer of this capacity.
        let copy = |next: &[u8]| unsafe { copy_out(next, message, capacity, bytes) };
        peer.inbox.next(&peer.peer, timeout_ms, copy)
    })
}

/// Hands notifications from the engine to callers. One caller at a time waits for the engine; a notification
/// stays in the inbox until it has fitted into a caller's buffer.
pub(crate) struct Inbox {
    /// The process that made the peer. In a forked child the state is a copy, and the threads that wait in it do not exist.
    process: u32,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    next: Option<Vec<u8>>,
    /// Whether a caller waits for the engine.
    waits: bool,
    /// Wakeups that were armed while a caller waited for the engine: the engine no longer signals a
    /// notification that this caller took.
    wakeups: Vec<Weak<Wakeup>>,
}

impl Default for Inbox {
    fn default() -> Inbox {
        Inbox { process: std::process::id(), state: Mutex::default(), changed: Condvar::new() }
    }
}

impl Inbox {
    /// Signals `wakeup` if a notification did not fit into a caller's buffer: now, or once the caller that
    /// has one finds that it does not fit.
    pub(crate) fn arm(&self, wakeup: &Arc<Wakeup>) {
        if std::process::id() != self.process {
            // The call that follows has the error.
            return wakeup.wake();
        }
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

    /// Passes the next notification to `copy`, which copies it or fails. A failed copy keeps the notification.
    fn next(
        &self,
        peer: &ferrywire::Peer,
        timeout_ms: i64,
        copy: impl FnOnce(&[u8]) -> Result<c_int, Failure>,
    ) -> Result<c_int, Failure> {
        let here = std::process::id();
        if here != self.process {
            return Err(ferrywire::Error::Forked { built_in: self.process, here }.into());
        }
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
                // Waiting callers check again: for the notification that is kept, or for the next one.
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
                // The next notification belongs to the caller that waits for the engine.
                return Ok(FERRYWIRE_PENDING);
            } else if left.is_zero() {
                let what = format!("a notification from {} (another thread waits for one too)", peer.name());
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

/// One caller's turn to wait for the engine; it ends when the value is dropped.
struct Turn<'a>(&'a Inbox);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.waits = false;
        if state.next.is_none() {
            // The engine signals these wakeups at the next notification.
            state.wakeups.clear();
        }
        drop(state);
        self.0.changed.notify_all();
    }
}
