//! The builder of an endpoint.
//!
//! Invariant: [`Builder::build`] checks all settings before anything listens. Read next: `config.rs`.

use super::Endpoint;
use crate::config::{Config, Secret};
use crate::control::check_names;
use crate::error::{Error, Result};
use crate::payload::payload_backend::{BackendConfig, SharedBackend};
use crate::payload::plugin::{self, PluginConfig, Variable, environment_for};
use ferrywire_net::tcp::TcpTransport;
use ferrywire_net::{Nic, SharedTransport, Transport};
use ferrywire_proto::protection::Encryption;
use ferrywire_proto::schedule;
use ferrywire_sys::affinity;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Builds an [`Endpoint`]. Every setting has a default that suits the host.
#[derive(Clone, Debug)]
pub struct Builder {
    config: Config,
    transport: Option<SharedTransport>,
    plugin: Option<PluginConfig>,
    backend: Option<Arc<dyn BackendConfig>>,
    cores: Vec<usize>,
}

impl Builder {
    pub(super) fn new() -> Builder {
        Builder { config: Config::default(), transport: None, plugin: None, backend: None, cores: Vec::new() }
    }

    /// For tests: another size of a core's level 2 cache than this host's.
    #[cfg(test)]
    pub(crate) fn level_2_cache_bytes(mut self, bytes: u64) -> Builder {
        self.config.level_2_cache_bytes = Some(bytes);
        self
    }

    /// Listens on this address. Port 0 chooses a free port; an unspecified address listens on every NIC.
    /// Default: the endpoint does not listen.
    pub fn listen(mut self, address: SocketAddr) -> Builder {
        self.config.listen = Some(address);
        self
    }

    /// Sets the shared secret: at least [`SECRET_BYTES_MIN`](ferrywire_proto::limits::SECRET_BYTES_MIN)
    /// bytes, equal on both ends. Required beyond loopback, for listening and for connecting.
    pub fn secret(mut self, secret: impl Into<Vec<u8>>) -> Builder {
        self.config.secrets.current = Some(Secret::new(secret));
        self
    }

    /// Accepts peers with a second secret too, until [`Endpoint::set_secret`] says otherwise: for an endpoint that starts
    /// while the shared secret is being exchanged. It needs [`Builder::secret`], and is as long at least. Default: none.
    pub fn also_accepted_secret(mut self, secret: impl Into<Vec<u8>>) -> Builder {
        self.config.secrets.also_accepted = Some(Secret::new(secret));
        self
    }

    /// Sets a label that peers and messages show, at most 64 bytes. Default: none.
    pub fn label(mut self, label: impl Into<String>) -> Builder {
        self.config.label = label.into();
        self
    }

