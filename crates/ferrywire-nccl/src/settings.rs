//! What the environment may change. Nothing needs to be set.
//!
//! | variable | default | is |
//! |---|---|---|
//! | `FERRYWIRE_NCCL_THREADS` | 3/4 of a GPU's cores, 2 to 12, for each GPU of the process; fewer for slow NICs | threads that move bulk, for all comms of a process |
//! | `FERRYWIRE_NCCL_SOCKETS` | half of the threads, 2 to 4; fewer for slow NICs | sockets for bulk in each comm; over merged NICs twice as many, at least one for each |
//! | `FERRYWIRE_NCCL_INLINE_BYTES` | 16384 | messages up to this size are sent on NCCL's thread; where it is not 0, longer ones too that come alone: up to 64 KiB as long as they are no more than 3 GB/s, up to 128 KiB after a millisecond; with two cores for a GPU up to 512 KiB if that thread has received one since, unless the threads are said |
//! | `FERRYWIRE_NCCL_SPIN_US` | 100 | how long a thread without work looks for more before it sleeps |
//!
//! `FERRYWIRE_NCCL_MERGE=any` is for hosts other than NCCL: `merged.rs`.
//!
//! A GPU's cores are its equal share of the host's, as each rank has a GPU, or those that the process may use, shared among its
//! GPUs, if these are fewer; without GPUs two ranks are reckoned with. Some is left for
//! the threads of NCCL and of the program. How fast a NIC is counts where a
//! physical one says so: one of 10 Gbit/s needs two sockets and four threads.
//!
//! Read once, when the first comm is made. A value that is no number in its range is ignored, with a warning.

use std::fs;
use std::ops::RangeInclusive;
use std::sync::OnceLock;
use std::time::Duration;

use crate::device::devices;
use crate::log;

/// Most bulk sockets of a comm; a peer that asks for more is refused.
pub const SOCKETS_MAX: usize = 64;
/// Most threads of a process.
const THREADS_MAX: usize = 64;
/// Threads that are enough for any NIC, and that a host with few GPUs and many cores is not asked to exceed.
const THREADS_DEFAULT_MAX: usize = 12;
/// Ranks of a host whose GPUs are not known.
const RANKS_ASSUMED: usize = 2;
/// What one socket carries of a NIC's speed, and one thread one way.
const MBPS_PER_SOCKET: u64 = 12_500;
/// Threads of a process with slow NICs only.
const THREADS_MIN: usize = 4;
/// Sockets of a comm over one NIC, however slow.
const SOCKETS_MIN: usize = 2;
/// With no more for a GPU, a worker only takes turns with NCCL's thread, which asks all the time; so that moves the steps of
/// collectives itself,
const FEW_CORES: usize = 2;
/// which NCCL makes no longer than this.
const ANSWER_BYTES_MAX: usize = 512 << 10;
/// Longest message that may go inline.
const INLINE_BYTES_MAX: usize = 4 << 20;

/// The settings in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    cores: Cores,
    /// Of the host.
    gpus: usize,
    /// What the user has said.
    threads_said: Option<usize>,
    /// More than these have nothing to do, for as many GPUs as there may be.
    threads_of_nics: usize,
    /// Sockets for bulk in each comm over one NIC.
    pub sockets: usize,
    /// The user has said how many.
    sockets_said: bool,
    /// Longest message that is sent on NCCL's thread.
    pub inline_bytes: usize,
    /// How long a worker without work looks for more.
    pub spin: Duration,
}

/// The settings of this process.
pub fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        let read = |name: &str| std::env::var(name).ok();
        let (settings, ignored) = Settings::from(Cores::seen(), gpus(), nics_mbps(), read);
        for name in ignored {
            log::warn(format_args!("{name} is not a number in its range, and ignored"));
        }
        log::info(format_args!("{} sockets per comm", settings.sockets));
        settings
    })
}

