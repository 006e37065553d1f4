//! Many peers and channels at one process: set-up time, memory per channel, bytes that arrive, idle CPU.
//!
//! ```text
//!   hub (this process): one endpoint ◀── peers x channels ── leaves (a child): an endpoint for each peer
//! ```
//!
//! Both ends are on this host and share its cores during the set-up. Memory and CPU time are those of the hub alone,
//! without the kernel's memory for sockets. Read next: `host.rs`, which reads the figures.

mod host;

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, Command, Stdio, exit};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ferrywire::orchestrator::Target;
use ferrywire::{Endpoint, Orchestrator, Peer, Region, RemoteRegion, Result};

/// Longest time for any step.
const LIMIT: Duration = Duration::from_secs(120);
/// Pause before idle CPU is measured, so that all threads come to rest.
const REST: Duration = Duration::from_secs(2);
/// The argument that starts the child.
const LEAVES: &str = "leaves";

const USAGE: &str = "usage: scale [--peers N] [--channels N] [--bytes N] [--idle S]
  --peers N      endpoints of other processes that connect to the hub (default 128)
  --channels N   channels of each (default 4)
  --bytes N      bytes that each peer writes, verified (default 1048576)
  --idle S       length of the idle part in seconds (default 60; 0: none)";

#[derive(Clone, Copy)]
struct Options {
    peers: usize,
    channels: usize,
    bytes: usize,
    idle: Duration,
}

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let outcome = match arguments.split_first() {
        Some((first, rest)) if first == LEAVES => leaves(rest),
        _ => hub(options(&arguments)),
    };
    if let Err(error) = outcome {
        eprintln!("error: {error}");
        exit(1);
    }
}

fn usage() -> ! {
    eprintln!("{USAGE}");
    exit(2)
}

fn options(arguments: &[String]) -> Options {
    let mut options = Options { peers: 128, channels: 4, bytes: 1 << 20, idle: Duration::from_secs(60) };
    for pair in arguments.chunks(2) {
        let Some(value) = pair.get(1).and_then(|value| value.parse::<usize>().ok()) else { usage() };
        match pair[0].as_str() {
            "--peers" if value > 0 => options.peers = value,
            "--channels" if value > 0 => options.channels = value,
            "--bytes" if value > 0 => options.bytes = value,
            "--idle" => options.idle = Duration::from_secs(value as u64),
            _ => usage(),
        }
    }
    options
}

/// The bytes that a peer writes.
fn pattern(peer: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at / 4 + at + peer * 37) as u8).collect()
}

// ---- the hub ----

fn hub(options: Options) -> Result<()> {
    let Options { peers, channels, bytes, idle } = options;
    let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
    let endpoint = Endpoint::builder().listen(loopback).build()?;
    let region = endpoint.alloc_host(peers * bytes)?;
    // Touch the pages now, so that they do not count as the peers' memory.
    for peer in 0..peers {
        region.write_at((peer * bytes) as u64, &vec![0xee; bytes])?;
    }
    let before = host::Usage::now();
    let mut leaves = Leaves::start(endpoint.listen_addresses()[0], options);
    leaves.hear("built");
    let start = Instant::now();
    leaves.say("connect");
    let accepted: Vec<Peer> = (0..peers).map(|_| endpoint.accept(LIMIT)).collect::<Result<_, _>>()?;
    let accepted_in = start.elapsed();
    leaves.hear("connected");
    let connected = start.elapsed();
    settled(&accepted, channels);
    let channels_up = start.elapsed();
    let after = host::Usage::now();
    leaves.say(&hex(&region.descriptor().to_bytes()));
    let moving = Instant::now();
    for peer in &accepted {
        peer.wait_notification(LIMIT)?;
    }
    let moved_in = moving.elapsed();
    verify(&region, options)?;
    let moved = host::Usage::now();
    let all = (peers * channels) as f64;
    println!("{peers} peers, {channels} channels each: {} channels in one process", peers * channels);
    println!(
        "set up: all peers accepted {:.3} s, connected {:.3} s, every channel up {:.3} s",
        accepted_in.as_secs_f64(),
        connected.as_secs_f64(),
        channels_up.as_secs_f64()
    );
    let per_channel =
        |usage: &host::Usage| usage.resident_bytes.saturating_sub(before.resident_bytes) as f64 / all;
    println!(
        "memory of the hub: {:.1} KB a channel when connected, {:.1} KB after data; {} threads, {:.1} descriptors a channel",
        per_channel(&after) / 1e3,
        per_channel(&moved) / 1e3,
        moved.threads,
        moved.descriptors.saturating_sub(before.descriptors) as f64 / all
    );
    println!("moved: {bytes} bytes from each peer in {:.3} s, every byte verified", moved_in.as_secs_f64());
    rest(idle);
    leaves.say("end");
    endpoint.close(LIMIT)
}

