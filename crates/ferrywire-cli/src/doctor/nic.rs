//! Checks of this host's NICs: slow settings, and reasons why a NIC is not used.
//!
//! Invariant: [`judge`] reads nothing; a value that is `None` is not reported by the driver. Read next: `finding.rs`.

use std::collections::BTreeMap;

use ferrywire_devmem::sys::ethtool::{Ethtool, Feature};
use ferrywire_host::topology::{Nic, Topology};

use super::files::{line, number};
use super::finding::{Finding, Level};

/// Speed from which a NIC's settings matter.
const FAST_MBPS: u32 = 25_000;
/// With packets of this size the receiver of a fast NIC has a sixth of the interrupts.
const MTU_JUMBO_BYTES: u32 = 9000;
/// MTU, in bytes, from which a NIC counts as having jumbo frames: those of clouds are a little shorter than
/// 9000.
const MTU_ENOUGH_BYTES: u32 = 8000;
/// Limit for NICs on top of other NICs, such as a VLAN on a bond.
const UPPER_NICS_MAX: usize = 4;
/// Fewest descriptors of a ring that are enough.
const RING_MIN: u32 = 1024;

/// Facts about a NIC that the topology does not have.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Whether the link has a carrier; unknown while the NIC is switched off.
    pub carrier: Option<bool>,
    /// Duplex mode of the link: `full` or `half`.
    pub duplex: Option<String>,
    /// Whether the NIC is a bridge.
    pub bridge: bool,
    /// Whether the NIC is a bond.
    pub bond: bool,
    /// Whether another core than the interrupted one processes packets (RPS).
    pub steered: bool,
    /// Names of offloads that are off and could be on.
    pub offloads_off: Vec<&'static str>,
    /// Whether offloads could be read.
    pub offloads_known: bool,
    /// Descriptors of the receive and the send ring: present and maximal number.
    pub rings: Option<[(u32, u32); 2]>,
}

/// Offloads, by the kernel's name and the common name.
const OFFLOADS: [(&str, &str); 4] = [
    ("rx-gro", "gro"),
    ("tx-tcp-segmentation", "tso"),
    ("tx-generic-segmentation", "gso"),
    ("tx-scatter-gather", "sg"),
];

impl Settings {
    /// Reads the settings of a NIC; asks its driver.
    pub fn read(nic: &str, ethtool: Option<&mut Ethtool>) -> Settings {
        let folder = format!("/sys/class/net/{nic}");
        let mut settings = Settings {
            carrier: number::<u8>(format!("{folder}/carrier")).map(|carrier| carrier == 1),
            duplex: line(format!("{folder}/duplex")),
            bridge: std::path::Path::new(&format!("{folder}/bridge")).exists(),
            bond: std::path::Path::new(&format!("{folder}/bonding")).exists(),
            steered: line(format!("{folder}/queues/rx-0/rps_cpus"))
                .is_some_and(|mask| mask.chars().any(|c| !"0,".contains(c))),
            ..Settings::default()
        };
        if let Some(ethtool) = ethtool {
            settings.ask(nic, ethtool);
        }
        settings
    }

    fn ask(&mut self, nic: &str, ethtool: &mut Ethtool) {
        for (name, short) in OFFLOADS {
            let Ok(Feature { on, changeable }) = ethtool.feature(nic, name) else { return };
            if !on && changeable {
                self.offloads_off.push(short);
            }
        }
        self.offloads_known = true;
        self.rings = ethtool.ring_sizes(nic).ok().flatten();
    }
}

/// Whether a NIC can lead to another host.
pub fn counts(nic: &Nic) -> bool {
    !nic.loopback && nic.up && !nic.addresses.is_empty()
}

