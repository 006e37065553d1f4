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
        let posted = near.post(near.op(task, pieces, Some(region.memory().clone())));
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
        let posted = near.post(near.op(Task::Write { region: 7 }, pieces, Some(region.memory().clone())));
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
