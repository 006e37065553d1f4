//! A simulated GPU, for tests and for machines without a GPU.
//!
//! It reproduces the differences between GPU and host memory: addresses that the CPU must not access,
//! asynchronous copy queues as the only access to the bytes, a current device per thread, and failures that
//! are reported late and are permanent. It does not model a GPU's speed.
//!
//! ```text
//!   SimGpu 0   address  0x7f..  no access     CPU touches it: SIGSEGV, EFAULT
//!     |  \       ||  one memory, two views
//!     |   \    view     0x7e..  read/write    only the copy engine and simulated NICs
//!     |  engine: one thread <- SimStream, SimStream (SimEvent)
//!   SimGpuTable: C functions for plugins, found through the environment
//! ```
//!
//! ```
//! use ferrywire_memory::sim::SimGpu;
//!
//! # fn main() -> Result<(), ferrywire_memory::sim::SimGpuError> {
//! let gpu = SimGpu::open(0)?;
//! let buffer = gpu.alloc(1 << 20, 4096)?;
//! gpu.write_from_slice(buffer.address(), b"hello")?;
//! assert_eq!(gpu.read_to_vec(buffer.address(), 5)?, b"hello");
//! # Ok(()) }
//! ```
//!
//! Invariant: every address from a caller, a stream or a plugin is looked up and checked before a byte moves,
//! so a wrong address is an error and never a stray write.
//! Read next: `allocation.rs` (memory), `engine.rs` (copies), `table.rs` (plugins).

mod allocation;
mod current;
mod engine;
mod error;
mod event;
mod faults;
mod pattern;
mod stream;
mod table;
#[cfg(test)]
mod tests;
mod work;

pub use allocation::{MappedBuffer, SimBuffer, dmabuf_fd};
pub use current::{current, set_current, with_current};
pub use error::{Result, SimGpuError};
pub use event::HostGate;
pub use event::SimEvent;
pub use faults::{FAULTS_VARIABLE, SimFaults};
pub use pattern::SimPattern;
pub use stream::SimStream;
pub use table::{SimGpuTable, TABLE_VARIABLE, TABLE_VERSION};

use engine::Engine;
use ferrywire_proto::limits;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// The simulated GPUs of this process by number.
static GPUS: Mutex<[Weak<SimGpu>; limits::SIM_GPUS_MAX]> =
    Mutex::new([const { Weak::new() }; limits::SIM_GPUS_MAX]);

/// A simulated GPU. It lives as long as a handle, one of its streams or some of its memory.
pub struct SimGpu {
    index: u32,
    engine: Arc<Engine>,
    thread: Option<JoinHandle<()>>,
}

impl SimGpu {
    /// Opens GPU `index` of this process; further calls return the open GPU while it lives.
    ///
    /// The first GPU also publishes [`SimGpuTable`], which sets an environment variable. This is unsafe while
    /// another thread reads the environment without Rust's lock, as C code does. So open the first GPU before
    /// such threads start.
    ///
    /// # Errors
    /// [`SimGpuError::NoSuchGpu`], [`SimGpuError::FaultsText`] for an invalid fault specification in the
    /// environment, [`SimGpuError::System`] when no thread can be started.
    pub fn open(index: u32) -> Result<Arc<SimGpu>> {
        let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = gpus.get_mut(index as usize).ok_or(SimGpuError::NoSuchGpu { index })?;
        if let Some(gpu) = slot.upgrade() {
            return Ok(gpu);
        }
        let gpu = Arc::new(SimGpu::start(index, SimFaults::from_environment()?)?);
        *slot = Arc::downgrade(&gpu);
        table::publish();
        Ok(gpu)
    }

    fn start(index: u32, faults: SimFaults) -> Result<SimGpu> {
        let engine = Arc::new(Engine::new(index, faults));
        let worker = engine.clone();
        let thread = thread::Builder::new()
            .name(format!("sim-gpu-{index}"))
            .spawn(move || worker.run())
            .map_err(|error| SimGpuError::System {
                what: "cannot start a thread".into(),
                message: error.to_string(),
            })?;
        Ok(SimGpu { index, engine, thread: Some(thread) })
    }

    /// Simulated GPU `index` of this process if it is open, else `None`.
    pub fn opened(index: u32) -> Option<Arc<SimGpu>> {
        let gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
        gpus.get(index as usize)?.upgrade()
    }

    /// Number of the GPU with the memory at `address`, and first address and length in bytes of the
    /// allocation.
    pub fn of(address: u64) -> Option<(u32, u64, u64)> {
        let found = allocation::find(address)?;
        Some((found.gpu()?.index, found.address(), found.len as u64))
    }

