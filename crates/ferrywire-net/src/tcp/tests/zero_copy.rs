//! Tests of zero copy over loopback, where the kernel always copies: bookkeeping, and turning itself off.

use super::*;

#[test]
fn zero_copy_is_off_within_a_host() {
    let (mut near, mut far) = pair_with(&bulk());
    assert!(!near.zero_copy() && !far.zero_copy());
    let mut bytes = pattern(128 << 10);
    let pieces = pieces_over(&mut bytes, usize::MAX);
    // SAFETY: `bytes` outlives the connection.
    let sent = eventually(|| unsafe { near.send_stable(&pieces) }).unwrap();
    assert_eq!(near.released(), sent as u64);
    recv_all(far.as_mut(), &mut vec![0; sent]);
}

/// A connection that uses zero copy although loopback copies, with stable bytes in flight.
fn forced_zero_copy(bytes: &mut [u8]) -> (TcpConn, Box<dyn Conn>, usize) {
    let (mut near, far) = pair_with(&bulk());
    eventually(|| send_from(&mut near, &mut [0])).unwrap();
    near.force_zero_copy();
    let pieces = pieces_over(bytes, usize::MAX);
    // SAFETY: every caller declares `bytes` before the connection, so that they outlive it.
    let sent = fill(|| unsafe { near.send_stable(&pieces) });
    (near, far, sent + 1)
}

#[test]
fn copied_probes_turn_zero_copy_off_and_release_everything() {
    let mut bytes = pattern(256 << 10);
    let (mut near, mut far, sent) = forced_zero_copy(&mut bytes);
    assert!(near.zero_copy());
    assert!(near.released() < sent as u64, "what was not sent yet must not be released");
    let mut received = vec![0; sent];
    recv_all(far.as_mut(), &mut received);
    assert!(received[1..1 + bytes.len()] == bytes[..], "bytes were changed");
    until("everything is released", || near.released() == sent as u64);
    assert!(!near.zero_copy());
    let pieces = pieces_over(&mut bytes, usize::MAX);
    // SAFETY: `bytes` outlives the connection.
    let more = eventually(|| unsafe { near.send_stable(&pieces) }).unwrap();
    assert_eq!(near.released(), (sent + more) as u64);
}

#[test]
fn completions_show_as_an_error_until_they_are_read() {
    let mut bytes = pattern(256 << 10);
    let (mut near, mut far, sent) = forced_zero_copy(&mut bytes);
    recv_all(far.as_mut(), &mut vec![0; sent]);
    let event = ready(&near, Interest::READ, DEADLINE).unwrap();
    assert!(event.error && !event.readable && !event.hangup);
    until("everything is released", || near.released() == sent as u64);
    assert_eq!(ready(&near, Interest::READ, Duration::ZERO), None);
}

/// Regression: the kernel went on sending the memory's later contents for as long as the peer received.
#[test]
fn an_aborted_connection_has_released_its_memory_and_sends_nothing_more() {
    let mut bytes = pattern(256 << 10);
    let (mut near, mut far, sent) = forced_zero_copy(&mut bytes);
    assert!(near.released() < sent as u64);
    near.abort();
    until("everything is released", || near.released() == sent as u64);
    // The peer still receives the bytes that its kernel had before the abort, and no others.
    let mut received = vec![0; sent];
    let mut got = 0;
    let ended = loop {
        match eventually(|| recv_into(far.as_mut(), &mut received)) {
            Ok(bytes) => got += bytes,
            Err(error) => break error,
        }
    };
    assert!(got < sent, "all of it was sent");
    assert_eq!(ended.kind(), io::ErrorKind::ConnectionReset);
    assert_eq!(send_from(&mut near, &mut [0]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
}

#[test]
fn a_connection_dropped_with_unreleased_memory_is_aborted() {
    let mut bytes = pattern(256 << 10);
    let (near, mut far, sent) = forced_zero_copy(&mut bytes);
    drop(near);
    bytes.fill(0xff);
    let mut received = vec![0; sent];
    let mut count = 0;
    let end = loop {
        match eventually(|| recv_into(far.as_mut(), &mut received[count..])) {
            Ok(0) => panic!("an orderly end after {count} of {sent} bytes"),
            Ok(more) => count += more,
            Err(e) => break e,
        }
    };
    assert_eq!(end.kind(), io::ErrorKind::ConnectionReset);
    assert!(!received[..count].contains(&0xff), "memory was sent after it was given back");
}
