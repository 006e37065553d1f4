//! The two roles in a session, with the state that only one of them has.
//!
//! Invariant: only the connector dials. Read next: `session.rs`.

use crate::control::dial::ConnectTarget;
use crate::control::pairs::{Pair, by_route};
use ferrywire_net::Conn;
use ferrywire_proto::handshake::Established;
use ferrywire_proto::limits;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

/// The connector opened the session, and dials all its connections.
pub(super) enum Role {
    Connector(Connector),
    Acceptor(Acceptor),
}

pub(super) struct Connector {
    pub target: ConnectTarget,
    /// The paths to the peer.
    pub pairs: Vec<Pair>,
    /// For each channel, the index of its path.
    pub assigned: Vec<usize>,
    /// Indices of the paths that have carried a connection of the session, and so lead to the peer.
    pub proven: BTreeSet<usize>,
    pub detours: Detours,
    /// When the first channel may go back to its own path, if it was last dialled over another.
    pub detour_until: Option<Duration>,
    pub resumption: Resumption,
}

/// Paths of the first channel beside its own, while no channel is up. One channel takes them alone, so that the others
/// do not leave a NIC that returns.
pub(super) struct Detours {
    /// No detour is taken before this time: a channel that was lost may come up again over its own path.
    pub begin_at: Duration,
    /// Number of detours taken since a channel was last lost that had lasted.
    taken: usize,
}

impl Detours {
    pub fn new(now: Duration) -> Detours {
        Detours { begin_at: now + limits::DIAL_TIMEOUT, taken: 0 }
    }

    /// Handles the loss of a channel that was up for `lasted`. After a short time the next detour takes the next path: the
    /// last one may accept connections that carry no data.
    pub fn channel_lost(&mut self, lasted: Duration, now: Duration) {
        let taken = if lasted < limits::REDIAL_INTERVAL_MAX { self.taken } else { 0 };
        *self = Detours { taken, ..Detours::new(now) };
    }
}

/// How the connector makes a new control connection when the current one is lost or silent.
pub(super) struct Resumption {
    pub state: ResumeState,
    /// No path is dialled before this time.
    pub dial_at: Duration,
    /// When the kernel was last asked about the path.
    pub path_checked: Duration,
}

/// The states of a resumption: `idle -> dialling -> idle`, or `dialling -> disowned -> idle`.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ResumeState {
    /// The control connection works.
    Idle,
    /// Every path is dialled repeatedly.
    Dialling,
    /// On a path that has led to the peer, an endpoint has answered that it does not know the session. Another
    /// path may still lead to the peer: an address may have moved to another host.
    Disowned(String),
}

/// Most resumptions that wait for the peer's choice: one for each path that it may have dialled.
const CANDIDATES_MAX: usize = limits::ADDRESSES_MAX + 1;

#[derive(Default)]
pub(super) struct Acceptor {
    /// Addresses from which the peer has connected.
    hosts: Vec<IpAddr>,
    /// When the peer last resumed the session.
    resumed_at: Option<Duration>,
    /// Resumption attempts of the peer, which dials several paths at once and sends on the one it keeps.
    pub candidates: Vec<Candidate>,
}

pub(super) struct Candidate {
    pub conn: Box<dyn Conn>,
    pub established: Box<Established>,
}

impl Connector {
    /// Assigns all channels to the path over which the peer was first reached; false if the paths include it
    /// already.
    pub fn fall_back_to_target(&mut self) -> bool {
        if self.pairs.iter().any(|pair| pair.remote == self.target.address) {
            return false;
        }
        self.pairs.push(by_route(self.target.address));
        self.assigned.fill(self.pairs.len() - 1);
        true
    }

    /// Notes the path of an established connection of the session.
    pub fn note_proven(&mut self, conn: &dyn Conn) {
        let (local, remote) = (conn.local().ip(), conn.remote());
        let is_over = |pair: &Pair| {
            // The scope of an IPv6 address, which only one of the two has, is that of the NIC.
            (pair.remote.ip(), pair.remote.port()) == (remote.ip(), remote.port())
                && pair.nic.as_ref().is_none_or(|nic| nic.address == local)
        };
        let over = self.pairs.iter().enumerate().filter(|(_, pair)| is_over(pair));
        self.proven.extend(over.map(|(index, _)| index));
    }

    /// The path that a channel was assigned.
    pub fn path(&self, channel: u16) -> &Pair {
        &self.pairs[self.assigned[usize::from(channel)]]
    }

