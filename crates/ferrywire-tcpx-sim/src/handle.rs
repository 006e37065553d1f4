//! The connection handle: 88 bytes of the 128 that the host provides and carries to the peer.
//!
//! Bytes outside of the fields keep the host's values. The last field is scratch space of the connecting end: the
//! pointer of its running attempt, 0 in a new handle.
//! Read next: `attempt.rs`.

use std::net::{Ipv4Addr, SocketAddrV4};

/// Number of the handle's bytes that have fields.
pub const HANDLE_BYTES_USED: usize = 88;

const DATA_ADDRESS: usize = 0;
const PORT_START: usize = 28;
const PORT_COUNT: usize = 32;
const DATA_SOCKETS: usize = 36;
const THREADS: usize = 40;
const REDIRECTED: usize = 44;
const CONTROL_ADDRESS: usize = 48;
const ATTEMPT: usize = 80;
/// Bytes for an address; those behind an IPv4 address are zero.
const ADDRESS_BYTES: usize = 28;

/// The listener's information for the connecting end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    /// Address on which the listener accepts data sockets.
    pub data: SocketAddrV4,
    /// Address on which the listener accepts the control socket.
    pub control: SocketAddrV4,
    /// Number of the comm's data sockets: the listener decides for both ends.
    pub data_sockets: usize,
    /// Number of the comm's worker threads: the listener decides for both ends.
    pub threads: usize,
    /// Whether the control socket uses another interface than the data.
    pub redirected: bool,
}

impl Handle {
    /// Writes every field into a handle, with no attempt running.
    pub fn write(&self, bytes: &mut [u8; HANDLE_BYTES_USED]) {
        put_address(bytes, DATA_ADDRESS, self.data);
        put_address(bytes, CONTROL_ADDRESS, self.control);
        put_i32(bytes, PORT_START, -1);
        put_i32(bytes, PORT_COUNT, -1);
        put_i32(bytes, DATA_SOCKETS, self.data_sockets as i32);
        put_i32(bytes, THREADS, self.threads as i32);
        bytes[REDIRECTED] = self.redirected.into();
        set_attempt(bytes, 0);
    }

    /// Reads the fields; `None` when an address is not an IPv4 one or a number is out of range.
    pub fn read(bytes: &[u8; HANDLE_BYTES_USED]) -> Option<Handle> {
        let count = |at| usize::try_from(i32_at(bytes, at)).ok().filter(|count| *count <= 1024);
        Some(Handle {
            data: address_at(bytes, DATA_ADDRESS)?,
            control: address_at(bytes, CONTROL_ADDRESS)?,
            data_sockets: count(DATA_SOCKETS)?,
            threads: count(THREADS)?,
            redirected: bytes[REDIRECTED] != 0,
        })
    }
}

/// The pointer of the running attempt in a handle, 0 for none.
pub fn attempt(bytes: &[u8; HANDLE_BYTES_USED]) -> usize {
    let mut word = [0; size_of::<usize>()];
    word.copy_from_slice(&bytes[ATTEMPT..]);
    usize::from_ne_bytes(word)
}

/// Stores the pointer of the running attempt in a handle.
pub fn set_attempt(bytes: &mut [u8; HANDLE_BYTES_USED], pointer: usize) {
    bytes[ATTEMPT..].copy_from_slice(&pointer.to_ne_bytes());
}

fn put_i32(bytes: &mut [u8], at: usize, value: i32) {
    bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
}

fn i32_at(bytes: &[u8], at: usize) -> i32 {
    i32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Writes a `sockaddr_in`: family, port and address in network order.
fn put_address(bytes: &mut [u8], at: usize, address: SocketAddrV4) {
    let field = &mut bytes[at..at + ADDRESS_BYTES];
    field.fill(0);
    field[0..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
    field[2..4].copy_from_slice(&address.port().to_be_bytes());
    field[4..8].copy_from_slice(&address.ip().octets());
}

fn address_at(bytes: &[u8], at: usize) -> Option<SocketAddrV4> {
    let &[f0, f1, p0, p1, a, b, c, d] = bytes[at..].first_chunk()?;
    let is_ipv4 = u16::from_ne_bytes([f0, f1]) == libc::AF_INET as u16;
    is_ipv4.then(|| SocketAddrV4::new(Ipv4Addr::new(a, b, c, d), u16::from_be_bytes([p0, p1])))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Handle {
        Handle {
            data: "10.1.2.3:4000".parse().unwrap(),
            control: "127.0.0.1:5000".parse().unwrap(),
            data_sockets: 6,
            threads: 2,
            redirected: true,
        }
    }

    #[test]
    fn fields_are_where_the_real_plugin_has_them() {
        let mut bytes = [0xAA; HANDLE_BYTES_USED];
        sample().write(&mut bytes);
        assert_eq!(&bytes[0..8], &[2, 0, 0x0F, 0xA0, 10, 1, 2, 3]);
        assert_eq!(&bytes[48..56], &[2, 0, 0x13, 0x88, 127, 0, 0, 1]);
        assert_eq!(i32_at(&bytes, 32), -1);
        assert_eq!((i32_at(&bytes, 36), i32_at(&bytes, 40), bytes[44]), (6, 2, 1));
        assert_eq!(bytes[80..88], [0; 8]);
        assert_eq!(bytes[45..48], [0xAA; 3], "padding stays");
        assert_eq!(bytes[76..80], [0xAA; 4], "padding stays");
        assert_eq!(Handle::read(&bytes), Some(sample()));
    }

    #[test]
    fn an_attempt_is_kept_in_the_last_field() {
        let mut bytes = [0; HANDLE_BYTES_USED];
        sample().write(&mut bytes);
        set_attempt(&mut bytes, 0x1234_5678_9ABC);
        assert_eq!(attempt(&bytes), 0x1234_5678_9ABC);
        assert_eq!(Handle::read(&bytes), Some(sample()));
    }

    #[test]
    fn strange_bytes_are_no_handle() {
        assert_eq!(Handle::read(&[0; HANDLE_BYTES_USED]), None);
        assert_eq!(Handle::read(&[0xFF; HANDLE_BYTES_USED]), None);
    }
}
