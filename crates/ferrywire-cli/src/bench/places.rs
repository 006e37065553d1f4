//! NICs and cores of the endpoints of this process: those that the user named, or those of this host's plan.
//!
//! Read next: [`super::multi_gpu`], which builds the endpoints; `ferrywire_host::topology`, which plans.

use ferrywire_host::topology::{Locality, Plan, PlanOptions, Source, Topology};

use super::multi_gpu::Setting;
use crate::exit::{self, Failure, Outcome};
use crate::memory::Memory;
use crate::plan::EnginePlan;

/// NICs and cores of one GPU's endpoint; empty for any.
#[derive(Clone, Debug, Default)]
pub struct Place {
    /// Names of the NICs that the endpoint uses.
    pub nics: Vec<String>,
    /// Numbers of the cores that the endpoint's threads use.
    pub cores: Vec<usize>,
}

/// The choice of NICs and cores for the endpoints of a process.
pub struct Places {
    /// NICs and cores by GPU.
    pub places: Vec<Place>,
    /// Every NIC that a GPU of this host uses, if it is known.
    pub nics: Vec<String>,
    /// Messages about choices that may be slower.
    pub notes: Vec<String>,
}

/// NICs and cores of each GPU, and all NICs of the host's GPUs. NICs are those that the user named, or for CUDA GPUs
/// those of this host's plan; empty for any that lead to the peer. Cores are chosen in the same way.
pub fn of_gpus(plan: &EnginePlan, memory: Memory, gpus: &[u32], setting: Setting) -> Outcome<Places> {
    let planned = match memory {
        Memory::Cuda(_) => planned(plan, gpus, setting)?,
        _ => None,
    };
    let own = planned.as_ref().map(|planned| &planned.own);
    let places = gpus.iter().map(|gpu| place(plan, own, *gpu, setting)).collect();
    let of_plan = planned.iter().flat_map(|planned| &planned.of_host.gpus).flat_map(|of_gpu| &of_gpu.nics);
    let mut nics: Vec<String> = if plan.map.nics.is_empty() {
        of_plan.cloned().collect()
    } else {
        plan.map.nics.values().flatten().cloned().collect()
    };
    nics.sort_unstable();
    nics.dedup();
    let notes = planned.map_or_else(Vec::new, |planned| planned.notes);
    Ok(Places { places, nics, notes })
}

/// The engine options with the NICs that share a PCIe root with the GPU, if the user named none and there are such
/// NICs: a single endpoint would otherwise use any that lead to the peer.
pub fn of_one(
    plan: &EnginePlan,
    memory: Option<Memory>,
    on_loopback: bool,
    tells: bool,
) -> Outcome<EnginePlan> {
    let Some(Memory::Cuda(gpu)) = memory else { return Ok(plan.clone()) };
    if on_loopback || plan.gpus.is_some() || !plan.nics.is_empty() {
        return Ok(plan.clone());
    }
    let options = PlanOptions { allow_cross_numa: true, ..PlanOptions::default() };
    let planned = Plan::of(&topology(plan)?, &options).ok();
    let near = planned.as_ref().and_then(|planned| planned.gpu(gpu));
    let Some(near) = near.filter(|near| near.locality <= Locality::Root) else { return Ok(plan.clone()) };
    if tells {
        let (nics, why) = (near.nics.join(", "), &near.why);
        exit::note(&format!("note: GPU {gpu} uses {nics}, {why}; --nics names others"));
    }
    Ok(EnginePlan { nics: near.nics.clone(), ..plan.clone() })
}

/// NICs and cores of one GPU.
fn place(plan: &EnginePlan, planned: Option<&Plan>, gpu: u32, setting: Setting) -> Place {
    let planned = planned.and_then(|planned| planned.gpu(gpu));
    let nics = match (plan.map.nics.get(&gpu), planned) {
        (Some(named), _) => named,
        // Over loopback the NIC near a GPU is not used.
        (None, Some(planned)) if !setting.on_loopback => &planned.nics,
        _ => &plan.nics,
    };
    let cores =
        planned.map_or_else(Vec::new, |planned| planned.cpus.iter().map(|cpu| cpu as usize).collect());
    Place { nics: nics.clone(), cores }
}

