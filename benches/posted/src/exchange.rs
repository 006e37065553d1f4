//! Messages in both directions at once, with one thread at each end. In a round each connection carries one
//! message each way, and the next round begins when all messages have arrived. A collective's steps use a
//! plugin in this way.
//!
//! With `--plain`, sockets replace the plugin, and that one thread moves their bytes. This is less than NCCL
//! does without a plugin, which also sends lengths.
//!
//! If rounds have a pace, both ends begin each round at the same time, or late. A round has ended at an end
//! when the bytes that it sent are in the kernel and the bytes of the other end have arrived.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use crate::flags::Flags;
use crate::session::{Target, hex, say, unhex};
use crate::sys;
use crate::table::{Net, Opaque};

/// Most rounds before the timed ones, and the seconds that they take.
const WARM_UP_ROUNDS: f64 = 500.0;
const WARM_UP_S: f64 = 0.2;
/// Number of rounds that are timed to estimate how long one round takes.
const TRIED_ROUNDS: u64 = 3;
/// Time from the message to the target until the first round begins, in nanoseconds, if rounds have a pace.
const LEAD_NS: u64 = 2_000_000;

/// Runs the end that answers.
pub fn target(flags: &Flags) -> io::Result<()> {
    sys::die_with_parent();
    sys::ignore_sigpipe();
    let mut lines = io::stdin().lines();
    let mut next = || lines.next().unwrap_or_else(|| Err(io::ErrorKind::UnexpectedEof.into()));
    let mut pairs: Vec<Box<dyn Pair>> = Vec::new();
    if flags.plain {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        say(format!("port {}", listener.local_addr()?.port()))?;
        for _ in 0..flags.comms {
            let [comes, goes] = [listener.accept()?.0, listener.accept()?.0];
            pairs.push(Box::new(Sockets::new(goes, comes, flags)?));
        }
    } else {
        let net = Net::load(&flags.plugin)?;
        for _ in 0..flags.comms {
            let (listener, handle) = net.listen(flags.device)?;
            say(format!("handle {}", hex(&handle)))?;
            let there = next()?;
            let comes = net.accept(listener)?;
            let goes = net.connect(flags.device, unhex(&there)?)?;
            pairs.push(Box::new(Comms::new(net, goes, comes, flags)?));
        }
    }
    say("ready".to_owned())?;
    for run in 0.. {
        let Ok(line) = next() else { break };
        let wrong = || io::Error::other("the source did not send a number of rounds and a time");
        let (rounds, first_ns) = line.split_once(' ').ok_or_else(wrong)?;
        let (rounds, first_ns) =
            (rounds.parse().map_err(|_| wrong())?, first_ns.parse().map_err(|_| wrong())?);
        let cpu = sys::cpu_seconds();
        timed(&mut pairs, Pace { run, rounds, first_ns, every_ns: every_ns(flags) }, Side::Target)?;
        say(format!("done {}", sys::cpu_seconds() - cpu))?;
    }
    Ok(())
}

