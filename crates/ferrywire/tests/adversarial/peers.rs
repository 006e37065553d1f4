//! The endpoint under attack, good peers of it, and what a good peer says when it connects.

use crate::{LIMIT, SECRET};
use ferrywire::{Endpoint, Peer, Region};
use rand::{RngCore, SeedableRng, rngs::StdRng};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

/// An endpoint that listens. Its NIC does not exist, so that it advertises no address and peers dial their
/// channels where they found it: through the recorder.
pub fn victim() -> Endpoint {
    let listening = Endpoint::builder().nics(["none0"]).listen("127.0.0.2:0".parse().unwrap());
    listening.secret(SECRET).label("victim").threads(1).build().unwrap()
}

pub fn dialler(secret: Option<&str>) -> Endpoint {
    let mut builder = Endpoint::builder().threads(1).channels(2);
    if let Some(secret) = secret {
        builder = builder.secret(secret);
    }
    builder.build().unwrap()
}

/// A peer of the victim's, and the region there that it writes to.
pub struct Good {
    pub endpoint: Endpoint,
    peer: Peer,
    here: Peer,
    target: Region,
    source: Region,
    pub rounds: u64,
}

impl Good {
    pub fn connect(victim: &Endpoint, address: SocketAddr) -> ferrywire::Result<Good> {
        let endpoint = dialler(Some(SECRET));
        let peer = endpoint.connect(address, LIMIT)?;
        let here = victim.accept(LIMIT)?;
        let target = victim.alloc_host(1 << 20)?;
        let source = endpoint.alloc_host(1 << 20)?;
        Ok(Good { endpoint, peer, here, target, source, rounds: 0 })
    }

    /// Writes bytes that were never written before, and checks that they have arrived.
    pub fn round(&mut self) -> ferrywire::Result<()> {
        self.rounds += 1;
        let mut bytes = vec![0; self.source.len() as usize];
        StdRng::seed_from_u64(self.rounds).fill_bytes(&mut bytes);
        self.source.write_at(0, &bytes)?;
        let (target, name) = (self.target.descriptor(), self.rounds.to_le_bytes());
        self.peer.write_notify(&self.source, 0, &target, 0, target.len(), &name)?.wait(LIMIT)?;
        assert_eq!(self.here.wait_notification(LIMIT)?, name);
        let mut got = vec![0; bytes.len()];
        self.target.read_at(0, &mut got)?;
        assert!(got == bytes, "round {}: other bytes than were written", self.rounds);
        Ok(())
    }

    pub fn close(self) {
        self.peer.close(LIMIT).unwrap();
        self.endpoint.close(LIMIT).unwrap();
    }
}

/// The first bytes of a real peer's connections.
#[derive(Clone)]
pub struct Recordings {
    pub control: Vec<u8>,
    pub data: Vec<u8>,
}

/// The bytes received on one connection.
type Recording = Arc<Mutex<Vec<u8>>>;

/// Connects a good peer through a proxy that keeps what it says.
pub fn record(victim: &Endpoint) -> (Recordings, Good) {
    const KEPT_BYTES: usize = 1024;
    let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, target) = (proxy.local_addr().unwrap(), victim.listen_addresses()[0]);
    let heard = Arc::<Mutex<Vec<Recording>>>::default();
    let kept = heard.clone();
    thread::spawn(move || {
        // A control connection and two channels are all that comes.
        for stream in proxy.incoming().take(3) {
            let (from, to) = (stream.unwrap(), TcpStream::connect(target).unwrap());
            let recording = Recording::default();
            kept.lock().unwrap().push(recording.clone());
            let (back_from, back_to) = (to.try_clone().unwrap(), from.try_clone().unwrap());
            thread::spawn(move || {
                pump(from, to, |bytes| {
                    let mut recording = recording.lock().unwrap();
                    let room = KEPT_BYTES - recording.len().min(KEPT_BYTES);
                    recording.extend_from_slice(&bytes[..room.min(bytes.len())]);
                });
            });
            thread::spawn(move || pump(back_from, back_to, |_| {}));
        }
    });
    let mut good = Good::connect(victim, address).unwrap();
    good.round().unwrap();
    let heard = heard.lock().unwrap();
    let of_kind = |kind: u8| {
        let recordings = heard.iter().map(|recording| recording.lock().unwrap().clone());
        recordings.into_iter().find(|bytes| bytes[10] == kind).expect("each kind was dialled")
    };
    let (control, mut data) = (of_kind(1), of_kind(2));
    data.truncate(DATA_HELLO_BYTES);
    drop(heard);
    (Recordings { control, data }, good)
}

/// Preamble, claim and proof of a data connection.
pub const PREAMBLE_BYTES: usize = 16;
pub const CLAIM_BYTES: usize = PREAMBLE_BYTES + 2 + 14;
const DATA_HELLO_BYTES: usize = CLAIM_BYTES + 2 + 32;

fn pump(mut from: TcpStream, mut to: TcpStream, mut each: impl FnMut(&[u8])) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        each(&buffer[..count]);
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}
