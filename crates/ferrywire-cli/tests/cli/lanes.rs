//! The plugin's own view of a run: bytes moved, the way it was closed, its listeners, and a message that
//! never completes.

use std::process::Output;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{GRACE, Serve, ferrywire, json, results, text};
use crate::hosted::{connect, connect_when_free, serve, with_plugin};

const CHUNK_BYTES: u64 = 512 << 10;

/// A connect that prints what the plugin logs.
fn verbose(serve: &Serve, args: &str, switches: &str) -> Output {
    let args = with_plugin(&format!("bench connect {} -v {args}", serve.address));
    ferrywire(&args).env("FERRYWIRE_TCPX_SIM", switches).output().expect("it runs")
}

/// The sum of a count over the receiving connections, as the plugin logs it when they are closed.
fn received(said: &str, count: &str) -> u64 {
    let lines = said.lines().filter(|line| line.contains("stats: comm=") && line.contains("side=Recv"));
    let value = |line: &str| line.split_once(count)?.1.split(' ').next()?.parse::<u64>().ok();
    lines.map(|line| value(line).unwrap_or_else(|| panic!("{count}: {line}"))).sum()
}

/// Sizes of so many chunks per channel: more than a window, so that it goes round and round.
#[test]
fn windows_go_round_and_what_is_reported_is_what_the_plugin_moved() {
    for channels in [1, 2, 4] {
        for chunks in [17, 33, 128] {
            let size = chunks * channels * CHUNK_BYTES;
            let serve = serve("--once -v", "stats=on");
            let args =
                format!("--channels {channels} --sizes {size} --iters 2 --warmup 1 --depth 2 --json -");
            let results = results(&connect(&serve, &args, ""));
            let (status, said) = serve.end();
            assert_eq!((status, results.len()), (Some(0), 1), "{said}");
            let row = &results[0];
            assert_eq!((&row["verified"], &row["iterations"]), (&true.into(), &2.into()));
            let verified = row["extra"]["verified_iterations"].as_u64().expect("a count");
            // The warm-up, the timed part, and the verified pass; every byte of each of their messages.
            assert_eq!(received(&said, " bytes="), (1 + 2 + verified) * size, "{said}");
            let (posted, finished) = (received(&said, " posted="), received(&said, " finished="));
            assert!(posted == finished && posted >= (1 + 2 + verified) * chunks * channels, "{said}");
            let most = row["extra"]["max_outstanding_sends"].as_u64();
            assert!((Some(5)..=Some(16)).contains(&most), "{most:?}");
        }
    }
}

#[test]
fn no_end_of_a_run_meets_the_close_of_the_other() {
    // With this switch each receiving connection whose peer closes while anything is tested says so.
    let switches = "close_error=always";
    for args in ["--sizes 64 --iters 10000 --warmup 0", "--sizes 1M --iters 20 --warmup 0 --op read"] {
        let serve = serve("--once -v", switches);
        let output = verbose(&serve, &format!("{args} --seconds 60 --json -"), switches);
        let results = results(&output);
        assert!(results[0]["iterations"].as_u64() >= Some(20), "{}", results[0]);
        assert_eq!(results[0]["extra"]["closing_results"], 0);
        let (status, said) = serve.end();
        assert_eq!(status, Some(0));
        for said in [said, text(&output.stderr)] {
            assert!(said.contains("simulated TCPX plugin:"), "what the plugin logs is printed: {said}");
            assert!(!said.contains("Connection closed by remote peer"), "{said}");
        }
    }
}

#[test]
fn a_message_that_never_completes_is_one_error_with_both_windows() {
    let stall = "stall_head_after=40,fault_side=recv";
    // Whichever end receives.
    for (op, at_serve, at_connect) in [("write", stall, ""), ("read", "", stall)] {
        let mut serve = serve("--timeout 8", at_serve);
        let args =
            format!("--op {op} --channels 1 --sizes 4K,64M --iters 20 --warmup 0 --timeout 8 --json -");
        let output = connect(&serve, &args, at_connect);
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
        let said = json(&output);
        assert_eq!(said["results"].as_array().map(Vec::len), Some(1), "what was finished is there");
        assert!(text(&output.stderr).contains("\nlikely: "), "{}", text(&output.stderr));
        for error in [said["error"].as_str().unwrap_or_default().to_owned(), serve.next_error()] {
            println!("{op}: {error}");
            for part in [
                "127.0.0.1:",
                "channel 0 over lo",
                "plugin GPUDirectTCPX_v7 (v7) on device",
                "message 40 (524288 bytes) has not arrived after 4.0 s: its last test gave result 0, not done",
                "receiving: 16 of 16 posted",
                "sending: ",
            ] {
                assert!(error.contains(part), "{part}: {error}");
            }
            assert_eq!(error.matches("has not arrived").count(), 1, "once: {error}");
        }
    }
}

