//! Sets up a channel's lane: a second connection beside the channel's, proved in the same way, then steered at both
//! ends.
//!
//! ```text
//!   the end that opened the session:  dial ── proof ──┐
//!   both:                     rule for this flow, memory ── ready ──> both ready: the lane carries payload
//! ```
//!
//! A rule is made only for a connection that has proved to be the peer's. Nothing is sent before both ends have
//! their rules, so all payload goes through the queue. Rules and memory take time in the kernel and on the GPU, so
//! a thread of its own makes them.
//!
//! Invariant: an abandoned setup leaves no rule. Read next: `lane.rs`, the result.

use super::NAME;
use super::backend::Backend;
use super::device::Device;
use super::lane::DevmemLane;
use ferrywire::payload::{Progress, Setup};

use ferrywire_net::Conn;
use ferrywire_proto::limits::LANE_HANDLE_BYTES;
use ferrywire_sys::poll::Waker;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// The message by which an end reports that it is ready; it has no content.
const READY: [u8; LANE_HANDLE_BYTES] = [0; LANE_HANDLE_BYTES];

pub(crate) struct DevmemSetup {
    backend: Arc<Backend>,
    device: Arc<Device>,
    started: Duration,
    /// Whether this end dials and has not yet been asked to.
    to_dial: bool,
    connected: bool,
    reported: bool,
    peer_ready: bool,
    shared: Arc<Shared>,
}

struct Shared {
    made: Mutex<Option<Result<DevmemLane, String>>>,
    /// Wakes the thread that polls the setup.
    waker: Waker,
}

impl DevmemSetup {
    /// Starts the setup of a lane for a channel over this NIC.
    pub fn start(
        backend: &Arc<Backend>,
        nic: &str,
        dials: bool,
        now: Duration,
        waker: Waker,
    ) -> Result<DevmemSetup, String> {
        let device = backend.device(nic)?;
        Ok(DevmemSetup {
            backend: backend.clone(),
            device,
            started: now,
            to_dial: dials,
            connected: false,
            reported: false,
            peer_ready: false,
            shared: Arc::new(Shared { made: Mutex::new(None), waker }),
        })
    }

    fn made(&self) -> MutexGuard<'_, Option<Result<DevmemLane, String>>> {
        self.shared.made.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Setup for DevmemSetup {
    fn wants_connection(&mut self) -> bool {
        std::mem::take(&mut self.to_dial)
    }

    fn connected(&mut self, conn: Box<dyn Conn>) -> Result<(), String> {
        if std::mem::replace(&mut self.connected, true) {
            return Err("the peer made two connections for one lane".into());
        }
        let (backend, device, shared) = (self.backend.clone(), self.device.clone(), self.shared.clone());
        let thread = thread::Builder::new().name("ferrywire-steer".into()).spawn(move || {
            let made = make(backend, device, conn);
            // If the setup was abandoned, the result is dropped with the last owner of `shared`.
            *shared.made.lock().unwrap_or_else(PoisonError::into_inner) = Some(made);
            shared.waker.wake();
        });
        thread.map(drop).map_err(|error| format!("cannot start the thread that sets up a lane: {error}"))
    }

    fn peer_listens(&mut self, _handle: [u8; LANE_HANDLE_BYTES]) -> Result<(), String> {
        if std::mem::replace(&mut self.peer_ready, true) {
            Err("the peer reported one lane as ready twice".into())
        } else {
            Ok(())
        }
    }

    fn poll(&mut self, now: Duration) -> Progress {
        let mut made = self.made();
        if let Some(Err(why)) = &*made {
            return Progress::Failed(why.clone());
        }
        if made.is_some() && !self.reported {
            drop(made);
            self.reported = true;
            return Progress::Handle(Box::new(READY));
        }
        if self.peer_ready
            && let Some(Ok(lane)) = made.take()
        {
            let by = lane.by();
            return Progress::Ready(Box::new(lane), by);
        }
        let is_made = made.is_some();
        drop(made);
        let limit = self.backend.config.setup_timeout;
        if self.age(now) <= limit {
            return Progress::Pending;
        }
        let missing = match (self.connected, is_made) {
            (false, _) => "the connection of the lane was not established",
            (true, false) => "the flow rule of the lane was not made",
            (true, true) => "the peer did not report that its lane is ready",
        };
        let (nic, seconds) = (self.device.name(), limit.as_secs_f64());
        Progress::Failed(format!("{NAME} on NIC {nic}: {missing} within {seconds:.0} s"))
    }

    fn age(&self, now: Duration) -> Duration {
        now.saturating_sub(self.started)
    }
}

fn make(backend: Arc<Backend>, device: Arc<Device>, conn: Box<dyn Conn>) -> Result<DevmemLane, String> {
    let fd = conn.fd().ok_or_else(|| format!("{NAME} needs a kernel TCP socket"))?;
    let rule = device.steer(conn.local(), conn.remote())?;
    let made =
        backend.clone().with_gpu_current(|| DevmemLane::new(backend.clone(), device.clone(), conn, fd, rule));
    made.inspect_err(|_| device.unsteer_later(rule))
}
