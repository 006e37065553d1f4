//! Memory of a GPU for the NICs of this host.

use crate::{gpu, is_real};
use ferrywire_devmem::sys::ethtool::Ethtool;
use ferrywire_devmem::sys::netdev::Netdev;
use ferrywire_devmem::{BindCause, DevmemError};
use std::os::fd::AsFd;

/// Kernel, driver or right may refuse, but not because of what was given.
#[track_caller]
fn tell(what: &str, outcome: Result<u32, DevmemError>) {
    const GIVEN_WRONG: [BindCause; 3] = [BindCause::NoDmabuf, BindCause::NoNic, BindCause::OddSize];
    match outcome {
        Ok(number) => println!("{what}: bound as {number}"),
        Err(DevmemError::Bind { cause: BindCause::NotAllowed, said, .. }) => {
            println!("SKIPPED: needs CAP_NET_ADMIN: {what}: {said}")
        }
        Err(ref error @ DevmemError::Bind { cause, .. }) => {
            assert!(!GIVEN_WRONG.contains(&cause), "{what}: {error}");
            println!("{what}: {error}")
        }
        Err(other) => panic!("{what}: {other}"),
    }
}

/// A binding that comes about ends with this test. Where the NIC splits headers a queue of the host's would be taken for
/// it, so none is asked for there: that is for `--allow-nic-setup`. Who does not split them is refused by every kernel.
#[test]
fn a_gpus_dma_buf_is_bound_to_each_nic_or_its_refusal_is_reported() {
    let Some(gpu) = gpu().filter(|gpu| is_real(gpu)) else { return };
    let buffer = gpu.alloc(2 << 20, 2 << 20).unwrap();
    let dmabuf = match buffer.dmabuf_fd() {
        Ok(dmabuf) => dmabuf,
        Err(error) => return println!("no dma-buf: {error}"),
    };
    let (mut netdev, mut ethtool) = match (Netdev::open(), Ethtool::open()) {
        (Ok(netdev), Ok(ethtool)) => (netdev, ethtool),
        (Err(error), _) | (_, Err(error)) => return println!("SKIPPED: needs a newer kernel: {error}"),
    };
    for entry in std::fs::read_dir("/sys/class/net").unwrap() {
        let entry = entry.unwrap();
        let nic = entry.file_name().into_string().unwrap();
        // Not all that lies there is a NIC.
        let Ok(number) = std::fs::read_to_string(entry.path().join("ifindex")) else { continue };
        let number = number.trim().parse().unwrap();
        let sent = netdev.bind_tx(number, dmabuf.as_fd());
        tell(&format!("{nic}, to send"), sent.map_err(|error| DevmemError::bind_tx(&nic, &error)));
        let split = ethtool.header_split(&nic);
        if !matches!(split, Ok(None | Some(false))) {
            println!("{nic}, to receive: not tried: {split:?} (whether its headers are split)");
            continue;
        }
        let received = netdev.bind_rx(number, &[0], dmabuf.as_fd());
        let received = received.map_err(|error| DevmemError::bind_rx(&nic, &[0], &error));
        tell(&format!("{nic}, to receive"), received);
    }
}
