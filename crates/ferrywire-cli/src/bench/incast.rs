//! `--pattern incast`: further processes of this command that join the same run.

use std::io::Read;
use std::process::{Child, Command, Stdio};

use crate::args::variable;
use crate::exit::{Failure, Outcome};
use crate::plan::ConnectPlan;

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

    fn kill(&mut self) {
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
    command.env(variable("member"), member.to_string()).env(variable("run"), &plan.run_id);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    Ok(command)
}
