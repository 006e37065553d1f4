//! Runs the real command in the tests.

use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStderr, ChildStdout, Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

/// The default of `--timeout`.
pub const TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
/// More than a busy machine adds to any step. A process that takes longer than its timeout and this hangs.
pub const GRACE: Duration = Duration::from_secs(60);

/// The command, without the environment variables of the user who runs the tests.
pub fn ferrywire(args: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrywire"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("FERRYWIRE_")) {
        command.env_remove(name);
    }
    command.args(args.split_whitespace()).stdin(Stdio::null());
    command
}

/// Runs the command to its end.
pub fn run(args: &str) -> Output {
    ferrywire(args).output().expect("the command starts")
}

/// Runs a command that ends within this timeout, or little later; one that does not hangs, and is killed.
pub fn run_within(timeout: Duration, command: &mut Command) -> Output {
    let spawned = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    end_within(timeout, spawned.expect("the command starts"))
}

/// Waits for a process in the same way.
pub fn end_within(timeout: Duration, child: Child) -> Output {
    let id = child.id().to_string();
    let (done, result) = mpsc::channel();
    thread::spawn(move || done.send(child.wait_with_output()));
    let limit = timeout + GRACE;
    let output = result.recv_timeout(limit).unwrap_or_else(|_| {
        let _ = Command::new("kill").args(["-KILL", &id]).status();
        let said = result.recv_timeout(GRACE).map(|output| output.map(|output| text(&output.stderr)));
        panic!("it has not ended within {limit:?}: {said:?}")
    });
    output.expect("it can be waited for")
}

/// A successful command fails with one line if its report cannot be written; a closed pipe is no failure.
pub fn unwritten(command: &mut Command) {
    let full = std::fs::File::create("/dev/full").expect("it is always full");
    let output = command.stdout(full).output().expect("the command starts");
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.starts_with("error: cannot write"), "{said}");
    let (unread, stdout) = UnixStream::pair().expect("sockets");
    drop(unread);
    let output = command.stdout(OwnedFd::from(stdout)).output().expect("the command starts");
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""));
}

/// First line of what a command said on standard error.
pub fn first_error(output: &Output) -> String {
    text(&output.stderr).lines().next().unwrap_or_default().to_owned()
}

/// Bytes as text.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The JSON on standard output.
pub fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}{}", text(&output.stdout), text(&output.stderr)))
}

/// The results of a run that must have gone well.
pub fn results(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{:?}: {}", output.status, text(&output.stderr));
    let json = json(output);
    assert_eq!(json["error"], Value::Null);
    json["results"].as_array().expect("results").clone()
}

/// A `bench serve` on a free port of loopback; ends with the test.
pub struct Serve {
    pub address: String,
    pub child: Child,
    pub stdout: BufReader<ChildStdout>,
    /// Lines.
    stderr: Option<Receiver<String>>,
}

impl Serve {
    /// Starts it with further options.
    pub fn start(args: &str) -> Serve {
        Serve::start_with(&format!("--listen 127.0.0.1:0 {args}"), &[])
    }

    /// Starts it with options, the address among them, and variables.
    pub fn start_with(args: &str, variables: &[(&str, &str)]) -> Serve {
        let mut command = ferrywire(&format!("bench serve {args}"));
        command.envs(variables.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("serve starts");
        let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
        let line = read_line(&mut stdout);
        let stderr = Some(lines(child.stderr.take().expect("piped")));
        let address =
            line.trim().strip_prefix("listening on ").unwrap_or_else(|| panic!("serve said {line:?}"));
        Serve { address: address.split(", ").next().unwrap_or_default().to_owned(), child, stdout, stderr }
    }

    /// Runs `bench connect` to it.
    pub fn connect(&self, args: &str) -> Output {
        run(&format!("bench connect {} {args}", self.address))
    }

    /// As the method above, with a timeout; see [`run_within`].
    pub fn connect_within(&self, timeout: Duration, args: &str) -> Output {
        run_within(timeout, &mut ferrywire(&format!("bench connect {} {args}", self.address)))
    }

    /// The exit status and standard error of a serve that ends by itself.
    pub fn end(mut self) -> (Option<i32>, String) {
        let until = Instant::now() + TIMEOUT_DEFAULT + GRACE;
        let status = loop {
            match self.child.try_wait().expect("it can be waited for") {
                Some(status) => break status,
                None => assert!(Instant::now() < until, "serve does not end"),
            }
            thread::sleep(Duration::from_millis(5));
        };
        (status.code(), self.errors())
    }

    /// Stops it; gives what it said on standard error.
    pub fn stop(mut self) -> String {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.errors()
    }

    /// Waits until a fresh process listens in place of one that has ended.
    pub fn listens_again(&mut self) {
        loop {
            let line = read_line(&mut self.stdout);
            assert!(!line.is_empty(), "it has ended and does not listen again");
            if line.starts_with("listening again on ") {
                return;
            }
        }
    }

    /// Waits for the next error on standard error, past warnings. Empty: it has ended.
    pub fn next_error(&mut self) -> String {
        self.next_error_within(TIMEOUT_DEFAULT)
    }

    /// As the method above, with a timeout; see [`run_within`].
    pub fn next_error_within(&mut self, timeout: Duration) -> String {
        let until = Instant::now() + timeout + GRACE;
        let lines = self.stderr.as_ref().expect("nobody else reads it");
        let mut others = Vec::new();
        loop {
            match lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(line) if line.starts_with("error: ") => return line,
                Ok(line) => others.push(line),
                Err(RecvTimeoutError::Disconnected) => return String::new(),
                Err(RecvTimeoutError::Timeout) => {
                    panic!("no error within {timeout:?} and {GRACE:?}, only {others:#?}")
                }
            }
        }
    }

    /// From now on the lines of standard error are collected here.
    pub fn collect_errors(&mut self) -> Arc<Mutex<Vec<String>>> {
        let lines = Arc::<Mutex<Vec<String>>>::default();
        let (stderr, into) = (self.stderr.take().expect("nobody else reads it"), lines.clone());
        thread::spawn(move || stderr.iter().for_each(|line| into.lock().expect("a whole line").push(line)));
        lines
    }

    fn errors(&mut self) -> String {
        let lines = self.stderr.as_ref().expect("nobody else reads it");
        lines.iter().map(|line| line + "\n").collect()
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The next line of a pipe.
pub fn read_line(pipe: &mut impl BufRead) -> String {
    let mut line = String::new();
    pipe.read_line(&mut line).expect("text");
    line
}

/// The lines of a pipe, as they come.
fn lines(pipe: ChildStderr) -> Receiver<String> {
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        let read = BufReader::new(pipe).lines().map_while(Result::ok);
        read.for_each(|line| drop(sender.send(line)));
    });
    lines
}
