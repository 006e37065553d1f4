//! Lanes of a backend of this crate, which carry nothing, while they are set up.

use crate::LIMIT;
use ferrywire::memory::Memory;
use ferrywire::net::sim::{ResetSeen, Side, SimNet};
use ferrywire::net::{Conn, Nic, Transport};
use ferrywire::payload::{
    BackendConfig, InFlight, Incompatible, Lane, LaneBy, PayloadBackend, Post, Progress, Run, Setup,
    SharedBackend, Step, Terms, Ticket, Ungathered, Way,
};
use ferrywire::{Config, Endpoint, Error, MemoryLocation, Peer, limits};
use ferrywire_proto::handshake::testing::Shared;
use ferrywire_proto::handshake::{
    Config as SessionConfig, Established, Outcome, Refusal, RefusalCode, Responder,
};
use ferrywire_proto::session::{ControlMessage, Frame};
use ferrywire_sys::poll::Waker;
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::mem::ManuallyDrop;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

const IDLE: &str = "idle lanes";

/// A backend whose lanes need a connection of their own.
#[derive(Clone, Debug, Default)]
struct Idle {
    state: Arc<BackendState>,
}

/// What the tests observe of a backend, and request of it.
#[derive(Debug, Default)]
struct BackendState {
    has_asked_for_connection: AtomicBool,
    /// Number of set-ups that have begun.
    begun: AtomicUsize,
    /// Whether every set-up fails at once.
    fails: AtomicBool,
}

struct IdleSetup {
    state: Arc<BackendState>,
    since: Duration,
    /// Whether this end dials the lane's connection and has not asked for it.
    to_dial: bool,
    conn: Option<Box<dyn Conn>>,
    has_reported: bool,
    peer_is_ready: bool,
}

struct IdleLane {
    _conn: Option<Box<dyn Conn>>,
}

impl BackendConfig for Idle {
    fn name(&self) -> &str {
        IDLE
    }

    fn is_optional(&self) -> bool {
        false
    }

    fn open(&self, _endpoint: &Config, _nics: &[Nic]) -> Result<SharedBackend, Error> {
        Ok(Arc::new(self.clone()))
    }
}

impl PayloadBackend for Idle {
    fn name(&self) -> &str {
        IDLE
    }

    fn transport(&self) -> &'static str {
        IDLE
    }

    fn gpu(&self) -> Option<MemoryLocation> {
        None
    }

    fn message_bytes_max(&self) -> usize {
        limits::LANE_MESSAGE_BYTES_DEFAULT
    }

    fn terms(&self) -> Terms {
        Terms::new(IDLE, &[], false)
    }

    fn agree(&self, theirs: &Terms, _same_host: bool, _session: &SessionConfig) -> Result<(), Incompatible> {
        self.terms().agree(theirs)
    }

    fn begin(
        self: Arc<Self>,
        _transport: &dyn Transport,
        _conn: &dyn Conn,
        dials: bool,
        now: Duration,
        _waker: Waker,
    ) -> Result<Box<dyn Setup>, String> {
        self.state.begun.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(IdleSetup {
            state: self.state.clone(),
            since: now,
            to_dial: dials,
            conn: None,
            has_reported: false,
            peer_is_ready: false,
        }))
    }

    fn setup_timeout(&self) -> Duration {
        limits::LANE_SETUP_TIMEOUT
    }

    fn stall_timeout(&self) -> Duration {
        limits::LANE_STALL_TIMEOUT_DEFAULT
    }
}

impl Setup for IdleSetup {
    fn wants_connection(&mut self) -> bool {
        let asks = std::mem::take(&mut self.to_dial);
        self.state.has_asked_for_connection.fetch_or(asks, Ordering::SeqCst);
        asks
    }

    fn connected(&mut self, conn: Box<dyn Conn>) -> Result<(), String> {
        self.conn.replace(conn).map_or(Ok(()), |_| Err("a second connection for one lane".into()))
    }

