//! One size from poison to verdict, with the same code on both ends.
//!
//! load -> Ready -> warm-up -> Warm -> poison -> Go -> timed part -> reports -> verdict on its contents -> Verify -> a
//! pass in which every iteration is checked -> Verified. Each end names the [`Point`] that it has reached and waits for
//! the other end; on the serving end of an incast the [`Barrier`] also waits for the other peers. [`super::check`] has
//! the steps after the timed part.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use ferrywire::RemoteRegion;

use super::barrier::Barrier;
use super::flow::{self, Poster};
use super::layout::{self, Flow};
use super::link::Link;
use super::measure::{Limit, Snapshot};
use super::pingpong::{self, PingPong};
use super::protocol::{FlowReport, Message, Point, Run, Side, SideReport};
use super::verify::{Contents, timed_iteration};
use crate::args::{Inject, Op, Pattern, Verify};
use crate::exit::{Failure, Outcome};
use crate::memory::Local;

/// Length of the warm-up if no number of messages is given.
const WARMUP: Duration = Duration::from_millis(200);
/// Longest measurement of single writes in a latency run.
const SINGLE_WRITES: Duration = Duration::from_secs(1);

/// The delay of one pair's wrong byte, if a test asks for it.
const LATE: Duration = Duration::from_secs(3);
/// The extra time of each iteration of a slow pair, in tests.
const SLOW: Duration = Duration::from_secs(1);

/// One end of a run with one peer.
pub struct Session<'a> {
    /// The conversation with the peer.
    pub link: &'a Link,
    /// Which end of the run this is.
    pub side: Side,
    /// The parameters of the run.
    pub run: &'a Run,
    /// This end's memory.
    pub local: &'a Local,
    /// The other end's memory.
    pub remote: &'a RemoteRegion,
    /// The peer's index in the run.
    pub member: usize,
    /// The barrier for the run's other peers, at the serving end.
    pub barrier: Option<&'a Barrier>,
    /// Data to corrupt, in tests.
    pub inject: Option<Inject>,
}

/// The outcome of one size.
#[derive(Clone, Debug, Default)]
pub struct StepReport {
    /// The reports of the peers.
    pub members: Vec<SideReport>,
    /// The serving end's report on each peer.
    pub serve: Vec<SideReport>,
    /// Seconds that each stage took, by its name.
    pub stages_s: BTreeMap<String, f64>,
    /// Iterations of the verified pass by peer; empty if nothing was verified.
    pub verified_iterations: Vec<u64>,
}

/// One size of a run, at one end.
pub struct Step<'a> {
    /// The conversation in which the size is measured.
    pub session: &'a Session<'a>,
    /// Transfers in flight.
    pub depth: usize,
    /// For each flow, the poster of this end's transfers.
    pub posters: Vec<(Flow, Poster<'a>)>,
    index: usize,
}

impl<'a> Session<'a> {
    /// Goes through one size; `stage` receives the name of each stage that begins.
    pub fn step(&self, index: usize, stage: &dyn Fn(&str)) -> Outcome<StepReport> {
        let step = self.prepare(index)?;
        let mut report = StepReport::default();
        let mut clock = Instant::now();
        let mut lap = |name: &str, report: &mut StepReport| {
            report.stages_s.insert(name.to_owned(), clock.elapsed().as_secs_f64());
            clock = Instant::now();
        };
        stage("warm-up");
        step.load()?;
        step.meet(Point::Ready)?;
        lap("load", &mut report);
        step.exercise(self.warmup())?;
        step.meet(Point::Warm)?;
        step.poison()?;
        lap("warmup", &mut report);
        stage("timed");
        step.start_together()?;
        let mine = step.timed()?;
        (report.members, report.serve) = step.exchange_reports(mine)?;
        lap("timed", &mut report);
        stage("verify");
        if self.run.verify != Verify::Off {
            let iterations = step.verify(&report)?;
            report.verified_iterations = step.all_verified(iterations, report.members.len())?;
        }
        lap("verify", &mut report);
        Ok(report)
    }

