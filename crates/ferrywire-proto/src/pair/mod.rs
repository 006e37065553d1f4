//! Two connected ends in virtual time: outboxes, inboxes and windows, over channels that are slow and get
//! lost.
//!
//! A [`Pair`] delivers frames. Each channel keeps its order and has a delay of its own, so frames of
//! different channels overtake each other. A channel may be lost at any moment; each end then reports to the other
//! how many frames it has placed, and the rest is sent over other channels. `plan.rs` posts random operations
//! and knows their expected results.
//!
//! Invariant: the seed determines every event.
//! Read next: `end.rs`, then `plan.rs`.

mod channel;
mod end;
mod plan;
mod rng;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet, VecDeque};
use std::rc::Rc;

use crate::limits::{self, PeerLimits};
use crate::operation::testing::{Facts, Model};
use crate::outbox::{Body, Frame, Pull};
use crate::schedule;
use crate::wire::{self, HEADER_BYTES, Header, Kind, Refusal};
use channel::{Refused, Side};
use end::End;
use rng::{Draw, Rng};

/// Properties of the ends and the network, drawn from the seed.
struct Settings {
    limits: PeerLimits,
    channels: usize,
    chunk_bytes: usize,
    window_frames: usize,
    window_bytes: usize,
    /// Longest delay of each channel.
    delays: Vec<u64>,
    /// Percentage of cases in which a socket takes a frame at once.
    socket_percent: u64,
    /// Percentage of eager messages within which the connection is lost.
    breaks_off_percent: u64,
    /// Percentage of such messages whose memory is dropped then.
    drops_percent: u64,
}

/// A frame in flight between the two ends.
struct Packet {
    header: [u8; HEADER_BYTES],
    placements: Box<[u8]>,
    body: Vec<u8>,
}

enum Event {
    /// Post random operations at both ends.
    Act,
    /// Retry frames that wait for a socket, for room in a window or for a GPU.
    Tick,
    Arrive {
        to: usize,
        channel: usize,
        generation: u32,
        packet: Packet,
    },
    /// Send an acknowledgement on its own: no frame came along to carry it.
    Acknowledge {
        end: usize,
        channel: usize,
        generation: u32,
    },
    /// An end learns that a channel is lost.
    Close {
        end: usize,
        channel: usize,
        generation: u32,
    },
    /// An end receives the other end's count of placed frames of a lost channel.
    Fence {
        to: usize,
        channel: usize,
        generation: u32,
        placed: u64,
        refused: Vec<Refused>,
    },
    Reopen {
        channel: usize,
    },
}

/// Events ordered by time, then by creation.
struct Timed(u64, u64, Event);

impl PartialEq for Timed {
    fn eq(&self, other: &Timed) -> bool {
        (self.0, self.1) == (other.0, other.1)
    }
}

impl Eq for Timed {}

impl PartialOrd for Timed {
    fn partial_cmp(&self, other: &Timed) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Timed {
    fn cmp(&self, other: &Timed) -> std::cmp::Ordering {
        (self.0, self.1).cmp(&(other.0, other.1))
    }
}

/// A frame that an end must send again, before anything else.
struct Again {
    op: Option<*const Facts>,
    header: Header,
    on_gpu: bool,
}

impl Again {
    fn of(frame: &Frame<Model>) -> Again {
        let op = frame.op.as_ref();
        Again {
            op: op.map(|op| Rc::as_ptr(&op.0)),
            header: frame.header,
            on_gpu: matches!(frame.body, Body::Chunk(_))
                && frame.header.len > 0
                && op.is_some_and(|op| op.0.on_gpu),
        }
    }

