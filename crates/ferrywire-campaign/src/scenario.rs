//! A scenario as a value: endpoints, links between them, and steps in virtual time.
//!
//! Invariant: a seed always gives one scenario, and a scenario without some of its steps is a scenario, so a
//! failed one can be shrunk.
//! Read next: `run.rs`, which plays one.

use ferrywire_sys::rng::Rng;

/// Longest time for which work in a GPU's stream waits: the clock goes in small steps meanwhile.
const STREAM_US_MAX: u64 = 20_000;

/// Most bytes of an operation that is short: it fits one frame.
const SHORT_BYTES_MAX: usize = 4096;

/// Number of an operation, which stays the same when other steps are removed.
pub type OpId = usize;

/// The scenario of one run.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The seed of the scenario and of its network.
    pub seed: u64,
    /// Whether sends and receives move only a part of the bytes and are delayed, at random.
    pub benign: bool,
    /// The protection of all data connections.
    pub protection: Protection,
    /// The endpoints, each on a host of its own.
    pub ends: Vec<EndPlan>,
    /// Which endpoint connects to which, by number. One pair may have several links, one after the other.
    pub links: Vec<(usize, usize)>,
    /// The steps of the run, in order.
    pub steps: Vec<Step>,
}

impl Scenario {
    /// Whether bytes are corrupted on their way; frames then have checksums, or connections are protected.
    pub fn corrupts(&self) -> bool {
        let corrupt = |fault: &Fault| matches!(fault, Fault::Corrupt { .. });
        let asked = self.steps.iter().any(|step| match &step.action {
            Action::Fault(fault) => corrupt(fault),
            Action::ClosePeer { meanwhile: Some((_, fault)), .. } => corrupt(fault),
            Action::CloseEnd { meanwhile: Some((_, fault)), .. } => corrupt(fault),
            _ => false,
        });
        asked && (self.protection != Protection::Off || self.ends.iter().all(|end| end.crc))
    }
}

/// How data connections are protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    Off,
    Authenticated,
    Encrypted,
}

/// The options of an endpoint, and the NICs of its host.
#[derive(Clone, Debug)]
pub struct EndPlan {
    /// Rate in bytes per second and additional latency in microseconds of each NIC.
    pub nics: Vec<(Option<u64>, u64)>,
    pub channels: usize,
    pub chunk_bytes: usize,
    pub window: usize,
    pub crc: bool,
    pub peer_timeout_ms: u64,
}

/// An action, after a pause in virtual time.
#[derive(Clone, Debug)]
pub struct Step {
    pub pause_us: u64,
    pub action: Action,
}

/// The action of a step.
#[derive(Clone, Debug)]
pub enum Action {
    /// Starts to connect a link; later steps of the link wait for the outcome.
    Connect {
        link: usize,
    },
    /// Connects a link by a call that waits, for at most this long.
    ConnectWithin {
        link: usize,
        timeout_us: u64,
    },
    Post(Post),
    Cancel(OpId),
    /// Waits for an operation by a call with a timeout.
    Wait {
        op: OpId,
        timeout_us: u64,
    },
    /// Deregisters the memory of an operation, at its source or its target.
    Deregister {
        op: OpId,
        of_source: bool,
    },
    /// Drops the handle of an operation's memory.
    DropRegion {
        op: OpId,
        of_source: bool,
    },
    /// Frees an operation's GPU memory although it is registered.
    Free {
        op: OpId,
        of_source: bool,
    },
    /// Polls all endpoints this many times: where no NIC limits the rate, bytes move without any time passing.
    Poll(usize),
    Fault(Fault),
    /// Closes a peer by a call that waits, with a fault some time after it began.
    ClosePeer {
        link: usize,
        side: usize,
        timeout_us: u64,
        meanwhile: Option<(u64, Fault)>,
    },
    /// Drops the handle of a peer.
    DropPeer {
        link: usize,
        side: usize,
    },
    CloseEnd {
        end: usize,
        timeout_us: u64,
        meanwhile: Option<(u64, Fault)>,
    },
    Kill {
        end: usize,
    },
    Restart {
        end: usize,
    },
    /// Stops or continues to read the notifications of one end.
    ReadNotifications {
        link: usize,
        side: usize,
        on: bool,
    },
}

