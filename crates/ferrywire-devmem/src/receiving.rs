//! Messages on their way in: the next bytes of the stream belong to the oldest one that is not whole.
//!
//! ```text
//!   pool      destination   bytes are brought there by
//!   host      host          the CPU, at once
//!   GPU       that GPU      the GPU, from the pool
//!   GPU       host          the GPU into mapped memory, then the CPU
//!   host      GPU           the CPU into mapped memory, then the GPU
//! ```
//!
//! Where the pool runs empty, the NIC drops packets until something is given back: so all that can be is given back
//! before this end waits for more, and of a message that waits for its rest the GPU brings away what is there.
//!
//! Invariant: no call asks for more bytes than the message lacks; no fragment is believed that leaves the pool.
//! Read next: `gather.rs`; `crate::sys::devmem`, the calls.

use super::NAME;
use super::backend::Backend;
use super::bounce_buffers::{Buffer, Stages};
use super::device::Device;
use super::errors::DevmemError;
use super::gather::{Gatherer, Run as GatherRun};
use crate::sys::devmem::{self, Control, Fragment as Piece, Tokens};
use crate::sys::dmabuf::Reading;
use ferrywire::payload::{DevmemCounters, Run, add};
use ferrywire_memory::unpack::Fragment;
use ferrywire_memory::{GpuCopy, Memory, MemoryLocation};
use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

/// Fragments that one call can tell of.
const PIECES_PER_CALL: usize = 512;
/// Fragments that are given back together while more arrive.
const RELEASE_AT: usize = 96;

/// How long nothing arrives of a message until what is there is gathered.
const PART_AFTER: Duration = Duration::from_millis(5);
/// Parts of messages are numbered from here.
const PARTS: u64 = 1 << 63;

/// How a message gets from where it lands to where it belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    Direct,
    Gpu,
    GpuThenHost,
    HostThenGpu,
}

struct Incoming {
    run: Run,
    route: Route,
    got: usize,
    /// What of it lies in the pool, and what in the buffer for bytes that do not.
    fragments: Vec<Fragment>,
    elsewhere: Vec<Fragment>,
    elsewhere_bytes: usize,
    tokens: Vec<u32>,
    /// Mapped memory that it passes through.
    stage: Option<usize>,
}

/// Some of a message's fragments, on their way out of the pool ahead of the rest.
struct Part {
    number: u64,
    tokens: Vec<u32>,
}

/// One connection's receiving half.
pub(super) struct Receiving {
    fd: RawFd,
    // Before what it reads and writes.
    gatherer: Option<Gatherer>,
    device: Arc<Device>,
    message_bytes_max: usize,
    messages: VecDeque<Incoming>,
    /// Number of the first of them, and how many are whole.
    first: u64,
    whole: usize,
    control: Control,
    buffer: Buffer,
    stages: Stages,
    /// Fragments to be given back.
    back: Tokens,
    /// What is gathered of a message that is not whole, and when bytes last arrived.
    part: Option<Part>,
    parts: u64,
    arrived: Instant,
    spare: Vec<Incoming>,
    counters: Arc<DevmemCounters>,
}

impl Receiving {
    pub fn new(
        fd: RawFd,
        backend: &Arc<Backend>,
        device: Arc<Device>,
        gatherer: Option<Gatherer>,
        counters: Arc<DevmemCounters>,
    ) -> Result<Receiving, String> {
        let (window, message_bytes_max) = (backend.config.window, backend.config.message_bytes_max);
        let buffer = Buffer::new(gatherer.as_ref(), 2 * message_bytes_max)?;
        Ok(Receiving {
            fd,
            gatherer,
            device,
            message_bytes_max,
            messages: VecDeque::with_capacity(window),
            first: 0,
            whole: 0,
            control: Control::new(PIECES_PER_CALL),
            buffer,
            stages: Stages::new(backend.clone(), window, message_bytes_max),
            back: Tokens::new(),
            part: None,
            parts: 0,
            arrived: Instant::now(),
            spare: Vec::new(),
            counters,
        })
    }

    /// Whether messages for this memory have to be gathered behind their arrival.
    pub fn scatters(&self, memory: &Memory) -> bool {
        self.route(memory) != Route::Direct
    }

