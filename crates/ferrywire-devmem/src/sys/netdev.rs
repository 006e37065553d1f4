//! The kernel's `netdev` family of generic netlink: binds a dma-buf to the queues of a NIC for receiving, or to a NIC
//! for sending.
//!
//! A binding lives as long as the socket that made it: dropping a [`Netdev`], or any end of the process, undoes its
//! bindings. The right to receive (CAP_NET_ADMIN) is checked when binding: 6.18 requires it in the initial user
//! namespace, 7.3 in that of the network namespace. Sending needs no right.
//! Read next: `devmem.rs`, how bytes of bound queues are received and sent.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

use super::netlink::{self, AttributeList, Attributes, Family, KnownRefusal, NetlinkError, Reply};

const FAMILY: &str = "netdev";

const DEV_GET: u8 = 1;
const QUEUE_GET: u8 = 10;
const BIND_RX: u8 = 13;
const BIND_TX: u8 = 15;

const DEV_IFINDEX: u16 = 1;
const DEV_XDP_FEATURES: u16 = 3;
const DEV_XSK_FEATURES: u16 = 6;

const QUEUE_ID: u16 = 1;
const QUEUE_IFINDEX: u16 = 2;
const QUEUE_TYPE: u16 = 3;
const QUEUE_DMABUF: u16 = 5;
const QUEUE_IO_URING: u16 = 6;
const QUEUE_XSK: u16 = 7;
const TYPE_RX: u32 = 0;

const DMABUF_IFINDEX: u16 = 1;
const DMABUF_QUEUES: u16 = 2;
const DMABUF_FD: u16 = 3;
const DMABUF_ID: u16 = 4;
const DMABUF_RX_PAGE_SIZE: u16 = 5;

/// The special user of a receive queue, if it has one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueState {
    /// The id of the dma-buf that is bound to the queue.
    pub dmabuf: Option<u32>,
    /// Whether an io_uring receives from the queue without copies.
    pub io_uring: bool,
    /// Whether an AF_XDP socket uses the queue.
    pub xsk: bool,
}

impl QueueState {
    /// Whether the queue has no special user.
    pub fn is_free(self) -> bool {
        self == QueueState::default()
    }
}

/// Capabilities of a network device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// Bits of the device's XDP features (`NETDEV_XDP_ACT_...`).
    pub xdp_features: u64,
    /// Bits of the device's AF_XDP features.
    pub xsk_features: u64,
}

/// A netlink connection to the `netdev` family, and all bindings that were made with it.
#[derive(Debug)]
pub struct Netdev {
    family: Family,
}

impl Netdev {
    /// Opens a netlink connection. `ENOENT` if the kernel is older than the family (6.3).
    pub fn open() -> Result<Netdev, NetlinkError> {
        Ok(Netdev { family: Family::open(FAMILY)? })
    }

    /// Binds receive queues to a dma-buf; returns the id that fragments carry. Header split must be on, with threshold
    /// 0. Each piece of the dma-buf's memory must be whole pages.
    pub fn bind_rx(
        &mut self,
        ifindex: u32,
        queues: &[u32],
        dmabuf: BorrowedFd<'_>,
    ) -> Result<u32, NetlinkError> {
        self.bind("netdev bind-rx", BIND_RX, rx_binding(ifindex, queues, dmabuf))
    }

    /// Like [`Netdev::bind_rx`], with buffers of `page_bytes`, a power of 2, instead of pages: for kernels from 7.3 on,
    /// and some drivers. Other sizes are refused here, because by its source the kernel answers them with its most
    /// general number, `EINVAL`, and no text.
    pub fn bind_rx_pages(
        &mut self,
        ifindex: u32,
        queues: &[u32],
        dmabuf: BorrowedFd<'_>,
        page_bytes: u32,
    ) -> Result<u32, NetlinkError> {
        let call = "netdev bind-rx";
        if !page_bytes.is_power_of_two() {
            let text = Some(format!("rx-page-size {page_bytes} is not a power of 2"));
            let known = Some(KnownRefusal::OddPageBytes);
            return Err(NetlinkError { errno: Errno::INVAL.raw_os_error(), text, call, known });
        }
        self.bind(call, BIND_RX, rx_binding(ifindex, queues, dmabuf).u32(DMABUF_RX_PAGE_SIZE, page_bytes))
    }

