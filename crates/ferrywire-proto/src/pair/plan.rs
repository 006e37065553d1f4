//! Random operations between two ends, and their expected results.
//!
//! For every seed: each operation ends once, with all its tokens back. A successful operation has placed each
//! byte once, in its place; an ended operation touches no memory any more. Messages of one tag match receives
//! in order. A notification is delivered once, after everything that it follows. When all events are
//! processed, nothing is left over.
//!
//! No two operations share memory, so memory alone shows what was placed.
//! Invariant: expectations derive from what was posted, never from the state of the two ends.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use super::end::REGION;
use super::{Draw, Event, Pair, Rng, Settings};
use crate::limits::PeerLimits;
use crate::operation::testing::{Facts, Model};
use crate::operation::{Piece, Pieces, Verb};

/// Longest message, write or read, in bytes.
const BYTES_MAX: u64 = 2500;
/// Number of events after which a pair should have come to rest.
const EVENTS_MAX: usize = 200_000;

/// A posted operation and what is expected of it.
struct Record {
    end: usize,
    facts: Rc<Facts>,
    /// How often the operation's notification was delivered.
    delivered: u32,
    /// Byte placements in the operation's target when it ended.
    placed: Option<u64>,
}

/// Kinds of operations and faults that the seed enables.
struct Mix {
    actions: u64,
    cancel_percent: u64,
    lose_percent: u64,
    /// Whether writes may have notifications.
    notified_writes: bool,
    unplaceable_percent: u64,
}

struct Plan {
    pair: Pair,
    mix: Mix,
    records: Vec<Record>,
    /// Records by address of the facts, which no two operations share while their records are kept.
    index: HashMap<*const Facts, usize>,
    /// Ends and tags of which some messages were cancelled or could not be placed.
    inexact: HashSet<(usize, u64)>,
    /// The last standalone notification that each end received.
    heard: [Option<usize>; 2],
}

impl Plan {
    fn new(seed: u64) -> Plan {
        let mut rng = Rng::new(seed);
        let notified_writes = rng.percent(60);
        let eager_bytes_max = rng.below(200);
        let limits = PeerLimits {
            early_frames_max: rng.between(1, 8) as usize,
            // A notification that follows bytes is held until they arrive, and is refused beyond the limit;
            // another test covers that.
            notification_bytes_max: if notified_writes { 1 << 16 } else { rng.between(44, 150) as usize },
            eager_bytes_max: eager_bytes_max as usize,
            eager_credit_bytes: (eager_bytes_max + 128 + rng.below(1500)) as usize,
            eager_long_bytes: eager_bytes_max as usize / 2,
            eager_ahead_bytes: rng.below(1000) as usize,
            reads_asked_max: rng.between(4, 12) as usize,
            small_bytes_max: rng.between(32, 128),
        };
        let channels = rng.between(1, 4) as usize;
        let slowest = [5, 50, 400][rng.below(3) as usize];
        let settings = Settings {
            limits,
            channels,
            chunk_bytes: rng.between(64, 256) as usize,
            window_frames: rng.between(1, 12) as usize,
            window_bytes: rng.between(200, 4000) as usize,
            delays: (0..channels).map(|_| rng.below(slowest)).collect(),
            socket_percent: rng.between(50, 99),
            breaks_off_percent: if rng.percent(30) { 10 } else { 0 },
            drops_percent: if rng.percent(20) { 30 } else { 0 },
        };
        let mix = Mix {
            actions: rng.between(5, 60),
            cancel_percent: if rng.percent(50) { 10 } else { 0 },
            lose_percent: if rng.percent(60) { 8 } else { 0 },
            notified_writes,
            unplaceable_percent: if rng.percent(20) { 10 } else { 0 },
        };
        Plan {
            pair: Pair::new(rng, settings),
            mix,
            records: Vec::new(),
            index: HashMap::new(),
            inexact: HashSet::new(),
            heard: [None; 2],
        }
    }

    fn rng(&mut self) -> &mut Rng {
        &mut self.pair.rng
    }

    // ---- memory ----

    /// Allocates memory of an end, preceded by bytes that no operation may touch.
    fn memory(&mut self, end: usize, bytes: u64, is_source: bool) -> u64 {
        let gap = self.rng().between(1, 9);
        let memory = &mut self.pair.ends[end].memory;
        let start = memory.len() as u64 + gap;
        memory.resize((start + bytes) as usize, 0);
        self.pair.ends[end].placed.resize((start + bytes) as usize, 0);
        if is_source {
            for at in start..start + bytes {
                self.pair.ends[end].memory[at as usize] = self.pair.rng.number() as u8;
            }
        }
        start
    }

