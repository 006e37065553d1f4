//! The two NICs of the VM, memory for them, connections between them, and bytes that can be checked.

use ferrywire_devmem::sys::devmem::{self, Control, Fragment, Piece, Received, Tokens};
use ferrywire_devmem::sys::ethtool::{Ethtool, Rings, Split};
use ferrywire_devmem::sys::flow::{Flow, Flows};
use ferrywire_devmem::sys::netdev::Netdev;
use ferrywire_devmem::sys::netlink::NetlinkError;
use ferrywire_sys::mapping::{Access, AddressRange, anonymous_file};
use ferrywire_sys::{udmabuf, zerocopy};
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::{Duration, Instant};

pub const NEAR: &str = "dm0";
pub const FAR: &str = "dm1";
pub const KIB: usize = 1 << 10;
pub const MIB: usize = 1 << 20;
/// The length after which the pattern repeats, and the size of memory to send from.
pub const PATTERN_BYTES: usize = 8 * MIB;
/// The claimed queue; queue 0 gets everything that no rule steers.
pub const QUEUE: u32 = 1;
/// Far more than anything here takes, also under slow emulation.
const LIMIT: Duration = Duration::from_secs(100);
/// The folder whose files the kit returns.
pub const OUT: &str = "/out";

/// Whether this is the VM; prints a note if not.
pub fn is_here() -> bool {
    let here = Path::new("/sys/module/dmnic").exists() && std::env::var_os("PEER_PID").is_some();
    if !here {
        println!("SKIPPED: needs the VM of tests/devmem-vm (see runner.rs)");
    }
    here
}

/// The NICs' MTU, which the kit chooses.
pub fn mtu() -> usize {
    std::env::var("MTU").ok().and_then(|mtu| mtu.parse().ok()).expect("the kit tells the MTU")
}

/// The number of a NIC in the namespace of the calling thread.
pub fn index(nic: &str) -> u32 {
    let name = CString::new(nic).expect("no zero in it");
    // SAFETY: a string with its end.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    assert_ne!(index, 0, "{nic}: {}", io::Error::last_os_error());
    index
}

/// Runs `body` in the network namespace of the other NIC. Sockets opened there stay there.
pub fn at_peer<T: Send>(body: impl FnOnce() -> T + Send) -> T {
    let pid = std::env::var("PEER_PID").expect("the kit tells it");
    let namespace = File::open(format!("/proc/{pid}/ns/net")).expect("it lives");
    let there = move || {
        // SAFETY: no memory is passed; only this thread moves, and it ends there.
        let moved = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
        assert_eq!(moved, 0, "{}", io::Error::last_os_error());
        body()
    };
    std::thread::scope(|scope| scope.spawn(there).join().expect("it ends well"))
}

/// Sets a knob of the NICs, until this is dropped.
pub struct Knob(&'static str);

impl Knob {
    pub fn set(name: &'static str, value: u32) -> Knob {
        turn(name, value);
        Knob(name)
    }
}

impl Drop for Knob {
    fn drop(&mut self) {
        turn(self.0, 0);
    }
}

fn turn(name: &str, value: u32) {
    let path = format!("/sys/module/dmnic/parameters/{name}");
    fs::write(path, value.to_string()).expect("a knob");
}

/// Takes a NIC of this namespace down or up.
pub fn set_up(nic: &str, up: bool) {
    let path = format!("/sys/class/net/{nic}/flags");
    let flags = fs::read_to_string(&path).expect("the NIC is here");
    let flags = u32::from_str_radix(flags.trim().trim_start_matches("0x"), 16).expect("a number");
    let up_bit = libc::IFF_UP as u32;
    let flags = if up { flags | up_bit } else { flags & !up_bit };
    fs::write(&path, format!("{flags:#x}")).expect("it obeys");
}

/// Turns header split on or off.
pub fn set_split(split: Split, threshold_bytes: Option<u32>) -> Result<(), NetlinkError> {
    Ethtool::open()?.set_rings(NEAR, Rings { split: Some(split), threshold_bytes })
}

/// Host memory that is also a dma-buf.
pub struct Pool {
    pub dmabuf: OwnedFd,
    pub file: OwnedFd,
    view: AddressRange,
    bytes: usize,
}

impl Pool {
    pub fn new(bytes: usize) -> Pool {
        let file = anonymous_file(bytes).expect("memory");
        let dmabuf = udmabuf::from_memfd(file.as_fd(), 0, bytes as u64).expect("a dma-buf");
        let mut view = AddressRange::reserve(bytes, 4096).expect("addresses");
        view.show(&file, Access::ReadWrite).expect("a view");
        Pool { dmabuf, file, view, bytes }
    }

    /// A pool with the pattern.
    pub fn with_pattern() -> Pool {
        let pool = Pool::new(PATTERN_BYTES);
        let base = pool.view.base() as *mut u8;
        for at in 0..PATTERN_BYTES {
            // SAFETY: inside the view, which is writable and not shared yet.
            unsafe { base.add(at).write(pattern(at)) };
        }
        pool
    }

    /// Some of the pool's bytes, as they are now.
    pub fn read(&self, offset: u64, bytes: u32) -> Vec<u8> {
        let (offset, bytes) = (offset as usize, bytes as usize);
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes), "{bytes} at {offset}");
        let mut copy = vec![0; bytes];
        // SAFETY: inside the view; the NIC writes nothing there before the token is returned.
        unsafe {
            ((self.view.base() + offset) as *const u8).copy_to_nonoverlapping(copy.as_mut_ptr(), bytes)
        };
        copy
    }
}

