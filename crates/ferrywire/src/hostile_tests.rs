//! Peers that hold the secret, shake hands, and then do what no ferrywire does.
//!
//! Each test ends in a refusal, or in the loss of the channel or peer that misbehaved, with a cause that
//! names what it did. [`Scene::unharmed`] then checks that nothing else changed: memory around and outside
//! the region, and the work of a good peer.

use crate::bootstrap::tests::{Shared, config, hello};
use crate::bootstrap::{
    self, Config, Established, HandshakeError, Initiator, Outcome, Purpose, RefusalCode, Responder, Secure,
};
use crate::limits;
use crate::memory::{Identity, Place};
use crate::patience::Patience;
use crate::session::{ControlMessage, Frame};
use crate::wire::{self, HEADER_BYTES, Header, Kind, Placement, Refusal};
use crate::{Endpoint, Error, Peer, Region, RemoteRegion};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

const SECRET: &str = "correct horse";
const LIMIT: Duration = Duration::from_secs(120);
/// Nobody waits so long because of what others do.
const HELD_UP: Duration = Duration::from_secs(5);
/// Size of the region that evil peers know, and of the guard on each side of it.
const REGION_BYTES: usize = 64 << 10;
const BEFORE: u8 = 0xaa;
/// Frames that an evil peer sends before it waits for acknowledgements: within its window.
const FLOOD_BATCH: u64 = 400;

/// Waits until something is so.
fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let (start, mut patience) = (Instant::now(), Patience::new(LIMIT));
    while !so() {
        assert!(!patience.is_over(start.elapsed()), "never came about: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// An endpoint under attack, and a good peer of it.
struct Scene {
    region: Region,
    good: Peer,
    good_here: Peer,
    good_end: Endpoint,
    victim: Endpoint,
    /// The region lies in the middle of it.
    memory: Vec<u8>,
}

impl Scene {
    fn new() -> Scene {
        Scene::with_patience(3 * LIMIT)
    }

    /// One whose endpoint gives silent peers up after so long.
    fn with_patience(limit: Duration) -> Scene {
        let victim = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap());
        let victim = victim.secret(SECRET).threads(1).heartbeat_limit(limit).build().unwrap();
        let mut memory = vec![BEFORE; 3 * REGION_BYTES];
        // SAFETY: the vector is not resized, and outlives the region, which is declared before it.
        let region = unsafe { victim.register_raw(memory.as_mut_ptr().add(REGION_BYTES), REGION_BYTES) };
        let good_end = endpoint();
        let good = good_end.connect(victim.listen_addresses()[0], LIMIT).unwrap();
        let good_here = victim.accept(LIMIT).unwrap();
        Scene { region: region.unwrap(), good, good_here, good_end, victim, memory }
    }

    fn address(&self) -> SocketAddr {
        self.victim.listen_addresses()[0]
    }

    fn key(&self) -> u64 {
        self.region.descriptor().key
    }

    /// The bytes of the region and its guards, as they are now.
    fn bytes(&self) -> Vec<u8> {
        // SAFETY: the vector is alive; what peers write into its middle are plain bytes.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.memory.len()) }.to_vec()
    }

    /// Nobody wrote to the memory, and the good peer is served as ever.
    fn unharmed(&self) {
        assert!(self.bytes().iter().all(|byte| *byte == BEFORE), "memory was written to");
        self.good_peer_is_served();
    }

    fn good_peer_is_served(&self) {
        let bytes: Vec<u8> = (0..300_000u32).map(|i| (i * 7 % 251) as u8).collect();
        let source = self.good_end.register(bytes.clone()).unwrap();
        let target = self.victim.register_zeroed(bytes.len()).unwrap();
        let written = self.good.write_notify(&source, 0, &target.descriptor(), 0, target.len(), b"done");
        written.unwrap().wait(LIMIT).unwrap();
        assert_eq!(self.good_here.wait_notification(LIMIT).unwrap(), b"done");
        let mut got = vec![0; bytes.len()];
        target.read_at(0, &mut got).unwrap();
        assert!(got == bytes, "a good peer's bytes differ");
        assert_eq!(self.good_here.error(), None);
    }
}

/// One that only connects.
fn endpoint() -> Endpoint {
    Endpoint::builder().secret(SECRET).threads(1).channels(2).build().unwrap()
}

// ---- the evil peer ----

/// What an evil peer was told on one data connection.
#[derive(Default)]
struct Heard {
    refused: Vec<(u32, Refusal)>,
    acknowledged: u32,
    /// Heads of all frames but acknowledgements.
    frames: Vec<Header>,
    closed: bool,
}

struct Data {
    stream: TcpStream,
    frames_sent: u32,
    heard: Arc<Mutex<Heard>>,
}

impl Data {
    fn new(stream: TcpStream) -> Data {
        let data = Data { heard: Arc::default(), frames_sent: 0, stream };
        let (mut stream, heard) = (data.stream.try_clone().unwrap(), data.heard.clone());
        thread::spawn(move || {
            while let Some((header, body)) = read_frame(&mut stream) {
                let mut heard = heard.lock().unwrap();
                heard.acknowledged = header.ack;
                match header.kind {
                    Kind::Ack => heard.refused.extend(wire::refusals(&body)),
                    _ => heard.frames.push(header),
                }
            }
            heard.lock().unwrap().closed = true;
        });
        data
    }

    fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap()
    }

    fn send(&mut self, header: Header, body: &[u8]) {
        let bytes = [&header.encode()[..], body].concat();
        self.frames_sent += u32::from(header.kind != Kind::Ack);
        self.stream.write_all(&bytes).unwrap();
    }

    /// Sends many frames, as fast as acknowledgements come back.
    fn flood(&mut self, header: Header, body: &[u8], count: u64, number: impl Fn(u64, &mut Header)) {
        let before = self.frames_sent;
        for batch in 0..count.div_ceil(FLOOD_BATCH) {
            let mut bytes = Vec::new();
            for index in batch * FLOOD_BATCH..count.min((batch + 1) * FLOOD_BATCH) {
                let mut each = header;
                number(index, &mut each);
                bytes.extend_from_slice(&each.encode());
                bytes.extend_from_slice(body);
                self.frames_sent += 1;
            }
            self.stream.write_all(&bytes).unwrap();
            let missing = |data: &Data| data.frames_sent - data.heard().acknowledged;
            eventually("acknowledgements keep up", || missing(self) <= FLOOD_BATCH as u32);
        }
        assert_eq!(u64::from(self.frames_sent - before), count);
    }

    /// Waits until all frames are acknowledged; returns what was refused of them.
    fn answers(&self) -> Vec<(u32, Refusal)> {
        eventually("all frames are acknowledged", || {
            let heard = self.heard();
            let (frames, acknowledged) = (self.frames_sent, heard.acknowledged);
            assert!(!heard.closed, "the channel was closed after {acknowledged} of {frames}");
            acknowledged >= frames
        });
        let mut refused = self.heard().refused.clone();
        refused.sort_by_key(|(number, _)| *number);
        refused
    }
}

