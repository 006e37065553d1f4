//! Counts of this process's connections and requests, for Prometheus and `ferrywire watch`.
//!
//! NCCL makes hundreds of comms with one peer. In metrics a peer is a remote address with all its comms, and a channel is
//! one socket of a comm. A comm that opens takes over channels of comms that were closed. So the counts of a connected
//! peer never shrink, and its channels do not accumulate.
//!
//! A channel's life: used -> free -> used by a socket of a later comm.
//! Invariants: counting takes no lock, and each counter has one writer at a time. A descriptor is used only under the
//! lock under which it is given up before it is closed. Each request is counted once: by its comm while the comm is
//! open, afterwards by its peer.

use std::collections::HashMap;
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, Weak};

use ferrywire_metrics::{ChannelSample, KindSample, PeerSample, Source};
use ferrywire_sys::socket;
use ferrywire_sys::tcp_info::TcpInfo;

use crate::comm::{REQUESTS, locked};
use crate::log;

/// Makes this process visible to `ferrywire watch`, and serves metrics where the environment says so; once per process. An
/// address that cannot be used is a warning, because an error would make NCCL use another network.
pub fn start() {
    static STARTED_BY: AtomicU32 = AtomicU32::new(0);
    let process = std::process::id();
    if STARTED_BY.swap(process, Ordering::Relaxed) == process {
        return;
    }
    ferrywire_metrics::set_face("nccl");
    match without_signals(ferrywire_metrics::begin) {
        Ok(None) => {}
        Ok(Some(address)) => log::info(format_args!("metrics are served at http://{address}/metrics")),
        Err(error) => log::warn(format_args!("{}: {error}", ferrywire_metrics::VARIABLE)),
    }
}

/// Starts threads on which no handler of the program runs: they inherit this thread's signal mask.
fn without_signals<T>(start: impl FnOnce() -> T) -> T {
    // SAFETY: the sets are filled before they are used, and the mask is this thread's own.
    let before = unsafe {
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) =
            (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, &mut before);
        before
    };
    let started = start();
    // SAFETY: the mask was filled by the first call, and is this thread's own.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    started
}

/// A remote address with the counts of all its comms.
pub struct Peer {
    address: IpAddr,
    book: Mutex<Book>,
}

#[derive(Default)]
struct Book {
    channels: Vec<Arc<Channel>>,
    /// Counts of the requests of open comms.
    requests: Vec<Arc<RequestCounts>>,
    /// Counts of the requests of closed comms, by [`Kind`].
    closed: [KindSample; Kind::ALL.len()],
}

impl Peer {
    /// The peer with this address, which lives as long as one of its comms.
    pub fn at(address: IpAddr) -> Arc<Peer> {
        static PEERS: LazyLock<Mutex<HashMap<IpAddr, Weak<Peer>>>> = LazyLock::new(Mutex::default);
        let address = address.to_canonical();
        let mut peers = locked(&PEERS);
        if let Some(peer) = peers.get(&address).and_then(Weak::upgrade) {
            return peer;
        }
        let closed = Kind::ALL.map(|kind| KindSample { kind: kind.name().into(), ..KindSample::default() });
        let peer = Arc::new(Peer { address, book: Mutex::new(Book { closed, ..Book::default() }) });
        peers.retain(|_, peer| peer.strong_count() > 0);
        peers.insert(address, Arc::downgrade(&peer));
        let source: Weak<dyn Source> = Arc::<Peer>::downgrade(&peer);
        ferrywire_metrics::register(address.to_string(), source);
        peer
    }

    /// A channel of this peer for a socket over the NIC `nic`.
    pub fn channel(self: &Arc<Peer>, nic: &str, fd: Option<RawFd>) -> Connected {
        let mut book = locked(&self.book);
        let free = book.channels.iter().find(|channel| channel.nic == nic && channel.take_over(fd)).cloned();
        let channel = free.unwrap_or_else(|| {
            let channel = Arc::new(Channel::new(nic, fd));
            book.channels.push(channel.clone());
            channel
        });
        Connected { channel, _peer: self.clone() }
    }

    /// Counts of the requests of a new comm.
    pub fn requests(self: &Arc<Peer>, kind: Kind) -> Requests {
        let counts = Arc::new(RequestCounts::new(kind));
        locked(&self.book).requests.push(counts.clone());
        Requests { counts, peer: self.clone() }
    }
}

