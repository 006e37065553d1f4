//! Notifications of a peer: those that come with bytes, those that follow the bytes of a transfer, and those in turn.
//!
//! One that follows waits until all bytes of its transfer are counted, over whatever channels they come. One that stands
//! alone has a number and waits for those before it.
//!
//! Invariant: each is given out once; what is held is charged to a limit, those that are early apart, so that nothing
//! holds up the one that they wait for. Read next: `matching.rs`.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::limits::{self, PeerLimits};
use crate::wire::{Header, Kind, Refusal, WITHDRAWN};

#[derive(Debug)]
pub(super) struct Notifications {
    /// Those that the user may take.
    ready: VecDeque<Vec<u8>>,
    /// Bytes of those, and of those in `following`.
    pub(super) held_bytes: usize,
    /// Bytes of those that came before their turn, which the user cannot take yet.
    pub(super) early_bytes: usize,
    /// Bytes placed of transfers that a notification will follow.
    counted: HashMap<u64, u64>,
    /// Those that wait for the bytes of their transfer: how many, and the message.
    following: HashMap<u64, (u64, Vec<u8>)>,
    /// Those that came before their turn; nothing where one was refused.
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

    /// Bytes of a transfer with a notification were placed; true if that released the notification.
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

    /// A notification arrived: with its bytes, on its own, or to follow a transfer's bytes.
    pub fn arrive(&mut self, header: &Header, message: Vec<u8>) -> Result<(), Refusal> {
        let alone = header.kind == Kind::Notify && header.total == 0;
        if header.kind == Kind::Notify && header.total == WITHDRAWN {
            self.forget(header.transfer);
            return Ok(());
        }
        // One that is here already holds its place: another would be charged, and never taken.
        let known = if alone {
            header.transfer < self.next || self.early.contains_key(&header.transfer)
        } else {
            header.kind == Kind::Notify && self.following.contains_key(&header.transfer)
        };
        if known {
            return Err(Refusal::Other);
        }
        // The user cannot take those that are early: while a lost connection is noticed there may be very many. So they
        // count apart, and do not hold up the one that they wait for.
        let early = alone && header.transfer > self.next;
        if early && self.early.len() >= self.limits.early_frames_max {
            return Err(Refusal::Limit);
        }
        let fits = self.has_room(early, message.len());
        if fits {
            *if early { &mut self.early_bytes } else { &mut self.held_bytes } += message.len();
        }
        // One that is refused has had its turn all the same.
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

    /// The next one.
    pub fn take(&mut self) -> Option<Vec<u8>> {
        let message = self.ready.pop_front()?;
        self.held_bytes -= message.len();
        Some(message)
    }

    pub fn is_empty(&self) -> bool {
        self.ready.is_empty()
    }

    /// The peer is gone: what has not been released will not be.
    pub fn close(&mut self) {
        self.following.clear();
        self.counted.clear();
    }

    /// Whether one of so many bytes may be held.
    fn has_room(&self, early: bool, bytes: usize) -> bool {
        let (held, bytes_max) = (self.ready.len() + self.following.len(), self.limits.notification_bytes_max);
        if early {
            // Their turn makes them held ones, whatever is held by then: without a bound on both together a peer could go on
            // for ever, by one that is refused in its turn and many behind it.
            return held + self.early.len() < limits::NOTIFICATIONS_HELD_MAX + self.limits.early_frames_max
                && self.early_bytes + bytes <= bytes_max
                && self.held_bytes + self.early_bytes + bytes <= 2 * bytes_max;
        }
        held < limits::NOTIFICATIONS_HELD_MAX && self.held_bytes + bytes <= bytes_max
    }

    /// Those that have waited for one before them can be taken.
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

    /// A transfer with a notification has failed: neither its last bytes nor the message count.
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
