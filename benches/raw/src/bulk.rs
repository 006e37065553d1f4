//! The throughput loops.
//!
//! Per connection: warm-up bytes, one byte back when the target has all of them, the timed part, end of stream, the
//! target's byte count back. The clock runs from the moment every connection is warm to the moment every count is
//! back, so bytes still in a socket buffer are never counted as moved.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use crate::net::Buffer;
use crate::plan::{Placement, Plan};
use crate::sys;

/// The measurements of one side.
#[derive(Clone, Debug, Default)]
pub struct Side {
    /// Bytes of the timed part, per connection.
    pub bytes: Vec<u64>,
    /// Length of the timed part, in seconds.
    pub seconds: f64,
    /// CPU seconds that this process used in the timed part.
    pub cpu_seconds: f64,
}

impl Side {
    /// Bytes over all connections.
    pub fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }
}

/// The role of a process in a run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The process sends.
    Source,
    /// The process receives.
    Target,
}

/// Runs one side, a thread per connection.
pub fn run(role: Role, plan: &Plan, streams: &[TcpStream]) -> io::Result<Side> {
    let mut buffer = Buffer::new(plan.buffer_bytes());
    let warm = Barrier::new(streams.len() + 1);
    let (cores, warm) = (sys::cores(), &warm);
    let (bytes, start, cpu) = thread::scope(|scope| {
        let mut threads = vec![];
        for (index, (stream, part)) in streams.iter().zip(buffer.parts(plan.part_bytes())).enumerate() {
            let core = core_of(role, plan, index, &cores);
            threads.push(scope.spawn(move || {
                // A thread that fails must still reach the barrier, where the other threads wait for it.
                let pinned = core.map_or(Ok(()), sys::pin);
                let warmed = pinned.and_then(|()| warm_up(role, plan, stream, part));
                warm.wait();
                warmed?;
                match role {
                    Role::Source => source(plan, index, stream, part),
                    Role::Target => target(plan, stream, part),
                }
            }));
        }
        warm.wait();
        let (start, cpu) = (Instant::now(), sys::cpu_seconds());
        let results: Vec<_> =
            threads.into_iter().map(|t| t.join().expect("a connection's thread panicked")).collect();
        (results.into_iter().collect::<io::Result<Vec<u64>>>(), start, cpu)
    });
    Ok(Side { bytes: bytes?, seconds: start.elapsed().as_secs_f64(), cpu_seconds: sys::cpu_seconds() - cpu })
}

/// The core for a thread, if the plan pins threads.
pub fn core_of(role: Role, plan: &Plan, index: usize, cores: &[usize]) -> Option<usize> {
    let shift = match (plan.placement, role) {
        (Placement::Free, _) => return None,
        (Placement::Apart, Role::Target) => 1,
        _ => 0,
    };
    cores.get((index + shift) % cores.len().max(1)).copied()
}

fn warm_up(role: Role, plan: &Plan, mut stream: &TcpStream, part: &mut [u8]) -> io::Result<()> {
    let (call, bytes) = (plan.call as usize, plan.warmup_bytes());
    if role == Role::Source {
        send_stream(call, stream, part, Goal::Bytes(bytes))?;
        return stream.read_exact(&mut [0]);
    }
    match receive_stream(call, stream, part, bytes)? {
        received if received == bytes => Ok(()),
        _ => Err(io::Error::other("the source closed the connection during the warm-up")),
    }
}

fn source(plan: &Plan, index: usize, mut stream: &TcpStream, part: &[u8]) -> io::Result<u64> {
    let goal = Goal::new(plan, index);
    let sent = if plan.sync {
        send_messages(plan, stream, part, goal)?
    } else {
        send_stream(plan.call as usize, stream, part, goal)?
    };
    stream.shutdown(Shutdown::Write)?;
    let mut count = [0; 8];
    stream.read_exact(&mut count)?;
    match u64::from_le_bytes(count) {
        received if received == sent => Ok(sent),
        received => Err(io::Error::other(format!("sent {sent} bytes, the target counted {received}"))),
    }
}

