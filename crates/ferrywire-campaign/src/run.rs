//! Plays a scenario and checks throughout the run what must hold.
//!
//! Invariant: a run ends at the latest [`SETTLE_MAX`] of virtual time after its last step, and leaves nothing
//! behind.
//! Read next: `run/steps.rs`, `run/faults.rs`, `run/outages.rs`, `run/end.rs`; `judge.rs`, which outcomes are allowed.

mod end;
mod faults;
mod outages;
mod steps;

use std::mem::ManuallyDrop;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::Duration;

use ferrywire::net::sim::{DialFault, Faults, ResetSeen, Side, SimHost, SimNet};
use ferrywire::{
    Block, BlockList, ConnectError, Connecting, Encryption, Endpoint, Peer, Transfer, TransferError,
};
use ferrywire_memory::sim::{SimFaults, SimGpu};

use crate::cover::Cover;
use crate::driver::{DrivenHost, Driver, Effect, Timed, gpu_faults};
use crate::memory::{Area, Phase, Raw, pattern, split};
use crate::scenario::{Action, Fault, OpId, Post, Protection, Scenario, Step, Verb};
use outages::{Cost, OUTAGE_MAX, Outage};

/// Virtual time after the last step within which everything must end.
pub const SETTLE_MAX: Duration = Duration::from_secs(120);
/// Virtual time within which a cancelled operation and a dropped peer must end, once all faults have ended.
const END_MAX: Duration = Duration::from_secs(40);
/// Virtual time for which a step waits for its link.
const CONNECT_MAX: Duration = Duration::from_secs(30);
/// Number of passes between two checks of all operations, while there is work.
const LOOK_PASSES: u64 = 12;
/// Most operations that are polled for their outcome in one check. Each poll runs the engine.
const ASKED_MAX: usize = 16;
/// Number of steps between two checks of all memory.
const ALL_AREAS_STEPS: usize = 12;
/// Most passes of a whole run.
const PASSES_MAX: u64 = 1_500_000;
/// Number of times, 5 ms apart, that the run looks for endpoints that are still referenced.
const HELD_LOOKS: u32 = 100;
const PORT: u16 = 7420;
const SECRET: &str = "a secret for simulated hosts";

/// Notes an event, if the run is logged.
macro_rules! note {
    ($run:expr, $($text:tt)*) => {
        if $run.logs {
            let text = format!($($text)*);
            $run.say(text);
        }
    };
}
pub(crate) use note;

/// A broken invariant: its name and what was seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    pub invariant: &'static str,
    pub detail: String,
}

pub type Check = Result<(), Broken>;

/// The error for a broken invariant.
pub fn broken<T>(invariant: &'static str, detail: impl Into<String>) -> Result<T, Broken> {
    Err(Broken { invariant, detail: detail.into() })
}

/// The result of a run.
#[derive(Default)]
pub struct Outcome {
    pub cover: Cover,
    /// Indices of the links whose connect succeeded.
    pub connected: Vec<usize>,
    /// Fingerprint of the run, which is equal for equal runs.
    pub fingerprint: u64,
    /// Log of the run, if it was requested.
    pub log: Vec<String>,
}

pub struct Host {
    sim: Arc<SimHost>,
    nics: Vec<IpAddr>,
    /// The slot of the host's endpoint; `None` without an endpoint.
    pub slot: Option<usize>,
    /// Whether the user has closed the endpoint in the slot.
    closed: bool,
    /// Since when copies of its GPU may fail.
    pub gpu_faulty: Option<Duration>,
    /// For each of the host's NICs the time until which it is cut; of a deleted NIC the largest time.
    cut_until: Vec<Duration>,
    /// For each of the host's NICs the number of failed dials that are noted as outages.
    failed_dials: Vec<u64>,
}

