//! The handle of a connected remote endpoint.
//!
//! [`Peer`] is the user's handle; [`PeerState`] is the state that the peer's channels, its control session
//! and its operations share.
//!
//! Invariant: a posted operation has been checked against the local region, and against the length and owner
//! of the remote one.
//! Read next, in `../../core/`: `queue.rs` for frames to send, `channel/receiver.rs` for arriving ones.
#![forbid(unsafe_code)]

mod blocks;
mod multi_region;
#[cfg(test)]
mod tests;

pub use blocks::{Block, BlockList, Lengths};

use super::running::Running;
use super::transfer::Transfer;
use crate::api::region::{Region, RemoteRegion};
use crate::api::wakeup::Wakeup;
use crate::core::context::Context;
use crate::core::inbound::Reply;
use crate::core::operation::{Hold, Op, Task, Verb};
use crate::core::ordering::StreamEvent;
use crate::core::peer::{Landing, PeerHandle, PeerState};
use crate::core::stats::PeerStats;
use crate::core::waiting::WakeHandle;
use crate::core::worker;
use crate::error::{Error, Result, TransferError};
use ferrywire_memory::{Memory, MemoryLocation, check_range};
use ferrywire_proto::Identity;
use ferrywire_proto::limits;
use ferrywire_proto::operation::{Piece, Pieces};

use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// A connected remote endpoint. Clones share one connection. When the last clone is dropped, the connection
/// is closed after all posted transfers are sent, or when they have made no progress for 5 s
/// ([`limits::DRAIN_TIMEOUT`]).
#[derive(Clone)]
pub struct Peer {
    pub(crate) connection: Arc<Connection>,
    _handle: Arc<PeerHandle>,
    /// Transfers posted through this handle begin after this event.
    after: Option<StreamEvent>,
}

/// A peer's state, with the running parts of its endpoint.
pub(crate) struct Connection {
    pub state: Arc<PeerState>,
    pub running: Arc<Running>,
}

impl Connection {
    /// The endpoint's configuration and shared parts.
    pub fn context(&self) -> &Context {
        self.state.context()
    }

    /// Waits until `done` returns true; see [`Workers::wait`](crate::core::worker::Workers::wait).
    pub fn wait(
        &self,
        limit: Duration,
        register: impl FnMut(WakeHandle),
        forget: impl FnOnce(&WakeHandle),
        done: impl FnMut() -> bool,
    ) -> bool {
        let Connection { state, running } = self;
        running.workers.wait(state, limit, register, forget, done, || running.poll_once().goes_on())
    }

    /// Posts an operation; see [`Workers::post`](crate::core::worker::Workers::post).
    pub fn post(&self, op: Hold, staged: bool) -> bool {
        self.running.workers.post(&self.state, op, staged)
    }

    /// Handles newly posted operations; see [`Workers::kick`](crate::core::worker::Workers::kick).
    pub fn kick(&self, bytes: u64) {
        self.running.workers.kick(&self.state, bytes);
    }

    /// Handles a newly posted operation; see
    /// [`Workers::kick_or_defer`](crate::core::worker::Workers::kick_or_defer).
    pub fn kick_or_defer(&self, bytes: u64, staged: bool) {
        self.running.workers.kick_or_defer(&self.state, bytes, staged);
    }

    /// Makes progress for a poll without waiting; see
    /// [`Workers::nudge`](crate::core::worker::Workers::nudge).
    pub fn nudge(&self) {
        self.running.workers.nudge(&self.state);
    }

    /// Ends an operation early, unless it has finished.
    pub fn cancel(&self, op: &Arc<Op>) {
        let state = &self.state;
        if op.ended() {
            return;
        }
        op.cancel();
        let children: Vec<_> = op.children().filter(|child| !child.ended()).collect();
        let reads = op.verb() == Verb::Read && !children.iter().any(|child| state.stream_queue.knows(child));
        if reads {
            // One request to the workers covers all children.
            children.iter().for_each(|child| {
                child.cancel();
                state.end_sink(child);
            })
        } else {
            children.iter().for_each(|child| self.cancel(child))
        }
        match op.verb() {
            Verb::Read if op.is_parent() && (children.is_empty() || !reads) => {}
            _ if state.stream_queue.knows(op) => {
                state.start_ready();
            }
            Verb::Recv | Verb::Read => {
                if op.verb() == Verb::Recv
                    && let Some(op) = state.inbound.unpost(op)
                {
                    return op.cut_short();
                }
                if !op.is_parent() {
                    state.end_sink(op);
                }
                let op = op.clone();
                let what = || format!("the memory of a cancelled operation with {}", state.name());
                // The operation ends when this thread's call returns; its memory is in use until then.
                let is_its = move |landing: &Landing| landing.is_sink(&op);
                if let Err(error) = worker::abandon(&self.running.workers, what, false, is_its) {
                    tracing::error!("{error}");
                }
            }
            _ => {
                let taken = state.queue.take_back(op).or_else(|| state.queue.take_out(op));
                taken.into_iter().for_each(Hold::cut_short);
                self.kick_or_defer(0, false);
            }
        }
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Peer({})", self.state().info.name)
    }
}

