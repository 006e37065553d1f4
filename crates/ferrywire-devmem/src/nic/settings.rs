//! Settings of a NIC that claims share: which are needed, how they are changed, and how they are restored.
//!
//! The first claim changes header split, its threshold and ntuple; the last claim restores them. The spread keeps other
//! flows off the queues of all live claims, so it changes with each claim.
//! Invariant: the original value of a setting is in the journal before the first change; a setting is restored only if
//! it still has the value that claims gave it.
//! Read next: `cleanup.rs`, for claims whose process was killed.

use std::thread;
use std::time::{Duration, Instant};

use super::error::{Missing, NicError, ntuple_command, split_command};
use super::journal::Locked;
use super::kernel::Kernel;
use super::record::{Settings, Spread};
use crate::sys::ethtool::{Feature, Rings, Split};
use crate::sys::flow::Flow;
use crate::sys::netdev::QueueState;
use crate::sys::netlink::NetlinkError;

/// Time within which the kernel releases the bindings of a killed process.
const UNBIND_TIMEOUT: Duration = Duration::from_secs(5);
const UNBIND_INTERVAL: Duration = Duration::from_millis(20);

/// The result of a release of settings.
#[derive(Debug, Default)]
pub(super) struct Released {
    pub reported: Vec<String>,
    /// Whether a later start has to try again.
    pub failed: bool,
}

/// A NIC with its locked journal, whose settings may be changed.
pub(super) struct Bench<'a, 'j> {
    pub nic: &'a str,
    pub kernel: &'a mut dyn Kernel,
    pub journal: &'a mut Locked<'j>,
}

impl Bench<'_, '_> {
    /// The settings that must be changed for claims of these queues, as far as the kernel reports them.
    ///
    /// # Errors
    /// A setting cannot be read, or flow rules are off and cannot be turned on.
    pub fn missing(&mut self, queues: &[u32]) -> Result<Vec<Missing>, NicError> {
        let mut missing = Vec::new();
        if let Some(is) = split_is(self.rings()?) {
            missing.push(Missing::Split { is });
        }
        let ntuple = self.ntuple()?;
        if !ntuple.can_be_on() {
            return Err(NicError::NoFlowRules { nic: self.nic.to_owned() });
        }
        if !ntuple.on {
            missing.push(Missing::Ntuple);
        }
        let spread = self.spread()?;
        if spread.iter().any(|queue| queues.contains(queue)) {
            let others = queues.iter().copied().min().unwrap_or(0);
            missing.push(Missing::Spread { queues: queues.to_vec(), others });
        }
        Ok(missing)
    }

    /// Changes the missing settings of the NIC.
    pub fn set_up(&mut self, missing: &[Missing], queues: &[u32]) -> Result<(), NicError> {
        for one in missing {
            match one {
                Missing::Split { .. } => self.split(false)?,
                Missing::Ntuple => self.switch_ntuple_on()?,
                Missing::Spread { .. } => self.keep_off(queues)?,
            }
        }
        Ok(())
    }

    /// Turns header split on, with threshold 0. With `even_if_on` it is set even if it is reported as on: the kernel
    /// requires that it was requested, also where a driver splits by itself.
    pub fn split(&mut self, even_if_on: bool) -> Result<(), NicError> {
        let is = self.rings()?;
        let set = Rings {
            split: (even_if_on || is.split == Some(Split::Off)).then_some(Split::On),
            threshold_bytes: is.threshold_bytes.filter(|bytes| *bytes > 0).map(|_| 0),
        };
        // A driver that split headers without a request was in automatic mode.
        let split = set.split.map(|_| if is.split == Some(Split::Off) { Split::Off } else { Split::Auto });
        let mut settings = self.journal.settings(true)?;
        let before = &mut settings.rings;
        before.split = before.split.or(split);
        before.threshold_bytes = before.threshold_bytes.or(set.threshold_bytes.and(is.threshold_bytes));
        self.journal.write_settings(&settings)?;
        let done = self.kernel.set_rings(set);
        done.map_err(|error| self.refused("turn header split on", split_command(self.nic), &error))?;
        match split_is(self.rings()?) {
            None => Ok(()),
            Some(is) => Err(self.unheard("header split", is, split_command(self.nic))),
        }
    }

