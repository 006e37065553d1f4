//! Closing and dying: the spurious error, missing reports, signals, and calls on a closed comm.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::case::case;
use crate::data::{receiver_from_sockets, sender_to_sockets};
use crate::driver::{Comm, DONE, FAILED, Handle, NOT_YET, OK, Plugin, Ptr, pattern};
use crate::wire_peer::{Ends, chunk, record};

/// The state of a connection whose end the peer's kernel has acknowledged.
const FIN_WAIT2: u8 = 5;
/// Long enough to see that a call has not returned. A shorter time could only miss a fault.
const A_WHILE: Duration = Duration::from_millis(300);

/// A receive comm of the plugin, with the test's sockets as its peer.
pub fn receiver() -> (Comm, Ends) {
    let plugin = Plugin::start();
    receiver_of(plugin)
}

fn receiver_of(plugin: &'static Plugin) -> (Comm, Ends) {
    let mut handle = Handle([0; 128]);
    let listen = plugin.listen(0, &mut handle).unwrap();
    receiver_from_sockets(plugin, listen, &handle)
}

/// Ends both sockets, and returns once the receiver's kernel has seen it.
fn finish(peer: &Ends) {
    for socket in [&peer.control, &peer.data[0]] {
        socket.shutdown(Shutdown::Write).unwrap();
        while state(socket) != FIN_WAIT2 {
            thread::yield_now();
        }
    }
}

fn state(socket: &TcpStream) -> u8 {
    let mut info = [0_u8; 8];
    let mut len = info.len() as libc::socklen_t;
    let (level, name) = (libc::IPPROTO_TCP, libc::TCP_INFO);
    // SAFETY: the kernel writes at most `len` bytes.
    let code =
        unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, info.as_mut_ptr().cast(), &mut len) };
    assert_eq!(code, 0);
    info[0]
}

/// The number of errors until the request is done.
fn errors_until_done(comm: &Comm, request: Ptr) -> usize {
    let mut errors = 0;
    loop {
        match comm.test(request) {
            FAILED => errors += 1,
            DONE => return errors,
            other => assert_eq!(other, NOT_YET),
        }
        thread::yield_now();
    }
}

#[test]
fn a_close_behind_the_last_message_gives_one_spurious_error() {
    let errors = |messages: usize| {
        let (comm, mut peer) = receiver();
        let target = comm.host([0; 8]);
        for k in 0..messages {
            peer.control.write_all(&chunk(8)).unwrap();
            peer.data[0].write_all(&[k as u8; 8]).unwrap();
        }
        finish(&peer);
        let one = |k: usize| {
            let recv = comm.irecv(&target, 8).unwrap();
            let errors = errors_until_done(&comm, recv);
            assert_eq!(target.bytes(), [k as u8; 8], "the data is good");
            assert_eq!(comm.consumed(recv), OK);
            errors
        };
        (0..messages).map(one).sum::<usize>()
    };
    case!("").passes(|| assert_eq!(errors(1), 1));
    case!("").passes(|| assert_eq!(errors(7), 1));
    // Eight records fill the buffer, so the end is not read with them.
    case!("").passes(|| assert_eq!(errors(8), 0));
    case!("").passes(|| assert_eq!(errors(13), 1));
    case!("close_error=off").passes(|| assert_eq!(errors(7), 0));
    case!("close_error=always").passes(|| assert_eq!(errors(8), 1));
}

#[test]
fn close_right_after_the_last_send_gives_at_most_one_spurious_error() {
    let runs = |most: usize| {
        let plugin = Plugin::start();
        for _ in 0..20 {
            let pair = plugin.pair();
            let source = pair.send.host(pattern(20_000, 1));
            let targets: Vec<_> = (0..4).map(|_| pair.recv.host(vec![0; 20_000])).collect();
            let receives: Vec<Ptr> = targets.iter().map(|t| pair.recv.irecv(t, 20_000).unwrap()).collect();
            let sends: Vec<Ptr> = targets.iter().map(|_| pair.send.isend(&source, 20_000).unwrap()).collect();
            sends.into_iter().for_each(|send| assert_eq!(pair.send.finish(send), DONE));
            pair.send.close();
            let errors: usize = receives.iter().map(|recv| errors_until_done(&pair.recv, *recv)).sum();
            assert!(errors <= most, "{errors} errors");
            assert!(targets.iter().all(|target| target.bytes() == source.bytes()));
            pair.recv.close();
        }
    };
    case!("").passes(|| runs(1));
    case!("close_error=off").passes(|| runs(0));
}

