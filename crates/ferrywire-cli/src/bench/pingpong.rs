//! `--pattern latency`: a message in one direction, answered by one in the other; each end continues only after it has
//! seen the data.
//!
//! Each message starts with the stamp of its iteration, which the other end checks before it continues: a notification
//! that overtakes its data fails the run. In GPU memory a stamp is written and checked by copies of several microseconds
//! each: an answering end there makes them in every eighth iteration only, and the time of these is not recorded. Half of the
//! round trip is the latency.
//! Read next: `session.rs`, the caller.

use std::time::{Duration, Instant};

use ferrywire::{Transfer, TransferError};

use super::flow::{self, Poster};
use super::link::{Heard, Stall};
use super::measure::{Latency, Limit, Meter};
use super::protocol::{FlowReport, Message};
use super::verify::Contents;
use crate::args::Op;
use crate::exit::{Failure, Outcome};

/// How often the answering end checks for the end of the run, while nothing arrives.
const SLICE: Duration = Duration::from_millis(20);

/// Number of iterations of which an answering end in GPU memory checks one, which is not recorded.
const CHECK_PERIOD: u64 = 8;

/// Whether the answering end checks this iteration's message, and stamps its answer, whatever its memory.
fn is_always_checked(iteration: u64) -> bool {
    iteration % CHECK_PERIOD == CHECK_PERIOD - 1
}

/// One end of a ping-pong, with one message out and one back, both in slot 0.
pub struct PingPong<'a> {
    /// Posts messages to the other end.
    pub out: &'a Poster<'a>,
    /// The memory of this end that is sent.
    pub out_memory: Contents<'a>,
    /// Receives messages from the other end.
    pub back: &'a Poster<'a>,
    /// The memory of this end that is written.
    pub back_memory: Contents<'a>,
    /// Whether only messages of checked iterations that arrive here are stamped.
    pub back_is_sparse: bool,
}

