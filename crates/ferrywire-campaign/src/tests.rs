//! Scenarios that failed once, each as small as it could be made.

use crate::campaign::{attempt, gpus};
use crate::scenario::{Action, EndPlan, Fault, Post, Protection, Scenario, Step, Verb};
use std::sync::{Mutex, PoisonError};

/// Two endpoints with one NIC each, a link between them, and steps with their pauses.
fn pair(steps: impl IntoIterator<Item = (u64, Action)>) -> Scenario {
    let end = EndPlan {
        nics: vec![(None, 0)],
        channels: 2,
        chunk_bytes: 8192,
        window: 64,
        crc: false,
        peer_timeout_ms: 10_000,
    };
    let connected = [(0, Action::Connect { link: 0 })];
    let steps = connected.into_iter().chain(steps).map(|(pause_us, action)| Step { pause_us, action });
    Scenario {
        seed: 1,
        benign: false,
        protection: Protection::Off,
        ends: vec![end.clone(), end],
        links: vec![(0, 1)],
        steps: steps.collect(),
    }
}

/// Held by the scenario that uses the simulated GPUs. Each sets the faults, stalls and time of the GPUs, so two would disturb each
/// other.
static GPUS: Mutex<()> = Mutex::new(());

#[track_caller]
fn holds(scenario: &Scenario) {
    let _alone = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let (outcome, result) = attempt(scenario, &gpus(7), false);
    assert!(result.is_ok(), "{result:?}");
    let connects = scenario.steps.iter().take_while(|step| !matches!(step.action, Action::Post(_)));
    let of_network = |fault: &Fault| !matches!(fault, Fault::GpuStall { .. } | Fault::GpuFail { .. });
    let meets_fault =
        connects.into_iter().any(|step| matches!(&step.action, Action::Fault(fault) if of_network(fault)));
    assert!(meets_fault || outcome.connected.contains(&0), "link 0 was not established");
}

/// Regression: a scenario without a link held, whatever failed the connect.
#[test]
fn a_connect_fails_only_for_a_reason() {
    let _alone = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    // On this path an answer takes longer than a handshake may.
    let far = |steps: Vec<(u64, Action)>| {
        let mut scenario = pair(steps.into_iter().chain([(8_000_000, Action::Poll(1))]));
        scenario.ends[1].nics = vec![(None, 4_000_000)];
        attempt(&scenario, &gpus(7), false).1
    };
    let broken = far(Vec::new()).expect_err("no fault excuses the connect");
    assert_eq!(broken.invariant, "a connect fails only for a reason");
    let reset = Fault::ResetAll { with_control: true };
    assert_eq!(far(vec![(1000, Action::Fault(reset))]), Ok(()));
}

/// Regression: an outage of a second excused every later loss of its link.
#[test]
fn a_peer_is_lost_only_for_a_recent_reason() {
    let _alone = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    // No fault of the kinds that may cost a peer: on this path its heartbeats are later than the peer timeout.
    let late = Fault::Latency { end: 1, nic: 0, us: 30_000_000 };
    let lost_after = |pause_us: u64| {
        let scenario = pair([
            (0, Action::Post(Post::plain(0, 0, 0, Verb::Write, 100))),
            (0, Action::Fault(Fault::Partition { end: 1, us: 2_000_000 })),
            (2_000_000 + pause_us, Action::Fault(late.clone())),
            (0, Action::Post(Post::plain(1, 0, 0, Verb::Write, 100))),
            (20_000_000, Action::Poll(1)),
        ]);
        attempt(&scenario, &gpus(7), false).1
    };
    assert_eq!(lost_after(0), Ok(()));
    let broken = lost_after(40_000_000).expect_err("the outage was long before the loss");
    assert_eq!(broken.invariant, "a peer is lost only for a reason");
}

