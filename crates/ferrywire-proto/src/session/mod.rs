//! The control session between two endpoints, which outlives the connections that carry it.
//!
//! Messages are numbered from 1 and kept until the other end acknowledges them; every frame, heartbeats
//! included, carries the number of received messages. When the connection dies the session resumes over
//! another ([`crate::handshake`]): each end learns how many messages the other has received, and repeats the
//! rest. No sockets, no clock: bytes and `now` come in, bytes and messages go out.
//!
//! ```text
//! push -> kept ------ seal --> output          on_bytes -> open -> number = received + 1 -> out
//!           ^ acknowledged: dropped                              <= received: a repetition, dropped
//!           | attach: said again                                  > received + 1: an error
//! ```
//!
//! Invariant: each pushed message is handed out at the other end exactly once and in order, as long as
//! connections can be made. A gap, a repeated key, or an acknowledgement of an unsent message ends the
//! session.
//! Read next: `session/message.rs` for the messages, the engine's `control/link/` for the actions they cause.

mod message;

#[cfg(test)]
mod tests;

pub use message::{ControlMessage, FenceCause, Frame, GoodbyeCause};

use std::collections::VecDeque;
use std::time::Duration;

use crate::handshake::{Secure, SecureError};
use crate::limits::{CONTROL_UNACKED_BYTES_MAX, CONTROL_UNACKED_MAX, HEARTBEAT_INTERVAL};

/// Number of received messages after which an acknowledgement is sent at once, well before the other end has
/// to keep too many.
const ACK_MESSAGES: u64 = CONTROL_UNACKED_MAX as u64 / 4;

const _: () = assert!(ACK_MESSAGES > 0);

/// Why a session, or the connection under it, cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// The connection's encryption failed. The session can resume over another connection.
    #[error(transparent)]
    Connection(#[from] SecureError),
    /// A message is malformed: no ferrywire of this version sends it.
    #[error("malformed: {0}")]
    Malformed(String),
    /// A control message has an unknown kind.
    #[error("a control message of unknown kind {0}")]
    UnknownKind(u8),
    /// Numbered messages are missing before a received one.
    #[error("control message {got} arrived, but number {expected} was due")]
    Gap {
        /// The number of the message that was due.
        expected: u64,
        /// The number of the message that arrived.
        got: u64,
    },
    /// The peer acknowledges a message that was never sent.
    #[error("the peer acknowledges {received} control messages, but only {sent} were sent")]
    AheadOfUs {
        /// The number that the peer acknowledges.
        received: u64,
        /// Number of messages that this end sent.
        sent: u64,
    },
    /// Too many messages wait for the peer's acknowledgement.
    #[error("the peer has not acknowledged {CONTROL_UNACKED_MAX} control messages, the most that are kept")]
    Full,
    /// Too many bytes of messages wait for the peer's acknowledgement.
    #[error(
        "the peer has not acknowledged {CONTROL_UNACKED_BYTES_MAX} bytes of control messages, the most that are kept"
    )]
    FullOfBytes,
    /// A control message of this end cannot be encoded.
    #[error("the control message cannot be sent: {0}")]
    Unusable(String),
    /// Bytes arrived although the session has no connection.
    #[error("control bytes arrived although no connection carries the session")]
    Detached,
}

impl SessionError {
    /// Whether only the connection is lost, so that the session can resume over another.
    pub fn is_resumable(&self) -> bool {
        matches!(self, SessionError::Connection(_))
    }
}

/// One end of a control session.
#[derive(Debug)]
pub struct Session {
    id: u64,
    link: Option<Link>,
    /// Unacknowledged messages, oldest first; the last one has number `sent`.
    kept: VecDeque<Kept>,
    /// Bytes of the frames that repeat all unacknowledged messages.
    kept_bytes: usize,
    /// Number of messages pushed so far.
    sent: u64,
    /// Number of the peer's messages handed out so far.
    received: u64,
    last_heard: Duration,
}

