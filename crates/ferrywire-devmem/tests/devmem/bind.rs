//! Binding memory to NICs: the kernel's refusals and their causes, and the lifetime of a binding.

use crate::vm::{self, FAR, NEAR, Pool, QUEUE, at_peer, index, set_split};
use ferrywire_devmem::sys::ethtool::Split;
use ferrywire_devmem::sys::netdev::{Netdev, QueueState};
use ferrywire_devmem::sys::netlink::{Attributes, Family, NetlinkError};
use ferrywire_devmem::{BindCause, DevmemError};
use ferrywire_sys::mapping::anonymous_file;
use std::collections::BTreeSet;
use std::fs;
use std::os::fd::AsFd;
use std::path::Path;

/// The index of loopback in every network namespace.
const LO: u32 = 1;

#[track_caller]
fn cause(error: DevmemError) -> BindCause {
    println!("{error}");
    match error {
        DevmemError::Bind { cause, .. } => cause,
        other => panic!("{other:?}"),
    }
}

/// Numbers of the kernel's headers, repeated here instead of taken from the tested code.
const NETDEV_CMD_BIND_RX: u16 = 13;
const NETDEV_CMD_BIND_TX: u16 = 15;

/// The attributes of a bind request that this kernel reports to know; `None` if it does not know the request.
fn known(request: u16) -> Option<BTreeSet<u16>> {
    const CTRL_CMD_GETPOLICY: u8 = 10;
    const CTRL_ATTR_FAMILY_NAME: u16 = 2;
    const CTRL_ATTR_POLICY: u16 = 8;
    const CTRL_ATTR_OP_POLICY: u16 = 9;
    const CTRL_ATTR_OP: u16 = 10;
    const CTRL_ATTR_POLICY_DO: u16 = 1;
    const NETDEV_A_DMABUF_FD: u16 = 3;
    let question =
        Attributes::new().text(CTRL_ATTR_FAMILY_NAME, "netdev").u32(CTRL_ATTR_OP, u32::from(request));
    let mut control = Family::open("nlctrl").expect("every kernel has it");
    let reported = match control.list("netlink policy", CTRL_CMD_GETPOLICY, &question) {
        Err(NetlinkError { errno: libc::ENOENT, .. }) => return None,
        reported => reported.expect("a list"),
    };
    // One reply names the request's policy; the others each describe one attribute of a policy.
    let requests = reported.iter().find_map(|reply| reply.attributes().nest(CTRL_ATTR_OP_POLICY));
    let policy = requests.and_then(|all| all.nest(request)).expect("the request has a policy");
    let policy = policy.u32(CTRL_ATTR_POLICY_DO).and_then(|number| u16::try_from(number).ok());
    let policy = policy.expect("it has a number");
    let attributes =
        reported.iter().filter_map(|reply| reply.attributes().nest(CTRL_ATTR_POLICY)?.nest(policy));
    let known: BTreeSet<u16> = attributes.flatten().map(|(attribute, _)| attribute).collect();
    assert!(known.contains(&NETDEV_A_DMABUF_FD), "no binding is without one: {known:?}");
    Some(known)
}

/// Whether this kernel supports receive buffers larger than a page; `None` if it binds nothing at all.
fn knows_rx_page_size() -> Option<bool> {
    const NETDEV_A_DMABUF_RX_PAGE_SIZE: u16 = 5;
    Some(known(NETDEV_CMD_BIND_RX)?.contains(&NETDEV_A_DMABUF_RX_PAGE_SIZE))
}

/// Whether every kernel lets this process bind queues: up to some version after 6.18 the right counts only in the
/// initial user namespace.
fn has_every_right() -> bool {
    /// The initial user namespace of every kernel.
    const FIRST: &str = "user:[4026531837]";
    const CAP_NET_ADMIN: u32 = 12;
    let status = fs::read_to_string("/proc/self/status").expect("it is there");
    let rights = status.lines().find_map(|line| line.strip_prefix("CapEff:")).expect("rights");
    let rights = u64::from_str_radix(rights.trim(), 16).expect("a number");
    let namespace = fs::read_link("/proc/self/ns/user").expect("a link");
    namespace == Path::new(FIRST) && rights >> CAP_NET_ADMIN & 1 == 1
}

/// On the kernel of any host: loopback supports none of it.
#[test]
fn loopback_refuses_with_causes() {
    let mut netdev = match Netdev::open() {
        Ok(netdev) => netdev,
        Err(error) => return println!("SKIPPED: needs the kernel's netdev family: {error}"),
    };
    let file = anonymous_file(vm::MIB).expect("memory");
    let error = netdev.bind_tx(LO, file.as_fd()).expect_err("loopback sends no such memory");
    assert_eq!((error.errno, error.call), (libc::EOPNOTSUPP, "netdev bind-tx"), "{error}");
    let sends = known(NETDEV_CMD_BIND_TX).map_or(BindCause::NoKernel, |_| BindCause::CannotSend);
    assert_eq!(cause(DevmemError::bind_tx("lo", &error)), sends);
    let error = netdev.bind_rx(LO, &[0], file.as_fd()).expect_err("loopback has no such queues");
    if error.errno == libc::EPERM && !has_every_right() {
        assert_eq!(cause(DevmemError::bind_rx("lo", &[0], &error)), BindCause::NotAllowed);
        return println!(
            "SKIPPED: needs CAP_NET_ADMIN, and no user namespace, to ask for a binding to receive"
        );
    }
    // A kernel that does not know the request refuses with the same number.
    assert_eq!((error.errno, error.call), (libc::EOPNOTSUPP, "netdev bind-rx"), "{error}");
    let reported = cause(DevmemError::bind_rx("lo", &[0], &error));
    let Some(larger) = knows_rx_page_size() else { return assert_eq!(reported, BindCause::NoKernel) };
    assert_eq!(reported, BindCause::CannotReceive);
    let error = netdev.bind_rx_pages(LO, &[0], file.as_fd(), 16 << 10).expect_err("nor larger buffers");
    let said = (error.errno, error.text.as_deref());
    let reported = DevmemError::bind_rx("lo", &[0], &error);
    if larger {
        assert_eq!(said, (libc::EOPNOTSUPP, None), "{error}");
        assert_eq!(cause(reported), BindCause::CannotReceive);
    } else {
        assert_eq!(said, (libc::EINVAL, Some("Unknown attribute type")), "{error}");
        assert!(reported.to_string().contains("no receive buffers larger than a page"), "{reported}");
        assert_eq!(cause(reported), BindCause::NoLargeBuffers);
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
    // A piece larger than a page of host memory, if the kernel checks that before it asks the driver.
    let causes: &[_] = if knows_rx_page_size().expect("it binds memory") {
        &[BindCause::DriverNoLargeBuffers, BindCause::Scattered]
    } else {
        &[BindCause::NoLargeBuffers]
    };
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
    // A socket stays in the namespace in which it was opened.
    let second = netdev.bind_tx(far, pool.dmabuf.as_fd()).expect("another number");
    assert!(first != 0 && second != 0 && first != second, "{first} {second}");
    assert!(netdev.device(far).is_ok());
}