    /// Binds a device to a dma-buf for sending; returns the id for sends.
    pub fn bind_tx(&mut self, ifindex: u32, dmabuf: BorrowedFd<'_>) -> Result<u32, NetlinkError> {
        self.bind("netdev bind-tx", BIND_TX, tx_binding(ifindex, dmabuf))
    }

    /// The special user of a receive queue.
    pub fn queue(&mut self, ifindex: u32, queue: u32) -> Result<QueueState, NetlinkError> {
        let question =
            Attributes::new().u32(QUEUE_IFINDEX, ifindex).u32(QUEUE_TYPE, TYPE_RX).u32(QUEUE_ID, queue);
        Ok(state_of(self.family.ask("netdev queue-get", QUEUE_GET, &question)?.attributes()))
    }

    /// The special users of all receive queues of a device, by queue number. A device that is down has none.
    pub fn queues(&mut self, ifindex: u32) -> Result<Vec<(u32, QueueState)>, NetlinkError> {
        let question = Attributes::new().u32(QUEUE_IFINDEX, ifindex);
        let all = self.family.list("netdev queue-get", QUEUE_GET, &question)?;
        Ok(all.iter().filter_map(|reply| rx_queue(reply.attributes())).collect())
    }

    /// The capabilities of the network device with this index.
    pub fn device(&mut self, ifindex: u32) -> Result<Device, NetlinkError> {
        let question = Attributes::new().u32(DEV_IFINDEX, ifindex);
        let reply = self.family.ask("netdev dev-get", DEV_GET, &question)?;
        let features = |kind| reply.attributes().number(kind).unwrap_or(0);
        Ok(Device { xdp_features: features(DEV_XDP_FEATURES), xsk_features: features(DEV_XSK_FEATURES) })
    }

    fn bind(&mut self, call: &'static str, command: u8, binding: Attributes) -> Result<u32, NetlinkError> {
        let reply =
            self.family.ask(call, command, &binding).map_err(|error| name_unknown_request(error, command))?;
        number_of(&reply).ok_or(NetlinkError {
            errno: Errno::PROTO.raw_os_error(),
            text: None,
            call,
            known: None,
        })
    }
}

/// Gives a text to the refusal of a request that the kernel does not know. The kernel returns the same number,
/// without text, for a device that does not support a request.
fn name_unknown_request(error: NetlinkError, command: u8) -> NetlinkError {
    let alike = error.errno == libc::EOPNOTSUPP && error.text.is_none();
    if alike && netlink::knows(FAMILY, command) == Ok(false) {
        NetlinkError {
            text: Some("this kernel has no such request".to_owned()),
            known: Some(KnownRefusal::NoSuchRequest),
            ..error
        }
    } else {
        error
    }
}

/// The id of a binding in a reply; an id is never 0.
fn number_of(reply: &Reply) -> Option<u32> {
    reply.attributes().u32(DMABUF_ID).filter(|&id| id != 0)
}

fn tx_binding(ifindex: u32, dmabuf: BorrowedFd<'_>) -> Attributes {
    Attributes::new().u32(DMABUF_IFINDEX, ifindex).u32(DMABUF_FD, dmabuf.as_raw_fd() as u32)
}

fn rx_binding(ifindex: u32, queues: &[u32], dmabuf: BorrowedFd<'_>) -> Attributes {
    let queue = |&id: &u32| Attributes::new().u32(QUEUE_ID, id).u32(QUEUE_TYPE, TYPE_RX);
    queues.iter().fold(tx_binding(ifindex, dmabuf), |all, id| all.nest(DMABUF_QUEUES, queue(id)))
}

/// The special user of a queue, from its attributes.
pub fn state_of(queue: AttributeList<'_>) -> QueueState {
    QueueState {
        dmabuf: queue.u32(QUEUE_DMABUF),
        io_uring: queue.find(QUEUE_IO_URING).is_some(),
        xsk: queue.find(QUEUE_XSK).is_some(),
    }
}

