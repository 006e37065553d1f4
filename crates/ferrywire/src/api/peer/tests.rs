use super::*;
use std::cell::Cell;

use ferrywire_proto::operation::{Piece, Pieces};

const LONG: Duration = Duration::from_secs(60);

/// Regression: a close that raced with a post found nothing in flight, and failed at once as timed out.
#[test]
fn a_post_that_races_with_a_close_is_refused() {
    let builder = || crate::Endpoint::builder().channels(1);
    let accepting = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let connecting = builder().build().unwrap();
    let near = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
    let region = connecting.alloc_host(64).unwrap();
    near.state().life.closing.store(true, Ordering::SeqCst);
    for task in [Task::read(7), Task::Write { region: 7 }] {
        let pieces = Pieces::One(Piece { local: 0, remote: 0, len: 64 });
        let posted = near.post(near.op(task, pieces, Some(region.memory().clone())), false);
        assert_eq!(posted.unwrap_err(), Error::Closed);
    }
    assert!(!near.state().in_flight() && !near.state().in_bulk());
    assert_eq!(near.close(LONG), Ok(()));
}

/// Regression: they counted as completed.
#[test]
fn refused_posts_count_as_failed() {
    use ferrywire_metrics::Source;
    for closes_queue in [false, true] {
        let builder = || crate::Endpoint::builder().channels(1);
        let accepting = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        let connecting = builder().build().unwrap();
        let near = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
        let region = connecting.alloc_host(64).unwrap();
        let state = near.state();
        match closes_queue {
            true => drop(state.queue.close()),
            false => state.life.closing.store(true, Ordering::SeqCst),
        }
        let pieces = Pieces::One(Piece { local: 0, remote: 0, len: 64 });
        let write = near.op(Task::Write { region: 7 }, pieces, Some(region.memory().clone()));
        let posted = near.post(write, false);
        assert_eq!(posted.unwrap_err(), Error::Closed);
        let kinds = state.sample().operations;
        let counts: Vec<_> = kinds.iter().map(|kind| (kind.started, kind.completed, kind.failed)).collect();
        assert_eq!(counts, [(1, 0, 1)], "{closes_queue}");
    }
}

/// If the receive counted as deep bulk, threads would sleep while it waits, and each message would have to
/// wake them.
#[test]
fn an_unmatched_receive_is_no_deep_bulk() {
    const BYTES: usize = 16 << 20;
    let accepting =
        crate::Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).channels(2).build().unwrap();
    let connecting = crate::Endpoint::builder().channels(2).build().unwrap();
    let near = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
    let far = accepting.accept(LONG).unwrap();
    let (source, target) = (connecting.alloc_host(BYTES).unwrap(), accepting.alloc_host(BYTES).unwrap());
    let received = far.recv(1, &target, 0, BYTES as u64).unwrap();
    assert!(far.state().in_bulk() && far.state().is_deep_bulk(BYTES as u64));
    assert!(!far.state().in_deep_bulk(), "nothing is in flight");
    let sent = near.send(1, &source, 0, BYTES as u64).unwrap();
    sent.wait(LONG).unwrap();
    received.wait(LONG).unwrap();
    assert!(!near.state().in_deep_bulk() && !far.state().in_bulk());
}

/// Regression: when a notification arrived and its peer was lost between two checks, the waiter received only
/// the loss.
#[test]
fn a_notification_that_arrives_while_its_peer_is_lost_goes_before_the_error() {
    let (arrived, lost) = (Cell::new(0), Cell::new(false));
    // After the first check of a call, whatever that checks, a notification arrives and the peer is lost.
    let looks = Cell::new(0);
    let meanwhile = || {
        looks.set(looks.get() + 1);
        if looks.get() == 1 {
            arrived.set(1);
            lost.set(true);
        }
    };
    let take = || {
        let taken = (arrived.get() > 0).then(|| arrived.replace(0));
        meanwhile();
        taken
    };
    let error = || {
        let error = lost.get().then_some(Error::Closed);
        meanwhile();
        error
    };
    let outcomes: Vec<_> = (0..3).filter_map(|_| arrived_or_lost(take, error)).collect();
    assert_eq!(outcomes[..2], [Ok(1), Err(Error::Closed)]);
}

/// Regression: operations of 8 and 16 KiB that an end copies to or from a GPU went one by one.
#[test]
fn short_operations_that_a_gpu_takes_part_in_wait_for_others_in_flight() {
    const BYTES: u64 = 16 << 10;
    const COUNT: u64 = 6;
    let listen = "127.0.0.1:0".parse().unwrap();
    let builder = || crate::Endpoint::builder().threads(1).channels(1);
    let accepting = builder().listen(listen).build().unwrap();
    let connecting = builder().build().unwrap();
    let near = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
    let far = accepting.accept(LONG).unwrap();
    let here = [connecting.alloc_host(1 << 20).unwrap(), connecting.alloc_sim(2, 1 << 20).unwrap()];
    let there = [accepting.alloc_host(1 << 20).unwrap(), accepting.alloc_sim(2, 1 << 20).unwrap()];
    // Whether all but the first, which goes at once, stay queued. Now and then a thread sends some.
    let are_queued = |post: &dyn Fn() -> Transfer, receive: Option<&dyn Fn() -> Transfer>| {
        let (until, mut in_a_row) = (Instant::now() + LONG, 0);
        while in_a_row < 5 && Instant::now() < until {
            // A caller that waits makes the thread leave the polling to callers.
            near.write(&here[0], 0, &there[0].descriptor(), 0, 8).unwrap().wait(LONG).unwrap();
            let received: Vec<_> =
                receive.into_iter().flat_map(|receive| (0..COUNT).map(|_| receive())).collect();
            let posted: Vec<_> = (0..COUNT).map(|_| post()).collect();
            in_a_row = if near.state().queue.waiting() as u64 >= COUNT - 1 { in_a_row + 1 } else { 0 };
            posted.iter().chain(&received).for_each(|each| assert_eq!(each.wait(LONG), Ok(BYTES)));
        }
        in_a_row == 5
    };
    for (host, gpu) in [(0, 1), (1, 0), (1, 1)] {
        let target = there[gpu].descriptor();
        let write = || near.write(&here[host], 0, &target, 0, BYTES).unwrap();
        assert!(are_queued(&write, None), "write from {host} to {gpu}");
        let read = || near.read(&here[host], 0, &target, 0, BYTES).unwrap();
        assert!(are_queued(&read, None), "read to {host} from {gpu}");
    }
    let send = || near.send(1, &here[1], 0, BYTES).unwrap();
    let receive = || far.recv(1, &there[0], 0, BYTES).unwrap();
    assert!(are_queued(&send, Some(&receive)), "send");
}
