//! Checks of the kernel: socket buffers, congestion control, TCP options, and features by version.
//!
//! Invariant: [`judge`] reads nothing; a value that is `None` could not be read. Read next: `finding.rs`.

use super::files::{last_number, line, number, size};
use super::finding::{Finding, Level};
use crate::sys;
use ferrywire_devmem::sys::ethtool;

const SUBJECT: &str = "kernel";
/// A round trip in a data centre, in seconds: bytes in flight must cover it to keep a NIC busy.
const ROUND_TRIP_S: f64 = 0.0005;
/// Fewest connections that share a NIC.
const CHANNELS: f64 = 4.0;
/// The engine's buffer, in bytes, for a connection on a short path; the kernel grows it from there.
const BUFFER_BYTES_MIN: u64 = 2 << 20;
/// The engine's buffer, in bytes, for a connection on a long path.
const LONG_PATH_BUFFER_BYTES: u64 = 8 << 20;
/// The engine's congestion control for short paths.
const SHORT_PATH_CONTROL: &str = "cubic";
/// First kernel with zero-copy sends.
const ZERO_COPY: (u32, u32) = (4, 14);
/// First kernel with devmem TCP in both directions.
const DEVMEM_SENDS: (u32, u32) = (6, 16);

/// The kernel's settings.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The output of `uname -r`.
    pub release: String,
    /// Largest buffers that an unprivileged program may set, in bytes: receive and send.
    pub core_max_bytes: [Option<u64>; 2],
    /// Largest buffers that the kernel grows to, in bytes: receive and send.
    pub tcp_max_bytes: [Option<u64>; 2],
    /// The default congestion control.
    pub congestion_control: Option<String>,
    /// The available congestion controls, separated by spaces.
    pub congestion_controls: Option<String>,
    /// The congestion controls that users without CAP_NET_ADMIN may choose, separated by spaces.
    pub allowed_congestion_controls: Option<String>,
    /// Whether this process may choose [`SHORT_PATH_CONTROL`]; `None` if it is not available.
    pub short_path_control: Option<bool>,
    /// `tcp_window_scaling`, `tcp_timestamps`, `tcp_sack`: 0 is off.
    pub options: [Option<u32>; 3],
    /// Whether the boot id can be read, by which two ends detect that they share a host.
    pub boot_id: bool,
    /// Whether devices of this host are behind an IOMMU.
    pub iommu: bool,
    /// Whether the kernel's ethtool interface works.
    pub ethtool: Result<(), String>,
}

const OPTIONS: [(&str, &str); 3] = [
    ("tcp_window_scaling", "a connection has at most 64 KiB in flight"),
    (
        "tcp_timestamps",
        "round trips are measured less precisely, and wrapped sequence numbers are not recognized",
    ),
    ("tcp_sack", "each loss costs a round trip or more"),
];

impl Kernel {
    /// Reads the settings of this host.
    pub fn read() -> Kernel {
        let core = |name| number(format!("/proc/sys/net/core/{name}"));
        let tcp = |name| last_number(format!("/proc/sys/net/ipv4/{name}"));
        let text = |name| line(format!("/proc/sys/net/ipv4/{name}"));
        let congestion_controls = text("tcp_available_congestion_control");
        // The attempt loads no module.
        let available = congestion_controls.as_deref().is_some_and(|all| lists(all, SHORT_PATH_CONTROL));
        let may_use = || sys::may_use_congestion_control(SHORT_PATH_CONTROL).ok();
        Kernel {
            release: line("/proc/sys/kernel/osrelease").unwrap_or_default(),
            core_max_bytes: ["rmem_max", "wmem_max"].map(core),
            tcp_max_bytes: ["tcp_rmem", "tcp_wmem"].map(tcp),
            congestion_control: text("tcp_congestion_control"),
            congestion_controls,
            allowed_congestion_controls: text("tcp_allowed_congestion_control"),
            short_path_control: available.then(may_use).flatten(),
            options: OPTIONS.map(|(name, _)| number(format!("/proc/sys/net/ipv4/{name}"))),
            boot_id: ferrywire_sys::affinity::boot_id().is_ok(),
            iommu: std::fs::read_dir("/sys/class/iommu").is_ok_and(|mut found| found.next().is_some()),
            ethtool: ethtool::Ethtool::open().map(drop).map_err(|error| error.to_string()),
        }
    }
}

