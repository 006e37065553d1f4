//! CUDA streams: queues of GPU work, each in order, independent of one another.
//!
//! Addresses are unified: copies take device memory of any GPU, pinned host memory and (slowly) other host
//! memory, and the driver tells them apart.
//! Invariant: a stream is destroyed when all its work is done, and no caller waits for work that does not end.
//! Read next: `event.rs`.

use super::driver::{self, CopyAttributes, SOURCE_ACCESS_STREAM};
use super::error::{About, NOT_SUPPORTED, Result, ask, call, check};
use super::event::{self, CudaEvent};
use super::gpu::CudaGpu;
use super::module::CudaFunction;
use super::{RawEvent, RawStream, capture, deferred_free};
use crate::GpuCopy;
use cudarc::driver::sys;
use ferrywire_proto::limits;
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// A queue of asynchronous work of a CUDA GPU, independent of the default stream.
///
/// Dropping it waits for its work, up to [`GPU_END_TIMEOUT`](limits::GPU_END_TIMEOUT). Work that takes longer goes on, and
/// the stream is destroyed behind it. So a user who frees the memory of the work first calls [`CudaStream::wait`].
pub struct CudaStream {
    gpu: Arc<CudaGpu>,
    raw: sys::CUstream,
    whose: Whose,
    /// Arrays for the driver's batch call, reused by each batch.
    batch: Mutex<Batch>,
}

/// The owner of a raw stream, who destroys it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Whose {
    Own,
    /// A stream of the [`CudaGpu`], which counts its users.
    Shared,
    /// The stream belongs to the caller of `into_raw`.
    Left,
}

// SAFETY: a stream of the driver may be used on any thread.
unsafe impl Send for CudaStream {}
// SAFETY: a stream of the driver may be used on several threads at once; the arrays for batches are behind a
// mutex.
unsafe impl Sync for CudaStream {}

/// A batch of copies in the layout of the driver's call.
#[derive(Default)]
struct Batch {
    targets: Vec<u64>,
    sources: Vec<u64>,
    sizes: Vec<usize>,
}

/// Whether the driver has refused a batch although it has the function.
static BATCHES_REFUSED: AtomicBool = AtomicBool::new(false);

const NON_BLOCKING: u32 = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;

/// Most bytes of a copy to a GPU that a driver makes with multiprocessors. Driver 580 on an H200 does so up
/// to 24 KiB, and up to 64 KiB from unpinned memory.
pub(super) const SHORT_BYTES: usize = 64 << 10;

/// Enqueues a copy of at least two bytes of pinned memory to a GPU whose context is current. The copy is a
/// rectangle of two rows without a gap, which uses a copy engine however short it is. Where the driver
/// refuses the rectangle, the copy is a plain one. An address without GPU memory returns an error.
///
/// # Safety
/// Until the copy is done, the pinned memory stays allocated, and no other code writes to it or uses the
/// target. The GPU memory may be freed already.
pub(super) unsafe fn copy_short(
    about: About,
    target: u64,
    source: *const c_void,
    bytes: usize,
    stream: sys::CUstream,
) -> Result<()> {
    let rows = |at: usize, width: usize| {
        let rectangle = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
            srcHost: source.wrapping_byte_add(at),
            srcDevice: 0,
            srcArray: ptr::null_mut(),
            srcPitch: width,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: ptr::null_mut(),
            dstDevice: target + at as u64,
            dstArray: ptr::null_mut(),
            dstPitch: width,
            WidthInBytes: width,
            Height: 2,
        };
        // SAFETY: the caller promises that the pinned source stays valid; the driver checks the GPU address.
        unsafe { call!(about, cuMemcpy2DAsync_v2(&rectangle, stream)) }
    };
    // Copies the last two bytes of an odd number; the first of them is copied a second time.
    let odd = || if bytes.is_multiple_of(2) { Ok(()) } else { rows(bytes - 2, 1) };
    rows(0, bytes / 2).and_then(|()| odd()).or_else(|_| {
        // SAFETY: the caller promises that the pinned source stays valid; the driver checks the GPU address.
        unsafe { call!(about, cuMemcpyHtoDAsync_v2(target, source, bytes, stream)) }
    })
}

