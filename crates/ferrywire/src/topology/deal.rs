//! Cores and channels, dealt out to GPUs.
//!
//! Invariant: processes that each see some of a host's GPUs deal out the same cores, since the GPUs that are hidden
//! from a process take part.
//! Read next: `plan.rs`, whose parts these are.

use std::collections::BTreeMap;

use super::plan::{GpuPlan, gpus_shown};
use super::{Cpus, Gpu, PciAddress, Topology};

/// CPUs for each GPU: whole cores of its NUMA node, no two GPUs the same as long as there are enough. And what went
/// against that.
pub(super) fn cpus(topology: &Topology, gpus: &[&Gpu]) -> (Vec<Cpus>, Vec<String>) {
    let mut notes = Vec::new();
    let mut dealt = Vec::new();
    for gpu in gpus {
        let cores = cores_of(topology, node_of(topology, gpu));
        if cores.is_empty() && !topology.cores.is_empty() {
            let node = gpu.node.unwrap_or(0);
            let gpu = gpus_shown(&[gpu.index]);
            notes
                .push(format!("{gpu}: this process may use no CPU of its NUMA node {node}; others are used"));
        }
        let cores = if cores.is_empty() { topology.cores.iter().collect() } else { cores };
        let (place, of) = place_among(topology, gpu);
        dealt.push(slice(&cores, place, of).iter().flat_map(|core| core.iter()).collect());
    }
    (dealt, notes)
}

/// A GPU's node, or the only one.
fn node_of(topology: &Topology, gpu: &Gpu) -> Option<u32> {
    gpu.node.or(topology.only_node())
}

fn cores_of(topology: &Topology, node: Option<u32>) -> Vec<&Cpus> {
    let of_node = node.and_then(|node| topology.nodes.iter().find(|of| of.number == node));
    let near = |core: &&Cpus| of_node.is_none_or(|node| core.meets(&node.cpus));
    topology.cores.iter().filter(near).collect()
}

/// Which one of how many GPUs of its node it is.
fn place_among(topology: &Topology, gpu: &Gpu) -> (usize, usize) {
    let key =
        |gpu: &Gpu| -> (Option<PciAddress>, u32) { (gpu.pci.as_ref().map(|pci| pci.address), gpu.index) };
    let all = topology.gpus.iter().chain(&topology.hidden_gpus);
    let mut there: Vec<_> =
        all.filter(|other| node_of(topology, other) == node_of(topology, gpu)).map(key).collect();
    there.sort_unstable();
    (there.iter().position(|other| *other == key(gpu)).unwrap_or(0), there.len().max(1))
}

/// One part of as many; all, where there is less than one each.
fn slice<T>(all: &[T], place: usize, of: usize) -> &[T] {
    match all.len() < of {
        true => all,
        false => &all[place * all.len() / of..(place + 1) * all.len() / of],
    }
}

/// The NIC of each channel of each GPU.
pub(super) fn channels(topology: &Topology, gpus: &[GpuPlan], per_gpu: usize) -> Vec<Vec<String>> {
    let mut of_host = BTreeMap::<&str, u64>::new();
    gpus.iter().map(|gpu| spread(topology, gpu, per_gpu, &mut of_host)).collect()
}

fn spread<'a>(
    topology: &Topology,
    gpu: &'a GpuPlan,
    channels: usize,
    of_host: &mut BTreeMap<&'a str, u64>,
) -> Vec<String> {
    let speeds: Option<Vec<u64>> =
        gpu.nics.iter().map(|name| Some(u64::from(topology.nic(name)?.speed_mbps?))).collect();
    let speeds = speeds.unwrap_or_else(|| vec![1; gpu.nics.len()]);
    let mut own = vec![0u64; gpu.nics.len()];
    let mut names = Vec::new();
    for _ in 0..channels {
        // A NIC that has none yet goes first: a slow one only takes less, it is not left out.
        let load = |at: usize| (own[at] > 0, (own[at] + 1) * scale(&speeds, at));
        let others = |at: usize| of_host.get(gpu.nics[at].as_str()).copied().unwrap_or(0);
        let Some(at) = (0..own.len()).min_by_key(|at| (load(*at), others(*at))) else { break };
        own[at] += 1;
        names.push(gpu.nics[at].clone());
    }
    for (name, count) in gpu.nics.iter().zip(own) {
        *of_host.entry(name).or_default() += count;
    }
    names
}

/// What one channel weighs on a NIC beside the fastest: 1000 on that.
fn scale(speeds: &[u64], at: usize) -> u64 {
    let fastest = speeds.iter().copied().max().unwrap_or(1);
    fastest * 1000 / speeds[at].max(1)
}
