//! The operations of one end of a simulated connection: dial, accept, send, receive, close.
//!
//! Each call first processes the due events, then does its work as a kernel would, then draws random faults.
//! Invariant: random faults hit only after a call has done its work, never in the middle.
//! Read next: `host.rs`, which implements the network traits over these.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::faults::{DialFault, ResetSeen};
use super::link::{End, Link, Path, Phase};
use super::pipe::{Payload, retries};
use super::state::{DIAL_RETRY_FIRST, Event, ListenerState, State, note};
use crate::{Nic, PathHealth};

/// Largest segment in bytes; longer sends are split.
const SEGMENT_BYTES_MAX: usize = 16 << 10;
/// How long the simulated kernel retries an unanswered dial.
const DIAL_TIMEOUT: Duration = Duration::from_secs(127);
/// How long a dial to an address that does not exist takes to fail.
const NO_ROUTE_AFTER: Duration = Duration::from_secs(3);
/// Longest delay until the second end learns of a random reset.
const RESET_DELAY_MAX: Duration = Duration::from_millis(50);

impl State {
    // --- Beginning ----------------------------------------------------------------------------

    pub(super) fn listen(&mut self, host: usize, mut address: SocketAddr) -> io::Result<(u64, SocketAddr)> {
        self.check_alive(host)?;
        let ip = address.ip();
        if !ip.is_unspecified() && self.find_nic(host, ip).is_none_or(|nic| self.nics[nic].host != host) {
            return Err(ErrorKind::AddrNotAvailable.into());
        }
        if address.port() == 0 {
            address.set_port(self.free_port(host));
        }
        if self.listeners.values().any(|other| other.host == host && overlap(other.address, address)) {
            return Err(ErrorKind::AddrInUse.into());
        }
        let id = self.next_id();
        self.listeners.insert(id, ListenerState { host, address, backlog: Default::default() });
        note!(self, "{} listens on {address}", self.hosts[host].name);
        Ok((id, address))
    }

    fn check_alive(&self, host: usize) -> io::Result<()> {
        if self.hosts[host].killed { Err(ErrorKind::NetworkDown.into()) } else { Ok(()) }
    }

    fn free_port(&mut self, host: usize) -> u16 {
        loop {
            let port = self.hosts[host].next_port;
            self.hosts[host].next_port = if port == u16::MAX { 32768 } else { port + 1 };
            let listens = self.listeners.values().any(|l| l.host == host && l.address.port() == port);
            let dials =
                self.links.values().any(|l| l.ends[0].host == host && l.ends[0].address.port() == port);
            if !listens && !dials && !self.hosts[host].bound.contains(&port) {
                return port;
            }
        }
    }

    /// Reserves a local address and port for a connection that is dialled later.
    pub(super) fn bind(&mut self, host: usize, nic: Option<&Nic>, to: SocketAddr) -> io::Result<SocketAddr> {
        self.check_alive(host)?;
        let from = match nic {
            None => self.route(host, to.ip())?,
            Some(nic) => self.own_nic(host, nic.address)?,
        };
        let port = self.free_port(host);
        self.hosts[host].bound.insert(port);
        Ok(SocketAddr::new(self.nics[from].nic.address, port))
    }

    /// Dials from an address that [`State::bind`] returned.
    pub(super) fn dial(
        &mut self,
        host: usize,
        local: SocketAddr,
        to: SocketAddr,
        bulk: bool,
    ) -> io::Result<u64> {
        self.check_alive(host)?;
        let from = self.own_nic(host, local.ip())?;
        let target = self.find_nic(host, to.ip());
        let far = target.unwrap_or(from);
        let ends = [End::new(host, from, local), End::new(self.nics[far].host, far, to)];
        let id = self.next_id();
        let mut link = Link::new(id, ends, self.buffer_bytes, self.clock);
        link.bulk = bulk;
        self.links.insert(id, link);
        note!(self, "c{id} {} dials {to} from {local}, bulk {bulk}", self.hosts[host].name);
        self.ask(id, target);
        Ok(id)
    }

    fn own_nic(&self, host: usize, address: IpAddr) -> io::Result<usize> {
        let own = self.find_nic(host, address).filter(|nic| self.hosts[host].nics.contains(nic));
        own.ok_or_else(|| ErrorKind::AddrNotAvailable.into())
    }