/// The findings about the kernel, for the speed of the fastest NIC.
pub fn judge(kernel: &Kernel, fastest_mbps: Option<u32>) -> Vec<Finding> {
    let needed = fastest_mbps.map_or(BUFFER_BYTES_MIN, needed_bytes);
    let mut found = Vec::new();
    for (i, name) in ["tcp_rmem", "tcp_wmem"].into_iter().enumerate() {
        found.extend(kernel.tcp_max_bytes[i].map(|bytes| grown(name, bytes, needed, fastest_mbps)));
    }
    for (i, name) in ["rmem_max", "wmem_max"].into_iter().enumerate() {
        found.extend(kernel.core_max_bytes[i].map(|bytes| asked(name, bytes)));
    }
    found.extend(congestion_control(kernel));
    let options = OPTIONS.iter().zip(kernel.options);
    found.extend(options.filter_map(|(&(name, cost), value)| Some(option(name, cost, value?))));
    found.push(version(&kernel.release));
    found.push(if kernel.boot_id {
Finding::ok("boot-id", SUBJECT, "/proc/sys/kernel/random/boot_id can be read")
} else {
Finding::ok("boot-id", SUBJECT, "/proc/sys/kernel/random/boot_id cannot be read").warn(
            "mount all of /proc: without it two ends on one host do not recognize each other and pin the same cores",
        )
});
    let iommu = "/sys/class/iommu: devices are behind an IOMMU";
    found.push(if kernel.iommu {
Finding::ok("iommu", SUBJECT, iommu).at(Level::Note).fix(
            "nothing to do for TCP through host memory; where NICs access GPU memory (devmem, plugins), boot with \
             iommu=pt and turn ACS off between NIC and GPU",
        )
} else {
Finding::ok("iommu", SUBJECT, "/sys/class/iommu is empty")
});
    found.push(match &kernel.ethtool {
        Ok(()) => Finding::ok("ethtool", SUBJECT, "NIC settings can be read"),
        Err(why) => {
            Finding::ok("ethtool", SUBJECT, format!("NIC settings cannot be read: {why}")).at(Level::Note)
        }
    });
    found
}

/// The buffer that a connection needs for its share of a NIC, in bytes. The kernel counts its own overhead, up to half
/// of a buffer.
fn needed_bytes(mbps: u32) -> u64 {
    let on_its_way = f64::from(mbps) * 1e6 / 8.0 * ROUND_TRIP_S;
    ((on_its_way / CHANNELS * 2.0) as u64).max(BUFFER_BYTES_MIN)
}

fn grown(name: &str, bytes: u64, needed: u64, mbps: Option<u32>) -> Finding {
    let evidence = format!("/proc/sys/net/ipv4/{name} allows {}", size(bytes));
    let found = Finding::ok("tcp-buffers", SUBJECT, evidence.clone());
    if bytes >= needed {
        return found;
    }
    let speed = mbps.map_or_else(String::new, |mbps| format!(" at {} Gbit/s", f64::from(mbps) / 1000.0));
    let wanted = needed.max(LONG_PATH_BUFFER_BYTES);
    Finding { evidence: format!("{evidence}; a channel needs {}{speed}", size(needed)), ..found }
        .warn(format!("sysctl -w net.ipv4.{name}='4096 131072 {wanted}'"))
}

fn asked(name: &str, bytes: u64) -> Finding {
    let evidence = format!("/proc/sys/net/core/{name} is {}", size(bytes));
    let found = Finding::ok("core-buffers", SUBJECT, evidence);
    if bytes < LONG_PATH_BUFFER_BYTES {
        found.at(Level::Note).fix(format!(
            "on long paths, without CAP_NET_ADMIN: sysctl -w net.core.{name}={LONG_PATH_BUFFER_BYTES}"
        ))
    } else {
        found
    }
}

fn congestion_control(kernel: &Kernel) -> Option<Finding> {
    let (inforce, all) = (kernel.congestion_control.as_ref()?, kernel.congestion_controls.as_ref()?);
    let evidence = format!("the default is {inforce}; available: {all}");
    let found = Finding::ok("congestion-control", SUBJECT, evidence.clone());
    Some(match kernel.short_path_control {
        _ if inforce == SHORT_PATH_CONTROL => found,
        _ if !lists(all, SHORT_PATH_CONTROL) => {
            found.warn("modprobe tcp_cubic: on short paths without loss, cubic moves 50 % more than bbr")
        }
        Some(false) => {
            let allowed = kernel.allowed_congestion_controls.as_deref().unwrap_or(inforce);
            let evidence = format!("{evidence}; this user may choose: {allowed}");
            Finding { evidence, ..found }.warn(format!(
                "sysctl -w net.ipv4.tcp_allowed_congestion_control='{allowed} {SHORT_PATH_CONTROL}': on short paths without \
                 loss, cubic moves 50 % more than bbr"
            ))
        }
        _ => found,
    })
}

/// Whether a list of congestion controls has this name.
fn lists(all: &str, name: &str) -> bool {
    all.split_whitespace().any(|listed| listed == name)
}

