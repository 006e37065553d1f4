//! A loaded plugin, as an endpoint uses it: its devices, its terms, and its failures.
//!
//! Invariant: the plugin stays loaded while a lane or set-up uses it.
//! Read next: `setup.rs`, how a channel gets its lane.

use super::config::{File, PluginConfig};
use super::environment::{self, Facts, SetBy, Variable};
use super::setup::PluginSetup;
use super::tcpx;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::payload::lane::Setup;
use crate::payload::payload_backend::{Incompatible, PayloadBackend};
use crate::payload::terms::Terms;
use ferrywire_memory::unpack::{DeviceUnpack, Extent, Gather, GatherDevice};
use ferrywire_memory::{Gpu, Memory, MemoryLocation};
use ferrywire_ncclnet::abi::PointerType;
use ferrywire_ncclnet::{CallError, CommId, InflightCall, Library, Plugin, Properties, RecvComm, log};
use ferrywire_net::{Conn, Nic, Transport};
use ferrywire_proto::handshake::Config as SessionConfig;
use ferrywire_proto::limits;
use ferrywire_sys::affinity;
use ferrywire_sys::poll::Waker;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Name prefixes of plugins with a fixed number of requests per connection. Such a plugin refuses a further
/// request, and logs a line for each attempt.
const REQUESTS_MAX: [(&str, usize); 2] = [("GPUDirectTCPX", 16), ("FastSocket", 16)];

/// A loaded plugin, with the endpoint's decisions about it.
#[derive(Debug)]
pub(crate) struct Host {
    pub plugin: Plugin,
    pub config: PluginConfig,
    /// Largest message, in bytes, that this end offers.
    pub message_bytes_max: usize,
    devices: Vec<Properties>,
    /// Keeps the GPU open while the plugin may use it.
    gpu: Option<Gpu>,
    environment: Vec<Variable>,
    /// Number of listeners that stay open because their accept did not end.
    pub listeners_leaked: AtomicUsize,
    /// Number of registrations that stay because a request of their direction was in flight when their lane
    /// was closed.
    pub registrations_leaked: AtomicUsize,
}

impl Host {
    /// Sets the environment, loads the plugin and reads its devices.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unusable setting or device; the error of loading the plugin, or of a GPU
    /// that cannot be opened.
    ///
    /// # Safety
    /// As for [`PluginConfig::at`].
    pub unsafe fn load(plugin: PluginConfig, config: &Config, nics: &[Nic]) -> Result<Host> {
        plugin.check()?;
        if config.threads == 0 {
            let why = "a plugin's calls may block, so they need a progress thread: set threads to 1 or more";
            return Err(Error::invalid("threads", why));
        }
        let mut seen = environment::seen();
        let another_is_there = seen.is_loaded();
        // SAFETY: promised by the caller of this function.
        let environment = unsafe { seen.set(&facts(&plugin, config, nics)) };
        let mut message_bytes_max = message_bytes_max(&environment)?;
        if another_is_there && !set_by_user(&environment, environment::CHUNK_BYTES) {
            message_bytes_max = message_bytes_max.min(plugin.message_bytes_max);
        }
        // Open the GPU before the plugin is loaded: the plugin finds a simulated GPU through the environment,
        // and a real GPU's driver only if that is loaded.
        let gpu = plugin.gpu.map(Gpu::open).transpose()?;
        // SAFETY: the caller promises that the file is trusted.
        let loaded = unsafe {
            let library = match &plugin.file {
                File::Path(path) => Library::open(path)?,
                File::Named(name) => Library::find(name.as_deref())?,
            };
            library.load(plugin.version)?
        };
        seen.note_loaded(&environment);
        drop(seen);
        if tcpx::is(loaded.name())
            && let Some((name, why)) = environment::unusable(&environment, plugin.gpu.is_some())
        {
            return Err(Error::invalid(name, why));
        }
        window_fits(loaded.name(), plugin.window)?;
        let most = limits::TCPX_MESSAGE_BYTES_MAX;
        if tcpx::is(loaded.name()) && message_bytes_max > most {
            tracing::info!(
                "plugin {}: messages are limited to {most} bytes instead of {message_bytes_max}",
                loaded.name()
            );
            message_bytes_max = most;
        }
        let mut devices = Vec::new();
        for device in 0..loaded.devices() {
            devices.push(loaded.properties(device)?);
        }
        if another_is_there && !set_by_user(&environment, environment::NICS) {
            has_nics(loaded.name(), &devices, &config.chosen_nics(nics))?;
        }
        if plugin.gpu.is_some() {
            moves_gpu_memory(loaded.name(), &devices)?;
        }
        let host = Host {
            plugin: loaded,
            config: plugin,
            message_bytes_max,
            devices,
            gpu,
            environment,
            listeners_leaked: AtomicUsize::new(0),
            registrations_leaked: AtomicUsize::new(0),
        };
        host.say();
        Ok(host)
    }

