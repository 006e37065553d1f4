//! Short messages that stop half-way, or come again, and copies of short messages to a GPU that outlive the channels.

use super::evil::{Evil, data, evil_config};
use super::scene::{BEFORE, Scene};
use super::{LIMIT, eventually};
use crate::{Region, Transfer, TransferError};
use ferrywire_memory::sim::SimGpu;
use ferrywire_proto::handshake::Config;
use ferrywire_proto::wire::{FLAG_SINK, Header, Kind, Refusal, WITHDRAWN};
use std::io::Write;
use std::net::Shutdown;

const TAG: u64 = 5;
const BYTES: usize = 100;
/// Bytes that come before the message stops.
const FIRST: usize = 40;

fn message(number: u64, bytes: usize) -> Header {
    Header { key: TAG, offset: number, len: bytes as u32, ..Header::new(Kind::Send) }
}

fn whole() -> Vec<u8> {
    (1..=BYTES as u8).collect()
}

fn contents(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; BYTES];
    region.read_at(0, &mut bytes).unwrap();
    bytes
}

/// A receive of the victim with a message of which the first bytes have come, over the first of two channels.
struct Begun {
    evil: Evil,
    target: Region,
    received: Transfer,
}

impl Begun {
    fn new(scene: &Scene) -> Begun {
        let mut evil = Evil::with(scene, Config { channels: 2, ..evil_config() });
        let target = scene.victim.register(vec![BEFORE; BYTES]).unwrap();
        let received = evil.here.recv(TAG, &target, 0, BYTES as u64).unwrap();
        evil.send(message(0, BYTES), &whole()[..FIRST]);
        eventually("the message begins", || contents(&target)[..FIRST] == whole()[..FIRST]);
        Begun { evil, target, received }
    }

    fn loses_its_connection(&mut self) {
        self.evil.data[0].stream.shutdown(Shutdown::Both).unwrap();
        self.evil.channel_lost_for("closed");
    }

    /// The rest of the message comes, and the next receive gets it whole.
    fn passes_to_the_next(mut self, scene: &Scene) {
        self.evil.data[0].stream.write_all(&whole()[FIRST..]).unwrap();
        let next = scene.victim.alloc_host(BYTES).unwrap();
        assert_eq!(self.evil.here.recv(TAG, &next, 0, BYTES as u64).unwrap().wait(LIMIT), Ok(BYTES as u64));
        assert_eq!(contents(&next), whole());
        assert_eq!(self.evil.data[0].answers(), []);
    }
}

#[test]
fn a_message_whose_receive_is_cancelled_while_it_arrives_passes_to_the_next() {
    let scene = Scene::new();
    let begun = Begun::new(&scene);
    begun.received.cancel();
    assert_eq!(begun.received.wait(LIMIT), Err(TransferError::Cancelled));
    let (target, before) = (begun.target.clone(), contents(&begun.target));
    begun.passes_to_the_next(&scene);
    assert_eq!(contents(&target), before, "the memory of the cancelled receive");
    assert_eq!(before[FIRST..], [BEFORE; BYTES - FIRST]);
    scene.unharmed();
}

#[test]
fn a_message_whose_receive_loses_its_memory_while_it_arrives_passes_to_the_next() {
    let scene = Scene::new();
    let begun = Begun::new(&scene);
    begun.target.clone().deregister().unwrap();
    let error = begun.received.wait(LIMIT).unwrap_err();
    assert!(error.to_string().contains("deregistered"), "{error}");
    begun.passes_to_the_next(&scene);
    scene.unharmed();
}

#[test]
fn a_message_that_lost_its_connection_comes_again_to_its_receive() {
    let scene = Scene::new();
    let mut begun = Begun::new(&scene);
    begun.loses_its_connection();
    let behind = begun.evil.here.recv(TAG, &begun.target, 0, BYTES as u64).unwrap();
    let data = &mut begun.evil.data[1];
    // Only the same message may come again.
    data.send(message(0, BYTES - 1), &whole()[1..]);
    data.send(Header { key: TAG + 1, ..message(0, BYTES) }, &whole());
    data.send(message(0, BYTES), &whole());
    data.send(message(0, BYTES), &whole());
    assert_eq!(data.answers(), [0, 1, 3].map(|number| (number, Refusal::Other)));
    assert_eq!(begun.received.wait(LIMIT), Ok(BYTES as u64));
    assert_eq!(contents(&begun.target), whole());
    data.send(message(1, BYTES), &whole());
    assert_eq!(behind.wait(LIMIT), Ok(BYTES as u64));
    scene.unharmed();
}

