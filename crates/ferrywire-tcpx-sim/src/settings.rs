//! The plugin's environment: `NCCL_*` and `NCCL_GPUDIRECTTCPX_*`, read once, in `init`.
//!
//! Names and defaults are the real plugin's, the broken ones included. Variables that only tune cores, telemetry or the
//! dp-manager are not read.
//! Read next: `devices.rs`, which selects the NICs.

use std::time::Duration;

/// Most data sockets per comm, and most effective worker threads.
pub const DATA_SOCKETS_MAX: usize = 8;
/// Largest message that can be sent on the control socket, in bytes.
pub const INLINE_BYTES_MAX: usize = 2048;
/// Number of the only strategy of flow steering that `init` accepts.
const STRATEGY: i64 = 3;

/// The settings of the plugin, from its environment.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Size of a chunk in bytes; 0 if the variable is not set.
    pub chunk_bytes: usize,
    /// Number of worker threads per comm.
    pub threads: usize,
    /// Number of data sockets per comm.
    pub data_sockets: usize,
    /// Messages up to this size in bytes are sent on the control socket.
    pub inline_bytes: usize,
    /// Whether idle workers spin instead of sleeping.
    pub spin: bool,
    /// Whether GPU memory may be registered.
    pub dma_buf: bool,
    /// The user's list of interfaces.
    pub interfaces: Option<String>,
    /// Whether only IPv6 is wanted, which finds no interface here.
    pub ipv6_only: bool,
    /// The interface of the control sockets.
    pub control_interface: Option<String>,
    /// Time for which each accept sleeps, so that the flow rules take effect.
    pub steering_wait: Duration,
    /// Number of times that a flow rule is tried.
    pub connection_tries: u32,
    /// Whether the receiver announces each request.
    pub recv_sync: bool,
    /// Most chunks of one request that are scheduled per call.
    pub chunks_per_call_max: usize,
}

impl Settings {
    /// Reads the settings of this process; the error says why `init` fails.
    pub fn from_env() -> Result<Settings, String> {
        Settings::read(|name| std::env::var(name).ok())
    }

    fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<Settings, String> {
        let env = Env { lookup };
        if env.own_number("SOCKET_ENABLE", 1)? == 0 {
            return Err("switched off by NCCL_GPUDIRECTTCPX_SOCKET_ENABLE=0".into());
        }
        let strategy = env.own_number("FLOW_STEERING_STRATEGY", STRATEGY)?;
        if strategy != STRATEGY {
            return Err(format!("NCCL_GPUDIRECTTCPX_FLOW_STEERING_STRATEGY={strategy} cannot be used"));
        }
        let (threads, data_sockets) =
            counts(env.size("NCCL_SOCKET_NTHREADS", 1)?, env.size("NCCL_NSOCKS_PERTHREAD", 1)?);
        Ok(Settings {
            chunk_bytes: env.size("NCCL_DYNAMIC_CHUNK_SIZE", 0)?,
            threads,
            data_sockets,
            inline_bytes: env.size("NCCL_INLINE_THRESHOLD", 0)?.min(INLINE_BYTES_MAX),
            spin: env.number("NCCL_THREAD_SPIN_ENABLE", 0)? != 0,
            dma_buf: env.number("NCCL_USE_DMA_BUF", 1)? != 0,
            interfaces: env.own("SOCKET_IFNAME"),
            ipv6_only: env.own("SOCKET_FAMILY").as_deref() == Some("AF_INET6"),
            control_interface: env.own("CTRL_DEV"),
            steering_wait: Duration::from_micros(
                env.own_number("PROGRAM_FLOW_STEERING_WAIT_MICROS", 5_000_000)?.max(0) as u64,
            ),
            connection_tries: env.own_number("CONNECTION_RETRY", 3)?.clamp(1, 1000) as u32,
            recv_sync: env.own_number("RECV_SYNC", 0)? != 0,
            chunks_per_call_max: if env.own("SCHED_ALG").as_deref() == Some("KATY") { 2 } else { usize::MAX },
        })
    }
}

/// Numbers of threads and data sockets for the requested numbers: at most eight sockets; a request for more
/// than eight threads gives none.
fn counts(threads: usize, per_thread: usize) -> (usize, usize) {
    let fits = threads.saturating_mul(per_thread) <= DATA_SOCKETS_MAX;
    let per_thread = if fits { per_thread } else { DATA_SOCKETS_MAX / threads.max(1) };
    (threads.min(DATA_SOCKETS_MAX), threads.saturating_mul(per_thread))
}

/// The environment as a function, so that tests can replace it.
struct Env<F> {
    lookup: F,
}

impl<F: Fn(&str) -> Option<String>> Env<F> {
    fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name).filter(|text| !text.is_empty())
    }

    fn own(&self, name: &str) -> Option<String> {
        self.text(&format!("NCCL_GPUDIRECTTCPX_{name}"))
    }

    fn number(&self, name: &str, default: i64) -> Result<i64, String> {
        let Some(text) = self.text(name) else { return Ok(default) };
        text.trim().parse().map_err(|_| format!("{name}={text:?} is not a number"))
    }

    fn own_number(&self, name: &str, default: i64) -> Result<i64, String> {
        self.number(&format!("NCCL_GPUDIRECTTCPX_{name}"), default)
    }

    fn size(&self, name: &str, default: usize) -> Result<usize, String> {
        let value = self.number(name, default as i64)?;
        usize::try_from(value).map_err(|_| format!("{name}={value} is negative"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Settings, String> {
        Settings::read(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string()))
    }

    #[test]
    fn an_empty_environment_gives_chunks_of_nothing_and_five_seconds() {
        let settings = read(&[]).unwrap();
        assert_eq!(settings.chunk_bytes, 0);
        assert_eq!(settings.steering_wait, Duration::from_secs(5));
        assert_eq!((settings.threads, settings.data_sockets), (1, 1));
        assert!(settings.dma_buf && !settings.spin && !settings.recv_sync);
    }

    #[test]
    fn eight_sockets_are_shared_and_nine_threads_have_none() {
        assert_eq!(counts(2, 4), (2, 8));
        assert_eq!(counts(3, 3), (3, 6));
        assert_eq!(counts(8, 4), (8, 8));
        assert_eq!(counts(9, 1), (8, 0));
    }

    #[test]
    fn the_cause_of_a_failed_init_is_named() {
        assert!(read(&[("NCCL_GPUDIRECTTCPX_SOCKET_ENABLE", "0")]).unwrap_err().contains("SOCKET_ENABLE"));
        assert!(read(&[("NCCL_GPUDIRECTTCPX_FLOW_STEERING_STRATEGY", "1")]).is_err());
        assert!(read(&[("NCCL_DYNAMIC_CHUNK_SIZE", "512k")]).unwrap_err().contains("512k"));
    }

    #[test]
    fn the_inline_threshold_has_a_ceiling() {
        assert_eq!(read(&[("NCCL_INLINE_THRESHOLD", "100000")]).unwrap().inline_bytes, INLINE_BYTES_MAX);
    }
}
