//! Whether a GPU's multiprocessors (SMs) have time for copies. Each use measures the wait, for all later
//! uses.
//!
//! A kernel waits behind the blocks of other kernels, or for its process's time slice: hundreds of
//! microseconds on a shared GPU, milliseconds on a fully loaded one. So when several kernels in a row have
//! not started within [`LAUNCH_WAIT`], all copies use the copy engines for a while. Then a single copy tries the
//! multiprocessors again.
//!
//! Pure: times are arguments.
//! Read next: the engine's `staging/kernel.rs`, the caller.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Longest time for a kernel to start. On an idle H200, 83 of 100 kernels started within 64 us and 98 within
/// 128 us, while 16 channels kept the link busy. Beside another process that multiplied small matrices, 7 and
/// 20 of 100 did.
pub const LAUNCH_WAIT: Duration = Duration::from_micros(100);
/// Number of late kernels in a row that counts as contention.
const STREAK: u32 = 6;
/// First pause before the multiprocessors are tried again; each failed try doubles the pause, up to
/// `REST_MAX`.
const REST_MIN: Duration = Duration::from_millis(20);
const REST_MAX: Duration = Duration::from_secs(1);
/// Time without contention after which a new contention counts as another one.
const PEACE: Duration = Duration::from_secs(1);

/// Contention for the multiprocessors of one GPU. Times are nanoseconds of the callers' clock.
#[derive(Debug, Default)]
pub struct SmBackoff {
    /// Time of the next try to use the multiprocessors; 0 without contention.
    until: AtomicU64,
    /// Duration of the last pause in the use of the multiprocessors; the next field is the time at which a
    /// successful try ended the pause.
    rest: AtomicU64,
    left: AtomicU64,
    /// Number of late kernels since the last kernel that started in time.
    streak: AtomicU32,
}

/// A permit to use the multiprocessors; its holder reports the outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permit {
    /// Whether the use is a try that finds out if contention has ended.
    tries: bool,
}

impl Permit {
    /// A permit for a use that has no alternative and never asked for one.
    pub const NEEDED: Permit = Permit { tries: false };
}

fn nanoseconds(time: Duration) -> u64 {
    time.as_nanos() as u64
}

