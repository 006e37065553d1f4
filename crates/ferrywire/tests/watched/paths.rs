//! A path with data on it is looked at, whoever sleeps.

use crate::{LIMIT, Watched, Watcher, eventually};
use ferrywire::Endpoint;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// Counts the looks at channels' paths.
#[derive(Debug, Default)]
struct Looks(AtomicU64);

impl Watcher for Looks {
    fn looking_at_path(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn the_path_of_a_write_that_nobody_waits_for_is_looked_at() {
    let looks = Arc::<Looks>::default();
    // Nobody turns the far end once it is connected, so that nothing is answered.
    let builder = || Endpoint::builder().channels(1).heartbeat_limit(LIMIT * 10);
    let there = builder().listen("127.0.0.1:0".parse().unwrap()).threads(0).build().unwrap();
    let here = builder().threads(1).transport(Watched::new(&looks)).build().unwrap();
    let connecting = here.connecting(there.listen_addresses()[0]).unwrap();
    let mut connected = None;
    eventually("they are connected", || {
        there.progress();
        connected = connected.take().or_else(|| connecting.poll());
        connected.is_some()
    });
    let peer = connected.unwrap().unwrap();
    let (source, target) = (here.register_zeroed(64).unwrap(), there.register_zeroed(64).unwrap());
    // The thread sleeps, with nothing to look at.
    thread::sleep(Duration::from_millis(100));
    let before = looks.0.load(Ordering::SeqCst);
    let write = peer.write(&source, 0, &target.descriptor(), 0, 64).unwrap();
    eventually("the path is looked at", || looks.0.load(Ordering::SeqCst) > before + 3);
    assert!(write.poll().is_none(), "{write:?}");
}