    /// Sends the request of a connection, or schedules its failure.
    fn ask(&mut self, id: u64, target: Option<usize>) {
        let (now, Some(path)) = (self.clock, self.path(id)) else {
            return;
        };
        let failure = match target {
            None => Some((NO_ROUTE_AFTER, ErrorKind::HostUnreachable)),
            Some(nic) => self.dial_fault(nic).map(|fault| match fault {
                DialFault::Refuse => (path.rtt(), ErrorKind::ConnectionRefused),
                DialFault::TimeOut => (DIAL_TIMEOUT, ErrorKind::TimedOut),
            }),
        };
        match failure {
            None => self.schedule(now + path.latency, Event::Request(id)),
            Some((after, kind)) => {
                note!(self, "c{id} will fail: {kind:?}");
                if let Some(link) = self.links.get_mut(&id) {
                    link.phase = Phase::Failing { at: now + after, kind };
                }
            }
        }
    }

    fn dial_fault(&mut self, nic: usize) -> Option<DialFault> {
        let fault = self.next_dial_fault(nic);
        self.nics[nic].failed_dials += u64::from(fault.is_some());
        fault
    }

    fn next_dial_fault(&mut self, nic: usize) -> Option<DialFault> {
        if let Some(fault) = self.nics[nic].dial_faults.pop_front() {
            return Some(fault);
        }
        if self.disrupts(self.faults.refuse_dial) {
            return Some(DialFault::Refuse);
        }
        self.disrupts(self.faults.time_out_dial).then_some(DialFault::TimeOut)
    }

    pub(super) fn accept(&mut self, listener: u64) -> io::Result<Option<u64>> {
        let (now, Some(state)) = (self.clock, self.listeners.get_mut(&listener)) else {
            return Err(ErrorKind::NetworkDown.into());
        };
        let ready = state.backlog.iter().position(|(_, at)| *at <= now);
        let Some(ready) = ready.filter(|_| !self.hosts[state.host].frozen) else {
            return Ok(None);
        };
        if self.rng.chance(self.faults.would_block) {
            return Ok(None);
        }
        let accepted = state.backlog.remove(ready).map(|(id, _)| id);
        note!(self, "c{} accepted", accepted.unwrap_or_default());
        Ok(accepted)
    }

    // --- Moving bytes -------------------------------------------------------------------------

    /// How many of `wanted` bytes a send takes now.
    pub(super) fn send_allowed(&mut self, id: u64, end: usize, wanted: usize) -> io::Result<usize> {
        self.settle(id);
        let now = self.clock;
        let link = self.links.get_mut(&id).ok_or(ErrorKind::NotConnected)?;
        if self.hosts[link.ends[end].host].frozen {
            return Err(ErrorKind::WouldBlock.into());
        }
        if link.ends[end].shut {
            return Err(ErrorKind::BrokenPipe.into());
        }
        if link.ends[end].reset {
            return Err(ErrorKind::ConnectionReset.into());
        }
        link.check_connected(end, now)?;
        let room = link.pipes[end].room();
        if room == 0 {
            link.pipes[end].full_since.get_or_insert(now);
        }
        self.some_of(wanted.min(room))
    }

    /// Number of bytes that a call moves: all of `possible`, or a random part. Returns `WouldBlock` for none.
    fn some_of(&mut self, possible: usize) -> io::Result<usize> {
        if possible == 0 || self.rng.chance(self.faults.would_block) {
            return Err(ErrorKind::WouldBlock.into());
        }
        let partial = self.rng.chance(self.faults.partial);
        Ok(if partial { self.rng.prefix(possible) } else { possible })
    }

    /// Sends bytes that `send_allowed` permitted.
    pub(super) fn send(&mut self, id: u64, end: usize, bytes: &[u8]) {
        note!(self, "c{id} end {end} sends {}", bytes.len());
        let Some(path) = self.path(id) else { return };
        self.maybe_corrupt(id, end, bytes.len());
        for piece in bytes.chunks(SEGMENT_BYTES_MAX) {
            let times = self.wire_times(id, end, piece.len(), path);
            let now = self.clock;
            let Some(link) = self.links.get_mut(&id) else {
                return;
            };
            if link.pipes[end].push(piece.to_vec(), times, !path.open[end], now) {
                note!(self, "c{id} end {end} corrupted");
            }
        }
        self.strike(id);
    }

