//! Set-up of a channel's lane: both ends listen once, exchange handles, connect and accept.
//!
//! ```text
//!   a thread:  listen ── handle ──> peer          (handle is here) accept ... accept ── close the listener
//!   a thread:                       handle <── peer          connect ... connect
//! ```
//!
//! Each call runs on its own thread: some plugins block in `accept`, and a `connect` takes seconds. The
//! control thread only checks the clock. A cancelled attempt continues in its thread until the plugin
//! answers; then its result is closed there. An attempt that gets no answer is abandoned after a while.
//!
//! Calls of GPUDirect-TCPX that use state shared between connections must not overlap (`setup_lock.rs`):
//! `listen`, and `accept` after its first call. The first `accept` call is exempt: it only starts a thread of
//! the plugin, and a plugin that blocks does so there, which would block all others. `connect` begins after
//! this end's `listen` has returned, and uses only its own state.
//!
//! Invariant: a listener is closed only after its `accept` has ended; otherwise it is leaked, and the leak is
//! logged.
//! Read next: `lane.rs`, the result.

use super::host::Host;
use super::lane::PluginLane;
use super::setup_lock::SETUP_LOCK;
use super::tcpx;
use crate::payload::lane::{Progress, Setup};
use ferrywire_memory::unpack::Gather;
use ferrywire_ncclnet::abi::HANDLE_BYTES;
use ferrywire_ncclnet::{Call, CallError, Handle, RecvComm, SendComm, log};
use ferrywire_proto::limits;
use ferrywire_sys::poll::Waker;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The set-up of one lane.
pub(crate) struct PluginSetup {
    host: Arc<Host>,
    device: i32,
    started: Duration,
    shared: Arc<Shared>,
    connecting: bool,
    /// When the failure was first noticed.
    failed_at: Option<Duration>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Whether the control side no longer waits for the lane.
    given_up: AtomicBool,
    /// Number of the first line in the plugin's log that concerns this set-up.
    log_began: u64,
    /// Wakes the thread that polls the set-up.
    waker: Waker,
}

#[derive(Default)]
struct State {
    handle: Option<Handle>,
    /// Whether `listen` has returned, so that the plugin's record of the GPU is complete.
    listens: bool,
    /// Whether the peer's handle has arrived, so that `accept` has a peer to wait for.
    accept: bool,
    recv: Option<(RecvComm, Option<Gather>)>,
    send: Option<SendComm>,
    failed: Option<Failed>,
}

/// Why the lane cannot be set up.
#[derive(Clone)]
struct Failed {
    why: String,
    /// Whether the plugin gives no cause. The failure may then follow from one at the other end, which will
    /// report it.
    may_follow: bool,
}

impl From<String> for Failed {
    fn from(why: String) -> Failed {
        Failed { why, may_follow: false }
    }
}

impl PluginSetup {
    /// Starts to listen on a device. The set-up wakes `waker` whenever there is progress.
    pub fn start(host: &Arc<Host>, device: i32, now: Duration, waker: Waker) -> Result<PluginSetup, String> {
        let (state, changed, given_up) = Default::default();
        let log_began = log::next_sequence();
        let shared = Arc::new(Shared { state, changed, given_up, log_began, waker });
        let setup = PluginSetup {
            host: host.clone(),
            device,
            started: now,
            shared,
            connecting: false,
            failed_at: None,
        };
        setup.spawn("accept", accept)?;
        Ok(setup)
    }

    fn spawn(
        &self,
        what: &str,
        body: impl FnOnce(&Host, i32, &Shared) -> Result<(), Failed> + Send + 'static,
    ) -> Result<(), String> {
        let (host, device, shared) = (self.host.clone(), self.device, self.shared.clone());
        let thread = thread::Builder::new().name(format!("ferrywire-{what}")).spawn(move || {
            let result = host.with_gpu_current(|| Ok(body(&host, device, &shared)));
            if let Err(failed) = result.map_err(Failed::from).flatten() {
                if shared.given_up() && !failed.may_follow {
                    tracing::warn!("{}", failed.why);
                }
                let mut state = shared.lock();
                if state.failed.as_ref().is_none_or(|earlier| earlier.may_follow && !failed.may_follow) {
                    state.failed = Some(failed);
                }
            }
            shared.waker.wake();
        });
        thread.map(drop).map_err(|error| format!("cannot start a thread for {what}: {error}"))
    }
}

