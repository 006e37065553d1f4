//! The calls of the kernel that a claim makes about one NIC: a trait, so that tests can replace the kernel.
//!
//! Read next: `settings.rs`, which decides by the results.

use std::io;
use std::os::fd::BorrowedFd;

use crate::sys::ethtool::{Ethtool, Feature, NTUPLE, Rings};
use crate::sys::flow::{Flow, Flows};
use crate::sys::netdev::{Netdev, QueueState};
use crate::sys::netlink::NetlinkError;

type Result<T> = std::result::Result<T, NetlinkError>;

/// The kernel's view of one NIC. Bindings last until [`Kernel::unbind`], or until the value is dropped.
pub(super) trait Kernel: Send {
    /// The NIC's receive queues and their users, by queue number.
    fn queues(&mut self) -> Result<Vec<(u32, QueueState)>>;
    fn rings(&mut self) -> Result<Rings>;
    fn set_rings(&mut self, rings: Rings) -> Result<()>;
    fn ntuple(&mut self) -> Result<Feature>;
    fn set_ntuple(&mut self, on: bool) -> Result<()>;
    /// The queues over which flows without a rule are spread; empty if the driver does not report them.
    fn spread(&mut self) -> Result<Vec<u32>>;
    /// Changes the spread of flows without a rule; an empty table restores the kernel's default.
    fn set_spread(&mut self, table: &[u32]) -> Result<()>;
    fn insert(&mut self, flow: &Flow) -> Result<u32>;
    fn delete(&mut self, location: u32) -> Result<()>;
    /// The flow rule at a location; `None` if the rule is not for a single connection. A missing rule is `ENOENT`,
    /// or `EINVAL` with some drivers.
    fn rule(&mut self, location: u32) -> Result<Option<Flow>>;
    fn rules(&mut self) -> Result<Vec<u32>>;
    fn bind(&mut self, queues: &[u32], dmabuf: BorrowedFd<'_>) -> Result<u32>;
    fn unbind(&mut self);
}

/// The kernel of this host, as the trait's implementation.
#[derive(Debug)]
pub(super) struct Host {
    nic: String,
    index: u32,
    ethtool: Ethtool,
    flows: Flows,
    /// Netlink connection for bindings, opened when first needed; the bindings end with it.
    netdev: Option<Netdev>,
}

impl Host {
    pub fn open(nic: &str, index: u32) -> Result<Host> {
        let flows = Flows::open(nic).map_err(netlink_error("ethtool socket"))?;
        Ok(Host { nic: nic.to_owned(), index, ethtool: Ethtool::open()?, flows, netdev: None })
    }

    fn netdev(&mut self) -> Result<&mut Netdev> {
        let netdev = match self.netdev.take() {
            Some(netdev) => netdev,
            None => Netdev::open()?,
        };
        Ok(self.netdev.insert(netdev))
    }
}

/// Converts an error of the older `ethtool` calls, which return no text.
fn netlink_error(call: &'static str) -> impl Fn(io::Error) -> NetlinkError {
    move |error| NetlinkError {
        errno: error.raw_os_error().unwrap_or(libc::EIO),
        text: None,
        call,
        known: None,
    }
}

impl Kernel for Host {
    fn queues(&mut self) -> Result<Vec<(u32, QueueState)>> {
        let index = self.index;
        self.netdev()?.queues(index)
    }

    fn rings(&mut self) -> Result<Rings> {
        self.ethtool.rings(&self.nic)
    }

    fn set_rings(&mut self, rings: Rings) -> Result<()> {
        self.ethtool.set_rings(&self.nic, rings)
    }

    fn ntuple(&mut self) -> Result<Feature> {
        self.ethtool.feature(&self.nic, NTUPLE)
    }

    fn set_ntuple(&mut self, on: bool) -> Result<()> {
        self.ethtool.set_feature(&self.nic, NTUPLE, on)
    }

    fn spread(&mut self) -> Result<Vec<u32>> {
        match self.flows.spread() {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(Vec::new()),
            spread => spread.map_err(netlink_error("ethtool get-rxfh")),
        }
    }

    fn set_spread(&mut self, table: &[u32]) -> Result<()> {
        self.flows.set_spread(table).map_err(netlink_error("ethtool set-rxfh"))
    }

    fn insert(&mut self, flow: &Flow) -> Result<u32> {
        self.flows.insert(flow).map_err(netlink_error("ethtool add-rule"))
    }

    fn delete(&mut self, location: u32) -> Result<()> {
        self.flows.delete(location).map_err(netlink_error("ethtool delete-rule"))
    }

    fn rule(&mut self, location: u32) -> Result<Option<Flow>> {
        self.flows.rule(location).map_err(netlink_error("ethtool get-rule"))
    }

    fn rules(&mut self) -> Result<Vec<u32>> {
        match self.flows.rules() {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(Vec::new()),
            rules => rules.map_err(netlink_error("ethtool list-rules")),
        }
    }

    fn bind(&mut self, queues: &[u32], dmabuf: BorrowedFd<'_>) -> Result<u32> {
        let index = self.index;
        self.netdev()?.bind_rx(index, queues, dmabuf)
    }

    fn unbind(&mut self) {
        self.netdev = None;
    }
}