#[test]
fn receives_beyond_the_last_message_put_arrived_data_out_of_reach() {
    case!("").passes(|| {
        let (comm, mut peer) = receiver();
        let target = comm.host([0; 8]);
        let [oldest, _] = [0; 2].map(|_| comm.irecv(&target, 8).unwrap());
        peer.control.write_all(&chunk(8)).unwrap();
        peer.data[0].write_all(&[3; 8]).unwrap();
        finish(&peer);
        // SAFETY: the last byte of the target, which stays alive.
        let last = || unsafe { (target.address as *const u8).add(7).read_volatile() };
        while last() != 3 {
            assert_ne!(comm.test(oldest).done, 1);
            thread::yield_now();
        }
        (0..1000).for_each(|_| assert_eq!(comm.test(oldest), FAILED, "it is there, and out of reach"));
    });
}

#[test]
fn a_peer_that_dies_in_mid_message_is_silence() {
    // Counts failures of a number of tests; with `until`, of as many tests as it takes to see that many failures.
    let tests_after_death = |until: Option<usize>| {
        let (comm, mut peer) = receiver();
        let target = comm.host([0; 1000]);
        peer.control.write_all(&chunk(1000)).unwrap();
        peer.data[0].write_all(&[3; 500]).unwrap();
        finish(&peer);
        let recv = comm.irecv(&target, 1000).unwrap();
        let (mut tests, mut failures) = (0, 0);
        while until.map_or(tests < 3000, |enough| failures < enough) {
            thread::yield_now();
            let tested = comm.test(recv);
            assert_eq!(tested.done, 0);
            failures += usize::from(tested == FAILED);
            tests += 1;
        }
        failures
    };
    case!("").passes(move || assert!(tests_after_death(None) <= 1));
    // Ends.
    case!("silent_death=off,close_error=off").passes(move || assert_eq!(tests_after_death(Some(2)), 2));
}

/// Sends to a peer that has closed everything, until a test fails.
fn send_to_the_dead() {
    let (comm, peer) = sender_to_sockets(1);
    drop(peer);
    let source = comm.host(vec![1; 1000]);
    let mut oldest = None;
    loop {
        // If the window is full the failure was missed.
        let send = comm.isend(&source, 1000).unwrap();
        if comm.test(*oldest.get_or_insert(send)) == FAILED {
            return;
        }
        if comm.test(oldest.unwrap_or(send)) == FAILED {
            return;
        }
    }
}

#[test]
fn a_dead_receiver_raises_sigpipe_unless_it_is_ignored() {
    let with_sigpipe = || {
        // SAFETY: the test process has no handler of its own for the signal.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        send_to_the_dead();
    };
    case!("").dies_by(libc::SIGPIPE, "", with_sigpipe);
    case!("sigpipe=off").passes(with_sigpipe);
    // Otherwise the test process ignores SIGPIPE, as a host should.
    case!("").passes(send_to_the_dead);
}

/// Tests a request `times` times on another thread; the result is whether the thread has ended.
fn test_beside(comm: Comm, request: Ptr, times: usize) -> Arc<AtomicBool> {
    let (back, request) = (Arc::new(AtomicBool::new(false)), request as usize);
    let flag = back.clone();
    thread::spawn(move || {
        for _ in 0..times {
            comm.test(request as Ptr);
        }
        flag.store(true, Ordering::SeqCst);
    });
    back
}

fn wait_for(flag: &AtomicBool) {
    while !flag.load(Ordering::SeqCst) {
        thread::yield_now();
    }
}