/// Regression: copies of the failed run stayed queued and a stream's gate stayed shut, so later runs of the thread met GPUs with work.
#[test]
fn a_run_that_fails_leaves_no_work_on_the_gpus() {
    let _alone = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let gpus = gpus(7);
    let write =
        |id| Post { source_on_gpu: true, target_on_gpu: true, ..Post::plain(id, 0, 0, Verb::Write, 40_000) };
    let good = pair([(0, Action::Post(write(0))), (1000, Action::Post(write(1)))]);
    let (before, result) = attempt(&good, &gpus, false);
    assert!(result.is_ok() && before.connected == [0], "{result:?}");
    let failing = pair([
        (0, Action::Post(write(0))),
        (0, Action::Post(Post { stream_us: Some(20_000), ..write(1) })),
        (0, Action::Fault(Fault::GpuStall { end: 1, us: 2_000_000 })),
        (1000, Action::Post(write(2))),
        // The run fails here: there is no such link.
        (0, Action::Post(Post { link: 9, ..write(3) })),
    ]);
    let (_, result) = attempt(&failing, &gpus, false);
    assert_eq!(result.expect_err("the run fails").invariant, "nothing panics");
    assert!(!gpus.iter().any(|gpu| gpu.has_work()));
    let (after, result) = attempt(&good, &gpus, false);
    assert!(result.is_ok(), "{result:?}");
    assert_eq!(after.fingerprint, before.fingerprint);
}

/// The close returned just before the peer had ended, without an error of the peer.
#[test]
fn a_close_whose_time_is_up_leaves_a_closed_peer() {
    for (side, timeout_us) in (0..40).map(|number| (number % 2, 7 + 531 * number as u64)) {
        holds(&pair([
            (0, Action::Post(Post::plain(0, 0, 1, Verb::Write, 7000))),
            (0, Action::Fault(Fault::Partition { end: 0, us: 3_000_000 })),
            (100, Action::ClosePeer { link: 0, side, timeout_us, meanwhile: None }),
        ]));
    }
}

/// The read failed with an error that named the peer.
#[test]
fn a_read_into_memory_that_is_deregistered_names_the_memory() {
    holds(&pair([
        (0, Action::Post(Post::plain(0, 0, 0, Verb::Read, 40_000))),
        (60, Action::Deregister { op: 0, of_source: false }),
    ]));
}

/// Messages past the credit of the receiver go out as it receives.
#[test]
fn more_messages_than_the_receiver_holds() {
    let posts = |verb, side: usize, first: usize| {
        let post = move |id| (0, Action::Post(Post::plain(id, 0, side, verb, 65_536)));
        (first..first + 80).map(post)
    };
    holds(&pair(posts(Verb::Send { tag: 1 }, 0, 0).chain(posts(Verb::Recv { tag: 1 }, 1, 80))));
}

/// Such an endpoint reported work at each poll, so that a caller that pauses after polls without work never did.
#[test]
fn an_endpoint_that_waits_for_a_stalled_gpu_reports_no_work() {
    let write = Post { source_on_gpu: true, ..Post::plain(0, 0, 0, Verb::Write, 40_000) };
    holds(&pair([
        (0, Action::Fault(Fault::GpuStall { end: 0, us: 2_000_000 })),
        (0, Action::Post(write)),
        (1_000_000, Action::Post(Post::plain(1, 0, 1, Verb::Write, 100))),
    ]));
}

/// Regression: such a send counted as one that waits for its receive, so the run ended before the acknowledgement came.
#[test]
fn a_send_that_was_received_is_waited_for() {
    let one_way = Fault::Cut { end: 1, nic: 0, out: true, into: false, us: 10_000_000 };
    for pause_us in (0..10).map(|number| 250_000 * number) {
        holds(&pair([
            (100_000, Action::Post(Post::plain(0, 0, 1, Verb::Recv { tag: 1 }, 100))),
            (0, Action::Fault(one_way.clone())),
            (0, Action::Post(Post::plain(1, 0, 0, Verb::Send { tag: 1 }, 100))),
            (pause_us, Action::Cancel(2)),
        ]));
    }
}