    /// Whether `frame` is the frame that is to be sent again, perhaps without its payload.
    fn is(&self, frame: &Frame<Model>) -> bool {
        let now = Again::of(frame);
        self.op == now.op && (self.header == now.header || (self.op.is_some() && now.header.len == 0))
    }
}

struct Pair {
    rng: Rng,
    settings: Settings,
    now: u64,
    made: u64,
    events: BinaryHeap<Reverse<Timed>>,
    ticks: bool,
    ends: [End; 2],
    /// Channel ends, by end and channel.
    sides: [Vec<Side>; 2],
    generations: Vec<u32>,
    /// By end: frames of lost channels that were not pulled again yet.
    again: [VecDeque<Again>; 2],
    /// Number of frames that were sent again.
    resent: u64,
    /// Receiving end and tag of messages whose memory was dropped.
    dropped: HashSet<(usize, u64)>,
}

impl Pair {
    fn new(rng: Rng, settings: Settings) -> Pair {
        let side = || Side::new(settings.window_frames, settings.window_bytes);
        let sides = || (0..settings.channels).map(|_| side()).collect();
        Pair {
            ends: [End::new(settings.limits), End::new(settings.limits)],
            sides: [sides(), sides()],
            generations: vec![0; settings.channels],
            again: Default::default(),
            now: 0,
            made: 0,
            events: BinaryHeap::new(),
            ticks: false,
            rng,
            settings,
            resent: 0,
            dropped: HashSet::new(),
        }
    }

    fn after(&mut self, delay: u64, event: Event) {
        self.made += 1;
        self.events.push(Reverse(Timed(self.now + delay, self.made, event)));
    }

    /// Loses a channel; its ends notice it one after the other.
    fn lose(&mut self, channel: usize) {
        let generation = self.generations[channel];
        if !self.sides.iter().all(|sides| sides[channel].is_up) {
            return;
        }
        let first = self.rng.below(2) as usize;
        let later = self.rng.below(100);
        self.after(0, Event::Close { end: first, channel, generation });
        self.after(later, Event::Close { end: 1 - first, channel, generation });
    }

    /// Processes the next event; `None` when no event is left.
    fn step(&mut self) -> Option<Event> {
        self.pump();
        let Reverse(Timed(at, _, event)) = self.events.pop()?;
        self.now = at;
        match event {
            Event::Arrive { to, channel, generation, packet } => {
                if self.is_up(to, channel, generation) {
                    self.receive(to, channel, packet);
                }
            }
            Event::Acknowledge { end, channel, generation } => {
                if self.is_up(end, channel, generation) {
                    self.send_ack(end, channel);
                }
            }
            Event::Close { end, channel, generation } => {
                if self.is_up(end, channel, generation) {
                    self.close(end, channel);
                }
            }
            Event::Fence { to, channel, generation, placed, refused } => {
                assert_eq!(generation, self.generations[channel]);
                if self.sides[to][channel].is_up {
                    self.close(to, channel);
                }
                self.sides[to][channel].theirs = Some((placed, refused));
                self.resolve(to, channel);
            }
            Event::Reopen { channel } => {
                self.generations[channel] += 1;
                for sides in &mut self.sides {
                    sides[channel] = Side::new(self.settings.window_frames, self.settings.window_bytes);
                }
            }
            Event::Tick => self.ticks = false,
            Event::Act => return Some(Event::Act),
        }
        Some(Event::Tick)
    }

    fn is_up(&self, end: usize, channel: usize, generation: u32) -> bool {
        self.generations[channel] == generation && self.sides[end][channel].is_up
    }

    // ---- sending ----

    /// Pulls frames into the windows of all channels, and sends as many as the sockets take.
    fn pump(&mut self) {
        let mut waits = false;
        for end in 0..2 {
            let first = self.rng.below(self.settings.channels as u64) as usize;
            for step in 0..self.settings.channels {
                let channel = (first + step) % self.settings.channels;
                if self.sides[end][channel].is_up {
                    self.pull(end, channel);
                    self.send(end, channel);
                    waits |= self.sides[end][channel].has_unsent();
                }
            }
            waits |= !self.ends[end].outbox.is_empty();
        }
        if waits && !self.ticks {
            self.ticks = true;
            let delay = self.rng.between(1, 30);
            self.after(delay, Event::Tick);
        }
    }

