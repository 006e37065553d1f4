//! Settings from environment variables. All are optional.
//!
//! | variable | default | is |
//! |---|---|---|
//! | `FERRYWIRE_NCCL_THREADS` | 3/4 of a GPU's cores, 2 to 12, for each GPU of the process; fewer for slow NICs | threads that move bulk, for all comms of a process |
//! | `FERRYWIRE_NCCL_SOCKETS` | half of the threads, 2 to 4; fewer for slow NICs | sockets for bulk in each comm; over merged NICs twice as many, at least one for each |
//! | `FERRYWIRE_NCCL_INLINE_BYTES` | 16384 | messages up to this size are sent on NCCL's thread; where it is not 0, longer ones too that come alone: up to 64 KiB as long as they are no more than 3 GB/s, up to 128 KiB after a millisecond; with two cores for a GPU up to 512 KiB if that thread has received one since, unless the number of threads is set |
//! | `FERRYWIRE_NCCL_SPIN_US` | 100 | how long a thread without work polls before it sleeps |
//!
//! `FERRYWIRE_NCCL_MERGE=any` is for hosts other than NCCL: `merged.rs`. `FERRYWIRE_NCCL_ENCRYPT`: `encryption.rs`.
//!
//! A GPU's cores are its equal share of the host's cores, because each rank has a GPU; or, if these are fewer, the
//! cores that the process may use, shared among its GPUs. Without GPUs, two ranks are assumed. Some cores are left for
//! the threads of NCCL and of the program. The speed of a NIC counts if it is a physical one that reports it: a NIC of
//! 10 Gbit/s needs two sockets and four threads.
//!
//! Invariant: the variables are read once, when the first comm is made. An empty value counts as unset. A value that is
//! not a number in its range is ignored, with a warning.

use std::fs;
use std::ops::RangeInclusive;
use std::sync::OnceLock;
use std::time::Duration;

use crate::device::devices;
use crate::log;

/// Most bulk sockets of a comm; a peer that asks for more is refused.
pub const SOCKETS_MAX: usize = 64;
/// Most threads that move bulk in a process.
const THREADS_MAX: usize = 64;
/// Most threads of a process by default, which is enough for any NIC; a host with few GPUs and many cores does not
/// get more.
const THREADS_DEFAULT_MAX: usize = 12;
/// Assumed number of ranks of a host whose GPUs are not known.
const RANKS_ASSUMED: usize = 2;
/// Speed in Mbit/s that one socket carries, and one thread in one direction.
const MBPS_PER_SOCKET: u64 = 12_500;
/// Fewest threads of a process with slow NICs only.
const THREADS_MIN: usize = 4;
/// Fewest sockets of a comm over one NIC, however slow.
const SOCKETS_MIN: usize = 2;
/// Number of cores per GPU up to which a worker only takes turns with NCCL's thread, which polls all the time;
/// NCCL's thread then moves the steps of collectives itself.
const FEW_CORES: usize = 2;
/// Longest step that NCCL makes, in bytes.
const ANSWER_BYTES_MAX: usize = 512 << 10;
/// Largest value of the setting for inline messages, in bytes.
const INLINE_BYTES_MAX: usize = 4 << 20;

/// The settings of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    cores: Cores,
    /// Number of GPUs of the host.
    gpus: usize,
    /// Number of threads that the user has set, if any.
    threads_set: Option<usize>,
    /// Largest useful number of threads for any number of GPUs: further threads have no work.
    threads_of_nics: usize,
    /// Number of sockets for bulk in each comm over one NIC.
    pub sockets: usize,
    /// Whether the user has set the number of sockets.
    sockets_said: bool,
    /// Longest message that NCCL's thread sends itself, in bytes.
    pub inline_bytes: usize,
    /// Time for which a worker without work polls before it sleeps.
    pub spin: Duration,
}

/// The settings of this process.
pub fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        let read = |name: &str| std::env::var(name).ok();
        let (settings, ignored) = Settings::from(Cores::seen(), gpus(), nics_mbps(), read);
        for name in ignored {
            log::warn(format_args!("{name} is ignored, because it is not a number in its range"));
        }
        log::info(format_args!("{} sockets per comm", settings.sockets));
        settings
    })
}

/// The cores that the process may compute with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cores {
    /// Number of cores of the host.
    host: usize,
    /// Number of cores that this process may run on.
    own: usize,
    /// Number of cores for which the CPU quota has time, shared by all processes under the quota.
    quota: usize,
}

static CORES: OnceLock<Cores> = OnceLock::new();

/// Reads the number of cores on a thread that may use all cores of the process: NCCL binds the threads on which it
/// makes comms.
pub fn see_cores() {
    Cores::seen();
}