pub struct Link {
    pub plan: (usize, usize),
    pub slots: [usize; 2],
    connecting: Option<Connecting>,
    pub failed: Option<String>,
    pub peers: [Option<Peer>; 2],
    started: bool,
    /// When the connect began.
    began: Duration,
    accepted: bool,
    /// Whether the user has closed or dropped the peer, by side.
    pub closing: [bool; 2],
    outages: Vec<Outage>,
    /// The longer peer timeout of both ends.
    peer_timeout: Duration,
    /// When a check saw the peer working last, by side.
    well_at: [Duration; 2],
    /// Whether an end has lost its peer, for a reason.
    is_lost: bool,
    reading: [bool; 2],
    resumed: bool,
}

pub struct Op {
    pub post: Post,
    pub transfer: Option<Transfer>,
    pub outcome: Option<Result<u64, TransferError>>,
    /// Indices of the areas that the operation reads; the next field has those that it writes.
    pub sources: Vec<usize>,
    pub targets: Vec<usize>,
    pub cancelled: bool,
    pub notified: u32,
    /// Index of the matching operation: of a receive its send, of a send its receive.
    pub met: Option<usize>,
    moved: u64,
    /// The stream after whose work it begins.
    stream: Option<usize>,
}

pub struct Run<'a> {
    scenario: &'a Scenario,
    pub driver: Rc<Driver>,
    pub hosts: Vec<Host>,
    transports: Vec<Weak<DrivenHost>>,
    killed: Vec<(usize, Endpoint)>,
    pub links: Vec<Link>,
    /// The run's operations, in the order of posting.
    pub ops: Vec<Op>,
    pub areas: Vec<Area>,
    out: &'a mut Outcome,
    pub logs: bool,
    looked: u64,
    /// Time of the last check.
    looked_at: Duration,
    /// Whether dials may fail by a fault.
    fails_dials: bool,
    /// Index of the open operation with which the last check began to poll outcomes.
    asked: usize,
    outcomes: u64,
    /// Whether bytes are corrupted on their way, so that wrong ones are placed before their checksum is
    /// checked.
    corrupts: bool,
}

/// Plays a scenario on this thread, with these GPUs.
///
/// # Errors
/// The first invariant that was broken.
pub fn play(scenario: &Scenario, gpus: &[Arc<SimGpu>], logs: bool, out: &mut Outcome) -> Check {
    let net = SimNet::new(scenario.seed);
    if scenario.benign {
        net.set_faults(Faults::benign(scenario.seed));
    }
    for gpu in gpus {
        gpu.set_faults(gpu_faults(gpu));
    }
    let driver = Driver::start(net, gpus.to_vec());
    let run = Run {
        scenario,
        driver,
        hosts: Vec::new(),
        transports: Vec::new(),
        killed: Vec::new(),
        links: Vec::new(),
        ops: Vec::new(),
        areas: Vec::new(),
        out,
        logs,
        looked: 0,
        looked_at: Duration::ZERO,
        fails_dials: false,
        asked: 0,
        outcomes: 0xcbf2_9ce4_8422_2325,
        corrupts: scenario.corrupts(),
    };
    // The endpoints of a failed run are not dropped, also after a panic.
    let mut run = ManuallyDrop::new(run);
    let result = run.all();
    if result.is_err() {
        if logs {
            run.out.log.push("--- the network's last events ---".into());
            let events = run.driver.net.trace();
            run.out.log.extend(events);
        }
        Driver::abandon();
        return result;
    }
    run.out.fingerprint = run.driver.net.fingerprint() ^ run.outcomes;
    drop(ManuallyDrop::into_inner(run));
    Driver::stop();
    Ok(())
}

