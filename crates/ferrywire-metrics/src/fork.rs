//! A value of which each process has its own.
//!
//! A forked child has a copy of its parent's memory. A lock that another thread of the parent held at the fork stays locked in
//! the child, and counts in it are the parent's.
//!
//! Invariant: the child makes a new value, and never touches its parent's again, not even to free it.
//! Read next: `registry.rs`, whose counts are such a value.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A value per process, made on first use.
pub(crate) struct PerProcess<T: 'static> {
    place: AtomicPtr<Place<T>>,
    new: fn() -> T,
}

struct Place<T> {
    process: u32,
    value: T,
}

impl<T: Send + Sync> PerProcess<T> {
    /// A value that `new` makes.
    pub const fn new(new: fn() -> T) -> PerProcess<T> {
        PerProcess { place: AtomicPtr::new(ptr::null_mut()), new }
    }

    /// The value of this process. Makes a system call.
    pub fn get(&self) -> &'static T {
        let process = std::process::id();
        let known = self.place.load(Ordering::Acquire);
        // SAFETY: a place that was stored is never freed nor moved.
        match unsafe { known.as_ref() } {
            Some(place) if place.process == process => &place.value,
            _ => self.make(known, process),
        }
    }

    /// The value that this process or its parent used last.
    pub fn last(&self) -> &'static T {
        // SAFETY: as in `get`.
        match unsafe { self.place.load(Ordering::Acquire).as_ref() } {
            Some(place) => &place.value,
            None => self.get(),
        }
    }

    fn make(&self, known: *mut Place<T>, process: u32) -> &'static T {
        let new = Box::into_raw(Box::new(Place { process, value: (self.new)() }));
        let place = match self.place.compare_exchange(known, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => new,
            Err(made_meanwhile) => {
                // SAFETY: the box was made above, and was not stored.
                drop(unsafe { Box::from_raw(new) });
                made_meanwhile
            }
        };
        // SAFETY: as in `get`. Only threads of this process store a place in its memory.
        &unsafe { &*place }.value
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::time::{Duration, Instant};

    static COUNT: PerProcess<Mutex<u32>> = PerProcess::new(Mutex::default);

    /// Regression: a thread that was reading the metrics of the parent at the fork left the child's registry locked, so that the
    /// child's first endpoint hung. Histograms of the child began with its parent's counts.
    #[test]
    fn a_child_that_is_forked_while_the_value_is_locked_has_one_of_its_own() {
        let mut count = COUNT.get().lock().unwrap();
        *count = 5;
        // SAFETY: the child only locks, counts and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let mut own = COUNT.get().lock().unwrap();
            *own += 1;
            let is_same = std::ptr::eq(COUNT.get(), COUNT.last());
            // SAFETY: ends the child without running anything of its parent.
            unsafe { libc::_exit(if is_same { *own as i32 } else { 100 }) };
        }
        let (since, mut status) = (Instant::now(), 0);
        // SAFETY: `child` is a child of this process that was not waited for.
        while unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } == 0 {
            if since.elapsed() > Duration::from_secs(60) {
                // SAFETY: as above.
                unsafe { libc::kill(child, libc::SIGKILL) };
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 1));
        assert_eq!(*count, 5);
    }
}