impl Cores {
    fn seen() -> Cores {
        *CORES.get_or_init(|| {
            let quota = std::thread::available_parallelism().map_or(2, usize::from);
            // SAFETY: the call takes a number and returns one.
            let host = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
            // SAFETY: zeroes are an empty set of cores, which the kernel fills.
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
    /// Number of cores for a process that uses `own_gpus` of the host's GPUs.
    fn share(&self, own_gpus: usize, gpus: usize) -> usize {
        let of_host = |cores: usize| (cores * own_gpus / gpus).min(cores);
        // A launcher may already have bound this rank to its share; a quota is for all ranks in a container.
        let quota = if self.quota < self.own { of_host(self.quota) } else { self.own };
        of_host(self.host).min(self.own).min(quota)
    }
}

/// The speed of all NICs together in Mbit/s; `None` unless each reports its own.
fn nics_mbps() -> Option<u64> {
    let nics = devices().ok()?.iter().flat_map(|device| &device.nics);
    nics.map(|nic| nic.speed_mbps.map(u64::from)).sum()
}

/// The number of GPUs of this host, as far as the driver reports them.
fn gpus() -> usize {
    fs::read_dir("/proc/driver/nvidia/gpus").map_or(0, |entries| entries.count())
}

impl Settings {
    /// Number of sockets for bulk over each of `pairs` pairs of NICs of this speed, if it is known.
    pub fn sockets_over(&self, speed_mbps: Option<u32>, pairs: usize) -> usize {
        let share = if pairs > 1 {
            (2 * self.sockets).div_ceil(pairs).min(SOCKETS_MAX / pairs)
        } else {
            self.sockets
        };
        match speed_mbps {
            // A single NIC may be faster than its driver reports, or its network may limit each flow.
            Some(speed_mbps) if !self.sockets_said => {
                let least = if pairs > 1 { 1 } else { SOCKETS_MIN };
                share.min(sockets_for(speed_mbps.into()).max(least))
            }
            _ => share,
        }
    }

    /// Settings for these cores, GPUs and speed of all NICs; also returns the variables with invalid values.
    fn from(
        cores: Cores,
        gpus: usize,
        nics_mbps: Option<u64>,
        read: impl Fn(&str) -> Option<String>,
    ) -> (Settings, Vec<&'static str>) {
        let mut ignored = Vec::new();
        let mut number = |name: &'static str, range: RangeInclusive<usize>, default: usize| {
            let text = read(name).unwrap_or_default();
            match text.trim() {
                "" => default,
                text => match text.parse() {
                    Ok(value) if range.contains(&value) => value,
                    _ => {
                        ignored.push(name);
                        default
                    }
                },
            }
        };
        const NOT_SAID: usize = 0;
        let mut said = |name, range| Some(number(name, range, NOT_SAID)).filter(|&value| value != NOT_SAID);
        let threads_set = said("FERRYWIRE_NCCL_THREADS", 1..=THREADS_MAX);
        let sockets_said = said("FERRYWIRE_NCCL_SOCKETS", 1..=SOCKETS_MAX);
        let inline_bytes = number("FERRYWIRE_NCCL_INLINE_BYTES", 0..=INLINE_BYTES_MAX, 16 << 10);
        let spin = Duration::from_micros(number("FERRYWIRE_NCCL_SPIN_US", 0..=1_000_000, 100) as u64);
        let mut settings = Settings {
            cores,
            gpus: if gpus == 0 { RANKS_ASSUMED } else { gpus },
            threads_set,
            // Each direction has this number of sockets, so the number is doubled.
            threads_of_nics: nics_mbps.map_or(THREADS_MAX, |mbps| (2 * sockets_for(mbps)).max(THREADS_MIN)),
            sockets: 0,
            sockets_said: sockets_said.is_some(),
            inline_bytes,
            spin,
        };
        settings.sockets = sockets_said.unwrap_or((settings.threads(1) / 2).clamp(2, 4));
        (settings, ignored)
    }

    /// Number of threads that move bulk, for a process with this many GPUs.
    pub fn threads(&self, own_gpus: usize) -> usize {
        self.threads_set.unwrap_or_else(|| {
            let share = self.cores.share(own_gpus, self.gpus);
            let enough = (share * 3 / 4).clamp(2, THREADS_DEFAULT_MAX * own_gpus);
            enough.min(self.threads_of_nics).min(THREADS_MAX)
        })
    }

    /// Longest message that NCCL's thread sends itself if it has received a message since its last send, for a process
    /// with this many GPUs.
    pub fn answer_bytes(&self, own_gpus: usize) -> usize {
        let each = self.cores.share(own_gpus, self.gpus) / own_gpus;
        // The length is 0 if the user wants no message inline, or has set the number of threads.
        let few = each <= FEW_CORES && self.inline_bytes > 0 && self.threads_set.is_none();
        if few { ANSWER_BYTES_MAX } else { 0 }
    }
}

/// The number of sockets for a NIC of this speed.
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
        // Eight ranks in a container with a quota of 16 of 128 cores.
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
        // One of eight ranks, which its launcher has bound to its share, or to fewer cores.
        assert_eq!([on(128, 16, 8), on(128, 8, 8), on(128, 64, 8)], [(12, 4), (6, 3), (12, 4)]);
    }

    /// Regression: JAX drives all GPUs of a host from one process, which had the threads for one GPU.
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
        // Bound to a part of the host, or with a quota for a part of it.
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
        // The user's number is not reduced for a slow NIC.
        assert_eq!([1, 2, 4, 8].map(|pairs| of("4").sockets_over(Some(1000), pairs)), [4, 4, 2, 1]);
    }

    #[test]
    fn the_environment_wins_unless_it_makes_no_sense() {
        let set = |name: &str| match name {
            "FERRYWIRE_NCCL_THREADS" => Some(String::from(" 3 ")),
            "FERRYWIRE_NCCL_SOCKETS" => Some(String::from("65")),
            "FERRYWIRE_NCCL_INLINE_BYTES" => Some(String::from("none")),
            // An empty value counts as unset.
            "FERRYWIRE_NCCL_SPIN_US" => Some(String::new()),
            _ => None,
        };
        let (settings, ignored) = Settings::from(ALL_OF_16, 2, Some(10_000), set);
        assert_eq!((settings.threads(1), settings.sockets, settings.inline_bytes), (3, 2, 16 << 10));
        assert_eq!(settings.spin, Duration::from_micros(100));
        assert_eq!(ignored, ["FERRYWIRE_NCCL_SOCKETS", "FERRYWIRE_NCCL_INLINE_BYTES"]);
    }
}
