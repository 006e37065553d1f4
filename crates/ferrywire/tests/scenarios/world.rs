//! The world in which a scenario runs, and the tools that all scenarios share.

use ferrywire::{Builder, Endpoint, Peer, Region, Result, Transfer, TransferError};
pub use ferrywire_memory::pattern::without_zeroes as pattern;
use ferrywire_memory::sim::{SimBuffer, SimFaults, SimGpu};
use ferrywire_net::sim::SimNet;
use rand::Rng;
use rand::rngs::StdRng;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

/// Makes endpoints, connects them, and drives them until something has happened.
pub trait World {
    /// Adds an endpoint that listens, with this many NICs where the world can; `adapt` changes the
    /// defaults. Returns its number.
    fn add(&mut self, nics: usize, adapt: impl FnOnce(Builder) -> Builder) -> usize;

    /// An endpoint by number.
    fn end(&self, index: usize) -> Endpoint;

    /// Connects two endpoints: the peer as the first sees it, and as the second does.
    fn connect(&mut self, from: usize, to: usize) -> (Peer, Peer) {
        let address = self.address(to);
        self.connect_at(from, to, address)
    }

    /// Connects to one address of the second.
    fn connect_at(&mut self, from: usize, to: usize, address: SocketAddr) -> (Peer, Peer);

    /// Where an endpoint is first reached.
    fn address(&self, index: usize) -> SocketAddr;

    /// Drives everything until `poll` gives something.
    fn until<T>(&mut self, what: &str, poll: impl FnMut() -> Option<T>) -> T;

    /// Drives a transfer to its end.
    fn outcome(&mut self, transfer: &Transfer) -> Result<u64, TransferError>;

    /// Drives until the next notification, or until none can come any more.
    fn notification(&mut self, peer: &Peer) -> Result<Vec<u8>, TransferError>;

    /// Runs a call that waits, everything turning meanwhile.
    fn blocking<T: Send>(&mut self, call: impl FnOnce() -> T + Send) -> T;

    /// Runs a call that waits in several threads.
    fn blocking_threads<T: Send>(&mut self, call: impl FnOnce() -> T + Send) -> T {
        self.blocking(call)
    }

    /// Turns everything for a moment, long enough for whatever could arrive to arrive.
    fn linger(&mut self);

    /// Chance, from the scenario's seed.
    fn rng(&mut self) -> &mut StdRng;

    /// Largest transfer worth its time here.
    fn bytes_max(&self) -> usize;

    /// Size of chunks where a scenario does not say otherwise.
    fn chunk_bytes(&self) -> usize;

    /// Drives transfers to their ends, which all have to be good.
    fn all_done(&mut self, transfers: &[Transfer]) {
        for transfer in transfers {
            let outcome = self.outcome(transfer);
            assert!(outcome.is_ok(), "{transfer:?} ended in {outcome:?}");
        }
    }

    /// Two connected endpoints with default settings: the peers as each sees the other.
    fn pair(&mut self) -> (Peer, Peer) {
        let chunk = self.chunk_bytes();
        let a = self.add(1, |builder| builder.chunk_bytes(chunk));
        let b = self.add(1, |builder| builder.chunk_bytes(chunk));
        self.connect(a, b)
    }

    /// A number in a range.
    fn below(&mut self, end: usize) -> usize {
        self.rng().random_range(0..end)
    }

    /// Most peers of one endpoint, each an endpoint of its own.
    fn peers_max(&self) -> usize {
        5
    }

    /// Which ends have their memory on GPUs.
    fn gpus(&self) -> Gpus;

    /// Whether small messages of an endpoint's memory are sent before a receive is posted. Those of a GPU do not where a
    /// lane could fetch them from there.
    fn sends_eagerly(&self, _index: usize) -> bool {
        true
    }

    /// Registers bytes that follow from a salt.
    fn patterned(&self, index: usize, bytes: usize, salt: u64) -> Region {
        match self.gpus().of(index) {
            Some(gpu) => on_gpu(&self.end(index), gpu, &pattern(bytes, salt)),
            None => self.end(index).register(pattern(bytes, salt)).unwrap(),
        }
    }

    /// Registers zeroes.
    fn zeroed(&self, index: usize, bytes: usize) -> Region {
        match self.gpus().of(index) {
            Some(gpu) => self.end(index).alloc_sim(gpu, bytes).unwrap(),
            None => self.end(index).register(vec![0; bytes]).unwrap(),
        }
    }
}

/// A world whose network and hosts can be broken.
pub trait Faulty: World {
    /// The network.
    fn net(&self) -> Arc<SimNet>;

