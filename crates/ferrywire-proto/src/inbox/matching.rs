//! Matching of messages and receives, in the order in which the peer posted its sends.
//!
//! Each message has a number, and one that comes early waits. A short message comes whole and is held until a receive
//! meets it, charged to the peer's credit; of a large one only the announcement comes, and its data are asked for with
//! the key of the receive that met it.
//!
//! Invariant: messages and receives of one tag meet in their orders; what is held of the peer's is bounded by its credit
//! and by how far ahead it may be. Read next: `reassembly.rs`, for large messages.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::{Message, Reply};
use crate::limits::{self, PeerLimits};
use crate::operation::Operation;
use crate::wire::{Header, Kind, Refusal, WITHDRAWN};

/// A message of the peer that no receive has met.
#[derive(Debug)]
pub(super) enum Arrived {
    Eager(Message),
    Announced { tag: u64, number: u64, transfer: u64, total: u64 },
}

impl Arrived {
    fn tag(&self) -> u64 {
        match self {
            Arrived::Eager(Message { tag, .. }) | Arrived::Announced { tag, .. } => *tag,
        }
    }

    fn number(&self) -> u64 {
        match self {
            Arrived::Eager(Message { number, .. }) | Arrived::Announced { number, .. } => *number,
        }
    }

    fn is_announced(&self) -> bool {
        matches!(self, Arrived::Announced { .. })
    }
}

#[derive(Debug)]
pub(super) struct Matching<O> {
    /// Receives by tag, in the order of posting.
    posted: HashMap<u64, VecDeque<O>>,
    /// By tag and number: a peer may take back any of very many.
    pub(super) unexpected: HashMap<u64, BTreeMap<u64, Arrived>>,
    pub(super) announced_held: usize,
    /// Those that came before their turn; nothing where one was taken back or refused, which has its turn all the same.
    pub(super) early: BTreeMap<u64, Option<Arrived>>,
    pub(super) next_number: u64,
    /// Credit that eager messages hold until they are received.
    pub(super) eager_held: usize,
    /// What the peer was given back for messages that are held again: it is taken off what is given back next.
    pub(super) credit_owed: usize,
    pub(super) consumed: usize,
    limits: PeerLimits,
}

impl<O> Matching<O> {
    pub fn new(limits: PeerLimits) -> Matching<O> {
        Matching {
            posted: HashMap::new(),
            unexpected: HashMap::new(),
            announced_held: 0,
            early: BTreeMap::new(),
            next_number: 0,
            eager_held: 0,
            credit_owed: 0,
            consumed: 0,
            limits,
        }
    }
}

impl<O: Operation> Matching<O> {
    /// A whole eager message, or the announcement of a large one, arrived.
    pub fn message(&mut self, header: &Header, bytes: Vec<u8>) -> Result<Vec<Reply<O>>, Refusal> {
        let cost = match header.kind {
            Kind::Send => bytes.len() + limits::EAGER_OVERHEAD_BYTES,
            _ => 0,
        };
        let (tag, number) = (header.key, header.offset);
        let arrived = match header.kind {
            Kind::Send => Some(Arrived::Eager(Message { tag, number, bytes })),
            _ if header.total == WITHDRAWN => None,
            _ => Some(Arrived::Announced { tag, number, transfer: header.transfer, total: header.total }),
        };
        if arrived.is_none() && self.take_back(tag, number) {
            return Ok(Vec::new());
        }
        if number < self.next_number || self.early.contains_key(&number) {
            return Err(Refusal::Other);
        }
        // The one that is due makes room: those that wait for it do not count against it.
        let ahead = if number > self.next_number { self.early.len() } else { 0 };
        // Only a peer that disregards its credit, or how far ahead it may be, gets here.
        if self.eager_held + cost > self.limits.eager_credit_bytes + self.credit_owed
            || ahead >= self.limits.early_frames_max
        {
            return Err(Refusal::Limit);
        }
        self.eager_held += cost;
        let mut replies = Vec::new();
        let full = self.announced_held + ahead >= limits::ANNOUNCED_SENDS_MAX;
        let arrived = match arrived {
            Some(Arrived::Announced { transfer, .. }) if full => {
                let mut refuse = Header::new(Kind::Refuse);
                refuse.transfer = transfer;
                refuse.key = Refusal::Limit as u64;
                replies.push(Reply::Frame(refuse));
                // The number has had its turn, or those behind it would wait for ever.
                None
            }
            arrived => arrived,
        };
        self.early.insert(number, arrived);
        while let Some(arrived) = self.early.remove(&self.next_number) {
            self.next_number += 1;
            arrived.into_iter().for_each(|arrived| self.arrive(arrived, &mut replies));
        }
        Ok(replies)
    }

    fn arrive(&mut self, arrived: Arrived, replies: &mut Vec<Reply<O>>) {
        let tag = arrived.tag();
        match take_front(&mut self.posted, tag) {
            Some(op) => self.meet(op, arrived, replies),
            None => {
                self.announced_held += usize::from(arrived.is_announced());
                self.unexpected.entry(tag).or_default().insert(arrived.number(), arrived);
            }
        }
    }