/// An operation that a step posts.
#[derive(Clone, Debug)]
pub struct Post {
    pub id: OpId,
    pub link: usize,
    /// Index of the link's end that posts the operation, 0 or 1.
    pub side: usize,
    pub verb: Verb,
    pub bytes: usize,
    /// Number of blocks per pair of regions.
    pub blocks: usize,
    /// Number of pairs of regions.
    pub regions: usize,
    /// Bytes of the notification that goes with a write.
    pub notify: Option<usize>,
    /// Whether the source's memory is a GPU's; the next field is the same for the target.
    pub source_on_gpu: bool,
    pub target_on_gpu: bool,
    /// Whether the caller owns the memory, not the engine.
    pub raw: bool,
    /// The operation begins after work in a stream of a GPU, which waits for so long.
    pub stream_us: Option<u64>,
}

impl Post {
    /// An operation of one run of bytes, in host memory that the engine owns, at both ends.
    pub fn plain(id: OpId, link: usize, side: usize, verb: Verb, bytes: usize) -> Post {
        Post {
            id,
            link,
            side,
            verb,
            bytes,
            blocks: 1,
            regions: 1,
            notify: None,
            source_on_gpu: false,
            target_on_gpu: false,
            raw: false,
            stream_us: None,
        }
    }
}

/// Kind of an operation, with its tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    Write,
    Read,
    Send { tag: u64 },
    Recv { tag: u64 },
    Notify,
}

/// A fault of the network, a host or a GPU.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    Cut {
        end: usize,
        nic: usize,
        out: bool,
        into: bool,
        us: u64,
    },
    Partition {
        end: usize,
        us: u64,
    },
    Reset {
        pick: u64,
        by_dialler: bool,
        later_us: Option<u64>,
    },
    ResetAll {
        with_control: bool,
    },
    ResetNic {
        end: usize,
        nic: usize,
    },
    Stall {
        pick: u64,
        us: u64,
    },
    Freeze {
        end: usize,
        us: u64,
    },
    /// A NIC of several is gone for good.
    DeleteNic {
        end: usize,
        nic: usize,
    },
    /// The endpoint is not polled for a time, while its kernel continues.
    Sleep {
        end: usize,
        us: u64,
    },
    RefuseDials {
        end: usize,
        nic: usize,
        count: usize,
        silent: bool,
    },
    Latency {
        end: usize,
        nic: usize,
        us: u64,
    },
    Rate {
        end: usize,
        nic: usize,
        bytes_per_second: u64,
    },
    /// Random faults of the network begin.
    Rough,
    Corrupt {
        times: u32,
    },
    GpuStall {
        end: usize,
        us: u64,
    },
    GpuFail {
        end: usize,
        after: u64,
        us: u64,
    },
}

impl Fault {
    /// Name of the fault in the table of coverage.
    pub fn name(&self) -> &'static str {
        match self {
            Fault::Cut { out: true, into: true, .. } => "NIC cut",
            Fault::Cut { .. } => "NIC cut one way",
            Fault::Partition { .. } => "partition",
            Fault::Reset { .. } => "connection lost",
            Fault::ResetAll { .. } => "all connections lost",
            Fault::ResetNic { .. } => "connections of a NIC lost",
            Fault::DeleteNic { .. } => "NIC deleted",
            Fault::Stall { .. } => "silent connection",
            Fault::Freeze { .. } => "host stopped",
            Fault::Sleep { .. } => "slow reader",
            Fault::RefuseDials { silent: false, .. } => "dials refused",
            Fault::RefuseDials { .. } => "dials unanswered",
            Fault::Latency { .. } => "delay",
            Fault::Rate { .. } => "slow NIC",
            Fault::Rough => "faults by chance",
            Fault::Corrupt { .. } => "corrupt bytes",
            Fault::GpuStall { .. } => "GPU stalled",
            Fault::GpuFail { .. } => "GPU copies fail",
        }
    }
}

/// Draws the scenario of a seed.
pub fn scenario(seed: u64) -> Scenario {
    Draw::new(seed).scenario()
}

struct Draw {
    rng: Rng,
    seed: u64,
    ends: Vec<EndPlan>,
    links: Vec<(usize, usize)>,
    steps: Vec<Step>,
    ops: Vec<Post>,
    gpus: bool,
    /// Most bytes of an operation.
    bytes_max: usize,
    /// Number from which kinds of pauses are drawn; the larger it is, the rarer are long pauses.
    slow: u64,
}

impl Draw {
    fn new(seed: u64) -> Draw {
        let mut rng = Rng::new(seed ^ 0x0063_616d_7061_6967);
        let gpus = rng.below(4) == 0;
        let bytes_max = [3000, 40_000, 200_000, 400_000][rng.below(4) as usize];
        let slow = 1 + rng.below(12);
        Draw {
            rng,
            seed,
            ends: Vec::new(),
            links: Vec::new(),
            steps: Vec::new(),
            ops: Vec::new(),
            gpus,
            bytes_max,
            slow,
        }
    }

