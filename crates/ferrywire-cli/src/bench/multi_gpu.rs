//! `--gpus`: several endpoints of one process, one for each GPU, in one run.
//!
//! ```text
//!   connect: endpoint of GPU 0 ── Ask, Here ──▶ serve: endpoint of GPU 0
//!            endpoint of each GPU ── a peer and a thread for each pair of GPUs ──▶ endpoint of each GPU
//! ```
//!
//! Every pair is a peer of the run, as in an incast: the serving end's [`super::barrier`] starts and ends all of them
//! together. The first pair reports.
//! Read next: [`super::connect`], the work of each pair; [`super::serve`].

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use ferrywire::orchestrator::Target;
use ferrywire::{Builder, ConnectError, Endpoint, Error, Orchestrator, Peer};
use ferrywire_host::topology::Topology;
use ferrywire_net::beyond_this_host;

use super::connect::{self, Listeners, Part};
use super::layout;
use super::link::{CLOSE_TIMEOUT, Link, Stop};
use super::places::{self, Place, Places};
use super::protocol::{Message, PEERS_MAX, Run};
use super::secret_file;
use crate::args::Pattern;
use crate::exit::{self, Failure, Outcome};
use crate::memory::{Home, Memory};
use crate::nics;
use crate::plan::{ConnectPlan, EnginePlan};
use crate::transport::{DevmemUse, PluginUse};

/// The endpoints of this process, and the memory of each.
pub struct MultiGpu {
    /// The endpoints, first one for each GPU, in their order.
    orchestrator: Arc<Orchestrator>,
    homes: Vec<Home>,
    gpus: Vec<u32>,
    /// NICs and cores of each GPU's endpoint.
    places: Vec<Place>,
    /// Every NIC that a GPU of this host uses, if it is known.
    nics: Vec<String>,
    /// Messages about choices that may be slower.
    notes: Vec<String>,
    setting: Setting,
}

/// What the endpoints share with others: the host's cores, and whether loopback is used.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// The number of endpoints that share the cores of this host, those of other processes included.
    pub on_host: usize,
    /// Whether both ends are on this host and connect over loopback.
    pub on_loopback: bool,
}

/// A pair of GPUs, one at each end.
#[derive(Clone, Debug)]
pub struct Pair {
    /// Index of this end's endpoint.
    pub endpoint: usize,
    /// Index of this end's GPU among those of this process.
    pub home: usize,
    /// This end's GPU.
    pub gpu: u32,
    /// The other end's GPU.
    pub peer_gpu: u32,
    /// Addresses of the other end's endpoint.
    pub addresses: Vec<SocketAddr>,
}

impl Setting {
    /// The setting of a process that has the host's cores to itself.
    pub fn alone(plan: &EnginePlan, addresses: &[SocketAddr]) -> Setting {
        let on_loopback = !addresses.is_empty() && addresses.iter().all(|address| address.ip().is_loopback());
        Setting { on_host: plan.gpus.as_ref().map_or(1, Vec::len), on_loopback }
    }
}

/// The endpoints of the other end: GPU and addresses.
type There = [(u32, Vec<SocketAddr>)];

impl MultiGpu {
    /// Opens the GPUs and builds an endpoint for each. With an address to listen on, the first endpoint listens there,
    /// and each further one on the next port.
    pub fn start(
        plan: &EnginePlan,
        memory: Memory,
        listen: Option<SocketAddr>,
        timeout: Duration,
        setting: Setting,
    ) -> Outcome<MultiGpu> {
        let gpus = plan.gpus.clone().unwrap_or_default();
        nics::check_map(&plan.map, &gpus)?;
        let homes: Vec<Home> = gpus.iter().map(|gpu| memory.on(*gpu).open()).collect::<Outcome<_>>()?;
        let Places { places, nics, notes } = places::of_gpus(plan, memory, &gpus, setting)?;
        let builders = gpus.iter().zip(&places).enumerate().map(|(index, (gpu, place))| {
            let name = format!("the endpoint of GPU {gpu}");
            let listen = listen.map(|address| behind(address, index)).transpose()?;
            Ok((name, builder(plan, memory.on(*gpu), place, listen, setting)?))
        });
        let orchestrator =
            Orchestrator::start(builders.collect::<Outcome<_>>()?, timeout).map_err(start_failed)?;
        Ok(MultiGpu { orchestrator: Arc::new(orchestrator), homes, gpus, places, nics, notes, setting })
    }

