//! Plays a scenario and checks, all the way, what has to hold.
//!
//! Invariant: a run ends, at the latest after [`SETTLE_MAX`] of virtual time behind its last step, and leaves
//! nothing behind.
//! Read next: `judge.rs`, which outcomes are allowed.

use std::mem::ManuallyDrop;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::Duration;

use ferrywire::net::sim::{DialFault, Faults, ResetSeen, Side, SimHost, SimNet};
use ferrywire::{Block, BlockList, Connecting, Endpoint, Peer, Transfer, TransferError};
use ferrywire_memory::sim::{SimFaults, SimGpu};

use crate::cover::Cover;
use crate::driver::{DrivenHost, Driver, Timed, gpu_faults};
use crate::memory::{Area, Phase, pattern, split};
use crate::scenario::{Action, Fault, OpId, Post, Scenario, Step, Verb};

/// Virtual time after the last step in which everything has to end.
pub const SETTLE_MAX: Duration = Duration::from_secs(120);
/// Virtual time in which a cancelled operation and a dropped peer have to end, once all is well.
const END_MAX: Duration = Duration::from_secs(40);
/// Virtual time for which a step waits for its link.
const CONNECT_MAX: Duration = Duration::from_secs(30);
/// Passes between two looks at all operations, while there is work.
const LOOK_PASSES: u64 = 12;
/// Most operations whose outcome is asked for in one look. Each question polls the engine.
const ASKED_MAX: usize = 16;
/// Steps between two checks of all memory.
const ALL_AREAS_STEPS: usize = 12;
/// Passes of a whole run.
const PASSES_MAX: u64 = 1_500_000;
/// Looks for endpoints that are held, 5 ms apart.
const HELD_LOOKS: u32 = 100;
const PORT: u16 = 7420;
const SECRET: &str = "a secret for simulated hosts";
/// Time without any path, all together, from which on a peer may be lost.
pub const OUTAGE_MAX: Duration = Duration::from_secs(1);

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

/// A broken invariant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    pub invariant: &'static str,
    pub detail: String,
}

pub type Check = Result<(), Broken>;

/// Makes an error of a broken invariant.
pub fn broken<T>(invariant: &'static str, detail: impl Into<String>) -> Result<T, Broken> {
    Err(Broken { invariant, detail: detail.into() })
}

/// What a run has shown.
#[derive(Default)]
pub struct Outcome {
    pub cover: Cover,
    /// Equal for equal runs.
    pub fingerprint: u64,
    /// What happened, if it was asked for.
    pub log: Vec<String>,
}

pub struct Host {
    sim: Arc<SimHost>,
    nics: Vec<IpAddr>,
    /// The slot of its endpoint, while it has one.
    pub slot: Option<usize>,
    pub gpu_faulty: bool,
    /// The cuts of its NICs, until when.
    cut_until: Vec<Duration>,
}

pub struct Link {
    pub plan: (usize, usize),
    pub slots: [usize; 2],
    connecting: Option<Connecting>,
    pub failed: Option<String>,
    pub peers: [Option<Peer>; 2],
    started: bool,
    accepted: bool,
    /// Whether its user has closed or dropped the peer, by side.
    pub closing: [bool; 2],
    /// Why the link may be lost.
    pub fragile: Option<&'static str>,
    outage: Duration,
    reading: [bool; 2],
    resumed: bool,
}

pub struct Op {
    pub post: Post,
    pub transfer: Option<Transfer>,
    pub outcome: Option<Result<u64, TransferError>>,
    /// Areas that are read, and areas that are written.
    pub sources: Vec<usize>,
    pub targets: Vec<usize>,
    pub cancelled: bool,
    pub notified: u32,
    /// Of a receive the send that it met, of a send the receive.
    pub met: Option<usize>,
    moved: u64,
}

pub struct Run<'a> {
    scenario: &'a Scenario,
    pub driver: Rc<Driver>,
    pub hosts: Vec<Host>,
    transports: Vec<Weak<DrivenHost>>,
    killed: Vec<(usize, Endpoint)>,
    pub links: Vec<Link>,
    /// In the order of posting.
    pub ops: Vec<Op>,
    pub areas: Vec<Area>,
    delayed: Vec<Fault>,
    out: &'a mut Outcome,
    pub logs: bool,
    looked: u64,
    /// The operation from which on outcomes were asked for last, of those that are open.
    asked: usize,
    outcomes: u64,
    /// Whether bytes are corrupted on their way, so that wrong ones land before their checksum does.
    corrupts: bool,
}

