//! The listening end: takes runs from peers until it is stopped.
//!
//! Each peer gets a thread; the [`RunSlot`] admits one run at a time, with all its peers. A failed run
//! is one line on standard error, and serving goes on.

use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use ferrywire::{ConnectError, Encryption, Endpoint, Peer, RemoteRegion};

use super::barrier::Barrier;
use super::host::Host;
use super::isolated::message::{Message as ToParent, Sender as Pipe};
use super::layout;
use super::link::{CLOSE_TIMEOUT, Link, RUN_END_TIMEOUT, SLICE};
use super::multi_gpu::{MultiGpu, Setting};
use super::protocol::{self, Hello, Message, Run, SECONDS_MAX, Side};
use super::run_slot::{self, ActiveRun, Ended, RunSlot};
use super::session::Session;
use super::{parent, places, secret_file};
use crate::args::{Inject, Pattern};
use crate::exit::{self, Failure, Outcome};
use crate::memory::{Home, Local, Memory};
use crate::plan::{EnginePlan, ServePlan};
use crate::sanitize;
use crate::sys;
use crate::transport::PluginUse;

/// Time beyond its `--timeout` that the first peer of a run has to greet, because it connects the other peers first.
const CONNECT_GRACE: Duration = Duration::from_secs(2);
/// Longest time for the endpoints to start.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Where the serving end reports events. With a plugin it works in a child of the process that prints.
#[derive(Clone)]
pub enum Voice {
    /// This process prints.
    Own,
    /// The parent process prints.
    Parent(Arc<Pipe>),
}

impl Voice {
    fn listening(&self, plan: &ServePlan, endpoint: &Endpoint) {
        let (addresses, reachable) = (endpoint.listen_addresses(), endpoint.reachable_addresses());
        match self {
            Voice::Own => announce(plan, &addresses, &reachable),
            Voice::Parent(pipe) => pipe.send(&ToParent::Listening { addresses, reachable }),
        }
    }

    fn run_begins(&self, name: &str) {
        if let Voice::Parent(pipe) = self {
            pipe.send(&ToParent::RunBegins(name.to_owned()));
        }
    }

    fn run_over(&self, once: bool, Ended { name, what, outcome }: &Ended) {
        let (name, what, outcome) = (name.clone(), what.clone(), outcome.clone());
        match self {
            Voice::Own => tell_run_over(once, &name, &what, &outcome),
            Voice::Parent(pipe) => pipe.send(&ToParent::RunOver { name, what, outcome }),
        }
    }
}

/// Serves until stopped, or with `--once` until the first run is over.
pub fn run(mut plan: ServePlan) -> Outcome {
    plan.engine = on_nics_of_gpu(&plan, true)?;
    match (&plan.engine.plugin, parent::pipe()) {
        (Some(_), _) => super::isolated::serve::run(plan),
        (None, Some(pipe)) => serve(plan, &Voice::Parent(pipe)),
        (None, None) => serve(plan, &Voice::Own),
    }
}

/// Serves in this process.
pub fn serve(plan: ServePlan, voice: &Voice) -> Outcome {
    if plan.child {
        sys::die_with_parent();
    }
    // Memory and GPUs that the command line names are opened now and kept while this end serves.
    let (doors, _homes) = open_doors(&plan)?;
    let endpoints = doors.iter().map(|door| door.endpoint.clone()).collect();
    let _secret = secret_file::follow(&plan.engine, endpoints)?;
    voice.listening(&plan, &doors[0].endpoint);
    let (over, ended) = mpsc::channel();
    let house = House { plan: Arc::new(plan), voice: voice.clone(), run_slot: Arc::default(), over };
    for door in &doors[1..] {
        let (house, door) = (house.clone(), door.clone());
        let watch = move || {
            let mut last_error = None;
            while house.answer(&door, &mut last_error) {}
        };
        exit::attend("bench-door", watch)?;
    }
    let mut last_error = None;
    let outcome = loop {
        if let Some(outcome) = after(&house.plan, voice, &ended) {
            break outcome;
        }
        if !house.answer(&doors[0], &mut last_error) {
            break Err(ConnectError::Closed.into());
        }
    };
    // After Ctrl-C each peer of the active run receives the reason.
    house.run_slot.wait_until_empty(RUN_END_TIMEOUT);
    std::thread::scope(|scope| {
        for door in &doors {
            scope.spawn(|| door.endpoint.close(CLOSE_TIMEOUT));
        }
    });
    outcome
}

/// An endpoint that accepts peers.
#[derive(Clone)]
struct Door {
    endpoint: Endpoint,
    /// The endpoint's GPU, if there are several endpoints.
    gpu: Option<u32>,
    /// All endpoints of the process, this one first.
    all: Arc<Vec<(u32, Vec<SocketAddr>)>>,
}

