//! The connecting end, which configures the run: connects, measures each size, prints and stores the results.

use std::net::SocketAddr;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use ferrywire::{ConnectError, Endpoint, Peer, PeerStats, RefusalReason, UnreachableCause};
use indicatif::{ProgressBar, ProgressStyle};

use super::host::Host;
use super::incast::Companions;
use super::isolated;
use super::layout;
use super::link::{CLOSE_TIMEOUT, Link};
use super::multi_gpu::{self, Setting};
use super::places;
use super::protocol::{self, Hello, Message, Run, Side};
use super::report::{News, Output, Record};
use super::result::{self, Circumstances, RankPair};
use super::secret_file;
use super::serve::region_from;
use super::session::{Session, StepReport};
use super::staged;
use super::table;
use crate::args::Unpack;
use crate::exit::{self, Failure, Outcome};
use crate::memory::{Home, Memory};
use crate::plan::{ConnectPlan, EnginePlan};
use crate::sys;
use crate::transport::PluginUse;
use crate::units::Bytes;

/// Longest wait for `connect` beyond the timeout that the engine itself keeps.
const DIAL_GRACE: Duration = Duration::from_secs(60);
/// The engine's name for the transport whose receives are not scattered.
const TCP: &str = "tcp";
/// How often a wait for the connection checks for Ctrl-C.
const DIAL_SLICE: Duration = Duration::from_millis(50);

/// Connects and measures. Finished sizes are printed and stored even if a later size fails.
pub fn run(plan: ConnectPlan) -> Outcome {
    run_after(plan, |_| Ok(()), |(), outcome| outcome)
}

/// Runs `ready`, which prepares the other end, then connects and measures as [`run`] does. The result of `ready` is kept
/// until the run is over and passed to `explain`. Once the output files are open, a failure is stored too.
pub fn run_after<T>(
    mut plan: ConnectPlan,
    ready: impl FnOnce(&mut ConnectPlan) -> Outcome<T>,
    explain: impl FnOnce(T, Outcome) -> Outcome,
) -> Outcome {
    let output = Output::open(&plan)?;
    if plan.member > 0 {
        sys::die_with_parent();
    }
    let mut record = Record::new(&plan);
    let outcome = ready(&mut plan).and_then(|kept| {
        plan.engine = on_nics_of_gpu(&plan, plan.member == 0)?;
        record = Record::new(&plan);
        let outcome = run_with_companions(&plan, &mut record);
        explain(kept, outcome)
    });
    if plan.member > 0 {
        return outcome;
    }
    let written = output.finish(&record, &outcome);
    exit::with_results(outcome, written)
}

fn run_with_companions(plan: &ConnectPlan, record: &mut Record) -> Outcome {
    let environment = match plan.engine.plugin {
        Some(_) => isolated::environment(&plan.engine, None)?,
        None => Vec::new(),
    };
    record.note_environment(&environment);
    if plan.verbose && plan.member == 0 {
        exit::aside(&(record.effective_values() + &isolated::shown(&environment)));
    }
    let companions = Companions::start(plan)?;
    let outcome = match plan.engine.plugin {
        Some(_) => isolated::connect(plan, &environment, record),
        None => measure(plan, &mut |news| record.take(news), &|_| {}),
    };
    companions.end(outcome)
}

/// Connects and measures all sizes. `tell` receives the results, `stage` the name of each stage that begins.
pub fn measure(plan: &ConnectPlan, tell: &mut dyn FnMut(News), stage: &dyn Fn(&str)) -> Outcome {
    if plan.engine.gpus.is_some() {
        return multi_gpu::measure(plan, (tell, stage));
    }
    let start = Instant::now();
    let home = plan.run.memory.open()?;
    // The first peer of an incast reports idle NICs for all peers, whose processes it has started.
    if plan.member == 0 {
        let peers = plan.run.peers as u64;
        home.check_room(layout::region_bytes(&plan.run).saturating_mul(peers))?;
    }
    let endpoint = super::endpoint(&on_nics_of_gpu(plan, false)?, None)?;
    let _secret = secret_file::follow(&plan.engine, vec![endpoint.clone()])?;
    stage("while connecting");
    let link = Link::new(dial(&endpoint, plan)?, plan.timeout);
    let part = Part::of_peer(plan.member, &plan.run, &endpoint, &home, &[]);
    let outcome = converse(plan, &part, &link, start, (tell, stage));
    stage("while closing");
    take_leave(&link, &outcome);
    let _ = endpoint.close(CLOSE_TIMEOUT);
    outcome
}

