//! The handle that keeps a peer open.

use super::PeerState;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Keeps its peer open. When it is dropped, the control side closes the peer once all posted operations are
/// sent.
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
