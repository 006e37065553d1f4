//! The handle that NCCL carries from a listener to the connecting end.
//!
//! ```text
//!   0  "FWN"   3  version   4  addresses: how many   5  bit k: address k is of IPv6
//!   6  the listener's secret, 32 bytes   38  attempt, 8 bytes   46  addresses, each 4 or 16 bytes and a port of 2
//! ```
//!
//! The connecting end stores the attempt's number in the handle, because NCCL repeats a call with the same memory. A
//! handle has room for the addresses of four NICs with IPv6, or more with IPv4.
//! Invariant: every byte of the host's memory is written.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ferrywire_ncclnet::abi::HANDLE_BYTES;

/// A listener's secret. Both ends of a connection prove that they know it.
pub type Secret = [u8; 32];

const MAGIC: [u8; 3] = *b"FWN";
const VERSION: usize = 3;
/// Version of the handle's layout. Version 1 had a digit in its place.
const LAYOUT: u8 = 2;
const COUNT: usize = 4;
const FAMILIES: usize = 5;
const SECRET: usize = 6;
const ATTEMPT: usize = 38;
const ADDRESSES: usize = 46;
/// Bytes of an IPv4 address and its port in a handle.
const V4_BYTES: usize = 6;
/// Bytes of an IPv6 address and its port in a handle.
const V6_BYTES: usize = 18;
const _: () = assert!(ADDRESSES + 4 * V6_BYTES <= HANDLE_BYTES);

/// The contents of a handle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handle {
    /// The listener's addresses, one for each of its NICs.
    pub addresses: Vec<SocketAddr>,
    /// The secret by which the connecting end proves that it has the handle.
    pub secret: Secret,
    /// Number of the attempt that uses this memory; 0 before its first call.
    pub attempt: u64,
}

/// Number of these addresses that fit into `room` bytes of a handle.
pub fn fitting(addresses: impl IntoIterator<Item = IpAddr>, room: usize) -> usize {
    let mut left = room - ADDRESSES;
    let fits = |address: &IpAddr| {
        let bytes = if address.is_ipv4() { V4_BYTES } else { V6_BYTES };
        let enough = bytes <= left;
        left = left.saturating_sub(bytes);
        enough
    };
    addresses.into_iter().take(u8::BITS as usize).take_while(fits).count()
}

impl Handle {
    /// Writes the handle into the host's memory for handles. Addresses that do not fit are left out.
    pub fn write(&self, bytes: &mut [u8]) {
        bytes.fill(0);
        bytes[..VERSION].copy_from_slice(&MAGIC);
        bytes[VERSION] = LAYOUT;
        bytes[SECRET..ATTEMPT].copy_from_slice(&self.secret);
        set_attempt(bytes, self.attempt);
        let count = fitting(self.addresses.iter().map(SocketAddr::ip), bytes.len());
        bytes[COUNT] = count as u8;
        let mut at = ADDRESSES;
        let mut put = |part: &[u8], bytes: &mut [u8]| {
            bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        };
        for (k, address) in self.addresses[..count].iter().enumerate() {
            match address.ip() {
                IpAddr::V4(v4) => put(&v4.octets(), bytes),
                IpAddr::V6(v6) => {
                    bytes[FAMILIES] |= 1 << k;
                    put(&v6.octets(), bytes);
                }
            }
            put(&address.port().to_le_bytes(), bytes);
        }
    }

    /// Parses a handle; the error says why the bytes are not one.
    pub fn read(bytes: &[u8]) -> Result<Handle, String> {
        if bytes[..VERSION] != MAGIC {
            return Err("the handle was not made by ferrywire's plugin".into());
        }
        if bytes[VERSION] != LAYOUT {
            return Err(format!(
                "the handle is of version {}, this plugin knows {LAYOUT}: use the same plugin on all hosts",
                bytes[VERSION]
            ));
        }
        let addresses = read_addresses(bytes).ok_or("the handle has no address, or is truncated")?;
        let attempt = u64::from_le_bytes(array(bytes, ATTEMPT));
        Ok(Handle { addresses, secret: array(bytes, SECRET), attempt })
    }
}

