//! A connection attempt in progress.
//!
//! Invariant: an abandoned attempt leaves no peer behind. Read next: `../../control/dialling.rs`.

use crate::api::peer::Peer;
use crate::api::running::Running;
use crate::api::wakeup::Wakeup;
use crate::control::AcceptQueue;
use crate::core::peer::PeerHandle;
use crate::error::{ConnectError, Result};
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A connection attempt in progress. Dropping it gives the attempt up, or closes a connected peer that was not taken.
#[must_use = "dropping it gives the attempt up"]
pub struct Connecting {
    running: Arc<Running>,
    accept_queue: Arc<AcceptQueue>,
    address: SocketAddr,
    /// Whether the result was taken, or there will be none.
    has_ended: AtomicBool,
}

impl fmt::Debug for Connecting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Connecting({})", self.address)
    }
}

impl Connecting {
    pub(super) fn new(
        running: Arc<Running>,
        accept_queue: Arc<AcceptQueue>,
        address: SocketAddr,
    ) -> Connecting {
        Connecting { running, accept_queue, address, has_ended: AtomicBool::new(false) }
    }

    /// Waits until the peer is connected.
    ///
    /// # Errors
    /// [`ConnectError::Stalled`] after `timeout`: the attempt continues. Otherwise as for
    /// [`Endpoint::connect`](crate::Endpoint::connect).
    pub fn wait(&self, timeout: Duration) -> Result<Peer, ConnectError> {
        self.running.context().origin.check()?;
        let peer = self.running.next_of(&self.accept_queue, timeout).map(|result| self.peer(result));
        peer.unwrap_or_else(|| {
            let what = format!("connecting to {}", self.address);
            Err(ConnectError::Stalled { what, peer: Some(self.address.to_string()), waited: timeout })
        })
    }

    /// Whether an endpoint has answered at the address. If not, the attempt ends.
    pub(in crate::api) fn has_answered(&self) -> bool {
        !self.running.with_control(|control| control.withdraw_dial(&self.accept_queue))
    }

    fn peer(&self, result: Result<PeerHandle>) -> Result<Peer, ConnectError> {
        self.has_ended.store(true, Ordering::Relaxed);
        Ok(Peer::new(self.running.clone(), result?))
    }

    /// Ends the attempt, so that no unknown peer is left. Returns the result if there was one at the last
    /// moment.
    pub(super) fn withdraw(&self) -> Option<Result<Peer, ConnectError>> {
        self.has_ended.store(true, Ordering::Relaxed);
        self.running.with_control(|control| control.withdraw(&self.accept_queue));
        self.accept_queue.take().map(|result| self.peer(result))
    }

    /// The result, if there is one.
    pub fn poll(&self) -> Option<Result<Peer, ConnectError>> {
        match self.running.context().origin.check() {
            Ok(()) => self.accept_queue.take().map(|result| self.peer(result)),
            Err(error) => Some(Err(error.into())),
        }
    }

    /// Makes `wakeup` readable once there is a result, or at once if there already is.
    pub fn arm(&self, wakeup: &Wakeup) {
        if self.running.context().origin.is_elsewhere() {
            return wakeup.wake();
        }
        self.accept_queue.wake_at_arrival(wakeup.handle());
    }
}

impl Drop for Connecting {
    fn drop(&mut self) {
        if !self.has_ended.load(Ordering::Relaxed) && !self.running.context().origin.is_elsewhere() {
            drop(self.withdraw());
        }
    }
}
