//! The progress engine of one worker: its channels, and one pass over them.
//!
//! A pass runs commands, receives, polls lanes and GPU copies, and sends.
//!
//! Invariant: only the thread that holds the engine's lock touches its channels.
//!
//! Read next: `channel/`, whose methods a pass calls.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::pinning::Pinning;
use super::quiesce::{Abandoning, Closed};
use super::{COPY_BACKOFF, Command, Loss, LostChannel, Worker};
use crate::core::channel::{Channel, SendAcks, Workspace};
use crate::core::context::Context;
use crate::core::operation::Hold;
use crate::core::peer::PeerState;
use ferrywire_memory::cuda::deferred_free;
use ferrywire_proto::limits;
use ferrywire_proto::schedule::Traffic;
use ferrywire_sys::poll::{Event as PollEvent, Interest, WAKE_TOKEN};

/// Passes between two polls of all sockets, while one channel receives all the time.
const HOT_POLLS: u32 = 8;
/// Passes after which every due acknowledgement is sent, even while more data arrives.
const ACK_POLLS: u32 = 64;
/// Bytes that keep a lane busy for longer than one backoff.
const BACKOFF_BYTES: usize = 4 << 20;

/// The channels of a worker. Only the thread that holds the engine's lock touches them.
pub(crate) struct ProgressEngine {
    pub(super) slots: Vec<Option<Slot>>,
    space: Workspace,
    pub(super) ready: Vec<PollEvent>,
    /// Time of the last pass.
    pub(super) now: Duration,
    last_check: Duration,
    pub(super) pinning: Pinning,
    /// Number of bytes moved so far, received and sent.
    pub(super) moved: u64,
    /// Index of the channel that received last.
    hot: Option<usize>,
    polls: u32,
    /// Index of the channel that may send first in this pass.
    first: usize,
    /// Number of channels without a file descriptor, which have to be polled.
    polled: usize,
    /// Requests to release memory that a lane or GPU may still write to.
    pub(super) abandoning: Vec<Abandoning>,
    /// Lanes and connections of lost channels, while they may still read memory.
    pub(super) unreleased: Vec<Closed>,
}

pub(super) struct Slot {
    pub(super) channel: Box<Channel>,
    pub(super) waits_for: Interest,
    pub(super) polled: bool,
    /// What the channel had moved when it was last decided whether to pin the thread.
    pub(super) moved: Traffic,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Polled {
    Idle,
    Worked,
    Done,
}

impl ProgressEngine {
    pub(super) fn new() -> ProgressEngine {
        ProgressEngine {
            slots: Vec::new(),
            space: Workspace::new(),
            ready: Vec::new(),
            now: Duration::ZERO,
            last_check: Duration::ZERO,
            pinning: Pinning::default(),
            moved: 0,
            hot: None,
            polls: 0,
            first: 0,
            polled: 0,
            abandoning: Vec::new(),
            unreleased: Vec::new(),
        }
    }

    /// Makes one pass: runs commands, receives, polls lanes and GPU copies, and then sends, unless `done`
    /// returns true before.
    pub(super) fn poll_once(
        &mut self,
        worker: &Worker,
        context: &Context,
        done: &mut dyn FnMut() -> bool,
    ) -> Polled {
        let _moving = deferred_free::moving();
        worker.step();
        let mut worked = self.run_commands(worker, context);
        worked |= self.receive(worker, context);
        worked |= self.poll_lanes(worker, context);
        worked |= self.poll_staging(worker, context);
        if done() {
            return Polled::Done;
        }
        // While more data arrives, acknowledgements that are not urgent wait for a data frame. A pass without
        // work leaves them only to a short frame that is almost ready, and one pass in `ACK_POLLS` leaves none.
        let acks = if self.polls.is_multiple_of(ACK_POLLS) {
            SendAcks::All
        } else if worked {
            SendAcks::Urgent
        } else {
            SendAcks::UnlessFrameSoon
        };
        worked |= self.send(worker, context, acks);
        if done() {
            return Polled::Done;
        }
        let now = context.transport.now();
        self.now = now;
        if now.saturating_sub(self.last_check) >= limits::PATH_CHECK_INTERVAL {
            self.last_check = now;
            self.check_paths(worker, context);
        }
        if worked { Polled::Worked } else { Polled::Idle }
    }

