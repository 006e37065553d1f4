//! Undoes the changes that dead processes have left at NICs.
//!
//! Invariant: a rule is removed only if the rule at that location is still exactly the dead claim's. Rules of others
//! and of live claims stay.
//! Read next: `../nic.rs`, for claims.

use std::io;
use std::path::Path;

use super::directories::{self, Directory};
use super::error::{NicError, queues_in_words};
use super::journal::{self, Journal};
use super::kernel::Host;
use super::record::Claimed;
use super::settings::{Bench, Others};
use crate::sys::flow::Flow;
use crate::sys::netlink::NetlinkError;
use ferrywire_sys::nics;

/// The result of a clean-up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CleanUp {
    /// What was undone, and what could not be, as lines of text.
    pub reported: Vec<String>,
    /// Whether changes of dead processes may be left.
    pub failed: bool,
}

impl CleanUp {
    fn fail(&mut self, why: String) {
        self.reported.push(why);
        self.failed = true;
    }
}

/// Undoes the changes that dead processes have left in this network namespace. Changes that only another user may undo
/// are reported and count as left.
/// For a process that starts, or a diagnosis: every claim does the same for its own NIC.
pub fn clean_up() -> CleanUp {
    clean_up_all(&directories::all())
}

/// Like [`clean_up`], for journals in another directory.
pub fn clean_up_in(directory: &Path) -> CleanUp {
    clean_up_all(&[Directory { path: directory.to_owned(), is_ours: true }])
}

pub(super) fn clean_up_all(directories: &[Directory]) -> CleanUp {
    let mut done = CleanUp::default();
    for Directory { path: directory, is_ours } in directories {
        let cleaned = match directories::other_owner(directory) {
            Ok(owner) if !is_ours || owner.is_some() => report_left(directory, owner, &mut done),
            // Reading a folder that cannot be entered fails below, with the reason.
            Err(_) if !is_ours => report_left(directory, None, &mut done),
            Ok(_) | Err(_) => clean_directory(directory, &mut done),
        };
        if let Err(error) = cleaned {
            done.fail(not_read(directory, &error));
        }
    }
    done.reported.iter().for_each(|line| tracing::warn!("{line}"));
    done
}

pub(super) fn not_read(directory: &Path, error: &io::Error) -> String {
    let fix = if error.kind() == io::ErrorKind::PermissionDenied { ": run as root" } else { "" };
    format!("cannot read the records of earlier runs in {}: {error}{fix}", directory.display())
}

fn clean_directory(directory: &Path, done: &mut CleanUp) -> io::Result<()> {
    for nic in journal::nics(directory)? {
        if nics::index(&nic).is_none() {
            done.reported.extend(
                journal::forget(directory, &nic)
                    .then(|| format!("NIC {nic} is gone: removed the records of earlier runs")),
            );
            continue;
        }
        match clean_nic(directory, &nic) {
            Ok(cleaned) => {
                done.reported.extend(cleaned.reported);
                done.failed |= cleaned.failed;
            }
            Err(error) => done.fail(format!("NIC {nic}: cannot undo the changes of earlier runs: {error}")),
        }
    }
    Ok(())
}

/// Reports what dead processes have left, without changing anything: see the invariant of `directories.rs`. `user` is the
/// directory's owner, if that is known and another one.
pub(super) fn report_left(directory: &Path, user: Option<u32>, done: &mut CleanUp) -> io::Result<()> {
    let whose = user.map_or_else(|| "an earlier run".to_owned(), |user| format!("a run of user {user}"));
    for nic in journal::nics(directory)? {
        if nics::index(&nic).is_some() && journal::is_left(directory, &nic)? {
            done.fail(format!(
                "NIC {nic}: {whose} has left changes, recorded in {}: run ferrywire topo --clean-up as that user",
                directory.display()
            ));
        }
    }
    Ok(())
}

fn clean_nic(directory: &Path, nic: &str) -> Result<Cleaned, String> {
    let index = nics::index(nic).ok_or("the NIC is gone")?;
    let journal = Journal::open(directory, nic, index).map_err(|error| error.to_string())?;
    let mut kernel = Host::open(nic, index).map_err(|error| error.to_string())?;
    let mut locked = journal.lock().map_err(|error| error.to_string())?;
    let mut bench = Bench { nic, kernel: &mut kernel, journal: &mut locked };
    bench.clean().map_err(|error| error.to_string())
}

/// The contents of a journal after its clean-up.
#[derive(Debug, Default)]
pub(super) struct Cleaned {
    pub reported: Vec<String>,
    /// Whether a change of a dead claim is left.
    pub failed: bool,
    /// Numbers of the queues of live claims.
    pub live: Vec<u32>,
    /// Whether no claim was recorded, live or dead.
    pub nobody: bool,
}

