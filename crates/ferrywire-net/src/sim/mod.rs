//! An in-memory network of several hosts, with seeded faults and a clock of its own.
//!
//! Everything above the transport traits must be tested against real network behaviour (partial sends, late
//! bytes, resets, paths that die silently, hosts that stop) without sockets and sleeps. A failure must be
//! repeatable from one printed number.
//!
//! ```text
//!   SimHost "a"                                     SimHost "b"
//!   eth0 --- Link: two pipes, in flight | arrived --- eth0
//!   eth1 ---------------------------------------- --- eth1
//!        NIC: bandwidth, cut out / in     SimNet: seed, clock, Faults
//! ```
//!
//! Invariant: a seed and a sequence of calls always give identical events, which [`SimNet::fingerprint`]
//! shows. The bytes of a connection arrive in order, once and unchanged, unless the connection is reset or a
//! corruption was requested.
//! Read next: `faults.rs` for the faults, `host.rs` for the traits, `link.rs` for a connection.

mod faults;
mod host;
mod link;
mod pipe;
mod state;
#[cfg(test)]
mod tests;
mod trace;
mod traffic;

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub use faults::{DialFault, Faults, ResetSeen, Side};
pub use host::SimHost;
use state::State;

/// Id of a connection of a [`SimNet`], in the order of the dials.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnId(u64);

/// One connection, as [`SimNet::connections`] lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnInfo {
    /// The connection's id, which other methods take.
    pub id: ConnId,
    /// Address of the dialling end.
    pub dialler: SocketAddr,
    /// Address that was dialled.
    pub acceptor: SocketAddr,
    /// Whether either end declared the connection as carrying bulk data.
    pub bulk: bool,
    /// Whether the acceptor's host has answered.
    pub established: bool,
    /// Number of bytes that the dialler has sent.
    pub sent_by_dialler: u64,
    /// Number of bytes that the acceptor has sent.
    pub sent_by_acceptor: u64,
}

/// A simulated network. Its methods may be called from any thread. They name a NIC by its address and a host
/// by its name, and panic when that NIC or host does not exist.
pub struct SimNet {
    seed: u64,
    /// Start of the process's clock, in real time; `None` with virtual time.
    epoch: Option<Instant>,
    /// Number of times that the clock was read.
    reads: AtomicU64,
    state: Mutex<State>,
}

impl SimNet {
    /// A network whose clock moves only by [`advance`](SimNet::advance) and [`step`](SimNet::step).
    pub fn new(seed: u64) -> Arc<SimNet> {
        SimNet::on(None, seed)
    }

    /// A network on the process's clock, for tests with threads. Its events are not repeatable.
    pub fn real_time(seed: u64) -> Arc<SimNet> {
        SimNet::on(Some(Instant::now()), seed)
    }

    fn on(epoch: Option<Instant>, seed: u64) -> Arc<SimNet> {
        Arc::new(SimNet { seed, epoch, reads: AtomicU64::new(0), state: Mutex::new(State::new(seed)) })
    }

    /// The seed of the network.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Adds a host with these NICs and a loopback NIC named `lo`. Subnets are /24, or /64 for IPv6.
    pub fn host(self: &Arc<Self>, name: &str, nics: &[(&str, IpAddr)]) -> Arc<SimHost> {
        let index = self.lock().add_host(name, nics);
        Arc::new(SimHost::new(Arc::clone(self), index, name))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(epoch) = self.epoch {
            state.catch_up(epoch.elapsed());
        }
        state
    }

    // --- Time ---------------------------------------------------------------------------------

    /// Time since the network was made.
    pub fn now(&self) -> Duration {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.lock().clock
    }

    /// Number of times that the clock was read. A thread that polls or waits reads it again and again.
    pub fn clock_reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    /// Moves the clock by `by` and processes the events on the way. In real time, sleeps.
    pub fn advance(&self, by: Duration) {
        if self.epoch.is_some() {
            return std::thread::sleep(by);
        }
        let mut state = self.lock();
        let target = state.clock + by;
        state.catch_up(target);
    }

