//! A CUDA GPU of this process: its primary context, its properties, and blocking access to its memory.
//!
//! Invariant: the context is retained as long as the [`CudaGpu`], one of its streams, events or buffers
//! lives, and is released exactly once.
//! Read next: `allocation.rs`, `stream.rs`.

use super::capture::{self, Relaxed};
use super::driver::driver;
use super::error::{About, CudaError, Result, call};
use super::stack::Aside;
use super::stream::{SHORT_BYTES, copy_short, synchronize};
use super::{CudaBuffer, CudaStream, PinnedBuffer, deferred_free, pointer};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use ferrywire_proto::limits::CUDA_GPUS_MAX;
use ferrywire_sys::numa;
use std::ffi::CStr;
use std::fmt;
use std::marker::PhantomData;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Size in bytes of the copies that zero memory when a fill kernel cannot be launched.
pub(super) const ZEROES_BYTES: usize = 64 << 10;

/// Most bytes of one write from unpinned memory. The driver returns only when the bytes are copied, and a
/// stream that is about to wait for a transfer waits for the call.
const WRITE_BYTES: usize = 4 << 20;

/// Streams for transfers in each direction: as many as a peer has channels on a large host.
const URGENT_STREAMS: usize = 16;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The GPUs of this process by number.
static GPUS: [Slot; CUDA_GPUS_MAX] = [const { Slot::new() }; CUDA_GPUS_MAX];

/// Entry of a GPU in the process's list, through which the GPU is found while it is in use.
struct Slot {
    gpu: Mutex<Weak<CudaGpu>>,
    /// Lock that is held while the GPU's context is made, which takes long. Threads that move data only look
    /// up the GPU.
    opening: Mutex<()>,
}

impl Slot {
    const fn new() -> Slot {
        Slot { gpu: Mutex::new(Weak::new()), opening: Mutex::new(()) }
    }

    fn gpu(&self) -> MutexGuard<'_, Weak<CudaGpu>> {
        lock(&self.gpu)
    }
}

/// A CUDA GPU in use. Everything that belongs to the GPU keeps it open.
pub struct CudaGpu {
    index: u32,
    device: sys::CUdevice,
    context: sys::CUcontext,
    about: Properties,
    /// Stream of the blocking copies, made at first need.
    blocking: Mutex<Option<Raw>>,
    /// Streams for transfers, out of the GPU and into it; empty until [`CudaGpu::prepare_streams`].
    urgent: [Mutex<Vec<Urgent>>; 2],
    /// Lock that is held while the transfer streams are made. Threads that move data only take a finished
    /// stream.
    preparing: Mutex<()>,
}

/// Properties of a CUDA GPU.
#[derive(Clone, Debug)]
struct Properties {
    name: String,
    uuid: String,
    pci: String,
    numa_node: Option<u32>,
    total_bytes: u64,
    multiprocessors: u32,
    /// Major number of the compute capability.
    generation: u32,
}

/// A raw stream for blocking copies, guarded by a mutex.
struct Raw(sys::CUstream);

/// A stream for transfers, and the number of its users.
struct Urgent {
    stream: Raw,
    users: usize,
}

// SAFETY: contexts and streams of the driver may be used on any thread; all else is plain data.
unsafe impl Send for CudaGpu {}
// SAFETY: contexts and streams of the driver may be used on several threads at once; the blocking stream is
// behind a mutex.
unsafe impl Sync for CudaGpu {}

impl CudaGpu {
    /// Opens GPU `index` of this process, in the driver's order. Further calls return the open GPU while it
    /// lives. Loads the driver at first need, and retains the GPU's primary context.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`], [`CudaError::OldDriver`], [`CudaError::NoDevice`], [`CudaError::NoSuchGpu`],
    /// and the driver's error when it cannot make the context.
    pub fn open(index: u32) -> Result<Arc<CudaGpu>> {
        let driver = driver()?;
        let no_such = CudaError::NoSuchGpu { index, count: driver.devices };
        let slot = GPUS.get(index as usize).filter(|_| index < driver.devices).ok_or(no_such)?;
        if let Some(gpu) = slot.gpu().upgrade() {
            return Ok(gpu);
        }
        let _alone = lock(&slot.opening);
        if let Some(gpu) = slot.gpu().upgrade() {
            return Ok(gpu);
        }
        let gpu = Arc::new(CudaGpu::retain(index)?);
        *slot.gpu() = Arc::downgrade(&gpu);
        Ok(gpu)
    }

