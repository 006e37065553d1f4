//! Connections, NICs, hosts and bytes that break while something is under way.

use crate::load::Load;
use crate::sim::is_gone;
use crate::world::{Faulty, assert_same, contents, pattern};
use ferrywire::limits;
use ferrywire::{Block, BlockList, Encryption, Error, Peer, Region, Transfer, TransferError};
use ferrywire_net::sim::{ConnInfo, DialFault, Faults, ResetSeen, Side};
use std::time::Duration;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Longest time until the loss of a peer is reported: the default peer timeout.
const LOST_WITHIN: Duration = Duration::from_secs(10);
/// Shortest silence after which a peer is reported as lost.
const NOT_LOST_WITHIN: Duration = Duration::from_secs(8);
const BYTES: usize = 200_000;

/// Two endpoints with so many NICs each, slow enough that a load takes a while.
fn slow_pair<W: Faulty>(world: &mut W, nics: usize) -> (Peer, Peer) {
    let ends = [0, 1].map(|_| world.add(nics, |builder| builder.channels(4).chunk_bytes(8192)));
    let pair = world.connect(ends[0], ends[1]);
    for end in ends {
        for nic in 0..nics {
            let address = world.nic(end, nic);
            world.net().set_bandwidth(address, Some(20_000_000));
        }
    }
    pair
}

fn started<W: Faulty>(world: &mut W, ends: [(usize, &Peer); 2]) -> Load {
    let mut load = Load::default();
    load.post(world, ends, 3, BYTES);
    let enough = world.below(BYTES) as u64;
    world.until("some bytes", || (load.moved() >= enough).then_some(()));
    load
}

/// A write that is under way for a while, and what it leaves behind.
fn long_write<W: Faulty>(world: &mut W, peer: &Peer) -> (Transfer, ferrywire::Region) {
    let (source, target) = (world.patterned(0, 1 << 20, 77), world.zeroed(1, 1 << 20));
    let write = peer.write_notify(&source, 0, &target.descriptor(), 0, 1 << 20, b"done").unwrap();
    (write, target)
}

fn finish_long_write<W: Faulty>(world: &mut W, (write, target): (Transfer, ferrywire::Region), far: &Peer) {
    assert_eq!(world.notification(far), Ok(b"done".to_vec()));
    assert_same(&contents(&target), &pattern(1 << 20, 77), "a write whose channels were lost");
    assert_eq!(world.outcome(&write), Ok(1 << 20));
    world.pass(ms(200));
    assert_eq!(far.poll_notification(), Ok(None), "notified twice");
}

pub fn channels_reset_one_by_one<W: Faulty>(world: &mut W) {
    let (near, far) = slow_pair(world, 2);
    let (load, net) = (started(world, [(0, &near), (1, &far)]), world.net());
    for _ in 0..6 {
        let open: Vec<_> = net.connections().into_iter().filter(|conn| conn.bulk).collect();
        if !open.is_empty() {
            let victim = &open[world.below(open.len())];
            let first = [Side::Dialler, Side::Acceptor][world.below(2)];
            let later = ResetSeen::OtherEndAfter(ms(world.below(30) as u64));
            let seen = [ResetSeen::AtOnce, later][world.below(2)];
            net.reset(victim.id, first, seen);
        }
        let pause = ms(world.below(10) as u64);
        world.pass(pause);
    }
    load.finish_well(world, [(0, &near), (1, &far)]);
    assert!(near.stats().lost_channels.len() + far.stats().lost_channels.len() > 0);
}

pub fn all_channels_reset_at_once<W: Faulty>(world: &mut W) {
    let (near, far) = slow_pair(world, 2);
    let write = long_write(world, &near);
    let load = started(world, [(0, &near), (1, &far)]);
    // Half of it does not fit into the network.
    let under_way = write.0.bytes_moved() < 1 << 19;
    let with_control = world.below(2) == 0;
    for conn in world.net().connections() {
        if conn.bulk || with_control {
            world.net().reset(conn.id, Side::Dialler, ResetSeen::AtOnce);
        }
    }
    finish_long_write_with(world, write, &near, &far, load);
    assert!(near.stats().resent_chunks > 0 || !under_way);
}

