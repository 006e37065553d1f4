use crate::device::{MESSAGE_BYTES, Plain, failure};
use crate::plugin::*;
use ferrywire::ErrorKind;
use ferrywire_memory::Error;
use ferrywire_memory::sim::{SimFaults, SimGpuError};
use ferrywire_memory::unpack::{Fragment, Gather, UnpackMode};
use rand::Rng;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Duration;

const BYTES: usize = 20_000;

/// A message in a slot, started.
struct Started {
    slot: usize,
    sent: Vec<u8>,
    fragments: Vec<Fragment>,
    target: Destination,
}

fn start(plugin: &Plugin, gather: &mut Gather, slot: usize, seed: u64) -> ferrywire_memory::Result<Started> {
    let rng = &mut rng(seed);
    let sent = message(rng, BYTES);
    let fragments = scattered(rng, slot, BYTES, 40);
    let target = Destination::new(&plugin.gpu, BYTES, seed as usize % 64);
    plugin.deliver(slot, &sent, &fragments);
    gather.start(slot as u64, target.address(), target.len(), BYTES as u64)?;
    Ok(Started { slot, sent, fragments, target })
}

#[test]
fn the_pages_are_needed_until_poll_says_done_and_not_after() {
    let plugin = Plugin::new(3);
    for mode in GATHERING {
        let mut gather = plugin.gather(mode);
        plugin.gpu.set_stall(true);
        let early = start(&plugin, &mut gather, 0, 1).unwrap();
        for _ in 0..100 {
            assert!(gather.poll(0).is_pending(), "{mode}");
        }
        // Given back too early: what is gathered are recycled pages.
        plugin.recycle(&early.fragments);
        plugin.gpu.set_stall(false);
        assert_eq!(finish(&mut gather, 0), Ok(BYTES as u64));
        assert!(early.target.contents() == [POISON; BYTES], "{mode}");

        let good = start(&plugin, &mut gather, 1, 2).unwrap();
        assert_eq!(finish(&mut gather, 1), Ok(BYTES as u64));
        plugin.recycle(&good.fragments);
        plugin.tell(1, &[Fragment::default(); 2048], 2048);
        assert!(good.target.contents() == good.sent, "{mode}");
    }
}

#[test]
fn fragments_that_arrive_while_the_gpu_is_busy_join_one_kernel() {
    let plugin = Plugin::new(4);
    let mut gather = plugin.gather(UnpackMode::Kernel);
    plugin.gpu.set_stall(true);
    let all: Vec<Started> = (0..16)
        .map(|slot| {
            let started = start(&plugin, &mut gather, slot, slot as u64).unwrap();
            assert!(gather.poll(0).is_pending());
            started
        })
        .collect();
    assert_eq!(gather.launches(), 2);
    plugin.gpu.set_stall(false);
    for one in all.iter().rev() {
        assert_eq!(finish(&mut gather, one.slot as u64), Ok(BYTES as u64));
        assert!(one.target.contents() == one.sent);
    }
    assert_eq!(gather.launches(), 3);
}

#[test]
fn a_burst_is_one_kernel() {
    let plugin = Plugin::new(0);
    let mut gather = plugin.gather(UnpackMode::Kernel);
    let all: Vec<Started> =
        (0..16).map(|slot| start(&plugin, &mut gather, slot, slot as u64).unwrap()).collect();
    for one in &all {
        assert_eq!(finish(&mut gather, one.slot as u64), Ok(BYTES as u64));
        assert!(one.target.contents() == one.sent);
    }
    assert_eq!(gather.launches(), 1);
}

#[test]
fn delays_change_nothing() {
    let plugin = Plugin::new(5);
    let copy_delay = Duration::ZERO..=Duration::from_micros(100);
    plugin.gpu.set_faults(SimFaults { seed: 8, copy_delay, ..SimFaults::default() });
    for mode in GATHERING {
        let mut gather = plugin.gather(mode);
        for round in 0..4 {
            let all: Vec<Started> = (0..16)
                .map(|slot| start(&plugin, &mut gather, slot, round * 16 + slot as u64).unwrap())
                .collect();
            for one in all {
                assert_eq!(finish(&mut gather, one.slot as u64), Ok(BYTES as u64));
                plugin.recycle(&one.fragments);
                assert!(one.target.contents() == one.sent, "{mode}");
            }
        }
    }
}

#[test]
fn gathers_done_before_a_failure_are_complete() {
    let plugin = Plugin::new(6);
    let mut gather = plugin.gather(UnpackMode::Kernel);
    plugin.gpu.set_faults(SimFaults { fail_after: Some(1), stall: true, ..SimFaults::default() });
    let good = start(&plugin, &mut gather, 0, 1).unwrap();
    assert!(gather.poll(0).is_pending());
    let bad = start(&plugin, &mut gather, 1, 2).unwrap();
    assert!(gather.poll(1).is_pending());
    let behind = start(&plugin, &mut gather, 2, 3).unwrap();
    plugin.gpu.set_stall(false);
    let cause = Error::SimGpu(SimGpuError::Injected { gpu: 6, operation: 1 });
    assert_eq!(finish(&mut gather, 1), Err(cause.clone()));
    assert_eq!(finish(&mut gather, 2), Err(cause.clone()));
    assert_eq!(gather.poll(0), Poll::Ready(Ok(BYTES as u64)));
    assert!(good.target.contents() == good.sent);
    bad.target.assert_untouched();
    behind.target.assert_untouched();
    // And it stays so.
    assert_eq!(start(&plugin, &mut gather, 3, 4).err(), Some(cause.clone()));
    assert_eq!(ferrywire::Error::from(cause).kind(), ErrorKind::Gpu);
}

