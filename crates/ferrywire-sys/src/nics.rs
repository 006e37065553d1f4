//! The network interfaces of this host, and the one that the routing table selects for an address.
//!
//! Invariant: IPv6 link-local addresses are never listed; they cannot be dialled without a scope id.
//! Read next: `tcp/tuning.rs` of `ferrywire-net`, which classifies a path by these addresses.

use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::checked;

/// One address of a network interface. An interface with two addresses is two `Nic`s.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Interface name, for example `eth1`.
    pub name: String,
    /// IP address of the interface.
    pub address: IpAddr,
    /// Prefix length of the address's subnet, in bits.
    pub prefix_len: u8,
    /// Link speed in Mbit/s; `None` where the driver does not report one.
    pub speed_mbps: Option<u32>,
    /// Whether the interface is the loopback interface.
    pub loopback: bool,
    /// Whether the interface's link is up.
    pub up: bool,
}

impl Nic {
    /// Whether `other` lies in this NIC's subnet.
    pub fn reaches(&self, other: IpAddr) -> bool {
        match (self.address, other) {
            (IpAddr::V4(a), IpAddr::V4(b)) => {
                let shift = 32 - u32::from(self.prefix_len.min(32));
                shift == 32 || (a.to_bits() >> shift) == (b.to_bits() >> shift)
            }
            (IpAddr::V6(a), IpAddr::V6(b)) => {
                let shift = 128 - u32::from(self.prefix_len.min(128));
                shift == 128 || (a.to_bits() >> shift) == (b.to_bits() >> shift)
            }
            _ => false,
        }
    }
}

/// Port of the UDP socket that asks for a route; no packet is ever sent to it.
const DISCARD_PORT: u16 = 9;

/// Lists every address of every interface, loopback included, one [`Nic`] each.
pub fn list() -> io::Result<Vec<Nic>> {
    let mut nics = addresses()?;
    for nic in &mut nics {
        nic.speed_mbps = speed_mbps(&nic.name);
    }
    Ok(nics)
}

/// [`list`] without the speeds, which some drivers take long to report.
pub fn addresses() -> io::Result<Vec<Nic>> {
    let addresses = InterfaceAddresses::load()?;
    let mut nics = Vec::new();
    let mut next = addresses.first;
    // SAFETY: `next` is null or an entry of the list, which lives until `addresses` is dropped.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: `entry` is an entry of a list made by `getifaddrs`, and the list is still held.
        nics.extend(unsafe { nic_from(entry) });
    }
    Ok(nics)
}

/// A cache of [`addresses`] for callers that need it hundreds of times. It lists the interfaces again once
/// its answer is older than the interval; a zero interval disables the cache.
#[derive(Debug, Default)]
pub struct Recent {
    interval: Duration,
    last: Mutex<Option<(Instant, Arc<[Nic]>)>>,
    /// Number of times that the system was asked for its interfaces.
    asked: AtomicUsize,
}

impl Recent {
    /// An empty cache of interfaces, whose answers are reused for `interval`.
    pub const fn new(interval: Duration) -> Recent {
        Recent { interval, last: Mutex::new(None), asked: AtomicUsize::new(0) }
    }

    /// Number of times that the interfaces were listed; for tests.
    pub fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }

    /// Every address of every interface, at most one interval old.
    pub fn addresses(&self) -> io::Result<Arc<[Nic]>> {
        self.at(Instant::now, || {
            self.asked.fetch_add(1, Ordering::Relaxed);
            addresses()
        })
    }

    fn at(
        &self,
        now: impl FnOnce() -> Instant,
        ask: impl FnOnce() -> io::Result<Vec<Nic>>,
    ) -> io::Result<Arc<[Nic]>> {
        if self.interval.is_zero() {
            return ask().map(Arc::from);
        }
        // The lock's value is replaced in one assignment, so a panic leaves no half-written state.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let now = now();
        if let Some((asked, nics)) = &*last
            && now.duration_since(*asked) < self.interval
        {
            return Ok(nics.clone());
        }
        let nics: Arc<[Nic]> = ask()?.into();
        *last = Some((now, nics.clone()));
        Ok(nics)
    }
}

/// The local address that the routing table selects for a connection to `to`.
pub fn route(to: IpAddr) -> io::Result<IpAddr> {
    Ok(route_to(SocketAddr::new(to.to_canonical(), DISCARD_PORT))?.ip())
}

/// The local address that the routing table selects for a connection to `to`, with port 0, for `bind`. A
/// link-local address keeps its scope id.
pub fn route_to(to: SocketAddr) -> io::Result<SocketAddr> {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0))?;
    socket.connect(to)?;
    let mut local = socket.local_addr()?;
    local.set_port(0);
    Ok(local)
}

/// The kernel's index of the interface called `name`; `None` when there is none.
pub fn index(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    // SAFETY: the name is a C string that outlives the call.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    (index != 0).then_some(index)
}

/// The NIC with this IP address.
pub fn with_address(nics: &[Nic], address: IpAddr) -> Option<&Nic> {
    let address = address.to_canonical();
    nics.iter().find(|nic| nic.address == address)
}

/// Whether the address is a loopback address or that of one of `nics`.
pub fn is_local(nics: &[Nic], address: IpAddr) -> bool {
    address.to_canonical().is_loopback() || with_address(nics, address).is_some()
}

