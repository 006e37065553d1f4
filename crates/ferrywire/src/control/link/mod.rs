//! One peer's control session and channels: keeping both alive, fencing what is lost, closing.
//!
//! A link's life: `settling -> up -> draining -> over`, and from anywhere `dying -> over`. A channel's:
//! `down -> announced -> expected -> dialling -> up -> fencing -> down`. When a channel is lost, each side
//! closes its end, tells the other what it had placed, and learns the same; only then is the rest sent
//! again. Where payload goes over lanes, a channel is up when its lane is too: `dialling -> lane -> up`.
//!
//! Invariant: a peer's operations are failed only after all its channels have been closed here, so that
//! nothing is placed into their memory afterwards.
//! Read next: `session.rs`, `setup.rs`, `fences.rs`, `closing.rs`; then `../dial.rs` and `../pairs.rs`.

mod closing;
mod fences;
mod session;
mod setup;

use super::accept_queue::{AcceptQueue, Permit};
use super::dial::{Announced, ConnectTarget, bulk_options};
use super::lanes::Lanes;
use super::pairs::{Pair, leads_to_us, pairs};
use super::{read_in, write_out};
use crate::core::context::Context;
use crate::core::peer::{PeerInfo, PeerState};
use crate::core::queue::Entry;
use crate::core::worker::Workers;
use crate::error::Error;
use crate::payload::payload_backend::SharedBackend;
use crate::payload::terms::{Terms, reason_without};
use ferrywire_net::{Conn, ConnOptions};
use ferrywire_proto::Identity;
use ferrywire_proto::channel_assignment::spread;
use ferrywire_proto::clock::silence_max;
use ferrywire_proto::handshake::{Config as SessionConfig, DataKey, Established, Hello};
use ferrywire_proto::limits;
use ferrywire_proto::session::{ControlMessage, Session};
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How a farewell begins that is no orderly one; the reason follows.
const GAVE_UP: &str = "gave up: ";
/// Likewise, where the end that connects is to come back and do without lanes.
const WITHOUT_LANES: &str = "without lanes: ";
/// Socket calls that one turn makes to hear one peer.
const READS_PER_TURN: usize = 8;

