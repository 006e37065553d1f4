//! A connection that this end makes, until its handshake is done.
//!
//! Invariant: a dial ends within its timeout. Read next: `dialling.rs`, all dials of an endpoint.

use super::link::Link;
use super::{AcceptQueue, read_in, write_out};
use crate::config::Secret;
use crate::core::context::Context;
use crate::core::peer::PeerState;
use crate::error::{Error, Result, UnreachableCause};
use crate::payload::terms;
use ferrywire_net::{Bound, Conn, ConnOptions, Nic};
use ferrywire_proto::Identity;
use ferrywire_proto::handshake::{
    Config as SessionConfig, DataKey, HandshakeError, Hello, Initiator, Outcome, Purpose, RefusalCode,
};
use ferrywire_proto::limits;
use ferrywire_proto::schedule;
use ferrywire_sys::affinity;
use ferrywire_sys::poll::Interest;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;
use zeroize::Zeroizing;

/// An endpoint to connect to: its address, and what it has to prove.
///
/// ```
/// # use ferrywire::{ConnectTarget, Identity};
/// # let identity = Identity([7; 16]);
/// let target = ConnectTarget::new("192.0.2.7:7420".parse().unwrap()).identity(identity).secret(*b"of that peer");
/// ```
#[derive(Clone, Debug)]
pub struct ConnectTarget {
    pub(crate) address: SocketAddr,
    pub(crate) identity: Option<Identity>,
    pub(crate) secret: Option<Secret>,
}

impl ConnectTarget {
    /// Any endpoint that listens on this address and has this endpoint's secret.
    pub fn new(address: SocketAddr) -> ConnectTarget {
        ConnectTarget { address, identity: None, secret: None }
    }

    /// Accepts only the endpoint with this identity. An endpoint that was restarted has another one.
    pub fn identity(mut self, identity: Identity) -> ConnectTarget {
        self.identity = Some(identity);
        self
    }

    /// Sets the secret of the remote endpoint, if it differs from this endpoint's.
    ///
    /// The peer proves this secret as long as it is connected, also where a lost control connection is replaced. If the
    /// remote endpoint no longer accepts it, the peer is lost with its control connection.
    pub fn secret(mut self, secret: impl Into<Vec<u8>>) -> ConnectTarget {
        self.secret = Some(Secret::new(secret));
        self
    }

    /// The secret that both ends have to prove.
    pub(super) fn secret_of(&self, context: &Context) -> Option<Zeroizing<Vec<u8>>> {
        self.secret.clone().or_else(|| context.secrets().current).map(|secret| secret.0)
    }
}

/// The purpose of a dialled connection.
pub(super) enum DialFor {
    /// A new session. A busy end is dialled again until `until`.
    New {
        target: ConnectTarget,
        queue: Arc<AcceptQueue>,
        until: Duration,
        /// Why the session must not have lanes; `None` if it may.
        without: Option<String>,
    },
    Resume {
        session: u64,
        /// Whether the path has carried a connection of the session.
        proven: bool,
    },
    Channel {
        session: u64,
        index: u16,
        generation: u32,
    },
    /// A further connection, for a channel's lane.
    Lane {
        session: u64,
        index: u16,
        generation: u32,
    },
}

/// A bound data connection, announced to the peer before it is dialled.
pub(super) struct Announced {
    bound: Box<dyn Bound>,
    to: String,
}

impl Announced {
    pub fn new(
        peer: &PeerState,
        nic: Option<&Nic>,
        address: SocketAddr,
        options: &ConnOptions,
    ) -> Result<Announced> {
        let to = path_name(nic, address);
        let bound = peer.context().transport.bind(nic, address, options);
        let bound = bound.map_err(|error| unreachable_at(&to, &error, false))?;
        Ok(Announced { bound, to })
    }

    /// The local address of the connection.
    pub fn source(&self) -> SocketAddr {
        self.bound.local()
    }

    /// The error when the peer has not answered the announcement in time.
    pub fn unanswered(&self) -> Error {
        let why = "the peer did not answer on the control session that it expects the connection".into();
        Error::Unreachable { address: self.to.clone(), cause: UnreachableCause::NotExpected, why }
    }
}

/// A failed dial.
pub(super) struct DialFailure {
    pub error: Error,
    /// The other end's reason, if it refused.
    pub refused: Option<RefusalCode>,
}

