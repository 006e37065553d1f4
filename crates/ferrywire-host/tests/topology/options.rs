//! Options of a plan, and options that cannot be satisfied.

use ferrywire_host::topology::{Locality, Plan, PlanError, PlanOptions, Topology};

use crate::{named, nics, plan, refused, topology, tree, without};

pub fn mapped(map: &str) -> PlanOptions {
    PlanOptions { map: map.parse().expect("a map"), ..PlanOptions::default() }
}

pub fn planned(topology: &Topology, options: &PlanOptions) -> Plan {
    Plan::of(topology, options).expect("a plan")
}

#[test]
fn a_map_goes_before_everything_for_the_gpus_it_names() {
    let plan = planned(&named("a3-high"), &mapped("0=eth2,1=eth0,2-3=eth1,eth2"));
    assert_eq!(nics(&plan), ["eth2", "eth0", "eth1+eth2", "eth1+eth2", "eth3", "eth3", "eth4", "eth4"]);
    assert_eq!(plan.gpus[0].why, "named by --gpu-nics");
    assert_eq!(plan.gpus[2].locality, Locality::Node);
    assert!(plan.notes.is_empty(), "{:?}", plan.notes);
}

#[test]
fn a_map_may_cross_nodes_and_that_is_said() {
    let plan = planned(&named("a3-high"), &mapped("0-7=eth1,eth2,eth3,eth4"));
    assert_eq!(nics(&plan), ["eth1+eth2+eth3+eth4"; 8]);
    assert_eq!(
        plan.notes,
        [
            "GPUs 0-3: uses eth3, eth4 of another NUMA node, which is slower",
            "GPUs 4-7: uses eth1, eth2 of another NUMA node, which is slower"
        ]
    );
}

#[test]
fn impossible_maps_are_refused_with_what_there_is() {
    let host =
        topology(&tree::text("a3-high").replace("0000:0c:00.0 node=0", "0000:0c:00.0 node=0 state=down"));
    let said = [
        ("8=eth1", "--gpu-nics 8=...: no such GPU; there are GPUs 0-7"),
        (
            "0=eth9",
            "--gpu-nics 0=eth9: there is no NIC eth9; there are docker0, eth0, eth1, eth2, eth3, eth4, lo",
        ),
        ("3=eth1,eth2", "--gpu-nics 3=eth2: eth2 is down; NICs that can be used: eth0, eth1, eth3, eth4"),
    ];
    for (map, text) in said {
        assert_eq!(refused(&host, &mapped(map)).to_string(), text);
    }
    let host = topology(&without("small-vm", &["address"]));
    assert_eq!(refused(&host, &mapped("0=eth0")).to_string(), "--gpu-nics 0=...: no such GPU; there is none");
    let host = topology(&format!("{}gpu pci0000:00/0000:00:09.0\n", without("small-vm", &["address"])));
    let refused = refused(&host, &mapped("0=eth0"));
    assert_eq!(refused.to_string(), "--gpu-nics 0=eth0: eth0 has no address; NICs that can be used: none");
    assert!(!refused.is_usage());
}

#[test]
fn a_map_for_some_gpus_does_not_excuse_the_others() {
    let host = topology(&without("a3-high", &["eth3", "eth4"]));
    match refused(&host, &mapped("4-6=eth1")) {
        PlanError::AcrossNodes { gpus, node, nics } => {
            assert_eq!((gpus, node, nics), (vec![7], 1, vec!["eth1".to_owned(), "eth2".to_owned()]));
        }
        other => panic!("{other}"),
    }
    assert_eq!(nics(&planned(&host, &mapped("4-7=eth1")))[4..], ["eth1"; 4]);
}

#[test]
fn named_nics_are_the_only_ones() {
    let options = |names: &[&str]| PlanOptions {
        nics: names.iter().map(|name| (*name).to_owned()).collect(),
        ..PlanOptions::default()
    };
    let host = named("a3-high");
    let plan = planned(&host, &options(&["eth3", "eth0"]));
    assert_eq!(nics(&plan), ["eth0", "eth0", "eth0", "eth0", "eth3", "eth3", "eth3", "eth3"]);
    assert!(plan.unused.iter().any(|unused| unused.nic == "eth1" && unused.why == "is not among --nics"));
    assert_eq!(
        refused(&host, &options(&["eth1", "eth7"])).to_string(),
        "--nics eth7: there is no NIC eth7; there are docker0, eth0, eth1, eth2, eth3, eth4, lo"
    );
    assert_eq!(
        refused(&host, &options(&["docker0"])).to_string(),
        "--nics docker0: docker0 is down; NICs that can be used: none"
    );
}

#[test]
fn channels_are_spread_evenly() {
    let host = named("a3-high");
    let channels = plan(&host).channels(&host, 8);
    assert_eq!(channels.len(), 8);
    assert!(channels[2].iter().all(|nic| nic == "eth2") && channels[2].len() == 8);
    let all = planned(&host, &mapped("0-7=eth1,eth2,eth3,eth4"));
    for nic in ["eth1", "eth2", "eth3", "eth4"] {
        let of = |per_gpu| all.channels(&host, per_gpu).concat().iter().filter(|name| *name == nic).count();
        // With one channel each, GPUs that share NICs do not all use the first NIC.
        assert_eq!((of(8), of(1), of(3)), (16, 2, 6));
    }
}

#[test]
fn channels_follow_speed_and_leave_no_nic_out() {
    let host = topology(
        &tree::text("a3-high").replace("0000:0c:00.0 node=0 speed=200000", "0000:0c:00.0 node=0 speed=50000"),
    );
    let plan = planned(&host, &mapped("0=eth1,eth2"));
    let count = |per_gpu: usize| {
        let channels = plan.channels(&host, per_gpu);
        ["eth1", "eth2"].map(|nic| channels[0].iter().filter(|name| *name == nic).count())
    };
    assert_eq!((count(1), count(2), count(5), count(10)), ([1, 0], [1, 1], [4, 1], [8, 2]));
}
