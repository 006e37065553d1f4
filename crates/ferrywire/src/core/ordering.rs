//! Transfers in the order of a GPU's work: after what a stream has enqueued, and before what follows in it.
//!
//! ```text
//!   kernel ── StreamEvent ──▶ write, send ── Transfer::block_stream ──▶ kernel
//! ```
//!
//! A [`StreamEvent`] marks when memory may be used. Operations posted through
//! [`Peer::on_stream`](crate::Peer::on_stream) begin only then, while the caller goes on. In the other
//! direction a stream waits, on the device, until a transfer has ended. No thread of the host waits.
//!
//! Invariant: a stream that waits for a transfer continues when the transfer ends, with success or failure.
//! Read next: `peer/stream_queue.rs`, where operations wait.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::Result;
use ferrywire_memory::cuda::{CudaEvent, CudaGpu, CudaStream, PinnedBuffer, RawStream, deferred_free};
use ferrywire_memory::sim::{HostGate, SimEvent, SimStream};

/// A point in a GPU stream after which memory may be used: everything enqueued before it is done.
#[derive(Clone)]
pub struct StreamEvent(Mark);

#[derive(Clone)]
enum Mark {
    Sim(Arc<SimEvent>),
    Cuda(Arc<CudaEvent>),
}

impl StreamEvent {
    /// Creates an event after everything that `stream` has enqueued so far.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda) if the stream captures a CUDA graph, which an event cannot leave, or
    /// if the driver fails.
    pub fn after_stream(stream: &CudaStream) -> Result<StreamEvent> {
        // SAFETY: `stream` is borrowed, so it is live.
        unsafe { StreamEvent::after_raw_stream(stream.gpu(), stream.raw()) }
    }

    /// Creates an event in a foreign stream, such as PyTorch's; null is the default stream.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda) if the stream captures a CUDA graph, which an event cannot leave, or
    /// if the driver fails.
    ///
    /// # Safety
    /// `stream` is a live stream of this GPU's primary context, or null.
    pub unsafe fn after_raw_stream(gpu: &Arc<CudaGpu>, stream: RawStream) -> Result<StreamEvent> {
        let event = CudaEvent::new(gpu)?;
        // SAFETY: promised by the caller of this function.
        unsafe { event.record_raw(stream) }?;
        Ok(StreamEvent(Mark::Cuda(Arc::new(event))))
    }

    /// Wraps an event, as it was recorded last, not during a capture of a CUDA graph. The caller must not record it
    /// again before it has happened.
    pub fn after_event(event: Arc<CudaEvent>) -> StreamEvent {
        StreamEvent(Mark::Cuda(event))
    }

    /// Creates an event in the stream of a simulated GPU.
    ///
    /// # Errors
    /// The error of a stream that has failed.
    pub fn after_sim(stream: &SimStream) -> Result<StreamEvent> {
        let event = SimEvent::new();
        stream.record(&event)?;
        Ok(StreamEvent(Mark::Sim(Arc::new(event))))
    }

    /// Whether both events are clones of one event.
    pub(crate) fn is_same(&self, other: &StreamEvent) -> bool {
        match (&self.0, &other.0) {
            (Mark::Sim(mine), Mark::Sim(theirs)) => Arc::ptr_eq(mine, theirs),
            (Mark::Cuda(mine), Mark::Cuda(theirs)) => Arc::ptr_eq(mine, theirs),
            _ => false,
        }
    }

    /// Whether the event has happened. Does not block.
    ///
    /// # Errors
    /// The driver's error if the event never will happen.
    pub(crate) fn poll(&self) -> Result<bool> {
        match &self.0 {
            Mark::Sim(event) => Ok(event.query()?),
            Mark::Cuda(event) => Ok(event.query()?),
        }
    }
}

impl fmt::Debug for StreamEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Mark::Sim(event) => write!(f, "StreamEvent({event:?})"),
            Mark::Cuda(event) => write!(f, "StreamEvent({event:?})"),
        }
    }
}

/// A point where a GPU stream waits; opened once.
pub(crate) enum Gate {
    Sim(HostGate),
    Cuda(CudaGate),
}

impl Gate {
    /// Lets the stream continue behind the gate.
    pub fn open(self) {
        match self {
            Gate::Sim(gate) => gate.open(),
            Gate::Cuda(gate) => gate.open(),
        }
    }
}

/// A word in pinned memory that a stream polls until its value is large enough.
pub(crate) struct CudaGate {
    words: Arc<Words>,
    word: usize,
    value: u64,
}

impl CudaGate {
    fn open(self) {
        self.words.word(self.word).store(self.value, Ordering::Release);
        deferred_free::stream_goes_on();
        self.words.free.lock().unwrap_or_else(PoisonError::into_inner).push((self.word, self.value));
    }
}

/// A page of pinned memory with the words of many gates. The word of an opened gate is reused at once with a larger
/// value, which also releases streams that wait for a smaller value.
struct Words {
    page: PinnedBuffer,
    /// Unused words, each with its current value.
    free: Mutex<Vec<(usize, u64)>>,
}

/// Number of words in a page.
const WORDS: usize = 512;

impl Words {
    fn word(&self, index: usize) -> &AtomicU64 {
        debug_assert!(index < WORDS);
        // SAFETY: the word lies inside the page and is aligned; the GPU only reads it.
        unsafe { &*self.page.as_ptr().cast::<AtomicU64>().add(index) }
    }

    fn take(self: &Arc<Self>) -> Option<CudaGate> {
        let (word, value) = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        Some(CudaGate { words: self.clone(), word, value: value + 1 })
    }
}

/// Gates of an endpoint. Pages are kept until the endpoint ends, since freeing one may wait for the GPU.
#[derive(Default)]
pub(crate) struct Gates(Mutex<Vec<Arc<Words>>>);

impl Gates {
    /// Makes a stream wait from here on, until the returned gate is opened.
    ///
    /// # Errors
    /// The stream captures a CUDA graph, or the driver's error; the stream then does not wait.
    ///
    /// # Safety
    /// `stream` is a live stream of this GPU's primary context, or null.
    pub unsafe fn block(&self, gpu: &Arc<CudaGpu>, stream: RawStream) -> Result<Gate> {
        let gate = self.gate(gpu)?;
        deferred_free::stream_waits(gpu.index());
        let address = gate.words.page.address() + 8 * gate.word as u64;
        // SAFETY: the word lies in pinned memory, is aligned, and lives as long as the endpoint. It is
        // written when the transfer ends, or below if the stream does not wait for it.
        match unsafe { CudaStream::wait_flag_raw(gpu, stream, address, gate.value) } {
            Ok(()) => Ok(Gate::Cuda(gate)),
            Err(error) => {
                gate.open();
                Err(error.into())
            }
        }
    }

    fn gate(&self, gpu: &Arc<CudaGpu>) -> Result<CudaGate> {
        let mut pages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of_gpu = |words: &&Arc<Words>| words.page.gpu().index() == gpu.index();
        if let Some(gate) = pages.iter().filter(of_gpu).find_map(Words::take) {
            return Ok(gate);
        }
        // The last word of the page is the gate that is returned.
        let free = Mutex::new((0..WORDS - 1).map(|word| (word, 0)).collect());
        let words = Arc::new(Words { page: gpu.pinned_once(WORDS * size_of::<u64>())?, free });
        pages.push(words.clone());
        Ok(CudaGate { words, word: WORDS - 1, value: 1 })
    }
}
