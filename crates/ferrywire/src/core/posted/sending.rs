//! Messages of one channel to be sent.
//!
//! A message's states: `waiting -> packed -> posted -> done`. Its frame is finished when the message is done
//! and the peer has acknowledged the frame, in either order. The header of a message to be packed is held
//! until the message is packed: if that fails, the frame is sent without it.
//!
//! Invariant: at most a window of messages are begun beyond the receives that the peer has posted, and at
//! most a window are begun and not done; none before the peer's end of the lane is known to be ready.

use super::slots::{Slot, Slots};
use super::{LanePass, seconds, widen};
use crate::core::queue::Entry;
use crate::error::Error;
use crate::payload::lane::{Lane, Post, Run, Step, Ticket, Way};
use ferrywire_memory::Memory;
use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

/// A message, from the moment its frame is taken.
struct Outgoing {
    frame: u64,
    bytes: usize,
    source: Source,
    /// The frame's entry, once the peer has acknowledged the frame.
    entry: Option<Entry>,
}

enum Source {
    Run(Run),
    /// Ranges to be packed one behind another.
    Ranges(Vec<Run>),
    /// The message is packed in a slot, or being packed while `ranges` is not empty.
    Slot {
        slot: Slot,
        run: Run,
        ranges: Vec<Run>,
    },
}

pub(super) struct Sending {
    window: usize,
    stall_timeout: Duration,
    waiting: VecDeque<Outgoing>,
    posted: VecDeque<(Ticket, Outgoing)>,
    begun: u64,
    /// Whether the peer has reported its end of the lane as ready.
    peer_ready: bool,
    confirmed: u64,
    done: u64,
    /// Number of messages that are not packed yet.
    unpacked: usize,
    most: usize,
    /// When the oldest message became the oldest, or was posted.
    moved_at: Duration,
    /// Since when the lane has refused to post although nothing is posted.
    refused_since: Option<Duration>,
    /// Whether a sent message was in released memory, so that the lane may undo its registration.
    released: bool,
    slots: Slots,
}

impl Sending {
    pub fn new(lane: &dyn Lane, stall_timeout: Duration) -> Sending {
        Sending {
            window: lane.send_window(),
            stall_timeout,
            waiting: VecDeque::new(),
            posted: VecDeque::new(),
            begun: 0,
            peer_ready: !lane.may_stand_alone(),
            confirmed: 0,
            done: 0,
            unpacked: 0,
            most: 0,
            moved_at: Duration::ZERO,
            refused_since: None,
            released: false,
            slots: Slots::new(lane, Way::Pack),
        }
    }

    pub fn is_peer_ready(&self) -> bool {
        self.peer_ready
    }

    pub fn room(&self) -> usize {
        if !self.peer_ready {
            return 0;
        }
        let credit = (self.confirmed + self.window as u64).saturating_sub(self.begun) as usize;
        credit.min(self.window.saturating_sub(self.waiting.len() + self.posted.len()))
    }

    pub fn active(&self) -> bool {
        !self.waiting.is_empty() || !self.posted.is_empty()
    }

    pub fn in_flight(&self) -> bool {
        !self.posted.is_empty()
    }

    /// The window, and how much of it messages use.
    pub fn occupancy(&self) -> (usize, usize) {
        (self.window, self.posted.len())
    }

    /// Whether registrations may have become unused since the last call.
    pub fn has_released(&mut self) -> bool {
        std::mem::take(&mut self.released)
    }

    /// Bytes of posted messages that are not done.
    pub fn bytes_in_flight(&self) -> usize {
        self.posted.iter().map(|(_, message)| message.bytes).sum()
    }

    pub fn most(&self) -> usize {
        self.most
    }

    pub fn admit(&mut self, lane: &mut dyn Lane, frame: u64, entry: &Entry) {
        debug_assert!(self.room() > 0, "a frame was taken without room in the lane");
        let mut ranges: Vec<Run> = Vec::new();
        if let Some((memory, locals)) = entry.payload() {
            for (offset, len) in locals {
                match ranges.last_mut() {
                    Some(last) if last.offset + last.bytes as u64 == offset => last.bytes += len as usize,
                    _ => ranges.push(Run { memory: memory.clone(), offset, bytes: len as usize }),
                }
            }
        }
        let source = match &ranges[..] {
            [run] if lane.takes(Way::Pack, run) => Source::Run(ranges.swap_remove(0)),
            _ => {
                self.unpacked += 1;
                Source::Ranges(ranges)
            }
        };
        self.waiting.push_back(Outgoing { frame, bytes: entry.header.len as usize, source, entry: None });
        self.begun += 1;
    }

