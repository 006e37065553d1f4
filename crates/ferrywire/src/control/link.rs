//! One peer's control session and channels: keeping both alive, fencing what is lost, closing.
//!
//! A link's life: `settling -> up -> draining -> over`, and from anywhere `dying -> over`. A channel's:
//! `down -> announced -> expected -> dialling -> up -> fencing -> down`. When a channel is lost, each side
//! closes its end, tells the other what it had placed, and learns the same; only then is the rest sent
//! again. Where payload goes over lanes, a channel is up when its lane is too: `dialling -> lane -> up`.
//!
//! Invariant: a peer's operations are failed only after all its channels have been closed here, so that
//! nothing is placed into their memory afterwards.
//! Read next: `dial.rs` and `pairs.rs`.

use super::dial::{Announced, Dial, DialFailure, DialFor, bulk_options};
use super::lanes::Lanes;
use super::lobby::{Lobby, Seat};
use super::pairs::{Pair, pairs};
use super::{read_in, write_out};
use crate::bootstrap::{DataKey, Established, Hello, ListenAddress, Purpose, RefusalCode};
use crate::channel::{Channel, Remains};
use crate::engine::Engine;
use crate::error::Error;
use crate::limits;
use crate::memory::Identity;
use crate::peer::{Peer, PeerInfo, PeerState};
use crate::progress::{self, Command};
use crate::queue::Entry;
use crate::session::{ControlMessage, Session, SessionError};
use crate::transport::Conn;
use crate::transport::plugin::Terms;
use crate::wire::Refusal;
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// How a farewell begins that is no orderly one; the reason follows.
const GAVE_UP: &str = "gave up: ";
/// Socket calls that one turn makes to hear one peer.
const READS_PER_TURN: usize = 8;

/// Which end opened the session; that end dials.
enum Role {
    Connector { address: SocketAddr, pairs: Vec<Pair> },
    Acceptor,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Channels are being set up, since then.
    Settling,
    Up,
    /// We asked the peer to finish, and wait for it until then.
    Draining {
        until: Duration,
    },
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

/// How the reason begins of an end that only heard of a loss.
const THE_PEER_LOST_IT: &str = "the peer lost it: ";

/// The two halves of a lost connection's fence.
#[derive(Default)]
struct Fence {
    ours: Option<Vec<(u64, Entry)>>,
    theirs: Option<(u64, Vec<(u64, u8)>)>,
    /// Why our lane failed, if that is what ended the connection, and what the peer says to it.
    lane_failed: Option<String>,
    their_reason: String,
}

/// What the peer says of a loss, less what it repeats of our own words.
fn own_part<'a>(theirs: &'a str, ours: &str) -> &'a str {
    let Some(told) = theirs.strip_prefix(THE_PEER_LOST_IT) else { return theirs };
    // Ours has the channel and its path before what the peer was told.
    let mut ends = ours.match_indices(": ").map(|(at, colon)| &ours[at + colon.len()..]);
    ends.find_map(|end| told.strip_prefix(end)).map_or(theirs, |rest| rest.trim_start_matches("; "))
}

pub(super) struct Link {
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
    /// A resumption was refused because nobody there knows the session.
    disowned: Option<String>,
    /// Who waits for the peer to be up; `None` once told.
    lobby: Option<Arc<Lobby>>,
    /// Its place there, until it is in the queue.
    seat: Option<Seat>,
    error: Option<Error>,
    peer_drains: bool,
    drain_told: bool,
    drained_told: bool,
    peer_drained: bool,
    close_by: Option<Duration>,
}

impl Link {
    /// The connecting end's link, right after its handshake.
    pub fn connected(
        engine: &Engine,
        conn: Box<dyn Conn>,
        address: SocketAddr,
        established: Established,
        lobby: Arc<Lobby>,
        me: &Hello,
        now: Duration,
    ) -> Link {
        let nics = engine.transport.nics().unwrap_or_default();
        let listens: &[ListenAddress] = &established.peer_hello.addresses;
        let pairs = pairs(&nics, &engine.config.nics, address, listens);
        let role = Role::Connector { address, pairs };
        Link::new(engine, conn, address, established, role, lobby, me, now)
    }