/// A connection attempt with its handshake.
pub(super) struct Dial {
    pub conn: Box<dyn Conn>,
    initiator: Initiator,
    output: Vec<u8>,
    /// Whether the poller waits for writability, as it does at first.
    waits_to_write: bool,
    since: Duration,
    limit: Duration,
    to: String,
    /// How the number of channels follows from the path, unless the user has set it.
    by_default: Option<ChannelsByDefault>,
    pub what: DialFor,
}

/// What the default number of channels depends on, besides the path.
#[derive(Clone, Copy)]
struct ChannelsByDefault {
    cores: usize,
    pairs: usize,
}

impl ChannelsByDefault {
    fn over(self, round_trip: Duration) -> u16 {
        schedule::channels_default(self.cores, self.pairs, round_trip) as u16
    }
}

impl Dial {
    /// Dials the first control connection to a peer. `without` is the reason if no backend is to carry
    /// payload.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a missing secret or a NIC that does not exist, [`Error::NoUsableNic`] if no NIC
    /// has an address for the target's family, [`Error::Unreachable`] if the address cannot be dialled.
    pub fn control(
        context: &Context,
        me: &Hello,
        target: &ConnectTarget,
        without: Option<&str>,
    ) -> Result<Dial> {
        let (config, address) = (&context.config, target.address);
        let secret = target.secret_of(context);
        let secret = secret.as_ref().map(|secret| secret.as_slice());
        if secret.is_none() && !address.ip().is_loopback() && context.transport.name() != "sim" {
            let why =
                format!("needed to connect to {address}, beyond loopback: give both ends the same secret");
            return Err(Error::invalid("secret", why));
        }
        let nic = if config.nics.is_empty() { None } else { Some(named_nic(context, address)?) };
        let by_default = ChannelsByDefault {
            cores: affinity::cores_with_time(),
            pairs: super::pairs_expected(context, address),
        };
        let offered = match (without, &context.backend, &context.no_backend) {
            (Some(why), ..) => terms::without(why),
            (None, Some(backend), _) => backend.offer(address, &*context.transport)?,
            (None, None, Some(why)) => terms::without(&format!("at the end that connects: {why}")),
            (None, None, None) => Vec::new(),
        };
        let session = SessionConfig {
            channels: config.channels.map_or_else(|| by_default.over(Duration::ZERO), |said| said as u16),
            chunk_bytes: config.chunk_bytes as u32,
            window: config.window as u32,
            crc: config.crc,
            wish: config.wish(),
            extra: offered,
        };
        let purpose = Purpose::New { config: session };
        let dial =
            Dial::open(context, me, nic.as_ref(), address, secret, purpose, limits::HANDSHAKE_TIMEOUT)?;
        let by_default = config.channels.is_none().then_some(by_default);
        Ok(Dial { initiator: dial.initiator.of_one_end(target.identity), by_default, ..dial })
    }

    /// Dials a control connection that resumes a session.
    pub fn resume(
        context: &Context,
        me: &Hello,
        nic: Option<&Nic>,
        address: SocketAddr,
        secret: Option<&[u8]>,
        purpose: Purpose,
    ) -> Result<Dial> {
        Dial::open(context, me, nic, address, secret, purpose, limits::DIAL_TIMEOUT)
    }

    fn open(
        context: &Context,
        me: &Hello,
        nic: Option<&Nic>,
        address: SocketAddr,
        secret: Option<&[u8]>,
        purpose: Purpose,
        limit: Duration,
    ) -> Result<Dial> {
        let is_first = matches!(purpose, Purpose::New { .. });
        let initiator = Initiator::control(secret, me.clone(), purpose)
            .map_err(|error| Error::of_handshake(&error, address))?;
        let to = path_name(nic, address);
        let dialled = context.transport.dial(nic, address, &ConnOptions::default());
        let conn = dialled.map_err(|error| unreachable_at(&to, &error, is_first))?;
        Ok(Dial::over(conn, initiator, limit, to))
    }

    /// Dials the connection of a channel, which has been announced.
    pub fn channel(
        announced: Announced,
        session: u64,
        key: DataKey,
        channel: u16,
        generation: u32,
    ) -> Result<Dial> {
        let initiator = Initiator::data(session, key, channel, generation);
        let Announced { bound, to } = announced;
        let conn = bound.connect().map_err(|error| unreachable_at(&to, &error, false))?;
        Ok(Dial::over(conn, initiator, limits::DIAL_TIMEOUT, to))
    }

