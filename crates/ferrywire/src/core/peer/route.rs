//! What is known of the way between the two ends: how far it is, and which ends copy payload to or from GPUs.
//!
//! Invariant: a fact that was noted stays.
//! Read next: `../channel/sender.rs`, which divides operations among channels by it.

use std::net::IpAddr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use ferrywire_net::Conn;
use ferrywire_proto::limits;

/// The way between two ends.
pub(crate) struct Route {
    /// The addresses of this end and of the peer that the first channel connects.
    path: OnceLock<(IpAddr, IpAddr)>,
    is_far: AtomicBool,
    writes_to_gpus: AtomicBool,
    uses_gpus: AtomicBool,
}

impl Route {
    /// A route on which no channel is open yet.
    pub fn new(is_far: bool) -> Route {
        Route {
            path: OnceLock::new(),
            is_far: AtomicBool::new(is_far),
            writes_to_gpus: AtomicBool::new(false),
            uses_gpus: AtomicBool::new(false),
        }
    }

    /// Notes the path of a channel.
    pub fn note_path(&self, conn: &dyn Conn) {
        self.note((conn.local().ip(), conn.remote().ip()), conn.is_long());
    }

    fn note(&self, path: (IpAddr, IpAddr), is_long: bool) {
        if is_long || *self.path.get_or_init(|| path) != path {
            set(&self.is_far);
        }
    }

    /// Notes that a write to GPU memory of the peer was posted.
    pub fn note_write_to_gpu(&self) {
        set(&self.writes_to_gpus);
    }

    /// Notes that an operation with GPU memory of this end has begun.
    pub fn note_gpu(&self) {
        set(&self.uses_gpus);
    }

    /// Whether the channels lead to another host, or have several paths, a long one or lanes. Several channels may then
    /// carry a transfer sooner than one, since the paths limit them and not the threads.
    pub fn is_far(&self) -> bool {
        self.is_far.load(Ordering::Relaxed)
    }

    /// Whether the peer stages some of the payload that is written to it.
    pub fn writes_to_gpus(&self) -> bool {
        self.writes_to_gpus.load(Ordering::Relaxed)
    }

    /// Whether operations posted at this end copy payload to or from GPUs.
    pub fn is_staged(&self) -> bool {
        self.writes_to_gpus() || self.uses_gpus.load(Ordering::Relaxed)
    }

    /// Largest bulk operation in bytes that channels take in order, as far as the route decides it; 0 for none. Staged
    /// payload is never cut shorter.
    pub fn ordered_bytes(&self) -> u64 {
        match (self.is_far(), self.is_staged()) {
            (true, _) => 0,
            (false, true) => limits::STAGING_CHUNK_BYTES_MIN as u64,
            (false, false) => limits::ORDERED_BYTES_MAX,
        }
    }
}

#[cfg(test)]
impl Route {
    /// Makes the route one over several paths.
    pub fn make_far(&self) {
        set(&self.is_far);
    }
}

/// Sets a flag that many threads read. A store of the same value would take it from their caches.
fn set(flag: &AtomicBool) {
    if !flag.load(Ordering::Relaxed) {
        flag.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A transfer of one chunk would use one of the NICs.
    #[test]
    fn a_transfer_is_cut_where_there_are_several_paths_or_a_long_one() {
        let ordered_bytes = |paths: &[(u8, bool)]| {
            let route = Route::new(false);
            for (host, is_long) in paths {
                route.note(([127, 0, 0, 1].into(), [127, 0, 0, *host].into()), *is_long);
            }
            route.ordered_bytes()
        };
        assert_eq!(ordered_bytes(&[(1, false), (1, false)]), limits::ORDERED_BYTES_MAX);
        assert_eq!(ordered_bytes(&[(1, false), (2, false)]), 0);
        assert_eq!(ordered_bytes(&[(1, false), (1, true)]), 0);
        assert_eq!(Route::new(true).ordered_bytes(), 0);
    }
}
