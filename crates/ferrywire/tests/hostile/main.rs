//! Strangers on the network, against an endpoint that goes on serving its peers.
//!
//! Real sockets on loopback and the public API only. The attack lasts ten seconds; with
//! `FERRYWIRE_HOSTILE_SECONDS=60` it is the acceptance test. Peers that hold the secret and misbehave are
//! in `src/hostile_tests.rs`.

use ferrywire::{Endpoint, Error, Peer, Region, limits};
use rand::{Rng, RngCore, SeedableRng, rngs::StdRng};
use rustix::process::{Resource, getrlimit, setrlimit};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

const SECRET: &str = "correct horse";
const LIMIT: Duration = Duration::from_secs(120);
/// Nobody waits so long because of what others do.
const HELD_UP: Duration = Duration::from_secs(5);
/// What a connection that has proven nothing may cost beyond the bytes it sent: the state of its Noise
/// handshake, its socket's and its own bookkeeping, and what the allocator adds.
const PENDING_OVERHEAD_BYTES: usize = 16 << 10;
/// What comes and goes in this process for other reasons: fresh good peers, attackers, the allocator.
const NOISE_BYTES: usize = 24 << 20;
const IDLE_CONNECTIONS: usize = 2000;
/// Lines about refused strangers in a minute; the last says that there are more.
const LINES_MAX: usize = 100;

// ---- what all tests share ----

/// Tests count descriptors, memory and lines of this process: one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    lines().lock().unwrap().clear();
    panics();
    one
}

/// Everything that was logged.
fn lines() -> &'static Mutex<Vec<String>> {
    static LINES: OnceLock<Mutex<Vec<String>>> = OnceLock::new();
    LINES.get_or_init(|| {
        tracing_subscriber::registry().with(Capture).init();
        Mutex::default()
    })
}

struct Capture;

impl<S: tracing::Subscriber> Layer<S> for Capture {
    fn on_event(&self, event: &tracing::Event<'_>, _context: Context<'_, S>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                if field.name() == "message" {
                    self.0 = format!("{value:?}");
                }
            }
        }
        if *event.metadata().level() <= tracing::Level::WARN {
            let mut text = Text(String::new());
            event.record(&mut text);
            lines().lock().unwrap().push(text.0);
        }
    }
}

/// Panics of any thread since the first call.
fn panics() -> u64 {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    static HOOK: OnceLock<()> = OnceLock::new();
    HOOK.get_or_init(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let engine = thread::current().name().is_some_and(|name| name.starts_with("ferrywire-"));
            COUNT.fetch_add(u64::from(engine), Ordering::SeqCst);
            usual(info);
        }));
    });
    COUNT.load(Ordering::SeqCst)
}

fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < LIMIT, "never came about: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Resident memory of this process, in bytes.
fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
    // SAFETY: no memory is passed.
    pages * unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize
}

/// An endpoint that listens. Its address is no NIC's own, so that it advertises none and peers dial their
/// channels where they found it: through the recorder.
fn victim() -> Endpoint {
    let listening = Endpoint::builder().listen("127.0.0.2:0".parse().unwrap());
    listening.secret(SECRET).label("victim").threads(1).build().unwrap()
}

fn dialler(secret: Option<&str>) -> Endpoint {
    let mut builder = Endpoint::builder().threads(1).channels(2);
    if let Some(secret) = secret {
        builder = builder.secret(secret);
    }
    builder.build().unwrap()
}

/// A peer of the victim's, and the region there that it writes to.
struct Good {
    endpoint: Endpoint,
    peer: Peer,
    here: Peer,
    target: Region,
    source: Region,
    rounds: u64,
}

impl Good {
    fn connect(victim: &Endpoint, address: SocketAddr) -> ferrywire::Result<Good> {
        let endpoint = dialler(Some(SECRET));
        let peer = endpoint.connect(address, LIMIT)?;
        let here = victim.accept(LIMIT)?;
        let target = victim.register_zeroed(1 << 20)?;
        let source = endpoint.register_zeroed(1 << 20)?;
        Ok(Good { endpoint, peer, here, target, source, rounds: 0 })
    }