impl PingPong<'_> {
    /// Sends messages and waits for their answers until the limit, then tells the other end to stop.
    pub fn lead(&self, op: Op, limit: Limit) -> Outcome<FlowReport> {
        let mut meter = Meter::start(self.out.layout().peers);
        let (mut iteration, mut now) = (0, Instant::now());
        while limit.allows(iteration, meter.elapsed(now)) {
            let expected = self.expect(op)?;
            self.out_memory.stamp(0, iteration)?;
            let start = Instant::now();
            let transfer = self.post(op, iteration)?;
            self.await_answer(iteration, expected)?;
            now = Instant::now();
            if !self.back_is_sparse || is_always_checked(iteration) {
                self.check_stamp(iteration)?;
            }
            self.out.finish(&transfer)?;
            let bytes = 2 * self.out.layout().size();
            if self.back_is_sparse && is_always_checked(iteration) {
                meter.moved(now, bytes);
            } else {
                meter.completed(now, bytes, now.duration_since(start) / 2);
            }
            iteration += 1;
        }
        self.out.link().tell(&Message::Stop { count: iteration })?;
        let (intervals, latency) = meter.finish();
        Ok(FlowReport { iterations: iteration, intervals, latency, ..FlowReport::default() })
    }

    /// Answers messages until the other end stops; returns their number.
    ///
    /// In GPU memory an answer is stamped before the message that it answers has arrived.
    pub fn answer(&self, op: Op) -> Outcome<u64> {
        let stamps_ahead = self.out_memory.is_on_gpu();
        let checks_all = !self.back_memory.is_on_gpu();
        let mut last: Option<Transfer> = None;
        let mut iteration = 0;
        let mut expected = self.expect(op)?;
        loop {
            if stamps_ahead && is_always_checked(iteration) {
                self.make_ready(last.take(), iteration)?;
            }
            match self.next_message(iteration, expected.as_ref())? {
                Some(count) if count == iteration => break,
                Some(count) => {
                    let what = format!("{count} messages were announced, but {iteration} have arrived");
                    return Err(self.out.link().strange(&what));
                }
                None => {}
            }
            if checks_all || is_always_checked(iteration) {
                self.check_stamp(iteration)?;
            }
            expected = self.expect(op)?;
            if !stamps_ahead {
                self.make_ready(last.take(), iteration)?;
            }
            let before = last.replace(self.post(op, iteration)?);
            before.iter().try_for_each(|transfer| self.out.finish(transfer))?;
            iteration += 1;
        }
        if let Some(transfer) = &last {
            self.out.finish(transfer)?;
        }
        match &expected {
            Some(receive) => flow::withdraw(self.back, receive).map(|()| iteration),
            None => Ok(iteration),
        }
    }

    /// Whether this end's written memory still has the last stamp of so many iterations.
    pub fn is_back_stamped(&self, iterations: u64) -> Outcome<bool> {
        let is_stamped = |iteration: &u64| !self.back_is_sparse || is_always_checked(*iteration);
        let first = iterations.saturating_sub(CHECK_PERIOD);
        match (first..iterations).rev().find(is_stamped) {
            Some(last) => Ok(self.back_memory.check_stamp(0, last)?.is_none()),
            None => Ok(false),
        }
    }

    /// Stamps the next message. The other end may already have the previous one, but its source is free only once its
    /// transfer has completed.
    fn make_ready(&self, last: Option<Transfer>, iteration: u64) -> Outcome {
        last.iter().try_for_each(|transfer| self.out.finish(transfer))?;
        self.out_memory.stamp(0, iteration)
    }

    fn expect(&self, op: Op) -> Outcome<Option<Transfer>> {
        if op == Op::Send { self.back.receive(0).map(Some) } else { Ok(None) }
    }

    fn post(&self, op: Op, iteration: u64) -> Outcome<Transfer> {
        if op == Op::Send { self.out.post(0) } else { self.out.post_marked(0, iteration) }
    }

    fn await_answer(&self, iteration: u64, expected: Option<Transfer>) -> Outcome {
        match expected {
            Some(receive) => self.back.finish(&receive),
            None => match self.out.link().hear_any()? {
                Heard::Mark(mark) if mark == iteration => Ok(()),
                other => Err(self.out.link().strange(&not_the_mark(&other, iteration))),
            },
        }
    }

    /// Waits for the next message; returns the number of messages once there are no more.
    fn next_message(&self, iteration: u64, expected: Option<&Transfer>) -> Outcome<Option<u64>> {
        let link = self.out.link();
        let Some(receive) = expected else {
            return match link.hear_any()? {
                Heard::Mark(mark) if mark == iteration => Ok(None),
                Heard::Message(Message::Stop { count }) => Ok(Some(count)),
                other => Err(link.strange(&not_the_mark(&other, iteration))),
            };
        };
        let mut stall = Stall::new(link);
        loop {
            match receive.wait(SLICE) {
                Ok(_) => return Ok(None),
                Err(TransferError::Stalled { .. }) => stall.check("a message")?,
                Err(error) => return Err(link.lost(error)),
            }
            if let Some(count) = flow::stopped(link)? {
                return Ok(Some(count));
            }
        }
    }

    fn check_stamp(&self, iteration: u64) -> Outcome {
        match self.back_memory.check_stamp(0, iteration)? {
            None => Ok(()),
            Some(mismatch) => {
                Err(Failure::failed(format!("a notification arrived before its data: {mismatch}")))
            }
        }
    }
}

/// Latency from posting one write until its completion, one write at a time.
pub fn write_completion(poster: &Poster, limit: Limit) -> Outcome<Latency> {
    let mut latency = Latency::default();
    let start = Instant::now();
    let (mut posted, mut now) = (0, start);
    while limit.allows(posted, now.duration_since(start)) {
        let before = Instant::now();
        poster.finish(&poster.post(0)?)?;
        now = Instant::now();
        latency.record(now.duration_since(before));
        posted += 1;
    }
    Ok(latency)
}

/// The violation of a peer that sends something else than the mark of an iteration.
fn not_the_mark(heard: &Heard, iteration: u64) -> String {
    let found = match heard {
        Heard::Mark(other) => format!("the mark of iteration {other}"),
        Heard::Message(message) => format!("a message '{}'", message.kind()),
    };
    format!("{found} arrived where the mark of iteration {iteration} was expected")
}
