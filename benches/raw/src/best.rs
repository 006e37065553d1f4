//! Repetitions and the search for the best setting.
//!
//! Runs of different settings are interleaved, so that a disturbance of the host falls on all of them. The
//! search has two rounds: first every setting for a short time, then the best few at full length; only the
//! second round is reported.

use std::io;

use crate::flags::Flags;
use crate::plan::{Placement, Plan};
use crate::session::{Client, Outcome};

const SCOUT_SECONDS: f64 = 0.15;
const SCOUT_REPETITIONS: usize = 2;
const SCOUT_WARMUP: u64 = 128 << 20;
const FINALISTS: usize = 4;

/// The repetitions of one plan.
pub struct Series {
    /// The plan of the run.
    pub plan: Plan,
    /// The outcome of each repetition, in order.
    pub outcomes: Vec<Outcome>,
}

impl Series {
    /// Median rate of the repetitions, in GB/s.
    pub fn gb_per_s(&self) -> f64 {
        self.median(Outcome::gb_per_s)
    }

    /// Median over the repetitions of what `value` takes from each.
    pub fn median(&self, value: impl Fn(&Outcome) -> f64) -> f64 {
        let mut values: Vec<f64> = self.outcomes.iter().map(value).collect();
        values.sort_by(f64::total_cmp);
        let half = values.len() / 2;
        if values.len() % 2 == 1 { values[half] } else { (values[half - 1] + values[half]) / 2.0 }
    }
}

/// Runs each plan once per repetition, round after round.
pub fn interleaved(client: &mut Client, plans: &[Plan], repetitions: usize) -> io::Result<Vec<Series>> {
    let mut series: Vec<_> = plans.iter().map(|p| Series { plan: p.clone(), outcomes: vec![] }).collect();
    for _ in 0..repetitions {
        for one in &mut series {
            one.outcomes.push(client.bulk(&one.plan)?);
        }
    }
    Ok(series)
}

/// Finds the best combination of placement, call size and socket buffers for each requested number of
/// connections.
pub fn search(client: &mut Client, flags: &Flags) -> io::Result<Series> {
    let scouts: Vec<_> = flags.connection_plans().flat_map(|p| candidates(&p)).collect();
    let mut scouted = interleaved(client, &scouts, SCOUT_REPETITIONS)?;
    scouted.sort_by(|a, b| b.gb_per_s().total_cmp(&a.gb_per_s()));
    let finalists: Vec<_> = scouted
        .iter()
        .take(FINALISTS)
        .map(|s| Plan { seconds: flags.plan.seconds, iterations: flags.plan.iterations, ..s.plan.clone() })
        .collect();
    let finals = interleaved(client, &finalists, flags.repetitions)?;
    let best = finals.into_iter().max_by(|a, b| a.gb_per_s().total_cmp(&b.gb_per_s()));
    best.ok_or_else(|| io::Error::other("the search measured no setting"))
}

fn candidates(plan: &Plan) -> Vec<Plan> {
    let mut all = vec![];
    for placement in [Placement::Paired, Placement::Free] {
        for call in [256 << 10, 1 << 20] {
            for sockbuf in [0, 512 << 10, 1 << 20, 2 << 20] {
                let scout =
                    Plan { seconds: SCOUT_SECONDS, iterations: 0, warmup: SCOUT_WARMUP, ..plan.clone() };
                all.push(Plan { placement, call, sockbuf, ..scout });
            }
        }
    }
    all
}