    fn route(&self, memory: &Memory) -> Route {
        match (self.device.pool().location(), memory.location()) {
            (MemoryLocation::Host, MemoryLocation::Host) => Route::Direct,
            (MemoryLocation::Host, _) => Route::HostThenGpu,
            (_, MemoryLocation::Host) => Route::GpuThenHost,
            _ => Route::Gpu,
        }
    }

    /// The next message; its number, unless memory that it passes through is still being made.
    pub fn expect(&mut self, run: &Run) -> Result<Poll<u64>, String> {
        let route = self.route(run.memory());
        if route != Route::Direct && self.gatherer.is_none() {
            return Err(format!(
                "{} is not memory that this endpoint's {NAME} was given",
                run.memory().location()
            ));
        }
        if run.bytes() > self.message_bytes_max {
            return Err(format!(
                "a message of {} bytes, and {} were agreed on",
                run.bytes(),
                self.message_bytes_max
            ));
        }
        let stage = match route {
            Route::GpuThenHost | Route::HostThenGpu => match self.stages.take()? {
                Poll::Ready(stage) => Some(stage),
                Poll::Pending => return Ok(Poll::Pending),
            },
            Route::Direct | Route::Gpu => None,
        };
        let mut incoming = self.spare.pop().unwrap_or_else(|| Incoming {
            run: run.clone(),
            route,
            got: 0,
            fragments: Vec::new(),
            elsewhere: Vec::new(),
            elsewhere_bytes: 0,
            tokens: Vec::new(),
            stage: None,
        });
        (incoming.run, incoming.route, incoming.got, incoming.stage) = (run.clone(), route, 0, stage);
        self.messages.push_back(incoming);
        Ok(Poll::Ready(self.first + self.messages.len() as u64 - 1))
    }

    /// Receives what is there, and tells whether a message is whole.
    ///
    /// # Errors
    /// Why nothing more will come.
    pub fn is_whole(&mut self, number: u64) -> Result<bool, String> {
        self.look_after_part()?;
        let at = number.wrapping_sub(self.first) as usize;
        while self.whole <= at && self.whole < self.messages.len() {
            if !self.receive()? {
                return Ok(false);
            }
        }
        // What was brought ahead of it has to be there too.
        Ok(at < self.whole && self.part.is_none())
    }

