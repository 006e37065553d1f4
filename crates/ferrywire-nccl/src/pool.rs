//! The worker threads that move bulk for all comms of the process, and the sockets on which they move it.
//!
//! Threads are started with the first comm, and more once the process drives several GPUs. They never end, because the
//! library is never unloaded. Fewer threads than wanted are enough; if none starts, the next comm tries again.
//! Invariants: each socket for bulk belongs to one worker; a wire's connection is touched only under its lock, so
//! closing knows when no thread uses it.
//! Read next: `worker.rs`.

use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;

use ferrywire_net::Conn;
use ferrywire_sys::affinity::thread_id;
use ferrywire_sys::poll::{Interest, Poller, Waker};

use crate::affinity::Affinity;
use crate::comm::locked;
use crate::failure::{Fault, Outcome};
use crate::log;
use crate::metrics;
use crate::ranks;
use crate::receiving::Receiving;
use crate::sending::Sending;
use crate::settings::settings;
use crate::wire::{Receiver, Sender};
use crate::worker::Loop;

/// Message number that stands for "waits for no message".
pub const NO_MESSAGE: u64 = u64::MAX;

/// The workers of this process.
pub struct Pool {
    workers: Mutex<Workers>,
    affinity: Affinity,
    senders: AtomicUsize,
    receivers: AtomicUsize,
    wires: AtomicU64,
}

/// The worker threads, at least one.
struct Workers {
    all: Vec<Arc<Worker>>,
    /// Number of workers that were to be started; some may have failed to start.
    wished: usize,
}

/// The pool of this process, for a comm that the calling thread makes; the first call starts the workers.
///
/// # Errors
/// No worker could be started.
pub fn pool() -> Outcome<&'static Pool> {
    static POOL: Once = Once::new();
    let threads = settings().threads(ranks::most());
    let pool = POOL.get(|| Pool::start(threads, Worker::start))?;
    pool.grow(threads, Worker::start);
    pool.serve_this_thread();
    metrics::start();
    Ok(pool)
}

/// A pool that is made at first need; a failed try is repeated by the next call.
struct Once {
    made: OnceLock<Pool>,
    making: Mutex<()>,
}

impl Once {
    const fn new() -> Once {
        Once { made: OnceLock::new(), making: Mutex::new(()) }
    }

    fn get(&self, make: impl FnOnce() -> Outcome<Pool>) -> Outcome<&Pool> {
        let _one = self.made.get().is_none().then(|| locked(&self.making));
        match self.made.get() {
            Some(pool) => Ok(pool),
            None => {
                let pool = make()?;
                Ok(self.made.get_or_init(|| pool))
            }
        }
    }
}

impl Pool {
    /// Starts a pool with this many workers, or as many as possible.
    fn start(threads: usize, start: impl FnMut(usize) -> io::Result<Arc<Worker>>) -> Outcome<Pool> {
        let all = started(0..threads, start)?;
        log::info(format_args!("{} worker threads move bulk data", all.len()));
        // Sends and receives begin with different workers, so that both directions of a rank do not share a few.
        let (senders, receivers) = (AtomicUsize::new(0), AtomicUsize::new(all.len() / 2));
        let (workers, affinity) = (Mutex::new(Workers { all, wished: threads }), Affinity::of_this_thread());
        Ok(Pool { workers, affinity, senders, receivers, wires: AtomicU64::new(0) })
    }

    /// Starts more workers if `threads` is above the number that was wanted so far.
    fn grow(&self, threads: usize, start: impl FnMut(usize) -> io::Result<Arc<Worker>>) {
        let mut workers = locked(&self.workers);
        if threads <= workers.wished {
            return;
        }
        workers.wished = threads;
        match started(workers.all.len()..threads, start) {
            Ok(more) => {
                self.affinity.hold(threads_of(&more));
                workers.all.extend(more);
                log::info(format_args!("{} worker threads move bulk data", workers.all.len()));
            }
            Err(fault) => log::warn(format_args!(
                "{} worker threads move bulk data, and no more can be started: {}",
                workers.all.len(),
                fault.why
            )),
        }
    }

    /// Also allows the workers to run on the cores of the calling thread.
    fn serve_this_thread(&self) {
        self.affinity.add_this_threads(threads_of(&locked(&self.workers).all));
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        locked(&self.workers).all.len()
    }

    /// A pool with its own workers, for tests.
    #[cfg(test)]
    pub fn of(threads: usize) -> Pool {
        Pool::start(threads, Worker::start).unwrap()
    }

