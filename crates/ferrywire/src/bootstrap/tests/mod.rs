//! Two ends of a handshake joined in memory, with fragments, alterations and cuts. No socket, no sleep.

mod codec;
mod hostile;
mod opening;
mod replay;

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use super::*;

/// What one endpoint would hold: who it is, its secret and its sessions.
#[derive(Debug)]
pub(crate) struct Desk {
    pub(crate) hello: Hello,
    pub(crate) secret: Option<Vec<u8>>,
    pub(crate) secret_needed: bool,
    pub(crate) sessions: HashMap<u64, KnownSession>,
    pub(crate) refuse: Option<Refusal>,
    /// What is settled for a new session, whatever was proposed.
    pub(crate) settle: Option<Config>,
    /// What was decided, in order.
    pub(crate) decided: Vec<String>,
}

/// A desk shared by a test and the responders it drives.
#[derive(Clone, Debug)]
pub(crate) struct Shared(Arc<Mutex<Desk>>);

impl Shared {
    pub(crate) fn new(secret: Option<&str>) -> Shared {
        let secret = secret.map(|secret| secret.as_bytes().to_vec());
        let (sessions, decided) = (HashMap::new(), Vec::new());
        let (hello, secret_needed) = (hello(2), false);
        let desk = Desk { hello, secret, secret_needed, sessions, refuse: None, settle: None, decided };
        Shared(Arc::new(Mutex::new(desk)))
    }

    pub(crate) fn desk(&self) -> MutexGuard<'_, Desk> {
        self.0.lock().unwrap()
    }

    /// Remembers an established session, as an endpoint does.
    pub(crate) fn remember(&self, established: &Established) {
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

    fn secret(&self) -> Option<Vec<u8>> {
        self.desk().secret.clone()
    }

    fn secret_needed(&self) -> bool {
        self.desk().secret_needed
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

pub(crate) fn hello(identity: u8) -> Hello {
    let listen = |address: &str, nic: &str| ListenAddress {
        address: address.parse().unwrap(),
        nic: String::from(nic),
    };
    Hello {
        identity: [identity; 16],
        boot_id: [9; 16],
        label: format!("gpu{identity}"),
        addresses: vec![listen("10.0.0.1:7471", "eth1"), listen("[fd00::1]:7471", "eth2")],
        heartbeat_limit_ms: 10_000,
    }
}

pub(crate) fn config() -> Config {
    Config { channels: 16, chunk_bytes: 1 << 20, window: 64, crc: true, extra: vec![1, 2, 3] }
}

pub(crate) fn dial(secret: Option<&str>) -> Initiator {
    let purpose = Purpose::New { config: config() };
    Initiator::control(secret.map(str::as_bytes), hello(1), purpose).unwrap()
}

/// What happens to bytes between the two ends.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wire {
    /// Longest reads, in turn; empty reads all that is wanted.
    pub(crate) fragments: Vec<usize>,
    /// XORs one byte of one way.
    pub(crate) alter: Option<(usize, u8)>,
    /// One way ends after so many bytes.
    pub(crate) cut: Option<usize>,
    /// The way that `alter` and `cut` mean: to the initiator instead of to the responder.
    pub(crate) backwards: bool,
}

pub(crate) type End = Result<Outcome, HandshakeError>;

/// How a handshake went.
#[derive(Debug)]
pub(crate) struct Course {
    pub(crate) initiator: End,
    pub(crate) responder: End,
    /// Everything that was sent each way, as it was sent.
    pub(crate) to_responder: Vec<u8>,
    pub(crate) to_initiator: Vec<u8>,
}

impl Course {
    pub(crate) fn established(self) -> (Established, Established) {
        match (self.initiator, self.responder) {
            (Ok(Outcome::Control(initiator)), Ok(Outcome::Control(responder))) => (*initiator, *responder),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn errors(self) -> (HandshakeError, HandshakeError) {
        (self.initiator.unwrap_err(), self.responder.unwrap_err())
    }
}

#[derive(Debug, Default)]
struct Pipe {
    sent: Vec<u8>,
    waiting: VecDeque<u8>,
}

impl Pipe {
    fn put(&mut self, bytes: Vec<u8>, wire: &Wire, marked: bool) {
        for mut byte in bytes {
            let position = self.sent.len();
            self.sent.push(byte);
            if let Some((at, mask)) = wire.alter
                && marked
                && at == position
            {
                byte ^= mask;
            }
            if !marked || wire.cut.is_none_or(|cut| position < cut) {
                self.waiting.push_back(byte);
            }
        }
    }
}

/// Joins the two ends until neither can go on, then tells the unfinished that the connection ended.
pub(crate) fn join<A: Admission>(
    mut initiator: Initiator,
    mut responder: Responder<A>,
    wire: &Wire,
) -> Course {
    let (mut forth, mut back) = (Pipe::default(), Pipe::default());
    let (mut first, mut second) = (None, None);
    let mut fragments = wire.fragments.iter().copied().cycle();
    loop {
        forth.put(initiator.take_output(), wire, !wire.backwards);
        back.put(responder.take_output(), wire, wire.backwards);
        let longest = fragments.next().unwrap_or(usize::MAX);
        let wanted = responder.want().min(longest).min(forth.waiting.len());
        let bytes: Vec<u8> = forth.waiting.drain(..wanted).collect();
        if let Err(error) = responder.feed(&bytes) {
            second = Some(Err(error));
        }
        second = second.or(responder.finished().map(Ok));
        back.put(responder.take_output(), wire, wire.backwards);
        let also_wanted = initiator.want().min(longest).min(back.waiting.len());
        let bytes: Vec<u8> = back.waiting.drain(..also_wanted).collect();
        if let Err(error) = initiator.feed(&bytes) {
            first = Some(Err(error));
        }
        first = first.or(initiator.finished().map(Ok));
        if wanted == 0 && also_wanted == 0 {
            break;
        }
    }
    Course {
        initiator: first.unwrap_or_else(|| Err(initiator.closed())),
        responder: second.unwrap_or_else(|| Err(responder.closed())),
        to_responder: forth.sent,
        to_initiator: back.sent,
    }
}

/// A session between two ends that hold the same secret, and the desk that remembers it.
pub(crate) fn session(secret: Option<&str>) -> (Shared, Established, Established) {
    let desk = Shared::new(secret);
    let (initiator, responder) =
        join(dial(secret), Responder::new(desk.clone()), &Wire::default()).established();
    desk.remember(&responder);
    (desk, initiator, responder)
}

/// A dialler that resumes a session.
pub(crate) fn redial(secret: Option<&str>, session: u64, received: u64, data_key: &DataKey) -> Initiator {
    let purpose = Purpose::Resume { session, received, data_key: data_key.clone() };
    Initiator::control(secret.map(str::as_bytes), hello(1), purpose).unwrap()
}