    fn say(&self) {
        let names: Vec<&str> = self.devices.iter().map(|device| device.name.as_str()).collect();
        let (name, version, path) = (self.plugin.name(), self.plugin.version(), self.plugin.path());
        tracing::info!("plugin {name} ({version}) from {path}; devices: {}", names.join(", "));
        if self.takes_turns() {
            tracing::info!(
                "one thread at a time calls listen and accept of {name}: the plugin imports its GPU's receive pool \
                 without a lock, and its calls do not block"
            )
        } else {
            tracing::info!("several threads at a time call listen and accept of {name}: its calls may block")
        }
        for Variable { name, value, set_by } in &self.environment {
            tracing::info!("{name}={value} (set by {set_by:?})");
        }
    }

    /// Whether the plugin's set-up calls must not overlap.
    pub fn takes_turns(&self) -> bool {
        tcpx::takes_turns(self.plugin.name())
    }

    /// The device of this host's NIC with `address`.
    ///
    /// # Errors
    /// Why there is no usable device.
    pub fn device_at(&self, address: IpAddr, nics: &[Nic]) -> Result<i32, String> {
        let nic = nics.iter().find(|nic| nic.address == address);
        let nic = nic.ok_or_else(|| format!("no NIC of this host has the address {address} any more"))?;
        match self.devices.iter().position(|device| device.name == nic.name) {
            Some(index) => self.takes_gpu_memory(&self.devices[index]).map(|()| index as i32),
            None => {
                let names: Vec<&str> = self.devices.iter().map(|device| device.name.as_str()).collect();
                Err(format!(
                    "plugin {} has no device for NIC {}, only for {}: name NICs that the plugin uses, or add this NIC \
                     to NCCL_SOCKET_IFNAME (many plugins leave loopback out otherwise)",
                    self.plugin.name(),
                    nic.name,
                    names.join(", ")
                ))
            }
        }
    }

    /// Checks that GPU memory can be registered on a device.
    ///
    /// # Errors
    /// Why registering GPU memory on this device would end the process.
    fn takes_gpu_memory(&self, device: &Properties) -> Result<(), String> {
        let (name, nic) = (self.plugin.name(), &device.name);
        if self.config.gpu.is_none() || !tcpx::is(name) {
            return Ok(());
        }
        match tcpx::lacks_address(device.pci_path.as_deref()) {
            None => Ok(()),
            Some(why) => Err(format!(
                "plugin {name} would end the process when it registers GPU memory on NIC {nic}, {why}: choose NICs that \
                 are PCI devices (--nics, or the address to listen on), or use host memory"
            )),
        }
    }

    /// The device with this index, if there is one.
    pub fn device(&self, index: i32) -> Option<&Properties> {
        self.devices.get(usize::try_from(index).ok()?)
    }

    /// The GPU, if one is configured.
    pub fn opened_gpu(&self) -> Option<&Gpu> {
        self.gpu.as_ref()
    }

    /// Runs `body` with the GPU current on this thread, if there is one.
    ///
    /// # Errors
    /// The error of `body` or of the driver.
    pub fn with_gpu_current<T>(&self, body: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        match &self.gpu {
            Some(gpu) => gpu.with_current(body).map_err(|error| error.to_string())?,
            None => body(),
        }
    }

    /// Runs `body` as [`Host::with_gpu_current`] does, for a plugin call that may leave a context of its own
    /// on the thread's stack.
    ///
    /// # Errors
    /// The error of `body` or of the driver.
    pub fn with_gpu_current_alone<T>(&self, body: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        match &self.gpu {
            Some(gpu) => gpu.with_current_alone(body).map_err(|error| error.to_string())?,
            None => body(),
        }
    }