    /// Sets the NICs to use, by name. Each must exist and have an address when a peer connects;
    /// [`Builder::check_nics`] checks earlier. Default: all NICs that share a subnet with the peer, else the
    /// NIC of the route.
    pub fn nics(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Builder {
        self.config.nics = names.into_iter().map(Into::into).collect();
        self
    }

    /// Sets the number of channels per peer; if both ends set one, the smaller counts. Default: chosen from the numbers of
    /// cores and NICs and from the round trip.
    pub fn channels(mut self, channels: usize) -> Builder {
        self.config.channels = Some(channels);
        self
    }

    /// Sets the number of progress threads. With 0 there are none, and [`Endpoint::progress`] and waiting
    /// calls poll everything. Default: chosen from the number of cores.
    pub fn threads(mut self, threads: usize) -> Builder {
        self.config.threads = threads;
        self
    }

    /// Restricts the endpoint's threads, and those that a plugin starts, to these cores. Default: no
    /// restriction.
    pub fn cpu_affinity(mut self, cores: impl IntoIterator<Item = usize>) -> Builder {
        self.cores = cores.into_iter().collect();
        self
    }

    /// Sets the largest chunk, in bytes: 4096 to [`CHUNK_BYTES_MAX`](ferrywire_proto::limits::CHUNK_BYTES_MAX).
    /// If both ends set one, the smaller counts. Default: 2 MiB.
    pub fn chunk_bytes(mut self, bytes: usize) -> Builder {
        self.config.chunk_bytes = bytes;
        self.config.chunk_bytes_set = Some(bytes);
        self
    }

    /// Sets the number of frames in flight per channel; the smaller of both ends counts. Default, and largest:
    /// [`WINDOW_FRAMES_MAX`](ferrywire_proto::limits::WINDOW_FRAMES_MAX).
    pub fn window(mut self, frames: usize) -> Builder {
        self.config.window = frames;
        self
    }

    /// Sets whether chunks carry a CRC-32. One end's wish is enough. Default: false.
    pub fn crc(mut self, on: bool) -> Builder {
        self.config.crc = on;
        self
    }

    /// Sets whether data connections are encrypted: payload, headers and notifications. The control session always is.
    /// Default: [`Encryption::Off`]. A session is encrypted if one end requires it or both prefer it, and refused if
    /// one end requires it and the other has it off. Nothing of a session over a plugin or
    /// devmem TCP is encrypted but its control session. This process reads and writes the memory itself: memory that is unmapped
    /// while it is registered ends the process, where a plain transfer would fail.
    pub fn encryption(mut self, encryption: Encryption) -> Builder {
        self.config.encryption = encryption;
        self
    }

    /// Sets whether data connections that are not encrypted are authenticated: a change on the path then ends the
    /// connection, and no completed transfer has a changed byte. One end's wish is enough. Default: false.
    pub fn keyed_checksum(mut self, on: bool) -> Builder {
        self.config.keyed_checksum = on;
        self
    }

    /// Sets the congestion control of data connections by name. Default: chosen by path.
    pub fn congestion_control(mut self, name: impl Into<String>) -> Builder {
        self.config.congestion_control = Some(name.into());
        self
    }

    /// Sets the size of each socket buffer of data connections, in bytes. Default: chosen by path.
    pub fn socket_buffer_bytes(mut self, bytes: usize) -> Builder {
        self.config.socket_buffer_bytes = Some(bytes);
        self
    }

    /// Sets the time within which the loss of a silent peer is reported, at least 3 s. The engine gives the peer
    /// up earlier by a tenth of this time, or by one second if that is less. Default: 10 s.
    pub fn peer_timeout(mut self, limit: Duration) -> Builder {
        self.config.peer_timeout = limit;
        self
    }

    /// Sets the transport of channels. Default: the kernel's TCP.
    pub fn transport(mut self, transport: Arc<dyn Transport>) -> Builder {
        self.transport = Some(transport);
        self
    }

    /// Moves payload over an NCCL net plugin. Headers and control messages go over the transport. Both ends
    /// of a session need the same plugin.
    pub fn plugin(mut self, plugin: PluginConfig) -> Builder {
        self.plugin = Some(plugin);
        self
    }

    /// Moves payload over a backend of another crate, such as devmem TCP. Headers and control messages go
    /// over the transport. Both ends of a session need the same backend, unless it is optional on both.
    pub fn payload_backend(mut self, backend: impl BackendConfig + 'static) -> Builder {
        self.backend = Some(Arc::new(backend));
        self
    }

    /// The environment variables with which the plugin would be loaded. A launcher sets them for a child
    /// process: some libraries of a plugin read their variables before any of its functions is called. Empty
    /// without a plugin.
    pub fn plugin_environment(&self) -> Result<Vec<Variable>> {
        let Some(plugin) = &self.plugin else {
            return Ok(Vec::new());
        };
        Ok(environment_for(plugin, &self.config, &self.nics_there()?))
    }

    /// Checks that all configured NICs exist and have addresses. [`Builder::build`] does not check, since a
    /// NIC may appear later.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the names of the available NICs.
    pub fn check_nics(&self) -> Result<()> {
        check_names(&self.config.nics, &self.nics_there()?)
    }

    fn nics_there(&self) -> Result<Vec<Nic>> {
        let nics = match &self.transport {
            Some(transport) => transport.nics(),
            None => TcpTransport::default().nics(),
        };
        nics.map_err(|error| Error::io("list NICs", &error))
    }

    /// Builds the endpoint: checks the settings, listens, and starts the threads.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unusable setting, [`Error::Io`] if the system refuses to listen or to start
    /// a thread; errors of the plugin or backend.
    pub fn build(mut self) -> Result<Endpoint> {
        // Threads inherit the affinity of the thread that starts them.
        match std::mem::take(&mut self.cores) {
            cores if cores.is_empty() => self.build_here(),
            cores => affinity::on_cores(&cores, || self.build_here())
                .map_err(|error| Error::io(format!("keep to the cores {cores:?}"), &error))?,
        }
    }

    fn build_here(mut self) -> Result<Endpoint> {
        if self.config.threads == usize::MAX {
            let cores = affinity::cores_with_time();
            self.config.threads = schedule::threads_default(cores);
        }
        let level_2 = &mut self.config.level_2_cache_bytes;
        *level_2 = level_2.or_else(affinity::level_2_cache_bytes);
        self.config.check()?;
        let transport: SharedTransport = self.transport.unwrap_or_else(|| Arc::new(TcpTransport::default()));
        let options = self.config.bulk_options();
        transport.check(&options).map_err(|error| Error::invalid("congestion control", error.to_string()))?;
        let nics = transport.nics().map_err(|error| Error::io("list NICs", &error))?;
        if let Some(required) = self.config.protection_required() {
            let why = "payload over a plugin or devmem TCP goes past the connections that can be protected";
            match (&self.plugin, &self.backend) {
                (None, None) => {}
                (None, Some(backend)) if backend.is_optional() => {
                    return Endpoint::start(self.config, transport, None, Some(format!("{required}: {why}")));
                }
                _ => return Err(Error::invalid(required, format!("{why}: use the tcp transport"))),
            }
        }
        let backend: SharedBackend = match (self.plugin, self.backend) {
            (None, None) => return Endpoint::start(self.config, transport, None, None),
            (Some(_), Some(backend)) => {
                let why = format!("payload goes over a plugin or over {}: choose one", backend.name());
                return Err(Error::invalid("transport", why));
            }
            // SAFETY: the creator of the configuration has promised it.
            (Some(plugin), None) => Arc::new(unsafe { plugin::Host::load(plugin, &self.config, &nics) }?),
            (None, Some(backend)) => match backend.open(&self.config, &nics) {
                Err(error) if backend.is_optional() => {
                    return Endpoint::start(self.config, transport, None, Some(error.to_string()));
                }
                opened => opened?,
            },
        };
        self.config.chunk_bytes = self.config.chunk_bytes.min(backend.message_bytes_max());
        if let Some(nics) = backend.nics() {
            self.config.nics = nics;
        }
        Endpoint::start(self.config, transport, Some(backend), None)
    }
}