fn read_frame(stream: &mut TcpStream) -> Option<(Header, Vec<u8>)> {
    let mut head = [0; HEADER_BYTES];
    stream.read_exact(&mut head).ok()?;
    let header = Header::decode(&head).expect("the victim is honest");
    let mut body = vec![0; header.body_bytes()];
    stream.read_exact(&mut body).ok()?;
    Some((header, body))
}

struct Evil {
    address: SocketAddr,
    control: TcpStream,
    established: Box<Established>,
    said: u64,
    data: Vec<Data>,
    /// The victim's handle.
    here: Peer,
}

fn evil_config() -> Config {
    Config { channels: 1, window: 1024, crc: false, extra: Vec::new(), ..config() }
}

/// Runs one end of a handshake over a socket.
fn shake(stream: &mut TcpStream, mut initiator: Initiator) -> Result<Outcome, HandshakeError> {
    loop {
        stream.write_all(&initiator.take_output()).unwrap();
        if let Some(outcome) = initiator.finished() {
            return Ok(outcome);
        }
        let mut bytes = vec![0; initiator.want()];
        match stream.read(&mut bytes) {
            Ok(0) | Err(_) => return Err(initiator.closed()),
            Ok(count) => initiator.feed(&bytes[..count])?,
        }
    }
}

fn dial(address: SocketAddr, initiator: Initiator) -> Result<(TcpStream, Outcome), HandshakeError> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let outcome = shake(&mut stream, initiator)?;
    Ok((stream, outcome))
}

impl Evil {
    fn new(scene: &Scene) -> Evil {
        Evil::with(scene, evil_config())
    }

    fn with(scene: &Scene, config: Config) -> Evil {
        let channels = config.channels;
        let purpose = Purpose::New { config };
        let initiator = Initiator::control(Some(SECRET.as_bytes()), hello(1), purpose).unwrap();
        let (control, outcome) = dial(scene.address(), initiator).unwrap();
        let Outcome::Control(established) = outcome else { panic!("{outcome:?}") };
        let (address, data) = (scene.address(), Vec::new());
        let channel = |index| channel(address, &established, index, 0).unwrap();
        let data: Vec<Data> = (0..channels).map(channel).fold(data, |mut all, each| {
            all.push(Data::new(each));
            all
        });
        let here = scene.victim.accept(LIMIT).unwrap();
        Evil { address, control, established, said: 0, data, here }
    }

    /// Sends a frame on the first channel.
    fn send(&mut self, header: Header, body: &[u8]) {
        self.data[0].send(header, body);
    }

    /// Says a control message in order.
    fn say(&mut self, message: &ControlMessage) {
        self.said += 1;
        let frame = Frame { received: 0, numbered: Some((self.said, message)) };
        self.say_plain(&frame.encode());
    }

    fn say_plain(&mut self, plain: &[u8]) {
        let sealed = self.secure().seal(plain).unwrap();
        self.control.write_all(&sealed).unwrap();
    }

    fn secure(&mut self) -> &mut Secure {
        &mut self.established.secure
    }

    /// Waits until the victim has lost the channel, and checks that it says why.
    fn channel_lost_for(&self, cause: &str) {
        eventually("the channel is lost", || !self.here.stats().lost_channels.is_empty());
        let lost = self.here.stats().lost_channels;
        assert!(lost[0].contains(cause), "{lost:?} does not name: {cause}");
    }

    /// Waits until the victim has lost the peer, and checks that it says why.
    fn lost_for(&self, cause: &str) {
        eventually("the peer is lost", || self.here.error().is_some());
        let error = self.here.error().unwrap();
        assert!(matches!(error, Error::PeerLost { .. }), "{error:?}");
        assert!(error.to_string().contains(cause), "{error} does not name: {cause}");
    }
}

fn channel(
    address: SocketAddr,
    established: &Established,
    index: u16,
    generation: u32,
) -> Result<TcpStream, HandshakeError> {
    let key = established.data_key.clone();
    let (stream, _) = dial(address, Initiator::data(established.session, key, index, generation))?;
    stream.set_read_timeout(None).unwrap();
    Ok(stream)
}

fn data(key: u64, offset: u64, len: usize) -> Header {
    Header { key, offset, len: len as u32, ..Header::new(Kind::Data) }
}

fn limited(refused: &[(u32, Refusal)]) -> usize {
    assert!(refused.iter().all(|(_, why)| *why == Refusal::Limit), "{:?}", refused.first());
    refused.len()
}

// ---- data frames ----

