//! A lane over two connections of a plugin: one sends, the other receives.
//!
//! Invariant: only [`judge`] and [`post_of`] interpret a plugin's results.
//! Read next: `posted/mod.rs`, which drives it.

use super::host::Host;
use super::registration::Registrations;
use crate::error::{Error, Result};
use crate::payload::copying::Copiers;
use crate::payload::lane::{InFlight, Lane, LaneBy, Post, Run, Step, Ticket, Ungathered, Way};
use ferrywire_memory::unpack::{Gather, SLOTS};
use ferrywire_memory::{Memory, MemoryLocation};
use ferrywire_ncclnet::abi::ResultCode;
use ferrywire_ncclnet::{Comm, Posted, RecvBuffer, RecvComm, Request, SendComm, Tested};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::task::Poll;

/// Direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Send,
    Recv,
}

/// Interprets the result of a test: `Ok(done)`, or `Err(true)` for a failure that may be none. A closing
/// peer's first sign may be a receive's only one: TCPX reports it once although all data has arrived. A
/// result with `done` has ended the request, and on a sending connection nothing can arrive any more.
pub(super) fn judge(direction: Direction, code: ResultCode, done: bool) -> Result<bool, bool> {
    match (direction, code, done) {
        (_, ResultCode::SUCCESS, done) => Ok(done),
        (Direction::Recv, ResultCode::SYSTEM_ERROR, false) => Err(true),
        _ => Err(false),
    }
}

/// Interprets the result of posting. Plugins report a full window in two ways: no request, or result 3.
fn post_of(posted: Posted) -> Post {
    match posted {
        Posted::Request(request) => Post::Posted(Ticket(request.as_ptr() as usize)),
        Posted::Null => Post::Full("a null request"),
        Posted::Refused(error) if error.code() == Some(ResultCode::INTERNAL_ERROR) => Post::Full("result 3"),
        Posted::Refused(error) => Post::Failed(error.to_string()),
    }
}

pub(crate) struct PluginLane {
    host: Arc<Host>,
    /// The connection that sends. It and `recv` are set until the lane is closed.
    send: Option<SendComm>,
    recv: Option<RecvComm>,
    sources: Registrations,
    targets: Registrations,
    /// Gathers receives that arrive in fragments. Dropped before the connection is closed.
    gather: Option<Gather>,
    copiers: Copiers,
    device: i32,
    device_name: String,
}

impl PluginLane {
    pub fn new(host: Arc<Host>, send: SendComm, recv: RecvComm, gather: Option<Gather>) -> PluginLane {
        let device = send.device();
        let device_name = host.device(device).map(|device| device.name.clone()).unwrap_or_default();
        let copiers = Copiers::new(host.opened_gpu().cloned());
        PluginLane {
            host,
            send: Some(send),
            recv: Some(recv),
            sources: Registrations::default(),
            targets: Registrations::default(),
            gather,
            copiers,
            device,
            device_name,
        }
    }

    /// The plugin and device, for statistics.
    pub fn by(&self) -> LaneBy {
        LaneBy {
            plugin: self.host.plugin.name().to_owned(),
            version: self.host.plugin.version().to_string(),
            device: self.device,
            device_name: self.device_name.clone(),
            devmem: None,
        }
    }

    fn test(&self, direction: Direction, comm: &Comm, ticket: Ticket) -> Step {
        let Some(pointer) = NonNull::new(ticket.0 as *mut c_void) else {
            return Step::Failed("there is no such request".into());
        };
        // SAFETY: the ticket is of a request that this connection gave, and was not done when last tested.
        let Tested { code, done, .. } = unsafe { comm.test(Request::from_ptr(pointer)) };
        match judge(direction, code, done) {
            Ok(true) => Step::Done,
            Ok(false) => Step::Pending,
            Err(transient) => {
                let beside = if done { ", and done" } else { "" };
                let said = format!("test of {}: {code}{beside}", comm.id());
                if transient { Step::Closing(said) } else { Step::Failed(said) }
            }
        }
    }
}

fn closed() -> Post {
    Post::Failed("the connection is closed".into())
}

impl Lane for PluginLane {
    fn window(&self) -> usize {
        let window = self.host.config.window;
        // The fragments of each receive occupy a slot from posting until the receive is returned.
        self.gather.as_ref().map_or(window, |_| window.min(SLOTS))
    }

    fn send_window(&self) -> usize {
        self.host.config.window
    }

    /// True, because `connect` returns before the peer's `accept` does. TCPX waits in `accept` until flow rules
    /// are in force, and GPU payload that arrives earlier ends the peer's process.
    fn may_stand_alone(&self) -> bool {
        true
    }

    fn message_bytes_max(&self) -> usize {
        self.host.message_bytes_max
    }

    fn takes(&mut self, way: Way, run: &Run) -> bool {
        match (way, &self.send, &self.recv) {
            (Way::Pack, Some(comm), _) => self.sources.has(comm, run, &self.host),
            (Way::Unpack, _, Some(comm)) => self.targets.has(comm, run, &self.host),
            // A closed connection fails when it is used.
            _ => true,
        }
    }

