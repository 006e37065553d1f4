//! Rules that steer single TCP connections to a receive queue, and the table over which all other flows are spread.
//! Both use calls of the old `ethtool` interface, which returns numbers without text.
//!
//! Invariant: a rule is written with its full mask, so it matches one connection and nothing else. A rule that was read
//! back in any other shape is [`None`].
//! Read next: `ethtool.rs`, for settings over netlink.

use std::ffi::CString;
use std::io;
use std::mem::offset_of;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;

use ferrywire_sys::checked;

const SIOCETHTOOL: libc::c_ulong = 0x8946;
const ETHTOOL_GRXRINGS: u32 = 0x2d;
const ETHTOOL_GRXCLSRLCNT: u32 = 0x2e;
const ETHTOOL_GRXCLSRULE: u32 = 0x2f;
const ETHTOOL_GRXCLSRLALL: u32 = 0x30;
const ETHTOOL_SRXCLSRLDEL: u32 = 0x31;
const ETHTOOL_SRXCLSRLINS: u32 = 0x32;
const ETHTOOL_GRXFHINDIR: u32 = 0x38;
const ETHTOOL_SRXFHINDIR: u32 = 0x39;

const TCP_V4_FLOW: u32 = 0x01;
const TCP_V6_FLOW: u32 = 0x05;
/// A location that lets the driver choose, and the bit by which a driver says that it can.
const RX_CLS_LOC_ANY: u32 = 0xffff_ffff;
const RX_CLS_LOC_SPECIAL: u64 = 0x8000_0000;
/// The bits of a rule's target that are the queue; the others name virtual functions or mean "drop".
const QUEUE_MASK: u64 = 0xffff_ffff;

/// Largest number of rules or entries that is accepted from the kernel: no NIC has more.
const RULES_MAX: usize = 1 << 20;
const SPREAD_MAX: usize = 1 << 16;
/// How often a list is read again because other processes add or remove rules meanwhile.
const LISTS_MAX: usize = 8;

/// `struct ethtool_rx_flow_spec`; `gap` and `end` are the padding that a compiler would insert.
#[repr(C)]
#[derive(Clone, Copy)]
struct FlowSpec {
    flow_type: u32,
    value: [u8; 52],
    value_more: [u8; 20],
    mask: [u8; 52],
    mask_more: [u8; 20],
    gap: u32,
    ring_cookie: u64,
    location: u32,
    end: u32,
}

/// `struct ethtool_rxnfc`, with room for locations behind it.
#[repr(C)]
#[derive(Clone, Copy)]
struct RuleCommand {
    cmd: u32,
    flow_type: u32,
    data: u64,
    spec: FlowSpec,
    rule_cnt: u32,
    first_location: u32,
}

const _: () = assert!(size_of::<FlowSpec>() == 168 && offset_of!(FlowSpec, mask) == 76);
const _: () = assert!(offset_of!(FlowSpec, ring_cookie) == 152 && offset_of!(FlowSpec, location) == 160);
const _: () = assert!(size_of::<RuleCommand>() == 192 && offset_of!(RuleCommand, spec) == 16);
const _: () = assert!(offset_of!(RuleCommand, rule_cnt) == 184);
/// Offset in `RuleCommand` at which the kernel writes locations.
const LOCATIONS_AT: usize = offset_of!(RuleCommand, first_location);

impl RuleCommand {
    fn new(cmd: u32) -> RuleCommand {
        let spec = FlowSpec {
            flow_type: 0,
            value: [0; 52],
            value_more: [0; 20],
            mask: [0; 52],
            mask_more: [0; 20],
            gap: 0,
            ring_cookie: 0,
            location: 0,
            end: 0,
        };
        RuleCommand { cmd, flow_type: 0, data: 0, spec, rule_cnt: 0, first_location: 0 }
    }
}

/// The packets of one TCP connection, and their receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    /// Address of this host's end: the packets' destination.
    pub local: SocketAddr,
    /// Address of the other end: the packets' source.
    pub remote: SocketAddr,
    /// Number of the receive queue for the packets.
    pub queue: u32,
}

