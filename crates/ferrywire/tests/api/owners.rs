//! Memory with an owner: the owner is dropped when nothing can touch the memory any more, on a thread that may block.

use crate::{LIMIT, listening, pair};
use ferrywire::{Endpoint, Region, RegisterError, TransferError};
use ferrywire_memory::sim::SimGpu;
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

/// Tells where it is dropped, and what it had.
struct Owner {
    bytes: Vec<u8>,
    gone: Sender<Gone>,
}

struct Gone {
    bytes: Vec<u8>,
    thread: (ThreadId, Option<String>),
}

impl Drop for Owner {
    fn drop(&mut self) {
        // Makes a late write to the memory visible.
        self.bytes.fill(0xEE);
        let here = thread::current();
        let thread = (here.id(), here.name().map(str::to_owned));
        let _ = self.gone.send(Gone { bytes: std::mem::take(&mut self.bytes), thread });
    }
}

fn owned(endpoint: &Endpoint, bytes: Vec<u8>) -> (Region, Receiver<Gone>) {
    let (gone, reported) = mpsc::channel();
    let mut owner = Box::new(Owner { bytes, gone });
    let (base, len) = (owner.bytes.as_mut_ptr(), owner.bytes.len());
    // SAFETY: the owner keeps the bytes, whose place on the heap does not change.
    let region = unsafe { endpoint.register_with(base, len, owner) }.unwrap();
    (region, reported)
}

#[track_caller]
fn kept(reported: &Receiver<Gone>) {
    assert!(matches!(reported.try_recv(), Err(TryRecvError::Empty)), "the owner is gone too early");
}

#[track_caller]
fn gone(reported: &Receiver<Gone>) -> Gone {
    reported.recv_timeout(LIMIT).expect("the owner is not dropped")
}

#[test]
fn dropping_the_last_handle_does_not_wait() {
    let pair = pair();
    let (region, reported) = owned(&pair.ends[1], vec![0; 300_000]);
    let descriptor = region.descriptor();
    let receive = pair.far.recv(1, &region, 0, 300_000).unwrap();
    let clone = region.clone();
    drop((region, clone));
    kept(&reported);
    // The region is gone for the peer, and the receive is not.
    let source = pair.ends[0].register(vec![7u8; 300_000]).unwrap();
    let refused = pair.near.write(&source, 0, &descriptor, 0, 10).unwrap().wait(LIMIT);
    assert!(matches!(refused, Err(TransferError::AccessRefused { .. })), "{refused:?}");
    kept(&reported);
    pair.near.send(1, &source, 0, 300_000).unwrap().wait(LIMIT).unwrap();
    assert_eq!(receive.wait(LIMIT), Ok(300_000));
    // A handle of an operation that has ended keeps nothing.
    let gone = gone(&reported);
    assert_eq!(gone.thread.1.as_deref(), Some("ferrywire-own"));
    assert_eq!(gone.bytes, vec![0xEE; 300_000]);
    drop(receive);
}

#[test]
fn a_cancelled_receive_and_a_lost_peer_let_go() {
    let pair = pair();
    let (first, first_told) = owned(&pair.ends[1], vec![0; 100]);
    let (second, second_told) = owned(&pair.ends[1], vec![0; 100]);
    let cancelled = pair.far.recv(1, &first, 0, 100).unwrap();
    let _never = pair.far.recv(2, &second, 0, 100).unwrap();
    drop((first, second));
    cancelled.cancel();
    gone(&first_told);
    kept(&second_told);
    pair.near.close(LIMIT).unwrap();
    gone(&second_told);
}

