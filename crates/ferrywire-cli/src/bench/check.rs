//! The verdict on one size: the contents after the timed part, and a pass in which every iteration is checked.
//!
//! In the pass each iteration has its own contents. Source and target take turns: fill, move, check, poison the slot
//! for its next message. The flow's driver leads; the other end does its part on request.
//! Read next: `verify.rs`.

use std::time::{Duration, Instant};

use super::flow::Poster;
use super::layout::Flow;
use super::measure::Limit;
use super::protocol::{Message, Point, Side};
use super::session::{Step, StepReport};
use super::verify::{Contents, Mismatch, timed_iteration};
use crate::args::{Op, Verify};
use crate::exit::{Failure, Outcome};
use crate::sys;

/// Fewest iterations of the verified pass, however short its time limit.
const VERIFIED_MIN: u64 = 4;

impl<'a> Step<'a> {
    /// Checks the contents after the timed part, then every iteration of another pass; returns the number of
    /// iterations.
    pub fn verify(&'a self, report: &StepReport) -> Outcome<u64> {
        self.agree(self.check_timed(report)?)?;
        let mut verified = 0;
        for (flow, poster) in &self.posters {
            verified += self.verified_pass(*flow, poster, self.iterations(*flow, report))?;
        }
        Ok(verified)
    }

    /// Number of messages that a flow had in the timed part.
    fn iterations(&self, flow: Flow, report: &StepReport) -> u64 {
        let member = self.session.member;
        let reports = if flow.driver == Side::Connect { &report.members } else { &report.serve };
        let driven = reports.get(member).and_then(|side| side.driven.as_ref());
        // One end drives a ping-pong, but both directions have the same number of messages.
        let driven = driven.or_else(|| report.members.get(member).and_then(|side| side.driven.as_ref()));
        driven.map_or(0, |driven| driven.iterations)
    }

    fn check_timed(&'a self, report: &StepReport) -> Outcome<Option<Mismatch>> {
        for (flow, poster) in self.posters.iter().filter(|(flow, _)| flow.target() == self.side()) {
            let contents = self.contents(poster);
            for slot in 0..poster.layout().slots.min(self.iterations(*flow, report)) {
                self.inject(&contents, slot, timed_iteration(slot), true)?;
                let found = contents.check(slot, timed_iteration(slot), self.session.run.verify)?;
                if found.is_some() {
                    return Ok(found);
                }
                interruptible()?;
            }
        }
        Ok(None)
    }

    /// Exchanges both ends' findings; a mismatch on either end fails both.
    fn agree(&self, mine: Option<Mismatch>) -> Outcome {
        let link = self.session.link;
        link.tell(&Message::Verdict { mismatch: mine.clone().map(Box::new) })?;
        let theirs = match link.hear()? {
            Message::Verdict { mismatch } => mismatch,
            other => return Err(link.unexpected(&other, "the other end's verification")),
        };
        fail_on(mine.as_ref())?;
        fail_on(theirs.as_deref())
    }

    fn verified_pass(&'a self, flow: Flow, poster: &'a Poster<'a>, iterations: u64) -> Outcome<u64> {
        let contents = self.contents(poster);
        if flow.target() == self.side() {
            (0..poster.layout().slots).try_for_each(|slot| contents.poison(slot, slot))?;
        }
        self.meet(Point::Verify)?;
        if flow.driver == self.side() {
            self.drive_verified(flow, poster, &contents, self.verified_limit(iterations))
        } else {
            self.follow_verified(flow, poster, &contents)
        }
    }

    fn verified_limit(&self, iterations: u64) -> Limit {
        let run = self.session.run;
        let sampled = if run.verify == Verify::Sample { 2 * self.depth as u64 } else { u64::MAX };
        let time = run.seconds.map_or(Duration::MAX, |s| Duration::from_secs_f64(s / 2.0));
        Limit { iterations: iterations.min(sampled), time }
    }