impl Flow {
    /// A flow between two addresses of one family. IPv4 mapped into IPv6 becomes IPv4, as on the wire.
    ///
    /// # Errors
    /// `InvalidInput` for addresses of different families.
    pub fn new(local: SocketAddr, remote: SocketAddr, queue: u32) -> io::Result<Flow> {
        let plain = |end: SocketAddr| SocketAddr::new(end.ip().to_canonical(), end.port());
        let flow = Flow { local: plain(local), remote: plain(remote), queue };
        if flow.local.is_ipv4() == flow.remote.is_ipv4() {
            Ok(flow)
        } else {
            Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "source and target addresses are of different families (IPv4, IPv6)",
            ))
        }
    }

    fn spec(&self) -> FlowSpec {
        let mut spec = RuleCommand::new(0).spec;
        let (flow_type, value) = self.value();
        spec.flow_type = flow_type;
        spec.value[..value.len()].copy_from_slice(&value);
        spec.mask[..value.len()].fill(0xff);
        spec.ring_cookie = self.queue.into();
        spec
    }

    /// Addresses and ports in the kernel's layout, the sender's first.
    fn value(&self) -> (u32, Vec<u8>) {
        let mut value = Vec::with_capacity(36);
        let mut put = |ip: IpAddr| match ip {
            IpAddr::V4(v4) => value.extend(v4.octets()),
            IpAddr::V6(v6) => value.extend(v6.octets()),
        };
        put(self.remote.ip());
        put(self.local.ip());
        value.extend(self.remote.port().to_be_bytes());
        value.extend(self.local.port().to_be_bytes());
        (if self.local.is_ipv4() { TCP_V4_FLOW } else { TCP_V6_FLOW }, value)
    }

    /// The connection that a rule names; `None` if the rule has any other shape.
    fn of(spec: &FlowSpec) -> Option<Flow> {
        let queue =
            u32::try_from(spec.ring_cookie & QUEUE_MASK).ok().filter(|_| spec.ring_cookie <= QUEUE_MASK)?;
        let v = &spec.value;
        let port = |at: usize| u16::from_be_bytes([v[at], v[at + 1]]);
        let ends = match spec.flow_type {
            TCP_V4_FLOW => {
                let ip = |at: usize| Ipv4Addr::new(v[at], v[at + 1], v[at + 2], v[at + 3]).into();
                [(ip(4), port(10)), (ip(0), port(8))]
            }
            TCP_V6_FLOW => {
                let ip = |at: usize| v[at..].first_chunk::<16>().map(|ip| IpAddr::from(Ipv6Addr::from(*ip)));
                [(ip(16)?, port(34)), (ip(0)?, port(32))]
            }
            _ => return None,
        };
        let [local, remote] = ends.map(SocketAddr::from);
        let flow = Flow { local, remote, queue };
        (flow.spec().mask == spec.mask).then_some(flow)
    }
}

/// Rules and spread of one NIC.
#[derive(Debug)]
pub struct Flows {
    /// Socket for the calls, which may be of any kind.
    socket: UdpSocket,
    nic: CString,
}

