//! An [`Admission`] for tests that answer handshakes.
#![allow(missing_docs)]

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use zeroize::Zeroizing;

use crate::protection::ProtectionWish;

use super::{Admission, Config, Established, Hello, KnownSession, ListenAddress, Refusal};

/// The state of one endpoint: its identity, secret and sessions.
#[derive(Debug)]
pub struct Desk {
    pub hello: Hello,
    pub secret: Option<Vec<u8>>,
    pub also_accepted: Option<Vec<u8>>,
    pub secret_needed: bool,
    pub wish: ProtectionWish,
    pub sessions: HashMap<u64, KnownSession>,
    pub refuse: Option<Refusal>,
    /// The configuration of every new session, whatever the proposal; `None` accepts the proposal.
    pub settle: Option<Config>,
    /// The admission's decisions as text, in order.
    pub decided: Vec<String>,
}

/// An endpoint's state, shared by a test and its responders.
#[derive(Clone, Debug)]
pub struct Shared(Arc<Mutex<Desk>>);

impl Shared {
    pub fn new(secret: Option<&str>) -> Shared {
        let secret = secret.map(|secret| secret.as_bytes().to_vec());
        let (sessions, decided) = (HashMap::new(), Vec::new());
        let (hello, secret_needed) = (hello(2), false);
        let wish = ProtectionWish::default();
        let also_accepted = None;
        let desk = Desk {
            hello,
            secret,
            also_accepted,
            secret_needed,
            wish,
            sessions,
            refuse: None,
            settle: None,
            decided,
        };
        Shared(Arc::new(Mutex::new(desk)))
    }

    pub fn desk(&self) -> MutexGuard<'_, Desk> {
        self.0.lock().unwrap()
    }

    /// Stores an established session, as an endpoint does.
    pub fn remember(&self, established: &Established) {
        let Established { data_key, peer_hello, config, session, .. } = established;
        let (data_key, config) = (data_key.clone(), config.clone());
        let known = KnownSession { data_key, identity: peer_hello.identity, received: 0, config };
        self.desk().sessions.insert(*session, known);
    }

    fn decide(&self, what: String) -> Result<(), Refusal> {
        let mut desk = self.desk();
        desk.decided.push(what);
        desk.refuse.clone().map_or(Ok(()), Err)
    }
}

impl Admission for Shared {
    fn hello(&self) -> Hello {
        self.desk().hello.clone()
    }

    fn secrets(&self) -> Vec<Zeroizing<Vec<u8>>> {
        let desk = self.desk();
        desk.secret.iter().chain(&desk.also_accepted).cloned().map(Zeroizing::new).collect()
    }

    fn secret_needed(&self) -> bool {
        self.desk().secret_needed
    }

    fn wish(&self) -> ProtectionWish {
        self.desk().wish
    }

    fn lookup(&self, session: u64) -> Option<KnownSession> {
        self.desk().sessions.get(&session).cloned()
    }

    fn decide_new(&mut self, peer: &Hello, config: &Config) -> Result<(u64, Config), Refusal> {
        self.decide(format!("new {}", peer.label))?;
        let usual = || Config { channels: config.channels.min(8), ..config.clone() };
        Ok((77, self.desk().settle.clone().unwrap_or_else(usual)))
    }

    fn decide_resume(&mut self, session: u64, peer: &Hello) -> Result<(), Refusal> {
        self.decide(format!("resume {session} {}", peer.label))
    }

    fn decide_data(&mut self, session: u64, channel: u16, generation: u32) -> Result<(), Refusal> {
        self.decide(format!("data {session} {channel} {generation}"))
    }
}

pub fn hello(identity: u8) -> Hello {
    let listen = |address: &str, nic: &str| ListenAddress {
        address: address.parse().unwrap(),
        nic: String::from(nic),
    };
    Hello {
        identity: [identity; 16],
        boot_id: [9; 16],
        label: format!("gpu{identity}"),
        addresses: vec![listen("10.0.0.1:7471", "eth1"), listen("[fd00::1]:7471", "eth2")],
        peer_timeout_ms: 10_000,
    }
}

pub fn config() -> Config {
    Config {
        channels: 16,
        chunk_bytes: 1 << 20,
        window: 64,
        crc: true,
        wish: ProtectionWish::default(),
        extra: vec![1, 2, 3],
    }
}
