//! How many channels NCCL uses, which protocol short collectives use, and the size of pieces.
//!
//! By default NCCL makes two channels for one NIC and one GPU per host. Each channel is a ring in which all messages
//! wait for one another. Two channels carry about 10 GB/s of a reduction, eight more than twice as much. But a short
//! message cut into eight takes longer than one cut into two.
//!
//! So the plugin asks for eight when it is loaded, through NCCL's own variable unless the user has set it. A tuner,
//! which NCCL finds in the same library, limits short collectives to the default number. NCCL estimates the cost of
//! each protocol as if all eight were used. Over two channels LL, which doubles the bytes, takes up to twice the time
//! of Simple where NCCL still prefers it, so the tuner ends LL at the measured size.
//!
//! Between hosts NCCL sends pieces of 128 KiB by default. With 512 KiB, the size of the pieces of its reductions, long
//! messages are a third faster for two thirds of the CPU time, and short ones as fast as before. Invariants: all ranks
//! must choose the same numbers, so nothing here depends on this host's NICs; nothing changes if the user has set the
//! number of channels or has a tuner.

use std::ffi::{c_char, c_float, c_int, c_void};
use std::sync::OnceLock;

use ferrywire_ncclnet::abi::{Log, ResultCode};

use crate::log;

/// A variable of NCCL that the plugin sets unless the user has set it.
struct Wish {
    variable: &'static str,
    /// A second variable that marks the first as set by ferrywire. Child processes inherit both.
    mark: &'static str,
    value: usize,
    /// Other variables of NCCL by which the user may have decided about the same.
    said_by: &'static [&'static str],
}

const CHANNELS_WISH: Wish = Wish {
    variable: "NCCL_MIN_NCHANNELS",
    mark: "FERRYWIRE_NCCL_CHANNELS_ASKED",
    value: CHANNELS,
    said_by: &[
        "NCCL_MAX_NCHANNELS",
        "NCCL_MIN_NRINGS",
        "NCCL_MAX_NRINGS",
        "NCCL_MIN_CTAS",
        "NCCL_MAX_CTAS",
        TUNER,
    ],
};

/// The piece size that is asked for: the largest value that NCCL's own buffers allow.
const PIECE_WISH: Wish = Wish {
    variable: "NCCL_P2P_NET_CHUNKSIZE",
    mark: "FERRYWIRE_NCCL_PIECE_ASKED",
    value: 512 << 10,
    said_by: &[],
};

/// The user's choice of a tuner, a name. The other variables here are numbers.
const TUNER: &str = "NCCL_TUNER_PLUGIN";
/// The user's choice of a network. NCCL initializes all networks that it finds before it looks for this name.
const NETWORK: &str = "NCCL_NET";
/// Name of this network in NCCL's variable, in either case.
const NETWORK_NAME: &str = "ferrywire";
/// Number of channels that the plugin asks NCCL for.
const CHANNELS: usize = 8;
/// Number of channels that NCCL makes for one NIC by default.
const CHANNELS_BEFORE: usize = 2;
/// Fewest bytes of a long collective per rank and channel, about a step of NCCL.
const BYTES_PER_STEP: usize = 512 << 10;
/// Fewest bytes of a short collective per channel, as in NCCL.
const BYTES_PER_CHANNEL_MIN: usize = 16 << 10;

/// Most bytes per rank of an all-reduce for which LL may be faster.
const LL_BYTES_PER_RANK_MAX: usize = 64 << 10;
/// NCCL's number of the collective all-reduce, `ncclFuncAllReduce`.
const ALL_REDUCE: c_int = 4;
/// Index of the protocol LL in the costs of an algorithm.
const LL: usize = 0;
const SIMPLE: usize = 2;
/// Cost of a protocol that must not be used, `NCCL_ALGO_PROTO_IGNORE`.
const IGNORED: c_float = -1.0;

/// Whether the plugin has asked for channels.
static ASKED: OnceLock<bool> = OnceLock::new();