    fn over(conn: Box<dyn Conn>, initiator: Initiator, limit: Duration, to: String) -> Dial {
        let what = DialFor::Resume { session: 0, proven: false };
        let (output, since) = (Vec::new(), Duration::ZERO);
        Dial { conn, initiator, output, waits_to_write: true, since, limit, to, by_default: None, what }
    }

    /// Starts the timeout of the dial, whose purpose is `what`.
    pub fn begin(&mut self, what: DialFor, now: Duration) {
        self.what = what;
        self.since = now;
    }

    pub fn conn(&self) -> &dyn Conn {
        &*self.conn
    }

    /// The poller's new interest, if it has changed. A connection that is established becomes writable, and
    /// remains writable.
    pub fn changed_interest(&mut self) -> Option<(RawFd, Interest)> {
        let write = !self.output.is_empty();
        let changed = std::mem::replace(&mut self.waits_to_write, write) != write;
        Some((self.conn.fd()?, Interest { read: true, write })).filter(|_| changed)
    }

    /// Whether the dial is to resume this control session.
    pub fn resumes(&self, session: u64) -> bool {
        matches!(self.what, DialFor::Resume { session: mine, .. } if mine == session)
    }

    /// Whether the result of this dial is no longer of use: its session is gone, or works again.
    pub fn pointless(&self, links: &BTreeMap<u64, Link>) -> bool {
        match &self.what {
            DialFor::New { .. } => false,
            DialFor::Resume { session, .. } => links.get(session).is_none_or(|link| !link.needs_resume()),
            DialFor::Channel { session, .. } | DialFor::Lane { session, .. } => {
                links.get(session).is_none_or(Link::dying)
            }
        }
    }

    /// Continues the handshake; `None` until it has ended.
    pub fn advance(&mut self, now: Duration) -> Option<Result<Outcome, DialFailure>> {
        loop {
            self.output.append(&mut self.initiator.take_output());
            match write_out(&mut *self.conn, &mut self.output) {
                Ok(false) => {}
                Ok(true) => {
                    if let Some(outcome) = self.initiator.finished() {
                        return Some(Ok(outcome));
                    }
                }
                Err(error) => return Some(Err(self.broken(&error))),
            }
            let mut buffer = [0u8; limits::HANDSHAKE_BYTES_MAX];
            let want = self.initiator.want().min(buffer.len()).max(1);
            match read_in(&mut *self.conn, &mut buffer[..want]) {
                Ok(Some(0)) => return Some(Err(self.failed(&self.initiator.closed()))),
                Ok(Some(count)) => {
                    if let Some(by_default) = self.by_default.take() {
                        // The answer has come: the kernel has measured the path.
                        self.initiator.propose_channels(by_default.over(self.conn.health().min_rtt));
                    }
                    if let Err(error) = self.initiator.feed(&buffer[..count]) {
                        return Some(Err(self.failed(&error)));
                    }
                }
                Ok(None) if now.saturating_sub(self.since) > self.limit => {
                    return Some(Err(self.failed(&self.initiator.late())));
                }
                Ok(None) => return None,
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Some(Err(self.failed(&self.initiator.closed())));
                }
                Err(error) => return Some(Err(self.broken(&error))),
            }
        }
    }

    fn failed(&self, error: &HandshakeError) -> DialFailure {
        DialFailure { error: Error::of_handshake(error, &self.to), refused: error.refused_with() }
    }

    fn broken(&self, error: &io::Error) -> DialFailure {
        let is_first = matches!(self.what, DialFor::New { .. });
        DialFailure { error: unreachable_at(&self.to, error, is_first), refused: None }
    }
}

/// Options for a peer's data connections; the control connection has measured the RTT of the path.
pub(super) fn bulk_options(peer: &PeerState, control: Option<&dyn Conn>) -> ConnOptions {
    let context = peer.context();
    ConnOptions {
        same_host: peer.info.same_host,
        round_trip: control.map_or(Duration::ZERO, |conn| conn.health().min_rtt),
        per_thread: peer.channels_per_thread(),
        ..context.config.bulk_options()
    }
}

/// Describes the path to `address` over `nic`, for messages.
pub(super) fn path_name(nic: Option<&Nic>, address: SocketAddr) -> String {
    match nic {
        Some(nic) => format!("{address} over {}", nic.name),
        None => address.to_string(),
    }
}

