//! Claims on a simulated NIC: their changes, the restored values, and what the next start does after a process was
//! killed before or after any change.

mod fake;
mod records;
mod sharing;
mod steering;

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::sys::ethtool::{Feature, Rings, Split};
use fake::{Nic, State};

const PAIR: [&str; 2] = ["10.0.0.1:7420", "10.0.0.2:40000"];

fn end(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

fn wish(queues: usize, allow_nic_setup: bool) -> Wish {
    Wish { queues, allow_nic_setup }
}

fn foreign() -> Flow {
    Flow::new(end("10.0.0.1:22"), end("10.0.0.9:5555"), 1).expect("a pair")
}

/// A claim of a simulated NIC, for tests of its users.
pub(crate) fn simulated_claim() -> Claim {
    Nic::new(set_up()).claim(&wish(1, false)).expect("nothing is missing")
}

/// The default state of NICs: no header split, no rules, flows over all queues.
fn untouched() -> State {
    State {
        split: Split::Off,
        threshold_bytes: 256,
        ntuple: Feature { on: false, changeable: true },
        spread: vec![0, 1, 2, 3, 0, 1, 2, 3],
        ..State::new(4)
    }
}

/// A NIC that an administrator has set up for the last two queues.
fn set_up() -> State {
    State { spread: vec![0, 1, 0, 1], ..State::new(4) }
}

#[test]
fn everything_is_changed_for_a_claim_and_put_back_after_it() {
    let nic = Nic::new(untouched());
    let mut claim = nic.claim(&wish(2, true)).expect("allowed");
    assert_eq!(claim.queues(), [2, 3]);
    assert_eq!(claim.describe(), format!("{} queues 2, 3", fake::NAME));
    let now = nic.state();
    assert_eq!((now.split, now.threshold_bytes, now.ntuple.on), (Split::On, 0, true));
    assert_eq!(now.spread, [0, 1, 0, 1, 0, 1, 0, 1]);
    let memory = fake::some_file();
    let binding = claim.bind(memory.as_fd()).expect("it is set up");
    assert_eq!(nic.state().bound, [(2, binding), (3, binding)].into());
    let rules: Vec<Rule> = (1..=4)
        .map(|port| {
            claim.steer(end("10.0.0.1:7420"), SocketAddr::new(end(PAIR[1]).ip(), port)).expect("room")
        })
        .collect();
    assert_eq!(
        rules.iter().map(Rule::queue).collect::<Vec<_>>(),
        [2, 3, 2, 3],
        "the least used one each time"
    );
    claim.unsteer(rules[0]);
    assert_eq!(claim.steer(end("[::ffff:10.0.0.1]:1"), end("10.0.0.2:9")).expect("both IPv4").queue(), 2);
    assert_eq!(nic.state().rules.len(), 4);
    drop(claim);
    assert_eq!(nic.state(), untouched());
    assert_eq!(nic.files(), ["lock"], "of the journal");
}

#[test]
fn nothing_is_changed_without_permission() {
    let nic = Nic::new(untouched());
    let error = nic.claim(&wish(1, false)).expect_err("not allowed");
    let missing =
        [Missing::Split { is: "it is off" }, Missing::Ntuple, Missing::Spread { queues: vec![3], others: 3 }];
    assert_eq!(error, NicError::NotSetUp { nic: fake::NAME.into(), missing: missing.into() });
    let text = error.to_string();
    let commands = ["-G lo tcp-data-split on hds-thresh 0", "-K lo ntuple on", "-X lo equal 3"];
    assert!(commands.iter().all(|command| text.contains(&format!("ethtool {command}"))), "{text}");
    assert!(text.contains("--allow-nic-setup"), "{text}");
    assert_eq!((nic.state(), nic.changes()), (untouched(), 0));
}

/// Regression: the NIC counted as possible, and the error proposed a command that the driver cannot carry out.
#[test]
fn a_nic_whose_flow_rules_cannot_be_turned_on_is_not_possible() {
    let rules = |on, changeable| State { ntuple: Feature { on, changeable }, ..set_up() };
    let ask = |nic: &Nic| {
        let mut found = Possible { receives: Some(true), ..Possible::default() };
        possible::ask_settings(fake::NAME, &mut *nic.kernel(), &mut found);
        found
    };
    for (on, changeable, steers) in [(true, false, true), (false, true, true), (false, false, false)] {
        let found = ask(&Nic::new(rules(on, changeable)));
        assert_eq!((found.is_possible(), found.steers), (steers, Some(steers)), "{found:?}");
    }
    let nic = Nic::new(rules(false, false));
    for allowed in [true, false] {
        let error = nic.claim(&wish(1, allowed)).expect_err("no rule can be added");
        assert_eq!(ask(&nic).unsupported_reason, [error.to_string()]);
        let text = error.to_string();
        assert!(!text.contains("ethtool") && !text.contains("--allow-nic-setup"), "{text}");
    }
    assert_eq!((nic.state(), nic.changes()), (rules(false, false), 0));
}

#[test]
fn settings_of_an_administrator_need_no_permission() {
    let nic = Nic::new(set_up());
    let mut claim = nic.claim(&wish(2, false)).expect("nothing is missing");
    assert_eq!((claim.queues(), nic.changes()), (&[2, 3][..], 0));
    claim.bind(fake::some_file().as_fd()).expect("split is on");
    claim.steer(end(PAIR[0]), end(PAIR[1])).expect("room");
    drop(claim);
    assert_eq!(nic.state(), set_up());
    // The queue without spread flows is taken first, even if it is not the last.
    let other = Nic::new(State { spread: vec![0, 2, 3], ..State::new(4) });
    assert_eq!(other.claim(&wish(1, false)).expect("nothing is missing").queues(), [1]);
}

#[test]
fn a_driver_that_splits_unasked_is_asked_when_the_kernel_wants_that() {
    let unasked = State { split: Split::Auto, ..set_up() };
    let nic = Nic::new(unasked.clone());
    let mut claim = nic.claim(&wish(1, false)).expect("the driver says that it splits");
    let refused = claim.bind(fake::some_file().as_fd()).expect_err("the kernel wants it asked for");
    assert!(refused.to_string().contains("tcp-data-split on"), "{refused}");
    drop(claim);
    let mut claim = nic.claim(&wish(1, true)).expect("as before");
    claim.bind(fake::some_file().as_fd()).expect("it may ask");
    assert_eq!(nic.state().split, Split::On);
    drop(claim);
    assert_eq!(nic.state(), unasked);
    // Only the threshold was wrong, and only the threshold is changed.
    let threshold = State { threshold_bytes: 128, ..set_up() };
    let nic = Nic::new(threshold.clone());
    let mut claim = nic.claim(&wish(1, true)).expect("allowed");
    claim.bind(fake::some_file().as_fd()).expect("it is set up");
    assert_eq!(nic.changes(), 2, "the threshold and the binding");
    drop(claim);
    assert_eq!(nic.state(), threshold);
}

#[test]
fn a_change_that_does_not_come_about_is_an_error_and_undone() {
    for deaf in ["rings", "ntuple", "spread"] {
        for lies in [true, false] {
            let nic = Nic::new(untouched());
            nic.refuse(deaf, lies);
            let error = nic.claim(&wish(1, true)).expect_err("nothing came of it");
            assert!(matches!(error, NicError::Refused(DevmemError::Setting { .. })), "{error}");
            nic.refuse("nothing", lies);
            assert_eq!(nic.state(), untouched(), "{deaf}: {error}");
            assert_eq!(nic.files(), ["lock"], "{deaf}");
        }
    }
}

#[test]
fn a_rule_that_is_refused_leaves_no_trace() {
    let nic = Nic::new(set_up());
    let mut claim = nic.claim(&wish(1, false)).expect("nothing is missing");
    nic.refuse("insert", false);
    let error = claim.steer(end(PAIR[0]), end(PAIR[1])).expect_err("the table is full");
    assert!(error.to_string().contains("ethtool -u lo"), "{error}");
    let error = claim.steer(end("10.0.0.1:1"), end("[2001:db8::1]:1")).expect_err("of two kinds");
    assert!(error.to_string().contains("different families"), "{error}");
    nic.refuse("nothing", false);
    drop(claim);
    assert_eq!(nic.state(), set_up());
}

#[test]
fn a_nic_without_queues_is_named_in_the_command_that_brings_it_up() {
    let error =
        Nic::new(State { spread: vec![], ..State::new(0) }).claim(&wish(1, true)).expect_err("it is down");
    let NicError::NoQueues { why, .. } = &error else { panic!("{error}") };
    assert!(why.contains(&format!("(ip link set {} up)", fake::NAME)), "{why}");
}

#[test]
fn queues_that_others_have_are_not_taken() {
    let mut state = State { spread: vec![0, 1, 2, 3, 0, 1, 2, 3], ..State::new(4) };
    state.bound.insert(3, 77);
    let nic = Nic::new(state.clone());
    let claim = nic.claim(&wish(2, true)).expect("two are left");
    assert_eq!(claim.queues(), [1, 2]);
    assert_eq!(nic.state().spread, [0, 0, 3, 3, 0, 0, 3, 3], "whoever has queue 3 decides about it");
    let error = nic.claim(&wish(1, true)).expect_err("the last one is everybody's");
    let NicError::NoQueues { why, .. } = &error else { panic!("{error}") };
    assert!(why.contains("1 free receive queues are needed and 0 of 4 are free"), "{why}");
    assert!(nic.claim(&wish(0, true)).is_err());
    drop(claim);
    assert_eq!(nic.state(), state);
}

/// Checks each change of one run: the states before and after it are what a kill would leave.
#[test]
fn changes_of_a_killed_process_are_undone() {
    for begin in [untouched(), set_up(), State { split: Split::Auto, threshold_bytes: 9, ..untouched() }] {
        let mut begin = begin;
        if begin.ntuple.on {
            begin.rules.insert(0, Some(foreign()));
            begin.rules.insert(5, None);
        }
        let nic = Nic::new(begin.clone());
        nic.record();
        let mut claim = nic.claim(&wish(2, true)).expect("allowed");
        claim.bind(fake::some_file().as_fd()).expect("it is set up");
        let rule = claim.steer(end(PAIR[0]), end(PAIR[1])).expect("room");
        claim.steer(end("[2001:db8::1]:1"), end("[2001:db8::2]:2")).expect("room");
        claim.unsteer(rule);
        drop(claim);
        let kills = nic.recorded();
        assert!(kills.len() >= 10, "{} states", kills.len());
        for (number, killed) in kills.iter().enumerate() {
            let reported = killed.clean();
            assert_eq!(killed.state(), begin, "state {number}: {reported:?}");
            assert_eq!(killed.files(), ["lock"], "state {number}");
            assert_eq!(killed.clean(), [""; 0], "state {number}: nothing is left to say");
        }
        assert!(kills.iter().any(|killed| killed.has_reported()));
    }
}

#[test]
fn settings_that_others_changed_meanwhile_stay() {
    let nic = Nic::new(untouched());
    let mut claim = nic.claim(&wish(1, true)).expect("allowed");
    let rule = claim.steer(end(PAIR[0]), end(PAIR[1])).expect("room");
    nic.kill(claim);
    let theirs = |state: &mut State| {
        state.rules.insert(rule.location, Some(foreign()));
        state.spread = vec![0, 0, 1, 1, 0, 0, 1, 1];
        state.threshold_bytes = 64;
    };
    nic.change(theirs);
    let reported = nic.clean().join("\n");
    let now = nic.state();
    assert_eq!(now.rules, [(rule.location, Some(foreign()))].into());
    assert_eq!((now.spread, now.threshold_bytes), (vec![0, 0, 1, 1, 0, 0, 1, 1], 64));
    assert!(now.ntuple.on, "a rule of others needs it: {reported}");
    for words in ["removed 0 rules", "another program has changed it", "another program has flow rules"] {
        assert!(reported.contains(words), "{words}: {reported}");
    }
    assert_eq!(nic.files(), ["lock"]);
}

#[test]
fn an_undo_that_fails_is_tried_again() {
    let nic = Nic::new(untouched());
    let mut claim = nic.claim(&wish(1, true)).expect("allowed");
    claim.steer(end(PAIR[0]), end(PAIR[1])).expect("room");
    for fails in ["delete", "rings", "ntuple", "spread"] {
        nic.refuse(fails, false);
        if fails == "delete" {
            drop(std::mem::replace(&mut claim, nic.claim(&wish(1, true)).expect("another queue")));
            assert_eq!(nic.state().rules.len(), 1);
            nic.refuse("nothing", false);
            assert!(nic.clean().join("\n").contains("removed 1 rule"));
        } else {
            drop(std::mem::replace(&mut claim, nic.claim_elsewhere()));
            assert_ne!(nic.state(), untouched(), "{fails}");
            nic.refuse("nothing", false);
            assert!(nic.clean().join("\n").contains("restored "), "{fails}");
            assert_eq!((nic.state(), nic.files()), (untouched(), vec!["lock".to_owned()]));
            claim = nic.claim(&wish(1, true)).expect("allowed");
        }
    }
    drop(claim);
    assert_eq!(nic.state(), untouched());
}

/// gve, bnxt and fbnic report a location without a rule differently from mlx5.
#[test]
fn a_rule_that_is_gone_is_no_obstacle_whatever_the_driver_calls_that() {
    for errno in [libc::ENOENT, libc::EINVAL] {
        let nic = Nic::new(untouched());
        nic.says_of_absent_rules(errno);
        let mut claim = nic.claim(&wish(1, true)).expect("allowed");
        let rules: Vec<Rule> = (1..=3)
            .map(|port| claim.steer(end(PAIR[0]), SocketAddr::new(end(PAIR[1]).ip(), port)).expect("room"))
            .collect();
        nic.change(|state| state.rules.retain(|place, _| *place != rules[0].location));
        drop(claim);
        assert_eq!((nic.state(), nic.files()), (untouched(), vec!["lock".to_owned()]), "errno {errno}");
    }
}

#[test]
fn an_unreadable_rule_does_not_keep_the_others() {
    let nic = Nic::new(untouched());
    let mut claim = nic.claim(&wish(1, true)).expect("allowed");
    for port in 1..=3 {
        claim.steer(end(PAIR[0]), SocketAddr::new(end(PAIR[1]).ip(), port)).expect("room");
    }
    nic.refuse("rule", false);
    drop(claim);
    assert_eq!(nic.state().rules.len(), 1, "{:?}", nic.state().rules);
    assert!(nic.clean().join("\n").contains("removed 1 rule"));
    assert_eq!((nic.state(), nic.files()), (untouched(), vec!["lock".to_owned()]));
}

#[test]
fn rules_for_flows_are_switched_off_once_our_own_could_be_removed() {
    for place_is_known in [true, false] {
        let nic = Nic::new(untouched());
        let mut claim = nic.claim(&wish(1, true)).expect("allowed");
        claim.steer(end(PAIR[0]), end(PAIR[1])).expect("room");
        if !place_is_known {
            claim.claimed.rules[0].1 = None;
            claim.write().expect("written");
        }
        nic.refuse("delete", false);
        drop(claim);
        let now = nic.state();
        assert!(now.ntuple.on && now.rules.len() == 1, "its own rule needs it: {now:?}");
        let reported = nic.clean().join("\n");
        assert!(
            reported.contains("cannot remove flow rules of")
                && reported.contains("flow rules of earlier claims remain"),
            "{reported}"
        );
        nic.refuse("nothing", false);
        let reported = nic.clean().join("\n");
        assert!(
            reported.contains("removed 1 rule")
                && reported.contains("restored the flow rules setting (ntuple)"),
            "{reported}"
        );
        assert_eq!((nic.state(), nic.files()), (untouched(), vec!["lock".to_owned()]));
        // A rule of another process is a reason to leave the feature on for good.
        let mut claim = nic.claim(&wish(1, true)).expect("allowed");
        claim.steer(end(PAIR[0]), end(PAIR[1])).expect("room");
        nic.change(|state| state.rules.extend([(0, Some(foreign()))]));
        nic.refuse("delete", false);
        drop(claim);
        nic.refuse("nothing", false);
        nic.clean();
        let now = nic.state();
        assert!(now.ntuple.on, "rules of others need it");
        assert_eq!((now.rules, nic.files()), ([(0, Some(foreign()))].into(), vec!["lock".to_owned()]));
    }
}

/// A claim was killed while another process has memory bound, which the kernel may still be releasing.
fn killed_beside_a_binding() -> Nic {
    let nic = Nic::new(untouched());
    let claim = nic.claim(&wish(1, true)).expect("allowed");
    nic.change(|state| state.bound.extend([(1, 77)]));
    nic.kill(claim);
    nic
}

#[test]
fn header_split_is_restored_once_the_binding_of_a_killed_process_has_ended() {
    let nic = killed_beside_a_binding();
    let (begun, ended) = (nic.changes(), AtomicBool::new(false));
    let reported = std::thread::scope(|scope| {
        scope.spawn(|| {
            // Ntuple, the RSS table, and the first attempts for header split.
            while nic.changes() < begun + 5 && !ended.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            nic.change(|state| state.bound.clear());
        });
        let reported = nic.clean().join("\n");
        ended.store(true, Ordering::Relaxed);
        reported
    });
    assert!(reported.contains("restored header split"), "{reported}");
    assert_eq!((nic.state(), nic.files()), (untouched(), vec!["lock".to_owned()]));
}

#[test]
fn other_flows_stay_off_a_queue_that_is_still_bound() {
    let nic = Nic::new(untouched());
    let dead = nic.claim(&wish(1, true)).expect("allowed");
    assert_eq!(dead.queues(), [3]);
    nic.kill(dead);
    nic.change(|state| state.bound.extend([(3, 77)]));
    let reported = nic.clean().join("\n");
    assert!(reported.contains("the RSS table is not restored yet: its queues are still bound"), "{reported}");
    assert!(!nic.state().spread.contains(&3), "{:?}", nic.state().spread);
    // The next claim takes another queue, and changes the spread without adding the bound one.
    let next = nic.claim(&wish(1, true)).expect("allowed");
    assert_eq!((next.queues(), &nic.state().spread[..]), (&[2][..], &[0, 1, 0, 1, 0, 1, 0, 1][..]));
    nic.change(|state| state.bound.clear());
    drop(next);
    assert_eq!((nic.state(), nic.files()), (untouched(), vec!["lock".to_owned()]));
}

#[test]
fn the_spread_is_restored_once_the_binding_of_a_killed_process_has_ended() {
    let nic = Nic::new(untouched());
    nic.kill(nic.claim(&wish(1, true)).expect("allowed"));
    nic.change(|state| state.bound.extend([(3, 77)]));
    let begun = nic.changes();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(std::time::Duration::from_millis(50));
            assert_eq!(nic.changes(), begun, "nothing is restored before");
            nic.change(|state| state.bound.clear());
        });
        nic.clean();
    });
    assert_eq!((nic.state(), nic.files()), (untouched(), vec!["lock".to_owned()]));
}