/// The findings about all NICs; `named` are those of --nics.
pub fn judge(topology: &Topology, settings: &dyn Fn(&str) -> Settings, named: &[String]) -> Vec<Finding> {
    let mut found = whole_host(topology, settings, named);
    let is_asked = |nic: &&Nic| !nic.loopback && (named.is_empty() || named.contains(&nic.name));
    let fastest = fastest_of(topology.nics.iter().filter(is_asked));
    for nic in topology.nics.iter().filter(is_asked) {
        let bond = upper(topology, nic).filter(|_| nic.addresses.is_empty());
        found.extend(of_one(nic, &settings(&nic.name), fastest, !named.is_empty(), bond));
    }
    found
}

/// Speed of the fastest NIC with a device, in Mbit/s.
pub fn fastest_mbps(topology: &Topology) -> Option<u32> {
    fastest_of(topology.nics.iter())
}

fn fastest_of<'a>(nics: impl Iterator<Item = &'a Nic>) -> Option<u32> {
    nics.filter(|nic| nic.device && nic.up).filter_map(|nic| nic.speed_mbps).max()
}

/// The NIC on top of this one that leads to other hosts, or carries one that does, such as a bond of this NIC.
fn upper<'a>(topology: &'a Topology, nic: &Nic) -> Option<&'a Nic> {
    fn leads(topology: &Topology, nic: &Nic, uppers: usize) -> bool {
        let is_upper = |upper: &&Nic| upper.lower.contains(&nic.name);
        counts(nic)
            || nic.up
                && uppers > 0
                && topology.nics.iter().filter(is_upper).any(|upper| leads(topology, upper, uppers - 1))
    }
    let is_upper = |upper: &&Nic| upper.lower.contains(&nic.name) && leads(topology, upper, UPPER_NICS_MAX);
    topology.nics.iter().find(is_upper)
}

/// Whether a NIC can lead to another host, itself or as a part of another NIC.
fn is_used(topology: &Topology, nic: &Nic) -> bool {
    counts(nic) || nic.up && upper(topology, nic).is_some()
}

/// Speed of all NICs together, in Mbit/s.
pub fn total_mbps(topology: &Topology, settings: &dyn Fn(&str) -> Settings) -> u32 {
    let bond_of = |nic: &Nic| {
        topology.nics.iter().find(|upper| upper.lower.contains(&nic.name) && settings(&upper.name).bond)
    };
    let mut speeds: BTreeMap<&str, (u32, u32)> = BTreeMap::new();
    for nic in topology.nics.iter().filter(|nic| nic.device && is_used(topology, nic)) {
        // The kernel reports the speed of a bond, which is that of one part where the others are standby.
        let whole = bond_of(nic).unwrap_or(nic);
        let of_parts = speeds.entry(&whole.name).or_insert((0, whole.speed_mbps.unwrap_or(u32::MAX)));
        of_parts.0 = of_parts.0.saturating_add(nic.speed_mbps.unwrap_or(0));
    }
    let each = speeds.values().map(|(of_parts, of_whole)| *of_parts.min(of_whole));
    each.fold(0, u32::saturating_add)
}

fn whole_host(topology: &Topology, settings: &dyn Fn(&str) -> Settings, named: &[String]) -> Vec<Finding> {
    let usable: Vec<&Nic> = topology.nics.iter().filter(|nic| counts(nic)).collect();
    let names: Vec<&str> = usable.iter().map(|nic| nic.name.as_str()).collect();
    let nics = Finding::ok("nics", "NICs", format!("up, with an address: {}", names.join(", ")));
    let (bridges, outward): (Vec<&Nic>, Vec<&Nic>) =
        usable.iter().partition(|nic| settings(&nic.name).bridge);
    let bridge_alone = bridges.iter().all(|nic| nic.lower.is_empty() || nic.name.starts_with("docker"));
    let mut found = vec![match (usable.is_empty(), outward.is_empty() && bridge_alone) {
        (true, _) => Finding::ok("nics", "NICs", "no NIC except loopback is up and has an address").warn(
            "ip link set NIC up; ip address add ADDR/LEN dev NIC: without an address only this host is reachable",
        ),
        (_, true) => {
            Finding { evidence: format!("{}, which leads only to containers", nics.evidence), ..nics }.warn(
                "give a NIC that leads to other hosts an address: every host may have a bridge with this address",
            )
        }
        _ => nics,
    }];
    let is_asked = |nic: &&Nic| named.is_empty() || named.contains(&nic.name);
    let used = topology.nics.iter().filter(|nic| is_used(topology, nic));
    found.extend(mtus(&used.filter(is_asked).collect::<Vec<_>>()));
    found
}

