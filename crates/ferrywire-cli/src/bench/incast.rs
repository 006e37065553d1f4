//! `--pattern incast`: further processes of this command that join the same run.

use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use super::isolated::message::Message;
use super::link::{CLOSE_TIMEOUT, FAILURE_TOLD_TIMEOUT};
use super::{child_secret, parent};
use crate::args::variable;
use crate::exit::{Failure, Outcome};
use crate::plan::ConnectPlan;
use crate::plugin::KILLED_MAX;
use crate::units::rounded;
use crate::{sys, tool};

/// Longest time for a peer to end after it was interrupted. It exceeds the time of the peer's last message and of
/// closing, after which the peer undoes its changes of NICs.
const INTERRUPT_GRACE: Duration =
    Duration::from_secs(FAILURE_TOLD_TIMEOUT.as_secs() + 2 * CLOSE_TIMEOUT.as_secs() + 3);
/// How long other peers may take to report the cause after this peer has failed.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// How often the other processes are checked for their end.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Most bytes that are kept of a peer's standard error.
const SAID_BYTES_MAX: u64 = 64 << 10;

/// The other peers of the run, each a process of its own.
#[derive(Debug)]
pub struct Companions {
    peers: Vec<Companion>,
    /// Once this peer's part is over: how long the other peers may go on without progress.
    timeout: Duration,
}

#[derive(Debug)]
struct Companion {
    /// The peer's index in the run.
    number: usize,
    child: Child,
    /// The peer's messages to this process.
    messages: Receiver<Message>,
    /// The first line of the peer's standard error, once the peer has ended.
    printed: Receiver<String>,
}

impl Companions {
    /// Starts the run's other peers.
    pub fn start(plan: &ConnectPlan) -> Outcome<Companions> {
        let mut companions = Companions { peers: Vec::new(), timeout: plan.timeout };
        // With --gpus the peers are endpoints of this process.
        if plan.member > 0 || plan.engine.gpus.is_some() {
            return Ok(companions);
        }
        for number in 1..plan.run.peers {
            match command(plan, number).and_then(|command| Companion::start(number, command)) {
                Ok(companion) => companions.peers.push(companion),
                Err(error) => {
                    companions.kill();
                    return Err(Failure::failed(format!(
                        "cannot start peer {number} of the incast: {error}"
                    )));
                }
            }
        }
        Ok(companions)
    }

    /// Waits for the other peers, or ends them if this one has failed. The error names each peer that failed.
    pub fn end(mut self, outcome: Outcome) -> Outcome {
        let grace = match &outcome {
            Ok(()) => self.timeout.saturating_add(INTERRUPT_GRACE),
            Err(Failure::Interrupted) => Duration::ZERO,
            Err(_) => LAST_WORDS,
        };
        self.wait(grace);
        let late: Vec<usize> =
            self.peers.iter_mut().filter_map(|peer| peer.runs().then_some(peer.number)).collect();
        let ended = self.peers.iter_mut().filter(|peer| !late.contains(&peer.number));
        let mut failures: Vec<(usize, Failure)> =
            ended.filter_map(|peer| Some((peer.number, peer.failure()?))).collect();
        self.kill();
        match &outcome {
            Ok(()) => {
                let why = format!("the peer's process has not ended within {:?}", rounded(grace));
                failures.extend(late.into_iter().map(|number| (number, Failure::failed(why.clone()))));
            }
            Err(Failure::Interrupted) => {}
            // A peer that has failed tells the other end before it ends, and may have been at that.
            Err(_) => {
                let late = self.peers.iter_mut().filter(|peer| late.contains(&peer.number));
                let told = late.filter_map(|peer| Some((peer.number, peer.reported()?)));
                failures.extend(told.filter(|(_, failure)| *failure != Failure::Interrupted));
            }
        }
        failures.sort_by_key(|(number, _)| *number);
        match outcome {
            Ok(()) if sys::interrupted() => Err(Failure::Interrupted),
            outcome => together(outcome, failures),
        }
    }

