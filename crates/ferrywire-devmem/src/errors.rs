//! The errors of devmem TCP: the kernel's numbers and text, translated to a cause and a fix.
//!
//! The kernel has a handful of numbers for several dozen causes. [`BindCause::of`] and [`SendCause::of`]
//! distinguish the causes, by the kernel's text where there is any. The kernel's text is always kept beside the
//! cause.
//! Invariant: every number comes with a sentence that says who has to act. An unknown cause is reported in the kernel's
//! text.
//! Read next: `nic.rs`, which returns most of these errors.

use std::fmt;
use std::io;

use crate::sys::devmem::ReceiveFault;
use crate::sys::netlink::{KnownRefusal, NetlinkError};
use ferrywire::ErrorKind;

/// Why memory cannot be received into or sent from.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DevmemError {
    /// Memory could not be bound to a NIC.
    #[error("NIC {nic}{}: {cause}{} [{said}]", listed(queues), by_hand(cause.command(nic)))]
    Bind {
        /// Name of the NIC that the memory was to be bound to.
        nic: String,
        /// The queues that were to be bound; empty for a binding to send from.
        queues: Vec<u32>,
        /// Why the memory could not be bound, as far as it is known.
        cause: BindCause,
        /// The kernel's text about the refusal.
        said: String,
    },
    /// A setting of a NIC could not be read or changed.
    #[error("NIC {nic}: cannot {what}: {said}{}", by_hand(hint.clone()))]
    Setting {
        /// Name of the NIC whose setting is concerned.
        nic: String,
        /// The action on the setting that failed.
        what: String,
        /// The kernel's text about the refusal.
        said: String,
        /// A command that makes the change by hand; empty where there is none.
        hint: String,
    },
    /// A send from device memory was refused; none of its bytes were sent.
    #[error("NIC {nic}: nothing was sent from dma-buf {dmabuf}: {cause} [{said}]")]
    Send {
        /// Name of the NIC that the dma-buf is bound to.
        nic: String,
        /// The kernel's id of the binding.
        dmabuf: u32,
        /// Why the send was refused, as far as it is known.
        cause: SendCause,
        /// The system's text about the refusal.
        said: String,
    },
    /// Received bytes cannot be used.
    #[error("NIC {nic}: cannot receive from {peer}: {fault}")]
    Receive {
        /// Name of the NIC whose bytes were received.
        nic: String,
        /// The address of the peer that has sent the bytes.
        peer: String,
        /// Why the received bytes cannot be used.
        fault: ReceiveFault,
    },
    /// A fragment is not inside the pool of this connection.
    #[error(
        "NIC {nic}: a fragment of {bytes} bytes at offset {offset} of dma-buf {dmabuf} is outside the pool ({pool_bytes} bytes, \
         dma-buf {pool})"
    )]
    OutsidePool {
        /// Name of the NIC that received the fragment.
        nic: String,
        /// The id of the dma-buf that the kernel reports for the fragment.
        dmabuf: u32,
        /// Offset of the fragment's first byte in the dma-buf.
        offset: u64,
        /// The fragment's length in bytes.
        bytes: u32,
        /// The kernel's id of the pool.
        pool: u32,
        /// The pool's size in bytes.
        pool_bytes: u64,
    },
    /// The kernel did not take fragments back, so the pool would run dry.
    #[error(
        "NIC {nic}: the kernel refused {unknown} of {returned} returned fragments: this connection did not hold them"
    )]
    UnknownTokens {
        /// Name of the NIC whose pool the fragments are in.
        nic: String,
        /// The number of fragments that the kernel did not know.
        unknown: usize,
        /// The number of fragments that were returned.
        returned: usize,
    },
}

impl DevmemError {
    /// The error of binding queues to a pool.
    pub fn bind_rx(nic: &str, queues: &[u32], error: &NetlinkError) -> DevmemError {
        let cause = BindCause::of(Direction::Receive, error);
        DevmemError::Bind { nic: nic.into(), queues: queues.into(), cause, said: error.to_string() }
    }

    /// The error of binding a NIC to memory to send from.
    pub fn bind_tx(nic: &str, error: &NetlinkError) -> DevmemError {
        let cause = BindCause::of(Direction::Send, error);
        DevmemError::Bind { nic: nic.into(), queues: Vec::new(), cause, said: error.to_string() }
    }

    /// The error of a send. Not for errors that any connection has (reset, would block).
    pub fn send(nic: &str, dmabuf: u32, error: &io::Error) -> DevmemError {
        let cause = SendCause::of(error);
        DevmemError::Send { nic: nic.into(), dmabuf, cause, said: error.to_string() }
    }

    /// The error of a receive, if its cause is devmem's; `None` for errors that any connection has.
    pub fn receive(nic: &str, peer: &str, error: &io::Error) -> Option<DevmemError> {
        let fault = error.get_ref()?.downcast_ref::<ReceiveFault>()?.clone();
        Some(DevmemError::Receive { nic: nic.into(), peer: peer.into(), fault })
    }