    /// Takes the messages out, so that they are reported once.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// Prints the notes, and removes them so that they are printed once.
    pub fn print_notes(&mut self) {
        self.take_notes().iter().for_each(|note| exit::note(&format!("note: {note}")));
    }

    /// The memory of each GPU.
    pub fn homes(&self) -> &[Home] {
        &self.homes
    }

    /// All endpoints, also those that were added for detours.
    pub fn all_endpoints(&self) -> &[Endpoint] {
        self.orchestrator.endpoints()
    }

    /// The endpoints, with the index of their GPU.
    pub fn endpoints(&self) -> impl Iterator<Item = (u32, &Endpoint)> {
        self.gpus.iter().copied().zip(self.orchestrator.endpoints())
    }

    /// The endpoint that the other end contacts first.
    pub fn lead(&self) -> &Endpoint {
        &self.orchestrator.endpoints()[0]
    }

    /// Closes all endpoints.
    pub fn close(&self) {
        let _ = self.orchestrator.close(CLOSE_TIMEOUT);
    }

    /// Connects all targets at once; Ctrl-C ends the wait. An error of the engine names its target.
    pub fn connect(
        &self,
        targets: Vec<Target>,
        timeout: Duration,
    ) -> Outcome<Result<Vec<Peer>, ConnectError>> {
        let (done, result) = mpsc::channel();
        let orchestrator = self.orchestrator.clone();
        thread::spawn(move || done.send(orchestrator.connect(&targets, timeout)));
        connect::wait_for(&result, timeout)
    }
}

/// An endpoint that cannot be built as requested is bad usage.
fn start_failed(error: Error) -> Failure {
    match &error {
        Error::Phase { error: inner, .. } if matches!(**inner, Error::Invalid { .. }) => {
            Failure::Usage(error.to_string())
        }
        _ => error.into(),
    }
}

/// The builder of one GPU's endpoint.
fn builder(
    plan: &EnginePlan,
    memory: Memory,
    place: &Place,
    listen: Option<SocketAddr>,
    setting: Setting,
) -> Outcome<Builder> {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let share = (cores / setting.on_host.max(1)).max(1);
    let share = if place.cores.is_empty() { share } else { share.min(place.cores.len()) };
    let threads = plan.threads.or(Some(share));
    let gpu = memory.gpu();
    let plugin = plan.plugin.as_ref().map(|plugin| PluginUse { gpu, ..plugin.clone() });
    let devmem = plan.devmem.as_ref().map(|devmem| DevmemUse { gpu, ..devmem.clone() });
    let plan = EnginePlan { nics: place.nics.clone(), threads, plugin, devmem, ..plan.clone() };
    Ok(super::builder(&plan, listen)?.cpu_affinity(place.cores.iter().copied()))
}

/// The listen address of the endpoint with this index.
fn behind(first: SocketAddr, index: usize) -> Outcome<SocketAddr> {
    let port = match first.port() {
        0 => Some(0),
        port => port.checked_add(index as u16),
    };
    let none = || {
        Failure::Usage(format!(
            "--listen {first}: each endpoint needs a port above it, up to 65535: use a smaller port"
        ))
    };
    Ok(SocketAddr::new(first.ip(), port.ok_or_else(none)?))
}

/// Connects all pairs and goes through the sizes. `tell` receives news, `stage` the name of each stage that begins.
pub fn measure(plan: &ConnectPlan, (tell, stage): Listeners<'_>) -> Outcome {
    let start = Instant::now();
    let setting = Setting::alone(&plan.engine, &plan.addresses);
    let mut multi_gpu = MultiGpu::start(&plan.engine, plan.run.memory, None, plan.timeout, setting)?;
    multi_gpu.print_notes();
    stage("while connecting");
    let lead = Link::new(connect::dial(multi_gpu.lead(), plan)?, plan.timeout);
    let outcome = with_lead(plan, &mut multi_gpu, lead, start, (tell, stage));
    stage("while closing");
    multi_gpu.close();
    outcome
}

