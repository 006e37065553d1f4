//! What is told where an endpoint ends, does not come about, or cannot be reached.

use crate::case::case;
use crate::{LIMIT, pair};
use ferrywire::{Endpoint, Error, Transfer};
use std::net::TcpListener;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < LIMIT, "never came about: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// An endpoint with a message under way that nobody receives: it cannot close before its deadline.
fn never_finished() -> (crate::Pair, Transfer) {
    let pair = pair();
    let source = pair.ends[0].register_zeroed(1 << 20).unwrap();
    let sent = pair.near.send(1, &source, 0, 1 << 20).unwrap();
    (pair, sent)
}

/// A second close says what the first does, and not before it.
#[test]
fn a_second_close_waits_for_the_first_and_says_the_same() {
    let (pair, sent) = never_finished();
    thread::scope(|scope| {
        let first = scope.spawn(|| pair.ends[0].close(Duration::from_secs(2)));
        eventually("it closes", || matches!(pair.near.notify(b"x"), Err(Error::Closed)));
        let early = pair.ends[0].close(Duration::ZERO);
        assert!(matches!(early, Err(Error::Deadline { waited: Duration::ZERO, .. })), "{early:?}");
        let second = pair.ends[0].close(LIMIT);
        assert!(sent.poll().is_some(), "the second close came back before the end");
        assert!(matches!(second, Err(Error::Deadline { .. })), "{second:?}");
        assert_eq!(first.join().unwrap(), second);
        assert_eq!(pair.ends[0].close(LIMIT), second, "it is closed, and did not finish");
    });
    assert_eq!((pair.ends[1].close(LIMIT), pair.ends[1].close(Duration::ZERO)), (Ok(()), Ok(())));
}

/// With threads of its own and without: there whoever waits for a peer turns everything else meanwhile.
#[test]
fn whoever_waits_for_a_peer_is_told_when_the_endpoint_closes() {
    for threads in [0, 1] {
        let builder = || Endpoint::builder().channels(1);
        let accepting = builder().threads(threads).listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        let connecting = builder().build().unwrap();
        let first = Barrier::new(2);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let far = accepting.accept(LIMIT).unwrap();
                first.wait();
                (accepting.accept(LIMIT).map(|_| ()), far)
            });
            let near = connecting.connect(accepting.listen_addresses()[0], LIMIT).unwrap();
            first.wait();
            // Without threads this is answered only by whoever waits.
            near.notify(b"are you there?").unwrap().wait(LIMIT).unwrap();
            thread::sleep(Duration::from_millis(50));
            assert_eq!(accepting.close(LIMIT), Ok(()));
            assert_eq!(waiting.join().unwrap().0, Err(Error::Closed));
        });
    }
}

/// What the threads of endpoints are called that run.
fn threads_of_ours() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let name = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
    };
    tasks.filter_map(name).filter(|name| name.starts_with("ferrywire")).collect()
}

/// Bytes of address space in use.
fn space_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
    pages * page_bytes()
}

fn page_bytes() -> u64 {
    // SAFETY: asks for a number.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as u64 }
}

fn limit_space(bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: a limit of this process, given by value.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
}

/// Bytes of each thread's stack, far more than what else is allocated while an endpoint is built.
const STACK_BYTES: u64 = 1 << 30;

/// Some of its threads run when it turns out that there is no room for one more.
#[test]
fn an_endpoint_that_cannot_be_built_leaves_no_thread_and_no_port() {
    case!("").with("RUST_MIN_STACK", &STACK_BYTES.to_string()).passes(|| {
        for room in [0, 1, 2] {
            let free = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = free.local_addr().unwrap();
            drop(free);
            let builder = || Endpoint::builder().threads(2).channels(1).listen(address);
            limit_space(space_bytes() + room * STACK_BYTES + STACK_BYTES / 2);
            let built = builder().build();
            limit_space(libc::RLIM_INFINITY);
            let error = built.expect_err("there is no room for its threads");
            assert!(matches!(&error, Error::Io { what, .. } if what == "start a thread"), "{error}");
            drop(TcpListener::bind(address).expect("nobody listens there any more"));
            eventually("its threads have ended", || threads_of_ours().is_empty());
            let endpoint = builder().build().expect("there is room now, and the port is free");
            assert_eq!(endpoint.close(LIMIT), Ok(()));
            eventually("its threads have ended too", || threads_of_ours().is_empty());
        }
    });
}