/// Resources that stay open while the endpoints accept peers.
enum Kept {
    One { _home: Option<Home> },
    Several { _multi_gpu: MultiGpu },
}

/// The engine options, with the NICs of the GPU that was named. A child process finds the same NICs as its parent.
fn on_nics_of_gpu(plan: &ServePlan, tells: bool) -> Outcome<EnginePlan> {
    places::of_one(&plan.engine, plan.memory, plan.listen.ip().is_loopback(), tells)
}

fn open_doors(plan: &ServePlan) -> Outcome<(Vec<Door>, Kept)> {
    if plan.engine.gpus.is_none() {
        let home = plan.memory.map(Memory::open).transpose()?;
        let endpoint = super::endpoint(&on_nics_of_gpu(plan, false)?, Some(plan.listen))?;
        let all = Arc::new(vec![(0, endpoint.reachable_addresses())]);
        return Ok((vec![Door { endpoint, gpu: None, all }], Kept::One { _home: home }));
    }
    let memory = plan.memory.unwrap_or_else(|| Memory::detect(None));
    let setting = Setting::alone(&plan.engine, &[plan.listen]);
    let mut multi_gpu = MultiGpu::start(&plan.engine, memory, Some(plan.listen), START_TIMEOUT, setting)?;
    multi_gpu.print_notes();
    let reachable = |(gpu, endpoint): (u32, &Endpoint)| (gpu, endpoint.reachable_addresses());
    let all = Arc::new(multi_gpu.endpoints().map(reachable).collect::<Vec<_>>());
    let door = |(gpu, endpoint): (u32, &Endpoint)| Door {
        endpoint: endpoint.clone(),
        gpu: Some(gpu),
        all: all.clone(),
    };
    Ok((multi_gpu.endpoints().map(door).collect(), Kept::Several { _multi_gpu: multi_gpu }))
}

/// State that the threads of all peers share.
#[derive(Clone)]
struct House {
    plan: Arc<ServePlan>,
    voice: Voice,
    run_slot: Arc<RunSlot>,
    over: Sender<Ended>,
}

impl House {
    /// Starts a thread for the next peer of an endpoint; returns false once the endpoint is closed.
    fn answer(&self, door: &Door, last_error: &mut Option<ConnectError>) -> bool {
        match door.endpoint.accept(SLICE) {
            Ok(peer) => self.attend_in_thread(door, peer),
            Err(ConnectError::Stalled { .. }) => {}
            Err(ConnectError::Closed) => return false,
            Err(error) => complain_once(last_error, error),
        }
        true
    }

    fn attend_in_thread(&self, door: &Door, peer: Peer) {
        let (house, door) = (self.clone(), door.clone());
        let attend = move || {
            let mut link = Link::with_stranger(peer, house.run_slot.join_timeout(house.plan.timeout));
            let mut run_id = String::new();
            match admit(&mut link, &house.run_slot, &house.plan, &door, &mut run_id) {
                Err(failure) => {
                    let why = failure.message();
                    let is_news = || !run_slot::is_busy(&failure) || house.run_slot.is_news(&run_id);
                    if house.plan.verbose || is_news() {
                        exit::complain(&format!("refused a run of {}: {why}", link.peer.name()));
                    }
                    link.tell_last(&Message::Refused { why });
                }
                Ok(None) => {
                    let whom = sanitize::line(&link.peer.name());
                    exit::note(&format!("note: {whom} connected and requested no run"));
                    link.tell_last(&Message::Bye);
                }
                Ok(Some((hello, active, home))) => {
                    house.voice.run_begins(&link.peer.name());
                    let is_spoilt = house.plan.inject_member.is_none_or(|member| member == hello.member);
                    let inject = house.plan.inject.filter(|_| is_spoilt);
                    let run = (&hello, active.as_ref(), &home);
                    attend(link, &door.endpoint, &house.run_slot, run, inject, &|ended| {
                        let _ = house.over.send(ended);
                    });
                }
            }
        };
        if let Err(failure) = exit::attend("bench-peer", attend) {
            exit::complain(&failure.message());
        }
    }
}

/// Reports runs that have ended; returns the outcome when this end has to stop.
fn after(plan: &ServePlan, voice: &Voice, ended: &Receiver<Ended>) -> Option<Outcome> {
    if sys::interrupted() {
        return Some(Err(Failure::Interrupted));
    }
    for ended in ended.try_iter() {
        voice.run_over(plan.once, &ended);
        if plan.once {
            let Ended { name, outcome, .. } = ended;
            return Some(
                outcome.map_err(|failure| {
                    Failure::failed(format!("run of {name} failed: {}", failure.message()))
                }),
            );
        }
    }
    None
}

