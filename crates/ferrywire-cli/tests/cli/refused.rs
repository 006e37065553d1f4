//! Peers that cannot have a run: each prints the reason in one line, as does the serving end, which takes the next.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::process::Stdio;
use std::time::Duration;

use ferrywire::{Endpoint, Peer};

use crate::common::{
    Serve, TIMEOUT_DEFAULT, end_within, ferrywire, first_error, json, results, run_within, text,
};

/// Longest wait for what must come.
const LIMIT: Duration = Duration::from_secs(60);
const FLEET: &str = "--gpus 0-1 --memory sim --peer-memory sim --sizes 4K";

/// A peer that speaks by hand.
fn stranger(serve: &Serve) -> (Endpoint, Peer) {
    stranger_at(serve.address.parse().expect("an address"))
}

/// A peer that speaks by hand to this address.
pub fn stranger_at(address: SocketAddr) -> (Endpoint, Peer) {
    let endpoint = Endpoint::builder().build().expect("an endpoint");
    let peer = endpoint.connect(address, LIMIT).expect("a peer");
    (endpoint, peer)
}

fn say(peer: &Peer, message: &str) {
    let parts: Vec<&[u8]> = message.as_bytes().chunks(4096).collect();
    let (last, first) = parts.split_last().expect("a message");
    let said = first.iter().map(|part| (b'+', part)).chain([(b'.', last)]);
    let said = said.map(|(kind, part)| peer.notify(&[&[kind], *part].concat()).expect("it goes out"));
    for part in said {
        part.wait(LIMIT).expect("delivered");
    }
}

pub fn heard(peer: &Peer) -> String {
    String::from_utf8_lossy(&peer.wait_notification(LIMIT).expect("an answer")).into_owned()
}

fn still_serves(serve: &Serve) {
    assert_eq!(results(&serve.connect(&format!("{FLEET} --iters 3 --json -"))).len(), 3);
}

/// Another version's greeting may be made of other parts.
#[test]
fn another_version_is_reported_at_both_ends() {
    let mut serve = Serve::start("--gpus 0-1 --memory sim");
    let (_endpoint, peer) = stranger(&serve);
    say(&peer, r#"{"kind":"hello","version":99,"what":"we do not know"}"#);
    let expected = "the other 99: install the same ferrywire";
    let answer = heard(&peer);
    assert!(answer.contains("refused") && answer.contains(expected), "{answer}");
    let reported = serve.next_error();
    assert!(reported.contains("refused a run of 127.0.0.1:") && reported.contains(expected), "{reported}");
    // Of the engine's protocol: magic, version, kind.
    let mut socket = TcpStream::connect(&serve.address).expect("it listens");
    socket.write_all(b"FERRYWR\0\x63\0\x01\0\0\0\0\0").expect("sent");
    still_serves(&serve);
    let rest = serve.stop();
    assert!(rest.contains("version 99"), "{rest}");
}

/// A greeting as a peer sends it.
fn hello(timeout_s: u32) -> String {
    let run = format!(
        r#"{{"op":"write","pattern":"unidir","memory":"host","peer_memory":"host","sizes":[8],"peers":1,"iters":1,
        "verify":"all","timeout_s":{timeout_s},"seed":1}}"#
    );
    let version = 11;
    format!(r#"{{"kind":"hello","version":{version},"run_id":"r","member":0,"boot_id":"","run":{run}}}"#)
}

/// The parts of a message that never ends; stops where the other end does not listen on.
pub fn without_end(peer: &Peer, bytes: usize) {
    let part = [b'+'; 4097];
    for _ in 0..bytes / 4096 + 1 {
        if peer.notify(&part).is_err() {
            break;
        }
    }
}