#[test]
fn nothing_is_placed_once_the_owner_is_gone() {
    let pair = pair();
    let bytes = 4 << 20;
    let source = pair.ends[0].register(vec![7u8; bytes]).unwrap();
    for round in 0..20 {
        let (target, reported) = owned(&pair.ends[1], vec![0; bytes]);
        let writes: Vec<_> = (0..3)
            .map(|_| pair.near.write(&source, 0, &target.descriptor(), 0, bytes as u64).unwrap())
            .collect();
        while round % 4 > 0 && writes[0].bytes_moved() == 0 && writes[0].poll().is_none() {
            thread::yield_now();
        }
        drop(target);
        let gone = gone(&reported);
        let outcomes: Vec<_> = writes.iter().map(|write| write.wait(LIMIT)).collect();
        for outcome in &outcomes {
            assert!(matches!(outcome, Ok(_) | Err(TransferError::AccessRefused { .. })), "{outcome:?}");
        }
        assert!(gone.bytes.iter().all(|byte| *byte == 0xEE), "round {round}: written to after its end");
    }
}

#[test]
fn deregistering_drops_the_owner_on_the_spot() {
    let pair = pair();
    let (region, reported) = owned(&pair.ends[0], vec![7; 1000]);
    let clone = region.clone();
    let target = pair.ends[1].alloc_host(1000).unwrap();
    pair.near.write(&region, 0, &target.descriptor(), 0, 1000).unwrap().wait(LIMIT).unwrap();
    region.deregister().unwrap();
    assert_eq!(reported.try_recv().unwrap().thread.0, thread::current().id());
    // Another handle would read memory of another owner now.
    let mut out = [0; 10];
    assert!(matches!(clone.read_at(0, &mut out), Err(RegisterError::Invalid { .. })));
    assert!(matches!(clone.write_at(0, &out), Err(RegisterError::Invalid { .. })));
    assert!(pair.near.write(&clone, 0, &target.descriptor(), 0, 10).is_err());
    assert_eq!(clone.deregister(), Ok(()));
}

#[test]
fn an_owner_may_wait_for_a_lock_that_a_user_of_the_endpoint_holds() {
    let pair = pair();
    let gil = Arc::new(Mutex::new(()));
    struct Waits(Arc<Mutex<()>>, Sender<()>, Vec<u8>);
    impl Drop for Waits {
        fn drop(&mut self) {
            let _held = self.0.lock().unwrap();
            self.1.send(()).unwrap();
        }
    }
    let (sender, dropped) = mpsc::channel();
    let held = gil.lock().unwrap();
    for _ in 0..3 {
        let mut owner = Box::new(Waits(gil.clone(), sender.clone(), vec![0; 64]));
        let base = owner.2.as_mut_ptr();
        // SAFETY: the owner keeps the bytes.
        drop(unsafe { pair.ends[1].register_with(base, 64, owner) }.unwrap());
    }
    // The endpoint works on meanwhile.
    let source = pair.ends[0].register(vec![7u8; 1 << 20]).unwrap();
    let target = pair.ends[1].alloc_host(1 << 20).unwrap();
    for _ in 0..50 {
        pair.near.write(&source, 0, &target.descriptor(), 0, 1 << 20).unwrap().wait(LIMIT).unwrap();
    }
    assert_eq!(dropped.try_recv(), Err(TryRecvError::Empty));
    drop(held);
    (0..3).for_each(|_| dropped.recv_timeout(LIMIT).unwrap());
}

#[test]
fn owners_are_dropped_whichever_goes_first_the_endpoint_or_the_region() {
    for endpoint_first in [false, true] {
        for close in [false, true] {
            let pair = pair();
            let (region, reported) = owned(&pair.ends[1], vec![0; 5000]);
            let source = pair.ends[0].register(vec![7u8; 5000]).unwrap();
            let write = pair.near.write(&source, 0, &region.descriptor(), 0, 5000).unwrap();
            write.wait(LIMIT).unwrap();
            if close {
                pair.ends[1].close(LIMIT).unwrap();
            }
            let rest = (write, source, pair.near, pair.far);
            match endpoint_first {
                true => drop((rest, pair.ends, region)),
                false => drop((region, rest, pair.ends)),
            }
            gone(&reported);
        }
    }
}

