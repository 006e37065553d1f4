//! Socket options by path: what moves bulk data fastest within a host, within a network, and beyond.
//!
//! Congestion control: on short clean paths cubic is at least half again as fast as a default of bbr; on long
//! paths with a little loss cubic reaches a fraction of bbr's rate. A subnet may contain both kinds of path,
//! so the round trip decides.
//!
//! Buffers within one host: the two ends of a connection alternate on a core. About 2 MiB in flight per core
//! keep the number of context switches low and the payload in the cache; more evicts it. Two addresses of one
//! host can still have a long line between them (a test bed), so a long round trip outweighs the addresses
//! here too.
//!
//! Buffers between hosts: the kernel's autotuning is best on short paths; on long ones a buffer that is large
//! from the start. A small buffer is set only after the connection is established, because a receive buffer
//! set earlier bounds the window for good.
//!
//! Invariant: an option that the user asked for by name or number is never changed.
//! Read next: `conn.rs`, which reports to this file that bytes have moved.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::{ConnOptions, Nic};
use ferrywire_proto::schedule;
use ferrywire_sys::tcp_info::TcpInfo;
use ferrywire_sys::{nics, socket};

/// Most unsent bytes in the socket of a bulk connection between hosts: enough to keep the NIC busy, and
/// little to resend or to wait behind.
const UNSENT_BYTES_MAX: libc::c_int = 256 << 10;
/// Round trips below this duration count as those of a data centre. Cubic then still carries about 3 Gbit/s
/// per connection when it loses one segment of 10,000.
const SHORT_ROUND_TRIP: Duration = Duration::from_micros(500);
/// Socket buffer in bytes of a bulk connection with a long round trip, unless autotuning goes higher. At 10
/// ms it carries 6 Gbit/s, at once; autotuning would need many round trips.
const LONG_PATH_BUFFER_BYTES: usize = 8 << 20;
/// Size in bytes to which large buffers shrink when a path proves short; the kernel's autotuning starts from
/// there.
const SHORT_PATH_BUFFER_BYTES: usize = 2 << 20;
/// The round trip is sampled at growing intervals until this many sends and receives are done. The first
/// sample may include address resolution.
const LATE_MOVES_MAX: u32 = 1024;
/// After this many sends and receives the handshakes are over and a long round trip is believed. On a busy
/// machine each of the first may have waited for a core. A short round trip is believed at once, since no
/// delay makes a path seem shorter than it is.
const PROVEN_MOVES: u32 = 16;
/// Congestion control for short paths.
const SHORT_PATH_CONTROL: &str = "cubic";

/// Distance between the two ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Path {
    /// Both ends of the connection are on this host.
    SameHost,
    /// The round trip is short; while it is unknown, the remote address is in a subnet of this host.
    Near,
    /// The round trip is long; while it is unknown, the remote address is in no subnet of this host.
    Far,
}

impl Path {
    /// Classifies a path by its addresses. `from` is the local address, where it is already chosen.
    pub(super) fn towards(nics: &[Nic], from: Option<IpAddr>, to: IpAddr) -> Path {
        if nics::is_local(nics, to) {
            return Path::SameHost;
        }
        let connected =
            |nic: &Nic| from.is_none_or(|from| nic.address == from) && nic.prefix_len > 0 && nic.reaches(to);
        if nics.iter().any(connected) { Path::Near } else { Path::Far }
    }

    /// The class of the path after its round trip is known, which outweighs the addresses; a round trip of
    /// zero is unknown.
    fn given(self, round_trip: Duration) -> Path {
        match self {
            unknown if round_trip == Duration::ZERO => unknown,
            _ if is_long(round_trip) => Path::Far,
            Path::SameHost => Path::SameHost,
            _ => Path::Near,
        }
    }
}

/// The shortest round trip that this connection has measured; zero before the first measurement.
pub(super) fn round_trip(fd: RawFd) -> Duration {
    TcpInfo::read(fd).map_or(Duration::ZERO, |info| info.min_rtt)
}

