//! Drives a net plugin as NCCL's proxy threads do, between two processes of this host: up to eight steps in flight on
//! each connection, only the oldest of them tested, with rings of eight buffers. Prints GB/s and CPU time.
//!
//! ```text
//! drive PLUGIN.so [--comms 2] [--bytes 524288] [--steps 8] [--both] [--seconds 3] [--hold-us 0] [--ping]
//!     [--devices 0]
//! ```
//!
//! `--devices 0,1` uses these NICs as one device, if the plugin merges them. `--hold-us` is how long a receiver keeps a
//! buffer, as a GPU does. `--ping` sends one message back and forth instead, and prints half of the round-trip time.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use ferrywire_ncclnet::{
    Comm, Handle, Library, MemoryHandle, Plugin, Posted, RecvBuffer, RecvComm, Request, SendComm,
};

const NO_MEMORY: MemoryHandle = MemoryHandle(std::ptr::null_mut());

#[derive(Clone)]
struct Options {
    plugin: String,
    comms: usize,
    bytes: usize,
    steps: usize,
    both: bool,
    seconds: f64,
    hold: Duration,
    ping: bool,
    devices: Vec<i32>,
}

impl Options {
    fn parse(args: &[String]) -> Options {
        let value = |name: &str| args.iter().position(|arg| arg == name).map(|at| args[at + 1].clone());
        let number =
            |name: &str, default: usize| value(name).map_or(default, |text| text.parse().expect("a number"));
        let has = |name: &str| args.iter().any(|arg| arg == name);
        Options {
            plugin: args.first().expect("drive PLUGIN.so [options]").clone(),
            comms: number("--comms", 2),
            bytes: number("--bytes", 512 << 10),
            steps: number("--steps", 8),
            both: has("--both"),
            seconds: value("--seconds").map_or(3.0, |text| text.parse().expect("seconds")),
            hold: Duration::from_micros(number("--hold-us", 0) as u64),
            ping: has("--ping"),
            devices: value("--devices")
                .map_or(vec![0], |text| text.split(',').map(|one| one.parse().expect("a number")).collect()),
        }
    }
}

/// The other process, reached through its pipes.
enum Other {
    Child(Child, ChildStdin, BufReader<ChildStdout>),
    Parent,
}

