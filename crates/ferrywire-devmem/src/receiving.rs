//! Incoming messages: the next bytes of the stream belong to the oldest message that is not complete.
//!
//! ```text
//!   pool      destination   bytes are moved there by
//!   host      host          the CPU, on arrival
//!   GPU       that GPU      the GPU, from the pool
//!   GPU       host          the GPU into mapped memory, then the CPU
//!   host      GPU           the CPU into mapped memory, then the GPU
//! ```
//!
//! When the pool is empty the NIC drops packets until fragments are returned. So this end returns all fragments that it
//! can before it waits for more, and of an incomplete message the GPU gathers the part that has arrived.
//!
//! Invariant: no call asks for more bytes than the message lacks; a fragment outside of the pool is refused.
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

/// Most fragments that one call can report.
const PIECES_PER_CALL: usize = 512;
/// Number of fragments that are returned together while more arrive.
const RELEASE_AT: usize = 96;

/// Time without arrivals after which the part of a message that has arrived is gathered.
const PART_AFTER: Duration = Duration::from_millis(5);
/// Time that a GPU may take to gather before the pool counts as held.
const HELD_AFTER: Duration = Duration::from_millis(400);
/// Number from which the parts of messages are numbered, apart from the messages.
const PARTS: u64 = 1 << 63;

/// How the bytes of a message get from where they landed to their destination.
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
    /// The message's fragments in the pool, and its pieces in the buffer for plain bytes.
    fragments: Vec<Fragment>,
    elsewhere: Vec<Fragment>,
    elsewhere_bytes: usize,
    tokens: Vec<u32>,
    /// The stage of mapped memory through which the message passes.
    stage: Option<usize>,
}

/// Fragments of a message that are gathered out of the pool before the rest has arrived.
struct Part {
    number: u64,
    tokens: Vec<u32>,
}

