//! Each refusal of the kernel, and its message for the user. Rows marked `seen` are produced by the test program
//! (`tests/devmem/`) on a kernel, in the VM or on the host; the others need hardware or accidents and are simulated
//! here.

use super::*;
use crate::sys::devmem::ControlFault;

/// Number, the kernel's text ("" for none), cause, and words that the message must contain.
type Row = (i32, &'static str, BindCause, &'static [&'static str]);

const RECEIVE: [Row; 21] = [
    // seen: loopback
    (libc::EOPNOTSUPP, "", BindCause::CannotReceive, &["the driver", "--transport tcp"]),
    (libc::EOPNOTSUPP, "this kernel has no such request", BindCause::NoKernel, &["6.12", "--transport tcp"]),
    // seen
    (libc::EINVAL, "tcp-data-split is disabled", BindCause::SplitOff, &["ethtool -G eth7 tcp-data-split on"]),
    // seen
    (libc::EINVAL, "hds-thresh is not zero", BindCause::SplitThreshold, &["ethtool -G eth7 hds-thresh 0"]),
    // seen: queue 99, no queue, no dma-buf
    (libc::EINVAL, "", BindCause::NoSuchQueue, &["no such queue", "not a dma-buf"]),
    (libc::ERANGE, "rx queue index out of range", BindCause::NoSuchQueue, &["no such queue"]),
    // seen
    (libc::EEXIST, "designated queue already memory provider bound", BindCause::QueueTaken, &["another"]),
    (libc::EBUSY, "designated queue already in use by AF_XDP", BindCause::XdpSocket, &["AF_XDP"]),
    (libc::EBUSY, "", BindCause::XdpSocket, &["AF_XDP"]),
    (
        libc::EEXIST,
        "unable to custom memory provider to device with XDP program attached",
        BindCause::XdpProgram,
        &["ip link set eth7 xdp off"],
    ),
    // seen, where buffers are larger than pages; cut off like this
    (
        libc::EINVAL,
        "dmabuf sg entry (addr=0x00000000033e8000, len=4096) not aligned to niov size 16",
        BindCause::Scattered,
        &["2 MiB"],
    ),
    (
        libc::EINVAL,
        "dmabuf sg entry (addr=0x00000000033e8000, len=123456789) not aligned to niov s",
        BindCause::Scattered,
        &["2 MiB"],
    ),
    // seen, on kernels before 7.3: on a host's 6.18
    (libc::EINVAL, "Unknown attribute type", BindCause::NoLargeBuffers, &["7.3"]),
    (libc::EOPNOTSUPP, "device does not support: rx_page_size", BindCause::DriverNoLargeBuffers, &["driver"]),
    (libc::EINVAL, "rx-page-size 12288 is not a power of 2", BindCause::OddBuffers, &["at least 4096 bytes"]),
    (libc::EOPNOTSUPP, "Device doesn't support DMA", BindCause::NoDma, &["physical NIC"]),
    (libc::EOPNOTSUPP, "Failed to bind dmabuf to device", BindCause::OutOfReach, &["PCIe", "BAR1"]),
    (libc::EIO, "Failed to map dmabuf attachment", BindCause::OutOfReach, &["IOMMU"]),
    // seen: in a user namespace, on a host's 6.18
    (libc::EPERM, "", BindCause::NotAllowed, &["CAP_NET_ADMIN"]),
    (libc::ENODEV, "", BindCause::NoNic, &["no such NIC"]),
    (libc::EINVAL, "words of a later kernel", BindCause::Other, &["words of a later kernel"]),
];

const SEND: [Row; 6] = [
    // seen: loopback
    (
        libc::EOPNOTSUPP,
        "Driver does not support netmem TX",
        BindCause::CannotSend,
        &["copied to host memory"],
    ),
    // A kernel that can only receive does not know the request.
    (libc::EOPNOTSUPP, "this kernel has no such request", BindCause::NoKernel, &["6.16"]),
    (libc::EINVAL, "TX dma-buf size must be a multiple of PAGE_SIZE", BindCause::OddSize, &["4096"]),
    // seen: no dma-buf
    (libc::EINVAL, "", BindCause::NoDmabuf, &["not a dma-buf"]),
    (libc::EOPNOTSUPP, "Failed to bind dmabuf to device", BindCause::OutOfReach, &["PCIe"]),
    (libc::ENOENT, "this kernel has no family \"netdev\"", BindCause::NoKernel, &["6.12"]),
];

fn refusal((errno, text, cause, ..): Row) -> NetlinkError {
    let known = match cause {
        BindCause::NoKernel if errno == libc::EOPNOTSUPP => Some(KnownRefusal::NoSuchRequest),
        BindCause::OddBuffers => Some(KnownRefusal::OddPageBytes),
        _ => None,
    };
    let text = (!text.is_empty()).then(|| text.to_owned());
    NetlinkError { errno, text, call: "netdev bind", known }
}

fn check(row: Row, error: &DevmemError) {
    let DevmemError::Bind { cause, .. } = error else { panic!("{error:?}") };
    assert_eq!(*cause, row.2, "{row:?}");
    let message = error.to_string();
    let number = io::Error::from_raw_os_error(row.0).to_string();
    for words in row.3.iter().chain(&["eth7", row.1, &number]) {
        assert!(message.contains(words), "{words:?} is missing: {message}");
    }
    assert_eq!(error.kind(), ErrorKind::Local);
}

#[test]
fn each_refusal_to_receive_says_what_to_do() {
    for row in RECEIVE {
        let error = DevmemError::bind_rx("eth7", &[3, 4], &refusal(row));
        check(row, &error);
        assert!(error.to_string().contains("queues 3, 4"), "{error}");
    }
}

#[test]
fn each_refusal_to_send_says_what_to_do() {
    for row in SEND {
        let error = DevmemError::bind_tx("eth7", &refusal(row));
        check(row, &error);
        assert!(!error.to_string().contains("queues "), "{error}");
    }
}

#[test]
fn no_two_causes_have_the_same_message() {
    let mut reported: Vec<_> = RECEIVE.iter().chain(&SEND).map(|row| (row.2.to_string(), row.2)).collect();
    reported.sort_by(|a, b| a.0.cmp(&b.0));
    reported.dedup();
    for pair in reported.windows(2) {
        assert_ne!(pair[0].0, pair[1].0);
    }
    assert_eq!(reported.len(), 20, "each cause has a row");
}

#[test]
fn each_failed_send_says_why() {
    let rows: [(i32, SendCause, ErrorKind, &str); 6] = [
        // seen: no SO_ZEROCOPY, unknown number, one that receives, closed binding
        (libc::EINVAL, SendCause::NotBound, ErrorKind::Internal, "the binding for sending has ended"),
        // seen
        (libc::EFAULT, SendCause::Outside, ErrorKind::Internal, "outside of the dma-buf"),
        // seen: over loopback
        (libc::ENODEV, SendCause::OtherRoute, ErrorKind::Local, "another device"),
        (libc::EHOSTUNREACH, SendCause::NoRoute, ErrorKind::Local, "the route to the peer is gone"),
        (libc::ENOBUFS, SendCause::Unfinished, ErrorKind::Local, "net.core.optmem_max"),
        (libc::EIO, SendCause::Other, ErrorKind::Local, "the kernel refuses"),
    ];
    for (errno, cause, fault, words) in rows {
        let said = io::Error::from_raw_os_error(errno);
        let error = DevmemError::send("eth7", 6, &said);
        assert_eq!((SendCause::of(&said), error.kind()), (cause, fault));
        let message = error.to_string();
        for words in ["NIC eth7", "dma-buf 6", words, &said.to_string()] {
            assert!(message.contains(words), "{words:?} is missing: {message}");
        }
    }
}

#[test]
fn receiving_fails_with_the_kernels_fault_or_a_connections() {
    let of = |error| DevmemError::receive("eth7", "10.0.0.2:7777", &error);
    assert_eq!(of(io::Error::from_raw_os_error(libc::ECONNRESET)), None);
    assert_eq!(of(io::Error::other("something else")), None);
    let sum = ReceiveFault::from(ControlFault::Sum { fragments: 10, received: 11 });
    // The first two are seen.
    for (fault, whose) in [
        (ReceiveFault::NoRoom, ErrorKind::Internal),
        (ReceiveFault::Unreadable, ErrorKind::Local),
        (sum, ErrorKind::Local),
    ] {
        let error = of(io::Error::other(fault.clone())).expect("one of devmem's");
        assert_eq!(error.kind(), whose);
        let message = error.to_string();
        assert!(message.contains("eth7") && message.contains("10.0.0.2:7777"), "{message}");
        assert!(message.ends_with(&fault.to_string()), "{message}");
    }
}

#[test]
fn a_setting_that_cannot_be_changed_names_the_command() {
    // seen: header split off while memory is bound
    let said = "can't disable tcp-data-split while device has memory provider enabled";
    let error = |hint: &str| DevmemError::Setting {
        nic: "eth7".into(),
        what: "turn header split off".into(),
        said: said.into(),
        hint: hint.into(),
    };
    let reported = error("ethtool -G eth7 tcp-data-split off").to_string();
    let by_hand = "(by hand: ethtool -G eth7 tcp-data-split off)";
    assert_eq!(reported, format!("NIC eth7: cannot turn header split off: {said} {by_hand}"));
    assert_eq!(error("").to_string(), format!("NIC eth7: cannot turn header split off: {said}"));
}

#[test]
fn fragments_outside_of_the_pool_are_described() {
    let outside = DevmemError::OutsidePool {
        nic: "eth7".into(),
        dmabuf: 9,
        offset: 4096,
        bytes: 1448,
        pool: 5,
        pool_bytes: 1 << 20,
    };
    let text = outside.to_string();
    assert_eq!(
        text,
        "NIC eth7: a fragment of 1448 bytes at offset 4096 of dma-buf 9 is outside the pool (1048576 bytes, dma-buf 5)"
    );
    let unknown = DevmemError::UnknownTokens { nic: "eth7".into(), unknown: 3, returned: 1000 };
    assert!(unknown.to_string().contains("3 of 1000"), "{unknown}");
    assert_eq!((outside.kind(), unknown.kind()), (ErrorKind::Local, ErrorKind::Internal));
}
