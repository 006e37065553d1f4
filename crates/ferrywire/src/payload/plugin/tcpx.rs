//! What Google's GPUDirect-TCPX ends its process over, seen before it gets there.
//!
//! It follows what it is given and does not look. Nothing here is asked of plugins whose names begin in another way.
//! Invariant: pure.
//! Read next: `host.rs`, which asks.

use ferrywire_ncclnet::abi::HANDLE_BYTES;
use std::ops::Range;

/// Where a handle has the pointer of its connect, once that has begun.
const POINTER: Range<usize> = 80..88;

/// How the names of such plugins begin.
const NAME: &str = "GPUDirectTCPX";

/// Whether a plugin of this name goes by TCPX's environment, and ends the process where TCPX does.
pub(super) fn is(plugin: &str) -> bool {
    plugin.starts_with(NAME)
}

/// Whether `listen`, and an `accept` that was seen to poll, may be called by one thread at a time only. The plugin does
/// not wait for a peer in them.
pub(super) fn takes_turns(plugin: &str) -> bool {
    is(plugin)
}

/// Why GPU memory cannot be registered on a NIC with this path: the plugin reads the address at its end.
pub(super) fn lacks_address(path: Option<&str>) -> Option<String> {
    let Some(path) = path else { return Some("which has no PCI path".to_owned()) };
    let address = path.rsplit('/').next().unwrap_or_default().bytes();
    let form = b"dddd:bb:dd.f".iter().copied();
    let fits = |(byte, wanted): (u8, u8)| match wanted {
        b':' | b'.' => byte == wanted,
        _ => byte.is_ascii_hexdigit(),
    };
    let ends_in_one = address.len() == form.len() && address.zip(form).all(fits);
    (!ends_in_one).then(|| format!("whose PCI path {path} does not end in an address like 0000:06:00.0"))
}

/// Whether a handle has a pointer in it where a fresh one has none. The plugin follows it, and frees what is there.
pub(super) fn holds_pointer(handle: &[u8; HANDLE_BYTES]) -> bool {
    handle[POINTER].iter().any(|byte| *byte != 0)
}
