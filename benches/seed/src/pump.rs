//! The old system's loop: how one message goes over the channels of one GPU.
//!
//! Chunk i of a message goes over channel i mod N. A channel has at most 12 sends or 16 receives in flight,
//! and only its oldest request is tested. A received chunk is gathered by a launch of its own, which the
//! thread waits for before it gives the receive back. After a round over all channels that brought nothing
//! the thread sleeps for 10 us.
//!
//! Mistakes of the old system are not copied: log lines in the loop, tables uploaded for each chunk, errors
//! treated as "not done yet".

use std::collections::VecDeque;
use std::ffi::c_void;
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use ferrywire_memory::unpack::{DeviceUnpack, Gather, UnpackMode};
use ferrywire_ncclnet::abi::{PointerType, ResultCode};
use ferrywire_ncclnet::{Comm, MemoryHandle, Posted, RecvBuffer, RecvComm, Request, SendComm};

use crate::Result;
use crate::gpu::Gpu;

const CHUNK_BYTES: usize = 512 << 10;
const SENDS_MAX: usize = 12;
const RECEIVES_MAX: usize = 16;
const PAUSE: Duration = Duration::from_micros(10);
/// Longest wait for a connection, a line of the other end, a gather or progress of any chunk.
pub const STALL_LIMIT: Duration = Duration::from_secs(60);

/// A part of a message: address and length.
type Chunk = (u64, usize);

/// One end of a connection.
pub trait End {
    const IN_FLIGHT_MAX: usize;

    fn comm(&self) -> &Comm;

    /// Posts a chunk.
    ///
    /// # Safety
    /// The chunk lies in the registered memory, and no other code uses it until its request is finished.
    unsafe fn post(&self, chunk: Chunk, memory: MemoryHandle) -> Posted;

    /// Finishes the oldest request, which the plugin has reported as done.
    fn finish(&mut self, request: Request, chunk: Chunk) -> Result<()>;

    fn close(self) -> Result<()>;
}

impl End for SendComm {
    const IN_FLIGHT_MAX: usize = SENDS_MAX;

    fn comm(&self) -> &Comm {
        self
    }

    unsafe fn post(&self, (address, bytes): Chunk, memory: MemoryHandle) -> Posted {
        // SAFETY: promised by the caller; the receiver posts a receive of the same length.
        unsafe { self.isend(address as *mut c_void, bytes, 0, memory) }
    }

    fn finish(&mut self, _request: Request, _chunk: Chunk) -> Result<()> {
        Ok(())
    }

    fn close(self) -> Result<()> {
        Ok(SendComm::close(self)?)
    }
}

/// The receiving end of a connection, with its gather.
pub struct Receiver {
    gather: Gather,
    gathered: u64,
    comm: RecvComm,
}

impl Receiver {
    pub fn new(comm: RecvComm, gpu: &Gpu) -> Result<Receiver> {
        let handle =
            comm.device_handle().ok_or("this plugin does not scatter receives as GPUDirect-TCPX does")?;
        // SAFETY: the handle is this comm's, which is closed after the gather is dropped, or never.
        let unpack = unsafe { DeviceUnpack::read(gpu.queue()?, &handle) }?;
        Ok(Receiver { gather: Gather::new(UnpackMode::Kernel, unpack)?, gathered: 0, comm })
    }
}

impl End for Receiver {
    const IN_FLIGHT_MAX: usize = RECEIVES_MAX;

    fn comm(&self) -> &Comm {
        &self.comm
    }

    unsafe fn post(&self, (address, bytes): Chunk, memory: MemoryHandle) -> Posted {
        // SAFETY: promised by the caller of this function.
        unsafe { self.comm.irecv(&[RecvBuffer { data: address as *mut c_void, bytes, tag: 0, memory }]) }
    }

