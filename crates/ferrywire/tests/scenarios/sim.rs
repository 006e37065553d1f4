//! The simulated world: one thread polls every endpoint, and time advances when no endpoint has work.
//!
//! Invariant: a scenario that hangs fails, at the latest after [`LIMIT`] of virtual time or [`TURNS_MAX`]
//! turns, with its seed and the network's last events.

use crate::world::{Faulty, Gpus, World};
use ferrywire::{Builder, Encryption, Endpoint, Peer, Result, Transfer, TransferError};
use ferrywire_memory::sim::SimGpu;
use ferrywire_net::sim::{Faults, SimHost, SimNet};
use rand::SeedableRng;
use rand::rngs::StdRng;
use std::cell::Cell;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Virtual time after which whatever is waited for will not come.
const LIMIT: Duration = Duration::from_secs(90);
/// Turns after which the same holds.
const TURNS_MAX: u32 = 3_000_000;
/// Longest step of the clock: engines check their timers this often.
const STEP_MAX: Duration = Duration::from_millis(20);
/// Longest step while threads run that may not keep up with the clock.
const SHORT_STEP: Duration = Duration::from_millis(1);
/// The simulated time of one pass.
const TURN: Duration = Duration::from_micros(1);
const PORT: u16 = 7420;
const SECRET: &str = "a secret for simulated hosts";

struct Member {
    endpoint: Option<Endpoint>,
    host: Arc<SimHost>,
    nics: Vec<IpAddr>,
    frozen: bool,
}

pub struct SimWorld {
    gpus: Gpus,
    net: Arc<SimNet>,
    rng: StdRng,
    members: Vec<Member>,
    step_max: Rc<Cell<Duration>>,
    /// Turns taken since something last was waited for in vain.
    turns: Cell<u32>,
}

/// Runs a scenario with many seeds.
pub fn run(name: &str, seeds: u64, scenario: impl Fn(&mut SimWorld)) {
    run_with(name, seeds, |_| Gpus::default(), scenario);
}

/// Runs a scenario with memory on GPUs at one end or both.
pub fn run_on_gpus(name: &str, seeds: u64, scenario: impl Fn(&mut SimWorld)) {
    let _open = Gpus::default().open();
    run_with(name, seeds, |seed| Gpus::MIXES[(seed % 3) as usize], scenario);
}

fn run_with(name: &str, seeds: u64, gpus: impl Fn(u64) -> Gpus, scenario: impl Fn(&mut SimWorld)) {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let seeds = match (number("FERRYWIRE_SEED"), number("FERRYWIRE_SEEDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, Some(count)) => 0..count,
        (None, None) => 0..seeds,
    };
    if std::env::var_os("FERRYWIRE_LOG").is_some() {
        let _ = tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).with_test_writer().try_init();
    }
    for seed in seeds {
        let mut world = SimWorld::new(seed, gpus(seed));
        let result = catch_unwind(AssertUnwindSafe(|| {
            scenario(&mut world);
            world.finish();
        }));
        if let Err(panic) = result {
            eprintln!("--- the network's last events ---");
            world.net.trace().iter().for_each(|line| eprintln!("{line}"));
            eprintln!("{name} failed; repeat with FERRYWIRE_SEED={seed}");
            // A broken endpoint's goodbye would wait for a clock that does not advance.
            std::mem::forget(world);
            resume_unwind(panic);
        }
    }
}

impl SimWorld {
    fn new(seed: u64, gpus: Gpus) -> SimWorld {
        let net = SimNet::new(seed);
        if seed > 0 {
            net.set_faults(Faults::benign(seed));
        }
        SimWorld {
            gpus,
            net,
            rng: StdRng::seed_from_u64(seed),
            members: Vec::new(),
            step_max: Rc::new(Cell::new(STEP_MAX)),
            turns: Cell::new(0),
        }
    }

    fn turn(&self) -> bool {
        let mut worked = false;
        let running = self.members.iter().filter(|member| !member.frozen);
        for endpoint in running.filter_map(|member| member.endpoint.as_ref()) {
            worked |= endpoint.progress();
        }
        self.turns.set(self.turns.get() + 1);
        let now = self.net.now();
        // They copy in real time.
        let copies = self.gpus_copy();
        let step = match worked || copies {
            true => TURN,
            false => self.net.next_event().map_or(self.step_max.get(), |next| {
                next.saturating_sub(now).clamp(TURN, self.step_max.get())
            }),
        };
        self.net.advance(step);
        worked
    }

    /// Runs a call on a thread of its own, so that this one can turn the clock: the one place where a seed does not
    /// repeat everything. The clock waits until that thread has read it twice, then takes a step of up to `longest`. If
    /// that thread waits without reading it, such as for a lock, the clock takes short steps.
    fn while_waiting<T: Send>(&mut self, longest: Duration, call: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let waiting = scope.spawn(call);
            let (net, step_max) = (self.net.clone(), self.step_max.clone());
            self.until("a call that waits", || {
                let (reads, since) = (net.clock_reads(), Instant::now());
                let has_read = || net.clock_reads() >= reads + 2;
                while !has_read() && !waiting.is_finished() && since.elapsed() < Duration::from_millis(2) {
                    std::thread::sleep(Duration::from_micros(20));
                }
                step_max.set(if has_read() { longest } else { SHORT_STEP });
                waiting.is_finished().then_some(())
            });
            self.step_max.set(STEP_MAX);
            waiting.join().unwrap()
        })
    }

    fn gpus_copy(&self) -> bool {
        let gpus = (0..self.members.len()).filter_map(|index| self.gpus.of(index));
        gpus.filter_map(SimGpu::opened).any(|gpu| gpu.has_work() && !gpu.faults().stall)
    }

    /// Of eight worlds two have encrypted connections, and one has authenticated ones.
    fn builder(host: &Arc<SimHost>, seed: u64) -> Builder {
        Endpoint::builder()
            .encryption(if seed % 4 == 1 { Encryption::Required } else { Encryption::Off })
            .keyed_checksum(seed % 8 == 2)
            .listen(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), PORT))
            .secret(SECRET)
            .label(host.host_name())
            .channels(3)
            .threads(0)
            .transport(host.clone())
    }

    /// Every peer is closed, on both sides, now that the scenario holds none any more.
    fn finish(&mut self) {
        let ends: Vec<Endpoint> = self.members.iter().filter_map(|member| member.endpoint.clone()).collect();
        self.until("all peers to be closed", || ends.iter().all(|end| end.peer_count() == 0).then_some(()));
    }
}

