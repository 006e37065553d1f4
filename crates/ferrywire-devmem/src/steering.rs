//! Rules of one NIC's claim, made by whoever sets up a lane, removed by a thread that does nothing else.
//!
//! Whoever changes a NIC holds a lock that all runs on it share, and may have to wait for a run that was stopped. Those who
//! move data do not: they say which rule is not needed any more, and go on. What is to be removed goes before what is
//! made next, so that rules that nobody needs fill no table.
//! Invariant: ended, or dropped, the claim has ended, with all its rules, or has left them to the next start. Read next: `nic.rs`.

use super::nic::{Claim, EndBy, NicError, NotRemoved, Rule};
use ferrywire_proto::limits;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Those of this process.
static ALL: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

pub(super) struct Steering {
    nic: String,
    shared: Arc<Shared>,
    /// `None` once it has ended.
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    claim: Mutex<Option<Claim>>,
    /// Cuts short how long whoever has the claim waits for others at the NIC.
    end_by: EndBy,
    unneeded: Mutex<Unneeded>,
    news: Condvar,
}

#[derive(Default)]
struct Unneeded {
    rules: VecDeque<Rule>,
    /// Those could not be removed when it was tried last, which was told.
    failed: bool,
    /// Nobody steers any more: the claim sees to its rules.
    ended: bool,
}

/// Gives back the queues of all endpoints of this process, and undoes what was set for them. For a process that ends
/// without dropping its endpoints, which threads of its own may hold: their lanes get no more device memory.
pub fn release_nics() {
    let all = std::mem::take(&mut *ALL.lock().unwrap_or_else(PoisonError::into_inner));
    let by = Instant::now() + limits::NIC_LOCK_TIMEOUT;
    all.iter().filter_map(Weak::upgrade).for_each(|shared| shared.end(by));
}

impl Steering {
    pub fn new(nic: &str, claim: Claim) -> std::io::Result<Steering> {
        let end_by = claim.end_by();
        let (claim, unneeded) = (Mutex::new(Some(claim)), Mutex::default());
        let shared = Arc::new(Shared { claim, end_by, unneeded, news: Condvar::new() });
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|each| each.strong_count() > 0);
        all.push(Arc::downgrade(&shared));
        drop(all);
        let of_thread = shared.clone();
        let thread = thread::Builder::new().name("ferrywire-unsteer".into());
        let thread = thread.spawn(move || of_thread.remove_until_ended())?;
        Ok(Steering { nic: nic.to_owned(), shared, thread: Some(thread) })
    }

    /// Makes a rule. May wait for others who change the NIC.
    pub fn steer(&self, local: SocketAddr, remote: SocketAddr) -> Result<Rule, NicError> {
        let mut claim = self.shared.claim();
        // Who has the NIC now has it a moment later, too: nobody waits for that twice.
        self.shared.remove(claim.as_mut(), limits::NIC_LOCK_TIMEOUT)?;
        let gone = || NicError::NoQueues {
            nic: self.nic.clone(),
            why: "the endpoint is closed, and has given its queues back".to_owned(),
        };
        claim.as_mut().ok_or_else(gone)?.steer(local, remote)
    }

    /// Lets a rule be removed, without waiting for that.
    pub fn unsteer_later(&self, rule: Rule) {
        self.shared.unneeded().rules.push_back(rule);
        self.shared.news.notify_one();
    }

    /// Ends the claim. Lanes that still are there get no more device memory. Waits until then, at most, for others who
    /// change the NIC; what is not undone then is left to the next start.
    pub fn end(&self, by: Instant) {
        self.shared.end(by);
    }
}

impl Drop for Steering {
    fn drop(&mut self) {
        self.shared.unneeded().ended = true;
        self.shared.news.notify_one();
        // It holds the claim, which has to end here and now.
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that removes rules panicked");
        }
    }
}

impl Shared {
    fn claim(&self) -> MutexGuard<'_, Option<Claim>> {
        self.claim.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unneeded(&self) -> MutexGuard<'_, Unneeded> {
        self.unneeded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, by: Instant) {
        self.end_by.set(by);
        // Whoever has it gives it up by then.
        drop(self.claim().take());
    }

    /// Removes what is not needed; what cannot be removed is told, and tried again.
    ///
    /// # Errors
    /// Others have the NIC.
    fn remove(&self, claim: Option<&mut Claim>, within: Duration) -> Result<(), NicError> {
        let rules = std::mem::take(&mut self.unneeded().rules);
        let Some(claim) = claim.filter(|_| !rules.is_empty()) else { return Ok(()) };
        let removed = claim.unsteer_all(rules.into(), within);
        let mut unneeded = self.unneeded();
        let failed_before = std::mem::replace(&mut unneeded.failed, removed.is_err());
        let Err(NotRemoved { rules, why, no_lock }) = removed else { return Ok(()) };
        if !failed_before {
            let count = rules.len();
            tracing::warn!(
                "{count} rules that nobody needs are not removed yet, which is tried again: {why}"
            );
        }
        rules.into_iter().rev().for_each(|rule| unneeded.rules.push_front(rule));
        no_lock.map_or(Ok(()), |error| Err(*error))
    }

    fn remove_until_ended(&self) {
        loop {
            let nothing = |unneeded: &mut Unneeded| unneeded.rules.is_empty() && !unneeded.ended;
            let waited = self.news.wait_while(self.unneeded(), nothing);
            if waited.unwrap_or_else(PoisonError::into_inner).ended {
                return;
            }
            // Not for long while it has the claim: whoever steers waits for that.
            let _told = self.remove(self.claim().as_mut(), limits::UNSTEER_INTERVAL);
            let failed = |unneeded: &mut Unneeded| unneeded.failed && !unneeded.ended;
            drop(self.news.wait_timeout_while(self.unneeded(), limits::UNSTEER_INTERVAL, failed));
        }
    }
}
