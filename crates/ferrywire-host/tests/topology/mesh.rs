//! Routes between pairs of hosts.

use ferrywire_host::topology::{Plan, PlanError, PlanOptions, by_subnet, routes};

use crate::{named, plan, topology, tree};

/// A copy of the host with other addresses in the same subnets.
pub fn other_host() -> String {
    (0..5).fold(tree::text("a3-high"), |text, net| {
        text.replace(&format!("10.0.{net}.2/24"), &format!("10.0.{net}.3/24"))
    })
}

#[test]
fn gpus_of_one_rail_meet_on_it_and_others_on_the_targets() {
    let (here, there) = (named("a3-high"), topology(&other_host()));
    let routes = routes(&plan(&here), &plan(&there), by_subnet(&here, &there)).expect("routes");
    assert_eq!(routes.len(), 64);
    for route in &routes {
        let rail = format!("eth{}", route.target_gpu / 2 + 1);
        assert_eq!(route.links, [(rail.clone(), rail)], "{route:?}");
        assert_eq!(route.note.is_none(), route.source_gpu / 2 == route.target_gpu / 2);
    }
    let note = routes.iter().find_map(|route| route.note.as_deref()).expect("a note");
    assert_eq!(
        note,
        "GPU 0 to GPU 2: eth1 of the source does not reach eth2 of the target; the source uses eth2, on the target's rail"
    );
}

#[test]
fn on_a_full_mesh_each_gpu_keeps_its_own_nic() {
    let plan = plan(&named("a3-high"));
    let routes = routes(&plan, &plan, |_, _| true).expect("routes");
    let rail = |gpu: u32| format!("eth{}", gpu / 2 + 1);
    assert!(routes.iter().all(|route| route.links == [(rail(route.source_gpu), rail(route.target_gpu))]));
    assert!(routes.iter().all(|route| route.note.is_none()));
}

#[test]
fn several_nics_are_joined_one_to_one() {
    let host = named("a3-high");
    let plan = |map: &str| {
        let options = PlanOptions { map: map.parse().expect("a map"), ..PlanOptions::default() };
        Plan::of(&host, &options).expect("a plan")
    };
    let (all, backwards, two) =
        (plan("0=eth1,eth2,eth3,eth4"), plan("0=eth4,eth3,eth2,eth1"), plan("0=eth1,eth2"));
    let first = |source, target, subnets| {
        let found = if subnets {
            routes(source, target, by_subnet(&host, &host))
        } else {
            routes(source, target, |_, _| true)
        };
        let route = found.expect("routes").remove(0);
        route
            .links
            .iter()
            .map(|(from, to)| format!("{}{}", &from[3..], &to[3..]))
            .collect::<Vec<_>>()
            .join(" ")
    };
    assert_eq!(first(&all, &backwards, false), "11 22 33 44");
    assert_eq!(first(&all, &backwards, true), "11 22 33 44");
    assert_eq!(first(&all, &two, true), "11 22");
    assert_eq!(first(&all, &two, false), "11 22 31 42");
    assert_eq!(first(&two, &all, false), "11 22 13 24");
}

#[test]
fn hosts_without_a_route_are_reported() {
    let (here, there) = (named("a3-high"), topology(&other_host().replace("10.0.", "10.9.")));
    let error = routes(&plan(&here), &plan(&there), by_subnet(&here, &there)).expect_err("no way");
    assert_eq!(
        error.to_string(),
        "GPU 0 cannot reach GPU 0 of the other host: none of eth1, eth2, eth0, eth3, eth4 reaches any of eth1; check \
         subnets and routes, or give both the same rail with --gpu-nics"
    );
    assert!(matches!(error, PlanError::NoRoute { .. }) && !error.is_usage());
}