fn mtus(used: &[&Nic]) -> Option<Finding> {
    let devices: Vec<&&Nic> = used.iter().filter(|nic| nic.device).collect();
    let first = devices.first()?;
    let listed: Vec<String> = devices.iter().map(|nic| format!("{} {}", nic.name, nic.mtu_bytes)).collect();
    let found = Finding::ok("mtu-equal", "NICs", format!("MTU: {}", listed.join(", ")));
    Some(if devices.iter().all(|nic| nic.mtu_bytes == first.mtu_bytes) {
        found
    } else {
        found.warn("set one MTU on all NICs that carry a transfer, and on their switches")
    })
}

fn of_one(
    nic: &Nic,
    settings: &Settings,
    fastest: Option<u32>,
    named: bool,
    bond: Option<&Nic>,
) -> Vec<Finding> {
    let mut found: Vec<Finding> = state(nic, settings, named, bond).into_iter().collect();
    if !nic.device || !nic.up {
        return found;
    }
    found.push(speed(nic, fastest));
    let fast = nic.speed_mbps.is_some_and(|mbps| mbps >= FAST_MBPS);
    found.extend(settings.duplex.as_deref().and_then(|duplex| self::duplex(&nic.name, duplex)));
    found.push(mtu(nic, fast));
    found.push(queues(nic, fast));
    if settings.steered && nic.rx_queues > 1 {
        let evidence = format!("/sys/class/net/{}/queues/rx-0/rps_cpus is set", nic.name);
        found.push(
            Finding::ok("rps", &nic.name, evidence)
                .at(Level::Note)
                .fix("write 0 to rps_cpus of all queues: with several queues a second core only adds work"),
        );
    }
    if settings.offloads_known {
        found.push(offloads(&nic.name, &settings.offloads_off));
    }
    found.extend(settings.rings.map(|rings| self::rings(&nic.name, rings, fast)));
    found
}

fn state(nic: &Nic, settings: &Settings, named: bool, bond: Option<&Nic>) -> Option<Finding> {
    let fix = match settings.carrier {
        Some(false) => "no carrier: check the cable and the switch port",
        _ => "ip link set NIC up",
    };
    let found = |evidence: &str| Finding::ok("nic-state", &nic.name, evidence);
    match (nic.up, nic.addresses.is_empty()) {
        (true, true) if let Some(bond) = bond => Some(found(&format!("up, part of {}", bond.name))),
        (true, false) => Some(found("up, with an address")),
        (true, true) if nic.device || named => {
            let found = found("up, without an address").at(Level::Note);
            Some(found.fix(format!("ip address add ADDR/LEN dev {}, unless it belongs to a bond", nic.name)))
        }
        (false, _) if named => Some(found("down").fail(fix.replace("NIC", &nic.name))),
        (false, _) if nic.device => Some(found("down").at(Level::Note).fix(fix.replace("NIC", &nic.name))),
        _ => None,
    }
}

fn speed(nic: &Nic, fastest: Option<u32>) -> Finding {
    let Some(mbps) = nic.speed_mbps else {
        let evidence = format!("/sys/class/net/{}/speed has no value", nic.name);
        return Finding::ok("nic-speed", &nic.name, evidence).at(Level::Note).fix(
            "nothing to do in a virtual machine: channels are assigned to NICs evenly, without regard to speed",
        );
    };
    let found = Finding::ok("nic-speed", &nic.name, format!("{} Gbit/s", f64::from(mbps) / 1000.0));
    match fastest {
        Some(fastest) if counts(nic) && mbps < fastest => found.at(Level::Note).fix(format!(
            "other NICs have {} Gbit/s: check cable and switch, or leave this NIC out with --nics",
            f64::from(fastest) / 1000.0
        )),
        _ => found,
    }
}

