//! Which outcomes of operations are allowed, and what must hold when an operation has ended.
//!
//! The rules are those of `docs/guarantees.md`: an operation may fail only for a reason that occurred in the
//! run.
//! Read next: `run.rs`.

use ferrywire::{Transfer, TransferError};

use crate::memory::pattern;
use crate::run::{Check, Op, Run, broken, note, notification, salt_of};
use crate::scenario::{Post, Verb};

/// Largest message in bytes that is sent before its receive is known.
const EAGER_BYTES_MAX: usize = ferrywire::limits::EAGER_BYTES_MAX;

/// Whether an error says that the peer was lost or closed.
pub fn is_gone(error: &TransferError) -> bool {
    matches!(error, TransferError::PeerLost { .. } | TransferError::PeerClosed { .. } | TransferError::Closed)
}

impl Run<'_> {
    /// Checks an operation that has just ended. Its memory then belongs to its user, who reuses some of it.
    pub fn judge(&mut self, index: usize) -> Check {
        self.judge_outcome(index)?;
        let op = &self.ops[index];
        let (number, transfer) = (op.post.id, op.transfer.is_some());
        let targets = op.targets.clone().into_iter().filter(|_| !number.is_multiple_of(3));
        let sources = op.sources.clone().into_iter().filter(|_| number.is_multiple_of(2));
        let areas: Vec<usize> = targets.chain(sources).filter(|_| transfer).collect();
        areas.into_iter().for_each(|area| self.areas[area].reuse());
        Ok(())
    }

    fn judge_outcome(&mut self, index: usize) -> Check {
        let op = &self.ops[index];
        match op.outcome.clone() {
            Some(Ok(moved)) => match op.post.verb {
                Verb::Recv { tag } => self.received(index, tag, moved as usize),
                _ if moved != op.post.bytes as u64 => {
                    broken("all bytes are counted", format!("{:?} moved {moved}", op.post))
                }
                _ => self.completed(index),
            },
            Some(Err(error)) => self.failed(index, &error),
            None => Ok(()),
        }
    }

    /// Checks a write or read that has succeeded: its bytes are at the target.
    fn completed(&mut self, index: usize) -> Check {
        for area in self.ops[index].targets.clone() {
            let area = &mut self.areas[area];
            if area.was_incomplete {
                let what = format!(
                    "the target of this operation was deregistered before: {:?}",
                    self.ops[index].post
                );
                return broken("an operation that has succeeded is complete", what);
            }
            if area.taken {
                continue;
            }
            if let Err(why) = area.check_done() {
                return broken(
                    "an operation that has succeeded is complete",
                    format!("{why}: {:?}", self.ops[index].post),
                );
            }
            if let Err(why) = area.freeze() {
                return broken("no byte is written late, or outside", why);
            }
        }
        Ok(())
    }

    fn failed(&mut self, index: usize, error: &TransferError) -> Check {
        let op = &self.ops[index];
        if !self.is_excused(op, error) {
            return broken("an operation fails only for a reason", format!("{:?}: {error:?}", op.post));
        }
        let with_bytes = op.post.verb != Verb::Notify && !is_gone(error);
        if op.notified > 0 && with_bytes {
            return broken("a failed write does not notify", format!("{:?}: {error:?}", op.post));
        }
        // Bytes of a write may still arrive after its peer was lost, until the peer's end has noticed.
        if is_gone(error) && op.post.verb == Verb::Write {
            return Ok(());
        }
        for area in self.ops[index].targets.clone() {
            if let Err(why) = self.areas[area].freeze() {
                return broken("no byte is written late, or outside", why);
            }
        }
        Ok(())
    }

    fn partners<'a>(&'a self, op: &'a Op) -> impl Iterator<Item = &'a Op> {
        let partner = match op.post.verb {
            Verb::Send { tag } => Some(Verb::Recv { tag }),
            Verb::Recv { tag } => Some(Verb::Send { tag }),
            _ => None,
        };
        let (link, side) = (op.post.link, 1 - op.post.side);
        self.ops.iter().filter(move |other| {
            (other.post.link, other.post.side, Some(other.post.verb)) == (link, side, partner)
        })
    }

    /// Whether memory of an operation was deregistered or freed, or is on a GPU that fails.
    fn memory_failed(&self, op: &Op, slot: usize) -> bool {
        let mut here = op.sources.iter().chain(&op.targets).filter(|area| self.areas[**area].slot == slot);
        let faulty =
            self.hosts.iter().any(|host| host.gpu_faulty.is_some_and(|since| since <= self.driver.now()));
        here.any(|area| self.areas[*area].taken)
            || (faulty && (op.post.source_on_gpu || op.post.target_on_gpu))
    }

    fn is_excused(&self, op: &Op, error: &TransferError) -> bool {
        let link = &self.links[op.post.link];
        let (near, far) = (link.slots[op.post.side], link.slots[1 - op.post.side]);
        match error {
            TransferError::Closed => link.closing[op.post.side],
            TransferError::PeerLost { .. } | TransferError::PeerClosed { .. } => {
                let known = link.peers[op.post.side].as_ref().is_none_or(|peer| peer.error().is_some());
                known && link.loss_is_excused(op.post.side, self.driver.now())
            }
            TransferError::Cancelled => op.cancelled,
            TransferError::AccessRefused { .. } => match op.post.verb {
                Verb::Write | Verb::Read => self.memory_failed(op, far),
                Verb::Send { .. } => self.partners(op).any(|recv| {
                    recv.cancelled || recv.post.bytes < op.post.bytes || self.memory_failed(recv, far)
                }),
                Verb::Recv { .. } => {
                    self.partners(op).any(|send| send.cancelled || self.memory_failed(send, far))
                }
                Verb::Notify => false,
            },
            TransferError::Invalid { .. } | TransferError::SimGpu(_) => self.memory_failed(op, near),
            TransferError::Truncated { message_bytes, .. } => {
                let long = |send: &Op| send.post.bytes as u64 == *message_bytes;
                *message_bytes > op.post.bytes as u64 && self.partners(op).any(long)
            }
            _ => false,
        }
    }

    /// Checks a receive that has succeeded: its bytes are those of one message.
    fn received(&mut self, index: usize, tag: u64, bytes: usize) -> Check {
        let op = &self.ops[index];
        let (link, side) = (op.post.link, op.post.side);
        if bytes > op.post.bytes {
            return broken("a message fits its receive", format!("{bytes} bytes: {:?}", op.post));
        }
        let area = op.targets[0];
        let fits = |send: &Op| {
            let post = &send.post;
            (post.link, post.side, post.verb, post.bytes) == (link, 1 - side, Verb::Send { tag }, bytes)
                && send.met.is_none()
        };
        let taken = self.areas[area].taken;
        let found = self.areas[area].joined(bytes);
        let same = |send: &Op| taken || found == pattern(bytes, salt_of(send.post.id, 0));
        let Some(send) = (0..self.ops.len()).find(|send| fits(&self.ops[*send]) && same(&self.ops[*send]))
        else {
            return broken(
                "a receive is one message",
                format!("{bytes} bytes of no message, or of one that was received before: {:?}", op.post),
            );
        };
        self.ops[send].met = Some(index);
        self.ops[index].met = Some(send);
        if !taken {
            self.areas[area].expect(&found);
            if let Err(why) = self.areas[area].check_done().and_then(|()| self.areas[area].freeze()) {
                return broken("a message writes nothing outside of its receive", why);
            }
        }
        Ok(())
    }

    /// Checks a notification that has arrived.
    pub fn notified(&mut self, link: usize, side: usize, message: &[u8]) -> Check {
        let id = message.first_chunk().map_or(usize::MAX, |id| u64::from_le_bytes(*id) as usize);
        note!(self, "notification of operation {id}");
        let Some(index) = self.ops.iter().position(|op| op.post.id == id) else {
            return broken("a notification is one that was posted", format!("{message:02x?}"));
        };
        let op = &mut self.ops[index];
        op.notified += 1;
        let post = op.post.clone();
        if op.notified > 1 {
            return broken("a notification comes once", format!("{post:?}"));
        }
        if (post.link, 1 - post.side) != (link, side) || notification(id, post.notify.unwrap_or(0)) != message
        {
            return broken("a notification is one that was posted", format!("{post:?} at side {side}"));
        }
        match &op.outcome {
            Some(Err(error)) if post.verb == Verb::Write && !is_gone(error) => {
                return broken("a failed write does not notify", format!("{post:?}: {error:?}"));
            }
            _ => {}
        }
        self.in_place(index, &post.verb)?;
        if post.verb == Verb::Notify {
            for earlier in 0..index {
                self.overtakes(&post, earlier)?;
            }
        }
        Ok(())
    }

    /// Checks that an operation that was posted before a notification has ended when the notification has arrived.
    fn overtakes(&mut self, notify: &Post, earlier: usize) -> Check {
        let Op { post, outcome, transfer, cancelled, .. } = &self.ops[earlier];
        let before = (post.link, post.side) == (notify.link, notify.side);
        if !before || *cancelled || transfer.is_none() {
            return Ok(());
        }
        if outcome.is_none() {
            // It may have failed since it was polled last.
            if self.is_alive(post.link, post.side) {
                if let Some(outcome) = transfer.as_ref().and_then(Transfer::poll) {
                    self.ended(earlier, outcome)?;
                }
            } else if self.ops[earlier].targets.iter().any(|area| self.areas[*area].taken) {
                return Ok(());
            }
        }
        let op = &self.ops[earlier];
        if matches!(op.outcome, Some(Err(_))) {
            return Ok(());
        }
        if op.post.notify.is_some() && op.notified == 0 {
            let what = format!("the notification of {notify:?} came before the end of {:?}", op.post);
            return broken("a notification comes after what was posted before it", what);
        }
        let verb = op.post.verb;
        self.in_place(earlier, &verb)
    }

    /// Checks that all bytes of a write are in place when its notification has arrived.
    fn in_place(&mut self, index: usize, verb: &Verb) -> Check {
        if *verb != Verb::Write {
            return Ok(());
        }
        for area in self.ops[index].targets.clone() {
            let elsewhere = self.areas[area].taken || self.areas[area].reused;
            if let Err(why) = self.areas[area].check_done()
                && !elsewhere
            {
                let what = format!("{why}: {:?}", self.ops[index].post);
                return broken("a notification comes after its bytes", what);
            }
        }
        Ok(())
    }

    /// Whether all channels of a link are up again at the end of the run.
    pub fn is_well(&self, link: usize) -> bool {
        let state = &self.links[link];
        state.closing == [false; 2]
            && state.peers.iter().all(|peer| peer.as_ref().is_some_and(|peer| peer.error().is_none()))
            && (0..2).all(|side| self.is_alive(link, side))
    }

    /// Checks that messages have kept their order, and that both ends report the same outcome.
    pub fn check_messages(&mut self) -> Check {
        for (index, recv) in self.ops.iter().enumerate() {
            let (Verb::Recv { .. }, Some(send)) = (recv.post.verb, recv.met) else { continue };
            let sent = &self.ops[send];
            if self.is_well(recv.post.link) && !matches!(sent.outcome, Some(Ok(_))) {
                let what =
                    format!("{:?} succeeded, and {:?} ended in {:?}", recv.post, sent.post, sent.outcome);
                return broken("both ends report one outcome", what);
            }
            let same = |other: &&Op| {
                (other.post.link, other.post.side, other.post.verb)
                    == (recv.post.link, recv.post.side, recv.post.verb)
            };
            let long = |met: usize| self.ops[met].post.bytes >= 8;
            let later = self.ops[index + 1..].iter().filter(same).filter_map(|other| other.met);
            if let Some(early) = later.filter(|met| long(*met) && long(send)).find(|met| *met < send) {
                let what = format!("{:?} was received before {:?}", sent.post, self.ops[early].post);
                return broken("messages of a tag keep their order", what);
            }
        }
        for send in &self.ops {
            let announced = matches!(send.post.verb, Verb::Send { .. }) && send.post.bytes > EAGER_BYTES_MAX;
            let well = matches!(send.outcome, Some(Ok(_))) && self.is_well(send.post.link);
            if announced && well && send.met.is_none() {
                return broken(
                    "both ends report one outcome",
                    format!("no receive got the message of {:?}", send.post),
                );
            }
        }
        Ok(())
    }

    /// Checks that the notification of each operation that has succeeded has arrived.
    pub fn check_notifications(&mut self) -> Check {
        for op in &self.ops {
            let due = op.post.notify.is_some() && matches!(op.outcome, Some(Ok(_)));
            if due && op.notified == 0 && self.is_well(op.post.link) {
                return broken("a notification comes", format!("{:?}", op.post));
            }
        }
        Ok(())
    }
}