/// Creates a raw stream with the highest priority, on a GPU whose context is current.
///
/// Streams share a few hardware queues, one set per priority. At the user's priority, the copies of a
/// transfer could queue behind a user's stream that waits for that transfer.
pub(super) fn create_urgent(gpu: &CudaGpu) -> Result<sys::CUstream> {
    let (mut raw, mut least, mut greatest) = (ptr::null_mut(), 0, 0);
    // SAFETY: the driver writes two numbers and a pointer, for which there is room.
    unsafe {
        call!(gpu.about(), cuCtxGetStreamPriorityRange(&mut least, &mut greatest))?;
        call!(gpu.about(), cuStreamCreateWithPriority(&mut raw, NON_BLOCKING, greatest))?;
    }
    Ok(raw)
}

/// Waits until no work of a stream runs, on a GPU whose context is current.
///
/// # Errors
/// The driver's error. Unless it [ends the work](super::CudaError::ends_work), the work may still run: each
/// call failed, for [`GPU_ABANDON_TIMEOUT`](limits::GPU_ABANDON_TIMEOUT).
///
/// # Safety
/// The stream is alive, and of this context.
pub(super) unsafe fn synchronize(about: About, stream: sys::CUstream) -> Result<()> {
    const PAUSE: Duration = Duration::from_millis(1);
    let start = Instant::now();
    loop {
        // SAFETY: promised by the caller of this function.
        match unsafe { call!(about, cuStreamSynchronize(stream)) } {
            Err(error) if !error.ends_work() && start.elapsed() < limits::GPU_ABANDON_TIMEOUT => {
                thread::sleep(PAUSE);
            }
            ended => return ended,
        }
    }
}

impl CudaStream {
    pub(super) fn new(gpu: &Arc<CudaGpu>) -> Result<CudaStream> {
        let _current = gpu.make_current()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the driver writes one pointer, for which there is room.
        unsafe { call!(gpu.about(), cuStreamCreate(&mut raw, NON_BLOCKING)) }?;
        Ok(CudaStream { gpu: gpu.clone(), raw, whose: Whose::Own, batch: Mutex::default() })
    }

    pub(super) fn urgent(gpu: &Arc<CudaGpu>) -> Result<CudaStream> {
        let _current = gpu.make_current()?;
        Ok(CudaStream {
            gpu: gpu.clone(),
            raw: create_urgent(gpu)?,
            whose: Whose::Own,
            batch: Mutex::default(),
        })
    }

    /// Wraps a raw stream that the GPU keeps and shares.
    pub(super) fn shared(gpu: &Arc<CudaGpu>, raw: sys::CUstream) -> CudaStream {
        CudaStream { gpu: gpu.clone(), raw, whose: Whose::Shared, batch: Mutex::default() }
    }

    /// Hands the raw stream over to the caller.
    pub(super) fn into_raw(mut self) -> sys::CUstream {
        self.whose = Whose::Left;
        self.raw
    }

    /// Whether other users enqueue work in this stream too.
    pub fn has_others(&self) -> bool {
        self.whose == Whose::Shared && self.gpu.urgent_users(self.raw, 0) > 1
    }

    /// The GPU of the stream.
    pub fn gpu(&self) -> &Arc<CudaGpu> {
        &self.gpu
    }

    /// The driver's handle of this stream.
    pub fn raw(&self) -> RawStream {
        self.raw
    }

    /// Waits until no work of the stream runs, also when the work has failed or the context is unusable.
    ///
    /// # Errors
    /// The driver's error if the work may still run: each call failed, for
    /// [`GPU_ABANDON_TIMEOUT`](limits::GPU_ABANDON_TIMEOUT).
    pub fn finish(&self) -> Result<()> {
        // SAFETY: the stream is alive.
        let ended =
            self.gpu.make_current().and_then(|_current| unsafe { synchronize(self.gpu.about(), self.raw) });
        ended.or_else(|error| if error.ends_work() { Ok(()) } else { Err(error) })
    }

    /// Enqueues a copy between device memory and pinned memory, in any combination.
    ///
    /// # Safety
    /// Until the copy is done, both ranges stay allocated, and no other code writes to the source or uses the
    /// target. The driver checks GPU addresses, but accesses any other address
    /// unchecked.
    pub unsafe fn copy(&self, source: u64, target: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.gpu.make_current()?;
        // SAFETY: the caller promises that both ranges stay valid until the copy is done.
        unsafe { call!(self.gpu.about().bytes(bytes), cuMemcpyAsync(target, source, bytes, self.raw)) }
    }

