//! Environment variables for plugins of the TCPX family: ferrywire sets those that the user has not set,
//! before it loads the plugin.
//!
//! These plugins read the variables once and keep the values. Some are required: without a chunk size TCPX
//! moves nothing and reports nothing. Other plugins ignore these names.
//!
//! Invariant: a variable that the user has set is not changed, and nothing is set after a plugin is loaded.
//! Read next: `host.rs`.

use std::env;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The origin of a variable's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetBy {
    /// The user set the variable before ferrywire read it.
    User,
    /// ferrywire set the variable.
    Ferrywire,
}

/// An environment variable that the plugin reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variable {
    /// Name of the variable.
    pub name: &'static str,
    /// Value of the variable.
    pub value: String,
    /// Origin of the value.
    pub set_by: SetBy,
}

/// The facts that determine the values of the plugin's variables.
pub(super) struct Facts {
    pub message_bytes_max: usize,
    /// Names of the NICs to use.
    pub nics: Vec<String>,
    pub cores: usize,
    /// Speed of the fastest NIC in Mbit/s, if known.
    pub speed_mbps: Option<u32>,
    /// Variables that ferrywire set before this process started.
    pub set_before: Vec<String>,
}

/// Variable with the names of the NICs that become the plugin's devices.
pub(super) const NICS: &str = "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME";
pub(super) const CHUNK_BYTES: &str = "NCCL_DYNAMIC_CHUNK_SIZE";
/// Variable that changes the wire format between two plugins, so both ends need the same value.
pub(super) const RECV_SYNC: &str = "NCCL_GPUDIRECTTCPX_RECV_SYNC";
/// Variable with the size in bytes up to which messages bypass the data sockets. For GPU memory such messages
/// are lost.
pub(super) const INLINE: &str = "NCCL_INLINE_THRESHOLD";
const THREADS: &str = "NCCL_SOCKET_NTHREADS";
/// Number of threads that leaves a connection without a data socket.
const SOCKETS_AND_ONE: u64 = 9;
/// Variables that are reported if the user has set them. ferrywire never sets them.
const SHOWN: [&str; 6] = [
    RECV_SYNC,
    INLINE,
    "NCCL_MIN_ZCOPY_SIZE",
    "NCCL_GPUDIRECTTCPX_CTRL_DEV",
    "NCCL_GPUDIRECTTCPX_TX_BINDINGS",
    "NCCL_GPUDIRECTTCPX_RX_BINDINGS",
];
/// Directory of the dp-manager's sockets, on machines that run it.
const DP_MANAGER: &str = "/run/tcpx";
/// Speed in Mbit/s from which a NIC needs several sockets per connection.
const FAST_MBPS: u32 = 100_000;

/// Values for variables that are not set.
fn wanted(facts: &Facts, exists: impl Fn(&Path) -> bool) -> Vec<(&'static str, String)> {
    // A comm has at most eight sockets, threads times sockets per thread; with more it has no data socket.
    let (threads, sockets) = match facts.speed_mbps {
        Some(speed) if speed >= FAST_MBPS && facts.cores >= 16 => (2, 2),
        _ => (1, 1),
    };
    let mut wanted = vec![
        (CHUNK_BYTES, facts.message_bytes_max.to_string()),
        (THREADS, threads.to_string()),
        ("NCCL_NSOCKS_PERTHREAD", sockets.to_string()),
        // Each accept waits 5 s by default; the flow rules take effect much earlier.
        ("NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS", "50000".to_owned()),
    ];
    if !facts.nics.is_empty() {
        // Without the equals sign, eth1 would also match eth10.
        wanted.push((NICS, format!("={}", facts.nics.join(","))));
    }
    if exists(Path::new(DP_MANAGER)) {
        wanted.push(("NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX", DP_MANAGER.to_owned()));
    }
    wanted
}

/// Decides all values without setting any.
pub(super) fn decide(
    facts: &Facts,
    get: impl Fn(&str) -> Option<String>,
    exists: impl Fn(&Path) -> bool,
) -> Vec<Variable> {
    let mut all = Vec::new();
    for (name, value) in wanted(facts, exists) {
        // The plugin treats an empty variable like a missing one.
        let set = get(name).filter(|value| !value.is_empty());
        let by_user = set.is_some() && !facts.set_before.iter().any(|before| before == name);
        let set_by = if by_user { SetBy::User } else { SetBy::Ferrywire };
        all.push(Variable { name, value: set.unwrap_or(value), set_by });
    }
    for name in SHOWN {
        all.extend(get(name).map(|value| Variable { name, value, set_by: SetBy::User }));
    }
    all
}

/// Why TCPX cannot work with these variables: the name and reason of one that the user must change.
pub(super) fn unusable(all: &[Variable], gpu: bool) -> Option<(&'static str, String)> {
    let threads = value(all, THREADS).and_then(|value| value.parse().ok());
    match (inline_bytes(all), threads) {
        (Err(value), _) => {
            Some((INLINE, format!("{value:?} is no number of bytes; give one, or leave it out")))
        }
        (Ok(1..), _) if gpu => Some((INLINE, "with GPU memory it must be 0, or not set".to_owned())),
        (_, Some(threads @ SOCKETS_AND_ONE..)) => {
            Some((THREADS, format!("{threads} threads leave no data socket; at most 8 are possible")))
        }
        _ => None,
    }
}

fn value<'a>(all: &'a [Variable], name: &str) -> Option<&'a str> {
    all.iter().find(|each| each.name == name).map(|each| each.value.trim()).filter(|value| !value.is_empty())
}