/// Plays a scenario on this thread, with these GPUs.
///
/// # Errors
/// The first broken invariant.
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
        delayed: Vec::new(),
        out,
        logs,
        looked: 0,
        asked: 0,
        outcomes: 0xcbf2_9ce4_8422_2325,
        corrupts: scenario.corrupts(),
    };
    // Also a panic leaves the endpoints as they are.
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
            self.links.push(Link::new((*a, *b)));
        }
        for index in 0..self.scenario.steps.len() {
            let step = self.scenario.steps[index].clone();
            self.step(&step)?;
            // What does not change any more is checked less often; each check at the end covers all.
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
        let cut_until = vec![Duration::ZERO; addresses.len()];
        self.hosts.push(Host { sim, nics: addresses, slot: None, gpu_faulty: false, cut_until });
    }

    fn start(&mut self, end: usize) -> Check {
        let (plan, slot) = (&self.scenario.ends[end], self.driver.reserve());
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
            .peer_timeout(Duration::from_millis(plan.peer_timeout_ms))
            .threads(0)
            .transport(transport)
            .build();
        match built {
            Ok(endpoint) => self.driver.fill(slot, endpoint),
            Err(error) => return broken("an endpoint starts", error.to_string()),
        }
        self.hosts[end].slot = Some(slot);
        Ok(())
    }

    // --- Time ---------------------------------------------------------------------------------

    /// Polls everything once, and looks at the outcomes now and then.
    fn pass(&mut self) -> Check {
        let worked = self.driver.pass();
        for fault in self.driver.take_due() {
            let fault = self.delayed[fault].clone();
            self.fault(&fault);
        }
        if !worked || self.driver.passes() >= self.looked + LOOK_PASSES {
            self.looked = self.driver.passes();
            self.look()?;
        }
        if self.driver.passes() > PASSES_MAX {
            return broken("a run is bounded", format!("{PASSES_MAX} passes"));
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

    /// Polls everything until `done`, or for this long. Returns whether it was done.
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

    /// Makes a call that waits.
    fn wait_in<T>(&mut self, slot: usize, call: impl FnOnce() -> T) -> Result<T, Broken> {
        let driver = self.driver.clone();
        let result = driver.wait_in(slot, call);
        for fault in self.driver.take_due() {
            let fault = self.delayed[fault].clone();
            self.fault(&fault);
        }
        // Each outcome is known afterwards.
        for _ in 0..2 + 2 * self.ops.len() / ASKED_MAX {
            self.look()?;
        }
        Ok(result)
    }

    // --- Looking ------------------------------------------------------------------------------

    /// Takes what has come about: connections, outcomes, notifications.
    fn look(&mut self) -> Check {
        self.look_for_peers();
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
                let what = format!("{transfer:?} has moved {moved} bytes, {} before", op.moved);
                return broken("bytes are counted up to the size", what);
            }
            let outcome = transfer.poll();
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

    fn look_for_peers(&mut self) {
        for index in 0..self.links.len() {
            let link = &mut self.links[index];
            if link.peers[0].is_none()
                && let Some(result) = link.connecting.as_ref().and_then(Connecting::poll)
            {
                link.connecting = None;
                self.connected(index, result);
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
    }

    fn connected(&mut self, index: usize, result: Result<Peer, ferrywire::ConnectError>) {
        match result {
            Ok(peer) => self.links[index].peers[0] = Some(peer),
            Err(error) => {
                note!(self, "link {index}: {error}");
                self.links[index].failed = Some(error.to_string());
            }
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

    /// Whether the process of one side runs.
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

    fn ended(&mut self, index: usize, outcome: Result<u64, TransferError>) -> Check {
        note!(self, "operation {} ended: {outcome:?}", self.ops[index].post.id);
        self.ops[index].outcome = Some(outcome);
        self.note_outcome(index);
        self.judge(index)
    }

    // --- Steps --------------------------------------------------------------------------------

    fn step(&mut self, step: &Step) -> Check {
        self.pass_time(Duration::from_micros(step.pause_us))?;
        note!(self, "step {:?}", step.action);
        match &step.action {
            Action::Connect { link } => self.connect(*link, None),
            Action::ConnectWithin { link, timeout_us } => {
                self.connect(*link, Some(Duration::from_micros(*timeout_us)))
            }
            Action::Post(post) => self.post(post),
            Action::Cancel(op) => {
                self.cancel(*op);
                Ok(())
            }
            Action::Wait { op, timeout_us } => self.wait(*op, Duration::from_micros(*timeout_us)),
            Action::Deregister { op, of_source } => self.deregister(*op, *of_source),
            Action::DropRegion { op, of_source } => self.drop_region(*op, *of_source),
            Action::Free { op, of_source } => {
                self.free(*op, *of_source);
                Ok(())
            }
            Action::Fault(fault) => {
                self.fault(fault);
                Ok(())
            }
            Action::ClosePeer { link, side, timeout_us, meanwhile } => {
                self.later(meanwhile);
                self.close_peer(*link, *side, Duration::from_micros(*timeout_us))
            }
            Action::DropPeer { link, side } => self.drop_peer(*link, *side),
            Action::CloseEnd { end, timeout_us, meanwhile } => {
                self.later(meanwhile);
                self.close_end(*end, Duration::from_micros(*timeout_us))
            }
            Action::Kill { end } => {
                self.kill(*end);
                Ok(())
            }
            Action::Restart { end } => self.restart(*end),
            Action::ReadNotifications { link, side, on } => {
                self.links[*link].reading[*side] = *on;
                Ok(())
            }
        }
    }

    fn connect(&mut self, index: usize, timeout: Option<Duration>) -> Check {
        let (from, to) = self.links[index].plan;
        let pair = |link: &Link| link.plan == (from, to) || link.plan == (to, from);
        let before: Vec<usize> = (0..index).filter(|each| pair(&self.links[*each])).collect();
        if !self.until(CONNECT_MAX, |run| before.iter().all(|each| run.is_over(*each)))? {
            return Ok(());
        }
        let (Some(near), Some(far)) = (self.hosts[from].slot, self.hosts[to].slot) else { return Ok(()) };
        let Some(endpoint) = self.driver.endpoint(near) else { return Ok(()) };
        let (nics, count) = (self.hosts[to].nics.clone(), self.ops.len());
        let address = SocketAddr::new(nics[(index + count) % nics.len()], PORT);
        let link = &mut self.links[index];
        (link.slots, link.started) = ([near, far], true);
        match timeout {
            Some(timeout) => {
                let since = self.driver.now();
                let result = self.wait_in(near, || endpoint.connect(address, timeout))?;
                let took = self.driver.now() - since;
                if took > timeout + Duration::from_secs(1) {
                    return broken("a connect ends at its timeout", format!("{took:?} of {timeout:?}"));
                }
                self.connected(index, result);
            }
            None => match endpoint.start_connect(address) {
                Ok(connecting) => self.links[index].connecting = Some(connecting),
                Err(error) => self.links[index].failed = Some(error.to_string()),
            },
        }
        Ok(())
    }

    /// Whether a link is over, or never came about.
    pub fn is_over(&self, index: usize) -> bool {
        let link = &self.links[index];
        let gone = |side: usize| match &link.peers[side] {
            _ if self.driver.endpoint(link.slots[side]).is_none() => true,
            Some(peer) => peer.error().is_some(),
            None => link.closing[side] || link.failed.is_some() || (side == 1 && link.peers[0].is_none()),
        };
        !link.started || link.failed.is_some() || (link.connecting.is_none() && gone(0) && gone(1))
    }

    /// The peer of a side once both ends have one.
    fn ready(&mut self, link: usize, side: usize) -> Result<Option<Peer>, Broken> {
        let settled = |run: &mut Self| {
            let link = &run.links[link];
            !link.started
                || link.failed.is_some()
                || link.closing != [false; 2]
                || link.peers.iter().all(Option::is_some)
                || link.slots.iter().any(|slot| run.driver.endpoint(*slot).is_none())
        };
        self.until(CONNECT_MAX, settled)?;
        let state = &self.links[link];
        let both = state.peers.iter().all(Option::is_some);
        Ok(state.peers[side].clone().filter(|_| both && self.driver.endpoint(state.slots[side]).is_some()))
    }

    /// The area of an operation at one end.
    fn area(
        &mut self,
        slot: usize,
        on_gpu: bool,
        post: &Post,
        part: usize,
        salt: Option<u64>,
    ) -> Option<usize> {
        let endpoint = self.driver.endpoint(slot)?;
        let gap = if post.blocks > 1 { 5 + part * 3 + usize::from(salt.is_some()) * 2 } else { 0 };
        let blocks = split(part_bytes(post, part), post.blocks, gap);
        let gpu = on_gpu.then(|| self.driver.gpus[slot % self.driver.gpus.len()].clone());
        let area = Area::new(slot, &endpoint, gpu.as_ref(), post.raw, blocks, salt).ok()?;
        self.areas.push(area);
        self.areas.last_mut().into_iter().for_each(|area| area.loose = self.corrupts);
        Some(self.areas.len() - 1)
    }

    fn post(&mut self, post: &Post) -> Check {
        let Some(peer) = self.ready(post.link, post.side)? else { return Ok(()) };
        let slots = self.links[post.link].slots;
        let (near, far) = (slots[post.side], slots[1 - post.side]);
        let (source, target) = if post.verb == Verb::Read { (far, near) } else { (near, far) };
        let (mut sources, mut targets) = (Vec::new(), Vec::new());
        for part in 0..post.regions {
            let salt = salt_of(post.id, part);
            if matches!(post.verb, Verb::Write | Verb::Read | Verb::Send { .. }) {
                let Some(area) = self.area(source, post.source_on_gpu, post, part, Some(salt)) else {
                    return Ok(());
                };
                sources.push(area);
            }
            if matches!(post.verb, Verb::Write | Verb::Read | Verb::Recv { .. }) {
                let at = if matches!(post.verb, Verb::Recv { .. }) { near } else { target };
                let Some(area) = self.area(at, post.target_on_gpu, post, part, None) else { return Ok(()) };
                match post.verb {
                    Verb::Recv { .. } => self.areas[area].phase = Phase::OpenForMessage,
                    _ => self.areas[area].expect(&pattern(part_bytes(post, part), salt)),
                }
                targets.push(area);
            }
        }
        let posted = self.posted(&peer, post, &sources, &targets);
        let mut op = Op {
            post: post.clone(),
            transfer: None,
            outcome: None,
            sources,
            targets,
            cancelled: false,
            notified: 0,
            met: None,
            moved: 0,
        };
        match posted {
            Ok(transfer) => {
                op.transfer = Some(transfer);
                self.ops.push(op);
                Ok(())
            }
            Err(error) => {
                self.ops.push(op);
                let index = self.ops.len() - 1;
                self.ended(index, Err(error))
            }
        }
    }

    fn posted(
        &self,
        peer: &Peer,
        post: &Post,
        sources: &[usize],
        targets: &[usize],
    ) -> Result<Transfer, TransferError> {
        let message = post.notify.map(|bytes| notification(post.id, bytes));
        let region = |area: usize| self.areas[area].region.clone().expect("it was registered just now");
        let single = (post.blocks, post.regions) == (1, 1);
        let at = |area: usize| self.areas[area].blocks[0].0 as u64;
        let bytes = post.bytes as u64;
        let pieces = |area: usize| -> Vec<(u64, u64)> {
            self.areas[area].blocks.iter().map(|(at, len)| (*at as u64, *len as u64)).collect()
        };
        match post.verb {
            Verb::Notify => peer.notify(&message.unwrap_or_default()),
            Verb::Send { tag } if single => peer.send(tag, &region(sources[0]), at(sources[0]), bytes),
            Verb::Send { tag } => peer.send_blocks(tag, &region(sources[0]), &pieces(sources[0])),
            Verb::Recv { tag } if single => peer.recv(tag, &region(targets[0]), at(targets[0]), bytes),
            Verb::Recv { tag } => peer.recv_blocks(tag, &region(targets[0]), &pieces(targets[0])),
            Verb::Write if single => {
                let (from, to) = (region(sources[0]), region(targets[0]).descriptor());
                let (a, b) = (at(sources[0]), at(targets[0]));
                match &message {
                    Some(message) => peer.write_notify(&from, a, &to, b, bytes, message),
                    None => peer.write(&from, a, &to, b, bytes),
                }
            }
            Verb::Read if single => {
                let (from, to) = (region(sources[0]).descriptor(), region(targets[0]));
                peer.read(&to, at(targets[0]), &from, at(sources[0]), bytes)
            }
            Verb::Write => peer.write_blocks(&self.list(sources, targets)?, None, message.as_deref()),
            Verb::Read => peer.read_blocks(&self.list(targets, sources)?, None),
        }
    }

    fn list(&self, local: &[usize], remote: &[usize]) -> Result<BlockList, TransferError> {
        let list = |(local, remote): (&usize, &usize)| {
            let (local, remote) = (&self.areas[*local], &self.areas[*remote]);
            let pairs = local.blocks.iter().zip(&remote.blocks);
            let block = |(a, b): (&(usize, usize), &(usize, usize))| Block {
                local_offset: a.0 as u64,
                remote_offset: b.0 as u64,
                bytes: a.1 as u64,
            };
            let blocks: Vec<Block> = pairs.map(block).collect();
            let (Some(local), Some(remote)) = (&local.region, &remote.region) else {
                unreachable!("new areas")
            };
            BlockList::new(local, &remote.descriptor(), &blocks)
        };
        let lists: Result<Vec<BlockList>, _> = local.iter().zip(remote).map(list).collect();
        let lists = lists?;
        BlockList::join(&lists.iter().collect::<Vec<_>>())
    }

    fn find(&self, op: OpId) -> Option<usize> {
        self.ops.iter().position(|each| each.post.id == op)
    }

    fn cancel(&mut self, op: OpId) {
        let Some(index) = self.find(op) else { return };
        let op = &mut self.ops[index];
        let (link, side) = (op.post.link, op.post.side);
        if !self.is_alive(link, side) {
            return;
        }
        let op = &mut self.ops[index];
        if let Some(transfer) = op.transfer.clone().filter(|_| op.outcome.is_none()) {
            op.cancelled = true;
            let (slot, driver) = (self.links[link].slots[side], self.driver.clone());
            driver.wait_in(slot, || transfer.cancel());
        }
    }

    fn wait(&mut self, op: OpId, timeout: Duration) -> Check {
        let Some(index) = self.find(op) else { return Ok(()) };
        let (link, side) = (self.ops[index].post.link, self.ops[index].post.side);
        let Some(transfer) = self.ops[index].transfer.clone().filter(|_| self.is_alive(link, side)) else {
            return Ok(());
        };
        let (since, before) = (self.driver.now(), self.ops[index].outcome.clone());
        let outcome = self.wait_in(self.links[link].slots[side], || transfer.wait_for(timeout, timeout))?;
        let took = self.driver.now() - since;
        if took > timeout + Duration::from_millis(500) {
            return broken("a wait ends at its timeout", format!("{took:?} of {timeout:?}: {outcome:?}"));
        }
        let timed_out =
            matches!(outcome, Err(TransferError::TimedOut { .. } | TransferError::Stalled { .. }));
        let known = if timed_out { before } else { self.ops[index].outcome.clone() };
        if known.is_some() == timed_out || known.as_ref().is_some_and(|known| *known != outcome) {
            return broken("a wait returns the outcome", format!("{outcome:?}, and a poll {known:?}"));
        }
        Ok(())
    }

    /// The areas of an operation at its source or its target, whose endpoint runs.
    fn areas_of(&self, op: OpId, of_source: bool) -> Vec<usize> {
        let Some(op) = self.find(op).map(|index| &self.ops[index]) else { return Vec::new() };
        let areas = if of_source { &op.sources } else { &op.targets };
        let runs = |slot: usize| self.driver.endpoint(slot).is_some() && !self.driver.is_stopped(slot);
        areas.iter().copied().filter(|area| runs(self.areas[*area].slot)).collect()
    }

    fn deregister(&mut self, op: OpId, of_source: bool) -> Check {
        for index in self.areas_of(op, of_source) {
            let owned_by_user = self.find(op).is_some_and(|op| self.ops[op].post.raw);
            let area = &mut self.areas[index];
            let Some(region) = area.region.clone().filter(|_| area.phase != Phase::Gone) else { continue };
            area.taken = true;
            let slot = area.slot;
            let result = self.wait_in(slot, || region.deregister())?;
            note!(self, "deregistered area {index}: {result:?}");
            if result.is_ok() && (owned_by_user || !of_source) {
                if let Err(why) = self.areas[index].check() {
                    return broken("no byte is written late, or outside", why);
                }
                let area = &mut self.areas[index];
                area.was_incomplete = area.phase == Phase::Open && area.check_done().is_err();
                area.poison();
            }
        }
        Ok(())
    }

    fn drop_region(&mut self, op: OpId, of_source: bool) -> Check {
        let owned_by_user = self.find(op).is_some_and(|op| self.ops[op].post.raw);
        for index in self.areas_of(op, of_source) {
            let area = &mut self.areas[index];
            let Some(region) = area.region.take() else { continue };
            let slot = area.slot;
            area.taken = true;
            if owned_by_user {
                self.wait_in(slot, || drop(region))?;
                self.areas[index].poison();
            } else {
                area.phase = Phase::Gone;
                self.wait_in(slot, || drop(region))?;
            }
        }
        Ok(())
    }

    fn free(&mut self, op: OpId, of_source: bool) {
        for index in self.areas_of(op, of_source) {
            if self.areas[index].free() {
                let slot = self.areas[index].slot;
                if let Some(host) = self.hosts.iter_mut().find(|host| host.slot == Some(slot)) {
                    host.gpu_faulty = true;
                }
            }
        }
    }

    // --- Ends ---------------------------------------------------------------------------------

    fn close_peer(&mut self, link: usize, side: usize, timeout: Duration) -> Check {
        let Some(peer) = self.ready(link, side)?.filter(|_| self.is_alive(link, side)) else { return Ok(()) };
        self.links[link].closing[side] = true;
        let (since, slot) = (self.driver.now(), self.links[link].slots[side]);
        let open = self.open_of(slot);
        let result = self.wait_in(slot, || peer.close(timeout))?;
        note!(self, "closed: {result:?}");
        let took = self.driver.now() - since;
        if took > timeout + Duration::from_secs(2) {
            return broken("a close ends at its timeout", format!("{took:?} of {timeout:?}: {result:?}"));
        }
        if peer.error().is_none() {
            return broken("a closed peer is closed", format!("{result:?}"));
        }
        self.closed_well(&open, Some(link), result.is_ok())
    }

    /// The operations of an endpoint that have not ended.
    fn open_of(&self, slot: usize) -> Vec<usize> {
        let is_open = |op: &Op| op.outcome.is_none() && self.links[op.post.link].slots[op.post.side] == slot;
        (0..self.ops.len()).filter(|index| is_open(&self.ops[*index])).collect()
    }

    /// After a close that went well, everything that was open, and could end, has ended well.
    fn closed_well(&mut self, open: &[usize], link: Option<usize>, well: bool) -> Check {
        // The outcomes at an end that is stopped are not known.
        let known = |op: &Op| op.outcome.is_some() || self.is_alive(op.post.link, op.post.side);
        let of_link = |op: &&Op| link.is_none_or(|link| link == op.post.link) && known(op);
        for op in open.iter().map(|index| &self.ops[*index]).filter(of_link) {
            let cut_off = matches!(
                op.outcome,
                None | Some(Err(TransferError::Closed
                    | TransferError::PeerClosed { .. }
                    | TransferError::PeerLost { .. }))
            );
            let unsent = op.transfer.is_none() || matches!(op.post.verb, Verb::Recv { .. });
            if well && cut_off && !unsent {
                let what = format!("{:?} ended in {:?}", op.post, op.outcome);
                return broken("a close finishes what was posted, or says that it did not", what);
            }
        }
        Ok(())
    }

    fn drop_peer(&mut self, link: usize, side: usize) -> Check {
        if self.ready(link, side)?.is_none() || !self.is_alive(link, side) {
            return Ok(());
        }
        self.links[link].closing[side] = true;
        self.links[link].peers[side] = None;
        Ok(())
    }

    fn close_end(&mut self, end: usize, timeout: Duration) -> Check {
        let Some(slot) = self.hosts[end].slot.filter(|slot| !self.driver.is_stopped(*slot)) else {
            return Ok(());
        };
        let Some(endpoint) = self.driver.endpoint(slot) else { return Ok(()) };
        for link in self.links.iter_mut().filter(|link| link.started) {
            let side = link.slots.iter().position(|each| *each == slot);
            if let Some(side) = side {
                link.closing[side] = true;
            }
        }
        let (since, open) = (self.driver.now(), self.open_of(slot));
        let result = self.wait_in(slot, || endpoint.close(timeout))?;
        note!(self, "closed the endpoint: {result:?}");
        let took = self.driver.now() - since;
        if took > timeout + Duration::from_secs(3) {
            return broken("a close ends at its timeout", format!("{took:?} of {timeout:?}: {result:?}"));
        }
        self.closed_well(&open, None, result.is_ok())
    }

    fn kill(&mut self, end: usize) {
        let Some(slot) = self.hosts[end].slot.take() else { return };
        self.note_phases("process killed", &[end]);
        self.driver.net.kill(self.hosts[end].sim.host_name());
        if let Some(endpoint) = self.driver.take(slot) {
            self.killed.push((slot, endpoint));
        }
        // Its memory is gone with the process, although its remains here read what had arrived.
        self.areas.iter_mut().filter(|area| area.slot == slot).for_each(|area| area.phase = Phase::Gone);
        for link in self.links.iter_mut().filter(|link| link.started && link.slots.contains(&slot)) {
            link.fragile = Some("its process was killed");
            if link.slots[0] == slot {
                link.connecting = None;
            }
        }
    }

    fn restart(&mut self, end: usize) -> Check {
        if self.hosts[end].slot.is_some() {
            return Ok(());
        }
        self.driver.net.revive(self.hosts[end].sim.host_name());
        self.start(end)
    }

    // --- Faults -------------------------------------------------------------------------------

    fn later(&mut self, fault: &Option<(u64, Fault)>) {
        if let Some((us, fault)) = fault {
            self.delayed.push(fault.clone());
            let when = self.driver.now() + Duration::from_micros(*us);
            self.driver.at(when, Timed::Begins(self.delayed.len() - 1));
        }
    }

    /// The phase of a link, for the table of coverage.
    fn phase(&self, index: usize) -> Option<&'static str> {
        let link = &self.links[index];
        if !link.started || link.failed.is_some() {
            return None;
        }
        if self.is_over(index) {
            return Some("over");
        }
        if link.closing != [false; 2] {
            return Some("draining");
        }
        if link.peers.iter().any(Option::is_none) {
            return Some("connecting");
        }
        if link.resumed {
            return Some("channels down");
        }
        let busy = self.ops.iter().any(|op| op.post.link == index && op.outcome.is_none());
        Some(if busy { "in flight" } else { "idle" })
    }

    fn note_phases(&mut self, fault: &'static str, ends: &[usize]) {
        for index in 0..self.links.len() {
            let (a, b) = self.links[index].plan;
            if (ends.is_empty() || ends.contains(&a) || ends.contains(&b))
                && let Some(phase) = self.phase(index)
            {
                self.out.cover.count(fault, phase);
            }
        }
    }

    /// Adds to the time in which the links of an end may have had no path.
    fn outage(&mut self, end: usize, time: Duration) {
        for link in self.links.iter_mut().filter(|link| link.plan.0 == end || link.plan.1 == end) {
            link.outage += time;
            if link.outage >= OUTAGE_MAX {
                link.fragile = Some("it had no path for a while");
            }
        }
    }

    fn fragile(&mut self, end: Option<usize>, why: &'static str) {
        let of = |link: &Link| end.is_none_or(|end| link.plan.0 == end || link.plan.1 == end);
        self.links.iter_mut().filter(|link| of(link)).for_each(|link| link.fragile = Some(why));
    }

    /// A connection that exists, of those that carry data or of all.
    fn pick(&self, pick: u64) -> Option<ferrywire::net::sim::ConnId> {
        let all = self.driver.net.connections();
        (!all.is_empty()).then(|| all[(pick % all.len() as u64) as usize].id)
    }

    fn fault(&mut self, fault: &Fault) {
        note!(self, "fault {fault:?}");
        let (net, now) = (self.driver.net.clone(), self.driver.now());
        let us = Duration::from_micros;
        let ends = match fault {
            Fault::Cut { end, .. }
            | Fault::Partition { end, .. }
            | Fault::ResetNic { end, .. }
            | Fault::Freeze { end, .. }
            | Fault::Sleep { end, .. }
            | Fault::RefuseDials { end, .. }
            | Fault::Latency { end, .. }
            | Fault::Rate { end, .. }
            | Fault::GpuStall { end, .. }
            | Fault::GpuFail { end, .. } => vec![*end],
            _ => Vec::new(),
        };
        self.note_phases(fault.name(), &ends);
        match fault {
            Fault::Cut { end, nic, out, into, us: time } => self.cut(*end, *nic, (*out, *into), us(*time)),
            Fault::Partition { end, us: time } => {
                for nic in 0..self.hosts[*end].nics.len() {
                    self.cut(*end, nic, (true, true), us(*time));
                }
            }
            Fault::Reset { pick, by_dialler, later_us } => {
                let first = if *by_dialler { Side::Dialler } else { Side::Acceptor };
                let seen = later_us.map_or(ResetSeen::AtOnce, |later| ResetSeen::OtherEndAfter(us(later)));
                if let Some(conn) = self.pick(*pick) {
                    net.reset(conn, first, seen);
                }
            }
            Fault::ResetAll { with_control } => {
                for conn in net.connections().into_iter().filter(|conn| conn.bulk || *with_control) {
                    net.reset(conn.id, Side::Dialler, ResetSeen::AtOnce);
                }
            }
            Fault::ResetNic { end, nic } => {
                net.reset_nic(self.hosts[*end].nics[*nic], ResetSeen::AtOnce);
            }
            Fault::Stall { pick, us: time } => {
                if let Some(conn) = self.pick(*pick) {
                    net.stall(conn, us(*time));
                    (0..self.hosts.len()).for_each(|end| self.outage(end, us(*time)));
                }
            }
            Fault::Freeze { end, us: time } => self.freeze(*end, us(*time)),
            Fault::Sleep { end, us: time } => {
                if let Some(slot) = self.hosts[*end].slot {
                    self.driver.stop_polling(slot);
                    self.driver.at(now + us(*time), Timed::Wake(slot));
                    self.outage(*end, us(*time));
                }
            }
            Fault::RefuseDials { end, nic, count, silent } => {
                let how = if *silent { DialFault::TimeOut } else { DialFault::Refuse };
                net.fail_dials(self.hosts[*end].nics[*nic], how, *count);
                self.fragile(Some(*end), "dials fail");
            }
            Fault::Latency { end, nic, us: time } => {
                net.set_nic_latency(self.hosts[*end].nics[*nic], us(*time))
            }
            Fault::Rate { end, nic, bytes_per_second } => {
                net.set_bandwidth(self.hosts[*end].nics[*nic], Some(*bytes_per_second));
            }
            Fault::Rough => {
                net.set_faults(Faults::random(self.scenario.seed));
                self.fragile(None, "faults by chance");
            }
            Fault::Corrupt { times } => {
                // Behind the handshakes of data connections, which have their own proofs.
                if self.corrupts {
                    net.corrupt_bulk(400, *times);
                }
            }
            Fault::GpuStall { end, us: time } => self.gpu(*end, us(*time), None),
            Fault::GpuFail { end, after, us: time } => self.gpu(*end, us(*time), Some(*after)),
        }
    }

    fn cut(&mut self, end: usize, nic: usize, (out, into): (bool, bool), time: Duration) {
        let (net, now) = (self.driver.net.clone(), self.driver.now());
        let address = self.hosts[end].nics[nic];
        match (out, into) {
            (true, true) => net.cut_for(address, time),
            (true, false) => net.cut_outgoing(address),
            _ => net.cut_incoming(address),
        }
        if !(out && into) {
            self.driver.at(now + time, Timed::Heal(address));
        }
        self.hosts[end].cut_until[nic] = self.hosts[end].cut_until[nic].max(now + time);
        // With a second NIC cut anywhere at one time no pair of NICs may be left.
        let cuts = self.hosts.iter().flat_map(|host| &host.cut_until).filter(|until| **until > now).count();
        let alone = self.hosts.iter().any(|host| host.nics.len() == 1);
        if alone || cuts > 1 {
            (0..self.hosts.len()).for_each(|end| self.outage(end, time));
        }
    }

    fn freeze(&mut self, end: usize, time: Duration) {
        let Some(slot) = self.hosts[end].slot else { return };
        let name = self.hosts[end].sim.host_name().to_owned();
        self.driver.net.freeze(&name);
        self.driver.stop_polling(slot);
        let until = self.driver.now() + time;
        self.driver.at(until, Timed::Thaw(name));
        self.driver.at(until, Timed::Wake(slot));
        self.outage(end, time);
    }

    /// A GPU that stands still for a time, or whose copies fail after so many.
    fn gpu(&mut self, end: usize, time: Duration, fails_after: Option<u64>) {
        let Some(slot) = self.hosts[end].slot.filter(|_| !self.driver.gpus.is_empty()) else { return };
        let gpu = slot % self.driver.gpus.len();
        let until = self.driver.now() + time;
        match fails_after {
            None => {
                self.driver.gpus[gpu].set_stall(true);
                self.driver.at(until, Timed::GpuGoesOn(gpu));
            }
            Some(after) => {
                let faults = gpu_faults(&self.driver.gpus[gpu]);
                self.driver.gpus[gpu].set_faults(SimFaults { fail_after: Some(after), ..faults });
                self.driver.at(until, Timed::GpuWorksAgain(gpu));
                // Endpoints share GPUs.
                self.hosts.iter_mut().for_each(|host| host.gpu_faulty = true);
            }
        }
    }

    // --- The end ------------------------------------------------------------------------------

    /// Ends all faults, and waits until everything has ended that can.
    fn settle(&mut self) -> Check {
        note!(self, "all faults end");
        self.driver.end_faults();
        let net = self.driver.net.clone();
        net.set_faults(Faults::default());
        for host in &self.hosts {
            for nic in &host.nics {
                net.heal(*nic);
                net.set_bandwidth(*nic, None);
                net.set_nic_latency(*nic, Duration::ZERO);
            }
        }
        self.links.iter_mut().for_each(|link| link.reading = [true; 2]);
        if !self.until(SETTLE_MAX, |run| run.is_settled())? {
            let open: Vec<String> =
                self.open().map(|op| format!("{:?}: {:?}", op.post, op.transfer)).collect();
            let links: Vec<_> =
                self.links.iter().map(|link| format!("{:?} {:?}", link.plan, link.peers)).collect();
            return broken("every operation ends", format!("{open:?} over {links:?}"));
        }
        self.pass_time(Duration::from_millis(300))?;
        self.check_areas(true)?;
        self.check_messages()?;
        self.check_notifications()?;
        let left: Vec<OpId> = self.open().map(|op| op.post.id).collect();
        left.iter().for_each(|op| self.cancel(*op));
        if !self.until(END_MAX, |run| run.open().next().is_none())? {
            let open: Vec<String> =
                self.open().map(|op| format!("{:?}: {:?}", op.post, op.transfer)).collect();
            return broken("a cancelled operation ends", open.join(", "));
        }
        for index in 0..self.areas.len() {
            if let Err(why) = self.areas[index].freeze() {
                return broken("no byte is written late, or outside", why);
            }
        }
        self.pass_time(Duration::from_millis(300))?;
        self.check_areas(true)
    }

    /// Operations that have not ended, of processes that run.
    fn open(&self) -> impl Iterator<Item = &Op> {
        self.ops.iter().filter(|op| {
            let slot = self.links[op.post.link].slots[op.post.side];
            op.outcome.is_none() && self.driver.endpoint(slot).is_some()
        })
    }

    /// Whether nothing is left but messages that wait for their other end to be posted.
    fn is_settled(&self) -> bool {
        let connecting = self.links.iter().any(|link| link.connecting.is_some());
        !connecting && self.open().all(|op| self.waits_for_partner(op))
    }

    fn waits_for_partner(&self, op: &Op) -> bool {
        let partner = match op.post.verb {
            Verb::Send { tag } => Verb::Recv { tag },
            Verb::Recv { tag } => Verb::Send { tag },
            // A notification comes after the messages that were posted before it.
            Verb::Notify => {
                let same = |other: &&Op| (other.post.link, other.post.side) == (op.post.link, op.post.side);
                let before = self.ops.iter().take_while(|other| other.post.id != op.post.id).filter(same);
                let mut waiting = before.filter(|other| other.outcome.is_none());
                return waiting.any(|other| {
                    matches!(other.post.verb, Verb::Send { .. }) && self.waits_for_partner(other)
                });
            }
            _ => return false,
        };
        let (link, side) = (op.post.link, op.post.side);
        let dead = self.links[link].slots.iter().any(|slot| self.driver.endpoint(*slot).is_none());
        !dead
            && !self.is_over(link)
            && self.links[link].closing == [false; 2]
            && !self
                .open()
                .any(|other| (other.post.link, other.post.side, other.post.verb) == (link, 1 - side, partner))
    }

    /// Closes everything, and checks that nothing is left.
    fn close(&mut self) -> Check {
        note!(self, "everything is closed");
        for index in (0..self.areas.len()).step_by(2) {
            let area = &self.areas[index];
            let slot = area.slot;
            if self.driver.endpoint(slot).is_none() || area.taken {
                continue;
            }
            let Some(region) = area.region.clone() else { continue };
            if let Err(error) = self.wait_in(slot, || region.deregister())? {
                return broken("memory without operations is deregistered", error.to_string());
            }
            self.areas[index].poison();
        }
        self.ops.iter_mut().for_each(|op| op.transfer = None);
        self.links.iter_mut().for_each(|link| {
            link.connecting = None;
            link.peers = [None, None];
        });
        let slots: Vec<usize> = self.hosts.iter().filter_map(|host| host.slot).collect();
        let ends: Vec<Endpoint> = slots.iter().filter_map(|slot| self.driver.endpoint(*slot)).collect();
        if !self.until(END_MAX, |_| ends.iter().all(|end| end.peer_count() == 0))? {
            let counts: Vec<usize> = ends.iter().map(Endpoint::peer_count).collect();
            return broken("no peer is left", format!("{counts:?}"));
        }
        self.check_areas(true)?;
        drop(ends);
        for slot in slots {
            let endpoint = self.driver.take(slot);
            self.wait_in(slot, || drop(endpoint))?;
        }
        for (slot, endpoint) in std::mem::take(&mut self.killed) {
            self.wait_in(slot, || drop(endpoint))?;
        }
        self.check_areas(true)?;
        self.areas.clear();
        self.check_nothing_left()
    }

    fn check_nothing_left(&mut self) -> Check {
        let mut held = usize::MAX;
        // Another process may ask this one for its counters, and holds the peers meanwhile.
        for _ in 0..HELD_LOOKS {
            held = self.transports.iter().filter(|transport| transport.strong_count() > 0).count();
            if held == 0 {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        if held > 0 {
            return broken("an endpoint leaves nothing behind", format!("{held} endpoints are held"));
        }
        let open = self.driver.net.connections();
        if !open.is_empty() {
            return broken("an endpoint leaves nothing behind", format!("connections: {open:?}"));
        }
        Ok(())
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
            accepted: false,
            closing: [false; 2],
            fragile: None,
            outage: Duration::ZERO,
            reading: [true; 2],
            resumed: false,
        }
    }
}

/// Bytes of one pair of regions of an operation.
pub fn part_bytes(post: &Post, part: usize) -> usize {
    let each = post.bytes / post.regions.max(1);
    if part + 1 == post.regions { post.bytes - each * part } else { each }
}

/// The salt of the bytes of one pair of regions.
pub fn salt_of(op: OpId, part: usize) -> u64 {
    1 + (op as u64) * 8 + part as u64
}

/// A notification that names its operation.
pub fn notification(op: OpId, bytes: usize) -> Vec<u8> {
    let mut message = (op as u64).to_le_bytes().to_vec();
    message.extend(pattern(bytes.saturating_sub(8), op as u64));
    message
}
