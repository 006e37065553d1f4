//! Socket options by the kind of path: what moves bulk data fastest within a host, within a network, and
//! beyond.
//!
//! On short clean paths cubic beats a default of bbr by half and more; on long ones with a little loss it carries
//! a fraction of bbr's. A subnet can span either, so the round trip decides. Within one host the two ends of a
//! connection take turns on a core: about 2 MiB in flight to a core make turns few and keep the payload in its
//! cache, more pushes it out. Elsewhere the kernel's autotuning knows better.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use crate::sys::tcp_info::TcpInfo;
use crate::sys::{nics, socket};
use crate::transport::{ConnOptions, Nic};

/// Socket buffers of the bulk connections within this host that share a thread, and the least of one.
const SAME_HOST_BUFFER_BYTES: usize = 2 << 20;
const SAME_HOST_BUFFER_BYTES_MIN: usize = 512 << 10;
/// Data a bulk connection between hosts may hold unsent: enough to keep the NIC busy, and little to lose
/// or to wait behind.
const UNSENT_BYTES_MAX: libc::c_int = 256 << 10;
/// A round trip below this is a data centre's: cubic, losing one segment of 10,000, still carries some 3 Gbit/s
/// on each connection.
const SHORT_ROUND_TRIP: Duration = Duration::from_micros(500);
/// The round trip is looked at again, ever more rarely, until so many sends and receives are done: the first one
/// may have waited for the address resolution.
const LATE_MOVES_MAX: u32 = 64;
/// The congestion control for short paths.
const SHORT_PATH_CONTROL: &str = "cubic";

/// How far a connection goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Path {
    /// Both ends are on this host.
    SameHost,
    /// The other end is a short round trip away; or, not known yet, in a subnet of ours.
    Near,
    /// Further away; or, not known yet, in no subnet of ours.
    Far,
}

impl Path {
    /// Judges by addresses: `from` is the local one, if it is chosen already.
    pub(super) fn towards(nics: &[Nic], from: Option<IpAddr>, to: IpAddr) -> Path {
        if nics::is_local(nics, to) {
            return Path::SameHost;
        }
        let connected =
            |nic: &Nic| from.is_none_or(|from| nic.address == from) && nic.prefix_len > 0 && nic.reaches(to);
        if nics.iter().any(connected) { Path::Near } else { Path::Far }
    }

    /// Judges an established connection by its round trip, which may differ from what addresses suggest.
    pub(super) fn or_by_round_trip(self, fd: RawFd) -> Path {
        TcpInfo::read(fd).map_or(self, |info| self.given(info.min_rtt))
    }

    /// With a round trip; zero: none known.
    fn given(self, round_trip: Duration) -> Path {
        match self {
            Path::SameHost => Path::SameHost,
            unknown if round_trip == Duration::ZERO => unknown,
            _ if round_trip < SHORT_ROUND_TRIP => Path::Near,
            _ => Path::Far,
        }
    }
}

/// The judgement of a dialled connection, which knows no round trip before its first bytes have moved.
#[derive(Debug)]
pub(super) struct LateTuning {
    judged: Path,
    moves: u32,
}

impl LateTuning {
    /// For a connection along this path, if there is anything to judge.
    pub(super) fn new(path: Path, options: &ConnOptions) -> Option<LateTuning> {
        let open = path != Path::SameHost && options.bulk && options.congestion_control.is_none();
        open.then_some(LateTuning { judged: path, moves: 0 })
    }

    /// After each send or receive; true when there is nothing more to judge.
    pub(super) fn moved(&mut self, fd: RawFd) -> bool {
        self.moves += 1;
        if self.moves.is_power_of_two() {
            self.judge(fd, self.judged.or_by_round_trip(fd));
        }
        self.moves >= LATE_MOVES_MAX
    }

    fn judge(&mut self, fd: RawFd, path: Path) {
        match (self.judged, path) {
            (Path::Far, Path::Near) => prefer_short_path_control(fd),
            (Path::Near, Path::Far) => restore_system_control(fd),
            _ => {}
        }
        self.judged = path;
    }
}

