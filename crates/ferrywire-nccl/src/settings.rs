//! What the environment may change. Nothing needs to be set.
//!
//! | variable | default | is |
//! |---|---|---|
//! | `FERRYWIRE_NCCL_THREADS` | 3/4 of a GPU's cores, 2 to 12 | threads that move bulk, for all comms of a process |
//! | `FERRYWIRE_NCCL_SOCKETS` | half of the threads, 2 to 4 | sockets for bulk in each comm |
//! | `FERRYWIRE_NCCL_INLINE_BYTES` | 16384 | messages up to this size are sent on NCCL's thread; where it is not 0, and after a millisecond without longer ones, up to 128 KiB |
//! | `FERRYWIRE_NCCL_SPIN_US` | 100 | how long a thread without work looks for more before it sleeps |
//!
//! A GPU's cores are its equal share of the host's, as each rank has a GPU; without GPUs two ranks are reckoned with. Some is left for
//! the threads of NCCL and of the program.
//!
//! Read once, when the first comm is made. A value that is no number in its range is ignored, with a warning.

use std::fs;
use std::ops::RangeInclusive;
use std::sync::OnceLock;
use std::time::Duration;

use crate::log;

/// Most bulk sockets of a comm; a peer that asks for more is refused.
pub const SOCKETS_MAX: usize = 64;
/// Most threads of a process.
const THREADS_MAX: usize = 64;
/// Threads that are enough for any NIC, and that a host with few GPUs and many cores is not asked to exceed.
const THREADS_DEFAULT_MAX: usize = 12;
/// Ranks of a host whose GPUs are not known.
const RANKS_ASSUMED: usize = 2;
/// Longest message that may go inline.
const INLINE_BYTES_MAX: usize = 4 << 20;

/// The settings in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Threads that move bulk.
    pub threads: usize,
    /// Sockets for bulk in each comm.
    pub sockets: usize,
    /// Longest message that is sent on NCCL's thread.
    pub inline_bytes: usize,
    /// How long a worker without work looks for more.
    pub spin: Duration,
}

/// The settings of this process.
pub fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let (settings, ignored) = Settings::from(cores, gpus(), |name| std::env::var(name).ok());
        for name in ignored {
            log::warn(format_args!("{name} is not a number in its range, and ignored"));
        }
        log::info(format_args!("{} threads, {} sockets per comm", settings.threads, settings.sockets));
        settings
    })
}

/// GPUs of this host, as far as their driver tells.
fn gpus() -> usize {
    fs::read_dir("/proc/driver/nvidia/gpus").map_or(0, |entries| entries.count())
}

impl Settings {
    /// For so many cores and GPUs, and the names of variables that make no sense.
    fn from(
        cores: usize,
        gpus: usize,
        read: impl Fn(&str) -> Option<String>,
    ) -> (Settings, Vec<&'static str>) {
        let mut ignored = Vec::new();
        let mut number = |name: &'static str, range: RangeInclusive<usize>, default: usize| match read(name) {
            None => default,
            Some(text) => match text.trim().parse() {
                Ok(value) if range.contains(&value) => value,
                _ => {
                    ignored.push(name);
                    default
                }
            },
        };
        let share = cores / if gpus == 0 { RANKS_ASSUMED } else { gpus };
        let enough = (share * 3 / 4).clamp(2, THREADS_DEFAULT_MAX);
        let threads = number("FERRYWIRE_NCCL_THREADS", 1..=THREADS_MAX, enough);
        let sockets = number("FERRYWIRE_NCCL_SOCKETS", 1..=SOCKETS_MAX, (threads / 2).clamp(2, 4));
        let inline_bytes = number("FERRYWIRE_NCCL_INLINE_BYTES", 0..=INLINE_BYTES_MAX, 16 << 10);
        let spin = Duration::from_micros(number("FERRYWIRE_NCCL_SPIN_US", 0..=1_000_000, 100) as u64);
        (Settings { threads, sockets, inline_bytes, spin }, ignored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_and_sockets_follow_cores_and_gpus() {
        let of = |cores, gpus| {
            let (settings, ignored) = Settings::from(cores, gpus, |_| None);
            assert_eq!(ignored, [""; 0]);
            (settings.threads, settings.sockets)
        };
        assert_eq!([of(1, 0), of(2, 8), of(8, 0), of(16, 2)], [(2, 2), (2, 2), (3, 2), (6, 3)]);
        assert_eq!([of(32, 2), of(208, 8), of(96, 1)], [(12, 4), (12, 4), (12, 4)]);
    }

    #[test]
    fn the_environment_wins_unless_it_makes_no_sense() {
        let set = |name: &str| match name {
            "FERRYWIRE_NCCL_THREADS" => Some(String::from(" 3 ")),
            "FERRYWIRE_NCCL_SOCKETS" => Some(String::from("65")),
            "FERRYWIRE_NCCL_INLINE_BYTES" => Some(String::from("none")),
            _ => None,
        };
        let (settings, ignored) = Settings::from(16, 2, set);
        assert_eq!((settings.threads, settings.sockets, settings.inline_bytes), (3, 2, 16 << 10));
        assert_eq!(ignored, ["FERRYWIRE_NCCL_SOCKETS", "FERRYWIRE_NCCL_INLINE_BYTES"]);
    }
}