    pub(super) fn run_commands(&mut self, worker: &Worker, context: &Context) -> bool {
        // Every worker had lanes when this was asked. Only the worker's own thread may answer it.
        let mut worked = false;
        if worker.sleeper.is_to_pin() && worker.is_this_thread() && worker.sleeper.take_pin_request() {
            worked = true;
            self.pinning.pin_for_good(worker.index, context.sleepers.len());
        }
        while let Some(command) = worker.commands.pop() {
            worked = true;
            worker.step();
            match command {
                Command::Add(channel) => self.add(worker, context, channel),
                Command::Abandon(request) => {
                    let since = context.transport.now();
                    self.abandoning.push(Abandoning { request, since, by_gpu: false });
                    self.release_memory(worker, context);
                }
                Command::Drop { session, index, generation, why } => {
                    let place = self.slots.iter().position(|slot| {
                        slot.as_ref().is_some_and(|slot| {
                            let channel = &slot.channel;
                            channel.peer.info.session == session
                                && channel.index == index
                                && channel.generation == generation
                        })
                    });
                    if let Some(place) = place {
                        self.lose(worker, context, place, why);
                    }
                }
            }
        }
        worked
    }

    /// Polls every lane: lanes raise no events.
    fn poll_lanes(&mut self, worker: &Worker, context: &Context) -> bool {
        if !worker.may_have_lanes() {
            return false;
        }
        let mut worked = false;
        for place in 0..self.slots.len() {
            let Some(slot) = &mut self.slots[place] else { continue };
            // A lane may copy megabytes, and another thread waits for the command's answer.
            if worked && worker.has_commands() {
                break;
            }
            let polled = slot.channel.poll_lane();
            worker.step();
            match polled {
                Ok(moved) => worked |= moved,
                Err(error) => {
                    self.fail(worker, context, place, &error);
                    worked = true;
                }
            }
        }
        if !self.abandoning.is_empty() {
            self.release_memory(worker, context);
        }
        worked
    }

    /// Places payload whose GPU copies have finished.
    fn poll_staging(&mut self, worker: &Worker, context: &Context) -> bool {
        let mut worked = false;
        for place in 0..self.slots.len() {
            worked |= self.start_ready(place);
            let Some(slot) = self.slots[place].as_mut().filter(|slot| slot.channel.staging_active()) else {
                continue;
            };
            let polled = slot.channel.poll_staging();
            worker.step();
            match polled {
                Ok(placed) => worked |= placed,
                Err(error) => {
                    self.fail(worker, context, place, &error);
                    worked = true;
                    continue;
                }
            }
            if slot.channel.holds_back() {
                worked |= self.receive_at(worker, context, place);
            }
        }
        if !self.abandoning.is_empty() && !worker.may_have_lanes() {
            self.release_memory(worker, context);
        }
        worked
    }

    /// Ends receives whose messages are placed, and starts operations that need no longer wait for a GPU stream.
    /// Only the first channel of each peer does this: each waiting operation costs a driver call.
    fn start_ready(&self, place: usize) -> bool {
        let Some(slot) = &self.slots[place] else { return false };
        let (streams, messages) = (slot.channel.polls_stream_queue(), slot.channel.polls_messages());
        if !streams && !messages {
            return false;
        }
        let peer = &slot.channel.peer;
        let mut before = self.slots[..place].iter().flatten();
        !before.any(|other| Arc::ptr_eq(&other.channel.peer, peer))
            && ((messages && peer.end_placed()) | (streams && peer.start_ready()))
    }

    /// Whether a GPU copies for some channel, so that a thread has to poll it.
    pub(super) fn staging_active(&self) -> bool {
        self.slots.iter().flatten().any(|slot| slot.channel.staging_active())
    }