fn duplex(nic: &str, duplex: &str) -> Option<Finding> {
    let found = Finding::ok("duplex", nic, format!("/sys/class/net/{nic}/duplex is {duplex}"));
    match duplex {
        "full" => Some(found),
        "half" => {
            Some(found.warn("let NIC and switch negotiate: ethtool -s NIC autoneg on".replace("NIC", nic)))
        }
        _ => None,
    }
}

fn mtu(nic: &Nic, fast: bool) -> Finding {
    let found = Finding::ok("mtu", &nic.name, format!("MTU {}", nic.mtu_bytes));
    if fast && nic.mtu_bytes < MTU_ENOUGH_BYTES {
        found.warn(format!("ip link set {} mtu {MTU_JUMBO_BYTES}, if switches and peers allow it", nic.name))
    } else {
        found
    }
}

fn queues(nic: &Nic, fast: bool) -> Finding {
    let evidence = format!("{} receive and {} send queues", nic.rx_queues, nic.tx_queues);
    let found = Finding::ok("nic-queues", &nic.name, evidence);
    match (nic.rx_queues <= 1, fast) {
        (true, true) => found
            .warn(format!("ethtool -L {} combined N: one core takes all interrupts of the NIC", nic.name)),
        (true, false) => {
            found.at(Level::Note).fix(format!("ethtool -L {} combined N, if the NIC supports it", nic.name))
        }
        _ => found,
    }
}

fn offloads(nic: &str, off: &[&str]) -> Finding {
    if off.is_empty() {
        return Finding::ok("offloads", nic, "ethtool: GRO, TSO, GSO and scatter-gather are on, or fixed");
    }
    let switches: Vec<String> = off.iter().map(|name| format!("{name} on")).collect();
    Finding::ok("offloads", nic, format!("ethtool: off: {}", off.join(", "))).warn(format!(
        "ethtool -K {nic} {}: without these offloads the kernel processes each packet separately",
        switches.join(" ")
    ))
}

fn rings(nic: &str, [rx, tx]: [(u32, u32); 2], fast: bool) -> Finding {
    let evidence = format!("ethtool: rings have {} of {} and {} of {} descriptors", rx.0, rx.1, tx.0, tx.1);
    let found = Finding::ok("rings", nic, evidence);
    let small = |(set, most): (u32, u32)| set < RING_MIN && set < most;
    if fast && (small(rx) || small(tx)) {
        found.warn(format!("ethtool -G {nic} rx {} tx {}", rx.1, tx.1))
    } else {
        found
    }
}

#[cfg(test)]
#[allow(dead_code, reason = "the tests of topology use all of it")]
#[path = "../../../ferrywire-host/tests/topology/tree.rs"]
mod tree;

#[cfg(test)]
mod tests {
    use super::tree::Tree;
    use super::*;
    use crate::doctor::finding::{levels, nic};
    use ferrywire_host::topology::Source;

    fn good() -> Settings {
        Settings {
            carrier: Some(true),
            duplex: Some("full".to_owned()),
            offloads_known: true,
            rings: Some([(4096, 8192); 2]),
            ..Settings::default()
        }
    }

    fn host(nics: Vec<Nic>) -> Topology {
        let (gpus, hidden_gpus, nodes, cores, notes) = Default::default();
        Topology { nics, gpus, hidden_gpus, nodes, cores, notes }
    }

    fn found(nics: Vec<Nic>, settings: Settings) -> Vec<Finding> {
        judge(&host(nics), &|_| settings.clone(), &[])
    }

    fn one(nic: Nic, settings: Settings, id: &str) -> Level {
        levels(&found(vec![nic], settings), id)[0]
    }

    #[test]
    fn good_nics_have_nothing_to_fix() {
        let found = found(vec![nic("eth1"), nic("eth2")], good());
        assert!(found.iter().all(|finding| finding.level == Level::Ok), "{found:?}");
        assert_eq!(levels(&found, "rings").len(), 2);
    }

