//! `ferrywire bench` alone: both ends on this host, two processes over loopback, on a free port.

use std::io::{self, BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;

use super::link::SLICE;
use super::{child_secret, connect};
use crate::exit::{Failure, Outcome};
use crate::memory::Memory;
use crate::plan::ConnectPlan;
use crate::sys;
use crate::units::rounded;

/// So much of what the other end says is kept, in case it does not start.
const SAID_BYTES_MAX: u64 = 64 << 10;
/// When it has ended, its pipe is read for so long, in case a process of its own holds it.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Longest time for the other end to listen: it opens GPUs, and may load a plugin.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// Starts the other end as a second process, then connects to it.
pub fn run(plan: ConnectPlan) -> Outcome {
    let has_plugin = plan.engine.plugin.is_some();
    let start = |plan: &mut ConnectPlan| {
        let (other_end, address) = start_serve(plan)?;
        plan.addresses = vec![address];
        Ok(other_end)
    };
    connect::run_after(plan, start, |other_end, outcome| match outcome {
        // A plugin that ends its process does so at either end, and the other one sees a lost peer.
        Err(Failure::Failed(text)) if has_plugin => Err(Failure::Failed(other_end.added_to(text))),
        outcome => outcome,
    })
}

/// The other end, and what it has said on standard error once it has ended, unless that is this end's too. When this
/// one goes, it has served its one peer, or there is nothing left for it to do.
struct OtherEnd(Child, Option<Receiver<Vec<u8>>>);

impl OtherEnd {
    /// An error of this end, with the other end's own where it has one.
    fn added_to(mut self, text: String) -> String {
        let until = Instant::now() + LAST_WORDS;
        while matches!(self.0.try_wait(), Ok(None)) && Instant::now() < until && !sys::interrupted() {
            thread::sleep(SLICE);
        }
        let _ = self.0.kill();
        let said = self.1.take().and_then(|said| said.recv_timeout(LAST_WORDS).ok()).unwrap_or_default();
        match String::from_utf8_lossy(&said).lines().find_map(|line| line.strip_prefix("error: ")) {
            Some(error) => format!("{text}; the other end: {error}"),
            None => text,
        }
    }
}

impl Drop for OtherEnd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start_serve(plan: &ConnectPlan) -> Outcome<(OtherEnd, SocketAddr)> {
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
    let memory =
        |memory: Memory| if plan.run.multi_gpu { memory.kind().to_owned() } else { memory.to_string() };
    command.args(plan.run.peer_memory.map(|of_peer| format!("--memory={}", memory(of_peer))));
    plugin_options(&mut command, plan);
    // Wherever this end has its own from.
    child_secret::hand(&mut command, plan.engine.secret.as_deref());
    // In a process group of its own, Ctrl-C reaches this end only, which then ends the other.
    command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped());
    if !plan.verbose {
        command.stderr(Stdio::piped());
    }
    let mut other_end = OtherEnd(command.spawn().map_err(failed)?, None);
    let (child, mut errors) = (&mut other_end.0, Vec::new());
    // Both pipes are read to their end: a full one would stop the other end.
    other_end.1 = child.stderr.take().map(said);
    let Some(output) = child.stdout.take() else {
        return Err(Failure::failed("the other end did not start"));
    };
    let line = first_line(output, START_TIMEOUT)?;
    match line.trim().strip_prefix("listening on ").and_then(|address| address.parse().ok()) {
        Some(address) => Ok((other_end, address)),
        None => {
            let _ = child.kill();
            let status = child.wait().map_err(failed)?;
            if let Some(said) = other_end.1.take() {
                errors = said.recv_timeout(LAST_WORDS).unwrap_or_default();
            }
            Err(explain(status, &String::from_utf8_lossy(&errors)))
        }
    }
}

/// What a pipe gives until it ends, and no more of it than a message may have.
fn said(mut pipe: ChildStderr) -> Receiver<Vec<u8>> {
    let (done, said) = mpsc::channel();
    thread::spawn(move || {
        let mut first = Vec::new();
        let _ = (&mut pipe).take(SAID_BYTES_MAX).read_to_end(&mut first);
        let _ = io::copy(&mut pipe, &mut io::sink());
        let _ = done.send(first);
    });
    said
}

/// The first line of a pipe, whose rest nobody needs. Empty if it ends without one; Ctrl-C ends the wait.
fn first_line(pipe: impl Read + Send + 'static, limit: Duration) -> Outcome<String> {
    let (done, line) = mpsc::channel();
    thread::spawn(move || {
        let (mut pipe, mut line) = (BufReader::new(pipe), String::new());
        let _ = pipe.read_line(&mut line);
        let _ = done.send(line);
        let _ = io::copy(&mut pipe, &mut io::sink());
    });
    let until = Instant::now() + limit;
    loop {
        match line.recv_timeout(SLICE) {
            Ok(line) => return Ok(line),
            Err(_) if sys::interrupted() => return Err(Failure::Interrupted),
            Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
            Err(_) => {
                return Err(Failure::failed(format!(
                    "the other end does not listen after {:?}",
                    rounded(limit)
                )));
            }
        }
    }
}

/// Both ends of loopback mode use the same plugin in the same way.
fn plugin_options(command: &mut Command, plan: &ConnectPlan) {
    let Some(plugin) = &plan.engine.plugin else { return };
    command.arg("--plugin").arg(&plugin.path);
    command.arg(format!("--timeout={}", plan.timeout.as_secs_f64()));
    command.arg(format!("--allow-same-host-gpu={}", plugin.allow_same_host_gpu));
    command.args(plan.engine.chunk_bytes.map(|bytes| format!("--chunk={bytes}")));
    command.args(plugin.window.map(|requests| format!("--window={requests}")));
    let unpack = plugin.unpack.and_then(|unpack| Some(unpack.to_possible_value()?.get_name().to_owned()));
    command.args(unpack.map(|name| format!("--unpack={name}")));
}

fn explain(status: ExitStatus, said: &str) -> Failure {
    let error = said.lines().find_map(|line| line.strip_prefix("error: "));
    let first = error.or(said.lines().next()).unwrap_or("it said nothing");
    match status.code() {
        Some(2) => Failure::Usage(first.to_owned()),
        _ => Failure::failed(format!("the other end did not start: {first}")),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn an_other_end_that_says_nothing_is_not_waited_for_without_end() {
        let (silent, held) = io::pipe().expect("a pipe");
        let said = first_line(silent, Duration::from_millis(1)).expect_err("nothing was said").message();
        assert!(said.contains("does not listen"), "{said}");
        drop(held);
        let (speaks, mut pipe) = io::pipe().expect("a pipe");
        pipe.write_all(b"listening\n").expect("written");
        assert_eq!(first_line(speaks, Duration::from_secs(60)), Ok("listening\n".to_owned()));
    }
}
