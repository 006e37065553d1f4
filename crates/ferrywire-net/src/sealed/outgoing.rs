//! The memory where a protected connection seals records, and the way of the records to the kernel.
//!
//! The records of a short send are sealed into a buffer, which the kernel copies. Those of a long send are
//! sealed into *slots*, whose pages the connection below lends to the kernel. A slot's states:
//!
//! ```text
//! free --choose--> filled and sent, in turns --choose the next slot--> awaited --placed--> free
//! ```
//!
//! Invariants: sealed bytes do not change before the kernel has taken them, and in a slot not before the peer
//! has placed them. A slot never contains anything but sealed records. So a packet that the kernel sends
//! again, after its slot has got new contents, shows no payload.
//! Read next: `tcp/lending.rs`.

use std::collections::VecDeque;
use std::io;

use ferrywire_proto::limits::{LENDING_PIPES_MAX, RECORD_BYTES_MAX, SEALED_SLOTS};
use ferrywire_proto::record::RECORD_OVERHEAD;
use ferrywire_sys::mapping::{AddressRange, HUGE_PAGE_BYTES, PAGE_BYTES, prefer_huge_pages};

use crate::{Conn, IoVec};

/// Bytes of the longest record.
const RECORD_BYTES: usize = RECORD_BYTES_MAX + RECORD_OVERHEAD;
/// Size in bytes of the buffer and of a slot: four records of the longest kind, and short records between
/// them. More would leave the cache before they are used.
pub(super) const SLOT_BYTES: usize = (4 * RECORD_BYTES).next_multiple_of(PAGE_BYTES);
// What SECURITY.md states: two buffers and the joined payload of short pieces; slots on as many connections as may lend.
const _: () = assert!(2 * SLOT_BYTES + RECORD_BYTES_MAX == 584 << 10);
const _: () = assert!(SEALED_SLOTS * SLOT_BYTES <= 4_200 << 10 && LENDING_PIPES_MAX == 64);
/// Shortest send in bytes whose records are lent. To copy a shorter one, or a batch of small messages, costs
/// less.
const LENT_BYTES_MIN: usize = 256 << 10;

/// Gives a buffer its size at its first use. `vec!` asks for zeroed memory, which costs nothing where it is fresh from the
/// kernel, and is then touched only where records lie; `resize` would write all of it.
pub(super) fn allocate(buffer: &mut Vec<u8>) {
    if buffer.is_empty() {
        *buffer = vec![0; SLOT_BYTES];
    }
}

/// Sealed records that the kernel has not taken: the bytes from `sent` to `end` of the newest slot if
/// `in_slot`, else of the buffer.
#[derive(Default)]
pub(super) struct Outgoing {
    buffer: Vec<u8>,
    /// Present if the caller reports what the peer has placed, and the connection below lends.
    slots: Option<Slots>,
    in_slot: bool,
    sent: usize,
    end: usize,
    /// Payload bytes sealed so far.
    sealed: u64,
}

impl Outgoing {
    /// Seals long sends into slots from now on.
    pub fn lend(&mut self) {
        self.slots = Some(Slots::default());
    }

    /// Number of sealed bytes that the kernel has not taken.
    pub fn unsent(&self) -> usize {
        self.end - self.sent
    }

    /// Chooses the buffer or a slot for the next records of a send of `bytes` bytes. The choice has room for a
    /// record of any length. The kernel must have taken all earlier records.
    pub fn choose(&mut self, bytes: usize, conn: &dyn Conn) {
        debug_assert_eq!(self.sent, self.end, "records are sent in order");
        if !conn.lends() {
            self.slots = None;
        }
        // On a path with a long RTT a slot would stay in use for one RTT.
        let lends = bytes >= LENT_BYTES_MIN && !conn.is_long();
        let slot = self.slots.as_mut().filter(|_| lends).and_then(Slots::choose);
        self.in_slot = slot.is_some();
        let at = slot.unwrap_or_else(|| {
            allocate(&mut self.buffer);
            0
        });
        (self.sent, self.end) = (at, at);
    }

