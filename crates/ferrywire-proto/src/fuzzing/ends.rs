//! Both ends of handshakes that the fuzz targets attack, checks for every outcome, and the wire between the
//! ends.

use super::{Input, KNOWN, OPENED, SECRET, check_text};
use crate::handshake::{
    Admission, Config, DataKey, Established, HandshakeError, Hello, Initiator, KnownSession, ListenAddress,
    Outcome, Purpose, Refusal, Responder,
};
use crate::limits;
use crate::protection::{Encryption, ProtectionWish};
use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use zeroize::Zeroizing;

/// Either end of a handshake, as seen by code that only moves bytes.
pub(super) trait End {
    fn want(&self) -> usize;
    fn feed(&mut self, bytes: &[u8]) -> Result<(), HandshakeError>;
    fn finished(&mut self) -> Option<Outcome>;
    fn closed(&self) -> HandshakeError;
    fn late(&self) -> HandshakeError;
}

macro_rules! end {
    ($($end:ty),*) => {$(
        impl End for $end {
            fn want(&self) -> usize {
                self.want()
            }
            fn feed(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
                self.feed(bytes)
            }
            fn finished(&mut self) -> Option<Outcome> {
                self.finished()
            }
            fn closed(&self) -> HandshakeError {
                self.closed()
            }
            fn late(&self) -> HandshakeError {
                self.late()
            }
        }
    )*};
}

end!(Initiator, Responder<Gate>);

/// The admission of the fuzzed responders; it records decisions.
#[derive(Clone, Debug)]
pub(super) struct Gate {
    secret: Option<Vec<u8>>,
    pub needed: bool,
    pub known: Option<KnownSession>,
    /// Number of decisions that a responder has asked for.
    pub decided: Rc<Cell<u32>>,
}

impl Gate {
    pub fn new(secret: Option<&[u8]>) -> Gate {
        Gate { secret: secret.map(<[u8]>::to_vec), needed: false, known: None, decided: Rc::default() }
    }

    fn decide(&self) {
        self.decided.set(self.decided.get() + 1);
    }
}

impl Admission for Gate {
    fn hello(&self) -> Hello {
        me(2)
    }

    fn secrets(&self) -> Vec<Zeroizing<Vec<u8>>> {
        self.secret.clone().map(Zeroizing::new).into_iter().collect()
    }

    fn secret_needed(&self) -> bool {
        self.needed
    }

    fn wish(&self) -> ProtectionWish {
        ProtectionWish { encryption: Encryption::Preferred, ..ProtectionWish::default() }
    }

    fn lookup(&self, session: u64) -> Option<KnownSession> {
        self.known.clone().filter(|_| session == KNOWN)
    }

    fn decide_new(&mut self, peer: &Hello, config: &Config) -> Result<(u64, Config), Refusal> {
        self.decide();
        check_hello(peer);
        check_config(config);
        Ok((OPENED, config.clone()))
    }

    fn decide_resume(&mut self, session: u64, peer: &Hello) -> Result<(), Refusal> {
        self.decide();
        check_hello(peer);
        assert_eq!(session, KNOWN);
        Ok(())
    }

    fn decide_data(&mut self, session: u64, _channel: u16, _generation: u32) -> Result<(), Refusal> {
        self.decide();
        assert_eq!(session, KNOWN);
        Ok(())
    }
}

pub(super) fn me(identity: u8) -> Hello {
    let listen = |ip: [u8; 4], nic: &str| ListenAddress { address: (ip, 7471).into(), nic: nic.into() };
    Hello {
        identity: [identity; 16],
        boot_id: [9; 16],
        label: format!("gpu{identity}"),
        addresses: vec![listen([10, 0, 0, 1], "eth1"), listen([10, 0, 1, 1], "eth2")],
        peer_timeout_ms: 10_000,
    }
}

pub(super) fn config() -> Config {
    Config {
        channels: 16,
        chunk_bytes: 1 << 20,
        window: 64,
        crc: true,
        wish: ProtectionWish { encryption: Encryption::Required, ..ProtectionWish::default() },
        extra: vec![1, 2, 3],
    }
}

fn check_hello(hello: &Hello) {
    assert!(hello.label.len() <= 64 && hello.addresses.len() <= limits::ADDRESSES_MAX);
    check_text(&hello.label);
    for entry in &hello.addresses {
        assert!(entry.nic.len() <= 15);
        check_text(&entry.nic);
    }
}

fn check_config(config: &Config) {
    assert!((1..=limits::CHANNELS_MAX).contains(&usize::from(config.channels)));
    assert!((1..=limits::CHUNK_BYTES_MAX).contains(&(config.chunk_bytes as usize)));
    assert!(config.window > 0 && config.extra.len() <= 256);
}

pub(super) fn check_outcome(outcome: &Outcome) {
    if let Outcome::Control(established) = outcome {
        check_hello(&established.peer_hello);
        check_config(&established.config);
    }
}