impl Peer {
    pub(crate) fn new(running: Arc<Running>, handle: PeerHandle) -> Peer {
        let connection = Arc::new(Connection { state: handle.0.clone(), running });
        Peer { connection, _handle: Arc::new(handle), after: None }
    }

    pub(crate) fn state(&self) -> &Arc<PeerState> {
        &self.connection.state
    }

    fn context(&self) -> &Context {
        self.connection.context()
    }

    fn transfer(&self, op: &Arc<Op>) -> Transfer {
        Transfer { op: op.clone(), connection: self.connection.clone() }
    }

    /// Returns a handle of this peer whose transfers use memory only after `event`: a write or send reads its
    /// source then, a read or receive requests data for its target then. Posting does not block. Messages
    /// keep the order in which they were posted, so later messages wait for such a send. A receive enters the
    /// queue of its tag when `event` happens.
    ///
    /// If the GPU's work fails before `event`, the transfer fails with that error and touches no memory. A
    /// standalone notification counts as posted when it begins.
    pub fn on_stream(&self, event: StreamEvent) -> Peer {
        Peer { after: Some(event), ..self.clone() }
    }

    /// Address and label of the peer, for messages.
    pub fn name(&self) -> String {
        self.state().info.name.clone()
    }

    /// The label that the peer's endpoint was built with; empty without one.
    pub fn label(&self) -> &str {
        &self.state().info.label
    }

    /// Remote address of the control connection when the session was opened: the peer's listening address if
    /// this end connected, otherwise a temporary port of the peer.
    pub fn address(&self) -> SocketAddr {
        self.state().info.address
    }

    /// The remote endpoint's identity. A restarted endpoint has another one.
    pub fn identity(&self) -> Identity {
        self.state().info.identity
    }

    /// Whether the peer runs on this host.
    pub fn same_host(&self) -> bool {
        self.state().info.same_host
    }

    /// The error with which the peer was lost or closed; `None` while it is usable.
    pub fn error(&self) -> Option<Error> {
        self.state().failure_for_user()
    }

    /// Writes `bytes` bytes of `source`, from `source_offset` on, into the peer's region at `target_offset`.
    /// The transfer ends when the bytes are in the peer's memory.
    ///
    /// # Errors
    /// [`TransferError::OutOfRegion`] for a range outside a region, [`TransferError::Invalid`] for a region of another
    /// endpoint or a deregistered one, [`TransferError::UnsupportedMemory`] if the transport cannot reach `source`,
    /// and the peer's error if it is lost or closed. The transfer fails with [`TransferError::AccessRefused`] if the
    /// peer has deregistered its region.
    pub fn write(
        &self,
        source: &Region,
        source_offset: u64,
        target: &RemoteRegion,
        target_offset: u64,
        bytes: u64,
    ) -> Result<Transfer, TransferError> {
        Ok(self.write_run(source, source_offset, target, target_offset, bytes, None)?)
    }

    /// Writes as [`Peer::write`] does, and delivers `message` to the peer once the bytes are in its memory.
    ///
    /// # Errors
    /// As for [`Peer::write`], and [`TransferError::Invalid`] unless `message` has 1 to [`limits::NOTIFY_BYTES_MAX`]
    /// bytes.
    pub fn write_notify(
        &self,
        source: &Region,
        source_offset: u64,
        target: &RemoteRegion,
        target_offset: u64,
        bytes: u64,
        message: &[u8],
    ) -> Result<Transfer, TransferError> {
        Ok(self.write_run(source, source_offset, target, target_offset, bytes, Some(message))?)
    }