impl Run<'_> {
    fn all(&mut self) -> Check {
        for end in 0..self.scenario.ends.len() {
            self.add_host(end);
            self.start(end)?;
        }
        for (a, b) in &self.scenario.links {
            let timeout_ms = [*a, *b].map(|end| self.scenario.ends[end].peer_timeout_ms);
            let peer_timeout = Duration::from_millis(timeout_ms[0].max(timeout_ms[1]));
            self.links.push(Link { peer_timeout, ..Link::new((*a, *b)) });
        }
        for index in 0..self.scenario.steps.len() {
            let step = self.scenario.steps[index].clone();
            self.step(&step)?;
            // Areas that no longer change are checked less often; each check at the end covers all areas.
            self.check_areas(index.is_multiple_of(ALL_AREAS_STEPS))?;
        }
        self.settle()?;
        self.close()
    }

    pub fn say(&mut self, text: String) {
        let at = self.driver.now().as_nanos() as f64 / 1e3;
        self.out.log.push(format!("{at:>12} us  {text}"));
    }

    fn add_host(&mut self, end: usize) {
        let plan = &self.scenario.ends[end];
        let names: Vec<String> = (0..plan.nics.len()).map(|nic| format!("eth{nic}")).collect();
        let addresses: Vec<IpAddr> =
            (0..plan.nics.len()).map(|nic| IpAddr::from([10, 0, nic as u8, end as u8 + 1])).collect();
        let list: Vec<(&str, IpAddr)> = names.iter().map(String::as_str).zip(addresses.clone()).collect();
        let net = &self.driver.net;
        let sim = net.host(&format!("host{end}"), &list);
        for (address, (rate, latency_us)) in addresses.iter().zip(&plan.nics) {
            net.set_bandwidth(*address, *rate);
            net.set_nic_latency(*address, Duration::from_micros(*latency_us));
        }
        self.hosts.push(Host {
            sim,
            slot: None,
            closed: false,
            gpu_faulty: None,
            cut_until: vec![Duration::ZERO; addresses.len()],
            failed_dials: vec![0; addresses.len()],
            nics: addresses,
        });
    }

    fn start(&mut self, end: usize) -> Check {
        let (plan, slot) = (&self.scenario.ends[end], self.driver.reserve());
        let protection = self.scenario.protection;
        let transport = Arc::new(DrivenHost::new(self.hosts[end].sim.clone(), slot));
        self.transports.push(Arc::downgrade(&transport));
        let built = Endpoint::builder()
            .listen(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), PORT))
            .secret(SECRET)
            .label(format!("host{end}"))
            .channels(plan.channels)
            .chunk_bytes(plan.chunk_bytes)
            .window(plan.window)
            .crc(plan.crc)
            .encryption(if protection == Protection::Encrypted {
                Encryption::Required
            } else {
                Encryption::Off
            })
            .keyed_checksum(protection == Protection::Authenticated)
            .peer_timeout(Duration::from_millis(plan.peer_timeout_ms))
            .threads(0)
            .transport(transport)
            .build();
        match built {
            Ok(endpoint) => self.driver.fill(slot, endpoint),
            Err(error) => return broken("an endpoint starts", error.to_string()),
        }
        (self.hosts[end].slot, self.hosts[end].closed) = (Some(slot), false);
        Ok(())
    }

    // --- Time ---------------------------------------------------------------------------------

    /// Polls all endpoints once, and checks the outcomes every [`LOOK_PASSES`] passes.
    fn pass(&mut self) -> Check {
        let worked = self.driver.pass();
        if !worked || self.driver.passes() >= self.looked + LOOK_PASSES {
            self.looked = self.driver.passes();
            self.look()?;
        }
        if self.driver.works_in_vain() {
            return broken("an endpoint with nothing to do says so", "it reports work at every poll");
        }
        if self.driver.passes() > PASSES_MAX {
            return broken("a run is bounded", format!("the run has not ended after {PASSES_MAX} passes"));
        }
        Ok(())
    }

    fn pass_time(&mut self, time: Duration) -> Check {
        let until = self.driver.now() + time;
        self.driver.stop_clock_at(Some(until));
        while self.driver.now() < until {
            self.pass()?;
        }
        self.driver.stop_clock_at(None);
        Ok(())
    }

    /// Polls all endpoints until `done`, or for this virtual time. Returns whether it was done.
    fn until(&mut self, most: Duration, mut done: impl FnMut(&mut Self) -> bool) -> Result<bool, Broken> {
        let until = self.driver.now() + most;
        self.look()?;
        loop {
            if done(self) {
                return Ok(true);
            }
            if self.driver.now() >= until {
                return Ok(false);
            }
            self.pass()?;
        }
    }

    /// Makes a call of the engine that waits.
    fn wait_in<T>(&mut self, slot: usize, call: impl FnOnce() -> T) -> Result<T, Broken> {
        let driver = self.driver.clone();
        let result = driver.wait_in(slot, call);
        self.look_at_all()?;
        Ok(result)
    }

    // --- Looking ------------------------------------------------------------------------------

    /// Collects new connections, outcomes and notifications.
    fn look(&mut self) -> Check {
        self.note_failed_dials();
        self.look_for_peers()?;
        self.look_for_losses()?;
        let is_open = |op: &Op| op.transfer.is_some() && op.outcome.is_none();
        let mut open: Vec<usize> = (0..self.ops.len()).filter(|index| is_open(&self.ops[*index])).collect();
        if open.len() > ASKED_MAX {
            self.asked = (self.asked + ASKED_MAX) % open.len();
            open.rotate_left(self.asked);
            open.truncate(ASKED_MAX);
        }
        for index in open {
            let op = &self.ops[index];
            let Some(transfer) = op.transfer.as_ref().filter(|_| self.is_alive(op.post.link, op.post.side))
            else {
                continue;
            };
            let moved = transfer.bytes_moved();
            if moved < op.moved || moved > op.post.bytes as u64 {
                let what =
                    format!("{transfer:?} has moved {moved} bytes, and {} at the check before", op.moved);
                return broken("bytes are counted up to the size", what);
            }
            let outcome = transfer.poll();
            let waits = op.stream.is_some_and(|stream| self.driver.stream_waits(stream));
            // One without bytes may end at once.
            if waits && (moved > 0 || matches!(outcome, Some(Ok(bytes)) if bytes > 0)) {
                let what = format!("{:?} has moved {moved} bytes: {outcome:?}", op.post);
                return broken("an operation begins after its stream's work", what);
            }
            self.ops[index].moved = moved;
            if let Some(outcome) = outcome {
                self.ended(index, outcome)?;
            }
        }
        for link in 0..self.links.len() {
            for side in 0..2 {
                self.look_for_notifications(link, side)?;
            }
        }
        Ok(())
    }

    /// Repeats the check so that the outcome of every operation is known afterwards.
    fn look_at_all(&mut self) -> Check {
        for _ in 0..2 + 2 * self.ops.len() / ASKED_MAX {
            self.look()?;
        }
        Ok(())
    }

    fn look_for_peers(&mut self) -> Check {
        for index in 0..self.links.len() {
            let link = &mut self.links[index];
            if link.peers[0].is_none()
                && let Some(result) = link.connecting.as_ref().and_then(Connecting::poll)
            {
                link.connecting = None;
                self.connected(index, result, false)?;
            }
        }
        for end in 0..self.hosts.len() {
            let Some(slot) = self.hosts[end].slot.filter(|slot| !self.driver.is_stopped(*slot)) else {
                continue;
            };
            let Some(endpoint) = self.driver.endpoint(slot) else { continue };
            while let Some(Ok(peer)) = endpoint.try_accept() {
                let dials = |link: &Link| {
                    let dialler = self.driver.endpoint(link.slots[0]);
                    dialler.is_some_and(|dialler| dialler.identity() == peer.identity())
                };
                let fits =
                    |link: &Link| link.started && !link.accepted && link.slots[1] == slot && dials(link);
                if let Some(link) = self.links.iter_mut().find(|link| fits(link)) {
                    (link.peers[1], link.accepted) = (Some(peer), true);
                }
            }
        }
        Ok(())
    }

    /// Stores the result of a connect, by a call with a timeout or not.
    fn connected(&mut self, index: usize, result: Result<Peer, ConnectError>, has_timeout: bool) -> Check {
        match result {
            Ok(peer) => {
                self.out.connected.push(index);
                self.links[index].peers[0] = Some(peer);
                Ok(())
            }
            Err(error) => self.connect_failed(index, &error, has_timeout),
        }
    }

    fn look_for_notifications(&mut self, link: usize, side: usize) -> Check {
        let Link { peers, reading, .. } = &self.links[link];
        let Some(peer) = peers[side].clone().filter(|_| reading[side] && self.is_alive(link, side)) else {
            return Ok(());
        };
        while let Ok(Some(message)) = peer.poll_notification() {
            self.notified(link, side, &message)?;
        }
        let resumed = peer.stats().channels.iter().any(|channel| !channel.alive);
        self.links[link].resumed = resumed;
        Ok(())
    }

    /// Whether the process at one side of a link runs.
    pub fn is_alive(&self, link: usize, side: usize) -> bool {
        let slot = self.links[link].slots[side];
        self.driver.endpoint(slot).is_some() && !self.driver.is_stopped(slot)
    }

    fn check_areas(&mut self, all: bool) -> Check {
        for index in 0..self.areas.len() {
            if !all && !matches!(self.areas[index].phase, Phase::Open | Phase::OpenForMessage) {
                continue;
            }
            if let Err(why) = self.areas[index].check() {
                let users =
                    self.ops.iter().filter(|op| op.sources.contains(&index) || op.targets.contains(&index));
                let users: Vec<_> = users.map(|op| format!("{:?}, {:?}", op.post, op.outcome)).collect();
                return broken("no byte is written late, or outside", format!("{why}: {users:?}"));
            }
        }
        Ok(())
    }

    fn note_outcome(&mut self, index: usize) {
        let op = &self.ops[index];
        let kind = match &op.outcome {
            Some(Ok(bytes)) => *bytes,
            Some(Err(error)) => 1 << 40 | error.kind() as u64,
            None => 1 << 41,
        };
        for number in [op.post.id as u64, kind] {
            self.outcomes = (self.outcomes ^ number).wrapping_mul(0x0100_0000_01b3);
        }
    }

    pub fn ended(&mut self, index: usize, outcome: Result<u64, TransferError>) -> Check {
        note!(self, "operation {} ended: {outcome:?}", self.ops[index].post.id);
        self.ops[index].outcome = Some(outcome);
        self.note_outcome(index);
        self.judge(index)
    }

    // --- Steps --------------------------------------------------------------------------------
}

