//! Ends: of peers, of endpoints, with and without work under way.

use crate::load::Load;
use crate::sim::is_gone;
use crate::world::{Faulty, World, assert_same, contents, pattern};
use ferrywire::{ConnectError, Error, Peer, Region, Transfer, TransferError};
use ferrywire_net::sim::{ResetSeen, Side};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(300);
const SLOW_BYTES: usize = 350_000;

/// Closing waits for what was posted on both sides, and nothing of it is lost.
pub fn close_finishes_what_was_posted(world: &mut impl World) {
    let (near, far) = world.pair();
    let mut load = Load::default();
    load.post(world, [(0, &near), (1, &far)], 2, world.bytes_max() / 4);
    assert_eq!(world.blocking(|| near.close(LIMIT)), Ok(()));
    load.finish_well(world, [(0, &near), (1, &far)]);
    let error = world.until("the other side to know", || far.error());
    assert!(matches!(error, Error::PeerClosed { .. }), "{error}");
    assert_eq!(near.close(LIMIT), Ok(()), "closed already");
    assert!(is_gone(&near.notify(b"x").unwrap_err()));
}

pub fn both_sides_close_at_once(world: &mut impl World) {
    let (near, far) = world.pair();
    let mut load = Load::default();
    load.post(world, [(0, &near), (1, &far)], 2, world.bytes_max() / 4);
    let both = || {
        std::thread::scope(|scope| {
            let other = scope.spawn(|| far.close(LIMIT));
            (near.close(LIMIT), other.join().unwrap())
        })
    };
    assert_eq!(world.blocking_threads(both), (Ok(()), Ok(())));
    load.finish_well(world, [(0, &near), (1, &far)]);
}

/// A receive without a send, and a send without a receive, end with their peer.
pub fn close_ends_what_cannot_finish(world: &mut impl World) {
    let (near, far) = world.pair();
    let region = [world.patterned(0, 100_000, 1), world.patterned(1, 100_000, 1)];
    let sent = near.send(1, &region[0], 0, 100_000).unwrap();
    let received = [near.recv(7, &region[0], 0, 10).unwrap(), far.recv(7, &region[1], 0, 10).unwrap()];
    let closed = world.blocking(|| near.close(Duration::from_millis(300)));
    assert!(matches!(closed, Ok(()) | Err(Error::Stalled { .. })), "{closed:?}");
    for transfer in received.iter().chain([&sent]) {
        let error = world.outcome(transfer).unwrap_err();
        assert!(is_gone(&error), "{error}");
    }
}

/// Messages sent before the close can be received after it.
pub fn messages_outlive_their_sender(world: &mut impl World) {
    let (near, far) = world.pair();
    let source = match world.sends_eagerly(0) {
        true => world.patterned(0, 5000, 1),
        false => world.end(0).register(pattern(5000, 1)).unwrap(),
    };
    let sent = near.send(3, &source, 0, 5000).unwrap();
    let reported = near.notify(b"bye").unwrap();
    world.all_done(&[sent, reported]);
    drop(near);
    let error = world.until("the other side to know", || far.error());
    assert!(matches!(error, Error::PeerClosed { .. }), "{error}");
    assert_eq!(world.notification(&far), Ok(b"bye".to_vec()));
    let target = world.zeroed(1, 5000);
    let received = far.recv(3, &target, 0, 5000).unwrap();
    assert_eq!(world.outcome(&received), Ok(5000));
    assert_same(&contents(&target), &pattern(5000, 1), "a message received late");
    assert!(is_gone(&far.recv(3, &target, 0, 5000).unwrap_err()));
}

/// Dropping the last handle finishes what was posted.
pub fn dropped_peers_finish_first(world: &mut impl World) {
    let (near, far) = world.pair();
    let bytes = world.bytes_max();
    let (source, target) = (world.patterned(0, bytes, 1), world.zeroed(1, bytes));
    let write = near.write_notify(&source, 0, &target.descriptor(), 0, bytes as u64, b"all").unwrap();
    drop(near);
    assert_eq!(world.notification(&far), Ok(b"all".to_vec()));
    assert_same(&contents(&target), &pattern(bytes, 1), "a write of a dropped peer");
    assert_eq!(world.outcome(&write), Ok(bytes as u64));
    let error = world.until("the other side to know", || far.error());
    assert!(matches!(error, Error::PeerClosed { .. }), "{error}");
}

