//! Endpoints: opened, told of, closed.

use std::ffi::{c_char, c_int, c_void};

use crate::handles::{self, object};
use crate::options::Options;
use crate::status::{FERRYWIRE_OK, Failure, call, copy_out, limit, put_if_wanted};

/// One end of transfers: memory, NICs, threads and peers.
pub struct Endpoint(pub(crate) ferrywire::Endpoint);

object!(Endpoint, "ferrywire_endpoint", 2);

/// Opens an endpoint: checks the options, listens, starts its threads. `options` may be NULL: all defaults, and it does
/// not listen.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_endpoint_open(
    options: *const Options,
    endpoint: *mut *mut Endpoint,
) -> c_int {
    call(|| {
        // SAFETY: by the caller's promise.
        let out = unsafe { handles::place(endpoint) }?;
        let builder = match options.is_null() {
            true => ferrywire::Endpoint::builder(),
            false => handles::get(options)?.builder(),
        };
        out.put(handles::new(Endpoint(builder.build()?))?);
        Ok(FERRYWIRE_OK)
    })
}

/// Finishes with all peers and ends the threads, within about `timeout_ms` milliseconds (less than 0: without end). The
/// handle is still to be freed.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_endpoint_close(endpoint: *mut Endpoint, timeout_ms: i64) -> c_int {
    call(|| {
        handles::get(endpoint)?.0.close(limit(timeout_ms))?;
        Ok(FERRYWIRE_OK)
    })
}

/// Frees the handle. An endpoint that was not closed is closed now, which may take seconds. NULL is fine.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_endpoint_free(endpoint: *mut Endpoint) -> c_int {
    handles::free(endpoint)
}

/// The endpoint's identity, 16 bytes: another one at each start.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_endpoint_identity(
    endpoint: *const Endpoint,
    identity: *mut c_void,
    capacity: usize,
) -> c_int {
    call(|| {
        let endpoint = handles::get(endpoint)?;
        // SAFETY: by the caller's promise.
        unsafe { copy_out(&endpoint.0.identity().0, identity, capacity, std::ptr::null_mut()) }
    })
}

/// The address that it listens on, with its real port, as a string with its closing zero. `bytes` (or NULL) is told how
/// long that is, also when the buffer is too small.
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
        // SAFETY: by the caller's promise.
        unsafe { copy_out(format!("{first}\0").as_bytes(), address.cast(), capacity, bytes) }
    })
}

/// What another endpoint needs to connect, as opaque bytes: put them into a message, a file, a store. `bytes` (or NULL)
/// is told how many there are, also when the buffer is too small.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_endpoint_metadata(
    endpoint: *const Endpoint,
    metadata: *mut c_void,
    capacity: usize,
    bytes: *mut usize,
) -> c_int {
    call(|| {
        let endpoint = handles::get(endpoint)?;
        // SAFETY: by the caller's promise.
        unsafe { copy_out(&endpoint.0.metadata(), metadata, capacity, bytes) }
    })
}

/// Turns everything once that no thread turns; `worked` (or NULL) is told whether anything happened. Only needed in an
/// endpoint without threads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_endpoint_progress(endpoint: *mut Endpoint, worked: *mut bool) -> c_int {
    call(|| {
        let any = handles::get(endpoint)?.0.progress();
        // SAFETY: by the caller's promise.
        unsafe { put_if_wanted(worked, any) };
        Ok(FERRYWIRE_OK)
    })
}
