//! CPU affinity, caches of cores, CPU time of threads and of the process, and the boot id of this host.
//!
//! Every function reads or changes the calling thread or process only, and keeps no state.

use std::ffi::CString;
use std::fs;
use std::io;
use std::mem;
use std::thread;
use std::time::Duration;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::checked;

/// The kernel's CPU clock of one thread, in the low bits of a clock id: `CPUCLOCK_PERTHREAD_MASK |
/// CPUCLOCK_SCHED`, unchanged in every kernel release.
const PER_THREAD_CPU_CLOCK: libc::clockid_t = 6;

/// The cores that the current thread may run on, in ascending order.
pub fn allowed_cores() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect())
}

/// How many cores the current thread can keep busy: the cores of its affinity mask, or fewer where a
/// container has a CPU quota. A thread count above the quota makes the kernel throttle the whole container,
/// the application's threads included.
pub fn cores_with_time() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Bytes of the level 2 cache of the first core that the current thread may run on. `None` where the kernel does not say.
pub fn level_2_cache_bytes() -> Option<u64> {
    let core = *allowed_cores().ok()?.first()?;
    let read = |index: usize, file: &str| {
        let path = format!("/sys/devices/system/cpu/cpu{core}/cache/index{index}/{file}");
        fs::read_to_string(path).ok()
    };
    let indexes = (0..).take_while(|index| read(*index, "level").is_some());
    let size = indexes.filter(|index| read(*index, "level").is_some_and(|level| level.trim() == "2"));
    size.filter_map(|index| parse_cache_bytes(read(index, "size")?.trim())).next()
}

/// The bytes of a cache, which the kernel writes in whole KiB, as in `2048K`.
fn parse_cache_bytes(text: &str) -> Option<u64> {
    text.strip_suffix('K')?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Lets the current thread run on `cores` only. Returns `InvalidInput` when it may use none of them.
pub fn keep_current_thread_to(cores: &[usize]) -> io::Result<()> {
    let mut set = CpuSet::new();
    cores.iter().filter(|core| **core < CpuSet::MAX_CPU).for_each(|core| set.set(*core));
    Ok(sched_setaffinity(None, &set)?)
}

/// Runs `work` on a new thread that may use only `cores`; threads that `work` starts inherit the restriction.
/// Returns `InvalidInput` when the current thread may use none of these cores.
pub fn on_cores<T: Send>(cores: &[usize], work: impl FnOnce() -> T + Send) -> io::Result<T> {
    let inside = || {
        keep_current_thread_to(cores)?;
        Ok(work())
    };
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("ferrywire-near".into()).spawn_scoped(scope, inside)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Sets the timer slack of the current thread: its timed waits end at most `most` late. The kernel's default
/// is 50 us.
pub fn sharpen_timers(most: Duration) -> io::Result<()> {
    let nanos = libc::c_ulong::try_from(most.as_nanos()).unwrap_or(libc::c_ulong::MAX).max(1);
    // SAFETY: no memory is passed.
    checked(unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, nanos) } as libc::ssize_t).map(drop)
}

/// The kernel's id of the current thread. glibc has `gettid` only since 2.30, so this makes the system call.
pub fn thread_id() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// Names the current thread, for `top -H` and debuggers. The kernel keeps the first 15 bytes.
pub fn name_current_thread(name: &str) -> io::Result<()> {
    Ok(rustix::thread::set_name(&CString::new(name)?)?)
}

/// CPU time of a process, in user and in kernel mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTime {
    /// CPU time in user mode.
    pub user: Duration,
    /// CPU time in the kernel on behalf of the process.
    pub system: Duration,
}

impl CpuTime {
    /// The CPU time of all threads of this process since it started.
    pub fn of_process() -> io::Result<CpuTime> {
        // SAFETY: all zero is a valid `rusage`.
        let mut usage: libc::rusage = unsafe { mem::zeroed() };
        // SAFETY: the kernel writes one `rusage`, which outlives the call.
        checked(unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) } as libc::ssize_t)?;
        Ok(CpuTime { user: duration_of(usage.ru_utime), system: duration_of(usage.ru_stime) })
    }

    /// Sum of the user and kernel time.
    pub fn total(&self) -> Duration {
        self.user + self.system
    }
}

fn duration_of(time: libc::timeval) -> Duration {
    Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64)
}

