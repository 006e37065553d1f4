//! Messages of a control session, and their encoding.
//!
//! A [`Frame`] is the plain content of one sealed message: a kind, the number of messages received from the
//! other end, and, except in heartbeats, a number and a [`ControlMessage`].
//! Invariant: every length is checked, and every text printable, before a message is handed out.
//! Read next: `session/mod.rs`, which numbers, keeps and repeats messages.

use std::net::SocketAddr;

use super::SessionError;
use crate::handshake::{HandshakeError, Reader, clean, clip, put_address};
use crate::limits::{CONTROL_MESSAGE_BYTES_MAX, LANE_HANDLE_BYTES, WINDOW_FRAMES_MAX};

/// Longest reason in a message, in bytes; longer ones are cut.
pub const REASON_BYTES_MAX: usize = 1024;
/// Most refusals in one fence: a channel has no more frames in flight.
pub const FENCE_REFUSED_MAX: usize = WINDOW_FRAMES_MAX;
/// Bytes in front of a frame's message: kind, received count and number.
const HEADER_BYTES: usize = 1 + 8 + 8;

const _: () = assert!(
    HEADER_BYTES + 2 + 4 + 8 + 2 + FENCE_REFUSED_MAX * 9 + 1 + 2 + REASON_BYTES_MAX
        <= CONTROL_MESSAGE_BYTES_MAX
);

/// Why the sender of a [`ControlMessage::Fence`] has closed a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FenceCause {
    /// The sender lost the connection.
    Lost,
    /// The sender answers the receiver's fence; until then its connection was up.
    Answer,
    /// The sender never had the connection.
    NeverUp,
    /// The lane of the channel failed at the sender.
    LaneFailed,
    /// A message of the lane made no progress at the sender for the lane's stall limit.
    LaneStalled,
    /// The sender cannot read memory that the lane should send; another lane may work.
    SourceUnreadable,
}

/// Why the sender of a [`ControlMessage::Goodbye`] ends the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GoodbyeCause {
    /// The sender has closed the session in an orderly way.
    Closed,
    /// The sender has given up the session.
    GaveUp,
    /// The sender has given up the session because a lane made no progress.
    LaneStalled,
    /// The sender has given up the session because lanes cannot be set up. The initiator may open a session
    /// without lanes.
    WithoutLanes,
}

/// A numbered message: delivered exactly once and in order, over any number of connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlMessage {
    /// A channel's connection is over; no more frames are placed from it.
    Fence {
        /// The channel whose connection is over.
        channel: u16,
        /// Number of the channel's connection, counted from its first dial.
        generation: u32,
        /// Number of the connection's frames that were placed.
        placed: u64,
        /// Frames that were refused instead, each with the reason's code; at most `FENCE_REFUSED_MAX`.
        refused: Vec<(u64, u8)>,
        /// Why the connection is over, for programs.
        cause: FenceCause,
        /// Why the connection is over, for users; cut to `REASON_BYTES_MAX`.
        reason: String,
    },
    /// The sender has bound a data connection, and dials it once it receives [`Expected`].
    ///
    /// [`Expected`]: ControlMessage::Expected
    Dialling {
        /// The channel that the connection will carry.
        channel: u16,
        /// Number of the channel's connection.
        generation: u32,
        /// Address and port from which the connection will come.
        source: SocketAddr,
    },
    /// Answers a `Dialling`: the receiver is prepared for the connection, which may be dialled now.
    Expected {
        /// The channel that the expected connection will carry.
        channel: u16,
        /// Number of the channel's connection.
        generation: u32,
    },
    /// The sender listens for the lane of a channel whose connection is established.
    Lane {
        /// The channel of the lane.
        channel: u16,
        /// Number of the channel's connection.
        generation: u32,
        /// The plugin's handle, which the other end's plugin needs to connect.
        handle: Box<[u8; LANE_HANDLE_BYTES]>,
    },
    /// The sender starts no more transfers, and asks the peer to finish its own.
    Drain,
    /// The sender has no transfer in flight any more.
    Drained,
    /// The sender ends the session.
    Goodbye {
        /// Why the session ends, for programs.
        cause: GoodbyeCause,
        /// Why the session ends, for users; cut to `REASON_BYTES_MAX`.
        reason: String,
    },
}