/// Which end opened the session; that end dials.
enum Role {
    /// With the paths to the peer, and which of them each channel takes.
    Connector {
        target: ConnectTarget,
        pairs: Vec<Pair>,
        dealt: Vec<usize>,
    },
    Acceptor,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Channels are being set up, since then.
    Settling,
    Up,
    /// We asked the peer to finish, and wait for it.
    Draining,
    /// All is finished; the farewell has until then to arrive.
    Leaving {
        until: Duration,
    },
    /// The session is broken; channels are being closed.
    Dying,
    Over,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Slot {
    Down {
        dial_at: Duration,
    },
    /// The peer was told what will come, and has not answered.
    Announced {
        since: Duration,
    },
    /// It has: to be dialled at once.
    Expected,
    Dialling,
    /// Its connection stands, its lane does not yet.
    Lane,
    Up,
    Fencing,
}

/// Resumptions that may wait for the other end's choice: one for each path it may have dialled.
const CANDIDATES_MAX: usize = limits::ADDRESSES_MAX + 1;

/// The two halves of a lost connection's fence.
#[derive(Default)]
struct Fence {
    ours: Option<Vec<(u64, Entry)>>,
    theirs: Option<(u64, Vec<(u64, u8)>)>,
    /// Why our lane failed, if that is what ended the connection, and what the peer says to it.
    lane_failed: Option<String>,
    their_reason: String,
}

pub(super) struct Link {
    workers: Arc<Workers>,
    peer: Arc<PeerState>,
    session: Session,
    conn: Option<Box<dyn Conn>>,
    /// Addresses that the peer's connections came from or went to.
    hosts: Vec<IpAddr>,
    /// When the other end last resumed the session.
    resumed_at: Option<Duration>,
    /// Resumptions of the other end, which dials several paths at once and speaks on the one it keeps.
    candidates: Vec<(Box<dyn Conn>, Box<Established>)>,
    output: Vec<u8>,
    /// Since when the peer is not heard, because too much waits for it to be read.
    unread_since: Option<Duration>,
    /// Whether the poller waits for what the peer says, as it does on every new connection.
    listens: bool,
    role: Role,
    data_key: DataKey,
    limit: Duration,
    stage: Stage,
    slots: Vec<(Slot, u32)>,
    /// For each channel the first generation that may still come up: those below are fenced, and what
    /// their connections have yet to deliver must not land.
    least: Vec<u32>,
    /// When each channel last came up.
    up_since: Vec<Duration>,
    fences: BTreeMap<(u16, u32), Fence>,
    pub(super) lanes: Lanes,
    /// Both ends, as far as it is known, could do without lanes.
    lanes_optional: bool,
    /// Why a session without them has to take this one's place.
    without: Option<String>,
    /// What ends the session once the peer has been told.
    last_words: Option<Error>,
    /// Data connections of ours that are bound and not dialled.
    announced: BTreeMap<u16, Announced>,
    /// Where the peer's latest connection of each channel comes from, and which it is.
    sources: BTreeMap<u16, (u32, SocketAddr)>,
    started: Duration,
    /// When the peer's kernel closed the control connection, if it has not come back.
    closed_at: Option<Duration>,
    resume_at: Duration,
    resuming: bool,
    path_checked: Duration,
    path_dead: bool,
    last_trouble: Option<Error>,
    /// A data connection was dialled, and did not come about.
    dial_failed: bool,
    /// A resumption was refused because nobody there knows the session.
    disowned: Option<String>,
    /// Who waits for the peer to be up; `None` once told.
    accept_queue: Option<Arc<AcceptQueue>>,
    /// Its place there, until it is in the queue.
    permit: Option<Permit>,
    error: Option<Error>,
    peer_drains: bool,
    drain_told: bool,
    drained_told: bool,
    peer_drained: bool,
    close_by: Option<Duration>,
    /// Somebody waits for its end, and not for that of all.
    closed_alone: bool,
    /// Whoever did was told that it has not finished.
    told: bool,
    /// Where nobody holds the peer any more: what has got on of it last, and when.
    drained: Option<(u64, Duration)>,
}

impl Link {
    /// The connecting end's link, right after its handshake.
    #[expect(clippy::too_many_arguments, reason = "each is a different fact, and one caller names them")]
    pub fn connected(
        workers: Arc<Workers>,
        dialled_before: usize,
        conn: Box<dyn Conn>,
        target: ConnectTarget,
        established: Established,
        queue: Arc<AcceptQueue>,
        me: &Hello,
        now: Duration,
    ) -> Link {
        let context = &*workers.context;
        let address = target.address;
        let nics = context.transport.nics().unwrap_or_default();
        let (chosen, there) = (&context.config.nics, &established.peer_hello);
        let is_ours = |listed| leads_to_us(&nics, me, there, listed);
        let pairs = pairs(&nics, chosen, address, &there.addresses, is_ours);
        let speeds: Vec<Option<u32>> = pairs.iter().map(|pair| pair.nic.as_ref()?.speed_mbps).collect();
        // With little in flight the first channels carry it all: of several peers on different NICs.
        let dealt = spread(&speeds, dialled_before, usize::from(established.config.channels));
        let role = Role::Connector { target, pairs, dealt };
        Link::new(workers, conn, address, established, role, queue, me, now)
    }

    /// The accepting end's link.
    pub fn accepted(
        workers: Arc<Workers>,
        conn: Box<dyn Conn>,
        remote: SocketAddr,
        established: Established,
        queue: Arc<AcceptQueue>,
        me: &Hello,
        now: Duration,
    ) -> Link {
        let permit = queue.permit();
        let link = Link::new(workers, conn, remote, established, Role::Acceptor, queue, me, now);
        Link { permit: Some(permit), ..link }
    }

