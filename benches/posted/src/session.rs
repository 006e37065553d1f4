//! The protocol of the two processes: the source starts the target, and both exchange lines.
//!
//! ```text
//!   target: handle HEX (per connection)     source: go MESSAGES      target: done CPU_SECONDS
//!           ready (all are connected)                                ...
//! ```
//!
//! The clock runs from `go` to `done`, which the target sends when it has returned the last receive of every
//! connection. The rate is the median over intervals of a tenth of a second, as in `ferrywire bench`; the mean over
//! all intervals is printed beside it. Two cycles through the memory precede the timed part: the first is verified,
//! and the time of the second determines the length of the timed part.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::flags::Flags;
use crate::pump::Pump;
use crate::sys;
use crate::table::{Handle, Net};

/// Length of the intervals over whose rates the median is taken.
const INTERVAL: Duration = Duration::from_millis(100);

/// Runs the end that receives.
pub fn target(flags: &Flags) -> io::Result<()> {
    sys::die_with_parent();
    sys::ignore_sigpipe();
    let net = Net::load(&flags.plugin)?;
    let mut listeners = Vec::new();
    for _ in 0..flags.comms {
        let (listener, handle) = net.listen(flags.device)?;
        listeners.push(listener);
        say(format!("handle {}", hex(&handle)))?;
    }
    let (done, mut pumps) = (AtomicU64::new(0), Vec::new());
    for listener in listeners {
        let comm = net.accept(listener)?;
        pumps.push(Pump::new(&net, comm, sys::memory(flags.part())?, flags, &done)?);
    }
    say("ready".to_owned())?;
    let mut first = true;
    for line in io::stdin().lines() {
        let messages =
            line?.parse().map_err(|_| io::Error::other("the source did not send a number of messages"))?;
        let cpu = sys::cpu_seconds();
        all(&mut pumps, |pump| pump.receive(messages))?;
        let cpu = sys::cpu_seconds() - cpu;
        if std::mem::take(&mut first) && !pumps.iter().enumerate().all(|(index, pump)| pump.holds(index)) {
            return Err(io::Error::other("the received bytes differ from what the source sent"));
        }
        say(format!("done {cpu}"))?;
    }
    Ok(())
}

/// Runs the end that sends, and measures.
pub fn source(flags: &Flags) -> io::Result<()> {
    sys::ignore_sigpipe();
    let mut far = Target::spawn()?;
    let net = Net::load(&flags.plugin)?;
    let (done, mut pumps) = (AtomicU64::new(0), Vec::new());
    let handles = (0..flags.comms).map(|_| far.handle()).collect::<io::Result<Vec<_>>>()?;
    for (index, handle) in handles.into_iter().enumerate() {
        let comm = net.connect(flags.device, handle)?;
        let mut pump = Pump::new(&net, comm, sys::memory(flags.part())?, flags, &done)?;
        pump.fill(index);
        pumps.push(pump);
    }
    far.line("ready")?;
    let cycle = (flags.part() / flags.chunk) as u64;
    run(&mut far, &mut pumps, &done, cycle)?;
    let warm = run(&mut far, &mut pumps, &done, cycle)?;
    let messages = ((flags.seconds / warm.seconds * cycle as f64) as u64).max(1);
    let timed = run(&mut far, &mut pumps, &done, messages)?;
    let gb = |messages: u64| (messages * flags.chunk as u64) as f64 / 1e9;
    let moved = gb(messages * flags.comms as u64);
    let mean = moved / timed.seconds;
    println!(
        "{{\"gb_per_s\":{:.3},\"mean_gb_per_s\":{mean:.3},\"cpu_s_per_gb\":{:.4},\"gb\":{moved:.3},\"comms\":{},\"version\":{}}}",
        timed.median.map_or(mean, |messages_per_s| gb(1) * messages_per_s),
        timed.cpu_seconds / moved,
        flags.comms,
        net.version,
    );
    Ok(())
}

/// The time and the CPU time of one run.
struct Took {
    seconds: f64,
    /// CPU seconds of both ends.
    cpu_seconds: f64,
    /// Median rate in messages per second, if there was a whole interval.
    median: Option<f64>,
}