    /// When a segment leaves the sending NIC, and when it arrives.
    fn wire_times(&mut self, id: u64, end: usize, len: usize, path: Path) -> (Duration, Duration) {
        let ends = &self.links[&id].ends;
        let (from, to) = (ends[end].nic, ends[1 - end].nic);
        let delay = path.latency + self.rng.up_to(self.faults.jitter);
        let sender = &mut self.nics[from];
        let begins = self.clock.max(sender.sends_free_at);
        let leaves = begins + wire_time(len, sender.bytes_per_second);
        sender.sends_free_at = leaves;
        let receiver = &mut self.nics[to];
        let received_from = (begins + delay).max(receiver.receives_free_at);
        let due = (leaves + delay).max(received_from + wire_time(len, receiver.bytes_per_second));
        if receiver.bytes_per_second.is_some() {
            receiver.receives_free_at = due;
        }
        (leaves, due)
    }

    /// How many of `wanted` bytes a receive returns now; 0 at the end of the stream.
    pub(super) fn recv_allowed(&mut self, id: u64, end: usize, wanted: usize) -> io::Result<usize> {
        self.settle(id);
        let now = self.clock;
        let link = self.links.get(&id).ok_or(ErrorKind::NotConnected)?;
        let this = &link.ends[end];
        if self.hosts[this.host].frozen {
            return Err(ErrorKind::WouldBlock.into());
        }
        if this.shut {
            return Ok(0);
        }
        let arrived = link.pipes[1 - end].arrived.len();
        if arrived == 0 && this.fin {
            return Ok(0);
        }
        if arrived == 0 && this.reset {
            return Err(ErrorKind::ConnectionReset.into());
        }
        link.check_connected(end, now)?;
        self.some_of(wanted.min(arrived))
    }

    /// Removes bytes that `recv_allowed` permitted and the caller has copied.
    pub(super) fn consume(&mut self, id: u64, end: usize, count: usize) {
        note!(self, "c{id} end {end} receives {count}");
        if let Some(link) = self.links.get_mut(&id) {
            link.pipes[1 - end].consume(count);
        }
    }

    // --- Chance -------------------------------------------------------------------------------

    /// Draws a disruption of this probability, within the limit on disruptions.
    fn disrupts(&mut self, probability: f64) -> bool {
        let happens = self.disruptions < self.faults.disruptions_max && self.rng.chance(probability);
        self.disruptions += u32::from(happens);
        happens
    }

    /// Marks one of the next `len` bytes for corruption, at random or as requested.
    fn maybe_corrupt(&mut self, id: u64, end: usize, len: usize) {
        let Some(link) = self.links.get(&id).filter(|link| link.bulk) else {
            return;
        };
        let sent = link.pipes[end].sent;
        let asked = self.corrupt_bulk.1 > 0 && sent >= self.corrupt_bulk.0;
        self.corrupt_bulk.1 -= u32::from(asked);
        let chance = sent >= self.faults.corrupt_after_bytes && self.disrupts(self.faults.corrupt);
        if !asked && !chance {
            return;
        }
        let offset = sent + self.rng.below(len as u64);
        if let Some(link) = self.links.get_mut(&id) {
            link.pipes[end].corrupt_from(offset);
        }
    }

    /// Draws the random faults that follow a send, and applies them.
    fn strike(&mut self, id: u64) {
        let Some(link) = self.links.get(&id) else { return };
        let (nics, spared) = (link.ends.each_ref().map(|end| end.nic), self.faults.bulk_only && !link.bulk);
        if !spared && self.rng.chance(self.faults.stall) {
            let lasting = self.rng.up_to(self.faults.stall_max);
            self.stall(id, lasting);
        }
        if !nics.iter().any(|nic| self.nics[*nic].nic.loopback) && self.disrupts(self.faults.cut) {
            let nic = nics[self.rng.below(2) as usize];
            let ways = [(true, true), (true, false), (false, true)][self.rng.below(3) as usize];
            let lasting = self.rng.up_to(self.faults.cut_max);
            self.cut(nic, ways, Some(lasting));
        }
        if !spared && self.disrupts(self.faults.reset) {
            let first = self.rng.below(2) as usize;
            let later = ResetSeen::OtherEndAfter(self.rng.up_to(RESET_DELAY_MAX));
            let seen = if self.rng.chance(0.5) { ResetSeen::AtOnce } else { later };
            self.reset(id, first, seen);
        }
    }

    pub(super) fn stall(&mut self, id: u64, lasting: Duration) {
        self.settle(id);
        note!(self, "c{id} stalls for {lasting:?}");
        let until = self.clock + lasting;
        if let Some(link) = self.links.get_mut(&id) {
            link.stalled_until = link.stalled_until.max(until);
        }
    }

    // --- Ending -------------------------------------------------------------------------------

