//! Polls all endpoints and moves the clock, on one thread.
//!
//! A call of the engine that waits (`close`, `deregister`) polls its own endpoint alone and reads the clock
//! in between. So the clock of a [`DrivenHost`] polls all other endpoints when it is read: the run needs no
//! second thread and repeats.
//! Invariant: a run follows from the seed and the calls; no real time is read.
//! Read next: `run.rs`.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ferrywire::net::sim::{SimHost, SimNet};
use ferrywire::net::{Bound, Conn, ConnOptions, Listener, Nic, Transport};
use ferrywire::{Endpoint, Error, StreamEvent};
use ferrywire_memory::sim::{HostGate, SimFaults, SimGpu, SimStream};

/// Virtual time that one pass over all endpoints takes.
const PASS: Duration = Duration::from_micros(1);
/// Longest step of the clock, which is how often engines check their timers.
const STEP_MAX: Duration = Duration::from_millis(20);
/// Step of the clock while a GPU copies.
const COPY_STEP: Duration = Duration::from_micros(10);
/// Number of passes without progress during a call that waits, after which the clock moves to the next event.
/// The call's own endpoint may have work, which the driver does not see.
const IDLE_PASSES: u32 = 12;
/// Passes in a row in which an endpoint may report work although nothing happens in the network and on the GPUs.
const IN_VAIN_PASSES_MAX: u32 = 64;
/// Most steps of the clock in which the GPUs finish the work of a run that has failed. An item of work is delayed by less than a step.
const FINISHING_STEPS_MAX: u32 = 100_000;
/// Most passes within one call that waits; a call with more counts as endless.
const WAITING_PASSES_MAX: u64 = 3_000_000;

thread_local! {
    static DRIVER: RefCell<Option<Rc<Driver>>> = const { RefCell::new(None) };
}

/// The transport of an endpoint: a host of the simulated network, whose clock drives the other endpoints.
#[derive(Debug)]
pub struct DrivenHost {
    host: Arc<SimHost>,
    slot: usize,
}

impl DrivenHost {
    /// The transport of the endpoint in this slot of the driver.
    pub fn new(host: Arc<SimHost>, slot: usize) -> DrivenHost {
        DrivenHost { host, slot }
    }
}

impl Transport for DrivenHost {
    fn name(&self) -> &'static str {
        self.host.name()
    }

    fn listen(&self, address: SocketAddr) -> io::Result<Box<dyn Listener>> {
        self.host.listen(address)
    }

    fn dial(&self, nic: Option<&Nic>, to: SocketAddr, options: &ConnOptions) -> io::Result<Box<dyn Conn>> {
        self.host.dial(nic, to, options)
    }

    fn bind(&self, nic: Option<&Nic>, to: SocketAddr, options: &ConnOptions) -> io::Result<Box<dyn Bound>> {
        self.host.bind(nic, to, options)
    }

    fn tune(&self, conn: &mut dyn Conn, options: &ConnOptions) {
        self.host.tune(conn, options);
    }

    fn nics(&self) -> io::Result<Vec<Nic>> {
        self.host.nics()
    }

    fn route(&self, to: IpAddr) -> io::Result<IpAddr> {
        self.host.route(to)
    }

    fn now(&self) -> Duration {
        let driver = DRIVER.with_borrow(|driver| driver.clone());
        if let Some(driver) = driver {
            driver.clock_is_read(self.slot);
        }
        self.host.now()
    }

    fn session_number(&self) -> u64 {
        self.host.session_number()
    }
}

/// An action of the driver at a time, mostly the end of a fault.
#[derive(Clone, Debug)]
pub enum Timed {
    Thaw(String),
    Heal(IpAddr),
    Wake(usize),
    GpuGoesOn(usize),
    GpuWorksAgain(usize),
    /// The stream of this number goes on.
    StreamGoesOn(usize),
    /// Fault number `n` begins.
    Begins(usize),
}

