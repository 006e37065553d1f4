//! Configuration of an NCCL net plugin.
//!
//! Invariant: a file is loaded only if the user names it. Read next: `host.rs`.

use crate::error::{Error, Result};
use ferrywire_memory::MemoryLocation;
use ferrywire_memory::unpack::UnpackMode;
use ferrywire_ncclnet::abi::Version;
use ferrywire_proto::limits;
use std::path::PathBuf;
use std::time::Duration;

/// Configuration of the NCCL net plugin that carries payload.
#[derive(Clone, Debug)]
pub struct PluginConfig {
    pub(super) file: File,
    pub(super) version: Option<Version>,
    pub(super) message_bytes_max: usize,
    pub(super) window: usize,
    pub(super) gpu: Option<MemoryLocation>,
    pub(super) unpack: UnpackMode,
    pub(crate) stall_timeout: Duration,
    pub(crate) setup_timeout: Duration,
    pub(super) allow_same_host_gpu: bool,
    pub(super) set_before: Vec<String>,
}

/// The file with the plugin's code.
#[derive(Clone, Debug)]
pub(super) enum File {
    Path(PathBuf),
    /// The file that NCCL would load for this name.
    Named(Option<String>),
}

impl PluginConfig {
    /// Uses the plugin in this file.
    ///
    /// # Safety
    /// Building an endpoint runs the file's code in this process, so the caller must trust it. Building also
    /// sets environment variables that the plugin reads. Until then, no other thread may read the environment
    /// except through the standard library.
    pub unsafe fn at(path: impl Into<PathBuf>) -> PluginConfig {
        PluginConfig::new(File::Path(path.into()))
    }

    /// Uses the plugin that NCCL (2.27 and later) would load for this value of `NCCL_NET_PLUGIN`; it loads none for an empty one.
    ///
    /// # Safety
    /// As for [`PluginConfig::at`].
    pub unsafe fn named(name: Option<&str>) -> PluginConfig {
        PluginConfig::new(File::Named(name.map(str::to_owned)))
    }

    fn new(file: File) -> PluginConfig {
        PluginConfig {
            file,
            version: None,
            message_bytes_max: limits::LANE_MESSAGE_BYTES_DEFAULT,
            window: limits::LANE_WINDOW_DEFAULT,
            gpu: None,
            unpack: UnpackMode::default(),
            stall_timeout: limits::LANE_STALL_TIMEOUT_DEFAULT,
            setup_timeout: limits::LANE_SETUP_TIMEOUT,
            allow_same_host_gpu: false,
            set_before: Vec::new(),
        }
    }

    /// Sets the version of the plugin interface. Default: the newest in the file.
    pub fn version(mut self, version: Version) -> PluginConfig {
        self.version = Some(version);
        self
    }

    /// Sets the largest message, and so the largest chunk, in bytes; equal at both ends. Default: 512 KiB, or
    /// `NCCL_DYNAMIC_CHUNK_SIZE`. A plugin that this process has loaded before keeps its earlier value as the
    /// maximum. Over GPUDirect-TCPX the maximum is 1 MiB: a message of 2,048 fragments ends the process.
    pub fn message_bytes_max(mut self, bytes: usize) -> PluginConfig {
        self.message_bytes_max = bytes;
        self
    }

    /// Sets the most requests posted per channel and direction; equal at both ends. Default: 16, which is the
    /// maximum for receives that a GPU gathers.
    pub fn window(mut self, requests: usize) -> PluginConfig {
        self.window = requests;
        self
    }

    /// Sets the GPU whose memory is moved besides host memory. It is current during every plugin call that
    /// concerns a GPU.
    pub fn gpu(mut self, gpu: MemoryLocation) -> PluginConfig {
        self.gpu = Some(gpu);
        self
    }

    /// Sets how fragmented receives are gathered. Default: by a GPU kernel.
    pub fn unpack(mut self, mode: UnpackMode) -> PluginConfig {
        self.unpack = mode;
        self
    }

    /// Sets the longest time without progress of a channel's oldest message, and the longest time of a plugin
    /// call. Default: 30 s.
    pub fn stall_timeout(mut self, limit: Duration) -> PluginConfig {
        self.stall_timeout = limit;
        self
    }

    /// Sets the longest time for the set-up of a channel's connections. Default: 60 s.
    pub fn setup_timeout(mut self, limit: Duration) -> PluginConfig {
        self.setup_timeout = limit;
        self
    }

    /// Allows GPU memory between two ends on one host over GPUDirect-TCPX, which ends the process if the
    /// traffic does not cross a NIC. For simulators and network namespaces.
    pub fn allow_same_host_gpu(mut self, allow: bool) -> PluginConfig {
        self.allow_same_host_gpu = allow;
        self
    }

    /// Names environment variables that ferrywire's parent process set for this one, from
    /// [`Builder::plugin_environment`](crate::Builder::plugin_environment). They are not reported as set by
    /// the user.
    pub fn set_before(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> PluginConfig {
        self.set_before = names.into_iter().map(Into::into).collect();
        self
    }

    /// Checks all settings.
    ///
    /// # Errors
    /// [`Error::Invalid`] for the first value that is out of range.
    pub(super) fn check(&self) -> Result<()> {
        let (least, most) = (limits::LANE_MESSAGE_BYTES_MIN, limits::CHUNK_BYTES_MAX);
        if !(least..=most).contains(&self.message_bytes_max) {
            let why = format!("{} is not between {least} and {most}", self.message_bytes_max);
            return Err(Error::invalid("message bytes of the plugin", why));
        }
        if !(1..=limits::LANE_WINDOW_MAX).contains(&self.window) {
            let why = format!("{} is not between 1 and {}", self.window, limits::LANE_WINDOW_MAX);
            return Err(Error::invalid("window of the plugin", why));
        }
        match self.gpu {
            Some(MemoryLocation::Host) => {
                Err(Error::invalid("GPU of the plugin", "host memory needs no GPU"))
            }
            _ => Ok(()),
        }
    }
}
