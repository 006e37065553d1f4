//! The rules of one NIC's claim: made by threads that set up lanes, removed by a thread that does nothing else.
//!
//! A change of a NIC needs a lock that all processes share, and may have to wait for a stopped process. Threads
//! that move data do not wait: they name rules that are not needed any more and continue. Pending removals are made
//! before the next rule, so that unneeded rules do not fill the NIC's table.
//! Invariant: after `end` or drop, the claim has ended with all its rules, or has left them to the next start. Read
//! next: `nic.rs`.

use super::nic::{Claim, EndBy, NicError, NotRemoved, Rule};
use ferrywire_proto::limits;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The steerings of all NICs that this process has claimed queues of.
static ALL: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

pub(super) struct Steering {
    nic: String,
    shared: Arc<Shared>,
    /// The thread that removes rules; `None` once it has ended.
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    claim: Mutex<Option<Claim>>,
    /// Limits how long a user of the claim waits for other processes.
    end_by: EndBy,
    unneeded: Mutex<Unneeded>,
    news: Condvar,
}

#[derive(Default)]
struct Unneeded {
    rules: VecDeque<Rule>,
    /// Whether the last removal failed, which the log already says.
    failed: bool,
    /// Whether steering has ended; the claim then removes its rules.
    ended: bool,
}

/// Returns the queues of all endpoints of this process, and undoes the changes for them. For a process that ends
/// without dropping its endpoints, for example because its threads keep them: their lanes get no more device
/// memory.
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

    /// Makes a flow rule. May wait for other processes that change the NIC.
    pub fn steer(&self, local: SocketAddr, remote: SocketAddr) -> Result<Rule, NicError> {
        let mut claim = self.shared.claim();
        // If another process uses the NIC now, it probably still does a moment later: wait only once.
        self.shared.remove(claim.as_mut(), limits::NIC_LOCK_TIMEOUT)?;
        let gone = || NicError::NoQueues {
            nic: self.nic.clone(),
            why: "the endpoint is closed and has released its queues".to_owned(),
        };
        claim.as_mut().ok_or_else(gone)?.steer(local, remote)
    }

    /// Queues a flow rule for removal, without waiting.
    pub fn unsteer_later(&self, rule: Rule) {
        self.shared.unneeded().rules.push_back(rule);
        self.shared.news.notify_one();
    }

    /// Ends the claim. Lanes that still exist get no more device memory. Waits for other processes that change the NIC,
    /// until `by` at most; changes that are not undone by then are left to the next start.
    pub fn end(&self, by: Instant) {
        self.shared.end(by);
    }
}

impl Drop for Steering {
    fn drop(&mut self) {
        self.shared.unneeded().ended = true;
        self.shared.news.notify_one();
        // The thread is ended first, because it holds the claim that has to end now.
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!(
                "NIC {}: the thread that removes flow rules panicked: the rules stay until the next start of ferrywire",
                self.nic
            );
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
        // If another thread uses the claim now, it releases the claim before `by`.
        drop(self.claim().take());
    }

    /// Removes flow rules that are not needed. Failures are logged, and tried again.
    ///
    /// # Errors
    /// Another process uses the NIC, so its lock cannot be taken.
    fn remove(&self, claim: Option<&mut Claim>, within: Duration) -> Result<(), NicError> {
        let rules = std::mem::take(&mut self.unneeded().rules);
        let Some(claim) = claim.filter(|_| !rules.is_empty()) else { return Ok(()) };
        let removed = claim.unsteer_all(rules.into(), within);
        let mut unneeded = self.unneeded();
        let failed_before = std::mem::replace(&mut unneeded.failed, removed.is_err());
        let Err(NotRemoved { rules, why, no_lock }) = removed else { return Ok(()) };
        if !failed_before {
            let count = rules.len();
            tracing::warn!("cannot remove {count} unused flow rules yet, will retry: {why}");
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
            // The wait is short while this thread holds the claim, because callers of `steer` wait for it.
            let _told = self.remove(self.claim().as_mut(), limits::UNSTEER_INTERVAL);
            let failed = |unneeded: &mut Unneeded| unneeded.failed && !unneeded.ended;
            drop(self.news.wait_timeout_while(self.unneeded(), limits::UNSTEER_INTERVAL, failed));
        }
    }
}
