//! Processes that are killed while they work at a NIC, and the clean-up by the next one.
//!
//! The processes are this program itself, started again for the one test `child`.

use super::*;
use std::env;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

/// Set in a child process: the directory of the journal.
const CHILD: &str = "FERRYWIRE_DEVMEM_CHILD";
/// The work of a child: claims without end, or one claim until it is asked to end.
const WORK: &str = "FERRYWIRE_DEVMEM_WORK";
const READY: &str = "ready for anything";

#[test]
fn child() {
    let Some(journal) = env::var_os(CHILD) else { return };
    match env::var(WORK).as_deref() {
        Ok("hold") => hold(Path::new(&journal)),
        _ => work(Path::new(&journal)),
    }
}

/// Claims, binds, steers and releases until the process is killed.
fn work(journal: &Path) {
    let pool = Pool::new(2 * MIB);
    println!("{READY}");
    loop {
        // Another process that ends soon may have the queue.
        let Ok(mut claim) = Claim::in_directory(journal, NEAR, &ALLOWED) else { continue };
        claim.bind(pool.dmabuf.as_fd()).expect("it is set up");
        let steered = |port| SocketAddr::new([10, 9, 0, 2].into(), port);
        let rules: Vec<_> =
            (1..=4).filter_map(|port| claim.steer(end("10.9.0.1:7420"), steered(port)).ok()).collect();
        // Long enough to be killed in between sometimes.
        thread::sleep(Duration::from_millis(5));
        rules.into_iter().take(2).for_each(|rule| claim.unsteer(rule));
    }
}

/// Claims one queue until its input ends.
fn hold(journal: &Path) {
    let mut claim = Claim::in_directory(journal, NEAR, &Wish { queues: 1, ..ALLOWED }).expect("allowed");
    let pool = Pool::new(2 * MIB);
    claim.bind(pool.dmabuf.as_fd()).expect("it is set up");
    claim.steer(end("10.9.0.1:7420"), end("10.9.0.2:9")).expect("room");
    println!("{READY}");
    std::io::stdin().lines().for_each(drop);
}

/// A started process.
struct Started {
    child: Child,
    input: ChildStdin,
    /// Kept open, so that the process can write to it.
    _output: BufReader<ChildStdout>,
}

impl Started {
    fn new(journal: &Path, work: &str) -> Started {
        let mut child = Command::new(env::current_exe().expect("this program"))
            .args(["nic::kills::child", "--exact", "--nocapture"])
            .env(CHILD, journal)
            .env(WORK, work)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a child");
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        // The test harness writes its own lines first.
        let ready = output.by_ref().lines().any(|line| line.is_ok_and(|line| line.contains(READY)));
        assert!(ready, "it did not come to work");
        let input = child.stdin.take().expect("piped");
        Started { child, input, _output: output }
    }

    fn kill(mut self) {
        self.child.kill().expect("it lives");
        self.child.wait().expect("it is dead");
    }

    /// Lets the process end by itself.
    fn end(mut self) {
        drop(self.input);
        assert!(self.child.wait().expect("it ends").success());
    }
}

/// Pseudo-random durations, different for each seed.
fn moments(seed: u64) -> impl Iterator<Item = Duration> {
    println!("moments of seed {seed}");
    let mut state = seed;
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        Duration::from_micros((state >> 33) % 150_000)
    })
}

/// Kills at least `least` processes, and continues until one was killed in the middle of a change.
fn kill_some(found: &Found, least: usize) {
    let seed = env::var("FERRYWIRE_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()) ^ 0x5eed);
    let (mut all, mut dirty, mut with_rules) = (0, 0, 0);
    for moment in moments(seed).take(20 * least) {
        let started = Started::new(found.journal.path(), "loop");
        thread::sleep(moment);
        started.kill();
        all += 1;
        let has_rules = !seen().rules.is_empty();
        dirty += usize::from(has_rules || !is_calm());
        with_rules += usize::from(has_rules);
        if all >= least && with_rules > 0 {
            break;
        }
    }
    println!("{dirty} of {all} kills left something, {with_rules} of them rules");
    assert!(with_rules > 0, "no kill came while there were rules");
}

/// Whether flows are spread over all queues, as before the test.
fn is_calm() -> bool {
    Flows::open(NEAR).and_then(|flows| flows.spread()).expect("it is told").contains(&3)
}

/// A hundred kills at one MTU only, because the MTU does not matter here.
fn kills() -> usize {
    if vm::mtu() == 1500 { 100 } else { 10 }
}

#[test]
fn nothing_is_left_of_killed_processes_after_the_next_start() {
    if !vm::is_here() {
        return;
    }
    let found = Found::new(Split::Off, 256, false);
    let before = seen();
    kill_some(&found, kills());
    let CleanUp { reported, failed } = clean_up_in(found.journal.path());
    reported.iter().for_each(|line| println!("{line}"));
    assert_eq!((seen(), failed), (before, false));
    assert_eq!(clean_up_in(found.journal.path()), CleanUp::default(), "nothing is left to say");
}

#[test]
fn rules_of_others_and_of_a_live_claim_survive_the_kills_of_others() {
    if !vm::is_here() {
        return;
    }
    let found = Found::new(Split::Off, 256, true);
    let place = foreign();
    let before = seen();
    let mut claim = found.claim(Wish { queues: 1, ..ALLOWED }).expect("allowed");
    let pool = Pool::new(2 * MIB);
    let binding = claim.bind(pool.dmabuf.as_fd()).expect("it is set up");
    let (near, far) = connection(end("10.9.0.1:0"));
    claim.steer(near.local_addr().expect("near"), near.peer_addr().expect("far")).expect("room");
    let during = seen();
    let seed = u64::from(std::process::id());
    for moment in moments(seed).take(kills() / 4) {
        let started = Started::new(found.journal.path(), "loop");
        thread::sleep(moment);
        started.kill();
    }
    clean_up_in(found.journal.path()).reported.iter().for_each(|line| println!("{line}"));
    assert_eq!(seen(), during);
    assert!(during.rules.iter().any(|(at, _)| *at == place));
    assert_eq!(pool_bytes(&near, &far, binding), 64 * KIB, "it still works");
    drop(claim);
    assert_eq!(seen(), before);
}

#[test]
fn the_last_of_two_processes_puts_everything_back() {
    if !vm::is_here() {
        return;
    }
    for child_ends_first in [true, false] {
        let found = Found::new(Split::Off, 256, false);
        let before = seen();
        let child = Started::new(found.journal.path(), "hold");
        let claim = found.claim(Wish { queues: 1, ..ALLOWED }).expect("another queue");
        assert_eq!((claim.queues(), &seen().bound[..]), (&[2][..], &[3][..]));
        let mut claim = Some(claim);
        if !child_ends_first {
            claim = None;
            let during = seen();
            assert_eq!(
                (during.rules.len(), during.spread.contains(&2), during.spread.contains(&3)),
                (1, true, false)
            );
        }
        child.end();
        if let Some(claim) = claim {
            let during = seen();
            assert_eq!(
                (during.rules.len(), during.spread.contains(&2), during.spread.contains(&3)),
                (0, false, true)
            );
            assert_eq!((during.rings.split, during.ntuple), (Some(Split::On), true));
            drop(claim);
        }
        assert_eq!(seen(), before);
    }
}