    fn prepare(&'a self, index: usize) -> Outcome<Step<'a>> {
        let poster = |flow| {
            Poster::new(self.link, self.run, flow, self.side, index, (&self.local.region, self.remote))
        };
        let posters = layout::flows(self.run).into_iter().map(|flow| Ok((flow, poster(flow)?)));
        let posters = posters.collect::<Outcome<_>>()?;
        Ok(Step { session: self, index, depth: layout::depth(self.run, self.run.sizes[index]), posters })
    }

    fn warmup(&self) -> Limit {
        match self.run.warmup {
            Some(n) => Limit::iterations(n),
            None => Limit { iterations: u64::MAX, time: WARMUP },
        }
    }

    fn limit(&self) -> Limit {
        let time = self.run.seconds.map_or(Duration::MAX, Duration::from_secs_f64);
        Limit { iterations: self.run.iters.unwrap_or(u64::MAX), time }
    }
}

impl<'a> Step<'a> {
    /// Which end of the run this is.
    pub fn side(&self) -> Side {
        self.session.side
    }

    /// This end's memory of a flow.
    pub fn contents(&self, poster: &'a Poster<'a>) -> Contents<'a> {
        Contents { local: self.session.local, layout: poster.layout(), seed: self.session.run.seed }
    }

    /// Fills sources and poisons targets.
    fn load(&'a self) -> Outcome {
        for (flow, poster) in &self.posters {
            let contents = self.contents(poster);
            for slot in (0..poster.layout().slots).filter(|_| flow.source == self.side()) {
                contents.fill(slot, timed_iteration(slot))?;
                self.inject(&contents, slot, timed_iteration(slot), true)?;
            }
        }
        self.poison()
    }

    fn poison(&'a self) -> Outcome {
        for (_, poster) in self.posters.iter().filter(|(flow, _)| flow.target() == self.side()) {
            let contents = self.contents(poster);
            (0..poster.layout().slots).try_for_each(|slot| contents.poison(slot, timed_iteration(slot)))?;
        }
        Ok(())
    }

    /// Corrupts one slot, if a test asks for it.
    pub fn inject(&self, contents: &Contents, slot: u64, iteration: u64, timed: bool) -> Outcome {
        match self.session.inject {
            Some(how) if slot == 0 && timed == (how == Inject::WrongByte) => {
                match how {
                    Inject::LateByte => thread::sleep(LATE),
                    Inject::Slow => thread::sleep(SLOW),
                    Inject::Panic => panic!("as a test asked for"),
                    _ => {}
                }
                contents.spoil(slot, iteration, how)
            }
            _ => Ok(()),
        }
    }

    /// Waits until the other end has reached the point too.
    pub fn meet(&self, point: Point) -> Outcome {
        self.session.link.tell(&Message::At { step: self.index, point })?;
        self.await_point(point)
    }

    fn await_point(&self, point: Point) -> Outcome {
        match self.session.link.hear()? {
            Message::At { step, point: theirs } if (step, theirs) == (self.index, point) => Ok(()),
            other => {
                let expected = format!("point {point:?} of size {}", self.index);
                Err(self.session.link.unexpected(&other, &expected))
            }
        }
    }

    fn start_together(&self) -> Outcome {
        let Some(barrier) = self.session.barrier else {
            return self.meet(Point::Go);
        };
        self.await_point(Point::Go)?;
        barrier.start(self.session.link)?;
        self.session.link.tell(&Message::At { step: self.index, point: Point::Go })
    }

    fn timed(&'a self) -> Outcome<SideReport> {
        let before = Snapshot::take(&self.session.link.peer);
        let mut driven = self.exercise(self.session.limit())?;
        let mut report = self.end_together(&before)?;
        if let Some(driven) = &mut driven {
            self.settle_stamps(driven)?;
        }
        report.driven = driven;
        Ok(report)
    }

    /// Takes the report at the end of the timed part.
    fn end_together(&self, before: &Snapshot) -> Outcome<SideReport> {
        let link = self.session.link;
        let Some(barrier) = self.session.barrier else {
            // While the other end still drives, this end still spends CPU time on its flow.
            if self.session.run.pattern == Pattern::Bidir {
                self.meet(Point::Over)?;
                return Ok(before.report(&link.peer));
            }
            let report = before.report(&link.peer);
            return self.meet(Point::Over).map(|()| report);
        };
        self.await_point(Point::Over)?;
        barrier.end(link)?;
        let report = before.report(&link.peer);
        link.tell(&Message::At { step: self.index, point: Point::Over })?;
        Ok(report)
    }

