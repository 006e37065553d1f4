//! Two ends of a handshake joined in memory, with fragments, alterations and cuts. No socket, no sleep.

mod adversarial;
mod codec;
mod opening;
mod replay;

use std::collections::VecDeque;

use super::testing::{Shared, config, hello};
use super::*;

pub fn dial(secret: Option<&str>) -> Initiator {
    let purpose = Purpose::New { config: config() };
    Initiator::control(secret.map(str::as_bytes), hello(1), purpose).unwrap()
}

/// Disturbances of the bytes between the two ends.
#[derive(Clone, Debug, Default)]
pub struct Wire {
    /// Longest reads, in turn; an empty list reads all wanted bytes.
    pub fragments: Vec<usize>,
    /// Byte to change in one direction: its position and the XOR mask.
    pub alter: Option<(usize, u8)>,
    /// Position in one direction after which all bytes are lost.
    pub cut: Option<usize>,
    /// Direction of `alter` and `cut`: true towards the initiator.
    pub backwards: bool,
}

pub type End = Result<Outcome, HandshakeError>;

/// Result of a handshake.
#[derive(Debug)]
pub struct Course {
    pub initiator: End,
    pub responder: End,
    /// All bytes sent in each direction.
    pub to_responder: Vec<u8>,
    pub to_initiator: Vec<u8>,
}

impl Course {
    pub fn established(self) -> (Established, Established) {
        match (self.initiator, self.responder) {
            (Ok(Outcome::Control(initiator)), Ok(Outcome::Control(responder))) => (*initiator, *responder),
            other => panic!("{other:?}"),
        }
    }

    pub fn errors(self) -> (HandshakeError, HandshakeError) {
        (self.initiator.unwrap_err(), self.responder.unwrap_err())
    }
}

#[derive(Debug, Default)]
struct Pipe {
    sent: Vec<u8>,
    waiting: VecDeque<u8>,
}

impl Pipe {
    fn put(&mut self, bytes: Vec<u8>, wire: &Wire, marked: bool) {
        for mut byte in bytes {
            let position = self.sent.len();
            self.sent.push(byte);
            if let Some((at, mask)) = wire.alter
                && marked
                && at == position
            {
                byte ^= mask;
            }
            if !marked || wire.cut.is_none_or(|cut| position < cut) {
                self.waiting.push_back(byte);
            }
        }
    }
}

/// Moves bytes between the ends until neither makes progress, then closes the connection for unfinished ends.
pub fn join<A: Admission>(mut initiator: Initiator, mut responder: Responder<A>, wire: &Wire) -> Course {
    let (mut forth, mut back) = (Pipe::default(), Pipe::default());
    let (mut first, mut second) = (None, None);
    let mut fragments = wire.fragments.iter().copied().cycle();
    loop {
        forth.put(initiator.take_output(), wire, !wire.backwards);
        back.put(responder.take_output(), wire, wire.backwards);
        let longest = fragments.next().unwrap_or(usize::MAX);
        let wanted = responder.want().min(longest).min(forth.waiting.len());
        let bytes: Vec<u8> = forth.waiting.drain(..wanted).collect();
        if let Err(error) = responder.feed(&bytes) {
            second = Some(Err(error));
        }
        second = second.or(responder.finished().map(Ok));
        back.put(responder.take_output(), wire, wire.backwards);
        let also_wanted = initiator.want().min(longest).min(back.waiting.len());
        let bytes: Vec<u8> = back.waiting.drain(..also_wanted).collect();
        if let Err(error) = initiator.feed(&bytes) {
            first = Some(Err(error));
        }
        first = first.or(initiator.finished().map(Ok));
        if wanted == 0 && also_wanted == 0 {
            break;
        }
    }
    Course {
        initiator: first.unwrap_or_else(|| Err(initiator.closed())),
        responder: second.unwrap_or_else(|| Err(responder.closed())),
        to_responder: forth.sent,
        to_initiator: back.sent,
    }
}

/// A session between two ends with one secret, and the responder's state, which knows it.
pub fn session(secret: Option<&str>) -> (Shared, Established, Established) {
    let desk = Shared::new(secret);
    let (initiator, responder) =
        join(dial(secret), Responder::new(desk.clone()), &Wire::default()).established();
    desk.remember(&responder);
    (desk, initiator, responder)
}

/// An initiator that resumes a session.
pub fn redial(secret: Option<&str>, session: u64, received: u64, data_key: &DataKey) -> Initiator {
    let purpose = Purpose::Resume { session, received, data_key: data_key.clone() };
    Initiator::control(secret.map(str::as_bytes), hello(1), purpose).unwrap()
}
