//! One peer's control session and channels: keeps both alive, fences lost channels, closes.
//!
//! A link's states: `settling -> up -> draining -> leaving -> dying -> over` (see [`Stage`]). A channel's
//! states at the dialling end: `down -> announced -> expected -> dialling -> lane -> up -> fencing -> down`
//! (see [`channels::ChannelState`]). When a channel is lost, each end closes its connection and reports what
//! it had placed; only then is the rest resent.
//!
//! Invariant: a peer's operations fail only after all its channels have been closed here, so that nothing is
//! placed into their memory afterwards.
//! Read next: `stage.rs`, `session.rs`, `setup.rs`, `fences.rs`, `closing.rs`; then `../dial.rs` and `../pairs.rs`.

mod channels;
mod closing;
mod connection;
mod fences;
mod role;
mod session;
mod setup;
mod stage;

use super::accept_queue::AcceptQueue;
use super::dial::{ConnectTarget, bulk_options};
use super::lanes::Lanes;
use super::pairs::{leads_to_us, pairs};
use super::{read_in, write_out};
use crate::core::context::Context;
use crate::core::peer::{PeerInfo, PeerState};
use crate::core::worker::Workers;
use crate::error::Error;
use crate::payload::payload_backend::{Incompatible, SharedBackend};
use crate::payload::terms::{Terms, reason_without};
use channels::{ChannelState, Channels, PeerFence};
use closing::Closing;
use connection::ControlConnection;
use ferrywire_net::{Conn, ConnOptions};
use ferrywire_proto::Identity;
use ferrywire_proto::channel_assignment::spread;
use ferrywire_proto::clock::silence_max;
use ferrywire_proto::handshake::{Config as SessionConfig, DataKey, Established, Hello, clean};
use ferrywire_proto::limits;
use ferrywire_proto::session::{ControlMessage, Session};
use ferrywire_sys::poll::Interest;
use role::{Acceptor, Candidate, Connector, Detours, ResumeState, Resumption, Role};
use stage::{Awaited, Settling, Stage};
use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Most reads from one control connection in one pass.
const READS_PER_TURN: usize = 8;

pub(super) struct Link {
    workers: Arc<Workers>,
    peer: Arc<PeerState>,
    session: Session,
    data_key: DataKey,
    /// Longest silence, or time without reading, before the peer counts as lost.
    peer_timeout: Duration,
    role: Role,
    connection: ControlConnection,
    channels: Channels,
    pub(super) lanes: Lanes,
    stage: Stage,
    closing: Closing,
    /// Why the session is to end; the current pass acts on it.
    ending: Option<Error>,
    /// The last connection failure, added to the error it leads to.
    last_trouble: Option<Error>,
    /// Since when the end of the session waits only for copies of short messages to a GPU.
    placing_since: Option<Duration>,
    /// Changes of this host's NICs that the channels have taken into account.
    nic_changes: u64,
}

