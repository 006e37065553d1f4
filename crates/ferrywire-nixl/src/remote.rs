//! A loaded remote agent and this agent's connection to it.
//!
//! ```text
//!   idle ── first transfer or notification ──> dialing ──> up ── lost: the next one ──> dialing
//!                                                 └── failed: waiting operations fail ──> idle
//! ```
//!
//! Invariant: operations that wait for the connection start in the order in which they were posted, before later ones.
//! Locks are taken in the order remote, transfer.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use ferrywire::{ConnectError, Endpoint, Identity, Peer, TransferError, Wakeup};
use ferrywire_net::tcp::TcpTransport;
use ferrywire_net::{Nic, Transport};

use crate::connection_info::ConnectionInfo;
use crate::dialing::Dialing;
use crate::log;
use crate::notification;
use crate::status::Status;
use crate::transfer::Transfer;

/// Most bytes of notifications that wait for a connection.
const WAITING_BYTES_MAX: usize = 64 << 20;

pub struct Remote {
    pub name: String,
    info: ConnectionInfo,
    state: Mutex<State>,
    failures: Mutex<Failures>,
}

/// Counts failures for a log that is limited in rate.
#[derive(Default)]
struct Failures {
    told_at: Option<Instant>,
    untold: u64,
}

/// Shortest time between two log lines about failed transfers: with a lost peer, thousands fail.
const FAILURES_APART: Duration = Duration::from_secs(1);

struct State {
    link: Link,
    waiting: VecDeque<Waiting>,
    waiting_bytes: usize,
    /// Notifications that were sent and whose outcome is not known yet.
    sent: VecDeque<ferrywire::Transfer>,
    /// Number of the next long notification.
    notified: u64,
    /// Whether this agent has removed the remote agent.
    removed: bool,
    /// Whether this agent has tried to connect before.
    dialled: bool,
    /// Whether a connection to the remote agent was logged before.
    announced: bool,
}

enum Link {
    Idle,
    Dialing(Dialing),
    Up(Peer),
}

enum Waiting {
    Post(Weak<Transfer>, u64),
    /// A notification, and the transfer with the number of its post that ends with it.
    Notify(Vec<Vec<u8>>, Option<(Weak<Transfer>, u64)>),
}

/// The connection to a remote agent, or how an operation waits for it.
pub enum Connection {
    Up(Peer),
    /// The operation is queued, and starts when the connection is up.
    Waiting,
    Removed,
}

