//! Peers that advertise an address at which another host answers, as the bridges of containers lead to.

use super::answering::{answer, answer_one, evil_desk, is_readable, say_sealed};
use super::evil::{Data, goodbye, hear_frame};
use super::{LIMIT, SECRET, eventually};
use crate::{Endpoint, Peer, RemoteRegion};
use ferrywire_memory::MemoryLocation;
use ferrywire_proto::Identity;
use ferrywire_proto::handshake::testing::{Shared, hello};
use ferrywire_proto::handshake::{Established, ListenAddress, Outcome};
use ferrywire_proto::session::{ControlMessage, Frame};
use ferrywire_proto::wire::{Header, Kind};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Number of refusals, a second apart, that a session outlives. A dial to a peer that does not answer lasts two seconds,
/// so all dials of the first attempts have ended by then.
const REFUSALS: usize = 5;

/// A listener at the wrong address, which refuses every connection with `refuse`. Returns the number of refusals so far.
fn wrong_host(refuse: impl Fn(TcpStream) + Send + 'static) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, refusals) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
    let count = refusals.clone();
    thread::spawn(move || {
        for stream in listener.incoming() {
            refuse(stream.unwrap());
            count.fetch_add(1, Ordering::SeqCst);
        }
    });
    (address, refusals)
}

/// A peer whose only advertised address leads to another host. It serves one channel.
struct Acceptor {
    address: SocketAddr,
    listener: TcpListener,
    desk: Shared,
    control: TcpStream,
    established: Box<Established>,
    said: u64,
    data: Vec<Data>,
}

impl Acceptor {
    /// Connects an endpoint to a new acceptor, which advertises `wrong`.
    fn connected(dialler: &Endpoint, wrong: SocketAddr) -> (Acceptor, Peer) {
        let (address, listener, desk) = evil_desk();
        desk.desk().hello.addresses = vec![ListenAddress { address: wrong, nic: "br0".into() }];
        // A host of unknown boot id: an address of this host may then be one of the peer's.
        desk.desk().hello.boot_id = [0; 16];
        let connecting = dialler.start_connect(address).unwrap();
        let (control, outcome) = answer(&listener, &desk);
        let Some(Outcome::Control(established)) = outcome else { panic!("{outcome:?}") };
        desk.remember(&established);
        let mut acceptor =
            Acceptor { address, listener, desk, control, established, said: 0, data: Vec::new() };
        let mut peer = None;
        eventually("the peer is connected", || {
            acceptor.serve();
            peer = connecting.poll();
            peer.is_some()
        });
        assert_eq!(acceptor.data.len(), 1);
        (acceptor, peer.unwrap().unwrap())
    }

    /// Confirms announced data connections, accepts connections, and sends a sign of life.
    fn serve(&mut self) {
        while is_readable(&self.control) {
            let numbered = hear_frame(&mut self.control, &mut self.established.secure).numbered;
            if let Some((_, ControlMessage::Dialling { channel, generation, .. })) = numbered {
                self.say(&ControlMessage::Expected { channel, generation });
            }
        }
        while is_readable(&self.listener) {
            match answer(&self.listener, &self.desk) {
                (stream, Some(Outcome::Data { .. })) => self.data.push(Data::new(stream)),
                (stream, Some(Outcome::Control(established))) => {
                    (self.control, self.established) = (stream, established);
                }
                (_, None) => {}
            }
        }
        self.live();
    }

    fn say(&mut self, message: &ControlMessage) {
        self.said += 1;
        say_sealed(&mut self.control, &mut self.established.secure, self.said, message);
    }

    /// Sends a heartbeat.
    fn live(&mut self) {
        let heartbeat = Frame { received: 0, numbered: None };
        self.control.write_all(&self.established.secure.seal(&heartbeat.encode()).unwrap()).unwrap();
    }

    /// Acknowledges all frames so far.
    fn acknowledge(&mut self) {
        for data in &mut self.data {
            let ack = data.heard().frames.len() as u32;
            data.send(Header { ack, ..Header::new(Kind::Ack) }, &[]);
        }
    }
}

/// Checks that a session outlives a silence of its peer, in which the host at the wrong address refuses to resume it.
fn outlives_refusals(refuse: impl Fn(TcpStream) + Send + 'static) {
    let dialler = Endpoint::builder().secret(SECRET).threads(1).channels(1).peer_timeout(3 * LIMIT);
    let dialler = dialler.build().unwrap();
    let (wrong, refusals) = wrong_host(refuse);
    let (mut acceptor, peer) = Acceptor::connected(&dialler, wrong);
    let before = refusals.load(Ordering::SeqCst);
    // The peer is silent, and keeps its connections.
    eventually("the session is refused again and again", || {
        peer.error().is_some() || refusals.load(Ordering::SeqCst) >= before + REFUSALS
    });
    assert_eq!(peer.error(), None, "the peer at {} is alive", acceptor.address);
    acceptor.live();
    let source = dialler.alloc_host(1000).unwrap();
    let owner = Identity(hello(2).identity);
    let remote = RemoteRegion { owner, key: 1, len: 1000, location: MemoryLocation::Host };
    let write = peer.write(&source, 0, &remote, 0, 1000).unwrap();
    eventually("the write has ended", || {
        acceptor.live();
        acceptor.acknowledge();
        write.poll().is_some()
    });
    write.wait(LIMIT).unwrap();
    assert_eq!(peer.error(), None);
    acceptor.say(&goodbye());
    eventually("the goodbye is received", || peer.error().is_some());
}

#[test]
fn a_host_without_the_secret_at_an_address_of_the_peer_does_not_end_its_session() {
    outlives_refusals(|mut stream| {
        let mut preamble = [0; 16];
        stream.read_exact(&mut preamble).unwrap();
        let mut length = [0; 2];
        stream.read_exact(&mut length).unwrap();
        let mut message = vec![0; usize::from(u16::from_le_bytes(length))];
        stream.read_exact(&mut message).unwrap();
        stream.write_all(b"\xff\xff\x04\x05\x00never").unwrap();
    });
}

#[test]
fn another_endpoint_at_an_address_of_the_peer_does_not_end_its_session() {
    let (_, _, desk) = evil_desk();
    outlives_refusals(move |stream| assert!(answer_one(stream, &desk).1.is_none()));
}