    fn bytes(&mut self) -> u64 {
        match self.rng().below(10) {
            0 => 0,
            1..5 => self.rng().between(1, 60),
            5..9 => self.rng().between(60, 700),
            _ => self.rng().between(700, BYTES_MAX),
        }
    }

    /// Pieces of `bytes` bytes in all, each in memory of its own at both ends.
    fn pieces(&mut self, end: usize, bytes: u64, has_remote: bool, is_source: bool) -> Pieces {
        let count = self.rng().between(1, 4).min(bytes.max(1));
        let (mut left, mut pieces) = (bytes, Vec::new());
        for rest in (0..count).rev() {
            let len = if rest == 0 { left } else { self.rng().below(left - rest) + 1 };
            left -= len;
            let local = self.memory(end, len, is_source);
            let remote = if has_remote { self.memory(1 - end, len, !is_source) } else { 0 };
            pieces.push(Piece { local, remote, len });
        }
        Pieces::joined(pieces)
    }

    // ---- operations ----

    fn note(&mut self, end: usize, facts: Rc<Facts>) {
        self.index.insert(Rc::as_ptr(&facts), self.records.len());
        self.records.push(Record { end, facts, delivered: 0, placed: None });
    }

    /// Message of a notification: the index of its record, and padding.
    fn message(&mut self) -> Vec<u8> {
        let mut message = (self.records.len() as u32).to_le_bytes().to_vec();
        let more = self.rng().below(40) as usize;
        message.resize(4 + more, 7);
        message
    }

    fn act(&mut self) {
        let end = self.rng().below(2) as usize;
        if self.rng().below(100) < self.mix.lose_percent {
            let channel = self.pair.rng.below(self.pair.settings.channels as u64) as usize;
            self.pair.lose(channel);
        }
        if self.rng().below(100) < self.mix.cancel_percent {
            self.cancel_one();
        }
        match self.rng().below(12) {
            0..3 => self.write(end),
            3 => self.write_joined(end),
            4..6 => self.send(end),
            6..8 => {
                let (tag, bytes) = (self.rng().below(3), self.bytes());
                let is_unplaceable = self.rng().below(100) < self.mix.unplaceable_percent;
                self.receive(end, tag, bytes + 100, is_unplaceable);
            }
            8..10 => self.read(end),
            _ => self.notify(end),
        }
    }

    fn cancel_one(&mut self) {
        let mut open: Vec<_> = (0..self.records.len()).filter(|at| !self.has_ended(*at)).collect();
        if open.is_empty() {
            return;
        }
        // Receives with some bytes placed and others in flight are the most fragile.
        let half: Vec<_> =
            open.iter().copied().filter(|at| self.records[*at].facts.moved.get() > 0).collect();
        if !half.is_empty() && self.rng().percent(60) {
            open = half;
            if self.mix.lose_percent > 0 && self.rng().percent(50) {
                // From here on only the fence can report a refusal.
                let channel = self.pair.rng.below(self.pair.settings.channels as u64) as usize;
                self.pair.lose(channel);
            }
        }
        let at = open[self.rng().below(open.len() as u64) as usize];
        self.cancel(at);
    }

    fn cancel(&mut self, at: usize) {
        let Record { end, facts, .. } = &self.records[at];
        let (end, facts) = (*end, facts.clone());
        match facts.verb {
            Verb::Recv => drop(self.inexact.insert((end, facts.key))),
            Verb::Send => drop(self.inexact.insert((1 - end, facts.key))),
            _ => {}
        }
        self.pair.ends[end].cancel(&facts);
    }

    fn has_ended(&self, at: usize) -> bool {
        self.records[at].facts.has_ended.get()
    }

    fn write(&mut self, end: usize) {
        let bytes = self.bytes();
        let pieces = self.pieces(end, bytes, true, true);
        let notifies = self.mix.notified_writes && self.rng().percent(50);
        let message = if notifies { self.message() } else { Vec::new() };
        let on_gpu = self.rng().percent(30);
        let id = self.pair.ends[end].id();
        let op = Model::over(id, Verb::Write, REGION, pieces);
        let op = op.with(|facts| (facts.message, facts.on_gpu) = (message, on_gpu));
        self.note(end, op.0.clone());
        self.pair.ends[end].post(op);
    }