/// Ends a load that shares its notifications with a long write.
fn finish_long_write_with<W: Faulty>(
    world: &mut W,
    (write, target): (Transfer, ferrywire::Region),
    near: &Peer,
    far: &Peer,
    load: Load,
) {
    assert_eq!(world.outcome(&write), Ok(1 << 20));
    assert_same(&contents(&target), &pattern(1 << 20, 77), "a write whose channels were lost");
    load.expecting(far, b"done").finish_well(world, [(0, near), (1, far)]);
}

fn cut_and_heal<W: Faulty>(world: &mut W, nics: usize) {
    let (near, far) = slow_pair(world, nics);
    let (load, net) = (started(world, [(0, &near), (1, &far)]), world.net());
    // The first NIC carries the control session too.
    let (end, nic) = (world.below(2), world.below(nics));
    net.cut(world.nic(end, nic));
    load.finish_well(world, [(0, &near), (1, &far)]);
    let name = format!("eth{nic} ");
    let peer = [&near, &far][end];
    // A path is found dead by what waits for it: goes on until that NIC has had its share.
    let lost = |peer: &Peer| peer.stats().lost_channels.iter().any(|line| line.contains(&name));
    goes_on_until(world, [&near, &far], || lost(peer));

    // Several attempts to dial over that NIC fail.
    world.pass(3 * limits::DIAL_TIMEOUT);
    net.heal(world.nic(end, nic));
    world.until("all channels to be back", || {
        let up = |peer: &Peer| peer.stats().channels.iter().all(|channel| channel.alive);
        (up(&near) && up(&far)).then_some(())
    });
    // Attempts to dial over the NIC while it was cut do not count.
    for index in [0, 1] {
        let endpoint = world.end(index).identity().to_string();
        let peers = ferrywire::metrics::process().peers;
        let sample = peers.iter().find(|peer| peer.endpoint == endpoint).expect("the peer of this endpoint");
        let reconnects: u64 = sample.channels.iter().map(|channel| channel.reconnects).sum();
        assert_eq!(reconnects, sample.lost_channels, "{sample:?}");
    }
    let carried = |peer: &Peer| {
        let channels = peer.stats().channels.into_iter().filter(|channel| name.trim() == channel.nic);
        channels.map(|channel| channel.sent_bytes + channel.received_bytes).sum::<u64>()
    };
    let before = carried(peer);
    goes_on_until(world, [&near, &far], || carried(peer) > before + 10_000);
}

/// Loads both ways, all of which end well, until something has come about.
fn goes_on_until<W: Faulty>(world: &mut W, [near, far]: [&Peer; 2], done: impl Fn() -> bool) {
    for _ in 0..20 {
        let mut load = Load::default();
        load.post(world, [(0, near), (1, far)], 3, BYTES);
        load.finish_well(world, [(0, near), (1, far)]);
        if done() {
            return;
        }
    }
    panic!("it never came about: {:?}, {:?}", near.stats(), far.stats());
}

pub fn one_of_two_nics_cut_and_healed<W: Faulty>(world: &mut W) {
    cut_and_heal(world, 2);
}

pub fn one_of_four_nics_cut_and_healed<W: Faulty>(world: &mut W) {
    cut_and_heal(world, 4);
}

/// The message that a peer closes finds another way where its own dies just before; the other end used to report a loss.
pub fn a_farewell_takes_another_nic<W: Faulty>(world: &mut W) {
    let ends = [0, 1].map(|_| world.add(2, |builder| builder));
    let (near, far) = world.connect(ends[0], ends[1]);
    world.net().set_latency(Duration::from_millis(10));
    let (leaves, stays) = if world.below(2) == 0 { (near, far) } else { (far, near) };
    drop(leaves);
    let moment = Duration::from_micros(world.below(60_000) as u64);
    world.pass(moment);
    let (end, net) = (world.below(2), world.net());
    net.cut(world.nic(end, 0));
    let error = world.until("the other end to know", || stays.error());
    assert!(matches!(error, Error::PeerClosed { .. }), "{error}");
}

