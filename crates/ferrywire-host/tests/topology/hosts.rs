//! Reads many kinds of hosts, and checks which GPU gets which NIC.

use ferrywire_host::topology::{Locality, PlanOptions, Source, Topology, Unused};

use crate::tree::{Tree, text};
use crate::{named, nics, plan, refused, topology, without};

const A3_HIGH: [&str; 8] = ["eth1", "eth1", "eth2", "eth2", "eth3", "eth3", "eth4", "eth4"];

fn unused(nic: &str, why: &str) -> Unused {
    Unused { nic: nic.to_owned(), why: why.to_owned() }
}

#[test]
fn a3_high_is_read_whole() {
    let host = named("a3-high");
    let names: Vec<&str> = host.nics.iter().map(|nic| nic.name.as_str()).collect();
    assert_eq!(names, ["docker0", "eth0", "eth1", "eth2", "eth3", "eth4", "lo"]);
    let eth2 = host.nic("eth2").expect("eth2");
    let pci = eth2.pci.as_ref().expect("a device");
    assert_eq!((pci.address.to_string().as_str(), pci.bridges.len()), ("0000:0c:00.0", 3));
    assert_eq!(pci.root.expect("a root").to_string(), "0000:07");
    assert_eq!((eth2.node, eth2.speed_mbps, eth2.mtu_bytes), (Some(0), Some(200_000), 8244));
    assert_eq!((eth2.rx_queues, eth2.tx_queues, eth2.header_split), (16, 16, Some(true)));
    assert_eq!((eth2.driver.as_deref(), eth2.up, eth2.device), (Some("gve"), true, true));
    assert_eq!(eth2.addresses.iter().map(ToString::to_string).collect::<Vec<_>>(), ["10.0.2.2/24"]);
    assert_eq!(host.gpus.len(), 8);
    assert_eq!(host.gpus[2].name.as_deref(), Some("NVIDIA H100 80GB HBM3"));
    assert_eq!(
        host.nodes.iter().map(|node| node.cpus.to_string()).collect::<Vec<_>>(),
        ["0-51,104-155", "52-103,156-207"]
    );
    assert_eq!((host.cores.len(), host.cores[1].to_string().as_str()), (104, "1,105"));
}

#[test]
fn a3_high_gives_each_gpu_the_nic_of_its_own_root() {
    let plan = plan(&named("a3-high"));
    assert_eq!(nics(&plan), A3_HIGH);
    assert!(plan.gpus.iter().all(|gpu| gpu.locality == Locality::Switch));
    assert_eq!(plan.gpus[6].why, "behind PCIe bridge 0000:88:00.0");
    assert_eq!(plan.notes, Vec::<String>::new());
    let control = "is for control: it shares its PCIe root with no GPU, and other NICs do";
    assert_eq!(
        plan.unused,
        [unused("docker0", "is down"), unused("eth0", control), unused("lo", "is loopback")]
    );
    assert_eq!(plan.gpus[0].others, ["eth2", "eth0", "eth3", "eth4"]);
}

#[test]
fn a3_high_shares_no_core_among_gpus() {
    let plan = plan(&named("a3-high"));
    let cpus: Vec<String> = plan.gpus.iter().map(|gpu| gpu.cpus.to_string()).collect();
    assert_eq!(cpus[..2], ["0-12,104-116", "13-25,117-129"]);
    assert_eq!(cpus[7], "91-103,195-207");
    for (at, gpu) in plan.gpus.iter().enumerate() {
        assert!(plan.gpus[at + 1..].iter().all(|other| !other.cpus.meets(&gpu.cpus)));
    }
}

#[test]
fn the_drivers_numbers_count_whatever_case_its_addresses_have() {
    // The driver numbers the GPUs in reverse and writes upper-case letters.
    let mut host = text("a3-high");
    for (index, bus) in ["8B", "8A", "85", "84", "0B", "0A", "05", "04"].iter().enumerate() {
        host += &format!("fact gpu {index} 0000:{bus}:00.0 NVIDIA H100 80GB HBM3\n");
    }
    let mut backwards = A3_HIGH;
    backwards.reverse();
    assert_eq!(nics(&plan(&topology(&host))), backwards);
}

#[test]
fn lines_in_any_order_make_the_same_plan() {
    let host = text("a3-high");
    let mut lines: Vec<&str> = host.lines().collect();
    lines.reverse();
    assert_eq!(plan(&topology(&lines.join("\n"))), plan(&named("a3-high")));
}