/// What there is to compute with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cores {
    /// Of the host.
    host: usize,
    /// Of them those that this process may run on.
    own: usize,
    /// For how many of them it has time, with all who share its quota.
    quota: usize,
}

static CORES: OnceLock<Cores> = OnceLock::new();

/// Looks at the cores, on a thread that has those of its process: NCCL makes comms on threads that it keeps to some of them.
pub fn see_cores() {
    Cores::seen();
}

impl Cores {
    fn seen() -> Cores {
        *CORES.get_or_init(|| {
            let quota = std::thread::available_parallelism().map_or(2, usize::from);
            // SAFETY: asks for a number.
            let host = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
            // SAFETY: zeroes are an empty set, which the kernel fills as far as it goes.
            let bound = unsafe {
                let mut set: libc::cpu_set_t = std::mem::zeroed();
                let got = libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set);
                (got == 0).then(|| libc::CPU_COUNT(&set) as usize)
            };
            let own = bound.unwrap_or(quota).max(quota);
            Cores { host: usize::try_from(host).map_or(own, |host| host.max(own)), own, quota }
        })
    }
}

impl Cores {
    /// For a process with so many of a host's GPUs.
    fn share(&self, own_gpus: usize, gpus: usize) -> usize {
        let of_host = |cores: usize| (cores * own_gpus / gpus).min(cores);
        // A launcher may have bound this rank to its share already; a quota is of all ranks in a container.
        let quota = if self.quota < self.own { of_host(self.quota) } else { self.own };
        of_host(self.host).min(self.own).min(quota)
    }
}

/// The speed of all NICs together, if each tells its own.
fn nics_mbps() -> Option<u64> {
    let nics = devices().ok()?.iter().flat_map(|device| &device.nics);
    nics.map(|nic| nic.speed_mbps.map(u64::from)).sum()
}

/// GPUs of this host, as far as their driver tells.
fn gpus() -> usize {
    fs::read_dir("/proc/driver/nvidia/gpus").map_or(0, |entries| entries.count())
}

impl Settings {
    /// Sockets for bulk over each of so many pairs of NICs, for one of this speed, if it tells it.
    pub fn sockets_over(&self, speed_mbps: Option<u32>, pairs: usize) -> usize {
        let share = if pairs > 1 {
            (2 * self.sockets).div_ceil(pairs).min(SOCKETS_MAX / pairs)
        } else {
            self.sockets
        };
        match speed_mbps {
            // A lone NIC may be faster than its driver says, or its network limit each flow.
            Some(speed_mbps) if !self.sockets_said => {
                let least = if pairs > 1 { 1 } else { SOCKETS_MIN };
                share.min(sockets_for(speed_mbps.into()).max(least))
            }
            _ => share,
        }
    }

    /// For so many cores and GPUs and this speed of all NICs, and the names of variables that make no sense.
    fn from(
        cores: Cores,
        gpus: usize,
        nics_mbps: Option<u64>,
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
        const NOT_SAID: usize = 0;
        let mut said = |name, range| Some(number(name, range, NOT_SAID)).filter(|&value| value != NOT_SAID);
        let threads_said = said("FERRYWIRE_NCCL_THREADS", 1..=THREADS_MAX);
        let sockets_said = said("FERRYWIRE_NCCL_SOCKETS", 1..=SOCKETS_MAX);
        let inline_bytes = number("FERRYWIRE_NCCL_INLINE_BYTES", 0..=INLINE_BYTES_MAX, 16 << 10);
        let spin = Duration::from_micros(number("FERRYWIRE_NCCL_SPIN_US", 0..=1_000_000, 100) as u64);
        let mut settings = Settings {
            cores,
            gpus: if gpus == 0 { RANKS_ASSUMED } else { gpus },
            threads_said,
            // Both ways.
            threads_of_nics: nics_mbps.map_or(THREADS_MAX, |mbps| (2 * sockets_for(mbps)).max(THREADS_MIN)),
            sockets: 0,
            sockets_said: sockets_said.is_some(),
            inline_bytes,
            spin,
        };
        settings.sockets = sockets_said.unwrap_or((settings.threads(1) / 2).clamp(2, 4));
        (settings, ignored)
    }