/// The shorter of two round trips; zero means unknown.
pub(super) fn shorter(one: Duration, other: Duration) -> Duration {
    if one.is_zero() || other.is_zero() { one.max(other) } else { one.min(other) }
}

fn is_long(round_trip: Duration) -> bool {
    round_trip >= SHORT_ROUND_TRIP
}

/// Applies all options to a connection. `path` is the classification by addresses, `round_trip` is zero where
/// unknown. Returns an error only for an option that the user asked for by name or number.
pub(super) fn apply(fd: RawFd, path: Path, round_trip: Duration, options: &ConnOptions) -> io::Result<()> {
    prepare(fd, path, round_trip, options)?;
    complete(fd, path, round_trip, options);
    Ok(())
}

/// Applies the options that must precede the dial; the kernel fixes the window's scale when it dials.
pub(super) fn prepare(fd: RawFd, path: Path, round_trip: Duration, options: &ConnOptions) -> io::Result<()> {
    if let Some(bytes) = options.socket_buffer_bytes {
        set_buffers(fd, bytes).map_err(|e| explained(e, &format!("socket buffers of {bytes} bytes")))?;
    }
    if options.bulk && is_long(round_trip) {
        fit(fd, path, true, options);
    }
    match &options.congestion_control {
        Some(name) => socket::set_congestion_control(fd, name)
            .map_err(|e| explained(e, &format!("congestion control {name:?}")))?,
        None if options.bulk && path.given(round_trip) != Path::Far => prefer_short_path_control(fd),
        None => {}
    }
    Ok(())
}

/// Applies the options that must follow the dial: a buffer bound, which a path that proves long could not
/// undo.
pub(super) fn complete(fd: RawFd, path: Path, round_trip: Duration, options: &ConnOptions) {
    if options.bulk && !is_long(round_trip) {
        fit(fd, path, false, options);
    }
}

/// The tuning of one data connection, revised when its round trip disagrees with it.
///
/// States: judged by addresses and by the round trip of the peer's other connections -> judged by its own
/// round trip, at growing intervals -> final.
#[derive(Debug)]
pub(super) struct Tuning {
    /// The class of the path, derived from the addresses of both ends.
    path: Path,
    options: ConnOptions,
    judged: Path,
    long: bool,
    moves: u32,
}

impl Tuning {
    /// The tuning of a connection to which these options were applied; `None` for a connection without bulk
    /// data.
    pub(super) fn new(path: Path, round_trip: Duration, options: &ConnOptions) -> Option<Tuning> {
        let (judged, long) = (path.given(round_trip), is_long(round_trip));
        options.bulk.then(|| Tuning { path, options: options.clone(), judged, long, moves: 0 })
    }

    /// Whether the connection is tuned for a long path.
    pub(super) fn is_long(&self) -> bool {
        self.long
    }

    /// Notes a send or a receive; samples the round trip at every power of two of their number.
    pub(super) fn moved(&mut self, fd: RawFd) {
        if self.moves >= LATE_MOVES_MAX {
            return;
        }
        self.moves += 1;
        if self.moves.is_power_of_two() {
            let round_trip = round_trip(fd);
            if round_trip > Duration::ZERO {
                self.judge(fd, round_trip);
            }
        }
    }

    fn judge(&mut self, fd: RawFd, round_trip: Duration) {
        let proven = self.moves >= PROVEN_MOVES || !is_long(round_trip);
        if proven || self.path != Path::SameHost {
            self.judge_control(fd, self.path.given(round_trip));
        }
        if proven && self.long != is_long(round_trip) {
            self.long = !self.long;
            if !self.long {
                take_back(fd, &self.options);
            }
            fit(fd, self.path, self.long, &self.options);
        }
    }

    fn judge_control(&mut self, fd: RawFd, path: Path) {
        let (was_far, is_far) = (self.judged == Path::Far, path == Path::Far);
        self.judged = path;
        match (was_far, is_far) {
            _ if self.options.congestion_control.is_some() => {}
            (true, false) => prefer_short_path_control(fd),
            (false, true) => restore_system_control(fd),
            _ => {}
        }
    }
}