/// The addresses among `addresses`, all of one endpoint, at which an endpoint of another host can be reached, in their
/// order. Every host has loopback addresses, and hosts may share those of bridges for containers: dialled here, they
/// lead to this host. All of `addresses` if each is local, since the endpoint is then of this host.
pub fn beyond_this_host(nics: &[Nic], addresses: &[SocketAddr]) -> Vec<SocketAddr> {
    let beyond: Vec<SocketAddr> =
        addresses.iter().filter(|address| !is_local(nics, address.ip())).copied().collect();
    if beyond.is_empty() { addresses.to_vec() } else { beyond }
}

/// A list that `getifaddrs` allocated; dropping it frees the list.
struct InterfaceAddresses {
    first: *mut libc::ifaddrs,
}

impl InterfaceAddresses {
    fn load() -> io::Result<InterfaceAddresses> {
        let mut first = ptr::null_mut();
        // SAFETY: on success the call stores a list at `first`, which outlives the call.
        checked(unsafe { libc::getifaddrs(&mut first) } as libc::ssize_t)?;
        Ok(InterfaceAddresses { first })
    }
}

impl Drop for InterfaceAddresses {
    fn drop(&mut self) {
        // SAFETY: the list came from `getifaddrs` and is freed here alone.
        unsafe { libc::freeifaddrs(self.first) }
    }
}

/// The NIC of an entry; `None` when it has no usable IP address.
///
/// # Safety
/// The entry must belong to a list made by `getifaddrs` that has not been freed.
unsafe fn nic_from(entry: &libc::ifaddrs) -> Option<Nic> {
    // SAFETY: the pointer is null, or to a socket address of the list.
    let address = unsafe { ip_from(entry.ifa_addr) }?;
    if matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local()) {
        return None;
    }
    // SAFETY: the pointer is null, or to a socket address of the list.
    let prefix_len = unsafe { ip_from(entry.ifa_netmask) }.map_or(0, prefix_len);
    // SAFETY: the name is a C string of the list.
    let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy();
    // A second IPv4 address may be listed under a label, `eth0:1`.
    let name = name.split(':').next().unwrap_or_default().to_owned();
    let has = |flag: libc::c_int| entry.ifa_flags & flag as libc::c_uint != 0;
    Some(Nic {
        speed_mbps: None,
        name,
        address,
        prefix_len,
        loopback: has(libc::IFF_LOOPBACK),
        up: has(libc::IFF_UP) && has(libc::IFF_RUNNING),
    })
}

/// The IP address in a socket address; `None` for null and for other address families.
///
/// # Safety
/// `address` must be null or point at a socket address of the length that its family has.
unsafe fn ip_from(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: the pointer is not null; every socket address begins with its family. It may be unaligned.
    match i32::from(unsafe { (&raw const (*address).sa_family).read_unaligned() }) {
        libc::AF_INET => {
            // SAFETY: the family says that it is an IPv4 address.
            let v4 = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from_bits(u32::from_be(v4.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that it is an IPv6 address.
            let v6 = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

fn prefix_len(mask: IpAddr) -> u8 {
    let ones = match mask {
        IpAddr::V4(v4) => v4.to_bits().leading_ones(),
        IpAddr::V6(v6) => v6.to_bits().leading_ones(),
    };
    ones as u8
}

fn speed_mbps(name: &str) -> Option<u32> {
    let text = fs::read_to_string(format!("/sys/class/net/{name}/speed")).ok()?;
    text.trim().parse().ok().filter(|&speed| speed > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_listed_with_its_prefix() {
        let nics = list().unwrap();
        let lo = with_address(&nics, Ipv4Addr::LOCALHOST.into()).expect("a host has a loopback address");
        assert_eq!((lo.name.as_str(), lo.prefix_len), ("lo", 8));
        assert!(lo.loopback && lo.up);
    }

    #[test]
    fn interfaces_are_listed_once_an_interval() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let asked = |recent: &Recent, after: Duration| {
            let mut asked = false;
            let nics = recent.at(
                || start + after,
                || {
                    asked = true;
                    addresses()
                },
            );
            assert!(!nics.unwrap().is_empty());
            asked
        };
        let recent = Recent::new(second);
        let nothing = recent.at(|| start, || Err(io::Error::from_raw_os_error(libc::ENOBUFS)));
        assert_eq!(nothing.unwrap_err().raw_os_error(), Some(libc::ENOBUFS));
        for (after, right) in [(0, true), (0, false), (999, false), (1000, true), (1999, false), (2000, true)]
        {
            assert_eq!(asked(&recent, Duration::from_millis(after)), right, "after {after} ms");
        }
        assert!((0..2).all(|_| asked(&Recent::default(), second)));
    }

    #[test]
    fn nics_have_numbers() {
        assert_eq!(index("lo"), Some(1));
        assert_eq!((index("no-such-nic"), index("l\0")), (None, None));
    }

    #[test]
    fn the_route_to_loopback_is_loopback() {
        assert_eq!(route(Ipv4Addr::LOCALHOST.into()).unwrap(), IpAddr::from(Ipv4Addr::LOCALHOST));
    }

    #[test]
    fn mapped_addresses_are_known_as_local() {
        let nics = list().unwrap();
        let mapped = Ipv4Addr::LOCALHOST.to_ipv6_mapped();
        assert!(is_local(&nics, mapped.into()));
        assert!(!is_local(&nics, Ipv4Addr::new(192, 0, 2, 1).into()));
    }
}
