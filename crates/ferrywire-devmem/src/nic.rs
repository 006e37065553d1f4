//! A claim on receive queues of one NIC for device memory: queues are chosen, set up and bound, flows are steered to
//! them, and all changes are undone.
//!
//! ```text
//!   Claim::new ── clean up after dead processes ── choose queues ── check or change settings
//!     bind     ── a dma-buf takes the payload of the queues
//!     steer    ── a rule per connection                        unsteer
//!   drop       ── rules, binding, settings: undone, in reverse
//! ```
//!
//! Settings of the NIC belong to the host's administrator: they are changed only if that is allowed, and are restored.
//! The journal records the changes of a killed process; the next claim of the NIC, or [`clean_up`], undoes them.
//! Invariant: nothing is changed that is not in the journal; nothing is undone that is not still exactly as this
//! project set it.
//! Read next: `nic/journal.rs`, then `nic/settings.rs`.

mod cleanup;
mod directories;
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

pub use cleanup::{CleanUp, clean_up, clean_up_in};
pub use error::{Missing, NicError};
pub(super) use journal::EndBy;
pub use possible::{Possible, possible};
#[cfg(test)]
pub(super) use tests::simulated_claim;

use super::DevmemError;
use super::errors::{BindCause, Direction};
use crate::sys::flow::Flow;
use crate::sys::netlink::NetlinkError;
use error::queues_in_words;
use ferrywire_proto::limits;
use ferrywire_sys::nics;
use journal::{ClaimFile, Journal, Locked};
use kernel::{Host, Kernel};
use record::{Claimed, Settings};
use settings::{Bench, Others};

/// The requirements of a claim on a NIC.
#[derive(Clone, Copy, Debug)]
pub struct Wish {
    /// Number of receive queues to claim.
    pub queues: usize,
    /// Whether settings may be changed until the claim ends.
    pub allow_nic_setup: bool,
}

/// Queues of one NIC, claimed until this value is dropped.
pub struct Claim {
    nic: String,
    index: u32,
    allow_nic_setup: bool,
    kernel: Box<dyn Kernel>,
    journal: Journal,
    end_by: EndBy,
    /// The lock that marks the claim as live; `None` once the claim has ended.
    file: Option<ClaimFile>,
    /// The queues and rules in the claim's file.
    claimed: Claimed,
    /// The settings that the journal had when it was last read.
    settings: Settings,
}

/// A rule that steers one connection to a claimed queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    flow: Flow,
    location: u32,
}

/// Flow rules that could not be removed yet.
#[derive(Debug)]
pub(super) struct NotRemoved {
    pub rules: Vec<Rule>,
    pub why: String,
    /// The error of a journal that could not be locked, usually because another process uses the NIC: the next
    /// change of that NIC would wait as long again.
    pub no_lock: Option<Box<NicError>>,
}

impl Rule {
    /// The claimed queue to which the rule steers.
    pub fn queue(&self) -> u32 {
        self.flow.queue
    }
}

impl Claim {
    /// Claims the last free queues of a NIC, preferably queues over which no other flows are spread. First undoes what
    /// dead processes have left at this NIC. Needs CAP_NET_ADMIN.
    ///
    /// # Errors
    /// The NIC does not support devmem TCP, has too few free queues, or needs settings that must not be changed.
    pub fn new(nic: &str, wish: &Wish) -> Result<Claim, NicError> {
        Claim::in_directory(&directories::writable(), nic, wish)
    }

    /// Like [`Claim::new`], with the journal in another directory. All processes that share a NIC must use one
    /// directory.
    pub fn in_directory(directory: &Path, nic: &str, wish: &Wish) -> Result<Claim, NicError> {
        let index = nics::index(nic).ok_or_else(|| NicError::NoNic { nic: nic.to_owned() })?;
        // Support is checked first, because most NICs have none. Where that is unknown, binding shows it.
        possible::is_supported(nic, index)?;
        let kernel = Host::open(nic, index).map_err(|error| {
            NicError::setting(nic, "open the kernel's interfaces for NICs", String::new(), &error)
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
        cleaned.reported.iter().chain(&strangers).for_each(|line| tracing::warn!("{line}"));
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
                Ok(released) => released.reported.iter().for_each(|line| tracing::warn!("{line}")),
                Err(why) => tracing::warn!("{why}"),
            }
            return Err(error);
        }
        let mut settings = Settings::default();
        remember(&mut settings, &mut locked);
        drop(locked);
        let (nic, end_by, file) = (nic.to_owned(), EndBy::default(), Some(file));
        let allow_nic_setup = wish.allow_nic_setup;
        Ok(Claim { nic, index, allow_nic_setup, kernel, journal, end_by, file, claimed, settings })
    }