    /// Runs every flow until the limit; returns the report on the flow that this end drove.
    fn exercise(&'a self, limit: Limit) -> Outcome<Option<FlowReport>> {
        if self.is_pingpong() {
            return self.play(limit);
        }
        let mine = self.posters.iter().find(|(flow, _)| flow.driver == self.side());
        let theirs = self.posters.iter().find(|(flow, _)| flow.driver != self.side());
        let theirs = theirs.filter(|_| self.session.run.op == Op::Send);
        thread::scope(|scope| {
            let following = theirs.map(|(_, poster)| scope.spawn(|| flow::follow(poster, self.depth)));
            let driven = mine.map(|(_, poster)| flow::drive(poster, self.depth, limit)).transpose();
            let followed =
                following.map_or(Ok(()), |thread| thread.join().unwrap_or_else(|_| Err(Failure::panicked())));
            driven.and_then(|report| followed.map(|()| report))
        })
    }

    fn is_pingpong(&self) -> bool {
        self.session.run.pattern == Pattern::Latency && self.session.run.op != Op::Read
    }

    fn pingpong(&'a self) -> PingPong<'a> {
        let mine = |(flow, _): &&(Flow, Poster)| flow.driver == self.side();
        let out = self.posters.iter().find(mine).expect("a ping-pong has a flow each way");
        let back = self.posters.iter().find(|flow| !mine(flow)).expect("a ping-pong has a flow each way");
        PingPong {
            out: &out.1,
            out_memory: self.contents(&out.1),
            back: &back.1,
            back_memory: self.contents(&back.1),
            back_is_sparse: self.side() == Side::Connect && out.1.writes_to_gpu(),
        }
    }

    fn play(&'a self, limit: Limit) -> Outcome<Option<FlowReport>> {
        let (game, op) = (self.pingpong(), self.session.run.op);
        if self.side() == Side::Connect {
            return game.lead(op, limit).map(Some);
        }
        let iterations = game.answer(op)?;
        self.settle(&game, iterations)?;
        Ok(None)
    }

    /// Restores the timed part's bytes where the last stamps are, so that the verdict can check them.
    fn settle(&self, game: &PingPong, iterations: u64) -> Outcome {
        game.out_memory.stamp(0, timed_iteration(0))?;
        if game.is_back_stamped(iterations)? {
            game.back_memory.stamp(0, timed_iteration(0))?;
        }
        Ok(())
    }

    fn settle_stamps(&'a self, driven: &mut FlowReport) -> Outcome {
        if !self.is_pingpong() {
            return Ok(());
        }
        let game = self.pingpong();
        self.settle(&game, driven.iterations)?;
        if self.session.run.op == Op::Write {
            let limit = Limit { iterations: driven.iterations, time: SINGLE_WRITES };
            let latency = pingpong::write_completion(game.out, limit)?;
            driven.extra.insert("write_completion_us".to_owned(), latency.counts());
        }
        Ok(())
    }

    /// Exchanges the reports of the timed part.
    fn exchange_reports(&self, mine: SideReport) -> Outcome<(Vec<SideReport>, Vec<SideReport>)> {
        let link = self.session.link;
        let Some(barrier) = self.session.barrier else {
            link.tell(&Message::Done { report: Box::new(mine) })?;
            return match link.hear()? {
                Message::Reports { members, serve } if members.len() == serve.len() && !serve.is_empty() => {
                    Ok((members, serve))
                }
                other => Err(link.unexpected(&other, "two reports for each peer of the run")),
            };
        };
        let theirs = match link.hear()? {
            Message::Done { report } => *report,
            other => return Err(link.unexpected(&other, "the report of the connecting end")),
        };
        let (members, serve) = barrier.exchange(link, self.session.member, theirs, mine)?;
        link.tell(&Message::Reports { members: members.clone(), serve: serve.clone() })?;
        Ok((members, serve))
    }

    /// Waits until the data of all peers are verified: a size has no number while another pair's data may be wrong.
    fn all_verified(&self, iterations: u64, members: usize) -> Outcome<Vec<u64>> {
        let link = self.session.link;
        let Some(barrier) = self.session.barrier else {
            link.tell(&Message::At { step: self.index, point: Point::Verified })?;
            return match link.hear()? {
                Message::Verified { iterations } if iterations.len() == members => Ok(iterations),
                other => Err(link.unexpected(&other, "the number of verified iterations of each peer")),
            };
        };
        self.await_point(Point::Verified)?;
        let iterations = barrier.verified(link, self.session.member, iterations)?;
        link.tell(&Message::Verified { iterations: iterations.clone() })?;
        Ok(iterations)
    }
}

#[cfg(test)]
mod tests {
    use ferrywire::Endpoint;

