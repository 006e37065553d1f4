//! Plays many seeds on several threads, and reports the failed ones.
//!
//! Invariant: a seed gives one run, whichever thread plays it.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ferrywire_memory::sim::SimGpu;

use crate::cover::Cover;
use crate::driver::Driver;
use crate::run::{Broken, Check, Outcome, play};
use crate::scenario::{Scenario, scenario};
use crate::shrink::shrink;

/// Number of simulated GPUs of one thread.
const GPUS_PER_THREAD: usize = 2;
/// Most threads of a campaign: each has GPUs of its own.
const THREADS_MAX: usize = ferrywire::limits::SIM_GPUS_MAX / GPUS_PER_THREAD;
/// Number of seeds of which one is played twice, and has to repeat.
const REPEATED: u64 = 16;

/// Looks at the descriptors of the process, 5 ms apart.
const DESCRIPTOR_LOOKS: u32 = 100;
/// Number of failures after which a campaign ends.
const FAILURES_MAX: usize = 8;

/// The seeds of a campaign, its threads, and its longest time.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The first seed of the campaign.
    pub from: u64,
    /// Number of seeds to play.
    pub seeds: u64,
    /// Number of threads that play seeds.
    pub threads: usize,
    /// Time after which no further seed begins.
    pub time: Option<Duration>,
    /// Whether the campaign ends at the first failure, without shrinking it.
    pub quick: bool,
}

/// A failed seed, with its broken invariant.
#[derive(Clone, Debug)]
pub struct Failure {
    seed: u64,
    broken: Broken,
    /// The smallest scenario that was found to fail in the same way.
    shrunk: Scenario,
}

/// The result of a campaign.
#[derive(Default)]
pub struct Report {
    /// The failed seeds of the campaign.
    pub failures: Vec<Failure>,
    /// Number of seeds that were played.
    pub seeds: u64,
    /// Descriptors that this process had before the seeds and after them, if all held.
    pub descriptors: Option<(usize, usize)>,
    cover: Cover,
    /// Real time that each seed took, the shortest first.
    times: Vec<Duration>,
}

thread_local! {
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Makes panics store their message for the failure, and print nothing.
fn keep_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !is_playing() {
                return usual(info);
            }
            let trace = match std::env::var_os("RUST_BACKTRACE").filter(|value| value == "full") {
                Some(_) => format!("\n{}", std::backtrace::Backtrace::force_capture()),
                None => String::new(),
            };
            PANIC.set(Some(format!("{info}{trace}")));
        }));
    });
}

thread_local! {
    static PLAYING: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

fn is_playing() -> bool {
    PLAYING.get()
}

/// Opens the simulated GPUs of one thread of a campaign.
pub fn gpus(thread: usize) -> Vec<Arc<SimGpu>> {
    let open = |index: usize| SimGpu::open(index as u32).expect("a simulated GPU");
    let gpus: Vec<_> = (0..GPUS_PER_THREAD).map(|index| open(thread * GPUS_PER_THREAD + index)).collect();
    gpus.iter().for_each(|gpu| gpu.step());
    gpus
}

/// Plays a scenario once; a panic counts as a broken invariant.
pub fn attempt(scenario: &Scenario, gpus: &[Arc<SimGpu>], logs: bool) -> (Outcome, Check) {
    keep_panics();
    let mut outcome = Outcome::default();
    PLAYING.set(true);
    let result = catch_unwind(AssertUnwindSafe(|| play(scenario, gpus, logs, &mut outcome)));
    PLAYING.set(false);
    let result = result.unwrap_or_else(|panic| {
        Driver::abandon();
        Err(Broken { invariant: "nothing panics", detail: words_of(&*panic) })
    });
    (outcome, result)
}

fn words_of(panic: &(dyn Any + Send)) -> String {
    let kept = PANIC.take();
    kept.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".into())
}

/// A seed's scenario, what its run recorded, and the first invariant that the run broke.
type Played = (Scenario, Outcome, Check);

/// Plays a seed; one of every [`REPEATED`] twice, to check that it repeats.
fn play_seed(seed: u64, gpus: &[Arc<SimGpu>]) -> Played {
    let scenario = scenario(seed);
    let (outcome, mut result) = attempt(&scenario, gpus, false);
    if result.is_ok() && seed.is_multiple_of(REPEATED) {
        let (again, other) = attempt(&scenario, gpus, false);
        result = other.and_then(|()| match again.fingerprint == outcome.fingerprint {
            true => Ok(()),
            false => {
                let detail = format!("fingerprints {:x} and {:x}", outcome.fingerprint, again.fingerprint);
                Err(Broken { invariant: "a seed repeats", detail })
            }
        });
    }
    (scenario, outcome, result)
}

/// Plays one seed. Returns its log, and whether all invariants held.
pub fn trace(seed: u64) -> (Vec<String>, bool) {
    let (outcome, result) = attempt(&scenario(seed), &gpus(0), true);
    let mut lines = outcome.log;
    let well = result.is_ok();
    lines.push(match result {
        Ok(()) => format!("all invariants held; fingerprint {:x}", outcome.fingerprint),
        Err(broken) => format!("broken: {}: {}", broken.invariant, broken.detail),
    });
    (lines, well)
}

/// Number of descriptors that this process has.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, |entries| entries.count())
}

/// Number of descriptors once there are no more than `most`; else the number after some time. Another process may ask this one for
/// its counters meanwhile.
fn descriptors_down_to(most: usize) -> usize {
    let mut now = descriptors();
    for _ in 0..DESCRIPTOR_LOOKS {
        if now <= most {
            break;
        }
        thread::sleep(Duration::from_millis(5));
        now = descriptors();
    }
    now
}