impl Flows {
    /// Opens the interface of a NIC. Queries need no rights; changes need CAP_NET_ADMIN.
    pub fn open(nic: &str) -> io::Result<Flows> {
        let name = CString::new(nic)?;
        if name.as_bytes().len() >= libc::IFNAMSIZ {
            return Err(io::Error::from_raw_os_error(libc::ENODEV));
        }
        // The socket only selects the network namespace; a loopback address receives nothing from outside.
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))
            .or_else(|_| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)))?;
        Ok(Flows { socket, nic: name })
    }

    /// Adds a rule that steers a connection; returns the rule's location.
    pub fn insert(&self, flow: &Flow) -> io::Result<u32> {
        let mut command = RuleCommand::new(ETHTOOL_SRXCLSRLINS);
        command.spec = flow.spec();
        command.spec.location = free_location(self)?;
        self.call(&mut command)?;
        Ok(command.spec.location)
    }

    /// Removes the rule at a location.
    pub fn delete(&self, location: u32) -> io::Result<()> {
        let mut command = RuleCommand::new(ETHTOOL_SRXCLSRLDEL);
        command.spec.location = location;
        self.call(&mut command)
    }

    /// The rule at a location; `None` for a rule that is not for a single TCP connection.
    ///
    /// # Errors
    /// `ENOENT`, or `EINVAL` with some drivers (gve, bnxt, fbnic), if there is no rule.
    pub fn rule(&self, location: u32) -> io::Result<Option<Flow>> {
        let mut command = RuleCommand::new(ETHTOOL_GRXCLSRULE);
        command.spec.location = location;
        self.call(&mut command)?;
        Ok(Flow::of(&command.spec))
    }

    /// The locations of all rules.
    pub fn rules(&self) -> io::Result<Vec<u32>> {
        Ok(listed(self)?.locations)
    }

    /// The number of receive queues over which flows can be spread.
    pub fn rings(&self) -> io::Result<u32> {
        let mut command = RuleCommand::new(ETHTOOL_GRXRINGS);
        self.call(&mut command)?;
        Ok(u32::try_from(command.data).unwrap_or(0))
    }

    /// The table over which flows without a rule are spread: queues, indexed by a hash.
    pub fn spread(&self) -> io::Result<Vec<u32>> {
        let mut head = [ETHTOOL_GRXFHINDIR, 0];
        // SAFETY: with a size of 0 nothing is written behind the two words.
        unsafe { self.call_at(head.as_mut_ptr().cast()) }?;
        let entries = (head[1] as usize).min(SPREAD_MAX);
        let mut table = vec![0; 2 + entries];
        table[..2].copy_from_slice(&[ETHTOOL_GRXFHINDIR, entries as u32]);
        // SAFETY: behind the two words there is room for as many entries as they say.
        unsafe { self.call_at(table.as_mut_ptr().cast()) }?;
        Ok(table.split_off(2))
    }

    /// Changes the spread table, which keeps its number of entries. An empty table restores the kernel's default.
    pub fn set_spread(&self, table: &[u32]) -> io::Result<()> {
        let mut words = [&[ETHTOOL_SRXFHINDIR, table.len() as u32], table].concat();
        // SAFETY: the kernel reads as many entries as the second word says, which are there.
        unsafe { self.call_at(words.as_mut_ptr().cast()) }
    }

    fn call(&self, command: &mut RuleCommand) -> io::Result<()> {
        // SAFETY: for all commands but the one that lists, which is not called here, the kernel reads and writes
        // within the structure.
        unsafe { self.call_at((command as *mut RuleCommand).cast()) }
    }

    /// # Safety
    /// `data` points to memory for everything that the command in its first word reads and writes.
    unsafe fn call_at(&self, data: *mut libc::c_char) -> io::Result<()> {
        let mut name = [0; libc::IFNAMSIZ];
        for (to, from) in name.iter_mut().zip(self.nic.as_bytes()) {
            *to = *from as libc::c_char;
        }
        let mut request =
            libc::ifreq { ifr_name: name, ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_data: data } };
        // SAFETY: the kernel reads the request, and uses `data` as promised by the caller.
        let result = unsafe { libc::ioctl(self.socket.as_raw_fd(), SIOCETHTOOL as _, &raw mut request) };
        checked(result as libc::ssize_t).map(drop)
    }
}

/// A driver's reports about its rules: a trait, so that tests can imitate drivers.
trait Driver {
    /// The number of rules, and the driver's report on locations: their number or 0, and whether it chooses them.
    fn counted(&self) -> io::Result<(usize, u64)>;
    /// Lists at most `room` rules.
    fn list(&self, room: usize) -> io::Result<Listed>;
}

/// The rules of a NIC, as its driver lists them.
#[derive(Debug, PartialEq, Eq)]
struct Listed {
    /// The number of rules that the NIC can have.
    places: u64,
    locations: Vec<u32>,
}

impl Driver for Flows {
    fn counted(&self) -> io::Result<(usize, u64)> {
        let mut command = RuleCommand::new(ETHTOOL_GRXCLSRLCNT);
        self.call(&mut command)?;
        Ok((command.rule_cnt as usize, command.data))
    }

    fn list(&self, room: usize) -> io::Result<Listed> {
        // Words of eight bytes, because of the structure's alignment.
        let mut words = vec![0_u64; (LOCATIONS_AT + 4 * room).div_ceil(8).max(size_of::<RuleCommand>() / 8)];
        let command: *mut RuleCommand = words.as_mut_ptr().cast();
        let mut head = RuleCommand::new(ETHTOOL_GRXCLSRLALL);
        head.rule_cnt = room as u32;
        // SAFETY: the words are at least as long and as aligned as the structure.
        unsafe { command.write(head) };
        // SAFETY: behind the structure there is room for as many locations as it says.
        unsafe { self.call_at(command.cast()) }?;
        let word = |at: usize| {
            let word = words[at / 8].to_ne_bytes();
            u32::from_ne_bytes(if at.is_multiple_of(8) {
                [word[0], word[1], word[2], word[3]]
            } else {
                [word[4], word[5], word[6], word[7]]
            })
        };
        let count = (word(LOCATIONS_AT - 4) as usize).min(room);
        let locations = (0..count).map(|i| word(LOCATIONS_AT + 4 * i)).collect();
        Ok(Listed { places: words[offset_of!(RuleCommand, data) / 8], locations })
    }
}

