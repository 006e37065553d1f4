//! A rank of the first half: connects to its partners and drives, as `connect` does; rank 0 merges all measurements.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use ferrywire::orchestrator::Target;
use ferrywire::{ConnectError, Error};
use ferrywire_host::topology::Topology;
use ferrywire_net::beyond_this_host;
use ferrywire_sys::nics;

use super::super::barrier::WaitNotice;
use super::super::connect::{self, Listeners, Part};
use super::super::layout;
use super::super::link::Link;
use super::super::multi_gpu::{MultiGpu, Pair, reachable};
use super::super::protocol::Run;
use super::super::report::{News, RankRow};
use super::super::result::RankPair;
use super::super::session::StepReport;
use super::group::Group;
use super::messages::{Entry, PairReport, Table};
use super::pairs;
use crate::exit::{self, Failure, Outcome};
use crate::plan::{ConnectPlan, RanksPlan};

/// Starts the endpoint, and moves data once all ranks are ready.
pub fn take_part(
    plan: &RanksPlan,
    group: &Arc<Group>,
    start: Instant,
    (tell, stage): Listeners<'_>,
) -> Outcome {
    let bench = &plan.bench;
    let mut multi_gpu = MultiGpu::start(&bench.engine, plan.own, None, bench.timeout, plan.setting())?;
    let outcome = group.tell_notes(multi_gpu.take_notes()).and_then(|()| {
        let table = group.table(plan.place(Vec::new()))?;
        table.run.check().map_err(Failure::Failed)?;
        if plan.ranks.rank == 0 {
            tell(News::Ranks(rows(&table)));
        }
        Connecting::prepare(plan, group, &mut multi_gpu, &table, stage)?.converse(start, (tell, stage))
    });
    multi_gpu.close();
    outcome
}

/// A rank that is connected to its partners.
struct Connecting<'a> {
    group: &'a Group,
    multi_gpu: &'a MultiGpu,
    bench: ConnectPlan,
    /// All pairs of the run.
    ranks: Vec<RankPair>,
    gpus: Vec<(u32, u32)>,
    /// The indices of this rank's pairs.
    own: Vec<usize>,
    pairs: Vec<Pair>,
    links: Vec<Link>,
    /// The index of this rank among the peers of each partner.
    member: usize,
    run: Run,
}