fn run(far: &mut Target, pumps: &mut [Pump<'_>], done: &AtomicU64, messages: u64) -> io::Result<Took> {
    let (start, cpu) = (Instant::now(), sys::cpu_seconds());
    far.tell(&messages.to_string())?;
    let ended = AtomicBool::new(false);
    let (reported, mut rates) = thread::scope(|scope| {
        let rates = scope.spawn(|| rates(done, &ended));
        let reported = all(pumps, |pump| pump.send(messages)).and_then(|()| far.line("done "));
        ended.store(true, Ordering::Relaxed);
        rates.thread().unpark();
        (reported, rates.join().expect("the thread that samples the rate panicked"))
    });
    let (seconds, near) = (start.elapsed().as_secs_f64(), sys::cpu_seconds() - cpu);
    let reported = reported?;
    let there: f64 = reported
        .parse()
        .map_err(|_| io::Error::other(format!("the target reported {reported:?}, not its CPU seconds")))?;
    rates.sort_by(f64::total_cmp);
    Ok(Took { seconds, cpu_seconds: near + there, median: rates.get(rates.len() / 2).copied() })
}

/// Messages per second in each whole interval.
fn rates(done: &AtomicU64, ended: &AtomicBool) -> Vec<f64> {
    let mut rates = Vec::new();
    let (mut before, mut began) = (done.load(Ordering::Relaxed), Instant::now());
    loop {
        thread::park_timeout(INTERVAL.saturating_sub(began.elapsed()));
        if ended.load(Ordering::Relaxed) {
            return rates;
        }
        let (now, passed) = (done.load(Ordering::Relaxed), began.elapsed());
        if passed >= INTERVAL {
            rates.push((now - before) as f64 / passed.as_secs_f64());
            (before, began) = (now, Instant::now());
        }
    }
}

/// Runs `body` in a thread for each connection.
fn all(pumps: &mut [Pump<'_>], body: impl Fn(&mut Pump<'_>) -> io::Result<()> + Sync) -> io::Result<()> {
    let cores = sys::cores();
    thread::scope(|scope| {
        let (body, cores) = (&body, &cores);
        let each = pumps.iter_mut().enumerate();
        let run = |(index, pump): (usize, &mut Pump<'_>)| {
            if pump.flags.pin && !cores.is_empty() {
                sys::pin(cores[index % cores.len()])?;
            }
            body(pump)
        };
        let threads: Vec<_> = each.map(|numbered| scope.spawn(move || run(numbered))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("a connection's thread panicked"))
    })
}

pub fn say(line: String) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Parses a handle that [`hex`] wrote.
pub fn unhex(text: &str) -> io::Result<Handle> {
    let wrong = || io::Error::other("the other end did not send a handle in hex");
    let byte = |at: usize| text.get(2 * at..2 * at + 2).and_then(|two| u8::from_str_radix(two, 16).ok());
    let bytes: Option<Vec<u8>> = (0..text.len() / 2).map(byte).collect();
    bytes.and_then(|bytes| bytes.try_into().ok()).ok_or_else(wrong)
}

/// The process of the other end.
pub struct Target {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Target {
    /// Starts this program again, with the same flags.
    pub fn spawn() -> io::Result<Target> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(std::env::args_os().skip(1))
            .arg("--target")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (Some(input), Some(output)) = (input, output) else {
            return Err(io::Error::other("the target process has no pipes"));
        };
        Ok(Target { child, input, output: BufReader::new(output) })
    }

    /// Returns the rest of the next line of the target, which has to begin with `begin`.
    pub fn line(&mut self, begin: &str) -> io::Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        let rest = line.trim_end().strip_prefix(begin).map(str::to_owned);
        rest.ok_or_else(|| {
            io::Error::other(format!("the target ended, or sent {line:?} instead of {begin:?}"))
        })
    }

    /// Returns the handle of the target's listener.
    pub fn handle(&mut self) -> io::Result<Handle> {
        unhex(&self.line("handle ")?)
    }

    /// Sends a line to the target.
    pub fn tell(&mut self, line: &str) -> io::Result<()> {
        self.input.write_all(format!("{line}\n").as_bytes())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // The child may have ended by itself, so a failure is ignored.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