/// The engine options, with the NICs of the GPU in use. A child process finds the same NICs as its parent.
fn on_nics_of_gpu(plan: &ConnectPlan, tells: bool) -> Outcome<EnginePlan> {
    let on_loopback = Setting::alone(&plan.engine, &plan.addresses).on_loopback;
    places::of_one(&plan.engine, Some(plan.run.memory), on_loopback, tells)
}

/// Sends the outcome to the other end, unless that end knows it already.
pub fn take_leave(link: &Link, outcome: &Outcome) {
    match outcome {
        Ok(()) => drop(link.peer.close(CLOSE_TIMEOUT)),
        Err(failure) => link.tell_last(&Message::failed(failure)),
    }
}

/// The receivers of results, and of the names of stages.
pub type Listeners<'a> = (&'a mut dyn FnMut(News), &'a dyn Fn(&str));

/// One peer's part in a run.
pub struct Part<'a> {
    /// The peer's index at the serving end.
    pub number: usize,
    /// The parameters of the run, equal for all its peers.
    pub run: &'a Run,
    /// The endpoint that connects.
    pub endpoint: &'a Endpoint,
    /// The memory location of this end.
    pub home: &'a Home,
    /// The numbers of all pairs of GPUs, by peer, in a run with several endpoints.
    pub pairs: &'a [(u32, u32)],
    /// The pairs of processes, in a run of several ranks.
    pub ranks: &'a [RankPair],
    /// Whether this peer prints the run's progress.
    pub tells: bool,
    /// Called with a failure before this end releases its memory, because the peer may notice the release first.
    pub failed: &'a dyn Fn(&Failure),
    /// Takes the report of one pair on a size; returns the reports of all pairs to the peer that prints.
    pub merge: &'a dyn Fn(usize, StepReport) -> Outcome<Option<StepReport>>,
}

impl<'a> Part<'a> {
    /// A peer that gets the reports of all other peers from the serving end.
    pub fn of_peer(
        number: usize,
        run: &'a Run,
        endpoint: &'a Endpoint,
        home: &'a Home,
        pairs: &'a [(u32, u32)],
    ) -> Part<'a> {
        let merge: &dyn Fn(usize, StepReport) -> Outcome<Option<StepReport>> =
            if number == 0 { &|_, report| Ok(Some(report)) } else { &|_, _| Ok(None) };
        Part { number, run, endpoint, home, pairs, ranks: &[], tells: number == 0, failed: &|_| {}, merge }
    }
}

/// Greets the serving end and measures all sizes.
pub fn converse(
    plan: &ConnectPlan,
    part: &Part<'_>,
    link: &Link,
    start: Instant,
    (tell, doing): Listeners<'_>,
) -> Outcome {
    let Part { number, run, endpoint, home, .. } = *part;
    let here = Host::this();
    let hello = Hello {
        version: protocol::VERSION,
        run_id: plan.run_id.clone(),
        member: number,
        boot_id: here.boot_id.clone(),
        run: run.clone(),
    };
    link.tell(&Message::Hello(Box::new(hello)))?;
    let (peer_host, remote, peer_threads, peer_memory, peer_gpu) =
        match link.hear_from_a_preparing_peer(layout::region_bytes(run))? {
            Message::Welcome { host, region, threads, memory, gpu } => {
                (*host, region_from(link, &region)?, threads, memory, gpu)
            }
            other => return Err(link.unexpected(&other, "the answer to a request for a run")),
        };
    let unpack = settled_unpack(run.unpack, [run.memory, peer_memory], link.peer.stats().transport);
    let run = &Run { peer_memory: Some(peer_memory), unpack, ..run.clone() };
    let local = home.register(endpoint, layout::region_bytes(run))?;
    let mut through_sizes = || {
        link.tell(&Message::Region { region: protocol::to_hex(&local.region.descriptor().to_bytes()) })?;
        let session = Session {
            link,
            side: Side::Connect,
            run,
            local: &local,
            remote: &remote,
            member: number,
            barrier: None,
            inject: None,
        };
        tell(News::Peer(peer_host.clone(), peer_threads));
        let setup_s = start.elapsed().as_secs_f64();
        let progress = progress(run, part.tells);
        for (step, size) in run.sizes.iter().enumerate() {
            let stage = |stage: &str| {
                doing(&format!("at size {}, {stage}", Bytes(*size)));
                progress.set_message(format!("{}: {stage}", Bytes(*size)));
            };
            let Some(report) = (part.merge)(step, session.step(step, &stage)?)? else { continue };
            let gpus = (home.gpu_name(), peer_gpu.clone());
            let now = circumstances(plan, &Part { run, ..*part }, gpus, link.peer.stats(), setup_s);
            let results = result::results(&now, step, &report);
            if plan.verbose {
                for row in &results {
                    exit::note(&format!("finished {}", table::line(row)));
                    staged::line(row).into_iter().for_each(|line| exit::note(&line));
                }
            }
            tell(News::Results(results));
            progress.inc(1);
        }
        progress.finish_and_clear();
        link.tell(&Message::Bye)?;
        match link.hear()? {
            Message::Bye => Ok(()),
            other => Err(link.unexpected(&other, "the end of the run")),
        }
    };
    through_sizes().inspect_err(|failure| {
        (part.failed)(failure);
        link.tell_failure(failure);
    })
}

