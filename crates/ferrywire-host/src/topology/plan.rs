//! Which GPU uses which NICs and which cores: a pure function of a topology and options.
//!
//! A GPU gets the NICs behind its own PCIe bridge, else those below its PCIe root, else those of its NUMA node, which
//! is said aloud, else, if that is allowed, those of other nodes. A map overrides all of it.
//!
//! NICs that are down or have no address are not used, nor interfaces of software where there are devices. Where some
//! NICs share a PCIe root with a GPU, one that shares it with none is there for control: it carries data only where
//! nothing else on a GPU's node does.
//! Invariant: the plan is the same in whatever order NICs and GPUs are listed.
//! Read next: `pool.rs`, which chooses; `mesh.rs`, for what two plans make of a pair of hosts.

use super::pool::{Choice, Pool};
use super::{Cpus, Gpu, Locality, Map, Topology, assign};
use ferrywire::Builder;

/// What a plan is to respect.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanOptions {
    /// NICs by GPU; goes before everything else.
    pub map: Map,
    /// The only NICs to be used; empty: whichever fit.
    pub nics: Vec<String>,
    /// Whether a GPU may use NICs of another NUMA node.
    pub allow_cross_numa: bool,
}

/// Which GPU uses what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// By GPU, in the order of their numbers.
    pub gpus: Vec<GpuPlan>,
    /// NICs for host memory: all that can be used.
    pub host_nics: Vec<String>,
    /// NICs that no GPU uses.
    pub unused: Vec<Unused>,
    /// What is slower than it might be, and why.
    pub notes: Vec<String>,
}

/// What one GPU uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuPlan {
    /// Its number.
    pub gpu: u32,
    /// Its NICs.
    pub nics: Vec<String>,
    /// How near they are, the farthest of them.
    pub locality: Locality,
    /// Why these.
    pub why: String,
    /// CPUs for the threads that serve it, no other GPU's where there are enough.
    pub cpus: Cpus,
    /// All other NICs that can be used, nearest first.
    pub others: Vec<String>,
}

impl GpuPlan {
    /// Gives an endpoint of the GPU its NICs and cores, and its name.
    pub fn configure(&self, builder: Builder) -> Builder {
        let cores = self.cpus.iter().map(|cpu| cpu as usize);
        builder.nics(self.nics.iter().cloned()).cpu_affinity(cores).label(format!("GPU {}", self.gpu))
    }
}

/// A NIC that no GPU uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unused {
    /// Its name.
    pub nic: String,
    /// Why not.
    pub why: String,
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The map names a GPU that is not there.
    #[error("--gpu-nics {gpu}=...: there is no GPU {gpu}; there {}", are(present, "GPU", "GPUs"))]
    UnknownGpu {
        /// The GPU.
        gpu: u32,
        /// Those that are there.
        present: Vec<u32>,
    },
    /// A NIC is asked for that is not there.
    #[error("{asked}: there is no NIC {nic}; there are {}", list(present))]
    UnknownNic {
        /// The wish.
        asked: String,
        /// The NIC.
        nic: String,
        /// Those that are there.
        present: Vec<String>,
    },
    /// A NIC is asked for that cannot be used.
    #[error("{asked}: {nic} {why}; NICs that can be used: {}", list(usable))]
    Unusable {
        /// The wish.
        asked: String,
        /// The NIC.
        nic: String,
        /// Why not: "is down".
        why: String,
        /// Those that can.
        usable: Vec<String>,
    },
    /// No NIC can be used at all.
    #[error(
        "no NIC can be used for {}: {why}; bring one up and give it an address, or name others with --gpu-nics",
        gpus_shown(gpus)
    )]
    NoNic {
        /// The GPUs.
        gpus: Vec<u32>,
        /// What there is, and why it cannot be used.
        why: String,
    },
    /// GPUs have NICs on other NUMA nodes only.
    #[error(
        "{} (NUMA node {node}): no NIC on the same PCIe root or NUMA node can be used, only {} of other nodes; \
         --allow-cross-numa uses them, which is slower, or name NICs with --gpu-nics",
        gpus_shown(gpus),
        list(nics)
    )]
    AcrossNodes {
        /// The GPUs.
        gpus: Vec<u32>,
        /// Their node.
        node: u32,
        /// NICs elsewhere.
        nics: Vec<String>,
    },
    /// Between two hosts no NIC of one reaches one that the other's GPU uses.
    #[error(
        "GPU {source_gpu} cannot reach GPU {target_gpu} of the other host: none of {} reaches any of {}; check subnets \
         and routes, or give both the same rail with --gpu-nics",
        list(source_nics),
        list(target_nics)
    )]
    NoRoute {
        /// The source's GPU.
        source_gpu: u32,
        /// All NICs that can be used there.
        source_nics: Vec<String>,
        /// The target's GPU.
        target_gpu: u32,
        /// Its NICs.
        target_nics: Vec<String>,
    },
}

impl PlanError {
    /// Whether a wish is at fault, rather than this host.
    pub fn is_usage(&self) -> bool {
        matches!(self, PlanError::UnknownGpu { .. } | PlanError::UnknownNic { .. })
    }
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

fn are(gpus: &[u32], one: &str, several: &str) -> String {
    match gpus {
        [] => "is none".to_owned(),
        [only] => format!("is {one} {only}"),
        _ => format!("are {several} {}", gpus.iter().copied().collect::<Cpus>()),
    }
}

/// GPUs as people write them: `GPU 2`, `GPUs 2-3`.
pub(super) fn gpus_shown(gpus: &[u32]) -> String {
    let plural = if gpus.len() == 1 { "" } else { "s" };
    format!("GPU{plural} {}", gpus.iter().copied().collect::<Cpus>())
}

impl Plan {
    /// The plan of a host.
    pub fn of(topology: &Topology, options: &PlanOptions) -> Result<Plan, PlanError> {
        let pool = Pool::of(topology, options)?;
        let mut gpus: Vec<&Gpu> = topology.gpus.iter().collect();
        gpus.sort_by_key(|gpu| gpu.index);
        pool.check_map(&gpus)?;
        let choices: Vec<Choice<'_>> = gpus.iter().map(|gpu| pool.choice(gpu)).collect();
        pool.refuse_none(&choices)?;
        if !options.allow_cross_numa {
            pool.refuse_far(&choices)?;
        }
        let (cpus, mut notes) = assign::cpus(topology, &gpus);
        let planned = choices.iter().zip(cpus).map(|(choice, cpus)| GpuPlan {
            gpu: choice.gpu.index,
            nics: choice.names(),
            locality: choice.locality(),
            why: choice.why(),
            cpus,
            others: pool.others(choice),
        });
        let planned: Vec<GpuPlan> = planned.collect();
        notes.splice(0..0, pool.notes(&choices));
        let unused = pool.unused(&planned);
        Ok(Plan { gpus: planned, host_nics: pool.names(), unused, notes })
    }

    /// The NIC of each of `per_gpu` channels, by GPU in the plan's order: all NICs of a GPU evenly, or by speed where
    /// every one tells its own, as the engine deals them. Where there are not as many channels on each, which of equals
    /// has one more also depends on the port.
    pub fn channels(&self, topology: &Topology, per_gpu: usize) -> Vec<Vec<String>> {
        assign::channels(topology, &self.gpus, per_gpu)
    }

    /// What is planned for a GPU.
    pub fn gpu(&self, gpu: u32) -> Option<&GpuPlan> {
        self.gpus.iter().find(|planned| planned.gpu == gpu)
    }
}
