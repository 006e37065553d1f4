//! Checks of a peer: whether it answers, and over which NICs.
//!
//! The doctor connects as any peer does, over every NIC that the engine would use, asks a serving bench for its
//! addresses, and closes. Nothing is measured and no run slot is taken.
//! Invariant: [`judge`] reads nothing; each wait has a timeout.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc;
use std::time::Duration;

use ferrywire::{ChannelStats, ConnectError, RefusalReason};
use ferrywire_host::topology::{Nic, Topology};
use serde_json::{Value, json};

use super::finding::{Finding, Level};
use super::nic::{self, Settings};
use crate::bench::connect::{advice, wait_for};
use crate::bench::link::{CLOSE_TIMEOUT, Link};
use crate::bench::protocol::Message;
use crate::exit::{Failure, Outcome};
use crate::plan::EnginePlan;
use crate::tool;

/// Fewest channels of the visit, so that each of a few NICs gets one.
const CHANNELS_MIN: usize = 8;
/// Longest time for a serving bench to answer; a peer that takes longer counts as another kind of endpoint.
const ANSWER_LIMIT: Duration = Duration::from_secs(3);
/// Shortest round trip that counts as a long path: those within a data centre are below.
const ROUND_TRIP_LONG: Duration = Duration::from_micros(500);
/// Most bytes of headers in a packet: IPv6 and TCP with the options of data packets, and some slack.
const HEADER_BYTES_MAX: u32 = 80;

/// The result of connecting to a peer.
#[derive(Clone, Debug)]
pub struct PeerFacts {
    /// The address that was dialled.
    pub address: SocketAddr,
    /// The facts that the peer gave, or why the connection failed.
    pub visit: Result<Visit, ConnectError>,
    /// Whether this end has a secret.
    pub with_secret: bool,
}

/// The facts about a peer that accepted this end.
#[derive(Clone, Debug, Default)]
pub struct Visit {
    /// The peer's name.
    pub name: String,
    /// Whether the peer runs on this host.
    pub same_host: bool,
    /// The channels that were connected.
    pub channels: Vec<Channel>,
    /// Why other channels could not be connected, or were lost.
    pub lost: Vec<String>,
    /// The answer of a serving bench, or why the peer is not one.
    pub bench: Option<Result<Serving, String>>,
    /// Bridges of this host.
    pub bridges: Vec<String>,
}

/// A channel to the peer.
#[derive(Clone, Debug, PartialEq)]
pub struct Channel {
    /// This end's NIC.
    pub nic: String,
    /// The NIC's address and this end's port.
    pub local: SocketAddr,
    /// The peer's address and port.
    pub remote: SocketAddr,
    /// Smoothed round-trip time of the channel's connection.
    pub rtt: Duration,
    /// Payload bytes of a packet; 0 if unknown.
    pub mss_bytes: u32,
    /// The NIC to which this host's routes lead from the local to the remote address; `None` if unknown.
    pub route: Option<String>,
}

/// The answer of a serving bench.
#[derive(Clone, Debug, Default)]
pub struct Serving {
    /// For each endpoint of the bench, the addresses at which peers reach it.
    pub endpoints: Vec<Vec<SocketAddr>>,
    /// The peer whose run is in progress; `None` if the bench is idle.
    pub busy: Option<String>,
}

impl Serving {
    /// The addresses of all endpoints.
    fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.endpoints.iter().flatten().copied()
    }
}

impl From<&ChannelStats> for Channel {
    fn from(stats: &ChannelStats) -> Channel {
        let ChannelStats { nic, local, remote, rtt, mss_bytes, .. } = stats.clone();
        Channel { nic, local, remote, rtt, mss_bytes, route: None }
    }
}

