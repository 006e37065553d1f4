//! Binding memory to NICs: what the kernel refuses and why, and how long a binding lasts.

use crate::vm::{self, FAR, NEAR, Pool, QUEUE, at_peer, index, set_split};
use ferrywire::sys::ethtool::Split;
use ferrywire::sys::netdev::{Netdev, QueueState};
use ferrywire::transport::devmem::{BindCause, DevmemError};
use std::os::fd::AsFd;

/// Loopback's number in every network namespace.
const LO: u32 = 1;

#[track_caller]
fn cause(error: DevmemError) -> BindCause {
    println!("{error}");
    match error {
        DevmemError::Bind { cause, .. } => cause,
        other => panic!("{other:?}"),
    }
}

#[test]
fn refusals_to_receive_have_causes() {
    if !vm::is_here() {
        return;
    }
    let (pool, mut netdev) = (Pool::new(vm::MIB), Netdev::open().expect("the family"));
    let nic = index(NEAR);
    let mut refused = |nic, queues: &[u32], fd| {
        let error = netdev.bind_rx(nic, queues, fd).expect_err("refused");
        cause(DevmemError::bind_rx(NEAR, queues, &error))
    };
    set_split(Split::Off, None).expect("nothing is bound");
    assert_eq!(refused(nic, &[QUEUE], pool.dmabuf.as_fd()), BindCause::SplitOff);
    set_split(Split::On, Some(64)).expect("nothing is bound");
    assert_eq!(refused(nic, &[QUEUE], pool.dmabuf.as_fd()), BindCause::SplitThreshold);
    set_split(Split::On, Some(0)).expect("nothing is bound");
    assert_eq!(refused(LO, &[0], pool.dmabuf.as_fd()), BindCause::CannotReceive);
    assert_eq!(refused(nic, &[99], pool.dmabuf.as_fd()), BindCause::NoSuchQueue);
    assert_eq!(refused(nic, &[], pool.dmabuf.as_fd()), BindCause::NoSuchQueue);
    assert_eq!(refused(nic, &[QUEUE], pool.file.as_fd()), BindCause::NoSuchQueue);
    assert_eq!(refused(1 << 30, &[QUEUE], pool.dmabuf.as_fd()), BindCause::NoNic);
    let error = netdev.bind_rx_pages(nic, &[QUEUE], pool.dmabuf.as_fd(), 16 << 10).expect_err("refused");
    let cause = cause(DevmemError::bind_rx(NEAR, &[QUEUE], &error));
    // By the kernel's version: unknown to it, unknown to the driver, or more than a page of host memory has.
    let causes = [BindCause::NoLargeBuffers, BindCause::DriverNoLargeBuffers, BindCause::Scattered];
    assert!(causes.contains(&cause), "{cause:?}");
}

#[test]
fn refusals_to_send_have_causes() {
    if !vm::is_here() {
        return;
    }
    let pool = Pool::new(vm::MIB);
    at_peer(|| {
        let mut netdev = Netdev::open().expect("the family");
        let mut refused = |nic, fd| {
            let error = netdev.bind_tx(nic, fd).expect_err("refused");
            cause(DevmemError::bind_tx(FAR, &error))
        };
        assert_eq!(refused(LO, pool.dmabuf.as_fd()), BindCause::CannotSend);
        assert_eq!(refused(index(FAR), pool.file.as_fd()), BindCause::NoDmabuf);
        assert_eq!(refused(1 << 30, pool.dmabuf.as_fd()), BindCause::NoNic);
    });
}

#[test]
fn a_binding_shows_at_its_queue_and_ends_with_its_socket() {
    if !vm::is_here() {
        return;
    }
    let receiver = vm::Receiver::new(vm::MIB);
    let (mut other, nic) = (Netdev::open().expect("the family"), index(NEAR));
    let bound = QueueState { dmabuf: Some(receiver.id), ..QueueState::default() };
    assert_eq!(other.queue(nic, QUEUE), Ok(bound));
    let queues = other.queues(nic).expect("a list");
    let taken: Vec<_> = queues.iter().filter(|(_, state)| !state.is_free()).copied().collect();
    assert_eq!((queues.len(), taken), (4, vec![(QUEUE, bound)]));
    let again = other.bind_rx(nic, &[2, QUEUE], receiver.pool.dmabuf.as_fd()).expect_err("one is taken");
    assert_eq!(cause(DevmemError::bind_rx(NEAR, &[2, QUEUE], &again)), BindCause::QueueTaken);
    assert_eq!(other.queue(nic, 2), Ok(QueueState::default()), "all or none");
    let error = set_split(Split::Off, None).expect_err("memory is bound");
    assert_eq!(error.errno, libc::EINVAL);
    assert!(error.to_string().contains("can't disable tcp-data-split"), "{error}");
    drop(receiver);
    assert_eq!(other.queue(nic, QUEUE), Ok(QueueState::default()));
}

#[test]
fn memory_to_send_from_may_be_bound_twice() {
    if !vm::is_here() {
        return;
    }
    let pool = Pool::new(vm::MIB);
    let (mut netdev, first) = vm::bind_far(pool.dmabuf.as_fd());
    let far = at_peer(|| index(FAR));
    // A socket stays in the namespace that it was opened in.
    let second = netdev.bind_tx(far, pool.dmabuf.as_fd()).expect("another number");
    assert!(first != 0 && second != 0 && first != second, "{first} {second}");
    assert!(netdev.device(far).is_ok());
}