#[test]
fn bytes_for_places_outside_a_region_are_refused() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let (key, size) = (scene.key(), REGION_BYTES as u64);
    let outside = [
        (key, size, 1, Refusal::OutOfRegion),
        (key, size - 99, 100, Refusal::OutOfRegion),
        (key, 0, REGION_BYTES + 1, Refusal::OutOfRegion),
        (key, u64::MAX - 100, 100, Refusal::OutOfRegion),
        (key, 0u64.wrapping_sub(64 << 10), 100, Refusal::OutOfRegion),
        (key, 1 << 63, 100, Refusal::OutOfRegion),
        (key, size + 1, 0, Refusal::OutOfRegion),
        (key ^ 1, 0, 100, Refusal::NoRegion),
        (0, 0, 100, Refusal::NoRegion),
        (u64::MAX, 0, 0, Refusal::NoRegion),
    ];
    for (key, offset, len, _) in outside {
        evil.send(data(key, offset, len), &vec![0xee; len]);
    }
    let expected: Vec<_> = (0..).zip(outside).map(|(number, (.., why))| (number, why)).collect();
    assert_eq!(evil.data[0].answers(), expected);
    scene.unharmed();
}

#[test]
fn placements_outside_a_region_or_of_another_sum_are_refused() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let size = REGION_BYTES as u64;
    let lists: [&[(u64, u32)]; 7] = [
        &[(size - 50, 100)],
        &[(0, 50), (size - 49, 50)],
        &[(u64::MAX, 100)],
        &[(u64::MAX - 99, 100)],
        &[(0, 99)],
        &[(0, 101)],
        &[(0, u32::MAX), (0, 101)],
    ];
    for list in lists {
        let mut body = Vec::new();
        list.iter().for_each(|(offset, len)| Placement { offset: *offset, len: *len }.encode_into(&mut body));
        body.extend_from_slice(&[0xee; 100]);
        let header = Header { segments: list.len() as u16, ..data(scene.key(), 0, 100) };
        evil.send(header, &body);
    }
    let refused = evil.data[0].answers();
    let expected: Vec<_> = (0..lists.len() as u32).map(|number| (number, Refusal::OutOfRegion)).collect();
    assert_eq!(refused, expected);
    scene.unharmed();
}

#[test]
fn a_region_is_refused_once_it_is_deregistered() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let region = scene.victim.register_zeroed(4096).unwrap();
    let header = data(region.descriptor().key, 0, 100);
    evil.send(header, &[1; 100]);
    assert_eq!(evil.data[0].answers(), []);
    region.deregister().unwrap();
    evil.send(header, &[2; 100]);
    assert_eq!(evil.data[0].answers(), [(1, Refusal::NoRegion)]);
    scene.unharmed();
}

#[test]
fn a_sink_of_another_peer_is_no_target() {
    let scene = Scene::new();
    let (mut evil, mut asked) = (Evil::new(&scene), Evil::new(&scene));
    let target = scene.victim.register(vec![BEFORE; 3000]).unwrap();
    let remote = RemoteRegion { owner: Identity(hello(1).identity), key: 1, len: 1000, place: Place::Host };
    let read = asked.here.read(&target, 1000, &remote, 0, 1000).unwrap();
    eventually("the read is asked for", || !asked.data[0].heard().frames.is_empty());
    let sink = asked.data[0].heard().frames[0].total;
    let to_sink = |offset, len| Header { flags: wire::FLAG_SINK, ..data(sink, offset, len) };
    evil.send(to_sink(0, 1000), &[0xee; 1000]);
    assert_eq!(evil.data[0].answers(), [(0, Refusal::NoSink)]);
    let outside = [(901, 100), (1000, 1), (u64::MAX - 100, 100), (0, 1001)];
    for (offset, len) in outside {
        asked.send(to_sink(offset, len), &vec![0xee; len]);
    }
    let refused = asked.data[0].answers();
    assert_eq!(refused, [0, 1, 2, 3].map(|number| (number, Refusal::OutOfRegion)));
    let mut bytes = vec![0; 3000];
    target.read_at(0, &mut bytes).unwrap();
    assert_eq!(bytes, [BEFORE; 3000]);
    // The request is acknowledged too, else it is still under way.
    asked.send(Header { ack: 1, ..to_sink(0, 1000) }, &[3; 1000]);
    assert_eq!(read.wait(LIMIT), Ok(1000));
    asked.send(Header { ack: 1, ..to_sink(0, 1000) }, &[0xee; 1000]);
    assert_eq!(asked.data[0].answers().last(), Some(&(5, Refusal::NoSink)));
    target.read_at(0, &mut bytes).unwrap();
    assert_eq!(bytes, [[BEFORE; 1000], [3; 1000], [BEFORE; 1000]].concat());
    scene.unharmed();
}

#[test]
fn acknowledging_what_was_never_sent_ends_the_channel() {
    let scene = Scene::new();
    for ack in [1, 1000, 1 << 31, u32::MAX] {
        let mut evil = Evil::new(&scene);
        evil.send(Header { ack, ..Header::new(Kind::Ack) }, &[]);
        evil.channel_lost_for("it acknowledged frames that were not sent");
        evil.control.shutdown(Shutdown::Both).unwrap();
        evil.lost_for("it acknowledged frames that were not sent");
    }
    scene.unharmed();
}

#[test]
fn refusing_frames_that_were_never_sent_does_nothing() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let numbers = [0, 1, 1 << 31, u32::MAX].map(|number: u32| (u64::from(number), Refusal::Other));
    let body = wire::encode_refusals(&numbers);
    evil.send(Header { len: body.len() as u32, ..Header::new(Kind::Ack) }, &body);
    evil.send(data(scene.key() ^ 1, 0, 0), &[]);
    assert_eq!(evil.data[0].answers(), [(0, Refusal::NoRegion)]);
    scene.unharmed();
}

type Spoil = fn(&mut [u8; HEADER_BYTES]);

