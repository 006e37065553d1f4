//! A peer that has the secret, completes the handshake, and then violates the protocol.

use super::scene::Scene;
use super::{LIMIT, SECRET, eventually};
use crate::{Error, Peer};
use ferrywire_proto::handshake::testing::{config, hello};
use ferrywire_proto::handshake::{Config, Established, HandshakeError, Initiator, Outcome, Purpose, Secure};
use ferrywire_proto::session::{ControlMessage, Frame, GoodbyeCause};
use ferrywire_proto::wire::{self, HEADER_BYTES, Header, Kind, Refusal};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

/// Frames that are sent before waiting for acknowledgements: fewer than the window.
const FLOOD_BATCH: u64 = 400;

/// The frames that an adversarial peer has received on one data connection.
#[derive(Default)]
pub(super) struct Heard {
    pub refused: Vec<(u32, Refusal)>,
    pub acknowledged: u32,
    /// Headers of all frames but acknowledgements.
    pub frames: Vec<Header>,
    pub closed: bool,
}

pub(super) struct Data {
    pub stream: TcpStream,
    pub frames_sent: u32,
    heard: Arc<Mutex<Heard>>,
}

impl Data {
    pub fn new(stream: TcpStream) -> Data {
        let data = Data { heard: Arc::default(), frames_sent: 0, stream };
        let (mut stream, heard) = (data.stream.try_clone().unwrap(), data.heard.clone());
        thread::spawn(move || {
            while let Some((header, body)) = read_frame(&mut stream) {
                let mut heard = heard.lock().unwrap();
                heard.acknowledged = header.ack;
                match header.kind {
                    Kind::Ack => heard.refused.extend(wire::refusals(&body)),
                    _ => heard.frames.push(header),
                }
            }
            heard.lock().unwrap().closed = true;
        });
        data
    }

    pub fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap()
    }

    pub fn send(&mut self, header: Header, body: &[u8]) {
        let bytes = [&header.encode()[..], body].concat();
        self.frames_sent += u32::from(header.kind != Kind::Ack);
        self.stream.write_all(&bytes).unwrap();
    }

    /// Sends many frames, as fast as they are acknowledged.
    pub fn flood(&mut self, header: Header, body: &[u8], count: u64, number: impl Fn(u64, &mut Header)) {
        let before = self.frames_sent;
        for batch in 0..count.div_ceil(FLOOD_BATCH) {
            let mut bytes = Vec::new();
            for index in batch * FLOOD_BATCH..count.min((batch + 1) * FLOOD_BATCH) {
                let mut each = header;
                number(index, &mut each);
                bytes.extend_from_slice(&each.encode());
                bytes.extend_from_slice(body);
                self.frames_sent += 1;
            }
            self.stream.write_all(&bytes).unwrap();
            let missing = |data: &Data| data.frames_sent - data.heard().acknowledged;
            eventually("acknowledgements keep up", || missing(self) <= FLOOD_BATCH as u32);
        }
        assert_eq!(u64::from(self.frames_sent - before), count);
    }

    /// Waits until all frames are acknowledged. Returns the refusals.
    pub fn answers(&self) -> Vec<(u32, Refusal)> {
        eventually("all frames are acknowledged", || {
            let heard = self.heard();
            let (frames, acknowledged) = (self.frames_sent, heard.acknowledged);
            assert!(!heard.closed, "the channel was closed after {acknowledged} of {frames}");
            acknowledged >= frames
        });
        let mut refused = self.heard().refused.clone();
        refused.sort_by_key(|(number, _)| *number);
        refused
    }
}

fn read_frame(stream: &mut TcpStream) -> Option<(Header, Vec<u8>)> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).ok()?;
    let header = Header::decode(&header).expect("the victim is honest");
    let mut body = vec![0; header.body_bytes()];
    stream.read_exact(&mut body).ok()?;
    Some((header, body))
}

/// Reads the next frame of a control connection.
pub(super) fn hear_frame(control: &mut TcpStream, secure: &mut Secure) -> Frame<ControlMessage> {
    let mut incoming = vec![0; 2];
    control.read_exact(&mut incoming).unwrap();
    let len = usize::from(u16::from_le_bytes([incoming[0], incoming[1]]));
    incoming.resize(2 + len, 0);
    control.read_exact(&mut incoming[2..]).unwrap();
    Frame::decode(&secure.open(&mut incoming).unwrap().expect("a whole frame")).unwrap()
}

pub(super) struct Evil {
    pub address: SocketAddr,
    pub control: TcpStream,
    pub established: Box<Established>,
    pub said: u64,
    pub data: Vec<Data>,
    /// The victim's handle of this peer.
    pub here: Peer,
}

