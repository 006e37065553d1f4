//! One NIC's receive queues, taken for device memory: chosen, set up, bound, flows steered to them, and all of it undone.
//!
//! ```text
//!   Claim::new ── clean up after the dead ── choose queues ── check or change settings
//!     bind     ── a dma-buf takes the payload of the queues
//!     steer    ── a rule per connection                        unsteer
//!   drop       ── rules, binding, settings: undone, in reverse
//! ```
//!
//! Settings of the NIC belong to its owner: they are changed only where that is allowed, and put back as they were. What
//! a killed process leaves is known from its journal, and undone by the next claim of the NIC or by [`clean_up`].
//! Invariant: nothing is changed that is not in the journal; nothing is undone that is not still exactly ours.
//! Read next: `nic/journal.rs`, then `nic/settings.rs`.

mod cleanup;
mod error;
mod journal;
mod kernel;
mod possible;
mod record;
mod settings;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::Duration;

pub use cleanup::{clean_up, clean_up_in};
pub use error::{Missing, NicError};
pub(super) use journal::EndBy;
pub use possible::{Possible, possible};

use super::DevmemError;
use super::errors::{BindCause, Direction};
use crate::sys::flow::Flow;
use crate::sys::netlink::NetlinkError;
use error::queues_in_words;
use ferrywire_proto::limits;
use ferrywire_sys::nics;
use journal::{ClaimFile, Journal};
use kernel::{Host, Kernel};
use record::Claimed;
use settings::{Bench, Others};

/// What is wanted of a NIC.
#[derive(Clone, Copy, Debug)]
pub struct Wish {
    /// Receive queues.
    pub queues: usize,
    /// Settings may be changed, until the claim ends.
    pub allow_nic_setup: bool,
}

/// Queues of one NIC that are ours, until this is dropped.
pub struct Claim {
    nic: String,
    index: u32,
    allow_nic_setup: bool,
    kernel: Box<dyn Kernel>,
    journal: Journal,
    end_by: EndBy,
    /// Says that the claim lives; gone when it has ended.
    file: Option<ClaimFile>,
    /// What the file says.
    claimed: Claimed,
}

/// A rule that sends one connection to a claimed queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    flow: Flow,
    location: u32,
}

/// Rules that are not removed yet.
#[derive(Debug)]
pub(super) struct NotRemoved {
    pub rules: Vec<Rule>,
    pub why: String,
    /// There was no lock, mostly since others have the NIC: what is to be changed there next would wait as long again.
    pub no_lock: Option<Box<NicError>>,
}

impl Rule {
    /// The queue.
    pub fn queue(&self) -> u32 {
        self.flow.queue
    }
}

impl Claim {
    /// Takes the last queues that nobody has, of those first that no other flows are spread over. Cleans up before
    /// what earlier runs have left at this NIC. Needs CAP_NET_ADMIN for anything but being refused.
    pub fn new(nic: &str, wish: &Wish) -> Result<Claim, NicError> {
        Claim::in_directory(&journal::directory(), nic, wish)
    }

    /// The same with the journal in a directory of one's own. All who share a NIC have to use the same one.
    pub fn in_directory(directory: &Path, nic: &str, wish: &Wish) -> Result<Claim, NicError> {
        let index = nics::index(nic).ok_or_else(|| NicError::NoNic { nic: nic.to_owned() })?;
        // Before a word about anything else: most NICs cannot.
        possible::refusal(nic, index)?;
        let kernel = Host::open(nic, index).map_err(|error| {
            NicError::setting(nic, "talk to the kernel about NICs", String::new(), &error)
        })?;
        Claim::with(Box::new(kernel), directory, nic, index, wish)
    }

    fn with(
        mut kernel: Box<dyn Kernel>,
        directory: &Path,
        nic: &str,
        index: u32,
        wish: &Wish,
    ) -> Result<Claim, NicError> {
        let journal = Journal::open(directory, nic, index)?;
        let mut locked = journal.lock()?;
        let mut bench = Bench { nic, kernel: &mut *kernel, journal: &mut locked };
        let cleaned = bench.clean()?;
        let strangers = if cleaned.nobody { bench.strangers() } else { None };
        cleaned.told.iter().chain(&strangers).for_each(|line| tracing::warn!("{line}"));
        let queues = choose(&mut bench, wish.queues, &cleaned.live)?;
        let missing = bench.missing(&queues)?;
        if !wish.allow_nic_setup && !missing.is_empty() {
            return Err(NicError::NotSetUp { nic: nic.to_owned(), missing });
        }
        let claimed = Claimed { queues, rules: Vec::new() };
        let file = bench.journal.add_claim(&claimed)?;
        let off: Vec<u32> = claimed.queues.iter().chain(&cleaned.live).copied().collect();
        if let Err(error) = bench.set_up(&missing, &off) {
            bench.journal.remove_claim(&file.name());
            match bench.release(&cleaned.live, Others::Live) {
                Ok(told) => told.iter().for_each(|line| tracing::warn!("{line}")),
                Err(why) => tracing::warn!("{why}"),
            }
            return Err(error);
        }
        drop(locked);
        let (nic, end_by, file) = (nic.to_owned(), EndBy::default(), Some(file));
        let allow_nic_setup = wish.allow_nic_setup;
        Ok(Claim { nic, index, allow_nic_setup, kernel, journal, end_by, file, claimed })
    }

