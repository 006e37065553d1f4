//! Hosts without the secret: noise, other protocols, replayed connections, and connections that send too little.

use crate::LIMIT;
use crate::peers::{CLAIM_BYTES, PREAMBLE_BYTES, Recordings};
use crate::process::open_descriptors;
use ferrywire::limits;
use rand::{Rng, RngCore, SeedableRng, rngs::StdRng};
use rustix::process::{Resource, getrlimit, setrlimit};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

const IDLE_CONNECTIONS: usize = 2000;

/// Says something and listens until the victim hangs up, or for as long as a stranger may take.
pub fn say(address: SocketAddr, bytes: &[u8]) -> Option<Vec<u8>> {
    let mut stream = TcpStream::connect(address).ok()?;
    let _ = stream.write_all(bytes);
    hear(&mut stream)
}

/// Listens until the victim hangs up.
pub fn hear(stream: &mut TcpStream) -> Option<Vec<u8>> {
    stream.set_read_timeout(Some(LIMIT)).ok()?;
    let mut heard = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return Some(heard),
            Ok(count) => heard.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return Some(heard),
            // This process was stopped for a while.
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => panic!("a stranger was not hung up on: {error}"),
        }
        assert!(heard.len() <= limits::HANDSHAKE_BYTES_MAX, "a stranger was told too much");
    }
}

/// The refusal at the end of what was heard: its code and text.
pub fn refusal(heard: &[u8]) -> Option<(u8, String)> {
    let start = heard.windows(2).rposition(|mark| mark == [0xff, 0xff])?;
    let [_, _, code, low, high, text @ ..] = &heard[start..] else { return None };
    let whole = text.len() == usize::from(u16::from_le_bytes([*low, *high]));
    whole.then(|| (*code, String::from_utf8_lossy(text).into_owned()))
}

pub const HTTP: &[u8] = b"GET / HTTP/1.1\r\nHost: gpu1\r\nUser-Agent: curl/8.5.0\r\n\r\n";
pub const SSH: &[u8] = b"SSH-2.0-OpenSSH_9.6p1 Ubuntu-3ubuntu13\r\n";
const TLS: &[u8] = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\x41\x41\x41\x41\x41\x41\x41\x41\x41\x41";

fn random_bytes(address: SocketAddr, rng: &mut StdRng, _: &Recordings) {
    let mut bytes = vec![0; rng.random_range(17..5000)];
    rng.fill_bytes(&mut bytes);
    assert_eq!(say(address, &bytes).unwrap_or_default(), b"", "noise was answered");
}

fn other_protocols(address: SocketAddr, rng: &mut StdRng, _: &Recordings) {
    let bytes = [HTTP, SSH, TLS][rng.random_range(0..3)];
    assert_eq!(say(address, bytes).unwrap_or_default(), b"", "another protocol was answered");
}

/// A recording that was cut short and then hung up on, or altered.
fn damaged_recordings(address: SocketAddr, rng: &mut StdRng, recordings: &Recordings) {
    let mut bytes = [&recordings.control, &recordings.data][rng.random_range(0..2)].clone();
    let at = rng.random_range(0..bytes.len().min(300));
    if rng.random() {
        bytes[at] ^= 1 << rng.random_range(0..8);
        say(address, &bytes);
    } else if let Ok(mut stream) = TcpStream::connect(address) {
        let _ = stream.write_all(&bytes[..at]);
    }
}

/// Everything again as it was: the answer ends in a refusal.
fn replays(address: SocketAddr, rng: &mut StdRng, recordings: &Recordings) {
    let (bytes, unproven) = match rng.random() {
        true => (&recordings.control, "the refused end could not prove this connection's key"),
        false => (&recordings.data, "the refused end could not prove the session's key"),
    };
    let Some(heard) = say(address, bytes) else { return };
    // The victim may have closed this connection to make room for another.
    if !heard.is_empty() {
        let text = refusal(&heard).map(|(_, text)| text);
        assert!(text.as_deref().is_none_or(|text| text == unproven), "{text:?}");
    }
}

/// The claim of a session that exists, with a proof made without the session's key.
fn wrong_keys(address: SocketAddr, rng: &mut StdRng, recordings: &Recordings) {
    let Ok(mut stream) = TcpStream::connect(address) else { return };
    let mut claim = recordings.data[..CLAIM_BYTES].to_vec();
    // A generation that was never used.
    claim[CLAIM_BYTES - 4..].copy_from_slice(&rng.random_range(1000u32..2000).to_le_bytes());
    let _ = stream.write_all(&claim);
    let mut challenge = [0; 18];
    if stream.read_exact(&mut challenge).is_err() {
        return;
    }
    let mut proof = [0; 34];
    rng.fill_bytes(&mut proof);
    proof[..2].copy_from_slice(&32u16.to_le_bytes());
    let _ = stream.write_all(&proof);
    let Some(heard) = hear(&mut stream) else { return };
    let text = refusal(&heard).map(|(_, text)| text);
    assert!(text.is_none_or(|text| text == "the refused end could not prove the session's key"));
}