impl Source for Peer {
    fn sample(&self) -> PeerSample {
        let (channels, operations) = {
            let book = locked(&self.book);
            let mut operations = book.closed.clone();
            book.requests.iter().for_each(|counts| counts.add_to(&mut operations[counts.kind as usize]));
            (book.channels.clone(), operations)
        };
        let address = self.address.to_string();
        PeerSample {
            endpoint: "nccl".into(),
            peer: address.clone(),
            session: 0,
            label: address,
            transport: "tcp".into(),
            reason: String::new(),
            resent_chunks: 0,
            fences: 0,
            lost_channels: channels.iter().map(|channel| channel.lost.load(Ordering::Relaxed)).sum(),
            operations: operations.into_iter().filter(|kind| kind.started > 0).collect(),
            channels: (0..).zip(&channels).map(|(index, channel)| channel.sample(index)).collect(),
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        ferrywire_metrics::retire(&self.sample());
    }
}

/// The counters of one socket at a time. They are on cache lines of their own, because different workers write
/// them.
#[repr(align(128))]
struct Channel {
    sent_bytes: AtomicU64,
    received_bytes: AtomicU64,
    /// Number of connections that ended with an error.
    lost: AtomicU64,
    nic: String,
    connection: Mutex<Connection>,
}

struct Connection {
    is_used: bool,
    /// Descriptor of the connection; `None` once it is closed, or if it has none.
    fd: Option<RawFd>,
    /// Number of packets that the kernel retransmitted on earlier connections.
    retransmits_before: u64,
}

impl Channel {
    fn new(nic: &str, fd: Option<RawFd>) -> Channel {
        Channel {
            sent_bytes: AtomicU64::new(0),
            received_bytes: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            nic: nic.into(),
            connection: Mutex::new(Connection { is_used: true, fd, retransmits_before: 0 }),
        }
    }

    /// Takes the channel for a connection; returns false if another connection has it.
    fn take_over(&self, fd: Option<RawFd>) -> bool {
        let mut connection = locked(&self.connection);
        if connection.is_used {
            return false;
        }
        connection.is_used = true;
        connection.fd = fd;
        true
    }

    /// Reads the channel's counters. The kernel's are read here, by the thread that answers a scrape.
    fn sample(&self, index: u16) -> ChannelSample {
        let connection = locked(&self.connection);
        let info = connection.info().unwrap_or_default();
        let unacked = connection.fd.and_then(|fd| socket::unacked_bytes(fd).ok());
        ChannelSample {
            channel: index,
            nic: self.nic.clone(),
            alive: connection.is_used,
            tx_bytes: self.sent_bytes.load(Ordering::Relaxed),
            rx_bytes: self.received_bytes.load(Ordering::Relaxed),
            reconnects: 0,
            retransmits: connection.retransmits_before + u64::from(info.total_retrans),
            rtt_s: info.rtt.as_secs_f64(),
            congestion_window_bytes: u64::from(info.congestion_window) * u64::from(info.send_mss),
            send_queue_bytes: info.notsent_bytes.into(),
            in_flight_bytes: unacked.unwrap_or(0) as u64,
            staging: None,
            lane: None,
        }
    }
}

impl Connection {
    fn info(&self) -> Option<TcpInfo> {
        TcpInfo::read(self.fd?).ok()
    }
}

/// A socket's use of its channel, which is dropped before the socket is closed.
pub struct Connected {
    channel: Arc<Channel>,
    /// The peer, which keeps its counts as long as the socket is open.
    _peer: Arc<Peer>,
}

impl Connected {
    /// Counts bytes that the kernel took from the sender.
    pub fn sent(&self, bytes: usize) {
        add(&self.channel.sent_bytes, bytes as u64);
    }

    /// Counts bytes that have arrived at this end.
    pub fn received(&self, bytes: usize) {
        add(&self.channel.received_bytes, bytes as u64);
    }

    /// Counts this connection as lost.
    pub fn lost(&self) {
        add(&self.channel.lost, 1);
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        let mut connection = locked(&self.channel.connection);
        connection.retransmits_before += connection.info().map_or(0, |info| info.total_retrans.into());
        connection.fd = None;
        connection.is_used = false;
    }
}

/// Adds to a counter that no other thread writes at this time, without the cost of an atomic addition.
fn add(counter: &AtomicU64, more: u64) {
    counter.store(counter.load(Ordering::Relaxed) + more, Ordering::Relaxed);
}

/// The kind of a request: send or receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Isend,
    Irecv,
}

impl Kind {
    const ALL: [Kind; 2] = [Kind::Isend, Kind::Irecv];

    fn name(self) -> &'static str {
        ["isend", "irecv"][self as usize]
    }
}

// `failed_slots` has a bit for each slot.
const _: () = assert!(REQUESTS <= u64::BITS as usize);

/// Counts of the requests of one comm, changed under the lock of NCCL's thread. They are on cache lines of their
/// own, as channels are.
#[repr(align(128))]
struct RequestCounts {
    kind: Kind,
    started: AtomicU64,
    completed: AtomicU64,
    failed: AtomicU64,
    /// The slots whose request has failed, one bit per slot.
    failed_slots: AtomicU64,
}