/// Ports that a process, or one of its own, listens on.
fn listening(pid: u32) -> Vec<u16> {
    let family = [vec![pid], children(pid)].concat();
    let links =
        family.iter().flat_map(|pid| std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten());
    let name = |link: std::io::Result<std::fs::DirEntry>| std::fs::read_link(link.ok()?.path()).ok();
    let open: Vec<String> = links.filter_map(name).map(|name| name.to_string_lossy().into_owned()).collect();
    let table = std::fs::read_to_string("/proc/self/net/tcp").expect("a table");
    let port = |line: &str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let is_open = columns.get(3) == Some(&"0A") && open.contains(&format!("socket:[{}]", columns[9]));
        u16::from_str_radix(columns[1].split_once(':')?.1, 16).ok().filter(|_| is_open)
    };
    table.lines().skip(1).filter_map(port).collect()
}

/// The processes that a process has started.
pub fn children(pid: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    let children = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("children"));
    let all: Vec<String> = threads.flatten().filter_map(|thread| children(thread).ok()).collect();
    all.concat().split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// Waits until a condition holds; a failure says what did not happen. A lane's call that does not return is given up
/// only after `LANE_LINGER_TIMEOUT`, 60 s.
fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let limit = Duration::from_secs(60) + GRACE;
    let until = Instant::now() + limit;
    while !holds() {
        assert!(Instant::now() < until, "within {limit:?} it did not happen that {what}");
        // The kernel walks its whole table of sockets for each reading.
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_serve_listens_once_however_many_come() {
    let serve = serve("", "");
    let own = listening(serve.child.id());
    assert_eq!(own.len(), 1, "its own port: {own:?}");
    for _ in 0..3 {
        results(&connect_when_free(&serve, "--channels 3 --sizes 64K,1M --iters 20 --json -"));
        assert_eq!(listening(serve.child.id()), own, "the plugin's listeners were closed");
    }
    assert!(!serve.stop().contains("stays open"));
}

/// An accept that has not begun when its lane is given up is none: it may take several peers until one has.
#[test]
fn a_listener_that_must_stay_open_is_reported_once_and_ends_with_its_process() {
    let mut serve = serve("", "");
    let (own, said) = (listening(serve.child.id()), serve.collect_errors());
    let reported =
        || said.lock().expect("lines").iter().filter(|line| line.contains("listener stays open")).count();
    let left_open = || (listening(serve.child.id()).len() - own.len()) / 2;
    for _ in 0..10 {
        // The peer never connects to it.
        let args = "--channels 1 --sizes 4K --iters 5 --timeout 3";
        let output = connect(&serve, args, "fault_call=connect,call_fault=hang");
        assert_eq!(output.status.code(), Some(1));
        // Each has two sockets. A listener whose accept is unfinished is reported; every other one is closed.
        wait_until("the plugin's listener was closed or reported", || left_open() == reported());
        if reported() > 0 {
            break;
        }
    }
    assert_eq!(reported(), 1, "{said:?}");
    // The leaked listener does not disturb the next run.
    results(&connect_when_free(&serve, "--channels 1 --sizes 4K --iters 5 --json -"));
    assert_eq!((left_open(), reported()), (1, 1));
    let port = *listening(serve.child.id()).iter().find(|port| !own.contains(port)).expect("one is left");
    drop(serve);
    // The kernel refuses connections to it when the last process with it is gone.
    let refuses = || std::net::TcpStream::connect(("127.0.0.1", port)).is_err();
    wait_until("the kernel closed the listener of the ended process", refuses);
}
