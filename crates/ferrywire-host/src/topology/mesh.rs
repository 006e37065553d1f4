//! The NICs that join a pair of GPUs of two hosts: a pure function of two plans and of which NIC reaches which.
//!
//! If each NIC reaches only the NICs of its own rail, GPUs of different rails cannot meet on their own NICs. The source
//! then uses its NIC on the target's rail, and the route has a note.
//! Read next: `plan.rs`.

use super::Topology;
use super::plan::{GpuPlan, Plan, PlanError};

/// The links from a GPU of one host to a GPU of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Index of the source's GPU on its host.
    pub source_gpu: u32,
    /// Index of the target's GPU on its host.
    pub target_gpu: u32,
    /// Names of the NICs of each link: the source's and the target's.
    pub links: Vec<(String, String)>,
    /// Why the source does not use its own NICs; `None` if it does.
    pub note: Option<String>,
}

/// Makes the routes from every GPU of one host to every GPU of another. `reaches(source_nic, target_nic)` returns
/// whether the first NIC reaches the second.
///
/// # Errors
/// [`PlanError::NoRoute`] for the first pair of GPUs without a link.
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

/// A `reaches` function for hosts whose NICs reach their own subnets only.
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
    // The nearest NICs first, at most as many as the target has.
    let reaching = from.others.iter().filter(|nic| to.nics.iter().any(|there| reaches(nic, there)));
    let reaching: Vec<String> = reaching.take(to.nics.len()).cloned().collect();
    let detour = links(&reaching, &to.nics, reaches);
    if detour.is_empty() {
        let source_nics = from.nics.iter().chain(&from.others).cloned().collect();
        let (source_gpu, target_gpu, target_nics) = (from.gpu, to.gpu, to.nics.clone());
        return Err(PlanError::NoRoute { source_gpu, source_nics, target_gpu, target_nics });
    }
    let note = format!(
        "GPU {} to GPU {}: {} of the source does not reach {} of the target; the source uses {}, on the target's rail",
        from.gpu,
        to.gpu,
        from.nics.join(", "),
        to.nics.join(", "),
        reaching.join(", ")
    );
    Ok(route(detour, Some(note)))
}

/// Pairs each NIC of the longer list with a reachable NIC of the shorter one: the one with fewest links, preferably of
/// the same name.
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
