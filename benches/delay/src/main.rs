//! A path of a given length, rate and loss between two TUN devices.
//!
//! For hosts whose kernel has no netem. `run` moves each device into a namespace of its own, so the packets
//! of two programs in these namespaces pass through this process, at native speed: packets are those the
//! kernel would hand to a NIC that segments, up to 64 KiB each, and loss and queue are counted by segment.
//!
//! Invariant: packets of one direction leave in the order in which they came. Read next: `line.rs`.

mod line;
mod segments;
mod sys;

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use crate::line::{Line, Shape};
use crate::sys::Tun;

const USAGE: &str = "\
usage: delay-line NAME NAME [--delay-us N] [--loss P] [--gbit R] [--queue-ms N]
  Makes two TUN devices and carries packets between them until standard input ends; prints `ready`, at the end
  one JSON line of counts.
  --delay-us N   one way (default 0)        --loss P       chance of each segment to be lost (default 0)
  --gbit R       rate of each way (0: any)  --queue-ms N   longest wait for the rate before tail drop (default 5)";

/// Most packets that are read before those that are due are written.
const BATCH: usize = 32;

/// Counters of one direction.
#[derive(Default)]
struct Counts {
    segments: AtomicU64,
    lost: AtomicU64,
    dropped: AtomicU64,
    late_us: AtomicU64,
    packets: AtomicU64,
}

fn main() {
    if let Err(e) = run() {
        eprintln!("delay-line: {e}");
        std::process::exit(1);
    }
}

fn run() -> io::Result<()> {
    let (names, shape) = arguments(std::env::args().skip(1))?;
    let ends = [Arc::new(Tun::create(&names[0])?), Arc::new(Tun::create(&names[1])?)];
    let counts = [Arc::new(Counts::default()), Arc::new(Counts::default())];
    for (way, counts) in counts.iter().enumerate() {
        let (from, to) = (ends[way].clone(), ends[1 - way].clone());
        let (line, counts) = (Line::new(shape.clone(), way as u64 + 1), counts.clone());
        thread::spawn(move || {
            carry(&from, &to, line, &counts).unwrap_or_else(|e| eprintln!("delay-line: {e}"));
        });
    }
    println!("ready");
    io::stdout().flush()?;
    io::stdin().read_to_end(&mut Vec::new())?;
    println!("[{}, {}]", counts[0].json(), counts[1].json());
    Ok(())
}

/// Carries the packets of one direction until the process ends.
fn carry(from: &Tun, to: &Tun, mut line: Line, counts: &Counts) -> io::Result<()> {
    sys::wake_exactly();
    let start = Instant::now();
    let now_ns = || start.elapsed().as_nanos() as u64;
    loop {
        for _ in 0..BATCH {
            let mut packet = line.spare();
            let Some(bytes) = from.read(&mut packet)? else { break };
            packet.truncate(bytes);
            let fate = line.accept(now_ns(), packet);
            counts.segments.fetch_add(fate.segments, Relaxed);
            counts.lost.fetch_add(fate.lost, Relaxed);
            counts.dropped.fetch_add(fate.dropped, Relaxed);
        }
        let now = now_ns();
        while let Some((due, packet)) = line.due(now) {
            counts.packets.fetch_add(1, Relaxed);
            counts.late_us.fetch_add((now - due) / 1000, Relaxed);
            to.write(&packet);
            line.recycle(packet);
        }
        let wait = line.next_due().map(|due| Duration::from_nanos(due.saturating_sub(now_ns())));
        from.wait_readable(wait)?;
    }
}

impl Counts {
    fn json(&self) -> String {
        let of = |count: &AtomicU64| count.load(Relaxed);
        let late = of(&self.late_us) as f64 / of(&self.packets).max(1) as f64;
        format!(
            "{{\"segments\": {}, \"lost\": {}, \"dropped\": {}, \"late_us\": {late:.1}}}",
            of(&self.segments),
            of(&self.lost),
            of(&self.dropped),
        )
    }
}

fn arguments(mut args: impl Iterator<Item = String>) -> io::Result<(Vec<String>, Shape)> {
    let wrong = || io::Error::new(io::ErrorKind::InvalidInput, USAGE);
    let (mut names, mut shape, mut queue_ms) = (Vec::new(), Shape::default(), 5.0);
    while let Some(arg) = args.next() {
        if !arg.starts_with("--") {
            names.push(arg);
            continue;
        }
        let value: f64 = args.next().and_then(|v| v.parse().ok()).filter(|v| *v >= 0.0).ok_or_else(wrong)?;
        match arg.as_str() {
            "--delay-us" => shape.delay_ns = (value * 1e3) as u64,
            "--loss" => shape.loss = value,
            "--gbit" => shape.bytes_per_second = value * 1.25e8,
            "--queue-ms" => queue_ms = value,
            _ => return Err(wrong()),
        }
    }
    shape.queue_ns = (queue_ms * 1e6) as u64;
    if names.len() == 2 { Ok((names, shape)) } else { Err(wrong()) }
}
