//! Driver calls that fail without the loss of the context: the work that they ask for may still run. Needs the stand-in, in
//! which such calls can be made to fail.

use crate::{ALONE, gather, gpu, is_alone, of_stand_in, passes};
use ferrywire::Endpoint;
use ferrywire_memory::GpuCopy;
use ferrywire_memory::cuda::{CudaBuffer, CudaGpu, CudaStream, PinnedBuffer, pinned_bytes};
use ferrywire_memory::unpack::GatherDevice;
use std::ffi::{CStr, c_int, c_void};
use std::mem::transmute;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

/// Far more than anything here takes.
const LONG: Duration = Duration::from_secs(60);
const BYTES: usize = 300_000;
/// `CUDA_ERROR_UNKNOWN`, and `CUDA_ERROR_LAUNCH_FAILED`, after which the context is lost.
const UNKNOWN: i32 = 999;
const LAUNCH_FAILED: i32 = 719;

/// A number of the stand-in; `None` where the driver is another.
fn number(name: &CStr) -> Option<&'static AtomicI32> {
    // SAFETY: the number of this name is an `int`, which both sides only use as an atomic.
    of_stand_in(name).map(|found| unsafe { AtomicI32::from_ptr(found.cast()) })
}

/// How many calls have failed because a test asked for it.
fn failures() -> i32 {
    number(c"failures").unwrap().load(SeqCst)
}