/// How scattered receives are gathered, given the memory of both ends and the transport; `None` without a GPU or over
/// sockets, where nothing is gathered.
fn settled_unpack(asked: Option<Unpack>, memory: [Memory; 2], transport: &str) -> Option<Unpack> {
    let is_scattered = transport != TCP && memory.iter().any(|memory| *memory != Memory::Host);
    is_scattered.then(|| asked.unwrap_or(Unpack::Kernel))
}

fn circumstances<'a>(
    plan: &ConnectPlan,
    part: &Part<'a>,
    (gpu, peer_gpu): (Option<String>, Option<String>),
    stats: PeerStats,
    setup_s: f64,
) -> Circumstances<'a> {
    let congestion_control = stats.channels.first().map(|channel| channel.congestion_control.clone());
    let plugin = plan.engine.plugin.as_ref();
    let Part { run, endpoint, pairs, ranks, .. } = *part;
    Circumstances {
        run,
        pairs,
        ranks,
        gpu,
        peer_gpu,
        transport: stats.transport.to_owned(),
        transport_reason: stats.transport_reason,
        protection: stats.protection.map(|protection| protection.name().to_owned()),
        unpack: run.unpack,
        lanes: stats.channels.iter().filter_map(|channel| channel.lane.clone()).collect(),
        channels: stats.channels.len(),
        chunk_bytes: stats.chunk_bytes as u64,
        window: plugin.map_or(stats.window, PluginUse::window) as u64,
        threads: super::threads(endpoint),
        congestion_control: congestion_control.unwrap_or_default(),
        setup_s,
    }
}