/// Each attempt used to follow the last one at once, for as long as the peer was connected.
pub fn a_path_that_leads_nowhere_is_dialled_less_and_less<W: Faulty>(world: &mut W) {
    let ends = [0, 1].map(|_| world.add(3, |builder| builder.channels(3)));
    let (near, far) = world.connect(ends[0], ends[1]);
    let (net, cut) = (world.net(), world.nic(1, 1));
    net.cut(cut);
    goes_on_until(world, [&near, &far], || !near.stats().lost_channels.is_empty());
    let failed = |peer: &Peer| peer.stats().failed_dials;
    let period = 4 * limits::REDIAL_INTERVAL_MAX;
    world.pass(period);
    let before = failed(&near);
    world.pass(period);
    let more = failed(&near) - before;
    assert!((1..=4).contains(&more), "{more} more attempts after {before}");
    // The next attempt is far away, except where the NICs of this host change.
    world.until("another attempt", || (failed(&near) > before + more).then_some(()));
    let is_up =
        |peer: &Peer| peer.stats().channels.iter().any(|channel| channel.alive && channel.nic == "eth1");
    net.heal(cut);
    world.pass(limits::REDIAL_INTERVAL_MAX / 4);
    assert!(!is_up(&near));
    net.delete(world.nic(0, 2));
    world.pass(limits::REDIAL_INTERVAL_MAX / 4);
    assert!(is_up(&near), "{:?}", near.stats());
    assert_eq!(failed(&far), 0, "only the end that connects dials");
}

/// Regression: the only channel kept to its path, so its transfers waited without end although other NICs led to the peer.
pub fn the_only_channel_leaves_the_path_of_a_deleted_nic<W: Faulty>(world: &mut W) {
    let ends = [0, 1].map(|_| world.add(3, |builder| builder.channels(1).chunk_bytes(8192)));
    let (near, far) = world.connect(ends[0], ends[1]);
    let write = long_write(world, &near);
    let net = world.net();
    let channel = net.connections().into_iter().find(|conn| conn.bulk).expect("the channel is up");
    net.delete([channel.dialler, channel.acceptor][world.below(2)].ip());
    finish_long_write(world, write, &far);
    let lost = near.stats().lost_channels.len();
    world.pass(3 * limits::REDIAL_INTERVAL_MAX);
    assert_eq!(near.stats().lost_channels.len(), lost, "the only channel stays where it is");
}

/// Regression: each loss began the round of paths anew, so that the third path was never tried.
pub fn the_only_channel_leaves_a_path_that_it_comes_up_on_and_loses<W: Faulty>(world: &mut W) {
    let ends = [0, 1].map(|_| world.add(3, |builder| builder.channels(1).chunk_bytes(8192)));
    let (near, far) = world.connect(ends[0], ends[1]);
    let write = long_write(world, &near);
    let (net, control) = (world.net(), world.nic(0, 0));
    let channel = net.connections().into_iter().find(|conn| conn.bulk).expect("the channel is up");
    assert_ne!(channel.dialler.ip(), control);
    net.delete(channel.dialler.ip());
    let mut resets = 0;
    let moved = world.until("the write to end", || {
        let stats = near.stats();
        if stats.channels[0].alive && stats.channels[0].local.ip() == control {
            let of_channel = |conn: &ConnInfo| conn.dialler == stats.channels[0].local;
            let doomed = net.connections().into_iter().find(of_channel)?;
            net.reset(doomed.id, Side::Dialler, ResetSeen::AtOnce);
            resets += 1;
        }
        write.0.poll()
    });
    assert_eq!((moved, resets > 0), (Ok(1 << 20), true));
    finish_long_write(world, write, &far);
}