    /// Writes what was never written before, and looks whether it is there.
    fn round(&mut self) -> ferrywire::Result<()> {
        self.rounds += 1;
        let mut bytes = vec![0; self.source.len() as usize];
        StdRng::seed_from_u64(self.rounds).fill_bytes(&mut bytes);
        self.source.write_at(0, &bytes)?;
        let (target, name) = (self.target.descriptor(), self.rounds.to_le_bytes());
        self.peer.write_notify(&self.source, 0, &target, 0, target.len(), &name)?.wait(LIMIT)?;
        assert_eq!(self.here.wait_notification(LIMIT)?, name);
        let mut got = vec![0; bytes.len()];
        self.target.read_at(0, &mut got)?;
        assert!(got == bytes, "round {}: other bytes than were written", self.rounds);
        Ok(())
    }

    fn close(self) {
        self.peer.close(LIMIT).unwrap();
        self.endpoint.close(LIMIT).unwrap();
    }
}

// ---- recordings ----

/// What a real peer says at the start of its connections.
#[derive(Clone)]
struct Recordings {
    control: Vec<u8>,
    data: Vec<u8>,
}

/// What one connection says, as it is heard.
type Recording = Arc<Mutex<Vec<u8>>>;

/// Connects a good peer through a proxy that keeps what it says.
fn record(victim: &Endpoint) -> (Recordings, Good) {
    const KEPT_BYTES: usize = 1024;
    let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, target) = (proxy.local_addr().unwrap(), victim.listen_addresses()[0]);
    let heard = Arc::<Mutex<Vec<Recording>>>::default();
    let kept = heard.clone();
    thread::spawn(move || {
        // A control connection and two channels are all that comes.
        for stream in proxy.incoming().take(3) {
            let (from, to) = (stream.unwrap(), TcpStream::connect(target).unwrap());
            let recording = Recording::default();
            kept.lock().unwrap().push(recording.clone());
            let (back_from, back_to) = (to.try_clone().unwrap(), from.try_clone().unwrap());
            thread::spawn(move || {
                pump(from, to, |bytes| {
                    let mut recording = recording.lock().unwrap();
                    let room = KEPT_BYTES - recording.len().min(KEPT_BYTES);
                    recording.extend_from_slice(&bytes[..room.min(bytes.len())]);
                });
            });
            thread::spawn(move || pump(back_from, back_to, |_| {}));
        }
    });
    let mut good = Good::connect(victim, address).unwrap();
    good.round().unwrap();
    let heard = heard.lock().unwrap();
    let of_kind = |kind: u8| {
        let recordings = heard.iter().map(|recording| recording.lock().unwrap().clone());
        recordings.into_iter().find(|bytes| bytes[10] == kind).expect("each kind was dialled")
    };
    let (control, mut data) = (of_kind(1), of_kind(2));
    data.truncate(DATA_HELLO_BYTES);
    drop(heard);
    (Recordings { control, data }, good)
}

/// Preamble, claim and proof of a data connection.
const PREAMBLE_BYTES: usize = 16;
const CLAIM_BYTES: usize = PREAMBLE_BYTES + 2 + 14;
const DATA_HELLO_BYTES: usize = CLAIM_BYTES + 2 + 32;

fn pump(mut from: TcpStream, mut to: TcpStream, mut each: impl FnMut(&[u8])) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        each(&buffer[..count]);
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

// ---- attackers ----

/// Says something and listens until the victim hangs up, or for as long as a stranger may take.
fn say(address: SocketAddr, bytes: &[u8]) -> Option<Vec<u8>> {
    let mut stream = TcpStream::connect(address).ok()?;
    let _ = stream.write_all(bytes);
    hear(&mut stream)
}

