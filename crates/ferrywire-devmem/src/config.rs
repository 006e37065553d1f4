//! The user's configuration of devmem TCP.
//!
//! Invariant: an unusable [`DevmemConfig`] is refused before a NIC is touched. Read next: `backend.rs`.

use super::NAME;
use super::backend::Backend;
use ferrywire::payload::{BackendConfig, SharedBackend};
use ferrywire::{Config, Error, Result};
use ferrywire_memory::MemoryLocation;
use ferrywire_memory::unpack::UnpackMode;
use ferrywire_net::Nic;
use ferrywire_proto::limits;
use std::sync::Arc;
use std::time::Duration;

/// How an endpoint uses the kernel's devmem TCP.
#[derive(Clone, Debug)]
pub struct DevmemConfig {
    pub(crate) gpu: Option<MemoryLocation>,
    pub(crate) unpack: UnpackMode,
    pub(crate) allow_nic_setup: bool,
    pub(crate) queues: usize,
    pub(crate) pool_bytes: usize,
    pub(crate) message_bytes_max: usize,
    pub(crate) window: usize,
    pub(crate) stall_timeout: Duration,
    pub(crate) setup_timeout: Duration,
    pub(crate) required: bool,
}

impl Default for DevmemConfig {
    fn default() -> DevmemConfig {
        DevmemConfig {
            gpu: None,
            unpack: UnpackMode::default(),
            allow_nic_setup: false,
            queues: 1,
            pool_bytes: limits::DEVMEM_POOL_BYTES_DEFAULT,
            message_bytes_max: limits::LANE_MESSAGE_BYTES_DEFAULT,
            window: limits::LANE_WINDOW_DEFAULT,
            stall_timeout: limits::LANE_STALL_TIMEOUT_DEFAULT,
            setup_timeout: limits::LANE_SETUP_TIMEOUT,
            required: true,
        }
    }
}

impl DevmemConfig {
    /// The GPU whose memory is moved, besides host memory. Received payload lands in a pool of this GPU's memory.
    /// Default: none, and a pool of host memory.
    pub fn gpu(mut self, gpu: MemoryLocation) -> DevmemConfig {
        self.gpu = Some(gpu);
        self
    }

    /// How received fragments are gathered. Default: by a kernel of the GPU. [`UnpackMode::Host`] puts the pool into
    /// host memory. Without a GPU the CPU gathers.
    pub fn unpack(mut self, mode: UnpackMode) -> DevmemConfig {
        self.unpack = mode;
        self
    }

    /// Allows changes of NIC settings: header split, its threshold, flow rules on or off, and the queues over which
    /// other flows are spread. The changes are undone when the endpoint ends. Default: not allowed, and an error names
    /// the missing settings. Rules that steer the endpoint's own connections are always made; they end with the
    /// connections.
    pub fn allow_nic_setup(mut self, allow: bool) -> DevmemConfig {
        self.allow_nic_setup = allow;
        self
    }

    /// Receive queues to take of each NIC. Default: 1.
    pub fn queues(mut self, queues: usize) -> DevmemConfig {
        self.queues = queues;
        self
    }

    /// Size of each NIC's pool in bytes, rounded up to 2 MiB. Default: 64 MiB.
    pub fn pool_bytes(mut self, bytes: usize) -> DevmemConfig {
        self.pool_bytes = bytes;
        self
    }

    /// Size of the largest message, and so of the largest chunk, in bytes; equal at both ends. Default: 512 KiB.
    pub fn message_bytes_max(mut self, bytes: usize) -> DevmemConfig {
        self.message_bytes_max = bytes;
        self
    }

    /// Messages in flight per channel and direction; equal at both ends. Default: 16.
    pub fn window(mut self, messages: usize) -> DevmemConfig {
        self.window = messages;
        self
    }

    /// Longest time without progress of a channel's oldest message. Default: 30 s.
    pub fn stall_timeout(mut self, limit: Duration) -> DevmemConfig {
        self.stall_timeout = limit;
        self
    }

    /// Longest time for setting up a channel's connections. Default: 60 s.
    pub fn setup_timeout(mut self, limit: Duration) -> DevmemConfig {
        self.setup_timeout = limit;
        self
    }

    /// Lets the endpoint work without devmem TCP if this host or the other end does not support it; payload is then
    /// copied as by default. Devmem TCP is used only if every NIC that channels may use supports it, so name those that
    /// do ([`Builder::nics`](ferrywire::Builder::nics)). Only memory of the GPU of [`DevmemConfig::gpu`] can be moved,
    /// also without devmem TCP.
    pub fn optional(mut self) -> DevmemConfig {
        self.required = false;
        self
    }

    /// Returns an error for a value of the configuration that cannot work.
    pub(super) fn check(&self) -> Result<()> {
        let within = |what: &str, value: usize, least: usize, most: usize| {
            if (least..=most).contains(&value) {
                Ok(())
            } else {
                Err(Error::invalid(what, format!("must be between {least} and {most} (got {value})")))
            }
        };
        let (least, most) = (limits::LANE_MESSAGE_BYTES_MIN, limits::CHUNK_BYTES_MAX);
        within("message bytes of devmem", self.message_bytes_max, least, most)?;
        within("window of devmem", self.window, 1, limits::LANE_WINDOW_MAX)?;
        within("queues of devmem", self.queues, 1, limits::DEVMEM_QUEUES_MAX)?;
        let (least, most) = (limits::DEVMEM_POOL_BYTES_MIN, limits::DEVMEM_POOL_BYTES_MAX);
        within("pool bytes of devmem", self.pool_bytes, least, most)?;
        if self.pool_bytes < limits::DEVMEM_POOL_MESSAGES_MIN * self.message_bytes_max {
            let why = format!(
                "{} bytes have no room for {} messages of {} bytes: use a larger pool, or smaller messages",
                self.pool_bytes,
                limits::DEVMEM_POOL_MESSAGES_MIN,
                self.message_bytes_max
            );
            return Err(Error::invalid("pool bytes of devmem", why));
        }
        match self.gpu {
            Some(MemoryLocation::Host) => Err(Error::invalid("GPU of devmem", "host memory needs no GPU")),
            _ => Ok(()),
        }
    }
}

impl BackendConfig for DevmemConfig {
    fn name(&self) -> &str {
        NAME
    }

    fn is_optional(&self) -> bool {
        !self.required
    }

    fn open(&self, endpoint: &Config, nics: &[Nic]) -> Result<SharedBackend> {
        Ok(Arc::new(Backend::open(self.clone(), endpoint, nics)?))
    }
}
