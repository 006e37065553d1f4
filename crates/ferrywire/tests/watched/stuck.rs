//! A thread that does not come back from the kernel, with memory in its hands.

use crate::{LIMIT, Watched, Watcher, eventually};
use ferrywire::{Endpoint, ErrorKind, RegisterError, TransferError, limits};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Size of the region, and what is written to it in one piece.
const BYTES: usize = 1 << 20;

/// Lets no large piece pass while it is shut.
#[derive(Debug, Default)]
struct Gate {
    shut: Mutex<bool>,
    opened: Condvar,
    waiting: AtomicU32,
    used: AtomicBool,
}

impl Gate {
    fn set_shut(&self, shut: bool) {
        *self.shut.lock().unwrap() = shut;
        self.opened.notify_all();
    }
}

impl Watcher for Gate {
    fn receiving(&self, bytes: usize) {
        let shut = self.shut.lock().unwrap();
        if bytes < limits::SCRATCH_BYTES / 2 || self.used.load(Ordering::SeqCst) {
            return;
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        drop(self.opened.wait_while(shut, |shut| *shut).unwrap());
        self.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

#[test]
fn memory_used_by_a_stuck_thread_is_not_deregistered() {
    let gate = Arc::<Gate>::default();
    let listening = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).threads(1);
    let here = listening.transport(Watched::new(&gate)).build().unwrap();
    let there = Endpoint::builder().threads(1).channels(1).build().unwrap();
    let peer = there.connect(here.listen_addresses()[0], LIMIT).unwrap();
    let (region, source) = (here.alloc_host(BYTES).unwrap(), there.alloc_host(BYTES).unwrap());

    gate.set_shut(true);
    let write = peer.write(&source, 0, &region.descriptor(), 0, BYTES as u64).unwrap();
    eventually("a thread is stuck with the region", || gate.waiting.load(Ordering::SeqCst) == 1);
    let error = region.clone().deregister().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Local);
    let RegisterError::ResourceBusy { what, by, waited } = &error else { panic!("{error:?}") };
    assert_eq!((&what[..], &by[..]), ("a region of 1048576 bytes", "progress thread 0"));
    assert!(*waited >= limits::ABANDON_TIMEOUT, "{error}");

    gate.used.store(true, Ordering::SeqCst);
    gate.set_shut(false);
    region.deregister().expect("the thread is back");
    let ended = write.wait(LIMIT);
    assert!(matches!(ended, Ok(_) | Err(TransferError::AccessRefused { .. })), "{ended:?}");
}

/// Regression: an endpoint whose close had given a thread up listened until the thread came back.
#[test]
fn a_close_that_gives_a_stuck_thread_up_frees_the_port() {
    let gate = Arc::<Gate>::default();
    let listening = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).threads(1);
    let here = listening.transport(Watched::new(&gate)).build().unwrap();
    let there = Endpoint::builder().threads(1).channels(1).build().unwrap();
    let address = here.listen_addresses()[0];
    let peer = there.connect(address, LIMIT).unwrap();
    let (region, source) = (here.alloc_host(BYTES).unwrap(), there.alloc_host(BYTES).unwrap());

    gate.set_shut(true);
    let write = peer.write(&source, 0, &region.descriptor(), 0, BYTES as u64).unwrap();
    eventually("a thread is stuck with the region", || gate.waiting.load(Ordering::SeqCst) == 1);
    let closed = here.close(Duration::from_millis(50));
    assert!(closed.is_err(), "the write has not finished");
    let next = Endpoint::builder().listen(address).threads(1).build().expect("the port is free");
    assert_eq!(gate.waiting.load(Ordering::SeqCst), 1, "the thread is still stuck");
    assert_eq!(next.close(LIMIT), Ok(()));

    gate.used.store(true, Ordering::SeqCst);
    gate.set_shut(false);
    write.wait(LIMIT).expect_err("its peer has closed");
}
