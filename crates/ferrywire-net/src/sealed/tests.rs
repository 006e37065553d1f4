//! Tests of protected connections over a wire that takes and gives as many bytes as a test allows.

use super::outgoing::SLOT_BYTES;
use super::*;
use ferrywire_proto::limits::SEALED_SLOTS;
use ferrywire_proto::protection::Algorithm;
use ferrywire_proto::record::RecordSecret;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// One direction of a wire, and the room that is left in it.
#[derive(Default)]
struct Wire {
    parts: VecDeque<Part>,
    room: usize,
    lent_bytes: usize,
}

/// Bytes on a wire. What is lent has no owner here, and is read when it is received, as a kernel does.
struct Part {
    base: usize,
    len: usize,
    _owner: Option<Vec<u8>>,
}

impl Wire {
    fn give(&mut self, piece: IoVec, lends: bool) -> io::Result<usize> {
        let len = piece.len.min(self.room);
        if len == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.room -= len;
        let part = if lends {
            self.lent_bytes += len;
            Part { base: piece.base as usize, len, _owner: None }
        } else {
            // SAFETY: the caller of `send` promises that the piece is readable.
            let mut bytes = unsafe { std::slice::from_raw_parts(piece.base, len) }.to_vec();
            Part { base: bytes.as_mut_ptr() as usize, len, _owner: Some(bytes) }
        };
        self.parts.push_back(part);
        Ok(len)
    }

    fn take(&mut self, mut room: usize) -> Vec<u8> {
        let mut taken = Vec::new();
        while let Some(part) = self.parts.front_mut().filter(|_| room > 0) {
            let count = part.len.min(room);
            // SAFETY: the part has an owner here, or is lent by an end that the test still has.
            taken.extend_from_slice(unsafe { std::slice::from_raw_parts(part.base as *const u8, count) });
            (part.base, part.len, room) = (part.base + count, part.len - count, room - count);
            self.parts.pop_front_if(|part| part.len == 0);
        }
        taken
    }

    fn change_last_byte(&mut self) {
        let part = self.parts.back().unwrap();
        // SAFETY: as in `take`.
        unsafe { *((part.base + part.len - 1) as *mut u8) ^= 1 };
    }
}

struct Fake {
    out: Arc<Mutex<Wire>>,
    back: Arc<Mutex<Wire>>,
}

impl Conn for Fake {
    unsafe fn send(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        self.out.lock().unwrap().give(pieces[0], false)
    }

    fn lends(&self) -> bool {
        true
    }

    unsafe fn send_lent(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        self.out.lock().unwrap().give(pieces[0], true)
    }

    unsafe fn recv(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
        let taken = self.back.lock().unwrap().take(pieces[0].len);
        if taken.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        // SAFETY: promised by the caller.
        unsafe { std::ptr::copy_nonoverlapping(taken.as_ptr(), pieces[0].base, taken.len()) };
        Ok(taken.len())
    }

    fn health(&self) -> PathHealth {
        PathHealth::default()
    }

    fn shutdown(&mut self) {}

    fn fd(&self) -> Option<RawFd> {
        None
    }

    fn local(&self) -> SocketAddr {
        ([127, 0, 0, 1], 1).into()
    }

    fn remote(&self) -> SocketAddr {
        ([127, 0, 0, 1], 2).into()
    }
}

/// Two ends, and the wire from the first to the second. The first lends.
fn pair(encrypted: bool) -> (Sealed, Sealed, Arc<Mutex<Wire>>) {
    let [forth, back] = [(); 2].map(|()| Arc::<Mutex<Wire>>::default());
    let secrets = || {
        let secret = |byte| RecordSecret::new([byte; 32]);
        RecordSecrets { from_initiator: secret(1), from_responder: secret(2) }
    };
    let protection = Protection { encrypted, algorithm: Algorithm::ChaCha20Poly1305 };
    let near = Fake { out: forth.clone(), back: back.clone() };
    let far = Fake { out: back, back: forth.clone() };
    (
        Sealed::new(Box::new(near), protection, secrets(), true).lending(),
        Sealed::new(Box::new(far), protection, secrets(), false),
        forth,
    )
}

