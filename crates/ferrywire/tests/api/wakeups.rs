//! One thread that waits for many things on one descriptor.

use crate::{LIMIT, listening, pair};
use ferrywire::{Endpoint, Peer, Transfer, Wakeup};
use std::os::fd::AsRawFd;
use std::thread;

/// Waits until it is readable and clears it: what is read afterwards is up to date.
fn next(wakeup: &Wakeup) {
    assert_eq!(wakeup.wait(LIMIT), Ok(true), "the wake-up did not come");
    wakeup.clear();
}

/// The loop of a program that waits for all of these.
fn all_done(wakeup: &Wakeup, mut waiting: Vec<Transfer>) {
    waiting.iter().for_each(|each| each.arm(wakeup));
    while !waiting.is_empty() {
        next(wakeup);
        waiting.retain(|each| match each.poll() {
            Some(outcome) => {
                outcome.unwrap();
                false
            }
            None => true,
        });
    }
}

#[test]
fn transfers_of_every_kind_wake_when_they_end() {
    let pair = pair();
    let wakeup = Wakeup::new().unwrap();
    let source = pair.ends[0].register(vec![7u8; 1 << 20]).unwrap();
    let target = pair.ends[1].alloc_host(1 << 20).unwrap();
    let remote = target.descriptor();
    for bytes in [0, 8, 4096, 100_000, 1 << 20] {
        let started = vec![
            pair.near.write(&source, 0, &remote, 0, bytes).unwrap(),
            pair.near.read(&source, 0, &remote, 0, bytes).unwrap(),
            pair.near.send(1, &source, 0, bytes).unwrap(),
            pair.far.recv(1, &target, 0, bytes).unwrap(),
            pair.near.notify(b"x").unwrap(),
        ];
        all_done(&wakeup, started.clone());
        // Once more, now that all have ended.
        for ended in &started {
            ended.arm(&wakeup);
            next(&wakeup);
        }
    }
}

#[test]
fn no_wake_up_is_lost_among_thousands_and_several_threads() {
    let pair = pair();
    let wakeup = Wakeup::new().unwrap();
    let source = pair.ends[0].register(vec![7u8; 4096]).unwrap();
    let target = pair.ends[1].alloc_host(4096).unwrap();
    let remote = target.descriptor();
    let (sender, started) = std::sync::mpsc::channel::<Transfer>();
    thread::scope(|scope| {
        for _ in 0..2 {
            let (peer, source, sender) = (pair.near.clone(), source.clone(), sender.clone());
            let wakeup = wakeup.clone();
            scope.spawn(move || {
                for round in 0..3000u64 {
                    let transfer = peer.write(&source, 0, &remote, 0, round % 4096).unwrap();
                    transfer.arm(&wakeup);
                    sender.send(transfer).unwrap();
                }
            });
        }
        drop(sender);
        let mut waiting: Vec<Transfer> = Vec::new();
        let mut done = 0;
        while done < 6000 {
            next(&wakeup);
            waiting.extend(started.try_iter());
            let before = waiting.len();
            waiting.retain(|each| each.poll().is_none());
            done += before - waiting.len();
            if waiting.is_empty() && done < 6000 {
                // The next one may have ended before it came through the channel.
                waiting.extend(started.recv());
                waiting.iter().for_each(|each| each.arm(&wakeup));
            }
        }
    });
}

#[test]
fn notifications_of_many_peers_are_waited_for_by_one_thread() {
    const PEERS: usize = 5;
    const EACH: u32 = 200;
    let receiver = listening();
    let address = receiver.listen_addresses()[0];
    let senders: Vec<(Endpoint, Peer)> = (0..PEERS)
        .map(|_| {
            let endpoint = Endpoint::builder().channels(1).threads(1).build().unwrap();
            let peer = endpoint.connect(address, LIMIT).unwrap();
            (endpoint, peer)
        })
        .collect();
    let peers: Vec<Peer> = senders.iter().map(|_| receiver.accept(LIMIT).unwrap()).collect();
    let wakeup = Wakeup::new().unwrap();
    thread::scope(|scope| {
        for (_, peer) in &senders {
            scope.spawn(move || {
                for round in 0..EACH {
                    peer.notify(&round.to_le_bytes()).unwrap();
                }
            });
        }
        let mut heard = [0; PEERS];
        while heard.iter().any(|heard| *heard < EACH) {
            peers.iter().for_each(|peer| peer.arm(&wakeup));
            next(&wakeup);
            for (peer, heard) in peers.iter().zip(&mut heard) {
                while let Some(message) = peer.poll_notification().unwrap() {
                    assert_eq!(message, heard.to_le_bytes());
                    *heard += 1;
                }
            }
        }
    });
}

#[test]
fn a_peer_that_closes_and_one_that_is_accepted_wake() {
    let wakeup = Wakeup::new().unwrap();
    let receiver = listening();
    receiver.arm(&wakeup);
    assert_eq!(wakeup.wait(std::time::Duration::ZERO), Ok(false));
    let sender = Endpoint::builder().channels(1).build().unwrap();
    let connecting = sender.start_connect(receiver.listen_addresses()[0]).unwrap();
    let there = Wakeup::new().unwrap();
    let peer = loop {
        connecting.arm(&there);
        next(&there);
        if let Some(peer) = connecting.poll() {
            break peer.unwrap();
        }
    };
    let accepted = loop {
        next(&wakeup);
        if let Some(peer) = receiver.try_accept() {
            break peer.unwrap();
        }
        receiver.arm(&wakeup);
    };
    accepted.arm(&wakeup);
    peer.close(LIMIT).unwrap();
    while accepted.poll_notification().is_ok() {
        next(&wakeup);
        accepted.arm(&wakeup);
    }
    // Finished transfers wake at once, and so does a closed endpoint.
    wakeup.clear();
    accepted.arm(&wakeup);
    next(&wakeup);
    receiver.close(LIMIT).unwrap();
    receiver.arm(&wakeup);
    next(&wakeup);
}

#[test]
fn a_receive_that_its_peer_leaves_alone_wakes_when_the_peer_goes() {
    let pair = pair();
    let wakeup = Wakeup::new().unwrap();
    let target = pair.ends[1].alloc_host(64).unwrap();
    let receive = pair.far.recv(9, &target, 0, 64).unwrap();
    receive.arm(&wakeup);
    assert_eq!(receive.poll(), None);
    pair.near.close(LIMIT).unwrap();
    while receive.poll().is_none() {
        next(&wakeup);
    }
    assert!(receive.poll().is_some_and(|outcome| outcome.is_err()));
}

#[test]
fn armed_objects_and_the_wakeup_may_be_dropped_in_any_order() {
    let pair = pair();
    let kept = Wakeup::new().unwrap();
    assert!(kept.as_raw_fd() >= 0);
    for _ in 0..50 {
        let gone = Wakeup::new().unwrap();
        pair.far.arm(&gone);
        pair.near.notify(b"a").unwrap().arm(&gone);
        pair.near.notify(b"b").unwrap().arm(&kept);
    }
    for expected in [b"a", b"b"].repeat(50) {
        assert_eq!(pair.far.wait_notification(LIMIT).unwrap(), expected);
    }
    let last = pair.near.notify(b"c").unwrap();
    all_done(&kept, vec![last]);
}