    #[expect(clippy::too_many_arguments, reason = "each is a different fact, and two callers name them")]
    fn new(
        workers: Arc<Workers>,
        conn: Box<dyn Conn>,
        remote: SocketAddr,
        established: Established,
        role: Role,
        queue: Arc<AcceptQueue>,
        me: &Hello,
        now: Duration,
    ) -> Link {
        let context = &workers.context;
        let Established { secure, peer_hello, session: id, data_key, config, .. } = established;
        let name = match peer_hello.label.is_empty() {
            true => remote.to_string(),
            false => format!("{remote} ({})", peer_hello.label),
        };
        // Two ends that cannot tell are reckoned to share a host where their addresses say so: some plugins end the process there.
        let same_host = peer_hello.shares_host(me).unwrap_or_else(|| conn.within_host());
        let (carrier, refused) = carrier_of(context, &config, same_host);
        let (transport, transport_why) = transport_of(context, carrier.as_ref(), &config);
        let lanes_optional = carrier.as_ref().is_some_and(|carrier| carrier.optional())
            && Terms::decode(&config.extra).optional();
        let info = PeerInfo {
            session: id,
            identity: Identity(peer_hello.identity),
            name,
            label: peer_hello.label.clone(),
            address: remote,
            channels: usize::from(config.channels),
            chunk_bytes: config.chunk_bytes as usize,
            window: (config.window as usize).min(limits::WINDOW_FRAMES_MAX),
            crc: config.crc,
            same_host,
            lanes: carrier.is_some(),
            transport,
            transport_why,
        };
        let refused = refused.map(|why| Error::Refused { address: info.name.clone(), why });
        let peer = Arc::new(PeerState::new(context.clone(), info));
        let limit = silence_max(context.config.heartbeat_limit);
        let mut session = Session::new(id, now);
        // A new session has nothing to send again, so this cannot fail.
        let attached = session.attach(secure, 0, now);
        Link {
            slots: vec![(Slot::Down { dial_at: now }, 0); usize::from(config.channels)],
            least: vec![0; usize::from(config.channels)],
            up_since: vec![now; usize::from(config.channels)],
            peer,
            session,
            hosts: vec![conn.remote().ip()],
            resumed_at: None,
            conn: Some(conn),
            candidates: Vec::new(),
            output: Vec::new(),
            unread_since: None,
            listens: true,
            role,
            data_key,
            limit,
            workers,
            stage: Stage::Settling,
            fences: BTreeMap::new(),
            lanes: Lanes::new(carrier),
            lanes_optional,
            without: None,
            last_words: None,
            announced: BTreeMap::new(),
            sources: BTreeMap::new(),
            started: now,
            closed_at: None,
            resume_at: now,
            resuming: false,
            path_checked: now,
            path_dead: false,
            last_trouble: None,
            disowned: None,
            accept_queue: Some(queue),
            permit: None,
            error: attached.err().map(|error| Error::Bug(error.to_string())).or(refused),
            dial_failed: false,
            peer_drains: false,
            drain_told: false,
            drained_told: false,
            peer_drained: false,
            close_by: None,
            closed_alone: false,
            told: false,
            drained: None,
        }
    }

    pub fn received(&self) -> u64 {
        self.session.received()
    }

    /// How it ended, if it was to finish first and did not, for who closes all: unless that was told before, or is told to
    /// whoever closes this peer alone.
    pub fn unfinished(&self, all_close: bool) -> Option<Error> {
        let peer = &self.peer;
        let nobody_waits = peer.abandoned.load(Ordering::SeqCst) && !self.closed_alone;
        let untold = !self.told && (all_close || nobody_waits);
        let unfinished = untold && peer.unfinished.load(Ordering::SeqCst);
        unfinished.then(|| peer.failure().unwrap_or(Error::Closed))
    }

    /// Changes as long as what was posted gets on, after [`Link::drain`].
    pub fn drained(&self) -> u64 {
        self.peer.drained()
    }

    /// Ends the session without a farewell, as a process that is killed does.
    #[cfg(test)]
    pub(super) fn break_off(&mut self) {
        self.error.get_or_insert(Error::Closed);
    }

    pub(super) fn peer(&self) -> &Arc<PeerState> {
        &self.peer
    }

    /// Whether this end opened the session, and so dials.
    pub(super) fn dials(&self) -> bool {
        matches!(self.role, Role::Connector { .. })
    }

    /// Number and key of the session, for its data connections.
    pub(super) fn keys(&self) -> (u64, DataKey) {
        (self.session.id(), self.data_key.clone())
    }

