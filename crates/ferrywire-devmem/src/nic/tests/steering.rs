//! Rules that are made and removed while other processes change the NIC.

use super::*;
use crate::steering::Steering;
use ferrywire_proto::limits;
use std::thread;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);

fn until_rules_are(nic: &Nic, count: usize) {
    let began = Instant::now();
    while nic.state().rules.len() != count {
        assert!(began.elapsed() < LIMIT, "{:?}", nic.state().rules);
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn removing_a_rule_does_not_wait_for_others_at_the_nic() {
    let nic = Nic::new(untouched());
    let steering = Steering::new(fake::NAME, nic.claim(&wish(1, true)).expect("allowed")).expect("a thread");
    let rule = steering.steer(end(PAIR[0]), end(PAIR[1])).expect("room");
    nic.while_locked(|| {
        // Returns although this very thread holds the lock.
        steering.unsteer_later(rule);
        assert_eq!(nic.state().rules.len(), 1);
    });
    until_rules_are(&nic, 0);
    let rule = steering.steer(end(PAIR[0]), end(PAIR[1])).expect("room");
    steering.steer(end(PAIR[0]), end("10.0.0.2:40001")).expect("room");
    steering.unsteer_later(rule);
    drop(steering);
    assert_eq!((nic.state(), nic.files()), (untouched(), vec!["lock".to_owned()]));
}

#[test]
fn a_rule_that_cannot_be_removed_is_tried_again_while_the_endpoint_lives() {
    let nic = Nic::new(untouched());
    let steering = Steering::new(fake::NAME, nic.claim(&wish(1, true)).expect("allowed")).expect("a thread");
    let rule = steering.steer(end(PAIR[0]), end(PAIR[1])).expect("room");
    nic.refuse("delete", false);
    steering.unsteer_later(rule);
    let began = Instant::now();
    while nic.refusals() == 0 {
        assert!(began.elapsed() < LIMIT, "nobody tries");
        thread::sleep(Duration::from_millis(1));
    }
    nic.refuse("nothing", false);
    until_rules_are(&nic, 0);
    // Also removed before the next rule is made.
    nic.refuse("delete", false);
    let rule = steering.steer(end(PAIR[0]), end(PAIR[1])).expect("room");
    steering.unsteer_later(rule);
    let other = steering.steer(end(PAIR[0]), end("10.0.0.2:40001")).expect("room beside the one that stays");
    nic.refuse("nothing", false);
    steering.unsteer_later(other);
    until_rules_are(&nic, 0);
    drop(steering);
    assert_eq!((nic.state(), nic.files()), (untouched(), vec!["lock".to_owned()]));
}

#[test]
fn rules_wait_together_for_a_nic_that_others_have() {
    let nic = Nic::new(untouched());
    let mut claim = nic.claim(&wish(1, true)).expect("allowed");
    let rules: Vec<Rule> = (1..=3)
        .map(|port| claim.steer(end(PAIR[0]), SocketAddr::new(end(PAIR[1]).ip(), port)).expect("room"))
        .collect();
    let left = nic.while_locked(|| claim.unsteer_all(rules.clone(), Duration::ZERO));
    let left = left.expect_err("others have the NIC");
    assert_eq!((&left.rules, left.no_lock.is_some(), nic.state().rules.len()), (&rules, true, 3));
    claim.unsteer_all(left.rules, LIMIT).expect("nobody has it");
    assert_eq!(nic.state().rules.len(), 0);
}

#[test]
fn rules_that_are_needed_no_more_leave_their_places_to_new_ones() {
    let nic = Nic::new(set_up());
    let steering =
        Steering::new(fake::NAME, nic.claim(&wish(1, false)).expect("it is set up")).expect("a thread");
    let peer = |port| SocketAddr::new(end(PAIR[1]).ip(), port);
    let mut rules: Vec<Rule> =
        (1..=64).map(|port| steering.steer(end(PAIR[0]), peer(port)).expect("room")).collect();
    assert!(steering.steer(end(PAIR[0]), peer(100)).is_err(), "the table is full");
    for port in 200..300 {
        rules.drain(..1).for_each(|rule| steering.unsteer_later(rule));
        rules.push(steering.steer(end(PAIR[0]), peer(port)).expect("the place of the one before"));
    }
    drop(steering);
    assert_eq!(nic.state(), set_up());
}

#[test]
fn an_ended_claim_is_no_longer_steered_by() {
    let nic = Nic::new(untouched());
    let steering = Steering::new(fake::NAME, nic.claim(&wish(1, true)).expect("allowed")).expect("a thread");
    let rule = steering.steer(end(PAIR[0]), end(PAIR[1])).expect("room");
    steering.end(Instant::now() + LIMIT);
    assert_eq!(nic.state(), untouched());
    let error = steering.steer(end(PAIR[0]), end(PAIR[1])).expect_err("there is no queue").to_string();
    assert!(error.contains("closed"), "{error}");
    steering.unsteer_later(rule);
}

/// A stopped process may hold the journal's lock for ever.
#[test]
fn an_end_waits_for_others_at_the_nic_as_long_as_it_may_and_leaves_the_rest_to_the_next_start() {
    let nic = Nic::new(untouched());
    let mut claim = nic.claim(&wish(1, true)).expect("allowed");
    claim.bind(fake::some_file().as_fd()).expect("it is set up");
    let steering = Steering::new(fake::NAME, claim).expect("a thread");
    let rule = steering.steer(end(PAIR[0]), end(PAIR[1])).expect("room");
    steering.steer(end(PAIR[0]), end("10.0.0.2:40001")).expect("room");
    nic.while_locked(|| {
        thread::scope(|scope| {
            // The claim may be in use by threads that wait for the lock.
            steering.unsteer_later(rule);
            let other = scope.spawn(|| steering.steer(end(PAIR[0]), end("10.0.0.2:40002")));
            let began = Instant::now();
            steering.end(began + Duration::from_millis(100));
            assert!(began.elapsed() < limits::NIC_LOCK_TIMEOUT * 2 / 3, "{:?}", began.elapsed());
            other.join().expect("no panic").expect_err("the NIC is locked, then the claim is gone");
        });
        let now = nic.state();
        assert_eq!((now.bound.len(), now.rules.len()), (0, 2));
    });
    let reported = nic.clean().join("\n");
    assert!(reported.contains("removed 2 rules"), "{reported}");
    assert_eq!((nic.state(), nic.files()), (untouched(), vec!["lock".to_owned()]));
}