/// An endpoint that closes takes nothing with it that was posted.
pub fn endpoint_closed_with_work_under_way(world: &mut impl World) {
    let (near, far) = world.pair();
    let mut load = Load::default();
    load.post(world, [(0, &near), (1, &far)], 2, world.bytes_max() / 4);
    let end = world.end(0);
    assert_eq!(world.blocking(|| end.close(LIMIT)), Ok(()));
    load.finish_well(world, [(0, &near), (1, &far)]);
    assert!(matches!(end.start_connect(world.address(1)), Err(ConnectError::Closed)));
    assert_eq!(end.close(LIMIT), Ok(()));
}

/// Two peers, and a message of the first that the second never receives.
fn pair_with_a_message_under_way(world: &mut impl World) -> (Peer, Peer, Transfer) {
    let (near, far) = world.pair();
    let source = world.patterned(0, 100_000, 1);
    let sent = near.send(1, &source, 0, 100_000).unwrap();
    (near, far, sent)
}

/// Whether an error names the peer that was left behind, and says that not all was finished.
fn names_peer(closed: &Result<(), Error>, peer: &Peer) -> bool {
    let what = "before the transfers posted to it had finished";
    matches!(closed, Err(Error::PeerLost { peer: name, why, .. }) if *name == peer.name() && why.contains(what))
}

/// The other side has no time for what was posted here.
pub fn a_peer_that_leaves_before_the_end_is_reported_by_close(world: &mut impl World) {
    let (near, far, sent) = pair_with_a_message_under_way(world);
    let both = || {
        std::thread::scope(|scope| {
            let other = scope.spawn(|| far.close(SHORT));
            (near.close(LIMIT), other.join().unwrap())
        })
    };
    let (closed, theirs) = world.blocking_threads(both);
    assert!(matches!(theirs, Err(Error::Stalled { .. })), "{theirs:?}");
    assert!(names_peer(&closed, &near), "{closed:?}");
    let error = world.outcome(&sent).unwrap_err();
    assert!(matches!(error, TransferError::PeerClosed { .. }), "{error}");
    assert_eq!(near.close(LIMIT), closed, "closed already");
}

pub fn an_endpoint_reports_a_peer_that_left_before_the_end(world: &mut impl World) {
    let (near, far, _sent) = pair_with_a_message_under_way(world);
    let end = world.end(0);
    let both = || {
        std::thread::scope(|scope| {
            let closing = scope.spawn(|| end.close(LIMIT));
            closes(&near);
            (far.close(SHORT), closing.join().unwrap())
        })
    };
    let (theirs, closed) = world.blocking_threads(both);
    assert!(matches!(theirs, Err(Error::Stalled { .. })), "{theirs:?}");
    assert!(names_peer(&closed, &near), "{closed:?}");
    assert_eq!(end.close(LIMIT), closed, "closed already");
}