    /// Waits until all peers have ended, `limit` has passed, or the user pressed Ctrl-C.
    fn wait(&mut self, limit: Duration) {
        let since = Instant::now();
        while self.peers.iter_mut().any(Companion::runs) && since.elapsed() < limit && !sys::interrupted() {
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Ends the other peers, after they had time to undo their changes of NICs.
    fn kill(&mut self) {
        for peer in self.peers.iter_mut().filter_map(|peer| peer.runs().then_some(peer)) {
            sys::interrupt(peer.child.id());
        }
        let until = Instant::now() + INTERRUPT_GRACE;
        while self.peers.iter_mut().any(Companion::runs) && Instant::now() < until {
            thread::sleep(POLL_INTERVAL);
        }
        for peer in &mut self.peers {
            let _ = peer.child.kill();
        }
        let until = Instant::now() + KILLED_MAX;
        for peer in &mut self.peers {
            tool::kill_or_note(&mut peer.child, until.saturating_duration_since(Instant::now()));
        }
    }
}

impl Companion {
    fn start(number: usize, mut command: Command) -> std::io::Result<Companion> {
        parent::ask(&mut command);
        let mut child = command.spawn()?;
        let messages = child.stdout.take().map_or_else(|| mpsc::channel().1, parent::messages);
        let (done, printed) = mpsc::channel();
        if let Some(pipe) = child.stderr.take() {
            thread::spawn(move || done.send(first_line(pipe)));
        }
        Ok(Companion { number, child, messages, printed })
    }

    fn runs(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// The failure that the peer's process has reported, once it has ended.
    fn reported(&mut self) -> Option<Failure> {
        while let Ok(message) = self.messages.recv_timeout(LAST_WORDS) {
            if let Message::Outcome(Err(failure)) = message {
                return Some(failure);
            }
        }
        None
    }

    /// The peer's failure, if the peer has ended with one.
    fn failure(&mut self) -> Option<Failure> {
        let status = self.child.try_wait().ok().flatten().filter(|status| !status.success())?;
        if let Some(failure) = self.reported() {
            return Some(failure);
        }
        // A killed process leaves no message.
        let printed = self.printed.recv_timeout(LAST_WORDS).unwrap_or_default();
        let printed = if printed.is_empty() { "no message".to_owned() } else { printed };
        Some(Failure::failed(format!("{printed}, {status}")))
    }
}

/// The first line of a pipe. The rest is read: a full pipe would stop the peer.
fn first_line(mut pipe: impl Read) -> String {
    let mut bytes = Vec::new();
    let _ = (&mut pipe).take(SAID_BYTES_MAX).read_to_end(&mut bytes);
    let _ = io::copy(&mut pipe, &mut io::sink());
    String::from_utf8_lossy(&bytes).lines().next().unwrap_or_default().to_owned()
}

/// The outcome of all peers. A failure that was only reported to a peer by another is left out, unless there is no
/// other.
fn together(outcome: Outcome, of_others: Vec<(usize, Failure)>) -> Outcome {
    let own = match outcome {
        Ok(()) => None,
        Err(own @ (Failure::Usage(_) | Failure::Interrupted)) => return Err(own),
        Err(own) => Some(own),
    };
    // A failure that all peers share, such as a busy serving end, is reported once.
    let repeats =
        |failure: &Failure| own.as_ref().is_some_and(|own| own.first_line() == failure.first_line());
    let of_others = of_others.into_iter().filter(|(_, failure)| !repeats(failure));
    let named = of_others.map(|(number, failure)| {
        let first = failure.first_line();
        failure.map_message(|_| format!("peer {number} of the incast failed: {first}"))
    });
    let all: Vec<Failure> = own.iter().cloned().chain(named).collect();
    let (heard, met): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|failure| matches!(failure, Failure::Hearsay(_)));
    match if met.is_empty() { heard } else { met } {
        failures if failures.is_empty() => Ok(()),
        failures => {
            let messages: Vec<String> = failures.iter().map(Failure::message).collect();
            Err(Failure::Failed(messages.join("\n")))
        }
    }
}

fn command(plan: &ConnectPlan, member: usize) -> std::io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    // Any of the addresses of a name may be the one that answers.
    let first = || plan.addresses.first().map(ToString::to_string).unwrap_or_default();
    command.args(["bench", "connect", &plan.typed_address.clone().unwrap_or_else(first)]);
    for output in ["json", "csv", "config"] {
        command.env_remove(variable(output));
    }
    command.envs(plan.environment.iter().cloned());
    child_secret::hand(&mut command, plan.engine.secret.as_deref());
    command.env(variable("member"), member.to_string()).env(variable("run"), &plan.run_id);
    // Each peer gets a process group of its own, so that Ctrl-C reaches only the first peer, which passes it
    // on: a second signal would kill them.
    command.process_group(0).stdin(Stdio::null()).stderr(Stdio::piped());
    Ok(command)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};

    use clap::FromArgMatches;

    use super::*;
    use crate::args::{self, Cli};
    use crate::plan::{self, Plan};

    #[test]
    fn a_peer_is_asked_to_end_before_it_is_killed() {
        let folder = tempfile::tempdir().expect("a folder");
        let put_back = folder.path().join("put-back");
        let script = "trap 'echo done > \"$0\"; exit 1' INT; echo ready; while :; do sleep 0.02; done";
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(&put_back).stdin(Stdio::null()).stdout(Stdio::piped());
        // A shell cannot trap a signal that was ignored when it started, as for a background job of another
        // shell. SAFETY: between fork and exec only the default action of a signal is set.
        unsafe {
            command.pre_exec(|| {
                libc::signal(libc::SIGINT, libc::SIG_DFL);
                Ok(())
            })
        };
        let mut child = command.spawn().expect("a shell");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("the shell is ready");
        let ((_, messages), (_, printed)) = (mpsc::channel(), mpsc::channel());
        let peers = vec![Companion { number: 1, child, messages, printed }];
        let failed = Companions { peers, timeout: Duration::ZERO }.end(Err(Failure::Interrupted));
        assert_eq!(failed, Err(Failure::Interrupted));
        assert!(put_back.exists(), "the peer was killed without time to end");
    }