impl Remote {
    pub fn new(name: String, info: ConnectionInfo) -> Remote {
        let (link, waiting) = (Link::Idle, VecDeque::new());
        let state = State {
            link,
            waiting,
            waiting_bytes: 0,
            sent: VecDeque::new(),
            notified: 0,
            removed: false,
            dialled: false,
            announced: false,
        };
        Remote { name, info, state: Mutex::new(state), failures: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn identity(&self) -> Identity {
        self.info.identity
    }

    /// Logs a failed transfer and returns its status for NIXL.
    pub fn failed(&self, what: &str, error: TransferError) -> Status {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        if failures.told_at.is_some_and(|at| at.elapsed() < FAILURES_APART) {
            failures.untold += 1;
        } else {
            let untold = std::mem::take(&mut failures.untold);
            failures.told_at = Some(Instant::now());
            tracing::warn!(agent = self.name, %error, others_untold = untold, "{what}");
        }
        Status::of(error)
    }

    /// The connection to the remote agent; without one, the operation is queued until there is one.
    pub fn connection_for(
        &self,
        transfer: &Arc<Transfer>,
        post: u64,
        timeout: Duration,
        wakeup: &Wakeup,
    ) -> Connection {
        let mut state = self.lock();
        if state.removed {
            return Connection::Removed;
        }
        match state.peer(self, timeout, wakeup) {
            Some(peer) => Connection::Up(peer),
            None => {
                state.waiting.push_back(Waiting::Post(Arc::downgrade(transfer), post));
                Connection::Waiting
            }
        }
    }

    /// Starts to connect to the remote agent if there is no connection.
    pub fn connect(&self, timeout: Duration, wakeup: &Wakeup) {
        let mut state = self.lock();
        if !state.removed {
            state.peer(self, timeout, wakeup);
        }
    }

    /// Sends a notification after everything that was posted before it. If it has to wait for a connection, the transfer `of`
    /// that it belongs to, if any, stays in progress until then.
    pub fn notify(
        &self,
        sender: &[u8],
        message: &[u8],
        of: Option<(&Arc<Transfer>, u64)>,
        timeout: Duration,
        wakeup: &Wakeup,
    ) -> Status {
        let mut state = self.lock();
        if state.removed {
            return Status::REMOTE_DISCONNECT;
        }
        if message.len() > notification::MESSAGE_BYTES_MAX {
            return Status::INVALID_PARAMETER;
        }
        state.notified += 1;
        let parts = notification::encode(sender, message, state.notified);
        match state.peer(self, timeout, wakeup) {
            Some(peer) => state.send(&self.name, &peer, &parts),
            None if state.waiting_bytes + bytes_of(&parts) > WAITING_BYTES_MAX => {
                tracing::warn!(
                    agent = self.name,
                    "cannot queue a notification: too many wait for a connection to the remote agent"
                );
                Status::BACKEND
            }
            None => {
                state.waiting_bytes += bytes_of(&parts);
                let of = of.map(|(transfer, post)| (Arc::downgrade(transfer), post));
                let status = if of.is_some() { Status::IN_PROGRESS } else { Status::SUCCESS };
                state.waiting.push_back(Waiting::Notify(parts, of));
                status
            }
        }
    }

    /// Makes progress on a pending connection; returns true while it is pending.
    pub fn advance(&self, endpoint: &Endpoint, wakeup: &Wakeup) -> bool {
        let mut state = self.lock();
        let Link::Dialing(dialing) = &mut state.link else { return false };
        match dialing.advance(endpoint, &self.info, wakeup) {
            None => return true,
            Some(Ok(peer)) => {
                if !std::mem::replace(&mut state.announced, true) {
                    self.announce(&peer, &endpoint.config().nics);
                }
                state.link = Link::Up(peer.clone());
                state.waiting_bytes = 0;
                // The queued operations start under the lock, so that no later operation overtakes them.
                for waiting in std::mem::take(&mut state.waiting) {
                    match waiting {
                        Waiting::Post(transfer, post) => {
                            transfer.upgrade().into_iter().for_each(|transfer| transfer.start(&peer, post));
                        }
                        Waiting::Notify(parts, None) => drop(state.send(&self.name, &peer, &parts)),
                        Waiting::Notify(parts, Some((transfer, post))) => {
                            // A transfer that was released meanwhile may have been made again, with the same notification.
                            if let Some(transfer) = transfer.upgrade().filter(|each| each.is_notifying(post))
                            {
                                let status = state.send(&self.name, &peer, &parts);
                                transfer.notified(post, status);
                            }
                        }
                    }
                }
            }
            Some(Err(error)) => {
                state.link = Link::Idle;
                state.fail_waiting(&self.name, &error);
            }
        }
        false
    }

    /// Logs which NICs and addresses carry the bytes, and warns of usable NICs that stay idle.
    fn announce(&self, peer: &Peer, chosen: &[String]) {
        let stats = peer.stats();
        let mut pairs: BTreeMap<String, usize> = BTreeMap::new();
        for channel in &stats.channels {
            let pair = format!("{} ({} to {})", channel.nic, channel.local.ip(), channel.remote.ip());
            *pairs.entry(pair).or_default() += 1;
        }
        let channels = |(pair, count): (&String, &usize)| {
            format!("{count} channel{} over {pair}", if *count == 1 { "" } else { "s" })
        };
        let path: Vec<String> = pairs.iter().map(channels).collect();
        log::announce(format_args!(
            "connected to agent {} by {}: {}",
            self.name,
            stats.transport,
            path.join(", ")
        ));
        let used: BTreeSet<&str> = stats.channels.iter().map(|channel| channel.nic.as_str()).collect();
        let nics = TcpTransport::default().nics().unwrap_or_default();
        let there = |address: &IpAddr| address.is_ipv4() && !address.is_loopback();
        let useful = |nic: &&Nic| nic.up && !nic.loopback && there(&nic.address);
        let own: BTreeSet<&str> = nics.iter().filter(useful).map(|nic| nic.name.as_str()).collect();
        let theirs = self.info.addresses.iter().filter(|address| there(&address.ip())).count();
        let possible = own.len().min(theirs).min(stats.channels.len());
        if chosen.is_empty() && !peer.same_host() && used.len() < possible {
            let idle: Vec<&str> = own.difference(&used).copied().collect();
            log::announce(format_args!(
                "warning: {} of {} NICs carry bytes to agent {}; {} share no subnet with it: give the NICs of both \
                 hosts addresses in common subnets",
                used.len(),
                own.len(),
                self.name,
                idle.join(", ")
            ));
        }
    }

    /// Whether notifications wait for a connection to the remote agent.
    pub fn has_waiting_notifications(&self) -> bool {
        self.lock().waiting.iter().any(|waiting| matches!(waiting, Waiting::Notify(..)))
    }

    /// Logs notifications that were sent and not delivered.
    pub fn settle(&self) {
        self.lock().settle(&self.name);
    }

    /// Removes the remote agent. Operations in flight are not waited for.
    pub fn remove(&self) {
        let mut state = self.lock();
        state.removed = true;
        state.link = Link::Idle;
        state.settle(&self.name);
        state.sent.clear();
        state.fail_waiting(&self.name, &ConnectError::Closed);
    }
}

impl State {
    /// The connection to the remote agent; starts to connect if there is none.
    fn peer(&mut self, remote: &Remote, timeout: Duration, wakeup: &Wakeup) -> Option<Peer> {
        if let Link::Up(peer) = &self.link {
            match peer.error() {
                None => return Some(peer.clone()),
                Some(error) => {
                    self.link = Link::Idle;
                    tracing::warn!(agent = remote.name, %error, "connection to a remote agent lost, reconnecting");
                }
            }
        }
        if let Link::Idle = self.link {
            let first_contact = !std::mem::replace(&mut self.dialled, true);
            self.link = Link::Dialing(Dialing::new(&remote.info, timeout, first_contact));
            wakeup.wake();
        }
        None
    }

    /// Logs notifications that were sent and not delivered: the connection was lost, or the remote agent has too many
    /// unread.
    fn settle(&mut self, name: &str) {
        while let Some(outcome) = self.sent.front().and_then(|first| first.poll()) {
            self.sent.pop_front();
            if let Err(error) = outcome {
                tracing::warn!(agent = name, %error, "a notification was not delivered to the remote agent");
            }
        }
    }

    fn send(&mut self, name: &str, peer: &Peer, parts: &[Vec<u8>]) -> Status {
        self.settle(name);
        for part in parts {
            match peer.notify(part) {
                Ok(transfer) => self.sent.push_back(transfer),
                Err(error) => {
                    tracing::warn!(peer = peer.name(), %error, "cannot send a notification to the remote agent");
                    return Status::of(error);
                }
            }
        }
        Status::SUCCESS
    }

    fn fail_waiting(&mut self, name: &str, error: &ConnectError) {
        let waiting = std::mem::take(&mut self.waiting);
        self.waiting_bytes = 0;
        let count = waiting.len();
        let notifications = waiting.iter().filter(|waiting| matches!(waiting, Waiting::Notify(..))).count();
        for waiting in waiting {
            match waiting {
                Waiting::Post(transfer, post) => {
                    transfer.upgrade().into_iter().for_each(|transfer| transfer.fail_waiting(post));
                }
                Waiting::Notify(_, of) => {
                    let of = of.and_then(|(transfer, post)| Some((transfer.upgrade()?, post)));
                    of.into_iter()
                        .for_each(|(transfer, post)| transfer.notified(post, Status::REMOTE_DISCONNECT));
                }
            }
        }
        if !self.removed {
            tracing::warn!(agent = name, %error, waiting = count, "cannot connect to the remote agent: queued operations fail");
        } else if notifications > 0 {
            tracing::warn!(
                agent = name,
                notifications,
                "notifications were not sent: there was no connection yet when the remote agent was removed"
            );
        }
    }
}

fn bytes_of(parts: &[Vec<u8>]) -> usize {
    parts.iter().map(Vec::len).sum()
}