fn with_lead(
    plan: &ConnectPlan,
    multi_gpu: &mut MultiGpu,
    lead: Link,
    start: Instant,
    listeners: Listeners<'_>,
) -> Outcome {
    let prepared = ask(&lead).and_then(|there| {
        let mut pairs = pairs(plan.run.pattern, &multi_gpu.gpus, &there)?;
        pairs.iter().try_for_each(|pair| reachable(pair.peer_gpu, &pair.addresses))?;
        multi_gpu.take_detours(plan, &mut pairs)?;
        multi_gpu.print_notes();
        let run = Run { peers: pairs.len(), ..plan.run.clone() };
        let region_bytes = layout::region_bytes(&run);
        Home::check_room_of_all(pairs.iter().map(|pair| (&multi_gpu.homes[pair.home], region_bytes)))?;
        let target = |pair: &Pair| Target { endpoint: pair.endpoint, addresses: pair.addresses.clone() };
        let peers = multi_gpu.connect(pairs.iter().skip(1).map(target).collect(), plan.timeout)??;
        Ok((pairs, run, peers))
    });
    match prepared {
        Ok((pairs, run, peers)) => {
            let _secret = secret_file::follow(&plan.engine, multi_gpu.all_endpoints().to_vec())?;
            let others = peers.into_iter().map(|peer| Link::new(peer, plan.timeout));
            let stop = Stop::default();
            let links = std::iter::once(lead).chain(others).map(|link| link.of_run(&stop));
            let links: Vec<Link> = links.collect();
            all_pairs(plan, multi_gpu, (&pairs, &run, &links), (start, &stop), listeners)
        }
        Err(failure) => {
            lead.tell_last(&Message::failed(&failure));
            Err(failure)
        }
    }
}

/// Asks the other end for its endpoints.
fn ask(lead: &Link) -> Outcome<Vec<(u32, Vec<SocketAddr>)>> {
    lead.tell(&Message::Ask { timeout_s: lead.timeout().as_secs_f64() })?;
    match lead.hear()? {
        Message::Here { endpoints, .. } if !endpoints.is_empty() => Ok(endpoints),
        other => Err(lead.unexpected(&other, "a list of endpoints")),
    }
}

impl MultiGpu {
    /// Adds a further endpoint for a GPU whose NICs reach only their own rail, on a NIC that reaches the other GPU's
    /// rail.
    pub fn take_detours(&mut self, plan: &ConnectPlan, pairs: &mut [Pair]) -> Outcome {
        if self.setting.on_loopback || self.places.iter().all(|place| place.nics.is_empty()) {
            return Ok(());
        }
        let topology = Topology::detect();
        let mut detours: Vec<(usize, String)> = Vec::new();
        for pair in pairs {
            let Some(nic) = self.detour(&topology, pair) else { continue };
            let wanted = (pair.home, nic);
            let at = detours.iter().position(|known| *known == wanted).unwrap_or_else(|| {
                let (own, gpu) = (self.places[pair.home].nics.join(", "), pair.gpu);
                let (peer_gpu, nic) = (pair.peer_gpu, &wanted.1);
                self.notes.push(format!(
                    "GPU {gpu}: {own} does not reach GPU {peer_gpu} of the peer; uses {nic}, on that GPU's rail"
                ));
                detours.push(wanted);
                detours.len() - 1
            });
            pair.endpoint = self.gpus.len() + at;
        }
        let builders = detours.iter().map(|(home, nic)| {
            let name = format!("the endpoint of GPU {} on {nic}", self.gpus[*home]);
            let memory = plan.run.memory.on(self.gpus[*home]);
            let place = Place { nics: vec![nic.clone()], ..self.places[*home].clone() };
            Ok((name, builder(&plan.engine, memory, &place, None, self.setting)?))
        });
        let builders = builders.collect::<Outcome<Vec<_>>>()?;
        match Arc::get_mut(&mut self.orchestrator) {
            Some(orchestrator) => orchestrator.extend(builders, plan.timeout).map_err(start_failed),
            None => Err(Failure::failed("internal error, please report: the endpoints are in use")),
        }
    }

