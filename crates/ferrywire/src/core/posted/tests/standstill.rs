//! Stalls that are errors, and messages that are refused or must wait.

use super::*;

#[test]
fn a_lane_that_stays_full_is_an_error() {
    let (queue, _) = queue_of(1);
    let mut bench = Bench::new();
    bench.take(&queue, &mut window());
    bench.script(|script| script.full = true);
    bench.poll().unwrap();
    bench.advance(STALL).unwrap();
    let why = bench.advance(Duration::from_secs(1)).unwrap_err();
    assert!(why.contains("isend has accepted no send for 30.0 s (scripted)"), "{why}");
}

#[test]
fn a_lane_that_takes_no_receive_with_nothing_posted_is_an_error() {
    let memory = Memory::private(CHUNK).unwrap();
    let mut bench = Bench::new();
    bench.script(|script| script.full = true);
    bench.expect(frame(0, &[(0, 10)], &memory));
    bench.poll().unwrap();
    bench.advance(STALL).unwrap();
    let why = bench.advance(Duration::from_secs(1)).unwrap_err();
    assert!(why.contains("irecv has accepted no receive for 30.0 s (scripted)"), "{why}");
}

#[test]
fn a_stalled_send_is_an_error() {
    let (queue, _) = queue_of(2);
    let mut bench = Bench::new();
    bench.take(&queue, &mut window());
    bench.poll().unwrap();
    bench.advance(STALL).unwrap();
    bench.script(|script| script.sends.push_back(Step::Done));
    bench.advance(STALL).expect("one message is sent meanwhile");
    let why = bench.advance(Duration::from_secs(1)).unwrap_err();
    assert!(why.contains("message 1 (65536 bytes) is still not sent after 30.0 s"), "{why}");
}

#[test]
fn a_stalled_oldest_message_is_an_error_with_the_fill_of_both_windows() {
    let memory = Memory::private(CHUNK).unwrap();
    let mut bench = Bench::new();
    for number in 0..20 {
        bench.expect(frame(number, &[(0, 10)], &memory));
    }
    bench.poll().unwrap();
    bench.now += 100 * STALL;
    bench.advance(STALL / 2).expect("time in which the process was stopped is no stall");
    let why = bench.advance(STALL).unwrap_err();
    assert!(why.contains("message 0 (10 bytes) has not arrived after 30.0 s"), "{why}");
    let state = bench.posted.state();
    assert!(state.contains("receiving: 16 of 16 posted, 20 frames wait"), "{state}");
}

/// Regression: the time without progress counted from the arrival of the previous message, which waited for a
/// GPU.
#[test]
fn a_message_is_stalled_since_its_receive_was_posted() {
    let memory = Memory::private(CHUNK).unwrap();
    let mut bench = Bench::new();
    bench.script(|script| script.scatters = true);
    bench.expect(frame(0, &[(0, 10)], &memory));
    bench.poll().unwrap();
    bench.script(|script| script.receives.push_back(Step::Done));
    bench.advance(STALL - Duration::from_secs(5)).unwrap();
    bench.expect(frame(1, &[(10, 10)], &memory));
    bench.advance(STALL).unwrap();
    let why = bench.advance(Duration::from_secs(1)).unwrap_err();
    assert!(why.contains("message 1 (10 bytes) has not arrived after 30.0 s"), "{why}");
}

/// Regression: the lane ended with "has not arrived" although this end's own GPU stood still, and its pool was full.
#[test]
fn a_message_is_not_stalled_while_this_end_holds_payload() {
    let memory = Memory::private(CHUNK).unwrap();
    let mut bench = Bench::with(Script { holds: true, ..Script::default() });
    bench.expect(frame(0, &[(0, 10)], &memory));
    bench.poll().unwrap();
    bench.advance(3 * STALL).expect("the peer may have no room to send");
    bench.script(|script| script.holds = false);
    bench.advance(STALL).expect("the time of the message begins when the pool has room");
    let why = bench.advance(Duration::from_secs(1)).unwrap_err();
    assert!(why.contains("message 0 (10 bytes) has not arrived after 30.0 s"), "{why}");
}

/// Regression: a message counted as missing while this end's window had no room for it.
#[test]
fn a_peer_that_closes_is_not_blamed_for_what_waits_for_a_gpu() {
    let memory = Memory::private(CHUNK).unwrap();
    let mut bench = Bench::new();
    bench.script(|script| script.scatters = true);
    for number in 0..WINDOW as u64 + 1 {
        bench.expect(frame(number, &[(number * 10, 10)], &memory));
    }
    bench.poll().unwrap();
    bench.script(|script| {
        script.receives.push_back(Step::Closing("result 2".into()));
        script.receives.extend(vec![Step::Done; WINDOW]);
    });
    bench.advance(2 * limits::LANE_CLOSING_TIMEOUT).expect("every message with a posted receive has arrived");
    bench.script(|script| script.gathers[0].1 = true);
    bench
        .advance(limits::LANE_CLOSING_TIMEOUT)
        .expect("the time of a message begins when its receive is posted");
    let why = bench.advance(Duration::from_secs(1)).unwrap_err();
    assert!(
        why.contains("message 1 did not arrive within 2.0 s after the lane began to close: result 2"),
        "{why}"
    );
}

#[test]
fn a_message_larger_than_agreed_is_refused() {
    let bench = Bench::new();
    let memory = Memory::private(2 * CHUNK).unwrap();
    let sized = |bytes| bench.posted.fits(&frame(0, &[(0, bytes)], &memory).header);
    assert_eq!(sized(CHUNK), Ok(()));
    assert_eq!(sized(CHUNK + 1), Err("the peer announced a message that is larger than was agreed"));
    assert_eq!(bench.posted.fits(&Header { len: u32::MAX, ..Header::new(Kind::Notify) }), Ok(()));
}

#[test]
fn a_receive_counts_until_it_is_consumed() {
    let memory = Memory::private(CHUNK).unwrap();
    let mut bench = Bench::new();
    bench.script(|script| script.scatters = true);
    for number in 0..20 {
        bench.expect(frame(number, &[(number * 10, 10)], &memory));
    }
    bench.poll().unwrap();
    bench.script(|script| script.receives.extend(vec![Step::Done; WINDOW]));
    bench.poll().unwrap();
    assert_eq!(bench.posted.posted_count(), WINDOW as u32, "all receives are finished, and none is gathered");
    bench.script(|script| script.gathers[0].1 = true);
    assert_eq!(numbers(&bench.poll().unwrap()), [0]);
    assert_eq!(bench.posted.posted_count(), WINDOW as u32 + 1);
}

#[test]
fn a_turn_takes_no_more_than_others_can_wait_for() {
    const BYTES: usize = 600 << 10;
    let memory = Memory::private(BYTES).unwrap();
    let mut bench = Bench::new();
    (0..5).for_each(|number| bench.expect(frame(number, &[(0, BYTES)], &memory)));
    bench.poll().unwrap();
    bench.script(|script| script.receives.extend(vec![Step::Done; 5]));
    for expected in [vec![0, 1], vec![2, 3], vec![4]] {
        let pass = bench.poll().unwrap();
        assert_eq!((numbers(&pass), pass.worked), (expected, true), "the lane is polled again");
    }
}
