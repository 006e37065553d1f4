//! A plugin's side of a connection, as far as a gather sees it, and a destination between guards.

use ferrywire_memory::sim::{MappedBuffer, SimBuffer, SimGpu};
use ferrywire_memory::unpack::{
    DeviceUnpack, FRAGMENTS_PER_SLOT_MAX, Fragment, Gather, METADATA_BYTES, SimQueue, UnpackMode,
};
use ferrywire_ncclnet::abi::DeviceHandle;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use std::ffi::c_void;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

/// Modes after which the bytes are there.
pub const GATHERING: [UnpackMode; 3] = [UnpackMode::Kernel, UnpackMode::Copy, UnpackMode::Host];
/// The value of bytes of a recycled page.
pub const POISON: u8 = 0xDE;
pub const POOL_BYTES: usize = 16 << 20;
const GUARD: u8 = 0xA5;
const GUARD_BYTES: usize = 5000;
/// Generous: the machine may be stopped meanwhile.
const SOON: Duration = Duration::from_secs(300);

/// A connection's pool and table, and the words that lead to them.
pub struct Plugin {
    pub gpu: Arc<SimGpu>,
    pub pool: SimBuffer,
    pub table: MappedBuffer,
    pub words: SimBuffer,
}

impl Plugin {
    pub fn new(gpu: u32) -> Plugin {
        let gpu = SimGpu::open(gpu).unwrap();
        let pool = gpu.alloc(POOL_BYTES, 4096).unwrap();
        let words = gpu.alloc(24, 4096).unwrap();
        let plugin = Plugin { pool, table: MappedBuffer::new(METADATA_BYTES, 4096).unwrap(), words, gpu };
        plugin.write_words(plugin.table.address(), plugin.pool.address());
        plugin
    }

    /// Writes the words to which the device handle points.
    pub fn write_words(&self, table: u64, pool: u64) {
        let words: Vec<u8> = [table, pool, !0].iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.gpu.write_from_slice(self.words.address(), &words).unwrap();
    }

    pub fn handle(&self) -> DeviceHandle {
        DeviceHandle {
            net_device_type: 1,
            net_device_version: 7,
            handle: self.words.address() as *mut c_void,
            size: 24,
            needs_proxy_progress: 1,
        }
    }

    pub fn unpack(&self, handle: &DeviceHandle) -> ferrywire_memory::Result<DeviceUnpack> {
        // SAFETY: the table lives as long as the plugin, which the tests drop last.
        unsafe { DeviceUnpack::read(Box::new(SimQueue::new(&self.gpu)), handle) }
    }

    pub fn gather(&self, mode: UnpackMode) -> Gather {
        Gather::new(mode, self.unpack(&self.handle()).unwrap()).unwrap()
    }

    /// Writes a slot's entries and its count.
    pub fn tell(&self, slot: usize, fragments: &[Fragment], count: u64) {
        assert!(slot < 16 && fragments.len() <= FRAGMENTS_PER_SLOT_MAX);
        for (index, fragment) in fragments.iter().enumerate() {
            let at = (slot * FRAGMENTS_PER_SLOT_MAX + index) * 16;
            // SAFETY: an entry inside the table, aligned; gathers read it only after this.
            unsafe { self.table.as_ptr().add(at).cast::<Fragment>().write_volatile(*fragment) };
        }
        // SAFETY: as above, one of the counts.
        unsafe { self.table.as_ptr().add(524_288 + slot * 8).cast::<u64>().write_volatile(count) };
    }