/// Applies the options. Fails only for what was asked for by name or number.
pub(super) fn apply(fd: RawFd, path: Path, options: &ConnOptions) -> io::Result<()> {
    let same_host = path == Path::SameHost || options.same_host;
    // Between addresses of this host what is in flight on all connections of a thread is bounded together.
    let sharing = if path == Path::SameHost { 1 } else { options.per_thread };
    let local_buffer = (options.bulk && same_host).then(|| same_host_buffer_bytes(sharing));
    if let Some(bytes) = options.socket_buffer_bytes.or(local_buffer) {
        socket::set_buffers(fd, bytes)
            .map_err(|e| explained(e, &format!("socket buffers of {bytes} bytes")))?;
    }
    match &options.congestion_control {
        Some(name) => socket::set_congestion_control(fd, name)
            .map_err(|e| explained(e, &format!("congestion control {name:?}")))?,
        None if options.bulk && path != Path::Far => prefer_short_path_control(fd),
        None => {}
    }
    if options.bulk && !same_host {
        socket::set_int(fd, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)?;
    }
    Ok(())
}

/// Whether this host gives us a congestion control. Asked of the kernel, which may load it for us.
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
                format!("{name:?} is for root; allowed to all are {}", listed("allowed"))
            }
            _ => format!("{name:?} is not to be had ({e}); there are {}", listed("available")),
        };
        io::Error::new(e.kind(), what)
    })
}

fn same_host_buffer_bytes(per_thread: usize) -> usize {
    (SAME_HOST_BUFFER_BYTES / per_thread.max(1)).max(SAME_HOST_BUFFER_BYTES_MIN)
}

/// Without it the system's own choice stays; the connection reports which one is in force.
fn prefer_short_path_control(fd: RawFd) {
    if let Err(e) = socket::set_congestion_control(fd, SHORT_PATH_CONTROL) {
        tracing::debug!("congestion control {SHORT_PATH_CONTROL} is not to be had: {e}");
    }
}

/// A connection that proved long gets what the system gives to every new one.
fn restore_system_control(fd: RawFd) {
    let fresh = super::new_socket(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0));
    let system = fresh.and_then(|fresh| socket::congestion_control(fresh.as_raw_fd()));
    if let Err(e) = system.and_then(|name| socket::set_congestion_control(fd, &name)) {
        tracing::debug!("the system's congestion control is not to be had: {e}");
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
        assert_eq!(Path::SameHost.given(us(10_000)), Path::SameHost);
        assert_eq!(Path::Near.given(Duration::ZERO), Path::Near);
        assert_eq!(Path::Far.given(Duration::ZERO), Path::Far);
    }

    #[test]
    fn a_subnet_that_proves_long_gets_the_systems_congestion_control_back() {
        let socket = || super::super::new_socket(([0, 0, 0, 0], 0).into()).unwrap();
        let (tuned, fresh) = (socket(), socket());
        let control = |of: &socket2::Socket| socket::congestion_control(of.as_raw_fd()).unwrap();
        socket::set_congestion_control(tuned.as_raw_fd(), "reno").unwrap();
        let options = ConnOptions { bulk: true, ..ConnOptions::default() };
        let mut late = LateTuning::new(Path::Near, &options).unwrap();
        late.judge(tuned.as_raw_fd(), Path::Near);
        assert_eq!(control(&tuned), "reno", "nothing new, nothing done");
        late.judge(tuned.as_raw_fd(), Path::Far);
        assert_eq!(control(&tuned), control(&fresh));
        assert_ne!(control(&tuned), "reno");
    }

    #[test]
    fn the_judgement_ends_and_what_was_asked_for_is_never_judged() {
        let socket = super::super::new_socket(([0, 0, 0, 0], 0).into()).unwrap();
        let options = ConnOptions { bulk: true, ..ConnOptions::default() };
        let mut late = LateTuning::new(Path::Far, &options).unwrap();
        let moves = (1..).find(|_| late.moved(socket.as_raw_fd())).unwrap();
        assert_eq!(moves, LATE_MOVES_MAX);
        let named = ConnOptions { congestion_control: Some("reno".into()), ..options.clone() };
        assert!(LateTuning::new(Path::Near, &named).is_none());
        assert!(LateTuning::new(Path::SameHost, &options).is_none());
    }
}
