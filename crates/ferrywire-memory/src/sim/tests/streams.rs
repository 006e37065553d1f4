use super::*;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn a_stream_keeps_its_order() {
    let gpu = SimGpu::open(0).unwrap();
    let buffer = gpu.alloc(4096, 4096).unwrap();
    let stream = gpu.stream();
    for value in 0..200u8 {
        stream.fill(buffer.address(), value, 4096).unwrap();
    }
    stream.wait(SOON).unwrap();
    assert_eq!(gpu.read_to_vec(buffer.address(), 4096).unwrap(), [199; 4096]);
}

#[test]
fn order_holds_under_delays() {
    let gpu = SimGpu::open(4).unwrap();
    let copy_delay = Duration::ZERO..=Duration::from_micros(200);
    gpu.set_faults(SimFaults { seed: 5, copy_delay, ..SimFaults::default() });
    let buffer = gpu.alloc(200, 4096).unwrap();
    let mut seen = [0u8; 64];
    let stream = gpu.stream();
    for (value, byte) in seen.iter_mut().enumerate() {
        stream.fill(buffer.address(), value as u8, 200).unwrap();
        // SAFETY: `seen` outlives the wait, and is not used before it.
        unsafe { stream.to_host(buffer.address() + 199, byte, 1).unwrap() };
    }
    stream.wait(SOON).unwrap();
    drop(stream);
    assert!(seen.iter().copied().eq(0..64), "{seen:?}");
}

#[test]
fn an_event_is_not_done_before_what_is_ahead_of_it() {
    let gpu = SimGpu::open(5).unwrap();
    let buffer = gpu.alloc(4096, 4096).unwrap();
    let (stream, event) = (gpu.stream(), SimEvent::new());
    assert_eq!(event.query(), Ok(true));
    gpu.set_stall(true);
    stream.fill(buffer.address(), 8, 4096).unwrap();
    stream.record(&event).unwrap();
    assert_eq!(event.query(), Ok(false));
    assert_eq!(stream.query(), Ok(false));
    let waited = Duration::from_millis(20);
    assert_eq!(event.wait(waited), Err(SimGpuError::TimedOut { gpu: 5, what: "an event", waited }));
    assert_eq!(stream.wait(waited), Err(SimGpuError::TimedOut { gpu: 5, what: "a stream", waited }));
    gpu.set_stall(false);
    event.wait(SOON).unwrap();
    assert_eq!(event.query(), Ok(true));
    assert_eq!(gpu.read_to_vec(buffer.address(), 1).unwrap(), [8]);
}

#[test]
fn an_event_does_not_wait_for_what_is_behind_it() {
    let (gpu, other) = (SimGpu::open(0).unwrap(), SimGpu::open(6).unwrap());
    let buffer = gpu.alloc(4096, 4096).unwrap();
    let (stream, blocker, event, never) = (gpu.stream(), other.stream(), SimEvent::new(), SimEvent::new());
    other.set_stall(true);
    blocker.record(&never).unwrap();
    stream.record(&event).unwrap();
    stream.wait_event(&never).unwrap();
    stream.fill(buffer.address(), 1, 1).unwrap();
    event.wait(SOON).unwrap();
    assert_eq!(stream.query(), Ok(false));
    other.set_stall(false);
    stream.wait(SOON).unwrap();
}

#[test]
fn a_stream_that_waits_does_not_hold_up_another() {
    let (gpu, other) = (SimGpu::open(0).unwrap(), SimGpu::open(7).unwrap());
    let buffer = gpu.alloc(4096, 4096).unwrap();
    let (held, free, blocker, event) = (gpu.stream(), gpu.stream(), other.stream(), SimEvent::new());
    other.set_stall(true);
    blocker.record(&event).unwrap();
    held.wait_event(&event).unwrap();
    held.fill(buffer.address(), 1, 1).unwrap();
    free.fill(buffer.address() + 1, 2, 1).unwrap();
    free.wait(SOON).unwrap();
    assert_eq!(held.query(), Ok(false));
    assert_eq!(gpu.read_to_vec(buffer.address(), 2).unwrap(), [0, 2]);
    other.set_stall(false);
    held.wait(SOON).unwrap();
    assert_eq!(gpu.read_to_vec(buffer.address(), 2).unwrap(), [1, 2]);
}

