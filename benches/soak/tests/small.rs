//! The soak at a size that takes seconds, on loopback, so that it keeps working: it passes, and it fails when a byte is wrong.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Time within which a peer says what a test waits for; a peer needs less than a second.
const SAID_WITHIN: Duration = Duration::from_secs(60);

/// The folder of the built programs.
fn programs() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_soak")).parent().unwrap().to_owned()
}

#[test]
fn a_soak_of_seconds_passes_and_says_what_it_moved() {
    if Command::new("python3").arg("--version").output().is_err() {
        return println!("SKIPPED: needs python3");
    }
    let json = programs().join(format!("soak-{}.json", std::process::id()));
    let mut command = Command::new("python3");
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("soak.py"));
    command.arg("--bin").arg(programs()).arg("--json").arg(&json).env("PYTHONDONTWRITEBYTECODE", "1");
    command.args("--loopback --minutes 0.1 --kills 2 --restarts 1 --rotations 1 --rests 2".split(' '));
    let output = command.output().expect("python3 starts");
    let said =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success(), "{said}");
    for part in ["moved and verified", "kills  2 of 2", "rotations  1 of 1", "main descriptors", "PASSED"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    fs::remove_file(json).expect("the results are written");
}

#[test]
fn the_soak_judges_as_its_description_says() {
    if Command::new("python3").arg("--version").output().is_err() {
        return println!("SKIPPED: needs python3");
    }
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/judging.py");
    let mut command = Command::new("python3");
    let output = command.arg(tests).env("PYTHONDONTWRITEBYTECODE", "1").output().expect("python3 starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A server or a client, ended when it is dropped.
struct Peer {
    child: Child,
    /// Open: a peer whose driver is gone ends.
    _orders: ChildStdin,
}

impl Peer {
    fn start(which: &str, folder: &Path, pool: &str) -> Peer {
        let mut command = Command::new(env!("CARGO_BIN_EXE_soak"));
        command
            .arg(which)
            .arg("--pool")
            .arg(folder.join(pool))
            .arg("--metadata")
            .arg(folder.join("metadata"));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        let mut orders = child.stdin.take().unwrap();
        writeln!(orders, "secret of-this-test").unwrap();
        Peer { child, _orders: orders }
    }

    /// The first line of this kind. A peer goes on until its driver is gone, so it may never say one.
    fn first(&mut self, kind: &str) -> String {
        let lines = BufReader::new(self.child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let (said, heard) = mpsc::channel();
        thread::spawn(move || lines.into_iter().try_for_each(|line| said.send(line)));
        let until = Instant::now() + SAID_WITHIN;
        loop {
            match heard.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(line) if line.starts_with(kind) => return line,
                Ok(_) => {}
                Err(_) => panic!("it did not say {kind} within {SAID_WITHIN:?}"),
            }
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn bytes_that_differ_are_reported_as_wrong() {
    let folder = std::env::temp_dir().join(format!("soak-test-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let pool: Vec<u8> =
        (0..72u64 << 20).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
    fs::write(folder.join("pool"), &pool).unwrap();
    // The server checks what is written to it against other bytes than those that the client has.
    let others: Vec<u8> = pool.iter().map(|byte| byte ^ 1).collect();
    fs::write(folder.join("others"), &others).unwrap();
    let mut server = Peer::start("serve", &folder, "others");
    assert_eq!(server.first("up"), "up");
    let mut client = Peer::start("client", &folder, "pool");
    let said = client.first("wrong");
    assert!(said.starts_with("wrong "), "{said}");
    drop((client, server));
    fs::remove_dir_all(folder).unwrap();
}
