//! Limits on time, and names.

use crate::{LIMIT, pair};
use ferrywire::net::sim::{DialFault, SimNet};
use ferrywire::{Block, BlockList, ConnectError, Endpoint, Error, ErrorKind, TransferError, limits};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

#[test]
fn a_wait_has_a_timeout_and_a_stall_timeout() {
    let pair = pair();
    let target = pair.ends[1].alloc_host(100).unwrap();
    let receive = pair.far.recv(1, &target, 0, 100).unwrap();
    let (short, zero) = (Duration::from_millis(30), Duration::ZERO);
    for (total, stall) in [(short, LIMIT), (zero, LIMIT), (zero, zero), (short, Duration::MAX)] {
        let error = receive.wait_for(total, stall).unwrap_err();
        let TransferError::TimedOut { what, timeout: limit, peer } = &error else { panic!("{error}") };
        assert_eq!(*limit, total);
        assert!(what.starts_with("recv with 127.0.0.1:"), "{what}");
        assert_eq!((error.kind(), peer.as_deref()), (ErrorKind::Timeout, Some(&*pair.far.name())));
        let words = if total.is_zero() { "not done yet: recv" } else { "not done within 30ms: recv" };
        assert!(error.to_string().starts_with(words), "{error}");
    }
    for total in [LIMIT, Duration::MAX] {
        let error = receive.wait_for(total, short).unwrap_err();
        assert!(matches!(error, TransferError::Stalled { waited, .. } if waited == short), "{error}");
    }
    // The transfer is still in flight.
    let source = pair.ends[0].register(vec![7u8; 100]).unwrap();
    pair.near.send(1, &source, 0, 100).unwrap();
    assert_eq!(receive.wait_for(LIMIT, LIMIT), Ok(100));
    assert_eq!(receive.wait_for(zero, zero), Ok(100));
}

/// A transfer with constant progress does not stall, and its wait ends at the total timeout.
#[test]
fn progress_does_not_extend_the_total() {
    let pair = pair();
    let bytes = 1 << 20;
    let source = pair.ends[0].alloc_host(bytes).unwrap();
    let target = pair.ends[1].alloc_host(bytes).unwrap();
    // One megabyte many times: minutes of work.
    let blocks = vec![Block { local_offset: 0, remote_offset: 0, bytes: bytes as u64 }; 1 << 20];
    let list = BlockList::new(&source, &target.descriptor(), &blocks).unwrap();
    let write = pair.near.write_blocks(&list, None, None).unwrap();
    while write.bytes_moved() == 0 {
        assert_eq!(write.poll(), None);
    }
    let outcome = write.wait_for(Duration::from_millis(300), LIMIT);
    assert!(matches!(outcome, Err(TransferError::TimedOut { .. })), "{outcome:?}");
    write.cancel();
    assert_eq!(write.wait(LIMIT), Err(TransferError::Cancelled));
}

/// Regression: the endpoint was built, and refused every peer as busy, since it could not send its label.
#[test]
fn a_label_that_cannot_be_sent_is_refused_at_once() {
    for label in ["x".repeat(65), "host-1\n".into()] {
        let built = Endpoint::builder().label(label.clone()).build();
        let why = built.map(drop).unwrap_err();
        assert!(matches!(&why, Error::Invalid { what, .. } if what == "label"), "{label:?}: {why}");
    }
    Endpoint::builder().label("ü".repeat(32)).build().unwrap();
}

#[test]
fn a_peer_has_a_label_and_an_address() {
    let here = "127.0.0.1:0".parse().unwrap();
    let one = Endpoint::builder().listen(here).label("decode-0").channels(1).build().unwrap();
    let other = Endpoint::builder().channels(1).build().unwrap();
    let near = other.connect(one.listen_addresses()[0], LIMIT).unwrap();
    let far = one.accept(LIMIT).unwrap();
    assert_eq!((near.label(), near.address()), ("decode-0", one.listen_addresses()[0]));
    assert_eq!(near.name(), format!("{} (decode-0)", near.address()));
    assert_eq!((far.label(), far.address().ip().is_loopback()), ("", true));
    assert_eq!(far.name(), far.address().to_string());
}

/// Regression: only connected peers counted, so that an endpoint could start any number of connects.
#[test]
fn connects_that_are_not_answered_count_as_peers() {
    let net = SimNet::new(0);
    let [ours, theirs] = [1, 2].map(|last| IpAddr::from([10, 0, 0, last]));
    let host = net.host("connecting", &[("eth0", ours)]);
    let _silent = net.host("silent", &[("eth0", theirs)]);
    net.fail_dials(theirs, DialFault::TimeOut, limits::PEERS_MAX + 1);
    let endpoint = Endpoint::builder().threads(0).transport(host).build().unwrap();
    let connect = || endpoint.start_connect(SocketAddr::from((theirs, 7420))).unwrap();
    let mut pending: Vec<_> = (0..limits::PEERS_MAX).map(|_| connect()).collect();
    assert!(pending.iter().all(|connecting| connecting.poll().is_none()));
    let refused = connect().poll();
    assert!(matches!(refused, Some(Err(ConnectError::Limit { name: "PEERS_MAX", .. }))), "{refused:?}");
    drop(pending.pop());
    assert!(connect().poll().is_none(), "a connect that was withdrawn still counts");
}