    fn drive_verified(&self, flow: Flow, poster: &Poster, contents: &Contents, limit: Limit) -> Outcome<u64> {
        let link = self.session.link;
        let (start, mut iteration) = (Instant::now(), 0);
        while iteration < limit.iterations && (iteration < VERIFIED_MIN || start.elapsed() < limit.time) {
            let slot = iteration % poster.layout().slots;
            if flow.source == self.side() {
                contents.fill(slot, iteration)?;
                self.inject(contents, slot, iteration, false)?;
            }
            self.move_verified(poster, iteration, slot)?;
            let found = if flow.target() == self.side() {
                self.check_iteration(contents, slot, iteration)?
            } else {
                None
            };
            if found.is_some() {
                link.tell(&Message::Verdict { mismatch: found.clone().map(Box::new) })?;
                return fail_on(found.as_ref()).map(|()| 0);
            }
            interruptible()?;
            iteration += 1;
        }
        link.tell(&Message::PassOver { iterations: iteration })?;
        Ok(iteration)
    }

    /// Moves one message of the verified pass, as its driver.
    fn move_verified(&self, poster: &Poster, iteration: u64, slot: u64) -> Outcome {
        let part = Message::Part { iteration, slot };
        let link = self.session.link;
        match self.session.run.op {
            Op::Write => {
                poster.finish(&poster.post(slot)?)?;
                link.tell(&part)?;
                self.await_part()
            }
            Op::Read => {
                link.tell(&part)?;
                self.await_part()?;
                poster.finish(&poster.post(slot)?)
            }
            Op::Send => {
                link.tell(&part)?;
                poster.finish(&poster.post(slot)?)?;
                self.await_part()
            }
        }
    }

    fn await_part(&self) -> Outcome {
        match self.session.link.hear()? {
            Message::PartDone => Ok(()),
            Message::Verdict { mismatch: Some(mismatch) } => fail_on(Some(&mismatch)),
            other => Err(self.session.link.unexpected(&other, "the end of its part of an iteration")),
        }
    }

    fn follow_verified(&self, flow: Flow, poster: &Poster, contents: &Contents) -> Outcome<u64> {
        let link = self.session.link;
        loop {
            let (iteration, slot) = match link.hear()? {
                Message::Part { iteration, slot } if slot < poster.layout().slots => (iteration, slot),
                Message::PassOver { iterations } => return Ok(iterations),
                Message::Verdict { mismatch: Some(mismatch) } => return fail_on(Some(&mismatch)).map(|()| 0),
                other => return Err(link.unexpected(&other, "an iteration of the verified pass")),
            };
            if flow.source == self.side() {
                contents.fill(slot, iteration)?;
                self.inject(contents, slot, iteration, false)?;
            }
            if self.session.run.op == Op::Send {
                poster.finish(&poster.receive(slot)?)?;
            }
            let found = if flow.target() == self.side() {
                self.check_iteration(contents, slot, iteration)?
            } else {
                None
            };
            if found.is_some() {
                link.tell(&Message::Verdict { mismatch: found.clone().map(Box::new) })?;
                return fail_on(found.as_ref()).map(|()| 0);
            }
            link.tell(&Message::PartDone)?;
        }
    }

    /// Checks one iteration at its target, and poisons the slot for its next message.
    fn check_iteration(&self, contents: &Contents, slot: u64, iteration: u64) -> Outcome<Option<Mismatch>> {
        if self.side() == Side::Serve {
            self.inject(contents, slot, iteration, false)?;
        }
        let found = contents.check(slot, iteration, self.session.run.verify)?;
        if found.is_none() {
            contents.poison(slot, iteration + contents.layout.slots)?;
        }
        Ok(found)
    }
}

fn interruptible() -> Outcome {
    if sys::interrupted() { Err(Failure::Interrupted) } else { Ok(()) }
}

fn fail_on(mismatch: Option<&Mismatch>) -> Outcome {
    mismatch.map_or(Ok(()), |mismatch| Err(Failure::failed(mismatch.to_string())))
}