/// Runs the end that starts the rounds, and measures them.
pub fn source(flags: &Flags) -> io::Result<()> {
    sys::ignore_sigpipe();
    let mut far = Target::spawn()?;
    let mut pairs: Vec<Box<dyn Pair>> = Vec::new();
    if flags.plain {
        let port = far
            .line("port ")?
            .parse()
            .map_err(|_| io::Error::other("the target did not send a port number"))?;
        for _ in 0..flags.comms {
            let connect = || TcpStream::connect((Ipv4Addr::LOCALHOST, port));
            let [goes, comes] = [connect()?, connect()?];
            pairs.push(Box::new(Sockets::new(goes, comes, flags)?));
        }
    } else {
        let net = Net::load(&flags.plugin)?;
        for _ in 0..flags.comms {
            let handle = far.handle()?;
            let (listener, back) = net.listen(flags.device)?;
            far.tell(&hex(&back))?;
            let goes = net.connect(flags.device, handle)?;
            let comes = net.accept(listener)?;
            pairs.push(Box::new(Comms::new(net, goes, comes, flags)?));
        }
    }
    far.line("ready")?;
    let (mut runs, every_ns) = (0.., every_ns(flags));
    let mut run = |rounds: u64| -> io::Result<(Vec<Duration>, f64)> {
        let (cpu, first_ns) = (sys::cpu_seconds(), sys::shared_clock_ns() + LEAD_NS);
        far.tell(&format!("{rounds} {first_ns}"))?;
        let pace = Pace { run: runs.next().unwrap_or_default(), rounds, first_ns, every_ns };
        let took = timed(&mut pairs, pace, Side::Source)?;
        let reported = far.line("done ")?;
        let there: f64 = reported.parse().map_err(|_| {
            io::Error::other(format!("the target reported {reported:?}, not its CPU seconds"))
        })?;
        Ok((took, sys::cpu_seconds() - cpu + there))
    };
    let mean = |took: &[Duration]| {
        let mean = took.iter().sum::<Duration>().as_secs_f64() / took.len() as f64;
        mean.max(every_ns as f64 / 1e9)
    };
    run(1)?;
    let (tried, _) = run(TRIED_ROUNDS)?;
    let (warm, _) = run((WARM_UP_S / mean(&tried)).clamp(1.0, WARM_UP_ROUNDS) as u64)?;
    let (mut took, cpu_seconds) = run((flags.seconds / mean(&warm)).max(1.0) as u64)?;
    let (rounds, seconds) = (took.len() as f64, took.iter().sum::<Duration>().as_secs_f64());
    took.sort_unstable();
    let us = |part: f64| took[(part * (rounds - 1.0)) as usize].as_secs_f64() * 1e6;
    let gb = rounds * (flags.chunk * flags.comms) as f64 / 1e9;
    println!(
        "{{\"p50_us\":{:.2},\"p99_us\":{:.2},\"mean_us\":{:.2},\"gb_per_s_each_way\":{:.3},\"cpu_us\":{:.2},\"comms\":{},\"bytes\":{}}}",
        us(0.5),
        us(0.99),
        seconds / rounds * 1e6,
        gb / seconds,
        cpu_seconds / rounds * 1e6,
        flags.comms,
        flags.chunk,
    );
    Ok(())
}

/// When the rounds of a run begin.
struct Pace {
    /// Number of this run of rounds.
    run: u8,
    rounds: u64,
    first_ns: u64,
    /// Shortest time from the start of one round to the next, in nanoseconds; with 0 each round begins as
    /// soon as it can.
    every_ns: u64,
}

fn every_ns(flags: &Flags) -> u64 {
    (flags.every_us * 1e3) as u64
}

/// The end that wrote some bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Source,
    Target,
}

impl Side {
    fn other(self) -> Side {
        if self == Side::Source { Side::Target } else { Side::Source }
    }
}

/// Runs the rounds of one end. Checks that the last round delivered the other end's bytes of this run.
/// Returns the duration of each round.
fn timed(pairs: &mut [Box<dyn Pair>], pace: Pace, side: Side) -> io::Result<Vec<Duration>> {
    for (index, pair) in pairs.iter_mut().enumerate() {
        pair.memory().fill(Pattern { side, run: pace.run, index });
    }
    let mut took = Vec::new();
    for number in 0..pace.rounds {
        while pace.every_ns > 0 && sys::shared_clock_ns() < pace.first_ns + number * pace.every_ns {
            thread::yield_now();
        }
        let begun = Instant::now();
        round(pairs)?;
        took.push(begun.elapsed());
    }
    let mut each = pairs.iter_mut().enumerate();
    match each.all(|(index, pair)| pair.memory().holds(Pattern { side: side.other(), run: pace.run, index }))
    {
        true => Ok(took),
        false => Err(io::Error::other("the received bytes differ from what the other end sent")),
    }
}

/// Moves one message each way over every pair.
fn round(pairs: &mut [Box<dyn Pair>]) -> io::Result<()> {
    pairs.iter_mut().try_for_each(|pair| pair.begin())?;
    let mut left = pairs.len();
    let mut done = vec![false; pairs.len()];
    while left > 0 {
        let before = left;
        for (pair, done) in pairs.iter_mut().zip(&mut done).filter(|(_, done)| !**done) {
            *done = pair.is_done()?;
            left -= usize::from(*done);
        }
        if left == before {
            thread::yield_now();
        }
    }
    Ok(())
}

/// A pair of paths: one for outgoing and one for incoming messages.
trait Pair {
    fn begin(&mut self) -> io::Result<()>;
    fn is_done(&mut self) -> io::Result<bool>;
    fn memory(&mut self) -> &mut Memory;
}

