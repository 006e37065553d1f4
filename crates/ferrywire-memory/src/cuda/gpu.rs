//! A GPU of this process: its primary context, what it is, and the blocking ways to its memory.
//!
//! Invariant: the context is retained as long as anybody holds the [`CudaGpu`], one of its streams, events or
//! pieces of memory, and released exactly once.
//! Read next: `allocation.rs`, `stream.rs`.

use super::driver::driver;
use super::error::{About, CudaError, Result, call};
use super::stack::Aside;
use super::stream::{SHORT_BYTES, copy_short};
use super::{CudaBuffer, CudaStream, PinnedBuffer, deferred_free, pointer};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use ferrywire_proto::limits::CUDA_GPUS_MAX;
use ferrywire_sys::numa;
use std::ffi::CStr;
use std::fmt;
use std::marker::PhantomData;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// What memory is zeroed by, piece by piece, where it is not filled.
pub(super) const ZEROES_BYTES: usize = 64 << 10;

/// What is written at once from memory that is not pinned: a driver returns only when it is copied, and whoever is about to have a
/// stream wait, waits for that.
const WRITE_BYTES: usize = 4 << 20;

/// Streams for the work of transfers, for each way: as many as a peer has channels on a large host.
const URGENT_STREAMS: usize = 16;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The GPUs of this process, by number.
static GPUS: [Slot; CUDA_GPUS_MAX] = [const { Slot::new() }; CUDA_GPUS_MAX];

/// Where a GPU of this process is found while somebody holds it.
struct Slot {
    gpu: Mutex<Weak<CudaGpu>>,
    /// Held while its context is made, which takes a driver long. Whoever moves data only looks for the GPU.
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

/// A GPU that is in use. Everything that belongs to it keeps it open.
pub struct CudaGpu {
    index: u32,
    device: sys::CUdevice,
    context: sys::CUcontext,
    about: Properties,
    /// The stream of blocking copies, once there was one.
    blocking: Mutex<Option<Raw>>,
    /// Streams for the work of transfers, for each way; none were made yet if there is nothing.
    urgent: [Mutex<Vec<Urgent>>; 2],
    /// Held while those are made. Whoever moves data only takes one of those that are there.
    preparing: Mutex<()>,
}

/// What is worth knowing about a GPU.
#[derive(Clone, Debug)]
struct Properties {
    name: String,
    uuid: String,
    pci: String,
    numa_node: Option<u32>,
    total_bytes: u64,
    multiprocessors: u32,
    /// The first number of its compute capability.
    generation: u32,
}

/// A raw stream, guarded by a mutex.
struct Raw(sys::CUstream);

/// A stream for the work of transfers, and how many use it.
struct Urgent {
    stream: Raw,
    users: usize,
}

// SAFETY: contexts and streams of the driver may be used on any thread; all else is plain data.
unsafe impl Send for CudaGpu {}
// SAFETY: as above, and the blocking stream is behind a mutex.
unsafe impl Sync for CudaGpu {}

impl CudaGpu {
    /// GPU `index` of this process, in the order in which the driver shows them: the same one for everybody
    /// while it lives. Loads the driver if nobody has, and retains the GPU's primary context.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`], [`CudaError::OldDriver`], [`CudaError::NoDevice`], [`CudaError::NoSuchGpu`],
    /// and whatever the driver says when it makes the context.
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
        // SAFETY: the driver is initialised; room for what it gives.
        unsafe { call!(about, cuDeviceGet(&mut device, index as i32)) }?;
        let properties = Properties::of(device, about)?;
        // SAFETY: as above; the context is released when the `CudaGpu` is dropped.
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

    /// GPU `index`, if somebody has opened it and still holds it.
    pub fn opened(index: u32) -> Option<Arc<CudaGpu>> {
        GPUS.get(index as usize)?.gpu().upgrade()
    }

    /// How many GPUs this process sees. Loads the driver.
    pub fn count() -> Result<u32> {
        driver().map(|driver| driver.devices)
    }