    fn pull(&mut self, end: usize, channel: usize) {
        let live = self.sides[end].iter().filter(|side| side.is_up);
        let least = live.clone().map(|side| side.window.bytes() as u64).min().unwrap_or(0);
        let channels = live.count();
        let side = &mut self.sides[end][channel];
        let backlog = side.window.bytes() as u64;
        let mut pull = Pull {
            bytes: self.rng.between(1, 2000),
            channels,
            chunk_bytes: self.settings.chunk_bytes,
            staged_bytes: (self.settings.chunk_bytes / 2, self.settings.chunk_bytes),
            ordered_bytes: self.rng.below(2 * self.settings.chunk_bytes as u64),
            whole_bytes: self.rng.between(1, self.settings.chunk_bytes as u64),
            small: schedule::ordered_share(backlog, least, schedule::fill_bytes(1, 1, false))
                .min(self.rng.below(1000)),
            bulk: schedule::may_take(backlog, least, self.settings.chunk_bytes),
            bulk_in_turn: self.rng.percent(50),
            messages: None,
        };
        let (mut taken, mut dropped) = (0, Vec::new());
        while taken < pull.bytes && side.window.has_room() {
            let gpu = self.rng.percent(80);
            let Some(frame) = self.ends[end].outbox.next(pull, gpu, &mut dropped) else { break };
            if let Some(again) = self.again[end].pop_front_if(|again| gpu || !again.on_gpu) {
                assert!(
                    again.is(&frame),
                    "{:?} before {:?}, which is sent again",
                    frame.header,
                    again.header
                );
            }
            let bytes = frame.bytes();
            taken += bytes as u64;
            pull.small = pull.small.saturating_sub(bytes as u64);
            side.window.post(frame, bytes);
        }
        let in_flight = (side.window.next() - side.window.first()) as usize;
        assert!(in_flight <= self.settings.window_frames, "{in_flight} frames in a window");
        dropped.into_iter().for_each(|op| self.ends[end].dropped(op));
    }

    fn send(&mut self, end: usize, channel: usize) {
        let side = &mut self.sides[end][channel];
        let mut packets = Vec::new();
        let ack = side.acknowledges();
        while self.rng.percent(self.settings.socket_percent)
            && let Some(frame) = side.window.get_mut(side.sent)
        {
            let mut header = frame.header.encode();
            Header::patch_counts(&mut header, ack, 0);
            let body = self.ends[end].body(frame);
            assert_eq!(body.len(), frame.header.len as usize + usize::from(frame.header.notify));
            packets.push(Packet { header, placements: frame.placements.clone(), body });
            side.sent += 1;
        }
        packets.into_iter().for_each(|packet| self.transmit(end, channel, packet));
    }

    fn send_ack(&mut self, end: usize, channel: usize) {
        let side = &mut self.sides[end][channel];
        side.ack_is_due = false;
        let refused = std::mem::take(&mut side.refused);
        let body = wire::encode_refusals(&refused);
        side.reported.extend(refused);
        let header = Header { ack: side.received as u32, len: body.len() as u32, ..Header::new(Kind::Ack) };
        let packet = Packet { header: header.encode(), placements: Box::default(), body };
        self.transmit(end, channel, packet);
    }

    /// Sends a packet. Channels are independent, and each keeps its order.
    fn transmit(&mut self, from: usize, channel: usize, packet: Packet) {
        let delay = self.rng.below(self.settings.delays[channel] + 1);
        let side = &mut self.sides[from][channel];
        side.last_arrival = side.last_arrival.max(self.now + delay);
        let delay = side.last_arrival - self.now;
        let generation = self.generations[channel];
        self.after(delay, Event::Arrive { to: 1 - from, channel, generation, packet });
    }

    // ---- receiving ----

    fn receive(&mut self, end: usize, channel: usize, packet: Packet) {
        let header = Header::decode(&packet.header).expect("frames keep to the limits of the wire");
        if header.kind == Kind::Ack {
            for (low, refusal) in wire::refusals(&packet.body) {
                let side = &mut self.sides[end][channel];
                let number = wire::widen(low, side.window.first());
                let frame = side.window.get_mut(number).expect("what is refused is in the window");
                frame.op.iter().for_each(|op| end::refused(&op.0, refusal));
            }
            return self.acknowledged(end, channel, header.ack);
        }
        self.acknowledged(end, channel, header.ack);
        assert_eq!(packet.placements.len(), header.placement_bytes());
        let begun = self.ends[end].begin(&header);
        if begun.is_some() && self.rng.percent(self.settings.breaks_off_percent) {
            // The connection is lost within the message.
            return self.close(end, channel);
        }
        let header = begun.unwrap_or(header);
        let result = self.ends[end].arrived(&header, &packet.placements, &packet.body);
        let side = &mut self.sides[end][channel];
        if let Err(refusal) = result {
            // Both ends keep to equal limits, and all regions exist. So a refusal can only concern data for
            // cancelled receives and reads, and announcements that arrive after their withdrawal.
            let may_be = match header.kind {
                Kind::Data => Refusal::NoSink,
                _ => Refusal::Other,
            };
            let may_come_late = header.kind == Kind::Announce || header.kind == Kind::Data;
            assert!(may_come_late && refusal == may_be, "{refusal:?} for {header:?}");
            side.refused.push((side.received, refusal));
        }
        side.received += 1;
        if !std::mem::replace(&mut side.ack_is_due, true) {
            let (delay, generation) = (self.rng.below(60), self.generations[channel]);
            self.after(delay, Event::Acknowledge { end, channel, generation });
        }
    }