fn target(plan: &Plan, mut stream: &TcpStream, part: &mut [u8]) -> io::Result<u64> {
    stream.write_all(&[1])?;
    let call = plan.call as usize;
    let received = if plan.sync {
        receive_messages(plan.unit_bytes() as usize, call, stream, part)?
    } else {
        receive_stream(call, stream, part, u64::MAX)?
    };
    stream.write_all(&received.to_le_bytes())?;
    Ok(received)
}

/// When a source stops sending.
#[derive(Clone, Copy)]
enum Goal {
    Bytes(u64),
    Until(Instant),
}

impl Goal {
    fn new(plan: &Plan, index: usize) -> Goal {
        match plan.units_of(index) {
            Some(units) => Goal::Bytes(units * plan.unit_bytes()),
            None => Goal::Until(Instant::now() + Duration::from_secs_f64(plan.seconds)),
        }
    }

    fn is_reached(self, sent: u64) -> bool {
        match self {
            Goal::Bytes(bytes) => sent >= bytes,
            Goal::Until(end) => Instant::now() >= end,
        }
    }

    fn left(self, sent: u64) -> usize {
        match self {
            Goal::Bytes(bytes) => (bytes - sent).min(usize::MAX as u64) as usize,
            Goal::Until(_) => usize::MAX,
        }
    }
}

/// Sends the part again and again, `call` bytes at a time, until the goal. Returns the bytes sent.
fn send_stream(call: usize, mut stream: &TcpStream, part: &[u8], goal: Goal) -> io::Result<u64> {
    let (mut sent, mut at) = (0, 0);
    while !goal.is_reached(sent) {
        let length = call.min(part.len() - at).min(goal.left(sent));
        let n = stream.write(&part[at..at + length])?;
        sent += n as u64;
        at = (at + n) % part.len();
    }
    Ok(sent)
}

/// Receives into the part again and again, until `limit` bytes or the end of the stream. Returns the bytes
/// received.
fn receive_stream(call: usize, mut stream: &TcpStream, part: &mut [u8], limit: u64) -> io::Result<u64> {
    let (mut received, mut at) = (0, 0);
    while received < limit {
        let length = (call.min(part.len() - at) as u64).min(limit - received) as usize;
        let n = stream.read(&mut part[at..at + length])?;
        if n == 0 {
            break;
        }
        received += n as u64;
        at = (at + n) % part.len();
    }
    Ok(received)
}

/// Sends whole messages, with at most the plan's depth of them unacknowledged, and waits for the last
/// acknowledgement.
fn send_messages(plan: &Plan, mut stream: &TcpStream, part: &[u8], goal: Goal) -> io::Result<u64> {
    let (unit, depth) = (plan.unit_bytes() as usize, plan.depth_per_connection());
    let (mut sent, mut outstanding, mut at) = (0, 0, 0);
    while !goal.is_reached(sent) {
        while outstanding >= depth {
            outstanding -= read_acks(stream)?;
        }
        let room =
            if plan.batch { (plan.call as usize / unit).clamp(1, (depth - outstanding) as usize) } else { 1 };
        let length = (room * unit).min(part.len() - at).min(goal.left(sent));
        for piece in part[at..at + length].chunks(plan.call as usize) {
            stream.write_all(piece)?;
        }
        sent += length as u64;
        outstanding += (length / unit) as u64;
        at = (at + length) % part.len();
    }
    while outstanding > 0 {
        outstanding -= read_acks(stream)?;
    }
    Ok(sent)
}

fn read_acks(mut stream: &TcpStream) -> io::Result<u64> {
    match stream.read(&mut [0; 256])? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        n => Ok(n as u64),
    }
}

/// Receives all available bytes, and acknowledges each message that they complete by one byte.
fn receive_messages(unit: usize, call: usize, mut stream: &TcpStream, part: &mut [u8]) -> io::Result<u64> {
    let (mut received, mut at) = (0u64, 0);
    loop {
        let length = call.min(part.len() - at);
        let n = stream.read(&mut part[at..at + length])?;
        if n == 0 {
            return Ok(received);
        }
        let done = (received + n as u64) / unit as u64 - received / unit as u64;
        received += n as u64;
        at = (at + n) % part.len();
        stream.write_all(&vec![1; done as usize])?;
    }
}