    fn switch_ntuple_on(&mut self) -> Result<(), NicError> {
        let mut settings = self.journal.settings(true)?;
        settings.ntuple_was_off = true;
        self.journal.write_settings(&settings)?;
        let set = self.kernel.set_ntuple(true);
        set.map_err(|error| self.refused("turn flow rules (ntuple) on", ntuple_command(self.nic), &error))?;
        if self.ntuple()?.on { Ok(()) } else { Err(self.unheard("ntuple", "off", ntuple_command(self.nic))) }
    }

    /// Keeps other flows off the claimed queues. Queues that are still bound, as those of a killed process may be, are
    /// not added to the spread either.
    pub fn keep_off(&mut self, queues: &[u32]) -> Result<(), NicError> {
        let is = self.spread()?;
        let mut settings = self.journal.settings(true)?;
        let known = settings.spread.take().filter(|spread| spread.ours.contains(&is));
        // A spread that another process has set meanwhile becomes the new original value.
        let mut spread = known.unwrap_or_else(|| Spread { before: is.clone(), ours: Vec::new() });
        let bound = self.added_and_bound(&spread.before, &is);
        let bound =
            bound.map_err(|error| self.refused("read the queues' bindings", String::new(), &error))?;
        let wanted = without(&spread.before, &[queues, &bound].concat());
        if wanted == is {
            return Ok(());
        }
        spread.ours.retain(|ours| *ours == is);
        spread.ours.push(wanted.clone());
        settings.spread = Some(spread);
        self.journal.write_settings(&settings)?;
        let hint = format!("ethtool -X {} equal {}", self.nic, queues.iter().min().unwrap_or(&1));
        let set = self.kernel.set_spread(&wanted);
        set.map_err(|error| {
            self.refused("keep other flows (RSS) off the claimed queues", hint.clone(), &error)
        })?;
        if self.spread()? == wanted {
            Ok(())
        } else {
            Err(self.unheard("the RSS table", "another one", hint))
        }
    }

    /// Keeps other flows off the queues of live claims only, unless another process has changed the spread meanwhile.
    fn narrow(&mut self, spread: &Spread, live: &[u32]) -> Result<(), NicError> {
        if spread.ours.contains(&self.spread()?) { self.keep_off(live) } else { Ok(()) }
    }

    /// After a claim has ended: keeps the settings that live claims need, or restores all. Returns messages about the
    /// changes.
    ///
    /// # Errors
    /// The original values cannot be read; nothing is restored.
    pub fn release(&mut self, live: &[u32], others: Others) -> Result<Released, NicError> {
        let settings = self.journal.settings(!live.is_empty())?;
        if settings.is_empty() {
            return Ok(Released::default());
        }
        if !live.is_empty() {
            let kept = settings.spread.map_or(Ok(()), |spread| self.narrow(&spread, live));
            let reported: Vec<String> = kept.err().iter().map(ToString::to_string).collect();
            return Ok(Released { failed: !reported.is_empty(), reported });
        }
        Ok(self.put_back(settings, others))
    }

    fn put_back(&mut self, mut settings: Settings, others: Others) -> Released {
        let mut reported = Vec::new();
        let wait_until = (others == Others::MayBeDying).then(|| Instant::now() + UNBIND_TIMEOUT);
        if let Some(spread) = settings.spread.take() {
            let done = self.put_spread_back(&spread, wait_until);
            settings.spread = self.tell(&mut reported, "the RSS table", done).then_some(spread);
        }
        if settings.ntuple_was_off {
            let done = self.put_ntuple_back();
            settings.ntuple_was_off = self.tell(&mut reported, "the flow rules setting (ntuple)", done);
        }
        if settings.rings != Rings::default() {
            let done = self.put_rings_back(settings.rings, wait_until);
            if !self.tell(&mut reported, "header split", done) {
                settings.rings = Rings::default();
            }
        }
        let mut failed = !settings.is_empty();
        if let Err(error) = self.journal.write_settings(&settings) {
            reported.push(error.to_string());
            failed = true;
        }
        Released { reported, failed }
    }