    fn peer_listens(&mut self, _handle: [u8; limits::LANE_HANDLE_BYTES]) -> Result<(), String> {
        self.peer_is_ready = true;
        Ok(())
    }

    fn poll(&mut self, _now: Duration) -> Progress {
        if self.state.fails.load(Ordering::SeqCst) {
            return Progress::Failed("the test lets it fail".into());
        }
        if self.conn.is_none() {
            return Progress::Pending;
        }
        if !std::mem::replace(&mut self.has_reported, true) {
            return Progress::Handle(Box::new([0; limits::LANE_HANDLE_BYTES]));
        }
        if !self.peer_is_ready {
            return Progress::Pending;
        }
        let by = LaneBy {
            plugin: IDLE.into(),
            version: "1".into(),
            device: 0,
            device_name: "none".into(),
            devmem: None,
        };
        Progress::Ready(Box::new(IdleLane { _conn: self.conn.take() }), by)
    }

    fn age(&self, now: Duration) -> Duration {
        now.saturating_sub(self.since)
    }
}

const NO_PAYLOAD: &str = "this lane carries nothing";

impl Lane for IdleLane {
    fn window(&self) -> usize {
        limits::LANE_WINDOW_DEFAULT
    }

    fn message_bytes_max(&self) -> usize {
        limits::LANE_MESSAGE_BYTES_DEFAULT
    }

    fn isend(&mut self, _run: &Run) -> Post {
        Post::Failed(NO_PAYLOAD.into())
    }

    fn irecv(&mut self, _run: &Run) -> Post {
        Post::Failed(NO_PAYLOAD.into())
    }

    fn test_send(&mut self, _ticket: Ticket) -> Step {
        Step::Pending
    }

    fn test_recv(&mut self, _ticket: Ticket) -> Step {
        Step::Pending
    }

    fn scatters(&self, _memory: &Memory) -> bool {
        false
    }

    fn gather(&mut self, _number: u64, _run: &Run) -> Result<(), Ungathered> {
        Err(Ungathered::Failed(NO_PAYLOAD.into()))
    }

    fn gathered(&mut self, _number: u64) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn consumed(&mut self, _ticket: Ticket) -> Result<(), String> {
        Ok(())
    }

    fn copy(&mut self, _way: Way, _slot: &Run, _ranges: &[Run]) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn slot_memory(&self, _like: Option<&Memory>, _bytes: usize) -> Result<Arc<Memory>, String> {
        Err(NO_PAYLOAD.into())
    }

    fn forget_revoked(&mut self, _busy: &dyn Fn(&Arc<Memory>) -> bool) {}

    fn close(&mut self, _in_flight: InFlight) {}

    fn describe(&self) -> String {
        IDLE.into()
    }
}

/// Regression: the session went on without lanes or, where lanes are required, the connect failed. When many endpoints connect
/// at once, the peer refuses as busy the oldest connection that it has not heard, which may be that of a lane.
#[test]
fn a_lane_whose_connection_a_busy_peer_refuses_is_dialled_again() {
    let backend = Idle::default();
    let builder = || Endpoint::builder().threads(0).channels(1).payload_backend(backend.clone());
    let far = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let (near, address) = (builder().build().unwrap(), far.listen_addresses()[0]);
    let connecting = near.start_connect(address).unwrap();
    let start = Instant::now();
    while !backend.state.has_asked_for_connection.load(Ordering::SeqCst) {
        assert!(start.elapsed() < LIMIT, "no lane is set up");
        far.progress();
        near.progress();
    }
    // The lane's connection is dialled. It sends its first bytes when its endpoint is polled.
    let crowd = limits::HANDSHAKES_PENDING_MAX + 10;
    let _crowd: Vec<_> = (0..crowd).map(|_| TcpStream::connect(address).unwrap()).collect();
    while far.progress() {}
    let peer = loop {
        near.progress();
        far.progress();
        if let Some(result) = connecting.poll() {
            break result.expect("the other end was busy for a moment");
        }
        assert!(start.elapsed() < LIMIT, "the endpoint never connects");
    };
    assert_eq!((peer.stats().transport, peer.error()), (IDLE, None));
    [near, far].iter().for_each(|end| drop(end.close(Duration::ZERO)));
}

