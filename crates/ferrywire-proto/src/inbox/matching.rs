//! Matching messages and receives by tag, in the order in which the peer posted its sends.
//!
//! Each message has a number, and a message that arrives early waits for those before it. A short message
//! (eager) comes with its bytes. If its receive is posted when its header comes, the bytes go there directly;
//! else the message is held until a receive matches it, charged to the peer's credit. Of a long message only an
//! announcement arrives; once a receive matches it, its data is requested under that receive's key.
//!
//! Invariants: messages and receives of one tag match in order; the peer's held messages are bounded by its
//! credit and by the reorder limit.
//! Read next: `reassembly.rs`, for long messages.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::{Message, Reply};
use crate::limits::{self, PeerLimits};
use crate::operation::Operation;
use crate::wire::{Header, Kind, Refusal, WITHDRAWN};

/// Portions of the credit in which it is returned.
const PORTIONS: usize = 4;
const SMALL_PORTIONS: usize = 64;

/// A message of the peer that no receive has matched.
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
struct GivenUp {
    tag: u64,
    /// Credit in bytes that the message uses.
    cost: usize,
}

#[derive(Debug)]
pub(super) struct Matching<O> {
    /// Posted receives by tag, in the order of posting.
    posted: HashMap<u64, VecDeque<O>>,
    /// Unmatched messages by tag and number, so that a peer can take back any one of very many.
    pub(super) unexpected: HashMap<u64, BTreeMap<u64, Arrived>>,
    pub(super) announced_held: usize,
    /// Messages that arrived early. `None` stands for one that was taken back or refused; its number still
    /// counts as used.
    pub(super) early: BTreeMap<u64, Option<Arrived>>,
    pub(super) next_number: u64,
    /// Messages that had begun and whose receives have ended without them, by number. Each comes whole, and later ones of
    /// its tag wait for it.
    given_up: BTreeMap<u64, GivenUp>,
    /// Credit in bytes that unmatched eager messages use, and those that have begun or were given up.
    pub(super) eager_held: usize,
    /// Credit in bytes that was returned for messages which are held again. It is deducted from the next
    /// returns.
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
            given_up: BTreeMap::new(),
            next_number: 0,
            eager_held: 0,
            credit_owed: 0,
            consumed: 0,
            limits,
        }
    }
}

