//! What all parts of an endpoint share: its workers, its regions, its clock, its events.
//!
//! Read next: `control.rs`, which acts on the events.

use crate::api::region::RegionHome;
use crate::api::releaser::Releaser;
use crate::config::Config;
use crate::control::Control;
use crate::core::channel::Remains;
use crate::core::ordering::Gates;
use crate::core::peer::PeerState;
use crate::core::staging::Prepared;
use crate::core::worker::{self, Worker};
use crate::error::{Error, Result};
use crate::payload::devmem;
use crate::payload::payload_backend::PayloadBackend;
use crate::payload::plugin;
use crossbeam_queue::SegQueue;
use ferrywire_memory::{Gpu, Memory, Place, RegionTable};
use ferrywire_net::SharedTransport;
use ferrywire_proto::Identity;
use ferrywire_proto::limits;
use ferrywire_proto::stall_timer::StallTimer;
use ferrywire_sys::fork::Origin;
use ferrywire_sys::poll::Waker;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, TryLockError, Weak};
use std::time::Duration;

/// Something the control side has to deal with.
pub(crate) enum Event {
    /// A channel ended.
    Lost { peer: Arc<PeerState>, index: u16, generation: u32, why: String, remains: Box<Remains> },
}

/// The shared parts of one endpoint.
pub(crate) struct Engine {
    pub identity: Identity,
    /// The process that it works in.
    pub origin: Origin,
    pub config: Config,
    pub transport: SharedTransport,
    pub workers: Vec<Arc<Worker>>,
    pub events: SegQueue<Event>,
    /// The control thread has ended, and with it all that events are about.
    unheard: AtomicBool,
    pub closing: AtomicBool,
    /// What carries payload beside connections, where anything does.
    pub carrier: Option<PayloadBackend>,
    /// Why nothing does, where it was to be tried.
    pub no_carrier: Option<String>,
    /// Whether a thread turns the control side; else callers do.
    pub threaded: bool,
    pub prepared: Prepared,
    /// What streams of GPUs wait for.
    pub gates: Gates,
    regions: RegionTable,
    /// Drops owners of memory; started with the first of them.
    releaser: OnceLock<Releaser>,
    next_id: AtomicU64,
    dialled: AtomicUsize,
    first_port: OnceLock<u16>,
    control_waker: OnceLock<Waker>,
    control: OnceLock<Arc<Mutex<Control>>>,
    this: Weak<Engine>,
}