/// Regression: the connect failed after 5 s, because the only channel was dialled on its own path alone.
pub fn the_only_channel_is_set_up_over_another_path_than_its_silent_one<W: Faulty>(world: &mut W) {
    let ends = [0, 1].map(|_| world.add(3, |builder| builder.channels(1).chunk_bytes(8192)));
    // The peer is dialled at its first NIC, and the channel has the path of another one.
    for silent in [1, 2] {
        world.net().fail_dials(world.nic(ends[1], silent), DialFault::TimeOut, 20);
    }
    let (near, far) = world.connect(ends[0], ends[1]);
    assert_eq!(near.stats().channels[0].nic, "eth0");
    let write = long_write(world, &near);
    finish_long_write(world, write, &far);
}

/// Regression: the peer stayed connected without a channel, because each of its paths had lost a NIC at one end.
pub fn nics_deleted_at_both_ends_leave_the_path_of_the_control_session<W: Faulty>(world: &mut W) {
    let ends = [0, 1].map(|_| world.add(2, |builder| builder.channels(2).chunk_bytes(8192)));
    let (near, far) = world.connect(ends[0], ends[1]);
    let (write, net) = (long_write(world, &near), world.net());
    // The peer was dialled at its first NIC.
    net.delete(world.nic(0, 0));
    net.delete(world.nic(1, 1));
    finish_long_write(world, write, &far);
    assert_eq!((near.error(), far.error()), (None, None));
}

/// Regression: the only channel dialled its path alone, which did not answer for two minutes.
pub fn unanswered_dials_of_the_only_channel_cost_seconds<W: Faulty>(world: &mut W) {
    let ends = [0, 1].map(|_| world.add(2, |builder| builder.channels(1).chunk_bytes(8192)));
    let (near, far) = world.connect(ends[0], ends[1]);
    let (write, net) = (long_write(world, &near), world.net());
    let channel = net.connections().into_iter().find(|conn| conn.bulk).expect("the channel is up");
    net.fail_dials(channel.acceptor.ip(), DialFault::TimeOut, 20);
    net.reset(channel.id, Side::Dialler, ResetSeen::AtOnce);
    let since = net.now();
    finish_long_write(world, write, &far);
    let took = net.now() - since;
    assert!(took < 4 * limits::DIAL_TIMEOUT, "the write took {took:?}");
}

/// Regression: the first channel stayed on the path that it had taken while all of them were dead, so that its own NIC was
/// idle when it was back.
pub fn the_first_channel_goes_back_to_its_own_path<W: Faulty>(world: &mut W) {
    let ends = [0, 1].map(|_| world.add(3, |builder| builder.channels(2).chunk_bytes(8192)));
    let (near, far) = world.connect(ends[0], ends[1]);
    let (write, net) = (long_write(world, &near), world.net());
    // The first NIC has no channel of its own.
    for nic in [1, 2] {
        net.fail_dials(world.nic(1, nic), DialFault::TimeOut, 3);
    }
    for channel in net.connections().iter().filter(|conn| conn.bulk) {
        net.reset(channel.id, Side::Dialler, ResetSeen::AtOnce);
    }
    finish_long_write(world, write, &far);
    let nics = |near: &Peer| {
        near.stats().channels.iter().map(|channel| channel.nic.clone()).collect::<Vec<String>>()
    };
    assert_eq!(nics(&near)[0], "eth0", "the first channel has taken the other path");
    // The other channel is back soon, and has to last.
    world.pass(ms(10_000));
    assert_eq!(nics(&near)[0], "eth0");
    world.until("it to go back", || (nics(&near) == ["eth1", "eth2"]).then_some(()));
    let write = long_write(world, &near);
    finish_long_write(world, write, &far);
}

