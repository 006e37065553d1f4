//! Callers that post and wait: which thread moves the bytes meanwhile.
//!
//! A caller that posts a small operation to an idle worker sends it inline, and a longer one that is alone; bulk is left
//! to the worker threads. A caller that waits polls its peer's worker inline, unless the peer moves bulk, and otherwise
//! sleeps. To poll inline a caller claims the worker's progress engine. The caller gives the engine back when
//! its operation is done or the worker's thread does better.
//!
//! Invariants: after [`Workers::kick`] the operation is sent, or a worker's thread or a polling caller will
//! send it. A claim gives the engine back when it is dropped, and wakes the worker's thread if work is left.
//! Read next: `engine.rs`, one pass.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use super::engine::Polled;
use super::{Pass, ProgressEngine, Worker, Workers};
use crate::core::context::Context;
use crate::core::operation::Hold;
use crate::core::peer::PeerState;
use crate::core::queue::SMALL_BYTES_MAX;
use crate::core::sleeper::{Activity, PassiveWaiter};
use crate::core::waiting::WakeHandle;
use ferrywire_memory::cuda::deferred_free::{self, Moving};
use ferrywire_proto::wire::HEADER_BYTES;
use ferrywire_sys::signal::SigpipeScope;

/// How long a caller that polls inline spins without work before it sleeps in the kernel.
pub(super) const SPIN: Duration = Duration::from_micros(50);
/// How long a waiting caller spins before it sleeps, while the worker threads make progress.
const BULK_SPIN: Duration = Duration::from_micros(200);
/// Longest time for which a caller spins for an engine that the thread is about to release.
const CLAIM: Duration = Duration::from_millis(2);
/// Bytes that a waiting caller moves before it hands the rest to the thread, which may be pinned.
const DRIVE_BYTES: u64 = 4 << 20;
/// Most operations that wait to be sent in one packet: so many frames of 4 KiB fit.
const SENT_TOGETHER_MAX: u64 = 15;
/// Fewest bytes that the kernel puts into one packet: whole segments within 64 KiB, seven at an MTU of 9000.
const PACKET_BYTES: u64 = 7 * 8948;
/// Largest operation, in bytes, of which [`SENT_TOGETHER_MAX`] wait if an end copies it to or from a GPU, in whatever
/// number of packets they go. One copy of all of them takes as many driver calls as a copy of one, and these calls
/// take longer than sending 16 KiB.
const SHARED_COPY_BYTES_MAX: u64 = 16 << 10;

/// Longest time that a waiting caller sleeps before it checks again.
const PARK: Duration = Duration::from_millis(50);

impl Workers {
    /// Waits until `done` returns true, and polls the peer's home worker inline where possible. Returns false
    /// after `limit`.
    ///
    /// `register` adds the caller to the wait lists of the event, and `forget` removes it. Without `forget`
    /// callers whose wait timed out would accumulate there. In an endpoint without threads the caller calls
    /// `poll_all`, which polls the workers and the control side.
    pub fn wait(
        &self,
        peer: &PeerState,
        limit: Duration,
        mut register: impl FnMut(WakeHandle),
        forget: impl FnOnce(&WakeHandle),
        done: impl FnMut() -> bool,
        poll_all: impl Fn() -> bool,
    ) -> bool {
        let mut listed = false;
        let register = |handle| {
            // Only threads have to be removed: there are few workers, and another caller may poll the same
            // one by now.
            listed |= matches!(handle, WakeHandle::Thread(_));
            register(handle);
        };
        let is_done = self.wait_listed(peer, limit, register, done, poll_all);
        if listed {
            forget(&WakeHandle::Thread(thread::current()));
        }
        is_done
    }

    fn wait_listed(
        &self,
        peer: &PeerState,
        limit: Duration,
        mut register: impl FnMut(WakeHandle),
        mut done: impl FnMut() -> bool,
        poll_all: impl Fn() -> bool,
    ) -> bool {
        let context = &self.context;
        if context.is_caller_driven() {
            peer.end_bulk();
            return self.wait_driving(limit, done, poll_all);
        }
        let now = Instant::now();
        let until = now.checked_add(limit).unwrap_or_else(|| now + Duration::from_secs(86400 * 365));
        let mut wait = Wait { until, register: &mut register, done: &mut done };
        let mut stand_back = false;
        let mut lively = true;
        loop {
            if (wait.done)() {
                return true;
            }
            peer.end_bulk();
            let worker = &self[peer.home_index()];
            if !peer.in_bulk() && !stand_back && worker.drive(&mut wait, context) {
                return true;
            }
            stand_back = true;
            if wait.rest(Instant::now()).is_zero() {
                return (wait.done)();
            }
            if lively && peer.in_bulk() && wait.spin() {
                return true;
            }
            (wait.register)(WakeHandle::Thread(thread::current()));
            let _passive = PassiveWaiter::on(worker.sleeper());
            if !(wait.done)() {
                let slept = Instant::now();
                thread::park_timeout(wait.rest(slept).min(PARK));
                // After a full sleep nothing moves, as before an unmatched receive: the caller polls again unless
                // the peer is in bulk.
                lively = slept.elapsed() < PARK;
                stand_back = lively;
            }
        }
    }

