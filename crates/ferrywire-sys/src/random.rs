//! Random bytes that nobody can guess.
//!
//! Invariant: they come from the operating system.

use std::io;

use rustix::rand::{GetRandomFlags, getrandom};

/// Random bytes from the operating system.
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

/// A random number, for keys of regions and sessions that nobody may guess.
///
/// # Panics
/// When the operating system gives no random bytes, as the standard library does for its hash maps.
pub fn random_u64() -> u64 {
    u64::from_le_bytes(random_bytes().expect("the operating system gives random bytes"))
}