/// Sets the variables for channels and piece size, once per process. Only for versions of NCCL with tuners.
pub fn ask() {
    ASKED.get_or_init(|| {
        let read = |name: &str| std::env::var(name).ok();
        let [channels, _] = [CHANNELS_WISH, PIECE_WISH].map(|wish| {
            let may = wish.may_be_set(read);
            if may {
                wish.set();
            } else if is_another_network(read) && wish.is_inherited(read) {
                wish.unset();
            }
            may
        });
        channels
    });
}

impl Wish {
    fn set(&self) {
        for name in [self.variable, self.mark] {
            // SAFETY: not proven. A thread of the program that reads a variable at this moment may read freed memory in
            // C libraries before glibc 2.41. NCCL does the same when it reads its file, and calls this function only
            // while it makes its first communicator.
            unsafe { std::env::set_var(name, self.value.to_string()) };
        }
        log::info(format_args!("set {}={}", self.variable, self.value));
    }

    /// Removes a variable's value that a parent process has set for ferrywire, which another network would take for
    /// the user's choice.
    fn unset(&self) {
        for name in [self.variable, self.mark] {
            // SAFETY: not proven: another thread of the program may read the variable at this moment, as when
            // it is set.
            unsafe { std::env::remove_var(name) };
        }
        log::info(format_args!("removed {}, which a parent process had set for ferrywire", self.variable));
    }

    /// Whether a parent process with ferrywire has set the variable.
    fn is_inherited(&self, read: impl Fn(&str) -> Option<String>) -> bool {
        let set = read(self.variable);
        set.is_some() && read(self.mark) == set
    }

    /// Whether the variable may be set: the user has set nothing (a parent process's setting is not the user's), and no
    /// other network was chosen.
    fn may_be_set(&self, read: impl Fn(&str) -> Option<String>) -> bool {
        // NCCL takes an empty number for unset.
        let is_set = |name| read(name).is_some_and(|value| !value.is_empty() || name == TUNER);
        let said = is_set(self.variable) && !self.is_inherited(&read);
        !is_another_network(&read) && !said && !self.said_by.iter().any(|&name| is_set(name))
    }
}

/// Whether the user has chosen another network.
fn is_another_network(read: impl Fn(&str) -> Option<String>) -> bool {
    read(NETWORK).is_some_and(|name| !name.is_empty() && !name.eq_ignore_ascii_case(NETWORK_NAME))
}

/// Number of channels that a collective of `bytes` among `ranks` should have; `None` for NCCL's choice.
fn channels_for(ranks: usize, bytes: usize) -> Option<usize> {
    let least = (bytes / BYTES_PER_CHANNEL_MIN).clamp(1, CHANNELS_BEFORE);
    let channels = (bytes / (BYTES_PER_STEP * ranks.max(1))).max(least);
    (channels < CHANNELS).then_some(channels)
}

/// Whether the protocol LL is slower than Simple for this collective.
fn is_long_for_ll(ranks: usize, collective: c_int, bytes: usize) -> bool {
    collective == ALL_REDUCE && bytes > LL_BYTES_PER_RANK_MAX * ranks.max(1)
}

/// Rules the protocol LL out where Simple is available (the user may have restricted the protocols). `costs` has a
/// row for each algorithm.
fn rule_out_ll<'a>(costs: impl Iterator<Item = &'a mut [c_float]>) {
    let mut rows: Vec<_> = costs.collect();
    if rows.iter().any(|row| row.get(SIMPLE).is_some_and(|&cost| cost >= 0.0)) {
        rows.iter_mut().filter_map(|row| row.get_mut(LL)).for_each(|cost| *cost = IGNORED);
    }
}

/// The tuner's state for one communicator.
struct Context {
    /// Number of ranks of the communicator; `None` if NCCL decides.
    ranks: Option<usize>,
}

/// Whether every step goes over the network. Ranks on one host have faster transports that want more channels, unless
/// these are switched off.
fn over_network_alone(ranks: usize, nodes: usize, is_off: impl Fn(&str) -> bool) -> bool {
    ranks == nodes || (is_off("NCCL_P2P_DISABLE") && is_off("NCCL_SHM_DISABLE"))
}