    /// Options of its data connections.
    pub(super) fn bulk_options(&self) -> ConnOptions {
        bulk_options(&self.peer, self.conn.as_deref())
    }

    pub(super) fn settling(&self) -> bool {
        self.stage == Stage::Settling
    }

    pub(super) fn slot(&self, index: u16) -> Option<Slot> {
        self.slots.get(usize::from(index)).map(|(slot, _)| *slot)
    }

    pub(super) fn set_slot(&mut self, index: u16, slot: Slot, generation: u32) {
        self.slots[usize::from(index)] = (slot, generation);
    }

    pub(super) fn any_is_up(&self) -> bool {
        self.slots.iter().any(|(slot, _)| *slot == Slot::Up)
    }

    /// Channels that carry data on a worker.
    pub(super) fn channels_of(&self, worker: usize) -> impl Iterator<Item = u16> + '_ {
        let up = self.slots.iter().zip(0..).filter(|((slot, _), _)| *slot == Slot::Up);
        up.map(|(_, index)| index).filter(move |index| self.peer.engine_worker(*index) == worker)
    }

    /// Whether a channel has yet to end that will: one whose worker is stuck stays as it is.
    fn open_channels(&self) -> bool {
        let workers = self.workers.iter().filter(|worker| !worker.stuck());
        workers.into_iter().any(|worker| self.channels_of(worker.index).next().is_some())
    }

    pub fn over(&self) -> bool {
        self.stage == Stage::Over
    }

    pub fn dying(&self) -> bool {
        matches!(self.stage, Stage::Dying | Stage::Over | Stage::Leaving { .. })
    }

    /// Whether something is under way that has to be looked at often.
    pub fn busy(&self) -> bool {
        self.stage != Stage::Up || self.conn.is_none() || self.slots.iter().any(|(slot, _)| *slot != Slot::Up)
    }

    /// Whether nothing is under way that time or others bring on: it is enough to look when the peer has said something,
    /// and now and then.
    pub fn rests(&self) -> bool {
        let ends = self.error.is_some() || self.peer_drains || self.close_by.is_some();
        let unsettled = self.accept_queue.is_some() || self.peer.abandoned.load(Ordering::SeqCst);
        // Candidates, and what is still to be written, are not told of by the poller.
        let unheard = self.resuming || self.unread_since.is_some() || !self.candidates.is_empty();
        let told = self.fd().is_some() && self.output.is_empty();
        told && !(self.busy() || ends || unsettled || unheard)
    }

    /// The control connection's.
    pub fn fd(&self) -> Option<RawFd> {
        self.conn.as_ref()?.fd()
    }

    pub fn needs_resume(&self) -> bool {
        self.resuming && !self.dying()
    }

    // ---- a turn ----

    pub fn turn(&mut self, context: &Context, now: Duration) -> bool {
        let mut worked = self.read(now);
        worked |= self.advance_lanes(context, now);
        self.look_after_session(now);
        self.settle(now);
        self.look_after_closing(now);
        if let Some(error) = self.error.take() {
            self.die(error);
        }
        if self.stage == Stage::Dying && !self.open_channels() {
            self.finish();
            worked = true;
        }
        worked | self.write(now)
    }

