//! What a user says about devmem TCP.
//!
//! Invariant: what [`DevmemConfig`] cannot work with is refused before a NIC is touched. Read next: `backend.rs`.

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
    pub(crate) stall_limit: Duration,
    pub(crate) setup_limit: Duration,
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
            stall_limit: limits::LANE_STALL_LIMIT_DEFAULT,
            setup_limit: limits::LANE_SETUP_TIMEOUT,
            required: true,
        }
    }
}

impl DevmemConfig {
    /// The GPU whose memory is moved, beside host memory. What arrives lands in a pool of its memory. Default: none, and
    /// a pool of host memory.
    pub fn gpu(mut self, gpu: MemoryLocation) -> DevmemConfig {
        self.gpu = Some(gpu);
        self
    }

    /// How receives are gathered, which arrive in fragments. Default: by a kernel of the GPU. [`UnpackMode::Host`] puts
    /// the pool into host memory. Without a GPU the CPU gathers.
    pub fn unpack(mut self, mode: UnpackMode) -> DevmemConfig {
        self.unpack = mode;
        self
    }

    /// Allows settings of NICs to be changed: header split, its threshold, whether there are rules for flows at all, and
    /// which queues others' flows are spread over. They are undone when the endpoint ends. Default: no, and an error says
    /// what is missing. The rules that steer the endpoint's own connections need no leave; they go with the connections.
    pub fn allow_nic_setup(mut self, allow: bool) -> DevmemConfig {
        self.allow_nic_setup = allow;
        self
    }

    /// Receive queues to take of each NIC. Default: 1.
    pub fn queues(mut self, queues: usize) -> DevmemConfig {
        self.queues = queues;
        self
    }

    /// Bytes of the pool of each NIC, rounded up to 2 MiB. Default: 64 MiB.
    pub fn pool_bytes(mut self, bytes: usize) -> DevmemConfig {
        self.pool_bytes = bytes;
        self
    }

    /// Largest message, and so the largest chunk, in bytes. The same at both ends. Default: 512 KiB.
    pub fn message_bytes_max(mut self, bytes: usize) -> DevmemConfig {
        self.message_bytes_max = bytes;
        self
    }

    /// Messages per channel and direction that may be under way. The same at both ends. Default: 16.
    pub fn window(mut self, messages: usize) -> DevmemConfig {
        self.window = messages;
        self
    }

    /// Longest that the oldest message of a channel may stand still. Default: 30 s.
    pub fn stall_limit(mut self, limit: Duration) -> DevmemConfig {
        self.stall_limit = limit;
        self
    }

    /// Longest that the connections of a channel may take to come about. Default: 60 s.
    pub fn setup_limit(mut self, limit: Duration) -> DevmemConfig {
        self.setup_limit = limit;
        self
    }

    /// Goes without where this host or the other end cannot: payload then takes the way that it takes by default. Every NIC
    /// that channels may use has to be able to; name those that are ([`Builder::nics`](ferrywire::Builder::nics)). Memory of
    /// GPUs is that of [`DevmemConfig::gpu`] alone, also where a session goes without.
    pub fn optional(mut self) -> DevmemConfig {
        self.required = false;
        self
    }

    /// Refuses values that cannot work.
    pub(super) fn check(&self) -> Result<()> {
        let within =
            |what: &str, value: usize, least: usize, most: usize| match (least..=most).contains(&value) {
                true => Ok(()),
                false => Err(Error::invalid(what, format!("{value} is not between {least} and {most}"))),
            };
        let (least, most) = (limits::LANE_MESSAGE_BYTES_MIN, limits::CHUNK_BYTES_MAX);
        within("message bytes of devmem", self.message_bytes_max, least, most)?;
        within("window of devmem", self.window, 1, limits::LANE_WINDOW_MAX)?;
        within("queues of devmem", self.queues, 1, limits::DEVMEM_QUEUES_MAX)?;
        let (least, most) = (limits::DEVMEM_POOL_BYTES_MIN, limits::DEVMEM_POOL_BYTES_MAX);
        within("pool bytes of devmem", self.pool_bytes, least, most)?;
        if self.pool_bytes < limits::DEVMEM_POOL_MESSAGES_MIN * self.message_bytes_max {
            let why = format!(
                "{} hold no {} messages of {} bytes: a larger pool, or smaller messages",
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