    /// Whether some channel stages payload of GPUs.
    pub(super) fn stages(&self) -> bool {
        self.slots.iter().flatten().any(|slot| slot.channel.stages())
    }

    pub(super) fn lanes_active(&self) -> bool {
        // A request that waits only for GPU copies is checked by the staging poll.
        self.abandoning.iter().any(|each| !each.by_gpu)
            || self.slots.iter().flatten().any(|slot| slot.channel.lane_active())
    }

    /// Whether every active lane has so many bytes in flight that a backoff delays no caller.
    pub(super) fn lanes_in_bulk(&self) -> bool {
        let mut active = self.slots.iter().flatten().filter(|slot| slot.channel.lane_active()).peekable();
        self.abandoning.is_empty()
            && active.peek().is_some()
            && active.all(|slot| slot.channel.lane_bytes_in_flight() >= BACKOFF_BYTES)
    }

    /// Whether every channel with frames in flight has so much of them that the thread need not spin.
    pub(super) fn in_deep_bulk(&self) -> bool {
        let channels = || self.slots.iter().flatten().map(|slot| &slot.channel);
        channels().any(|channel| channel.in_deep_bulk())
            && channels().all(|channel| channel.in_deep_bulk() || !channel.outstanding())
    }

    /// How long to pause after a pass without progress, if an active lane specifies that.
    pub(super) fn lanes_pause(&self) -> Option<Duration> {
        self.slots.iter().flatten().find_map(|slot| slot.channel.lane_pause())
    }

    /// Whether some channel has no lane.
    pub(super) fn has_plain(&self) -> bool {
        self.slots.iter().flatten().any(|slot| !slot.channel.has_lane())
    }

    fn add(&mut self, worker: &Worker, context: &Context, channel: Box<Channel>) {
        let place = self.slots.iter().position(Option::is_none).unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        let fd = channel.conn().fd();
        self.polled += usize::from(fd.is_none());
        let has_lane = channel.has_lane();
        // This pass may end before it sends, and a post wakes only workers of channels that are known to have room.
        channel.publish_load();
        let moved = channel.traffic();
        self.slots[place] = Some(Slot { channel, waits_for: Interest::READ, polled: fd.is_none(), moved });
        if has_lane {
            worker.sleeper.add_lane();
            if context.sleepers.iter().all(|each| each.has_lanes()) {
                context.sleepers.iter().for_each(|each| each.ask_to_pin());
            }
        }
        if let Some(fd) = fd
            && let Err(error) = worker.poller.add(fd, place as u64, Interest::READ)
        {
            self.lose(worker, context, place, error.to_string());
        }
    }

    pub(super) fn lose(&mut self, worker: &Worker, context: &Context, place: usize, why: impl Into<Loss>) {
        let Some(slot) = self.slots[place].take() else {
            return;
        };
        if slot.channel.has_lane() {
            worker.sleeper.remove_lane();
        }
        #[cfg(test)]
        let slot = self.handed_over(slot);
        match slot.channel.conn().fd() {
            Some(fd) => drop(worker.poller.remove(fd)),
            None => self.polled -= 1,
        }
        let (peer, index, generation) =
            (slot.channel.peer.clone(), slot.channel.index, slot.channel.generation);
        let mut remains = slot.channel.end();
        if let Some(closed) = remains.unreleased.take() {
            let ops = remains.entries.iter().filter_map(|(_, entry)| entry.op.as_deref().cloned()).collect();
            self.unreleased.push(Closed { unreleased: closed, ops, since: context.transport.now() });
        }
        peer.note_cut_off();
        worker.step();
        worker.lost.push(LostChannel {
            peer,
            index,
            generation,
            loss: why.into(),
            remains: Box::new(remains),
        });
    }

    /// For tests: sends everything that is queued, if the channel's peer is to vanish.
    #[cfg(test)]
    fn handed_over(&mut self, mut slot: Slot) -> Slot {
        if slot.channel.peer.life.vanishes.load(std::sync::atomic::Ordering::SeqCst) {
            slot.channel.hand_over(&mut self.space);
        }
        slot
    }