impl PeerFacts {
    /// Connects to the first address that accepts this end; a failure to connect is a fact and not an error.
    ///
    /// # Errors
    /// This end's endpoint could not be built, or the user pressed Ctrl-C.
    pub fn visit(
        engine: &EnginePlan,
        topology: &Topology,
        addresses: &[SocketAddr],
        limit: Duration,
    ) -> Outcome<PeerFacts> {
        let with_secret = engine.secret.is_some();
        let nics: Vec<&Nic> = topology.nics.iter().filter(|nic| nic::counts(nic)).collect();
        let channels = Some(CHANNELS_MIN.max(nics.len()));
        let endpoint = crate::bench::endpoint(&EnginePlan { channels, ..engine.clone() }, None)?;
        let mut last = Err(Failure::failed("no address to connect to"));
        for &address in addresses {
            let (dialler, (done, result)) = (endpoint.clone(), mpsc::channel());
            std::thread::spawn(move || done.send(dialler.connect(address, limit)));
            let visit = wait_for(&result, limit)?.map(|peer| query(Link::new(peer, limit.min(ANSWER_LIMIT))));
            let arrived = visit.is_ok();
            let mut visit = visit.map_or_else(|error| Ok(Err(error)), |visit| visit.map(Ok))?;
            if let Ok(visit) = &mut visit {
                visit.look_at_this_host(&nics, limit);
            }
            last = Ok(PeerFacts { address, visit, with_secret });
            if arrived {
                break;
            }
        }
        let _ = endpoint.close(CLOSE_TIMEOUT);
        last
    }

    /// The facts as JSON.
    pub fn json(&self) -> Value {
        let visit = self.visit.as_ref().ok();
        let serving = visit.and_then(|visit| visit.bench.as_ref()?.as_ref().ok());
        let channel = |channel: &Channel| {
            json!({
                "nic": channel.nic,
                "local": channel.local.to_string(),
                "remote": channel.remote.to_string(),
                "rtt_us": channel.rtt.as_micros() as u64,
                "mss_bytes": channel.mss_bytes,
            })
        };
        json!({
            "address": self.address.to_string(),
            "name": visit.map(|visit| &visit.name),
            "same_host": visit.map(|visit| visit.same_host),
            "channels": visit.map(|visit| visit.channels.iter().map(channel).collect::<Vec<_>>()),
            "addresses": serving.map(|serving| serving.addresses().collect::<Vec<_>>()),
            "busy": serving.and_then(|serving| serving.busy.as_ref()),
        })
    }
}

impl Visit {
    /// Adds the facts that this host's NICs and routes give about the channels.
    fn look_at_this_host(&mut self, nics: &[&Nic], limit: Duration) {
        let is_bridge = |nic: &&&Nic| Settings::read(&nic.name, None).bridge;
        self.bridges = nics.iter().filter(is_bridge).map(|nic| nic.name.clone()).collect();
        let mut known = BTreeMap::new();
        for channel in &mut self.channels {
            let (local, remote) = (channel.local.ip(), channel.remote.ip());
            let ask = || route(local, remote, limit);
            channel.route = known.entry((local, remote)).or_insert_with(ask).clone();
        }
    }
}

/// The NIC to which this host's routes and rules lead between these addresses.
fn route(local: IpAddr, remote: IpAddr, limit: Duration) -> Option<String> {
    let (local, remote) = (local.to_string(), remote.to_string());
    let said = tool::output("ip", &["-j", "route", "get", &remote, "from", &local], limit)?;
    let routes: Value = serde_json::from_str(&said).ok()?;
    routes[0]["dev"].as_str().map(str::to_owned)
}

/// Asks the peer for its addresses and closes the connection.
fn query(link: Link) -> Outcome<Visit> {
    let stats = link.peer.stats();
    let answer = link.tell(&Message::Ask { timeout_s: 0.0 }).and_then(|()| link.hear());
    let bench = match answer {
        Ok(Message::Here { endpoints, busy }) => {
            let endpoints = endpoints.into_iter().map(|(_, addresses)| addresses).collect();
            Ok(Serving { endpoints, busy })
        }
        Ok(_) => Err("the answer is not a bench message".to_owned()),
        Err(Failure::Interrupted) => return Err(Failure::Interrupted),
        Err(failure) => Err(failure.first_line()),
    };
    let visit = Visit {
        name: link.peer.name(),
        same_host: link.peer.same_host(),
        channels: stats.channels.iter().map(Channel::from).collect(),
        lost: stats.lost_channels,
        bench: Some(bench),
        bridges: Vec::new(),
    };
    link.tell_last(&Message::Bye);
    Ok(visit)
}