    fn retain(index: u32) -> Result<CudaGpu> {
        let about = About::gpu(index);
        let (mut device, mut context) = (0, ptr::null_mut());
        // SAFETY: the driver is initialised, and writes one number, for which there is room.
        unsafe { call!(about, cuDeviceGet(&mut device, index as i32)) }?;
        let properties = Properties::of(device, about)?;
        let _relaxed = capture::relax();
        // SAFETY: the driver is initialised; the context is released when the `CudaGpu` is dropped.
        unsafe { call!(about, cuDevicePrimaryCtxRetain(&mut context, device)) }?;
        Ok(CudaGpu {
            index,
            device,
            context,
            about: properties,
            blocking: Mutex::new(None),
            urgent: Default::default(),
            preparing: Mutex::default(),
        })
    }

    /// GPU `index` of this process if it is open, else `None`.
    pub fn opened(index: u32) -> Option<Arc<CudaGpu>> {
        GPUS.get(index as usize)?.gpu().upgrade()
    }

    /// Number of GPUs that this process sees. Loads the driver.
    pub fn count() -> Result<u32> {
        driver().map(|driver| driver.devices)
    }

    /// Name and PCI address of GPU `index`, without making a context.
    pub fn name_and_pci(index: u32) -> Result<(String, String)> {
        let about = About::gpu(index);
        let count = driver()?.devices;
        if index >= count {
            return Err(CudaError::NoSuchGpu { index, count });
        }
        let mut device = 0;
        // SAFETY: the driver is initialised, and writes one number, for which there is room.
        unsafe { call!(about, cuDeviceGet(&mut device, index as i32)) }?;
        let properties = Properties::of(device, about)?;
        Ok((properties.name, properties.pci))
    }

    /// Number of the GPU in this process.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Product name of the GPU.
    pub fn name(&self) -> &str {
        &self.about.name
    }

    /// UUID of the GPU: `GPU-` and 36 characters.
    pub fn uuid(&self) -> &str {
        &self.about.uuid
    }

    /// PCI address of the GPU in sysfs notation: `0000:1b:00.0`.
    pub fn pci_address(&self) -> &str {
        &self.about.pci
    }

    /// NUMA node of the GPU, where the kernel knows it.
    pub fn numa_node(&self) -> Option<u32> {
        self.about.numa_node
    }

