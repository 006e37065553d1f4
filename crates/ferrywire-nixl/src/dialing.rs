//! Connects to a remote agent that has several addresses, without blocking.
//!
//! The addresses are tried one after the other; the next is tried before the first has answered, and the first
//! connection wins. Addresses of this host are tried last unless the agent has no others, and their errors do not count:
//! they may be those of another agent. At first contact each address that cannot be reached is tried again until the timeout,
//! because the network may still be being set up. An agent that was connected before, or that was waited for without
//! success, counts as ended if it does not answer.
//! Read next: `remote.rs`, which starts it.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use ferrywire::{ConnectError, ConnectTarget, Connecting, Endpoint, Peer, Wakeup};
use ferrywire_net::beyond_this_host;
use ferrywire_net::tcp::TcpTransport;

use crate::connection_info::ConnectionInfo;

/// Pause before the next address is tried while none has answered.
const NEXT_AFTER: Duration = Duration::from_millis(250);
/// Pause before an address is tried again.
const AGAIN_AFTER: Duration = Duration::from_millis(100);

pub struct Dialing {
    /// The addresses to try: in the order of the agent's list, those of this host last.
    addresses: Vec<SocketAddr>,
    /// Number of the first addresses, whose errors count.
    counted: usize,
    /// The addresses tried so far, in the same order.
    tried: Vec<Tried>,
    /// When the next address is tried.
    next_at: Instant,
    began: Instant,
    timeout: Duration,
    /// Whether the agent has never been connected or waited for.
    first_contact: bool,
}

/// The state of one address.
enum Tried {
    Pending(Connecting),
    /// The error of the last attempt, and when it failed.
    Failed(ConnectError, Instant),
}

impl Dialing {
    pub fn new(to: &ConnectionInfo, timeout: Duration, first_contact: bool) -> Dialing {
        let now = Instant::now();
        let nics = TcpTransport::default().addresses().unwrap_or_default();
        let mut addresses = beyond_this_host(&nics, &to.addresses);
        let counted = addresses.len();
        let others = to.addresses.iter().filter(|address| !addresses.contains(address)).copied();
        let others: Vec<SocketAddr> = others.collect();
        addresses.extend(others);
        Dialing { addresses, counted, tried: Vec::new(), next_at: now, began: now, timeout, first_contact }
    }

    /// Makes progress on connecting; returns the outcome once there is one. Events make `wakeup` readable; later
    /// attempts need another call after [`Dialing::PAUSE`].
    pub fn advance(
        &mut self,
        endpoint: &Endpoint,
        to: &ConnectionInfo,
        wakeup: &Wakeup,
    ) -> Option<Result<Peer, ConnectError>> {
        let now = Instant::now();
        for tried in &mut self.tried {
            let Tried::Pending(attempt) = tried else { continue };
            match attempt.poll() {
                None => {}
                Some(Ok(peer)) => return Some(Ok(peer)),
                Some(Err(error)) => *tried = Tried::Failed(error, now),
            }
        }
        if now.duration_since(self.began) >= self.timeout {
            return Some(Err(self.error_of_all().unwrap_or_else(|| ConnectError::Stalled {
                what: format!("connecting to any of {:?}", &self.addresses[..self.counted]),
                peer: None,
                waited: self.timeout,
            })));
        }
        let count = self.addresses.len();
        let has_pending = self.tried.iter().any(|tried| matches!(tried, Tried::Pending(_)));
        if self.tried.len() == count && !has_pending && (!self.first_contact || self.is_refused_by_all()) {
            return self.error_of_all().map(Err);
        }
        if self.tried.len() < count && (now >= self.next_at || !has_pending) {
            self.tried.push(attempt(endpoint, to, self.addresses[self.tried.len()], now));
            self.next_at = now + NEXT_AFTER.min(self.timeout / count as u32);
        }
        let is_due = |tried: &Tried| matches!(tried, Tried::Failed(error, at) if may_pass(error) && now >= *at + AGAIN_AFTER);
        for (address, tried) in self.addresses.iter().zip(&mut self.tried).filter(|_| self.first_contact) {
            if is_due(tried) {
                *tried = attempt(endpoint, to, *address, now);
            }
        }
        // A wakeup signals only once, so it is armed for each attempt again.
        for tried in &self.tried {
            if let Tried::Pending(attempt) = tried {
                attempt.arm(wakeup);
            }
        }
        None
    }

    /// Whether each address answered, and refused the connection.
    fn is_refused_by_all(&self) -> bool {
        self.tried.iter().take(self.counted).all(|tried| match tried {
            Tried::Pending(_) => false,
            Tried::Failed(error, _) => !may_pass(error),
        })
    }