    /// Time of the next arrival, connect, failure or heal; `None` when the network is at rest.
    pub fn next_event(&self) -> Option<Duration> {
        self.lock().next_event()
    }

    /// Advances to the next event. Returns false when the network is at rest.
    pub fn step(&self) -> bool {
        let Some(next) = self.next_event() else {
            return false;
        };
        self.advance(next.saturating_sub(self.now()));
        true
    }

    // --- What the network is like ---------------------------------------------------------------

    /// Sets the random faults from now on, and resets the count of disruptions.
    pub fn set_faults(&self, faults: Faults) {
        let mut state = self.lock();
        state.faults = faults;
        state.disruptions = 0;
    }

    /// Sets the one-way latency between any two NICs; 50 us by default.
    pub fn set_latency(&self, latency: Duration) {
        self.lock().latency = latency;
    }

    /// Adds to the one-way latency of all packets through a NIC.
    pub fn set_nic_latency(&self, nic: IpAddr, extra: Duration) {
        let mut state = self.lock();
        let nic = state.nic_of(nic);
        state.nics[nic].extra_latency = extra;
    }

    /// Limits the rate of a NIC in each direction; its connections share the rate, and its [`Nic`] reports
    /// the speed.
    ///
    /// [`Nic`]: crate::Nic
    pub fn set_bandwidth(&self, nic: IpAddr, bytes_per_second: Option<u64>) {
        let mut state = self.lock();
        let nic = state.nic_of(nic);
        state.nics[nic].bytes_per_second = bytes_per_second;
        state.nics[nic].nic.speed_mbps = bytes_per_second.map(|rate| (rate / 125_000).max(1) as u32);
    }

    /// Sets the bytes of each direction that may be unacknowledged or unread, for connections dialled from
    /// now on; 256 KiB by default. The options of a dial do not change the value.
    pub fn set_buffer_bytes(&self, bytes: usize) {
        self.lock().buffer_bytes = bytes;
    }

    /// Sets whether only NICs of one subnet reach each other; by default all NICs do.
    pub fn isolate_subnets(&self, isolated: bool) {
        self.lock().change(|state| state.isolated = isolated);
    }

    // --- Paths and connections that break -------------------------------------------------------

    /// Cuts a NIC silently: no packet leaves or reaches it.
    pub fn cut(&self, nic: IpAddr) {
        self.cut_ways(nic, (true, true), None);
    }

    /// Cuts a NIC silently for a time.
    pub fn cut_for(&self, nic: IpAddr, lasting: Duration) {
        self.cut_ways(nic, (true, true), Some(lasting));
    }

    /// Cuts the outgoing direction of a NIC; it still receives.
    pub fn cut_outgoing(&self, nic: IpAddr) {
        self.cut_ways(nic, (true, false), None);
    }

    /// Cuts the incoming direction of a NIC; it still sends.
    pub fn cut_incoming(&self, nic: IpAddr) {
        self.cut_ways(nic, (false, true), None);
    }

    fn cut_ways(&self, nic: IpAddr, ways: (bool, bool), lasting: Option<Duration>) {
        let mut state = self.lock();
        let nic = state.nic_of(nic);
        state.cut(nic, ways, lasting);
    }

    /// Removes a NIC for good: it is cut, and its host no longer lists it.
    pub fn delete(&self, nic: IpAddr) {
        self.cut(nic);
        let mut state = self.lock();
        let nic = state.nic_of(nic);
        let host = state.nics[nic].host;
        state.hosts[host].nics.retain(|each| *each != nic);
    }

    /// Ends every cut of a NIC. Lost bytes are sent again when their retransmission timer next fires.
    pub fn heal(&self, nic: IpAddr) {
        let mut state = self.lock();
        let nic = state.nic_of(nic);
        state.heal(nic);
    }

