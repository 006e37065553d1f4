//! An attacker on the path: a proxy that changes, drops, repeats, reorders and replaces bytes of data connections.
//!
//! With encryption, and with keyed checksums, every change ends its connection, the transfers finish over others, and no changed
//! byte is ever part of a completed transfer. The same proxy shows that without protection a change reaches memory.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::process::together;
use ferrywire::{Builder, Encryption, Endpoint, MemoryLocation, Peer, TransferError};

const LIMIT: Duration = Duration::from_secs(120);
const SECRET: &str = "correct horse battery staple";
/// Bytes of a data connection's opening: preamble, opening, proof.
const OPENING_BYTES: usize = 16 + (2 + 14) + (2 + 32);
const WRITE_BYTES: usize = 1 << 20;
const CHANNELS: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attack {
    /// Only looks.
    None,
    Flip,
    Drop,
    /// Loses everything from some byte on, and keeps the connection open.
    Swallow,
    Repeat,
    /// Exchanges two pieces of the stream.
    Reorder,
    /// Replaces bytes by those of another connection, at the same position.
    Splice,
    /// Ends the stream in its middle.
    Truncate,
}

const ATTACKS: [Attack; 7] = [
    Attack::Flip,
    Attack::Drop,
    Attack::Swallow,
    Attack::Repeat,
    Attack::Reorder,
    Attack::Splice,
    Attack::Truncate,
];

/// What the proxy does and has seen.
struct Path {
    attack: Attack,
    /// Position in a data connection's stream of its first changed byte.
    at: usize,
    /// Attacks that are still to be made, one for each connection.
    left: AtomicUsize,
    made: AtomicUsize,
    over: AtomicBool,
    /// Bytes of data connections towards the listening end, by connection.
    seen: Mutex<Vec<Vec<u8>>>,
}

impl Path {
    /// A proxy to `to`. Returns its address.
    fn open(to: SocketAddr, attack: Attack, at: usize, times: usize) -> (Arc<Path>, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let path = Arc::new(Path {
            attack,
            at,
            left: AtomicUsize::new(times),
            made: AtomicUsize::new(0),
            over: AtomicBool::new(false),
            seen: Mutex::default(),
        });
        let its = path.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (Ok(near), Ok(far)) = (stream, TcpStream::connect(to)) else { return };
                if its.over.load(Ordering::SeqCst) {
                    return;
                }
                let (near_back, far_back) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                let path = its.clone();
                thread::spawn(move || path.forward(near, far));
                thread::spawn(move || pump(far_back, near_back));
            }
        });
        (path, address)
    }

    /// Forwards what the connecting end sends.
    fn forward(&self, mut near: TcpStream, mut far: TcpStream) {
        let mut preamble = [0; 16];
        if near.read_exact(&mut preamble).is_err() || far.write_all(&preamble).is_err() {
            return;
        }
        if preamble[10] != 2 {
            return pump(near, far);
        }
        let number = {
            let mut seen = self.seen.lock().unwrap();
            seen.push(preamble.to_vec());
            seen.len() - 1
        };
        let (mut position, mut is_done, mut is_silent) = (preamble.len(), false, false);
        let mut buffer = vec![0; 64 << 10];
        while let Ok(bytes @ 1..) = near.read(&mut buffer) {
            let mut piece = buffer[..bytes].to_vec();
            self.seen.lock().unwrap()[number].extend_from_slice(&piece);
            let due = self.at.max(position)..;
            if !is_done
                && self.attack != Attack::None
                && position + bytes > due.start + 64
                && self.take_turn()
            {
                is_done = true;
                let at = due.start - position;
                match self.attack {
                    Attack::None => {}
                    Attack::Flip => piece[at + 7] ^= 0x10,
                    Attack::Drop => drop(piece.drain(at..at + 16)),
                    Attack::Swallow => {
                        piece.truncate(at);
                        let _ = far.write_all(&piece);
                        is_silent = true;
                    }
                    Attack::Repeat => {
                        let again = piece[at..at + 32].to_vec();
                        piece.splice(at..at, again);
                    }
                    Attack::Reorder => {
                        let (front, back) = piece[at..at + 64].split_at_mut(32);
                        front.swap_with_slice(back);
                    }
                    Attack::Splice => {
                        let seen = self.seen.lock().unwrap();
                        let other = (number + 1) % seen.len();
                        let foreign = seen[other].get(due.start..due.start + 64).map(<[u8]>::to_vec);
                        let own = seen[other].get(OPENING_BYTES..OPENING_BYTES + 64).map(<[u8]>::to_vec);
                        let foreign = foreign.or(own).filter(|foreign| foreign != &piece[at..at + 64]);
                        let foreign = foreign.unwrap_or_else(|| vec![0x5a; 64]);
                        piece[at..at + 64].copy_from_slice(&foreign);
                    }
                    Attack::Truncate => {
                        let _ = far.write_all(&piece[..at]);
                        let _ = far.shutdown(Shutdown::Write);
                        let _ = near.shutdown(Shutdown::Both);
                        return;
                    }
                }
            }
            position += bytes;
            if !is_silent && far.write_all(&piece).is_err() {
                break;
            }
        }
        let _ = far.shutdown(Shutdown::Both);
        let _ = near.shutdown(Shutdown::Both);
    }

    /// Whether one more attack is to be made.
    fn take_turn(&self) -> bool {
        let taken = self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        if taken.is_ok() {
            self.made.fetch_add(1, Ordering::SeqCst);
        }
        taken.is_ok()
    }

    fn saw(&self, bytes: &[u8]) -> bool {
        self.seen.lock().unwrap().iter().any(|stream| stream.windows(bytes.len()).any(|part| part == bytes))
    }
}