    fn isend(&mut self, run: &Run) -> Post {
        let Some(comm) = &self.send else { return closed() };
        match self.sources.of(comm, run, &self.host) {
            // SAFETY: the run lies in the registered memory, and stays as it is until the request is done
            // or the lane closed: `posted/` keeps it.
            Ok(memory) => post_of(unsafe { comm.isend(run.base().cast(), run.bytes, 0, memory) }),
            Err(why) => Post::Failed(why),
        }
    }

    fn irecv(&mut self, run: &Run) -> Post {
        let Some(comm) = &self.recv else { return closed() };
        match self.targets.of(comm, run, &self.host) {
            Ok(memory) => {
                let buffer = RecvBuffer { data: run.base().cast(), bytes: run.bytes, tag: 0, memory };
                // SAFETY: the run lies in the registered memory, and stays registered until the request is done
                // or the lane closed: `posted/` keeps it.
                post_of(unsafe { comm.irecv(&[buffer]) })
            }
            Err(why) => Post::Failed(why),
        }
    }

    fn test_send(&mut self, ticket: Ticket) -> Step {
        match &self.send {
            Some(comm) => self.test(Direction::Send, comm, ticket),
            None => Step::Failed("the connection is closed".into()),
        }
    }

    fn test_recv(&mut self, ticket: Ticket) -> Step {
        match &self.recv {
            Some(comm) => self.test(Direction::Recv, comm, ticket),
            None => Step::Failed("the connection is closed".into()),
        }
    }

    fn scatters(&self, memory: &Memory) -> bool {
        let unpacks = self.host.device(self.device).is_some_and(|device| device.unpacks());
        unpacks && memory.location() != MemoryLocation::Host
    }

    fn gather(&mut self, number: u64, run: &Run) -> Result<(), Ungathered> {
        let gather = self.gather.as_mut();
        let none = || Ungathered::Failed("the plugin gave no device handle to gather by".into());
        let (gather, address, bytes) = (gather.ok_or_else(none)?, run.base() as u64, run.bytes as u64);
        gather.check(address, bytes).map_err(|error| Ungathered::Target(error.into()))?;
        let started = gather.start_on_gpu(number, address, bytes);
        started.map_err(|error| Ungathered::Failed(error.to_string()))
    }

    fn gathered(&mut self, number: u64) -> Poll<Result<()>> {
        let Some(gather) = &mut self.gather else { return Poll::Ready(Ok(())) };
        gather.poll(number).map(|outcome| outcome.map(drop).map_err(Error::from))
    }

    fn consumed(&mut self, ticket: Ticket) -> Result<(), String> {
        let Some(comm) = self.recv.as_ref().filter(|_| self.host.plugin.has_irecv_consumed()) else {
            return Ok(());
        };
        let Some(pointer) = NonNull::new(ticket.0 as *mut c_void) else { return Ok(()) };
        // SAFETY: a finished receive of one buffer of this connection, given back once and in order.
        unsafe { comm.irecv_consumed(1, Request::from_ptr(pointer)) }.map_err(|error| error.to_string())
    }

    fn copy(&mut self, way: Way, slot: &Run, ranges: &[Run]) -> Poll<Result<()>> {
        self.copiers.copy(way, slot, ranges)
    }

    fn slot_memory(&self, like: Option<&Memory>, bytes: usize) -> Result<Arc<Memory>, String> {
        let location = like.map(Memory::location).or(self.host.config.gpu).unwrap_or(MemoryLocation::Host);
        self.host.memory(location, bytes)
    }

    fn host_slot_memory(&self, bytes: usize) -> Result<Arc<Memory>, String> {
        self.host.host_memory(bytes)
    }

    fn forget_revoked(&mut self, busy: &dyn Fn(&Arc<Memory>) -> bool) {
        if let (Some(send), Some(recv)) = (&self.send, &self.recv) {
            self.sources.forget_revoked(send, busy);
            self.targets.forget_revoked(recv, busy);
        }
    }

    fn close(&mut self, in_flight: InFlight) {
        let (Some(send), Some(recv)) = (self.send.take(), self.recv.take()) else { return };
        // When these are dropped, the GPU no longer uses pool and memory.
        self.gather = None;
        self.copiers.stop();
        // With requests in flight a registration may be in use: it then ends with the connection, or stays.
        if in_flight.sends {
            self.host.leaked_registrations(self.sources.count(), send.id())
        } else {
            self.sources.undo_all(&send)
        }
        if in_flight.receives {
            self.host.leaked_registrations(self.targets.count(), recv.id())
        } else {
            self.targets.undo_all(&recv)
        }
        for closed in [send.close(), recv.close()] {
            if let Err(error) = closed {
                tracing::warn!(%error, "cannot close a plugin's connection");
            }
        }
    }

    fn describe(&self) -> String {
        let plugin = &self.host.plugin;
        let (name, version) = (plugin.name(), plugin.version());
        format!("plugin {name} ({version}) on device {} ({})", self.device, self.device_name)
    }
}

impl Drop for PluginLane {
    fn drop(&mut self) {
        // A lane that was never used has nothing in flight.
        self.close(InFlight::NOTHING);
    }
}