/// The plans of this host.
struct Planned {
    /// The plan for the GPUs of this process.
    own: Plan,
    /// The plan for all GPUs of the host.
    of_host: Plan,
    /// Messages about used NICs that may be slower.
    notes: Vec<String>,
}

/// The plan of this host, if it has NICs to plan with. If the user named NICs for each GPU, or none are needed, only
/// cores are planned, and there may be no plan. GPUs of other processes cause no error.
fn planned(plan: &EnginePlan, gpus: &[u32], setting: Setting) -> Outcome<Option<Planned>> {
    let all = topology(plan)?;
    let beyond_loopback = all.nics.iter().any(|nic| nic.up && !nic.loopback && !nic.addresses.is_empty());
    if !beyond_loopback {
        return Ok(None);
    }
    let for_cores = setting.on_loopback || !plan.map.nics.is_empty();
    let mut own = all.clone();
    let (used, others) = own.gpus.into_iter().partition(|gpu| gpus.contains(&gpu.index));
    own.gpus = used;
    own.hidden_gpus.extend(others);
    let wish = |allow_cross_numa| PlanOptions {
        allow_cross_numa,
        nics: plan.nics.clone(),
        ..PlanOptions::default()
    };
    let plans = Plan::of(&own, &wish(for_cores || plan.allow_cross_numa))
        .and_then(|own| Ok((own, Plan::of(&all, &wish(true))?)));
    match plans {
        Ok((own, of_host)) => {
            let notes = if for_cores { Vec::new() } else { own.notes.clone() };
            Ok(Some(Planned { own, of_host, notes }))
        }
        Err(_) if for_cores => Ok(None),
        Err(error) => Err(Failure::Usage(error.to_string())),
    }
}

/// The topology for the plan: this host's, or a recorded one.
fn topology(plan: &EnginePlan) -> Outcome<Topology> {
    match &plan.root {
        Some(root) => Ok(Topology::read(&Source::recorded(root)?)),
        None => Ok(Topology::detect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrywire_host::topology::GpuPlan;

    #[test]
    fn a_gpu_has_the_nics_named_for_it_else_those_planned_and_always_its_cores() {
        let of_gpu = |gpu: u32, nic: &str| GpuPlan {
            gpu,
            nics: vec![nic.to_owned()],
            locality: Locality::Root,
            why: String::new(),
            cpus: [2 * gpu, 2 * gpu + 1].into_iter().collect(),
            others: Vec::new(),
        };
        let gpus = vec![of_gpu(0, "eth1"), of_gpu(1, "eth2")];
        let planned = Plan { gpus, host_nics: Vec::new(), unused: Vec::new(), notes: Vec::new() };
        let beyond = Setting { on_host: 2, on_loopback: false };
        let plan = EnginePlan { map: "0=eth7".parse().expect("a map"), ..EnginePlan::default() };
        let found = |plan, gpu, setting| {
            let place = place(plan, Some(&planned), gpu, setting);
            (place.nics.join(","), place.cores)
        };
        assert_eq!(found(&plan, 0, beyond), ("eth7".to_owned(), vec![0, 1]));
        let plan = EnginePlan { nics: vec!["lo".to_owned()], ..EnginePlan::default() };
        assert_eq!(found(&plan, 1, beyond), ("eth2".to_owned(), vec![2, 3]));
        assert_eq!(found(&plan, 1, Setting { on_loopback: true, ..beyond }), ("lo".to_owned(), vec![2, 3]));
        assert_eq!(found(&plan, 5, beyond), ("lo".to_owned(), Vec::new()));
    }
}