fn init(ranks: usize, nodes: usize, logger: Log, context: *mut *mut c_void) -> ResultCode {
    log::set_logger(logger);
    let is_off = |name: &str| std::env::var(name).is_ok_and(|value| value.trim() == "1");
    let asked = ASKED.get().copied().unwrap_or(false) && over_network_alone(ranks, nodes, is_off);
    let made = Box::new(Context { ranks: asked.then_some(ranks) });
    // SAFETY: NCCL gives room for the pointer to the context.
    unsafe { context.write(Box::into_raw(made).cast()) };
    ResultCode::SUCCESS
}

unsafe extern "C" fn init_v3(
    ranks: usize,
    nodes: usize,
    logger: Log,
    context: *mut *mut c_void,
) -> ResultCode {
    init(ranks, nodes, logger, context)
}

unsafe extern "C" fn init_v5(
    context: *mut *mut c_void,
    _comm_id: u64,
    ranks: usize,
    nodes: usize,
    logger: Log,
    _nvlink: *mut c_void,
    _constants: *mut c_void,
) -> ResultCode {
    init(ranks, nodes, logger, context)
}

/// The arguments that all versions of `getCollInfo` share.
struct Collective {
    kind: c_int,
    bytes: usize,
    /// NCCL's estimated cost of each protocol of each algorithm, row by row, whatever the type says.
    costs: *mut *mut c_float,
    algorithms: c_int,
    protocols: c_int,
}

/// Changes NCCL's estimates and the number of channels for one collective.
///
/// # Safety
/// `context` is from [`init`]; `costs` is null or NCCL's table; `channels` is null or valid for writing.
unsafe fn tune(context: *mut c_void, collective: &Collective, channels: *mut c_int) -> ResultCode {
    // SAFETY: the caller promises a context of `init` and a valid pointer for the number.
    let (context, channels) = unsafe { (context.cast::<Context>().as_ref(), channels.as_mut()) };
    let Some(&Context { ranks: Some(ranks) }) = context else { return ResultCode::SUCCESS };
    if let (Some(channels), Some(wanted)) = (channels, channels_for(ranks, collective.bytes)) {
        *channels = wanted as c_int;
    }
    let (rows, row_len) = (collective.algorithms.max(0) as usize, collective.protocols.max(0) as usize);
    let costs = collective.costs.cast::<c_float>();
    if !costs.is_null() && row_len > 0 && is_long_for_ll(ranks, collective.kind, collective.bytes) {
        // SAFETY: the caller promises that the costs are NCCL's table, which has these rows.
        let costs = unsafe { std::slice::from_raw_parts_mut(costs, rows * row_len) };
        rule_out_ll(costs.chunks_mut(row_len));
    }
    ResultCode::SUCCESS
}

unsafe extern "C" fn tune_v3(
    context: *mut c_void,
    kind: c_int,
    bytes: usize,
    _operations: c_int,
    costs: *mut *mut c_float,
    algorithms: c_int,
    protocols: c_int,
    channels: *mut c_int,
) -> ResultCode {
    // SAFETY: NCCL passes the context, its table of costs and a valid pointer for the number.
    unsafe { tune(context, &Collective { kind, bytes, costs, algorithms, protocols }, channels) }
}

unsafe extern "C" fn tune_v4(
    context: *mut c_void,
    kind: c_int,
    bytes: usize,
    _operations: c_int,
    costs: *mut *mut c_float,
    algorithms: c_int,
    protocols: c_int,
    _registered: c_int,
    channels: *mut c_int,
) -> ResultCode {
    // SAFETY: NCCL passes the context, its table of costs and a valid pointer for the number.
    unsafe { tune(context, &Collective { kind, bytes, costs, algorithms, protocols }, channels) }
}

unsafe extern "C" fn finish(context: *mut c_void) -> ResultCode {
    if !context.is_null() {
        // SAFETY: the context came from `init`, and NCCL does not use it any more.
        drop(unsafe { Box::from_raw(context.cast::<Context>()) });
    }
    ResultCode::SUCCESS
}

/// `ncclTuner_vN_t`: four pointers in every version, to functions of different types.
#[derive(Debug)]
#[repr(C)]
pub struct Tuner<Init, Tune> {
    name: *const c_char,
    init: Init,
    tune: Tune,
    finish: unsafe extern "C" fn(*mut c_void) -> ResultCode,
}

