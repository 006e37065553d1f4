//! Workers: the threads that move bulk for all comms of the process.
//!
//! Each socket for bulk belongs to one worker, which waits for all of its sockets at once. Without work a worker
//! looks for more for a moment, since the next step of a collective comes soon; then, or at once where others want the
//! core, it sleeps in the kernel. Threads are made with the first comm and stay: the library is never unloaded.
//!
//! A wire's life: added -> has work | waits for its socket | waits for a receive -> ... -> closed.
//! Invariants: a wake is never lost (each side writes its own flag before it reads the other's); the poller waits for
//! a wire exactly when it has no turn coming and waits for no receive; a worker never waits for anything but its
//! poller; a wire's connection is touched under its lock, so closing knows when nobody does.

use std::collections::HashMap;
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ferrywire::sys::poll::{Event, Interest, Poller, Waker};
use ferrywire::transport::PathHealth;

use crate::comm::{Receiving, Sending};
use crate::failure::{Fault, Outcome};
use crate::settings::settings;
use crate::wire::{Receiver, Sender, Turn};

/// How often a worker with senders that have no room asks whether their paths are alive. Who asks more rarely than twice
/// a second begins to count anew each time.
const HEALTH_INTERVAL: Duration = Duration::from_millis(200);
/// A path on which nothing was answered for so long is given up. NCCL cannot go on after an error, so a switch that
/// restarts should not be one.
const SILENT_MAX: Duration = Duration::from_secs(60);
/// When others had the core for so long, they want it: then looking for work costs more than being woken for it,
const YIELD_MAX: Duration = Duration::from_micros(200);
/// and for so long nothing but the kernel is asked.
const CROWDED_FOR: Duration = Duration::from_millis(20);
/// No message is waited for.
const NO_MESSAGE: u64 = u64::MAX;

/// The workers of this process.
pub struct Pool {
    workers: Vec<&'static Worker>,
    senders: AtomicUsize,
    receivers: AtomicUsize,
    wires: AtomicU64,
}

/// The workers; the first call starts them.
pub fn pool() -> Outcome<&'static Pool> {
    static POOL: OnceLock<Outcome<Pool>> = OnceLock::new();
    POOL.get_or_init(Pool::start).as_ref().map_err(Clone::clone)
}

impl Pool {
    fn start() -> Outcome<Pool> {
        let failed = |e| Fault::system("starting the threads that move bulk", &e);
        let workers = (0..settings().threads)
            .map(|index| {
                let poller = Poller::new()?;
                let waker = poller.waker();
                let worker: &'static Worker = Box::leak(Box::new(Worker {
                    poller,
                    waker,
                    commands: Mutex::default(),
                    commanded: AtomicBool::new(false),
                    sleeps: AtomicBool::new(false),
                }));
                let run = move || {
                    block_signals();
                    Loop::new(worker).run();
                };
                thread::Builder::new().name(format!("ferrywire-{index}")).spawn(run)?;
                Ok(worker)
            })
            .collect::<std::io::Result<Vec<_>>>()
            .map_err(failed)?;
        Ok(Pool {
            workers,
            senders: AtomicUsize::new(0),
            receivers: AtomicUsize::new(0),
            wires: AtomicU64::new(0),
        })
    }

    /// Lets a worker send over this connection.
    pub fn send_over(&self, sender: Sender, comm: Arc<Sending>) -> Outcome<Arc<Wire>> {
        let worker = self.next(&self.senders);
        let sender = Mutex::new(Some(sender));
        self.add(worker, Side::Send { sender, comm, armed: AtomicBool::new(false) })
    }

    /// Lets a worker receive over this connection.
    pub fn receive_over(&self, receiver: Receiver, comm: Arc<Receiving>) -> Outcome<Arc<Wire>> {
        let worker = self.next(&self.receivers);
        let receiver = Mutex::new(Some(receiver));
        self.add(worker, Side::Receive { receiver, comm, waits_for: AtomicU64::new(NO_MESSAGE) })
    }

    fn next(&self, counter: &AtomicUsize) -> &'static Worker {
        self.workers[counter.fetch_add(1, Ordering::Relaxed) % self.workers.len()]
    }

    fn add(&self, worker: &'static Worker, side: Side) -> Outcome<Arc<Wire>> {
        let wire = Arc::new(Wire { token: self.wires.fetch_add(1, Ordering::Relaxed), worker, side });
        // The worker has to know it before its first event.
        worker.command(Command::Add(wire.clone()));
        let added = wire.with_fd(|fd| worker.poller.add(fd, wire.token, Interest::READ));
        match added.unwrap_or(Ok(())) {
            Ok(()) => Ok(wire),
            Err(e) => {
                wire.close();
                Err(Fault::system("waiting for a connection", &e))
            }
        }
    }
}

