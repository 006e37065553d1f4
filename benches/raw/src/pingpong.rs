//! Round trips on one connection: the source sends a message, the target sends it back.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use crate::bulk::{Role, core_of};
use crate::plan::{Plan, Wait};
use crate::sys;

const WARMUP_ROUNDS: usize = 1000;
const ROUNDS_MAX: usize = 10_000_000;

/// Round-trip times in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct RoundTrips {
    /// Number of round trips measured.
    pub count: usize,
    /// Median of the round trips, in microseconds.
    pub p50_us: f64,
    /// 99th percentile of the round trips, in microseconds.
    pub p99_us: f64,
}

/// Measures round trips, as their source.
pub fn source(plan: &Plan, stream: &TcpStream) -> io::Result<RoundTrips> {
    prepare(Role::Source, plan, stream)?;
    let mut message = vec![0x5a; plan.size as usize];
    for _ in 0..WARMUP_ROUNDS {
        round(plan.wait, stream, &mut message)?;
    }
    let rounds =
        if plan.iterations == 0 { ROUNDS_MAX } else { plan.iterations.min(ROUNDS_MAX as u64) as usize };
    let end = Instant::now() + Duration::from_secs_f64(plan.seconds);
    let mut times_ns = Vec::with_capacity(1 << 20);
    while times_ns.len() < rounds && (plan.iterations != 0 || Instant::now() < end) {
        let start = Instant::now();
        round(plan.wait, stream, &mut message)?;
        times_ns.push(start.elapsed().as_nanos() as u64);
    }
    times_ns.sort_unstable();
    let at = |share: f64| times_ns[((times_ns.len() - 1) as f64 * share) as usize] as f64 / 1e3;
    Ok(RoundTrips { count: times_ns.len(), p50_us: at(0.5), p99_us: at(0.99) })
}

/// Echoes until the source closes.
pub fn target(plan: &Plan, stream: &TcpStream) -> io::Result<()> {
    prepare(Role::Target, plan, stream)?;
    let mut message = vec![0; plan.size as usize];
    while receive(plan.wait, stream, &mut message)? {
        send(plan.wait, stream, &message)?;
    }
    Ok(())
}

fn prepare(role: Role, plan: &Plan, stream: &TcpStream) -> io::Result<()> {
    core_of(role, plan, 0, &sys::cores()).map_or(Ok(()), sys::pin)?;
    stream.set_nonblocking(plan.wait == Wait::Spin)
}

fn round(wait: Wait, stream: &TcpStream, message: &mut [u8]) -> io::Result<()> {
    send(wait, stream, message)?;
    if receive(wait, stream, message)? { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

fn send(wait: Wait, mut stream: &TcpStream, mut message: &[u8]) -> io::Result<()> {
    while !message.is_empty() {
        let n = retry(wait, || stream.write(message))?;
        message = &message[n..];
    }
    Ok(())
}

/// Receives one message. Returns false at the end of the stream.
fn receive(wait: Wait, mut stream: &TcpStream, message: &mut [u8]) -> io::Result<bool> {
    let mut at = 0;
    while at < message.len() {
        match retry(wait, || stream.read(&mut message[at..]))? {
            0 => return Ok(false),
            n => at += n,
        }
    }
    Ok(true)
}

fn retry(wait: Wait, mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            // `yield_now` is sched_yield: without it two spinning processes can starve each other on one core.
            Err(e) if wait == Wait::Spin && e.kind() == io::ErrorKind::WouldBlock => thread::yield_now(),
            result => return result,
        }
    }
}