/// Prints how a run ended, unless its failure is about to be the outcome of the process.
pub fn tell_run_over(once: bool, name: &str, what: &str, outcome: &Outcome) {
    match (outcome, once) {
        (Ok(()), _) => say(&format!("{name}: {what}")),
        (Err(failure), false) => exit::complain(&format!("run of {name} failed: {}", failure.message())),
        (Err(_), true) => {}
    }
}

fn complain_once(last: &mut Option<ConnectError>, error: ConnectError) {
    if last.as_ref() != Some(&error) {
        exit::complain(&error.to_string());
        *last = Some(error);
    }
    std::thread::sleep(SLICE);
}

/// The memory of this end: the kind that the peer requests, if this end offers it. Host memory is always offered,
/// beside it the kind that `--memory` names, or else any GPU of this host. With a plugin or devmem a GPU must be named.
fn offered(hello: &Hello, own: Option<Memory>, engine: &EnginePlan) -> Outcome<Memory> {
    let Some(asked) = hello.run.peer_memory else {
        let neighbour = Some(hello.run.memory).filter(|_| hello.boot_id == Host::this().boot_id);
        return Ok(match own {
            Some(own) => own,
            None if engine.devmem.is_some() => Memory::Host,
            None => Memory::detect(neighbour),
        });
    };
    match asked {
        Memory::Host => Ok(asked),
        _ if own == Some(asked) => Ok(asked),
        Memory::Cuda(_) if own.is_none() && engine.plugin.is_none() && engine.devmem.is_none() => Ok(asked),
        _ => Err(Failure::failed(format!(
            "this end does not offer memory {asked}: start serve with --memory {asked}"
        ))),
    }
}

/// Refuses a run whose `--unpack` differs from that of this end, since the results would name the wrong one.
fn gathered_alike(run: &Run, plugin: Option<&PluginUse>) -> Outcome {
    match (run.unpack, plugin.map(PluginUse::unpack)) {
        (Some(theirs), Some(ours)) if theirs != ours => {
            let [theirs, ours] = [theirs, ours].map(|unpack| format!("{unpack:?}").to_lowercase());
            Err(Failure::failed(format!(
                "--unpack must be equal at both ends (got {theirs} in the run, {ours} here): start serve with --unpack {theirs}"
            )))
        }
        _ => Ok(()),
    }
}

/// Receives a peer's greeting, and admits the peer if the run slot has room. `None` if the peer wants no run.
fn admit(
    link: &mut Link,
    run_slot: &RunSlot,
    plan: &ServePlan,
    door: &Door,
    run_id: &mut String,
) -> Outcome<Option<(Hello, Arc<ActiveRun>, Home)>> {
    let (plugin, own) = (plan.engine.plugin.as_ref(), plan.memory);
    let mut first = link.hear()?;
    if let Message::Ask { timeout_s } = first {
        if timeout_s > 0.0 && timeout_s <= SECONDS_MAX {
            let timeout = Duration::from_secs_f64(timeout_s);
            run_slot.expect(timeout, timeout + CONNECT_GRACE);
            link.wait_up_to(timeout + CONNECT_GRACE);
        }
        link.tell(&Message::Here { endpoints: door.all.to_vec(), busy: run_slot.occupied("") })?;
        first = link.hear()?;
    }
    let mut hello = match first {
        Message::Hello(hello) => *hello,
        Message::Bye => return Ok(None),
        other => return Err(link.unexpected(&other, "a request for a run")),
    };
    if hello.version != protocol::VERSION {
        return Err(Failure::Failed(protocol::other_version(hello.version.into())));
    }
    run_id.clone_from(&hello.run_id);
    hello.run.check().map_err(Failure::Failed)?;
    let is_ours =
        |asked: Memory, gpu| asked == asked.on(0) || (door.all.len() == 1 && asked == asked.on(gpu));
    if let (Some(gpu), Some(asked)) = (door.gpu, hello.run.peer_memory)
        && !is_ours(asked, gpu)
    {
        return Err(Failure::failed(format!(
            "--peer-memory {asked}: each endpoint of this end has memory of its own GPU; use --peer-memory {}",
            asked.kind()
        )));
    }
    let memory = offered(&hello, own, &plan.engine)?;
    hello.run.peer_memory = Some(memory);
    gathered_alike(&hello.run, plugin)?;
    // Room for the memory is checked only now, because a run that is about to end still holds its memory.
    run_slot.wait_for_room(&hello)?;
    let home = door.gpu.map_or(memory, |gpu| memory.on(gpu)).open()?;
    // The peers of all endpoints share host memory; a GPU's memory is for the peers of its endpoint.
    let peers_of_store = match (hello.run.pattern, home.store()) {
        (Pattern::Incast, _) | (_, None) => hello.run.peers,
        _ => hello.run.peers.div_ceil(door.all.len()),
    };
    let bytes = layout::region_bytes(&hello.run).saturating_mul(peers_of_store as u64);
    let active = run_slot.enter(&hello, &link.peer.name(), home.store(), &|| home.check_room(bytes))?;
    Ok(Some((hello, active, home)))
}