    fn below(&mut self, end: usize) -> usize {
        self.rng.below(end as u64) as usize
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.rng.below(count) == 0
    }

    /// A random number up to `max`, small ones as likely as large ones.
    fn scaled(&mut self, max: u64) -> u64 {
        let bits = 64 - max.leading_zeros() as u64;
        let most = 1u64.checked_shl(self.rng.below(bits + 1) as u32).unwrap_or(max).min(max);
        self.rng.below(most + 1)
    }

    fn scenario(mut self) -> Scenario {
        let benign = !self.one_in(5);
        let protection = match self.below(8) {
            0 | 1 => Protection::Encrypted,
            2 => Protection::Authenticated,
            _ => Protection::Off,
        };
        self.topology();
        self.connections();
        // Where sends are partial it cannot use up the credit for messages.
        if self.one_in(if benign { 25 } else { 8 }) {
            self.flood(benign);
        }
        let count = 4 + self.below(28);
        for _ in 0..count {
            self.step();
        }
        let Draw { seed, ends, links, steps, .. } = self;
        Scenario { seed, benign, protection, ends, links, steps }
    }

    fn topology(&mut self) {
        let count = if self.one_in(4) { 3 } else { 2 };
        let nics = 1 + self.below(4);
        let (chunk_bytes, crc) = ([4096, 8192, 8192, 65536][self.below(4)], self.one_in(3));
        for _ in 0..count {
            let nics = if self.one_in(5) { 1 + self.below(4) } else { nics };
            let nics = (0..nics).map(|_| self.nic()).collect();
            let channels = 1 + self.below(4);
            let window = [2, 8, 64, 256][self.below(4)];
            let peer_timeout_ms = if self.one_in(3) { 4000 } else { 10_000 };
            self.ends.push(EndPlan { nics, channels, chunk_bytes, window, crc, peer_timeout_ms });
        }
    }

    fn nic(&mut self) -> (Option<u64>, u64) {
        let rate = [None, Some(200_000_000), Some(20_000_000), Some(4_000_000)][self.below(4)];
        (rate, if self.one_in(3) { self.scaled(20_000) } else { 0 })
    }

    fn connections(&mut self) {
        let pairs: &[(usize, usize)] = match (self.ends.len(), self.below(3)) {
            (2, _) => &[(0, 1)],
            (_, 0) => &[(0, 1), (2, 1)],
            (_, 1) => &[(0, 1), (0, 2)],
            _ => &[(0, 1), (1, 2), (2, 0)],
        };
        for pair in pairs {
            self.links.push(*pair);
            let link = self.links.len() - 1;
            if self.one_in(6) {
                self.fault();
            }
            self.connect(link);
            if self.one_in(6) {
                self.fault();
            }
        }
    }

    fn connect(&mut self, link: usize) {
        let action = match self.one_in(6) {
            true => Action::ConnectWithin { link, timeout_us: 200 + self.scaled(8_000_000) },
            false => Action::Connect { link },
        };
        self.push(action);
    }

    fn push(&mut self, action: Action) {
        let pause_us = match self.rng.below(self.slow) {
            0 => self.scaled(3_000_000),
            1 => self.scaled(30_000),
            2 => self.scaled(2000),
            _ => 0,
        };
        self.steps.push(Step { pause_us, action });
    }

    fn step(&mut self) {
        match self.rng.below(100) {
            0..58 => {
                let bytes = self.some_bytes();
                self.post(bytes);
            }
            58..64 => self.interrupted(),
            64..82 => self.fault(),
            82..88 => self.cancel(),
            88..92 => self.take_memory(),
            92..94 => self.wait(),
            94..95 => self.readers(),
            _ => self.end_something(),
        }
    }

    fn some_bytes(&mut self) -> usize {
        match self.below(8) {
            0 => [0, 1, 63, 64, 65_535, 65_536, 65_537][self.below(7)].min(self.bytes_max),
            _ => self.scaled(self.bytes_max as u64) as usize,
        }
    }