    fn write_joined(&mut self, end: usize) {
        let count = self.rng().between(2, 4);
        let parts = (0..count).map(|_| {
            // The notification of an empty parent would have nothing to follow.
            let bytes = self.bytes().max(1);
            self.pieces(end, bytes, true, true)
        });
        let parts = parts.collect();
        let notifies = self.mix.notified_writes && self.rng().percent(70);
        let message = if notifies { self.message() } else { Vec::new() };
        let facts = self.pair.ends[end].write_joined(parts, message);
        self.note(end, facts);
    }

    fn send(&mut self, end: usize) {
        let (tag, bytes) = (self.rng().below(3), self.bytes());
        let pieces = self.pieces(end, bytes, false, true);
        if bytes >= 8 {
            let number = (self.records.len() as u64).to_le_bytes();
            let ranges: Vec<_> = pieces.as_slice().iter().flat_map(|p| p.local..p.local + p.len).collect();
            for (at, byte) in ranges.into_iter().zip(number) {
                self.pair.ends[end].memory[at as usize] = byte;
            }
        }
        let on_gpu = self.rng().percent(30);
        let facts = self.pair.ends[end].send(tag, pieces, |facts| facts.on_gpu = on_gpu);
        self.note(end, facts);
    }

    fn receive(&mut self, end: usize, tag: u64, bytes: u64, is_unplaceable: bool) {
        let pieces = self.pieces(end, bytes, false, false);
        let op = Model::over(self.pair.ends[end].id(), Verb::Recv, tag, pieces);
        if is_unplaceable {
            self.inexact.insert((end, tag));
        }
        let op = op.with(|facts| facts.is_unplaceable = is_unplaceable);
        self.note(end, op.0.clone());
        self.pair.ends[end].receive(op);
    }

    fn read(&mut self, end: usize) {
        let bytes = self.bytes();
        let pieces = self.pieces(end, bytes, true, false);
        let op = Model::over(self.pair.ends[end].id(), Verb::Read, REGION, pieces);
        self.note(end, op.0.clone());
        self.pair.ends[end].read(op);
    }

    fn notify(&mut self, end: usize) {
        let message = self.message();
        let op = Model::new(self.pair.ends[end].id(), Verb::Notify, 0, 0);
        let op = op.with(|facts| facts.message = message);
        self.note(end, op.0.clone());
        self.pair.ends[end].post(op);
    }

    // ---- what has to hold ----

    /// Checks, after each event, the operations that have ended and the notifications that were delivered.
    fn observe(&mut self) {
        for end in 0..2 {
            for facts in std::mem::take(&mut self.pair.ends[end].ended) {
                // Children are checked with their parent, and served reads have no record.
                let Some(at) = self.index.get(&Rc::as_ptr(&facts)).copied() else { continue };
                self.check_ended(at);
                self.records[at].placed = Some(self.placed(&facts, end));
            }
            while let Some(message) = self.pair.ends[end].inbox.take_notification() {
                self.check_notification(end, &message);
            }
        }
    }

    /// The end and the pieces that an operation writes to, each with its source.
    fn targets(facts: &Facts, end: usize) -> (usize, Vec<Piece>) {
        let children = facts.children.borrow();
        let pieces = children.iter().flat_map(|child| child.pieces.as_slice().to_vec());
        let pieces = pieces.chain(facts.pieces.as_slice().to_vec()).filter(|piece| piece.len > 0);
        match facts.verb {
            Verb::Write => {
                let swapped = |Piece { local, remote, len }| Piece { local: remote, remote: local, len };
                (1 - end, pieces.map(swapped).collect())
            }
            Verb::Read | Verb::Recv => (end, pieces.collect()),
            _ => (end, Vec::new()),
        }
    }

    fn placed(&self, facts: &Facts, end: usize) -> u64 {
        let (end, pieces) = Plan::targets(facts, end);
        let placed = &self.pair.ends[end].placed;
        let bytes = pieces.iter().flat_map(|piece| piece.local..piece.local + piece.len);
        bytes.map(|at| u64::from(placed[at as usize])).sum()
    }

