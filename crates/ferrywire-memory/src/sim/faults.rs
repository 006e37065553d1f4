//! What goes wrong in a simulated GPU on purpose: delays, failures, a standstill.
//!
//! Invariant: the same faults and the same operations enqueued in the same order fail at the same
//! places and are delayed by the same times.
//! Read next: `engine.rs`, which asks for a [`Fate`] as each operation is enqueued.

use super::{Result, SimGpuError};
use ferrywire_sys::rng::Rng;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

/// The environment variable that sets the faults of every GPU when it is opened:
/// `seed=7,delay_us=5-50,failure_per_million=100,fail_after=1000,stall=1`, each part optional.
pub const FAULTS_VARIABLE: &str = "FERRYWIRE_SIM_GPU_FAULTS";

/// What a simulated GPU does wrong. The default is nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimFaults {
    /// Seed of delays and failures; each GPU draws its own from it.
    pub seed: u64,
    /// How long an operation is held up before it begins, on the device's thread.
    pub copy_delay: RangeInclusive<Duration>,
    /// How many of a million operations fail.
    pub failure_per_million: u32,
    /// So many operations go well, and all after them fail.
    pub fail_after: Option<u64>,
    /// Nothing moves until this is taken back.
    pub stall: bool,
}

impl Default for SimFaults {
    fn default() -> SimFaults {
        SimFaults {
            seed: 0,
            copy_delay: Duration::ZERO..=Duration::ZERO,
            failure_per_million: 0,
            fail_after: None,
            stall: false,
        }
    }
}

impl SimFaults {
    /// The faults that [`FAULTS_VARIABLE`] asks for.
    pub(super) fn from_environment() -> Result<SimFaults> {
        match std::env::var(FAULTS_VARIABLE) {
            Ok(text) => text.parse(),
            Err(_) => Ok(SimFaults::default()),
        }
    }
}

impl FromStr for SimFaults {
    type Err = SimGpuError;

    fn from_str(text: &str) -> Result<SimFaults> {
        let mut faults = SimFaults::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let wrong = |why| SimGpuError::FaultsText { part: part.into(), why };
            let (name, value) = part.split_once('=').ok_or_else(|| wrong("is not name=value"))?;
            let number = || value.parse::<u64>().map_err(|_| wrong("needs a whole number"));
            match name {
                "seed" => faults.seed = number()?,
                "delay_us" => faults.copy_delay = delays(value).ok_or_else(|| wrong("is not LOW-HIGH"))?,
                "failure_per_million" => {
                    let rate = number()?.try_into().ok().filter(|rate| *rate <= MILLION as u32);
                    faults.failure_per_million = rate.ok_or_else(|| wrong("is above 1000000"))?;
                }
                "fail_after" => faults.fail_after = Some(number()?),
                "stall" => faults.stall = number()? != 0,
                _ => {
                    return Err(wrong(
                        "is unknown: use seed, delay_us, failure_per_million, fail_after, stall",
                    ));
                }
            }
        }
        Ok(faults)
    }
}

const MILLION: u64 = 1_000_000;

/// `5-50`, or `5` for always the same.
fn delays(text: &str) -> Option<RangeInclusive<Duration>> {
    let (low, high) = text.split_once('-').unwrap_or((text, text));
    let (low, high) = (low.parse().ok()?, high.parse().ok()?);
    (low <= high).then(|| Duration::from_micros(low)..=Duration::from_micros(high))
}

/// What becomes of one operation.
pub(super) struct Fate {
    pub delay: Duration,
    pub failure: Option<SimGpuError>,
}

/// Draws fates.
pub(super) struct Injector {
    pub faults: SimFaults,
    gpu: u32,
    rng: Rng,
    operations: u64,
}

impl Injector {
    pub fn new(gpu: u32, faults: SimFaults) -> Injector {
        // Far apart, so that no GPU's numbers are another's some steps later.
        let rng = Rng::new(faults.seed ^ (u64::from(gpu) << 56));
        Injector { faults, gpu, rng, operations: 0 }
    }

    /// The fate of the next operation.
    pub fn draw(&mut self) -> Fate {
        let operation = self.operations;
        self.operations += 1;
        let (low, high) = (*self.faults.copy_delay.start(), *self.faults.copy_delay.end());
        let delay = low + self.rng.up_to(high.saturating_sub(low));
        let rate = u64::from(self.faults.failure_per_million);
        let unlucky = rate > 0 && self.rng.below(MILLION) < rate;
        let over = self.faults.fail_after.is_some_and(|good| operation >= good);
        let failure = (unlucky || over).then_some(SimGpuError::Injected { gpu: self.gpu, operation });
        Fate { delay, failure }
    }
}