    /// Size of the GPU's memory in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.about.total_bytes
    }

    /// Number of the GPU's multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.about.multiprocessors
    }

    /// Whether a running kernel that has read a flag then sees all data that was written before the flag.
    /// Older GPUs keep earlier reads in a cache.
    pub fn kernels_see_news(&self) -> bool {
        self.about.generation >= 7
    }

    /// Free bytes of the GPU's memory.
    pub fn free_bytes(&self) -> Result<u64> {
        let _current = self.make_current()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the driver writes two numbers, for which there is room.
        unsafe { call!(About::gpu(self.index), cuMemGetInfo_v2(&mut free, &mut total)) }?;
        Ok(free as u64)
    }

    /// GPU and size in bytes, for the error of a failed call.
    pub(super) fn about(&self) -> About {
        About::gpu(self.index)
    }

    /// Runs `body` with the GPU's context current on this thread, then restores the previous context. The thread's
    /// graph capture mode is relaxed meanwhile, also for foreign code.
    ///
    /// # Errors
    /// The driver's error when the context cannot be made current; `body` has not run then.
    pub fn with_current<T>(&self, body: impl FnOnce() -> T) -> Result<T> {
        let _current = self.make_current()?;
        Ok(body())
    }

    /// Runs foreign code with the GPU's context current. The code may leave contexts on the thread's stack of
    /// contexts; afterwards the stack is as before.
    pub fn with_current_alone<T>(&self, body: impl FnOnce() -> T) -> Result<T> {
        let _aside = Aside::put();
        self.with_current(body)
    }

    /// Makes the GPU's context current on this thread until the guard is dropped. This is one cheap call
    /// where it is current already. Guards must be dropped in reverse order, so they stay within this crate,
    /// one per function.
    pub(super) fn make_current(&self) -> Result<CurrentGuard<'_>> {
        let relaxed = capture::relax();
        let mut current = ptr::null_mut();
        // SAFETY: the driver is initialised, and writes one pointer, for which there is room.
        unsafe { call!(self.about(), cuCtxGetCurrent(&mut current)) }?;
        let pushed = current != self.context;
        if pushed {
            // SAFETY: the context is retained as long as `self` lives.
            unsafe { call!(self.about(), cuCtxPushCurrent_v2(self.context)) }?;
        }
        Ok(CurrentGuard { pushed, _relaxed: relaxed, _gpu: PhantomData })
    }

    /// Allocates zeroed GPU memory of `bytes` bytes, aligned to `align` and at least to 4096 bytes.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] with the free bytes; [`CudaError::Alignment`].
    pub fn alloc(self: &Arc<Self>, bytes: usize, align: usize) -> Result<CudaBuffer> {
        CudaBuffer::new(self, bytes, align, false)
    }

    /// Allocates GPU memory that only transfers use: nothing is in flight when it is dropped, so it may be
    /// reused.
    pub fn alloc_own(self: &Arc<Self>, bytes: usize, align: usize) -> Result<CudaBuffer> {
        CudaBuffer::new(self, bytes, align, true)
    }

    /// Allocates zeroed pinned host memory on the GPU's NUMA node, accessible to every GPU.
    ///
    /// # Errors
    /// [`CudaError::Pinned`] when the memory cannot be allocated or pinned.
    pub fn pinned(self: &Arc<Self>, bytes: usize) -> Result<PinnedBuffer> {
        PinnedBuffer::new(self, bytes, true)
    }

    /// Allocates pinned host memory that is never reused: streams may still read it when it is dropped.
    pub fn pinned_once(self: &Arc<Self>, bytes: usize) -> Result<PinnedBuffer> {
        PinnedBuffer::new(self, bytes, false)
    }

    /// Creates a stream, concurrent with all others of this GPU.
    pub fn stream(self: &Arc<Self>) -> Result<CudaStream> {
        CudaStream::new(self)
    }

    /// A stream for transfers, `into` the GPU or out of it, that no user's stream blocks. Other transfers may
    /// share it.
    pub fn urgent_stream(self: &Arc<Self>, into: bool) -> Result<CudaStream> {
        match self.shared_urgent(into) {
            Some(stream) => Ok(CudaStream::shared(self, stream)),
            None => CudaStream::urgent(self),
        }
    }

    /// Makes the streams for transfers, and lets each copy in both directions. A stream's first copy may make
    /// the driver wait for all other streams, and one of those may wait for a transfer. So no streams are
    /// made later; further users share these.
    pub fn prepare_streams(self: &Arc<Self>) -> Result<()> {
        let _alone = lock(&self.preparing);
        if self.urgent.iter().all(|way| lock(way).len() >= URGENT_STREAMS) {
            return Ok(());
        }
        let (device, mut host) = (self.alloc_own(ZEROES_BYTES, 8)?, self.pinned(ZEROES_BYTES)?);
        self.prepare_streams_with(&device, &host).inspect_err(|_| {
            // A copy may still run.
            device.prevent_reuse();
            host.prevent_reuse();
        })
    }

    /// Makes the streams for transfers, and lets each copy between both buffers, of [`ZEROES_BYTES`] each.
    ///
    /// # Errors
    /// The driver's error; a copy may then still run.
    fn prepare_streams_with(self: &Arc<Self>, device: &CudaBuffer, host: &PinnedBuffer) -> Result<()> {
        // The stream of blocking copies is prepared too, with a copy by a copy engine; short copies to a GPU
        // use multiprocessors instead.
        self.read_to_vec(device.address(), size_of::<u64>())?;
        // SAFETY: both buffers are the caller's own, and of this length.
        unsafe { self.copy_and_wait(device.address(), host.address(), ZEROES_BYTES) }?;
        for way in &self.urgent {
            while lock(way).len() < URGENT_STREAMS {
                let stream = CudaStream::urgent(self)?;
                let (on_gpu, pinned) = (device.address(), host.address());
                // SAFETY: both buffers are the caller's own. The driver frees them only when all work is done.
                let enqueued = unsafe {
                    stream
                        .copy(on_gpu, pinned, ZEROES_BYTES)
                        .and_then(|()| stream.copy(pinned, on_gpu, ZEROES_BYTES))
                        .and_then(|()| stream.write_flag_u64(pinned, 1))
                };
                stream.finish()?;
                enqueued?;
                lock(way).push(Urgent { stream: Raw(stream.into_raw()), users: 0 });
            }
        }
        Ok(())
    }

    /// The stream for transfers with the fewest users, of those `into` the GPU or out of it.
    fn shared_urgent(&self, into: bool) -> Option<sys::CUstream> {
        let mut made = lock(&self.urgent[usize::from(into)]);
        let fewest = made.iter_mut().min_by_key(|urgent| urgent.users)?;
        fewest.users += 1;
        Some(fewest.stream.0)
    }

    /// Changes the number of a transfer stream's users; returns the new number.
    pub(super) fn urgent_users(&self, raw: sys::CUstream, change: isize) -> usize {
        for way in &self.urgent {
            if let Some(urgent) = lock(way).iter_mut().find(|urgent| urgent.stream.0 == raw) {
                urgent.users = urgent.users.saturating_add_signed(change);
                return urgent.users;
            }
        }
        1
    }

    /// Copies device or pinned memory to the host, and waits.
    ///
    /// # Errors
    /// [`CudaError::OutOfReach`] or [`CudaError::OutOfRange`] where the source is not entirely device or
    /// pinned memory.
    pub fn read_to_vec(&self, source: u64, bytes: usize) -> Result<Vec<u8>> {
        let mut out = vec![0; bytes];
        self.read_into_slice(source, &mut out).map(|()| out)
    }

    /// Copies device or pinned memory to the host, and waits.
    ///
    /// # Errors
    /// The errors of [`CudaGpu::read_to_vec`].
    pub fn read_into_slice(&self, source: u64, target: &mut [u8]) -> Result<()> {
        self.reaches(source, target.len())?;
        // SAFETY: the source was just looked up; `target` is borrowed until the copy is done.
        unsafe { self.copy_and_wait(target.as_mut_ptr() as u64, source, target.len()) }
    }

    /// Copies host memory to device or pinned memory, and waits.
    ///
    /// # Errors
    /// [`CudaError::OutOfReach`] or [`CudaError::OutOfRange`] where the target is not entirely device or
    /// pinned memory.
    pub fn write_from_slice(self: &Arc<Self>, target: u64, source: &[u8]) -> Result<()> {
        let bytes = source.len();
        let is_gpu = self.reaches(target, bytes)?;
        if !is_gpu || bytes < 2 {
            // SAFETY: the target was just looked up; `source` is borrowed until the copy is done.
            return unsafe { self.copy_and_wait(target, source.as_ptr() as u64, bytes) };
        }
        // The last part may overlap with the part before it.
        let once = bytes.min(WRITE_BYTES);
        (0..bytes).step_by(once).map(|at| at.min(bytes - once)).try_for_each(|at| {
            // SAFETY: the part is inside the range that was just checked.
            unsafe { self.write_past_streams(target + at as u64, &source[at..at + once]) }
        })
    }

    /// Copies at least two bytes to the GPU, and waits. For short copies the driver uses multiprocessors,
    /// whose queue may be blocked by a stream that waits for a transfer. In that case the copies are
    /// rectangles from pinned memory, which use a copy engine.
    ///
    /// # Safety
    /// `target` has `source.len()` bytes of GPU memory.
    unsafe fn write_past_streams(self: &Arc<Self>, target: u64, source: &[u8]) -> Result<()> {
        let (bytes, address) = (source.len(), source.as_ptr() as u64);
        let mut copied = false;
        self.blocking(bytes, |stream, about| {
            // A stream that starts to wait after this queues behind the copy.
            let Some(_launching) = deferred_free::launching(self.index) else { return Ok(()) };
            copied = true;
            // SAFETY: the caller promises that `target` is GPU memory of this length; `source` is borrowed
            // until the copy is done.
            unsafe { call!(about, cuMemcpyAsync(target, address, bytes, stream)) }
        })?;
        if copied {
            return Ok(());
        }
        let once = bytes.min(SHORT_BYTES);
        let Ok(pinned) = self.pinned(once) else {
            // SAFETY: the caller promises that `target` is GPU memory of this length; `source` is borrowed
            // until the copy is done.
            return unsafe { self.copy_and_wait(target, address, bytes) };
        };
        (0..bytes).step_by(once).map(|at| at.min(bytes - once)).try_for_each(|at| {
            // SAFETY: `at` is inside the source; the pinned memory has that length, and no other code uses
            // it.
            unsafe { ptr::copy_nonoverlapping(source[at..].as_ptr(), pinned.as_ptr(), once) };
            self.blocking(once, |stream, about| {
                // SAFETY: the caller promises a target in GPU memory; the pinned source stays unchanged until
                // the copy is done.
                unsafe { copy_short(about, target + at as u64, pinned.as_ptr().cast(), once, stream) }
            })
        })
    }

    /// Rejects an address that is not GPU or pinned memory, since the driver would access it unchecked.
    /// Returns whether it is GPU memory.
    fn reaches(&self, address: u64, bytes: usize) -> Result<bool> {
        let bytes = bytes as u64;
        if bytes == 0 || pointer::gpu_of_range(address, bytes)?.is_some() {
            return Ok(true);
        }
        let end = address.checked_add(bytes);
        match pointer::pinned(self, address).zip(end) {
            Some(((base, len), end)) if end <= base + len => Ok(false),
            _ => Err(CudaError::OutOfReach { address, bytes }),
        }
    }

    /// Sets device or pinned memory to `byte`, and waits.
    ///
    /// # Safety
    /// `bytes` bytes at `target` are device or pinned memory, which no other code uses during the call.
    pub unsafe fn fill(&self, target: u64, byte: u8, bytes: usize) -> Result<()> {
        self.blocking(bytes, |stream, about| {
            // SAFETY: the caller promises that the range is device or pinned memory, unused by other code.
            unsafe { call!(about, cuMemsetD8Async(target, byte, bytes, stream)) }
        })
    }

    /// Zeroes at least [`ZEROES_BYTES`] of device memory, and waits. A fill uses multiprocessors, and the
    /// hardware queue for such work may be blocked by a stream that waits for a transfer. The driver also
    /// uses multiprocessors for copies of up to 24 KiB, and of up to 64 KiB from unpinned memory. Longer
    /// copies use a copy engine; this function falls back to them.
    ///
    /// # Safety
    /// `bytes` bytes at `target` are device memory, which no other code uses during the call.
    pub(super) unsafe fn zero(self: &Arc<Self>, target: u64, bytes: usize) -> Result<()> {
        let mut filled = false;
        self.blocking(bytes, |stream, about| {
            // A stream that starts to wait after this queues behind the fill.
            let Some(_launching) = deferred_free::launching(self.index) else { return Ok(()) };
            filled = true;
            // SAFETY: the caller promises that the range is device memory, unused by other code.
            unsafe { call!(about, cuMemsetD8Async(target, 0, bytes, stream)) }
        })?;
        if filled {
            return Ok(());
        }
        let zeroes = self.pinned(ZEROES_BYTES)?;
        (0..bytes).step_by(ZEROES_BYTES).try_for_each(|at| {
            // The last part may overlap with the part before it.
            let at = at.min(bytes - ZEROES_BYTES) as u64;
            // SAFETY: the part is inside the range to be zeroed, and the pinned zeros have that length.
            unsafe { self.copy_and_wait(target + at, zeroes.address(), ZEROES_BYTES) }
        })
    }

    /// # Safety
    /// Both ranges are valid for the copy.
    unsafe fn copy_and_wait(&self, target: u64, source: u64, bytes: usize) -> Result<()> {
        self.blocking(bytes, |stream, about| {
            // SAFETY: the caller promises that both ranges are valid for the copy.
            unsafe { call!(about, cuMemcpyAsync(target, source, bytes, stream)) }
        })
    }

    /// Enqueues work on the stream of blocking copies, and waits for it.
    fn blocking(&self, bytes: usize, enqueue: impl FnOnce(sys::CUstream, About) -> Result<()>) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let about = self.about().bytes(bytes);
        let mut blocking = self.blocking.lock().unwrap_or_else(PoisonError::into_inner);
        let _current = self.make_current()?;
        let stream = match &*blocking {
            Some(Raw(stream)) => *stream,
            None => blocking.insert(Raw(super::stream::create_urgent(self)?)).0,
        };
        let enqueued = enqueue(stream, about);
        // The wait follows a failure too: the memory belongs to the caller again when this returns.
        // SAFETY: the stream is one of this context.
        let done = unsafe { synchronize(about, stream) };
        enqueued.and(done)
    }
}