impl World for SimWorld {
    fn add(&mut self, nics: usize, adapt: impl FnOnce(Builder) -> Builder) -> usize {
        let index = self.members.len();
        let names: Vec<String> = (0..nics).map(|nic| format!("eth{nic}")).collect();
        let address = |nic: usize| IpAddr::from([10, 0, nic as u8, index as u8 + 1]);
        let addresses: Vec<IpAddr> = (0..nics).map(address).collect();
        let list: Vec<(&str, IpAddr)> = names.iter().map(String::as_str).zip(addresses.clone()).collect();
        let host = self.net.host(&format!("host{index}"), &list);
        let endpoint = adapt(SimWorld::builder(&host, self.net.seed())).build().unwrap();
        self.members.push(Member { endpoint: Some(endpoint), host, nics: addresses, frozen: false });
        index
    }

    fn end(&self, index: usize) -> Endpoint {
        self.members[index].endpoint.clone().expect("it was killed")
    }

    fn connect_at(&mut self, from: usize, to: usize, address: SocketAddr) -> (Peer, Peer) {
        let connecting = self.end(from).start_connect(address).unwrap();
        let acceptor = self.end(to);
        let (mut near, mut far) = (None, None);
        self.until("a connection", || {
            near = near.take().or_else(|| connecting.poll());
            far = far.take().or_else(|| acceptor.try_accept());
            (near.is_some() && far.is_some()).then_some(())
        });
        (near.unwrap().unwrap(), far.unwrap().unwrap())
    }

    fn address(&self, index: usize) -> SocketAddr {
        SocketAddr::new(self.members[index].nics[0], PORT)
    }

    fn until<T>(&mut self, what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
        let start = self.net.now();
        self.turns.set(0);
        loop {
            if let Some(value) = poll() {
                return value;
            }
            self.turn();
            let waited = self.net.now() - start;
            assert!(
                waited < LIMIT && self.turns.get() < TURNS_MAX,
                "waited {waited:?} and {} turns for {what}",
                self.turns.get()
            );
        }
    }

    fn outcome(&mut self, transfer: &Transfer) -> Result<u64, TransferError> {
        self.until(&format!("{transfer:?}"), || transfer.poll())
    }

    fn notification(&mut self, peer: &Peer) -> Result<Vec<u8>, TransferError> {
        self.until("a notification", || peer.poll_notification().transpose())
    }

    fn blocking<T: Send>(&mut self, call: impl FnOnce() -> T + Send) -> T {
        self.while_waiting(STEP_MAX, call)
    }

    /// By short steps: one thread that reads the clock does not show that the others keep up with it.
    fn blocking_threads<T: Send>(&mut self, call: impl FnOnce() -> T + Send) -> T {
        self.while_waiting(SHORT_STEP, call)
    }

    fn linger(&mut self) {
        self.pass(Duration::from_millis(100));
    }

    fn rng(&mut self) -> &mut StdRng {
        &mut self.rng
    }

    fn gpus(&self) -> Gpus {
        self.gpus
    }

    fn bytes_max(&self) -> usize {
        300_000
    }

    fn chunk_bytes(&self) -> usize {
        8192
    }
}

impl Faulty for SimWorld {
    fn net(&self) -> Arc<SimNet> {
        self.net.clone()
    }

    fn nic(&self, index: usize, nic: usize) -> IpAddr {
        self.members[index].nics[nic]
    }

    fn pass(&mut self, time: Duration) {
        let until = self.net.now() + time;
        while self.net.now() < until {
            self.turn();
        }
    }

    fn kill(&mut self, index: usize) {
        self.net.kill(self.members[index].host.host_name());
        let endpoint = self.members[index].endpoint.take().expect("it was killed before");
        // A killed process runs no farewell.
        std::mem::forget(endpoint);
    }

    fn drop_end(&mut self, index: usize) {
        let endpoint = self.members[index].endpoint.take().expect("it was killed before");
        self.blocking(|| drop(endpoint));
    }

    fn freeze(&mut self, index: usize) {
        self.members[index].frozen = true;
        self.net.freeze(self.members[index].host.host_name());
    }

    fn thaw(&mut self, index: usize) {
        self.members[index].frozen = false;
        self.net.thaw(self.members[index].host.host_name());
    }

    fn restart(&mut self, index: usize, adapt: impl FnOnce(Builder) -> Builder) {
        let member = &mut self.members[index];
        self.net.revive(member.host.host_name());
        member.endpoint = Some(adapt(SimWorld::builder(&member.host, self.net.seed())).build().unwrap());
    }
}

/// Whether an error says that the peer is gone.
pub fn is_gone(error: &TransferError) -> bool {
    matches!(error, TransferError::PeerLost { .. } | TransferError::PeerClosed { .. } | TransferError::Closed)
}