fn progress(run: &Run, tells: bool) -> ProgressBar {
    if !tells {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:20} {pos}/{len}  {msg}  {elapsed}");
    let bar = ProgressBar::new(run.sizes.len() as u64);
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Connects to the first address that answers, within the timeout for all of them; Ctrl-C ends the wait.
pub fn dial(endpoint: &Endpoint, plan: &ConnectPlan) -> Outcome<Peer> {
    let (endpoint, addresses, timeout) = (endpoint.clone(), plan.addresses.clone(), plan.timeout);
    let (done, result) = mpsc::channel();
    std::thread::spawn(move || done.send(endpoint.connect_any(&addresses, timeout)));
    wait_for(&result, timeout)?.map_err(|error| with_tried(explain(&error), &plan.addresses))
}

/// Adds the addresses that were tried to a failure to connect, if there are several.
fn with_tried(failure: Failure, addresses: &[SocketAddr]) -> Failure {
    let (Failure::Failed(text), [_, _, ..]) = (&failure, addresses) else { return failure };
    let tried: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    let (first, rest) = text.split_once('\n').map_or((text.as_str(), ""), |(first, rest)| (first, rest));
    let text = format!("{first}; tried {}\n{rest}", tried.join(", "));
    Failure::failed(text.trim_end())
}

/// Waits for the result of a thread that keeps the timeout itself; Ctrl-C ends the wait.
pub fn wait_for<T>(
    result: &mpsc::Receiver<Result<T, ConnectError>>,
    timeout: Duration,
) -> Outcome<Result<T, ConnectError>> {
    let since = Instant::now();
    loop {
        match result.recv_timeout(DIAL_SLICE) {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::failed("internal error, please report: connect panicked"));
            }
            Err(RecvTimeoutError::Timeout) if sys::interrupted() => return Err(Failure::Interrupted),
            Err(RecvTimeoutError::Timeout) if since.elapsed() > timeout.saturating_add(DIAL_GRACE) => {
                return Err(Failure::failed("internal error, please report: connect has missed its timeout"));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

/// Adds advice to the error of a failed connection.
pub fn explain(error: &ConnectError) -> Failure {
    match (error, advice(error)) {
        (ConnectError::Invalid { .. } | ConnectError::NoUsableNic { .. }, _) => {
            Failure::Usage(error.to_string())
        }
        (_, Some(advice)) => Failure::Failed(format!("{error}\n{advice}")),
        (_, None) => Failure::Failed(error.to_string()),
    }
}

/// The next step after a failed connection; `None` if its cause suggests none.
pub fn advice(error: &ConnectError) -> Option<&'static str> {
    match error {
        ConnectError::Refused { reason: RefusalReason::Secret, .. } => {
            Some("try: the other end's secret, in FERRYWIRE_SECRET or a file named with --secret-file")
        }
        ConnectError::Refused { reason: RefusalReason::SameHost, .. } => Some(
            "try: memory of the host, or two hosts; with a simulated plugin or between namespaces, --allow-same-host-gpu \
             on both ends (the simulated TCPX plugin wants FERRYWIRE_TCPX_SIM=same_host=allow, too)",
        ),
        ConnectError::Refused { reason: RefusalReason::PayloadMismatch, .. } => Some(
            "try: the same --transport, --plugin PATH, --chunk, --window and NCCL_... variables on both ends",
        ),
        ConnectError::Unreachable { cause: UnreachableCause::ConnectionRefused, .. } => Some(
            "likely: 'ferrywire bench serve' does not run there, or its --listen address is not reachable from this host",
        ),
        ConnectError::Unreachable { cause: UnreachableCause::Closed, .. } => {
            Some("likely: another program has that port, or 'ferrywire bench serve' has just ended there")
        }
        ConnectError::Unreachable {
            cause:
                UnreachableCause::BackendCannot
                | UnreachableCause::NoFreePort
                | UnreachableCause::SourceAddressGone
                | UnreachableCause::Forbidden,
            ..
        } => None,
        ConnectError::Unreachable { .. } | ConnectError::Stalled { .. } => Some(
            "likely: a firewall drops the port, the address is another host's, no route leads there, or another program \
                 has that port",
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_goes_by_what_was_the_matter_and_not_by_its_words() {
        let address = || "b:1".to_owned();
        let words = ["wrong secret", "both ends are on one host", "both need the same", "refused", "nothing"];
        for why in words.map(str::to_owned) {
            let refused =
                |reason| advice(&ConnectError::Refused { address: address(), reason, why: why.clone() });
            let has = |advice: Option<&str>, word: &str| advice.is_some_and(|advice| advice.contains(word));
            assert!(has(refused(RefusalReason::Secret), "--secret-file"), "{why}");
            assert!(has(refused(RefusalReason::SameHost), "--allow-same-host-gpu"), "{why}");
            assert!(has(refused(RefusalReason::PayloadMismatch), "the same --transport, --plugin"), "{why}");
            assert_eq!(refused(RefusalReason::Version), None, "{why}");
            let unreachable =
                |cause| advice(&ConnectError::Unreachable { address: address(), cause, why: why.clone() });
            assert!(has(unreachable(UnreachableCause::ConnectionRefused), "does not run there"), "{why}");
            assert!(has(unreachable(UnreachableCause::NoAnswer), "a firewall"), "{why}");
            assert!(has(unreachable(UnreachableCause::Closed), "another program has that port"), "{why}");
            assert!(!has(unreachable(UnreachableCause::Closed), "a firewall"), "{why}");
        }
    }

    #[test]
    fn a_failure_to_connect_names_all_that_was_tried() {
        let addresses: [SocketAddr; 2] = [([127, 0, 0, 1], 1).into(), ([127, 0, 0, 2], 2).into()];
        let failed = Failure::failed("cannot reach 127.0.0.1:1: refused\nlikely: nothing listens");
        let said = with_tried(failed.clone(), &addresses).message();
        assert_eq!(
            said,
            "cannot reach 127.0.0.1:1: refused; tried 127.0.0.1:1, 127.0.0.2:2\nlikely: nothing listens"
        );
        assert_eq!(with_tried(failed.clone(), &addresses[..1]), failed);
    }

    #[test]
    fn how_is_gathered_is_known_when_the_peers_memory_is() {
        let (host, gpu) = (Memory::Host, Memory::Cuda(0));
        assert_eq!(settled_unpack(Some(Unpack::Kernel), [host, host], "devmem"), None);
        assert_eq!(settled_unpack(Some(Unpack::Copy), [gpu, host], "devmem"), Some(Unpack::Copy));
        assert_eq!(settled_unpack(None, [host, gpu], "devmem"), Some(Unpack::Kernel), "tried by itself");
        assert_eq!(settled_unpack(Some(Unpack::Kernel), [gpu, gpu], "tcp"), None, "devmem was not to be had");
    }
}