    /// Creates a work queue on the GPU. May wait for the GPU.
    pub fn gpu_queue(&self) -> Result<Box<dyn GatherDevice>, String> {
        let no_gpu = || format!("plugin {} has no GPU: set one in its configuration", self.plugin.name());
        let gpu = self.gpu.as_ref().ok_or_else(no_gpu)?;
        gpu.queue().map_err(|error| error.to_string())
    }

    /// Allocates memory owned by the engine, on the host or on the GPU.
    pub fn memory(&self, location: MemoryLocation, bytes: usize) -> Result<Arc<Memory>, String> {
        let made = match &self.gpu {
            _ if location == MemoryLocation::Host => Memory::private(bytes),
            Some(gpu) => Memory::private_on(gpu, bytes),
            None => {
                let name = self.plugin.name();
                return Err(format!(
                    "cannot allocate bounce buffers in {location}: plugin {name} has no GPU"
                ));
            }
        };
        made.map_err(|error| format!("cannot allocate bounce buffers: {error}"))
    }

    /// Allocates host memory that the GPU reaches too, if there is one. May wait for the GPU.
    pub fn host_memory(&self, bytes: usize) -> Result<Arc<Memory>, String> {
        match &self.gpu {
            Some(gpu) => {
                let mapped = gpu.map_once(bytes);
                let mapped =
                    mapped.map_err(|error| format!("cannot allocate bounce buffers on the host: {error}"))?;
                Ok(Memory::mapped(mapped, bytes))
            }
            None => self.memory(MemoryLocation::Host, bytes),
        }
    }

    /// The allocation that contains this GPU memory.
    pub fn allocation(&self, address: u64, bytes: u64) -> Option<Extent> {
        self.gpu.as_ref()?.allocation(address, bytes)
    }

    /// Creates the gather of a new connection, if its receives arrive in fragments of GPU memory. May wait
    /// for the GPU.
    pub fn gather_for(&self, comm: &RecvComm) -> Result<Option<Gather>, String> {
        let (Some(_), Some(handle)) = (&self.gpu, comm.device_handle()) else { return Ok(None) };
        let device = self.gpu_queue()?;
        // SAFETY: the handle is what `accept` gave for this connection, and a lane drops its gather before
        // it closes the connection.
        let unpack = unsafe { DeviceUnpack::read(device, &handle) };
        let gather = unpack.and_then(|unpack| Gather::new(self.config.unpack, unpack));
        gather.map(Some).map_err(|error| error.to_string())
    }

    /// How long a cancelled set-up attempt may continue.
    pub fn linger(&self) -> Duration {
        self.config.setup_timeout.saturating_mul(5).min(limits::LANE_LINGER_TIMEOUT)
    }

    /// Describes a failed set-up call: the error, the plugin's warnings since line `began` of its log, and a
    /// fix if the cause is known. Also returns whether it is known.
    pub fn explain_failure(&self, error: &CallError, began: u64) -> (String, bool) {
        let said = log::lines_since(began);
        let warned =
            said.warning().map_or_else(String::new, |line| format!("; the plugin warned: {}", line.text));
        let fix = said.cause().map(|(cause, _)| format!("; fix: {}", cause.fix()));
        (format!("{error}{warned}{}", fix.as_deref().unwrap_or_default()), fix.is_some())
    }

    /// Describes the call that has not returned for longest, if that is longer than `least`. A call that
    /// began before a set-up of this `age` concerns that set-up only if set-up calls must not overlap.
    pub fn longest_call(&self, least: Duration, age: Duration) -> Option<String> {
        let calls = self.inflight_calls();
        let concerns = |call: &&InflightCall| call.since > least && (call.since <= age || self.takes_turns());
        calls.iter().find(concerns).map(|call| self.describe_call(call))
    }

    /// Counts and logs a listener that stays open for good.
    pub fn leaked_listener(&self, why: &str) {
        self.listeners_leaked.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(plugin = self.plugin.name(), "listener stays open until this process ends: {why}");
    }

