//! The faults of a simulated network: their kinds, and how often each happens.
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
    /// Probability that a send takes, or a receive gives, only a random prefix of at least one byte.
    pub partial: f64,
    /// Probability that a send, receive or accept that could proceed returns `WouldBlock`. Must be below 1.
    pub would_block: f64,
    /// Longest extra delay, drawn per segment; segments stay in order.
    pub jitter: Duration,
    /// Probability per send that the connection is reset. Both ends learn of the reset at once, or one end
    /// later.
    pub reset: f64,
    /// Probability that a reset also makes an end lose bytes that had arrived and were not read.
    pub reset_drops_unread: f64,
    /// Probability per send that no byte moves on the connection for up to `stall_max`.
    pub stall: f64,
    /// Longest duration of a random stall.
    pub stall_max: Duration,
    /// Probability per send that one of the connection's NICs is silently cut, one way or both, for up to
    /// `cut_max`.
    pub cut: f64,
    /// Longest duration of a random cut.
    pub cut_max: Duration,
    /// Probability that a dial is refused.
    pub refuse_dial: f64,
    /// Probability that a dial is never answered.
    pub time_out_dial: f64,
    /// Probability that an end that closes loses its bytes in flight, and the other end sees a reset.
    /// Otherwise the bytes arrive, then the end of the stream.
    pub abrupt_close: f64,
    /// Probability per send on a data connection that one bit is flipped, after the first
    /// `corrupt_after_bytes` of the stream.
    pub corrupt: f64,
    /// Bytes at the start of each direction of a connection that are never corrupted.
    pub corrupt_after_bytes: u64,
    /// Whether resets and stalls hit data connections only.
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

/// Zero in half of all cases, else a random number up to `max`.
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
    /// Both ends learn of the reset at once, whatever the state of the path.
    AtOnce,
    /// One end learns of the reset at once. The other end learns of it when a packet reaches it, at the
    /// earliest after this time.
    OtherEndAfter(Duration),
}

/// How a simulated dial fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DialFault {
    /// The dial returns `ConnectionRefused` after a round trip.
    Refuse,
    /// The dial gets no answer, and returns `TimedOut` after the kernel's two minutes.
    TimeOut,
}

/// One end of a simulated connection.
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
