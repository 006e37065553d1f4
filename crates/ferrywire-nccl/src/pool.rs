//! The threads that move bulk for all comms of the process, and the sockets for bulk that they move it on.
//!
//! Threads are made with the first comm, more once the process turns out to drive several GPUs, and stay: the library is never
//! unloaded. Fewer than wished for are enough; with none at all the next comm tries again.
//! Invariants: each socket for bulk belongs to one worker; a wire's connection is touched under its lock, so closing
//! knows when nobody does.
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
use crate::ranks;
use crate::receiving::Receiving;
use crate::sending::Sending;
use crate::settings::settings;
use crate::wire::{Receiver, Sender};
use crate::worker::Loop;

/// No message is waited for.
pub const NO_MESSAGE: u64 = u64::MAX;

/// The workers of this process.
pub struct Pool {
    workers: Mutex<Workers>,
    affinity: Affinity,
    senders: AtomicUsize,
    receivers: AtomicUsize,
    wires: AtomicU64,
}

/// Never empty.
struct Workers {
    all: Vec<Arc<Worker>>,
    /// As many were to be started, also where some could not be.
    wished: usize,
}

/// The workers, for a comm that this thread makes; the first call starts them.
pub fn pool() -> Outcome<&'static Pool> {
    static POOL: Once = Once::new();
    let threads = settings().threads(ranks::most());
    let pool = POOL.get(|| Pool::start(threads, Worker::start))?;
    pool.grow(threads, Worker::start);
    pool.serve_this_thread();
    Ok(pool)
}

/// A pool that is made once; an attempt that has failed counts for nothing.
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
    /// With so many workers, or as many as there can be.
    fn start(threads: usize, start: impl FnMut(usize) -> io::Result<Arc<Worker>>) -> Outcome<Pool> {
        let all = started(0..threads, start)?;
        log::info(format_args!("{} threads move bulk", all.len()));
        // The two ways of a comm's rank are not dealt to the same few.
        let (senders, receivers) = (AtomicUsize::new(0), AtomicUsize::new(all.len() / 2));
        let (workers, affinity) = (Mutex::new(Workers { all, wished: threads }), Affinity::of_this_thread());
        Ok(Pool { workers, affinity, senders, receivers, wires: AtomicU64::new(0) })
    }

    /// Starts more, if there were to be fewer until now.
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
                log::info(format_args!("{} threads move bulk", workers.all.len()));
            }
            Err(fault) => {
                log::warn(format_args!("{} threads have to be enough: {}", workers.all.len(), fault.why))
            }
        }
    }

    /// Lets the workers run where this thread may.
    fn serve_this_thread(&self) {
        self.affinity.add_this_threads(threads_of(&locked(&self.workers).all));
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        locked(&self.workers).all.len()
    }

    /// With so many workers, for tests of what comms have in common.
    #[cfg(test)]
    pub fn of(threads: usize) -> Pool {
        Pool::start(threads, Worker::start).unwrap()
    }

    /// Lets a worker send over this connection.
    pub fn send_over(&self, sender: Sender, comm: Arc<Sending>) -> Outcome<Arc<Wire>> {
        let worker = self.next(&self.senders);
        let sender = Mutex::new(Some(sender));
        self.add(
            worker,
            Side::Send { sender, comm, armed: AtomicBool::new(false), blocked: AtomicBool::new(false) },
        )
    }

    /// Lets a worker receive over this connection.
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
        // The worker has to know it before its first event.
        wire.worker.command(Command::Add(wire.clone()));
        let added = wire.with_fd(|fd| wire.worker.poller.add(fd, wire.token, Interest::READ));
        match added.unwrap_or(Ok(())) {
            Ok(()) => Ok(wire),
            Err(e) => {
                wire.close();
                Err(Fault::system("waiting for a connection", &e))
            }
        }
    }
}

/// Workers with these numbers, as many as can be started, but at least one.
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
                return Err(Fault::system("starting the threads that move bulk", &e));
            }
            Err(e) => {
                log::warn(format_args!("only {number} threads of {wished} to move bulk: {e}"));
                break;
            }
        }
    }
    Ok(workers)
}

/// Their numbers to the kernel, once they run.
fn threads_of(workers: &[Arc<Worker>]) -> impl Iterator<Item = libc::pid_t> {
    workers.iter().map(|worker| *worker.thread.wait())
}

/// Wires of a comm that is being made: closed, unless it comes about.
#[derive(Default)]
pub struct Opening(Vec<Arc<Wire>>);

impl Opening {
    /// One more.
    pub fn add(&mut self, wire: Arc<Wire>) {
        self.0.push(wire);
    }

    /// The comm has come about.
    pub fn finish(mut self) -> Vec<Arc<Wire>> {
        std::mem::take(&mut self.0)
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.0.iter().for_each(|wire| wire.close());
    }
}

