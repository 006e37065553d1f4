//! The real command on a host of a [`World`].

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use crate::world::{Host, LINKS, World};
use crate::{RUN_TIMEOUT, clock};

/// Where `serve` is found.
pub const SERVE: &str = "10.77.1.2:7420";
/// The name by which `serve` calls peers that connect to [`SERVE`].
pub const CONNECT: &str = "10.77.1.1:";
/// Begins a line that says what failed.
const FAILED: &str = "error: ";
/// Part of what a serving end says of a run that it turns away: nothing of its own has failed.
const TURNED_AWAY: &str = "busy with a run of";
/// How often a wait checks its condition.
const TICK: Duration = Duration::from_millis(10);

/// A process that has ended.
#[derive(Debug)]
pub struct Ended {
    /// Exit status; `None` after a signal.
    pub status: Option<i32>,
    /// Standard output.
    pub output: String,
    /// Standard error.
    pub errors: String,
    /// When it said for the first time that something failed.
    pub failed_at: Option<Duration>,
}

impl Ended {
    /// The JSON on standard output.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.output).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The one result of a run that must have finished and verified.
    pub fn verified(&self) -> Value {
        assert_eq!(self.status, Some(0), "{}", self.errors);
        let mut json = self.json();
        assert_eq!(json["error"], Value::Null);
        let results = json["results"].as_array().expect("results");
        assert!(!results.is_empty() && results.iter().all(|row| row["verified"] == true), "{json}");
        json["results"][0].take()
    }

    /// The error of a run that must have failed.
    pub fn failure(&self) -> String {
        assert_eq!(self.status, Some(1), "{self:?}");
        let lines = error_lines(&self.errors);
        assert_eq!(lines.len(), 1, "one line says what is wrong: {}", self.errors);
        lines[0].clone()
    }
}

/// Lines that say what failed.
fn is_failure(line: &str) -> bool {
    line.starts_with(FAILED) && !line.contains(TURNED_AWAY)
}

fn error_lines(text: &str) -> Vec<String> {
    text.lines().filter(|line| line.starts_with(FAILED)).map(str::to_owned).collect()
}

/// The output of a process.
#[derive(Default)]
struct Said {
    text: String,
    /// When the first line came that says what failed.
    failed_at: Option<Duration>,
}

type Text = Arc<Mutex<Said>>;

/// A `ferrywire` that runs on a host; it is killed when this is dropped.
pub struct Process {
    child: Child,
    output: Text,
    errors: Text,
    readers: Vec<JoinHandle<()>>,
    place: TempDir,
}

impl Process {
    /// Starts it. Its directory, also for temporary files, is empty and its own.
    pub fn start(world: &World, host: Host, args: &str) -> Process {
        Process::start_with(world, host, args, &[])
    }

    /// Starts it with variables.
    pub fn start_with(world: &World, host: Host, args: &str, variables: &[(&str, String)]) -> Process {
        Process::start_under(world, host, &[], args, variables)
    }