    /// Binds all queues to a dma-buf: payload of flows that are steered here lands in it. Gives the binding's number.
    pub fn bind(&mut self, dmabuf: BorrowedFd<'_>) -> Result<u32, NicError> {
        let queues = &self.claimed.queues;
        match self.kernel.bind(queues, dmabuf) {
            Ok(binding) => return Ok(binding),
            Err(error) if self.allow_nic_setup && wants_split(&error) => {}
            Err(error) => return Err(DevmemError::bind_rx(&self.nic, queues, &error).into()),
        }
        // Drivers that split by themselves say that it is on, and the kernel wants it asked for.
        let mut locked = self.journal.lock_by(&self.end_by)?;
        Bench { nic: &self.nic, kernel: &mut *self.kernel, journal: &mut locked }.split(true)?;
        let bound = self.kernel.bind(queues, dmabuf);
        bound.map_err(|error| DevmemError::bind_rx(&self.nic, queues, &error).into())
    }

    /// Sends what arrives of one connection to the claimed queue that has the fewest.
    pub fn steer(&mut self, local: SocketAddr, remote: SocketAddr) -> Result<Rule, NicError> {
        let rules = &self.claimed.rules;
        let load = |queue: &&u32| rules.iter().filter(|(flow, _)| flow.queue == **queue).count();
        let queue = self.claimed.queues.iter().min_by_key(load).copied().unwrap_or(0);
        let flow = Flow::new(local, remote, queue).map_err(|error| {
            self.rule_error(&NetlinkError {
                errno: libc::EINVAL,
                text: Some(error.to_string()),
                call: "rule",
                known: None,
            })
        })?;
        self.claimed.rules.push((flow, None));
        let inserted = self.insert(&flow);
        let last = self.claimed.rules.len() - 1;
        match &inserted {
            Ok(location) => self.claimed.rules[last].1 = Some(*location),
            Err(_) => drop(self.claimed.rules.pop()),
        }
        // Where this fails it is still found, by its connection.
        self.write_or_tell();
        inserted.map(|location| Rule { flow, location })
    }

    fn insert(&mut self, flow: &Flow) -> Result<u32, NicError> {
        // Nobody else of us looks for a free place meanwhile.
        let _locked = self.journal.lock_by(&self.end_by)?;
        self.write()?;
        self.kernel.insert(flow).map_err(|error| self.rule_error(&error))
    }

    /// Removes a rule of this claim. What others made of it meanwhile stays.
    pub fn unsteer(&mut self, rule: Rule) {
        if let Err(NotRemoved { why, .. }) = self.unsteer_all(vec![rule], limits::NIC_LOCK_TIMEOUT) {
            tracing::warn!("a rule is not removed before the claim ends: {why}");
        }
    }

    /// Removes rules of this claim; waits for others at the NIC once, and no longer than that.
    pub(super) fn unsteer_all(&mut self, rules: Vec<Rule>, within: Duration) -> Result<(), NotRemoved> {
        let mut locked = match self.journal.lock_within(within, &self.end_by) {
            Ok(locked) => locked,
            Err(error) => {
                return Err(NotRemoved { rules, why: error.to_string(), no_lock: Some(Box::new(error)) });
            }
        };
        let mut bench = Bench { nic: &self.nic, kernel: &mut *self.kernel, journal: &mut locked };
        let (mut left, mut why, mut changed) = (Vec::new(), None, false);
        for rule in rules {
            let ours = (rule.flow, Some(rule.location));
            let Some(at) = self.claimed.rules.iter().position(|known| *known == ours) else { continue };
            match bench.delete_rules(&Claimed { rules: vec![ours], ..Claimed::default() }, &[]) {
                Ok(count) => {
                    if count == 0 {
                        tracing::warn!("NIC {}: a rule of ours was removed or changed by others", self.nic);
                    }
                    self.claimed.rules.swap_remove(at);
                    changed = true;
                }
                Err(error) => {
                    left.push(rule);
                    why.get_or_insert(error);
                }
            }
        }
        drop(locked);
        if changed {
            self.write_or_tell();
        }
        why.map_or(Ok(()), |why| Err(NotRemoved { rules: left, why, no_lock: None }))
    }