/// A socket for bulk.
pub struct Wire {
    /// What its worker knows it by.
    pub token: u64,
    /// Whose it is.
    pub worker: Arc<Worker>,
    /// Which way it goes.
    pub side: Side,
}

/// What a wire has to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delay {
    /// Nothing.
    Awake,
    /// Its worker sleeps.
    Asleep,
    /// Its socket has no room.
    Blocked,
}

/// A direction, with the connection while there is one.
pub enum Side {
    /// `armed`: the worker is going to look at the comm's queue; `blocked`: when its socket has room.
    Send {
        /// None once it is closed.
        sender: Mutex<Option<Sender>>,
        /// What it sends from.
        comm: Arc<Sending>,
        /// See above.
        armed: AtomicBool,
        /// See above.
        blocked: AtomicBool,
    },
    /// `waits_for`: the message whose receive is not posted yet, or [`NO_MESSAGE`].
    Receive {
        /// None once it is closed.
        receiver: Mutex<Option<Receiver>>,
        /// What it receives into.
        comm: Arc<Receiving>,
        /// See above.
        waits_for: AtomicU64,
    },
}

impl Wire {
    /// What keeps it from taking at once what is told to it now.
    pub fn delay(&self) -> Delay {
        match &self.side {
            Side::Send { blocked, .. } if blocked.load(Ordering::SeqCst) => Delay::Blocked,
            _ if self.worker.sleeps() => Delay::Asleep,
            _ => Delay::Awake,
        }
    }

    /// There is something to send.
    pub fn has_work(&self) {
        if let Side::Send { armed, .. } = &self.side
            && !armed.swap(true, Ordering::SeqCst)
        {
            self.worker.command(Command::Kick(self.token));
        }
    }

    /// A receive was posted.
    pub fn posted(&self, message: u64) {
        if let Side::Receive { waits_for, .. } = &self.side
            && waits_for.load(Ordering::SeqCst) == message
        {
            self.worker.command(Command::Kick(self.token));
        }
    }

    /// Takes the connection away, once nobody uses it, and closes it. What the kernel has goes on being sent.
    pub fn close(&self) {
        // Before it is closed, and without letting its worker in between: a child of this process may have it too, and then it
        // stays in the poller.
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

    /// Does something with the descriptor, which is not closed meanwhile; nothing if it is closed already.
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

    /// Ends the comm with this.
    pub fn fail(&self, fault: Fault) {
        match &self.side {
            Side::Send { comm, .. } => comm.failure.record(fault),
            Side::Receive { comm, .. } => comm.failure.record(fault),
        }
    }

    /// Whether the comm has ended.
    pub fn failed(&self) -> bool {
        match &self.side {
            Side::Send { comm, .. } => comm.failure.is_some(),
            Side::Receive { comm, .. } => comm.failure.is_some(),
        }
    }
}

/// What other threads share with a worker's.
pub struct Worker {
    /// What it waits on.
    pub poller: Poller,
    waker: Waker,
    /// To be obeyed.
    pub commands: Mutex<Vec<Command>>,
    /// Read by its thread again and again, while others change what lies around it.
    signs: Apart<Signs>,
    /// Its thread, once that runs.
    thread: OnceLock<libc::pid_t>,
}

/// On cache lines of its own: two of them, since CPUs fetch neighbours in pairs.
#[repr(align(128))]
#[derive(Default)]
struct Apart<T>(T);

#[derive(Default)]
struct Signs {
    /// There are commands.
    commanded: AtomicBool,
    /// It has to be woken.
    sleeps: AtomicBool,
}

/// What a worker is told about a wire.
pub enum Command {
    /// It is yours.
    Add(Arc<Wire>),
    /// It may have something to do.
    Kick(u64),
    /// It is closed.
    Forget(u64),
}

impl Worker {
    /// With its thread.
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

    /// Whether there are commands, for its thread, which obeys them then.
    pub fn is_commanded(&self) -> bool {
        let commanded = &self.signs.0.commanded;
        // It asks all the time, and does not take the line from others each time.
        commanded.load(Ordering::SeqCst) && commanded.swap(false, Ordering::SeqCst)
    }

    /// Its thread is going to sleep; whether it may.
    pub fn lies_down(&self) -> bool {
        let Signs { commanded, sleeps } = &self.signs.0;
        sleeps.store(true, Ordering::SeqCst);
        !commanded.load(Ordering::SeqCst)
    }

    /// Its thread is awake.
    pub fn is_up(&self) {
        let sleeps = &self.signs.0.sleeps;
        if sleeps.load(Ordering::Relaxed) {
            sleeps.store(false, Ordering::SeqCst);
        }
    }

    /// Whether it sleeps, or is about to.
    fn sleeps(&self) -> bool {
        self.signs.0.sleeps.load(Ordering::Relaxed)
    }
}

/// Handlers of the program run on its own threads.
fn block_signals() {
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

    /// All comms of a process with GPUs on two CPU sockets were moved on the cores of one.
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