impl Setup for PluginSetup {
    /// Connects to the peer's handle, and accepts the peer.
    fn peer_listens(&mut self, handle: [u8; HANDLE_BYTES]) -> Result<(), String> {
        if std::mem::replace(&mut self.connecting, true) {
            return Err("the peer sent two plugin handles for one channel".into());
        }
        let name = self.host.plugin.name();
        if tcpx::is(name) && tcpx::holds_pointer(&handle) {
            return Err(format!(
                "the peer's handle has a pointer in it, which {name} would follow here; use the same version of the plugin \
                 at both ends"
            ));
        }
        self.shared.lock().accept = true;
        self.shared.changed.notify_all();
        let handle = Handle::from_bytes(handle);
        self.spawn("connect", move |host, device, shared| connect(host, device, shared, &handle))
    }

    /// Returns progress since the last call.
    fn poll(&mut self, now: Duration) -> Progress {
        let mut state = self.shared.lock();
        if let Some(handle) = state.handle.take() {
            return Progress::Handle(Box::new(*handle.bytes()));
        }
        if let Some(failed) = &state.failed {
            let since = *self.failed_at.get_or_insert(now);
            let grace = limits::LANE_FAILURE_GRACE.min(self.host.config.setup_timeout / 2);
            let waits = failed.may_follow && now.saturating_sub(since) < grace;
            return if waits { Progress::Pending } else { Progress::Failed(failed.why.clone()) };
        }
        if state.send.is_some()
            && let Some((recv, gather)) = state.recv.take()
            && let Some(send) = state.send.take()
        {
            let lane = PluginLane::new(self.host.clone(), send, recv, gather);
            let by = lane.by();
            return Progress::Ready(Box::new(lane), by);
        }
        let limit = self.host.config.setup_timeout;
        if now.saturating_sub(self.started) <= limit {
            return Progress::Pending;
        }
        let missing = match (&state.send, &state.recv) {
            _ if !self.connecting => "the peer has not sent its handle",
            (None, None) => "neither connect nor accept has ended",
            (None, _) => "connect has not ended",
            _ => "accept has not ended",
        };
        // The call may be another channel's, for which this channel's calls wait.
        let call = self.host.longest_call(limit / 2, self.age(now));
        let call = call.map_or_else(String::new, |call| format!("; {call}"));
        Progress::Failed(format!(
            "plugin {} on device {}: {missing} after {:.0} s{call}",
            self.host.plugin.name(),
            self.device,
            limit.as_secs_f64()
        ))
    }

    /// Time since the set-up began.
    fn age(&self, now: Duration) -> Duration {
        now.saturating_sub(self.started)
    }
}