    /// Posts a receive behind those of its tag, or `first`, ahead of them.
    pub fn post(&mut self, op: O, first: bool) -> Vec<Reply<O>> {
        let mut replies = Vec::new();
        match take_first(&mut self.unexpected, op.key()) {
            Some(arrived) => {
                self.announced_held -= usize::from(arrived.is_announced());
                self.meet(op, arrived, &mut replies);
            }
            None => {
                let posted = self.posted.entry(op.key()).or_default();
                if first { posted.push_front(op) } else { posted.push_back(op) }
            }
        }
        replies
    }

    /// A message whose receive could not take it is for the next receive that has met no other.
    pub fn return_message(&mut self, message: Message) -> Vec<Reply<O>> {
        let mut replies = Vec::new();
        self.eager_held += message.cost();
        self.credit_owed += message.cost();
        self.arrive(Arrived::Eager(message), &mut replies);
        replies
    }

    /// Takes a posted receive out that has met no message yet.
    pub fn unpost(&mut self, tag: u64, is_it: impl Fn(&O) -> bool) -> Option<O> {
        let list = self.posted.get_mut(&tag)?;
        let taken = list.iter().position(is_it).and_then(|at| list.remove(at));
        if list.is_empty() {
            self.posted.remove(&tag);
        }
        taken
    }

    /// A receive and its message have found each other.
    fn meet(&mut self, op: O, arrived: Arrived, replies: &mut Vec<Reply<O>>) {
        match arrived {
            Arrived::Eager(message) => {
                let (cost, message_bytes) = (message.cost(), message.bytes.len() as u64);
                replies.push(match message_bytes <= op.total() {
                    true => Reply::Place(op, message),
                    false => Reply::Truncated { op, message_bytes },
                });
                self.consume(cost, replies);
            }
            Arrived::Announced { transfer, total, .. } => {
                let mut answer = Header::new(Kind::Match);
                answer.transfer = transfer;
                if total > op.total() {
                    answer.kind = Kind::Refuse;
                    answer.key = Refusal::OutOfRegion as u64;
                    replies.push(Reply::Truncated { op, message_bytes: total });
                } else if total == 0 {
                    replies.push(Reply::Received(op));
                } else {
                    answer.key = op.id();
                    replies.push(Reply::Open { op, bytes: total });
                }
                replies.push(Reply::Frame(answer));
            }
        }
    }

    /// An eager message has been received: its credit goes back to the peer, a quarter of all at a time.
    fn consume(&mut self, cost: usize, replies: &mut Vec<Reply<O>>) {
        let owed = cost.min(self.credit_owed);
        self.credit_owed -= owed;
        self.eager_held -= cost;
        self.consumed += cost - owed;
        if self.consumed >= self.limits.eager_credit_bytes / 4 {
            let mut credit = Header::new(Kind::Credit);
            credit.total = std::mem::take(&mut self.consumed) as u64;
            replies.push(Reply::Frame(credit));
        }
    }

    /// The peer is gone: gives back the receives that wait. What has arrived whole can still be received; the rest of an
    /// announced message will not come.
    pub fn close(&mut self) -> Vec<O> {
        let ops = self.posted.drain().flat_map(|(_, list)| list).collect();
        for list in self.unexpected.values_mut() {
            list.retain(|_, arrived| matches!(arrived, Arrived::Eager(_)));
        }
        self.unexpected.retain(|_, list| !list.is_empty());
        self.early.clear();
        ops
    }

    #[cfg(test)]
    pub fn check_idle(&self) {
        assert!(self.posted.is_empty() && self.unexpected.is_empty() && self.early.is_empty());
        assert_eq!((self.announced_held, self.eager_held, self.credit_owed), (0, 0, 0));
    }

    /// The peer takes a message back: true if its number has been heard of, so that nothing waits for that. One that a
    /// receive has met cannot be taken back here: its sender answers the match.
    fn take_back(&mut self, tag: u64, number: u64) -> bool {
        if let Some(early) = self.early.get_mut(&number) {
            early.take_if(|early| early.is_announced());
            return true;
        }
        if let Some(list) = self.unexpected.get_mut(&tag)
            && list.get(&number).is_some_and(Arrived::is_announced)
        {
            list.remove(&number);
            self.announced_held -= 1;
            if list.is_empty() {
                self.unexpected.remove(&tag);
            }
        }
        number < self.next_number
    }
}

fn take_first<T>(map: &mut HashMap<u64, BTreeMap<u64, T>>, tag: u64) -> Option<T> {
    let list = map.get_mut(&tag)?;
    let (_, first) = list.pop_first()?;
    if list.is_empty() {
        map.remove(&tag);
    }
    Some(first)
}

fn take_front<T>(map: &mut HashMap<u64, VecDeque<T>>, tag: u64) -> Option<T> {
    let list = map.get_mut(&tag)?;
    let first = list.pop_front();
    if list.is_empty() {
        map.remove(&tag);
    }
    first
}