fn option(name: &str, cost: &str, value: u32) -> Finding {
    let found = Finding::ok("tcp-options", SUBJECT, format!("/proc/sys/net/ipv4/{name} is {value}"));
    if value == 0 { found.warn(format!("sysctl -w net.ipv4.{name}=1; without it {cost}")) } else { found }
}

fn version(release: &str) -> Finding {
    let evidence = format!("Linux {release}");
    let found = Finding::ok("kernel-version", SUBJECT, evidence);
    match numbers(release) {
        Some(version) if version < ZERO_COPY => {
            found.warn("use Linux 4.14 or later: this kernel has no zero-copy sends")
        }
        Some(version) if version < DEVMEM_SENDS => found
            .at(Level::Note)
            .fix("for devmem TCP, use Linux 6.16 or later and NICs that support it; otherwise nothing to do"),
        _ => found,
    }
}

fn numbers(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::levels;

    fn good() -> Kernel {
        Kernel {
            release: "6.18.2-cloud".to_owned(),
            core_max_bytes: [Some(16 << 20); 2],
            tcp_max_bytes: [Some(16 << 20); 2],
            congestion_control: Some("bbr".to_owned()),
            congestion_controls: Some("reno cubic bbr".to_owned()),
            allowed_congestion_controls: Some("reno cubic bbr".to_owned()),
            short_path_control: Some(true),
            options: [Some(1); 3],
            boot_id: true,
            iommu: false,
            ethtool: Ok(()),
        }
    }

    fn level(kernel: &Kernel, id: &str) -> Level {
        levels(&judge(kernel, Some(100_000)), id).into_iter().min().expect("a finding")
    }

    #[test]
    fn a_good_kernel_has_nothing_to_fix() {
        let found = judge(&good(), Some(200_000));
        assert!(found.iter().all(|finding| finding.level == Level::Ok), "{found:?}");
        assert!(found.iter().all(|finding| finding.fix.is_none()), "{found:?}");
    }

    #[test]
    fn buffers_are_measured_by_the_fastest_nic() {
        let small = Kernel { tcp_max_bytes: [Some(6 << 20), Some(4 << 20)], ..good() };
        let of_speed = |mbps| levels(&judge(&small, mbps), "tcp-buffers");
        assert_eq!(of_speed(None), [Level::Ok; 2]);
        assert_eq!(of_speed(Some(100_000)), [Level::Ok; 2]);
        assert_eq!(of_speed(Some(200_000)), [Level::Ok, Level::Warn]);
        assert_eq!(of_speed(Some(400_000)), [Level::Warn; 2]);
        let core = Kernel { core_max_bytes: [Some(212_992), Some(16 << 20)], ..good() };
        assert_eq!(levels(&judge(&core, None), "core-buffers"), [Level::Note, Level::Ok]);
    }

    #[test]
    fn each_option_of_tcp_is_named() {
        for (i, (name, _)) in OPTIONS.iter().enumerate() {
            let mut kernel = good();
            kernel.options[i] = Some(0);
            let found = judge(&kernel, None);
            let warned: Vec<_> = found.iter().filter(|finding| finding.level == Level::Warn).collect();
            assert!(matches!(warned[..], [only] if only.evidence.contains(name)), "{found:?}");
        }
    }

    #[test]
    fn missing_kernel_features_are_reported() {
        // Regression: what is available was taken for usable.
        let refused = Kernel {
            allowed_congestion_controls: Some("reno bbr".to_owned()),
            short_path_control: Some(false),
            ..good()
        };
        let found = judge(&refused, None).into_iter().find(|finding| finding.id == "congestion-control");
        let fix = found.and_then(|finding| finding.fix).expect("a fix");
        let begin = "sysctl -w net.ipv4.tcp_allowed_congestion_control='reno bbr cubic'";
        assert!(fix.starts_with(begin), "{fix}");
        let default = Kernel { congestion_control: Some("cubic".to_owned()), ..refused };
        assert_eq!(level(&default, "congestion-control"), Level::Ok);
        let only_bbr = Kernel { congestion_controls: Some("bbr".to_owned()), ..good() };
        assert_eq!(level(&only_bbr, "congestion-control"), Level::Warn);
        for (release, expected) in [("4.4.0", Level::Warn), ("5.15.0-1", Level::Note), ("7.2.12", Level::Ok)]
        {
            let kernel = Kernel { release: release.to_owned(), ..good() };
            assert_eq!(level(&kernel, "kernel-version"), expected, "{release}");
        }
        assert_eq!(level(&Kernel { boot_id: false, ..good() }, "boot-id"), Level::Warn);
        assert_eq!(level(&Kernel { iommu: true, ..good() }, "iommu"), Level::Note);
        assert_eq!(level(&Kernel { ethtool: Err("none".to_owned()), ..good() }, "ethtool"), Level::Note);
    }
}