/// An unacknowledged message, and the bytes of the frame that repeats it.
#[derive(Debug)]
struct Kept {
    message: ControlMessage,
    bytes: usize,
}

/// The connection that currently carries the session.
#[derive(Debug)]
struct Link {
    secure: Secure,
    incoming: Vec<u8>,
    output: Vec<u8>,
    last_said: Duration,
    /// The value of `received` that was last sent to the peer.
    acknowledged: u64,
}

impl Session {
    /// A new session without messages and without a connection.
    pub fn new(id: u64, now: Duration) -> Session {
        let kept = VecDeque::new();
        Session { id, link: None, kept, kept_bytes: 0, sent: 0, received: 0, last_heard: now }
    }

    /// Id of the session.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Number of the peer's messages handed out so far; a resumption sends it to the peer.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Number of messages that the peer has not acknowledged.
    pub fn unacknowledged(&self) -> usize {
        self.kept.len()
    }

    /// Bytes of frames that repeat the unacknowledged messages. An honest peer's unread bytes are part of
    /// them, heartbeats excepted.
    pub fn unacknowledged_bytes(&self) -> usize {
        self.kept_bytes
    }

    /// Whether a connection currently carries the session.
    pub fn is_attached(&self) -> bool {
        self.link.is_some()
    }

    /// Sends a message, now or once there is a connection.
    ///
    /// Returns [`SessionError::Full`] or [`SessionError::FullOfBytes`] when too many messages or bytes are
    /// unacknowledged. After a [`SessionError::Connection`] the message is kept for the next connection.
    pub fn push(&mut self, message: ControlMessage, now: Duration) -> Result<(), SessionError> {
        message.check()?;
        if self.kept.len() >= CONTROL_UNACKED_MAX {
            return Err(SessionError::Full);
        }
        let frame = Frame { received: self.received, numbered: Some((self.sent + 1, &message)) };
        let plain = frame.encode();
        let bytes = Secure::sealed_bytes(plain.len());
        if self.kept_bytes + bytes > CONTROL_UNACKED_BYTES_MAX {
            return Err(SessionError::FullOfBytes);
        }
        self.sent += 1;
        let received = self.received;
        let said = self.link.as_mut().map_or(Ok(()), |link| link.say(&plain, received, now));
        self.kept_bytes += bytes;
        self.kept.push_back(Kept { message, bytes });
        self.settle(said)
    }

    /// Continues over a connection whose handshake has just finished; an earlier connection is replaced.
    ///
    /// `peer_received` comes from the handshake; later messages are repeated.
    pub fn attach(&mut self, secure: Secure, peer_received: u64, now: Duration) -> Result<(), SessionError> {
        self.link = None;
        self.last_heard = now;
        self.acknowledge(peer_received)?;
        let (incoming, output) = (Vec::new(), Vec::new());
        let mut link = Link { secure, incoming, output, last_said: now, acknowledged: self.received };
        let first = self.sent - self.kept.len() as u64 + 1;
        let said = (first..).zip(&self.kept).try_for_each(|(number, kept)| {
            let frame = Frame { received: self.received, numbered: Some((number, &kept.message)) };
            link.say(&frame.encode(), self.received, now)
        });
        self.link = Some(link);
        self.settle(said)
    }

    /// Notes that the connection is lost. Unacknowledged messages are kept for the next connection.
    pub fn detach(&mut self) {
        self.link = None;
    }

    /// Takes received bytes in any portions; appends their messages to `out`.
    ///
    /// Messages handed out before an error count as received and must be acted on. An error detaches the
    /// connection: close it.
    pub fn on_bytes(
        &mut self,
        bytes: &[u8],
        now: Duration,
        out: &mut Vec<ControlMessage>,
    ) -> Result<(), SessionError> {
        let link = self.link.as_mut().ok_or(SessionError::Detached)?;
        link.incoming.extend_from_slice(bytes);
        let taken = self.take_frames(now, out);
        self.settle(taken)
    }

