//! The kernel's reports about zero-copy sends are read, independently of the peer's acknowledgements.

use crate::{Watcher, eventually, towards_an_end_that_is_not_polled};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const BYTES: usize = 1 << 20;

/// Has large pieces sent without copies, and counts the kernel's notices of those.
#[derive(Debug, Default)]
struct Notices(AtomicU64);

impl Watcher for Notices {
    fn sends_without_copies(&self) -> bool {
        true
    }

    fn noticed(&self, sends: u64) {
        self.0.fetch_add(sends, Ordering::SeqCst);
    }
}

/// Unread notices keep a socket ready for ever, so a thread that waits for it spins.
#[test]
fn notices_are_read_while_the_peer_acknowledges_nothing() {
    let notices = Arc::<Notices>::default();
    // The far end makes no progress once it is connected: only its kernel receives, as for a stopped process.
    let (here, there, peer) = towards_an_end_that_is_not_polled(&notices);
    let (source, target) = (here.alloc_host(BYTES).unwrap(), there.alloc_host(BYTES).unwrap());
    let write = peer.write(&source, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
    eventually("a notice is read", || notices.0.load(Ordering::SeqCst) > 0);
    assert!(write.poll().is_none(), "{write:?}");
    eventually("the write is over once the far end is turned", || {
        there.progress();
        write.poll().is_some()
    });
}