#[test]
fn half_a_control_message_keeps_test_from_returning() {
    let half_a_record = |peer_lives: bool| {
        let (comm, mut peer) = receiver();
        let target = comm.host([0; 8]);
        peer.control.write_all(&chunk(8)[..8]).unwrap();
        let recv = comm.irecv(&target, 8).unwrap();
        // The end of the stream behind half a record is an error of its own; the next call waits.
        let times = if peer_lives {
            1
        } else {
            finish(&peer);
            2
        };
        (test_beside(comm, recv, times), peer)
    };
    case!("").passes(|| {
        let (back, mut peer) = half_a_record(true);
        thread::sleep(A_WHILE);
        assert!(!back.load(Ordering::SeqCst));
        peer.control.write_all(&chunk(8)[8..]).unwrap();
        wait_for(&back);
    });
    case!("").passes(|| {
        let (back, _peer) = half_a_record(false);
        thread::sleep(A_WHILE);
        assert!(!back.load(Ordering::SeqCst), "not even when the peer is gone");
    });
    case!("half_control_spin=off").passes(|| wait_for(&half_a_record(true).0));
}

#[test]
fn closing_drains_nothing() {
    case!("").with("NCCL_DYNAMIC_CHUNK_SIZE", "67108864").passes(|| {
        const BYTES: usize = 64 << 20;
        let (comm, mut peer) = sender_to_sockets(1);
        let source = comm.host(vec![1; BYTES]);
        let send = comm.isend(&source, BYTES).unwrap();
        assert_eq!(comm.test(send), NOT_YET);
        comm.close();
        let mut received = Vec::new();
        peer.data[0].read_to_end(&mut received).unwrap();
        assert!(received.len() < BYTES, "the rest was never sent");
        assert_eq!(peer.control.read(&mut [0; 16]).unwrap(), 16);
        assert_eq!(peer.control.read(&mut [0; 16]).unwrap(), 0, "the end");
    });
}

#[test]
fn a_closed_comm_and_its_requests_must_not_be_used() {
    let closed = || {
        let pair = Plugin::start().pair();
        let source = pair.send.host([1; 8]);
        let request = pair.send.isend(&source, 8).unwrap();
        pair.send.close();
        (pair.send, source, request)
    };
    case!("").ends_as_misuse("test on a comm that was closed", || {
        let (send, _, request) = closed();
        send.test(request);
    });
    case!("").ends_as_misuse("isend on a comm that was closed", || {
        let (send, source, _) = closed();
        let _ = send.isend(&source, 8);
    });
    case!("").ends_as_misuse("closeSend on a comm that was closed", || closed().0.close());
}

#[test]
fn a_record_of_no_known_type_is_an_error() {
    case!("").passes(|| {
        let (comm, mut peer) = receiver();
        let target = comm.host([0; 8]);
        let recv = comm.irecv(&target, 8).unwrap();
        peer.control.write_all(&record(7, 0, 8, 0, 8)).unwrap();
        assert_eq!(comm.finish(recv), FAILED);
    });
    case!("").passes(|| {
        let (comm, mut peer) = receiver();
        let target = comm.host([0; 8]);
        let recv = comm.irecv(&target, 8).unwrap();
        peer.control.write_all(&record(0, 9, 8, 0, 8)).unwrap();
        assert_eq!(comm.finish(recv), FAILED, "data socket 9 of 1");
    });
}

#[test]
fn records_whose_totals_differ_end_the_process() {
    let second = |record: [u8; 16]| {
        let (comm, mut peer) = receiver();
        let target = comm.host([0; 16]);
        let recv = comm.irecv(&target, 16).unwrap();
        peer.control.write_all(&self::record(0, 0, 8, 0, 16)).unwrap();
        peer.control.write_all(&record).unwrap();
        comm.finish(recv);
    };
    case!("").exits(1, "totals that differ", || second(record(0, 0, 8, 8, 24)));
    case!("").exits(1, "totals that differ", || second(record(0, 0, 9, 8, 16)));
}

#[test]
fn a_second_comm_lives_on_when_one_is_closed() {
    case!("").passes(|| {
        let plugin = Plugin::start();
        let (first, second) = (plugin.pair(), plugin.pair());
        first.send.close();
        first.recv.close();
        plugin.close_listen(first.listen);
        let (source, target) = (second.send.host(*b"alive"), second.recv.host([0; 5]));
        second.transfer(&source, &target, 5);
        assert_eq!(target.bytes(), b"alive");
    });
}
