//! Lists of CPUs as the kernel writes them, NUMA nodes, and cores.
//!
//! Read next: `assign.rs`, which assigns cores.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use super::Node;
use super::source::Source;
use ferrywire_proto::limits::CPUS_MAX;

/// A set of CPUs, parsed and printed as the kernel does: `0-51,104-155`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cpus(BTreeSet<u32>);

impl Cpus {
    /// The CPU numbers in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// The number of CPUs in the set.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the set has no CPU.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether `cpu` is in the set.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// Whether the two sets have a common CPU.
    pub fn meets(&self, other: &Cpus) -> bool {
        !self.0.is_disjoint(&other.0)
    }
}

impl FromIterator<u32> for Cpus {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Cpus {
        Cpus(cpus.into_iter().collect())
    }
}

impl FromStr for Cpus {
    type Err = ();

    fn from_str(text: &str) -> Result<Cpus, ()> {
        let mut cpus = BTreeSet::new();
        for part in text.trim().split(',').filter(|part| !part.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last): (u32, u32) = (first.parse().map_err(drop)?, last.parse().map_err(drop)?);
            if first > last || last >= CPUS_MAX {
                return Err(());
            }
            cpus.extend(first..=last);
        }
        Ok(Cpus(cpus))
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for cpu in self.iter() {
            match runs.last_mut() {
                Some((_, last)) if *last + 1 == cpu => *last = cpu,
                _ => runs.push((cpu, cpu)),
            }
        }
        for (at, (first, last)) in runs.into_iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            if first == last { write!(f, "{comma}{first}")? } else { write!(f, "{comma}{first}-{last}")? }
        }
        Ok(())
    }
}

/// The host's NUMA nodes that have CPUs; a kernel without NUMA has one node with all CPUs.
pub(super) fn nodes(source: &Source) -> Vec<Node> {
    let folder = "sys/devices/system/node";
    let numbers = source.names(folder).into_iter().filter_map(|name| name.strip_prefix("node")?.parse().ok());
    let cpus = |number: u32| source.parsed::<Cpus>(&format!("{folder}/node{number}/cpulist"));
    let node = |number| Some(Node { number, cpus: cpus(number).filter(|cpus| !cpus.is_empty())? });
    let mut nodes: Vec<Node> = numbers.filter_map(node).collect();
    if nodes.is_empty() {
        nodes.push(Node { number: 0, cpus: online(source) });
    }
    nodes.sort_by_key(|node| node.number);
    nodes
}

fn online(source: &Source) -> Cpus {
    source.parsed("sys/devices/system/cpu/online").unwrap_or_default()
}

/// The host's cores, each with the CPUs that this process may use, ordered by first CPU.
pub(super) fn cores(source: &Source) -> Vec<Cpus> {
    let allowed = source.facts.allowed_cpus.clone().unwrap_or_else(|| online(source));
    let core_of = |cpu: u32| {
        let file = format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        let siblings: Option<Cpus> = source.parsed(&file);
        siblings.map_or_else(Cpus::default, |all| all.iter().filter(|cpu| allowed.contains(*cpu)).collect())
    };
    let mut dealt = Cpus::default();
    let mut cores = Vec::new();
    for cpu in allowed.iter() {
        if !dealt.contains(cpu) {
            let mut core = core_of(cpu);
            core.0.insert(cpu);
            dealt.0.extend(core.iter());
            cores.push(core);
        }
    }
    cores
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_shown_as_they_are_read() {
        for text in ["", "0", "0-3", "0-51,104-155", "0,2,4-5"] {
            assert_eq!(text.parse::<Cpus>().map(|cpus| cpus.to_string()), Ok(text.to_owned()));
        }
        assert_eq!(
            "0-3,2-5\n".parse::<Cpus>().map(|cpus| (cpus.len(), cpus.to_string())),
            Ok((6, "0-5".into()))
        );
    }

    #[test]
    fn nonsense_and_endless_lists_are_refused() {
        for text in ["x", "3-1", "0-4294967295", "-1", "1-", "65536"] {
            assert_eq!(text.parse::<Cpus>(), Err(()), "{text}");
        }
    }
}