pub fn pattern(position: usize) -> u8 {
    let position = position % PATTERN_BYTES;
    let word = (position as u64 / 8 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    word.to_le_bytes()[position % 8]
}

#[track_caller]
pub fn check(bytes: &[u8], position: usize) {
    let wrong = bytes.iter().enumerate().find(|(at, byte)| **byte != pattern(position + at));
    assert_eq!(wrong, None, "of {} bytes at {position}", bytes.len());
}

/// The receiving NIC: a queue bound to a pool.
pub struct Receiver {
    pub netdev: Netdev,
    pub id: u32,
    pub pool: Pool,
}

impl Receiver {
    pub fn new(pool_bytes: usize) -> Receiver {
        set_split(Split::On, Some(0)).expect("headers are split");
        let (mut netdev, pool) = (Netdev::open().expect("the family"), Pool::new(pool_bytes));
        let id = netdev.bind_rx(index(NEAR), &[QUEUE], pool.dmabuf.as_fd()).expect("a binding");
        Receiver { netdev, id, pool }
    }
}

/// The sending NIC, bound to memory with the pattern.
pub struct Sender {
    pub netdev: Netdev,
    pub id: u32,
    pub source: Pool,
}

impl Sender {
    pub fn new() -> Sender {
        let source = Pool::with_pattern();
        let (netdev, id) = bind_far(source.dmabuf.as_fd());
        Sender { netdev, id, source }
    }
}

pub fn bind_far(dmabuf: BorrowedFd<'_>) -> (Netdev, u32) {
    at_peer(|| {
        let mut netdev = Netdev::open().expect("the family");
        let id = netdev.bind_tx(index(FAR), dmabuf).expect("a binding");
        (netdev, id)
    })
}

/// A connection from the far NIC to the near one, and the rule that steers it to the bound queue.
pub struct Link {
    pub near: TcpStream,
    pub far: TcpStream,
    rule: Option<(Flows, u32)>,
}

impl Link {
    pub fn steered() -> Link {
        let mut link = Link::unsteered();
        let (local, remote) = (link.near.local_addr(), link.near.peer_addr());
        let flow = Flow::new(local.expect("near"), remote.expect("far"), QUEUE).expect("one kind");
        let mut ethtool = Ethtool::open().expect("the family");
        ethtool.set_feature(NEAR, ferrywire_devmem::sys::ethtool::NTUPLE, true).expect("flow rules");
        let flows = Flows::open(NEAR).expect("a socket");
        let location = flows.insert(&flow).expect("a rule");
        link.rule = Some((flows, location));
        link
    }

    /// A link whose packets go to queue 0, which has no device memory.
    pub fn unsteered() -> Link {
        let listener = TcpListener::bind("10.9.0.1:0").expect("a port");
        let to: SocketAddr = listener.local_addr().expect("an address");
        let far = at_peer(|| TcpStream::connect(to).expect("a connection"));
        zerocopy::enable(far.as_raw_fd()).expect("zero copy");
        Link { near: listener.accept().expect("the near end").0, far, rule: None }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some((flows, location)) = &self.rule {
            flows.delete(*location).expect("the rule is there");
        }
    }
}

/// Waits until a descriptor is ready or has an error.
pub fn wait(fd: RawFd, events: libc::c_short) {
    let mut entry = libc::pollfd { fd, events, revents: 0 };
    // SAFETY: one entry.
    unsafe { libc::poll(&raw mut entry, 1, 100) };
}

/// Repeats a call that would block.
pub fn eventually<T>(
    fd: RawFd,
    events: libc::c_short,
    mut call: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    let until = Instant::now() + LIMIT;
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < until => wait(fd, events),
            result => return result,
        }
    }
}

/// Sends from bound memory.
pub fn send(link: &Link, id: u32, pieces: &[Piece]) -> io::Result<usize> {
    // SAFETY: a TCP socket; the pattern does not change.
    unsafe { devmem::send(link.far.as_raw_fd(), id, pieces) }
}