    /// The kind of the error, which says who has to act.
    pub fn kind(&self) -> ErrorKind {
        match self {
            DevmemError::Bind { .. } | DevmemError::Setting { .. } => ErrorKind::Local,
            DevmemError::Send { cause, .. } => cause.kind(),
            DevmemError::Receive { fault: ReceiveFault::NoRoom, .. } => ErrorKind::Internal,
            DevmemError::Receive { .. } | DevmemError::OutsidePool { .. } => ErrorKind::Local,
            DevmemError::UnknownTokens { .. } => ErrorKind::Internal,
        }
    }
}

/// The purpose of a binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// A binding of memory to receive into.
    Receive,
    /// A binding of memory to send from.
    Send,
}

/// Why memory could not be bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BindCause {
    /// The kernel has no such request, or no such netlink family.
    NoKernel,
    /// There is no such NIC.
    NoNic,
    /// The process lacks the right to bind memory.
    NotAllowed,
    /// The driver cannot receive into device memory.
    CannotReceive,
    /// The driver cannot send from device memory.
    CannotSend,
    /// Header split is off on the NIC.
    SplitOff,
    /// Header split of the NIC does not apply to short packets.
    SplitThreshold,
    /// There is no such queue, no queue at all, or no dma-buf.
    NoSuchQueue,
    /// The descriptor to be bound is not a dma-buf.
    NoDmabuf,
    /// The queue has other memory bound to it.
    QueueTaken,
    /// An AF_XDP socket uses the queue.
    XdpSocket,
    /// An XDP program uses the NIC.
    XdpProgram,
    /// The memory consists of pieces that are too small.
    Scattered,
    /// The memory's size is not a multiple of the page size.
    OddSize,
    /// The kernel supports no receive buffers larger than a page.
    NoLargeBuffers,
    /// The driver supports no receive buffers larger than a page.
    DriverNoLargeBuffers,
    /// The buffers' size is not a power of 2.
    OddBuffers,
    /// The NIC cannot access memory by itself.
    NoDma,
    /// The NIC cannot access this memory.
    OutOfReach,
    /// Memory could not be bound for another cause, which the kernel's text states.
    Other,
}

/// Text of the kernel that identifies a cause, whatever the number. The first match counts.
///
/// The kernel gives no better source: for most of these it returns `EINVAL` or `EOPNOTSUPP`, and the cause only in the
/// text of an extended acknowledgement. A cause chooses the command that a message proposes, and nothing else.
const WORDS: [(&str, BindCause); 14] = [
    ("tcp-data-split is disabled", BindCause::SplitOff),
    ("hds-thresh is not zero", BindCause::SplitThreshold),
    ("already memory provider bound", BindCause::QueueTaken),
    ("in use by AF_XDP", BindCause::XdpSocket),
    ("XDP program", BindCause::XdpProgram),
    // The kernel often cuts off the rest of this text.
    ("dmabuf sg entry", BindCause::Scattered),
    ("must be a multiple of PAGE_SIZE", BindCause::OddSize),
    ("Unknown attribute type", BindCause::NoLargeBuffers),
    ("does not support: rx_page_size", BindCause::DriverNoLargeBuffers),
    ("does not support netmem TX", BindCause::CannotSend),
    ("doesn't support DMA", BindCause::NoDma),
    ("Failed to bind dmabuf to device", BindCause::OutOfReach),
    ("Failed to map dmabuf attachment", BindCause::OutOfReach),
    ("queue index out of range", BindCause::NoSuchQueue),
];

impl BindCause {
    /// The cause of a refused binding, from the kernel's number and text.
    pub fn of(direction: Direction, error: &NetlinkError) -> BindCause {
        match error.known {
            Some(KnownRefusal::NoSuchRequest) => return BindCause::NoKernel,
            Some(KnownRefusal::OddPageBytes) => return BindCause::OddBuffers,
            None => {}
        }
        let text = error.text.as_deref().unwrap_or("");
        if let Some((_, cause)) = WORDS.iter().find(|(words, _)| text.contains(words)) {
            return *cause;
        }
        match (error.errno, direction) {
            (libc::ENOENT, _) => BindCause::NoKernel,
            (libc::ENODEV, _) => BindCause::NoNic,
            (libc::EPERM | libc::EACCES, _) => BindCause::NotAllowed,
            (libc::EOPNOTSUPP, Direction::Receive) => BindCause::CannotReceive,
            (libc::EOPNOTSUPP, Direction::Send) => BindCause::CannotSend,
            (libc::EEXIST, Direction::Receive) => BindCause::QueueTaken,
            (libc::EBUSY, Direction::Receive) => BindCause::XdpSocket,
            // The kernel gave no text.
            (libc::EINVAL | libc::ERANGE, Direction::Receive) if text.is_empty() => BindCause::NoSuchQueue,
            (libc::EINVAL, Direction::Send) if text.is_empty() => BindCause::NoDmabuf,
            _ => BindCause::Other,
        }
    }

    /// A command that fixes the cause; empty where there is none.
    fn command(self, nic: &str) -> String {
        match self {
            BindCause::SplitOff => format!("ethtool -G {nic} tcp-data-split on hds-thresh 0"),
            BindCause::SplitThreshold => format!("ethtool -G {nic} hds-thresh 0"),
            BindCause::XdpProgram => format!("ip link set {nic} xdp off"),
            _ => String::new(),
        }
    }
}

