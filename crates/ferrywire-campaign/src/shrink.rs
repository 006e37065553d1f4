//! Makes a failed scenario smaller while it still fails in the same way.

use crate::campaign::attempt;
use crate::run::Broken;
use crate::scenario::{Action, Protection, Scenario};
use ferrywire_memory::sim::SimGpu;
use std::sync::Arc;

/// Most runs that shrink one scenario.
const TRIES_MAX: usize = 400;

/// Finds the smallest scenario that breaks the same invariant; also returns how that scenario breaks it.
pub fn shrink(scenario: &Scenario, broken: &Broken, gpus: &[Arc<SimGpu>]) -> (Scenario, Broken) {
    let (mut best, mut how, mut tries) = (scenario.clone(), broken.clone(), 0);
    let mut still_fails = |candidate: &Scenario| {
        tries += 1;
        if tries > TRIES_MAX {
            return None;
        }
        attempt(candidate, gpus, false).1.err().filter(|found| found.invariant == broken.invariant)
    };
    // Sequences of steps are removed, ever shorter ones.
    let mut size = best.steps.len() / 2;
    while size > 0 {
        let mut at = 0;
        while at < best.steps.len() {
            let mut candidate = best.clone();
            candidate.steps.drain(at..(at + size).min(best.steps.len()));
            match still_fails(&candidate) {
                Some(found) => (best, how) = (candidate, found),
                None => at += size,
            }
        }
        size /= 2;
    }
    for index in 0..best.steps.len() {
        for simpler in simpler(&best, index) {
            if let Some(found) = still_fails(&simpler) {
                (best, how) = (simpler, found);
            }
        }
    }
    for plain in plainer(&best) {
        if let Some(found) = still_fails(&plain) {
            (best, how) = (plain, found);
        }
    }
    (best, how)
}

/// Scenarios in which one step is simpler, each in another way.
fn simpler(scenario: &Scenario, index: usize) -> Vec<Scenario> {
    let changed = |change: &dyn Fn(&mut Scenario)| {
        let mut candidate = scenario.clone();
        change(&mut candidate);
        candidate
    };
    let mut all = vec![changed(&|each| each.steps[index].pause_us = 0)];
    if matches!(scenario.steps[index].action, Action::Post(_)) {
        let post = |change: &dyn Fn(&mut crate::scenario::Post)| {
            changed(&|each| {
                if let Action::Post(post) = &mut each.steps[index].action {
                    change(post);
                }
            })
        };
        all.push(post(&|post| (post.blocks, post.regions) = (1, 1)));
        all.push(post(&|post| post.bytes /= 8));
        all.push(post(&|post| post.stream_us = None));
        all.push(post(&|post| (post.source_on_gpu, post.target_on_gpu) = (false, false)));
    }
    all
}

/// Scenarios with simpler hosts.
fn plainer(scenario: &Scenario) -> Vec<Scenario> {
    let mut calm = scenario.clone();
    calm.benign = false;
    let mut fast = scenario.clone();
    fast.ends.iter_mut().flat_map(|end| &mut end.nics).for_each(|nic| *nic = (None, 0));
    let mut plain = scenario.clone();
    plain.protection = Protection::Off;
    vec![calm, fast, plain]
}