    /// Counts and logs registrations of a connection that had requests in flight when it was closed; they are
    /// not undone.
    pub fn leaked_registrations(&self, count: usize, comm: CommId) {
        if count == 0 {
            return;
        }
        let all = self.registrations_leaked.fetch_add(count, Ordering::Relaxed) + count;
        tracing::warn!(
            plugin = self.plugin.name(), %comm, all,
            "cannot undo {count} memory registrations, which stay until this process ends: a request was in flight \
             when the connection was closed"
        );
    }
}

impl PayloadBackend for Host {
    fn name(&self) -> &str {
        self.plugin.name()
    }

    fn transport(&self) -> &'static str {
        "plugin"
    }

    fn gpu(&self) -> Option<MemoryLocation> {
        self.config.gpu
    }

    fn message_bytes_max(&self) -> usize {
        self.message_bytes_max
    }

    fn environment(&self) -> &[Variable] {
        &self.environment
    }

    fn terms(&self) -> Terms {
        let scattered = self.devices.iter().any(Properties::unpacks);
        let recv_sync = self.environment.iter().find(|variable| variable.name == environment::RECV_SYNC);
        let recv_sync = recv_sync.map_or("0".to_owned(), |set| set.value.chars().take(8).collect());
        let inline = environment::inline_bytes(&self.environment);
        let inline = inline.map_or_else(|_| "unreadable".to_owned(), |bytes| bytes.to_string());
        let list = [
            ("version", self.plugin.version().to_string()),
            (environment::CHUNK_BYTES, self.message_bytes_max.to_string()),
            ("window", self.config.window.to_string()),
            ("unpacks", u8::from(scattered).to_string()),
            (environment::RECV_SYNC, recv_sync),
            (environment::INLINE, inline),
        ];
        Terms::new(self.plugin.name(), &list, self.config.gpu.is_some())
    }

    fn agree(&self, theirs: &Terms, same_host: bool, session: &SessionConfig) -> Result<(), Incompatible> {
        self.terms().agree(theirs)?;
        let options = |why: String| Err(Incompatible::Options(why));
        if session.chunk_bytes as usize > self.message_bytes_max {
            let (chunk, most) = (session.chunk_bytes, self.message_bytes_max);
            return options(format!(
                "chunks have {chunk} bytes, and messages over {} at most {most}: use smaller chunks",
                self.plugin.name()
            ));
        }
        let gpu = self.config.gpu.is_some() || theirs.gpu();
        let name = self.plugin.name();
        if gpu && session.crc {
            return options(
                "checksums need host memory at both ends: turn checksums off for GPU memory".into(),
            );
        }
        if gpu && tcpx::is(name) && environment::inline_bytes(&self.environment) != Ok(0) {
            let inline = environment::INLINE;
            return options(format!(
                "{inline} must be 0 where one end has a GPU: set the variable to 0 at both ends, or unset it"
            ));
        }
        if gpu && same_host && tcpx::is(name) && !self.config.allow_same_host_gpu {
            return Err(Incompatible::SameHost(format!(
                "both ends are on one host, and {name} ends the process when it receives GPU memory that did not \
                 cross a NIC: use another transport on one host, or allow the plugin for a simulator or namespaces"
            )));
        }
        Ok(())
    }

    fn begin(
        self: Arc<Self>,
        transport: &dyn Transport,
        conn: &dyn Conn,
        _dials: bool,
        now: Duration,
        waker: Waker,
    ) -> Result<Box<dyn Setup>, String> {
        let nics = transport.nics().map_err(|error| format!("listing NICs: {error}"))?;
        let device = self.device_at(conn.local().ip(), &nics)?;
        Ok(Box::new(PluginSetup::start(&self, device, now, waker)?))
    }

    fn setup_timeout(&self) -> Duration {
        self.config.setup_timeout
    }

    fn stall_timeout(&self) -> Duration {
        self.config.stall_timeout
    }

    fn calls_may_block(&self) -> bool {
        true
    }

    fn inflight_calls(&self) -> Vec<InflightCall> {
        self.plugin.inflight_calls()
    }

    fn describe_call(&self, call: &InflightCall) -> String {
        let device = call.device.and_then(|index| self.device(index).map(|device| (index, &device.name)));
        let device = device.map(|(index, name)| format!(" on device {index} ({name})")).unwrap_or_default();
        format!(
            "plugin {} ({}): {}{device} has not returned for {:.1} s",
            self.plugin.name(),
            self.plugin.version(),
            call.call,
            call.since.as_secs_f64()
        )
    }

    fn fails_for_good(&self) -> bool {
        true
    }

    fn ends_process(&self) -> bool {
        true
    }
}

