//! Connecting to a remote agent that has several addresses, without waiting.
//!
//! The addresses are tried one after the other, the next one already before the first has answered, and the first that
//! works wins. At first contact all are tried again until the time is up: a network may still be being set up. An agent
//! that was there before, or was waited for in vain, and does not answer has ended.

use std::time::{Duration, Instant};

use ferrywire::{ConnectTarget, Connecting, Endpoint, Error, Peer, Wakeup};

use crate::connection_info::ConnectionInfo;

/// The next address is tried after this, if none has answered.
const NEXT_AFTER: Duration = Duration::from_millis(250);
/// The first address is tried again this long after all have failed.
const AGAIN_AFTER: Duration = Duration::from_millis(100);

pub struct Dialing {
    attempts: Vec<Connecting>,
    /// Which address comes next, and when.
    next: usize,
    next_at: Instant,
    began: Instant,
    timeout: Duration,
    /// Nothing is known of the agent yet.
    first_contact: bool,
    /// Why the addresses of this round failed.
    errors: Vec<Error>,
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

    /// Moves it on; the outcome once there is one. What is to come makes `wakeup` readable; what is due later needs
    /// another call after [`Dialing::PAUSE`].
    pub fn advance(
        &mut self,
        endpoint: &Endpoint,
        to: &ConnectionInfo,
        wakeup: &Wakeup,
    ) -> Option<Result<Peer, Error>> {
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
            return Some(Err(self.most_telling().unwrap_or_else(|| Error::Stalled {
                what: format!("connecting to any of {:?}", to.addresses),
                peer: None,
                waited: self.timeout,
            })));
        }
        if self.next == to.addresses.len() {
            let refused = |error: &Error| !matches!(error, Error::Unreachable { .. } | Error::Stalled { .. });
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
            // A wakeup tells once.
            self.attempts.iter().for_each(|attempt| attempt.arm(wakeup));
        }
        None
    }

    /// How long nothing becomes due.
    pub const PAUSE: Duration = Duration::from_millis(50);

    /// Of the addresses' errors the one of an end that answered, if one has.
    fn most_telling(&mut self) -> Option<Error> {
        let tells = |error: &Error| match error {
            Error::Unreachable { .. } => 0,
            Error::Invalid { .. } => 1,
            Error::Stalled { .. } => 2,
            _ => 3,
        };
        std::mem::take(&mut self.errors).into_iter().rev().max_by_key(tells)
    }
}
