//! The recorded facts about a host, and random numbers from its kernel.

use std::fs;
use std::io::Read;
use std::num::NonZero;

use serde::{Deserialize, Serialize};

use super::cgroup;
use crate::exit::{Failure, Outcome};
use crate::sanitize;

/// The host of one end.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Host {
    #[serde(deserialize_with = "sanitize::one_line")]
    pub hostname: String,
    /// Kernel release.
    #[serde(deserialize_with = "sanitize::one_line")]
    pub kernel: String,
    /// CPU model.
    #[serde(deserialize_with = "sanitize::one_line")]
    pub cpu: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// Memory of the machine in bytes.
    pub memory_bytes: u64,
    /// The boot id: new with every boot, and equal on both ends if they share a machine.
    #[serde(deserialize_with = "sanitize::one_line")]
    pub boot_id: String,
    /// Version of the `ferrywire` command on this host.
    #[serde(deserialize_with = "sanitize::one_line")]
    pub version: String,
}

impl Host {
    /// Reads the facts about this host.
    pub fn this() -> Host {
        Host {
            hostname: hostname(),
            kernel: line("/proc/sys/kernel/osrelease"),
            cpu: field("/proc/cpuinfo", "model name"),
            cores: std::thread::available_parallelism().map_or(1, NonZero::get),
            memory_bytes: kibibytes("MemTotal"),
            boot_id: line("/proc/sys/kernel/random/boot_id"),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

/// The machine and the cores of a process. Processes whose machine and cores are equal share the cores.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Workplace {
    /// The host's name.
    #[serde(deserialize_with = "sanitize::one_line")]
    pub hostname: String,
    /// The boot id, equal for all processes of a machine.
    #[serde(deserialize_with = "sanitize::one_line")]
    pub boot_id: String,
    /// The cores' numbers, in the kernel's format.
    #[serde(deserialize_with = "sanitize::one_line")]
    pub allowed: String,
    /// Cores that a CPU quota leaves time for.
    pub cores: usize,
}

impl Workplace {
    /// Reads the workplace of this process.
    pub fn this() -> Workplace {
        Workplace {
            hostname: hostname(),
            boot_id: line("/proc/sys/kernel/random/boot_id"),
            allowed: field("/proc/thread-self/status", "Cpus_allowed_list"),
            cores: std::thread::available_parallelism().map_or(1, NonZero::get),
        }
    }

    /// Whether both workplaces are on one machine.
    pub fn is_same_machine(&self, other: &Workplace) -> bool {
        !self.boot_id.is_empty() && self.boot_id == other.boot_id
    }
}

pub fn hostname() -> String {
    line("/proc/sys/kernel/hostname")
}

/// Refuses to register more than half of the memory that is available without swapping, or within a container's limit.
pub fn check_memory(bytes: u64) -> Outcome {
    let of_host = Some(kibibytes("MemAvailable")).filter(|bytes| *bytes > 0);
    let of_host = of_host.map(|bytes| (bytes, "which has"));
    let of_group = cgroup::available_bytes();
    let of_group = of_group.map(|bytes| (bytes, "whose container or control group has"));
    match of_host.into_iter().chain(of_group).min() {
        Some((available, who)) if bytes > available / 2 => Err(Failure::failed(format!(
            "the sizes and the depth need {} MiB on {}, {who} {} MiB available: choose smaller --sizes or --depth",
            bytes >> 20,
            hostname(),
            available >> 20
        ))),
        _ => Ok(()),
    }
}

fn line(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn field(path: &str, name: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    let found = text.lines().find(|line| line.starts_with(name)).and_then(|line| line.split_once(':'));
    found.map_or_else(String::new, |(_, value)| value.trim().to_owned())
}

fn kibibytes(name: &str) -> u64 {
    let value = field("/proc/meminfo", name);
    value.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) << 10
}

fn random(into: &mut [u8]) -> Outcome {
    let read = fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(into));
    read.map_err(|error| Failure::failed(format!("/dev/urandom: {error}")))
}

/// Random bytes, in hex.
pub fn random_hex(bytes: usize) -> Outcome<String> {
    let mut buffer = vec![0; bytes];
    random(&mut buffer)?;
    Ok(super::protocol::to_hex(&buffer))
}

pub fn random_u64() -> Outcome<u64> {
    let mut buffer = [0; 8];
    random(&mut buffer)?;
    Ok(u64::from_le_bytes(buffer))
}
