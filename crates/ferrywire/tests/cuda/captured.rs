//! CUDA graphs that a user's thread captures while ferrywire calls the driver. Runs on a GPU and with the stand-in.

use crate::{gpu, is_alone, moves};
use cudarc::driver::sys;
use ferrywire::{Endpoint, Error, ErrorKind, StreamEvent, TransferError};
use ferrywire_memory::cuda::{CudaError, CudaGpu, CudaStream};
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);
const BYTES: usize = 1 << 20;

/// A graph that this thread captures in the global mode, which is PyTorch's default.
struct Capture {
    gpu: Arc<CudaGpu>,
    stream: CudaStream,
}

impl Capture {
    fn begin(gpu: &Arc<CudaGpu>) -> Capture {
        let stream = gpu.stream().unwrap();
        let global = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        // SAFETY: the stream lives as long as the capture.
        let code =
            gpu.with_current(|| unsafe { sys::cuStreamBeginCapture_v2(stream.raw(), global) }).unwrap();
        assert_eq!(code as u32, 0, "{code:?}");
        Capture { gpu: gpu.clone(), stream }
    }

    /// Ends the capture, which fails if a call of any thread has made the graph invalid.
    fn end(self) {
        let mut graph = ptr::null_mut();
        let end = || {
            // SAFETY: the driver writes one pointer, for which there is room; the graph is destroyed once.
            unsafe {
                let code = sys::cuStreamEndCapture(self.stream.raw(), &mut graph);
                if !graph.is_null() {
                    let _ = sys::cuGraphDestroy(graph);
                }
                code
            }
        };
        let code = self.gpu.with_current(end).unwrap();
        assert_eq!(code as u32, 0, "the capture: {code:?}");
    }
}

/// Sets the capture mode of this thread; returns the mode from before.
fn exchange(mode: sys::CUstreamCaptureMode) -> sys::CUstreamCaptureMode {
    let mut exchanged = mode;
    // SAFETY: the driver reads and writes one mode.
    let code = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut exchanged) };
    assert_eq!(code as u32, 0, "{code:?}");
    exchanged
}

/// Regression: the driver refused the calls with error 900, so transfers failed, and the graph was invalid.
#[test]
fn a_graph_is_captured_while_memory_is_allocated_moved_and_freed() {
    let Some(gpu) = gpu() else { return };
    if !is_alone("captured::a_graph_is_captured_while_memory_is_allocated_moved_and_freed") {
        return;
    }
    let accepting = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).channels(2).build().unwrap();
    let connecting = Endpoint::builder().channels(2).build().unwrap();
    let near = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
    let far = accepting.accept(LONG).unwrap();
    let streams = [gpu.stream().unwrap(), gpu.stream().unwrap()];
    let capture = Capture::begin(&gpu);

    // Memory of the GPU, and with the first transfer its rings, copiers and streams.
    let source = connecting.alloc_cuda(0, BYTES).unwrap();
    let target = accepting.alloc_cuda(0, BYTES).unwrap();
    moves(&near, &source, &target, 3);
    // Both orders of transfers and streams.
    source.write_at(0, &[5; BYTES]).unwrap();
    let received = far.recv(1, &target, 0, BYTES as u64).unwrap();
    received.block_stream(&streams[1]).unwrap();
    let ready = near.on_stream(StreamEvent::after_stream(&streams[0]).unwrap());
    assert_eq!(ready.send(1, &source, 0, BYTES as u64).unwrap().wait(LONG), Ok(BYTES as u64));
    assert_eq!(received.wait(LONG), Ok(BYTES as u64));
    streams[1].wait(LONG).unwrap();
    let mut found = vec![0; BYTES];
    target.read_at(0, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 5));
    // What is freed and unpinned, by this thread and by those of the endpoints.
    drop((source, target, streams, gpu.pinned_once(BYTES).unwrap()));
    near.close(LONG).unwrap();
    connecting.close(LONG).unwrap();
    accepting.close(LONG).unwrap();

    capture.end();
}

/// A thread that called ferrywire would capture in another mode than it had chosen.
#[test]
fn a_thread_keeps_its_capture_mode_after_calls_that_poll_the_gpu() {
    let Some(gpu) = gpu() else { return };
    let modes = [
        sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
        sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
    ];
    let accepting = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).threads(1).build().unwrap();
    let connecting = Endpoint::builder().threads(1).build().unwrap();
    let near = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
    let stream = gpu.stream().unwrap();
    let mut before = exchange(modes[0]);
    for (mode, next) in modes.into_iter().zip(modes.into_iter().cycle().skip(1)) {
        // Stream events are polled by the thread that waits for the transfer.
        let source = connecting.alloc_cuda(0, BYTES).unwrap();
        let target = accepting.alloc_cuda(0, BYTES).unwrap();
        moves(&near, &source, &target, 7);
        let ready = near.on_stream(StreamEvent::after_stream(&stream).unwrap());
        let write = ready.write(&source, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
        assert_eq!(write.wait(LONG), Ok(BYTES as u64));
        drop((source, target));
        before = exchange(next);
        assert_eq!(before, mode);
    }
    assert_eq!(before, modes[2]);
    exchange(before);
}

/// Regression: the wait, or the event, became part of the graph. A replay did not wait for the transfer, and a transfer
/// after the event failed.
#[test]
fn a_transfer_is_not_ordered_with_a_stream_that_captures_a_graph() {
    let Some(gpu) = gpu() else { return };
    if !is_alone("captured::a_transfer_is_not_ordered_with_a_stream_that_captures_a_graph") {
        return;
    }
    let accepting = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let connecting = Endpoint::builder().build().unwrap();
    let near = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
    let far = accepting.accept(LONG).unwrap();
    let source = connecting.register(vec![9; BYTES]).unwrap();
    let target = accepting.alloc_cuda(0, BYTES).unwrap();
    let received = far.recv(1, &target, 0, BYTES as u64).unwrap();
    let capture = Capture::begin(&gpu);
    let stream = &capture.stream;
    let expected = CudaError::StreamCapturing { gpu: 0, stream: stream.raw() as u64 };
    assert!(expected.to_string().contains(&format!("stream {:#x} of", stream.raw() as u64)), "{expected}");
    let error = received.block_stream(stream).expect_err("a replay of the graph does not wait");
    assert_eq!((error.kind(), error), (ErrorKind::Usage, TransferError::Cuda(expected.clone())));
    for after in [
        StreamEvent::after_stream(stream),
        // SAFETY: the stream lives as long as the capture.
        unsafe { StreamEvent::after_raw_stream(&gpu, stream.raw()) },
    ] {
        assert_eq!(after.expect_err("the event is part of the graph"), Error::Cuda(expected.clone()));
    }
    capture.end();
    assert_eq!(near.send(1, &source, 0, BYTES as u64).unwrap().wait(LONG), Ok(BYTES as u64));
    assert_eq!(received.wait(LONG), Ok(BYTES as u64));
    // The wait that was refused stops no later work.
    let stream = gpu.stream().unwrap();
    received.block_stream(&stream).unwrap();
    stream.wait(LONG).unwrap();
}
