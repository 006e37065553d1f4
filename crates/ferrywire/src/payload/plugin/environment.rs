//! The environment that a plugin of the TCPX family reads: set before it is loaded, where the user has not.
//!
//! Such plugins read it once and keep it, and some of it is not optional: without a chunk size TCPX moves
//! nothing, and says nothing. Other plugins do not look at these names.
//!
//! Invariant: a variable that the user set stays as it is, and once a plugin is loaded nothing is set any more.

use std::env;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Who gave a variable its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetBy {
    /// It was there before.
    User,
    /// ferrywire set it.
    Ferrywire,
}

/// A variable that the plugin sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// Its value.
    pub value: String,
    /// Who gave it.
    pub set_by: SetBy,
}

/// What the values follow from.
pub(super) struct Facts {
    pub message_bytes_max: usize,
    /// NICs to use, by name.
    pub nics: Vec<String>,
    pub cores: usize,
    /// Mbit/s of the fastest of them, where one tells.
    pub speed_mbps: Option<u32>,
    /// Variables that ferrywire set before this process started.
    pub set_before: Vec<String>,
}

/// The NICs that are to be its devices.
pub(super) const NICS: &str = "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME";
pub(super) const CHUNK_BYTES: &str = "NCCL_DYNAMIC_CHUNK_SIZE";
/// Changes what travels on the wire between two plugins, so both ends need the same.
pub(super) const RECV_SYNC: &str = "NCCL_GPUDIRECTTCPX_RECV_SYNC";
/// Messages up to so many bytes travel beside the data sockets; those into GPU memory then arrive nowhere.
pub(super) const INLINE: &str = "NCCL_INLINE_THRESHOLD";
const THREADS: &str = "NCCL_SOCKET_NTHREADS";
/// More than a connection has sockets.
const SOCKETS_AND_ONE: u64 = 9;
/// Variables that are shown where the user has set them, though ferrywire never does.
const SHOWN: [&str; 6] = [
    RECV_SYNC,
    INLINE,
    "NCCL_MIN_ZCOPY_SIZE",
    "NCCL_GPUDIRECTTCPX_CTRL_DEV",
    "NCCL_GPUDIRECTTCPX_TX_BINDINGS",
    "NCCL_GPUDIRECTTCPX_RX_BINDINGS",
];
/// Where the dp-manager's sockets are on machines that have one.
const DP_MANAGER: &str = "/run/tcpx";
/// A NIC of this speed needs several sockets per connection.
const FAST_MBPS: u32 = 100_000;

/// Values for what may be missing.
fn wanted(facts: &Facts, exists: impl Fn(&Path) -> bool) -> Vec<(&'static str, String)> {
    // At most eight sockets per comm, threads times sockets: more leave none.
    let (threads, sockets) = match facts.speed_mbps {
        Some(speed) if speed >= FAST_MBPS && facts.cores >= 16 => (2, 2),
        _ => (1, 1),
    };
    let mut wanted = vec![
        (CHUNK_BYTES, facts.message_bytes_max.to_string()),
        (THREADS, threads.to_string()),
        ("NCCL_NSOCKS_PERTHREAD", sockets.to_string()),
        // The default is 5 s in each accept; rules are in force much sooner.
        ("NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS", "50000".to_owned()),
    ];
    if !facts.nics.is_empty() {
        // Without the sign, eth1 would mean eth10 too.
        wanted.push((NICS, format!("={}", facts.nics.join(","))));
    }
    if exists(Path::new(DP_MANAGER)) {
        wanted.push(("NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX", DP_MANAGER.to_owned()));
    }
    wanted
}