    /// Sends a heartbeat when one is due. Call this at [`Session::next_deadline`].
    pub fn tick(&mut self, now: Duration) -> Result<(), SessionError> {
        let due = self.next_deadline().is_some_and(|deadline| deadline <= now);
        if due { self.heartbeat(now) } else { Ok(()) }
    }

    /// Takes the bytes to write on the connection, in order.
    pub fn take_output(&mut self) -> Vec<u8> {
        self.link.as_mut().map(|link| std::mem::take(&mut link.output)).unwrap_or_default()
    }

    /// Time since the last message from the peer arrived, with or without a connection.
    pub fn silent_for(&self, now: Duration) -> Duration {
        now.saturating_sub(self.last_heard)
    }

    /// Restarts the measurement of silence: this end did not read until `now`, so the silence before says
    /// nothing about the peer.
    pub fn not_heard_until(&mut self, now: Duration) {
        self.last_heard = now;
    }

    /// When [`Session::tick`] is due next; `None` without a connection.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.link.as_ref().map(|link| link.last_said + HEARTBEAT_INTERVAL)
    }

    /// Sends a heartbeat at once. On a new connection it shows the other end which session the connection
    /// carries.
    pub fn greet(&mut self, now: Duration) -> Result<(), SessionError> {
        self.heartbeat(now)
    }

    fn take_frames(&mut self, now: Duration, out: &mut Vec<ControlMessage>) -> Result<(), SessionError> {
        while let Some(plain) = self.open()? {
            self.last_heard = now;
            let frame = Frame::decode(&plain)?;
            self.acknowledge(frame.received)?;
            if let Some((number, message)) = frame.numbered {
                self.accept(number, message, out)?;
            }
        }
        let owed = self.link.as_ref().map_or(0, |link| self.received - link.acknowledged);
        if owed >= ACK_MESSAGES { self.heartbeat(now) } else { Ok(()) }
    }

    fn open(&mut self) -> Result<Option<Vec<u8>>, SessionError> {
        let Some(Link { secure, incoming, .. }) = &mut self.link else {
            return Ok(None);
        };
        Ok(secure.open(incoming)?)
    }

    fn accept(
        &mut self,
        number: u64,
        message: ControlMessage,
        out: &mut Vec<ControlMessage>,
    ) -> Result<(), SessionError> {
        let expected = self.received + 1;
        if number > expected || number == 0 {
            return Err(SessionError::Gap { expected, got: number });
        }
        if number == expected {
            self.received = number;
            out.push(message);
        }
        Ok(())
    }

    /// Drops acknowledged messages. A count lower than an earlier one is stale, and is ignored.
    fn acknowledge(&mut self, received: u64) -> Result<(), SessionError> {
        if received > self.sent {
            return Err(SessionError::AheadOfUs { received, sent: self.sent });
        }
        let missing = (self.sent - received).min(self.kept.len() as u64) as usize;
        let had = self.kept.drain(..self.kept.len() - missing);
        self.kept_bytes -= had.map(|kept| kept.bytes).sum::<usize>();
        Ok(())
    }

    fn heartbeat(&mut self, now: Duration) -> Result<(), SessionError> {
        let received = self.received;
        let plain = Frame { received, numbered: None }.encode();
        let said = self.link.as_mut().map_or(Ok(()), |link| link.say(&plain, received, now));
        self.settle(said)
    }

    /// Detaches the connection after an error.
    fn settle(&mut self, result: Result<(), SessionError>) -> Result<(), SessionError> {
        if result.is_err() {
            self.link = None;
        }
        result
    }
}

impl Link {
    fn say(&mut self, plain: &[u8], received: u64, now: Duration) -> Result<(), SessionError> {
        self.output.extend(self.secure.seal(plain)?);
        self.last_said = now;
        self.acknowledged = received;
        Ok(())
    }
}
