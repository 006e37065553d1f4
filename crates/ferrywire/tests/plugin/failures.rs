//! Failures: a plugin that stalls, reports wrong results, hangs or is full, peers that die, ends that differ.

use crate::case::case;
use crate::ends::{Ends, LIMIT, builder, contents, hanging_call, loopback, pattern, plugin};
use ferrywire::{
    Block, BlockList, ConnectError, Endpoint, ErrorKind, MemoryLocation, Region, RemoteRegion, TransferError,
};
use ferrywire_memory::sim::{SimBuffer, SimFaults, SimGpu};
use ferrywire_ncclnet::log;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The stall timeout of these tests: short, but longer than any step takes.
const STALL: Duration = Duration::from_secs(4);

/// Ends with one channel, that soon notice a stall.
fn one_channel() -> Ends {
    Ends::with(|builder| builder.channels(1).threads(1).plugin(plugin().stall_timeout(STALL)))
}

/// The error that a write of a few chunks ends in.
fn failed_write(ends: &Ends) -> TransferError {
    let source = ends.connecting.register(pattern(20 << 20, 1)).unwrap();
    let target = ends.accepting.register(vec![0; 20 << 20]).unwrap();
    let write = ends.near.write(&source, 0, &target.descriptor(), 0, 20 << 20).unwrap();
    write.wait(LIMIT).unwrap_err()
}

#[track_caller]
fn says(error: &impl std::fmt::Display, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
}

#[test]
fn a_stalled_request_is_reported() {
    case!("stall_head_after=5,fault_side=recv").passes(|| {
        let ends = one_channel();
        let (error, other) = (failed_write(&ends), ends.far.wait_notification(LIMIT).unwrap_err());
        for error in [&error, &other] {
            assert_eq!(error.kind(), ErrorKind::Peer);
            says(error, &["channel 0 over lo", "plugin GPUDirectTCPX_v7 (v7) on device 0 (lo)"]);
            says(
                error,
                &["message 5 (524288 bytes) has not arrived after 4.0 s", "receiving: 16 of 16 posted"],
            );
            says(error, &["its last test gave result 0, not done", "sending: 0 of 16 posted"]);
            assert_eq!(error.to_string().matches("has not arrived").count(), 1, "once: {error}");
        }
        // The end that saw it also says what the other one said.
        says(&other, &["at the peer: ", "no channel is left"]);
    });
}