// SAFETY: the table is never written, its name is a literal, and its functions share only locked state.
unsafe impl<Init, Tune> Sync for Tuner<Init, Tune> {}

type InitV3 = unsafe extern "C" fn(usize, usize, Log, *mut *mut c_void) -> ResultCode;
type InitV5 =
    unsafe extern "C" fn(*mut *mut c_void, u64, usize, usize, Log, *mut c_void, *mut c_void) -> ResultCode;
type TuneV3 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    usize,
    c_int,
    *mut *mut c_float,
    c_int,
    c_int,
    *mut c_int,
) -> ResultCode;
type TuneV4 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    usize,
    c_int,
    *mut *mut c_float,
    c_int,
    c_int,
    c_int,
    *mut c_int,
) -> ResultCode;

macro_rules! export {
    ($($symbol:ident: Tuner<$init_type:ty, $tune_type:ty> = $init:expr, $tune:expr;)+) => {$(
        /// The tuner's table under the symbol that NCCL looks up.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals)]
        pub static $symbol: Tuner<$init_type, $tune_type> =
            Tuner { name: c"ferrywire".as_ptr(), init: $init, tune: $tune, finish };
    )+};
}

export! {
    ncclTunerPlugin_v3: Tuner<InitV3, TuneV3> = init_v3, tune_v3;
    ncclTunerPlugin_v4: Tuner<InitV3, TuneV4> = init_v3, tune_v4;
    ncclTunerPlugin_v5: Tuner<InitV5, TuneV4> = init_v5, tune_v4;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr;

    fn with(wish: &Wish, said: &[(&str, &str)]) -> bool {
        wish.may_be_set(|name| {
            said.iter().find(|(said, _)| *said == name).map(|(_, value)| String::from(*value))
        })
    }

    #[test]
    fn nccl_is_asked_unless_the_user_has_said_anything() {
        for wish in [CHANNELS_WISH, PIECE_WISH] {
            assert!(with(&wish, &[]));
            for name in wish.said_by.iter().chain([&wish.variable]) {
                assert!(!with(&wish, &[(name, "8")]), "{name}");
            }
        }
        assert!(with(&PIECE_WISH, &[("NCCL_MAX_NCHANNELS", "4")]), "that says nothing of pieces");
    }

    /// Regression: an empty variable, which NCCL takes for unset, kept the plugin from asking.
    #[test]
    fn empty_numbers_are_not_the_users_choice() {
        for wish in [CHANNELS_WISH, PIECE_WISH] {
            for name in wish.said_by.iter().chain([&wish.variable]) {
                assert_eq!(with(&wish, &[(name, "")]), *name != TUNER, "{name}");
            }
        }
    }

    /// Regression: NCCL 2.24 to 2.27 initialize every network before they choose one, so sockets and InfiniBand got
    /// ferrywire's channels.
    #[test]
    fn another_network_is_left_as_it_is() {
        for wish in [CHANNELS_WISH, PIECE_WISH] {
            assert!(!with(&wish, &[("NCCL_NET", "Socket")]) && !with(&wish, &[("NCCL_NET", "IB")]));
            assert!(with(&wish, &[("NCCL_NET", "Ferrywire")]) && with(&wish, &[("NCCL_NET", "")]));
        }
    }

    /// Regression: a child process took its parent's setting for the user's choice and was tuned differently.
    #[test]
    fn variables_of_a_parent_process_are_not_the_users() {
        for wish in [CHANNELS_WISH, PIECE_WISH] {
            let (variable, mark) = (wish.variable, wish.mark);
            assert!(with(&wish, &[(variable, "8"), (mark, "8")]));
            assert!(!with(&wish, &[(variable, "4"), (mark, "8")]));
        }
        let (variable, mark) = (CHANNELS_WISH.variable, CHANNELS_WISH.mark);
        assert!(!with(&CHANNELS_WISH, &[(variable, "8"), (mark, "8"), ("NCCL_MAX_CTAS", "4")]));
    }

    #[test]
    fn short_collectives_keep_to_few_channels() {
        let of = |bytes| channels_for(2, bytes);
        assert_eq!([of(0), of(8 << 10), of(31 << 10)], [Some(1); 3]);
        assert_eq!([of(32 << 10), of(64 << 10), of(2 << 20)], [Some(2); 3]);
        assert_eq!([of(4 << 20), of(8 << 20), of(1 << 30)], [Some(4), None, None]);
        assert_eq!(channels_for(4, 4 << 20), Some(2));
    }

    #[test]
    fn collectives_partly_within_a_host_are_left_to_nccl() {
        assert!(over_network_alone(2, 2, |_| false));
        assert!(!over_network_alone(16, 2, |_| false), "hosts with several ranks");
        assert!(!over_network_alone(2, 1, |name| name == "NCCL_P2P_DISABLE"));
        assert!(over_network_alone(2, 1, |_| true));
    }

    /// Regression: NCCL used LL up to 400 KiB, where its own sockets were faster.
    #[test]
    fn long_all_reduces_do_without_ll_where_simple_is_there() {
        const ALGORITHMS: usize = 7;
        const PROTOCOLS: usize = 3;
        const ALL_GATHER: c_int = 2;
        let context = Box::into_raw(Box::new(Context { ranks: Some(2) })).cast();
        let tuned = |collective, bytes, simple| {
            let mut costs = [[3.0, IGNORED, simple]; ALGORITHMS];
            let (mut channels, table) = (0, (&raw mut costs).cast());
            let (rows, row_len) = (ALGORITHMS as c_int, PROTOCOLS as c_int);
            // SAFETY: a context of a tuner, and a table of that size.
            unsafe {
                (ncclTunerPlugin_v4.tune)(
                    context,
                    collective,
                    bytes,
                    1,
                    table,
                    rows,
                    row_len,
                    0,
                    &mut channels,
                )
            };
            costs
        };
        let as_they_were = |simple| [[3.0, IGNORED, simple]; ALGORITHMS];
        assert_eq!(tuned(ALL_REDUCE, 128 << 10, 9.0), as_they_were(9.0));
        assert_eq!(tuned(ALL_REDUCE, (128 << 10) + 1, 9.0), [[IGNORED, IGNORED, 9.0]; ALGORITHMS]);
        assert_eq!(tuned(ALL_REDUCE, 1 << 20, IGNORED), as_they_were(IGNORED), "the user wants LL");
        assert_eq!(tuned(ALL_GATHER, 1 << 20, 9.0), as_they_were(9.0));
        assert!(!is_long_for_ll(4, ALL_REDUCE, 256 << 10) && is_long_for_ll(4, ALL_REDUCE, 257 << 10));
        // SAFETY: made above.
        unsafe { (ncclTunerPlugin_v4.finish)(context) };
    }

    /// Calls each version's functions as NCCL does.
    #[test]
    fn a_communicator_is_tuned_by_what_was_asked_for() {
        let tuned = |context: *mut c_void, bytes| {
            let mut channels = [0; 3];
            let none = ptr::null_mut();
            // SAFETY: a context of a tuner, and room for the numbers.
            unsafe {
                (ncclTunerPlugin_v3.tune)(context, 4, bytes, 1, none, 7, 3, &mut channels[0]);
                (ncclTunerPlugin_v4.tune)(context, 4, bytes, 1, none, 7, 3, 0, &mut channels[1]);
                (ncclTunerPlugin_v5.tune)(context, 4, bytes, 1, none, 7, 3, 0, &mut channels[2]);
            }
            channels
        };
        let asked = Box::into_raw(Box::new(Context { ranks: Some(2) })).cast();
        assert_eq!([tuned(asked, 1 << 20), tuned(asked, 1 << 30)], [[2; 3], [0; 3]]);
        let mut contexts = [ptr::null_mut(); 2];
        // SAFETY: room for the contexts, each ended once.
        unsafe {
            (ncclTunerPlugin_v3.init)(2, 2, None, &mut contexts[0]);
            let (none, null) = (None, ptr::null_mut());
            (ncclTunerPlugin_v5.init)(&mut contexts[1], 7, 2, 2, none, null, null);
            for context in contexts {
                assert_eq!(tuned(context, 1 << 20), [0; 3], "nothing was asked for");
                (ncclTunerPlugin_v4.finish)(context);
            }
            (ncclTunerPlugin_v4.finish)(asked);
        }
    }
}
