//! Outgoing messages, one after another on the lane's connection.
//!
//! The kernel copies host memory as it sends it. Of GPU memory that is bound to the NIC only offsets are passed to the
//! kernel; the kernel numbers such calls and reports when the peer's kernel has acknowledged them. Other GPU memory is
//! first copied to mapped memory.
//!
//! Invariant: a message is done when no GPU, NIC or kernel reads its memory any more; bytes are sent in the order
//! of messages.
//! Read next: `sources.rs`; `ferrywire_sys::zerocopy`, the reports.

use super::NAME;
use super::backend::Backend;
use super::background_init::BackgroundInit;
use super::device::Device;
use super::errors::{DevmemError, SendCause};
use super::gather::Gatherer;
use super::sources::{Binding, Sources};
use crate::sys::devmem;
use ferrywire::Error;
use ferrywire::payload::{DevmemCounters, Run, UNREADABLE, add};
use ferrywire_memory::cuda::CudaError;
use ferrywire_memory::unpack::{Mapped, UnpackMode};
use ferrywire_memory::{GpuCopy, Memory, MemoryLocation};
use ferrywire_net::IoVec;
use ferrywire_sys::{socket, zerocopy};
use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::task::Poll;

struct Outgoing {
    source: Source,
    bytes: usize,
    sent: usize,
    /// Number of the message's first zero-copy call; the next field is the number of its calls without a
    /// completion.
    first_call: u32,
    calls: u32,
    unreported: u32,
}

enum Source {
    Host(u64),
    Bound {
        binding: Arc<Binding>,
        offset: u64,
    },
    /// The message is in a stage, or is being copied to it.
    Staged {
        stage: usize,
        copied: bool,
    },
}

/// The sending half of a lane's connection.
pub(super) struct Sending {
    fd: RawFd,
    // Dropped before the memory that the stager reads and writes.
    stager: Option<Stager>,
    making: Option<Arc<BackgroundInit<Stager>>>,
    backend: Arc<Backend>,
    device: Arc<Device>,
    sources: Sources,
    messages: VecDeque<Outgoing>,
    first: u64,
    /// Number of messages that were completely handed to the kernel.
    handed: usize,
    /// Number of the next zero-copy call, by which the kernel reports its completion.
    next_call: u32,
    /// Whether the kernel reports completions on this socket, once known; the next field is the number of calls
    /// without one.
    reports: Option<bool>,
    unreported: u64,
    /// Number of the message whose memory cannot be read, with the error; no later message is sent either.
    unreadable: Option<(u64, Error)>,
    counters: Arc<DevmemCounters>,
}

/// Copies messages out of a GPU to mapped memory.
struct Stager {
    gatherer: Gatherer,
    memory: Mapped,
    slot_bytes: usize,
    free: Vec<usize>,
}

impl Sending {
    pub fn new(
        fd: RawFd,
        backend: Arc<Backend>,
        device: Arc<Device>,
        counters: Arc<DevmemCounters>,
    ) -> Sending {
        Sending {
            fd,
            stager: None,
            making: None,
            backend,
            device,
            sources: Sources::default(),
            messages: VecDeque::new(),
            first: 0,
            handed: 0,
            next_call: 0,
            reports: None,
            unreported: 0,
            unreadable: None,
            counters,
        }
    }

    /// Takes a message, sends as much as the kernel takes, and returns the message's number; pending while its
    /// resources are being made.
    pub fn post(&mut self, run: &Run) -> Result<Poll<u64>, String> {
        let number = self.first + self.messages.len() as u64;
        let Poll::Ready(source) = self.source_of(run, number)? else { return Ok(Poll::Pending) };
        let (first_call, calls, unreported) = (0, 0, 0);
        self.messages.push_back(Outgoing {
            source,
            bytes: run.bytes(),
            sent: 0,
            first_call,
            calls,
            unreported,
        });
        self.send()?;
        Ok(Poll::Ready(number))
    }