    /// Longest time between calls of [`Dialing::advance`].
    pub const PAUSE: Duration = Duration::from_millis(50);

    /// The most informative error of the addresses tried.
    fn error_of_all(&mut self) -> Option<ConnectError> {
        let counted = std::mem::take(&mut self.tried).into_iter().take(self.counted);
        let errors = counted.filter_map(|tried| match tried {
            Tried::Pending(_) => None,
            Tried::Failed(error, _) => Some(error),
        });
        ConnectError::most_informative(errors)
    }
}

/// Whether another attempt may succeed: nothing at the address has refused the connection.
fn may_pass(error: &ConnectError) -> bool {
    matches!(error, ConnectError::Unreachable { .. } | ConnectError::Stalled { .. })
}

/// Begins to connect to an address of the agent.
fn attempt(endpoint: &Endpoint, to: &ConnectionInfo, address: SocketAddr, now: Instant) -> Tried {
    let mut target = ConnectTarget::new(address).identity(to.identity);
    if !to.secret.is_empty() {
        target = target.secret(to.secret.clone());
    }
    endpoint.start_connect_to(target).map_or_else(|error| Tried::Failed(error, now), Tried::Pending)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    /// Dials until there is an outcome.
    fn outcome(
        dialing: &mut Dialing,
        endpoint: &Endpoint,
        to: &ConnectionInfo,
    ) -> Result<Peer, ConnectError> {
        let wakeup = Wakeup::new().unwrap();
        loop {
            if let Some(outcome) = dialing.advance(endpoint, to, &wakeup) {
                return outcome;
            }
            wakeup.wait(Dialing::PAUSE).unwrap();
            wakeup.clear();
        }
    }

    /// Closes the first connection, and forwards later ones to `to`.
    fn forward(listener: TcpListener, to: SocketAddr) {
        drop(listener.accept());
        for near in listener.incoming().flatten() {
            let far = TcpStream::connect(to).unwrap();
            for (mut from, mut to) in [(near.try_clone().unwrap(), far.try_clone().unwrap()), (far, near)] {
                thread::spawn(move || io::copy(&mut from, &mut to));
            }
        }
    }

    /// Regression: while an address did not answer at all, no other one was tried again.
    #[test]
    fn an_address_that_fails_is_tried_again_while_another_one_does_not_answer() {
        let local = "127.0.0.1:0";
        let (silent, late) = (TcpListener::bind(local).unwrap(), TcpListener::bind(local).unwrap());
        let addresses = vec![silent.local_addr().unwrap(), late.local_addr().unwrap()];
        let builder = || Endpoint::builder().channels(1).threads(1).secret("of both ends");
        let far = builder().listen(local.parse().unwrap()).build().unwrap();
        let near = builder().build().unwrap();
        let reached = far.listen_addresses()[0];
        thread::spawn(move || forward(late, reached));
        let to = ConnectionInfo { identity: far.identity(), secret: Vec::new(), addresses };
        // Less than an attempt may take.
        let mut dialing = Dialing::new(&to, Duration::from_secs(4), true);
        outcome(&mut dialing, &near, &to).unwrap().close(Duration::from_secs(60)).unwrap();
    }

    /// Regression: with one port on all hosts the loopback address of a remote agent led to the agent of this host, which
    /// refused the connection, and that was reported instead of the silence of the other host.
    #[test]
    fn an_agent_of_another_host_is_sought_on_this_host_last_and_without_its_errors() {
        let own = SocketAddr::from(([127, 0, 0, 1], 1));
        // No host has this address, which is for documentation.
        let far = SocketAddr::from(([203, 0, 113, 1], 1));
        let to = ConnectionInfo {
            identity: ferrywire::Identity([7; 16]),
            secret: Vec::new(),
            addresses: vec![own, far],
        };
        let mut dialing = Dialing::new(&to, Duration::from_secs(1), true);
        assert_eq!(dialing.addresses, [far, own]);
        let failed = |error| Tried::Failed(error, Instant::now());
        let refused = || {
            let (reason, why) = (ferrywire::RefusalReason::Secret, String::new());
            failed(ConnectError::Refused { address: "refused".into(), reason, why })
        };
        let unreachable = |address: SocketAddr| {
            let (address, cause) = (address.to_string(), ferrywire::UnreachableCause::NoAnswer);
            failed(ConnectError::Unreachable { address, cause, why: "unreachable".into() })
        };
        dialing.tried = vec![refused(), unreachable(own)];
        assert!(dialing.is_refused_by_all());
        dialing.tried = vec![unreachable(far), refused()];
        assert!(!dialing.is_refused_by_all());
        let error = dialing.error_of_all().unwrap();
        assert!(error.to_string().contains(&far.to_string()), "{error}");
    }
}
