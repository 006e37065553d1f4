//! Memory of a simulated GPU, as pool and as source.

use crate::vm::{self, Link, MIB, NEAR, PATTERN_BYTES, QUEUE, WAY};
use ferrywire_devmem::sys::devmem::{Control, Fragment, Tokens};
use ferrywire_devmem::sys::ethtool::Split;
use ferrywire_devmem::sys::netdev::Netdev;
use ferrywire_memory::sim::SimGpu;
use ferrywire_memory::{MemoryLocation, dmabuf_fd};
use std::os::fd::{AsFd, AsRawFd};
use std::thread;

#[test]
fn memory_of_a_simulated_gpu_is_sent_and_received() {
    if !vm::is_here() {
        return;
    }
    let gpu = SimGpu::open(0).expect("a GPU");
    let source = gpu.alloc(PATTERN_BYTES, 2 * MIB).expect("memory");
    let data: Vec<u8> = (0..PATTERN_BYTES).map(vm::pattern).collect();
    gpu.write_from_slice(source.address(), &data).expect("written");
    let pool = gpu.alloc(16 * MIB, 2 * MIB).expect("memory");
    let export = |address, bytes: usize| {
        dmabuf_fd(MemoryLocation::SimGpu(0), address, bytes as u64).expect("a dma-buf")
    };
    let (from, into) = (export(source.address(), PATTERN_BYTES), export(pool.address(), 16 * MIB));
    vm::set_split(Split::On, Some(0)).expect("headers are split");
    let mut netdev = Netdev::open().expect("the family");
    let bound = netdev.bind_rx(vm::index(NEAR), &[QUEUE], into.as_fd()).expect("a binding");
    let (_far, id) = vm::bind_far(from.as_fd());
    let link = Link::steered();
    thread::scope(|scope| {
        scope.spawn(|| vm::send_all(&link, id, 0, 4 * MIB, MIB));
        let (mut got, mut tokens, mut control) = (0, Tokens::new(), Control::new(WAY.room));
        let mut buffer = vec![0; MIB];
        while got < 4 * MIB {
            let received = vm::receive(&link, &mut buffer, &mut control).expect("received");
            assert!(!received.plain);
            for fragment in control.fragments() {
                let bytes = fragment.bytes() as usize;
                if let Fragment::Pool { dmabuf, offset, token, .. } = fragment {
                    assert_eq!(dmabuf, bound);
                    let read = gpu.read_to_vec(pool.address() + offset, bytes).expect("inside");
                    vm::check(&read, got);
                    tokens.push(token);
                }
                got += bytes;
            }
            tokens.release(link.near.as_raw_fd()).expect("they go back");
        }
    });
}
