//! Connects to a remote agent that has several addresses, without blocking.
//!
//! The addresses are tried one after the other; the next is tried before the first has answered, and the first
//! connection wins. At first contact all addresses are tried again until the timeout, because the network may still be
//! being set up. An agent that was connected before, or that was waited for without success, counts as ended if it does
//! not answer.
//! Read next: `remote.rs`, which starts it.

use std::time::{Duration, Instant};

use ferrywire::{ConnectError, ConnectTarget, Connecting, Endpoint, Peer, Wakeup};

use crate::connection_info::ConnectionInfo;

/// Pause before the next address is tried while none has answered.
const NEXT_AFTER: Duration = Duration::from_millis(250);
/// Pause before the first address is tried again after all have failed.
const AGAIN_AFTER: Duration = Duration::from_millis(100);

pub struct Dialing {
    attempts: Vec<Connecting>,
    /// Index of the next address to try; the next field says when.
    next: usize,
    next_at: Instant,
    began: Instant,
    timeout: Duration,
    /// Whether the agent has never been connected or waited for.
    first_contact: bool,
    /// The errors of the addresses in this round of tries.
    errors: Vec<ConnectError>,
}

impl Dialing {
    pub fn new(timeout: Duration, first_contact: bool) -> Dialing {
        let now = Instant::now();
        Dialing {
            attempts: Vec::new(),
            next: 0,
            next_at: now,
            began: now,
            timeout,
            first_contact,
            errors: Vec::new(),
        }
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
        let mut won = None;
        let errors = &mut self.errors;
        self.attempts.retain(|attempt| match attempt.poll() {
            None => true,
            Some(Ok(peer)) => {
                won = Some(peer);
                false
            }
            Some(Err(error)) => {
                errors.push(error);
                false
            }
        });
        if let Some(peer) = won {
            return Some(Ok(peer));
        }
        if now.duration_since(self.began) >= self.timeout {
            return Some(Err(self.most_telling().unwrap_or_else(|| ConnectError::Stalled {
                what: format!("connecting to any of {:?}", to.addresses),
                peer: None,
                waited: self.timeout,
            })));
        }
        if self.next == to.addresses.len() {
            let refused = |error: &ConnectError| {
                !matches!(error, ConnectError::Unreachable { .. } | ConnectError::Stalled { .. })
            };
            if !self.attempts.is_empty() {
                return None;
            }
            if !self.first_contact || self.errors.iter().all(refused) {
                return self.most_telling().map(Err);
            }
            self.errors.clear();
            (self.next, self.next_at) = (0, now + AGAIN_AFTER);
        }
        if now >= self.next_at || (self.attempts.is_empty() && self.next > 0) {
            let mut target = ConnectTarget::new(to.addresses[self.next]).identity(to.identity);
            if !to.secret.is_empty() {
                target = target.secret(to.secret.clone());
            }
            match endpoint.start_connect_to(target) {
                Ok(attempt) => {
                    attempt.arm(wakeup);
                    self.attempts.push(attempt);
                }
                Err(error) => self.errors.push(error),
            }
            (self.next, self.next_at) = (self.next + 1, now + NEXT_AFTER);
        } else {
            // A wakeup signals only once, so it is armed for each attempt again.
            self.attempts.iter().for_each(|attempt| attempt.arm(wakeup));
        }
        None
    }

    /// Longest time between calls of [`Dialing::advance`].
    pub const PAUSE: Duration = Duration::from_millis(50);

    /// The error of an address that answered, or else of any other.
    fn most_telling(&mut self) -> Option<ConnectError> {
        let tells = |error: &ConnectError| match error {
            ConnectError::NoUsableNic { .. } => 0,
            ConnectError::Unreachable { .. } => 1,
            ConnectError::Invalid { .. } => 2,
            ConnectError::Stalled { .. } => 3,
            _ => 4,
        };
        std::mem::take(&mut self.errors).into_iter().rev().max_by_key(tells)
    }
}