const HEARTBEAT: u8 = 0;
const FENCE: u8 = 1;
const DIALLING: u8 = 2;
const EXPECTED: u8 = 3;
const DRAIN: u8 = 4;
const DRAINED: u8 = 5;
const GOODBYE: u8 = 6;
const LANE: u8 = 7;

impl FenceCause {
    pub(crate) const ALL: [FenceCause; 6] = [
        FenceCause::Lost,
        FenceCause::Answer,
        FenceCause::NeverUp,
        FenceCause::LaneFailed,
        FenceCause::LaneStalled,
        FenceCause::SourceUnreadable,
    ];

    fn read(reader: &mut Reader<'_>) -> Result<FenceCause, SessionError> {
        read_code("as the cause of a fence", &FenceCause::ALL, reader)
    }
}

impl GoodbyeCause {
    pub(crate) const ALL: [GoodbyeCause; 4] =
        [GoodbyeCause::Closed, GoodbyeCause::GaveUp, GoodbyeCause::LaneStalled, GoodbyeCause::WithoutLanes];

    fn read(reader: &mut Reader<'_>) -> Result<GoodbyeCause, SessionError> {
        read_code("as the cause of a goodbye", &GoodbyeCause::ALL, reader)
    }
}

impl ControlMessage {
    fn kind(&self) -> u8 {
        match self {
            ControlMessage::Fence { .. } => FENCE,
            ControlMessage::Dialling { .. } => DIALLING,
            ControlMessage::Expected { .. } => EXPECTED,
            ControlMessage::Drain => DRAIN,
            ControlMessage::Drained => DRAINED,
            ControlMessage::Goodbye { .. } => GOODBYE,
            ControlMessage::Lane { .. } => LANE,
        }
    }

    /// Returns an error for a control message that cannot be encoded.
    pub(super) fn check(&self) -> Result<(), SessionError> {
        match self {
            ControlMessage::Fence { refused, .. } if refused.len() > FENCE_REFUSED_MAX => {
                Err(SessionError::Unusable(format!("a fence with {} refusals", refused.len())))
            }
            _ => Ok(()),
        }
    }

    fn encode(&self, into: &mut Vec<u8>) {
        match self {
            ControlMessage::Fence { channel, generation, placed, refused, cause, reason } => {
                put_channel(into, *channel, *generation);
                into.extend_from_slice(&placed.to_le_bytes());
                into.extend_from_slice(&(refused.len() as u16).to_le_bytes());
                for (frame, why) in refused {
                    into.extend_from_slice(&frame.to_le_bytes());
                    into.push(*why);
                }
                into.push(*cause as u8);
                put_reason(into, reason);
            }
            ControlMessage::Dialling { channel, generation, source } => {
                put_channel(into, *channel, *generation);
                put_address(into, *source);
            }
            ControlMessage::Expected { channel, generation } => put_channel(into, *channel, *generation),
            ControlMessage::Lane { channel, generation, handle } => {
                put_channel(into, *channel, *generation);
                into.extend_from_slice(&handle[..]);
            }
            ControlMessage::Drain | ControlMessage::Drained => {}
            ControlMessage::Goodbye { cause, reason } => {
                into.push(*cause as u8);
                put_reason(into, reason);
            }
        }
    }

