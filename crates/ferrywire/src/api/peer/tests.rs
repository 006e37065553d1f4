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
    assert!(!near.state().in_deep_bulk() && !far.state().in_deep_bulk());
}

/// Two connected endpoints, their peers, and 4 MiB of the first one's memory.
fn connected() -> (crate::Endpoint, crate::Endpoint, Peer, Peer, Region) {
    let listen = "127.0.0.1:0".parse().unwrap();
    let accepting = crate::Endpoint::builder().threads(1).channels(1).listen(listen).build().unwrap();
    let connecting = crate::Endpoint::builder().threads(1).channels(1).build().unwrap();
    let near = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
    let far = accepting.accept(LONG).unwrap();
    let memory = connecting.alloc_host(4 << 20).unwrap();
    (connecting, accepting, near, far, memory)
}

/// Regression: threads and the waiting caller took turns: bulk ended whenever operations ended, and began again with the next
/// posts. Eight writes of 64 KiB in flight went at 3.3 instead of 8.5 GB/s.
#[test]
fn bulk_ends_where_a_caller_waits_for_few_bytes() {
    const BYTES: u64 = 64 << 10;
    let (_connecting, _accepting, near, _far, memory) = connected();
    let state = near.state();
    let receive = |place: u64| near.recv(1, &memory, place * BYTES, BYTES).unwrap();
    let mut receives: Vec<_> = (0..7).map(receive).collect();
    assert!(!state.in_bulk());
    receives.push(receive(7));
    assert!(state.in_bulk());
    let mut end = |left: usize| receives.drain(left..).for_each(|receive| receive.cancel());
    end(4);
    state.end_bulk();
    assert!(state.in_bulk(), "a caller waits for 256 KiB");
    end(0);
    assert!(state.in_bulk(), "operations have ended, and their caller may post the next ones");
    let waits = near.recv(1, &memory, 0, BYTES).unwrap();
    assert!(waits.wait(Duration::from_millis(1)).is_err() && !state.in_bulk(), "a caller waits for 64 KiB");
}

/// Regression: threads moved a transfer of 1 MiB while its caller waited: on two cores 155 us instead of 93.
#[test]
fn a_transfer_alone_is_no_bulk_up_to_the_length_of_a_chunk() {
    let (_connecting, accepting, near, _far, memory) = connected();
    let state = near.state();
    let begins_bulk = |bytes: u64| {
        let receive = near.recv(1, &memory, 0, bytes).unwrap();
        let is_bulk = state.in_bulk();
        state.end_bulk();
        assert_eq!(state.in_bulk(), is_bulk, "a wait for the same bytes changes nothing");
        receive.cancel();
        state.end_bulk();
        is_bulk
    };
    assert_eq!([2 << 20, (2 << 20) + 1].map(begins_bulk), [false, true]);
    let beside = near.recv(2, &memory, 3 << 20, 8).unwrap();
    assert!(begins_bulk(1 << 20), "another operation is in flight");
    beside.cancel();
    assert!(!begins_bulk(1 << 20));
    // Several threads copy for a GPU, at either end.
    let there = accepting.alloc_sim(2, 64).unwrap();
    near.write(&memory, 0, &there.descriptor(), 0, 64).unwrap().wait(LONG).unwrap();
    assert!(begins_bulk(1 << 20) && !begins_bulk(511 << 10));
    let (connecting, _accepting, near, _far, _memory) = connected();
    let here = connecting.alloc_sim(2, 1 << 20).unwrap();
    let _receive = near.recv(1, &here, 0, 1 << 20).unwrap();
    assert!(near.state().in_bulk());
    // Threads use several NICs at once.
    let (_connecting, _accepting, near, _far, memory) = connected();
    near.state().route.make_far();
    let _receive = near.recv(1, &memory, 0, 1 << 20).unwrap();
    assert!(near.state().in_bulk());
}

/// Regression: the first channels of all peers, which carry what is in order, belonged to one worker.
#[test]
fn peers_begin_with_different_workers_on_which_both_ends_agree() {
    let builder = || crate::Endpoint::builder().threads(4).channels(4);
    let accepting = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let connecting = builder().build().unwrap();
    let connect = || {
        let near = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
        (near, accepting.accept(LONG).unwrap())
    };
    let pairs: Vec<_> = (0..16).map(|_| connect()).collect();
    let workers = |peer: &Peer| [0, 1, 2, 3].map(|channel| peer.state().engine_worker(channel));
    let first: std::collections::BTreeSet<_> = pairs.iter().map(|(near, _)| workers(near)[0]).collect();
    assert!(first.len() > 1, "all 16 peers begin with worker {first:?}");
    for (near, far) in &pairs {
        let [first, ..] = workers(near);
        assert_eq!(workers(near), [0, 1, 2, 3].map(|channel| (first + channel) % 4));
        assert_eq!(workers(near), workers(far));
    }
}

#[test]
fn the_last_of_several_transfers_stays_with_the_threads_that_move_it() {
    let (_connecting, _accepting, near, _far, memory) = connected();
    let state = near.state();
    let receive = |place: u64| near.recv(1, &memory, place << 20, 1 << 20).unwrap();
    let (first, last) = (receive(0), receive(1));
    first.cancel();
    state.end_bulk();
    assert!(state.in_bulk());
    last.cancel();
    // A transfer that begins alone is its caller's, even if bulk has not ended before.
    let _alone = receive(2);
    assert!(state.in_bulk());
    state.end_bulk();
    assert!(!state.in_bulk());
}

/// The channels of all peers share the workers, so a caller that moved 1 MiB to each of many would do all of it alone.
#[test]
fn a_transfer_is_not_alone_beside_a_long_one_of_another_peer() {
    let (connecting, accepting, near, _far, memory) = connected();
    let other = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
    let receive = |peer: &Peer, bytes: u64| peer.recv(1, &memory, 0, bytes).unwrap();
    let (long, second) = (receive(&near, 1 << 20), receive(&other, 1 << 20));
    assert!(!near.state().in_bulk() && other.state().in_bulk());
    long.cancel();
    other.state().end_bulk();
    assert!(other.state().in_bulk(), "the threads have begun to move it");
    second.cancel();
    other.state().end_bulk();
    let _short = receive(&near, 511 << 10);
    let _alone = receive(&other, 1 << 20);
    assert!(!near.state().in_bulk() && !other.state().in_bulk());
}

/// Regression: what is posted after bulk, with nothing else in flight, waited until a thread had been woken for it.
#[test]
fn a_small_operation_alone_is_sent_by_its_poster_also_after_bulk() {
    let (_connecting, _accepting, near, _far, memory) = connected();
    let until = Instant::now() + LONG;
    near.recv(1, &memory, 0, 4 << 20).unwrap().cancel();
    // The thread may hold the engine while it looks for work.
    while Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
        assert!(near.state().in_bulk());
        let queue = &near.state().queue;
        let before = queue.locks.load(Ordering::SeqCst);
        let notified = near.notify(b"at once").unwrap();
        // A thread that took the operation would have locked the queue once more.
        if queue.waiting() == 0 && queue.locks.load(Ordering::SeqCst) == before + 1 {
            return;
        }
        while notified.poll().is_none() && Instant::now() < until {
            std::thread::yield_now();
        }
    }
    panic!("no post has sent its operation");
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
