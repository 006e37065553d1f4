//! `ferrywire bench` alone: both ends on this host, two processes over loopback, on a free port.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use clap::ValueEnum;

use super::{connect, handed};
use crate::exit::{Failure, Outcome};
use crate::memory::Memory;
use crate::plan::ConnectPlan;

/// Starts the other end as a second process, then connects to it.
pub fn run(mut plan: ConnectPlan) -> Outcome {
    let (mut other_end, address) = start_serve(&plan)?;
    plan.addresses = vec![address];
    let outcome = connect::run(plan);
    // It has served its one peer, or there is nothing left for it to do.
    let _ = other_end.kill();
    let _ = other_end.wait();
    outcome
}

fn start_serve(plan: &ConnectPlan) -> Outcome<(Child, SocketAddr)> {
    let failed = |error: std::io::Error| Failure::failed(format!("cannot start the other end: {error}"));
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command.args(["bench", "serve", "--listen=127.0.0.1:0", "--once", "--child"]);
    if !plan.engine.nics.is_empty() {
        command.arg(format!("--nics={}", plan.engine.nics.join(",")));
    }
    if let Some(gpus) = &plan.engine.gpus {
        let gpus: Vec<String> = gpus.iter().map(u32::to_string).collect();
        command.arg(format!("--gpus={}", gpus.join(",")));
    }
    command.args(plan.engine.threads.map(|n| format!("--threads={n}")));
    command.args(plan.engine.congestion_control.as_ref().map(|name| format!("--congestion-control={name}")));
    let memory = |memory: Memory| if plan.run.fleet { memory.kind().to_owned() } else { memory.to_string() };
    command.args(plan.run.peer_memory.map(|of_peer| format!("--memory={}", memory(of_peer))));
    plugin_options(&mut command, plan);
    // Wherever this end has its own from.
    handed::hand(&mut command, plan.engine.secret.as_deref());
    // In a process group of its own, Ctrl-C reaches this end only, which then ends the other.
    command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped());
    if !plan.verbose {
        command.stderr(Stdio::piped());
    }
    let mut child = command.spawn().map_err(failed)?;
    match read_address(&mut child) {
        Some(address) => {
            read_on(&mut child);
            Ok((child, address))
        }
        None => Err(explain(child)),
    }
}

/// Reads what it says from now on: nobody needs it, and a full pipe would stop the other end.
fn read_on(child: &mut Child) {
    let (output, errors) = (child.stdout.take(), child.stderr.take());
    let pipes = [output.map(OwnedFd::from), errors.map(OwnedFd::from)].into_iter().flatten();
    for mut pipe in pipes.map(File::from) {
        std::thread::spawn(move || io::copy(&mut pipe, &mut io::sink()));
    }
}

/// Both ends of a demo use the same plugin in the same way.
fn plugin_options(command: &mut Command, plan: &ConnectPlan) {
    let Some(plugin) = &plan.engine.plugin else { return };
    command.arg("--plugin").arg(&plugin.path);
    command.arg(format!("--deadline={}", plan.deadline.as_secs_f64()));
    command.arg(format!("--allow-same-host-gpu={}", plugin.allow_same_host_gpu));
    command.args(plan.engine.chunk_bytes.map(|bytes| format!("--chunk={bytes}")));
    command.args(plugin.window.map(|requests| format!("--window={requests}")));
    let unpack = plugin.unpack.and_then(|unpack| Some(unpack.to_possible_value()?.get_name().to_owned()));
    command.args(unpack.map(|name| format!("--unpack={name}")));
}

fn read_address(child: &mut Child) -> Option<SocketAddr> {
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut()?).read_line(&mut line).ok()?;
    line.trim().strip_prefix("listening on ")?.parse().ok()
}

fn explain(mut child: Child) -> Failure {
    let _ = child.kill();
    let Ok(output) = child.wait_with_output() else {
        return Failure::failed("the other end did not start");
    };
    let said = String::from_utf8_lossy(&output.stderr);
    let error = said.lines().find_map(|line| line.strip_prefix("error: "));
    let first = error.or(said.lines().next()).unwrap_or("it said nothing");
    match output.status.code() {
        Some(2) => Failure::Usage(first.to_owned()),
        _ => Failure::failed(format!("the other end did not start: {first}")),
    }
}
