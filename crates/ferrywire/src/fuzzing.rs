//! What the fuzzer feeds: one function for each part of the engine that reads what others wrote.
//!
//! Each takes arbitrary bytes, spends some of them on choices, and panics when an invariant is broken.
//! [`hello`] plays strangers who do not hold the secret, somebody on the wire who alters what passes, and
//! an *insider*: an independent implementation of the handshake that holds the secret and then says what
//! it likes. Not a part of the API; `fuzz/smoke` runs it.
//! Read next: `fuzz/fuzz_targets`.

use crate::bootstrap::{
    Admission, Config, DataKey, Established, HandshakeError, Hello, Initiator, KnownSession, ListenAddress,
    Outcome, PROTOCOL_VERSION, Purpose, Refusal, Responder, Secure, SecureError,
};
use crate::limits;
use crate::memory::RemoteRegion;
use crate::session::{ControlMessage, Frame, Session, SessionError};
use crate::transfer::{ChunkLimits, Cutter, Piece, Scatter, merge};
use crate::window::Window;
use crate::wire::{self, HEADER_BYTES, Header, Kind};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

const SECRET: &[u8] = b"correct horse";
/// The session that the responders know, and the one that they open.
const KNOWN: u64 = 77;
const OPENED: u64 = 78;
/// Preamble, then the first frame of a handshake.
const PREAMBLE_BYTES: usize = 16;
/// Written down a second time, so that the insider shares no code with what it attacks.
const NOISE: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
const SECRET_CONTEXT: &str = "ferrywire control secret v1";

// ---- choices ----

/// Bytes that choices are made of; zeros when they are used up.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take(&mut self, len: usize) -> &'a [u8] {
        let (now, later) = self.0.split_at(len.min(self.0.len()));
        self.0 = later;
        now
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let bytes = self.take(N);
        array[..bytes.len()].copy_from_slice(bytes);
        array
    }

    fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A few changes to bytes that were fine: altered, cut, longer.
    fn spoil(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..self.u8() % 4 {
            let at = usize::from(self.u16());
            match (self.u8() % 4, bytes.len()) {
                (0, _) => bytes.truncate(at),
                (1, _) => bytes.extend_from_slice(self.take(at % 64)),
                (_, 0) => {}
                (_, len) => bytes[at % len] = self.u8(),
            }
        }
    }
}

// ---- handshakes ----

