//! Notifications of a peer: those that come with bytes, those that follow a transfer's bytes, and standalone
//! ones.
//!
//! A notification that follows a transfer waits until all bytes of the transfer are counted, on whichever
//! channels they arrive. A standalone notification has a number and waits for those before it.
//!
//! Invariants: each notification is delivered once; each is charged to a limit. Early ones have a limit of
//! their own, so they cannot block the notification that they wait for.
//! Read next: `matching.rs`.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::limits::{self, PeerLimits};
use crate::wire::{Header, Kind, Refusal, WITHDRAWN};

#[derive(Debug)]
pub(super) struct Notifications {
    /// Notifications that the user may take.
    ready: VecDeque<Vec<u8>>,
    /// Total bytes of the notifications in `ready` and `following`.
    pub(super) held_bytes: usize,
    /// Bytes of early notifications, which the user cannot take yet.
    pub(super) early_bytes: usize,
    /// Bytes placed so far of each transfer that a notification will follow.
    counted: HashMap<u64, u64>,
    /// Notifications that wait for the bytes of their transfer: the number of bytes, and the message.
    following: HashMap<u64, (u64, Vec<u8>)>,
    /// Standalone notifications that arrived early; `None` stands for a refused one.
    early: BTreeMap<u64, Option<Vec<u8>>>,
    next: u64,
    limits: PeerLimits,
}

impl Notifications {
    pub fn new(limits: PeerLimits) -> Notifications {
        Notifications {
            ready: VecDeque::new(),
            held_bytes: 0,
            early_bytes: 0,
            counted: HashMap::new(),
            following: HashMap::new(),
            early: BTreeMap::new(),
            next: 0,
            limits,
        }
    }

    /// Counts placed bytes of a transfer that a notification follows; returns whether they released the
    /// notification.
    pub fn count(&mut self, header: &Header) -> Result<bool, Refusal> {
        if self.counted.len() >= limits::COUNTED_TRANSFERS_MAX && !self.counted.contains_key(&header.transfer)
        {
            return Err(Refusal::Limit);
        }
        let counted = self.counted.entry(header.transfer).or_default();
        *counted += u64::from(header.len);
        let done = *counted;
        if self.following.get(&header.transfer).is_none_or(|(total, _)| *total > done) {
            return Ok(false);
        }
        self.counted.remove(&header.transfer);
        let released = self.following.remove(&header.transfer);
        self.ready.extend(released.map(|(_, message)| message));
        Ok(true)
    }

    /// Takes a notification that has arrived: with bytes, standalone, or to follow a transfer's bytes.
    pub fn arrive(&mut self, header: &Header, message: Vec<u8>) -> Result<(), Refusal> {
        let alone = header.kind == Kind::Notify && header.total == 0;
        if header.kind == Kind::Notify && header.total == WITHDRAWN {
            self.forget(header.transfer);
            return Ok(());
        }
        // A repeated notification is refused: it would be charged and never taken.
        let known = if alone {
            header.transfer < self.next || self.early.contains_key(&header.transfer)
        } else {
            header.kind == Kind::Notify && self.following.contains_key(&header.transfer)
        };
        if known {
            return Err(Refusal::Other);
        }
        // The user cannot take early notifications, and very many may come before a lost connection is
        // noticed. So they are counted separately, and do not block the one that they wait for.
        let early = alone && header.transfer > self.next;
        if early && self.early.len() >= self.limits.early_frames_max {
            return Err(Refusal::Limit);
        }
        let fits = self.has_room(early, message.len());
        if fits {
            *if early { &mut self.early_bytes } else { &mut self.held_bytes } += message.len();
        }
        // The number of a refused notification counts as used.
        if early {
            self.early.insert(header.transfer, fits.then_some(message));
        } else if alone {
            self.next += 1;
            self.ready.extend(fits.then_some(message));
            self.deliver_in_turn();
        } else if fits {
            self.deliver_behind_bytes(header, message);
        }
        if fits { Ok(()) } else { Err(Refusal::Limit) }
    }

    /// Takes the next notification that is ready.
    pub fn take(&mut self) -> Option<Vec<u8>> {
        let message = self.ready.pop_front()?;
        self.held_bytes -= message.len();
        Some(message)
    }

    pub fn is_empty(&self) -> bool {
        self.ready.is_empty()
    }

    /// Closes the notifications of a lost peer: those that are not released are discarded.
    pub fn close(&mut self) {
        self.following.clear();
        self.counted.clear();
    }

    /// Whether a notification of `bytes` bytes may be held.
    fn has_room(&self, early: bool, bytes: usize) -> bool {
        let (held, bytes_max) = (self.ready.len() + self.following.len(), self.limits.notification_bytes_max);
        if early {
            // Early notifications become ready in their turn, however many are held by then. So both together
            // are bounded: otherwise a peer could grow the list without end by one refused notification and
            // many behind it.
            return held + self.early.len() < limits::NOTIFICATIONS_HELD_MAX + self.limits.early_frames_max
                && self.early_bytes + bytes <= bytes_max
                && self.held_bytes + self.early_bytes + bytes <= 2 * bytes_max;
        }
        held < limits::NOTIFICATIONS_HELD_MAX && self.held_bytes + bytes <= bytes_max
    }

    /// Moves early notifications to `ready`, up to the first number that is missing.
    fn deliver_in_turn(&mut self) {
        while let Some(message) = self.early.remove(&self.next) {
            self.next += 1;
            let bytes = message.as_ref().map_or(0, Vec::len);
            self.early_bytes -= bytes;
            self.held_bytes += bytes;
            self.ready.extend(message);
        }
    }

    fn deliver_behind_bytes(&mut self, header: &Header, message: Vec<u8>) {
        let done = self.counted.get(&header.transfer).copied().unwrap_or(0);
        if header.kind == Kind::Notify && done < header.total {
            self.following.insert(header.transfer, (header.total, message));
            return;
        }
        if header.kind == Kind::Notify {
            self.counted.remove(&header.transfer);
        }
        self.ready.push_back(message);
    }

    /// Discards the counts and the notification of a failed transfer.
    fn forget(&mut self, transfer: u64) {
        self.counted.remove(&transfer);
        if let Some((_, message)) = self.following.remove(&transfer) {
            self.held_bytes -= message.len();
        }
    }

    #[cfg(test)]
    pub fn check_idle(&self) {
        assert!(self.early.is_empty() && self.following.is_empty() && self.counted.is_empty(), "{self:?}");
        assert!(self.ready.is_empty() && self.held_bytes == 0 && self.early_bytes == 0, "{self:?}");
    }
}
