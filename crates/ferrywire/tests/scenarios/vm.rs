//! Two hosts for devmem TCP: the namespaces that the VM of `tests/devmem-vm` prepares.
//!
//! The first endpoint of a scenario is on one host, all others are on the other one, so that whatever is connected to
//! the first crosses a NIC. Whatever opens sockets for an endpoint has to be called on its host.

use crate::boot;
use ferrywire::{Builder, Endpoint, MemoryLocation};
use ferrywire_devmem::DevmemConfig;
use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Addresses of the NICs here and there.
pub const HERE: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
pub const THERE: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
const SECRET: &[u8] = b"the two hosts of one virtual machine";

/// Longest any single wait may be, however busy the machine is.
pub const LIMIT: Duration = Duration::from_secs(60);

/// The two hosts.
#[derive(Clone)]
pub struct Hosts {
    there: Arc<File>,
}

impl Hosts {
    /// The hosts that this process was given; `None` outside of the VM.
    pub fn here() -> Option<Hosts> {
        let Ok(peer) = std::env::var("PEER_PID") else {
            println!("SKIPPED: runs in the VM of tests/devmem-vm, with its option -n");
            return None;
        };
        let there = File::open(format!("/proc/{peer}/ns/net")).unwrap();
        Some(Hosts { there: Arc::new(there) })
    }

    /// An endpoint on the host of this index, over TCP.
    pub fn plain(&self, index: usize) -> Builder {
        let address = IpAddr::V4(if index == 0 { HERE } else { THERE });
        Endpoint::builder().listen(SocketAddr::new(address, 0)).secret(SECRET)
    }

    /// Devmem TCP with memory of this simulated GPU.
    pub fn devmem(&self, gpu: Option<u32>) -> DevmemConfig {
        let devmem = DevmemConfig::default().allow_nic_setup(true);
        match gpu {
            Some(gpu) => devmem.gpu(MemoryLocation::SimGpu(gpu)),
            None => devmem,
        }
    }

    /// An endpoint on the host of this index, with both.
    pub fn builder(&self, index: usize, gpu: Option<u32>) -> Builder {
        self.plain(index).channels(3).payload_backend(self.devmem(gpu))
    }

    /// Does something on that host.
    pub fn on<T: Send>(&self, index: usize, body: impl FnOnce() -> T + Send) -> T {
        if index == 0 {
            return body();
        }
        thread::scope(|scope| {
            let there = scope.spawn(|| {
                // SAFETY: no memory is passed.
                let moved = unsafe { libc::setns(self.there.as_raw_fd(), libc::CLONE_NEWNET) };
                assert_eq!(moved, 0, "{}", std::io::Error::last_os_error());
                body()
            });
            there.join().unwrap()
        })
    }
}

/// The scenarios that the gate has time for.
const SOME: [&str; 7] = [
    "devmem::a_pool_that_a_stalled_gpu",
    "devmem::an_end_that_cannot",
    "devmem::bytes_land_in_the_pool",
    "devmem::tcp_and_devmem_share_a_port",
    "devmem_regions::",
    "on_devmem::blocks_are_written_and_read",
    "on_devmem::cancelled_receives_leave",
];

#[test]
fn scenarios_pass_in_the_vm() {
    boot::pass_in_the_vm(&[9000], 500, &SOME);
}

/// All of them, at both MTUs, with memory of hosts and GPUs.
#[test]
fn all_scenarios_pass_in_the_vm() {
    match std::env::var_os("FERRYWIRE_LONG").is_some() {
        true => boot::pass_in_the_vm(&[1500, 9000], 3600, &["devmem"]),
        false => println!("SKIPPED: needs FERRYWIRE_LONG=1, since it takes an hour"),
    }
}