    /// Adds the message about a restored setting to `reported`; returns whether a later start has to try again.
    fn tell(&self, reported: &mut Vec<String>, what: &str, done: Result<Back, NetlinkError>) -> bool {
        let nic = self.nic;
        let later = matches!(done, Err(_) | Ok(Back::Later(_)));
        reported.push(match &done {
            Ok(Back::Done) => format!("NIC {nic}: restored {what}"),
            Ok(Back::Left(why)) => format!("NIC {nic}: {what} is not restored: {why}"),
            Ok(Back::Later(until)) => {
                format!("NIC {nic}: {what} is not restored yet: {until}; the next start tries again")
            }
            Err(error) => {
                format!("NIC {nic}: cannot restore {what}: {error}; the next start tries again")
            }
        });
        later
    }

    fn put_spread_back(
        &mut self,
        spread: &Spread,
        wait_until: Option<Instant>,
    ) -> Result<Back, NetlinkError> {
        loop {
            let is = self.kernel.spread()?;
            if is == spread.before {
                return Ok(Back::Done);
            }
            if !spread.ours.contains(&is) {
                return Ok(Back::Left("another program has changed it"));
            }
            // Other flows on a bound queue would arrive in device memory, where their programs cannot read them.
            if self.added_and_bound(&spread.before, &is)?.is_empty() {
                break;
            }
            if wait_until.is_none_or(|until| Instant::now() >= until) {
                return Ok(Back::Later("its queues are still bound"));
            }
            thread::sleep(UNBIND_INTERVAL);
        }
        // If the original spread was the kernel's default, the default is restored, so that it follows the number of
        // queues again.
        let queues = self.kernel.queues()?.len() as u32;
        let is_default =
            queues > 0 && (0..).zip(&spread.before).all(|(i, queue): (u32, _)| i % queues == *queue);
        if is_default && self.kernel.set_spread(&[]).is_ok() && self.kernel.spread()? == spread.before {
            return Ok(Back::Done);
        }
        self.kernel.set_spread(&spread.before).map(|()| Back::Done)
    }

    fn put_ntuple_back(&mut self) -> Result<Back, NetlinkError> {
        if !self.kernel.ntuple()?.on {
            return Ok(Back::Done);
        }
        let left = self.kernel.rules()?;
        match self.all_known(&left)? {
            Some(true) => {}
            Some(false) => return Ok(Back::Left("another program has flow rules, which need it")),
            None => return Ok(Back::Later("it is unknown which program made the remaining flow rules")),
        }
        if !left.is_empty() {
            return Ok(Back::Later("flow rules of earlier claims remain"));
        }
        self.kernel.set_ntuple(false).map(|()| Back::Done)
    }

    /// Whether all flow rules at these locations belong to recorded claims; `None` if the rules cannot be read.
    fn all_known(&mut self, places: &[u32]) -> Result<Option<bool>, NetlinkError> {
        if places.is_empty() {
            return Ok(Some(true));
        }
        let Ok(claims) = self.journal.claims() else { return Ok(None) };
        let claims = claims.into_iter().filter_map(|claim| claim.claimed);
        let known: Vec<Flow> = claims.flat_map(|claim| claim.rules).map(|(flow, _)| flow).collect();
        for place in places {
            if !self.flow_at(*place)?.is_some_and(|flow| known.contains(&flow)) {
                return Ok(Some(false));
            }
        }
        Ok(Some(true))
    }