    /// Every connection that at least one end still owns.
    pub fn connections(&self) -> Vec<ConnInfo> {
        let state = self.lock();
        let info = |link: &link::Link| ConnInfo {
            id: ConnId(link.id),
            dialler: link.ends[0].address,
            acceptor: link.ends[1].address,
            bulk: link.bulk,
            established: link.is_up(),
            sent_by_dialler: link.pipes[0].sent,
            sent_by_acceptor: link.pipes[1].sent,
        };
        state.links.values().map(info).collect()
    }

    /// Resets a connection; bytes in flight are lost. The end `first` learns of the reset at once.
    pub fn reset(&self, conn: ConnId, first: Side, seen: ResetSeen) {
        self.lock().reset(conn.0, first.index(), seen);
    }

    /// Resets every connection of a NIC, whose own ends learn of the reset at once. Returns how many.
    pub fn reset_nic(&self, nic: IpAddr, seen: ResetSeen) -> usize {
        let mut state = self.lock();
        let nic = state.nic_of(nic);
        let ids = state.link_ids(|link| link.ends.iter().any(|end| end.nic == nic));
        for id in &ids {
            let first = usize::from(state.links[id].ends[0].nic != nic);
            state.reset(*id, first, seen);
        }
        ids.len()
    }

    /// Stalls a connection: no byte moves for `lasting`.
    pub fn stall(&self, conn: ConnId, lasting: Duration) {
        self.lock().stall(conn.0, lasting);
    }

    /// Flips one bit of the first byte that `from` sends at or after `offset` of its stream.
    pub fn corrupt(&self, conn: ConnId, from: Side, offset: u64) {
        if let Some(link) = self.lock().links.get_mut(&conn.0) {
            link.pipes[from.index()].corrupt_from(offset);
        }
    }

    /// Corrupts the next `times` sends on data connections that have already sent `after_bytes`.
    pub fn corrupt_bulk(&self, after_bytes: u64, times: u32) {
        self.lock().corrupt_bulk = (after_bytes, times);
    }

    /// Makes the next `count` dials to a NIC fail.
    pub fn fail_dials(&self, nic: IpAddr, fault: DialFault, count: usize) {
        let mut state = self.lock();
        let nic = state.nic_of(nic);
        state.nics[nic].dial_faults.extend(std::iter::repeat_n(fault, count));
    }

    /// Number of dials to a NIC that a fault has failed so far.
    pub fn failed_dials(&self, nic: IpAddr) -> u64 {
        let state = self.lock();
        state.nics[state.nic_of(nic)].failed_dials
    }

    /// Makes dials succeed again: forgets the failures that `fail_dials` has left.
    pub fn allow_dials(&self) {
        self.lock().nics.iter_mut().for_each(|nic| nic.dial_faults.clear());
    }

    // --- Hosts that break -----------------------------------------------------------------------

    /// Kills a host's process: its listeners close, its connections are reset, and its own calls fail.
    pub fn kill(&self, host: &str) {
        let mut state = self.lock();
        let host = state.host_of(host);
        state.kill(host);
    }

    /// Lets a killed host listen and dial again. Connections that were reset stay lost.
    pub fn revive(&self, host: &str) {
        let mut state = self.lock();
        let host = state.host_of(host);
        state.revive(host);
    }

    /// Freezes a host's process: it sends, receives and accepts nothing. Its kernel still acknowledges bytes
    /// until its buffers are full.
    pub fn freeze(&self, host: &str) {
        let mut state = self.lock();
        let host = state.host_of(host);
        state.freeze(host);
    }

    /// Ends the freeze of a host's process.
    pub fn thaw(&self, host: &str) {
        let mut state = self.lock();
        let host = state.host_of(host);
        state.thaw(host);
    }

    // --- Looking back ---------------------------------------------------------------------------

    /// The last 200 events, for the message of a failed test.
    pub fn trace(&self) -> Vec<String> {
        self.lock().trace.lines()
    }

    /// A hash over all events so far: equal for equal histories.
    pub fn fingerprint(&self) -> u64 {
        self.lock().trace.fingerprint()
    }
}

impl fmt::Debug for SimNet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimNet").field("seed", &self.seed).field("real_time", &self.epoch.is_some()).finish()
    }
}