/// An accepting end without an engine, which refuses the first connection of a lane as busy.
struct BusyOnce {
    listener: TcpListener,
    desk: Shared,
    control: Option<(TcpStream, Box<Established>)>,
    unread: Vec<u8>,
    said: u64,
    data: Vec<TcpStream>,
}

impl BusyOnce {
    fn new() -> BusyOnce {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let desk = Shared::new(None);
        desk.desk().hello.addresses.clear();
        BusyOnce { listener, desk, control: None, unread: Vec::new(), said: 0, data: Vec::new() }
    }

    /// The data connections that were dialled: session, channel and generation of each.
    fn dialled(&self) -> Vec<String> {
        let decided = self.desk.desk().decided.clone();
        decided.into_iter().filter(|what| what.starts_with("data")).collect()
    }

    /// Answers a connection that waits, and the announcements of data connections.
    fn serve(&mut self) {
        if let Ok((stream, _)) = self.listener.accept() {
            stream.set_nonblocking(false).unwrap();
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            let is_of_lane = self.dialled().len() == 1;
            let busy = || Refusal::new(RefusalCode::Busy, "for a moment");
            self.desk.desk().refuse = is_of_lane.then(busy);
            self.answer(stream);
        }
        let mut announced = Vec::new();
        let Some((control, established)) = &mut self.control else { return };
        let mut buffer = [0; 4096];
        if let Ok(count) = control.read(&mut buffer) {
            self.unread.extend_from_slice(&buffer[..count]);
        }
        while let Some(plain) = established.secure.open(&mut self.unread).unwrap() {
            let frame: Frame<ControlMessage> = Frame::decode(&plain).unwrap();
            if let Some((_, ControlMessage::Dialling { channel, generation, .. })) = frame.numbered {
                announced.push(ControlMessage::Expected { channel, generation });
            }
        }
        for message in announced {
            self.said += 1;
            self.say(Frame { received: 0, numbered: Some((self.said, &message)) });
        }
        self.say(Frame { received: 0, numbered: None });
    }

    fn answer(&mut self, mut stream: TcpStream) {
        let mut responder = Responder::new(self.desk.clone());
        loop {
            stream.write_all(&responder.take_output()).unwrap();
            match responder.finished() {
                Some(Outcome::Control(established)) => {
                    self.desk.remember(&established);
                    stream.set_nonblocking(true).unwrap();
                    return self.control = Some((stream, established));
                }
                Some(Outcome::Data { .. }) => return self.data.push(stream),
                None => {}
            }
            let mut bytes = vec![0; responder.want()];
            let Ok(count @ 1..) = stream.read(&mut bytes) else { return };
            if responder.feed(&bytes[..count]).is_err() {
                return stream.write_all(&responder.take_output()).unwrap();
            }
        }
    }

    fn say(&mut self, frame: Frame<&ControlMessage>) {
        let Some((control, established)) = &mut self.control else { return };
        control.write_all(&established.secure.seal(&frame.encode()).unwrap()).unwrap();
    }
}

/// A recorded acceptance of a connection would be valid for another one with its number.
#[test]
fn a_lane_is_dialled_again_under_a_number_of_its_own() {
    let mut far = BusyOnce::new();
    let near = Endpoint::builder().threads(1).channels(1).payload_backend(Idle::default()).build().unwrap();
    let connecting = near.start_connect(far.listener.local_addr().unwrap()).unwrap();
    let of_lanes = |far: &BusyOnce| far.dialled().iter().filter(|what| what.contains(" 32768 ")).count();
    let start = Instant::now();
    while of_lanes(&far) < 2 {
        assert!(start.elapsed() < LIMIT, "a lane is not dialled again: {:?}", far.dialled());
        assert!(connecting.poll().is_none());
        far.serve();
        thread::sleep(Duration::from_millis(5));
    }
    let dialled = far.dialled();
    let numbers: BTreeSet<&String> = dialled.iter().collect();
    assert_eq!(numbers.len(), dialled.len(), "a number was used twice: {dialled:?}");
    drop(near.close(Duration::ZERO));
}