/// The findings about the peer.
pub fn judge(facts: &PeerFacts, topology: &Topology, named: &[String]) -> Vec<Finding> {
    let subject = format!("peer {}", facts.address);
    let visit = match &facts.visit {
        Ok(visit) => visit,
        Err(error) => return vec![not_accepted(subject, facts, error, topology)],
    };
    let mut found = vec![Finding::ok("peer", &subject, format!("{} accepts this end", visit.name))];
    found.extend(visit.bench.as_ref().map(|bench| serving(&subject, bench)));
    found.extend(visit.lost.iter().map(|why| {
        Finding::ok("peer-channel", &subject, why.clone()).warn(
            "check firewall, routes and rp_filter between this NIC and the peer; or leave the NIC out with --nics",
        )
    }));
    found.extend(paths(visit, topology));
    found.extend(detours(visit, topology));
    found.extend(duplicates(visit, topology));
    if !facts.address.ip().is_loopback() {
        found.extend(unpaired(visit, topology, named));
    }
    found
}

fn not_accepted(subject: String, facts: &PeerFacts, error: &ConnectError, topology: &Topology) -> Finding {
    let needs_secret = !facts.with_secret && !facts.address.ip().is_loopback();
    let is_greeting = matches!(
        error,
        ConnectError::Refused { .. } | ConnectError::Invalid { .. } | ConnectError::NoUsableNic { .. }
    );
    let id = if is_greeting { "peer-greeting" } else { "peer-reachable" };
    let found = Finding::ok(id, subject, error.to_string());
    let remote = facts.address.ip();
    let family = if remote.is_ipv4() { "IPv4" } else { "IPv6" };
    let usable = topology.nics.iter().filter(|nic| nic::counts(nic)).flat_map(|nic| &nic.addresses);
    let speaks = usable.clone().any(|address| address.ip.is_ipv4() == remote.is_ipv4());
    match error {
        ConnectError::Unreachable { .. } if !remote.is_loopback() && !speaks && usable.count() > 0 => {
            let evidence = format!("{}; no NIC of this host has an {family} address", found.evidence);
            Finding { evidence, ..found }.fail(format!(
                "use another address of the peer, or give a NIC of this host an {family} address"
            ))
        }
        ConnectError::Refused { reason: RefusalReason::PayloadMismatch, .. } => found.warn(
            "the peer serves over a plugin or devmem TCP: use ferrywire bench connect with --plugin, or with \
                 --transport devmem",
        ),
        ConnectError::Refused { reason: RefusalReason::Secret, .. } | ConnectError::Invalid { .. }
            if needs_secret =>
        {
            found.fail("set FERRYWIRE_SECRET or --secret-file to the peer's secret (serve prints it)")
        }
        _ => found.fail(advice(error).unwrap_or("run ferrywire bench connect -vv for details")),
    }
}

fn serving(subject: &str, bench: &Result<Serving, String>) -> Finding {
    match bench {
        Ok(Serving { busy: Some(whose), .. }) => {
            Finding::ok("peer-bench", subject, format!("busy with a run of {whose}"))
                .at(Level::Note)
                .fix("wait until that run has ended")
        }
        Ok(serving) => {
            let listed: Vec<String> = serving.addresses().map(|address| address.to_string()).collect();
            Finding::ok("peer-bench", subject, format!("a bench serves at {}", listed.join(", ")))
        }
        Err(why) => Finding::ok(
            "peer-bench",
            subject,
            format!("the peer is a ferrywire endpoint, but not a serving bench: {why}"),
        )
        .at(Level::Note)
        .fix("for a measurement, run ferrywire bench serve there"),
    }
}

