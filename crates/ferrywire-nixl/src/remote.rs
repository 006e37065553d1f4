//! One remote agent that was loaded here, and our connection to it.
//!
//! ```text
//!   idle ── first transfer or notification ──> dialing ──> up ── lost: the next one ──> dialing
//!                                                 └── failed: what waits fails ──> idle
//! ```
//!
//! Invariant: what waits for the connection is started in the order in which it was posted, before anything that is
//! posted later. Locks are taken in the order remote, transfer.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use ferrywire::{Endpoint, Error, Identity, Peer, Wakeup};
use ferrywire_net::tcp::TcpTransport;
use ferrywire_net::{Nic, Transport};

use crate::connection_info::ConnectionInfo;
use crate::dialing::Dialing;
use crate::log;
use crate::notification;
use crate::status::Status;
use crate::transfer::Transfer;

/// Notifications that wait for a connection, in bytes.
const WAITING_BYTES_MAX: usize = 64 << 20;

pub struct Remote {
    pub name: String,
    info: ConnectionInfo,
    state: Mutex<State>,
    failures: Mutex<Failures>,
}

/// What was told of failed transfers.
#[derive(Default)]
struct Failures {
    told_at: Option<Instant>,
    untold: u64,
}

/// Failed transfers are told of this often at most: with a peer that is lost, thousands fail.
const FAILURES_APART: Duration = Duration::from_secs(1);

struct State {
    link: Link,
    waiting: VecDeque<Waiting>,
    waiting_bytes: usize,
    /// Notifications that were sent, until it is known how that ended.
    sent: VecDeque<ferrywire::Transfer>,
    /// Numbers of long notifications.
    notified: u64,
    /// It was taken out of the agent.
    removed: bool,
    /// It was tried to connect.
    dialled: bool,
    /// There was a connection, which was told of in the log.
    announced: bool,
}

enum Link {
    Idle,
    Dialing(Dialing),
    Up(Peer),
}

enum Waiting {
    Post(Weak<Transfer>, u64),
    Notify(Vec<Vec<u8>>),
}

/// What there is to go on with.
pub enum Connection {
    Up(Peer),
    /// It is started when the connection is there.
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

    /// Tells of a transfer that failed, and what the caller of NIXL gets.
    pub fn failed(&self, what: &str, error: &Error) -> Status {
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

    /// The connection, or a place in the queue of those who wait for it.
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

    /// Begins to connect, if it is not connected.
    pub fn connect(&self, timeout: Duration, wakeup: &Wakeup) {
        let mut state = self.lock();
        if !state.removed {
            state.peer(self, timeout, wakeup);
        }
    }

    /// Sends a notification behind everything that was posted before it.
    pub fn notify(&self, sender: &[u8], message: &[u8], timeout: Duration, wakeup: &Wakeup) -> Status {
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
            Some(peer) => state.send(&peer, &parts),
            None if state.waiting_bytes + bytes_of(&parts) > WAITING_BYTES_MAX => {
                tracing::warn!(agent = self.name, "too many notifications wait for a connection");
                Status::BACKEND
            }
            None => {
                state.waiting_bytes += bytes_of(&parts);
                state.waiting.push_back(Waiting::Notify(parts));
                Status::SUCCESS
            }
        }
    }

    /// Moves a connection that is coming about on; true while it is.
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
                // Under the lock, so that nothing overtakes.
                for waiting in std::mem::take(&mut state.waiting) {
                    match waiting {
                        Waiting::Post(transfer, post) => {
                            transfer.upgrade().into_iter().for_each(|transfer| transfer.start(&peer, post));
                        }
                        Waiting::Notify(parts) => drop(state.send(&peer, &parts)),
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

    /// Says which NICs and addresses carry the bytes, and warns where NICs that lead there stay idle.
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

    /// It is no longer an agent that is known here. What is under way to it is not waited for.
    pub fn remove(&self) {
        let mut state = self.lock();
        state.removed = true;
        state.link = Link::Idle;
        state.sent.clear();
        state.fail_waiting(&self.name, &Error::Closed);
    }
}

impl State {
    /// The connection; without one, one begins to come about.
    fn peer(&mut self, remote: &Remote, timeout: Duration, wakeup: &Wakeup) -> Option<Peer> {
        if let Link::Up(peer) = &self.link {
            match peer.error() {
                None => return Some(peer.clone()),
                Some(error) => {
                    tracing::warn!(agent = remote.name, %error, "the connection is lost, and made anew");
                    self.link = Link::Idle;
                }
            }
        }
        if let Link::Idle = self.link {
            self.link = Link::Dialing(Dialing::new(timeout, !std::mem::replace(&mut self.dialled, true)));
            wakeup.wake();
        }
        None
    }

    /// Sends a notification, and tells of earlier ones that the remote agent has refused: it holds so many that nobody asks for.
    fn send(&mut self, peer: &Peer, parts: &[Vec<u8>]) -> Status {
        while let Some(outcome) = self.sent.front().and_then(|first| first.poll()) {
            self.sent.pop_front();
            if let Err(error) = outcome {
                tracing::warn!(peer = peer.name(), %error, "a notification was lost");
            }
        }
        for part in parts {
            match peer.notify(part) {
                Ok(transfer) => self.sent.push_back(transfer),
                Err(error) => {
                    tracing::warn!(peer = peer.name(), %error, "a notification could not be sent");
                    return Status::of(&error);
                }
            }
        }
        Status::SUCCESS
    }

    fn fail_waiting(&mut self, name: &str, error: &Error) {
        let waiting = std::mem::take(&mut self.waiting);
        self.waiting_bytes = 0;
        if !self.removed {
            tracing::warn!(agent = name, %error, waiting = waiting.len(), "cannot connect; what waits for it fails");
        }
        for waiting in waiting {
            if let Waiting::Post(transfer, post) = waiting {
                transfer.upgrade().into_iter().for_each(|transfer| transfer.fail_waiting(post));
            }
        }
    }
}

fn bytes_of(parts: &[Vec<u8>]) -> usize {
    parts.iter().map(Vec::len).sum()
}