/// Both ends of a handshake, as those see them who only move bytes.
trait End {
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

/// Who comes in at the fuzzed responders.
#[derive(Clone, Debug)]
struct Gate {
    secret: Option<Vec<u8>>,
    needed: bool,
    known: Option<KnownSession>,
    decided: Rc<Cell<u32>>,
}

impl Gate {
    fn new(secret: Option<&[u8]>) -> Gate {
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

    fn secret(&self) -> Option<Vec<u8>> {
        self.secret.clone()
    }

    fn secret_needed(&self) -> bool {
        self.needed
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

fn me(identity: u8) -> Hello {
    let listen = |ip: [u8; 4], nic: &str| ListenAddress { address: (ip, 7471).into(), nic: nic.into() };
    Hello {
        identity: [identity; 16],
        boot_id: [9; 16],
        label: format!("gpu{identity}"),
        addresses: vec![listen([10, 0, 0, 1], "eth1"), listen([10, 0, 1, 1], "eth2")],
        heartbeat_limit_ms: 10_000,
    }
}

fn config() -> Config {
    Config { channels: 16, chunk_bytes: 1 << 20, window: 64, crc: true, extra: vec![1, 2, 3] }
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

fn check_text(text: &str) {
    assert!(!text.chars().any(char::is_control), "{text:?}");
}

fn check_outcome(outcome: &Outcome) {
    if let Outcome::Control(established) = outcome {
        check_hello(&established.peer_hello);
        check_config(&established.config);
    }
}

/// Feeds what is wanted of `bytes`, in fragments; stops at an error, at the end, or when none are left.
fn feed(end: &mut impl End, bytes: &[u8], input: &mut Input<'_>) -> Result<(), HandshakeError> {
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
        assert!(fed <= limits::HANDSHAKE_BYTES_MAX, "more is read than a stranger may send");
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
    /// A session between two ends that hold the secret, made once.
    static SESSION: KnownSession = {
        let (initiator, _) = shake_hands();
        KnownSession {
            data_key: initiator.data_key,
            identity: me(1).identity,
            received: 3,
            config: config(),
        }
    };
    /// The encryption of a connection on which nothing was ever said, made once.
    static UNSAID: RefCell<Secure> = RefCell::new(shake_hands().0.secure);
}

fn known() -> KnownSession {
    SESSION.with(Clone::clone)
}

fn dial() -> Initiator {
    let purpose = Purpose::New { config: config() };
    Initiator::control(Some(SECRET), me(1), purpose).expect("this hello can be sent")
}

/// An undisturbed handshake.
fn shake_hands() -> (Established, Established) {
    let (mut one, mut two) = (dial(), Responder::new(Gate::new(Some(SECRET))));
    match join(&mut one, &mut two, &mut Wire::default(), &mut Input(&[])) {
        (Ok(Outcome::Control(one)), Ok(Outcome::Control(two))) => (*one, *two),
        other => panic!("{other:?}"),
    }
}

/// Somebody between two ends.
#[derive(Default)]
struct Wire {
    /// Way, position and mask of what is altered.
    alterations: Vec<(bool, usize, u8)>,
    /// Way and position after which nothing passes.
    cut: Option<(bool, usize)>,
    passed: [usize; 2],
    disturbed: [bool; 2],
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

/// Joins two ends until neither goes on.
fn join(
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

/// Handshakes: strangers at both ends, bytes altered on their way, and insiders who say what they like.
pub fn hello(data: &[u8]) {
    let mut input = Input(data);
    match input.u8() % 5 {
        0 => stranger_dials(&mut input),
        1 => stranger_answers(&mut input),
        2 => altered_on_the_way(&mut input),
        3 => insider_dials(&mut input),
        _ => insider_answers(&mut input),
    }
}

fn stranger_dials(input: &mut Input<'_>) {
    let choices = input.u8();
    let mut gate = Gate::new((choices & 1 == 0).then_some(SECRET));
    gate.needed = choices & 2 != 0;
    gate.known = (choices & 4 != 0).then(known);
    let decided = gate.decided.clone();
    let mut responder = Responder::new(gate);
    let wrong = foreign_key();
    let mut opening = match (choices >> 3) % 4 {
        0 => Vec::new(),
        1 => dial().take_output()[..PREAMBLE_BYTES].to_vec(),
        2 => dial().take_output(),
        _ => Initiator::data(KNOWN, wrong, 0, input.u32()).take_output(),
    };
    let fragments = input.take(16);
    opening.extend_from_slice(input.take(usize::MAX));
    let _ = feed(&mut responder, &opening, &mut Input(fragments));
    assert!(responder.finished().is_none(), "nobody comes in without a proof");
    assert_eq!(decided.get(), 0, "nobody is decided about without a proof");
    assert!(responder.take_output().len() <= limits::HANDSHAKE_BYTES_MAX);
}

/// A key that is no session's here: the same for the life of the process.
fn foreign_key() -> DataKey {
    thread_local!(static KEY: DataKey = shake_hands().0.data_key);
    KEY.with(Clone::clone)
}

fn stranger_answers(input: &mut Input<'_>) {
    let KnownSession { data_key, received, .. } = known();
    let (session, purpose) = (KNOWN, input.u8() % 3);
    let mut initiator = match purpose {
        0 => dial(),
        1 => Initiator::data(session, data_key, 0, 0),
        _ => resume(session, received, data_key),
    };
    let fragments = input.take(16);
    let _ = feed(&mut initiator, input.take(usize::MAX), &mut Input(fragments));
    assert!(initiator.finished().is_none(), "nothing is open without a proof");
    assert!(initiator.take_output().len() <= limits::HANDSHAKE_BYTES_MAX);
}

fn resume(session: u64, received: u64, data_key: DataKey) -> Initiator {
    let purpose = Purpose::Resume { session, received, data_key };
    Initiator::control(Some(SECRET), me(1), purpose).expect("this hello can be sent")
}

fn altered_on_the_way(input: &mut Input<'_>) {
    let KnownSession { data_key, received, .. } = known();
    let mut one = match input.u8() % 3 {
        0 => dial(),
        1 => Initiator::data(KNOWN, data_key, input.u16(), input.u32()),
        _ => resume(KNOWN, received, data_key),
    };
    let mut gate = Gate::new(Some(SECRET));
    gate.known = Some(known());
    let mut two = Responder::new(gate);
    let mut wire = Wire::default();
    for _ in 0..input.u8() % 4 {
        let at = usize::from(input.u16());
        wire.alterations.push((at & 1 == 1, (at >> 1) % 512, input.u8()));
    }
    if input.u8() & 1 == 1 {
        let at = usize::from(input.u16());
        wire.cut = Some((at & 1 == 1, (at >> 1) % 512));
    }
    let (first, second) = join(&mut one, &mut two, &mut wire, input);
    let [forth, back] = wire.disturbed;
    assert!(second.is_err() || !forth, "the responder took what was altered");
    assert!(first.is_err() || !back && !forth, "the initiator took what was altered");
    if !forth && !back {
        match (first, second) {
            (Ok(Outcome::Control(one)), Ok(Outcome::Control(two))) => {
                assert_eq!((one.session, one.data_key), (two.session, two.data_key));
            }
            (Ok(Outcome::Data { .. }), Ok(Outcome::Data { .. })) => {}
            other => panic!("an undisturbed handshake failed: {other:?}"),
        }
    }
}

// ---- the insider ----

fn noise(initiator: bool) -> snow::HandshakeState {
    let key = blake3::derive_key(SECRET_CONTEXT, SECRET);
    let preamble = &dial().take_output()[..PREAMBLE_BYTES];
    let builder = snow::Builder::new(NOISE.parse().expect("a name of Noise's"));
    let builder = builder.psk(0, &key).and_then(|builder| builder.prologue(preamble));
    let state = builder.and_then(|builder| match initiator {
        true => builder.build_initiator(),
        false => builder.build_responder(),
    });
    state.expect("these parameters are complete")
}

fn say(noise: &mut snow::HandshakeState, plain: &[u8]) -> Vec<u8> {
    let mut message = vec![0; plain.len() + 48];
    let len = noise.write_message(plain, &mut message).expect("it is our turn");
    message.truncate(len);
    message
}

fn seal(noise: &mut snow::TransportState, plain: &[u8]) -> Vec<u8> {
    let mut message = vec![0; plain.len() + 16];
    noise.write_message(plain, &mut message).expect("the message is short");
    message
}

fn framed(message: &[u8]) -> Vec<u8> {
    let mut bytes = (message.len() as u16).to_le_bytes().to_vec();
    bytes.extend_from_slice(message);
    bytes
}

/// A hello as it travels, written down a second time.
fn plain_hello(input: &mut Input<'_>) -> Vec<u8> {
    let mut bytes = vec![7; 32];
    bytes.extend_from_slice(b"\x03gpu");
    bytes.extend_from_slice(&input.u32().to_le_bytes());
    let addresses = usize::from(input.u8()) % (limits::ADDRESSES_MAX + 2);
    bytes.push(addresses as u8);
    for index in 0..addresses {
        match index % 2 {
            0 => bytes.extend_from_slice(&[4, 10, 0, 0, 1]),
            _ => bytes.extend_from_slice(&[6, 0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]),
        }
        bytes.extend_from_slice(b"\x2f\x1d\x04eth1");
    }
    bytes
}

fn plain_config(input: &mut Input<'_>, bytes: &mut Vec<u8>) {
    bytes.extend_from_slice(&input.u16().to_le_bytes());
    bytes.extend_from_slice(&input.u32().to_le_bytes());
    bytes.extend_from_slice(&input.u32().to_le_bytes());
    bytes.push(input.u8() % 3);
    let extra = input.u16() % 260;
    bytes.extend_from_slice(&extra.to_le_bytes());
    bytes.extend(std::iter::repeat_n(5, usize::from(extra)));
}

/// What [`dial`] proposed, or less.
fn settled_config(input: &mut Input<'_>, bytes: &mut Vec<u8>) {
    bytes.extend_from_slice(&(1 + u16::from(input.u8() % 16)).to_le_bytes());
    bytes.extend_from_slice(&(1u32 << 20).to_le_bytes());
    bytes.extend_from_slice(&64u32.to_le_bytes());
    bytes.extend_from_slice(&[1, 3, 0, 1, 2, 3]);
}

fn insider_dials(input: &mut Input<'_>) {
    let mut plain = plain_hello(input);
    let kind = input.u8() % 4;
    plain.push(kind);
    match kind {
        1 => {
            plain.extend_from_slice(&[8; 32]);
            plain_config(input, &mut plain);
        }
        _ => {
            plain.extend_from_slice(&(u64::from(input.u8() & 1) + KNOWN).to_le_bytes());
            plain.extend_from_slice(&input.u64().to_le_bytes());
            plain.extend_from_slice(&[8; 32]);
        }
    }
    input.spoil(&mut plain);
    plain.truncate(limits::HANDSHAKE_BYTES_MAX);
    let mut gate = Gate::new(Some(SECRET));
    gate.known = Some(known());
    let decided = gate.decided.clone();
    let mut responder = Responder::new(gate);
    let mut noise = noise(true);
    let knock = [&dial().take_output()[..PREAMBLE_BYTES], &framed(&say(&mut noise, &[]))].concat();
    feed(&mut responder, &knock, input).expect("the insider holds the secret");
    let answer = responder.take_output();
    noise.read_message(&answer[2..], &mut vec![0; answer.len()]).expect("an authentic answer");
    let mut noise = noise.into_transport_mode().expect("two messages are all");
    let result = feed(&mut responder, &framed(&seal(&mut noise, &plain)), input);
    let outcome = responder.finished();
    assert_eq!(outcome.is_some(), result.is_ok() && responder.want() == 0);
    assert!(decided.get() <= 1 && (outcome.is_none() || decided.get() == 1));
    if let Some(outcome) = outcome {
        check_outcome(&outcome);
        let Outcome::Control(established) = outcome else {
            panic!("a data connection on a control connection");
        };
        assert!(established.session == OPENED && !established.resumed, "nobody can prove a foreign session");
        let welcome = responder.take_output();
        let opened = noise.read_message(&welcome[2..], &mut vec![0; welcome.len()]);
        opened.expect("an authentic welcome");
    }
}

fn insider_answers(input: &mut Input<'_>) {
    let mut plain = plain_hello(input);
    input.spoil(&mut plain);
    let mut welcome = Vec::new();
    let session = input.u64();
    welcome.extend_from_slice(&session.to_le_bytes());
    welcome.extend_from_slice(&input.u64().to_le_bytes());
    welcome.extend_from_slice(&[8; 32]);
    match input.u8() & 1 {
        0 => plain_config(input, &mut welcome),
        _ => settled_config(input, &mut welcome),
    }
    input.spoil(&mut welcome);
    let resuming = input.u8() & 1 == 1;
    let mut initiator = match resuming {
        true => resume(KNOWN, 0, known().data_key),
        false => dial(),
    };
    let mut noise = noise(false);
    let knock = initiator.take_output();
    noise.read_message(&knock[PREAMBLE_BYTES + 2..], &mut vec![0; knock.len()]).expect("an authentic knock");
    if feed(&mut initiator, &framed(&say(&mut noise, &plain)), input).is_err() || initiator.want() != 2 {
        return;
    }
    let opening = initiator.take_output();
    if opening.is_empty() {
        return;
    }
    let mut noise = noise.into_transport_mode().expect("two messages are all");
    let opened = noise.read_message(&opening[2..], &mut vec![0; opening.len()]);
    opened.expect("an authentic opening");
    let result = feed(&mut initiator, &framed(&seal(&mut noise, &welcome)), input);
    let outcome = initiator.finished();
    assert_eq!(outcome.is_some(), result.is_ok() && initiator.want() == 0);
    if let Some(outcome) = outcome {
        check_outcome(&outcome);
        assert!(!resuming, "nobody can prove a foreign session");
        check_settled(&outcome);
    }
}

/// Whatever the other end settles, it is no more than [`dial`] proposes.
fn check_settled(outcome: &Outcome) {
    let (Outcome::Control(established), proposed) = (outcome, config()) else { return };
    let Established { config, received, .. } = &**established;
    assert!(config.channels <= proposed.channels && config.chunk_bytes <= proposed.chunk_bytes);
    assert!(config.window <= proposed.window && config.crc == proposed.crc && *received == 0);
}

// ---- control sessions ----

/// Control sessions: foreign bytes for the encryption, any plain content, and a peer who holds the key.
pub fn control(data: &[u8]) {
    let mut input = Input(data);
    match input.u8() % 3 {
        0 => foreign_bytes(&mut input),
        1 => plain_content(&mut input),
        _ => evil_peer(&mut input),
    }
}

fn foreign_bytes(input: &mut Input<'_>) {
    UNSAID.with_borrow_mut(|secure| {
        let mut incoming = Vec::new();
        while !input.is_empty() {
            let len = usize::from(input.u8());
            incoming.extend_from_slice(input.take(len));
            let held = incoming.len();
            match secure.open(&mut incoming) {
                Ok(None) => assert!(held < 2 + limits::CONTROL_MESSAGE_BYTES_MAX + 16),
                Ok(Some(plain)) => panic!("forged: {plain:?}"),
                Err(SecureError::Exhausted) => panic!("nothing was ever said"),
                Err(error) => {
                    check_text(&error.to_string());
                    return;
                }
            }
        }
    });
}

fn plain_content(input: &mut Input<'_>) {
    let bytes = input.take(usize::MAX);
    match Frame::decode(bytes) {
        Ok(frame) => {
            let encoded = encode(&frame);
            assert_eq!(encoded, bytes, "what is accepted is what would be sent");
            assert!(encoded.len() <= limits::CONTROL_MESSAGE_BYTES_MAX);
            assert_eq!(Frame::decode(&encoded), Ok(frame));
        }
        Err(error) => check_text(&error.to_string()),
    }
}

fn encode(frame: &Frame<ControlMessage>) -> Vec<u8> {
    Frame {
        received: frame.received,
        numbered: frame.numbered.as_ref().map(|(number, message)| (*number, message)),
    }
    .encode()
}

fn any_message(input: &mut Input<'_>) -> ControlMessage {
    let (channel, generation) = (input.u16(), input.u32());
    match input.u8() % 6 {
        0 => ControlMessage::Fence {
            channel,
            generation,
            placed: input.u64(),
            refused: (0..input.u16() % 1024).map(|number| (number.into(), 3)).collect(),
            reason: String::from_utf8_lossy(input.take(40)).into_owned(),
        },
        1 => ControlMessage::Dialling { channel, generation, source: (input.array::<16>(), channel).into() },
        2 => ControlMessage::ChannelUp { channel, generation },
        3 => ControlMessage::Drain,
        4 => ControlMessage::Drained,
        5 => ControlMessage::Lane { channel, generation, handle: Box::new([input.u8(); 128]) },
        _ => ControlMessage::Goodbye { reason: String::from_utf8_lossy(input.take(40)).into_owned() },
    }
}

/// A session whose peer seals whatever it likes.
fn evil_peer(input: &mut Input<'_>) {
    let (one, two) = shake_hands();
    let (mut evil, mut now) = (two.secure, Duration::from_secs(100));
    let mut session = Session::new(OPENED, now);
    session.attach(one.secure, 0, now).expect("nothing was said before");
    let (mut sent, mut out) = (0u64, Vec::new());
    let mut heard = Vec::new();
    while !input.is_empty() {
        let result = match input.u8() % 5 {
            0 => {
                let before = session.unacknowledged();
                let pushed = session.push(any_message(input), now);
                sent += u64::from(session.unacknowledged() > before);
                pushed
            }
            1 => {
                now += Duration::from_millis(input.u8().into());
                session.tick(now)
            }
            2 => {
                let len = usize::from(input.u8());
                session.on_bytes(input.take(len), now, &mut out)
            }
            _ => {
                let Ok(frame) = evil.seal(&evil_plain(input, &session, sent)) else {
                    continue;
                };
                let cut = usize::from(input.u16()) % (frame.len() + 1);
                let first = session.on_bytes(&frame[..cut], now, &mut out);
                first.and_then(|()| session.on_bytes(&frame[cut..], now, &mut out))
            }
        };
        assert_eq!(session.received(), out.len() as u64, "each message is handed out once");
        assert!(session.unacknowledged() as u64 <= sent);
        assert_eq!(session.is_attached(), session.next_deadline().is_some());
        heard.extend(session.take_output());
        if let Err(error) = result {
            check_text(&error.to_string());
            let ours = matches!(error, SessionError::Full | SessionError::Unusable(_));
            assert!(ours || !session.is_attached(), "after {error} the connection is closed");
            break;
        }
    }
    while let Some(plain) = evil.open(&mut heard).expect("what we say is authentic") {
        Frame::decode(&plain).expect("what we say is well formed");
    }
}

fn evil_plain(input: &mut Input<'_>, session: &Session, sent: u64) -> Vec<u8> {
    let choice = input.u8();
    let number = match choice & 3 {
        0 => input.u64(),
        1 => session.received(),
        _ => session.received() + 1,
    };
    let received = match choice >> 2 & 3 {
        0 => input.u64(),
        1 => u64::from(input.u8()),
        _ => sent,
    };
    let message = any_message(input);
    let mut plain = Frame { received, numbered: (choice & 0x40 == 0).then_some((number, &message)) }.encode();
    if choice & 0x80 != 0 {
        input.spoil(&mut plain);
    }
    plain
}

// ---- data frames ----

/// Data frames and the pure parts that act on them, against models.
pub fn wire(data: &[u8]) {
    let mut input = Input(data);
    match input.u8() % 5 {
        0 => headers(&mut input),
        1 => lists(&mut input),
        2 => windows(&mut input),
        3 => geometry(&mut input),
        _ => descriptors(&mut input),
    }
}

fn headers(input: &mut Input<'_>) {
    let mut bytes: [u8; HEADER_BYTES] = input.array();
    if input.u8() & 1 == 0 {
        // Past the magic, which random bytes do not find.
        let sample = Header::new(Kind::Data).encode();
        bytes[50..].copy_from_slice(&sample[50..]);
        bytes[0] %= 11;
    }
    let Ok(header) = Header::decode(&bytes) else { return };
    assert_eq!(header.encode(), bytes, "what is accepted is what would be sent");
    assert!(header.len as usize <= limits::CHUNK_BYTES_MAX);
    assert!(usize::from(header.segments) <= limits::SEGMENTS_PER_CHUNK_MAX);
    assert!(usize::from(header.notify) <= limits::NOTIFY_BYTES_MAX);
    let body = header.placement_bytes() + header.len as usize + usize::from(header.notify);
    assert_eq!(header.body_bytes(), body);
    if matches!(header.kind, Kind::Data | Kind::Send | Kind::Notify) {
        assert!(header.offset.checked_add(header.len.into()).is_some());
    }
    let checked = Header { flags: header.flags | wire::FLAG_CRC, ..header };
    assert_eq!(Header::decode(&checked.encode()), Ok(checked));
    let ack = input.u32();
    let mut patched = bytes;
    Header::patch_counts(&mut patched, ack, !ack);
    assert_eq!(Header::decode(&patched), Ok(Header { ack, posted: !ack, ..header }));
}

fn lists(input: &mut Input<'_>) {
    let (low, near) = (input.u32(), input.u64());
    let full = wire::widen(low, near);
    assert_eq!(full as u32, low);
    let far = full.wrapping_sub(near) as i64;
    assert!((-(1 << 31)..1 << 31).contains(&far), "{near} {full}");
    let bytes = input.take(usize::MAX);
    let mut again = Vec::new();
    wire::placements(bytes).for_each(|placement| placement.encode_into(&mut again));
    assert_eq!(again, bytes[..bytes.len() / wire::PLACEMENT_BYTES * wire::PLACEMENT_BYTES]);
    let refused: Vec<_> = wire::refusals(bytes).map(|(number, why)| (number.into(), why)).collect();
    assert_eq!(refused.len(), bytes.len() / wire::REFUSAL_BYTES);
    let encoded = wire::encode_refusals(&refused);
    let back: Vec<_> = wire::refusals(&encoded).map(|(number, why)| (number.into(), why)).collect();
    assert_eq!(back, refused);
    refused.iter().for_each(|(_, why)| check_text(why.text()));
}

fn windows(input: &mut Input<'_>) {
    let (frames_max, bytes_max) = (usize::from(input.u8()), usize::from(input.u16()));
    let mut window = Window::new(frames_max, bytes_max);
    let mut model: VecDeque<(u64, usize)> = VecDeque::new();
    let mut next = 0;
    while !input.is_empty() {
        match input.u8() % 4 {
            0 | 1 => {
                let bytes = usize::from(input.u16());
                let held: usize = model.iter().map(|(_, bytes)| bytes).sum();
                let room = model.len() < frames_max.max(1) && (held < bytes_max || model.is_empty());
                assert_eq!(window.has_room(), room);
                if room {
                    assert_eq!(window.post(bytes, bytes), next);
                    model.push_back((next, bytes));
                    next += 1;
                }
            }
            2 => {
                // As a channel does with a count from the wire.
                let count = wire::widen(input.u32() % 300, window.first());
                let sent = next - u64::from(input.u8()).min(model.len() as u64);
                if window.may_acknowledge(count, sent) {
                    assert!(count <= sent);
                    while let Some((number, bytes)) = window.release(count) {
                        assert_eq!(model.pop_front(), Some((number, bytes)));
                        assert!(number < count);
                    }
                    assert!(model.front().is_none_or(|(number, _)| *number >= count));
                }
            }
            _ => {
                let number = wire::widen(input.u32(), window.first());
                let there = model.iter().find(|(each, _)| *each == number).map(|(_, bytes)| *bytes);
                assert_eq!(window.get_mut(number).copied(), there);
                let from = window.from(number).count();
                assert_eq!(from, model.iter().filter(|(each, _)| *each >= number).count());
            }
        }
        assert_eq!(window.bytes(), model.iter().map(|(_, bytes)| bytes).sum::<usize>());
        assert_eq!((window.next(), window.is_empty()), (next, model.is_empty()));
    }
    assert_eq!(window.drain(), Vec::from(model));
}

fn geometry(input: &mut Input<'_>) {
    let count = input.u8() % 24;
    let pieces: Vec<Piece> = (0..count)
        .map(|_| Piece {
            local: input.u32().into(),
            remote: input.u32().into(),
            len: u64::from(input.u16()) % 5000,
        })
        .collect();
    let total: u64 = pieces.iter().map(|piece| piece.len).sum();
    let merged = merge(pieces.iter().copied());
    assert_eq!(merged.iter().map(|piece| piece.len).sum::<u64>(), total);
    assert!(merged.iter().all(|piece| piece.len > 0));
    // Where a byte of the message lies, by walking.
    let at = |list: &[Piece], mut position: u64| {
        for piece in list {
            if position < piece.len {
                return Some((piece.local + position, piece.remote + position));
            }
            position -= piece.len;
        }
        None
    };
    let mut cutter = Cutter::default();
    let mut position = 0;
    loop {
        let bounds = ChunkLimits { bytes: 1 + u64::from(input.u16()), segments: usize::from(input.u8()) };
        let Some(chunk) = cutter.next(&merged, bounds) else { break };
        assert_eq!(chunk.position, position);
        assert!(chunk.bytes > 0 && u64::from(chunk.bytes) <= bounds.bytes);
        let locals: Vec<_> = chunk.locals(&merged).collect();
        assert_eq!(locals.iter().map(|(_, len)| len).sum::<u64>(), chunk.bytes.into());
        let places = chunk.placements(&merged);
        assert!(places.len() <= locals.len() && locals.len() <= bounds.segments.max(1));
        assert_eq!(places.iter().map(|place| u64::from(place.len)).sum::<u64>(), chunk.bytes.into());
        let here = at(&pieces, position);
        assert_eq!(Some((locals[0].0, places[0].offset)), here);
        assert_eq!(chunk.single(&merged), (locals.len() == 1).then_some(places[0].offset));
        position += u64::from(chunk.bytes);
        assert_eq!(cutter.position(), position);
    }
    assert_eq!(position, total);
    let scatter = Scatter::new(pieces.iter().map(|piece| (piece.local, piece.len)));
    let (from, len) = match input.u8() & 1 {
        0 => (input.u64(), input.u64()),
        _ => (input.u32().into(), input.u16().into()),
    };
    let found = scatter.locate(from, len).map(|ranges| ranges.collect::<Vec<_>>());
    let fits = from.checked_add(len).is_some_and(|end| end <= total);
    assert_eq!(found.is_some(), fits);
    if let Some(ranges) = found {
        assert_eq!(ranges.iter().map(|(_, len)| len).sum::<u64>(), len);
        let mut position = from;
        for (offset, len) in ranges {
            assert!(len > 0);
            assert_eq!(at(&pieces, position).map(|(local, _)| local), Some(offset));
            position += len;
        }
    }
}

fn descriptors(input: &mut Input<'_>) {
    let bytes = input.take(usize::MAX);
    match RemoteRegion::from_bytes(bytes) {
        Ok(region) => assert_eq!(region.to_bytes(), bytes),
        Err(error) => check_text(&error.to_string()),
    }
}

const _: () = assert!(PROTOCOL_VERSION == 1, "the insider speaks version 1");