impl<'a> Connecting<'a> {
    fn prepare(
        plan: &RanksPlan,
        group: &'a Group,
        multi_gpu: &'a mut MultiGpu,
        table: &Table,
        stage: &dyn Fn(&str),
    ) -> Outcome<Connecting<'a>> {
        let rank = plan.ranks.rank;
        let all = pairs::pairs(table.run.pattern, plan.ranks.world_size);
        let own = pairs::from(&all, rank);
        let partner = |at: &usize| &table.ranks[all[*at].1 as usize];
        let boot_id = &table.ranks[rank as usize].boot_id;
        let pair = |at: &usize| Pair {
            endpoint: 0,
            home: 0,
            gpu: plan.gpu,
            peer_gpu: partner(at).place.gpu,
            addresses: candidates(partner(at), boot_id),
        };
        let mut own_pairs: Vec<Pair> = own.iter().map(pair).collect();
        let members = own.first().map_or_else(Vec::new, |at| pairs::members(&all, all[*at].1));
        let run = Run { peers: members.len(), multi_gpu: false, ..table.run.clone() };
        let mut bench = ConnectPlan { run_id: table.run_id.clone(), ..plan.bench.clone() };
        bench.run = Run { memory: plan.own, ..run.clone() };
        multi_gpu.homes()[0].check_room(layout::region_bytes(&run).saturating_mul(own.len() as u64))?;
        for (pair, at) in own_pairs.iter().zip(&own) {
            reachable(pair.peer_gpu, &pair.addresses)
                .inspect_err(|failure| group.fail(Some(all[*at].1), failure))?;
        }
        multi_gpu.take_detours(&bench, &mut own_pairs)?;
        group.tell_notes(multi_gpu.take_notes())?;
        let multi_gpu = &*multi_gpu;
        group.watch_over(multi_gpu.all_endpoints().to_vec(), None)?;
        stage("while connecting");
        let target = |pair: &Pair| Target { endpoint: pair.endpoint, addresses: pair.addresses.clone() };
        let failed = |missed: Option<usize>, failure: Failure| {
            group.fail(missed.map(|at| all[own[at]].1), &failure);
            failure
        };
        let connected = multi_gpu.connect(own_pairs.iter().map(target).collect(), bench.timeout);
        let connected = connected.map_err(|failure| failed(None, failure))?;
        let missed = |error: &ConnectError| match error {
            ConnectError::Phase { target, .. } => *target,
            _ => None,
        };
        let peers = connected.map_err(|error| failed(missed(&error), error.into()))?;
        let links: Vec<Link> = peers.into_iter().map(|peer| Link::new(peer, bench.timeout)).collect();
        let host = |rank: u32| table.ranks[rank as usize].host.clone();
        let gpu = |rank: u32| table.ranks[rank as usize].place.gpu;
        Ok(Connecting {
            group,
            multi_gpu,
            ranks: all
                .iter()
                .map(|(from, to)| RankPair { ranks: (*from, *to), hosts: (host(*from), host(*to)) })
                .collect(),
            gpus: all.iter().map(|(from, to)| (gpu(*from), gpu(*to))).collect(),
            own,
            pairs: own_pairs,
            member: members.iter().position(|member| *member == rank).unwrap_or(0),
            links,
            run,
            bench,
        })
    }

    /// Runs all conversations, each in a thread; the first one in this thread, which reports if this is rank 0.
    fn converse(&self, start: Instant, listeners: Listeners<'_>) -> Outcome {
        thread::scope(|scope| {
            let further: Vec<_> = (1..self.own.len())
                .map(|number| {
                    let body = move || self.one(number, start, (&mut |_| {}, &|_| {}));
                    thread::Builder::new().name(format!("pair-{number}")).spawn_scoped(scope, body)
                })
                .collect();
            let mut outcome = self.one(0, start, listeners);
            for spawned in further {
                let of_one = match spawned {
                    Ok(thread) => thread.join().unwrap_or_else(|_| Err(Failure::panicked())),
                    Err(error) => {
                        let failure =
                            Failure::failed(format!("cannot start a thread for a partner: {error}"));
                        self.group.fail(None, &failure);
                        Err(failure)
                    }
                };
                outcome = outcome.and(of_one);
            }
            outcome
        })
    }

    fn one(&self, number: usize, start: Instant, listeners: Listeners<'_>) -> Outcome {
        let (pair, link, at) = (&self.pairs[number], &self.links[number], self.own[number]);
        let tells = at == 0;
        let part = Part {
            number: self.member,
            run: &self.run,
            endpoint: &self.multi_gpu.all_endpoints()[pair.endpoint],
            home: &self.multi_gpu.homes()[pair.home],
            pairs: &self.gpus,
            ranks: &self.ranks,
            tells,
            failed: &|failure| blame(self.group, link, self.ranks[at].ranks.1, failure),
            merge: &|step, report| self.merge(at, link, step, report),
        };
        // The ranks of the other pairs wait for this one.
        let outcome = exit::guarded(|| connect::converse(&self.bench, &part, link, start, listeners));
        if let Err(failure) = &outcome {
            blame(self.group, link, self.ranks[at].ranks.1, failure);
        }
        connect::take_leave(link, &outcome);
        outcome
    }

    /// Reports a pair's measurements; the first pair of all receives those of all pairs.
    fn merge(
        &self,
        pair: usize,
        link: &Link,
        step: usize,
        report: StepReport,
    ) -> Outcome<Option<StepReport>> {
        let StepReport { members, serve, stages_s, verified_iterations } = report;
        let of_this = |sides: &[_]| sides.get(self.member).cloned();
        let (Some(near), Some(far)) = (of_this(&members), of_this(&serve)) else {
            return Err(Failure::failed(
                "internal error, please report: the reports of a run lack this rank",
            ));
        };
        let verified_iterations = verified_iterations.get(self.member).copied();
        self.group.report(PairReport { step, pair, near, far, verified_iterations })?;
        if pair > 0 {
            return Ok(None);
        }
        // The partner waits for the next size while other pairs may still verify this one.
        let notice = WaitNotice::new(link);
        let all = self.group.reports(step, &|| notice.ask())?;
        let verified_iterations = all.iter().filter_map(|one| one.verified_iterations).collect();
        let (members, serve) = all.into_iter().map(|one| (one.near, one.far)).unzip();
        Ok(Some(StepReport { members, serve, stages_s, verified_iterations }))
    }
}

/// Reports why a conversation ended. The partner is blamed if it is gone or has reported a failure.
pub fn blame(group: &Group, link: &Link, partner: u32, failure: &Failure) {
    if let Some(why) = link.their_failure() {
        return group.fail(Some(partner), &Failure::failed(why));
    }
    let is_gone = matches!(link.peer.error(), Some(Error::PeerLost { .. } | Error::PeerClosed { .. }));
    group.fail((is_gone && *failure != Failure::Interrupted).then_some(partner), failure);
}

/// Addresses of a rank, likely ones first. An address of another host that is also an address of this host is
/// left out, because it would lead to this host.
fn candidates(there: &Entry, boot_id: &str) -> Vec<SocketAddr> {
    let addresses = &there.place.addresses;
    let mut likely = if there.boot_id == boot_id {
        addresses.clone()
    } else {
        beyond_this_host(&nics::addresses().unwrap_or_default(), addresses)
    };
    if likely.len() > 1 {
        let topology = Topology::detect();
        let near = |address: &SocketAddr| {
            topology.nics.iter().any(|nic| nic.up && !nic.loopback && nic.reaches(address.ip()))
        };
        likely.sort_by_key(|address| (address.ip().is_loopback(), !near(address)));
    }
    likely
}

fn rows(table: &Table) -> Vec<RankRow> {
    let row = |(rank, entry): (u32, &Entry)| RankRow {
        rank,
        host: entry.host.clone(),
        local_rank: entry.local_rank,
        memory: entry.place.memory.to_string(),
    };
    (0..).zip(&table.ranks).map(row).collect()
}
