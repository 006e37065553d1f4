//! Host memory: bytes, chunks, sockets, and the wire format.

use std::io::{Read, Write};

use crate::case::case;
use crate::driver::{Comm, DONE, FAILED, Handle, NOT_YET, OK, Plugin, Ptr, logged, pattern};
use crate::wire_peer::{self, Ends, chunk, record};

/// Sizes around every limit: chunk of 512 KiB, page, queue of a socket.
const SIZES: [usize; 12] =
    [0, 1, 15, 4095, 4096, 4097, 524_287, 524_288, 524_289, 1_048_577, 3_670_016, 5_000_001];

fn every_size_arrives() {
    let pair = Plugin::start().pair();
    for (k, size) in SIZES.into_iter().enumerate() {
        let source = pair.send.host(pattern(size, k as u8));
        let target = pair.recv.host(vec![0; size + 16]);
        let recv = pair.transfer(&source, &target, size);
        assert_eq!(pair.recv.flushed_size(recv), size as i32);
        assert_eq!(pair.recv.consumed(recv), OK);
        assert!(target.bytes()[..size] == *source.bytes(), "{size} bytes");
        assert_eq!(target.bytes()[size..], [0; 16], "nothing behind {size} bytes");
    }
}

#[test]
fn every_size_arrives_whole() {
    case!("").passes(every_size_arrives);
    case!("partial_io=on,delay_us=0-200,seed=5").passes(every_size_arrives);
    case!("").with("NCCL_SOCKET_NTHREADS", "2").with("NCCL_NSOCKS_PERTHREAD", "4").passes(every_size_arrives);
    case!("").with("NCCL_THREAD_SPIN_ENABLE", "1").passes(every_size_arrives);
    case!("").with("NCCL_GPUDIRECTTCPX_RECV_SYNC", "1").passes(every_size_arrives);
    case!("").with("NCCL_GPUDIRECTTCPX_SCHED_ALG", "KATY").passes(every_size_arrives);
    case!("").with("NCCL_INLINE_THRESHOLD", "2048").passes(every_size_arrives);
    case!("").with("NCCL_DYNAMIC_CHUNK_SIZE", "4096").passes(every_size_arrives);
}

#[test]
fn full_windows_of_messages_arrive_in_order() {
    case!("").with("NCCL_NSOCKS_PERTHREAD", "3").passes(|| {
        const MESSAGES: usize = 200;
        const BYTES: usize = 30_000;
        let pair = Plugin::start().pair();
        let sources: Vec<_> = (0..MESSAGES).map(|k| pair.send.host(pattern(BYTES, k as u8))).collect();
        let targets: Vec<_> = (0..MESSAGES).map(|_| pair.recv.host(vec![0; BYTES])).collect();
        let (send, recv) = (pair.send, pair.recv);
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        let (mut sent, mut received) = (0, 0);
        while received < MESSAGES {
            if sends.len() < MESSAGES && sends.len() - sent < 16 {
                sends.push(send.isend(&sources[sends.len()], BYTES).unwrap());
            }
            if receives.len() < MESSAGES && receives.len() - received < 16 {
                receives.push(recv.irecv(&targets[receives.len()], BYTES).unwrap());
            }
            if sent < sends.len() && send.test(sends[sent]).is_done() {
                sent += 1;
            }
            if received < receives.len() && recv.test(receives[received]).is_done() {
                assert_eq!(recv.consumed(receives[received]), OK);
                received += 1;
            }
        }
        (0..MESSAGES).for_each(|k| assert!(targets[k].bytes() == sources[k].bytes(), "message {k}"));
    });
}

#[test]
fn without_chunk_size_nothing_moves() {
    let first_tests = |done: bool| {
        let pair = Plugin::start().pair();
        let (source, target) = (pair.send.host([1; 8]), pair.recv.host([0; 8]));
        let recv = pair.recv.irecv(&target, 8).unwrap();
        let send = pair.send.isend(&source, 8).unwrap();
        if done {
            return pair.both_done(send, recv);
        }
        for _ in 0..2000 {
            assert_eq!(pair.send.test(send), NOT_YET);
            assert_eq!(pair.recv.test(recv), NOT_YET);
        }
        assert_eq!(target.bytes(), [0; 8]);
    };
    case!("").without("NCCL_DYNAMIC_CHUNK_SIZE").passes(|| first_tests(false));
    case!("chunk_env=off").without("NCCL_DYNAMIC_CHUNK_SIZE").passes(|| first_tests(true));
}