#[test]
fn a_message_that_lost_its_connection_and_its_receive_comes_again_to_the_next() {
    let scene = Scene::new();
    let mut begun = Begun::new(&scene);
    begun.loses_its_connection();
    begun.received.cancel();
    assert_eq!(begun.received.wait(LIMIT), Err(TransferError::Cancelled));
    let next = scene.victim.alloc_host(BYTES).unwrap();
    let received = begun.evil.here.recv(TAG, &next, 0, BYTES as u64).unwrap();
    begun.evil.data[1].send(message(0, BYTES), &whole());
    assert_eq!(received.wait(LIMIT), Ok(BYTES as u64));
    assert_eq!(contents(&next), whole());
    assert_eq!(begun.evil.data[1].answers(), []);
    scene.unharmed();
}

#[test]
fn a_receive_whose_message_is_withdrawn_after_it_began_gets_the_next_message() {
    let scene = Scene::new();
    let mut begun = Begun::new(&scene);
    begun.loses_its_connection();
    let data = &mut begun.evil.data[1];
    data.send(Header { key: TAG, offset: 0, total: WITHDRAWN, ..Header::new(Kind::Announce) }, &[]);
    data.send(message(1, 3), &[7, 8, 9]);
    assert_eq!(begun.received.wait(LIMIT), Ok(3));
    assert_eq!(contents(&begun.target)[..3], [7, 8, 9]);
    assert_eq!(data.answers(), []);
    scene.unharmed();
}

/// Regression: the workers poll such copies for the peer's channels.
#[test]
fn a_message_is_placed_on_a_gpu_though_its_peer_has_no_channel_left() {
    // No other test's.
    const GPU: u32 = 9;
    let scene = Scene::new();
    let gpu = SimGpu::open(GPU).unwrap();
    let target = scene.victim.alloc_sim(GPU, BYTES).unwrap();
    let mut evil = Evil::new(&scene);
    evil.send(message(0, BYTES), &whole());
    assert_eq!(evil.data[0].answers(), []);
    gpu.set_stall(true);
    let received = evil.here.recv(TAG, &target, 0, BYTES as u64).unwrap();
    evil.data[0].stream.shutdown(Shutdown::Both).unwrap();
    evil.channel_lost_for("closed");
    assert_eq!(received.poll(), None);
    gpu.set_stall(false);
    assert_eq!(received.wait(LIMIT), Ok(BYTES as u64));
    assert_eq!(evil.here.error(), None);
    assert_eq!(contents(&target), whole());
    scene.unharmed();
}

/// The next receive got the message behind, which had come whole.
#[test]
fn messages_behind_one_whose_receive_was_cancelled_wait_for_it() {
    let scene = Scene::new();
    let mut begun = Begun::new(&scene);
    begun.received.cancel();
    assert_eq!(begun.received.wait(LIMIT), Err(TransferError::Cancelled));
    let targets = [(); 2].map(|()| scene.victim.alloc_host(BYTES).unwrap());
    let receive = |target| begun.evil.here.recv(TAG, target, 0, BYTES as u64).unwrap();
    let first = receive(&targets[0]);
    begun.evil.data[1].send(message(1, 1), &[7]);
    begun.evil.data[1].send(Header { key: TAG + 1, ..message(2, 1) }, &[8]);
    assert_eq!(begun.evil.data[1].answers(), []);
    let other = scene.victim.alloc_host(1).unwrap();
    assert_eq!(begun.evil.here.recv(TAG + 1, &other, 0, 1).unwrap().wait(LIMIT), Ok(1), "of another tag");
    let second = receive(&targets[1]);
    begun.evil.data[0].stream.write_all(&whole()[FIRST..]).unwrap();
    assert_eq!((first.wait(LIMIT), second.wait(LIMIT)), (Ok(BYTES as u64), Ok(1)));
    assert_eq!(contents(&targets[0]), whole());
    assert_eq!(contents(&targets[1])[0], 7);
    scene.unharmed();
}

#[test]
fn a_frame_for_the_sink_of_a_message_that_arrives_is_not_taken_for_the_message() {
    let scene = Scene::new();
    let mut begun = Begun::new(&scene);
    let sink = (0..1000).find(|key| {
        begun.evil.data[1].send(Header { flags: FLAG_SINK, ..data(*key, 1, 0) }, &[]);
        begun.evil.data[1].answers().last().is_none_or(|(number, _)| u64::from(*number) != *key)
    });
    // A frame with a notification, of which only the header comes.
    let header = Header { flags: FLAG_SINK, notify: 8, ..data(sink.unwrap(), 1, 10) };
    begun.evil.data[1].send(header, &[]);
    begun.received.cancel();
    assert_eq!(begun.received.wait(LIMIT), Err(TransferError::Cancelled));
    begun.passes_to_the_next(&scene);
    scene.unharmed();
}
