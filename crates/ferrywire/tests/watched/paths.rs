//! A path with data is checked even if all threads sleep; a lost path does not delay others.

use crate::{LIMIT, Watched, Watcher, eventually, towards_an_end_that_is_not_polled};
use ferrywire::Endpoint;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// Counts the checks of channels' paths.
#[derive(Debug, Default)]
struct Looks(AtomicU64);

impl Watcher for Looks {
    fn looking_at_path(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn the_path_of_a_write_without_a_waiter_is_checked() {
    let looks = Arc::<Looks>::default();
    // The far end makes no progress once it is connected, so nothing is answered.
    let (here, there, peer) = towards_an_end_that_is_not_polled(&looks);
    let (source, target) = (here.alloc_host(64).unwrap(), there.alloc_host(64).unwrap());
    // The thread sleeps, with nothing to check.
    thread::sleep(Duration::from_millis(100));
    let before = looks.0.load(Ordering::SeqCst);
    let write = peer.write(&source, 0, &target.descriptor(), 0, 64).unwrap();
    eventually("the path is looked at", || looks.0.load(Ordering::SeqCst) > before + 3);
    assert!(write.poll().is_none(), "{write:?}");
}

/// Breaks all connections of channels but the first, and lets none come back.
#[derive(Debug, Default)]
struct Cut(AtomicBool);

impl Watcher for Cut {
    fn is_cut(&self, channel: u64) -> bool {
        channel > 0 && self.0.load(Ordering::SeqCst)
    }
}

#[test]
fn channels_that_do_not_come_back_hold_up_no_other_of_their_thread() {
    const BYTES: u64 = 32 << 20;
    let cut = Arc::<Cut>::default();
    let builder = || Endpoint::builder().channels(3).threads(1);
    let there = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let here = builder().transport(Watched::new(&cut)).build().unwrap();
    let peer = here.connect(there.listen_addresses()[0], LIMIT).unwrap();
    let far = there.accept(LIMIT).unwrap();
    let (source, target) =
        (here.alloc_host(BYTES as usize).unwrap(), there.alloc_host(BYTES as usize).unwrap());
    let write = || peer.write(&source, 0, &target.descriptor(), 0, BYTES).unwrap().wait(LIMIT);
    assert_eq!(write(), Ok(BYTES));
    cut.0.store(true, Ordering::SeqCst);
    let alive = || peer.stats().channels.iter().filter(|channel| channel.alive).count();
    eventually("they are lost", || {
        assert_eq!(write(), Ok(BYTES));
        alive() == 1
    });
    assert_eq!(write(), Ok(BYTES));
    let read = peer.read(&source, 0, &target.descriptor(), 0, BYTES).unwrap();
    assert_eq!(read.wait(LIMIT), Ok(BYTES));
    drop(far);
}