#[test]
fn a_refusal_with_another_number_is_not_retried() {
    let nic = killed_beside_a_binding();
    nic.refuse("rings", false);
    let cleaned = nic.cleaned();
    assert!(cleaned.reported.join("\n").contains("cannot restore header split"));
    assert!(cleaned.failed, "header split is left");
    assert_eq!(nic.refusals(), 1);
    nic.refuse("nothing", false);
    nic.change(|state| state.bound.clear());
    assert!(!nic.cleaned().failed);
    assert_eq!(nic.state(), untouched());
}

#[test]
fn a_setting_that_others_need_by_now_is_left_for_later() {
    let nic = Nic::new(untouched());
    let claim = nic.claim(&wish(1, true)).expect("allowed");
    nic.change(|state| state.bound.extend([(1, 77)]));
    drop(claim);
    let now = nic.state();
    assert_eq!((now.split, now.threshold_bytes, now.ntuple.on), (Split::On, 0, false));
    nic.change(|state| state.bound.clear());
    assert!(nic.clean().join("\n").contains("restored header split"));
    assert_eq!((nic.state(), nic.files()), (untouched(), vec!["lock".to_owned()]));
}

#[test]
fn an_unreadable_journal_is_reported_and_set_aside() {
    let nic = Nic::new(untouched());
    let claim = nic.claim(&wish(1, true)).expect("allowed");
    nic.kill(claim);
    for file in nic.files().iter().filter(|file| !file.contains("lock")) {
        nic.overwrite(file, "ferrywire devmem 1\nno sense\nend\n");
    }
    let cleaned = nic.cleaned();
    let reported = cleaned.reported.join("\n");
    assert_eq!((reported.matches("cannot parse ").count(), cleaned.failed), (2, true), "{reported}");
    let claim = nic.claim(&wish(1, true)).expect("it is no obstacle");
    drop(claim);
    assert_eq!(nic.files(), ["claim-broken", "lock", "settings.broken"]);
}

