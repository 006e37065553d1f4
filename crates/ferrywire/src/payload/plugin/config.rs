//! What a user says about the plugin to use.

use crate::error::{Error, Result};
use ferrywire_memory::MemoryLocation;
use ferrywire_memory::unpack::UnpackMode;
use ferrywire_ncclnet::abi::Version;
use ferrywire_proto::limits;
use std::path::PathBuf;
use std::time::Duration;

/// Which plugin carries payload, and how it is used.
#[derive(Clone, Debug)]
pub struct PluginConfig {
    pub(super) file: File,
    pub(super) version: Option<Version>,
    pub(super) message_bytes_max: usize,
    pub(super) window: usize,
    pub(super) gpu: Option<MemoryLocation>,
    pub(super) unpack: UnpackMode,
    pub(crate) stall_limit: Duration,
    pub(crate) setup_limit: Duration,
    pub(super) allow_same_host_gpu: bool,
    pub(super) set_before: Vec<String>,
}

/// Where its code is.
#[derive(Clone, Debug)]
pub(super) enum File {
    Path(PathBuf),
    /// As NCCL would find it.
    Named(Option<String>),
}

impl PluginConfig {
    /// The plugin in this file.
    ///
    /// # Safety
    /// Building an endpoint with it runs the file's code in this process: the caller trusts it. It also sets
    /// variables of the environment that the plugin reads, so until then no other thread may be reading the
    /// environment in another way than through the standard library.
    pub unsafe fn at(path: impl Into<PathBuf>) -> PluginConfig {
        PluginConfig::new(File::Path(path.into()))
    }

    /// The plugin that NCCL would load for this value of `NCCL_NET_PLUGIN`.
    ///
    /// # Safety
    /// As [`PluginConfig::at`].
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
            stall_limit: limits::LANE_STALL_LIMIT_DEFAULT,
            setup_limit: limits::LANE_SETUP_TIMEOUT,
            allow_same_host_gpu: false,
            set_before: Vec::new(),
        }
    }

    /// Uses this version of the interface. Default: the newest that the file has.
    pub fn version(mut self, version: Version) -> PluginConfig {
        self.version = Some(version);
        self
    }

    /// Largest message, and so the largest chunk, in bytes. The same at both ends. Default: 512 KiB, or what
    /// `NCCL_DYNAMIC_CHUNK_SIZE` says. No more than a plugin was loaded with that this process has already, and over
    /// GPUDirect-TCPX no more than 1 MiB, whatever both say: of 2,048 fragments in a message it ends the process.
    pub fn message_bytes_max(mut self, bytes: usize) -> PluginConfig {
        self.message_bytes_max = bytes;
        self
    }

    /// Requests posted per channel and direction at most. The same at both ends. Default: 16, which are the most receives
    /// where fragments are gathered by a GPU.
    pub fn window(mut self, requests: usize) -> PluginConfig {
        self.window = requests;
        self
    }

    /// The GPU whose memory is moved, beside host memory. It is made current for every call that a plugin
    /// ties to a GPU.
    pub fn gpu(mut self, gpu: MemoryLocation) -> PluginConfig {
        self.gpu = Some(gpu);
        self
    }

    /// How receives are gathered that arrive in fragments. Default: by a kernel of the GPU.
    pub fn unpack(mut self, mode: UnpackMode) -> PluginConfig {
        self.unpack = mode;
        self
    }

    /// Longest that the oldest message of a channel may stand still, and that a call may take. Default: 30 s.
    pub fn stall_limit(mut self, limit: Duration) -> PluginConfig {
        self.stall_limit = limit;
        self
    }

    /// Longest that the connections of a channel may take to come about. Default: 60 s.
    pub fn setup_limit(mut self, limit: Duration) -> PluginConfig {
        self.setup_limit = limit;
        self
    }

    /// Allows GPU memory between two ends on one host over GPUDirect-TCPX, which ends the process there: the
    /// traffic never crosses a NIC. For simulators and network namespaces.
    pub fn allow_same_host_gpu(mut self, allow: bool) -> PluginConfig {
        self.allow_same_host_gpu = allow;
        self
    }

    /// Names of variables that ferrywire set in the environment of this process before it started, as
    /// [`Builder::plugin_environment`](crate::Builder::plugin_environment) of its parent said: they are not
    /// told as the user's.
    pub fn set_before(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> PluginConfig {
        self.set_before = names.into_iter().map(Into::into).collect();
        self
    }

    /// Refuses values that cannot work.
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