    /// Name and PCI address of GPU `index`, without opening it: no context is made.
    pub fn look(index: u32) -> Result<(String, String)> {
        let about = About::gpu(index);
        let count = driver()?.devices;
        if index >= count {
            return Err(CudaError::NoSuchGpu { index, count });
        }
        let mut device = 0;
        // SAFETY: the driver is initialised; room for what it gives.
        unsafe { call!(about, cuDeviceGet(&mut device, index as i32)) }?;
        let properties = Properties::of(device, about)?;
        Ok((properties.name, properties.pci))
    }

    /// Its number.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The maker's name for it.
    pub fn name(&self) -> &str {
        &self.about.name
    }

    /// Its own name among all GPUs: `GPU-` and 36 characters.
    pub fn uuid(&self) -> &str {
        &self.about.uuid
    }

    /// Its PCI address, as sysfs writes it: `0000:1b:00.0`.
    pub fn pci_address(&self) -> &str {
        &self.about.pci
    }

    /// The NUMA node it is attached to, where the kernel knows.
    pub fn numa_node(&self) -> Option<u32> {
        self.about.numa_node
    }

    /// Bytes of its memory, all users together.
    pub fn total_bytes(&self) -> u64 {
        self.about.total_bytes
    }

    /// How many multiprocessors it has.
    pub fn multiprocessors(&self) -> u32 {
        self.about.multiprocessors
    }

    /// Whether a kernel sees what others write while it runs, once it has read a word that says so: older ones kept in a cache
    /// what they had read before.
    pub fn kernels_see_news(&self) -> bool {
        self.about.generation >= 7
    }

    /// Bytes of its memory that nobody has taken.
    pub fn free_bytes(&self) -> Result<u64> {
        let _current = self.make_current()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: room for two numbers.
        unsafe { call!(About::gpu(self.index), cuMemGetInfo_v2(&mut free, &mut total)) }?;
        Ok(free as u64)
    }

    /// What a failed call on this GPU is told with.
    pub(super) fn about(&self) -> About {
        About::gpu(self.index)
    }

    /// Does something with the GPU's context current on this thread; then what was current before is so again.
    ///
    /// # Errors
    /// The driver's, when it cannot make it so; nothing was done then.
    pub fn with_current<T>(&self, body: impl FnOnce() -> T) -> Result<T> {
        let _current = self.make_current()?;
        Ok(body())
    }

    /// The same for code that may leave contexts on the thread's stack: afterwards it has those that it had before.
    pub fn with_current_alone<T>(&self, body: impl FnOnce() -> T) -> Result<T> {
        let _aside = Aside::put();
        self.with_current(body)
    }

    /// Makes the GPU's context current on this thread until the guard is dropped. Where it is current already,
    /// that costs one look. Guards have to go in the reverse order in which they came, so they stay in here,
    /// each in a function of its own.
    pub(super) fn make_current(&self) -> Result<CurrentGuard<'_>> {
        let mut current = ptr::null_mut();
        // SAFETY: the driver is initialised; room for a pointer.
        unsafe { call!(self.about(), cuCtxGetCurrent(&mut current)) }?;
        let pushed = current != self.context;
        if pushed {
            // SAFETY: a context that is retained as long as this lives.
            unsafe { call!(self.about(), cuCtxPushCurrent_v2(self.context)) }?;
        }
        Ok(CurrentGuard { pushed, _gpu: PhantomData, _thread: PhantomData })
    }

    /// Allocates zeroed memory, aligned to `align` and to 4096 at least.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] with what is free; [`CudaError::Alignment`].
    pub fn alloc(self: &Arc<Self>, bytes: usize, align: usize) -> Result<CudaBuffer> {
        CudaBuffer::new(self, bytes, align, false)
    }

    /// Likewise for transfers alone: nobody else names it, and nothing of it is under way when it is dropped.
    pub fn alloc_own(self: &Arc<Self>, bytes: usize, align: usize) -> Result<CudaBuffer> {
        CudaBuffer::new(self, bytes, align, true)
    }

