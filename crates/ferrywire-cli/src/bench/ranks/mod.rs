//! One process of a run of several, as torchrun, mpirun or srun start them: the first half of the ranks connects, the
//! second half serves, rank 0 reports.
//!
//! ```text
//!   rank 0 ───────────── data ─────────────▶ rank W/2          each rank: an endpoint for its GPU
//!   rank 1 ───────────── data ─────────────▶ rank W/2 + 1
//!     └── group at rank 0: places, start and end of each timed part, measurements, failures
//! ```
//!
//! Two ranks do with each other what `connect` and `serve` do. All start and end each timed part together.
//! Invariant: if one rank fails, all others end too, and name that rank.
//! Read next: [`messages`], [`coordinator`], [`group`], then [`connecting`] and [`serving`].

pub mod connecting;
pub mod coordinator;
pub mod group;
pub mod join;
pub mod messages;
pub mod pairs;
pub mod serving;

use std::time::Instant;

use super::connect::Listeners;
use super::host::Host;
use super::isolated;
use super::multi_gpu::Setting;
use super::protocol;
use super::report::{Output, Record};
use crate::exit::{self, Outcome};
use crate::plan::RanksPlan;
use group::Group;
use messages::{Card, Place};

/// Most processes of a run: rank 0 has a conversation with each.
pub const WORLD_MAX: u32 = 1024;

/// Takes part in a run; rank 0 prints and stores the results, also those before a failure.
pub fn run(plan: &RanksPlan) -> Outcome {
    let output = Output::open(&plan.bench)?;
    let mut record = Record::new(&plan.bench);
    let tells = plan.ranks.rank == 0;
    let environment = match plan.bench.engine.plugin {
        Some(_) => isolated::environment(&plan.bench.engine, None)?,
        None => Vec::new(),
    };
    record.note_environment(&environment);
    if plan.bench.verbose && tells {
        exit::aside(&(record.effective_values() + &isolated::shown(&environment)));
    }
    let outcome = match plan.bench.engine.plugin {
        Some(_) => isolated::connect(&plan.bench, &environment, &mut record),
        None => measure(plan, (&mut |news| record.take(news), &|_| {})),
    };
    if tells {
        let written = output.finish(&record, &outcome);
        return exit::with_results(outcome, written);
    }
    outcome
}

/// Joins the group and does this rank's part.
pub fn measure(plan: &RanksPlan, (tell, stage): Listeners<'_>) -> Outcome {
    let start = Instant::now();
    // Open the GPU before there are threads; see `endpoint` in the parent module.
    let opened = plan.own.open();
    stage("while meeting the other ranks");
    let group = Group::begin(plan)?;
    let outcome = opened.and_then(|_home| {
        if plan.connects() {
            connecting::take_part(plan, &group, start, (tell, stage))
        } else {
            stage("while serving other ranks");
            serving::take_part(plan, &group)
        }
    });
    stage("while leaving the other ranks");
    group.finish(outcome)
}

impl RanksPlan {
    /// Whether this rank is in the connecting half.
    pub fn connects(&self) -> bool {
        self.ranks.rank < self.ranks.world_size / 2
    }

    /// This rank's introduction.
    pub fn card(&self) -> Card {
        let here = Host::this();
        Card {
            rank: self.ranks.rank,
            world_size: self.ranks.world_size,
            local_rank: self.ranks.local_rank,
            host: here.hostname,
            boot_id: here.boot_id,
            protocol: protocol::VERSION,
            version: here.version,
            job: self.job.clone(),
            options: self.options.clone(),
        }
    }

    /// This rank's place.
    fn place(&self, addresses: Vec<std::net::SocketAddr>) -> Place {
        Place { addresses, memory: self.own, gpu: self.gpu }
    }

    fn setting(&self) -> Setting {
        let on_host = self.ranks.local_world.unwrap_or(self.ranks.world_size / 2).max(1) as usize;
        Setting { on_host, on_loopback: self.on_loopback }
    }
}
