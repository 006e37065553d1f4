//! The choice of what carries payload: transport, plugin and devmem.
//!
//! Invariant: a plugin's file is named only by this end's user, never by a peer.
//! Read next: [`crate::plan`], the caller; [`crate::bench::isolated`], where a plugin runs.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ferrywire::{MemoryLocation, PluginConfig, limits};
use ferrywire_devmem::DevmemConfig;
use ferrywire_memory::unpack::UnpackMode;

use crate::args::{ConnectFlags, ServeFlags, Transport, Unpack, Verify};
use crate::auto::Given;
use crate::exit::{Failure, Outcome};
use crate::memory::Memory;
use crate::units::Bytes;

/// A plugin, with its options.
#[derive(Clone, Debug)]
pub struct PluginUse {
    pub path: PathBuf,
    /// Longest message in bytes, if it is not the default.
    pub message_bytes_max: Option<usize>,
    /// Requests posted per channel, if it is not the default.
    pub window: Option<usize>,
    /// The GPU whose memory is moved, besides host memory.
    pub gpu: Option<MemoryLocation>,
    /// How scattered receives are gathered; `None` for a kernel.
    pub unpack: Option<Unpack>,
    /// Whether GPU memory may be moved within one host.
    pub allow_same_host_gpu: bool,
    /// Longest time for one call of the plugin.
    pub call_limit: Duration,
    /// Variables that the supervising process has set.
    pub set_before: Vec<String>,
}

impl PluginUse {
    /// The engine's configuration. Building an endpoint with it loads the file.
    pub fn config(&self) -> PluginConfig {
        // SAFETY: the user named the file, and the help says that only trusted files may be named. Processes that build
        // an endpoint with it have no thread yet that reads the environment.
        let config = unsafe { PluginConfig::at(&self.path) };
        let mut config = config
            .allow_same_host_gpu(self.allow_same_host_gpu)
            .stall_timeout(self.stall_timeout())
            .setup_timeout(self.setup_timeout())
            .set_before(self.set_before.iter().cloned());
        if let Some(bytes) = self.message_bytes_max {
            config = config.message_bytes_max(bytes);
        }
        if let Some(requests) = self.window {
            config = config.window(requests);
        }
        if let Some(unpack) = self.unpack {
            config = config.unpack(mode(unpack));
        }
        match self.gpu {
            Some(location) => config.gpu(location),
            None => config,
        }
    }

    /// Longest time without progress of a message or call. Shorter than the run's timeout, so that the engine's more
    /// precise error comes first.
    fn stall_timeout(&self) -> Duration {
        self.call_limit / 2
    }

    /// Longest time for setting up connections. Shorter than the run's timeout for a peer, so that the engine's more
    /// precise error comes first.
    fn setup_timeout(&self) -> Duration {
        (self.call_limit / 4 * 3).min(limits::LANE_SETUP_TIMEOUT)
    }

    /// The options that the other end needs too, as they are typed.
    pub fn as_options(&self) -> String {
        let mut options = format!(" --plugin {}", self.path.display());
        if let Some(bytes) = self.message_bytes_max {
            options += &format!(" --chunk {}", Bytes(bytes as u64));
        }
        if let Some(requests) = self.window {
            options += &format!(" --window {requests}");
        }
        if let (Some(unpack), Some(_)) = (self.unpack, self.gpu) {
            options += &format!(" --unpack {unpack:?}").to_lowercase();
        }
        options
    }

    /// How scattered receives are gathered.
    pub fn unpack(&self) -> Unpack {
        self.unpack.unwrap_or(Unpack::Kernel)
    }

    /// Most requests posted per channel.
    pub fn window(&self) -> usize {
        self.window.unwrap_or(limits::LANE_WINDOW_DEFAULT)
    }
}

