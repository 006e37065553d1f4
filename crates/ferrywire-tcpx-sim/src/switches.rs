//! The switches of `FERRYWIRE_TCPX_SIM`: every quirk, limit and injected fault of the plugin.
//!
//! One list makes the structure, its defaults, its parser and the names that the crate's table must show. Defaults are
//! the real plugin's behaviour. An unknown name or value is an error, so a test with a misspelt switch cannot pass by
//! accident.
//! Read next: `faults.rs`, which injects the second half of the list.

use std::ops::Range;

/// The variable that holds the switches: `name=value,name=value`.
pub const VARIABLE: &str = "FERRYWIRE_TCPX_SIM";
/// Most requests of a comm that can be set: as many as NCCL asks for.
pub const REQUESTS_MAX: usize = 32;

/// A type of a switch's value.
trait Value: Sized {
    /// The expected values, for the error message.
    const EXPECTED: &str;
    fn parse(text: &str) -> Option<Self>;
}

impl Value for bool {
    const EXPECTED: &str = "on or off";

    fn parse(text: &str) -> Option<bool> {
        match text {
            "on" => Some(true),
            "off" => Some(false),
            _ => None,
        }
    }
}

impl Value for u64 {
    const EXPECTED: &str = "a number";

    fn parse(text: &str) -> Option<u64> {
        text.parse().ok()
    }
}

impl Value for Option<u64> {
    const EXPECTED: &str = "a number";

    fn parse(text: &str) -> Option<Option<u64>> {
        text.parse().ok().map(Some)
    }
}

impl Value for Option<String> {
    const EXPECTED: &str = "a name";

    fn parse(text: &str) -> Option<Option<String>> {
        (!text.is_empty()).then(|| Some(text.to_owned()))
    }
}

impl Value for Range<u64> {
    const EXPECTED: &str = "LOW-HIGH";

    fn parse(text: &str) -> Option<Range<u64>> {
        let (low, high) = text.split_once('-')?;
        let (low, high) = (low.parse().ok()?, high.parse::<u64>().ok()?);
        (low <= high && high < u64::MAX).then_some(low..high + 1)
    }
}

/// An enumeration whose values have names.
macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($(#[$value_doc:meta])* $value:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($(#[$value_doc])* $value,)* }

        impl Value for $name {
            const EXPECTED: &str = concat!("one of", $(" ", $text,)*);

            fn parse(text: &str) -> Option<$name> {
                match text {
                    $($text => Some($name::$value),)*
                    _ => None,
                }
            }
        }
    };
}

choice! {
    /// The answer to a request on a comm whose slots are all taken.
    Full {
        /// A full comm answers with a warning and result 3.
        Error = "error",
        /// A full comm answers with success and a NULL request.
        Null = "null",
    }
}

choice! {
    /// The effect of `test` on its `sizes`.
    Sizes {
        /// `test` leaves the sizes unchanged.
        Keep = "keep",
        /// `test` writes the size of a request when the request is done.
        Write = "write",
    }
}

choice! {
    /// The error of a receive comm when control bytes and the end of the stream arrive together.
    CloseError {
        /// The error occurs when they happen to be read together.
        Natural = "on",
        /// The error never occurs.
        Off = "off",
        /// The error occurs exactly once per receive comm whose peer closes while a request is not done.
        Always = "always",
    }
}

choice! {
    /// What happens to GPU payload that comes from this host.
    SameHost {
        /// The payload arrives in linear memory: the plugin warns and calls `exit(1)`.
        Die = "die",
        /// The payload from this host arrives in the pool.
        Allow = "allow",
    }
}

choice! {
    /// What happens to payload that arrives before flow rules are in force.
    EarlyPayload {
        /// Early payload is received.
        Allow = "allow",
        /// The plugin warns about early payload and calls `exit(1)`.
        Die = "die",
    }
}

choice! {
    /// The dp-manager, which installs flow rules and hands out pools.
    DpManager {
        /// The daemon works.
        On = "on",
        /// No daemon exists.
        Off = "off",
        /// The daemon refuses each flow rule.
        Refuse = "refuse",
        /// The daemon ends between a rule and the import of the pool.
        Gone = "gone",
        /// The daemon never answers an import of the pool.
        Hang = "hang",
    }
}

choice! {
    /// The answer to a second `init`.
    SecondInit {
        /// A second `init` returns result 3.
        Refuse = "3",
        /// A second `init` succeeds.
        Ok = "ok",
    }
}

choice! {
    /// How fragments are wrong.
    Lie {
        /// All fragments are right.
        No = "no",
        /// The source of a fragment is outside of the pool.
        Range = "range",
        /// The destination of a fragment is outside of the message.
        Dst = "dst",
        /// The lengths do not add up to the message.
        Len = "len",
    }
}

