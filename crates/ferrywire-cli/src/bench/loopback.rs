//! `ferrywire bench` alone: both ends on this host, two processes over loopback, on a free port.

use std::io::{self, Read};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use ferrywire::Encryption;

use super::isolated::message::Message;
use super::link::{CLOSE_TIMEOUT, SLICE};
use super::{check_metrics, child_secret, connect, parent};
use crate::args;
use crate::exit::{self, Failure, Outcome};
use crate::memory::{Memory, is_mps_running};
use crate::plan::ConnectPlan;
use crate::plugin::KILLED_MAX;
use crate::units::rounded;
use crate::{sys, tool};

/// Most bytes that are kept of the other end's standard error, for the error if that end does not start.
const SAID_BYTES_MAX: u64 = 64 << 10;
/// How long the pipe of the other end is read after that process has ended, in case a child of it holds the pipe.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Longest time for the other end to end by itself after a run, with a trace: its last message, the close of its endpoint, and
/// the end of the trace's file.
const TRACE_END_TIMEOUT: Duration = Duration::from_secs(2 * CLOSE_TIMEOUT.as_secs() + 5 + 3);
/// Longest time for the other end to listen: it opens GPUs, and may load a plugin.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// Starts the other end as a second process, then connects to it.
pub fn run(plan: ConnectPlan) -> Outcome {
    let has_plugin = plan.engine.plugin.is_some();
    let start = |plan: &mut ConnectPlan| {
        let [here, there] = [Some(plan.run.memory), plan.run.peer_memory];
        note_of_turns(here, there, is_mps_running()).iter().for_each(|note| exit::note(note));
        check_metrics(plan.engine.metrics.as_deref())?;
        let (other_end, address) = start_serve(plan)?;
        plan.addresses = vec![address];
        Ok(other_end)
    };
    connect::run_after(plan, start, |other_end, outcome| match outcome {
        Ok(()) => {
            other_end.finish_trace();
            Ok(())
        }
        // A plugin may end the process of either end, and the remaining end sees a lost peer.
        outcome @ Err(Failure::Usage(_) | Failure::Interrupted) => outcome,
        Err(failure) if has_plugin => Err(failure.map_message(|text| other_end.added_to(text))),
        outcome => outcome,
    })
}

/// A GPU serves two processes in turns of milliseconds, unless a server joins their work: one round trip then takes several
/// times as long as between two GPUs.
fn note_of_turns(here: Option<Memory>, there: Option<Memory>, mps: bool) -> Option<String> {
    let gpu = here.filter(|memory| matches!(memory, Memory::Cuda(_)) && here == there && !mps)?;
    Some(format!(
        "note: the processes of both ends use {gpu} in turns, which costs rate and latency; an MPS server lets them use \
         it at the same time: nvidia-cuda-mps-control -d"
    ))
}

/// The process of the other end. Dropping this value ends that process, which serves this one peer only.
struct OtherEnd {
    child: Child,
    /// Messages of the other end.
    messages: Receiver<Message>,
    /// The other end's standard error, once that process has ended; `None` if both ends share standard error.
    printed: Option<Receiver<Vec<u8>>>,
}

impl OtherEnd {
    fn start(mut command: Command) -> io::Result<OtherEnd> {
        parent::ask(&mut command);
        let mut child = command.spawn()?;
        let messages = child.stdout.take().map_or_else(|| mpsc::channel().1, parent::messages);
        let printed = child.stderr.take().map(read_all);
        Ok(OtherEnd { child, messages, printed })
    }

    /// Waits for the address on which the other end listens.
    fn listening(&mut self, limit: Duration) -> Outcome<SocketAddr> {
        let until = Instant::now() + limit;
        loop {
            match self.messages.recv_timeout(SLICE) {
                Ok(Message::Listening { addresses, .. }) if !addresses.is_empty() => return Ok(addresses[0]),
                Ok(Message::Outcome(Err(failure))) => return Err(not_started(&failure)),
                Ok(_) => {}
                Err(_) if sys::interrupted() => return Err(Failure::Interrupted),
                Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
                Err(RecvTimeoutError::Timeout) => {
                    let limit = rounded(limit);
                    return Err(Failure::failed(format!(
                        "the serving process has not started to listen within {limit:?}"
                    )));
                }
                Err(RecvTimeoutError::Disconnected) => return Err(self.ended_silently()),
            }
        }
    }