/// Lists all rules, each once. Asks for exactly as many as were counted: with more room some drivers (mlx5) look
/// for more and fail, and others (gve) leave the rest unwritten, which reads as rules at location 0.
fn listed(driver: &impl Driver) -> io::Result<Listed> {
    let mut failed = io::Error::from_raw_os_error(libc::EMSGSIZE);
    for _ in 0..LISTS_MAX {
        let room = driver.counted()?.0.min(RULES_MAX);
        match driver.list(room) {
            // The number of rules has changed since they were counted.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EMSGSIZE | libc::EINVAL)) => {
                failed = error
            }
            Err(error) => return Err(error),
            Ok(mut listed) => {
                listed.locations.sort_unstable();
                listed.locations.dedup();
                return Ok(listed);
            }
        }
    }
    Err(failed)
}

/// A location for the next rule: "any" if the driver accepts that, or else the last free location.
fn free_location(driver: &impl Driver) -> io::Result<u32> {
    let (_, data) = driver.counted()?;
    if data & RX_CLS_LOC_SPECIAL != 0 {
        return Ok(RX_CLS_LOC_ANY);
    }
    let Listed { places, locations: taken } = listed(driver)?;
    // Some drivers report the number of locations only with the list.
    let places = if data == 0 { places & !RX_CLS_LOC_SPECIAL } else { data };
    let places = u32::try_from(places).unwrap_or(0).min(RULES_MAX as u32);
    let free = (0..places).rev().find(|place| taken.binary_search(place).is_err());
    free.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOSPC))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    fn end(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn a_rule_names_the_sender_first_and_masks_everything() {
        let flow = Flow::new(end("10.0.0.1:7420"), end("10.0.0.2:40000"), 3).expect("both are IPv4");
        let spec = flow.spec();
        assert_eq!((spec.flow_type, spec.ring_cookie), (TCP_V4_FLOW, 3));
        assert_eq!(spec.value[..12], [10, 0, 0, 2, 10, 0, 0, 1, 0x9c, 0x40, 0x1c, 0xfc]);
        assert_eq!(spec.value[12..], [0; 40]);
        assert_eq!((&spec.mask[..12], &spec.mask[12..]), (&[0xff; 12][..], &[0; 40][..]));
        assert_eq!(Flow::of(&spec), Some(flow));
    }

    #[test]
    fn ipv6_has_its_own_shape_and_mapped_addresses_are_ipv4() {
        let six = Flow::new(end("[2001:db8::1]:1"), end("[2001:db8::2]:2"), 0).expect("both are IPv6");
        let spec = six.spec();
        assert_eq!((spec.flow_type, spec.value[15], spec.value[31], spec.value[35]), (TCP_V6_FLOW, 2, 1, 1));
        assert_eq!((&spec.mask[..36], &spec.mask[36..]), (&[0xff; 36][..], &[0; 16][..]));
        assert_eq!(Flow::of(&spec), Some(six));
        let mapped = Flow::new(end("[::ffff:10.0.0.1]:1"), end("10.0.0.2:2"), 0).expect("both are IPv4");
        assert_eq!(mapped.local, end("10.0.0.1:1"));
        assert!(Flow::new(end("10.0.0.1:1"), end("[2001:db8::2]:2"), 0).is_err());
    }

    #[test]
    fn rules_of_another_shape_belong_to_no_connection() {
        let good = Flow::new(end("10.0.0.1:1"), end("10.0.0.2:2"), 1).expect("both are IPv4").spec();
        let changes: [fn(&mut FlowSpec); 6] = [
            |spec| spec.flow_type = 2,
            |spec| spec.flow_type |= 0x8000_0000,
            |spec| spec.mask[9] = 0,
            |spec| spec.mask[12] = 0xff,
            |spec| spec.ring_cookie = u64::MAX,
            |spec| spec.ring_cookie |= 1 << 32,
        ];
        for (i, change) in changes.iter().enumerate() {
            let mut spec = good;
            change(&mut spec);
            assert_eq!(Flow::of(&spec), None, "change {i}");
        }
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Kind {
        /// Reports the number of locations with the count, and how many rules it has listed.
        Usual,
        /// Goes through the locations until it has as many rules as were asked for, also past the last one.
        Mlx5,
        /// Does not report how many it has listed, so all that were asked for count.
        Gve,
    }

    const PLACES: u64 = 1024;

    /// A NIC of each kind with these rules. Other processes add `comes` and remove `goes` after the next count.
    struct Fake {
        kind: Kind,
        rules: RefCell<Vec<u32>>,
        comes: Cell<Option<u32>>,
        goes: Cell<Option<u32>>,
    }

    impl Fake {
        fn new(kind: Kind, rules: &[u32]) -> Fake {
            Fake { kind, rules: RefCell::new(rules.to_vec()), comes: Cell::default(), goes: Cell::default() }
        }
    }

    impl Driver for Fake {
        fn counted(&self) -> io::Result<(usize, u64)> {
            let count = self.rules.borrow().len();
            self.rules.borrow_mut().extend(self.comes.take());
            let goes = self.goes.take();
            self.rules.borrow_mut().retain(|rule| Some(*rule) != goes);
            Ok((count, if self.kind == Kind::Usual { PLACES } else { 0 }))
        }

        fn list(&self, room: usize) -> io::Result<Listed> {
            let mut locations = self.rules.borrow().clone();
            match self.kind {
                Kind::Mlx5 if room > locations.len() => {
                    return Err(io::Error::from_raw_os_error(libc::EINVAL));
                }
                Kind::Mlx5 => locations.truncate(room),
                _ if room < locations.len() => return Err(io::Error::from_raw_os_error(libc::EMSGSIZE)),
                Kind::Gve => locations.resize(room, 0),
                Kind::Usual => {}
            }
            Ok(Listed { places: PLACES, locations })
        }
    }

    #[test]
    fn every_driver_lists_its_rules_and_has_a_place_for_one_more() {
        let last = PLACES as u32 - 1;
        for kind in [Kind::Usual, Kind::Mlx5, Kind::Gve] {
            for rules in [&[][..], &[7], &[0, 7, last]] {
                let driver = Fake::new(kind, rules);
                let locations = listed(&driver).map(|listed| listed.locations);
                assert_eq!(locations.expect("it answers"), rules, "{kind:?}");
                let free = last - u32::from(rules.contains(&last));
                assert_eq!(free_location(&driver).expect("there is room"), free, "{kind:?} with {rules:?}");
            }
            let full = Fake::new(kind, &(0..=last).collect::<Vec<_>>());
            let error = free_location(&full).expect_err("no place is left");
            assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{kind:?}");
        }
    }

    #[test]
    fn rules_that_come_and_go_while_they_are_listed_are_no_obstacle() {
        for kind in [Kind::Usual, Kind::Mlx5, Kind::Gve] {
            let driver = Fake::new(kind, &[7, 9]);
            driver.comes.set(Some(11));
            let locations = listed(&driver).expect("it answers").locations;
            assert!(locations.starts_with(&[7, 9]), "{kind:?}: {locations:?}");
            let driver = Fake::new(kind, &[7, 9]);
            driver.goes.set(Some(9));
            let locations = listed(&driver).expect("it answers").locations;
            // An unwritten entry reads as location 0.
            assert!(
                locations == [7] || (kind == Kind::Gve && locations == [0, 7]),
                "{kind:?}: {locations:?}"
            );
        }
    }

    #[test]
    fn the_kernel_answers_for_a_nic_without_rules() {
        let lo = Flows::open("lo").expect("a socket");
        let flow = Flow::new(end("127.0.0.1:1"), end("127.0.0.1:2"), 0).expect("both are IPv4");
        for refused in [lo.insert(&flow).map(drop), lo.delete(0), lo.rules().map(drop), lo.spread().map(drop)]
        {
            let error = refused.expect_err("loopback has no rules");
            assert!(matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EPERM)), "{error}");
        }
        let missing = Flows::open("no-such-nic").and_then(|nic| nic.rings()).expect_err("there is none");
        assert_eq!(missing.raw_os_error(), Some(libc::ENODEV));
        assert!(Flows::open("a-name-of-sixteen").is_err());
    }
}