/// One finding for each pair of addresses that channels use, and one for its MTU.
fn paths(visit: &Visit, topology: &Topology) -> Vec<Finding> {
    let mut ways: Vec<&Channel> = Vec::new();
    for channel in &visit.channels {
        if !ways
            .iter()
            .any(|way| (way.local.ip(), way.remote.ip()) == (channel.local.ip(), channel.remote.ip()))
        {
            ways.push(channel);
        }
    }
    let mut found = Vec::new();
    for Channel { nic, local, remote, rtt, mss_bytes, .. } in ways {
        let evidence = format!(
            "{} to {}: round trip {} us, {mss_bytes} bytes per packet",
            local.ip(),
            remote.ip(),
            rtt.as_micros()
        );
        let way = Finding::ok("path", nic, evidence);
        found.push(if *rtt >= ROUND_TRIP_LONG {
            way.at(Level::Note).fix("use more channels and large socket buffers on long paths: --channels 16")
        } else {
            way
        });
        // Packets within this host do not cross a NIC.
        let outward = |nic: &&Nic| !nic.loopback && !is_ours(topology, remote.ip());
        let mtu = topology.nic(nic).filter(outward).map(|nic| nic.mtu_bytes);
        found.extend(mtu.filter(|_| *mss_bytes > 0).map(|mtu| path_mtu(nic, *mss_bytes, mtu)));
    }
    found
}

fn path_mtu(nic: &str, mss_bytes: u32, mtu: u32) -> Finding {
    let found =
        Finding::ok("path-mtu", nic, format!("packets carry {mss_bytes} bytes, and the NIC's MTU is {mtu}"));
    if mss_bytes + HEADER_BYTES_MAX < mtu {
        found.warn("raise the MTU of the peer's NIC and of all switches between to that of this NIC")
    } else {
        found
    }
}

/// NICs whose connections the peer cannot make. Sockets that dial are bound to their NIC, and work; answers to a peer
/// that dials follow the routes, to another NIC, and the peer's socket does not take them.
fn detours(visit: &Visit, topology: &Topology) -> Vec<Finding> {
    let mut found: BTreeMap<&str, Finding> = BTreeMap::new();
    for Channel { nic, local, remote, route, .. } in &visit.channels {
        let (local, remote) = (local.ip(), remote.ip());
        let Some(route) = route.as_deref().filter(|route| route != nic && *route != "lo") else { continue };
        // Routes to an address for one host need not lead over the NIC that has the address.
        if !host_address(topology, local) {
            let evidence = format!("the route from {local} to {remote} leads over {route}");
            found.entry(nic).or_insert_with(|| {
                Finding::ok("route", nic, evidence).warn(format!(
                    "correct ip route get {remote} from {local}: the peer cannot connect over {nic}, as answers leave over {route}"
                ))
            });
        }
    }
    found.into_values().collect()
}

/// Whether a local address has no subnet.
fn host_address(topology: &Topology, ip: IpAddr) -> bool {
    let longest = if ip.is_ipv4() { 32 } else { 128 };
    let all = topology.nics.iter().flat_map(|nic| &nic.addresses);
    all.filter(|address| address.ip == ip).all(|address| address.prefix_len == longest)
}

/// Addresses that this host and the peer both have. Bridges for containers have equal addresses on many hosts, and
/// addresses without a subnet are those of services.
fn duplicates(visit: &Visit, topology: &Topology) -> Vec<Finding> {
    let serving = visit.bench.iter().flatten().flat_map(Serving::addresses);
    let theirs: Vec<IpAddr> = serving.map(|address| address.ip()).filter(|ip| !ip.is_loopback()).collect();
    // A peer in this network namespace has only addresses of this host.
    if theirs.iter().all(|ip| is_ours(topology, *ip)) {
        return Vec::new();
    }
    let is_candidate = |nic: &&Nic| nic::counts(nic) && !visit.bridges.contains(&nic.name);
    let mut found = Vec::new();
    for nic in topology.nics.iter().filter(is_candidate) {
        let has = |ip: &&IpAddr| nic.addresses.iter().any(|address| address.ip == **ip);
        for ip in theirs.iter().filter(has).filter(|ip| !host_address(topology, **ip)) {
            let evidence = format!("{ip} is an address of this NIC and of the peer");
            found.push(Finding::ok("duplicate-address", &nic.name, evidence).warn(format!(
                "give one of the two another address: packets of this host to {ip} never leave it"
            )));
        }
    }
    found
}

/// Whether a NIC of this host has the address.
fn is_ours(topology: &Topology, ip: IpAddr) -> bool {
    topology.nics.iter().flat_map(|nic| &nic.addresses).any(|address| address.ip == ip)
}