/// Any host can connect, and many at once: each may make this end keep little.
#[test]
fn a_message_without_end_is_refused() {
    let mut serve = Serve::start("--memory host --timeout 20");
    let (_endpoint, peer) = stranger(&serve);
    without_end(&peer, 64 << 10);
    let answer = heard(&peer);
    assert!(answer.contains("refused") && answer.contains("a message of more than 64 KiB"), "{answer}");
    assert!(serve.next_error().contains("a message of more than 64 KiB"));
    let (_endpoint, peer) = stranger(&serve);
    peer.notify(b"+").expect("it goes out");
    let answer = heard(&peer);
    assert!(answer.contains("an empty part of a message"), "{answer}");
    assert!(serve.next_error().contains("an empty part of a message"));
    let (_endpoint, peer) = stranger(&serve);
    say(&peer, &hello(20));
    assert!(heard(&peer).contains("welcome"));
    without_end(&peer, 2 << 20);
    let answer = heard(&peer);
    assert!(answer.contains("failed") && answer.contains("a message of more than 2048 KiB"), "{answer}");
    assert!(serve.next_error().contains("a message of more than 2048 KiB"));
}

/// A long text of control characters that steer a terminal, as JSON may write them.
fn steering() -> String {
    format!("stop \\u001b[2J\u{9b}31m\u{202e}{}", "x".repeat(20_000))
}

fn harmless(said: &str) {
    assert!(said.contains("stop ") && said.contains("xxx"), "{said}");
    assert!(!said.contains(['\u{1b}', '\u{9b}', '\u{202e}']) && said.len() < 10_000, "{said:?}");
}