    /// The accepting end's link.
    pub fn accepted(
        engine: &Engine,
        conn: Box<dyn Conn>,
        remote: SocketAddr,
        established: Established,
        lobby: Arc<Lobby>,
        me: &Hello,
        now: Duration,
    ) -> Link {
        let seat = lobby.sit();
        let link = Link::new(engine, conn, remote, established, Role::Acceptor, lobby, me, now);
        Link { seat: Some(seat), ..link }
    }

    #[expect(clippy::too_many_arguments, reason = "each is a different fact, and two callers name them")]
    fn new(
        engine: &Engine,
        conn: Box<dyn Conn>,
        remote: SocketAddr,
        established: Established,
        role: Role,
        lobby: Arc<Lobby>,
        me: &Hello,
        now: Duration,
    ) -> Link {
        let Established { secure, peer_hello, session: id, data_key, config, .. } = established;
        let name = match peer_hello.label.is_empty() {
            true => remote.to_string(),
            false => format!("{remote} ({})", peer_hello.label),
        };
        let info = PeerInfo {
            session: id,
            identity: Identity(peer_hello.identity),
            name,
            channels: usize::from(config.channels),
            chunk_bytes: config.chunk_bytes as usize,
            window: (config.window as usize).min(limits::WINDOW_FRAMES_MAX),
            crc: config.crc,
            same_host: peer_hello.boot_id == me.boot_id,
            lanes: engine.plugin.is_some(),
        };
        // What the accepting end cannot know of us, and we of it, is whose memory is moved within one host.
        let terms = engine
            .plugin
            .as_ref()
            .map(|host| host.agree(&Terms::decode(&config.extra), peer_hello.boot_id == me.boot_id, &config));
        let refused =
            terms.and_then(Result::err).map(|why| Error::Refused { address: info.name.clone(), why });
        let peer = Arc::new(PeerState::new(engine.shared(), info));
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
            role,
            data_key,
            limit: engine.config.heartbeat_limit,
            stage: Stage::Settling,
            fences: BTreeMap::new(),
            lanes: Lanes::default(),
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
            lobby: Some(lobby),
            seat: None,
            error: attached.err().map(|error| Error::Bug(error.to_string())).or(refused),
            peer_drains: false,
            drain_told: false,
            drained_told: false,
            peer_drained: false,
            close_by: None,
        }
    }

    pub fn received(&self) -> u64 {
        self.session.received()
    }

    /// Whether it was closed before all was finished.
    pub fn unfinished(&self) -> bool {
        self.peer.unfinished.load(Ordering::SeqCst)
    }

    pub(super) fn peer(&self) -> &Arc<PeerState> {
        &self.peer
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

    /// Channels that carry data on a worker.
    pub(super) fn channels_of(&self, worker: usize) -> impl Iterator<Item = u16> + '_ {
        let up = self.slots.iter().zip(0..).filter(|((slot, _), _)| *slot == Slot::Up);
        up.map(|(_, index)| index).filter(move |index| self.peer.engine_worker(*index) == worker)
    }

    /// Whether a channel has yet to end that will: one whose worker is stuck stays as it is.
    fn open_channels(&self, engine: &Engine) -> bool {
        let workers = engine.workers.iter().filter(|worker| !worker.stuck());
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

    pub fn needs_resume(&self) -> bool {
        self.resuming && !self.dying()
    }

    // ---- a turn ----

    pub fn turn(&mut self, engine: &Engine, now: Duration) -> bool {
        let mut worked = self.read(engine, now);
        worked |= self.advance_lanes(engine, now);
        self.look_after_session(now);
        self.settle(now);
        self.look_after_closing(now);
        if let Some(error) = self.error.take() {
            self.die(engine, error);
        }
        if self.stage == Stage::Dying && !self.open_channels(engine) {
            self.finish();
            worked = true;
        }
        worked | self.write(now)
    }

    fn read(&mut self, engine: &Engine, now: Duration) -> bool {
        let mut buffer = [0u8; 16 << 10];
        let mut messages = Vec::new();
        let mut worked = self.hear_candidates(&mut buffer, now, &mut messages);
        // As much as others can wait for, so that a flood holds up nobody else.
        for _ in 0..READS_PER_TURN {
            let Some(conn) = &mut self.conn else { break };
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
            self.obey(engine, message, now);
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
                    self.adopt(conn, *established, now);
                    if let Err(error) = self.session.on_bytes(&buffer[..count], now, messages) {
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
            Ok(_) => false,
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

    fn obey(&mut self, engine: &Engine, message: ControlMessage, now: Duration) {
        match message {
            ControlMessage::Fence { channel, generation, placed, refused, reason } => {
                self.fenced_by_peer(engine, channel, generation, (placed, refused), &reason, now);
            }
            ControlMessage::Drain => self.peer_drains = true,
            ControlMessage::Drained => self.peer_drained = true,
            ControlMessage::Goodbye { reason } => {
                let peer = self.peer.name().into();
                self.error = Some(match reason.strip_prefix(GAVE_UP) {
                    Some(why) => Error::PeerLost { peer, why: format!("it gave up: {why}") },
                    None => Error::PeerClosed { peer },
                });
            }
            ControlMessage::Lane { channel, generation, handle } => {
                self.peer_listens(channel, generation, *handle, now);
            }
            ControlMessage::Dialling { channel, generation, source } => {
                self.peer_announces(channel, generation, source, now);
            }
            ControlMessage::Expected { channel, generation } => self.peer_expects(channel, generation),
        }
    }

    // ---- the session ----

    fn control_lost(&mut self, why: &str, closed_by_peer: bool, now: Duration) {
        tracing::debug!(peer = self.peer.name(), why, "control connection lost");
        self.conn = None;
        self.output.clear();
        self.session.detach();
        if closed_by_peer {
            self.closed_at.get_or_insert(now);
        }
    }

    /// A connection that fails is replaced by another; what else the peer does wrong ends the session.
    fn session_trouble(&mut self, error: &SessionError, now: Duration) {
        match error.is_resumable() {
            true => self.control_lost(&error.to_string(), false, now),
            false => self.error = Some(error.with(self.peer.name())),
        }
    }

    /// A resumption has succeeded, as far as its handshake goes.
    pub fn attach(&mut self, conn: Box<dyn Conn>, established: Established, now: Duration) {
        if matches!(self.role, Role::Connector { .. }) {
            self.adopt(conn, established, now);
            // The other end takes the connection on which it hears something.
            if let Err(error) = self.session.greet(now) {
                self.session_trouble(&error, now);
            }
            return;
        }
        self.resumed_at = Some(now);
        self.note_host(conn.remote().ip());
        if self.candidates.len() >= CANDIDATES_MAX {
            self.candidates.remove(0);
        }
        self.candidates.push((conn, Box::new(established)));
    }

    fn note_host(&mut self, host: IpAddr) {
        if !self.hosts.contains(&host) && self.hosts.len() < limits::ADDRESSES_MAX {
            self.hosts.push(host);
        }
    }

    /// Whether the peer has just resumed the session: then it has dialled all paths at once, and hangs up
    /// on those that were slower.
    pub fn raced_from(&self, host: IpAddr, now: Duration) -> bool {
        let lately = |at| now.saturating_sub(at) <= 2 * limits::HANDSHAKE_DEADLINE;
        self.resumed_at.is_some_and(lately) && self.hosts.contains(&host)
    }

    fn adopt(&mut self, conn: Box<dyn Conn>, established: Established, now: Duration) {
        let attached = self.session.attach(established.secure, established.received, now);
        if let Err(error) = attached {
            self.session_trouble(&error, now);
            return;
        }
        tracing::info!(peer = self.peer.name(), over = %conn.local().ip(), "control session resumed");
        self.conn = Some(conn);
        self.output.clear();
        self.closed_at = None;
        self.resuming = false;
        self.path_dead = false;
        self.disowned = None;
    }

    pub fn resume_failed(&mut self, failure: DialFailure, now: Duration) {
        if failure.refused == Some(RefusalCode::UnknownSession) {
            self.disowned.get_or_insert(failure.error.to_string());
        }
        self.last_trouble = Some(failure.error);
        self.resume_at = self.resume_at.max(now + limits::REDIAL_INTERVAL / 2);
    }

    /// Whether somebody at an address of the peer does not know the session. Another path may still lead
    /// to somebody who does: an address can have moved to another host.
    pub fn disowned(&self) -> bool {
        self.disowned.is_some() && self.needs_resume()
    }

    /// No path is left that might lead to somebody who knows the session.
    pub fn give_up(&mut self) {
        if let Some(why) = self.disowned.take() {
            self.last_trouble = None;
            self.fail(format!("it restarted, or gave us up: {why}"));
        }
    }

    fn look_after_session(&mut self, now: Duration) {
        if self.dying() {
            return;
        }
        let silent = self.session.silent_for(now);
        let closed_for = self.closed_at.map(|at| now.saturating_sub(at));
        // A process that ended has lost its channels too.
        let all_closed = !self.slots.iter().any(|(slot, _)| *slot == Slot::Up);
        if all_closed && closed_for.is_some_and(|time| time > limits::RESUME_GRACE) {
            self.fail(
                "its host closed the control connection, and it did not come back: the process ended".into(),
            );
        } else if silent > self.limit {
            self.fail(format!(
                "no sign of life for {:.1} s: stopped, or out of reach over every NIC",
                silent.as_secs_f64()
            ));
        } else if matches!(self.role, Role::Connector { .. }) {
            self.check_path(now);
            let suspect = silent > limits::CONTROL_SUSPECT_AFTER || self.path_dead;
            self.resuming = self.conn.is_none() || suspect;
        }
    }

    /// A path can die in one direction only: then we hear the peer, and it does not hear us.
    fn check_path(&mut self, now: Duration) {
        let Some(conn) = self.conn.as_ref() else { return };
        if now.saturating_sub(self.path_checked) >= limits::PATH_CHECK_INTERVAL {
            self.path_checked = now;
            self.path_dead = conn.health().is_dead();
        }
    }

    fn fail(&mut self, why: String) {
        let trouble = self.last_trouble.take().map(|error| format!(" ({error})")).unwrap_or_default();
        let why = format!("{why}{trouble}; {}", self.peer.describe());
        self.error.get_or_insert(Error::PeerLost { peer: self.peer.name().into(), why });
    }

    // ---- setting up ----

    /// Connections that have to be made now.
    pub fn take_dials(&mut self, engine: &Engine, me: &Hello, now: Duration) -> Vec<(Dial, DialFor)> {
        let mut out = Vec::new();
        let Role::Connector { address, pairs } = &self.role else {
            return out;
        };
        if self.dying() {
            return out;
        }
        let (id, address, pairs) = (self.session.id(), *address, pairs.clone());
        if self.resuming && self.disowned.is_none() && now >= self.resume_at {
            self.resume_at = now + 2 * limits::REDIAL_INTERVAL;
            let mut paths: Vec<_> = pairs.iter().map(|pair| (pair.nic.clone(), pair.remote)).collect();
            paths.push((None, address));
            for (nic, remote) in paths {
                let (received, data_key) = (self.session.received(), self.data_key.clone());
                let purpose = Purpose::Resume { session: id, received, data_key };
                match Dial::resume(engine, me, nic.as_ref(), remote, purpose) {
                    Ok(dial) => out.push((dial, DialFor::Resume { session: id })),
                    Err(error) => self.last_trouble = Some(error),
                }
            }
        }
        for index in 0..self.slots.len() as u16 {
            let (slot, generation) = self.slots[usize::from(index)];
            match slot {
                // Without a control connection, nobody can be told.
                Slot::Down { dial_at } if dial_at <= now && self.conn.is_some() => {
                    let pair = &pairs[usize::from(index) % pairs.len()];
                    self.announce(index, pair, now);
                }
                Slot::Announced { since } if now.saturating_sub(since) > limits::DIAL_DEADLINE => {
                    if let Some(announced) = self.announced.remove(&index) {
                        self.channel_failed(index, generation, announced.unanswered(), now);
                    }
                }
                Slot::Expected => out.extend(self.dial_announced(index, generation, now)),
                _ => {}
            }
        }
        out
    }

    /// Binds a data connection and tells the peer of it, so that a rule for it can be in place before its
    /// first packet. All channels go in one round trip.
    fn announce(&mut self, index: u16, pair: &Pair, now: Duration) {
        let (_, generation) = self.slots[usize::from(index)];
        match Announced::new(&self.peer, pair.nic.as_ref(), pair.remote) {
            Ok(announced) => {
                let source = announced.source();
                tracing::debug!(peer = self.peer.name(), channel = index, %source, "data connection announced");
                self.say(ControlMessage::Dialling { channel: index, generation, source }, now);
                self.announced.insert(index, announced);
                self.slots[usize::from(index)].0 = Slot::Announced { since: now };
            }
            Err(error) => self.channel_failed(index, generation, error, now),
        }
    }

    /// The peer dials a data connection as soon as we say that we expect it.
    fn peer_announces(&mut self, channel: u16, generation: u32, source: SocketAddr, now: Duration) {
        if matches!(self.role, Role::Connector { .. }) || usize::from(channel) >= self.slots.len() {
            return;
        }
        tracing::debug!(peer = self.peer.name(), channel, %source, "data connection expected");
        self.sources.insert(channel, (generation, source));
        self.say(ControlMessage::Expected { channel, generation }, now);
    }

    fn peer_expects(&mut self, channel: u16, generation: u32) {
        if let Some(slot) = self.slots.get_mut(usize::from(channel))
            && matches!(*slot, (Slot::Announced { .. }, current) if current == generation)
        {
            slot.0 = Slot::Expected;
        }
    }

    fn dial_announced(&mut self, index: u16, generation: u32, now: Duration) -> Option<(Dial, DialFor)> {
        let announced = self.announced.remove(&index)?;
        let session = self.session.id();
        match Dial::channel(announced, session, self.data_key.clone(), index, generation) {
            Ok(dial) => {
                self.slots[usize::from(index)].0 = Slot::Dialling;
                Some((dial, DialFor::Channel { session, index, generation }))
            }
            Err(error) => {
                self.channel_failed(index, generation, error, now);
                None
            }
        }
    }

    pub fn channel_failed(&mut self, index: u16, generation: u32, error: Error, now: Duration) {
        let slot = &mut self.slots[usize::from(index)];
        if slot.1 == generation && slot.0 != Slot::Up {
            // The acceptor may have taken it up: a number is used once.
            *slot = (Slot::Down { dial_at: now + limits::REDIAL_INTERVAL }, generation + 1);
        }
        tracing::debug!(peer = self.peer.name(), channel = index, %error, "channel cannot be connected");
        self.last_trouble = Some(error);
    }

    pub fn channel_dialled(
        &mut self,
        engine: &Engine,
        conn: Box<dyn Conn>,
        index: u16,
        generation: u32,
        now: Duration,
    ) {
        // The peer may have lost, and fenced, the connection before its handshake ended here.
        if self.slots[usize::from(index)] == (Slot::Dialling, generation) {
            self.channel_up(engine, conn, index, generation, now);
        }
    }

    pub fn channel_accepted(
        &mut self,
        engine: &Engine,
        mut conn: Box<dyn Conn>,
        index: u16,
        generation: u32,
        now: Duration,
    ) {
        engine.transport.tune(&mut *conn, &bulk_options(&self.peer));
        self.compare_source(conn.remote(), index, generation);
        let (slot, current) = self.slots[usize::from(index)];
        if slot == Slot::Lane && generation > current {
            self.lane_given_up(index, current, "the peer dialled it again".into(), now);
        }
        let (slot, current) = self.slots[usize::from(index)];
        if slot == Slot::Up && generation > current {
            // The peer has given up the connection that we still hold; it will dial once more.
            self.drop_channel(engine, index, current, "the peer dialled it again".into());
        }
        if !matches!(slot, Slot::Down { .. }) || generation < self.least[usize::from(index)] {
            tracing::debug!(peer = self.peer.name(), channel = index, "a stale data connection was dropped");
            return;
        }
        self.channel_up(engine, conn, index, generation, now);
    }

    /// The proof of membership is what lets a connection in. Its address may have been translated on the
    /// way, even to another port of the same host, so that a difference proves nothing.
    fn compare_source(&self, remote: SocketAddr, channel: u16, generation: u32) {
        let announced = self.sources.get(&channel).filter(|(current, _)| *current == generation);
        match announced {
            Some((_, source)) if *source == remote => {}
            Some((_, source)) => {
                tracing::debug!(peer = self.peer.name(), channel, %remote, %source, "translated on its way");
            }
            None => tracing::debug!(peer = self.peer.name(), channel, %remote, "not announced"),
        }
    }

    fn channel_up(
        &mut self,
        engine: &Engine,
        conn: Box<dyn Conn>,
        index: u16,
        generation: u32,
        now: Duration,
    ) {
        match engine.plugin {
            _ if self.dying() => {}
            Some(_) => self.start_lane(engine, conn, index, generation, now),
            None => self.carries_data(engine, Channel::new(conn, self.peer.clone(), index, generation), now),
        }
    }

    /// Nothing is missing any more: the channel goes to its worker.
    pub(super) fn carries_data(&mut self, engine: &Engine, channel: Channel, now: Duration) {
        let (index, generation) = (channel.index, channel.generation);
        self.note_host(channel.conn().remote().ip());
        self.slots[usize::from(index)] = (Slot::Up, generation);
        self.up_since[usize::from(index)] = now;
        let worker = &engine.workers[self.peer.engine_worker(index)];
        let address = channel.conn().local().ip();
        let nic = engine.transport.nic_name(address).unwrap_or_else(|| address.to_string());
        self.peer.counters(index).runs_over(nic);
        // The home first: the worker that gets the channel sends small operations only if it is that.
        self.peer.choose_home();
        worker.command(Command::Add(Box::new(channel)));
        if generation > 0 {
            tracing::info!(peer = self.peer.name(), channel = index, "channel carries data again");
        }
        self.settle(now);
    }

    /// Tells whoever waits that the peer is up, or that it cannot be reached.
    fn settle(&mut self, now: Duration) {
        if self.stage != Stage::Settling || self.error.is_some() {
            return;
        }
        let up = self.slots.iter().filter(|(slot, _)| *slot == Slot::Up).count();
        let waited = now.saturating_sub(self.started);
        let (some, none) = self.lanes.settle_limits(limits::DIAL_DEADLINE, limits::HANDSHAKE_DEADLINE);
        if up == self.slots.len() || (up > 0 && waited > some) {
            self.stage = Stage::Up;
            *self.peer.setup.lock().unwrap_or_else(PoisonError::into_inner) = waited;
            if up < self.slots.len() {
                let trouble = self.last_trouble.as_ref().map(Error::to_string).unwrap_or_default();
                let line = format!(
                    "{} of {} channels could not be set up: {trouble}",
                    self.slots.len() - up,
                    self.slots.len()
                );
                tracing::warn!(peer = self.peer.name(), "{line}");
                self.peer.note_lost(line);
            }
            if let Some(lobby) = self.lobby.take() {
                lobby.put(Ok(Peer::new(self.peer.clone())));
                self.seat = None;
            }
        } else if waited > none {
            let why = "no data connection came about: is the peer's advertised address reachable?";
            self.fail(why.into());
        }
    }

    // ---- lost channels ----

    pub fn channel_lost(
        &mut self,
        index: u16,
        generation: u32,
        why: String,
        remains: Remains,
        now: Duration,
    ) {
        let entries = remains.entries;
        self.close_generation(index, generation);
        if matches!(self.stage, Stage::Dying | Stage::Over | Stage::Leaving { .. }) {
            self.slots[usize::from(index)] = (Slot::Down { dial_at: Duration::MAX }, generation + 1);
            self.peer.drop_entries(entries.into_iter().map(|(_, entry)| entry).collect());
            return;
        }
        let path = self.path_of(index);
        // Both ends tell how far their lanes were: the errors of both have it.
        let state = remains.lane.map(|state| format!("; {state}")).unwrap_or_default();
        let why = format!("{why}{state}");
        let line = format!("channel {index} over {path}: {why}");
        tracing::warn!(peer = self.peer.name(), "lost {line}");
        let lane_failed = remains.lane_failed.then(|| line.clone());
        self.peer.note_lost(line);
        self.slots[usize::from(index)] = (Slot::Fencing, generation);
        let refused = remains.refused.iter().map(|(number, why)| (*number, *why as u8)).collect();
        let message = ControlMessage::Fence {
            channel: index,
            generation,
            placed: remains.placed,
            refused,
            reason: why,
        };
        self.say(message, now);
        let fence = self.fences.entry((index, generation)).or_default();
        (fence.ours, fence.lane_failed) = (Some(entries), lane_failed);
        self.peer.choose_home();
        self.resolve(index, generation, now);
    }

    /// A connection on which nothing was placed is over here.
    pub(super) fn fence_empty(&mut self, index: u16, generation: u32, reason: String, now: Duration) {
        self.close_generation(index, generation);
        self.slots[usize::from(index)] = (Slot::Fencing, generation);
        let (placed, refused) = (0, Vec::new());
        self.say(ControlMessage::Fence { channel: index, generation, placed, refused, reason }, now);
        self.fences.entry((index, generation)).or_default().ours = Some(Vec::new());
        self.resolve(index, generation, now);
    }

    /// Ends one of our channels; [`Link::channel_lost`] follows.
    fn drop_channel(&self, engine: &Engine, index: u16, generation: u32, why: String) {
        let command = Command::Drop { session: self.session.id(), index, generation, why };
        engine.workers[self.peer.engine_worker(index)].command(command);
    }

    /// No connection of this generation may come up any more.
    fn close_generation(&mut self, index: u16, generation: u32) {
        let least = &mut self.least[usize::from(index)];
        *least = (*least).max(generation.saturating_add(1));
    }

    fn path_of(&self, index: u16) -> String {
        let stats = self.peer.counters(index).snapshot(index);
        stats.map_or_else(String::new, |stats| format!("{} ({} to {})", stats.nic, stats.local, stats.remote))
    }

    fn fenced_by_peer(
        &mut self,
        engine: &Engine,
        index: u16,
        generation: u32,
        theirs: (u64, Vec<(u64, u8)>),
        reason: &str,
        now: Duration,
    ) {
        let Some((slot, ours)) = self.slots.get(usize::from(index)).copied() else {
            return;
        };
        let fence = self.fences.entry((index, generation)).or_default();
        fence.theirs = Some(theirs);
        fence.their_reason = crate::bootstrap::clean(reason);
        let never_came = fence.ours.is_none();
        if slot == Slot::Up && ours == generation {
            let why = format!("{THE_PEER_LOST_IT}{}", crate::bootstrap::clean(reason));
            self.drop_channel(engine, index, generation, why);
            return;
        }
        self.close_generation(index, generation);
        let under_way = matches!(slot, Slot::Announced { .. } | Slot::Expected | Slot::Dialling | Slot::Lane);
        if under_way && ours == generation {
            // What is under way comes too late: what it leads to is fenced.
            self.announced.remove(&index);
            self.lanes.drop_setup(index);
            let dial_at = now + limits::REDIAL_INTERVAL;
            self.slots[usize::from(index)] = (Slot::Down { dial_at }, generation + 1);
        }
        if never_came {
            // We never had that connection: nothing was placed from it.
            self.fences.entry((index, generation)).or_default().ours = Some(Vec::new());
            let (placed, refused, reason) = (0, Vec::new(), String::from("never came about here"));
            self.say(ControlMessage::Fence { channel: index, generation, placed, refused, reason }, now);
        }
        self.resolve(index, generation, now);
    }

    /// Both ends have closed the connection and said what they placed: the rest travels again.
    fn resolve(&mut self, index: u16, generation: u32, now: Duration) {
        let Some(fence) = self.fences.get_mut(&(index, generation)) else {
            return;
        };
        if fence.ours.is_none() || fence.theirs.is_none() {
            return;
        }
        let Some(fence) = self.fences.remove(&(index, generation)) else {
            return;
        };
        let (placed, refused) = fence.theirs.unwrap_or_default();
        let mut again = Vec::new();
        for (number, entry) in fence.ours.unwrap_or_default() {
            if number >= placed {
                again.push(entry);
                continue;
            }
            let refusal =
                refused.iter().find(|(each, _)| *each == number).map(|(_, why)| Refusal::parse(*why));
            self.peer.delivered(entry, refusal);
        }
        self.peer.resent.fetch_add(again.len() as u64, Ordering::Relaxed);
        let unsendable = self.peer.queue.resend(again);
        self.peer.drop_entries(unsendable);
        if let Some(why) = fence.lane_failed
            && !self.slots.iter().any(|(slot, _)| *slot == Slot::Up)
        {
            let theirs = own_part(&fence.their_reason, &why);
            let why = format!("{why}; at the peer: {theirs}; no channel is left");
            return self.part_with(Error::PeerLost { peer: self.peer.name().into(), why }, now);
        }
        progress::kick(&self.peer, u64::MAX);
        let slot = &mut self.slots[usize::from(index)];
        if slot.1 == generation && slot.0 == Slot::Fencing {
            // One that did not last is not dialled in a hot loop.
            let dial_at = now.max(self.up_since[usize::from(index)] + limits::REDIAL_INTERVAL);
            *slot = (Slot::Down { dial_at }, generation + 1);
        }
    }

    // ---- closing ----

    /// Finishes what was posted, then closes; at the latest by then.
    pub fn close(&mut self, by: Duration) {
        self.close_by.get_or_insert(by);
    }

    fn quiet(&self) -> bool {
        !self.peer.in_flight() && !self.peer.queue.has_work()
    }

    fn look_after_closing(&mut self, now: Duration) {
        if let Stage::Leaving { until } = self.stage {
            return self.leave(until, now);
        }
        if self.dying() {
            return;
        }
        if self.peer.abandoned.load(Ordering::SeqCst) && self.lobby.is_none() {
            self.close_by.get_or_insert(now + limits::DRAIN_DEADLINE);
        }
        if self.peer_drains && !self.drained_told && self.quiet() {
            self.drained_told = true;
            self.say(ControlMessage::Drained, now);
        }
        let Some(by) = self.close_by else { return };
        if self.peer.skips_drain() {
            self.error.get_or_insert(Error::Closed);
            return;
        }
        match self.stage {
            Stage::Settling | Stage::Up => {
                if !self.drain_told {
                    self.drain_told = true;
                    self.say(ControlMessage::Drain, now);
                }
                self.stage = Stage::Draining { until: by };
            }
            Stage::Draining { until } => {
                // A peer that drains too says so all the same when it has finished.
                let done = self.quiet() && self.peer_drained;
                if done || now >= until {
                    self.peer.unfinished.store(!done, Ordering::SeqCst);
                    let reason = if done { "closed" } else { "closed before all was finished" };
                    self.say(ControlMessage::Goodbye { reason: reason.into() }, now);
                    self.stage = Stage::Leaving { until: now + limits::HEARTBEAT_INTERVAL };
                }
            }
            Stage::Leaving { .. } | Stage::Dying | Stage::Over => {}
        }
    }

    /// The farewell is on its way: when it has arrived, or its time is up, this is the end.
    fn leave(&mut self, until: Duration, now: Duration) {
        if self.session.unacknowledged() == 0 || self.conn.is_none() || now >= until {
            let error = self.last_words.take().unwrap_or(Error::Closed);
            self.error.get_or_insert(error);
        }
    }

    /// Ends the session with an error of ours, after telling the peer.
    pub(super) fn part_with(&mut self, error: Error, now: Duration) {
        if self.dying() {
            return;
        }
        let reason = match &error {
            Error::PeerLost { why, .. } => format!("{GAVE_UP}{why}"),
            error => format!("{GAVE_UP}{error}"),
        };
        self.say(ControlMessage::Goodbye { reason }, now);
        self.last_words = Some(error);
        self.stage = Stage::Leaving { until: now + limits::HEARTBEAT_INTERVAL };
    }

    /// The session is over: first the channels close, then what waits for the peer fails.
    pub fn die(&mut self, engine: &Engine, error: Error) {
        if matches!(self.stage, Stage::Dying | Stage::Over) {
            return;
        }
        match &error {
            Error::Closed | Error::PeerClosed { .. } => tracing::debug!(peer = self.peer.name(), "closed"),
            error => tracing::debug!("{error}"),
        }
        self.peer.doom(error);
        self.stage = Stage::Dying;
        self.lanes.drop_all();
        for (index, (slot, generation)) in self.slots.iter().enumerate() {
            if *slot == Slot::Up {
                self.drop_channel(engine, index as u16, *generation, "the session is over".into());
            }
        }
    }

    fn finish(&mut self) {
        self.stage = Stage::Over;
        self.conn = None;
        self.announced.clear();
        for (_, fence) in std::mem::take(&mut self.fences) {
            let entries = fence.ours.unwrap_or_default();
            self.peer.drop_entries(entries.into_iter().map(|(_, entry)| entry).collect());
        }
        self.peer.fail();
        self.seat = None;
        if let Some(lobby) = self.lobby.take() {
            // Somebody who waits for a new peer learns why it did not come about; an acceptor goes on waiting.
            if matches!(self.role, Role::Connector { .. }) {
                lobby.put(Err(self.peer.failure().unwrap_or(Error::Closed)));
            }
        }
    }
}