    /// The next path that the first channel tries, in turn: `proven`, that of the control connection, then those of other
    /// channels, and its own.
    pub fn detour(&mut self, proven: Option<Pair>) -> Pair {
        let own = self.path(0).clone();
        let mut paths: Vec<Pair> = Vec::new();
        for path in proven.into_iter().chain(self.pairs.iter().cloned()) {
            if !own.equals(&path) && !paths.iter().any(|other| other.equals(&path)) {
                paths.push(path);
            }
        }
        paths.push(own);
        let turn = self.detours.taken % paths.len();
        self.detours.taken += 1;
        paths.swap_remove(turn)
    }
}

impl Resumption {
    pub fn new(now: Duration) -> Resumption {
        Resumption { state: ResumeState::Idle, dial_at: now, path_checked: now }
    }

    /// Notes whether the control connection is lost or silent. Once the peer is heard again, an earlier
    /// `Disowned` answer no longer counts.
    pub fn set_needed(&mut self, needed: bool) {
        match (needed, &self.state) {
            (false, _) => self.state = ResumeState::Idle,
            (true, ResumeState::Idle) => self.state = ResumeState::Dialling,
            (true, _) => {}
        }
    }

    /// Notes the answer of an endpoint that does not know the session, unless one is noted already.
    pub fn disown(&mut self, why: String) {
        if self.state == ResumeState::Dialling {
            self.state = ResumeState::Disowned(why);
        }
    }

    /// Takes the answer of the endpoint that does not know the session.
    pub fn take_disowned(&mut self) -> Option<String> {
        match std::mem::replace(&mut self.state, ResumeState::Dialling) {
            ResumeState::Disowned(why) => Some(why),
            state => {
                self.state = state;
                None
            }
        }
    }

    /// Whether the paths have to be dialled now. If so, sets the next time.
    pub fn take_due(&mut self, now: Duration) -> bool {
        let due = self.state == ResumeState::Dialling && now >= self.dial_at;
        if due {
            self.dial_at = now + 2 * limits::REDIAL_INTERVAL;
        }
        due
    }
}

impl Acceptor {
    pub fn note_host(&mut self, host: IpAddr) {
        if !self.hosts.contains(&host) && self.hosts.len() < limits::ADDRESSES_MAX {
            self.hosts.push(host);
        }
    }

    /// Adds a resumption attempt of the peer over one of several paths.
    pub fn add_candidate(&mut self, conn: Box<dyn Conn>, established: Established, now: Duration) {
        self.resumed_at = Some(now);
        self.note_host(conn.remote().ip());
        if self.candidates.len() >= CANDIDATES_MAX {
            self.candidates.remove(0);
        }
        self.candidates.push(Candidate { conn, established: Box::new(established) });
    }

    /// Whether a peer at this address has resumed the session lately. It has then dialled all paths at once,
    /// and hangs up on the slower ones.
    pub fn raced_from(&self, host: IpAddr, now: Duration) -> bool {
        let lately = |at| now.saturating_sub(at) <= 2 * limits::HANDSHAKE_TIMEOUT;
        self.resumed_at.is_some_and(lately) && self.hosts.contains(&host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrywire_net::Nic;

    fn path(subnet: u8) -> Pair {
        let nic = Nic {
            name: format!("eth{subnet}"),
            address: IpAddr::from([10, 0, subnet, 1]),
            prefix_len: 24,
            speed_mbps: None,
            loopback: false,
            up: true,
        };
        let remote = (IpAddr::from([10, 0, subnet, 2]), 7420).into();
        Pair { nic: Some(nic), remote, remote_nic: String::new() }
    }

    #[test]
    fn a_detour_begins_with_the_path_of_the_control_connection_and_tries_each_path_once_in_a_round() {
        let pairs: Vec<Pair> = (0..3).map(path).collect();
        let mut connector = Connector {
            target: ConnectTarget::new(pairs[0].remote),
            pairs,
            assigned: vec![1, 2],
            proven: BTreeSet::new(),
            detours: Detours::new(Duration::ZERO),
            detour_until: None,
            resumption: Resumption::new(Duration::ZERO),
        };
        let across = Pair { remote: path(0).remote, ..path(2) };
        for round in 0..3 {
            let paths: Vec<Pair> = (0..4).map(|_| connector.detour(Some(across.clone()))).collect();
            assert_eq!(paths, [across.clone(), path(0), path(2), path(1)], "round {round}");
        }
        connector.detours = Detours::new(Duration::ZERO);
        let paths: Vec<Pair> = (0..4).map(|_| connector.detour(Some(path(1)))).collect();
        assert_eq!(paths, [path(0), path(2), path(1), path(0)], "its own path leads nowhere");
        connector.detours = Detours::new(Duration::ZERO);
        let paths: Vec<Pair> = (0..3).map(|_| connector.detour(None)).collect();
        assert_eq!(paths, [path(0), path(2), path(1)], "the control connection's path is not for data");
    }
}