#[test]
fn a_missing_nic_is_replaced_within_the_node_and_said() {
    let plan = plan(&topology(&without("a3-high", &["eth2"])));
    assert_eq!(nics(&plan), ["eth1", "eth1", "eth1", "eth1", "eth3", "eth3", "eth4", "eth4"]);
    assert_eq!((plan.gpus[2].locality, plan.gpus[2].why.as_str()), (Locality::Node, "on the same NUMA node"));
    assert_eq!(
        plan.notes,
        ["GPUs 2-3: no NIC on PCIe root 0000:07 can be used; uses eth1 of the same NUMA node"]
    );
}

#[test]
fn a_nic_that_is_down_counts_as_missing() {
    let host = text("a3-high").replace("0000:0c:00.0 node=0", "0000:0c:00.0 node=0 state=down");
    let plan = plan(&topology(&host));
    assert_eq!(nics(&plan)[2..4], ["eth1", "eth1"]);
    assert!(plan.unused.contains(&unused("eth2", "is down")), "{:?}", plan.unused);
}

#[test]
fn a_node_without_a_data_nic_uses_the_control_nic_and_reports_it() {
    let plan = plan(&topology(&without("a3-high", &["eth1", "eth2"])));
    assert_eq!(nics(&plan)[..4], ["eth0"; 4]);
    assert_eq!(
        plan.notes[0],
        "GPUs 0-1: no NIC on PCIe root 0000:01 can be used; uses eth0 of the same NUMA node (a control NIC, which \
         shares its PCIe root with no GPU)"
    );
}

#[test]
fn across_nodes_is_refused_unless_it_is_allowed() {
    let host = topology(&without("a3-high", &["eth3", "eth4"]));
    assert_eq!(
        refused(&host, &PlanOptions::default()).to_string(),
        "GPUs 4-7 (NUMA node 1): no NIC on the same PCIe root or NUMA node can be used, only eth1, eth2 of other nodes; \
         --allow-cross-numa uses them, which is slower, or name NICs with --gpu-nics"
    );
    let allowed = PlanOptions { allow_cross_numa: true, ..PlanOptions::default() };
    let plan = ferrywire_host::topology::Plan::of(&host, &allowed).expect("it is allowed");
    assert_eq!(nics(&plan)[4..], ["eth1+eth2"; 4]);
    assert_eq!(
        plan.notes[0],
        "GPUs 4-5: no NIC on PCIe root 0000:81 can be used; uses eth1, eth2 of another NUMA node, which is slower"
    );
}

#[test]
fn a_process_that_sees_one_gpu_plans_as_one_that_sees_all() {
    let whole = plan(&named("a3-high"));
    for (gpu, bus) in ["04", "05", "0a", "0b", "84", "85", "8a", "8b"].iter().enumerate() {
        let host = format!("{}fact gpu 0 0000:{bus}:00.0 NVIDIA H100 80GB HBM3\n", text("a3-high"));
        let host = topology(&host);
        assert_eq!(host.hidden_gpus.len(), 7);
        let alone = plan(&host);
        assert_eq!((alone.gpus.len(), alone.gpus[0].gpu), (1, 0));
        let (alone, whole) = (&alone.gpus[0], &whole.gpus[gpu]);
        assert_eq!((&alone.nics, &alone.cpus, &alone.others), (&whole.nics, &whole.cpus, &whole.others));
    }
}

