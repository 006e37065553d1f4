//! The plan: which GPU uses which NICs and cores. A pure function of a topology and options.
//!
//! A GPU gets the NICs behind its own PCIe bridge, else those below its PCIe root, else those of its NUMA node (with a
//! note), else, if that is allowed, those of other nodes. A map overrides all of this.
//!
//! NICs that are down or have no address are not used; nor are software interfaces if there are devices. If some NICs
//! share a PCIe root with a GPU, a NIC that shares a root with no GPU is a control NIC: it carries data only if no
//! other NIC on a GPU's node does.
//! Invariant: the plan does not depend on the order in which NICs and GPUs are listed.
//! Read next: `pool.rs`, which chooses; `mesh.rs`, which makes routes from two plans.

use super::pool::{Choice, Pool};
use super::{Cpus, Gpu, Locality, Map, Topology, assign};
use ferrywire::Builder;

/// The user's restrictions on a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanOptions {
    /// The user's assignment of NICs to GPUs; overrides all other rules.
    pub map: Map,
    /// The only NICs to use; empty for all that fit.
    pub nics: Vec<String>,
    /// Whether a GPU may use NICs of another NUMA node.
    pub allow_cross_numa: bool,
}

/// The NICs and cores of each GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The plan of each GPU, in the order of the GPUs' indices.
    pub gpus: Vec<GpuPlan>,
    /// NICs for host memory: all usable NICs.
    pub host_nics: Vec<String>,
    /// NICs that no GPU uses, each with the reason.
    pub unused: Vec<Unused>,
    /// Messages about choices that may be slower, with the reason.
    pub notes: Vec<String>,
}

/// The NICs and cores of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuPlan {
    /// Index of the GPU in the topology.
    pub gpu: u32,
    /// Names of the GPU's NICs.
    pub nics: Vec<String>,
    /// The locality of the GPU's farthest NIC.
    pub locality: Locality,
    /// Why the GPU's NICs were chosen.
    pub why: String,
    /// CPUs for the threads of the GPU's endpoint; shared with other GPUs only if there are too few.
    pub cpus: Cpus,
    /// All other usable NICs, the nearest to the GPU first.
    pub others: Vec<String>,
}

impl GpuPlan {
    /// Sets NICs, cores and label of an endpoint's builder.
    pub fn configure(&self, builder: Builder) -> Builder {
        let cores = self.cpus.iter().map(|cpu| cpu as usize);
        builder.nics(self.nics.iter().cloned()).cpu_affinity(cores).label(format!("GPU {}", self.gpu))
    }
}

/// A NIC that no GPU uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unused {
    /// Name of the NIC.
    pub nic: String,
    /// Why the NIC is not used.
    pub why: String,
}

/// Why a plan could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The map names a GPU that does not exist.
    #[error("--gpu-nics {gpu}=...: no such GPU; there {}", are(present, "GPU", "GPUs"))]
    UnknownGpu {
        /// The index of the missing GPU in the map.
        gpu: u32,
        /// The indices of the GPUs that exist.
        present: Vec<u32>,
    },
    /// An option names a NIC that does not exist.
    #[error("{asked}: there is no NIC {nic}; there are {}", list(present))]
    UnknownNic {
        /// The option that names the NIC.
        asked: String,
        /// The name of the missing NIC.
        nic: String,
        /// The names of the NICs that exist.
        present: Vec<String>,
    },
    /// An option names a NIC that cannot be used.
    #[error("{asked}: {nic} {why}; NICs that can be used: {}", list(usable))]
    Unusable {
        /// The option that names the NIC.
        asked: String,
        /// The name of the unusable NIC.
        nic: String,
        /// Why the NIC cannot be used, such as "is down".
        why: String,
        /// The NICs that can be used.
        usable: Vec<String>,
    },
    /// No NIC can be used at all.
    #[error(
        "no NIC can be used for {}: {why}; bring one up and give it an address, or name others with --gpu-nics",
        gpus_shown(gpus)
    )]
    NoNic {
        /// The GPUs without a NIC.
        gpus: Vec<u32>,
        /// The NICs that exist, and why they cannot be used.
        why: String,
    },
    /// The GPUs have NICs only on other NUMA nodes.
    #[error(
        "{} (NUMA node {node}): no NIC on the same PCIe root or NUMA node can be used, only {} of other nodes; \
         --allow-cross-numa uses them, which is slower, or name NICs with --gpu-nics",
        gpus_shown(gpus),
        list(nics)
    )]
    AcrossNodes {
        /// The indices of the GPUs that have no near NIC.
        gpus: Vec<u32>,
        /// The NUMA node of these GPUs.
        node: u32,
        /// The names of the usable NICs on other nodes.
        nics: Vec<String>,
    },
    /// No usable NIC of the source reaches a NIC that the target's GPU uses.
    #[error(
        "GPU {source_gpu} cannot reach GPU {target_gpu} of the other host: none of {} reaches any of {}; check subnets \
         and routes, or give both the same rail with --gpu-nics",
        list(source_nics),
        list(target_nics)
    )]
    NoRoute {
        /// Index of the source's GPU.
        source_gpu: u32,
        /// All usable NICs of the source.
        source_nics: Vec<String>,
        /// Index of the target's GPU.
        target_gpu: u32,
        /// The NICs of the target's GPU.
        target_nics: Vec<String>,
    },
}

impl PlanError {
    /// Whether the error is in an option, rather than in this host.
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

/// Formats GPU indices for messages: `GPU 2`, `GPUs 2-3`.
pub(super) fn gpus_shown(gpus: &[u32]) -> String {
    let plural = if gpus.len() == 1 { "" } else { "s" };
    format!("GPU{plural} {}", gpus.iter().copied().collect::<Cpus>())
}

impl Plan {
    /// Makes the plan of a host.
    ///
    /// # Errors
    /// An option that names a missing or unusable NIC or GPU, or a host on which GPUs have no NIC that may be used.
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

    /// The NIC of each of `per_gpu` channels, for each GPU in the plan's order, as the engine assigns them: evenly, or
    /// by speed if every NIC reports one. If the channels do not divide evenly, the NIC that gets one more also depends
    /// on the port.
    pub fn channels(&self, topology: &Topology, per_gpu: usize) -> Vec<Vec<String>> {
        assign::channels(topology, &self.gpus, per_gpu)
    }

    /// The plan of the GPU with this index; `None` if there is none.
    pub fn gpu(&self, gpu: u32) -> Option<&GpuPlan> {
        self.gpus.iter().find(|planned| planned.gpu == gpu)
    }
}
