//! A lane over one devmem TCP connection, in both directions.
//!
//! Invariant: once a lane is closed, neither the GPU nor the CPU touches memory that was posted. A NIC may still have
//! packets to send whose payload it reads from GPU memory: the socket stays open until the kernel has reported all of
//! them.
//! Read next: `receiving.rs`, `sending.rs`.

use super::NAME;
use super::backend::Backend;
use super::device::Device;
use super::receiving::Receiving;
use super::sending::Sending;
use crate::nic::Rule;
use ferrywire::payload::{
    Copiers, DevmemCounters, InFlight, Lane, LaneBy, Post, Run, Step, Ticket, Ungathered, Way,
};
use ferrywire::{Error, Result};
use ferrywire_memory::cuda::CudaError;
use ferrywire_memory::{Memory, MemoryLocation};
use ferrywire_net::{Conn, PathHealth};
use ferrywire_proto::limits;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

/// Pause before a lane that made no progress is polled again; the kernel fills its buffer meanwhile.
const PAUSE: Duration = Duration::from_micros(50);

pub(crate) struct DevmemLane {
    // Dropped before the connection: the field order closes the connection last.
    sending: Sending,
    receiving: Receiving,
    copiers: Copiers,
    conn: Option<Box<dyn Conn>>,
    /// The aborted connection of a closed lane, while completions of the kernel are missing.
    unreported: Option<Box<dyn Conn>>,
    rule: Option<Rule>,
    backend: Arc<Backend>,
    device: Arc<Device>,
    counters: Arc<DevmemCounters>,
}

impl DevmemLane {
    /// Makes a lane of a connection that is steered into the device's queues. May wait for the GPU.
    pub fn new(
        backend: Arc<Backend>,
        device: Arc<Device>,
        conn: Box<dyn Conn>,
        fd: RawFd,
        rule: Rule,
    ) -> Result<DevmemLane, String> {
        let counters = Arc::new(DevmemCounters::default());
        counters.pool_bytes.store(device.pool().bytes() as u64, Relaxed);
        let gatherer = backend.gatherer()?;
        let receiving = Receiving::new(fd, &backend, device.clone(), gatherer, counters.clone())?;
        let sending = Sending::new(fd, backend.clone(), device.clone(), counters.clone());
        Ok(DevmemLane {
            sending,
            receiving,
            copiers: Copiers::new(backend.opened_gpu().cloned()),
            conn: Some(conn),
            unreported: None,
            rule: Some(rule),
            backend,
            device,
            counters,
        })
    }

    /// How the lane is named in statistics.
    pub fn by(&self) -> LaneBy {
        LaneBy {
            plugin: NAME.to_owned(),
            version: format!(
                "pool of {} MiB in {}",
                self.device.pool().bytes() >> 20,
                self.device.pool().location()
            ),
            device: self.device.index() as i32,
            device_name: self.device.name().to_owned(),
            devmem: Some(self.counters.clone()),
        }
    }
}

impl Lane for DevmemLane {
    fn window(&self) -> usize {
        self.backend.config.window
    }

    fn pause(&self) -> Option<Duration> {
        Some(PAUSE)
    }

    fn message_bytes_max(&self) -> usize {
        self.backend.config.message_bytes_max
    }

    fn path_trouble(&self) -> Option<String> {
        silence(&self.conn.as_ref()?.health())
    }

    fn holds_payload(&self) -> bool {
        self.device.is_held()
    }

    fn isend(&mut self, run: &Run) -> Post {
        if self.conn.is_none() {
            return Post::Failed("the connection is closed".into());
        }
        match self.sending.post(run) {
            Ok(Poll::Ready(number)) => Post::Posted(Ticket(number as usize)),
            Ok(Poll::Pending) => Post::Full("memory is still being bound or mapped"),
            Err(why) => Post::Failed(why),
        }
    }

    fn irecv(&mut self, run: &Run) -> Post {
        if self.conn.is_none() {
            return Post::Failed("the connection is closed".into());
        }
        match self.receiving.expect(run) {
            Ok(Poll::Ready(number)) => Post::Posted(Ticket(number as usize)),
            Ok(Poll::Pending) => Post::Full("memory is still being mapped"),
            Err(why) => Post::Failed(why),
        }
    }