    /// Lets a message arrive in these fragments.
    pub fn deliver(&self, slot: usize, message: &[u8], fragments: &[Fragment]) {
        for fragment in fragments {
            let bytes = &message[fragment.target as usize..][..fragment.bytes as usize];
            // SAFETY: the view has as many bytes, and no gather uses them yet.
            unsafe { self.view(fragment).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        }
        self.tell(slot, fragments, fragments.len() as u64);
    }

    /// Takes the pages of these fragments back.
    pub fn recycle(&self, fragments: &[Fragment]) {
        for fragment in fragments {
            // SAFETY: the view has as many bytes; if they are gathered now, that is the test.
            unsafe { self.view(fragment).write_bytes(POISON, fragment.bytes as usize) };
        }
    }

    fn view(&self, fragment: &Fragment) -> *mut u8 {
        let address = self.pool.address() + u64::from(fragment.source);
        // SAFETY: this plays the NIC.
        unsafe { SimGpu::dma_view(address, fragment.bytes as usize).unwrap() }
    }
}

/// Cuts a message at random, gives each piece an unaligned place of its own in a part of the pool, and mixes
/// their order as sockets do: in runs.
pub fn scattered(rng: &mut StdRng, slot: usize, message_bytes: usize, pieces_max: usize) -> Vec<Fragment> {
    let pieces = rng.random_range(1..=pieces_max.min(message_bytes).max(1));
    let mut cuts = rand::seq::index::sample(rng, message_bytes.max(1), pieces).into_vec();
    cuts.extend([0, message_bytes]);
    cuts.sort_unstable();
    cuts.dedup();
    let part = POOL_BYTES / 16;
    let slack = (part - message_bytes) / cuts.len();
    let mut at = slot * part;
    let mut fragments: Vec<Fragment> = Vec::new();
    for pair in cuts.windows(2) {
        at += rng.random_range(0..=slack) * usize::from(rng.random_bool(0.5));
        let bytes = pair[1] - pair[0];
        fragments.push(Fragment { source: at as u32, bytes: bytes as u32, target: pair[0] as u64 });
        at += bytes;
    }
    let mut runs: Vec<&[Fragment]> = fragments.chunks(rng.random_range(1..=8)).collect();
    runs.shuffle(rng);
    runs.concat()
}

pub fn rng(seed: u64) -> StdRng {
    StdRng::seed_from_u64(seed)
}

pub fn message(rng: &mut StdRng, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|_| rng.random()).collect()
}

/// GPU memory for a message, at an address that is not aligned, between guards.
pub struct Destination {
    buffer: SimBuffer,
    skew: usize,
    bytes: usize,
}

impl Destination {
    pub fn new(gpu: &Arc<SimGpu>, bytes: usize, skew: usize) -> Destination {
        let buffer = gpu.alloc(2 * GUARD_BYTES + skew + bytes, 4096).unwrap();
        // Not through a stream: the GPU may be failing.
        // SAFETY: the buffer is new, and nothing else uses it.
        unsafe { SimGpu::dma_view(buffer.address(), buffer.len()).unwrap().write_bytes(GUARD, buffer.len()) };
        Destination { buffer, skew, bytes }
    }

    pub fn address(&self) -> u64 {
        self.buffer.address() + (GUARD_BYTES + self.skew) as u64
    }

    pub fn len(&self) -> u64 {
        self.bytes as u64
    }

    fn all(&self) -> Vec<u8> {
        // SAFETY: a live buffer; the bytes are copied out at once.
        let view = unsafe { SimGpu::dma_view(self.buffer.address(), self.buffer.len()).unwrap() };
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(view, self.buffer.len()).to_vec() }
    }

    /// Checks that nothing around was written, and gives the bytes.
    #[track_caller]
    pub fn contents(&self) -> Vec<u8> {
        let all = self.all();
        let (before, rest) = all.split_at(GUARD_BYTES + self.skew);
        let (inside, behind) = rest.split_at(self.bytes);
        assert!(before.iter().chain(behind).all(|byte| *byte == GUARD), "a guard was written");
        inside.to_vec()
    }

    /// Checks that nothing was written at all.
    #[track_caller]
    pub fn assert_untouched(&self) {
        assert!(self.all().iter().all(|byte| *byte == GUARD), "something was written");
    }
}

/// Polls until there is an outcome.
#[track_caller]
pub fn finish(gather: &mut Gather, slot: u64) -> ferrywire_memory::Result<u64> {
    let end = Instant::now() + SOON;
    loop {
        if let Poll::Ready(outcome) = gather.poll(slot) {
            return outcome;
        }
        assert!(Instant::now() < end, "slot {slot} never ends: {gather:?}");
        std::thread::yield_now();
    }
}
