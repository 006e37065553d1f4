//! A rank of the second half: listens, and does for each rank that connects what `serve` does.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ferrywire::{ConnectError, Peer};

use super::super::barrier::Barrier;
use super::super::layout;
use super::super::link::{Link, SLICE};
use super::super::multi_gpu::MultiGpu;
use super::super::protocol::{self, Hello, Message, Run};
use super::super::serve::{self, Member};
use super::connecting::blame;
use super::group::Group;
use super::pairs;
use crate::args::Inject;
use crate::exit::{self, Failure, Outcome};
use crate::plan::RanksPlan;

/// How much later than this rank a connecting rank may start.
const CONNECT_GRACE: Duration = Duration::from_secs(5);

/// Starts the endpoint, and serves when all are ready.
pub fn take_part(plan: &RanksPlan, group: &Arc<Group>) -> Outcome {
    let bench = &plan.bench;
    let listen = Some(plan.serves_at()?);
    let mut multi_gpu = MultiGpu::start(&bench.engine, plan.own, listen, bench.timeout, plan.setting())
        .map_err(|failure| plan.port_taken(failure))?;
    let notes = multi_gpu.take_notes();
    let outcome = group.tell_notes(notes).and_then(|()| with_multi_gpu(plan, group, &multi_gpu));
    multi_gpu.close();
    outcome
}

fn with_multi_gpu(plan: &RanksPlan, group: &Arc<Group>, multi_gpu: &MultiGpu) -> Outcome {
    let table = group.table(plan.place(multi_gpu.lead().reachable_addresses()))?;
    table.run.check().map_err(Failure::Failed)?;
    let all = pairs::pairs(table.run.pattern, plan.ranks.world_size);
    let members = pairs::members(&all, plan.ranks.rank);
    if members.is_empty() {
        return Ok(());
    }
    let run = Run { peers: members.len(), multi_gpu: false, ..table.run.clone() };
    multi_gpu.homes()[0].check_room(layout::region_bytes(&run).saturating_mul(members.len() as u64))?;
    let beyond = group.clone();
    let barrier =
        Barrier::new(members.len(), plan.bench.timeout).with_beyond(Box::new(move |tick| beyond.pass(tick)));
    let barrier = Arc::new(barrier);
    group.watch_over(vec![multi_gpu.lead().clone()], Some(barrier.clone()))?;
    let serving = Serving {
        group,
        multi_gpu,
        timeout: plan.bench.timeout,
        run_id: table.run_id.clone(),
        run,
        barrier: &barrier,
        came: Mutex::new(vec![false; members.len()]),
        members,
        inject: plan.inject,
        failed: Mutex::default(),
    };
    serving.serve()
}

impl RanksPlan {
    /// The address to listen on: any free port on loopback, otherwise the group's port plus the local rank.
    fn serves_at(&self) -> Outcome<SocketAddr> {
        if self.on_loopback {
            return Ok(SocketAddr::new(self.listen.ip(), 0));
        }
        let local_rank = u16::try_from(self.ranks.local_rank).ok();
        let port = local_rank.and_then(|local_rank| self.listen.port().checked_add(local_rank));
        let none = || {
            let (port, local_rank) = (self.listen.port(), self.ranks.local_rank);
            Failure::Usage(format!(
                "--rendezvous: port {port} + local rank {local_rank} exceeds 65535: use a smaller port"
            ))
        };
        Ok(SocketAddr::new(self.listen.ip(), port.ok_or_else(none)?))
    }

    /// Adds the origin of a port to the error that another process has it.
    fn port_taken(&self, failure: Failure) -> Failure {
        match failure {
            Failure::AddressInUse(why) if !self.on_loopback => {
                let (port, local_rank) = (self.listen.port(), self.ranks.local_rank);
                Failure::Failed(format!(
                    "{why}\nlikely: another run serves here, or another program has the port, which is that of --rendezvous, \
                     {port}, + local rank {local_rank}; try: another port with --rendezvous, the same for all ranks"
                ))
            }
            other => other,
        }
    }
}