    /// Until when it may wait for others who change the NIC, where that has an end.
    pub(super) fn end_by(&self) -> EndBy {
        self.end_by.clone()
    }

    /// The kernel's number of the NIC.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The claimed queues.
    pub fn queues(&self) -> &[u32] {
        &self.claimed.queues
    }

    /// NIC and queues, for reports.
    pub fn describe(&self) -> String {
        format!("{} {}", self.nic, queues_in_words(&self.claimed.queues))
    }

    fn write(&self) -> Result<(), NicError> {
        self.file.as_ref().map_or(Ok(()), |file| self.journal.write_claim(file, &self.claimed))
    }

    fn write_or_tell(&self) {
        if let Err(error) = self.write() {
            tracing::warn!("{error}");
        }
    }

    fn rule_error(&self, error: &NetlinkError) -> NicError {
        let hint = match error.errno {
            libc::ENOSPC => format!("ethtool -u {0} lists the rules; ethtool -U {0} delete N", self.nic),
            _ => String::new(),
        };
        NicError::setting(&self.nic, "steer a connection to a claimed queue", hint, error)
    }

    /// Removes its rules and binding, and puts settings back that no other claim needs. Waits for others at the NIC once;
    /// where they go on for too long only the binding ends, and the rest is left as by a kill.
    fn end(&mut self) -> Result<Vec<String>, NicError> {
        // Kept until the binding has ended: whoever finds a claim dead looks for none.
        let Some(file) = self.file.take() else { return Ok(Vec::new()) };
        let locked = self.journal.lock_by(&self.end_by);
        let mut locked = locked.inspect_err(|_| self.kernel.unbind())?;
        let mut bench = Bench { nic: &self.nic, kernel: &mut *self.kernel, journal: &mut locked };
        let is_clean = delete_rules(&mut bench, std::mem::take(&mut self.claimed.rules));
        bench.kernel.unbind();
        // What could not be undone stays written down: for the next start, as if this process had been killed.
        if is_clean {
            bench.journal.remove_claim(&file.name());
        }
        drop(file);
        let live = bench.live()?;
        let mut told = bench.release(&live, Others::Live)?;
        told.append(&mut bench.journal.told);
        Ok(told)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        match self.end() {
            Ok(told) => told.iter().for_each(|line| tracing::info!("{line}")),
            Err(error) => {
                tracing::warn!("NIC {}: rules and settings are left to the next start: {error}", self.nic)
            }
        }
    }
}

/// Removes rules of a claim; whether they are gone. What others made of them meanwhile stays.
fn delete_rules(bench: &mut Bench<'_, '_>, rules: Vec<(Flow, Option<u32>)>) -> bool {
    let (nic, count) = (bench.nic, rules.len());
    let deleted = bench.delete_rules(&Claimed { rules, ..Claimed::default() }, &[]);
    match deleted {
        Ok(deleted) if deleted < count => {
            tracing::warn!("NIC {nic}: {} rules of ours were removed or changed by others", count - deleted);
        }
        Ok(_) => {}
        Err(ref error) => tracing::warn!("NIC {nic}: not all of {count} rules could be removed: {error}"),
    }
    deleted.is_ok()
}

impl std::fmt::Debug for Claim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Claim({})", self.describe())
    }
}

/// Whether the kernel refuses to bind for want of header split.
fn wants_split(error: &NetlinkError) -> bool {
    matches!(BindCause::of(Direction::Receive, error), BindCause::SplitOff | BindCause::SplitThreshold)
}

/// The last queues that are free: not bound, not another claim's, and one is left for everybody else.
fn choose(bench: &mut Bench<'_, '_>, wanted: usize, live: &[u32]) -> Result<Vec<u32>, NicError> {
    let nic = bench.nic.to_owned();
    let all = bench.kernel.queues().map_err(|error| DevmemError::bind_rx(&nic, &[], &error))?;
    let spread = bench.kernel.spread().unwrap_or_default();
    let is_free = |(queue, state): &(u32, _)| {
        crate::sys::netdev::QueueState::is_free(*state) && !live.contains(queue) && *queue != 0
    };
    let mut free: Vec<u32> = all.iter().filter(|queue| is_free(queue)).map(|(queue, _)| *queue).collect();
    free.sort_unstable_by_key(|queue| (spread.contains(queue), std::cmp::Reverse(*queue)));
    if wanted == 0 || free.len() < wanted {
        let total = all.len();
        let why = match total {
            0 => "it has no receive queues: is it up?".to_owned(),
            _ => format!(
                "{wanted} of its {total} receive queues are wanted and {} are free, queue 0 being everybody's: ask for \
                 fewer, end what has them, or make more (ethtool -L {nic} combined N)",
                free.len()
            ),
        };
        return Err(NicError::NoQueues { nic, why });
    }
    free.truncate(wanted);
    free.sort_unstable();
    Ok(free)
}