#[test]
fn a_head_that_breaks_a_limit_ends_the_channel() {
    let scene = Scene::new();
    let spoilt: [(&str, Spoil); 8] = [
        ("len", |head| head[4..8].copy_from_slice(&(limits::CHUNK_BYTES_MAX as u32 + 1).to_le_bytes())),
        ("len", |head| head[4..8].copy_from_slice(&[0xff; 4])),
        ("segments", |head| head[2..4].copy_from_slice(&513u16.to_le_bytes())),
        ("notify", |head| head[48..50].copy_from_slice(&[0xff; 2])),
        ("flags", |head| head[1] = 0x80),
        ("offset", |head| head[32..40].copy_from_slice(&[0xff; 8])),
        ("not a frame header", |head| head[0] = 99),
        ("not a frame header", |head| head[55] = 1),
    ];
    for (cause, spoil) in spoilt {
        let mut evil = Evil::new(&scene);
        let mut head = data(scene.key(), 0, 100).encode();
        spoil(&mut head);
        let _ = evil.data[0].stream.write_all(&[&head[..], &[0xee; 100]].concat());
        evil.channel_lost_for("the stream is broken");
        evil.channel_lost_for(cause);
    }
    scene.unharmed();
}

#[test]
fn a_wrong_checksum_ends_the_channel() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let header = Header { flags: wire::FLAG_CRC, crc: 7, ..data(scene.key() ^ 1, 0, 4) };
    evil.send(header, &[1; 4]);
    assert_eq!(evil.data[0].answers(), [(0, Refusal::NoRegion)], "what is refused is not looked at");
    let mut notify = Header { flags: wire::FLAG_CRC, crc: 7, ..Header::new(Kind::Notify) };
    notify.len = 4;
    evil.send(notify, &[1; 4]);
    evil.channel_lost_for("checksum mismatch");
    scene.unharmed();
}

// ---- floods ----

#[test]
fn a_peer_that_disregards_its_window_loses_the_channel() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let head = data(scene.key() ^ 1, 0, 0).encode();
    for _ in 0..100 {
        if evil.data[0].stream.write_all(&head.repeat(10_000)).is_err() {
            break;
        }
    }
    evil.channel_lost_for("it sent more frames than its window holds");
    evil.control.shutdown(Shutdown::Both).unwrap();
    evil.lost_for("it sent more frames than its window holds");
    scene.unharmed();
}

#[test]
fn notifications_past_the_limit_are_refused() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let held = limits::NOTIFICATIONS_HELD_MAX as u64;
    let header = Header { len: 1, ..Header::new(Kind::Notify) };
    evil.data[0].flood(header, b"x", held + 100, |index, header| header.transfer = index);
    let refused = evil.data[0].answers();
    assert_eq!((limited(&refused), refused[0].0), (100, held as u32));
    for _ in 0..held {
        assert_eq!(evil.here.poll_notification(), Ok(Some(b"x".to_vec())));
    }
    assert_eq!(evil.here.poll_notification(), Ok(None));
    scene.unharmed();
}

#[test]
fn notifications_that_wait_for_bytes_are_charged_like_others() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let body = vec![7; limits::NOTIFY_BYTES_MAX];
    let header = Header { len: body.len() as u32, total: 1, ..Header::new(Kind::Notify) };
    // 47 MiB of them.
    evil.data[0].flood(header, &body, 6000, |index, header| header.transfer = index);
    let refused = limited(&evil.data[0].answers());
    assert!(refused >= 1900, "only {refused} long notifications were refused");
    scene.unharmed();
}

#[test]
fn notifications_out_of_turn_are_not_kept_without_end() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let count = limits::EARLY_FRAMES_MAX as u64 + 1000;
    evil.data[0].flood(Header::new(Kind::Notify), &[], count, |index, header| header.transfer = index + 1);
    limited(&evil.data[0].answers());
    // What was not even noted may be said again.
    evil.send(Header { transfer: count, ..Header::new(Kind::Notify) }, &[]);
    assert_eq!(evil.data[0].answers().last(), Some(&(count as u32, Refusal::Limit)));
    scene.unharmed();
}

#[test]
fn transfers_that_are_counted_and_never_end_are_bounded() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let region = scene.victim.register_zeroed(1).unwrap();
    let header = Header { flags: wire::FLAG_COUNTED, ..data(region.descriptor().key, 0, 0) };
    let count = limits::COUNTED_TRANSFERS_MAX as u64 + 1000;
    evil.data[0].flood(header, &[], count, |index, header| header.transfer = index);
    assert_eq!(limited(&evil.data[0].answers()), 1000);
    scene.unharmed();
}

#[test]
fn eager_messages_past_the_credit_are_refused() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let body = vec![7; limits::EAGER_BYTES_MAX];
    let header = Header { len: body.len() as u32, key: 5, ..Header::new(Kind::Send) };
    let fit = limits::EAGER_CREDIT_BYTES / (body.len() + limits::EAGER_OVERHEAD_BYTES);
    // In order, so that they are unexpected, and with a gap, so that they are early.
    for gap in [0, 1000] {
        evil.data[0].flood(header, &body, 200, |index, header| header.offset = index + gap);
    }
    assert_eq!(limited(&evil.data[0].answers()), 400 - fit, "the credit holds for {fit}");
    let target = scene.victim.register_zeroed(body.len()).unwrap();
    for _ in 0..fit {
        let received = evil.here.recv(5, &target, 0, target.len()).unwrap();
        assert_eq!(received.wait(LIMIT), Ok(body.len() as u64));
    }
    eventually("credit is given back", || {
        evil.data[0].heard().frames.iter().any(|header| header.kind == Kind::Credit)
    });
    scene.unharmed();
}

#[test]
fn a_notification_said_again_is_charged_once() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let body = vec![7; limits::NOTIFY_BYTES_MAX];
    // Together they are past every limit, while the bytes that they follow never come.
    let follow = Header { transfer: 5, total: 1, len: body.len() as u32, ..Header::new(Kind::Notify) };
    evil.data[0].flood(follow, &body, 6000, |_, _| {});
    let refused = evil.data[0].answers();
    assert_eq!(refused.len(), 5999);
    assert!(refused.iter().all(|(_, why)| *why == Refusal::Other), "{:?}", refused.first());
    evil.send(Header { transfer: 0, len: body.len() as u32, ..Header::new(Kind::Notify) }, &body);
    assert_eq!(evil.here.wait_notification(LIMIT), Ok(body));
    scene.unharmed();
}