pub(super) fn evil_config() -> Config {
    Config { channels: 1, window: 1024, crc: false, extra: Vec::new(), ..config() }
}

/// Runs one end of a handshake over a socket.
fn shake(stream: &mut TcpStream, mut initiator: Initiator) -> Result<Outcome, HandshakeError> {
    loop {
        stream.write_all(&initiator.take_output()).unwrap();
        if let Some(outcome) = initiator.finished() {
            return Ok(outcome);
        }
        let mut bytes = vec![0; initiator.want()];
        match stream.read(&mut bytes) {
            Ok(0) | Err(_) => return Err(initiator.closed()),
            Ok(count) => initiator.feed(&bytes[..count])?,
        }
    }
}

pub(super) fn dial(
    address: SocketAddr,
    initiator: Initiator,
) -> Result<(TcpStream, Outcome), HandshakeError> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let outcome = shake(&mut stream, initiator)?;
    Ok((stream, outcome))
}

impl Evil {
    pub fn new(scene: &Scene) -> Evil {
        Evil::with(scene, evil_config())
    }

    pub fn with(scene: &Scene, config: Config) -> Evil {
        let channels = config.channels;
        let purpose = Purpose::New { config };
        let initiator = Initiator::control(Some(SECRET.as_bytes()), hello(1), purpose).unwrap();
        let (control, outcome) = dial(scene.address(), initiator).unwrap();
        let Outcome::Control(established) = outcome else { panic!("{outcome:?}") };
        let (address, data) = (scene.address(), Vec::new());
        let channel = |index| channel(address, &established, index, 0).unwrap();
        let data: Vec<Data> = (0..channels).map(channel).fold(data, |mut all, each| {
            all.push(Data::new(each));
            all
        });
        let here = scene.victim.accept(LIMIT).unwrap();
        Evil { address, control, established, said: 0, data, here }
    }

    /// Sends a frame on the first channel.
    pub fn send(&mut self, header: Header, body: &[u8]) {
        self.data[0].send(header, body);
    }

    /// Sends the next control message.
    pub fn say(&mut self, message: &ControlMessage) {
        self.said += 1;
        let frame = Frame { received: 0, numbered: Some((self.said, message)) };
        self.say_plain(&frame.encode());
    }

    pub fn say_plain(&mut self, plain: &[u8]) {
        let sealed = self.secure().seal(plain).unwrap();
        self.control.write_all(&sealed).unwrap();
    }

    pub fn secure(&mut self) -> &mut Secure {
        &mut self.established.secure
    }

    /// Waits until the victim has acted on all control messages sent so far.
    pub fn is_heard(&mut self) {
        while hear_frame(&mut self.control, &mut self.established.secure).received < self.said {}
    }

    /// Waits until the victim has lost the channel, and checks the reason.
    pub fn channel_lost_for(&self, cause: &str) {
        eventually("the channel is lost", || !self.here.stats().lost_channels.is_empty());
        let lost = self.here.stats().lost_channels;
        assert!(lost[0].contains(cause), "{lost:?} does not name: {cause}");
    }

    /// Waits until the victim has lost the peer, and checks the reason.
    pub fn lost_for(&self, cause: &str) {
        eventually("the peer is lost", || self.here.error().is_some());
        let error = self.here.error().unwrap();
        assert!(matches!(error, Error::PeerLost { .. }), "{error:?}");
        assert!(error.to_string().contains(cause), "{error} does not name: {cause}");
    }
}

impl Drop for Evil {
    /// Sends a goodbye: without one, dropping the victim waits for the peer timeout.
    fn drop(&mut self) {
        let farewell = goodbye();
        let frame = Frame { received: 0, numbered: Some((self.said + 1, &farewell)) };
        if let Ok(sealed) = self.secure().seal(&frame.encode()) {
            let _ = self.control.write_all(&sealed);
        }
    }
}

/// The message that ends a session in order.
pub(super) fn goodbye() -> ControlMessage {
    ControlMessage::Goodbye { cause: GoodbyeCause::Closed, reason: "enough".into() }
}

pub(super) fn channel(
    address: SocketAddr,
    established: &Established,
    index: u16,
    generation: u32,
) -> Result<TcpStream, HandshakeError> {
    let key = established.data_key.clone();
    let (stream, _) = dial(address, Initiator::data(established.session, key, index, generation))?;
    stream.set_read_timeout(None).unwrap();
    Ok(stream)
}

pub(super) fn data(key: u64, offset: u64, len: usize) -> Header {
    Header { key, offset, len: len as u32, ..Header::new(Kind::Data) }
}

pub(super) fn limited(refused: &[(u32, Refusal)]) -> usize {
    assert!(refused.iter().all(|(_, why)| *why == Refusal::Limit), "{:?}", refused.first());
    refused.len()
}