/// Sends `bytes` bytes of the pattern from `position` on, in calls of `call_bytes`, and waits until each call has
/// finished with its memory. Returns the number of calls.
pub fn send_all(link: &Link, id: u32, position: usize, bytes: usize, call_bytes: usize) -> usize {
    let (fd, end) = (link.far.as_raw_fd(), position + bytes);
    let (mut position, mut calls, mut done) = (position, 0, 0);
    while position < end {
        let offset = position % PATTERN_BYTES;
        let piece = Piece { offset, bytes: call_bytes.min(end - position).min(PATTERN_BYTES - offset) };
        let sent = eventually(fd, libc::POLLOUT, || match send(link, id, &[piece]) {
            // Too many notices are unread.
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                done += reap(fd);
                Err(ErrorKind::WouldBlock.into())
            }
            result => result,
        });
        position += sent.expect("it is sent");
        calls += 1;
        done += reap(fd);
    }
    let until = Instant::now() + LIMIT;
    while done < calls && Instant::now() < until {
        wait(fd, 0);
        done += reap(fd);
    }
    assert_eq!(done, calls, "notices of finished sends");
    calls
}

/// The number of sends that have finished with their memory. None may have been copied.
pub fn reap(fd: RawFd) -> usize {
    let mut done = 0;
    loop {
        match zerocopy::completion(fd) {
            Ok(Some(completion)) => {
                assert!(!completion.copied, "{completion:?}");
                done += completion.last.wrapping_sub(completion.first) as usize + 1;
            }
            Ok(None) => {}
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
                return done;
            }
        }
    }
}

/// Sends bytes of the pattern by plain sends.
pub fn send_plain(link: &Link, position: usize, bytes: usize) {
    let data: Vec<u8> = (position..position + bytes).map(pattern).collect();
    io::Write::write_all(&mut &link.far, &data).expect("sent");
}

/// The received bytes, by kind.
#[derive(Debug, Default)]
pub struct Tally {
    pub pool_bytes: usize,
    pub linear_bytes: usize,
    pub plain_bytes: usize,
    pub calls: usize,
    /// Offsets in the pool, and lengths.
    pub fragments: Vec<(u64, u32)>,
    pub released: usize,
    /// Whether the peer has ended the stream.
    pub ended: bool,
}

impl Tally {
    pub fn bytes(&self) -> usize {
        self.pool_bytes + self.linear_bytes + self.plain_bytes
    }
}

/// Parameters of receiving.
#[derive(Clone, Copy)]
pub struct Way {
    /// Bytes asked for in one call.
    pub call_bytes: usize,
    /// Fragments that a call has room for.
    pub room: usize,
    /// Tokens are returned after this many fragments.
    pub batch: usize,
}

pub const WAY: Way = Way { call_bytes: MIB, room: 256, batch: 128 };

/// One receive call, as soon as bytes have arrived.
pub fn receive(link: &Link, buffer: &mut [u8], control: &mut Control) -> io::Result<Received> {
    let fd = link.near.as_raw_fd();
    // SAFETY: the buffer has as many bytes.
    let call = || unsafe { devmem::receive(fd, buffer.as_mut_ptr(), buffer.len(), control) };
    eventually(fd, libc::POLLIN, call)
}

/// Receives `bytes` bytes, checks each against the pattern from `position` on, and returns all tokens.
pub fn take(link: &Link, receiver: &Receiver, position: usize, bytes: usize, way: Way) -> Tally {
    let (mut tally, mut tokens) = (Tally::default(), Tokens::new());
    let mut control = Control::new(way.room);
    let mut buffer = vec![0; way.call_bytes];
    while tally.bytes() < bytes && !tally.ended {
        let wanted = way.call_bytes.min(bytes - tally.bytes());
        let got = receive(link, &mut buffer[..wanted], &mut control).expect("it is received");
        tally.calls += 1;
        tally.ended = got.bytes == 0;
        if got.plain {
            check(&buffer[..got.bytes], position + tally.bytes());
            tally.plain_bytes += got.bytes;
        }
        for fragment in control.fragments() {
            place(fragment, receiver, &buffer, position, &mut tally, &mut tokens);
            if tokens.fragments() >= way.batch {
                release(link, &mut tokens, &mut tally);
            }
        }
    }
    release(link, &mut tokens, &mut tally);
    tally
}

fn place(
    fragment: Fragment,
    receiver: &Receiver,
    buffer: &[u8],
    position: usize,
    tally: &mut Tally,
    tokens: &mut Tokens,
) {
    let position = position + tally.bytes();
    match fragment {
        Fragment::Pool { dmabuf, offset, bytes, token } => {
            assert_eq!(dmabuf, receiver.id);
            check(&receiver.pool.read(offset, bytes), position);
            tally.pool_bytes += bytes as usize;
            tally.fragments.push((offset, bytes));
            tokens.push(token);
        }
        Fragment::Linear { at, bytes } => {
            check(&buffer[at..at + bytes as usize], position);
            tally.linear_bytes += bytes as usize;
        }
    }
}

fn release(link: &Link, tokens: &mut Tokens, tally: &mut Tally) {
    let reported = tokens.fragments();
    let released = tokens.release(link.near.as_raw_fd()).expect("they go back");
    assert_eq!((released.fragments, released.unknown), (reported, 0));
    tally.released += reported;
}
