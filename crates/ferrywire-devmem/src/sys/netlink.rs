//! Generic netlink: queries and orders to one family of the kernel, and its answers with their text.
//!
//! `ethtool.rs` and `netdev.rs` use it, and define what the numbers mean. Most refusals of the kernel share one
//! number, and only their text distinguishes them, so the text is requested and kept in [`NetlinkError`].
//! Invariant: every length that is read is checked (`netlink/answer.rs`), so a malformed answer is an error. Nothing
//! blocks, because the kernel writes its answer while it takes the request.
//! Read next: `netlink/attributes.rs`, the parts of messages.

pub(crate) mod answer;
mod attributes;

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};

pub use answer::Reply;
use answer::{Answer, Wanted};
pub use attributes::{AttributeList, Attributes};

use ferrywire_sys::fork::Withheld;
use ferrywire_sys::socket;

/// `GENL_ID_CTRL`, the family that describes other families; its request and attributes.
const CONTROL_FAMILY: u16 = 0x10;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_CMD_GETPOLICY: u8 = 10;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
const CTRL_ATTR_OP: u16 = 10;
const FAMILY_VERSION: u8 = 1;

const NLM_F_REQUEST: u16 = 0x001;
const NLM_F_ACK: u16 = 0x004;
const NLM_F_DUMP: u16 = 0x300;

/// Bytes of a message's headers: netlink's header, and netlink's with generic netlink's.
const HEAD_BYTES: usize = 16;
const HEADS_BYTES: usize = HEAD_BYTES + 4;
/// Bytes of room for one read: the kernel splits long lists at this size.
const READ_BYTES: usize = 32 << 10;
/// Largest request in bytes.
const REQUEST_BYTES_MAX: usize = 64 << 10;
/// How often a list is read again because it changed meanwhile.
const DUMPS_MAX: usize = 4;

/// A refusal by the kernel, or a request that could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {}", self.reason())]
pub struct NetlinkError {
    /// The kernel's error number. `EPROTO` means a malformed answer, `EAGAIN` a missing one.
    pub errno: i32,
    /// The kernel's text about the refusal, if there is one.
    pub text: Option<String>,
    /// Name of the request.
    pub call: &'static str,
    /// The cause of the refusal, if this crate knows it and the kernel's number does not identify it.
    pub known: Option<KnownRefusal>,
}

/// A cause of a refusal that this crate has detected itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KnownRefusal {
    /// The kernel's family has no such request.
    NoSuchRequest,
    /// Buffers of this size cannot be requested.
    OddPageBytes,
}

impl NetlinkError {
    fn new(call: &'static str, error: Errno) -> NetlinkError {
        NetlinkError { errno: error.raw_os_error(), text: None, call, known: None }
    }

    /// The reason as text: the kernel's text, if there is one, and the meaning of its number.
    fn reason(&self) -> String {
        let number = io::Error::from_raw_os_error(self.errno);
        match &self.text {
            Some(text) => format!("{text}: {number}"),
            None => number.to_string(),
        }
    }
}

impl From<NetlinkError> for io::Error {
    fn from(error: NetlinkError) -> io::Error {
        io::Error::new(io::Error::from_raw_os_error(error.errno).kind(), error)
    }
}

/// A socket for one family of generic netlink. State that the kernel keeps for the socket ends when the value is
/// dropped, although forked children live.
#[derive(Debug)]
pub struct Family {
    _withheld: Withheld,
    socket: OwnedFd,
    id: u16,
    /// Number of the last request, by which answers are matched.
    sequence: u32,
}

impl Family {
    /// Opens a socket for a family by its name. `ENOENT` if the kernel has no such family.
    pub fn open(name: &str) -> Result<Family, NetlinkError> {
        const CALL: &str = "netlink family";
        let socket = open_socket().map_err(|error| NetlinkError {
            errno: error.raw_os_error().unwrap_or(libc::EIO),
            text: None,
            call: "netlink socket",
            known: None,
        })?;
        let withheld = Withheld::new(socket.as_fd());
        let mut family = Family { _withheld: withheld, socket, id: CONTROL_FAMILY, sequence: 0 };
        let question = Attributes::new().text(CTRL_ATTR_FAMILY_NAME, name);
        let reply = match family.ask(CALL, CTRL_CMD_GETFAMILY, &question) {
            Err(NetlinkError { errno: libc::ENOENT, text: None, call, known }) => {
                let text = Some(format!("this kernel has no netlink family {name:?}"));
                return Err(NetlinkError { errno: libc::ENOENT, text, call, known });
            }
            answer => answer?,
        };
        family.id =
            reply.attributes().u16(CTRL_ATTR_FAMILY_ID).ok_or(NetlinkError::new(CALL, Errno::PROTO))?;
        Ok(family)
    }