    fn source_of(&mut self, run: &Run, number: u64) -> Result<Poll<Source>, String> {
        let address = run.base() as u64;
        if run.memory().location() == MemoryLocation::Host {
            add(&self.counters.host_sent_bytes, run.bytes());
            return Ok(Poll::Ready(Source::Host(address)));
        }
        let Poll::Ready(binding) = self.sources.of(&self.device, run.memory()) else {
            return Ok(Poll::Pending);
        };
        if let Some(binding) = binding.filter(|_| self.asks_for_reports()) {
            add(&self.counters.device_sent_bytes, run.bytes());
            let offset = binding.offset_of(address);
            return Ok(Poll::Ready(Source::Bound { binding, offset }));
        }
        if self.stager.is_none() {
            let backend = self.backend.clone();
            let start =
                || BackgroundInit::start("mapping memory to send from", move || Stager::new(&backend));
            let Poll::Ready(made) = self.making.get_or_insert_with(start).take() else {
                return Ok(Poll::Pending);
            };
            self.stager = Some(made?);
        }
        let Some(stager) = &mut self.stager else {
            return Err("internal error: no bounce buffers to send from".into());
        };
        add(&self.counters.staged_sent_bytes, run.bytes());
        let stage = stager
            .free
            .pop()
            .ok_or("internal error: more messages are posted than there are bounce buffers")?;
        let target = stager.address(stage);
        stager.gatherer.begin_copy(number, GpuCopy { source: address, target, bytes: run.bytes() });
        Ok(Poll::Ready(Source::Staged { stage, copied: false }))
    }

    fn asks_for_reports(&mut self) -> bool {
        *self.reports.get_or_insert_with(|| match zerocopy::enable(self.fd) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%error, "the kernel cannot send from device memory (SO_ZEROCOPY): the payload is copied to host memory first");
                false
            }
        })
    }

    /// Whether the message `number` is done: sent, and its memory not read any more.
    pub fn is_done(&mut self, number: u64) -> Result<bool, String> {
        self.send()?;
        self.hear_reports()?;
        let at = number.wrapping_sub(self.first) as usize;
        // The caller asks for the oldest message only.
        let done = at < self.handed && self.messages[at].unreported == 0;
        if done && at == 0 {
            self.release();
        }
        Ok(done)
    }

    /// The message whose memory cannot be read, with the error; `None` if there is none.
    pub fn unreadable(&self) -> Option<(u64, Error)> {
        self.unreadable.clone()
    }

    fn release(&mut self) {
        let Some(message) = self.messages.pop_front() else { return };
        (self.first, self.handed) = (self.first + 1, self.handed - 1);
        if let (Source::Staged { stage, .. }, Some(stager)) = (message.source, &mut self.stager) {
            stager.free.push(stage);
        }
    }

    /// Hands the kernel as many bytes of messages as it takes now.
    fn send(&mut self) -> Result<(), String> {
        while self.handed < self.messages.len() && self.unreadable.is_none() {
            let number = self.first + self.handed as u64;
            let message = &mut self.messages[self.handed];
            if message.sent == message.bytes {
                self.handed += 1;
                continue;
            }
            let (at, left) = (message.sent, message.bytes - message.sent);
            let reported = matches!(message.source, Source::Bound { .. });
            let sent = match &mut message.source {
                Source::Host(address) => send_bytes(self.fd, *address + at as u64, left),
                Source::Bound { binding, offset } => {
                    let piece = devmem::Piece { offset: *offset as usize + at, bytes: left };
                    // SAFETY: only offsets are passed; the binding keeps the pages, and lanes hold the binding.
                    unsafe { devmem::send(self.fd, binding.id, &[piece]) }
                }
                Source::Staged { stage, copied } => {
                    let Some(stager) = &mut self.stager else {
                        return Err("internal error: no bounce buffers to send from".into());
                    };
                    if !*copied {
                        match stager.gatherer.poll(number) {
                            Poll::Pending => return Ok(()),
                            Poll::Ready(Err(error @ Error::Cuda(CudaError::Freed { .. }))) => {
                                self.unreadable = Some((number, error));
                                return Ok(());
                            }
                            Poll::Ready(result) => result.map_err(|error| error.to_string())?,
                        }
                        *copied = true;
                    }
                    send_bytes(self.fd, stager.address(*stage) + at as u64, left)
                }
            };
            add(&self.counters.send_calls, 1);
            let sent = match sent {
                Ok(sent) => sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // Too many calls wait for their completion: the completions are read first.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) && self.unreported > 0 => {
                    return Ok(());
                }
                Err(error)
                    if error.raw_os_error() == Some(libc::EFAULT)
                        && matches!(message.source, Source::Host(_)) =>
                {
                    self.unreadable = Some((number, Error::invalid("region", UNREADABLE)));
                    return Ok(());
                }
                Err(error) => return Err(refused(self.device.name(), &message.source, &error)),
            };
            message.sent += sent;
            if reported {
                if message.calls == 0 {
                    message.first_call = self.next_call;
                }
                self.next_call = self.next_call.wrapping_add(1);
                (message.calls, message.unreported) = (message.calls + 1, message.unreported + 1);
                self.unreported += 1;
            }
        }
        Ok(())
    }

    /// Counts the zero-copy calls that the kernel reports as complete.
    fn hear_reports(&mut self) -> Result<(), String> {
        while self.unreported > 0 {
            let report = match zerocopy::completion(self.fd) {
                Ok(Some(report)) => report,
                Ok(None) => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(format!("cannot read send completions: {error}")),
            };
            for message in self.messages.iter_mut().filter(|message| message.unreported > 0) {
                let count = common(message.first_call, message.calls, report.first, report.last);
                let count = count.min(message.unreported);
                message.unreported -= count;
                self.unreported -= u64::from(count);
            }
        }
        Ok(())
    }

    /// Whether no message is in flight.
    pub fn is_idle(&self) -> bool {
        self.messages.is_empty()
    }

    /// Drops bindings and regions that were deregistered.
    pub fn forget_revoked(&mut self, busy: &dyn Fn(&Arc<Memory>) -> bool) {
        self.sources.forget_revoked(busy);
    }

    /// Stops the GPU's work: afterwards the GPU touches no memory of this lane any more.
    pub fn stop(&mut self) {
        (self.stager, self.making) = (None, None);
    }

    /// Whether the kernel reads no GPU memory any more. After an abort of the connection it reports when NICs have
    /// sent the rest.
    pub fn has_released(&mut self) -> bool {
        if let Err(why) = self.hear_reports() {
            tracing::error!(
                "the kernel may still read GPU memory, because its completions cannot be read: {why}"
            );
            self.unreported = 0;
        }
        self.unreported == 0
    }

    /// Drops all memory and bindings of this half.
    pub fn clear(&mut self) {
        self.messages.clear();
        self.sources.clear();
    }
}

