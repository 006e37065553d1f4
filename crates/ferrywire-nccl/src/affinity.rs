//! The cores on which workers run: the union of the cores of all threads that make comms.
//!
//! NCCL binds the threads that make a GPU's comms to the cores close to that GPU. Workers inherit the cores of the
//! first such thread. In a process with GPUs on two CPU sockets, all workers would otherwise crowd on one socket.
//! Invariant: cores are added, never removed.

use std::io;
use std::sync::Mutex;

use crate::comm::locked;

/// The cores that workers may use so far, for threads that are bound to them.
pub struct Affinity(Mutex<Cores>);

/// A set of cores of this host.
#[derive(Clone, Copy)]
pub struct Cores(libc::cpu_set_t);

impl Affinity {
    /// The cores of the calling thread, which the threads that it has started inherit.
    pub fn of_this_thread() -> Affinity {
        Affinity(Mutex::new(Cores::of(0).unwrap_or_else(|_| Cores::none())))
    }

    /// Also allows these worker threads to run on the cores of the calling thread.
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

    /// Binds these worker threads, which another thread has started, to the cores.
    pub fn hold(&self, threads: impl Iterator<Item = libc::pid_t>) {
        locked(&self.0).hold(threads);
    }
}

impl Cores {
    fn none() -> Cores {
        // SAFETY: zeroes are an empty set of cores.
        Cores(unsafe { std::mem::zeroed() })
    }

    /// The cores on which a thread may run; 0 is the calling thread.
    ///
    /// # Errors
    /// The kernel's error, also on hosts with more than 1,024 cores.
    pub fn of(thread: libc::pid_t) -> io::Result<Cores> {
        let mut cores = Cores::none();
        // SAFETY: the kernel writes at most the size of the set.
        let got = unsafe { libc::sched_getaffinity(thread, size_of::<libc::cpu_set_t>(), &mut cores.0) };
        if got == 0 { Ok(cores) } else { Err(io::Error::last_os_error()) }
    }

    /// Number of cores in the set.
    pub fn count(&self) -> usize {
        // SAFETY: the macro only reads the set.
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

    /// Binds threads to the cores of the set. A thread that cannot be bound keeps its cores.
    fn hold(&self, threads: impl Iterator<Item = libc::pid_t>) {
        if self.count() > 0 {
            threads.for_each(|thread| drop(self.set(thread)));
        }
    }

    fn set(&self, thread: libc::pid_t) -> io::Result<()> {
        // SAFETY: the kernel only reads the set.
        let set = unsafe { libc::sched_setaffinity(thread, size_of::<libc::cpu_set_t>(), &self.0) };
        if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// One set for each core of this set, for tests of threads on different cores.
    #[cfg(test)]
    pub fn singles(&self) -> Vec<Cores> {
        let alone = |core| {
            let mut cores = Cores::none();
            // SAFETY: the core is below the size of the set.
            unsafe { libc::CPU_SET(core, &mut cores.0) };
            cores
        };
        // SAFETY: the core is below the size of the set.
        (0..libc::CPU_SETSIZE as usize)
            .filter(|&core| unsafe { libc::CPU_ISSET(core, &self.0) })
            .map(alone)
            .collect()
    }

    /// Binds the calling thread to the cores of the set.
    #[cfg(test)]
    pub fn bind(&self) {
        self.set(0).unwrap();
    }
}
