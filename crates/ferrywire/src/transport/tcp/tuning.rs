//! Socket options by the kind of path: what moves bulk data fastest within a host, within a network, and
//! beyond.
//!
//! On short clean paths cubic beats a default of bbr by half and more. Within one host the two ends of a
//! connection take turns on a core: buffers of about 2 MiB to a core make turns few and keep the payload in
//! its cache, larger ones push it out. Elsewhere the kernel's autotuning knows better.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::fd::RawFd;
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
/// A round trip below this is a data centre's.
const SHORT_ROUND_TRIP: Duration = Duration::from_millis(2);
/// The congestion control for short paths.
const SHORT_PATH_CONTROL: &str = "cubic";

/// How far a connection goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Path {
    /// Both ends are on this host.
    SameHost,
    /// The other end is in a subnet of ours, or a short round trip away.
    Near,
    /// Somewhere else, or not known yet.
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

    /// Judges an established connection by its round trip too.
    pub(super) fn or_by_round_trip(self, fd: RawFd) -> Path {
        let short = |info: TcpInfo| info.rtt > Duration::ZERO && info.rtt < SHORT_ROUND_TRIP;
        if self == Path::Far && TcpInfo::read(fd).is_ok_and(short) { Path::Near } else { self }
    }
}

/// Applies the options. Fails only for what was asked for by name or number.
pub(super) fn apply(fd: RawFd, path: Path, options: &ConnOptions) -> io::Result<()> {
    let same_host = path == Path::SameHost || options.same_host;
    let local_buffer = (options.bulk && same_host).then(|| same_host_buffer_bytes(options.per_thread));
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

/// Makes up for what the addresses did not tell: a connection that has turned out to be short.
pub(super) fn apply_late(fd: RawFd, options: &ConnOptions) {
    if options.congestion_control.is_none() && Path::Far.or_by_round_trip(fd) == Path::Near {
        prefer_short_path_control(fd);
    }
}

/// Without it the system's own choice stays; the connection reports which one is in force.
fn prefer_short_path_control(fd: RawFd) {
    if let Err(e) = socket::set_congestion_control(fd, SHORT_PATH_CONTROL) {
        tracing::debug!("congestion control {SHORT_PATH_CONTROL} is not to be had: {e}");
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
}