/// What a fault does to the network, the endpoints and the GPUs.
pub type Effect = Box<dyn FnOnce(&Driver)>;

#[derive(Default)]
struct Slot {
    endpoint: Option<Endpoint>,
    /// Number of reasons for which the endpoint is not polled.
    stopped: u32,
}

/// All endpoints of a run, the network and the GPUs.
pub struct Driver {
    pub net: Arc<SimNet>,
    pub gpus: Vec<Arc<SimGpu>>,
    slots: RefCell<Vec<Slot>>,
    /// Streams of GPUs, and the gates at which they wait.
    streams: RefCell<Vec<(SimStream, Option<HostGate>)>>,
    timed: RefCell<Vec<(Duration, Timed)>>,
    /// The slot of the endpoint whose call waits; `None` while no call does.
    waiting: Cell<Option<usize>>,
    busy: Cell<bool>,
    passes: Cell<u64>,
    /// Number of passes at the moment when the waiting call began.
    waiting_since: Cell<u64>,
    /// The effects of faults that have not begun yet.
    effects: RefCell<Vec<Option<Effect>>>,
    /// The NICs that were deleted.
    deleted: RefCell<Vec<IpAddr>>,
    /// Number of passes without progress in a row, during a call that waits.
    idle: Cell<u32>,
    /// The network's history so far, and the passes in a row in which an endpoint reported work without a change of it.
    events: Cell<u64>,
    in_vain: Cell<u32>,
    /// Bytes that all connections had sent at the last look.
    sent: Cell<u64>,
    /// Time beyond which no step of the clock goes.
    until: Cell<Option<Duration>>,
}

impl Driver {
    /// Starts the driver of this thread's run.
    pub fn start(net: Arc<SimNet>, gpus: Vec<Arc<SimGpu>>) -> Rc<Driver> {
        let driver = Rc::new(Driver {
            net,
            gpus,
            slots: RefCell::default(),
            streams: RefCell::default(),
            timed: RefCell::default(),
            waiting: Cell::new(None),
            busy: Cell::new(false),
            passes: Cell::new(0),
            waiting_since: Cell::new(0),
            effects: RefCell::default(),
            deleted: RefCell::default(),
            idle: Cell::new(0),
            events: Cell::new(0),
            in_vain: Cell::new(0),
            sent: Cell::new(0),
            until: Cell::new(None),
        });
        DRIVER.set(Some(driver.clone()));
        driver
    }

    /// Ends the run: clocks no longer drive endpoints.
    pub fn stop() {
        drop(DRIVER.take());
    }

    /// Ends a run that has failed. Its endpoints are not closed, because closing would wait for a clock that
    /// does not advance. The GPUs do what is left in their streams: the thread's next run uses them too.
    pub fn abandon() {
        let Some(driver) = DRIVER.take() else { return };
        driver.end_faults();
        driver.streams.take().clear();
        driver.finish_gpu_work();
        std::mem::forget(driver);
    }

    /// Runs what is queued on the GPUs. The work touches memory that a run which has failed never frees.
    fn finish_gpu_work(&self) {
        self.gpus.iter().for_each(|gpu| gpu.set_faults(SimFaults::default()));
        let mut now = self.now();
        for _ in 0..FINISHING_STEPS_MAX {
            if !self.gpus.iter().any(|gpu| gpu.has_work()) {
                return;
            }
            self.gpus.iter().for_each(|gpu| _ = gpu.run_due(now));
            now += STEP_MAX;
        }
    }

    /// Reserves a slot for another endpoint.
    pub fn reserve(&self) -> usize {
        let mut slots = self.slots.borrow_mut();
        slots.push(Slot::default());
        slots.len() - 1
    }

    pub fn fill(&self, slot: usize, endpoint: Endpoint) {
        self.slots.borrow_mut()[slot].endpoint = Some(endpoint);
    }

    /// Takes an endpoint out of its slot; it is polled no more.
    pub fn take(&self, slot: usize) -> Option<Endpoint> {
        self.slots.borrow_mut()[slot].endpoint.take()
    }