    fn write_run(
        &self,
        source: &Region,
        source_offset: u64,
        target: &RemoteRegion,
        target_offset: u64,
        bytes: u64,
        message: Option<&[u8]>,
    ) -> Result<Transfer> {
        source.check("source", source_offset, bytes)?;
        check_range("target", target_offset, bytes, target.len())?;
        let pieces = Pieces::One(Piece { local: source_offset, remote: target_offset, len: bytes });
        self.write_pieces(source, target, pieces, message)
    }

    /// Writes the blocks of a list, or those at `indices`, as one transfer. `message`, if given, is delivered
    /// to the peer once all their bytes are in its memory, even if they are of several regions.
    ///
    /// # Errors
    /// As for [`Peer::write_notify`], and [`TransferError::Invalid`] for an index outside the list.
    pub fn write_blocks(
        &self,
        list: &BlockList,
        indices: Option<&[u32]>,
        message: Option<&[u8]>,
    ) -> Result<Transfer, TransferError> {
        let mut chosen = list.select(Verb::Write, indices)?;
        Ok(match (chosen.len(), chosen.pop()) {
            (1, Some((part, pieces))) => self.write_pieces(&part.local, &part.remote, pieces, message)?,
            (_, last) => self.write_joined(chosen.into_iter().chain(last), message)?,
        })
    }

    fn write_pieces(
        &self,
        source: &Region,
        target: &RemoteRegion,
        pieces: Pieces,
        message: Option<&[u8]>,
    ) -> Result<Transfer> {
        self.check_write(source, target)?;
        let mut op = self.op(Task::Write { region: target.key }, pieces, Some(source.memory().clone()));
        op.message = message_behind_bytes(message)?;
        let staged = op.on_gpu() || target.location() != MemoryLocation::Host;
        self.post(op, staged)
    }

    /// Checks a write, and records that the peer stages payload if the target is GPU memory.
    fn check_write(&self, source: &Region, target: &RemoteRegion) -> Result<()> {
        self.check(source, target)?;
        if target.location() != MemoryLocation::Host {
            self.state().route.note_write_to_gpu();
        }
        Ok(())
    }

    /// Posts an operation. `staged` says whether an end copies its bytes to or from a GPU.
    #[inline]
    fn post(&self, op: Op, staged: bool) -> Result<Transfer> {
        let began = ferrywire_metrics::are_timed().then(Instant::now);
        let kind = op.kind();
        let op = self.begin_posted(op)?;
        let transfer = self.transfer(&op);
        if let Some(ready) = &self.after {
            self.state().post_after(ready.clone(), op)?;
            return Ok(transfer);
        }
        if !self.connection.post(op, staged) {
            return Err(self.state().refusal());
        }
        if let Some(began) = began {
            ferrywire_metrics::record_post(kind, began.elapsed());
        }
        Ok(transfer)
    }

    #[inline]
    fn begin_posted(&self, op: Op) -> Result<Hold> {
        self.state().begin_posted(op).map_err(|_refused| self.state().refusal())
    }

    /// Reads `bytes` bytes of the peer's region, from `source_offset` on, into `target` at `target_offset`.
    ///
    /// # Errors
    /// As for [`Peer::write`].
    pub fn read(
        &self,
        target: &Region,
        target_offset: u64,
        source: &RemoteRegion,
        source_offset: u64,
        bytes: u64,
    ) -> Result<Transfer, TransferError> {
        target.check("target", target_offset, bytes)?;
        check_range("source", source_offset, bytes, source.len())?;
        let pieces = Pieces::One(Piece { local: target_offset, remote: source_offset, len: bytes });
        Ok(self.read_pieces(target, source, pieces)?)
    }

    /// Reads the blocks of a list, or those at `indices`, as one transfer.
    ///
    /// # Errors
    /// As for [`Peer::write_blocks`].
    pub fn read_blocks(&self, list: &BlockList, indices: Option<&[u32]>) -> Result<Transfer, TransferError> {
        let mut chosen = list.select(Verb::Read, indices)?;
        Ok(match (chosen.len(), chosen.pop()) {
            (1, Some((part, pieces))) => self.read_pieces(&part.local, &part.remote, pieces)?,
            (_, last) => self.read_joined(chosen.into_iter().chain(last))?,
        })
    }

