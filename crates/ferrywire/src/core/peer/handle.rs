//! What keeps a peer open.

use super::PeerState;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// While this lives its peer stays open; dropped, the control side closes the peer once what was posted has been sent.
pub(crate) struct PeerHandle(pub Arc<PeerState>);

impl Drop for PeerHandle {
    fn drop(&mut self) {
        let context = self.0.context();
        if !context.origin.is_elsewhere() {
            self.0.life.abandoned.store(true, Ordering::SeqCst);
            context.wake_control();
        }
    }
}