#[test]
fn a_journal_of_an_earlier_start_of_the_host_is_forgotten() {
    let nic = Nic::new(untouched());
    nic.kill(nic.claim(&wish(1, true)).expect("allowed"));
    let settings = nic.read("settings");
    let boot = settings.lines().nth(1).expect("a line").to_owned();
    for file in nic.files().iter().filter(|file| !file.contains("lock")) {
        nic.overwrite(file, &nic.read(file).replace(&boot, "boot of-yesterday"));
    }
    nic.change(|state| *state = set_up());
    let reported = nic.clean().join("\n");
    assert!(reported.contains("a NIC that is gone"), "{reported}");
    assert_eq!((nic.state(), nic.files()), (set_up(), vec!["lock".to_owned()]));
}

#[test]
fn the_record_of_a_removed_nic_is_reported_once() {
    let journal = tempfile::tempdir().expect("a folder");
    let folder = journal.path().join(format!("{}-gone0", journal::namespace().expect("a namespace")));
    std::fs::create_dir(&folder).expect("a folder");
    std::fs::write(folder.join("lock"), "").expect("a file");
    assert_eq!(clean_up_in(journal.path()), CleanUp::default(), "a lock says nothing");
    std::fs::write(folder.join("settings"), "whatever").expect("a file");
    let CleanUp { reported, failed } = clean_up_in(journal.path());
    assert!(reported.join("\n").contains("gone0 is gone") && !failed, "{reported:?}");
    assert_eq!(clean_up_in(journal.path()), CleanUp::default());
    assert!(!folder.exists());
}