    fn check_ended(&self, at: usize) {
        let Record { end, facts, .. } = &self.records[at];
        if facts.has_failed() {
            let may_fail = facts.cancelled.get() || matches!(facts.verb, Verb::Recv | Verb::Send);
            return assert!(may_fail, "{facts:?} failed");
        }
        if matches!(facts.verb, Verb::Write | Verb::Read) {
            assert_eq!(facts.moved.get(), facts.total, "{facts:?}");
            self.check_bytes(facts, *end);
        }
    }

    /// Checks that each byte of a write or read was placed once, in its place.
    fn check_bytes(&self, facts: &Facts, end: usize) {
        let (end, pieces) = Plan::targets(facts, end);
        let (here, there) = (&self.pair.ends[end], &self.pair.ends[1 - end]);
        for Piece { local, remote, len } in pieces {
            let (target, source) =
                (local as usize..(local + len) as usize, remote as usize..(remote + len) as usize);
            assert!(
                here.placed[target.clone()].iter().all(|count| *count == 1),
                "not placed once: {facts:?}"
            );
            assert!(here.memory[target] == there.memory[source], "other bytes: {facts:?}");
        }
    }

    fn check_notification(&mut self, end: usize, message: &[u8]) {
        let at = u32::from_le_bytes(message[..4].try_into().expect("four bytes")) as usize;
        let record = &mut self.records[at];
        let facts = record.facts.clone();
        assert_eq!((record.end, &facts.message[..]), (1 - end, message));
        record.delivered += 1;
        assert_eq!(record.delivered, 1, "{facts:?} notified twice");
        if facts.verb == Verb::Write {
            return self.check_bytes(&facts, 1 - end);
        }
        let last = self.heard[end].replace(at);
        assert!(last.is_none_or(|last| last < at), "notification {at} comes after {last:?}");
        for before in &self.records[..at] {
            let joined = before.end == 1 - end && !matches!(before.facts.verb, Verb::Recv | Verb::Notify);
            assert!(!joined || before.facts.has_ended.get(), "notification {at} before {:?}", before.facts);
        }
    }

    fn run(&mut self) {
        for _ in 0..EVENTS_MAX {
            match self.pair.step() {
                None => {
                    self.observe();
                    return self.pair.check_quiet();
                }
                Some(Event::Act) => {
                    self.act();
                    self.mix.actions -= 1;
                    if self.mix.actions > 0 {
                        let delay = self.rng().below(80);
                        self.pair.after(delay, Event::Act);
                    }
                }
                Some(_) => {}
            }
            self.observe();
        }
        panic!("the pair still has events after EVENTS_MAX of them");
    }

    fn play(&mut self) {
        self.pair.after(0, Event::Act);
        self.run();
        // Receives every message that has no receive, and cancels every receive that has no message.
        loop {
            let waiting: Vec<_> = (0..2)
                .flat_map(|end| {
                    self.pair.ends[end].inbox.unexpected_tags().into_iter().map(move |t| (end, t))
                })
                .collect();
            if waiting.is_empty() {
                break;
            }
            for (end, tag) in waiting {
                self.receive(end, tag, BYTES_MAX, false);
            }
            self.run();
        }
        let inexact = self.inexact.clone();
        for at in 0..self.records.len() {
            if self.records[at].facts.verb == Verb::Recv && !self.has_ended(at) {
                self.cancel(at);
            }
        }
        self.run();
        self.inexact = inexact;
        self.check();
    }

    /// Checks, at the end of a run, all operations, notifications and memory against the plan.
    fn check(&self) {
        for Record { end, facts, delivered, placed } in &self.records {
            assert!(facts.has_ended.get(), "{facts:?} has not ended");
            assert_eq!(*placed, Some(self.placed(facts, *end)), "{facts:?} was touched after its end");
            let notifies = !facts.message.is_empty() && !facts.has_failed();
            assert_eq!(*delivered, u32::from(notifies), "notifications of {facts:?}");
        }
        self.check_all_memory();
        for receiver in 0..2 {
            (0..3).for_each(|tag| self.check_messages(receiver, tag));
        }
        self.pair.check_idle();
    }

    /// Checks that bytes were placed only in targets, and only once.
    fn check_all_memory(&self) {
        let mut allowed = [0, 1].map(|end| vec![0; self.pair.ends[end].placed.len()]);
        for Record { end, facts, .. } in &self.records {
            let (end, pieces) = Plan::targets(facts, *end);
            for piece in pieces {
                allowed[end][piece.local as usize..(piece.local + piece.len) as usize].fill(1);
            }
        }
        for (end, allowed) in self.pair.ends.iter().zip(allowed) {
            assert!(end.placed.iter().zip(allowed).all(|(placed, allowed)| *placed <= allowed));
        }
    }