    /// Assigns a sending connection to a worker.
    pub fn send_over(&self, sender: Sender, comm: Arc<Sending>) -> Outcome<Arc<Wire>> {
        let worker = self.next(&self.senders);
        let sender = Mutex::new(Some(sender));
        self.add(
            worker,
            Side::Send { sender, comm, armed: AtomicBool::new(false), blocked: AtomicBool::new(false) },
        )
    }

    /// Assigns a receiving connection to a worker.
    pub fn receive_over(&self, receiver: Receiver, comm: Arc<Receiving>) -> Outcome<Arc<Wire>> {
        let worker = self.next(&self.receivers);
        let receiver = Mutex::new(Some(receiver));
        self.add(worker, Side::Receive { receiver, comm, waits_for: AtomicU64::new(NO_MESSAGE) })
    }

    fn next(&self, counter: &AtomicUsize) -> Arc<Worker> {
        let workers = locked(&self.workers);
        workers.all[counter.fetch_add(1, Ordering::Relaxed) % workers.all.len()].clone()
    }

    fn add(&self, worker: Arc<Worker>, side: Side) -> Outcome<Arc<Wire>> {
        let wire = Arc::new(Wire { token: self.wires.fetch_add(1, Ordering::Relaxed), worker, side });
        // The worker must know the wire before its first event.
        wire.worker.command(Command::Add(wire.clone()));
        let added = wire.with_fd(|fd| wire.worker.poller.add(fd, wire.token, Interest::READ));
        match added.unwrap_or(Ok(())) {
            Ok(()) => Ok(wire),
            Err(e) => {
                wire.close();
                Err(Fault::system("cannot wait for a connection", &e))
            }
        }
    }
}

/// Starts the workers with these numbers, as many as possible but at least one; an error if none starts.
fn started(
    numbers: Range<usize>,
    mut start: impl FnMut(usize) -> io::Result<Arc<Worker>>,
) -> Outcome<Vec<Arc<Worker>>> {
    let mut workers = Vec::new();
    let wished = numbers.end;
    for number in numbers {
        match start(number) {
            Ok(worker) => workers.push(worker),
            Err(e) if workers.is_empty() => {
                return Err(Fault::system("cannot start the worker threads that move bulk data", &e));
            }
            Err(e) => {
                log::warn(format_args!(
                    "only {number} of {wished} worker threads that move bulk data could be started: {e}"
                ));
                break;
            }
        }
    }
    Ok(workers)
}

/// The kernel's thread ids of the workers that run.
fn threads_of(workers: &[Arc<Worker>]) -> impl Iterator<Item = libc::pid_t> {
    workers.iter().map(|worker| *worker.thread.wait())
}

/// The wires of a comm that is being set up, closed on drop unless it is finished.
#[derive(Default)]
pub struct Opening(Vec<Arc<Wire>>);

impl Opening {
    /// Adds a wire to the comm that is being set up.
    pub fn add(&mut self, wire: Arc<Wire>) {
        self.0.push(wire);
    }

    /// Keeps the wires open and returns them, because the setup has succeeded.
    pub fn finish(mut self) -> Vec<Arc<Wire>> {
        std::mem::take(&mut self.0)
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.0.iter().for_each(|wire| wire.close());
    }
}

/// A socket of a comm for bulk, and its worker.
pub struct Wire {
    /// The worker's key for this wire.
    pub token: u64,
    /// The worker that the wire belongs to.
    pub worker: Arc<Worker>,
    /// The direction of the wire, with its connection.
    pub side: Side,
}

/// Why a wire cannot take work immediately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delay {
    /// There is no delay: the worker is awake.
    Awake,
    /// The worker sleeps and has to be woken.
    Asleep,
    /// The socket has no room to send.
    Blocked,
}

/// The direction of a wire, with its connection until it is closed.
pub enum Side {
    /// The sending direction.
    Send {
        /// The sender; `None` once the wire is closed.
        sender: Mutex<Option<Sender>>,
        /// The comm whose queue is sent.
        comm: Arc<Sending>,
        /// Whether the worker is going to check the queue.
        armed: AtomicBool,
        /// Whether the socket's send buffer is full.
        blocked: AtomicBool,
    },
    /// The receiving direction.
    Receive {
        /// The receiver; `None` once the wire is closed.
        receiver: Mutex<Option<Receiver>>,
        /// The comm whose messages are received.
        comm: Arc<Receiving>,
        /// Number of the message whose receive is not posted yet, or [`NO_MESSAGE`].
        waits_for: AtomicU64,
    },
}

