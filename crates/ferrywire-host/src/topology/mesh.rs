//! Which NICs join a pair of GPUs of two hosts: a pure function of two plans and of what reaches what.
//!
//! Where each NIC reaches only the NICs of its own rail, GPUs of different rails cannot meet on their own NICs: the
//! source uses its NIC on the target's rail, and says so.
//! Read next: `plan.rs`.

use super::Topology;
use super::plan::{GpuPlan, Plan, PlanError};

/// How one GPU's bytes get to one GPU of another host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The source's GPU.
    pub source_gpu: u32,
    /// The target's GPU.
    pub target_gpu: u32,
    /// NICs, the source's and the target's.
    pub links: Vec<(String, String)>,
    /// Why these, where they are not the source's own.
    pub note: Option<String>,
}

/// Routes from every GPU of one host to every GPU of another. `reaches` tells whether a NIC of the source reaches one
/// of the target.
///
/// # Errors
/// [`PlanError::NoRoute`] for the first pair that no NIC joins.
pub fn routes(
    source: &Plan,
    target: &Plan,
    reaches: impl Fn(&str, &str) -> bool,
) -> Result<Vec<Route>, PlanError> {
    let mut routes = Vec::with_capacity(source.gpus.len() * target.gpus.len());
    for from in &source.gpus {
        for to in &target.gpus {
            routes.push(route(from, to, &reaches)?);
        }
    }
    Ok(routes)
}

/// What reaches what where each NIC reaches its own subnets only.
pub fn by_subnet(source: &Topology, target: &Topology) -> impl Fn(&str, &str) -> bool {
    move |from, to| {
        let joined = source.nic(from).zip(target.nic(to));
        joined.is_some_and(|(from, to)| to.addresses.iter().any(|address| from.reaches(address.ip)))
    }
}

fn route(from: &GpuPlan, to: &GpuPlan, reaches: &impl Fn(&str, &str) -> bool) -> Result<Route, PlanError> {
    let route = |links, note| Route { source_gpu: from.gpu, target_gpu: to.gpu, links, note };
    let own = links(&from.nics, &to.nics, reaches);
    if !own.is_empty() {
        return Ok(route(own, None));
    }
    // Nearest first, and no more of them than the target has.
    let reaching = from.others.iter().filter(|nic| to.nics.iter().any(|there| reaches(nic, there)));
    let reaching: Vec<String> = reaching.take(to.nics.len()).cloned().collect();
    let detour = links(&reaching, &to.nics, reaches);
    if detour.is_empty() {
        let source_nics = from.nics.iter().chain(&from.others).cloned().collect();
        let (source_gpu, target_gpu, target_nics) = (from.gpu, to.gpu, to.nics.clone());
        return Err(PlanError::NoRoute { source_gpu, source_nics, target_gpu, target_nics });
    }
    let note = format!(
        "GPU {} to GPU {}: {} does not reach {} there; the source uses {}, on the target's rail",
        from.gpu,
        to.gpu,
        from.nics.join(", "),
        to.nics.join(", "),
        reaching.join(", ")
    );
    Ok(route(detour, Some(note)))
}

/// Each NIC of the longer list with one of the shorter that it is joined with: the one that has fewest links, among
/// those the one of the same name.
fn links(from: &[String], to: &[String], reaches: &impl Fn(&str, &str) -> bool) -> Vec<(String, String)> {
    let turned = from.len() < to.len();
    let (many, few) = if turned { (to, from) } else { (from, to) };
    let joined =
        |one: &String, other: &String| if turned { reaches(other, one) } else { reaches(one, other) };
    let mut taken = vec![0usize; few.len()];
    let mut links = Vec::new();
    for one in many {
        let free = (0..few.len()).filter(|at| joined(one, &few[*at]));
        let Some(at) = free.min_by_key(|at| (taken[*at], few[*at] != *one)) else { continue };
        taken[at] += 1;
        let (one, other) = (one.clone(), few[at].clone());
        links.push(if turned { (other, one) } else { (one, other) });
    }
    links
}