/// Checks that each named NIC exists.
///
/// # Errors
/// [`Error::Invalid`] for the first name that is not among the NICs.
pub(crate) fn check_names(names: &[String], nics: &[Nic]) -> Result<()> {
    let Some(missing) = names.iter().find(|name| !nics.iter().any(|nic| nic.name == **name)) else {
        return Ok(());
    };
    let mut known: Vec<&str> = nics.iter().map(|nic| nic.name.as_str()).collect();
    known.sort_unstable();
    known.dedup();
    let why = format!("{missing} does not exist or has no address; name one of {}", known.join(", "));
    Err(Error::invalid("NIC", why))
}

/// The first configured NIC that can be used to reach an address.
fn named_nic(context: &Context, address: SocketAddr) -> Result<Nic> {
    let nics = context.transport.nics().map_err(|error| Error::io("list NICs", &error))?;
    let names = &context.config.nics;
    check_names(names, &nics)?;
    let fits = |nic: &&Nic| names.contains(&nic.name) && nic.address.is_ipv4() == address.is_ipv4();
    let best = nics.iter().filter(fits).max_by_key(|nic| (nic.reaches(address.ip()), nic.up));
    let none = || Error::NoUsableNic { nics: names.join(", "), address: address.to_string() };
    best.cloned().ok_or_else(none)
}

/// The error of a connection that cannot be made, with advice. `is_first`: no connection was made to this peer before.
fn unreachable_at(address: &str, error: &io::Error, is_first: bool) -> Error {
    let hint = match UnreachableCause::of(error) {
        UnreachableCause::ConnectionRefused if is_first => {
            "no process listens on that address and port: start the other end first, or correct the address"
        }
        UnreachableCause::ConnectionRefused => "no process listens on that address and port",
        UnreachableCause::NoAnswer => "no answer: check the address, and the firewalls of both hosts",
        UnreachableCause::NoRoute => "no route: check that the NIC is up, and the routes of this host",
        UnreachableCause::SourceAddressGone => "the NIC has lost its address: give the NIC an address again",
        UnreachableCause::NoFreePort => {
            "each data connection takes one port: use fewer channels or peers, or more NICs"
        }
        UnreachableCause::Forbidden => "check the firewall rules of this host",
        _ => "check address, port and firewall",
    };
    let cause = UnreachableCause::of(error);
    Error::Unreachable { address: address.into(), cause, why: format!("{error}; {hint}") }
}

#[cfg(test)]
mod tests {
    use std::mem::ManuallyDrop;

    use ferrywire_net::sim::SimNet;

    use super::*;
    use crate::{Builder, Endpoint};

    const PORT: u16 = 7420;

    /// The number of channels of two endpoints with this one-way latency between them, by default or as `said`.
    fn channels_at(latency: Duration, said: Option<usize>) -> usize {
        let net = SimNet::new(1);
        net.set_latency(latency);
        let end = |host: u8| {
            let address = [10, 0, 0, host].into();
            let host = net.host(&format!("host{host}"), &[("eth0", address)]);
            let listen = SocketAddr::new(address, PORT);
            let mut builder = Endpoint::builder().listen(listen).secret("a shared secret").threads(0);
            builder = said.into_iter().fold(builder, Builder::channels);
            builder.transport(host).build().unwrap()
        };
        // Forgotten, not dropped: a drop waits for the peer by a clock that does not advance any more.
        let ends = ManuallyDrop::new([end(1), end(2)]);
        let connecting = ends[0].start_connect(SocketAddr::new([10, 0, 0, 2].into(), PORT)).unwrap();
        loop {
            for end in ends.iter() {
                end.progress();
            }
            net.advance(Duration::from_micros(50));
            if let Some(peer) = connecting.poll() {
                return ManuallyDrop::new(peer.unwrap()).stats().channels.len();
            }
            assert!(net.now() < Duration::from_secs(10), "they do not connect");
        }
    }

    /// Regression: two cores had two channels over any path, and the buffers of two hold 12 MB.
    #[test]
    fn a_long_path_has_more_channels_by_default() {
        let near = channels_at(Duration::from_micros(50), None);
        assert_eq!(near, schedule::channels_default(affinity::cores_with_time(), 1, Duration::ZERO));
        assert_eq!(channels_at(Duration::from_millis(3), None), near.max(8));
        assert_eq!(channels_at(Duration::from_millis(3), Some(1)), 1);
    }
}