/// The receiving half of a lane's connection.
pub(super) struct Receiving {
    fd: RawFd,
    // Dropped before the memory that the gatherer reads and writes.
    gatherer: Option<Gatherer>,
    device: Arc<Device>,
    message_bytes_max: usize,
    messages: VecDeque<Incoming>,
    /// Number of the oldest message; the next field is the number of complete messages.
    first: u64,
    whole: usize,
    control: Control,
    buffer: Buffer,
    stages: Stages,
    /// Tokens of fragments that can be returned to the kernel.
    back: Tokens,
    /// The part of an incomplete message that is being gathered; the next field is the time of the last arrival.
    part: Option<Part>,
    parts: u64,
    arrived: Instant,
    /// Time since which the oldest gather is unfinished.
    gathering_since: Option<Instant>,
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
            gathering_since: None,
            spare: Vec::new(),
            counters,
        })
    }

    /// Whether messages for `memory` have to be gathered after their arrival.
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

    /// Expects the next message and returns its number; pending while the bounce buffers of its route are
    /// allocated.
    pub fn expect(&mut self, run: &Run) -> Result<Poll<u64>, String> {
        let route = self.route(run.memory());
        if route != Route::Direct && self.gatherer.is_none() {
            return Err(format!("{NAME} of this endpoint is not configured for {}", run.memory().location()));
        }
        if run.bytes() > self.message_bytes_max {
            return Err(format!(
                "a message has {} bytes, but at most {} were agreed on",
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

    /// Receives the bytes that have arrived, and returns whether the message `number` is complete.
    ///
    /// # Errors
    /// The reason why nothing more will arrive.
    pub fn is_whole(&mut self, number: u64) -> Result<bool, String> {
        self.poll_part()?;
        let at = number.wrapping_sub(self.first) as usize;
        while self.whole <= at && self.whole < self.messages.len() {
            if !self.receive()? {
                return Ok(false);
            }
        }
        // The part of the message that was gathered ahead must be gathered too.
        Ok(at < self.whole && self.part.is_none())
    }

    /// Makes one receive call, for the oldest message that is not complete. Returns false if no byte has arrived.
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
        // SAFETY: the buffer has this many bytes, which no other code uses.
        let received = match unsafe { devmem::receive(self.fd, into, lacks, &mut self.control) } {
            Ok(received) => received,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.make_room();
                self.give_back()?;
                return Ok(false);
            }
            Err(error) => return Err(format!("cannot receive over {NAME} TCP: {error}")),
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

    /// Records or copies the bytes of one receive call.
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

    /// Gathers the part of a message that has arrived, unless more arrives soon: the rest may wait for room in the
    /// pool. The part goes into the buffer for plain bytes, because the message's destination must not be written
    /// yet.
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

    /// Returns the fragments of a part once it has been gathered.
    fn poll_part(&mut self) -> Result<(), String> {
        let (Some(part), Some(gatherer)) = (&self.part, &mut self.gatherer) else { return Ok(()) };
        let polled = gatherer.poll(part.number);
        match polled {
            Poll::Pending => {
                self.note_gathering();
                return Ok(());
            }
            Poll::Ready(result) => result.map_err(|error| error.to_string())?,
        }
        self.gathering_since = None;
        let part = self.part.take();
        part.into_iter().flat_map(|part| part.tokens).for_each(|token| self.back.push(token));
        self.give_back()
    }

    /// Begins to gather a complete message into its destination.
    pub fn gather(&mut self, number: u64) -> Result<(), String> {
        let (Some(message), Some(gatherer)) =
            (self.messages.get(number.wrapping_sub(self.first) as usize), &mut self.gatherer)
        else {
            return Err(format!("message {number} has not arrived, so it cannot be gathered"));
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

    /// Notes that a gather is unfinished: if it takes long, its fragments may leave the pool without free buffers.
    fn note_gathering(&mut self) {
        if self.gathering_since.get_or_insert_with(Instant::now).elapsed() >= HELD_AFTER {
            self.device.note_held();
        }
    }

    /// Whether the message `number` has been gathered.
    pub fn gathered(&mut self, number: u64) -> Poll<ferrywire::Result<()>> {
        let Some(gatherer) = &mut self.gatherer else { return Poll::Ready(Ok(())) };
        let (polled, launches) = (gatherer.poll(number), gatherer.launches());
        match polled {
            Poll::Ready(Ok(())) => self.gathering_since = None,
            Poll::Pending => {
                self.note_gathering();
                return Poll::Pending;
            }
            failed => {
                // The lane goes on: the next gather's time must not count from this one.
                self.gathering_since = None;
                return failed;
            }
        }
        self.counters.gathers.store(launches, std::sync::atomic::Ordering::Relaxed);
        let Some(message) = self.messages.get_mut(number.wrapping_sub(self.first) as usize) else {
            return Poll::Ready(Ok(()));
        };
        if let (Route::GpuThenHost, Some(stage)) = (message.route, message.stage) {
            let from = self.stages.address(stage) as *const u8;
            // SAFETY: the stage has this many bytes, and the posted host memory has room for as many.
            unsafe { std::ptr::copy_nonoverlapping(from, message.run.base(), message.run.bytes()) };
        }
        message.tokens.drain(..).for_each(|token| self.back.push(token));
        Poll::Ready(Ok(()))
    }

    /// Releases the resources of the oldest message, which is complete.
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
        if self.back.fragments() >= RELEASE_AT || self.messages.is_empty() {
            self.give_back()
        } else {
            Ok(())
        }
    }

    /// Returns fragments that are not needed any more to the kernel.
    fn give_back(&mut self) -> Result<(), String> {
        if self.back.is_empty() {
            return Ok(());
        }
        let reported = self.back.fragments();
        let released = self
            .back
            .release(self.fd)
            .map_err(|error| format!("cannot return fragments to the kernel: {error}"))?;
        if released.unknown > 0 {
            let (nic, unknown) = (self.device.name().to_owned(), released.unknown);
            return Err(DevmemError::UnknownTokens { nic, unknown, returned: reported }.to_string());
        }
        add(&self.counters.release_calls, released.calls);
        add(&self.counters.released, released.fragments);
        Ok(())
    }

    /// Whether no message is expected.
    pub fn is_idle(&self) -> bool {
        self.messages.is_empty()
    }

    /// Releases memory that was kept for messages that have ended.
    pub fn forget(&mut self) {
        self.spare.clear();
    }

    /// Stops the GPU's work: afterwards the GPU touches no memory of this lane any more.
    pub fn stop(&mut self) {
        self.gatherer = None;
    }
}

impl Incoming {
    /// Notes that the next bytes of the message are in the buffer for plain bytes.
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

    /// Copies the next bytes of the message to its destination or stage, which the CPU may write.
    fn copy_in(&mut self, from: *const u8, bytes: usize, stages: &Stages) {
        let base = match self.stage {
            Some(stage) => stages.address(stage) as *mut u8,
            None => self.run.base(),
        };
        // SAFETY: the sources were checked against pool and buffer, and the kernel returns no more than the message
        // lacks.
        unsafe { std::ptr::copy_nonoverlapping(from, base.add(self.got), bytes) };
        self.got += bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DevmemConfig;
    use ferrywire_memory::cuda::CudaError;
    use ferrywire_memory::unpack::UnpackMode;
    use ferrywire_memory::unpack::recorder::{Recorder, Seen, one_at_a_time};
    use ferrywire_proto::limits::GATHER_LAUNCHES_MAX;
    use std::sync::Mutex;

    /// Regression: the pool counted as held as soon as the next message had to wait.
    #[test]
    fn the_time_of_a_gather_ends_with_its_failure() {
        let _alone = one_at_a_time();
        let seen = Arc::new(Mutex::new(Seen::default()));
        let gatherer = Gatherer::new(Box::new(Recorder(seen.clone())), UnpackMode::Copy).unwrap();
        let backend = Arc::new(Backend::without_devices(DevmemConfig::default()));
        let device = Arc::new(Device::simulated());
        let mut receiving = Receiving::new(-1, &backend, device, Some(gatherer), Arc::default()).unwrap();
        let fragments = [Fragment { source: 10, bytes: 4, target: 0 }];
        let late = GATHER_LAUNCHES_MAX as u64;
        for number in 0..=late {
            let run = GatherRun { source: 1000, fragments: &fragments };
            receiving.gatherer.as_mut().unwrap().begin(number, &[run], 7000);
            assert!(receiving.gathered(number).is_pending());
        }
        // The memory is freed before the last gather can be launched.
        {
            let mut seen = seen.lock().unwrap();
            (seen.memory, seen.reached) = (Some(5000..6000), late);
        }
        let freed = CudaError::Freed { address: 7000, bytes: 4 };
        assert_eq!(receiving.gathered(late), Poll::Ready(Err(ferrywire::Error::Cuda(freed))));
        assert_eq!(receiving.gathering_since, None);
    }
}