impl Link {
    /// Creates the connecting end's link, after its handshake.
    #[expect(clippy::too_many_arguments, reason = "the values are unrelated, and one caller passes them")]
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
        // With few frames in flight the first channels carry all of them. So each peer's first channel is on
        // another NIC.
        let assigned = spread(&speeds, dialled_before, usize::from(established.config.channels));
        let resumption = Resumption::new(now);
        let detours = Detours::new(now);
        let (proven, detour_until) = (BTreeSet::new(), None);
        let mut connector = Connector { target, pairs, assigned, proven, detours, detour_until, resumption };
        connector.note_proven(&*conn);
        let role = Role::Connector(connector);
        let awaited = Awaited::Connect { queue, without_lanes: None };
        Link::new(workers, conn, address, established, role, awaited, me, now)
    }

    /// Creates the accepting end's link, after its handshake.
    pub fn accepted(
        workers: Arc<Workers>,
        conn: Box<dyn Conn>,
        remote: SocketAddr,
        established: Established,
        queue: &Arc<AcceptQueue>,
        me: &Hello,
        now: Duration,
    ) -> Link {
        let mut acceptor = Acceptor::default();
        acceptor.note_host(conn.remote().ip());
        let awaited = Awaited::Accept(queue.permit());
        Link::new(workers, conn, remote, established, Role::Acceptor(acceptor), awaited, me, now)
    }

    #[expect(clippy::too_many_arguments, reason = "the values are unrelated, and two callers pass them")]
    fn new(
        workers: Arc<Workers>,
        conn: Box<dyn Conn>,
        remote: SocketAddr,
        established: Established,
        role: Role,
        awaited: Awaited,
        me: &Hello,
        now: Duration,
    ) -> Link {
        let context = &workers.context;
        let Established { secure, peer_hello, session: id, data_key, config, protection, .. } = established;
        let name = if peer_hello.label.is_empty() {
            remote.to_string()
        } else {
            format!("{remote} ({})", peer_hello.label)
        };
        // If a boot id is unknown, the ends count as one host where their addresses do: some plugins end the
        // process when both ends are on one host.
        let same_host = peer_hello.shares_host(me).unwrap_or_else(|| conn.within_host());
        let (backend, refused) = backend_of(context, &config, same_host);
        let (transport, transport_reason) = transport_of(context, backend.as_ref(), &config);
        let lanes_optional = backend.as_ref().is_some_and(|backend| backend.is_optional())
            && Terms::decode(&config.extra).is_optional();
        if let (Some(protection), Some(_)) = (protection, &backend) {
            tracing::warn!(
                peer = name,
                "data connections are not protected by {protection}, which both ends prefer, because payload goes over lanes"
            );
        }
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
            // Payload over lanes goes past the data connections. An end that requires protection has no lanes.
            protection: protection.filter(|_| backend.is_none()),
            same_host,
            core_offset: core_offset(&role, me, &peer_hello),
            lanes: backend.is_some(),
            transport,
            transport_reason,
        };
        let refused = refused.map(|refused| Error::Refused {
            address: info.name.clone(),
            reason: refused.code().into(),
            why: refused.to_string(),
        });
        let peer = Arc::new(PeerState::new(context.clone(), info));
        let source: Weak<dyn ferrywire_metrics::Source> = Arc::<PeerState>::downgrade(&peer);
        ferrywire_metrics::register(peer.info.without_port(), source);
        let mut session = Session::new(id, now);
        // A new session has nothing to resend, so this cannot fail.
        let attached = session.attach(secure, 0, now);
        Link {
            peer_timeout: silence_max(context.config.peer_timeout),
            channels: Channels::new(usize::from(config.channels), now),
            workers,
            peer,
            session,
            data_key,
            role,
            connection: ControlConnection::open(conn),
            lanes: Lanes::new(backend),
            stage: Stage::Settling(Settling { awaited, since: now, dial_failed: false, lanes_optional }),
            closing: Closing::default(),
            ending: attached.err().map(|error| Error::Internal(error.to_string())).or(refused),
            last_trouble: None,
            placing_since: None,
            nic_changes: 0,
        }
    }

    pub fn received(&self) -> u64 {
        self.session.received()
    }

    /// A counter that grows while posted transfers make progress, after [`Link::drain`].
    pub fn drained(&self) -> u64 {
        self.peer.drained()
    }

    /// Ends the session without a last message, like a killed process.
    #[cfg(test)]
    pub(super) fn break_off(&mut self) {
        self.ending.get_or_insert(Error::Closed);
    }

    pub(super) fn peer(&self) -> &Arc<PeerState> {
        &self.peer
    }

    /// Whether this end opened the session, and so dials its connections.
    pub(super) fn dials(&self) -> bool {
        matches!(self.role, Role::Connector(_))
    }

    /// Id and key of the session, for its data connections.
    pub(super) fn keys(&self) -> (u64, DataKey) {
        (self.session.id(), self.data_key.clone())
    }

    /// Options for the session's data connections.
    pub(super) fn bulk_options(&self) -> ConnOptions {
        bulk_options(&self.peer, self.connection.conn())
    }

    pub(super) fn settling(&self) -> bool {
        matches!(self.stage, Stage::Settling(_))
    }

    pub(super) fn has_channel(&self, index: u16) -> bool {
        usize::from(index) < self.channels.len()
    }

    /// Notes that a channel's connection is established and its lane is being set up.
    pub(super) fn lane_begins(&mut self, index: u16, generation: u32) {
        self.channels[index].set(generation, ChannelState::Lane);
    }

    pub(super) fn any_is_up(&self) -> bool {
        self.channels.up().next().is_some()
    }

    /// The channels that carry data on a worker.
    pub(super) fn channels_of(&self, worker: usize) -> impl Iterator<Item = u16> + '_ {
        let up = self.channels.up().map(|(index, _)| index);
        up.filter(move |index| self.peer.engine_worker(*index) == worker)
    }

    /// Whether channels have still to end. A channel of a stuck worker never ends and does not count.
    fn open_channels(&self) -> bool {
        let workers = self.workers.iter().filter(|worker| !worker.stuck());
        workers.into_iter().any(|worker| self.channels_of(worker.index).next().is_some())
    }

    pub fn over(&self) -> bool {
        matches!(self.stage, Stage::Over { .. })
    }

    pub fn dying(&self) -> bool {
        self.stage.is_ending()
    }

    /// Whether something is in progress that has to be polled often.
    pub fn busy(&self) -> bool {
        let up = matches!(self.stage, Stage::Up) && !self.connection.is_lost();
        !up || self.channels.up().count() < self.channels.len()
    }

    /// Whether neither time nor another thread moves this link forward: a pass needs to check it only when
    /// the peer has sent something, and at intervals.
    pub fn rests(&self) -> bool {
        let ends = self.ending.is_some() || self.closing.is_asked_for();
        let abandoned = self.peer.life.abandoned.load(Ordering::SeqCst);
        // The poller reports neither candidates nor output that waits to be written.
        let unheard = match &self.role {
            Role::Connector(connector) => connector.resumption.state != ResumeState::Idle,
            Role::Acceptor(acceptor) => !acceptor.candidates.is_empty(),
        };
        let open = self.connection.as_open().filter(|open| open.conn.fd().is_some());
        let polled = open.is_some_and(|open| open.output.is_empty() && open.unread_since.is_none());
        polled && !(self.busy() || ends || abandoned || unheard)
    }

    /// File descriptor of the control connection.
    pub fn fd(&self) -> Option<RawFd> {
        self.connection.conn()?.fd()
    }

    /// The poller's new interest in the control connection, if it has changed.
    pub fn changed_interest(&mut self) -> Option<(RawFd, Interest)> {
        self.connection.as_open_mut()?.changed_interest()
    }

    // ---- one pass ----

    pub fn poll(&mut self, context: &Context, now: Duration) -> bool {
        let mut worked = self.read(now);
        worked |= self.advance_lanes(context, now);
        if !self.open_channels() {
            // Without a channel, no worker polls the copies of short messages.
            worked |= self.peer.end_placed();
        }
        self.check_session(now);
        self.settle(now);
        self.check_closing(now);
        if let Some(error) = self.ending.take() {
            self.die(error);
        }
        if matches!(self.stage, Stage::Dying { .. }) && !self.open_channels() && self.placed_last(now) {
            self.finish();
            worked = true;
        }
        worked | self.write(now)
    }

    /// Whether no short message is being copied to a GPU any more. Channels no longer poll these copies, so
    /// this does, until `GPU_ABANDON_TIMEOUT`.
    fn placed_last(&mut self, now: Duration) -> bool {
        self.peer.end_placed();
        if self.peer.messages.close() {
            self.peer.count_messages();
            return true;
        }
        let since = *self.placing_since.get_or_insert(now);
        if now.saturating_sub(since) > limits::GPU_ABANDON_TIMEOUT {
            // Else a message that is given back matches the next receive, and is copied to the GPU that stands still.
            let error = self.peer.gone();
            self.peer.end_receives(&error);
            self.peer.messages.cut(&|_| true, &error);
        }
        false
    }

    fn read(&mut self, now: Duration) -> bool {
        let mut buffer = [0u8; 16 << 10];
        let mut messages = Vec::new();
        let mut worked = self.hear_candidates(&mut buffer, now, &mut messages);
        // The bound keeps a flood from one peer from delaying other links.
        for _ in 0..READS_PER_TURN {
            let Some(open) = self.connection.as_open_mut().filter(|open| open.unread_since.is_none()) else {
                break;
            };
            match read_in(&mut *open.conn, &mut buffer) {
                Ok(None) => break,
                Ok(Some(0)) => self.control_lost("closed by the peer", true, now),
                Err(error) => self.control_lost(&error.to_string(), closed_by_peer(&error), now),
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

    /// Continues the session over the first candidate connection that delivers bytes.
    fn hear_candidates(
        &mut self,
        buffer: &mut [u8],
        now: Duration,
        messages: &mut Vec<ControlMessage>,
    ) -> bool {
        let Role::Acceptor(acceptor) = &mut self.role else { return false };
        let mut silent = Vec::new();
        for mut candidate in std::mem::take(&mut acceptor.candidates) {
            match read_in(&mut *candidate.conn, buffer) {
                Ok(None) => silent.push(candidate),
                Ok(Some(0)) | Err(_) => {}
                Ok(Some(count)) => {
                    let Candidate { conn, established } = candidate;
                    // If the connection was refused, its bytes would replace the real cause of the trouble.
                    if self.adopt(conn, *established, now)
                        && let Err(error) = self.session.on_bytes(&buffer[..count], now, messages)
                    {
                        self.session_trouble(&error, now);
                    }
                    return true;
                }
            }
        }
        acceptor.candidates = silent;
        false
    }

    /// Writes pending output. Returns true if that broke the connection.
    pub fn write(&mut self, now: Duration) -> bool {
        if let Err(error) = self.session.tick(now) {
            self.session_trouble(&error, now);
        }
        let Some(open) = self.connection.as_open_mut() else { return false };
        open.output.append(&mut self.session.take_output());
        if open.output.is_empty() {
            return false;
        }
        match write_out(&mut *open.conn, &mut open.output) {
            Ok(_) => {
                if open.limit_unread(self.session.unacknowledged_bytes(), now) {
                    self.session.not_heard_until(now);
                }
                false
            }
            Err(error) => {
                self.control_lost(&error.to_string(), closed_by_peer(&error), now);
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
            ControlMessage::Fence { channel, generation, placed, refused, cause, reason } => {
                let reason = clean(&reason);
                self.fenced_by_peer(channel, generation, PeerFence { placed, refused, cause, reason }, now);
            }
            ControlMessage::Drain => self.peer_drains(),
            ControlMessage::Drained => self.peer_is_drained(),
            ControlMessage::Goodbye { cause, reason } => self.peer_leaves(cause, &clean(&reason)),
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

/// Whether the error means that the peer's kernel has closed the connection.
fn closed_by_peer(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

/// Where both ends begin to count cores when they pin threads. It comes from the accepting end's identity. All peers of
/// that end then agree on the core of each of its threads, and the first channels of several endpoints are on
/// different cores.
fn core_offset(role: &Role, me: &Hello, peer: &Hello) -> usize {
    let acceptor = if matches!(role, Role::Acceptor(_)) { me } else { peer };
    usize::from(u16::from_le_bytes([acceptor.identity[0], acceptor.identity[1]]))
}

/// The payload backend of a session, and why the session must be refused, if so.
fn backend_of(
    context: &Context,
    config: &SessionConfig,
    same_host: bool,
) -> (Option<SharedBackend>, Option<Incompatible>) {
    let Some(backend) = context.backend.clone() else { return (None, None) };
    let declined = reason_without(&config.extra);
    if config.extra.is_empty() || declined.is_some() {
        let refused = !backend.is_optional();
        let why = declined.map(|why| format!(": {why}")).unwrap_or_default();
        let why = || format!("the other end does not use {}, which this end requires{why}", backend.name());
        return (None, refused.then(|| Incompatible::Mismatch(why())));
    }
    // The handshake compared the terms. Check them again, now that `same_host` is known.
    let agreed = backend.agree(&Terms::decode(&config.extra), same_host, config);
    (Some(backend), agreed.err())
}

/// The name of the payload's transport, and the reason where there was a choice.
fn transport_of(
    context: &Context,
    backend: Option<&SharedBackend>,
    config: &SessionConfig,
) -> (&'static str, String) {
    match (backend, &context.backend) {
        (Some(_), Some(ours)) if ours.is_negotiated() => (context.payload_name(), "both ends can".into()),
        (None, Some(ours)) if ours.is_negotiated() => {
            let no_offer = || format!("the other end did not offer {}", ours.name());
            let why = reason_without(&config.extra).unwrap_or_else(no_offer);
            tracing::info!("payload of a new session uses tcp: {why}");
            ("tcp", why)
        }
        _ => (context.payload_name(), context.no_backend.clone().unwrap_or_default()),
    }
}