    fn read(&mut self, now: Duration) -> bool {
        let mut buffer = [0u8; 16 << 10];
        let mut messages = Vec::new();
        let mut worked = self.hear_candidates(&mut buffer, now, &mut messages);
        // As much as others can wait for, so that a flood holds up nobody else.
        for _ in 0..READS_PER_TURN {
            let Some(conn) = &mut self.conn else { break };
            if self.unread_since.is_some() {
                break;
            }
            match read_in(&mut **conn, &mut buffer) {
                Ok(None) => break,
                Ok(Some(0)) => self.control_lost("closed by the peer", true, now),
                Err(error) => {
                    let closed =
                        matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe);
                    self.control_lost(&error.to_string(), closed, now);
                }
                Ok(Some(count)) => {
                    worked = true;
                    if let Err(error) = self.session.on_bytes(&buffer[..count], now, &mut messages) {
                        self.session_trouble(&error, now);
                        break;
                    }
                }
            }
        }
        for message in messages {
            self.take_message(message, now);
        }
        worked
    }

    /// Goes on over the first candidate that says something.
    fn hear_candidates(
        &mut self,
        buffer: &mut [u8],
        now: Duration,
        messages: &mut Vec<ControlMessage>,
    ) -> bool {
        for (mut conn, established) in std::mem::take(&mut self.candidates) {
            match read_in(&mut *conn, buffer) {
                Ok(None) => self.candidates.push((conn, established)),
                Ok(Some(0)) | Err(_) => {}
                Ok(Some(count)) => {
                    self.candidates.clear();
                    // What it says without a connection to say it on would be told as the trouble.
                    if self.adopt(conn, *established, now)
                        && let Err(error) = self.session.on_bytes(&buffer[..count], now, messages)
                    {
                        self.session_trouble(&error, now);
                    }
                    return true;
                }
            }
        }
        false
    }

    /// Writes what waits for the peer; true when that broke the connection.
    pub fn write(&mut self, now: Duration) -> bool {
        if let Err(error) = self.session.tick(now) {
            self.session_trouble(&error, now);
        }
        self.output.append(&mut self.session.take_output());
        let Some(conn) = &mut self.conn else { return false };
        if self.output.is_empty() {
            return false;
        }
        match write_out(&mut **conn, &mut self.output) {
            Ok(_) => {
                self.heed_unread(now);
                false
            }
            Err(error) => {
                let closed =
                    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe);
                self.control_lost(&error.to_string(), closed, now);
                true
            }
        }
    }

    pub(super) fn say(&mut self, message: ControlMessage, now: Duration) {
        if let Err(error) = self.session.push(message, now) {
            self.session_trouble(&error, now);
        }
    }

    fn take_message(&mut self, message: ControlMessage, now: Duration) {
        match message {
            ControlMessage::Fence { channel, generation, placed, refused, reason } => {
                self.fenced_by_peer(channel, generation, (placed, refused), &reason, now);
            }
            ControlMessage::Drain => self.peer_drains = true,
            ControlMessage::Drained => self.peer_drained = true,
            ControlMessage::Goodbye { reason } => self.peer_leaves(&reason),
            ControlMessage::Lane { channel, generation, handle } => {
                self.peer_listens(channel, generation, *handle, now);
            }
            ControlMessage::Dialling { channel, generation, source } => {
                self.peer_announces(channel, generation, source, now);
            }
            ControlMessage::Expected { channel, generation } => self.peer_expects(channel, generation),
        }
    }
}

/// What carries the payload of a session, and why it cannot.
fn carrier_of(
    context: &Context,
    config: &SessionConfig,
    same_host: bool,
) -> (Option<SharedBackend>, Option<String>) {
    let Some(carrier) = context.carrier.clone() else { return (None, None) };
    let declined = reason_without(&config.extra);
    if config.extra.is_empty() || declined.is_some() {
        let refused = !carrier.optional();
        let why = declined.map(|why| format!(": {why}")).unwrap_or_default();
        let why = || format!("the other end does without {}, which this one needs{why}", carrier.name());
        return (None, refused.then(why));
    }
    // What the accepting end cannot know of us, and we of it, is whose memory is moved within one host.
    let agreed = carrier.agree(&Terms::decode(&config.extra), same_host, config);
    (Some(carrier), agreed.err())
}

/// How the payload of a session travels, and why so where that was a choice.
fn transport_of(
    context: &Context,
    carrier: Option<&SharedBackend>,
    config: &SessionConfig,
) -> (&'static str, String) {
    match (carrier, &context.carrier) {
        (Some(_), Some(ours)) if ours.is_negotiated() => (context.payload_name(), "both ends can".into()),
        (None, Some(ours)) if ours.is_negotiated() => {
            let no_offer = || format!("the other end did not offer {}", ours.name());
            let why = reason_without(&config.extra).unwrap_or_else(no_offer);
            tracing::info!("payload goes over tcp: {why}");
            ("tcp", why)
        }
        _ => (context.payload_name(), context.no_carrier.clone().unwrap_or_default()),
    }
}