/// Sets the buffers for the path's length, unless the user set their size, and the bound on unsent bytes.
fn fit(fd: RawFd, path: Path, long: bool, options: &ConnOptions) {
    let same_host = path == Path::SameHost || options.same_host;
    let fitted = match options.socket_buffer_bytes {
        Some(_) => Ok(()),
        None if long => fit_for_long_path(fd),
        None if same_host => set_buffers(fd, same_host_buffer_bytes(path, options)),
        // Kernels before 5.16 refuse autotuning, and keep the buffers that were set.
        None => socket::autotune_buffers(fd).or(Ok(())),
    };
    let unsent_bytes = if same_host && !long { 0 } else { UNSENT_BYTES_MAX };
    let fitted =
        fitted.and_then(|()| socket::set_int(fd, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, unsent_bytes));
    if let Err(e) = fitted {
        tracing::debug!("cannot change the socket buffers of a data connection: {e}");
    }
}

/// Sets large buffers; without CAP_NET_ADMIN, turns the kernel's autotuning on.
fn fit_for_long_path(fd: RawFd) -> io::Result<()> {
    let [send, receive] = ["wmem", "rmem"].map(|name| LONG_PATH_BUFFER_BYTES.max(autotuned_bytes_max(name)));
    match socket::force_buffers(fd, send, receive) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => socket::autotune_buffers(fd),
        result => result,
    }
}

/// Shrinks buffers that were forced to be large, which autotuning never does. Without CAP_NET_ADMIN no
/// buffers were forced.
fn take_back(fd: RawFd, options: &ConnOptions) {
    if options.socket_buffer_bytes.is_none() {
        let _ = socket::force_buffers(fd, SHORT_PATH_BUFFER_BYTES, SHORT_PATH_BUFFER_BYTES);
    }
}

/// Sets both buffers; warns once per process when the system's limits cut them short.
fn set_buffers(fd: RawFd, bytes: usize) -> io::Result<()> {
    static TOLD: AtomicBool = AtomicBool::new(false);
    socket::set_buffers(fd, bytes)?;
    if let Some(why) = socket::buffers(fd).ok().and_then(|given| shortfall(bytes, given))
        && !TOLD.swap(true, Ordering::Relaxed)
    {
        tracing::warn!("{why}");
    }
    Ok(())
}

/// The text of the warning when the kernel allows less than `bytes`; `given` are the sizes in force, which
/// the kernel counts doubled.
fn shortfall(bytes: usize, given: (usize, usize)) -> Option<String> {
    let short = [("wmem_max", given.0), ("rmem_max", given.1)].into_iter().filter(|(_, of)| *of < 2 * bytes);
    let short: Vec<_> = short.map(|(name, of)| format!("net.core.{name} ({})", of / 2)).collect();
    let hint = "raise the limit, or run with CAP_NET_ADMIN: larger buffers need fewer system calls";
    (!short.is_empty()).then(|| {
        format!("the kernel limits socket buffers of {bytes} bytes to {}; {hint}", short.join(" and "))
    })
}

/// Largest size in bytes that a program can ask for and that autotuning also reaches. The system's limit
/// counts a buffer doubled.
fn autotuned_bytes_max(name: &str) -> usize {
    let limits = fs::read_to_string(format!("/proc/sys/net/ipv4/tcp_{name}")).unwrap_or_default();
    let last: Option<usize> = limits.split_whitespace().last().and_then(|max| max.parse().ok());
    last.unwrap_or(0) / 2
}

fn same_host_buffer_bytes(path: Path, options: &ConnOptions) -> usize {
    // Between addresses of this host, a bound on the bytes in flight of all connections of a thread exists
    // already.
    let sharing = if path == Path::SameHost { 1 } else { options.per_thread };
    schedule::local_bytes(sharing) as usize
}