/// Devmem TCP, with its options.
#[derive(Clone, Debug)]
pub struct DevmemUse {
    /// The GPU whose memory is moved, besides host memory.
    pub gpu: Option<MemoryLocation>,
    /// How scattered receives are gathered; `None` for a kernel.
    pub unpack: Option<Unpack>,
    /// Longest message in bytes, if it is not the default.
    pub message_bytes_max: Option<usize>,
    /// Messages in flight per channel, if it is not the default.
    pub window: Option<usize>,
    /// Whether settings of NICs may be changed.
    pub allow_nic_setup: bool,
    /// Whether the run fails without devmem.
    pub required: bool,
    /// Longest time for one call; half of it is the longest time without progress.
    pub call_limit: Duration,
}

impl DevmemUse {
    /// The value of `--transport`.
    pub fn asked_for(&self) -> &'static str {
        if self.required { "devmem" } else { "auto" }
    }

    /// The engine's configuration.
    pub fn config(&self) -> DevmemConfig {
        let mut config = DevmemConfig::default()
            .allow_nic_setup(self.allow_nic_setup)
            .stall_timeout(self.call_limit / 2)
            .unpack(self.unpack.map_or_else(UnpackMode::default, mode));
        if let Some(bytes) = self.message_bytes_max {
            config = config.message_bytes_max(bytes);
        }
        if let Some(messages) = self.window {
            config = config.window(messages);
        }
        if let Some(gpu) = self.gpu {
            config = config.gpu(gpu);
        }
        if self.required { config } else { config.optional() }
    }
}

/// Chooses for `connect` whether to use or try devmem, which does not work over loopback. It is tried only if
/// memory of a GPU is named or the default at either end: host memory gains nothing.
pub fn devmem_for_connect(
    flags: &ConnectFlags,
    beyond: bool,
    call_limit: Duration,
) -> Outcome<Option<DevmemUse>> {
    let typed = Memory::typed("--memory", flags.memory.given_ref().map(String::as_str))?;
    let memory = typed.unwrap_or(Memory::Host);
    let peer_memory = Memory::typed("--peer-memory", flags.peer_memory.given_ref().map(String::as_str))?;
    // Ranks and --gpus choose a GPU each, and name none here.
    let on_gpus = || {
        peer_memory.is_some_and(|memory| memory != Memory::Host)
            || typed.unwrap_or_else(|| Memory::detect(None)) != Memory::Host
    };
    let required = match (flags.transport.unwrap_or(Transport::Auto), &flags.plugin) {
        (Transport::Devmem, _) => true,
        (Transport::Auto, None) if beyond && on_gpus() => false,
        _ => return Ok(None),
    };
    if flags.unpack == Some(Unpack::None) && flags.verify != Some(Verify::Off) {
        return usage("--unpack none leaves the data in fragments: it needs --verify off");
    }
    if required && flags.crc == Some(true) && memory != Memory::Host {
        return usage("--crc over devmem needs host memory on both ends: leave it out with memory of a GPU");
    }
    Ok(Some(DevmemUse {
        gpu: memory.gpu(),
        unpack: flags.unpack,
        message_bytes_max: message_bytes_max(flags.chunk.given_ref().map(|chunk| chunk.0))?,
        window: window(flags.window.given_ref().copied().filter(|_| required))?,
        allow_nic_setup: flags.allow_nic_setup.unwrap_or(false),
        required,
        call_limit,
    }))
}