/// Plays all seeds of a plan, and returns the report.
pub fn campaign(plan: Plan) -> Report {
    campaign_of(plan, &play_seed)
}

/// Plays all seeds of a plan by `play`, and returns the report.
fn campaign_of(plan: Plan, play: &(dyn Fn(u64, &[Arc<SimGpu>]) -> Played + Sync)) -> Report {
    // What a process opens once is open from the first run on.
    let (scenario, _, warm) = play(plan.from, &gpus(0));
    let descriptors = descriptors();
    let (next, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let (report, since) = (Mutex::new(Report::default()), Instant::now());
    let work = |thread: usize| {
        let gpus = gpus(thread);
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let over = plan.time.is_some_and(|time| since.elapsed() >= time);
            if number >= plan.seeds || over || stop.load(Ordering::Relaxed) {
                return;
            }
            let (seed, began) = (plan.from + number, Instant::now());
            let (scenario, outcome, result) = play(seed, &gpus);
            let took = began.elapsed();
            let failure = result.err().map(|broken| {
                let (shrunk, _) = match broken.invariant {
                    _ if plan.quick => (scenario.clone(), broken.clone()),
                    "a seed repeats" => (scenario.clone(), broken.clone()),
                    _ => shrink(&scenario, &broken, &gpus),
                };
                Failure { seed, broken, shrunk }
            });
            let mut report = report.lock().unwrap_or_else(PoisonError::into_inner);
            report.seeds += 1;
            report.cover.add(&outcome.cover);
            report.times.push(took);
            report.failures.extend(failure);
            if report.failures.len() >= if plan.quick { 1 } else { FAILURES_MAX } {
                stop.store(true, Ordering::Relaxed);
            }
        }
    };
    thread::scope(|scope| {
        for thread in 0..plan.threads.clamp(1, THREADS_MAX) {
            let work = &work;
            scope.spawn(move || work(thread));
        }
    });
    let mut report = report.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Err(broken) = warm
        && !report.failures.iter().any(|failure| failure.seed == plan.from)
    {
        let detail = format!("the seed's first run broke \"{}\": {}", broken.invariant, broken.detail);
        let broken = Broken { invariant: "a seed repeats", detail };
        report.failures.push(Failure { seed: plan.from, broken, shrunk: scenario });
    }
    // A run that has failed keeps what it has.
    let all_held = report.failures.is_empty();
    report.descriptors = all_held.then(|| (descriptors, descriptors_down_to(descriptors)));
    report.failures.sort_by_key(|failure| failure.seed);
    report.times.sort();
    report
}

impl Failure {
    /// The text by which a person can understand and repeat the failure.
    pub fn text(&self) -> String {
        let Failure { seed, broken, shrunk } = self;
        let steps: Vec<String> = shrunk
            .steps
            .iter()
            .map(|step| format!("  after {} us {:?}", step.pause_us, step.action))
            .collect();
        format!(
            "seed {seed} breaks: {}\n  {}\nshrunk to {} steps, benign {}, protection {:?}, links {:?}, {:#?}\n{}\nrepeat with: cargo run --release \
             -p ferrywire-campaign -- campaign --seed {seed} --trace",
            broken.invariant,
            broken.detail,
            steps.len(),
            shrunk.benign,
            shrunk.protection,
            shrunk.links,
            shrunk.ends.iter().map(|end| format!("{end:?}")).collect::<Vec<_>>(),
            steps.join("\n"),
        )
    }
}

impl Report {
    /// Whether seeds were played, all held, and the process has no more descriptors than before.
    pub fn is_well(&self) -> bool {
        self.seeds > 0
            && self.failures.is_empty()
            && self.descriptors.is_none_or(|(before, after)| after <= before)
    }

    /// The report's text: the table of coverage, and the time that a seed takes.
    pub fn text(&self) -> String {
        let at = |part: usize| self.times.get(self.times.len() * part / 100).copied().unwrap_or_default();
        let left = match self.descriptors {
            Some((before, after)) if after > before => {
                format!("broken: descriptors go with their endpoints: {before} before, {after} after\n")
            }
            _ => String::new(),
        };
        format!(
            "{}\n{left}{} seeds, {} failed; a seed takes {:?} at the median, {:?} at most for 95 of 100",
            self.cover.table(),
            self.seeds,
            self.failures.len(),
            at(50),
            at(95)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A campaign of seeds without a run. The warm-up is `first`, and every later run holds.
    fn report_of(seeds: u64, time: Option<Duration>, first: Check) -> Report {
        let first = Mutex::new(first);
        let play = |seed, _: &[Arc<SimGpu>]| {
            let result = std::mem::replace(&mut *first.lock().unwrap(), Ok(()));
            (scenario(seed), Outcome::default(), result)
        };
        let report = campaign_of(Plan { from: 7, seeds, threads: 1, time, quick: false }, &play);
        // Other tests of this process open and close descriptors meanwhile.
        Report { descriptors: None, ..report }
    }

    #[test]
    fn a_campaign_that_played_no_seed_is_not_well() {
        assert!(report_of(2, None, Ok(())).is_well());
        assert!(!report_of(0, None, Ok(())).is_well());
        assert!(!report_of(2, Some(Duration::ZERO), Ok(())).is_well());
    }

    #[test]
    fn a_first_run_that_fails_alone_is_reported() {
        let broken = Broken { invariant: "it holds", detail: "it did not".into() };
        let report = report_of(2, None, Err(broken));
        assert_eq!((report.seeds, report.is_well()), (2, false));
        let [failure] = &report.failures[..] else { panic!("{} failures", report.failures.len()) };
        assert_eq!((failure.seed, failure.broken.invariant), (7, "a seed repeats"));
        assert!(failure.broken.detail.contains("it did not"), "{}", failure.broken.detail);
    }
}