    /// Starts it by other commands, such as `prlimit`, with variables.
    pub fn start_under(
        world: &World,
        host: Host,
        starters: &[&str],
        args: &str,
        variables: &[(&str, String)],
    ) -> Process {
        let place = tempfile::tempdir().expect("a directory");
        let mut command = Command::new("ip");
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("FERRYWIRE_")) {
            command.env_remove(name);
        }
        command.env("FERRYWIRE_SECRET", "a secret of these tests").env("TMPDIR", place.path());
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        command.args(["netns", "exec", &world.namespace(host)]).args(starters);
        command
            .arg(env!("CARGO_BIN_EXE_ferrywire"))
            .args(args.split_whitespace())
            .current_dir(place.path())
            .stdin(Stdio::null());
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command starts");
        let (output, errors) = (Text::default(), Text::default());
        let readers = vec![
            collect(child.stdout.take().expect("piped"), &output),
            collect(child.stderr.take().expect("piped"), &errors),
        ];
        Process { child, output, errors, readers, place }
    }

    /// Starts `bench serve` and waits until it listens.
    pub fn serve(world: &World, args: &str) -> Process {
        Process::serve_at(world, Host::B, "0.0.0.0:7420", args)
    }

    /// Starts `bench serve` on a host at an address, and waits until it listens.
    pub fn serve_at(world: &World, host: Host, listen: &str, args: &str) -> Process {
        let serve = Process::start(world, host, &format!("bench serve --listen {listen} {args}"));
        let listening = || lock(&serve.output).text.contains("listening on ");
        assert!(wait_until(RUN_TIMEOUT, listening), "serve said {:?}", serve.errors());
        serve
    }

    /// Starts `bench connect` over all four links, its JSON on standard output.
    pub fn connect(world: &World, args: &str) -> Process {
        let nics: Vec<String> = (1..=LINKS).map(|link| Host::A.nic(link)).collect();
        let nics = nics.join(",");
        Process::start(world, Host::A, &format!("bench connect {SERVE} --nics {nics} --json - {args}"))
    }

    /// Sends it a signal.
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.child.id().to_string()]).status();
        assert!(status.expect("kill runs").success());
    }

    /// Whether it has not ended.
    pub fn runs(&mut self) -> bool {
        self.child.try_wait().expect("it can be waited for").is_none()
    }

    /// The error lines so far.
    pub fn error_lines(&self) -> Vec<String> {
        error_lines(&lock(&self.errors).text)
    }

    /// The error lines about the process's own runs.
    pub fn failures(&self) -> Vec<String> {
        self.error_lines().into_iter().filter(|line| is_failure(line)).collect()
    }

    /// The standard error so far.
    pub fn errors(&self) -> String {
        lock(&self.errors).text.clone()
    }

    /// When it said for the first time that something failed.
    pub fn failed_at(&self) -> Option<Duration> {
        lock(&self.errors).failed_at
    }

    /// Waits until it has said that something failed.
    pub fn await_error(&self, timeout: Duration) -> String {
        let said = wait_until(timeout, || !self.error_lines().is_empty());
        assert!(said, "no error line within {timeout:?}: {}", self.errors());
        self.error_lines().remove(0)
    }

    /// Waits until it has ended by itself. No file of it is left.
    pub fn end(mut self, timeout: Duration) -> Ended {
        let ended = wait_until(timeout, || matches!(self.child.try_wait(), Ok(Some(_))));
        assert!(ended, "it still runs after {timeout:?}: {}", self.errors());
        let status = self.child.wait().expect("it has ended").code();
        self.readers.drain(..).for_each(|reader| reader.join().expect("read"));
        let left: Vec<_> = std::fs::read_dir(self.place.path()).expect("listed").flatten().collect();
        assert!(left.is_empty(), "it left {left:?}");
        let failed_at = self.failed_at();
        Ended { status, output: lock(&self.output).text.clone(), errors: self.errors(), failed_at }
    }

    /// Kills it. No file of it is left.
    pub fn kill(self) -> Ended {
        self.signal("-KILL");
        self.end(RUN_TIMEOUT)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until something holds; says whether it came to hold in time.
pub fn wait_until(timeout: Duration, mut holds: impl FnMut() -> bool) -> bool {
    let start = clock::now();
    while !holds() {
        if clock::now() - start > timeout {
            return false;
        }
        thread::sleep(TICK);
    }
    true
}

fn lock(text: &Text) -> std::sync::MutexGuard<'_, Said> {
    text.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn collect(pipe: impl Read + Send + 'static, text: &Text) -> JoinHandle<()> {
    let text = text.clone();
    thread::spawn(move || {
        let mut lines = BufReader::new(pipe);
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
            let said = String::from_utf8_lossy(&line);
            let mut heard = lock(&text);
            if heard.failed_at.is_none() && is_failure(&said) {
                heard.failed_at = Some(clock::now());
            }
            heard.text.push_str(&said);
            drop(heard);
            line.clear();
        }
    })
}