impl Wire {
    /// Why the wire would not take work immediately.
    pub fn delay(&self) -> Delay {
        match &self.side {
            Side::Send { blocked, .. } if blocked.load(Ordering::SeqCst) => Delay::Blocked,
            _ if self.worker.sleeps() => Delay::Asleep,
            _ => Delay::Awake,
        }
    }

    /// Tells the worker that the comm's queue has something to send.
    pub fn has_work(&self) {
        if let Side::Send { armed, .. } = &self.side
            && !armed.swap(true, Ordering::SeqCst)
        {
            self.worker.command(Command::Kick(self.token));
        }
    }

    /// Tells the worker that the receive of `message` was posted.
    pub fn posted(&self, message: u64) {
        if let Side::Receive { waits_for, .. } = &self.side
            && waits_for.load(Ordering::SeqCst) == message
        {
            self.worker.command(Command::Kick(self.token));
        }
    }

    /// Closes the wire's connection, once no thread uses it. The kernel still sends the bytes that it has.
    pub fn close(&self) {
        // The poller forgets the descriptor before it is closed and under the lock: if a child process has the
        // descriptor too, the poller would keep it.
        let forget = |conn: &dyn Conn| {
            let _ = conn.fd().map(|fd| self.worker.poller.remove(fd));
        };
        match &self.side {
            Side::Send { sender, .. } => {
                let mut sender = locked(sender);
                if let Some(mut sender) = sender.take() {
                    forget(sender.conn());
                    sender.stop();
                }
            }
            Side::Receive { receiver, .. } => {
                let mut receiver = locked(receiver);
                if let Some(mut receiver) = receiver.take() {
                    forget(receiver.conn());
                    receiver.stop();
                }
            }
        }
        self.worker.command(Command::Forget(self.token));
    }

    /// Runs `act` with the wire's descriptor, which is not closed meanwhile; `None` if it is closed already.
    pub fn with_fd<T>(&self, act: impl FnOnce(RawFd) -> T) -> Option<T> {
        match &self.side {
            Side::Send { sender, .. } => {
                locked(sender).as_mut().and_then(|sender| sender.conn().fd()).map(act)
            }
            Side::Receive { receiver, .. } => {
                locked(receiver).as_mut().and_then(|receiver| receiver.conn().fd()).map(act)
            }
        }
    }

    /// Ends the wire's comm with this fault.
    pub fn fail(&self, fault: Fault) {
        match &self.side {
            Side::Send { comm, .. } => comm.failure.record(fault),
            Side::Receive { comm, .. } => comm.failure.record(fault),
        }
    }

    /// Whether the wire's comm has failed.
    pub fn failed(&self) -> bool {
        match &self.side {
            Side::Send { comm, .. } => comm.failure.is_some(),
            Side::Receive { comm, .. } => comm.failure.is_some(),
        }
    }
}

/// The part of a worker that other threads share.
pub struct Worker {
    /// The poller on which the worker sleeps.
    pub poller: Poller,
    waker: Waker,
    /// Commands that the worker has not executed yet.
    pub commands: Mutex<Vec<Command>>,
    /// Flags that the worker reads all the time, apart from fields that other threads change.
    signs: Apart<Signs>,
    /// The kernel's id of the worker's thread, once the thread runs.
    thread: OnceLock<libc::pid_t>,
}

/// A value on cache lines of its own: two of them, because CPUs fetch lines in pairs.
#[repr(align(128))]
#[derive(Default)]
struct Apart<T>(T);

#[derive(Default)]
struct Signs {
    /// Whether commands for the worker are queued.
    commanded: AtomicBool,
    /// Whether the worker sleeps, and so has to be woken.
    sleeps: AtomicBool,
}

/// A command to a worker about a wire.
pub enum Command {
    /// The worker owns this wire from now on.
    Add(Arc<Wire>),
    /// The wire with this key may have work.
    Kick(u64),
    /// The wire with this key was closed, and the worker drops it.
    Forget(u64),
}

