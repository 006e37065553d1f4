//! Setting up channels: announced, dialled, accepted; and when the peer counts as connected.
//!
//! Invariant: only the connecting end dials data connections, and only after the peer has confirmed the announcement.
//! Read next: `channels.rs`.

use super::channels::{ChannelRecord, ChannelState};
use super::{Link, Role, Stage};
use crate::control::dial::{Announced, Dial, DialFor, path_name};
use crate::control::pairs::Pair;
use crate::core::channel::Channel;
use crate::core::context::Context;
use crate::core::peer::PeerHandle;
use crate::core::trace::ChannelName;
use crate::core::worker::Command;
use crate::error::{Error, LossCause};
use ferrywire_net::{Conn, Sealed};
use ferrywire_proto::handshake::{Hello, Purpose};
use ferrywire_proto::limits;
use ferrywire_proto::record::RecordSecrets;
use ferrywire_proto::session::ControlMessage;
use std::net::SocketAddr;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl Link {
    /// Takes the connections that have to be dialled now.
    pub fn take_dials(&mut self, context: &Context, me: &Hello, now: Duration) -> Vec<(Dial, DialFor)> {
        let mut out = Vec::new();
        if self.dying() && !self.is_leaving() {
            return out;
        }
        self.take_resumptions(context, me, now, &mut out);
        if self.dying() {
            return out;
        }
        if !self.dials() {
            return out;
        }
        self.end_detour(context, now);
        for index in self.channels.indices() {
            match &self.channels[index].state {
                // Without a control connection the announcement cannot be sent.
                ChannelState::Down { dial_at } if *dial_at <= now && !self.connection.is_lost() => {
                    if let Some(path) = self.path_to_dial(context, index, now) {
                        self.announce(index, &path, now);
                    }
                }
                ChannelState::Announced { since, announced }
                    if now.saturating_sub(*since) > limits::DIAL_TIMEOUT =>
                {
                    let error = announced.unanswered();
                    self.channel_failed(index, self.channels[index].generation, error, now);
                }
                ChannelState::Expected { .. } => out.extend(self.dial_announced(index, now)),
                _ => {}
            }
        }
        out
    }

    /// The path over which a channel is dialled: its own. While no channel is up, although the peer answers over the
    /// control connection, the first channel tries the other paths too; in set-up once a dial has failed.
    fn path_to_dial(&mut self, context: &Context, index: u16, now: Duration) -> Option<Pair> {
        let may_detour = index == 0 && !self.any_is_up();
        let (settling, leads_nowhere) = (self.settling(), self.leads_nowhere());
        let Role::Connector(connector) = &mut self.role else { return None };
        let own = connector.path(index).clone();
        // Where no path led anywhere, all channels have the system's route to the dialled address by now.
        let has_fallen_back = own.nic.is_none() && own.remote == connector.target.address;
        let may_detour = may_detour && (!settling || (leads_nowhere && !has_fallen_back));
        if index == 0 {
            connector.detour_until = None;
        }
        if !may_detour || now < connector.detours.begin_at {
            return Some(own);
        }
        let proven = self.control_path(context);
        let Role::Connector(connector) = &mut self.role else { return None };
        let path = connector.detour(proven);
        // Where the system's routes choose the NIC, two paths differ by their remote address alone.
        let is_other = if own.nic.is_some() { !path.equals(&own) } else { path.remote != own.remote };
        connector.detour_until = is_other.then(|| now + limits::REDIAL_INTERVAL_MAX);
        Some(path)
    }

    /// Takes the first channel from a detour back to its own path, if that path's NIC is up, once another channel has been
    /// up for a while. If that path is dead, the channel stays down like every channel of a dead path.
    fn end_detour(&mut self, context: &Context, now: Duration) {
        let Role::Connector(connector) = &mut self.role else { return };
        let is_due = connector.detour_until.is_some_and(|until| now >= until);
        if !is_due || !matches!(self.stage, Stage::Up) || self.connection.is_lost() {
            return;
        }
        // If the channel cannot go back now, this is looked at again after the interval of a redial.
        connector.detour_until = Some(now + limits::REDIAL_INTERVAL);
        let is_up = |record: &ChannelRecord| matches!(record.state, ChannelState::Up { peer_fence: None });
        let lasts = |record: &ChannelRecord| {
            is_up(record) && now.saturating_sub(record.up_since) >= limits::REDIAL_INTERVAL_MAX
        };
        let has_another = self.channels.indices().skip(1).any(|index| lasts(&self.channels[index]));
        if has_another && is_up(&self.channels[0]) && connector.path(0).nic_is_up(context) {
            connector.detour_until = None;
            let generation = self.channels[0].generation;
            self.drop_channel(0, generation, "it goes back to its own path, whose NIC is up");
        }
    }

    /// The path of the control connection, if data may take it: over a NIC that the user has not excluded, and without
    /// lanes, which only the paired NICs have.
    fn control_path(&self, context: &Context) -> Option<Pair> {
        let conn = self.connection.conn().filter(|_| self.lanes.backend().is_none())?;
        let (local, chosen) = (conn.local().ip(), &context.config.nics);
        let nic = context.transport.nics().ok()?.into_iter().find(|nic| nic.address == local)?;
        let allowed = chosen.is_empty() || chosen.contains(&nic.name);
        allowed.then(|| Pair { nic: Some(nic), remote: conn.remote(), remote_nic: String::new() })
    }

    /// Dials control connections over every path, if the session has to be resumed.
    fn take_resumptions(
        &mut self,
        context: &Context,
        me: &Hello,
        now: Duration,
        out: &mut Vec<(Dial, DialFor)>,
    ) {
        let Role::Connector(connector) = &mut self.role else { return };
        if !connector.resumption.take_due(now) {
            return;
        }
        let (session, target) = (self.session.id(), &connector.target);
        let pairs = connector.pairs.iter().enumerate();
        let is_proven = |index| connector.proven.contains(&index);
        let mut paths: Vec<_> =
            pairs.map(|(index, pair)| (pair.nic.as_ref(), pair.remote, is_proven(index))).collect();
        paths.push((None, target.address, true));
        for (nic, remote, proven) in paths {
            let (received, data_key) = (self.session.received(), self.data_key.clone());
            let purpose = Purpose::Resume { session, received, data_key };
            let secret = target.secret_of(context);
            let secret = secret.as_ref().map(|secret| secret.as_slice());
            match Dial::resume(context, me, nic, remote, secret, purpose) {
                Ok(dial) => out.push((dial, DialFor::Resume { session, proven })),
                Err(error) => self.last_trouble = Some(error),
            }
        }
    }

    /// Binds a data connection and announces it to the peer, so that a steering rule can be in place before
    /// its first packet. The announcements of all channels share one round trip.
    fn announce(&mut self, index: u16, path: &Pair, now: Duration) {
        let generation = self.channels[index].generation;
        match Announced::new(&self.peer, path.nic.as_ref(), path.remote, &self.bulk_options()) {
            Ok(announced) => {
                let source = announced.source();
                tracing::debug!(peer = self.peer.name(), channel = index, %source, "data connection announced");
                self.say(ControlMessage::Dialling { channel: index, generation, source }, now);
                self.channels[index].state = ChannelState::Announced { since: now, announced };
            }
            Err(error) => self.channel_failed(index, generation, error, now),
        }
    }

    /// Confirms an announced data connection. The peer dials it then.
    pub(super) fn peer_announces(
        &mut self,
        channel: u16,
        generation: u32,
        source: SocketAddr,
        now: Duration,
    ) {
        let Some(record) = self.channels.get_mut(channel) else { return };
        if matches!(self.role, Role::Connector(_)) {
            return;
        }
        tracing::debug!(peer = self.peer.name(), channel, %source, "data connection expected");
        record.source = Some((generation, source));
        self.say(ControlMessage::Expected { channel, generation }, now);
    }

    pub(super) fn peer_expects(&mut self, channel: u16, generation: u32) {
        let Some(record) = self.channels.get_mut(channel) else { return };
        if record.generation != generation {
            return;
        }
        record.state = match record.take() {
            ChannelState::Announced { announced, .. } => ChannelState::Expected { announced },
            state => state,
        };
    }

    fn dial_announced(&mut self, index: u16, now: Duration) -> Option<(Dial, DialFor)> {
        let generation = self.channels[index].generation;
        let ChannelState::Expected { announced } = self.channels[index].take() else { return None };
        let session = self.session.id();
        match Dial::channel(announced, session, self.data_key.clone(), index, generation) {
            Ok(dial) => {
                self.channels[index].state = ChannelState::Dialling;
                Some((dial, DialFor::Channel { session, index, generation }))
            }
            Err(error) => {
                self.channel_failed(index, generation, error, now);
                None
            }
        }
    }

    pub fn channel_failed(&mut self, index: u16, generation: u32, error: Error, now: Duration) {
        let record = &mut self.channels[index];
        if let Stage::Settling(settling) = &mut self.stage {
            settling.dial_failed |= matches!(record.state, ChannelState::Dialling);
        }
        if record.generation == generation && (record.state.is_down() || record.state.is_coming()) {
            // The acceptor may have accepted this generation: use the next number.
            record.dial_failed(generation, now);
            self.peer.history.failed_dials.fetch_add(1, Ordering::Relaxed);
        }
        tracing::debug!(peer = self.peer.name(), channel = index, %error, "cannot connect a channel");
        self.last_trouble = Some(error);
    }

    pub fn channel_dialled(
        &mut self,
        context: &Context,
        conn: Box<dyn Conn>,
        index: u16,
        generation: u32,
        secrets: RecordSecrets,
        now: Duration,
    ) {
        if let Role::Connector(connector) = &mut self.role {
            connector.note_proven(&*conn);
        }
        // The peer may have lost and fenced the connection before its handshake ended here.
        let record = &self.channels[index];
        if matches!(record.state, ChannelState::Dialling) && record.generation == generation {
            self.channel_up(context, self.protected(conn, secrets), index, generation, now);
        }
    }

    pub fn channel_accepted(
        &mut self,
        context: &Context,
        mut conn: Box<dyn Conn>,
        index: u16,
        generation: u32,
        secrets: RecordSecrets,
        now: Duration,
    ) {
        context.transport.tune(&mut *conn, &self.bulk_options());
        self.compare_source(conn.remote(), index, generation);
        let record = &mut self.channels[index];
        let current = record.generation;
        if generation > current {
            match record.state {
                ChannelState::Lane => {
                    // The peer has given that connection up before its lane was ready. Nothing was sent over
                    // it, and the peer does not report it.
                    tracing::debug!(
                        peer = self.peer.name(),
                        channel = index,
                        "channel dialled again before its lane was set up"
                    );
                    record.close_generation(current);
                    record.state = ChannelState::Down { dial_at: now };
                    self.lanes.drop_setup_before(index, generation);
                }
                // The peer has given up the connection that is still open here. It will dial again.
                ChannelState::Up { .. } => {
                    self.drop_channel(index, current, "the peer dialled the channel again");
                }
                _ => {}
            }
        }
        if !self.channels[index].may_come_up(generation) {
            tracing::debug!(peer = self.peer.name(), channel = index, "stale data connection dropped");
            return;
        }
        self.channel_up(context, self.protected(conn, secrets), index, generation, now);
    }

    /// The connection, in records if the session is protected.
    fn protected(&self, conn: Box<dyn Conn>, secrets: RecordSecrets) -> Box<dyn Conn> {
        match self.peer.info.protection {
            Some(protection) => Box::new(Sealed::new(conn, protection, secrets, self.dials()).lending()),
            None => conn,
        }
    }

    /// Logs a data connection from another address than announced. Only the proof of membership admits a
    /// connection: NAT may change its address and port, so a difference is no evidence.
    fn compare_source(&self, remote: SocketAddr, channel: u16, generation: u32) {
        let announced = self.channels[channel].source.filter(|(current, _)| *current == generation);
        match announced {
            Some((_, source)) if source == remote => {}
            Some((_, source)) => {
                tracing::debug!(peer = self.peer.name(), channel, %remote, %source, "address translated between the hosts (NAT)");
            }
            None => {
                tracing::debug!(peer = self.peer.name(), channel, %remote, "data connection from an address that was not announced")
            }
        }
    }

    fn channel_up(
        &mut self,
        context: &Context,
        conn: Box<dyn Conn>,
        index: u16,
        generation: u32,
        now: Duration,
    ) {
        match self.lanes.backend() {
            _ if self.dying() => {}
            Some(backend) => self.start_lane(backend, context, conn, index, generation, now),
            None => self.carries_data(context, Channel::new(conn, self.peer.clone(), index, generation), now),
        }
    }

    /// Hands the complete channel to its worker.
    pub(in crate::control) fn carries_data(&mut self, context: &Context, channel: Channel, now: Duration) {
        let (index, generation) = (channel.index, channel.generation);
        if let Role::Acceptor(acceptor) = &mut self.role {
            acceptor.note_host(channel.conn().remote().ip());
        }
        self.channels[index].set(generation, ChannelState::Up { peer_fence: None });
        self.channels[index].up_since = now;
        self.channels[index].failures = 0;
        let worker = self.peer.engine_worker(index);
        let address = channel.conn().local().ip();
        let nic = context.transport.nic_name(address).unwrap_or_else(|| address.to_string());
        let name = || ChannelName { peer: self.peer.name().into(), index, nic: nic.clone(), worker };
        channel.counters.track.name(name);
        channel.counters.runs_over(nic);
        // Choose the home first: the new channel's worker sends small operations only if it is the home.
        self.peer.choose_home();
        // Deliver the peer to its user first: what the last channel acknowledges is then of a peer that can be accepted.
        self.settle(now);
        self.workers[worker].command(Command::Add(Box::new(channel)));
        if generation > 0 {
            tracing::info!(peer = self.peer.name(), channel = index, "channel carries data again");
        }
    }

    /// Reports to the waiting user that the peer is connected, or that it cannot be reached.
    pub(super) fn settle(&mut self, now: Duration) {
        let Stage::Settling(settling) = &self.stage else { return };
        if self.ending.is_some() {
            return;
        }
        let (up, all) = (self.channels.up().count(), self.channels.len());
        let waited = now.saturating_sub(settling.since);
        let (some, none) = self.lanes.settle_limits(limits::DIAL_TIMEOUT, limits::HANDSHAKE_TIMEOUT);
        // A peer that closes already may be gone before all its channels are connected.
        let visited = up > 0 && self.closing.peer_has_asked() && matches!(self.role, Role::Acceptor(_));
        if up == all || (up > 0 && waited > some) || visited {
            *self.peer.history.setup.lock().unwrap_or_else(PoisonError::into_inner) = waited;
            if up < all && !visited {
                let trouble = self.last_trouble.as_ref().map(Error::to_string);
                let trouble = trouble.unwrap_or_else(|| self.unanswered());
                let line = format!("{} of {all} channels could not be set up: {trouble}", all - up);
                tracing::warn!(peer = self.peer.name(), "{line}");
                self.peer.history.note_lost(line);
            }
            if let Stage::Settling(settling) = std::mem::replace(&mut self.stage, Stage::Up) {
                settling.awaited.put(PeerHandle(self.peer.clone()));
            }
        } else if waited > limits::DIAL_TIMEOUT && self.leads_nowhere() && self.fall_back_to_target() {
            self.channels.restart_backoff(now);
            tracing::debug!(
                peer = self.peer.name(),
                "no NIC pairs with the peer: all channels use the dialled address"
            );
        } else if waited > none {
            let why =
                "no data connection could be made: check that the peer's advertised addresses are reachable";
            self.fail(LossCause::NoChannel, why.into());
        }
    }

    /// The first path whose data connection is still awaited.
    fn unanswered(&self) -> String {
        let awaited = self.channels.indices().find(|index| !self.channels[*index].state.is_up());
        let pair = match &self.role {
            Role::Connector(connector) => {
                awaited.and_then(|index| connector.pairs.get(*connector.assigned.get(usize::from(index))?))
            }
            Role::Acceptor(_) => None,
        };
        pair.map_or_else(
            || "no answer yet".into(),
            |pair| format!("{}: no answer yet", path_name(pair.nic.as_ref(), pair.remote)),
        )
    }

    /// Whether data connections were dialled and none was established. A peer that is slow to confirm has not
    /// been dialled.
    fn leads_nowhere(&self) -> bool {
        let tried = matches!(&self.stage, Stage::Settling(settling) if settling.dial_failed);
        let leads = |state: &ChannelState| !state.is_down() && !matches!(state, ChannelState::Dialling);
        tried && !self.channels.iter().any(|record| leads(&record.state))
    }

    /// Whether a channel is dialled less often because its path leads nowhere.
    pub fn backs_off(&self) -> bool {
        self.dials() && self.channels.back_off()
    }

    /// Dials at once the channels that back off, because the NICs of this host have changed. `changes` is the
    /// number of changes so far.
    pub fn restart_backoff(&mut self, changes: u64, now: Duration) {
        if std::mem::replace(&mut self.nic_changes, changes) != changes {
            self.channels.restart_backoff(now);
        }
    }

    fn fall_back_to_target(&mut self) -> bool {
        match &mut self.role {
            Role::Connector(connector) => connector.fall_back_to_target(),
            Role::Acceptor(_) => false,
        }
    }
}
