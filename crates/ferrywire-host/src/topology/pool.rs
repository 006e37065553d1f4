//! The NICs that a plan may use, and each GPU's choice among them.
//!
//! Read next: `locality.rs`, for the order of the choice; `assign.rs`, for cores and channels.

use std::collections::BTreeSet;

use super::locality::{Locality, Near, paths_of};
use super::map::Map;
use super::nics::by_name;
use super::plan::{GpuPlan, PlanError, PlanOptions, Unused, gpus_shown};
use super::{Gpu, Nic, PciRoot, Topology};

/// NICs that can be used, and the reasons why others cannot.
pub(super) struct Pool<'a> {
    topology: &'a Topology,
    map: &'a Map,
    nics: Vec<Candidate<'a>>,
    unused: Vec<Unused>,
}

#[derive(Clone, Copy)]
struct Candidate<'a> {
    nic: &'a Nic,
    /// Whether this is a control NIC: it shares a PCIe root with no GPU, while other NICs do.
    control: bool,
}

/// The NICs that a GPU uses.
pub(super) struct Choice<'a> {
    pub gpu: &'a Gpu,
    nics: Vec<(Near, &'a Nic)>,
    mapped: bool,
}

impl<'a> Pool<'a> {
    pub fn of(topology: &'a Topology, options: &'a PlanOptions) -> Result<Pool<'a>, PlanError> {
        let mut all: Vec<&Nic> = topology.nics.iter().collect();
        all.sort_by(|one, other| by_name(&one.name, &other.name));
        let mut pool = Pool { topology, map: &options.map, nics: Vec::new(), unused: Vec::new() };
        let named = &options.nics;
        for nic in all {
            match unusable(topology, nic, named).or_else(|| not_named(named, nic)) {
                Some(why) => pool.unused.push(Unused { nic: nic.name.clone(), why }),
                None => pool.nics.push(Candidate { nic, control: false }),
            }
        }
        for name in named {
            pool.check(&format!("--nics {name}"), name)?;
        }
        if named.is_empty() {
            pool.drop_software();
            pool.mark_control();
        }
        Ok(pool)
    }

    /// Drops software interfaces if there are NICs with a device.
    fn drop_software(&mut self) {
        let placed = |nic: &Nic| nic.device || !paths_of(self.topology, nic).is_empty();
        if !self.nics.iter().any(|candidate| placed(candidate.nic)) {
            return;
        }
        let (kept, dropped): (Vec<Candidate<'_>>, Vec<Candidate<'_>>) =
            self.nics.iter().partition(|candidate| placed(candidate.nic));
        let why = "is a software interface without a device".to_owned();
        self.unused.extend(
            dropped.iter().map(|of: &Candidate<'_>| Unused { nic: of.nic.name.clone(), why: why.clone() }),
        );
        self.nics = kept;
    }

    fn mark_control(&mut self) {
        let gpus = self.topology.gpus.iter().chain(&self.topology.hidden_gpus);
        let roots: BTreeSet<PciRoot> = gpus.filter_map(|gpu| gpu.pci.as_ref()?.root).collect();
        let beside_gpus = |nic: &Nic| {
            paths_of(self.topology, nic)
                .iter()
                .any(|path| path.root.is_some_and(|root| roots.contains(&root)))
        };
        let beside: Vec<bool> = self.nics.iter().map(|candidate| beside_gpus(candidate.nic)).collect();
        let any = beside.contains(&true);
        for (candidate, beside) in self.nics.iter_mut().zip(beside) {
            candidate.control = any && !beside;
        }
    }

    /// Checks that the map names existing GPUs and usable NICs.
    pub fn check_map(&self, gpus: &[&Gpu]) -> Result<(), PlanError> {
        for (gpu, nics) in &self.map.nics {
            if !gpus.iter().any(|present| present.index == *gpu) {
                let present = gpus.iter().map(|gpu| gpu.index).collect();
                return Err(PlanError::UnknownGpu { gpu: *gpu, present });
            }
            for nic in nics {
                self.check(&Map::shown(*gpu, nic), nic)?;
            }
        }
        Ok(())
    }

    /// Checks a NIC that the user named. A NIC that is only left out by default may be named.
    fn check(&self, asked: &str, name: &str) -> Result<(), PlanError> {
        let (asked, nic) = (asked.to_owned(), name.to_owned());
        match self.topology.nic(name) {
            None => {
                let mut present: Vec<String> =
                    self.topology.nics.iter().map(|nic| nic.name.clone()).collect();
                present.sort_by(|one, other| by_name(one, other));
                Err(PlanError::UnknownNic { asked, nic, present })
            }
            Some(found) => match broken(found) {
                Some(why) => {
                    Err(PlanError::Unusable { asked, nic, why: why.to_owned(), usable: self.names() })
                }
                None => Ok(()),
            },
        }
    }

    /// The NICs of a GPU: those of the map, or the nearest.
    pub fn choice(&self, gpu: &'a Gpu) -> Choice<'a> {
        let near = |nic: &'a Nic| (Near::between(self.topology, gpu, nic), nic);
        if let Some(named) = self.map.nics.get(&gpu.index) {
            let nics = named.iter().filter_map(|name| self.topology.nic(name)).map(near).collect();
            return Choice { gpu, nics, mapped: true };
        }
        let rank = |candidate: &Candidate<'a>| (near(candidate.nic).0.rank(), candidate.control);
        let nearest = self.nics.iter().map(rank).min();
        let nics = self.nics.iter().filter(|candidate| Some(rank(candidate)) == nearest);
        Choice { gpu, nics: nics.map(|candidate| near(candidate.nic)).collect(), mapped: false }
    }

    /// Returns an error if a GPU has only far NICs that neither the map nor an option allows.
    pub fn refuse_far(&self, choices: &[Choice<'_>]) -> Result<(), PlanError> {
        let far = |choice: &&Choice<'_>| !choice.mapped && choice.locality() == Locality::Across;
        let Some(first) = choices.iter().find(far) else { return Ok(()) };
        let alike = choices.iter().filter(far).filter(|choice| choice.gpu.node == first.gpu.node);
        let gpus = alike.map(|choice| choice.gpu.index).collect();
        Err(PlanError::AcrossNodes { gpus, node: first.gpu.node.unwrap_or(0), nics: first.names() })
    }

    /// Returns an error if a GPU has no NIC at all.
    pub fn refuse_none(&self, choices: &[Choice<'_>]) -> Result<(), PlanError> {
        let without = choices.iter().filter(|choice| choice.nics.is_empty());
        let gpus: Vec<u32> = without.map(|choice| choice.gpu.index).collect();
        if gpus.is_empty() {
            return Ok(());
        }
        let reported = self.unused.iter().map(|unused| format!("{} {}", unused.nic, unused.why));
        let why = if self.unused.is_empty() {
            "this host has no NIC".to_owned()
        } else {
            reported.collect::<Vec<_>>().join(", ")
        };
        Err(PlanError::NoNic { gpus, why })
    }

    /// All usable NICs outside of a GPU's choice, the nearest first.
    pub fn others(&self, choice: &Choice<'_>) -> Vec<String> {
        let others =
            self.nics.iter().filter(|of| !choice.nics.iter().any(|(_, nic)| nic.name == of.nic.name));
        let mut others: Vec<&Candidate<'_>> = others.collect();
        others.sort_by_key(|of| (Near::between(self.topology, choice.gpu, of.nic).rank(), of.control));
        others.into_iter().map(|of| of.nic.name.clone()).collect()
    }

    /// Names of all usable NICs.
    pub fn names(&self) -> Vec<String> {
        self.nics.iter().map(|candidate| candidate.nic.name.clone()).collect()
    }

    /// NICs that no GPU uses, each with the reason.
    pub fn unused(&self, planned: &[GpuPlan]) -> Vec<Unused> {
        let is_used = |name: &str| planned.iter().any(|gpu| gpu.nics.iter().any(|nic| nic == name));
        let idle = self.nics.iter().filter(|_| !planned.is_empty()).map(|candidate| Unused {
            nic: candidate.nic.name.clone(),
            why: idle_because(candidate.control),
        });
        let mut unused: Vec<Unused> =
            self.unused.iter().cloned().chain(idle).filter(|unused| !is_used(&unused.nic)).collect();
        unused.sort_by(|one, other| by_name(&one.nic, &other.nic));
        unused
    }

    /// Notes about choices that may be slower: one line for all GPUs with the same note.
    pub fn notes(&self, choices: &[Choice<'_>]) -> Vec<String> {
        let mut notes: Vec<(String, Vec<u32>)> = Vec::new();
        for (note, gpu) in choices.iter().filter_map(|choice| Some((self.note(choice)?, choice.gpu.index))) {
            match notes.iter_mut().find(|(known, _)| *known == note) {
                Some((_, gpus)) => gpus.push(gpu),
                None => notes.push((note, vec![gpu])),
            }
        }
        notes.into_iter().map(|(note, gpus)| format!("{}: {note}", gpus_shown(&gpus))).collect()
    }

    fn note(&self, choice: &Choice<'_>) -> Option<String> {
        let nics = choice.names().join(", ");
        let far = |near: &Near| near.locality == Locality::Across;
        if choice.mapped {
            let far = choice.nics.iter().filter(|(near, _)| far(near)).map(|(_, nic)| nic.name.as_str());
            let far = far.collect::<Vec<_>>().join(", ");
            return (!far.is_empty()).then(|| format!("uses {far} of another NUMA node, which is slower"));
        }
        let root = choice.gpu.pci.as_ref().and_then(|pci| pci.root);
        let none = root.map_or_else(String::new, |root| format!("no NIC on PCIe root {root} can be used; "));
        let control = self.nics.iter().any(|of| of.control && choice.uses(of.nic));
        let control = if control { " (a control NIC, which shares its PCIe root with no GPU)" } else { "" };
        match choice.locality() {
            Locality::Switch | Locality::Root => None,
            Locality::Node if root.is_none() => None,
            Locality::Node => Some(format!("{none}uses {nics} of the same NUMA node{control}")),
            Locality::Unknown => {
                Some(format!("{none}the PCIe location of the GPU or of NICs is unknown; uses {nics}"))
            }
            Locality::Across => {
                Some(format!("{none}uses {nics} of another NUMA node{control}, which is slower"))
            }
        }
    }
}

fn idle_because(control: bool) -> String {
    if control {
        "is for control: it shares its PCIe root with no GPU, and other NICs do".to_owned()
    } else {
        "other NICs are nearer to each GPU".to_owned()
    }
}

/// Why a NIC cannot be used even if the user names it; `None` if it can.
fn broken(nic: &Nic) -> Option<&'static str> {
    match (nic.up, nic.addresses.is_empty()) {
        (false, _) => Some("is down"),
        (true, true) => Some("has no address"),
        (true, false) => None,
    }
}

/// Why a NIC is not used unless the user names it; `None` if it is.
fn unusable(topology: &Topology, nic: &Nic, named: &[String]) -> Option<String> {
    let upper = topology.nics.iter().find(|upper| upper.lower.contains(&nic.name) && broken(upper).is_none());
    match (broken(nic), upper) {
        _ if nic.loopback && !named.contains(&nic.name) => Some("is loopback".to_owned()),
        (Some("has no address"), Some(upper)) => Some(format!("is part of {}", upper.name)),
        (why, _) => why.map(str::to_owned),
    }
}

fn not_named(named: &[String], nic: &Nic) -> Option<String> {
    (!named.is_empty() && !named.contains(&nic.name)).then(|| "is not among --nics".to_owned())
}

impl Choice<'_> {
    pub fn names(&self) -> Vec<String> {
        self.nics.iter().map(|(_, nic)| nic.name.clone()).collect()
    }

    fn uses(&self, nic: &Nic) -> bool {
        self.nics.iter().any(|(_, used)| used.name == nic.name)
    }

    /// The locality of the farthest NIC of this choice.
    pub fn locality(&self) -> Locality {
        self.nics.iter().map(|(near, _)| near.locality).max().unwrap_or(Locality::Unknown)
    }

    pub fn why(&self) -> String {
        let bridge = self.nics.first().and_then(|(near, _)| near.bridge);
        let root = self.gpu.pci.as_ref().and_then(|pci| pci.root);
        match (self.mapped, self.locality()) {
            (true, _) => "named by --gpu-nics".to_owned(),
            (_, Locality::Switch) => {
                bridge.map_or_else(String::new, |bridge| format!("behind PCIe bridge {bridge}"))
            }
            (_, Locality::Root) => root.map_or_else(String::new, |root| format!("on PCIe root {root}")),
            (_, Locality::Node) => "on the same NUMA node".to_owned(),
            (_, Locality::Unknown) => "PCIe locations are unknown".to_owned(),
            (_, Locality::Across) => "on another NUMA node".to_owned(),
        }
    }
}