#[test]
fn empty_messages_are_charged_too() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let fit = (limits::EAGER_CREDIT_BYTES / limits::EAGER_OVERHEAD_BYTES) as u64;
    evil.data[0].flood(Header::new(Kind::Send), &[], fit + 500, |index, header| header.offset = index);
    assert_eq!(limited(&evil.data[0].answers()), 500);
    scene.unharmed();
}

#[test]
fn announcements_past_the_limit_are_refused() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let held = limits::ANNOUNCED_SENDS_MAX as u64;
    let header = Header { key: 5, total: 1 << 40, ..Header::new(Kind::Announce) };
    // From half of the way on every second number, so that they are early.
    evil.data[0].flood(header, &[], held + 100, |index, header| {
        header.offset = if index < held / 2 { index } else { index * 2 };
        header.transfer = index;
    });
    assert_eq!(evil.data[0].answers(), []);
    eventually("all are answered", || evil.data[0].heard().frames.len() == 100);
    let expected = |header: &Header| header.kind == Kind::Refuse && header.key == Refusal::Limit as u64;
    assert!(evil.data[0].heard().frames.iter().all(expected));
    scene.unharmed();
}

#[test]
fn numbers_that_never_come_are_not_waited_for_without_end() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let count = limits::EARLY_FRAMES_MAX as u64 + 1000;
    evil.data[0].flood(Header::new(Kind::Announce), &[], count, |index, header| {
        header.offset = index + 1;
        header.transfer = index;
    });
    assert_eq!(limited(&evil.data[0].answers()), 1000);
    let waiting = evil.here.state.queue.waiting();
    assert!(waiting <= limits::ANSWERS_WAITING_MAX, "{waiting} answers wait");
    scene.unharmed();
}

#[test]
fn matches_of_nothing_are_not_answered_without_end() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let count = limits::ANSWERS_WAITING_MAX as u64 + 10_000;
    // The answers are never acknowledged, so that they stay with the victim.
    evil.data[0].flood(Header::new(Kind::Match), &[], count, |index, header| header.transfer = index);
    assert_eq!(evil.data[0].answers(), []);
    let waiting = evil.here.state.queue.waiting();
    assert!(waiting <= limits::ANSWERS_WAITING_MAX, "{waiting} answers wait");
    scene.unharmed();
}

#[test]
fn a_message_number_counts_once() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let header = |number, tag| Header { offset: number, key: tag, len: 1, ..Header::new(Kind::Send) };
    let target = scene.victim.register_zeroed(1).unwrap();
    for (number, byte) in [(0, b"a"), (0, b"b"), (2, b"d"), (2, b"e"), (1, b"c"), (1, b"f"), (2, b"g")] {
        evil.send(header(number, 9), byte);
    }
    let refused: Vec<u32> = evil.data[0].answers().iter().map(|(number, _)| *number).collect();
    assert_eq!(refused, [1, 3, 5, 6]);
    for expected in *b"acd" {
        evil.here.recv(9, &target, 0, 1).unwrap().wait(LIMIT).unwrap();
        let mut got = [0];
        target.read_at(0, &mut got).unwrap();
        assert_eq!(got, [expected]);
    }
    let late = evil.here.recv(9, &target, 0, 1).unwrap();
    assert!(matches!(late.wait(Duration::from_millis(100)), Err(Error::Deadline { .. })));
    scene.unharmed();
}

#[test]
fn reads_from_outside_are_refused_wherever_their_answer_should_go() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let size = REGION_BYTES as u64;
    let mut frames = 0;
    let mut ask = |key, sink_offset, ranges: &[(u64, u32)]| {
        let header = Header {
            key,
            offset: sink_offset,
            total: 9,
            segments: ranges.len() as u16,
            ..Header::new(Kind::Read)
        };
        let mut body = Vec::new();
        ranges
            .iter()
            .for_each(|(offset, len)| Placement { offset: *offset, len: *len }.encode_into(&mut body));
        evil.send(header, &body);
        frames += 1;
    };
    ask(scene.key(), 0, &[(size - 1, 2)]);
    ask(scene.key(), 0, &[(u64::MAX, 1)]);
    ask(scene.key() ^ 1, 0, &[(0, 1)]);
    ask(scene.key(), u64::MAX, &[(0, 1000), (5000, 60_000)]);
    ask(scene.key(), u64::MAX - 60_999, &[(0, 1000), (5000, 60_000)]);
    let refused: Vec<_> = evil.data[0].answers().iter().map(|(_, why)| *why).collect();
    let expected = [Refusal::OutOfRegion, Refusal::OutOfRegion, Refusal::NoRegion];
    assert_eq!(refused, [&expected[..], &[Refusal::OutOfRegion; 2]].concat());
    scene.unharmed();
}

// ---- the control session ----

fn fence(channel: u16, generation: u32) -> ControlMessage {
    let (placed, refused, reason) = (0, Vec::new(), String::from("evil"));
    ControlMessage::Fence { channel, generation, placed, refused, reason }
}

#[test]
fn a_gap_in_the_control_messages_loses_the_peer() {
    let scene = Scene::new();
    let numbered =
        |number, received| Frame { received, numbered: Some((number, &ControlMessage::Drain)) }.encode();
    let evil_words: [(&str, Vec<u8>); 7] = [
        ("control message 2 arrived where 1 was due", numbered(2, 0)),
        ("control message 0 arrived where 1 was due", numbered(0, 0)),
        ("it acknowledges 5 control messages, of 0 sent", numbered(1, 5)),
        ("a control message of unknown kind 99", {
            let mut plain = numbered(1, 0);
            plain[0] = 99;
            plain
        }),
        ("malformed: a control message: 1 bytes too many", [&numbered(1, 0)[..], &[0]].concat()),
        ("malformed: a control message: ends", numbered(1, 0)[..9].to_vec()),
        ("malformed: a control message: ends", Vec::new()),
    ];
    for (cause, plain) in evil_words {
        let mut evil = Evil::new(&scene);
        evil.say_plain(&plain);
        evil.lost_for(cause);
        eventually("its channel is closed", || evil.data[0].heard().closed);
    }
    scene.unharmed();
}