impl<O: Operation> Matching<O> {
    /// Takes an eager message or an announcement that has arrived.
    pub fn message(&mut self, header: &Header, bytes: Vec<u8>) -> Result<Vec<Reply<O>>, Refusal> {
        let cost = match header.kind {
            Kind::Send => eager_cost(bytes.len()),
            _ => 0,
        };
        let (tag, number) = (header.key, header.offset);
        let arrived = match header.kind {
            Kind::Send => Some(Arrived::Eager(Message { tag, number, bytes })),
            _ if header.total == WITHDRAWN => None,
            _ => Some(Arrived::Announced { tag, number, transfer: header.transfer, total: header.total }),
        };
        if self.given_up.get(&number).is_some_and(|each| each.tag == tag) {
            return Ok(self.complete(number, arrived, cost));
        }
        if arrived.is_none() && self.take_back(tag, number) {
            return Ok(Vec::new());
        }
        if number < self.next_number || self.early.contains_key(&number) {
            return Err(Refusal::Other);
        }
        // The message that is due is exempt from the reorder limit: it lets the waiting ones go.
        let ahead = if number > self.next_number { self.early.len() } else { 0 };
        // A peer that respects its credit and the reorder limit never gets here.
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
                // The number counts as used, or all later messages would wait for ever.
                None
            }
            arrived => arrived,
        };
        self.early.insert(number, arrived);
        self.let_early_go(&mut replies);
        Ok(replies)
    }

    /// Matches messages that were early and whose turn it is.
    fn let_early_go(&mut self, replies: &mut Vec<Reply<O>>) {
        while let Some(arrived) = self.early.remove(&self.next_number) {
            self.next_number += 1;
            arrived.into_iter().for_each(|arrived| self.arrive(arrived, replies));
        }
    }

    /// Matches an eager message whose bytes follow with the next receive of its tag, if the message is due, fits, and
    /// `takes` is true of the receive. The message uses its credit until [`Matching::end_begun`].
    pub fn begin(&mut self, header: &Header, takes: impl Fn(&O) -> bool) -> Option<(O, Vec<Reply<O>>)> {
        let cost = eager_cost(header.len as usize);
        let first = self.posted.get(&header.key)?.front()?;
        if header.offset != self.next_number
            || self.is_held_up(header.key, header.offset)
            || self.eager_held + cost > self.limits.eager_credit_bytes + self.credit_owed
            || u64::from(header.len) > first.total()
            || !takes(first)
        {
            return None;
        }
        let op = take_front(&mut self.posted, header.key)?;
        let mut replies = Vec::new();
        self.next_number += 1;
        self.eager_held += cost;
        self.let_early_go(&mut replies);
        Some((op, replies))
    }

    /// Returns the credit of a message that has begun, and has ended.
    pub fn end_begun(&mut self, bytes: u64) -> Vec<Reply<O>> {
        let mut replies = Vec::new();
        self.consume(eager_cost(bytes as usize), &mut replies);
        replies
    }

    /// Notes that the receive of a message which has begun has ended without it. The message is for another receive once
    /// it has arrived.
    pub fn give_up_begun(&mut self, number: u64, tag: u64, bytes: u64) {
        self.given_up.insert(number, GivenUp { tag, cost: eager_cost(bytes as usize) });
    }

    /// Forgets a message that was given up, and does not come.
    pub fn forget_given_up(&mut self, number: u64) -> Vec<Reply<O>> {
        self.complete(number, None, 0)
    }

    /// Takes a message that was given up: it has arrived whole, or does not come (`None`). Later ones of its tag no longer
    /// wait for it.
    fn complete(&mut self, number: u64, arrived: Option<Arrived>, cost: usize) -> Vec<Reply<O>> {
        let mut replies = Vec::new();
        let Some(GivenUp { tag, cost: held }) = self.given_up.remove(&number) else { return replies };
        self.eager_held -= held;
        // Only the message that has begun may come.
        if let Some(arrived) = arrived.filter(|arrived| !arrived.is_announced() && cost == held) {
            self.eager_held += cost;
            self.arrive(arrived, &mut replies);
        }
        while self.posted.contains_key(&tag)
            && let Some(arrived) = self.take_unexpected(tag)
            && let Some(op) = take_front(&mut self.posted, tag)
        {
            self.meet(op, arrived, &mut replies);
        }
        replies
    }

    /// Whether a message of this tag that was given up comes before this number.
    fn is_held_up(&self, tag: u64, number: u64) -> bool {
        self.given_up.range(..number).any(|(_, each)| each.tag == tag)
    }

    /// Takes the first unmatched message of a tag, if it need not wait for one that was given up.
    fn take_unexpected(&mut self, tag: u64) -> Option<Arrived> {
        let number = *self.unexpected.get(&tag)?.first_key_value()?.0;
        if self.is_held_up(tag, number) {
            return None;
        }
        let arrived = take_first(&mut self.unexpected, tag)?;
        self.announced_held -= usize::from(arrived.is_announced());
        Some(arrived)
    }

    /// Frees the credit of a message that has begun, and whose sender has withdrawn it with its credit.
    pub fn withdraw_begun(&mut self, bytes: u64) {
        self.eager_held -= eager_cost(bytes as usize);
    }

    fn arrive(&mut self, arrived: Arrived, replies: &mut Vec<Reply<O>>) {
        let tag = arrived.tag();
        let op = match self.is_held_up(tag, arrived.number()) {
            true => None,
            false => take_front(&mut self.posted, tag),
        };
        match op {
            Some(op) => self.meet(op, arrived, replies),
            None => {
                self.announced_held += usize::from(arrived.is_announced());
                self.unexpected.entry(tag).or_default().insert(arrived.number(), arrived);
            }
        }
    }

    /// Posts a receive behind the others of its tag, or ahead of them with `first`.
    pub fn post(&mut self, op: O, first: bool) -> Vec<Reply<O>> {
        let mut replies = Vec::new();
        match self.take_unexpected(op.key()) {
            Some(arrived) => self.meet(op, arrived, &mut replies),
            None => {
                let posted = self.posted.entry(op.key()).or_default();
                if first { posted.push_front(op) } else { posted.push_back(op) }
            }
        }
        replies
    }

    /// Offers a message whose receive could not take it to the next unmatched receive.
    pub fn return_message(&mut self, message: Message) -> Vec<Reply<O>> {
        let mut replies = Vec::new();
        self.eager_held += message.cost();
        self.credit_owed += message.cost();
        self.arrive(Arrived::Eager(message), &mut replies);
        replies
    }

    /// Removes a posted receive that has matched no message yet.
    pub fn unpost(&mut self, tag: u64, is_it: impl Fn(&O) -> bool) -> Option<O> {
        let list = self.posted.get_mut(&tag)?;
        let taken = list.iter().position(is_it).and_then(|at| list.remove(at));
        if list.is_empty() {
            self.posted.remove(&tag);
        }
        taken
    }

    /// Pairs a receive with its message.
    fn meet(&mut self, op: O, arrived: Arrived, replies: &mut Vec<Reply<O>>) {
        match arrived {
            Arrived::Eager(message) => {
                let (cost, message_bytes) = (message.cost(), message.bytes.len() as u64);
                replies.push(if message_bytes <= op.total() {
                    Reply::Place(op, message)
                } else {
                    Reply::Truncated { op, message_bytes }
                });
                self.consume(cost, replies);
            }
            Arrived::Announced { transfer, total, .. } => {
                if total <= self.limits.eager_bytes_max as u64 {
                    // It was announced for lack of credit.
                    self.return_credit(SMALL_PORTIONS, replies);
                }
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

    /// Frees the credit of a received eager message. It is returned to the peer in portions of a quarter of the total
    /// credit, behind longer messages in smaller ones: by these the peer knows how far this end is behind.
    fn consume(&mut self, cost: usize, replies: &mut Vec<Reply<O>>) {
        let owed = cost.min(self.credit_owed);
        self.credit_owed -= owed;
        self.eager_held -= cost;
        self.consumed += cost - owed;
        let is_long = cost > self.limits.eager_long_bytes;
        self.return_credit(if is_long { SMALL_PORTIONS } else { PORTIONS }, replies);
    }

    /// Returns consumed credit if it is one of this many portions of the total credit.
    fn return_credit(&mut self, portions: usize, replies: &mut Vec<Reply<O>>) {
        if self.consumed >= self.limits.eager_credit_bytes / portions {
            let mut credit = Header::new(Kind::Credit);
            credit.total = std::mem::take(&mut self.consumed) as u64;
            replies.push(Reply::Frame(credit));
        }
    }

    /// Closes the inbox of a lost peer; returns its waiting receives. Complete messages can still be
    /// received; announced ones are discarded, since their data will not arrive.
    pub fn close(&mut self) -> Vec<O> {
        let ops = self.posted.drain().flat_map(|(_, list)| list).collect();
        for list in self.unexpected.values_mut() {
            list.retain(|_, arrived| matches!(arrived, Arrived::Eager(_)));
        }
        self.unexpected.retain(|_, list| !list.is_empty());
        self.early.clear();
        self.given_up.clear();
        ops
    }

    #[cfg(test)]
    pub fn check_idle(&self) {
        assert!(self.posted.is_empty() && self.unexpected.is_empty());
        assert!(self.early.is_empty() && self.given_up.is_empty());
        assert_eq!((self.announced_held, self.eager_held, self.credit_owed), (0, 0, 0));
    }

    /// Handles a withdrawn announcement. Returns true when the number was already seen, so that no later
    /// message waits for it. A matched announcement is left alone: its sender answers the match.
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

/// Credit that an eager message of `bytes` bytes costs.
fn eager_cost(bytes: usize) -> usize {
    bytes + limits::EAGER_OVERHEAD_BYTES
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
