//! A GPU that is busy: blocks of threads that occupy its multiprocessors until they are asked to end, as long
//! computations do. Kernels that are launched meanwhile wait; copy engines do not. Needs a GPU.

use cudarc::driver::sys;
use ferrywire_memory::cuda::{CudaFunction, CudaGpu, CudaModule, CudaStream, PinnedBuffer};
use std::ffi::{CStr, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(60);

/// Multiprocessors of a GPU that have room for no other block.
pub struct Occupied {
    stream: CudaStream,
    stay: CudaFunction,
    /// One word that ends all blocks, and a word for each that has begun.
    words: PinnedBuffer,
    blocks: u32,
}

impl Occupied {
    const THREADS: u32 = 256;
    /// Blocks that stay until the first word is set, at most for a minute.
    const STAY: &CStr = c"
.version 6.0
.target sm_60
.address_size 64
.visible .entry stay(.param .u64 words)
{
    .reg .pred %p<4>;
    .reg .b32 %r<5>;
    .reg .b64 %rd<7>;
    ld.param.u64 %rd1, [words];
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra WAIT;
    mov.u32 %r2, %ctaid.x;
    mul.wide.u32 %rd2, %r2, 4;
    add.u64 %rd3, %rd1, %rd2;
    mov.u32 %r3, 1;
    st.volatile.global.u32 [%rd3+4], %r3;
    mov.u64 %rd4, %globaltimer;
LOOK:
    ld.volatile.global.u32 %r4, [%rd1];
    setp.ne.u32 %p2, %r4, 0;
    @%p2 bra WAIT;
    mov.u64 %rd5, %globaltimer;
    sub.u64 %rd6, %rd5, %rd4;
    setp.lt.u64 %p3, %rd6, 60000000000;
    @%p3 bra LOOK;
WAIT:
    bar.sync 0;
    ret;
}
";

    pub fn new(gpu: &Arc<CudaGpu>) -> Occupied {
        let (mut threads, most) =
            (0, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
        // SAFETY: room for a number; devices are numbered.
        let code = unsafe { sys::cuDeviceGetAttribute(&mut threads, most, gpu.index() as c_int) };
        assert_eq!(code as u32, 0);
        let blocks = gpu.multiprocessors() * threads as u32 / Occupied::THREADS;
        let words = gpu.pinned(4 * (1 + blocks as usize)).unwrap();
        let stay = CudaModule::load(gpu, Occupied::STAY).unwrap().function(c"stay").unwrap();
        Occupied { stream: gpu.stream().unwrap(), stay, words, blocks }
    }

    fn words(&self) -> &[AtomicU32] {
        // SAFETY: pinned memory of so many words, aligned to a page; both sides write them whole.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), 1 + self.blocks as usize) }
    }

    /// Occupies them; returns when all blocks have begun.
    pub fn begin(&self) {
        self.words().iter().for_each(|word| word.store(0, Ordering::SeqCst));
        let mut address = self.words.address();
        // SAFETY: the kernel takes the address of these words, which stay until the stream has ended.
        let launched = unsafe {
            self.stream.launch(
                &self.stay,
                self.blocks,
                Occupied::THREADS,
                &mut [(&raw mut address).cast::<c_void>()],
            )
        };
        launched.unwrap();
        let (start, begun) =
            (Instant::now(), || self.words()[1..].iter().all(|word| word.load(Ordering::SeqCst) == 1));
        while !begun() {
            assert!(start.elapsed() < LONG / 4, "{} blocks do not occupy the multiprocessors", self.blocks);
            std::thread::yield_now();
        }
    }

    /// Leaves them to others.
    pub fn end(&self) {
        self.words()[0].store(1, Ordering::SeqCst);
        self.stream.wait(LONG).unwrap();
    }
}
