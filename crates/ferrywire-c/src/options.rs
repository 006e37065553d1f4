//! The options of an endpoint that is still to be opened. Every option has a default that fits the host.
//!
//! Read next: `endpoint.rs`, whose `ferrywire_endpoint_open` checks the values.

use std::ffi::{c_char, c_int, c_void};
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ferrywire::{Builder, Encryption};

use crate::handles::{self, object};
use crate::status::{FERRYWIRE_OK, Failure, bytes, call, text};

/// Options of an endpoint that is still to be opened. Values are checked by `ferrywire_endpoint_open`.
pub struct Options(Mutex<Building>);

struct Building {
    builder: Builder,
    nics: Vec<String>,
}

object!(Options, "ferrywire_options", 1);

impl Options {
    /// The engine's builder with all options set so far.
    pub(crate) fn builder(&self) -> Builder {
        let building = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if building.nics.is_empty() {
            building.builder.clone()
        } else {
            building.builder.clone().nics(building.nics.clone())
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

/// Makes an options object in which every option has its default.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_options_new(options: *mut *mut Options) -> c_int {
    call(|| {
        // SAFETY: the caller promises room for the handle.
        let out = unsafe { handles::place(options) }?;
        let building = Building { builder: ferrywire::Endpoint::builder(), nics: Vec::new() };
        out.put(handles::new(Options(Mutex::new(building)))?);
        Ok(FERRYWIRE_OK)
    })
}

/// Frees the options; endpoints opened with them are not affected. NULL is allowed.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_options_free(options: *mut Options) -> c_int {
    handles::free(options)
}

/// Listens on an IP address with a port, such as "0.0.0.0:7420". Port 0 chooses a free port; 0.0.0.0 listens on every
/// NIC. Default: the endpoint does not listen.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_options_listen(options: *mut Options, address: *const c_char) -> c_int {
    change(options, |builder| {
        // SAFETY: the caller promises a NUL-terminated string.
        Ok(builder.listen(parse_address(unsafe { text("the address", address) }?)?))
    })
}

/// Sets the shared secret, at least 8 bytes and equal on both ends. Required for connections beyond loopback.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_options_secret(
    options: *mut Options,
    secret: *const c_void,
    secret_bytes: usize,
) -> c_int {
    change(options, |builder| {
        // SAFETY: the caller promises as many bytes as stated.
        Ok(builder.secret(unsafe { bytes("the secret", secret, secret_bytes) }?))
    })
}

/// Sets a label that peers and messages show, at most 64 bytes. Default: none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_options_label(options: *mut Options, label: *const c_char) -> c_int {
    change(options, |builder| {
        // SAFETY: the caller promises a NUL-terminated string.
        Ok(builder.label(unsafe { text("the label", label) }?))
    })
}

/// Adds a NIC to use, by name; call again for more NICs. Default: all NICs that share a subnet with the peer, or else
/// the NIC of the route to the peer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_options_nic(options: *mut Options, name: *const c_char) -> c_int {
    call(|| {
        let options = handles::get(options)?;
        // SAFETY: the caller promises a NUL-terminated string.
        let name = unsafe { text("the NIC's name", name) }?;
        options.0.lock().unwrap_or_else(PoisonError::into_inner).nics.push(name.to_owned());
        Ok(FERRYWIRE_OK)
    })
}

/// Sets the number of channels (data connections) of each peer; if both ends set one, the smaller counts. Default:
/// chosen from cores, NICs and round trip.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_options_channels(options: *mut Options, channels: usize) -> c_int {
    change(options, |builder| Ok(builder.channels(channels)))
}

/// Sets the number of progress threads. With 0 no thread makes progress: the application calls
/// `ferrywire_endpoint_progress`, or a call that waits. Default: chosen from the number of cores.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_options_threads(options: *mut Options, threads: usize) -> c_int {
    change(options, |builder| Ok(builder.threads(threads)))
}

/// Sets the largest chunk of a transfer, in bytes: 4096 to 4194304. Default: 2097152.
/// If both ends set one, the smaller counts.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_options_chunk_bytes(options: *mut Options, bytes: usize) -> c_int {
    change(options, |builder| Ok(builder.chunk_bytes(bytes)))
}

/// Sets the window: the frames in flight on each channel, 1 to 1024. Default: 1024.
/// The smaller of both ends counts.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_options_window(options: *mut Options, frames: usize) -> c_int {
    change(options, |builder| Ok(builder.window(frames)))
}

/// Sets whether each chunk carries a CRC-32. One end's wish is enough. Default: false.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_options_crc(options: *mut Options, on: bool) -> c_int {
    change(options, |builder| Ok(builder.crc(on)))
}

/// Sets whether data connections are encrypted: `off`, `preferred` or `required`. A session is encrypted if one end
/// requires it or both prefer it, and refused if one end requires it and the other has it off. Default: `off`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_options_encryption(options: *mut Options, when: *const c_char) -> c_int {
    change(options, |builder| {
        // SAFETY: the caller promises a NUL-terminated string.
        let when = unsafe { text("the encryption", when) }?;
        let encryption = Encryption::from_name(when).ok_or_else(|| {
            Failure::usage(format!("encryption: {when:?} is not off, preferred or required"))
        })?;
        Ok(builder.encryption(encryption))
    })
}

/// Sets whether data connections that are not encrypted are authenticated: bytes that were changed on the way then
/// never reach memory. One end's wish is enough. Default: false.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_options_keyed_checksum(options: *mut Options, on: bool) -> c_int {
    change(options, |builder| Ok(builder.keyed_checksum(on)))
}

/// Sets the size of the socket buffers of data connections, for each direction, in bytes. Default: chosen from the
/// path.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_options_socket_buffer_bytes(options: *mut Options, bytes: usize) -> c_int {
    change(options, |builder| Ok(builder.socket_buffer_bytes(bytes)))
}

/// Sets the time within which the loss of a silent peer is reported, in milliseconds; at least 3000. Default: 10000.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_options_peer_timeout_ms(options: *mut Options, milliseconds: u64) -> c_int {
    change(options, |builder| Ok(builder.peer_timeout(Duration::from_millis(milliseconds))))
}

pub(crate) fn parse_address(text: &str) -> Result<SocketAddr, Failure> {
    text.parse().map_err(|_| Failure::usage(format!("\"{text}\" is not an address: expected ip:port")))
}
