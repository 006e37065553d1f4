//! `ferrywire watch`: what it sees of other processes.

use std::collections::BTreeSet;
use std::io::BufReader;
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::{
    GRACE, Serve, TIMEOUT_DEFAULT, end_within, ferrywire, json, read_line, run, run_within, text,
};
use crate::nccl;

/// The processes in the output of `watch --once --json`.
fn all_watched() -> Vec<Value> {
    let output = run("watch --once --json --interval 0.3");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let json = json(&output);
    assert_eq!(json["schema"], 1);
    json["processes"].as_array().expect("processes").clone()
}

/// The process with this id among them.
fn watched(pid: u32) -> Option<Value> {
    all_watched().into_iter().find(|process| process["pid"] == pid)
}

/// Whether a process is this one's child, or a child's child.
fn is_below(mut pid: u64, ancestor: u32) -> bool {
    while pid > 1 && pid != u64::from(ancestor) {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
        pid = parent.unwrap_or(0);
    }
    pid == u64::from(ancestor)
}

#[test]
fn both_ends_of_a_run_are_seen_with_their_rates() {
    let serve = Serve::start("--memory host");
    let mut connect =
        ferrywire(&format!("bench connect {} --memory host --sizes 1M --seconds 60", serve.address));
    let mut child = connect.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
    let until = Instant::now() + GRACE;
    let sum = |process: &Value, field: &str| {
        let paths = process["paths"].as_array().expect("paths").iter();
        paths.map(|path| path[field].as_f64().expect("a rate")).sum::<f64>()
    };
    let [source, target] =
        [(child.id(), "tx_gb_per_s"), (serve.child.id(), "rx_gb_per_s")].map(|(pid, field)| {
            loop {
                assert!(Instant::now() < until, "process {pid} moves nothing");
                if let Some(process) = watched(pid).filter(|process| sum(process, field) > 0.001) {
                    break process;
                }
            }
        });
    let pid = child.id();
    let shown = text(&run("watch --once --interval 0.3 -v").stdout);
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    for process in [&source, &target] {
        assert_eq!((&process["face"], &process["program"]), (&"command".into(), &"ferrywire".into()));
        let path = &process["paths"][0];
        assert_eq!((&path["nic"], &path["transport"]), (&"lo".into(), &"tcp".into()));
        let channels = path["channels"].as_array().expect("channels");
        assert!(channels.iter().all(|channel| channel["alive"] == true), "{channels:?}");
    }
    assert!(source["paths"][0]["operations_per_s"].as_f64().expect("a rate") > 0.0, "{source}");
    assert!(shown.lines().any(|line| line.starts_with(&format!(" {pid} "))), "{pid} is not in\n{shown}");
    assert!(shown.contains("#0"), "{shown}");
}

/// Regression: `watch --json | head -n1` did not end.
#[test]
fn it_ends_with_its_reader() {
    for (options, lines) in [("--json", 0), ("--json", 1), ("", 0)] {
        let mut command = ferrywire(&format!("watch --interval 0.1 {options}"));
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command starts");
        let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
        (0..lines).for_each(|_| assert!(!read_line(&mut stdout).is_empty()));
        drop(stdout);
        let output = end_within(Duration::ZERO, child);
        assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""));
    }
}

#[test]
fn an_nccl_plugin_is_seen_in_the_program_that_loaded_it() {
    let mut driver = nccl::driver("told");
    let mut child = driver.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("it starts");
    let mut letters = child.stdin.take().expect("piped");
    // A stream until the next letter.
    std::io::Write::write_all(&mut letters, b"s").expect("it reads");
    let until = Instant::now() + GRACE;
    let process = loop {
        assert!(Instant::now() < until, "the plugin moves nothing");
        let moves =
            |process: &Value| process["paths"][0]["tx_gb_per_s"].as_f64().is_some_and(|rate| rate > 0.0);
        if let Some(process) = watched(child.id()).filter(moves) {
            break process;
        }
    };
    std::io::Write::write_all(&mut letters, b"c").expect("it reads");
    drop(letters);
    assert!(child.wait().expect("it ends").success());
    assert_eq!((&process["face"], &process["program"]), (&"nccl".into(), &"driver".into()));
    let paths = process["paths"].as_array().expect("paths");
    let path = &paths[0];
    assert_eq!(
        (paths.len(), &path["peer"]),
        (1, &"127.0.0.1".into()),
        "both directions are of one peer: {process}"
    );
    assert_eq!((&path["nic"], &path["transport"]), (&"lo".into(), &"tcp".into()));
    assert!(path["rx_gb_per_s"].as_f64().expect("a rate") > 0.0, "{path}");
    assert!(path["operations_per_s"].as_f64().expect("a rate") > 0.0, "{path}");
}