    /// The failure if the other end has ended without a message, as after a kill.
    fn ended_silently(&mut self) -> Failure {
        let ended = tool::kill(&mut self.child, KILLED_MAX);
        let is_usage = ended.is_some_and(|status| status.code() == Some(2));
        let status = ended.map_or_else(|| "it does not end".to_owned(), |status| status.to_string());
        let printed = self.printed.take().and_then(|printed| printed.recv_timeout(LAST_WORDS).ok());
        let printed = String::from_utf8_lossy(&printed.unwrap_or_default()).into_owned();
        let first = printed.lines().next().unwrap_or("it printed no error");
        let why = format!("the serving process did not start: {first} ({status})");
        if is_usage { Failure::Usage(why) } else { Failure::Failed(why) }
    }

    /// Lets the other end, which has served its peer, end by itself: a process that is killed leaves its trace without an
    /// end.
    fn finish_trace(mut self) {
        if std::env::var_os("FERRYWIRE_TRACE").is_some() {
            self.await_end(TRACE_END_TIMEOUT);
        }
    }

    fn await_end(&mut self, limit: Duration) {
        let until = Instant::now() + limit;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < until && !sys::interrupted() {
            thread::sleep(SLICE);
        }
    }

    /// Adds the error of the other end, if it reported one, to an error of this end.
    fn added_to(mut self, text: String) -> String {
        self.await_end(LAST_WORDS);
        let _ = self.child.kill();
        while let Ok(message) = self.messages.recv_timeout(LAST_WORDS) {
            if let Message::Outcome(Err(failure)) = message {
                return format!("{text}; the other end: {}", failure.first_line());
            }
        }
        text
    }
}

impl Drop for OtherEnd {
    fn drop(&mut self) {
        tool::kill_or_note(&mut self.child, KILLED_MAX);
    }
}

fn not_started(failure: &Failure) -> Failure {
    match failure {
        Failure::Usage(_) => Failure::Usage(failure.first_line()),
        Failure::Interrupted => Failure::Interrupted,
        _ => Failure::failed(format!("the serving process did not start: {}", failure.first_line())),
    }
}

fn start_serve(plan: &ConnectPlan) -> Outcome<(OtherEnd, SocketAddr)> {
    let failed =
        |error: std::io::Error| Failure::failed(format!("cannot start the serving process: {error}"));
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    // A variable may say otherwise than a flag of this process, whose decisions the other end gets as flags.
    for variable in args::bench_variables() {
        command.env_remove(variable);
    }
    command.args(["bench", "serve", "--listen=127.0.0.1:0", "--once", "--child"]);
    command.arg(format!("--timeout={}", plan.timeout.as_secs_f64()));
    command.arg(format!("--encrypt={}", encrypt(plan.engine.encryption)));
    if let Some(devmem) = &plan.engine.devmem {
        command.arg(format!("--transport={}", devmem.asked_for()));
        command.arg(format!("--allow-nic-setup={}", devmem.allow_nic_setup));
    }
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
    let metrics = plan.engine.metrics.as_deref().and_then(|address| ferrywire_metrics::next_to(address).ok());
    command.args(metrics.map(|address| format!("--metrics={address}")));
    // The secret may come from a file that cannot be read twice.
    child_secret::hand(&mut command, plan.engine.secret.as_deref());
    // The other end gets a process group of its own, so that Ctrl-C reaches this end only, which then ends
    // the other.
    command.process_group(0).stdin(Stdio::null());
    if !plan.verbose {
        command.stderr(Stdio::piped());
    }
    let mut other_end = OtherEnd::start(command).map_err(failed)?;
    let address = other_end.listening(START_TIMEOUT)?;
    Ok((other_end, address))
}