    /// One call, for the oldest message that is not whole. False when nothing is there.
    fn receive(&mut self) -> Result<bool, String> {
        let message = &mut self.messages[self.whole];
        let lacks = message.run.bytes() - message.got;
        if lacks == 0 {
            self.whole += 1;
            return Ok(true);
        }
        if message.got == 0 && !self.buffer.has_room_for(message.run.bytes()) {
            add(&self.counters.waits, 1);
            self.give_back()?;
            return Ok(false);
        }
        let into = self.buffer.next(lacks);
        add(&self.counters.receive_calls, 1);
        // SAFETY: so many bytes of the buffer, which nothing else has in use.
        let received = match unsafe { devmem::receive(self.fd, into, lacks, &mut self.control) } {
            Ok(received) => received,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.make_room();
                self.give_back()?;
                return Ok(false);
            }
            Err(error) => return Err(format!("receiving over {NAME} TCP: {error}")),
        };
        if received.bytes == 0 {
            return Err("the peer closed the connection".into());
        }
        self.arrived = Instant::now();
        self.place(received.bytes, received.plain)?;
        let message = &self.messages[self.whole];
        if message.got == message.run.bytes() {
            self.whole += 1;
        }
        if self.back.fragments() >= RELEASE_AT {
            self.give_back()?;
        }
        Ok(true)
    }

    /// Takes note of, or copies, what one call has brought.
    fn place(&mut self, bytes: usize, plain: bool) -> Result<(), String> {
        let (message, pool) = (&mut self.messages[self.whole], self.device.pool());
        if plain {
            let at = self.buffer.at;
            message.take_elsewhere(&mut self.buffer, &self.stages, at, bytes);
            add(&self.counters.plain_bytes, bytes);
            return Ok(());
        }
        let reads = matches!(message.route, Route::Direct | Route::HostThenGpu);
        let _reading = reads.then(|| Reading::begin(pool.dmabuf()));
        let kept = self.buffer.at;
        for piece in self.control.fragments() {
            match piece {
                Piece::Linear { at, bytes } => {
                    message.take_elsewhere(&mut self.buffer, &self.stages, kept + at, bytes as usize);
                    add(&self.counters.linear_bytes, bytes as usize);
                }
                Piece::Pool { dmabuf, offset, bytes, token } => {
                    if dmabuf != self.device.binding() || !pool.holds(offset, bytes) {
                        let outside = DevmemError::OutsidePool {
                            nic: self.device.name().to_owned(),
                            dmabuf,
                            offset,
                            bytes,
                            pool: self.device.binding(),
                            pool_bytes: pool.bytes() as u64,
                        };
                        return Err(outside.to_string());
                    }
                    add(&self.counters.fragments, 1);
                    add(&self.counters.fragment_bytes, bytes as usize);
                    match message.route {
                        Route::Direct | Route::HostThenGpu => {
                            message.copy_in(
                                (pool.base() + offset) as *const u8,
                                bytes as usize,
                                &self.stages,
                            );
                            self.back.push(token);
                        }
                        Route::Gpu | Route::GpuThenHost => {
                            let target = message.got as u64;
                            message.fragments.push(Fragment { source: offset as u32, bytes, target });
                            message.tokens.push(token);
                            message.got += bytes as usize;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// The pool may be what the rest of a message waits for: what is there makes room, unless more arrives soon. It goes
    /// into the buffer, since nobody expects its destination to be touched yet.
    fn make_room(&mut self) {
        let message = &mut self.messages[self.whole];
        let waits = !message.fragments.is_empty() && self.arrived.elapsed() >= PART_AFTER;
        let Some(gatherer) = self.gatherer.as_mut().filter(|_| waits && self.part.is_none()) else { return };
        let (number, target) = (PARTS | self.parts, self.buffer.address() + self.buffer.at as u64);
        self.parts += 1;
        let mut bytes = 0;
        for fragment in &mut message.fragments {
            let source = (self.buffer.at + bytes) as u32;
            message.elsewhere.push(Fragment { source, ..*fragment });
            fragment.target = bytes as u64;
            bytes += fragment.bytes as usize;
        }
        let run = GatherRun { source: self.device.pool().base(), fragments: &message.fragments };
        gatherer.begin(number, &[run], target);
        self.buffer.keep(bytes);
        message.elsewhere_bytes += bytes;
        message.fragments.clear();
        self.part = Some(Part { number, tokens: std::mem::take(&mut message.tokens) });
    }

    /// Gives back what was brought ahead, once it is.
    fn look_after_part(&mut self) -> Result<(), String> {
        let (Some(part), Some(gatherer)) = (&self.part, &mut self.gatherer) else { return Ok(()) };
        match gatherer.poll(part.number) {
            Poll::Pending => return Ok(()),
            Poll::Ready(result) => result.map_err(|error| error.to_string())?,
        }
        let part = self.part.take();
        part.into_iter().flat_map(|part| part.tokens).for_each(|token| self.back.push(token));
        self.give_back()
    }

    /// Begins to bring a whole message to its place.
    pub fn gather(&mut self, number: u64) -> Result<(), String> {
        let (Some(message), Some(gatherer)) =
            (self.messages.get(number.wrapping_sub(self.first) as usize), &mut self.gatherer)
        else {
            return Err(format!("message {number} is not there to be gathered"));
        };
        let staged = message.stage.map(|stage| self.stages.address(stage));
        match (message.route, staged) {
            (Route::HostThenGpu, Some(source)) => {
                let (target, bytes) = (message.run.base() as u64, message.run.bytes());
                gatherer.begin_copy(number, GpuCopy { source, target, bytes });
            }
            (route, staged) => {
                let runs = [
                    GatherRun { source: self.device.pool().base(), fragments: &message.fragments },
                    GatherRun { source: self.buffer.address(), fragments: &message.elsewhere },
                ];
                let target = staged.filter(|_| route == Route::GpuThenHost);
                gatherer.begin(number, &runs, target.unwrap_or(message.run.base() as u64));
            }
        }
        Ok(())
    }

    /// Whether that is done.
    pub fn gathered(&mut self, number: u64) -> Poll<ferrywire::Result<()>> {
        let Some(gatherer) = &mut self.gatherer else { return Poll::Ready(Ok(())) };
        match gatherer.poll(number) {
            Poll::Ready(Ok(())) => {}
            unfinished => return unfinished,
        }
        self.counters.gathers.store(gatherer.launches(), std::sync::atomic::Ordering::Relaxed);
        let Some(message) = self.messages.get_mut(number.wrapping_sub(self.first) as usize) else {
            return Poll::Ready(Ok(()));
        };
        if let (Route::GpuThenHost, Some(stage)) = (message.route, message.stage) {
            let from = self.stages.address(stage) as *const u8;
            // SAFETY: so many bytes of a stage, into host memory that was posted for as many.
            unsafe { std::ptr::copy_nonoverlapping(from, message.run.base(), message.run.bytes()) };
        }
        message.tokens.drain(..).for_each(|token| self.back.push(token));
        Poll::Ready(Ok(()))
    }

    /// The oldest message is its user's: what it held is free.
    pub fn finished(&mut self) -> Result<(), String> {
        let Some(mut message) = self.messages.pop_front() else { return Ok(()) };
        (self.first, self.whole) = (self.first + 1, self.whole.saturating_sub(1));
        message.tokens.drain(..).for_each(|token| self.back.push(token));
        self.buffer.free(message.elsewhere_bytes);
        message.stage.take().into_iter().for_each(|stage| self.stages.give_back(stage));
        message.fragments.clear();
        message.elsewhere.clear();
        message.elsewhere_bytes = 0;
        self.spare.push(message);
        match self.back.fragments() >= RELEASE_AT || self.messages.is_empty() {
            true => self.give_back(),
            false => Ok(()),
        }
    }

    /// Gives back to the kernel what is not needed any more.
    fn give_back(&mut self) -> Result<(), String> {
        if self.back.is_empty() {
            return Ok(());
        }
        let told = self.back.fragments();
        let released =
            self.back.release(self.fd).map_err(|error| format!("giving fragments back: {error}"))?;
        if released.unknown > 0 {
            let (nic, unknown) = (self.device.name().to_owned(), released.unknown);
            return Err(DevmemError::UnknownTokens { nic, unknown, told }.to_string());
        }
        add(&self.counters.release_calls, released.calls);
        add(&self.counters.released, released.fragments);
        Ok(())
    }

    /// Whether no message is awaited.
    pub fn is_idle(&self) -> bool {
        self.messages.is_empty()
    }

    /// Keeps nothing of messages that are over.
    pub fn forget(&mut self) {
        self.spare.clear();
    }

    /// Nothing of the GPU's touches memory any more after this.
    pub fn stop(&mut self) {
        self.gatherer = None;
    }
}

impl Incoming {
    /// Bytes of the buffer are the next ones of the message.
    fn take_elsewhere(&mut self, buffer: &mut Buffer, stages: &Stages, at: usize, bytes: usize) {
        match self.route {
            Route::Direct | Route::HostThenGpu => {
                self.copy_in((buffer.address() + at as u64) as *const u8, bytes, stages);
            }
            Route::Gpu | Route::GpuThenHost => {
                let target = self.got as u64;
                self.elsewhere.push(Fragment { source: at as u32, bytes: bytes as u32, target });
                self.elsewhere_bytes += bytes;
                buffer.keep(bytes);
                self.got += bytes;
            }
        }
    }

    /// Copies the next bytes of the message to where the CPU may write them.
    fn copy_in(&mut self, from: *const u8, bytes: usize, stages: &Stages) {
        let base = match self.stage {
            Some(stage) => stages.address(stage) as *mut u8,
            None => self.run.base(),
        };
        // SAFETY: sources are checked against pool and buffer, and the kernel gives no more than the message lacks.
        unsafe { std::ptr::copy_nonoverlapping(from, base.add(self.got), bytes) };
        self.got += bytes;
    }
}