/// Bytes that repeat nowhere soon.
fn pattern(count: usize) -> Vec<u8> {
    (0..count as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

/// Receives what is on its way to `far`.
fn receive_all(far: &mut Sealed, received: &mut Vec<u8>) {
    let mut buffer = vec![0; 150_000];
    loop {
        match far.read(&mut buffer) {
            Ok(count) => received.extend_from_slice(&buffer[..count]),
            result => return assert!(is_blocked(&result), "{result:?}"),
        }
    }
}

fn is_blocked<T: fmt::Debug>(result: &io::Result<T>) -> bool {
    matches!(result, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

#[test]
fn bytes_arrive_whatever_the_kernel_takes_and_gives_at_a_time() {
    let bytes = pattern(400_000);
    for (encrypted, step) in [(true, 70_001), (true, 999), (false, 4_099)] {
        let (mut near, mut far, wire) = pair(encrypted);
        let (mut sent, mut received) = (0, Vec::new());
        // Short and long pieces, so that some records are opened into the caller's memory.
        let mut buffer = vec![0; 150_000];
        while received.len() < bytes.len() {
            wire.lock().unwrap().room += step;
            if sent < bytes.len() {
                let end = (sent + 1 + sent % 100_000).min(bytes.len());
                match near.write(&bytes[sent..end]) {
                    Ok(taken) => sent += taken,
                    result => assert!(is_blocked(&result), "{result:?}"),
                }
            } else {
                let flushed = near.flush();
                assert!(flushed.is_ok() != near.has_unsent());
            }
            let room = if received.len() % 3 == 0 { 777 } else { buffer.len() };
            match far.read(&mut buffer[..room]) {
                Ok(count) => received.extend_from_slice(&buffer[..count]),
                result => assert!(is_blocked(&result) && !far.has_received(), "{result:?}"),
            }
        }
        assert!(received == bytes && !near.has_unsent() && far.begun_bytes() == 0);
    }
}

/// Regression: a caller that found the socket empty never heard of the changed record.
#[test]
fn a_record_that_does_not_open_behind_one_that_does_is_announced() {
    for encrypted in [true, false] {
        let (mut near, mut far, wire) = pair(encrypted);
        wire.lock().unwrap().room = 1000;
        near.write(b"good").unwrap();
        near.write(b"changed").unwrap();
        wire.lock().unwrap().change_last_byte();
        let mut buffer = [0; 100];
        assert_eq!(far.read(&mut buffer).unwrap(), 4);
        assert!(far.has_received());
        for _ in 0..2 {
            assert_eq!(far.read(&mut buffer).unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }
}

/// Sends all of `bytes`, as a caller does that is told when to go on. Returns the bytes that were lent.
fn send_all(near: &mut Sealed, wire: &Mutex<Wire>, bytes: &[u8]) -> usize {
    let before = wire.lock().unwrap().lent_bytes;
    wire.lock().unwrap().room = usize::MAX;
    let mut sent = 0;
    while sent < bytes.len() {
        sent += near.write(&bytes[sent..]).unwrap();
    }
    wire.lock().unwrap().lent_bytes - before
}

#[test]
fn long_sends_are_lent_and_short_ones_copied() {
    let (mut near, mut far, wire) = pair(true);
    let (bytes, mut received) = (pattern(1 << 20), Vec::new());
    let overhead = bytes.len().div_ceil(RECORD_BYTES_MAX) * RECORD_OVERHEAD;
    assert_eq!(send_all(&mut near, &wire, &bytes), bytes.len() + overhead);
    receive_all(&mut far, &mut received);
    near.placed(bytes.len() as u64);
    assert_eq!(send_all(&mut near, &wire, &bytes[..1000]), 0);
    receive_all(&mut far, &mut received);
    assert!(received == [&bytes[..], &bytes[..1000]].concat());
}

/// Lent bytes are read late. What is sealed meanwhile must go elsewhere.
#[test]
fn a_slot_is_not_used_again_before_the_peer_has_placed_its_bytes() {
    let (mut near, mut far, wire) = pair(true);
    let bytes = pattern(2 * SEALED_SLOTS * SLOT_BYTES);
    let lent = send_all(&mut near, &wire, &bytes);
    assert!(lent > SEALED_SLOTS * SLOT_BYTES / 2 && lent <= SEALED_SLOTS * SLOT_BYTES, "{lent} bytes");
    assert_eq!(send_all(&mut near, &wire, &bytes), 0, "all slots are in use");
    let mut received = Vec::new();
    receive_all(&mut far, &mut received);
    // A third of the slots, and the next ones go into these alone.
    near.placed((lent / 3) as u64);
    let again = send_all(&mut near, &wire, &bytes);
    assert!(again > lent / 5 && again <= lent / 3, "{again} of {lent} bytes");
    receive_all(&mut far, &mut received);
    near.placed(3 * bytes.len() as u64);
    assert!(send_all(&mut near, &wire, &bytes) > lent / 2);
    receive_all(&mut far, &mut received);
    assert!(received.chunks(bytes.len()).all(|part| part == bytes) && received.len() == 4 * bytes.len());
}

/// A peer that acknowledges too early gets no more than a connection that breaks.
#[test]
fn bytes_that_the_kernel_does_not_have_are_not_placed() {
    let (mut near, mut far, wire) = pair(true);
    let (bytes, mut received) = (pattern(3 * RECORD_BYTES_MAX), Vec::new());
    wire.lock().unwrap().room = 100;
    assert_eq!(near.write(&bytes).unwrap(), bytes.len());
    assert!(near.has_unsent());
    near.placed(bytes.len() as u64);
    assert!(near.has_unsent() && is_blocked(&near.write(&bytes)));
    wire.lock().unwrap().room = usize::MAX;
    near.flush().unwrap();
    send_all(&mut near, &wire, &bytes);
    receive_all(&mut far, &mut received);
    assert!(received == [&bytes[..], &bytes[..]].concat());
}
