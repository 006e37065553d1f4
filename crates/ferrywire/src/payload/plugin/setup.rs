//! How a channel gets its lane: both ends listen once, tell each other the handle, connect and accept.
//!
//! ```text
//!   a thread:  listen ── handle ──> peer          (told to go on) accept ... accept ── close the listener
//!   a thread:                       handle <── peer          connect ... connect
//! ```
//!
//! Each call runs on a thread of its own: some plugins block in `accept`, and a `connect` takes seconds. Who
//! waits for the lane looks at the clock alone. An attempt that is given up goes on in its thread until the
//! plugin answers; then what it made is closed there. One that never answers is left as it is after a while.
//!
//! Calls of GPUDirect-TCPX that touch what its connections share take turns (`setup_lock.rs`): `listen`, and `accept` once
//! it was seen to poll. Not its first call, which only starts a thread of the plugin's: a plugin that blocks, does so
//! there, and would keep all others from it. `connect` begins when this end's `listen` has returned, and touches its own
//! attempt alone.
//!
//! Invariant: a listener is closed only when its `accept` has ended; else it is leaked, and said so.
//! Read next: `lane.rs`, what comes of it.

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
    /// When it was first seen to have failed.
    failed_at: Option<Duration>,
}

struct Shared {
    state: Mutex<State>,
    told: Condvar,
    /// Nobody waits for the lane any more.
    given_up: AtomicBool,
    /// Lines of the plugin's log from this number on are about the set-up.
    log_began: u64,
    /// Wakes whoever polls the set-up.
    waker: Waker,
}

#[derive(Default)]
struct State {
    handle: Option<Handle>,
    /// `listen` has returned: what the plugin keeps of the GPU is complete.
    listens: bool,
    /// The peer is there: `accept` has somebody to wait for.
    accept: bool,
    recv: Option<(RecvComm, Option<Gather>)>,
    send: Option<SendComm>,
    failed: Option<Failed>,
}

/// Why there is no lane.
#[derive(Clone)]
struct Failed {
    why: String,
    /// The plugin does not say why, so it may follow from what has happened at the other end, which is about to say so.
    may_follow: bool,
}

impl From<String> for Failed {
    fn from(why: String) -> Failed {
        Failed { why, may_follow: false }
    }
}

impl PluginSetup {
    /// Begins to listen on a device; `waker` is used whenever there is something new.
    pub fn start(host: &Arc<Host>, device: i32, now: Duration, waker: Waker) -> Result<PluginSetup, String> {
        let (state, told, given_up) = Default::default();
        let log_began = log::next_sequence();
        let shared = Arc::new(Shared { state, told, given_up, log_began, waker });
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
        thread.map(drop).map_err(|error| format!("no thread for {what}: {error}"))
    }
}

impl Setup for PluginSetup {
    /// The peer's handle has come: connects to it, and waits for the peer.
    fn peer_listens(&mut self, handle: [u8; HANDLE_BYTES]) -> Result<(), String> {
        if std::mem::replace(&mut self.connecting, true) {
            return Err("the peer told two handles for one channel".into());
        }
        let name = self.host.plugin.name();
        if tcpx::is(name) && tcpx::holds_pointer(&handle) {
            return Err(format!(
                "the peer's handle has a pointer in it, which {name} would follow here; use the same version of the plugin \
                 at both ends"
            ));
        }
        self.shared.lock().accept = true;
        self.shared.told.notify_all();
        let handle = Handle::from_bytes(handle);
        self.spawn("connect", move |host, device, shared| connect(host, device, shared, &handle))
    }

    /// What has happened since it was last asked.
    fn poll(&mut self, now: Duration) -> Progress {
        let mut state = self.shared.lock();
        if let Some(handle) = state.handle.take() {
            return Progress::Handle(Box::new(*handle.bytes()));
        }
        if let Some(failed) = &state.failed {
            let since = *self.failed_at.get_or_insert(now);
            let grace = limits::LANE_FAILURE_GRACE.min(self.host.config.setup_limit / 2);
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
        let limit = self.host.config.setup_limit;
        if now.saturating_sub(self.started) <= limit {
            return Progress::Pending;
        }
        let missing = match (&state.send, &state.recv) {
            _ if !self.connecting => "the peer has not told its handle",
            (None, None) => "neither connect nor accept has ended",
            (None, _) => "connect has not ended",
            _ => "accept has not ended",
        };
        // It may be another channel's, which this one's calls wait for.
        let call = self.host.longest_call(limit / 2, self.age(now));
        let call = call.map_or_else(String::new, |call| format!("; {call}"));
        Progress::Failed(format!(
            "plugin {} on device {}: {missing} after {:.0} s{call}",
            self.host.plugin.name(),
            self.device,
            limit.as_secs_f64()
        ))
    }

    /// Time since it began.
    fn age(&self, now: Duration) -> Duration {
        now.saturating_sub(self.started)
    }
}

impl Drop for PluginSetup {
    fn drop(&mut self) {
        self.shared.given_up.store(true, Ordering::SeqCst);
        self.shared.told.notify_all();
        let (recv, send) = {
            let mut state = self.shared.lock();
            (state.recv.take(), state.send.take())
        };
        // Nobody has used them; closing may block, though.
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

    /// Waits until something has happened; false when it is given up before.
    fn wait_until(&self, happened: impl Fn(&State) -> bool) -> bool {
        let mut state = self.lock();
        while !happened(&state) && !self.given_up() {
            let waited = self.told.wait_timeout(state, Duration::from_millis(100));
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
    shared.told.notify_all();
    shared.waker.wake();
    let accepted = if shared.wait_until(|state| state.accept) {
        until_ended(host, shared, || in_turn(host, listener.is_accepting(), || listener.accept()))
    } else {
        Ok(None)
    };
    if listener.is_accepting() {
        host.leaked_listener("its accept has not ended");
    }
    if let Err(error) = listener.close() {
        tracing::debug!(%error, "a listener");
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

/// Makes a call of a plugin whose set-up calls take turns, unless another thread is in one: then there is no answer yet.
/// A call that may wait for a peer is made at once.
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

/// Asks until there is an answer. Once nobody waits for it that is asked less often, and not for ever.
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
        tracing::debug!(%error, "closing what was not used");
    }
}

fn close_send(comm: SendComm) {
    if let Err(error) = comm.close() {
        tracing::debug!(%error, "closing what was not used");
    }
}
