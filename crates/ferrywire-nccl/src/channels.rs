//! How many channels NCCL uses.
//!
//! Left alone NCCL makes two channels for one NIC, however fast it is: each is a ring of its own, and all messages of a ring
//! wait for one another. Two carry about 10 GB/s of a reduction, eight more than twice as much. But a short message cut
//! into eight takes longer than one cut into two.
//!
//! So more are asked for when the plugin is loaded (by NCCL's own variable, unless the user has said anything), and a tuner,
//! which NCCL finds in the same library, keeps short collectives to as few as there would have been.
//! Invariant: where NCCL would have made its own choice, or the user has, nothing is changed.

use std::ffi::{c_char, c_float, c_int, c_void};
use std::sync::OnceLock;

use ferrywire::nccl::abi::{Log, ResultCode};

use crate::device::Device;
use crate::log;

/// What the user may have said about it.
const SAID_BY_USER: [&str; 6] = [
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NRINGS",
    "NCCL_MAX_NRINGS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
];
/// Channels that are asked for.
const CHANNELS: usize = 8;
/// What NCCL makes for each NIC.
const CHANNELS_PER_DEVICE: usize = 2;
/// A NIC that is slower is full with what NCCL makes.
const FAST_MBPS: u32 = 40_000;
/// Of a long collective each rank has so many bytes or more in each channel: about a step of NCCL's,
const BYTES_PER_STEP: usize = 512 << 10;
/// of a short one so many, as NCCL has it.
const BYTES_PER_CHANNEL_MIN: usize = 16 << 10;

/// Channels that were asked for, and those that NCCL would have made; `None`: nothing was asked for.
static ASKED: OnceLock<Option<Asked>> = OnceLock::new();

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Asked {
    most: usize,
    least: usize,
}

/// Asks for channels, once for the process. Only a version of NCCL that takes tuners may be asked.
pub fn ask(devices: &[Device]) {
    ASKED.get_or_init(|| {
        let speeds: Vec<Option<u32>> = devices.iter().map(|device| device.nic.speed_mbps).collect();
        let asked = wanted(&speeds, |name| std::env::var_os(name).is_some())?;
        // SAFETY: other threads of the program may read its variables meanwhile, as they may while NCCL, whose call this
        // is, reads its own from its file; nothing is written that was there.
        unsafe { std::env::set_var(SAID_BY_USER[0], asked.most.to_string()) };
        log::info(format_args!("{}={} set, unless set before", SAID_BY_USER[0], asked.most));
        Some(asked)
    });
}

/// For NICs of these speeds, in Mbit/s.
fn wanted(speeds: &[Option<u32>], is_set: impl Fn(&str) -> bool) -> Option<Asked> {
    let least = speeds.len() * CHANNELS_PER_DEVICE;
    let fast = speeds.iter().any(|speed| speed.is_none_or(|mbps| mbps >= FAST_MBPS));
    let free = !SAID_BY_USER.into_iter().any(is_set);
    (fast && free && least < CHANNELS).then_some(Asked { most: CHANNELS, least })
}

/// How many of the channels a collective of so many bytes among so many ranks should have; `None`: as NCCL thinks.
fn channels_for(asked: Asked, ranks: usize, bytes: usize) -> Option<usize> {
    let least = (bytes / BYTES_PER_CHANNEL_MIN).clamp(1, asked.least);
    let channels = (bytes / (BYTES_PER_STEP * ranks.max(1))).max(least);
    (channels < asked.most).then_some(channels)
}

/// What one communicator is tuned by.
struct Context {
    asked: Option<Asked>,
    ranks: usize,
}

/// All ranks of a host are one node for NCCL, which then has better ways than a network, unless they are switched off.
fn over_network(nodes: usize, is_off: impl Fn(&str) -> bool) -> bool {
    nodes > 1 || (is_off("NCCL_P2P_DISABLE") && is_off("NCCL_SHM_DISABLE"))
}