/// The memory of outgoing and incoming messages.
struct Memory {
    out: &'static mut [u8],
    into: &'static mut [u8],
}

impl Memory {
    fn new(flags: &Flags) -> io::Result<Memory> {
        Ok(Memory { out: sys::memory(flags.chunk)?, into: sys::memory(flags.chunk)? })
    }

    fn fill(&mut self, pattern: Pattern) {
        self.out.iter_mut().enumerate().for_each(|(at, byte)| *byte = pattern.byte(at));
    }

    /// Whether the received bytes are those of this pattern.
    fn holds(&self, pattern: Pattern) -> bool {
        self.into.iter().enumerate().all(|(at, byte)| *byte == pattern.byte(at))
    }
}

/// Selects bytes that differ between ends, runs and pairs.
#[derive(Clone, Copy)]
struct Pattern {
    side: Side,
    run: u8,
    index: usize,
}

impl Pattern {
    fn byte(self, at: usize) -> u8 {
        let salt = (self.index as u8).wrapping_mul(16)
            ^ self.run.wrapping_mul(2)
            ^ u8::from(self.side == Side::Target);
        (at % 251) as u8 ^ salt
    }
}

/// A pair of comms of a plugin.
struct Comms {
    net: Net,
    memory: Memory,
    goes: (Opaque, Opaque),
    comes: (Opaque, Opaque),
    sent: Option<Opaque>,
    received: Option<Opaque>,
}

impl Comms {
    fn new(net: Net, goes: Opaque, comes: Opaque, flags: &Flags) -> io::Result<Comms> {
        let memory = Memory::new(flags)?;
        let goes = (goes, net.register(goes, memory.out)?);
        let comes = (comes, net.register(comes, memory.into)?);
        Ok(Comms { net, memory, goes, comes, sent: None, received: None })
    }
}

impl Pair for Comms {
    fn begin(&mut self) -> io::Result<()> {
        let Memory { out, into } = &mut self.memory;
        while self.received.is_none() {
            let (comm, memory) = self.comes;
            // SAFETY: the memory is registered, and no thread reads it before the message has arrived.
            self.received = unsafe { self.net.irecv(comm, into.as_mut_ptr(), into.len(), memory) }?;
        }
        while self.sent.is_none() {
            let (comm, memory) = self.goes;
            // SAFETY: the memory is registered, and does not change until the message is sent.
            self.sent = unsafe { self.net.isend(comm, out.as_mut_ptr(), out.len(), memory) }?;
        }
        Ok(())
    }

    fn is_done(&mut self) -> io::Result<bool> {
        // SAFETY: each request is the only one of its connection, and was not done before.
        unsafe {
            if self.sent.map_or(Ok(false), |request| self.net.test(request))? {
                self.sent = None;
            }
            if let Some(request) = self.received
                && self.net.test(request)?
            {
                self.net.consumed(self.comes.0, request)?;
                self.received = None;
            }
        }
        Ok(self.sent.is_none() && self.received.is_none())
    }

    fn memory(&mut self) -> &mut Memory {
        &mut self.memory
    }
}

/// A pair of sockets.
struct Sockets {
    memory: Memory,
    goes: TcpStream,
    comes: TcpStream,
    sent: usize,
    received: usize,
}

impl Sockets {
    fn new(goes: TcpStream, comes: TcpStream, flags: &Flags) -> io::Result<Sockets> {
        for socket in [&goes, &comes] {
            socket.set_nodelay(true)?;
            socket.set_nonblocking(true)?;
        }
        Ok(Sockets { memory: Memory::new(flags)?, goes, comes, sent: flags.chunk, received: flags.chunk })
    }
}

impl Pair for Sockets {
    fn begin(&mut self) -> io::Result<()> {
        (self.sent, self.received) = (0, 0);
        self.is_done().map(drop)
    }

    fn is_done(&mut self) -> io::Result<bool> {
        let Memory { out, into } = &mut self.memory;
        if self.sent < out.len() {
            self.sent += moved(self.goes.write(&out[self.sent..]))?;
        }
        if self.received < into.len() {
            self.received += moved(self.comes.read(&mut into[self.received..]))?;
        }
        Ok(self.sent == out.len() && self.received == into.len())
    }

    fn memory(&mut self) -> &mut Memory {
        &mut self.memory
    }
}

/// Number of bytes that a call has moved; 0 if the socket was not ready.
fn moved(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
        other => other,
    }
}