    fn acknowledged(&mut self, end: usize, channel: usize, low: u32) {
        let side = &mut self.sides[end][channel];
        let count = wire::widen(low, side.window.first());
        assert!(side.window.may_acknowledge(count, side.sent), "acknowledged what was not sent");
        while let Some((_, frame)) = side.window.release(count) {
            self.ends[end].delivered(frame, None);
        }
    }

    // ---- lost channels ----

    fn close(&mut self, end: usize, channel: usize) {
        let side = &mut self.sides[end][channel];
        side.is_up = false;
        side.ours = Some(side.window.drain());
        let mut refused = std::mem::take(&mut side.reported);
        refused.append(&mut side.refused);
        let (placed, generation) = (side.received, self.generations[channel]);
        let delay = self.rng.between(1, 150);
        self.after(delay, Event::Fence { to: 1 - end, channel, generation, placed, refused });
        self.resolve(end, channel);
    }

    /// Resends the frames that were not placed, after both ends have closed the connection and reported what
    /// they placed.
    fn resolve(&mut self, end: usize, channel: usize) {
        let side = &mut self.sides[end][channel];
        let (Some(ours), Some((placed, refused))) =
            (side.ours.take_if(|_| side.theirs.is_some()), &side.theirs)
        else {
            return;
        };
        let mut again = Vec::new();
        for (number, frame) in ours {
            if number >= *placed {
                let is_eager = frame.header.kind == Kind::Send;
                if is_eager && self.rng.percent(self.settings.drops_percent) {
                    self.dropped.insert((1 - end, frame.header.key));
                    frame.op.iter().for_each(|op| op.0.fail("its memory was dropped"));
                }
                again.push(frame);
                continue;
            }
            let refusal = refused.iter().find(|(each, _)| *each == number).map(|(_, why)| *why);
            self.ends[end].delivered(frame, refusal);
        }
        self.resent += again.len() as u64;
        again.iter().rev().for_each(|frame| self.again[end].push_front(Again::of(frame)));
        self.ends[end].outbox.resend(again.into_iter());
        side.is_resolved = true;
        if self.sides.iter().all(|sides| sides[channel].is_resolved) {
            let delay = self.rng.between(1, 200);
            self.after(delay, Event::Reopen { channel });
        }
    }

    /// Asserts that nothing is in flight and both ends agree.
    fn check_quiet(&self) {
        for [from, to] in [[0, 1], [1, 0]] {
            let (reported, known) =
                (self.ends[from].outbox.announced_len(), self.ends[to].inbox.announced_len());
            assert_eq!(reported, known, "sends that end {from} has announced, and end {to} holds");
        }
    }

    /// Asserts that no event, frame or operation is left.
    fn check_idle(&self) {
        assert!(self.events.is_empty());
        for (end, sides) in self.ends.iter().zip(&self.sides) {
            end.check_idle();
            for side in sides {
                assert!(side.window.is_empty() && side.refused.is_empty(), "frames are left in a window");
            }
        }
        for [from, to] in [[0, 1], [1, 0]] {
            let credit = self.ends[from].outbox.eager_credit_bytes() + self.ends[to].inbox.consumed_bytes();
            assert_eq!(credit, self.settings.limits.eager_credit_bytes, "credit of end {from}");
        }
    }
}

const _: () = assert!(limits::WINDOW_FRAMES_MAX >= 16);