/// Decides, without setting anything.
pub(super) fn decide(
    facts: &Facts,
    get: impl Fn(&str) -> Option<String>,
    exists: impl Fn(&Path) -> bool,
) -> Vec<Variable> {
    let mut all = Vec::new();
    for (name, value) in wanted(facts, exists) {
        // An empty one is as good as none to those who read it.
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

/// Why TCPX cannot work with this environment, which the user must change.
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

/// Bytes up to which messages travel beside the data sockets; what is set where that is no number.
pub(super) fn inline_bytes(all: &[Variable]) -> Result<u32, &str> {
    value(all, INLINE).map_or(Ok(0), |value| value.parse().map_err(|_| value))
}

/// What plugins of this process see of its environment, as far as it is known here.
static SEEN: Mutex<Seen> = Mutex::new(Seen { ours: Vec::new(), loaded: None });

pub(super) struct Seen {
    /// What ferrywire has set.
    ours: Vec<(&'static str, String)>,
    /// What was there when a plugin was first loaded, which keeps it.
    loaded: Option<Vec<Variable>>,
}

/// Held by whoever sets variables and loads a plugin, so that another does not set some while it reads.
pub(super) fn seen() -> MutexGuard<'static, Seen> {
    SEEN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Seen {
    /// Decides for this process.
    pub fn decide(&self, facts: &Facts) -> Vec<Variable> {
        let users = |name: &str| {
            let value = env::var(name).ok()?;
            (!self.ours.iter().any(|(ours, set)| *ours == name && *set == value)).then_some(value)
        };
        self.loaded.clone().unwrap_or_else(|| decide(facts, users, Path::exists))
    }

    /// Sets what is missing, unless a plugin was loaded before; returns all that the plugin will see.
    ///
    /// # Safety
    /// No other thread reads the environment in another way than through the standard library.
    pub unsafe fn set(&mut self, facts: &Facts) -> Vec<Variable> {
        let all = self.decide(facts);
        if self.is_loaded() {
            return all;
        }
        for Variable { name, value, .. } in all.iter().filter(|each| each.set_by == SetBy::Ferrywire) {
            if env::var(name).as_ref() != Ok(value) {
                // SAFETY: by the caller's promise.
                unsafe { env::set_var(name, value) };
            }
            self.ours.push((name, value.clone()));
        }
        all
    }

    /// Whether a plugin has read its environment.
    pub fn is_loaded(&self) -> bool {
        self.loaded.is_some()
    }

    /// One was loaded with this.
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

    fn told(all: &[Variable], name: &str) -> Option<(String, SetBy)> {
        all.iter().find(|each| each.name.ends_with(name)).map(|each| (each.value.clone(), each.set_by))
    }

    #[test]
    fn what_is_missing_is_set_and_what_the_user_set_stays() {
        let user = |name: &str| (name == CHUNK_BYTES || name == RECV_SYNC).then(|| "1048576".to_owned());
        let all = decide(&facts(&["eth1", "eth2"], Some(200_000)), user, |_| true);
        assert_eq!(told(&all, CHUNK_BYTES), Some(("1048576".into(), SetBy::User)));
        assert_eq!(told(&all, "SOCKET_IFNAME"), Some(("=eth1,eth2".into(), SetBy::Ferrywire)));
        assert_eq!(told(&all, "UNIX_CLIENT_PREFIX"), Some(("/run/tcpx".into(), SetBy::Ferrywire)));
        assert_eq!(told(&all, "RECV_SYNC"), Some(("1048576".into(), SetBy::User)));
    }

    #[test]
    fn an_empty_variable_counts_as_missing() {
        let all = decide(&facts(&[], None), |_| Some(String::new()), |_| false);
        assert_eq!(told(&all, CHUNK_BYTES), Some(("524288".into(), SetBy::Ferrywire)));
        assert_eq!(told(&all, "SOCKET_IFNAME"), None);
    }

    #[test]
    fn what_ferrywire_set_before_the_start_is_not_told_as_the_users() {
        let set_before = vec![CHUNK_BYTES.to_owned()];
        let all = decide(&Facts { set_before, ..facts(&[], None) }, |_| Some("7".into()), |_| false);
        assert_eq!(told(&all, CHUNK_BYTES), Some(("7".into(), SetBy::Ferrywire)));
        assert_eq!(told(&all, "NTHREADS"), Some(("7".into(), SetBy::User)));
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
            let number = |name: &str| told(&all, name).unwrap().0.parse::<usize>().unwrap();
            assert!(number("NTHREADS") * number("NSOCKS_PERTHREAD") <= 8);
        }
    }
}