    /// Threads that move bulk, for a process with so many GPUs.
    pub fn threads(&self, own_gpus: usize) -> usize {
        self.threads_said.unwrap_or_else(|| {
            let share = self.cores.share(own_gpus, self.gpus);
            let enough = (share * 3 / 4).clamp(2, THREADS_DEFAULT_MAX * own_gpus);
            enough.min(self.threads_of_nics).min(THREADS_MAX)
        })
    }

    /// Longest message that is sent on NCCL's thread of one of so many GPUs of the process, too, if that thread has received
    /// one since the one before.
    pub fn answer_bytes(&self, own_gpus: usize) -> usize {
        let each = self.cores.share(own_gpus, self.gpus) / own_gpus;
        // Where the user wants nothing inline, or has said how many threads should do it, they do.
        let few = each <= FEW_CORES && self.inline_bytes > 0 && self.threads_said.is_none();
        if few { ANSWER_BYTES_MAX } else { 0 }
    }
}

/// As many as a NIC of this speed needs.
fn sockets_for(mbps: u64) -> usize {
    mbps.div_ceil(MBPS_PER_SOCKET).clamp(1, SOCKETS_MAX as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL_OF_16: Cores = Cores { host: 16, own: 16, quota: 16 };
    const ALL_OF_32: Cores = Cores { host: 32, own: 32, quota: 32 };

    #[test]
    fn threads_and_sockets_follow_cores_and_gpus() {
        // Eight ranks in a container that has time for 16 of 128 cores.
        let contained = Cores { host: 128, own: 128, quota: 16 };
        assert_eq!(Settings::from(contained, 8, None, |_| None).0.threads(1), 2);
        let on = |host, own, gpus| {
            let (settings, ignored) = Settings::from(Cores { host, own, quota: own }, gpus, None, |_| None);
            assert_eq!(ignored, [""; 0]);
            (settings.threads(1), settings.sockets)
        };
        let of = |cores, gpus| on(cores, cores, gpus);
        assert_eq!([of(1, 0), of(2, 8), of(8, 0), of(16, 2)], [(2, 2), (2, 2), (3, 2), (6, 3)]);
        assert_eq!([of(32, 2), of(208, 8), of(96, 1)], [(12, 4), (12, 4), (12, 4)]);
        let answers = |cores, gpus| {
            let cores = Cores { host: cores, own: cores, quota: cores };
            Settings::from(cores, gpus, None, |_| None).0.answer_bytes(1) > 0
        };
        assert_eq!(
            [answers(2, 1), answers(16, 8), answers(3, 1), answers(16, 2)],
            [true, true, false, false]
        );
        for said in ["FERRYWIRE_NCCL_THREADS=2", "FERRYWIRE_NCCL_INLINE_BYTES=0"] {
            let (name, value) = said.split_once('=').unwrap();
            let set = |asked: &str| (asked == name).then(|| value.into());
            assert_eq!(
                Settings::from(Cores { host: 2, own: 2, quota: 2 }, 1, None, set).0.answer_bytes(1),
                0,
                "{said}"
            );
        }
        // One of eight ranks, which its launcher has bound to its share, or to less.
        assert_eq!([on(128, 16, 8), on(128, 8, 8), on(128, 64, 8)], [(12, 4), (6, 3), (12, 4)]);
    }

    /// JAX drives all GPUs of a host from one process, which had the threads of one.
    #[test]
    fn a_process_with_several_gpus_has_threads_for_each() {
        let of = |cores: Cores, gpus, nics, read: fn(&str) -> Option<String>| {
            let (settings, _) = Settings::from(cores, gpus, nics, read);
            ([1, 2, 8].map(|own| settings.threads(own)), settings.sockets)
        };
        let all = |cores| Cores { host: cores, own: cores, quota: cores };
        assert_eq!(of(all(208), 8, None, |_| None), ([12, 24, 64], 4));
        assert_eq!(of(all(64), 8, None, |_| None), ([6, 12, 48], 3));
        assert_eq!(of(all(64), 8, Some(100_000), |_| None), ([6, 12, 16], 3), "its NIC needs no more");
        // Bound to a part of the host, or with time for a part of it.
        assert_eq!(of(Cores { host: 64, own: 16, quota: 16 }, 8, None, |_| None), ([6, 12, 12], 3));
        assert_eq!(of(Cores { host: 64, own: 64, quota: 16 }, 8, None, |_| None), ([2, 3, 12], 2));
        let said = |name: &str| (name == "FERRYWIRE_NCCL_THREADS").then(|| String::from("5"));
        assert_eq!(of(all(64), 8, None, said), ([5, 5, 5], 2));
        let answers = |own, gpus| {
            let (settings, _) = Settings::from(Cores { host: 64, own, quota: own }, gpus, None, |_| None);
            [1, 4, 8].map(|own| settings.answer_bytes(own) > 0)
        };
        assert_eq!([answers(64, 8), answers(8, 8)], [[false; 3], [false, true, true]]);
    }

    #[test]
    fn slow_nics_need_fewer_sockets_and_threads() {
        let of = |nics: &[u32]| {
            let sum = nics.iter().map(|&mbps| u64::from(mbps)).sum();
            let (settings, _) = Settings::from(ALL_OF_32, 2, Some(sum), |_| None);
            let over = |&mbps| settings.sockets_over(Some(mbps), nics.len());
            (settings.threads(1), nics.iter().map(over).collect::<Vec<_>>())
        };
        assert_eq!([of(&[1000]), of(&[10_000]), of(&[25_000])], [(4, vec![2]), (4, vec![2]), (4, vec![2])]);
        assert_eq!([of(&[100_000]), of(&[400_000])], [(12, vec![4]), (12, vec![4])]);
        assert_eq!([of(&[10_000; 4]), of(&[100_000; 4])], [(8, vec![1; 4]), (12, vec![2; 4])]);
        assert_eq!(of(&[100_000, 10_000]), (12, vec![4, 1]));
    }

    #[test]
    fn merged_nics_have_at_least_a_socket_each_and_no_more_than_a_peer_takes() {
        let of = |sockets: &'static str| {
            Settings::from(ALL_OF_16, 2, None, |name| {
                (name == "FERRYWIRE_NCCL_SOCKETS").then(|| sockets.into())
            })
            .0
        };
        for pairs in 1..=8 {
            assert!(of("1").sockets_over(Some(1000), pairs) >= 1, "{pairs}");
            assert!(of("64").sockets_over(None, pairs) * pairs <= SOCKETS_MAX, "{pairs}");
        }
        // What the user has said is not cut for a slow NIC.
        assert_eq!([1, 2, 4, 8].map(|pairs| of("4").sockets_over(Some(1000), pairs)), [4, 4, 2, 1]);
    }

    #[test]
    fn the_environment_wins_unless_it_makes_no_sense() {
        let set = |name: &str| match name {
            "FERRYWIRE_NCCL_THREADS" => Some(String::from(" 3 ")),
            "FERRYWIRE_NCCL_SOCKETS" => Some(String::from("65")),
            "FERRYWIRE_NCCL_INLINE_BYTES" => Some(String::from("none")),
            _ => None,
        };
        let (settings, ignored) = Settings::from(ALL_OF_16, 2, Some(10_000), set);
        assert_eq!((settings.threads(1), settings.sockets, settings.inline_bytes), (3, 2, 16 << 10));
        assert_eq!(ignored, ["FERRYWIRE_NCCL_SOCKETS", "FERRYWIRE_NCCL_INLINE_BYTES"]);
    }
}