    /// Waits in an endpoint without threads: the caller polls everything.
    fn wait_driving(
        &self,
        limit: Duration,
        mut done: impl FnMut() -> bool,
        poll_all: impl Fn() -> bool,
    ) -> bool {
        let transport = &self.context.transport;
        let until = transport.now().saturating_add(limit);
        // A caller that polls with a timeout that is over at once may be the only thread that polls.
        let (mut has_polled, mut pauses) = (false, Pauses::default());
        while !done() {
            if has_polled && transport.now() >= until {
                return done();
            }
            has_polled = true;
            pauses.after(poll_all());
        }
        true
    }

    /// Posts an operation and handles it as [`Workers::kick_or_defer`] does. False if the peer is gone.
    pub fn post(&self, peer: &Arc<PeerState>, op: Hold, staged: bool) -> bool {
        let bytes = op.total;
        let home = &self[peer.home_index()];
        let goes_now = bytes <= SMALL_BYTES_MAX
            && !is_deferred(bytes, staged, peer.in_flight_beside_one(), peer.queue.waiting() as u64 + 1)
            && !self.is_for_threads(peer, bytes);
        // A caller that holds the engine needs one lock of the queue to post the operation and take its
        // frame.
        if goes_now && let Some(mut claim) = home.try_claim() {
            let posted = claim.engine().post_for(home, &self.context, peer, op);
            drop(claim);
            // The worker's channels were lost meanwhile: another worker has the queue now.
            if posted && peer.home_index() != home.index {
                peer.wake_home_worker();
            }
            return posted;
        }
        let posted = peer.queue.post(op);
        if posted {
            self.kick_or_defer(peer, bytes, staged);
        }
        posted
    }

    /// Handles a newly posted operation, as [`Workers::kick`] does, or leaves it queued if it should be sent together
    /// with others. `staged` says whether an end copies its bytes to or from a GPU.
    pub fn kick_or_defer(&self, peer: &Arc<PeerState>, bytes: u64, staged: bool) {
        // A caller that polls inline sends several small operations in one call when it waits.
        let deferred = is_deferred(bytes, staged, peer.in_flight_beside_one(), peer.queue.waiting() as u64);
        if deferred
            && !self.is_for_threads(peer, bytes)
            && self[peer.home_index()].sleeper().may_leave_behind()
        {
            return;
        }
        self.kick(peer, bytes);
    }

    /// Whether threads move the `bytes` bytes that are posted to the peer, while callers sleep. A small operation that is
    /// alone is its poster's even if the peer is still in bulk: no thread may be awake.
    fn is_for_threads(&self, peer: &PeerState, bytes: u64) -> bool {
        let is_alone = bytes <= SMALL_BYTES_MAX && peer.has_one_in_flight();
        peer.in_bulk() && !is_alone && !self.context.is_caller_driven()
    }

    /// Handles newly posted operations of `bytes` bytes: sends them inline where that is best, or makes sure that a
    /// thread sends them.
    pub fn kick(&self, peer: &Arc<PeerState>, bytes: u64) {
        let context = &self.context;
        let home = &self[peer.home_index()];
        // Bulk is left to the threads, which may be pinned.
        let is_for_threads = self.is_for_threads(peer, bytes);
        let is_in_order = peer.takes_in_order(bytes);
        if is_for_threads && is_in_order {
            if peer.queue.has_work_beside_bulk() || peer.next_is_ordered() {
                return peer.rouse_for_ordered();
            }
            if !peer.queue.has_work() {
                return;
            }
        }
        let bulk = !is_in_order || peer.in_bulk();
        if is_for_threads || !home.send_at_once(context, peer) {
            home.sleeper().rouse();
        }
        if bulk && peer.queue.has_work() {
            peer.rouse_for_bulk(bytes);
        }
    }

    /// Supports polling of a transfer: polls the home worker if its thread is parked or there is none.
    pub fn nudge(&self, peer: &PeerState) {
        let home = &self[peer.home_index()];
        if matches!(home.sleeper().activity(), Activity::Parked | Activity::NoThread) {
            home.poll_once(&self.context);
        }
    }
}

