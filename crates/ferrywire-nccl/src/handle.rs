//! The handle that NCCL carries from the listener to whoever connects.
//!
//! 64 bytes, so that it fits the oldest hosts too: where to connect, the listener's secret, and room in which the
//! connecting end keeps the number of its attempt, since NCCL repeats a call with the same memory.
//! Invariant: every byte of what the host gives is written.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Bytes used of a handle.
pub const HANDLE_BYTES_USED: usize = 64;
/// A listener's secret, which both ends prove that they know.
pub type Secret = [u8; 32];

const MAGIC: [u8; 4] = *b"FWN1";
const FAMILY: usize = 4;
const PORT: usize = 6;
const ADDRESS: usize = 8;
const SECRET: usize = 24;
const ATTEMPT: usize = 56;

/// What a handle says.
#[derive(Clone, PartialEq, Eq)]
pub struct Handle {
    /// Where the listener is.
    pub address: SocketAddr,
    /// What proves that one was meant to connect there.
    pub secret: Secret,
    /// The attempt that uses this memory; 0 before its first call.
    pub attempt: u64,
}

impl Handle {
    /// As bytes.
    pub fn to_bytes(&self) -> [u8; HANDLE_BYTES_USED] {
        let mut bytes = [0; HANDLE_BYTES_USED];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[PORT..ADDRESS].copy_from_slice(&self.address.port().to_le_bytes());
        match self.address.ip() {
            IpAddr::V4(v4) => {
                bytes[FAMILY] = 4;
                bytes[ADDRESS..ADDRESS + 4].copy_from_slice(&v4.octets());
            }
            IpAddr::V6(v6) => {
                bytes[FAMILY] = 6;
                bytes[ADDRESS..SECRET].copy_from_slice(&v6.octets());
            }
        }
        bytes[SECRET..ATTEMPT].copy_from_slice(&self.secret);
        bytes[ATTEMPT..].copy_from_slice(&self.attempt.to_le_bytes());
        bytes
    }

    /// From bytes; `None` when they are no handle of ours.
    pub fn from_bytes(bytes: &[u8; HANDLE_BYTES_USED]) -> Option<Handle> {
        if bytes[..4] != MAGIC {
            return None;
        }
        let ip: IpAddr = match bytes[FAMILY] {
            4 => Ipv4Addr::from(array::<4>(bytes, ADDRESS)).into(),
            6 => Ipv6Addr::from(array::<16>(bytes, ADDRESS)).into(),
            _ => return None,
        };
        let address = SocketAddr::new(ip, u16::from_le_bytes(array(bytes, PORT)));
        let attempt = u64::from_le_bytes(array(bytes, ATTEMPT));
        Some(Handle { address, secret: array(bytes, SECRET), attempt })
    }
}

/// The `N` bytes at `at`, which the callers' constants keep inside.
pub fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("N bytes were cut")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_survives_its_bytes() {
        for address in ["10.1.2.3:4567", "[2001:db8::7]:1"] {
            let handle = Handle { address: address.parse().unwrap(), secret: [7; 32], attempt: 9 };
            assert!(Handle::from_bytes(&handle.to_bytes()) == Some(handle));
        }
    }

    #[test]
    fn foreign_bytes_are_no_handle() {
        assert!(Handle::from_bytes(&[0; 64]).is_none());
        let mut bytes =
            Handle { address: "10.1.2.3:4".parse().unwrap(), secret: [7; 32], attempt: 0 }.to_bytes();
        bytes[FAMILY] = 5;
        assert!(Handle::from_bytes(&bytes).is_none());
    }
}