#[test]
fn entries_of_claimed_queues_go_round_the_others() {
    use super::settings::without;
    assert_eq!(without(&[0, 1, 2, 3, 3, 3], &[3]), [0, 1, 2, 0, 1, 2]);
    assert_eq!(without(&[3, 3], &[3]), [0, 0]);
    assert_eq!(without(&[2, 2], &[0, 1, 2]), [3, 3]);
    assert_eq!(without(&[], &[3]), [0; 0]);
}

#[test]
fn rings_are_described_in_words() {
    let rings = Rings { split: Some(Split::Off), threshold_bytes: Some(0) };
    let nic = Nic::new(State { split: Split::Off, threshold_bytes: 0, ..set_up() });
    assert_eq!(nic.kernel().rings(), Ok(rings));
}

#[test]
fn a_nic_that_is_not_there_is_named() {
    let error = Claim::new("no-such-nic", &wish(1, true)).expect_err("there is none");
    assert_eq!(error, NicError::NoNic { nic: "no-such-nic".into() });
    assert!(possible("no-such-nic").unsupported_reason[0].contains("no-such-nic"));
}

#[test]
fn loopback_cannot_and_says_why() {
    let lo = possible("lo");
    assert!(!lo.is_possible());
    assert!(!lo.unsupported_reason.is_empty(), "{lo:?}");
    let journal = tempfile::tempdir().expect("a folder");
    let error = Claim::in_directory(journal.path(), "lo", &wish(1, true)).expect_err("it cannot");
    assert_eq!(lo.unsupported_reason, [error.to_string()]);
    assert_eq!(std::fs::read_dir(journal.path()).expect("a folder").count(), 0, "no journal of it");
}