/// Feeds the bytes that `end` wants, in fragments; stops at an error, when the handshake is over, or at the
/// end of `bytes`.
pub(super) fn feed(end: &mut impl End, bytes: &[u8], input: &mut Input<'_>) -> Result<(), HandshakeError> {
    let mut rest = bytes;
    let mut fed = 0;
    while end.want() > 0 && !rest.is_empty() {
        let want = end.want();
        assert!(want <= limits::HANDSHAKE_BYTES_MAX);
        let fragment = match input.u8() {
            0 => want,
            1 => 0,
            2 => {
                assert_eq!(end.feed(&vec![0; want + 1]), Err(HandshakeError::Misuse));
                continue;
            }
            small => usize::from(small),
        };
        let (now, later) = rest.split_at(fragment.min(want).min(rest.len()));
        (rest, fed) = (later, fed + now.len());
        assert!(fed <= limits::HANDSHAKE_BYTES_MAX, "more is read than an unauthenticated end may send");
        check_text(&end.closed().to_string());
        if let Err(error) = end.feed(now) {
            check_text(&error.to_string());
            assert_eq!(end.want(), 0, "nothing is read after an error");
            assert!(end.finished().is_none());
            return Err(error);
        }
    }
    check_text(&end.late().to_string());
    Ok(())
}

thread_local! {
    /// A session between two ends that hold the secret, established once per thread.
    static SESSION: KnownSession = {
        let (initiator, _) = shake_hands();
        KnownSession {
            data_key: initiator.data_key,
            identity: me(1).identity,
            received: 3,
            config: config(),
        }
    };
}

pub(super) fn known() -> KnownSession {
    SESSION.with(Clone::clone)
}

pub(super) fn dial() -> Initiator {
    let purpose = Purpose::New { config: config() };
    Initiator::control(Some(SECRET), me(1), purpose).expect("this hello can be sent")
}

/// Runs a handshake without interference.
pub(super) fn shake_hands() -> (Established, Established) {
    let (mut one, mut two) = (dial(), Responder::new(Gate::new(Some(SECRET))));
    match join(&mut one, &mut two, &mut Wire::default(), &mut Input(&[])) {
        (Ok(Outcome::Control(one)), Ok(Outcome::Control(two))) => (*one, *two),
        other => panic!("{other:?}"),
    }
}

/// The wire between two ends, which may alter or drop bytes.
#[derive(Default)]
pub(super) struct Wire {
    /// Direction, position and XOR mask of each altered byte.
    pub alterations: Vec<(bool, usize, u8)>,
    /// Direction and position from which on no byte passes.
    pub cut: Option<(bool, usize)>,
    passed: [usize; 2],
    pub disturbed: [bool; 2],
}

impl Wire {
    fn pass(&mut self, back: bool, bytes: Vec<u8>, to: &mut VecDeque<u8>) {
        for byte in bytes {
            let at = self.passed[usize::from(back)];
            self.passed[usize::from(back)] += 1;
            let cut = self.cut.is_some_and(|(way, from)| way == back && at >= from);
            let hits = self.alterations.iter().filter(|(way, position, _)| *way == back && *position == at);
            let mask = hits.fold(0, |all, (_, _, mask)| all ^ mask);
            self.disturbed[usize::from(back)] |= cut || mask != 0;
            if !cut {
                to.push_back(byte ^ mask);
            }
        }
    }
}

type Ending = Result<Outcome, HandshakeError>;

/// Moves bytes between two ends until neither makes progress.
pub(super) fn join(
    one: &mut Initiator,
    two: &mut Responder<Gate>,
    wire: &mut Wire,
    input: &mut Input<'_>,
) -> (Ending, Ending) {
    let (mut forth, mut back) = (VecDeque::new(), VecDeque::new());
    let (mut first, mut second) = (None, None);
    loop {
        wire.pass(false, one.take_output(), &mut forth);
        let moved = step(two, &mut forth, &mut second, input);
        wire.pass(true, two.take_output(), &mut back);
        let also = step(one, &mut back, &mut first, input);
        if !moved && !also {
            break;
        }
    }
    (first.unwrap_or_else(|| Err(one.closed())), second.unwrap_or_else(|| Err(two.closed())))
}

fn step(
    end: &mut impl End,
    waiting: &mut VecDeque<u8>,
    ending: &mut Option<Ending>,
    input: &mut Input<'_>,
) -> bool {
    let fragment = match input.u8() {
        0 => usize::MAX,
        small => usize::from(small),
    };
    let count = end.want().min(fragment).min(waiting.len());
    let bytes: Vec<u8> = waiting.drain(..count).collect();
    if let Err(error) = end.feed(&bytes) {
        check_text(&error.to_string());
        ending.get_or_insert(Err(error));
    }
    if let Some(outcome) = end.finished() {
        check_outcome(&outcome);
        ending.get_or_insert(Ok(outcome));
    }
    count > 0
}

pub(super) fn resume(session: u64, received: u64, data_key: DataKey) -> Initiator {
    let purpose = Purpose::Resume { session, received, data_key };
    Initiator::control(Some(SECRET), me(1), purpose).expect("this hello can be sent")
}
