//! Assigns cores and channels to GPUs.
//!
//! Invariant: processes that each see some of a host's GPUs assign the same cores, because GPUs that are hidden from a
//! process take part. GPUs of other containers do not, if this container has cores of its own.
//! Read next: `plan.rs`.

use super::plan::{GpuPlan, gpus_shown};
use super::{Cpus, Gpu, PciAddress, Topology};
use ferrywire_proto::channel_assignment::spread;

/// The CPUs for each GPU, and notes about compromises. Each GPU gets whole cores of its NUMA node; two GPUs share cores
/// only if there are too few.
pub(super) fn cpus(topology: &Topology, gpus: &[&Gpu]) -> (Vec<Cpus>, Vec<String>) {
    let mut notes = Vec::new();
    let mut dealt = Vec::new();
    for gpu in gpus {
        let cores = cores_of(topology, node_of(topology, gpu));
        if cores.is_empty() && !topology.cores.is_empty() {
            let node = gpu.node.unwrap_or(0);
            let gpu = gpus_shown(&[gpu.index]);
            notes
                .push(format!("{gpu}: the CPU affinity of this process has no CPU of NUMA node {node}; uses CPUs of other nodes"));
        }
        let cores = if cores.is_empty() { topology.cores.iter().collect() } else { cores };
        let (place, of) = place_among(topology, gpu);
        dealt.push(slice(&cores, place, of).iter().flat_map(|core| core.iter()).collect());
    }
    (dealt, notes)
}

/// The NUMA node of a GPU; on a host with one node, that node.
fn node_of(topology: &Topology, gpu: &Gpu) -> Option<u32> {
    gpu.node.or(topology.only_node())
}

fn cores_of(topology: &Topology, node: Option<u32>) -> Vec<&Cpus> {
    let of_node = node.and_then(|node| topology.nodes.iter().find(|of| of.number == node));
    let near = |core: &&Cpus| of_node.is_none_or(|node| core.meets(&node.cpus));
    topology.cores.iter().filter(near).collect()
}

/// The GPU's index among the GPUs of its NUMA node, and the number of these GPUs.
fn place_among(topology: &Topology, gpu: &Gpu) -> (usize, usize) {
    let key =
        |gpu: &Gpu| -> (Option<PciAddress>, u32) { (gpu.pci.as_ref().map(|pci| pci.address), gpu.index) };
    let own_cores = has_own_cores(topology);
    let hidden = topology.hidden_gpus.iter().filter(|gpu| !(own_cores && gpu.out_of_reach));
    let all = topology.gpus.iter().chain(hidden);
    let mut there: Vec<_> =
        all.filter(|other| node_of(topology, other) == node_of(topology, gpu)).map(key).collect();
    there.sort_unstable();
    (there.iter().position(|other| *other == key(gpu)).unwrap_or(0), there.len().max(1))
}

/// Whether this process may use some of the host's CPUs only. Containers that may use all CPUs share them.
fn has_own_cores(topology: &Topology) -> bool {
    let allowed: Cpus = topology.cores.iter().flat_map(|core| core.iter()).collect();
    topology.nodes.iter().flat_map(|node| node.cpus.iter()).any(|cpu| !allowed.contains(cpu))
}

/// Part `place` of `of` equal parts; the whole list if it has fewer than `of` entries.
fn slice<T>(all: &[T], place: usize, of: usize) -> &[T] {
    if all.len() < of { all } else { &all[place * all.len() / of..(place + 1) * all.len() / of] }
}

/// The NIC of each channel of each GPU, as the engine assigns them. GPUs that share NICs begin with different NICs, as
/// endpoints of one process do that listen on consecutive ports.
pub(super) fn channels(topology: &Topology, gpus: &[GpuPlan], per_gpu: usize) -> Vec<Vec<String>> {
    let of_gpu = |(place, gpu): (usize, &GpuPlan)| -> Vec<String> {
        let speeds: Vec<Option<u32>> =
            gpu.nics.iter().map(|name| topology.nic(name).and_then(|nic| nic.speed_mbps)).collect();
        spread(&speeds, place, per_gpu).into_iter().map(|at| gpu.nics[at].clone()).collect()
    };
    gpus.iter().enumerate().map(of_gpu).collect()
}