/// Whether this host offers a congestion control. Setting one may make the kernel load its module.
pub(super) fn check_control(fd: RawFd, name: &str) -> io::Result<()> {
    socket::set_congestion_control(fd, name).map_err(|e| {
        let listed = |list: &str| {
            let text = fs::read_to_string(format!("/proc/sys/net/ipv4/tcp_{list}_congestion_control"));
            text.map_or_else(
                |_| "unknown".into(),
                |text| text.split_whitespace().collect::<Vec<_>>().join(", "),
            )
        };
        let what = match e.kind() {
            io::ErrorKind::PermissionDenied => {
                format!("{name:?} needs CAP_NET_ADMIN; without it these are allowed: {}", listed("allowed"))
            }
            _ => format!("{name:?} is not available ({e}); available: {}", listed("available")),
        };
        io::Error::new(e.kind(), what)
    })
}

/// Selects the congestion control for short paths. On failure the system's default stays; the connection
/// reports the one in force.
fn prefer_short_path_control(fd: RawFd) {
    if let Err(e) = socket::set_congestion_control(fd, SHORT_PATH_CONTROL) {
        tracing::debug!("cannot set the congestion control {SHORT_PATH_CONTROL} of a data connection: {e}");
    }
}

/// Gives a connection that proved long the congestion control that new sockets get.
fn restore_system_control(fd: RawFd) {
    let fresh = super::new_socket(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0));
    let system = fresh.and_then(|fresh| socket::congestion_control(fresh.as_raw_fd()));
    if let Err(e) = system.and_then(|name| socket::set_congestion_control(fd, &name)) {
        tracing::debug!("cannot return a data connection to the system's congestion control: {e}");
    }
}

