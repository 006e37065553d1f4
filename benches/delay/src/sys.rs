//! TUN devices and exact sleeping. All `unsafe` of this program is here.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

const IFF_TUN: libc::c_short = 0x0001;
const IFF_NO_PI: libc::c_short = 0x1000;
const IFF_VNET_HDR: libc::c_short = 0x4000;
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
const CSUM_AND_TSO4: libc::c_ulong = 0x01 | 0x02;

/// A TUN device. It is removed when this value is dropped.
pub struct Tun(File);

impl Tun {
    /// Creates a TUN device that takes packets of many segments.
    pub fn create(name: &str) -> io::Result<Tun> {
        let file =
            OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
        // SAFETY: all-zero is a valid ifreq.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        if name.len() >= request.ifr_name.len() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("the device name '{name}' is too long"),
            ));
        }
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *to = from as libc::c_char;
        }
        request.ifr_ifru.ifru_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
        // SAFETY: TUNSETIFF reads and writes one ifreq, which outlives the call.
        check(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF as _, &mut request) })?;
        // SAFETY: TUNSETOFFLOAD takes its flags by value.
        check(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETOFFLOAD as _, CSUM_AND_TSO4) })?;
        Ok(Tun(file))
    }

    /// Reads a packet with its prefix; `None` if none waits, or the device is down.
    pub fn read(&self, into: &mut [u8]) -> io::Result<Option<usize>> {
        match io::Read::read(&mut &self.0, into) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Writes a packet to the kernel. A packet that the kernel refuses is lost, as on any network.
    pub fn write(&self, packet: &[u8]) {
        let _ = io::Write::write(&mut &self.0, packet);
    }

    /// Waits until a packet can be read, for at most `at_most`.
    pub fn wait_readable(&self, at_most: Option<Duration>) -> io::Result<()> {
        let mut poll = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let time = at_most.map(|t| libc::timespec {
            tv_sec: t.as_secs() as libc::time_t,
            tv_nsec: t.subsec_nanos().into(),
        });
        let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: one pollfd and, unless null, one timespec, both of which outlive the call; no signal mask.
        match check(unsafe { libc::ppoll(&mut poll, 1, time, std::ptr::null()) }) {
            Err(e) if e.kind() != io::ErrorKind::Interrupted => Err(e),
            _ => Ok(()),
        }
    }
}

/// Makes the timers of the calling thread fire when they are due, not some 50 us later.
pub fn wake_exactly() {
    // SAFETY: PR_SET_TIMERSLACK takes a number and touches no memory.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