fn attend(
    link: Link,
    endpoint: &Endpoint,
    run_slot: &RunSlot,
    (hello, active, home): (&Hello, &ActiveRun, &Home),
    inject: Option<Inject>,
    over: &dyn Fn(Ended),
) {
    let link = link.with_guest(Duration::from_secs_f64(hello.run.timeout_s));
    let member = Member { number: hello.member, run: &hello.run, barrier: &active.barrier, failed: &|_| {} };
    let outcome = converse(&link, endpoint, (&member, home), inject);
    // The run slot is freed before the peer receives the end, so that the next run can follow at once.
    let ended = run_slot.leave(outcome.clone());
    link.tell_last(&match outcome {
        Ok(()) => Message::Bye,
        Err(failure) => Message::failed(&failure),
    });
    // With `--once` this process may end now, so the end of the run is reported first.
    if let Some(ended) = active.goodbye_sent(ended) {
        over(ended);
    }
}

/// The serving end's view of one peer of a run.
pub struct Member<'a> {
    /// The peer's index in the run.
    pub number: usize,
    /// The parameters of the run.
    pub run: &'a Run,
    /// The barrier of the run's peers.
    pub barrier: &'a Barrier,
    /// Called with a failure before this end releases its memory, because the peer may notice the release first.
    pub failed: &'a dyn Fn(&Failure),
}