impl Drop for CudaGpu {
    fn drop(&mut self) {
        let _relaxed = capture::relax();
        let blocking = self.blocking.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let urgent = self.urgent.iter().flat_map(|way| std::mem::take(&mut *lock(way)));
        let urgent: Vec<Raw> = urgent.map(|urgent| urgent.stream).collect();
        if let Ok(_current) = self.make_current() {
            for Raw(stream) in urgent.into_iter().chain(blocking) {
                // SAFETY: the stream is one of this context, without work in flight.
                let _ = unsafe { call!(self.about(), cuStreamDestroy_v2(stream)) };
            }
        }
        // SAFETY: the context was retained once, by `retain`, and no value uses it any more.
        let released = unsafe { call!(self.about(), cuDevicePrimaryCtxRelease_v2(self.device)) };
        if let Err(error) = released {
            tracing::warn!(%error, "cannot release the GPU's context");
        }
    }
}

impl fmt::Debug for CudaGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaGpu({}, {} at {})", self.index, self.name(), self.pci_address())
    }
}

/// Keeps the GPU current on this thread; dropping the guard restores the previous context.
#[derive(Debug)]
#[must_use = "the GPU is current only as long as the guard lives"]
pub(super) struct CurrentGuard<'a> {
    pushed: bool,
    /// Keeps the calls out of graph captures, and the guard on its thread.
    _relaxed: Relaxed,
    _gpu: PhantomData<&'a CudaGpu>,
}