    /// Binds all claimed queues to a dma-buf, into which the payload of steered flows then goes. Returns the kernel's
    /// id of the binding.
    pub fn bind(&mut self, dmabuf: BorrowedFd<'_>) -> Result<u32, NicError> {
        let queues = &self.claimed.queues;
        match self.kernel.bind(queues, dmabuf) {
            Ok(binding) => return Ok(binding),
            Err(error) if self.allow_nic_setup && wants_split(&error) => {}
            Err(error) => return Err(DevmemError::bind_rx(&self.nic, queues, &error).into()),
        }
        // Drivers that split headers by themselves report header split as on, but the kernel requires that it was
        // requested.
        self.keep_journal(limits::NIC_LOCK_TIMEOUT)?;
        let mut locked = self.journal.lock_by(&self.end_by)?;
        let split = Bench { nic: &self.nic, kernel: &mut *self.kernel, journal: &mut locked }.split(true);
        remember(&mut self.settings, &mut locked);
        split?;
        let queues = &self.claimed.queues;
        let bound = self.kernel.bind(queues, dmabuf);
        bound.map_err(|error| DevmemError::bind_rx(&self.nic, queues, &error).into())
    }

    /// Steers the packets of one connection to the claimed queue with the fewest connections.
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
        // If writing fails, a later start still finds the rule by its connection.
        self.write_or_tell();
        inserted.map(|location| Rule { flow, location })
    }

    fn insert(&mut self, flow: &Flow) -> Result<u32, NicError> {
        self.keep_journal(limits::NIC_LOCK_TIMEOUT)?;
        // The lock keeps other claims from choosing the same location.
        let mut locked = self.journal.lock_by(&self.end_by)?;
        remember(&mut self.settings, &mut locked);
        self.write()?;
        self.kernel.insert(flow).map_err(|error| self.rule_error(&error))
    }

    /// Removes a rule of this claim. A rule that others have changed meanwhile stays.
    pub fn unsteer(&mut self, rule: Rule) {
        if let Err(NotRemoved { why, .. }) = self.unsteer_all(vec![rule], limits::NIC_LOCK_TIMEOUT) {
            tracing::warn!("NIC {}: a flow rule stays until the claim ends: {why}", self.nic);
        }
    }

    /// Removes rules of this claim; waits for the journal's lock at most `within`, and as long again if the journal has to be
    /// made again.
    pub(super) fn unsteer_all(&mut self, rules: Vec<Rule>, within: Duration) -> Result<(), NotRemoved> {
        let kept = self.keep_journal(within);
        let mut locked = match kept.and_then(|()| self.journal.lock_within(within, &self.end_by)) {
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
                        tracing::warn!(
                            "NIC {}: another program removed or changed a flow rule of this claim",
                            self.nic
                        );
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

    /// The latest time until which the claim may wait for other processes, once that time is set.
    pub(super) fn end_by(&self) -> EndBy {
        self.end_by.clone()
    }

    /// The kernel's index of the NIC.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Numbers of the claimed queues.
    pub fn queues(&self) -> &[u32] {
        &self.claimed.queues
    }

    /// The NIC and its claimed queues as text for reports.
    pub fn describe(&self) -> String {
        format!("{} {}", self.nic, queues_in_words(&self.claimed.queues))
    }

    /// Makes the journal again if another program has deleted it while the claim lives.
    fn keep_journal(&mut self, within: Duration) -> Result<(), NicError> {
        if !self.file.as_ref().is_some_and(ClaimFile::is_gone) {
            return Ok(());
        }
        self.journal.make_again()?;
        let mut locked = self.journal.lock_within(within, &self.end_by)?;
        // Another claim may have made the journal again before.
        let settings = locked.settings(true)?.preceded_by(&self.settings);
        locked.write_settings(&settings)?;
        self.file = Some(locked.add_claim(&self.claimed)?);
        self.settings = settings;
        tracing::warn!(
            "NIC {}: made the journal of its settings again: another program has deleted it",
            self.nic
        );
        Ok(())
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

    /// Removes the claim's rules and binding, and restores settings that no other claim needs. If the journal's lock cannot
    /// be had in time, only the binding ends and the rest is left as after a kill.
    fn end(&mut self) -> Result<Vec<String>, NicError> {
        // The claim's lock is kept until the binding has ended: a process that finds a dead claim expects no
        // binding of it.
        let kept = self.keep_journal(limits::NIC_LOCK_TIMEOUT);
        let Some(file) = self.file.take() else { return Ok(Vec::new()) };
        let locked = kept.and_then(|()| self.journal.lock_by(&self.end_by));
        let mut locked = locked.inspect_err(|_| self.kernel.unbind())?;
        let mut bench = Bench { nic: &self.nic, kernel: &mut *self.kernel, journal: &mut locked };
        let is_clean = delete_rules(&mut bench, std::mem::take(&mut self.claimed.rules));
        bench.kernel.unbind();
        // Changes that could not be undone stay recorded, as if this process had been killed, and the next start
        // undoes them.
        if is_clean {
            bench.journal.remove_claim(&file.name());
        }
        drop(file);
        let live = bench.live()?;
        let mut reported = bench.release(&live, Others::Live)?.reported;
        reported.append(&mut bench.journal.reported);
        Ok(reported)
    }
}

/// Keeps the journal's settings in memory, should another program delete the journal. If they cannot be read, the last
/// known ones stay; so they do if there are none, since a claim's settings stay recorded while it lives: the journal is being
/// deleted.
fn remember(settings: &mut Settings, locked: &mut Locked<'_>) {
    if let Ok(recorded) = locked.settings(true)
        && !recorded.is_empty()
    {
        *settings = recorded;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        match self.end() {
            Ok(reported) => reported.iter().for_each(|line| tracing::info!("{line}")),
            Err(error) => {
                tracing::warn!(
                    "NIC {}: flow rules and settings are not restored; the next start tries again: {error}",
                    self.nic
                )
            }
        }
    }
}

/// Removes flow rules of a claim; returns whether all are removed. Rules that others have changed meanwhile stay.
fn delete_rules(bench: &mut Bench<'_, '_>, rules: Vec<(Flow, Option<u32>)>) -> bool {
    let (nic, count) = (bench.nic, rules.len());
    let deleted = bench.delete_rules(&Claimed { rules, ..Claimed::default() }, &[]);
    match deleted {
        Ok(deleted) if deleted < count => {
            tracing::warn!(
                "NIC {nic}: another program removed or changed {} flow rules of this claim",
                count - deleted
            );
        }
        Ok(_) => {}
        Err(ref error) => tracing::warn!(
            "NIC {nic}: some of {count} flow rules could not be removed; the next start tries again: {error}"
        ),
    }
    deleted.is_ok()
}

impl std::fmt::Debug for Claim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Claim({})", self.describe())
    }
}

/// Whether the kernel refuses to bind because header split is missing.
fn wants_split(error: &NetlinkError) -> bool {
    matches!(BindCause::of(Direction::Receive, error), BindCause::SplitOff | BindCause::SplitThreshold)
}

/// Chooses the last free queues: not bound, not of another claim, and one queue is left for all other flows.
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
            0 => format!("the NIC has no receive queues: bring it up (ip link set {nic} up)"),
            _ => format!(
                "{wanted} free receive queues are needed and {} of {total} are free (queue 0 stays for other flows): use fewer \
                 queues, end the programs that use them, or add queues (ethtool -L {nic} combined N)",
                free.len()
            ),
        };
        return Err(NicError::NoQueues { nic, why });
    }
    free.truncate(wanted);
    free.sort_unstable();
    Ok(free)
}