    /// The NIC for a detour, if the GPU's own NICs reach none of the addresses and another NIC does.
    fn detour(&self, topology: &Topology, pair: &Pair) -> Option<String> {
        let reaches = |name: &String| {
            let nic = topology.nic(name).filter(|nic| nic.up);
            nic.is_some_and(|nic| pair.addresses.iter().any(|address| nic.reaches(address.ip())))
        };
        if self.places[pair.home].nics.iter().any(reaches) {
            return None;
        }
        self.nics.iter().find(|name| reaches(name)).cloned()
    }
}

/// Refuses a GPU of the other end that does not listen.
pub fn reachable(gpu: u32, addresses: &[SocketAddr]) -> Outcome {
    match addresses {
        [] => Err(Failure::failed(format!(
            "the NIC of GPU {gpu} of the peer is down or has no address: bring it up, or name another NIC with --gpu-nics at the peer"
        ))),
        _ => Ok(()),
    }
}

/// The pairs of a pattern. The first pair is of the two first endpoints, which are already connected.
fn pairs(pattern: Pattern, here: &[u32], there: &There) -> Outcome<Vec<Pair>> {
    let nics = ferrywire_sys::nics::addresses().unwrap_or_default();
    let pair = |from: usize, to: usize| Pair {
        endpoint: from,
        home: from,
        gpu: here[from],
        peer_gpu: there[to].0,
        addresses: beyond_this_host(&nics, &there[to].1),
    };
    let pairs: Vec<Pair> = match pattern {
        Pattern::AllToAll => {
            (0..here.len()).flat_map(|from| (0..there.len()).map(move |to| (from, to))).collect::<Vec<_>>()
        }
        Pattern::Incast => (0..here.len()).map(|from| (from, 0)).collect(),
        _ if here.len() != there.len() => {
            return Err(Failure::failed(format!(
                "this end has {}, the peer {}: name equally many GPUs with --gpus at both ends",
                counted(here.len()),
                counted(there.len())
            )));
        }
        _ => (0..here.len()).map(|both| (both, both)).collect(),
    }
    .into_iter()
    .map(|(from, to)| pair(from, to))
    .collect();
    match pairs.len() {
        0..=PEERS_MAX => Ok(pairs),
        many => Err(Failure::Usage(format!(
            "the run has {many} pairs of GPUs, at most {PEERS_MAX} are possible: name fewer GPUs with --gpus"
        ))),
    }
}

fn counted(endpoints: usize) -> String {
    format!("{endpoints} endpoint{}", if endpoints == 1 { "" } else { "s" })
}

