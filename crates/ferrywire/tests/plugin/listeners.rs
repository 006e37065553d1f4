//! Listeners: one for each connection of a lane, whatever is moved over it; none outlives its accept, unless
//! that does not end.

use crate::case::case;
use crate::ends::{Ends, LIMIT, builder, loopback, plugin};
use crate::lines::Lines;
use ferrywire_ncclnet::log;
use std::time::{Duration, Instant};

/// How many listeners the plugin has opened, and closed, in this process. With `stats=on` it says so.
fn listeners() -> (u64, u64) {
    let lines = log::last_lines();
    let last = lines.iter().rev().find_map(|line| line.text.strip_prefix("stats: listeners opened="));
    let (opened, closed) = last.expect("a listener at least").split_once(" closed=").unwrap();
    (opened.parse().unwrap(), closed.parse().unwrap())
}

#[test]
fn a_lane_listens_once_however_much_is_moved() {
    case!("stats=on").passes(|| {
        let ends = Ends::with(|builder| builder.channels(4));
        assert_eq!(listeners(), (8, 8), "one for each direction of each channel, closed when it was used");
        for salt in 0..50 {
            ends.write(1_000_000 + salt as usize, salt);
        }
        assert_eq!(listeners(), (8, 8));
        ends.close();
        assert_eq!(listeners(), (8, 8));
    });
}

#[test]
fn each_reconnection_listens_once_more_at_each_end() {
    // Each lane fails at its twentieth message, and its channel is connected anew.
    case!("stats=on,test_error_after=20,fault_side=send").passes(|| {
        let ends = Ends::new();
        for salt in 0..100 {
            ends.write(1000, salt);
            while ![&ends.near, &ends.far].into_iter().all(is_whole) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let channels = ends.near.stats().channels;
        let again: u64 = channels.iter().map(|channel| u64::from(channel.generation)).sum();
        let lost = ends.near.stats().lost_channels.len() as u64;
        assert!(lost >= 2, "several lanes failed and came back: {lost}");
        ends.close();
        let (opened, closed) = listeners();
        assert!((2 * (2 + lost)..=2 * (2 + again)).contains(&opened), "{opened}, {lost} lost, {again} again");
        assert_eq!(closed, opened, "none is left");
    });
}

fn is_whole(peer: &ferrywire::Peer) -> bool {
    peer.stats().channels.iter().all(|channel| channel.alive)
}

#[test]
fn many_peers_in_turn_leave_no_listener() {
    case!("stats=on").passes(|| {
        let accepting = loopback(builder()).build().unwrap();
        for round in 1..=20 {
            let connecting = builder().build().unwrap();
            let near = connecting.connect(accepting.listen_addresses()[0], LIMIT).unwrap();
            let far = accepting.accept(LIMIT).unwrap();
            near.close(LIMIT).unwrap();
            connecting.close(LIMIT).unwrap();
            drop(far);
            assert_eq!(listeners(), (4 * round, 4 * round));
        }
        accepting.close(LIMIT).unwrap();
    });
}

/// A listener that is closed under its accept ends the simulated plugin's process: this one stays. An accept
/// that has not begun when its lane is given up is none, so it may take several peers until one is met.
#[test]
fn a_listener_whose_accept_is_unfinished_is_left_open_and_reported_once() {
    case!("stats=on,fault_call=connect,call_fault=hang").passes(|| {
        let lines = Lines::collect();
        let reported = || lines.with("listener stays open until this process ends: the accept has not ended");
        let end = || builder().channels(1).plugin(plugin().setup_timeout(Duration::from_secs(1)));
        for _ in 0..10 {
            let (accepting, connecting) = (loopback(end()).build().unwrap(), end().build().unwrap());
            let error = connecting.connect(accepting.listen_addresses()[0], LIMIT).unwrap_err();
            assert!(error.to_string().contains("cannot be set up"), "{error}");
            accepting.close(LIMIT).unwrap();
            connecting.close(LIMIT).unwrap();
            // The threads that wait in accept give up by themselves.
            while listeners().0 != listeners().1 + reported().len() as u64 {
                std::thread::sleep(Duration::from_millis(5));
            }
            if !reported().is_empty() {
                break;
            }
        }
        assert!((1..=2).contains(&reported().len()), "one line for each end's: {:?}", reported());
        assert!(reported().iter().all(|line| line.contains("WARN") && line.contains("GPUDirectTCPX_v7")));
    });
}

/// They stayed open, with their sockets, one more for each reconnection that failed.
#[test]
fn connections_of_an_abandoned_attempt_are_closed() {
    let wait = "NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS";
    case!("stats=on").with(wait, "3000000").passes(|| {
        let end = || builder().channels(2).plugin(plugin().setup_timeout(Duration::from_secs(2)));
        let (accepting, connecting) = (loopback(end()).build().unwrap(), end().build().unwrap());
        let before = descriptors();
        // On a busy machine an attempt may be given up before its accept has begun.
        let (mut given_up, mut attempts) = (0, 0);
        while given_up < 3 {
            let error = connecting.connect(accepting.listen_addresses()[0], LIMIT).unwrap_err().to_string();
            assert!(error.contains("after 2 s"), "{error}");
            given_up += usize::from(error.contains("accept has not ended after 2 s"));
            attempts += 1;
            assert!(attempts < 30, "{error}");
        }
        let began = Instant::now();
        while descriptors() > before || listeners().0 != listeners().1 {
            let (open, listeners) = (descriptors(), listeners());
            assert!(began.elapsed() < LIMIT, "{open} descriptors, {before} before; listeners: {listeners:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
        drop((accepting, connecting));
    });
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn a_listener_whose_accept_failed_is_closed() {
    case!("stats=on,fault_call=accept,call_fault=error").passes(|| {
        let lines = Lines::collect();
        let accepting = loopback(builder().channels(1)).build().unwrap();
        let connecting = builder().channels(1).build().unwrap();
        connecting.connect(accepting.listen_addresses()[0], LIMIT).unwrap_err();
        accepting.close(LIMIT).unwrap();
        connecting.close(LIMIT).unwrap();
        assert_eq!(lines.with("stays open"), [""; 0]);
        while listeners().0 != listeners().1 {
            std::thread::sleep(Duration::from_millis(5));
        }
    });
}