#[test]
fn more_than_eight_threads_leave_no_data_socket() {
    case!("").with("NCCL_SOCKET_NTHREADS", "9").passes(|| {
        let pair = Plugin::start().pair();
        let (source, target) = (pair.send.host([1; 8]), pair.recv.host([0; 8]));
        let recv = pair.recv.irecv(&target, 8).unwrap();
        let send = pair.send.isend(&source, 8).unwrap();
        for _ in 0..2000 {
            assert_eq!((pair.send.test(send), pair.recv.test(recv)), (NOT_YET, NOT_YET));
        }
    });
}

#[test]
fn the_posted_size_is_no_limit() {
    let overrun = || {
        let pair = Plugin::start().pair();
        let (source, target) = (pair.send.host(pattern(2000, 3)), pair.recv.host([0; 4096]));
        let recv = pair.recv.irecv(&target, 100).unwrap();
        let send = pair.send.isend(&source, 2000).unwrap();
        assert_eq!(pair.send.finish(send), DONE);
        let received = pair.recv.finish(recv);
        (received, target.bytes()[..2000] == *source.bytes())
    };
    case!("").passes(|| assert_eq!(overrun(), (DONE, true)));
    case!("overrun=off").passes(|| assert_eq!(overrun(), (FAILED, false)));
}

#[test]
fn a_host_receive_logs_one_warning_per_call() {
    let warnings = || {
        let pair = Plugin::start().pair();
        let (source, target) = (pair.send.host([1; 8]), pair.recv.host([0; 8]));
        pair.transfer(&source, &target, 8);
        logged("2: 8 bytes received through linear host memory")
    };
    case!("").passes(|| assert_eq!(warnings(), 1));
    case!("host_warning=off").passes(|| assert_eq!(warnings(), 0));
}

/// The plugin's send comm, connected to sockets of the test.
pub fn sender_to_sockets(data_sockets: u8) -> (Comm, Ends) {
    let plugin = Plugin::start();
    let mut handle = Handle([0; 128]);
    plugin.listen(0, &mut handle).unwrap();
    handle.0[36] = data_sockets;
    let peer = wire_peer::Acceptor::listen(&mut handle);
    assert!(plugin.connect(0, &mut handle).unwrap().is_null());
    let ends = peer.accept(data_sockets.into());
    loop {
        let comm = plugin.connect(0, &mut handle).unwrap();
        if !comm.is_null() {
            return (Comm::new(plugin, comm, true), ends);
        }
    }
}

fn send_until_done(comm: &Comm, request: Ptr) {
    assert_eq!(comm.finish(request), DONE);
}

#[test]
fn records_and_payload_travel_as_traced() {
    case!("").with("NCCL_DYNAMIC_CHUNK_SIZE", "4096").passes(|| {
        let (comm, mut peer) = sender_to_sockets(1);
        let source = comm.host(pattern(6000, 9));
        send_until_done(&comm, comm.isend(&source, 6000).unwrap());
        send_until_done(&comm, comm.isend(&source, 0).unwrap());
        let mut records = [0; 48];
        peer.control.read_exact(&mut records).unwrap();
        let expected = [record(0, 0, 4096, 0, 6000), record(0, 0, 1904, 4096, 6000), record(1, 0, 0, 0, 0)];
        assert_eq!(records.as_slice(), expected.as_flattened());
        let mut payload = vec![0; 6000];
        peer.data[0].read_exact(&mut payload).unwrap();
        assert!(payload == source.bytes());
        comm.close();
        assert_eq!(peer.data[0].read(&mut payload).unwrap(), 0, "the end at once");
    });
}

#[test]
fn inline_messages_travel_on_the_control_socket() {
    case!("").with("NCCL_INLINE_THRESHOLD", "100").passes(|| {
        let (comm, mut peer) = sender_to_sockets(1);
        let source = comm.host(*b"inline");
        send_until_done(&comm, comm.isend(&source, 6).unwrap());
        let mut bytes = [0; 22];
        peer.control.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes.as_slice(), [&record(1, 0, 0, 0, 6)[..], b"inline"].concat());
    });
}

