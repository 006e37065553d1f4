//! Lanes of a backend of this crate, which carry nothing, while they are set up.

use crate::LIMIT;
use ferrywire::memory::Memory;
use ferrywire::net::{Conn, Nic, Transport};
use ferrywire::payload::{
    BackendConfig, InFlight, Incompatible, Lane, LaneBy, PayloadBackend, Post, Progress, Run, Setup,
    SharedBackend, Step, Terms, Ticket, Ungathered, Way,
};
use ferrywire::{Config, Endpoint, Error, MemoryLocation, limits};
use ferrywire_proto::handshake::Config as SessionConfig;
use ferrywire_sys::poll::Waker;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

const IDLE: &str = "idle lanes";

/// A backend whose lanes need a connection of their own.
#[derive(Clone, Debug, Default)]
struct Idle {
    observed: Arc<Observed>,
}

/// What the tests observe of a backend.
#[derive(Debug, Default)]
struct Observed {
    has_asked_for_connection: AtomicBool,
}

struct IdleSetup {
    observed: Arc<Observed>,
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
        Ok(Box::new(IdleSetup {
            observed: self.observed.clone(),
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
        self.observed.has_asked_for_connection.fetch_or(asks, Ordering::SeqCst);
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
    while !backend.observed.has_asked_for_connection.load(Ordering::SeqCst) {
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
