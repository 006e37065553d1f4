//! Records where a kernel puts the bytes of a message, for tests of gathers (`recorded.rs`).

use crate::vm::{self, Link, MIB, Receiver, Sender, WAY};
use std::fs;
use std::thread;

const POOL_BYTES: usize = 4 * MIB;
const MESSAGE_BYTES: usize = MIB;

#[test]
fn a_fragment_list_is_recorded() {
    if !vm::is_here() {
        return;
    }
    let (receiver, sender, link) = (Receiver::new(POOL_BYTES), Sender::new(), Link::steered());
    let mut tally = vm::Tally::default();
    // The first messages fill the pool in order; later ones are as mixed as in real pools.
    for round in 0..6 {
        let position = round * MESSAGE_BYTES;
        tally = thread::scope(|scope| {
            let (link, sender) = (&link, &sender);
            scope.spawn(move || vm::send_all(link, sender.id, position, MESSAGE_BYTES, MESSAGE_BYTES));
            vm::take(link, &receiver, position, MESSAGE_BYTES, WAY)
        });
    }
    assert_eq!(tally.pool_bytes, MESSAGE_BYTES);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").expect("a kernel");
    let pairs: Vec<_> = tally.fragments.iter().map(|(offset, bytes)| format!("[{offset},{bytes}]")).collect();
    let lines: Vec<_> = pairs.chunks(8).map(|line| line.join(",")).collect();
    let text = format!(
        "{{\"kernel\": \"{}\", \"mtu\": {}, \"pool_bytes\": {POOL_BYTES}, \"message_bytes\": {MESSAGE_BYTES}, \
         \"fragments\": [\n{}\n]}}\n",
        kernel.trim(),
        vm::mtu(),
        lines.join(",\n")
    );
    let path = format!("{}/fragments-{}.json", vm::OUT, vm::mtu());
    fs::write(path, text).expect("the kit takes it out");
}
