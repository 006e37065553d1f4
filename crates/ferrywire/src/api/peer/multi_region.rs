//! One transfer over several pairs of regions: a *parent* operation, with a *child* for each pair.
//!
//! Children are ordinary operations. The parent has no memory: it ends after its last child, fails with the
//! first child that fails, and its notification is queued behind its children.
//!
//! Invariant: the children of a write use the parent's id. The peer counts their bytes together, and delivers
//! the notification when it has all of them.
//! Read next: `../../core/queue.rs`, where children wait in order.

use super::blocks::Part;
use super::{Peer, message_behind_bytes};
use crate::api::transfer::Transfer;
use crate::core::operation::{Family, Hold, Op, Task};
use crate::core::peer::PeerState;
use crate::error::{Error, Result};
use ferrywire_proto::operation::{Piece, Pieces};
use std::sync::{Arc, OnceLock};

impl Peer {
    /// Writes blocks of several pairs of regions as one transfer.
    pub(super) fn write_joined<'a>(
        &self,
        pairs: impl Iterator<Item = (&'a Part, Pieces)>,
        message: Option<&[u8]>,
    ) -> Result<Transfer> {
        let pairs: Vec<_> = pairs.collect();
        for (pair, _) in &pairs {
            self.check_write(&pair.local, &pair.remote)?;
        }
        let task = |region| Task::Write { region };
        let (parent, children) = self.begin_joined(task, pairs, message_behind_bytes(message)?)?;
        let transfer = self.transfer(&parent);
        let state = self.state();
        for child in children {
            let posted = match &self.after {
                None => state.queue.post(child).then_some(()).ok_or_else(|| state.gone()),
                Some(ready) => state.post_after(ready.clone(), child),
            };
            posted.map_err(|error| failed(&parent, error))?;
        }
        if parent.message.is_empty() {
            drop(parent);
        } else if let Some(ready) = &self.after {
            state.start_after(ready.clone(), parent, |state, parent| {
                state.post_behind_children(parent);
                state.wake_home_worker();
            })?;
            return Ok(transfer);
        } else {
            state.post_behind_children(parent);
        }
        self.connection.kick(transfer.op.total);
        Ok(transfer)
    }

    /// Reads blocks of several pairs of regions as one transfer.
    pub(super) fn read_joined<'a>(
        &self,
        pairs: impl Iterator<Item = (&'a Part, Pieces)>,
    ) -> Result<Transfer> {
        let pairs: Vec<_> = pairs.collect();
        for (pair, _) in &pairs {
            self.check(&pair.local, &pair.remote)?;
        }
        let (parent, children) = self.begin_joined(Task::read, pairs, Box::default())?;
        let transfer = self.transfer(&parent);
        let start = |child| self.check_there().and_then(|()| self.start_read(child));
        let started = children.into_iter().try_for_each(start);
        if self.after.is_none() {
            self.connection.kick(transfer.op.total);
        }
        started.map_err(|error| failed(&parent, error))?;
        Ok(transfer)
    }

    /// Begins a parent and its children. A hold that is dropped ends its operation without moving bytes.
    fn begin_joined(
        &self,
        task: impl Fn(u64) -> Task,
        pairs: Vec<(&Part, Pieces)>,
        message: Box<[u8]>,
    ) -> Result<(Hold, Vec<Hold>)> {
        let nothing = Pieces::One(Piece { local: 0, remote: 0, len: 0 });
        let mut parent = self.op(task(0), nothing, None);
        parent.total = pairs.iter().map(|(_, pieces)| pieces.total()).sum();
        parent.message = message;
        parent.family = Family::Parent(OnceLock::new());
        let parent = self.begin_posted(parent)?;
        self.state().queue.join(&parent);
        let child_of = |(pair, pieces): (&Part, Pieces)| {
            let task = task(pair.remote.key);
            let is_write = matches!(task, Task::Write { .. });
            let mut op = self.op(task, pieces, Some(pair.local.memory().clone()));
            if is_write {
                op.id = parent.id;
            }
            op.family = Family::child_of(&parent);
            self.state().begin(op)
        };
        let children: Vec<_> = pairs.into_iter().map(child_of).collect();
        parent.set_children(&children);
        Ok((parent, children))
    }
}

impl PeerState {
    /// Queues the notification of a parent. If the peer is gone, the parent fails.
    fn post_behind_children(self: &Arc<Self>, parent: Hold) {
        if let Err(parent) = self.queue.post_behind_children(parent) {
            parent.fail(self.gone());
        }
    }
}

/// Fails the parent, since the peer is gone. Children that have not begun to move end with it.
fn failed(parent: &Op, error: Error) -> Error {
    parent.fail(error.clone());
    error
}