    /// Enqueues copies, which may run in any order, with as few driver calls as possible; returns the number
    /// of calls.
    ///
    /// # Safety
    /// The promise of [`CudaStream::copy`], for each copy; no target overlaps with another range of the
    /// batch.
    pub unsafe fn copy_batch(&self, copies: &[GpuCopy]) -> Result<usize> {
        let mut batch = self.batch.lock().unwrap_or_else(PoisonError::into_inner);
        batch.fill(copies);
        if batch.sizes.is_empty() {
            return Ok(0);
        }
        let _current = self.gpu.make_current()?;
        // SAFETY: the caller promises that all ranges stay valid until the copies are done.
        if unsafe { self.copy_in_one_call(&mut batch) }? {
            return Ok(1);
        }
        // SAFETY: the caller promises that all ranges stay valid until the copies are done.
        unsafe { self.copy_one_by_one(&batch) }
    }

    /// Enqueues copies between pinned memory and GPU memory with one driver call each; returns the number of
    /// calls. A GPU address whose memory was freed returns an error, and is never taken for a host address.
    ///
    /// # Safety
    /// The promise of [`CudaStream::copy`], for each copy, except that GPU memory may be freed already.
    pub unsafe fn copy_each(&self, copies: &[GpuCopy], to_gpu: bool) -> Result<usize> {
        let is_short = |bytes: usize| to_gpu && (2..=SHORT_BYTES).contains(&bytes);
        // A stream that starts to wait after this queues behind short copies.
        let any_short = copies.iter().any(|copy| is_short(copy.bytes));
        let launching = if any_short { deferred_free::launching(self.gpu.index()) } else { None };
        let _current = self.gpu.make_current()?;
        for GpuCopy { source, target, bytes } in copies.iter().copied() {
            let (about, stream, host) = (self.gpu.about().bytes(bytes), self.raw, source as *const c_void);
            // SAFETY: the caller promises that the pinned ranges stay valid until the copies are done; the
            // driver checks GPU addresses.
            unsafe {
                if is_short(bytes) && launching.is_none() {
                    copy_short(about, target, host, bytes, stream)
                } else if to_gpu {
                    call!(about, cuMemcpyHtoDAsync_v2(target, host, bytes, stream))
                } else {
                    call!(about, cuMemcpyDtoHAsync_v2(target as *mut c_void, source, bytes, stream))
                }
            }?;
        }
        Ok(copies.len())
    }

    /// Enqueues the batch with one call; returns false when the driver cannot.
    ///
    /// # Safety
    /// The promise of [`CudaStream::copy_batch`].
    unsafe fn copy_in_one_call(&self, batch: &mut Batch) -> Result<bool> {
        let copy_batch = driver::library()?.copy_batch.filter(|_| !BATCHES_REFUSED.load(Ordering::Relaxed));
        let (Some(copy_batch), 2..) = (copy_batch, batch.sizes.len()) else { return Ok(false) };
        let mut attributes = CopyAttributes {
            source_access: SOURCE_ACCESS_STREAM,
            source_hint: [0; 2],
            target_hint: [0; 2],
            flags: 0,
        };
        let (mut first, mut failed) = (0, usize::MAX);
        let Batch { targets, sources, sizes } = batch;
        // SAFETY: three lists of one length, one set of attributes that applies to all copies, room for a
        // number; the copies are valid by the caller's promise.
        let code = unsafe {
            copy_batch(
                targets.as_mut_ptr(),
                sources.as_mut_ptr(),
                sizes.as_mut_ptr(),
                sizes.len(),
                &mut attributes,
                &mut first,
                1,
                &mut failed,
                self.raw,
            )
        };
        if code == NOT_SUPPORTED {
            BATCHES_REFUSED.store(true, Ordering::Relaxed);
            return Ok(false);
        }
        let bytes = sizes.get(failed).copied().unwrap_or_else(|| sizes.iter().sum());
        check("cuMemcpyBatchAsync", self.gpu.about().bytes(bytes), code).map(|()| true)
    }

    /// # Safety
    /// The promise of [`CudaStream::copy_batch`]; the context is current.
    unsafe fn copy_one_by_one(&self, batch: &Batch) -> Result<usize> {
        let about = self.gpu.about();
        for ((target, source), bytes) in batch.targets.iter().zip(&batch.sources).zip(&batch.sizes) {
            // SAFETY: the caller promises that both ranges stay valid until the copy is done.
            unsafe { call!(about.bytes(*bytes), cuMemcpyAsync(*target, *source, *bytes, self.raw)) }?;
        }
        Ok(batch.sizes.len())
    }