/// The command's engine uses the NCCL plugin here, as a Python program may do beside its own engine.
#[test]
fn a_process_with_two_libraries_of_ferrywire_is_one_process_with_both_faces() {
    let plugin = nccl::library();
    let mut bench = ferrywire(&format!(
        "bench --memory host --transport plugin --plugin {} --sizes 1M --seconds 60",
        plugin.display()
    ));
    bench.env("NCCL_SOCKET_IFNAME", "lo").stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = bench.spawn().expect("it starts");
    // Bytes of a face of a process, also if the process is listed more than once.
    let moved = |ends: &[Value], pid: u64, face: &str| {
        let paths = ends.iter().filter(|end| end["pid"] == pid).flat_map(|end| end["paths"].as_array());
        let rate = |path: &Value, field: &str| path[field].as_f64().expect("a rate");
        let of_face = paths.flatten().filter(|path| path["face"] == face);
        of_face.map(|path| rate(path, "tx_gb_per_s") + rate(path, "rx_gb_per_s")).sum::<f64>()
    };
    let until = Instant::now() + GRACE;
    let (ends, pids) = loop {
        let mut ends = all_watched();
        ends.retain(|process| is_below(process["pid"].as_u64().expect("an id"), child.id()));
        let pids: BTreeSet<u64> = ends.iter().filter_map(|end| end["pid"].as_u64()).collect();
        // Two ends, which carry the payload over the plugin and their own words over the engine's channels.
        let faces = |pid: &u64| moved(&ends, *pid, "command") > 0.0 && moved(&ends, *pid, "nccl") > 0.001;
        if pids.len() == 2 && pids.iter().all(faces) {
            break (ends, pids);
        }
        assert!(Instant::now() < until && child.try_wait().expect("it runs").is_none(), "{ends:?}");
    };
    let shown = text(&run("watch --once --interval 0.3").stdout);
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    assert_eq!(ends.len(), pids.len(), "each is listed once: {ends:?}");
    for end in &ends {
        assert_eq!(end["face"], "command+nccl", "{end}");
        for face in ["command", "nccl"] {
            let begin = format!(" {} ", end["pid"]);
            let is_its = |line: &str| line.starts_with(&begin) && line.contains(&format!("({face})"));
            assert!(shown.lines().any(is_its), "no {face} of {begin}in\n{shown}");
        }
    }
}

#[test]
fn a_host_without_processes_is_reported_and_is_no_failure() {
    // A user without processes, who is not root.
    let mut command = Command::new("unshare");
    command.args(["--user", env!("CARGO_BIN_EXE_ferrywire"), "watch", "--once", "--interval", "0.1"]);
    let output = command.output().expect("unshare runs");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stdout).starts_with("no process of this user uses ferrywire now"));
}

/// The folder of root, in a mount namespace of its own, is a file: no process could have a socket there.
#[test]
fn a_folder_that_cannot_hold_sockets_is_named() {
    let look = format!(
        "mount -t tmpfs tmpfs /tmp && touch /tmp/ferrywire-0 && exec {} watch --once --interval 0.1",
        env!("CARGO_BIN_EXE_ferrywire")
    );
    let mut command = Command::new("unshare");
    let output = command.args(["--user", "--map-root-user", "--mount", "sh", "-c", &look]).output();
    let output = output.expect("unshare runs");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    assert!(said.starts_with("no answer from /tmp/ferrywire-0: not a folder "), "{said}");
    assert!(!said.contains("no process"), "{said}");
}