impl Engine {
    /// What moves payload, as reports name it.
    pub fn payload_name(&self) -> &'static str {
        match &self.carrier {
            Some(PayloadBackend::Plugin(_)) => "plugin",
            Some(PayloadBackend::Devmem(_)) => devmem::NAME,
            None => self.transport.name(),
        }
    }

    /// Refuses memory that payload does not reach, before anything moves; `side` says whose memory it is.
    ///
    /// The one rule: each end applies it to its own region, also where a peer names one, whose word is not trusted. Memory of
    /// GPUs that are open in this process is staged through host memory, unless lanes move it themselves.
    pub fn check_reach(&self, place: Place, side: &'static str) -> Result<()> {
        let is_reached = match &self.carrier {
            _ if place == Place::Host => true,
            Some(carrier) => carrier.gpu() == Some(place),
            None => Gpu::opened(place).is_ok(),
        };
        if is_reached {
            Ok(())
        } else {
            Err(Error::OutOfReach { side, place, transport: self.payload_name() })
        }
    }

    pub fn new(
        identity: Identity,
        config: Config,
        transport: SharedTransport,
        workers: Vec<Arc<Worker>>,
        threaded: bool,
        carrier: Option<PayloadBackend>,
        no_carrier: Option<String>,
    ) -> Arc<Engine> {
        Arc::new_cyclic(|this| Engine {
            this: this.clone(),
            identity,
            origin: Origin::here(),
            config,
            transport,
            workers,
            events: SegQueue::new(),
            unheard: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            threaded,
            carrier,
            no_carrier,
            prepared: Prepared::default(),
            gates: Gates::default(),
            regions: RegionTable::default(),
            releaser: OnceLock::new(),
            next_id: AtomicU64::new(1),
            dialled: AtomicUsize::new(0),
            first_port: OnceLock::new(),
            control_waker: OnceLock::new(),
            control: OnceLock::new(),
        })
    }

    /// The engine as those share it that outlive a call.
    pub fn shared(&self) -> Arc<Engine> {
        match self.this.upgrade() {
            Some(engine) => engine,
            None => unreachable!("whoever calls a method of the engine keeps it alive"),
        }
    }

    /// The plugin that carries payload, if one does.
    pub fn plugin(&self) -> Option<&Arc<plugin::Host>> {
        self.carrier.as_ref().and_then(PayloadBackend::plugin)
    }

    /// Makes sure that there is somebody to drop owners of memory.
    pub fn start_releaser(&self) -> Result<()> {
        if self.releaser.get().is_none() {
            let started = Releaser::start(self.this.clone());
            // Where two start one, the second ends at once.
            drop(self.releaser.set(started.map_err(|error| Error::io("start a thread", &error))?));
        }
        Ok(())
    }

    pub fn attach_control(&self, control: Arc<Mutex<Control>>, waker: Waker) {
        let _ = self.control_waker.set(waker);
        let _ = self.control.set(control);
    }

    /// A number for a transfer, never used before.
    pub fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// How many peers were connected to before this one, counted from a number that differs among the endpoints of a
    /// process which each dial one.
    pub fn count_dialled(&self, port: u16) -> usize {
        let first = *self.first_port.get_or_init(|| port);
        usize::from(first) + self.dialled.fetch_add(1, Ordering::Relaxed)
    }

    pub fn caller_driven(&self) -> bool {
        !self.threaded
    }

    /// A channel ended: tells the control side, which fences it.
    pub fn lost(&self, peer: Arc<PeerState>, index: u16, generation: u32, why: String, remains: Remains) {
        self.events.push(Event::Lost { peer, index, generation, why, remains: Box::new(remains) });
        self.wake_control();
        if self.unheard.load(Ordering::SeqCst) {
            self.drop_events();
        }
    }

    /// The control thread ends: events keep their peers, and those this engine.
    pub fn hear_no_more(&self) {
        self.unheard.store(true, Ordering::SeqCst);
        self.drop_events();
    }

    fn drop_events(&self) {
        while let Some(Event::Lost { peer, remains, .. }) = self.events.pop() {
            peer.drop_entries(remains.entries.into_iter().map(|(_, entry)| entry).collect());
        }
    }

    /// Wakes the control side, for as long as anybody keeps it.
    pub fn control_waker(&self) -> Waker {
        match self.control_waker.get() {
            Some(waker) => waker.clone(),
            None => unreachable!("the control side is attached before it turns"),
        }
    }

    pub fn wake_control(&self) {
        if let Some(waker) = self.control_waker.get() {
            waker.wake();
        }
    }

    /// One turn of everything that no other thread is turning; true if anything happened.
    pub fn progress(&self) -> bool {
        let mut worked = false;
        if let Some(control) = self.control.get() {
            match control.try_lock() {
                Ok(mut control) => worked |= control.turn(self),
                Err(TryLockError::Poisoned(poisoned)) => worked |= poisoned.into_inner().turn(self),
                Err(TryLockError::WouldBlock) => {}
            }
        }
        for worker in &self.workers {
            worked |= worker.turn_once(self);
        }
        worked
    }

    /// Runs `body` on the control side.
    pub fn with_control<T>(&self, body: impl FnOnce(&mut Control) -> T) -> Option<T> {
        let control = self.control.get()?;
        let result = body(&mut control.lock().unwrap_or_else(PoisonError::into_inner));
        self.wake_control();
        Some(result)
    }
}

impl RegionHome for Engine {
    fn identity(&self) -> Identity {
        self.identity
    }

    fn regions(&self) -> &RegionTable {
        &self.regions
    }

    fn release(&self, memory: &Arc<Memory>, force: bool) -> Result<()> {
        // Operations that are under way now may lose their connections while they are waited for.
        let was_used = memory.user_owned() && memory.used();
        worker::abandon_memory(self, memory, force)?;
        // Operations that read from the user's memory hold it too; what is queued will not be sent any more.
        let in_use = || if memory.user_owned() { memory.used() } else { memory.in_call() };
        let mut patience = StallTimer::new(limits::DRAIN_DEADLINE);
        while in_use() {
            if patience.is_over(self.transport.now()) {
                let why = match memory.user_owned() {
                    true => "operations still use it: wait for them, or cancel them, first",
                    false => "a message is still being placed into it: its GPU stands still",
                };
                return Err(Error::invalid("region", why));
            }
            // Whoever places a message may hold what a turn of ours would wait for.
            if !memory.user_owned() || !self.caller_driven() || !self.progress() {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        // Lanes have no message of it any more, and so nothing that keeps it registered. What a lost connection was sending of it
        // is waited for.
        let has_lanes = || self.workers.iter().any(|worker| worker.may_have_lanes());
        match was_used || (memory.user_owned() && has_lanes()) {
            true => worker::abandon_memory(self, memory, force),
            false => Ok(()),
        }
    }

    fn interrupt(&self, memory: &Arc<Memory>, force: bool) -> Result<()> {
        worker::abandon_memory(self, memory, force)
    }

    fn origin(&self) -> Origin {
        self.origin
    }

    fn release_later(&self, memory: Arc<Memory>) {
        // A lane forgets what it has registered when nothing uses it any more, so somebody has to wait for that.
        if self.workers.iter().any(|worker| worker.may_have_lanes())
            && let Err(error) = self.start_releaser()
        {
            tracing::warn!(%error, "memory stays registered until its lanes end");
        }
        match self.releaser.get() {
            Some(releaser) => releaser.give(memory),
            None => drop(worker::ask_for_region(self, &memory)),
        }
    }
}
