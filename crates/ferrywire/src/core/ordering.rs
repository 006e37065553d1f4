//! Operations in the order of a GPU's work: after what a stream has to do before, and before what it does next.
//!
//! ```text
//!   kernel ── StreamEvent ──▶ write, send ── Transfer::block_stream ──▶ kernel
//! ```
//!
//! A [`StreamEvent`] says when memory may be used; operations posted through [`Peer::on_stream`](crate::Peer::on_stream) begin only
//! then, while the caller goes on. The other way round a stream waits, on the device, until a transfer has ended.
//! Nobody waits on the host.
//!
//! Invariant: a stream that waits for a transfer goes on when that has ended, however it ended.
//! Read next: `peer/stream_queue.rs`, where operations wait.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::Result;
use ferrywire_memory::cuda::{CudaEvent, CudaGpu, CudaStream, PinnedBuffer, RawStream, deferred_free};
use ferrywire_memory::sim::{HostGate, SimEvent, SimStream};

/// When memory may be used: once what a stream of a GPU had to do so far is done.
#[derive(Clone)]
pub struct StreamEvent(Mark);

#[derive(Clone)]
enum Mark {
    Sim(Arc<SimEvent>),
    Cuda(Arc<CudaEvent>),
}

impl StreamEvent {
    /// Once everything enqueued in this stream so far is done.
    ///
    /// # Errors
    /// The driver's.
    pub fn after_stream(stream: &CudaStream) -> Result<StreamEvent> {
        let event = CudaEvent::new(stream.gpu())?;
        stream.record(&event)?;
        Ok(StreamEvent(Mark::Cuda(Arc::new(event))))
    }

    /// The same of somebody else's stream, such as PyTorch's; null is the default one.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// A live stream of this GPU's primary context, or null.
    pub unsafe fn after_raw_stream(gpu: &Arc<CudaGpu>, stream: RawStream) -> Result<StreamEvent> {
        let event = CudaEvent::new(gpu)?;
        // SAFETY: by the caller's promise.
        unsafe { event.record_raw(stream) }?;
        Ok(StreamEvent(Mark::Cuda(Arc::new(event))))
    }

    /// Once an event is done, as it was recorded last. It must not be recorded again before that.
    pub fn after_event(event: Arc<CudaEvent>) -> StreamEvent {
        StreamEvent(Mark::Cuda(event))
    }

    /// Of a simulated GPU's stream.
    ///
    /// # Errors
    /// The stream's, when it has failed.
    pub fn after_sim(stream: &SimStream) -> Result<StreamEvent> {
        let event = SimEvent::new();
        stream.record(&event)?;
        Ok(StreamEvent(Mark::Sim(Arc::new(event))))
    }

    /// Whether both stand for the same place in a stream.
    pub(crate) fn is_same(&self, other: &StreamEvent) -> bool {
        match (&self.0, &other.0) {
            (Mark::Sim(mine), Mark::Sim(theirs)) => Arc::ptr_eq(mine, theirs),
            (Mark::Cuda(mine), Mark::Cuda(theirs)) => Arc::ptr_eq(mine, theirs),
            _ => false,
        }
    }

    /// Whether it is so; an error when it never will be. Does not block.
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

/// What a stream waits for: opened once.
pub(crate) enum Gate {
    Sim(HostGate),
    Cuda(CudaGate),
}

impl Gate {
    /// Everything behind it in the stream goes on.
    pub fn open(self) {
        match self {
            Gate::Sim(gate) => gate.open(),
            Gate::Cuda(gate) => gate.open(),
        }
    }
}

/// A word in pinned memory that a stream looks at until it is large enough.
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

/// A page of such words. A word is used again as soon as it was opened, with a larger number, which lets those pass
/// who wait for a smaller one.
struct Words {
    page: PinnedBuffer,
    /// Each with the number it has.
    free: Mutex<Vec<(usize, u64)>>,
}

/// Words of one page.
const WORDS: usize = 512;

impl Words {
    fn word(&self, index: usize) -> &AtomicU64 {
        debug_assert!(index < WORDS);
        // SAFETY: inside of the page, aligned; the GPU only reads there.
        unsafe { &*self.page.as_ptr().cast::<AtomicU64>().add(index) }
    }

    fn take(self: &Arc<Self>) -> Option<CudaGate> {
        let (word, value) = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        Some(CudaGate { words: self.clone(), word, value: value + 1 })
    }
}

/// The gates of an endpoint. Pages are kept until it ends: to give one back may have to wait for the GPU.
#[derive(Default)]
pub(crate) struct Gates(Mutex<Vec<Arc<Words>>>);

impl Gates {
    /// Lets a stream wait, from here on, for a gate.
    ///
    /// # Safety
    /// A live stream of this GPU's primary context, or null.
    pub unsafe fn hold(&self, gpu: &Arc<CudaGpu>, stream: RawStream) -> Result<Gate> {
        let gate = self.gate(gpu)?;
        deferred_free::stream_waits();
        let address = gate.words.page.address() + 8 * gate.word as u64;
        // SAFETY: a word of pinned memory, aligned, which lives as long as the endpoint; it is written when the
        // transfer ends, or right here, when nobody waits for it.
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
        // The last word is taken.
        let free = Mutex::new((0..WORDS - 1).map(|word| (word, 0)).collect());
        let words = Arc::new(Words { page: gpu.pinned_once(WORDS * size_of::<u64>())?, free });
        pages.push(words.clone());
        Ok(CudaGate { words, word: WORDS - 1, value: 1 })
    }
}
