//! The control session between two processes: it outlives the connections that carry it.
//!
//! Messages are numbered from 1 and kept until the other end has said that it received them; every
//! frame, heartbeats included, says how many were. When the connection dies the session is resumed over
//! another ([`crate::handshake`]): each end learns how many messages the other has received, and says
//! the rest again. No sockets, no clock: bytes and `now` come in, bytes and messages go out.
//!
//! ```text
//! push -> kept ------ seal --> output          on_bytes -> open -> number = received + 1 -> out
//!           ^ acknowledged: dropped                              <= received: a repetition, dropped
//!           | attach: said again                                  > received + 1: an error
//! ```
//!
//! Invariant: every message pushed is handed out by the other end exactly once and in order, as long as
//! connections can be made. A gap, a doubled key or an acknowledgement of the unsaid ends the session.
//! Read next: `session/message.rs` for what is said, the engine's `control/link/` for what is done about it.

mod message;

#[cfg(test)]
mod tests;

pub use message::{ControlMessage, FenceCause, Frame, GoodbyeCause};

use std::collections::VecDeque;
use std::time::Duration;

use crate::handshake::{Secure, SecureError};
use crate::limits::{CONTROL_UNACKED_BYTES_MAX, CONTROL_UNACKED_MAX, HEARTBEAT_INTERVAL};

/// Received messages after which an acknowledgement goes out at once: well before the other end has to
/// keep too many.
const ACK_MESSAGES: u64 = CONTROL_UNACKED_MAX as u64 / 4;

const _: () = assert!(ACK_MESSAGES > 0);

/// Why a session, or the connection under it, cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// The connection's encryption failed. The session can be resumed over another.
    #[error(transparent)]
    Connection(#[from] SecureError),
    /// A message that no ferrywire of this version sends.
    #[error("malformed: {0}")]
    Malformed(String),
    /// A message of a kind that does not exist.
    #[error("a control message of unknown kind {0}")]
    UnknownKind(u8),
    /// Messages are missing.
    #[error("control message {got} arrived where {expected} was due")]
    Gap {
        /// The number that was due.
        expected: u64,
        /// The number that came.
        got: u64,
    },
    /// The peer says it received what was never said.
    #[error("it acknowledges {received} control messages, of {sent} sent")]
    AheadOfUs {
        /// What it claims.
        received: u64,
        /// What we have sent.
        sent: u64,
    },
    /// Too many messages wait for the peer.
    #[error("{CONTROL_UNACKED_MAX} control messages are unacknowledged")]
    Full,
    /// Too much waits for the peer.
    #[error("{CONTROL_UNACKED_BYTES_MAX} bytes of control messages are unacknowledged")]
    FullOfBytes,
    /// A message of ours that cannot be sent.
    #[error("{0} cannot be sent")]
    Unusable(String),
    /// Bytes came although there is no connection.
    #[error("control bytes without a connection")]
    Detached,
}

impl SessionError {
    /// Whether only the connection is lost, so that the session may be resumed over another.
    pub fn is_resumable(&self) -> bool {
        matches!(self, SessionError::Connection(_))
    }
}

/// One end of a control session.
#[derive(Debug)]
pub struct Session {
    id: u64,
    link: Option<Link>,
    /// Messages the peer is not known to have, oldest first; the last one has number `sent`.
    kept: VecDeque<Kept>,
    /// Bytes that saying all of them takes.
    kept_bytes: usize,
    /// Messages ever pushed.
    sent: u64,
    /// Messages of the peer handed out.
    received: u64,
    last_heard: Duration,
}

/// A message, and the bytes that saying it takes.
#[derive(Debug)]
struct Kept {
    message: ControlMessage,
    bytes: usize,
}

/// The connection that carries a session now.
#[derive(Debug)]
struct Link {
    secure: Secure,
    incoming: Vec<u8>,
    output: Vec<u8>,
    last_said: Duration,
    /// What the peer has been told of `received`.
    acknowledged: u64,
}

impl Session {
    /// A session that nothing has been said on, without a connection.
    pub fn new(id: u64, now: Duration) -> Session {
        let kept = VecDeque::new();
        Session { id, link: None, kept, kept_bytes: 0, sent: 0, received: 0, last_heard: now }
    }

    /// Its id.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Numbered messages of the peer handed out so far: what a resumption tells the peer.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Messages that the peer is not known to have.
    pub fn unacknowledged(&self) -> usize {
        self.kept.len()
    }

    /// Bytes that saying all of those takes. What an honest peer has yet to read is part of them, heartbeats apart.
    pub fn unacknowledged_bytes(&self) -> usize {
        self.kept_bytes
    }

    /// Whether a connection carries it now.
    pub fn is_attached(&self) -> bool {
        self.link.is_some()
    }

    /// Says a message, now or as soon as there is a connection.
    ///
    /// Fails with [`SessionError::Full`], or [`SessionError::FullOfBytes`], when the peer has left too many
    /// unacknowledged, or too much. After a
    /// [`SessionError::Connection`] the message is kept all the same, for the next connection.
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

    /// Goes on over a connection whose handshake has just finished. Replaces the one before, if any.
    ///
    /// `peer_received` is what the handshake said; what it does not cover is said again.
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

    /// The connection is gone. What was said and not acknowledged is kept for the next one.
    pub fn detach(&mut self) {
        self.link = None;
    }

    /// Takes bytes of the connection, any part of them at a time; appends what they say to `out`.
    ///
    /// Messages handed out before an error count as received and are to be acted on. After an error the
    /// connection is detached: close it.
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

    /// Says a heartbeat when nothing was said for a while. To be called at [`Session::next_deadline`].
    pub fn tick(&mut self, now: Duration) -> Result<(), SessionError> {
        let due = self.next_deadline().is_some_and(|deadline| deadline <= now);
        if due { self.heartbeat(now) } else { Ok(()) }
    }

    /// Bytes to write on the connection, in order.
    pub fn take_output(&mut self) -> Vec<u8> {
        self.link.as_mut().map(|link| std::mem::take(&mut link.output)).unwrap_or_default()
    }

    /// How long the peer has said nothing, connections or not.
    pub fn silent_for(&self, now: Duration) -> Duration {
        now.saturating_sub(self.last_heard)
    }

    /// Nobody listened until now, so that it says nothing about the peer that nothing was heard.
    pub fn not_heard_until(&mut self, now: Duration) {
        self.last_heard = now;
    }

    /// When [`Session::tick`] has something to do; `None` without a connection.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.link.as_ref().map(|link| link.last_said + HEARTBEAT_INTERVAL)
    }

    /// Says something at once: on a connection just made, for the other end to know which one it is.
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

    /// Drops what the peer has. An older count than before is stale, not wrong.
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

    /// Gives the connection up after an error.
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