    fn read_pieces(&self, target: &Region, source: &RemoteRegion, pieces: Pieces) -> Result<Transfer> {
        self.check(target, source)?;
        self.check_there()?;
        let op = self.op(Task::read(source.key), pieces, Some(target.memory().clone()));
        let op = self.begin_posted(op)?;
        let transfer = self.transfer(&op);
        let (bytes, staged) = (op.total, op.on_gpu() || source.location() != MemoryLocation::Host);
        self.start_read(op)?;
        if bytes > 0 && self.after.is_none() {
            self.connection.kick_or_defer(bytes, staged);
        }
        Ok(transfer)
    }

    /// Queues the requests for the bytes of a read that has begun.
    fn start_read(&self, op: Hold) -> Result<()> {
        let bytes = op.total;
        if bytes == 0 || self.after.is_some() {
            self.state().queue.join(&op);
        }
        if bytes == 0 {
            return Ok(());
        }
        let start = |state: &Arc<PeerState>, op: Hold| {
            // From now on the sink may be closed at any time, and the first request may be answered before
            // the last one is queued.
            state.inbound.open_sink(op.clone(), op.total);
            state.ask(&op, op.key());
            if let Some(error) = state.failure() {
                op.fail(error);
            }
            if op.failing() {
                // A cancel may have come before the sink was opened, or before the last request was queued.
                state.end_sink(&op);
            }
        };
        if let Some(ready) = &self.after {
            return self.state().start_after(ready.clone(), op, move |state, op| {
                start(state, op);
                state.wake_home_worker();
            });
        }
        start(self.state(), op);
        Ok(())
    }

    /// Sends `bytes` bytes of `source`, from `offset` on, as a message with this tag. Messages of one tag
    /// match the peer's receives of that tag in the order of posting.
    ///
    /// # Errors
    /// As for [`Peer::write`].
    pub fn send(
        &self,
        tag: u64,
        source: &Region,
        offset: u64,
        bytes: u64,
    ) -> Result<Transfer, TransferError> {
        self.send_blocks(tag, source, &[(offset, bytes)])
    }
    /// Sends one message that is gathered from `(offset, bytes)` pieces.
    ///
    /// # Errors
    /// As for [`Peer::write`].
    pub fn send_blocks(
        &self,
        tag: u64,
        source: &Region,
        blocks: &[(u64, u64)],
    ) -> Result<Transfer, TransferError> {
        self.check_local(source)?;
        self.check_there()?;
        let pieces = lined_up("source", source, blocks)?;
        let memory = Some(source.memory().clone());
        let state = self.state();
        // A refused operation ends after the queue's lock is released.
        let mut refused = None;
        let posted = state.queue.post_send(self.after.is_some(), |number| {
            let op = self.op(Task::send(tag, number), pieces, memory);
            state.begin_posted(op).map_err(|op| refused = Some(op)).ok()
        });
        let (op, held) = posted.ok_or_else(|| state.refusal())?;
        match (&self.after, held) {
            (Some(ready), Some(held)) => {
                state.start_after(ready.clone(), held, |state, op| state.start(op))?
            }
            _ => self.connection.kick_or_defer(op.total, op.on_gpu()),
        }
        Ok(self.transfer(&op))
    }

    /// Receives the next message with this tag into `bytes` bytes of `target` at `offset`. The outcome is the
    /// message's length; the transfer fails with [`TransferError::Truncated`] if the message is longer than `bytes`.
    ///
    /// # Errors
    /// As for [`Peer::write`].
    pub fn recv(
        &self,
        tag: u64,
        target: &Region,
        offset: u64,
        bytes: u64,
    ) -> Result<Transfer, TransferError> {
        self.recv_blocks(tag, target, &[(offset, bytes)])
    }

    /// Receives one message, scattered over `(offset, bytes)` pieces.
    ///
    /// # Errors
    /// As for [`Peer::write`].
    pub fn recv_blocks(
        &self,
        tag: u64,
        target: &Region,
        blocks: &[(u64, u64)],
    ) -> Result<Transfer, TransferError> {
        self.check_local(target)?;
        let pieces = lined_up("target", target, blocks)?;
        let state = self.state();
        let op = state.begin(self.op(Task::Recv { tag }, pieces, Some(target.memory().clone())));
        let transfer = self.transfer(&op);
        if let Some(ready) = &self.after {
            state.start_after(ready.clone(), op, |state, op| {
                let shared = Arc::clone(&op);
                let replies = state.inbound.post(op);
                state.reply(replies);
                // A cancel in the meantime did not find the operation in any queue.
                let error = state.failure();
                if (error.is_some() || shared.unsendable())
                    && let Some(op) = state.inbound.unpost(&shared)
                {
                    error.into_iter().for_each(|error| op.fail(error));
                    op.cut_short();
                }
                state.wake_home_worker();
            })?;
            return Ok(transfer);
        }
        let replies = state.inbound.post(op);
        let answer = replies.iter().any(|reply| matches!(reply, Reply::Frame(_)));
        state.reply(replies);
        if let Some(error) = state.failure() {
            let unmatched = state.inbound.unpost(&transfer.op);
            unmatched.iter().for_each(|op| op.fail(error.clone()));
            // The end of the peer may have come first and failed it.
            if transfer.op.failure().as_ref() == Some(&error) {
                state.note_told(&error);
                return Err(error.into());
            }
        }
        if answer {
            self.connection.kick_or_defer(0, false);
        }
        Ok(transfer)
    }

