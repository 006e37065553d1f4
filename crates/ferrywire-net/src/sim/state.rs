//! The whole simulated network: hosts, NICs, connections, the clock and the scheduled events.
//!
//! This file holds the topology, the path between two NICs, and the faults of paths; `traffic.rs` holds the
//! operations of one end of a connection.
//! Invariants: every collection is ordered, so no result depends on a hash; all due events are processed
//! before a path changes.
//! Read next: `link.rs` for one connection, `traffic.rs` for the calls.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use super::faults::{DialFault, Faults, ResetSeen};
use super::link::{Link, Path, Phase};
use super::pipe::Payload;
use super::trace::Trace;
use crate::Nic;
use ferrywire_sys::rng::Rng;

/// Default of the bytes of one direction that may be unacknowledged or unread.
pub(super) const BUFFER_BYTES_DEFAULT: usize = 256 << 10;
/// Default of the one-way latency.
pub(super) const LATENCY_DEFAULT: Duration = Duration::from_micros(50);
/// Most connections that wait on one listener to be accepted.
pub(super) const BACKLOG_MAX: usize = 1024;
/// First wait for the answer to a connection request; each further wait is twice as long.
pub(super) const DIAL_RETRY_FIRST: Duration = Duration::from_secs(1);
/// Number of unanswered connection requests after which the dial fails with `TimedOut`.
const DIAL_TRIES_MAX: u32 = 7;

/// A NIC and its faults.
#[derive(Debug)]
pub(super) struct NicState {
    pub(super) host: usize,
    pub(super) nic: Nic,
    pub(super) bytes_per_second: Option<u64>,
    /// When the NIC will have sent, and received, all bytes queued at it.
    pub(super) sends_free_at: Duration,
    pub(super) receives_free_at: Duration,
    pub(super) extra_latency: Duration,
    pub(super) cut_out: bool,
    pub(super) cut_in: bool,
    pub(super) cut_since: Duration,
    /// Number of the current cut, so that a timed heal of an earlier cut has no effect.
    cut_epoch: u64,
    /// Faults of the next dials to this NIC, first dial first.
    pub(super) dial_faults: VecDeque<DialFault>,
    /// Number of dials to this NIC that a fault has failed.
    pub(super) failed_dials: u64,
}

#[derive(Debug)]
pub(super) struct HostState {
    pub(super) name: String,
    /// Indices of the host's NICs: loopback first, then in the order given.
    pub(super) nics: Vec<usize>,
    pub(super) killed: bool,
    pub(super) frozen: bool,
    pub(super) next_port: u16,
    /// Ports reserved for connections that are not dialled yet.
    pub(super) bound: BTreeSet<u16>,
}

#[derive(Debug)]
pub(super) struct ListenerState {
    pub(super) host: usize,
    pub(super) address: SocketAddr,
    /// Connections to accept, each with the time from which on it can be accepted.
    pub(super) backlog: VecDeque<(u64, Duration)>,
}

/// A scheduled event of the network.
#[derive(Debug)]
pub(super) enum Event {
    /// A connection's request arrives.
    Request(u64),
    /// The cut of a NIC ends.
    Heal { nic: usize, epoch: u64 },
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) rng: Rng,
    pub(super) clock: Duration,
    pub(super) faults: Faults,
    pub(super) disruptions: u32,
    pub(super) latency: Duration,
    pub(super) buffer_bytes: usize,
    pub(super) isolated: bool,
    pub(super) hosts: Vec<HostState>,
    pub(super) nics: Vec<NicState>,
    pub(super) listeners: BTreeMap<u64, ListenerState>,
    pub(super) links: BTreeMap<u64, Link>,
    events: BTreeMap<(Duration, u64), Event>,
    next_id: u64,
    /// Number of sessions whose random numbers were drawn.
    pub(super) sessions: u64,
    /// Requested corruptions: the number of bytes a data connection must have sent, and how many remain.
    pub(super) corrupt_bulk: (u64, u32),
    pub(super) trace: Trace,
}

macro_rules! note {
    ($state:expr, $($text:tt)*) => {
        $state.trace.note($state.clock, format_args!($($text)*))
    };
}
pub(super) use note;

