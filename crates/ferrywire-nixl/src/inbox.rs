//! Peers that have connected to this agent, and their notifications.
//!
//! The senders need not have been loaded by this agent. The endpoint's threads place their bytes; the inbox keeps the
//! connections open.
//! Read next: `notification.rs`.

use std::collections::VecDeque;

use ferrywire::Peer;

use crate::notification::{Assembly, Delivered};

struct Sender {
    peer: Peer,
    assembly: Assembly,
}

#[derive(Default)]
pub struct Inbox {
    senders: Vec<Sender>,
    arrived: VecDeque<Delivered>,
}

/// Most notifications taken from one peer before the next peer's turn.
const TAKEN_AT_ONCE: usize = 1024;

impl Inbox {
    /// Adds a peer that has connected to this agent.
    pub fn add(&mut self, peer: Peer) {
        self.senders.push(Sender { peer, assembly: Assembly::default() });
    }

    /// Adds a notification of this agent to itself.
    pub fn put(&mut self, notification: Delivered) {
        self.arrived.push_back(notification);
    }

    pub fn take(&mut self) -> Option<Delivered> {
        self.arrived.pop_front()
    }

    /// Puts a notification that could not be delivered back to the front.
    pub fn put_back(&mut self, notification: Delivered) {
        self.arrived.push_front(notification);
    }

    /// Collects notifications that have arrived, and drops peers that are disconnected and have none left.
    pub fn collect(&mut self) {
        let arrived = &mut self.arrived;
        self.senders.retain_mut(|sender| sender.collect(arrived));
    }

    /// Closes the connections of all peers.
    pub fn clear(&mut self) {
        self.senders.clear();
    }
}

impl Sender {
    /// Collects a peer's notifications; returns false if the peer can have no more.
    fn collect(&mut self, arrived: &mut VecDeque<Delivered>) -> bool {
        for _ in 0..TAKEN_AT_ONCE {
            let message = match self.peer.poll_notification() {
                Ok(Some(message)) => message,
                Ok(None) => return true,
                Err(error) => {
                    tracing::info!(peer = self.peer.name(), %error, "connection from a remote agent ended");
                    return false;
                }
            };
            match self.assembly.take(message) {
                Ok(None) => {}
                Ok(Some(notification)) => arrived.push_back(notification),
                Err(why) => {
                    tracing::warn!(
                        peer = self.peer.name(),
                        "malformed notification: {why}; connection closed"
                    );
                    return false;
                }
            }
        }
        true
    }
}