    /// Delivers a message of at most [`limits::NOTIFY_BYTES_MAX`] bytes, after everything posted to this peer
    /// before.
    ///
    /// # Errors
    /// [`TransferError::Invalid`] if `message` is too long; the peer's error if it is lost or closed. The transfer
    /// fails with [`TransferError::AccessRefused`] if the peer holds too many unread notifications.
    pub fn notify(&self, message: &[u8]) -> Result<Transfer, TransferError> {
        self.check_open()?;
        self.check_there()?;
        let pieces = Pieces::One(Piece { local: 0, remote: 0, len: 0 });
        let mut op = self.op(Task::Notify, pieces, None);
        op.message = checked_message(message)?;
        Ok(self.post(op, false)?)
    }

    /// The next notification, if there is one. Notifications that arrived before the peer was lost are still
    /// delivered.
    ///
    /// # Errors
    /// The peer's error, once no notification is left.
    pub fn poll_notification(&self) -> Result<Option<Vec<u8>>, TransferError> {
        self.context().origin.check()?;
        if let Some(message) = self.state().inbound.take_notification() {
            return Ok(Some(message));
        }
        self.connection.nudge();
        Ok(self.notification_or_loss().transpose()?)
    }

    fn notification_or_loss(&self) -> Option<Result<Vec<u8>>> {
        let state = self.state();
        let outcome = arrived_or_lost(|| state.inbound.take_notification(), || state.failure());
        outcome.map(|outcome| outcome.inspect_err(|error| state.note_told(error)))
    }

    /// Waits for the next notification.
    ///
    /// # Errors
    /// [`TransferError::Stalled`] after `timeout`; the peer's error if it is lost and no notification is left.
    pub fn wait_notification(&self, timeout: Duration) -> Result<Vec<u8>, TransferError> {
        self.context().origin.check()?;
        let inbound = &self.state().inbound;
        let start = self.context().transport.now();
        // A caller that polls with a timeout that is over at once may be the only thread that polls.
        let mut has_polled = !self.context().is_caller_driven();
        loop {
            if let Some(outcome) = self.notification_or_loss() {
                return Ok(outcome?);
            }
            let waited = self.context().transport.now().saturating_sub(start);
            let rest = timeout.saturating_sub(waited);
            if rest.is_zero() && !has_polled {
                has_polled = true;
                self.connection.running.poll_once();
                continue;
            }
            if rest.is_zero() {
                let what =
                    format!("a notification from {}: {}", self.state().info.name, self.state().describe());
                // A zero timeout is reported as zero.
                let waited = if timeout.is_zero() { timeout } else { waited };
                let peer = Some(self.state().info.name.to_string());
                return Err(TransferError::Stalled { what, peer, waited });
            }
            self.connection.wait(
                rest,
                |handle| inbound.wake_at_notification(handle),
                |handle| inbound.forget_waiter(handle),
                || inbound.has_notification(),
            );
        }
    }

    /// Makes `wakeup` readable once [`Peer::poll_notification`] returns a notification or an error, or at
    /// once if it already does.
    pub fn arm(&self, wakeup: &Wakeup) {
        if self.context().origin.is_elsewhere() {
            return wakeup.wake();
        }
        self.state().wake_at_loss(wakeup.handle());
        self.state().inbound.wake_at_notification(wakeup.handle());
        if self.state().failure().is_some() {
            wakeup.wake();
        }
    }

