//! Either end of a run over the plugin is killed in the middle, whole or only the process with the plugin:
//! the other end names the lost peer, and ends.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use crate::common::{Serve, ferrywire, text};
use crate::hosted::{long, serve, with_plugin};
use crate::lanes::children;

/// A survivor that has not ended after this long hangs.
const HANGS_AFTER: Duration = Duration::from_secs(120);
/// Kills happen up to this long after the first size is finished.
const MOMENT_MAX_MS: u64 = 2500;
/// Many, so that none is the last before any moment; short, so that every stage of a run is met.
const SIZES: &str = "8,1M,64K,16M,300001,4M,1,256K,8M,64K,32M,1M,100003,16M,64K,4M,1M,64K,16M,300001,4M,1,\
                     256K,8M,64K,32M,1M,100003,16M,64K,4M,1M,64K,16M,300001,4M,1,256K,8M,64K,32M,1M";

/// Which end is killed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Killed {
    Connect,
    Serve,
}

/// A number of a sequence that a seed determines.
fn random(seed: u64, i: u64) -> u64 {
    let mut x = seed.wrapping_add((i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn seed() -> u64 {
    let given = std::env::var("FERRYWIRE_SEED").ok().and_then(|seed| seed.parse().ok());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock");
    given.unwrap_or(now.as_nanos() as u64)
}

/// Kills one end at so many random moments, every second time only its process with the plugin.
fn kill_at_random_moments(killed: Killed) {
    let seed = seed();
    println!("FERRYWIRE_SEED={seed}");
    for i in 0..if long() { 20 } else { 2 } {
        let moment = Duration::from_millis(random(seed, i) % MOMENT_MAX_MS);
        let whole = i % 2 == 0;
        println!("kill {i}: {killed:?}, {}, after {moment:?}", if whole { "whole" } else { "its plugin" });
        match killed {
            Killed::Connect => connect_is_killed(moment, whole),
            Killed::Serve => serve_is_killed(moment, whole),
        }
    }
}

#[test]
fn a_killed_sender_is_named_by_the_end_that_serves() {
    kill_at_random_moments(Killed::Connect);
}

#[test]
fn a_killed_receiver_is_named_by_the_end_that_connects() {
    kill_at_random_moments(Killed::Serve);
}

/// A connect in the middle of its run.
struct Running {
    child: Child,
    /// All output of the process, on both pipes.
    said: thread::JoinHandle<String>,
    output: thread::JoinHandle<String>,
}

impl Running {
    /// Returns when the first size is finished.
    fn start(serve: &Serve) -> Running {
        let args = format!(
            "bench connect {} -v --json - --sizes {SIZES} --seconds 0.4 --timeout 30 --channels 2",
            serve.address
        );
        let mut command = ferrywire(&with_plugin(&args));
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        let mut stdout = child.stdout.take().expect("piped");
        let mut stderr = BufReader::new(child.stderr.take().expect("piped"));
        let mut said = String::new();
        while !said.lines().last().unwrap_or_default().starts_with("finished") {
            assert!(stderr.read_line(&mut said).expect("text") > 0, "it ended too early: {said}");
        }
        let said = thread::spawn(move || {
            let mut rest = Vec::new();
            stderr.read_to_end(&mut rest).expect("readable");
            said + &text(&rest)
        });
        let output = thread::spawn(move || {
            let mut all = Vec::new();
            stdout.read_to_end(&mut all).expect("readable");
            text(&all)
        });
        Running { child, said, output }
    }

    /// Waits for the end; returns exit status, standard output and standard error.
    fn end(mut self) -> (ExitStatus, String, String) {
        let status = ended(&mut self.child);
        (status, self.output.join().expect("text"), self.said.join().expect("text"))
    }
}

fn ended(child: &mut Child) -> ExitStatus {
    let began = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("it can be waited for") {
            println!("  ended after {:.1} s", began.elapsed().as_secs_f64());
            return status;
        }
        if began.elapsed() > HANGS_AFTER {
            let _ = child.kill();
            panic!("it has not ended after {HANGS_AFTER:?}");
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Kills a process, or the one of it that has the plugin.
fn kill(child: &Child, whole: bool) {
    let pid = if whole { child.id() } else { children(child.id())[0] };
    // SAFETY: a signal to a process that this test has started, and has not waited for.
    assert_eq!(unsafe { libc::kill(pid as i32, libc::SIGKILL) }, 0, "{pid} is there");
}

fn error_lines(said: &str) -> Vec<&str> {
    said.lines().filter(|line| line.starts_with("error: ")).collect()
}

/// The numbers are those of finished sizes, and none other.
fn only_finished_sizes(output: &str, said: &str, killed: Killed) -> Value {
    let json: Value = serde_json::from_str(output).unwrap_or_else(|error| panic!("{error}: {output}"));
    let results = json["results"].as_array().expect("results");
    assert!(results.iter().all(|row| row["verified"] == true), "{output}");
    let finished = said.lines().filter(|line| line.starts_with("finished")).count();
    // One that is killed may have lost its last result on the way to the process that prints.
    let lost = if killed == Killed::Connect { finished - results.len() } else { 0 };
    assert!(results.len() + lost == finished && lost <= 1, "{} of {finished}: {said}", results.len());
    json
}

/// Whether a process, which need not be a child of this one, runs.
fn runs(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// Regression: a serving process whose parent was killed before it had asked the kernel to end with it stayed for ever.
#[test]
fn the_serving_process_of_loopback_mode_ends_with_a_parent_that_is_killed_at_once() {
    for _ in 0..3 {
        let mut command = ferrywire("bench --memory host --peer-memory host --sizes 4K --seconds 600");
        let mut parent = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
        let until = Instant::now() + HANGS_AFTER;
        let serve = loop {
            if let Some(serve) = children(parent.id()).first() {
                break *serve;
            }
            assert!(Instant::now() < until, "it starts no serving process");
        };
        parent.kill().expect("it runs");
        parent.wait().expect("killed");
        while runs(serve) {
            if Instant::now() > until {
                let _ = Command::new("kill").args(["-KILL", &serve.to_string()]).status();
                panic!("the serving process {serve} runs on");
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

fn connect_is_killed(moment: Duration, whole: bool) {
    let mut serve = serve("--once --timeout 30", "");
    let mut connect = Running::start(&serve);
    thread::sleep(moment);
    kill(&connect.child, whole);
    if whole {
        connect.child.wait().expect("killed");
    } else {
        let (status, output, said) = connect.end();
        assert_eq!(status.code(), Some(1), "{said}");
        assert!(error_lines(&said).len() == 1 && said.contains("signal 9 (SIGKILL)"), "{said}");
        let json = only_finished_sizes(&output, &said, Killed::Connect);
        assert!(json["error"].as_str().is_some_and(|error| error.contains("SIGKILL")), "{output}");
    }
    assert_eq!(ended(&mut serve.child).code(), Some(1));
    let (_, said) = serve.end();
    let errors = error_lines(&said);
    assert_eq!(errors.len(), 1, "{said}");
    assert!(errors[0].contains("run of 127.0.0.1:") && errors[0].contains("failed"), "{said}");
}

fn serve_is_killed(moment: Duration, whole: bool) {
    let mut serve = serve("--timeout 30", "");
    let connect = Running::start(&serve);
    thread::sleep(moment);
    kill(&serve.child, whole);
    let (status, output, said) = connect.end();
    assert_eq!(status.code(), Some(1), "{said}");
    let errors = error_lines(&said);
    assert!(errors.len() == 1 && errors[0].contains(&serve.address), "{said}");
    let json = only_finished_sizes(&output, &said, Killed::Serve);
    assert!(json["error"].as_str().is_some_and(|error| error.contains(&serve.address)), "{output}");
    if !whole {
        // The serving end reports the plugin's end, and accepts the next peer.
        let error = serve.next_error();
        assert!(
            error.contains("signal 9 (SIGKILL)") && error.contains("during a run of 127.0.0.1"),
            "{error}"
        );
        let args = with_plugin(&format!("bench connect {} --sizes 64K --iters 5 --json -", serve.address));
        serve.listens_again();
        crate::common::results(&ferrywire(&args).output().expect("it runs"));
    }
}

/// Regression: an end that received messages looked for Ctrl-C only when none came. It ended 10 s later, and the other end
/// learned no reason.
#[test]
fn an_interrupted_serve_says_so_in_the_middle_of_a_flow_of_sends() {
    let serve = Serve::start("--memory host");
    let args = "--memory host --op send --sizes 4K --depth 64 --warmup 1 --iters 1000000000 --seconds 600";
    let mut connect = ferrywire(&format!("bench connect {} {args}", serve.address));
    let connect = connect.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it starts");
    let stat = format!("/proc/{}/stat", serve.child.id());
    // Clock ticks of CPU time, of which preparing one short message takes few.
    let ticks = || {
        let stat = std::fs::read_to_string(&stat).expect("it runs");
        let fields = stat.rsplit_once(')').expect("a name").1.split_whitespace();
        fields.skip(11).take(2).map(|ticks| ticks.parse::<u64>().expect("a number")).sum::<u64>()
    };
    let since = Instant::now();
    while ticks() < 100 {
        assert!(since.elapsed() < HANGS_AFTER, "no messages move");
        thread::sleep(Duration::from_millis(10));
    }
    // SAFETY: a signal to a child of this process that has not been waited for.
    unsafe { libc::kill(serve.child.id() as i32, libc::SIGINT) };
    let output = connect.wait_with_output().expect("it ends");
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(error_lines(&said).iter().any(|line| line.contains("interrupted")), "{said}");
    assert_eq!(serve.end().0, Some(130));
}