    fn decode(kind: u8, reader: &mut Reader<'_>) -> Result<ControlMessage, SessionError> {
        Ok(match kind {
            FENCE => ControlMessage::Fence {
                channel: reader.u16()?,
                generation: reader.u32()?,
                placed: reader.u64()?,
                refused: read_refused(reader)?,
                cause: FenceCause::read(reader)?,
                reason: read_reason(reader)?,
            },
            DIALLING => ControlMessage::Dialling {
                channel: reader.u16()?,
                generation: reader.u32()?,
                source: reader.address()?,
            },
            EXPECTED => ControlMessage::Expected { channel: reader.u16()?, generation: reader.u32()? },
            DRAIN => ControlMessage::Drain,
            DRAINED => ControlMessage::Drained,
            GOODBYE => {
                ControlMessage::Goodbye { cause: GoodbyeCause::read(reader)?, reason: read_reason(reader)? }
            }
            LANE => ControlMessage::Lane {
                channel: reader.u16()?,
                generation: reader.u32()?,
                handle: Box::new(reader.array()?),
            },
            unknown => return Err(SessionError::UnknownKind(unknown)),
        })
    }
}

/// The plain content of one sealed message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame<M> {
    /// Number of messages that the sender has received from the other end.
    pub received: u64,
    /// The message and its number, counted from 1; `None` in a heartbeat.
    pub numbered: Option<(u64, M)>,
}

impl Frame<&ControlMessage> {
    /// Encodes the frame as the plain content of one sealed message.
    pub fn encode(&self) -> Vec<u8> {
        let kind = self.numbered.map_or(HEARTBEAT, |(_, message)| message.kind());
        let mut bytes = vec![kind];
        bytes.extend_from_slice(&self.received.to_le_bytes());
        if let Some((number, message)) = self.numbered {
            bytes.extend_from_slice(&number.to_le_bytes());
            message.encode(&mut bytes);
        }
        bytes
    }
}

impl Frame<ControlMessage> {
    /// Decodes a frame that a peer sent.
    pub fn decode(bytes: &[u8]) -> Result<Frame<ControlMessage>, SessionError> {
        let mut reader = Reader::new(bytes, "a control message");
        let (kind, received) = (reader.u8()?, reader.u64()?);
        let numbered = match kind {
            HEARTBEAT => None,
            kind => Some((reader.u64()?, ControlMessage::decode(kind, &mut reader)?)),
        };
        reader.end()?;
        Ok(Frame { received, numbered })
    }
}

impl From<HandshakeError> for SessionError {
    fn from(error: HandshakeError) -> SessionError {
        SessionError::Malformed(match error {
            HandshakeError::Malformed { what, why } => format!("{what}: {why}"),
            other => other.to_string(),
        })
    }
}

fn put_channel(into: &mut Vec<u8>, channel: u16, generation: u32) {
    into.extend_from_slice(&channel.to_le_bytes());
    into.extend_from_slice(&generation.to_le_bytes());
}

/// Decodes a code, which is the index of its value in `all`.
fn read_code<T: Copy>(what: &str, all: &[T], reader: &mut Reader<'_>) -> Result<T, SessionError> {
    let code = usize::from(reader.u8()?);
    reader.within(what, code, 0..=all.len() - 1)?;
    Ok(all[code])
}

fn put_reason(into: &mut Vec<u8>, reason: &str) {
    let mut reason = clean(reason);
    clip(&mut reason, REASON_BYTES_MAX);
    into.extend_from_slice(&(reason.len() as u16).to_le_bytes());
    into.extend_from_slice(reason.as_bytes());
}

fn read_reason(reader: &mut Reader<'_>) -> Result<String, SessionError> {
    let len = usize::from(reader.u16()?);
    reader.within("bytes of reason", len, 0..=REASON_BYTES_MAX)?;
    Ok(reader.printable(len)?)
}

fn read_refused(reader: &mut Reader<'_>) -> Result<Vec<(u64, u8)>, SessionError> {
    let count = usize::from(reader.u16()?);
    reader.within("refusals", count, 0..=FENCE_REFUSED_MAX)?;
    (0..count).map(|_| Ok((reader.u64()?, reader.u8()?))).collect()
}