/// Regression: the plugin continued to send the memory after its reuse.
#[test]
fn nothing_is_sent_of_dropped_memory() {
    const BYTES: usize = 32 << 20;
    // As slow as to take longer than the engine waits for operations to end.
    case!("rate=300000").passes(|| {
        let ends = Ends::with(|builder| builder.channels(1).threads(1));
        let target = ends.accepting.register(vec![0; BYTES]).unwrap();
        let mut memory = vec![5_u8; BYTES];
        // SAFETY: it stays until the end.
        let region = unsafe { ends.connecting.register_raw(memory.as_mut_ptr(), BYTES) }.unwrap();
        let write = ends.near.write(&region, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
        while ends.far.stats().channels[0].lane.as_ref().unwrap().max_outstanding_receives == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(region);
        memory.fill(0xEE);
        assert!(write.wait(LIMIT).is_err());
        // Both ends are done with the connection, whether there is another by now or not.
        let began = Instant::now();
        for peer in [&ends.far, &ends.near] {
            while peer.stats().lost_channels.is_empty() && peer.poll_notification().is_ok() {
                assert!(began.elapsed() < LIMIT, "nothing was lost");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let found = contents(&target);
        assert!(found.contains(&5), "nothing was under way");
        assert!(!found.contains(&0xEE), "{} bytes", found.iter().filter(|byte| **byte == 0xEE).count());
        drop(memory);
    });
}

/// Memory handles that the plugin still had when it closed the last of so many connections. With `stats=on` it says so.
fn handles_live(comms: usize) -> usize {
    let began = Instant::now();
    loop {
        let lines = log::last_lines();
        let mut closed = lines.iter().filter_map(|line| line.text.split_once("handles_live="));
        if let Some((_, live)) = closed.nth(comms - 1) {
            return live.parse().unwrap();
        }
        assert!(began.elapsed() < LIMIT, "so many were never closed");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_lost_lane_keeps_registrations_of_the_direction_in_flight_alone() {
    // The first end's third send fails; the other end's sends and what the first receives are long done.
    case!("stats=on,test_error_after=3,fault_side=send").passes(|| {
        let ends = one_channel();
        let region = |end: &Endpoint, salt| end.register(pattern(20 << 20, salt)).unwrap();
        let (near, far) =
            ([1, 2].map(|n| region(&ends.connecting, n)), [3, 4].map(|n| region(&ends.accepting, n)));
        for (from, to) in far.iter().zip(&near) {
            let write = ends.far.write(from, 0, &to.descriptor(), 0, 1000).unwrap();
            assert_eq!(write.wait(LIMIT), Ok(1000));
        }
        let (from, to) = (&near[0], far[0].descriptor());
        let error = ends.near.write(from, 0, &to, 0, 20 << 20).unwrap().wait(LIMIT).unwrap_err();
        says(&error, &["cannot send message 3", "test of send comm"]);
        let _ = ends.connecting.close(LIMIT);
        let _ = ends.accepting.close(LIMIT);
        let live = handles_live(4);
        assert!(
            (1..=2).contains(&live),
            "{live}: of what the one end sends, and perhaps of what the other receives"
        );
    });
}

#[test]
fn an_error_of_a_send_is_final() {
    case!("test_error_after=3,fault_side=send").passes(|| {
        let ends = one_channel();
        says(
            &failed_write(&ends),
            &["cannot send message 3", "test of send comm", "result 2 (system error)"],
        );
    });
}

#[test]
fn a_first_result_2_of_a_receive_is_absorbed() {
    case!("test_error_after=3,fault_side=recv").passes(|| {
        let ends = one_channel();
        ends.write(20 << 20, 1);
        let lane = ends.far.stats().channels[0].lane.clone().unwrap();
        assert_eq!(lane.closing_results, 1);
        assert_eq!(ends.far.stats().lost_channels, [""; 0]);
        ends.close();
    });
}

#[test]
fn a_call_that_never_returns_is_named() {
    case!("test_hang_after=2,fault_side=recv").passes(|| {
        let ends = one_channel();
        let error = failed_write(&ends);
        says(&error, &["gave up", "test on device 0 (lo) has not returned for"]);
        let error = ends.far.wait_notification(LIMIT).unwrap_err();
        says(&error, &["test on device 0 (lo) has not returned for", "channels 0"]);
        let began = Instant::now();
        let _ = ends.accepting.close(Duration::from_secs(2));
        let _ = ends.connecting.close(Duration::from_secs(2));
        assert!(began.elapsed() < LIMIT);
    });
}

#[test]
fn a_memory_that_a_hanging_call_may_hold_is_not_given_back() {
    case!("test_hang_after=2,fault_side=send").passes(|| {
        let ends = one_channel();
        let mut bytes = pattern(20 << 20, 1);
        // SAFETY: the vector outlives the process's use of it: the process ends with this case.
        let source = unsafe { ends.connecting.register_raw(bytes.as_mut_ptr(), bytes.len()) }.unwrap();
        let target = ends.accepting.register(vec![0; 20 << 20]).unwrap();
        let write = ends.near.write(&source, 0, &target.descriptor(), 0, 20 << 20).unwrap();
        says(&write.wait(LIMIT).unwrap_err(), &["test on device 0 (lo) has not returned for"]);
        says(&source.deregister().unwrap_err(), &["in a call of a plugin that has not returned"]);
        std::mem::forget(bytes);
    });
}

/// Nothing ends such a transfer, so nothing but the loss of its peer can wake those who wait for it.
#[test]
fn a_transfer_in_a_hanging_call_wakes_when_it_is_lost_and_keeps_its_owner() {
    struct Tells(Vec<u8>, std::sync::mpsc::Sender<()>);
    impl Drop for Tells {
        fn drop(&mut self) {
            let _ = self.1.send(());
        }
    }
    case!("test_hang_after=2,fault_side=send").passes(|| {
        let ends = one_channel();
        let (sender, reported) = std::sync::mpsc::channel();
        let mut owner = Box::new(Tells(pattern(20 << 20, 1), sender));
        let (base, bytes) = (owner.0.as_mut_ptr(), owner.0.len());
        // SAFETY: the owner keeps the bytes.
        let source = unsafe { ends.connecting.register_with(base, bytes, owner) }.unwrap();
        let target = ends.accepting.register(vec![0; bytes]).unwrap();
        let write = ends.near.write(&source, 0, &target.descriptor(), 0, bytes as u64).unwrap();
        let wakeup = ferrywire::Wakeup::new().unwrap();
        let lost = loop {
            write.arm(&wakeup);
            assert_eq!(wakeup.wait(LIMIT), Ok(true), "nobody was woken");
            wakeup.clear();
            if let Some(outcome) = write.poll() {
                break outcome;
            }
        };
        says(&lost.unwrap_err(), &["test on device 0 (lo) has not returned for"]);
        drop(source);
        let _ = ends.connecting.close(Duration::from_secs(2));
        assert!(reported.try_recv().is_err(), "memory in the hands of a call was given back");
        // The user has dropped everything, and the call still uses the memory.
        drop((write, wakeup, target, ends));
        let given_back = reported.recv_timeout(Duration::from_secs(1));
        assert!(
            given_back.is_err(),
            "memory in the hands of a call was given back once the endpoint was dropped"
        );
    });
}

#[test]
fn a_full_plugin_is_asked_again() {
    for switches in ["slots=4", "slots=4,full=null", "slots=1,full=null"] {
        case!(switches).passes(|| {
            let ends = Ends::new();
            ends.write(12_345_678, 1);
            ends.close();
        });
    }
}

#[test]
fn quirks_that_are_off_change_nothing() {
    for switches in
        ["sizes=write", "head_only=off", "one_step=off", "null_first=off", "partial_io=on,delay_us=0-50"]
    {
        case!(switches).passes(|| {
            let ends = Ends::new();
            ends.write(5_000_000, 1);
            ends.close();
        });
    }
}

#[test]
fn a_lane_that_fails_costs_its_channel_and_no_operation() {
    case!("test_error_after=10,fault_side=send").passes(|| {
        let ends = Ends::new();
        // Small ones keep to one channel, and so to one lane, which fails in the midst of them.
        for salt in 0..15 {
            ends.write(1000, salt);
        }
        let lost = ends.near.stats().lost_channels;
        assert_eq!(lost.len(), 1, "{lost:?}");
        assert!(lost[0].contains("cannot send message 10"), "{lost:?}");
        ends.close();
    });
}

/// Ends with two channels, and a simulated GPU each.
fn with_gpus() -> (Ends, [Arc<SimGpu>; 2]) {
    let end = |index| {
        let plugin = plugin().gpu(MemoryLocation::SimGpu(index)).allow_same_host_gpu(true);
        loopback(builder().plugin(plugin))
    };
    (Ends::of(end(1), end(0)), [0, 1].map(|index| SimGpu::open(index).unwrap()))
}

/// Every second kilobyte of two regions.
fn blocks(source: &Region, target: &Region) -> BlockList {
    let block = |at: u64| Block { local_offset: at << 11, remote_offset: at << 11, bytes: 1024 };
    let blocks: Vec<Block> = (0..source.len() >> 11).map(block).collect();
    BlockList::new(source, &target.descriptor(), &blocks).unwrap()
}

/// No channel was lost, and what does not touch a GPU goes on.
#[track_caller]
fn goes_on(ends: &Ends) {
    ends.write(3_000_000, 7);
    for peer in [&ends.near, &ends.far] {
        assert_eq!(peer.stats().lost_channels, [""; 0]);
    }
}

#[test]
fn a_message_that_cannot_be_packed_costs_its_operation_alone() {
    case!("same_host=allow").passes(|| {
        let (ends, gpus) = with_gpus();
        let source = ends.connecting.alloc_sim(0, 4 << 20).unwrap();
        let target = ends.accepting.register(vec![0; 4 << 20]).unwrap();
        let list = blocks(&source, &target);
        for round in 0..4 {
            gpus[0].set_faults(SimFaults { fail_after: Some(round), ..SimFaults::default() });
            let failed = ends.near.write_blocks(&list, None, Some(b"never")).unwrap();
            let error = failed.wait(LIMIT).unwrap_err();
            assert!(matches!(error, TransferError::SimGpu(_)), "{error}");
            gpus[0].set_faults(SimFaults::default());
            goes_on(&ends);
        }
        assert_eq!(ends.far.poll_notification().unwrap(), None);
        let again = ends.near.write_blocks(&list, None, Some(b"there")).unwrap();
        again.wait(LIMIT).unwrap();
        assert_eq!(ends.far.wait_notification(LIMIT).unwrap(), b"there");
        ends.close();
    });
}

/// Memory of the GPU's that its user may free too early.
fn to_be_freed(end: &Endpoint, gpu: &Arc<SimGpu>, bytes: usize) -> (SimBuffer, Region) {
    let buffer = gpu.alloc(bytes, 4096).unwrap();
    // SAFETY: the simulated GPU refuses addresses that are freed.
    let region = unsafe { end.register_raw(buffer.as_ptr(), bytes) }.unwrap();
    (buffer, region)
}

#[test]
fn memory_of_a_gpu_that_is_freed_before_a_message_costs_its_operation_alone() {
    case!("same_host=allow").passes(|| {
        let (ends, gpus) = with_gpus();
        let source = ends.connecting.register(pattern(1 << 20, 1)).unwrap();
        // Registered with the plugin already, or not.
        for first in [true, false] {
            let (buffer, target) = to_be_freed(&ends.accepting, &gpus[1], 1 << 20);
            let (whole, scattered) = (target.descriptor(), blocks(&source, &target));
            if first {
                ends.near.write(&source, 0, &whole, 0, 1 << 20).unwrap().wait(LIMIT).unwrap();
            }
            drop(buffer);
            for write in [
                ends.near.write(&source, 0, &whole, 0, 1 << 20).unwrap(),
                ends.near.write_blocks(&scattered, None, None).unwrap(),
            ] {
                let error = write.wait(LIMIT).unwrap_err();
                assert!(matches!(&error, TransferError::AccessRefused { .. }), "{error}");
                says(&error, &["the peer's copy to GPU memory failed"]);
            }
            let read = ends.far.read(&target, 0, &source.descriptor(), 0, 1 << 20).unwrap();
            let error = read.wait(LIMIT).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Gpu, "{error}");
            goes_on(&ends);
        }
        ends.close();
    });
}

/// Over the next channel it would have failed again, until none was left.
#[test]
fn a_gather_that_fails_costs_its_channel_and_its_operation() {
    case!("same_host=allow").passes(|| {
        let (ends, gpus) = with_gpus();
        let source = ends.connecting.register(pattern(100_000, 1)).unwrap();
        let target = ends.accepting.alloc_sim(1, 100_000).unwrap();
        let write = || ends.near.write(&source, 0, &target.descriptor(), 0, 100_000).unwrap();
        gpus[1].set_faults(SimFaults { fail_after: Some(0), ..SimFaults::default() });
        let error = write().wait(LIMIT).unwrap_err();
        gpus[1].set_faults(SimFaults::default());
        says(&error, &["the peer's copy to GPU memory failed"]);
        assert_eq!(write().wait(LIMIT), Ok(100_000));
        assert!(contents(&target) == pattern(100_000, 1));
        assert_eq!(ends.far.stats().lost_channels.len(), 1, "{:?}", ends.far.stats().lost_channels);
        ends.close();
    });
}

/// Regression: the memory stayed registered, and so allocated, until its connection was closed.
#[test]
fn memory_of_a_gpu_that_is_dropped_during_a_peers_write_is_freed() {
    // The low rate leaves receives posted for the memory when it is dropped.
    case!("same_host=allow,rate=20000000").passes(|| {
        let (ends, _gpus) = with_gpus();
        let source = ends.connecting.register(pattern(16 << 20, 1)).unwrap();
        let target = ends.accepting.alloc_sim(1, 16 << 20).unwrap();
        let address = target.as_ptr() as u64;
        let write = ends.near.write(&source, 0, &target.descriptor(), 0, 16 << 20).unwrap();
        while ends.far.stats().channels.iter().all(|channel| channel.received_bytes < 1 << 20) {
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(target);
        says(&write.wait(LIMIT).unwrap_err(), &["the peer has no region with that key"]);
        let began = Instant::now();
        while SimGpu::of(address).is_some() {
            assert!(began.elapsed() < LIMIT, "it is still allocated");
            std::thread::sleep(Duration::from_millis(1));
        }
        goes_on(&ends);
        ends.close();
    });
}

#[test]
fn ends_that_differ_are_refused_before_a_session_stands() {
    case!("").passes(|| {
        let accepting = loopback(builder()).build().unwrap();
        let address = accepting.listen_addresses()[0];
        let other = builder().plugin(plugin().window(8)).build().unwrap();
        let error = other.connect(address, LIMIT).unwrap_err();
        says(&error, &["refused", "window is 16 at the end that accepts and 8 at the end that connects"]);
        let without = Endpoint::builder().build().unwrap();
        let error = without.connect(address, LIMIT).unwrap_err();
        says(&error, &["over GPUDirectTCPX_v7 at the end that accepts and over no plugin at the end that"]);
        let plain = loopback(Endpoint::builder()).build().unwrap();
        let error = other.connect(plain.listen_addresses()[0], LIMIT).unwrap_err();
        says(&error, &["over no plugin at the end that accepts and over GPUDirectTCPX_v7 at the end that"]);
    });
}

#[test]
fn a_chunk_size_that_the_user_set_wins() {
    case!("").with("NCCL_DYNAMIC_CHUNK_SIZE", "131072").passes(|| {
        let ends = Ends::new();
        assert_eq!(ends.near.stats().chunk_bytes, 131_072);
        let environment = ends.connecting.effective_environment();
        let chunk = environment.iter().find(|each| each.name == "NCCL_DYNAMIC_CHUNK_SIZE").unwrap();
        assert_eq!(chunk.value, "131072");
        ends.write(3_000_000, 1);
        ends.close();
    });
}

#[test]
fn without_any_environment_what_is_needed_is_set() {
    case!("")
        .without("NCCL_DYNAMIC_CHUNK_SIZE")
        .without("NCCL_GPUDIRECTTCPX_SOCKET_IFNAME")
        .without("NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS")
        .passes(|| {
            let ends = Ends::new();
            assert_eq!(std::env::var("NCCL_DYNAMIC_CHUNK_SIZE").unwrap(), "524288");
            assert_eq!(std::env::var("NCCL_GPUDIRECTTCPX_SOCKET_IFNAME").unwrap(), "=lo");
            ends.write(3_000_000, 1);
            ends.close();
        });
}

/// The error of an attempt to connect.
fn failed_connect(setup_timeout: Duration) -> ConnectError {
    let end = || builder().plugin(plugin().setup_timeout(setup_timeout));
    let accepting = loopback(end()).build().unwrap();
    let connecting = end().build().unwrap();
    connecting.connect(accepting.listen_addresses()[0], LIMIT).unwrap_err()
}

/// A firewall was blamed, and the log that says why was not shown.
#[test]
fn a_plugin_without_its_manager_is_reported_in_its_own_words_with_the_fix() {
    let rule = "the plugin warned: update flow steering rule: local 127.0.0.1";
    case!("dp_manager=off").with("NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX", "/run/tcpx").passes(|| {
        let error = failed_connect(LIMIT);
        says(&error, &["cannot be set up", "on device 0 (lo)", "result 3", rule]);
        says(
            &error,
            &["unix client connect() error: 2; fix: start the receive data path manager", "/run/tcpx"],
        );
        assert!(!error.to_string().contains("firewall"), "{error}");
    });
    case!("dp_manager=refuse").passes(|| {
        says(&failed_connect(LIMIT), &[rule, "FlowSteerRule Failed", "it answered and refused"]);
    });
}

#[test]
fn an_accept_that_does_not_return_is_named() {
    case!("dp_manager=hang").passes(|| {
        let (error, timeout) = hanging_call("accept on device 0 (lo) has not returned for", failed_connect);
        says(&error, &[&format!("accept has not ended after {} s", timeout.as_secs())]);
    });
}

/// The other process of [`killed_peers_are_named`]: writes to the region that it is given, without end.
#[test]
#[ignore = "the other process of another test"]
fn a_peer_to_be_killed() {
    let mut lines = BufReader::new(std::io::stdin()).lines().map(Result::unwrap);
    let address = lines.next().unwrap().parse().unwrap();
    let hex = lines.next().unwrap();
    let bytes: Vec<u8> =
        (0..hex.len() / 2).map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap()).collect();
    let remote = RemoteRegion::from_bytes(&bytes).unwrap();
    let connecting = builder().build().unwrap();
    let peer = connecting.connect(address, LIMIT).unwrap();
    let source = connecting.register(pattern(8 << 20, 1)).unwrap();
    loop {
        peer.write(&source, 0, &remote, 0, 8 << 20).unwrap().wait(LIMIT).unwrap();
    }
}

#[test]
fn killed_peers_are_named() {
    case!("").passes(|| {
        for round in 0..5u64 {
            let accepting = loopback(builder().label("survivor")).build().unwrap();
            let target = accepting.register(vec![0; 8 << 20]).unwrap();
            let mut other = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "failures::a_peer_to_be_killed", "--ignored", "--nocapture"])
                .env_remove("TCPX_RULES_CASE")
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            let hex: String =
                target.descriptor().to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
            let reported = format!("{}\n{hex}\n", accepting.listen_addresses()[0]);
            other.stdin.take().unwrap().write_all(reported.as_bytes()).unwrap();
            let peer = accepting.accept(LIMIT).unwrap();
            // In the middle of something, each time of something else.
            let some = (1 + round) * 3_000_000;
            while peer.stats().channels.iter().map(|channel| channel.received_bytes).sum::<u64>() < some {
                std::thread::sleep(Duration::from_micros(100));
            }
            other.kill().unwrap();
            other.wait().unwrap();
            let error = peer.wait_notification(LIMIT).unwrap_err();
            assert!(
                matches!(&error, TransferError::PeerLost { peer, .. } if peer.starts_with("127.0.0.1:")),
                "{error}"
            );
        }
    });
}