#[test]
fn the_words_of_a_peer_do_not_steer_a_terminal() {
    let mut serve = Serve::start("--memory host");
    let (_endpoint, peer) = stranger(&serve);
    say(&peer, &format!(r#"{{"kind":"failed","why":"{}"}}"#, steering()));
    harmless(&serve.next_error());
    let there = Endpoint::builder().listen(([127, 0, 0, 1], 0).into()).build().expect("an endpoint");
    let address = there.listen_addresses()[0];
    let mut command = ferrywire(&format!("bench connect {address} --memory host --sizes 4K --json -"));
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let peer = there.accept(LIMIT).expect("it comes");
    assert!(heard(&peer).contains("hello"));
    say(&peer, &format!(r#"{{"kind":"refused","why":"{}"}}"#, steering()));
    let output = end_within(TIMEOUT_DEFAULT, child);
    assert_eq!(output.status.code(), Some(1));
    harmless(&text(&output.stderr));
    harmless(json(&output)["error"].as_str().expect("an error"));
}

/// A peer that asked for a run of several GPUs and does not connect all of them has the timeout that it named.
#[test]
fn a_peer_that_asks_and_never_greets_is_sent_away_in_its_own_time() {
    let mut serve = Serve::start("--gpus 0-1 --memory sim --timeout 600");
    let (_endpoint, peer) = stranger(&serve);
    say(&peer, r#"{"kind":"ask","timeout_s":1.0}"#);
    assert!(heard(&peer).contains("here"));
    // Another of the same run that has nothing to say either.
    let (_other_endpoint, other) = stranger(&serve);
    for (peer, name) in [(&other, "the other"), (&peer, "the one that asked")] {
        let answer = heard(peer);
        assert!(answer.contains("refused") && answer.contains("no progress for"), "{name}: {answer}");
        let reported = serve.next_error_within(Duration::from_secs(1));
        assert!(
            reported.contains("refused a run of 127.0.0.1:") && reported.contains("no progress for"),
            "{reported}"
        );
    }
    still_serves(&serve);
}

#[test]
fn a_run_with_fewer_peers_than_it_says_ends_by_name_at_both_ends() {
    let mut serve = Serve::start("--memory host");
    let args = "--memory host --peer-memory host --sizes 4K --iters 3 --timeout 2";
    let args = format!("--pattern incast --peers 3 --member 2 --run 0123456789abcdef {args}");
    let alone = serve.connect_within(Duration::from_secs(2), &args);
    assert_eq!(alone.status.code(), Some(1));
    let said = first_error(&alone);
    assert!(said.contains("only 1 of 3 peers of this run have joined"), "{said}");
    let reported = serve.next_error_within(Duration::from_secs(2));
    assert!(reported.contains("only 1 of 3 peers of this run have joined"), "{reported}");
}

/// The second of two runs is refused with the address of the first, and costs the first nothing; the serving end says
/// so too, once for all peers of that run.
#[test]
fn a_second_run_of_several_gpus_reports_that_the_first_has_the_port() {
    // On a machine that is slow enough the first is over before the second has begun, or begins during the second. What
    // is refused then is reported too, so each attempt has a server of its own.
    let attempt = |seconds| {
        let serve = Serve::start("--gpus 0-1 --memory sim");
        beside_another_run(&serve, seconds).map(|refused| (serve, refused))
    };
    let (mut serve, refused) = [3, 20, 60].into_iter().find_map(attempt).expect("one run beside another");
    assert!(refused.contains("busy with a run of 127.0.0.1:"), "{refused}");
    let reported = serve.next_error();
    assert!(
        reported.contains("refused a run of 127.0.0.1:")
            && reported.contains("busy with a run of 127.0.0.1:"),
        "{reported}"
    );
    let rest = serve.stop();
    assert!(!rest.contains("busy"), "the other peer of the same run is no news: {rest}");
}

/// The refusal of a run that starts during another one, which then ends verified; `None` if no run started in time.
fn beside_another_run(serve: &Serve, seconds: u64) -> Option<String> {
    let limit = Duration::from_secs(seconds) + TIMEOUT_DEFAULT;
    let args = format!("bench connect {} {FLEET} --seconds {seconds} --json -", serve.address);
    let mut first =
        ferrywire(&args).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
    let mut refused = None;
    while refused.is_none() && first.try_wait().expect("it can be waited for").is_none() {
        // Before the first has come in, the second has its way, and the first waits for it.
        let output = serve.connect_within(limit, &format!("{FLEET} --iters 3"));
        refused = (output.status.code() != Some(0)).then(|| first_error(&output));
    }
    let output = end_within(limit, first);
    let rows = match text(&output.stderr) {
        // The first run started during the second.
        said if said.contains("busy with a run of") => return None,
        _ => results(&output),
    };
    assert!(rows.len() == 3 && rows.iter().all(|row| row["verified"] == true), "{rows:?}");
    refused
}

#[test]
fn a_peer_with_another_runs_secret_is_reported_at_both_ends() {
    let own = [("FERRYWIRE_SECRET", "the secret of this run")];
    let mut serve = Serve::start_with("--listen 127.0.0.1:0 --gpus 0-1 --memory sim", &own);
    let mut command = ferrywire(&format!("bench connect {} {FLEET} --iters 3", serve.address));
    let refused = run_within(TIMEOUT_DEFAULT, command.env("FERRYWIRE_SECRET", "another run's secret"));
    assert_eq!(refused.status.code(), Some(1));
    assert!(first_error(&refused).contains("wrong secret"), "{}", first_error(&refused));
    let lines = serve.collect_errors();
    let mut command = ferrywire(&format!("bench connect {} {FLEET} --iters 3 --json -", serve.address));
    results(&command.envs(own).output().expect("it runs"));
    let lines = lines.lock().expect("whole lines").clone();
    assert_eq!(lines.iter().filter(|line| line.contains("wrong secret")).count(), 1, "{lines:?}");
}

/// Where the ports behind the first are other programs', nothing starts, and the first is free again.
#[test]
fn a_fleet_without_all_its_ports_leaves_the_others_alone() {
    let taken = Serve::start("--gpus 0-1 --memory host");
    let mut second = ferrywire(&format!("bench serve --listen {} --gpus 0-1 --memory host", taken.address));
    let second = run_within(TIMEOUT_DEFAULT, &mut second);
    assert_eq!(second.status.code(), Some(1));
    let said = first_error(&second);
    assert!(said.contains("starting the endpoint of GPU") && said.contains("in use"), "{said}");
    let args = "--gpus 0-1 --memory host --peer-memory host --sizes 4K --iters 3 --json -";
    assert_eq!(results(&taken.connect(args)).len(), 3);
}

/// Regression: the reason was loopback, which nothing had named.
#[test]
fn devmem_without_a_nic_that_is_up_is_refused_with_the_reason() {
    // No host has an address of this network, which is kept for examples.
    let mut serve = ferrywire("bench serve --listen 192.0.2.1:7420 --transport devmem --memory host");
    let said = first_error(&run_within(TIMEOUT_DEFAULT, &mut serve));
    assert!(said.starts_with("error: devmem: no NIC that the endpoint may use is up"), "{said}");
}
