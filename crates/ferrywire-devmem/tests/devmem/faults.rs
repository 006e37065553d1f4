//! Faults: headers split badly, packets lost, pools that run dry, bindings that end.

use crate::receive::hold;
use crate::vm::{self, KIB, Knob, Link, MIB, Receiver, Sender, WAY, send_all, take};
use ferrywire_devmem::sys::devmem::{Control, Fragment, Tokens};
use ferrywire_sys::affinity::{allowed_cores, on_cores};
use ferrywire_sys::socket;
use std::os::fd::AsRawFd;
use std::thread;

/// Sends bytes of the pattern while they are received.
fn transfer(
    (receiver, sender, link): (&Receiver, &Sender, &Link),
    position: usize,
    bytes: usize,
) -> vm::Tally {
    thread::scope(|scope| {
        scope.spawn(move || send_all(link, sender.id, position, bytes, 256 * KIB));
        take(link, receiver, position, bytes, WAY)
    })
}

#[test]
fn linear_and_plain_bytes_are_part_of_a_healthy_connection() {
    if !vm::is_here() {
        return;
    }
    let (receiver, sender, link) = (Receiver::new(16 * MIB), Sender::new(), Link::steered());
    let _knob = Knob::set("split_linear", 100);
    let tally = transfer((&receiver, &sender, &link), 0, 8 * MIB);
    println!("{} linear, {} plain", tally.linear_bytes, tally.plain_bytes);
    assert!(tally.linear_bytes > 0 && tally.pool_bytes > 0);
    // Packets that fit into the linear part are plain as a whole.
    let short = transfer((&receiver, &sender, &link), 8 * MIB, 50);
    assert_eq!((short.bytes(), short.pool_bytes), (50, 0));
}

#[test]
fn lost_packets_change_nothing() {
    if !vm::is_here() {
        return;
    }
    let (receiver, sender, link) = (Receiver::new(16 * MIB), Sender::new(), Link::steered());
    let _knob = Knob::set("drop_every", 97);
    assert_eq!(transfer((&receiver, &sender, &link), 0, 8 * MIB).bytes(), 8 * MIB);
}

#[test]
fn a_pool_that_ran_dry_goes_on_after_a_release() {
    if !vm::is_here() {
        return;
    }
    let (receiver, sender, link) = (Receiver::new(MIB), Sender::new(), Link::steered());
    let bytes = 8 * MIB;
    thread::scope(|scope| {
        scope.spawn(|| send_all(&link, sender.id, 0, bytes, 256 * KIB));
        let (got, mut held) = until_dry(&link, &receiver, bytes);
        println!("dry after {got} bytes, with {} fragments held", held.fragments());
        assert!(got < bytes && held.fragments() > 0);
        let reported = held.fragments();
        assert_eq!(held.release(link.near.as_raw_fd()).expect("they go back").fragments, reported);
        let way = vm::Way { batch: 32, ..WAY };
        assert_eq!(take(&link, &receiver, got, bytes - got, way).bytes(), bytes - got);
    });
}

/// Regression: a NIC's queue was polled on the CPU that sent. The CPU that received a packet frees it when another CPU has read
/// it, but only once it receives again. Retransmissions were received on the other CPU, found the pool dry, and were dropped.
#[test]
fn the_packets_of_a_queue_are_received_on_one_cpu() {
    if !vm::is_here() {
        return;
    }
    if allowed_cores().expect("the mask").len() < 2 {
        return println!("SKIPPED: needs two CPUs");
    }
    let (receiver, sender, link) = (Receiver::new(MIB), Sender::new(), Link::steered());
    let cpus = [0, 1].map(|cpu| {
        let position = cpu * 32 * KIB;
        on_cores(&[cpu], || send_all(&link, sender.id, position, 32 * KIB, 32 * KIB)).expect("both CPUs");
        take(&link, &receiver, position, 32 * KIB, WAY);
        socket::get_int(link.near.as_raw_fd(), libc::SOL_SOCKET, libc::SO_INCOMING_CPU).expect("a CPU")
    });
    assert_eq!(cpus[0], cpus[1]);
}

/// Receives and keeps fragments until nothing has arrived for a second.
fn until_dry(link: &Link, receiver: &Receiver, bytes: usize) -> (usize, Tokens) {
    let (mut got, mut held) = (0, Tokens::new());
    let (mut control, mut buffer) = (Control::new(256), vec![0; MIB]);
    let mut quiet = 0;
    while got < bytes && (quiet < 10 || held.is_empty()) {
        // SAFETY: the buffer has as many bytes.
        let received = unsafe {
            let (into, len) = (buffer.as_mut_ptr(), buffer.len());
            ferrywire_devmem::sys::devmem::receive(link.near.as_raw_fd(), into, len, &mut control)
        };
        let Ok(received) = received else {
            vm::wait(link.near.as_raw_fd(), libc::POLLIN);
            quiet += 1;
            continue;
        };
        quiet = 0;
        let mut position = got;
        got += received.bytes;
        for fragment in control.fragments() {
            if let Fragment::Pool { offset, bytes, token, .. } = fragment {
                vm::check(&receiver.pool.read(offset, bytes), position);
                held.push(token);
            }
            position += fragment.bytes() as usize;
        }
    }
    (got, held)
}

#[test]
fn queued_fragments_outlive_the_binding_and_later_bytes_are_plain() {
    if !vm::is_here() {
        return;
    }
    let (mut receiver, sender, link) = (Receiver::new(16 * MIB), Sender::new(), Link::steered());
    // Less than the first window. The send has finished with its memory, so the bytes are acknowledged and queued.
    send_all(&link, sender.id, 0, 32 * KIB, 8 * KIB);
    // A new socket replaces the first, whose bindings end.
    receiver.netdev = ferrywire_devmem::sys::netdev::Netdev::open().expect("the family");
    let state = receiver.netdev.queue(vm::index(vm::NEAR), vm::QUEUE).expect("it is there");
    assert!(state.is_free(), "{state:?}");
    let queued = take(&link, &receiver, 0, 32 * KIB, WAY);
    assert_eq!((queued.bytes(), queued.plain_bytes), (32 * KIB, 0));
    let later = transfer((&receiver, &sender, &link), 32 * KIB, 2 * MIB);
    assert_eq!(later.plain_bytes, 2 * MIB);
}

#[test]
fn a_nic_that_went_down_and_up_goes_on() {
    if !vm::is_here() {
        return;
    }
    let (mut receiver, sender, link) = (Receiver::new(16 * MIB), Sender::new(), Link::steered());
    let before = transfer((&receiver, &sender, &link), 0, MIB);
    assert_eq!((before.bytes(), before.plain_bytes), (MIB, 0));
    vm::send_plain(&link, MIB, 32 * KIB);
    let mut held = Tokens::new();
    hold(&link, 32 * KIB).into_iter().for_each(|token| held.push(token));
    vm::set_up(vm::NEAR, false);
    vm::set_up(vm::NEAR, true);
    let state = receiver.netdev.queue(vm::index(vm::NEAR), vm::QUEUE).expect("it is there");
    assert_eq!(state.dmabuf, Some(receiver.id), "the binding stays");
    let reported = held.fragments();
    let released = held.release(link.near.as_raw_fd()).expect("their places were not lost");
    assert_eq!((released.fragments, released.unknown), (reported, 0));
    let after = transfer((&receiver, &sender, &link), MIB + 32 * KIB, MIB);
    assert_eq!((after.bytes(), after.plain_bytes), (MIB, 0));
}