impl fmt::Display for BindCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BindCause::NoKernel => {
                "this kernel is too old: receiving into device memory needs Linux 6.12 (else use --transport tcp), sending from \
                 it needs 6.16 (else the payload is copied to host memory first)"
            }
            BindCause::NoNic => "there is no such NIC in this network namespace",
            BindCause::NotAllowed => {
                "not permitted: CAP_NET_ADMIN is needed (root, or setcap cap_net_admin+ep) in the user namespace that owns the \
                 network namespace; kernels up to 6.18 need it in the initial user namespace, outside of containers"
            }
            BindCause::CannotReceive => {
                "the driver cannot receive into device memory: gve (DQO), bnxt, mlx5 and fbnic can, in newer kernels; \
                 use --transport tcp"
            }
            BindCause::CannotSend => "the driver cannot send from device memory: the payload is copied to host memory first",
            BindCause::SplitOff => "header split is off: allow ferrywire to turn it on (--allow-nic-setup)",
            BindCause::SplitThreshold => {
                "the header split threshold is not 0: allow ferrywire to set it (--allow-nic-setup)"
            }
            BindCause::NoSuchQueue => {
                "there is no such queue, or the memory is not a dma-buf: check whether the number of queues has changed"
            }
            BindCause::NoDmabuf => "the memory is not a dma-buf: export it from its GPU, or with udmabuf",
            BindCause::QueueTaken => {
                "another run or program has bound memory to a queue: choose other queues, or end that program"
            }
            BindCause::XdpSocket => "an AF_XDP socket uses a queue: choose other queues, or end its program",
            BindCause::XdpProgram => "an XDP program is attached, and XDP cannot read device memory: detach the program",
            BindCause::Scattered => {
                "the memory consists of pieces smaller than the NIC's buffers: allocate one piece, aligned to 2 MiB"
            }
            BindCause::OddSize => "the memory's size is not a multiple of 4096 bytes",
            BindCause::NoLargeBuffers => "this kernel (before 7.3) has no receive buffers larger than a page: leave their size unset",
            BindCause::DriverNoLargeBuffers => {
                "the driver has no receive buffers of this size (bnxt and mlx5 have some): leave their size unset"
            }
            BindCause::OddBuffers => {
                "the size of receive buffers must be a power of 2 and at least 4096 bytes: change it, or leave it unset"
            }
            BindCause::NoDma => "the device has no DMA: use a physical NIC",
            BindCause::OutOfReach => {
                "the NIC cannot access this memory: NIC and GPU need a common PCIe tree (or an IOMMU that connects them), \
                 space in the GPU's BAR1, and the open GPU kernel modules"
            }
            BindCause::Other => "the kernel refuses",
        })
    }
}

/// Why a send from device memory was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SendCause {
    /// The binding has ended or was made to receive, or the socket has no zero copy.
    NotBound,
    /// The bytes are outside of the dma-buf.
    Outside,
    /// The connection's route leaves by another device.
    OtherRoute,
    /// There is no route to the peer.
    NoRoute,
    /// Too many sends are in flight.
    Unfinished,
    /// The send was refused for another cause, which the system's text states.
    Other,
}

impl SendCause {
    /// The cause of a refused send, from the kernel's number.
    pub fn of(error: &io::Error) -> SendCause {
        match error.raw_os_error() {
            Some(libc::EINVAL) => SendCause::NotBound,
            Some(libc::EFAULT) => SendCause::Outside,
            Some(libc::ENODEV) => SendCause::OtherRoute,
            Some(libc::EHOSTUNREACH) => SendCause::NoRoute,
            Some(libc::ENOBUFS) => SendCause::Unfinished,
            _ => SendCause::Other,
        }
    }

    fn kind(self) -> ErrorKind {
        match self {
            SendCause::NotBound | SendCause::Outside => ErrorKind::Internal,
            _ => ErrorKind::Local,
        }
    }
}

impl fmt::Display for SendCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SendCause::NotBound => "the binding for sending has ended, or the socket has no zero copy (SO_ZEROCOPY)",
            SendCause::Outside => "some bytes are outside of the dma-buf",
            SendCause::OtherRoute => {
                "the connection uses another device (loopback, a bridge or a changed route): the memory is bound to this \
                 NIC only"
            }
            SendCause::NoRoute => "the route to the peer is gone",
            SendCause::Unfinished => {
                "too many sends are in flight: raise net.core.optmem_max, or wait for the peer"
            }
            SendCause::Other => "the kernel refuses",
        })
    }
}

fn listed(queues: &[u32]) -> String {
    match queues {
        [] => String::new(),
        [one] => format!(", queue {one}"),
        several => {
            let numbers: Vec<_> = several.iter().map(u32::to_string).collect();
            format!(", queues {}", numbers.join(", "))
        }
    }
}

fn by_hand(command: String) -> String {
    if command.is_empty() { command } else { format!(" (by hand: {command})") }
}

#[cfg(test)]
mod tests;