    pub fn endpoint(&self, slot: usize) -> Option<Endpoint> {
        self.slots.borrow()[slot].endpoint.clone()
    }

    /// Stops polling an endpoint; polling starts again when every stop has ended.
    pub fn stop_polling(&self, slot: usize) {
        self.slots.borrow_mut()[slot].stopped += 1;
    }

    fn poll_again(&self, slot: usize) {
        let stopped = &mut self.slots.borrow_mut()[slot].stopped;
        *stopped = stopped.saturating_sub(1);
    }

    /// Whether the endpoint in this slot is not polled at the moment.
    pub fn is_stopped(&self, slot: usize) -> bool {
        self.slots.borrow()[slot].stopped > 0
    }

    /// Schedules an action of the driver.
    pub fn at(&self, when: Duration, what: Timed) {
        self.timed.borrow_mut().push((when, what));
    }

    /// Schedules the beginning of a fault.
    pub fn begin_at(&self, when: Duration, effect: Effect) {
        let number = self.effects.borrow().len();
        self.effects.borrow_mut().push(Some(effect));
        self.at(when, Timed::Begins(number));
    }

    /// A stream of a GPU that waits for this time, and its number.
    ///
    /// # Errors
    /// The error of the GPU.
    pub fn waiting_stream(&self, gpu: usize, time: Duration) -> Result<(StreamEvent, usize), Error> {
        let stream = self.gpus[gpu].stream();
        let gate = stream.hold()?;
        let event = StreamEvent::after_sim(&stream)?;
        let mut streams = self.streams.borrow_mut();
        streams.push((stream, Some(gate)));
        self.at(self.now() + time, Timed::StreamGoesOn(streams.len() - 1));
        Ok((event, streams.len() - 1))
    }

    /// Whether a stream still waits.
    pub fn stream_waits(&self, stream: usize) -> bool {
        self.streams.borrow()[stream].1.is_some()
    }

    /// Deletes a NIC for good: a cut of it no longer ends.
    pub fn delete(&self, nic: IpAddr) {
        self.timed.borrow_mut().retain(|(_, what)| !matches!(what, Timed::Heal(each) if *each == nic));
        self.net.delete(nic);
        self.deleted.borrow_mut().push(nic);
    }

    pub fn is_deleted(&self, nic: IpAddr) -> bool {
        self.deleted.borrow().contains(&nic)
    }

    /// Ends every fault that has a scheduled end. What has not begun never begins.
    pub fn end_faults(&self) {
        let timed = std::mem::take(&mut *self.timed.borrow_mut()).into_iter().map(|(_, what)| what);
        timed.filter(|what| !matches!(what, Timed::Begins(_))).for_each(|what| self.happen(what));
    }

    pub fn passes(&self) -> u64 {
        self.passes.get()
    }

    pub fn now(&self) -> Duration {
        self.net.now()
    }

    fn happen(&self, what: Timed) {
        match what {
            Timed::Thaw(host) => self.net.thaw(&host),
            Timed::Heal(nic) => self.net.heal(nic),
            Timed::Wake(slot) => self.poll_again(slot),
            Timed::GpuGoesOn(gpu) => self.gpus[gpu].set_stall(false),
            Timed::GpuWorksAgain(gpu) => self.gpus[gpu].set_faults(gpu_faults(&self.gpus[gpu])),
            Timed::StreamGoesOn(stream) => {
                if let Some(gate) = self.streams.borrow_mut()[stream].1.take() {
                    gate.open();
                }
            }
            Timed::Begins(fault) => {
                let effect = self.effects.borrow_mut()[fault].take();
                if let Some(effect) = effect {
                    effect(self);
                }
            }
        }
    }

    fn happen_due(&self) {
        let now = self.now();
        loop {
            let mut timed = self.timed.borrow_mut();
            let first =
                timed.iter().enumerate().filter(|(_, (at, _))| *at <= now).min_by_key(|(_, (at, _))| *at);
            let Some(index) = first.map(|(index, _)| index) else { return };
            let (_, what) = timed.remove(index);
            drop(timed);
            self.happen(what);
        }
    }