    #[test]
    fn causes_of_a_slow_nic_are_reported() {
        assert_eq!(one(Nic { mtu_bytes: 1500, ..nic("a") }, good(), "mtu"), Level::Warn);
        assert_eq!(
            one(Nic { mtu_bytes: 1500, speed_mbps: Some(1000), ..nic("a") }, good(), "mtu"),
            Level::Ok
        );
        assert_eq!(one(Nic { rx_queues: 1, ..nic("a") }, good(), "nic-queues"), Level::Warn);
        assert_eq!(
            one(Nic { rx_queues: 1, speed_mbps: None, ..nic("a") }, good(), "nic-queues"),
            Level::Note
        );
        assert_eq!(one(Nic { speed_mbps: None, ..nic("a") }, good(), "nic-speed"), Level::Note);
        let half = Settings { duplex: Some("half".to_owned()), ..good() };
        assert_eq!(one(nic("a"), half, "duplex"), Level::Warn);
        let off = Settings { offloads_off: vec!["gro", "tso"], ..good() };
        let off = found(vec![nic("a")], off);
        let fixes: Vec<_> = off.iter().filter_map(|finding| finding.fix.as_deref()).collect();
        assert!(fixes[0].starts_with("ethtool -K a gro on tso on"), "{fixes:?}");
        let rings = |set, most| Settings { rings: Some([(set, most), (4096, 8192)]), ..good() };
        assert_eq!(one(nic("a"), rings(512, 8192), "rings"), Level::Warn);
        assert_eq!(one(nic("a"), rings(512, 512), "rings"), Level::Ok);
        assert_eq!(one(nic("a"), Settings { steered: true, ..good() }, "rps"), Level::Note);
    }

    /// Regression: a NIC for management with another MTU was a warning also where --nics leaves it out.
    #[test]
    fn nics_that_are_not_named_are_not_compared() {
        let slow = Nic { mtu_bytes: 1500, speed_mbps: Some(400_000), ..nic("eth0") };
        let topology = host(vec![slow, nic("eth1"), nic("eth2")]);
        let of = |named: &[&str], id| {
            let named: Vec<String> = named.iter().map(|name| (*name).to_owned()).collect();
            levels(&judge(&topology, &|_| good(), &named), id)
        };
        assert_eq!(of(&[], "mtu-equal"), [Level::Warn]);
        assert_eq!(of(&["eth1", "eth2"], "mtu-equal"), [Level::Ok]);
        assert_eq!(of(&[], "nic-speed"), [Level::Ok, Level::Note, Level::Note]);
        assert_eq!(of(&["eth1", "eth2"], "nic-speed"), [Level::Ok, Level::Ok]);
    }

    /// Regression: neither the bond nor its parts counted, and the parts were to get an address.
    #[test]
    fn the_parts_of_a_bond_count() {
        let part = |name| Nic { addresses: Vec::new(), ..nic(name) };
        let lower = vec!["eth1".to_owned(), "eth2".to_owned()];
        let bond = Nic { device: false, lower, speed_mbps: Some(200_000), ..nic("bond0") };
        let topology = host(vec![bond, part("eth1"), part("eth2"), part("eth3")]);
        let settings = |name: &str| Settings { bond: name == "bond0", ..good() };
        assert_eq!(total_mbps(&topology, &settings), 200_000);
        // Regression: the standby part of a bond counted.
        let mut with_standby = topology.clone();
        with_standby.nics[0].speed_mbps = Some(100_000);
        assert_eq!(total_mbps(&with_standby, &settings), 100_000);
        assert_eq!(
            total_mbps(&with_standby, &|_| good()),
            200_000,
            "a bridge has the speed of its fastest part"
        );
        let vlan = Nic { device: false, lower: vec!["bond0".to_owned()], ..nic("bond0.7") };
        let mut stacked = topology.clone();
        stacked.nics[0].addresses.clear();
        stacked.nics.push(vlan);
        assert_eq!(total_mbps(&stacked, &settings), 200_000);
        let found = judge(&topology, &|_| good(), &[]);
        assert!(found.iter().any(|finding| finding.evidence == "MTU: eth1 9000, eth2 9000"), "{found:?}");
        assert_eq!(levels(&found, "nic-state"), [Level::Ok, Level::Ok, Level::Ok, Level::Note]);
        assert!(found.iter().any(|finding| finding.evidence == "up, part of bond0"), "{found:?}");
    }