    /// Makes a query that has one reply.
    pub fn ask(
        &mut self,
        call: &'static str,
        command: u8,
        question: &Attributes,
    ) -> Result<Reply, NetlinkError> {
        let replies = self.exchange(call, command, NLM_F_ACK, question)?.replies;
        replies.into_iter().next().ok_or(NetlinkError::new(call, Errno::PROTO))
    }

    /// Makes a request that changes something, and waits until the kernel has executed it. Some have a reply, which
    /// may be ignored.
    pub fn order(
        &mut self,
        call: &'static str,
        command: u8,
        order: &Attributes,
    ) -> Result<Option<Reply>, NetlinkError> {
        Ok(self.exchange(call, command, NLM_F_ACK, order)?.replies.into_iter().next())
    }

    /// Makes a query for a list, which has one reply per item.
    pub fn list(
        &mut self,
        call: &'static str,
        command: u8,
        question: &Attributes,
    ) -> Result<Vec<Reply>, NetlinkError> {
        for _ in 0..DUMPS_MAX {
            let answer = self.exchange(call, command, NLM_F_DUMP, question)?;
            if !answer.interrupted {
                return Ok(answer.replies);
            }
        }
        Err(NetlinkError::new(call, Errno::INTR))
    }

    fn exchange(
        &mut self,
        call: &'static str,
        command: u8,
        flags: u16,
        attributes: &Attributes,
    ) -> Result<Answer, NetlinkError> {
        let failed = |error| NetlinkError::new(call, error);
        self.sequence = self.sequence.wrapping_add(1);
        let request = self.request(command, flags, attributes).ok_or(failed(Errno::MSGSIZE))?;
        retry_on_intr(|| net::send(&self.socket, &request, SendFlags::empty())).map_err(failed)?;
        let wanted = Wanted { family: self.id, sequence: self.sequence };
        let mut answer = Answer::default();
        let mut read = vec![0; READ_BYTES];
        while !answer.complete {
            let bytes = self.read(&mut read).map_err(failed)?;
            answer.take(wanted, &read[..bytes]).map_err(|refusal| refusal.of(call))?;
        }
        Ok(answer)
    }

    fn request(&self, command: u8, flags: u16, attributes: &Attributes) -> Option<Vec<u8>> {
        let attributes = attributes.bytes()?;
        let len = HEADS_BYTES + attributes.len();
        if len > REQUEST_BYTES_MAX {
            return None;
        }
        let mut message = Vec::with_capacity(len);
        message.extend((len as u32).to_ne_bytes());
        message.extend(self.id.to_ne_bytes());
        message.extend((NLM_F_REQUEST | flags).to_ne_bytes());
        message.extend(self.sequence.to_ne_bytes());
        // The port stays 0: the kernel identifies the sender.
        message.extend([0; 4]);
        message.extend([command, FAMILY_VERSION, 0, 0]);
        message.extend(attributes);
        Some(message)
    }

    /// Reads an answer once. The kernel has written it during the request, so a missing answer will not come.
    fn read(&self, into: &mut [u8]) -> Result<usize, Errno> {
        let room = into.len();
        let (_, bytes) = retry_on_intr(|| net::recv(&self.socket, &mut *into, RecvFlags::TRUNC))?;
        // The kernel reports the full length, though it wrote only as much as fits.
        if bytes > room { Err(Errno::MSGSIZE) } else { Ok(bytes) }
    }
}

