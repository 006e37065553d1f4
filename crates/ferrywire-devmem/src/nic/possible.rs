//! Whether a NIC supports devmem TCP, as far as this can be found without changing anything.
//!
//! Read next: `topology/` of `ferrywire-host`, which shows it.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd};

use super::super::{BindCause, DevmemError};
use super::error::{Missing, NicError};
use super::kernel::{Host, Kernel};
use crate::sys::ethtool::Split;
use crate::sys::netdev::Netdev;
use crate::sys::netlink::NetlinkError;
use ferrywire_sys::mapping;
use ferrywire_sys::nics;

/// The kernel's index of the loopback interface, in every network namespace.
const LOOPBACK: u32 = 1;
const OS_RELEASE: &str = "/proc/sys/kernel/osrelease";

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
    /// Whether no claim would succeed, whatever else is unknown.
    pub fn is_ruled_out(&self) -> bool {
        self.receives == Some(false) || self.steers == Some(false)
    }

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
    match is_supported(nic, index) {
        Ok(true) => found.receives = Some(true),
        Ok(false) => found.unsupported_reason.push(probe_says_nothing(nic)),
        Err(error) => {
            let unknown = matches!(&error, DevmemError::Bind { cause: BindCause::NotAllowed, .. });
            found.receives = (!unknown).then_some(false);
            found.unsupported_reason.push(error.to_string());
        }
    }
    found.sends = probe(|netdev, fd| netdev.bind_tx(index, fd))
        .map_or_else(|error| answer(error.errno, libc::EOPNOTSUPP), Some);
}

/// Whether the NIC's driver is known to receive into device memory; false if this kernel's answer says nothing. Tries to
/// bind a descriptor that is not a dma-buf: a driver without support refuses before the memory is checked, and with
/// support nothing changes.
///
/// # Errors
/// The driver has no support, or the kernel does not permit the question.
pub(super) fn is_supported(nic: &str, index: u32) -> Result<bool, DevmemError> {
    let refused = |index| probe(|netdev, fd| netdev.bind_rx(index, &[0], fd)).err();
    let Some(error) = refused(index) else { return Ok(true) };
    let of_loopback = refused(LOOPBACK).map_or(0, |error| error.errno);
    match answer(error.errno, of_loopback) {
        Some(true) => Ok(true),
        None if is_about_memory(error.errno) => Ok(false),
        _ => Err(DevmemError::bind_rx(nic, &[], &error)),
    }
}

fn probe_says_nothing(nic: &str) -> String {
    let kernel = fs::read_to_string(OS_RELEASE).unwrap_or_default();
    format!(
        "NIC {nic}: Linux {} checks the memory before the driver, so only a run with --transport devmem shows whether the \
         driver can receive into device memory",
        kernel.trim()
    )
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

/// Whether the probe found support, from its errno at the NIC and at loopback, which never has support; `None` if that
/// is unknown. An errno about the memory means support, unless the kernel (Linux 6.12 to 6.14) checks the memory before
/// the driver: then loopback's is about the memory too.
fn answer(of_nic: i32, of_loopback: i32) -> Option<bool> {
    match of_nic {
        _ if is_about_memory(of_nic) => (!is_about_memory(of_loopback)).then_some(true),
        libc::EPERM | libc::EACCES => None,
        _ => Some(false),
    }
}

fn is_about_memory(errno: i32) -> bool {
    matches!(errno, libc::EINVAL | libc::EBADF)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: kernels that check the memory before the driver seemed to support devmem TCP on every NIC.
    #[test]
    fn an_answer_about_the_memory_is_support_unless_loopback_gives_it_too() {
        use libc::{EACCES, EBADF, EINVAL, ENODEV, ENOENT, EOPNOTSUPP, EPERM};
        for (of_nic, of_loopback, expected) in [
            (EINVAL, EOPNOTSUPP, Some(true)),
            (EBADF, EOPNOTSUPP, Some(true)),
            (EINVAL, ENODEV, Some(true)),
            (EINVAL, EINVAL, None),
            (EINVAL, EBADF, None),
            (EBADF, EINVAL, None),
            (EOPNOTSUPP, EOPNOTSUPP, Some(false)),
            (EOPNOTSUPP, EINVAL, Some(false)),
            (ENOENT, ENOENT, Some(false)),
            (EPERM, EPERM, None),
            (EACCES, EACCES, None),
        ] {
            assert_eq!(
                answer(of_nic, of_loopback),
                expected,
                "{of_nic} at the NIC, {of_loopback} at loopback"
            );
        }
    }

    #[test]
    fn a_probe_that_says_nothing_names_the_kernel_and_is_not_yes() {
        let found = Possible { unsupported_reason: vec![probe_says_nothing("eth1")], ..Possible::default() };
        let kernel = fs::read_to_string(OS_RELEASE).expect("a kernel");
        assert!(found.unsupported_reason[0].contains(&format!("Linux {} ", kernel.trim())), "{found:?}");
        assert!(!found.is_possible());
    }
}