impl Worker {
    /// Starts a worker and its thread.
    fn start(index: usize) -> io::Result<Arc<Worker>> {
        let poller = Poller::new()?;
        let waker = poller.waker();
        let worker = Arc::new(Worker {
            poller,
            waker,
            commands: Mutex::default(),
            signs: Apart::default(),
            thread: OnceLock::new(),
        });
        let its = worker.clone();
        let run = move || {
            its.thread.get_or_init(thread_id);
            block_signals();
            Loop::new(its).run();
            ferrywire_metrics::thread_ends();
        };
        thread::Builder::new().name(format!("ferrywire-{index}")).spawn(run)?;
        Ok(worker)
    }

    fn command(&self, command: Command) {
        locked(&self.commands).push(command);
        let Signs { commanded, sleeps } = &self.signs.0;
        commanded.store(true, Ordering::SeqCst);
        if sleeps.load(Ordering::SeqCst) {
            self.waker.wake();
        }
    }

    /// Whether commands are queued; called by the worker, which then executes them.
    pub fn is_commanded(&self) -> bool {
        let commanded = &self.signs.0.commanded;
        // The flag is read before it is changed, which keeps the cache line shared: the worker reads it all the
        // time.
        commanded.load(Ordering::SeqCst) && commanded.swap(false, Ordering::SeqCst)
    }

    /// Announces that the worker's thread is going to sleep; returns whether it may.
    pub fn lies_down(&self) -> bool {
        let Signs { commanded, sleeps } = &self.signs.0;
        sleeps.store(true, Ordering::SeqCst);
        !commanded.load(Ordering::SeqCst)
    }

    /// Announces that the worker's thread is awake.
    pub fn is_up(&self) {
        let sleeps = &self.signs.0.sleeps;
        if sleeps.load(Ordering::Relaxed) {
            sleeps.store(false, Ordering::SeqCst);
        }
    }

    /// Whether the worker's thread sleeps or is about to.
    fn sleeps(&self) -> bool {
        self.signs.0.sleeps.load(Ordering::Relaxed)
    }
}

/// Blocks signals on this thread, so that the program's handlers run on its own threads.
pub(crate) fn block_signals() {
    // SAFETY: the set is filled before it is used, and the mask is this thread's own.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::affinity::Cores;

    fn fails(_: usize) -> io::Result<Arc<Worker>> {
        Err(io::Error::from_raw_os_error(libc::EAGAIN))
    }

    #[test]
    fn a_start_that_failed_is_tried_again() {
        let once = Once::new();
        assert!(once.get(|| Pool::start(3, fails)).is_err_and(|fault| fault.why.contains("threads")));
        assert_eq!(once.get(|| Pool::start(2, Worker::start)).unwrap().len(), 2);
        assert_eq!(once.get(|| Pool::start(3, fails)).unwrap().len(), 2);
    }

    /// Regression: all comms of a process with GPUs on two CPU sockets were moved on the cores of one socket.
    #[test]
    fn workers_run_wherever_a_comm_is_made() {
        let all = Cores::of(0).unwrap();
        let [one, other, ..] = all.singles()[..] else {
            println!("SKIPPED: needs two cores");
            return;
        };
        let pool = thread::spawn(move || {
            one.bind();
            Pool::of(2)
        });
        let pool = pool.join().unwrap();
        let cores = |pool: &Pool| {
            threads_of(&locked(&pool.workers).all)
                .map(|thread| Cores::of(thread).unwrap().count())
                .collect::<Vec<_>>()
        };
        assert_eq!(cores(&pool), [1, 1], "close to the first");
        thread::scope(|scope| {
            let more = || {
                other.bind();
                pool.serve_this_thread();
            };
            scope.spawn(more);
        });
        assert_eq!(cores(&pool), [2, 2]);
        thread::scope(|scope| {
            let known = || {
                one.bind();
                pool.serve_this_thread();
            };
            scope.spawn(known);
        });
        assert_eq!(cores(&pool), [2, 2], "none is taken away");
        thread::scope(|scope| {
            let later = || {
                one.bind();
                pool.grow(3, Worker::start);
            };
            scope.spawn(later);
        });
        assert_eq!(cores(&pool), [2, 2, 2], "nor from those that come later");
    }

    #[test]
    fn fewer_threads_than_wished_for_are_enough() {
        let below = |count| move |index| if index < count { Worker::start(index) } else { fails(index) };
        let pool = Pool::start(5, below(2)).unwrap();
        assert_eq!(pool.len(), 2);
        let never = |_| panic!("not asked for again");
        pool.grow(5, never);
        pool.grow(8, fails);
        assert_eq!(pool.len(), 2);
        pool.grow(8, never);
        pool.grow(9, below(4));
        assert_eq!(pool.len(), 4);
    }
}