/// Makes calls fail until the value is dropped.
struct Failing(&'static AtomicI32);

impl Failing {
    fn with(code: i32, name: &CStr) -> Failing {
        let failing = Failing(number(name).unwrap());
        failing.0.store(code, SeqCst);
        failing
    }
}

impl Drop for Failing {
    fn drop(&mut self) {
        self.0.store(0, SeqCst);
    }
}

/// Stops the copy engines until the value is dropped.
struct StoppedCopies(extern "C" fn(c_int));

impl StoppedCopies {
    fn new() -> StoppedCopies {
        let stop = of_stand_in(c"stand_in_hold_copies").unwrap();
        // SAFETY: the function of this name has this type.
        let stop = unsafe { transmute::<*mut c_void, extern "C" fn(c_int)>(stop) };
        stop(1);
        StoppedCopies(stop)
    }
}

impl Drop for StoppedCopies {
    fn drop(&mut self) {
        (self.0)(0);
    }
}

fn open_streams() -> c_int {
    let count = of_stand_in(c"stand_in_open_streams").unwrap();
    // SAFETY: the function of this name has this type.
    let count = unsafe { transmute::<*mut c_void, extern "C" fn() -> c_int>(count) };
    count()
}

fn until(what: &str, mut is_true: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_true() {
        assert!(start.elapsed() < LONG, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// The GPU, in a process of its own whose driver is the stand-in.
fn scene(test: &str) -> Option<Arc<CudaGpu>> {
    let gpu = gpu()?;
    if number(c"query_code").is_none() {
        println!("SKIPPED: needs the stand-in for the driver");
        return None;
    }
    is_alone(test).then_some(gpu)
}

/// Pinned memory, and memory of the GPU.
type Buffers = (PinnedBuffer, CudaBuffer);

/// A stopped copy in a stream, with the memory that it uses. Freeing that memory would wait for the copy.
fn stopped_copy(gpu: &Arc<CudaGpu>) -> (CudaStream, Buffers, StoppedCopies) {
    let (from, to) = (gpu.pinned(BYTES).unwrap(), gpu.alloc(BYTES, 4096).unwrap());
    let (stream, stopped) = (gpu.stream().unwrap(), StoppedCopies::new());
    // SAFETY: the callers keep both buffers until the copy has ended.
    unsafe { stream.copy(from.address(), to.address(), BYTES) }.unwrap();
    (stream, (from, to), stopped)
}

/// Regression: the copier was dropped as if its copy had ended. The transfer failed, its memory was free, and the copy
/// wrote to it later.
#[test]
fn a_failed_query_does_not_end_a_transfer_whose_copy_still_runs() {
    const TEST: &str = "failed_calls::a_failed_query_does_not_end_a_transfer_whose_copy_still_runs";
    if gpu().is_none() || number(c"query_code").is_none() {
        return println!("SKIPPED: needs the stand-in for the driver");
    }
    if std::env::var_os(ALONE).is_none() {
        // With the copy engines alone, which can be stopped.
        return passes(TEST, &[("CUDA_LAUNCH_BLOCKING", "1")]);
    }
    let builder = || Endpoint::builder().channels(1);
    let accepting = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let connecting = builder().build().unwrap();
    let near = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
    let source = connecting.register(vec![7; BYTES]).unwrap();
    let target = accepting.alloc_cuda(0, BYTES).unwrap();
    let write = || near.write(&source, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
    // The first transfer makes what the channel needs.
    assert_eq!(write().wait(LONG), Ok(BYTES as u64));
    target.write_at(0, &[0; BYTES]).unwrap();

    let (stopped, before) = (StoppedCopies::new(), failures());
    let failing = Failing::with(UNKNOWN, c"query_code");
    let write = write();
    until("the driver is not asked", || {
        assert_eq!(write.poll(), None, "the transfer ended, and its copy did not");
        failures() >= before + 10
    });
    drop(failing);
    drop(stopped);
    assert_eq!(write.wait(LONG), Ok(BYTES as u64));
    let mut found = vec![0; BYTES];
    target.read_at(0, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 7));
}

/// Regression: any error of the query counted as the end of the stream's work.
#[test]
fn a_stream_whose_query_fails_is_not_destroyed_before_its_work_ends() {
    let name = "failed_calls::a_stream_whose_query_fails_is_not_destroyed_before_its_work_ends";
    let Some(gpu) = scene(name) else { return };
    let (stream, buffers, stopped) = stopped_copy(&gpu);
    let _failing = Failing::with(UNKNOWN, c"query_code");
    let open = open_streams();
    drop(stream);
    assert_eq!(open_streams(), open, "its copy still runs");
    drop(stopped);
    until("the stream is not destroyed", || open_streams() == open - 1);
    drop(buffers);
}

/// Regression: `finish` returned after the first error, while the work of the stream still ran.
#[test]
fn finish_asks_again_after_an_error_that_does_not_end_the_work() {
    let name = "failed_calls::finish_asks_again_after_an_error_that_does_not_end_the_work";
    let Some(gpu) = scene(name) else { return };
    let (stream, buffers, stopped) = stopped_copy(&gpu);
    let failing = Failing::with(UNKNOWN, c"synchronize_code");
    thread::scope(|scope| {
        let finishing = scope.spawn(|| stream.finish());
        until("the driver is not asked again", || failures() >= 3 || finishing.is_finished());
        drop(failing);
        assert!(!finishing.is_finished(), "it finished, and the copy did not");
        drop(stopped);
        assert_eq!(finishing.join().unwrap(), Ok(()));
    });
    // An error that lasts is reported, and the loss of the context is an end.
    let failing = Failing::with(UNKNOWN, c"synchronize_code");
    assert_eq!(stream.finish().unwrap_err().code(), Some(UNKNOWN as u32));
    drop(failing);
    let _failing = Failing::with(LAUNCH_FAILED, c"synchronize_code");
    assert_eq!(stream.finish(), Ok(()));
    drop(buffers);
}

/// Regression: the receives of a connection failed, and their memory was free, while the GPU still gathered them.
#[test]
fn a_failed_query_does_not_fail_a_gather_that_still_runs() {
    let name = "failed_calls::a_failed_query_does_not_fail_a_gather_that_still_runs";
    let Some(gpu) = scene(name) else { return };
    let Some((_, mut queue)) = gather::queue() else { return };
    let (from, to) = (gpu.pinned(BYTES).unwrap(), gpu.alloc(BYTES, 4096).unwrap());
    let stopped = StoppedCopies::new();
    queue.copy(&[GpuCopy { source: from.address(), target: to.address(), bytes: BYTES }]).unwrap();
    queue.mark().unwrap();
    let failing = Failing::with(UNKNOWN, c"query_code");
    until("the driver is not asked", || {
        assert_eq!(queue.reached(), Ok(0));
        failures() >= 3
    });
    drop(failing);
    drop(stopped);
    until("the mark is not reached", || queue.reached() == Ok(1));
    drop(queue);
}

/// Whether a page of this process is mapped.
fn is_mapped(page: usize) -> bool {
    let mut present = 0u8;
    // SAFETY: one byte for one page; an address that is not mapped is an error.
    unsafe { libc::mincore(page as *mut c_void, 4096, &mut present) == 0 }
}

/// Regression: the pages were unmapped while the driver still knew them, and later memory at the address was the GPU's.
#[test]
fn pages_that_the_driver_does_not_unpin_stay_mapped() {
    let Some(gpu) = scene("failed_calls::pages_that_the_driver_does_not_unpin_stay_mapped") else { return };
    for (code, stays) in [(UNKNOWN, true), (LAUNCH_FAILED, false)] {
        let before = pinned_bytes();
        let buffer = gpu.pinned_once(BYTES).unwrap();
        let (page, bytes) = (buffer.as_ptr() as usize, buffer.pinned_bytes() as u64);
        let failing = Failing::with(code, c"unregister_code");
        let asked = failures();
        drop(buffer);
        assert_eq!(failures(), asked + 1);
        drop(failing);
        assert_eq!(is_mapped(page), stays, "{code}");
        assert_eq!(pinned_bytes(), before + if stays { bytes } else { 0 });
    }
}
