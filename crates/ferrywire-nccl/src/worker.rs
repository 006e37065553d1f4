//! A worker: a thread that moves bulk on the sockets that belong to it.
//!
//! A worker waits for all its sockets at once. Without work it polls for a moment, because the next step of a
//! collective comes soon. Then it sleeps in the kernel; it sleeps at once if other threads want the core.
//!
//! A wire's life: added -> has work | waits for its socket | waits for a receive (parked, if its stream has broken
//! meanwhile) -> ... -> closed. Invariants: no wake-up is lost (each side writes its own flag before it reads the
//! other's); the poller waits for a wire exactly when the wire has no turn coming and waits for no receive; a worker
//! waits for nothing but its poller; a panic ends the comm that caused it, and no other.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use ferrywire_ncclnet::abi::ResultCode;
use ferrywire_sys::poll::{Event, Interest};

use crate::comm::locked;
use crate::failure::Fault;
use crate::pool::{Command, NO_MESSAGE, Side, Wire, Worker};
use crate::settings::settings;
use crate::wire::{HEALTH_INTERVAL, Turn};

/// Pause between two polls beyond which other threads seem to need the core: polling then costs more than a
/// wake-up.
const YIELD_MAX: Duration = Duration::from_micros(200);
/// Time after a pause of more than [`YIELD_MAX`] in which the worker sleeps without polling first.
const CROWDED_FOR: Duration = Duration::from_millis(20);
/// Most turns in a row without polling the kernel.
const TURNS_UNASKED_MAX: u32 = 4;
/// Pause after a panic, so that a repeated panic does not keep a core busy.
const PANIC_PAUSE: Duration = Duration::from_millis(1);

/// State that only the worker's thread touches.
pub struct Loop {
    worker: Arc<Worker>,
    wires: HashMap<u64, Seat>,
    /// Commands that were taken from the queue and not executed yet.
    orders: VecDeque<Command>,
    /// Tokens of the wires that have work now.
    runnable: Vec<u64>,
    health_asked: Instant,
    /// Token of the wire that is being handled.
    about: Option<u64>,
}

/// A wire and the events that its poller waits for.
struct Seat {
    wire: Arc<Wire>,
    interest: Interest,
    /// Whether the wire is removed from the poller, because its events would only repeat.
    parked: bool,
    /// Whether the wire is in `runnable`, which has it at most once: a second turn would repeat the decisions of
    /// the first.
    queued: bool,
    over: bool,
}

impl Loop {
    /// The loop of a worker.
    pub fn new(worker: Arc<Worker>) -> Loop {
        Loop {
            worker,
            wires: HashMap::new(),
            orders: VecDeque::new(),
            runnable: Vec::new(),
            health_asked: Instant::now(),
            about: None,
        }
    }

    /// Runs the worker for as long as the process lives.
    pub fn run(mut self) {
        loop {
            if catch_unwind(AssertUnwindSafe(|| self.serve())).is_err() {
                self.recover();
            }
        }
    }

    fn serve(&mut self) {
        let spin = settings().spin;
        let mut events = Vec::new();
        let mut idle_since = Instant::now();
        let mut crowded_until = idle_since;
        let mut unasked = 0;
        loop {
            self.about = None;
            let mut worked = self.run_commands();
            // Work that a command has just added is done before the kernel is polled, but only a limited number of
            // times.
            if worked && !self.runnable.is_empty() && unasked < TURNS_UNASKED_MAX {
                unasked += 1;
            } else {
                unasked = 0;
                let now = Instant::now();
                let may_sleep = now < crowded_until || now.duration_since(idle_since) >= spin;
                worked |= self.wait(&mut events, may_sleep && !worked);
                for event in &events {
                    worked |= self.ready(event);
                }
            }
            for token in std::mem::take(&mut self.runnable) {
                worked = true;
                self.turn(token);
            }
            let now = Instant::now();
            if worked {
                idle_since = now
            } else {
                thread::yield_now();
                if now.elapsed() >= YIELD_MAX {
                    crowded_until = Instant::now() + CROWDED_FOR;
                }
            }
        }
    }

    /// Cleans up after a panic: ends the comm that was being handled, or all comms if it is not known. All other
    /// wires get a turn, so that none waits for a turn that was lost.
    fn recover(&mut self) {
        thread::sleep(PANIC_PAUSE);
        let about = self.about.take();
        self.runnable.clear();
        for seat in self.wires.values_mut() {
            seat.queued = false;
            if about.is_none_or(|token| token == seat.wire.token) {
                let code = ResultCode::INTERNAL_ERROR;
                seat.wire.fail(Fault { code, why: "a bug in ferrywire, please report it".into() });
                seat.over = true;
                let _ = catch_unwind(AssertUnwindSafe(|| seat.leave()));
            } else {
                seat.queue(&mut self.runnable);
            }
        }
    }

