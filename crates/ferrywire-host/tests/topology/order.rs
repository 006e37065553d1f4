//! Random hosts: the order of lists decides nothing, and a nearer NIC is never passed over.

use ferrywire_host::topology::{
    Cpus, Gpu, Nic, Node, PciAddress, PciPath, PciRoot, Plan, PlanOptions, Topology,
};
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

/// A device below one of three roots, behind one of two bridges or none.
fn place(unique: u8, root: u8, bridge: Option<u8>) -> PciPath {
    let address = |bus, device| PciAddress { domain: 0, bus, device, function: 0 };
    PciPath {
        root: Some(PciRoot { domain: 0, bus: root }),
        bridges: bridge.map(|bridge| address(root, bridge)).into_iter().collect(),
        address: address(100 + unique, 0),
    }
}

type Spot = (u8, Option<u8>, Option<u32>);

fn spot() -> impl Strategy<Value = Spot> {
    (0u8..3, prop::option::of(0u8..2), prop::option::of(0u32..2))
}

fn nic(
    at: usize,
    ((root, bridge, node), up, addressed, placed, fast): (Spot, bool, bool, bool, bool),
) -> Nic {
    let address = format!("10.{at}.0.1/24").parse().expect("an address");
    Nic {
        name: format!("eth{at}"),
        pci: placed.then(|| place(at as u8, root, bridge)),
        device: placed,
        node,
        up,
        addresses: if addressed { vec![address] } else { Vec::new() },
        speed_mbps: fast.then_some(100_000),
        ..Nic::default()
    }
}

fn host() -> impl Strategy<Value = Topology> {
    let likely = || prop::bool::weighted(0.8);
    let nics = prop::collection::vec((spot(), likely(), likely(), likely(), any::<bool>()), 0..12);
    let gpus = prop::collection::vec((spot(), likely()), 0..9);
    (nics, gpus, 1u32..3).prop_map(|(nics, gpus, nodes)| {
        let gpu = |(at, ((root, bridge, node), placed)): (usize, (Spot, bool))| Gpu {
            index: at as u32,
            pci: placed.then(|| place(50 + at as u8, root, bridge)),
            node,
            ..Gpu::default()
        };
        let cpus = |node: u32| (node * 4..node * 4 + 4).collect::<Cpus>();
        Topology {
            nics: nics.into_iter().enumerate().map(|(at, of)| nic(at, of)).collect(),
            gpus: gpus.into_iter().enumerate().map(gpu).collect(),
            nodes: (0..nodes).map(|node| Node { number: node, cpus: cpus(node) }).collect(),
            cores: (0..nodes * 4).map(|cpu| [cpu].into_iter().collect()).collect(),
            ..Topology::default()
        }
    })
}

proptest! {
    #[test]
    fn lists_in_any_order_make_the_same_plan(host in host(), seed: u64, allow_cross_numa: bool) {
        let options = PlanOptions { allow_cross_numa, ..PlanOptions::default() };
        let mut shuffled = host.clone();
        let mut random = StdRng::seed_from_u64(seed);
        shuffled.nics.shuffle(&mut random);
        shuffled.gpus.shuffle(&mut random);
        let (plan, other) = (Plan::of(&host, &options), Plan::of(&shuffled, &options));
        prop_assert_eq!(&plan, &other);
        if let (Ok(plan), Ok(other)) = (plan, other) {
            prop_assert_eq!(plan.channels(&host, 5), other.channels(&shuffled, 5));
        }
    }

    #[test]
    fn every_gpu_has_nics_that_work_and_none_is_nearer(host in host()) {
        let options = PlanOptions { allow_cross_numa: true, ..PlanOptions::default() };
        let Ok(plan) = Plan::of(&host, &options) else { return Ok(()) };
        prop_assert_eq!(plan.gpus.len(), host.gpus.len());
        for gpu in &plan.gpus {
            prop_assert!(!gpu.nics.is_empty() && !gpu.cpus.is_empty());
            for name in &gpu.nics {
                let nic = host.nic(name).expect("it is there");
                prop_assert!(nic.up && !nic.addresses.is_empty());
            }
            for other in &gpu.others {
                let only = PlanOptions { nics: vec![other.clone()], allow_cross_numa: true, ..PlanOptions::default() };
                let alone = Plan::of(&host, &only).expect("it can be used");
                prop_assert!(alone.gpu(gpu.gpu).expect("planned").locality >= gpu.locality);
            }
        }
    }
}