    /// Gathers the chunk, waits for the gather, and returns the receive to the plugin.
    fn finish(&mut self, request: Request, (address, bytes): Chunk) -> Result<()> {
        let since = Instant::now();
        self.gather.start(self.gathered, address, bytes as u64, bytes as u64)?;
        loop {
            match self.gather.poll(self.gathered) {
                Poll::Ready(outcome) => break outcome.map(drop)?,
                Poll::Pending if since.elapsed() > STALL_LIMIT => {
                    return Err(format!("the GPU has not gathered a chunk within {STALL_LIMIT:?}").into());
                }
                Poll::Pending => thread::yield_now(),
            }
        }
        self.gathered += 1;
        // SAFETY: this is a finished receive of this comm, and the oldest that was not returned.
        Ok(unsafe { self.comm.irecv_consumed(1, request) }?)
    }

    fn close(self) -> Result<()> {
        drop(self.gather);
        Ok(self.comm.close()?)
    }
}

/// A connection, with its part of the current message.
pub struct Channel<E> {
    end: E,
    memory: MemoryHandle,
    chunks: VecDeque<Chunk>,
    posted: VecDeque<(Request, Chunk)>,
}

/// Moves one message, which begins at `address`.
pub fn transfer<E: End>(channels: &mut [Channel<E>], address: u64, bytes: usize) -> Result<()> {
    for (i, offset) in (0..bytes).step_by(CHUNK_BYTES).enumerate() {
        let chunk = (address + offset as u64, CHUNK_BYTES.min(bytes - offset));
        channels[i % channels.len()].chunks.push_back(chunk);
    }
    let mut since = Instant::now();
    while channels.iter().any(|channel| !channel.is_finished()) {
        let mut worked = false;
        for channel in &mut *channels {
            worked |= channel.round()?;
        }
        if worked {
            since = Instant::now();
        } else if since.elapsed() > STALL_LIMIT {
            return Err(format!("no chunk made progress for {STALL_LIMIT:?}").into());
        } else {
            thread::sleep(PAUSE);
        }
    }
    Ok(())
}

impl<E: End> Channel<E> {
    pub fn new(end: E, gpu: &Gpu) -> Result<Channel<E>> {
        let (address, bytes) = gpu.memory();
        let (data, kind) = (address as *mut c_void, PointerType::Cuda);
        // SAFETY: the range is a whole allocation of the GPU, which is freed after the comm is closed, or
        // when the process ends.
        let memory = gpu.current(|| Ok(unsafe { end.comm().reg_mr(data, bytes, kind) }?))?;
        Ok(Channel { end, memory, chunks: VecDeque::new(), posted: VecDeque::new() })
    }

    fn is_finished(&self) -> bool {
        self.chunks.is_empty() && self.posted.is_empty()
    }

    /// Posts chunks while there is room, and tests the oldest request. Returns whether anything was posted or
    /// finished.
    fn round(&mut self) -> Result<bool> {
        let before = (self.chunks.len(), self.posted.len());
        while let Some(&chunk) = self.chunks.front().filter(|_| self.posted.len() < E::IN_FLIGHT_MAX) {
            // SAFETY: the chunk lies in the registered memory; the next message begins when this one is
            // finished at both ends.
            match unsafe { self.end.post(chunk, self.memory) } {
                Posted::Request(request) => self.posted.push_back((request, chunk)),
                // Plugins report in two ways that they have no room.
                Posted::Null => break,
                Posted::Refused(error) if error.code() == Some(ResultCode::INTERNAL_ERROR) => break,
                Posted::Refused(error) => return Err(error.into()),
            }
            self.chunks.pop_front();
        }
        while let Some(&(request, chunk)) = self.posted.front() {
            let comm = self.end.comm();
            // SAFETY: this is the comm's oldest request, which was not done before.
            let tested = unsafe { comm.test(request) };
            match (tested.code, tested.done) {
                (ResultCode::SUCCESS, true) => self.end.finish(request, chunk)?,
                (ResultCode::SUCCESS, false) => break,
                (code, _) => return Err(format!("test of {}: the plugin returned {code}", comm.id()).into()),
            }
            self.posted.pop_front();
        }
        Ok(before != (self.chunks.len(), self.posted.len()))
    }

    /// Closes the connection between two messages.
    pub fn close(self) -> Result<()> {
        // SAFETY: this is a registration of this comm, which no request uses.
        unsafe { self.end.comm().dereg_mr(self.memory) }?;
        self.end.close()
    }
}