    /// Polls for events, or sleeps until there are some; returns whether the thread slept.
    fn wait(&mut self, events: &mut Vec<Event>, may_sleep: bool) -> bool {
        self.about = None;
        let worker = self.worker.as_ref();
        let mut timeout = Some(Duration::ZERO);
        if may_sleep && self.runnable.is_empty() && worker.lies_down() {
            timeout = self.has_blocked().then_some(HEALTH_INTERVAL);
        }
        let slept = timeout != Some(Duration::ZERO);
        if worker.poller.wait(events, timeout).is_err() {
            // The call fails only for arguments that cannot be wrong here; the pause prevents a busy loop.
            thread::sleep(Duration::from_millis(1));
        }
        worker.is_up();
        if self.health_asked.elapsed() >= HEALTH_INTERVAL {
            self.ask_health();
        }
        slept
    }

    fn has_blocked(&self) -> bool {
        self.wires.values().any(Seat::is_blocked)
    }

    fn ask_health(&mut self) {
        self.health_asked = Instant::now();
        for seat in self.wires.values_mut().filter(|seat| seat.is_blocked()) {
            self.about = Some(seat.wire.token);
            let Side::Send { sender, .. } = &seat.wire.side else { continue };
            let silence = locked(sender).as_mut().and_then(|sender| sender.silence());
            if let Some(fault) = silence {
                seat.wire.fail(fault);
                seat.leave();
            }
        }
    }

    fn run_commands(&mut self) -> bool {
        if self.worker.is_commanded() {
            self.orders.extend(std::mem::take(&mut *locked(&self.worker.commands)));
        }
        let any = !self.orders.is_empty();
        while let Some(command) = self.orders.pop_front() {
            match command {
                Command::Add(wire) => drop(self.wires.insert(wire.token, Seat::new(wire))),
                Command::Kick(token) => self.kicked(token),
                Command::Forget(token) => drop(self.wires.remove(&token)),
            }
        }
        any
    }

    /// Queues a wire that may have work now.
    fn kicked(&mut self, token: u64) {
        self.about = Some(token);
        let Some(seat) = self.wires.get_mut(&token) else { return };
        let wire = seat.wire.clone();
        match &wire.side {
            // The wire continues when its socket has room.
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
        self.about = Some(event.token);
        let Some(seat) = self.wires.get_mut(&event.token) else { return false };
        let wire = seat.wire.clone();
        let broken = event.error || event.hangup;
        match &wire.side {
            Side::Send { sender, comm, blocked, .. } => {
                if event.readable || broken {
                    let turn = locked(sender).as_mut().map(|sender| sender.check_end(comm));
                    if turn != Some(Turn::Idle) {
                        seat.leave();
                        return true;
                    }
                }
                if event.writable && seat.interest.write {
                    blocked.store(false, Ordering::SeqCst);
                    seat.wants(Interest::READ);
                    seat.queue(&mut self.runnable);
                }
            }
            Side::Receive { waits_for, .. } => {
                if waits_for.load(Ordering::SeqCst) == NO_MESSAGE {
                    seat.queue(&mut self.runnable);
                } else if broken {
                    // The bytes stay in the kernel until their receive is posted.
                    seat.park();
                }
            }
        }
        true
    }

    fn turn(&mut self, token: u64) {
        self.about = Some(token);
        let Some(seat) = self.wires.get_mut(&token) else { return };
        seat.queued = false;
        if !seat.over && seat.turn() {
            seat.queue(&mut self.runnable);
        }
    }
}

impl Seat {
    fn new(wire: Arc<Wire>) -> Seat {
        Seat { wire, interest: Interest::READ, parked: false, queued: false, over: false }
    }

    /// Whether the wire waits for room in its socket.
    fn is_blocked(&self) -> bool {
        self.interest.write && !self.over
    }

    /// Queues a turn for the wire.
    fn queue(&mut self, runnable: &mut Vec<u64>) {
        if !self.queued {
            self.queued = true;
            runnable.push(self.wire.token);
        }
    }

