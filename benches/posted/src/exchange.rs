//! Messages both ways at once, one thread at each end: a round has one of each connection there and one back, and the next
//! begins when all are here. So a collective's steps use a plugin.
//!
//! `--plain` has sockets instead, moved on that thread alone, which is what NCCL does without a plugin.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use crate::flags::Flags;
use crate::session::{Target, hex, say, unhex};
use crate::sys;
use crate::table::{Net, Opaque};

/// Rounds before the timed ones; the first is verified.
const WARM_UP: u64 = 500;

/// The end that answers.
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
    pairs.iter_mut().for_each(|pair| pair.memory().fill(true));
    loop {
        let Ok(line) = next() else { return Ok(()) };
        let rounds = line.parse().map_err(|_| io::Error::other("not a number of rounds"))?;
        let cpu = sys::cpu_seconds();
        (0..rounds).try_for_each(|_| round(&mut pairs))?;
        if !pairs.iter_mut().all(|pair| pair.memory().holds(false)) {
            return Err(io::Error::other("the data are wrong"));
        }
        say(format!("done {}", sys::cpu_seconds() - cpu))?;
    }
}

/// The end that begins, and measures.
pub fn source(flags: &Flags) -> io::Result<()> {
    sys::ignore_sigpipe();
    let mut far = Target::spawn()?;
    let mut pairs: Vec<Box<dyn Pair>> = Vec::new();
    if flags.plain {
        let port = far.line("port ")?.parse().map_err(|_| io::Error::other("the target's port is none"))?;
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
    pairs.iter_mut().for_each(|pair| pair.memory().fill(false));
    let every = Duration::from_secs_f64(flags.every_us.max(0.0) / 1e6);
    let mut run = |rounds: u64| -> io::Result<(Vec<Duration>, f64)> {
        let cpu = sys::cpu_seconds();
        far.tell(&rounds.to_string())?;
        let mut next = Instant::now();
        let timed = |_| -> io::Result<Duration> {
            // The other end waits in its receive.
            while Instant::now() < next {
                std::hint::spin_loop();
            }
            let begun = Instant::now();
            next = begun + every;
            round(&mut pairs)?;
            Ok(begun.elapsed())
        };
        let took = (0..rounds).map(timed).collect::<io::Result<Vec<_>>>()?;
        let told = far.line("done ")?;
        let there: f64 = told.parse().map_err(|_| io::Error::other(format!("the target said {told:?}")))?;
        if !pairs.iter_mut().all(|pair| pair.memory().holds(true)) {
            return Err(io::Error::other("the data are wrong"));
        }
        Ok((took, sys::cpu_seconds() - cpu + there))
    };
    run(1)?;
    let (warm, _) = run(WARM_UP)?;
    let mean = warm.iter().sum::<Duration>().as_secs_f64() / WARM_UP as f64;
    let (mut took, cpu_seconds) = run(((flags.seconds / mean.max(every.as_secs_f64())) as u64).max(100))?;
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

/// A message over each pair both ways.
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

/// A way there and a way back.
trait Pair {
    fn begin(&mut self) -> io::Result<()>;
    fn is_done(&mut self) -> io::Result<bool>;
    fn memory(&mut self) -> &mut Memory;
}

/// What goes and what comes.
struct Memory {
    out: &'static mut [u8],
    into: &'static mut [u8],
}

impl Memory {
    fn new(flags: &Flags) -> io::Result<Memory> {
        Ok(Memory { out: sys::memory(flags.chunk)?, into: sys::memory(flags.chunk)? })
    }

    /// One end's bytes; the next call for `holds` finds nothing of an earlier round.
    fn fill(&mut self, is_target: bool) {
        self.out.iter_mut().enumerate().for_each(|(at, byte)| *byte = byte_at(at, is_target));
    }

    /// Whether the other end's bytes are here, which are forgotten then.
    fn holds(&mut self, of_target: bool) -> bool {
        let found = self.into.iter().enumerate().all(|(at, byte)| *byte == byte_at(at, of_target));
        self.into.fill(0);
        found
    }
}

fn byte_at(at: usize, of_target: bool) -> u8 {
    (at % 251) as u8 ^ if of_target { 0xA5 } else { 0x3C }
}

/// Two comms of a plugin.
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
            // SAFETY: registered memory, which nobody looks at before the message is here.
            self.received = unsafe { self.net.irecv(comm, into.as_mut_ptr(), into.len(), memory) }?;
        }
        while self.sent.is_none() {
            let (comm, memory) = self.goes;
            // SAFETY: registered memory, which stays as it is.
            self.sent = unsafe { self.net.isend(comm, out.as_mut_ptr(), out.len(), memory) }?;
        }
        Ok(())
    }

    fn is_done(&mut self) -> io::Result<bool> {
        // SAFETY: each is its connection's only request, and was not done before.
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

/// Two sockets.
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

/// Bytes that a call has moved, if it could.
fn moved(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
        other => other,
    }
}