/// Chooses for `serve` whether to use or try devmem, which is tried only for memory of a GPU. The GPU must be named,
/// because its memory is bound before a peer asks for any.
pub fn devmem_for_serve(
    flags: &ServeFlags,
    listen: SocketAddr,
    call_limit: Duration,
) -> Outcome<Option<DevmemUse>> {
    let memory = Memory::typed("--memory", flags.memory.given_ref().map(String::as_str))?;
    let required = match (flags.transport.unwrap_or(Transport::Auto), &flags.plugin) {
        (Transport::Devmem, Some(_)) => {
            return usage("--plugin and --transport devmem exclude each other: leave one of them out");
        }
        (Transport::Devmem, None) => true,
        (Transport::Plugin, None) => return usage("--transport plugin needs --plugin PATH"),
        (Transport::Tcp, Some(_)) => {
            return usage("--plugin and --transport tcp exclude each other: leave one of them out");
        }
        (Transport::Sim, _) => return usage("--transport must be auto, tcp, plugin or devmem"),
        (Transport::Auto, None) if !listen.ip().is_loopback() => false,
        _ => return Ok(None),
    };
    if !required && memory.and_then(Memory::gpu).is_none() {
        let of_host = Memory::detect(None);
        if memory.is_none() && of_host != Memory::Host {
            tracing::info!(
                "devmem is not used: it needs --memory {of_host}, which names the GPU whose memory the NICs access"
            );
        }
        return Ok(None);
    }
    Ok(Some(DevmemUse {
        gpu: memory.and_then(Memory::gpu),
        unpack: flags.unpack,
        message_bytes_max: message_bytes_max(flags.chunk.given_ref().map(|chunk| chunk.0))?,
        window: window(flags.window.given_ref().copied().filter(|_| required))?,
        allow_nic_setup: flags.allow_nic_setup.unwrap_or(false),
        required,
        call_limit,
    }))
}

/// Chooses the plugin for `connect`, if there is one.
pub fn for_connect(flags: &ConnectFlags, call_limit: Duration) -> Outcome<Option<PluginUse>> {
    // By default a plugin moves host memory, because not every plugin can move GPU memory.
    let memory =
        Memory::typed("--memory", flags.memory.given_ref().map(String::as_str))?.unwrap_or(Memory::Host);
    let peer_memory = Memory::typed("--peer-memory", flags.peer_memory.given_ref().map(String::as_str))?
        .unwrap_or(Memory::Host);
    let path = match (flags.transport.unwrap_or(Transport::Auto), &flags.plugin) {
        (Transport::Auto | Transport::Plugin, Some(path)) => path,
        (Transport::Plugin, None) => {
            return usage("--transport plugin needs --plugin PATH, at both ends");
        }
        (Transport::Tcp, Some(_)) => {
            return usage("--plugin and --transport tcp exclude each other: leave one of them out");
        }
        (Transport::Devmem, Some(_)) => {
            return usage("--plugin and --transport devmem exclude each other: leave one of them out");
        }
        (Transport::Sim, _) => {
            return usage("--transport must be auto, tcp, plugin or devmem");
        }
        (Transport::Auto | Transport::Tcp | Transport::Devmem, None) => {
            let devmem = flags.transport == Some(Transport::Devmem);
            refuse_without_plugin(&[
                (UNPACK, flags.unpack.is_some() && !devmem),
                (SAME_HOST, flags.allow_same_host_gpu == Some(true)),
            ])?;
            return Ok(None);
        }
    };
    let verified = flags.verify != Some(Verify::Off);
    if flags.unpack == Some(Unpack::None) && verified {
        return usage("--unpack none leaves the data in fragments: it needs --verify off");
    }
    if flags.crc == Some(true) && (memory, peer_memory) != (Memory::Host, Memory::Host) {
        return usage(
            "--crc over a plugin needs host memory on both ends: leave it out with memory of a GPU",
        );
    }
    Ok(Some(PluginUse {
        path: existing(path)?,
        message_bytes_max: message_bytes_max(flags.chunk.given_ref().map(|chunk| chunk.0))?,
        window: window(flags.window.given_ref().copied())?,
        gpu: memory.gpu(),
        unpack: flags.unpack,
        allow_same_host_gpu: flags.allow_same_host_gpu.unwrap_or(false),
        call_limit,
        set_before: Vec::new(),
    }))
}