/// Number and special user of a queue, if it is a receive queue.
pub fn rx_queue(queue: AttributeList<'_>) -> Option<(u32, QueueState)> {
    (queue.u32(QUEUE_TYPE)? == TYPE_RX).then_some((queue.u32(QUEUE_ID)?, state_of(queue)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    /// The index of loopback in every network namespace.
    const LO: u32 = 1;

    fn netdev() -> Option<Netdev> {
        Netdev::open()
            .inspect_err(|error| println!("SKIPPED: needs the kernel's netdev family: {error}"))
            .ok()
    }

    fn some_file() -> std::os::fd::OwnedFd {
        ferrywire_sys::mapping::anonymous_file(4096).expect("memory")
    }

    #[test]
    fn a_request_to_bind_is_what_the_kernel_reads() {
        let file = some_file();
        let fd = file.as_raw_fd() as u32;
        let request = rx_binding(7, &[3, 1], file.as_fd());
        let list = AttributeList::new(request.bytes().expect("short"));
        assert_eq!((list.u32(DMABUF_IFINDEX), list.u32(DMABUF_FD)), (Some(7), Some(fd)));
        let nests = list.into_iter().filter(|(kind, _)| *kind == DMABUF_QUEUES);
        let queues: Vec<_> = nests
            .map(|(_, nest)| AttributeList::new(nest))
            .map(|queue| (queue.u32(QUEUE_ID), queue.u32(QUEUE_TYPE)))
            .collect();
        assert_eq!(queues, [(Some(3), Some(0)), (Some(1), Some(0))]);
    }

    #[test]
    fn a_queues_state_is_read() {
        let reported = |attributes: Attributes| {
            rx_queue(AttributeList::new(attributes.bytes().expect("short"))).map(|(_, state)| state)
        };
        let queue = |kind| Attributes::new().u32(QUEUE_ID, 2).u32(QUEUE_IFINDEX, 7).u32(QUEUE_TYPE, kind);
        let free = QueueState::default();
        assert_eq!(reported(queue(TYPE_RX)), Some(free));
        assert_eq!(reported(queue(1)), None, "one that sends");
        let bound = reported(queue(TYPE_RX).u32(QUEUE_DMABUF, 5)).expect("it receives");
        assert_eq!((bound, bound.is_free()), (QueueState { dmabuf: Some(5), ..free }, false));
        let nested = |kind| reported(queue(TYPE_RX).nest(kind, Attributes::new()));
        assert_eq!(nested(QUEUE_IO_URING), Some(QueueState { io_uring: true, ..free }));
        assert_eq!(nested(QUEUE_XSK), Some(QueueState { xsk: true, ..free }));
    }

    // `tests/devmem/bind.rs` has the bindings that loopback refuses, beside those of other NICs.
    #[test]
    fn loopback_reports_its_properties() {
        let Some(mut netdev) = netdev() else { return };
        if let Err(error) = netdev.device(LO) {
            assert_eq!(error.errno, libc::EOPNOTSUPP, "{error}");
        }
        let missing = netdev.device(1 << 30).expect_err("there is none");
        assert_eq!(missing.errno, libc::ENODEV, "{missing}");
        let refused = netdev.bind_rx_pages(LO, &[0], some_file().as_fd(), 12288).expect_err("three pages");
        assert_eq!(refused.errno, libc::EINVAL, "{refused}");
        assert_eq!(refused.known, Some(KnownRefusal::OddPageBytes));
    }

    #[test]
    fn a_request_that_the_kernel_does_not_know_has_its_own_error() {
        let Some(mut netdev) = netdev() else { return };
        let binding = || rx_binding(LO, &[0], some_file().as_fd());
        let refused = netdev.bind("a binding of later kernels", 250, binding()).expect_err("no such command");
        assert_eq!(refused.errno, libc::EOPNOTSUPP, "{refused}");
        assert_eq!(refused.known, Some(KnownRefusal::NoSuchRequest));
        assert_eq!(netlink::knows(FAMILY, 250), Ok(false));
        assert_eq!(netlink::knows(FAMILY, DEV_GET), Ok(true));
    }

    #[test]
    fn queues_of_a_device_that_is_up_are_listed() {
        let Some(mut netdev) = netdev() else { return };
        let queues = match netdev.queues(LO) {
            Ok(queues) => queues,
            Err(error) => return println!("SKIPPED: needs a kernel that lists queues: {error}"),
        };
        for (index, state) in queues {
            assert_eq!(netdev.queue(LO, index).map_err(|error| error.errno), Ok(state));
        }
    }
}