impl Drop for Path {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
    }
}

fn pump(mut from: TcpStream, mut to: TcpStream) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(bytes @ 1..) = from.read(&mut buffer) {
        if to.write_all(&buffer[..bytes]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

/// A listening and a connecting end, whose connections lead through a proxy.
struct Scene {
    path: Arc<Path>,
    far: Endpoint,
    near: Endpoint,
    there: Peer,
    here: Peer,
    /// Where the memory of both ends is.
    memory: MemoryLocation,
}

fn scene(protect: fn(Builder) -> Builder, attack: Attack, at: usize, times: usize) -> Scene {
    let builder = || protect(Endpoint::builder().secret(SECRET).channels(CHANNELS).threads(1));
    // A NIC that does not exist: the listening end advertises no address, and all connections go where it was found.
    let far = builder().nics(["none0"]).listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let (path, address) = Path::open(far.listen_addresses()[0], attack, at, times);
    let near = builder().build().unwrap();
    let here = near.connect(address, LIMIT).unwrap();
    let there = far.accept(LIMIT).unwrap();
    Scene { path, far, near, there, here, memory: MemoryLocation::Host }
}

/// Bytes that repeat nowhere: position and round in each word.
fn pattern(round: usize) -> Vec<u8> {
    let word = |at: usize| ((at as u64) << 20 | round as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..WRITE_BYTES / 8).flat_map(|at| word(at).to_le_bytes()).collect()
}

/// Writes with notifications until all attacks are made, and some more. Returns the number of rounds in which a completed write
/// had changed bytes.
fn rounds_with_changes(scene: &Scene, times: usize) -> usize {
    let (mut wrong, mut after) = (0, 0);
    for round in 0..400 {
        let bytes = pattern(round);
        let [source, target] = [&scene.near, &scene.far].map(|end| match scene.memory {
            MemoryLocation::SimGpu(gpu) => end.alloc_sim(gpu, WRITE_BYTES).unwrap(),
            _ => end.alloc_host(WRITE_BYTES).unwrap(),
        });
        source.write_at(0, &bytes).unwrap();
        let remote = target.descriptor();
        let write = scene.here.write_notify(&source, 0, &remote, 0, WRITE_BYTES as u64, b"done");
        write.unwrap().wait(LIMIT).unwrap();
        assert_eq!(scene.there.wait_notification(LIMIT).unwrap(), b"done");
        let mut placed = vec![0; WRITE_BYTES];
        target.read_at(0, &mut placed).unwrap();
        wrong += usize::from(placed != bytes);
        after += usize::from(scene.path.made.load(Ordering::SeqCst) == times);
        if after == 3 {
            return wrong;
        }
    }
    panic!("{} of {times} attacks were made", scene.path.made.load(Ordering::SeqCst));
}

/// Payload of the first chunks, behind the opening and a header.
const IN_PAYLOAD: usize = 100_000;

fn every_change_is_detected(protect: fn(Builder) -> Builder) {
    thread::scope(|scope| {
        for attack in ATTACKS {
            scope.spawn(move || {
                for at in [OPENING_BYTES, OPENING_BYTES + 2, IN_PAYLOAD] {
                    // Between two records nothing tells that the stream has ended: see below.
                    if attack != Attack::Swallow || at != OPENING_BYTES {
                        is_detected(protect, attack, at);
                    }
                }
            });
        }
    });
}

fn is_detected(protect: fn(Builder) -> Builder, attack: Attack, at: usize) {
    // A receiver waits for some seconds for the rest of a record.
    let times = if matches!(attack, Attack::Drop | Attack::Swallow) { 1 } else { 3 };
    let scene = scene(protect, attack, at, times);
    assert_eq!(rounds_with_changes(&scene, times), 0, "{attack:?} at {at}");
    let lost = scene.there.stats().lost_channels.len().max(scene.here.stats().lost_channels.len());
    assert!(lost >= times, "{attack:?} at {at}: {lost} connections were given up");
    assert!(scene.here.error().is_none() && scene.there.error().is_none());
}

/// An attacker that swallows a connection's bytes and acknowledges them for TCP can stop its transfers, and no more.
#[test]
fn a_transfer_whose_bytes_are_swallowed_stalls_by_name() {
    let _together = together();
    let protect: fn(Builder) -> Builder = |builder| builder.encryption(Encryption::Required).channels(1);
    let scene = scene(protect, Attack::Swallow, OPENING_BYTES, usize::MAX);
    let source = scene.near.register(pattern(0)).unwrap();
    let target = scene.far.alloc_host(WRITE_BYTES).unwrap();
    let write = scene.here.write(&source, 0, &target.descriptor(), 0, WRITE_BYTES as u64).unwrap();
    let error = write.wait(Duration::from_secs(3)).unwrap_err();
    assert!(matches!(error, TransferError::Stalled { .. }), "{error}");
    let mut placed = vec![1; WRITE_BYTES];
    target.read_at(0, &mut placed).unwrap();
    assert!(placed.iter().all(|byte| *byte == 0));
}

#[test]
fn an_attacker_on_the_path_changes_nothing_that_is_encrypted() {
    let _together = together();
    every_change_is_detected(|builder| builder.encryption(Encryption::Required));
}

#[test]
fn an_attacker_on_the_path_changes_nothing_that_is_authenticated() {
    let _together = together();
    every_change_is_detected(|builder| builder.keyed_checksum(true));
}

/// What is resent is encrypted once more, from the GPU's memory and for the next connection.
#[test]
fn records_of_a_gpu_that_are_cut_or_changed_arrive_over_another_connection() {
    let _together = together();
    thread::scope(|scope| {
        for attack in [Attack::Truncate, Attack::Flip] {
            scope.spawn(move || {
                for at in [OPENING_BYTES + 2, IN_PAYLOAD, 3 * IN_PAYLOAD] {
                    let scene = scene(|builder| builder.encryption(Encryption::Required), attack, at, 3);
                    let scene = Scene { memory: MemoryLocation::SimGpu(0), ..scene };
                    assert_eq!(rounds_with_changes(&scene, 3), 0, "{attack:?} at {at}");
                    assert!(!scene.path.saw(&pattern(0)[4096..4096 + 64]), "{attack:?} at {at}");
                    let lost =
                        scene.there.stats().lost_channels.len().max(scene.here.stats().lost_channels.len());
                    assert!(lost >= 3, "{attack:?} at {at}: {lost} connections were given up");
                }
            });
        }
    });
}

/// So the attack is one.
#[test]
fn an_attacker_on_the_path_changes_what_is_in_clear() {
    let _together = together();
    let scene = scene(|builder| builder, Attack::Flip, IN_PAYLOAD, 3);
    assert!(rounds_with_changes(&scene, 3) > 0);
}

#[test]
fn an_attacker_on_the_path_reads_only_what_is_in_clear() {
    let _together = together();
    for (protect, is_clear) in [
        ((|builder| builder.encryption(Encryption::Required)) as fn(Builder) -> Builder, false),
        (|builder| builder.keyed_checksum(true), true),
        (|builder| builder, true),
    ] {
        let scene = scene(protect, Attack::None, 0, 0);
        rounds_with_changes(&scene, 0);
        assert_eq!(scene.path.saw(&pattern(0)[4096..4096 + 64]), is_clear);
        assert_eq!(scene.path.saw(b"done"), is_clear);
    }
}

/// A recorded data connection, sent again: the listening end asks another question.
#[test]
fn a_recorded_connection_is_of_no_use() {
    let _together = together();
    let scene = scene(|builder| builder.encryption(Encryption::Required), Attack::None, 0, 0);
    rounds_with_changes(&scene, 0);
    let recorded = scene.path.seen.lock().unwrap().clone();
    assert!(recorded.len() >= CHANNELS && recorded.iter().any(|stream| stream.len() > OPENING_BYTES));
    for stream in recorded {
        let mut again = TcpStream::connect(scene.far.listen_addresses()[0]).unwrap();
        again.set_read_timeout(Some(LIMIT)).unwrap();
        // The other end may close before it has read everything.
        let _ = again.write_all(&stream);
        let mut answer = Vec::new();
        let _ = again.read_to_end(&mut answer);
        // A challenge, and at most a refusal. An acceptance would be a proof of 32 bytes.
        let rest = answer.get(2 + 16..).unwrap_or_default();
        assert!(rest.is_empty() || rest.starts_with(&[0xff, 0xff]), "{rest:?}");
    }
    assert_eq!(rounds_with_changes(&scene, 0), 0);
}