/// Measures all sizes with an admitted peer.
pub fn converse(
    link: &Link,
    endpoint: &Endpoint,
    (member, home): (&Member<'_>, &Home),
    inject: Option<Inject>,
) -> Outcome {
    let local = home.register(endpoint, layout::region_bytes(member.run))?;
    through_sizes(link, endpoint, (member, home, &local), inject).inspect_err(|failure| {
        (member.failed)(failure);
        link.tell_failure(failure);
    })
}

fn through_sizes(
    link: &Link,
    endpoint: &Endpoint,
    (member, home, local): (&Member<'_>, &Home, &Local),
    inject: Option<Inject>,
) -> Outcome {
    let run = member.run;
    link.tell(&Message::Welcome {
        host: Box::new(Host::this()),
        region: protocol::to_hex(&local.region.descriptor().to_bytes()),
        threads: super::threads(endpoint),
        memory: home.memory(),
        gpu: home.gpu_name(),
    })?;
    let remote = match link.hear_from_a_preparing_peer(layout::region_bytes(run))? {
        Message::Region { region } => region_from(link, &region)?,
        other => return Err(link.unexpected(&other, "a region descriptor")),
    };
    let session = Session {
        link,
        side: Side::Serve,
        run,
        local,
        remote: &remote,
        member: member.number,
        barrier: Some(member.barrier),
        inject,
    };
    for step in 0..run.sizes.len() {
        session.step(step, &|_| {})?;
    }
    match link.hear()? {
        Message::Bye => Ok(()),
        other => Err(link.unexpected(&other, "the end of the run")),
    }
}

/// Parses the region descriptor that the peer sent.
pub fn region_from(link: &Link, text: &str) -> Outcome<RemoteRegion> {
    let bytes =
        protocol::from_hex(text).ok_or_else(|| link.strange("a region descriptor is not hexadecimal"))?;
    Ok(RemoteRegion::from_bytes(&bytes)?)
}

/// Prints the addresses on which this end listens, and the commands that connect to it.
pub fn announce(plan: &ServePlan, addresses: &[SocketAddr], reachable: &[SocketAddr]) {
    let listed: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
    say(&format!("listening on {}", listed.join(", ")));
    if plan.verbose {
        exit::aside(&effective_values(plan));
    }
    how_to_connect(plan, addresses, reachable);
}

fn how_to_connect(plan: &ServePlan, addresses: &[SocketAddr], reachable: &[SocketAddr]) {
    if plan.listen.ip().is_loopback() {
        let port = addresses.first().map_or(plan.listen.port(), SocketAddr::port);
        say(&format!(
            "other hosts cannot reach loopback: for them use --listen 0.0.0.0:{port}, or the address of a NIC"
        ));
        return;
    }
    let secret = plan.engine.secret.as_deref().map(String::from_utf8_lossy).unwrap_or_default();
    let prefix = match plan.one_time_secret {
        true => format!("FERRYWIRE_SECRET={secret} "),
        false => String::new(),
    };
    say(match plan.one_time_secret {
        true => "a one-time secret was generated; on the other host run:",
        false => "on the other host, with the same secret, run:",
    });
    let options = plan.engine.plugin.as_ref().map(PluginUse::as_options).unwrap_or_default();
    let gpus = plan.engine.gpus.iter().flatten().map(u32::to_string).collect::<Vec<_>>().join(",");
    let gpus = if gpus.is_empty() { gpus } else { format!(" --gpus {gpus}") };
    let encrypt = if plan.engine.encryption == Encryption::Required { " --encrypt" } else { "" };
    let devmem = plan.engine.devmem.as_ref().is_some_and(|devmem| devmem.required);
    let devmem = if devmem { " --transport devmem" } else { "" };
    for address in reachable.iter().filter(|address| !address.ip().is_loopback()) {
        let nic = crate::nics::name_of(address.ip()).map_or_else(String::new, |nic| format!("   # {nic}"));
        say(&format!("  {prefix}ferrywire bench connect {address}{gpus}{encrypt}{devmem}{options}{nic}"));
    }
}

fn effective_values(plan: &ServePlan) -> String {
    let ServePlan { listen, engine, memory, once, timeout, .. } = plan;
    let shown = |memory: Memory| match engine.gpus {
        Some(_) => memory.kind().to_owned(),
        None => memory.to_string(),
    };
    let memory = memory.map_or_else(|| "what peers ask for".to_owned(), shown);
    let carried = engine.effective_values().into_iter().map(|(name, value)| format!("{name} = {value}\n"));
    let (carried, timeout_s) = (carried.collect::<String>(), timeout.as_secs_f64());
    let threads = engine.threads.map_or_else(|| "chosen".to_owned(), |n| n.to_string());
    let congestion_control = engine.congestion_control.as_deref().unwrap_or("chosen");
    let (nics, secret) = (engine.nics.join(","), engine.secret.is_some());
    format!(
        "listen = {listen}\nonce = {once}\nmemory = {memory}\nnics = {nics:?}\nthreads = {threads}\n\
         congestion_control = {congestion_control}\nsecret = {secret}\ntimeout_s = {timeout_s}\n{carried}"
    )
}

/// Prints a line; a closed pipe is no reason to stop serving.
pub fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use clap::FromArgMatches;

    use super::*;
    use crate::args::{self, Cli};
    use crate::bench::connect;
    use crate::plan::{self, Plan};

    const LIMIT: Duration = Duration::from_secs(60);

    fn planned(line: &str) -> Plan {
        let typed = args::command().get_matches_from(line.split_whitespace());
        plan::plan(Cli::from_arg_matches(&typed).expect("it parses")).expect("a plan")
    }

    #[test]
    fn a_peer_has_heard_that_its_run_is_over_before_serve_may_end() {
        let Plan::Serve(plan) = planned("ferrywire bench serve --listen 127.0.0.1:0 --memory host --once")
        else {
            panic!("no serve")
        };
        let (doors, _kept) = open_doors(&plan).expect("a door");
        let address = doors[0].endpoint.listen_addresses()[0];
        let (done, measured) = mpsc::channel();
        std::thread::spawn(move || {
            let options = "--memory host --peer-memory host --sizes 4K --iters 3 --timeout 20";
            match planned(&format!("ferrywire bench connect {address} {options}")) {
                Plan::Connect(plan) => drop(done.send(connect::measure(&plan, &mut |_| {}, &|_| {}))),
                _ => panic!("no connect"),
            }
        });
        let mut link = Link::new(doors[0].endpoint.accept(LIMIT).expect("it comes"), LIMIT);
        let (run_slot, heard) = (RunSlot::default(), Mutex::new(None));
        let run = admit(&mut link, &run_slot, &plan, &doors[0], &mut String::new());
        let (hello, active, home) = run.expect("there is room").expect("it asks for a run");
        attend(link, &doors[0].endpoint, &run_slot, (&hello, &active, &home), None, &|ended| {
            let reported = measured.recv_timeout(LIMIT);
            *heard.lock().expect("nobody panics") = Some((ended.outcome, reported));
        });
        assert_eq!(heard.into_inner().expect("nobody panics"), Some((Ok(()), Ok(Ok(())))));
    }
}
