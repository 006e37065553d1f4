//! Several claims of one NIC.

use super::*;

#[test]
fn claims_share_settings_and_the_last_one_puts_them_back() {
    for first_ends_first in [true, false] {
        let nic = Nic::new(untouched());
        let first = nic.claim(&wish(1, true)).expect("allowed");
        let second = nic.claim(&wish(1, true)).expect("allowed");
        assert_eq!((first.queues(), second.queues()), (&[3][..], &[2][..]));
        assert_eq!(nic.state().spread, [0, 1, 0, 1, 0, 1, 0, 1]);
        let (ends, stays) = if first_ends_first { (first, second) } else { (second, first) };
        let gone = ends.queues()[0];
        drop(ends);
        let now = nic.state();
        assert_eq!((now.split, now.threshold_bytes, now.ntuple.on), (Split::On, 0, true));
        assert!(now.spread.contains(&gone), "everybody may use it again: {:?}", now.spread);
        assert!(!now.spread.contains(&stays.queues()[0]), "{:?}", now.spread);
        drop(stays);
        assert_eq!(nic.state(), untouched());
        assert_eq!(nic.files(), ["lock"]);
    }
}

#[test]
fn a_claim_without_leave_rides_on_what_another_has_set_up() {
    let nic = Nic::new(untouched());
    let first = nic.claim(&wish(2, true)).expect("allowed");
    nic.claim(&wish(1, false)).expect_err("other flows are spread over what is left");
    drop(first);
    assert_eq!(nic.state(), untouched());
}

#[test]
fn changes_of_a_dead_process_are_undone_and_those_of_a_live_one_stay() {
    let nic = Nic::new(State { rules: [(9, Some(foreign()))].into(), ..set_up() });
    let mut live = nic.claim(&wish(1, true)).expect("allowed");
    live.bind(fake::some_file().as_fd()).expect("it is set up");
    let kept = live.steer(end(PAIR[0]), end(PAIR[1])).expect("room");
    let mut dead = nic.claim(&wish(1, true)).expect("allowed");
    dead.bind(fake::some_file().as_fd()).expect("it is set up");
    dead.steer(end(PAIR[0]), end("10.0.0.2:40001")).expect("room");
    nic.kill(dead);
    assert_eq!(nic.state().rules.len(), 3);
    let reported = nic.clean().join("\n");
    assert!(reported.contains("removed 1 rule"), "{reported}");
    let now = nic.state();
    assert_eq!(now.rules, [(9, Some(foreign())), (kept.location, Some(kept.flow))].into());
    assert_eq!(now.bound.keys().copied().collect::<Vec<_>>(), live.queues());
    assert!(!now.spread.contains(&3));
    live.steer(end(PAIR[0]), end("10.0.0.2:40002")).expect("it still works");
    drop(live);
    assert_eq!(nic.state(), State { rules: [(9, Some(foreign()))].into(), ..set_up() });
}

#[test]
fn beside_a_live_claim_other_flows_stay_off_a_dead_claims_bound_queue() {
    let nic = Nic::new(untouched());
    let live = nic.claim(&wish(1, true)).expect("allowed");
    let dead = nic.claim(&wish(1, true)).expect("allowed");
    assert_eq!((live.queues(), dead.queues()), (&[3][..], &[2][..]));
    nic.kill(dead);
    let during = nic.state();
    nic.change(|state| state.bound.extend([(2, 77)]));
    nic.clean();
    assert_eq!(nic.state().spread, during.spread);
    nic.change(|state| state.bound.clear());
    nic.clean();
    assert!(nic.state().spread.contains(&2), "{:?}", nic.state().spread);
    drop(live);
    assert_eq!(nic.state(), untouched());
}

#[test]
fn the_next_claim_cleans_up_before_it_chooses() {
    let nic = Nic::new(untouched());
    nic.kill(nic.claim(&wish(3, true)).expect("allowed"));
    let claim = nic.claim(&wish(3, true)).expect("they are free again");
    assert_eq!(claim.queues(), [1, 2, 3]);
    drop(claim);
    assert_eq!(nic.state(), untouched());
}