    /// Ends one end of a connection. Dropping an end with unread bytes sends a reset instead of the end of
    /// the stream, as a kernel does.
    pub(super) fn close(&mut self, id: u64, end: usize, dropping: bool) {
        self.settle(id);
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let unread = dropping && !link.pipes[1 - end].arrived.is_empty();
        let this = &mut link.ends[end];
        let first = !std::mem::replace(&mut this.shut, true);
        let frozen = self.hosts[this.host].frozen;
        let farewell = match (unread, first) {
            (true, _) => Some(Payload::Rst),
            (false, true) => Some(Payload::Fin),
            (false, false) => None,
        };
        if let Some(farewell) = farewell.filter(|_| !this.reset) {
            this.farewell = Some(farewell);
        }
        if !frozen {
            self.say_farewell(id, end);
        }
        if dropping {
            self.drop_end(id, end);
        }
    }

    fn say_farewell(&mut self, id: u64, end: usize) {
        let (now, Some(path)) = (self.clock, self.path(id)) else {
            return;
        };
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let Some(mut farewell) = link.ends[end].farewell.take().filter(|_| link.is_up()) else {
            return;
        };
        if self.rng.chance(self.faults.abrupt_close) {
            link.pipes[end].clear_flight();
            farewell = Payload::Rst;
        }
        self.trace.note(now, format_args!("c{id} end {end} sends {farewell:?}"));
        link.tell(end, farewell, now, path);
    }

    /// Ends a host's freeze: its ends send the marks that were withheld.
    pub(super) fn thaw(&mut self, host: usize) {
        note!(self, "{} thawed", self.hosts[host].name);
        self.hosts[host].frozen = false;
        for id in self.link_ids(|link| link.ends.iter().any(|end| end.host == host)) {
            self.settle(id);
            for end in [0, 1] {
                if self.links[&id].ends[end].host == host {
                    self.say_farewell(id, end);
                }
            }
        }
    }

    // --- Looking ------------------------------------------------------------------------------

    pub(super) fn unsent_bytes(&mut self, id: u64, end: usize) -> usize {
        self.settle(id);
        let Some(link) = self.links.get(&id) else { return 0 };
        let waiting = link.pipes[end].in_flight.iter().filter(|segment| segment.leaves > self.clock);
        waiting.map(|segment| segment.payload.len()).sum()
    }

    pub(super) fn health(&mut self, id: u64, end: usize) -> PathHealth {
        self.settle(id);
        let (Some(link), Some(path)) = (self.links.get(&id), self.path(id)) else {
            return PathHealth::default();
        };
        let (now, rtt, pipe) = (self.clock, path.rtt(), &link.pipes[end]);
        let silent_for = now.saturating_sub(pipe.last_ack);
        let acked_bytes = pipe.acked();
        let quiet = PathHealth {
            waiting: false,
            unanswered: 0,
            silent_for,
            rtt,
            min_rtt: rtt,
            acked_bytes,
            mss_bytes: 0,
            retransmits: 0,
            congestion_window_bytes: 0,
            unsent_bytes: 0,
        };
        if !link.is_up() {
            let silent_for = now.saturating_sub(link.dialled_at);
            let unanswered = retries(silent_for, DIAL_RETRY_FIRST);
            return PathHealth { waiting: true, unanswered, silent_for, ..quiet };
        }
        if pipe.is_waiting() {
            return PathHealth { waiting: true, unanswered: pipe.unanswered(now, path.rto()), ..quiet };
        }
        let broken = link.ends.iter().map(|end| &self.nics[end.nic]).filter(|nic| nic.cut_out || nic.cut_in);
        let broken_since = broken.map(|nic| nic.cut_since).max().filter(|_| !path.is_open());
        let Some(since) = pipe.full_since.zip(broken_since).map(|(full, broken)| full.max(broken)) else {
            return quiet;
        };
        // The other end reads nothing and its window is closed: the kernel's probes are not answered.
        let silence = now.saturating_sub(since);
        PathHealth { waiting: true, unanswered: retries(silence, path.rto()), silent_for: silence, ..quiet }
    }
}

fn overlap(a: SocketAddr, b: SocketAddr) -> bool {
    a.port() == b.port() && (a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified())
}

/// How long a NIC of this rate needs for `len` bytes.
fn wire_time(len: usize, bytes_per_second: Option<u64>) -> Duration {
    let nanos = |rate: u64| len as u64 * 1_000_000_000 / rate.max(1);
    bytes_per_second.map_or(Duration::ZERO, |rate| Duration::from_nanos(nanos(rate)))
}
