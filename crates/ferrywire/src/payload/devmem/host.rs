//! An endpoint's NICs that move payload without copies: queues that are its own, and the pools bound to them.
//!
//! Read next: `nic.rs`, how queues are taken and given back; `setup.rs`, how a channel gets its lane.

use super::NAME;
use super::config::DevmemConfig;
use super::gather::Gatherer;
use super::nic::{Claim, Rule, Wish};
use super::pool::Pool;
use super::setup::DevmemSetup;
use super::sources::Bindings;
use super::steering::Steering;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::payload::lane::Setup;
use crate::payload::payload_backend::{PayloadBackend, different};
use crate::payload::terms::{Terms, without};
use ferrywire_memory::unpack::{GatherDevice, Mapped, UnpackMode};
use ferrywire_memory::{Gpu, Memory, Place};
use ferrywire_net::{Conn, Nic, Transport};
use ferrywire_proto::handshake::Config as SessionConfig;
use ferrywire_proto::limits;
use ferrywire_sys::poll::Waker;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One NIC's queues with the pool that they fill.
pub(crate) struct Device {
    name: String,
    index: u32,
    binding: u32,
    bindings: Bindings,
    // Ends before the claim does, and the claim before the pool is gone, to which it is bound.
    steering: Steering,
    pool: Pool,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({}, {} bytes in {})", self.name, self.pool.bytes(), self.pool.place())
    }
}

impl Device {
    fn open(name: &str, config: &DevmemConfig, gpu: Option<&Gpu>) -> Result<Device, String> {
        let wish = Wish { queues: config.queues, allow_nic_setup: config.allow_nic_setup };
        let mut claim = Claim::new(name, &wish).map_err(|error| error.to_string())?;
        let gpu = gpu.filter(|_| config.unpack != UnpackMode::Host);
        let pool = Pool::new(gpu, config.pool_bytes).map_err(|error| error.to_string())?;
        let binding = claim.bind(pool.dmabuf()).map_err(|error| error.to_string())?;
        let (place, mib) = (pool.place(), pool.bytes() >> 20);
        tracing::info!(nic = name, "{NAME}: {} bound to a pool of {mib} MiB in {place}", claim.describe());
        Ok(Device {
            name: name.to_owned(),
            index: claim.index(),
            binding,
            bindings: Bindings::default(),
            steering: Steering::new(name, claim)
                .map_err(|error| format!("no thread that removes rules: {error}"))?,
            pool,
        })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The kernel's number of the NIC.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The kernel's number of the pool.
    pub fn binding(&self) -> u32 {
        self.binding
    }

    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }

    pub(super) fn bindings(&self) -> &Bindings {
        &self.bindings
    }

    /// Sends what arrives of a connection to our queues. May wait for others who change the NIC's settings.
    pub fn steer(&self, local: SocketAddr, remote: SocketAddr) -> Result<Rule, String> {
        self.steering.steer(local, remote).map_err(|error| error.to_string())
    }

    /// Removes a rule, without waiting for that.
    pub fn unsteer_later(&self, rule: Rule) {
        self.steering.unsteer_later(rule);
    }
}

/// What an endpoint has.
#[derive(Debug)]
pub(crate) struct Host {
    pub config: DevmemConfig,
    gpu: Option<Gpu>,
    devices: Vec<Arc<Device>>,
}

impl Host {
    /// Takes queues of every NIC that the endpoint may use: of those that were named, of all of them.
    pub fn open(config: DevmemConfig, endpoint: &Config, nics: &[Nic]) -> Result<Host> {
        config.check()?;
        if endpoint.threads == 0 {
            let why = format!("{NAME} needs a progress thread: give at least 1");
            return Err(Error::invalid("threads", why));
        }
        let gpu = config.gpu.map(Gpu::open).transpose()?;
        let mut devices = Vec::new();
        let mut trouble = Vec::new();
        let loopback = |name: &str| nics.iter().any(|nic| nic.name == *name && nic.loopback);
        for name in endpoint.chosen_nics(nics) {
            if loopback(&name) && endpoint.nics.is_empty() {
                continue;
            }
            let opened = match loopback(&name) {
                true => Err("packets of loopback never reach a NIC".to_owned()),
                false => Device::open(&name, &config, gpu.as_ref()),
            };
            match opened {
                Ok(device) => devices.push(Arc::new(device)),
                Err(why) => trouble.push(format!("{name}: {why}")),
            }
        }
        // Whoever can do without is not to have channels that would lack their lane.
        let incomplete = !trouble.is_empty() && (!config.required || !endpoint.nics.is_empty());
        if devices.is_empty() || incomplete {
            let why = match trouble.is_empty() {
                true => "packets of loopback never reach a NIC: listen on the address of one, or name one"
                    .to_owned(),
                false => trouble.join("; "),
            };
            return Err(Error::invalid(NAME, why));
        }
        trouble.iter().for_each(|why| tracing::info!("no {NAME} on {why}"));
        Ok(Host { config, gpu, devices })
    }

    /// The NICs it has queues of.
    fn device_names(&self) -> Vec<String> {
        self.devices.iter().map(|device| device.name.clone()).collect()
    }

    /// Its GPU, opened.
    pub fn opened_gpu(&self) -> Option<&Gpu> {
        self.gpu.as_ref()
    }