impl Other {
    fn tell(&mut self, line: &str) {
        match self {
            Other::Child(_, to, _) => writeln!(to, "{line}").and_then(|()| to.flush()),
            Other::Parent => writeln!(std::io::stdout(), "{line}").and_then(|()| std::io::stdout().flush()),
        }
        .expect("the other process lives");
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        let read = match self {
            Other::Child(_, _, from) => from.read_line(&mut line),
            Other::Parent => {
                let mut byte = [0];
                while std::io::stdin().read_exact(&mut byte).is_ok() && byte[0] != b'\n' {
                    line.push(byte[0].into());
                }
                Ok(line.len())
            }
        };
        read.expect("the other process lives");
        line.trim_end().to_owned()
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let options = Options::parse(&args);
    let is_child = args.iter().any(|arg| arg == "--child");
    let mut other = if is_child {
        Other::Parent
    } else {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(&args)
            .arg("--child")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (to, from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Other::Child(child, to, BufReader::new(from))
    };
    // SAFETY: the user of this example trusts the file.
    let plugin = unsafe { Library::open(&options.plugin).unwrap().load(None).unwrap() };
    let device = match options.devices[..] {
        [device] => device,
        _ => plugin.make_v_device(&options.devices).unwrap(),
    };
    let (sends, recvs) = connect(&plugin, device, &mut other, options.comms);
    let mut lanes: Vec<Lane> = Vec::new();
    let forth = options.both || options.ping || !is_child;
    let back = options.both || options.ping || is_child;
    lanes.extend(sends.iter().filter(|_| forth).map(|comm| Lane::new(End::Send(comm), &options)));
    lanes.extend(recvs.iter().filter(|_| back).map(|comm| Lane::new(End::Recv(comm), &options)));
    let (start, cpu) = (Instant::now(), cpu_seconds());
    if options.ping {
        let rounds = ping(&mut lanes, &options, is_child);
        if !is_child {
            let us = start.elapsed().as_secs_f64() * 1e6 / rounds as f64 / 2.0;
            println!("{} bytes: {us:.1} us one way", options.bytes);
        }
    } else {
        let messages = stream(&mut lanes, &options, is_child);
        let (seconds, cpu) = (start.elapsed().as_secs_f64(), cpu_seconds() - cpu);
        if is_child {
            other.tell(&format!("{cpu}"));
        } else {
            let theirs: f64 = other.hear().parse().unwrap();
            let gb = (messages * options.bytes) as f64 / 1e9;
            println!(
                "{} comms, {} bytes, {}: {:.2} GB/s each way, {:.3} CPU-s/GB both ends",
                options.comms,
                options.bytes,
                if options.both { "both ways" } else { "one way" },
                gb / seconds,
                (cpu + theirs) / gb / if options.both { 2.0 } else { 1.0 },
            );
        }
    }
    drop(lanes);
    // Both ends are done before either closes.
    other.tell("done");
    other.hear();
    sends.into_iter().for_each(|comm| comm.close().unwrap());
    recvs.into_iter().for_each(|comm| comm.close().unwrap());
    if let Other::Child(mut child, ..) = other {
        child.wait().unwrap();
    }
}

fn connect(plugin: &Plugin, device: i32, other: &mut Other, comms: usize) -> (Vec<SendComm>, Vec<RecvComm>) {
    let (mut sends, mut recvs) = (Vec::new(), Vec::new());
    for _ in 0..comms {
        let (mut listener, handle) = plugin.listen(device).unwrap();
        other.tell(&handle.bytes().iter().map(|byte| format!("{byte:02x}")).collect::<String>());
        let theirs = other.hear();
        let bytes = std::array::from_fn(|at| u8::from_str_radix(&theirs[2 * at..2 * at + 2], 16).unwrap());
        let mut connecting = plugin.connect(device, &Handle::from_bytes(bytes));
        let (mut send, mut recv) = (None, None);
        while send.is_none() || recv.is_none() {
            if send.is_none() {
                send = connecting.poll().unwrap();
            }
            if recv.is_none() {
                recv = listener.accept().unwrap();
            }
        }
        listener.close().unwrap();
        sends.extend(send);
        recvs.extend(recv);
    }
    (sends, recvs)
}

enum End<'a> {
    Send(&'a SendComm),
    Recv(&'a RecvComm),
}

/// A connection and its ring.
struct Lane<'a> {
    end: End<'a>,
    ring: Vec<Vec<u8>>,
    posted: Vec<Option<Request>>,
    begun: usize,
    done: usize,
    /// The time at which each buffer was received into.
    filled: Vec<Instant>,
    hold: Duration,
}

impl<'a> Lane<'a> {
    fn new(end: End<'a>, options: &Options) -> Lane<'a> {
        let ring = (0..options.steps).map(|_| vec![1; options.bytes]).collect();
        let posted = vec![None; options.steps];
        let filled = vec![Instant::now() - options.hold; options.steps];
        Lane { end, ring, posted, begun: 0, done: 0, filled, hold: options.hold }
    }

    fn is_sender(&self) -> bool {
        matches!(self.end, End::Send(_))
    }

    /// Posts the next step; false if there is no room or the plugin refuses it for now.
    fn post(&mut self) -> bool {
        let steps = self.ring.len();
        let held = !self.is_sender() && self.filled[self.begun % steps].elapsed() < self.hold;
        if self.begun - self.done == steps || held {
            return false;
        }
        let buffer = &mut self.ring[self.begun % steps];
        let (data, bytes) = (buffer.as_mut_ptr().cast(), buffer.len());
        // SAFETY: the ring lives until all steps are done, and one step at a time uses a buffer.
        let posted = unsafe {
            match self.end {
                End::Send(comm) => comm.isend(data, bytes, 0, NO_MEMORY),
                End::Recv(comm) => comm.irecv(&[RecvBuffer { data, bytes, tag: 0, memory: NO_MEMORY }]),
            }
        };
        match posted {
            Posted::Request(request) => self.posted[self.begun % steps] = Some(request),
            Posted::Null => return false,
            Posted::Refused(error) => panic!("{error}"),
        }
        self.begun += 1;
        true
    }

    /// Whether the oldest step is done.
    fn test(&mut self) -> bool {
        if self.done == self.begun {
            return false;
        }
        let place = self.done % self.ring.len();
        let comm: &Comm = match self.end {
            End::Send(comm) => comm,
            End::Recv(comm) => comm,
        };
        // SAFETY: posted on this comm, and not done yet.
        let tested = unsafe { comm.test(self.posted[place].unwrap()) };
        assert!(tested.code.is_success(), "{}", tested.code);
        if tested.done {
            self.done += 1;
            self.filled[place] = Instant::now();
        }
        tested.done
    }
}

/// The first byte of the last message that a sender sends.
const LAST: u8 = 2;

/// Streams for the given time; returns the number of messages that one direction moved.
fn stream(lanes: &mut [Lane], options: &Options, is_child: bool) -> usize {
    let until = Instant::now() + Duration::from_secs_f64(options.seconds);
    let mut open = vec![true; lanes.len()];
    while open.iter().any(|open| *open) {
        let over = Instant::now() >= until;
        let before: usize = lanes.iter().map(|lane| lane.done + lane.begun).sum();
        for (lane, open) in lanes.iter_mut().zip(&mut open).filter(|(_, open)| **open) {
            let steps = lane.ring.len();
            if lane.is_sender() {
                if lane.test() && lane.ring[(lane.done - 1) % steps][0] == LAST {
                    *open = false;
                    continue;
                }
                let place = lane.begun % steps;
                let ending = lane.begun > 0 && lane.ring[(lane.begun - 1) % steps][0] == LAST;
                if !ending && lane.begun - lane.done < steps {
                    lane.ring[place][0] = if over { LAST } else { 1 };
                    while lane.begun - lane.done < steps && !lane.post() {}
                }
            } else {
                lane.post();
                if lane.test() && lane.ring[(lane.done - 1) % steps][0] == LAST {
                    *open = false;
                }
            }
        }
        // NCCL's proxy threads also yield when nothing has moved.
        if before == lanes.iter().map(|lane| lane.done + lane.begun).sum() {
            std::thread::yield_now();
        }
    }
    let counts = lanes.iter().filter(|lane| lane.is_sender() != is_child || !options.both);
    counts.map(|lane| lane.done).sum()
}

/// Sends one message back and forth, many times.
fn ping(lanes: &mut [Lane], options: &Options, is_child: bool) -> usize {
    let rounds = (options.seconds * 10_000.0) as usize;
    let (to, from) = lanes.split_at_mut(lanes.len() / 2);
    let (to, from) = (&mut to[0], &mut from[0]);
    for _ in 0..rounds {
        from.post();
        if !is_child {
            to.post();
        }
        until_done(from);
        if is_child {
            to.post();
        }
        until_done(to);
    }
    rounds
}

fn until_done(lane: &mut Lane) {
    while !lane.test() {
        std::thread::yield_now();
    }
}

fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = text.rsplit(')').next().unwrap().split_whitespace().collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}