fn init(ranks: usize, nodes: usize, logger: Log, context: *mut *mut c_void) -> ResultCode {
    log::set_logger(logger);
    let is_off = |name: &str| std::env::var(name).is_ok_and(|value| value.trim() == "1");
    let asked = ASKED.get().copied().flatten().filter(|_| over_network(nodes, is_off));
    // SAFETY: NCCL gives room for the pointer.
    unsafe { context.write(Box::into_raw(Box::new(Context { asked, ranks })).cast()) };
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

/// # Safety
/// A context of [`init`], and null or room for a number.
unsafe fn tune(context: *mut c_void, bytes: usize, channels: *mut c_int) -> ResultCode {
    // SAFETY: by the caller's promise.
    let (context, channels) = unsafe { (context.cast::<Context>().as_ref(), channels.as_mut()) };
    if let (Some(&Context { asked: Some(asked), ranks }), Some(channels)) = (context, channels)
        && let Some(wanted) = channels_for(asked, ranks, bytes)
    {
        *channels = wanted as c_int;
    }
    ResultCode::SUCCESS
}

unsafe extern "C" fn tune_v3(
    context: *mut c_void,
    _collective: c_int,
    bytes: usize,
    _operations: c_int,
    _costs: *mut *mut c_float,
    _algorithms: c_int,
    _protocols: c_int,
    channels: *mut c_int,
) -> ResultCode {
    // SAFETY: NCCL's promise.
    unsafe { tune(context, bytes, channels) }
}

unsafe extern "C" fn tune_v4(
    context: *mut c_void,
    _collective: c_int,
    bytes: usize,
    _operations: c_int,
    _costs: *mut *mut c_float,
    _algorithms: c_int,
    _protocols: c_int,
    _registered: c_int,
    channels: *mut c_int,
) -> ResultCode {
    // SAFETY: NCCL's promise.
    unsafe { tune(context, bytes, channels) }
}

unsafe extern "C" fn finish(context: *mut c_void) -> ResultCode {
    if !context.is_null() {
        // SAFETY: what `init` gave, which NCCL does not use any more.
        drop(unsafe { Box::from_raw(context.cast::<Context>()) });
    }
    ResultCode::SUCCESS
}

/// `ncclTuner_vN_t`: four pointers in every version, to functions of other types.
#[derive(Debug)]
#[repr(C)]
pub struct Tuner<Init, Tune> {
    name: *const c_char,
    init: Init,
    tune: Tune,
    finish: unsafe extern "C" fn(*mut c_void) -> ResultCode,
}

// SAFETY: it is never written, its name is a literal, and its functions share nothing but what is locked.
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
        /// What NCCL looks for.
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

    const ASKED_FOR_ONE: Asked = Asked { most: CHANNELS, least: CHANNELS_PER_DEVICE };

    #[test]
    fn more_channels_are_asked_for_where_nics_are_fast_and_nobody_has_said_anything() {
        let free = |_: &str| false;
        assert_eq!(wanted(&[None], free), Some(ASKED_FOR_ONE));
        assert_eq!(wanted(&[Some(200_000)], free), Some(ASKED_FOR_ONE));
        assert_eq!(wanted(&[Some(10_000)], free), None);
        assert_eq!(wanted(&[None; 3], free).map(|asked| asked.least), Some(6));
        assert_eq!(wanted(&[None; 4], free), None, "NCCL makes as many itself");
        for name in SAID_BY_USER {
            assert_eq!(wanted(&[None], |set| set == name), None, "{name}");
        }
    }

    #[test]
    fn short_collectives_keep_to_few_channels() {
        let of = |bytes| channels_for(ASKED_FOR_ONE, 2, bytes);
        assert_eq!([of(0), of(8 << 10), of(31 << 10)], [Some(1); 3]);
        assert_eq!([of(32 << 10), of(64 << 10), of(2 << 20)], [Some(2); 3]);
        assert_eq!([of(4 << 20), of(8 << 20), of(1 << 30)], [Some(4), None, None]);
        assert_eq!(channels_for(ASKED_FOR_ONE, 4, 4 << 20), Some(2));
    }

    #[test]
    fn ranks_of_one_host_are_left_alone_unless_they_meet_over_the_network() {
        assert!(over_network(2, |_| false));
        assert!(!over_network(1, |_| false) && !over_network(1, |name| name == "NCCL_P2P_DISABLE"));
        assert!(over_network(1, |_| true));
    }

    /// As NCCL calls it, in each version.
    #[test]
    fn a_communicator_is_tuned_by_what_was_asked_for() {
        let tuned = |context: *mut c_void, bytes| {
            let mut channels = [0; 3];
            let none = ptr::null_mut();
            // SAFETY: a context of a tuner's, and room for the numbers.
            unsafe {
                (ncclTunerPlugin_v3.tune)(context, 4, bytes, 1, none, 7, 3, &mut channels[0]);
                (ncclTunerPlugin_v4.tune)(context, 4, bytes, 1, none, 7, 3, 0, &mut channels[1]);
                (ncclTunerPlugin_v5.tune)(context, 4, bytes, 1, none, 7, 3, 0, &mut channels[2]);
            }
            channels
        };
        let asked = Box::into_raw(Box::new(Context { asked: Some(ASKED_FOR_ONE), ranks: 2 })).cast();
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