    /// The address of one NIC of an endpoint.
    fn nic(&self, index: usize, nic: usize) -> IpAddr;

    /// Lets virtual time pass, everything turning.
    fn pass(&mut self, time: Duration);

    /// Kills the process of an endpoint: it is turned no more, and its connections break.
    fn kill(&mut self, index: usize);

    /// Drops an endpoint, as its program does; the call returns when that is done.
    fn drop_end(&mut self, index: usize);

    /// Stops the process of an endpoint.
    fn freeze(&mut self, index: usize);

    /// Lets it go on.
    fn thaw(&mut self, index: usize);

    /// Starts a killed endpoint again, as a new one on the same host.
    fn restart(&mut self, index: usize, adapt: impl FnOnce(Builder) -> Builder);
}

/// Which ends have their memory on simulated GPUs: those with even numbers, those with odd ones.
#[derive(Clone, Copy, Debug, Default)]
pub struct Gpus {
    pub even: bool,
    pub odd: bool,
}

impl Gpus {
    /// Every mix but that of hosts alone.
    pub const MIXES: [Gpus; 3] =
        [Gpus { even: true, odd: true }, Gpus { even: true, odd: false }, Gpus { even: false, odd: true }];

    /// The GPU of an endpoint.
    pub fn of(self, index: usize) -> Option<u32> {
        let (on_gpu, gpu) = if index.is_multiple_of(2) { (self.even, 0) } else { (self.odd, 1) };
        on_gpu.then_some(gpu)
    }

    /// Opens them, with copies that take their time: who does not wait for one sees what was there before.
    pub fn open(self) -> [Arc<SimGpu>; 2] {
        [0, 1].map(|index| {
            let gpu = SimGpu::open(index).unwrap();
            let copy_delay = Duration::ZERO..=Duration::from_micros(40);
            if gpu.faults().copy_delay != copy_delay {
                gpu.set_faults(SimFaults { copy_delay, ..SimFaults::default() });
            }
            gpu
        })
    }
}

/// Registers memory of a GPU, with these bytes.
pub fn on_gpu(end: &Endpoint, gpu: u32, bytes: &[u8]) -> Region {
    let region = end.alloc_sim(gpu, bytes.len()).unwrap();
    region.write_at(0, bytes).unwrap();
    region
}

/// Memory that is the test's own, to be registered by its address.
pub enum Raw {
    Host(Vec<u8>),
    Gpu(SimBuffer),
}

impl Raw {
    /// Zeroes, on a simulated GPU if one is given.
    pub fn new(gpu: Option<u32>, bytes: usize) -> Raw {
        match gpu {
            Some(gpu) => Raw::Gpu(SimGpu::open(gpu).unwrap().alloc(bytes, 4096).unwrap()),
            None => Raw::Host(vec![0; bytes]),
        }
    }

    /// The address of the memory; for GPU memory the GPU's address.
    pub fn base(&mut self) -> *mut u8 {
        match self {
            Raw::Host(bytes) => bytes.as_mut_ptr(),
            Raw::Gpu(buffer) => buffer.as_ptr(),
        }
    }

    /// The bytes of the memory, read outside of all streams: neither the engine nor the GPU may still use the memory.
    pub fn bytes(&mut self) -> &mut [u8] {
        match self {
            Raw::Host(bytes) => bytes,
            Raw::Gpu(buffer) => {
                let (address, len) = (buffer.address(), buffer.len());
                // SAFETY: so many bytes of a buffer that is borrowed as long as the view is.
                unsafe { std::slice::from_raw_parts_mut(SimGpu::dma_view(address, len).unwrap(), len) }
            }
        }
    }
}

/// The contents of a region.
pub fn contents(region: &Region) -> Vec<u8> {
    let mut out = vec![0; region.len() as usize];
    region.read_at(0, &mut out).unwrap();
    out
}

/// Compares without printing megabytes.
#[track_caller]
pub fn assert_same(found: &[u8], expected: &[u8], what: &str) {
    if found == expected {
        return;
    }
    assert_eq!(found.len(), expected.len(), "{what}: length");
    if let Some(at) = found.iter().zip(expected).position(|(a, b)| a != b) {
        let wrong = found.iter().zip(expected).filter(|(a, b)| a != b).count();
        panic!(
            "{what}: {wrong} of {} bytes differ, the first at {at}: {:02x?} instead of {:02x?}",
            found.len(),
            &found[at..found.len().min(at + 8)],
            &expected[at..expected.len().min(at + 8)]
        );
    }
}
