//! What the environment may change. Nothing needs to be set.
//!
//! | variable | default | is |
//! |---|---|---|
//! | `FERRYWIRE_NCCL_THREADS` | half of the cores, 2 to 8 | threads that move bulk, for all comms of a process |
//! | `FERRYWIRE_NCCL_SOCKETS` | half of the threads, 2 to 4 | sockets for bulk in each comm |
//! | `FERRYWIRE_NCCL_INLINE_BYTES` | 65536 | messages up to this size are sent on NCCL's thread |
//! | `FERRYWIRE_NCCL_SPIN_US` | 50 | how long a thread without work looks for more before it sleeps |
//!
//! Read once, when the first comm is made. A value that is no number in its range is ignored, with a warning.

use std::ops::RangeInclusive;
use std::sync::OnceLock;
use std::time::Duration;

use crate::log;

/// Most bulk sockets of a comm; a peer that asks for more is refused.
pub const SOCKETS_MAX: usize = 64;
/// Most threads of a process.
const THREADS_MAX: usize = 64;
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
        let (settings, ignored) = Settings::from(cores, |name| std::env::var(name).ok());
        for name in ignored {
            log::warn(format_args!("{name} is not a number in its range, and ignored"));
        }
        log::info(format_args!("{} threads, {} sockets per comm", settings.threads, settings.sockets));
        settings
    })
}

impl Settings {
    /// For so many cores, and the names of variables that make no sense.
    fn from(cores: usize, read: impl Fn(&str) -> Option<String>) -> (Settings, Vec<&'static str>) {
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
        let threads = number("FERRYWIRE_NCCL_THREADS", 1..=THREADS_MAX, (cores / 2).clamp(2, 8));
        let sockets = number("FERRYWIRE_NCCL_SOCKETS", 1..=SOCKETS_MAX, (threads / 2).clamp(2, 4));
        let inline_bytes = number("FERRYWIRE_NCCL_INLINE_BYTES", 0..=INLINE_BYTES_MAX, 64 << 10);
        let spin = Duration::from_micros(number("FERRYWIRE_NCCL_SPIN_US", 0..=1_000_000, 50) as u64);
        (Settings { threads, sockets, inline_bytes, spin }, ignored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_and_sockets_follow_the_cores() {
        let of = |cores| {
            let (settings, ignored) = Settings::from(cores, |_| None);
            assert_eq!(ignored, [""; 0]);
            (settings.threads, settings.sockets)
        };
        assert_eq!([of(1), of(4), of(16), of(200)], [(2, 2), (2, 2), (8, 4), (8, 4)]);
    }

    #[test]
    fn the_environment_wins_unless_it_makes_no_sense() {
        let set = |name: &str| match name {
            "FERRYWIRE_NCCL_THREADS" => Some(String::from(" 3 ")),
            "FERRYWIRE_NCCL_SOCKETS" => Some(String::from("65")),
            "FERRYWIRE_NCCL_INLINE_BYTES" => Some(String::from("none")),
            _ => None,
        };
        let (settings, ignored) = Settings::from(16, set);
        assert_eq!((settings.threads, settings.sockets, settings.inline_bytes), (3, 2, 64 << 10));
        assert_eq!(ignored, ["FERRYWIRE_NCCL_SOCKETS", "FERRYWIRE_NCCL_INLINE_BYTES"]);
    }
}