#[test]
fn streams_of_two_gpus_hand_over_by_an_event() {
    let (first, second) = (SimGpu::open(0).unwrap(), SimGpu::open(1).unwrap());
    let (from, to) = (first.alloc(1 << 20, 4096).unwrap(), second.alloc(1 << 20, 4096).unwrap());
    let (producer, consumer, event) = (first.stream(), second.stream(), SimEvent::new());
    for round in 1..100u8 {
        producer.fill(from.address(), round, 1 << 20).unwrap();
        producer.record(&event).unwrap();
        consumer.wait_event(&event).unwrap();
        consumer.copy(from.address(), to.address(), 1 << 20).unwrap();
        consumer.record(&event).unwrap();
        producer.wait_event(&event).unwrap();
        if round % 33 == 0 {
            event.wait(SOON).unwrap();
            assert_eq!(second.checksum(to.address(), 1 << 20), first.checksum(from.address(), 1 << 20));
            assert_eq!(second.read_to_vec(to.address() + (1 << 20) - 1, 1).unwrap(), [round]);
        }
    }
}

#[test]
fn a_failure_is_sticky_and_keeps_its_cause() {
    let gpu = SimGpu::open(0).unwrap();
    let buffer = gpu.alloc(100, 4096).unwrap();
    let (stream, before, behind) = (gpu.stream(), SimEvent::new(), SimEvent::new());
    let (base, len) = (buffer.address(), 100);
    let cause = SimGpuError::OutOfRange { address: base, bytes: 101, base, len };
    stream.record(&before).unwrap();
    // The second is enqueued before or after the first has failed; either way it does not run.
    let all = stream
        .fill(base, 1, 101)
        .and_then(|()| stream.fill(base, 2, 100))
        .and_then(|()| stream.record(&behind));
    assert!(all.is_ok() || all == Err(cause.clone()));
    assert_eq!(stream.wait(SOON), Err(cause.clone()));
    assert_eq!(stream.query(), Err(cause.clone()));
    assert_eq!(stream.fill(base, 3, 1), Err(cause.clone()));
    assert_eq!(stream.record(&behind), Err(cause.clone()));
    assert_eq!(behind.wait(SOON), Err(cause.clone()));
    assert_eq!(behind.query(), Err(cause.clone()));
    assert_eq!(before.wait(SOON), Ok(()));
    // Streams that wait for the failed stream fail with it; others do not.
    let (waiter, other) = (gpu.stream(), gpu.stream());
    waiter.wait_event(&behind).unwrap();
    assert_eq!(waiter.wait(SOON), Err(cause));
    other.fill(base, 4, 1).unwrap();
    other.wait(SOON).unwrap();
    assert_eq!(gpu.read_to_vec(base, 2).unwrap(), [4, 0]);
}

#[test]
fn work_behind_a_failure_is_not_done() {
    let gpu = SimGpu::open(8).unwrap();
    let buffer = gpu.alloc(100, 4096).unwrap();
    let (stream, behind) = (gpu.stream(), SimEvent::new());
    gpu.set_stall(true);
    stream.fill(buffer.address(), 1, 101).unwrap();
    stream.fill(buffer.address(), 2, 100).unwrap();
    stream.record(&behind).unwrap();
    gpu.set_stall(false);
    let cause = behind.wait(SOON).unwrap_err();
    assert!(matches!(cause, SimGpuError::OutOfRange { bytes: 101, .. }), "{cause}");
    assert_eq!(gpu.read_to_vec(buffer.address(), 100).unwrap(), [0; 100]);
}

#[test]
fn a_dropped_stream_touches_nothing_more() {
    let gpu = SimGpu::open(9).unwrap();
    let buffer = gpu.alloc(100, 4096).unwrap();
    let (stream, event, mut host) = (gpu.stream(), SimEvent::new(), vec![5u8; 100]);
    gpu.set_stall(true);
    // SAFETY: `host` outlives the stream.
    unsafe { stream.to_host(buffer.address(), host.as_mut_ptr(), 100).unwrap() };
    stream.record(&event).unwrap();
    drop(stream);
    gpu.set_stall(false);
    assert_eq!(event.wait(SOON), Err(SimGpuError::StreamDropped { gpu: 9 }));
    // The engine has done other work since, and not this.
    gpu.fill(buffer.address(), 6, 100).unwrap();
    assert_eq!(host, [5; 100]);
}

