//! The NICs of the VM of `tests/devmem-vm`: what they have counted, and the harm that they can be made to do.

use crate::vm::Hosts;
use std::fs;
use std::os::fd::AsRawFd;

/// A counter that a NIC keeps per queue.
#[derive(Clone, Copy)]
pub enum Counter {
    /// Packets whose payload went to a pool.
    DevmemPackets,
    /// Packets that were dropped since its pool was empty.
    PoolEmpty,
}

/// The NIC's own counters of a host, for each receive queue.
pub fn counted(hosts: &Hosts, end: usize, what: Counter) -> Vec<u64> {
    const NAMES_MAX: usize = 64;
    #[repr(C)]
    struct Names {
        head: [u32; 3],
        names: [[u8; 32]; NAMES_MAX],
    }
    #[repr(C)]
    struct Counts {
        head: [u32; 2],
        counts: [u64; NAMES_MAX],
    }
    const GSTRINGS: u32 = 0x1b;
    const GSTATS: u32 = 0x1d;
    const OF_STATISTICS: u32 = 1;
    let mut names = Names { head: [GSTRINGS, OF_STATISTICS, 0], names: [[0; 32]; NAMES_MAX] };
    let mut counts = Counts { head: [GSTATS, 0], counts: [0; NAMES_MAX] };
    hosts.on(end, || {
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
        for data in [(&raw mut names).cast::<libc::c_char>(), (&raw mut counts).cast()] {
            // SAFETY: all zero is a request without a name.
            let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
            for (to, from) in request.ifr_name.iter_mut().zip(format!("dm{end}").bytes()) {
                *to = from as libc::c_char;
            }
            request.ifr_ifru.ifru_data = data;
            // SAFETY: SIOCETHTOOL with room for more statistics than this NIC has.
            let result = unsafe { libc::ioctl(AsRawFd::as_raw_fd(&socket), 0x8946, &raw mut request) };
            assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        }
    });
    let reported = names.head[2] as usize;
    assert!(reported > 0 && reported <= NAMES_MAX, "{reported} statistics");
    let counted = names.names[..reported].iter().zip(counts.counts);
    let ending = match what {
        Counter::DevmemPackets => "_devmem_pkts",
        Counter::PoolEmpty => "_alloc_fail",
    };
    let is_it = |name: &[u8; 32]| String::from_utf8_lossy(name).trim_end_matches('\0').ends_with(ending);
    counted.filter(|(name, _)| is_it(name)).map(|(_, count)| count).collect()
}

/// A setting of the NICs' driver, until it is dropped.
pub struct Knob(&'static str, String);

impl Knob {
    pub fn set(name: &'static str, value: &str) -> Knob {
        let knob = Knob(name, fs::read_to_string(format!("/sys/module/dmnic/parameters/{name}")).unwrap());
        knob.turn(value);
        knob
    }

    /// Another value.
    pub fn turn(&self, value: &str) {
        fs::write(format!("/sys/module/dmnic/parameters/{}", self.0), value).unwrap();
    }
}

impl Drop for Knob {
    fn drop(&mut self) {
        self.turn(&self.1);
    }
}