    fn peer(number: usize, script: &str) -> Companion {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null()).stderr(Stdio::piped());
        Companion::start(number, command).expect("a shell")
    }

    fn ended(outcome: Outcome, scripts: &[&str]) -> Outcome {
        let peers = scripts.iter().enumerate().map(|(i, script)| peer(i + 1, script)).collect();
        Companions { peers, timeout: Duration::from_secs(60) }.end(outcome)
    }

    /// A shell script that prints another failure for people, and then ends with this failure.
    fn failing(kind: &str, why: &str) -> String {
        let message = format!(r#".{{"outcome":{{"Err":{{"{kind}":"{why}"}}}}}}"#);
        format!("echo error: another peer of this run failed: x >&2; echo '{message}'; exit 1")
    }

    #[test]
    fn a_relayed_failure_is_known_by_its_message_and_not_by_its_words() {
        let words = "another peer of this run failed: x";
        let met = ended(Ok(()), &[&failing("Failed", words), &failing("Hearsay", "the cable")]);
        assert_eq!(met, Err(Failure::failed(format!("peer 1 of the incast failed: {words}"))));
        let heard = ended(Ok(()), &[&failing("Hearsay", "the cable")]);
        assert_eq!(
            heard,
            Err(Failure::failed("peer 1 of the incast failed: the cable")),
            "no peer knows the cause"
        );
    }

    #[test]
    fn each_peer_that_failed_is_named() {
        let scripts = [&failing("Failed", "the cable"), "exit 0", "exit 3"];
        let both =
            "peer 1 of the incast failed: the cable\npeer 3 of the incast failed: no message, exit status: 3";
        assert_eq!(ended(Ok(()), &scripts), Err(Failure::failed(both)));
        let own = Err(Failure::failed("a.b refused\nlikely: so"));
        assert_eq!(ended(own, &scripts), Err(Failure::failed(format!("a.b refused\nlikely: so\n{both}"))));
        let heard = Err(Failure::Hearsay("a.b: the cable".to_owned()));
        assert_eq!(ended(heard, &scripts), Err(Failure::failed(both)), "the other peers know the cause");
        let busy = Err(Failure::failed("a.b refused: busy"));
        assert_eq!(ended(busy.clone(), &[&failing("Failed", "a.b refused: busy")]), busy, "once");
        assert_eq!(ended(Ok(()), &["exit 0"]), Ok(()));
    }

    #[test]
    fn a_peer_that_does_not_end_is_named_and_ended() {
        let peers = vec![peer(1, "exec sleep 600")];
        let companions = Companions { peers, timeout: Duration::ZERO };
        let said = companions.end(Ok(())).expect_err("the peer does not end").message();
        assert!(said.contains("peer 1 of the incast failed: the peer's process has not ended"), "{said}");
    }

    /// Regression: a peer that told the other end of its failure for longer than this one waited was not named.
    #[test]
    fn a_peer_that_is_slow_to_report_its_failure_is_named_too() {
        let mut command = Command::new("sh");
        let script = format!("sleep 3; {}", failing("Failed", "the cable"));
        command.args(["-c", &script]).stdin(Stdio::null()).stderr(Stdio::piped());
        // SAFETY: between fork and exec a signal is ignored, and nothing else happens.
        unsafe {
            command.pre_exec(|| {
                libc::signal(libc::SIGINT, libc::SIG_IGN);
                Ok(())
            })
        };
        let peers = vec![Companion::start(2, command).expect("a shell")];
        let heard = Err(Failure::Hearsay("a.b: another peer of this run failed".to_owned()));
        let said = Companions { peers, timeout: Duration::from_secs(60) }.end(heard);
        assert_eq!(said, Err(Failure::failed("peer 2 of the incast failed: the cable")));
    }

    #[test]
    fn further_peers_connect_to_what_was_typed() {
        let line = "ferrywire bench connect localhost:7420 --pattern incast --memory host --peer-memory host";
        let typed = args::command().get_matches_from(line.split_whitespace());
        let plan = plan::plan(Cli::from_arg_matches(&typed).expect("it parses")).expect("a plan");
        let Plan::Connect(plan) = plan else { panic!("no connect") };
        let command = command(&plan, 1).expect("a command");
        assert!(command.get_args().any(|arg| arg == "localhost:7420"), "{command:?}");
    }
}
