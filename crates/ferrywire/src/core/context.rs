//! Facts that all parts of an endpoint share, and the means to wake its threads.
//!
//! Invariant: a [`Context`] owns no worker, channel, peer or control side, so each of them may refer to it.
//! Read next: `worker/mod.rs`, which owns the workers.

use crate::config::{Config, Secrets};
use crate::core::ordering::Gates;
use crate::core::sleeper::Sleeper;
use crate::core::staging::Prepared;
use crate::error::{Error, Result};
use crate::payload::payload_backend::SharedBackend;
use ferrywire_memory::{Gpu, Memory, MemoryLocation, RegionTable};
use ferrywire_net::SharedTransport;
use ferrywire_proto::Identity;
use ferrywire_proto::wire::Refusal;
use ferrywire_sys::fork::Origin;
use ferrywire_sys::poll::Waker;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Facts of one endpoint.
pub(crate) struct Context {
    pub identity: Identity,
    /// The process that created the endpoint.
    pub origin: Origin,
    pub config: Config,
    secrets: Mutex<Secrets>,
    pub transport: SharedTransport,
    /// Wakes each worker, by its number.
    pub sleepers: Box<[Arc<Sleeper>]>,
    pub closing: AtomicBool,
    /// The backend that carries payload beside connections, if any.
    pub backend: Option<SharedBackend>,
    /// Why there is no backend, if one was requested.
    pub no_backend: Option<String>,
    pub prepared: Prepared,
    /// Words in pinned memory that streams of GPUs wait for.
    pub gates: Gates,
    pub regions: RegionTable,
    /// Number of operations in flight that are bulk by their bytes alone, of all peers, receives among them.
    pub long_operations: AtomicU64,
    next_id: AtomicU64,
    control: Waker,
}

impl Context {
    pub fn new(
        identity: Identity,
        mut config: Config,
        transport: SharedTransport,
        sleepers: Box<[Arc<Sleeper>]>,
        control: Waker,
        backend: Option<SharedBackend>,
        no_backend: Option<String>,
    ) -> Context {
        Context {
            identity,
            origin: Origin::here(),
            secrets: Mutex::new(std::mem::take(&mut config.secrets)),
            config,
            transport,
            sleepers,
            closing: AtomicBool::new(false),
            backend,
            no_backend,
            prepared: Prepared::default(),
            gates: Gates::default(),
            regions: RegionTable::default(),
            long_operations: AtomicU64::new(0),
            next_id: AtomicU64::new(1),
            control,
        }
    }

    /// Returns a copy of the secrets in use.
    pub fn secrets(&self) -> Secrets {
        self.secrets.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the secrets for connections from now on.
    pub fn set_secrets(&self, secrets: Secrets) {
        *self.secrets.lock().unwrap_or_else(PoisonError::into_inner) = secrets;
    }

    /// Name of the transport of payload, for reports.
    pub fn payload_name(&self) -> &'static str {
        self.backend.as_ref().map_or(self.transport.name(), |backend| backend.transport())
    }

    /// Refuses memory that payload cannot reach, before anything is posted. `side` names the memory's owner
    /// in the error.
    ///
    /// Each end applies this rule to its own regions, also when the peer names one: the peer is not trusted.
    /// Memory of GPUs that this process has opened is staged through host memory, unless lanes reach it
    /// themselves.
    ///
    /// # Errors
    /// [`Error::UnsupportedMemory`] if the payload cannot reach the memory.
    #[inline]
    pub fn check_reach(&self, location: MemoryLocation, side: &'static str) -> Result<()> {
        if location == MemoryLocation::Host { Ok(()) } else { self.check_reach_of_gpu(location, side) }
    }

    fn check_reach_of_gpu(&self, location: MemoryLocation, side: &'static str) -> Result<()> {
        let is_reached = match &self.backend {
            Some(backend) => backend.gpu() == Some(location),
            None => Gpu::opened(location).is_ok(),
        };
        if is_reached {
            Ok(())
        } else {
            Err(Error::UnsupportedMemory { side, location, transport: self.payload_name() })
        }
    }

    /// The region with this key, which peers may write or read, if payload can reach its memory.
    ///
    /// # Errors
    /// The reason to refuse the peer's frame.
    pub fn reachable_region(&self, key: u64) -> std::result::Result<Arc<Memory>, Refusal> {
        let memory = self.regions.find(key)?;
        self.check_reach(memory.location(), "local").map_err(|_| Refusal::UnreachableMemory)?;
        Ok(memory)
    }

    /// The payload backend, if its calls may block.
    pub fn blocking_backend(&self) -> Option<&SharedBackend> {
        self.backend.as_ref().filter(|backend| backend.calls_may_block())
    }

    /// A new number for a transfer.
    pub fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether the endpoint has no threads, so that callers poll everything.
    pub fn is_caller_driven(&self) -> bool {
        self.config.threads == 0
    }

    /// Wakes the control side.
    pub fn wake_control(&self) {
        self.control.wake();
    }

    /// Returns a waker of the control side.
    pub fn control_waker(&self) -> Waker {
        self.control.clone()
    }
}