/// Bytes up to which messages bypass the data sockets; the text of the variable if it is not a number.
pub(super) fn inline_bytes(all: &[Variable]) -> Result<u32, &str> {
    value(all, INLINE).map_or(Ok(0), |value| value.parse().map_err(|_| value))
}

/// The environment that the plugins of this process have read, as far as it is known.
static SEEN: Mutex<Seen> = Mutex::new(Seen { ours: Vec::new(), loaded: None });

pub(super) struct Seen {
    /// Variables that ferrywire has set.
    ours: Vec<(&'static str, String)>,
    /// The variables at the time when a plugin was first loaded; it keeps their values.
    loaded: Option<Vec<Variable>>,
}

/// Locks the environment while variables are set and a plugin is loaded, so that no other endpoint changes
/// them meanwhile.
pub(super) fn seen() -> MutexGuard<'static, Seen> {
    SEEN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Seen {
    /// Decides all values for this process.
    pub fn decide(&self, facts: &Facts) -> Vec<Variable> {
        let users = |name: &str| {
            let value = env::var(name).ok()?;
            (!self.ours.iter().any(|(ours, set)| *ours == name && *set == value)).then_some(value)
        };
        self.loaded.clone().unwrap_or_else(|| decide(facts, users, Path::exists))
    }

    /// Sets missing variables, unless a plugin was loaded before. Returns all variables that the plugin will
    /// read.
    ///
    /// # Safety
    /// No other thread reads the environment except through the standard library.
    pub unsafe fn set(&mut self, facts: &Facts) -> Vec<Variable> {
        let all = self.decide(facts);
        if self.is_loaded() {
            return all;
        }
        for Variable { name, value, .. } in all.iter().filter(|each| each.set_by == SetBy::Ferrywire) {
            if env::var(name).as_ref() != Ok(value) {
                // SAFETY: promised by the caller of this function.
                unsafe { env::set_var(name, value) };
            }
            self.ours.push((name, value.clone()));
        }
        all
    }

    /// Whether a plugin has read the environment.
    pub fn is_loaded(&self) -> bool {
        self.loaded.is_some()
    }

    /// Notes the variables with which a plugin was loaded.
    pub fn note_loaded(&mut self, all: &[Variable]) {
        self.loaded.get_or_insert_with(|| all.to_vec());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(nics: &[&str], speed_mbps: Option<u32>) -> Facts {
        let nics = nics.iter().map(|nic| (*nic).to_owned()).collect();
        Facts { message_bytes_max: 524_288, nics, cores: 104, speed_mbps, set_before: Vec::new() }
    }

    fn value_of(all: &[Variable], name: &str) -> Option<(String, SetBy)> {
        all.iter().find(|each| each.name.ends_with(name)).map(|each| (each.value.clone(), each.set_by))
    }

    #[test]
    fn variables_of_the_user_stay() {
        let user = |name: &str| (name == CHUNK_BYTES || name == RECV_SYNC).then(|| "1048576".to_owned());
        let all = decide(&facts(&["eth1", "eth2"], Some(200_000)), user, |_| true);
        assert_eq!(value_of(&all, CHUNK_BYTES), Some(("1048576".into(), SetBy::User)));
        assert_eq!(value_of(&all, "SOCKET_IFNAME"), Some(("=eth1,eth2".into(), SetBy::Ferrywire)));
        assert_eq!(value_of(&all, "UNIX_CLIENT_PREFIX"), Some(("/run/tcpx".into(), SetBy::Ferrywire)));
        assert_eq!(value_of(&all, "RECV_SYNC"), Some(("1048576".into(), SetBy::User)));
    }

    #[test]
    fn an_empty_variable_counts_as_missing() {
        let all = decide(&facts(&[], None), |_| Some(String::new()), |_| false);
        assert_eq!(value_of(&all, CHUNK_BYTES), Some(("524288".into(), SetBy::Ferrywire)));
        assert_eq!(value_of(&all, "SOCKET_IFNAME"), None);
    }

    #[test]
    fn variables_that_ferrywire_set_are_not_reported_as_the_users() {
        let set_before = vec![CHUNK_BYTES.to_owned()];
        let all = decide(&Facts { set_before, ..facts(&[], None) }, |_| Some("7".into()), |_| false);
        assert_eq!(value_of(&all, CHUNK_BYTES), Some(("7".into(), SetBy::Ferrywire)));
        assert_eq!(value_of(&all, "NTHREADS"), Some(("7".into(), SetBy::User)));
    }

    #[test]
    fn a_threshold_is_a_number_or_not_there() {
        let set = |value: &str| [Variable { name: INLINE, value: value.into(), set_by: SetBy::User }];
        assert_eq!([inline_bytes(&[]), inline_bytes(&set(" ")), inline_bytes(&set("00"))], [Ok(0); 3]);
        assert_eq!(inline_bytes(&set("1024 ")), Ok(1024));
        for value in ["1K", "-1", "0x0"] {
            assert_eq!(inline_bytes(&set(value)), Err(value));
            assert!(unusable(&set(value), false).is_some(), "{value}");
        }
        assert!(unusable(&set("1024"), true).is_some() && unusable(&set("1024"), false).is_none());
    }

    #[test]
    fn never_more_than_eight_sockets() {
        for speed in [None, Some(10_000), Some(400_000)] {
            let all = decide(&facts(&["eth1"], speed), |_| None, |_| false);
            let number = |name: &str| value_of(&all, name).unwrap().0.parse::<usize>().unwrap();
            assert!(number("NTHREADS") * number("NSOCKS_PERTHREAD") <= 8);
        }
    }
}