/// Runs all conversations, each in a thread; the first one, which reports, in this thread.
fn all_pairs(
    plan: &ConnectPlan,
    multi_gpu: &MultiGpu,
    (pairs, run, links): (&[Pair], &Run, &[Link]),
    (start, stop): (Instant, &Stop),
    listeners: Listeners<'_>,
) -> Outcome {
    let numbers: Vec<(u32, u32)> = pairs.iter().map(|pair| (pair.gpu, pair.peer_gpu)).collect();
    let failed: Mutex<Option<Failure>> = Mutex::default();
    let take_part = |number: usize, listeners: Listeners<'_>| {
        let (pair, link) = (&pairs[number], &links[number]);
        let endpoint = &multi_gpu.orchestrator.endpoints()[pair.endpoint];
        let part = Part::of_peer(number, run, endpoint, &multi_gpu.homes[pair.home], &numbers);
        let converse = || connect::converse(plan, &part, link, start, listeners);
        let outcome = exit::guarded(converse);
        if let Err(failure) = &outcome {
            // A failure that another peer reported is not passed on: the other pairs detect the cause themselves.
            if !is_hearsay(failure) {
                stop.because(&named(failure, pair).first_line());
            }
            let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
            // The failure of the pair that met it replaces failures that were only reported.
            let is_known = failed.as_ref().is_some_and(|known| !is_hearsay(known) || is_hearsay(failure));
            if !is_known {
                *failed = Some(named(failure, pair));
            }
        }
        connect::take_leave(link, &outcome);
    };
    thread::scope(|scope| {
        for number in 1..pairs.len() {
            let take_part = &take_part;
            let body = move || take_part(number, (&mut |_| {}, &|_| {}));
            if let Err(error) =
                thread::Builder::new().name(format!("pair-{number}")).spawn_scoped(scope, body)
            {
                let failure = Failure::failed(format!("cannot start a thread: {error}"));
                failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
                break;
            }
        }
        take_part(0, listeners);
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

fn is_hearsay(failure: &Failure) -> bool {
    matches!(failure, Failure::Hearsay(_))
}

fn named(failure: &Failure, pair: &Pair) -> Failure {
    let name = format!("GPU {} to GPU {}", pair.gpu, pair.peer_gpu);
    match failure {
        Failure::Failed(_) | Failure::Busy(_) | Failure::AddressInUse(_) => {
            failure.clone().map_message(|why| format!("{name}: {why}"))
        }
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there(count: u32) -> Vec<(u32, Vec<SocketAddr>)> {
        (0..count).map(|gpu| (gpu + 10, Vec::new())).collect()
    }

    fn numbers(pattern: Pattern, here: &[u32], count: u32) -> Outcome<Vec<(usize, u32)>> {
        Ok(pairs(pattern, here, &there(count))?.iter().map(|pair| (pair.endpoint, pair.peer_gpu)).collect())
    }

    #[test]
    fn patterns_join_the_right_gpus() {
        assert_eq!(numbers(Pattern::Unidir, &[4, 5], 2), Ok(vec![(0, 10), (1, 11)]));
        assert_eq!(numbers(Pattern::AllToAll, &[4, 5], 3).map(|pairs| pairs.len()), Ok(6));
        assert_eq!(numbers(Pattern::AllToAll, &[4, 5], 3).map(|pairs| pairs[0]), Ok((0, 10)));
        assert_eq!(numbers(Pattern::Incast, &[4, 5], 3), Ok(vec![(0, 10), (1, 10)]));
        let said = numbers(Pattern::Bidir, &[4, 5], 1).expect_err("not as many").message();
        assert!(said.contains("2 endpoints") && said.contains("the peer 1 endpoint:"), "{said}");
    }

    /// Regression: the loopback address was dialled too, led to this host, and its error was reported.
    #[test]
    fn a_gpu_of_another_host_is_not_sought_at_addresses_of_this_host() {
        let [own, far] = [[127, 0, 0, 1], [203, 0, 113, 1]].map(|ip| SocketAddr::from((ip, 7420)));
        for (listens, dialled) in [(vec![own, far], vec![far]), (vec![own], vec![own])] {
            let pairs = pairs(Pattern::Unidir, &[4], &[(10, listens)]);
            assert_eq!(pairs.map(|pairs| pairs[0].addresses.clone()), Ok(dialled));
        }
    }

    #[test]
    fn a_gpu_that_listens_nowhere_is_the_other_ends_matter() {
        assert_eq!(reachable(2, &[([127, 0, 0, 1], 1).into()]), Ok(()));
        let said = reachable(2, &[]).expect_err("nowhere").message();
        assert!(said.starts_with("the NIC of GPU 2 of the peer is down or has no address"), "{said}");
    }

    #[test]
    fn ports_follow_one_another() {
        let first: SocketAddr = ([0, 0, 0, 0], 65534).into();
        assert_eq!(behind(first, 1).map(|address| address.port()), Ok(65535));
        assert!(behind(first, 2).is_err());
        assert_eq!(behind(([0, 0, 0, 0], 0).into(), 5).map(|address| address.port()), Ok(0));
    }
}