    /// Enqueues a fill of `bytes` bytes at `target` with `byte`.
    ///
    /// # Safety
    /// The target keeps the promise that [`CudaStream::copy`] asks for.
    pub unsafe fn fill(&self, target: u64, byte: u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.gpu.make_current()?;
        // SAFETY: the caller promises that the target stays valid until the fill is done.
        unsafe { call!(self.gpu.about().bytes(bytes), cuMemsetD8Async(target, byte, bytes, self.raw)) }
    }

    /// Enqueues a write of 4 bytes after all earlier work, whose results are then visible to the whole
    /// system: a reader that sees the value in pinned memory also sees the earlier copies.
    ///
    /// # Safety
    /// `address` is a device address of pinned or device memory, aligned to 4 bytes, that stays allocated
    /// until the write is done.
    pub unsafe fn write_flag_u32(&self, address: u64, value: u32) -> Result<()> {
        let _current = self.gpu.make_current()?;
        // SAFETY: the caller promises that the address stays allocated. Without flags the write has a barrier
        // before it.
        unsafe { call!(self.gpu.about(), cuStreamWriteValue32_v2(self.raw, address, value, 0)) }
    }

    /// Enqueues a write of 8 bytes, with the guarantees of [`CudaStream::write_flag_u32`].
    ///
    /// # Safety
    /// The promise of [`CudaStream::write_flag_u32`], with an alignment of 8 bytes.
    pub unsafe fn write_flag_u64(&self, address: u64, value: u64) -> Result<()> {
        let _current = self.gpu.make_current()?;
        // SAFETY: the caller promises that the address stays allocated. Without flags the write has a barrier
        // before it.
        unsafe { call!(self.gpu.about(), cuStreamWriteValue64_v2(self.raw, address, value, 0)) }
    }

    /// Makes later work in a stream of another library wait, on the GPU, until 8 bytes of pinned memory hold
    /// `value` or more.
    ///
    /// # Errors
    /// [`CudaError::StreamCapturing`](super::CudaError::StreamCapturing) for a stream that captures a graph, and
    /// the driver's error.
    ///
    /// # Safety
    /// `stream` is a live stream of this GPU's primary context, or null for the default stream; `address` is
    /// as for [`CudaStream::write_flag_u64`].
    pub unsafe fn wait_flag_raw(
        gpu: &Arc<CudaGpu>,
        stream: RawStream,
        address: u64,
        value: u64,
    ) -> Result<()> {
        let _current = gpu.make_current()?;
        // SAFETY: the caller promises a live stream and a valid address. Without flags the wait ends when the
        // value is reached or passed.
        unsafe {
            capture::refuse_capturing(gpu, stream)?;
            call!(gpu.about(), cuStreamWaitValue64_v2(stream, address, value, 0))
        }
    }

    /// Enqueues a kernel with `grid` blocks of `block` threads.
    ///
    /// # Safety
    /// Each parameter points at a value of the type that the kernel declares in its place, and the memory
    /// that the kernel accesses stays allocated until it is done.
    pub unsafe fn launch(
        &self,
        function: &CudaFunction,
        grid: u32,
        block: u32,
        parameters: &mut [*mut c_void],
    ) -> Result<()> {
        let _current = self.gpu.make_current()?;
        let (kernel, values, none) = (function.raw, parameters.as_mut_ptr(), ptr::null_mut());
        // SAFETY: the caller promises that parameters and memory fit the kernel; the driver copies the
        // parameters before it returns.
        unsafe {
            call!(
                self.gpu.about(),
                cuLaunchKernel(kernel, grid, 1, 1, block, 1, 1, 0, self.raw, values, none)
            )
        }
    }

    /// Records an event in this stream: it is done when all work enqueued so far is done.
    pub fn record(&self, event: &CudaEvent) -> Result<()> {
        let _current = self.gpu.make_current()?;
        // SAFETY: event and stream are alive; the driver refuses those of different GPUs.
        unsafe { call!(self.gpu.about(), cuEventRecord(event.raw, self.raw)) }
    }

    /// Makes later work of this stream wait, on the GPU, for an event of any GPU. The caller does not wait.
    pub fn wait_event(&self, event: &CudaEvent) -> Result<()> {
        // SAFETY: the event is borrowed, so it is alive.
        unsafe { self.wait_raw_event(event.raw) }
    }