/// A NIC that is gone when its loss is noticed is named all the same, at both ends.
pub fn a_deleted_nic_is_named<W: Faulty>(world: &mut W) {
    let (near, far) = slow_pair(world, 2);
    let load = started(world, [(0, &near), (1, &far)]);
    let end = world.below(2);
    world.net().delete(world.nic(end, 1));
    load.finish_well(world, [(0, &near), (1, &far)]);
    for peer in [&near, &far] {
        world.until("the loss to be noticed", || (!peer.stats().lost_channels.is_empty()).then_some(()));
        let stats = peer.stats();
        let lost = &stats.lost_channels;
        assert!(lost.iter().all(|line| line.contains(" over eth1 (")), "{lost:?}");
        let named = stats.channels.iter().all(|channel| channel.nic == format!("eth{}", channel.index % 2));
        assert!(named, "{:?}", stats.channels);
    }
}

/// Only one direction of a NIC dies, in mid transfer or before it.
pub fn one_way_cut<W: Faulty>(world: &mut W) {
    let (near, far) = slow_pair(world, 2);
    let load = started(world, [(0, &near), (1, &far)]);
    let (end, nic) = (world.below(2), world.below(2));
    let address = world.nic(end, nic);
    match world.below(2) {
        0 => world.net().cut_outgoing(address),
        _ => world.net().cut_incoming(address),
    }
    load.finish_well(world, [(0, &near), (1, &far)]);
    // Longer than the peer timeout: the control session has to find the other NIC.
    world.pass(Duration::from_secs(15));
    let mut after = Load::default();
    after.post(world, [(0, &near), (1, &far)], 2, BYTES);
    after.finish_well(world, [(0, &near), (1, &far)]);
}

/// A NIC that brings answers and takes no acknowledgements: the end that answers counts reads that the reader has by then.
pub fn answers_that_are_not_acknowledged<W: Faulty>(world: &mut W) {
    const CHANNELS: usize = 32;
    let ends = [0, 1].map(|_| world.add(2, |builder| builder.channels(CHANNELS)));
    let (near, _far) = world.connect(ends[0], ends[1]);
    let (ours, theirs) = (world.zeroed(0, 8), world.zeroed(1, 8));
    let remote = theirs.descriptor();
    let address = world.nic(0, 1);
    world.net().cut_outgoing(address);
    // They fill the windows of the channels that are cut, so that all requests of reads arrive.
    let writes: Vec<Transfer> = (0..2 * CHANNELS * limits::WINDOW_FRAMES_MAX)
        .map(|_| near.write(&ours, 0, &remote, 0, 8).unwrap())
        .collect();
    world.pass(ms(300));
    let reads: Vec<Transfer> =
        (0..3 * limits::INBOUND_READS_MAX).map(|_| near.read(&ours, 0, &remote, 0, 8).unwrap()).collect();
    world.all_done(&reads);
    world.all_done(&writes);
}

/// A frame whose target goes away while its second piece was being received ended the receiver.
pub fn cancelled_in_the_middle_of_a_scattered_frame<W: Faulty>(world: &mut W) {
    let (near, _far) = slow_pair(world, 1);
    let source = world.patterned(1, 50_000, 1);
    let target = world.zeroed(0, 100_000);
    let block = |n: u64| Block { local_offset: n * 10_000, remote_offset: n * 5000, bytes: 5000 };
    let list =
        BlockList::new(&target, &source.descriptor(), &(0..10).map(block).collect::<Vec<_>>()).unwrap();
    for _ in 0..3 {
        let read = near.read_blocks(&list, None).unwrap();
        let moment = Duration::from_micros(world.below(4000) as u64);
        world.pass(moment);
        read.cancel();
        assert!(matches!(world.outcome(&read), Ok(50_000) | Err(TransferError::Cancelled)));
    }
    let read = near.read_blocks(&list, None).unwrap();
    world.all_done(&[read]);
}

