//! Plans applied to real endpoints: two hosts of four NICs whose subnets do not meet, with eight simulated GPUs each.
//!
//! The hosts are network namespaces with the NICs of recorded hosts, by name and address; one process plays both.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::process::{self, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ferrywire::orchestrator::Target;
use ferrywire::{Builder, Endpoint, Orchestrator, Peer, Region};
use ferrywire_host::topology::{Plan, Route, by_subnet, routes};
use ferrywire_sys::nics;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::mesh::other_host;
use crate::{named, plan, topology};

const LIMIT: Duration = Duration::from_secs(120);
const RAILS: u32 = 4;

/// Two namespaces joined by a veth pair per rail, removed when dropped.
struct Hosts {
    here: String,
    there: String,
}

impl Hosts {
    fn new() -> Option<Hosts> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let id = format!("{}-{}", process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let hosts = Hosts { here: format!("fw-here-{id}"), there: format!("fw-there-{id}") };
        let made = hosts.make();
        if made.is_none() {
            println!("SKIPPED: needs root and iproute2");
        }
        made.map(|()| {
            hosts.wait_for_links();
            hosts
        })
    }

    /// A link comes up a moment after it was switched on, and NICs without a link are not announced to peers.
    fn wait_for_links(&self) {
        let up = || nics::addresses().expect("they can be listed").iter().filter(|nic| nic.up).count();
        for name in [&self.here, &self.there] {
            let until = Instant::now() + LIMIT;
            while within(name, up) < RAILS as usize {
                assert!(Instant::now() < until, "the links of {name} never came up");
                thread::sleep(Duration::from_millis(5));
            }
        }
    }

    fn make(&self) -> Option<()> {
        let (here, there) = (&self.here, &self.there);
        ip(&format!("netns add {here}"))?;
        ip(&format!("netns add {there}"))?;
        for rail in 1..=RAILS {
            ip(&format!("-n {here} link add eth{rail} type veth peer name eth{rail} netns {there}"))?;
            for (name, last) in [(here, 2), (there, 3)] {
                ip(&format!("-n {name} addr add 10.0.{rail}.{last}/24 dev eth{rail}"))?;
                ip(&format!("-n {name} link set eth{rail} up"))?;
            }
        }
        Some(())
    }

    /// Bytes and packets that each NIC has sent, as the kernel counts them.
    fn sent(name: &str) -> BTreeMap<String, (u64, u64)> {
        let table = within(name, || fs::read_to_string("/proc/thread-self/net/dev")).expect("counters");
        let line = |line: &str| -> Option<(String, (u64, u64))> {
            let (nic, numbers) = line.split_once(':')?;
            let mut numbers = numbers.split_whitespace().skip(8).map(str::parse);
            Some((nic.trim().to_owned(), (numbers.next()?.ok()?, numbers.next()?.ok()?)))
        };
        table.lines().filter_map(line).collect()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        ip(&format!("netns del {}", self.here));
        ip(&format!("netns del {}", self.there));
    }
}

fn ip(arguments: &str) -> Option<()> {
    let mut command = Command::new("ip");
    command.args(arguments.split(' ')).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success()).then_some(())
}

/// Runs a closure on a thread inside a namespace; threads and sockets made there stay there.
fn within<T: Send>(name: &str, action: impl FnOnce() -> T + Send) -> T {
    let inside = || {
        let namespace = File::open(format!("/run/netns/{name}")).expect("`ip netns add` has made it");
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).expect("we are root");
        action()
    };
    thread::scope(|scope| scope.spawn(inside).join().expect("it does not panic"))
}

/// The plans of both hosts, and the routes from one to the other.
fn plans() -> (Plan, Plan, Vec<Route>) {
    let (here, there) = (named("a3-high"), topology(&other_host()));
    let plans = (plan(&here), plan(&there));
    let routes = routes(&plans.0, &plans.1, by_subnet(&here, &there)).expect("every pair has a route");
    (plans.0, plans.1, routes)
}

fn builder(channels: usize) -> Builder {
    Endpoint::builder().secret("of the rails").threads(1).channels(channels)
}

/// The accepting side: an endpoint per GPU, on its planned NICs.
fn listening(host: &str, plan: &Plan, channels: usize) -> Orchestrator {
    let endpoint = |gpu: &ferrywire_host::topology::GpuPlan| {
        let builder = builder(channels).listen(([0, 0, 0, 0], 0).into()).nics(gpu.nics.iter().cloned());
        (format!("GPU {}", gpu.gpu), builder)
    };
    within(host, || Orchestrator::start(plan.gpus.iter().map(endpoint).collect(), LIMIT)).expect("they start")
}

