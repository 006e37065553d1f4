//! What the kernel's `ethtool` interface tells about NICs: a family of generic netlink.
//!
//! Only questions, which need no rights. Messages are built of whole words, so nothing of them has to be aligned
//! by hand; an answer is read with checks of every length.

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};

/// `GENL_ID_CTRL`, which knows the other families; its question and the attributes of it.
const CONTROL_FAMILY: u16 = 0x10;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
/// `ETHTOOL_MSG_RINGS_GET` and the attributes of question and answer.
const RINGS_GET: u8 = 15;
const RINGS_HEADER: u16 = 1;
const HEADER_DEV_NAME: u16 = 2;
const RINGS_TCP_DATA_SPLIT: u16 = 11;
const SPLIT_OFF: u8 = 1;
const SPLIT_ON: u8 = 2;

const NESTED: u16 = 1 << 15;
const TYPE_MASK: u16 = 0x3fff;
const NLM_F_REQUEST: u16 = 1;
const NLMSG_ERROR: u16 = 2;
/// Heads of a message: netlink's own and the one of generic netlink.
const HEADS_BYTES: usize = 16 + 4;
const ANSWER_BYTES_MAX: usize = 16 << 10;

/// A connection to the kernel's ethtool family.
#[derive(Debug)]
pub struct Ethtool {
    socket: OwnedFd,
    family: u16,
}

impl Ethtool {
    /// Opens it; an error where the kernel is too old or netlink is forbidden.
    pub fn open() -> io::Result<Ethtool> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(netlink::GENERIC))?;
        let name = attribute(CTRL_ATTR_FAMILY_NAME, b"ethtool\0");
        let answer = ask(&socket, CONTROL_FAMILY, CTRL_CMD_GETFAMILY, &name)?;
        match find(&answer, CTRL_ATTR_FAMILY_ID) {
            Some(&[low, high]) => Ok(Ethtool { socket, family: u16::from_ne_bytes([low, high]) }),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Whether a NIC splits headers from payload; `None` where its driver does not tell.
    pub fn header_split(&self, nic: &str) -> io::Result<Option<bool>> {
        let name = attribute(HEADER_DEV_NAME, &[nic.as_bytes(), &[0]].concat());
        let answer = ask(&self.socket, self.family, RINGS_GET, &attribute(RINGS_HEADER | NESTED, &name))?;
        Ok(match find(&answer, RINGS_TCP_DATA_SPLIT) {
            Some(&[SPLIT_ON]) => Some(true),
            Some(&[SPLIT_OFF]) => Some(false),
            _ => None,
        })
    }
}

/// Sends a question and gives the attributes of the answer, which the kernel has written when the call returns.
fn ask(socket: &OwnedFd, family: u16, command: u8, attributes: &[u8]) -> io::Result<Vec<u8>> {
    net::send(socket, &question(family, command, attributes), SendFlags::empty())?;
    let mut answer = vec![0; ANSWER_BYTES_MAX];
    let (_, bytes) = net::recv(socket, &mut answer[..], RecvFlags::empty())?;
    answer.truncate(bytes);
    answer_of(family, &answer)
}

fn question(family: u16, command: u8, attributes: &[u8]) -> Vec<u8> {
    let mut message = Vec::with_capacity(HEADS_BYTES + attributes.len());
    message.extend(((HEADS_BYTES + attributes.len()) as u32).to_ne_bytes());
    message.extend(family.to_ne_bytes());
    message.extend(NLM_F_REQUEST.to_ne_bytes());
    // Sequence and port: one question at a time, and the kernel knows who asks.
    message.extend([0; 8]);
    message.extend([command, 1, 0, 0]);
    message.extend(attributes);
    message
}

fn answer_of(family: u16, message: &[u8]) -> io::Result<Vec<u8>> {
    let kind = message.get(4..6).map(|kind| u16::from_ne_bytes([kind[0], kind[1]]));
    match kind {
        Some(NLMSG_ERROR) => {
            let code =
                message.get(16..20).map(|code| i32::from_ne_bytes([code[0], code[1], code[2], code[3]]));
            Err(code.map_or(io::ErrorKind::InvalidData.into(), |code| {
                io::Error::from_raw_os_error(code.saturating_neg())
            }))
        }
        Some(kind) if kind == family && message.len() >= HEADS_BYTES => Ok(message[HEADS_BYTES..].to_vec()),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut attribute = Vec::with_capacity(4 + value.len() + 3);
    attribute.extend(((4 + value.len()) as u16).to_ne_bytes());
    attribute.extend(kind.to_ne_bytes());
    attribute.extend(value);
    attribute.resize(attribute.len().next_multiple_of(4), 0);
    attribute
}

/// The value of the first attribute of a kind.
fn find(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    while let [len_low, len_high, kind_low, kind_high, ..] = *attributes {
        let len = usize::from(u16::from_ne_bytes([len_low, len_high]));
        let value = attributes.get(4..len)?;
        if u16::from_ne_bytes([kind_low, kind_high]) & TYPE_MASK == wanted {
            return Some(value);
        }
        attributes = attributes.get(len.next_multiple_of(4)..)?;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_found_as_they_are_written() {
        let list = [attribute(2, b"ethtool\0"), attribute(1 | NESTED, &[7]), attribute(3, b"")].concat();
        assert_eq!(find(&list, 2), Some(&b"ethtool\0"[..]));
        assert_eq!(find(&list, 1), Some(&[7][..]));
        assert_eq!(find(&list, 3), Some(&[][..]));
        assert_eq!(find(&list, 4), None);
    }

    #[test]
    fn broken_answers_end_the_search() {
        for broken in [&[][..], &[4, 0, 9], &[0, 0, 1, 0, 5, 5], &[200, 0, 1, 0, 1], &[3, 0, 1, 0]] {
            assert_eq!(find(broken, 1), None, "{broken:?}");
        }
        for broken in [&[][..], &[0; 12], &[0; 24]] {
            assert!(answer_of(0x20, broken).is_err(), "{broken:?}");
        }
    }

    #[test]
    fn the_kernel_answers() {
        let ethtool = match Ethtool::open() {
            Ok(ethtool) => ethtool,
            Err(error) => return println!("SKIPPED: needs the kernel's ethtool netlink: {error}"),
        };
        let missing = ethtool.header_split("no-such-nic").expect_err("there is none");
        assert_eq!(missing.raw_os_error(), Some(libc::ENODEV));
        // Loopback has no rings to tell of: either an answer without, or a refusal.
        assert_eq!(ethtool.header_split("lo").unwrap_or(None), None);
    }
}