/// The CPU time of one thread, readable from every thread of this process.
#[derive(Clone, Copy, Debug)]
pub struct ThreadClock(libc::clockid_t);

impl ThreadClock {
    /// The CPU clock of the current thread.
    pub fn current() -> ThreadClock {
        let id = rustix::thread::gettid().as_raw_nonzero().get();
        ThreadClock((!id << 3) | PER_THREAD_CPU_CLOCK)
    }

    /// CPU time that the thread has used since it started. Returns an error once the thread has ended.
    pub fn read(&self) -> io::Result<Duration> {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the kernel writes one `timespec`, which outlives the call.
        checked(unsafe { libc::clock_gettime(self.0, &mut time) } as libc::ssize_t)?;
        Ok(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
    }
}

/// The boot id: equal for all processes of this host until the next boot. Returns `InvalidData` when the
/// kernel's text is not an id.
pub fn boot_id() -> io::Result<[u8; 16]> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    parse_boot_id(text.trim()).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

fn parse_boot_id(text: &str) -> Option<[u8; 16]> {
    let digits = text.replace('-', "");
    let number = u128::from_str_radix(&digits, 16).ok()?;
    (digits.len() == 32).then(|| number.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pinned_thread_may_use_one_core() {
        thread::spawn(|| {
            let cores = allowed_cores().unwrap();
            let core = *cores.last().unwrap();
            keep_current_thread_to(&[core]).unwrap();
            assert_eq!(allowed_cores().unwrap(), [core]);
            keep_current_thread_to(&cores).unwrap();
            assert_eq!(allowed_cores().unwrap(), cores);
            assert!(keep_current_thread_to(&[CpuSet::MAX_CPU]).is_err());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn threads_started_on_some_cores_stay_there() {
        let all = allowed_cores().unwrap();
        let one = [*all.last().unwrap()];
        let within = || thread::spawn(|| allowed_cores().unwrap()).join().unwrap();
        assert_eq!(on_cores(&one, within).unwrap(), one);
        assert_eq!(allowed_cores().unwrap(), all);
        assert!(on_cores(&[], || ()).is_err());
        assert!(on_cores(&[CpuSet::MAX_CPU], || ()).is_err());
    }

    #[test]
    fn a_long_thread_name_is_cut() {
        thread::spawn(|| {
            name_current_thread("a name longer than fifteen").unwrap();
            assert_eq!(fs::read_to_string("/proc/thread-self/comm").unwrap().trim_end(), "a name longer t");
        })
        .join()
        .unwrap();
    }

    #[test]
    fn work_takes_cpu_time_of_the_thread_and_the_process() {
        let clock = ThreadClock::current();
        let (thread_before, process_before) = (clock.read().unwrap(), CpuTime::of_process().unwrap());
        let goal = thread_before + Duration::from_millis(30);
        while thread::spawn(move || clock.read().unwrap()).join().unwrap() < goal {
            std::hint::black_box((0..100_000).sum::<u64>());
        }
        let process = CpuTime::of_process().unwrap();
        assert!(process.total() > process_before.total());
    }

    #[test]
    fn the_size_of_a_cache_is_read_where_the_kernel_writes_it() {
        assert_eq!([parse_cache_bytes("2048K"), parse_cache_bytes("512K")], [Some(2 << 20), Some(512 << 10)]);
        assert_eq!([parse_cache_bytes(""), parse_cache_bytes("2M"), parse_cache_bytes("-1K")], [None; 3]);
        let core = allowed_cores().unwrap()[0];
        let sizes: Vec<_> = fs::read_dir(format!("/sys/devices/system/cpu/cpu{core}/cache"))
            .into_iter()
            .flatten()
            .filter_map(|entry| fs::read_to_string(entry.ok()?.path().join("size")).ok())
            .filter_map(|size| parse_cache_bytes(size.trim()))
            .collect();
        assert!(level_2_cache_bytes().is_none_or(|bytes| sizes.contains(&bytes)), "{sizes:?}");
    }

    #[test]
    fn the_boot_id_is_sixteen_bytes_and_stays() {
        assert_eq!(boot_id().unwrap(), boot_id().unwrap());
        let parsed = parse_boot_id("00010203-0405-0607-0809-0a0b0c0d0eff").unwrap();
        assert_eq!(parsed[..4], [0, 1, 2, 3]);
        assert_eq!(parsed[15], 0xff);
        assert_eq!(parse_boot_id("0001"), None);
    }
}