    /// Zeroed host memory, on the GPU's NUMA node, that every GPU reaches.
    ///
    /// # Errors
    /// [`CudaError::Pinned`].
    pub fn pinned(self: &Arc<Self>, bytes: usize) -> Result<PinnedBuffer> {
        PinnedBuffer::new(self, bytes, true)
    }

    /// Likewise for what streams may still look at when it is dropped: nobody gets it again.
    pub fn pinned_once(self: &Arc<Self>, bytes: usize) -> Result<PinnedBuffer> {
        PinnedBuffer::new(self, bytes, false)
    }

    /// A new stream, which runs beside all others.
    pub fn stream(self: &Arc<Self>) -> Result<CudaStream> {
        CudaStream::new(self)
    }

    /// One for copies of transfers, `into` the GPU or out of it, which no stream of the user's holds up. Others may use
    /// it too.
    pub fn urgent_stream(self: &Arc<Self>, into: bool) -> Result<CudaStream> {
        match self.shared_urgent(into) {
            Some(stream) => Ok(CudaStream::shared(self, stream)),
            None => CudaStream::urgent(self),
        }
    }

    /// Makes the streams for the work of transfers, and has each copy something both ways. When one copies for the first
    /// time the driver may wait for all that other streams do, and one of those may wait for a transfer. So no others
    /// are made later: who comes then shares one with others.
    pub fn prepare_streams(self: &Arc<Self>) -> Result<()> {
        let _alone = lock(&self.preparing);
        if self.urgent.iter().all(|way| lock(way).len() >= URGENT_STREAMS) {
            return Ok(());
        }
        let (device, host) = (self.alloc_own(ZEROES_BYTES, 8)?, self.pinned(ZEROES_BYTES)?);
        // The stream of blocking copies, too; and by copy engines, which short copies to a GPU are not for.
        self.read_to_vec(device.address(), size_of::<u64>())?;
        // SAFETY: memory of ours, so long.
        unsafe { self.copy_and_wait(device.address(), host.address(), ZEROES_BYTES) }?;
        for way in &self.urgent {
            while lock(way).len() < URGENT_STREAMS {
                let stream = CudaStream::urgent(self)?;
                // SAFETY: memory of ours, which is kept until the stream has finished.
                unsafe {
                    stream.copy(device.address(), host.address(), ZEROES_BYTES)?;
                    stream.copy(host.address(), device.address(), ZEROES_BYTES)?;
                    stream.write_flag_u64(host.address(), 1)?;
                }
                stream.finish();
                lock(way).push(Urgent { stream: Raw(stream.into_raw()), users: 0 });
            }
        }
        Ok(())
    }

    /// A stream for the work of transfers, of those for copies `into` the GPU or out of it one that the fewest use.
    fn shared_urgent(&self, into: bool) -> Option<sys::CUstream> {
        let mut made = lock(&self.urgent[usize::from(into)]);
        let fewest = made.iter_mut().min_by_key(|urgent| urgent.users)?;
        fewest.users += 1;
        Some(fewest.stream.0)
    }

    /// How many use a stream for the work of transfers, after a change of that number.
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
    /// [`CudaError::OutOfReach`] or [`CudaError::OutOfRange`] where the source is not all of one or the other.
    pub fn read_to_vec(&self, source: u64, bytes: usize) -> Result<Vec<u8>> {
        let mut out = vec![0; bytes];
        self.read_into_slice(source, &mut out).map(|()| out)
    }

    /// Copies device or pinned memory to the host, and waits.
    ///
    /// # Errors
    /// As for [`CudaGpu::read_to_vec`].
    pub fn read_into_slice(&self, source: u64, target: &mut [u8]) -> Result<()> {
        self.reaches(source, target.len())?;
        // SAFETY: the source was just looked up; `target` is borrowed until the copy is done.
        unsafe { self.copy_and_wait(target.as_mut_ptr() as u64, source, target.len()) }
    }