    /// Moves as much as can be moved on the wire; returns whether more can be done immediately.
    fn turn(&mut self) -> bool {
        let wire = self.wire.clone();
        if wire.failed() {
            self.leave();
            return false;
        }
        match &wire.side {
            Side::Send { sender, comm, armed, blocked } => {
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
                    Some(Turn::Blocked) => {
                        self.wants(Interest::BOTH);
                        blocked.store(true, Ordering::SeqCst);
                        if comm.has_work() {
                            comm.tell_others();
                        }
                    }
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
        if self.over || (self.interest == interest && !self.parked) {
            return;
        }
        self.interest = interest;
        let (wire, parked) = (&self.wire, std::mem::take(&mut self.parked));
        let waits = wire.with_fd(|fd| {
            if parked {
                wire.worker.poller.add(fd, wire.token, interest)
            } else {
                wire.worker.poller.modify(fd, wire.token, interest)
            }
        });
        if let Some(Err(e)) = waits {
            wire.fail(Fault::system("cannot wait for a connection", &e));
        }
    }

    /// Removes the wire from the poller until it is wanted again.
    fn park(&mut self) {
        self.parked = true;
        let _ = self.wire.with_fd(|fd| self.wire.worker.poller.remove(fd));
    }

    /// Drops the wire, which has no more work.
    fn leave(&mut self) {
        self.over = true;
        self.park();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Pool;
    use crate::receiving::RecvComm;
    use crate::sending::SendComm;
    use crate::testing::{Chosen, Ends, Panics, connections, drained, lost_with, received, send, until};
    use ferrywire_net::Conn;

    /// Bulk, even when nothing else is in flight.
    const BYTES: usize = 200 << 10;

    /// Two connections, of which the one for bulk has a bug, and their far ends.
    fn with_a_bug() -> (Ends, Ends) {
        let (mut near, far) = connections(2);
        let bulk = Box::new(Panics(near.remove(1)));
        near.push(bulk);
        (near, far)
    }

    /// Regression: a panic was caught only within a turn. Elsewhere it ended the thread, and all comms with sockets
    /// there waited for ever.
    #[test]
    fn a_panic_ends_its_comm_and_no_other() {
        let pool = Pool::of(1);
        let (mut room, mut source) = (vec![0; BYTES], vec![7; BYTES]);
        let (near, mut far) = connections(2);
        let healthy = SendComm::made(&pool, near).unwrap();
        // One connection panics in its turn, the other when the worker checks for the peer's end.
        let (near, mut others) = with_a_bug();
        let receives = RecvComm::made(&pool, near).unwrap();
        let slot = receives.post(room.as_mut_ptr(), BYTES, 0).unwrap().unwrap();
        send(others[1].as_mut(), &[1]);
        let fault = until("the receiver's end", || receives.test(slot).err());
        assert_eq!((fault.code, fault.why.contains("bug")), (ResultCode::INTERNAL_ERROR, true));
        let (near, mut others) = with_a_bug();
        let sends = SendComm::made(&pool, near).unwrap();
        send(others[1].as_mut(), &[1]);
        let fault = until("the sender's end", || sends.post(source.as_mut_ptr(), 0, 0, 0).err());
        assert_eq!(fault.code, ResultCode::INTERNAL_ERROR);

        let slot = healthy.post(source.as_mut_ptr(), BYTES, 0, 0).unwrap().unwrap();
        let mut stream = Vec::new();
        let sent = until("a send", || {
            stream.extend(drained(far[1].as_mut()));
            healthy.test(slot).unwrap()
        });
        assert_eq!(sent, BYTES);
        drop(healthy);
        stream.extend(received(far[1].as_mut()));
        assert_eq!(stream.iter().filter(|&&byte| byte == 7).count(), BYTES);
    }

    /// Regression: a path that was given up was asked about and counted as lost again five times a second.
    #[test]
    fn a_path_that_is_given_up_is_lost_once() {
        /// More than a socket takes.
        const BYTES: usize = 64 << 20;
        const SILENT: [u8; 4] = [198, 51, 100, 10];
        let pool = Pool::of(1);
        let mut source = vec![7; BYTES];
        let mut made = |remote, silent_for| {
            let (near, far) = Chosen::connections(2, remote, silent_for);
            let asked = near[1].asked.clone();
            let near = near.into_iter().map(|conn| -> Box<dyn Conn> { Box::new(conn) });
            let comm = SendComm::made(&pool, near.collect()).unwrap();
            let slot = comm.post(source.as_mut_ptr(), BYTES, 0, 0).unwrap().unwrap();
            (comm, slot, asked, far)
        };
        let (silent, slot, asked, _far) = made(SILENT, Duration::from_secs(3600));
        let (_slow, _, others, _others_far) = made([198, 51, 100, 11], Duration::ZERO);
        let fault = until("the fault", || silent.test(slot).err());
        assert!(fault.why.contains("198.51.100.10:9") && fault.why.contains("does not answer"), "{fault:?}");
        let before = others.load(Ordering::SeqCst);
        until("further checks of the worker", || (others.load(Ordering::SeqCst) >= before + 3).then_some(()));
        assert_eq!((lost_with(SILENT), asked.load(Ordering::SeqCst)), (1, 1));
    }
}