/// Regression: a container with one of eight GPUs used only a quarter of the cores that were its own.
#[test]
fn a_container_uses_all_of_its_own_cores() {
    // GPU 4 of the host: on the second node, at the bus number 84.
    let gpu = "fact gpu 0 0000:84:00.0 NVIDIA H100 80GB HBM3\n";
    let minors = ["04", "05", "0a", "0b", "84", "85", "8a", "8b"];
    let all_listed: String = minors
        .iter()
        .enumerate()
        .map(|(minor, bus)| {
            format!("file proc/driver/nvidia/gpus/0000:{bus}:00.0/information Device Minor: \t {minor}\n")
        })
        .collect();
    let own_listed = "file proc/driver/nvidia/gpus/0000:84:00.0/information Device Minor: \t 4\n";
    let devices = |minors: std::ops::Range<u32>| {
        minors.map(|minor| format!("file dev/nvidia{minor} x\n")).collect::<String>()
    };
    let cpus = |more: &str, cpus: &str| {
        plan(&topology(&format!("{}{gpu}{more}{cpus}", text("a3-high")))).gpus[0].cpus.to_string()
    };
    let own = "fact cpus 52-77,156-181\n";
    // The container has one device file, or is told of one GPU.
    for container in [all_listed.clone() + &devices(4..5), own_listed.to_owned() + &devices(4..5)] {
        assert_eq!(cpus(&container, own), "52-77,156-181", "{container}");
        // Other containers may use these CPUs too.
        assert_eq!(cpus(&container, ""), "52-64,156-168", "{container}");
    }
    // CUDA_VISIBLE_DEVICES hides the others: their processes share the cores of this one.
    let ranks = all_listed.clone() + &devices(0..8);
    assert_eq!(cpus(&ranks, own), "52-57,156-161");
    assert_eq!(cpus(&ranks, "fact cpus 52-103,156-207\n"), "52-64,156-168");
    // A container with two of the GPUs, and a process for each.
    let two = all_listed + &devices(4..6);
    assert_eq!(cpus(&two, own), "52-64,156-168");
    // Trees that were recorded without devices tell nothing.
    assert_eq!(cpus("", own), "52-57,156-161");
}

#[test]
fn a_driver_that_shows_no_gpu_leaves_none_to_plan_for() {
    let host = topology(&format!("{}fact driver\n", text("a3-high")));
    assert_eq!((host.gpus.len(), host.hidden_gpus.len()), (0, 8));
    assert_eq!(plan(&host).host_nics, ["eth0", "eth1", "eth2", "eth3", "eth4"]);
}

#[test]
fn two_gpus_and_one_nic() {
    let host = named("two-h200");
    assert_eq!(
        host.gpus[1].pci.as_ref().and_then(|pci| pci.root).map(|root| root.to_string()),
        Some("0000:c0".into())
    );
    assert!(refused(&host, &PlanOptions::default()).to_string().starts_with("GPU 1 (NUMA node 1): "));
    let one_node = text("two-h200").replace("node 1 16-31\n", "").replace("node=1", "node=0");
    let plan = plan(&topology(&one_node));
    assert_eq!(nics(&plan), ["eth0", "eth0"]);
    assert_eq!(plan.gpus.iter().map(|gpu| gpu.cpus.to_string()).collect::<Vec<_>>(), ["0-7", "8-15"]);
}

#[test]
fn without_numa_nothing_is_far() {
    let host = named("no-numa");
    assert_eq!((host.nodes.len(), host.nodes[0].cpus.len()), (1, 8));
    assert!(host.nics.iter().all(|nic| nic.node.is_none()));
    let plan = plan(&host);
    assert_eq!(plan.gpus[0].locality, Locality::Root);
    assert_eq!(
        (plan.gpus[0].nics.join("+"), plan.gpus[0].why.as_str()),
        ("ens1".into(), "on PCIe root 0000:00")
    );
    // ens2 has a root to itself; it is not needed while ens1 shares one with a GPU.
    assert_eq!((plan.gpus[1].nics.join("+"), plan.gpus[1].locality), ("ens1".into(), Locality::Node));
    assert_eq!(host.gpus[0].name.as_deref(), Some("NVIDIA L4"));
    assert_eq!(host.gpus[1].name.as_deref(), Some("PCI device 10de:1234"));
}

#[test]
fn unknown_nodes_on_a_host_with_several_are_said_to_be_unknown() {
    let host = text("two-h200").replace("virtio1 node=0", "virtio1 node=-1");
    let plan = plan(&topology(&host));
    assert_eq!(plan.gpus[0].locality, Locality::Unknown);
    assert_eq!(
        plan.notes,
        [
            "GPU 0: no NIC on PCIe root 0000:40 can be used; the PCIe location of the GPU or of NICs is unknown; uses eth0",
            "GPU 1: no NIC on PCIe root 0000:c0 can be used; the PCIe location of the GPU or of NICs is unknown; uses eth0"
        ]
    );
}

