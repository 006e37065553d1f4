//! On which cores the workers run: on those of every thread that makes comms.
//!
//! NCCL keeps the threads that make a GPU's comms to the cores close to that GPU, and workers start with what the first of them may
//! use. In a process with GPUs on two CPU sockets all would crowd on one of them.
//! Invariant: cores are added, never taken away.

use std::io;
use std::sync::Mutex;

use crate::comm::locked;

/// Cores, and the threads that are kept to them.
pub struct Affinity(Mutex<Cores>);

/// A set of cores of this host.
#[derive(Clone, Copy)]
pub struct Cores(libc::cpu_set_t);

impl Affinity {
    /// Of threads that the calling one has started, and that have its cores.
    pub fn of_this_thread() -> Affinity {
        Affinity(Mutex::new(Cores::of(0).unwrap_or_else(|_| Cores::none())))
    }

    /// Lets these threads run where the calling one may, too.
    pub fn add_this_threads(&self, threads: impl Iterator<Item = libc::pid_t>) {
        let Ok(own) = Cores::of(0) else { return };
        let mut cores = locked(&self.0);
        let with_own = cores.with(&own);
        if with_own.count() == cores.count() {
            return;
        }
        *cores = with_own;
        with_own.hold(threads);
    }

    /// Lets these threads, which others have started, run there.
    pub fn hold(&self, threads: impl Iterator<Item = libc::pid_t>) {
        locked(&self.0).hold(threads);
    }
}

impl Cores {
    fn none() -> Cores {
        // SAFETY: zeroes are an empty set.
        Cores(unsafe { std::mem::zeroed() })
    }

    /// Where a thread may run; 0 is the calling one. Fails on hosts with more than 1,024 cores.
    pub fn of(thread: libc::pid_t) -> io::Result<Cores> {
        let mut cores = Cores::none();
        // SAFETY: the kernel fills the set as far as it goes.
        let got = unsafe { libc::sched_getaffinity(thread, size_of::<libc::cpu_set_t>(), &mut cores.0) };
        if got == 0 { Ok(cores) } else { Err(io::Error::last_os_error()) }
    }

    /// How many they are.
    pub fn count(&self) -> usize {
        // SAFETY: reads the set.
        unsafe { libc::CPU_COUNT(&self.0) as usize }
    }

    fn with(&self, other: &Cores) -> Cores {
        let mut both = *self;
        for core in 0..libc::CPU_SETSIZE as usize {
            // SAFETY: the core is below the size of the set.
            unsafe {
                if libc::CPU_ISSET(core, &other.0) {
                    libc::CPU_SET(core, &mut both.0);
                }
            }
        }
        both
    }

    /// One that cannot be moved runs where it did.
    fn hold(&self, threads: impl Iterator<Item = libc::pid_t>) {
        if self.count() > 0 {
            threads.for_each(|thread| drop(self.set(thread)));
        }
    }

    fn set(&self, thread: libc::pid_t) -> io::Result<()> {
        // SAFETY: reads the set.
        let set = unsafe { libc::sched_setaffinity(thread, size_of::<libc::cpu_set_t>(), &self.0) };
        if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Each of them alone, for tests of threads on other cores.
    #[cfg(test)]
    pub fn singles(&self) -> Vec<Cores> {
        let alone = |core| {
            let mut cores = Cores::none();
            // SAFETY: the core is below the size of the set.
            unsafe { libc::CPU_SET(core, &mut cores.0) };
            cores
        };
        // SAFETY: as above.
        (0..libc::CPU_SETSIZE as usize)
            .filter(|&core| unsafe { libc::CPU_ISSET(core, &self.0) })
            .map(alone)
            .collect()
    }

    /// Keeps the calling thread to them.
    #[cfg(test)]
    pub fn bind(&self) {
        self.set(0).unwrap();
    }
}