    /// Adds operations, short or of the largest size, and cancels them or takes their memory while their bytes are on their way.
    /// Often connections are lost about then: with the bytes, or with the report that they were refused.
    fn interrupted(&mut self) {
        let (first, from, count) = (self.ops.len(), self.steps.len(), 1 + self.below(3));
        for _ in 0..count {
            let short = (1 + self.below(SHORT_BYTES_MAX)).min(self.bytes_max);
            let bytes = if self.one_in(2) { self.bytes_max } else { short };
            self.post(bytes);
        }
        self.steps[from + 1..].iter_mut().for_each(|step| step.pause_us = step.pause_us.min(100));
        let (after_us, polls) = if self.one_in(2) { (self.scaled(20_000), 0) } else { (0, self.scaled(60)) };
        let lost = if self.one_in(2) { 1 + self.below(3) } else { 0 };
        // One end sees such a loss before its bytes have left, the other about when they would arrive.
        (0..lost).for_each(|_| {
            let later_us = Some(after_us + self.scaled(4000));
            self.reset(later_us);
        });
        self.push_after(after_us, Action::Poll(polls as usize));
        let both_ends = self.one_in(4);
        for op in first..self.ops.len() {
            let action = match self.below(4) {
                0 => Action::Cancel(op),
                of_source => Action::Deregister { op, of_source: of_source == 1 },
            };
            self.push_after(0, action);
            if both_ends {
                self.reset(None);
            }
        }
    }

    /// Adds the loss of a connection: one end sees it at once, the other after `later_us`, or at once too.
    fn reset(&mut self, later_us: Option<u64>) {
        let (pick, by_dialler) = (self.rng.number(), self.one_in(2));
        self.push_after(0, Action::Fault(Fault::Reset { pick, by_dialler, later_us }));
    }

    /// Adds an action after exactly this pause.
    fn push_after(&mut self, pause_us: u64, action: Action) {
        self.steps.push(Step { pause_us, action });
    }

    fn post(&mut self, bytes: usize) {
        let (link, side) = (self.below(self.links.len()), self.below(2));
        let many = self.one_in(4);
        let (blocks, regions) = if many { (1 + self.scaled(40) as usize, 1 + self.below(3)) } else { (1, 1) };
        let on_gpu = [self.gpus && self.one_in(2), self.gpus && self.one_in(2)];
        let post = Post {
            id: self.ops.len(),
            link,
            side,
            verb: Verb::Write,
            bytes,
            blocks,
            regions,
            notify: None,
            source_on_gpu: on_gpu[0],
            target_on_gpu: on_gpu[1],
            raw: self.one_in(2),
            stream_us: (self.gpus && self.one_in(5)).then(|| self.scaled(STREAM_US_MAX)),
        };
        match self.below(10) {
            0..3 => self.add(Post { notify: None, ..post }),
            3..5 => {
                let notify = Some(8 + self.scaled(3000) as usize);
                self.add(Post { notify, ..post });
            }
            5..7 => self.add(Post { verb: Verb::Read, ..post }),
            7 => {
                let notify = Some(8 + self.scaled(500) as usize);
                // One that waits counts as posted only when it begins.
                let plain = Post { blocks: 1, regions: 1, stream_us: None, ..post };
                self.add(Post { verb: Verb::Notify, bytes: 0, notify, ..plain });
            }
            _ => self.message(post),
        }
    }

    fn add(&mut self, post: Post) {
        let post = Post { id: self.ops.len(), ..post };
        self.ops.push(post.clone());
        self.push(Action::Post(post));
    }

    /// Adds a send, a receive, or both in either order; most receives are long enough.
    fn message(&mut self, post: Post) {
        let tag = self.rng.below(3);
        let post = Post { regions: 1, ..post };
        let send = Post { verb: Verb::Send { tag }, ..post.clone() };
        let room = match self.below(8) {
            0 => post.bytes.saturating_sub(1 + self.below(100)),
            1..4 => post.bytes,
            _ => post.bytes + self.below(1000),
        };
        // A receive that waits comes behind those of its tag that are posted meanwhile.
        let recv =
            Post { verb: Verb::Recv { tag }, side: 1 - post.side, bytes: room, stream_us: None, ..post };
        match self.below(8) {
            0 => self.add(send),
            1 => self.add(recv),
            2..5 => {
                self.add(send);
                self.add(recv);
            }
            _ => {
                self.add(recv);
                self.add(send);
            }
        }
    }

    /// Adds more messages than the other end holds, before one of them is received. Where sends are partial
    /// the messages are small: large ones would take a million calls.
    fn flood(&mut self, benign: bool) {
        let (link, side, tag) = (self.below(self.links.len()), self.below(2), 9);
        let bytes = if benign { 400 } else { [65_536, 60_000, 400][self.below(3)] };
        let count = if bytes < 1000 { 200 } else { 70 + self.below(30) };
        let plain = Post::plain(0, link, side, Verb::Send { tag }, bytes);
        let (sends, slow) = (self.steps.len(), std::mem::replace(&mut self.slow, 12));
        (0..count).for_each(|_| self.add(plain.clone()));
        self.slow = slow;
        self.steps[sends..].iter_mut().for_each(|step| step.pause_us = step.pause_us.min(100));
        (0..count).for_each(|_| self.add(Post { verb: Verb::Recv { tag }, side: 1 - side, ..plain.clone() }));
    }

