//! The few system calls that the standard library lacks.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;

/// CPU seconds, user and system, that this process has used so far.
pub fn cpu_seconds() -> f64 {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is to an rusage; all-zero is a valid one if the call fails.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// Nanoseconds of a clock that all processes of this host share.
pub fn shared_clock_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Cores this process may run on, in order.
pub fn cores() -> Vec<usize> {
    let mut set = MaybeUninit::<libc::cpu_set_t>::zeroed();
    // SAFETY: the pointer is to a cpu_set_t of the given size, and all-zero is a valid (empty) set.
    let set = unsafe {
        libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), set.as_mut_ptr());
        set.assume_init()
    };
    // SAFETY: the index stays below CPU_SETSIZE, so the read is inside the set.
    (0..libc::CPU_SETSIZE as usize).filter(|&core| unsafe { libc::CPU_ISSET(core, &set) }).collect()
}

/// Keeps the calling thread to one core.
pub fn pin(core: usize) -> io::Result<()> {
    // SAFETY: all-zero is a valid (empty) set.
    let mut set: libc::cpu_set_t = unsafe { MaybeUninit::zeroed().assume_init() };
    // SAFETY: `core` comes from `cores`, hence is below CPU_SETSIZE; the set is whole.
    let code = unsafe {
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set)
    };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Asks the kernel to end this process when its parent ends.
pub fn die_with_parent() {
    // SAFETY: PR_SET_PDEATHSIG takes a signal number and touches no memory.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

/// Ignores SIGPIPE, because plugins write to the sockets of dead peers.
pub fn ignore_sigpipe() {
    // SAFETY: SIG_IGN is a valid disposition and no handler of ours runs.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
}

/// Zeroed memory in whole pages, huge ones where the kernel has them. It stays until the process ends.
pub fn memory(bytes: usize) -> io::Result<&'static mut [u8]> {
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: this is a new mapping, at an address that the kernel chooses.
    let base = unsafe { libc::mmap(ptr::null_mut(), bytes, access, kind, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping belongs to this call alone, has that length, and is never unmapped; the advice
    // changes no byte.
    unsafe {
        libc::madvise(base, bytes, libc::MADV_HUGEPAGE);
        Ok(std::slice::from_raw_parts_mut(base.cast(), bytes))
    }
}