#[test]
fn a_forged_control_message_loses_the_peer() {
    let scene = Scene::with_patience(Duration::from_secs(3));
    let mut evil = Evil::new(&scene);
    let mut sealed = evil.secure().seal(&[0; 9]).unwrap();
    sealed[5] ^= 1;
    evil.control.write_all(&sealed).unwrap();
    evil.lost_for("no sign of life");
    scene.unharmed();
}

#[test]
fn fences_of_channels_that_do_not_exist_change_nothing() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    for (channel, generation) in [(1, 0), (u16::MAX, u32::MAX), (0, 7), (0, u32::MAX), (300, 1)] {
        evil.say(&fence(channel, generation));
    }
    for channel in [0, 9, u16::MAX] {
        evil.say(&ControlMessage::Expected { channel, generation: u32::MAX });
        let source = "1.2.3.4:5".parse().unwrap();
        evil.say(&ControlMessage::Dialling { channel, generation: u32::MAX, source });
    }
    let refused = (0..limits::WINDOW_FRAMES_MAX as u64).map(|number| (number, 1)).collect();
    evil.say(&ControlMessage::Fence {
        channel: 0,
        generation: 3,
        placed: u64::MAX,
        refused,
        reason: "\u{1b}[2Jx".into(),
    });
    evil.send(data(scene.key() ^ 1, 0, 0), &[]);
    assert_eq!(evil.data[0].answers(), [(0, Refusal::NoRegion)]);
    evil.say(&ControlMessage::Goodbye { reason: "enough".into() });
    eventually("it said goodbye", || matches!(evil.here.error(), Some(Error::PeerClosed { .. })));
    scene.unharmed();
}

#[test]
fn a_fence_that_claims_everything_placed_ends_only_its_own_transfers() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let source = scene.victim.register_zeroed(1000).unwrap();
    let remote = RemoteRegion { owner: Identity(hello(1).identity), key: 1, len: 1000, place: Place::Host };
    let write = evil.here.write(&source, 0, &remote, 0, 1000).unwrap();
    eventually("the write is sent", || !evil.data[0].heard().frames.is_empty());
    evil.say(&ControlMessage::Fence {
        channel: 0,
        generation: 0,
        placed: u64::MAX,
        refused: vec![(0, 2), (u64::MAX, 1)],
        reason: "evil".into(),
    });
    let error = write.wait(LIMIT).unwrap_err();
    assert!(matches!(&error, Error::AccessRefused { .. }), "{error:?}");
    evil.channel_lost_for("the peer lost it: evil");
    scene.unharmed();
}

#[test]
fn the_last_generation_of_a_channel_is_not_taken() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    evil.data[0].stream.shutdown(Shutdown::Both).unwrap();
    eventually("the channel is lost", || !evil.here.stats().lost_channels.is_empty());
    evil.say(&fence(0, 0));
    thread::sleep(Duration::from_millis(100));
    // After it there is no other number, and each is used once.
    let last = channel(evil.address, &evil.established, 0, u32::MAX);
    if let Ok(stream) = last {
        let _ = stream.shutdown(Shutdown::Both);
        evil.say(&fence(0, u32::MAX));
        thread::sleep(Duration::from_millis(200));
        assert!(channel(evil.address, &evil.established, 0, 0).is_err(), "generation 0 came again");
    }
    evil.control.shutdown(Shutdown::Both).unwrap();
    evil.lost_for("its host closed the control connection");
    scene.unharmed();
}

#[test]
fn a_channel_cannot_be_taken_twice_nor_beyond_the_session() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let error = channel(evil.address, &evil.established, 1, 0).unwrap_err();
    assert!(error.to_string().contains("fewer channels"), "{error}");
    let mut stream = channel(evil.address, &evil.established, 0, 0).expect("it holds the key");
    assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "a connection is not taken up twice");
    let other = Evil::new(&scene);
    let key = other.established.data_key.clone();
    let mixed = dial(evil.address, Initiator::data(evil.established.session, key, 0, 9)).unwrap_err();
    assert!(mixed.to_string().contains("could not prove the session's key"), "{mixed}");
    evil.send(data(scene.key() ^ 1, 0, 0), &[]);
    assert_eq!(evil.data[0].answers(), [(0, Refusal::NoRegion)]);
    scene.unharmed();
}

#[test]
fn a_configuration_beyond_our_limits_is_brought_within_them() {
    let scene = Scene::new();
    let config = Config { window: u32::MAX, chunk_bytes: 1, ..evil_config() };
    let evil = Evil::with(&scene, config);
    let stats = evil.here.stats();
    assert!(stats.window <= limits::WINDOW_FRAMES_MAX, "a window of {} frames", stats.window);
    // A silent peer is sent a window of frames and no more.
    let source = scene.victim.register_zeroed(1 << 20).unwrap();
    let remote =
        RemoteRegion { owner: Identity(hello(1).identity), key: 1, len: 1 << 20, place: Place::Host };
    let write = evil.here.write(&source, 0, &remote, 0, 1 << 20).unwrap();
    eventually("a window is full", || {
        evil.data[0].heard().frames.len() >= limits::WINDOW_FRAMES_MAX.min(stats.window)
    });
    thread::sleep(Duration::from_millis(100));
    let frames = evil.data[0].heard().frames.len();
    assert!(frames <= limits::WINDOW_FRAMES_MAX, "{frames} frames in flight");
    write.cancel();
    scene.unharmed();
}

