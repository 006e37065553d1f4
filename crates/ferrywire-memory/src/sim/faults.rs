//! Injected faults of a simulated GPU: delays, failures, a stall.
//!
//! Invariant: with equal faults and operations enqueued in one order, the failures and delays are identical.
//! Read next: `engine.rs`, which draws a [`Fate`] for each operation that is enqueued.

use super::{Result, SimGpuError};
use ferrywire_sys::rng::Rng;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

/// Environment variable with the faults of every GPU that is opened:
/// `seed=7,delay_us=5-50,failure_per_million=100,fail_after=1000,stall=1`, each part optional.
pub const FAULTS_VARIABLE: &str = "FERRYWIRE_SIM_GPU_FAULTS";

/// Faults of a simulated GPU; none by default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimFaults {
    /// Seed of delays and failures; each GPU draws a sequence of its own from it.
    pub seed: u64,
    /// Range of an operation's delay before it starts, on the engine's thread.
    pub copy_delay: RangeInclusive<Duration>,
    /// Number of failing operations per million.
    pub failure_per_million: u32,
    /// Number of operations that succeed before all further ones fail; `None` for no such failure.
    pub fail_after: Option<u64>,
    /// Whether the GPU is stalled: no operation starts.
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
    /// Parses the value of [`FAULTS_VARIABLE`].
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

/// Parses a range of delays in microseconds: `5-50`, or `5` for a constant delay.
fn delays(text: &str) -> Option<RangeInclusive<Duration>> {
    let (low, high) = text.split_once('-').unwrap_or((text, text));
    let (low, high) = (low.parse().ok()?, high.parse().ok()?);
    (low <= high).then(|| Duration::from_micros(low)..=Duration::from_micros(high))
}

/// Delay and failure that one operation will have.
pub(super) struct Fate {
    pub delay: Duration,
    pub failure: Option<SimGpuError>,
}

/// Draws the delay and the failure of each operation.
pub(super) struct Injector {
    pub faults: SimFaults,
    gpu: u32,
    rng: Rng,
    operations: u64,
}

impl Injector {
    pub fn new(gpu: u32, faults: SimFaults) -> Injector {
        // The seeds of the GPUs are far apart, so no GPU's sequence is a shifted copy of another's.
        let rng = Rng::new(faults.seed ^ (u64::from(gpu) << 56));
        Injector { faults, gpu, rng, operations: 0 }
    }

    /// Draws delay and failure of the next operation.
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