#[test]
fn a_small_vm_without_gpus_uses_its_nics_for_host_memory() {
    let host = named("small-vm");
    let eth0 = host.nic("eth0").expect("eth0");
    assert_eq!((eth0.speed_mbps, eth0.driver.as_deref(), eth0.device), (None, Some("virtio_net"), true));
    assert_eq!(host.cores.len(), 2);
    let plan = plan(&host);
    assert!(plan.gpus.is_empty());
    assert_eq!(plan.host_nics, ["eth0", "eth1"]);
    assert_eq!(plan.unused, [unused("ifb0", "is down"), unused("lo", "is loopback")]);
}

#[test]
fn bonds_and_vlans_are_where_their_devices_are() {
    let host = named("stacked");
    assert!(host.nic("bonding_masters").is_none());
    let plan = plan(&host);
    assert_eq!(nics(&plan), ["bond0.7", "eth3.7"]);
    assert!(plan.gpus.iter().all(|gpu| gpu.locality == Locality::Root));
    let why =
        |name: &str| plan.unused.iter().find(|unused| unused.nic == name).map(|unused| unused.why.clone());
    assert_eq!(why("docker0").as_deref(), Some("is a software interface without a device"));
    assert_eq!(why("eth3").as_deref(), Some("is part of eth3.7"));
    assert_eq!(why("eth4").as_deref(), Some("has no address"));
    assert_eq!(why("veth12ab").as_deref(), Some("is part of docker0"));
}

#[test]
fn interfaces_of_software_do_where_there_is_nothing_else() {
    let host = topology(
        "cpus 0-3\nnic eth0 -\nnic lo -\nfact address eth0 10.0.0.1/24\nfact address lo 127.0.0.1/8\n",
    );
    assert_eq!(plan(&host).host_nics, ["eth0"]);
}

#[test]
fn a_host_whose_nics_cannot_be_used_says_why_not() {
    let addresses = ["address"];
    let host = topology(&without("two-h200", &addresses).replace("queues=4", "queues=4 state=down"));
    assert_eq!(
        refused(&host, &PlanOptions::default()).to_string(),
        "no NIC can be used for GPUs 0-1: eth0 is down, lo is loopback; bring one up and give it an address, or name \
         others with --gpu-nics"
    );
    let host = topology(&without("two-h200", &addresses));
    assert!(refused(&host, &PlanOptions::default()).to_string().contains("eth0 has no address"));
    let host = topology("cpus 0\ngpu pci0000:00/0000:00:01.0\n");
    assert!(
        refused(&host, &PlanOptions::default())
            .to_string()
            .contains("no NIC can be used for GPU 0: this host has no NIC;")
    );
}

#[test]
fn threads_stay_on_the_cores_that_the_process_has() {
    let host = format!("{}fact cpus 0-3,104-107\n", text("a3-high"));
    let plan = plan(&topology(&host));
    assert_eq!(plan.gpus[1].cpus.to_string(), "1,105");
    assert_eq!(plan.gpus[5].cpus.to_string(), "1,105");
    assert_eq!(
        plan.notes[0],
        "GPU 4: the CPU affinity of this process has no CPU of NUMA node 1; uses CPUs of other nodes"
    );
    assert_eq!(plan.notes.len(), 4);
}

#[test]
fn the_kernel_module_gives_models_without_cuda() {
    let file = "proc/driver/nvidia/gpus/0000:21:00.0/information";
    let host = format!("{}file {file} Model: \t\t NVIDIA Something\n", text("no-numa"));
    assert_eq!(topology(&host).gpus[1].name.as_deref(), Some("NVIDIA Something"));
}

#[test]
fn a_tree_needs_its_facts() {
    let tree = Tree::named("small-vm");
    std::fs::write(tree.root().join("facts"), "address eth0 nowhere\n").expect("written");
    let error = Source::recorded(tree.root()).expect_err("no sense").to_string();
    assert!(error.contains("cannot parse the line \"address eth0 nowhere\""), "{error}");
    std::fs::remove_file(tree.root().join("facts")).expect("removed");
    assert!(Source::recorded(tree.root()).is_err());
}

#[test]
fn this_host_has_a_topology() {
    let host = Topology::detect();
    let lo = host.nic("lo").expect("a host has a loopback interface");
    assert!(lo.loopback && lo.up && !lo.device && !lo.addresses.is_empty(), "{lo:?}");
    assert!(!host.nodes.is_empty() && !host.cores.is_empty());
    assert!(host.cores.iter().all(|core| host.nodes.iter().any(|node| node.cpus.meets(core))), "{host:?}");
}