/// The connecting side: an endpoint per GPU and NIC of its routes, and the endpoint of each route.
fn dialling(host: &str, routes: &[Route], channels: usize) -> (Orchestrator, Vec<usize>) {
    let mut ends: Vec<(u32, &str)> = Vec::new();
    let mut of_route = Vec::new();
    for route in routes {
        let wanted = (route.source_gpu, route.links[0].0.as_str());
        of_route.push(ends.iter().position(|known| *known == wanted).unwrap_or_else(|| {
            ends.push(wanted);
            ends.len() - 1
        }));
    }
    let builders =
        ends.iter().map(|(gpu, nic)| (format!("GPU {gpu} on {nic}"), builder(channels).nics([*nic])));
    (within(host, || Orchestrator::start(builders.collect(), LIMIT)).expect("they start"), of_route)
}

/// Connects the ends of all routes; returns the peers in the order of the routes, and the accepted peers by GPU.
fn connect(
    hosts: &Hosts,
    (here, of_route): &(Orchestrator, Vec<usize>),
    there: &Orchestrator,
    routes: &[Route],
) -> (Vec<Peer>, Vec<Vec<Peer>>) {
    let targets: Vec<Target> = within(&hosts.there, || {
        let address = |gpu: u32| there.endpoints()[gpu as usize].reachable_addresses();
        let target = |(route, endpoint): (&Route, &usize)| Target {
            endpoint: *endpoint,
            addresses: address(route.target_gpu),
        };
        routes.iter().zip(of_route).map(target).collect()
    });
    thread::scope(|scope| {
        let peers_of_each = routes.len() / there.endpoints().len();
        let accepting = scope.spawn(move || there.accept(peers_of_each, LIMIT).expect("all come"));
        let peers = within(&hosts.here, || here.connect(&targets, LIMIT)).expect("all connect");
        (peers, accepting.join().expect("it accepts"))
    })
}

/// Byte `at` of GPU `gpu`'s message.
fn pattern(gpu: usize, at: usize) -> u8 {
    (at * 31 + gpu * 7 + at / 251) as u8
}

#[test]
fn eight_gpus_move_data_on_their_own_rails() {
    let Some(hosts) = Hosts::new() else { return };
    let (plan_here, plan_there, routes) = plans();
    // GPU i to GPU i.
    let routes: Vec<Route> =
        routes.into_iter().filter(|route| route.source_gpu == route.target_gpu).collect();
    let there = listening(&hosts.there, &plan_there, 8);
    let dialling = dialling(&hosts.here, &routes, 8);
    let (peers, accepted) = connect(&hosts, &dialling, &there, &routes);
    let here = dialling.0;
    // NICs get different amounts, so that bytes on a wrong NIC show.
    let bytes = |gpu: usize| (gpu + 1) << 20;
    let region = |end: &Orchestrator, first: usize| -> Vec<Region> {
        let register =
            move |gpu: usize, endpoint: &Endpoint| endpoint.alloc_sim((first + gpu) as u32, bytes(gpu));
        end.each("registering", LIMIT, register).expect("memory")
    };
    let (sources, targets) = (region(&here, 0), region(&there, 8));
    for (gpu, source) in sources.iter().enumerate() {
        let data: Vec<u8> = (0..bytes(gpu)).map(|at| pattern(gpu, at)).collect();
        source.write_at(0, &data).expect("it lies inside");
    }
    let before = Hosts::sent(&hosts.here);
    let write = |(gpu, peer): (usize, &Peer)| {
        peer.write(&sources[gpu], 0, &targets[gpu].descriptor(), 0, bytes(gpu) as u64).expect("a transfer")
    };
    let transfers: Vec<_> = peers.iter().enumerate().map(write).collect();
    for (gpu, transfer) in transfers.iter().enumerate() {
        assert_eq!(transfer.wait(LIMIT), Ok(bytes(gpu) as u64), "GPU {gpu}");
    }
    let after = Hosts::sent(&hosts.here);
    for (gpu, target) in targets.iter().enumerate() {
        let mut found = vec![0; bytes(gpu)];
        target.read_at(0, &mut found).expect("it lies inside");
        let wrong = found.iter().enumerate().find(|(at, byte)| **byte != pattern(gpu, *at));
        assert_eq!(wrong, None, "GPU {gpu}");
    }
    let mut ours = BTreeMap::<String, u64>::new();
    for (gpu, peer) in peers.iter().enumerate() {
        let channels = peer.stats().channels;
        assert_eq!(channels.len(), 8, "GPU {gpu}");
        for channel in channels {
            assert_eq!(channel.nic, plan_here.gpus[gpu].nics[0], "GPU {gpu}");
            *ours.entry(channel.nic).or_default() += channel.sent_bytes;
        }
        assert!(
            accepted[gpu][0]
                .stats()
                .channels
                .iter()
                .all(|channel| channel.nic == plan_there.gpus[gpu].nics[0])
        );
    }
    for (at, (nic, ours)) in ours.into_iter().enumerate() {
        let (bytes_now, packets_now) = after[&nic];
        let (bytes_before, packets_before) = before[&nic];
        // Ethernet, IPv4, TCP and its timestamps; the kernel counts a packet once if it did not segment it.
        let headers = (packets_now - packets_before) * (14 + 20 + 20 + 12);
        let kernels = bytes_now - bytes_before - headers;
        println!("{nic}: {ours} bytes by our count, {kernels} by the kernel's, without headers");
        let share = (bytes(2 * at) + bytes(2 * at + 1)) as u64;
        let near = |bytes: u64| (share..share + share / 100).contains(&bytes);
        assert!(near(ours) && near(kernels), "{nic}: {share}, {ours}, {kernels}");
    }
    here.close(LIMIT).expect("they close");
    there.close(LIMIT).expect("they close");
}

