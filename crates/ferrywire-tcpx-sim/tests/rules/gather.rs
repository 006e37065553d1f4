//! The host's gather over this plugin's tables: every mode, pending receives while others arrive, wrong fragments.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Poll;

use ferrywire_memory::Error;
use ferrywire_memory::sim::{SimBuffer, SimGpu, set_current};
use ferrywire_memory::unpack::{DeviceUnpack, Gather, SimQueue, UnpackError, UnpackMode};

use crate::case::case;
use crate::driver::{OK, Pair, Plugin, Ptr, pattern};

const MODES: [UnpackMode; 3] = [UnpackMode::Kernel, UnpackMode::Copy, UnpackMode::Host];

/// A connection within one GPU, and the gathers of its receiving end.
struct Bench {
    // Field order: dropped before the connection's memory.
    gather: Gather,
    pair: Pair,
    gpu: Arc<SimGpu>,
    received: u64,
}

/// A receive that was not consumed.
struct Open {
    number: u64,
    request: Ptr,
    bytes: Vec<u8>,
    target: SimBuffer,
}

impl Bench {
    fn new(pair: Pair, gpu: &Arc<SimGpu>, mode: UnpackMode) -> Bench {
        set_current(gpu.index()).unwrap();
        let queue = Box::new(SimQueue::new(gpu));
        // SAFETY: the handle is from `accept`, and the connection is not closed before the process ends.
        let unpack = unsafe { DeviceUnpack::read(queue, &pair.device_handle).unwrap() };
        let gather = Gather::new(mode, unpack).unwrap();
        Bench { gather, pair, gpu: gpu.clone(), received: 0 }
    }

    /// Sends and receives, and starts the gather; also returns the result of the start.
    fn try_receive(&mut self, bytes: Vec<u8>) -> (Open, ferrywire_memory::Result<()>) {
        let room = bytes.len().max(1).next_multiple_of(4096);
        let [source, target] = [0, 1].map(|_| self.gpu.alloc(room, 4096).unwrap());
        self.gpu.write_from_slice(source.address(), &bytes).unwrap();
        let from = self.pair.send.gpu(source.address(), room);
        let to = self.pair.recv.gpu(target.address(), room);
        let request = self.pair.transfer(&from, &to, bytes.len());
        let number = self.received;
        self.received += 1;
        let started = self.gather.start(number, target.address(), room as u64, bytes.len() as u64);
        (Open { number, request, bytes, target }, started)
    }

    fn receive(&mut self, bytes: Vec<u8>) -> Open {
        let (open, started) = self.try_receive(bytes);
        started.unwrap();
        open
    }

    /// Waits for the gather, consumes the receive, and checks the bytes.
    fn give_back(&mut self, open: Open) {
        let gathered = loop {
            match self.gather.poll(open.number) {
                Poll::Ready(outcome) => break outcome,
                Poll::Pending => std::thread::yield_now(),
            }
        };
        assert_eq!(gathered, Ok(open.bytes.len() as u64));
        assert_eq!(self.pair.recv.consumed(open.request), OK);
        let there = self.gpu.read_to_vec(open.target.address(), open.bytes.len()).unwrap();
        assert!(there == open.bytes, "receive {} of {} bytes", open.number, open.bytes.len());
    }
}

/// Receives of many sizes, with up to `depth` gathered and not consumed.
fn many_sizes(mode: UnpackMode, depth: usize) {
    let gpu = SimGpu::open(0).unwrap();
    set_current(0).unwrap();
    let mut bench = Bench::new(Plugin::start().pair(), &gpu, mode);
    let sizes = [0, 1, 4095, 65_536, 4096, 0, 4097, 10_000, 100_001, 524_288, 7];
    let mut open = VecDeque::new();
    for (k, size) in sizes.into_iter().cycle().take(50).enumerate() {
        open.push_back(bench.receive(pattern(size, k as u8)));
        if open.len() == depth {
            let oldest = open.pop_front().unwrap();
            bench.give_back(oldest);
        }
    }
    open.into_iter().for_each(|one| bench.give_back(one));
}

#[test]
fn every_mode_gathers_what_was_sent() {
    for mode in MODES {
        case!("same_host=allow").passes(|| many_sizes(mode, 1));
        case!("same_host=allow,seed=5,partial_io=on").passes(|| many_sizes(mode, 9));
        case!("same_host=allow,fragment_bytes=1448,delay_us=0-100")
            .with("NCCL_NSOCKS_PERTHREAD", "4")
            .with("NCCL_DYNAMIC_CHUNK_SIZE", "65536")
            .with("FERRYWIRE_SIM_GPU_FAULTS", "seed=3,delay_us=0-50")
            .passes(|| many_sizes(mode, 15));
    }
}

#[test]
fn a_lying_plugin_is_an_error_and_nothing_is_written() {
    let lie = |expected: fn(&UnpackError) -> bool| {
        move || {
            for mode in MODES {
                let gpu = SimGpu::open(0).unwrap();
                set_current(0).unwrap();
                let plugin: &'static Plugin = Box::leak(Box::new(Plugin::load()));
                plugin.init();
                let mut bench = Bench::new(plugin.pair(), &gpu, mode);
                let first = bench.receive(pattern(9000, 1));
                bench.give_back(first);
                let launches = bench.gather.launches();
                let (open, started) = bench.try_receive(pattern(9000, 2));
                let error = started.expect_err("a lie");
                let Error::Unpack(cause) = &error else { panic!("{error}") };
                assert!(expected(cause), "{error}");
                assert!(bench.gather.poll(open.number).is_ready() && bench.gather.launches() == launches);
                assert_eq!(gpu.read_to_vec(open.target.address(), 9000).unwrap(), [0; 9000]);
            }
        }
    };
    case!("same_host=allow,lie_after=1,lie_fragment=range")
        .passes(lie(|error| matches!(error, UnpackError::OutsidePool { slot: 1, fragment: 0, .. })));
    case!("same_host=allow,lie_after=1,lie_fragment=dst")
        .passes(lie(|error| matches!(error, UnpackError::OutsideMessage { slot: 1, fragment: 0, .. })));
    // The first fragment of several is longer than it should be and reaches into the next.
    case!("same_host=allow,lie_after=1,lie_fragment=len")
        .passes(lie(|error| matches!(error, UnpackError::Overlap { slot: 1, .. })));
}
