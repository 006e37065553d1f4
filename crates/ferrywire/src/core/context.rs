//! What all parts of an endpoint know of it: facts, and how to wake its threads.
//!
//! Invariant: nothing here owns a worker, a channel, a peer or the control side, so that each of those may hold it.
//! Read next: `worker/workers.rs`, which owns the workers.

use crate::config::Config;
use crate::core::ordering::Gates;
use crate::core::sleeper::Sleeper;
use crate::core::staging::Prepared;
use crate::error::{Error, Result};
use crate::payload::payload_backend::SharedBackend;
use ferrywire_memory::{Gpu, MemoryLocation, RegionTable};
use ferrywire_net::SharedTransport;
use ferrywire_proto::Identity;
use ferrywire_sys::fork::Origin;
use ferrywire_sys::poll::Waker;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The facts of one endpoint.
pub(crate) struct Context {
    pub identity: Identity,
    /// The process that it works in.
    pub origin: Origin,
    pub config: Config,
    pub transport: SharedTransport,
    /// How to wake each worker, by its number.
    pub sleepers: Box<[Arc<Sleeper>]>,
    pub closing: AtomicBool,
    /// What carries payload beside connections, where anything does.
    pub backend: Option<SharedBackend>,
    /// Why nothing does, where it was to be tried.
    pub no_backend: Option<String>,
    pub prepared: Prepared,
    /// What streams of GPUs wait for.
    pub gates: Gates,
    pub regions: RegionTable,
    next_id: AtomicU64,
    control: Waker,
}

impl Context {
    pub fn new(
        identity: Identity,
        config: Config,
        transport: SharedTransport,
        sleepers: Box<[Arc<Sleeper>]>,
        control: Waker,
        backend: Option<SharedBackend>,
        no_backend: Option<String>,
    ) -> Context {
        Context {
            identity,
            origin: Origin::here(),
            config,
            transport,
            sleepers,
            closing: AtomicBool::new(false),
            backend,
            no_backend,
            prepared: Prepared::default(),
            gates: Gates::default(),
            regions: RegionTable::default(),
            next_id: AtomicU64::new(1),
            control,
        }
    }

    /// What moves payload, as reports name it.
    pub fn payload_name(&self) -> &'static str {
        self.backend.as_ref().map_or(self.transport.name(), |backend| backend.transport())
    }

    /// Refuses memory that payload does not reach, before anything moves; `side` says whose memory it is.
    ///
    /// The one rule: each end applies it to its own region, also where a peer names one, whose word is not trusted. Memory of
    /// GPUs that are open in this process is staged through host memory, unless lanes move it themselves.
    pub fn check_reach(&self, location: MemoryLocation, side: &'static str) -> Result<()> {
        let is_reached = match &self.backend {
            _ if location == MemoryLocation::Host => true,
            Some(backend) => backend.gpu() == Some(location),
            None => Gpu::opened(location).is_ok(),
        };
        if is_reached {
            Ok(())
        } else {
            Err(Error::UnsupportedMemory { side, location, transport: self.payload_name() })
        }
    }

    /// What carries payload by calls that may block, if anything does.
    pub fn blocking_backend(&self) -> Option<&SharedBackend> {
        self.backend.as_ref().filter(|backend| backend.calls_may_block())
    }

    /// A number for a transfer, never used before.
    pub fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether callers poll everything: the endpoint has no threads.
    pub fn is_caller_driven(&self) -> bool {
        self.config.threads == 0
    }

    /// Has the control side look at once.
    pub fn wake_control(&self) {
        self.control.wake();
    }

    /// How to wake the control side.
    pub fn control_waker(&self) -> Waker {
        self.control.clone()
    }
}
