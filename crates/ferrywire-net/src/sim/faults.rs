//! The faults of a simulated network: which, and how often.
//!
//! Faults by chance are a value ([`Faults`]), so a seed alone repeats a scenario. Faults on demand are
//! methods of [`SimNet`](super::SimNet) that take the small enums below.
//! Invariant: `disruptions_max` bounds every fault that destroys something, so a scenario with random faults
//! always comes to rest.
//! Read next: `state.rs`, which applies them.

use std::time::Duration;

use ferrywire_sys::rng::Rng;

/// Faults by probability. The default has none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Faults {
    /// A send takes, or a receive gives, only a random prefix of at least one byte.
    pub partial: f64,
    /// A send, receive or accept that could proceed returns `WouldBlock`. Must be below 1.
    pub would_block: f64,
    /// Longest extra delay, drawn per segment; segments stay in order.
    pub jitter: Duration,
    /// Per send: the connection is reset. Both ends learn of the reset at once, or one end later.
    pub reset: f64,
    /// Upon a reset, an end also loses bytes that had arrived and were not read.
    pub reset_drops_unread: f64,
    /// Per send: no byte moves on the connection for up to `stall_max`.
    pub stall: f64,
    /// Longest stall.
    pub stall_max: Duration,
    /// Per send: one of the connection's NICs is silently cut, one way or both, for up to `cut_max`.
    pub cut: f64,
    /// Longest cut.
    pub cut_max: Duration,
    /// A dial is refused.
    pub refuse_dial: f64,
    /// A dial is never answered.
    pub time_out_dial: f64,
    /// An end that closes loses its bytes in flight, and the other end sees a reset. Otherwise the bytes
    /// arrive, then the end of the stream.
    pub abrupt_close: f64,
    /// Per send on a data connection: one bit is flipped, after the first `corrupt_after_bytes` of the
    /// stream.
    pub corrupt: f64,
    /// Bytes at the start of each direction of a connection that are never corrupted.
    pub corrupt_after_bytes: u64,
    /// Resets and stalls hit data connections only.
    pub bulk_only: bool,
    /// Most resets, cuts, failed dials and corruptions, all together.
    pub disruptions_max: u32,
}

impl Faults {
    /// A mix of faults drawn from `seed`: mild or rough, all kinds except corruption, at most 32 disruptions.
    pub fn random(seed: u64) -> Faults {
        let mut rng = Rng::new(seed ^ 0x0066_6175_6c74_7321);
        Faults {
            partial: rng.fraction(),
            would_block: rng.fraction() * 0.4,
            jitter: sometimes(&mut rng, Duration::from_millis(5)),
            reset: rarely(&mut rng, 0.01),
            reset_drops_unread: rarely(&mut rng, 1.0),
            stall: rarely(&mut rng, 0.01),
            stall_max: Duration::from_millis(300),
            cut: rarely(&mut rng, 0.003),
            cut_max: Duration::from_secs(4),
            refuse_dial: rarely(&mut rng, 0.2),
            time_out_dial: rarely(&mut rng, 0.1),
            abrupt_close: rarely(&mut rng, 0.5),
            disruptions_max: 1 + rng.below(32) as u32,
            ..Faults::default()
        }
    }

    /// The faults of a healthy network: partial sends and receives, spurious `WouldBlock`, jitter.
    pub fn benign(seed: u64) -> Faults {
        let mut rng = Rng::new(seed ^ 0x6265_6e69_676e);
        Faults {
            partial: rng.fraction(),
            would_block: rng.fraction() * 0.5,
            jitter: sometimes(&mut rng, Duration::from_millis(5)),
            ..Faults::default()
        }
    }
}

/// Zero in half of all cases, else a number up to `max`.
fn rarely(rng: &mut Rng, max: f64) -> f64 {
    let value = rng.fraction() * max;
    if rng.chance(0.5) { value } else { 0.0 }
}

fn sometimes(rng: &mut Rng, max: Duration) -> Duration {
    let value = rng.up_to(max);
    if rng.chance(0.5) { value } else { Duration::ZERO }
}

/// When the two ends of a connection learn of its reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetSeen {
    /// Both ends at once, whatever the state of the path.
    AtOnce,
    /// One end at once. The other end when a packet reaches it, at the earliest after this time.
    OtherEndAfter(Duration),
}

/// How a dial fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DialFault {
    /// `ConnectionRefused` after a round trip.
    Refuse,
    /// No answer; `TimedOut` after the kernel's two minutes.
    TimeOut,
}

/// One end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The end that dialled.
    Dialler,
    /// The end that was accepted.
    Acceptor,
}

impl Side {
    pub(super) fn index(self) -> usize {
        self as usize
    }
}