impl RequestCounts {
    fn new(kind: Kind) -> RequestCounts {
        let [started, completed, failed, failed_slots] = [const { AtomicU64::new(0) }; 4];
        RequestCounts { kind, started, completed, failed, failed_slots }
    }

    fn add_to(&self, sum: &mut KindSample) {
        // A request is started before it ends, so the ends are read first.
        sum.failed += self.failed.load(Ordering::Acquire);
        sum.completed += self.completed.load(Ordering::Acquire);
        sum.started += self.started.load(Ordering::Acquire);
    }
}

/// A comm's use of the counts of its requests, which ends with the comm.
pub struct Requests {
    counts: Arc<RequestCounts>,
    peer: Arc<Peer>,
}

impl Requests {
    /// Counts a request as posted.
    pub fn started(&self) {
        add(&self.counts.started, 1);
    }

    /// Counts a request that `test` reports as done.
    pub fn completed(&self, slot: usize) {
        let failed_slots = &self.counts.failed_slots;
        let failed = failed_slots.load(Ordering::Relaxed);
        if failed & (1 << slot) == 0 {
            add(&self.counts.completed, 1);
        } else {
            failed_slots.store(failed & !(1 << slot), Ordering::Relaxed);
        }
    }

    /// Counts a request that `test` reports as failed, however often it does.
    pub fn failed(&self, slot: usize) {
        let failed_slots = &self.counts.failed_slots;
        let failed = failed_slots.load(Ordering::Relaxed);
        if failed & (1 << slot) == 0 {
            failed_slots.store(failed | (1 << slot), Ordering::Relaxed);
            add(&self.counts.failed, 1);
        }
    }
}

impl Drop for Requests {
    /// Counts requests that were not done as cancelled, because the comm is closed.
    fn drop(&mut self) {
        let mut book = locked(&self.peer.book);
        book.requests.retain(|counts| !Arc::ptr_eq(counts, &self.counts));
        let (started, completed) =
            (self.counts.started.load(Ordering::Relaxed), self.counts.completed.load(Ordering::Relaxed));
        self.counts.failed.store(started - completed, Ordering::Relaxed);
        self.counts.add_to(&mut book.closed[self.counts.kind as usize]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The peer's counts of one kind: started, completed, failed.
    fn counts(peer: &Peer, kind: Kind) -> [u64; 3] {
        let operations = peer.sample().operations;
        let found = operations.iter().find(|operation| operation.kind == kind.name());
        found.map_or([0; 3], |kind| [kind.started, kind.completed, kind.failed])
    }

    #[test]
    fn counts_of_a_peer_never_shrink_and_its_channels_do_not_accumulate() {
        let peer = Peer::at([198, 51, 100, 1].into());
        for comm in 1..=10 {
            let sockets = ["eth1", "eth2", "eth1"].map(|nic| peer.channel(nic, None));
            sockets.iter().for_each(|socket| socket.sent(100));
            let sample = peer.sample();
            assert_eq!(sample.channels.len(), 3);
            assert!(sample.channels.iter().all(|channel| channel.alive && channel.tx_bytes == 100 * comm));
            sockets[0].lost();
            drop(sockets);
            let sample = peer.sample();
            assert!(sample.channels.iter().all(|channel| !channel.alive && channel.tx_bytes == 100 * comm));
            assert_eq!(sample.lost_channels, comm);
        }
    }

    #[test]
    fn each_request_ends_once() {
        let peer = Peer::at([198, 51, 100, 2].into());
        let other = peer.requests(Kind::Isend);
        other.started();
        other.completed(0);
        let requests = peer.requests(Kind::Isend);
        (0..5).for_each(|_| requests.started());
        requests.completed(0);
        requests.failed(1);
        requests.failed(1);
        requests.failed(63);
        // A message that was sent after all was reported as failed before.
        requests.completed(63);
        assert_eq!(counts(&peer, Kind::Isend), [6, 2, 2]);
        // Its slot is used again.
        requests.started();
        requests.completed(63);
        assert_eq!(counts(&peer, Kind::Isend), [7, 3, 2]);
        drop(requests);
        assert_eq!(counts(&peer, Kind::Isend), [7, 3, 4], "two were cancelled");
        assert_eq!(counts(&peer, Kind::Irecv), [0; 3]);
    }

    #[test]
    fn an_address_is_one_peer_until_its_last_comm_is_closed() {
        let address = [198, 51, 100, 3];
        let mapped = std::net::Ipv4Addr::from(address).to_ipv6_mapped();
        let (one, other) = (Peer::at(address.into()), Peer::at(mapped.into()));
        assert!(Arc::ptr_eq(&one, &other));
        let socket = one.channel("eth1", None);
        socket.received(7);
        drop((one, other));
        assert_eq!(Peer::at(address.into()).sample().channels[0].rx_bytes, 7);
        drop(socket);
        assert!(Peer::at(address.into()).sample().channels.is_empty());
    }
}