    /// Makes later work of this stream wait for an event of another library.
    ///
    /// # Safety
    /// `event` is a live event of the driver.
    pub unsafe fn wait_raw_event(&self, event: RawEvent) -> Result<()> {
        let _current = self.gpu.make_current()?;
        // SAFETY: the caller promises that the event is live.
        unsafe { call!(self.gpu.about(), cuStreamWaitEvent(self.raw, event, 0)) }
    }

    /// Whether all enqueued work of the stream is done. Does not block.
    ///
    /// # Errors
    /// The driver's error when work has failed; the whole context is then unusable.
    pub fn query(&self) -> Result<bool> {
        let _current = self.gpu.make_current()?;
        // SAFETY: the stream is alive.
        event::done("cuStreamQuery", &self.gpu, unsafe { ask!(cuStreamQuery(self.raw)) }?)
    }

    /// Waits until all enqueued work of the stream is done.
    ///
    /// # Errors
    /// The errors of [`CudaStream::query`], or [`CudaError::TimedOut`](super::CudaError::TimedOut); after a
    /// timeout the work goes on.
    pub fn wait(&self, timeout: Duration) -> Result<()> {
        event::wait_until(&self.gpu, "work in a stream", timeout, || self.query())
    }
}

impl Batch {
    fn fill(&mut self, copies: &[GpuCopy]) {
        self.targets.clear();
        self.sources.clear();
        self.sizes.clear();
        for GpuCopy { source, target, bytes } in copies.iter().copied().filter(|copy| copy.bytes > 0) {
            self.targets.push(target);
            self.sources.push(source);
            self.sizes.push(bytes);
        }
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        match self.whose {
            Whose::Own => {}
            Whose::Shared => {
                self.gpu.urgent_users(self.raw, -1);
                return;
            }
            Whose::Left => return,
        }
        match self.wait(limits::GPU_END_TIMEOUT) {
            Ok(()) => self.destroy(),
            Err(error) if error.ends_work() => self.destroy(),
            Err(_) => self.leave(),
        }
    }
}

impl CudaStream {
    fn destroy(&self) {
        let Ok(_current) = self.gpu.make_current() else { return };
        // SAFETY: the stream is alive, and the callers use it for the last time.
        let _ = unsafe { call!(self.gpu.about(), cuStreamDestroy_v2(self.raw)) };
    }

    /// Hands the raw stream over to a thread that waits for its work, keeps the GPU open meanwhile, and destroys it.
    fn leave(&self) {
        let stream =
            CudaStream { gpu: self.gpu.clone(), raw: self.raw, whose: Whose::Own, batch: Mutex::default() };
        tracing::info!("work in {stream:?} has not ended yet: the stream is kept until it does");
        // Without a thread, or if its work may run for ever, it is never destroyed.
        let mut stream = ManuallyDrop::new(stream);
        let end = move || match stream.finish() {
            Ok(()) => {
                stream.destroy();
                stream.whose = Whose::Left;
                drop(ManuallyDrop::into_inner(stream));
            }
            Err(error) => {
                tracing::error!(%error, "cannot tell whether work in {stream:?} has ended: it is never destroyed");
            }
        };
        if let Err(error) = thread::Builder::new().name("ferrywire-gpu".into()).spawn(end) {
            tracing::error!(
                "cannot start a thread that waits for the work: {error}; the stream is never destroyed"
            );
        }
    }
}

impl std::fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaStream({:?} of GPU {})", self.raw, self.gpu.index())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Neighbouring copies may belong to different allocations; callers have already merged those that do
    /// not.
    #[test]
    fn a_batch_holds_the_copies_that_have_bytes_as_they_are() {
        let copy = |source, target, bytes| GpuCopy { source, target, bytes };
        let mut batch = Batch::default();
        batch.fill(&[copy(9, 9, 9)]);
        batch.fill(&[copy(100, 500, 10), copy(110, 510, 5), copy(7, 7, 0), copy(116, 600, 4)]);
        assert_eq!(batch.sources, [100, 110, 116]);
        assert_eq!(batch.targets, [500, 510, 600]);
        assert_eq!(batch.sizes, [10, 5, 4]);
        batch.fill(&[copy(1, 1, 0)]);
        assert!(batch.sizes.is_empty());
    }
}