fn hear(stream: &mut TcpStream) -> Option<Vec<u8>> {
    stream.set_read_timeout(Some(2 * limits::HANDSHAKE_DEADLINE)).ok()?;
    let mut heard = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return Some(heard),
            Ok(count) => heard.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return Some(heard),
            Err(error) => panic!("a stranger was not hung up on: {error}"),
        }
        assert!(heard.len() <= limits::HANDSHAKE_BYTES_MAX, "a stranger was told too much");
    }
}

/// The refusal at the end of what was heard: its code and text.
fn refusal(heard: &[u8]) -> Option<(u8, String)> {
    let start = heard.windows(2).rposition(|mark| mark == [0xff, 0xff])?;
    let [_, _, code, low, high, text @ ..] = &heard[start..] else { return None };
    let whole = text.len() == usize::from(u16::from_le_bytes([*low, *high]));
    whole.then(|| (*code, String::from_utf8_lossy(text).into_owned()))
}

const HTTP: &[u8] = b"GET / HTTP/1.1\r\nHost: gpu1\r\nUser-Agent: curl/8.5.0\r\n\r\n";
const SSH: &[u8] = b"SSH-2.0-OpenSSH_9.6p1 Ubuntu-3ubuntu13\r\n";
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
        true => (&recordings.control, "you could not prove this connection's key"),
        false => (&recordings.data, "you could not prove the session's key"),
    };
    let Some(heard) = say(address, bytes) else { return };
    // The victim may have hung up on us to make room for somebody.
    if !heard.is_empty() {
        let text = refusal(&heard).map(|(_, text)| text);
        assert!(text.as_deref().is_none_or(|text| text == unproven), "{text:?}");
    }
}

/// The claim of a session that exists, with the proof of somebody without its key.
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
    assert!(text.is_none_or(|text| text == "you could not prove the session's key"));
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