    fn fail(&mut self, worker: &Worker, context: &Context, place: usize, error: &io::Error) {
        self.lose(worker, context, place, error.to_string());
    }

    fn receive(&mut self, worker: &Worker, context: &Context) -> bool {
        let mut worked = self.receive_held(worker, context);
        if let Some(received) = self.receive_hot(worker, context) {
            return worked | received;
        }
        let mut ready = std::mem::take(&mut self.ready);
        if self.slots.len() > self.polled {
            if let Err(error) = worker.poller.wait(&mut ready, Some(Duration::ZERO)) {
                tracing::error!(%error, worker = worker.index, "cannot poll the sockets of a worker");
            }
            for event in &ready {
                worked |= self.react(worker, context, *event);
            }
        }
        self.ready = ready;
        if self.polled > 0 {
            for place in 0..self.slots.len() {
                if self.slots[place].as_ref().is_some_and(|slot| slot.polled) {
                    worked |= self.receive_at(worker, context, place);
                }
            }
        }
        worked
    }

    /// Receives what connections hold that have read more from their sockets than their channels had room for.
    fn receive_held(&mut self, worker: &Worker, context: &Context) -> bool {
        let mut worked = false;
        for place in 0..self.slots.len() {
            if self.slots[place].as_ref().is_some_and(|slot| slot.channel.has_received()) {
                worked |= self.receive_at(worker, context, place);
            }
        }
        worked
    }

    /// Receives on the channel that received last, before all sockets are polled. In a ping-pong this saves a
    /// system call. Returns `None` when all sockets have to be polled.
    fn receive_hot(&mut self, worker: &Worker, context: &Context) -> Option<bool> {
        self.polls = self.polls.wrapping_add(1);
        let place = self.hot.filter(|_| !self.polls.is_multiple_of(HOT_POLLS))?;
        let slot = self.slots.get(place)?.as_ref()?;
        if slot.waits_for != Interest::READ || slot.polled {
            return None;
        }
        let worked = self.receive_at(worker, context, place);
        // No bytes came: poll all sockets in every other pass.
        (worked || !self.polls.is_multiple_of(2)).then_some(worked)
    }

    fn react(&mut self, worker: &Worker, context: &Context, event: PollEvent) -> bool {
        if event.token == WAKE_TOKEN {
            return false;
        }
        let place = event.token as usize;
        let Some(Some(slot)) = self.slots.get_mut(place) else {
            return false;
        };
        if event.writable {
            slot.channel.unblock();
        }
        if event.error {
            slot.channel.read_notices();
        }
        if event.readable || event.hangup || event.error {
            return self.receive_at(worker, context, place);
        }
        true
    }

    fn receive_at(&mut self, worker: &Worker, context: &Context, place: usize) -> bool {
        let Some(slot) = &mut self.slots[place] else {
            return false;
        };
        let received = slot.channel.receive(&mut self.space);
        worker.step();
        match received {
            Ok(bytes) => {
                self.moved += bytes as u64;
                if bytes > 0 {
                    self.hot = Some(place);
                }
                bytes > 0
            }
            Err(error) => {
                self.fail(worker, context, place, &error);
                true
            }
        }
    }

    fn send(&mut self, worker: &Worker, context: &Context, acks: SendAcks) -> bool {
        let mut worked = false;
        // Each pass starts with another channel. The first one gets most of a shared limit on bytes in
        // flight.
        self.first = (self.first + 1).checked_rem(self.slots.len()).unwrap_or(0);
        for place in (self.first..self.slots.len()).chain(0..self.first) {
            worked |= self.send_at(worker, context, place, acks);
        }
        worked
    }