/// A rank that serves.
struct Serving<'a> {
    group: &'a Group,
    multi_gpu: &'a MultiGpu,
    timeout: Duration,
    run_id: String,
    run: Run,
    barrier: &'a Barrier,
    /// The ranks that connect to this one, and whether each has connected.
    members: Vec<u32>,
    came: Mutex<Vec<bool>>,
    inject: Option<Inject>,
    failed: Mutex<Option<Failure>>,
}

impl Serving<'_> {
    fn serve(&self) -> Outcome {
        thread::scope(|scope| {
            let outcome = self.accept_all(|peer| {
                let attend = move || self.attend(Link::with_stranger(peer, self.timeout));
                let spawned =
                    thread::Builder::new().name("bench-peer".to_owned()).spawn_scoped(scope, attend);
                spawned.map(drop).map_err(|error| Failure::failed(format!("cannot start a thread: {error}")))
            });
            if let Err(failure) = outcome {
                // All ranks learn of the failure before a conversation can end because of it.
                self.group.fail(None, &failure);
                self.note(failure);
            }
        });
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).take().map_or(Ok(()), Err)
    }

    /// Accepts peers until all members have connected.
    fn accept_all(&self, attend: impl Fn(Peer) -> Outcome) -> Outcome {
        let (since, limit) = (Instant::now(), self.timeout + CONNECT_GRACE);
        while let Some(missing) = self.missing() {
            self.group.check()?;
            match self.multi_gpu.lead().accept(SLICE) {
                Ok(peer) => attend(peer)?,
                Err(ConnectError::Stalled { .. }) if since.elapsed() < limit => {}
                Err(ConnectError::Stalled { .. }) => {
                    let why =
                        format!("no connection from rank {missing} within {:.0} s", limit.as_secs_f64());
                    let failure = Failure::failed(why);
                    self.group.fail(Some(missing), &failure);
                    return Err(failure);
                }
                Err(error) => return self.group.check().and(Err(error.into())),
            }
        }
        Ok(())
    }

    fn missing(&self) -> Option<u32> {
        let came = self.came.lock().unwrap_or_else(PoisonError::into_inner);
        came.iter().position(|came| !came).map(|at| self.members[at])
    }

    fn attend(&self, link: Link) {
        let number = match self.admit(&link) {
            Ok(number) => number,
            Err(failure) => return link.tell_last(&Message::Refused { why: failure.first_line() }),
        };
        let link = link.with_guest(self.timeout);
        let failed = |failure: &Failure| blame(self.group, &link, self.members[number], failure);
        let member = Member { number, run: &self.run, barrier: self.barrier, failed: &failed };
        let home = &self.multi_gpu.homes()[0];
        // The other members wait for this one at the barrier.
        let outcome =
            exit::guarded(|| serve::converse(&link, self.multi_gpu.lead(), (&member, home), self.inject));
        link.tell_last(&match &outcome {
            Ok(()) => Message::Bye,
            Err(failure) => {
                failed(failure);
                self.barrier.fail(&failure.first_line());
                Message::failed(failure)
            }
        });
        if let Err(failure) = outcome {
            self.note(failure);
        }
    }

    /// Reads a peer's greeting: the peer is a member that this rank waits for, or another process.
    fn admit(&self, link: &Link) -> Outcome<usize> {
        let Hello { run_id, member, version, .. } = match link.hear()? {
            Message::Hello(hello) => *hello,
            other => return Err(link.unexpected(&other, "a request for a run")),
        };
        if (version, &run_id) != (protocol::VERSION, &self.run_id) {
            return Err(Failure::failed(
                "a rank of another run serves here: give each run its own --rendezvous",
            ));
        }
        let mut came = self.came.lock().unwrap_or_else(PoisonError::into_inner);
        match came.get_mut(member) {
            Some(came) if !*came => *came = true,
            _ => return Err(Failure::failed(format!("peer {member} of this run is connected already"))),
        }
        self.barrier.join();
        Ok(member)
    }

    fn note(&self, failure: Failure) {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
    }
}