    /// Copies host memory to the device, or to pinned memory, and waits.
    ///
    /// # Errors
    /// [`CudaError::OutOfReach`] or [`CudaError::OutOfRange`] where the target is not all of one or the other.
    pub fn write_from_slice(self: &Arc<Self>, target: u64, source: &[u8]) -> Result<()> {
        let bytes = source.len();
        let is_gpu = self.reaches(target, bytes)?;
        if !is_gpu || bytes < 2 {
            // SAFETY: the target was just looked up; `source` is borrowed until the copy is done.
            return unsafe { self.copy_and_wait(target, source.as_ptr() as u64, bytes) };
        }
        // The last one may begin before the end of the one before it.
        let once = bytes.min(WRITE_BYTES);
        (0..bytes).step_by(once).map(|at| at.min(bytes - once)).try_for_each(|at| {
            // SAFETY: inside of what was just looked up.
            unsafe { self.write_past_streams(target + at as u64, &source[at..at + once]) }
        })
    }

    /// Copies to the GPU, two bytes at least, and waits. A driver has the multiprocessors copy what is short, in whose queue there
    /// may be a stream that waits for a transfer: then as rectangles, from pinned memory.
    ///
    /// # Safety
    /// As many bytes at `target` are memory of a GPU.
    unsafe fn write_past_streams(self: &Arc<Self>, target: u64, source: &[u8]) -> Result<()> {
        let (bytes, address) = (source.len(), source.as_ptr() as u64);
        let mut copied = false;
        self.blocking(bytes, |stream, about| {
            // Whoever waits from now on stands behind it.
            let Some(_launching) = deferred_free::launching() else { return Ok(()) };
            copied = true;
            // SAFETY: by the caller's promise; `source` is borrowed until the copy is done.
            unsafe { call!(about, cuMemcpyAsync(target, address, bytes, stream)) }
        })?;
        if copied {
            return Ok(());
        }
        let once = bytes.min(SHORT_BYTES);
        let Ok(pinned) = self.pinned(once) else {
            // SAFETY: as above.
            return unsafe { self.copy_and_wait(target, address, bytes) };
        };
        (0..bytes).step_by(once).map(|at| at.min(bytes - once)).try_for_each(|at| {
            // SAFETY: inside of the source, and pinned memory of that length, which nobody else uses.
            unsafe { ptr::copy_nonoverlapping(source[at..].as_ptr(), pinned.as_ptr(), once) };
            self.blocking(once, |stream, about| {
                // SAFETY: by the caller's promise; the source is ours until the copy is done.
                unsafe { copy_short(about, target + at as u64, pinned.as_ptr().cast(), once, stream) }
            })
        })
    }

    /// Refuses an address that the driver would follow to wherever it leads in this process; says whether it is a GPU's.
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

    /// Sets device memory, and waits.
    ///
    /// # Safety
    /// `bytes` bytes at `target` are device or pinned memory, which nobody else has a use for now.
    pub unsafe fn fill(&self, target: u64, byte: u8, bytes: usize) -> Result<()> {
        self.blocking(bytes, |stream, about| {
            // SAFETY: by the caller's promise.
            unsafe { call!(about, cuMemsetD8Async(target, byte, bytes, stream)) }
        })
    }

    /// Zeroes device memory of [`ZEROES_BYTES`] at least, and waits. Filling is work of the multiprocessors, and the queue in
    /// which the hardware takes such work may be the one of a stream that waits for a transfer. So are, by a driver's choice,
    /// copies of no more than 24 KiB, and of 64 KiB from memory that is not pinned; longer ones are the copy engines'.
    ///
    /// # Safety
    /// As of [`CudaGpu::fill`].
    pub(super) unsafe fn zero(self: &Arc<Self>, target: u64, bytes: usize) -> Result<()> {
        let mut filled = false;
        self.blocking(bytes, |stream, about| {
            // Whoever waits from now on stands behind it.
            let Some(_launching) = deferred_free::launching() else { return Ok(()) };
            filled = true;
            // SAFETY: by the caller's promise.
            unsafe { call!(about, cuMemsetD8Async(target, 0, bytes, stream)) }
        })?;
        if filled {
            return Ok(());
        }
        let zeroes = self.pinned(ZEROES_BYTES)?;
        (0..bytes).step_by(ZEROES_BYTES).try_for_each(|at| {
            // The last one may begin before the end of the one before it.
            let at = at.min(bytes - ZEROES_BYTES) as u64;
            // SAFETY: inside of what is to be zeroed, and pinned memory of that length.
            unsafe { self.copy_and_wait(target + at, zeroes.address(), ZEROES_BYTES) }
        })
    }