impl State {
    pub(super) fn new(seed: u64) -> State {
        State {
            rng: Rng::new(seed),
            clock: Duration::ZERO,
            faults: Faults::default(),
            disruptions: 0,
            latency: LATENCY_DEFAULT,
            buffer_bytes: BUFFER_BYTES_DEFAULT,
            isolated: false,
            hosts: Vec::new(),
            nics: Vec::new(),
            listeners: BTreeMap::new(),
            links: BTreeMap::new(),
            events: BTreeMap::new(),
            next_id: 0,
            sessions: 0,
            corrupt_bulk: (0, 0),
            trace: Trace::new(),
        }
    }

    pub(super) fn next_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    // --- Time ---------------------------------------------------------------------------------

    /// Moves the simulated clock to `now` and processes the events scheduled on the way.
    pub(super) fn catch_up(&mut self, now: Duration) {
        while let Some(entry) = self.events.first_entry().filter(|entry| entry.key().0 <= now) {
            let ((at, _), event) = entry.remove_entry();
            self.clock = self.clock.max(at);
            self.happen(event);
        }
        self.clock = self.clock.max(now);
    }

    pub(super) fn schedule(&mut self, at: Duration, event: Event) {
        let id = self.next_id();
        self.events.insert((at, id), event);
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Request(link) => self.request_arrives(link),
            Event::Heal { nic, epoch } if self.nics[nic].cut_epoch == epoch => self.heal(nic),
            Event::Heal { .. } => {}
        }
    }

    /// When the network's next event is due; `None` when it is at rest.
    pub(super) fn next_event(&mut self) -> Option<Duration> {
        self.settle_all();
        let scheduled = self.events.keys().next().map(|(at, _)| *at);
        let links = self.links.values().filter_map(|link| link.next_at(self.clock));
        let waiting = self.listeners.values().flat_map(|listener| &listener.backlog);
        let waiting = waiting.map(|(_, at)| *at).filter(|at| *at > self.clock);
        scheduled.into_iter().chain(links).chain(waiting).min()
    }

    pub(super) fn settle(&mut self, id: u64) {
        let Some(path) = self.path(id) else { return };
        if let Some(link) = self.links.get_mut(&id) {
            link.settle(path, self.clock, &mut self.trace);
        }
    }

    fn settle_all(&mut self) {
        for id in self.link_ids(|_| true) {
            self.settle(id);
        }
    }

    pub(super) fn link_ids(&self, wanted: impl Fn(&Link) -> bool) -> Vec<u64> {
        self.links.values().filter(|link| wanted(link)).map(|link| link.id).collect()
    }

    // --- Topology -----------------------------------------------------------------------------

    pub(super) fn add_host(&mut self, name: &str, nics: &[(&str, IpAddr)]) -> usize {
        assert!(self.hosts.iter().all(|host| host.name != name), "two hosts named {name}");
        let host = self.hosts.len();
        let next_port = 32768;
        self.hosts.push(HostState {
            name: name.into(),
            nics: Vec::new(),
            killed: false,
            frozen: false,
            next_port,
            bound: BTreeSet::new(),
        });
        self.add_nic(host, "lo", IpAddr::V4(Ipv4Addr::LOCALHOST), 8);
        for (name, address) in nics {
            assert!(self.find_nic(host, *address).is_none(), "address {address} is taken");
            self.add_nic(host, name, *address, if address.is_ipv4() { 24 } else { 64 });
        }
        host
    }

    fn add_nic(&mut self, host: usize, name: &str, address: IpAddr, prefix_len: u8) {
        let loopback = address.is_loopback();
        let nic = Nic { name: name.into(), address, prefix_len, speed_mbps: None, loopback, up: true };
        self.hosts[host].nics.push(self.nics.len());
        self.nics.push(NicState {
            host,
            nic,
            bytes_per_second: None,
            sends_free_at: Duration::ZERO,
            receives_free_at: Duration::ZERO,
            extra_latency: Duration::ZERO,
            cut_out: false,
            cut_in: false,
            cut_since: Duration::ZERO,
            cut_epoch: 0,
            dial_faults: VecDeque::new(),
            failed_dials: 0,
        });
    }

    /// The NIC that an address means on host `from_host`; a loopback address means that host's own.
    pub(super) fn find_nic(&self, from_host: usize, address: IpAddr) -> Option<usize> {
        self.nics
            .iter()
            .position(|nic| nic.nic.address == address && (!nic.nic.loopback || nic.host == from_host))
    }

    /// Index of the NIC with this address. Panics when there is none, which is the caller's mistake.
    pub(super) fn nic_of(&self, address: IpAddr) -> usize {
        assert!(!address.is_loopback(), "loopback addresses belong to every host");
        self.find_nic(0, address).unwrap_or_else(|| panic!("no NIC has the address {address}"))
    }

    pub(super) fn host_of(&self, name: &str) -> usize {
        let found = self.hosts.iter().position(|host| host.name == name);
        found.unwrap_or_else(|| panic!("no host is named {name}"))
    }

    /// The NIC that a host uses towards an address: the one in its subnet, else the first.
    pub(super) fn route(&self, host: usize, to: IpAddr) -> io::Result<usize> {
        let nics = &self.hosts[host].nics;
        let matching = nics.iter().find(|nic| self.nics[**nic].nic.reaches(to));
        let first = nics.iter().find(|nic| !self.nics[**nic].nic.loopback);
        matching.or(first).copied().ok_or_else(|| ErrorKind::NetworkUnreachable.into())
    }

    // --- Paths --------------------------------------------------------------------------------

    fn flows(&self, from: usize, to: usize) -> bool {
        let (from, to) = (&self.nics[from], &self.nics[to]);
        let apart = self.isolated && from.host != to.host && !from.nic.reaches(to.nic.address);
        !from.cut_out && !to.cut_in && !apart
    }

    pub(super) fn path(&self, id: u64) -> Option<Path> {
        let link = self.links.get(&id)?;
        let [a, b] = [link.ends[0].nic, link.ends[1].nic];
        let latency = self.latency + self.nics[a].extra_latency + self.nics[b].extra_latency;
        Some(Path { open: [self.flows(a, b), self.flows(b, a)], latency })
    }

    /// Cuts a NIC silently, in one direction or both, until it is healed or for a time.
    pub(super) fn cut(&mut self, nic: usize, (out, into): (bool, bool), lasting: Option<Duration>) {
        self.settle_all();
        let (now, state) = (self.clock, &mut self.nics[nic]);
        state.cut_out |= out;
        state.cut_in |= into;
        state.cut_since = now;
        state.cut_epoch += 1;
        let epoch = state.cut_epoch;
        note!(self, "{} cut, out {out}, in {into}, for {lasting:?}", self.nics[nic].nic.address);
        if let Some(lasting) = lasting {
            self.schedule(now + lasting, Event::Heal { nic, epoch });
        }
        self.change_paths(|link, path, _| link.lose(path));
    }

    pub(super) fn heal(&mut self, nic: usize) {
        self.settle_all();
        let state = &mut self.nics[nic];
        (state.cut_out, state.cut_in) = (false, false);
        state.cut_epoch += 1;
        note!(self, "{} healed", self.nics[nic].nic.address);
        self.change_paths(|link, path, now| link.recover(path, now));
    }

    fn change_paths(&mut self, change: impl Fn(&mut Link, Path, Duration)) {
        for id in self.link_ids(|_| true) {
            let Some(path) = self.path(id) else { continue };
            if let Some(link) = self.links.get_mut(&id) {
                change(link, path, self.clock);
            }
        }
    }

    /// Changes what paths consist of. Due events are processed before the change, and losses are applied
    /// after it.
    pub(super) fn change(&mut self, change: impl FnOnce(&mut State)) {
        self.settle_all();
        change(self);
        self.change_paths(|link, path, now| {
            link.lose(path);
            link.recover(path, now);
        });
    }

    // --- Connections that begin and end -------------------------------------------------------

    fn request_arrives(&mut self, id: u64) {
        let Some(path) = self.path(id) else { return };
        let link = &self.links[&id];
        let Phase::Connecting { tries } = link.phase else {
            return;
        };
        let (host, address) = (link.ends[1].host, link.ends[1].address);
        let listener = self.find_listener(host, address);
        let full = listener.is_some_and(|listener| self.listeners[&listener].backlog.len() >= BACKLOG_MAX);
        let now = self.clock;
        let phase = match listener {
            _ if !path.is_open() || full => self.request_again(id, tries + 1),
            None => Phase::Failing { at: now + path.latency, kind: ErrorKind::ConnectionRefused },
            Some(listener) => {
                self.offer(listener, id, now + path.rtt());
                Phase::Up { at: now + path.latency }
            }
        };
        note!(self, "c{id} request to {address}: {phase:?}");
        if let Some(link) = self.links.get_mut(&id) {
            link.phase = phase;
        }
    }

    fn request_again(&mut self, id: u64, tries: u32) -> Phase {
        if tries == DIAL_TRIES_MAX {
            return Phase::Failing { at: self.clock, kind: ErrorKind::TimedOut };
        }
        self.schedule(self.clock + DIAL_RETRY_FIRST * (1 << (tries - 1)), Event::Request(id));
        Phase::Connecting { tries }
    }

    fn offer(&mut self, listener: u64, id: u64, at: Duration) {
        if let Some(listener) = self.listeners.get_mut(&listener) {
            listener.backlog.push_back((id, at));
        }
        if let Some(link) = self.links.get_mut(&id) {
            link.ends[1].dropped = false;
        }
    }

    fn find_listener(&self, host: usize, address: SocketAddr) -> Option<u64> {
        let hears = |listener: &ListenerState| {
            let here = listener.address.ip() == address.ip() || listener.address.ip().is_unspecified();
            listener.host == host && here && listener.address.port() == address.port()
        };
        self.listeners.iter().find(|(_, listener)| hears(listener)).map(|(id, _)| *id)
    }

    /// Resets a connection; the end `first` learns of the reset at once.
    pub(super) fn reset(&mut self, id: u64, first: usize, seen: ResetSeen) {
        self.settle(id);
        let (now, Some(path)) = (self.clock, self.path(id)) else {
            return;
        };
        let drops_unread = self.rng.chance(self.faults.reset_drops_unread);
        note!(self, "c{id} reset, end {first} first, {seen:?}");
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        if !link.is_up() {
            link.phase = Phase::Failing { at: now, kind: ErrorKind::ConnectionReset };
            return;
        }
        for end in [0, 1] {
            link.pipes[end].clear_flight();
            if drops_unread {
                link.pipes[end].arrived.clear();
            }
        }
        link.reset_end(first);
        match seen {
            ResetSeen::AtOnce => link.reset_end(1 - first),
            ResetSeen::OtherEndAfter(delay) => {
                link.pipes[first].enqueue(Payload::Rst, (now, now + delay), !path.open[first]);
            }
        }
    }

    /// Kills a host's process: its listeners close and its connections are reset.
    pub(super) fn kill(&mut self, host: usize) {
        note!(self, "{} killed", self.hosts[host].name);
        self.hosts[host].killed = true;
        self.hosts[host].frozen = false;
        let gone: Vec<u64> =
            self.listeners.iter().filter(|(_, l)| l.host == host).map(|(id, _)| *id).collect();
        for listener in gone {
            self.close_listener(listener);
        }
        for id in self.link_ids(|link| link.ends.iter().any(|end| end.host == host)) {
            let link = &self.links[&id];
            let first = usize::from(link.ends[0].host != host);
            if first == 1 && !link.is_up() {
                continue; // The dial fails anyway: its request will find no listener.
            }
            let latency = self.path(id).map_or(Duration::ZERO, |path| path.latency);
            self.reset(id, first, ResetSeen::OtherEndAfter(latency));
        }
    }

    pub(super) fn freeze(&mut self, host: usize) {
        note!(self, "{} frozen", self.hosts[host].name);
        self.hosts[host].frozen = true;
    }

    pub(super) fn revive(&mut self, host: usize) {
        note!(self, "{} revived", self.hosts[host].name);
        self.hosts[host].killed = false;
    }

    pub(super) fn close_listener(&mut self, listener: u64) {
        let Some(listener) = self.listeners.remove(&listener) else {
            return;
        };
        for (id, _) in listener.backlog {
            let latency = self.path(id).map_or(Duration::ZERO, |path| path.latency);
            self.reset(id, 1, ResetSeen::OtherEndAfter(latency));
            self.drop_end(id, 1);
        }
    }

    /// Drops the ownership of one end; a link without owners is removed.
    pub(super) fn drop_end(&mut self, id: u64, end: usize) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        link.ends[end].dropped = true;
        if link.ends.iter().all(|end| end.dropped) {
            self.links.remove(&id);
        }
    }
}