    /// A cable or a port of a switch that has negotiated little. Virtual NICs have no speed, so the files are recorded.
    #[test]
    fn one_nic_at_low_speed_is_found_in_the_files_of_a_host() {
        let nic = |number: u32, mbps: u32| {
            let way = format!("pci0000:0{number}/0000:0{number}:00.0");
            format!(
                "nic eth{number} {way} node=0 speed={mbps} mtu=9000 driver=mlx5_core queues=8\n\
                 fact address eth{number} 10.0.{number}.2/24\n"
            )
        };
        let host = |slow: u32| {
            let nics = nic(1, 100_000) + &nic(2, slow) + &nic(3, 100_000);
            let tree = Tree::of(&format!("node 0 0-7\ncpus 0-7\n{nics}"));
            Topology::read(&Source::recorded(tree.root()).expect("a recorded host"))
        };
        let speeds = |topology: &Topology| {
            let found = judge(topology, &|_| good(), &[]);
            found.into_iter().filter(|finding| finding.id == "nic-speed").collect::<Vec<_>>()
        };
        let found = speeds(&host(10_000));
        assert_eq!(levels(&found, "nic-speed"), [Level::Ok, Level::Note, Level::Ok]);
        assert_eq!((found[1].subject.as_str(), found[1].evidence.as_str()), ("eth2", "10 Gbit/s"));
        let fix = found[1].fix.as_deref().unwrap_or_default();
        assert!(fix.contains("other NICs have 100 Gbit/s: check cable and switch"), "{fix}");
        assert_eq!(levels(&speeds(&host(100_000)), "nic-speed"), [Level::Ok; 3]);
    }

    #[test]
    fn nics_that_differ_are_compared() {
        let odd = vec![nic("a"), Nic { mtu_bytes: 8896, speed_mbps: Some(50_000), ..nic("b") }];
        let found = found(odd, good());
        assert_eq!(levels(&found, "mtu-equal"), [Level::Warn]);
        assert_eq!(levels(&found, "nic-speed"), [Level::Ok, Level::Note]);
    }

    #[test]
    fn a_nic_that_is_down_matters_where_it_is_asked_for() {
        let down = || Nic { up: false, ..nic("a") };
        let dark = || Settings { carrier: Some(false), ..good() };
        assert_eq!(one(down(), dark(), "nic-state"), Level::Note);
        let asked = judge(&host(vec![down(), nic("b")]), &|_| dark(), &["a".to_owned()]);
        assert_eq!(levels(&asked, "nic-state"), [Level::Fail]);
        let fix = asked.iter().find_map(|finding| finding.fix.clone()).expect("a fix");
        assert!(fix.contains("no carrier"), "{fix}");
        assert_eq!(one(Nic { addresses: vec![], ..nic("a") }, good(), "nic-state"), Level::Note);
    }

    #[test]
    fn loopback_or_a_bridge_of_containers_leads_nowhere() {
        assert_eq!(levels(&found(vec![Nic { loopback: true, ..nic("lo") }], good()), "nics"), [Level::Warn]);
        let bridge = || Nic { device: false, speed_mbps: None, ..nic("docker0") };
        let settings = |name: &str| Settings { bridge: name == "docker0", ..good() };
        assert_eq!(levels(&judge(&host(vec![bridge()]), &settings, &[]), "nics"), [Level::Warn]);
        assert_eq!(levels(&judge(&host(vec![bridge(), nic("a")]), &settings, &[]), "nics"), [Level::Ok]);
    }
}