/// The pauses of a thread that polls everything itself: short ones after a pass that found nothing, then longer ones.
#[derive(Default)]
pub(crate) struct Pauses {
    quiet: u32,
}

impl Pauses {
    /// Pauses after a pass, of which `goes_on` says whether the next one may find something at once.
    pub fn after(&mut self, goes_on: bool) {
        self.quiet = if goes_on { 0 } else { self.quiet.saturating_add(1) };
        match self.quiet {
            0 => {}
            1..200 => thread::yield_now(),
            _ => thread::sleep(SPIN),
        }
    }
}

/// Whether an operation of `bytes` bytes waits to be sent together with others, with `in_flight` operations in flight
/// besides it and `waiting` frames queued, its own among them. `staged` says whether an end copies the bytes to or
/// from a GPU. For a read, `bytes` are those of the answer, which then shares packets too.
fn is_deferred(bytes: u64, staged: bool, in_flight: u64, waiting: u64) -> bool {
    let together = if staged && bytes <= SHARED_COPY_BYTES_MAX {
        SENT_TOGETHER_MAX
    } else {
        (PACKET_BYTES / bytes.saturating_add(HEADER_BYTES as u64)).min(SENT_TOGETHER_MAX)
    };
    // While the peer still works on twice as many, it stays busy until twice as many are queued.
    let sent = in_flight.saturating_sub(waiting);
    let enough = if sent >= 2 * together { 2 * together } else { together };
    in_flight > 0 && together > 1 && waiting < enough
}

impl Worker {
    /// Claims the progress engine for a caller. `None` if another caller has it, or only the thread may poll.
    fn claim(&self) -> Option<Claim<'_>> {
        if self.thread_alone() {
            return None;
        }
        self.wanted.fetch_add(1, Ordering::SeqCst);
        let start = Instant::now();
        let engine = loop {
            if let Some(engine) = self.try_engine() {
                break Some(engine);
            }
            if self.sleeper.is_driven() || start.elapsed() > CLAIM {
                break None;
            }
            thread::yield_now();
        };
        self.wanted.fetch_sub(1, Ordering::SeqCst);
        engine.map(|engine| self.claimed(engine))
    }

    fn claimed<'a>(&'a self, engine: MutexGuard<'a, ProgressEngine>) -> Claim<'a> {
        self.sleeper.begin_drive();
        self.drives.fetch_add(1, Ordering::SeqCst);
        let (_moving, _sigpipe) = (deferred_free::moving(), SigpipeScope::new());
        Claim { worker: self, engine: Some(engine), _moving, _sigpipe }
    }

    /// Sends the queued frames of one peer. False if another thread polls this worker, or only its own thread
    /// may.
    fn send_at_once(&self, context: &Context, peer: &Arc<PeerState>) -> bool {
        let Some(mut claim) = self.try_claim() else { return false };
        claim.engine().send_for(self, context, peer);
        true
    }

    fn try_claim(&self) -> Option<Claim<'_>> {
        if self.thread_alone() {
            return None;
        }
        self.try_engine().map(|engine| self.claimed(engine))
    }

    /// Makes one pass unless another thread polls this worker.
    pub fn poll_once(&self, context: &Context) -> Pass {
        let Some(mut claim) = self.try_claim() else { return Pass::Idle };
        let engine = claim.engine();
        if engine.poll_once(self, context, &mut || false) == Polled::Worked {
            Pass::Worked
        } else if engine.staging_active() {
            // Other threads may be making the copies.
            thread::yield_now();
            Pass::Copies
        } else {
            Pass::Idle
        }
    }

    /// Polls until `done` returns true, or until the worker's thread does better. Returns whether `done`
    /// returned true.
    fn drive(&self, wait: &mut Wait<'_>, context: &Context) -> bool {
        let Some(mut claim) = self.claim() else {
            return false;
        };
        let mut idle_since: Option<Instant> = None;
        let bulk = claim.engine().moved.saturating_add(DRIVE_BYTES);
        loop {
            match claim.engine().poll_once(self, context, wait.done) {
                Polled::Done => return true,
                Polled::Worked if claim.engine().moved > bulk => return false,
                Polled::Worked => {
                    idle_since = None;
                    continue;
                }
                Polled::Idle => {}
            }
            if self.thread_alone() {
                // A lane was added meanwhile: only the thread polls lanes.
                return false;
            }
            let now = Instant::now();
            if now.duration_since(*idle_since.get_or_insert(now)) < SPIN {
                thread::yield_now();
                continue;
            }
            let rest = wait.rest(now);
            if rest.is_zero() || self.sleeper.activity() == Activity::InPoll {
                return false;
            }
            // Register before each sleep: a wake-up takes the caller off the lists, even a spurious one.
            (wait.register)(WakeHandle::Owner(self.sleeper.clone()));
            self.sleep_as_owner(claim.engine(), wait, rest);
            idle_since = None;
        }
    }

    fn sleep_as_owner(&self, engine: &mut ProgressEngine, wait: &mut Wait<'_>, rest: Duration) {
        let has_work =
            |engine: &&mut ProgressEngine| engine.has_work() || self.has_commands() || (wait.done)();
        self.sleeper.sleep_as_owner(engine, has_work, |engine| {
            let limit = engine.sleep_limit().map_or(rest, |limit| limit.min(rest));
            let mut ready = std::mem::take(&mut engine.ready);
            if let Err(error) = self.poller.wait(&mut ready, Some(limit)) {
                tracing::error!(%error, worker = self.index, "cannot poll the sockets of a worker");
            }
            engine.ready = ready;
        });
    }
}