    fn send_at(&mut self, worker: &Worker, context: &Context, place: usize, acks: SendAcks) -> bool {
        let Some(slot) = &mut self.slots[place] else {
            return false;
        };
        if slot.polled {
            slot.channel.unblock();
        }
        let sent = slot.channel.send(acks, &mut self.space);
        worker.step();
        match sent {
            Ok(bytes) => {
                slot.watch(worker, place);
                self.moved += bytes as u64;
                bytes > 0
            }
            Err(error) => {
                self.fail(worker, context, place, &error);
                true
            }
        }
    }

    /// Posts an operation to a peer, and sends the peer's queued frames. False if the peer is gone.
    pub(super) fn post_for(
        &mut self,
        worker: &Worker,
        context: &Context,
        peer: &Arc<PeerState>,
        op: Hold,
    ) -> bool {
        let _moving = deferred_free::moving();
        let mut left = Some(op);
        let mut posted = true;
        for slot in self.slots.iter_mut().flatten() {
            if !Arc::ptr_eq(&slot.channel.peer, peer) {
                continue;
            }
            let Some(op) = left.take() else { break };
            match slot.channel.post(op) {
                Ok(is_open) => posted = is_open,
                Err(op) => left = Some(op),
            }
        }
        if let Some(op) = left {
            posted = peer.queue.post(op);
        }
        self.send_for(worker, context, peer);
        posted
    }

    /// Sends the queued frames of one peer.
    pub(super) fn send_for(&mut self, worker: &Worker, context: &Context, peer: &Arc<PeerState>) {
        let _moving = deferred_free::moving();
        for place in 0..self.slots.len() {
            if self.slots[place].as_ref().is_some_and(|slot| Arc::ptr_eq(&slot.channel.peer, peer)) {
                self.send_at(worker, context, place, SendAcks::Urgent);
            }
        }
    }

    fn check_paths(&mut self, worker: &Worker, context: &Context) {
        self.has_released(context.transport.now());
        for place in 0..self.slots.len() {
            let Some(slot) = &mut self.slots[place] else {
                continue;
            };
            slot.channel.finish_released();
            slot.channel.report_held();
            if !slot.channel.is_watched() {
                continue;
            }
            if let Some(why) = slot.channel.path_trouble() {
                self.lose(worker, context, place, why);
            }
        }
    }

    /// Whether work waits that no socket event will report.
    pub(super) fn has_work(&self) -> bool {
        self.slots.iter().flatten().any(|slot| {
            let channel = &slot.channel;
            channel.has_received() || (!channel.blocked() && channel.may_pull())
        })
    }

    pub(super) fn acks_due(&self) -> bool {
        self.slots.iter().flatten().any(|slot| slot.channel.ack_due())
    }

    /// Longest time for which the owner may sleep without polling; `None` for no limit.
    pub(super) fn sleep_limit(&self) -> Option<Duration> {
        if self.staging_active() {
            return Some(COPY_BACKOFF);
        }
        if self.polled > 0 {
            return Some(Duration::from_millis(1));
        }
        let is_watched = self.slots.iter().flatten().any(|slot| slot.channel.is_watched());
        (is_watched || !self.unreleased.is_empty()).then_some(limits::PATH_CHECK_INTERVAL)
    }
}

impl Slot {
    /// Polls the socket for writability only while the channel is blocked, and for bytes only while the
    /// channel can take them.
    fn watch(&mut self, worker: &Worker, place: usize) {
        let interest = Interest { read: !self.channel.stalled(), write: self.channel.blocked() };
        if interest == self.waits_for {
            return;
        }
        if let Some(fd) = self.channel.conn().fd()
            && let Err(error) = worker.poller.modify(fd, place as u64, interest)
        {
            tracing::error!(%error, worker = worker.index, "cannot change the poll interest of a channel's socket");
        }
        self.waits_for = interest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Endpoint;
    use crate::core::ordering::StreamEvent;
    use ferrywire_memory::sim::SimGpu;
    use ferrywire_net::{Conn, IoVec, PathHealth};
    use std::net::SocketAddr;
    use std::os::fd::RawFd;
    use std::sync::MutexGuard;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Instant;

    const LONG: Duration = Duration::from_secs(60);

    /// Two endpoints with one thread each; the first one has connected.
    fn connected(channels: usize) -> (Endpoint, Endpoint, crate::Peer) {
        let builder = || Endpoint::builder().threads(1).channels(channels);
        let far = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        let near = builder().build().unwrap();
        let peer = near.connect(far.listen_addresses()[0], LONG).unwrap();
        (near, far, peer)
    }

    /// The engine, once it has `channels` channels.
    fn engine_of<'a>(
        worker: &'a Worker,
        context: &Context,
        channels: usize,
    ) -> MutexGuard<'a, ProgressEngine> {
        let since = Instant::now();
        loop {
            if let Some(mut engine) = worker.try_engine() {
                engine.run_commands(worker, context);
                if engine.slots.iter().flatten().count() == channels {
                    return engine;
                }
            }
            assert!(
                since.elapsed() < LONG,
                "another thread holds the engine all the time, or it lacks channels"
            );
            std::thread::yield_now();
        }
    }

