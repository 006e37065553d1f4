//! Whether a NIC supports devmem TCP, as far as this can be found without changing anything.
//!
//! Read next: `topology/` of `ferrywire-host`, which shows it.

use std::os::fd::{AsFd, BorrowedFd};

use super::super::{BindCause, DevmemError};
use super::error::{Missing, NicError};
use super::kernel::{Host, Kernel};
use crate::sys::ethtool::Split;
use crate::sys::netdev::Netdev;
use crate::sys::netlink::NetlinkError;
use ferrywire_sys::mapping;
use ferrywire_sys::nics;

/// What a NIC supports of devmem TCP.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Possible {
    /// Whether the NIC can receive into device memory; `None` if that is unknown, for the reason in
    /// `unsupported_reason`.
    pub receives: Option<bool>,
    /// Whether the NIC can send from device memory; `None` if that is unknown.
    pub sends: Option<bool>,
    /// Whether flow rules can steer connections to a queue; `None` if that is unknown.
    pub steers: Option<bool>,
    /// Number of the NIC's free receive queues, without queue 0.
    pub free_queues: usize,
    /// Settings of the NIC that must be changed, which `--allow-nic-setup` permits.
    pub missing: Vec<String>,
    /// Why the NIC does not support devmem TCP, one text per obstacle.
    pub unsupported_reason: Vec<String>,
}

impl Possible {
    /// Whether a claim on a queue of the NIC would succeed, as far as is known.
    pub fn is_possible(&self) -> bool {
        self.receives == Some(true) && self.steers != Some(false) && self.free_queues > 0
    }
}

/// Asks the kernel what a NIC supports, and changes nothing.
pub fn possible(nic: &str) -> Possible {
    let mut found = Possible::default();
    let Some(index) = nics::index(nic) else {
        found.unsupported_reason.push(NicError::NoNic { nic: nic.to_owned() }.to_string());
        return found;
    };
    ask_driver(nic, index, &mut found);
    if found.receives == Some(false) {
        return found;
    }
    match Host::open(nic, index) {
        Ok(mut kernel) => ask_settings(nic, &mut kernel, &mut found),
        Err(error) => found.unsupported_reason.push(error.to_string()),
    }
    found
}

fn ask_driver(nic: &str, index: u32, found: &mut Possible) {
    match refusal(nic, index) {
        Ok(()) => found.receives = Some(true),
        Err(error) => {
            let unknown = matches!(&error, DevmemError::Bind { cause: BindCause::NotAllowed, .. });
            found.receives = (!unknown).then_some(false);
            found.unsupported_reason.push(error.to_string());
        }
    }
    found.sends =
        probe(|netdev, fd| netdev.bind_tx(index, fd)).map_or_else(|error| answer(error.errno), Some);
}

/// Whether the NIC's driver refuses to bind memory. Tries to bind a descriptor that is not a dma-buf: a driver without
/// support refuses before it checks the memory, and with support nothing changes.
pub(super) fn refusal(nic: &str, index: u32) -> Result<(), DevmemError> {
    match probe(|netdev, fd| netdev.bind_rx(index, &[0], fd)) {
        Err(error) if answer(error.errno) != Some(true) => Err(DevmemError::bind_rx(nic, &[], &error)),
        _ => Ok(()),
    }
}

fn probe(
    bind: impl FnOnce(&mut Netdev, BorrowedFd<'_>) -> Result<u32, NetlinkError>,
) -> Result<bool, NetlinkError> {
    let not_dmabuf = mapping::anonymous_file(mapping::PAGE_BYTES).map_err(|error| NetlinkError {
        errno: error.raw_os_error().unwrap_or(libc::EIO),
        text: None,
        call: "allocate memory for a probe",
        known: None,
    })?;
    bind(&mut Netdev::open()?, not_dmabuf.as_fd()).map(|_| true)
}

/// Reads the errno of the probe: `EINVAL` is about the memory, so the driver supports it.
fn answer(errno: i32) -> Option<bool> {
    match errno {
        libc::EINVAL | libc::EBADF => Some(true),
        libc::EPERM | libc::EACCES => None,
        _ => Some(false),
    }
}

pub(super) fn ask_settings(nic: &str, kernel: &mut dyn Kernel, found: &mut Possible) {
    match kernel.queues() {
        Ok(queues) => {
            let free = queues.iter().filter(|(queue, state)| *queue != 0 && state.is_free());
            let free: Vec<u32> = free.map(|(queue, _)| *queue).collect();
            found.free_queues = free.len();
            let spread = kernel.spread().unwrap_or_default();
            let last = free.iter().max().filter(|_| free.iter().all(|queue| spread.contains(queue)));
            let missing = last.map(|last| Missing::Spread { queues: vec![*last], others: *last });
            found.missing.extend(missing.map(|missing| missing.to_string()));
            if found.free_queues == 0 {
                let up = if queues.is_empty() {
                    "the NIC has no queues, so it may be down"
                } else {
                    "queue 0 stays for other flows, and the others are bound"
                };
                found.unsupported_reason.push(format!("NIC {nic} has no free receive queue: {up}"));
            }
        }
        Err(error) => found.unsupported_reason.push(error.to_string()),
    }
    if let Ok(rings) = kernel.rings() {
        let is = match (rings.split, rings.threshold_bytes) {
            (Some(Split::Off), _) => Some("it is off"),
            (_, Some(1..)) => Some("its threshold is not 0"),
            _ => None,
        };
        found.missing.extend(is.map(|is| Missing::Split { is }.to_string()));
    }
    let Ok(ntuple) = kernel.ntuple() else { return };
    found.steers = Some(ntuple.can_be_on());
    if !ntuple.can_be_on() {
        found.unsupported_reason.push(NicError::NoFlowRules { nic: nic.to_owned() }.to_string());
    } else if !ntuple.on {
        found.missing.push(Missing::Ntuple.to_string());
    }
}