fn is_silent(path: &PathHealth) -> bool {
    path.is_dead() && path.silent_for >= SILENT_MAX
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

/// A socket for bulk.
pub struct Wire {
    token: u64,
    worker: &'static Worker,
    side: Side,
}

enum Side {
    /// `armed`: the worker is going to look at the comm's queue.
    Send {
        sender: Mutex<Option<Sender>>,
        comm: Arc<Sending>,
        armed: AtomicBool,
    },
    Receive {
        receiver: Mutex<Option<Receiver>>,
        comm: Arc<Receiving>,
        waits_for: AtomicU64,
    },
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Wire {
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
        // Before it is closed: a child of this process may have it too, and then it stays in the poller.
        let _ = self.with_fd(|fd| self.worker.poller.remove(fd));
        match &self.side {
            Side::Send { sender, .. } => {
                if let Some(mut sender) = locked(sender).take() {
                    sender.conn().shutdown();
                }
            }
            Side::Receive { receiver, .. } => {
                if let Some(mut receiver) = locked(receiver).take() {
                    receiver.conn().shutdown();
                }
            }
        }
        self.worker.command(Command::Forget(self.token));
    }

    /// Does something with the descriptor, which is not closed meanwhile; nothing if it is closed already.
    fn with_fd<T>(&self, act: impl FnOnce(RawFd) -> T) -> Option<T> {
        match &self.side {
            Side::Send { sender, .. } => {
                locked(sender).as_mut().and_then(|sender| sender.conn().fd()).map(act)
            }
            Side::Receive { receiver, .. } => {
                locked(receiver).as_mut().and_then(|receiver| receiver.conn().fd()).map(act)
            }
        }
    }

    fn fail(&self, fault: Fault) {
        match &self.side {
            Side::Send { comm, .. } => comm.failure.record(fault),
            Side::Receive { comm, .. } => comm.failure.record(fault),
        }
    }

    fn failed(&self) -> bool {
        match &self.side {
            Side::Send { comm, .. } => comm.failure.is_some(),
            Side::Receive { comm, .. } => comm.failure.is_some(),
        }
    }
}

/// What other threads share with a worker's.
struct Worker {
    poller: Poller,
    waker: Waker,
    commands: Mutex<Vec<Command>>,
    commanded: AtomicBool,
    sleeps: AtomicBool,
}

enum Command {
    Add(Arc<Wire>),
    Kick(u64),
    Forget(u64),
}

impl Worker {
    fn command(&self, command: Command) {
        locked(&self.commands).push(command);
        self.commanded.store(true, Ordering::SeqCst);
        if self.sleeps.load(Ordering::SeqCst) {
            self.waker.wake();
        }
    }
}

/// What a worker's thread alone touches.
struct Loop {
    worker: &'static Worker,
    wires: HashMap<u64, Seat>,
    /// Wires that have something to do at once.
    runnable: Vec<u64>,
    health_asked: Instant,
}

/// A wire and what its poller waits for.
struct Seat {
    wire: Arc<Wire>,
    interest: Interest,
    /// It is among those that have something to do; once, or a turn would meet what the one before has decided.
    queued: bool,
    over: bool,
}

impl Loop {
    fn new(worker: &'static Worker) -> Loop {
        Loop { worker, wires: HashMap::new(), runnable: Vec::new(), health_asked: Instant::now() }
    }

    fn run(mut self) {
        let spin = settings().spin;
        let mut events = Vec::new();
        let mut idle_since = Instant::now();
        let mut crowded_until = idle_since;
        loop {
            let mut worked = self.obey();
            let now = Instant::now();
            let looked = now < crowded_until || now.duration_since(idle_since) >= spin;
            worked |= self.wait(&mut events, looked && !worked);
            for event in &events {
                worked |= self.ready(event);
            }
            for token in std::mem::take(&mut self.runnable) {
                worked = true;
                self.turn(token);
            }
            let now = Instant::now();
            match worked {
                true => idle_since = now,
                false => {
                    thread::yield_now();
                    if now.elapsed() >= YIELD_MAX {
                        crowded_until = Instant::now() + CROWDED_FOR;
                    }
                }
            }
        }
    }

    /// Looks what is ready, or sleeps until something is; whether it slept.
    fn wait(&mut self, events: &mut Vec<Event>, may_sleep: bool) -> bool {
        let worker = self.worker;
        let mut timeout = Some(Duration::ZERO);
        if may_sleep && self.runnable.is_empty() {
            worker.sleeps.store(true, Ordering::SeqCst);
            if !worker.commanded.load(Ordering::SeqCst) {
                timeout = self.has_blocked().then_some(HEALTH_INTERVAL);
            }
        }
        let slept = timeout != Some(Duration::ZERO);
        if worker.poller.wait(events, timeout).is_err() {
            // It fails only for arguments that cannot be wrong here; never spin on that.
            thread::sleep(Duration::from_millis(1));
        }
        worker.sleeps.store(false, Ordering::SeqCst);
        if self.health_asked.elapsed() >= HEALTH_INTERVAL {
            self.ask_health();
        }
        slept
    }

    fn has_blocked(&self) -> bool {
        self.wires.values().any(|seat| seat.interest.write && !seat.over)
    }

    fn ask_health(&mut self) {
        self.health_asked = Instant::now();
        for seat in self.wires.values().filter(|seat| seat.interest.write && !seat.over) {
            let Side::Send { sender, .. } = &seat.wire.side else { continue };
            if let Some(sender) = locked(sender).as_mut()
                && is_silent(&sender.conn().health())
            {
                seat.wire.fail(Fault::remote(format_args!("{} does not answer", sender.peer())));
            }
        }
    }

    fn obey(&mut self) -> bool {
        if !self.worker.commanded.swap(false, Ordering::SeqCst) {
            return false;
        }
        let commands = std::mem::take(&mut *locked(&self.worker.commands));
        for command in commands {
            match command {
                Command::Add(wire) => {
                    let seat = Seat { wire, interest: Interest::READ, queued: false, over: false };
                    self.wires.insert(seat.wire.token, seat);
                }
                Command::Kick(token) => self.kicked(token),
                Command::Forget(token) => drop(self.wires.remove(&token)),
            }
        }
        true
    }

    /// There may be work for a wire that had none.
    fn kicked(&mut self, token: u64) {
        let Some(seat) = self.wires.get_mut(&token) else { return };
        match &seat.wire.side {
            // It goes on when its socket has room.
            Side::Send { .. } if seat.interest.write => {}
            Side::Send { .. } => seat.queue(&mut self.runnable),
            Side::Receive { comm, waits_for, .. } => {
                let message = waits_for.load(Ordering::SeqCst);
                if message != NO_MESSAGE && comm.is_posted(message) {
                    waits_for.store(NO_MESSAGE, Ordering::SeqCst);
                    comm.waiting.fetch_sub(1, Ordering::SeqCst);
                    seat.wants(Interest::READ);
                    seat.queue(&mut self.runnable);
                }
            }
        }
    }

    fn ready(&mut self, event: &Event) -> bool {
        let Some(seat) = self.wires.get_mut(&event.token) else { return false };
        let broken = event.error || event.hangup;
        match &seat.wire.side {
            Side::Send { sender, comm, .. } => {
                if event.readable || broken {
                    let looked = locked(sender).as_mut().map(|sender| sender.look(comm));
                    if looked != Some(Turn::Idle) {
                        seat.leave();
                        return true;
                    }
                }
                if event.writable && seat.interest.write {
                    seat.wants(Interest::READ);
                    seat.queue(&mut self.runnable);
                }
            }
            Side::Receive { waits_for, receiver, .. } => {
                if waits_for.load(Ordering::SeqCst) == NO_MESSAGE {
                    seat.queue(&mut self.runnable);
                } else if broken {
                    let peer = locked(receiver).as_mut().map(|receiver| receiver.peer());
                    if let Some(peer) = peer {
                        let reset = std::io::Error::from_raw_os_error(libc::ECONNRESET);
                        seat.wire.fail(Fault::connection(peer, &reset));
                    }
                    seat.leave();
                }
            }
        }
        true
    }

    /// A turn of a wire; a panic in it ends its comm and nothing else.
    fn turn(&mut self, token: u64) {
        let Some(seat) = self.wires.get_mut(&token) else { return };
        seat.queued = false;
        let turned = catch_unwind(AssertUnwindSafe(|| !seat.over && seat.turn()));
        match turned {
            Ok(true) => seat.queue(&mut self.runnable),
            Ok(false) => {}
            Err(_) => {
                let code = ferrywire::nccl::abi::ResultCode::INTERNAL_ERROR;
                seat.wire.fail(Fault { code, why: "a bug in ferrywire, please report it".into() });
                seat.leave();
            }
        }
    }
}

impl Seat {
    /// Gives it a turn soon.
    fn queue(&mut self, runnable: &mut Vec<u64>) {
        if !self.queued {
            self.queued = true;
            runnable.push(self.wire.token);
        }
    }

    /// Moves what can be moved; whether there is more at once.
    fn turn(&mut self) -> bool {
        let wire = self.wire.clone();
        if wire.failed() {
            self.leave();
            return false;
        }
        match &wire.side {
            Side::Send { sender, comm, armed } => {
                if self.interest.write {
                    return false;
                }
                let turn = locked(sender).as_mut().map(|sender| sender.turn(comm, || comm.take()));
                match turn {
                    Some(Turn::More) => return true,
                    Some(Turn::Idle) => {
                        armed.store(false, Ordering::SeqCst);
                        return comm.has_work() && !armed.swap(true, Ordering::SeqCst);
                    }
                    Some(Turn::Blocked) => self.wants(Interest::BOTH),
                    _ => self.leave(),
                }
            }
            Side::Receive { receiver, comm, waits_for } => {
                if waits_for.load(Ordering::SeqCst) != NO_MESSAGE {
                    return false;
                }
                let turn = locked(receiver).as_mut().map(|receiver| receiver.turn(comm));
                match turn {
                    Some(Turn::More) => return true,
                    Some(Turn::Idle) => {}
                    Some(Turn::Waits(message)) => {
                        waits_for.store(message, Ordering::SeqCst);
                        comm.waiting.fetch_add(1, Ordering::SeqCst);
                        if comm.is_posted(message) {
                            waits_for.store(NO_MESSAGE, Ordering::SeqCst);
                            comm.waiting.fetch_sub(1, Ordering::SeqCst);
                            return true;
                        }
                        self.wants(Interest::NONE);
                    }
                    _ => self.leave(),
                }
            }
        }
        false
    }

    fn wants(&mut self, interest: Interest) {
        if self.interest != interest && !self.over {
            self.interest = interest;
            let _ = self.wire.with_fd(|fd| self.wire.worker.poller.modify(fd, self.wire.token, interest));
        }
    }

    /// Nothing will come of it any more: its events would only repeat themselves.
    fn leave(&mut self) {
        self.over = true;
        let _ = self.wire.with_fd(|fd| self.wire.worker.poller.remove(fd));
    }
}
