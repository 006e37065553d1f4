//! What remote agents send to this one: the peers that connected to it, and their notifications.
//!
//! Senders need not have been loaded here. Their bytes are placed by the endpoint's threads; what is held here keeps the
//! connections open.

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

/// Notifications of one peer that are taken before the next peer is asked.
const TAKEN_AT_ONCE: usize = 1024;

impl Inbox {
    /// A peer that has connected to us.
    pub fn add(&mut self, peer: Peer) {
        self.senders.push(Sender { peer, assembly: Assembly::default() });
    }

    /// One of this agent to itself.
    pub fn put(&mut self, notification: Delivered) {
        self.arrived.push_back(notification);
    }

    pub fn take(&mut self) -> Option<Delivered> {
        self.arrived.pop_front()
    }

    /// Back to the front: it could not be delivered.
    pub fn put_back(&mut self, notification: Delivered) {
        self.arrived.push_front(notification);
    }

    /// Collects what has arrived, and lets go of peers that are gone and have nothing left to give.
    pub fn collect(&mut self) {
        let arrived = &mut self.arrived;
        self.senders.retain_mut(|sender| sender.collect(arrived));
    }

    /// Closes every connection to us.
    pub fn clear(&mut self) {
        self.senders.clear();
    }
}

impl Sender {
    /// False when nothing more comes of it.
    fn collect(&mut self, arrived: &mut VecDeque<Delivered>) -> bool {
        for _ in 0..TAKEN_AT_ONCE {
            let message = match self.peer.poll_notification() {
                Ok(Some(message)) => message,
                Ok(None) => return true,
                Err(error) => {
                    tracing::info!(peer = self.peer.name(), %error, "a connection from a remote agent ended");
                    return false;
                }
            };
            match self.assembly.take(message) {
                Ok(None) => {}
                Ok(Some(notification)) => arrived.push_back(notification),
                Err(why) => {
                    tracing::warn!(
                        peer = self.peer.name(),
                        "a notification cannot be read: {why}; the connection is closed"
                    );
                    return false;
                }
            }
        }
        true
    }
}
