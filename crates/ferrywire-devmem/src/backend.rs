//! Devmem TCP as a payload backend of an endpoint: the NICs whose payload moves without copies, the terms for a
//! session, and the lanes.
//!
//! Invariant: an endpoint that requires the backend has channels only over NICs that support it. An endpoint that does
//! not require it uses it only if every NIC that channels may use supports it.
//! Read next: `device.rs`, one such NIC; `setup.rs`, how a channel gets its lane.

use super::NAME;
use super::config::DevmemConfig;
use super::device::Device;
use super::gather::Gatherer;
use super::setup::DevmemSetup;
use ferrywire::payload::{Incompatible, PayloadBackend, Setup, Terms, different, without};
use ferrywire::{Config, Error, Result, UnreachableCause};
use ferrywire_memory::unpack::{GatherDevice, Mapped};
use ferrywire_memory::{Gpu, Memory, MemoryLocation};
use ferrywire_net::{Conn, Nic, Transport};
use ferrywire_proto::handshake::Config as SessionConfig;
use ferrywire_proto::limits;
use ferrywire_sys::poll::Waker;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The devmem devices of one endpoint: NICs with claimed queues.
#[derive(Debug)]
pub(crate) struct Backend {
    pub config: DevmemConfig,
    gpu: Option<Gpu>,
    devices: Vec<Arc<Device>>,
}

impl Backend {
    /// Takes queues of the NICs that the endpoint may use: the NICs that it names, or all.
    ///
    /// # Errors
    /// No NIC can be used; or, for an optional backend or named NICs, one of the NICs cannot be used.
    pub fn open(config: DevmemConfig, endpoint: &Config, nics: &[Nic]) -> Result<Backend> {
        config.check()?;
        if endpoint.threads == 0 {
            let why = format!("{NAME} needs a progress thread: set threads to 1 or more");
            return Err(Error::invalid("threads", why));
        }
        let gpu = config.gpu.map(Gpu::open).transpose()?;
        let mut devices = Vec::new();
        let mut trouble = Vec::new();
        let loopback = |name: &str| nics.iter().any(|nic| nic.name == *name && nic.loopback);
        let mut loopback_passed = false;
        for name in endpoint.chosen_nics(nics) {
            if loopback(&name) && endpoint.nics.is_empty() {
                loopback_passed = true;
                continue;
            }
            let opened = if loopback(&name) {
                Err("loopback packets never reach a NIC: name another NIC".to_owned())
            } else {
                Device::open(&name, &config, gpu.as_ref())
            };
            match opened {
                Ok(device) => devices.push(Arc::new(device)),
                Err(why) => trouble.push(format!("{name}: {why}")),
            }
        }
        // An optional backend must not leave channels over other NICs without a lane.
        let incomplete = !trouble.is_empty() && (!config.required || !endpoint.nics.is_empty());
        if devices.is_empty() || incomplete {
            let why = match (trouble.is_empty(), loopback_passed) {
                (false, _) => trouble.join("; "),
                (true, true) => {
                    "loopback packets never reach a NIC: listen on the address of a NIC, or name a NIC"
                        .to_owned()
                }
                (true, false) => {
                    "no NIC that the endpoint may use is up: bring one up, or name another".to_owned()
                }
            };
            return Err(Error::invalid(NAME, why));
        }
        trouble.iter().for_each(|why| tracing::info!("{NAME} is not used on {why}"));
        Ok(Backend { config, gpu, devices })
    }

    #[cfg(test)]
    pub fn without_devices(config: DevmemConfig) -> Backend {
        Backend { config, gpu: None, devices: Vec::new() }
    }

    /// Names of the NICs of which the endpoint has queues.
    fn device_names(&self) -> Vec<String> {
        self.devices.iter().map(|device| device.name().to_owned()).collect()
    }

    /// The endpoint's GPU, which was opened with the backend; `None` without a GPU.
    pub fn opened_gpu(&self) -> Option<&Gpu> {
        self.gpu.as_ref()
    }

    /// The device of a NIC; the error says why there is none.
    pub fn device(&self, nic: &str) -> Result<Arc<Device>, String> {
        self.devices.iter().find(|device| device.name() == nic).cloned().ok_or_else(|| {
            format!(
                "NIC {nic} has no queue for {NAME}, only {} have: name those NICs",
                self.device_names().join(", ")
            )
        })
    }

    /// Runs `body` with the endpoint's GPU, if it has one, current on this thread.
    pub fn with_gpu_current<T>(&self, body: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        match &self.gpu {
            Some(gpu) => gpu.with_current(body).map_err(|error| error.to_string())?,
            None => body(),
        }
    }

    /// Creates a work queue of the endpoint's GPU. May wait for the GPU.
    pub fn gpu_queue(&self) -> Result<Box<dyn GatherDevice>, String> {
        let gpu =
            self.gpu.as_ref().ok_or_else(|| format!("{NAME} has no GPU: set one in its configuration"))?;
        gpu.queue().map_err(|error| error.to_string())
    }

    /// Allocates host memory that is mapped for the GPU. May wait for the GPU.
    pub(super) fn map(&self, bytes: usize) -> Result<Mapped, String> {
        self.with_gpu_current(|| self.gpu_queue()?.map(bytes).map_err(|error| error.to_string()))
    }

    /// Creates the gatherer of a lane, if a GPU takes part. May wait for the GPU.
    pub(super) fn gatherer(&self) -> Result<Option<Gatherer>, String> {
        let Some(gpu) = &self.gpu else { return Ok(None) };
        let queue = gpu.queue().map_err(|error| error.to_string())?;
        Gatherer::new(queue, self.config.unpack).map(Some).map_err(|error| error.to_string())
    }