/// Regression: the wait returned the outcome of an operation, which was not looked up because its endpoint had stopped by then.
#[test]
fn an_endpoint_that_stops_while_a_call_waits_has_the_outcome_of_the_call() {
    for delay_us in (0..40).map(|number| 10 * number) {
        let meanwhile = Some((delay_us, Fault::Sleep { end: 0, us: 1000 }));
        let mut scenario = pair([
            (100_000, Action::Post(Post::plain(0, 0, 0, Verb::Write, 7000))),
            // This link is never connected, so the fault begins during the wait.
            (0, Action::ClosePeer { link: 1, side: 0, timeout_us: 0, meanwhile }),
            (0, Action::Wait { op: 0, timeout_us: 1_000_000 }),
        ]);
        scenario.links.push((1, 0));
        holds(&scenario);
    }
}

/// Regression: the close counted as one that had finished the send, which its user had withdrawn.
#[test]
fn a_close_need_not_finish_a_send_that_was_cancelled() {
    for pause_us in 0..10 {
        holds(&pair([
            (100_000, Action::Post(Post::plain(0, 0, 1, Verb::Send { tag: 1 }, 2000))),
            (10 * pause_us, Action::Fault(Fault::ResetAll { with_control: true })),
            (0, Action::Cancel(0)),
            (0, Action::CloseEnd { end: 1, timeout_us: 3_000_000, meanwhile: None }),
        ]));
    }
}

/// Regression: the read failed with `AccessRefused`: the refusal of the answer that was lost with a channel overtook
/// the goodbye of the end that closed.
#[test]
fn a_read_whose_answer_is_lost_while_the_peer_closes_is_not_refused() {
    let post = |id, side, verb, bytes| Post::plain(id, 0, side, verb, bytes);
    let notify = |id, number| Post { notify: Some(number), ..post(id, 0, Verb::Notify, 0) };
    let (send, recv) = (|tag| Verb::Send { tag }, |tag| Verb::Recv { tag });
    let cut = |us| Fault::Partition { end: 1, us };
    let mut scenario = pair([
        (7, Action::Post(Post { blocks: 9, regions: 2, ..post(0, 0, Verb::Write, 5466) })),
        (0, Action::Post(post(1, 1, send(1), 5933))),
        (3, Action::Post(post(2, 0, recv(1), 5933))),
        (1799, Action::Post(post(3, 0, Verb::Write, 22))),
        (1474, Action::Post(Post { blocks: 7, ..post(8, 1, send(2), 421) })),
        (7, Action::Post(Post { blocks: 7, ..post(9, 0, recv(2), 421) })),
        (25, Action::Fault(cut(4658))),
        (181, Action::Post(post(10, 1, Verb::Read, 0))),
        (0, Action::Post(post(11, 0, Verb::Write, 13))),
        (4, Action::Post(notify(12, 57))),
        (0, Action::Post(post(13, 1, recv(2), 645))),
        (0, Action::Post(post(14, 0, send(2), 1))),
        (0, Action::Post(post(15, 0, Verb::Write, 2690))),
        (8, Action::Cancel(8)),
        (2903, Action::Post(Post { blocks: 2, regions: 3, raw: true, ..post(16, 0, Verb::Read, 221) })),
        (0, Action::Post(post(17, 1, Verb::Write, 0))),
        (0, Action::Post(notify(18, 45))),
        (0, Action::Fault(Fault::Corrupt { times: 3 })),
        (0, Action::ClosePeer { link: 0, side: 1, timeout_us: 2491, meanwhile: Some((119, cut(44))) }),
    ]);
    scenario.benign = true;
    scenario.ends.iter_mut().for_each(|end| (end.crc, end.chunk_bytes) = (true, 4096));
    scenario.ends[0].nics = vec![(Some(200_000_000), 1), (None, 0), (Some(20_000_000), 0)];
    scenario.ends[1].nics = vec![(Some(4_000_000), 6613), (None, 0)];
    (scenario.ends[0].channels, scenario.ends[1].channels) = (4, 1);
    scenario.ends[0].window = 8;
    scenario.seed = 25_318;
    holds(&scenario);
}
