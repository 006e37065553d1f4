//! `--pattern incast`: further processes of this command that join the same run.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::handed;
use crate::args::variable;
use crate::exit::{Failure, Outcome};
use crate::plan::ConnectPlan;
use crate::sys;

/// A peer that is asked to end has so long for it.
const INTERRUPT_GRACE: Duration = Duration::from_secs(5);
/// How often it is looked whether it has.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// The other peers of the run, each a process of its own.
#[derive(Debug)]
pub struct Companions(Vec<Child>);

impl Companions {
    /// Starts those that are not this process.
    pub fn start(plan: &ConnectPlan) -> Outcome<Companions> {
        let mut companions = Companions(Vec::new());
        // Endpoints of this process need none.
        if plan.member > 0 || plan.engine.gpus.is_some() {
            return Ok(companions);
        }
        for member in 1..plan.run.peers {
            let spawned = command(plan, member).and_then(|mut command| command.spawn());
            match spawned {
                Ok(child) => companions.0.push(child),
                Err(error) => {
                    companions.kill();
                    return Err(Failure::failed(format!(
                        "cannot start peer {member} of the incast: {error}"
                    )));
                }
            }
        }
        Ok(companions)
    }

    /// Waits for the others, or ends them when this one has failed.
    pub fn end(mut self, outcome: Outcome) -> Outcome {
        if outcome.is_err() {
            self.kill();
            return outcome;
        }
        for (i, child) in self.0.iter_mut().enumerate() {
            let mut said = String::new();
            if let Some(pipe) = child.stderr.as_mut() {
                let _ = pipe.read_to_string(&mut said);
            }
            let ended_well = child.wait().is_ok_and(|status| status.success());
            if !ended_well {
                let first =
                    said.lines().next().unwrap_or("no message").trim_start_matches("error: ").to_owned();
                self.kill();
                return Err(Failure::failed(format!("peer {} of the incast: {first}", i + 1)));
            }
        }
        Ok(())
    }

    /// Ends the others, which first may put back what they have changed at NICs.
    fn kill(&mut self) {
        for child in &mut self.0 {
            if matches!(child.try_wait(), Ok(None)) {
                sys::interrupt(child.id());
            }
        }
        let until = Instant::now() + INTERRUPT_GRACE;
        let runs = |child: &mut Child| matches!(child.try_wait(), Ok(None));
        while self.0.iter_mut().any(runs) && Instant::now() < until {
            thread::sleep(LOOK_INTERVAL);
        }
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn command(plan: &ConnectPlan, member: usize) -> std::io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    let address = plan.addresses.first().map(ToString::to_string).unwrap_or_default();
    command.args(["bench", "connect", &address]);
    for output in ["json", "csv", "config"] {
        command.env_remove(variable(output));
    }
    command.envs(plan.environment.iter().cloned());
    handed::hand(&mut command, plan.engine.secret.as_deref());
    command.env(variable("member"), member.to_string()).env(variable("run"), &plan.run_id);
    // In process groups of their own, Ctrl-C reaches the first peer only, which passes it on; a second one would kill them.
    command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    Ok(command)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};

    use super::*;

    #[test]
    fn a_peer_is_asked_to_end_before_it_is_killed() {
        let folder = tempfile::tempdir().expect("a folder");
        let put_back = folder.path().join("put-back");
        let script = "trap 'echo done > \"$0\"; exit 1' INT; echo ready; while :; do sleep 0.02; done";
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(&put_back).stdin(Stdio::null()).stdout(Stdio::piped());
        // A shell cannot trap what was ignored before, as in what another shell runs in the background.
        // SAFETY: sets a signal's default, and nothing else, between fork and exec.
        unsafe {
            command.pre_exec(|| {
                libc::signal(libc::SIGINT, libc::SIG_DFL);
                Ok(())
            })
        };
        let mut child = command.spawn().expect("a shell");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("it is ready");
        let failed = Companions(vec![child]).end(Err(Failure::Interrupted));
        assert_eq!(failed, Err(Failure::Interrupted));
        assert!(put_back.exists(), "it was killed at once");
    }
}
