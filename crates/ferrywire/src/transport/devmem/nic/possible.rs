//! Whether a NIC can do devmem TCP, as far as it can be told without changing anything.
//!
//! Read next: `../../../topology/`, which shows it.

use std::os::fd::AsFd;

use super::super::DevmemError;
use super::error::{Missing, NicError};
use super::kernel::{Host, Kernel};
use crate::sys::ethtool::Split;
use crate::sys::mapping;
use crate::sys::netdev::Netdev;
use crate::sys::nics;

/// What a NIC can do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Possible {
    /// It receives into device memory; `None`: that cannot be told, and `why_not` says why.
    pub receives: Option<bool>,
    /// It sends from device memory.
    pub sends: Option<bool>,
    /// Receive queues that nobody has, queue 0 left out.
    pub free_queues: usize,
    /// Settings that it would take, of which `--allow-nic-setup` takes care.
    pub missing: Vec<String>,
    /// What is in the way, in words.
    pub why_not: Vec<String>,
}

impl Possible {
    /// Whether a claim of a queue would work, as far as can be told.
    pub fn is_possible(&self) -> bool {
        self.receives == Some(true) && self.free_queues > 0
    }
}

/// Asks the kernel about a NIC.
pub fn possible(nic: &str) -> Possible {
    let mut found = Possible::default();
    let Some(index) = nics::index(nic) else {
        found.why_not.push(NicError::NoNic { nic: nic.to_owned() }.to_string());
        return found;
    };
    ask_driver(nic, index, &mut found);
    if found.receives == Some(false) {
        return found;
    }
    match Host::open(nic, index) {
        Ok(mut kernel) => ask_settings(nic, &mut kernel, &mut found),
        Err(error) => found.why_not.push(error.to_string()),
    }
    found
}

/// Asks to bind what is no dma-buf: a driver that cannot bind refuses that before anybody looks at the memory, one that
/// can leaves everything as it is.
fn ask_driver(nic: &str, index: u32, found: &mut Possible) {
    let not_dmabuf = match mapping::anonymous_file(mapping::PAGE_BYTES) {
        Ok(file) => file,
        Err(error) => return found.why_not.push(error.to_string()),
    };
    let mut netdev = match Netdev::open() {
        Ok(netdev) => netdev,
        Err(error) => {
            (found.receives, found.sends) = (Some(false), Some(false));
            return found.why_not.push(DevmemError::bind_rx(nic, &[], &error).to_string());
        }
    };
    if let Err(error) = netdev.bind_rx(index, &[0], not_dmabuf.as_fd()) {
        found.receives = answer(error.errno);
        if found.receives != Some(true) {
            found.why_not.push(DevmemError::bind_rx(nic, &[], &error).to_string());
        }
    }
    if let Err(error) = netdev.bind_tx(index, not_dmabuf.as_fd()) {
        found.sends = answer(error.errno);
    }
}

/// `EINVAL` is about the memory, so the driver had no objection.
fn answer(errno: i32) -> Option<bool> {
    match errno {
        libc::EINVAL | libc::EBADF => Some(true),
        libc::EPERM | libc::EACCES => None,
        _ => Some(false),
    }
}

fn ask_settings(nic: &str, kernel: &mut dyn Kernel, found: &mut Possible) {
    match kernel.queues() {
        Ok(queues) => {
            let free = queues.iter().filter(|(queue, state)| *queue != 0 && state.is_free());
            found.free_queues = free.count();
            if found.free_queues == 0 {
                let up = if queues.is_empty() { "is it up?" } else { "the first one is everybody's" };
                found.why_not.push(format!("NIC {nic} has no receive queue to spare: {up}"));
            }
        }
        Err(error) => found.why_not.push(error.to_string()),
    }
    if let Ok(rings) = kernel.rings() {
        let is = match (rings.split, rings.threshold_bytes) {
            (Some(Split::Off), _) => Some("it is off"),
            (_, Some(1..)) => Some("its threshold is not 0"),
            _ => None,
        };
        found.missing.extend(is.map(|is| Missing::Split { is }.to_string()));
    }
    match kernel.ntuple() {
        Ok(feature) if !feature.on && !feature.changeable => {
            found
                .why_not
                .push(format!("NIC {nic} has no rules for flows (ntuple), and its driver offers none"));
        }
        Ok(feature) if !feature.on => found.missing.push(Missing::Ntuple.to_string()),
        _ => {}
    }
}
