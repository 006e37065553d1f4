//! Checks of this process's resources: cores, memory and descriptors, under the limits of its user and control groups.
//!
//! Invariant: [`judge`] reads nothing; a value that is `None` could not be read, or has no limit. Read next:
//! `finding.rs`.

use std::fs;

use ferrywire_sys::affinity;

use super::files::{line, size};
use super::finding::{Finding, Level};
use crate::bench::cgroup;

/// Cores that an end needs to fill a NIC of 10 Gbit/s, with some for the program itself.
const CORES_MIN: usize = 2;
/// A core's rate on one side of host-staged TCP, in Mbit/s.
const MBPS_PER_CORE: u32 = 40_000;
/// Memory for staging rings, windows and some messages, in bytes.
const MEMORY_BYTES_MIN: u64 = 256 << 20;
/// Memory that the kernel may pin for zero-copy sends of one endpoint, in bytes.
const LOCKED_BYTES_MIN: u64 = 64 << 20;
/// Descriptors for a peer with eight channels, and for the program itself.
const FILES_MIN: u64 = 256;
/// Descriptors for some tens of peers.
const FILES_COMFORTABLE: u64 = 4096;

/// The limits of this process.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// Cores of the machine that are online.
    pub cores_online: usize,
    /// Cores that this process may run on.
    pub cores_allowed: usize,
    /// Number of cores whose full time the CPU quotas of the control groups allow.
    pub cores_with_time: usize,
    /// The different frequency governors.
    pub governors: Vec<String>,
    /// Bytes of memory that the control groups leave; `None` without a limit.
    pub group_bytes: Option<u64>,
    /// `MemAvailable`, in bytes.
    pub available_bytes: Option<u64>,
    /// `RLIMIT_MEMLOCK` in bytes; `None` without a limit.
    pub locked_bytes: Option<u64>,
    /// `RLIMIT_NOFILE`: soft and hard limit.
    pub files: [Option<u64>; 2],
}

impl Limits {
    /// Reads the limits of this process.
    pub fn read() -> Limits {
        let allowed = affinity::allowed_cores().unwrap_or_default();
        let mut governors: Vec<String> = allowed
            .iter()
            .filter_map(|core| line(format!("/sys/devices/system/cpu/cpu{core}/cpufreq/scaling_governor")))
            .collect();
        governors.sort();
        governors.dedup();
        let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        Limits {
            cores_online: line("/sys/devices/system/cpu/online")
                .and_then(|list| list.parse::<ferrywire_host::topology::Cpus>().ok())
                .map_or(allowed.len(), |cpus| cpus.iter().count()),
            cores_allowed: allowed.len(),
            cores_with_time: affinity::cores_with_time(),
            governors,
            group_bytes: cgroup::available_bytes(),
            available_bytes: available_in(&meminfo),
            locked_bytes: limit_in(&limits, "Max locked memory")[0],
            files: limit_in(&limits, "Max open files"),
        }
    }
}

/// Soft and hard limit in the text of `/proc/self/limits`; `unlimited` is `None`.
fn limit_in(text: &str, name: &str) -> [Option<u64>; 2] {
    let rest = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    let mut words = rest.split_whitespace().map(|word| word.parse().ok());
    [words.next().flatten(), words.next().flatten()]
}

