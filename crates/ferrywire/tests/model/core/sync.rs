//! loom's types under the names of the engine's `core::sync`; wakers and threads to park, made of loom's locks.
//!
//! loom takes a `SeqCst` access for an `AcqRel` one and would report wake-ups as lost that are not. Its `SeqCst` fences are
//! whole, so two such accesses of one thread have a fence between them here. An access of a weaker order in between gains
//! nothing from it: the fence is made before a store and after a load. So a `SeqCst` that is weakened by mistake is noticed,
//! unless the thread has another one right before that load, or right after that store: its fence then stands in.

use loom::sync::Condvar;
pub use loom::sync::Mutex;
pub use loom::sync::atomic::fence;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

loom::thread_local! {
    /// The thread's last `SeqCst` access has no fence behind it yet.
    static UNFENCED: Cell<bool> = Cell::new(false);
}

/// Before each access, of this order.
fn fence_between(order: Ordering, stores: bool) {
    let is_total = order == Ordering::SeqCst;
    UNFENCED.with(|unfenced| {
        if unfenced.get() && (is_total || stores) {
            fence(Ordering::SeqCst);
            unfenced.set(false);
        }
        unfenced.set(unfenced.get() || is_total);
    });
}

macro_rules! atomic {
    ($name:ident, $value:ty) => {
        #[derive(Default)]
        pub struct $name(loom::sync::atomic::$name);

        impl $name {
            pub fn new(value: $value) -> $name {
                $name(loom::sync::atomic::$name::new(value))
            }

            pub fn load(&self, order: Ordering) -> $value {
                fence_between(order, false);
                self.0.load(order)
            }

            pub fn store(&self, value: $value, order: Ordering) {
                fence_between(order, true);
                self.0.store(value, order);
            }

            pub fn swap(&self, value: $value, order: Ordering) -> $value {
                fence_between(order, true);
                self.0.swap(value, order)
            }
        }
    };
}

macro_rules! counter {
    ($name:ident, $value:ty) => {
        atomic!($name, $value);

        impl $name {
            pub fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                fence_between(order, true);
                self.0.fetch_add(value, order)
            }

            pub fn fetch_sub(&self, value: $value, order: Ordering) -> $value {
                fence_between(order, true);
                self.0.fetch_sub(value, order)
            }
        }
    };
}

atomic!(AtomicBool, bool);
counter!(AtomicU8, u8);
counter!(AtomicU32, u32);
counter!(AtomicUsize, usize);

/// A wake that stays until it is taken, as an eventfd does.
#[derive(Default)]
pub struct Wake {
    is_set: Mutex<bool>,
    changed: Condvar,
}

impl Wake {
    pub fn wake(&self) {
        *self.is_set.lock().unwrap() = true;
        self.changed.notify_all();
    }

    /// Sleeps until it is set, and takes it.
    pub fn wait(&self) {
        let mut is_set = self.is_set.lock().unwrap();
        while !*is_set {
            is_set = self.changed.wait(is_set).unwrap();
        }
        *is_set = false;
    }
}

loom::thread_local! {
    static CURRENT: Thread = Thread::default();
}

/// A thread that may be unparked. loom's own forgets a token that comes while the thread waits for a lock.
#[derive(Clone, Default)]
pub struct Thread(Arc<Wake>);

impl Thread {
    pub fn current() -> Thread {
        CURRENT.with(Thread::clone)
    }

    pub fn id(&self) -> *const Wake {
        Arc::as_ptr(&self.0)
    }

    pub fn unpark(&self) {
        self.0.wake();
    }

    /// Parks the calling thread.
    pub fn park() {
        Thread::current().0.wait();
    }
}

/// Ends a [`Poller::wait`].
#[derive(Clone)]
pub struct Waker(Arc<Wake>);

impl Waker {
    pub fn wake(&self) {
        self.0.wake();
    }
}

/// Where threads sleep; one of them takes the wake.
#[derive(Clone, Default)]
pub struct Poller(Arc<Wake>);

impl Poller {
    pub fn waker(&self) -> Waker {
        Waker(self.0.clone())
    }

    /// Sleeps until there is a wake, and takes it.
    pub fn wait(&self) {
        self.0.wait();
    }

    /// Looks without sleeping: takes a wake that is there.
    pub fn poll(&self) {
        *self.0.is_set.lock().unwrap() = false;
    }
}
