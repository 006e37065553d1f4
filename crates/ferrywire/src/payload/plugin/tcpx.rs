//! Checks for conditions on which Google's GPUDirect-TCPX would end its process.
//!
//! TCPX does not validate its input. The checks apply only to plugins whose names begin with its name.
//! Invariant: pure functions.
//! Read next: `host.rs`, which calls them.

use ferrywire_ncclnet::abi::HANDLE_BYTES;
use std::ops::Range;

/// Bytes of a handle where a started connect keeps a pointer.
const POINTER: Range<usize> = 80..88;

/// Name prefix of the plugins of the TCPX family.
const NAME: &str = "GPUDirectTCPX";

/// Whether a plugin of this name reads TCPX's environment, and ends the process where TCPX does.
pub(super) fn is(plugin: &str) -> bool {
    plugin.starts_with(NAME)
}

/// Whether `listen`, and every `accept` call but the first, must not overlap with others. The plugin does not
/// wait for a peer in them.
pub(super) fn takes_turns(plugin: &str) -> bool {
    is(plugin)
}

/// Why GPU memory cannot be registered on a NIC with this PCI path: the plugin parses the address at its end.
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

/// Whether a handle has a pointer where a new one has zeros. The plugin would follow the pointer, and free
/// what it points to.
pub(super) fn holds_pointer(handle: &[u8; HANDLE_BYTES]) -> bool {
    handle[POINTER].iter().any(|byte| *byte != 0)
}
