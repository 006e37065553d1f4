//! Requests: their number, the order of tests, the progress of one `test`, and consuming.

use std::io::Read;
use std::ptr;

use crate::case::case;
use crate::data::sender_to_sockets;
use crate::driver::{DONE, NOT_YET, OK, Pair, Plugin, Ptr, REFUSED, SENTINEL, Tested, pattern};

#[test]
fn the_seventeenth_request_is_refused_with_3() {
    let post = |slots: usize, seventeenth: Result<Ptr, i32>| {
        let pair = Plugin::start().pair();
        let (source, target) = (pair.send.host([1; 8]), pair.recv.host([0; 8]));
        for _ in 0..slots {
            assert!(!pair.send.isend(&source, 8).unwrap().is_null());
            assert!(!pair.recv.irecv(&target, 8).unwrap().is_null());
        }
        assert_eq!(pair.send.isend(&source, 8), seventeenth);
        assert_eq!(pair.recv.irecv(&target, 8), seventeenth);
    };
    case!("").passes(|| post(16, Err(3)));
    case!("slots=4").passes(|| post(4, Err(3)));
    case!("full=null").passes(|| post(16, Ok(ptr::null_mut())));
}

#[test]
fn a_finished_receive_keeps_its_slot_until_it_is_consumed() {
    case!("").passes(|| {
        let pair = Plugin::start().pair();
        let (source, target) = (pair.send.host([1; 8]), pair.recv.host([0; 8]));
        let finished: Vec<Ptr> = (0..16).map(|_| pair.transfer(&source, &target, 8)).collect();
        assert!(pair.send.isend(&source, 8).is_ok(), "a finished send is free at once");
        assert_eq!(pair.recv.irecv(&target, 8), Err(3));
        assert_eq!(pair.recv.consumed(finished[0]), OK);
        assert_eq!(pair.recv.irecv(&target, 8), Ok(finished[0]), "the same address comes back");
        assert_eq!(pair.recv.irecv(&target, 8), Err(3));
    });
}

/// Two messages posted at both ends, and tested until both sends are in transmission.
fn two_in_transmission(pair: &Pair) -> [Ptr; 2] {
    let (source, target) = (pair.send.host([1; 8]), pair.recv.host([0; 8]));
    let sends = [0, 1].map(|_| pair.send.isend(&source, 8).unwrap());
    (0..2).for_each(|_| assert!(pair.recv.irecv(&target, 8).is_ok()));
    std::mem::forget((source, target));
    sends
}

#[test]
fn only_the_head_may_be_tested() {
    let test_second = |answer: &dyn Fn(Tested)| {
        let pair = Plugin::start().pair();
        let [first, second] = two_in_transmission(&pair);
        // Nothing is in transmission before the first call; that call admits and schedules the first.
        let tested = pair.send.test(second);
        answer(tested);
        assert_eq!(pair.send.finish(first), DONE);
        // A request that is done is nobody's any more, and is never done again.
        if tested != DONE {
            assert_eq!(pair.send.finish(second), DONE);
        }
    };
    case!("").passes(|| test_second(&|tested| assert_eq!(tested, REFUSED)));
    // One call moves both forward; the second may be done immediately.
    case!("head_only=off,one_step=off").passes(|| test_second(&|tested| assert_eq!(tested.code, OK)));
}

#[test]
fn a_request_tested_out_of_turn_ends_once_with_head_only_off() {
    case!("head_only=off,one_step=off").passes(|| {
        let pair = Plugin::start().pair();
        let [first, second] = two_in_transmission(&pair);
        assert_eq!(pair.send.finish(second), DONE);
        assert_eq!(pair.send.finish(first), DONE);
        let source = pair.send.host([1; 8]);
        (0..16).for_each(|_| assert!(pair.send.isend(&source, 8).is_ok(), "all slots are free"));
    });
}

#[test]
fn a_test_with_nothing_in_transmission_is_not_done_and_no_error() {
    case!("").passes(|| {
        let pair = Plugin::start().pair();
        let target = pair.recv.host([0; 8]);
        let requests = [0, 1].map(|_| pair.recv.irecv(&target, 8).unwrap());
        // Without a control message both stay before transmission, so the second is no error either.
        for request in requests {
            assert_eq!(pair.recv.test(request), NOT_YET);
        }
    });
}

#[test]
fn one_step_per_test_call() {
    let records_after_one_call = || {
        let (comm, mut peer) = sender_to_sockets(1);
        let source = comm.host([1; 8]);
        let sends = [0; 3].map(|_| comm.isend(&source, 0).unwrap());
        assert_eq!(comm.test(sends[0]), DONE);
        comm.close();
        let mut records = Vec::new();
        peer.control.read_to_end(&mut records).unwrap();
        records.len() / 16
    };
    case!("").passes(|| assert_eq!(records_after_one_call(), 1));
    case!("one_step=off").passes(|| assert_eq!(records_after_one_call(), 3));
}