fn read_addresses(bytes: &[u8]) -> Option<Vec<SocketAddr>> {
    let mut at = ADDRESSES;
    let mut one = |k: u8| {
        let is_v6 = bytes[FAMILIES] & (1 << k) != 0;
        let length = if is_v6 { V6_BYTES } else { V4_BYTES };
        let part = bytes.get(at..at + length)?;
        at += length;
        let ip: IpAddr = if is_v6 {
            Ipv6Addr::from(array::<16>(part, 0)).into()
        } else {
            Ipv4Addr::from(array::<4>(part, 0)).into()
        };
        Some(SocketAddr::new(ip, u16::from_le_bytes(array(part, length - 2))))
    };
    let possible = (1..=u8::BITS as u8).contains(&bytes[COUNT]);
    possible.then(|| (0..bytes[COUNT]).map(&mut one).collect())?
}

/// Stores the attempt's number in a handle's memory.
pub fn set_attempt(bytes: &mut [u8], attempt: u64) {
    bytes[ATTEMPT..ADDRESSES].copy_from_slice(&attempt.to_le_bytes());
}

/// Copies the `N` bytes at `at`, which must be inside `bytes`.
pub fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("N bytes were cut")
}

#[cfg(test)]
mod tests {
    use super::*;

    const V4: &str = "10.1.2.3:4567";
    const V6: &str = "[2001:db8::7]:65535";

    fn handle(addresses: &[&str]) -> Handle {
        let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        Handle { addresses, secret: [7; 32], attempt: 9 }
    }

    fn written(handle: &Handle, room: usize) -> Vec<u8> {
        let mut bytes = vec![0xEE; room];
        handle.write(&mut bytes);
        bytes
    }

    #[test]
    fn a_handle_survives_its_bytes() {
        for addresses in [&[V4][..], &[V6], &[V4; 8], &[V6; 4], &[V6, V4, V6, V6, V4], &[V4, V6]] {
            let handle = handle(addresses);
            assert_eq!(Handle::read(&written(&handle, HANDLE_BYTES)), Ok(handle));
        }
    }

    #[test]
    fn addresses_that_do_not_fit_are_left_out_and_every_byte_is_written() {
        let many = handle(&[V6; 9]);
        let bytes = written(&many, HANDLE_BYTES);
        assert_eq!(Handle::read(&bytes).unwrap(), handle(&[V6; 4]));
        assert!(bytes[ADDRESSES + 4 * V6_BYTES..].iter().all(|&byte| byte == 0));
        assert_eq!(Handle::read(&written(&handle(&[V4; 9]), HANDLE_BYTES)).unwrap(), handle(&[V4; 8]));
    }

    #[test]
    fn the_attempt_alone_is_changed() {
        let mut bytes = written(&handle(&[V4, V6]), HANDLE_BYTES);
        set_attempt(&mut bytes, u64::MAX);
        assert_eq!(Handle::read(&bytes).unwrap(), Handle { attempt: u64::MAX, ..handle(&[V4, V6]) });
    }

    #[test]
    fn foreign_bytes_are_no_handle() {
        let why = |bytes: &[u8]| Handle::read(bytes).unwrap_err();
        assert!(why(&[0; HANDLE_BYTES]).contains("not made by ferrywire's plugin"));
        let mut bytes = written(&handle(&[V6; 2]), HANDLE_BYTES);
        assert!(why(&bytes[..HANDLE_BYTES / 2]).contains("truncated"));
        for count in [0, 9] {
            bytes[COUNT] = count;
            assert!(why(&bytes).contains("no address"), "{count}");
        }
        bytes[VERSION] = b'1';
        assert!(why(&bytes).contains("version 49") && why(&bytes).contains("all hosts"));
    }
}