    /// Room for the next record, which has `bytes` bytes; `None` if the rest of the buffer or slot is shorter.
    pub fn room(&mut self, bytes: usize) -> Option<&mut [u8]> {
        let range = self.end..self.end + bytes;
        match self.slots.as_mut().filter(|_| self.in_slot) {
            Some(_) if range.end > SLOT_BYTES => None,
            Some(slots) => {
                // SAFETY: `end` lies within the newest slot.
                let base = unsafe { slots.newest().add(range.start) };
                // SAFETY: the range lies within the newest slot, behind its sealed bytes, and nothing else
                // refers to it.
                Some(unsafe { std::slice::from_raw_parts_mut(base, bytes) })
            }
            None => self.buffer.get_mut(range),
        }
    }

    /// Notes that the room that was returned last contains a record with `payload_bytes` bytes of payload.
    pub fn sealed(&mut self, payload_bytes: usize) {
        self.end += payload_bytes + RECORD_OVERHEAD;
        self.sealed += payload_bytes as u64;
        if let Some(slots) = self.slots.as_mut().filter(|_| self.in_slot) {
            slots.filled = self.end;
            slots.used.back_mut().into_iter().for_each(|newest| newest.end = self.sealed);
        }
    }

    /// Hands sealed records to the kernel until it has all of them or has no room.
    pub fn push(&mut self, conn: &mut dyn Conn) -> io::Result<()> {
        while self.sent < self.end {
            self.sent += match self.slots.as_mut().filter(|_| self.in_slot) {
                Some(slots) => {
                    // SAFETY: `sent` lies within the newest slot.
                    let base = unsafe { slots.newest().add(self.sent) };
                    // SAFETY: the slot is readable. It is written to again only after the peer has placed its
                    // last byte. A slot that is never placed is unmapped, which returns its pages.
                    unsafe { conn.send_lent(&[IoVec::new(base, self.end - self.sent)]) }?
                }
                None => conn.write(&self.buffer[self.sent..self.end])?,
            };
        }
        Ok(())
    }

    /// Frees the slots whose payload ends at or before `position`, which counts payload bytes from the first
    /// sealed one: the peer has placed all bytes before it.
    pub fn placed(&mut self, position: u64) {
        let Some(slots) = &mut self.slots else { return };
        while let Some(slot) = slots.used.pop_front_if(|slot| slot.end <= position) {
            if self.in_slot && slots.used.is_empty() {
                if self.sent < self.end {
                    // The peer acknowledges bytes that the kernel has not even taken.
                    slots.used.push_back(slot);
                    return;
                }
                (self.in_slot, self.sent, self.end) = (false, 0, 0);
            }
            slots.free.push(slot.number);
        }
    }
}

/// The slots of a connection.
#[derive(Default)]
struct Slots {
    /// Mapped at the first long send, in huge pages where the kernel has some: small ones cost each end a miss of the TLB
    /// per page. Only pages of slots that were in use at once are taken.
    memory: Option<AddressRange>,
    /// Slots in use, oldest first. Records are added to the newest slot.
    used: VecDeque<Slot>,
    /// Number of sealed bytes in the newest slot.
    filled: usize,
    /// Numbers of free slots. The slot that was freed last is taken first: it may still be in the cache.
    free: Vec<usize>,
}

struct Slot {
    number: usize,
    /// Position in the payload of the connection behind the last payload byte of this slot.
    end: u64,
}

impl Slots {
    /// Takes a free slot, unless the newest one has room for a record of any length. Returns the number of
    /// sealed bytes in the newest slot, or `None` if all slots are in use.
    fn choose(&mut self) -> Option<usize> {
        if self.memory.is_none() {
            let mut memory = AddressRange::reserve(SEALED_SLOTS * SLOT_BYTES, HUGE_PAGE_BYTES).ok()?;
            memory.back().ok()?;
            prefer_huge_pages(memory.base() as *mut u8, memory.len());
            self.memory = Some(memory);
            self.free = (0..SEALED_SLOTS).rev().collect();
        }
        if self.used.is_empty() || self.filled + RECORD_BYTES > SLOT_BYTES {
            self.used.push_back(Slot { number: self.free.pop()?, end: u64::MAX });
            self.filled = 0;
        }
        Some(self.filled)
    }

    /// Address of the newest slot.
    fn newest(&self) -> *mut u8 {
        let base = self.memory.as_ref().map_or(0, AddressRange::base);
        let number = self.used.back().map_or(0, |slot| slot.number);
        (base + number * SLOT_BYTES) as *mut u8
    }
}