choice! {
    /// What a faulty call does.
    CallFault {
        /// The call has no fault.
        No = "no",
        /// The call ends the process by `exit(1)`.
        Exit = "exit",
        /// The call ends the process by SIGSEGV.
        Crash = "crash",
        /// The call raises SIGPIPE, and continues if that is ignored.
        Sigpipe = "sigpipe",
        /// The call never returns.
        Hang = "hang",
        /// The call returns result 2.
        Error = "error",
        /// The call panics, which the host sees as result 3.
        Panic = "panic",
    }
}

choice! {
    /// The direction of the comms that faults and rates are for.
    Side {
        /// Comms of both directions.
        Both = "both",
        /// Send comms only.
        Send = "send",
        /// Receive comms only.
        Recv = "recv",
    }
}

macro_rules! switches {
    ($($(#[$doc:meta])* $name:ident: $kind:ty = $default:expr;)*) => {
        /// The values of all switches.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Switches { $($(#[$doc])* pub $name: $kind,)* }

        impl Default for Switches {
            fn default() -> Switches {
                Switches { $($name: $default,)* }
            }
        }

        impl Switches {
            fn set(&mut self, name: &str, text: &str) -> Result<(), String> {
                match name {
                    $(stringify!($name) => self.$name = value(name, text)?,)*
                    _ => return Err(format!("{VARIABLE} has no switch {name:?}")),
                }
                Ok(())
            }
        }

        #[cfg(test)]
        const NAMES: &[&str] = &[$(stringify!($name),)*];
    };
}

switches! {
    /// Whether only the oldest request in transmission may be tested.
    head_only: bool = true;
    /// Whether one `test` admits at most one request and schedules at most one.
    one_step: bool = true;
    /// Number of requests of a comm, at most [`REQUESTS_MAX`].
    slots: u64 = 16;
    /// The answer of a comm whose requests are all in use.
    full: Full = Full::Error;
    /// The effect of `test` on its `sizes`.
    sizes: Sizes = Sizes::Keep;
    /// Whether a message larger than its receive is written beyond it.
    overrun: bool = true;
    /// Whether finished receives can only be given back in order.
    consume_order: bool = true;
    /// Whether a second thread inside a comm ends the process.
    one_thread: bool = true;
    /// Whether connecting and accepting return a NULL comm until they are ready.
    null_first: bool = true;
    /// Whether a call after the end of an attempt ends the process.
    attempt_once: bool = true;
    /// Time per socket while connecting, in milliseconds.
    setup_ms: u64 = 1;
    /// The state of the dp-manager.
    dp_manager: DpManager = DpManager::On;
    /// Whether a receive comm without a device handle crashes at its first receive.
    need_device_handle: bool = true;
    /// The answer to a second `init`.
    second_init: SecondInit = SecondInit::Refuse;
    /// Whether `init` fails on a host without a GPU.
    need_gpu: bool = false;
    /// Whether a NIC without a PCI path gets a made-up one.
    pci_path: bool = true;
    /// Whether chunks have no bytes without `NCCL_DYNAMIC_CHUNK_SIZE`.
    chunk_env: bool = true;
    /// Whether GPU memory can only be registered in whole, aligned pages.
    alignment: bool = true;
    /// Whether a failed registration of memory of a real GPU leaves a context pushed.
    push_left: bool = true;
    /// Whether a send comm accepts only memory of the GPU that was current at its first connect.
    comm_gpu: bool = true;
    /// Whether fragments are in pages out of order, at odd offsets, with odd lengths.
    scatter: bool = true;
    /// Longest fragment in bytes.
    fragment_bytes: u64 = 4096;
    /// Number of pages of the receive pool of one GPU.
    pool_pages: u64 = 16384;
    /// Whether overlapping imports of the pool each map it, and each unmaps the mapping of the previous one.
    import_race: bool = true;
    /// Duration of an import of the pool, in milliseconds.
    import_ms: u64 = 3;
    /// Whether pages are filled with 0xDE when they are given back.
    poison: bool = true;
    /// Whether the pages of all but the last chunk of a request on one socket are lost.
    leak: bool = true;
    /// What happens to GPU payload that comes from this host.
    same_host: SameHost = SameHost::Die;
    /// What happens to payload that arrives before flow rules are in force.
    early_payload: EarlyPayload = EarlyPayload::Allow;
    /// Whether each receive call into host memory logs a warning.
    host_warning: bool = true;
    /// The error that a closing peer can cause.
    close_error: CloseError = CloseError::Natural;
    /// Whether a worker ends without reporting it when its socket fails.
    silent_death: bool = true;
    /// Whether writing to a dead peer raises SIGPIPE.
    sigpipe: bool = true;
    /// Whether half a control message makes `test` wait for ever.
    half_control_spin: bool = true;
    /// Largest rate of each NIC in bytes per second and direction, 0 for no limit.
    rate: u64 = 0;
    /// Seed of all random choices of the plugin.
    seed: u64 = 1;
    /// Whether lines with counts are logged: when a comm is closed, and of listeners.
    stats: bool = false;

    /// Direction of the comms that have the faults.
    fault_side: Side = Side::Both;
    /// Name of the NIC whose comms have the faults; all NICs by default.
    fault_nic: Option<String> = None;
    /// Name of the faulty call, as in NCCL's interface.
    fault_call: Option<String> = None;
    /// What the faulty call does.
    call_fault: CallFault = CallFault::No;
    /// Number of calls that succeed before the faulty one.
    call_fault_after: u64 = 0;
    /// Number of posted requests after which posting another calls `exit(1)`.
    die_after: Option<u64> = None;
    /// Number of posted requests after which posting another raises SIGSEGV.
    crash_after: Option<u64> = None;
    /// Number of finished requests after which `test` never returns.
    test_hang_after: Option<u64> = None;
    /// Number of finished requests after which `test` returns 2 once.
    test_error_after: Option<u64> = None;
    /// Number of finished requests after which the oldest one never completes.
    stall_head_after: Option<u64> = None;
    /// Number of posted requests after which posting another shuts down data socket 0.
    drop_data_socket_after: Option<u64> = None;
    /// Number of requests after which a send comm writes half a control message, and nothing more.
    half_control_after: Option<u64> = None;
    /// Number of requests after which a receive into GPU memory finds no control data.
    no_cmsg_after: Option<u64> = None;
    /// Whether the handle of a listener contains the pointer of an attempt.
    lie_handle: bool = false;
    /// How fragments are wrong.
    lie_fragment: Lie = Lie::No;
    /// Number of the first request whose fragments are wrong.
    lie_after: u64 = 0;
    /// Whether socket calls move a random part of the bytes that they could move.
    partial_io: bool = false;
    /// Pause before each socket call, in microseconds.
    delay_us: Range<u64> = 0..1;
}

impl Switches {
    /// Parses `name=value,name=value`; blanks and empty items are skipped.
    pub fn parse(text: &str) -> Result<Switches, String> {
        let mut switches = Switches::default();
        for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            let (name, text) = item.split_once('=').unwrap_or((item, ""));
            switches.set(name.trim(), text.trim())?;
        }
        switches.check()?;
        Ok(switches)
    }

    /// The switches of this process.
    pub fn from_env() -> Result<Switches, String> {
        match std::env::var(VARIABLE) {
            Ok(text) => Switches::parse(&text),
            Err(std::env::VarError::NotPresent) => Ok(Switches::default()),
            Err(e) => Err(format!("{VARIABLE}: {e}")),
        }
    }

    fn check(&self) -> Result<(), String> {
        let bounded = [
            ("slots", self.slots, 1..=REQUESTS_MAX as u64),
            ("fragment_bytes", self.fragment_bytes, 1..=4096),
            ("pool_pages", self.pool_pages, 1..=1 << 19),
        ];
        for (name, value, bounds) in bounded {
            if !bounds.contains(&value) {
                return Err(format!("{VARIABLE}: {name}={value} is not within {bounds:?}"));
            }
        }
        Ok(())
    }
}

fn value<T: Value>(name: &str, text: &str) -> Result<T, String> {
    T::parse(text).ok_or_else(|| format!("{VARIABLE}: {name}={text:?} is not {}", T::EXPECTED))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_switched_is_the_real_plugin() {
        assert_eq!(Switches::parse("").unwrap(), Switches::default());
    }

    #[test]
    fn values_are_read_by_name() {
        let switches = Switches::parse("head_only=off, sizes=write,,delay_us=0-50,die_after=7").unwrap();
        let expected = Switches {
            head_only: false,
            sizes: Sizes::Write,
            delay_us: 0..51,
            die_after: Some(7),
            ..Switches::default()
        };
        assert_eq!(switches, expected);
    }

    #[test]
    fn an_unknown_switch_is_refused() {
        for text in ["hed_only=off", "head_only", "head_only=no", "slots=33", "sizes=on", "delay_us=5-1"] {
            assert!(Switches::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_table_of_the_crate_has_every_switch() {
        let manual = include_str!("lib.rs");
        for name in NAMES {
            assert!(manual.contains(&format!("//! | `{name}` |")), "lib.rs does not describe {name}");
        }
    }
}