/// Bytes that a lost connection delivers after their operation has been finished over another channel,
/// and its memory is in other use.
pub fn late_bytes_do_not_land<W: Faulty>(world: &mut W) {
    let (near, far) = slow_pair(world, 2);
    let write = long_write(world, &near);
    let moved = world.below(1 << 19) as u64;
    world.until("some bytes", || (write.0.bytes_moved() >= moved).then_some(()));
    let side = world.below(2);
    let address = world.nic(side, 1);
    world.net().cut(address);
    let target = write.1.clone();
    finish_long_write(world, write, &far);
    let poison = vec![0xEE; 1 << 20];
    target.write_at(0, &poison).unwrap();
    world.net().heal(address);
    world.pass(Duration::from_secs(5));
    assert_same(&contents(&target), &poison, "memory in other use");
}

/// A cancelled write must not be resent after a lost connection: it could overwrite newer data.
pub fn cancelled_writes_are_not_sent_again<W: Faulty>(world: &mut W) {
    let (near, _far) = slow_pair(world, 2);
    let (write, target) = long_write(world, &near);
    let moved = world.below(1 << 19) as u64;
    world.until("some bytes", || (write.bytes_moved() >= moved).then_some(()));
    let side = world.below(2);
    world.net().cut(world.nic(side, 1));
    write.cancel();
    // Frames in flight over the other NIC arrive before the cut is noticed.
    world.pass(ms(500));
    let newer = world.patterned(0, 1 << 20, 78);
    let second = near.write(&newer, 0, &target.descriptor(), 0, 1 << 20).unwrap();
    assert_eq!(world.outcome(&second), Ok(1 << 20));
    let outcome = world.outcome(&write);
    assert!(matches!(outcome, Ok(_) | Err(TransferError::Cancelled)), "{outcome:?}");
    world.pass(Duration::from_secs(5));
    assert_same(&contents(&target), &pattern(1 << 20, 78), "what was written later");
}

pub fn a_killed_peer_is_lost<W: Faulty>(world: &mut W) {
    let (near, far) = slow_pair(world, 2);
    let mut load = started(world, [(0, &near), (1, &far)]);
    let victim = world.below(2);
    let (survivor, peer) = [(1, &far), (0, &near)][victim];
    let waiting = {
        let target = world.zeroed(survivor, 10);
        peer.recv(12345, &target, 0, 10).unwrap()
    };
    let start = world.net().now();
    world.kill(victim);
    load.keep_of(survivor);
    let failed = load.finish(world, [(survivor, peer), (survivor, peer)]);
    let error = world.outcome(&waiting).unwrap_err();
    assert!(world.net().now() - start < LOST_WITHIN);
    for error in failed.iter().chain([&error]) {
        assert!(is_gone(error) && error.to_string().contains(&peer.name()), "{error}");
    }
    let region = world.zeroed(survivor, 10);
    assert!(is_gone(&peer.send(1, &region, 0, 1).unwrap_err()));
    assert!(is_gone(&peer.recv(1, &region, 0, 1).unwrap_err()));
    assert!(is_gone(&peer.notify(b"x").unwrap_err()));
    assert!(is_gone(&peer.error().unwrap().into()));
}

pub fn a_peer_that_stops_for_three_seconds_is_not_lost<W: Faulty>(world: &mut W) {
    let (near, far) = slow_pair(world, 2);
    let load = started(world, [(0, &near), (1, &far)]);
    let victim = world.below(2);
    world.freeze(victim);
    world.pass(Duration::from_secs(3));
    world.thaw(victim);
    load.finish_well(world, [(0, &near), (1, &far)]);
}

/// As when a machine is suspended, or moved.
pub fn peers_that_stop_together_are_not_lost<W: Faulty>(world: &mut W) {
    let (near, far) = slow_pair(world, 2);
    let load = started(world, [(0, &near), (1, &far)]);
    [0, 1].iter().for_each(|end| world.freeze(*end));
    world.pass(Duration::from_secs(60));
    [0, 1].iter().for_each(|end| world.thaw(*end));
    load.finish_well(world, [(0, &near), (1, &far)]);
}