fn explained(error: io::Error, what: &str) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nic(address: [u8; 4], prefix_len: u8) -> Nic {
        Nic {
            name: String::from("eth0"),
            address: address.into(),
            prefix_len,
            speed_mbps: None,
            loopback: false,
            up: true,
        }
    }

    #[test]
    fn paths_are_judged_by_addresses() {
        let nics = [nic([10, 0, 0, 1], 24), nic([10, 0, 1, 1], 24)];
        let path =
            |from: Option<[u8; 4]>, to: [u8; 4]| Path::towards(&nics, from.map(IpAddr::from), to.into());
        assert_eq!(path(None, [127, 0, 0, 5]), Path::SameHost);
        assert_eq!(path(Some([10, 0, 0, 1]), [10, 0, 1, 1]), Path::SameHost);
        assert_eq!(path(None, [10, 0, 1, 9]), Path::Near);
        assert_eq!(path(Some([10, 0, 1, 1]), [10, 0, 1, 9]), Path::Near);
        assert_eq!(path(Some([10, 0, 0, 1]), [10, 0, 1, 9]), Path::Far);
        assert_eq!(path(None, [192, 0, 2, 1]), Path::Far);
    }

    #[test]
    fn a_known_round_trip_outweighs_addresses() {
        let us = Duration::from_micros;
        assert_eq!(Path::Near.given(us(10_000)), Path::Far);
        assert_eq!(Path::Far.given(us(100)), Path::Near);
        assert_eq!(Path::SameHost.given(us(10_000)), Path::Far);
        assert_eq!(Path::SameHost.given(us(100)), Path::SameHost);
        assert_eq!(Path::Near.given(Duration::ZERO), Path::Near);
        assert_eq!(Path::Far.given(Duration::ZERO), Path::Far);
    }

    #[test]
    fn the_shorter_round_trip_is_one_that_is_known() {
        let us = Duration::from_micros;
        assert_eq!(shorter(us(20), us(30)), us(20));
        assert_eq!(shorter(us(0), us(30)), us(30));
        assert_eq!(shorter(us(20), us(0)), us(20));
    }

    fn bulk() -> ConnOptions {
        ConnOptions { bulk: true, ..ConnOptions::default() }
    }

    fn new_socket() -> socket2::Socket {
        super::super::new_socket(([0, 0, 0, 0], 0).into()).unwrap()
    }

    /// A socket with these options applied, and its tuning.
    fn tuned(path: Path, round_trip: Duration, options: &ConnOptions) -> (socket2::Socket, Tuning) {
        let socket = new_socket();
        apply(socket.as_raw_fd(), path, round_trip, options).unwrap();
        (socket, Tuning::new(path, round_trip, options).unwrap())
    }

    /// Shows `tuning` a round trip of `round_trip` after each of `moves` sends.
    fn seen(tuning: &mut Tuning, socket: &socket2::Socket, moves: u32, round_trip: Duration) {
        tuning.moves = moves;
        tuning.judge(socket.as_raw_fd(), round_trip);
    }

    fn buffers(socket: &socket2::Socket) -> (usize, usize) {
        socket::buffers(socket.as_raw_fd()).unwrap()
    }

    fn unsent_max(socket: &socket2::Socket) -> libc::c_int {
        socket::get_int(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT).unwrap()
    }

    const SHORT: Duration = Duration::from_micros(60);
    const LONG: Duration = Duration::from_millis(10);

    #[test]
    fn a_subnet_that_proves_long_gets_the_systems_congestion_control_back() {
        let control = |of: &socket2::Socket| socket::congestion_control(of.as_raw_fd()).unwrap();
        let (socket, mut tuning) = tuned(Path::Near, Duration::ZERO, &bulk());
        socket::set_congestion_control(socket.as_raw_fd(), "reno").unwrap();
        seen(&mut tuning, &socket, 1, SHORT);
        assert_eq!(control(&socket), "reno", "nothing new, nothing done");
        seen(&mut tuning, &socket, 1, LONG);
        assert_eq!(control(&socket), control(&new_socket()));
        assert_ne!(control(&socket), "reno");
    }

    #[test]
    fn a_host_in_name_only_gets_the_buffers_of_a_long_path_once_that_is_proven() {
        let named = ConnOptions { same_host: true, per_thread: 2, ..bulk() };
        for (path, options) in [(Path::SameHost, bulk()), (Path::Near, named)] {
            let (socket, mut tuning) = tuned(path, Duration::ZERO, &options);
            let short = buffers(&socket);
            let unsent = unsent_max(&socket);
            seen(&mut tuning, &socket, PROVEN_MOVES / 2, LONG);
            assert_eq!((buffers(&socket), tuning.is_long()), (short, false), "the handshake may have waited");
            seen(&mut tuning, &socket, PROVEN_MOVES, LONG);
            assert!(tuning.is_long());
            let lock = socket::get_int(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_BUF_LOCK);
            let autotuned = lock.is_ok_and(|lock| lock == 0);
            assert!(autotuned || buffers(&socket) != short, "{path:?}: fixed at {short:?}");
            assert_eq!(unsent_max(&socket), UNSENT_BYTES_MAX, "queues stay short");
            seen(&mut tuning, &socket, 2 * PROVEN_MOVES, SHORT);
            assert_eq!((buffers(&socket), unsent_max(&socket)), (short, unsent));
            assert!(!tuning.is_long());
        }
    }

    #[test]
    fn round_trips_of_other_connections_count_from_the_start() {
        let named = ConnOptions { same_host: true, per_thread: 2, ..bulk() };
        let (long, tuning) = tuned(Path::Near, LONG, &named);
        let (short, _) = tuned(Path::Near, SHORT, &named);
        assert!(tuning.is_long());
        assert_ne!(buffers(&long), buffers(&short));
        assert_eq!((unsent_max(&long), unsent_max(&short)), (UNSENT_BYTES_MAX, 0));
    }

    #[test]
    fn large_buffers_are_no_smaller_than_autotuned_ones() {
        let (socket, _) = tuned(Path::Far, LONG, &bulk());
        if socket::force_buffers(new_socket().as_raw_fd(), 1 << 20, 1 << 20).is_err() {
            println!("SKIPPED: needs CAP_NET_ADMIN to set large socket buffers");
            assert_eq!(buffers(&socket), buffers(&new_socket()));
            return;
        }
        let (send, receive) = buffers(&socket);
        assert!(send >= 2 * LONG_PATH_BUFFER_BYTES && receive >= 2 * LONG_PATH_BUFFER_BYTES);
        assert!(send / 2 >= autotuned_bytes_max("wmem") && receive / 2 >= autotuned_bytes_max("rmem"));
    }

    #[test]
    fn large_buffers_are_taken_back_as_soon_as_a_path_proves_short() {
        let (socket, mut tuning) = tuned(Path::Near, LONG, &bulk());
        let (large, privileged) = (buffers(&socket), buffers(&socket) != buffers(&new_socket()));
        seen(&mut tuning, &socket, 1, SHORT);
        assert!(!tuning.is_long(), "no round trip seems shorter than it is");
        if !privileged {
            println!("SKIPPED: needs CAP_NET_ADMIN to set large socket buffers");
            return;
        }
        let small = 2 * SHORT_PATH_BUFFER_BYTES;
        assert!(large.0 > small && large.1 > small, "{large:?}");
        assert_eq!(buffers(&socket), (small, small));
        let lock = socket::get_int(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_BUF_LOCK);
        assert!(lock.is_err() || lock.is_ok_and(|lock| lock == 0), "the kernel sizes them from now on");
    }

    #[test]
    fn bytes_in_flight_within_a_host_fit_the_buffers() {
        for per_thread in [0, 1, 2, 4, 16] {
            for (path, sharing) in [(Path::SameHost, 1), (Path::Near, per_thread)] {
                let options = ConnOptions { same_host: true, per_thread, ..bulk() };
                let (socket, _) = tuned(path, Duration::ZERO, &options);
                let (in_flight, chunk) = schedule::local_share(0, sharing, 0, u64::MAX, usize::MAX);
                // The kernel counts buffers doubled, for its own overhead.
                let (send, receive) = buffers(&socket);
                let cut = shortfall(in_flight as usize, (send, receive)).is_some();
                let given = same_host_buffer_bytes(path, &options);
                assert!(given as u64 == in_flight && chunk as u64 <= in_flight, "{path:?}, {per_thread}");
                assert!(cut || (send as u64 >= 2 * in_flight && receive as u64 >= 2 * in_flight));
            }
        }
    }

    #[test]
    fn buffers_that_the_system_cuts_short_are_reported_with_the_limit_to_raise() {
        assert_eq!(shortfall(2 << 20, (4 << 20, 4 << 20)), None);
        let reported = shortfall(2 << 20, (425_984, 4 << 20)).unwrap();
        assert!(
            reported.contains("2097152 bytes") && reported.contains("net.core.wmem_max (212992)"),
            "{reported}"
        );
        assert!(!reported.contains("rmem_max"), "{reported}");
        assert!(shortfall(2 << 20, (1, 1)).unwrap().contains("wmem_max (0) and net.core.rmem_max (0)"));
    }

    #[test]
    fn the_judgement_ends_and_what_was_asked_for_is_never_judged() {
        let asked = ConnOptions {
            congestion_control: Some("reno".into()),
            socket_buffer_bytes: Some(100_000),
            ..bulk()
        };
        let (socket, mut tuning) = tuned(Path::Near, SHORT, &asked);
        let before = buffers(&socket);
        seen(&mut tuning, &socket, PROVEN_MOVES, LONG);
        assert_eq!(buffers(&socket), before);
        assert_eq!(socket::congestion_control(socket.as_raw_fd()).unwrap(), "reno");
        (0..2 * LATE_MOVES_MAX).for_each(|_| tuning.moved(socket.as_raw_fd()));
        assert_eq!(tuning.moves, LATE_MOVES_MAX);
        assert!(Tuning::new(Path::Near, SHORT, &ConnOptions::default()).is_none());
    }
}