    fn step(&self, worked: bool) -> Duration {
        if worked {
            return PASS;
        }
        let now = self.now();
        let copies = self.gpus.iter().any(|gpu| gpu.has_work() && !gpu.faults().stall);
        let most = if copies { COPY_STEP } else { STEP_MAX };
        let timed = self.timed.borrow().iter().map(|(at, _)| *at).min();
        let next = self.net.next_event().into_iter().chain(timed).chain(self.until.get()).min();
        next.map_or(most, |next| next.saturating_sub(now).clamp(PASS, most))
    }

    /// Polls all endpoints but one, and moves the clock, by a short step if `slow`. Returns whether there was
    /// progress.
    fn pass_without(&self, without: Option<usize>, slow: bool) -> bool {
        self.passes.set(self.passes.get() + 1);
        let polled: Vec<Endpoint> = {
            let slots = self.slots.borrow();
            let polled =
                slots.iter().enumerate().filter(|(slot, each)| each.stopped == 0 && Some(*slot) != without);
            polled.filter_map(|(_, each)| each.endpoint.clone()).collect()
        };
        let mut worked = polled.iter().fold(false, |worked, endpoint| endpoint.progress() | worked);
        let now = self.now();
        let copied = self.gpus.iter().fold(false, |worked, gpu| gpu.run_due(now) | worked);
        let events = self.net.fingerprint();
        let is_still = self.events.replace(events) == events && !copied;
        let in_vain = worked && is_still && !self.has_sent();
        self.in_vain.set(if in_vain { self.in_vain.get() + 1 } else { 0 });
        worked |= copied;
        self.net.advance(self.step(slow || worked));
        self.happen_due();
        worked
    }

    /// Whether an endpoint has given bytes to the network since the last call.
    fn has_sent(&self) -> bool {
        let sent =
            self.net.connections().iter().map(|conn| conn.sent_by_dialler + conn.sent_by_acceptor).sum();
        self.sent.replace(sent) != sent
    }

    /// Whether an endpoint reports work all the time, and does none.
    pub fn works_in_vain(&self) -> bool {
        self.in_vain.get() > IN_VAIN_PASSES_MAX
    }

    /// Makes the clock stop at this time before it goes beyond.
    pub fn stop_clock_at(&self, until: Option<Duration>) {
        self.until.set(until);
    }

    /// Polls all endpoints once. Returns whether there was progress.
    pub fn pass(&self) -> bool {
        let before = self.busy.replace(true);
        let worked = self.pass_without(None, false);
        self.busy.set(before);
        worked
    }

    /// Makes a call that waits, on the endpoint in this slot.
    pub fn wait_in<T>(&self, slot: usize, call: impl FnOnce() -> T) -> T {
        self.waiting_since.set(self.passes.get());
        let before = self.waiting.replace(Some(slot));
        let result = call();
        self.waiting.set(before);
        result
    }

    fn clock_is_read(&self, slot: usize) {
        if self.waiting.get() != Some(slot) || self.busy.replace(true) {
            return;
        }
        let idle = self.idle.get();
        let worked = self.pass_without(Some(slot), idle < IDLE_PASSES);
        self.idle.set(if worked || idle >= IDLE_PASSES { 0 } else { idle + 1 });
        self.busy.set(false);
        let passes = self.passes.get() - self.waiting_since.get();
        assert!(passes < WAITING_PASSES_MAX, "a call that waits does not end: {passes} passes");
    }
}

/// The default faults of a simulated GPU: copies take time. The seed does not depend on the number of the
/// GPU.
pub fn gpu_faults(gpu: &SimGpu) -> SimFaults {
    let seed = u64::from(gpu.index()) << 56;
    SimFaults { seed, copy_delay: Duration::ZERO..=Duration::from_micros(60), ..SimFaults::default() }
}