fn oversized_lengths(address: SocketAddr, rng: &mut StdRng, recordings: &Recordings) {
    let preamble = [&recordings.control, &recordings.data][rng.random_range(0..2)][..PREAMBLE_BYTES].to_vec();
    let lengths: [&[u8]; 4] =
        [&[0xfe, 0xff], &[0, 0x10], &[0xff, 0xff, 1, 0xff, 0xff], &[0xff, 0xff, 1, 1, 1]];
    let length = lengths[rng.random_range(0..4)];
    say(address, &[&preamble[..], length, &[7; 6000]].concat());
}

/// Hangs up in the middle, so that the victim's kernel sees a reset.
fn resets(address: SocketAddr, rng: &mut StdRng, recordings: &Recordings) {
    let Ok(mut stream) = TcpStream::connect(address) else { return };
    let said = rng.random_range(0..recordings.data.len());
    let _ = stream.write_all(&recordings.data[..said]);
    let socket = socket2::Socket::from(stream);
    socket.set_linger(Some(Duration::ZERO)).unwrap();
}

/// Says a good hello so slowly that it never ends. Time is counted in bytes, and so only while this process
/// runs.
fn slowly(address: SocketAddr, _: &mut StdRng, recordings: &Recordings) {
    const BETWEEN_BYTES: Duration = Duration::from_millis(200);
    /// Three times as many as fit into the deadline.
    const SLOW_BYTES_MAX: usize =
        (3 * limits::HANDSHAKE_TIMEOUT.as_millis() / BETWEEN_BYTES.as_millis()) as usize;
    let mut streams: Vec<_> = (0..10).filter_map(|_| TcpStream::connect(address).ok()).collect();
    for (said, byte) in recordings.control.iter().enumerate() {
        // One that was hung up on takes no more.
        streams.retain_mut(|stream| stream.write_all(&[*byte]).is_ok());
        if streams.is_empty() {
            return;
        }
        assert!(said < SLOW_BYTES_MAX, "{said} bytes were listened to");
        thread::sleep(BETWEEN_BYTES);
    }
    panic!("a hello of a byte now and then was heard to its end");
}

type Attack = fn(SocketAddr, &mut StdRng, &Recordings);

const ATTACKS: [(&str, Attack); 9] = [
    ("random bytes", random_bytes),
    ("other protocols", other_protocols),
    ("damaged recordings", damaged_recordings),
    ("replayed recordings", replays),
    ("wrong keys", wrong_keys),
    ("oversized lengths", oversized_lengths),
    ("resets", resets),
    ("slow strangers", slowly),
    ("more slow strangers", slowly),
];

/// Attackers that begin and end together.
pub struct Attackers {
    pub go: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    threads: Vec<(&'static str, JoinHandle<u64>)>,
}

impl Attackers {
    pub fn new(address: SocketAddr, recordings: &Recordings) -> Attackers {
        let (go, stop) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let threads = ATTACKS.into_iter().zip(1..).map(|((name, attack), seed)| {
            let (go, stop, recordings) = (go.clone(), stop.clone(), recordings.clone());
            let thread = thread::spawn(move || {
                let mut rng = StdRng::seed_from_u64(seed);
                let mut rounds = 0;
                while !stop.load(Ordering::SeqCst) {
                    if go.load(Ordering::SeqCst) {
                        attack(address, &mut rng, &recordings);
                        rounds += 1;
                    }
                    thread::sleep(Duration::from_millis(5));
                }
                rounds
            });
            (name, thread)
        });
        Attackers { go: go.clone(), threads: threads.collect(), stop }
    }

    pub fn end(self) {
        self.stop.store(true, Ordering::SeqCst);
        for (name, thread) in self.threads {
            let rounds = thread.join().unwrap_or_else(|_| panic!("{name}: the victim did wrong"));
            println!("{name}: {rounds}");
            assert!(rounds > 0, "{name} did not come to it");
        }
    }
}

/// Opens many connections that say nothing, at a pace.
pub fn idle_connections(address: SocketAddr) -> Vec<TcpStream> {
    let needed = (open_descriptors() + IDLE_CONNECTIONS + limits::HANDSHAKES_PENDING_MAX + 500) as u64;
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < needed) {
        limit.current = limit.maximum.map_or(Some(needed), |most| Some(needed.min(most)));
        let _ = setrlimit(Resource::Nofile, limit);
    }
    if getrlimit(Resource::Nofile).current.is_some_and(|current| current < needed) {
        println!("SKIPPED: {IDLE_CONNECTIONS} idle connections need {needed} descriptors");
        return Vec::new();
    }
    let connect = |index| {
        if index % 4 == 0 {
            thread::sleep(Duration::from_millis(4));
        }
        TcpStream::connect_timeout(&address, LIMIT).ok()
    };
    (0..IDLE_CONNECTIONS).filter_map(connect).collect()
}