/// The progress engine, held by a caller.
struct Claim<'a> {
    worker: &'a Worker,
    engine: Option<MutexGuard<'a, ProgressEngine>>,
    /// From the first pass to the last, so that the thread's graph capture mode is set once for all passes.
    _moving: Moving,
    _sigpipe: SigpipeScope,
}

impl Claim<'_> {
    fn engine(&mut self) -> &mut ProgressEngine {
        match &mut self.engine {
            Some(engine) => engine,
            None => unreachable!("a claim lost the engine before it was dropped"),
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let Some(engine) = self.engine.take() else { return };
        let worker = self.worker;
        let left = |engine: &MutexGuard<'_, ProgressEngine>| {
            engine.has_work() || engine.acks_due() || engine.staging_active()
        };
        let is_asked = || worker.stop.load(Ordering::SeqCst) || worker.has_commands();
        worker.sleeper.end_drive(engine, left, is_asked);
    }
}

/// A waiting caller: its time limit, and the events it waits for.
struct Wait<'a> {
    pub until: Instant,
    /// Adds the caller to the wait lists of its events.
    pub register: &'a mut dyn FnMut(WakeHandle),
    pub done: &'a mut dyn FnMut() -> bool,
}

impl Wait<'_> {
    pub fn rest(&self, now: Instant) -> Duration {
        self.until.saturating_duration_since(now)
    }

    /// Spins with yields for up to [`BULK_SPIN`]. Returns whether the caller's event has happened. With many
    /// operations in flight the next one finishes soon, and waking a sleeping caller for each costs the
    /// worker threads more.
    pub fn spin(&mut self) -> bool {
        let start = Instant::now();
        let limit = self.rest(start).min(BULK_SPIN);
        while start.elapsed() < limit {
            thread::yield_now();
            if (self.done)() {
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::worker::{LostChannels, PolledBy};

    /// A caller may be woken before its own event: for example when a notification has arrived before its
    /// bytes, which another worker's channels receive.
    #[test]
    fn a_caller_that_was_woken_for_nothing_is_woken_again() {
        let endpoint = crate::Endpoint::builder().threads(1).build().unwrap();
        let running = endpoint.running().clone();
        let spin = ferrywire_proto::schedule::spin(1, 1);
        let lost = Arc::new(LostChannels::new(running.context().control_waker()));
        let worker = Arc::new(Worker::new(0, false, PolledBy::All, spin, lost).unwrap());
        let asked = std::cell::Cell::new(0);
        let mut wait = Wait {
            until: Instant::now() + Duration::from_secs(60),
            register: &mut |handle| {
                asked.set(asked.get() + 1);
                worker.sleeper.owner_asleep.store(true, Ordering::SeqCst);
                handle.wake();
            },
            done: &mut || asked.get() > 2,
        };
        assert!(worker.drive(&mut wait, running.context()), "the caller was not woken");
    }

    /// Regression: posting took the queue's lock once, and taking the operation's frame a second time.
    #[test]
    fn a_small_write_to_an_idle_peer_locks_its_queue_once() {
        const BYTES: usize = 8 << 10;
        let listen = "127.0.0.1:0".parse().unwrap();
        let far = crate::Endpoint::builder().threads(1).channels(1).listen(listen).build().unwrap();
        // Callers poll the only engine, which is free for them.
        let near = crate::Endpoint::builder().threads(0).channels(1).build().unwrap();
        let limit = Duration::from_secs(60);
        let peer = near.connect(far.listen_addresses()[0], limit).unwrap();
        let (source, target) = (near.alloc_host(BYTES).unwrap(), far.alloc_host(BYTES).unwrap());
        let locks = || peer.state().queue.locks.load(Ordering::SeqCst);
        for _ in 0..10 {
            let before = locks();
            let write = peer.write(&source, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
            assert_eq!(locks() - before, 1);
            assert_eq!(write.wait(limit), Ok(BYTES as u64));
        }
    }

    /// In bulk a post wakes a worker whose channel has room. Before its thread takes the operation bulk may end, and then
    /// only the home worker takes it.
    #[test]
    fn a_small_operation_that_is_left_behind_when_bulk_ends_is_sent() {
        let builder = || crate::Endpoint::builder().threads(2).channels(2);
        let far = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        let near = builder().build().unwrap();
        let limit = Duration::from_secs(60);
        let peer = near.connect(far.listen_addresses()[0], limit).unwrap();
        let (target, there) = (near.alloc_host(4 << 20).unwrap(), far.alloc_host(8).unwrap());
        // The peer posts no receive for it. An operation that is alone would go at once.
        let sent = peer.send(1, &target, 0, 128 << 10).unwrap();
        peer.recv(1, &target, 0, 4 << 20).unwrap().cancel();
        let [home, other] = [0, 1].map(|channel| peer.state().engine_worker(channel));
        assert!(peer.state().in_bulk() && peer.state().home_index() == home);
        let since = Instant::now();
        let running = near.running();
        let busy = loop {
            if let Some(mut engine) = running.workers[other].try_engine() {
                engine.run_commands(&running.workers[other], running.context());
                if engine.slots.iter().flatten().count() == 1 {
                    break engine;
                }
            }
            assert!(
                since.elapsed() < limit,
                "another thread holds the engine all the time, or it has no channel"
            );
            thread::yield_now();
        };
        let home = &running.workers[home];
        // Without a limit, so that no check of the path finds the write. The thread looks for work once more after it has
        // announced that it sleeps.
        thread::sleep(Duration::from_millis(20));
        while !home.sleeper().dozes.load(Ordering::SeqCst) {
            assert!(since.elapsed() < limit, "the home worker does not sleep");
            thread::sleep(Duration::from_millis(20));
        }
        peer.state().counters[0].has_ordered_room.store(false, Ordering::SeqCst);
        let write = peer.write(&target, 0, &there.descriptor(), 0, 8).unwrap();
        peer.state().end_bulk();
        assert!(!peer.state().in_bulk());
        while write.poll().is_none() {
            assert!(since.elapsed() < limit, "the home worker does not send the write");
            thread::yield_now();
        }
        drop(busy);
        sent.cancel();
    }

    /// How many operations of `bytes` bytes, posted one after the other, are queued when they are sent, with `sent`
    /// others in flight.
    fn sent_together(bytes: u64, staged: bool, sent: u64) -> u64 {
        let goes = |waiting: &u64| !is_deferred(bytes, staged, sent + waiting - 1, *waiting);
        (1..).find(goes).unwrap_or_default()
    }

    /// Regression: only operations of up to 4 KiB waited for others. Those of 8 and 16 KiB went one by one, each with a
    /// socket call at both ends, slower than 4 KiB.
    #[test]
    fn an_operation_alone_goes_at_once_and_short_ones_go_in_whole_packets() {
        for (bytes, frames) in [(4 << 10, 15), (8 << 10, 7), (16 << 10, 3), (32 << 10, 1)] {
            let frame = bytes + HEADER_BYTES as u64;
            assert!(frames * frame <= PACKET_BYTES && (frames + 1) * frame > PACKET_BYTES);
            let two = if frames > 1 { 2 * frames } else { 1 };
            let expected = [(0, 1), (1, frames), (2 * frames, frames), (2 * frames + 1, two), (1000, two)];
            for (sent, together) in expected {
                assert_eq!(sent_together(bytes, false, sent), together, "{bytes} bytes, {sent} sent");
            }
        }
    }

    /// Regression: 8 KiB of a GPU went one by one, with all driver calls for each, at half the rate of 4 KiB.
    #[test]
    fn operations_of_gpus_wait_for_others_up_to_16_kib() {
        for bytes in [4 << 10, 8 << 10, 16 << 10] {
            let together = [0, 1, 15, 31, 1000].map(|sent| sent_together(bytes, true, sent));
            assert_eq!(together, [1, 15, 15, 30, 30]);
        }
        assert_eq!([17 << 10, 64 << 10].map(|bytes| sent_together(bytes, true, 1)), [3, 1]);
    }
}
