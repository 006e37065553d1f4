//! The plugin of this process: the result of `init`, from which comms are made.
//!
//! Everything is read once and cached, as in the real plugin: a variable set later has no effect.
//! Invariant: after a successful `init` the plugin never changes.
//! Read next: `listener.rs`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ferrywire_ncclnet::abi::ResultCode;

use crate::comm::{Comm, Outcome, Parts, Rules};
use crate::devices::{self, Device};
use crate::faults::{Direction, Faults};
use crate::gpu;
use crate::handshake::{Plan, Sockets};
use crate::log::{info, warning};
use crate::rate::Rate;
use crate::settings::Settings;
use crate::switches::{DpManager, EarlyPayload, SameHost, SecondInit, Switches};
use crate::worker::Shared;

static PLUGIN: OnceLock<Plugin> = OnceLock::new();
/// Chunk size in bytes if the switch for the real plugin's broken default is off.
const CHUNK_BYTES_GOOD: usize = 512 << 10;

/// The state of the plugin after `init`.
#[derive(Debug)]
pub struct Plugin {
    /// The switches of this process.
    pub switches: Arc<Switches>,
    /// The settings from the environment.
    pub settings: Settings,
    /// The NICs that the plugin offers.
    pub devices: Vec<Device>,
}

/// The switches, read at the first call; if they are invalid, the plugin refuses every call.
pub fn switches() -> Outcome<&'static Arc<Switches>> {
    static SWITCHES: OnceLock<Result<Arc<Switches>, String>> = OnceLock::new();
    let switches = SWITCHES.get_or_init(|| Switches::from_env().map(Arc::new));
    switches.as_ref().map_err(|why| refused(why))
}

/// `init`: reads the environment and lists the NICs; an error if it was called before.
pub fn init() -> Outcome<()> {
    if let Some(plugin) = PLUGIN.get() {
        let again = plugin.switches.second_init == SecondInit::Ok;
        return if again { Ok(()) } else { Err(refused("init was called before")) };
    }
    // The real plugin logs this line in every run.
    info!("NET/GPUDirectTCPX : unix client prefix {}", manager_folder());
    let plugin = Plugin::read().map_err(|why| {
        let code = refused(&why);
        // The real plugin logs the error's path through its source last, as information.
        info!("TCPXCHECK src/net_tcpx.cc:576 -> {}", code.0);
        code
    })?;
    info!(
        "simulated TCPX plugin: {} device(s), chunks of {} bytes, {} data socket(s) per comm",
        plugin.devices.len(),
        plugin.settings.chunk_bytes,
        plugin.settings.data_sockets
    );
    PLUGIN.set(plugin).map_err(|_| refused("init was called by two threads at once"))
}

/// Path of the folder with the dp-manager's sockets.
pub fn manager_folder() -> String {
    let folder = std::env::var("NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX").ok();
    folder.filter(|folder| !folder.is_empty()).unwrap_or_else(|| "/tmp".to_owned())
}

/// The plugin of this process; a call before a successful `init` is an internal error.
pub fn plugin() -> Outcome<&'static Plugin> {
    PLUGIN.get().ok_or_else(|| refused("a function was called before init"))
}

fn refused(why: &str) -> ResultCode {
    warning!("{why}");
    ResultCode::INTERNAL_ERROR
}

impl Plugin {
    fn read() -> Result<Plugin, String> {
        let switches = switches().map_err(|_| "the switches are invalid")?.clone();
        let mut settings = Settings::from_env()?;
        if !switches.chunk_env && settings.chunk_bytes == 0 {
            settings.chunk_bytes = CHUNK_BYTES_GOOD;
        }
        if switches.need_gpu && !gpu::is_there() {
            return Err("no GPU".into());
        }
        let devices = devices::find(&settings, switches.pci_path)?;
        Ok(Plugin { switches, settings, devices })
    }

    /// A device by its index; returns an error for an index beyond the last.
    pub fn device(&self, index: i32) -> Outcome<(usize, &Device)> {
        let found = usize::try_from(index).ok().and_then(|k| self.devices.get(k).map(|device| (k, device)));
        found.ok_or_else(|| refused(&format!("there is no device {index}")))
    }

    /// The settings of this end for the handshake.
    pub fn plan(&self) -> Plan {
        Plan {
            setup: Duration::from_millis(self.switches.setup_ms),
            tries: self.settings.connection_tries,
            no_rules: match self.switches.dp_manager {
                DpManager::On | DpManager::Gone | DpManager::Hang => None,
                DpManager::Off => Some("unix client connect() error: 2"),
                DpManager::Refuse => {
                    Some("Create FlowSteerRule Failed: proto { raw_bytes: \"No queue is free.\" }")
                }
            },
            steering_wait: self.settings.steering_wait,
            early_is_fatal: self.switches.early_payload == EarlyPayload::Die,
        }
    }

    /// Makes a comm over connected sockets.
    pub fn comm(&self, direction: Direction, device: usize, sockets: Sockets, threads: usize) -> Comm {
        // Comms are counted per direction, so that a comm's random numbers do not depend on which end is
        // ready first.
        static COMMS: [AtomicU64; 2] = [const { AtomicU64::new(1) }; 2];
        let id = COMMS[direction as usize].fetch_add(1, Ordering::Relaxed);
        let own = sockets.peer.is_some_and(devices::is_own);
        let (switches, settings) = (&self.switches, &self.settings);
        let nic = self.devices[device].name.to_string_lossy();
        let faults = Faults::of(switches, direction, &nic);
        let shared = Shared {
            id,
            direction,
            spin: settings.spin,
            rate: Rate::of(device, direction, faults.rate),
            faults,
            landing: None,
            linear: own && switches.same_host == SameHost::Die,
            host_warning: switches.host_warning,
            sigpipe: switches.sigpipe,
            seed: switches.seed,
            scatter: switches.scatter,
            fragment_bytes: switches.fragment_bytes as u32,
            dead: false.into(),
            bytes: AtomicU64::new(0),
            pages_taken: AtomicU64::new(0),
        };
        let rules = Rules {
            switches: switches.clone(),
            chunk_bytes: settings.chunk_bytes,
            inline_bytes: settings.inline_bytes,
            recv_sync: settings.recv_sync,
            chunks_per_call_max: settings.chunks_per_call_max,
        };
        let (control, data) = (sockets.control, sockets.data);
        Comm::new(Parts { control, data, threads, device, rules, shared })
    }
}