/// Another program of the user may have a socket there that never stops to answer.
#[test]
fn an_answer_without_an_end_is_an_error_of_that_process_alone() {
    let _serve = Serve::start("--memory host");
    let user = std::fs::metadata("/proc/self")
        .map(|found| std::os::unix::fs::MetadataExt::uid(&found))
        .expect("a user");
    let path = format!("/tmp/ferrywire-{user}/endless-{}.sock", std::process::id());
    let listener = UnixListener::bind(&path).expect("the folder is there");
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                while std::io::Write::write_all(&mut stream, b" ").is_ok() {
                    std::thread::sleep(Duration::from_millis(100));
                }
            });
        }
    });
    let output = run_within(Duration::from_secs(10), &mut ferrywire("watch --once --json --interval 0.1"));
    std::fs::remove_file(&path).expect("it is still there");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let unread = json(&output)["unread"].as_array().expect("a list").clone();
    let of_path = unread.iter().find(|failure| failure["socket"] == path.as_str()).expect("it is told");
    assert!(of_path["error"].as_str().is_some_and(|why| !why.is_empty()), "{of_path}");
}

/// Listens on 20 sockets in a folder like those of processes, answers on none, and runs the command.
const SILENT: &str = "
import os, socket, subprocess, sys
os.mkdir('/tmp/ferrywire-0', 0o700)
silent = [socket.socket(socket.AF_UNIX) for _ in range(20)]
for number, each in enumerate(silent):
    each.bind(f'/tmp/ferrywire-0/{number}-1.sock')
    each.listen()
sys.exit(subprocess.run([sys.argv[1], 'watch', '--once', '--json', '--interval', '0.1']).returncode)
";

/// Regression: each process that did not answer was waited for in turn, 2 s each.
#[test]
fn stopped_processes_are_waited_for_together_and_named() {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "sh", "-c"]);
    command.arg("mount -t tmpfs tmpfs /tmp && exec python3 -c \"$1\" \"$2\"");
    command.args(["sh", SILENT, env!("CARGO_BIN_EXE_ferrywire")]);
    // In turn they would take 80 s.
    let output = run_within(Duration::from_secs(40), &mut command);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let unread = json(&output)["unread"].as_array().expect("a list").clone();
    assert_eq!(unread.len(), 20);
    for failure in unread {
        let why = failure["error"].as_str().expect("a text");
        assert!(why.contains("did not answer within 2 s"), "{why}");
    }
}

/// Regression: it ended with status 0, and without the object that a program expects then.
#[test]
fn a_signal_before_the_only_output_is_no_success() {
    let mut command = ferrywire("watch --once --json --interval 600");
    let watch = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command starts");
    let status = format!("/proc/{}/status", watch.id());
    let until = Instant::now() + GRACE;
    // The mask of SIGTERM, once the process catches it.
    let catches = |line: &str| {
        let mask = line.strip_prefix("SigCgt:").and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        mask.is_some_and(|mask| mask & (1 << (libc::SIGTERM - 1)) != 0)
    };
    while !std::fs::read_to_string(&status).expect("it runs").lines().any(catches) {
        assert!(Instant::now() < until, "it does not catch the signal");
        std::thread::sleep(Duration::from_millis(10));
    }
    let killed = Command::new("kill").args(["-TERM", &watch.id().to_string()]).status();
    assert!(killed.expect("kill runs").success());
    let output = end_within(TIMEOUT_DEFAULT, watch);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(143), ""));
}

/// Runs the command in a terminal, interrupts it and prints what the terminal got.
const IN_A_TERMINAL: &str = "
import os, pty, signal, sys, time
pid, terminal = pty.fork()
if pid == 0:
    os.execv(sys.argv[1], sys.argv[1:])
got = b''
while b'\\x1b[2J' not in got:
    got += os.read(terminal, 65536)
os.kill(pid, signal.SIGINT)
while True:
    try:
        part = os.read(terminal, 65536)
    except OSError:
        break
    if not part:
        break
    got += part
_, status = os.waitpid(pid, 0)
sys.stdout.buffer.write(got)
sys.exit(os.waitstatus_to_exitcode(status))
";

#[test]
fn ctrl_c_ends_it_well_and_leaves_the_terminal_as_it_was() {
    let mut command = Command::new("python3");
    command.args(["-c", IN_A_TERMINAL, env!("CARGO_BIN_EXE_ferrywire"), "watch", "--interval", "0.1"]);
    let output = command.output().expect("python3 runs");
    let got = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{got:?}");
    assert!(got.starts_with("\u{1b}[?1049h") && got.trim_end().ends_with("\u{1b}[?1049l"), "{got:?}");
}