    /// The device that is a NIC.
    pub fn device(&self, nic: &str) -> Result<Arc<Device>, String> {
        self.devices.iter().find(|device| device.name == nic).cloned().ok_or_else(|| {
            format!(
                "{nic} has no queue for {NAME}, only {}: name NICs that have",
                self.device_names().join(", ")
            )
        })
    }

    /// Does something with its GPU current on this thread, if it has one.
    pub fn with_gpu_current<T>(&self, body: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        match &self.gpu {
            Some(gpu) => gpu.with_current(body).map_err(|error| error.to_string())?,
            None => body(),
        }
    }

    /// A queue of work of its GPU. May wait for the GPU.
    pub fn gpu_queue(&self) -> Result<Box<dyn GatherDevice>, String> {
        let gpu = self.gpu.as_ref().ok_or_else(|| format!("{NAME} was given no GPU"))?;
        gpu.queue().map_err(|error| error.to_string())
    }

    /// Host memory that its GPU reaches. May wait for the GPU.
    pub(super) fn map(&self, bytes: usize) -> Result<Mapped, String> {
        self.with_gpu_current(|| self.gpu_queue()?.map(bytes).map_err(|error| error.to_string()))
    }

    /// What gathers a lane's messages, where a GPU has a part in it. May wait for the GPU.
    pub(super) fn gatherer(&self) -> Result<Option<Gatherer>, String> {
        let Some(gpu) = &self.gpu else { return Ok(None) };
        let queue = gpu.queue().map_err(|error| error.to_string())?;
        Gatherer::new(queue, self.config.unpack).map(Some).map_err(|error| error.to_string())
    }

    /// Memory of the engine's own, of its GPU if the place is one.
    pub fn memory(&self, place: Place, bytes: usize) -> Result<Arc<Memory>, String> {
        let made = match &self.gpu {
            _ if place == Place::Host => Memory::private(bytes),
            Some(gpu) => Memory::private_on(gpu, bytes),
            None => return Err(format!("no slots in {place}")),
        };
        made.map_err(|error| format!("memory for slots: {error}"))
    }
}

impl PayloadBackend for Host {
    fn name(&self) -> &str {
        NAME
    }

    fn transport(&self) -> &'static str {
        NAME
    }

    fn gpu(&self) -> Option<Place> {
        self.config.gpu
    }

    fn message_bytes_max(&self) -> usize {
        self.config.message_bytes_max
    }

    fn nics(&self) -> Option<Vec<String>> {
        // A channel over another NIC would have no lane.
        self.config.required.then(|| self.device_names())
    }

    fn optional(&self) -> bool {
        !self.config.required
    }

    fn is_negotiated(&self) -> bool {
        true
    }

    fn offer(&self, address: SocketAddr, transport: &dyn Transport) -> Result<Vec<u8>> {
        match crosses_nic(address, transport) {
            Ok(()) => Ok(self.terms().encode()),
            Err(why) if self.config.required => Err(Error::Unreachable { address: address.to_string(), why }),
            Err(why) => Ok(without(&format!("at the end that connects: {why}"))),
        }
    }

    fn terms(&self) -> Terms {
        let list = [
            ("message", self.config.message_bytes_max.to_string()),
            ("window", self.config.window.to_string()),
        ];
        let terms = Terms::new(NAME, &list, self.gpu.is_some());
        if self.config.required { terms } else { terms.if_possible() }
    }

    fn agree(&self, theirs: &Terms, _same_host: bool, session: &SessionConfig) -> Result<(), String> {
        if theirs.plugin() != NAME {
            return Err(different(NAME, theirs.plugin()));
        }
        if let Some(difference) = self.terms().difference(theirs) {
            return Err(difference);
        }
        if session.chunk_bytes as usize > self.config.message_bytes_max {
            let (chunk, most) = (session.chunk_bytes, self.config.message_bytes_max);
            return Err(format!("chunks of {chunk} bytes, and messages over {NAME} have at most {most}"));
        }
        if (self.gpu.is_some() || theirs.gpu()) && session.crc {
            return Err("checksums need host memory at both ends: leave them off with a GPU".into());
        }
        Ok(())
    }

    fn begin(
        self: Arc<Self>,
        transport: &dyn Transport,
        conn: &dyn Conn,
        dials: bool,
        now: Duration,
        waker: Waker,
    ) -> Result<Box<dyn Setup>, String> {
        let address = conn.local().ip();
        let nic = transport.nic_name(address);
        let nic = nic.ok_or_else(|| format!("no NIC of this host has the address {address} any more"))?;
        Ok(Box::new(DevmemSetup::start(&self, &nic, dials, now, waker)?))
    }

    fn setup_limit(&self) -> Duration {
        self.config.setup_limit
    }

    fn stall_limit(&self) -> Duration {
        self.config.stall_limit
    }

    fn end(&self, limit: Duration) {
        let by = Instant::now() + limit.min(limits::NIC_LOCK_DEADLINE);
        for device in &self.devices {
            device.steering.end(by.max(Instant::now() + limits::NIC_END_MIN));
        }
    }
}

/// Whether packets to an address leave this host.
fn crosses_nic(address: SocketAddr, transport: &dyn Transport) -> Result<(), String> {
    let nics = transport.nics().map_err(|error| format!("listing NICs: {error}"))?;
    let ip = address.ip().to_canonical();
    match ip.is_loopback() || nics.iter().any(|nic| nic.address == ip) {
        true => Err(format!("packets to {ip} stay on this host, and {NAME} needs them to cross a NIC")),
        false => Ok(()),
    }
}