    fn some_op(&mut self) -> Option<OpId> {
        if self.ops.is_empty() {
            return None;
        }
        // One of the last operations is the most likely choice.
        let back = self.scaled(self.ops.len() as u64 - 1) as usize;
        Some(self.ops.len() - 1 - back)
    }

    fn cancel(&mut self) {
        if let Some(op) = self.some_op() {
            self.push(Action::Cancel(op));
        }
    }

    fn wait(&mut self) {
        let timeout_us = self.scaled(5_000_000);
        if let Some(op) = self.some_op() {
            self.push(Action::Wait { op, timeout_us });
        }
    }

    fn take_memory(&mut self) {
        let (of_source, kind) = (self.one_in(2), self.below(5));
        let Some(op) = self.some_op() else { return };
        match kind {
            0..3 => self.push(Action::Deregister { op, of_source }),
            3 => self.push(Action::DropRegion { op, of_source }),
            _ if self.gpus => self.push(Action::Free { op, of_source }),
            _ => {}
        }
    }

    fn readers(&mut self) {
        let (link, side, on) = (self.below(self.links.len()), self.below(2), self.one_in(2));
        self.push(Action::ReadNotifications { link, side, on });
    }

    fn fault(&mut self) {
        let fault = self.some_fault();
        self.push(Action::Fault(fault));
    }

    fn some_fault(&mut self) -> Fault {
        let end = self.below(self.ends.len());
        let nic = self.below(self.ends[end].nics.len());
        let us = match self.below(4) {
            0 => self.scaled(12_000_000),
            1 => self.scaled(2_000_000),
            _ => self.scaled(100_000),
        };
        match self.below(if self.gpus { 23 } else { 19 }) {
            0 | 1 => Fault::Cut { end, nic, out: true, into: true, us },
            2 => {
                let out = self.one_in(2);
                Fault::Cut { end, nic, out, into: !out, us }
            }
            3 => Fault::Partition { end, us },
            4..8 => {
                let later_us = if self.one_in(2) { Some(self.scaled(50_000)) } else { None };
                Fault::Reset { pick: self.rng.number(), by_dialler: self.one_in(2), later_us }
            }
            8 | 9 => Fault::ResetAll { with_control: self.one_in(2) },
            10 => Fault::ResetNic { end, nic },
            11 => Fault::Stall { pick: self.rng.number(), us: us / 4 },
            12 => Fault::Freeze { end, us },
            13 => Fault::Sleep { end, us },
            14 => {
                let count = 1 + self.scaled(12) as usize;
                Fault::RefuseDials { end, nic, count, silent: self.one_in(3) }
            }
            15 => Fault::Latency { end, nic, us: self.scaled(60_000) },
            16 if self.one_in(2) => Fault::Rough,
            16 => Fault::Rate { end, nic, bytes_per_second: 500_000 + self.scaled(50_000_000) },
            17 => Fault::Corrupt { times: 1 + self.below(3) as u32 },
            18 => Fault::DeleteNic { end, nic },
            19..21 => Fault::GpuStall { end, us: us / 4 },
            _ => Fault::GpuFail { end, after: self.scaled(30), us: us / 4 },
        }
    }

    fn meanwhile(&mut self) -> Option<(u64, Fault)> {
        self.one_in(2).then(|| (self.scaled(50_000), self.some_fault()))
    }

    fn end_something(&mut self) {
        let link = self.below(self.links.len());
        let (side, end) = (self.below(2), self.below(self.ends.len()));
        let timeout_us = self.scaled(20_000_000);
        match self.below(8) {
            0 | 1 => {
                let meanwhile = self.meanwhile();
                self.push(Action::ClosePeer { link, side, timeout_us, meanwhile });
            }
            2..5 => {
                self.push(Action::DropPeer { link, side });
                if self.one_in(2) {
                    self.fault();
                }
            }
            5 => {
                let meanwhile = self.meanwhile();
                self.push(Action::CloseEnd { end, timeout_us, meanwhile });
                return;
            }
            _ => {
                self.push(Action::Kill { end });
                if self.one_in(2) {
                    self.fault();
                }
                self.push(Action::Restart { end });
            }
        }
        if !self.one_in(3) {
            let (a, b) = self.links[link];
            let plan = if self.one_in(2) { (a, b) } else { (b, a) };
            self.links.push(plan);
            self.connect(self.links.len() - 1);
        }
    }
}