    fn put_rings_back(&mut self, before: Rings, wait_until: Option<Instant>) -> Result<Back, NetlinkError> {
        let is = self.kernel.rings()?;
        let is_before = Rings {
            split: before.split.and(is.split),
            threshold_bytes: before.threshold_bytes.and(is.threshold_bytes),
        };
        if is_before == before {
            return Ok(Back::Done);
        }
        if split_is(is_before).is_some() {
            return Ok(Back::Left("another program has changed it"));
        }
        loop {
            // Bindings of a process that was just killed may still be ending, and until they have ended the kernel
            // refuses the change with `EINVAL`. Any other number has a cause that waiting does not remove.
            let may_wait = wait_until.is_some_and(|until| Instant::now() < until) && self.is_bound();
            match self.kernel.set_rings(before) {
                Ok(()) => return Ok(Back::Done),
                Err(error) if may_wait && error.errno == libc::EINVAL => {
                    thread::sleep(UNBIND_INTERVAL);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether any queue of the NIC has memory bound to it.
    fn is_bound(&mut self) -> bool {
        self.kernel.queues().is_ok_and(|queues| queues.iter().any(|(_, state)| has_memory(*state)))
    }

    /// The queues with memory bound to them that the spread `wanted` has and the spread `is` has not.
    fn added_and_bound(&mut self, wanted: &[u32], is: &[u32]) -> Result<Vec<u32>, NetlinkError> {
        let mut queues = self.kernel.queues()?;
        queues.retain(|(queue, state)| has_memory(*state) && wanted.contains(queue) && !is.contains(queue));
        Ok(queues.into_iter().map(|(queue, _)| queue).collect())
    }

    fn rings(&mut self) -> Result<Rings, NicError> {
        match self.kernel.rings() {
            // The driver has no ring settings; a later bind shows whether that is a problem.
            Err(error) if error.errno == libc::EOPNOTSUPP => Ok(Rings::default()),
            rings => {
                rings.map_err(|error| self.refused("read the header split setting", String::new(), &error))
            }
        }
    }

    fn ntuple(&mut self) -> Result<Feature, NicError> {
        let feature = self.kernel.ntuple();
        feature.map_err(|error| self.refused("read the features", String::new(), &error))
    }

    fn spread(&mut self) -> Result<Vec<u32>, NicError> {
        let spread = self.kernel.spread();
        spread.map_err(|error| self.refused("read the RSS table", String::new(), &error))
    }

    fn refused(&self, what: &str, hint: String, error: &NetlinkError) -> NicError {
        NicError::setting(self.nic, what, hint, error)
    }

    /// The error for a change that the kernel accepted without effect.
    fn unheard(&self, what: &str, is: &str, hint: String) -> NicError {
        let text = Some(format!("the driver accepted the change without effect: {what} is {is}"));
        NicError::setting(
            self.nic,
            "change a setting",
            hint,
            &NetlinkError { errno: libc::EIO, text, call: "read back", known: None },
        )
    }
}

/// Other processes that may have memory bound to the NIC's queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Others {
    /// A process that uses the NIC may have been killed a moment ago.
    MayBeDying,
    /// All other processes that use the NIC are live.
    Live,
}

/// The result of restoring a setting.
enum Back {
    Done,
    Left(&'static str),
    /// The setting cannot be restored yet, for this reason.
    Later(&'static str),
}

/// Whether memory is bound to a queue in this state.
fn has_memory(state: QueueState) -> bool {
    state.dmabuf.is_some() || state.io_uring
}

/// Why the ring settings do not suit devmem TCP; `None` if they do, as far as is known.
fn split_is(rings: Rings) -> Option<&'static str> {
    match rings {
        Rings { split: Some(Split::Off), .. } => Some("it is off"),
        Rings { threshold_bytes: Some(1..), .. } => Some("its threshold is not 0"),
        _ => None,
    }
}

/// A spread without some queues: their entries go to the other queues of the spread in turn, or else to the first
/// queue that is not in `queues`.
pub(super) fn without(spread: &[u32], queues: &[u32]) -> Vec<u32> {
    let mut others: Vec<u32> = spread.iter().copied().filter(|queue| !queues.contains(queue)).collect();
    others.sort_unstable();
    others.dedup();
    if others.is_empty() {
        others.extend((0..).find(|queue| !queues.contains(queue)));
    }
    let mut turn = others.iter().cycle();
    let mut next = || turn.next().copied().unwrap_or(0);
    spread.iter().map(|queue| if queues.contains(queue) { next() } else { *queue }).collect()
}