/// NICs of either end that no channel uses.
fn unpaired(visit: &Visit, topology: &Topology, named: &[String]) -> Vec<Finding> {
    // The channels lead to one endpoint of the peer.
    let leads_to =
        |endpoint: &&Vec<SocketAddr>| visit.channels.iter().any(|channel| endpoint.contains(&channel.remote));
    let endpoints = || visit.bench.iter().flatten().flat_map(|serving| &serving.endpoints);
    // An address that both hosts have, such as that of a bridge for containers, says nothing about the peer.
    let says_something = |ip: &IpAddr| !ip.is_loopback() && !is_ours(topology, *ip);
    let all = endpoints().flatten().map(SocketAddr::ip);
    let theirs: BTreeSet<IpAddr> = all.filter(says_something).collect();
    let visited: BTreeSet<IpAddr> =
        endpoints().find(leads_to).into_iter().flatten().map(SocketAddr::ip).collect();
    let alone = theirs.iter().filter(|ip| !visit.channels.iter().any(|channel| channel.remote.ip() == **ip));
    // The finding about lost channels covers NICs in one subnet; a NIC that was not named is left out on purpose.
    let in_subnet = |ip: &IpAddr, wanted: bool| {
        let nics = topology.nics.iter().filter(|nic| nic::counts(nic) && nic.reaches(*ip));
        nics.into_iter().any(|nic| (named.is_empty() || named.contains(&nic.name)) == wanted)
    };
    // No channel leads to an endpoint that was not visited: its addresses only need a NIC in their subnet.
    let has_channels = |ip: &IpAddr| visited.contains(ip) && visit.lost.is_empty();
    let alone = alone.filter(|ip| !in_subnet(ip, false) && (has_channels(ip) || !in_subnet(ip, true)));
    let mut found: Vec<Finding> = alone
        .map(|ip| {
            let evidence = format!("no channel leads from a NIC of this host to the peer's address {ip}");
            let fix =
                format!("to carry data over {ip} too, give a NIC of this host an address in its subnet");
            Finding::ok("peer-nic", format!("peer {}", visit.name), evidence).warn(fix)
        })
        .collect();
    let idle = |nic: &&Nic| {
        let is_asked = if named.is_empty() { nic.device } else { named.contains(&nic.name) };
        let reaches = theirs.iter().any(|ip| nic.reaches(*ip));
        let is_used = visit.channels.iter().any(|channel| channel.nic == nic.name);
        is_asked && nic::counts(nic) && !is_used && !reaches
    };
    found.extend(topology.nics.iter().filter(idle).map(|nic| {
        Finding::ok(
            "own-nic",
            &nic.name,
            "no channel uses the NIC: it shares no subnet with a NIC of the peer",
        )
        .at(Level::Note)
        .fix("to carry data over the NIC too, give it and a NIC of the peer addresses in one subnet")
    }));
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::{self, levels};
    use ferrywire::UnreachableCause;
    use ferrywire_host::topology::Address;

    fn nic(name: &str, last: u8) -> Nic {
        Nic {
            addresses: vec![Address { ip: [10, 0, last, 1].into(), prefix_len: 24 }],
            speed_mbps: None,
            ..finding::nic(name)
        }
    }

    fn host(nics: Vec<Nic>) -> Topology {
        let (gpus, hidden_gpus, nodes, cores, notes) = Default::default();
        Topology { nics, gpus, hidden_gpus, nodes, cores, notes }
    }

    fn there(last: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, last, 2], 7420))
    }

    fn channel(nic: &str, last: u8) -> Channel {
        let local = SocketAddr::from(([10, 0, last, 1], 40000));
        Channel {
            nic: nic.to_owned(),
            local,
            remote: there(last),
            rtt: Duration::from_micros(50),
            mss_bytes: 8948,
            route: Some(nic.to_owned()),
        }
    }

    fn good() -> Visit {
        let serving = Serving { endpoints: vec![vec![there(1), there(2)]], busy: None };
        Visit {
            name: "b".to_owned(),
            same_host: false,
            channels: vec![channel("eth1", 1), channel("eth2", 2), channel("eth1", 1)],
            lost: Vec::new(),
            bench: Some(Ok(serving)),
            bridges: Vec::new(),
        }
    }

    fn facts(visit: Result<Visit, ConnectError>) -> PeerFacts {
        PeerFacts { address: there(1), visit, with_secret: true }
    }

    fn of(visit: Visit, id: &str) -> Vec<Level> {
        levels(&judge(&facts(Ok(visit)), &host(vec![nic("eth1", 1), nic("eth2", 2)]), &[]), id)
    }

    #[test]
    fn a_peer_that_every_nic_reaches_has_nothing_to_fix() {
        let found = judge(&facts(Ok(good())), &host(vec![nic("eth1", 1), nic("eth2", 2)]), &[]);
        assert!(found.iter().all(|finding| finding.level == Level::Ok), "{found:?}");
        assert_eq!(levels(&found, "path").len(), 2, "a finding for each way");
        assert_eq!(levels(&found, "path-mtu").len(), 2);
    }

    #[test]
    fn a_refused_connection_is_a_failure() {
        let address = there(1).to_string();
        // The text names another cause: only the code counts.
        let why = || "refused: both need the same secret".to_owned();
        let refused = |reason| ConnectError::Refused { address: address.clone(), reason, why: why() };
        let wrong = judge(&facts(Err(refused(RefusalReason::Secret))), &host(vec![]), &[]);
        assert_eq!(levels(&wrong, "peer-greeting"), [Level::Fail]);
        assert!(wrong[0].fix.as_ref().is_some_and(|fix| fix.contains("FERRYWIRE_SECRET")), "{wrong:?}");
        let cause = UnreachableCause::ConnectionRefused;
        let none = ConnectError::Unreachable { address: address.clone(), cause, why: why() };
        let none = judge(&facts(Err(none)), &host(vec![]), &[]);
        assert_eq!(levels(&none, "peer-reachable"), [Level::Fail]);
        let lanes = judge(&facts(Err(refused(RefusalReason::PayloadMismatch))), &host(vec![]), &[]);
        assert_eq!(levels(&lanes, "peer-greeting"), [Level::Warn]);
        // Regression: the finding named only a plugin, and devmem TCP refuses with the same code.
        for option in ["--plugin", "--transport devmem"] {
            assert!(lanes[0].fix.as_ref().is_some_and(|fix| fix.contains(option)), "{lanes:?}");
        }
    }

    #[test]
    fn a_path_is_judged_by_its_round_trip_and_packets() {
        let with = |change: &dyn Fn(&mut Channel)| {
            let mut visit = good();
            change(&mut visit.channels[1]);
            visit
        };
        let far = with(&|channel| channel.rtt = Duration::from_millis(10));
        assert_eq!(of(far, "path"), [Level::Ok, Level::Note]);
        let small = with(&|channel| channel.mss_bytes = 1448);
        assert_eq!(of(small.clone(), "path-mtu"), [Level::Ok, Level::Warn]);
        let mut inward = small;
        inward.channels[1].remote.set_ip([10, 0, 2, 1].into());
        assert_eq!(of(inward, "path-mtu"), [Level::Ok], "the other NIC leads only to this host");
        assert_eq!(of(with(&|channel| channel.mss_bytes = 0), "path-mtu"), [Level::Ok]);
    }

    #[test]
    fn nics_without_a_counterpart_are_named() {
        let mut visit = good();
        visit.channels.remove(1);
        let elsewhere = Serving { endpoints: vec![vec![there(1), there(3)]], busy: None };
        let apart = Visit { bench: Some(Ok(elsewhere)), ..visit.clone() };
        assert_eq!(of(apart.clone(), "peer-nic"), [Level::Warn]);
        assert_eq!(of(apart, "own-nic"), [Level::Note]);
        visit.lost = vec!["channel 1 over eth2: no answer".to_owned()];
        assert_eq!(of(visit.clone(), "peer-channel"), [Level::Warn]);
        assert_eq!(of(visit.clone(), "peer-nic"), [], "the NIC is in the subnet");
        // Regression: the finding said that the NIC shares no subnet with the peer.
        assert_eq!(of(visit.clone(), "own-nic"), [], "the NIC is in the subnet");
        visit.lost.clear();
        let both = || host(vec![nic("eth1", 1), nic("eth2", 2)]);
        let named = judge(&facts(Ok(visit)), &both(), &["eth1".to_owned()]);
        assert_eq!(levels(&named, "peer-nic"), [], "the NIC is left out on purpose");
        assert_eq!((of(good(), "peer-nic"), of(good(), "own-nic")), (vec![], vec![]));
    }

    /// Regression: addresses of the endpoints that were not visited, and NICs in their subnets, counted as unpaired.
    #[test]
    fn endpoints_of_other_gpus_need_a_nic_in_their_subnet_and_no_channel() {
        let on_gpus = |last| Visit {
            bench: Some(Ok(Serving { endpoints: vec![vec![there(1)], vec![there(last)]], busy: None })),
            channels: vec![channel("eth1", 1)],
            ..good()
        };
        assert_eq!((of(on_gpus(2), "peer-nic"), of(on_gpus(2), "own-nic")), (vec![], vec![]));
        let apart = (of(on_gpus(3), "peer-nic"), of(on_gpus(3), "own-nic"));
        assert_eq!(apart, (vec![Level::Warn], vec![Level::Note]));
    }

    #[test]
    fn a_route_over_another_nic_is_reported() {
        assert_eq!(of(good(), "route"), []);
        let over = |nic: Option<&str>| {
            let mut visit = good();
            visit.channels[1].route = nic.map(str::to_owned);
            visit
        };
        assert_eq!(of(over(Some("eth1")), "route"), [Level::Warn]);
        assert_eq!((of(over(None), "route"), of(over(Some("lo")), "route")), (vec![], vec![]));
        let mut single = nic("eth2", 2);
        single.addresses[0].prefix_len = 32;
        let found = judge(&facts(Ok(over(Some("eth1")))), &host(vec![nic("eth1", 1), single]), &[]);
        assert_eq!(levels(&found, "route"), []);
    }

    #[test]
    fn addresses_of_both_ends_are_reported_except_those_of_bridges_and_services() {
        let own: SocketAddr = SocketAddr::from(([10, 0, 2, 1], 7420));
        let mut visit = good();
        visit.bench = Some(Ok(Serving { endpoints: vec![vec![there(1), own]], busy: None }));
        assert_eq!(of(visit.clone(), "duplicate-address"), [Level::Warn]);
        let bridge = Visit { bridges: vec!["eth2".to_owned()], ..visit.clone() };
        assert_eq!(of(bridge, "duplicate-address"), []);
        let mut service = nic("eth2", 2);
        service.addresses[0].prefix_len = 32;
        let found = judge(&facts(Ok(visit.clone())), &host(vec![nic("eth1", 1), service]), &[]);
        assert_eq!(levels(&found, "duplicate-address"), []);
        visit.bench = Some(Ok(Serving { endpoints: vec![vec![own]], busy: None }));
        assert_eq!(of(visit, "duplicate-address"), [], "a peer on this host");
    }

    #[test]
    fn a_peer_of_another_address_family_is_reported() {
        let error = ConnectError::Unreachable {
            address: "[fd00::2]:7420".to_owned(),
            cause: UnreachableCause::NoRoute,
            why: "no route".to_owned(),
        };
        let to = PeerFacts { address: "[fd00::2]:7420".parse().expect("an address"), ..facts(Err(error)) };
        let found = judge(&to, &host(vec![nic("eth1", 1)]), &[]);
        assert!(found[0].fix.as_ref().is_some_and(|fix| fix.contains("an IPv6 address")), "{found:?}");
        let mut both = nic("eth1", 1);
        both.addresses.push(Address { ip: "fd00::1".parse().expect("an address"), prefix_len: 64 });
        let found = judge(&to, &host(vec![both]), &[]);
        assert!(found[0].fix.as_ref().is_some_and(|fix| !fix.contains("IPv6")), "{found:?}");
    }

    #[test]
    fn a_peer_that_is_busy_or_no_bench_is_reported() {
        let busy = Ok(Serving { busy: Some("c".to_owned()), ..Serving::default() });
        assert_eq!(of(Visit { bench: Some(busy), ..good() }, "peer-bench"), [Level::Note]);
        assert_eq!(
            of(Visit { bench: Some(Err("silent".to_owned())), ..good() }, "peer-bench"),
            [Level::Note]
        );
        assert_eq!(of(good(), "peer-bench"), [Level::Ok]);
    }
}