    /// First address and length in bytes of the mapped host memory that contains `address`.
    pub fn mapped(address: u64) -> Option<(u64, u64)> {
        let found = allocation::find(address).filter(|found| found.gpu().is_none())?;
        Some((found.address(), found.len as u64))
    }

    /// Number of the GPU.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Allocates zeroed memory of the simulated GPU, aligned to `align` and at least to 4096 bytes.
    pub fn alloc(self: &Arc<Self>, bytes: usize, align: usize) -> Result<SimBuffer> {
        SimBuffer::new(self, bytes, align)
    }

    /// Creates a stream of the simulated GPU.
    pub fn stream(self: &Arc<Self>) -> SimStream {
        SimStream::new(self)
    }

    /// The faults that are in force.
    pub fn faults(&self) -> SimFaults {
        self.engine.faults()
    }

    /// Sets the faults of operations enqueued from now on, and counts operations from 0 again. Only the stall
    /// affects work that is enqueued already.
    pub fn set_faults(&self, faults: SimFaults) {
        self.engine.set_faults(faults);
    }

    /// Sets whether the GPU is stalled, so that no operation starts.
    pub fn set_stall(&self, stall: bool) {
        self.engine.set_stall(stall);
    }

    /// Whether an operation of any stream is enqueued or runs. While the GPU is stalled, a test learns from this that a copy
    /// waits for the GPU.
    pub fn has_work(&self) -> bool {
        self.engine.has_work()
    }

    /// Leaves all work to callers of [`SimGpu::run_due`], so that a simulation on one thread repeats. A wait for a stream
    /// runs the work of that stream, as if its delays and a stall were over; it fails if the stream waits for another one.
    pub fn step(&self) {
        self.engine.step();
    }

    /// Runs the work of a stepped GPU that is due at this time, which the caller counts from any moment on. Returns whether
    /// it ran any.
    pub fn run_due(&self, now: Duration) -> bool {
        self.engine.run_due(now)
    }

    /// Copies device memory to the host, and waits.
    pub fn read_to_vec(self: &Arc<Self>, source: u64, bytes: usize) -> Result<Vec<u8>> {
        let mut out = vec![0; bytes];
        self.read_into_slice(source, &mut out).map(|()| out)
    }

    /// Copies device memory to the host, and waits.
    pub fn read_into_slice(self: &Arc<Self>, source: u64, target: &mut [u8]) -> Result<()> {
        let stream = self.stream();
        // SAFETY: `target` is borrowed until the stream is dropped, which ends the copy.
        unsafe { stream.to_host(source, target.as_mut_ptr(), target.len())? };
        stream.wait(limits::SIM_GPU_BLOCKING_TIMEOUT)
    }

    /// Copies host memory to the device, and waits.
    pub fn write_from_slice(self: &Arc<Self>, target: u64, source: &[u8]) -> Result<()> {
        let stream = self.stream();
        // SAFETY: `source` is borrowed until the stream is dropped, which ends the copy.
        unsafe { stream.from_host(source.as_ptr(), target, source.len())? };
        stream.wait(limits::SIM_GPU_BLOCKING_TIMEOUT)
    }

    /// Sets `bytes` bytes of device memory to `byte`, and waits.
    pub fn fill(self: &Arc<Self>, target: u64, byte: u8, bytes: usize) -> Result<()> {
        let stream = self.stream();
        stream.fill(target, byte, bytes)?;
        stream.wait(limits::SIM_GPU_BLOCKING_TIMEOUT)
    }

    /// CRC-32 of `bytes` bytes of device memory.
    pub fn checksum(self: &Arc<Self>, source: u64, bytes: usize) -> Result<u32> {
        self.stream().checksum(source, bytes, limits::SIM_GPU_BLOCKING_TIMEOUT)
    }

    /// Direct pointer to device or mapped memory, for a simulated NIC: the equivalent of DMA.
    ///
    /// # Safety
    /// The pointer is valid for `bytes` bytes until the allocation is freed. Streams and other NICs may read
    /// and write these bytes at any time. Only code that simulates a device may use it; no program can access
    /// a GPU's memory this way.
    pub unsafe fn dma_view(address: u64, bytes: usize) -> Result<*mut u8> {
        allocation::resolve(address, bytes).map(|span| span.pointer)
    }
}

impl Drop for SimGpu {
    fn drop(&mut self) {
        self.engine.stop();
        // The drop may run on the GPU's own thread, which must not join itself.
        let thread = self.thread.take().filter(|thread| thread.thread().id() != thread::current().id());
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for SimGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimGpu({})", self.index)
    }
}