/// Says a good hello so slowly that it never ends.
fn slowly(address: SocketAddr, _: &mut StdRng, recordings: &Recordings) {
    let mut streams: Vec<_> = (0..10).filter_map(|_| TcpStream::connect(address).ok()).collect();
    let start = Instant::now();
    for byte in &recordings.control {
        // One that was hung up on takes no more.
        streams.retain_mut(|stream| stream.write_all(&[*byte]).is_ok());
        if streams.is_empty() {
            return;
        }
        let waited = start.elapsed();
        assert!(waited < limits::HANDSHAKE_DEADLINE + Duration::from_secs(4), "held for {waited:?}");
        thread::sleep(Duration::from_millis(200));
    }
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
struct Attackers {
    go: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    threads: Vec<(&'static str, JoinHandle<u64>)>,
}

impl Attackers {
    fn new(address: SocketAddr, recordings: &Recordings) -> Attackers {
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

    fn end(self) {
        self.stop.store(true, Ordering::SeqCst);
        for (name, thread) in self.threads {
            let rounds = thread.join().unwrap_or_else(|_| panic!("{name}: the victim did wrong"));
            println!("{name}: {rounds}");
            assert!(rounds > 0, "{name} did not come to it");
        }
    }
}

/// Opens many connections that say nothing, at a pace.
fn idle_connections(address: SocketAddr) -> Vec<TcpStream> {
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

// ---- the tests ----

#[test]
fn under_attack_good_peers_are_served_and_the_limits_hold() {
    let _alone = alone();
    let seconds = std::env::var("FERRYWIRE_HOSTILE_SECONDS").ok().and_then(|text| text.parse().ok());
    let seconds = Duration::from_secs(seconds.unwrap_or(10));
    let victim = victim();
    let address = victim.listen_addresses()[0];
    let (recordings, mut recorded) = record(&victim);
    let mut good = Good::connect(&victim, address).unwrap();
    let stop = Arc::<AtomicBool>::default();
    let attackers = Attackers::new(address, &recordings);
    // Everything once before it counts.
    for _ in 0..3 {
        let mut fresh = Good::connect(&victim, address).unwrap();
        fresh.round().unwrap();
        good.round().unwrap();
        fresh.close();
    }
    eventually("fresh peers are gone", || victim.peer_count() == 2);
    thread::sleep(Duration::from_millis(200));
    let (descriptors, resident) = (open_descriptors(), resident_bytes());

    let ended = stop.clone();
    let worker = thread::spawn(move || {
        while !ended.load(Ordering::SeqCst) {
            good.round().expect("a good peer fails");
        }
        good
    });
    attackers.go.store(true, Ordering::SeqCst);
    let idle = thread::spawn(move || idle_connections(address));
    let (start, mut most, mut fresh_peers) = (Instant::now(), 0, 0);
    let (mut slowest, mut slowest_call) = (Duration::ZERO, Duration::ZERO);
    while start.elapsed() < seconds {
        let began = Instant::now();
        victim.peer_count();
        slowest_call = slowest_call.max(began.elapsed());
        let mut fresh = Good::connect(&victim, address).expect("a fresh good peer cannot connect");
        slowest = slowest.max(began.elapsed());
        fresh.round().expect("a fresh good peer fails");
        fresh.close();
        fresh_peers += 1;
        for _ in 0..10 {
            most = most.max(resident_bytes());
            thread::sleep(Duration::from_millis(20));
        }
    }
    let idle = idle.join().unwrap();
    most = most.max(resident_bytes());
    println!("{} idle connections", idle.len());
    drop(idle);
    attackers.end();
    stop.store(true, Ordering::SeqCst);
    let good = worker.join().expect("a good peer was not served");
    recorded.round().expect("the peer whose hello was replayed fails");

    let growth = most.saturating_sub(resident);
    println!("{} good rounds, {fresh_peers} fresh peers, the slowest in {slowest:?}", good.rounds);
    println!("resident memory grew by {growth} bytes; the slowest call took {slowest_call:?}");
    assert!(good.rounds > 10 && fresh_peers > 1);
    assert!(slowest_call < HELD_UP, "a call waited for strangers");
    let allowed = limits::HANDSHAKES_PENDING_MAX * (limits::HANDSHAKE_BYTES_MAX + PENDING_OVERHEAD_BYTES);
    assert!(growth <= allowed + NOISE_BYTES, "strangers made us hold {growth} bytes");
    eventually("descriptors are back", || open_descriptors() <= descriptors);
    assert_eq!(victim.peer_count(), 2, "a stranger became a peer, or a peer was lost");
    assert_eq!(panics(), 0, "a thread of the engine panicked");
    let minutes = 1 + (start.elapsed() + limits::HANDSHAKE_DEADLINE).as_secs() as usize / 60;
    let told = lines().lock().unwrap().iter().filter(|line| line.contains("refused")).count();
    assert!(told > 0 && told <= minutes * LINES_MAX, "{told} lines about strangers");
    good.close();
    recorded.close();
    victim.close(LIMIT).unwrap();
}

#[test]
fn a_flood_of_connections_holds_up_no_call() {
    let _alone = alone();
    let victim = victim();
    let address = victim.listen_addresses()[0];
    let mut good = Good::connect(&victim, address).unwrap();
    let stop = Arc::<AtomicBool>::default();
    let flooders: Vec<_> = (0..3)
        .map(|_| {
            let stop = stop.clone();
            thread::spawn(move || {
                let mut rounds = 0u32;
                while !stop.load(Ordering::SeqCst) {
                    if let Ok(mut stream) = TcpStream::connect(address) {
                        let _ = stream.write_all(HTTP);
                        // Resets leave no port waiting.
                        socket2::Socket::from(stream).set_linger(Some(Duration::ZERO)).unwrap();
                        rounds += 1;
                    }
                }
                rounds
            })
        })
        .collect();
    let (start, mut slowest) = (Instant::now(), Duration::ZERO);
    while start.elapsed() < Duration::from_secs(4) {
        let began = Instant::now();
        assert!(victim.peer_count() > 0);
        slowest = slowest.max(began.elapsed());
        good.round().unwrap();
    }
    stop.store(true, Ordering::SeqCst);
    let floods: Vec<u32> = flooders.into_iter().map(|thread| thread.join().unwrap()).collect();
    println!("{floods:?} connections, {} good rounds, the slowest call took {slowest:?}", good.rounds);
    assert!(slowest < HELD_UP / 5, "a call waited {slowest:?} for strangers");
    good.close();
    victim.close(LIMIT).unwrap();
}

#[test]
fn a_refused_stranger_is_told_of_in_one_line_until_there_are_too_many() {
    let _alone = alone();
    let victim = victim();
    let address = victim.listen_addresses()[0];
    let mut strangers = Vec::new();
    for _ in 0..LINES_MAX + 50 {
        let mut stream = TcpStream::connect(address).unwrap();
        strangers.push(stream.local_addr().unwrap());
        stream.write_all(HTTP).unwrap();
        assert_eq!(hear(&mut stream).unwrap(), b"");
    }
    let lines = lines().lock().unwrap().clone();
    for stranger in &strangers[..LINES_MAX - 1] {
        let about = |line: &&String| line.contains(&format!("from {stranger}: not ferrywire"));
        assert_eq!(lines.iter().filter(about).count(), 1, "lines about {stranger}");
    }
    let many = lines.iter().filter(|line| line.starts_with("many connections are refused")).count();
    let all = lines.iter().filter(|line| line.contains("refused")).count();
    assert_eq!((many, all), (1, LINES_MAX), "{lines:?}");
    victim.close(LIMIT).unwrap();
}

#[test]
fn a_wrong_secret_is_named_at_the_end_that_connects() {
    let _alone = alone();
    let victim = victim();
    for secret in [Some("incorrect horse"), None] {
        let stranger = dialler(secret);
        let error = stranger.connect(victim.listen_addresses()[0], LIMIT).unwrap_err();
        assert!(matches!(&error, Error::Refused { why, .. } if why.contains("wrong secret")), "{error:?}");
        assert_eq!(stranger.peer_count(), 0);
    }
    let open = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).threads(1).build().unwrap();
    let stranger = dialler(Some(SECRET));
    let error = stranger.connect(open.listen_addresses()[0], LIMIT).unwrap_err();
    assert!(matches!(&error, Error::Refused { why, .. } if why.contains("wrong secret")), "{error:?}");
    // The stranger hears of its refusal first, the log a moment later.
    let told = || lines().lock().unwrap().iter().filter(|line| line.contains("wrong secret")).count();
    let start = Instant::now();
    while told() < 3 && start.elapsed() < LIMIT {
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(told(), 3, "one line for each");
    assert_eq!(victim.peer_count() + open.peer_count(), 0);
}

#[test]
fn a_wrong_version_is_named_at_both_ends() {
    let _alone = alone();
    let victim = victim();
    let (recordings, recorded) = record(&victim);
    let mut hello = recordings.control.clone();
    hello[8..10].copy_from_slice(&9u16.to_le_bytes());
    let heard = say(victim.listen_addresses()[0], &hello).unwrap();
    let (code, text) = refusal(&heard).expect("another version is told why");
    assert_eq!((code, &text[..]), (1, "you speak protocol version 9, this end speaks 1"));
    let named = |line: &String| line.contains("it speaks protocol version 9, we speak 1");
    let told = || lines().lock().unwrap().iter().filter(|line| named(line)).count();
    let start = Instant::now();
    while told() < 1 && start.elapsed() < LIMIT {
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(told(), 1);

    let answers: [(&[u8], &str); 3] = [
        (b"\xff\xff\x01\x04\x00nine", "wrong protocol version: it says \"nine\""),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "HTTP"),
        (SSH, "SSH"),
    ];
    for (answer, cause) in answers {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(answer);
        });
        let error = recorded.endpoint.connect(address, LIMIT).unwrap_err();
        assert!(matches!(&error, Error::Refused { why, .. } if why.contains(cause)), "{error:?}");
    }
    recorded.close();
}