#[test]
fn isend_alone_moves_nothing() {
    case!("").passes(|| {
        let pair = Plugin::start().pair();
        let (source, target) = (pair.send.host([1; 8]), pair.recv.host([0; 8]));
        let send = pair.send.isend(&source, 8).unwrap();
        let recv = pair.recv.irecv(&target, 8).unwrap();
        for _ in 0..1000 {
            assert_eq!(pair.recv.test(recv), NOT_YET);
        }
        pair.both_done(send, recv);
    });
}

#[test]
fn sizes_are_never_written() {
    let size_of_a_finished_one = || {
        let pair = Plugin::start().pair();
        let (source, target) = (pair.send.host([1; 100]), pair.recv.host([0; 200]));
        let recv = pair.recv.irecv(&target, 200).unwrap();
        let send = pair.send.isend(&source, 100).unwrap();
        let sent = pair.send.finish(send);
        (sent.size, pair.recv.finish(recv).size)
    };
    case!("").passes(|| assert_eq!(size_of_a_finished_one(), (SENTINEL, SENTINEL)));
    case!("sizes=write").passes(|| assert_eq!(size_of_a_finished_one(), (100, 100)));
}

#[test]
fn iflush_returns_the_true_size_of_a_finished_receive() {
    case!("").passes(|| {
        let pair = Plugin::start().pair();
        let (source, target) = (pair.send.host(pattern(300, 1)), pair.recv.host([0; 4096]));
        let recv = pair.recv.irecv(&target, 4096).unwrap();
        let send = pair.send.isend(&source, 300).unwrap();
        pair.both_done(send, recv);
        assert_eq!(pair.recv.flushed_size(recv), 300);
        assert_eq!(pair.recv.consumed(recv), OK);
    });
    case!("").ends_as_misuse("iflush of something that is no request", || {
        let pair = Plugin::start().pair();
        let not_a_request = [0_u64; 4];
        pair.recv.flushed_size((&raw const not_a_request).cast_mut().cast());
    });
}

#[test]
fn irecv_consumed_out_of_order_gives_3() {
    let consume = |second_first: i32| {
        let pair = Plugin::start().pair();
        let (source, target) = (pair.send.host([1; 8]), pair.recv.host([0; 8]));
        let [first, second] = [0, 1].map(|_| pair.transfer(&source, &target, 8));
        assert_eq!(pair.recv.consumed(second), second_first);
        assert_eq!(pair.recv.consumed(first), OK);
        if second_first != OK {
            assert_eq!(pair.recv.consumed(second), OK, "refusing was harmless");
        }
        assert_eq!(pair.recv.consumed(first), 3, "twice");
    };
    case!("").passes(|| consume(3));
    case!("consume_order=off").passes(|| consume(OK));
}

#[test]
fn an_empty_receive_is_consumed_whatever_its_place() {
    case!("").passes(|| {
        let pair = Plugin::start().pair();
        let (source, target) = (pair.send.host([1; 8]), pair.recv.host([0; 8]));
        let full = pair.transfer(&source, &target, 8);
        let empty = pair.transfer(&source, &target, 0);
        assert_eq!(pair.recv.consumed(empty), OK);
        assert_eq!(pair.recv.consumed(full), 3, "its place was freed in place of the empty one's");
    });
}

#[test]
fn n_must_be_1() {
    case!("").passes(|| {
        let pair = Plugin::start().pair();
        let (source, target) = (pair.send.host([1; 8]), pair.recv.host([0; 8]));
        assert_eq!(pair.recv.irecv_n(2, &target, 8), Err(3));
        assert_eq!(pair.recv.irecv_n(0, &target, 8), Err(3));
        let recv = pair.transfer(&source, &target, 8);
        assert_eq!(pair.recv.consumed_n(2, recv), 3);
        assert_eq!(pair.recv.consumed(recv), OK);
    });
}

#[test]
fn a_null_memory_handle_gives_3() {
    case!("").passes(|| {
        let pair = Plugin::start().pair();
        let bytes = [0_u8; 8];
        assert_eq!(pair.send.isend_raw(bytes.as_ptr() as u64, 8, ptr::null_mut()), Err(3));
        assert_eq!(pair.send.deregister(ptr::null_mut()), OK);
        let memory = pair.send.host([0; 8]);
        assert_eq!(pair.send.deregister(memory.handle), OK);
    });
    case!("").ends_as_misuse("deregMr of something that is no memory handle", || {
        let pair = Plugin::start().pair();
        let memory = pair.send.host([0; 8]);
        assert_eq!(pair.send.deregister(memory.handle), OK);
        pair.send.deregister(memory.handle);
    });
}

#[test]
fn two_threads_in_one_comm_are_misuse() {
    let beside = |times: usize| {
        let pair = Plugin::start().pair();
        let target = pair.recv.host([0; 8]);
        let (recv, request) = (pair.recv, pair.recv.irecv(&target, 8).unwrap() as usize);
        let test_often = move || (0..times).for_each(|_| assert_eq!(recv.test(request as Ptr), NOT_YET));
        let other = std::thread::spawn(test_often);
        test_often();
        other.join().unwrap();
    };
    case!("").ends_as_misuse("test while another thread is inside the same comm", || {
        beside(usize::MAX);
    });
    case!("one_thread=off").passes(|| beside(50_000));
}