#[test]
fn in_a_mesh_each_pair_meets_on_the_targets_rail() {
    let Some(hosts) = Hosts::new() else { return };
    let (_, plan_there, routes) = plans();
    let there = listening(&hosts.there, &plan_there, 1);
    let dialling = dialling(&hosts.here, &routes, 1);
    let (peers, _accepted) = connect(&hosts, &dialling, &there, &routes);
    let (here, of_route) = dialling;
    assert_eq!(peers.len(), 64);
    let targets =
        there.each("registering", LIMIT, |_, endpoint| endpoint.alloc_host(8 << 10)).expect("memory");
    for ((route, peer), endpoint) in routes.iter().zip(&peers).zip(of_route) {
        let (from, to) = (route.source_gpu as usize, route.target_gpu as usize);
        let source = here.endpoints()[endpoint].register(vec![from as u8 + 1; 1 << 10]).expect("memory");
        let transfer = peer.write(&source, 0, &targets[to].descriptor(), (from as u64) << 10, 1 << 10);
        assert_eq!(transfer.expect("a transfer").wait(LIMIT), Ok(1 << 10));
        let channels = peer.stats().channels;
        let nics: Vec<&str> = channels.iter().map(|channel| channel.nic.as_str()).collect();
        assert_eq!(nics, [route.links[0].0.as_str()], "{route:?}");
    }
    for target in &targets {
        let mut found = vec![0; 8 << 10];
        target.read_at(0, &mut found).expect("it lies inside");
        assert!(found.iter().enumerate().all(|(at, byte)| usize::from(*byte) == at / 1024 + 1));
    }
    here.close(LIMIT).expect("they close");
    there.close(LIMIT).expect("they close");
}

#[test]
fn an_endpoint_keeps_to_the_nics_and_cores_of_its_gpu() {
    let mut host = named("small-vm");
    host.gpus.push(ferrywire_host::topology::Gpu::default());
    let mut planned = plan(&host).gpus.remove(0);
    let allowed = ferrywire_sys::affinity::allowed_cores().expect("cores");
    planned.cpus = [*allowed.last().expect("a core") as u32].into_iter().collect();
    let endpoint = planned.configure(Endpoint::builder()).build().expect("it is built");
    let config = endpoint.config();
    assert_eq!(
        (config.nics.join("+"), config.label.as_str(), config.threads),
        ("eth0+eth1".into(), "GPU 0", 1)
    );
    planned.cpus = Default::default();
    assert!(planned.configure(Endpoint::builder()).build().is_ok());
    planned.cpus = [60_000].into_iter().collect();
    let error = planned.configure(Endpoint::builder()).build().expect_err("no such core").to_string();
    assert!(error.contains("keep to the cores [60000]"), "{error}");
}