impl Stager {
    fn new(backend: &Backend) -> Result<Stager, String> {
        let (slots, slot_bytes) = (backend.config.window, backend.config.message_bytes_max);
        backend.with_gpu_current(|| {
            let gatherer =
                Gatherer::new(backend.gpu_queue()?, UnpackMode::Copy).map_err(|error| error.to_string())?;
            let memory = gatherer.map(slots * slot_bytes).map_err(|error| error.to_string())?;
            Ok(Stager { gatherer, memory, slot_bytes, free: (0..slots).rev().collect() })
        })
    }

    fn address(&self, stage: usize) -> u64 {
        self.memory.at(stage * self.slot_bytes, self.slot_bytes) as u64
    }
}

/// The error text for a send that the kernel refused; for GPU memory with a hint.
fn refused(nic: &str, source: &Source, error: &io::Error) -> String {
    match (source, SendCause::of(error)) {
        (_, SendCause::Other) | (Source::Host(_) | Source::Staged { .. }, _) => {
            format!("cannot send over {NAME} TCP: {error}")
        }
        (Source::Bound { binding, .. }, cause) => {
            if cause == SendCause::NotBound {
                binding.lose();
            }
            DevmemError::send(nic, binding.id, error).to_string()
        }
    }
}

fn send_bytes(fd: RawFd, address: u64, bytes: usize) -> io::Result<usize> {
    // SAFETY: the memory is that of a posted message or of a stage, which stays until the message is done.
    unsafe { socket::send(fd, &[IoVec::new(address as *mut u8, bytes)], 0) }
}

/// Number of numbers in the `count` from `first` on that are between `from` and `to`; all numbers wrap.
fn common(first: u32, count: u32, from: u32, to: u32) -> u32 {
    let reported = to.wrapping_sub(from).wrapping_add(1);
    (0..count).filter(|each| first.wrapping_add(*each).wrapping_sub(from) < reported).count() as u32
}

#[cfg(test)]
mod tests {
    use super::common;

    #[test]
    fn reports_are_counted_for_the_calls_they_are_of() {
        assert_eq!(common(5, 3, 0, 4), 0);
        assert_eq!(common(5, 3, 0, 5), 1);
        assert_eq!(common(5, 3, 6, 6), 1);
        assert_eq!(common(5, 3, 0, 100), 3);
        assert_eq!(common(u32::MAX, 3, u32::MAX, 0), 2);
        assert_eq!(common(u32::MAX, 3, 1, 1), 1);
    }
}