    /// Allocates memory for staging at `location`, on the GPU or the host.
    pub fn memory(&self, location: MemoryLocation, bytes: usize) -> Result<Arc<Memory>, String> {
        let made = match &self.gpu {
            _ if location == MemoryLocation::Host => Memory::private(bytes),
            Some(gpu) => Memory::private_on(gpu, bytes),
            None => return Err(format!("cannot allocate bounce buffers in {location}: {NAME} has no GPU")),
        };
        made.map_err(|error| format!("cannot allocate bounce buffers: {error}"))
    }
}

impl PayloadBackend for Backend {
    fn name(&self) -> &str {
        NAME
    }

    fn transport(&self) -> &'static str {
        NAME
    }

    fn gpu(&self) -> Option<MemoryLocation> {
        self.config.gpu
    }

    fn message_bytes_max(&self) -> usize {
        self.config.message_bytes_max
    }

    fn nics(&self) -> Option<Vec<String>> {
        // A channel over another NIC would have no lane.
        self.config.required.then(|| self.device_names())
    }

    fn is_optional(&self) -> bool {
        !self.config.required
    }

    fn is_negotiated(&self) -> bool {
        true
    }

    fn offer(&self, address: SocketAddr, transport: &dyn Transport) -> Result<Vec<u8>> {
        match crosses_nic(address, transport) {
            Ok(()) => Ok(self.terms().encode()),
            Err(why) if self.config.required => Err(Error::Unreachable {
                address: address.to_string(),
                cause: UnreachableCause::BackendCannot,
                why,
            }),
            Err(why) => Ok(without(&format!("at the connecting end: {why}"))),
        }
    }

    fn terms(&self) -> Terms {
        let list = [
            ("message", self.config.message_bytes_max.to_string()),
            ("window", self.config.window.to_string()),
        ];
        let terms = Terms::new(NAME, &list, self.gpu.is_some());
        if self.config.required { terms } else { terms.optional() }
    }

    fn agree(&self, theirs: &Terms, _same_host: bool, session: &SessionConfig) -> Result<(), Incompatible> {
        if theirs.plugin() != NAME {
            return Err(Incompatible::Mismatch(different(NAME, theirs.plugin())));
        }
        self.terms().agree(theirs)?;
        let options = |why: String| Err(Incompatible::Options(why));
        if session.chunk_bytes as usize > self.config.message_bytes_max {
            let (chunk, most) = (session.chunk_bytes, self.config.message_bytes_max);
            return options(format!(
                "chunks have {chunk} bytes, and messages over {NAME} at most {most}: use smaller chunks"
            ));
        }
        if (self.gpu.is_some() || theirs.gpu()) && session.crc {
            return options(
                "checksums need host memory at both ends: turn checksums off for GPU memory".into(),
            );
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

    fn setup_timeout(&self) -> Duration {
        self.config.setup_timeout
    }

    fn stall_timeout(&self) -> Duration {
        self.config.stall_timeout
    }

    fn end(&self, limit: Duration) {
        let by = Instant::now() + limit.min(limits::NIC_LOCK_TIMEOUT);
        for device in &self.devices {
            device.end(by.max(Instant::now() + limits::NIC_END_MIN));
        }
    }
}

/// Checks that packets to an address leave this host.
fn crosses_nic(address: SocketAddr, transport: &dyn Transport) -> Result<(), String> {
    let nics = transport.nics().map_err(|error| format!("cannot list NICs: {error}"))?;
    let ip = address.ip().to_canonical();
    if ip.is_loopback() || nics.iter().any(|nic| nic.address == ip) {
        Err(format!("packets to {ip} stay on this host and cross no NIC, which {NAME} needs"))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(chunk_bytes: u32, crc: bool) -> SessionConfig {
        SessionConfig {
            channels: 1,
            chunk_bytes,
            window: 1,
            crc,
            wish: Default::default(),
            extra: Vec::new(),
        }
    }

    #[test]
    fn a_session_is_refused_with_the_difference() {
        let backend = Backend { config: DevmemConfig::default(), gpu: None, devices: Vec::new() };
        let plugin = Terms::new("Sockets", &[], false);
        let why = "payload goes over devmem at the end that accepts and over Sockets at the end that connects; both need \
                   the same";
        assert_eq!(
            backend.agree(&plugin, false, &session(1, false)),
            Err(Incompatible::Mismatch(why.to_owned()))
        );
        let larger = Backend {
            config: DevmemConfig::default().message_bytes_max(1 << 20),
            gpu: None,
            devices: Vec::new(),
        };
        let refused = backend.agree(&larger.terms(), false, &session(1, false)).unwrap_err().to_string();
        assert!(refused.starts_with("message is 524288 at the end that accepts and 1048576"), "{refused}");
        assert_eq!(backend.agree(&backend.terms(), false, &session(512 << 10, true)), Ok(()));
        let refused =
            backend.agree(&backend.terms(), false, &session(1 << 20, false)).unwrap_err().to_string();
        assert!(refused.contains("messages over devmem at most 524288"), "{refused}");
        let gpu = Terms::new(NAME, &[("message", "524288".into()), ("window", "16".into())], true);
        assert!(
            backend
                .agree(&gpu, false, &session(1, true))
                .is_err_and(|why| why.to_string().contains("checksums"))
        );
    }
}
