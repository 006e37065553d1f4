//! Cryptographically secure random bytes, from the operating system only.

use std::io;

use rustix::rand::{GetRandomFlags, getrandom};

/// `N` random bytes from the operating system.
pub fn random_bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(more) => filled += more,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(bytes)
}

/// A random number for keys of regions and sessions, which must be unguessable.
///
/// # Panics
/// When the operating system provides no random bytes; the standard library's hash maps panic then too.
pub fn random_u64() -> u64 {
    u64::from_le_bytes(random_bytes().expect("the operating system gives random bytes"))
}