/// Waits until every channel of every peer carries data.
fn settled(peers: &[Peer], channels: usize) {
    let until = Instant::now() + LIMIT;
    while Instant::now() < until && peers.iter().any(|peer| peer.stats().channels.len() < channels) {
        thread::sleep(Duration::from_millis(1));
    }
}

fn verify(region: &Region, options: Options) -> Result<()> {
    let mut found = vec![0; options.bytes];
    for peer in 0..options.peers {
        region.read_at((peer * options.bytes) as u64, &mut found)?;
        if found != pattern(peer, options.bytes) {
            eprintln!("error: the bytes that peer {peer} wrote differ from those that arrived");
            exit(1);
        }
    }
    Ok(())
}

fn rest(idle: Duration) {
    if idle.is_zero() {
        return;
    }
    thread::sleep(REST);
    let before = host::cpu_seconds();
    thread::sleep(idle);
    let spent = host::cpu_seconds() - before;
    let share = 100.0 * spent / idle.as_secs_f64();
    println!("idle: {spent:.2} CPU seconds in {} s, {share:.2} % of a core", idle.as_secs());
}

/// The child process with the endpoints of the peers.
struct Leaves {
    child: Child,
    to: ChildStdin,
    from: BufReader<std::process::ChildStdout>,
}

impl Leaves {
    fn start(hub: SocketAddr, options: Options) -> Leaves {
        let numbers = [options.peers, options.channels, options.bytes].map(|number| number.to_string());
        let mut command = Command::new(env::current_exe().expect("this program has a path"));
        command.arg(LEAVES).arg(hub.to_string()).args(numbers).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("this program starts again");
        let to = child.stdin.take().expect("piped");
        let from = BufReader::new(child.stdout.take().expect("piped"));
        Leaves { child, to, from }
    }

    fn say(&mut self, line: &str) {
        writeln!(self.to, "{line}").expect("the child listens");
    }

    /// Waits until the child prints this line. Ends the process if it prints another one.
    fn hear(&mut self, line: &str) {
        let mut heard = String::new();
        let _ = self.from.read_line(&mut heard);
        if heard.trim() != line {
            eprintln!("error: the child process was to print {line:?}, and printed {heard:?}");
            exit(1);
        }
    }
}

impl Drop for Leaves {
    fn drop(&mut self) {
        let _ = self.child.wait();
    }
}

// ---- the leaves ----

fn leaves(arguments: &[String]) -> Result<()> {
    let [hub, numbers @ ..] = arguments else { usage() };
    let Ok(hub) = hub.parse::<SocketAddr>() else { usage() };
    let numbers: Vec<usize> = numbers.iter().filter_map(|number| number.parse().ok()).collect();
    let [peers, channels, bytes] = numbers[..] else { usage() };
    let builder = |peer| (format!("leaf {peer}"), Endpoint::builder().channels(channels).threads(1));
    let all = Orchestrator::start((0..peers).map(builder).collect(), LIMIT)?;
    let mut lines = std::io::stdin().lines().map_while(std::result::Result::ok);
    let mut next = || lines.next().unwrap_or_default();
    println!("built");
    next();
    let targets: Vec<Target> = (0..peers).map(|endpoint| Target { endpoint, addresses: vec![hub] }).collect();
    let connected = Arc::new(all.connect(&targets, LIMIT)?);
    let peers_of_all = connected.clone();
    println!("connected");
    let Some(target) = unhex(&next()) else { usage() };
    let target = RemoteRegion::from_bytes(&target)?;
    all.each("writing", LIMIT, move |peer, endpoint| -> Result<()> {
        let source = endpoint.alloc_host(bytes)?;
        source.write_at(0, &pattern(peer, bytes))?;
        let at = (peer * bytes) as u64;
        let write = peers_of_all[peer].write_notify(&source, 0, &target, at, bytes as u64, b"written")?;
        write.wait(LIMIT)?;
        Ok(())
    })?;
    next();
    all.close(LIMIT)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(text.get(at..at + 2)?, 16).ok()).collect()
}