impl Drop for CurrentGuard<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut context = ptr::null_mut();
            // SAFETY: the driver writes one pointer, for which there is room; the popped context is the one
            // that this guard pushed.
            let _ = unsafe { call!(About::default(), cuCtxPopCurrent_v2(&mut context)) };
        }
    }
}

pub(super) fn attribute_of(device: sys::CUdevice, about: About, attribute: Attribute) -> Result<i32> {
    let mut value = 0;
    // SAFETY: the driver is initialised, and writes one number, for which there is room.
    unsafe { call!(about, cuDeviceGetAttribute(&mut value, attribute, device)) }?;
    Ok(value)
}

impl Properties {
    fn of(device: sys::CUdevice, about: About) -> Result<Properties> {
        let mut name = [0; 256];
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        let mut total_bytes = 0;
        // SAFETY: the driver writes the results into variables of their types, and the name into a buffer
        // whose length is passed.
        unsafe {
            call!(about, cuDeviceGetName(name.as_mut_ptr(), name.len() as i32 - 1, device))?;
            call!(about, cuDeviceGetUuid_v2(&mut uuid, device))?;
            call!(about, cuDeviceTotalMem_v2(&mut total_bytes, device))?;
        }
        let name = name.map(|byte| byte as u8);
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();
        let number = |attribute| attribute_of(device, about, attribute).map(|value| value as u32);
        // The address is formatted from numbers: the driver's text uses upper-case letters where sysfs has
        // lower case.
        let pci = format!(
            "{:04x}:{:02x}:{:02x}.0",
            number(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
            number(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
            number(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?
        );
        let numa_node = numa::node_of_pci(&pci);
        let multiprocessors = number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let generation = number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let (uuid, total_bytes) = (uuid_text(&uuid.bytes.map(|byte| byte as u8)), total_bytes as u64);
        Ok(Properties { name, uuid, pci, numa_node, total_bytes, multiprocessors, generation })
    }
}

fn uuid_text(bytes: &[u8; 16]) -> String {
    let mut text = String::from("GPU-");
    for (at, byte) in bytes.iter().enumerate() {
        if [4, 6, 8, 10].contains(&at) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_uuid_is_written_as_other_tools_do() {
        let bytes = std::array::from_fn(|k| 0xf0 ^ k as u8);
        assert_eq!(super::uuid_text(&bytes), "GPU-f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfeff");
    }
}