    /// Counts sends by threads that are marked as moving data, and by threads that are not.
    struct Watched {
        conn: Box<dyn Conn>,
        sends: Arc<[AtomicUsize; 2]>,
    }

    impl Conn for Watched {
        unsafe fn send(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
            self.sends[usize::from(deferred_free::moves())].fetch_add(1, Ordering::SeqCst);
            // SAFETY: promised by the caller of this method.
            unsafe { self.conn.send(pieces) }
        }

        unsafe fn recv(&mut self, pieces: &[IoVec]) -> io::Result<usize> {
            // SAFETY: promised by the caller of this method.
            unsafe { self.conn.recv(pieces) }
        }

        fn health(&self) -> PathHealth {
            self.conn.health()
        }

        fn shutdown(&mut self) {
            self.conn.shutdown();
        }

        fn fd(&self) -> Option<RawFd> {
            self.conn.fd()
        }

        fn local(&self) -> SocketAddr {
            self.conn.local()
        }

        fn remote(&self) -> SocketAddr {
            self.conn.remote()
        }
    }

    /// Regression: a caller that sent inline and lost the connection freed the rings itself, and waited with
    /// the engine for all of the GPU's work.
    #[test]
    fn a_caller_that_sends_at_once_frees_nothing_meanwhile() {
        let (near, _far, peer) = connected(1);
        let running = near.running().clone();
        let worker = running.workers[0].clone();
        let mut engine = engine_of(&worker, running.context(), 1);
        let sends: Arc<[AtomicUsize; 2]> = Arc::default();
        let slot = engine.slots[0].take().expect("the engine has a channel");
        let watched = slot.channel.with_conn(|conn| Box::new(Watched { conn, sends: sends.clone() }));
        engine.slots[0] = Some(Slot { channel: Box::new(watched), ..slot });
        let notified = peer.notify(b"at once").unwrap();
        engine.send_for(&worker, running.context(), peer.state());
        assert_eq!([0, 1].map(|moves| sends[moves].load(Ordering::SeqCst)), [0, 1]);
        drop(engine);
        notified.wait(LONG).unwrap();
    }

    /// A query costs a driver call for each waiting operation. Regression: each channel of the peer made it.
    #[test]
    fn operations_that_wait_for_a_gpu_are_checked_once_a_pass() {
        let (near, _far, peer) = connected(3);
        let running = near.running().clone();
        let worker = running.workers[0].clone();
        let stream = SimGpu::open(1).unwrap().stream();
        let gate = stream.hold().unwrap();
        let waits = peer.on_stream(StreamEvent::after_sim(&stream).unwrap()).notify(b"later").unwrap();
        let mut engine = engine_of(&worker, running.context(), 3);
        let polls = || peer.state().stream_queue.polls.load(Ordering::SeqCst);
        let before = polls();
        engine.poll_once(&worker, running.context(), &mut || false);
        assert_eq!(polls() - before, 1);
        gate.open();
        drop(engine);
        waits.wait(LONG).unwrap();
    }
}