impl Drop for PluginSetup {
    fn drop(&mut self) {
        self.shared.given_up.store(true, Ordering::SeqCst);
        self.shared.changed.notify_all();
        let (recv, send) = {
            let mut state = self.shared.lock();
            (state.recv.take(), state.send.take())
        };
        // The connections are unused. Closing them may block.
        if recv.is_some() || send.is_some() {
            let _detached = thread::Builder::new().name("ferrywire-close".into()).spawn(move || {
                recv.into_iter().for_each(|(comm, gather)| close_recv(comm, gather));
                send.into_iter().for_each(close_send);
            });
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn given_up(&self) -> bool {
        self.given_up.load(Ordering::SeqCst)
    }

    /// Waits until `happened` returns true; false if the set-up is cancelled first.
    fn wait_until(&self, happened: impl Fn(&State) -> bool) -> bool {
        let mut state = self.lock();
        while !happened(&state) && !self.given_up() {
            let waited = self.changed.wait_timeout(state, Duration::from_millis(100));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        happened(&state)
    }
}

fn accept(host: &Host, device: i32, shared: &Shared) -> Result<(), Failed> {
    let listening =
        until_ended(host, shared, || in_turn(host, true, || host.plugin.listen(device).map(Some)))?;
    let Some((mut listener, handle)) = listening else { return Ok(()) };
    {
        let mut state = shared.lock();
        (state.handle, state.listens) = (Some(handle), true);
    }
    shared.changed.notify_all();
    shared.waker.wake();
    let accepted = if shared.wait_until(|state| state.accept) {
        until_ended(host, shared, || in_turn(host, listener.is_accepting(), || listener.accept()))
    } else {
        Ok(None)
    };
    if listener.is_accepting() {
        host.leaked_listener("the accept has not ended");
    }
    if let Err(error) = listener.close() {
        tracing::debug!(%error, "cannot close a plugin's listener");
    }
    let Some(comm) = accepted? else { return Ok(()) };
    if shared.given_up() {
        close_recv(comm, None);
        return Ok(());
    }
    let gather = match host.gather_for(&comm) {
        Ok(gather) => gather,
        Err(why) => {
            close_recv(comm, None);
            return Err(why.into());
        }
    };
    let mut state = shared.lock();
    if shared.given_up() {
        drop(state);
        close_recv(comm, gather);
    } else {
        state.recv = Some((comm, gather));
    }
    Ok(())
}

/// Makes a set-up call that must not overlap with others. Returns `None` if another thread is in such a call.
/// A call that may wait for a peer is made without the lock.
fn in_turn<T>(
    host: &Host,
    only_polls: bool,
    call: impl FnOnce() -> Result<Option<T>, CallError>,
) -> Result<Option<T>, CallError> {
    if !only_polls || !host.takes_turns() {
        return call();
    }
    match SETUP_LOCK.acquire(limits::SETUP_LOCK_WAIT) {
        Some(_held) => call(),
        None => Ok(None),
    }
}

/// Polls until there is an answer. After cancellation it polls less often, and for `linger` at most.
fn until_ended<T>(
    host: &Host,
    shared: &Shared,
    mut ask: impl FnMut() -> Result<Option<T>, CallError>,
) -> Result<Option<T>, Failed> {
    if shared.given_up() {
        return Ok(None);
    }
    let mut given_up = None;
    loop {
        let failed = |error: CallError| {
            let (why, cause_is_known) = host.explain_failure(&error, shared.log_began);
            let may_follow = !cause_is_known && matches!(error.call, Call::Accept | Call::Connect);
            Failed { why, may_follow }
        };
        if let Some(made) = ask().map_err(failed)? {
            return Ok(Some(made));
        }
        if !shared.given_up() {
            thread::sleep(limits::LANE_SETUP_INTERVAL);
            continue;
        }
        if given_up.get_or_insert_with(Instant::now).elapsed() > host.linger() {
            return Ok(None);
        }
        thread::sleep(limits::LANE_LINGER_INTERVAL);
    }
}

fn connect(host: &Host, device: i32, shared: &Shared, handle: &Handle) -> Result<(), Failed> {
    if !shared.wait_until(|state| state.listens) {
        return Ok(());
    }
    let mut attempt = host.plugin.connect(device, handle);
    let Some(comm) = until_ended(host, shared, || attempt.poll())? else { return Ok(()) };
    let mut state = shared.lock();
    if shared.given_up() {
        drop(state);
        close_send(comm);
    } else {
        state.send = Some(comm);
    }
    Ok(())
}

fn close_recv(comm: RecvComm, gather: Option<Gather>) {
    drop(gather);
    if let Err(error) = comm.close() {
        tracing::debug!(%error, "cannot close an unused receiving connection of a plugin");
    }
}

fn close_send(comm: SendComm) {
    if let Err(error) = comm.close() {
        tracing::debug!(%error, "cannot close an unused sending connection of a plugin");
    }
}