    fn test_send(&mut self, ticket: Ticket) -> Step {
        match self.sending.is_done(ticket.0 as u64) {
            Ok(true) => Step::Done,
            Ok(false) => match self.sending.unreadable() {
                Some((number, why)) => Step::Unreadable(Ticket(number as usize), why),
                None => Step::Pending,
            },
            Err(why) => Step::Failed(why),
        }
    }

    fn test_recv(&mut self, ticket: Ticket) -> Step {
        match self.receiving.is_whole(ticket.0 as u64) {
            Ok(true) => Step::Done,
            Ok(false) => Step::Pending,
            Err(why) => Step::Failed(why),
        }
    }

    fn scatters(&self, memory: &Memory) -> bool {
        self.receiving.scatters(memory)
    }

    fn gathers_on(&self) -> Option<MemoryLocation> {
        Some(self.device.pool().location()).filter(|location| *location != MemoryLocation::Host)
    }

    fn gather(&mut self, number: u64, _run: &Run) -> Result<(), Ungathered> {
        self.receiving.gather(number).map_err(Ungathered::Failed)
    }

    fn gathered(&mut self, number: u64) -> Poll<Result<()>> {
        let failed = |error| match error {
            // The error of freed memory concerns the message alone; the lane goes on.
            Error::Cuda(CudaError::Freed { .. }) => error,
            error => Error::Io { what: "gathering".into(), message: error.to_string(), code: None },
        };
        self.receiving.gathered(number).map_err(failed)
    }

    fn consumed(&mut self, _ticket: Ticket) -> Result<(), String> {
        self.receiving.finished()
    }

    fn copy(&mut self, way: Way, slot: &Run, ranges: &[Run]) -> Poll<Result<()>> {
        self.copiers.copy(way, slot, ranges)
    }

    fn slot_memory(&self, like: Option<&Memory>, bytes: usize) -> Result<Arc<Memory>, String> {
        let location = like.map(Memory::location).unwrap_or(self.device.pool().location());
        self.backend.memory(location, bytes)
    }

    fn forget_revoked(&mut self, busy: &dyn Fn(&Arc<Memory>) -> bool) {
        self.sending.forget_revoked(busy);
        self.receiving.forget();
    }

    fn close(&mut self, in_flight: InFlight) {
        let Some(mut conn) = self.conn.take() else { return };
        // After the stop the GPU uses neither the pool nor posted memory.
        self.receiving.stop();
        self.copiers.stop();
        self.sending.stop();
        if in_flight.is_nothing() {
            conn.shutdown()
        } else {
            // The peer no longer reads bytes in flight, so the kernel must not read their source any more.
            conn.abort()
        }
        if let Some(rule) = self.rule.take() {
            self.device.unsteer_later(rule);
        }
        self.unreported = Some(conn);
        self.has_released();
    }

    fn has_released(&mut self) -> bool {
        if self.unreported.is_some() && self.sending.has_released() {
            self.sending.clear();
            self.unreported = None;
        }
        self.unreported.is_none()
    }

    fn describe(&self) -> String {
        let location = match self.device.pool().location() {
            MemoryLocation::Host => String::from("host memory"),
            gpu => gpu.to_string(),
        };
        format!("{NAME} TCP on {} into {location}", self.device.name())
    }
}

/// Why the peer acknowledges nothing any more, if it does not. A pool without room drops packets, which looks like
/// a dead path at this end.
fn silence(health: &PathHealth) -> Option<String> {
    health.is_dead().then(|| {
        format!(
            "{}; either the path is dead, or the peer's receive pool has no free buffers",
            health.describe()
        )
    })
}

impl Drop for DevmemLane {
    fn drop(&mut self) {
        let in_flight = InFlight { sends: !self.sending.is_idle(), receives: !self.receiving.is_idle() };
        self.close(in_flight);
        let since = Instant::now();
        while !self.has_released() && since.elapsed() < limits::KERNEL_RELEASE_TIMEOUT {
            thread::sleep(PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_peer_may_have_an_empty_pool_and_the_error_says_so() {
        let quiet = PathHealth { unanswered: 2, silent_for: Duration::from_secs(2), ..PathHealth::default() };
        assert_eq!(silence(&quiet), None, "nothing waits");
        let reported = silence(&PathHealth { waiting: true, ..quiet }).expect("two seconds are too long");
        assert!(
            reported.starts_with("no answer from the peer's host") && reported.contains("no free buffers"),
            "{reported}"
        );
    }
}