#[test]
fn a_flood_of_control_messages_holds_up_nobody_else() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let mut sealed = Vec::new();
    for number in 1..=1_000_000 {
        let frame = Frame { received: 0, numbered: Some((number, &ControlMessage::Drain)) };
        sealed.extend(evil.secure().seal(&frame.encode()).unwrap());
    }
    let stop = Arc::new(AtomicBool::new(false));
    let (ended, mut control) = (stop.clone(), evil.control.try_clone().unwrap());
    let flooder = thread::spawn(move || {
        for batch in sealed.chunks(256 << 10) {
            if ended.load(Ordering::SeqCst) || control.write_all(batch).is_err() {
                return false;
            }
        }
        true
    });
    let (mut slowest, mut rounds) = (Duration::ZERO, 0);
    while !flooder.is_finished() && slowest < HELD_UP {
        let start = Instant::now();
        assert!(scene.victim.peer_count() >= 2);
        let fresh = endpoint();
        fresh.connect(scene.address(), LIMIT).unwrap().close(LIMIT).unwrap();
        drop(scene.victim.accept(LIMIT).unwrap());
        (slowest, rounds) = (slowest.max(start.elapsed()), rounds + 1);
    }
    stop.store(true, Ordering::SeqCst);
    let whole = flooder.join().unwrap();
    assert!(slowest < HELD_UP, "a fresh peer took {slowest:?}");
    assert!(rounds > 1 || whole, "{rounds}");
    scene.unharmed();
}

// ---- evil ends that answer ----

/// Answers the next connection; no outcome when it was refused.
fn answer(listener: &TcpListener, desk: &Shared) -> (TcpStream, Option<Outcome>) {
    eventually("a connection", || knocks(listener));
    let (mut stream, _) = listener.accept().unwrap();
    let mut responder = Responder::new(desk.clone());
    loop {
        stream.write_all(&responder.take_output()).unwrap();
        if let Some(outcome) = responder.finished() {
            return (stream, Some(outcome));
        }
        let mut bytes = vec![0; responder.want()];
        let Ok(count @ 1..) = stream.read(&mut bytes) else { return (stream, None) };
        if responder.feed(&bytes[..count]).is_err() {
            stream.write_all(&responder.take_output()).unwrap();
            return (stream, None);
        }
    }
}

/// Hears the next frame of a control connection.
fn hear_frame(control: &mut TcpStream, secure: &mut Secure) -> Frame<ControlMessage> {
    let mut incoming = vec![0; 2];
    control.read_exact(&mut incoming).unwrap();
    let len = usize::from(u16::from_le_bytes([incoming[0], incoming[1]]));
    incoming.resize(2 + len, 0);
    control.read_exact(&mut incoming[2..]).unwrap();
    Frame::decode(&secure.open(&mut incoming).unwrap().expect("a whole frame")).unwrap()
}

/// Hears which data connection will come, and from where.
fn hear_dialling(control: &mut TcpStream, secure: &mut Secure) -> (u16, u32, SocketAddr) {
    loop {
        let numbered = hear_frame(control, secure).numbered;
        if let Some((_, ControlMessage::Dialling { channel, generation, source })) = numbered {
            return (channel, generation, source);
        }
    }
}

/// Says a control message with this number.
fn say_sealed(control: &mut TcpStream, secure: &mut Secure, number: u64, message: &ControlMessage) {
    let frame = Frame { received: 0, numbered: Some((number, message)) };
    control.write_all(&secure.seal(&frame.encode()).unwrap()).unwrap();
}

/// Answers one control connection and its channels as somebody who gives every session the same number.
fn evil_acceptor(listener: &TcpListener, desk: &Shared) -> Vec<TcpStream> {
    let mut streams = Vec::new();
    loop {
        let (stream, outcome) = answer(listener, desk);
        streams.push(stream);
        match outcome {
            Some(Outcome::Control(mut established)) => {
                desk.remember(&established);
                let control = streams.last_mut().expect("just pushed");
                for number in 1..=2 {
                    let (channel, generation, _) = hear_dialling(control, &mut established.secure);
                    let expected = ControlMessage::Expected { channel, generation };
                    say_sealed(control, &mut established.secure, number, &expected);
                }
            }
            Some(Outcome::Data { channel: 1, .. }) | None => return streams,
            Some(Outcome::Data { .. }) => {}
        }
    }
}

/// A listener for evil ends that answer, and what they know.
fn evil_desk() -> (SocketAddr, TcpListener, Shared) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let desk = Shared::new(Some(SECRET));
    desk.desk().hello.addresses.clear();
    (address, listener, desk)
}

fn refuse(desk: &Shared, code: RefusalCode, text: &str) {
    desk.desk().refuse = Some(bootstrap::Refusal::new(code, text));
}

#[test]
fn data_connections_are_announced_all_at_once_and_dialled_when_they_are_expected() {
    let dialler = endpoint();
    let (address, listener, desk) = evil_desk();
    let connecting = dialler.connecting(address).unwrap();
    let (mut control, outcome) = answer(&listener, &desk);
    let Some(Outcome::Control(mut established)) = outcome else { panic!("{outcome:?}") };
    desk.remember(&established);
    // Both are heard of before either is answered.
    let announced: Vec<_> = (0..2).map(|_| hear_dialling(&mut control, &mut established.secure)).collect();
    assert!(!knocks(&listener), "dialled before it was expected");
    let (mut said, mut streams) = (0, Vec::new());
    for (channel, generation, source) in announced {
        for generation in [generation + 1, generation] {
            said += 1;
            let answer = ControlMessage::Expected { channel, generation };
            say_sealed(&mut control, &mut established.secure, said, &answer);
        }
        let (stream, outcome) = answer(&listener, &desk);
        assert_eq!(stream.peer_addr().unwrap(), source);
        let dialled =
            matches!(outcome, Some(Outcome::Data { channel: it, generation: 0, .. }) if it == channel);
        assert!(dialled, "{outcome:?}");
        assert!(!knocks(&listener), "dialled before it was expected");
        streams.push(stream);
    }
    connecting.wait(LIMIT).unwrap();
}

