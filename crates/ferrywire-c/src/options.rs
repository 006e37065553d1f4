//! How an endpoint is to be built. Everything has a default that fits the host.

use std::ffi::{c_char, c_int, c_void};
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ferrywire::Builder;

use crate::handles::{self, object};
use crate::status::{FERRYWIRE_OK, Failure, bytes, call, text};

/// Options of an endpoint, from `ferrywire_options_new`.
pub struct Options(Mutex<Building>);

struct Building {
    builder: Builder,
    nics: Vec<String>,
}

object!(Options, "ferrywire_options", 1);

impl Options {
    /// The builder as it stands.
    pub(crate) fn builder(&self) -> Builder {
        let building = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match building.nics.is_empty() {
            true => building.builder.clone(),
            false => building.builder.clone().nics(building.nics.clone()),
        }
    }
}

fn change(options: *const Options, with: impl FnOnce(Builder) -> Result<Builder, Failure>) -> c_int {
    call(|| {
        let options = handles::get(options)?;
        let mut building = options.0.lock().unwrap_or_else(PoisonError::into_inner);
        building.builder = with(building.builder.clone())?;
        Ok(FERRYWIRE_OK)
    })
}

/// Makes options that are all at their defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_options_new(options: *mut *mut Options) -> c_int {
    call(|| {
        // SAFETY: by the caller's promise.
        let out = unsafe { handles::place(options) }?;
        let building = Building { builder: ferrywire::Endpoint::builder(), nics: Vec::new() };
        out.put(handles::new(Options(Mutex::new(building)))?);
        Ok(FERRYWIRE_OK)
    })
}

/// Frees options; endpoints that were opened with them stay as they are.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_options_free(options: *mut Options) -> c_int {
    handles::free(options)
}

/// Listens on this IP address, such as "0.0.0.0:7420"; port 0 chooses one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_options_listen(options: *mut Options, address: *const c_char) -> c_int {
    change(options, |builder| {
        // SAFETY: by the caller's promise.
        Ok(builder.listen(parse_address(unsafe { text("the address", address) }?)?))
    })
}

/// The shared secret, the same on both ends, at least 8 bytes. Needed beyond loopback.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_options_secret(
    options: *mut Options,
    secret: *const c_void,
    secret_bytes: usize,
) -> c_int {
    change(options, |builder| {
        // SAFETY: by the caller's promise.
        Ok(builder.secret(unsafe { bytes("the secret", secret, secret_bytes) }?))
    })
}

/// A name for people, at most 64 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_options_label(options: *mut Options, label: *const c_char) -> c_int {
    change(options, |builder| {
        // SAFETY: by the caller's promise.
        Ok(builder.label(unsafe { text("the label", label) }?))
    })
}

/// One more NIC to use, by name. Default: all that share a subnet with the peer, else the route's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_options_nic(options: *mut Options, name: *const c_char) -> c_int {
    call(|| {
        let options = handles::get(options)?;
        // SAFETY: by the caller's promise.
        let name = unsafe { text("the NIC's name", name) }?;
        options.0.lock().unwrap_or_else(PoisonError::into_inner).nics.push(name.to_owned());
        Ok(FERRYWIRE_OK)
    })
}

/// Channels for each peer. Default: by cores and NICs.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_options_channels(options: *mut Options, channels: usize) -> c_int {
    change(options, |builder| Ok(builder.channels(channels)))
}

/// Progress threads. With 0 there are none: `ferrywire_endpoint_progress` and calls that wait drive everything.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_options_threads(options: *mut Options, threads: usize) -> c_int {
    change(options, |builder| Ok(builder.threads(threads)))
}

/// The largest chunk, in bytes.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_options_chunk_bytes(options: *mut Options, bytes: usize) -> c_int {
    change(options, |builder| Ok(builder.chunk_bytes(bytes)))
}

/// Frames in flight on each channel.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_options_window(options: *mut Options, frames: usize) -> c_int {
    change(options, |builder| Ok(builder.window(frames)))
}

/// Whether chunks carry a CRC-32.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_options_crc(options: *mut Options, on: bool) -> c_int {
    change(options, |builder| Ok(builder.crc(on)))
}

/// Socket buffers of data connections, each way, in bytes. Default: by path.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_options_socket_buffer_bytes(options: *mut Options, bytes: usize) -> c_int {
    change(options, |builder| Ok(builder.socket_buffer_bytes(bytes)))
}

/// Silence within which a peer's loss is told, in milliseconds; at least 3000.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_options_peer_timeout_ms(options: *mut Options, milliseconds: u64) -> c_int {
    change(options, |builder| Ok(builder.peer_timeout(Duration::from_millis(milliseconds))))
}

pub(crate) fn parse_address(text: &str) -> Result<SocketAddr, Failure> {
    text.parse().map_err(|_| Failure::usage(format!("\"{text}\" is no address: give ip:port")))
}