pub fn a_peer_that_stops_for_good_is_lost<W: Faulty>(world: &mut W) {
    let (near, far) = slow_pair(world, 2);
    let mut load = started(world, [(0, &near), (1, &far)]);
    let victim = world.below(2);
    let (survivor, peer) = [(1, &far), (0, &near)][victim];
    let start = world.net().now();
    world.freeze(victim);
    load.keep_of(survivor);
    for error in load.finish(world, [(survivor, peer), (survivor, peer)]) {
        assert!(is_gone(&error) && error.to_string().contains(&peer.name()), "{error}");
    }
    world.until("the peer to be lost", || peer.error());
    let noticed = world.net().now() - start;
    assert!((NOT_LOST_WITHIN..LOST_WITHIN).contains(&noticed), "noticed after {noticed:?}");
    world.thaw(victim);
}

/// Such a write ended as cancelled, which promises that no byte of it lands any more. A host that goes on may still place what was
/// on the way to it.
pub fn a_cancelled_write_whose_peer_is_lost_ends_as_lost<W: Faulty>(world: &mut W) {
    let begun = begun_write(world);
    world.freeze(1);
    begun.write.cancel();
    ends_as_lost(world, &begun.near, &begun.write);
}

/// Regression: a write ended as refused when its peer was lost, though the peer had refused only some of its frames and had
/// not reported the others.
pub fn a_write_that_is_refused_in_part_whose_peer_is_lost_ends_as_lost<W: Faulty>(world: &mut W) {
    let BegunWrite { near, _far, write, _source, target } = begun_write(world);
    world.blocking(|| target.deregister()).unwrap();
    let moment = Duration::from_micros(world.below(2000) as u64);
    world.pass(moment);
    world.freeze(1);
    // What the peer sent before it stopped still arrives; this end takes it for lost only some seconds later.
    world.pass(Duration::from_secs(1));
    if let Some(ended) = write.poll() {
        assert!(matches!(ended, Err(TransferError::AccessRefused { .. })), "{ended:?}");
        return world.thaw(1);
    }
    ends_as_lost(world, &near, &write);
}

struct BegunWrite {
    near: Peer,
    _far: Peer,
    write: Transfer,
    _source: Region,
    target: Region,
}