impl Bench<'_, '_> {
    /// Undoes the changes that dead processes have left. Does nothing if the records cannot be read, and keeps the
    /// changes that live claims need.
    pub fn clean(&mut self) -> Result<Cleaned, NicError> {
        let mut cleaned = Cleaned::default();
        let found = self.journal.claims()?;
        // The settings are read before anything is undone: without them the clean-up could only be partial.
        self.journal.settings(found.iter().any(|claim| claim.dead.is_none()))?;
        cleaned.nobody = found.is_empty();
        let live = found.iter().filter(|claim| claim.dead.is_none());
        let live: Vec<&Claimed> = live.filter_map(|claim| claim.claimed.as_ref()).collect();
        cleaned.live = live.iter().flat_map(|claim| claim.queues.iter().copied()).collect();
        let in_use: Vec<Flow> =
            live.iter().flat_map(|claim| claim.rules.iter().map(|(flow, _)| *flow)).collect();
        let mut any_dead = false;
        for claim in found.iter().filter(|claim| claim.dead.is_some()) {
            any_dead = true;
            let claimed = claim.claimed.clone().unwrap_or_default();
            let left = self.delete_rules(&claimed, &in_use);
            let name = &claim.name;
            let nic = self.nic;
            let rules =
                |count: usize| if count == 1 { "1 rule".to_owned() } else { format!("{count} rules") };
            match left {
                Ok(count) => {
                    cleaned.reported.push(format!(
                        "NIC {nic}: {name} ended without undoing its changes: removed {}",
                        rules(count)
                    ));
                    self.journal.remove_claim(name);
                }
                Err(error) => {
                    cleaned.reported.push(format!("NIC {nic}: cannot remove flow rules of {name}: {error}"));
                    cleaned.failed = true;
                }
            }
        }
        // The spread is corrected also if no claim is dead: a process may have been killed after it removed its
        // files and before it widened the spread again.
        let live = cleaned.live.clone();
        let released = self.release(&live, if any_dead { Others::MayBeDying } else { Others::Live })?;
        cleaned.reported.extend(released.reported);
        cleaned.failed |= released.failed || self.journal.is_broken;
        cleaned.reported.append(&mut self.journal.reported);
        Ok(cleaned)
    }

    /// A message about queues that are bound although no claim is recorded. They may belong to processes with another
    /// journal, with which no setting can be shared.
    pub fn strangers(&mut self) -> Option<String> {
        let queues = self.kernel.queues().unwrap_or_default();
        let bound: Vec<u32> =
            queues.iter().filter(|(_, state)| state.dmabuf.is_some()).map(|(queue, _)| *queue).collect();
        (!bound.is_empty()).then(|| {
            format!(
                "NIC {}: {} bound to device memory by a program without a record in this journal. If that program is ferrywire in \
                 another container, mount one /run/ferrywire into both: else the NIC's settings are not restored",
                self.nic,
                if let [one] = bound[..] { format!("queue {one} is") } else { format!("{} are", queues_in_words(&bound)) },
            )
        })
    }

    /// Numbers of the queues of live claims.
    pub fn live(&mut self) -> Result<Vec<u32>, NicError> {
        let found = self.journal.claims()?.into_iter().filter(|claim| claim.dead.is_none());
        Ok(found.filter_map(|claim| claim.claimed).flat_map(|claimed| claimed.queues).collect())
    }

    /// Removes the rules of a claim that still exist unchanged; returns their number. A rule that cannot be removed is
    /// an error, after all others were handled.
    pub fn delete_rules(&mut self, claimed: &Claimed, in_use: &[Flow]) -> Result<usize, String> {
        let (mut removed, mut failed) = (0, None);
        for (flow, location) in claimed.rules.iter().filter(|(flow, _)| !in_use.contains(flow)) {
            let places = match location {
                Some(location) => Ok(vec![*location]),
                // The rule was recorded and may have been made, at an unknown location.
                None => self.kernel.rules(),
            };
            for place in places.unwrap_or_else(|error| {
                failed.get_or_insert(error);
                Vec::new()
            }) {
                match self.delete_if_at(place, flow) {
                    Ok(was_there) => removed += usize::from(was_there),
                    Err(error) => {
                        failed.get_or_insert(error);
                    }
                }
            }
        }
        failed.map_or(Ok(removed), |error| Err(error.to_string()))
    }

    fn delete_if_at(&mut self, place: u32, flow: &Flow) -> Result<bool, NetlinkError> {
        let was_there = self.flow_at(place)?.as_ref() == Some(flow);
        if was_there {
            self.kernel.delete(place)?;
        }
        Ok(was_there)
    }

    /// The connection of the flow rule at a location; `None` if no rule for a single connection is there.
    pub fn flow_at(&mut self, place: u32) -> Result<Option<Flow>, NetlinkError> {
        match self.kernel.rule(place) {
            Err(error) if matches!(error.errno, libc::ENOENT | libc::EOPNOTSUPP) => Ok(None),
            // Some drivers (gve, bnxt, fbnic) report a missing rule with this number. The number has other meanings
            // too, so the list of rules decides.
            Err(error) if error.errno == libc::EINVAL && !self.kernel.rules()?.contains(&place) => Ok(None),
            flow => flow,
        }
    }
}
