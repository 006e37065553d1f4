//! The kernel's counts of resources that this process uses.

use std::fs;

/// Ticks of a second in `/proc/self/stat`, on every Linux.
const TICKS_PER_S: f64 = 100.0;

/// The resources in use at one moment.
pub struct Usage {
    pub resident_bytes: u64,
    pub threads: u64,
    pub descriptors: u64,
}

impl Usage {
    pub fn now() -> Usage {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0)
        };
        let descriptors = fs::read_dir("/proc/self/fd").map_or(0, |entries| entries.count() as u64);
        Usage { resident_bytes: field("VmRSS:") << 10, threads: field("Threads:"), descriptors }
    }
}

/// User and system time of this process so far.
pub fn cpu_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The program's name, in brackets, may contain any characters.
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks: f64 =
        rest.split_whitespace().skip(11).take(2).filter_map(|word| word.parse::<f64>().ok()).sum();
    ticks / TICKS_PER_S
}