    /// Counters of the peer, and its configuration in use.
    pub fn stats(&self) -> PeerStats {
        let channels = self.state().counters.iter().enumerate();
        PeerStats {
            transport: self.state().info.transport,
            transport_reason: self.state().info.transport_reason.clone(),
            channels: channels.filter_map(|(index, each)| each.snapshot(index as u16)).collect(),
            resent_chunks: self.state().history.resent.load(Ordering::Relaxed),
            lost_channels: self.state().history.lost.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            failed_dials: self.state().history.failed_dials.load(Ordering::Relaxed),
            setup: *self.state().history.setup.lock().unwrap_or_else(PoisonError::into_inner),
            chunk_bytes: self.state().queue.chunk_bytes,
            window: self.state().info.window,
            crc: self.state().queue.crc,
            protection: self.state().info.protection,
        }
    }

    /// Finishes posted transfers, on both ends, then closes. From now on nothing can be posted.
    ///
    /// # Errors
    /// [`Error::Stalled`] if the peer did not finish within `timeout`; [`Error::PeerLost`] if it was lost, or
    /// closed by the other end, before posted transfers had finished. The peer is closed in any case.
    pub fn close(&self, timeout: Duration) -> Result<()> {
        self.context().origin.check()?;
        self.connection.running.close_peer(self.state(), timeout)
    }

    #[inline]
    fn op(&self, task: Task, pieces: Pieces, memory: Option<Arc<Memory>>) -> Op {
        let owner = Arc::downgrade(self.state());
        Op::new(owner, self.context().next_id(), task, pieces, memory)
    }

    /// Checks that operations may be posted to the peer.
    ///
    /// # Errors
    /// [`Error::Forked`] in a forked child, and an error if the peer is being closed.
    fn check_open(&self) -> Result<()> {
        self.context().origin.check()?;
        if self.state().life.closing.load(Ordering::SeqCst) { Err(self.state().refusal()) } else { Ok(()) }
    }

    /// Checks that transfers may use a local region.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a region of another endpoint or a deregistered one,
    /// [`Error::UnsupportedMemory`] if the transport cannot reach its memory.
    fn check_local(&self, local: &Region) -> Result<()> {
        self.check_open()?;
        local.belongs_to(self.context().identity)?;
        self.context().check_reach(local.location(), "local")
    }

    /// Checks that the peer is not lost.
    ///
    /// # Errors
    /// The peer's error if it is lost. Its channels may still be open for a moment.
    fn check_there(&self) -> Result<()> {
        self.error().map_or(Ok(()), Err)
    }

    fn check(&self, local: &Region, remote: &RemoteRegion) -> Result<()> {
        self.check_local(local)?;
        self.check_there()?;
        if remote.owner() != self.state().info.identity {
            let why = format!(
                "the region belongs to endpoint {}, but {} is {}: from before a restart, or another peer's",
                remote.owner(),
                self.state().info.name,
                self.state().info.identity
            );
            return Err(Error::invalid("remote region", why));
        }
        // Only the other end knows which GPUs it reaches.
        Ok(())
    }
}

fn lined_up(side: &'static str, region: &Region, blocks: &[(u64, u64)]) -> Result<Pieces> {
    for (offset, bytes) in blocks {
        region.check(side, *offset, *bytes)?;
    }
    let mut position = 0;
    Ok(Pieces::joined(blocks.iter().map(|(offset, bytes)| {
        let remote = position;
        position += bytes;
        Piece { local: *offset, remote, len: *bytes }
    })))
}

fn message_behind_bytes(message: Option<&[u8]>) -> Result<Box<[u8]>> {
    if message.is_some_and(<[u8]>::is_empty) {
        return Err(Error::invalid(
            "notification",
            "an empty notification cannot follow a write: give it at least one byte",
        ));
    }
    message.map_or_else(|| Ok(Box::default()), checked_message)
}

fn checked_message(message: &[u8]) -> Result<Box<[u8]>> {
    if message.len() > limits::NOTIFY_BYTES_MAX {
        let why = format!("{} bytes, at most {} are allowed", message.len(), limits::NOTIFY_BYTES_MAX);
        return Err(Error::invalid("notification", why));
    }
    Ok(message.into())
}

/// The next notification, or the peer's error once no notification is left. The error is read first: notifications
/// arrive before the error is set, so none can arrive after an error that was read.
fn arrived_or_lost<T>(
    take: impl FnOnce() -> Option<T>,
    error: impl FnOnce() -> Option<Error>,
) -> Option<Result<T>> {
    let error = error();
    take().map(Ok).or(error.map(Err))
}