/// The queue refuses more work when earlier work has not been polled yet.
#[test]
fn gathers_done_before_a_failure_are_complete_also_if_polled_late() {
    let mut plain = Plain::new();
    let (mut gather, target) = (plain.gather(UnpackMode::Kernel), plain.target());
    plain.knobs.quiet.store(true, Ordering::Relaxed);
    gather.start(0, target, MESSAGE_BYTES, MESSAGE_BYTES).unwrap();
    assert!(gather.poll(0).is_pending());
    plain.knobs.fail.store(true, Ordering::Relaxed);
    gather.start(1, target, MESSAGE_BYTES, MESSAGE_BYTES).unwrap();
    assert_eq!(gather.poll(1), Poll::Ready(Err(failure())));
    plain.knobs.quiet.store(false, Ordering::Relaxed);
    assert_eq!(gather.poll(0), Poll::Ready(Ok(MESSAGE_BYTES)));
    assert_eq!(gather.start(2, target, MESSAGE_BYTES, MESSAGE_BYTES), Err(failure()));
}

#[test]
fn random_failures_end_every_gather_and_nothing_is_believed_that_is_not_there() {
    let plugin = Plugin::new(7);
    let (mut failed, mut done) = (0, 0);
    for seed in 0..60 {
        let mode = GATHERING[seed as usize % 3];
        let mut gather = plugin.gather(mode);
        let copy_delay = Duration::ZERO..=Duration::from_micros(20);
        let failure_per_million = if mode == UnpackMode::Kernel { 200_000 } else { 4_000 };
        plugin.gpu.set_faults(SimFaults { seed, copy_delay, failure_per_million, ..SimFaults::default() });
        let rng = &mut rng(seed);
        let mut open: Vec<Started> = Vec::new();
        for slot in 0..16 {
            open.extend(start(&plugin, &mut gather, slot, seed * 16 + slot as u64).ok());
            if rng.random_bool(0.5) {
                let _ = open.last().map(|one| assert_outcome(&mut gather, one, &mut failed, &mut done));
                open.pop();
            }
        }
        open.iter().for_each(|one| assert_outcome(&mut gather, one, &mut failed, &mut done));
        plugin.gpu.set_faults(SimFaults::default());
    }
    assert!(failed > 50 && done > 50, "{failed} failed, {done} done");
}

fn assert_outcome(gather: &mut Gather, one: &Started, failed: &mut u32, done: &mut u32) {
    match finish(gather, one.slot as u64) {
        Ok(bytes) => {
            assert_eq!(bytes, BYTES as u64);
            assert!(one.target.contents() == one.sent);
            *done += 1;
        }
        Err(error) => {
            assert!(matches!(error, Error::SimGpu(SimGpuError::Injected { gpu: 7, .. })), "{error}");
            one.target.contents();
            *failed += 1;
        }
    }
}

#[test]
fn a_dropped_gather_touches_nothing_more() {
    let plugin = Plugin::new(8);
    for mode in GATHERING {
        let mut gather = plugin.gather(mode);
        plugin.gpu.set_stall(true);
        let all: Vec<Started> =
            (0..16).map(|slot| start(&plugin, &mut gather, slot, slot as u64).unwrap()).collect();
        assert!(gather.poll(0).is_pending());
        drop(gather);
        plugin.gpu.set_stall(false);
        // The GPU works on, and not on these.
        plugin.gpu.fill(plugin.words.address(), 0, 24).unwrap();
        all.iter().for_each(|one| one.target.assert_untouched());
        plugin.write_words(plugin.table.address(), plugin.pool.address());
    }
}

#[test]
fn connections_do_not_wait_for_one_another() {
    let (plugin, slow) = (Plugin::new(0), Plugin::new(9));
    let (mut gather, mut stalled) = (plugin.gather(UnpackMode::Kernel), slow.gather(UnpackMode::Kernel));
    slow.gpu.set_stall(true);
    let held = start(&slow, &mut stalled, 0, 1).unwrap();
    assert!(stalled.poll(0).is_pending());
    let one = start(&plugin, &mut gather, 0, 2).unwrap();
    assert_eq!(finish(&mut gather, 0), Ok(BYTES as u64));
    assert!(one.target.contents() == one.sent);
    assert!(stalled.poll(0).is_pending());
    slow.gpu.set_stall(false);
    assert_eq!(finish(&mut stalled, 0), Ok(BYTES as u64));
    assert!(held.target.contents() == held.sent);
}