#[test]
fn many_streams_at_once_do_all_their_work() {
    const STREAMS: usize = 8;
    const ROUNDS: usize = 200;
    let gpu = SimGpu::open(0).unwrap();
    let buffer = gpu.alloc(STREAMS * 8192, 4096).unwrap();
    std::thread::scope(|scope| {
        for number in 0..STREAMS {
            let (gpu, base) = (gpu.clone(), buffer.address() + (number * 8192) as u64);
            scope.spawn(move || {
                let (stream, mut back) = (gpu.stream(), vec![0; 4096]);
                for round in 0..ROUNDS {
                    let data = pattern(4096, (number * ROUNDS + round) as u64);
                    // SAFETY: both outlive the wait.
                    unsafe {
                        stream.from_host(data.as_ptr(), base, 4096).unwrap();
                        stream.copy(base, base + 4096, 4096).unwrap();
                        stream.to_host(base + 4096, back.as_mut_ptr(), 4096).unwrap();
                    }
                    stream.wait(SOON).unwrap();
                    assert_eq!(back, data, "stream {number}, round {round}");
                }
            });
        }
    });
}

#[test]
fn the_current_gpu_is_the_threads_own() {
    let _gpus = [SimGpu::open(0).unwrap(), SimGpu::open(1).unwrap()];
    std::thread::spawn(|| {
        assert_eq!(current(), None);
        set_current(1).unwrap();
        let seen = with_current(0, || {
            assert_eq!(with_current(1, current), Ok(Some(1)));
            assert_eq!(std::thread::spawn(current).join().unwrap(), None);
            assert_eq!(with_current(16, || panic!("done")), Err(SimGpuError::NotOpen { index: 16 }));
            current()
        });
        assert_eq!((seen, current()), (Ok(Some(0)), Some(1)));
        std::panic::catch_unwind(|| with_current(0, || panic!("on purpose"))).unwrap_err();
        assert_eq!(current(), Some(1));
    })
    .join()
    .unwrap();
}

#[test]
fn a_stepped_gpu_works_when_it_is_told_the_time() {
    let gpu = SimGpu::open(15).unwrap();
    let copy_delay = Duration::from_micros(10)..=Duration::from_micros(10);
    gpu.set_faults(SimFaults { copy_delay, ..SimFaults::default() });
    gpu.step();
    let (buffer, stream) = (gpu.alloc(4096, 4096).unwrap(), gpu.stream());
    stream.fill(buffer.address(), 7, 4096).unwrap();
    stream.fill(buffer.address(), 8, 4096).unwrap();
    let at = |us| gpu.run_due(Duration::from_micros(us));
    assert!(!at(100) && !at(109), "the first one is not due");
    assert!(at(110) && !at(119) && stream.query() == Ok(false), "the second one is not due");
    assert!(at(120) && stream.query() == Ok(true));
    assert_eq!(gpu.read_to_vec(buffer.address(), 1).unwrap(), [8], "a wait does the work");
    gpu.set_stall(true);
    stream.fill(buffer.address(), 9, 4096).unwrap();
    assert!(!at(1000) && stream.query() == Ok(false), "a stalled GPU does nothing");
    assert_eq!(stream.wait(SOON), Ok(()), "until its stall is over");
    assert_eq!(gpu.read_to_vec(buffer.address(), 1).unwrap(), [9]);
}

/// Regression: the second caller began the next item of a stream while the first one was at the one before it.
#[test]
fn two_callers_that_step_a_gpu_keep_the_order_of_a_stream() {
    const BYTES: usize = 1 << 20;
    let gpu = SimGpu::open(14).unwrap();
    gpu.step();
    let buffer = gpu.alloc(BYTES, 4096).unwrap();
    let mut copies: Vec<(u8, SimStream, Vec<u8>)> =
        (1..=50).map(|value| (value, gpu.stream(), vec![0; BYTES])).collect();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let runs = || {
            while !over.load(Ordering::Relaxed) {
                gpu.run_due(Duration::ZERO);
            }
        };
        let callers = [scope.spawn(runs), scope.spawn(runs)];
        let ended = copies.iter_mut().try_for_each(|(value, stream, seen)| {
            stream.fill(buffer.address(), *value, BYTES)?;
            // SAFETY: `seen` is freed after the stream, whose end is the end of the copy.
            unsafe { stream.to_host(buffer.address(), seen.as_mut_ptr(), BYTES)? };
            stream.wait(SOON)
        });
        over.store(true, Ordering::Relaxed);
        callers.into_iter().for_each(|caller| caller.join().unwrap());
        assert_eq!(ended, Ok(()));
    });
    for (value, stream, seen) in copies {
        drop(stream);
        assert!(
            seen.iter().all(|byte| *byte == value),
            "copy {value} began before the fill ahead of it had ended"
        );
    }
}