impl Host {
    fn gpu_fails_from(&mut self, when: Duration) {
        self.gpu_faulty = Some(self.gpu_faulty.map_or(when, |since| since.min(when)));
    }

    /// Whether a NIC is gone for good.
    fn has_lost(&self, nic: usize) -> bool {
        self.cut_until[nic] == Duration::MAX
    }

    /// The addresses of the NICs that are left.
    fn addresses(&self) -> Vec<IpAddr> {
        let left = (0..self.nics.len()).filter(|nic| !self.has_lost(*nic));
        left.map(|nic| self.nics[nic]).collect()
    }
}

impl Link {
    fn new(plan: (usize, usize)) -> Link {
        Link {
            plan,
            slots: [usize::MAX; 2],
            connecting: None,
            failed: None,
            peers: [None, None],
            started: false,
            began: Duration::ZERO,
            accepted: false,
            closing: [false; 2],
            outages: Vec::new(),
            peer_timeout: Duration::ZERO,
            well_at: [Duration::ZERO; 2],
            is_lost: false,
            reading: [true; 2],
            resumed: false,
        }
    }
}

/// Number of bytes of one pair of regions of an operation.
pub fn part_bytes(post: &Post, part: usize) -> usize {
    let each = post.bytes / post.regions.max(1);
    if part + 1 == post.regions { post.bytes - each * part } else { each }
}

/// The salt of the byte pattern of one pair of regions.
pub fn salt_of(op: OpId, part: usize) -> u64 {
    1 + (op as u64) * 8 + part as u64
}

/// The bytes of a notification, which contain the number of its operation.
pub fn notification(op: OpId, bytes: usize) -> Vec<u8> {
    let mut message = (op as u64).to_le_bytes().to_vec();
    message.extend(pattern(bytes.saturating_sub(8), op as u64));
    message
}