/// A write over a slow path, some of whose bytes are placed.
fn begun_write<W: Faulty>(world: &mut W) -> BegunWrite {
    let ends = [0, 1].map(|_| world.add(1, |builder| builder.channels(2).chunk_bytes(8192).window(4)));
    let (near, far) = world.connect(ends[0], ends[1]);
    ends.iter().for_each(|end| world.net().set_bandwidth(world.nic(*end, 0), Some(20_000_000)));
    let (source, target) = (world.patterned(0, BYTES, 1), world.zeroed(1, BYTES));
    let write = near.write(&source, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
    let enough = world.below(BYTES / 4) as u64;
    world.until("some bytes", || (write.bytes_moved() >= enough).then_some(()));
    BegunWrite { near, _far: far, write, _source: source, target }
}

fn ends_as_lost<W: Faulty>(world: &mut W, near: &Peer, write: &Transfer) {
    let error = world.outcome(write).unwrap_err();
    assert!(is_gone(&error) && error.to_string().contains(&near.name()), "{error}");
    world.thaw(1);
}

pub fn a_restarted_peer_is_another_one<W: Faulty>(world: &mut W) {
    let (near, far) = slow_pair(world, 1);
    let (source, target) = (world.patterned(0, 1000, 1), world.zeroed(1, 1000));
    let old = target.descriptor();
    let write = near.write(&source, 0, &old, 0, 1000).unwrap();
    world.all_done(&[write]);
    let identity = near.identity();
    world.kill(1);
    drop(far);
    world.until("the peer to be lost", || near.error());
    world.restart(1, |builder| builder);
    let (again, _far) = world.connect(0, 1);
    assert_ne!(again.identity(), identity);
    let refused = again.write(&source, 0, &old, 0, 1000).unwrap_err();
    assert!(matches!(refused, TransferError::Invalid { .. }), "{refused}");
    let target = world.zeroed(1, 1000);
    let write = again.write(&source, 0, &target.descriptor(), 0, 1000).unwrap();
    world.all_done(&[write]);
    assert_same(&contents(&target), &pattern(1000, 1), "a write to a restarted peer");
}

pub fn corrupt_bytes_are_found_and_sent_again<W: Faulty>(world: &mut W) {
    let ends = [0, 1].map(|_| world.add(1, |builder| builder.channels(4).chunk_bytes(8192).crc(true)));
    let (near, far) = world.connect(ends[0], ends[1]);
    let load = {
        let mut load = Load::default();
        load.post(world, [(0, &near), (1, &far)], 3, BYTES);
        load
    };
    // Behind the handshakes of data connections, which have their own proofs.
    let times = 1 + world.below(5) as u32;
    world.net().corrupt_bulk(400, times);
    load.finish_well(world, [(0, &near), (1, &far)]);
}

/// Without a checksum in its frames: the record that holds the byte does not open.
pub fn corrupt_bytes_of_a_protected_connection_are_found_and_sent_again<W: Faulty>(world: &mut W) {
    let is_encrypted = world.below(2) == 0;
    let ends = [0, 1].map(|_| {
        world.add(1, |builder| {
            let builder = builder.channels(4).chunk_bytes(8192).keyed_checksum(!is_encrypted);
            builder.encryption(if is_encrypted { Encryption::Required } else { Encryption::Off })
        })
    });
    let (near, far) = world.connect(ends[0], ends[1]);
    assert_eq!(near.stats().protection.map(|protection| protection.encrypted), Some(is_encrypted));
    let mut load = Load::default();
    load.post(world, [(0, &near), (1, &far)], 3, BYTES);
    let times = 1 + world.below(5) as u32;
    world.net().corrupt_bulk(400, times);
    load.finish_well(world, [(0, &near), (1, &far)]);
}

pub fn stalls_and_slow_nics<W: Faulty>(world: &mut W) {
    let (near, far) = slow_pair(world, 2);
    let load = started(world, [(0, &near), (1, &far)]);
    let slow = world.nic(1, 1);
    world.net().set_nic_latency(slow, ms(30));
    for _ in 0..5 {
        let open = world.net().connections();
        let victim = open[world.below(open.len())].id;
        let lasting = ms(world.below(900) as u64);
        world.net().stall(victim, lasting);
        world.pass(ms(3));
    }
    load.finish_well(world, [(0, &near), (1, &far)]);
}

/// Everything that chance can do, and a load that has to come to an end all the same.
pub fn random_faults<W: Faulty>(world: &mut W) {
    let seed = world.net().seed();
    let nics = 1 + world.below(3);
    let ends = [0, 1].map(|_| {
        world.add(nics, |builder| builder.channels(3).chunk_bytes(8192).crc(seed.is_multiple_of(3)))
    });
    let (near, far) = world.connect(ends[0], ends[1]);
    world.net().set_faults(Faults::random(seed));
    let mut load = Load::default();
    for _ in 0..60 {
        let way = [(0, 1), (1, 0)][world.below(2)];
        if let Err(error) = load.one(world, [(0, &near), (1, &far)], way, BYTES / 2) {
            assert!(is_gone(&error), "{error}");
        }
        if world.below(3) == 0 {
            let pause = ms(world.below(20) as u64);
            world.pass(pause);
        }
        if world.below(8) == 0 {
            load.cancel_one(world);
        }
    }
    let lost = |peer: &Peer| peer.error().is_some();
    for error in load.finish(world, [(0, &near), (1, &far)]) {
        let known = is_gone(&error) && (lost(&near) || lost(&far));
        assert!(
            known
                || load.cancelled()
                    && matches!(error, TransferError::Cancelled | TransferError::AccessRefused { .. }),
            "{error}"
        );
    }
}