    /// # Safety
    /// Both ranges are memory that is good for the copy.
    unsafe fn copy_and_wait(&self, target: u64, source: u64, bytes: usize) -> Result<()> {
        self.blocking(bytes, |stream, about| {
            // SAFETY: by the caller's promise.
            unsafe { call!(about, cuMemcpyAsync(target, source, bytes, stream)) }
        })
    }

    /// Does something on the stream of blocking copies, and waits for it.
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
        // Also after a failure: the memory is the caller's again when this returns.
        // SAFETY: a stream of this context.
        let done = unsafe { call!(about, cuStreamSynchronize(stream)) };
        enqueued.and(done)
    }
}

impl Drop for CudaGpu {
    fn drop(&mut self) {
        let blocking = self.blocking.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let urgent = self.urgent.iter().flat_map(|way| std::mem::take(&mut *lock(way)));
        let urgent: Vec<Raw> = urgent.map(|urgent| urgent.stream).collect();
        if let Ok(_current) = self.make_current() {
            for Raw(stream) in urgent.into_iter().chain(blocking) {
                // SAFETY: a stream of this context, with nothing under way.
                let _ = unsafe { call!(self.about(), cuStreamDestroy_v2(stream)) };
            }
        }
        // SAFETY: retained once, by `retain`; nothing that uses it is left.
        let released = unsafe { call!(self.about(), cuDevicePrimaryCtxRelease_v2(self.device)) };
        if let Err(error) = released {
            tracing::warn!(%error, "a GPU's context could not be released");
        }
    }
}

impl fmt::Debug for CudaGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaGpu({}, {} at {})", self.index, self.name(), self.pci_address())
    }
}

/// Makes a GPU current on this thread until it is dropped; then what was before is so again.
#[derive(Debug)]
#[must_use = "the GPU is current only as long as the guard lives"]
pub(super) struct CurrentGuard<'a> {
    pushed: bool,
    _gpu: PhantomData<&'a CudaGpu>,
    /// It belongs to its thread.
    _thread: PhantomData<*const ()>,
}

impl Drop for CurrentGuard<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut context = ptr::null_mut();
            // SAFETY: room for a pointer; what is taken off the stack is what this guard put there.
            let _ = unsafe { call!(About::default(), cuCtxPopCurrent_v2(&mut context)) };
        }
    }
}

pub(super) fn attribute_of(device: sys::CUdevice, about: About, attribute: Attribute) -> Result<i32> {
    let mut value = 0;
    // SAFETY: room for a number; the driver is initialised.
    unsafe { call!(about, cuDeviceGetAttribute(&mut value, attribute, device)) }?;
    Ok(value)
}

impl Properties {
    fn of(device: sys::CUdevice, about: About) -> Result<Properties> {
        let mut name = [0; 256];
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        let mut total_bytes = 0;
        // SAFETY: room for what is asked, and the length of the room for the name.
        unsafe {
            call!(about, cuDeviceGetName(name.as_mut_ptr(), name.len() as i32 - 1, device))?;
            call!(about, cuDeviceGetUuid_v2(&mut uuid, device))?;
            call!(about, cuDeviceTotalMem_v2(&mut total_bytes, device))?;
        }
        let name = name.map(|byte| byte as u8);
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();
        let number = |attribute| attribute_of(device, about, attribute).map(|value| value as u32);
        // Made of numbers: the driver's own text has letters of another case than sysfs.
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