/// Waits until the peer is being closed.
fn closes(peer: &Peer) {
    while peer.notify(b"x").err() != Some(TransferError::Closed) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Of two closes of one peer the shorter timeout ends both, and the peer receives the Goodbye.
pub fn the_earliest_timeout_of_a_close_counts(world: &mut impl World) {
    let (near, far, sent) = pair_with_a_message_under_way(world);
    let end = world.end(0);
    let both = || {
        std::thread::scope(|scope| {
            let patient = scope.spawn(|| near.close(Duration::from_secs(60)));
            closes(&near);
            (end.close(SHORT), patient.join().unwrap())
        })
    };
    let (hasty, patient) = world.blocking_threads(both);
    assert!(matches!(hasty, Err(Error::Stalled { .. })), "{hasty:?}");
    assert!(matches!(patient, Err(Error::Stalled { .. })), "{patient:?}");
    assert_eq!(world.outcome(&sent), Err(TransferError::Closed));
    let error = world.until("the other side to know", || far.error());
    assert!(matches!(error, Error::PeerClosed { .. }), "{error}");
}

/// A peer that dies while the endpoint waits for it takes what was posted with it.
pub fn an_endpoint_reports_a_peer_that_is_killed_while_it_closes(world: &mut impl Faulty) {
    let (near, far, sent) = pair_with_a_message_under_way(world);
    let (end, net) = (world.end(0), world.net());
    let killed = || {
        std::thread::scope(|scope| {
            let closing = scope.spawn(|| end.close(Duration::from_secs(60)));
            closes(&near);
            net.kill("host1");
            closing.join().unwrap()
        })
    };
    let closed = world.blocking_threads(killed);
    let lost = near.error().unwrap();
    assert!(matches!(&lost, Error::PeerLost { peer, .. } if *peer == near.name()), "{lost}");
    assert_eq!((closed, world.outcome(&sent)), (Err(lost.clone()), Err(lost.into())));
    drop(far);
    world.kill(1);
}

/// Regression: a closing endpoint listened no more, so the end that dials could not replace what was lost meanwhile.
pub fn what_is_lost_while_an_endpoint_closes_is_dialled_again(world: &mut impl Faulty) {
    let (near, far) = world.pair();
    // The answers to the new connections come behind what the old ones had sent.
    world.net().set_bandwidth(world.nic(1, 0), Some(3 * SLOW_BYTES as u64));
    let (source, target) = (world.patterned(1, SLOW_BYTES, 1), world.zeroed(0, SLOW_BYTES));
    let write = far.write(&source, 0, &target.descriptor(), 0, SLOW_BYTES as u64).unwrap();
    let (end, net, nic) = (world.end(1), world.net(), world.nic(1, 0));
    let broken = || {
        std::thread::scope(|scope| {
            let closing = scope.spawn(|| end.close(LIMIT));
            closes(&far);
            net.reset_nic(nic, ResetSeen::AtOnce);
            closing.join().unwrap()
        })
    };
    assert_eq!(world.blocking_threads(broken), Ok(()));
    assert_eq!(world.outcome(&write), Ok(SLOW_BYTES as u64));
    assert_same(&contents(&target), &pattern(SLOW_BYTES, 1), "a write whose channels were lost");
    drop(near);
}

/// Two endpoints whose NICs take many seconds for what [`slowly`] posts.
fn slow_pair(world: &mut impl Faulty) -> (Peer, Peer) {
    let pair = world.pair();
    slow_down(world);
    pair
}

fn slow_down(world: &mut impl Faulty) {
    for end in [0, 1] {
        let nic = world.nic(end, 0);
        world.net().set_bandwidth(nic, Some(SLOW_BYTES as u64 / 7));
    }
}

/// A write and a read, each of them longer under way than a dropped peer may stand still; and what has to be there.
fn slowly(world: &mut impl World, near: &Peer) -> [(Transfer, Region); 2] {
    let len = SLOW_BYTES as u64;
    let (source, target) = (world.patterned(0, SLOW_BYTES, 1), world.zeroed(1, SLOW_BYTES));
    let write = near.write(&source, 0, &target.descriptor(), 0, len).unwrap();
    let (remote, local) = (world.patterned(1, SLOW_BYTES, 1), world.zeroed(0, SLOW_BYTES));
    let read = near.read(&local, 0, &remote.descriptor(), 0, len).unwrap();
    // They are read from until the end.
    std::mem::forget((source, remote));
    [(write, target), (read, local)]
}

fn all_there(world: &mut impl World, posted: [(Transfer, Region); 2]) {
    for (transfer, target) in posted {
        assert_eq!(world.outcome(&transfer), Ok(SLOW_BYTES as u64));
        assert_same(&contents(&target), &pattern(SLOW_BYTES, 1), "what was posted before a drop");
    }
}

/// Transfers posted to a dropped peer may take as long as they need.
pub fn dropped_peers_may_be_slow(world: &mut impl Faulty) {
    let (near, far) = slow_pair(world);
    let posted = slowly(world, &near);
    let since = world.net().now();
    drop(near);
    all_there(world, posted);
    let took = world.net().now() - since;
    assert!(took > Duration::from_secs(6), "{took:?} are no test of it");
    let error = world.until("the other side to know", || far.error());
    assert!(matches!(error, Error::PeerClosed { .. }), "{error}");
}

/// Nor is it while not one chunk of it is whole.
pub fn what_is_slower_than_a_chunk_is_not_given_up(world: &mut impl Faulty) {
    let ends = [0, 1].map(|_| world.add(1, |builder| builder.channels(1).chunk_bytes(SLOW_BYTES)));
    let (near, far) = world.connect(ends[0], ends[1]);
    slow_down(world);
    let [(write, target), (read, local)] = slowly(world, &near);
    // The longest time without progress.
    assert_eq!(world.blocking(|| write.wait(Duration::from_secs(4))), Ok(SLOW_BYTES as u64));
    all_there(world, [(write, target), (read, local)]);
    let posted = slowly(world, &near);
    drop(near);
    all_there(world, posted);
    let error = world.until("the other side to know", || far.error());
    assert!(matches!(error, Error::PeerClosed { .. }), "{error}");
}

/// But what is begun anew with each connection, and never whole, does not get on.
pub fn parts_that_are_lost_again_and_again_are_no_progress(world: &mut impl Faulty) {
    let ends = [0, 1].map(|_| world.add(1, |builder| builder.channels(1).chunk_bytes(SLOW_BYTES)));
    let (near, far) = world.connect(ends[0], ends[1]);
    slow_down(world);
    let (source, target) = (world.patterned(0, SLOW_BYTES, 1), world.zeroed(1, SLOW_BYTES));
    let write = near.write(&source, 0, &target.descriptor(), 0, SLOW_BYTES as u64).unwrap();
    let mut activity = Vec::new();
    for _ in 0..5 {
        world.pass(Duration::from_secs(2));
        activity.push(write.progress_counter());
        for conn in world.net().connections().into_iter().filter(|conn| conn.bulk) {
            world.net().reset(conn.id, Side::Dialler, ResetSeen::AtOnce);
        }
    }
    assert_eq!(write.poll(), None);
    assert!(near.stats().lost_channels.len() > 1 && activity[0] > 0, "{activity:?}");
    assert!(activity[1..].iter().all(|seen| *seen == activity[1]), "{activity:?}");
    // A whole one is.
    assert_eq!(world.outcome(&write), Ok(SLOW_BYTES as u64));
    assert!(write.progress_counter() > activity[1]);
    drop(far);
}

/// And what does not get on keeps it no longer, whatever the other side goes on posting.
pub fn dropped_peers_do_not_wait_for_what_stands_still(world: &mut impl Faulty) {
    let (near, far) = world.pair();
    let (source, target) = (world.patterned(1, 100_000, 1), world.zeroed(0, 100_000));
    let sent = near.send(1, &target, 0, 100_000).unwrap();
    let since = world.net().now();
    drop(near);
    let error = loop {
        let write = far.write(&source, 0, &target.descriptor(), 0, 100_000);
        if let Err(error) = write.and_then(|write| world.outcome(&write)) {
            break error;
        }
        world.pass(Duration::from_millis(100));
        let took = world.net().now() - since;
        assert!(took < Duration::from_secs(8), "{took:?}");
    };
    assert!(matches!(error, TransferError::PeerClosed { .. }), "{error}");
    assert!(is_gone(&world.outcome(&sent).unwrap_err()));
}

/// Dropping the endpoint waits for what was posted, however slow that is.
pub fn dropped_endpoints_finish_first(world: &mut impl Faulty) {
    let (near, _far) = slow_pair(world);
    let posted = slowly(world, &near);
    drop(near);
    world.drop_end(0);
    all_there(world, posted);
}
