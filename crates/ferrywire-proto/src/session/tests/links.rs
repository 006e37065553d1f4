//! A model of two processes whose connections keep dying: at any byte, in either direction, within a
//! handshake or a message. Each end must receive the other's messages once and in order.

use std::collections::VecDeque;
use std::time::Duration;

use proptest::prelude::*;

use super::message;
use crate::handshake::testing::Shared;
use crate::handshake::tests::{redial, session};
use crate::handshake::{DataKey, Initiator, Outcome, Responder};
use crate::limits::HEARTBEAT_INTERVAL;
use crate::session::{ControlMessage, Session};

const SECRET: Option<&str> = Some("correct horse");

/// One connection of the session.
#[derive(Clone, Debug)]
struct Life {
    /// Bytes after which each direction loses everything.
    cuts: [usize; 2],
    /// Longest reads, in turn.
    fragments: Vec<usize>,
    /// Which end sends how many messages, by round.
    pushes: Vec<(usize, u32)>,
    /// Rounds after which the next connection is made, although this one still carries bytes.
    rounds: usize,
    /// Whether each end notices the loss before there is a new connection.
    noticed: [bool; 2],
    /// Whether time passes, so that heartbeats are due.
    slow: bool,
}

fn life() -> impl Strategy<Value = Life> {
    let cut = || prop_oneof![0usize..400, 300usize..6000];
    let fragments = prop::collection::vec(prop_oneof![1usize..20, 20usize..3000], 1..8);
    let pushes = prop::collection::vec((0usize..2, 0u32..12), 0..12);
    let rounds = prop_oneof![1usize..60, Just(usize::MAX)];
    let flags = any::<([bool; 2], bool)>();
    ([cut(), cut()], fragments, pushes, rounds, flags).prop_map(
        |(cuts, fragments, pushes, rounds, (noticed, slow))| Life {
            cuts,
            fragments,
            pushes,
            rounds,
            noticed,
            slow,
        },
    )
}

/// One direction of a connection.
#[derive(Debug)]
struct Pipe {
    waiting: VecDeque<u8>,
    left: usize,
}

impl Pipe {
    fn put(&mut self, bytes: &[u8]) {
        let kept = bytes.len().min(self.left);
        self.left -= kept;
        self.waiting.extend(&bytes[..kept]);
    }

    fn take(&mut self, at_most: usize) -> Vec<u8> {
        self.waiting.drain(..at_most.min(self.waiting.len())).collect()
    }
}

/// The handshake of one end, while it lasts.
enum Hand {
    Dialling(Initiator),
    Answering(Responder<Shared>),
    Over,
}

struct Model {
    desk: Shared,
    data_key: DataKey,
    ends: [Session; 2],
    said: [Vec<ControlMessage>; 2],
    heard: [Vec<ControlMessage>; 2],
    now: Duration,
    resumed: usize,
    /// Bytes that the previous connection still carries to each end.
    under_way: [Vec<u8>; 2],
}

impl Model {
    fn new() -> Model {
        let (desk, initiator, responder) = session(SECRET);
        let now = Duration::from_secs(7);
        let mut ends = [Session::new(77, now), Session::new(77, now)];
        ends[0].attach(initiator.secure, 0, now).unwrap();
        ends[1].attach(responder.secure, 0, now).unwrap();
        let (said, heard, under_way) = Default::default();
        Model { desk, data_key: initiator.data_key, ends, said, heard, now, resumed: 0, under_way }
    }

    fn push(&mut self, end: usize, count: u32) {
        for _ in 0..count {
            let message = message(self.said[end].len() as u32 * 7 + end as u32);
            self.said[end].push(message.clone());
            self.ends[end].push(message, self.now).unwrap();
        }
    }

    /// Dials, shakes hands and exchanges messages until the connection dies or no message is left.
    fn live(&mut self, life: &Life) {
        self.desk.desk().sessions.get_mut(&77).unwrap().received = self.ends[1].received();
        let mut hands = [
            Hand::Dialling(redial(SECRET, 77, self.ends[0].received(), &self.data_key)),
            Hand::Answering(Responder::new(self.desk.clone())),
        ];
        self.arrive_late();
        // `pipes[end]` holds the bytes that `end` reads.
        let mut pipes = life.cuts.map(|left| Pipe { waiting: VecDeque::new(), left });
        let mut fragments = life.fragments.iter().copied().cycle();
        let mut pushes = life.pushes.iter();
        let (mut idle, mut rounds) = (0, 0);
        while idle < 2 && rounds < life.rounds {
            rounds += 1;
            let push = pushes.next();
            if let Some((end, count)) = push {
                self.push(*end, *count);
            }
            self.now += Duration::from_millis(if life.slow { 120 } else { 1 });
            let mut moved = push.is_some();
            for end in 0..2 {
                moved |= self.step(end, &mut hands, &mut pipes, fragments.next().unwrap());
            }
            idle = if moved { 0 } else { idle + 1 };
        }
        for end in 0..2 {
            if life.noticed[end] {
                self.ends[end].detach();
            } else if matches!(hands[end], Hand::Over) {
                self.under_way[end] = pipes[end].take(usize::MAX);
            }
        }
    }