/// Checks that the plugin can fill the window.
///
/// # Errors
/// [`Error::Invalid`] for a window that the plugin is known never to fill.
fn window_fits(name: &str, window: usize) -> Result<()> {
    match REQUESTS_MAX.iter().find(|(begin, most)| name.starts_with(begin) && window > *most) {
        Some((_, most)) => {
            let why = format!(
                "must be at most {most}, the requests that {name} takes per connection (got {window})"
            );
            Err(Error::invalid("window of the plugin", why))
        }
        None => Ok(()),
    }
}

/// Checks that the plugin has a device for each of these NICs.
///
/// # Errors
/// [`Error::Invalid`] for a NIC that the plugin lacks because it was loaded for another endpoint's NICs.
fn has_nics(name: &str, devices: &[Properties], nics: &[String]) -> Result<()> {
    let lacking = nics.iter().find(|nic| !devices.iter().any(|device| device.name == **nic));
    match lacking.filter(|_| tcpx::is(name)) {
        Some(nic) => Err(Error::invalid(
            "NICs of the plugin",
            format!(
                "{name} has no device {nic}: an endpoint that was built before has set {} to its own NICs; set the \
                 variable to all NICs before the first endpoint, or build the endpoint with most NICs first",
                environment::NICS
            ),
        )),
        None => Ok(()),
    }
}

/// Checks that the plugin's devices can move GPU memory.
///
/// # Errors
/// [`Error::Invalid`] for a device that takes no GPU memory, or needs a flush after each receive, which is
/// not implemented.
fn moves_gpu_memory(name: &str, devices: &[Properties]) -> Result<()> {
    let refused = |why: String| Err(Error::invalid("GPU of the plugin", why));
    for device in devices {
        let of = format!("device {} of {name}", device.name);
        if !device.takes(PointerType::Cuda) {
            return refused(format!("{of} takes host memory only: use host memory, without a GPU"));
        }
        if !device.unpacks() {
            return refused(format!(
                "{of} writes to GPU memory itself and needs a flush after each receive, which ferrywire does not support: \
                 use host memory, without a GPU"
            ));
        }
    }
    Ok(())
}

/// The variables with which a plugin would be loaded. Sets nothing.
pub(crate) fn environment_for(plugin: &PluginConfig, config: &Config, nics: &[Nic]) -> Vec<Variable> {
    environment::seen().decide(&facts(plugin, config, nics))
}

fn facts(plugin: &PluginConfig, config: &Config, nics: &[Nic]) -> Facts {
    let chosen = config.chosen_nics(nics);
    let of_them = nics.iter().filter(|nic| chosen.contains(&nic.name));
    Facts {
        message_bytes_max: plugin.message_bytes_max,
        speed_mbps: of_them.filter_map(|nic| nic.speed_mbps).max(),
        cores: affinity::cores_with_time(),
        nics: chosen,
        set_before: plugin.set_before.clone(),
    }
}

fn set_by_user(environment: &[Variable], name: &str) -> bool {
    environment.iter().any(|variable| variable.name == name && variable.set_by == SetBy::User)
}

/// The chunk size in bytes that the plugin reads, set by the user or by ferrywire.
fn message_bytes_max(environment: &[Variable]) -> Result<usize> {
    let chunk = environment.iter().find(|variable| variable.name == environment::CHUNK_BYTES);
    let text = chunk.map_or("", |chunk| chunk.value.trim());
    let (least, most) = (limits::LANE_MESSAGE_BYTES_MIN, limits::CHUNK_BYTES_MAX);
    match text.parse() {
        Ok(bytes) if (least..=most).contains(&bytes) => Ok(bytes),
        _ => {
            let why = format!("must be between {least} and {most} bytes (got {text:?})");
            Err(Error::invalid(environment::CHUNK_BYTES, why))
        }
    }
}