/// Reads a pipe to its end, because a full pipe would stop the other end; keeps the first [`SAID_BYTES_MAX`] bytes.
fn read_all(mut pipe: ChildStderr) -> Receiver<Vec<u8>> {
    let (done, said) = mpsc::channel();
    thread::spawn(move || {
        let mut first = Vec::new();
        let _ = (&mut pipe).take(SAID_BYTES_MAX).read_to_end(&mut first);
        let _ = io::copy(&mut pipe, &mut io::sink());
        let _ = done.send(first);
    });
    said
}

/// The value of `--encrypt`.
fn encrypt(encryption: Encryption) -> &'static str {
    match encryption {
        Encryption::Off => "off",
        Encryption::Preferred => "preferred",
        Encryption::Required => "required",
    }
}

/// Adds the plugin options: both ends of loopback mode use the same plugin in the same way.
fn plugin_options(command: &mut Command, plan: &ConnectPlan) {
    let Some(plugin) = &plan.engine.plugin else { return };
    command.arg("--plugin").arg(&plugin.path);
    let nics = plan.engine.map.nics.iter().map(|(gpu, nics)| format!("{gpu}={}", nics.join(",")));
    let map = nics.collect::<Vec<_>>().join(",");
    command.args(Some(map).filter(|map| !map.is_empty()).map(|map| format!("--gpu-nics={map}")));
    command.arg(format!("--allow-same-host-gpu={}", plugin.allow_same_host_gpu));
    command.args(plan.engine.chunk_bytes.map(|bytes| format!("--chunk={bytes}")));
    command.args(plugin.window.map(|requests| format!("--window={requests}")));
    let unpack = plugin.unpack.and_then(|unpack| Some(unpack.to_possible_value()?.get_name().to_owned()));
    command.args(unpack.map(|name| format!("--unpack={name}")));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_processes_on_one_gpu_are_noted_unless_a_server_joins_them() {
        let gpu = |index| Some(Memory::Cuda(index));
        let note = note_of_turns(gpu(1), gpu(1), false).expect("they take turns");
        assert!(note.contains("cuda:1 in turns"), "{note}");
        assert_eq!(note_of_turns(gpu(1), gpu(1), true), None);
        for other in [gpu(0), Some(Memory::Host), None] {
            assert_eq!(note_of_turns(gpu(1), other, false), None);
        }
        assert_eq!(note_of_turns(Some(Memory::Host), Some(Memory::Host), false), None);
    }

    /// A shell script in place of the other end, whose standard output holds the messages.
    fn other_end(script: &str) -> OtherEnd {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null()).stderr(Stdio::piped());
        OtherEnd::start(command).expect("a shell")
    }

    #[test]
    fn an_other_end_that_says_nothing_is_not_waited_for_without_end() {
        let said = other_end("exec sleep 600").listening(Duration::from_millis(1)).expect_err("it is silent");
        assert!(said.message().contains("has not started to listen"), "{said:?}");
    }

    #[test]
    fn output_for_users_does_not_decide_the_outcome() {
        let listens = r#".{"listening":{"addresses":["127.0.0.1:7"],"reachable":[]}}"#;
        let words = "echo listening on 127.0.0.1:1; echo error: no such flag >&2";
        let listening = |end: &str| other_end(&format!("{words}; {end}")).listening(Duration::from_secs(60));
        assert_eq!(listening(&format!("echo '{listens}'; exec sleep 600")), Ok(([127, 0, 0, 1], 7).into()));
        let usage = r#".{"outcome":{"Err":{"Usage":"--nics a: no such NIC"}}}"#;
        assert_eq!(
            listening(&format!("echo '{usage}'; exit 1")),
            Err(Failure::Usage("--nics a: no such NIC".into()))
        );
        let silent = listening("exit 1");
        assert!(matches!(&silent, Err(Failure::Failed(why)) if why.contains("exit status: 1")), "{silent:?}");
        // Exit status 2 means bad usage: the parser of flags ends the process before it can send messages.
        let usage = listening("exit 2");
        assert!(matches!(&usage, Err(Failure::Usage(why)) if why.contains("no such flag")), "{usage:?}");
    }
}