    /// Delivers the rest of the old connection after the counts for the new one were taken, so some messages
    /// are repeated.
    fn arrive_late(&mut self) {
        for end in 0..2 {
            let bytes = std::mem::take(&mut self.under_way[end]);
            if !bytes.is_empty() {
                self.ends[end].on_bytes(&bytes, self.now, &mut self.heard[1 - end]).unwrap();
            }
        }
    }

    /// Lets one end write its output and read a fragment; returns whether any byte moved.
    fn step(&mut self, end: usize, hands: &mut [Hand; 2], pipes: &mut [Pipe; 2], longest: usize) -> bool {
        let other = 1 - end;
        let (written, read) = match &mut hands[end] {
            Hand::Dialling(initiator) => {
                let written = initiator.take_output();
                let read = pipes[end].take(initiator.want().min(longest));
                initiator.feed(&read).unwrap();
                let outcome = initiator.finished();
                pipes[other].put(&written);
                self.finish(end, outcome, hands);
                (written, read)
            }
            Hand::Answering(responder) => {
                let read = pipes[end].take(responder.want().min(longest));
                responder.feed(&read).unwrap();
                let written = responder.take_output();
                let outcome = responder.finished();
                pipes[other].put(&written);
                self.finish(end, outcome, hands);
                (written, read)
            }
            Hand::Over => {
                self.ends[end].tick(self.now).unwrap();
                let written = self.ends[end].take_output();
                let read = pipes[end].take(longest);
                self.ends[end].on_bytes(&read, self.now, &mut self.heard[other]).unwrap();
                pipes[other].put(&written);
                (written, read)
            }
        };
        !read.is_empty() || !written.is_empty()
    }

    fn finish(&mut self, end: usize, outcome: Option<Outcome>, hands: &mut [Hand; 2]) {
        let Some(outcome) = outcome else { return };
        let Outcome::Control(established) = outcome else { panic!("{outcome:?}") };
        assert!(established.resumed && established.session == 77);
        self.ends[end].attach(established.secure, established.received, self.now).unwrap();
        hands[end] = Hand::Over;
        self.resumed += 1;
    }

    /// Asserts that each end has received a prefix of the other's messages, and acknowledges no more.
    fn check(&self) {
        for end in 0..2 {
            let (said, heard) = (&self.said[end], &self.heard[end]);
            assert!(said.starts_with(heard), "end {end} said {said:?}, but was heard to say {heard:?}");
            assert_eq!(self.ends[1 - end].received(), heard.len() as u64);
            assert!(self.ends[end].unacknowledged() >= said.len() - heard.len());
        }
    }

    fn heal(&mut self) {
        let (cuts, fragments) = ([usize::MAX; 2], vec![4096]);
        let healthy = Life {
            cuts,
            fragments,
            pushes: Vec::new(),
            rounds: usize::MAX,
            noticed: [false; 2],
            slow: false,
        };
        self.live(&healthy);
        assert_eq!(self.heard, self.said);
        self.now += HEARTBEAT_INTERVAL;
        for end in 0..2 {
            self.ends[end].tick(self.now).unwrap();
        }
        for end in 0..2 {
            let bytes = self.ends[end].take_output();
            self.ends[1 - end].on_bytes(&bytes, self.now, &mut Vec::new()).unwrap();
        }
        assert!(self.ends.iter().all(|end| end.unacknowledged() == 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn messages_outlive_connections(lives in prop::collection::vec(life(), 1..12)) {
        let mut model = Model::new();
        for life in &lives {
            model.live(life);
            model.check();
        }
        model.heal();
        model.check();
    }
}

/// Cuts the connection after every single byte of a resumption and of the messages behind it.
#[test]
fn a_connection_may_die_at_every_byte() {
    for direction in 0..2 {
        for cut in 0..1200 {
            let mut model = Model::new();
            model.push(0, 6);
            model.push(1, 6);
            let mut cuts = [usize::MAX; 2];
            cuts[direction] = cut;
            let (fragments, pushes) = (vec![4096], vec![(0, 3), (1, 3), (0, 2)]);
            model.live(&Life {
                cuts,
                fragments,
                pushes,
                rounds: usize::MAX,
                noticed: [true, false],
                slow: false,
            });
            model.check();
            model.heal();
            assert!(model.resumed >= 2);
        }
    }
}