/// Two connected endpoints of a simulated network, which the test polls.
struct SimPair {
    net: Arc<SimNet>,
    /// The connecting end, then the accepting end. Never dropped: that would wait for a clock which only the test advances.
    ends: ManuallyDrop<[Endpoint; 2]>,
    near: Peer,
    _far: Peer,
}

impl SimPair {
    /// Connects two endpoints, each with its backend.
    fn connect(channels: usize, backends: [&Idle; 2]) -> SimPair {
        let net = SimNet::new(0);
        let [near, far] = [1u8, 2].map(|last| {
            let address = IpAddr::from([10, 0, 0, last]);
            let host = net.host(&format!("host{last}"), &[("eth0", address)]);
            let builder = Endpoint::builder().threads(0).channels(channels).transport(host);
            let builder = builder.payload_backend(backends[usize::from(last) - 1].clone());
            let builder = builder.secret("a secret for simulated hosts");
            builder.listen((address, 7420).into()).build().unwrap()
        });
        let connecting = near.start_connect(far.listen_addresses()[0]).unwrap();
        let (mut connected, mut accepted) = (None, None);
        while connected.is_none() || accepted.is_none() {
            assert!(net.now() < LIMIT, "they never connect");
            pass([&near, &far], &net, Duration::from_millis(1));
            connected = connected.or_else(|| connecting.poll());
            accepted = accepted.or_else(|| far.accept(Duration::ZERO).ok());
        }
        let (near_peer, far_peer) = (connected.unwrap().unwrap(), accepted.unwrap());
        SimPair { net, ends: ManuallyDrop::new([near, far]), near: near_peer, _far: far_peer }
    }

    fn pass(&self, time: Duration) {
        pass(self.ends.each_ref(), &self.net, time);
    }
}

/// Lets virtual time pass while both endpoints are polled.
fn pass(ends: [&Endpoint; 2], net: &SimNet, time: Duration) {
    const STEP: Duration = Duration::from_micros(50);
    let until = net.now() + time;
    while net.now() < until {
        let worked = ends.map(Endpoint::progress);
        if worked == [false; 2] {
            net.advance(STEP);
        } else {
            net.advance(Duration::from_micros(1));
        }
    }
}

/// Regression: after a set-up that failed at the end that dials, the channel was dialled again without any pause.
#[test]
fn a_lane_that_cannot_be_set_up_is_tried_again_after_a_pause() {
    let backends = [Idle::default(), Idle::default()];
    let pair = SimPair::connect(2, backends.each_ref());
    // Long enough for the channel to be dialled again as soon as it is lost.
    pair.pass(2 * limits::REDIAL_INTERVAL);
    let begun = || backends[0].state.begun.load(Ordering::SeqCst);
    let before = begun();
    backends[0].state.fails.store(true, Ordering::SeqCst);
    let channel = pair.near.stats().channels[1].clone();
    let of_channel = pair.net.connections().into_iter().find(|conn| conn.dialler == channel.local);
    pair.net.reset(of_channel.unwrap().id, Side::Dialler, ResetSeen::AtOnce);
    pair.pass(Duration::from_secs(3));
    let more = begun() - before;
    assert!((2..=8).contains(&more), "{more} set-ups in 3 s");
    assert_eq!(pair.near.error(), None);
    backends[0].state.fails.store(false, Ordering::SeqCst);
    let is_up = || pair.near.stats().channels.iter().all(|channel| channel.alive);
    while !is_up() {
        assert!(pair.net.now() < LIMIT, "the channel never comes back");
        pair.pass(Duration::from_millis(20));
    }
}
