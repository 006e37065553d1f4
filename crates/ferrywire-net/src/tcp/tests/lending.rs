//! Tests of lent memory: it is read in place, and its bytes keep their order in the stream.

use super::*;

const LENT_BYTES: usize = 700_000;

/// Sends a header, which is copied, and a payload, which is lent.
fn send_lent(conn: &mut dyn Conn, head: &mut [u8], payload: &mut [u8]) -> io::Result<usize> {
    let pieces = [&mut *head, payload].map(|bytes| IoVec::new(bytes.as_mut_ptr(), bytes.len()));
    let first = usize::from(head.is_empty());
    // SAFETY: the callers keep the payload unchanged until it is received, or change it on purpose.
    unsafe { conn.send_lent(&pieces[first..]) }
}

#[test]
fn lent_memory_is_sent_without_a_copy() {
    let (mut near, mut far) = pair_with(&bulk());
    assert!(near.lends());
    let mut payload = vec![1; 64 << 10];
    let sent = eventually(|| send_lent(&mut near, &mut [7; 10], &mut payload)).unwrap();
    assert!(near.lends() && sent > 10, "the kernel took {sent} bytes");
    payload.fill(2);
    let mut received = vec![0; sent];
    recv_all(far.as_mut(), &mut received);
    assert_eq!(received[..10], [7; 10], "what was not lent was copied");
    assert!(received[10..].iter().all(|byte| *byte == 2), "nothing was copied of what was lent");
}

#[test]
fn lent_bytes_keep_their_place_while_the_other_end_is_slow() {
    let (mut near, mut far) = pair_with(&bulk());
    let frames = 20;
    let reader = thread::spawn(move || {
        // The reader is slower than the sender, so the sender often finds the socket full.
        let (mut all, mut part) = (Vec::new(), vec![0; 30_000]);
        while all.len() < frames * (64 + LENT_BYTES) {
            let bytes = eventually(|| recv_into(far.as_mut(), &mut part)).unwrap();
            assert!(bytes > 0, "the stream ended after {} bytes", all.len());
            all.extend_from_slice(&part[..bytes]);
            thread::yield_now();
        }
        all
    });
    let mut frames: Vec<(Vec<u8>, Vec<u8>)> =
        (0..frames).map(|at| (vec![at as u8; 64], pattern(LENT_BYTES + at)[at..].to_vec())).collect();
    for (at, (head, payload)) in frames.iter_mut().enumerate() {
        let (mut sent, whole) = (0, head.len() + payload.len());
        while sent < whole {
            let of_head = sent.min(head.len());
            let rest = &mut payload[sent - of_head..];
            sent += eventually(|| match at % 4 == 3 {
                // Offers the rest without lending, as an engine does that has stopped to lend.
                true if of_head == 64 => send_from(&mut near, rest),
                _ => send_lent(&mut near, &mut head[of_head..], rest),
            })
            .unwrap();
        }
    }
    let expected: Vec<u8> = frames.iter().flat_map(|(head, payload)| [&head[..], payload].concat()).collect();
    assert!(reader.join().unwrap() == expected, "bytes were lost, changed or moved");
}

#[test]
fn a_connection_that_ended_takes_nothing_lent() {
    let (mut near, far) = pair_with(&bulk());
    drop(far);
    let mut payload = vec![1; LENT_BYTES];
    let error = loop {
        if let Err(error) = eventually(|| send_lent(&mut near, &mut [], &mut payload)) {
            break error;
        }
    };
    assert!(matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset), "{error}");
    near.shutdown();
    let error = send_lent(&mut near, &mut [], &mut payload).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
}