#[test]
fn a_change_of_the_spread_by_others_becomes_what_it_was_before() {
    let nic = Nic::new(untouched());
    let first = nic.claim(&wish(1, true)).expect("allowed");
    let theirs = vec![0, 0, 0, 0, 1, 1, 2, 2];
    nic.change(|state| state.spread = theirs.clone());
    let second = nic.claim(&wish(1, true)).expect("allowed");
    assert_eq!(nic.state().spread, [0, 0, 0, 0, 1, 1, 0, 1]);
    drop((first, second));
    assert_eq!(nic.state(), State { spread: theirs, ..untouched() });
}

/// One claim lives all the time. Another one comes and goes and is killed before and after each change; so are two
/// processes that clean up after it, one after the other.
#[test]
fn a_kill_beside_a_live_claim_leaves_the_claim_as_it_was() {
    let nic = Nic::new(State { rules: [(9, Some(foreign()))].into(), ..untouched_but_ntuple() });
    let mut live = nic.claim(&wish(1, true)).expect("allowed");
    live.steer(end(PAIR[0]), end(PAIR[1])).expect("room");
    let name = live.file.as_ref().expect("it lives").name();
    let during = nic.state();
    assert_eq!((live.queues(), &during.spread[..4]), (&[3][..], &[0, 1, 2, 0][..]));
    nic.record();
    let mut other = nic.claim(&wish(2, true)).expect("allowed");
    assert_eq!(nic.state().spread, [0; 8]);
    let rule = other.steer(end(PAIR[0]), end("10.0.0.2:40001")).expect("room");
    other.steer(end(PAIR[0]), end("10.0.0.2:40002")).expect("room");
    other.unsteer(rule);
    drop(other);
    assert_eq!(nic.state(), during);
    let mut killed = nic.recorded();
    assert!(killed.len() >= 10, "{} states", killed.len());
    for generation in 0..3 {
        let mut again = Vec::new();
        for (number, nic) in killed.into_iter().enumerate() {
            let alive = nic.keeps_alive(&name);
            nic.record();
            let reported = nic.clean();
            assert_eq!(nic.state(), during, "state {number} of generation {generation}: {reported:?}");
            assert_eq!(
                nic.clean(),
                [""; 0],
                "state {number} of generation {generation}: nothing is left to say"
            );
            again.extend(nic.recorded());
            drop(alive);
        }
        killed = again;
    }
}

/// Containers on the host's network have a /run of their own each.
#[test]
fn queues_that_others_have_bound_without_a_record_are_reported() {
    let nic = Nic::new(set_up());
    assert_eq!(nic.strangers(), None);
    let mut claim = nic.claim(&wish(1, false)).expect("nothing is missing");
    claim.bind(fake::some_file().as_fd()).expect("it is set up");
    assert_eq!(nic.strangers(), None, "it is in the journal");
    drop(claim);
    nic.change(|state| state.bound.extend([(1, 77), (3, 78)]));
    let reported = nic.strangers().expect("somebody has queues");
    assert!(reported.contains("queues 1, 3") && reported.contains("/run/ferrywire"), "{reported}");
}

fn untouched_but_ntuple() -> State {
    State { ntuple: Feature { on: true, changeable: true }, ..untouched() }
}

#[test]
fn a_spread_that_others_have_changed_is_left_when_one_of_two_claims_ends() {
    let nic = Nic::new(untouched());
    let first = nic.claim(&wish(1, true)).expect("allowed");
    let second = nic.claim(&wish(1, true)).expect("allowed");
    let theirs = vec![0, 0, 0, 0, 0, 0, 0, 3];
    nic.change(|state| state.spread = theirs.clone());
    drop(second);
    assert_eq!(nic.state().spread, theirs);
    drop(first);
    assert_eq!(nic.state(), State { spread: theirs, ..untouched() });
}