    pub fn acknowledged(&mut self, frame: u64, entry: Entry) -> Option<Entry> {
        let all = self.posted.iter_mut().map(|(_, message)| message).chain(&mut self.waiting);
        match all.into_iter().find(|message| message.frame == frame) {
            Some(message) => {
                message.entry = Some(entry);
                None
            }
            None => Some(entry),
        }
    }

    /// Whether the header of this frame waits until its message is packed.
    pub fn is_unpacked(&self, frame: u64) -> bool {
        self.unpacked > 0
            && self.waiting.iter().any(|message| message.frame == frame && !message.source.is_packed())
    }

    pub fn confirm(&mut self, low: u32) -> Result<(), &'static str> {
        self.peer_ready = true;
        self.confirmed = widen(low, self.confirmed, self.begun)
            .ok_or("the peer reports posted receives for messages that were never begun")?;
        Ok(())
    }

    /// Whether an unfinished message reads memory for which `which` is true directly, not from a slot.
    pub fn uses(&self, which: impl Fn(&Arc<Memory>) -> bool) -> bool {
        let mut all = self.posted.iter().map(|(_, message)| message).chain(&self.waiting);
        all.any(|message| match &message.source {
            Source::Run(run) => which(&run.memory),
            Source::Ranges(ranges) | Source::Slot { ranges, .. } => {
                ranges.iter().any(|range| which(&range.memory))
            }
        })
    }

    pub fn poll(&mut self, lane: &mut dyn Lane, now: Duration, pass: &mut LanePass) -> Result<(), String> {
        self.test(lane, now, pass)?;
        self.post(lane, now, pass)
    }

    fn test(&mut self, lane: &mut dyn Lane, now: Duration, pass: &mut LanePass) -> Result<(), String> {
        while let Some((ticket, message)) = self.posted.front() {
            match lane.test_send(*ticket) {
                Step::Done => {}
                Step::Pending if now.saturating_sub(self.moved_at) > self.stall_timeout => {
                    pass.stalled = true;
                    return Err(format!(
                        "message {} ({} bytes) is still not sent after {}: its last test gave result 0, not done",
                        self.done,
                        message.bytes,
                        seconds(self.stall_timeout)
                    ));
                }
                Step::Pending => return Ok(()),
                Step::Unreadable(ticket, why) => return Err(self.unreadable(ticket, why, pass)),
                // A send has no later result to wait for: the peer may never get the message.
                Step::Closing(why) | Step::Failed(why) => return Err(self.failed(message, &why)),
            }
            let Some((_, message)) = self.posted.pop_front() else { return Ok(()) };
            self.done += 1;
            self.moved_at = now;
            pass.worked = true;
            pass.sent_bytes += message.bytes as u64;
            self.released |= matches!(&message.source, Source::Run(run) if run.memory.revoked());
            if let Source::Slot { slot, .. } = message.source {
                self.slots.give_back(slot);
            }
            pass.delivered.extend(message.entry);
        }
        Ok(())
    }

    fn post(&mut self, lane: &mut dyn Lane, now: Duration, pass: &mut LanePass) -> Result<(), String> {
        while let Some(message) = self.waiting.front_mut() {
            let was_packed = message.source.is_packed();
            let run = match message.pack(lane, &mut self.slots)? {
                Poll::Ready(Ok(run)) => run,
                Poll::Ready(Err(error)) => {
                    self.give_up(error, pass);
                    continue;
                }
                Poll::Pending => return Ok(()),
            };
            if !was_packed {
                self.unpacked -= 1;
                // The message's header may be sent now.
                pass.worked = true;
            }
            match lane.isend(&run) {
                Post::Posted(ticket) => {
                    if self.posted.is_empty() {
                        self.moved_at = now;
                    }
                    self.refused_since = None;
                    pass.worked = true;
                    self.posted.extend(self.waiting.pop_front().map(|message| (ticket, message)));
                    self.most = self.most.max(self.posted.len());
                }
                Post::Full(how) => return self.refused(how, now),
                Post::Failed(why) => {
                    let message = &self.waiting[0];
                    return Err(self.failed(message, &why));
                }
            }
        }
        Ok(())
    }

    /// Gives up the oldest message, which cannot be packed. Its header was not sent.
    fn give_up(&mut self, error: Error, pass: &mut LanePass) {
        let Some(message) = self.waiting.pop_front() else { return };
        if let Source::Slot { slot, .. } = message.source {
            self.slots.give_back(slot);
        }
        self.begun -= 1;
        self.unpacked -= 1;
        pass.worked = true;
        pass.given_up.push((message.frame, error));
    }

    /// Handles a full lane. A lane that stays full with nothing posted has failed.
    fn refused(&mut self, how: &str, now: Duration) -> Result<(), String> {
        let since = *self.refused_since.get_or_insert(now);
        if !self.posted.is_empty() {
            self.refused_since = None;
        } else if now.saturating_sub(since) > self.stall_timeout {
            let waited = seconds(self.stall_timeout);
            return Err(format!(
                "isend has accepted no send for {waited} ({how}), although no send is posted"
            ));
        }
        Ok(())
    }

    /// Handles a message whose memory cannot be read. Its header was sent, so only the lane's end withdraws
    /// it.
    fn unreadable(&self, ticket: Ticket, why: Error, pass: &mut LanePass) -> String {
        let frame = self.posted.iter().find(|(each, _)| *each == ticket).map(|(_, message)| message.frame);
        let said = format!("cannot read the memory of a message: {why}");
        pass.unreadable = frame.map(|frame| (frame, why));
        said
    }

    fn failed(&self, message: &Outgoing, why: &str) -> String {
        format!("cannot send message {} ({} bytes): {why}", self.done, message.bytes)
    }

    pub fn state(&self) -> String {
        format!(
            "sending: {} of {} posted, {} wait, {} done, the peer has posted for {}{}",
            self.posted.len(),
            self.window,
            self.waiting.len(),
            self.done,
            self.confirmed,
            if self.peer_ready { "" } else { ", and has not reported its lane as ready" }
        )
    }

    /// Clears the state, since the lane is closed. Returns the acknowledged frames that were not done.
    pub fn clear(&mut self) -> Vec<Entry> {
        if self.in_flight() {
            self.slots.prevent_reuse();
        }
        let posted = self.posted.drain(..).map(|(_, message)| message);
        posted.chain(self.waiting.drain(..)).filter_map(|message| message.entry).collect()
    }
}

