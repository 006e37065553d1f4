//! Admission of connections: the table of sessions, and the decisions of handshakes on it.
//!
//! Invariant: no more than `limits::PEERS_MAX` sessions are admitted. Read next: `accepting.rs`.

use super::accept_queue::{AcceptQueue, Permit};
use super::full;
use super::lanes::LANE;
use crate::config::Secrets;
use crate::core::context::Context;
use crate::payload::payload_backend::{self, Incompatible};
use ferrywire_proto::handshake::{
    Admission, Config, DataKey, Established, Hello, KnownSession, ListenAddress, Refusal, RefusalCode,
};
use ferrywire_proto::limits;
use ferrywire_proto::protection::ProtectionWish;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use zeroize::Zeroizing;

/// All sessions of an endpoint, and the endpoint's own data for handshakes.
pub(super) struct SessionTable {
    me: Hello,
    secret_needed: bool,
    context: Arc<Context>,
    sessions: HashMap<u64, Known>,
    accept_queue: Arc<AcceptQueue>,
    /// Whether new sessions are refused, because the endpoint closes.
    is_closing: bool,
}

struct Known {
    data_key: DataKey,
    /// Whether this end opened the session, so that the peer must not dial its data connections.
    dialled_by_us: bool,
    identity: [u8; 16],
    received: u64,
    config: Config,
}

impl SessionTable {
    pub fn new(
        me: Hello,
        secret_needed: bool,
        context: Arc<Context>,
        accept_queue: Arc<AcceptQueue>,
    ) -> SessionTable {
        let sessions = HashMap::new();
        SessionTable { me, secret_needed, context, sessions, accept_queue, is_closing: false }
    }

    /// Agrees on the session's configuration, including whether payload goes over lanes.
    fn agree(&self, peer: &Hello, proposed: &Config) -> Result<Config, Incompatible> {
        let config = self.within_settings(proposed);
        let same_host = peer.shares_host(&self.me) == Some(true);
        let (backend, none) = (self.context.backend.as_deref(), self.context.no_backend.as_deref());
        let extra = payload_backend::answer(backend, none, &config.extra, same_host, &config)?;
        Ok(Config { extra, ..config })
    }

    /// The proposed configuration within the settings of this endpoint: the smaller numbers, and checksums if one end
    /// wants them.
    fn within_settings(&self, proposed: &Config) -> Config {
        let own = &self.context.config;
        Config {
            channels: own.channels.map_or(proposed.channels, |most| proposed.channels.min(most as u16)),
            chunk_bytes: own
                .chunk_bytes_set
                .map_or(proposed.chunk_bytes, |most| proposed.chunk_bytes.min(most as u32)),
            window: proposed.window.min(own.window as u32),
            crc: proposed.crc || own.crc,
            ..proposed.clone()
        }
    }

    /// Updates the listening addresses: NICs come and go.
    pub fn listens_on(&mut self, addresses: Vec<ListenAddress>) {
        self.me.addresses = addresses;
    }

    /// Refuses new sessions from now on.
    pub fn take_no_more(&mut self) {
        self.is_closing = true;
    }

    /// Adds a session that this end or the peer has opened.
    pub fn enter(&mut self, established: &Established, dialled_by_us: bool) {
        let known = Known {
            data_key: established.data_key.clone(),
            dialled_by_us,
            identity: established.peer_hello.identity,
            received: 0,
            config: established.config.clone(),
        };
        self.sessions.insert(established.session, known);
    }

    /// Notes the number of messages received in a session, or removes a session that is over.
    pub fn update(&mut self, session: u64, received: u64, over: bool) {
        if over {
            self.sessions.remove(&session);
        } else if let Some(known) = self.sessions.get_mut(&session) {
            known.received = received;
        }
    }
}

/// Answers the questions of one handshake from the table of sessions.
pub(super) struct Admitter {
    table: Arc<Mutex<SessionTable>>,
    /// The permit of a new peer, until its link has one.
    permit: Option<Permit>,
}

impl Admitter {
    pub fn new(table: Arc<Mutex<SessionTable>>) -> Admitter {
        Admitter { table, permit: None }
    }

    fn table(&self) -> MutexGuard<'_, SessionTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Admitter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Admitter")
    }
}

impl Admission for Admitter {
    fn hello(&self) -> Hello {
        self.table().me.clone()
    }

    fn secrets(&self) -> Vec<Zeroizing<Vec<u8>>> {
        let Secrets { current, also_accepted } = self.table().context.secrets();
        current.into_iter().chain(also_accepted).map(|secret| secret.0).collect()
    }

    fn wish(&self) -> ProtectionWish {
        self.table().context.config.wish()
    }

    fn secret_needed(&self) -> bool {
        self.table().secret_needed
    }

    fn lookup(&self, session: u64) -> Option<KnownSession> {
        self.table().sessions.get(&session).map(|known| KnownSession {
            data_key: known.data_key.clone(),
            identity: known.identity,
            received: known.received,
            config: known.config.clone(),
        })
    }

    fn decide_new(&mut self, peer: &Hello, config: &Config) -> Result<(u64, Config), Refusal> {
        let table = self.table();
        if table.is_closing {
            // Another endpoint may listen at this address soon.
            return Err(Refusal::new(RefusalCode::Busy, "the endpoint closes"));
        }
        if table.sessions.len() >= limits::PEERS_MAX {
            return Err(full(&format!("PEERS_MAX = {} reached", limits::PEERS_MAX)));
        }
        if peer.identity == table.me.identity {
            return Err(Refusal::new(RefusalCode::Config, "an endpoint cannot connect to itself"));
        }
        let config = table.agree(peer, config).map_err(|why| Refusal::new(why.code(), why.to_string()))?;
        let mut session = table.context.transport.session_number();
        while table.sessions.contains_key(&session) {
            session = table.context.transport.session_number();
        }
        let permit = table.accept_queue.try_permit();
        drop(table);
        if permit.is_none() {
            let name = "PEERS_UNACCEPTED_MAX";
            return Err(full(&format!(
                "{name} = {} peers wait to be accepted",
                limits::PEERS_UNACCEPTED_MAX
            )));
        }
        self.permit = permit;
        Ok((session, config))
    }

    fn decide_data(&mut self, session: u64, channel: u16, generation: u32) -> Result<(), Refusal> {
        match self.table().sessions.get(&session) {
            None => Err(Refusal::new(RefusalCode::UnknownSession, "the session is over")),
            Some(known) if known.dialled_by_us => {
                let why = "only the end that opened the session dials connections, and this end opened it";
                Err(Refusal::new(RefusalCode::Config, why))
            }
            Some(known) if channel & LANE != 0 && known.config.extra.is_empty() => {
                Err(Refusal::new(RefusalCode::Config, "a connection for a lane, in a session without lanes"))
            }
            Some(known) if channel & !LANE >= known.config.channels => Err(Refusal::new(
                RefusalCode::Config,
                "a connection for a channel that the session does not have",
            )),
            Some(_) if generation == u32::MAX => Err(Refusal::new(
                RefusalCode::Limit,
                "the channel was dialled more often than its number of connections can count",
            )),
            Some(_) => Ok(()),
        }
    }
}