/// While the limit of descriptors is reached, the other claim's queues are unknown.
#[test]
fn while_a_live_claim_cannot_be_read_nothing_is_taken_from_it() {
    let nic = Nic::new(untouched());
    let first = nic.claim(&wish(1, true)).expect("allowed");
    let second = nic.claim(&wish(1, true)).expect("allowed");
    let during = nic.state();
    let name = first.file.as_ref().expect("it lives").name();
    nic.while_unreadable(&name, || {
        drop(second);
        assert_eq!(nic.state(), during, "nothing is put back");
        let error = nic.claim(&wish(1, true)).expect_err("nobody knows what is free").to_string();
        assert!(error.contains(&format!("cannot read {name}")), "{error}");
        assert_eq!(nic.state(), during);
    });
    drop(first);
    assert_eq!((nic.state(), nic.files()), (untouched(), vec!["lock".to_owned()]));
}

#[test]
fn a_live_claim_that_makes_no_sense_is_let_be() {
    let nic = Nic::new(untouched());
    let first = nic.claim(&wish(1, true)).expect("allowed");
    let second = nic.claim(&wish(1, true)).expect("allowed");
    let during = nic.state();
    let name = first.file.as_ref().expect("it lives").name();
    let record = nic.read(&name);
    nic.overwrite(&name, "of a later version\n");
    drop(second);
    assert_eq!(nic.state(), during);
    nic.overwrite(&name, &record);
    drop(first);
    assert_eq!((nic.state(), nic.files()), (untouched(), vec!["lock".to_owned()]));
}

/// Regression: a process that could not read the boot id took all records for those of an earlier boot and removed
/// them.
#[test]
fn a_live_claim_of_another_boot_is_let_be() {
    let nic = Nic::new(untouched());
    let first = nic.claim(&wish(1, true)).expect("allowed");
    let name = first.file.as_ref().expect("it lives").name();
    let record = nic.read(&name);
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("a boot id");
    let other = record.replace(boot.trim(), "unknown");
    assert_ne!(other, record);
    nic.overwrite(&name, &other);
    stops_another_claim(&nic, &[&name, "earlier boot of the host"]);
    assert_eq!(nic.read(&name), other);
    nic.overwrite(&name, &record);
    drop(first);
    assert_eq!((nic.state(), nic.files()), (untouched(), vec!["lock".to_owned()]));
}

/// Nothing is undone or changed in this case.
fn stops_another_claim(nic: &Nic, why: &[&str]) {
    let before = nic.state();
    let error = nic.claim(&wish(1, true)).expect_err("a record says nothing").to_string();
    assert!(why.iter().all(|part| error.contains(part)), "{error}");
    assert_eq!(nic.state(), before);
}

/// Regression: unreadable records were set aside, and the changed values were recorded as the original ones.
#[test]
fn settings_that_make_no_sense_are_let_be_while_a_run_lives() {
    let nic = Nic::new(untouched());
    let first = nic.claim(&wish(1, true)).expect("allowed");
    let record = nic.read("settings");
    nic.overwrite("settings", "of a later version\n");
    stops_another_claim(
        &nic,
        &["cannot read settings", "the record cannot be parsed, and a running process needs it"],
    );
    nic.overwrite("settings", &record);
    drop(first);
    assert_eq!((nic.state(), nic.files()), (untouched(), vec!["lock".to_owned()]));
}

/// Regression: a process started on a NIC as a killed one had left it, and nothing was ever restored.
#[test]
fn settings_that_cannot_be_read_stop_a_run_that_needs_nothing_changed() {
    let nic = Nic::new(untouched());
    let first = nic.claim(&wish(1, true)).expect("allowed");
    nic.kill(first);
    nic.while_unreadable("settings", || stops_another_claim(&nic, &["cannot read settings"]));
    drop(nic.claim(&wish(1, true)).expect("allowed"));
    assert_eq!((nic.state(), nic.files()), (untouched(), vec!["lock".to_owned()]));
}

#[test]
fn settings_that_cannot_be_read_are_not_written_anew() {
    let nic = Nic::new(untouched());
    let first = nic.claim(&wish(1, true)).expect("allowed");
    nic.while_unreadable("settings", || stops_another_claim(&nic, &["cannot read settings"]));
    drop(first);
    assert_eq!((nic.state(), nic.files()), (untouched(), vec!["lock".to_owned()]));
}
