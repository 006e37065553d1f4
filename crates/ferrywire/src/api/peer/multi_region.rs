//! One operation over several pairs of regions: a *whole*, and a part for each pair.
//!
//! Parts are operations as any others. The whole has no memory of its own: it ends with the last part, fails with the
//! first that fails, and what it tells the peer is queued behind its parts.
//!
//! Invariant: the parts of a write travel under the number of the whole, so that the peer counts their bytes together
//! and gives out the notification when it has all of them. Read next: `queue/`, where they wait in this order.

use std::sync::Arc;

use super::blocks::Part;
use super::{Peer, message_behind_bytes};
use crate::api::transfer::Transfer;
use crate::core::operation::{Op, Verb};
use crate::core::peer::PeerState;
use crate::error::{Error, Result};
use ferrywire_proto::transfer::{Piece, Pieces};

impl Peer {
    /// Writes blocks of several pairs of regions.
    pub(super) fn write_joined<'a>(
        &self,
        parts: impl Iterator<Item = (&'a Part, Pieces)>,
        message: Option<&[u8]>,
    ) -> Result<Transfer> {
        let parts: Vec<_> = parts.collect();
        for (part, _) in &parts {
            self.check_write(&part.local, &part.remote)?;
        }
        let (whole, parts) = self.joined(Verb::Write, parts, message_behind_bytes(message)?);
        self.state().begin_posted(&whole)?;
        self.state().queue.join(&whole);
        for (index, part) in parts.iter().enumerate() {
            let posted = match &self.after {
                None => self.state().queue_part(part),
                Some(ready) => self.state().post_after(ready.clone(), part.clone()),
            };
            if let Err(error) = posted {
                return Err(self.state().give_up_whole(&whole, &parts[index..], error));
            }
        }
        if whole.message.is_empty() {
            self.state().let_go(&whole);
        } else if let Some(ready) = &self.after {
            self.state().hold(ready.clone(), whole.clone(), |state, whole| {
                state.tell_behind_parts(&whole);
                state.wake_home_worker();
            })?;
            return Ok(self.transfer(whole));
        } else {
            self.state().tell_behind_parts(&whole);
        }
        self.connection.kick(whole.total);
        Ok(self.transfer(whole))
    }

    /// Reads blocks of several pairs of regions.
    pub(super) fn read_joined<'a>(
        &self,
        parts: impl Iterator<Item = (&'a Part, Pieces)>,
    ) -> Result<Transfer> {
        let parts: Vec<_> = parts.collect();
        for (part, _) in &parts {
            self.check(&part.local, &part.remote)?;
        }
        let (whole, parts) = self.joined(Verb::Read, parts, Box::default());
        self.state().begin_posted(&whole)?;
        self.state().queue.join(&whole);
        for (index, part) in parts.iter().enumerate() {
            if let Err(error) = self.post_read(part.clone()) {
                return Err(self.state().give_up_whole(&whole, &parts[index..], error));
            }
        }
        self.state().let_go(&whole);
        Ok(self.transfer(whole))
    }

    /// The whole, which its maker holds, and its parts, each with a token of it.
    fn joined(&self, verb: Verb, parts: Vec<(&Part, Pieces)>, message: Box<[u8]>) -> (Arc<Op>, Vec<Arc<Op>>) {
        let nothing = Pieces::One(Piece { local: 0, remote: 0, len: 0 });
        let mut whole = self.op(verb, nothing, None, 0);
        whole.total = parts.iter().map(|(_, pieces)| pieces.total()).sum();
        whole.message = message;
        let whole = Arc::new(whole);
        let part_of = |(part, pieces): (&Part, Pieces)| {
            let mut op = self.op(verb, pieces, Some(part.local.memory().clone()), part.remote.key);
            if verb == Verb::Write {
                op.id = whole.id;
            }
            whole.hold();
            op.whole = Some(whole.clone());
            Arc::new(op)
        };
        let parts: Vec<_> = parts.into_iter().map(part_of).collect();
        whole.set_parts(&parts);
        (whole, parts)
    }
}

impl PeerState {
    /// Queues a part of a write; whoever does it sees to it that they are sent.
    fn queue_part(self: &Arc<Self>, part: &Arc<Op>) -> Result<()> {
        self.begin(part);
        if self.queue.post(part.clone()) {
            return Ok(());
        }
        self.end(part);
        Err(self.gone())
    }

    /// Queues the notification of a whole.
    fn tell_behind_parts(self: &Arc<Self>, whole: &Arc<Op>) {
        if !self.queue.post_behind_parts(whole.clone()) {
            whole.fail(self.gone());
            self.let_go(whole);
        }
    }

    /// The peer is gone: these parts do not begin, the first of which may have ended for that.
    fn give_up_whole(&self, whole: &Arc<Op>, parts: &[Arc<Op>], error: Error) -> Error {
        whole.fail(error.clone());
        parts.iter().filter(|part| !part.ended()).for_each(|_| self.let_go(whole));
        self.let_go(whole);
        error
    }
}