/// Whether the kernel knows a command of a family. The number of a refusal alone does not show it.
pub fn knows(family: &str, command: u8) -> Result<bool, NetlinkError> {
    let question = Attributes::new().text(CTRL_ATTR_FAMILY_NAME, family).u32(CTRL_ATTR_OP, command.into());
    match Family::open("nlctrl")?.list("netlink policy", CTRL_CMD_GETPOLICY, &question) {
        Ok(_) => Ok(true),
        Err(NetlinkError { errno: libc::ENOENT, .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

fn open_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(netlink::GENERIC))?;
    // The kernel is asked for its text with a refusal, and for no copy of the request.
    for option in [libc::NETLINK_EXT_ACK, libc::NETLINK_CAP_ACK] {
        socket::set_int(socket.as_raw_fd(), libc::SOL_NETLINK, option, 1)?;
    }
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use std::time::{Duration, Instant};

    const CTRL_ATTR_VERSION: u16 = 3;
    const LIMIT: Duration = Duration::from_secs(20);

    fn control() -> Option<Family> {
        match Family::open("nlctrl") {
            Ok(family) => Some(family),
            Err(error) => {
                println!("SKIPPED: needs generic netlink: {error}");
                None
            }
        }
    }

    /// The address of a netlink socket: only one socket at a time can have it.
    fn address_of(socket: &OwnedFd) -> libc::sockaddr_nl {
        // SAFETY: the structure consists of integers, and the length is its own.
        unsafe {
            let mut address: libc::sockaddr_nl = std::mem::zeroed();
            let mut bytes = size_of_val(&address) as libc::socklen_t;
            let named = libc::getsockname(socket.as_raw_fd(), (&raw mut address).cast(), &mut bytes);
            assert_eq!(named, 0, "{}", io::Error::last_os_error());
            address
        }
    }

    fn bind(socket: &OwnedFd, address: &libc::sockaddr_nl) -> io::Result<()> {
        let bytes = size_of_val(address) as libc::socklen_t;
        // SAFETY: the address is valid for the call.
        let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const *address).cast(), bytes) };
        if bound == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Regression: bindings of memory to queues lasted until the child ended.
    #[test]
    fn a_socket_ends_although_a_forked_child_lives() {
        let Some(family) = control() else { return };
        let address = address_of(&family.socket);
        assert_ne!(address.nl_pid, 0, "it has sent a request");
        let (mut started, starts) = io::pipe().expect("a pipe");
        // SAFETY: the child only makes system calls and exits.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "no fork: {}", io::Error::last_os_error());
        if child == 0 {
            // SAFETY: as above.
            unsafe {
                libc::write(starts.as_raw_fd(), [0u8].as_ptr().cast(), 1);
                libc::sleep(60);
                libc::_exit(0);
            }
        }
        drop(starts);
        let began = io::Read::read_exact(&mut started, &mut [0]);
        let other = open_socket().expect("as before");
        let taken = bind(&other, &address).map_err(|error| error.raw_os_error());
        drop(family);
        // A child of another test may have been forked just before the socket was withheld; it soon ends.
        let waits = Instant::now();
        let mut free = bind(&other, &address);
        while free.is_err() && waits.elapsed() < LIMIT {
            thread::sleep(Duration::from_millis(10));
            free = bind(&other, &address);
        }
        // SAFETY: the child is this process's own and was not waited for yet.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        began.expect("the child lived");
        assert_eq!(taken, Err(Some(libc::EADDRINUSE)));
        free.expect("the child has no copy");
    }

    #[test]
    fn a_family_that_is_not_there_is_named() {
        if control().is_none() {
            return;
        }
        let error = Family::open("no-such-family").expect_err("there is none");
        assert_eq!(error.errno, libc::ENOENT);
        assert!(error.to_string().contains("no-such-family"), "{error}");
    }

    #[test]
    fn questions_lists_and_refusals_follow_each_other_on_one_socket() {
        let Some(mut family) = control() else { return };
        assert_eq!(family.id, CONTROL_FAMILY);
        for _ in 0..3 {
            let all = family.list("families", CTRL_CMD_GETFAMILY, &Attributes::new()).expect("a list");
            let named = |reply: &Reply| {
                reply.attributes().find(CTRL_ATTR_FAMILY_NAME).map(<[u8]>::to_vec)
                    == Some(b"nlctrl\0".to_vec())
            };
            assert_eq!(all.iter().filter(|reply| named(reply)).count(), 1, "of {}", all.len());
            let refusal = family.ask("nothing", 250, &Attributes::new()).expect_err("no such command");
            assert_eq!((refusal.errno, refusal.call), (libc::EOPNOTSUPP, "nothing"));
            let question = Attributes::new().text(CTRL_ATTR_FAMILY_NAME, "nlctrl");
            let one = family.ask("family", CTRL_CMD_GETFAMILY, &question).expect("it is there");
            assert!(one.attributes().u32(CTRL_ATTR_VERSION).is_some());
        }
    }

    #[test]
    fn the_kernels_words_come_with_its_refusal() {
        let Some(mut family) = control() else { return };
        // A family's name has at most 16 bytes; the kernel's text says so for a longer one.
        let question = Attributes::new().text(CTRL_ATTR_FAMILY_NAME, "a name of more than sixteen bytes");
        let refusal = family.ask("family", CTRL_CMD_GETFAMILY, &question).expect_err("too long");
        let text = refusal.text.clone().expect("words");
        assert!(refusal.to_string().starts_with(&format!("family: {text}: ")), "{refusal}");
        assert_eq!(io::Error::from(refusal.clone()).to_string(), refusal.to_string());
    }

    #[test]
    fn a_request_that_is_too_long_is_refused_here() {
        let Some(mut family) = control() else { return };
        let long = Attributes::new().bytes_of(1, &vec![0; 70 << 10]);
        let many = (0..20_000).fold(Attributes::new(), |list, n| list.u32(1, n));
        for request in [long, many] {
            assert_eq!(
                family.order("too much", 1, &request).map_err(|e| e.errno).err(),
                Some(libc::EMSGSIZE)
            );
        }
    }
}