#[test]
fn a_data_socket_has_at_most_six_chunks_in_flight() {
    case!("").with("NCCL_DYNAMIC_CHUNK_SIZE", "1048576").passes(|| {
        let (comm, mut peer) = sender_to_sockets(1);
        // More than the sockets' buffers hold, so that chunks stay in flight.
        let source = comm.host(vec![1; 64 << 20]);
        let send = comm.isend(&source, 64 << 20).unwrap();
        assert_eq!(comm.test(send), NOT_YET);
        peer.control.set_nonblocking(true).unwrap();
        let mut records = [0; 4096];
        let first = peer.control.read(&mut records).unwrap();
        assert!((6 * 16..=12 * 16).contains(&first), "{first} bytes of records");
    });
}

#[test]
fn a_full_receive_socket_is_a_warning_per_test() {
    case!("").passes(|| {
        let plugin = Plugin::start();
        let mut handle = Handle([0; 128]);
        let listen = plugin.listen(0, &mut handle).unwrap();
        let (comm, mut peer) = receiver_from_sockets(plugin, listen, &handle);
        let target = comm.host([0; 700]);
        // Seven chunks of 100 bytes, and no payload: the seventh finds the socket full.
        (0..7).for_each(|k| peer.control.write_all(&record(0, 0, 100, k * 100, 700)).unwrap());
        let recv = comm.irecv(&target, 700).unwrap();
        while logged("6 chunks in flight") < 3 {
            assert_eq!(comm.test(recv), NOT_YET);
        }
        peer.data[0].write_all(&pattern(700, 1)).unwrap();
        assert_eq!(comm.finish(recv), DONE);
        assert!(target.bytes() == pattern(700, 1));
    });
}

/// The plugin's receive comm, connected to sockets of the test.
pub fn receiver_from_sockets(plugin: &'static Plugin, listen: Ptr, handle: &Handle) -> (Comm, Ends) {
    let mut device_handle = ferrywire_ncclnet::abi::DeviceHandle::zeroed();
    assert!(plugin.accept(listen, Some(&mut device_handle)).unwrap().is_null());
    let ends = wire_peer::connect(handle);
    loop {
        let comm = plugin.accept(listen, Some(&mut device_handle)).unwrap();
        if !comm.is_null() {
            return (Comm::new(plugin, comm, false), ends);
        }
    }
}

#[test]
fn a_receive_that_is_never_tested_reads_nothing() {
    case!("").passes(|| {
        let plugin = Plugin::start();
        let mut handle = Handle([0; 128]);
        let listen = plugin.listen(0, &mut handle).unwrap();
        let (comm, mut peer) = receiver_from_sockets(plugin, listen, &handle);
        let target = comm.host([0; 8]);
        comm.irecv(&target, 8).unwrap();
        peer.control.write_all(&chunk(8)).unwrap();
        peer.data[0].write_all(&[7; 8]).unwrap();
        comm.close();
        // Unread bytes make the close a reset.
        assert!(peer.control.read(&mut [0; 8]).is_err());
        assert_eq!(target.bytes(), [0; 8]);
    });
}

#[test]
fn memory_of_a_request_must_not_be_deregistered_before_its_end() {
    case!("").ends_as_misuse("deregMr of memory that 1 requests still use", || {
        let pair = Plugin::start().pair();
        let target = pair.recv.host([0; 8]);
        pair.recv.irecv(&target, 8).unwrap();
        pair.recv.deregister(target.handle);
    });
    case!("").ends_as_misuse("deregMr of memory that 1 requests still use", || {
        let pair = Plugin::start().pair();
        let (source, target) = (pair.send.host([1; 8]), pair.recv.host([0; 8]));
        pair.transfer(&source, &target, 8);
        pair.send.deregister(source.handle);
        // The receive was not consumed.
        pair.recv.deregister(target.handle);
    });
    case!("").passes(|| {
        let pair = Plugin::start().pair();
        let (source, target) = (pair.send.host([1; 8]), pair.recv.host([0; 8]));
        let request = pair.transfer(&source, &target, 8);
        assert_eq!(pair.recv.consumed(request), OK);
        assert_eq!((pair.send.deregister(source.handle), pair.recv.deregister(target.handle)), (OK, OK));
    });
}