    fn of_tag(&self, end: usize, verb: Verb, tag: u64) -> Vec<(usize, &Facts)> {
        let all = self.records.iter().enumerate();
        all.filter(|(_, record)| record.end == end && record.facts.verb == verb && record.facts.key == tag)
            .map(|(at, record)| (at, &*record.facts))
            .collect()
    }

    fn content(&self, end: usize, facts: &Facts, len: u64) -> Vec<u8> {
        let memory = &self.pair.ends[end].memory;
        let bytes = facts.pieces.as_slice().iter().flat_map(|piece| piece.local..piece.local + piece.len);
        bytes.take(len as usize).map(|at| memory[at as usize]).collect()
    }

    /// Checks that the messages of one tag matched receives in order, and that both ends agree on each.
    fn check_messages(&self, receiver: usize, tag: u64) {
        let sends = self.of_tag(1 - receiver, Verb::Send, tag);
        let receives = self.of_tag(receiver, Verb::Recv, tag);
        if !self.inexact.contains(&(receiver, tag)) && !self.pair.dropped.contains(&(receiver, tag)) {
            assert!(receives.len() >= sends.len());
            for (at, (_, receive)) in receives.iter().enumerate() {
                let met = sends.get(at).filter(|(_, send)| send.total <= receive.total);
                assert_eq!(met.is_some(), !receive.has_failed(), "receive {at} of tag {tag}: {receive:?}");
                let Some((_, send)) = met else { continue };
                assert!(!send.has_failed() && receive.moved.get() == send.total, "{send:?} {receive:?}");
                self.check_message(receiver, send, receive);
            }
            return;
        }
        let mut met = Vec::new();
        for (_, receive) in receives.iter().filter(|(_, receive)| !receive.has_failed()) {
            let len = receive.moved.get();
            if len < 8 {
                continue;
            }
            let number = self.content(receiver, receive, 8).try_into().expect("eight bytes");
            let number = u64::from_le_bytes(number) as usize;
            let (_, send) = sends.iter().find(|(at, _)| *at == number).expect("a message of this tag");
            assert!(!send.has_failed() && send.total == len, "{send:?} {receive:?}");
            self.check_message(receiver, send, receive);
            met.push(number);
        }
        if !self.pair.ends[receiver].disordered.contains(&tag) {
            assert!(met.is_sorted(), "tag {tag}: {met:?}");
        }
        let count = met.len();
        met.sort_unstable();
        met.dedup();
        assert_eq!(met.len(), count, "a message was received twice");
        for (at, send) in sends {
            let announced = send.sink.get() != 0 && !send.has_failed() && send.total >= 8;
            assert!(!announced || met.contains(&at), "{send:?} was received by nothing");
        }
    }

    fn check_message(&self, receiver: usize, send: &Facts, receive: &Facts) {
        let (sent, received) =
            (self.content(1 - receiver, send, send.total), self.content(receiver, receive, send.total));
        assert!(sent == received, "other bytes: {send:?} {receive:?}");
        assert_eq!(self.placed(receive, receiver), send.total, "{receive:?}");
    }
}

/// Prints the seed when a run fails.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("a pair failed; repeat with FERRYWIRE_SEED={}", self.0);
        }
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Runs random plans for many seeds, or for the seed in `FERRYWIRE_SEED`. The comment at the top of this file
/// lists what must hold.
#[test]
fn two_ends_keep_every_promise_over_channels_that_are_slow_and_get_lost() {
    let seeds = match (number("FERRYWIRE_SEED"), number("FERRYWIRE_SEEDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, seeds) => 0..seeds.unwrap_or(2000),
    };
    let (mut resent, mut failed, mut count) = (0, 0, 0);
    let many = seeds.end - seeds.start >= 1000;
    for seed in seeds {
        let _told = Seed(seed);
        let mut plan = Plan::new(seed);
        plan.play();
        resent += plan.pair.resent;
        count += plan.records.len();
        failed += plan.records.iter().filter(|record| record.facts.has_failed()).count();
    }
    println!("{count} operations, {failed} failed, {resent} frames sent again");
    assert!(!many || (resent > 1000 && failed > 1000), "too little happened");
}
