//! The channels that a plan shows are those that the engine makes, on NICs of unequal speeds.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use ferrywire::Endpoint;
use ferrywire_host::topology::{Nic, Plan, Topology};
use ferrywire_net::sim::{SimHost, SimNet};

use crate::options::{mapped, planned};

const SPEEDS_MBPS: [u32; 3] = [200_000, 50_000, 100_000];
/// A port with which the first NIC gets the first channel.
const PORT: u16 = 7422;

fn counted(names: impl Iterator<Item = String>) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    names.for_each(|name| *counts.entry(name).or_default() += 1);
    counts
}

/// Channels by NIC, as the plan shows them.
fn shown(channels: usize) -> BTreeMap<String, usize> {
    let nics = SPEEDS_MBPS.iter().enumerate().map(|(at, speed)| Nic {
        name: format!("eth{at}"),
        up: true,
        device: true,
        addresses: vec![format!("10.0.{at}.1/24").parse().expect("an address")],
        speed_mbps: Some(*speed),
        ..Nic::default()
    });
    let gpus = vec![ferrywire_host::topology::Gpu::default()];
    let host = Topology { nics: nics.collect(), gpus, ..Topology::default() };
    let plan: Plan = planned(&host, &mapped("0=eth0,eth1,eth2"));
    counted(plan.channels(&host, channels).remove(0).into_iter())
}

fn host(net: &Arc<SimNet>, name: &str, last: u8) -> (Arc<SimHost>, Vec<IpAddr>) {
    let addresses: Vec<IpAddr> = (0..SPEEDS_MBPS.len() as u8).map(|at| [10, 0, at, last].into()).collect();
    let names: Vec<String> = (0..SPEEDS_MBPS.len()).map(|at| format!("eth{at}")).collect();
    let nics: Vec<(&str, IpAddr)> = names.iter().map(String::as_str).zip(addresses.iter().copied()).collect();
    let host = net.host(name, &nics);
    for (address, speed) in addresses.iter().zip(SPEEDS_MBPS) {
        net.set_bandwidth(*address, Some(u64::from(speed) * 125_000));
    }
    (host, addresses)
}

/// Channels by NIC, as the engine connects them.
fn done(channels: usize) -> BTreeMap<String, usize> {
    let net = SimNet::new(1);
    let (here, there) = (host(&net, "here", 1), host(&net, "there", 2));
    let builder = |host: &Arc<SimHost>| {
        Endpoint::builder().secret("of these tests").threads(0).channels(channels).transport(host.clone())
    };
    let there_end =
        builder(&there.0).listen(SocketAddr::new([0, 0, 0, 0].into(), PORT)).build().expect("built");
    let here_end = builder(&here.0).build().expect("built");
    let connecting = here_end.start_connect(SocketAddr::new(there.1[0], PORT)).expect("on its way");
    for _ in 0..1_000_000 {
        let worked = here_end.progress() | there_end.progress();
        if let Some(peer) = connecting.poll() {
            let peer = peer.expect("it is there");
            let counts = counted(peer.stats().channels.into_iter().map(|channel| channel.nic));
            // Closing would wait for a clock that does not advance.
            std::mem::forget((peer, here_end, there_end));
            return counts;
        }
        net.advance(if worked { Duration::from_micros(1) } else { Duration::from_millis(1) });
    }
    panic!("it never came");
}

#[test]
fn a_plan_shows_what_the_engine_does_at_unequal_speeds() {
    for channels in [1, 2, 3, 4, 7, 14, 32] {
        assert_eq!(done(channels), shown(channels), "{channels} channels");
    }
    assert_eq!(shown(7).into_values().collect::<Vec<_>>(), [4, 1, 2]);
}