impl SmBackoff {
    /// A permit to use the multiprocessors. `None` during contention, except for one try after each pause.
    pub fn permit(&self, now: Duration) -> Option<Permit> {
        let until = self.until.load(Ordering::Relaxed);
        if until == 0 {
            return Some(Permit { tries: false });
        }
        let now = nanoseconds(now);
        let next = now + self.rest.load(Ordering::Relaxed);
        let mine = until <= now
            && self.until.compare_exchange(until, next, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        mine.then_some(Permit { tries: true })
    }

    /// Reports that work of the permit's holder had not started within [`LAUNCH_WAIT`].
    pub fn kept_waiting(&self, permit: Permit, now: Duration) {
        let crowded = self.until.load(Ordering::Relaxed) != 0;
        // Either the contention is known already, or a single delay may be chance.
        if !permit.tries && (crowded || self.streak.fetch_add(1, Ordering::Relaxed) + 1 < STREAK) {
            return;
        }
        let (now, left) = (nanoseconds(now), self.left.load(Ordering::Relaxed));
        let comes_back = crowded || (left > 0 && now < left + nanoseconds(PEACE));
        let longer = if comes_back { 2 * self.rest.load(Ordering::Relaxed) } else { 0 };
        let rest = longer.clamp(nanoseconds(REST_MIN), nanoseconds(REST_MAX));
        self.rest.store(rest, Ordering::Relaxed);
        self.until.store(now + rest, Ordering::Relaxed);
    }

    /// Forbids the multiprocessors for `rest`, whatever their users report.
    pub fn avoid(&self, now: Duration, rest: Duration) {
        self.rest.store(nanoseconds(rest), Ordering::Relaxed);
        self.until.store(nanoseconds(now + rest), Ordering::Relaxed);
    }

    /// Reports that work of the permit's holder has started in time.
    pub fn served(&self, permit: Permit, now: Duration) {
        if self.streak.load(Ordering::Relaxed) > 0 {
            self.streak.store(0, Ordering::Relaxed);
        }
        if permit.tries {
            self.left.store(nanoseconds(now), Ordering::Relaxed);
            self.until.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Reports as many late kernels as count as contention.
    fn sm_backoff(sm_backoff: &SmBackoff, now: u64) {
        let permits: Vec<_> = (0..STREAK).map(|_| sm_backoff.permit(ms(now)).unwrap()).collect();
        permits.into_iter().for_each(|permit| sm_backoff.kept_waiting(permit, ms(now)));
    }

    #[test]
    fn an_idle_gpu_is_asked_by_everybody_though_one_or_the_other_is_late() {
        let sm_backoff = SmBackoff::default();
        for at in 0..100 {
            let permit = sm_backoff.permit(ms(1)).unwrap();
            match at % STREAK {
                0 => sm_backoff.served(permit, ms(1)),
                _ => sm_backoff.kept_waiting(permit, ms(1)),
            }
        }
    }

    #[test]
    fn after_some_had_to_wait_no_request_is_made_for_a_while_and_then_one_is() {
        let sm_backoff = SmBackoff::default();
        let late: Vec<_> = (0..=STREAK).map(|_| sm_backoff.permit(ms(0)).unwrap()).collect();
        late[1..].iter().for_each(|permit| sm_backoff.kept_waiting(*permit, ms(1)));
        sm_backoff.kept_waiting(late[0], ms(2));
        assert_eq!(sm_backoff.permit(ms(20)), None);
        let tries = sm_backoff.permit(ms(21)).expect("the rest is over, and the last one made it no longer");
        assert_eq!(sm_backoff.permit(ms(21)), None, "one tries");
        sm_backoff.served(tries, ms(21));
        assert!(sm_backoff.permit(ms(22)).is_some() && sm_backoff.permit(ms(22)).is_some());
    }

    #[test]
    fn tries_in_vain_become_rarer_and_never_end() {
        let sm_backoff = SmBackoff::default();
        self::sm_backoff(&sm_backoff, 0);
        let (mut now, mut tries) = (0, Vec::new());
        while now < 10_000 {
            if let Some(permit) = sm_backoff.permit(ms(now)) {
                tries.push(now);
                sm_backoff.kept_waiting(permit, ms(now));
            }
            now += 1;
        }
        assert_eq!(tries[..6], [20, 60, 140, 300, 620, 1260]);
        assert_eq!(tries[7] - tries[6], 1000);
        assert!(tries.len() > 10);
    }

    /// With occasional success the contention would be detected again and again, each time by many late
    /// kernels.
    #[test]
    fn a_crowd_that_comes_back_soon_is_left_alone_for_longer() {
        let sm_backoff = SmBackoff::default();
        self::sm_backoff(&sm_backoff, 0);
        sm_backoff.served(sm_backoff.permit(ms(20)).unwrap(), ms(20));
        self::sm_backoff(&sm_backoff, 30);
        assert_eq!(sm_backoff.permit(ms(69)), None);
        sm_backoff.served(sm_backoff.permit(ms(70)).unwrap(), ms(70));
        self::sm_backoff(&sm_backoff, 2000);
        assert_eq!(sm_backoff.permit(ms(2019)), None);
        assert!(sm_backoff.permit(ms(2020)).is_some());
    }

    #[test]
    fn a_backoff_ends_at_its_time() {
        let sm_backoff = SmBackoff::default();
        let permit = sm_backoff.permit(ms(0)).unwrap();
        sm_backoff.avoid(ms(5), ms(60_000));
        sm_backoff.kept_waiting(permit, ms(6));
        sm_backoff.served(permit, ms(7));
        assert_eq!(sm_backoff.permit(ms(60_004)), None);
        assert!(sm_backoff.permit(ms(60_005)).is_some());
    }

    /// The holder of a try's permit may be dropped before it reports the outcome.
    #[test]
    fn a_try_without_an_outcome_is_made_again_by_another() {
        let sm_backoff = SmBackoff::default();
        self::sm_backoff(&sm_backoff, 0);
        assert!(sm_backoff.permit(ms(20)).is_some());
        assert_eq!(sm_backoff.permit(ms(39)), None);
        assert!(sm_backoff.permit(ms(40)).is_some());
    }
}
