//! Channels on their way: announced, dialled, accepted, and when the peer is up.

use super::{Link, Role, Slot, Stage};
use crate::control::dial::{Announced, Dial, DialFor, bulk_options};
use crate::control::pairs::{Pair, by_route};
use crate::core::channel::Channel;
use crate::core::context::Context;
use crate::core::peer::PeerHandle;
use crate::core::worker::Command;
use crate::error::Error;
use ferrywire_net::Conn;
use ferrywire_proto::handshake::{Hello, Purpose};
use ferrywire_proto::limits;
use ferrywire_proto::session::ControlMessage;
use std::net::SocketAddr;
use std::sync::PoisonError;
use std::time::Duration;

impl Link {
    /// Connections that have to be made now.
    pub fn take_dials(&mut self, context: &Context, me: &Hello, now: Duration) -> Vec<(Dial, DialFor)> {
        let mut out = Vec::new();
        let Role::Connector { target, pairs, dealt } = &self.role else {
            return out;
        };
        if self.dying() {
            return out;
        }
        let (id, address, pairs, dealt) = (self.session.id(), target.address, pairs.clone(), dealt.clone());
        if self.resuming && self.disowned.is_none() && now >= self.resume_at {
            self.resume_at = now + 2 * limits::REDIAL_INTERVAL;
            let mut paths: Vec<_> = pairs.iter().map(|pair| (pair.nic.clone(), pair.remote)).collect();
            paths.push((None, address));
            let secret = target.secret_of(context);
            for (nic, remote) in paths {
                let (received, data_key) = (self.session.received(), self.data_key.clone());
                let purpose = Purpose::Resume { session: id, received, data_key };
                match Dial::resume(context, me, nic.as_ref(), remote, secret, purpose) {
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
                    let pair = &pairs[dealt[usize::from(index)]];
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
    pub(super) fn announce(&mut self, index: u16, pair: &Pair, now: Duration) {
        let (_, generation) = self.slots[usize::from(index)];
        let options = bulk_options(&self.peer, self.conn.as_deref());
        match Announced::new(&self.peer, pair.nic.as_ref(), pair.remote, &options) {
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
    pub(super) fn peer_announces(
        &mut self,
        channel: u16,
        generation: u32,
        source: SocketAddr,
        now: Duration,
    ) {
        if matches!(self.role, Role::Connector { .. }) || usize::from(channel) >= self.slots.len() {
            return;
        }
        tracing::debug!(peer = self.peer.name(), channel, %source, "data connection expected");
        self.sources.insert(channel, (generation, source));
        self.say(ControlMessage::Expected { channel, generation }, now);
    }

    pub(super) fn peer_expects(&mut self, channel: u16, generation: u32) {
        if let Some(slot) = self.slots.get_mut(usize::from(channel))
            && matches!(*slot, (Slot::Announced { .. }, current) if current == generation)
        {
            slot.0 = Slot::Expected;
        }
    }

    pub(super) fn dial_announced(
        &mut self,
        index: u16,
        generation: u32,
        now: Duration,
    ) -> Option<(Dial, DialFor)> {
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
        self.dial_failed |= slot.0 == Slot::Dialling;
        if slot.1 == generation && slot.0 != Slot::Up {
            // The acceptor may have taken it up: a number is used once.
            *slot = (Slot::Down { dial_at: now + limits::REDIAL_INTERVAL }, generation + 1);
        }
        tracing::debug!(peer = self.peer.name(), channel = index, %error, "channel cannot be connected");
        self.last_trouble = Some(error);
    }

    pub fn channel_dialled(
        &mut self,
        context: &Context,
        conn: Box<dyn Conn>,
        index: u16,
        generation: u32,
        now: Duration,
    ) {
        // The peer may have lost, and fenced, the connection before its handshake ended here.
        if self.slots[usize::from(index)] == (Slot::Dialling, generation) {
            self.channel_up(context, conn, index, generation, now);
        }
    }

    pub fn channel_accepted(
        &mut self,
        context: &Context,
        mut conn: Box<dyn Conn>,
        index: u16,
        generation: u32,
        now: Duration,
    ) {
        context.transport.tune(&mut *conn, &bulk_options(&self.peer, self.conn.as_deref()));
        self.compare_source(conn.remote(), index, generation);
        let (slot, current) = self.slots[usize::from(index)];
        if slot == Slot::Lane && generation > current {
            // The peer has given up that connection before its lane stood: nothing came over it, and it says nothing of lanes.
            tracing::debug!(peer = self.peer.name(), channel = index, "dialled again before its lane stood");
            self.lanes.drop_setup_before(index, generation);
            self.close_generation(index, current);
            self.slots[usize::from(index)].0 = Slot::Down { dial_at: now };
        }
        let (slot, current) = self.slots[usize::from(index)];
        if slot == Slot::Up && generation > current {
            // The peer has given up the connection that we still hold; it will dial once more.
            self.drop_channel(index, current, "the peer dialled it again".into());
        }
        if !matches!(slot, Slot::Down { .. }) || generation < self.least[usize::from(index)] {
            tracing::debug!(peer = self.peer.name(), channel = index, "a stale data connection was dropped");
            return;
        }
        self.channel_up(context, conn, index, generation, now);
    }

    /// The proof of membership is what lets a connection in. Its address may have been translated on the
    /// way, even to another port of the same host, so that a difference proves nothing.
    pub(super) fn compare_source(&self, remote: SocketAddr, channel: u16, generation: u32) {
        let announced = self.sources.get(&channel).filter(|(current, _)| *current == generation);
        match announced {
            Some((_, source)) if *source == remote => {}
            Some((_, source)) => {
                tracing::debug!(peer = self.peer.name(), channel, %remote, %source, "translated on its way");
            }
            None => tracing::debug!(peer = self.peer.name(), channel, %remote, "not announced"),
        }
    }

    pub(super) fn channel_up(
        &mut self,
        context: &Context,
        conn: Box<dyn Conn>,
        index: u16,
        generation: u32,
        now: Duration,
    ) {
        match self.lanes.carrier() {
            _ if self.dying() => {}
            Some(carrier) => self.start_lane(carrier, context, conn, index, generation, now),
            None => self.carries_data(context, Channel::new(conn, self.peer.clone(), index, generation), now),
        }
    }

    /// Nothing is missing any more: the channel goes to its worker.
    pub(in crate::control) fn carries_data(&mut self, context: &Context, channel: Channel, now: Duration) {
        let (index, generation) = (channel.index, channel.generation);
        self.note_host(channel.conn().remote().ip());
        self.slots[usize::from(index)] = (Slot::Up, generation);
        self.up_since[usize::from(index)] = now;
        let worker = &self.workers[self.peer.engine_worker(index)];
        let address = channel.conn().local().ip();
        let nic = context.transport.nic_name(address).unwrap_or_else(|| address.to_string());
        self.peer.counters(index).runs_over(nic);
        // The home first: the worker that gets the channel sends small operations only if it is that.
        self.peer.choose_home();
        worker.command(Command::Add(Box::new(channel)));
        if generation > 0 {
            tracing::info!(peer = self.peer.name(), channel = index, "channel carries data again");
        }
        self.settle(now);
    }

    /// Whether dialling was tried, and has brought no connection; a peer that is slow to expect one has not been dialled.
    fn leads_nowhere(&self) -> bool {
        self.dial_failed
            && self.slots.iter().all(|(slot, _)| matches!(slot, Slot::Down { .. } | Slot::Dialling))
    }

    /// Deals all channels to the path on which the peer was reached; false where they have been.
    fn go_where_it_was_dialled(&mut self) -> bool {
        let Role::Connector { target, pairs, dealt } = &mut self.role else { return false };
        if pairs.iter().any(|pair| pair.remote == target.address) {
            return false;
        }
        pairs.push(by_route(target.address));
        dealt.fill(pairs.len() - 1);
        true
    }

    /// Tells whoever waits that the peer is up, or that it cannot be reached.
    pub(super) fn settle(&mut self, now: Duration) {
        if self.stage != Stage::Settling || self.error.is_some() {
            return;
        }
        let up = self.slots.iter().filter(|(slot, _)| *slot == Slot::Up).count();
        let waited = now.saturating_sub(self.started);
        let (some, none) = self.lanes.settle_limits(limits::DIAL_DEADLINE, limits::HANDSHAKE_DEADLINE);
        // A peer that came, sent what it had, and goes, does so before all channels are there.
        let visited = up > 0 && self.peer_drains && matches!(self.role, Role::Acceptor);
        if up == self.slots.len() || (up > 0 && waited > some) || visited {
            self.stage = Stage::Up;
            *self.peer.setup.lock().unwrap_or_else(PoisonError::into_inner) = waited;
            if up < self.slots.len() && !visited {
                let trouble = self.last_trouble.as_ref().map(Error::to_string).unwrap_or_default();
                let line = format!(
                    "{} of {} channels could not be set up: {trouble}",
                    self.slots.len() - up,
                    self.slots.len()
                );
                tracing::warn!(peer = self.peer.name(), "{line}");
                self.peer.note_lost(line);
            }
            if let Some(queue) = self.accept_queue.take() {
                queue.put(Ok(PeerHandle(self.peer.clone())));
                self.permit = None;
            }
        } else if waited > limits::DIAL_DEADLINE && self.leads_nowhere() && self.go_where_it_was_dialled() {
            tracing::debug!(
                peer = self.peer.name(),
                "no NIC's own path leads to it: all channels go where it was dialled"
            );
        } else if waited > none {
            let why = "no data connection came about: is the peer's advertised address reachable?";
            self.fail(why.into());
        }
    }
}