/// Chooses the plugin for `serve`, if there is one.
pub fn for_serve(flags: &ServeFlags, call_limit: Duration) -> Outcome<Option<PluginUse>> {
    let memory = Memory::typed("--memory", flags.memory.given_ref().map(String::as_str))?;
    let Some(path) = &flags.plugin else {
        let devmem = flags.transport == Some(Transport::Devmem);
        refuse_without_plugin(&[
            (UNPACK, flags.unpack.is_some() && !devmem),
            (SAME_HOST, flags.allow_same_host_gpu == Some(true)),
        ])?;
        // Chunk and window may be set in a file or the environment for both ends; over TCP the peer's values count.
        return Ok(None);
    };
    Ok(Some(PluginUse {
        path: existing(path)?,
        message_bytes_max: message_bytes_max(flags.chunk.given_ref().map(|chunk| chunk.0))?,
        window: window(flags.window.given_ref().copied())?,
        gpu: memory.and_then(Memory::gpu),
        unpack: flags.unpack,
        allow_same_host_gpu: flags.allow_same_host_gpu.unwrap_or(false),
        call_limit,
        set_before: Vec::new(),
    }))
}

fn mode(unpack: Unpack) -> UnpackMode {
    match unpack {
        Unpack::Kernel => UnpackMode::Kernel,
        Unpack::Copy => UnpackMode::Copy,
        Unpack::Host => UnpackMode::Host,
        Unpack::None => UnpackMode::None,
    }
}

/// The error for --unpack without a plugin or devmem.
const UNPACK: &str =
    "--unpack belongs to a plugin or to devmem: add --plugin PATH or --transport devmem, or leave it out";
const SAME_HOST: &str = "--allow-same-host-gpu belongs to a plugin: add --plugin PATH, or leave it out";

fn refuse_without_plugin(given: &[(&str, bool)]) -> Outcome {
    match given.iter().find(|(_, given)| *given) {
        Some((why, _)) => usage(*why),
        None => Ok(()),
    }
}

/// The absolute path, for processes with another working directory.
fn existing(path: &Path) -> Outcome<PathBuf> {
    let why = match path.metadata() {
        Ok(found) if found.is_dir() => "this is a directory; name the plugin's file in it".to_owned(),
        Ok(_) => return std::path::absolute(path).map_err(|error| Failure::failed(error.to_string())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => "there is no such file".to_owned(),
        Err(error) => error.to_string(),
    };
    usage(format!("--plugin {}: {why}", path.display()))
}

/// A chunk size above the default needs longer messages, which both ends must set; a smaller one does not.
fn message_bytes_max(chunk_bytes: Option<u64>) -> Outcome<Option<usize>> {
    let most = limits::CHUNK_BYTES_MAX as u64;
    match chunk_bytes {
        Some(bytes) if bytes > most => {
            usage(format!("--chunk must be at most {1} (got {0})", Bytes(bytes), Bytes(most)))
        }
        Some(bytes) if bytes > limits::LANE_MESSAGE_BYTES_DEFAULT as u64 => Ok(Some(bytes as usize)),
        _ => Ok(None),
    }
}

fn window(window: Option<usize>) -> Outcome<Option<usize>> {
    let most = limits::LANE_WINDOW_MAX;
    match window {
        Some(requests) if !(1..=most).contains(&requests) => {
            usage(format!("--window must be between 1 and {most} over a plugin (got {requests})"))
        }
        other => Ok(other),
    }
}

fn usage<T>(message: impl Into<String>) -> Outcome<T> {
    Err(Failure::Usage(message.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_plugin_is_chosen_and_one_that_is_missing_refused() {
        let choose = |transport, plugin: Option<&str>| {
            let flags = ConnectFlags { transport, plugin: plugin.map(PathBuf::from), ..Default::default() };
            for_connect(&flags, Duration::from_secs(1)).map(|plugin| plugin.is_some())
        };
        let here = std::env::current_exe().expect("a file");
        let here = here.to_str();
        assert_eq!(choose(None, None), Ok(false));
        assert_eq!(choose(None, here), Ok(true));
        assert_eq!(choose(Some(Transport::Plugin), here), Ok(true));
        assert!(matches!(choose(Some(Transport::Plugin), None), Err(Failure::Usage(_))));
        assert!(matches!(choose(Some(Transport::Tcp), here), Err(Failure::Usage(_))));
        assert!(matches!(choose(None, Some("/nonexistent.so")), Err(Failure::Usage(_))));
    }
}