impl Source {
    fn is_packed(&self) -> bool {
        match self {
            Source::Run(_) => true,
            Source::Ranges(_) => false,
            Source::Slot { ranges, .. } => ranges.is_empty(),
        }
    }
}

impl Outgoing {
    /// The run to send from. Pending while it is being packed; an error if that fails.
    ///
    /// # Errors
    /// Why the lane has failed.
    fn pack(&mut self, lane: &mut dyn Lane, slots: &mut Slots) -> Result<Poll<Result<Run, Error>>, String> {
        if let Source::Ranges(ranges) = &mut self.source {
            let like = ranges.first().map(|range| range.memory.clone());
            let (slot, run) = slots.take(lane, like.as_deref(), self.bytes)?;
            self.source = Source::Slot { slot, run, ranges: std::mem::take(ranges) };
        }
        match &mut self.source {
            Source::Run(run) => Ok(Poll::Ready(Ok(run.clone()))),
            Source::Slot { run, ranges, .. } => {
                // Pack only once: after a full lane the packed slot is posted again.
                if !ranges.is_empty() {
                    match lane.copy(Way::Pack, run, ranges) {
                        Poll::Ready(Ok(())) => {}
                        Poll::Ready(Err(error)) => return Ok(Poll::Ready(Err(error))),
                        Poll::Pending => return Ok(Poll::Pending),
                    }
                    ranges.clear();
                }
                Ok(Poll::Ready(Ok(run.clone())))
            }
            Source::Ranges(_) => Ok(Poll::Pending),
        }
    }
}