    use super::*;
    use crate::args::Verify;
    use crate::memory::Memory;

    const LIMIT: Duration = Duration::from_secs(60);

    fn run(peers: usize, iters: u64) -> Run {
        Run {
            op: Op::Write,
            pattern: Pattern::Unidir,
            memory: Memory::Host,
            peer_memory: Some(Memory::Host),
            unpack: None,
            sizes: vec![100],
            depth: Some(2),
            blocks: None,
            peers,
            multi_gpu: true,
            iters: Some(iters),
            seconds: None,
            warmup: Some(1),
            verify: Verify::All,
            timeout_s: LIMIT.as_secs_f64(),
            seed: 3,
        }
    }

    /// Goes through one size with pairs of `iters` messages each; returns the reports of both ends of each pair.
    fn with_pairs(iters: &[u64]) -> Vec<[StepReport; 2]> {
        let barrier = Barrier::new(iters.len(), LIMIT);
        let barrier = &barrier;
        thread::scope(|scope| {
            let one = |(member, iters_of_pair): (usize, &u64)| {
                let run = run(iters.len(), *iters_of_pair);
                let there = Endpoint::builder().listen(([127, 0, 0, 1], 0).into()).build()?;
                let here = Endpoint::builder().build()?;
                let near = here.connect(there.listen_addresses()[0], LIMIT)?;
                let far = there.accept(LIMIT)?;
                barrier.join();
                let ends = [(here, near, Side::Connect, None), (there, far, Side::Serve, Some(barrier))];
                let mut regions = Vec::new();
                for (endpoint, ..) in &ends {
                    regions.push(Memory::Host.open()?.register(endpoint, layout::region_bytes(&run))?);
                }
                let remote =
                    |at: usize| RemoteRegion::from_bytes(&regions[at].region.descriptor().to_bytes());
                let remotes = [remote(1)?, remote(0)?];
                let ends = ends.into_iter().zip(regions).zip(remotes);
                Ok(ends
                    .map(|(((endpoint, peer, side, barrier), local), remote)| {
                        let run = run.clone();
                        scope.spawn(move || {
                            let link = Link::new(peer, LIMIT);
                            let (local, remote) = (&local, &remote);
                            let (link, run) = (&link, &run);
                            let session =
                                Session { link, side, run, local, remote, member, barrier, inject: None };
                            let report = session.step(0, &|_| {});
                            // Peers that wait in the barrier fail too.
                            report.inspect_err(|failure| {
                                barrier.inspect(|barrier| barrier.fail(&failure.first_line()));
                                drop(endpoint);
                            })
                        })
                    })
                    .collect::<Vec<_>>())
            };
            let threads: Outcome<Vec<_>> = iters.iter().enumerate().map(one).collect();
            let reports = threads.expect("it can begin").into_iter().map(|ends| {
                let ends = ends.into_iter().map(|end| end.join().expect("no panic").expect("it goes well"));
                <[StepReport; 2]>::try_from(ends.collect::<Vec<_>>()).expect("two ends")
            });
            reports.collect()
        })
    }

    /// With a time limit each pair has its own number of messages.
    #[test]
    fn a_pair_is_verified_by_its_own_number_of_messages() {
        for report in with_pairs(&[3, 5]).iter().flatten() {
            assert_eq!(report.verified_iterations, [3, 5]);
        }
    }
}
