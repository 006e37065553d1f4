//! Endpoints: opening, closing, and their addresses.
//!
//! Read next: `peer.rs`.

use std::ffi::{c_char, c_int, c_void};

use crate::handles::{self, object};
use crate::options::Options;
use crate::status::{FERRYWIRE_OK, Failure, call, copy_out, limit, put_if_wanted};

/// One GPU or the host's memory, with its NICs, progress threads, regions and peers.
pub struct Endpoint(pub(crate) ferrywire::Endpoint);

object!(Endpoint, "ferrywire_endpoint", 2, Endpoint::close_in_use);

impl Endpoint {
    /// Calls on the endpoint return then; the last one drops it.
    fn close_in_use(&self) {
        // Freeing has no outcome to report, as dropping has none.
        let _ = self.0.close_as_dropped();
    }
}

/// Opens an endpoint: checks the options, listens, starts the threads. `options` NULL means all defaults; the endpoint
/// then does not listen.
///
/// Errors: FERRYWIRE_ERROR_USAGE for an impossible option, FERRYWIRE_ERROR_LOCAL if this host refuses, for example
/// because the port is in use.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_endpoint_open(
    options: *const Options,
    endpoint: *mut *mut Endpoint,
) -> c_int {
    call(|| {
        // SAFETY: the caller promises room for the handle.
        let out = unsafe { handles::place(endpoint) }?;
        ferrywire::metrics::set_face("c");
        let builder =
            if options.is_null() { ferrywire::Endpoint::builder() } else { handles::get(options)?.builder() };
        builder.check_nics()?;
        out.put(handles::new(Endpoint(builder.build()?))?);
        Ok(FERRYWIRE_OK)
    })
}

/// Accepts no new peer, finishes with all peers, stops listening and ends the threads: the port is free then. That takes
/// about `timeout_ms` milliseconds at most; a negative value is no limit. The endpoint is closed also when the call fails:
/// with FERRYWIRE_ERROR_TIMEOUT if a peer did not finish in time, with FERRYWIRE_ERROR_PEER if a peer was lost before it
/// had finished. The handle still has to be freed.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_endpoint_close(endpoint: *mut Endpoint, timeout_ms: i64) -> c_int {
    call(|| {
        handles::get(endpoint)?.0.close(limit(timeout_ms))?;
        Ok(FERRYWIRE_OK)
    })
}

/// Frees the handle. An endpoint that is still open is closed first, which may take seconds; calls of other threads that
/// wait for the endpoint return FERRYWIRE_ERROR_CLOSED. NULL is allowed.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_endpoint_free(endpoint: *mut Endpoint) -> c_int {
    handles::free(endpoint)
}

/// Copies the endpoint's identity, 16 bytes, into `identity`. Each start of an endpoint makes a new identity.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_endpoint_identity(
    endpoint: *const Endpoint,
    identity: *mut c_void,
    capacity: usize,
) -> c_int {
    call(|| {
        let endpoint = handles::get(endpoint)?;
        // SAFETY: the caller promises a buffer of this capacity.
        unsafe { copy_out(&endpoint.0.identity().0, identity, capacity, std::ptr::null_mut()) }
    })
}

/// Copies the address on which the endpoint listens, with its real port, into `address`, a buffer of `capacity` bytes,
/// as a NUL-terminated string. Sets `*bytes`, unless `bytes` is NULL, to the string's length with its NUL, also if the
/// buffer is too small (FERRYWIRE_ERROR_TOO_SMALL). FERRYWIRE_ERROR_USAGE if the endpoint does not listen.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_endpoint_address(
    endpoint: *const Endpoint,
    address: *mut c_char,
    capacity: usize,
    bytes: *mut usize,
) -> c_int {
    call(|| {
        let endpoint = handles::get(endpoint)?;
        let listening = endpoint.0.listen_addresses();
        let first = listening.first().ok_or_else(|| {
            Failure::usage("the endpoint does not listen: open it with ferrywire_options_listen")
        })?;
        // SAFETY: the caller promises a buffer of this capacity.
        unsafe { copy_out(format!("{first}\0").as_bytes(), address.cast(), capacity, bytes) }
    })
}

/// Copies the endpoint's identity and addresses, as opaque bytes for `ferrywire_connect_metadata`, into the buffer of
/// `capacity` bytes; the application carries them to the other process. Sets `*bytes`, unless `bytes` is NULL, to the
/// number of bytes, also if the buffer is too small (FERRYWIRE_ERROR_TOO_SMALL).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_endpoint_metadata(
    endpoint: *const Endpoint,
    metadata: *mut c_void,
    capacity: usize,
    bytes: *mut usize,
) -> c_int {
    call(|| {
        let endpoint = handles::get(endpoint)?;
        // SAFETY: the caller promises a buffer of this capacity.
        unsafe { copy_out(&endpoint.0.metadata(), metadata, capacity, bytes) }
    })
}

/// Makes one pass over everything that no thread moves forward, and sets `*worked`, unless `worked` is NULL, to whether
/// anything happened; a GPU may copy although nothing did. Only needed for an endpoint without threads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_endpoint_progress(endpoint: *mut Endpoint, worked: *mut bool) -> c_int {
    call(|| {
        let endpoint = handles::get(endpoint)?;
        endpoint.0.check_process()?;
        let any = endpoint.0.progress();
        // SAFETY: the caller promises room for the result, or null.
        unsafe { put_if_wanted(worked, any) };
        Ok(FERRYWIRE_OK)
    })
}