#[test]
fn a_peer_that_expects_no_data_connection_is_named_for_it() {
    let dialler = endpoint();
    let (address, listener, desk) = evil_desk();
    let connecting = dialler.connecting(address).unwrap();
    let (mut control, outcome) = answer(&listener, &desk);
    let Some(Outcome::Control(mut established)) = outcome else { panic!("{outcome:?}") };
    let mut end = None;
    eventually("it is given up", || {
        // It says that it is alive, and nothing else.
        let alive = Frame { received: 0, numbered: None };
        let _ = control.write_all(&established.secure.seal(&alive.encode()).unwrap());
        thread::sleep(Duration::from_millis(50));
        end = connecting.poll();
        end.is_some()
    });
    let error = end.unwrap().unwrap_err();
    assert!(matches!(&error, Error::PeerLost { .. }), "{error:?}");
    assert!(error.to_string().contains("did not answer on the control session"), "{error}");
}

#[test]
fn a_data_connection_that_is_announced_is_expected() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let source = "10.1.2.3:4567".parse().unwrap();
    for channel in [9, 0] {
        evil.say(&ControlMessage::Dialling { channel, generation: 5, source });
    }
    let Evil { control, established, .. } = &mut evil;
    let answer = loop {
        if let Some((_, message)) = hear_frame(control, &mut established.secure).numbered {
            break message;
        }
    };
    assert_eq!(answer, ControlMessage::Expected { channel: 0, generation: 5 }, "of a channel that exists");
    scene.unharmed();
}

#[test]
fn only_the_code_of_a_refusal_ends_a_session() {
    let dialler = endpoint();
    let (address, listener, desk) = evil_desk();
    let acceptor = thread::spawn({
        let desk = desk.clone();
        move || (evil_acceptor(&listener, &desk), listener)
    });
    let peer = dialler.connect(address, LIMIT).unwrap();
    let (streams, listener) = acceptor.join().unwrap();
    // All paths are dialled at once, again and again, until one is answered.
    refuse(&desk, RefusalCode::Limit, "unknown session: the session is over");
    streams[0].shutdown(Shutdown::Both).unwrap();
    for _ in 0..4 {
        assert!(answer(&listener, &desk).1.is_none());
    }
    desk.desk().refuse = None;
    let resumed = answer(&listener, &desk);
    assert!(matches!(resumed.1, Some(Outcome::Control(_))), "{resumed:?}");
    assert_eq!(peer.error(), None);
    // It goes by the code, whatever the text.
    refuse(&desk, RefusalCode::UnknownSession, "never heard of it");
    resumed.0.shutdown(Shutdown::Both).unwrap();
    eventually("the peer is lost", || {
        if knocks(&listener) {
            answer(&listener, &desk);
        }
        peer.error().is_some()
    });
    let error = peer.error().unwrap().to_string();
    assert!(error.contains("it restarted, or gave us up") && error.contains("never heard of it"), "{error}");
    drop(streams);
}

/// Whether a connection waits to be accepted.
fn knocks(listener: &TcpListener) -> bool {
    let mut polled = [PollFd::new(listener, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec::default())).unwrap() > 0
}

#[test]
fn one_path_to_somebody_else_does_not_end_a_session() {
    let dialler = endpoint();
    let (address, listener, desk) = evil_desk();
    let acceptor = thread::spawn({
        let desk = desk.clone();
        move || (evil_acceptor(&listener, &desk), listener)
    });
    let peer = dialler.connect(address, LIMIT).unwrap();
    let (mut streams, listener) = acceptor.join().unwrap();
    refuse(&desk, RefusalCode::UnknownSession, "that is somebody else");
    streams[0].shutdown(Shutdown::Both).unwrap();
    assert!(answer(&listener, &desk).1.is_none());
    // The other path is slower to answer than the refusal is to be heard.
    thread::sleep(Duration::from_millis(300));
    desk.desk().refuse = None;
    let (stream, outcome) = answer(&listener, &desk);
    assert!(matches!(outcome, Some(Outcome::Control(_))), "{outcome:?}: {:?}", peer.error());
    assert_eq!(peer.error(), None);
    streams.push(stream);
}

#[test]
fn a_busy_end_is_dialled_again() {
    let (address, listener, desk) = evil_desk();
    let acceptor = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 64]).unwrap();
        stream.write_all(b"\xff\xff\x03\x04\x00full").unwrap();
        drop(stream);
        (evil_acceptor(&listener, &desk), listener)
    });
    let peer = endpoint().connect(address, LIMIT).unwrap();
    drop(acceptor.join().unwrap());
    drop(peer);
}

#[test]
fn a_forged_resumption_does_not_end_a_session() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let resume = |received| {
        let Established { session, data_key, .. } = &*evil.established;
        let purpose = Purpose::Resume { session: *session, received, data_key: data_key.clone() };
        let initiator = Initiator::control(Some(SECRET.as_bytes()), hello(1), purpose).unwrap();
        let (stream, outcome) = dial(scene.address(), initiator).unwrap();
        let Outcome::Control(established) = outcome else { panic!("{outcome:?}") };
        (stream, established)
    };
    let (mut stream, mut established) = resume(0);
    let mut forged = established.secure.seal(&[0; 9]).unwrap();
    forged[5] ^= 1;
    stream.write_all(&forged).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "the victim hangs up");
    (evil.control, evil.established) = resume(0);
    evil.say(&ControlMessage::Goodbye { reason: "enough".into() });
    eventually("it said goodbye", || evil.here.error().is_some());
    assert!(matches!(evil.here.error(), Some(Error::PeerClosed { .. })), "{:?}", evil.here.error());
    scene.unharmed();
}

#[test]
fn a_session_number_that_is_taken_does_not_replace_its_session() {
    let dialler = endpoint();
    let acceptor = || {
        let (address, listener, desk) = evil_desk();
        (address, thread::spawn(move || (evil_acceptor(&listener, &desk), listener)))
    };
    let (first_address, first_thread) = acceptor();
    let first = dialler.connect(first_address, LIMIT).unwrap();
    let streams = first_thread.join().unwrap();
    let (second_address, _second_thread) = acceptor();
    let error = dialler.connect(second_address, LIMIT).unwrap_err();
    assert!(matches!(&error, Error::Refused { .. }), "{error:?}");
    assert!(error.to_string().contains("session"), "{error}");
    assert_eq!(first.error(), None);
    assert_eq!(dialler.peer_count(), 1);
    drop(streams);
}