fn available_in(meminfo: &str) -> Option<u64> {
    let rest = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(rest.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

/// The findings about limits, for the speed of all NICs together in Mbit/s.
pub fn judge(limits: &Limits, mbps: u32) -> Vec<Finding> {
    let mut found = cores(limits, mbps);
    found.extend(governor(&limits.governors));
    found.push(memory(limits));
    found.push(locked(limits.locked_bytes));
    found.push(files(limits.files));
    found
}

fn cores(limits: &Limits, mbps: u32) -> Vec<Finding> {
    let &Limits { cores_online, cores_allowed, cores_with_time, .. } = limits;
    let enough = CORES_MIN.max(mbps.div_ceil(MBPS_PER_CORE) as usize);
    let usable = cores_allowed.min(cores_with_time);
    let count = Finding::ok(
        "cores",
        "cores",
        format!("{usable} usable by this process, {cores_online} in the machine"),
    );
    let count = if usable < enough {
        Finding { evidence: format!("{}; the NICs need about {enough}", count.evidence), ..count }
            .warn("give the process more cores; GPU memory over devmem or a plugin needs fewer")
    } else {
        count
    };
    let mask =
        Finding::ok("affinity", "cores", format!("sched_getaffinity: {cores_allowed} of {cores_online}"));
    let mask = match cores_allowed < cores_online {
        true if usable < enough => {
            mask.warn("start the process without taskset, or in a cpuset with more cores")
        }
        true => mask.at(Level::Note),
        false => mask,
    };
    let quota = format!("control groups allow the CPU time of {cores_with_time} of {cores_allowed} cores");
    let quota = Finding::ok("cpu-quota", "cores", quota);
    let quota = if cores_with_time < cores_allowed {
        quota.warn("raise the container's CPU limit: threads are stopped for the rest of each period")
    } else {
        quota
    };
    vec![count, mask, quota]
}

fn governor(governors: &[String]) -> Option<Finding> {
    let found = Finding::ok("governor", "cores", format!("scaling_governor: {}", governors.join(", ")));
    match governors.iter().all(|name| name == "performance") {
        _ if governors.is_empty() => None,
        true => Some(found),
        false => Some(found.warn("cpupower frequency-set -g performance")),
    }
}

fn memory(limits: &Limits) -> Finding {
    let group = limits.group_bytes.map(|bytes| (bytes, "of this container or control group"));
    let host = limits.available_bytes.map(|bytes| (bytes, "MemAvailable in /proc/meminfo"));
    let Some((bytes, whose)) = group.into_iter().chain(host).min() else {
        return Finding::ok("memory", "memory", "/proc/meminfo cannot be read").at(Level::Note);
    };
    let found = Finding::ok("memory", "memory", format!("{} available, {whose}", size(bytes)));
    if bytes < MEMORY_BYTES_MIN {
        found.warn("raise the memory limit, or end other processes")
    } else {
        found
    }
}

fn locked(bytes: Option<u64>) -> Finding {
    let shown = bytes.map_or_else(|| "unlimited".to_owned(), size);
    let found = Finding::ok("locked-memory", "memory", format!("RLIMIT_MEMLOCK is {shown}"));
    if bytes.is_some_and(|bytes| bytes < LOCKED_BYTES_MIN) {
        found
            .at(Level::Note)
            .fix("ulimit -l unlimited, where NICs send zero-copy: the kernel copies bytes above the limit")
    } else {
        found
    }
}

fn files([soft, hard]: [Option<u64>; 2]) -> Finding {
    let shown = |limit: Option<u64>| limit.map_or_else(|| "unlimited".to_owned(), |limit| limit.to_string());
    let found = Finding::ok(
        "open-files",
        "descriptors",
        format!("RLIMIT_NOFILE is {} of {}", shown(soft), shown(hard)),
    );
    let fix = format!("ulimit -n {}", hard.map_or(65536, |hard| hard.clamp(FILES_MIN, 65536)));
    match soft {
        Some(limit) if limit < FILES_MIN => found.warn(fix),
        Some(limit) if limit < FILES_COMFORTABLE => {
            found.at(Level::Note).fix(format!("for hundreds of channels: {fix}"))
        }
        _ => found,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::levels;

    fn good() -> Limits {
        Limits {
            cores_online: 64,
            cores_allowed: 64,
            cores_with_time: 64,
            governors: vec!["performance".to_owned()],
            group_bytes: None,
            available_bytes: Some(64 << 30),
            locked_bytes: None,
            files: [Some(65536), None],
        }
    }

    fn one(limits: Limits, id: &str) -> Level {
        levels(&judge(&limits, 200_000), id)[0]
    }

    #[test]
    fn a_host_with_room_has_nothing_to_fix() {
        let found = judge(&good(), 800_000);
        assert!(found.iter().all(|finding| finding.level == Level::Ok), "{found:?}");
    }

    #[test]
    fn cores_are_counted_by_machine_mask_and_quota() {
        let few = Limits { cores_online: 2, cores_allowed: 2, cores_with_time: 2, ..good() };
        assert_eq!(levels(&judge(&few, 200_000), "cores"), [Level::Warn]);
        assert_eq!(levels(&judge(&few, 0), "cores"), [Level::Ok]);
        assert_eq!(one(Limits { cores_allowed: 2, ..good() }, "affinity"), Level::Warn);
        assert_eq!(one(Limits { cores_allowed: 32, ..good() }, "affinity"), Level::Note);
        assert_eq!(one(Limits { cores_with_time: 8, ..good() }, "cpu-quota"), Level::Warn);
        assert_eq!(
            one(Limits { governors: vec!["powersave".to_owned()], ..good() }, "governor"),
            Level::Warn
        );
        assert_eq!(levels(&judge(&Limits { governors: vec![], ..good() }, 0), "governor"), []);
    }

    #[test]
    fn the_tightest_limit_of_memory_counts() {
        assert_eq!(one(Limits { group_bytes: Some(1 << 20), ..good() }, "memory"), Level::Warn);
        assert_eq!(
            one(Limits { group_bytes: Some(1 << 40), available_bytes: Some(1), ..good() }, "memory"),
            Level::Warn
        );
        assert_eq!(one(Limits { available_bytes: None, ..good() }, "memory"), Level::Note);
        assert_eq!(one(Limits { locked_bytes: Some(64 << 10), ..good() }, "locked-memory"), Level::Note);
    }

    #[test]
    fn descriptors_are_counted() {
        assert_eq!(one(Limits { files: [Some(64), Some(4096)], ..good() }, "open-files"), Level::Warn);
        assert_eq!(one(Limits { files: [Some(1024), Some(4096)], ..good() }, "open-files"), Level::Note);
        assert_eq!(one(Limits { files: [None, None], ..good() }, "open-files"), Level::Ok);
    }

    #[test]
    fn limits_are_found_in_the_kernels_text() {
        let text = "Limit  Soft Limit  Hard Limit  Units\nMax open files            1024                 524288               files\n\
                    Max locked memory         unlimited            unlimited            bytes\n";
        assert_eq!(limit_in(text, "Max open files"), [Some(1024), Some(524_288)]);
        assert_eq!(limit_in(text, "Max locked memory"), [None, None]);
        assert_eq!(available_in("MemTotal: 8 kB\nMemAvailable:   4 kB\n"), Some(4096));
    }
}