#[test]
fn an_endpoint_without_threads_lets_go_when_it_is_turned() {
    let endpoint = Endpoint::builder().threads(0).build().unwrap();
    let (region, reported) = owned(&endpoint, vec![0; 100]);
    drop(region);
    loop {
        endpoint.progress();
        match reported.try_recv() {
            Ok(_) => break,
            Err(error) => assert_eq!(error, TryRecvError::Empty),
        }
        thread::yield_now();
    }
}

/// Regression: once an owner had been given, the thread that drops owners released all memory in use. Then memory without
/// an owner waited for the drop of another owner, and a simulated run with threads(0) did not repeat.
#[test]
fn memory_without_an_owner_does_not_wait_for_the_drop_of_an_owner() {
    struct Blocking(Sender<()>, Receiver<()>);
    impl Drop for Blocking {
        fn drop(&mut self) {
            self.0.send(()).unwrap();
            self.1.recv_timeout(LIMIT).unwrap();
        }
    }
    let far = listening();
    let near = Endpoint::builder().threads(0).build().unwrap();
    let peer = near.connect(far.listen_addresses()[0], LIMIT).unwrap();
    let ((begun, begins), (ends, end)) = (mpsc::channel(), mpsc::channel());
    let mut bytes = [0; 10];
    let owner = Box::new(Mutex::new(Blocking(begun, end)));
    // SAFETY: the bytes stay until the owner is dropped.
    let owned = unsafe { near.register_with(bytes.as_mut_ptr(), bytes.len(), owner) }.unwrap();
    drop(owned);
    while begins.try_recv().is_err() {
        near.progress();
    }
    let region = near.alloc_host(10).unwrap();
    let _never = peer.recv(1, &region, 0, 10).unwrap();
    while near.progress() {}
    drop(region);
    assert!(near.progress(), "no worker was asked to release the memory");
    ends.send(()).unwrap();
}

#[test]
fn a_panic_of_an_owner_harms_no_other() {
    struct Panics(Vec<u8>);
    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("an owner that panics on purpose");
        }
    }
    let endpoint = listening();
    let mut owner = Box::new(Panics(vec![0; 64]));
    let base = owner.0.as_mut_ptr();
    // SAFETY: the owner keeps the bytes.
    drop(unsafe { endpoint.register_with(base, 64, owner) }.unwrap());
    let (region, reported) = owned(&endpoint, vec![0; 100]);
    drop(region);
    gone(&reported);
}

#[test]
fn memory_of_a_gpu_may_have_an_owner_too() {
    let pair = pair();
    let gpu = SimGpu::open(5).unwrap();
    let buffer = gpu.alloc(100_000, 4096).unwrap();
    let base = buffer.as_ptr();
    let (gone_sender, reported) = mpsc::channel();
    let owner = Box::new((buffer, Owner { bytes: Vec::new(), gone: gone_sender }));
    // SAFETY: the owner keeps the allocation.
    let region = unsafe { pair.ends[1].register_with(base, 100_000, owner) }.unwrap();
    assert_eq!(region.location(), ferrywire::MemoryLocation::SimGpu(5));
    let source = pair.ends[0].register(vec![7u8; 100_000]).unwrap();
    pair.near.write(&source, 0, &region.descriptor(), 0, 100_000).unwrap().wait(LIMIT).unwrap();
    let mut found = vec![0; 100_000];
    region.read_at(0, &mut found).unwrap();
    assert_eq!(found, vec![7; 100_000]);
    drop(region);
    gone(&reported);
}

/// The bytes went with the owner, and a handle that was left still read them.
#[test]
fn memory_deregistered_after_its_endpoint_is_not_read() {
    let endpoint = listening();
    let (region, reported) = owned(&endpoint, vec![3; 5000]);
    let other = region.clone();
    drop(endpoint);
    let mut bytes = [0; 100];
    other.read_at(0, &mut bytes).unwrap();
    assert_eq!(bytes, [3; 100]);
    region.deregister().unwrap();
    gone(&reported);
    for refused in [other.read_at(0, &mut bytes), other.write_at(0, &bytes)] {
        assert!(matches!(refused, Err(RegisterError::Invalid { .. })), "{refused:?}");
    }
}
